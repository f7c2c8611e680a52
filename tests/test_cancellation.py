"""What one checksum of a line lets through, and how often: the numbers of docs/campaigns.rst, from the weights."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from abft_tsm2 import Status, encode, protected_gemm, verify_gemm, weights
from abft_tsm2.checksum.weights import exponents
from abft_tsm2.faults import Plan
from abft_tsm2.faults.gemm_trials import Scene
from abft_tsm2.faults.models import plant
from tests.planting import at, pair
from tests.test_fault_judge import found, workload

PAGE = Path(__file__).resolve().parents[1] / "docs" / "campaigns.rst"
MAGNITUDES = 65
LONG = (256, 1000, 1024, 4096)


def positive(n: int) -> int:
    """How many of n weights are positive: ceil(sqrt(n)) more than are not."""
    return min(n, (n + math.isqrt(max(n - 1, 0)) + 2) // 2)


def same_sign(n: int) -> float:
    """The probability that two of n weights have the same sign."""
    p, q = positive(n), n - positive(n)
    return (p * (p - 1) + q * (q - 1)) / (n * (n - 1))


def counted(v: np.ndarray) -> tuple[float, float]:
    """The shares of pairs of columns with v_j = v_k, and with v_j = -v_k."""
    n = v.size
    values, count = np.unique(v, return_counts=True)
    number = dict(zip(values.tolist(), count.tolist(), strict=True))
    equal = sum(c * (c - 1) for c in number.values())
    against = sum(c * number.get(-x, 0) for x, c in number.items())
    return equal / (n * (n - 1)), against / (n * (n - 1))


def close_weights(steps: int) -> float:
    """The probability that two weights have one sign, and magnitudes at most so many steps of 1/128 apart."""
    t = min(steps, MAGNITUDES - 1)
    return ((2 * t + 1) * MAGNITUDES - t * (t + 1)) / (2 * MAGNITUDES**2)


@pytest.mark.parametrize("n", [2, 16, 64, 65])
def test_up_to_65_columns_no_two_weights_are_equal(n: int) -> None:
    for seed in range(20):
        assert counted(weights("balanced", n, seed=seed)[:, 0]) == (0, 0)


@pytest.mark.parametrize("n", [*LONG, 66, 128])
def test_two_weights_are_equal_once_in_130_pairs(n: int) -> None:
    shares = np.array([counted(weights("balanced", n, seed=seed)[:, 0]) for seed in range(60)])
    expected = np.array([same_sign(n), 1 - same_sign(n)]) / MAGNITUDES
    deviation = shares.std(axis=0) / math.sqrt(60)
    assert (abs(shares.mean(axis=0) - expected) < 5 * deviation).all()
    assert expected == pytest.approx([1 / 130, 1 / 130], rel=0.01)
    if math.isqrt(n) ** 2 == n:
        assert same_sign(n) == 0.5  # exactly: what the excess of sqrt(n) signs is for


@pytest.mark.parametrize("n", LONG)
def test_the_weights_that_are_used_are_no_exception(n: int) -> None:
    own = counted(weights("balanced", n)[:, 0])
    assert own == pytest.approx([1 / 130, 1 / 130], rel=0.1)
    said = re.search(rf"\* - {n}\n     - ([0-9.]+) %\n     - ([0-9.]+) %\n", PAGE.read_text(encoding="utf-8"))
    if n != 1000:
        assert said is not None
        assert [float(x) for x in said.groups()] == [round(100 * share, 2) for share in own]


def test_equilibration_makes_equal_weights_rarer() -> None:
    n, rng = 1024, np.random.default_rng(0)
    scale = 2.0 ** rng.integers(-3, 4, n)
    for B in (rng.standard_normal((200, n)), rng.standard_normal((200, n)) * scale):
        e = exponents(np.log2(np.linalg.norm(B, axis=0)))
        octaves = np.unique(e, return_counts=True)[1] / n
        share = counted(encode(B, side="rows").weights.rows[:, 0])[0]
        assert share == pytest.approx((octaves**2).sum() / 130, rel=0.1)


@pytest.mark.parametrize("steps", [0, 1, 3, 10, 63, 64, 200])
def test_weights_a_few_steps_apart_are_as_frequent_as_the_formula_says(steps: int) -> None:
    v = weights("balanced", 4096)[:, 0]
    j, k = np.random.default_rng(steps).integers(0, 4096, (2, 400_000))
    apart = abs(v[j] - v[k])[j != k] <= steps / 128
    assert apart.mean() == pytest.approx(close_weights(steps), rel=0.05)
    assert close_weights(0) == pytest.approx(1 / 130)
    assert close_weights(64) == 0.5


@pytest.mark.parametrize("signs", [(1, -1), (1, 1)], ids=["+d, -d", "+d, +d"])
def test_what_cancels_passes_one_side_and_neither_two_sides_nor_two_seeds(signs: tuple[int, int]) -> None:
    A, B = pair(300, 40, 256)
    v = encode(B, side="rows").weights.rows[:, 0]
    other = weights("balanced", 256, seed=2)
    j, k = next((j, k) for j in range(256) for k in range(j) if signs[0] * v[j] == -signs[1] * v[k])

    def plant_both(C: np.ndarray) -> None:
        C[7, j] += 3 * signs[0]
        C[7, k] += 3 * signs[1]

    hook = at("multiplied", "C", plant_both)
    C, report = protected_gemm(A, B, check="rows", on_stage=hook, return_report=True)
    assert report.status is Status.CLEAN
    assert abs(C - A @ B).max() > 2
    assert not verify_gemm(A, encode(B, side="rows", weights=other), C, on_error="detect").ok
    _, both = protected_gemm(A, B, check="both", on_stage=hook, return_report=True)
    assert both.status is Status.CORRECTED


def test_a_rectangle_passes_both_sides_only_where_both_pairs_of_weights_are_equal() -> None:
    A, B = pair(300, 40, 256)
    v = encode(B, side="rows").weights.rows[:, 0]
    w = encode(A, side="columns").weights.columns[:, 0]

    def equal(x: np.ndarray) -> tuple[int, int]:
        return next((j, k) for j in range(x.size) for k in range(j) if x[j] == x[k])

    def differing(x: np.ndarray) -> tuple[int, int]:
        return next((j, k) for j in range(x.size) for k in range(j) if abs(x[j]) != abs(x[k]))

    passes = {}
    for rows in (equal(w), differing(w)):
        for columns in (equal(v), differing(v)):

            def rectangle(C: np.ndarray, i: tuple[int, int] = rows, j: tuple[int, int] = columns) -> None:
                C[np.ix_(i, j)] += 3 * np.array([[1, -1], [-1, 1]])

            for check in ("rows", "columns", "both"):
                hook = at("multiplied", "C", rectangle)
                report = protected_gemm(A, B, check=check, on_stage=hook, return_report=True)[1]
                passes[rows == equal(w), columns == equal(v), check] = report.status is Status.CLEAN
    for (rows_equal, columns_equal, check), passed in passes.items():
        hidden = {"rows": columns_equal, "columns": rows_equal, "both": rows_equal and columns_equal}
        assert passed == hidden[check]
    assert pytest.approx(5.9e-5, rel=0.01) == (1 / 130) ** 2


def test_opposite_changes_on_equal_weights_cancel_under_one_side_and_not_under_both() -> None:
    scene, equal = Scene(workload(130, 50, 130), np), []
    assert found("protected", scene=scene).outcome == "clean"
    (promise,) = scene._way("protected").promises
    for seed in range(1500):
        C, plan = np.ones((130, 130)), Plan("opposite", factor=3.0, seed=(seed,))
        plant(C, plan, plan.rng())  # at the places that it will have
        (a, b), (c, d) = np.argwhere(C != 1)
        if promise.side == "columns":
            a, b, c, d = b, a, d, c
        if a == c and promise.v[b] == promise.v[d]:
            equal.append(plan)
    assert len(equal) >= 3
    for plan in equal:
        assert found("protected", plan, scene=scene).outcome == "cancelled"
        assert found("none", plan, scene=scene).outcome == "cancelled"
        assert found("both", plan, scene=scene).outcome == "corrected"
