"""What a right operand carries into a check: ``s = R v``, with weights that suit R's columns.

A left operand carries ``w^T L``, which is the same thing said of its transpose. Weights are equilibrated: each is
divided by the power of two nearest to its column's norm. The norms are taken from a sample of R's rows, and from all
of R where the sample says nothing or an outstanding row shows that it erred.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.arrays import (
    FLOATS,
    Array,
    FloatType,
    dtype_name,
    from_host,
    in_float64,
    namespace,
    same_bits,
    to_host,
)
from abft_tsm2.checksum.bounds import CHECKSUM_UNIT, least_bound
from abft_tsm2.checksum.sides import scaled
from abft_tsm2.checksum.weights import SEED, Weights
from abft_tsm2.core.flushing import flushes
from abft_tsm2.core.kept import compared
from abft_tsm2.core.row_sums import (
    in_single,
    rows_per_block,
    small,
    squares_of,
    squares_of_columns,
    squares_times,
    summed_squares,
    take_rows,
    weighted_sums,
    widened,
)

_SAMPLE_RUNS = 8  # so many runs of rows tell a column's scale; rows the sample may have missed are looked up
_SAMPLE_RUN = 8  # rows in a run, at a random place: no period in the data can hide from them
_SUSPICIOUS = 8.0  # a row whose checksum is this many times the median may change a column's norm
_SUMMED = {t.name: FLOATS["float64" if t.bits == 64 else "float32"].min_exponent for t in FLOATS.values()}
_MANY = 8  # one of so many columns without a norm: then the sample is too small for this matrix
OFF_BY = 4.0  # powers of two by which a weight may be off before it costs sensitivity that matters


Ends = tuple[int, int] | None  # the least and the largest of exponents, where they are known


class Sided(NamedTuple):
    """One value for each side of a matrix; None where a side was not encoded."""

    rows: Any
    columns: Any

    def turned(self) -> Sided:
        """Those of the transpose."""
        return Sided(self.columns, self.rows)


class OperandChecksum(NamedTuple):
    """What a right operand R (k x n) carries into a row check.

    Attributes
    ----------
    weights : (n, r) array of float64
        V.
    sums : (k, r) array of float64
        ``R V``.
    squares : (h, r) array
        ``(R o R)(:h, :) (V o V)`` for the h = `part_of` (k) first rows.
    guard : tuple of arrays
        Copies of `weights`, `sums` and `squares`: a checksum that equals its own may be out of date, but was not hit.
    partial : bool
        How the sums were taken, see `encoding_pass`.
    lasting : bool
        Of a matrix that is kept encoded, and may lie in another order when it is used (restored in a copy, say), or in
        another process, whose sums have other roundings.
    """

    weights: Array
    sums: Array
    squares: Array
    guard: tuple[Array, Array, Array]
    partial: bool
    lasting: bool = False

    def intact(self) -> bool:
        """Whether the weights, sums and squares still have the bits they were made with."""
        return all(map(same_bits, (self.weights, self.sums, self.squares), self.guard))


def carried(R: Array, V: Array, *, partial: bool = False) -> OperandChecksum:
    """What R carries with weights V: one read of R."""
    return _carried(R, V, partial, summed_squares(R[..., : part_of(R.shape[-2]), :], V * V))


def _carried(R: Array, V: Array, partial: bool, squares: Array) -> OperandChecksum:
    sums = weighted_sums(R, V, partial)
    return OperandChecksum(V, sums, squares, kept(V, sums, squares), partial)


def telling_from(R: Array, sums: Array, smallest: Any, terms: int) -> float:
    """From what on bounds tell something: `least_bound` for weights of at least the modulus `smallest`.

    Infinity where underflow has taken digits of the checksum of a row of R that is not 0; `sums` are those of R, or of
    each of a stack.
    """
    least = least_bound(terms, float(np.minimum.reduce(smallest, axis=None)))
    if not least:
        return 0.0
    places = np.nonzero(np.all(np.abs(to_host(sums)) < least / CHECKSUM_UNIT, axis=-1))
    if R.ndim < len(places) + 1:  # one for all of a stack
        places = places[-1:]
    rows = R[places] if isinstance(R, np.ndarray) else take_rows(R, places[0])
    return math.inf if places[0].size and np.any(to_host(rows) != 0) else least


def kept(first: Array, *others: Array | None) -> Any:
    """Copies of checksums, to tell later whether one was hit."""
    if isinstance(first, np.ndarray):
        return (first.copy(), *[None if x is None else x.copy() for x in others])
    copied = namespace(first).asarray
    copies = []
    for x in (first, *others):
        copies.append(None if x is None else copied(x, copy=True))
    return tuple(copies)


def part_of(terms: int) -> int:
    """How many terms of a 2-norm are taken at first: nearly every line passes with the lower bound that they give."""
    return terms if terms <= 64 else max(64, terms // 64)


def log2_column_norms(R: Array) -> NDArray[np.float64]:
    """log2 of the 2-norm of each column of R (k x n), over its finite elements; -inf for a zero column.

    Exact in range: nothing overflows or underflows, whatever the data. Two reads of R.
    """
    xp = namespace(R)
    k, n = R.shape
    rows = rows_per_block(n)

    def finite_block(at: int) -> Array:
        block = widened(R, at, min(k, at + rows))
        return xp.where(xp.isfinite(block), xp.abs(block), xp.zeros_like(block))

    peak = np.zeros(n)
    for at in range(0, k, rows):
        peak = np.maximum(peak, to_host(xp.max(finite_block(at), axis=0)))
    shift = np.frexp(peak)[1].astype(np.int64)
    halves = [from_host(np.ldexp(np.ones(n), -part), R) for part in (shift // 2, shift - shift // 2)]
    squares = np.zeros(n)
    for at in range(0, k, rows):
        block = finite_block(at) * halves[0] * halves[1]
        squares += to_host(xp.sum(block * block, axis=0))
    with np.errstate(divide="ignore"):
        return np.asarray(shift + 0.5 * np.log2(squares))


def _sample(k: int) -> list[slice]:
    """The first rows, which are read anyhow, and a run at a random place in each eighth of k rows; all of a few."""
    if read_whole(k):
        return [slice(0, k)]
    return [slice(0, part_of(k)), *(slice(at, at + _SAMPLE_RUN) for at in _beyond(k)[::_SAMPLE_RUN].tolist())]


def read_whole(k: int) -> bool:
    """Whether the sample of k rows is all of them: otherwise little is saved."""
    return k // _SAMPLE_RUNS < 8 * _SAMPLE_RUN


def sampled_beyond(k: int) -> NDArray[np.int64] | None:
    """The numbers of the rows that the sample has beyond the `part_of` (k) first; None where it is all k rows."""
    if read_whole(k):
        return None
    found: NDArray[np.int64] = _beyond(k)
    return found


@compared
def _beyond(k: int) -> NDArray[np.int64]:
    group = k // _SAMPLE_RUNS
    places = np.random.default_rng(SEED).integers(0, group - _SAMPLE_RUN + 1, _SAMPLE_RUNS)
    starts = np.maximum(np.arange(_SAMPLE_RUNS) * group + places, part_of(k))
    rows: NDArray[np.int64] = np.add.outer(starts, np.arange(_SAMPLE_RUN)).ravel()
    return rows


def sampled_squares(R: Array) -> NDArray[Any]:
    """The sum of squares of the sample of each of R's columns, on the host."""
    first, *others = _sample(R.shape[-2])
    squares = to_host(squares_of_columns(R[..., first, :] if others else R)).astype(np.float64, copy=False)
    for rows in others:
        squares = squares + to_host(squares_of_columns(R[..., rows, :]))
    return squares


def _sampled_exponents(R: Array) -> tuple[NDArray[np.int64], Ends, bool]:
    """Scales of R's columns from a sample of its rows; from all of R where the sample says nothing."""
    lowest = reliable(dtype_name(R.dtype), R.shape[-2])
    return exponents_from(0.5 * np.log2(sampled_squares(R)), R, lowest)


def exponents_from(log2_norms: NDArray[Any], R: Array, lowest: float) -> tuple[NDArray[np.int64], Ends, bool]:
    """Scales of R's columns from norms of a sample of their rows, their ends, and whether the sample told them. Columns
    of which it says nothing, by norms that are not beyond the `lowest`, are read as a whole, and all of R where these
    are many. Of a matrix, or of each of a stack."""
    if (found := _within(log2_norms, lowest, lambda: _are_zero(R, log2_norms))) is not None:
        return *found, True
    if R.ndim == 2:
        norms, sampled = _measured(log2_norms, lowest, R)
        return exponents(norms), None, sampled
    out = np.empty(log2_norms.shape, np.int64)
    for at in np.ndindex(*log2_norms.shape[:-1]):
        out[at] = exponents_from(log2_norms[at], R[at], lowest)[0]
    return out, None, True


def reliable(dtype: str, k: int) -> float:
    """log2 of the least norm of k rows that is known to two digits although squares that underflow are lost: all of
    them together are less than a 64th of its square."""
    return (_SUMMED[dtype] + math.log2(64 * max(1, k))) / 2


def _are_zero(R: Array, log2_norms: NDArray[Any]) -> bool:
    """Whether the columns whose squares add to 0 hold nothing else; False of those that were not read as a whole."""
    if not read_whole(R.shape[-2]):
        return False
    if R.ndim > 2:
        return not bool(((R != 0).any(axis=-2) & (log2_norms == -np.inf)).any())
    return not _any(_columns(R, log2_norms == -np.inf))


def _measured(log2_norms: NDArray[Any], lowest: float, R: Array) -> tuple[NDArray[Any], bool]:
    """The sample's norms, with those that are 0, or not reliable, taken again: of these columns alone, or of all where
    they are many, as of sparse data the sample has too few elements of any column. Whether they are the sample's."""
    unsure, whole = ~((log2_norms > lowest) & (log2_norms < _HIGHEST)), read_whole(R.shape[0])
    if not whole and _MANY * np.count_nonzero(unsure) > unsure.size:
        return _norms(R, lowest), False
    columns, norms = _columns(R, unsure), np.array(log2_norms, np.float64)
    if whole:
        norms[unsure] = _exact_norms(columns)
    else:
        norms[unsure] = _norms(columns, lowest) + 0.5 * math.log2(_share(R.shape[0]))
    return norms, True


def _norms(R: Array, lowest: float) -> NDArray[Any]:
    """log2 of the norm of each column, to two digits: one read of R, and two more of columns that are 0 or whose
    squares leave the range."""
    norms: NDArray[Any] = 0.5 * np.log2(to_host(squares_of_columns(R)), dtype=np.float64)
    unsure = ~((norms > lowest) & (norms < _HIGHEST))
    if unsure.any():
        norms[unsure] = _exact_norms(_columns(R, unsure))
    return norms


def _exact_norms(columns: Array) -> NDArray[Any]:
    """`log2_column_norms` of columns most of which are 0."""
    return log2_column_norms(columns) if _any(columns) else np.asarray(-np.inf)


def _any(X: Array) -> bool:
    """Whether an element is not 0."""
    return bool(X.any()) if isinstance(X, np.ndarray) else bool(namespace(X).any(X != 0))


def _columns(R: Array, which: NDArray[np.bool_]) -> Array:
    at = which.nonzero()[0]
    if at.size and (end := at.item(-1) + 1) - (begin := at.item(0)) == at.size:  # a view, where there is no gap
        return R[:, begin:end]
    return R.take(at, axis=1) if isinstance(R, np.ndarray) else namespace(R).take(R, from_host(at, R), axis=1)


def _share(k: int) -> float:
    """The share of k rows that the sample is."""
    return float(sum(rows.stop - rows.start for rows in _sample(k)) / max(1, k))


def _sizes(sums: Array) -> NDArray[Any]:
    """How large the checksums of each row are, in a new array; of a matrix, or of each of a stack."""
    size: NDArray[Any] = np.abs(to_host(sums))
    return size[..., 0] if size.shape[-1] == 1 else np.max(size, axis=-1, initial=0.0)


def missed_by_sample(R: Array, sums: Array, exponent: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Better exponents if a row with an outstanding checksum shows that a column was misjudged, else None.

    A row can change a column's norm by ``2**4`` only if it is so much larger than the others that its checksum,
    a signed sum of its elements, stands out (except where they cancel to one part in a thousand).
    """
    size = _sizes(sums)
    if size.size == 0 or not (largest := size.max()) < np.inf:  # as NaN is not
        return None
    # Where more than half of them are a share of the largest, so is the median, which takes longer.
    if 2 * np.count_nonzero(_SUSPICIOUS * size >= largest) > size.size + 1:
        return None
    usual = _SUSPICIOUS * middle(size)
    if largest <= usual:
        return None
    large = np.flatnonzero(size > usual)
    if large.size > 16 + R.shape[0] // 16:
        exact = exponents(_norms(R, reliable(dtype_name(R.dtype), R.shape[-2])))
    else:
        total = np.full(R.shape[1], 1 / _share(R.shape[0]))  # the sample's own norm, in units of 2^e, squared
        step = rows_per_block(R.shape[1])
        for rows in (large[at : at + step] for at in range(0, large.size, step)):
            part = scaled(in_float64(take_rows(R, rows)), np.zeros(rows.size, np.int64), exponent)
            total += to_host(squares_of_columns(part))
        exact = exponents(exponent + 0.5 * np.log2(total))
    moved = exact - exponent
    return exact if moved.size and moved.max() - moved.min() > OFF_BY else None


# Scales stay clear of both ends, so that a weight is a finite, normal float64 and two scales multiplied cannot push
# a bound's underflow term to infinity.
_LOWEST, _HIGHEST = -1000, 1020


def exponents(log2_norms: NDArray[Any]) -> NDArray[np.int64]:
    """The power of two nearest to each column norm; a zero column takes the smallest of the others.

    The octave is centred on the median norm: columns of much the same norm get the same scale, wherever it lies
    between two powers of two. (Split between two, half of them would carry half the weight of the others.)

    Parameters
    ----------
    log2_norms : (n,) array
        log2 of the columns' 2-norms, up to a common constant; -inf for a zero column.
    """
    if (found := _within(log2_norms, _LOWEST, lambda: True)) is not None:
        return found[0]
    positive = np.isfinite(log2_norms)
    usual = log2_norms[positive]
    if not usual.size:
        return np.zeros(log2_norms.shape, np.int64)
    centred = _centred(np.where(positive, log2_norms, usual.min()), middle(usual))
    return np.asarray(np.minimum(np.maximum(centred, _LOWEST), _HIGHEST).astype(np.int64))


def _within(
    log2_norms: NDArray[Any], lowest: float, are_zero: Callable[[], bool] = lambda: False
) -> tuple[NDArray[np.int64], Ends] | None:
    """`exponents` and their ends, where all norms, (..., n), are finite and beyond the lowest; else None.

    `are_zero`: whether columns without a norm are columns of zeros."""
    n, ordered = log2_norms.shape[-1], log2_norms.copy()
    if ordered.size == 0:
        return None
    ordered.sort(axis=-1)
    if ordered.ndim == 1:  # numbers take less time than arrays of one
        low, high, zeros = ordered.item(0), ordered.item(n - 1), 0
        if low == -math.inf < high and are_zero():
            zeros = int(ordered.searchsorted(-math.inf, "right"))
            low = ordered.item(zeros)
            log2_norms = np.maximum(log2_norms, low)
        half = (n + zeros) // 2
        centre = ordered.item(half) if (n - zeros) % 2 else (ordered.item(half - 1) + ordered.item(half)) / 2
        if not lowest < low <= centre <= high < _HIGHEST:  # as NaN is not
            return None
        shift = centre - round(centre)
        return np.rint(log2_norms - shift).astype(np.int64), (round(low - shift), round(high - shift))
    low, half = ordered[..., :1], n // 2
    pair = ordered[..., (n - 1) // 2 : half + 1]
    if bool((low == -np.inf).any()) and are_zero():
        zeros = np.count_nonzero(ordered == -np.inf, axis=-1, keepdims=True)
        low = np.take_along_axis(ordered, np.minimum(zeros, n - 1), axis=-1)
        low = np.where(zeros == n, 0.0, low)  # a matrix of zeros
        log2_norms, ordered = np.maximum(log2_norms, low), np.maximum(ordered, low)
        pair = np.take_along_axis(
            ordered, np.concatenate([(n + zeros - 1) // 2, (n + zeros) // 2], axis=-1) % n, axis=-1
        )
    if not ((low[..., 0] > lowest) & (ordered[..., -1] < _HIGHEST)).all():
        return None
    return _centred(log2_norms, pair.mean(axis=-1, keepdims=True)).astype(np.int64), None


def _centred(log2_norms: NDArray[Any], centre: Any) -> NDArray[Any]:
    """Rounded to whole numbers, one of which has `centre` in the middle of what is rounded to it."""
    return np.asarray(np.rint(log2_norms - (centre - np.rint(centre))))


def middle(x: NDArray[Any]) -> Any:
    """The median along the last axis, not empty; `numpy.median` takes three times as long for 2000 elements."""
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        return np.partition(x, half, axis=-1)[..., half]
    return np.partition(x, (half - 1, half), axis=-1)[..., half - 1 : half + 1].mean(axis=-1)


def equilibrated(V: Weights, exponent: NDArray[np.int64], ends: Ends = None, lift: Any = 0) -> Weights:
    """``v_j 2^(e/2 - e_j)``, e being the largest exponent: exact, because the scales are powers of two.

    The common factor keeps the checksums of large data from overflowing, and small numbers from vanishing in them.
    `ends`: the least and the largest exponent, where they are known. `lift`: of `lift_of`.
    """
    if exponent.size == 0:
        return np.asarray(np.ldexp(V, exponent[..., None]))
    if exponent.ndim == 1:
        low, high = ends or (int(exponent.min()), int(exponent.max()))
        half = _common(low, high) + lift
        return np.asarray(np.ldexp(V, (half - exponent)[:, None]))
    power = exponent.max(axis=-1, keepdims=True) // 2 - exponent
    power -= np.maximum(0, power.max(axis=-1, keepdims=True) - _HIGHEST) - lift
    # In one piece for each, as copies of them are: BLAS adds in another order where numbers lie apart.
    return np.asarray(np.ldexp(V, power[..., None], order="C"))


def _common(low: int, high: int) -> int:
    """The exponent of the factor of all weights, for columns of scales from 2^low to 2^high."""
    return high // 2 - max(0, high // 2 - low - _HIGHEST)


def smallest_weight(low: int, high: int) -> float:
    """The modulus that no weight `equilibrated` for such columns is below."""
    return math.ldexp(1.0, _common(low, high) - high)


def lift_of(R: Array, sums: Array, exponent: NDArray[np.int64], ends: Ends = None, partial: bool = False) -> Any:
    """By which power of two weights of these exponents have to be larger, so that underflow takes no digits from the
    checksum of a row of R that is not 0; None where by nothing, as nearly always.

    A row of which nothing is left in its checksum meets elements of L that could change unseen. Weights of 1 make the
    checksum of a row as large as the row, which is in the range. `sums` are those of R, or of each of a stack.
    """
    if not exponent.size:
        return None
    kind = _SINGLE if partial and dtype_name(R.dtype) == "float32" else _DOUBLE
    high = ends[1] if ends else exponent.max()
    if high < kind.precision:  # no weight is so small
        return None
    if exponent.ndim == 1:
        return _lift_of(R, sums, ends or (int(exponent.min()), int(high)), kind) or None
    found = np.zeros((*exponent.shape[:-1], 1), np.int64)
    for at in np.ndindex(*exponent.shape[:-1]):
        own = int(exponent[at].min()), int(exponent[at].max())
        found[at] = _lift_of(R[at] if R.ndim > 2 else R, sums[at], own, kind)
    return found if found.any() else None


def _lift_of(R: Array, sums: Array, ends: tuple[int, int], kind: FloatType) -> int:
    """`lift_of` for one matrix, whose checksums are summed in a type."""
    size, room = _sizes(sums), ends[0] - _common(*ends)
    largest = float(size.max(initial=0.0))
    if room <= 0 or not largest < math.inf:
        return 0
    lost = kind.smallest_normal if flushes() else kind.smallest_subnormal
    faint = np.flatnonzero(size < sum(R.shape) * lost / kind.unit_roundoff)
    if not faint.size or not np.any(to_host(take_rows(R, faint)) != 0):
        return 0
    return max(0, min(room, kind.max_exponent - _CLEAR - math.frexp(largest)[1]))


_DOUBLE, _SINGLE = FLOATS["float64"], FLOATS["float32"]
_CLEAR = 16  # powers of two between the largest checksum and the end of the range


@np.errstate(all="ignore")
def carry(R: Array, base: Weights, *, equilibrate: bool = True, partial: bool = False) -> OperandChecksum:
    """Encode a right operand: one read of R (two where the sample of its rows misjudged it).

    Parameters
    ----------
    R : (k, n) array
    base : (n, r) ndarray of float64
        Weights before equilibration.
    equilibrate : bool
    partial : bool
        As in `encoding_pass`.
    """
    if not equilibrate:
        return carried(R, from_host(base, R), partial=partial)
    return encoded_right(R, base, partial)


def encoded_right(R: Array, base: Weights, partial: bool = False) -> OperandChecksum:
    """`carry` in the caller's error state; on NumPy also of each of a stack of small matrices."""
    whole = read_whole(R.shape[-2])
    if isinstance(R, np.ndarray) and small(R):
        R = in_single(R, partial)
        if whole and R.shape[-2] * R.shape[-1] <= SQUARED:
            return _squared_once(R, base, partial)
    exponent, ends, sampled = _sampled_exponents(R)

    def weighed(exponent: NDArray[np.int64], ends: Ends = None) -> OperandChecksum:
        found = carried(R, from_host(equilibrated(base, exponent, ends), R), partial=partial)
        lift = lift_of(R, found.sums, exponent, ends, partial)
        if lift is None:
            return found
        return carried(R, from_host(equilibrated(base, exponent, ends, lift), R), partial=partial)

    first = weighed(exponent, ends)
    if whole or not sampled:  # nothing can be missed in all rows
        return first
    better = _missed(R, first.sums, exponent)
    return first if better is None else weighed(better)


def _missed(R: Array, sums: Array, exponent: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """`missed_by_sample`, of each of a stack: better exponents of all where those of one are."""
    if R.ndim == 2:
        return missed_by_sample(R, sums, exponent)
    size, found = _sizes(sums), exponent
    largest = size.max(axis=-1, keepdims=True)
    size *= _SUSPICIOUS
    usual = np.count_nonzero(size >= largest, axis=-1)
    for one in map(tuple, np.argwhere(2 * usual <= size.shape[-1] + 1).tolist()):  # of all others it finds nothing
        if (better := missed_by_sample(R[one], sums[one], exponent[one])) is not None:
            found = found.copy() if found is exponent else found
            found[one] = better
    return None if found is exponent else found


SQUARED = 1 << 12  # elements of what is squared as a whole


def _squared_once(R: Array, base: Weights, partial: bool) -> OperandChecksum:
    """`encoded_right` of NumPy's matrices all of whose rows are the sample."""
    k, squares = R.shape[-2], squares_of(R)
    norms = np.log2(np.matmul(ones(k, squares.dtype), squares), dtype=np.float64)
    norms *= 0.5
    exponent, ends, _ = exponents_from(norms, R, reliable(dtype_name(R.dtype), k))
    head = squares[..., : part_of(k), :]
    V = equilibrated(base, exponent, ends)
    found = _carried(R, V, partial, squares_times(head, V * V))
    lift = lift_of(R, found.sums, exponent, ends, partial)
    if lift is None:
        return found
    V = equilibrated(base, exponent, ends, lift)
    return _carried(R, V, partial, squares_times(head, V * V))


@compared
def ones(k: int, dtype: Any) -> Any:
    """So many ones: ``ones.dot(X)`` adds the rows of X in a third of the time of `numpy.sum`."""
    return np.ones(k, dtype)
