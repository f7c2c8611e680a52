"""The stream suites of the benchmark where no GPU is: the grid, and whole runs on a fake card.

Their judge is tested in test_stream_judge.py, rows and bars in test_stream_bars.py, tables in test_stream_tables.py.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from abft_tsm2.core.device import known
from abft_tsm2.core.encode_both import encode_both
from benchmarks import bench_tsm2, contenders, gpu_timing, stream_bars, stream_grid, suite, tables
from benchmarks.bench_tsm2 import StreamSuite
from benchmarks.contenders import BOTH, CUPY, GEMV, TWO
from benchmarks.operands import Encodings, Products
from benchmarks.stream_bars import BARS, Bar
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


def bench(tmp_path: Path, *arguments: str) -> tuple[int, list[tables.Row]]:
    path = tmp_path / "stream.csv"
    code = bench_tsm2.main(["--no-torch", "--output", str(path), *arguments])
    return code, tables.read("stream", path)


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


def test_who_is_timed(card: Card, tmp_path: Path) -> None:
    _, rows = bench(tmp_path)

    def names(suite: str, order: str, dtype: str, n: int = 0) -> set[str]:
        fits = {"suite": suite, "order": order, "dtype": dtype} | ({"n": str(n)} if n else {})
        return {one["contender"] for one in rows if all(one[key] == value for key, value in fits.items())}

    layouts = {f"cuBLAS {a}{b}{c}" for a, b, c in product("C", "CF", "CF")}
    assert names("rows", "rows", "float32", 16) == {FUNCTION, CUPY, *layouts}
    assert names("rows", "rows", "float32", 1) == {FUNCTION, CUPY, GEMV, "cuBLAS CCC"}
    assert names("rows", "rows", "bfloat16") == {FUNCTION, CUPY, *layouts}
    columns = {name.replace(" C", " F") for name in layouts}
    assert names("columns", "columns", "float32", 16) == {FUNCTION, CUPY, "V3", *columns}
    assert names("transposed", "transposed", "float64") == {FUNCTION, CUPY, *columns}
    assert names("stream", "columns", "float32") == {FUNCTION, f"{FUNCTION}, graph", CUPY, "Opt-1", "Opt-2", *columns}
    assert names("batches", "rows", "float64") == {FUNCTION, f"{FUNCTION}, graph", CUPY, *layouts}
    assert names("both", "rows", "float32") == {BOTH, TWO, CUPY}
    assert names("host", "rows", "float32") == {FUNCTION, CUPY, f"{FUNCTION}, out", f"{CUPY}, out"}
    mixed = [one for one in rows if one["out"] == "float64" and one["dtype"] == "float32"]
    assert [one["contender"] for one in mixed] == [FUNCTION, CUPY]
    how = {one["contender"]: one["how"] for one in rows if one["suite"] == "complaints"}
    assert (how[FUNCTION], how[f"{FUNCTION}, graph"]) == ("queued", "graph")
    assert {one["kernel"] for one in rows if one["family"] == OWN and one["suite"] == "rows"} != {""}


def test_without_pytorch_and_bfloat16_the_others_are_timed(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def matmul(a: Any, b: Any, out: Any) -> None:
        raise TypeError("bfloat16 is not supported")

    monkeypatch.setattr(sys.modules["cupy"], "matmul", matmul)
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "stream.csv"
    assert bench_tsm2.main(["--output", str(path), "--only", "bfloat16", "--only", "complaints"]) == 1
    rows = tables.read("stream", path)
    notes = {one["contender"]: one["note"] for one in rows if one["dtype"] == "bfloat16" and one["ms"] == ""}
    assert notes == {CUPY: "TypeError: bfloat16 is not supported"}
    missing = {one["contender"] for one in rows if one["dtype"] == "float32" and "torch" in one["note"]}
    assert missing == {contenders.LT, contenders.TORCH}
    assert [one["contender"] for one in rows if one["error"]] == [CUPY]  # of float32, where it has to be


@pytest.mark.parametrize("works", [True, False])
def test_pytorch_is_timed_in_a_graph_and_left_out_where_it_fails(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    chosen: list[str] = []

    def matmul(a: Any, b: Any, out: Any) -> None:
        if chosen[-1] == "cublaslt" and not works:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        card.launch(lambda: np.copyto(out, a @ b), 3e-5)

    cuda = SimpleNamespace(stream=contextlib.nullcontext, ExternalStream=lambda pointer: None)
    torch = ModuleType("torch")
    torch.__dict__.update(
        as_tensor=lambda x, device: x,
        matmul=matmul,
        cuda=cuda,
        backends=SimpleNamespace(cuda=SimpleNamespace(preferred_blas_library=chosen.append)),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(contenders, "torch_graph", gpu_timing.graph)
    path = tmp_path / "stream.csv"
    bench_tsm2.main(["--output", str(path), "--suite", "stream", "--suite", "columns"])
    rows = [one for one in tables.read("stream", path) if "PyTorch" in one["contender"]]
    assert not any(one["error"] for one in rows)
    assert {one["contender"] for one in rows} == {contenders.LT, contenders.TORCH}
    for one in rows:
        if one["contender"] == contenders.LT and not works:
            assert (one["ms"], one["note"]) == ("", "RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED")
        else:
            assert float(one["ms"]) == pytest.approx(0.03, rel=1e-3)
            assert one["how"] == ("graph" if one["suite"] == "stream" else "queued")


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


def test_a_wrong_encoding_is_found(card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = contenders.encode_both

    def both(A: Any, V: Any, W: Any, *, squares: bool) -> Any:
        found = right(A, V, W, squares=squares)
        found.column_squares[7] *= 1 + 1e-4
        return found

    monkeypatch.setattr(contenders, "encode_both", both)
    code, rows = bench(tmp_path, "--suite", "both", "--only", "float32")
    assert code == 1
    assert {one["contender"] for one in rows if one["error"].startswith("wrong product of normal")} == {BOTH}


def test_a_call_that_makes_its_result_leaves_nan_behind_for_the_next(card: Card) -> None:
    (cell,) = (one for one in SMALL if one.suite == "host")
    operands = Products([cell], 1)
    operands.fill("normal", 0)
    entry = next(make() for name, _, make in contenders.products(cell, operands, H200, False) if name == FUNCTION)
    entry.call.run(0)
    (made,) = entry.outputs[0]
    assert operands.judge(entry.outputs[0]).ok
    entry.poison()
    assert np.isnan(made).all()
    assert entry.outputs == [[]]


def test_a_missed_bar_is_a_fault_and_shown(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    bar = Bar("half of reading", 0.5, where={"suite": ("rows",)})
    monkeypatch.setattr(stream_bars, "BARS", (bar,))
    code, _ = bench(tmp_path, "--suite", "rows")
    text = capsys.readouterr().out
    assert code == 1
    assert "| half of reading: >= 50.0% | 0.0% (" in text
    assert "FAULT half of reading: worst 0.0%, the bar is 50.0%" in text


def test_memory_and_time_limits_leave_cells_out(
    card: Card, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert bench(tmp_path, "--limit-seconds", "1") == (0, [])
    assert f"{len(SMALL)} cells left out after the time limit" in capsys.readouterr().out
    monkeypatch.setattr(StreamSuite, "bytes", lambda self, cells: card.memory + 1)
    code, rows = bench(tmp_path, "--suite", "both")
    assert code == 0
    assert {one["note"].partition(":")[0] for one in rows} == {"not measured"}


def test_the_estimate_of_memory_covers_operands_and_outputs(card: Card) -> None:
    for cell in (SMALL[0], *(one for one in SMALL if one.suite in ("batches", "both"))):
        kind = Encodings if cell.suite == "both" else Products
        operands = kind([cell], 2)
        assert kind.bytes([cell], 2) > sum(x.nbytes for x in operands.A) + cell.bytes


# ---- the host's clock ---------------------------------------------------------------------------------------------


def test_host_times_are_of_the_calls_and_not_of_the_card(card: Card) -> None:
    seen: list[str] = []

    def call(name: str, launches: int) -> Any:
        def run() -> None:
            seen.append(name)
            for _ in range(launches):
                card.launch(lambda: None, 1.0)  # the card is far slower than the host

        return run

    found = gpu_timing.host_times({"one": call("one", 1), "three": call("three", 3)}, 50)
    assert {name: len(times) for name, times in found.items()} == {"one": 60, "three": 60}
    assert found["one"] == pytest.approx([1e-5] * 60)
    assert found["three"] == pytest.approx([3e-5] * 60)
    assert [name for name, _ in groupby(seen)] == ["one", "three", "one", "three"]  # one, three; three, one; one, three
