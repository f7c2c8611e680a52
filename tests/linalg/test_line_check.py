"""Verdicts over many lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2.linalg import line_check
from abft_tsm2.linalg.line_check import LineCheck, column_norms, growth, norm

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # callers have errstate around all checks

USUAL, LEAST = 10.0, 0.03


def verdict(*residual: float, bound: Any = 1.0) -> LineCheck:
    x = np.array(residual)
    return LineCheck.relative_to_median(x, np.broadcast_to(np.asarray(bound, float), x.shape), USUAL, LEAST)


def fine(found: LineCheck) -> list[bool]:
    ok: list[bool] = found.ok.tolist()
    return ok


@pytest.mark.parametrize("wrong", [1.5, -1.5, np.nan, np.inf, -np.inf])
def test_what_is_beyond_its_bound_is_not_fine(wrong: float) -> None:
    for found in (LineCheck.of(np.array([0.5, wrong, 1.0]), np.ones(3)), verdict(0.5, wrong, 1.0)):
        assert fine(found) == [True, False, True]
        assert not found.clean


@pytest.mark.parametrize("bound", [np.nan, np.inf])
def test_a_bound_that_is_not_finite_is_none(bound: float) -> None:
    bounds = np.array([1.0, bound, 1.0])
    for found in (LineCheck.of(np.full(3, 0.5), bounds), verdict(0.5, 0.5, 0.5, bound=bounds)):
        assert fine(found) == [True, False, True]
        assert not found.clean


def test_what_stands_out_is_not_fine_within_its_bound() -> None:
    usual = [0.02, -0.03, 0.04]
    assert verdict(*usual, 0.29).clean
    assert fine(verdict(*usual, 0.41)) == [True, True, True, False]
    assert fine(verdict(0.1, 0.1, 0.1, 0.9, 1.1)) == [True, True, True, True, False]


def test_a_small_part_of_the_bound_is_always_fine() -> None:
    assert verdict(0.0, 0.0, 0.0, LEAST).clean
    assert not verdict(0.0, 0.0, 0.0, 1.01 * LEAST).clean
    assert verdict(0.0, 0.0, bound=0.0).clean is False  # 0 / 0 says nothing


def test_lines_in_doubt_have_company() -> None:
    beside, n = line_check.BESIDE, 10 * line_check.BESIDE
    ok = np.ones(n, bool)
    ok[[0, 2, 5 * beside, n - 1]] = False
    found = LineCheck(np.zeros(n), np.ones(n), ok).suspected
    assert found == [slice(0, beside + 3), slice(4 * beside, 6 * beside + 1), slice(n - 1 - beside, n)]
    ok[...] = False
    assert LineCheck(np.zeros(n), np.ones(n), ok).suspected == [slice(0, n)]


def test_lines_are_compared_with_those_of_their_runs() -> None:
    residual = np.array([0.9, 0.02, 0.03, 0.02, 0.9, 0.9, 0.05])
    found = LineCheck.relative_in_runs(residual, np.ones(7), [slice(1, 4), slice(4, 5), slice(6, 7)], USUAL, LEAST)
    assert fine(found) == [True, True, True, True, False, True, True]
    assert found.residual is residual
    assert LineCheck.relative_in_runs(residual, np.ones(7), [], USUAL, LEAST).clean


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e200, 5e-324, 0.0])
def test_norms_over_the_whole_range(scale: float) -> None:
    x = scale * np.array([3.0, 0.0, -4.0])
    expected = scale * 5.0
    assert norm(x) == pytest.approx(expected, rel=1e-14)
    X = np.stack([x, np.array([3.0, 0.0, -4.0])], axis=1)
    np.testing.assert_allclose(column_norms(X), [expected, 5.0], rtol=1e-14)


def test_norms_of_nothing_and_of_what_is_not_finite() -> None:
    assert norm(np.zeros(0)) == 0.0
    np.testing.assert_array_equal(column_norms(np.zeros((0, 3))), np.zeros(3))
    for bad in (np.nan, np.inf):
        assert not np.isfinite(norm(np.array([1.0, bad])))
        np.testing.assert_array_equal(np.isfinite(column_norms(np.array([[1.0, bad], [1.0, 1.0]]))), [True, False])


@pytest.mark.parametrize("lines", [1, 100, 5000])
def test_growth_is_that_of_the_usual_line(lines: int) -> None:
    rng = np.random.default_rng(lines)
    floor = np.exp(rng.standard_normal(lines))
    sums = 3.0 * floor * (rng.standard_normal(lines) if lines > 1 else np.sqrt(line_check.CHI_SQUARED))
    sums[: lines // 50] = 1e30  # some lines are wrong
    assert growth(floor, sums) == pytest.approx(9.0, rel=0.5)
    assert growth(np.zeros(0), np.zeros(0)) == pytest.approx(1.0)
