"""Whether a matrix is still what was encoded: all that was computed from it once more, evidence and repairs, rests on
that.

Where it is not shown to be the same, evidence clears nothing and a repair is not verified. Its weighted sums by rows
and by columns show a change that counts, but where lines of very different size share a sum: an element can be lost in
both of its sums there. Of such a matrix a fingerprint of its bits is kept as well, which misses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, FloatType, float_type, from_host, namespace, to_host
from abft_tsm2.checksum.bounds import changed_bound
from abft_tsm2.core.kept import compared
from abft_tsm2.linalg.encode import Bits, MatrixChecksums, sums, wide
from abft_tsm2.linalg.line_check import LineCheck, column_norms
from abft_tsm2.linalg.lu_checks import Sight, blind_factor

AT_ONCE = 256  # lines whose norms are computed at once
ROUNDED = 1.6  # by how much weights are further apart than the norms they undo: powers of two, times 1 to 1.5
UNDECIDED = (
    "a was read once more after a suspicion, and its checksums do not show that it is still what was encoded: pass it "
    "once more, or scale its rows and columns to similar sizes"
)


class Operand(Enum):
    """What is known of a matrix that was encoded."""

    SAME = "it is what was encoded"
    CHANGED = "it is not"
    UNKNOWN = "its sums do not show which"


class Compared(NamedTuple):
    """A matrix beside what was encoded of it.

    Attributes
    ----------
    operand : Operand
    sums : list
        Rows whose sums differ, and columns; each with the sums as they are now. Where the matrix is the same, it is the
        sums that were wrong.
    """

    operand: Operand
    sums: list[tuple[Any, Array]]


def encoded(A: Array) -> MatrixChecksums:
    """The checksums of A; with its fingerprint where sums alone would not show that it has changed."""
    e = MatrixChecksums.of(A)
    if e.spread <= _evenly(float_type(A), tuple(A.shape)) or sees_changes(A, e):
        return e
    bits = Bits.of(A, e.v, e.w)
    return replace(e, S=sums(A, e.v), Z=sums(A.T, e.w), bits=bits)  # sums that are not older than it


@compared
def _evenly(kind: FloatType, shape: tuple[int, ...]) -> Any:
    """How far norms may be apart, as a power of two, for sums to show all changes that count: of an element of row i,
    ``changed_bound`` of its sum, whose elements are at most 2^spread times the largest of the row."""
    longest, terms = max(shape), min(shape)
    if not terms:
        return np.array(math.inf)
    return np.array(
        math.log2(blind_factor(kind, terms, longest) / changed_bound(math.sqrt(longest), longest)) - ROUNDED
    )


def sees_changes(A: Array, e: MatrixChecksums) -> bool:
    """Whether the sums of A show every change of an element that counts: one that `Sight` does not allow."""
    m, n = A.shape
    with np.errstate(all="ignore"):
        bounds = changed_bound(e.row_norms, n), changed_bound(e.column_norms, m)
        sight = Sight.through(float_type(A), (m, n), (e.w, e.v), (e.row_sizes, e.column_sizes), bounds)
        return sight.all_is_seen() or not sight.blind()[0].any()


def compare(A: Array, e: MatrixChecksums) -> Compared:
    """Compare A with what was encoded of it. Reads A twice, or thrice."""
    found = differing_sums(A, e)
    rows, columns = (lines.size > 0 for lines, _ in found)
    if rows and columns:
        return Compared(Operand.CHANGED, found)
    if e.bits is not None:
        return Compared(Operand.SAME if e.bits.same(A) else Operand.CHANGED, found)
    if rows or columns:
        return Compared(Operand.SAME if _other_side_sees(e, found, int(columns)) else Operand.UNKNOWN, found)
    even = e.spread <= _evenly(float_type(A), tuple(A.shape)) or sees_changes(A, e)
    return Compared(Operand.SAME if even else Operand.UNKNOWN, found)


def moved(kept: Array, again: Array, lines_of: Callable[[Any], Array]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Lines whose sum is not what it was, by more than another order of addition explains; mostly the same bits come
    out. `lines_of`: the numbers that are added up for some lines, a column for each."""
    far = np.flatnonzero(~to_host(again == kept))
    good = [far[:0] == far[:0]]
    for at in range(0, far.size, AT_ONCE):
        some = far[at : at + AT_ONCE]
        numbers, place = lines_of(some), from_host(some, kept)
        residual = namespace(kept).take(again - kept, place)
        good.append(to_host(LineCheck.of(residual, changed_bound(column_norms(numbers), numbers.shape[0])).ok))
    lines: np.ndarray[Any, np.dtype[np.int64]] = far[~np.concatenate(good)]
    return lines


def differing_sums(A: Array, encoding: MatrixChecksums) -> list[tuple[np.ndarray[Any, np.dtype[np.int64]], Array]]:
    """Rows of A whose sums are not those that were taken, and columns; each with the sums as they are now."""
    found = []
    for X, weight, kept in ((A, encoding.v, encoding.S), (A.T, encoding.w, encoding.Z)):
        again = sums(X, weight)

        def weighted(lines: Any, X: Array = X, weight: Array = weight) -> Array:
            return wide(namespace(X).take(X, from_host(lines, X), axis=0)).T * weight[:, None]

        found.append((moved(kept, again, weighted), again))
    return found


def _other_side_sees(e: MatrixChecksums, found: list[tuple[Any, Array]], side: int) -> bool:
    """Whether a change of A that moves sums of this side alone (0: of rows) as much as they have moved would have moved
    those of the other side. If d_j are the changes of a row's elements, one of them has ``|v_j d_j|`` of at least an
    n-th of what the sum has moved by; w_i d_j has to be beyond the bound of its column, whichever it is."""
    lines, again = found[side]
    before, own, across = (e.S, e.w, e.v) if side == 0 else (e.Z, e.v, e.w)
    norms = to_host(e.column_norms if side == 0 else e.row_norms)
    with np.errstate(all="ignore"):
        moved = np.abs(to_host(again) - to_host(before))[lines] / norms.size
        hidden = np.max(np.abs(to_host(across)) * changed_bound(norms, int(before.shape[0])), initial=0.0)
        return bool(np.all(moved * np.abs(to_host(own))[lines] > hidden))
