"""Operands of benchmarks.rounding: that they are what their names say, and fit the types that hold them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from abft_tsm2.arrays import FLOATS
from benchmarks.rounding.operands import FAMILIES, Draw, fitted, rounded, widened

NAMES = [(kind, family) for kind in FAMILIES for family in FAMILIES[kind]]


@pytest.mark.parametrize(("kind", "family"), NAMES)
@pytest.mark.parametrize("shape", [(230, 64, 40), (5, 33, 7), (1, 1, 1)])
def test_families_have_the_shape_and_every_type_holds_them_and_their_product(
    kind: str, family: str, shape: tuple[int, int, int]
) -> None:
    m, k, n = shape
    A, B = FAMILIES[kind][family](Draw(3), m, k, n)
    assert (A.shape, B.shape, A.dtype, B.dtype) == ((m, k), (k, n), np.float64, np.float64)
    for name in FLOATS:
        a, b = (widened(rounded(x, name), name) for x in fitted(A, B, name))
        assert np.isfinite(a).all()
        assert np.isfinite(b).all()
        assert abs(a).any() == abs(A).any()
        assert (abs(a) @ abs(b)).max() < FLOATS[name].largest / 2


def test_the_families_are_twenty_and_named_once() -> None:
    assert len({family for _, family in NAMES}) == len(NAMES) == 20


def test_families_that_cancel_do() -> None:
    for family in ("pairs cancel", "halves cancel"):
        A, B = FAMILIES["structured"][family](Draw(0), 20, 51, 9)
        A[:, 50:] = 0  # of an odd number of terms the last has no partner
        assert abs(A @ B).max() < 0.01 * (abs(A) @ abs(B)).min()


def test_draws_are_uniform_normal_and_spread() -> None:
    draw = Draw(1)
    assert abs(draw.normal(300, 300).std() - 1) < 0.02
    assert 0 <= draw.uniform(300, 300).min() < 1e-3
    decades = np.log10(draw.spread(3, 300, 300))
    assert -3 <= decades.min() < -2.99
    assert 2.99 < decades.max() <= 3


def test_bfloat16_is_rounded_and_widened_as_ml_dtypes_does() -> None:
    x = np.concatenate([np.random.default_rng(0).standard_normal(5000) * 1e5, [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8]])
    expected = x.astype(np.float32).astype(ml_dtypes.bfloat16)
    bits = rounded(x.reshape(4, -1), "bfloat16")
    assert np.array_equal(bits, expected.view(np.uint16).reshape(4, -1))
    assert np.array_equal(widened(bits, "bfloat16"), expected.astype(np.float64).reshape(4, -1))


def test_operands_come_in_rows() -> None:
    x = np.arange(12.0).reshape(3, 4).T
    for name in FLOATS:
        found = rounded(x, name)
        assert found.flags.c_contiguous
        assert np.array_equal(widened(found, name), x)


def test_float16_operands_keep_their_ratios_and_other_types_their_numbers() -> None:
    A, B = np.array([[1e9, 3.0]]), np.array([[2e-7], [5.0]])
    a, b = fitted(A, B, "float16")
    assert a[0, 0] / a[0, 1] == A[0, 0] / A[0, 1]
    assert math.log2(a[0, 0] / A[0, 0]).is_integer()
    assert math.log2(b[0, 0] / B[0, 0]).is_integer()
    assert (abs(a) @ abs(b)).max() < 2**16
    assert fitted(A, B, "bfloat16")[0] is A
