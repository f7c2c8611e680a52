"""Tables of the stream suites, from a CSV with made-up times of the whole grid."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import sheet, tables
from benchmarks.sheet import Sheet
from benchmarks.stream_bars import BARS
from benchmarks.stream_grid import COLUMNS, OWN, VENDOR, compare, empty_row, grid
from tests.benchmarks.test_stream_bars import CELL, measured, row

ENVIRONMENT = {"device": "Made-up card", "driver": "1", "cuda": "13.0", "cupy": "14", "date": "2026-01-01"}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """results/stream.csv, in which one product failed, one was not measured, one lost, and one was timed in a graph."""
    monkeypatch.setattr(sheet, "RESULTS", tmp_path)
    rows = measured(**{"rows float32 20480x20480x8": 0.1})
    by_name = {str(cell): cell for cell in grid()}
    for name, change in (
        ("columns float64 10240x10240x2", {"error": "wrong product", "speedup": ""}),
        ("odd rows float32 10007x10239x5", {"ms": "", "note": "not measured: takes 9 GB, 1 are free"}),
    ):
        cell = by_name[name]
        rows.append({**row(cell, "tall_skinny_matmul", OWN, 1.0), **change})
    graph = [
        row(CELL, "tall_skinny_matmul, graph", OWN, 0.016, graph=True),
        row(CELL, "cuBLAS through PyTorch", VENDOR, 0.048, graph=True),
    ]
    compare(graph)
    with Sheet(tmp_path / "stream.csv", (*COLUMNS, *ENVIRONMENT)) as written:
        for one in (*rows, *graph, {**empty_row(CELL, ""), "error": "a group that failed before this one"}):
            written.append({**one, **ENVIRONMENT})
    return tmp_path


def table(name: str) -> list[str]:
    """Head and rows, and the line below them."""
    text = tables.fill(f".. table:{name}\n.. /table\n")
    assert text.startswith(f".. table:{name}\n\n.. csv-table::\n")
    lines = [line.strip() for line in text.partition(":class: numbers\n\n")[2].splitlines()]
    assert len({line.count("|") for line in lines if "|" in line}) == 1
    return [line for line in lines if line and line != ".. /table"]


def rows_of(name: str) -> list[str]:
    return [line for line in table(name) if "|" in line][1:]


@pytest.mark.parametrize(
    ("name", "rows"), [("stream-tsm2r", 45), ("stream-odd", 12), ("stream-tsm2l", 43), ("both", 18), ("host", 4)]
)
def test_the_tables_show_every_cell(results: Path, name: str, rows: int) -> None:
    assert len(rows_of(name)) == rows
    assert "Made-up card, driver 1" in table(name)[-1]
    assert not any(line.startswith("|") for line in rows_of(name))


def test_who_lost_or_failed_is_shown(results: Path) -> None:
    lines = table("stream-tsm2r")
    assert lines[0] == "product | n = 1 | n = 2 | n = 4 | n = 8 | n = 16"
    assert "A @ B, rows, float32, m = k = 20480 | 99.0%, 6.00 x | 99.0%, 6.00 x | 99.0%, 6.00 x | 9.9%, 0.60 x |" in (
        next(line for line in lines if "rows, float32, m = k = 20480" in line)
    )
    assert "A @ B, columns, float64, m = k = 10240 | 99.0%, 6.00 x | failed |" in "\n".join(lines)
    assert any("A.T @ B, rows, bfloat16 -> float32" in line for line in lines)
    odd = table("stream-odd")
    assert "A @ B, rows, float32, 10007 x 10239 | 99.0%, 6.00 x |  | not measured |" in "\n".join(odd)
    assert any("leading dimension + 3" in line for line in odd)


def test_the_better_of_queued_and_graph_is_shown_beside_its_like(results: Path) -> None:
    (line,) = (line for line in table("stream-tsm2l") if line.startswith("rows, float32, 1000000 x 8 x 8 "))
    assert "| 0.0150 | queued |" in line or "| 0.015 | queued |" in line
    rows = sheet.read("stream")
    fast = [{**one, "ms": "0.01"} if one["how"] == "graph" and one["family"] == OWN else one for one in rows]
    with Sheet(results / "stream.csv", tuple(rows[0])) as written:
        for one in fast:
            written.append(one)
    (line,) = (line for line in table("stream-tsm2l") if line.startswith("rows, float32, 1000000 x 8 x 8 "))
    assert "| 0.01 | graph |" in line
    assert "| cuBLAS through PyTorch | 3.00 |" in line


def test_every_bar_has_a_line(results: Path) -> None:
    lines = rows_of("bars")
    assert len(lines) == len(BARS)
    assert sum("**no**" in line for line in lines) >= 2  # the share and the speed of the product that lost


def test_what_is_missing_is_told(results: Path) -> None:
    (results / "stream.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"stream\.csv is missing: run the benchmark"):
        table("both")
    with pytest.raises(ValueError, match=r"there is no table 'neither': choose from overhead, .* bars"):
        table("neither")
