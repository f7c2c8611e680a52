"""Each check of a factorisation and of a solution is there for a fault that gets through without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Report, SilentDataCorruptionError, Status, protected_lu_factor, protected_solve
from abft_tsm2.checksum.bounds import factored_bound
from abft_tsm2.linalg import certify, lu, lu_checks, lu_repair, solve, triangular
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.lu_checks import LuChecksums, sees_all
from abft_tsm2.linalg.lu_repair import LuRepair
from abft_tsm2.linalg.operand import differing_sums
from abft_tsm2.linalg.outcome import FactorOutcome, Unrepairable
from tests.linalg.test_lu_reports import hit
from tests.support.factor_cases import backward_error, lu_outside
from tests.support.planting import both, everywhere, normal, put, scale

Patch = pytest.MonkeyPatch
Hook = Callable[[str, Any], None]
BLOCK = 16


class Result(NamedTuple):
    """What became of a factorisation: `wrong` by an oracle that is not ours, and the stages it went through."""

    report: Report
    wrong: bool
    piv: np.ndarray
    stages: list[str]


def factored(a: np.ndarray, hook: Hook | None = None, mode: str = "online") -> Result:
    stages: list[str] = []
    hooks = [lambda stage, arrays: stages.append(stage), *([hook] if hook else [])]
    kept = a.copy()
    try:
        result, report = protected_lu_factor(a, mode=mode, block=BLOCK, return_report=True, on_stage=both(*hooks))
    except SilentDataCorruptionError as error:
        return Result(error.report, False, np.zeros(0), stages)
    return Result(report, bool(lu_outside(*result, kept).any()), result[1], stages)


def test_clean_factorisations_do_not_alarm() -> None:
    for mode in ("online", "offline"):
        found = factored(normal(60, 60), mode=mode)
        assert found.report.status is Status.CLEAN
        assert not found.wrong


# ---- the checks of a step --------------------------------------------------------------------------------------


def of_panel() -> Hook:
    """A fault in L, when the second panel has just been factored."""
    return hit("panel", "W", put((40, 20), 7.0), BLOCK)


def fine(*_: Any, **__: Any) -> bool:
    return True


def uncertified(patch: Patch) -> None:
    """Without the certificate of the whole."""
    everywhere(patch, certify.whole, lambda carried: LineCheck.of(np.zeros(1), np.ones(1)))


def test_without_the_checks_of_steps_the_certificate_of_the_whole_is_left(monkeypatch: Patch) -> None:
    monkeypatch.setattr(LuChecksums, "_judged", fine)
    found = factored(normal(60, 60), of_panel())
    assert found.report.status is Status.CORRECTED
    assert not found.wrong
    uncertified(monkeypatch)
    missed = factored(normal(60, 60), of_panel())
    assert missed.report.status is Status.CLEAN
    assert missed.wrong


@pytest.mark.parametrize(
    ("stage", "where", "check"), [("panel", (40, 20), "check_panel"), ("solved", (18, 45), "check_rows")]
)
def test_a_step_is_checked_before_anything_depends_on_it(
    stage: str, where: Any, check: str, monkeypatch: Patch
) -> None:
    def second_step(found: Result) -> list[str]:
        return found.stages[found.stages.index("updated") + 1 :]

    hook = hit(stage, "W", scale(where, -1.0), BLOCK)
    found = second_step(factored(normal(60, 60), hook))
    # a panel is factored once more before it is repaired in full
    assert "repaired" in found[found.index(stage) : found.index(stage) + 3]

    original = getattr(LuChecksums, check)

    def unheard(self: LuChecksums, *arguments: Any, **options: Any) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(LuChecksums, "_judged", fine)
            return bool(original(self, *arguments, **options))

    monkeypatch.setattr(LuChecksums, check, unheard)
    late = factored(normal(60, 60), hit(stage, "W", scale(where, -1.0), BLOCK))
    assert not late.wrong
    assert "repaired" not in second_step(late)[: second_step(late).index("updated")]


def test_without_a_bound_everything_passes(monkeypatch: Patch) -> None:
    def unbounded(*arguments: Any) -> Any:
        return 0.0 * factored_bound(*arguments) + 1e300

    everywhere(monkeypatch, factored_bound, unbounded)
    found = factored(normal(60, 60), of_panel())  # such bounds are blind, and evidence is asked
    assert found.report.status is Status.CORRECTED
    assert not found.wrong
    everywhere(monkeypatch, sees_all, fine)
    missed = factored(normal(60, 60), of_panel())
    assert missed.report.status is Status.CLEAN
    assert missed.wrong


def test_an_infinite_bound_is_no_bound(monkeypatch: Patch) -> None:
    def infinite(*arguments: Any) -> Any:
        return 0.0 * factored_bound(*arguments) + np.inf

    everywhere(monkeypatch, factored_bound, infinite)
    assert factored(normal(60, 60)).report.status is not Status.CLEAN
    monkeypatch.setattr(LineCheck, "clean", property(lambda self: bool((np.abs(self.residual) <= self.bound).all())))
    everywhere(monkeypatch, sees_all, fine)
    missed = factored(normal(60, 60), of_panel())
    assert missed.report.status is Status.CLEAN
    assert missed.wrong


def test_what_stands_out_is_computed_again(monkeypatch: Patch) -> None:
    """A fault within the bounds, which are too large here, and far from what the other lines have."""
    everywhere(monkeypatch, factored_bound, lambda *arguments: 20 * factored_bound(*arguments))
    monkeypatch.setattr(lu_checks, "LEAST", 0.0)

    def one(size: float) -> Report:
        return factored(normal(60, 60), hit("panel", "W", scale((40, 20), 1 + size), BLOCK)).report

    def stands_out(size: float) -> bool:
        found = one(size)
        return found.status is Status.CORRECTED or found.suspicions > 0

    # What the other lines have is a matter of how BLAS rounds, and so is the size from which on a fault stands out.
    smallest = next(size for size in 2.0 ** np.arange(-46, -36) if stands_out(size))
    monkeypatch.setattr(lu_checks, "USUAL", np.inf)
    missed = one(smallest)
    assert missed.status is Status.CLEAN
    assert missed.suspicions == 0


def other_pivot(arrays: Any) -> None:
    """The panel as it is with the smallest element of its first column for a pivot: P A = L U as well."""
    W, A, place = arrays["W"], arrays["A"], arrays["perm"]
    panel = A[place.astype(int)][:, :BLOCK]
    smallest = int(np.argmin(np.abs(panel[:, 0])))
    swapped = panel.copy()
    swapped[[0, smallest]] = swapped[[smallest, 0]]
    first = swapped[0].copy()
    below = swapped[1:, 0] / first[0]
    rest, rows = linalg.lu_factor(swapped[1:, 1:] - np.outer(below, first[1:]))
    for i, p in enumerate(rows):
        below[[i, p]] = below[[p, i]]
    W[0, :BLOCK], W[1:, 0], W[1:, 1:BLOCK] = first, below, rest
    arrays["piv"][0] = smallest
    arrays["piv"][1:BLOCK] = rows + 1


def at_first_panel(change: Callable[[Any], None]) -> Hook:
    done: list[str] = []

    def hook(stage: str, arrays: Any) -> None:
        if stage == "panel" and not done:
            done.append(stage)
            change(arrays)

    return hook


def test_a_pivot_that_is_not_the_largest_is_seen(monkeypatch: Patch) -> None:
    a = normal(60, 60)
    found = factored(a, at_first_panel(other_pivot))
    np.testing.assert_array_equal(found.piv, linalg.lu_factor(a)[1])
    monkeypatch.setattr(lu_checks, "PIVOT_SIGMAS", np.inf)
    missed = factored(a, at_first_panel(other_pivot))
    assert missed.report.status is Status.CLEAN
    assert missed.piv[0] != found.piv[0]


# ---- what is finished ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [(40, 5), (5, 40)], ids=["L", "U"])
def test_finished_factors_are_read_again(where: tuple[int, int], monkeypatch: Patch) -> None:
    found = factored(normal(60, 60), hit("finished", "W", put(where, 1e3)))
    assert found.report.status is Status.CORRECTED
    assert not found.wrong
    everywhere(monkeypatch, certify.changed, lambda *_: ([], []))
    missed = factored(normal(60, 60), hit("finished", "W", put(where, 1e3)))
    assert missed.report.status is Status.CLEAN
    assert missed.wrong


def test_pivots_are_compared_with_the_order_of_the_rows(monkeypatch: Patch) -> None:
    a = normal(60, 60)
    found = factored(a, hit("finished", "piv", put(7, 50)))
    assert found.report.status is Status.CORRECTED
    np.testing.assert_array_equal(found.piv, linalg.lu_factor(a)[1])
    monkeypatch.setattr(LuRepair, "order", lambda self, j: None)
    missed = factored(a, hit("finished", "piv", put(7, 50)))
    assert missed.report.status is Status.CLEAN
    assert missed.wrong


def test_nothing_is_repaired_from_a_matrix_that_has_changed(monkeypatch: Patch) -> None:
    def hook() -> Hook:
        return both(hit("panel", "A", put((50, 18), 1e3), BLOCK), of_panel())

    found = factored(normal(60, 60), hook())
    assert Status.INPUT_CHANGED in (found.report.status, *found.report.also)
    none = np.zeros(0, np.int64), np.zeros(0)
    everywhere(monkeypatch, differing_sums, lambda A, encoding: [none, none])
    missed = factored(normal(60, 60), hook())
    assert missed.report.status is Status.CORRECTED
    assert missed.wrong


def test_the_offline_certificate(monkeypatch: Patch) -> None:
    found = factored(normal(60, 60), hit("factored", "W", put((40, 20), 7.0)), "offline")
    assert found.report.status is Status.CORRECTED
    assert not found.wrong
    monkeypatch.setattr(lu, "certified", lambda *_: certify.Certificate(FactorOutcome.CERTIFIED))
    missed = factored(normal(60, 60), hit("factored", "W", put((40, 20), 7.0)), "offline")
    assert missed.report.status is Status.CLEAN
    assert missed.wrong


def test_what_cannot_be_agreed_on_is_refused(monkeypatch: Patch) -> None:
    def never(self: LuRepair, *_: Any) -> None:
        raise Unrepairable("as the test wants it")

    monkeypatch.setattr(lu_repair.LuRepair, "panel", never)
    with pytest.raises(SilentDataCorruptionError, match="as the test wants it"):
        protected_lu_factor(normal(60, 60), mode="online", block=BLOCK, on_stage=always_wrong)


def always_wrong(stage: str, arrays: Any) -> None:
    if stage == "panel":
        arrays["W"][40, arrays["step"][0]] = 1e3


# ---- a solution ------------------------------------------------------------------------------------------------


def solved(change: Any, stage: str = "backward", name: str = "x") -> tuple[Status, bool]:
    """Status, and whether the solution is worse than a hundred roundings make it."""
    a, b = normal(60, 60), normal(60)
    x, report = protected_solve(a, b, return_report=True, on_stage=hit(stage, name, change))
    return report.status, not backward_error(a, x, b) <= 1e-14


@pytest.mark.parametrize(("stage", "name"), [("forward", "z"), ("backward", "x")])
def test_substitutions_and_the_solution_are_checked(stage: str, name: str, monkeypatch: Patch) -> None:
    assert solved(put((9, 0), 1e3), stage, name) == (Status.CORRECTED, False)
    good = LineCheck(np.zeros(60), np.ones(60), np.ones(60, np.bool_))
    everywhere(monkeypatch, triangular.check_substitution, lambda *_, **__: good)
    assert solved(put((9, 0), 1e3), stage, name) == (Status.CORRECTED, False)  # by the residual of a x = b
    monkeypatch.setattr(solve, "_certificate", lambda *_, **__: good)
    assert solved(put((9, 0), 1e3), stage, name) == (Status.CLEAN, True)
