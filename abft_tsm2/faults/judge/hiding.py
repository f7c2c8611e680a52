"""The probability that a weighted sum with random weights hides a change, as docs/campaigns.rst states it.

The weights of a line are c_j v_j, c_j a power of two and v_j = s_j (1 + p_j / 4P), P of the n signs s_j being +1: the
places p_j of these are 0, 2, ..., 2P - 2 in a random order, those of the others so many of 1, 3, ..., 2P - 1, drawn. A
change delta of its elements is hidden where |sum_j c_j v_j delta_j| is within the limit of the line. With
x_j = c_j delta_j that has the probability

- 0 for one element that would have been found,
- for two, the share of the pairs of places p != p' for which |s (1 + p / 4P) x_1 + s' (1 + p' / 4P) x_2| <= limit:
  about 2 limit / |x| where x_1 = -x_2, and 0 where |x| > 2P limit;
- for more, erf(limit / sqrt(2 * 19/12 * sum_j x_j^2)): the sum of many terms of random sign is nearly normal, and 19/12
  is the mean of v_j^2.

Lines that were changed in the same places, as all lines are where two columns change places, have the same weights. As
soon as three of them show it, the columns are put right in all lines: so they are hidden together, with the probability
of the line that shows it third best. Others are hidden independently.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[Any]]
GRID = 1 << 22  # different magnitudes of weights: numbers of float32 in [1, 1.5)
COMPLETED = 3  # lines that show a change of the same columns: then these are put right in all lines
MEAN_SQUARE = 19 / 12  # of a number drawn from [1, 1.5)


def require_weights(v: Numbers) -> Numbers:
    """The powers of two c_j of weights, which are to be as documented.

    Raises
    ------
    ArithmeticError
        If magnitudes are not in [1, 1.5) but for a power of two, are no numbers of float32, or are more often equal
        than they have to be.
    """
    mantissa, exponent = np.frexp(abs(v))
    magnitude = 2 * mantissa
    if not ((magnitude >= 1) & (magnitude < 1.5)).all():
        raise ArithmeticError(
            f"weights from {magnitude.min():.6g} to {magnitude.max():.6g}, scales aside: not [1, 1.5)"
        )
    if (magnitude != magnitude.astype(np.float32)).any():
        raise ArithmeticError("weights that are no numbers of float32")
    _, times = np.unique(magnitude, return_counts=True)
    if times.max(initial=0) > -(-v.size // GRID):
        raise ArithmeticError(f"{times.max()} of {v.size} weights are of one magnitude")
    return np.asarray(np.ldexp(1.0, exponent - 1))


def probability(x: Numbers, limit: float, n: int) -> float:
    """That a line hides these changes, each times its power of two, of which one would have been found alone.

    Examples
    --------
    >>> probability(np.array([1.0, -1.0]), 0.02, 64), probability(np.array([1.0, -1.0]), 0.01, 64)
    (0.027777777777777776, 0.0)
    """
    if x.size < 2 or not np.isfinite(x).all() or not math.isfinite(limit):  # what is not finite is never right
        return 0.0
    if x.size > 2:
        return math.erf(limit / math.sqrt(2 * MEAN_SQUARE * float(x @ x)))
    n = min(n, GRID)  # beyond that magnitudes occur again and again
    plus = min(n, (n + math.isqrt(n - 1) + 2) // 2)
    minus, slots = n - plus, np.arange(2 * plus)
    one, other = sorted(map(float, x), key=abs)
    pairs = np.zeros((2, 2))  # of signs: pairs of places of those signs, all being taken
    for same in (True, False):  # (1 + p' / 4P) other is to be within `limit` of -+(1 + p / 4P) one
        middle = (1 + slots / (4 * plus)) * one * (-1.0 if same else 1.0)
        ends = np.sort([((middle + side * limit) / other - 1) * 4 * plus for side in (-1, 1)], axis=0)
        low, high = np.ceil(ends[0]).clip(0, slots.size), np.floor(ends[1]).clip(-1, slots.size - 1)
        for sign in (0, 1):
            odd = (slots + (not same)) % 2  # of p'
            count = np.maximum((high - odd) // 2 - np.ceil((low - odd) / 2) + 1, 0)
            itself = same & (low <= slots) & (slots <= high)
            mine = slots % 2 == sign
            pairs[sign, sign if same else 1 - sign] = (count - itself)[mine].sum()
    taken = minus / plus  # a place of a negative weight
    both = taken * (minus - 1) / max(plus - 1, 1)
    return float((pairs * [[1, taken], [taken, both]]).sum()) / (n * (n - 1))


def chance(lines: Numbers, places: Numbers, x: Numbers, alone: Numbers, limits: Numbers, n: int) -> float | None:
    """That changes stay hidden in one of the lines at least; None where none of them would have been found alone.

    Parameters
    ----------
    lines, places : (c,) arrays of int
        The line of each changed element, and its place there; lines in ascending order.
    x : (c,) array
        By how much it was changed, times its power of two.
    alone : (c,) array
        By how much it alone moves the sum of its line.
    limits : (c,) array
        Of its line.
    n : int
        Elements of a line.
    """
    starts = np.flatnonzero(np.diff(lines, prepend=-1))
    ends = np.append(starts[1:], lines.size)
    largest = np.nan_to_num(np.maximum.reduceat(alone / limits, starts), nan=np.inf)
    alike: dict[bytes, list[int]] = {}
    for line in np.argsort(-largest)[: int((largest > 1).sum())].tolist():  # those that show most come first
        alike.setdefault(places[starts[line] : ends[line]].tobytes(), []).append(line)
    if not alike:
        return None
    shown = 1.0
    for group in alike.values():
        line = group[min(len(group), COMPLETED) - 1]
        shown *= 1 - probability(x[starts[line] : ends[line]], float(limits[starts[line]]), n)
    return 1 - shown
