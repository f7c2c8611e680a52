"""The judge of results on the card: every element compared with the reference of `abft_tsm2.faults.judge.oracle`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.arrays import dtype_name
from abft_tsm2.faults.judge.oracle import Array, Reference, ReferenceArithmetic, widened


@dataclass(frozen=True)
class Errors:
    """Of a computed product: how far it is from the reference, in units of what is allowed (`ReferenceArithmetic`).

    Attributes
    ----------
    norm : float
        Relative error in the Frobenius norm.
    worst : float
        Largest |C - A B| of an element over its bound.
    outside : int
        Elements beyond that bound; NaN is.
    """

    norm: float
    worst: float
    outside: int

    @property
    def ok(self) -> bool:
        return self.outside == 0 and self.norm <= 1


def worse(one: Errors, other: Errors) -> Errors:
    """The larger of each; NaN is the largest."""

    def larger(x: float, y: float) -> float:
        return x if x != x or x >= y else y

    return Errors(larger(one.norm, other.norm), larger(one.worst, other.worst), max(one.outside, other.outside))


def errors(
    C: Array, expected: Reference, k: int, xp: Any = np, *, arithmetic: ReferenceArithmetic | None = None
) -> Errors:
    """Errors of the product C, (..., m, n), of sums of k terms, which are of its own type where no arithmetic is
    given."""
    if C.shape != expected.high.shape:
        raise ValueError(f"the product is {C.shape}, its reference {expected.high.shape}")
    name = dtype_name(C.dtype)
    arithmetic = arithmetic or ReferenceArithmetic(name, name)
    distance = abs((widened(C, xp) - expected.high) - expected.low)
    bound = arithmetic.bound(expected, k)
    ok = (distance <= bound) & xp.isfinite(bound)
    allowed = arithmetic.norm(k) * float(xp.linalg.norm(expected.high.ravel()))
    norm = float(xp.linalg.norm(distance.ravel()))
    return Errors(norm / allowed if allowed else math.inf * norm, float((distance / bound).max()), int((~ok).sum()))
