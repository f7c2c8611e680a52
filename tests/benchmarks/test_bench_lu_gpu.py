"""Factorisations on a GPU where no GPU is: the grid and its bars, the judge, whole runs on a fake card, and what is
made of their CSVs."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import linalg

import abft_tsm2
from abft_tsm2 import Report, Status
from abft_tsm2.core.device import known
from abft_tsm2.linalg.device import plan
from benchmarks import (
    bench_lu_gpu,
    figures,
    gpu_timing,
    lu_gpu_contenders,
    lu_gpu_grid,
    lu_gpu_judge,
    lu_gpu_phases,
    lu_gpu_tables,
    sheet,
    suite,
    tables,
)
from benchmarks.bench_lu import FAULTS
from benchmarks.lu_gpu_grid import STRUCTURED, TYPES, Cell, bars, empty_row, grid, line_through, met, missed, text
from tests.support.fake_card import Array, Card
from tests.support.planting import normal

H200 = known("H200")

# ---- the grid and its bars ----------------------------------------------------------------------------------------


def test_names_are_unique_and_neighbours_come_first() -> None:
    cells = grid()
    names = [str(cell) for cell in cells]
    assert len(set(names)) == len(names)
    assert {cell.suite for cell in cells} == set(lu_gpu_grid.SUITES)
    assert len([group for group, _ in groupby(cells, key=lambda cell: cell.group)]) == len(cells)
    for dtype in TYPES:
        for n, neighbours in lu_gpu_grid.BETWEEN.items():
            assert all(names.index(f"factor {dtype} F {x}") < names.index(f"factor {dtype} F {n}") for x in neighbours)
        for n in lu_gpu_grid.BY_ROWS:
            assert names.index(f"factor {dtype} F {n}") < names.index(f"factor {dtype} C {n}")
    assert [cell.n for cell in grid((512, 4096)) if cell.suite == "factor" and cell.dtype == "float32"] == [
        *(512, 4096, 4096)
    ]
    assert Cell("repair", "float64", 4096).rounds == 5
    assert [Cell("factor", "float64", n).rounds for n in (512, 2048, 5000, 10007, 32768, 40000)] == [21, 21, 9, 7, 2, 2]


def test_bars_are_those_that_were_set() -> None:
    of_factor = bars(Cell("factor", "float64", 8192))
    assert of_factor == {"checks_bar": 0.05, "online_bar": 0.55, "certificate_bar": 1.02}
    assert bars(Cell("factor", "float32", 2048)) == {"checks_bar": 0.05, "online_bar": 0.70}
    assert bars(Cell("factor", "float32", 5000)) == {"checks_bar": 0.05, "certificate_bar": 1.02}
    assert bars(Cell("read", "float32", 8192)) == {"idle_bar": 0.01}
    assert "online_bar" not in bars(Cell("factor", "float64", 8192, "C"))
    assert bars(Cell("structured", "float64", 8192, matrix="dominant")) == {}
    assert bars(Cell("cholesky", "float32", 4096)) == {}
    assert bars(Cell("cholesky", "float32", 8192)) == {"protected_bar": 1.10}
    assert bars(Cell("solve", "float32", 8192, right_hand_sides=64)) == {"protected_bar": 1.0}
    for cell in grid():
        assert set(bars(cell)) <= set(lu_gpu_grid.COLUMNS)


def made_up(cell: Cell, **numbers: Any) -> dict[str, Any]:
    return {**empty_row(cell), **bars(cell), **numbers}


def test_a_row_is_held_against_its_bars() -> None:
    row = made_up(Cell("factor", "float64", 8192), online=0.55, checks=0.05, certificate=1.02, offline=0.5)
    row |= {"idle": 0.01, "idle_bar": 0.01, "line": 1.05, "line_bar": 1.05, "getrf_ms": 37.0, "online_call_ms": 20.0}
    assert met(row)
    assert "MISSED" not in text(row)
    for name in ("online", "checks", "certificate", "idle", "line"):
        worse = row | {name: row[name] + 0.001}
        assert [one.split()[0] for one in missed(worse)] == [name]
        assert f"BAR MISSED: {name}" in text(worse)
        assert not met(worse)
        assert missed(row | {name: math.nan})
        assert missed(row | {name: ""}) == [f"{name} unknown > {row[f'{name}_bar']}"]
    assert not met(row | {"error": "wrong"})
    assert missed(row | {"error": "wrong", "online": 9.0}) == []
    assert met(made_up(Cell("factor", "float64", 8192), note="not measured: takes 90.0 GB, 70.0 are free"))


def test_lines_through_neighbours() -> None:
    rows = [made_up(Cell("factor", "float64", n), online_ms=1e-9 * n**3 * rate) for n, rate in ((4096, 3), (8192, 2))]
    expected = line_through(Cell("factor", "float64", 5000), rows)
    share = math.log2(5000 / 4096)
    assert expected == pytest.approx(125 * (3 - share))
    assert line_through(Cell("factor", "float64", 8192, "C"), rows) == rows[1]["online_ms"]
    assert line_through(Cell("factor", "float64", 10007), rows) is None
    assert line_through(Cell("factor", "float32", 5000), rows) is None
    assert line_through(Cell("factor", "float64", 4096), rows) is None
    assert line_through(Cell("factor", "float64", 5000), [rows[0], rows[1] | {"online_ms": ""}]) is None


# ---- the judge ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
def test_the_judge_of_factors(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(lu_gpu_judge, "WIDTH", 17)
    a = np.asarray(normal(90, 90), dtype)
    lu, piv = linalg.lu_factor(a)
    right = lu_gpu_judge.lu_error(a, lu, piv)
    assert 0 < right < 10
    assert lu_gpu_judge.wrong(right, right, 90) == ""
    for at in ((3, 80), (60, 60), (89, 2)):
        for value in (lu[at] * 1.01 + 0.01, np.nan, np.inf):
            other = lu.copy()
            other[at] = value
            assert "wrong" in lu_gpu_judge.wrong(lu_gpu_judge.lu_error(a, other, piv), right, 90)
    assert lu_gpu_judge.lu_error(a, lu, np.roll(piv, 1)) > 1e3
    assert lu_gpu_judge.lu_error(a, lu, piv - 100) == math.inf
    assert lu_gpu_judge.lu_error(a, lu[:40], piv) == math.inf
    unpivoted = np.array(a)
    for j in range(90):
        unpivoted[j + 1 :, j] /= unpivoted[j, j]
        unpivoted[j + 1 :, j + 1 :] -= np.outer(unpivoted[j + 1 :, j], unpivoted[j, j + 1 :])
    assert lu_gpu_judge.lu_error(a, unpivoted, np.arange(90)) == math.inf
    assert lu_gpu_judge.wrong(100.0, 90.0, 90) != ""  # the vendor's may be wrong, too


@pytest.mark.parametrize("dtype", TYPES)
def test_the_judge_of_uneven_rows(dtype: str) -> None:
    a = np.asarray(np.exp2(-np.arange(60.0))[:, None] * normal(60, 60), dtype)
    lu, piv = linalg.lu_factor(a)
    assert lu_gpu_judge.lu_error(a, lu, piv) < 10
    lu[59, 59] *= 1 + 1e-9 if dtype == "float64" else 1.1
    assert lu_gpu_judge.lu_error(a, lu, piv) > 100


@pytest.mark.parametrize("dtype", TYPES)
def test_the_judge_of_solutions_and_of_cholesky(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(lu_gpu_judge, "WIDTH", 17)
    a, b = np.asarray(normal(50, 50), dtype), np.asarray(normal(50, 3), dtype)
    for right_hand_side in (b, b[:, 0]):
        x = linalg.solve(a, right_hand_side)
        assert lu_gpu_judge.solution_error(a, x, right_hand_side) < 20
        x[7] *= 1.1
        assert lu_gpu_judge.solution_error(a, x, right_hand_side) > 1e3
        x[7] = np.nan
        assert lu_gpu_judge.solution_error(a, x, right_hand_side) == math.inf
    assert lu_gpu_judge.solution_error(a, b, b[:, 0]) == math.inf
    definite = a @ a.T + np.eye(50, dtype=dtype)
    lower = np.linalg.cholesky(definite)
    assert lu_gpu_judge.cholesky_error(definite, lower) < 10
    lower[30, 20] += 0.1
    assert lu_gpu_judge.cholesky_error(definite, lower) > 1e3
    assert lu_gpu_judge.cholesky_error(definite, lower[:9]) == math.inf


# ---- a fake card --------------------------------------------------------------------------------------------------

SMALL = [
    *(Cell("factor", dtype, n) for dtype in TYPES for n in (64, 96, 80)),
    *(Cell("factor", dtype, 64, "C") for dtype in TYPES),
    *(Cell("structured", "float64", 96, matrix=matrix) for matrix in STRUCTURED),
    Cell("read", "float64", 64),
    Cell("repair", "float64", 128),
    *(Cell("solve", dtype, 64, right_hand_sides=r) for dtype in TYPES for r in (1, 4)),
    *(Cell("cholesky", dtype, 64) for dtype in TYPES),
]
SECONDS = {"getrf": 1e-2, "unprotected": 8e-3, "offline": 8.08e-3, "online": 8.2e-3}  # of the card, for 64 columns
CALLS = {
    "cupy": 2e-2,
    "torch": 3e-2,
    "magma": 6e-2,
    "offline": 4e-2,
    "online": 5e-2,
    "vendor": 1e-2,
    "solution": 9e-3,
    "cholesky": 1.05e-2,
}
"""Of functions that are waited for."""


class FakeSolver:
    """cuSOLVER by SciPy, on addresses and leading dimensions."""

    def __init__(self, card: Card) -> None:
        self.card, self.open, self.stream = card, 0, 0
        for letter, dtype in (("d", np.float64), ("s", np.float32)):
            for name in ("getrf", "getrs", "potrf"):
                setattr(self, letter + name, self._on(getattr(self, f"_{name}"), dtype))
            setattr(self, f"{letter}getrf_bufferSize", lambda handle, m, n, a, lda: n)
            setattr(self, f"{letter}potrf_bufferSize", lambda handle, uplo, n, a, lda: n)

    def create(self) -> int:
        self.open += 1
        return 77

    def destroy(self, handle: int) -> None:
        self.open -= 1

    def setStream(self, handle: int, stream: int) -> None:
        assert handle == 77
        self.stream = stream

    def _on(self, routine: Callable[..., None], dtype: Any) -> Callable[..., None]:
        return lambda handle, *arguments: routine(dtype, *arguments)

    @staticmethod
    def _matrix(pointer: int, dtype: Any, rows: int, columns: int, stride: int) -> Any:
        size = np.dtype(dtype).itemsize
        flat = np.frombuffer((ctypes.c_char * (size * (stride * (columns - 1) + rows))).from_address(pointer), dtype)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (size, stride * size), writeable=True)

    def _getrf(self, dtype: Any, m: int, n: int, a: int, lda: int, space: int, pivots: int, info: int) -> None:
        def work() -> None:
            A = self._matrix(a, dtype, m, n, lda)
            lu, piv = linalg.lu_factor(A, check_finite=False)
            A[...] = lu
            self._matrix(pivots, np.int32, min(m, n), 1, m)[:, 0] = piv + 1

        self.card.launch(work, SECONDS["getrf"] * (n / 64) ** 3)

    def _getrs(
        self, dtype: Any, trans: int, n: int, columns: int, a: int, lda: int, pivots: int, b: int, ldb: int, info: int
    ) -> None:
        def work() -> None:
            B = self._matrix(b, dtype, n, columns, ldb)
            piv = self._matrix(pivots, np.int32, n, 1, n)[:, 0] - 1
            B[...] = linalg.lu_solve((self._matrix(a, dtype, n, n, lda), piv), B)

        assert trans == 0
        self.card.launch(work, CALLS["vendor"])

    def _potrf(self, dtype: Any, uplo: int, n: int, a: int, lda: int, space: int, length: int, info: int) -> None:
        def work() -> None:
            A = self._matrix(a, dtype, n, n, lda)
            A[np.tril_indices(n)] = np.linalg.cholesky(A)[np.tril_indices(n)]

        assert (uplo, length) == (0, n)
        self.card.launch(work, CALLS["vendor"])


class FakeLibrary:
    """What this package does on a card, by SciPy and the package itself on the host.

    Attributes
    ----------
    wrong : str
        "" or what goes wrong: "element", "pivots", "raises", "alarm", "suspected", "status".
    """

    def __init__(self, card: Card) -> None:
        self.card, self.wrong, self.released, self.made, self.fault = card, "", 0, 0, ""
        self.end: Any = None

    @contextlib.contextmanager
    def planted(self, fault: str) -> Iterator[None]:
        """Where a fault is found and repaired."""
        self.fault = fault
        yield
        self.fault = ""

    @contextlib.contextmanager
    def ended(self, event: Any) -> Iterator[None]:
        self.end = event
        yield
        self.end = None

    def factorisation(self, A: Any, *, encoded: bool = True, checked: bool = False, findings: Any = None) -> Any:
        if self.wrong == "raises" and checked:
            raise MemoryError("no such luck")
        kind = "online" if checked else "offline" if encoded else "unprotected"
        lu, piv = linalg.lu_factor(A, check_finite=False)
        if self.wrong == "element" and checked:
            lu[5, 7] += 0.1
        if self.wrong == "pivots" and checked:
            piv = piv[::-1]
        self.card.launch(lambda: None, SECONDS[kind] * (A.shape[0] / 64) ** 3 * (1.0 if findings is None else 1.01))
        self.made += 1
        if self.end:
            self.end.record()
        clean = encoded and self.wrong != "suspected"
        return SimpleNamespace(
            W=lu.view(Array), piv=piv.view(Array), clean=clean, wait=lambda: None, release=self._release
        )

    def _release(self) -> None:
        self.released += 1

    def call(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """One of the public functions, that takes as long as told."""

        def called(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **{**options, "return_report": True})
            seconds = CALLS.get(name) or CALLS[options["mode"]]
            self.card.launch(lambda: None, seconds * (1.5 if self.wrong == "slow" else 1.0))
            found, report = result
            found = tuple(x.view(Array) for x in found) if isinstance(found, tuple) else found.view(Array)
            if self.wrong == "status" or self.fault:
                status = Status.CORRECTED if self.fault else Status.CHECKSUM_FAULT
                report = Report(status, report.operation, report.m, report.k, report.n, report.dtype)
            return (found, report) if options.get("return_report") else found

        return called


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card, modules = Card(), {}
    modules.update(card.modules())
    modules["cupy"].__dict__.update({name: getattr(np, name) for name in ("int32", "uint8")})
    modules["cupy"].__dict__["from_dlpack"] = lambda x: x
    solver = FakeSolver(card)
    modules["cupy_backends.cuda.libs"].__dict__["cusolver"] = solver

    def of_cupy(A: Any, check_finite: bool) -> Any:
        card.launch(lambda: None, CALLS["cupy"])
        return linalg.lu_factor(A, check_finite=check_finite)

    chosen = ["default"]

    def preferred(library: str | None = None) -> str:
        chosen[:] = [library or chosen[0]]
        return chosen[0]

    def of_torch(A: Any) -> Any:
        card.launch(lambda: None, CALLS["magma" if chosen == ["magma"] else "torch"])
        lu, piv = linalg.lu_factor(A)
        return lu, piv + 1

    def module(name: str, **contents: Any) -> None:
        modules[name] = ModuleType(name)
        modules[name].__dict__.update(contents)

    module("cupyx")
    module("cupyx.scipy", linalg=SimpleNamespace(lu_factor=of_cupy))
    cuda = SimpleNamespace(
        ExternalStream=lambda pointer: pointer,
        stream=lambda stream: contextlib.nullcontext(),
        empty_cache=lambda: None,
        has_magma=True,
    )
    module(
        "torch",
        __version__="0.fake",
        from_dlpack=lambda x: x,
        cuda=cuda,
        backends=SimpleNamespace(cuda=SimpleNamespace(preferred_linalg_library=preferred)),
        linalg=SimpleNamespace(lu_factor=of_torch),
    )
    for name, one in modules.items():
        monkeypatch.setitem(sys.modules, name, one)
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(gpu_timing.time, name, lambda: card.host)
    monkeypatch.setattr(suite, "query", lambda: H200)
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
    monkeypatch.setattr(suite, "compiled", lambda config: None)
    monkeypatch.setattr(lu_gpu_grid, "grid", lambda: SMALL)
    monkeypatch.setattr(lu_gpu_grid, "BETWEEN", {80: (64, 96)})
    monkeypatch.setattr(lu_gpu_grid, "CERTIFIED_FROM", 64)
    monkeypatch.setattr(lu_gpu_grid, "CHOLESKY_FROM", 64)
    monkeypatch.setattr(lu_gpu_grid, "ONLINE", {dtype: {64: 0.9, 96: 0.9} for dtype in TYPES})
    monkeypatch.setattr(lu_gpu_grid, "ROUNDS", {64: 3, 128: 2})
    monkeypatch.setattr(bench_lu_gpu, "SOLVED", 3)
    monkeypatch.setattr("benchmarks.ceilings.BYTES", 1 << 20)
    card.solver = solver  # type: ignore[attr-defined]
    return card


@pytest.fixture
def library(card: Card, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    made = FakeLibrary(card)
    monkeypatch.setattr(lu_gpu_contenders, "DeviceFactorisation", made.factorisation)
    monkeypatch.setattr(bench_lu_gpu, "planted", made.planted)
    monkeypatch.setattr(lu_gpu_contenders, "ended", made.ended)
    for function, name in (
        *(("protected_lu_factor", ""), ("protected_lu_solve", "solution"), ("protected_cholesky", "cholesky")),
    ):
        monkeypatch.setattr(abft_tsm2, function, made.call(getattr(abft_tsm2, function), name))
    return made


def bench(tmp_path: Path, *arguments: str) -> tuple[int, list[sheet.Row]]:
    path = tmp_path / "lu_gpu.csv"
    code = bench_lu_gpu.main(["--output", str(path), *arguments])
    return code, sheet.read("lu_gpu", path)


# ---- whole runs ---------------------------------------------------------------------------------------------------


def test_a_run_measures_and_judges_every_cell(library: FakeLibrary, tmp_path: Path, capsys: Any) -> None:
    code, rows = bench(tmp_path)
    said = capsys.readouterr().out
    assert [row["error"] or row["note"] for row in rows if row["error"] or row["note"]] == []
    assert code == 0, said
    assert "MISSED" not in said
    assert Counter(row["suite"] for row in rows) == {
        "factor": 8,
        "structured": 6,
        "read": 1,
        "repair": 2,
        "solve": 4,
        "cholesky": 2,
    }
    assert f"{len(SMALL)} of {len(SMALL)} cells" in said
    assert library.made == library.released
    assert library.card.solver.open == 0  # type: ignore[attr-defined]
    for row in rows:
        assert row["device"] == "Fake card"
        assert 0 < float(row["vendor_error_u"]) <= float(row["worst_error_u"]) < 30
        assert float(row["copy_gbs"]) == pytest.approx(4000, rel=0.01)


def test_the_cards_times_and_the_hosts(library: FakeLibrary, tmp_path: Path) -> None:
    _, rows = bench(tmp_path, "--suite", "factor")
    for row in rows:
        n = int(row["n"])
        for name, seconds in SECONDS.items():
            assert float(row[f"{name}_ms"]) == pytest.approx(1e3 * seconds * (n / 64) ** 3, rel=1e-3)
        for name in lu_gpu_grid.AS_CALLED:
            assert float(row[f"{name}_call_ms"]) == pytest.approx(1e3 * CALLS[name], rel=1e-2)
        assert float(row["unprotected"]) == pytest.approx(0.8, rel=1e-3)
        assert float(row["offline"]) == pytest.approx(0.808, rel=1e-3)
        assert float(row["online"]) == pytest.approx(0.82, rel=1e-3)
        assert float(row["checks"]) == pytest.approx(0.025, rel=1e-3)
        assert float(row["certificate"]) == pytest.approx(1.01, rel=1e-3)
        assert (row["pivots_differ"], row["hidden"], row["torch"]) == ("0", "1.0", "0.fake")
        assert float(row["gflops"]) == pytest.approx(2e-9 / 3 * 64**3 / SECONDS["getrf"], rel=1e-3)
        beside = n == 80 or row["order"] == "C"
        assert float(row["line"] or 0) == pytest.approx(1.0 if beside else 0.0, rel=1e-3)
        assert row["line_bar"] == ("1.05" if beside else "")
        assert int(row["rounds"]) == (3 if n == 64 else 2)


def test_solutions_and_cholesky_beside_the_vendor(library: FakeLibrary, tmp_path: Path) -> None:
    _, rows = bench(tmp_path, "--suite", "solve", "--suite", "cholesky")
    for row in rows:
        assert float(row["vendor_call_ms"]) == pytest.approx(10, rel=1e-2)
        taken = 9 if row["suite"] == "solve" else 10.5
        assert float(row["protected_call_ms"]) == pytest.approx(taken, rel=1e-2)
        reads = 2 * 64 * 64 * (8 if row["dtype"] == "float64" else 4) / 4e9 if row["suite"] == "solve" else 0
        assert float(row["protected"]) == pytest.approx(taken / (10 + reads), rel=1e-2)
        assert float(row["reads_ms"] or 0) == pytest.approx(reads, rel=1e-2)


def test_what_a_host_adds_that_reads_verdicts(library: FakeLibrary, tmp_path: Path) -> None:
    code, (row,) = bench(tmp_path, "--suite", "read")
    assert code == 0
    assert float(row["online_ms"]) == pytest.approx(1e3 * SECONDS["online"], rel=1e-3)
    assert float(row["parts_ms"]) == float(row["read_ms"]) == pytest.approx(1.01e3 * SECONDS["online"], rel=1e-3)
    assert float(row["idle"]) == 0
    assert (row["idle_bar"], row["rounds"]) == ("0.01", "5")


def test_what_a_repair_costs(library: FakeLibrary, tmp_path: Path) -> None:
    code, rows = bench(tmp_path, "--only", "repair")
    assert code == 0
    assert [row["fault"] for row in rows] == list(FAULTS)
    for row in rows:
        assert float(row["online_call_ms"]) == pytest.approx(50, rel=1e-2)
        assert float(row["repair_ms"]) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("element", "online: wrong, residual of"),
        ("pivots", "online: wrong, residual of inf u"),
        ("raises", "online: MemoryError: no such luck"),
        ("status", "offline, as called: a report says CHECKSUM_FAULT, not CLEAN"),
    ],
)
def test_what_goes_wrong_is_a_fault(library: FakeLibrary, tmp_path: Path, capsys: Any, wrong: str, said: str) -> None:
    library.wrong = wrong
    code, rows = bench(tmp_path, "--only", "factor float64 F 64")
    assert code == 1
    assert said in rows[0]["error"]
    assert rows[0]["getrf_ms"]
    assert "FAULT factor float64 F 64 normal: " in capsys.readouterr().out


def test_what_is_suspected_in_vain_is_told(library: FakeLibrary, tmp_path: Path) -> None:
    library.wrong = "suspected"
    code, rows = bench(tmp_path, "--only", "structured float64 F 96 dominant")
    assert code == 0
    assert rows[0]["suspected"] == "offline, online"


def test_a_missed_bar_is_a_fault(library: FakeLibrary, tmp_path: Path, capsys: Any) -> None:
    library.wrong = "slow"
    code, rows = bench(tmp_path, "--only", "cholesky float64")
    assert code == 1
    assert not rows[0]["error"]
    assert "FAULT cholesky float64 F 64 normal: protected 1.5" in capsys.readouterr().out


def test_wrong_solutions_are_told(library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = abft_tsm2.protected_lu_solve

    def wrong(*arguments: Any, **options: Any) -> Any:
        x, report = right(*arguments, **options)
        return x * x.dtype.type(1.01), report

    monkeypatch.setattr(abft_tsm2, "protected_lu_solve", wrong)
    code, rows = bench(tmp_path, "--only", "solve float64 F 64 4")
    assert code == 1
    assert "protected: wrong, residual of" in rows[0]["error"]


def test_what_does_not_fit_says_so(library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.card.memory = 1 << 29
    code, rows = bench(tmp_path, "--only", "factor float64 F")
    assert code == 0
    assert all(row["note"].startswith("not measured: takes ") for row in rows)
    monkeypatch.setattr(sheet, "RESULTS", tmp_path)
    assert "does not fit" in lu_gpu_tables.times()


def test_a_run_without_pytorch(library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, rows = bench(tmp_path, "--only", "factor float64 F 64")
    assert code == 0
    assert "no torch" in rows[0]["note"]
    assert (rows[0]["torch_call_ms"], rows[0]["torch"]) == ("", "")
    code, rows = bench(tmp_path, "--only", "factor float64 F 64", "--no-torch")
    assert (code, rows[-1]["note"], len(rows)) == (0, "", 2)


# ---- matrices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", "FC")
@pytest.mark.parametrize("name", ["normal", *STRUCTURED])
def test_matrices_are_what_they_are_called(card: Card, name: str, order: str) -> None:
    A = lu_gpu_contenders.matrix(Cell("structured", "float32", 48, order, name))
    assert A.flags[f"{order}_CONTIGUOUS"]
    assert A.dtype == np.float32
    assert np.isfinite(A).all()
    i, j = np.indices(A.shape)
    sizes = abs(A.astype(float))
    holds = {
        "normal": 0.8 < A.std() < 1.2,
        "graded rows": sizes[-1].max() < 1e-16 < sizes[:, -1].max(),
        "graded columns": sizes[:, -1].max() < 1e-16 < sizes[-1].max(),
        "orthogonal": abs(A @ A.T - np.eye(48)).max() < 1e-5,
        "integers": (np.rint(A) == A).all() and len(set(A.ravel().tolist())) > 9,
        "triangle and noise": 0 < sizes[i > j].max() < 1e-5,
        "dominant": (2 * np.diag(A) > sizes.sum(1)).all() and (2 * np.diag(A) > sizes.sum(0)).all(),
    }
    assert holds[name]


def test_definite_matrices(card: Card) -> None:
    A = lu_gpu_contenders.definite(Cell("cholesky", "float64", 40))
    assert (A == A.T).all()
    assert np.linalg.eigvalsh(A).min() > 0.9


def test_kernels_and_memory_of_a_cell() -> None:
    cell = Cell("factor", "float32", 16384)
    names = [config.name for config in lu_gpu_contenders.kernels(cell)]
    assert len(names) == len(set(names)) > 20
    assert len([name for name in names if name.startswith("panel_")]) == 3
    assert 70e9 > lu_gpu_contenders.memory(Cell("factor", "float64", 32768)) > 7 * 8 * 32768**2


# ---- phases -------------------------------------------------------------------------------------------------------


class FakeRun(lu_gpu_phases.TimedRun):
    """A factorisation of four tasks and an event, each of which takes as many milliseconds as its stream's number."""

    card: Card
    TASKS = (("main", "begin"), ("panels", "panel"), ("panels", "record"), ("panels", "panel"), ("main", "bring"))

    def __init__(self, plan: Any, A: Any, watch: Any) -> None:
        event = sys.modules["cupy"].cuda.Event
        self._watch, self._clock, self.milliseconds = watch, (event(), event()), []
        self.plan, self.where = plan, {}
        steps = [lambda stream, where: self.card.launch(lambda: None, 1e-3 * stream)]
        self._do([(task, steps) for task in plan.schedule], 1)


def fake_plan(kind: Any, A: Any) -> Any:
    tasks = [SimpleNamespace(lane=lane, name=name) for lane, name in FakeRun.TASKS]
    return SimpleNamespace(schedule=tasks, handles=lambda main: {"main": main, "panels": 5})


def test_phases(library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(FakeRun, "card", library.card, raising=False)
    stream = sys.modules["cupy"].cuda.Stream
    monkeypatch.setattr(sys.modules["cupy"].cuda, "ExternalStream", lambda handle: stream(), raising=False)
    monkeypatch.setattr(lu_gpu_phases, "TimedRun", FakeRun)
    monkeypatch.setattr(lu_gpu_phases, "FactorPlan", fake_plan)
    monkeypatch.setattr(plan.Kind, "of", lambda A, encoded, checked: "kind")
    monkeypatch.setattr(sheet, "RESULTS", tmp_path)
    assert bench_lu_gpu.main(["--phases", "--only", "factor float64 F 64"]) == 0
    rows = sheet.read("lu_gpu_phases")
    assert [(row["lane"], row["task"], row["count"]) for row in rows] == [
        *(("panels", "panel", "2"), ("main", "begin", "1"), ("main", "bring", "1"))
    ]
    assert [float(row["ms"]) for row in rows] == pytest.approx([10, 1, 1], rel=1e-3)
    assert float(rows[0]["us"]) == pytest.approx(5000, rel=1e-3)
    assert float(rows[0]["whole_ms"]) == pytest.approx(8.2, rel=1e-3)
    assert "together 12.000 ms, as a whole 8.200" in capsys.readouterr().out
    assert "   float64 64 x 64 | panel | panels | 2 | 5" in lu_gpu_tables.phases()


# ---- tables and the figure ----------------------------------------------------------------------------------------


def test_tables_and_the_figure(library: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench(tmp_path)
    bench(tmp_path, "--only", "factor float64 F 64")  # once more: the last row counts
    monkeypatch.setattr(sheet, "RESULTS", tmp_path)
    expected = {"lu-gpu": 8, "lu-gpu-calls": 8, "lu-gpu-solutions": 6, "lu-gpu-repair": 2}
    pages = {name: tables.fill(f".. table:{name}\n.. /table\n") for name in expected}
    for name, lines in expected.items():
        page = pages[name]
        assert len([line for line in page.splitlines() if line.startswith("   float")]) == lines
        assert "Fake card" in page
        for table in page.split("\n\n"):
            assert len({line.count("|") for line in table.splitlines() if " | " in line}) <= 1
    assert "   float64 64 x 64, by columns | 10 | 0.80 | 0.81 | 0.82 | 0.90 | 2.5%" in lu_gpu_tables.times()
    assert lu_gpu_tables.structured().count("float64 96 x 96") == len(STRUCTURED)
    pytest.importorskip("matplotlib")
    file = tmp_path / "lu_gpu.svg"
    assert figures.main(["lu_gpu", "--output", str(file)]) == 0
    assert file.read_bytes().count(b"<path") > 20


def test_the_list_needs_no_gpu(capsys: Any) -> None:
    assert bench_lu_gpu.main(["--list", "--suite", "solve"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8
    assert bench_lu_gpu.main(["--list", "--phases", "--only", "F 8192"]) == 0
    assert capsys.readouterr().out.split("\n")[0] == "factor float64 F 8192"
    assert bench_lu_gpu.main(["--only", "nothing of the kind"]) == 2
