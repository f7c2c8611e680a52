"""The ordered sum of the bits of a line: what tells whether a matrix is still the one that was encoded.

The bit pattern of an element is one word, of 16 or 32 bits, or, for float64, two: its halves, the low one first. For
each line and each word the sum is, modulo 2**64,

    T_i = sum_j a_j x_ij,    a_j odd, < 2**31, all different, and of the place j in the line alone

One wrong word, off by d, moves it by a_j d, which is not 0 as ``|d| < 2**32``. Two words that change places move it by
``(a_j - a_k)(x_ij - x_ik)``, which is not 0 either: ``|.| < 2**63``. So is any change of one or of two words seen;
what is left are changes of more that cancel with these multipliers, which have no order. A plain sum sees no order at
all, and multipliers of whole 64-bit words do not see x and -x change places.

`multipliers` and `ordered_sums` are the definition, for arrays of all libraries; the weighted sums of
`abft_tsm2.checksum.storage` are the same numbers, of rows and of columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from abft_tsm2.arrays import Array, bit_pattern, namespace
from abft_tsm2.core.kept import compared

LONGEST = 1 << 30  # there are no more odd numbers below 2**31
MIX = (0x2C1B3C6D, 0x297A2D39, 0x3C6EF373)  # any odd numbers would do, but stored sums depend on these
START = 0x1B873593
_FEW = 1 << 13  # elements for which `dot` takes less time than `einsum`, which is slow to begin
_HALF = np.uint64(32)


def multipliers(length: int) -> npt.NDArray[np.uint64]:
    """Different odd numbers below 2**31 in no order: computed, not drawn, so no library's version matters."""
    made: npt.NDArray[np.uint64] = _multipliers(length)
    return made


@partial(compared, most=1 << 28)  # to make them takes ten times as long as to read a line of them
def _multipliers(length: int) -> npt.NDArray[np.uint64]:
    x = (np.arange(length, dtype=np.uint64) + np.uint64(START)) % LONGEST
    for odd in MIX:  # both steps permute the numbers below 2**30, so all stay different
        x = x * np.uint64(odd) % LONGEST
        x ^= x >> np.uint64(15)
    return 2 * x + 1


def ordered_sums(lines: Array) -> Array:
    """The ordered sums of the rows of a matrix.

    Parameters
    ----------
    lines : (p, q) array
        float16, bfloat16, float32 or float64; any strides. q is at most 2**30.

    Returns
    -------
    sums : (words, p) array of uint64
        One sum for each word of an element, the low one first; in the same library, where that has bit patterns.

    Examples
    --------
    >>> import numpy as np
    >>> from abft_tsm2.core.ordered_sums import ordered_sums
    >>> X = np.arange(6.0).reshape(2, 3)
    >>> before = ordered_sums(X)
    >>> X[1, [0, 2]] = X[1, [2, 0]]
    >>> (ordered_sums(X) != before).any(axis=0).tolist()
    [False, True]
    """
    if isinstance(lines, np.ndarray):
        return _on_numpy(lines, multipliers(lines.shape[1]))
    xp = namespace(lines)
    patterns = bit_pattern(xp.asarray(lines, copy=True))
    xp = namespace(patterns)
    a = xp.asarray(multipliers(lines.shape[1]))
    words = _halves(patterns) if patterns.dtype.itemsize == 8 else (patterns.astype(np.uint64),)
    return xp.stack([(word * a).sum(axis=1, dtype=np.uint64) for word in words])


def _halves(patterns: Any) -> tuple[Any, Any]:
    return patterns & np.uint64(0xFFFFFFFF), patterns >> _HALF


def _on_numpy(lines: npt.NDArray[Any], a: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    width = lines.itemsize
    if width < 8:
        return _weighted(lines.view(f"u{width}").astype(np.uint64), a)[None]
    x = lines.view(np.uint64)
    sums = np.empty((2, x.shape[0]), np.uint64)
    low, high = sums
    high[...] = _weighted(x >> _HALF, a)
    # sum a_j x_j = low + 2**32 high: the low halves need no pass of their own
    np.subtract(_weighted(x, a), high << _HALF, out=low)
    return sums


def _weighted(x: npt.NDArray[np.uint64], a: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``x a`` modulo 2**64."""
    sums: npt.NDArray[np.uint64] = x.dot(a) if x.size <= _FEW else np.einsum("ij,j->i", x, a)
    return sums
