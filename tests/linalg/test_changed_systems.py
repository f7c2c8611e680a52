"""Operands that change while a system is solved: the solution of another system is refused, or never made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Report, SilentDataCorruptionError, Status, protected_lu_solve, protected_solve
from abft_tsm2.faults.operands.matrices import FAMILIES
from abft_tsm2.linalg import substitution
from tests.support.planting import normal

N = 130
Change = Callable[[np.ndarray], None]


def swap_rows(x: np.ndarray) -> None:
    x[[3, 100]] = x[[100, 3]]


def swap_columns(x: np.ndarray) -> None:
    x[:, [0, -1]] = x[:, [-1, 0]]


def swap_elements(x: np.ndarray) -> None:
    x[100, [0, -1]] = x[100, [-1, 0]]


def large(x: np.ndarray) -> None:
    x[100, 1] *= -64


def small(x: np.ndarray) -> None:
    x[100, 1] += 1e-3


CHANGES = [swap_rows, swap_columns, swap_elements, large, small]


class At:
    """A hook that changes arrays once, at a stage: the first, or the call of a stage that is given; or a fault of the
    solution beside."""

    def __init__(self, stage: str, change: Callable[[], None], call: int = 1, fault: bool = False) -> None:
        self.stage, self.change, self.call, self.fault, self.seen = stage, change, call, fault, 0

    def __call__(self, stage: str, arrays: Any) -> None:
        if stage != self.stage:
            return
        self.seen += 1
        if self.seen == self.call:
            self.change()
            if self.fault:
                arrays["z" if stage == "forward" else "x"][40, 0] += 1.0


def outcome(call: Callable[[], tuple[np.ndarray, Report]], a: np.ndarray, b: np.ndarray) -> Status:
    """The status of a solution, which is raised, or that of the system that was given."""
    try:
        x, report = call()
    except SilentDataCorruptionError as error:
        return error.report.status
    if report.ok:
        assert np.abs(x - np.linalg.solve(a.astype(float), b)).max() <= 1e6 * np.finfo(a.dtype).eps * np.abs(x).max()
    return report.status


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_changes_while_a_system_is_solved(order: Any, dtype: Any, mode: str, refine: bool) -> None:
    stages = [("encoded", 1), ("inputs", 2), ("forward", 1), ("backward", 1)]
    for stage, call in stages + [("panel", 1), ("panel", 2), ("updated", 1)] * (mode == "online"):
        for change in CHANGES:
            a, b = np.array(normal(N, N, dtype=dtype), order=order), normal(N, 2, dtype=dtype, seed=1)
            given = a.copy(order=order)
            hook = At(stage, lambda: change(given), call)  # noqa: B023

            def solve() -> Any:
                return protected_solve(given, b, mode=mode, refine=refine, return_report=True, on_stage=hook)  # noqa: B023

            status = outcome(solve, a, b)
            assert hook.seen
            if change is large and stage in ("encoded", "inputs"):
                assert status is Status.INPUT_CHANGED


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("stage", ["encoded", "factored", "forward", "backward"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_an_element_that_only_the_solution_shows_has_changed(dtype: Any, stage: str, refine: bool) -> None:
    """It is below the rounding of its row and of its column, and multiplied by an unknown that is as much larger."""
    tiny = float(np.finfo(dtype).eps) ** 1.25
    a = np.array([[2, 1, tiny, 0], [1, 3, 0, 2 * tiny], [0.5, 0, 2, 1], [0, 0.5, 1, 4]], dtype)
    b = a @ np.array([1, 1, 1 / tiny, -1 / tiny], dtype)
    for change in (lambda x: x.__setitem__((0, 2), -64 * tiny), lambda x: x.__setitem__((0, [2, 3]), x[0, [3, 2]])):
        given = a.copy()
        hook = At(stage, lambda: change(given))  # noqa: B023
        with pytest.raises(SilentDataCorruptionError) as refused:
            protected_solve(given, b, refine=refine, on_stage=hook)
        assert refused.value.report.status is Status.INPUT_CHANGED


def test_a_repair_is_not_made_from_a_changed_matrix() -> None:
    """A solution is wrong, and A has changed where it is to be factored again."""
    for stage in ("forward", "backward"):
        a, b = normal(N, N), normal(N, 2, seed=1)
        given = a.copy()

        def solve() -> Any:
            hook = At(stage, lambda: large(given), fault=True)  # noqa: B023
            return protected_solve(given, b, return_report=True, on_stage=hook)  # noqa: B023

        assert outcome(solve, a, b) is Status.INPUT_CHANGED


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("stage", ["forward", "backward", "refined"])
def test_b_changes_while_a_system_is_solved(stage: str, dtype: Any, fault: bool) -> None:
    for change in CHANGES:
        a, b = normal(N, N, dtype=dtype), normal(N, 2, dtype=dtype, seed=1)
        given = b.copy()
        hook = At(stage, lambda: change(given), fault=fault)  # noqa: B023

        def solve() -> Any:
            return protected_solve(a, given, refine=True, return_report=True, on_stage=hook)  # noqa: B023

        status = outcome(solve, a, b)
        assert hook.seen
        assert not fault or status is Status.INPUT_CHANGED
        assert status in (Status.CLEAN, Status.INPUT_CHANGED)


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_factors_change_while_a_system_is_solved(stage: str, dtype: Any, order: Any, trans: int) -> None:
    for name in ("lu", "b", "piv"):
        for change in CHANGES:
            for fault in (False, True):
                a, b = normal(N, N, dtype=dtype), normal(N, 2, dtype=dtype, seed=1)
                lu, piv = linalg.lu_factor(a)
                given = {"lu": np.array(lu, order=order), "piv": piv.copy(), "b": b.copy()}
                if name == "piv":
                    hook = At(stage, lambda: given["piv"].fill(7), fault=fault)  # noqa: B023
                else:
                    hook = At(stage, lambda: change(given[name]), fault=fault)  # noqa: B023

                def solve() -> Any:
                    factors = given["lu"], given["piv"]  # noqa: B023
                    return protected_lu_solve(factors, given["b"], trans, return_report=True, on_stage=hook)  # noqa: B023

                status = outcome(solve, a.T if trans else a, b)
                assert hook.seen
                assert not (fault and name != "piv") or status is Status.INPUT_CHANGED
                assert not (fault and name == "piv") or status is Status.CORRECTED


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_factors_that_change_within_their_lines_are_refused(stage: str) -> None:
    """Elements change places, so that the words of a line add up to the same; a solution is wrong, too."""
    a, b = normal(N, N), normal(N, 1, seed=1)
    for i, j in (((100, 5), (90, 5)), ((5, 100), (5, 90)), ((100, 5), (100, 9))):
        lu, piv = linalg.lu_factor(a)
        for given in (np.array(lu, order="C"), np.array(lu, order="F")):

            def exchange() -> None:
                given[i], given[j] = given[j], given[i]  # noqa: B023

            def solve() -> Any:
                hook = At(stage, exchange, fault=True)
                return protected_lu_solve((given, piv), b, return_report=True, on_stage=hook)  # noqa: B023

            assert outcome(solve, a, b) is Status.INPUT_CHANGED


@pytest.mark.parametrize("place", [(100, 30), (30, 100)])
@pytest.mark.parametrize("rows", ["even", "uneven"])
def test_factors_that_are_right_again_when_a_solution_has_been_checked(
    monkeypatch: pytest.MonkeyPatch, rows: str, place: tuple[int, int]
) -> None:
    """The substitution and its check have read the same wrong element: one that weighted sums show, or, where the rows
    are of different size, do not."""
    a, b = normal(N, N), normal(N, 1, seed=1)
    if rows == "uneven":
        a = 10.0 ** np.linspace(9, -9, N)[:, None] * a
        b = a @ b
    lu, piv = linalg.lu_factor(a)
    given, hit = lu.copy(), []
    solve, check = substitution.solve_triangle, substitution.check_substitution

    def solved(*matrices: Any, **how: Any) -> None:
        if how["lower"] == (place[0] > place[1]) and not hit:
            hit.append(place)
            given[place] *= -3
        solve(*matrices, **how)

    def checked(*matrices: Any) -> Any:
        verdict = check(*matrices)
        given[place] = lu[place]
        return verdict

    monkeypatch.setattr(substitution, "solve_triangle", solved)
    monkeypatch.setattr(substitution, "check_substitution", checked)
    x, report = protected_lu_solve((given, piv), b, return_report=True)
    assert hit
    assert report.status is Status.CORRECTED
    np.testing.assert_allclose(a @ x, b, atol=1e-9 * np.abs(b).max(), rtol=1e-9 if rows == "uneven" else 0)


@pytest.mark.parametrize("stage", ["encoded", "forward"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_rows_of_factors_that_are_small_beside_others_do_not_change_unseen(dtype: Any, stage: str) -> None:
    """Each of them alone: an element, and elements of a column that change places."""
    n = 40
    a = (10.0 ** np.linspace(10, -10, n)[:, None] * normal(n, n)).astype(dtype)
    lu, piv = linalg.lu_factor(a)
    b = a @ normal(n, 1, dtype=dtype, seed=1)
    right = protected_lu_solve((lu, piv), b)

    def outcome_of(change: Callable[[np.ndarray], None]) -> Status:
        given = np.array(lu, order="F")
        hook = At(stage, lambda: change(given))
        try:
            x, report = protected_lu_solve((given, piv), b, return_report=True, on_stage=hook)
        except SilentDataCorruptionError as error:
            return error.report.status
        assert hook.seen
        assert report.ok
        assert np.abs(x - right).max() <= 1e-3 * np.abs(right).max()
        return report.status

    for i in range(n - 1):
        times = outcome_of(lambda lu: lu.__setitem__((i, -1), -3 * lu[i, -1]))  # noqa: B023
        exchanged = outcome_of(lambda lu: lu.__setitem__((slice(i, i + 2), -1), lu[i : i + 2, -1][::-1].copy()))  # noqa: B023
        assert {times, exchanged} <= {Status.CLEAN, Status.INPUT_CHANGED}


@pytest.mark.parametrize("family", ["graded rows", "graded both", "gfpp", "normal", "sparse"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_factors_with_rows_of_any_size_are_clean(family: str, dtype: Any) -> None:
    a = np.asarray(FAMILIES[family](40, np.random.default_rng(1), dtype))
    factors = linalg.lu_factor(a)
    for trans in (0, 1):
        report = protected_lu_solve(factors, normal(40, 2, dtype=dtype), trans, return_report=True)[1]
        assert (report.status, report.faults) == (Status.CLEAN, ())


def test_what_has_changed_is_named_and_not_raised_where_it_is_only_to_be_detected() -> None:
    a, b = normal(N, N), normal(N, 2, seed=1)
    lu, piv = linalg.lu_factor(a)
    hook = At("forward", lambda: large(lu))
    _, report = protected_lu_solve((lu, piv), b, on_error="detect", return_report=True, on_stage=hook)
    assert report.status is Status.INPUT_CHANGED
    assert [(fault.operand, fault.kind) for fault in report.faults] == [("lu", "operand")]
    assert "lu is not what it was" in " ".join(report.reasons)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_systems_of_any_scale_are_clean(scale: float) -> None:
    """What is checked once more in other units rests on b, which is shown to be the same."""
    for seed in range(3):
        a, b = normal(60, 60, seed=seed), scale * normal(60, 3, seed=seed + 1)
        lu, piv = linalg.lu_factor(a)
        assert protected_lu_solve((lu, piv), b, return_report=True)[1].status is Status.CLEAN
        assert protected_solve(a, b, return_report=True)[1].status is Status.CLEAN
        assert protected_solve(scale * a, b, refine=True, return_report=True)[1].status is Status.CLEAN
