"""Benchmarks of factorisations: the judge, the times, what is made of their CSVs, and the command lines."""

from __future__ import annotations

import csv
import importlib
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2.faults.judge import factor_oracle
from benchmarks import bench_lu, lu_figure, lu_tables, tables
from tests.support.fake_lu import library
from tests.support.planting import normal

# ---- the judge ---------------------------------------------------------------------------------------------


def test_factors_are_wrong_without_a_bound_where_they_are_none() -> None:
    a = normal(60, 60)
    lu, piv = linalg.lu_factor(a)
    assert factor_oracle.lu_error(a, (lu, piv)) < 1e-15
    unpivoted = np.arange(60)
    without = np.array(a)
    for j in range(60):
        without[j + 1 :, j] /= without[j, j]
        without[j + 1 :, j + 1 :] -= np.outer(without[j + 1 :, j], without[j, j + 1 :])
    assert factor_oracle.lu_error(a, (without, unpivoted)) == math.inf  # right as a product, not as partial pivoting
    assert factor_oracle.lu_error(a, (lu, np.full(60, -1))) == math.inf
    assert factor_oracle.lu_error(a, (np.full_like(lu, np.nan), piv)) == math.inf
    assert factor_oracle.ratio(3e-16, 0.0, np.float64) == pytest.approx(3e-16 * 2**53)
    assert factor_oracle.ratio(math.nan, 1.0, np.float64) == math.inf


def test_errors_of_solutions_and_of_cholesky() -> None:
    a, b = normal(50, 50), normal(50)
    x = linalg.solve(a, b)
    assert factor_oracle.solution_error(a, x, b) < 1e-15
    assert factor_oracle.solution_error(a, x * (1 + 1e-10), b) > 1e-13
    assert factor_oracle.solution_error(a, np.full_like(x, np.inf), b) == math.inf
    assert factor_oracle.solution_error(a, np.zeros(50), np.zeros(50)) == 0
    definite = a @ a.T + np.eye(50)
    lower = np.linalg.cholesky(definite)
    assert factor_oracle.cholesky_error(definite, lower) < 1e-15
    assert factor_oracle.cholesky_error(definite, lower.T) > 1e-3


# ---- the times ---------------------------------------------------------------------------------------------


def straight(text: str) -> bool:
    """Whether every row of every table has as many cells as its head."""
    counts = [[line.count("|") for line in table.splitlines() if " | " in line] for table in text.split("\n\n")]
    return all(len(set(count)) <= 1 for count in counts)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """results/lu.csv of two small sizes."""
    library(monkeypatch)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert bench_lu.main(["--sizes", "32", "48", "--pairs", "1"]) == 0
    assert "BAR MISSED" not in capsys.readouterr().out
    return tmp_path


def test_times_are_taken_judged_and_shown(results: Path) -> None:
    with (results / "lu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert Counter(row["suite"] for row in rows) == {"factor": 8, "solve": 4, "repair": 8, "cholesky": 4}
    assert all(float(row["worst_error_u"]) < 10 and not row["error"] for row in rows)
    assert {row["panel_ms"] for row in rows if row["suite"] == "factor"} == {"1.0"}
    for name, lines in (("lu", 16), ("lu-phases", 8), ("lu-repair", 8)):
        text = lu_tables.TABLES[name]()
        assert len([line for line in text.splitlines() if line.startswith("   float")]) == lines
        assert straight(text)
        assert "SciPy" in text.splitlines()[-1]
    assert "   float64 32 x 32, by rows |" in lu_tables.phases()
    assert "panel, ms | check, ms\n" in lu_tables.phases()


def test_the_last_row_of_a_matrix_counts(results: Path) -> None:
    assert bench_lu.main(["--sizes", "32", "48", "--pairs", "1", "--only", "factor float64 C 32"]) == 0
    assert len(tables.read("lu")) == 25
    assert len(lu_tables.latest("factor")) == 8


def test_the_figure_is_drawn(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = results / "lu.svg"
    assert lu_figure.main(["--output", str(file)]) == 0
    first = file.read_bytes()
    assert first.count(b"<path") > 20
    assert lu_figure.main(["--output", str(file)]) == 0
    assert file.read_bytes() == first
    assert lu_figure.main(["--input", str(results / "absent.csv"), "--output", str(file)]) == 1
    assert "is missing" in capsys.readouterr().err


def test_bars_of_times() -> None:
    row = {**dict.fromkeys(bench_lu.COLUMNS, ""), "suite": "factor", "dtype": "float64", "order": "C", "n": 2048}
    row |= {"scipy_ms": 1.0, "online": 1.5, "auto": 1.1, "unprotected": 1.6, "offline": 1.25, "checks": 0.1}
    row |= {f"{name}_bar": limits[2048] for name, limits in bench_lu.BARS.items()}
    assert bench_lu.met(row)
    assert "MISSED" not in bench_lu.line(row)
    for name in bench_lu.BARS:
        missed = row | {name: float(row[name]) + 0.01}
        assert not bench_lu.met(missed)
        assert bench_lu.line(missed).endswith("BAR MISSED")
        assert not bench_lu.met(row | {name: math.nan})
        assert bench_lu.met(missed | {f"{name}_bar": ""})
    assert "WRONG" in bench_lu.line(row | {"error": "wrong, ..."})
    assert not bench_lu.met(row | {"error": "wrong, ..."})
    assert bench_lu.judged({"scipy": 1e-16, "online": 4e-16}, "float64")[0] == ""
    assert "online: 90.1 u; scipy: 0.901 u" in bench_lu.judged({"scipy": 1e-16, "online": 1e-14}, "float64")[0]


@pytest.mark.parametrize("manner", ["careless", "wrong"])
def test_wrong_results_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], manner: str
) -> None:
    library(monkeypatch, manner)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert bench_lu.main(["--sizes", "32", "--pairs", "1", "--only", "repair float64 C"]) == 1
    assert "WRONG" in capsys.readouterr().out
    assert "| wrong |" in lu_tables.repair()


# ---- command lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bench_lu", "lu_figure"])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"benchmarks.{name}").main(["--help"])
    assert stopped.value.code == 0
    assert f"benchmarks.{name}" in capsys.readouterr().out


def test_typing_errors_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    library(monkeypatch)
    assert bench_lu.main(["--only", "factor flaot64"]) == 2
    assert "there are factor float64 C 512," in capsys.readouterr().out
