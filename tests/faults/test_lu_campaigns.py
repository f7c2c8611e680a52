"""The campaign of clean factorisations: what is counted, and what misses a bar."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import abft_tsm2
from abft_tsm2 import Report, Status
from benchmarks import lu_clean, lu_runs, lu_tables, tables
from tests.support.fake_lu import FakeLibrary, library
from tests.support.lu_matrices import MATRICES

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


# ---- a sample of the true library --------------------------------------------------------------------------


def test_no_false_alarm_in_a_sample() -> None:
    rows, failures, _ = lu_clean.sweep(range(2 * len(MATRICES)), 1)
    assert failures == []
    assert {row["family"] for row in rows} == set(MATRICES)
    assert {row["dtype"] for row in rows} == {"float64", "float32"}
