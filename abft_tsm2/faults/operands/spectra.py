"""Families of random matrices: with given singular values or eigenvalues, of low rank, and scaled unevenly.

The distributions of singular values are those of LAPACK's and SLATE's test generators and of MATLAB's
``gallery("randsvd")`` (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, chapter 28).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


def with_eigenvalues(values: Matrix, rng: Generator) -> Matrix:
    """A random symmetric matrix with these eigenvalues."""
    q = orthogonal_factor(values.size, rng)
    x = (q * values) @ q.T
    return np.asarray((x + x.T) / 2)


def condition(dtype: Any) -> float:
    """One that leaves a few digits: u^(-1/2)."""
    return 1 / math.sqrt(float(np.finfo(dtype).eps))


VALUES: Mapping[str, Callable[[int, Generator, float], Matrix]] = {
    "log": lambda n, rng, cond: cond ** -np.linspace(0, 1, n),
    "arith": lambda n, rng, cond: 1 - np.linspace(0, 1, n) * (1 - 1 / cond),
    "cluster0": lambda n, rng, cond: np.r_[1.0, np.full(n - 1, 1 / cond)],
    "cluster1": lambda n, rng, cond: np.r_[np.ones(n - 1), 1 / cond],
    "logrand": lambda n, rng, cond: cond ** -rng.random(n),
    "rand": lambda n, rng, cond: rng.random(n),
}
"""Singular values from 1 down to 1 / cond, by the names that SLATE gives them."""


def _svd(kind: str) -> Make:
    return lambda n, rng, dtype: with_singular_values(VALUES[kind](n, rng, condition(dtype)), rng)


def _heev(kind: str) -> Make:
    def make(n: int, rng: Generator, dtype: Any) -> Matrix:
        signs = rng.choice([-1.0, 1.0], n)
        return with_eigenvalues(signs * VALUES[kind](n, rng, condition(dtype)), rng)

    return make


def _poev(kind: str) -> Make:
    return lambda n, rng, dtype: with_eigenvalues(VALUES[kind](n, rng, condition(dtype)) + condition(dtype) ** -1, rng)


# ---- of low rank ---------------------------------------------------------------------------------------------------


def _rank(r: int, noise: float) -> Make:
    """X Y + noise times normal numbers; the noise is less than rounding in some types."""

    def make(n: int, rng: Generator, dtype: Any) -> Matrix:
        x = rng.standard_normal((n, r)) @ rng.standard_normal((r, n))
        return np.asarray(x + noise * rng.standard_normal((n, n)) if noise else x)

    return make


def _one_large_value(n: int, rng: Generator, dtype: Any) -> Matrix:
    return with_singular_values(np.r_[1.0, np.full(n - 1, 1e-8)], rng)


def _covariance(n: int, rng: Generator, dtype: Any) -> Matrix:
    # of fewer samples than variables: singular
    x = rng.standard_normal((n, max(2, n // 4)))
    x -= x.mean(1, keepdims=True)
    return np.asarray(x @ x.T / max(1, x.shape[1] - 1))


def _krylov(n: int, rng: Generator, dtype: Any) -> Matrix:
    # columns b, A b, A^2 b, ..., each of norm 1: soon nearly parallel
    a, x = rng.standard_normal((n, n)), np.empty((n, n))
    x[:, 0] = 1 / np.sqrt(n)
    for j in range(1, n):
        x[:, j] = a @ x[:, j - 1]
        x[:, j] /= np.linalg.norm(x[:, j])
    return x


# ---- scaled unevenly -----------------------------------------------------------------------------------------------


def _decades(wide: float, narrow: float) -> Callable[[Any], float]:
    return lambda dtype: wide if np.dtype(dtype) == np.float64 else narrow


def _scaled_rows(decades: Callable[[Any], float], whole: bool) -> Make:
    def make(n: int, rng: Generator, dtype: Any) -> Matrix:
        most = decades(dtype)
        powers = rng.integers(-int(most), int(most) + 1, n) if whole else rng.uniform(-most, most, n)
        return np.asarray(rng.standard_normal((n, n)) * 10.0 ** powers[:, None])

    return make


def _graded(rows: float, columns: float) -> Make:
    """Rows and columns that fall by a power of two from one to the next: 2^-(rows i + columns j)."""

    def make(n: int, rng: Generator, dtype: Any) -> Matrix:
        i = np.arange(n) * min(1.0, 60 / max(n, 1))
        return np.asarray(rng.standard_normal((n, n)) * 2.0 ** -np.add.outer(rows * i, columns * i))

    return make


def _uniformly(wide: float, narrow: float) -> Make:
    """Normal numbers, all of them times one number."""
    size = _decades(wide, narrow)
    return lambda n, rng, dtype: np.asarray(rng.standard_normal((n, n)) * size(dtype))


def _rando(*values: float) -> Make:
    return lambda n, rng, dtype: rng.choice(np.array(values), (n, n))


def _random_toeplitz(n: int, rng: Generator, dtype: Any) -> Matrix:
    i = np.arange(n)
    return np.asarray(rng.standard_normal(2 * n - 1)[i[:, None] - i + n - 1])


def _banded(n: int, rng: Generator, dtype: Any) -> Matrix:
    i = np.arange(n)
    return np.where(abs(i[:, None] - i) <= 5, rng.standard_normal((n, n)), 0.0)


def _permutation(n: int, rng: Generator, dtype: Any) -> Matrix:
    return np.eye(n)[rng.permutation(n)]


def _one_element(n: int, rng: Generator, dtype: Any) -> Matrix:
    a = np.zeros((n, n))
    a[tuple(rng.integers(0, n, 2))] = 1
    return a


def _companion(n: int, rng: Generator, dtype: Any) -> Matrix:
    a = np.eye(n, k=-1)
    a[0] = -rng.standard_normal(n) / 1e-2
    return a


def _leslie(n: int, rng: Generator, dtype: Any) -> Matrix:
    a = np.diag(rng.random(n - 1), -1) if n > 1 else np.zeros((1, 1))
    a[0] = rng.random(n) * 3
    return a


SPECTRA: Mapping[str, Make] = {
    **{f"svd {kind}": _svd(kind) for kind in VALUES},
    **{f"heev {kind}": _heev(kind) for kind in VALUES},
    **{f"poev {kind}": _poev(kind) for kind in VALUES},
    "orthogonal": lambda n, rng, dtype: orthogonal_factor(n, rng),
    "one large singular value": _one_large_value,
    "rank 1 + 1e-9": _rank(1, 1e-9),
    "rank 1 + 1e-17": _rank(1, 1e-17),
    "rank 3 + 1e-4": _rank(3, 1e-4),
    "rank 10": _rank(10, 0.0),
    "covariance": _covariance,
    "krylov": _krylov,
    "rows scaled by powers of ten": _scaled_rows(_decades(150, 15), whole=True),
    "rows scaled": _scaled_rows(_decades(60, 6), whole=False),
    "graded rows": _graded(1.0, 0.0),
    "graded columns": _graded(0.0, 1.0),
    "graded both": _graded(0.5, 0.5),
    "tiny": _uniformly(1e-200, 1e-20),
    "huge": _uniformly(1e140, 1e15),
    "subnormal": _uniformly(1e-310, 1e-40),
    "rando 0 1": _rando(0, 1),
    "rando -1 1": _rando(-1, 1),
    "rando -1 0 1": _rando(-1, 0, 1),
    "random toeplitz": _random_toeplitz,
    "random triangle": lambda n, rng, dtype: np.triu(rng.standard_normal((n, n))),
    "random hessenberg": lambda n, rng, dtype: np.triu(rng.standard_normal((n, n)), -1),
    "banded": _banded,
    "permutation": _permutation,
    "one element": _one_element,
    "compan": _companion,
    "leslie": _leslie,
}
"""Functions of n, a generator and a type, by name; all but "subnormal" stay clear of the ends of the type's range."""
