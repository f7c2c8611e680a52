"""Square matrices that are hard to factor.

MATRICES["hilbert"](120, rng, np.float32)           a square matrix, by rows
rectangular("hilbert", 120, 40, rng, np.float32)    a part of one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from abft_tsm2.faults.operands.matrices import BASIC, part_of
from abft_tsm2.faults.operands.spectra import (
    Generator,
    Make,
    Matrix,
    orthogonal_factor,
    rounded,
    spread,
    with_singular_values,
)

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
    return part_of(MATRICES[name], m, n, rng, dtype)


def _matrix(name: str) -> Callable[[Make], Make]:
    """Register a matrix that is made in float64, and round it to the type that is asked for."""

    def register(make: Make) -> Make:
        _registry[name] = rounded(make)
        return _registry[name]

    return register


def _known(name: str) -> None:
    """Register one that campaigns of faults factor, too; the order of all is that in which cases take turns."""
    _registry[name] = BASIC[name]


# ---- ordinary ----------------------------------------------------------------------------------------------

_known("normal")

_known("uniform")


@_matrix("integers")
def _integers(n: int, rng: Generator, dtype: Any) -> Matrix:
    # equal elements in every column, of which the first is the pivot
    return np.asarray(rng.integers(-8, 9, (n, n)), np.float64)


@_matrix("orthogonal")
def _orthogonal(n: int, rng: Generator, dtype: Any) -> Matrix:
    # elements grow as they do in no other matrix of condition 1
    return orthogonal_factor(n, rng)


_known("dominant")

_known("positive definite")


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
    return spread(n, rng)[:, None] * rng.standard_normal((n, n))


@_matrix("graded columns")
def _graded_columns(n: int, rng: Generator, dtype: Any) -> Matrix:
    # the same for columns, which no exchange of rows can mend
    return spread(n, rng) * rng.standard_normal((n, n))


_known("graded")


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
    return with_singular_values(values, rng)


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


_known("condition 1e10")


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

_known("toeplitz")


@_matrix("banded")
def _banded(n: int, rng: Generator, dtype: Any) -> Matrix:
    # most elements are zero, and stay so
    return np.triu(np.tril(rng.standard_normal((n, n)), 4), -4)


_known("sparse")


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
