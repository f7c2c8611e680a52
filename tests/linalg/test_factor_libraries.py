"""Protected factorisations and solutions on arrays of other libraries: array_api_strict here, CuPy on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import (
    SilentDataCorruptionError,
    Status,
    arrays,
    protected_cho_factor,
    protected_cholesky,
    protected_lu_factor,
    protected_lu_solve,
    protected_solve,
)
from tests.support.factor_cases import DTYPES, backward_error, cholesky_outside, lu_outside, positive, unit
from tests.support.planting import normal

IDS = [dtype.name for dtype in DTYPES]
SHAPES = [(40, 40), (50, 30), (30, 50), (1, 1), (7, 1), (1, 7)]


@pytest.fixture(params=["strict", pytest.param("cupy", marks=pytest.mark.gpu)])
def there(request: pytest.FixtureRequest) -> Callable[[np.ndarray], Any]:
    """Takes an array to the library."""
    return pytest.importorskip("array_api_strict" if request.param == "strict" else "cupy").asarray


def scale(there: Callable[[np.ndarray], Any]) -> int:
    """How many times as large as here a matrix has to be, to be factored in several steps: a GPU's have 128 columns."""
    return 8 if there.__module__.startswith("cupy") else 1


def here(x: Any) -> np.ndarray:
    return np.array(arrays.to_host(x))


def element_of(name: str, where: tuple[int, ...], value: float, stage: str = "updated", step: int = 0) -> Any:
    """A hook that writes one element, once."""
    done: list[str] = []

    def hook(reached: str, live: Any) -> None:
        if reached == stage and live.get("step", (step,))[0] == step and not done:
            done.append(reached)
            live[name][where] = value

    return hook


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_factors_stay_in_the_library(there: Any, shape: tuple[int, int], mode: str, dtype: Any) -> None:
    a = normal(*shape, dtype=dtype)
    (lu, piv), report = protected_lu_factor(there(a), mode=mode, block=8, return_report=True)
    assert report.status is Status.CLEAN
    assert arrays.namespace(lu) is arrays.namespace(piv) is arrays.namespace(there(a))
    assert not lu_outside(here(lu), here(piv), a).any()
    np.testing.assert_array_equal(here(piv), linalg.lu_factor(a)[1])


def test_stacks_stay_in_the_library(there: Any) -> None:
    a, b = normal(2, 20, 20), normal(2, 20, 3, seed=1)
    definite = a @ a.swapaxes(-1, -2) + 20 * np.eye(20)
    (lu, piv), of_lu = protected_lu_factor(there(a), return_report=True)
    factor, of_cholesky = protected_cholesky(there(definite), lower=True, return_report=True)
    x, of_solution = protected_solve(there(a), there(b), return_report=True)
    for report in (of_lu, of_cholesky, of_solution):
        assert report.status is Status.CLEAN
        assert [one.index for one in report.products] == [(0,), (1,)]
    for i in range(2):
        assert not lu_outside(here(lu)[i], here(piv)[i], a[i]).any()
        np.testing.assert_allclose(here(factor)[i], linalg.cholesky(definite[i], lower=True), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(here(x)[i], linalg.solve(a[i], b[i]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize(
    ("name", "where", "value", "stage"),
    [
        ("W", (25, 27), 100.0, "updated"),
        ("W", (25, 27), np.nan, "updated"),
        ("W", (3, 30), np.inf, "solved"),
        ("W", (20, 2), 0.3, "panel"),
        ("W", (20, 2), 50.0, "updated"),
        ("Z", (20,), 1e4, "updated"),
        ("S", (20,), 1e4, "updated"),
        ("g", (3,), 1e4, "updated"),
    ],
    ids=lambda x: str(x),
)
def test_a_fault_is_repaired(there: Any, name: str, where: Any, value: float, stage: str, dtype: Any) -> None:
    times = scale(there)
    a = normal(40 * times, 40 * times, dtype=dtype)
    hook = element_of(name, tuple(times * i for i in where), value, stage)
    with np.errstate(all="ignore"):
        (lu, piv), report = protected_lu_factor(there(a), mode="online", block=8, return_report=True, on_stage=hook)
    if times > 1 and name in "SZg":  # what the step made is right, and no sum of the end has been changed
        assert report.status is Status.CLEAN
    else:
        assert report.status in (Status.CORRECTED, Status.CHECKSUM_FAULT)
    assert not lu_outside(here(lu), here(piv), a).any()
    np.testing.assert_array_equal(here(piv), linalg.lu_factor(a)[1])


def test_a_fault_offline_is_factored_again(there: Any) -> None:
    a = normal(40, 40)
    hook = element_of("W", (9, 30), 1e3, "factored")
    (lu, piv), report = protected_lu_factor(there(a), mode="offline", return_report=True, on_stage=hook)
    assert report.status is Status.CORRECTED
    assert not lu_outside(here(lu), here(piv), a).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("columns", [None, 1, 5])
def test_solutions(there: Any, columns: int | None, dtype: Any) -> None:
    a, b = normal(60, 60, dtype=dtype), normal(60, *([] if columns is None else [columns]), dtype=dtype)
    factors = protected_lu_factor(there(a), mode="online")
    for x in (
        protected_solve(there(a), there(b)),
        protected_solve(there(a), there(b), refine=True),
        protected_lu_solve(factors, there(b)),
    ):
        assert x.shape == b.shape
        assert backward_error(a, here(x), b) <= 60 * unit(dtype)
    x = protected_lu_solve(factors, there(b), trans=1)
    assert backward_error(a.T, here(x), b) <= 60 * unit(dtype)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_fault_in_a_substitution_is_repaired(there: Any, stage: str) -> None:
    a, b = normal(60, 60), normal(60)
    hook = element_of("z" if stage == "forward" else "x", (9, 0), 1e3, stage)
    x, report = protected_solve(there(a), there(b), return_report=True, on_stage=hook)
    assert report.status is Status.CORRECTED
    assert backward_error(a, here(x), b) <= 60 * unit(a.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
def test_cholesky(there: Any, lower: bool, dtype: Any) -> None:
    a = positive(70, dtype)
    c, report = protected_cholesky(there(a), lower=lower, block=16, return_report=True)
    assert report.status is Status.CLEAN
    assert not cholesky_outside(here(c), a, lower).any()
    other = here(protected_cho_factor(there(a), lower=lower, block=16)[0])
    half = np.tril if lower else np.triu
    np.testing.assert_array_equal(half(other), here(c))

    hook = element_of("W", (60, 40), 1e3)
    c, report = protected_cholesky(there(a), lower=lower, block=16, return_report=True, on_stage=hook)
    assert report.status is Status.CORRECTED
    assert not cholesky_outside(here(c), a, lower).any()


def test_a_matrix_that_has_changed_is_refused(there: Any) -> None:
    times = scale(there)
    original = normal(40 * times, 40 * times)
    a = there(original.copy())
    place = 30 * times, 20 * times
    faults = [element_of("A", place, 1e3, "panel"), element_of("W", place, 1e3)]

    def hook(stage: str, live: Any) -> None:
        for fault in faults:
            fault(stage, live)

    def call() -> Any:
        return protected_lu_factor(a, mode="online", block=8, return_report=True, on_stage=hook)

    with pytest.raises(SilentDataCorruptionError) as refused:
        call()
    assert refused.value.report.status is Status.INPUT_CHANGED


def test_two_libraries_in_one_call(there: Any) -> None:
    with pytest.raises(TypeError, match="move them to one library first"):
        protected_solve(there(normal(4, 4)), normal(4))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite(there: Any, bad: float) -> None:
    a = normal(20, 20)
    a[3, 4] = bad
    for call in (protected_lu_factor, protected_cholesky):
        with pytest.raises(ValueError, match="infs or NaNs"):
            call(there(a))
