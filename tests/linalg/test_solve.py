"""`protected_solve` in place of ``scipy.linalg.solve``: the same goes in and comes out, and solves the system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg, special

from abft_tsm2 import (
    Status,
    protected_lu_solve,
    protected_solve,
)
from tests.support.cases import ORDERS, arrange
from tests.support.factor_cases import (
    DTYPES,
    INPUTS,
    MODES,
    RIGHT,
    SIZES,
    backward_error,
    computed_in,
    described,
    outcome,
    positive,
    right,
    solved,
    unit,
)
from tests.support.planting import bits, normal

IDS = [dtype.name for dtype in DTYPES]


def solve(a: Any, b: Any, **options: Any) -> np.ndarray:
    x, report = protected_solve(a, b, return_report=True, **options)
    assert report.status is Status.CLEAN, report
    return np.asarray(x)


# ---- solve --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("refine", [False, True], ids=["", "refined"])
@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("n", SIZES)
def test_systems_of_every_size(n: int, kind: str, refine: bool, mode: str, dtype: Any) -> None:
    a, b = normal(n, n, dtype=dtype), right(kind, n, dtype)
    held = a.copy(), b.copy()
    x = solve(a, b, mode=mode, refine=refine)
    assert described(x) == described(linalg.solve(a, b)) == (b.shape, dtype)
    assert solved(x, a, b)
    assert np.array_equal(bits(a), bits(held[0]))
    assert np.array_equal(bits(b), bits(held[1]))


def test_refinement_makes_the_residual_small_row_by_row() -> None:
    # Skeel, Math. Comp. 35 (1980) 817: one step suffices, where rows of A differ as well.
    a = normal(60, 60) * 2.0 ** np.random.default_rng(3).integers(-12, 12, (60, 1))
    b = a @ normal(60)
    plain, refined = (backward_error(a, solve(a, b, refine=refine), b, by_rows=True) for refine in (False, True))
    assert refined <= min(plain, 62 * unit(np.float64))


@pytest.mark.filterwarnings("ignore:An ill-conditioned matrix")
def test_refinement_that_does_not_converge_is_not_kept() -> None:
    # (-1)^j binomial(i, j) 2^-i, of condition 10^34: a step made errors of rows smaller, the residual 11 times larger.
    n = 115
    i, j = np.ogrid[:n, :n]
    a = (-1.0) ** j * special.binom(i, j) * 2.0**-i
    for seed in range(5):
        plain, refined = (solve(a, normal(n, seed=seed), refine=refine) for refine in (False, True))
        assert np.array_equal(plain, refined)


STRUCTURES: Mapping[str, np.ndarray] = {
    "diagonal": np.diag(1 + np.arange(30.0)),
    "tridiagonal": np.triu(np.tril(normal(30, 30), 1), -1) + 9 * np.eye(30),
    "banded": np.triu(np.tril(normal(30, 30), 3), -2) + 9 * np.eye(30),
    "upper triangular": np.triu(normal(30, 30)) + 9 * np.eye(30),
    "lower triangular": np.tril(normal(30, 30)) + 9 * np.eye(30),
    "symmetric": normal(30, 30) + normal(30, 30).T + 20 * np.diag((-1.0) ** np.arange(30)),
    "hermitian": normal(30, 30) + normal(30, 30).T + 20 * np.diag((-1.0) ** np.arange(30)),
    "positive definite": positive(30),
    "general": normal(30, 30),
}


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("assume_a", [*STRUCTURES, "gen", "sym", "her", "pos", None])
def test_every_structure(assume_a: str | None, transposed: bool) -> None:
    short = {"gen": "general", "sym": "symmetric", "her": "hermitian", "pos": "positive definite", None: "general"}
    a, b = STRUCTURES[short.get(assume_a, str(assume_a))], normal(30, 2)
    theirs = outcome(linalg.solve, a, b, assume_a=assume_a, transposed=transposed)
    if theirs.error is not None:  # SciPy has no transposed solver of every structure
        with pytest.raises(type(theirs.error)):
            protected_solve(a, b, assume_a=assume_a, transposed=transposed)
        return
    x = solve(a, b, assume_a=assume_a, transposed=transposed)
    assert solved(x, a.T if transposed else a, b)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("assume_a", ["sym", "her", "pos", "symmetric", "positive definite"])
def test_of_a_symmetric_matrix_one_half_is_read(assume_a: str, lower: bool) -> None:
    whole, b = positive(30), normal(30)
    half = np.tril(whole) if lower else np.triu(whole)
    other = half + (np.triu(normal(30, 30), 1) if lower else np.tril(normal(30, 30), -1))
    assert solved(solve(other, b, assume_a=assume_a, lower=lower), whole, b)


@pytest.mark.parametrize("kind", INPUTS)
def test_what_scipy_takes_for_a_system(kind: str) -> None:
    a, b = INPUTS[kind](normal(20, 20)), normal(20)
    assert described(solve(a, b)) == described(linalg.solve(a, b)) == ((20,), np.float64)
    assert described(solve(a, a)) == ((20, 20), computed_in(a))
    assert described(solve(normal(20, 20), INPUTS[kind](normal(20, 20)))) == ((20, 20), np.float64)


@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_a_and_b(order: str) -> None:
    a, b = normal(70, 70), normal(70, 30, seed=1)
    x = solve(arrange(a, order), arrange(b, order))
    assert solved(x, a, b)


@pytest.mark.parametrize("assume_a", ["diagonal", "tridiagonal", "upper triangular", "lower triangular"])
def test_what_lies_outside_of_a_structure_is_not_read(assume_a: str) -> None:
    a, b = normal(30, 30) + 9 * np.eye(30), normal(30, 2)
    for transposed in (False, True):
        expected = linalg.solve(a, b, assume_a=assume_a, transposed=transposed)
        np.testing.assert_allclose(solve(a, b, assume_a=assume_a, transposed=transposed), expected, rtol=1e-10)


def test_matrices_of_one_element() -> None:
    for a, b in (
        ([[2.0]], [4.0]),
        (np.array([[2.0]]), np.array([[4.0]])),
        (np.full((3, 1, 1), 2.0), np.ones((3, 1, 2))),
    ):
        x = protected_solve(a, b)
        assert described(x) == described(linalg.solve(a, b))
        np.testing.assert_array_equal(x, linalg.solve(a, b))


@pytest.mark.parametrize(
    "shapes", [((3, 9, 9), (9, 2)), ((3, 9, 9), (3, 9, 2)), ((9, 9), (2, 9, 4)), ((2, 9, 9), (9,))]
)
def test_batches_of_systems(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = normal(*shapes[0]), normal(*shapes[1])
    x, report = protected_solve(a, b, return_report=True)
    assert report.status is Status.CLEAN
    count = max(len(y) for y in (a, b) if y.ndim == 3)
    assert x.shape == (count, *b.shape[-2:])
    for i in range(count):
        assert solved(x[i], a[i] if a.ndim == 3 else a, b[i] if b.ndim == 3 else b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "a",
    [np.zeros((3, 3)), np.ones((3, 3)), np.zeros((1, 1)), np.diag([1.0, 0, 2])],
    ids=["0", "1", "1 x 1", "diagonal"],
)
def test_singular_systems(a: np.ndarray, mode: str) -> None:
    assert isinstance(outcome(linalg.solve, a, np.ones(len(a))).error, linalg.LinAlgError)
    with pytest.raises(linalg.LinAlgError, match="singular"):
        protected_solve(a, np.ones(len(a)), mode=mode)
    with pytest.raises(linalg.LinAlgError, match="singular"):
        protected_solve(a, np.ones(len(a)), mode=mode, assume_a="gen")


@pytest.mark.parametrize("assume_a", ["gen", None])
def test_ill_conditioned_systems_warn(assume_a: str | None) -> None:
    a, b = linalg.hilbert(14), np.ones(14)
    ours = outcome(protected_solve, a, b, assume_a=assume_a)
    theirs = outcome(linalg.solve, a, b, assume_a=assume_a)
    assert [category for category, _ in ours.warned] == [category for category, _ in theirs.warned]
    assert [category for category, _ in ours.warned] == [linalg.LinAlgWarning]
    assert "ll-conditioned" in ours.warned[0][1]
    assert "rcond" in ours.warned[0][1]
    with pytest.warns(linalg.LinAlgWarning) as caught:
        protected_solve(a, b, assume_a=assume_a)
    assert caught[0].filename == __file__


def test_what_solve_refuses() -> None:
    a, b = normal(3, 3), np.ones(3)
    with pytest.raises(ValueError, match="square"):
        protected_solve(normal(2, 3), b[:2])
    with pytest.raises(ValueError, match="foo"):
        protected_solve(a, b, assume_a="foo")
    with pytest.raises(ValueError, match=r"mode.*'onlin'.*online"):
        protected_solve(a, b, mode="onlin", on_stage=pytest.fail)
    with pytest.raises(ValueError, match="on_error"):
        protected_solve(a, b, on_error="fix", on_stage=pytest.fail)
    for operands in ((a + 0j, b), (a, b + 0j)):
        with pytest.raises(TypeError, match="complex"):
            protected_solve(*operands)
    a[1, 1] = np.nan
    assert outcome(protected_solve, a, b).kind == (ValueError, "array must not contain infs or NaNs")


@settings(max_examples=100)
@given(
    st.integers(1, 70),
    st.integers(0, 5),
    st.sampled_from(DTYPES),
    st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)),
    st.sampled_from(MODES),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_any_system_is_solved(
    n: int, columns: int, dtype: Any, orders: tuple[str, str], mode: str, refine: bool, seed: int
) -> None:
    a, b = normal(n, n, dtype=dtype, seed=seed), normal(n, columns, dtype=dtype, seed=seed)
    x = solve(arrange(a, orders[0]), arrange(b, orders[1]), mode=mode, refine=refine)
    assert x.shape == b.shape
    assert columns == 0 or solved(x, a, b)
    for trans in (0, 1):
        y = protected_lu_solve(linalg.lu_factor(a), arrange(b, orders[1]), trans=trans)
        assert columns == 0 or solved(y, a.T if trans else a, b)


@pytest.mark.filterwarnings("ignore:An ill-conditioned matrix")
@pytest.mark.parametrize(("dtype", "pivot"), [(np.float64, 3e-310), (np.float32, 1e-40)])
def test_pivots_without_a_reciprocal_are_divided_by(dtype: Any, pivot: float) -> None:
    """1 / pivot overflows, b / pivot does not."""
    a = np.diag(np.array([2.0, pivot, 1.0], dtype))
    b = np.array([1.0, pivot / 8, 3.0], dtype)
    x, report = protected_solve(a, b, return_report=True)
    assert np.array_equal(x, b / np.diagonal(a))
    assert report.status is Status.CLEAN
    one, report = protected_solve(a[1:2, 1:2], b[1:2], return_report=True)
    assert np.array_equal(one, x[1:2])
    assert report.status is Status.CLEAN
