"""Seeded samples of large sweeps: no false alarm, faults found bit by bit, the bounds' tightness.

The whole sweeps are the campaigns: `python -m benchmarks.shipped_campaigns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Report, Status, encode, errstate, protected_gemm
from abft_tsm2.arrays import FLOATS
from abft_tsm2.faults.judge.oracle import widened
from benchmarks import families, tightness
from tests.support.cases import DTYPES, REGIMES, arrange, draw
from tests.support.oracles import Exact

SMALL = tuple(regime for regime in REGIMES if regime.name not in ("longest k", "large"))
EXACT_SCALARS = (1.0, -0.5, 2.0, -1.0)  # numbers that every type holds exactly
ALARMS = {Status.CORRECTED, Status.CHECKSUM_FAULT, Status.INPUT_CHANGED, Status.UNCORRECTABLE}


def addend(a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Of the product's size, and half of the time the product itself, so that beta = -alpha leaves rounding only."""
    with np.errstate(all="ignore"):
        c = (a @ b).astype(np.float64)
    c = np.where(np.isfinite(c), c, 0)
    if rng.random() < 0.5:
        c = rng.uniform(-1, 1, c.shape) * abs(c).max(initial=0)
    return arrange(c.astype(a.dtype), str(rng.choice(["C", "F", "strided"])))


def in_normal_range(arrays: list[Any], dtype: str) -> bool:
    """Whether no element of A, B, c and C, and no partial sum of A B, comes near the ends of the type's range."""
    limits = FLOATS[dtype]
    sizes = [abs(widened(x, np)) for x in arrays if x is not None]
    every = (*sizes, sizes[0] @ sizes[1])
    return all(bool(((x == 0) | ((x >= limits.smallest_normal) & (x <= limits.largest / 4))).all()) for x in every)


def false_alarm(a: np.ndarray, b: np.ndarray, c: np.ndarray | None, result: np.ndarray, report: Report) -> bool:
    """Whether a report of a clean product speaks of a fault, or of what could not be verified in the normal range."""
    held = {report.status, *report.also}
    if held & ALARMS:
        return True
    with np.errstate(all="ignore"):
        return Status.UNVERIFIABLE in held and in_normal_range([a, b, c, result], a.dtype.name)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_no_false_alarm_on_clean_products(family: str) -> None:
    dtypes = set()
    for seed in range(25):
        rng = np.random.default_rng([7, *family.encode(), seed])
        case = draw(rng, regimes=SMALL)
        dtypes.add(case.dtype)
        a, b = families.operands(family, case.m, case.k, case.n, rng, case.dtype)
        a, b = arrange(a, case.order_a), arrange(b, case.order_b)
        alpha, beta = (float(x) for x in rng.choice(EXACT_SCALARS, 2)) if seed % 4 == 0 else (1.0, 0.0)
        c = addend(a, b, rng) if beta else None
        options: dict[str, Any] = {"check": str(rng.choice(["auto", "rows", "columns", "both"]))}
        options |= {"alpha": alpha, "beta": beta, "return_report": True, "on_error": "detect"}
        # Some families overflow, and NumPy says so as it does for A @ B.
        with errstate(unverifiable="ignore"), np.errstate(over="ignore", invalid="ignore"):
            result, report = protected_gemm(a, b, c, **options)
        assert not false_alarm(a, b, c, result, report), f"{seed}: {case} {options} {report}"
    assert len(dtypes) > 1


@pytest.mark.parametrize("family", families.names("generic", "structured"))
def test_no_false_alarm_at_the_largest_k(family: str) -> None:
    a, b = families.operands(family, 3, 100_000, 4, np.random.default_rng(8), np.float32)
    with errstate(unverifiable="ignore"), np.errstate(over="ignore", invalid="ignore"):
        result, report = protected_gemm(a, b, check="both", return_report=True, on_error="detect")
    assert not false_alarm(a, b, None, result, report)


def flip_in_every_row(bit: int, rng: np.random.Generator) -> Any:
    """A hook that flips one bit (0 is the lowest) of one element of each row of C."""

    def hook(stage: str, arrays: Mapping[str, np.ndarray]) -> None:
        if stage == "multiplied":
            words = arrays["C"].view(f"u{arrays['C'].itemsize}")
            rows, columns = np.arange(len(words)), rng.integers(words.shape[1], size=len(words))
            words[rows, columns] ^= words.dtype.type(1 << bit)

    return hook


@pytest.mark.parametrize(("dtype", "bit", "bar"), [("float32", 16, 0.90), ("float64", 15, 0.85)])
def test_flips_found_bit_by_bit_in_a_small_product(dtype: str, bit: int, bar: float) -> None:
    """A row's check depends on no other row: a flip in each, and one call tells of them all."""
    rng = np.random.default_rng([0, 512])
    a, b = (rng.standard_normal((512, 512)).astype(dtype) for _ in range(2))
    options: dict[str, Any] = {"check": "rows", "on_error": "detect", "return_report": True}
    encoded = encode(b, side="rows")

    def share(bit: int) -> float:
        _, report = protected_gemm(a, encoded, on_stage=flip_in_every_row(bit, rng), **options)
        wrong = {row for fault in report.faults if fault.operand == "C" for row in fault.rows or range(512)}
        return len(wrong) / 512

    assert share(bit) >= bar
    assert share(2) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_what_is_returned_after_a_flip_is_right(dtype: np.dtype[Any]) -> None:
    """Every row has a flipped exponent bit; what comes back is the product, element by element."""
    rng = np.random.default_rng(3)
    a, b = families.operands("normal", 48, 60, 40, rng, dtype)
    clean = protected_gemm(a, b)
    result, report = protected_gemm(
        a, b, check="rows", on_stage=flip_in_every_row(8 * dtype.itemsize - 2, rng), return_report=True
    )
    assert report.status is Status.CORRECTED
    exact = Exact.of(a, b)
    assert not exact.outside(result).any()
    assert not exact.outside(clean).any()


@pytest.mark.parametrize("dtype", tightness.BARS)
def test_bounds_are_tight(dtype: str) -> None:
    rows = [tightness.measure(family, 256, dtype) for family in families.names("generic")]
    assert all(row["status"] == "CLEAN" for row in rows)
    assert tightness.median(rows, dtype) <= tightness.BARS[dtype]
