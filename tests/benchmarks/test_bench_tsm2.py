"""The benchmark of the GPU kernels where no GPU is: its grid, its judge, its rows, and a whole run on a fake card.

The stopwatch itself is tested in test_gpu_timing.py, tables in test_benchmarks.py, figures in test_figures.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2.core.device import Ceilings, known
from abft_tsm2.core.paper.config import TSM2L, Config, is_valid, why_not
from abft_tsm2.errors import NotSuitable
from abft_tsm2.faults.judge import oracle
from abft_tsm2.faults.judge.oracle import reference, require
from benchmarks import bench_tsm2, contenders, gpu_timing, judge, sheet, suite, tsm2_grid
from benchmarks.bench_tsm2 import PaperSuite
from benchmarks.gpu_timing import Times
from benchmarks.judge import errors, worse
from benchmarks.rows import timed
from benchmarks.sheet import Sheet
from benchmarks.stream_grid import Cell
from benchmarks.tsm2_grid import COLUMNS, compare, empty_row, grid, kernels, key, product, published_ms, sweep
from tests.support.fake_card import Card
from tests.support.oracles import exact_product

H200 = known("H200")
CEILINGS = Ceilings(read_gbs=4600, copy_gbs=4300)

# ---- the grid -----------------------------------------------------------------------------------------------------


def test_the_grid_is_the_papers() -> None:
    cells = grid()
    assert len({str(cell) for cell in cells}) == len(cells)
    square = {(c.m, c.n, c.dtype) for c in cells if c.suite == "tsm2r" and c.m == c.k}
    sizes, widths = (10240, 20480, 30720, 40960), (2, 4, 8, 16, 64)
    assert square == {(m, n, dtype) for m in sizes for n in widths for dtype in ("float32", "float64")}
    tall = {(c.m, c.k, c.n) for c in cells if c.suite == "tsm2l"}
    assert tall == {(10**e, n, n) for e in (4, 5, 6, 7) for n in (8, 16)}
    assert {c.k for c in cells if c.suite == "rectangular"} == {15360, 7680, 3840, 1920}


def test_every_published_time_belongs_to_a_cell_of_the_default_subset() -> None:
    published = published_ms()
    assert len([one for one in published if one[0] == "tsm2r"]) == 24
    assert set(published) <= {key(empty_row(cell, "")) for cell in grid() if cell.default}


def test_every_kernel_that_is_timed_can_be_chosen() -> None:
    for cell in grid():
        assert {name: why_not(cell.problem, config, H200) for name, config in kernels(cell).items()} == dict.fromkeys(
            kernels(cell)
        )


def test_the_sweep_is_small_and_valid() -> None:
    for cell in grid():
        found = sweep(cell, H200)
        assert bool(found) == (cell.suite == "tsm2l")
        for variant, configs in found.items():
            assert variant in TSM2L
            assert 1 < len(configs) <= 24
            assert all(is_valid(cell.problem, config, H200) for config in configs)


def test_bytes_and_ceiling() -> None:
    assert product("tsm2r", 100, 50, 2, "float64").bytes == 8 * (5000 + 100 + 200)
    assert {cell.ceiling for cell in grid() if cell.suite in ("tsm2l", "tcf")} == {"copy"}
    assert {cell.ceiling for cell in grid() if cell.suite in ("tsm2r", "rectangular")} == {"read"}


# ---- the judge ----------------------------------------------------------------------------------------------------

SHAPES = ((7, 1, 3), (9, 5, 2), (40, 33, 4), (16, 700, 3))


def operands(shape: tuple[int, int, int], dtype: str, normal: bool) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(sum(shape))
    draw = rng.standard_normal if normal else rng.random
    m, k, n = shape
    return tuple(np.asfortranarray(draw(size).astype(dtype)) for size in ((m, k), (k, n)))  # type: ignore[return-value]


@pytest.mark.parametrize("normal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_exact_but_for_a_sliver_of_the_bound(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], dtype: str, normal: bool
) -> None:
    monkeypatch.setattr(oracle, "BLOCK_BYTES", 8 * shape[0] * 20)  # several blocks
    a, b = operands(shape, dtype, normal)
    found = reference(a, b)
    require(found, a, b)
    exact, high, low = exact_product(a, b), exact_product(found.high, np.eye(shape[2])), found.low
    unit = float(np.finfo(dtype).eps) / 2
    for (i, j), value in np.ndenumerate(exact):
        distance = abs(float(value - high[i, j] - exact_product(low[i : i + 1, j : j + 1], np.eye(1))[0, 0]))
        assert distance <= 2e-5 * shape[1] * unit * found.magnitude[i, j]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_right_product_passes_and_a_planted_error_does_not(shape: tuple[int, int, int], dtype: str) -> None:
    a, b = operands(shape, dtype, normal=True)
    expected, k = reference(a, b), shape[1]
    product = a @ b
    assert errors(product, expected, k).ok
    bound = k * np.finfo(dtype).eps / 2 * expected.magnitude[1, 1]
    for wrong in (product[1, 1] + 3 * bound, -np.inf, np.nan):
        planted = product.copy()
        planted[1, 1] = wrong
        found = errors(planted, expected, k)
        assert not found.ok
        assert found.outside == 1


def test_a_reference_that_is_off_is_refused() -> None:
    a, b = operands((9, 5, 2), "float64", normal=False)
    right = reference(a, b)
    for high in (right.high * (1 + 1e-14), np.full_like(right.high, np.nan)):
        with pytest.raises(ArithmeticError, match="nothing can be judged"):
            require(replace(right, high=high), a, b)


# ---- rows ---------------------------------------------------------------------------------------------------------

CELL = product("tsm2r", 20480, 20480, 16, "float64")


def cell_rows(milliseconds: dict[str, float], cell: Cell = CELL) -> list[dict[str, Any]]:
    """Rows of one cell, as a run makes them, with times that scatter by one in a thousand."""
    rows = []
    for name, ms in milliseconds.items():
        row = empty_row(cell, name)
        config = kernels(cell).get(name)
        if config is not None:
            row.update(config=config.name, t1=config.t1, t2=config.t2, t3=config.t3, tcf=config.tcf)
        seconds = [1e-3 * ms * (1 + 1e-3 * step) for step in range(-7, 8)]
        row.update(timed(cell, Times(seconds, batch=1, hidden=15), CEILINGS))
        rows.append(row)
    compare(rows, published_ms())
    return rows


def test_a_row_says_how_fast_and_beside_whom() -> None:
    milliseconds = {"V0": 40.0, "V1": 10.0, "V2": 5.0, "V3": 2.5, "cuBLAS": 1.0, "cuBLAS, A in rows": 0.8}
    rows = {row["contender"]: row for row in cell_rows({**milliseconds, contenders.CUPY: 1.25})}
    v3 = rows["V3"]
    assert (v3["ms"], v3["samples"], v3["hidden"]) == (2.5, 15, 1)
    assert v3["ms_low"] < v3["ms_lower_quartile"] + 1e-9 < v3["ms"] < v3["ms_upper_quartile"] < v3["ms_high"] + 1e-9
    assert v3["gbs"] == pytest.approx(CELL.bytes / 2.5e6, rel=1e-5)
    assert v3["share_of_ceiling"] == pytest.approx(v3["gbs"] / 4600, rel=1e-5)
    assert v3["gflops"] == pytest.approx(2 * 20480 * 20480 * 16 / 2.5e6, rel=1e-5)
    assert (v3["best_cublas"], v3["speedup"], v3["speedup_cupy"]) == ("cuBLAS, A in rows", 0.32, 0.5)
    assert [rows[name]["gain"] for name in ("V0", "V1", "V2", "V3")] == ["", 4, 2, 2]
    assert v3["ratio_to_published"] == pytest.approx(2.5 / 3.32, rel=1e-5)
    assert rows["V0"]["ratio_to_published"] == ""


def test_a_step_of_the_ladder_is_not_skipped_over() -> None:
    rows = {row["contender"]: row for row in cell_rows({"V0": 40.0, "V2": 5.0, "V3": 2.5})}
    assert rows["V2"]["gain"] == ""
    assert rows["V3"]["gain"] == 2


@pytest.mark.parametrize(("ms", "faults"), [(3.32, 0), (3.65, 0), (3.66, 1)])
def test_the_bar_is_a_tenth_over_the_published_code(ms: float, faults: int) -> None:
    assert len(tsm2_grid.verdict(cell_rows({"V3": ms}), published_ms())) == faults


def test_what_is_missing_or_wrong_is_a_fault() -> None:
    published = published_ms()
    row = {**empty_row(CELL, "V3"), "note": "not suitable: too wide"}
    assert tsm2_grid.verdict([row], published) == [f"{CELL} V3: no times the published code's time, the bar is 1.1"]
    assert tsm2_grid.verdict([{**row, "error": "wrong product"}], published) == [f"{CELL} V3: wrong product"]
    assert tsm2_grid.verdict([{**row, "contender": "Opt-2"}], published) == []


def test_a_nan_is_the_worst() -> None:
    good, bad = judge.Errors(0.5, 0.5, 0), judge.Errors(float("nan"), 0.1, 2)
    for pair in ((good, bad), (bad, good)):
        found = worse(*pair)
        assert np.isnan(found.norm)
        assert (found.worst, found.outside, found.ok) == (0.5, 2, False)


def test_a_sheet_keeps_each_row_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "rows.csv"
    one = Sheet(path, ("a", "b"))
    one.append({"a": 1, "b": "x, y"})
    assert path.read_text() == 'a,b\n1,"x, y"\n'  # before it is closed
    with one, Sheet(path, ("a", "b"), append=True) as more:
        more.append({"a": 2, "b": ""})
    assert sheet.read("any", path) == [{"a": "1", "b": "x, y"}, {"a": "2", "b": ""}]
    with pytest.raises(ValueError, match="other columns"):
        Sheet(path, ("a", "c"), append=True)
    with Sheet(path, ("a", "c")):
        pass
    assert path.read_text() == "a,c\n"


# ---- a whole run --------------------------------------------------------------------------------------------------

SMALL = (
    *(product("tsm2r", 60, 40, n, dtype) for dtype in ("float32", "float64") for n in (2, 16)),
    product("tsm2l", 300, 8, 8, "float32"),
    product("tcf", 300, 16, 16, "float64"),
    product("rectangular", 50, 20, 16, "float64"),
    product("small_k", 40, 1, 16, "float64"),
)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card whose kernels multiply with NumPy; Opt-2 serves no float64."""
    card = Card()
    for name, module in card.modules().items():
        monkeypatch.setitem(sys.modules, name, module)

    def run(config: Config, device: Any, A: Any, B: Any, C: Any) -> None:
        if (config.variant, config.dtype) == ("Opt-2", "float64"):
            raise NotSuitable("its tiles take too many registers")
        card.launch(lambda: np.copyto(C, A @ B), 1e-3)

    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(gpu_timing.time, name, lambda: card.host)

    def function(A: Any, B: Any, *, out: Any, dtype: Any = None) -> None:
        card.launch(lambda: np.copyto(out, A @ B), 5e-4)

    monkeypatch.setattr(contenders, "run", run)
    monkeypatch.setattr(contenders, "tall_skinny_matmul", function)
    monkeypatch.setattr(suite, "compiled", lambda config: None)
    monkeypatch.setattr(suite, "query", lambda: H200)
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
    monkeypatch.setattr(tsm2_grid, "grid", lambda: list(SMALL))
    monkeypatch.setattr("benchmarks.ceilings.BYTES", 1 << 20)
    return card


def bench(tmp_path: Path, *arguments: str) -> tuple[int, list[sheet.Row]]:
    path = tmp_path / "tsm2.csv"
    code = bench_tsm2.main(["--paper", "--no-torch", "--output", str(path), *arguments])
    return code, sheet.read("tsm2", path)


def test_a_run_times_and_judges_every_contender(card: Card, tmp_path: Path) -> None:
    code, rows = bench(tmp_path)
    assert code == 0
    assert {key(row) for row in rows} == {key(empty_row(cell, "")) for cell in SMALL}
    assert set(rows[0]) >= set(COLUMNS) | {"device", "driver", "cuda", "cupy", "numpy", "python", "date"}
    for row in rows:
        assert not row["error"]
        if "opt2" in row["config"] and row["dtype"] == "float64":
            assert row["note"].startswith("not suitable")
            assert row["ms"] == ""
            continue
        launches = int(row["n"]) if row["contender"] == contenders.GEMV else 1
        expected = 1.0 if row["t1"] else 0.5 if row["config"] else 2.0 * launches
        assert float(row["ms"]) == pytest.approx(expected, rel=1e-3)
        for column in ("norm_error_over_bound", "worst_element_over_bound"):
            assert 0 <= float(row[column]) <= 1
            assert 0 <= float(row[f"normal_{column}"]) <= 1
    names = {row["contender"] for row in rows if row["suite"] == "tsm2r"}
    assert names == {"V0", "V1", "V2", "V3", *contenders.LAYOUTS, contenders.GEMV, contenders.CUPY}
    tall = {row["contender"]: row for row in rows if row["suite"] == "tsm2l"}
    assert {"Opt-1", "Opt-1 swept", "Opt-2 swept"} <= set(tall)
    assert tall["tall_skinny_matmul"]["speedup"] == "4.0"


def test_an_interrupt_keeps_what_was_measured(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = PaperSuite.group

    def stops(self: Any, cells: Any) -> None:
        if cells[0].suite == "tcf":
            raise KeyboardInterrupt
        group(self, cells)

    monkeypatch.setattr(PaperSuite, "group", stops)
    code, rows = bench(tmp_path)
    assert code == 130
    assert {row["suite"] for row in rows} == {"tsm2r", "tsm2l"}


def test_a_lost_device_ends_the_run_with_a_row(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> None:
        card.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(contenders, "run", run)
    code, rows = bench(tmp_path, "--only", "rectangular", "--only", "small_k")
    assert code == 1
    assert [row["suite"] for row in rows] == ["rectangular"]
    assert "takes no more work" in rows[0]["error"]
