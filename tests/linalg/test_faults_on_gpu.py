"""Faults in factorisations and solutions on a GPU as they run without a hook: with look-ahead, on all their streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import (
    Report,
    SilentDataCorruptionError,
    Status,
    errstate,
    protected_cholesky,
    protected_lu_factor,
    protected_lu_solve,
    protected_solve,
)
from abft_tsm2.faults import Plan, inject
from tests.support.factor_cases import cholesky_outside, lu_outside, positive
from tests.support.planting import bits, normal

pytestmark = pytest.mark.gpu

BIG = "exponent_high"
QUIET: dict[str, Any] = {"corrected": "ignore", "checksum_fault": "ignore"}
OF_STEPS = ("lu.panel", "lu.solved", "lu.trailing")


def factored(a: Any, **options: Any) -> tuple[Any, Report]:
    """Factors, None where they are refused, and the final report."""
    try:
        factors, report = protected_lu_factor(a, return_report=True, **options)
        return factors, report.wait()
    except SilentDataCorruptionError as error:
        return None, error.report


@pytest.mark.parametrize("visit", [0, 2])
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "deferred"])
@pytest.mark.parametrize(("mode", "n"), [("offline", 1000), ("online", 1000), ("online", 2600)])
@pytest.mark.parametrize("site", OF_STEPS)
def test_a_fault_of_a_step_of_lu_is_repaired_or_refused(
    cp: Any, site: str, mode: str, n: int, sync: bool, visit: int
) -> None:
    a = normal(n, n)
    with errstate(sync=sync, **QUIET), inject(Plan("bit_flip", site, BIG, visit=visit, seed=(visit,))) as injector:
        factors, report = factored(cp.asarray(a), mode=mode)
    assert len(injector.planted) == 1
    assert report.status is not Status.CLEAN
    if factors is not None:
        assert not lu_outside(*map(cp.asnumpy, factors), a).any()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("mode", "site"),
    [(mode, f"lu.{stage}_{x}") for mode, stage in (("offline", "factored"), ("online", "finished")) for x in "LU"],
)
def test_a_fault_of_finished_factors_is_repaired_or_refused(cp: Any, mode: str, site: str, dtype: str) -> None:
    a = normal(900, 900, dtype=dtype)
    with errstate(**QUIET), inject(Plan("bit_flip", site, BIG)) as injector:
        factors, report = factored(cp.asarray(a), mode=mode)
    assert injector.planted
    assert report.status is not Status.CLEAN
    if factors is not None:
        assert not lu_outside(*map(cp.asnumpy, factors), a).any()


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_without_a_fault_every_bit_is_that_of_a_call_alone(cp: Any, mode: str) -> None:
    a = cp.asarray(normal(1000, 1000))
    (expected, pivots), alone = factored(a, mode=mode)
    with inject() as injector:
        for _ in range(3):  # of which the last ones would be a graph
            (W, piv), report = factored(a, mode=mode)
            assert bool((piv == pivots).all())
            np.testing.assert_array_equal(bits(cp.asnumpy(W)), bits(cp.asnumpy(expected)))
    assert {"panel", "solved", "updated"} <= injector.visits.keys()
    assert report.status is alone.status is Status.CLEAN


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_fault_of_a_definite_factor_is_repaired(cp: Any, dtype: str, lower: bool) -> None:
    a = positive(700, np.dtype(dtype))
    with errstate(**QUIET), inject(Plan("bit_flip", "cholesky.finished_L", BIG)) as injector:
        c, report = protected_cholesky(cp.asarray(a), lower=lower, return_report=True)
    assert injector.planted
    assert report.status is Status.CORRECTED
    assert not cholesky_outside(cp.asnumpy(c), a, lower).any()


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("site", ["solve.forward", "solve.backward"])
def test_a_fault_of_a_substitution_is_repaired(cp: Any, site: str, trans: int) -> None:
    a, b = normal(600, 600), normal(600, 3, seed=1)
    factors = protected_lu_factor(cp.asarray(a))
    with errstate(**QUIET), inject(Plan("bit_flip", site, BIG)) as injector:
        x, report = protected_lu_solve(factors, cp.asarray(b), trans, return_report=True)
    assert injector.planted
    assert report.status is Status.CORRECTED
    np.testing.assert_allclose((a.T if trans else a) @ cp.asnumpy(x), b, atol=1e-9)


@pytest.mark.parametrize("site", ["lu.trailing", "lu.factored_U", "solve.forward", "solve.backward"])
def test_a_fault_of_a_system_is_repaired(cp: Any, site: str) -> None:
    a, b = normal(600, 600), normal(600, 3, seed=1)
    with errstate(**QUIET), inject(Plan("bit_flip", site, BIG)) as injector:
        x, report = protected_solve(cp.asarray(a), cp.asarray(b), return_report=True)
    assert injector.planted
    assert report.status is Status.CORRECTED
    np.testing.assert_allclose(a @ cp.asnumpy(x), b, atol=1e-9)
