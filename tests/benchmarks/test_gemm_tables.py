"""What becomes of the times of protected products: rows, bars and tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import gemm_bars, gemm_grid, sheet, tables
from benchmarks.gemm_bars import BARS, verdicts
from benchmarks.gemm_grid import TF32, WIDE, Cell
from benchmarks.gpu_timing import Times
from benchmarks.markup import gpu
from benchmarks.sheet import Sheet


def row(cell: Cell, percent: float, plain: float = 1e-3) -> dict[str, Any]:
    """A row whose rounds drift by half, both samples alike."""
    drift = [plain * (1 + 0.05 * i) for i in range(11)]
    mine = [x * (1 + 1e-2 * percent) for x in drift]
    made = gemm_grid.timed(cell, Times(drift, hidden=11), Times(mine, hidden=9), 4000)
    return {**gemm_grid.empty_row(cell), **made, "read_gbs": 4000, "status": "CLEAN", "judged": 0.1}


def test_rounds_are_compared_in_pairs() -> None:
    found = row(Cell("square", 1024, 1024, 1024, "float32"), 3.0)
    assert found["overhead_pct"] == found["low_pct"] == found["high_pct"] == 3
    assert found["plain_us"] == pytest.approx(1250)
    assert found["overhead_us"] == pytest.approx(37.5)
    assert (found["samples"], found["hidden"]) == (11, 9)
    assert "hidden 9 of 11" in gemm_grid.text(found)
    cell = Cell("square", 40, 40, 40, "float32")
    assert gemm_grid.timed(cell, Times(error="lost"), Times([1.0]), 4000) == {"error": "lost"}
    assert "time limit" in gemm_grid.timed(cell, Times(), Times(), 4000)["error"]


def measured(factor: float) -> list[dict[str, Any]]:
    """Rows of the whole grid, each at so much of its bar."""
    rows = []
    for cell in gemm_grid.grid():
        limits = [bar for bar in BARS if bar.covers(cell)]
        limit = limits[0].limit if limits and limits[0].column == "overhead_pct" else 10
        one = row(cell, factor * limit)
        if cell.suite == "host":
            one = {**gemm_grid.empty_row(cell), "host_us": 60 * factor, "read_gbs": 4000}
        elif (cell.suite, cell.n) == ("square", 512):
            one["overhead_us"] = 20 * factor
        rows.append(one)
    return rows


def test_bars_hold_or_are_missed() -> None:
    found = verdicts(measured(0.9))
    assert [str(one) for one in found if not one.holds] == []
    assert gemm_bars.table(found).count("| yes |") == len(BARS)
    missed = verdicts(measured(1.4))
    assert all(one.holds is False for one in missed)
    text = gemm_bars.table(missed)
    assert text.count("| **no** |") == len(BARS)
    assert "| float32, one-sided, n = 2048: <= 4.00 % | 5.60 % (square float32 2048x2048x2048 one-sided) |" in text
    assert "| host time of a call that is not waited for: <= 80.0 us | 84.0 us (" in text
    assert {one.holds for one in verdicts([])} == {None}


def test_the_last_row_counts_and_a_wrong_one_does_not() -> None:
    rows = measured(0.9)
    (at,) = (i for i, one in enumerate(rows) if (one["suite"], one["n"], one["variant"]) == ("square", 512, TF32))
    assert rows[at]["overhead_us"] == 18
    wrong = [{**one, "error": "wrong product"} for one in rows if one["suite"] == "host"]
    (host,) = (one for one in verdicts([*rows, *wrong]) if one.bar.column == "host_us")
    assert host.holds is None


def test_the_days_of_rows_are_told() -> None:
    card = {"device": "Made-up card", "driver": "1", "cuda": "13.0", "cupy": "14"}
    days = [{**card, "date": f"2026-01-0{day}"} for day in (2, 3, 1)]
    assert gpu(days[0]) == gpu(*days[:1] * 2) == "Made-up card, driver 1, CUDA 13.0, CuPy 14, 2026-01-02"
    assert gpu(*days).endswith(", 2026-01-01 to 2026-01-03")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    environment = {"device": "Made-up card", "driver": "1", "cuda": "13.0", "cupy": "14", "date": "2026-01-01"}
    monkeypatch.setattr(sheet, "RESULTS", tmp_path)
    rows = measured(0.9)
    (failed,) = (one for one in rows if (one["dtype"], one["n"], one["variant"]) == ("float16", 4096, WIDE))
    failed.update(error="wrong product")
    with Sheet(tmp_path / "gemm_device.csv", (*gemm_grid.COLUMNS, *environment)) as written:
        for one in rows:
            written.append({**one, **environment})
    return tmp_path


def table(name: str) -> list[str]:
    """Head and rows."""
    lines = tables.fill(f".. table:{name}\n.. /table\n").partition(":class: numbers\n\n")[2].splitlines()
    found = [line.strip() for line in lines if "|" in line]
    assert len({line.count("|") for line in found}) == 1
    assert name == "gemm-bars" or any("Made-up card" in line for line in lines)
    return found


def test_the_tables_show_every_cell(results: Path) -> None:
    names = ("gemm-square", "gemm-shapes", "gemm-repair", "gemm-host", "gemm-bars")
    lengths = {name: len(table(name)) - 1 for name in names}
    assert lengths == {"gemm-square": 29, "gemm-shapes": 26, "gemm-repair": 18, "gemm-host": 5, "gemm-bars": len(BARS)}
    lines = table("gemm-square")
    (line,) = (one for one in lines if one.startswith("float32 2048 x 2048 x 2048 |"))
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[1:4] == ["1250", "3.60%", "3.60% to 3.60%"]
    assert cells[6] == "2.52%"
    assert float(cells[9]) == pytest.approx(1250 * (0.036 - 0.0252), abs=0.1)
    assert "| failed |" in next(one for one in lines if one.startswith("float16 4096 "))
    assert any(one.startswith("float32 by TF32 4096 ") for one in lines)
