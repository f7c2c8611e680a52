"""Weight columns: their families, and what the balanced ones promise to the bounds."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2 import weights
from abft_tsm2.checksum.encode import equilibrated, exponents
from abft_tsm2.checksum.weights import MEAN_SQUARE
from abft_tsm2.core.generated import MAGNITUDES

RANDOM = ("balanced", "signs", "normal")
FIXED = ("ones", "linear", "vandermonde", "chebyshev", "dct")
SIZES = (0, 1, 2, 3, 7, 64, 1000, 1001)


# ---- every family -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("r", [1, 2, 5])
@pytest.mark.parametrize("kind", RANDOM + FIXED)
def test_shape_type_and_finiteness(kind: str, n: int, r: int) -> None:
    V = weights(kind, n, r)
    assert V.shape == (n, r)
    assert V.dtype == np.float64
    assert V.flags.c_contiguous
    assert np.isfinite(V).all()


@pytest.mark.parametrize("kind", RANDOM + FIXED)
def test_read_only_and_computed_once(kind: str) -> None:
    V = weights(kind, 40, 2)
    assert weights(kind, 40, 2) is V
    with pytest.raises(ValueError, match="read-only"):
        V[0] = 3.0


@pytest.mark.parametrize("kind", RANDOM)
def test_another_seed_another_length_other_numbers(kind: str) -> None:
    V = weights(kind, 200, 2)
    assert not np.array_equal(V, weights(kind, 200, 2, seed=1))
    assert not np.array_equal(V, weights(kind, 201, 2)[:200])
    assert not np.array_equal(V[:, 0], V[:, 1])
    assert np.array_equal(weights(kind, 200, 2, seed=1), weights(kind, 200, 2, seed=1))


@pytest.mark.parametrize("kind", FIXED)
def test_the_fixed_families_ignore_the_seed(kind: str) -> None:
    assert np.array_equal(weights(kind, 9, 3), weights(kind, 9, 3, seed=1))


def test_the_same_in_another_process() -> None:
    code = "from abft_tsm2 import weights; print(weights('balanced', 99, 2).tobytes().hex())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == weights("balanced", 99, 2).tobytes().hex()


def test_refused() -> None:
    with pytest.raises(ValueError, match="unknown weights 'random': choose from balanced, ones"):
        weights("random", 3)
    for n, r in ((-1, 1), (3, 0), (3, -2)):
        with pytest.raises(ValueError, match=f"n = {n}, r = {r}"):
            weights("balanced", n, r)


# ---- balanced -----------------------------------------------------------------------------------------------


@given(st.integers(1, 600), st.integers(1, 3), st.integers(0, 2**32))
def test_nearly_balanced_and_of_nearly_one_modulus(n: int, r: int, seed: int) -> None:
    V = weights("balanced", n, r, seed=seed)
    size = abs(V)
    assert ((size >= 1) & (size <= 1.5)).all()
    assert np.array_equal(V * 2**23, np.rint(V * 2**23))
    for c in range(r):
        excess = int((V[:, c] > 0).sum()) - int((V[:, c] < 0).sum())
        assert min(n, np.sqrt(n)) <= excess <= np.sqrt(n) + 3
        apart = 1 / (2 * (n + np.sqrt(n) + 2))  # nearly as far as n can be
        assert (np.diff(np.sort(size[:, c])) >= apart - 2.0**-23).all()
        for sign in (1, -1):  # two elements that change places: of one sign, or their weights differ by 2 and more
            assert (np.diff(np.sort(V[sign * V[:, c] > 0, c])) >= 2 * apart - 2.0**-23).all()


@pytest.mark.parametrize("n", [1, 2, 3, 10, 100, 1000, 10_000, 100_000])
def test_neither_blind_to_the_mean_nor_drowned_by_it(n: int) -> None:
    # A change of all n elements by d moves the checksum by as much as n random changes of that size would ...
    scatter = np.sqrt(n)
    for seed in range(20):
        total = abs(weights("balanced", n, seed=seed).sum())
        assert 0.6 * scatter < total < 3.3 * scatter
    # ... where weights in exact balance would be blind, and ones would not see anything else.
    assert abs(weights("signs", n).sum()) <= 1
    assert weights("ones", n).sum() == n


@pytest.mark.parametrize("n", [10_000, MAGNITUDES, MAGNITUDES + 3, 2 * MAGNITUDES + 1])
def test_magnitudes_tell_elements_apart(n: int) -> None:
    size = np.sort(abs(weights("balanced", n)[:, 0]))
    _, count = np.unique(size, return_counts=True)
    assert count.size == min(n, MAGNITUDES)
    assert count.max() == -(-n // MAGNITUDES)
    assert np.mean(size**2) == pytest.approx(MEAN_SQUARE, abs=1 / n, rel=1e-6)
    # what two swapped neighbours move the checksum by, in units of their difference
    assert abs(np.diff(weights("balanced", 10_000)[:, 0])).min() > 0.9 / 20_000
    assert np.mean(np.diff(weights("signs", 10_000)[:, 0]) == 0) > 0.4  # as pure signs would


def test_neighbours_have_independent_signs() -> None:
    signs = np.sign(weights("balanced", 20_000)[:, 0])
    for lag in (1, 2, 3, 64, 128):
        assert abs(np.mean(signs[lag:] * signs[:-lag])) < 4 / np.sqrt(signs.size)


def test_exact_in_float32() -> None:
    V = weights("balanced", 5000, 2)
    assert np.array_equal(V.astype(np.float32).astype(np.float64), V)


# ---- the families of the literature -------------------------------------------------------------------------


def test_ones_and_signs() -> None:
    assert np.array_equal(weights("ones", 5, 2), np.ones((5, 2)))
    V = weights("signs", 8, 3)
    assert np.array_equal(abs(V), np.ones((8, 3)))
    assert np.array_equal(V.sum(0), np.zeros(3))


def test_powers() -> None:
    i = np.arange(1.0, 8)
    assert np.array_equal(weights("linear", 7, 3), np.stack([i**0, i, i**2], 1))
    np.testing.assert_allclose(weights("vandermonde", 7, 3), np.stack([i**0, i / 7, (i / 7) ** 2], 1))


def test_chebyshev_polynomials() -> None:
    x = np.linspace(-1, 1, 9)
    np.testing.assert_allclose(weights("chebyshev", 9, 3), np.stack([x**0, x, 2 * x**2 - 1], 1), atol=1e-15)


def test_dct_columns_are_orthogonal() -> None:
    V = weights("dct", 30, 6)
    np.testing.assert_allclose(V.T @ V, np.diag([30.0] + [15.0] * 5), atol=1e-12)


def test_several_columns_stay_independent() -> None:
    for kind in ("balanced", "signs", "normal", "dct", "chebyshev"):
        assert np.linalg.cond(weights(kind, 5000, 4)) < 3, kind


# ---- equilibration ------------------------------------------------------------------------------------------


def test_exponents_are_powers_of_two_near_the_norms() -> None:
    norms = np.array([1.0, 1.4, 1.5, 0.75, 3.0, 1e300, 1e-300, 2.0**-40])
    e = exponents(np.log2(norms))
    assert e.dtype == np.int64
    assert np.all(np.abs(np.log2(norms) - e) <= 1)


@given(st.floats(-900, 900), st.lists(st.floats(-0.24, 0.24), min_size=1, max_size=50))
def test_columns_of_much_the_same_norm_get_one_scale(middle: float, around: list[float]) -> None:
    e = exponents(middle + np.array(around) - np.median(around))
    assert np.unique(e).size <= 1
    assert np.all(np.abs(e - middle) <= 0.5 + 1e-9)


def test_a_zero_column_takes_the_smallest_scale_of_the_others() -> None:
    assert exponents(np.array([5.0, -np.inf, -7.0, -np.inf])).tolist() == [5, -7, -7, -7]
    assert exponents(np.full(3, -np.inf)).tolist() == [0, 0, 0]
    assert exponents(np.zeros(0)).shape == (0,)
    assert exponents(np.array([np.nan, 2.0, np.inf])).tolist() == [2, 2, 2]


def test_exponents_stay_where_weights_are_normal_numbers() -> None:
    e = exponents(np.array([-1074.0, 1034.0, 0.0]))  # a subnormal column; the norm of many huge elements
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        V = equilibrated(weights("balanced", 3), e)
    assert np.isfinite(V).all()
    assert (abs(V) >= np.finfo(np.float64).smallest_normal).all()
    assert np.isfinite(1.0 / V).all()


@given(st.lists(st.integers(-1000, 1020), min_size=1, max_size=30))
def test_equilibration_is_exact(e: list[int]) -> None:
    exponent = np.array(e)
    base = weights("balanced", len(e), 2)
    V = equilibrated(base, exponent)
    mantissa, power = np.frexp(V)
    base_mantissa, base_power = np.frexp(base)
    assert np.array_equal(mantissa, base_mantissa)
    assert np.unique(power - base_power + exponent[:, None]).size == 1  # up to one power of two, common to all
    assert np.isfinite(V).all()
    assert abs(V).min() >= np.finfo(np.float64).smallest_normal


def test_equilibration_of_columns_of_one_scale_keeps_them_alike() -> None:
    for e in (-300, 0, 500):
        V = equilibrated(weights("balanced", 9), np.full(9, e))
        assert np.unique(V / weights("balanced", 9)).size == 1
    assert np.array_equal(equilibrated(weights("balanced", 9), np.zeros(9, np.int64)), weights("balanced", 9))
    assert equilibrated(weights("balanced", 0), np.zeros(0, np.int64)).shape == (0, 1)
