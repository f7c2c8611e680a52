"""The probability that random weights hide a change, against weights that are drawn; and which weights are none."""

from __future__ import annotations

import doctest
import math

import numpy as np
import pytest

from abft_tsm2 import encode, weights
from abft_tsm2.faults.analysis import cancelled
from abft_tsm2.faults.judge import hiding
from abft_tsm2.faults.judge.hiding import chance, probability, require_weights
from tests.support.planting import normal

N = 48


def drawn(x: np.ndarray, limit: float, places: int = N, trials: int = 40_000) -> float:
    """How often weights that are drawn hide changes at the first places."""
    rng = np.random.default_rng(5)
    plus = (places + math.isqrt(places - 1) + 2) // 2
    odd = 2 * np.argsort(rng.random((trials, plus)), axis=1)[:, : places - plus] + 1
    all_places = np.hstack([np.broadcast_to(2 * np.arange(plus), (trials, plus)), odd])
    taken = np.take_along_axis(all_places, np.argsort(rng.random(all_places.shape), axis=1), axis=1)[:, : x.size]
    v = (1 + taken / (4 * plus)) * np.where(taken % 2, -1.0, 1.0)
    return float((abs(v @ x) <= limit).mean())


def test_weights_are_drawn_as_those_of_products_are() -> None:
    x, hidden = np.array([1.0, -1.0]), 0
    for seed in range(200):
        v = weights("balanced", N, seed=seed)[:, 0]
        hidden += int((abs(np.subtract.outer(v, v)[~np.eye(N, dtype=bool)]) <= 0.05).sum())
    assert hidden / (200 * N * (N - 1)) == pytest.approx(probability(x, 0.05, N), rel=0.03)


@pytest.mark.parametrize("name", ["hiding", "cancelled"])
def test_examples(name: str) -> None:
    assert doctest.testmod({"hiding": hiding, "cancelled": cancelled}[name]).failed == 0


@pytest.mark.parametrize(
    ("x", "limit"),
    [
        ([1.0, -1.0], 0.05),
        ([1.0, 1.0], 0.05),
        ([1.0, -1.0], 0.3),
        ([1.0, 1.2], 0.2),
        ([1.0, -2.0], 0.8),
        ([3.0, 0.5], 2.5),
    ],
)
def test_two_changes_are_hidden_as_often_as_weights_that_are_drawn_hide_them(x: list[float], limit: float) -> None:
    p = probability(np.array(x), limit, N)
    assert p == pytest.approx(drawn(np.array(x), limit), abs=5 * math.sqrt(p * (1 - p) / 40_000) + 1e-9)


def test_large_opposite_changes_are_never_hidden() -> None:
    slots = 2 * ((N + math.isqrt(N - 1) + 2) // 2)
    assert probability(np.array([1.0, -1.0]), 0.99 / slots, N) == 0
    assert probability(np.array([1.0, -1.0]), 1.01 / slots, N) > 0
    assert probability(np.array([1.0, 1.0]), 1.01 / (2 * slots), N) > 0  # of two signs: half as far apart
    assert probability(np.array([1.0]), 0.5, N) == 0
    assert probability(np.array([1.0, math.nan]), 0.5, N) == 0
    assert probability(np.array([1.0, -math.inf]), 0.5, N) == 0


def test_many_changes_are_hidden_as_a_normal_variable_is_small() -> None:
    x = np.random.default_rng(0).standard_normal(40)
    p = probability(x, 0.8, N)
    assert p == pytest.approx(drawn(x, 0.8), rel=0.1)


def test_lines_that_were_changed_in_the_same_places_are_hidden_together() -> None:
    limits, one = np.full(8, 0.05), probability(np.array([1.0, -1.0]), 0.05, N)
    lines, x = np.repeat(np.arange(4), 2), np.tile([1.0, -1.0], 4)

    def of(places: list[int], x: np.ndarray = x) -> float | None:
        return chance(lines, np.array(places), x, 1.2 * abs(x), limits, N)

    assert of([3, 7] * 4) == pytest.approx(one)
    assert of([3, 7, 2, 9, 1, 4, 5, 8]) == pytest.approx(1 - (1 - one) ** 4)
    # three lines that show it are enough to put the columns right, two are not
    less = x * np.repeat([1, 1, 1, 0.1], 2)
    assert of([3, 7] * 4, less) == pytest.approx(one)
    assert of([3, 7] * 4, x * np.repeat([1, 1, 0.5, 0.1], 2)) == pytest.approx(
        probability(np.array([0.5, -0.5]), 0.05, N)
    )
    assert of([3, 7] * 4, 0.01 * x) is None  # none of them would be found alone
    assert of([3, 7] * 4, x * np.nan) == 0
    assert chance(lines, np.array([3, 7] * 4), x, abs(x), np.full(8, np.inf), N) is None
    assert chance(lines, np.array([3, 7] * 4), x, abs(x), np.full(8, np.nan), N) == 0


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_weights_that_are_used_are_as_documented(dtype: type) -> None:
    B = normal(40, 300, dtype=dtype) * (2.0 ** (np.arange(300) % 7)).astype(dtype)
    powers = require_weights(encode(B, side="rows").weights.rows[:, 0])
    assert np.array_equal(np.frexp(powers)[0], np.full(300, 0.5))
    require_weights(weights("balanced", 5000)[:, 0])


@pytest.mark.parametrize(
    ("v", "message"),
    [
        (1 + np.arange(65) / 128 - np.repeat([0, 1 / 128], [64, 1]), "2 of 65 weights"),
        (np.linspace(1, 1.9, 10), r"not \[1, 1.5\)"),
        (1 + np.arange(10) / 30, "no numbers of float32"),
    ],
)
def test_other_weights_are_refused(v: np.ndarray, message: str) -> None:
    with pytest.raises(ArithmeticError, match=message):
        require_weights(v)
