"""The stream suites of the benchmark where no GPU is: the grid, and whole runs on a fake card.

Their judge is tested in test_stream_judge.py, rows and bars in test_stream_bars.py, tables in test_stream_tables.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2.core.device import known
from abft_tsm2.core.encode_both import encode_both
from benchmarks import bench_tsm2, contenders, gpu_timing, sheet, stream_bars, stream_grid, suite
from benchmarks.contenders import CUPY, GEMV
from benchmarks.stream_bars import BARS
from benchmarks.stream_grid import FUNCTION, OTHER, OWN, PAPER, SUITES, Cell, grid
from tests.support.fake_card import Card

H200 = known("H200")

# ---- the grid -----------------------------------------------------------------------------------------------------


def test_names_and_groups_are_unique_and_neighbours() -> None:
    cells = grid()
    assert len({str(cell) for cell in cells}) == len(cells)
    assert {cell.suite for cell in cells} == set(SUITES)
    groups = [group for group, _ in groupby(cells, key=lambda cell: cell.group)]
    assert len(groups) == len(set(groups))


def test_every_bar_speaks_of_cells_some_of_them_of_the_default_subset() -> None:
    cells = grid()
    assert len({bar.name for bar in BARS}) == len(BARS)
    for bar in BARS:
        covered = [cell for cell in cells if bar.covers(cell)]
        assert covered, bar.name
        rare = bar.name.startswith("transposed")
        assert rare or any(cell.default for cell in covered), bar.name


def test_bytes_ceilings_and_names() -> None:
    plain = Cell("rows", "rows", 100, 50, 2, "float32", "float64")
    assert plain.bytes == 4 * 5000 + 8 * 100 + 8 * 200
    assert (str(plain), plain.ceiling, plain.weights) == ("rows float32->float64 100x50x2", "read", "float64")
    half = replace(plain, dtype="bfloat16", out="float32")
    assert (half.bytes, half.weights, half.sums) == (2 * 5000 + 2 * 100 + 4 * 200, "bfloat16", "float32")
    several = Cell("batches", "columns", 100, 8, 8, "float64", "float64", products=10)
    assert several.bytes == 10 * 8 * (800 + 64 + 800)
    assert (several.ceiling, str(several)) == ("copy", "batches columns float64 10 of 100x8x8")
    both = Cell("both", "rows", 100, 50, 2, "float64", "float64")
    assert both.bytes == 8 * (5000 + (100 + 50) * (2 + 2 + 1))
    assert both.flops == 2 * replace(both, suite="rows").flops


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card on which this package's functions take 0.1 ms, the paper's kernels 1 ms, and cuBLAS 2 ms."""
    card = Card()
    for name, module in card.modules().items():
        monkeypatch.setitem(sys.modules, name, module)

    def function(A: Any, B: Any, *, out: Any = None, dtype: Any = None) -> Any:
        assert dtype is None or dtype == out.dtype.name
        if out is None:
            out = sys.modules["cupy"].empty((*A.shape[:-1], B.shape[-1]), dtype=A.dtype)
        sums = "float64" if out.dtype == np.float64 else "float32"
        card.launch(lambda: np.copyto(out, A.astype(sums) @ B.astype(sums)), 1e-4)
        return out

    def both(A: Any, V: Any, W: Any, *, squares: bool) -> Any:
        card.launch(lambda: None, 1e-4)
        return encode_both(A, V, W, squares=squares)

    def paper(config: Any, device: Any, A: Any, B: Any, C: Any) -> None:
        card.launch(lambda: np.copyto(C, A @ B), 1e-3)

    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(gpu_timing.time, name, lambda: card.host)
    monkeypatch.setattr(contenders, "tall_skinny_matmul", function)
    monkeypatch.setattr(contenders, "encode_both", both)
    monkeypatch.setattr(contenders, "run", paper)
    monkeypatch.setattr(suite, "compiled", lambda config: None)
    monkeypatch.setattr(suite, "query", lambda: H200)
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
    monkeypatch.setattr(stream_grid, "grid", lambda: SMALL)
    monkeypatch.setattr(stream_bars, "BARS", [bar for bar in BARS if bar.column != "share_of_ceiling"])
    monkeypatch.setattr("benchmarks.ceilings.BYTES", 1 << 20)
    monkeypatch.setattr(gpu_timing, "CALLS", 40)
    return card


SMALL = (
    *(Cell(order, order, 60, 40, n, "float32", "float32") for order in ("rows", "columns") for n in (1, 2, 16)),
    Cell("rows", "rows", 60, 40, 2, "float32", "float64"),
    *(Cell("rows", "rows", 60, 40, n, "bfloat16", "float32") for n in (2, 4)),
    Cell("transposed", "transposed", 60, 40, 4, "float16", "float32"),
    Cell("transposed", "transposed", 60, 40, 4, "float64", "float64"),
    *(Cell("leading", order, 50, 60, 4, "float64", "float64", lead=3) for order in ("rows", "columns")),
    *(Cell("stream", order, 300, 8, 8, "float32", "float32") for order in ("rows", "columns")),
    *(Cell("batches", order, 30, 8, 8, "float64", "float64", products=5) for order in ("rows", "columns")),
    Cell("complaints", "rows", 400, 2, 2, "float32", "float32"),
    *(Cell("both", "rows", 60, 40, r, dtype, dtype) for dtype in ("float32", "float64") for r in (1, 4)),
    Cell("host", "rows", 64, 64, 2, "float32", "float32"),
)

# ---- a whole run --------------------------------------------------------------------------------------------------


def bench(tmp_path: Path, *arguments: str) -> tuple[int, list[sheet.Row]]:
    path = tmp_path / "stream.csv"
    code = bench_tsm2.main(["--no-torch", "--output", str(path), *arguments])
    return code, sheet.read("stream", path)


def test_a_run_times_and_judges_every_contender(card: Card, tmp_path: Path, capsys: Any) -> None:
    code, rows = bench(tmp_path)
    text = capsys.readouterr().out
    assert [one["error"] for one in rows if one["error"]] == []
    assert code == 0, text
    by_cell = {str(cell): [one for one in rows if one["m"] == str(cell.m)] for cell in SMALL}
    assert all(by_cell.values())
    for one in rows:
        if one["suite"] == "host":
            assert float(one["host_us"]) == pytest.approx(10, rel=1e-3)  # a launch of the fake card
            continue
        launches = int(one["n"]) if one["contender"] == GEMV else 2 if one["suite"] == "both" else 1
        ms = {OWN: 0.1, PAPER: 1.0}.get(one["family"], 2.0 * launches)
        assert float(one["ms"]) == pytest.approx(ms, rel=1e-3), one["contender"]
        assert one["family"] == OTHER or float(one["worst_element_over_bound"]) <= 1
        assert 0 <= float(one["normal_norm_error_over_bound"]) <= 1
    assert f"{len(SMALL)} of {len(SMALL)} cells" in text


@pytest.mark.parametrize("fault", ["one element", "not written", "raises", "only in the end"])
def test_a_wrong_product_is_found(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, capsys: Any
) -> None:
    right, count = contenders.tall_skinny_matmul, 0

    def function(A: Any, B: Any, *, out: Any, dtype: Any) -> Any:
        nonlocal count
        right(A, B, out=out, dtype=dtype)
        if out.dtype != np.float64:
            return
        count += 1
        if fault == "raises":
            raise ValueError("no")
        if fault == "not written":
            out[-1] = np.nan
        if fault == "one element" or (fault == "only in the end" and count > 10):
            out[3, 1] *= 1 + 1e-11

    monkeypatch.setattr(contenders, "tall_skinny_matmul", function)
    code, rows = bench(tmp_path, "--suite", "rows", "--suite", "transposed")
    assert code == 1
    assert {(one["contender"], one["out"]) for one in rows if one["error"]} == {(FUNCTION, "float64")}
    assert "FAULT rows rows float32 float64 60 40 2 1 0 tall_skinny_matmul: " in capsys.readouterr().out


def test_a_wrong_product_of_another_library_is_left_out(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    right = sys.modules["cupy"].matmul

    def matmul(a: Any, b: Any, out: Any) -> None:
        right(a, b, out=out)
        out[3, -1] *= 1.5

    monkeypatch.setattr(sys.modules["cupy"], "matmul", matmul)
    code, rows = bench(tmp_path, "--suite", "rows")
    assert code == 0
    assert {one["contender"] for one in rows if one["error"].startswith("wrong product")} == {CUPY}
    assert "left out: rows rows float32 float32 60 40 2 1 0 CuPy A @ B: wrong product" in capsys.readouterr().out
