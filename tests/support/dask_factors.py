"""Factorisations and solutions of Dask arrays that tests compute with and without faults."""

import dask
import dask.array as da
import numpy as np
import scipy.linalg

from abft_tsm2.interop import dask as on_dask
from tests.support.factor_cases import positive
from tests.support.planting import bits, normal


def blocks_of(a, size):
    return da.from_array(a, chunks=size)


def factored(a, size, **options):
    (lu, piv), report = dask.compute(*on_dask.protected_lu_factor(blocks_of(a, size), return_report=True, **options))
    return lu, piv, report


def same(x, y):
    """Whether two results, arrays or pairs of them, have the same bits."""
    pairs = zip(x, y, strict=True) if isinstance(x, tuple) else [(x, y)]
    return all(np.array_equal(bits(one), bits(other)) for one, other in pairs)


A48, B48, P48 = normal(48, 48), normal(48, 2, seed=1), positive(48)

CALLS = {
    "one": lambda **options: on_dask.protected_lu_factor(blocks_of(A48, 12), panel="one", **options),
    "tournament": lambda **options: on_dask.protected_lu_factor(blocks_of(A48, 12), panel="tournament", **options),
    "tall": lambda **options: on_dask.protected_lu_factor(blocks_of(A48[:, :20], 12), panel="tournament", **options),
    "solve": lambda **options: on_dask.protected_solve(blocks_of(A48, 12), B48, **options),
    "lu_solve": lambda **options: on_dask.protected_lu_solve(
        tuple(da.from_array(x, chunks=12) for x in scipy.linalg.lu_factor(A48)), B48, **options
    ),
    "transposed": lambda **options: on_dask.protected_lu_solve(
        tuple(da.from_array(x, chunks=12) for x in scipy.linalg.lu_factor(A48)), B48, 1, **options
    ),
    "cholesky": lambda **options: on_dask.protected_cholesky(blocks_of(P48, 12), lower=True, **options),
}
