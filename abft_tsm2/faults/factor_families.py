"""Square matrices to factor: easy ones, and some that are hard on the bounds of the checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

Generator = np.random.Generator
Matrix = np.ndarray[Any, np.dtype[Any]]
Make = Callable[[int, Generator, Any], Matrix]


def rounded(make: Make) -> Make:
    """Of a function that makes a matrix in float64, one that rounds it to the type that it is asked for."""

    def of_type(n: int, rng: Generator, dtype: Any = np.float64) -> Matrix:
        with np.errstate(over="ignore", under="ignore"):
            return np.ascontiguousarray(make(n, rng, np.dtype(dtype)), dtype)

    return of_type


def part_of(make: Make, m: int, n: int, rng: Generator, dtype: Any) -> Matrix:
    """The first m rows and n columns of a square matrix."""
    return np.ascontiguousarray(make(max(m, n), rng, dtype)[:m, :n])


def spread(n: int, rng: Generator, decades: float = 10.0) -> Matrix:
    """Scales from 10^-decades to 10^decades."""
    return np.asarray(10.0 ** rng.uniform(-decades, decades, n))


def orthogonal_factor(n: int, rng: Generator) -> Matrix:
    """A random orthogonal matrix."""
    return np.linalg.qr(rng.standard_normal((n, n)))[0] if n else np.zeros((0, 0))


def with_singular_values(values: Matrix, rng: Generator) -> Matrix:
    """A random matrix with these singular values."""
    n = values.size
    return np.asarray((orthogonal_factor(n, rng) * values) @ orthogonal_factor(n, rng))


def _normal(n: int, rng: Generator, dtype: Any) -> Matrix:
    # what bounds are tuned on
    return rng.standard_normal((n, n))


def _uniform(n: int, rng: Generator, dtype: Any) -> Matrix:
    # all positive: the first step takes most of every element away
    return rng.random((n, n))


def _graded(n: int, rng: Generator, dtype: Any) -> Matrix:
    # both: 40 decades from one element to another
    return spread(n, rng)[:, None] * rng.standard_normal((n, n)) * spread(n, rng)


def _positive_definite(n: int, rng: Generator, dtype: Any) -> Matrix:
    # Schur complements shrink from step to step
    x = rng.standard_normal((n, n + 4))
    return x @ x.T / max(1, n) + 1e-3 * np.eye(n)


def _condition(n: int, rng: Generator, dtype: Any) -> Matrix:
    # pivots fall by ten decades; in float32 the last ones are rounding errors
    return with_singular_values(np.logspace(0, -10, n), rng)


def _sparse(n: int, rng: Generator, dtype: Any) -> Matrix:
    # 5 %, and the diagonal: rows of few elements fill up one after the other
    keep = rng.random((n, n)) < 0.05
    np.fill_diagonal(keep, True)
    return np.where(keep, rng.standard_normal((n, n)), 0.0)


def _toeplitz(n: int, rng: Generator, dtype: Any) -> Matrix:
    # decays away from the diagonal, to less than a rounding error of the sums across it
    i = np.arange(n)
    return 0.9 ** abs(i[:, None] - i) + 0.0


def _dominant(n: int, rng: Generator, dtype: Any) -> Matrix:
    # no row is ever exchanged and nothing grows
    a = rng.uniform(-1, 1, (n, n))
    np.fill_diagonal(a, abs(a).sum(1) + abs(a).sum(0))
    return a


FAMILIES: Mapping[str, Make] = MappingProxyType(
    {
        "normal": rounded(_normal),
        "uniform": rounded(_uniform),
        "graded": rounded(_graded),
        "positive definite": rounded(_positive_definite),
        "condition 1e10": rounded(_condition),
        "sparse": rounded(_sparse),
        "toeplitz": rounded(_toeplitz),
        "dominant": rounded(_dominant),
    }
)
"""Functions of n, a generator and a type, by name."""
