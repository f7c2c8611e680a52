"""Square matrices that are hard to factor, and what P A = L U is judged by, neither of which is this package.

MATRICES["hilbert"](120, rng, np.float32)           a square matrix, by rows
rectangular("hilbert", 120, 40, rng, np.float32)    a part of one
backward_error(a, lu, piv)                          max|PA - LU| / max(|L||U|)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

Generator = np.random.Generator
Matrix = np.ndarray[Any, np.dtype[Any]]
Make = Callable[[int, Generator, Any], Matrix]

_registry: dict[str, Make] = {}
MATRICES: Mapping[str, Make] = MappingProxyType(_registry)
"""Functions of n, a generator and a type, by name."""

NEAR_TIES = frozenset(
    {
        *("ones", "noisy ones", "zeros", "wilkinson", "integers", "frank", "triangular"),
        *("nearly singular", "zero column", "duplicated row", "condition 1e10"),
        *("hilbert", "cauchy", "toeplitz", "rbf kernel", "breast cancer"),
    }
)
"""Two elements of a column may be as large as each other but for rounding: then any of them is a right pivot."""

MAY_OVERFLOW = frozenset({"wilkinson"})
"""Elements grow by a factor that is exponential in n."""


def rectangular(name: str, m: int, n: int, rng: Generator, dtype: Any) -> Matrix:
    """The first m rows and n columns of a square one."""
    return np.ascontiguousarray(MATRICES[name](max(m, n), rng, dtype)[:m, :n])


def _matrix(name: str) -> Callable[[Make], Make]:
    """Register a matrix that is made in float64, and round it to the type that is asked for."""

    def register(make: Make) -> Make:
        def rounded(n: int, rng: Generator, dtype: Any = np.float64) -> Matrix:
            with np.errstate(over="ignore", under="ignore"):
                return np.ascontiguousarray(make(n, rng, np.dtype(dtype)), dtype)

        _registry[name] = rounded
        return rounded

    return register


def _spread(n: int, rng: Generator, decades: float = 10.0) -> Matrix:
    return 10.0 ** rng.uniform(-decades, decades, n)


def _orthogonal_factor(n: int, rng: Generator) -> Matrix:
    return np.linalg.qr(rng.standard_normal((n, n)))[0] if n else np.zeros((0, 0))


def _with_singular_values(values: Matrix, rng: Generator) -> Matrix:
    n = values.size
    return (_orthogonal_factor(n, rng) * values) @ _orthogonal_factor(n, rng)


# ---- ordinary ----------------------------------------------------------------------------------------------


@_matrix("normal")
def _normal(n: int, rng: Generator, dtype: Any) -> Matrix:
    # what bounds are tuned on
    return rng.standard_normal((n, n))


@_matrix("uniform")
def _uniform(n: int, rng: Generator, dtype: Any) -> Matrix:
    # all positive: the first step takes most of every element away
    return rng.random((n, n))


@_matrix("integers")
def _integers(n: int, rng: Generator, dtype: Any) -> Matrix:
    # equal elements in every column, of which the first is the pivot
    return np.asarray(rng.integers(-8, 9, (n, n)), np.float64)


@_matrix("orthogonal")
def _orthogonal(n: int, rng: Generator, dtype: Any) -> Matrix:
    # elements grow as they do in no other matrix of condition 1
    return _orthogonal_factor(n, rng)


@_matrix("dominant")
def _dominant(n: int, rng: Generator, dtype: Any) -> Matrix:
    # no row is ever exchanged and nothing grows
    a = rng.uniform(-1, 1, (n, n))
    np.fill_diagonal(a, abs(a).sum(1) + abs(a).sum(0))
    return a


@_matrix("positive definite")
def _positive_definite(n: int, rng: Generator, dtype: Any) -> Matrix:
    # Schur complements shrink from step to step
    x = rng.standard_normal((n, n + 4))
    return x @ x.T / max(1, n) + 1e-3 * np.eye(n)


# ---- of few numbers ----------------------------------------------------------------------------------------


@_matrix("zeros")
def _zeros(n: int, rng: Generator, dtype: Any) -> Matrix:
    # every pivot is zero, and so is every bound that is relative
    return np.zeros((n, n))


@_matrix("identity")
def _identity(n: int, rng: Generator, dtype: Any) -> Matrix:
    # nothing is rounded: a bound from norms has nothing to hold on to
    return np.eye(n)


@_matrix("permutation")
def _permutation(n: int, rng: Generator, dtype: Any) -> Matrix:
    # the exchanges of rows are all there is
    return np.eye(n)[rng.permutation(n)]


@_matrix("ones")
def _ones(n: int, rng: Generator, dtype: Any) -> Matrix:
    # of rank 1: after the first step nothing is left
    return np.ones((n, n))


@_matrix("noisy ones")
def _noisy_ones(n: int, rng: Generator, dtype: Any) -> Matrix:
    # the first step leaves what half of the digits held
    return 1 + np.sqrt(np.finfo(dtype).eps) * rng.standard_normal((n, n))


# ---- growth ------------------------------------------------------------------------------------------------


def _growing(n: int, multiplier: float) -> Matrix:
    a = np.eye(n) - multiplier * np.tri(n, k=-1)
    a[:, n - 1 :] = 1
    return a


@_matrix("wilkinson")
def _wilkinson(n: int, rng: Generator, dtype: Any) -> Matrix:
    # the last column doubles in every step (J. H. Wilkinson, J. ACM 8 (1961) 281-330)
    return _growing(n, 1.0)


@_matrix("mild growth")
def _mild_growth(n: int, rng: Generator, dtype: Any) -> Matrix:
    # the same with multipliers below 1, up to half of the digits
    growth = np.finfo(dtype).eps ** -0.5
    return _growing(n, min(0.99, growth ** (1 / max(1, n - 1)) - 1))


# ---- scales ------------------------------------------------------------------------------------------------


@_matrix("graded rows")
def _graded_rows(n: int, rng: Generator, dtype: Any) -> Matrix:
    # what is rounding in one row is more than all of another
    return _spread(n, rng)[:, None] * rng.standard_normal((n, n))


@_matrix("graded columns")
def _graded_columns(n: int, rng: Generator, dtype: Any) -> Matrix:
    # the same for columns, which no exchange of rows can mend
    return _spread(n, rng) * rng.standard_normal((n, n))


@_matrix("graded")
def _graded(n: int, rng: Generator, dtype: Any) -> Matrix:
    # both: 40 decades from one element to another
    return _spread(n, rng)[:, None] * rng.standard_normal((n, n)) * _spread(n, rng)


@_matrix("tiny")
def _tiny(n: int, rng: Generator, dtype: Any) -> Matrix:
    # squares of elements underflow
    return rng.standard_normal((n, n)) * (1e-150 if dtype == np.float64 else 1e-30)


@_matrix("huge")
def _huge(n: int, rng: Generator, dtype: Any) -> Matrix:
    # sums of squares overflow
    return rng.standard_normal((n, n)) * (1e150 if dtype == np.float64 else 1e30)


# ---- singular, or nearly -----------------------------------------------------------------------------------


@_matrix("nearly singular")
def _nearly_singular(n: int, rng: Generator, dtype: Any) -> Matrix:
    # the last pivot is nothing but rounding errors
    values = np.ones(n)
    values[-1:] = 1e-14
    return _with_singular_values(values, rng)


@_matrix("zero column")
def _zero_column(n: int, rng: Generator, dtype: Any) -> Matrix:
    # LAPACK goes on after a pivot that is zero
    a = rng.standard_normal((n, n))
    a[:, n // 2 : n // 2 + 1] = 0
    return a


@_matrix("duplicated row")
def _duplicated_row(n: int, rng: Generator, dtype: Any) -> Matrix:
    # singular, and whether the last pivot is zero is up to rounding
    a = rng.standard_normal((n, n))
    a[n // 2 : n // 2 + 1] = a[: min(n, 1)]
    return a


@_matrix("condition 1e10")
def _condition(n: int, rng: Generator, dtype: Any) -> Matrix:
    # pivots fall by ten decades; in float32 the last ones are rounding errors
    return _with_singular_values(np.logspace(0, -10, n), rng)


@_matrix("hilbert")
def _hilbert(n: int, rng: Generator, dtype: Any) -> Matrix:
    # of numerical rank 13, smooth: what remains is rounding errors, in a pattern
    i = np.arange(n)
    return 1 / (i[:, None] + i + 1.0)


@_matrix("cauchy")
def _cauchy(n: int, rng: Generator, dtype: Any) -> Matrix:
    # as Hilbert's, without its order
    return 1 / (rng.random((n, 1)) + rng.random(n) + 1e-3)


@_matrix("frank")
def _frank(n: int, rng: Generator, dtype: Any) -> Matrix:
    # of determinant 1 with condition n! (W. L. Frank, J. SIAM 6 (1958) 378-392)
    i = np.arange(n)
    return np.triu(n - np.maximum(i[:, None], i), -1).astype(np.float64)


@_matrix("rbf kernel")
def _rbf_kernel(n: int, rng: Generator, dtype: Any) -> Matrix:
    # of a rank far below n, as kernels of few dimensions are
    x = rng.random((n, 2))
    return np.exp(-((x[:, None, :] - x) ** 2).sum(2) / (2 * 0.3**2))


# ---- structured --------------------------------------------------------------------------------------------


@_matrix("toeplitz")
def _toeplitz(n: int, rng: Generator, dtype: Any) -> Matrix:
    # decays away from the diagonal, to less than a rounding error of the sums across it
    i = np.arange(n)
    return 0.9 ** abs(i[:, None] - i) + 0.0


@_matrix("banded")
def _banded(n: int, rng: Generator, dtype: Any) -> Matrix:
    # most elements are zero, and stay so
    return np.triu(np.tril(rng.standard_normal((n, n)), 4), -4)


@_matrix("sparse")
def _sparse(n: int, rng: Generator, dtype: Any) -> Matrix:
    # 5 %, and the diagonal: rows of few elements fill up one after the other
    keep = rng.random((n, n)) < 0.05
    np.fill_diagonal(keep, True)
    return np.where(keep, rng.standard_normal((n, n)), 0.0)


@_matrix("arrow")
def _arrow(n: int, rng: Generator, dtype: Any) -> Matrix:
    # a row, a column and the diagonal: all of it fills up in the first step
    a = np.diag(rng.standard_normal(n))
    a[:1], a[:, :1] = rng.standard_normal((min(n, 1), n)), rng.standard_normal((n, min(n, 1)))
    return a


@_matrix("triangular")
def _triangular(n: int, rng: Generator, dtype: Any) -> Matrix:
    # of a condition exponential in n; lower: all the work is in the exchanges, upper: there is none
    a = np.tril(rng.standard_normal((n, n)))
    return a if rng.random() < 0.5 else a.T


@_matrix("breast cancer")
def _breast_cancer(n: int, rng: Generator, dtype: Any) -> Matrix:
    # real normal equations: columns of very different units, and random features of them beyond the 30th
    raw, standard = _features()
    wide = max(0, n - raw.shape[1])
    phases = standard @ rng.standard_normal((standard.shape[1], wide)) / 6 + rng.uniform(0, 2 * np.pi, wide)
    x = np.hstack([raw, np.cos(phases)])[:, :n]
    gram = x.T @ x
    return gram + 1e-8 * np.trace(gram) / max(1, n) * np.eye(n)


@cache
def _features() -> tuple[Matrix, Matrix]:
    from sklearn.datasets import load_breast_cancer

    raw = np.asarray(load_breast_cancer().data, np.float64)
    return raw, (raw - raw.mean(0)) / raw.std(0)


# ---- what a factorisation is judged by ---------------------------------------------------------------------


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
    return float(abs(np.tril(lu[:, : min(lu.shape)], -1).astype(np.float64)).max(initial=0.0))


def backward_error(a: Matrix, lu: Matrix, piv: Any) -> float:
    """max|PA - LU| / max(|L||U|); infinite where factors are not finite or pivots are none."""
    m, n = a.shape
    if lu.shape != a.shape or not valid_pivots(piv, m, min(m, n)):
        return float("inf")
    return product_error(a[order(piv, m)], *unpack(lu))


def product_error(x: Matrix, left: Matrix, right: Matrix) -> float:
    """max|X - L R| / max(|L||R|), with an error far below the unit roundoff of the operands' type.

    Products of float32 are computed in float64. Those of float64 are split: of operands scaled to 1 the first `bits`
    bits are multiplied exactly, since 2 `bits` and those of the sum fit into 53; what the rest adds, rounding moves by
    2^-`bits` of a unit roundoff.
    """
    exact = np.result_type(x, left, right) == np.float64
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
        back = rows + columns - (rows.max() + columns.max())
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
