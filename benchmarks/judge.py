"""The judge of a planted fault, which does not believe the report.

It compares what was returned with the exact product (`tests.oracles`), and what the checks saw with the
same call without a fault. A fault is above the limit where it moves the residual of a line (in C by
|sum_j v_j d_ij|) by more than the line's bound and its clean residual together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from abft_tsm2 import Report, Status
from benchmarks.clean_products import Product
from tests.oracles import Exact

Change = Callable[[np.ndarray, np.random.Generator], None]
OUTCOMES = (
    "planted",
    "above",
    "found",
    "repaired",
    "refused",
    "missed_above",
    "missed_below",
    "wrong_above",
    "damaged",
)
FOUND = {Status.CORRECTED, Status.CHECKSUM_FAULT, Status.INPUT_CHANGED, Status.UNCORRECTABLE}


@dataclass(frozen=True)
class Plan:
    """One kind of fault: which operand is changed, at which stage, and how (in place)."""

    kind: str
    change: Change
    operand: str = "C"
    stage: str = "multiplied"
    bit: int = -1


class Watch:
    """An on_stage hook that plants one fault and keeps copies of what the judge needs."""

    def __init__(self, plan: Plan | None = None, rng: np.random.Generator | None = None) -> None:
        self.plan, self.rng = plan, rng
        self.product: np.ndarray | None = None
        self.checks: list[dict[str, np.ndarray]] = []
        self.encoded: list[np.ndarray] = []
        self.changed = False
        self.restore: Callable[[], None] = lambda: None

    def __call__(self, stage: str, arrays: dict[str, np.ndarray]) -> None:
        plan, self.plan = (self.plan, None) if self.plan and self.plan.stage == stage else (None, self.plan)
        if plan and self.rng is not None:
            target = arrays[plan.operand]
            before = target.copy()
            plan.change(target, self.rng)
            self.changed = not same_bits(before, target)
            self.restore = lambda: target.__setitem__(..., before)
        if stage == "encoded":
            self.encoded.append(arrays["t"].copy())
        if stage == "multiplied" and self.product is None:
            self.product = arrays["C"].copy()
        if stage == "verified":
            self.checks.append({name: arrays[name].copy() for name in ("u", "bound")})


def above_limit(clean: Watch, faulty: Watch, product: Product, report: Report, exact: Exact) -> np.ndarray:
    """Boolean m x n: the elements on lines whose residual moved by more than bound + |clean residual|."""
    assert faulty.product is not None
    outside = exact.outside(faulty.product)
    above = np.zeros(outside.shape, bool)
    for number, check in enumerate(report.checks):
        before, after = clean.checks[number], faulty.checks[number]
        with np.errstate(invalid="ignore", over="ignore"):
            moved = abs(after["u"] - before["u"])
            moved += abs(product.alpha * (faulty.encoded[number] - clean.encoded[number]))
            below = moved <= 2 * before["bound"]  # a clean residual is within its bound
        axis = 1 if check.side == "rows" else 0
        # Where even the honest line overflows rightfully, its elements are checked one by one.
        usual = np.isfinite(before["u"]) & np.isfinite(before["bound"])
        usual, below = (x.reshape(outside.shape[1 - axis], -1).all(1) for x in (usual, below))
        above |= np.expand_dims(np.where(usual, ~below, outside.any(axis)), axis)
    return above


def judge(
    product: Product,
    clean: tuple[np.ndarray, Report, Watch],
    faulty: tuple[np.ndarray | None, Report, Watch],
    plan: Plan,
    exact: Exact,
) -> dict[str, bool]:
    """What became of one planted fault; the result is None where the call raised."""
    honest, clean_report, clean_watch = clean
    result, report, watch = faulty
    assert clean_watch.product is not None
    assert watch.product is not None
    above = above_limit(clean_watch, watch, product, clean_report, exact)
    found = bool({report.status, *report.also} & FOUND)
    wrong = np.zeros(above.shape, bool) if result is None else exact.outside(result)
    # Only what was planted and below the limit may stay.
    excused = ~above & ~equal_bits(clean_watch.product, watch.product)
    unverifiable = Status.UNVERIFIABLE in (clean_report.status, *clean_report.also)
    return {
        "planted": True,
        "above": bool(above.any()),
        "found": found,
        "repaired": found and result is not None and not wrong.any(),
        "refused": result is None,
        "missed_above": bool(above.any()) and not found and not unverifiable,
        "missed_below": not above.any() and not found,
        "wrong_above": bool((wrong & ~excused).any()) and not unverifiable,
        "damaged": plan.operand in "stu" and (result is None or not same_bits(result, honest)),
    }


def equal_bits(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Boolean array: where two arrays of the same type hold the same bits."""
    word = f"u{x.itemsize}"
    equal: np.ndarray = np.ascontiguousarray(x).view(word) == np.ascontiguousarray(y).view(word)
    return equal


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return bool(equal_bits(x, y).all())
