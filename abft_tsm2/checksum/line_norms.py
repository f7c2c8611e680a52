"""Bounds of lines from more and more of the 2-norms behind them.

The first verdict knows a part of ``P2_i`` alone. On data of one sign ``||C_i o v||`` is larger, by up to ``sqrt(k)``;
on data that change along k, or have zeros, the part says little of the whole. No part of a norm exceeds the whole, so a
residual within the bound that a part gives is within the true bound. What costs least is measured first, and only of
the lines that are not yet explained: a part of C, then all of C's lines and the terms of P2 that are likely to be its
largest, then all of P2.

Norms of operands are those of now, not of when they were encoded: an element that became large since would hide what
it does to C. So lines are named that no bound explains which what was encoded makes plausible.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.arrays import Array, float_type, from_host, in_float64, namespace, to_host
from abft_tsm2.checksum.bounds import BoundFactors
from abft_tsm2.checksum.encode import part_of
from abft_tsm2.core.row_sums import rows_per_block, small, squares_of, summed_squares, take_rows

_Floats = NDArray[np.float64]
_PART = 64  # columns of a line at least that are looked at first
_NEAR = 2.0**-560, 2.0**360  # residuals of products whose squares are in the range, those of float32 widened
_SQUARES = {64: 2.0**400, 32: 2.0**60}  # up to here, and down to their inverse, squares lose nothing that matters
_READ_WHOLE = 1 << 16  # elements that are looked at in hardly more time than a part of them
_LARGEST = 8  # terms of a line that are looked at beside the first ones, where few lines are left
_SHARE = 1 / 16  # of a predicted checksum that a bound may be, where that checksum shows how large the line is
_FAR = 1000  # exponents: scaling by no more keeps numbers in the range
_RUNS, _RUN = 8, 8  # places along k, and terms at each, that are looked at beside the first ones


def estimate_of(k: int, terms: int | None = None) -> float:
    """P2 estimated from a part of its k terms, by default `part_of` them, may be short of the whole; so many times as
    much covers it."""
    terms = part_of(k) if terms is None else terms
    return 1.0 if terms >= k else 2 * math.sqrt(k / terms)


def finite(norms: _Floats) -> _Floats:
    """Norms of the time of encoding, 0 where their squares left the range: then nothing is known of them."""
    return np.where(np.isfinite(norms), norms, 0.0)


def further(k: int) -> list[slice]:
    """Terms beyond the `part_of` (k) first: runs at even distances, or all of few."""
    first = part_of(k)
    if k - first <= _RUNS * _RUN:
        return [slice(first, k)]
    starts = (first + i * (k - first - _RUN) // (_RUNS - 1) for i in range(_RUNS))
    return [slice(at, at + _RUN) for at in starts]


def _scaled_norms(X: Array, W2: Array, at: NDArray[np.int64] | None = None) -> tuple[_Floats, int]:
    """``sqrt((X o X) W2)`` of these rows, or of all, and the power of two that it is to be multiplied with."""
    exponent, xp, at = 0, namespace(X), np.arange(X.shape[0]) if at is None else at
    if float_type(X).bits == 64 and 0 not in X.shape:  # of narrower types, squares in float64 stay in the range
        exponent = math.frexp(max(abs(float(xp.max(X))), abs(float(xp.min(X)))))[1]
    halves = 2.0 ** -(exponent // 2), 2.0 ** -(exponent - exponent // 2)
    step, norms = rows_per_block(X.shape[1]), np.empty(at.size)
    for lo in range(0, at.size, step):
        part = take_rows(X, at[lo : lo + step])
        part = part * halves[0] * halves[1] if exponent else part
        norms[lo : lo + step] = np.sqrt(to_host(summed_squares(part, W2, True))[:, 0])
    further = math.frexp(float(norms.max(initial=0.0)))[1]
    return np.ldexp(norms, -further), exponent + further


class UnexplainedLines:
    """The lines of one product whose residuals exceed what is known of their bounds; host arrays.

    Parameters
    ----------
    operands : triple of arrays
        C, L and R: ``C = alpha L R + beta C0``.
    V2 : (n, 1) array
        The squares of the weights.
    tau : (m,) array
        The bounds so far; better ones are written to it.
    fine : (m,) boolean array
        Which residuals are within them.
    sizes : three arrays of m, the last of them or None
        Residuals ``|u - t|``, and `products` and `added` as in `statistical_bound`.
    predicted : (m,) array
        The predicted checksums, ``alpha t + beta t0``.
    added_factor : float
        Of `added` in the bound, where that is rounded.

    Attributes
    ----------
    at : integer array
        The lines that are left.
    grown : integer array
        Those that are not, but by norms of the operands so large that these have to be shown to be what was encoded.
    """

    def __init__(
        self,
        operands: tuple[Array, Array, Array],
        V2: Array,
        factors: BoundFactors,
        tau: _Floats,
        fine: NDArray[np.bool_],
        sizes: tuple[_Floats, _Floats, _Floats | None],
        predicted: _Floats,
        underflow: float,
        alpha: float = 1.0,
        added_factor: float = 0.0,
    ) -> None:
        self._C, self._L, self._R = operands
        self._V2, self._tau, self._underflow, self._alpha = V2, tau, underflow, abs(alpha)
        (self._n, _), (self._k, _) = V2.shape, self._R.shape
        self._factors, self._added_factor = factors, added_factor
        self.at = (~fine).nonzero()[0]
        residual, products, added = sizes
        self._residual, self._products = residual[self.at], products[self.at]
        self._predicted = predicted
        self._stored: _Floats | None = None
        self._largest_q2: float | None = None
        self._implausible = 0  # lines of C that are larger than what is known of P2 allows
        self._added = None if added is None else added[self.at]
        self._more = estimate_of(self._k)
        self._most = self._more * finite(self._products)
        self.grown = self.at[:0]

    def explain(self, *, whole: bool) -> bool:
        """Measure what it takes; whether all lines are within bounds now.

        `whole`: of C no less than its lines, so that the bounds are those that a report gives."""
        n, exponent, first = self._n, 0, part_of(self._k)
        terms = [] if first == self._k else [self._k] if self._k * n <= _READ_WHOLE else [first, self._k]
        if self.at.size and not _NEAR[0] < np.maximum.reduce(self._residual) < _NEAR[1]:
            terms, exponent = [], self._leave_range()
        widths = [n] if whole or n * self.at.size <= _READ_WHOLE else [max(_PART, n // 8), n]
        while self.at.size and (widths or terms):
            if terms and (not widths or self._are_short()):
                self._measure_products(terms.pop(0))
            else:
                self._measure_stored(widths.pop(0), exponent)
        if self.at.size and not self._are_in_range():
            self._measure_in_range()
        return not self.at.size

    def _leave_range(self) -> int:
        """What is known of P2 tells nothing, as squares have left the range; the exponent of C, if that is far off."""
        self._products, self._more = np.zeros(self.at.size), 2.0
        exponent = math.frexp(float(np.maximum.reduce(np.absolute(self._predicted[self.at]))))[1]
        return max(-_FAR, min(_FAR, exponent)) if abs(exponent) > _FAR // 4 else 0

    def _are_few(self) -> bool:
        """Whether the largest terms of each line are far less than all of R."""
        return bool(2 * _LARGEST * self.at.size <= self._k and self._k * self._n > _READ_WHOLE)

    def _are_short(self) -> bool:
        """Whether of most lines P2 is known so badly that ``||C_i o v||`` tells nothing."""
        return 2 * self._implausible >= self.at.size

    def _are_in_range(self) -> bool:
        """Whether all norms are known, and no square of a size that matters has left the range."""
        if self._largest_q2 is None or self._stored is None:
            return False
        most = _SQUARES[min(64, max(32, float_type(self._R).bits))]
        squares = np.concatenate([[self._largest_q2], self._products**2, self._stored**2])
        return bool(((squares > 1 / most) & (squares < most)).all())

    def _measure_stored(self, width: int, exponent: int) -> None:
        """``||C_i o v||`` over so many columns of C, whose elements are of the size of 2^exponent."""
        C = self._C[:, :width]
        C = C * math.ldexp(1.0, -exponent) if exponent else C
        stored = self._norms(C, self._V2[:width, :])
        self._stored = np.ldexp(stored, exponent) if exponent else stored
        self._compare()

    def _measure_products(self, terms: int) -> None:
        """P2_i over more terms than the first ones: of few lines the largest of each, of many some in between; or over
        all k."""
        if terms == self._k:
            q2 = summed_squares(self._R, self._V2)
            self._largest_q2 = float(namespace(q2).max(q2))
            self._products, self._more = self._alpha * self._norms(self._L, q2), 1.0
        elif self._are_few():
            self._products = np.maximum(self._products, self._alpha * self._of_largest_terms())
        else:
            xp, at = namespace(self._R), further(self._k)
            L, R = xp.concat([self._L[:, x] for x in at], axis=1), xp.concat([self._R[x, :] for x in at])
            found = self._alpha * self._norms(L, summed_squares(R, self._V2))
            self._products, self._more = np.hypot(self._products, found), estimate_of(self._k, terms + R.shape[0])
        self._compare()

    def _of_largest_terms(self) -> _Floats:
        """P2_i over the terms with the largest elements of L's line."""
        lines = to_host(in_float64(take_rows(self._L, self.at)))
        terms = np.absolute(lines).argpartition(-_LARGEST, axis=1)[:, -_LARGEST:]
        q2 = to_host(summed_squares(take_rows(self._R, terms.ravel()), self._V2)).reshape(terms.shape)
        lines = lines[np.arange(terms.shape[0])[:, None], terms]
        return np.asarray(np.sqrt((lines * lines * q2).sum(axis=1)))

    def _measure_in_range(self) -> None:
        """All norms, with matrices scaled by powers of two so that no square leaves the range."""
        q, of_q = _scaled_norms(self._R, self._V2)
        p, of_p = _scaled_norms(self._L, from_host((q * q)[:, None], self._L), self.at)
        c, of_c = _scaled_norms(self._C, self._V2, self.at)
        self._products, self._stored = np.ldexp(self._alpha * p, of_p + of_q), np.ldexp(c, of_c)
        self._more = 1.0
        self._compare()

    def _norms(self, X: Array, W2: Array) -> _Floats:
        """``sqrt((X o X) W2)`` of the lines in question, as many at a time as may be gathered at once."""
        at, step = self.at, rows_per_block(X.shape[1])
        squares: _Floats
        if 2 * at.size > X.shape[0]:
            squares = self._squares_of(X, W2).take(at)
        elif at.size > step:
            parts = (at[lo : lo + step] for lo in range(0, at.size, step))
            squares = np.concatenate([self._squares_of(take_rows(X, part), W2) for part in parts])
        else:
            squares = self._squares_of(take_rows(X, at), W2)
        return np.sqrt(squares, squares)

    def _squares_of(self, X: Array, W2: Array) -> _Floats:
        if isinstance(X, np.ndarray) and X.dtype.itemsize >= 4 and small(X):
            squares: _Floats = squares_of(X).dot(W2[:, 0].astype(X.dtype, copy=False))
            return squares.astype(np.float64, copy=False)
        return np.asarray(to_host(summed_squares(X, W2))[:, 0], np.float64)

    def _compare(self) -> None:
        """Drop the lines that are explained by what is known now."""
        factors, norm, plausible = self._factors, self._stored, None
        if norm is not None:
            largest = factors.largest(self._products, self._added, self._underflow, self._more)
            if np.count_nonzero(plausible := norm <= largest) == norm.size:
                plausible = None
            else:
                if self._more > 1:
                    largest = np.maximum(largest, self._largest_predicted())
                    plausible = norm <= largest
                norm = np.minimum(norm, largest)
        tau = factors.of_norms(self._products, norm, self._added, self._underflow, self._added_factor)
        self._tau[self.at] = tau
        fine = self._residual <= tau
        fine &= np.isfinite(tau)
        if plausible is not None:
            fine &= plausible
        grown = fine & ~(self._products <= self._most)
        if np.count_nonzero(grown):
            self.grown = np.concatenate([self.grown, self.at[grown]])
        if np.count_nonzero(fine) == fine.size:
            self.at = self.at[:0]
            return
        left = (~fine).nonzero()[0]
        self._most = self._most[left]
        self.at, self._residual, self._products = self.at[left], self._residual[left], self._products[left]
        self._added = None if self._added is None else self._added[left]
        self._stored = None if self._stored is None else self._stored[left]
        self._implausible = 0 if plausible is None else left.size - int(np.count_nonzero(plausible[left]))

    def _largest_predicted(self) -> _Floats:
        """What ``||C_i o v||`` cannot exceed, where a part of P2 falls short: the predicted checksum p is at most
        sqrt(n) times that norm (Cauchy and Schwarz), and with weights of random signs and different moduli it hardly
        ever is less than an n-th of it. Nor may a bound be a large part of p, behind which a wrong line might hide."""
        factors = self._factors
        most = min(self._n * factors.root * self._more, _SHARE / (factors.factor + factors.out_factor))
        largest: _Floats = most * np.absolute(self._predicted[self.at])
        return largest
