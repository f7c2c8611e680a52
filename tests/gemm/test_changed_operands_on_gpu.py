"""Operands on a GPU that are not what was encoded, changed so that sums of bits add up. These need one:
``pytest -m gpu``; tests/gemm/test_changed_operands.py has the same on NumPy, and on a card made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status
from tests.gemm.test_changed_operands import bits_that_cancel, two_in_a_column, two_in_a_row
from tests.gemm.test_device_gemm import NAMES, normal
from tests.support.planted_products import QUIET

pytestmark = pytest.mark.gpu

CHANGES = {f.__name__: f for f in (two_in_a_row, two_in_a_column, bits_that_cancel)}


def off(cp: Any, C: Any, A: Any, B: Any) -> float:
    """How far C is from the product of these, in units of its typical element."""
    right = A.astype(cp.float64) @ B.astype(cp.float64)
    return float(abs(C.astype(cp.float64) - right).max() / right.std())


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("recheck", [True, False])
@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_encoded_operand(cp: Any, change: str, name: str, recheck: bool, dtype: str) -> None:
    for seed in range(10):
        a, b = normal(cp, 32, 64, dtype=dtype, seed=seed), normal(cp, 64, 96, dtype=dtype, seed=seed + 100)
        X = a if name == "A" else b
        if change == "bits_that_cancel":
            X[4, 2], X[4, 6] = 2, 4  # so that the change is one of places
        kept, E = (a.copy(), b.copy()), ft.encode(X, recheck=recheck)
        left, right = (E, b) if name == "A" else (a, E)
        side = "columns" if name == "A" else "rows"
        for _ in range(3):  # known calls, too
            assert ft.protected_gemm(left, right, check=side, return_report=True)[1].status is Status.CLEAN
        CHANGES[change](X)
        with ft.errstate(**QUIET):
            C, report = ft.protected_gemm(left, right, check=side, return_report=True)
        assert report.status is not Status.INPUT_CHANGED or change == "bits_that_cancel"
        # What no check of a line suspects is not compared in order on a card.
        unseen = max((one.detection_limit for one in report.checks), default=0.0)
        assert report.status is Status.INPUT_CHANGED or off(cp, C, *kept) < max(unseen, 1e-4)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("recheck", [True, False])
@pytest.mark.parametrize("calls", [1, 6], ids=["step by step", "graph"])
def test_an_encoded_operand_of_a_queued_product(cp: Any, calls: int, recheck: bool, dtype: str) -> None:
    a, b = normal(cp, 32, 64, dtype=dtype), normal(cp, 64, 96, dtype=dtype, seed=1)
    b[3, 1] = 9
    E, out = ft.encode(b, recheck=recheck), cp.empty((32, 96), a.dtype)
    with ft.errstate(sync=False, unverifiable="ignore", **QUIET):
        for _ in range(calls):
            assert ft.protected_gemm(a, E, out=out, return_report=True)[1].wait().status is Status.CLEAN
        two_in_a_row(b)
        report = ft.protected_gemm(a, E, out=out, return_report=True)[1].wait()
    assert report.status in (Status.UNVERIFIABLE, Status.UNCORRECTABLE, Status.INPUT_CHANGED)


@pytest.mark.parametrize("recheck", [True, False])
def test_an_encoded_operand_of_a_captured_product(cp: Any, recheck: bool) -> None:
    a, b, out = normal(cp, 32, 64), normal(cp, 64, 96, seed=1), cp.empty((32, 96), np.float32)
    b[3, 1] = 9
    E, stream = ft.encode(b, recheck=recheck), cp.cuda.Stream(non_blocking=True)
    with stream, ft.errstate(sync=False):
        stream.begin_capture()
        report = ft.protected_gemm(a, E, out=out, return_report=True)[1]
        graph = stream.end_capture()
        graph.launch(stream)
        assert report.wait().status is Status.CLEAN
        two_in_a_row(b)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        with pytest.raises(ft.SilentDataCorruptionError):
            report.wait()


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("check", ["rows", "columns"])
def test_an_operand_that_changes_during_a_call(cp: Any, check: str, name: str, dtype: str) -> None:
    a, b = normal(cp, 32, 64, dtype=dtype), normal(cp, 64, 96, dtype=dtype, seed=1)
    X = a if name == "A" else b
    X[3, 1] = 9

    def hook(stage: str, arrays: Any) -> None:
        if stage == "encoded":
            two_in_a_row(X)

    with pytest.raises(ft.SilentDataCorruptionError, match=f"{name} changed"):
        ft.protected_gemm(a, b, check=check, on_stage=hook)


def test_an_operand_that_is_updated_after_the_call_is_no_fault(cp: Any) -> None:
    ones = cp.ones((64, 4096), np.float32), cp.ones((4096, 64), np.float32)
    update: list[Callable[[], None]] = [lambda: None, lambda: ones[1].__setitem__((3, 4), 2)]
    for step, status in zip(update, (Status.CLEAN, Status.UNVERIFIABLE), strict=True):
        with ft.errstate(sync=False, unverifiable="ignore"):
            c, report = ft.protected_gemm(*ones, return_report=True)
            cp.cuda.Device().synchronize()
            step()
            found = report.wait()
        # Where the kernels settle it by themselves, whatever B is by now is of no consequence.
        assert found.status in (status, Status.CLEAN)
        assert bool((c == 4096).all())
