"""Faults of the campaign for a GPU, and the judge of what becomes of them, on the CPU: NumPy stands in for CuPy, and
products that are spoiled for a wrong card."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import abft_tsm2
from abft_tsm2 import Status
from abft_tsm2.arrays import bit_pattern
from abft_tsm2.core import cublas
from benchmarks import device_planted
from benchmarks.device_faults import (
    MASS,
    OUTCOMES,
    SEVERAL,
    TILES,
    Faults,
    Seen,
    changed,
    outcomes,
    places,
    several,
    singles,
)
from benchmarks.device_operands import TYPES, Mode, Shape, modes
from benchmarks.device_planted import Campaign, Scene
from benchmarks.device_runs import Run
from benchmarks.gemm_device import WIDE

SHAPES = (Shape(96, 80, 72), Shape(40, 64, 32, 6), Shape(30, 90, 150))
FAULTY = Mode("float32")

# ---- faults -------------------------------------------------------------------------------------------------------


@np.errstate(invalid="ignore")  # signalling NaN
@pytest.mark.parametrize("dtype", TYPES)
def test_faults_of_one_element(dtype: str) -> None:
    rng = np.random.default_rng(0)
    clean = rng.standard_normal((3, 20, 30)).astype(TYPES[dtype])
    kinds: set[str] = set()
    for _ in range(60):
        faults = singles(clean, 8, rng)
        product, row, column = np.unravel_index(faults.place, clean.shape)
        assert len(set(row)) == len(set(column)) == faults.place.size >= 7
        assert (np.diff(faults.place) > 0).all()
        assert set(product) <= {0, 1, 2}
        after = clean.copy()
        bit_pattern(after).reshape(-1)[faults.place] = faults.bits
        assert (bit_pattern(after) != bit_pattern(clean)).sum() == faults.place.size
        for number, place, change in zip(faults.fault, faults.place, faults.change, strict=True):
            before, now = (bit_pattern(x).reshape(-1)[place : place + 1] for x in (clean, after))
            kind = faults.kinds[number]
            kinds.add(kind)
            if kind.startswith("bit "):
                assert int(before[0]) ^ int(now[0]) == 1 << int(kind[4:])
            value, changed_to = (float(x.view(TYPES[dtype]).astype(float)[0]) for x in (before, now))
            assert kind != "sign" or changed_to == -value
            assert kind != "x 1e30" or not math.isclose(changed_to, value)
            np.testing.assert_equal(change, abs(changed_to - value))
            assert math.isfinite(change) or kind in ("NaN", "Inf", "x 1e30") or kind.startswith("bit ")
    width = 8 * TYPES[dtype].itemsize
    assert {f"bit {bit}" for bit in range(width - 1)} | {"sign", "NaN", "Inf", "x 1e30"} == kinds


@pytest.mark.parametrize("kind", [*SEVERAL, *TILES, *MASS])
def test_faults_of_many_elements(kind: str) -> None:
    rng = np.random.default_rng(0)
    clean = rng.standard_normal((1, 200, 300)).astype(np.float32)
    rows, columns = np.unravel_index(places(kind, (200, 300), rng), (200, 300))
    sizes = {"row": 300, "column": 200, "16 elements": 16, "NaN in 1000 elements": 1000, SEVERAL[0]: rows.size}
    assert rows.size == len(set(zip(rows, columns, strict=True))) == sizes.get(kind, TILES.get(kind, (0,))[0] ** 2)
    assert kind != SEVERAL[0] or 3 <= rows.size <= 10
    faults = several(kind, clean, rng)
    after = faults.bits.view(np.float32)
    before = clean.reshape(-1)[faults.place]
    if kind in TILES:
        np.testing.assert_array_equal(after, (before.astype(float) * TILES[kind][1]).astype(np.float32))
    if kind == "row":
        assert len(set(faults.place // 300)) == 1
    assert np.isnan(after).all() == (kind == "NaN in 1000 elements")


def test_a_change_that_rounding_undoes_is_none() -> None:
    clean = np.ones((1, 8, 8)).astype(TYPES["bfloat16"])
    assert several("tile 64 x 1.001", clean, np.random.default_rng(0)).place.size == 0
    assert bool((changed("sign", clean.reshape(-1), clean, np.random.default_rng(0)) == -1).all())


def seen(count: int, **given: Any) -> Seen:
    """As if everything had been repaired."""
    usual: dict[str, Any] = {
        "line": np.arange(count),
        "wrong": np.zeros(count, bool),
        "closer": np.ones(count, bool),
        "stayed": np.zeros(count, bool),
        "elsewhere": np.zeros(1, int),
        "product": np.zeros(count, int),
        "statuses": [Status.CORRECTED],
        "limit": 1.0,
    }
    return Seen(**{**usual, **{name: np.array(x) if name in usual else x for name, x in given.items()}})


def of_changes(*change: float, single: bool = True) -> Faults:
    fault = np.arange(len(change)) if single else np.zeros(len(change), int)
    kinds = ("x",) * (len(change) if single else 1)
    return Faults(kinds, fault, np.arange(len(change)), np.zeros(len(change), np.uint32), np.array(change))


SILENT = [Status.CLEAN]
STAYED: dict[str, Any] = {"stayed": [True], "wrong": [True]}
CASES: dict[str, tuple[tuple[float, ...], dict[str, Any], set[str]]] = {
    "repaired": ((3.0,), {}, {"above", "found", "repaired"}),
    "too small, and found": ((0.5,), {}, {"found", "repaired"}),
    "too small, and missed": ((1.5,), {**STAYED, "statuses": SILENT}, {"missed_below"}),
    "missed": ((3.0,), {**STAYED, "statuses": SILENT}, {"above", "missed_above", "broken"}),
    "NaN, missed": ((np.nan,), {**STAYED, "statuses": SILENT}, {"above", "missed_above", "broken"}),
    "repaired in silence": ((3.0,), {"statuses": SILENT}, {"above", "missed_above", "broken"}),
    "repaired wrongly": ((3.0,), {"wrong": [True]}, {"above", "found", "damaged", "broken"}),
    "hardly better": ((3.0,), {"closer": [False]}, {"above", "found", "damaged", "broken"}),
    "worse than it was": ((0.5,), {"wrong": [True]}, {"found", "damaged", "broken"}),
    "wrong elsewhere": ((3.0,), {"elsewhere": [1]}, {"above", "found", "damaged", "broken"}),
    "refused": ((3.0,), {"statuses": [Status.UNCORRECTABLE]}, {"above", "refused", "broken"}),
    "an error for nothing": ((0.5,), {**STAYED, "statuses": [Status.CHECKSUM_FAULT]}, {"refused", "broken"}),
}
TWO_STAYED: dict[str, Any] = {"line": [0, 0], "stayed": [True, True], "wrong": [True, True]}
MANY: dict[str, tuple[tuple[float, ...], dict[str, Any], set[str]]] = {
    "repaired": ((3.0, 9.0), {}, {"above", "found", "repaired"}),
    "of one line": ((3.0, 9.0), {"line": [0, 0]}, {"found", "repaired"}),
    "that cancelled": ((3.0, 3.0), {**TWO_STAYED, "statuses": SILENT}, {"missed_below"}),
    "with NaN": ((3.0, np.nan), {**TWO_STAYED, "statuses": SILENT}, {"above", "missed_above", "broken"}),
    "a large rest of a line": (
        (3.0, 9.0),
        {"line": [0, 0], "stayed": [True, False], "wrong": [True, False]},
        {"found", "damaged", "broken"},
    ),
    "a small rest of a line": (
        (1.0, 9.0),
        {"line": [0, 0], "stayed": [True, False], "wrong": [True, False]},
        {"found", "left"},
    ),
    "a line that is left": (
        (3.0, 3.0, 9.0),
        {"line": [0, 0, 1], "stayed": [True, True, False], "wrong": [True, True, False]},
        {"above", "found", "left"},
    ),
    "one of two missed": (
        (3.0, 9.0),
        {"stayed": [True, False], "wrong": [True, False]},
        {"above", "found", "missed_above", "broken"},
    ),
    "refused, which may be": ((3.0, 3.0), {**TWO_STAYED, "statuses": [Status.UNCORRECTABLE]}, {"refused"}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_becomes_of_one_element(name: str) -> None:
    change, given, expected = CASES[name]
    (found,) = outcomes(of_changes(*change), seen(1, **given))
    assert {key for key, holds in found.items() if holds} == {"planted", *expected}


@pytest.mark.parametrize("name", MANY)
def test_what_becomes_of_many_elements(name: str) -> None:
    change, given, expected = MANY[name]
    (found,) = outcomes(of_changes(*change, single=False), seen(len(change), **given))
    assert {key for key, holds in found.items() if holds} == {"planted", *expected}


def test_faults_are_told_apart() -> None:
    given = seen(
        2, stayed=[True, False], wrong=[True, False], product=[0, 1], statuses=[Status.CLEAN, Status.CORRECTED]
    )
    first, second = outcomes(of_changes(9.0, 9.0), replace(given, elsewhere=np.zeros(2, int)))
    assert first["broken"]
    assert second["repaired"]
    assert outcomes(Faults(("x",), *(np.zeros(0, int) for _ in range(4))), seen(0)) == [{}]


# ---- planted faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", modes(np), ids=str)
def test_planted_faults_are_repaired(mode: Mode) -> None:
    run = Run(np, 0, math.inf)
    campaign = Campaign(run, [mode], SHAPES)
    for number in range(len(SHAPES)):
        campaign.scene(number)
    assert run.failures == []
    found = campaign.table()
    assert tuple(found[0]) == device_planted.COLUMNS
    total = {name: sum(row[name] for row in found) for name in OUTCOMES}
    assert total["planted"] == campaign.planted > 500
    assert total["above"] > 200
    assert total["repaired"] + total["left"] == total["found"] >= total["above"]
    assert total["missed_above"] == total["damaged"] == total["refused"] == 0
    assert total["found"] + total["missed_below"] == total["planted"]
    assert sum(row["planted"] for row in found if row["kind"] in MASS) >= 3


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("mode", [Mode("float64"), Mode("bfloat16")], ids=str)
def test_on_a_card_faults_are_planted_behind_the_product(
    mode: Mode, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a card does it: a product, faults planted behind it, and then the check, all for the whole stack."""

    def on_card(a: Any, b: Any, **named: Any) -> Any:
        C = abft_tsm2.protected_gemm(a, b)
        cublas.Gemm.__call__(None, a, b, C, 1.0, 0.0)  # type: ignore[arg-type]
        products = iter(C if C.ndim == 3 else C[None])

        def hook(stage: str, arrays: Any) -> None:
            if stage == "multiplied":
                arrays["C"][...] = next(products)

        C[...], report = abft_tsm2.protected_gemm(a, b, on_stage=hook, **named)
        return C, report

    monkeypatch.setattr(cublas.Gemm, "__call__", lambda *_: None)  # the product is there
    monkeypatch.setattr(device_planted, "protected_gemm", on_card)
    monkeypatch.setattr(device_planted, "CALLS", 3)
    run = Run(SimpleNamespace(**vars(np)), 0, math.inf)
    campaign = Campaign(run, [mode], [shape])
    campaign.scene(0)
    assert run.failures == []
    total = {name: sum(row[name] for row in campaign.table()) for name in OUTCOMES}
    assert total["planted"] > 20
    assert total["above"] > 10
    assert total["found"] >= total["above"]


def scene(mode: Mode = FAULTY, shape: Shape = SHAPES[0]) -> Scene:
    return Scene(mode, shape, "normal", "rows", np.random.default_rng(0), np)


def after(multiply: Any, monkeypatch: pytest.MonkeyPatch, faults: Faults, made: Scene) -> dict[str, bool]:
    monkeypatch.setattr(device_planted, "protected_gemm", multiply)
    found, _ = made.outcome(made.call(faults, sync=True))
    return found[0]


def spoiled(change: Any, **extra: Any) -> Any:
    """The library, whose result is changed behind its repair, and whose report says something else."""

    def multiply(a: Any, b: Any, **named: Any) -> Any:
        C, report = abft_tsm2.protected_gemm(a, b, **named)
        change(C)
        return C, replace(report, **extra)

    return multiply


def test_the_judge_tells_wrong_products_from_right_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scene()
    before = float(made.clean[0, 3, 4])
    bits = bit_pattern(np.array([before + 3 * made.limit], np.float32))
    faults = Faults(("x",), np.zeros(1, int), np.array([3 * 72 + 4]), bits, np.array([3 * made.limit]))

    def put(*at: int, value: float) -> Any:
        return lambda C: C.__setitem__(at, value)

    assert after(abft_tsm2.protected_gemm, monkeypatch, faults, made)["repaired"]
    assert not after(spoiled(put(3, 4, value=before + 1e-6)), monkeypatch, faults, made)["broken"]
    planted = before + 3 * made.limit
    assert after(spoiled(put(3, 4, value=planted)), monkeypatch, faults, made)["missed_above"]
    assert after(spoiled(put(3, 4, value=before + 2.9 * made.limit)), monkeypatch, faults, made)["damaged"]
    assert after(spoiled(put(3, 4, value=float("nan"))), monkeypatch, faults, made)["damaged"]
    assert after(spoiled(put(50, 60, value=9.0)), monkeypatch, faults, made)["damaged"]
    clean = spoiled(lambda C: None, status=Status.CLEAN)
    assert after(clean, monkeypatch, faults, made)["missed_above"]
    error = spoiled(lambda C: None, status=Status.UNCORRECTABLE)
    assert after(error, monkeypatch, faults, made)["refused"]


def test_what_was_checked_in_float32_has_to_be_what_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in ("float16", "bfloat16"):
        made = scene(Mode(dtype, WIDE))
        faults = several("16 elements", made.clean, np.random.default_rng(1))
        assert made.clean.dtype == np.float32
        assert not after(abft_tsm2.protected_gemm, monkeypatch, faults, made)["broken"]
        wrong = spoiled(lambda C: C.__setitem__((5, 5), C[5, 6]))
        assert after(wrong, monkeypatch, faults, made)["damaged"]
        monkeypatch.undo()


def test_a_product_that_is_wrong_by_itself_is_no_scene(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_planted, "protected_gemm", spoiled(lambda C: C.__setitem__((1, 2), 9.0)))
    with pytest.raises(ArithmeticError, match=r"wrong without any fault: 1 elements of normal float32"):
        scene()
    monkeypatch.setattr(device_planted, "protected_gemm", spoiled(lambda C: None, status=Status.CORRECTED))
    with pytest.raises(ArithmeticError, match=r"0 elements(.|\n)*CORRECTED"):
        scene()
