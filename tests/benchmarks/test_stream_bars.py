"""Rows of the stream suites, and the bars that a run is held against."""

from __future__ import annotations

from typing import Any

import pytest

from abft_tsm2.core.device import Ceilings
from benchmarks import (
    contenders,
    stream_bars,
)
from benchmarks.contenders import BOTH, CUPY
from benchmarks.gpu_timing import Times
from benchmarks.rows import timed
from benchmarks.stream_bars import BARS, Bar, verdicts
from benchmarks.stream_grid import FUNCTION, OTHER, OWN, PAPER, VENDOR, Cell, compare, empty_row, grid

CEILINGS = Ceilings(read_gbs=4600, copy_gbs=4300)
# ---- rows and bars ------------------------------------------------------------------------------------------------

CELL = Cell("stream", "rows", 10**6, 8, 8, "float32", "float32")


def row(cell: Cell, name: str, family: str, ms: float, *, graph: bool = False) -> dict[str, Any]:
    """A row with times that scatter by one in a thousand."""
    seconds = [1e-3 * ms * (1 + 1e-3 * step) for step in range(-7, 8)]
    times = timed(cell, Times(seconds, batch=1, hidden=15, graph=graph), CEILINGS)
    return {**empty_row(cell, name), "family": family, **times}


def test_speedups_compare_what_was_timed_the_same_way() -> None:
    rows = [
        row(CELL, FUNCTION, OWN, 0.02),
        row(CELL, f"{FUNCTION}, graph", OWN, 0.018, graph=True),
        row(CELL, "cuBLAS CCC", VENDOR, 0.05),
        row(CELL, "cuBLAS CFF", VENDOR, 0.04),
        row(CELL, CUPY, VENDOR, 0.06),
        row(CELL, contenders.TORCH, VENDOR, 0.036, graph=True),
        row(CELL, "Opt-1", PAPER, 0.01),
        {**row(CELL, "other", OTHER, 0.001)},
        {**row(CELL, "cuBLAS CCF", VENDOR, 0.001), "error": "wrong product"},
    ]
    compare(rows)
    assert (rows[0]["best_cublas"], rows[0]["speedup"], rows[0]["speedup_cupy"]) == ("cuBLAS CFF", 2, 3)
    assert (rows[1]["best_cublas"], rows[1]["speedup"], rows[1]["speedup_cupy"]) == (contenders.TORCH, 2, "")
    assert rows[-1]["speedup"] == ""
    graph, queued = Bar("", 2.0, "speedup"), Bar("", 2.0, "speedup", queued=True)
    assert graph.value(rows) == queued.value(rows) == 2
    rows[1]["speedup"] = 4.0
    assert (graph.value(rows), queued.value(rows)) == (4, 2)
    rows[1]["speedup"] = ""
    assert graph.value(rows) == 2
    assert Bar("", 0.9).value(rows) == rows[1]["share_of_ceiling"] > rows[0]["share_of_ceiling"]
    assert Bar("", 0.9).value(rows[2:]) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2.0),  # of CCC
        ({"layout": "CFF"}, 1.5),
        ({"layout": "FCC"}, ""),  # A lies otherwise
        ({"n": 1}, 1.5),  # one column lies as one row does
        ({"suite": "both"}, 1.5),
    ],
)
def test_speedups_over_the_same_layout(changes: dict[str, Any], expected: float | str) -> None:
    rows = [row(CELL, FUNCTION, OWN, 0.02), row(CELL, "first", VENDOR, 0.04), row(CELL, "second", VENDOR, 0.03)]
    for one, layout in zip(rows, ("CCC", "CCC", "CFF"), strict=True):
        one["layout"] = layout
    rows[0].update(changes)
    compare(rows)
    assert (rows[0]["speedup_alike"], rows[0]["speedup"]) == (expected, 1.5)


def test_the_host_time_is_that_beyond_cupys() -> None:
    cell = Cell("host", "rows", 64, 64, 2, "float32", "float32")
    rows = [
        {**empty_row(cell, name), "host_us": us} for name, us in ((FUNCTION, 18.0), (CUPY, 11.0), (f"{CUPY}, out", 7))
    ]
    compare(rows)
    assert [one["host_us_beyond_cupy"] for one in rows] == [7, 0, -4]


def measured(**changes: float) -> list[dict[str, Any]]:
    """Rows of the whole grid, in which this package's functions reach 99 % of the ceiling and are 6 times as fast."""
    rows = []
    for cell in grid():
        name = BOTH if cell.suite == "both" else FUNCTION
        ms = 1e-6 * cell.bytes / CEILINGS.of(cell.ceiling) / 0.99 / changes.get(str(cell), 1.0)
        of_cell = [row(cell, name, OWN, ms), row(cell, "cuBLAS", VENDOR, 6 * ms * changes.get(str(cell), 1.0))]
        of_cell.append(row(cell, CUPY, VENDOR, 6.5 * ms * changes.get(str(cell), 1.0)))
        if cell.suite == "host":
            of_cell = [
                {**empty_row(cell, FUNCTION), "family": OWN, "host_us": 20.0},
                {**empty_row(cell, CUPY), "host_us": 6},
            ]
        compare(of_cell)
        rows += of_cell
    return rows


def test_all_bars_hold_where_all_is_fast() -> None:
    found = verdicts(measured())
    assert [str(one) for one in found if not one.holds] == []
    assert all(one.cells == one.of for one in found)
    assert stream_bars.table(found).count("| yes |") == len(BARS)


@pytest.mark.parametrize(
    ("cell", "factor", "missed"),
    [
        ("rows float32 30720x30720x4", 0.975, ["rows float32, m = k = 30720, n = 1, 2, 4"]),
        ("columns float64 10240x10240x16", 0.885, ["columns float64, m = k = 10240, n = 16"]),
        ("stream columns float32 10000000x16x16", 0.9, ["TSM2L columns float32, m = 1e7, k = n = 8, 16"]),
        ("both float64 20480x20480x4", 0.6, ["encode_both float64, m = k = 20480, 30720, r = 4"]),
        ("odd rows float32 10007x10239x3", 0.16, ["no cell slower than 1.03 times the best cuBLAS of its layout"]),
        ("odd rows float32 10007x10239x3", 0.17, []),
        (
            "stream rows float64 100000x8x8",
            0.16,
            [
                "TSM2L over cuBLAS, m = 1e4, 1e5, both queued",
                "no cell slower than 1.03 times the best cuBLAS of its layout",
            ],
        ),
        ("complaints float32 40960x2x2", 0.7, ["(40960, 2) @ (2, 2), (1e6, 3) @ (3, 3) over cuBLAS by CuPy's @"]),
    ],
)
def test_a_slow_cell_misses_its_bars_and_is_named(cell: str, factor: float, missed: list[str]) -> None:
    found = [one for one in verdicts(measured(**{cell: factor})) if one.holds is False]
    assert [one.bar.name for one in found] == missed
    assert all(one.worst == cell for one in found)
    assert all(cell in str(one) and "the bar is" in str(one) for one in found)


def test_a_geometric_mean_is_one() -> None:
    bar = Bar("", 2.0, "speedup", {"suite": ("complaints",)}, mean=True)
    rows = [one for one in measured() if one["suite"] == "complaints"]
    for one, speedup in zip([one for one in rows if one["family"] == OWN], (1.0, 4.0, 16.0), strict=True):
        one["speedup"] = speedup
    (found,) = verdicts(rows, [bar])
    assert found.measured == pytest.approx(4)
    assert (found.holds, found.cells, found.of) == (True, 3, 3)


def test_what_was_not_measured_neither_holds_nor_is_missed() -> None:
    found = verdicts([one for one in measured() if one["suite"] == "both"])
    assert {one.holds for one in found} == {None, True}
    (slow,) = (one for one in found if one.bar.name.startswith("TSM2L float32 over"))
    assert (slow.measured, slow.holds, slow.cells, slow.of) == (None, None, 0, 8)


def test_the_last_row_of_a_contender_counts() -> None:
    slow = next(one for one in measured() if one["suite"] == "complaints" and one["family"] == OWN)
    rows = measured()
    name = "(40960, 2) @ (2, 2), (1e6, 3) @ (3, 3) over cuBLAS by CuPy's @"
    for extra, holds in (([], True), ([{**slow, "speedup_cupy": 1.0}], False)):
        (found,) = (one for one in verdicts([*rows, *extra]) if one.bar.name == name)
        assert found.holds is holds
