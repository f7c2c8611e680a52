"""Bounds of lines from more and more of the 2-norms behind them.

The first verdict knows a part of ``P2_i`` alone. On data of one sign ``||C_i o v||`` is larger, by up to ``sqrt(k)``;
on data that change along k, or have zeros, the part says little of the whole. No part of a norm exceeds the whole, so a
residual within the bound that a part gives is within the true bound. What costs least is measured first, and only of
the lines that are not yet explained.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.arrays import Array, float_type, from_host, namespace, to_host
from abft_tsm2.checksum.bounds import BoundFactors
from abft_tsm2.checksum.encode import part_of
from abft_tsm2.core.row_sums import rows_per_block, small, squares_of, summed_squares, take_rows

_Floats = NDArray[np.float64]
_PART = 64  # columns of a line at least that are looked at first
_NEAR = 2.0**-560, 2.0**360  # residuals of products whose squares are in the range, those of float32 widened
_FEW_TERMS = 512  # that are all looked at in hardly more time than a part of them
_RUNS, _RUN = 8, 8  # places along k, and terms at each, that are looked at beside the first ones


def estimate_of(k: int, terms: int | None = None) -> float:
    """P2 estimated from a part of its k terms, by default `part_of` them, may be short of the whole; so many times as
    much covers it."""
    terms = part_of(k) if terms is None else terms
    return 1.0 if terms >= k else 2 * math.sqrt(k / terms)


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
    added_factor : float
        Of `added` in the bound, where that is rounded.
    """

    def __init__(
        self,
        operands: tuple[Array, Array, Array],
        V2: Array,
        factors: BoundFactors,
        tau: _Floats,
        fine: NDArray[np.bool_],
        sizes: tuple[_Floats, _Floats, _Floats | None],
        underflow: float,
        alpha: float = 1.0,
        added_factor: float = 0.0,
    ) -> None:
        self._C, self._L, self._R = operands
        self._V2, self._tau, self._underflow, self._alpha = V2, tau, underflow, abs(alpha)
        (self._n, _), (self._k, _) = V2.shape, self._R.shape
        self._factors, self._added_factor = factors, added_factor
        self._at = (~fine).nonzero()[0]
        residual, products, added = sizes
        self._residual, self._products = residual[self._at], products[self._at]
        self._stored: _Floats | None = None
        self._added = None if added is None else added[self._at]
        self._more = estimate_of(self._k)

    def explain(self, *, whole: bool) -> bool:
        """Measure what it takes; whether all lines are within bounds now.

        `whole`: of C no less than its lines, so that the bounds are those that a report gives."""
        n, k = self._n, self._k
        widths = [n] if whole or n <= _PART else [max(_PART, n // 4), n]
        terms = [None] if k <= _FEW_TERMS else [further(k), None]
        if part_of(k) == k:
            terms = []
        if self._at.size and not _NEAR[0] < np.maximum.reduce(self._residual) < _NEAR[1]:
            widths, terms = [], []  # squares of what rounds like that have left the range
        while self._at.size and (widths or terms):
            if terms and (not widths or self._are_short()):
                self._measure_products(terms.pop(0))
            else:
                self._measure_stored(widths.pop(0))
        if self._at.size:
            self._measure_in_range()
        return not self._at.size

    def _are_short(self) -> bool:
        """Whether of most lines P2 is known so badly that ``||C_i o v||`` tells nothing."""
        short = self._products == 0 if self._stored is None else self._stored > self._largest
        return bool(2 * np.count_nonzero(short) >= short.size)

    def _measure_stored(self, width: int) -> None:
        """``||C_i o v||`` over so many columns."""
        self._stored = np.sqrt(self._squares(self._C[:, :width], self._V2[:width, :]))
        self._compare()

    def _measure_products(self, terms: list[slice] | None) -> None:
        """P2_i over these terms as well, or over all of them."""
        L, R, count = self._L, self._R, self._k
        if terms is not None:
            xp = namespace(R)
            L, R = xp.concat([L[:, at] for at in terms], axis=1), xp.concat([R[at, :] for at in terms])
            count = part_of(count) + R.shape[0]
        found = np.sqrt(self._squares(L, summed_squares(R, self._V2)))
        if self._alpha != 1.0:
            found *= self._alpha
        self._products = found if terms is None else np.hypot(self._products, found)
        self._more = estimate_of(self._k, count)
        self._compare()

    def _measure_in_range(self) -> None:
        """All norms, with matrices scaled by powers of two so that no square leaves the range."""
        q, of_q = _scaled_norms(self._R, self._V2)
        p, of_p = _scaled_norms(self._L, from_host((q * q)[:, None], self._L), self._at)
        c, of_c = _scaled_norms(self._C, self._V2, self._at)
        self._products, self._stored = np.ldexp(self._alpha * p, of_p + of_q), np.ldexp(c, of_c)
        self._more = 1.0
        self._compare()

    def _squares(self, X: Array, W2: Array) -> _Floats:
        """`summed_squares` of the lines in question, as many at a time as may be gathered at once."""
        at, step = self._at, rows_per_block(X.shape[1])
        if 2 * at.size > X.shape[0]:
            if isinstance(X, np.ndarray) and X.dtype == np.float64 and small(X):
                squares: _Floats = squares_of(X).dot(W2[:, 0])
                return squares.take(at)
            return np.asarray(to_host(summed_squares(X, W2))[at, 0], np.float64)
        if at.size > step:
            return np.concatenate([self._squares_at(X, at[lo : lo + step], W2) for lo in range(0, at.size, step)])
        return self._squares_at(X, at, W2)

    def _squares_at(self, X: Array, at: NDArray[np.int64], W2: Array) -> _Floats:
        return np.asarray(to_host(summed_squares(take_rows(X, at), W2))[:, 0], np.float64)

    def _compare(self) -> None:
        """Drop the lines that are explained by what is known now."""
        tau, largest = self._factors.of_norms(
            self._products, self._stored, self._added, self._underflow, self._more, self._added_factor
        )
        self._tau[self._at] = tau
        ok = self._residual <= tau
        ok &= np.isfinite(tau)
        if self._stored is not None:
            ok &= self._stored <= largest
        if np.count_nonzero(ok) == ok.size:
            self._at = self._at[:0]
            return
        left = (~ok).nonzero()[0]
        self._at, self._residual, self._products = self._at[left], self._residual[left], self._products[left]
        self._added = None if self._added is None else self._added[left]
        self._stored = None if self._stored is None else self._stored[left]
        self._largest = largest[left]
