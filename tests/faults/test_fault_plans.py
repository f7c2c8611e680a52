"""Plans of faults: frozen, the same after a trip through JSON, and the same choices each time."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.arrays import FLOATS
from abft_tsm2.faults import MODELS, SITES, Injector, Plan
from abft_tsm2.faults.models import CHANGES, plant
from abft_tsm2.faults.plan import CLASSES, PRODUCTION, bits_of

PLANS = st.builds(
    Plan,
    model=st.sampled_from(list(MODELS)),
    site=st.sampled_from(list(SITES)),
    bits=st.sampled_from(CLASSES) | st.integers(0, 63).map(str),
    count=st.integers(1, 10**6),
    factor=st.floats(allow_nan=True, allow_infinity=True) | st.just(0.0),
    persistent=st.booleans(),
    visit=st.integers(0, 10**6),
    seed=st.lists(st.integers(0, 2**64), max_size=4).map(tuple),
)


@given(PLANS)
def test_a_plan_is_the_same_after_a_trip_through_json(plan: Plan) -> None:
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert isinstance(again.persistent, bool)
    assert plan.factor == again.factor or (plan.factor != plan.factor and again.factor != again.factor)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@given(PLANS, PLANS)
def test_plans_are_equal_where_their_json_is(one: Plan, other: Plan) -> None:
    assert (one == other) == (one.to_json() == other.to_json())


@pytest.mark.parametrize("factor", [0.0, -0.0, float("inf"), float("-inf"), float("nan")])
def test_factors_that_are_not_numbers_are_text_in_json(factor: float) -> None:
    plan = Plan("scaled", factor=factor)
    assert Plan.from_json(plan.to_json()) == plan
    assert str(Plan.from_json(plan.to_json()).factor) == str(factor)


def test_what_is_left_out_of_json_has_its_default() -> None:
    assert Plan.from_json('{"model": "nan"}') == Plan("nan")
    with pytest.raises(ValueError, match="model missing"):
        Plan.from_json("{}")


def test_a_plan_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Plan("nan").count = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model": "bitflip"}, "unknown fault model 'bitflip': did you mean 'bit_flip'"),
        ({"model": "zzzz"}, "unknown fault model 'zzzz': choose from 'bit_flip', 'multi_bit'"),
        ({"model": "nan", "bits": "exponnt"}, "unknown class of bits 'exponnt': did you mean 'exponent'"),
        ({"model": "nan", "bits": "-1"}, "unknown class of bits '-1'"),
        ({"model": "nan", "cont": 3}, "unknown entry of a fault 'cont': did you mean 'count'"),
        ({"model": "nan", "count": 0}, "count = 0"),
        ({"model": "nan", "visit": -1}, "visit = -1"),
    ],
)
def test_what_no_plan_has_is_refused_and_the_nearest_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_dict(data)


@pytest.mark.parametrize("values", [{"count": 1.5}, {"visit": "2"}, {"seed": (1.5,)}])
def test_a_number_that_is_not_whole_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Plan("nan", **values)


def test_an_unknown_site_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="unknown site 'prodct': did you mean 'product'"):
        Injector(Plan("nan", site="prodct"))


# ---- bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_classes_of_bits_divide_the_word(dtype: str) -> None:
    every = list(bits_of("any", dtype))
    assert every == list(range(FLOATS[dtype].bits))
    assert [*bits_of("mantissa", dtype), *bits_of("exponent", dtype), *bits_of("sign", dtype)] == every
    for name in ("mantissa", "exponent"):
        halves = [*bits_of(f"{name}_low", dtype), *bits_of(f"{name}_high", dtype)]
        assert halves == list(bits_of(name, dtype))
        assert len(bits_of(f"{name}_low", dtype)) > 0 < len(bits_of(f"{name}_high", dtype))
    assert len(bits_of("mantissa", dtype)) == FLOATS[dtype].precision - 1
    assert len(bits_of("sign", dtype)) == 1


def test_classes_of_float64_are_those_of_ieee_754() -> None:
    # What is flipped, on the number itself: 1.0 has the exponent 0x3ff and no mantissa.
    def flipped(bit: int) -> float:
        return float((np.array([1.0]).view(np.uint64) ^ np.uint64(1 << bit)).view(np.float64)[0])

    assert [flipped(bit) for bit in bits_of("sign", "float64")] == [-1.0]
    assert all(1 < flipped(bit) < 2 for bit in bits_of("mantissa", "float64"))
    assert all(np.frexp(flipped(bit))[0] == 0.5 for bit in bits_of("exponent_low", "float64"))
    assert np.isinf(flipped(max(bits_of("exponent_high", "float64"))))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_bit_that_the_type_does_not_have_is_refused(dtype: str) -> None:
    top = FLOATS[dtype].bits - 1
    assert list(bits_of(str(top), dtype)) == [top] == list(bits_of("sign", dtype))
    with pytest.raises(ValueError, match=f"{dtype} has no bit {top + 1}: its bits are 0 to {top}"):
        bits_of(str(top + 1), dtype)


# ---- choices -----------------------------------------------------------------------------------------------------


@given(PLANS.filter(lambda plan: plan.model in CHANGES), st.sampled_from([(7, 9), (1, 1), (5,), (80, 70)]))
def test_the_same_plan_makes_the_same_change(plan: Plan, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape)
    one, other = x.copy(), x.copy()
    bits = plant(one, plan, plan.rng()), plant(other, Plan.from_json(plan.to_json()), plan.rng())
    assert bits[0] == bits[1]
    assert one.tobytes() == other.tobytes()


def test_another_seed_makes_another_choice() -> None:
    places = set()
    for seed in range(50):
        x = np.zeros((40, 50))
        plan = Plan("nan", seed=(seed,))
        plant(x, plan, plan.rng())
        places.add(int(np.flatnonzero(x != 0)[0]))
    assert len(places) > 40


def test_every_model_is_a_change_or_belongs_to_one_kind_of_site() -> None:
    own = set(MODELS) - set(CHANGES)
    assert own == {"wrong_index", "not_exchanged"}
    assert set(CHANGES) <= set(MODELS)
    for name in own:
        assert any(name in site.models for site in SITES.values())
        assert all(name not in SITES[site].models for site in ("product", "A", "B", "s", "t", "u"))
        with pytest.raises(ValueError, match=f"{name} cannot be planted at 'product'"):
            Injector(Plan(name))


def test_shares_of_production_faults_are_a_distribution() -> None:
    assert sum(PRODUCTION.values()) == pytest.approx(1)
    assert set(PRODUCTION) - {"compound"} <= set(CHANGES)
