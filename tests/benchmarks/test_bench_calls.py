"""Calls in a loop where no GPU is: the grids, rows of a CPU, whole runs on a fake card, tables and the figure."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, policy, protected_gemm
from abft_tsm2.checksum.encoded import Encoded
from abft_tsm2.core.device import known
from abft_tsm2.gemm import small
from abft_tsm2.report import Status
from benchmarks import (
    bench_calls,
    calls_cpu,
    calls_gpu,
    calls_grid,
    calls_loop,
    figures,
    gpu_timing,
    sheet,
    suite,
    tables,
)
from benchmarks.calls_grid import CPU, DEFERRED, ENCODED, GPU, GRAPH, PROTECTED, TRUSTED, WAITED, Cell
from benchmarks.calls_loop import Loop, difference, race
from tests.support.fake_card import Card
from tests.support.fake_products import Protected, multiplied, operands, report_of

# ---- the grid -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", [CPU, GPU])
def test_names_are_unique_and_groups_are_neighbours(library: str) -> None:
    cells = calls_grid.grid(library)
    assert len({str(cell) for cell in cells}) == len(cells)
    groups = [group for group, _ in groupby(cells, key=lambda cell: cell.group)]
    assert len(groups) == len(set(groups)) == (36 if library == GPU else 32)
    assert {cell.variant for cell in cells} == set(calls_grid.VARIANTS[library])
    assert {cell.n for cell in cells if cell.quick} == set(calls_grid.QUICK)


def test_a_floor_counts_each_matrix_once() -> None:
    cell = Cell(GPU, "float32", 100, DEFERRED)
    assert cell.checked_bytes == 3 * 4 * 100**2
    assert Cell(GPU, "float32", 100, TRUSTED).checked_bytes == 2 * 4 * 100**2
    row = calls_grid.compared(cell, [2e-6, 4e-6, 2e-6], [3e-6, 8e-6, 3e-6], 100.0)
    assert (row["plain_us"], row["protected_us"], row["overhead_us"], row["overhead_pct"]) == (2, 3, 1, 50)
    assert (row["rounds"], row["floor_pct"]) == (3, 60)


# ---- loops --------------------------------------------------------------------------------------------------------


def test_loops_take_turns_and_one_that_raises_stops_alone() -> None:
    order: list[str] = []

    def bad() -> None:
        order.append("bad")
        if order.count("bad") > 2:
            raise ValueError("no such luck")

    C = np.zeros((2, 2))
    loops = {"good": Loop(lambda: order.append("good"), 2, C), "bad": Loop(bad, 1, C)}
    told: list[Exception] = []
    race(loops, (3, 3), 0.0, failed=told.append)
    assert order == ["bad", "good", "good", "good", "good", "bad", "bad", "good", "good", "good", "good"]
    assert len(loops["good"].seconds) == len(loops["good"].returned) == 3
    assert (loops["bad"].error, loops["bad"].seconds, len(told)) == ("ValueError: no such luck", [], 1)


def test_reports_that_are_not_clean_or_not_there_are_told() -> None:
    def call(*statuses: Status) -> Any:
        answers = iter(statuses)
        return lambda: policy.receive(report_of(next(answers)))

    for statuses, said in (
        ((Status.CLEAN, Status.CLEAN), ""),
        ((Status.CLEAN, Status.CORRECTED), "2 reports should say CLEAN; there are 1 CLEAN, 1 CORRECTED"),
    ):
        loop = Loop(call(*statuses), 2, np.zeros((2, 2)), reports=1)
        loop.once(lambda: None)
        assert loop.trouble == said
    silent = Loop(lambda: None, 2, np.zeros((2, 2)), reports=1)
    silent.once(lambda: None)
    assert silent.trouble == "2 reports should say CLEAN; there are none"


def test_without_a_monitor_a_call_that_finds_anything_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    (A, B), calls = operands("float64", (40, 30, 50)), list[int]()
    C = np.empty((40, 50))

    def call() -> None:
        calls.append(1)
        protected_gemm(A, B, out=C)

    loop = Loop(call, 3, C, watched=False, reports=1)
    loop.once(lambda: None)
    assert (loop.trouble, loop.due, len(calls)) == ("", 1, 4)
    monkeypatch.setattr(small, "multiply", lambda A, B, C, **_: C.fill(1e4))
    with pytest.raises(SilentDataCorruptionError):
        loop.once(lambda: None)


@pytest.mark.parametrize("dtype", calls_grid.TYPES)
def test_the_judge(dtype: str) -> None:
    A, B = operands(dtype, (60, 50, 70))
    C = multiplied(A, B)
    calls_loop.require_product(A, B, C)
    assert difference(C, C) == 0
    other = np.nextafter(C, np.asarray(0, C.dtype))
    assert 0 < difference(other, C) <= 1
    for wrong in (0.5, np.nan):
        bad = C.copy()
        bad[13, :] += wrong * 30
        assert not difference(bad, C) <= 1
        with pytest.raises(ArithmeticError, match="plain product is wrong"):
            calls_loop.require_product(A, B, bad)


# ---- a CPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_cpu, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(calls_grid, "CALLS", 5)
    monkeypatch.setattr(calls_cpu, "CALLS", 5)


@pytest.mark.usefixtures("fast")
def test_rows_of_a_cpu(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "calls.csv"
    arguments = ["--quick", "--only", "float32 16 ", "--only", "bfloat16 16 protected", "--output", str(path)]
    for times in (1, 2):  # --only appends
        assert bench_calls.main(arguments) == 0, capsys.readouterr().out
        rows = sheet.read("calls", path)
        assert [(row["dtype"], row["variant"]) for row in rows] == times * [
            *(("float32", PROTECTED), ("float32", ENCODED)),
            ("bfloat16", PROTECTED),
        ]
    for row in rows:
        assert (row["library"], row["status"], row["error"], row["beside"]) == (CPU, "CLEAN", "", "numpy.matmul")
        assert (row["calls"], row["rounds"]) == ("5", "3")
        assert 0 <= float(row["judged"]) <= 1
        assert float(row["plain_us"]) > 0
        assert float(row["floor_pct"]) > 0
        assert row["device"]
        assert row["numpy"] == np.__version__
    assert "3 of 3 cells" in capsys.readouterr().out


def test_a_loop_has_fewer_calls_where_it_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(calls_cpu.time, "perf_counter", lambda: now[0])
    for seconds, calls in ((1e-3, 200), (7e-3, 200), (8e-3, 100), (0.1, 10), (5.0, 2)):
        took = chain([min(10 * seconds, max(seconds, 0.04))], repeat(seconds))  # the first one is disturbed

        def call(took: Iterator[float] = took) -> None:
            now[0] += next(took)

        assert calls_cpu.Loops(quick=False).calls(call) == calls


@pytest.mark.usefixtures("fast")
def test_a_wrong_product_on_a_cpu_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def wrong(a: Any, b: Any, out: Any) -> Any:
        policy.receive(report_of(Status.CLEAN))
        return np.copyto(out, np.matmul(a, b) + 1)

    monkeypatch.setattr(calls_cpu, "protected_gemm", wrong)
    path = tmp_path / "calls.csv"
    assert bench_calls.main(["--quick", "--only", "float64 16 protected", "--output", str(path)]) == 1
    assert "wrong product" in sheet.read("calls", path)[0]["error"]
    assert "1 faults" in capsys.readouterr().out


@pytest.mark.usefixtures("fast")
def test_an_interrupted_run_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(cells: Any, *_: Any, measure: Any = calls_cpu.measure) -> Any:
        if cells[0].n == 256:
            raise KeyboardInterrupt
        return measure(cells, *_)

    monkeypatch.setattr(calls_cpu, "measure", interrupted)
    path = tmp_path / "calls.csv"
    assert bench_calls.main(["--quick", "--output", str(path)]) == 130
    assert [row["n"] for row in sheet.read("calls", path)] == ["16", "16"]
    assert "left out after an interrupt" in capsys.readouterr().out


def test_names_that_are_not_there(capsys: Any) -> None:
    assert bench_calls.main(["--only", "flaot32"]) == 2
    assert "no cell of numpy is named like flaot32" in capsys.readouterr().out
    assert bench_calls.main(["--device", "--quick", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4 * 3 * 5
    with pytest.raises(SystemExit):
        bench_calls.main(["--qick"])


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert bench_calls.main(["--device", "--output", str(tmp_path / "x.csv")]) == 2
    assert "nothing can be measured here" in capsys.readouterr().out


# ---- a fake card --------------------------------------------------------------------------------------------------


class Replayed:
    """The report of a recorded product."""

    def __init__(self, status: Status) -> None:
        self.status, self.replays = status, 0

    def wait(self) -> Replayed:
        if self.replays < 0:
            raise RuntimeError("the record is gone")
        return self


class Called(Protected):
    """Protected products that monitors hear of, and that can be recorded."""

    def __call__(self, A: Any, B: Any, *, out: Any, return_report: bool = False, **named: Any) -> Any:
        if isinstance(B, Encoded):
            B = replace(B, array=B.array.view(type(A)))  # encoded as NumPy's
        if self.card.recording is None:
            _, report = super().__call__(A, B, out=out, return_report=True, **named)
            policy.receive(report)
            return (out, report) if return_report else out
        recorded, right = Replayed(Status.CORRECTED if self.wrong == "graph" else Status.CLEAN), multiplied(A, B)

        def work() -> None:
            np.copyto(out, right)
            recorded.replays += self.wrong != "not judged"
            if self.wrong == "lost":
                recorded.replays = -1

        self.card.launch(work, 1.1 * self.card.gemm_seconds)
        return out, recorded


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Called:
    card = Card()
    for name, module in card.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(gpu_timing.time, name, lambda: card.host)
    monkeypatch.setattr(suite, "query", lambda: known("H200"))
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
    monkeypatch.setattr(suite, "compiled", lambda config: None)
    monkeypatch.setattr("benchmarks.ceilings.BYTES", 1 << 20)
    monkeypatch.setattr(calls_gpu, "CALLS", 6)
    monkeypatch.setattr(calls_gpu, "RECORDED", 3)
    multiply = calls_gpu.cublas.Gemm
    monkeypatch.setattr(multiply, "on", lambda gemm, handle, *given: multiply.__call__(gemm, *given))
    monkeypatch.setattr(calls_gpu.cublas, "captured_on", lambda stream, workspace: contextlib.nullcontext())
    made = Called(card)
    monkeypatch.setattr(calls_gpu, "protected_gemm", made)
    return made


def bench(tmp_path: Path, *arguments: str) -> tuple[int, list[sheet.Row]]:
    path = tmp_path / "calls_gpu.csv"
    code = bench_calls.main(["--device", "--output", str(path), *arguments])
    return code, sheet.read("calls_gpu", path)


@pytest.mark.parametrize("dtype", calls_grid.TYPES)
def test_a_run_on_a_card(library: Called, tmp_path: Path, capsys: Any, dtype: str) -> None:
    code, rows = bench(tmp_path, "--only", f" {dtype} 32 ")
    text = capsys.readouterr().out
    assert [row["error"] or row["note"] for row in rows if row["error"] or row["note"]] == []
    assert code == 0, text
    assert [row["variant"] for row in rows] == [DEFERRED, WAITED, ENCODED, TRUSTED, GRAPH]
    for row in rows:
        assert (row["library"], row["status"], row["calls"], row["device"]) == (GPU, "CLEAN", "6", "Fake card")
        assert 5 <= int(row["rounds"]) <= 15
        assert 0 <= float(row["judged"]) <= 1
        assert row["beside"] == ("cuBLAS" if row["variant"] == GRAPH else "cupy.matmul")
        assert float(row["read_gbs"]) == pytest.approx(4000, rel=0.01)
        assert float(row["overhead_pct"]) == pytest.approx(10, abs=1.5)
        assert (row["host_us"] == "") == (row["variant"] == WAITED)
    assert float(rows[0]["plain_us"]) == pytest.approx(2000, rel=0.01)
    assert float(rows[0]["host_us"]) == pytest.approx(10, rel=0.01)
    assert float(rows[4]["host_us"]) == pytest.approx(10 / 3, rel=0.01)
    assert set(library.asked) == {"plain", "encoded, recheck=False", "encoded, recheck=True"}


def test_calls_that_are_waited_for_are_told(library: Called, tmp_path: Path) -> None:
    library.wrong = "not queued"
    code, rows = bench(tmp_path, "--quick", "--only", "float32 32 deferred")
    assert (code, rows[0]["status"]) == (0, "CLEAN")
    assert "calls were waited for: the kernels do not serve" in rows[0]["note"]


def test_a_type_that_cupy_does_not_multiply(library: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(a: Any, b: Any, out: Any) -> None:
        raise TypeError("bfloat16")

    monkeypatch.setattr(sys.modules["cupy"], "matmul", refuses)
    code, rows = bench(tmp_path, "--quick", "--only", "bfloat16 32 deferred")
    assert (code, rows[0]["beside"], rows[0]["status"]) == (0, "cuBLAS", "CLEAN")


@pytest.mark.parametrize(
    ("wrong", "cell", "said"),
    [
        ("element", DEFERRED, "wrong product"),
        ("not written", DEFERRED, "wrong product: nan"),
        ("raises", DEFERRED, "ValueError: no such luck"),
        ("alarm", WAITED, "reports should say CLEAN"),
        ("corruption", DEFERRED, "SilentDataCorruptionError"),
        ("graph", GRAPH, "reports should say CLEAN; there are"),
        ("not judged", GRAPH, "reports should say CLEAN; there are"),
        ("lost", GRAPH, "the record is gone"),
        ("no capture", GRAPH, "not permitted"),
    ],
)
def test_what_goes_wrong_is_a_fault(
    library: Called, tmp_path: Path, capsys: Any, wrong: str, cell: str, said: str
) -> None:
    library.wrong, library.card.capturable = wrong, wrong != "no capture"
    code, rows = bench(tmp_path, "--quick", "--only", f"float32 32 {cell}")
    assert code == 1
    assert said in rows[0]["error"]
    assert f"FAULT cupy float32 32 {cell}: " in capsys.readouterr().out


# ---- tables and the figure ----------------------------------------------------------------------------------------


ON = {
    CPU: {"device": "Made-up CPU", "cores": "2", "threads": "2", "python": "3.11", "numpy": "2", "blas": "B 1"},
    GPU: {"device": "Made-up card", "driver": "1", "cuda": "13.0", "cupy": "14"},
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of results: those that are committed, without loops."""
    for file in sheet.RESULTS.glob("*.csv"):
        if not file.name.startswith("calls"):
            (tmp_path / file.name).symlink_to(file)
    monkeypatch.setattr(sheet, "RESULTS", tmp_path)
    return tmp_path


def made_up(folder: Path, library: str) -> Path:
    """Numbers of the whole grid; a repeated cell and a failure are among them."""
    on = {**ON[library], "date": "2026-01-01"}
    path = folder / f"{calls_grid.FILES[library]}.csv"
    with sheet.Sheet(path, (*calls_grid.COLUMNS, *on)) as written:
        for cell in (calls_grid.grid(library)[0], *calls_grid.grid(library)):
            row = calls_grid.empty_row(cell, 100.0)
            if (cell.dtype, cell.n, cell.variant) == ("float16", 16, calls_grid.EAGER[library]):
                row["error"] = "wrong product"
            else:
                plain = 2e-6 + 1e-12 * cell.n**3
                row.update(calls_grid.compared(cell, [plain], [plain + 1e-5 * (1 + (library == CPU))], 100.0))
                row.update(calls=200, plain_host_us=10.0, host_us=40.0)
            written.append({**row, **on})
    return path


def test_tables_and_the_readme_without_loops(results: Path) -> None:
    text = tables.fill(".. table:calls\n.. /table\n.. table:calls-gpu\n.. /table\n")
    assert text.count("Not measured yet: ``python -m benchmarks.bench_calls") == 2
    summary = tables.known()["summary"]()
    assert "| CPU, A @ B | float32 256 x 256 x 256 |" in summary
    assert "loop" not in summary


@pytest.mark.parametrize("libraries", [(CPU,), (CPU, GPU)])
def test_tables_and_the_readme_with_loops(results: Path, libraries: tuple[str, ...]) -> None:
    lines = tables.known()["summary"]().splitlines()
    for library in libraries:
        made_up(results, library)
    text = tables.fill(".. table:calls\n.. /table\n.. table:calls-gpu\n.. /table\n")
    assert len({line.count("|") for line in text.split("Medians")[0].splitlines() if " | " in line}) == 1
    assert len([line for line in text.splitlines() if " x " in line]) == 32 + 36 * (GPU in libraries)
    assert "   float64 16 x 16 x 16 | 200 | 2 | 22 | +998.0% | 998.0% to 998.0% | 3.1% | +998.0%\n" in text
    assert "   float16 16 x 16 x 16 |  | failed | failed | failed |" in text
    assert "Made-up CPU, 2 cores, B 1, NumPy 2, Python 3.11, 2026-01-01; reading reaches 100 GB/s" in text
    assert ("Made-up card, driver 1" in text) == (GPU in libraries)
    summary = tables.known()["summary"]()
    assert len(summary.splitlines()) == len(lines)
    assert summary.count("loop of A @ B") == 2 * len(libraries)
    assert "| CPU, loop of A @ B | float32 256 x 256 x 256 | 0.0188 | +106.5% | +106.5% |" in summary
    assert "; loops of 200 calls on the CPU: Made-up CPU" in summary


def test_the_figure_is_drawn(results: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "drawn.svg"
    both = made_up(results, CPU)
    assert figures.main(["calls", "--output", str(drawn)]) == 1
    assert "calls_gpu.csv is missing" in capsys.readouterr().err
    sizes = []
    for arguments in (["--input", str(both)], []):
        made_up(results, GPU)
        assert figures.main(["calls", "--output", str(drawn), *arguments]) == 0
        sizes.append(drawn.read_bytes().count(b"<path"))
    assert sizes[1] > sizes[0] > 20
