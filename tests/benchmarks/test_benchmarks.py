"""What is made of the GPU benchmarks' CSV: tables, and the profiler's numbers; the command lines.

The run itself is tested in test_bench_tsm2.py, the stopwatch in test_gpu_timing.py.
"""

from __future__ import annotations

import csv
import importlib
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from abft_tsm2.core.paper.config import TCF
from abft_tsm2.core.problem import Problem
from benchmarks import bench_tsm2, contenders, load_efficiency, sheet, tables, tsm2_grid, tsm2_tables
from benchmarks.sheet import Sheet
from benchmarks.tsm2_grid import COLUMNS, grid, kernels
from tests.benchmarks.test_bench_tsm2 import CELL, cell_rows

# ---- command lines ------------------------------------------------------------------------------------------------

SCRIPTS = (
    "bench_calls",
    "bench_gemm",
    "bench_lu_gpu",
    "bench_tsm2",
    "bench_dask",
    "ceilings",
    "dask_model",
    "figures",
    "load_efficiency",
    "tables",
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert stopped.value.code == 0
    assert f"benchmarks.{name}" in capsys.readouterr().out


def test_the_list_needs_no_gpu(capsys: Any) -> None:
    assert bench_tsm2.main(["--list", "--paper", "--only", "tsm2r float64 30720"]) == 0
    assert capsys.readouterr().out.split("\n")[0] == "tsm2r float64 30720x30720x2"
    assert bench_tsm2.main(["--only", "nothing of the kind"]) == 2
    capsys.readouterr()
    assert bench_tsm2.main(["--list", "--suite", "both", "--suite", "host"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"both", "host"}


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert bench_tsm2.main(["--output", str(tmp_path / "x.csv")]) == 2
    assert "nothing can be measured here" in capsys.readouterr().out
    assert not (tmp_path / "x.csv").exists()


# ---- tables, figures, profiler ------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """results/tsm2.csv with made-up times of the whole grid, a failure and a repeated cell among them."""
    environment = {"device": "Made-up card", "driver": "1", "cuda": "13.0", "cupy": "14", "date": "2026-01-01"}
    rates = {"V0": 400, "V1": 900, "V2": 1300, "V3": 1500, "cuBLAS": 3000, contenders.CUPY: 2000}
    monkeypatch.setattr(sheet, "RESULTS", tmp_path)
    monkeypatch.setattr(
        "benchmarks.tsm2_grid.sheet.read",
        lambda name, path=None, read=sheet.read: read(
            name, path or (Path(tsm2_grid.__file__).parent / "results" / f"{name}.csv" if "reference" in name else None)
        ),
    )
    with Sheet(tmp_path / "tsm2.csv", (*COLUMNS, *environment)) as written:
        for cell in [grid()[0], *grid()]:
            names = [*kernels(cell), "cuBLAS", contenders.CUPY]
            rows = cell_rows({name: 1e-6 * cell.bytes / rates.get(name, 1800) for name in names}, cell)
            if cell == CELL:
                rows[3].update(
                    ms="", error="wrong product", speedup="", speedup_cupy="", ratio_to_published="", gain=""
                )
            for row in rows:
                written.append({**row, **environment})
    return tmp_path


def test_the_tables_show_every_cell_and_who_lost(results: Path) -> None:
    for name in ("tsm2r", "tsm2l", "ladder", "tcf", "small_k"):
        lines = tables.fill(f".. table:{name}\n.. /table\n").splitlines()
        body = [line for line in lines if line.startswith("   float")]
        suite = "tsm2r" if name == "ladder" else name
        cells = len([cell for cell in grid() if cell.suite == suite])
        assert len(body) == (cells * len(TCF) if name == "tcf" else cells)
        assert len({line.count("|") for line in lines if " | " in line}) == 1
    text = tsm2_tables.tsm2r()
    assert "   float64 20480 x 20480 x 16 | 1.12 | cuBLAS | 1.68 | failed |" in text
    assert "   float32 10240 x 10240 x 2 | 0.14 | cuBLAS | 0.21 | 0.28 | 32.6% | 0.50 | 0.75 | 0.885 | 0.32\n" in text
    assert "Made-up card" in text
    assert "reading reaches 4600 GB/s" in text


NUMBERS = {metric: str(50 + number) for number, metric in enumerate(load_efficiency.METRICS.values())}


def quoted(rows: list[list[str]]) -> str:
    return "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)


@pytest.mark.parametrize("page", ["raw", "details"])
def test_the_profilers_answer_is_read_in_both_forms(page: str) -> None:
    if page == "raw":
        table = [["ID", "Kernel Name", *NUMBERS], ["", "", *("%" for _ in NUMBERS)], ["0", "k", *NUMBERS.values()]]
    else:
        table = [["ID", "Metric Name", "Metric Unit", "Metric Value"], *(["0", n, "", v] for n, v in NUMBERS.items())]
    found = load_efficiency.parse(f"==PROF== Connected\n{quoted(table)}==PROF== Disconnected\n")
    assert list(found) == list(load_efficiency.METRICS)
    assert list(found.values()) == [float(text) for text in NUMBERS.values()]
    with pytest.raises(load_efficiency.ProfilerError, match=r"no number for smsp__sass"):
        load_efficiency.parse(quoted([row[:2] for row in table]))


@pytest.mark.parametrize(
    ("answer", "code", "error"),
    [
        (None, 0, ""),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", 1, "needs rights"),
        ("==ERROR== something else", 9, "exit code 9"),
    ],
)
def test_the_profiler_is_run_and_its_refusals_are_told(
    results: Path, answer: str | None, code: int, error: str, capsys: Any
) -> None:
    table = [["ID", *NUMBERS], ["", *("%" for _ in NUMBERS)], ["0", *NUMBERS.values()]]
    (results / "answer").write_text(quoted(table) if answer is None else answer)
    profiler = results / "profiler"
    profiler.write_text(f"#!/bin/sh\ncat '{results}/answer'\nexit {code}\n")
    profiler.chmod(profiler.stat().st_mode | stat.S_IXUSR)
    assert load_efficiency.main(["--variant", "V3", "--profiler", str(profiler)]) == (0 if answer is None else 1)
    with (results / "load_efficiency.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["dtype"] for row in rows] == ["float32", "float64"]
    assert all(error in row["error"] and bool(row["gld_efficiency"]) == (answer is None) for row in rows)
    assert tsm2_tables.load_efficiency().count("V3") == (2 if answer is None else 0)


def test_a_missing_profiler_is_told(capsys: Any) -> None:
    assert load_efficiency.main(["--profiler", "no-such-profiler"]) == 1
    assert "install Nsight Compute" in capsys.readouterr().out


def test_the_profiler_is_pointed_at_one_launch_of_our_kernel() -> None:
    line = load_efficiency.command("Opt-1", "float64")
    assert line[line.index("--kernel-name") + 1] == "regex:^tsm2l_"
    assert line[line.index("--clock-control") + 1] == "none"
    assert line[-3:] == ["--child", "Opt-1", "float64"]
    assert load_efficiency.problem("V3", "float32") == Problem(10240, 10240, 16, "float32")
    assert subprocess.run([*line[line.index(sys.executable) :][:3], "--help"], check=False).returncode == 0
