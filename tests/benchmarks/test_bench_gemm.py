"""Protected products on a GPU where no GPU is: the grid, planted faults, and whole runs on a fake card.

The stopwatch is tested in test_gpu_timing.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import protected_gemm
from abft_tsm2.core.device import known
from abft_tsm2.faults.judge.oracle import arithmetic
from abft_tsm2.report import Status
from benchmarks import bench_gemm, gemm_bars, gemm_grid, gemm_suite, gpu_timing, planting, sheet, suite
from benchmarks.gemm_bars import BARS, verdicts
from benchmarks.gemm_grid import CLEAN, DROPPED, ENCODED, ONE, PLAN, QUEUED, RECHECKED, TF32, TWO, WAITED, WIDE, Cell
from tests.support.fake_card import Card
from tests.support.fake_products import TYPES, Protected, multiplied, operands

H200 = known("H200")

# ---- the grid -----------------------------------------------------------------------------------------------------


def test_names_are_unique_and_groups_are_neighbours() -> None:
    cells = gemm_grid.grid()
    assert len({str(cell) for cell in cells}) == len(cells)
    assert {cell.suite for cell in cells} == set(gemm_grid.SUITES)
    groups = [group for group, _ in groupby(cells, key=lambda cell: cell.group)]
    assert len(groups) == len(set(groups))
    assert len([cell for cell in cells if cell.default]) == len(gemm_grid._EVERY_DAY) + 2  # three kinds of faults


def test_every_bar_speaks_of_one_cell() -> None:
    assert len({bar.name for bar in BARS}) == len(BARS)
    for bar in BARS:
        assert len([cell for cell in gemm_grid.grid() if bar.covers(cell)]) == 1, bar.name
    by_name = {bar.name: bar.limit for bar in BARS}
    assert by_name["float32, one-sided, n = 2048"] == 4
    assert by_name["float32, B encoded, n = 2048"] == 2.8
    assert by_name["float16, checked in float32, n = 16384"] == 5


def test_bytes() -> None:
    cell = Cell("square", 10, 20, 30, "bfloat16")
    assert cell.bytes == cell.checked_bytes == 2 * (200 + 600 + 300)
    assert replace(cell, variant=ENCODED).checked_bytes == 2 * (200 + 300)
    assert replace(cell, variant=RECHECKED, batch=3).checked_bytes == 3 * cell.bytes
    assert replace(cell, variant=WIDE).checked_bytes == 2 * (200 + 600) + (2 * 4 + 2) * 300


# ---- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_planted(card: Card, dtype: str) -> None:
    A, B = operands(dtype, (300, 64, 400))
    C = multiplied(A, B)
    report = protected_gemm(A, B, return_report=True)[1]
    limit = report.checks[0].detection_limit
    faults = planting.Faults(C, 64, limit, 0)
    for name, changed in ((CLEAN, 0), ("1", 1), ("16", 16), ("tile", 128 * 128)):
        plant, places = faults.plant(name), []
        for _ in range(3):
            after = C.copy()
            plant(after)
            where = np.flatnonzero(after.view(f"u{C.itemsize}") != C.view(f"u{C.itemsize}"))
            assert where.size == changed
            values = C.reshape(-1)[where].astype(float)
            expected = np.full(changed, 64 * 20.0) if name == "tile" else 1 - 3 * values
            np.testing.assert_array_equal(after.reshape(-1)[where], expected.astype(C.dtype))
            assert name in (CLEAN, "tile") or abs(expected - values).min() >= planting.SURE * limit
            assert name != "16" or len(set(where // 400)) == 16
            places.append(where.tolist())
        assert name == CLEAN or places[0] != places[1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_faults_are_planted_on_a_gpu(dtype: str) -> None:
    import cupy

    C = multiplied(*operands(dtype, (300, 64, 400)))
    faults = planting.Faults(cupy.asarray(C), 64, 1.0, 0)
    for name, changed in ((CLEAN, 0), ("1", 1), ("16", 16), ("tile", 128 * 128)):
        after = cupy.asarray(C)
        faults.plant(name)(after)
        bits = (x.view(f"u{C.itemsize}") for x in (cupy.asnumpy(after), C))
        assert np.count_nonzero(np.not_equal(*bits)) == changed


@pytest.mark.parametrize("faults", gemm_grid.FAULTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_planted_is_found_in_every_row(card: Card, dtype: str, faults: str) -> None:
    A, B = operands(dtype, (300, 512, 400))
    clean = protected_gemm(A, B, return_report=True)
    judge = gemm_suite.judge_of(A, B, arithmetic(dtype), np)
    plant = planting.Faults(clean[0], 512, clean[1].checks[0].detection_limit, 0).plant(faults)

    def hook(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            plant(arrays["C"])

    for _ in range(planting.SETS):
        C, report = protected_gemm(A, B, check="rows", return_report=True, on_stage=hook)
        assert report.status is (Status.CLEAN if faults == CLEAN else Status.CORRECTED)
        rows = {row for fault in report.faults for row in fault.rows or range(300)}
        assert len(rows) == {CLEAN: 0, "1": 1, "16": 16, "tile": 128}[faults]
        assert judge(C) <= 1


# ---- the judge ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 30, 50), (3, 40, 30, 50), (1, 64, 200), (200, 8, 90)])
@pytest.mark.parametrize("dtype", [*TYPES, "float16"])
def test_a_right_product_passes_and_a_wrong_element_does_not(dtype: str, shape: tuple[int, ...]) -> None:
    A, B = operands(dtype, shape)
    judge = gemm_suite.judge_of(A, B, arithmetic(dtype), np)
    C = multiplied(A, B)
    assert judge(C) <= (1 if C.itemsize == 2 else 0.6)
    m = C.shape[-2]
    for row in {0, m // 2, m - 1}:
        wrong = C.copy()
        wrong[..., row, 3] = 3e3
        assert judge(wrong) > 1
        wrong[..., row, 3] = np.nan
        assert np.isnan(judge(wrong))


def test_tf32_is_allowed_what_cutting_its_operands_takes_and_no_more() -> None:
    A, B = operands("float32", (60, 400, 50))
    cut = [(x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (A, B)]
    C = multiplied(*cut)
    judge = gemm_suite.judge_of(A, B, arithmetic("float32", tf32=True), np)
    assert judge(C) <= 1
    assert gemm_suite.judge_of(A, B, arithmetic("float32"), np)(C) > 1
    C[3, 4] += 2
    assert judge(C) > 1


# ---- a fake card --------------------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    for name, module in card.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(gpu_timing.time, name, lambda: card.host)
    monkeypatch.setattr(suite, "query", lambda: H200)
    monkeypatch.setattr(suite.signal, "signal", lambda *_: None)
    monkeypatch.setattr(suite, "compiled", lambda config: None)
    monkeypatch.setattr(gemm_grid, "grid", lambda: SMALL)
    monkeypatch.setattr(gemm_bars, "verdicts", lambda rows: verdicts(rows, ()))
    monkeypatch.setattr("benchmarks.ceilings.BYTES", 1 << 20)
    return card


@pytest.fixture
def library(card: Card, monkeypatch: pytest.MonkeyPatch) -> Protected:
    made = Protected(card)
    monkeypatch.setattr(gemm_suite, "protected_gemm", made)
    monkeypatch.setattr(planting, "TILE", 16)
    return made


CLOCKS = (ONE, WAITED)
SMALL = (
    *(Cell("square", 40, 40, 40, "float32", one, default=True) for one in (ONE, TWO, ENCODED, RECHECKED)),
    Cell("square", 40, 40, 40, "float32", TF32),
    *(Cell("square", 40, 40, 40, "bfloat16", one) for one in (ONE, WIDE)),
    *(Cell("square", 40, 40, 40, "float16", one) for one in (ENCODED, WIDE)),
    Cell("square", 40, 40, 40, "float64"),
    *(Cell("skinny", 1, 48, 64, "bfloat16", one) for one in (ENCODED, RECHECKED)),
    *(Cell("batched", 20, 20, 20, dtype, batch=5) for dtype in ("float32", "bfloat16")),
    *(Cell("repair", 48, 40, 64, t, clock, one) for t in TYPES for clock in CLOCKS for one in gemm_grid.FAULTS),
    *(Cell("host", 40, 40, 40, "float32", one) for one in (gemm_grid.CUPY, PLAN, QUEUED, WAITED, DROPPED)),
)


def bench(tmp_path: Path, *arguments: str) -> tuple[int, list[sheet.Row]]:
    path = tmp_path / "gemm_device.csv"
    code = bench_gemm.main(["--device", "--output", str(path), *arguments])
    return code, sheet.read("gemm_device", path)


# ---- whole runs ---------------------------------------------------------------------------------------------------


def test_a_run_measures_and_judges_every_cell(library: Protected, tmp_path: Path, capsys: Any) -> None:
    code, rows = bench(tmp_path, "--full")
    text = capsys.readouterr().out
    assert [row["error"] or row["note"] for row in rows if row["error"] or row["note"]] == []
    assert code == 0, text
    assert [gemm_grid.key(row) for row in rows] == [gemm_grid.key(gemm_grid.empty_row(cell)) for cell in SMALL]
    for row in rows:
        assert 0 <= float(row["judged"]) <= 1
        assert row["device"] == "Fake card"
        assert float(row["read_gbs"]) == pytest.approx(4000, rel=0.01)
        if row["suite"] in ("square", "skinny", "batched"):
            assert float(row["plain_us"]) == pytest.approx(2000, rel=1e-3)
            assert float(row["overhead_us"]) == pytest.approx(201, rel=1e-3)
            assert float(row["low_pct"]) <= float(row["overhead_pct"]) <= float(row["high_pct"])
            assert float(row["overhead_pct"]) == pytest.approx(10.05, rel=1e-3)
            assert (row["status"], row["hidden"]) == ("CLEAN", row["samples"])
            assert int(row["samples"]) >= 9
            assert int(row["suspicions"]) > 0
    assert f"{len(SMALL)} of {len(SMALL)} cells" in text
    wanted = {"plain", "check=both", "precision=tf32", "verify=float32", "encoded, recheck=False"}
    assert set(library.asked) == {*wanted, "encoded, recheck=True"}


def test_what_repairs_cost_is_beside_a_launch_that_plants_nothing(library: Protected, tmp_path: Path) -> None:
    _, rows = bench(tmp_path, "--only", "repair")
    assert [row["faults"] for row in rows] == 6 * list(gemm_grid.FAULTS)
    assert [row["variant"] for row in rows[::4]] == 3 * list(CLOCKS)
    for row in rows:
        assert row["hidden"] == ("" if row["variant"] == WAITED else row["samples"])
        faults = {CLEAN: 0, "1": 1, "16": 16, "tile": 16 * 16}[row["faults"]]
        assert row["status"] == ("CORRECTED" if faults else "CLEAN")
        extra = 10 * faults**0.5 if faults else 201
        assert float(row["overhead_us"]) == pytest.approx(extra, abs=0.1)
        assert float(row["overhead_pct"]) == pytest.approx(100 * extra / float(row["plain_us"]), rel=1e-3)
        assert int(row["samples"]) >= 15


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("element", "wrong product"),
        ("not written", "wrong product: nan"),
        ("raises", "ValueError: no such luck"),
        ("alarm", "reports that should say CLEAN"),
        ("corruption", "UNCORRECTABLE"),
    ],
)
def test_what_goes_wrong_is_a_fault(library: Protected, tmp_path: Path, capsys: Any, wrong: str, said: str) -> None:
    library.wrong = wrong
    code, rows = bench(tmp_path, "--only", "square float32 40x40x40 one")
    assert code == 1
    assert said in rows[0]["error"]
    text = capsys.readouterr().out
    assert "FAULT square float32 float32 40 40 40 1 one-sided clean: " in text
    assert "1 of 1 cells" in text
