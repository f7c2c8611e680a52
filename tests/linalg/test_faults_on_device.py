"""Faults in factorisations and solutions as they run on a GPU without a hook; kernels run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Status, errstate, protected_cholesky, protected_lu_factor
from abft_tsm2.core import faultpoint
from abft_tsm2.faults import Plan, inject
from abft_tsm2.linalg.device.solution import solve_on_device
from tests.support import lu_on_cpu, solution_cases, solver_on_cpu
from tests.support.factor_cases import cholesky_outside, lu_outside, positive
from tests.support.lu_on_cpu import on_card
from tests.support.planting import normal

BIG = "exponent_high"
QUIET: dict[str, Any] = {"corrected": "ignore", "checksum_fault": "ignore"}


@pytest.fixture
def lu(monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> Any:
    return lu_on_cpu.install(monkeypatch, build_cache)


@pytest.mark.parametrize(
    ("mode", "site"),
    [("online", "lu.trailing"), ("offline", "lu.panel"), ("offline", "lu.solved"), ("offline", "lu.trailing")],
)
@pytest.mark.usefixtures("lu")
def test_a_fault_of_a_step_of_lu_is_repaired(site: str, mode: str) -> None:
    a = normal(300, 300)
    with errstate(**QUIET), inject(Plan("bit_flip", site, BIG, visit=1)) as injector:
        (W, piv), report = protected_lu_factor(on_card(a), mode=mode, return_report=True)
    assert [one.plan.site for one in injector.planted] == [site]
    assert report.status is Status.CORRECTED
    assert not lu_outside(np.asarray(W), np.asarray(piv), a).any()


@pytest.mark.parametrize(
    ("mode", "site"),
    [
        ("offline", "lu.factored_L"),
        ("online", "lu.finished_U"),
    ],
)
@pytest.mark.usefixtures("lu")
def test_a_fault_of_finished_factors_is_repaired(mode: str, site: str) -> None:
    a = normal(200, 200, seed=3)
    with errstate(**QUIET), inject(Plan("bit_flip", site, BIG)) as injector:
        (W, piv), report = protected_lu_factor(on_card(a), mode=mode, return_report=True)
    assert len(injector.planted) == 1
    assert report.status is Status.CORRECTED
    assert not lu_outside(np.asarray(W), np.asarray(piv), a).any()


@pytest.mark.usefixtures("lu")
def test_a_deferred_factorisation_has_its_fault_too() -> None:
    a = normal(200, 200)
    with errstate(sync=False, **QUIET), inject(Plan("bit_flip", "lu.trailing", BIG)) as injector:
        (W, piv), report = protected_lu_factor(on_card(a), return_report=True)
        assert report.status is Status.PENDING
        assert report.wait().status is Status.CORRECTED
    assert len(injector.planted) == 1
    assert not lu_outside(np.asarray(W), np.asarray(piv), a).any()


@pytest.mark.usefixtures("lu")
def test_without_a_fault_every_bit_is_that_of_a_call_alone() -> None:
    a = normal(300, 300)
    (expected, pivots), alone = protected_lu_factor(on_card(a), return_report=True)
    with inject() as injector:
        (W, piv), report = protected_lu_factor(on_card(a), return_report=True)
    assert {"panel", "solved", "updated"} <= injector.visits.keys()
    np.testing.assert_array_equal(W, expected)
    np.testing.assert_array_equal(piv, pivots)
    assert (report.status, report.mode) == (alone.status, alone.mode)


@pytest.mark.usefixtures("lu")
def test_sums_are_reached_by_a_hook_only() -> None:
    refused = pytest.raises(ValueError, match="pass the injector as on_stage")
    with refused, inject(Plan("bit_flip", "lu.updated_S", BIG)):
        protected_lu_factor(on_card(normal(300, 300)), mode="online")


@pytest.mark.parametrize("lower", [True, False])
def test_a_fault_of_a_definite_factor_is_repaired(
    lower: bool, monkeypatch: pytest.MonkeyPatch, build_cache: Path
) -> None:
    cupy = solver_on_cpu.install(monkeypatch, build_cache)
    a = positive(150)
    with errstate(**QUIET), inject(Plan("bit_flip", "cholesky.finished_L", BIG)) as injector:
        c, report = protected_cholesky(cupy.asarray(a), lower=lower, return_report=True)
    assert len(injector.planted) >= 1
    assert report.status is Status.CORRECTED
    assert not cholesky_outside(np.asarray(c), a, lower).any()
    assert not np.any(np.triu(c, 1) if lower else np.tril(c, -1))


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_a_fault_of_a_substitution_is_found(
    stage: str, trans: int, monkeypatch: pytest.MonkeyPatch, build_cache: Path
) -> None:
    solution_cases.install(monkeypatch, build_cache)
    a, b = normal(90, 90), normal(90, 2, seed=1)
    lu, piv = linalg.lu_factor(a)
    operands = [solution_cases.on_card(x) for x in (lu, piv.astype(np.int32), b)]
    clean = solve_on_device(*operands, trans)
    with inject() as injector:
        again = solve_on_device(*operands, trans)
    assert injector.visits == {"forward": 1, "backward": 1}
    np.testing.assert_array_equal(again.X, clean.X)
    with inject(Plan("bit_flip", f"solve.{stage}", BIG)) as injector:
        found = solve_on_device(*operands, trans)
    assert len(injector.planted) == 1
    assert (clean.clean, again.clean, found.clean) == (True, True, False)
    assert faultpoint.current() is None
