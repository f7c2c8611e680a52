"""Each fault model changes what it says it does, in any type and layout, and nothing else; `fault_changes` judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abft_tsm2.faults import Plan
from abft_tsm2.faults.models import CHANGES, plant
from abft_tsm2.faults.plan import CLASSES, ELEMENTS, PRODUCTION
from tests.support.cases import DTYPES, ORDERS, arrange
from tests.support.fault_changes import JUDGES, UNSIGNED, Change
from tests.support.planting import normal

SHAPES = ((1, 1), (1, 7), (7, 1), (2, 2), (3, 5), (1, 70), (70, 1), (65, 67), (130, 70))
CARRIES = ("wrong_carry", "missing_carry", "production")  # into digits: into the sign there is none

models = st.sampled_from(list(CHANGES))
shapes = st.sampled_from(SHAPES) | st.tuples(st.integers(1, 9), st.integers(1, 9))
orders = st.sampled_from(ORDERS)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32)
counts = st.sampled_from([1, 1, 2, 3, 64, 10**6])
factors = st.sampled_from([2.0, 2.0, 0.0, -1.0, 1.5, 1e-3, 100.0])


def data(shape: tuple[int, int], dtype: np.dtype[Any], seed: int = 0) -> np.ndarray:
    """Numbers of ordinary size, none of them 0."""
    rng = np.random.default_rng([seed, *shape])
    numbers: np.ndarray = (rng.choice([-1.0, 1.0], shape) * rng.uniform(0.25, 4, shape)).astype(dtype)
    return numbers


def words(x: np.ndarray) -> np.ndarray:
    return x.view(UNSIGNED[x.dtype.itemsize])


def planted(x: np.ndarray, plan: Plan, order: str = "C") -> Change:
    """Plant into x, laid out so; what lies around it in memory has to stay."""
    view = arrange(x, order)
    memory = view if view.base is None else view.base
    around = words(memory).copy()
    bit = plant(view, plan, plan.rng())
    after = view.copy()
    words(view)[...] = words(np.ascontiguousarray(x))
    np.testing.assert_array_equal(words(memory), around)
    return Change(np.ascontiguousarray(x), np.ascontiguousarray(after), plan, bit)


def class_for(model: str, chosen: str) -> str:
    return "any" if model in CARRIES and chosen == "sign" else chosen


@pytest.mark.parametrize("model", CHANGES)
@settings(max_examples=120)
@given(
    shape=shapes, order=orders, dtype=dtypes, bits=st.sampled_from(CLASSES), count=counts, factor=factors, seed=seeds
)
def test_a_model_changes_what_it_says_and_nothing_else(
    model: str,
    shape: tuple[int, int],
    order: str,
    dtype: np.dtype[Any],
    bits: str,
    count: int,
    factor: float,
    seed: int,
) -> None:
    plan = Plan(model, bits=class_for(model, bits), count=count, factor=factor, seed=(seed,))
    JUDGES[model](planted(data(shape, dtype), plan, order))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bit_that_is_named_by_its_number_is_the_one(dtype: np.dtype[Any]) -> None:
    for bit in range(8 * dtype.itemsize):
        for model in ("bit_flip", "multi_bit", "wrong_carry"):
            change = planted(data((3, 5), dtype), Plan(model, bits=str(bit), seed=(bit,)))
            assert change.bit == bit
            if model != "wrong_carry":
                assert change.bits_flipped() == [bit]


@given(model=models, dtype=dtypes, seed=seeds, length=st.sampled_from([1, 2, 7, 70]), count=counts)
def test_a_vector_is_a_matrix_of_one_column(
    model: str, dtype: np.dtype[Any], seed: int, length: int, count: int
) -> None:
    plan = Plan(model, count=count, seed=(seed,))
    matrix = data((length, 1), dtype)
    vector = matrix[:, 0].copy()
    bits = plant(vector, plan, plan.rng()), plant(matrix, plan, plan.rng())
    assert bits[0] == bits[1]
    np.testing.assert_array_equal(words(vector), words(matrix)[:, 0])


@pytest.mark.parametrize("model", sorted(ELEMENTS))
def test_a_count_beyond_the_array_means_all_of_it_and_takes_no_memory(model: str) -> None:
    x = normal(7, 5)
    with np.errstate(all="ignore"):
        plant(x, Plan(model, count=10**15, bits="mantissa", factor=3.0), np.random.default_rng(0))
    same = np.count_nonzero(x == normal(7, 5))
    assert same == 0 if model not in ("stuck_at_0", "stuck_at_1") else same < x.size


@pytest.mark.parametrize("model", CHANGES)
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (0,)])
def test_nothing_happens_to_what_is_empty(model: str, shape: tuple[int, ...]) -> None:
    assert plant(np.empty(shape), Plan(model), Plan(model).rng()) == -1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", CHANGES)
def test_no_model_warns_or_fails_whatever_the_words_are(model: str, dtype: np.dtype[Any]) -> None:
    # NaN with payloads, infinities, subnormal numbers and both zeros among them
    kind = UNSIGNED[dtype.itemsize]
    for seed in range(30):
        rng = np.random.default_rng(seed)
        x = rng.integers(0, np.iinfo(kind).max, (9, 11), kind, endpoint=True).view(dtype)
        x[0, :4] = [np.nan, np.inf, -np.inf, -0.0]
        plan = Plan(model, count=5, seed=(seed,))
        one, other = arrange(x, "C"), x.copy(order="F")
        words(one)[...] = words(x)  # a copy may quieten a NaN
        words(other)[...] = words(x)
        assert plant(one, plan, plan.rng()) == plant(other, plan, plan.rng())
        np.testing.assert_array_equal(words(one), words(other))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("count", [1, 3, 100])
def test_a_stuck_bit_is_set_or_cleared_and_stays_so(count: int, value: int, dtype: np.dtype[Any]) -> None:
    kind = UNSIGNED[dtype.itemsize]
    against = np.full((4, 5), 0 if value else np.iinfo(kind).max, kind)  # every bit is the other one
    plan = Plan(f"stuck_at_{value}", count=count, seed=(3,))
    x = against.view(dtype)
    bit = plant(x, plan, plan.rng())
    found = against.copy()
    assert (found >> kind(bit) & kind(1) == value).sum() == min(count, 20)
    assert plant(x, plan, plan.rng()) == bit
    np.testing.assert_array_equal(against, found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_carry_runs_on_as_carries_do(dtype: np.dtype[Any]) -> None:
    kind = UNSIGNED[dtype.itemsize]
    full = np.array([[2.0]], dtype)
    words(full)[...] -= kind(1)  # all ones: the largest number below 2
    mantissa = Change(full, full, Plan("nan"), 0).mantissa
    for sign in (1, -1):
        x = (full * sign).astype(dtype)
        plant(x, Plan("wrong_carry", bits="0"), np.random.default_rng(0))
        assert x.astype(float).tolist() == [[2.0 * sign]]
        plant(x, Plan("missing_carry", bits="0"), np.random.default_rng(0))
        assert words(x).tolist() == words((full * sign).astype(dtype)).tolist()
        plant(x, Plan("missing_carry", bits=str(mantissa)), np.random.default_rng(0))  # from the exponent: halved
        np.testing.assert_array_equal(x.astype(float), (full * sign).astype(float) / 2)


def test_nothing_can_be_taken_from_zero() -> None:
    x = np.array([[0.0, -0.0]])
    plant(x, Plan("missing_carry", count=2), np.random.default_rng(0))
    assert words(x).tolist() == words(np.array([[0.0, -0.0]])).tolist()


@given(count=st.sampled_from([1, 20]), dtype=dtypes, seed=seeds)
def test_infinities_and_nan_have_either_sign(count: int, dtype: np.dtype[Any], seed: int) -> None:
    change = planted(data((4, 5), dtype), Plan("inf", count=count, seed=(seed,)))
    assert np.unique(np.signbit(change.after[change.where].astype(float))).size == 1  # one fault, one sign


def shares(trials: int, count: Callable[[int], str]) -> dict[str, float]:
    found = Counter(count(seed) for seed in range(trials))
    return {name: number / trials for name, number in found.items()}


def close(found: dict[str, float], expected: dict[str, float], trials: int) -> None:
    """Within five standard deviations of what chance does."""
    assert set(found) <= set(expected)
    for name, share in expected.items():
        assert abs(found.get(name, 0.0) - share) <= 5 * (share * (1 - share) / trials) ** 0.5 + 1e-12, name


def test_kinds_of_production_faults_come_as_often_as_they_were_seen() -> None:
    x = data((6, 7), np.dtype(np.float64), 1)

    def kind(seed: int) -> str:
        # By what was done to the digits: a flip in the exponent or sign is no carry into the mantissa.
        plan = Plan("production", bits="63", seed=(seed,))  # the sign: a carry into it does nothing
        change = planted(x, plan)
        return "flip" if change.bits_flipped() == [63] else "carry" if not change.where.any() else "other"

    trials, one = 3000, PRODUCTION["bit_flip"] + PRODUCTION["compound"]
    close(shares(trials, kind), {"flip": one, "carry": 1 - one, "other": 0.0}, trials)

    def elements(seed: int) -> str:
        change = planted(x, Plan("production", bits="40", seed=(seed,)))
        return "compound" if change.where.sum() > 1 else "one"

    two = PRODUCTION["compound"] * 41 / 42  # else both hit the same element
    close(shares(trials, elements), {"compound": two, "one": 1 - two}, trials)


def test_bits_and_places_are_chosen_evenly() -> None:
    x, trials = data((4, 5), np.dtype(np.float32)), 4000
    changes = [planted(x, Plan("bit_flip", seed=(seed,))) for seed in range(trials)]
    close(shares(trials, lambda seed: str(changes[seed].bit)), dict.fromkeys(map(str, range(32)), 1 / 32), trials)
    at = [str(int(np.flatnonzero(change.where)[0])) for change in changes]
    close(shares(trials, lambda seed: at[seed]), dict.fromkeys(map(str, range(20)), 1 / 20), trials)


def test_random_values_are_any_finite_bit_pattern() -> None:
    x = np.zeros((100, 100), np.float32)
    plan = Plan("random_value", count=x.size)
    plant(x, plan, plan.rng())
    assert np.isfinite(x).all()
    assert abs(np.signbit(x).mean() - 0.5) < 0.025
    exponents = (words(x) >> np.uint32(23) & np.uint32(255)).astype(int)
    assert abs(exponents.mean() - 127) < 4
    assert exponents.max() == 254
    assert exponents.min() <= 1


def test_elements_that_change_places_lie_in_a_row_or_in_a_column() -> None:
    x = normal(6, 6)

    def direction(seed: int) -> str:
        rows, _ = np.nonzero(planted(x, Plan("swap_elements", seed=(seed,))).where)
        return "row" if rows[0] == rows[1] else "column"

    close(shares(400, direction), {"row": 0.5, "column": 0.5}, 400)


def test_a_row_of_a_matrix_of_one_column_is_one_element() -> None:
    for model in ("row", "warp"):
        change = planted(data((50, 1), np.dtype(np.float64)), Plan(model))
        assert change.where.sum() == 1


# ---- on a GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("model", CHANGES)
def test_a_gpus_array_is_changed_where_it_is(
    cp: Any, monkeypatch: pytest.MonkeyPatch, model: str, order: str, dtype: np.dtype[Any]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the array was copied to the host")

    for seed, (shape, count) in enumerate([((1, 1), 1), ((7, 1), 2), ((65, 67), 1), ((130, 70), 64)]):
        x = data(shape, dtype)
        plan = Plan(model, count=count, seed=(seed,))
        room = cp.zeros((2 * shape[0], 3 * shape[1]), UNSIGNED[dtype.itemsize])
        there = room[::2, 1::3] if order == "strided" else cp.zeros(shape, room.dtype, order=order)
        there[...] = cp.asarray(words(x))
        around = room.copy()
        with monkeypatch.context() as patch:
            patch.setattr(cp, "asnumpy", refuse)
            patch.setattr(cp.ndarray, "get", refuse)
            bit = plant(there.view(dtype), plan, plan.rng())
        after = cp.asnumpy(there).view(dtype)
        JUDGES[model](Change(x, after, plan, bit))
        on_host = x.copy()
        assert plant(on_host, plan, plan.rng()) == bit
        if model not in ("offset", "opposite", "rectangle"):  # whose root mean square may round otherwise
            np.testing.assert_array_equal(words(on_host), words(after))
        if order == "strided":
            around[::2, 1::3] = there
            assert (around == room).all()
