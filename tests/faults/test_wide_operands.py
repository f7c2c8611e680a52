"""Trials with operands that span the range of their type: the judge knows the product, the check keeps its promise."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from abft_tsm2.checksum.weights import balanced
from abft_tsm2.faults import Injector, Plan
from abft_tsm2.faults.judge.factor_oracle import lu_error, product_error, solution_error_by_rows, unit
from abft_tsm2.faults.judge.oracle import evened, reference
from abft_tsm2.faults.operands.wide import WIDE
from abft_tsm2.faults.trials.gemm import GemmTrials
from abft_tsm2.faults.trials.trial import BROKEN, Trial, Workload
from tests.support.planting import normal

PLANS = [
    *(Plan("bit_flip", bits="exponent", seed=(seed,)) for seed in range(4)),
    *(Plan("offset", factor=1e-6, seed=(seed,)) for seed in range(3)),
    *(Plan(model, site, persistent=True, seed=(3,)) for site in "AB" for model in ("bit_flip", "swap_elements")),
    *(Plan(model, site, persistent=True, seed=(5,)) for site in "AB" for model in ("cycle_rows", "cycle_columns")),
]


def workload(family: str, dtype: str = "float64", m: int = 14, k: int = 60, n: int = 11, order: str = "C") -> Workload:
    return Workload("gemm", m, k, n, dtype, family, order, (7,))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", WIDE)
def test_no_promise_is_broken(family: str, dtype: str) -> None:
    schemes = ("protected", "columns", "both", "encoded", "stacked")
    trials = [Trial(i, plans, scheme) for scheme in schemes for i, plans in enumerate([(), *((p,) for p in PLANS)])]
    found = Counter(one.outcome for one in GemmTrials(workload(family, dtype), np).run(trials))
    assert not found.keys() & set(BROKEN), found
    assert found["clean"] == len(schemes)
    assert found["corrected"] + found["detected"] > len(trials) / 2


@pytest.mark.parametrize("order", ["C", "F"])
def test_of_a_stack_the_first_product_is_judged(order: str) -> None:
    scene = GemmTrials(workload("normal", order=order), np)
    flip = Plan("bit_flip", bits="exponent_high", seed=(1,))
    (once,) = scene.run([Trial(0, (flip,), "stacked")])
    assert (once.outcome, once.status, once.located) == ("corrected", "CORRECTED", "exact")
    (second,) = scene.run([Trial(0, (Plan("bit_flip", bits="exponent_high", visit=1, seed=(1,)),), "stacked")])
    assert (second.outcome, second.status) == ("corrected", "CORRECTED")


def test_weights_that_are_kept_are_changed_and_made_again() -> None:
    before = balanced(11).copy()
    plan = Plan("scaled", "kept.v", factor=1e-3, seed=(2,))
    A, B = normal(11, 5), normal(5, 11, seed=1)
    kept = balanced(11)
    Injector(plan)("inputs", {"A": A, "B": B})
    assert np.count_nonzero(kept != before) == 1
    assert not kept.flags.writeable
    np.testing.assert_array_equal(balanced(11), before)
    flip = Plan("bit_flip", bits="exponent_high", seed=(4,))
    trials = [Trial(i, (plan, flip) if i else (plan,), "protected") for i in range(2)]
    assert [one.outcome for one in GemmTrials(workload("normal"), np).run(trials)] == ["masked", "corrected"]


@pytest.mark.parametrize("family", ["wide inside", "factorials", "sentinel"])
def test_the_reference_of_evened_operands_is_the_exact_product(family: str) -> None:
    scene = GemmTrials(workload(family, m=5, n=4), np)
    a, b = (np.vectorize(Fraction, otypes=[object])(x) for x in (scene.A, scene.B))
    right, size = a @ b, (abs(a) @ abs(b)).astype(float)
    found = reference(*evened(scene.A, scene.B))
    high, low = (np.vectorize(Fraction, otypes=[object])(x) for x in (found.high, found.low))
    assert (abs((high + low - right).astype(float)) <= 2.0**-70 * size).all()
    np.testing.assert_allclose(found.magnitude, size, rtol=1e-14)


def test_evening_drops_what_meets_zeros_and_leaves_what_is_not_finite() -> None:
    A, B = np.array([[1e300, 2.0], [-1e300, 3.0]]), np.array([[0.0, 0.0], [4.0, 1e-300]])
    a, b = evened(A, B)
    np.testing.assert_array_equal(a @ b, [[8.0, 2e-300], [12.0, 3e-300]])
    assert abs(a).max() < 10
    A[0, 0] = np.inf
    assert evened(A, B)[0] is A


@pytest.mark.parametrize("scale", ["rows", "columns"])
def test_an_error_of_factors_counts_beside_its_own_row_and_column(scale: str) -> None:
    """A tenth of an element is much, in whatever row or column it is."""
    left, right = np.tril(normal(20, 20)), np.triu(normal(20, 20, seed=1))
    grades = 10.0 ** np.linspace(-15, 15, 20)
    left, right = (left * grades[:, None], right) if scale == "rows" else (left, right * grades)
    x = left @ right
    assert product_error(x, left, right, by_lines=True) <= 4 * unit(np.float64)
    for place in (2, 17):
        at = (place, 10) if scale == "rows" else (10, place)
        wrong = x.copy()
        wrong[at] *= 1.1
        assert product_error(wrong, left, right, by_lines=True) > 1e-4


def test_an_error_of_a_solution_counts_beside_its_own_row() -> None:
    from scipy import linalg

    a = normal(20, 20) * 10.0 ** np.linspace(-10, 10, 20)[:, None]
    x = normal(20, 1)[:, 0]
    b = (a.astype(np.longdouble) @ x.astype(np.longdouble)).astype(float)
    lu, piv = linalg.lu_factor(a)
    assert solution_error_by_rows(a, x, b, lu, piv) <= 4 * unit(np.float64)
    for i in (0, 19):
        other = b.copy()
        other[i] *= 1.1
        assert solution_error_by_rows(a, x, other, lu, piv) > 1e-3
    assert lu_error(a, (lu, piv), by_lines=True) <= 20 * unit(np.float64)


def test_growth_excuses_what_it_makes_of_a_solution() -> None:
    """Factors that grow by 2^39 leave a residual of that many roundings of A x: no fault."""
    from scipy import linalg

    n = 40
    a = np.eye(n) - np.tril(np.ones((n, n)), -1)
    a[:, -1] = 1
    b = normal(n, 1)[:, 0]
    lu, piv = linalg.lu_factor(a)
    x = linalg.lu_solve((lu, piv), b)
    assert abs(b - a @ x).max() > 1e-9 * (abs(a) @ abs(x) + abs(b)).max()
    assert solution_error_by_rows(a, x, b, lu, piv) <= 4 * unit(np.float64)
