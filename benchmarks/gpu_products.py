"""The operands of the GPU benchmarks, and the judge of what comes out: every element of every timed product.

The reference is a product in more precision than the one that is judged. For sums in float32 that is float64. For
float64, A = A1 + A2 and B = B1 + B2, where A1 and B1 keep so few bits that A1 B1 has no rounding error at all in
float64; the rest is smaller by these bits, and so is its rounding error (the idea of K. Ozaki et al., Numerical
Algorithms 59, 2012). A few rows of the reference are compared with NumPy's longdouble in turn.

Everything but the random numbers is written against the array module `xp`, NumPy or CuPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS, dtype_name

Array = Any
BLOCK_BYTES = 1 << 30  # of a temporary
ROWS = 3  # of the reference that are compared with longdouble
SLACK = 1e-3  # the reference's own error, in bounds of the product that it judges


@dataclass(frozen=True)
class Reference:
    """A B as the unevaluated sum high + low, and |A| |B|; all (..., m, n), float64."""

    high: Array
    low: Array
    magnitude: Array

    def columns(self, n: int) -> Reference:
        """The first n columns."""
        return Reference(self.high[..., :n], self.low[..., :n], self.magnitude[..., :n])


@dataclass(frozen=True)
class Arithmetic:
    """How a product is added and stored, which says what error is allowed to it.

    Attributes
    ----------
    sums, out : str
        Types of the sums and of the result; the latter is rounded once where it is the narrower one.
    truncating : bool
        Whether sums may be cut off instead of rounded, as those of 16-bit operands in tensor cores are: each error
        is then up to twice as large, and all have the same sign. One is made for 16 terms.
    """

    sums: str
    out: str
    truncating: bool = False

    def bound(self, expected: Reference, k: int) -> Array:
        """Of an element with k terms: k u |A||B| + k tiny, twice that with truncation, and the last rounding; u is the
        unit roundoff, tiny the smallest normal number (CuPy flushes what is smaller in float32)."""
        of_sums = FLOATS[self.sums]
        bound = k * ((1 + self.truncating) * of_sums.unit_roundoff * expected.magnitude + of_sums.smallest_normal)
        if self.rounds:
            bound += FLOATS[self.out].unit_roundoff * abs(expected.high) + FLOATS[self.out].smallest_normal
        return bound

    def norm(self, k: int) -> float:
        """Of the relative error in the Frobenius norm: 4 sqrt(k) u, and k u / 8 more with truncation."""
        allowed = (4 * math.sqrt(k) + self.truncating * k / 8) * FLOATS[self.sums].unit_roundoff
        return allowed + self.rounds * FLOATS[self.out].unit_roundoff

    @property
    def rounds(self) -> bool:
        """Whether the result is narrower than the sums."""
        return FLOATS[self.out].bits < FLOATS[self.sums].bits


@dataclass(frozen=True)
class Errors:
    """Of a computed product: how far it is from the reference, in units of what is allowed (`Arithmetic`).

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


def reference(A: Array, B: Array, xp: Any = np, *, sums: str = "", squared: bool = False) -> Reference:
    """A B and |A| |B|, from blocks of columns of A.

    Parameters
    ----------
    A : (..., m, k) array, of any floating-point type and order
    B : (..., k, n) array
    xp : module
    sums : str
        The type of the sums that are to be judged; that of A where none is given.
    squared : bool
        Whether (A o A) B is wanted.
    """
    (m, k), n = A.shape[-2:], B.shape[-1]
    shape = (*A.shape[:-2], m, n)
    high, low, magnitude = (xp.zeros(shape) for _ in range(3))
    split = (sums or dtype_name(A.dtype)) == "float64"
    bits = (53 - math.ceil(math.log2(max(k, 1)))) // 2
    units = [_unit(_largest(A) ** (1 + squared), bits), _unit(_largest(B), bits)] if split else []
    width = max(1, BLOCK_BYTES // (8 * max(1, math.prod(shape[:-1]))))
    for at in range(0, k, width):
        a, b = widened(A[..., :, at : at + width], xp), widened(B[..., at : at + width, :], xp)
        if squared:
            root, a = a, a * a
            if split:
                low += _rest_of_square(root, a) @ b
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


def require(found: Reference, A: Array, B: Array, xp: Any = np, *, sums: str = "", squared: bool = False) -> None:
    """Compare a few rows of the reference with longdouble, on the host; parameters as of `reference`.

    Raises
    ------
    ArithmeticError
        If they differ by more than `SLACK` of what is allowed to the product that is to be judged.
    """
    m, k = A.shape[-2:]
    rows = sorted({0, m // 3, m - 1})[:ROWS]
    host = getattr(xp, "asnumpy", np.asarray)

    def some(x: Array) -> Any:  # by slices: CuPy gathers no bfloat16
        return np.concatenate([host(widened(x[..., row : row + 1, :], xp)) for row in rows], axis=-2)

    a, b = some(A).astype(np.longdouble), host(widened(B, xp)).astype(np.longdouble)
    expected = Reference(*(some(x) for x in (found.high, found.low, found.magnitude)))
    error = abs((a * a if squared else a) @ b - expected.high - expected.low.astype(np.longdouble))
    sums = sums or dtype_name(A.dtype)
    allowed = SLACK * Arithmetic(sums, sums).bound(expected, k)
    ok = (error <= allowed) & np.isfinite(allowed)
    if not ok.all():
        raise ArithmeticError(
            f"the reference of {m} x {k} x {B.shape[-1]} is off in rows {rows} by {float(error.max()):.3g}, "
            f"and may be by {float(allowed.min()):.3g}: nothing can be judged by it"
        )


def errors(C: Array, expected: Reference, k: int, xp: Any = np, *, arithmetic: Arithmetic | None = None) -> Errors:
    """What is wrong with the product C, (..., m, n), of sums of k terms, which are of its own type where no arithmetic
    is given."""
    if C.shape != expected.high.shape:
        raise ValueError(f"the product is {C.shape}, its reference {expected.high.shape}")
    name = dtype_name(C.dtype)
    arithmetic = arithmetic or Arithmetic(name, name)
    distance = abs((widened(C, xp) - expected.high) - expected.low)
    bound = arithmetic.bound(expected, k)
    ok = (distance <= bound) & xp.isfinite(bound)
    allowed = arithmetic.norm(k) * float(xp.linalg.norm(expected.high.ravel()))
    norm = float(xp.linalg.norm(distance.ravel()))
    return Errors(norm / allowed if allowed else math.inf * norm, float((distance / bound).max()), int((~ok).sum()))


def widened(x: Array, xp: Any = np) -> Array:
    """x in float64, exactly; itself where it is that. bfloat16, which CuPy computes little with, by its bits."""
    if dtype_name(x.dtype) == "bfloat16":
        x = (x.view(xp.uint16).astype(xp.uint32) << 16).view(xp.float32)
    return x.astype(xp.float64, copy=False)


def _rest_of_square(a: Array, square: Array) -> Array:
    """What rounding took from a o a: T. J. Dekker, Numerische Mathematik 18, 1971."""
    big = 134217729.0 * a  # 2^27 + 1
    upper = big - (big - a)
    lower = a - upper
    return ((upper * upper - square) + 2.0 * upper * lower) + lower * lower


def _largest(x: Array) -> float:
    return max(abs(float(x.max())), abs(float(x.min())))


def _unit(largest: float, bits: int) -> float:
    """The power of two in which a number has that many bits."""
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
