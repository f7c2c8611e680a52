"""Trials of LU as on a GPU, its kernels run on the CPU: planted there, judged here, in LAPACK's order of rows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2.faults.judge.factor_oracle import order
from abft_tsm2.faults.plan import Plan
from abft_tsm2.faults.trials import factor_calls
from abft_tsm2.faults.trials.factor import FactorTrials
from abft_tsm2.faults.trials.factor_calls import FactorProblem, Watch
from abft_tsm2.faults.trials.trial import Finding, Trial, Workload
from abft_tsm2.linalg.device.schedule import steps_of
from tests.support import cupy_on_cpu, lu_on_cpu

N = 270
WORKLOAD = Workload("lu", N, N, N, "float64", "normal", "F", (1, 2))


def cupyx() -> ModuleType:
    """What a campaign needs of it."""
    module = ModuleType("cupyx.scipy.linalg")

    def lu_factor(a: Any, check_finite: bool) -> tuple[Any, ...]:
        assert isinstance(a, cupy_on_cpu.ndarray)
        return tuple(x.view(cupy_on_cpu.ndarray) for x in linalg.lu_factor(a, check_finite=check_finite))

    vars(module).update(lu_factor=lu_factor)
    return module


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> Any:
    module = cupyx()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return lu_on_cpu.install(monkeypatch, build_cache)


def found(cupy: Any, scheme: str, *faults: Plan, **kind: Any) -> list[Finding]:
    """What becomes of a trial with each fault; without one, of a trial that has none."""
    trials = [Trial(number, (plan,), scheme) for number, plan in enumerate(faults)]
    return list(FactorTrials(replace(WORKLOAD, **kind), cupy).run(trials or [Trial(5, (), scheme)]))


def fault_at(site: str, model: str = "offset") -> Plan:
    return Plan(model, f"lu.{site}", factor=100.0, seed=(3,))


@pytest.mark.parametrize(
    ("scheme", "dtype", "faults"),
    [
        (
            *("online", "float64"),
            [
                *map(fault_at, ("panel", "trailing", "updated_L")),
                fault_at("swapped_left", "not_exchanged"),
                fault_at("pivots", "wrong_index"),
            ],
        ),
        ("offline", "float32", [fault_at("factored_L"), fault_at("factored_U"), fault_at("encoded_w")]),
    ],
)
def test_faults_are_planted_found_and_judged(cupy: Any, scheme: str, dtype: str, faults: list[Plan]) -> None:
    for plan, one in zip(faults, found(cupy, scheme, *faults, dtype=dtype), strict=True):
        assert one.outcome == "corrected", plan.site
        if plan.model != "wrong_index" and plan.site != "lu.encoded_w":
            assert one.located in ("exact", "covered"), plan.site
            assert one.size is not None
            assert one.size > 1


def test_without_protection_faults_escape(cupy: Any) -> None:
    faults = fault_at("factored_L"), fault_at("factored_U"), fault_at("factored_pivots", "wrong_index")
    assert {one.outcome for one in found(cupy, "none", *faults)} == {"sdc"}
    assert found(cupy, "none")[0].outcome == "clean"


@pytest.mark.parametrize("scheme", ["online", "offline"])
def test_without_a_fault_it_goes_the_way_of_users(cupy: Any, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, hooks = factor_calls.protected_lu_factor, list[Any]()

    def noted(a: Any, **options: Any) -> Any:
        assert isinstance(a, cupy_on_cpu.ndarray)
        hooks.append(options["on_stage"])
        return original(a, **options)

    monkeypatch.setattr(factor_calls, "protected_lu_factor", noted)
    (one,) = found(cupy, scheme)
    assert (one.outcome, one.status, one.note) == ("clean", "CLEAN", "")
    assert hooks == [None]


def product(W: np.ndarray, done: int) -> np.ndarray:
    """L U + what is left, when so many columns are done."""
    rest = W.copy()
    rest[:done] = rest[:, :done] = 0
    return np.asarray((np.tril(W[:, :done], -1) + np.eye(N, done)) @ np.triu(W[:done]) + rest)


def test_what_a_gpu_holds_is_seen_in_the_order_of_lapack(cupy: Any) -> None:
    """Rows left of a step are exchanged there when all steps are done."""
    problem = FactorProblem.of(WORKLOAD, xp=cupy)
    sites = ("panel", 1), ("trailing", 0), ("updated_L", 1), ("updated_U", 2)
    plans = [Plan("scaled", f"lu.{site}", factor=1.0, visit=visit) for site, visit in sites]
    watch = Watch(*plans, fault_at("finished_L"))
    problem.call("online", watch)
    assert [moment.stage for moment in watch.moments] == ["updated", "panel", "updated", "updated", "finished"]
    for moment in watch.moments:
        j, j1 = moment.step or (0, N)
        done = j if moment.stage == "panel" else j1
        rows = order(moment.before["piv"][:done], N)
        np.testing.assert_array_equal(moment.before["perm"], rows)
        right = slice(j1, N) if moment.stage == "panel" else slice(0, N)  # the panel itself is ahead
        np.testing.assert_allclose(
            product(moment.before["W"], done)[:, right], problem.a[rows][:, right], rtol=0, atol=1e-12 * N
        )
    i, c = (moment.before["W"] != moment.after["W"]).nonzero()
    assert i.size == 1
    assert i > c


def test_factors_are_seen_in_the_order_of_lapack(cupy: Any) -> None:
    problem, watch = FactorProblem.of(WORKLOAD, xp=cupy), Watch(fault_at("factored_L"))
    problem.call("offline", watch)
    (moment,) = watch.moments
    rows = order(moment.before["piv"], N)
    np.testing.assert_allclose(product(moment.before["W"], N), problem.a[rows], rtol=0, atol=1e-12 * N)


def test_steps_are_those_of_the_schedule(cupy: Any) -> None:
    """What is drawn of them is there: the last one has nothing to exchange or solve."""
    watch = Watch()
    FactorProblem.of(WORKLOAD, xp=cupy).call("online", watch)
    steps = len(steps_of(N, N))
    visits = {name: watch.injector.visits[name] for name in ("panel", "swapped", "solved", "updated")}
    assert visits == {"panel": steps, "swapped": steps - 1, "solved": steps - 1, "updated": steps}
