"""benchmarks.rounding where no GPU is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2.arrays import FLOATS
from abft_tsm2.checksum.bounds import DETECT
from benchmarks.rounding import __main__ as rounding
from benchmarks.rounding.__main__ import Cell
from benchmarks.rounding.engines import ENGINES, Engine, kept, probe, reduction
from benchmarks.rounding.operands import FAMILIES, Draw, rounded, widened
from tests.support.rounding_library import computed, tf32

BY_NAME = {engine.name: engine for engine in ENGINES}
NAMES = [(kind, family) for kind in FAMILIES for family in FAMILIES[kind]]


# ---- all products -------------------------------------------------------------------------------------------------


def test_every_family_is_multiplied_by_every_engine() -> None:
    cells = list(rounding.products((30, 40, 20), computed, Draw(0)))
    assert len(cells) == len(NAMES) * len(ENGINES)
    assert all(cell.measured and not cell.note for cell in cells)
    assert {cell.same for cell in cells if cell.engine.plain} == {True}
    assert {cell.same for cell in cells if not cell.engine.plain} == {None}
    assert all(cell.measured["over_tau"] < 1 for cell in cells if cell.kind == "generic")
    emulated = {row["note"] for row in rounding.rows(cells) if row["engine"] == "float32 BF16x9"}
    assert emulated == {"bit for bit the plain product: the library did not emulate"}


def test_errors_are_noted_where_they_happen() -> None:
    def multiply(engine: Engine, A: Any, B: Any) -> Any:
        if engine.name == "float32 BF16x9":
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        if engine.name == "float16":
            raise RuntimeError("an illegal memory access was encountered")
        if engine.name == "bfloat16" and A[0, 0] == A[0, 1]:
            raise ValueError("no constants")
        return computed(engine, A, B)

    cells = list(rounding.products((8, 10, 8), multiply, Draw(0)))
    assert len(cells) == len(NAMES) * len(ENGINES)
    notes = {name: {c.note for c in cells if c.engine.name == name} for name in BY_NAME}
    assert notes["float32 BF16x9"] == {"not offered on this card: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED"}
    assert notes["float16"] == {"failed: RuntimeError: an illegal memory access was encountered"}
    assert notes["bfloat16"] == {"", "failed: ValueError: no constants"}
    assert notes["float32"] == {""}
    assert not any(cell.measured for cell in cells if cell.note)
    assert not any(cell.failed for cell in cells if cell.engine.name == "float32 BF16x9")
    (row,) = (r for r in rounding.rows(cells) if r["engine"] == "float16" and r["kind"] == "generic")
    assert (row["families"], row["ratio"], row["ratio_family"]) == (0, "", "")
    assert "low rank: failed" in row["note"]


def test_large_float64_products_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "MOST_FLOAT64", 8 * 10 * 8 - 1)
    cells = list(rounding.products((8, 10, 8), computed, Draw(0)))
    left = {cell.engine.name for cell in cells if cell.note.startswith("left out")}
    assert left == {"float64", "float64 fixed-point"}
    assert not any(cell.failed for cell in cells)


def cell(engine: str, kind: str, family: str, k: int, **measured: float) -> Cell:
    return Cell(BY_NAME[engine], (8, k, 8), kind, family, measured)


def test_rows_and_summary_pick_the_worst() -> None:
    cells = [
        cell("float32", "generic", "normal", 16, ratio=1.0, linear=0.3, over_tau=0.2),
        cell("float32", "generic", "sparse", 16, ratio=2.0, linear=0.1, over_tau=0.1),
        cell("float32", "generic", "normal", 64, ratio=1.5, linear=0.1, over_tau=0.4),
        cell("float32", "structured", "sine", 16, ratio=9.0, linear=0.5, over_tau=1.7),
        cell("float16->float32", "generic", "normal", 16, ratio=DETECT + 0.4, linear=0.2, over_tau=0.3),
        cell("float16->float32", "generic", "normal", 64, ratio=DETECT + 0.6, linear=0.2, over_tau=0.3),
        cell("float16", "generic", "normal", 64, ratio=5000.0, linear=2.0, stored=1.2, over_tau=0.3),
        Cell(BY_NAME["float32 BF16x9"], (8, 16, 8), "generic", "normal", note="not offered on this card: no"),
    ]
    first, second, third, *_ = rounding.rows(cells)
    assert (first["m"], first["k"], first["n"], first["kind"], first["families"]) == (8, 16, 8, "generic", 2)
    assert (first["ratio"], first["ratio_family"]) == ("2", "sparse")
    assert (first["linear"], first["linear_family"]) == ("0.3", "normal")
    assert (first["over_tau"], first["over_tau_family"]) == ("0.2", "normal")
    assert (second["k"], third["kind"], third["over_tau"], third["stored"]) == (64, "structured", "1.7", "")

    of = {row["engine"]: row for row in rounding.summarise(cells, {"float32": "exact"}, "a card")}
    assert of["float32"]["ratio, generic"] == "2 (sparse, 8 x 16 x 8)"
    assert of["float32"]["linear"] == "0.5 (sine, 8 x 16 x 8)"
    assert of["float32"]["r / tau, generic"] == "0.4 (normal, 8 x 64 x 8)"
    assert of["float32"]["r / tau, structured"] == "1.7 (sine, 8 x 16 x 8)"
    assert (of["float32"]["DETECT"], of["float32"]["TRUNCATION"], of["float32"]["operands"]) == ("2.00", "", "exact")
    half = of["float16->float32"]
    assert (half["DETECT"], half["TRUNCATION"]) == ("4.60", "0.1000")  # 0.4 / 4 is more than 0.6 / 8
    assert (of["float16"]["DETECT"], of["float16"]["stored"]) == ("", "1.2 (normal, 8 x 64 x 8)")
    assert (of["float16"]["ratio, generic"], of["float16"]["linear"]) == ("", "")
    assert (of["float32 BF16x9"]["DETECT"], of["float32 BF16x9"]["note"]) == ("", "not offered on this card: no")
    assert of["float32"]["measured on"] == "a card"


def test_partly_emulated_says_in_how_many_families() -> None:
    engine = BY_NAME["float32 BF16x9"]
    pair = [Cell(engine, (8, 8, 8), "generic", f"{same}", {"ratio": 1.0}, same) for same in (False, True)]
    (row,) = rounding.rows(pair)
    assert row["note"] == "bit for bit the plain product in 1 of 2 families"


# ---- single elements ----------------------------------------------------------------------------------------------


def test_the_bias_of_an_adder_that_truncates_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "BIAS_SIZE", 24)

    def multiply(engine: Engine, A: Any, B: Any) -> Any:
        if engine.inputs == "float64":
            return A @ B
        if engine.plain:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        a, b = widened(A, engine.inputs), widened(B, engine.inputs)
        total = np.zeros((24, 24))
        for at in range(a.shape[1]):  # one after another, in float32
            exact = total + np.outer(a[:, at], b[at])
            near = exact.astype(np.float32).astype(np.float64)
            down = np.where(near > exact, np.nextafter(near.astype(np.float32), np.float32(0)), near)
            total = down.astype(np.float64) if engine.inputs == "float16" else near
        return rounded(total, engine.out)

    found = {row["engine"]: row for row in rounding.bias(200, multiply, Draw(2))}
    assert set(found) == {e.name for e in ENGINES if FLOATS[e.out].bits > 16}
    near, down = (float(found[name]["mean / u"]) for name in ("float32", "float16->float32"))
    assert abs(near) < 1
    assert -200 < down < -50  # half a unit in the last place, which is between u and 2 u, at most 200 times
    assert float(found["float16->float32"]["mean / (u k)"]) == pytest.approx(down / 200, rel=0.02)
    assert 1e-3 < float(found["float64"]["rms / u"]) < 20
    assert found["float32 BF16x9"]["note"].startswith("not offered")


def test_the_probe_tells_how_operands_are_reduced() -> None:
    x = probe()
    assert len(np.unique(x)) == x.size == 2**16

    def with_ties(even: bool) -> Any:
        lowest = (x.view(np.uint32) >> 13) & 1
        added = np.uint32(0xFFF) + lowest if even else np.uint32(0x1000)
        return ((x.view(np.uint32) + added) & np.uint32(0xFFFFE000)).view(np.float32)

    assert kept(x, x) == "exact"
    assert kept(x, (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)) == "truncated"
    assert kept(x, with_ties(True)) == "nearest, ties to even"
    assert kept(x, with_ties(False)) == kept(x, tf32(x)) == "nearest, ties away"
    assert kept(x, x * np.float32(0.5)).startswith("otherwise, off by up to 51")
    assert kept(x, np.full_like(x, np.nan)).startswith("otherwise")


def test_both_operands_are_probed() -> None:
    assert reduction(BY_NAME["float32"], computed) == "exact"
    assert reduction(BY_NAME["float32 TF32"], computed) == "nearest, ties away"

    def lopsided(engine: Engine, A: Any, B: Any) -> Any:
        return tf32(A) @ B

    assert reduction(BY_NAME["float32 TF32"], lopsided) == "A: nearest, ties away; B: exact"
