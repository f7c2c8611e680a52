"""Cholesky by kernels and potrf, all of it on the CPU: what is launched with what, and what becomes of a suspicion."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import SilentDataCorruptionError, Status, protected_cho_factor, protected_cholesky
from abft_tsm2.errors import UnverifiableWarning
from abft_tsm2.linalg import cholesky
from abft_tsm2.linalg.device.cholesky_plan import ENCODED, FACTORED, factor_definite_on_device
from tests.support import solver_on_cpu
from tests.support.cholesky_cases import MATRICES, factored_by_blocks
from tests.support.factor_cases import DTYPES, cholesky_outside, positive
from tests.support.planting import normal

IDS = [dtype.name for dtype in DTYPES]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> Any:
    return solver_on_cpu.install(monkeypatch, build_cache)


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return factored_by_blocks(monkeypatch)


def arranged(cupy: Any, a: np.ndarray, order: str) -> Any:
    """The matrix with NaN around it, where it is part of another."""
    if order != "part":
        return cupy.asarray(np.asarray(a, order=order))
    whole = np.full((2 * len(a) + 3, len(a) + 5), np.nan, a.dtype)
    whole[1 : 2 * len(a) : 2, 2:-3] = a
    return cupy.asarray(whole)[1 : 2 * len(a) : 2, 2:-3]


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
@pytest.mark.parametrize("order", ["C", "F", "part"])
def test_factors_are_certified(cupy: Any, by_blocks: Any, order: str, lower: bool, dtype: Any) -> None:
    for n in (1, 3, 70, 150):
        a = positive(n, dtype)
        c, report = protected_cholesky(arranged(cupy, a, order), lower=lower, return_report=True)
        assert report.status is Status.CLEAN
        assert c.flags.f_contiguous
        assert not cholesky_outside(np.asarray(c), a, lower).any()
        assert not np.any(np.triu(c, 1) if lower else np.tril(c, -1))
        (check,) = report.checks
        assert (check.side, check.lines, check.verified) == ("columns", n, n)
        assert 0 <= check.closest < 0.6
    assert not by_blocks


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
def test_matrices_of_all_kinds(cupy: Any, by_blocks: Any, lower: bool, name: str) -> None:
    a = MATRICES[name](130)
    c = protected_cholesky(cupy.asarray(a), lower=lower)
    assert not cholesky_outside(np.asarray(c), a, lower).any()
    assert not by_blocks


@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_the_other_triangle_is_as_it_was(cupy: Any, by_blocks: Any, order: str, lower: bool) -> None:
    a = np.asarray(positive(130), order=order)
    beside = np.triu(normal(130, 130), 1) if lower else np.tril(normal(130, 130), -1)
    given = (np.tril(a) if lower else np.triu(a)) + beside
    if lower:
        given[0, 129] = np.nan  # allowed where nobody asks
    c, flag = protected_cho_factor(cupy.asarray(given), lower=lower, check_finite=not lower)
    outside = np.triu(np.ones((130, 130), bool), 1) if lower else np.tril(np.ones((130, 130), bool), -1)
    np.testing.assert_array_equal(np.asarray(c)[outside], given[outside])
    assert not cholesky_outside(np.asarray(c), a, lower).any()
    assert flag is lower
    assert not by_blocks


def test_a_second_run_finds_nothing_of_the_first(cupy: Any) -> None:
    for seed in range(3):
        a = positive(90, seed=seed)
        assert not cholesky_outside(np.asarray(protected_cholesky(cupy.asarray(a))), a, False).any()


def test_stacks(cupy: Any, by_blocks: Any) -> None:
    a = np.stack([positive(40, seed=seed) for seed in range(3)])
    c, report = protected_cholesky(cupy.asarray(a), lower=True, return_report=True)
    assert report.status is Status.CLEAN
    assert [one.index for one in report.products] == [(0,), (1,), (2,)]
    for i in range(3):
        assert not cholesky_outside(np.asarray(c)[i], a[i], True).any()
    assert not by_blocks
    a[2, 3, 30] = np.inf  # and the first one is not definite, which is said only of finite stacks
    a[0] *= -1
    with pytest.raises(ValueError, match="infs or NaNs"):
        protected_cholesky(cupy.asarray(a), lower=True)


@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
@pytest.mark.parametrize("where", [(5, 60), (60, 5), (31, 31)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite(cupy: Any, bad: float, where: tuple[int, int], lower: bool) -> None:
    a = positive(70)
    a[where] = bad
    with pytest.raises(ValueError, match="infs or NaNs"):
        protected_cholesky(cupy.asarray(a), lower=lower)
    read = where[0] >= where[1] if lower else where[0] <= where[1]
    if not read:
        c, report = protected_cholesky(cupy.asarray(a), lower=lower, check_finite=False, return_report=True)
        assert report.status is Status.CLEAN
        assert not cholesky_outside(np.asarray(c), positive(70), lower).any()
        return
    with pytest.warns(UnverifiableWarning) if np.isnan(bad) else pytest.raises((linalg.LinAlgError, Warning)):
        _, report = protected_cholesky(cupy.asarray(a), lower=lower, check_finite=False, return_report=True)
        assert report.status is Status.UNVERIFIABLE


def test_a_matrix_that_is_not_definite(cupy: Any, by_blocks: Any) -> None:
    a = positive(70)
    a[50, 50] = -1
    with pytest.raises(linalg.LinAlgError, match="51-th leading minor"):
        protected_cholesky(cupy.asarray(a))
    assert by_blocks == [70]


def test_shapes_come_after_what_is_not_finite(cupy: Any) -> None:
    with pytest.raises(ValueError, match="infs or NaNs"):
        protected_cholesky(cupy.asarray(np.full((2, 3), np.nan)))
    with pytest.raises(ValueError, match="square"):
        protected_cholesky(cupy.asarray(np.ones((2, 3))))


def test_a_hook_is_shown_the_blocks(cupy: Any, by_blocks: Any) -> None:
    stages: list[str] = []
    protected_cholesky(cupy.asarray(positive(70)), on_stage=lambda stage, arrays: stages.append(stage))
    assert by_blocks == [70]
    assert {"inputs", "encoded", "panel", "updated", "finished"} <= set(stages)


# ---- planted faults --------------------------------------------------------------------------------------------------

HARMLESS = {"Z", "w", "tiles that were not encoded", "tiles that are not finite", "tiles that are not finite beside"}
"""Faults that leave L right: evidence says so."""

FAULTS: dict[str, tuple[str, str, Any, float, str]] = {  # stage, array, place, what by, and what is short then
    "an element of L": (FACTORED, "W", (60, 20), 1.5, "right"),
    "the copy of A": (ENCODED, "W", (60, 20), 1.5, "right"),
    "a sign": (FACTORED, "W", (slice(None), 40), -1, "positive"),
    "NaN": (FACTORED, "W", (60, 20), np.nan, "right"),
    "Z": (ENCODED, "Z", 33, 1.5, "right"),
    "w": (ENCODED, "w", 33, 1.5, "right"),
    "tiles that were not encoded": (ENCODED, "encoded", 0, 0, "encoded"),
    "tiles that are not finite": (ENCODED, "finite", 0, 0, "finite"),
    "tiles that are not finite beside": (FACTORED, "finite_beside", 0, 0, "finite_beside"),
    "info": (FACTORED, "info", 0, 5, "definite"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_repaired_from_a(cupy: Any, by_blocks: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stage, array, where, factor, short = FAULTS[name]
    missing: list[Any] = []

    def plant(reached: str, arrays: Any) -> None:
        if reached == stage:
            x = arrays[array].view(np.int32) + 5 if array == "info" else arrays[array][where] * factor
            arrays[array][where] = x.view(np.float64)[0] if array == "info" else x

    def planted(A: Any, **options: Any) -> Any:
        run = factor_definite_on_device(A, **options, after=plant)
        missing.append(run.missing)
        return run

    monkeypatch.setattr(cholesky, "factor_definite_on_device", planted)
    a = positive(70)
    c, report = protected_cholesky(cupy.asarray(a), lower=True, return_report=True)
    assert short in missing[0]
    assert by_blocks == ([] if name in HARMLESS else [70])
    assert report.status is (Status.CLEAN if name in HARMLESS or name == "info" else Status.CORRECTED)
    assert report.suspicions == (name in HARMLESS)
    assert not cholesky_outside(np.asarray(c), a, True).any()


@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
@pytest.mark.parametrize("to", [1.5, -1e9])
def test_a_fault_is_not_repaired_from_another_matrix(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, to: float, lower: bool
) -> None:
    """A has changed since it was encoded; with -1e9 it is not definite any more, which is not what was asked."""

    def plant(reached: str, arrays: Any) -> None:
        if reached == FACTORED:
            arrays["A"][20, 20] = to
            arrays["W"][slice(None), slice(None)] *= 1.5

    planted = functools.partial(factor_definite_on_device, after=plant)
    monkeypatch.setattr(cholesky, "factor_definite_on_device", planted)
    with pytest.raises(SilentDataCorruptionError, match="changed"):
        protected_cholesky(cupy.asarray(positive(70)), lower=lower)
