"""Whether pivots are as good as others; `abft_tsm2.faults.judge.factor_oracle` judges the factors."""

from __future__ import annotations

from typing import Any

import numpy as np

from abft_tsm2.faults.judge.factor_oracle import Matrix, order, unit, unpack


def same_pivots(lu: Matrix, piv: Any, other: Any) -> bool:
    """Whether pivots are the others, or differ first where two rows tie but for rounding.

    Row i of a column that was eliminated stands in L as l_ip: the other's choice was as good where |l| is 1 but for
    gamma (|L||U|) / |pivot| (Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 9.3).
    """
    piv, other = np.asarray(piv), np.asarray(other)
    if np.array_equal(piv, other):
        return True
    m, first = lu.shape[0], int((piv != other).argmax())
    chosen = order(other[: first + 1], m)[first]
    place = int(np.flatnonzero(order(piv, m) == chosen)[0])
    lower, upper = (y.astype(np.float64) for y in unpack(lu))
    pivot, size = abs(upper[first, first]), float((abs(lower[first:]) @ abs(upper[:, first])).max())
    return bool(pivot * (1 - abs(lower[place, first])) <= (first + 16) * unit(lu.dtype) * size)
