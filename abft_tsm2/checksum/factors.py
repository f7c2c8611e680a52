"""Checksums of a matrix that is being factored: encoded, carried from step to step, compared.

With row weights w and column weights v, ``S = A v`` and ``Z = w'A``. Rows of S and w are exchanged with the rows they
belong to; where the trailing matrix loses L21 U12, S loses L21 y, with ``y = U v`` of the rows just finished: so S
holds the sums of what the trailing matrix should be. Those of the columns of a panel follow from Z when it is due: Z
less g U of what is above, with ``g = w'L`` of the columns that are finished. (To carry Z as S is carried would read
memory in short runs.) An error anywhere in the trailing matrix stays where it is, added to one element, until its row
or column is consumed, and is seen then: in the panel (g against Z) or in the new rows of U (y against S).

The other way round: an element is used only after the check of its panel, or of its rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, bit_pattern, float_type, from_host, is_numpy, namespace, to_host
from abft_tsm2.checksum.bounds import (
    COMPUTED,
    COMPUTED_LEAST,
    FLOOR_TERMS,
    LEAST,
    USUAL,
    factored_bound,
    operations,
    rigorous_factored,
)
from abft_tsm2.checksum.factor_encode import Encoding, counts, wide
from abft_tsm2.core.factoring import add_product, exchange_rows, like_columns, multiply_triangle, permutation

BESIDE = 8  # lines to either side of those whose norms are computed
COUNTED = 64  # rows of U whose growth is taken to be the same
SMALLEST = 1e-300  # in place of a norm that is zero
PIVOT_SIGMAS = 8.0  # |g_c| beyond so many standard deviations of what |l| <= 1 allows: look at the column


class Verdict(NamedTuple):
    """What a check says of its lines: residuals, bounds, and which lines are fine; float64, on A's device."""

    residual: Array
    bound: Array
    ok: Array

    @classmethod
    def of(cls, residual: Array, bound: Array) -> Verdict:
        xp = namespace(residual)
        return cls(residual, bound, (xp.abs(residual) <= bound) & xp.isfinite(bound))

    @property
    def clean(self) -> bool:
        return bool(namespace(self.ok).all(self.ok))


class Rows(NamedTuple):
    """Columns of the table of what travels with the rows of the matrix, beside S."""

    w: int = 0
    place: int = 1  # which row of A; a float64, which holds it exactly
    floor: int = 2  # ||A_i o v||


ROWS = Rows()


class Carried:
    """The checksums beside the matrix W = L \\ U that A becomes, all of them live.

    Attributes
    ----------
    W : (m, n) array
    room : (m, n + 1) or (m, n) array
        W, and S to the right of it where S has the type of W: the exchanges of rows and the update of the trailing
        matrix then take it with them.
    S : (m,) array
    rows : (m, 3) array
        The quantities of `Rows`, in the present order of W's rows.
    Z, floor : (n,) arrays
        ``w'A``, the same array as in `encoding`, and the norms of columns.
    done : pair of float
        Operations so far on every row and every column, each weighted with how much the matrix had grown by then.
    g, y : (K,) arrays
        ``w'L`` and ``U v`` of the columns and rows that are finished. Where S lies beside W, y takes its place.
    """

    def __init__(self, A: Array, encoding: Encoding, room: Array) -> None:
        xp = namespace(A)
        m, n = A.shape
        self.xp, self.type, self.encoding = xp, float_type(A), encoding
        self.room, self.W, self.beside = room, room[:, :n], room.shape[1] > n
        self.S = room[:, n] if self.beside else like_columns(A, (m, 1), xp.float64)[:, 0]
        self.S[...] = encoding.S
        self.y = self.S[: min(m, n)] if self.beside else xp.zeros(min(m, n), dtype=xp.float64, device=A.device)
        self.g = xp.zeros(min(m, n), dtype=xp.float64, device=A.device)
        self.rows = like_columns(A, (m, len(ROWS)), xp.float64)
        self.rows[:, ROWS.w] = encoding.w
        self.rows[:, ROWS.place] = xp.arange(m, dtype=xp.float64, device=A.device)
        self.rows[:, ROWS.floor] = encoding.row_norms
        self.Z = encoding.Z
        self.v = xp.asarray(encoding.v, copy=True)
        self.floor = encoding.column_norms
        self.growth = 1.0
        self.done = [operations(self.type, FLOOR_TERMS, length) for length in (n, m)]
        self.moduli = float(xp.sum(xp.abs(encoding.w))), float(xp.sum(xp.abs(encoding.v)))
        self._fingerprint = self._bits()
        self._y = self.y[:0]
        self.seen: tuple[list[Any], list[Any]] = [], []  # residuals and bounds of rows, and of columns, that agreed

    @property
    def w(self) -> Array:
        return self.rows[:, ROWS.w]

    @property
    def place(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Which row of A each row of W is, on the host; -1 where the table holds no such number."""
        found = to_host(self.rows[:, ROWS.place])
        with np.errstate(invalid="ignore"):
            whole = (found >= 0) & (found < found.size) & (found == np.floor(found))
            return np.where(whole, found, -1).astype(np.int64)

    # -- the two checks of a step --

    def check_panel(self, pivots: Any, j: int, j1: int, *, again: bool = False) -> bool:
        """Whether the panel W(j:m, j:j1) is what getrf should have made of it; if so, sets g(j:j1) and exchanges rows
        of the table.

        ``g U11 = Z(j:j1)`` with ``g = w'L`` in the new order of rows, and pivots that leave ``|L| <= 1``.
        """
        xp, b, m = self.xp, j1 - j, self.W.shape[0]
        local = pivots - np.int32(j)
        if not are_exchanges(local, m - j):
            return False
        # Z(J) = w'A(:, J) - g(:j) U(:j, J): what is above the panel is read again here, down its columns
        Z = xp.asarray(self.Z[j:j1], copy=True)
        add_product(Z, wide(self.W[:j, j:j1]).T, self.g[:j])
        self._exchange(local, j)
        w = self.rows[j:, ROWS.w]
        panel = wide(self.W[j:, j:j1])
        square, below = panel[:b, :], panel[b:, :]
        g = multiply_triangle(square.T, w[:b], lower=False, unit=True)
        add_product(g, below.T, w[b:], alpha=1.0)
        residual = multiply_triangle(square.T, g, lower=True) - Z
        more = self._operations(1, j, b)
        last = g * xp.linalg.diagonal(square)  # what is left of a column when all rows above have been taken off
        reach = self.reach(1, self.floor[j:j1], more, j, Z, last)

        def exact(lo: int, hi: int) -> Array:  # ||g o U(:j1, c)|| of some columns c, operations counted
            above = column_norms(wide(self.W[:j, j + lo : j + hi]) * (self.g[:j] * self._roots(0, j))[:, None])
            return above + column_norms(upper(square[:, lo:hi], lo) * (g * self._roots(j, j1))[:, None])

        def rigorous() -> Array:  # |w|' |L| |U11|
            sizes = multiply_triangle(xp.abs(square).T, xp.abs(w[:b]), lower=False, unit=True)
            add_product(sizes, xp.abs(below).T, xp.abs(w[b:]), alpha=1.0)
            return rigorous_factored(self.type, m) * multiply_triangle(xp.abs(square).T, sizes, lower=True)

        fine = self._judged(1, residual, reach, j1, exact, rigorous if again else None)
        # |l| <= 1 keeps |g_c| within a few ||w||; a column beyond it is looked at element by element
        size, limit = xp.abs(g), PIVOT_SIGMAS * norm(w)
        if fine and not float(xp.max(size)) <= limit:
            fine = self._small(panel, np.flatnonzero(~(to_host(size) <= limit)))
        if fine:
            self.g[j:j1] = g
        else:
            self._exchange(local, j, back=True)
        return fine

    def _exchange(self, local: Any, j: int, *, back: bool = False) -> None:
        exchange_rows(self.rows[j:, :], local, back=back)
        if not self.beside:
            exchange_rows(self.S[j:, None], local, back=back)

    def table_is_whole(self) -> bool:
        """Whether the table holds the same numbers as in the beginning, in whatever order of rows."""
        return bool(namespace(self._fingerprint).all(self._bits() == self._fingerprint))

    def _bits(self) -> Array:
        """Sums of the bit patterns of the table's columns, modulo 2^64."""
        table = self.rows.T if is_numpy(self.rows) else self.xp.asarray(self.rows.T, copy=True)
        patterns = bit_pattern(table)
        return namespace(patterns).sum(patterns, axis=1)

    def order_by(self, pivots: Any) -> bool:
        """Put rows of the table and of S into the order of pivots; False, and nothing, where they are none."""
        if usable := are_exchanges(pivots, self.W.shape[0]):
            self._exchange(pivots, 0)
        return usable

    def too_large(self) -> tuple[int, ...]:
        """Columns of L with multipliers larger than 1: their pivots were not the largest elements. Reads L."""
        xp, K, far = self.xp, self.g.shape[0], []
        for at in range(0, K, COUNTED):
            end = min(at + COUNTED, K)
            parts = xp.tril(self.W[at:end, at:end], k=-1), self.W[end:, at:end]
            small = [xp.all(xp.abs(part) <= self._largest, axis=0) for part in parts]
            far += (at + np.flatnonzero(~to_host(small[0] & small[1]))).tolist()
        return tuple(far)

    @property
    def _largest(self) -> float:
        """|l|, but for the rounding of a reciprocal."""
        return 1 + 4 * self.type.unit_roundoff

    def _small(self, panel: Array, columns: Any) -> bool:
        """Whether no multiplier in these columns is larger than 1."""
        return all(bool(self.xp.all(self.xp.abs(panel[c + 1 :, c]) <= self._largest)) for c in columns.tolist())

    def check_rows(self, j: int, j1: int, *, again: bool = False) -> bool:
        """Whether U(j:j1, j:n) is right: ``L11 y = S(j:j1)`` with ``y = U v``, which `take_off` puts into place."""
        xp, b, n = self.xp, j1 - j, self.W.shape[1]
        square, right = wide(self.W[j:j1, j:j1]), wide(self.W[j:j1, j1:])
        S, v = self.S[j:j1], self.v
        y = multiply_triangle(square, v[j:j1], lower=False)
        add_product(y, right, v[j1:], alpha=1.0)
        residual = multiply_triangle(square, y, lower=True, unit=True) - S
        more = self._operations(0, j, b)
        reach = self.reach(0, self.rows[j:j1, ROWS.floor], more, j, S, y)

        def exact(lo: int, hi: int) -> Array:  # ||L(i, :j1) o y|| of some rows i, operations counted
            left = column_norms((wide(self.W[j + lo : j + hi, :j]) * (self.y[:j] * self._roots(0, j))[None, :]).T)
            return left + column_norms((unit_lower(square)[lo:hi, :] * (y * self._roots(j, j1))[None, :]).T)

        def rigorous() -> Array:  # |L11| |U| |v|
            sizes = multiply_triangle(xp.abs(square), xp.abs(v[j:j1]), lower=False)
            add_product(sizes, xp.abs(right), xp.abs(v[j1:]), alpha=1.0)
            sizes = multiply_triangle(xp.abs(square), sizes, lower=True, unit=True)
            return rigorous_factored(self.type, n + j1) * sizes

        self._y = y
        return self._judged(0, residual, reach, j1, exact, rigorous if again else None)

    def _judged(
        self,
        side: int,
        residual: Array,
        reach: Array,
        terms: int,
        exact: Callable[[int, int], Array],
        rigorous: Callable[[], Array] | None,
    ) -> bool:
        """Whether all lines are fine. Norms are estimated first; where that does not do, those within the step are
        computed; and what was computed again may round in a pattern, up to the rigorous bound."""
        weight = self.moduli[1 - side]
        bound = factored_bound(self.type, reach, terms, weight)
        fine = _alike(residual, bound)
        if not fine:
            lo, hi = (0, residual.shape[0]) if rigorous else _around_far(residual, bound)
            bound[lo:hi] = COMPUTED * factored_bound(self.type, reach[lo:hi] + exact(lo, hi), terms, weight)
            if rigorous:
                fine = Verdict.of(residual, 8 * bound + rigorous()).clean
            else:
                fine = _alike(residual[lo:hi], bound[lo:hi], COMPUTED_LEAST)
        if fine:
            self.seen[side].append((residual, bound))
        return fine

    def _roots(self, first: int, last: int) -> Array:
        """Of the operations on an element up to each of these columns."""
        return self.xp.sqrt(counts(last - first, self.xp, self.W.device, first))

    def _operations(self, side: int, j: int, b: int) -> float:
        return operations(self.type, b, (self.W.shape[1], self.W.shape[0])[side] - j)

    # -- what a step does to them --

    def take_off(self, j: int, j1: int) -> None:
        """A22 -= L21 U12, and with it S(j1:) -= L21 y where S lies beside W."""
        self.y[j:j1] = self._y
        add_product(self.room[j1:, j1:], self.W[j1:, j:j1], self.room[j:j1, j1:])

    def advance(self, j: int, j1: int) -> None:
        """S(j1:) -= L21 y unless that is done; the growth of what is left is seen in it."""
        b = j1 - j
        if not self.beside:
            add_product(self.S[j1:], wide(self.W[j1:, j:j1]), self.y[j:j1])
        self.growth = growth(self.rows[j1:, ROWS.floor], self.S[j1:])
        for side in (0, 1):
            self.done[side] += self._operations(side, j, b) * self.growth

    def count_operations(self) -> None:
        """`done` of a factorisation of which only the result is known: its rows of U are rows of trailing matrices, by
        which growth is judged."""
        m, n = self.W.shape
        for at in range(0, self.y.shape[0], COUNTED):
            end = min(at + COUNTED, self.y.shape[0])
            self.growth = growth(self.rows[at:end, ROWS.floor], self.y[at:end])
            for side in (0, 1):
                self.done[side] += operations(self.type, end - at, (n, m)[side] - at) * self.growth

    def reach(self, side: int, floor: Array, more: float, j: int, *sums: Array) -> Array:
        """How far the operations on rows (side 0) or columns may have taken their residuals: see `factored_bound`.

        A line is taken to have grown as the usual one has, and to have been as large as its own sums say for all of
        its j and `more` operations.
        """
        xp, largest = self.xp, self.xp.abs(sums[0])
        for x in sums[1:]:
            largest = xp.maximum(largest, xp.abs(x))
        return floor * math.sqrt(self.done[side] + more * self.growth) + math.sqrt(more + j) * largest

    # -- what they should be, from the beginning --

    def S_again(self, j: int) -> Array:
        """S when j columns are finished, from A's and the finished factors: A v - L y."""
        S = self.xp.take(self.encoding.S, from_host(self.place, self.W))
        if j:
            add_product(S[j:], wide(self.W[j:, :j]), self.xp.asarray(self.y[:j], copy=True))
        return S


def _alike(residual: Array, bound: Array, least: float = LEAST) -> bool:
    """Whether all residuals are within their bounds, and none stands out among its like although the bound allows it.

    Sorting puts NaN last.
    """
    xp = namespace(residual)
    ratio = xp.sort(xp.abs(residual) / bound)
    limit = _limit(float(ratio[ratio.shape[0] // 2]), least)
    return float(ratio[-1]) <= limit and math.isfinite(float(xp.max(bound)))


def _limit(usual: float, least: float) -> float:
    return min(1.0, max(least, USUAL * usual))


def _around_far(residual: Array, bound: Array) -> tuple[int, int]:
    """The first of the lines that are not `_alike`, and past the last, with some more around."""
    limits = to_host(bound)
    ratio = np.abs(to_host(residual)) / limits
    far = np.flatnonzero(~(ratio <= _limit(float(np.median(ratio)), LEAST)) | ~np.isfinite(limits))
    return max(0, int(far[0]) - BESIDE), min(ratio.size, int(far[-1]) + 1 + BESIDE)


def norm(x: Array) -> float:
    """The 2-norm of a vector, whose squares may be beyond the range."""
    xp = namespace(x)
    square = float(x @ x)
    if SMALLEST < square < math.inf:
        return math.sqrt(square)
    largest = float(xp.max(xp.abs(x))) if x.shape[0] else 0.0
    if not 0.0 < largest < math.inf:
        return largest
    return largest * math.sqrt(float(xp.sum((x / largest) ** 2)))


def column_norms(X: Array) -> Array:
    """The 2-norms of X's columns, whose squares may be beyond the range."""
    xp = namespace(X)
    if not X.shape[0]:
        return xp.zeros(X.shape[1], dtype=X.dtype, device=X.device)
    squares = xp.sum(X * X, axis=0)
    if bool(xp.all((squares > SMALLEST) & xp.isfinite(squares))):
        return xp.sqrt(squares)
    largest = xp.max(xp.abs(X), axis=0)
    scale = xp.where((largest > 0) & xp.isfinite(largest), largest, xp.ones_like(largest))
    return scale * xp.sqrt(xp.sum((X / scale[None, :]) ** 2, axis=0))


def growth(floor: Array, sums: Array) -> float:
    """How many times larger the squared norms of the trailing matrix's lines are than those of A's.

    The square of a line's own sum may be much too small an estimate; the median of some hundred is a good one. chi^2
    with one degree of freedom has the median 0.455.
    """
    step = sums.shape[0] // 128 + 1
    ratios = np.sort(np.abs(to_host(sums[::step]) / (to_host(floor[::step]) + SMALLEST)))
    usual = float(ratios[ratios.size // 2]) if ratios.size else math.sqrt(0.455)
    return usual * usual / 0.455


def are_exchanges(pivots: Any, m: int) -> bool:
    """Whether each of these is the number of a row, of m, that is not above its own."""
    return not pivots.size or bool(pivots.max() < m and (pivots >= np.arange(pivots.size)).all())


def places(pivots: Any, m: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Which row of A is where after these exchanges; None where they are none."""
    return permutation(pivots, m) if are_exchanges(pivots, m) else None


@functools.lru_cache(maxsize=64)
def _mask(m: int, n: int, k: int) -> Any:
    return np.tri(m, n, k, dtype=bool)


def unit_lower(X: Array) -> Array:
    """The unit lower triangle of X, below which there may be more rows."""
    xp, (m, n) = namespace(X), X.shape
    zero, one = (xp.asarray(x, dtype=X.dtype) for x in (0.0, 1.0))
    strict, whole = from_host(_mask(m, n, -1), X), from_host(_mask(m, n, 0), X)
    return xp.where(strict, X, xp.where(whole, one, zero))


def upper(X: Array, above: int = 0) -> Array:
    """The upper triangle of X; `above` rows of X lie over the square one."""
    xp, (m, n) = namespace(X), X.shape
    return xp.where(from_host(_mask(m, n, -1 - above), X), xp.asarray(0.0, dtype=X.dtype), X)
