"""The operands of the GPU benchmarks, and the judge of what comes out: every element of every timed product.

The reference is a product in more precision than the one that is judged. For float32 that is float64. For float64,
A = A1 + A2 and B = B1 + B2, where A1 and B1 keep so few bits that A1 B1 has no rounding error at all in float64; the
rest is smaller by these bits, and so is its rounding error (the idea of K. Ozaki et al., Numerical Algorithms 59,
2012). A few rows of the reference are compared with NumPy's longdouble in turn.

Everything but the random numbers is written against the array module `xp`, NumPy or CuPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
BLOCK_BYTES = 1 << 30  # of a temporary
ROWS = 3  # of the reference that are compared with longdouble
SLACK = 1e-3  # the reference's own error, in bounds of the product that it judges


@dataclass(frozen=True)
class Reference:
    """A B as the unevaluated sum high + low, and |A| |B|; all m x n, float64."""

    high: Array
    low: Array
    magnitude: Array

    def columns(self, n: int) -> Reference:
        """The first n columns."""
        return Reference(self.high[:, :n], self.low[:, :n], self.magnitude[:, :n])


@dataclass(frozen=True)
class Errors:
    """Of a computed product: how far it is from the reference, in units of what is allowed.

    Attributes
    ----------
    norm : float
        Relative error in the Frobenius norm over 4 sqrt(k) u.
    worst : float
        Largest |C - A B| of an element over k u |A||B| + k tiny; u is the unit roundoff, tiny the smallest normal
        number (CuPy flushes what is smaller in float32).
    outside : int
        Elements beyond that bound; NaN is.
    """

    norm: float
    worst: float
    outside: int

    @property
    def ok(self) -> bool:
        return self.outside == 0 and self.norm <= 1


def reference(A: Array, B: Array, xp: Any = np) -> Reference:
    """A B and |A| |B|, from blocks of columns of A.

    Parameters
    ----------
    A : (m, k) array, float32 or float64, column-major
    B : (k, n) array of the same type
    xp : module
    """
    (m, k), n = A.shape, B.shape[1]
    high, low, magnitude = (xp.zeros((m, n)) for _ in range(3))
    split = A.dtype.itemsize == 8
    bits = (53 - math.ceil(math.log2(max(k, 1)))) // 2
    units = [_unit(x, bits) for x in (A, B)] if split else []
    width = max(1, BLOCK_BYTES // (8 * max(1, m)))
    for at in range(0, k, width):
        a, b = A[:, at : at + width].astype(xp.float64, copy=False), B[at : at + width].astype(xp.float64)
        if split:
            a1, b1 = (xp.rint(x / unit) * unit for x, unit in zip((a, b), units, strict=True))
            high += a1 @ b1  # exact: integers below 2^53, in units of both
            low += a1 @ (b - b1)
            low += (a - a1) @ b
            del a1
        else:
            high += a @ b
        magnitude += abs(a) @ abs(b)
    return Reference(high, low, magnitude)


def require(found: Reference, A: Array, B: Array, xp: Any = np) -> None:
    """Compare a few rows of the reference with longdouble, on the host.

    Raises
    ------
    ArithmeticError
        If they differ by more than `SLACK` of what is allowed to the product that is to be judged.
    """
    m, k = A.shape
    rows = sorted({0, m // 3, m - 1})[:ROWS]
    host = getattr(xp, "asnumpy", np.asarray)
    a, b = (host(x).astype(np.longdouble) for x in (A[xp.asarray(rows)], B))
    high, low, magnitude = (host(x[xp.asarray(rows)]) for x in (found.high, found.low, found.magnitude))
    error = abs(a @ b - high - low.astype(np.longdouble))
    allowed = SLACK * _bound(magnitude, k, A.dtype)
    ok = (error <= allowed) & np.isfinite(allowed)
    if not ok.all():
        raise ArithmeticError(
            f"the reference of {m} x {k} x {B.shape[1]} is off in rows {rows} by {float(error.max()):.3g}, "
            f"and may be by {float(allowed.min()):.3g}: nothing can be judged by it"
        )


def errors(C: Array, expected: Reference, k: int, xp: Any = np) -> Errors:
    """What is wrong with the product C, m x n of float32 or float64, with sums of k terms."""
    if C.shape != expected.high.shape:
        raise ValueError(f"the product is {C.shape}, its reference {expected.high.shape}")
    distance = abs((C.astype(xp.float64, copy=False) - expected.high) - expected.low)
    bound = _bound(expected.magnitude, k, C.dtype)
    ok = (distance <= bound) & xp.isfinite(bound)
    allowed = 4 * math.sqrt(k) * _roundoff(C.dtype) * float(xp.linalg.norm(expected.high))
    norm = float(xp.linalg.norm(distance))
    return Errors(norm / allowed if allowed else math.inf * norm, float((distance / bound).max()), int((~ok).sum()))


def _bound(magnitude: Array, k: int, dtype: Any) -> Array:
    return k * _roundoff(dtype) * magnitude + k * float(np.finfo(dtype).tiny)


def _roundoff(dtype: Any) -> float:
    return float(np.finfo(dtype).eps) / 2


def _unit(x: Array, bits: int) -> float:
    """The power of two in which the largest element of x has that many bits."""
    largest = max(abs(float(x.max())), abs(float(x.min())))
    return math.ldexp(1.0, math.frexp(largest)[1] - bits)


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
