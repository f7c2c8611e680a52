"""Where the processor takes subnormal numbers for zero, as torch and libraries of -ffast-math leave it: clean is clean,
faults are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import (
    Report,
    SilentDataCorruptionError,
    Status,
    errstate,
    protected_cholesky,
    protected_gemm,
    protected_lu_factor,
    protected_solve,
    verify_gemm,
)
from abft_tsm2.arrays import FLOATS
from abft_tsm2.core import row_sums
from abft_tsm2.core.flushing import flushes, flushing_mode
from tests.support.factor_cases import positive
from tests.support.flushing import MODES, flushing
from tests.support.planting import at, normal, put

IN_MODES = pytest.mark.parametrize("mode", list(MODES.values()), ids=list(MODES))
TYPES = pytest.mark.parametrize("dtype", [np.float64, np.float32])
ENDS = {np.float64: (-307, -305, -300, -160, 0), np.float32: (-37, -35, -30, -20, 0)}  # of 10, what data are scaled by


def products(dtype: Any, of_a: int, of_b: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A small product, a stack, one by the full procedure, with alpha and beta, and one verified afterwards."""
    a, b = (normal(24, 20, seed=1) * 10.0**of_a).astype(dtype), (normal(20, 18, seed=2) * 10.0**of_b).astype(dtype)
    for operand in (a, b):  # normal numbers only
        operand[abs(operand) < np.finfo(dtype).tiny] = 0
    c = normal(24, 18, seed=3).astype(dtype) * np.max(abs(a)) * np.max(abs(b))
    told = partial(protected_gemm, return_report=True)
    yield "small", partial(told, a, b)
    yield "stack", partial(told, np.stack([a] * 3), b)
    yield "full", partial(told, a, b, check="both", on_stage=lambda *_: None)
    yield "added", partial(told, a, b, c, alpha=0.75, beta=1.5)
    yield "verified", lambda: (None, verify_gemm(a, b, a @ b))


def systems(dtype: Any, scale: int) -> Iterator[tuple[str, Callable[..., Any]]]:
    n = 20
    a, x = ((normal(n, n) + 9 * np.eye(n)) * 10.0**scale).astype(dtype), normal(n).astype(dtype)
    s = (positive(n) * 10.0**scale).astype(dtype)
    for mode in ("offline", "online"):
        yield mode, partial(protected_lu_factor, a, mode=mode, return_report=True)
    yield "solve", partial(protected_solve, a, (a @ x).astype(dtype), return_report=True)
    yield "definite", partial(protected_solve, s, (s @ x).astype(dtype), assume_a="pos", return_report=True)
    yield "cholesky", partial(protected_cholesky, s, return_report=True)


@IN_MODES
def test_a_thread_is_asked_for_its_mode(mode: int) -> None:
    with flushing(0):
        assert not flushes()
    with flushing(mode):
        assert flushes()


def test_modes_are_told_apart() -> None:
    modes = set()
    for bits in (0, *MODES.values()):
        with flushing(bits):
            modes.add(flushing_mode())
    assert len(modes) == 4


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_sum_has_the_bits_of_its_threads_mode_whoever_helps(order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers that another mode has left behind add nothing to it."""
    x = np.asarray(np.ldexp(normal(2048, 160), -128), np.float32, order=order)  # subnormal
    w = normal(160, 2)
    monkeypatch.setattr(row_sums, "workers", lambda: 1)
    alone = {}
    for bits in (0, *MODES.values()):
        with flushing(bits):
            alone[bits] = row_sums.encoding_pass(x, w).tobytes()
    monkeypatch.setattr(row_sums, "workers", lambda: 4)
    for bits in (*MODES.values(), 0, *MODES.values()):
        with flushing(bits):
            found = {row_sums.encoding_pass(x, w).tobytes() for _ in range(20)}
        assert found == {alone[bits]}, hex(bits)


@IN_MODES
def test_smallest_numbers_are_what_they_are(mode: int) -> None:
    with flushing(mode):
        made = {kind.name: type(kind)(**vars(kind)).smallest_subnormal for kind in _fresh()}
        bits = {name: np.float64(x).view(np.uint64) for name, x in made.items()}
    assert bits["float64"] == 1
    assert made["float32"] == 2.0**-149


def _fresh() -> list[Any]:
    """Types whose numbers nobody has asked for."""
    return [
        type(kind)(kind.name, kind.bits, kind.precision, kind.min_exponent, kind.max_exponent)
        for kind in FLOATS.values()
    ]


@IN_MODES
@TYPES
def test_clean_products_are_clean(dtype: Any, mode: int) -> None:
    for end in ENDS[dtype]:
        for of_a, of_b in ((end, 0), (0, end), (end // 2, end // 2)):
            for name, call in products(dtype, of_a, of_b):
                with flushing(mode):
                    report: Report = call()[1]
                assert report.status is Status.CLEAN, (name, of_a, of_b, report)


@pytest.mark.filterwarnings("ignore:An ill-conditioned")  # LAPACK's estimate underflows as well, and SciPy warns
@IN_MODES
@TYPES
def test_clean_factors_and_solutions_are_clean(dtype: Any, mode: int) -> None:
    for end in ENDS[dtype]:
        for name, call in systems(dtype, end):
            with flushing(mode):
                report: Report = call()[1]
            assert report.status is Status.CLEAN, (name, end, report)


@IN_MODES
@TYPES
def test_faults_are_found(dtype: Any, mode: int) -> None:
    end = ENDS[dtype][2]
    a, b = (normal(24, 20) * 10.0**end).astype(dtype), normal(20, 18).astype(dtype)
    m = (normal(20, 20) * 10.0**end).astype(dtype)
    s = (positive(20) * 10.0**end).astype(dtype)
    wrong = dtype(10.0 ** (end + 2))
    told: Any = {"return_report": True}
    with flushing(mode):
        clean = a @ b
        c, found = protected_gemm(a, b, **told, on_stage=at("multiplied", "C", put((3, 4), wrong)))
        assert (found.status, found.faults[0].rows, found.faults[0].columns) == (Status.CORRECTED, (3,), (4,))
        np.testing.assert_allclose(c, clean, rtol=1e-4)
        _, found = protected_lu_factor(m, **told, mode="offline", on_stage=at("factored", "W", put((3, 4), wrong)))
        assert found.status is Status.CORRECTED
        clean[3, 4] = wrong
        with pytest.raises(SilentDataCorruptionError):
            verify_gemm(a, b, clean)
        _, found = protected_cholesky(s, **told, on_stage=at("finished", "W", put((7, 3), wrong)))
        assert not found.ok or found.status is Status.CORRECTED


def test_the_kept_bounds_of_small_products_are_of_their_mode() -> None:
    """One form, in one mode after the other."""
    a, b = (normal(24, 20) * 1e-36).astype(np.float32), normal(20, 18).astype(np.float32)
    for mode in (0, *MODES.values(), 0):
        with flushing(mode):
            bound = protected_gemm(a, b, return_report=True)[1].checks[0].bound
        assert (bound > 1e-37) == bool(mode)


@IN_MODES
def test_what_subnormal_operands_account_for_is_named(mode: int) -> None:
    """C with terms that this thread takes for zero may come from one that does not, and the other way round."""
    a, b = np.zeros((3, 4)), np.ones((4, 5)) * 2.0**600
    a[:, 0] = 2.0**-1060
    a[1] = 2.0**-600
    for terms in (0.0, 2.0**-460):
        c = np.repeat([[terms], [4.0], [terms]], 5, axis=1)
        with flushing(mode), errstate(unverifiable="ignore"):
            report = verify_gemm(a, b, c, on_error="detect")
        assert report.status in (Status.CLEAN, Status.UNVERIFIABLE), report
        assert report.faults == ()
        assert all("flush-to-zero" in reason for reason in report.reasons)
        c[0, 2] = 1.0
        with flushing(mode):
            assert verify_gemm(a, b, c, on_error="detect").status is Status.UNCORRECTABLE
