"""Two versions measured in turns: what is slower is told, and what fails does not end the run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from benchmarks import before_after

HERE = Path(before_after.__file__).parents[1]


def answering(monkeypatch: pytest.MonkeyPatch, before: Any, now: Any) -> None:
    monkeypatch.setattr(before_after, "ask", lambda version, cell: {"before": before, "now": now}[version])


@pytest.mark.parametrize(("now", "slower"), [(100e-6, False), (101.5e-6, False), (103e-6, True), (50e-6, False)])
def test_what_is_slower_is_told(monkeypatch: pytest.MonkeyPatch, now: float, slower: bool) -> None:
    answering(monkeypatch, 100e-6, now)
    versions: list[Any] = ["before", "now"]
    row = before_after.compared(versions, {"suite": "gemm", "m": 5}, 7)
    assert (row["cell"], row["before_us"], row["slower"]) == ("gemm 5", "100.000", slower)
    assert float(row["difference_us"]) == pytest.approx((now - 100e-6) * 1e6, abs=1e-3)


def test_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 1e-3, "ValueError: no")
    versions: list[Any] = ["before", "now"]
    assert before_after.compared(versions, {"suite": "gemm"}, 3)["error"] == "now: ValueError: no"


def test_a_version_is_measured_beside_itself(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    before_after.main([str(HERE), "--only", "float64 64", "--rounds", "2", "--output", str(path)])
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["cell"] == "gemm float64 64 64 64"
    assert float(row["before_us"]) > 0
    assert not row["error"]


def test_cells_of_the_gpu_are_those_of_the_results() -> None:
    suites = {cell["suite"] for cell in before_after.gpu_cells()}
    assert suites == {"square", "skinny", "batched", "repair", "host", "tsm2", "encode"}
