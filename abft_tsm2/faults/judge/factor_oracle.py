"""The oracle of factorisations and solutions: backward errors, computed with less rounding than they hold.

It shares no code with the checks, and it does not believe the report. Factors with multipliers above 1, or with pivots
that are none, count as infinitely wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Matrix = np.ndarray[Any, np.dtype[Any]]
MULTIPLIER = 1 + 1e-3
"""max|l|: a row that was chosen among equals may have been a little smaller."""

ESCAPED = 20.0
"""How many times the error without a fault is too much."""


LARGE, ROWS = 2000, 200
"""Rows of factors above which some of them are judged, and how many: all would take longer than the factorisation."""


def unit(dtype: Any) -> float:
    """Unit roundoff."""
    return float(np.finfo(dtype).eps) / 2


def valid_pivots(piv: Any, m: int, count: int) -> bool:
    """Whether `count` pivots are what LAPACK may give: row i was exchanged with itself or one below it."""
    piv = np.asarray(piv)
    if piv.shape != (count,) or not np.issubdtype(piv.dtype, np.integer):
        return False
    return bool(((piv >= np.arange(count)) & (piv < m)).all())


def order(piv: Any, m: int) -> Matrix:
    """Which row of A is row i of P A."""
    rows = np.arange(m)
    for i, p in enumerate(np.asarray(piv).tolist()):
        rows[i], rows[p] = rows[p], rows[i]
    return rows


def unpack(lu: Matrix) -> tuple[Matrix, Matrix]:
    """L and U of packed factors."""
    m, n = lu.shape
    lower = np.tril(lu[:, : min(m, n)], -1)
    lower[np.arange(min(m, n)), np.arange(min(m, n))] = 1
    return lower, np.triu(lu[: min(m, n)])


def largest_multiplier(lu: Matrix) -> float:
    """max|l| below the diagonal; at most 1 but for rounding where the pivots are right, NaN if there is one."""
    with np.errstate(invalid="ignore"):  # of a NaN that signals
        return float(abs(np.tril(lu[:, : min(lu.shape)], -1).astype(np.float64)).max(initial=0.0))


def backward_error(a: Matrix, lu: Matrix, piv: Any, rows: Any = slice(None), *, by_lines: bool = False) -> float:
    """max|PA - LU| / max(|L||U|), of some rows; infinite where factors are not finite or pivots are none.

    `by_lines`: as in `product_error`."""
    m, n = a.shape
    if lu.shape != a.shape or not valid_pivots(piv, m, min(m, n)):
        return float("inf")
    lower, upper = unpack(lu)
    return product_error(a[order(piv, m)[rows]], lower[rows], upper, by_lines=by_lines)


def product_error(x: Any, left: Any, right: Any, *, by_lines: bool = False) -> float:
    """max|X - L R| / max(|L||R|), with an error far below the unit roundoff of the operands' type.

    `by_lines`: with rows in units of the largest element of L's row, columns in units of R's column. An error counts by
    what it is beside its own row and column then, however small these are beside others.

    Products of float32 are computed in float64. Those of float64 are split: of operands scaled to 1 the first `bits`
    bits are multiplied exactly, since 2 `bits` and those of the sum fit into 53; what the rest adds, rounding moves by
    2^-`bits` of a unit roundoff.
    """
    exact = np.result_type(x, left, right) == np.float64
    with np.errstate(invalid="ignore"):  # of a NaN that signals
        x, left, right = (y.astype(np.float64) for y in (x, left, right))
    if 0 in x.shape:
        return 0.0
    if not all(np.isfinite(y).all() for y in (x, left, right)):
        return float("inf")
    with np.errstate(all="ignore"):
        rows = np.frexp(abs(left).max(1, initial=0))[1][:, None]
        left, x = np.ldexp(left, -rows), np.ldexp(x, -rows)
        columns = np.frexp(np.maximum(abs(right).max(0, initial=0), abs(x).max(0)))[1]
        right, x = np.ldexp(right, -columns), np.ldexp(x, -columns)
        back = 0 if by_lines else rows + columns - (rows.max() + columns.max())
        size = float(np.ldexp(abs(left) @ abs(right), back).max())
        if exact:
            bits = (53 - left.shape[1].bit_length()) // 2
            shift = 1.5 * 2.0 ** (52 - bits)  # adding it rounds to multiples of 2^-bits
            high_left, high_right = (left + shift) - shift, (right + shift) - shift
            residual = x - high_left @ high_right
            residual -= high_left @ (right - high_right) + (left - high_left) @ right
        else:
            residual = x - left @ right
        largest = float(np.ldexp(abs(residual), back).max())
        if largest == 0:
            return 0.0
        error = largest / size if size else float("inf")
    return error if np.isfinite(error) else float("inf")


# ---- the results of calls ------------------------------------------------------------------------------------------


def lu_error(a: Matrix, factors: tuple[Matrix, Any], *, by_lines: bool = False) -> float:
    """Backward error of (lu, piv); infinite for what are no factors of partial pivoting. Of large ones `ROWS` rows.
    `by_lines`: as in `product_error`."""
    rows = slice(None) if len(a) <= LARGE else np.linspace(0, len(a) - 1, ROWS).astype(int)
    if not largest_multiplier(factors[0]) <= MULTIPLIER:
        return float("inf")
    return backward_error(a, *factors, rows, by_lines=by_lines)


def cholesky_error(a: Matrix, factor: Matrix, *, by_lines: bool = False) -> float:
    """Backward error of a lower triangle, by what it is multiplied with its transpose. `by_lines`: as in
    `product_error`."""
    if factor.shape != a.shape:
        return float("inf")
    lower = np.tril(factor)
    return product_error(a, lower, lower.T, by_lines=by_lines)


def solution_error(a: Matrix, x: Matrix, b: Matrix) -> float:
    """max|b - A x| / max(|A||x| + |b|), in the next wider type; infinite where x is not finite."""
    if x.shape != b.shape or not np.isfinite(x).all():
        return float("inf")
    kind: Any = np.longdouble if np.result_type(a, b) == np.float64 else np.float64
    A, X, B = (y.astype(kind) for y in (a, x, b))
    with np.errstate(over="ignore", invalid="ignore"):
        size = float((abs(A) @ abs(X) + abs(B)).max(initial=0))
        residual = float(abs(B - A @ X).max(initial=0))
    return residual / size if residual else 0.0


def solution_error_by_rows(a: Matrix, x: Matrix, b: Matrix, lu: Matrix, piv: Any) -> float:
    """The largest |b - A x| of a row over what it is a sum of where factors are used, |L||U||x| + |b|.

    It is computed in the next wider type, and infinite where x is not finite. `lu`, `piv`: LAPACK's factors of a.
    """
    if x.shape != b.shape or not np.isfinite(x).all():
        return float("inf")
    kind: Any = np.longdouble if np.result_type(a, b) == np.float64 else np.float64
    A, X, B, L, U = (y.astype(kind) for y in (a, x, b, *unpack(lu)))
    with np.errstate(all="ignore"):
        residual, size = abs(B - A @ X), abs(A) @ abs(X) + abs(B)
        rows = order(piv, len(a))
        size[rows] = np.maximum(size[rows], abs(L) @ (abs(U) @ abs(X)))
        return float(np.where(residual == 0, 0, residual / size).max(initial=0))


def ratio(error: float, without_fault: float, dtype: Any) -> float:
    """How many times larger an error is than without a fault, one unit roundoff at least; NaN never is small."""
    times = error / max(without_fault, unit(dtype))
    return times if np.isfinite(times) else float("inf")
