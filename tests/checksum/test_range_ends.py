"""Systems near the ends of the range: clean ones are clean, planted faults are found, and overflow is no corruption."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import (
    SilentDataCorruptionError,
    Status,
    errstate,
    protected_gemm,
    protected_lu_factor,
    protected_lu_solve,
    protected_solve,
)
from tests.support.factor_cases import once, positive
from tests.support.planting import normal, put

SCALES = [
    (np.float64, a, b)
    for a, b in ((0, 305), (0, 306), (0, -305), (0, -290), (200, 0), (-200, 0), (300, 300), (-160, -160))
] + [(np.float32, a, b) for a, b in ((0, 36), (0, 37), (0, -36), (30, 30), (-30, -30))]
ENDS = pytest.mark.parametrize(("dtype", "of_a", "of_b"), SCALES, ids=[f"{d.__name__} {a} {b}" for d, a, b in SCALES])


def system(dtype: Any, of_a: int, of_b: int, *, definite: bool = False) -> tuple[Any, Any, Any]:
    """A, b and SciPy's factors; b has two columns."""
    n = 40
    a = positive(n) / n if definite else normal(n, n) + 20 * np.eye(n)
    a, b = a * 10.0**of_a, a @ normal(n, 2, seed=1) * (10.0**of_b / 4)
    a, b = a.astype(dtype), b.astype(dtype)
    return a, b, linalg.lu_factor(a)


def calls(a: Any, b: Any, factors: Any, *, definite: bool = False) -> list[Any]:
    options = {"assume_a": "pos"} if definite else {}
    return [
        partial(protected_solve, a, b, return_report=True, **options),
        partial(protected_solve, a, b, refine=True, return_report=True, **options),
        partial(protected_solve, a, b, transposed=True, return_report=True),
        partial(protected_lu_solve, factors, b, return_report=True),
        partial(protected_lu_solve, factors, b, 1, return_report=True),
    ]


@pytest.mark.parametrize("definite", [False, True], ids=["", "definite"])
@ENDS
def test_clean_systems_near_the_ends_of_the_range_are_clean(dtype: Any, of_a: int, of_b: int, definite: bool) -> None:
    a, b, factors = system(dtype, of_a, of_b, definite=definite)
    for number, call in enumerate(calls(a, b, factors, definite=definite)):
        x, report = call()
        assert (report.status, report.suspicions) == (Status.CLEAN, 0), (number, report)
        assert np.isfinite(x).all()
        expected = linalg.lu_solve(factors, b, trans=int(number in (2, 4)))
        far = np.max(np.abs(x / np.abs(expected).max() - expected / np.abs(expected).max()))
        assert far < 1e5 * np.finfo(dtype).eps


@pytest.mark.parametrize("seed", range(12))
def test_what_scipy_solves_is_no_corruption(seed: int) -> None:
    # |T| |x| is beyond the range where x and the residual are not.
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((80, 80)), rng.standard_normal((80, 2)) * 1e306
    for dtype, x in ((np.float64, b), (np.float32, b * 1e-270)):
        A, B = a.astype(dtype), x.astype(dtype)
        for trans, call in enumerate(calls(A, B, linalg.lu_factor(A))[-2:]):
            finite = np.isfinite(linalg.lu_solve(linalg.lu_factor(A), B, trans=trans)).all()
            with errstate(unverifiable="ignore"):
                assert call()[1].status is (Status.CLEAN if finite else Status.UNVERIFIABLE)
        for refine in (False, True):
            with errstate(unverifiable="ignore"):
                _, report = protected_solve(A, B, refine=refine, return_report=True)
            assert report.status is (Status.CLEAN if np.isfinite(linalg.solve(A, B)).all() else Status.UNVERIFIABLE)


def at_the_largest(change: Any, x: np.ndarray) -> None:
    at = np.unravel_index(np.argmax(np.abs(x)), x.shape)
    x[at] = change(x[at])


@ENDS
@pytest.mark.parametrize(("stage", "name"), [("forward", "z"), ("backward", "x")])
def test_faults_near_the_ends_of_the_range_are_found(stage: str, name: str, dtype: Any, of_a: int, of_b: int) -> None:
    a, b, factors = system(dtype, of_a, of_b)

    def off(value: Any) -> Any:
        return value * dtype(1.001)

    for call in calls(a, b, factors):
        exact, _ = call()
        for change in (off, lambda value: -value, lambda value: value * 0, lambda _: dtype(np.nan)):
            x, report = call(on_stage=once(stage, name, partial(at_the_largest, change)))
            assert report.status is Status.CORRECTED, report
            np.testing.assert_array_equal(x, exact)


@pytest.mark.parametrize(("dtype", "scale"), [(np.float64, 3e307), (np.float32, 5e37)])
@pytest.mark.parametrize("refine", [False, True])
def test_a_solution_that_overflows_cannot_be_verified(refine: bool, dtype: Any, scale: float) -> None:
    a, b = (normal(20, 20) / 8).astype(dtype), (normal(20, 2).clip(-3, 3) * scale).astype(dtype)
    factors = linalg.lu_factor(a)
    assert not np.isfinite(linalg.solve(a, b)).all()
    for call in (partial(protected_solve, a, b, refine=refine), partial(protected_lu_solve, factors, b)):
        with errstate(unverifiable="ignore"):
            _, report = call(return_report=True)
        assert report.status is Status.UNVERIFIABLE
        assert report.faults == ()
        assert any("not finite: it overflows" in reason and dtype.__name__ in reason for reason in report.reasons)


def test_why_a_solution_is_not_finite() -> None:
    piv, b = np.arange(3), np.ones(3)
    with errstate(unverifiable="ignore"), np.errstate(all="ignore"):
        _, report = protected_lu_solve((np.diag([1.0, 0, 1]), piv), b, return_report=True)
        assert report.reasons == ("the solution is not finite: the matrix is singular, a pivot is exactly zero",)
        lu = np.diag([1.0, np.inf, 1])
        lu[0, 1] = np.nan
        _, report = protected_lu_solve((lu, piv), b, check_finite=False, return_report=True)
        assert report.reasons == ("the solution is not finite: the factors are not finite",)
        lu[0, 1] = 0.0  # a pivot that is Inf leaves a zero
        x, report = protected_lu_solve((lu, piv), b, check_finite=False, return_report=True)
        assert np.array_equal(x, [1.0, 0.0, 1.0])
        assert (report.status, report.faults) == (Status.UNVERIFIABLE, ())
        assert report.reasons == ("the solution cannot be checked: the factors are not finite",)
        b[1] = np.nan
        _, report = protected_lu_solve((np.eye(3), piv), b, check_finite=False, return_report=True)
        assert report.reasons == ("the solution is not finite: the right-hand sides are not finite",)


def test_an_infinity_that_was_planted_is_not_taken_for_overflow() -> None:
    a, b, factors = system(np.float64, 0, 306)

    def stays(_: str, arrays: Any) -> None:
        if "x" in arrays:
            arrays["x"][7] = np.inf

    for call in (partial(protected_lu_solve, factors, b), partial(protected_solve, a, b)):
        with pytest.raises(SilentDataCorruptionError):
            call(on_stage=stays)
        _, report = call(on_stage=once("backward", "x", put((7, 0), np.inf)), return_report=True)
        assert report.status is Status.CORRECTED


@pytest.mark.parametrize("seed", range(8))
def test_refinement_gives_small_solutions_the_digits_that_they_can_have(seed: int) -> None:
    # b - A x of x near 1e-307 is below the smallest normal number, unless it is scaled: nothing would be refined.
    n = 60
    a = normal(n, n) * 2.0 ** (np.random.default_rng(seed).integers(-12, 12, (n, 1)) - 12)
    b = a @ normal(n, 1) * 1e-305
    x, report = protected_solve(a, b, refine=True, return_report=True)
    assert report.status is Status.CLEAN
    up = 2.0**1000  # of numbers near 1e-305: exact
    residual = np.abs(a @ (x * up) - b * up) / (np.abs(a) @ np.abs(x * up))
    assert residual.max() < 62 * 2.0**-53
    y = protected_solve(a, b * up, refine=True)
    assert np.max(np.abs(x * up - y)) <= 1e-12 * np.max(np.abs(y))


def test_threads_that_solve_the_same_system_at_once_find_the_same() -> None:
    a, b = normal(60, 60), normal(60, 3)
    functions: list[Callable[[], Any]] = [
        lambda: protected_solve(a, b, refine=True),
        lambda: protected_lu_factor(a, mode="online")[0],
        lambda: protected_gemm(a, b),
    ]
    expected = [function() for function in functions]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: functions[number % 3](), range(60)))
    for number, x in enumerate(found):
        np.testing.assert_array_equal(x, expected[number % 3])


@pytest.mark.parametrize("power", [1000, 1016, -990])
@pytest.mark.parametrize(("stage", "name"), [("forward", "z"), ("backward", "x"), ("refined", "x")])
def test_what_is_found_does_not_depend_on_the_scale(stage: str, name: str, power: int) -> None:
    a, b = normal(40, 40) + 20 * np.eye(40), normal(40, 3)
    found = []
    for up in (0, power):
        statuses = []
        for size in 2.0 ** np.arange(-54, -20, 3):
            hook = once(stage, name, partial(at_the_largest, lambda value, size=size: value * (1 + size)))
            report = protected_solve(a, np.ldexp(b, up), refine=True, return_report=True, on_stage=hook)[1]
            statuses.append(report.status)
        found.append(statuses)
    assert found[0] == found[1]
    assert {*found[0]} == {Status.CLEAN, Status.CORRECTED}
