"""Faults in an LU on a GPU, on the CPU: found while later steps are under way, and repaired from there."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import SilentDataCorruptionError, Status, errstate, protected_lu_factor
from abft_tsm2.core.blas import permutation
from abft_tsm2.faults.operands.matrices import FAMILIES
from abft_tsm2.linalg import lu as lu_module
from abft_tsm2.linalg import lu_on_device
from abft_tsm2.linalg.device import repair
from abft_tsm2.linalg.device.buffers import KEPT
from abft_tsm2.linalg.device.factorisation import DOUBTED, DeviceFactorisation
from abft_tsm2.linalg.device.plan import FactorPlan
from abft_tsm2.linalg.device.queued import QueuedRun
from abft_tsm2.linalg.device.repair import BEYOND, DeviceRepair
from abft_tsm2.linalg.evidence import factor_evidence
from abft_tsm2.linalg.once_more import factored_once_more
from abft_tsm2.linalg.outcome import Findings
from tests.support import lu_on_cpu
from tests.support.factor_cases import lu_outside
from tests.support.lu_on_cpu import on_card
from tests.support.planting import normal
from tests.support.tracked_lu import N, Once, put, require_right, tracked


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> Any:
    return lu_on_cpu.install(monkeypatch, build_cache)


def asked_of_evidence(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Steps that will have been compared with A, and how many were queued by then."""
    evidence, asked = DeviceRepair._evidence, list[tuple[int, int]]()

    def seen(self: DeviceRepair, number: int, queued: int) -> Any:
        asked.append((number, queued))
        return evidence(self, number, queued)

    patch.setattr(DeviceRepair, "_evidence", seen)
    return asked


# ---- steps ---------------------------------------------------------------------------------------------------------

STEPS = {
    "a trailing element": ("updated", 128, put("W", (450, 400), 37.0), "element"),
    "of the next panel": ("updated", 128, put("W", (450, 260), 37.0), "element"),
    "of the next row of U": ("updated", 128, put("W", (258, 400), 37.0), None),
    "a huge one": ("updated", 0, put("W", (450, 300), 1e30), "element"),
    "NaN": ("updated", 0, put("W", (400, 300), np.nan), None),
    "Inf in a row": ("updated", 0, put("W", (129, 450), np.inf), None),
    "a row": ("updated", 128, put("W", (450, slice(256, None)), 5.0), None),
    "a column": ("updated", 128, put("W", (slice(256, None), 400), 5.0), None),
    "a block": ("updated", 128, put("W", (slice(400, 450), slice(400, 450)), 1.0), "block"),
    "L before it is used": ("panel", 128, put("W", (500, 150), 0.75), None),
    "a multiplier": ("panel", 128, put("W", (500, 150), 1.5), None),
    "U of a panel": ("panel", 128, put("W", (150, 170), 9.0), None),
    "U before it is used": ("solved", 128, put("W", (150, 400), 9.0), None),
    "in the first step": ("panel", 0, put("W", (500, 100), 0.75), None),
    "in the last but one": ("updated", 256, put("W", (515, 500), 37.0), "element"),
}


BY_PRODUCTS = "a trailing element", "of the next panel", "Inf in a row", "a multiplier"


@pytest.mark.parametrize(
    ("name", "queued"), [*((name, 0.0) for name in STEPS), *((name, -math.inf) for name in BY_PRODUCTS)]
)
def test_a_wrong_step_is_done_again(name: str, queued: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "MEANWHILE", queued)
    stage, column, change, kind = STEPS[name]
    dtype = "float64" if (list(STEPS).index(name) + (queued < 0)) % 2 else "float32"
    hook, a = Once(stage, column, change), normal(N, N, dtype=dtype)
    with np.errstate(all="ignore"):
        run, findings = tracked(a, hook)
    require_right(run, a)
    assert hook.done
    assert hook.repaired == len(findings.statuses) >= 1
    assert set(findings.statuses) == {Status.CORRECTED}
    assert kind in (None, findings.faults[0].kind)
    assert "steps late" in findings.faults[0].repair


@pytest.mark.parametrize(("m", "n", "order"), [(520, 300, "C"), (300, 520, "F")])
def test_any_shape_and_order(m: int, n: int, order: Any) -> None:
    a = np.asarray(normal(m, n), order=order)
    run, findings = tracked(a, Once("updated", 0, put("W", (250, 270), 37.0)))
    require_right(run, a)
    assert [fault.kind for fault in findings.faults] == ["element"]


def test_the_way_back_is_the_shorter_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the products that were made, but for panels that were factored meanwhile; or from A alone, which gives the
    same but for rounding."""
    ways: list[str] = []
    for name in ("_undo", "_rebuild"):
        way = getattr(DeviceRepair, name)

        def noted(self: DeviceRepair, *how: Any, way: Any = way, name: str = name) -> None:
            ways.append(name)
            way(self, *how)

        monkeypatch.setattr(DeviceRepair, name, noted)
    a, found = normal(N, N), []
    for queued in (math.inf, -math.inf):
        monkeypatch.setattr(repair, "MEANWHILE", queued)
        run, _ = tracked(a, Once("updated", 0, put("W", (500, 270), 37.0)))
        require_right(run, a)
        found.append(np.asarray(run.W).copy())
    assert ways == ["_rebuild", "_undo", "_rebuild"]
    np.testing.assert_allclose(*found, rtol=0, atol=1e-10)
    assert not np.array_equal(*found)


def test_what_a_fault_has_made_of_a_column_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A huge element of a row of U: its column is beyond what any update could take back."""
    monkeypatch.setattr(repair, "MEANWHILE", -math.inf)
    a = normal(N, N)
    run, findings = tracked(a, Once("solved", 128, put("W", (150, 515), 1e18)))
    require_right(run, a)
    assert len(findings.statuses) == 1


def test_a_second_fault_meanwhile() -> None:
    hooks = Once("updated", 128, put("W", (450, 400), 37.0)), Once("repaired", None, put("W", (510, 500), -9.0))
    a = normal(N, N)
    run, findings = tracked(a, lambda *given: [hook(*given) for hook in hooks])
    require_right(run, a)
    assert len(findings.faults) == 2


def test_a_fault_that_comes_again_is_left_to_a_second_factorisation() -> None:
    def stuck(stage: str, arrays: Mapping[str, Any]) -> None:
        if stage == "updated" and arrays["step"][0] == 256 and len(made) < 3:
            made.append(stage)
            arrays["W"][300, 500] = 37.0

    made: list[str] = []
    a = normal(N, N)
    (lu, piv), report = protected_lu_factor(on_card(a), mode="online", return_report=True, on_stage=stuck)
    assert report.status is Status.CORRECTED
    assert not lu_outside(np.asarray(lu), np.asarray(piv), a).any()
    assert "factored again" in {fault.repair for fault in report.faults}


def test_without_the_way_back_all_is_factored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceRepair, "begins_again", lambda *_: None)
    a = normal(N, N)
    hook = Once("updated", 128, put("W", (450, 400), 37.0))
    (lu, piv), report = protected_lu_factor(on_card(a), mode="online", return_report=True, on_stage=hook)
    assert report.status is Status.CORRECTED
    assert [fault.repair for fault in report.faults] == ["factored again"]
    assert not lu_outside(np.asarray(lu), np.asarray(piv), a).any()


def test_a_that_has_changed_is_said() -> None:
    hook = Once("updated", 128, put("A", (slice(None), 300), 37.0))
    change = Once("updated", 128, put("W", (460, 300), 37.0))
    with pytest.raises(SilentDataCorruptionError, match="changed"):
        protected_lu_factor(on_card(normal(N, N)), mode="online", on_stage=lambda *x: (hook(*x), change(*x)))


# ---- no alarm ---


def test_steps_that_are_suspected_in_vain_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence finds them right, the first one once more when it was done again; after a few all is left to the end."""
    a, asked = normal(N, N), asked_of_evidence(monkeypatch)

    monkeypatch.setattr(DeviceRepair, "_is_fine", lambda *_: False)
    monkeypatch.setattr(QueuedRun, "verdict", lambda self, step: 9)
    run, findings = tracked(a)
    assert [number for number, _ in asked] == [0, 0, 1, 2]
    assert findings.suspicions == 3
    assert not findings.statuses
    require_right(run, a)


@pytest.mark.parametrize("column", [slice(None), 200])
def test_what_comes_out_the_same_each_time_convicts_nothing(column: Any) -> None:
    """Pivots by which LAPACK does not divide: the factors are not those of A, but nothing is wrong with the machine."""
    a = normal(N, N)
    a[:, column] *= 1e-310
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, report = protected_lu_factor(on_card(a), mode="online", return_report=True)
    assert report.status is Status.UNVERIFIABLE, report
    assert not report.faults


@pytest.mark.parametrize("place", [(450, 200), (140, 400)], ids=["a panel", "a row of U"])
def test_what_the_kernels_cannot_tell_from_rounding_is_compared_again(place: tuple[int, int]) -> None:
    a = normal(N, N, dtype="float32")
    stage, size = ("panel", 1e-3) if place[0] > 256 else ("solved", 2e-3)

    def change(arrays: Mapping[str, Any]) -> None:
        arrays["W"][place] += size

    with pytest.MonkeyPatch.context() as patch:
        told: list[bool] = []
        compare = DeviceRepair._compare
        patch.setattr(DeviceRepair, "_compare", lambda self, found, *more: told.append(compare(self, found, *more)))
        run, findings = tracked(a, Once(stage, 128, change))
    assert told
    require_right(run, a)
    assert set(findings.statuses) == {Status.CORRECTED}
    assert "steps late" in findings.faults[0].repair


def distance(lu: Any, piv: Any, a: np.ndarray) -> float:
    """The largest element of P A - L U, in units of roundoff of the largest of A."""
    W, P = np.asarray(lu, np.float64), permutation(np.asarray(piv), len(a))
    residual = a[P] - (np.tril(W, -1) + np.eye(len(a))) @ np.triu(W)
    return float(np.max(np.abs(residual)) / np.max(np.abs(a)) / np.finfo(a.dtype).eps)


BELOW = {
    "a step": ("online", "solved", 128, (140, 250), 2e-12),
    "finished factors": ("offline", "factored", None, (200, 100), 5e-14),
}


@pytest.mark.parametrize("name", BELOW)
def test_errors_that_rounding_might_have_made_are_computed_again(name: str) -> None:
    """Sums show them, no single element does."""
    mode, stage, column, place, size = BELOW[name]
    a = normal(300, 300)

    def change(arrays: Mapping[str, Any]) -> None:
        arrays["W"][place] += size

    usual, (left, piv) = distance(*linalg.lu_factor(a), a), linalg.lu_factor(a)
    change({"W": left})
    assert distance(left, piv, a) > 10 * usual
    hook = Once(stage, column, change)
    (lu, piv), report = protected_lu_factor(on_card(a), mode=mode, return_report=True, on_stage=hook)
    assert hook.done
    assert distance(lu, piv, a) < 2 * usual
    assert (report.status, report.faults) == (Status.CLEAN, ())
    assert report.suspicions == 1


@pytest.mark.parametrize("change", ["the factors", "S", "Z", "memory"])
def test_factors_that_are_made_once_more_in_vain_are_not_taken(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of before are right, and stay: where the second ones are wrong, or of a matrix with other sums."""
    mode, stage, _, place, size = BELOW["finished factors"]
    a, seen = normal(300, 300), []
    there = on_card(a.copy())

    def hook(name: str, arrays: Mapping[str, Any]) -> None:
        if name != stage:
            return
        seen.append(name)
        if len(seen) == 1:
            arrays["W"][place] += size
        elif change == "the factors":
            arrays["W"][20, 30] *= 3.0

    def changed(run: Any, mode: str) -> None:
        if change in "SZ":
            getattr(run.encoding, change)[5] *= 1 + 1e-15
        if change == "memory":
            monkeypatch.setattr(lu_module.LuFactorisation, "queued", full)
            run.options = replace(run.options, on_stage=None)
            seen.append("none")
        factored_once_more(run, mode)

    def full(*_: Any) -> Any:
        raise MemoryError("a does not fit")

    monkeypatch.setattr(lu_on_device, "factored_once_more", changed)
    left, piv = linalg.lu_factor(a)
    left[place] += size
    (lu, found), report = protected_lu_factor(there, mode=mode, return_report=True, on_stage=hook)
    assert len(seen) == 2
    np.testing.assert_array_equal(found, piv)
    assert distance(left, piv, a) / 2 < distance(lu, found, a) < 2 * distance(left, piv, a)
    assert (report.status, report.faults, report.suspicions) == (Status.CLEAN, (), 1)


def test_repairs_of_factors_that_are_not_taken_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    a, size, at = normal(300, 300), BELOW["finished factors"][-1], []

    def hook(name: str, arrays: Mapping[str, Any]) -> None:
        if name == "finished":
            at.append(len(at))
            arrays["W"][200, 100] += size
        elif name == "updated" and len(at) == 1 and arrays["step"][0] == 0:
            arrays["W"][250, 200] += 37.0

    (lu, piv), report = protected_lu_factor(on_card(a), mode="online", return_report=True, on_stage=hook)
    assert at == [0, 1]
    assert (report.status, report.faults) == (Status.CLEAN, ())
    assert not lu_outside(np.asarray(lu), np.asarray(piv), a).any()


def test_a_verdict_that_failed_fails_again() -> None:
    a = normal(131, 131)
    a[:, 7] = 0
    with errstate(sync=False):
        _, report = protected_lu_factor(on_card(a), mode="offline", return_report=True)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(linalg.LinAlgWarning):
                report.wait()
    with pytest.warns(linalg.LinAlgWarning):
        assert report.wait().status is Status.CLEAN


def test_lines_that_sums_cannot_show_are_no_reason_to_factor_again(monkeypatch: pytest.MonkeyPatch) -> None:
    a, made = np.asarray(FAMILIES["graded"](150, np.random.default_rng(2), np.float64)), []
    take = lu_module.LuFactorisation.take

    def noted(run: Any, queued: DeviceFactorisation) -> bool:
        queued.wait()
        made.append((queued.clean, queued.agrees))
        return take(run, queued)

    monkeypatch.setattr(lu_module.LuFactorisation, "take", noted)
    _, report = protected_lu_factor(on_card(a), mode="offline", return_report=True)
    assert made == [(False, True)]
    assert (report.status, report.suspicions) == (Status.CLEAN, 0)


@pytest.mark.parametrize("faults", [1, 2])
def test_convictions_stay_when_a_step_is_suspected_in_vain(faults: int, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, evidence, asked = QueuedRun.verdict, DeviceRepair._evidence, list[bool]()

    def noted(self: DeviceRepair, *step: int) -> Any:
        found = evidence(self, *step)
        asked.append(found[0].right)
        return found

    monkeypatch.setattr(QueuedRun, "verdict", lambda self, step: 9 if step == 3 else verdict(self, step))
    monkeypatch.setattr(DeviceRepair, "_is_fine", lambda *_: False)
    monkeypatch.setattr(DeviceRepair, "_evidence", noted)
    planted = [0]

    def hook(stage: str, arrays: Mapping[str, Any]) -> None:
        if stage == "panel" and arrays["step"][0] == 384 and planted[0] < faults:
            planted[0] += 1
            arrays["W"][450, 400] = 37.0

    run, findings = tracked(normal(N, N), hook)
    assert asked == [False] * faults + [True]
    assert findings.statuses == [Status.CORRECTED] * faults
    assert findings.faults[0].magnitude > 30
    require_right(run, normal(N, N))


def test_what_changes_once_most_rows_were_settled_early() -> None:
    """Finished elements of L and U: before the last rows move, and as they do."""
    m, changes = 900, {("left_done", 512): [(700, 100), (40, 700)], ("left_rows", 900): [(600, 50)]}
    a, findings, box = normal(m, m), Findings(), DeviceFactorisation.__new__(DeviceFactorisation)

    def after(task: Any) -> None:
        for place in changes.pop((task.name, *task.numbers), []):
            box.W[place] += 0.5

    box.__init__(on_card(a), checked=True, findings=findings, after=after)  # type: ignore[misc]
    box.wait()
    require_right(box, a)
    assert not changes
    assert box._plan.schedule.early == 512
    assert sorted(fault.columns for fault in findings.faults) == [(50,), (100,), (700,)]


def test_subnormal_numbers_are_evidence_as_well() -> None:
    """CuPy computes with float32 as if they were zero."""
    a = np.asarray(FAMILIES["gaussian kernel"](150, np.random.default_rng(3), np.float32), np.float32)
    tiny = np.finfo(np.float32).tiny
    assert np.count_nonzero((a != 0) & (abs(a) < tiny)) > 100
    W, piv = linalg.lu_factor(a)
    assert factor_evidence(on_card(a), on_card(W), piv).right
    a[0, -1] += tiny / 2  # which is U's
    assert not factor_evidence(on_card(a), on_card(W), piv).right


def test_an_interruption_leaves_all_as_it_was() -> None:
    def stop(stage: str, arrays: Mapping[str, Any]) -> None:
        if stage == "updated" and arrays["step"][0] == 128:
            raise KeyboardInterrupt

    a = normal(N, N)
    with pytest.raises(KeyboardInterrupt):
        tracked(a, stop)
    run, findings = tracked(a, lambda *_: None)
    require_right(run, a)
    assert not findings.statuses
    assert not run._plan._free  # the sums of the first one were given back, and are used by the second


def doubtful(a: np.ndarray, after: Any) -> tuple[DeviceFactorisation, Findings]:
    """A run whose steps are all in doubt; `after` is called when the norms of a step's lines have been computed."""
    findings, run = Findings(), DeviceFactorisation.__new__(DeviceFactorisation)

    def doubted(task: Any) -> None:
        if task.name == "judge_step":
            run._plan.buffers.in_doubt[0] = 3
            run._sums.status[run._plan.schedule.number_of(task.numbers[0])] |= 3
        elif task.name == "line_squares":
            after(run, *task.numbers)

    run.__init__(on_card(a), checked=True, findings=findings, after=doubted)  # type: ignore[misc]
    run.wait()
    return run, findings


def test_norms_of_lines_are_those_of_the_end() -> None:
    found: dict[tuple[int, int], Any] = {}

    def keep(run: DeviceFactorisation, j: int, width: int) -> None:
        looked = run._sums.looked[j // 128 % KEPT, : 6 * width].reshape(3, 2, width)
        found.update({(j, side): looked[2, side].copy() for side in (0, 1)})

    run, _ = doubtful(normal(N, N), keep)
    assert len(found) == 2 * -(-N // 128)
    for (first, side), squares in found.items():
        at_end = run._sums.on_device(("Ly", "gU")[side])[N:]
        np.testing.assert_allclose(squares, at_end[first : first + squares.size], rtol=1e-10)


def test_estimated_norms_that_do_not_do_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing waits for that: a step more is queued before the host looks at them."""
    queued, fine, looks = [], DeviceRepair._is_fine, []

    def look(self: DeviceRepair, number: int) -> bool:
        looks.append((number, len(queued)))
        return fine(self, number)

    part = QueuedRun.part
    monkeypatch.setattr(QueuedRun, "part", lambda self, number: (queued.append(number), part(self, number)))
    monkeypatch.setattr(QueuedRun, "before", lambda *_: pytest.fail("all is to go on"))
    monkeypatch.setattr(DeviceRepair, "_is_fine", look)
    run, findings = doubtful(normal(N, N), lambda *_: None)
    assert run.certified
    assert not findings.statuses
    assert looks == [(0, 3), (1, 4), (2, 5), (3, 5), (4, 5)]


def test_a_step_that_norms_might_have_explained_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a step more to take back, in which rows of finished columns have been settled."""
    m, number, planted, asked = 900, 4, [False], asked_of_evidence(monkeypatch)
    a, findings, run = normal(m, m), Findings(), DeviceFactorisation.__new__(DeviceFactorisation)

    def after(task: Any) -> None:
        if task.name == "update" and task.numbers[0] == 128 * (number - 1) and not planted[0]:
            planted[0] = True
            run.W[-1, 128 * number + 5] += 3.0
        elif task.name == "line_squares" and task.numbers[0] == 128 * number and planted[0] and not asked:
            residuals, bounds, squares = run._sums.looked[number % KEPT].reshape(3, 2, -1)
            residuals[:], squares[:] = 0, 0
            residuals[:, 3] = BEYOND / 2 * bounds[:, 3]

    run.__init__(on_card(a), checked=True, findings=findings, after=after)  # type: ignore[misc]
    run.wait()
    assert asked == [(number, number + DOUBTED)]
    assert findings.statuses == [Status.CORRECTED]
    assert (run._plan.schedule.early, run._plan.schedule.still) == (128 * number, number + DOUBTED - 1)
    require_right(run, a)


def test_norms_that_are_not_computed_are_not_those_of_an_earlier_step(monkeypatch: pytest.MonkeyPatch) -> None:
    a, launches, asked = normal(640, 640), FactorPlan._line_squares, asked_of_evidence(monkeypatch)

    def left_out(self: FactorPlan, lane: str, j: int, width: int) -> Any:
        return [] if j == 128 * KEPT else launches(self, lane, j, width)

    monkeypatch.setattr(FactorPlan, "_line_squares", left_out)
    run, _ = doubtful(a, lambda *_: None)
    assert [number for number, _ in asked] == [KEPT, KEPT]
    require_right(run, a)


@pytest.mark.parametrize("value", [np.nan, 1e9])
def test_norms_that_are_not_known_explain_nothing(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_of_evidence(monkeypatch)

    def spoil(run: DeviceFactorisation, j: int, width: int) -> None:
        if j == 256:
            run._sums.looked[2, 0] = value  # a residual

    run, _ = doubtful(normal(N, N), spoil)
    assert [number for number, _ in asked] == [2, 2]
    require_right(run, normal(N, N))
