"""Families of matrices to factor: easy ones, and many that are hard on the bounds of the checks."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from abft_tsm2.faults.operands.gallery import DEFINITE as DEFINITE_OF_GALLERY
from abft_tsm2.faults.operands.gallery import GALLERY
from abft_tsm2.faults.operands.spectra import SPECTRA, Generator, Make, Matrix, rounded, spread, with_singular_values


def part_of(make: Make, m: int, n: int, rng: Generator, dtype: Any) -> Matrix:
    """The first m rows and n columns of a square matrix."""
    return np.ascontiguousarray(make(max(m, n), rng, dtype)[:m, :n])


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


BASIC: Mapping[str, Make] = MappingProxyType(
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
"""Those that faults are planted in, by name."""

FAMILIES: Mapping[str, Make] = MappingProxyType(
    {**BASIC, **{name: rounded(make) for name, make in {**GALLERY, **SPECTRA}.items()}}
)
"""Functions of n, a generator and a type, by name."""

DEFINITE = DEFINITE_OF_GALLERY | {name for name in SPECTRA if name.startswith("poev")}
"""Those that Cholesky's method factors as they are; of others it is given the products of their rows."""
