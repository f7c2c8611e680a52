"""Pivots, and what is computed from them, that change where no stage lies between two reads: LAPACK writes nowhere
outside the matrix, and the factors are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg.lapack

import abft_tsm2 as ft
from abft_tsm2 import Status
from abft_tsm2.core.blas import NoPermutation, exchange_rows, permutation
from abft_tsm2.linalg import host_certificate, lu, lu_checks
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.outcome import FactorOutcome
from tests.support.planting import normal

Patch = pytest.MonkeyPatch
FAR = 1 << 24  # rows away: in no memory of this process


def factors(a: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray, ft.Report]:
    """Factors of a, which are those of LAPACK but for rounding, and the report."""
    with ft.errstate(corrected="ignore"):
        (packed, piv), report = ft.protected_lu_factor(a, return_report=True, **options)
    expected, pivots = scipy.linalg.lu_factor(a)
    np.testing.assert_array_equal(piv, pivots)
    np.testing.assert_allclose(packed, expected, atol=1e-2 if a.dtype == np.float32 else 1e-9)
    return packed, piv, report


def once_behind(patch: Patch, owner: Any, name: str, act: Callable[..., None]) -> None:
    """Call `act` behind the first call of this function, with its arguments."""
    original, acts = getattr(owner, name), [act]

    def acting(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        if acts:
            acts.pop()(*args)
        return result

    patch.setattr(owner, name, acting)


def pivot_behind_its_check(patch: Patch, i: int, value: int) -> Callable[[str, Any], None]:
    """A hook for `on_stage`: pivot i becomes `value` as soon as its panel has been checked."""
    live: dict[str, Any] = {}
    check = lu_checks.LuChecksums.check_panel

    def checked(self: Any, pivots: Any, j: int, j1: int, *more: Any) -> bool:
        fine = check(self, pivots, j, j1, *more)
        if fine and j <= i < j1:
            live["piv"][i] = value
        return fine

    patch.setattr(lu_checks.LuChecksums, "check_panel", checked)
    return lambda stage, arrays: live.update(arrays) if stage == "panel" else None


@pytest.mark.parametrize("value", [149, 63, -1, -FAR, 150, FAR], ids=str)  # below, above the panel, outside
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_pivot_changes_behind_the_check_of_its_panel(monkeypatch: Patch, dtype: Any, value: int) -> None:
    a = normal(150, 150, dtype=dtype)
    hook = pivot_behind_its_check(monkeypatch, 70, value)
    report = factors(a, mode="online", block=64, on_stage=hook)[2]
    assert report.status is Status.CORRECTED
    assert [(fault.operand, fault.rows, fault.elements) for fault in report.faults] == [("piv", (70,), 1)]


@pytest.mark.parametrize("value", [149, FAR])
def test_it_is_refused_without_repairs(monkeypatch: Patch, value: int) -> None:
    hook = pivot_behind_its_check(monkeypatch, 70, value)
    how: Any = {"mode": "online", "block": 64, "on_error": "detect", "on_stage": hook}
    report = ft.protected_lu_factor(normal(150, 150), return_report=True, **how)[1]
    assert report.status is Status.UNCORRECTABLE
    assert "the pivots of columns 64 to 127 have changed since their panel was checked" in str(report)


def test_exchanges_change_while_rows_are_exchanged(monkeypatch: Patch) -> None:
    """Behind all checks of the step: it is begun again."""
    original, wrong = lu.exchange_rows, [FAR]

    def exchange(X: Any, pivots: Any, **named: Any) -> None:
        if wrong and X.shape[1]:
            pivots[5] = wrong.pop()
        original(X, pivots, **named)

    monkeypatch.setattr(lu, "exchange_rows", exchange)
    report = factors(normal(150, 150), mode="online", block=64)[2]
    assert report.status is Status.CORRECTED
    assert "restarted from A: 64 pivots name rows" in str(report)


@pytest.mark.parametrize("order", ["F", "C"])  # as LAPACK takes it, and by another way
@pytest.mark.parametrize("pivots", [[1, -1], [1, 4], [3, FAR], [0, 1, 2, 3, 3]], ids=str)
def test_rows_outside_of_a_matrix_are_not_touched(pivots: list[int], order: Any) -> None:
    around = np.array(normal(12, 3), order=order)
    before = around.copy()
    with pytest.raises(NoPermutation, match=f"{len(pivots)} pivots name rows .* of 4"):
        exchange_rows(around[4:8], np.array(pivots, np.int32))
    np.testing.assert_array_equal(around, before)


def order_that_changes(patch: Patch, times: int, bits: int) -> None:
    """Some bits of a number of a row change in what LAPACK's laswp returns, so many times."""
    swap, left = scipy.linalg.lapack.dlaswp, [bits] * times

    def swapped(*args: Any, **named: Any) -> Any:
        order = swap(*args, **named)
        if left:
            order.view(np.int64)[3] ^= left.pop()
        return order

    patch.setattr(scipy.linalg.lapack, "dlaswp", swapped)


BITS = [1 << 59, 1 << 60, 1 << 61]


@pytest.mark.parametrize("bits", BITS, ids=hex)
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_an_order_changes_once(monkeypatch: Patch, mode: str, bits: int) -> None:
    order_that_changes(monkeypatch, 1, bits)
    assert factors(normal(100, 100), mode=mode)[2].status is Status.CLEAN
    a, pivots = normal(100, 100), scipy.linalg.lu_factor(normal(100, 100))[1]
    for at, row in enumerate(pivots):
        a[[at, row]] = a[[row, at]]
    order_that_changes(monkeypatch, 1, bits)
    np.testing.assert_array_equal(normal(100, 100)[permutation(pivots, 100)], a)


@pytest.mark.parametrize("bits", BITS, ids=hex)
def test_an_order_that_changes_each_time_is_refused(monkeypatch: Patch, bits: int) -> None:
    pivots = scipy.linalg.lu_factor(normal(100, 100))[1]
    order_that_changes(monkeypatch, 2, bits)
    with pytest.raises(NoPermutation, match="does not hold each row once"):
        permutation(pivots, 100)


def test_pivots_change_between_a_suspicion_and_its_evidence(monkeypatch: Patch) -> None:
    certified = lu.certified

    def suspected(a: Any, packed: Any, pivots: Any, encoding: Any) -> Any:
        found = certified(a, packed, pivots, encoding)
        pivots[3] = FAR
        return found._replace(outcome=FactorOutcome.SUSPECTED)

    monkeypatch.setattr(lu, "certified", suspected)
    assert factors(normal(100, 100), mode="offline")[2].status is Status.CORRECTED


@pytest.mark.parametrize("shape", [(100, 60), (60, 100)])
def test_a_verdict_is_wrong_for_a_while(monkeypatch: Patch, shape: tuple[int, int]) -> None:
    """A line is read as wrong once, and is right when the lines that are wrong are counted."""
    wrong = [True]
    clean = LineCheck.clean
    monkeypatch.setattr(LineCheck, "clean", property(lambda self: not (wrong and wrong.pop()) and clean.fget(self)))
    assert factors(normal(*shape), mode="offline")[2].status is Status.CLEAN
    assert not wrong, "nothing was planted"


@pytest.mark.parametrize("shape", [(100, 100), (60, 100)])
def test_u_changes_while_multipliers_are_compared(monkeypatch: Patch, shape: tuple[int, int]) -> None:
    def change(packed: np.ndarray) -> None:
        packed[10, 50] *= 2

    if shape[0] == shape[1]:
        once_behind(monkeypatch, host_certificate, "multipliers_within", lambda packed, limit: change(packed))
    else:
        once_behind(monkeypatch, lu_checks.LuChecksums, "too_large", lambda carried: change(carried.W))
    assert factors(normal(*shape), mode="offline")[2].status is Status.CORRECTED
