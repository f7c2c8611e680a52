"""Where the checks of a factorisation are blind: elements that could be far off, and neither sum of theirs would tell.

The sum of a row shows what happens to element (i, j) above ``bound_i / |v_j|``, that of a column what is above
``bound_j / |w_i|``. No weights undo the norms of all rows and of all columns of every matrix: those of a Vandermonde
matrix of 100 columns span 34 decades, and the bound of a line is made of the largest of what it adds up. Nothing is
suspected then, whatever happens to elements of small weight. So to be blind counts as a suspicion, and evidence
decides. Where weights have undone all norms no line is blind, which they and the bounds show by themselves.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, FloatType, from_host, namespace, to_host
from abft_tsm2.checksum.bounds import FLOOR_TERMS, factored_bound, operations
from abft_tsm2.checksum.factor_encode import wide
from abft_tsm2.checksum.factor_evidence import Lines
from abft_tsm2.checksum.factors import ROWS, Carried

# Measured: bounds of lines of normal data of 150 to 3000 columns are up to 63 times what `blind_factor` counts for one,
# and those of 209 of 225 kinds of matrices of the campaigns (150 columns) up to 420 times.
BLIND = 512.0
AT_ONCE = 256  # columns whose elements are looked at together


def blind_factor(stored: FloatType, terms: int, length: int) -> float:
    """How large a change of an element may be that no sum shows, in units of the largest element of its row, or column.

    BLIND times what `factored_bound` is for a line all `length` elements of which are as large as the largest, and
    weighted alike (Higham 2002, theorem 9.3; Hoeffding 1963): ``BLIND u sqrt(terms length)``.
    """
    return BLIND * stored.unit_roundoff * math.sqrt((operations(stored, terms, length) + FLOOR_TERMS) * length)


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
    def of(cls, carried: Carried, sizes: tuple[Any, Any], bounds: tuple[Array, Array]) -> Sight:
        """`sizes`: of the elements of A's rows, in their present order, and columns; logarithms."""
        kind, lines = carried.type, sum(carried.W.shape)
        factor = math.log2(blind_factor(kind, carried.g.shape[0], max(carried.W.shape)))
        least = math.log2(lines * kind.smallest_subnormal / kind.unit_roundoff)  # rounding is less than underflow there
        with np.errstate(all="ignore"):
            rows, columns = (factor + np.maximum(x, least) for x in sizes)
            return cls((_log2(carried.w), _log2(carried.v)), (rows, columns), (_log2(bounds[0]), _log2(bounds[1])))

    def lines(self, side: int) -> Any:
        """Rows (side 0) or columns the sum of which does not show a change of each of their elements."""
        weight = self.weights[1 - side]
        # the least over j of weight_j + min(allowed_i, allowed_j)
        least = np.minimum(self.allowed[side] + np.min(weight), np.min(weight + self.allowed[1 - side]))
        return np.flatnonzero(~(self.bounds[side] <= least))

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


def sees_all(carried: Carried) -> bool:
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


def blind_lines(A: Array, carried: Carried, bounds: tuple[Array, Array]) -> Lines | None:
    """Rows, in their present order, and columns with elements that the sums of neither show; None where there are none.
    `bounds`: of all rows and columns, of one certificate."""
    e, place = carried.encoding, carried.place
    sight = Sight.of(carried, (e.row_sizes[place], e.column_sizes), bounds)
    if sight.lines(0).size and sight.lines(1).size:  # a sample may have missed the largest element of a line
        moduli = namespace(A).abs(A)
        largest = [_log2(namespace(A).max(moduli, axis=axis)).astype(np.float64) for axis in (1, 0)]
        sight = Sight.of(carried, (largest[0][place], largest[1]), bounds)
    blind = sight.blind()
    return blind if blind[0].any() else None
