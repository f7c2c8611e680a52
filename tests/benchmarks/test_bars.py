"""Seeded samples of the large sweeps: no false alarm, no fault above the limit missed, the bounds' tightness.

The whole sweeps are `python -m benchmarks.clean_products` and `python -m benchmarks.planted_faults`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Status
from benchmarks import clean_products, planted_faults, tightness
from benchmarks.clean_products import Product
from benchmarks.judge import Watch
from benchmarks.planted_faults import campaign, detection_by_bit, plans, plant
from tests.support import families
from tests.support.cases import DTYPES, REGIMES

SMALL = tuple(regime for regime in REGIMES if regime.name not in ("longest k", "large"))
GENERIC = len(families.names()) + families.names().index("normal")  # the index of a product of normal data


def test_no_false_alarm_on_clean_products():
    rows, alarms = clean_products.sweep(range(25 * len(families.FAMILIES)), seed=7, regimes=SMALL)
    assert not alarms
    assert {row["family"] for row in rows} == set(families.FAMILIES)
    assert {row["dtype"] for row in rows} == {dtype.name for dtype in DTYPES}


@pytest.mark.parametrize("family", families.names("generic", "structured"))
def test_no_false_alarm_at_the_largest_k(family):
    rng = np.random.default_rng(8)
    a, b = families.operands(family, 3, 100_000, 4, rng, np.float32)
    case = clean_products.Case(3, 100_000, 4, np.dtype(np.float32))
    product = Product(8, 0, family, case, a, b, None, 1.0, 0.0, "both")
    result, report = product.protect(on_error="detect")
    assert not clean_products.alarm(product, result, report)


def test_no_planted_fault_above_the_limit_is_missed_or_left():
    kinds, bits, failures = campaign(1500, seed=7)
    assert not failures
    assert {plan.kind for plan in plans(np.dtype(np.float32), np.random.default_rng(0))} == {
        row["kind"] for row in kinds
    }
    assert sum(row["found"] for row in kinds) > 1000
    for row in kinds:
        if row["kind"] in ("NaN", "Inf", "x 1e30", "t: NaN", "u: NaN"):
            assert 0 < row["above"] <= row["found"], row
    assert {row["bit"] for row in bits if row["dtype"] == "float64"} >= set(range(52, 64))


@pytest.mark.parametrize(("dtype", "bit", "bar"), [("float32", 16, 0.90), ("float64", 15, 0.85)])
def test_flips_found_bit_by_bit_in_a_small_product(dtype, bit, bar):
    # The larger the product the larger the limit; the bars at 4096 are for the benchmark.
    assert detection_by_bit(512, dtype, [bit], 512)[bit] >= bar
    assert detection_by_bit(512, dtype, [2], 256)[2] == 0


@pytest.mark.parametrize("dtype", tightness.BARS)
def test_bounds_are_tight(dtype):
    rows = [tightness.measure(family, 256, dtype) for family in families.names("generic")]
    assert all(row["status"] == "CLEAN" for row in rows)
    assert tightness.median(rows, dtype) <= tightness.BARS[dtype]


# ---- the sweeps themselves: a library that alarms for nothing, misses or damages must not pass -------------


def protect_with(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let `change` falsify what the library returns to the sweeps."""
    honest = Product.protect

    def protect(self: Product, **options: Any) -> Any:
        result, report = honest(self, **{**options, "on_error": "detect"})
        return change(result, report, options.get("on_stage"))

    monkeypatch.setattr(Product, "protect", protect)


@pytest.mark.parametrize("status", sorted(clean_products.ALARMS, key=lambda status: status.name))
def test_a_false_alarm_is_counted(monkeypatch, capsys, status):
    protect_with(monkeypatch, lambda result, report, watch: (result, replace(report, status=status)))
    rows, alarms = clean_products.sweep([GENERIC], seed=7, regimes=SMALL)
    assert len(alarms) == 1
    assert rows[0]["alarms"] == 1
    assert f"FALSE ALARM {GENERIC}: normal" in capsys.readouterr().out


def test_unverifiable_is_an_alarm_only_in_the_normal_range(monkeypatch):
    protect_with(monkeypatch, lambda result, report, watch: (result, replace(report, status=Status.UNVERIFIABLE)))
    assert len(clean_products.sweep([GENERIC], seed=7, regimes=SMALL)[1]) == 1
    overflow = families.names().index("overflow")
    assert not clean_products.sweep([overflow], seed=7, regimes=SMALL)[1]


def outcomes_by_kind() -> dict[str, dict[str, bool]]:
    case = clean_products.Case(40, 50, 30, np.dtype(np.float32))
    a, b = families.operands("normal", case.m, case.k, case.n, np.random.default_rng(9), case.dtype)
    product = Product(9, 0, "normal", case, a, b, None, 1.0, 0.0, "rows")
    return {plan.kind: outcome for plan, outcome, _ in plant(product)}


def test_a_fault_that_is_missed_is_counted(monkeypatch):
    def blind(result: np.ndarray, report: Any, watch: Watch) -> Any:
        return watch.product, replace(report, status=Status.CLEAN, also=())

    protect_with(monkeypatch, blind)
    outcomes = outcomes_by_kind()
    for kind in ("NaN", "Inf", "x 1e30", "u: NaN", "t: NaN"):
        assert outcomes[kind]["missed_above"], kind
    for kind in ("NaN", "Inf", "x 1e30"):
        assert outcomes[kind]["wrong_above"], kind


def test_a_repair_that_leaves_the_fault_is_counted(monkeypatch):
    protect_with(monkeypatch, lambda result, report, watch: (watch.product, report))
    outcomes = outcomes_by_kind()
    assert outcomes["NaN"]["found"]
    assert outcomes["NaN"]["wrong_above"]
    assert not outcomes["NaN"]["repaired"]


def test_a_repair_that_spoils_another_element_is_counted(monkeypatch):
    def spoil(result: np.ndarray, report: Any, watch: Watch) -> Any:
        if report.status is Status.CORRECTED:
            result[...] = result + result.dtype.type(abs(result).max())
        return result, report

    protect_with(monkeypatch, spoil)
    assert outcomes_by_kind()["NaN"]["wrong_above"]


def test_a_checksum_fault_that_touches_c_is_counted(monkeypatch):
    def touch(result: np.ndarray, report: Any, watch: Watch) -> Any:
        if report.status is Status.CHECKSUM_FAULT:
            result[0, 0] = np.nextafter(result[0, 0], result.dtype.type(1))
        return result, report

    protect_with(monkeypatch, touch)
    assert outcomes_by_kind()["u: NaN"]["damaged"]


def test_flip_bit_flips_one_bit_of_one_element():
    for dtype in DTYPES:
        x = np.ones((4, 6), dtype)[:, ::2]
        planted_faults.flip_bit(x, (2, 1), 8 * dtype.itemsize - 1)
        assert np.argwhere(x != 1).tolist() == [[2, 1]]
        assert x[2, 1] == -1
