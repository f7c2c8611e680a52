"""Sums of the words of a matrix by rows, columns and diagonals: three reads to make, two on a GPU, and only additions.

The lines of the matrix as it lies in memory are cut into words of eight bytes, or of one element where their length is
no multiple of that, and the words are added as unsigned integers modulo 2^64. Any change of one word shows in its row
and in its column. One wrong word, off by d, moves both sums by d, and the sums of as many as lie in one line tell which
they are: these are restored bit for bit. `abft_tsm2.checksum.storage` restores more, with weighted sums that take ten
times as long to make.

Rows of equal sums that change places leave the sums of rows and columns as they are: those of the identity, say. The
diagonals see them: the columns of the same memory where it is read in rows of p words, p a prime number above the rows
and the columns of the matrix. A change in two rows that leaves the columns' sums is d in one and -d in the other. In
the diagonals it is d less d moved by s places modulo p, and that is 0 only where d is the same s places on. All places
are reached in such steps, those behind the row among them, where d is 0. The same holds of two columns with equal and
opposite changes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from abft_tsm2.arrays import Array, bit_pattern, is_column_major, is_cupy, is_numpy, namespace, to_host
from abft_tsm2.checksum.device.words import word_sums, words_differ
from abft_tsm2.core.kept import compared

_Sums = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class WordSums:
    """Sums of the words of a matrix.

    Attributes
    ----------
    transposed : bool
        Whether the lines are the columns of the matrix: it is stored by columns.
    rows, columns : uint64 arrays, where the matrix is
        Of the lines in memory, and across them.
    diagonals : uint64 array
        Of the words of which the numbers are equal modulo p.
    """

    transposed: bool
    rows: Array
    columns: Array
    diagonals: Array

    @classmethod
    def of(cls, X: Array) -> WordSums:
        """Those of a matrix that is contiguous by rows or by columns. No host synchronisation."""
        transposed = is_column_major(X)
        words = _words(X.T if transposed else X)
        if _by_kernel(words):
            return cls(transposed, *word_sums(words, words.shape[1]), word_sums(words, _diagonal_count(words))[1])
        return cls(transposed, _sums(words, 1), _sums(words, 0), _diagonals(words))

    @property
    def nbytes(self) -> int:
        """Of all the sums."""
        return sum(int(side.nbytes) for side in self._sides())

    def _sides(self) -> list[Array]:
        return [self.rows, self.columns, self.diagonals]

    def differ(self, X: Array) -> Array:
        """Whether the matrix, in the same layout, has other words. A boolean where the matrix is, so that a GPU's can
        be awaited later."""
        words = _words(X.T if self.transposed else X)
        if _by_kernel(words):
            return words_differ(words, self.columns, self.rows) | words_differ(words, self.diagonals)
        # A change in one row shows in columns, and one in a column in diagonals. Whether the rows' sums were hit:
        off = _sums(self.rows, 0) != _sums(self.columns, 0)
        return off | (_sums(words, 0) != self.columns).any() | (_diagonals(words) != self.diagonals).any()

    def damaged(self, X: Array) -> bool:
        """Whether it is these sums that changed, and not the matrix: a change of it has the same total on all sides.
        Three reads."""
        off = self._off(X)
        totals = {int(np.sum(side, dtype=np.uint64)) for side in off}
        return len(totals) > 1 and not all(side.any() for side in off)

    def lines(self, X: Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rows and columns of the matrix of which the words differ. Three reads."""
        rows, words = map(np.flatnonzero, self._off(X)[:2])
        across = X.shape[0 if self.transposed else 1] // max(1, self.columns.size)  # elements of a word
        columns = (words[:, None] * across + np.arange(across)).ravel()
        found = tuple(rows.tolist()), tuple(columns.tolist())
        return found[::-1] if self.transposed else found

    def restored(self, X: Array) -> tuple[Array, Any, Any] | None:
        """A copy of the matrix with the bits that it had, and the rows and columns of what was wrong; None where the
        sums do not tell. Reads the matrix six times."""
        xp = namespace(X)
        lines = xp.asarray(X.T if self.transposed else X, copy=True, order="C")
        words = _words(lines)
        found = _located(*self._off(X)[:2])
        if found is None:
            return None
        i, j, change = found
        at = xp.asarray(i), xp.asarray(j)
        held = to_host(words[at]).astype(np.uint64)
        # narrower words do not wrap around: what leaves their range was no single change
        original = held - change
        if words.dtype.itemsize < 8 and (original >> np.uint64(8 * words.dtype.itemsize)).any():
            return None
        words[at] = xp.asarray(original.astype(words.dtype))
        share = words.dtype.itemsize // lines.dtype.itemsize
        places = np.flatnonzero(np.ascontiguousarray(held ^ original).astype(words.dtype).view(f"u{lines.itemsize}"))
        row, column = i[places // share], j[places // share] * share + places % share
        matrix = lines.T if self.transposed else lines
        if bool(self.differ(matrix)):  # what explains the sums of rows and columns is not what happened
            return None
        return (matrix, column, row) if self.transposed else (matrix, row, column)

    def _off(self, X: Array) -> list[_Sums]:
        """By what the sums are off, on the host."""
        return [to_host(now) - to_host(was) for now, was in zip(WordSums.of(X)._sides(), self._sides(), strict=True)]


def sums_of_words(X: npt.NDArray[Any]) -> _Sums:
    """By lines in memory, and behind these by diagonals; of a matrix whose rows or columns have no gaps within them.

    Any change of two words, or of one, shows. In two lines it moves both of their sums; in one it moves the sums of two
    diagonals, for no two words of a line are in the same.
    """
    words = _words(X.T if is_column_major(X) else X)
    return np.concatenate((_sums(words, 1), _diagonals(words)))


def contiguous(X: Array) -> Array:
    """X, or a copy of it where it is contiguous neither by rows nor by columns."""
    flags = X.flags
    if flags.c_contiguous or flags.f_contiguous:
        return X
    return namespace(X).asarray(X, copy=True, order="C")


def _words(lines: Array) -> Array:
    """The words of contiguous rows: a view."""
    if 0 not in lines.shape and lines.shape[1] * lines.dtype.itemsize % 8 == 0 and (is_numpy(lines) or is_cupy(lines)):
        return lines.view(np.uint64)
    return bit_pattern(lines)


def _by_kernel(words: Array) -> bool:
    return is_cupy(words) and words.dtype.itemsize == 8 and words.size > 0


def _sums(words: Array, axis: int) -> Array:
    return words.sum(axis=axis, dtype=np.uint64)


def _diagonals(words: Array) -> Array:
    """Sums of the words of which the numbers are equal modulo a prime number above the rows and the columns."""
    line, each = _diagonal_count(words), words.reshape(-1)
    whole = each.size // line * line
    sums = _sums(each[:whole].reshape(-1, line), 0)
    sums[: each.size - whole] += each[whole:]
    return sums


def _diagonal_count(words: Array) -> int:
    """How many diagonals there are."""
    return prime_above(max(words.shape))


def prime_above(n: int) -> int:
    """The next prime number."""
    return int(_prime_above(n)[0])


@compared
def _prime_above(n: int) -> Any:
    found = next(p for p in itertools.count(n + 1) if p > 1 and all(p % q for q in range(2, math.isqrt(p) + 1)))
    return np.array([found])


def _located(by_row: _Sums, by_column: _Sums) -> tuple[Any, Any, _Sums] | None:
    """Rows, columns and changes of the wrong words that explain what the sums are off by, or None."""
    i, j = np.flatnonzero(by_row), np.flatnonzero(by_column)
    if i.size == 1 and np.sum(by_column[j], dtype=np.uint64) == by_row[i[0]]:
        return np.repeat(i, j.size), j, by_column[j]
    if j.size == 1 and np.sum(by_row[i], dtype=np.uint64) == by_column[j[0]]:
        return i, np.repeat(j, i.size), by_row[i]
    return None
