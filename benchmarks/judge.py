"""The judge of a planted fault, which does not believe the report.

It compares what was returned with the exact product (`tests.support.oracles`), and C before any repair with C of the
same call without a fault. A fault is above the limit where |sum_j v_j d_ij|, by which it moves the residual
of line i, exceeds the line's bound and its clean residual together. The weights v are those of `encode`, the
bound is the formula of `abft_tsm2.checksum.bounds`; what goes into it is computed here, in the widest type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from abft_tsm2 import Report, Status, encode
from abft_tsm2.checksum import bounds
from benchmarks.clean_products import Product
from tests.support.oracles import WIDE, Exact

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
    """An on_stage hook that plants one fault and keeps copies of what the judge needs.

    Attributes
    ----------
    product : C as it was multiplied, with the fault if it was planted there
    before, after : the operand of the plan, around the change
    """

    def __init__(self, plan: Plan | None = None, rng: np.random.Generator | None = None) -> None:
        self.plan, self.rng = plan, rng
        self.product = self.before = self.after = np.zeros((0, 0))
        self.restore: Callable[[], None] = lambda: None

    @property
    def changed(self) -> bool:
        """Whether the plan changed any bit."""
        return not same_bits(self.before, self.after)

    def __call__(self, stage: str, arrays: Mapping[str, np.ndarray]) -> None:
        plan = self.plan
        if plan and self.rng is not None and stage == plan.stage:
            self.plan = None  # once only: repairs and the second side see no further fault
            target = arrays[plan.operand]
            self.before = target.copy()
            plan.change(target, self.rng)
            self.after = target.copy()
            self.restore = lambda: target.__setitem__(..., self.before)
        if stage == "multiplied" and self.product.size == 0:
            self.product = arrays["C"].copy()


class Lines:
    """The lines (rows or columns) that one side checks, and how far each must move to be found."""

    def __init__(self, product: Product, clean: np.ndarray, side: str) -> None:
        a, b, c = (None if x is None else x.astype(WIDE) for x in (product.a, product.b, product.c))
        if side == "rows":
            left, right, v = a, b, encode(product.b, side="rows").weights.rows
        else:
            left, right, v = b.T, a.T, encode(product.a, side="columns").weights.columns
        self.axis = 1 if side == "rows" else 0
        self.v = v[:, 0].astype(WIDE)
        self.arithmetic = bounds.arithmetic(product.case.dtype.name, product.case.dtype.name)
        self.terms = product.case.k + (0 if product.c is None else 2)
        self.alpha = product.alpha
        self.products = abs(product.alpha) * self._norm(left, self._norm(right, self.v))
        expected = product.alpha * (left @ (right @ self.v))
        self.added = None
        if c is not None:
            expected = expected + product.beta * (self._across(c) @ self.v)
            self.added = abs(product.beta) * self._norm(self._across(c), self.v)
        with np.errstate(invalid="ignore"):
            self.residual = abs(self._across(clean).astype(WIDE) @ self.v - expected)

    def limit(self, c: np.ndarray) -> np.ndarray:
        """bound + |clean residual| of each line, and what two evaluations of its checksum may differ by."""
        n, factor = self.v.size, bounds.CHECKSUM_UNIT
        with np.errstate(invalid="ignore", over="ignore"):
            stored = self._norm(self._across(c).astype(WIDE), self.v)
            bound = bounds.statistical_bound(
                np,
                self.arithmetic,
                self.terms,
                n,
                products=self.products,
                stored=stored,
                added=self.added,
                underflow=self.arithmetic.underflow(self.terms, self.alpha) * abs(self.v).sum(),
            )
            noise = factor * (math.sqrt(self.terms) + math.sqrt(2 * n)) * np.maximum(self.products, stored)
        limit: np.ndarray = bound + self.residual + noise
        return limit

    def moved(self, plan: Plan, clean: np.ndarray, faulty: Watch) -> np.ndarray:
        """By how much the fault moves the residual of each line."""
        if plan.operand in "tu" and faulty.before.shape[0] == clean.shape[1 - self.axis]:
            with np.errstate(invalid="ignore", over="ignore"):
                change = faulty.after.astype(WIDE) - faulty.before.astype(WIDE)
            return abs((self.alpha if plan.operand == "t" else 1) * change).reshape(change.shape[0], -1).max(1)
        with np.errstate(invalid="ignore", over="ignore"):
            change = faulty.product.astype(WIDE) - clean.astype(WIDE)
            change = np.where(equal_bits(faulty.product, clean), 0, change)  # Inf - Inf, where both are right
            moved: np.ndarray = abs(self._across(change) @ self.v)
        return moved

    def _across(self, x: np.ndarray) -> np.ndarray:
        return x if self.axis else x.T

    @staticmethod
    def _norm(x: np.ndarray, v: np.ndarray) -> np.ndarray:
        norm: np.ndarray = np.sqrt((x * x) @ (v * v))
        return norm


class Judge:
    """Judges the faults planted in one product, given the same call without a fault."""

    def __init__(self, product: Product, exact: Exact, honest: np.ndarray, report: Report, watch: Watch) -> None:
        self.exact, self.honest, self.clean = exact, honest, watch.product
        self.lines = [Lines(product, watch.product, check.side) for check in report.checks]
        self.unverifiable = Status.UNVERIFIABLE in (report.status, *report.also)

    def above_limit(self, plan: Plan, faulty: Watch) -> np.ndarray:
        """Boolean m x n: the elements on lines that the fault moved by more than their limit."""
        outside = self.exact.outside(faulty.product)
        above = np.zeros(outside.shape, bool)
        for lines in self.lines:
            moved, limit = lines.moved(plan, self.clean, faulty), lines.limit(faulty.product)
            with np.errstate(invalid="ignore"):
                below = (moved <= limit) & np.isfinite(limit)
            # Where even the honest line overflows rightfully, its elements are checked one by one.
            usual = np.isfinite(self.clean.astype(WIDE)).all(lines.axis)
            above |= np.expand_dims(np.where(usual, ~below, outside.any(lines.axis)), lines.axis)
        return above

    def __call__(self, plan: Plan, result: np.ndarray | None, report: Report, watch: Watch) -> dict[str, bool]:
        """What became of one planted fault; the result is None where the call raised."""
        above = self.above_limit(plan, watch)
        found = bool({report.status, *report.also} & FOUND)
        wrong = np.zeros(above.shape, bool) if result is None else self.exact.outside(result)
        # Only what was planted and below the limit may stay.
        excused = ~above & ~equal_bits(self.clean, watch.product)
        return {
            "planted": True,
            "above": bool(above.any()),
            "found": found,
            "repaired": found and result is not None and not wrong.any(),
            "refused": result is None,
            "missed_above": bool(above.any()) and not found and not self.unverifiable,
            "missed_below": not above.any() and not found,
            "wrong_above": bool((wrong & ~excused).any()) and not self.unverifiable,
            "damaged": plan.operand in "stu" and (result is None or not same_bits(result, self.honest)),
        }


def equal_bits(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Boolean array: where two arrays of the same type hold the same bits."""
    word = f"u{x.itemsize}"
    equal: np.ndarray = np.ascontiguousarray(x).view(word) == np.ascontiguousarray(y).view(word)
    return equal


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return bool(equal_bits(x, y).all())
