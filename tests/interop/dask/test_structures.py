"""Systems of which SciPy's `assume_a` says that a part of the matrix is read."""

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.linalg

import abft_tsm2 as ft
from abft_tsm2.report import Status
from tests.support.dask_factors import blocks_of
from tests.support.factor_cases import positive
from tests.support.planting import normal

N = 30


@pytest.fixture(autouse=True)
def _in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def solve(a, b, **options):
    x, report = dask.compute(*ft.protected_solve(a, b, return_report=True, **options))
    assert report.status is Status.CLEAN
    return x


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("assume_a", ["sym", "her", "pos", "symmetric", "positive definite"])
def test_of_a_symmetric_matrix_one_half_is_read(assume_a, lower):
    whole, b = positive(N), normal(N, 2)
    half = np.where(np.tril(np.ones((N, N), bool)) if lower else np.triu(np.ones((N, N), bool)), whole, np.nan)
    for transposed in (False, True):
        x = solve(blocks_of(half, (12, 7)), b, assume_a=assume_a, lower=lower, transposed=transposed)
        np.testing.assert_allclose(x, np.linalg.solve(whole, b), rtol=1e-10)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("assume_a", ["diagonal", "tridiagonal", "upper triangular", "lower triangular", "general"])
def test_what_lies_outside_of_a_structure_is_not_read(assume_a, transposed):
    a, b = normal(N, N) + 9 * np.eye(N), normal(N, 2)
    expected = scipy.linalg.solve(a, b, assume_a=assume_a, transposed=transposed)
    np.testing.assert_allclose(solve(blocks_of(a, 12), b, assume_a=assume_a, transposed=transposed), expected, 1e-10)


def test_matrices_of_size_0():
    empty = da.zeros((0, 0), chunks=1)
    L, report = dask.compute(*ft.protected_cholesky(empty, return_report=True))
    assert (L.shape, report.status) == ((0, 0), Status.CLEAN)
    for options in ({}, {"assume_a": "pos"}):
        assert solve(empty, np.zeros((0, 3)), **options).shape == (0, 3)
    (lu, piv), report = dask.compute(*ft.protected_lu_factor(empty, return_report=True))
    assert (lu.shape, piv.shape, report.status) == ((0, 0), (0,), Status.CLEAN)
