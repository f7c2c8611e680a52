"""X - L R computed accurately, against rational arithmetic."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import array_api_strict
import numpy as np
import pytest

from abft_tsm2.core import accurate
from abft_tsm2.core.accurate import Difference, lines_at_once, residual, scaled

rng = np.random.default_rng


def exact(X: Any, L: Any, R: Any) -> tuple[Any, Any]:
    """X - L R and |L||R| in rational numbers."""
    rational = np.vectorize(Fraction, otypes=[object])
    X, L, R = rational(X), rational(L), rational(R)
    return X - L @ R, abs(L) @ abs(R)


def off(X: Any, L: Any, R: Any) -> float:
    """The largest error of `residual`, in units of |L||R|."""
    right, reach = exact(X, L, R)
    found = np.vectorize(Fraction, otypes=[object])(residual(X, L, R))
    return float(np.max(abs(found - right) / np.maximum(reach, Fraction(1, 2**1000))))


def cancelling(L: Any, R: Any) -> Any:
    with np.errstate(over="ignore"):
        return (L @ R).astype(L.dtype)


@pytest.mark.parametrize("k", [1, 2, 7, 600])
@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
def test_residuals_are_right_to_far_more_digits_than_the_type_has(kind: str, k: int) -> None:
    L, R = (rng(0).standard_normal(shape).astype(kind) for shape in ((5, k), (k, 4)))
    limit = 2.0**-70 if kind == "float64" else 2.0**-50
    assert off(cancelling(L, R), L, R) <= limit * k**0.5


@pytest.mark.parametrize("powers", [(-150, 0), (150, 0), (0, -150), (0, 150), (150, -150), (150, 150), (-300, 300)])
def test_lines_of_any_scale(powers: tuple[int, int]) -> None:
    L = rng(1).standard_normal((6, 40)) * 10.0 ** powers[0]
    R = rng(2).standard_normal((40, 5)) * 10.0 ** powers[1]
    assert off(cancelling(L, R), L, R) <= 2.0**-65


def test_graded_rows_and_columns() -> None:
    rows, terms, columns = (10.0 ** rng(seed).uniform(-140, 140, 12) for seed in range(3))
    L = rng(3).standard_normal((12, 12)) * rows[:, None] / terms[None, :]
    R = rng(4).standard_normal((12, 12)) * (terms[:, None] / 1e20) * columns[None, :] ** 0.1
    assert off(cancelling(L, R), L, R) <= 2.0**-65


def test_many_terms() -> None:
    L, R = rng(5).standard_normal((2, 3000)), rng(6).standard_normal((3000, 2))
    assert off(cancelling(L, R), L, R) <= 2.0**-68


def test_products_of_blocks_are_exact_where_the_result_is_small() -> None:
    L, R = rng(7).integers(-(2**25), 2**25, (700, 1200)), rng(8).integers(-(2**25), 2**25, (1200, 3))
    X = (L @ R).astype(np.float64)  # below 2^53 in part only
    found = residual(X, L.astype(float), R.astype(float))
    right = np.vectorize(int, otypes=[object])(X) - L.astype(object) @ R.astype(object)
    assert np.array_equal(found, right.astype(np.float64))


@pytest.mark.parametrize("kind", ["float64", "float32"])
def test_what_is_not_finite_is_nan_where_it_is_used(kind: str) -> None:
    X, L, R = (rng(9).standard_normal((4, 4)).astype(kind) for _ in range(3))
    X[0, 0], L[1, 2], R[3, 3] = np.inf, np.nan, -np.inf
    bad = np.zeros((4, 4), bool)
    bad[0, 0] = bad[1, :] = bad[:, 3] = True
    assert np.array_equal(np.isnan(residual(X, L, R)), bad)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (3, 2, 0)])
def test_nothing(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    assert np.array_equal(residual(np.ones((m, n)), np.ones((m, k)), np.ones((k, n))), np.ones((m, n)))


def test_any_array_library() -> None:
    X, L, R = (rng(10).standard_normal((6, 6)) for _ in range(3))
    found = residual(*(array_api_strict.asarray(x) for x in (X, L, R)))
    assert np.array_equal(np.asarray(found), residual(X, L, R))


@pytest.mark.parametrize("slices", [2, 3])
def test_the_bound_holds_the_error_of_the_residual_itself(slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accurate, "BLOCK", 16)  # several parts, in a small matrix
    L, R = rng(11).standard_normal((40, 50)), rng(12).standard_normal((50, 30))
    L[3] *= 1e-200
    L[4, 1:] *= 1e-60
    X = L @ R
    right, reach = exact(X, L, R)
    found = Difference(lambda i, p: L[i, p], lambda p, j: R[p, j], (40, 50, 30), L)
    for rows, columns in found.blocks():
        with np.errstate(all="ignore"):
            block = found._split(X[rows, columns], rows, columns, 50, 2.0**-60, slices)
        distance = abs(np.vectorize(Fraction, otypes=[object])(block.residual) - right[rows, columns])
        allowed = block.bound - 2.0**-60 * reach[rows, columns].astype(float) * (1 - 2.0**-20)
        assert np.all(distance.astype(float) <= allowed)


def test_elements_are_split_into_three_numbers_where_two_do_not_decide() -> None:
    L, R = rng(13).standard_normal((40, 50)), rng(14).standard_normal((50, 30))
    X, whole = L @ R, (slice(0, 40), slice(0, 30))
    found = Difference(lambda i, p: L[i, p], lambda p, j: R[p, j], (40, 50, 30), L)
    assert list(found.blocks()) == [whole]
    for factor, slices in ((2.0**-48, 2), (2.0**-72, 3), (2.0**-48, 2)):
        block = found.block(X, *whole, factor=factor)
        with np.errstate(all="ignore"):
            decided = found._split(X, *whole, 50, factor, 3)
        assert block.sharp
        assert found.slices == slices
        assert np.array_equal(abs(block.residual) <= block.bound, abs(decided.residual) <= decided.bound)


def test_blocks_are_all_of_them_once() -> None:
    L, R = np.ones((1300, 3)), np.ones((3, 2900))
    found = list(Difference(lambda i, p: L[i, p], lambda p, j: R[p, j], (1300, 3, 2900), L).blocks())
    assert len(found) == len({(i.start, j.start) for i, j in found}) == 3 * 6
    assert sum((i.stop - i.start) * (j.stop - j.start) for i, j in found) == 1300 * 2900


def test_blocks_are_larger_on_a_device_unless_lines_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_at_once(np.ones((2, 2)), 3) == accurate.BLOCK
    monkeypatch.setattr(accurate, "KEPT", 44 * 700 * 60)
    for k, lines in ((3, accurate.ON_DEVICE), (60, 700), (100, accurate.BLOCK)):
        L, R = array_api_strict.ones((1300, k)), array_api_strict.ones((k, 5000))
        at_once = lines_at_once(L, k)
        assert at_once == lines
        found = Difference(lambda i, p, L=L: L[i, p], lambda p, j, R=R: R[p, j], (1300, k, 5000), L, at_once)
        blocks = list(found.blocks())
        assert len(blocks) == -(-1300 // lines) * -(-5000 // lines)
        assert sum((i.stop - i.start) * (j.stop - j.start) for i, j in blocks) == 1300 * 5000


def test_scaling_by_powers_of_two_beyond_the_range_of_one() -> None:
    rows, columns = np.array([1500.0, -1500.0, 0.0]), np.array([-1490.0, 1495.0])
    X = np.ldexp(1.0, np.array([[10, -1000], [-1000, -5], [0, 1000]]))
    X[0, 1] = 0.0
    X[1, 0] = 0.0
    X[2] = 0.0
    assert np.array_equal(scaled(X, rows, columns), [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    for row, column in ((-831.0, 1660.0), (1660.0, -831.0), (-1660.0, 831.0)):
        back = scaled(np.ones((1, 1)), np.array([row]), np.array([column]))
        assert back == 2.0 ** -(row + column), (row, column)


@pytest.mark.parametrize("order", [1, -1])
def test_lines_of_subnormal_numbers_that_meet_such(order: int) -> None:
    """Two scales of 2^1074 each: zeros are what they are."""
    L, R = np.diag([1.0, 2.0**-1070, 2.0**-1074]), np.diag([2.0**-1074, 2.0**-1074, 2.0**-1060])
    L[2, :2] = R[:2, 2] = 2.0**-1072
    X = np.array([[0.0, 0.0, 1e-320], [0.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
    L, R, X = (L, R, X) if order > 0 else (R.T, L.T, X.T)
    expected = X.copy()
    expected[0, 0] = -(2.0**-1074)
    expected[(0, 2) if order > 0 else (2, 0)] -= 2.0**-1072
    found = Difference(lambda i, p: L[i, p], lambda p, j: R[p, j], (3, 3, 3), L).block(X, slice(0, 3), slice(0, 3))
    assert np.array_equal(found.residual, expected)
    assert np.array_equal(residual(X, L, R), expected)


def wide_ranges(kind: str) -> tuple[Any, Any]:
    """Factors with elements far smaller than others of their line and of their column."""
    L, R = rng(20).standard_normal((6, 7)), rng(21).standard_normal((7, 5))
    if kind == "columns of R":
        return L, R * np.logspace(0, -120, 5)
    if kind == "rows of L":
        return L * np.logspace(0, -120, 6)[:, None], R
    if kind == "triangles":
        U = np.triu(rng(22).standard_normal((7, 7))) * np.logspace(0, -120, 7)
        return np.tril(rng(23).standard_normal((7, 7))), U
    if kind == "far from the diagonal":
        apart = abs(np.subtract.outer(np.arange(9), np.arange(9)))
        return np.tril(0.5 ** (20.0 * apart)), np.triu(0.5 ** (30.0 * apart))
    if kind == "zeros":  # they meet numbers that set no scale
        L[:, 2], R[2], L[:, 4], R[4] = 0.0, 1e300, 1e300, 0.0
        return L, R
    return L * 10.0 ** rng(24).uniform(-60, 60, L.shape), R * 10.0 ** rng(25).uniform(-60, 60, R.shape)


@pytest.mark.parametrize("alone", [0, accurate.ALONE], ids=["in quarters", "alone"])
@pytest.mark.parametrize("factor", [2.0**-48, 2.0**-30])
@pytest.mark.parametrize(
    "kind", ["columns of R", "rows of L", "triangles", "far from the diagonal", "zeros", "elements"]
)
def test_every_element_is_decided_whatever_stands_beside_it(
    kind: str, factor: float, alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accurate, "ALONE", alone)
    monkeypatch.setattr(accurate, "SMALLEST", 2)
    L, R = wide_ranges(kind)
    (m, k), n = L.shape, R.shape[1]
    found = Difference(lambda i, p: L[i, p], lambda p, j: R[p, j], (m, k, n), L)
    for off_by in (0.0, 0.9, 1.1, 100.0):
        X = L @ R
        X += off_by * factor * (abs(L) @ abs(R))
        right, reach = exact(X, L, R)
        (rows, columns), *_ = found.blocks()
        block = found.block(X, rows, columns, factor=factor)
        assert np.array_equal(abs(block.residual) <= block.bound, abs(right) <= Fraction(factor) * reach)
        block = found.block(X, rows, columns, factor=factor, closely=True)
        error = abs(np.vectorize(Fraction, otypes=[object])(block.residual) - right)
        assert np.all(error <= Fraction(factor) / 4 * reach + abs(right) / 2**50)


@pytest.mark.parametrize("kind", ["columns of R", "rows of L", "zeros"])
def test_residuals_of_a_wide_range(kind: str) -> None:
    L, R = wide_ranges(kind)
    assert off(cancelling(L, R), L, R) <= 2.0**-65
