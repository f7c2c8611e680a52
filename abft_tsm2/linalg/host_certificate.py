"""Certify finished factors of NumPy in few calls, where all is as it should be; what is in doubt is left to `certify`.

The bounds are those of `abft_tsm2.linalg.certify`, with estimated norms; rows and columns are judged together.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import FLOATS, Array, FloatType
from abft_tsm2.checksum.bounds import FLOOR_TERMS, factored_bound, operations
from abft_tsm2.checksum.rigorous import largest_multiplier
from abft_tsm2.core.flushing import flushes
from abft_tsm2.core.kept import compared
from abft_tsm2.linalg.encode import MatrixChecksums
from abft_tsm2.linalg.host_sums import factor_sums, multipliers_within
from abft_tsm2.linalg.line_check import growths
from abft_tsm2.linalg.lu_checks import COUNTED, Sight, blind_scale, places
from abft_tsm2.linalg.outcome import check_of_clean
from abft_tsm2.report import SIDES, Check

_least, _most = np.minimum.reduce, np.maximum.reduce  # half the time of the methods that call them


def checks_of_clean(W: Array, pivots: Any, e: MatrixChecksums) -> tuple[Check, ...] | None:
    """What the checks say of factors whose product is A beyond doubt: ``L y = P A v``, ``g U = w'A``, and multipliers
    that are at most 1, with sums that show changes of all elements; None where anything is in doubt.

    `W`: as `factor_sums` takes it, contiguous by columns.
    """
    (m, n), K = W.shape, min(W.shape)
    place = places(pivots.copy(), m)
    if place is None:
        return None
    counts, v = _counts(W.dtype.char, m, n, flushes()), e.v
    if not multipliers_within(W, largest_multiplier(counts.type)):  # first: later changes of L and U show in the sums
        return None
    w, S, floor = e.w[place], e.S[place], e.row_norms[place]
    found = factor_sums(W, w, v)
    grown = np.asarray(growths(floor[:K], found.y, COUNTED))
    done = [start + float(each @ grown) for start, each in zip(counts.start, counts.each, strict=True)]

    # rows first, then columns: |residual| <= f u (floor sqrt(done) + sqrt(FLOOR_TERMS) |sum|) + underflow
    sums = np.concatenate((S, e.Z))
    residual = np.concatenate((found.Ly, found.gU)) - sums
    reach = np.concatenate((floor * math.sqrt(done[0]), e.column_norms * math.sqrt(done[1])))
    reach += math.sqrt(FLOOR_TERMS) * np.abs(sums)
    weights = np.abs(v), np.abs(w)
    moduli = [float(np.add.reduce(x)) for x in weights]
    sides = slice(0, m), slice(m, m + n)
    bounds = [factored_bound(counts.type, reach[side], K, weight) for side, weight in zip(sides, moduli, strict=True)]
    bound = np.concatenate(bounds)
    size = np.abs(residual)
    ok = (size <= bound) & np.isfinite(bound)
    if not ok.all():
        return None
    if not (_rows_show_all(counts, weights[0], e, bounds[0]) or _all_is_seen(counts, (w, v), e, place, bounds)):
        return None
    lines = zip(SIDES, sides, bounds, weights, strict=True)
    return tuple(check_of_clean(name, size[side], limit, float(_least(weight))) for name, side, limit, weight in lines)


def _rows_show_all(counts: _Counts, v: Any, e: MatrixChecksums, bound: Any) -> bool:
    """Whether `Sight` finds nothing that the sums of rows do not show, as the largest bound and the smallest row tell.

    `v`: moduli.
    """
    weight = np.log2(v)
    row = counts.blind + max(float(_least(e.row_sizes)), counts.least) + float(_least(weight))
    column = float(_least(weight + (counts.blind + np.maximum(e.column_sizes, counts.least))))
    return bool(np.log2(_most(bound)) <= np.minimum(row, column))  # which a NaN is not lost in


def _all_is_seen(counts: _Counts, weights: tuple[Any, Any], e: MatrixChecksums, place: Any, bounds: list[Any]) -> bool:
    sizes = e.row_sizes[place], e.column_sizes
    shape = sizes[0].size, sizes[1].size
    return Sight.through(counts.type, shape, weights, sizes, (bounds[0], bounds[1])).all_is_seen()


class _Counts(NamedTuple):
    """What is the same for all matrices of a type and shape, in one mode of the processor.

    Attributes
    ----------
    start : pair of float
        Operations that every row, and column, is granted.
    each : pair of arrays
        Those of every `COUNTED` rows, and columns, in a matrix that does not grow.
    blind, least : float
        How large a change may be that no sum shows, and the least size that it is a multiple of, as `Sight` has them.
    """

    type: FloatType
    start: tuple[float, float]
    each: tuple[Any, Any]
    blind: float
    least: float


_TYPES = {"d": FLOATS["float64"], "f": FLOATS["float32"]}


def _counts(letter: str, m: int, n: int, flushed: bool) -> _Counts:
    """`flushed`: what `blind_scale` asks for itself."""
    numbers = _numbers(letter, m, n, flushed)
    half = (numbers.size + 4) // 2
    start = numbers.item(0), numbers.item(1)
    return _Counts(_TYPES[letter], start, (numbers[4:half], numbers[half:]), numbers.item(2), numbers.item(3))


@compared
def _numbers(letter: str, m: int, n: int, flushed: bool) -> Any:
    """Those of `_counts`, in one array."""
    kind, K = _TYPES[letter], min(m, n)
    start = [operations(kind, FLOOR_TERMS, length) for length in (n, m)]
    each = [operations(kind, min(COUNTED, K - at), length - at) for length in (n, m) for at in range(0, K, COUNTED)]
    return np.array([*start, *blind_scale(kind, (m, n)), *each])
