"""The judge of factorisations and solutions, which does not believe the report.

What is returned is judged by its backward error, computed with less rounding than it holds, against that of the same
call without a fault. Factors with multipliers above 1, or with pivots that are none, count as infinitely wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from abft_tsm2 import Report, Status
from tests.lu_matrices import Matrix, backward_error, largest_multiplier, order, product_error, unit, unpack

MULTIPLIER = 1 + 1e-3
"""max|l|: a row that was chosen among equals may have been a little smaller."""

ESCAPED, FAR = 20.0, 1000.0
"""How many times the error without a fault is too much, and how many far too much."""

OUTCOMES = ("repaired", "harmless", "refused", "escaped20", "escaped1000", "crashed")


def lu_error(a: Matrix, factors: tuple[Matrix, Any]) -> float:
    """Backward error of (lu, piv); infinite for what are no factors of partial pivoting."""
    return backward_error(a, *factors) if largest_multiplier(factors[0]) <= MULTIPLIER else float("inf")


def cholesky_error(a: Matrix, factor: Matrix) -> float:
    """Backward error of a lower triangle, by what it is multiplied with its transpose."""
    return product_error(a, np.tril(factor), np.tril(factor).T) if factor.shape == a.shape else float("inf")


def solution_error(a: Matrix, x: Matrix, b: Matrix) -> float:
    """max|b - A x| / max(|A||x| + |b|), in the next wider type; infinite where x is not finite."""
    if x.shape != b.shape or not np.isfinite(x).all():
        return float("inf")
    wide = np.longdouble if np.result_type(a, b) == np.float64 else np.float64
    a, x, b = (y.astype(wide) for y in (a, x, b))
    with np.errstate(over="ignore", invalid="ignore"):
        size = float((abs(a) @ abs(x) + abs(b)).max(initial=0))
        residual = float(abs(b - a @ x).max(initial=0))
    return residual / size if residual else 0.0


def ratio(error: float, without_fault: float, dtype: Any) -> float:
    """How many times larger an error is than without a fault, one unit roundoff at least; NaN never is small."""
    times = error / max(without_fault, unit(dtype))
    return times if np.isfinite(times) else float("inf")


def outcome(times: float | None, report: Report) -> str:
    """What became of a fault: `times` is the ratio of what was returned, None where nothing was.

    A result whose report says that it may not be used is refused as well.
    """
    if times is None or not report.ok:
        return "refused"
    if not times <= ESCAPED:
        return "escaped20" if times <= FAR else "escaped1000"
    return "harmless" if report.status is Status.CLEAN else "repaired"


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
