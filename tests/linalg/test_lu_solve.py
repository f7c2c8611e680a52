"""`protected_lu_solve` in place of ``scipy.linalg.lu_solve``; faults in the substitutions of both solvers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import jsonschema
import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import (
    Report,
    SilentDataCorruptionError,
    Status,
    errstate,
    monitor,
    protected_lu_factor,
    protected_lu_solve,
    protected_solve,
)
from tests.support.cases import ORDERS, arrange
from tests.support.factor_cases import DTYPES, INPUTS, RIGHT, SIZES, described, once, outcome, right, solved
from tests.support.planting import bits, normal, put

IDS = [dtype.name for dtype in DTYPES]


def solve_lu(factors: Any, b: Any, **options: Any) -> np.ndarray:
    x, report = protected_lu_solve(factors, b, return_report=True, **options)
    assert report.status is Status.CLEAN, report
    return np.asarray(x)


def solve(a: Any, b: Any, **options: Any) -> np.ndarray:
    x, report = protected_solve(a, b, return_report=True, **options)
    assert report.status is Status.CLEAN, report
    return np.asarray(x)


# ---- lu_solve -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("trans", [0, 1, 2])
@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("n", SIZES)
def test_factors_go_both_ways(n: int, kind: str, trans: int, dtype: Any) -> None:
    a, b = normal(n, n, dtype=dtype), right(kind, n, dtype)
    ours, theirs = protected_lu_factor(a), linalg.lu_factor(a)
    system = a.T if trans else a
    for factors in (ours, theirs):
        x = solve_lu(factors, b, trans=trans)
        assert described(x) == described(linalg.lu_solve(theirs, b, trans=trans)) == (b.shape, dtype)
        assert x.flags.f_contiguous
        assert solved(x, system, b)
    assert solved(linalg.lu_solve(ours, b, trans=trans), system, b)


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_factors_and_right_hand_sides(order: str, trans: int) -> None:
    a, b = normal(70, 70), normal(70, 30, seed=1)
    lu, piv = linalg.lu_factor(a)
    given = arrange(b, order)
    given.flags.writeable = False
    x = solve_lu((arrange(lu, order), piv), given, trans=trans)
    assert solved(x, a.T if trans else a, b)
    np.testing.assert_array_equal(given, b)


@pytest.mark.parametrize("kind", sorted(set(INPUTS) - {"bool"}))
def test_kinds_of_right_hand_sides(kind: str) -> None:
    factors, b = linalg.lu_factor(normal(20, 20)), INPUTS[kind](normal(20, 3))
    x = solve_lu(factors, b)
    assert described(x) == described(linalg.lu_solve(factors, b)) == ((20, 3), np.float64)
    assert type(x) is np.ndarray


@pytest.mark.parametrize("left", DTYPES, ids=IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_mixed_types(left: Any, dtype: Any) -> None:
    a, b = normal(20, 20, dtype=left), normal(20, dtype=dtype)
    factors = linalg.lu_factor(a)
    assert described(solve_lu(factors, b)) == described(linalg.lu_solve(factors, b))
    assert described(solve(a, b)) == described(linalg.solve(a, b))


def test_pivots_of_other_types() -> None:
    a, b = normal(9, 9), normal(9)
    lu, piv = linalg.lu_factor(a)
    for pivots in (piv.tolist(), piv.astype(np.int64), piv[::1].copy()):
        assert solved(solve_lu((lu, pivots), b), a, b)
    assert solved(solve_lu([lu, piv], b), a, b)


@pytest.mark.parametrize("shape", [(0,), (0, 2)], ids=str)
def test_systems_without_equations(shape: tuple[int, ...]) -> None:
    factors, b = linalg.lu_factor(np.empty((0, 0))), np.empty(shape)
    assert described(solve_lu(factors, b)) == described(linalg.lu_solve(factors, b))
    assert described(solve(np.empty((0, 0)), b)) == described(linalg.solve(np.empty((0, 0)), b))


def test_no_right_hand_side() -> None:
    a, b = normal(5, 5), np.empty((5, 0))
    assert described(solve_lu(linalg.lu_factor(a), b)) == described(b)
    assert described(solve(a, b)) == described(b)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", RIGHT)
def test_overwrite_b(kind: str, overwrite: bool) -> None:
    a, b = normal(40, 40), np.asfortranarray(right(kind, 40))
    held, (lu, piv) = b.copy(), linalg.lu_factor(a)
    kept = lu.copy(), piv.copy()
    assert solved(solve_lu((lu, piv), b, overwrite_b=overwrite), a, held)
    assert overwrite or np.array_equal(bits(b), bits(held))
    b = np.asfortranarray(held)
    assert solved(solve(a, b, overwrite_b=overwrite), a, held)
    assert overwrite or np.array_equal(bits(b), bits(held))
    assert np.array_equal(lu, kept[0])
    assert np.array_equal(piv, kept[1])


@pytest.mark.parametrize("trans", [0, 1])
def test_batches_of_factors_and_right_hand_sides(trans: int) -> None:
    a = normal(4, 12, 12)
    factors = linalg.lu_factor(a[0])
    stacked = [np.stack(parts) for parts in zip(*map(linalg.lu_factor, a), strict=True)]
    for pair, systems, b in (
        (stacked, a, normal(4, 12, 3)),
        (stacked, a, normal(12, 3)),
        (stacked, a, normal(12)),
        (factors, a[:1], normal(4, 12, 3)),
    ):
        x, report = protected_lu_solve(pair, b, trans=trans, return_report=True)
        assert (x.shape, report.status) == ((4, *b.shape[-2:]), Status.CLEAN)
        for i in range(4):
            system = systems[i % len(systems)]
            assert solved(x[i], system.T if trans else system, b[i] if b.ndim == 3 else b)


@pytest.mark.parametrize("b", [np.ones(4), np.ones((4, 1)), np.ones((2, 3))], ids=lambda b: str(b.shape))
def test_right_hand_sides_of_other_lengths(b: np.ndarray) -> None:
    a = normal(3, 3)
    factors = linalg.lu_factor(a)
    ours, theirs = outcome(protected_lu_solve, factors, b), outcome(linalg.lu_solve, factors, b)
    assert ours.kind == theirs.kind
    assert isinstance(ours.error, ValueError)
    assert isinstance(outcome(protected_solve, a, b).error, ValueError)


def test_what_lu_solve_refuses() -> None:
    factors, b = linalg.lu_factor(normal(3, 3)), np.ones(3)
    for trans in (3, -1):
        with pytest.raises(ValueError, match="trans"):
            protected_lu_solve(factors, b, trans=trans)
    with pytest.raises(ValueError, match=r"square|shape|Shapes"):
        protected_lu_solve(linalg.lu_factor(normal(3, 2)), b)
    with pytest.raises(ValueError, match="on_error"):
        protected_lu_solve(factors, b, on_error="fix", on_stage=pytest.fail)
    for complex_ in ((factors, b + 0j), ((factors[0] + 0j, factors[1]), b)):
        with pytest.raises(TypeError, match="complex"):
            protected_lu_solve(*complex_)
    for piv in ([0, 1], [0, 1, 2, 2]):  # SciPy refuses these, in the words of its wrapper generator
        with pytest.raises(ValueError, match="piv"):
            protected_lu_solve((factors[0], piv), b)


@pytest.mark.parametrize(
    "piv",
    [[2, 2, 2 + 2**32], [2, 1.5, 2], [0, 1, np.nan], [0, 1, np.inf], [-(2**32), 1, 2], [False, True, True], ["0"] * 3],
    ids=str,
)
def test_pivots_that_are_no_rows_are_refused_where_scipy_cuts_them(piv: list[Any]) -> None:
    for lu, given in ((normal(3, 3), piv), (normal(3, 3), np.array(piv)), (normal(2, 3, 3), np.array([piv, piv]))):
        with pytest.raises((ValueError, TypeError), match="piv holds"):
            protected_lu_solve((lu, given), np.ones(3))


def test_pivots_that_are_whole_numbers_of_rows_are_taken_whatever_their_type() -> None:
    a = normal(3, 3)
    lu, piv = linalg.lu_factor(a)
    with pytest.raises(TypeError, match="piv is a masked array"):
        protected_lu_solve((lu, np.ma.array(piv, mask=[0, 1, 0])), np.ones(3))
    for wrong in (np.float64(2), piv[:2], np.stack([piv, piv])):
        with pytest.raises(ValueError, match=r"piv has shape .*: for an lu of \(3, 3\) it is \(3,\)"):
            protected_lu_solve((lu, wrong), np.ones(3))
    with pytest.raises(ValueError, match=r"piv has shape \(5, 3\): for an lu of \(2, 3, 3\) it is \(2, 3\)"):
        protected_lu_solve((np.stack([lu, lu]), np.stack([piv] * 5)), np.ones(3))
    for dtype in (np.int8, np.uint64, np.float32, np.float64):
        assert solved(solve_lu((lu, piv.astype(dtype)), np.ones(3)), a, np.ones(3))


@pytest.mark.parametrize("factors", [None, 5, (), (np.eye(2),), (np.eye(2),) * 3], ids=["None", "5", "0", "1", "3"])
def test_factors_are_a_pair(factors: Any) -> None:
    with pytest.raises(TypeError, match=r"the pair \(lu, piv\) is expected"):
        protected_lu_solve(factors, np.ones(2))


@pytest.mark.parametrize("piv", [[0, 1, 3], [-1, 1, 2], [0, 1, 10**6]], ids=str)
def test_pivots_that_lead_out_of_the_matrix_are_refused(piv: list[int]) -> None:
    # LAPACK would follow them.
    with pytest.raises(ValueError, match="piv"):
        protected_lu_solve((normal(3, 3), np.array(piv, np.int32)), np.ones(3))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_right_hand_sides_that_are_not_finite(bad: float) -> None:
    a, b = normal(9, 9), normal(9, 2)
    b[4, 1] = bad
    factors = linalg.lu_factor(a)
    for ours, theirs in (
        (outcome(protected_lu_solve, factors, b), outcome(linalg.lu_solve, factors, b)),
        (outcome(protected_solve, a, b), outcome(linalg.solve, a, b)),
    ):
        assert ours.kind == theirs.kind == (ValueError, "array must not contain infs or NaNs")
    with np.errstate(all="ignore"), errstate(unverifiable="ignore"):
        x, report = protected_lu_solve(factors, b, check_finite=False, return_report=True)
        assert report.status is Status.UNVERIFIABLE
        y, report = protected_solve(a, b, check_finite=False, return_report=True)
        assert report.status is Status.UNVERIFIABLE
    assert x.shape == y.shape == b.shape
    assert not np.isfinite(x[:, 1]).all()


def test_factors_with_a_zero_on_the_diagonal_are_no_corruption() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", linalg.LinAlgWarning)
        factors = linalg.lu_factor(np.ones((4, 4)))
    with np.errstate(all="ignore"), errstate(unverifiable="ignore"):
        x, report = protected_lu_solve(factors, np.arange(4.0), return_report=True)
    assert report.status is Status.UNVERIFIABLE
    assert not np.isfinite(x).all()


# ---- stages, faults and reports -----------------------------------------------------------------------------


FAULTS: Mapping[str, tuple[str, str, Any]] = {
    "forward": ("forward", "z", put(5, 1e3)),
    "forward NaN": ("forward", "z", put(5, np.nan)),
    "backward": ("backward", "x", put(7, 1e3)),
    "backward NaN": ("backward", "x", put(7, np.nan)),
    "all of x": ("backward", "x", put(slice(None), 0.0)),
}


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("kind", ["vector", "many"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_substitutions_is_repaired(fault: str, kind: str, trans: int) -> None:
    a, b = normal(40, 40), right(kind, 40)
    system = a.T if trans else a
    calls: Any = (
        partial(protected_lu_solve, linalg.lu_factor(a), b, trans),
        partial(protected_solve, a, b, transposed=bool(trans)),
    )
    for call in calls:
        with monitor() as log:
            x, report = call(return_report=True, on_stage=once(*FAULTS[fault]))
        assert report.status is Status.CORRECTED
        assert log.reports == [report]
        assert solved(x, system, b)


def test_a_fault_of_the_refined_solution_is_repaired() -> None:
    a, b = normal(40, 40), normal(40)
    x, report = protected_solve(a, b, refine=True, return_report=True, on_stage=once("refined", "x", put(3, 1e3)))
    assert report.status is Status.CORRECTED
    assert solved(x, a, b)


def stays(stage: str, arrays: Any) -> None:
    if "x" in arrays:
        arrays["x"][7] = np.nan


def test_what_cannot_be_repaired_is_raised() -> None:
    a, b = normal(40, 40), normal(40)
    for call in (partial(protected_lu_solve, linalg.lu_factor(a), b), partial(protected_solve, a, b)):
        with pytest.raises(SilentDataCorruptionError) as caught:
            call(on_stage=stays)
        assert caught.value.report.status is Status.UNCORRECTABLE
        _, report = call(on_stage=stays, on_error="detect", return_report=True)
        assert report.status is Status.UNCORRECTABLE


def test_a_fault_in_the_factorisation_of_solve_is_repaired() -> None:
    a, b = normal(90, 90), normal(90)
    for mode, stage in (("online", "updated"), ("offline", "factored")):
        hook = once(stage, "W", put((80, 85), 1e3))
        x, report = protected_solve(a, b, mode=mode, assume_a="gen", return_report=True, on_stage=hook)
        assert report.status is Status.CORRECTED
        assert solved(x, a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_reports(dtype: Any) -> None:
    a, b = normal(30, 30, dtype=dtype), normal(30, 4, dtype=dtype)
    with monitor() as log:
        _, first = protected_lu_solve(linalg.lu_factor(a), b, return_report=True)
        _, second = protected_solve(a, b, return_report=True)
    assert log.reports == [first, second]
    assert [report.operation for report in log] == ["lu_solve", "solve"]
    for report in log:
        assert (report.status, report.dtype, report.faults) == (Status.CLEAN, dtype.name, ())
        assert report.checks
        assert report.seconds
        jsonschema.Draft202012Validator(Report.schema()).validate(report.to_dict())
        assert Report.from_dict(report.to_dict()) == report
    assert second.mode


@pytest.mark.skipif(np.finfo(np.longdouble).max == np.finfo(np.float64).max, reason="long double is float64 here")
def test_numbers_beyond_float64_are_not_finite() -> None:
    beyond = np.eye(3, dtype=np.longdouble) * np.longdouble("1e4000")
    for call in (lambda: protected_lu_factor(beyond), lambda: protected_solve(np.eye(3), beyond)):
        with pytest.raises(ValueError, match="must not contain infs or NaNs"):
            call()
