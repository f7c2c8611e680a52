"""The judges themselves: they find one wrong element anywhere, and pass what rounding and overflow give."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.families import generate, names, operands
from tests.support.cases import DTYPES, arrange, cases, finfo
from tests.support.oracles import Exact, elements_outside, exact_product, rows_outside

NUMPY_TYPES = [dtype for dtype in DTYPES if dtype.kind == "f"]


def honest(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return a @ b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", names())
def test_honest_products_pass(name, dtype):
    for seed, (m, k, n) in enumerate([(1, 1, 1), (9, 40, 7), (5, 700, 6), (33, 2, 65)]):
        a, b = operands(name, m, k, n, np.random.default_rng(seed), dtype)
        assert not elements_outside(honest(a, b), a, b).any()


@pytest.mark.parametrize("case", cases(), ids=str)
def test_layout_does_not_matter(case):
    rng = np.random.default_rng(3)
    a, b = operands("normal", case.m, case.k, case.n, rng, case.dtype)
    a2, b2 = arrange(a, case.order_a), arrange(b, case.order_b)
    assert np.array_equal(a2, a)
    assert np.array_equal(b2, b)
    c = honest(a2, b2)
    assert not elements_outside(c, a2, b2).any()
    assert not rows_outside(c, a2, b2, rng).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", ["nan", "inf", "-inf", "sign", "percent", "1e30", "zero"])
def test_one_wrong_element_is_found_there_and_nowhere_else(dtype, wrong):
    rng = np.random.default_rng(5)
    a, b = operands("uniform01", 20, 30, 25, rng, dtype)
    c = honest(a, b)
    value = c[11, 7].astype(np.float64)
    with np.errstate(over="ignore"):
        c[11, 7] = np.array(
            {
                "nan": np.nan,
                "inf": np.inf,
                "-inf": -np.inf,
                "sign": -value,
                "percent": value * (1.01 if dtype.itemsize > 2 else 1.5),
                "1e30": value * 1e30,
                "zero": 0,
            }[wrong]
        ).astype(dtype)
    assert np.argwhere(elements_outside(c, a, b)).tolist() == [[11, 7]]
    assert np.flatnonzero(rows_outside(c, a, b, rng)).tolist() == [11]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bound_is_a_few_units_in_the_last_place(dtype):
    a, b = operands("uniform01", 10, 4, 10, np.random.default_rng(6), dtype)
    c = honest(a, b)
    c = (c.astype(np.float64) * (1 + 16 * float(finfo(dtype).eps))).astype(dtype)
    assert elements_outside(c, a, b).all()


@pytest.mark.parametrize("dtype", NUMPY_TYPES, ids=str)
def test_the_reference_is_the_exact_product(dtype):
    for name in ("loguni8", "illinner", "cancel_half", "subnormal", "huge", "overflow", "vanishing"):
        a, b = operands(name, 4, 9, 3, np.random.default_rng(7), dtype)
        exact = exact_product(a, b)
        reference = Exact.of(a, b)
        for i, j in np.ndindex(4, 3):
            scale = int(reference.exponent[i, j])
            scaled = exact[i, j] / 2**scale if scale >= 0 else exact[i, j] * 2**-scale
            assert abs(float(scaled) - float(reference.value[i, j])) <= float(reference.bound[i, j])


def test_alpha_and_beta():
    rng = np.random.default_rng(8)
    for dtype in DTYPES:
        a, b = operands("normal", 12, 40, 9, rng, dtype)
        c = rng.standard_normal((12, 9)).astype(dtype)
        wide = -0.5 * (a.astype(np.float64) @ b.astype(np.float64)) + 2 * c.astype(np.float64)
        result = wide.astype(dtype)
        assert not elements_outside(result, a, b, c, alpha=-0.5, beta=2).any()
        assert elements_outside(result, a, b, alpha=-0.5).any()
        result[3, 4] += dtype.type(1)
        assert elements_outside(result, a, b, c, alpha=-0.5, beta=2).sum() == 1


def test_alpha_and_beta_next_to_cancellation():
    # c = -A B: what is left is rounding error, and the bound must follow |A||B| + |c|, not the result.
    a, b = operands("normal", 12, 40, 9, np.random.default_rng(9), np.float32)
    c = a @ b
    assert not elements_outside(c - a @ b, a, b, c, alpha=-1, beta=1).any()
    wrong = c - a @ b
    wrong[2, 2] = 1e-3
    assert elements_outside(wrong, a, b, c, alpha=-1, beta=1).sum() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_overflow_that_is_right_and_overflow_that_is_not(dtype):
    largest = finfo(dtype).max
    a = np.array([[largest, 1], [1, 1]], dtype)
    b = np.array([[2, 0.25], [0, 0.25]], dtype)
    c = np.array([[np.inf, largest / dtype.type(4)], [2, 0.5]], dtype)
    assert not elements_outside(c, a, b).any()
    for position, value in (((0, 0), -np.inf), ((0, 0), largest), ((0, 1), np.inf), ((1, 0), np.inf)):
        wrong = c.copy()
        wrong[position] = value
        assert elements_outside(wrong, a, b).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nan_is_excused_only_where_partial_sums_overflow(dtype):
    largest = np.finfo(dtype).max
    a = np.array([[largest, largest], [1, 1]], dtype)
    b = np.array([[2], [-2]], dtype)
    assert not elements_outside(honest(a, b), a, b).any()
    for value in (0, np.nan, np.inf, -np.inf):
        assert not elements_outside(np.array([[value], [0]], dtype), a, b).any()
    assert elements_outside(np.array([[0], [np.nan]], dtype), a, b).ravel().tolist() == [False, True]
    assert elements_outside(np.array([[np.nan], [4]], dtype), a, abs(b)).ravel().tolist() == [True, False]


def test_nonfinite_operands_must_show_in_the_result():
    a, b = operands("normal", 5, 6, 7, np.random.default_rng(10), np.float32)
    a[1, 2], b[3, 4] = np.nan, np.inf
    c = honest(a, b)
    assert not elements_outside(c, a, b).any()
    c[1, 0] = 0
    assert np.argwhere(elements_outside(c, a, b)).tolist() == [[1, 0]]
    c = honest(a, b)
    c[0, 0] = np.nan
    assert np.argwhere(elements_outside(c, a, b)).tolist() == [[0, 0]]


def test_a_result_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="shape"):
        elements_outside(np.zeros((2, 3)), np.zeros((2, 4)), np.zeros((4, 2)))


@pytest.mark.parametrize("name", names())
def test_every_family_fills_every_type(name):
    for dtype in DTYPES:
        for m, k, n in ((1, 1, 1), (3, 2, 5), (101, 65, 3)):
            first, second = (generate(name, m, k, n, np.random.default_rng(1), dtype) for _ in range(2))
            assert [x.shape for x in first] == [(m, k), (k, n)]
            assert all(x.dtype == np.float64 and np.isfinite(x).all() for x in first)
            assert all(np.array_equal(x, y) for x, y in zip(first, second, strict=True))
            rounded = operands(name, m, k, n, np.random.default_rng(1), dtype)
            assert all(x.dtype == dtype and np.isfinite(x.astype(np.float64)).all() for x in rounded)
