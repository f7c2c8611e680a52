"""Bounds are compared with what they have been, in yardsticks that do not depend on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2.checksum import bounds
from abft_tsm2.faults.analysis.sharpness import FLIPS, MEASURED, Sharpness
from abft_tsm2.faults.judge.yardstick import PARTS, REACH
from abft_tsm2.faults.trials.gemm import GemmTrials
from abft_tsm2.faults.trials.trial import Workload, breach
from tests.support.planting import everywhere

KNOWN = MEASURED["gemm", "float64"]


def trial(scene: int = 0, **entries: Any) -> dict[str, Any]:
    line = {"suite": "s", "scene": scene, "operation": "gemm", "scheme": "protected", "dtype": "float64"}
    line |= {"family": "normal", "model": "bit_flip", "site": "product", "bits": "any", "persistent": False}
    line |= {
        "single": True,
        "outcome": "corrected",
        "status": "CORRECTED",
        "located": "exact",
        "sharpness": KNOWN.bound,
    }
    return line | entries


def counted(*lines: dict[str, Any]) -> list[str]:
    sharpness = Sharpness()
    for line in lines:
        sharpness.add(line)
    return sharpness.broken


def test_bounds_that_are_twice_as_large_break_a_promise() -> None:
    assert counted(*(trial(i, sharpness=1.9 * KNOWN.bound) for i in range(5))) == []
    (text,) = counted(*(trial(i, sharpness=2.1 * KNOWN.bound) for i in range(5)))
    assert text.startswith("gemm of float64: bounds are 2.1 times as large as they were")
    odd = [trial(i, family=family, sharpness=9 * KNOWN.bound * (i == 2)) for i, family in enumerate("abc")]
    assert counted(*odd) == []  # one family of three
    assert counted(trial(scheme="none", sharpness=1e9)) == []
    assert counted(trial(sharpness="NaN")) == []


def test_many_flips_below_the_bound_break_a_promise() -> None:
    few, many = int(1.5 * KNOWN.below * 400), int(4 * KNOWN.below * 400)
    for below, broken in ((few, 0), (many, 1)):
        lines = [trial(outcome="below_bound" if i < below else "masked") for i in range(400)]
        assert len(counted(*lines)) == broken
    assert counted(*[trial(outcome="below_bound")] * (FLIPS - 1)) == []


def test_factors_that_are_restarted_or_misplaced_too_often_break_a_promise() -> None:
    factors = {"operation": "lu", "scheme": "online", "site": "lu.trailing", "sharpness": None}
    for entries in ({"restarted": True}, {"located": "wrong"}):
        assert counted(*[trial(**factors)] * 98, *[trial(**factors, **entries)] * 2) == []
        assert len(counted(*[trial(**factors)] * 50, *[trial(**factors, **entries)] * 50)) == 1


@pytest.mark.parametrize(
    ("entries", "broken"),
    [
        ({}, ""),
        ({"outcome": "sdc"}, "sdc"),
        ({"outcome": "sdc", "scheme": "none"}, ""),
        ({"located": "wrong"}, "wrong"),
        ({"outcome": "detected", "status": "UNCORRECTABLE"}, "refused"),
        ({"outcome": "detected", "status": "UNCORRECTABLE", "persistent": True}, ""),
        ({"outcome": "detected", "status": "UNCORRECTABLE", "scheme": "detect"}, ""),
        ({"outcome": "detected", "status": "INPUT_CHANGED", "site": "A"}, ""),
        ({"outcome": "detected", "status": "UNCORRECTABLE", "operation": "lu", "site": "lu.trailing"}, "refused"),
        ({"outcome": "detected", "status": "UNCORRECTABLE", "operation": "lu", "site": "lu.encoded_A"}, ""),
    ],
)
def test_what_breaks_a_promise(entries: dict[str, Any], broken: str) -> None:
    assert breach(trial(**entries)) == broken


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("family", ["normal", "integers", "constant", "sparse", "zeros", "one of each"])
def test_no_honest_bound_is_near_what_breaks_a_promise(family: str, dtype: str) -> None:
    assert 2 * MEASURED["gemm", dtype].bound > 1.01 * PARTS
    for shape in ((1, 1, 1), (48, 64, 56), (60, 20, 1), (5, 700, 4)):
        runner = GemmTrials(Workload("gemm", *shape, dtype, family, "C", (1,)), np)._runner("protected", "none")
        for promise in runner.promises:
            assert not promise.sharpness > 1.01 * PARTS
            assert not promise.reach > REACH["float64" if dtype == "float64" else "float32"]


def test_the_yardstick_does_not_follow_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(m: int) -> tuple[float, float]:
        runner = GemmTrials(Workload("gemm", m, 30, 31, "float32", "normal", "C", (1,)), np)._runner("both", "none")
        return runner.promises[0].sharpness, float(runner.promises[0].limit(runner.clean[None]).max())

    (sharp, limit), honest = limits(29), bounds.statistical_factor
    everywhere(monkeypatch, honest, lambda *arguments: 1e6 * honest(*arguments))
    blunt, excused = limits(27)  # a small product's factors are kept
    assert blunt == pytest.approx(1e6 * sharp, rel=0.1)
    assert excused < 2.5 * limit
