"""Solutions as a GPU computes and checks them, by its kernels on the CPU and SciPy in place of cuBLAS."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import SilentDataCorruptionError, Status, protected_cho_solve, protected_lu_solve
from abft_tsm2.core import faultpoint
from abft_tsm2.core.ordered_sums import ordered_sums
from abft_tsm2.errors import UnverifiableWarning
from abft_tsm2.linalg import solve, substitution
from abft_tsm2.linalg.device import solution
from abft_tsm2.linalg.device.solution import DeviceSolution, solve_on_device
from abft_tsm2.linalg.device.substitution_calls import SolveMethod
from abft_tsm2.linalg.outcome import check_of
from abft_tsm2.linalg.triangular import Weighed, hides_columns, summing_weights
from tests.support import for_a_while, solution_cases
from tests.support.cupy_on_cpu import _on_card
from tests.support.planting import normal
from tests.support.solution_cases import ScipyBlas, on_card

DTYPES = ("float64", "float32")


@pytest.fixture
def blas(monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> ScipyBlas:
    cupyx = ModuleType("cupyx.scipy.linalg")
    cupyx.solve_triangular = _on_card(linalg.solve_triangular)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, cupyx.__name__, cupyx)
    # To `as_array` an array of NumPy's subclass is NumPy's.
    given = solve.as_array
    monkeypatch.setattr(solve, "as_array", lambda x, *more, **named: given(x, *more, **named).view(type(x)))
    return solution_cases.install(monkeypatch, build_cache)


class LinearSystem:
    """A matrix, its factors and right-hand sides, and the same as CuPy's."""

    def __init__(self, n: int, count: int, dtype: str = "float64", order: str = "F") -> None:
        self.a = np.asarray(normal(n, n, dtype=dtype), order=order)  # type: ignore[call-overload]
        self.b = normal(n, count, dtype=dtype, seed=1)
        self.lu, self.piv = linalg.lu_factor(self.a)
        self.lu = np.asarray(self.lu, order=order)  # type: ignore[call-overload]
        self.piv = self.piv.astype(np.int32)

    def on_device(self, trans: int = 0, method: Any = None, *, certified: bool = False, **more: bool) -> DeviceSolution:
        operands = [on_card(x) for x in (self.lu, self.piv, self.b)]
        how = (method,) if method else ()
        return solve_on_device(*operands, trans, on_card(self.a) if certified else None, *how, **more)

    def protected(self, **options: Any) -> Any:
        factors = on_card(self.lu), on_card(self.piv)
        return protected_lu_solve(factors, on_card(self.b), return_report=True, **options)


def is_right(x: Any, of: LinearSystem, trans: int = 0) -> bool:
    a, x, b = (np.asarray(y, np.float64) for y in (of.a.T if trans else of.a, x, of.b))
    size = np.abs(a) @ np.abs(x) + np.abs(b)
    return bool((np.abs(a @ x - b) <= 200 * np.finfo(of.a.dtype).eps * np.max(size, axis=0)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize(("n", "count"), [(1, 1), (150, 1), (300, 70)])
def test_solutions_are_right_and_clean(blas: ScipyBlas, n: int, count: int, trans: int, order: str, dtype: str) -> None:
    of = LinearSystem(n, count, dtype, order)
    for method in (None, SolveMethod("trsv"), SolveMethod(block=64), SolveMethod("trsv", 100)):
        found = of.on_device(trans, method)
        assert found.clean
        assert is_right(found.X, of, trans)
        assert (np.abs(found.residual) <= found.bound).all()
        np.testing.assert_array_equal(found.t, summing_weights(of.b))
        np.testing.assert_array_equal(found.largest, np.max(np.abs(found.X), axis=0)[: count if count > 1 else 0])
        assert found.check() == check_of("rows", found.residual, found.bound, found.t)
    assert len(set(blas.calls)) > 1 or n == 1
    if not trans:
        found = of.on_device(certified=True)
        assert found.clean
        assert (np.abs(found.residual) <= found.bound).all()


@pytest.mark.parametrize("trans", [0, 1])
def test_operands_of_any_strides(blas: ScipyBlas, trans: int) -> None:
    of = LinearSystem(140, 3)
    whole, sides = np.full((300, 290), np.nan), np.full((290, 9), np.nan)
    for lu in (whole[:280:2, 3:143], whole[:140, 3:143], whole.T[:140, 3:143]):
        lu[...] = of.lu
        for b in (sides[:280:2, ::3], sides[140:0:-1, 5:8], sides.T[5:8, :140].T):
            b[...] = of.b
            found = solve_on_device(on_card(lu), on_card(of.piv), on_card(b), trans)
            assert found.clean
            assert is_right(found.X, of, trans)


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("certified", [False, True])
def test_a_fault_in_a_substitution_is_not_clean(blas: ScipyBlas, step: int, trans: int, certified: bool) -> None:
    of = LinearSystem(140, 4)

    def damage(call: int, x: np.ndarray) -> None:
        if call % 2 == step:
            x[70, 2] += 1e-6 * np.max(np.abs(x))

    blas.damage = damage
    assert not of.on_device(trans, certified=certified and not trans).clean


@pytest.mark.parametrize("what", ["lu", "b", "a", "piv"])
def test_wrong_operands_are_not_clean(blas: ScipyBlas, what: str) -> None:
    for value in (np.nan, np.inf):
        of = LinearSystem(140, 4)
        if what == "piv":
            of.piv[70] = 140 if np.isnan(value) else 3
        else:
            getattr(of, what)[3, 2] = value
        assert not of.on_device(certified=what == "a").clean


def test_another_matrix_is_not_certified(blas: ScipyBlas) -> None:
    of = LinearSystem(140, 4)
    of.a[9, 5] += 1e-3
    assert of.on_device().clean
    assert not of.on_device(certified=True).clean


@pytest.mark.parametrize(
    ("trans", "how"), [(0, {}), (0, {"certified": True}), (1, {}), (0, {"compared": True}), (1, {"compared": True})]
)
def test_a_step_that_does_not_run_shows(blas: ScipyBlas, trans: int, how: dict[str, bool]) -> None:
    of = LinearSystem(140, 4)
    assert of.on_device(trans, **how).clean
    (plan,) = solution._kept.plans.values()
    steps = list(plan._prepared)
    measured = int("compared" in how)  # without this one, columns are not measured: weights are others
    for i in [*range(measured), *range(measured + 1, len(steps) - 1)]:
        plan._prepared = [*steps[:i], *steps[i + 1 :]]
        assert not of.on_device(trans, **how).clean, i
    plan._prepared = steps[:-1]  # solutions are not measured: the host checks each
    found = of.on_device(trans, **how)
    assert hides_columns(found.largest, found.t, of.b)
    plan._prepared = steps
    assert of.on_device(trans, **how).clean


# ---- protected_lu_solve ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trans", [0, 1])
def test_a_clean_solution_is_that_of_the_device(blas: ScipyBlas, trans: int) -> None:
    of = LinearSystem(140, 4)
    x, report = of.protected(trans=trans)
    assert report.status is Status.CLEAN
    assert is_right(x, of, trans)
    assert report.checks[0].lines == report.checks[0].verified == 140
    assert sum("trs" in name for name in blas.calls) == 2
    with pytest.MonkeyPatch.context() as patch:  # b of one dimension
        patch.setattr(of, "b", np.ascontiguousarray(of.b[:, 0]))
        x, report = of.protected(trans=trans)
        assert report.status is Status.CLEAN
        assert x.shape == (140,)
        assert is_right(x, of, trans)
    assert "check" not in report.seconds  # once more, on the host


# Of the factor that the second substitution is made with.
@pytest.mark.parametrize(("trans", "place"), [(0, (40, 90)), (0, (139, 139)), (1, (90, 40))])
def test_factors_that_change_for_good_are_told(blas: ScipyBlas, trans: int, place: tuple[int, int]) -> None:
    # Before they are read: by the substitutions and by their check, which holds.
    of = LinearSystem(140, 4)
    lu, piv, b = (on_card(x.copy()) for x in (of.lu, of.piv, of.b))

    def change(stage: str, arrays: Any) -> None:
        if stage == "forward":
            lu[place] += 0.5

    with faultpoint.planting(change), pytest.raises(SilentDataCorruptionError) as refused:
        protected_lu_solve((lu, piv), b, trans)
    assert refused.value.report.status is Status.INPUT_CHANGED


def test_a_small_solution_beside_large_ones_is_guarded(blas: ScipyBlas) -> None:
    of = LinearSystem(50, 50)
    of.a, of.b = np.logspace(0, -8, 50)[:, None] * of.a, np.eye(50)
    of.lu, of.piv = linalg.lu_factor(of.a)
    x, report = of.protected()
    assert (report.status, report.suspicions) == (Status.CLEAN, 0)
    for i in (3, 27, 49):

        def damage(call: int, X: np.ndarray, i: int = i) -> None:
            if call == 1:
                X[i, 0] += 1e-10 * np.max(np.abs(X[:, 0]))

        blas.calls.clear()
        blas.damage = damage
        y, report = of.protected()
        assert report.status is Status.CORRECTED
        np.testing.assert_allclose(y, x, rtol=1e-12)


def test_a_solution_that_becomes_zeros_beside_large_ones_is_found(blas: ScipyBlas) -> None:
    of = LinearSystem(2, 2)
    of.a, of.b = np.array([[1, 1], [0, 1e-17]]), np.array([[0.0, 2], [1, 0]])
    of.lu, of.piv = linalg.lu_factor(of.a)
    blas.damage = once(lambda x: x.__setitem__((slice(None), 1), 0.0))
    x, report = of.protected()
    assert report.status is Status.CORRECTED
    np.testing.assert_allclose(x, [[-1e17, 2.0], [1e17, 0.0]])


@pytest.mark.parametrize("size", [1e-140, 1e-200])
def test_numbers_whose_squares_are_lost_are_no_fault(
    blas: ScipyBlas, monkeypatch: pytest.MonkeyPatch, size: float
) -> None:
    monkeypatch.setattr(solve_on_device, "__defaults__", (0, None, SolveMethod(block=32)))  # rounds as no other path
    of = LinearSystem(140, 140)
    of.a, of.b = size * np.logspace(0, -8, 140)[:, None] * of.a, np.eye(140)
    of.lu, of.piv = linalg.lu_factor(of.a)
    assert of.protected()[1].status is Status.CLEAN
    of.a, of.b = np.logspace(-170, 170, 140)[:, None] * (np.triu(normal(140, 140)) + 9 * np.eye(140)), np.ones((140, 1))
    of.lu, of.piv = linalg.lu_factor(of.a)
    assert of.protected()[1].status is Status.CLEAN


# By the triangle that the change is in.
@pytest.mark.parametrize("place", [(40, 30), (30, 40)])
@pytest.mark.parametrize("trans", [0, 1])
def test_factors_that_are_wrong_for_a_while(blas: ScipyBlas, trans: int, place: tuple[int, int]) -> None:
    of = LinearSystem(50, 3)
    lu, right = of.lu.copy(), linalg.lu_solve((of.lu, of.piv), of.b, trans)
    assert of.protected(trans=trans)[1].status is Status.CLEAN
    (plan,) = solution._kept.plans.values()
    steps, solved = list(plan._prepared), dict(plan._solved)

    def change(*_: Any) -> None:
        of.lu[place] += 0.5

    def restore(*_: Any) -> None:
        of.lu[...] = lu

    for begin, end in itertools.combinations(range(1, len(steps) + 1), 2):  # from one step to another
        plan._prepared = [*steps[:begin], change, *steps[begin:end], restore, *steps[end:]]
        plan._solved = {i + (i >= begin) + (i >= end): name for i, name in solved.items()}
        try:
            x, _ = of.protected(trans=trans)
        except SilentDataCorruptionError:
            continue
        np.testing.assert_allclose(x, right, rtol=1e-9, err_msg=f"from {begin} to {end}")


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("fault", [False, True])
def test_nor_from_one_solution_to_the_next(blas: ScipyBlas, fault: bool, trans: int) -> None:
    """Where a fault in the first one, or the change itself, has the system solved once more."""
    of = LinearSystem(50, 3)
    a = of.a.T if trans else of.a

    def call(given: Any) -> Any:
        blas.calls.clear()
        blas.damage = once(lambda x: x.__setitem__((20, 1), 1e3) if fault else None)
        factors = on_card(given["lu"]), on_card(of.piv)
        return protected_lu_solve(factors, on_card(given["b"]), trans, return_report=True)

    given = {"lu": of.lu, "b": of.b.copy()}
    assert not for_a_while.silent(call, given, ("lu", "b"), lambda x: (a @ x - of.b) / np.abs(x).max(), 1e-8)


def test_nor_while_a_solution_is_made_again(blas: ScipyBlas, monkeypatch: pytest.MonkeyPatch) -> None:
    """From before the forward substitution until behind its check."""
    of = LinearSystem(50, 3)
    blas.damage = once(lambda x: x.__setitem__((20, 1), 1e3))
    solve_triangle, right = substitution.solve_triangle, of.lu[40, 30]

    def solved(*given: Any, **how: Any) -> None:
        of.lu[40, 30] = right + 0.5 if how["lower"] else right
        solve_triangle(*given, **how)

    monkeypatch.setattr(substitution, "solve_triangle", solved)
    with pytest.raises(SilentDataCorruptionError) as refused:
        of.protected()
    assert refused.value.report.status is Status.INPUT_CHANGED
    assert of.lu[40, 30] == right


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "order"), [(50, "F"), (50, "C"), (2050, "C")])
def test_factors_are_compared_wherever_they_lie(blas: ScipyBlas, n: int, order: str, dtype: str) -> None:
    """With gaps between the lines, which may be of several pieces."""
    of = LinearSystem(n, 2, dtype)
    whole = np.full((n, n + 7), np.nan, dtype)
    lies = whole[:, :n] if order == "C" else whole[:, :n].T
    lies[...], of.lu = of.lu, lies
    found = of.on_device(compared=True)
    assert found.clean
    np.testing.assert_array_equal(found.left().lines, ordered_sums(whole[:, :n].copy()))
    assert of.on_device().left().lines is None


def test_factors_off_their_alignment(blas: ScipyBlas) -> None:
    of = LinearSystem(50, 2)
    for order in ("F", "C"):
        memory = np.zeros(8 * 50 * 50 + 4, np.uint8)
        lu = np.ndarray((50, 50), np.float64, memory.data, 4, order=order)
        lu[...] = linalg.lu_factor(of.a)[0]
        of.lu = lu
        blas.calls.clear()
        blas.damage = once(lambda x: x.__setitem__((20, 1), 1e3))
        x, report = of.protected()
        assert report.status is Status.CORRECTED
        assert is_right(x, of)


def once(what: Callable[[np.ndarray], None]) -> Callable[[int, np.ndarray], None]:
    def damage(call: int, x: np.ndarray) -> None:
        if call == 1:
            what(x)

    return damage


def test_a_fault_is_repaired_and_reported(blas: ScipyBlas) -> None:
    of = LinearSystem(140, 4)
    blas.damage = once(lambda x: x.__setitem__((70, 2), 1e3))
    x, report = of.protected()
    assert report.status is Status.CORRECTED
    assert (report.faults[0].rows, report.faults[0].columns) == ((70,), (2,))
    assert is_right(x, of)


def test_a_fault_that_is_not_to_be_repaired(blas: ScipyBlas) -> None:
    of = LinearSystem(140, 4)
    blas.damage = once(lambda x: x.__setitem__((70, 2), np.nan))
    x, report = of.protected(on_error="detect")
    assert report.status is Status.UNCORRECTABLE
    assert np.isnan(x[70, 2])
    blas.calls.clear()
    with pytest.raises(SilentDataCorruptionError):
        of.protected(on_error="raise")


def test_what_is_suspected_in_vain_is_counted(blas: ScipyBlas, monkeypatch: pytest.MonkeyPatch) -> None:
    of = LinearSystem(140, 4)
    monkeypatch.setattr(solution.SolutionPlan, "found", lambda plan: (False, *[np.zeros(1)] * 4))
    for trans in (0, 1):
        for way in (SolveMethod(), SolveMethod(block=32)):  # this one rounds otherwise than the careful path
            monkeypatch.setattr(solve_on_device, "__defaults__", (0, None, way))
            for options in ({}, {"on_error": "detect"}):
                x, report = of.protected(trans=trans, **options)
                assert report.status is Status.CLEAN
                assert report.suspicions == 1
                assert is_right(x, of, trans)


@pytest.mark.parametrize("what", ["lu", "b"])
def test_what_is_not_finite_is_refused_as_by_scipy(blas: ScipyBlas, what: str) -> None:
    of = LinearSystem(140, 4)
    getattr(of, what)[7, 3] = np.nan
    with pytest.raises(ValueError, match="array must not contain infs or NaNs"):
        of.protected()
    with pytest.warns(UnverifiableWarning):
        x, report = of.protected(check_finite=False)
    assert report.status is Status.UNVERIFIABLE
    assert not np.isfinite(x).all()


def test_pivots_that_are_no_rows_are_refused(blas: ScipyBlas) -> None:
    of = LinearSystem(140, 4)
    of.piv[7] = 140
    with pytest.raises(ValueError, match="piv holds 140"):
        of.protected()


def test_pivots_above_their_rows_are_left_to_the_host(blas: ScipyBlas) -> None:
    of = LinearSystem(140, 4)
    of.piv[7] = 3
    x, report = of.protected()
    assert report.status is not Status.UNCORRECTABLE
    np.testing.assert_allclose(x, linalg.lu_solve((of.lu, of.piv), of.b), rtol=1e-6)


def test_stacks_and_pivots_on_the_host(blas: ScipyBlas) -> None:
    of = LinearSystem(20, 3)
    lu, piv, b = (np.stack([x, x]) for x in (of.lu, of.piv, of.b))
    x, report = protected_lu_solve((on_card(lu), on_card(piv)), on_card(b), return_report=True)
    assert report.status is Status.CLEAN
    assert all(is_right(one, of) for one in x)
    x, report = protected_lu_solve((on_card(of.lu), of.piv.tolist()), on_card(of.b), return_report=True)
    assert report.status is Status.CLEAN
    assert is_right(x, of)


def test_nothing_to_solve(blas: ScipyBlas) -> None:
    of = LinearSystem(20, 3)
    assert protected_lu_solve((on_card(of.lu), on_card(of.piv)), on_card(of.b[:, :0])).shape == (20, 0)


@pytest.mark.parametrize("gaps", ["behind rows", "behind columns", "everywhere"])
def test_cholesky_factors_with_gaps(blas: ScipyBlas, gaps: str) -> None:
    of, n = LinearSystem(50, 3), 50
    definite = of.a @ of.a.T + n * np.eye(n)
    whole = normal(2 * n, 2 * n, seed=2)
    c = {"behind rows": whole[:n, :n], "behind columns": whole.T[:n, :n], "everywhere": whole[::2, ::2]}[gaps]
    c[...] = linalg.cholesky(definite, lower=True)
    x, report = protected_cho_solve((on_card(c), True), on_card(of.b), return_report=True)
    assert report.status is Status.CLEAN
    np.testing.assert_allclose(x, linalg.solve(definite, of.b), rtol=1e-7)


# ---- operands that change meanwhile ----------------------------------------------------------------------------------


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("what", ["lu", "b"])
@pytest.mark.parametrize("call", [0, 1])
def test_nothing_is_solved_again_with_operands_that_have_changed(
    blas: ScipyBlas, call: int, what: str, trans: int
) -> None:
    """They change behind a substitution, the solution of which is wrong as well."""
    of = LinearSystem(140, 4)

    def damage(number: int, x: np.ndarray) -> None:
        if number == call:
            getattr(of, what)[90, 2] += 0.5
            x[70, 2] += 1.0

    blas.damage = damage
    with pytest.raises(SilentDataCorruptionError) as caught:
        of.protected(trans=trans)
    assert caught.value.report.status is Status.INPUT_CHANGED
    assert caught.value.report.faults[-1].operand == what


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("what", ["b", "piv"])
def test_operands_that_have_been_read_may_change(blas: ScipyBlas, what: str, trans: int) -> None:
    of = LinearSystem(140, 4)
    right = linalg.lu_solve((of.lu, of.piv), of.b, trans)

    def damage(number: int, x: np.ndarray) -> None:
        getattr(of, what)[:] = 7
        x[70, 2] += number == 0 and what == "piv"

    blas.damage = damage
    x, report = of.protected(trans=trans)
    assert report.status is (Status.CORRECTED if what == "piv" else Status.CLEAN)
    np.testing.assert_allclose(x, right, rtol=1e-9)


def test_the_sums_of_b_are_those_of_the_kernels(blas: ScipyBlas) -> None:
    for trans in (0, 1):
        of = LinearSystem(140, 4)
        b = on_card(of.b)
        read, now = of.on_device(trans).weighed(b), Weighed.of(b, summing_weights(b))
        assert read is not None
        assert read.same
        for x, y in zip(read[1:], now[1:], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12)
        b[90, 2] += 1e-9
        assert not read.same
