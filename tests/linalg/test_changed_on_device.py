"""A matrix that changes while a GPU factors it, and the fault that leads back to it; on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import SilentDataCorruptionError, Status, protected_lu_factor, protected_solve
from abft_tsm2.errors import UnverifiableWarning
from abft_tsm2.linalg import solve
from abft_tsm2.linalg.device.factorisation import DeviceFactorisation
from abft_tsm2.linalg.operand import Operand, compare
from abft_tsm2.policy import errstate
from tests.support import lu_on_cpu
from tests.support.cupy_on_cpu import _on_card
from tests.support.factor_cases import lu_outside
from tests.support.lu_on_cpu import on_card
from tests.support.planting import normal
from tests.support.solution_cases import ScipyBlas, install_beside

N = 150


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> Any:
    return lu_on_cpu.install(monkeypatch, build_cache)


def once(stage: str, change: Callable[[Any], None]) -> Callable[[str, Any], None]:
    """A hook that changes the arrays of a stage, the first time."""
    done: list[int] = []

    def hook(reached: str, arrays: Any) -> None:
        if reached == stage and not done:
            done.append(1)
            change(arrays)

    return hook


def scaled(n: int) -> np.ndarray:
    """Powers of a number in each row: sums of rows and of columns are blind to many of them."""
    return np.vander(np.linspace(0.1, 3.0, n))


@pytest.mark.parametrize("make", [normal, lambda m, n: scaled(n)], ids=["normal", "blind"])
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_factors_are_not_repaired_from_another_matrix(mode: str, make: Any) -> None:
    a = make(N, N)

    def change(arrays: Any) -> None:
        if "A" in arrays:
            arrays["A"][100, 20] *= 1.5
        arrays["W"][140, 130] += 1.0

    given = on_card(a.copy())
    stage = {"offline": "factored", "online": "updated"}[mode]

    def hooked(arrays: Any) -> None:
        change(arrays)
        given[100, 20] = 1.5 * a[100, 20]

    with pytest.raises(SilentDataCorruptionError) as caught:
        protected_lu_factor(given, mode=mode, on_stage=once(stage, hooked))
    report = caught.value.report
    assert Status.INPUT_CHANGED in (report.status, *report.also)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_words_show_what_sums_are_blind_to(order: Any, dtype: str) -> None:
    a = np.asarray(scaled(70), dtype, order=order)
    given = on_card(a)
    run = DeviceFactorisation(given)
    run.wait()
    e = run.encoding()
    run.release()
    assert compare(given, e).operand is Operand.SAME
    given[3, 60] = np.nextafter(a[3, 60], 1)
    assert compare(given, e).operand is Operand.CHANGED


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_matrix_with_blind_sums_is_clean(mode: str) -> None:
    a = scaled(70)
    (lu, piv), report = protected_lu_factor(on_card(a), mode=mode, return_report=True)
    assert report.status is Status.CLEAN
    assert not lu_outside(np.asarray(lu), np.asarray(piv), a).any()


def test_a_caller_may_write_to_a_matrix_whose_verdict_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs it once more is not verified then, and nobody is accused."""
    monkeypatch.setattr(DeviceFactorisation, "clean", False)
    given = on_card(normal(N, N))
    with errstate(sync=False):
        (lu, _), report = protected_lu_factor(given, return_report=True)
        lu[140, 130] += 1.0
        given[100, 20] = 1.0
        with pytest.warns(UnverifiableWarning):
            assert report.wait().status is Status.UNVERIFIABLE


# ---- systems ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def blas(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> ScipyBlas:
    given = solve.as_array  # to which an array of NumPy's subclass is NumPy's
    monkeypatch.setattr(solve, "as_array", lambda x, *more, **named: on_card(given(x, *more, **named)))
    cupyx = ModuleType("cupyx.scipy.linalg")
    cupyx.solve_triangular = _on_card(linalg.solve_triangular)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, cupyx.__name__, cupyx)
    return install_beside(monkeypatch, cupy)


def system() -> tuple[np.ndarray, np.ndarray]:
    return normal(N, N), normal(N, 3, seed=1)


@pytest.mark.parametrize("refine", [False, True])
def test_systems_are_clean(blas: ScipyBlas, refine: bool) -> None:
    a, b = system()
    for _ in range(2):
        x, report = protected_solve(on_card(a), on_card(b), refine=refine, return_report=True)
        assert report.status is Status.CLEAN
        np.testing.assert_allclose(x, np.linalg.solve(a, b), rtol=1e-8)


@pytest.mark.parametrize("call", [0, 1])
def test_a_wrong_solution_is_made_again(blas: ScipyBlas, call: int) -> None:
    a, b = system()
    blas.damage = lambda number, x: x.__setitem__((70, 2), 1e3) if number == call else None
    x, report = protected_solve(on_card(a), on_card(b), return_report=True)
    assert report.status is Status.CORRECTED
    np.testing.assert_allclose(x, np.linalg.solve(a, b), rtol=1e-8)


@pytest.mark.parametrize("what", ["a", "b"])
@pytest.mark.parametrize("fault", [False, True])
def test_the_solution_of_another_system_is_refused(blas: ScipyBlas, what: str, fault: bool) -> None:
    a, b = system()
    right, given = np.linalg.solve(a, b), {"a": on_card(a), "b": on_card(b)}

    def damage(number: int, x: np.ndarray) -> None:
        if number == 1:
            given[what][100, 1] *= -64
            x[70, 2] += fault

    blas.damage = damage
    if what == "b" and not fault:  # it has been read
        x, report = protected_solve(given["a"], given["b"], return_report=True)
        assert report.status is Status.CLEAN
        np.testing.assert_allclose(x, right, rtol=1e-8)
        return
    with pytest.raises(SilentDataCorruptionError) as caught:
        protected_solve(given["a"], given["b"], return_report=True)
    assert caught.value.report.status is Status.INPUT_CHANGED
    assert caught.value.report.faults[-1].operand == {"a": "A", "b": "b"}[what]
