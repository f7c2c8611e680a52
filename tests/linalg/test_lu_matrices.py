"""The matrices that are factored are what they are said to be, and the oracle of factorisations is right."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2.faults.judge.factor_oracle import (
    Matrix,
    backward_error,
    largest_multiplier,
    order,
    product_error,
    unit,
    unpack,
    valid_pivots,
)
from tests.support.lu_matrices import MATRICES, MAY_OVERFLOW, NEAR_TIES, rectangular

DTYPES = ("float64", "float32")


def made(name: str, n: int, dtype: str, seed: int = 0) -> Matrix:
    return MATRICES[name](n, np.random.default_rng([seed, n]), dtype)


def factored(a: Matrix) -> tuple[Matrix, Matrix]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", linalg.LinAlgWarning)
        lu, piv = linalg.lu_factor(a, check_finite=False)
    return lu, piv


# ---- the matrices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MATRICES)
def test_shape_type_order_and_seed(name: str, dtype: str) -> None:
    for n in (1, 2, 3, 31, 70):
        a = made(name, n, dtype)
        assert (a.shape, a.dtype) == ((n, n), np.dtype(dtype))
        assert a.flags.c_contiguous
        assert np.isfinite(a).all()
        assert a.tobytes() == made(name, n, dtype).tobytes()
    for m, n in ((5, 40), (40, 5), (1, 7), (7, 7)):
        part = rectangular(name, m, n, np.random.default_rng(0), dtype)
        assert (part.shape, part.dtype, part.flags.c_contiguous) == ((m, n), np.dtype(dtype), True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MATRICES)
def test_scipy_factors_them_unless_they_overflow(name: str, dtype: str) -> None:
    a = made(name, 150, dtype)
    lu, piv = factored(a)
    if name in MAY_OVERFLOW and dtype == "float32":
        assert not np.isfinite(lu).all()
        assert backward_error(a, lu, piv) == np.inf
    else:
        assert backward_error(a, lu, piv) <= 50 * unit(dtype)
        assert largest_multiplier(lu) <= 1 + 4 * unit(dtype)


def test_the_sets_name_matrices() -> None:
    assert set(MATRICES) >= NEAR_TIES
    assert set(MATRICES) >= MAY_OVERFLOW


def test_some_are_what_their_names_say() -> None:
    np.testing.assert_array_equal(made("wilkinson", 3, "float64"), [[1, 0, 1], [-1, 1, 1], [-1, -1, 1]])
    np.testing.assert_array_equal(made("frank", 4, "float64"), [[4, 3, 2, 1], [3, 3, 2, 1], [0, 2, 2, 1], [0, 0, 1, 1]])
    q = made("orthogonal", 40, "float64")
    np.testing.assert_allclose(q @ q.T, np.eye(40), atol=1e-13)
    values = np.linalg.svd(made("condition 1e10", 40, "float64"), compute_uv=False)
    assert values[0] / values[-1] == pytest.approx(1e10, rel=1e-3)
    assert np.linalg.matrix_rank(made("duplicated row", 40, "float64")) == 39
    assert np.linalg.eigvalsh(made("positive definite", 40, "float64"))[0] > 0
    raw = made("breast cancer", 30, "float64")
    np.testing.assert_array_equal(raw, raw.T)
    assert raw.diagonal().max() / raw.diagonal().min() > 1e8


# ---- the oracle --------------------------------------------------------------------------------------------


def exactly(a: Matrix, lu: Matrix, piv: Matrix) -> float:
    """max|PA - LU| / max(|L||U|) in fractions."""
    fractions = np.vectorize(Fraction, otypes=[object])
    rows = a[order(piv, len(a))]
    x, left, right = (fractions(y.astype(np.float64)) for y in (rows, *unpack(lu)))
    size = (abs(left) @ abs(right)).max()
    return float(abs(x - left @ right).max() / size) if size else 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in MATRICES if name not in MAY_OVERFLOW])
def test_the_error_is_that_of_fractions(name: str, dtype: str) -> None:
    a = made(name, 7, dtype)
    lu, piv = factored(a)
    assert backward_error(a, lu, piv) == pytest.approx(exactly(a, lu, piv), rel=1e-4, abs=1e-4 * unit(dtype))


@pytest.mark.parametrize("shape", [(90, 90), (120, 40), (40, 120), (1, 30), (30, 1)])
@pytest.mark.parametrize("name", ["normal", "graded", "tiny", "huge", "mild growth"])
def test_the_error_is_that_of_a_wider_type(name: str, shape: tuple[int, int]) -> None:
    a = rectangular(name, *shape, np.random.default_rng(3), np.float64)
    lu, piv = factored(a)
    left, right = (y.astype(np.longdouble) for y in unpack(lu))
    expected = abs(a[order(piv, len(a))] - left @ right).max() / (abs(left) @ abs(right)).max()
    assert backward_error(a, lu, piv) == pytest.approx(float(expected), rel=0.02, abs=0.001 * unit(np.float64))


def test_what_is_factored_exactly_has_no_error() -> None:
    rng = np.random.default_rng(0)
    left = np.tril(rng.integers(-1, 2, (300, 300)), -1) + np.eye(300)
    right = np.triu(rng.integers(-(2**20), 2**20, (300, 300))).astype(np.float64)
    lu = np.tril(left, -1) + right
    assert backward_error(left @ right, lu, np.arange(300)) == 0
    assert backward_error(np.zeros((4, 4)), np.zeros((4, 4)), np.arange(4)) == 0
    assert backward_error(np.zeros((0, 4)), np.zeros((0, 4)), np.arange(0)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", [(60, 20), (20, 60), (40, 40), (79, 79), (79, 0)])
def test_an_error_in_one_element_is_seen(where: tuple[int, int], dtype: str) -> None:
    a = made("normal", 80, dtype)
    lu, piv = factored(a)
    left, right = unpack(lu.astype(np.float64))
    size, u = (abs(left) @ abs(right)).max(), unit(dtype)
    assert backward_error(a, lu, piv) < 3 * u
    i, c = where
    scale = 1.0 if c >= i else abs(right[c, c])
    for units in (30.0, 1e6):
        wrong = lu.copy()
        wrong[where] += units * u * size / scale
        assert backward_error(a, wrong, piv) > 0.9 * units * u


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_factorisation_is_infinitely_wrong(dtype: str) -> None:
    a = made("normal", 20, dtype)
    lu, piv = factored(a)
    for value in (np.nan, np.inf):
        for where in ((0, 0), (19, 3), (3, 19)):
            wrong = lu.copy()
            wrong[where] = value
            assert backward_error(a, wrong, piv) == np.inf
    for first in (-1, 20):
        outside = piv.copy()
        outside[0] = first
        assert backward_error(a, lu, outside) == np.inf
    assert backward_error(a, lu[:19], piv) == np.inf
    assert backward_error(a, lu, piv[:19]) == np.inf
    other = piv.copy()
    other[0] = 1 if piv[0] != 1 else 2
    assert backward_error(a, lu, other) > 1e-3
    huge = lu.copy()
    huge[3, 3] = np.finfo(dtype).max
    assert backward_error(a, huge, piv) > 0.5


def test_products_of_another_kind() -> None:
    a = made("positive definite", 50, "float64")
    lower = np.linalg.cholesky(a)
    assert product_error(a, lower, lower.T) < 10 * unit(np.float64)
    lower[30, 20] *= 1 + 1e-10
    assert product_error(a, lower, lower.T) > 1e-13


def test_pivots() -> None:
    assert valid_pivots(np.array([2, 1, 2]), 3, 3)
    wrong: list[Any] = [[0, 0, 2], [3, 1, 2], [0, 1], [0.0, 1.0, 2.0]]
    assert not any(valid_pivots(np.array(piv), 3, 3) for piv in wrong)
    a = made("normal", 9, "float64")
    lu, piv = factored(a)
    left, right = unpack(lu)
    np.testing.assert_allclose(a[order(piv, 9)], left @ right, atol=1e-13)
    assert np.isnan(largest_multiplier(np.array([[1.0, 5.0], [np.nan, 1.0]])))
