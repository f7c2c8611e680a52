"""`protected_cho_solve` in place of ``scipy.linalg.cho_solve``: shapes, types and messages, faults, clean systems."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import (
    Report,
    SilentDataCorruptionError,
    Status,
    UnverifiableWarning,
    monitor,
    protected_cho_factor,
    protected_cho_solve,
    protected_cholesky,
)
from tests.support.cases import ORDERS, arrange
from tests.support.factor_cases import DTYPES, INPUTS, RIGHT, SIZES, described, once, right, solved
from tests.support.planting import normal

IDS = [dtype.name for dtype in DTYPES]


def positive(n: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    X = normal(n, 2 * n, dtype=np.float64, seed=seed)
    return (X @ X.T + np.eye(n)).astype(dtype)


def solve(factor: Any, b: Any, **options: Any) -> np.ndarray:
    x, report = protected_cho_solve(factor, b, return_report=True, **options)
    assert report.status is Status.CLEAN, report
    assert report.operation == "cho_solve"
    return np.asarray(x)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("kind", RIGHT)
@pytest.mark.parametrize("n", SIZES)
def test_factors_go_both_ways(n: int, kind: str, lower: bool, dtype: Any) -> None:
    a, b = positive(n, dtype), right(kind, n, dtype)
    for factor in (protected_cho_factor(a, lower=lower), linalg.cho_factor(a, lower=lower)):
        x = solve(factor, b)
        assert described(x) == described(linalg.cho_solve(factor, b)) == (b.shape, dtype)
        assert solved(x, a, b)


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_factors_and_right_hand_sides(order: str, lower: bool) -> None:
    a, b = positive(70), normal(70, 30, seed=1)
    c, _ = linalg.cho_factor(a, lower=lower)
    given, factor = arrange(b, order), arrange(c, order)
    given.flags.writeable = factor.flags.writeable = False
    assert solved(solve((factor, lower), given, overwrite_b=True), a, b)
    np.testing.assert_array_equal(given, b)
    np.testing.assert_array_equal(factor, c)


@pytest.mark.parametrize("kind", sorted(set(INPUTS) - {"bool"}))
def test_kinds_of_right_hand_sides(kind: str) -> None:
    factor, b = linalg.cho_factor(positive(20)), INPUTS[kind](normal(20, 3))
    assert described(solve(factor, b)) == described(linalg.cho_solve(factor, b)) == ((20, 3), np.float64)


@pytest.mark.parametrize("left", DTYPES, ids=IDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_mixed_types(left: Any, dtype: Any) -> None:
    factor, b = linalg.cho_factor(positive(20, left)), normal(20, dtype=dtype)
    assert described(solve(factor, b)) == described(linalg.cho_solve(factor, b))


@pytest.mark.parametrize("lower", [False, True])
def test_the_other_triangle_may_hold_anything(lower: bool) -> None:
    a, b = positive(100), normal(100, 3)
    c = protected_cholesky(a, lower=lower)
    wild = c + (np.triu if lower else np.tril)(np.full((100, 100), 1e300), k=1 if lower else -1)
    np.testing.assert_array_equal(solve((wild, lower), b), solve((c, lower), b))
    with pytest.raises(ValueError, match="infs or NaNs"):
        protected_cho_solve((wild * np.inf, lower), b)


def test_stacks() -> None:
    a = np.stack([positive(8, seed=seed) for seed in range(3)])
    c, lower = protected_cho_factor(a)
    for b in (normal(8), normal(8, 2), normal(3, 8, 2), normal(2, 1, 8, 2)):
        x, report = protected_cho_solve((c, lower), b, return_report=True)
        np.testing.assert_allclose(x, np.linalg.solve(a, b), rtol=0, atol=1e-11)
        assert len(report.products) == x.size // 8 // (b.shape[-1] if b.ndim > 1 else 1)


EMPTY = [((0, 0), (0,)), ((0, 0), (0, 3)), ((4, 4), (4, 0)), ((2, 0, 0), (2, 0, 3))]


@pytest.mark.parametrize(("c", "b"), EMPTY, ids=str)
def test_empty_systems_are_scipys(c: tuple[int, ...], b: tuple[int, ...]) -> None:
    factor = np.broadcast_to(np.eye(c[-1]), c), True
    x = solve(factor, np.ones(b))
    assert described(x) == described(linalg.cho_solve(factor, np.ones(b)))
    assert solve((np.empty((0, 4, 4)), True), np.ones((4, 2))).shape == (0, 4, 2)


WRONG: dict[str, tuple[Any, Any]] = {
    "not square": ((np.ones((2, 3)), True), np.ones(2)),
    "a vector": ((np.ones(3), True), np.ones(3)),
    "of another size": ((np.eye(3), True), np.ones(2)),
    "NaN": ((np.eye(2), True), [np.nan, 1.0]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_a_value_error(case: str) -> None:
    for function in (protected_cho_solve, linalg.cho_solve):
        with pytest.raises(ValueError):  # noqa: PT011
            function(*WRONG[case])


def test_what_is_no_pair() -> None:
    with pytest.raises(ValueError, match="incompatible dimensions"):  # where SciPy has an IndexError
        protected_cho_solve((np.eye(3), True), 1.0)
    for given in (np.ones(3), 1.0, (np.eye(2),)):
        with pytest.raises(TypeError, match=r"c_and_lower is a .*the pair \(c, lower\)"):
            protected_cho_solve(given, np.ones(2))
    with pytest.raises(ValueError, match="unknown on_error"):
        protected_cho_solve((np.eye(2), True), np.ones(2), on_error="ignore")


# ---- faults -----------------------------------------------------------------------------------------------------


PLANTS: dict[str, Callable[[Any], None]] = {
    "an element": lambda x: x.__setitem__((17, 1), 1e3),
    "a small one": lambda x: x.__setitem__((17, 1), x[17, 1] * (1 + 1e-6) + 1e-9),
    "NaN": lambda x: x.__setitem__((17, 1), np.nan),
    "a row": lambda x: x.__setitem__(17, 0.5),
    "a sign": lambda x: x.__setitem__((3, 0), -x[3, 0]),
}


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("plant", PLANTS)
def test_a_fault_in_a_substitution_is_repaired(plant: str, stage: str, lower: bool) -> None:
    a, b = positive(40), normal(40, 3, seed=1)
    factor, name = protected_cho_factor(a, lower=lower), {"forward": "z", "backward": "x"}[stage]
    clean = protected_cho_solve(factor, b)
    x, report = protected_cho_solve(factor, b, return_report=True, on_stage=once(stage, name, PLANTS[plant]))
    assert report.status is Status.CORRECTED
    assert (report.faults[0].operand, set(report.faults[0].rows) <= {3, 17}) == (name, True)
    np.testing.assert_array_equal(x, clean)
    jsonschema.validate(report.to_dict(), Report.schema())


def test_detect_repairs_nothing() -> None:
    factor, b = protected_cho_factor(positive(40)), normal(40, 3)
    hook = once("backward", "x", lambda x: x.__setitem__((5, 1), 1e3))
    x, report = protected_cho_solve(factor, b, on_error="detect", return_report=True, on_stage=hook)
    assert (report.status, x[5, 1]) == (Status.UNCORRECTABLE, 1e3)


def test_a_fault_that_stays_raises() -> None:
    def always(stage: str, arrays: Any) -> None:
        if stage == "forward":
            arrays["z"][5, 1] = 1e3

    with pytest.raises(SilentDataCorruptionError, match="forward substitution failed its check"):
        protected_cho_solve(protected_cho_factor(positive(40)), normal(40, 3), on_stage=always)


def test_a_zero_on_the_diagonal_is_said() -> None:
    with pytest.warns(UnverifiableWarning, match="singular"):
        protected_cho_solve((np.diag([1.0, 0.0, 2.0]), True), np.ones(3))


def test_clean_systems_do_not_alarm() -> None:
    rng = np.random.default_rng(0)
    with monitor() as log, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(300):
            n, scale = int(rng.integers(1, 60)), 10.0 ** rng.uniform(-100, 100)
            factor = protected_cho_factor(positive(n, seed=int(rng.integers(1 << 30))) * scale)
            protected_cho_solve(factor, rng.standard_normal((n, 2)) * 10.0 ** rng.uniform(-50, 50))
    assert set(log.counts) == {Status.CLEAN}
