"""The operands of the GPU benchmarks, and the judge of what comes out: every element of every timed product.

The reference is that of `abft_tsm2.faults.judge.oracle`. Everything but the random numbers is written against the array
module `xp`, NumPy or CuPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.arrays import dtype_name
from abft_tsm2.faults.judge.oracle import (
    BLOCK_BYTES,
    Array,
    Reference,
    ReferenceArithmetic,
    reference,
    require,
    widened,
)


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
    """What is wrong with the product C, (..., m, n), of sums of k terms, which are of its own type where no arithmetic
    is given."""
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


# ---- on the card --------------------------------------------------------------------------------------------------

CHUNK = 1 << 27  # random numbers at a time: the generator makes a temporary of them
DISTRIBUTIONS = ("uniform", "normal")


class Operands:
    """A (m x k) and B (k x n) on the current device, in both orders, and as many copies of A as a cold cache needs.

    Parameters
    ----------
    m, k, n : int
    dtype : str
    copies : int
    row_major : bool
        Whether A is also kept in rows.
    """

    def __init__(self, m: int, k: int, n: int, dtype: str, *, copies: int = 1, row_major: bool = True) -> None:
        import cupy

        self.m, self.k, self.n, self.dtype, self.copies = m, k, n, dtype, copies
        self.columns = [cupy.empty((k, m), dtype=dtype).T for _ in range(copies)]
        self.rows = [cupy.empty((m, k), dtype=dtype) for _ in range(copies if row_major else 0)]
        self._b = cupy.empty((n, k), dtype=dtype).T
        self._b_rows: dict[int, Array] = {}

    @staticmethod
    def bytes(m: int, k: int, n: int, dtype: str, copies: int) -> int:
        """What operands and reference take at their peak."""
        size = np.dtype(dtype).itemsize
        temporaries = 4 * min(8 * m * k, BLOCK_BYTES + 8 * m) + 8 * min(m * k, CHUNK)
        return (2 * copies * m * k + 3 * k * n) * size + 6 * 8 * m * n + temporaries

    def B(self, n: int, order: str) -> Array:
        """The first n columns of B, in columns ("F") or in rows ("C"); `fill` renews both."""
        import cupy

        first = self._b[:, :n]
        if order == "F":
            return first
        if n not in self._b_rows:
            self._b_rows[n] = cupy.empty((self.k, n), dtype=self.dtype)
            self._b_rows[n][...] = first
        return self._b_rows[n]

    def fill(self, distribution: str, seed: int) -> Reference:
        """New random numbers, uniform in [0, 1) or normal, and the reference for them."""
        import cupy

        if distribution not in DISTRIBUTIONS:
            raise ValueError(f"there is no distribution {distribution!r}: choose from {', '.join(DISTRIBUTIONS)}")
        random = cupy.random.default_rng(seed)
        draw = random.random if distribution == "uniform" else random.standard_normal
        for target in (self.columns[0], self._b):
            flat = target.T.reshape(-1)
            for at in range(0, flat.size, CHUNK):
                part = flat[at : at + CHUNK]
                part[...] = draw(part.size, dtype=part.dtype)
        for other in (*self.columns[1:], *self.rows):
            other[...] = self.columns[0]
        for n, rows in self._b_rows.items():
            rows[...] = self._b[:, :n]
        found = reference(self.columns[0], self._b, cupy)
        require(found, self.columns[0], self._b, cupy)
        return found
