"""The oracle: a product in more precision than the one that is judged, and what rounding may do to the latter.

It shares no code with the checks. For sums in float32 the reference is a product in float64. For float64,
A = A1 + A2 and B = B1 + B2, where A1 and B1 keep so few bits that A1 B1 has no rounding error at all in float64; the
rest is smaller by these bits, and so is its rounding error (K. Ozaki et al., Numerical Algorithms 59, 2012).
A few rows of the reference are compared with NumPy's longdouble in turn.

Everything is written against the array module `xp`, NumPy or CuPy, and stays on the device of its arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS, bit_pattern, dtype_name, namespace

Array = Any
BLOCK_BYTES = 1 << 30  # of a temporary
ROWS = 3  # of the reference that are compared with longdouble
CUT = 2.0**-9 + 2.0**-20  # what TF32 takes from a product of two operands: each is cut to 11 bits
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
class ReferenceArithmetic:
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
class Tf32(ReferenceArithmetic):
    """Sums in float32 of operands that are cut to 11 bits first."""

    def bound(self, expected: Reference, k: int) -> Array:
        return super().bound(expected, k) + CUT * expected.magnitude

    def norm(self, k: int) -> float:
        return super().norm(k) + CUT


def arithmetic(dtype: str, tf32: bool = False, truncating: bool = True) -> ReferenceArithmetic:
    """That of a product of one type throughout; `truncating`: where 16-bit operands go to tensor cores."""
    if tf32:
        return Tf32("float32", "float32", truncating=True)
    half = FLOATS[dtype].bits == 16
    return ReferenceArithmetic("float32" if half else dtype, dtype, truncating=half and truncating)


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
    # Of each row of A and each column of B its own: rows of different size keep their relative accuracy.
    units = [_units(A, -1, bits, xp, 1 + squared), _units(B, -2, bits, xp)] if split else []
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


def evened(A: Array, B: Array, xp: Any = np) -> tuple[Array, Array]:
    """Operands (m, k) and (k, n) of the same product in float64, each column of A as large as its row of B.

    They are scaled by powers of two, term by term, so that nothing that counts is rounded, neither squares nor sums
    leave the range, and no element is small beside the largest of its line but what adds little. Terms of which a
    factor is zero, and the other finite, become zeros. Those of narrower types are far from the ends of the range.
    """
    a, b = widened(A, xp), widened(B, xp)
    if dtype_name(A.dtype) != "float64" or not a.size or not b.size:
        return a, b
    largest = xp.maximum(a.max(axis=0), -a.min(axis=0)), xp.maximum(b.max(axis=1), -b.min(axis=1))
    if not all(bool(xp.isfinite(x).all()) for x in largest):
        return a, b
    there = (largest[0] > 0) & (largest[1] > 0)
    apart = (xp.frexp(largest[0])[1] - xp.frexp(largest[1])[1]) // 2 * there
    a, b = xp.ldexp(a, -apart), xp.ldexp(b, apart[:, None])
    return xp.where(there, a, 0.0), xp.where(there[:, None], b, 0.0)


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
    allowed = SLACK * ReferenceArithmetic(sums, sums).bound(expected, k)
    ok = (error <= allowed) & np.isfinite(allowed)
    if not ok.all():
        raise ArithmeticError(
            f"the reference of {m} x {k} x {B.shape[-1]} is off in rows {rows} by {float(error.max()):.3g}, "
            f"and may be by {float(allowed.min()):.3g}: nothing can be judged by it"
        )


def widened(x: Array, xp: Any = np) -> Array:
    """x in float64, exactly; itself where it is that. bfloat16, which CuPy computes little with, by its bits."""
    if dtype_name(x.dtype) == "bfloat16":
        x = (x.view(xp.uint16).astype(xp.uint32) << 16).view(xp.float32)
    return x.astype(xp.float64, copy=False)


def rounded_to_bfloat16(numbers: Array) -> Array:
    """Bit patterns of finite float32 numbers, rounded to the nearest bfloat16, ties to even."""
    bits = numbers.view("uint32")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16")


def narrowed(values: Array, dtype: Any) -> Array:
    """Bit patterns of float64 values rounded to a type, ties to even; what is too large becomes an infinity."""
    if dtype_name(dtype) != "bfloat16":
        return bit_pattern(values.astype(dtype))
    single = values.astype(np.float32)
    rounded = rounded_to_bfloat16(single)
    # A carry out of NaN's digits would make it something else.
    return namespace(values).where(single != single, rounded.dtype.type(0x7FC0), rounded)


def _rest_of_square(a: Array, square: Array) -> Array:
    """What rounding took from a o a: T. J. Dekker, Numerische Mathematik 18, 1971."""
    big = 134217729.0 * a  # 2^27 + 1
    upper = big - (big - a)
    lower = a - upper
    return ((upper * upper - square) + 2.0 * upper * lower) + lower * lower


def _units(x: Array, axis: int, bits: int, xp: Any, power: int = 1) -> Array:
    """For each line of x the power of two in which its largest element, to a power, has that many bits."""
    largest = xp.maximum(x.max(axis=axis, keepdims=True), -x.min(axis=axis, keepdims=True)) ** power
    return xp.ldexp(xp.ones(largest.shape), xp.frexp(largest)[1] - bits)
