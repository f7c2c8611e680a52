"""Matrices, factors and right-hand sides that change on a GPU while they are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, protected_lu_factor, protected_lu_solve, protected_solve
from abft_tsm2.core import faultpoint
from abft_tsm2.linalg import solve
from abft_tsm2.linalg.device.factorisation import DeviceFactorisation
from abft_tsm2.linalg.operand import Operand, compare
from tests.support.planting import normal

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")
N = 600


def scaled(n: int) -> np.ndarray:
    """Powers of a number in each row, to the eightieth: sums of rows and of columns are blind to many of them."""
    return np.linspace(0.1, 3.0, n)[:, None] ** (80.0 * np.arange(n)[None, ::-1] / n)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("n", [70, 131, N])
def test_words_of_a_matrix_show_every_change(n: int, order: Any, dtype: str) -> None:
    for make in (scaled, lambda n: normal(n, n)):
        a = cupy.asarray(make(n).astype(dtype), order=order)
        run = DeviceFactorisation(a)
        run.wait()
        e = run.encoding()
        run.release()
        assert compare(a, e).operand is Operand.SAME
        a[n // 3, n - 10] = cupy.nextafter(a[n // 3, n - 10], cupy.asarray(4, dtype))
        assert compare(a, e).operand is Operand.CHANGED


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_factors_are_not_repaired_from_another_matrix(mode: str) -> None:
    a = cupy.asarray(normal(N, N))
    done: list[int] = []

    def hook(stage: str, arrays: Any) -> None:
        if stage == {"offline": "factored", "online": "updated"}[mode] and not done:
            done.append(1)
            a[500, 20] *= 1.5
            arrays["W"][580, 570] += 1.0

    with pytest.raises(SilentDataCorruptionError) as caught:
        protected_lu_factor(a, mode=mode, on_stage=hook)
    assert Status.INPUT_CHANGED in (caught.value.report.status, *caught.value.report.also)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("n", [129, N])
@pytest.mark.parametrize("refine", [False, True])
def test_systems_are_clean(n: int, dtype: str, refine: bool) -> None:
    a, b = cupy.asarray(normal(n, n, dtype=dtype)), cupy.asarray(normal(n, 3, dtype=dtype, seed=1))
    x, report = protected_solve(a, b, refine=refine, return_report=True)
    assert report.status is Status.CLEAN
    factors = protected_lu_factor(a)
    for trans in (0, 1):
        assert protected_lu_solve(factors, b, trans, return_report=True)[1].status is Status.CLEAN
    assert float(cupy.abs(a @ x - b).max()) < 1e4 * np.finfo(dtype).eps * float(cupy.abs(x).max())


@pytest.mark.parametrize("what", ["lu", "b"])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_operands_of_a_system_that_change(stage: str, what: str) -> None:
    a, b = cupy.asarray(normal(N, N)), cupy.asarray(normal(N, 3, seed=1))
    lu, piv = protected_lu_factor(a)
    given = {"lu": lu, "b": b}

    def hook(reached: str, arrays: Any) -> None:
        if reached == stage:
            given[what][500, 1] += 0.5
            arrays["z" if stage == "forward" else "x"][70, 2] += 1.0

    with pytest.raises(SilentDataCorruptionError) as caught:
        protected_lu_solve((lu, piv), b, on_stage=hook)
    assert Status.INPUT_CHANGED in (caught.value.report.status, *caught.value.report.also)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_certified_factors_that_change_are_made_again(
    stage: str, refine: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = cupy.asarray(normal(N, N, dtype=dtype)), cupy.asarray(normal(N, 3, dtype=dtype, seed=1))
    factors: list[Any] = []
    queued = solve.queued

    def watched(lu: Any, *more: Any) -> Any:
        factors.append(lu)
        return queued(lu, *more)

    def change(reached: str, arrays: Any) -> None:
        if reached == stage and len(factors) == 1:
            factors[0][500, 20] = 1e30
            factors.append(None)

    monkeypatch.setattr(solve, "queued", watched)
    with faultpoint.planting(change):
        x, report = protected_solve(a, b, refine=refine, return_report=True)
    assert report.status is Status.CORRECTED
    assert float(cupy.abs(a @ x - b).max()) < 1e4 * np.finfo(dtype).eps * float(cupy.abs(x).max())


@pytest.mark.parametrize("solved", ["solve", "lu_solve"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_small_solution_beside_large_ones_is_guarded(dtype: str, solved: str) -> None:
    n, decades = 200, 8 if dtype == "float64" else 3
    a = cupy.asarray((np.logspace(0, -decades, n)[:, None] * normal(n, n)).astype(dtype))
    b, factors = cupy.eye(n, dtype=dtype), protected_lu_factor(a)

    def call() -> Any:
        if solved == "solve":
            return protected_solve(a, b, return_report=True)
        return protected_lu_solve(factors, b, return_report=True)

    right, report = call()
    assert (report.status, report.suspicions) == (Status.CLEAN, 0)
    size = float(cupy.abs(right[:, 0]).max())
    for i in range(0, n, 37):
        done: list[int] = []

        def change(reached: str, arrays: Any, i: int = i, done: list[int] = done) -> None:
            if reached == "backward" and not done:
                done.append(1)
                arrays["x"][i, 0] += 2e5 * np.finfo(dtype).eps * size

        with faultpoint.planting(change):
            x, report = call()
        assert report.status is Status.CORRECTED
        assert float(cupy.abs(x - right)[:, 0].max()) < 1e4 * np.finfo(dtype).eps * size
