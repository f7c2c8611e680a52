"""Cholesky by cuSOLVER and the kernels that certify it: factors, verdicts, and faults planted on the way."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Status, protected_cho_factor, protected_cholesky
from abft_tsm2.errors import UnverifiableWarning
from abft_tsm2.linalg import cholesky
from abft_tsm2.linalg.device.cholesky_plan import ENCODED, FACTORED, factor_definite_on_device
from tests.support.cholesky_cases import MATRICES, factored_by_blocks
from tests.support.factor_cases import DTYPES, cholesky_outside, positive, unit
from tests.support.planting import normal

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

IDS = [dtype.name for dtype in DTYPES]
SIZES = (1, 2, 31, 64, 65, 129, 300, 1000, 1003)
LARGE = 4500  # where cuSOLVER goes by blocks, and tiles are as wide as they get


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return factored_by_blocks(monkeypatch)


def right(c: Any, A: Any, lower: bool) -> bool:
    """Whether c is the factor of a CuPy matrix, by norms: |A - L L'| is a few n units of rounding at most."""
    L = (cupy.tril(c) if lower else cupy.triu(c).T).astype(float)
    half = (cupy.tril(A) if lower else cupy.triu(A).T).astype(float)
    whole = half + cupy.tril(half, -1).T
    distance = float(cupy.linalg.norm(whole - L @ L.T) / cupy.linalg.norm(whole))
    return distance <= len(A) ** 0.5 * 4 * unit(A.dtype)


def definite(n: int, dtype: Any) -> Any:
    x = cupy.random.default_rng(n).standard_normal((n, n), dtype=np.float64)
    return (x @ x.T / n + cupy.eye(n)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("n", SIZES)
def test_factors_of_every_size(by_blocks: Any, n: int, order: str, lower: bool, dtype: Any) -> None:
    a = positive(n, dtype)
    A = cupy.asarray(a, order=order)
    c, report = protected_cholesky(A, lower=lower, return_report=True)
    assert report.status is Status.CLEAN
    assert (c.dtype, c.shape) == (dtype, (n, n))
    assert c.flags.f_contiguous
    assert report.checks[0].verified == n
    assert report.checks[0].closest < 0.7
    assert not (cupy.triu(c, 1) if lower else cupy.tril(c, -1)).any()
    assert bool((cupy.asarray(a) == A).all())
    if n <= 300:
        assert not cholesky_outside(c.get(), a, lower).any()
    else:
        assert right(c, A, lower)
    assert not by_blocks


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
def test_large_matrices(by_blocks: Any, lower: bool, dtype: Any) -> None:
    A = definite(LARGE, dtype)
    for order in ("C", "F"):
        c, report = protected_cholesky(cupy.asarray(A, order=order), lower=lower, return_report=True)
        assert report.status is Status.CLEAN
        assert right(c, A, lower)
        assert not (cupy.triu(c, 1) if lower else cupy.tril(c, -1)).any()
    assert not by_blocks


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_matrices_of_all_kinds(by_blocks: Any, dtype: Any, name: str) -> None:
    if name == "graded" and dtype == np.float32:
        pytest.skip("a diagonal beyond the range of float32")
    for n in (130, 700):
        a = MATRICES[name](n).astype(dtype)
        c = protected_cholesky(cupy.asarray(a), lower=True)
        if n == 130:
            assert not cholesky_outside(c.get(), a, True).any()
    assert not by_blocks


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
def test_views_of_any_strides(by_blocks: Any, lower: bool, dtype: Any) -> None:
    whole = np.full((900, 800), np.nan, dtype)
    for rows, columns in (
        (slice(1, 601, 2), slice(3, 303)),
        (slice(300, 0, -1), slice(5, 305)),
        (slice(7, 307), slice(1, 601, 2)),
        (slice(3, 603, 2), slice(1, 601, 2)),
    ):
        whole[rows, columns] = a = positive(300, dtype)
        x = cupy.asarray(whole)
        c = protected_cholesky(x[rows, columns], lower=lower)
        assert not cholesky_outside(c.get(), a, lower).any()
        np.testing.assert_array_equal(x.get(), whole)
        whole[:] = np.nan
    assert not by_blocks


@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_other_triangle_is_as_it_was(by_blocks: Any, order: str, lower: bool) -> None:
    a = positive(700)
    beside = np.triu(normal(700, 700), 1) if lower else np.tril(normal(700, 700), -1)
    given = (np.tril(a) if lower else np.triu(a)) + beside
    given[(0, 699) if lower else (699, 0)] = np.nan
    c, flag = protected_cho_factor(cupy.asarray(given, order=order), lower=lower, check_finite=False)
    outside = np.triu(np.ones((700, 700), bool), 1) if lower else np.tril(np.ones((700, 700), bool), -1)
    np.testing.assert_array_equal(c.get()[outside], given[outside])
    assert flag is lower
    assert right(c, cupy.asarray(a), lower)
    assert not by_blocks


def test_stacks(by_blocks: Any) -> None:
    a = np.stack([positive(140, seed=seed) for seed in range(4)]).reshape(2, 2, 140, 140)
    c, report = protected_cholesky(cupy.asarray(a), return_report=True)
    assert report.status is Status.CLEAN
    assert [one.index for one in report.products] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for at in np.ndindex(2, 2):
        assert not cholesky_outside(c.get()[at], a[at], False).any()
    assert not by_blocks
    a[1, 1, 3, 30] = np.inf
    a[0, 0] *= -1
    with pytest.raises(ValueError, match="infs or NaNs"):
        protected_cholesky(cupy.asarray(a))


def test_the_same_bits_every_time() -> None:
    A = definite(1500, np.float64)
    found = {protected_cholesky(A).get().tobytes() for _ in range(3)}
    assert len(found) == 1


def test_on_streams_and_in_threads() -> None:
    """Matrices made on a stream are not read before they are there, nor is what comes behind early."""
    wrong: list[int] = []

    def work(seed: int) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for n in (300, 900, 300):
                a = cupy.asarray(positive(n, seed=seed))
                for _ in range(20):
                    A = a * 4  # queued only
                    c = protected_cholesky(A, lower=True)
                    del A
                    if not right(c, a * 4, True):
                        wrong.append(n)
            assert cupy.cuda.get_current_stream() == stream

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- what has no factor ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
@pytest.mark.parametrize("where", [(5, 260), (260, 5), (131, 131)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite(bad: float, where: tuple[int, int], lower: bool) -> None:
    a = positive(270)
    a[where] = bad
    for call in (protected_cholesky, protected_cho_factor):
        with pytest.raises(ValueError, match="infs or NaNs"):
            call(cupy.asarray(a), lower=lower)
    read = where[0] >= where[1] if lower else where[0] <= where[1]
    if not read:
        c, report = protected_cholesky(cupy.asarray(a), lower=lower, check_finite=False, return_report=True)
        assert report.status is Status.CLEAN
        assert not cholesky_outside(c.get(), positive(270), lower).any()
    elif np.isnan(bad):
        with pytest.warns(UnverifiableWarning):
            protected_cholesky(cupy.asarray(a), lower=lower, check_finite=False)


@pytest.mark.parametrize("minor", [1, 51, 700])
def test_a_matrix_that_is_not_definite(by_blocks: Any, minor: int) -> None:
    a = positive(700)
    a[minor - 1, minor - 1] = -1
    with pytest.raises(linalg.LinAlgError, match=f"^{minor}-th leading minor"):
        protected_cholesky(cupy.asarray(a))
    assert by_blocks == [700]


def test_shapes_come_after_what_is_not_finite() -> None:
    with pytest.raises(ValueError, match="infs or NaNs"):
        protected_cholesky(cupy.full((2, 3), np.nan))
    with pytest.raises(ValueError, match="square"):
        protected_cholesky(cupy.ones((2, 3)))


# ---- planted faults --------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[str, str, Any, float, str]] = {  # stage, array, place, what by, and what is short then
    "an element of L": (FACTORED, "W", (260, 20), 1.5, "right"),
    "the copy of A": (ENCODED, "W", (260, 20), 1.5, "right"),
    "a sign": (FACTORED, "W", (slice(None), 40), -1, "positive"),
    "NaN": (FACTORED, "W", (260, 20), np.nan, "right"),
    "Z": (ENCODED, "Z", 33, 1.5, "right"),
    "w": (ENCODED, "w", 33, 1.5, "right"),
    "tiles that were not encoded": (ENCODED, "encoded", 0, 0, "encoded"),
    "tiles that are not finite beside": (FACTORED, "finite_beside", 0, 0, "finite_beside"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_repaired_from_a(by_blocks: Any, monkeypatch: pytest.MonkeyPatch, name: str, dtype: Any) -> None:
    stage, array, where, factor, short = FAULTS[name]
    missing: list[Any] = []

    def plant(reached: str, arrays: Any) -> None:
        if reached == stage:
            arrays[array][where] = arrays[array][where] * factor

    def planted(A: Any, **options: Any) -> Any:
        run = factor_definite_on_device(A, **options, after=plant)
        missing.append(run.missing)
        return run

    monkeypatch.setattr(cholesky, "factor_definite_on_device", planted)
    a = positive(270, dtype)
    c, report = protected_cholesky(cupy.asarray(a), lower=True, return_report=True)
    assert short in missing[0]
    harmless = name in ("Z", "w", "tiles that were not encoded", "tiles that are not finite beside")
    assert by_blocks == ([] if harmless else [270])
    assert report.status is (Status.CLEAN if harmless else Status.CORRECTED)
    assert not cholesky_outside(c.get(), a, True).any()


def test_a_small_fault_is_seen() -> None:
    """An element of L that is off by 1e-12, where the diagonal of A is 2."""
    A = definite(2000, np.float64)

    def plant(reached: str, arrays: Any) -> None:
        if reached == FACTORED:
            arrays["W"][1500, 700] += 1e-12

    run = factor_definite_on_device(A, lower=True, clear=True, check_finite=True, after=plant)
    assert run.missing == ("right",)
    assert not factor_definite_on_device(A, lower=True, clear=True, check_finite=True).missing
