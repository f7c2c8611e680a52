"""LU as on a GPU: the plan, its kernels and its verdict, run on the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Status, protected_lu_factor
from abft_tsm2.linalg.device.factorisation import DeviceFactorisation
from abft_tsm2.policy import errstate
from tests.support import lu_on_cpu
from tests.support.factor_cases import lu_outside
from tests.support.lu_on_cpu import on_card
from tests.support.planting import normal


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> Any:
    return lu_on_cpu.install(monkeypatch, build_cache)


@pytest.mark.parametrize("checked", [False, True], ids=["offline", "online"])
@pytest.mark.parametrize(
    ("m", "n", "dtype", "order"),
    [
        (5, 5, "float64", "F"),
        (300, 300, "float64", "C"),
        (300, 300, "float32", "F"),
        (131, 270, "float32", "C"),
        (270, 131, "float64", "F"),
    ],
)
def test_factors_are_lapacks_and_certified(m: int, n: int, dtype: str, order: Any, checked: bool) -> None:
    a = np.asarray(normal(m, n, dtype=dtype), order=order)
    run = DeviceFactorisation(on_card(a), checked=checked)
    assert run.clean
    assert not lu_outside(np.asarray(run.W), np.asarray(run.piv), a).any()
    np.testing.assert_array_equal(run.piv, linalg.get_lapack_funcs("getrf", (a,))(a)[1])


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_report_says_what_was_checked(mode: str) -> None:
    a = normal(200, 200)
    (lu, piv), report = protected_lu_factor(on_card(a), mode=mode, return_report=True)
    assert report.status is Status.CLEAN
    assert [check.verified for check in report.checks] == [200, 200]
    assert not lu_outside(np.asarray(lu), np.asarray(piv), a).any()


@pytest.mark.parametrize("checked", [False, True], ids=["offline", "online"])
@pytest.mark.parametrize("task", ["panel", "solve_rows", "update", "left_rows"])
def test_a_changed_element_is_suspected(task: str, checked: bool) -> None:
    done: list[Any] = []
    made = DeviceFactorisation.__new__(DeviceFactorisation)

    def after(reached: Any) -> None:
        if reached.name == task and not done:
            done.append(reached)
            made.W[290, 280] *= -1

    made.__init__(on_card(normal(300, 300)), checked=checked, after=after)  # type: ignore[misc]
    assert done
    assert not made.clean


def test_a_run_that_is_read_late_has_its_own_sums() -> None:
    first, second = normal(150, 150), normal(150, 150, seed=1)
    runs = [DeviceFactorisation(on_card(a), checked=True) for a in (first, second)]
    for run, a in zip(runs, (first, second), strict=True):
        found = run.encoding()
        np.testing.assert_allclose(found.S, a @ found.v, rtol=1e-9, atol=1e-9 * np.max(np.abs(found.S)))
        np.testing.assert_allclose(found.Z, found.w @ a, rtol=1e-9, atol=1e-9 * np.max(np.abs(found.Z)))
        assert run.clean


def test_verdicts_that_are_awaited() -> None:
    matrices = [normal(150, 150, seed=i) for i in range(3)]
    with errstate(sync=False):
        queued = [protected_lu_factor(on_card(a), return_report=True) for a in matrices]
        assert [report.status for _, report in queued] == [Status.PENDING] * 3
    for ((lu, piv), report), a in zip(queued, matrices, strict=True):
        assert report.wait().status is Status.CLEAN
        assert not lu_outside(np.asarray(lu), np.asarray(piv), a).any()


def test_a_wait_that_is_interrupted_is_begun_again(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [KeyboardInterrupt()]

    class Event(cupy.cuda.Event):  # type: ignore[misc,name-defined]
        def synchronize(self) -> None:
            if left:
                raise left.pop()

    monkeypatch.setattr(cupy.cuda, "Event", Event)
    with errstate(sync=False):
        _, report = protected_lu_factor(on_card(normal(150, 150)), return_report=True)
    with pytest.raises(KeyboardInterrupt):
        report.wait()
    assert report.wait().status is Status.CLEAN


def test_what_does_not_fit_is_said_before_it_begins(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(MemoryError):
        pass

    def full(shape: Any, *more: Any, **named: Any) -> Any:
        raise OutOfMemoryError

    cupy.cuda.memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    cupy.cuda.runtime.memGetInfo = lambda: (3_000_000, 80_000_000_000)
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_bytes=lambda: 1_000_000)
    a = on_card(normal(200, 300))
    monkeypatch.setattr(cupy, "empty", full)
    with pytest.raises(MemoryError, match=r"\(200, 300\), float64, needs 0.000487 GB .* 0.004 GB are free"):
        protected_lu_factor(a)
