"""Checksums of a matrix that is being factored: encoded, carried from step to step, compared.

With row weights w and column weights v, ``S = A v`` and ``Z = w'A`` take part in every step of ``P A = L U``: rows of S
and w are exchanged with the rows they belong to, and where the trailing matrix loses L21 U12, S loses L21 y and Z loses
g U12, with ``y = U v`` and ``g = w'L`` of the rows and columns just finished. So at any time S and Z are the sums of
what the trailing matrix should be, g and y those of what is finished. Nothing is read for a check but what the step has
just written: the panel (g against Z), the new rows of U (y against S). An error anywhere in the trailing matrix stays
where it is, added to one element, until its row or column is consumed, and is seen then.

The other way round: an element is used only after the check of its panel, or of its rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, Namespace, float_type, from_host, is_column_major, namespace, to_host
from abft_tsm2.checksum.bounds import FLOOR_TERMS, factored_bound, operations, rigorous_factored
from abft_tsm2.checksum.weights import exponents, middle, weights
from abft_tsm2.core.factoring import (
    add_product,
    exchange_rows,
    like_columns,
    multiply_triangle,
    permutation,
    product,
)

GROUPS, GROUP = 8, 32  # norms are taken of so many groups of lines that lie side by side: memory is read in runs
TINY = 1e-280  # squares below have lost digits
LARGEST_POWER = 1000  # of two, of a weight
PIVOT_SIGMAS = 8.0  # |g_c| beyond so many standard deviations of what |l| <= 1 allows: look at the column


def wide(X: Array) -> Array:
    """X in float64; X itself where it is."""
    xp = namespace(X)
    return xp.astype(X, xp.float64, copy=False)


# ---- encoding -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Encoding:
    """What is kept of A (m x n) before it is factored, in A's order of rows; all float64.

    Attributes
    ----------
    w, v : (m,), (n,) arrays
        Weights, each line's scaled by a power of two that undoes its norm.
    S, Z : (m,), (n,) arrays
        ``A v`` and ``w'A``.
    row_squares, column_squares : (m,), (n,) arrays
        ``||A_i o v||^2`` and ``||A_c o w||^2``, from a sample.
    """

    w: Array
    v: Array
    S: Array
    Z: Array
    row_squares: Array
    column_squares: Array

    @classmethod
    def of(cls, A: Array) -> Encoding:
        """Encode A, whose rows or columns are contiguous: reads A twice, and an eighth of it again."""
        xp = namespace(A)
        m, n = A.shape
        with np.errstate(all="ignore"):
            rows = _squares(A, axis=1)  # of every row, from some columns
            columns = _squares(A, axis=0)
            row_norms = rows.log2_norms()
            w = _weights(m, row_norms, A, seed=0)
            column_squares = columns.squares(w)
            # v also undoes the scale of A as a whole, which leaves S, y and their squares in the middle of the range
            usual = int(exponents(row_norms)[m // 2]) if m else 0
            v = _weights(n, 0.5 * np.log2(to_host(column_squares)), A, seed=1, shift=usual)
            row_squares = rows.squares(v)
            S, Z = sums(A, v), sums(A.T, w)
            return cls(w, v, S, Z, xp.maximum(row_squares, S * S), xp.maximum(column_squares, Z * Z))


def sums(A: Array, weight: Array) -> Array:
    """``A weight`` in float64."""
    xp = namespace(A)
    if A.dtype == xp.float64:
        return product(A, weight)
    return _blocks_times(A, weight)


def _blocks_times(A: Array, weight: Array) -> Array:
    """A narrower A, widened in blocks of lines along its order."""
    xp = namespace(A)
    m, n = A.shape
    if is_column_major(A):
        total = xp.zeros(m, dtype=xp.float64, device=A.device)
        for c in range(0, n, 4 * GROUP):
            add_product(total, wide(A[:, c : c + 4 * GROUP]), weight[c : c + 4 * GROUP], alpha=1.0)
        return total
    return xp.concat([product(wide(A[i : i + 4 * GROUP, :]), weight) for i in range(0, m, 4 * GROUP)])


class _Sampled(NamedTuple):
    """Squares of some lines of a matrix, and which lines they are."""

    of: Array  # (lines of the result) x (sampled lines)
    lines: Array
    share: float
    scale: float  # a power of two by which elements were multiplied first

    def squares(self, weight: Array) -> Array:
        """Estimated sum over all lines of (weight x element)^2."""
        chosen = (namespace(self.of).take(weight, self.lines) / self.scale) ** 2
        return product(self.of, chosen) * self.share

    def plain(self) -> Any:
        """Sums of the squares of what is in the sample, on the host."""
        xp = namespace(self.of)
        return to_host(product(self.of, xp.ones(self.of.shape[1], dtype=xp.float64, device=self.of.device)))

    def log2_norms(self) -> Any:
        with np.errstate(divide="ignore"):
            return 0.5 * np.log2(self.plain()) - np.log2(self.scale)


def _squares(A: Array, axis: int) -> _Sampled:
    """Squares of a sample of columns (axis 1) or rows (axis 0); of all where a line of the sample has nothing in it."""
    X = A if axis == 1 else A.T
    count = X.shape[1]
    every = range(0, count, GROUP)
    groups = range(0, count, count // GROUPS) if count >= 2 * GROUP * GROUPS else every
    found = _squared(X, groups)
    norms = found.plain()
    if len(groups) < len(every) and not np.all(norms > 0):
        groups = every
        found = _squared(X, groups)
        norms = found.plain()
    if norms.size and not np.all((norms == 0) | ((norms > TINY) & np.isfinite(norms))):  # squares have left the range
        with np.errstate(all="ignore"):
            finite = np.abs(to_host(X[:, ::1]))
        largest = float(np.max(finite, initial=0.0, where=np.isfinite(finite)))
        found = _squared(X, groups, 2.0 ** -int(np.frexp(largest)[1]))
    return found


def _squared(X: Array, groups: range, scale: float = 1.0) -> _Sampled:
    xp, count = namespace(X), X.shape[1]
    parts = [(at, min(count, at + GROUP)) for at in groups]
    lines = np.concatenate([np.arange(lo, hi) for lo, hi in parts]) if parts else np.arange(0)
    by_columns = is_column_major(X)
    shape = (X.shape[0], lines.size)
    chosen = like_columns(X, shape if by_columns else shape[::-1], xp.float64)
    chosen = chosen if by_columns else chosen.T
    at = 0
    for lo, hi in parts:
        block = wide(X[:, lo:hi]) if scale == 1.0 else wide(X[:, lo:hi]) * scale
        chosen[:, at : at + hi - lo] = block * block
        at += hi - lo
    return _Sampled(chosen, from_host(lines, X), count / max(1, lines.size), scale)


def _weights(n: int, log2_norms: Any, like: Array, seed: int, shift: int = 0) -> Array:
    """n weights that undo norms, and 2^shift beside."""
    power = np.clip(exponents(log2_norms) + shift, -LARGEST_POWER, LARGEST_POWER)
    return from_host(np.ldexp(weights("distinct", n, seed=seed)[:, 0], -power), like)


# ---- what is carried ----------------------------------------------------------------------------------------------


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
    """Columns of the table of what travels with the rows of the matrix."""

    S: int = 0
    w: int = 1
    place: int = 2  # which row of A; a float64, which holds it exactly
    floor: int = 3  # ||A_i o v||^2
    walk: int = 4  # see `bounds.factored_bound`


ROWS = Rows()


class Carried:
    """The checksums beside the matrix W = L \\ U that A becomes, all of them live.

    Attributes
    ----------
    rows : (m, 5) array
        The quantities of `Rows`, in the present order of W's rows.
    Z, floor, walk : (n,) arrays
        The same for columns.
    g, y : (K,) arrays
        ``w'L`` and ``U v`` of the columns and rows that are finished.
    """

    def __init__(self, A: Array, encoding: Encoding) -> None:
        xp = namespace(A)
        m, n = A.shape
        self.xp, self.type, self.encoding = xp, float_type(A), encoding
        self.rows = like_columns(A, (m, len(ROWS)), xp.float64)
        self.rows[:, ROWS.S] = encoding.S
        self.rows[:, ROWS.w] = encoding.w
        self.rows[:, ROWS.place] = xp.arange(m, dtype=xp.float64, device=A.device)
        self.rows[:, ROWS.floor] = encoding.row_squares
        self.rows[:, ROWS.walk] = operations(self.type, FLOOR_TERMS, n) * encoding.row_squares
        self.Z = xp.asarray(encoding.Z, copy=True)
        self.v = xp.asarray(encoding.v, copy=True)
        self.floor = encoding.column_squares
        self.walk = operations(self.type, FLOOR_TERMS, m) * encoding.column_squares
        self.g, self.y = (xp.zeros(min(m, n), dtype=xp.float64, device=A.device) for _ in range(2))
        self.growth = 1.0, 1.0
        self.moduli = float(xp.sum(xp.abs(encoding.w))), float(xp.sum(xp.abs(encoding.v)))

    @property
    def S(self) -> Array:
        return self.rows[:, ROWS.S]

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

    def check_panel(self, W: Array, pivots: Any, j: int, j1: int, *, rigorous: bool = False) -> Verdict:
        """Of the panel that getrf has just made of W(j:m, j:j1); sets g(j:j1).

        ``g U11 = Z(j:j1)`` with ``g = w'L`` in the new order of rows, and pivots that leave ``|L| <= 1``.
        """
        xp, b, m = self.xp, j1 - j, W.shape[0]
        local = pivots - np.int32(j)
        if not (np.all(local >= np.arange(b)) and np.all(local < m - j)):
            none = xp.full(b, float("nan"), dtype=xp.float64, device=W.device)
            return Verdict(none, none, none == none)
        w = xp.asarray(self.rows[j:, ROWS.w : ROWS.w + 1], copy=True)
        exchange_rows(w, local)
        w = w[:, 0]
        panel, Z = wide(W[j:, j:j1]), self.Z[j:j1]
        square = panel[:b, :]
        g = multiply_triangle(square.T, w[:b], lower=False, unit=True)
        add_product(g, panel[b:, :].T, w[b:], alpha=1.0)
        residual = multiply_triangle(square.T, g, lower=True) - Z
        if rigorous:
            reach = multiply_triangle(xp.abs(square).T, xp.abs(w[:b]), lower=False, unit=True)
            add_product(reach, xp.abs(panel[b:, :]).T, xp.abs(w[b:]), alpha=1.0)
            bound = rigorous_factored(self.type, m) * multiply_triangle(xp.abs(square).T, reach, lower=True)
        else:
            last = g * xp.linalg.diagonal(square)  # what is left of a column when all rows above have been taken off
            walk = self.walk[j:j1] + operations(self.type, b, m - j) * self._norms(1, self.floor[j:j1], Z, last)
            bound = factored_bound(self.type, walk, j1, self.moduli[0], xp)
        verdict = Verdict.of(residual, bound)
        # |l| <= 1 keeps |g_c| within a few ||w||; a column beyond it is looked at element by element
        norm = xp.sqrt(xp.sum(w * w))
        far = ~(xp.abs(g) <= PIVOT_SIGMAS * norm)
        if bool(xp.any(far)):
            for c in np.flatnonzero(to_host(far)).tolist():
                largest = xp.max(xp.abs(panel[c + 1 :, c])) if c + 1 < m - j else xp.sum(panel[:0, c])
                verdict.ok[c] = verdict.ok[c] & (largest <= 1 + 4 * self.type.unit_roundoff)
        self.g[j:j1] = g
        return verdict

    def check_rows(self, W: Array, j: int, j1: int, *, rigorous: bool = False) -> Verdict:
        """Of the new rows U(j:j1, j:n); sets y(j:j1). ``L11 y = S(j:j1)`` with ``y = U v``."""
        xp, b, n = self.xp, j1 - j, W.shape[1]
        square, S = wide(W[j:j1, j:j1]), self.rows[j:j1, ROWS.S]
        right = wide(W[j:j1, j1:])
        y = multiply_triangle(square, self.v[j:j1], lower=False)
        add_product(y, right, self.v[j1:], alpha=1.0)
        residual = multiply_triangle(square, y, lower=True, unit=True) - S
        if rigorous:
            reach = multiply_triangle(xp.abs(square), xp.abs(self.v[j:j1]), lower=False)
            add_product(reach, xp.abs(right), xp.abs(self.v[j1:]), alpha=1.0)
            bound = rigorous_factored(self.type, n + j1) * multiply_triangle(xp.abs(square), reach, lower=True, unit=True)
        else:
            norms = self._norms(0, self.rows[j:j1, ROWS.floor], S, y)
            walk = self.rows[j:j1, ROWS.walk] + operations(self.type, b, n - j) * norms
            bound = factored_bound(self.type, walk, j1, self.moduli[1], xp)
        self.y[j:j1] = y
        return Verdict.of(residual, bound)

    # -- what a step does to them --

    def exchange(self, pivots: Any, j: int) -> None:
        exchange_rows(self.rows[j:, :], pivots)

    def advance(self, W: Array, j: int, j1: int) -> None:
        """S(j1:) -= L21 y, Z(j1:) -= g U12; their squares are what the trailing matrix's norms are taken for."""
        xp, b = self.xp, j1 - j
        S, Z = self.rows[j1:, ROWS.S], self.Z[j1:]
        add_product(S, wide(W[j1:, j:j1]), self.y[j:j1])
        add_product(Z, wide(W[j:j1, j1:]).T, self.g[j:j1])
        floor = self.rows[j1:, ROWS.floor]
        self.growth = growth(floor, S), growth(self.floor[j1:], Z)
        m, n = W.shape
        self.rows[j1:, ROWS.walk] += operations(self.type, b, n - j) * self._norms(0, floor, S)
        self.walk[j1:] += operations(self.type, b, m - j) * self._norms(1, self.floor[j1:], Z)

    def _norms(self, side: int, floor: Array, *sums: Array) -> Array:
        """Squared norms of rows (side 0) or columns of the trailing matrix: estimated by the squares of their weighted
        sums, and taken to be A's, grown as the usual line has, where that is more."""
        found = floor * self.growth[side]
        for x in sums:
            found = self.xp.maximum(found, x * x)
        return found

    # -- what they should be, from the beginning --

    def sums_again(self, W: Array, j: int) -> tuple[Array, Array]:
        """S and Z when j columns are finished, from A's and the finished factors: S = A v - L y, Z = w'A - g U."""
        xp = self.xp
        S = xp.take(self.encoding.S, from_host(self.place, W))
        Z = xp.asarray(self.encoding.Z, copy=True)
        if j:
            add_product(S[j:], wide(W[j:, :j]), self.y[:j])
            add_product(Z[j:], wide(W[:j, j:]).T, self.g[:j])
        return S, Z


def growth(floor: Array, sums: Array) -> float:
    """How many times larger the squared norms of the trailing matrix's lines are than those of A's: at least 1.

    The square of a line's own sum may be much too small an estimate; the median of some hundred is a good one. chi^2
    with one degree of freedom has the median 0.455.
    """
    step = max(1, sums.shape[0] // 256)
    of, now = to_host(floor[::step]), to_host(sums[::step])
    ratios = now[of > 0] ** 2 / of[of > 0]
    return max(1.0, float(middle(ratios)) / 0.455) if ratios.size else 1.0


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


def places(pivots: Any, m: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Which row of A is where after these exchanges; None where they are none."""
    if not (np.all(pivots >= np.arange(pivots.size)) and np.all(pivots < m)):
        return None
    return permutation(pivots, m)
