"""Encode, verify, locate and restore a stored matrix bit for bit, by integer checksums.

The bit pattern of an element is one word (16 or 32 bits) or, for float64, two (its 32-bit halves). For each
row, each column and each word, two sums are kept modulo 2**64:

    plain    S_i = sum_j x_ij        weighted    T_i = sum_j a_j x_ij,    as `abft_tsm2.core.ordered_sums` has it

One wrong word, off by d, moves them by exactly d and a_j d; as ``|d| < 2**32`` neither wraps around when read
as a signed number, and the quotient a_j names the place. Rows and columns are peeled in turn until all sums
agree. Plain sums alone would pair equal changes wrongly, and would take three wrong corners +d, -d, +d of a
rectangle for one wrong word in the fourth.

Only bit patterns are touched: NaN payloads, infinities and the sign of zero are data like any other.
What the array API standard lacks and is taken from NumPy and CuPy here: the view of bit patterns (through
`bit_pattern`), ``ascontiguousarray``, ``einsum``, the ``astype`` method, and sums sure to wrap around.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from abft_tsm2.arrays import FLOATS, Array, bit_pattern, dtype_name, is_column_major, is_writable, namespace, to_host
from abft_tsm2.core.ordered_sums import LONGEST
from abft_tsm2.core.ordered_sums import multipliers as _multipliers
from abft_tsm2.errors import AbftError

_Words = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.int64]

_TILE = 1 << 15  # elements summed at a time: 256 kB in 64 bits, which stays in the cache
_NARROW = 16  # rows shorter than this are summed as columns: a loop over so few costs more than it does
_ROWS, _COLUMNS = 0, 1


@dataclass(frozen=True, eq=False)
class IntegerChecksums:
    """Sums of the bit patterns of an m x n matrix, made by `integer_checksums`.

    Attributes
    ----------
    shape, itemsize : tuple of int, int
        (m, n), and the bytes per element: 2, 4 or 8.
    rows : (words, 2, m) uint64 array
        For each word (the low half first) the plain and the weighted sum of each row; in X's array library.
    columns : (words, 2, n) uint64 array
        The same of each column.
    """

    shape: tuple[int, int]
    itemsize: int
    rows: Array
    columns: Array


@dataclass(frozen=True)
class Corruption:
    """One wrong element: its place, the bit pattern it holds and the one it should hold."""

    row: int
    column: int
    found: int
    original: int


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose_storage` found; exactly one of the first four attributes is true.

    Attributes
    ----------
    clean : bool
        Matrix and checksums agree.
    corruptions : tuple of Corruption
        These elements are wrong; with them restored, every sum agrees.
    refused : str
        Something is wrong and could not be located beyond doubt; the text says what is known.
    checksum_fault : bool
        The stored checksums are wrong and the matrix is not: encode it again.
    rows, columns : tuple of int
        The rows and the columns whose sums disagree.
    """

    clean: bool
    corruptions: tuple[Corruption, ...] = ()
    refused: str = ""
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    checksum_fault: bool = False


def integer_checksums(X: Array) -> IntegerChecksums:
    """Sum the bit patterns of a matrix by rows and by columns.

    Parameters
    ----------
    X : (m, n) array
        float16, bfloat16, float32 or float64; any order or strides, empty and read-only too.

    Returns
    -------
    IntegerChecksums

    Raises
    ------
    TypeError, ValueError
        For another dtype; if X is not two-dimensional or a line has more than 2**30 elements.

    Notes
    -----
    Reads X once, in tiles; the extra memory is a few MB and the sums. No host synchronisation.

    Examples
    --------
    >>> import numpy as np
    >>> from abft_tsm2.checksum.storage import diagnose_storage, integer_checksums, restore
    >>> X = np.arange(6.0).reshape(2, 3)
    >>> sums = integer_checksums(X)
    >>> X[1, 2] = 5.000000000000001
    >>> found = diagnose_storage(X, sums)
    >>> [(c.row, c.column) for c in found.corruptions]
    [(1, 2)]
    >>> restore(X, found.corruptions)
    >>> float(X[1, 2])
    5.0
    """
    itemsize = _checked_itemsize(X)
    flip = is_column_major(X)
    if X.shape[0 if flip else 1] < _NARROW:
        flip = not flip
    patterns = bit_pattern(X)
    rows, columns = _line_sums(patterns.T if flip else patterns)
    return IntegerChecksums(tuple(X.shape), itemsize, *((columns, rows) if flip else (rows, columns)))


def diagnose_storage(X: Array, sums: IntegerChecksums) -> Diagnosis:
    """Compare a matrix with its stored checksums and locate every wrong element.

    Parameters
    ----------
    X : (m, n) array
        Any order or strides; never modified.
    sums : IntegerChecksums
        What `integer_checksums` returned when the matrix was right.

    Returns
    -------
    Diagnosis
        Restoration is proposed only if all sums agree after it; it is certain to be found where no row, or
        no column, holds two wrong elements.

    Raises
    ------
    TypeError, ValueError
        If X cannot be the matrix the sums were made of.

    Notes
    -----
    A wrong element shows in its row and its column: where only one side disagrees, a stored sum was hit.
    Faults of matrix and checksums together are refused. Peels the residual sums on the host (one sync).
    """
    _check_match(X, sums)
    now = integer_checksums(X)
    by_row, by_column = to_host(now.rows - sums.rows), to_host(now.columns - sums.columns)
    rows, columns = (tuple(np.flatnonzero(r.any(axis=(0, 1))).tolist()) for r in (by_row, by_column))
    if not rows and not columns:
        return Diagnosis(clean=True)

    patterns = bit_pattern(X)
    bits = min(8 * sums.itemsize, 32)
    words = enumerate(zip(by_row, by_column, strict=True))
    repairs = [_locate(patterns, residuals, bits, bits * w) for w, residuals in words]
    if len(certain := [repair for repair in repairs if repair is not None]) == len(repairs):
        return Diagnosis(False, _corruptions(patterns, certain), rows=rows, columns=columns)

    m, n = sums.shape
    # A line that one wrong word explains, with nothing to see across, is a coincidence either way: refuse.
    lines = [(r, n) for r in by_row] + [(c, m) for c in by_column]
    explained = any(_single(residual, bits, length)[0].size for residual, length in lines)
    if not (rows and columns) and not explained:
        return Diagnosis(False, rows=rows, columns=columns, checksum_fault=True)
    refused = (
        f"the sums of {len(rows)} of {m} rows and {len(columns)} of {n} columns differ, and no restoration "
        "makes them agree: wrong elements share rows and columns, or the stored checksums were hit too; "
        "load or compute the matrix again"
    )
    return Diagnosis(False, refused=refused, rows=rows, columns=columns)


def restore(X: Array, corruptions: Sequence[Corruption]) -> None:
    """Write the original bit patterns back into the matrix, in place.

    Parameters
    ----------
    X : (m, n) array
        The matrix that was diagnosed; writable, any order or strides.
    corruptions : sequence of Corruption
        As `diagnose_storage` proposed them.

    Raises
    ------
    ValueError, AbftError
        If X is read-only or too small; if an element has changed since. Nothing has been written then.
    """
    _checked_itemsize(X)
    if not corruptions:
        return
    m, n = X.shape
    for c in corruptions:
        if not (0 <= c.row < m and 0 <= c.column < n):
            raise ValueError(f"element ({c.row}, {c.column}) is outside the {m} x {n} matrix: diagnose it")
    patterns = bit_pattern(X)
    if not is_writable(patterns):
        raise ValueError("the matrix is read-only: restore a copy of it instead")
    xp = namespace(patterns)
    at = xp.asarray([c.row for c in corruptions]), xp.asarray([c.column for c in corruptions])
    for c, held in zip(corruptions, to_host(patterns[at]).tolist(), strict=True):
        if held not in (c.found, c.original):
            raise AbftError(
                f"element ({c.row}, {c.column}) holds {held:#x} but held {c.found:#x} when it was diagnosed; "
                "nothing was restored: diagnose the matrix again"
            )
    patterns[at] = xp.asarray([c.original for c in corruptions], dtype=patterns.dtype)


def _checked_itemsize(X: Array) -> int:
    name = dtype_name(X.dtype)
    if name not in FLOATS:
        raise TypeError(f"integer checksums are of {', '.join(FLOATS)}, not of {name}: convert it first")
    if X.ndim != 2 or max(X.shape) > LONGEST:
        raise ValueError(
            f"integer checksums are of matrices with lines of at most {LONGEST} elements, not of shape "
            f"{tuple(X.shape)}: encode its parts one by one"
        )
    return FLOATS[name].bits // 8


def _check_match(X: Array, sums: IntegerChecksums) -> None:
    itemsize = _checked_itemsize(X)
    if (tuple(X.shape), itemsize) != (sums.shape, sums.itemsize):
        raise ValueError(
            f"the checksums are of a {sums.shape} matrix with {sums.itemsize}-byte elements, this one is "
            f"{tuple(X.shape)} with {itemsize}: pass the matrix that was encoded"
        )


def _lookup(length: int) -> tuple[_Words, _Places]:
    """The multipliers in ascending order, closed by a number that is none, and their places."""
    order = np.argsort(_multipliers(length))
    return np.append(_multipliers(length)[order], np.iinfo(np.uint64).max), np.append(order, -1)


def _tiles(m: int, n: int) -> Iterator[tuple[slice, slice]]:
    width = max(1, min(n, max(_TILE // 16, _TILE // max(m, 1))))
    height = _TILE // width
    for i in range(0, m, height):
        for j in range(0, n, width):
            yield slice(i, min(i + height, m)), slice(j, min(j + width, n))


def _line_sums(patterns: Array) -> tuple[Array, Array]:
    """The sums of the rows, (words, 2, m), and of the columns, (words, 2, n)."""
    xp = namespace(patterns)
    m, n = patterns.shape
    halves = patterns.dtype.itemsize == 8
    a, b = xp.asarray(_multipliers(n)), xp.asarray(_multipliers(m))
    rows = xp.zeros((1 + halves, 2, m), dtype=xp.uint64)
    columns = xp.zeros((1 + halves, 2, n), dtype=xp.uint64)
    for i, j in _tiles(m, n):
        tile = xp.ascontiguousarray(patterns[i, j])
        words = (tile & 0xFFFFFFFF, tile >> 32) if halves else (tile.astype(xp.uint64),)
        for word, row, column in zip(words, rows, columns, strict=True):
            row[0, i] += xp.sum(word, axis=1)
            row[1, i] += xp.einsum("ij,j->i", word, a[j])
            column[0, j] += xp.sum(word, axis=0)
            column[1, j] += xp.einsum("i,ij->j", b[i], word)
    return rows, columns


def _locate(patterns: Array, residuals: tuple[_Words, _Words], bits: int, shift: int) -> tuple[_Places, _Words] | None:
    """Flat places of the elements with this word wrong, and what to XOR there; None if uncertain."""
    mask = np.uint64((1 << bits) - 1)
    # Rows first always succeeds where no row holds two wrong words; columns first, where no column does.
    for first in (_ROWS, _COLUMNS):
        peeled = _peel(residuals, bits, first)
        if peeled is not None:
            places, changes = peeled
            word = (_gather(patterns, places) >> np.uint64(shift)) & mask
            original = word - changes
            if np.all(original <= mask):  # below 0 has wrapped around and is large too
                return places, (word ^ original) << np.uint64(shift)
    return None


def _peel(residuals: tuple[_Words, _Words], bits: int, side: int) -> tuple[_Places, _Words] | None:
    """Flat places and changes of the wrong words that explain all residual sums, or None."""
    rows, columns = left = residuals[0].copy(), residuals[1].copy()
    lengths = columns.shape[1], rows.shape[1]
    places, changes = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    unexplained = _open_lines(left)
    while unexplained:
        lines, at, change = _single(left[side], bits, lengths[side])
        i, j = (lines, at) if side == _ROWS else (at, lines)
        for sums, line, other, length in (rows, i, j, lengths[0]), (columns, j, i, lengths[1]):
            np.subtract.at(sums[0], line, change)
            np.subtract.at(sums[1], line, change * _multipliers(length)[other])
        places.append(i * lengths[_ROWS] + j)
        changes.append(change)
        before, unexplained = unexplained, _open_lines(left)
        if unexplained >= before:  # nothing found, or nothing true: a true repair closes lines and opens none
            return None
        side = _COLUMNS - side
    where, inverse = np.unique(np.concatenate(places), return_inverse=True)
    total = np.zeros(where.size, np.uint64)
    np.add.at(total, inverse, np.concatenate(changes))
    return where[total != 0], total[total != 0]


def _open_lines(residuals: tuple[_Words, _Words]) -> int:
    return sum(int(np.count_nonzero(r.any(axis=0))) for r in residuals)


def _single(residual: _Words, bits: int, length: int) -> tuple[_Places, _Places, _Words]:
    """The lines whose two residual sums one wrong word explains: line, place in the line, change."""
    lines = np.flatnonzero(residual[0])
    change, moment = residual[:, lines].view(np.int64)
    size, reach = np.abs(change).view(np.uint64), np.abs(moment).view(np.uint64)
    multipliers, places = _lookup(length)
    multiplier = reach // size
    at = np.searchsorted(multipliers, multiplier)
    ok = (size < 1 << bits) & ((change < 0) == (moment < 0))
    ok &= (multiplier * size == reach) & (multipliers[at] == multiplier)
    return lines[ok], places[at[ok]], change[ok].view(np.uint64)


def _gather(patterns: Array, places: _Places) -> _Words:
    xp = namespace(patterns)
    i, j = np.divmod(places, max(patterns.shape[1], 1))
    return to_host(patterns[xp.asarray(i), xp.asarray(j)]).astype(np.uint64)


def _corruptions(patterns: Array, repairs: Sequence[tuple[_Places, _Words]]) -> tuple[Corruption, ...]:
    places, flips = (np.concatenate(parts) for parts in zip(*repairs, strict=True))
    elements, inverse = np.unique(places, return_inverse=True)
    found = _gather(patterns, elements)
    original = found.copy()
    np.bitwise_xor.at(original, inverse, flips)
    i, j = np.divmod(elements, patterns.shape[1])
    return tuple(map(Corruption, i.tolist(), j.tolist(), found.tolist(), original.tolist()))
