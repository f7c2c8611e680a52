"""What one checksum of a line lets through, and how often: the numbers of docs/campaigns.rst, from the weights."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from abft_tsm2 import Status, encode, protected_gemm, verify_gemm, weights
from abft_tsm2.checksum.encode import exponents
from abft_tsm2.faults import Plan
from abft_tsm2.faults.models import plant
from abft_tsm2.faults.trials.gemm import GemmTrials
from tests.faults.test_fault_judge import found, workload
from tests.support.planting import at, pair

PAGE = Path(__file__).resolve().parents[2] / "docs" / "campaigns.rst"
LONG = (256, 1000, 1024)


def positive(n: int) -> int:
    """How many of n weights are positive: ceil(sqrt(n)) more than are not."""
    return min(n, (n + math.isqrt(max(n - 1, 0)) + 2) // 2)


def same_sign(n: int) -> float:
    """The probability that two of n weights have the same sign."""
    p, q = positive(n), n - positive(n)
    return (p * (p - 1) + q * (q - 1)) / (n * (n - 1))


def hidden(n: int, steps: float) -> float:
    """The documented probability: two weights of one sign, at most so many steps of 1/2P apart."""
    p, q = positive(n), n - positive(n)
    t = min(math.floor(steps), p - 1)
    return (1 + q * (q - 1) / (p * (p - 1))) * (2 * t * p - t * (t + 1)) / (n * (n - 1))


def closest(v: np.ndarray, sign: float) -> tuple[int, int]:
    """The two columns with the least |v_j - sign v_k|."""
    apart = abs(v[:, None] - sign * v)
    np.fill_diagonal(apart, np.inf)
    j, k = np.unravel_index(int(apart.argmin()), apart.shape)
    return int(j), int(k)


@pytest.mark.parametrize("n", LONG)
@pytest.mark.parametrize("steps", [0, 1, 3, 10, 63, 200])
def test_weights_a_few_steps_apart_are_as_frequent_as_the_formula_says(n: int, steps: int) -> None:
    shares = []
    for seed in range(10):
        v = weights("balanced", n, seed=seed)[:, 0]
        apart = abs(v[:, None] - v)[~np.eye(n, dtype=bool)]
        shares.append(
            (apart <= steps / (2 * positive(n)) + 2.0**-22).mean()
        )  # magnitudes are rounded down by 2^-23 at most
    assert np.mean(shares) == pytest.approx(hidden(n, steps), rel=0.1)
    assert hidden(n, 0) == 0
    assert hidden(n, n) == pytest.approx(same_sign(n))
    if math.isqrt(n) ** 2 == n:
        assert same_sign(n) == 0.5  # exactly: what the excess of sqrt(n) signs is for


def test_the_page_has_the_numbers_of_its_formula() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for ratio in (10, 100, 1000, 10000):
        said = re.search(rf"\* - {ratio}\n     - ([0-9.]+) %\n     - ([0-9.]+) %\n     - ([0-9.]+) %\n", text)
        assert said is not None
        expected = [f"{100 * hidden(n, 2 * positive(n) / ratio):.2g}" for n in (256, 1024, 4096)]
        assert list(said.groups()) == expected


def test_columns_of_different_octaves_never_have_weights_of_one_size() -> None:
    n, rng = 512, np.random.default_rng(0)
    B = rng.standard_normal((200, n)) * 2.0 ** rng.integers(-3, 4, n)
    e = exponents(np.log2(np.linalg.norm(B, axis=0)))
    v = abs(encode(B, side="rows").weights.rows[:, 0])
    for one in np.unique(e)[:-1]:
        ratio = np.divide.outer(v[e == one], v[e == one + 1])
        assert ratio.min() >= 4 / 3


@pytest.mark.parametrize("sign", [1, -1], ids=["+d, -d", "+d, +d"])
def test_what_cancels_passes_one_side_and_neither_two_sides_nor_two_seeds(sign: int) -> None:
    A, B = pair(300, 40, 256)
    v = encode(B, side="rows").weights.rows[:, 0]
    other = weights("balanced", 256, seed=2)
    j, k = closest(v, sign)
    bound = protected_gemm(A, B, check="rows", return_report=True)[1].checks[0].bound
    d = 0.1 * bound / abs(v[j] - sign * v[k])
    assert d * abs(v[j]) > 4 * bound  # either would be found alone

    def plant_both(C: np.ndarray) -> None:
        C[7, j] += d
        C[7, k] -= sign * d

    hook = at("multiplied", "C", plant_both)
    C, report = protected_gemm(A, B, check="rows", on_stage=hook, return_report=True)
    assert report.status is Status.CLEAN
    assert abs(C - A @ B).max() > 0.9 * d
    assert not verify_gemm(A, encode(B, side="rows", weights=other), C, on_error="detect").ok
    _, both = protected_gemm(A, B, check="both", on_stage=hook, return_report=True)
    assert both.status is Status.CORRECTED
    d *= 100  # more than 2n times the bound: no two weights are so close
    _, report = protected_gemm(A, B, check="rows", on_stage=hook, return_report=True)
    assert report.status is Status.CORRECTED


def test_columns_that_change_places_are_found_even_where_their_weights_are_closest() -> None:
    A, B = pair(96, 80, 700)
    v = encode(B, side="rows").weights.rows[:, 0]
    near = np.argsort(v)
    for j, k in zip(near[:-1:25], near[1::25], strict=True):

        def swap(C: np.ndarray, j: int = int(j), k: int = int(k)) -> None:
            C[:, [j, k]] = C[:, [k, j]]

        C, report = protected_gemm(A, B, check="rows", on_stage=at("multiplied", "C", swap), return_report=True)
        assert report.status is Status.CORRECTED
        np.testing.assert_allclose(C, A @ B, rtol=0, atol=1e-12 * abs(A @ B).max())
    assert protected_gemm(A, B, check="rows", return_report=True)[1].status is Status.CLEAN


def test_a_rectangle_passes_both_sides_only_where_both_pairs_of_weights_are_close() -> None:
    A, B = pair(300, 40, 256)
    v = encode(B, side="rows").weights.rows[:, 0]
    w = encode(A, side="columns").weights.columns[:, 0]
    report = protected_gemm(A, B, check="both", return_report=True)[1]
    bound = {check.side: check.bound for check in report.checks}
    near = {"rows": closest(w, 1), "columns": closest(v, 1)}
    far = {"rows": (int(w.argmin()), int(w.argmax())), "columns": (int(v.argmin()), int(v.argmax()))}
    d = min(
        0.1 * bound["rows"] / abs(np.subtract(*v[list(near["columns"])])),
        0.1 * bound["columns"] / abs(np.subtract(*w[list(near["rows"])])),
    )
    for rows_close in (True, False):
        for columns_close in (True, False):
            i = (near if rows_close else far)["rows"]
            j = (near if columns_close else far)["columns"]

            def rectangle(C: np.ndarray, i: tuple[int, int] = i, j: tuple[int, int] = j) -> None:
                C[np.ix_(i, j)] += d * np.array([[1, -1], [-1, 1]])

            passes = {"rows": columns_close, "columns": rows_close, "both": rows_close and columns_close}
            for check, expected in passes.items():
                hook = at("multiplied", "C", rectangle)
                report = protected_gemm(A, B, check=check, on_stage=hook, return_report=True)[1]
                assert (report.status is Status.CLEAN) == expected, (rows_close, columns_close, check)


def test_opposite_changes_on_close_weights_cancel_under_one_side_and_not_under_both() -> None:
    scene, close = GemmTrials(workload(130, 50, 130), np), []
    clean = found("protected", scene=scene)
    assert clean.outcome == "clean"
    assert clean.limit is not None
    (promise,) = scene._runner("protected", "none").promises
    for seed in range(1500):
        C, plan = np.ones((130, 130)), Plan("opposite", factor=20 * clean.limit, seed=(seed,))
        plant(C, plan, plan.rng())  # at the places that it will have
        (a, b), (c, d) = np.argwhere(C != 1)
        if promise.side == "columns":
            a, b, c, d = b, a, d, c
        if a == c and abs(promise.v[b] - promise.v[d]) <= 2 * abs(promise.v[b]) / 260:
            close.append(plan)
    assert len(close) >= 3
    for plan in close:
        one = found("protected", plan, scene=scene)
        assert one.outcome == "cancelled"
        assert 0 < (one.chance or 0) < 0.5
        assert re.match(r"(row|column) \d+: \|sum v d\| = \S+ is within the bound \S+, one element alone", one.note)
        assert found("none", plan, scene=scene).outcome == "cancelled"
        assert found("both", plan, scene=scene).outcome == "corrected"
    large = Plan("opposite", factor=1.0, seed=close[0].seed)  # the same places
    assert found("protected", large, scene=scene).outcome == "corrected"
    assert found("protected", large, scene=scene).chance is None
