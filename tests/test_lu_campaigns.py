"""Campaigns of clean and of faulty factorisations: what is planted where, what is counted, and what misses a bar."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import abft_tsm2
from abft_tsm2 import Report, Status
from benchmarks import lu_clean, lu_faults, lu_judge, lu_runs, lu_tables, tables
from benchmarks.lu_changes import TILE
from benchmarks.lu_plans import PLANS, Plan, Watch
from tests.fake_lu import FakeLibrary, held, library, same, show, started
from tests.lu_matrices import MATRICES
from tests.planting import normal

PLANS_OF_LU = [plan for plan in PLANS if plan.operation == "lu"]

# ---- the faults --------------------------------------------------------------------------------------------


class Looking:
    """A hook around another one, which keeps what that one changed."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.changes: list[tuple[str, tuple[int, int] | None, dict[str, np.ndarray]]] = []

    def __call__(self, stage: str, arrays: Any) -> None:
        before = held({name: x for name, x in arrays.items() if name != "step"})
        self.watch(stage, arrays)
        changed = {name: changes(arrays[name], x) for name, x in before.items() if not same(arrays[name], x)}
        if changed:
            self.changes.append((stage, arrays.get("step"), changed))


def changes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which elements differ, bit by bit."""
    x, y = (np.ascontiguousarray(z) for z in (x, y))
    different: np.ndarray = x.view(f"u{x.itemsize}") != y.view(f"u{y.itemsize}")
    return different


def place(plan: Plan, step: tuple[int, int] | None, shape: tuple[int, int]) -> np.ndarray:
    """Boolean: where in W a plan may change something."""
    (j, j1), (i, c) = step or (0, min(shape)), np.indices(shape)
    done = np.minimum(i, c) < j1
    places = {
        "not yet begun": c >= j1,
        "trailing": (i >= j1) & (c >= j1),
        "panel": (i >= j) & (c >= j) & (c < j1),
        "rows not exchanged: left": (i >= j) & (c < j),
        "rows not exchanged: right": (i >= j) & (c >= j1),
        "U12": (i >= j) & (i < j1) & (c >= j1),
        "finished L": done & (i > c),
        "finished U": done & (i <= c),
        "offline, L": i > c,
        "offline, U": i <= c,
        "offline": c >= 0,
        "A, where": (i >= j1) & (c >= j1),
    }
    return next(where for name, where in places.items() if plan.kind.startswith(name))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("plan", PLANS_OF_LU, ids=lambda plan: plan.kind)
def test_a_plan_changes_what_it_says_and_nothing_else(plan: Plan, dtype: str) -> None:
    a = normal(100, 100, dtype=dtype)
    planted = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        step = plan.step(7, rng)
        look = Looking(Watch(plan, step, rng))
        show(started(a), look, 16, plan.mode)
        assert look.watch.changed == bool(look.changes)
        if not look.changes:
            continue
        planted += 1
        ((stage, at, changed),) = look.changes  # one stage, once
        assert (stage, set(changed)) == (plan.stage, set(plan.names))
        assert at is None or at == (16 * step, min(16 * step + 16, 100))
        if "W" in changed:
            assert not (changed["W"] & ~place(plan, at, a.shape)).any()
        single = any(word in plan.kind for word in (" bit", "NaN", "Inf", "1e30", "value", "pivots, ", "places"))
        if single:
            assert all(where.sum() == 1 for where in changed.values())
        if "tile" in plan.kind:
            assert 1 < changed["W"].sum() <= TILE**2  # less at the edge
    assert planted >= 2


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan.operation == "cholesky"], ids=lambda plan: plan.kind)
def test_a_definite_matrix_is_changed_in_both_halves(plan: Plan) -> None:
    rng = np.random.default_rng(0)
    look = Looking(Watch(plan, plan.step(7, rng), rng))
    show(started(normal(100, 100)), look, 16, "online")
    ((_, at, changed),) = look.changes
    below = np.tril(changed["W"])
    np.testing.assert_array_equal(below | below.T, changed["W"] | changed["W"].T)
    assert below.any()
    assert at is None or plan.kind.startswith("finished") or (np.nonzero(below)[0] >= at[0]).all()


def test_kinds_have_names_of_their_own() -> None:
    names = Counter((plan.operation, plan.kind) for plan in PLANS)
    assert max(names.values()) == 1
    assert {plan.operation for plan in PLANS} == set(lu_faults.OPERATIONS)
    assert {plan.stage for plan in PLANS_OF_LU} == {
        *("encoded", "panel", "swapped", "solved", "updated", "finished", "factored"),
    }


def test_a_step_that_is_not_there_is_not_hit() -> None:
    rng = np.random.default_rng(0)
    plan = next(plan for plan in PLANS if plan.steps == "trailing")
    assert plan.step(1, rng) == -1
    assert {plan.step(3, rng) for _ in range(50)} == {0, 1}
    later = next(plan for plan in PLANS if plan.steps == "later")
    assert {later.step(3, rng) for _ in range(50)} == {1, 2}


# ---- the campaign of faults --------------------------------------------------------------------------------


def test_a_library_that_repairs_keeps_every_bar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library(monkeypatch)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert lu_faults.main(["--count", "200", "--jobs", "0"]) == 0
    told = capsys.readouterr().out
    assert "BAR MISSED" not in told
    assert "never planted" not in told
    rows = tables.read("lu_faults")
    assert {row["kind"] for row in rows if row["operation"] == "lu"} == {plan.kind for plan in PLANS_OF_LU}
    assert sum(int(row["planted"]) for row in rows) >= 200
    before_copy = next(row for row in rows if row["kind"] == "A, later")
    assert before_copy["refused"] == before_copy["planted"]
    text = lu_tables.faults()
    assert "| trailing: exponent bit |" in text
    assert "| trailing: random bit* |" in text
    assert "| fault in a solution |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


@pytest.mark.parametrize(
    ("manner", "outcome", "reason"),
    [("careless", "escaped1000", "escaped"), ("timid", "refused", "refused"), ("broken", "crashed", "crashed")],
)
def test_other_libraries_miss_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], manner: str, outcome: str, reason: str
) -> None:
    library(monkeypatch, manner)
    assert lu_faults.main(["--only", "3", "9", "--kind", "trailing: NaN", "--jobs", "0"]) == 1
    told = capsys.readouterr().out
    assert reason in next(line for line in told.splitlines() if line.startswith("BAR MISSED"))
    again = " --kind 'trailing: NaN'" if manner != "broken" else ""  # which fails without a fault, too
    assert f"python -m benchmarks.lu_faults --seed 0 --only 9{again}: 9: " in told
    assert f"2 {outcome}" in told


def test_the_same_seed_and_index_give_the_same_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch)
    every = [list(fault) for fault in lu_faults.one(5, " bit", 2)]
    some = [list(fault) for fault in lu_faults.one(5, "random bit", 2)]
    assert some
    assert [fault for fault in every if "random bit" in fault[1]] == some
    assert str(lu_faults.Case.draw(5, 2)) == str(lu_faults.Case.draw(5, 2)) != str(lu_faults.Case.draw(6, 2))


def counted(kind: str, dtype: str = "float64", operation: str = "lu", **counts: int) -> dict[str, Any]:
    zero = dict.fromkeys(lu_judge.OUTCOMES, 0)
    return {"operation": operation, "kind": kind, "dtype": dtype, "planted": sum(counts.values()), **zero, **counts}


def test_bars() -> None:
    def missed(*rows: dict[str, Any]) -> list[str]:
        return [" ".join((*at, reason)) for at, reason in lu_faults.missed(rows).items()]

    tile, bit, a = "trailing: tile", "trailing: random bit", "A, later"
    assert missed(counted(tile, repaired=199, refused=1), counted(bit, repaired=9, harmless=90)) == []
    assert missed(counted(tile, repaired=100, refused=1), counted(tile, "float32", repaired=99)) == []
    assert missed(counted(tile, repaired=199, refused=2))[0].startswith("lu trailing: tile 199 of 201 repaired")
    assert missed(counted(tile, repaired=9999, escaped20=1)) == ["lu trailing: tile 1 escaped"]
    assert missed(counted(a, refused=50, harmless=9)) == []
    assert missed(counted(a, refused=50, escaped20=1)) == ["lu A, later 1 escaped"]
    assert missed(counted(bit, repaired=98, escaped20=2)) == []
    # of one type, wherever they were planted
    assert missed(counted(bit, repaired=95, escaped20=5), counted("U12: random bit", repaired=200)) == []
    assert "3.0% escaped" in missed(counted(bit, repaired=97, escaped20=3), counted(bit, "float32", repaired=900))[0]
    far = counted(bit, repaired=998, escaped20=1) | {"escaped1000": 1}
    assert missed(far) == ["lu trailing: random bit 1 escaped by more than 1000 times"]
    assert missed(counted(tile, repaired=999, crashed=1))[0] == "lu trailing: tile 1 crashed"
    assert missed(counted(lu_faults.LOST, crashed=1))[0].endswith(
        "1 crashed, 0 of 1 repaired (at least 99.5%), none refused"
    )


# ---- the campaign without faults ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manner", "alarms", "wrong"), [("honest", 0, 0), ("alarming", 12, 0), ("wrong", 0, 12), ("broken", 0, 12)]
)
def test_false_alarms_and_wrong_factors_are_counted(
    monkeypatch: pytest.MonkeyPatch, manner: str, alarms: int, wrong: int
) -> None:
    library(monkeypatch, manner)
    rows, failures, stopped = lu_clean.sweep(range(12), 3)
    assert not stopped
    assert sum(row["factorisations"] for row in rows) == 12
    assert sum(row["alarms"] for row in rows) == alarms
    assert wrong - 3 <= sum(row["wrong"] for row in rows) <= wrong  # 1.5 x 0 is right
    assert bool(failures) == bool(alarms or wrong)
    if failures:
        assert failures[0].startswith("--only 0: ")


def test_overflow_excuses_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(MATRICES)
    at = names.index("wilkinson")
    monkeypatch.setattr(lu_clean, "_shape", lambda rng: (200, 200))
    monkeypatch.setattr(FakeLibrary, "_answer", refuses)
    library(monkeypatch)
    narrow, wide = lu_clean.one(0, at + len(names)), lu_clean.one(0, at)
    assert (narrow.dtype, narrow.alarm, narrow.unverifiable) == ("float32", "", True)
    assert (wide.dtype, wide.alarm) == ("float64", "UNCORRECTABLE")


def refuses(self: FakeLibrary, operation: str, result: Any, faulty: bool, lost: bool, a: Any, options: Any) -> Any:
    raise abft_tsm2.SilentDataCorruptionError(Report(Status.UNCORRECTABLE, operation, *a.shape, 1, a.dtype.name))


def test_an_interrupt_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    honest = lu_clean.one

    def interrupted(seed: int, index: int) -> lu_clean.Verdict:
        if index == 3:
            raise KeyboardInterrupt
        return honest(seed, index)

    library(monkeypatch)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(lu_clean, "one", interrupted)
    assert lu_clean.main(["--count", "9", "--jobs", "0"]) == 130
    assert len(tables.read("lu_clean")) == 3
    text = lu_tables.clean()
    assert "| float64 | 3 | 0 |" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_cases_are_spread_over_processes_and_a_lost_one_costs_no_other() -> None:
    found = dict(lu_runs.spread(math.sqrt, [4, -1, 9, 16], 2))  # the second ends its process
    assert isinstance(found.pop(-1), lu_runs.Lost)
    assert found == {4: 2.0, 9: 3.0, 16: 4.0}
    assert dict(lu_runs.spread(math.sqrt, [], 3)) == {}


# ---- samples of both, of the true library ------------------------------------------------------------------


def test_no_false_alarm_in_a_sample() -> None:
    rows, failures, _ = lu_clean.sweep(range(2 * len(MATRICES)), 1)
    assert failures == []
    assert {row["family"] for row in rows} == set(MATRICES)
    assert {row["dtype"] for row in rows} == {"float64", "float32"}


def test_no_fault_of_a_sample_escapes() -> None:
    found, _ = lu_faults.campaign([0, 9], 1, kind="NaN")
    assert found.planted > 20
    assert found.escaped == 0
    assert [name for name in found.never("NaN") if name.startswith("lu")] == []
