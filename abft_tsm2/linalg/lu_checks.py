"""Carry the checksums of A through P A = L U from step to step, and check panels and rows against them.

With row weights w and column weights v, ``S = A v`` and ``Z = w'A``. Rows of S and w are exchanged with the rows they
belong to; where the trailing matrix loses L21 U12, S loses L21 y, with ``y = U v`` of the rows just finished: so S
holds the sums of what the trailing matrix should be. Those of the columns of a panel follow from Z when it is due: Z
less g U of what is above, with ``g = w'L`` of the columns that are finished. (To carry Z as S is carried would read
memory in short runs.) An error anywhere in the trailing matrix stays where it is, added to one element, until its row
or column is consumed, and is seen then: in the panel (g against Z) or in the new rows of U (y against S).

Conversely, an element is used only after the check of its panel, or of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, FloatType, bit_pattern, float_type, from_host, is_numpy, namespace, to_host
from abft_tsm2.checksum.bounds import (
    COMPUTED,
    COMPUTED_LEAST,
    FLOOR_TERMS,
    LEAST,
    USUAL,
    factored_bound,
    lost,
    operations,
    rigorous_factored,
)
from abft_tsm2.checksum.rigorous import largest_multiplier
from abft_tsm2.core.blas import add_product, exchange_rows, like_columns, multiply_triangle, permutation
from abft_tsm2.linalg.encode import MatrixChecksums, add_sums, counts, wide
from abft_tsm2.linalg.evidence import Lines, unit_lower
from abft_tsm2.linalg.line_check import LineCheck, column_norms, growth, growths, norm
from abft_tsm2.linalg.outcome import Origin

COUNTED = 64  # rows of U whose growth is taken to be the same
ON_DEVICE = 2048  # columns that are read at a time on a GPU, which waits for launches rather than for memory
PIVOT_SIGMAS = 8.0  # |g_c| beyond so many standard deviations of what |l| <= 1 allows: its multipliers are compared


class Rows(NamedTuple):
    """Columns of the table of what travels with the rows of the matrix, beside S."""

    w: int = 0
    place: int = 1  # which row of A; a float64, which holds it exactly
    floor: int = 2  # ||A_i o v||


ROWS = Rows()


class LuChecksums:
    """The checksums beside the matrix W = L \\ U that A becomes, all of them live.

    Attributes
    ----------
    W : (m, n) array
    workspace : (m, n + 1) or (m, n) array
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

    def __init__(self, A: Array, encoding: MatrixChecksums, workspace: Array) -> None:
        xp = namespace(A)
        m, n = A.shape
        self.xp, self.type, self.encoding = xp, float_type(A), encoding
        self.workspace, self.W = workspace, workspace[:, :n]
        self.adjacent = workspace.shape[1] > n
        self.S = workspace[:, n] if self.adjacent else like_columns(A, (m, 1), xp.float64)[:, 0]
        self.S[...] = encoding.S
        self.y = self.S[: min(m, n)] if self.adjacent else xp.zeros(min(m, n), dtype=xp.float64, device=A.device)
        self.g = xp.zeros(min(m, n), dtype=xp.float64, device=A.device)
        self.rows = like_columns(A, (m, len(ROWS)), xp.float64)
        self.rows[:, ROWS.w] = encoding.w
        self.rows[:, ROWS.place] = xp.arange(m, dtype=xp.float64, device=A.device)
        self.rows[:, ROWS.floor] = encoding.row_norms
        self.Z = encoding.Z
        self.v = xp.asarray(encoding.v, copy=True)
        self.floor = encoding.column_norms
        self.growth = self._grown = 1.0  # of what is left, by the rows finished last; of the lines checked last
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

    def check_panel(self, pivots: Any, j: int, j1: int, origin: Origin = Origin.COMPUTED) -> bool:
        """Whether the panel W(j:m, j:j1) is what getrf should have made of it; if so, set g(j:j1) and exchange rows of
        the table.

        ``g U11 = Z(j:j1)`` with ``g = w'L`` in the new order of rows, and pivots that leave ``|L| <= 1``.
        """
        xp, b, m = self.xp, j1 - j, self.W.shape[0]
        local = pivots - np.int32(j)
        if not are_exchanges(local, m - j):
            return False
        # Z(J) = w'A(:, J) - g(:j) U(:j, J): what is above the panel is read again here, down its columns
        Z = xp.asarray(self.Z[j:j1], copy=True)
        add_sums(Z, self.W[:j, j:j1].T, self.g[:j], alpha=-1.0)
        self._exchange(local, j)
        w = self.rows[j:, ROWS.w]
        panel = self.W[j:, j:j1]
        square, below = wide(panel[:b, :]), panel[b:, :]
        g = multiply_triangle(square.T, w[:b], lower=False, unit=True)
        add_sums(g, below.T, w[b:])
        residual = multiply_triangle(square.T, g, lower=True) - Z
        last = g * xp.linalg.diagonal(square)  # what is left of a column when all rows above have been taken off
        reach = self._reach_within(1, j, self.floor[j:j1], Z, last)

        def exact(part: slice) -> tuple[Array, Array]:  # ||g o U(:j1, c)|| of some columns c, operations counted
            above = wide(self.W[:j, j + part.start : j + part.stop]) * self.g[:j, None]
            inside = xp.triu(square[:, part], k=-part.start) * g[:, None]
            norms = column_norms(above * self._roots(0, j)[:, None])
            norms += column_norms(inside * self._roots(j, j1)[:, None])
            # BLAS adds up the last columns of a thread's share one by one, with several times the usual rounding
            return norms, xp.sum(above, axis=0) + xp.sum(inside, axis=0) - self.Z[j:j1][part]

        def rigorous() -> Array:  # |w|' |L| |U11|
            sizes = multiply_triangle(xp.abs(square).T, xp.abs(w[:b]), lower=False, unit=True)
            add_sums(sizes, xp.abs(below).T, xp.abs(w[b:]))
            return rigorous_factored(self.type, m) * multiply_triangle(xp.abs(square).T, sizes, lower=True)

        proved = origin is Origin.PROVED
        fine = proved or self._judged(1, residual, reach, j1, exact, rigorous if origin is Origin.RECOMPUTED else None)
        # |l| <= 1 keeps |g_c| within a few ||w||; a column beyond it is compared element by element
        size, limit = xp.abs(g), PIVOT_SIGMAS * norm(w)
        if fine and not proved and not float(xp.max(size)) <= limit:
            fine = self._small(panel, np.flatnonzero(~(to_host(size) <= limit)))
        if fine:
            self.g[j:j1] = g
        else:
            self._exchange(local, j, back=True)
        return fine

    def _exchange(self, local: Any, j: int, *, back: bool = False) -> None:
        exchange_rows(self.rows[j:, :], local, back=back)
        if not self.adjacent:
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
        step = read_width(self.W, COUNTED)
        for at in range(0, K, step):
            end = min(at + step, K)
            parts = xp.tril(self.W[at:end, at:end], k=-1), self.W[end:, at:end]
            small = [xp.all(xp.abs(part) <= self._largest, axis=0) for part in parts]
            far += (at + np.flatnonzero(~to_host(small[0] & small[1]))).tolist()
        return tuple(far)

    @property
    def _largest(self) -> float:
        return largest_multiplier(self.type)

    def _small(self, panel: Array, columns: Any) -> bool:
        """Whether no multiplier in these columns is larger than 1."""
        return all(bool(self.xp.all(self.xp.abs(panel[c + 1 :, c]) <= self._largest)) for c in columns.tolist())

    def check_rows(self, j: int, j1: int, origin: Origin = Origin.COMPUTED) -> bool:
        """Whether U(j:j1, j:n) is right: ``L11 y = S(j:j1)`` with ``y = U v``, which `trailing_update` puts into
        place."""
        xp, n = self.xp, self.W.shape[1]
        square, right = wide(self.W[j:j1, j:j1]), self.W[j:j1, j1:]
        S, v = self.S[j:j1], self.v
        y = multiply_triangle(square, v[j:j1], lower=False)
        add_sums(y, right, v[j1:])
        residual = multiply_triangle(square, y, lower=True, unit=True) - S
        reach = self._reach_within(0, j, self.rows[j:j1, ROWS.floor], S, y)

        def exact(part: slice) -> tuple[Array, Array]:  # ||L(i, :j1) o y|| of some rows i, operations counted
            left = wide(self.W[j + part.start : j + part.stop, :j]) * (self.y[:j] * self._roots(0, j))[None, :]
            inside = unit_lower(square[part, :], part.start) * (y * self._roots(j, j1))[None, :]
            return column_norms(left.T) + column_norms(inside.T), residual[part]

        def rigorous() -> Array:  # |L11| |U| |v|
            sizes = multiply_triangle(xp.abs(square), xp.abs(v[j:j1]), lower=False)
            add_sums(sizes, xp.abs(right), xp.abs(v[j1:]))
            sizes = multiply_triangle(xp.abs(square), sizes, lower=True, unit=True)
            return rigorous_factored(self.type, n + j1) * sizes

        self._y = y
        if origin is Origin.PROVED:
            return True
        return self._judged(0, residual, reach, j1, exact, rigorous if origin is Origin.RECOMPUTED else None)

    def _judged(
        self,
        side: int,
        residual: Array,
        reach: Array,
        terms: int,
        exact: Callable[[slice], tuple[Array, Array]],
        rigorous: Callable[[], Array] | None,
    ) -> bool:
        """Whether all lines are fine. Norms are estimated first; where that does not do, those within the step are
        computed, and residuals in another order; and what was computed again may round in a pattern, up to the
        rigorous bound."""
        weight = self.moduli[1 - side]
        bound = factored_bound(self.type, reach, terms, weight)
        verdict = LineCheck.relative_to_median(residual, bound, USUAL, LEAST)
        fine = verdict.clean
        if not fine:
            runs = [slice(0, residual.shape[0])] if rigorous else verdict.suspected
            for run in runs:
                norms, residual[run] = exact(run)
                bound[run] = COMPUTED * factored_bound(self.type, reach[run] + norms, terms, weight)
            if rigorous:
                verdict = LineCheck.of(residual, 8 * bound + rigorous())
            else:
                verdict = LineCheck.relative_in_runs(residual, bound, runs, USUAL, COMPUTED_LEAST)
            fine = verdict.clean
        if fine:
            self.seen[side].append((residual, bound))
        return fine

    def _roots(self, first: int, last: int) -> Array:
        """Of the operations on an element up to each of these columns."""
        return self.xp.sqrt(counts(last - first, self.xp, self.W.device, first))

    def _operations(self, side: int, j: int, count: int) -> float:
        return operations(self.type, count, (self.W.shape[1], self.W.shape[0])[side] - j)

    def _reach_within(self, side: int, j: int, floor: Array, first: Array, last: Array) -> Array:
        """`reach` of the lines from j on, each of which has one operation more than the one before it; and how much
        they have grown. `first`, `last`: their sums at the beginning of the step, and when they were finished."""
        self._grown = growth(floor, last)
        count = last.shape[0]
        more = from_host(np.arange(1, count + 1) / count * self._operations(side, j, count), last)
        return self.reach(side, floor, more * max(self._grown, self.growth), j + more, first, last)

    # -- what a step does to them --

    def trailing_update(self, j: int, j1: int) -> None:
        """A22 -= L21 U12, and with it S(j1:) -= L21 y where S lies beside W."""
        self.y[j:j1] = self._y
        add_product(self.workspace[j1:, j1:], self.W[j1:, j:j1], self.workspace[j:j1, j1:])

    def advance(self, j: int, j1: int) -> None:
        """S(j1:) -= L21 y unless that is done."""
        if not self.adjacent:
            add_sums(self.S[j1:], self.W[j1:, j:j1], self.y[j:j1], alpha=-1.0)
        self._count(j, j1, self._grown)

    def count_operations(self) -> None:
        """`done` of a factorisation of which only the result is known: its rows of U are rows of trailing matrices, by
        which growth is judged."""
        K = self.y.shape[0]
        grown = growths(to_host(self.rows[:K, ROWS.floor]), to_host(self.y), COUNTED)
        for at, by in zip(range(0, K, COUNTED), grown, strict=True):
            self._count(at, min(at + COUNTED, K), by)

    def _count(self, j: int, j1: int, grown: float) -> None:
        """The step that has finished j:j1 is done: its lines had grown so much."""
        self.growth = grown
        for side in (0, 1):
            self.done[side] += self._operations(side, j, j1 - j) * grown

    def reach(self, side: int, floor: Array, more: Any, terms: Any, *sums: Array) -> Array:
        """How far the operations on rows (side 0) or columns may have taken their residuals: see `factored_bound`.

        A line is taken to have grown as the usual one has (`more`: operations beyond those in `done`, weighted as they
        are), and to have been as large as its own sums say for all of its operations, or `terms` of them.
        """
        xp, largest = self.xp, self.xp.abs(sums[0])
        for x in sums[1:]:
            largest = xp.maximum(largest, xp.abs(x))
        return floor * (self.done[side] + more) ** 0.5 + terms**0.5 * largest

    # -- what they should be, from the beginning --

    def recompute_S(self, j: int) -> Array:
        """S when j columns are finished, from A's and the finished factors: A v - L y."""
        S = self.xp.take(self.encoding.S, from_host(self.place, self.W))
        if j:
            add_sums(S[j:], self.W[j:, :j], self.xp.asarray(self.y[:j], copy=True), alpha=-1.0)
        return S


def read_width(W: Array, on_host: int) -> int:
    """Columns of W that are read at a time: those that stay in a CPU's cache, or as many as make up for a launch."""
    return on_host if is_numpy(W) else ON_DEVICE


def are_exchanges(pivots: Any, m: int) -> bool:
    """Whether each of these is the number of a row, of m, that is not above its own."""
    return not pivots.size or bool(np.maximum.reduce(pivots) < m and (pivots >= np.arange(pivots.size)).all())


def places(pivots: Any, m: int) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Which row of A is where after these exchanges; None where they are none."""
    return permutation(pivots, m) if are_exchanges(pivots, m) else None


# Measured: bounds of lines of normal data of 150 to 3000 columns are up to 63 times what `blind_factor` counts for one,
# and those of 209 of 225 kinds of matrices of the campaigns (150 columns) up to 420 times.
BLIND = 512.0
AT_ONCE = 256  # columns whose elements are compared at once


def blind_factor(stored: FloatType, terms: int, length: int) -> float:
    """How large a change of an element may be that no sum shows, in units of the largest element of its row, or column.

    BLIND times what `factored_bound` is for a line all `length` elements of which are as large as the largest, and
    weighted alike (Higham 2002, theorem 9.3; Hoeffding 1963): ``BLIND u sqrt(terms length)``.
    """
    return BLIND * stored.unit_roundoff * math.sqrt((operations(stored, terms, length) + FLOOR_TERMS) * length)


def blind_scale(kind: FloatType, shape: tuple[int, int]) -> tuple[float, float]:
    """The `blind_factor` of factors of this shape, and the least size that it is multiplied by: below it rounding is
    less than underflow; logarithms to base 2."""
    least = math.log2(sum(shape) * (lost(kind) / kind.unit_roundoff))
    return math.log2(blind_factor(kind, min(shape), max(shape))), least


class Sight(NamedTuple):
    """What sums show of a change of an element; logarithms to base 2 on the host, of rows in their present order (0)
    and of columns (1).

    Attributes
    ----------
    weights : pair of arrays
        |w| and |v|.
    allowed : pair of arrays
        How large a change of an element may be that no sum shows, for the row's sake and for the column's.
    bounds : pair of arrays
        Of the sums.
    """

    weights: tuple[Any, Any]
    allowed: tuple[Any, Any]
    bounds: tuple[Any, Any]

    @classmethod
    def of(cls, carried: LuChecksums, sizes: tuple[Any, Any], bounds: tuple[Array, Array]) -> Sight:
        """`sizes`: of the elements of A's rows, in their present order, and columns; logarithms."""
        return cls.through(carried.type, carried.W.shape, (carried.w, carried.v), sizes, bounds)

    @classmethod
    def through(
        cls,
        kind: FloatType,
        shape: tuple[int, int],
        weights: tuple[Array, Array],
        sizes: tuple[Any, Any],
        bounds: tuple[Array, Array],
    ) -> Sight:
        """`of` sums with these weights, w in the present order of rows, and v, of factors of this shape."""
        factor, least = blind_scale(kind, shape)
        with np.errstate(all="ignore"):
            rows, columns = (factor + np.maximum(x, least) for x in sizes)
            return cls((_log2(weights[0]), _log2(weights[1])), (rows, columns), (_log2(bounds[0]), _log2(bounds[1])))

    def lines(self, side: int) -> Any:
        """Rows (side 0) or columns the sum of which does not show a change of each of their elements."""
        weight = self.weights[1 - side]
        # the least over j of weight_j + min(allowed_i, allowed_j)
        least = np.minimum(self.allowed[side] + np.min(weight), np.min(weight + self.allowed[1 - side]))
        return np.flatnonzero(~(self.bounds[side] <= least))

    def all_is_seen(self) -> bool:
        """Whether the sums of all rows, or those of all columns, show changes of all of their elements."""
        return not self.lines(0).size or not self.lines(1).size

    def blind(self) -> Lines:
        """Which rows and columns have elements that neither sum shows."""
        rows, columns = self.lines(0), self.lines(1)
        dark = np.zeros(self.allowed[0].size, bool), np.zeros(self.allowed[1].size, bool)
        for at in range(0, columns.size if rows.size else 0, AT_ONCE):
            some = columns[at : at + AT_ONCE]
            allowed = np.minimum(self.allowed[0][rows, None], self.allowed[1][None, some])
            seen = self.bounds[0][rows, None] - self.weights[1][None, some] <= allowed
            seen |= self.bounds[1][None, some] - self.weights[0][rows, None] <= allowed
            dark[0][rows] |= ~seen.all(axis=1)
            dark[1][some] |= ~seen.all(axis=0)
        return dark


def _log2(x: Array) -> Any:
    return np.log2(np.abs(to_host(x)))


def sees_all(carried: LuChecksums) -> bool:
    """Whether each of the sums that a finished factorisation was checked with, one by one, shows changes of all
    elements of its line; from what is known of lines without reading A."""
    e, K, xp = carried.encoding, carried.g.shape[0], carried.xp
    place = carried.place
    S, pivots = xp.take(e.S, from_host(place, carried.W)), wide(xp.linalg.diagonal(carried.W))
    rows = carried.reach(0, carried.rows[:K, ROWS.floor], 0.0, K, S[:K], carried.y)
    columns = carried.reach(1, carried.floor[:K], 0.0, K, e.Z[:K], carried.g * pivots)
    found = []
    for side, reach, plain in ((0, rows, S), (1, columns, e.Z)):
        whole = xp.asarray(plain, copy=True)
        whole[...] = 0.0  # columns of U and rows of L beyond the square are seen by the others' sums
        whole[:K] = factored_bound(carried.type, reach, K, carried.moduli[1 - side])
        found.append(whole)
    sight = Sight.of(carried, (e.row_sizes[place], e.column_sizes), (found[0], found[1]))
    return not sight.lines(0).size and not sight.lines(1).size


def blind_lines(A: Array, carried: LuChecksums, bounds: tuple[Array, Array]) -> Lines | None:
    """Rows, in their present order, and columns with elements that the sums of neither show; None where there are none.
    `bounds`: of all rows and columns, of one certificate."""
    e, place = carried.encoding, carried.place
    if Sight.of(carried, (e.row_sizes[place], e.column_sizes), bounds).all_is_seen():
        return None
    moduli = namespace(A).abs(A)  # a sample may have missed the largest element of a line
    largest = [_log2(namespace(A).max(moduli, axis=axis)).astype(np.float64) for axis in (1, 0)]
    blind = Sight.of(carried, (largest[0][place], largest[1]), bounds).blind()
    return blind if blind[0].any() else None
