"""The checksums of one side of a small product on NumPy: in few array calls, and in memory that is kept for the next.

Of small matrices the calls take longer than the arithmetic. The sums here are those of `encoded_right`, `predict` and
`recompute_checksum`, bit for bit: `ndarray.dot` makes the same call of BLAS as `numpy.matmul` in a third of the time;
where they add float32 in parts, they do it here. What is encoded of an operand lies in one piece of memory, and one
comparison tells whether it was hit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, dtype_name
from abft_tsm2.checksum.bounds import Arithmetic, BoundFactors, bound_factors, least_bound, lost_in_checksum
from abft_tsm2.checksum.encode import (
    SQUARED,
    Ends,
    OperandChecksum,
    equilibrated,
    exponents_from,
    lift_of,
    missed_by_sample,
    part_of,
    reliable,
    sampled_beyond,
    sampled_squares,
    smallest_weight,
)
from abft_tsm2.checksum.limits import measured
from abft_tsm2.checksum.line_norms import UnexplainedLines, estimate_of
from abft_tsm2.checksum.predicted import PredictedSums
from abft_tsm2.checksum.sides import Floats, Side
from abft_tsm2.checksum.verify import SideVerdict, clean_check, explained_verdict
from abft_tsm2.checksum.weights import balanced
from abft_tsm2.core import faultpoint
from abft_tsm2.core.row_sums import SERIAL_ELEMENTS, copied, squares_at, squares_of, weighted_sums
from abft_tsm2.report import Check

_DOUBLE, _SINGLE = np.dtype(np.float64), np.dtype(np.float32)


def serves(L: Array, R: Array, a: Arithmetic) -> bool:
    """Whether `SmallSums` has the sums of a product of these."""
    (m, k), n = L.shape, R.shape[1]
    if type(L) is not np.ndarray or type(R) is not np.ndarray or L.dtype != R.dtype or not L.dtype.isnative:
        return False
    largest, width = max(m * k, k * n, m * n), L.dtype.itemsize
    if min(m, k, n) < 2 or m + k + n > LONGEST or largest > LARGEST or (width == 2 and k >= a.parts_from):
        return False
    # What is copied or squared stays in the cache of a core.
    if (part_of(k) * max(m, n) if width == 8 or k >= a.parts_from else largest) >= SERIAL_ELEMENTS:
        return False
    # `dot` copies what is not in one piece, or not aligned, and may add it in another order than matmul does.
    return all((X.flags.c_contiguous or X.flags.f_contiguous) and X.flags.aligned for X in (L, R))


LARGEST = 1 << 20  # elements of a matrix: beyond that, what the calls take is lost in a product
LONGEST = 1 << 13  # sides together: half a megabyte is kept for a product of these


class _EncodedPlaces(NamedTuple):
    """All that is encoded of a side: arrays of one dimension."""

    V: Array
    V2: Array
    s: Array
    squares: Array
    t: Array
    products: Array

    @classmethod
    def of(cls, right: Any, left: Any, sizes: tuple[int, int, int, int], kind: Any) -> _EncodedPlaces:
        """In two pieces of memory, of what R and L have given; the last of each is of another type than float64."""
        m, k, n, h = sizes
        V, V2, s = (np.frombuffer(right, _DOUBLE, *part) for part in ((n, 0), (n, 8 * n), (k, 16 * n)))
        squares = np.frombuffer(right, kind, h, 8 * (2 * n + k))
        return cls(V, V2, s, squares, np.frombuffer(left, _DOUBLE, m), np.frombuffer(left, kind, m, 8 * m))


class SmallSums:
    """What is encoded and found of one side, ``C = L R``, of products of one form.

    Parameters
    ----------
    side : str
    m, k, n : int
        Of the lines: L is m x k, R is k x n.
    dtype : dtype
        Of L and R.
    a : Arithmetic

    All methods work in the caller's error state, which has to ignore everything.
    """

    def __init__(self, side: str, sizes: tuple[int, int, int], dtype: Any, a: Arithmetic) -> None:
        m, k, n = sizes
        self._side, self._m, self._k, self._n, self._a = side, m, k, n, a
        self._part, self._beyond, self._lowest = part_of(k), sampled_beyond(k), reliable(dtype_name(dtype), k)
        self._squared = self._beyond is None and k * n <= SQUARED
        self._partial = k >= a.parts_from
        self._half, self._wide = dtype.itemsize == 2, dtype.itemsize == 8
        self._kind = _DOUBLE if self._wide else _SINGLE
        self._sizes, width = (m, k, n, self._part), self._kind.itemsize
        self._right = np.empty(8 * (2 * n + k) + width * self._part, np.uint8)
        self._left = np.empty(8 * m + width * m, np.uint8)
        self._now = _EncodedPlaces.of(self._right, self._left, self._sizes, self._kind)
        self._right_bits = self._left_bits = b""  # as they were made
        self._u, self._residual, self._norms, self._weights = np.empty(m), np.empty(m), np.empty(m), np.empty(n)
        self._ok, self._finite = np.empty(m, np.bool_), np.empty(m, np.bool_)
        self._failed: SideVerdict | None = None
        self._faint = False  # whether checksums may lose digits to underflow
        self._fixed = np.empty(8 * (n + len(BoundFactors._fields)) + width * k, np.uint8)
        self._base = np.frombuffer(self._fixed.data, _DOUBLE, n)[:, None]
        self._factors = np.frombuffer(self._fixed.data, _DOUBLE, len(BoundFactors._fields), 8 * n)
        self._ones = np.frombuffer(self._fixed.data, self._kind, k, self._fixed.size - width * k)
        self._fix()
        encoded = self._right, self._left, self._fixed  # and their copies
        found = self._u, self._residual, self._norms, self._weights, self._ok, self._finite
        self.nbytes = sum(x.nbytes for x in (*encoded, *encoded, *found))

    def _fix(self) -> None:
        """What is the same for all products: written when there is none, or when it was hit."""
        self._base[:], self._factors[:] = balanced(self._n), bound_factors(self._a, self._k, self._n)
        self._ones[:] = 1
        self._fixed_bits = self._fixed.tobytes()

    def encode(self, L: Array, R: Array, carried: OperandChecksum | None = None) -> None:
        """Weights, sums and norms of R, or those that it has `carried` since it was encoded; what they predict of C."""
        V, V2, s, part, t, products = self._now
        self._failed = None  # `clean` may not come to this side
        if self._fixed.tobytes() != self._fixed_bits:
            self._fix()
        if self._half:  # exact, and elements of 16 bits are slow
            L, R = L.astype(_SINGLE), R.astype(_SINGLE)
        if carried is None:
            self._encode_right(R)
        else:
            V[:], s[:], part[:] = carried.weights[:, 0], carried.sums[:, 0], carried.squares[:, 0]
            np.multiply(V, V, V2)
            self._faint = least_bound(self._k + self._n, float(np.abs(V).min())) > 0
        self._right_bits = self._right.tobytes()  # before anything follows from them
        h = self._part
        squares_of(L[:, :h] if h < self._k else L).dot(part, products)
        self._add(L, s, t)
        self._left_bits = self._left.tobytes()

    def _encode_right(self, R: Array) -> None:
        """What R carries, with weights from the sample of its rows; squares are taken once, where that is quicker."""
        h, beyond = self._part, self._beyond
        if self._squared:
            squares = squares_of(R)
            columns = self._ones.dot(squares)
        elif beyond is not None and R.flags.c_contiguous:
            columns = self._ones[: beyond.size].dot(squares_at(R, beyond))
            squares = squares_of(R[:h])
            columns += self._ones[:h].dot(squares)
        else:
            columns = sampled_squares(R)
            squares = squares_of(R[:h])
        norms = np.log2(columns, dtype=_DOUBLE)
        norms *= 0.5
        exponent, ends, sampled = exponents_from(norms, R, self._lowest)
        self._carry(R, squares[:h], exponent, ends)
        if sampled and beyond is not None:
            better = missed_by_sample(R, self._now.s[:, None], exponent)
            if better is not None:
                self._carry(R, squares_of(R[:h]), better)

    def _carry(self, R: Array, squares: Array, exponent: Array, ends: Ends = None) -> None:
        """What R carries with weights of these exponents; `squares` of its first rows."""
        V, V2, s, part, _, _ = self._now
        V[:] = equilibrated(self._base, exponent, ends)[:, 0]
        low, high = ends or (int(exponent.min()), int(exponent.max()))
        self._faint = least_bound(self._k + self._n, smallest_weight(low, high)) > 0
        self._add(R, V, s)
        lift = lift_of(R, s[:, None], exponent, (low, high), self._partial)
        if lift is not None:
            V[:] = equilibrated(self._base, exponent, ends, lift)[:, 0]
            self._add(R, V, s)
        np.multiply(V, V, V2)
        _times(squares, V2 if self._wide else V2.astype(_SINGLE), part)

    def _add(self, X: Array, v: Array, sums: Array) -> None:
        """``sums = X v``, as `weighted_sums` takes them."""
        if X.dtype == _DOUBLE:
            X.dot(v, sums)
        elif self._partial:
            sums[:] = weighted_sums(X, v[:, None], True)[:, 0]
        else:
            copied(X, _DOUBLE).dot(v, sums)

    def _intact(self) -> bool:
        """Whether what was encoded has the bits that it was made with."""
        return self._left.tobytes() == self._left_bits and self._right.tobytes() == self._right_bits

    def _hold(self, L: Array, R: Array) -> bool:
        """Whether the operands give the checksums that they gave when they were encoded, bit for bit."""
        now, (s, t) = self._now, (np.empty(x.shape) for x in (self._now.s, self._now.t))
        self._add(R, now.V, s)
        self._add(L, now.s, t)
        return bool(s.tobytes() == now.s.tobytes() and t.tobytes() == now.t.tobytes())

    def clean(self, C: Array, L: Array, R: Array, *, told: bool) -> tuple[Check, ...] | None:
        """The check of a product that is clean, as `judge` finds it, or nothing, where it is not `told`; None where a
        line may be wrong or what was encoded was hit."""
        V, V2, _, _, t, products2 = self._now
        u = self._u
        X = copied(C, _DOUBLE) if self._a.u_out else C
        self._add(X, V, u)
        if (planter := faultpoint.current()) is not None:
            faultpoint.reach(planter, "verified", C=C.T if self._side == "columns" else C, u=u[:, None])
        residual = np.subtract(u, t, self._residual)
        np.absolute(residual, residual)
        if self._wide:
            products = np.sqrt(products2, self._norms)
        else:
            self._norms[:] = products2
            products = np.sqrt(self._norms, self._norms)
        weights = np.absolute(V, self._weights)
        if self._faint:  # `judge` compares bounds with what the checksums may lose
            return None
        numbers = self._factors.tolist()
        underflow = max(numbers[-1] * float(np.add.reduce(weights)), lost_in_checksum())
        tau = numbers[0] * products  # nothing rounds operands on NumPy: no input_factor
        tau += underflow
        fine = np.less_equal(residual, tau, self._ok)
        fine &= np.isfinite(tau, self._finite)
        if np.count_nonzero(fine) < self._m:
            bounds, sizes = tau.copy(), (residual, products, None)
            factors = BoundFactors._make(numbers)
            unexplained = UnexplainedLines((C, L, R), V2[:, None], factors, bounds, fine, sizes, t, underflow)
            unexplained.explain(whole=told)
            left = unexplained.at
            if unexplained.grown.size and not self._hold(L, R):
                left = np.concatenate([left, unexplained.grown])
            if not left.size:
                if not self._intact():
                    return None
                if not told:
                    return ()
            found = explained_verdict(self._side, residual, bounds, fine, left)
            self._failed = found if left.size else None
            return None if left.size else (found.check,)
        if not told:
            return () if self._intact() else None
        known = residual / tau, (residual, products, None), underflow, BoundFactors._make(numbers), estimate_of(self._k)
        check = clean_check(self._side, C, V2[:, None], *known)
        return (check,) if check is not None and self._intact() else None

    def measured(self, check: Check, C: Array, L: Array, R: Array) -> Check:
        """The check that `clean` has found, with the limits of all lines."""
        return measured(check, self.lines(L, R, C), self._now.V[:, None], self._residual[:, None])

    def failed(self) -> tuple[Array, SideVerdict] | None:
        """The checksums of C and their verdict, where `clean` has found lines beyond their bounds."""
        return None if self._failed is None else (self._u[:, None], self._failed)

    def encoded(self) -> dict[str, Array]:
        """The checksums of R, and those that are predicted for C, where they lie."""
        return {"s": self._now.s[:, None], "t": self._now.t[:, None]}

    def lines(self, L: Array, R: Array, C: Array) -> Side:
        """The side as any other; it cannot be multiplied again."""
        return Side(self._side, L, R, C, None, 1.0, 0.0, self._a, _alone, self._k, self._partial)

    def predicted(self, carried: OperandChecksum | None = None) -> PredictedSums:
        """What was encoded, in its place, and the copies of it; of R what it has `carried`, if it has."""
        copies = _EncodedPlaces.of(self._right_bits, self._left_bits, self._sizes, self._kind)
        now, then = ([x[:, None] for x in places] for places in (self._now, copies))
        V, _, s, squares, t, products = now
        right = carried or OperandChecksum(V, s, squares, (then[0], then[2], then[3]), self._partial)
        return PredictedSums(right, t, products, None, None, (then[4], then[5], None, None))


def _times(squares: Array, v: Array, out: Array) -> None:
    """``squares v``; a part of more rows goes to BLAS where it lies, as `dot` does not."""
    if squares.flags.forc:
        squares.dot(v, out)
    else:
        np.matmul(squares, v, out)


def _alone() -> Floats:
    raise AssertionError("a side of small sums is not multiplied again")
