"""Faults are planted into factorisations and solutions as they run without a hook, and change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import (
    Report,
    errstate,
    protected_cho_factor,
    protected_cholesky,
    protected_lu_factor,
    protected_lu_solve,
    protected_solve,
)
from abft_tsm2.faults import Injector, Plan, inject
from tests.support.factor_cases import positive
from tests.support.planting import bits, normal

N = 150
A, B, P = normal(N, N), normal(N, 3, seed=1), positive(N)
BIG = "exponent_high"
Call = Callable[[], tuple[Any, Report]]


def upper(found: Any) -> tuple[np.ndarray, Report]:
    """Of a factor below whose diagonal stands anything."""
    (c, _), report = found
    return np.triu(c), report


CALLS: dict[str, Call] = {
    "online": lambda: protected_lu_factor(A, mode="online", block=32, return_report=True),
    "offline": lambda: protected_lu_factor(A, mode="offline", return_report=True),
    "auto": lambda: protected_lu_factor(A, return_report=True),
    "stack": lambda: protected_lu_factor(np.stack([A, A.T]), return_report=True),
    "cholesky": lambda: protected_cholesky(P, lower=True, block=32, return_report=True),
    "cho_factor": lambda: upper(protected_cho_factor(P, block=32, return_report=True)),
    "solve": lambda: protected_solve(A, B, return_report=True),
    "refined": lambda: protected_solve(A, B, refine=True, return_report=True),
    "lu_solve": lambda: protected_lu_solve(protected_lu_factor(A), B, return_report=True),
}
STEPS = {
    "online": (
        "lu.panel",
        "lu.solved",
        "lu.trailing",
        "lu.updated_L",
        "lu.updated_U",
        "lu.finished_L",
        "lu.finished_U",
    ),
    "offline": ("lu.factored_L", "lu.factored_U"),
    "auto": ("lu.factored",),
    "stack": ("lu.factored_L", "lu.factored_U"),
    "cholesky": ("cholesky.panel", "cholesky.trailing", "cholesky.updated_L", "cholesky.finished_L"),
    "cho_factor": ("cholesky.panel", "cholesky.trailing"),
    "solve": ("lu.factored_U", "solve.forward", "solve.backward"),
    "refined": ("solve.forward", "solve.backward"),
    "lu_solve": ("solve.forward", "solve.backward"),
}


def call(name: str, *plans: Plan) -> tuple[Any, Report, Injector]:
    with errstate(corrected="ignore", checksum_fault="ignore"), inject(*plans) as injector:
        result, report = CALLS[name]()
    return result, report, injector


def arrays(result: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in (result if isinstance(result, tuple) else (result,))]


def nearly(result: Any, expected: Any) -> bool:
    return all(np.allclose(x, y, rtol=1e-6, atol=1e-6) for x, y in zip(arrays(result), arrays(expected), strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_without_a_fault_every_bit_is_that_of_a_call_alone(name: str) -> None:
    expected, alone = CALLS[name]()
    result, report, injector = call(name)
    assert injector.visits
    for x, y in zip(arrays(result), arrays(expected), strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))
    assert (report.status, report.checks, report.mode) == (alone.status, alone.checks, alone.mode)


@pytest.mark.parametrize(("name", "site"), [(name, site) for name in STEPS for site in STEPS[name]])
def test_a_fault_of_a_step_is_found_and_repaired(name: str, site: str) -> None:
    expected, _ = CALLS[name]()
    result, report, injector = call(name, Plan("bit_flip", site, BIG, seed=(5,)))
    assert [one.plan.site for one in injector.planted] == [site]
    assert report.status.name == "CORRECTED"
    assert nearly(result, expected)


def test_the_hook_of_a_call_takes_the_place_of_the_plan() -> None:
    stages: list[str] = []
    with inject(Plan("nan", "lu.factored")) as injector:
        protected_lu_factor(A, on_stage=lambda stage, arrays: stages.append(stage))
        assert not injector.visits
        with errstate(corrected="ignore"):
            protected_lu_factor(A)
    assert "factored" in stages
    assert injector.visits["factored"] == 1


def test_products_of_a_factorisation_are_no_products_of_the_plan() -> None:
    with pytest.raises(RuntimeError, match="never planted"), inject(Plan("nan")):
        protected_lu_factor(A, mode="online")
