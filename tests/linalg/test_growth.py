"""Factors that grow to the edge of the range: right as long as they are finite, no fault where they are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, errstate, protected_cholesky, protected_lu_factor
from abft_tsm2.linalg import lu, once_more
from abft_tsm2.linalg.encode import MatrixChecksums
from abft_tsm2.linalg.outcome import Overflowed
from abft_tsm2.linalg.plain_lu import GROWN
from tests.support.factor_cases import MODES, lu_outside, positive
from tests.support.planting import at, normal, put


def wilkinson(n: int, dtype: Any, order: Any = "C") -> np.ndarray:
    """Its U ends with 2^(n - 1): J. H. Wilkinson, J. ACM 8 (1961) 281."""
    a = np.eye(n, dtype=dtype) - np.tril(np.ones((n, n), dtype), -1)
    a[:, -1] = 1
    return np.array(a, order=order)


def factored(a: np.ndarray, **options: Any) -> Any:
    with errstate(unverifiable="ignore"):
        return protected_lu_factor(a, return_report=True, **options)


CASES = [(np.float32, mode, order, range(120, 136)) for mode in MODES for order in "CF"]
CASES += [(np.float64, mode, "C", (530, 1015, 1026)) for mode in ("offline", "online")]


@pytest.mark.parametrize(("dtype", "mode", "order", "sizes"), CASES)
def test_growth_to_the_edge_of_the_range(dtype: Any, mode: str, order: str, sizes: Any) -> None:
    """Whether 2^128 - 1 overflows depends on the order of additions: on the library of BLAS."""
    for n in sizes:
        a = wilkinson(n, dtype, order)
        (w, piv), report = factored(a, mode=mode)
        assert report.faults == ()
        if np.isfinite(w).all():
            assert (report.status, report.reasons) == (Status.CLEAN, ()), (n, report)
            assert report.checks
            assert dtype is np.float64 or not lu_outside(w, piv, a).any()
        else:
            assert (report.status, report.reasons) == (Status.UNVERIFIABLE, (GROWN,)), (n, report)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("power", [505, 511, 513])
@pytest.mark.parametrize("transposed", [False, True])
def test_sums_whose_squares_fill_the_range(transposed: bool, power: int, mode: str) -> None:
    """Rows of the identity in any order, some of them twice: a suspicion leads to sums that are compared again."""
    rng = np.random.default_rng(0)
    a = np.ldexp(np.eye(200)[rng.integers(0, 200, 200)] + 1e-8 * rng.standard_normal((200, 200)), power)
    e = MatrixChecksums.of(a)
    assert np.isfinite(e.row_norms).all()
    assert np.isfinite(e.column_norms).all()
    report = factored(a.T if transposed else a, mode=mode)[1]
    assert (report.status, report.faults) == (Status.CLEAN, ())


def of_both_ends(n: int = 80, few: int = 8) -> np.ndarray:
    """Some rows, and columns, of elements of 1e200, the others of 1: their weights and the scale of the matrix are
    apart by more than the range."""
    a = normal(n, n)
    a[:few, :few], a[:few, few:], a[64:, 64:] = 2 * np.eye(few), 1e200 * a[:few, few:], 1e200 * a[64:, 64:]
    a[few:64, :few] /= 4
    a[64:, :64] = 0
    return a


def vandermonde(n: int, to: float) -> np.ndarray:
    powers = np.vander(np.linspace(-to, to, n), n)
    return np.asarray(np.tril(powers) + np.tril(powers, -1).T)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("a", [of_both_ends(), vandermonde(300, 4), vandermonde(400, 3)], ids=["ends", "300", "400"])
def test_lines_of_all_sizes_of_the_range(a: np.ndarray, mode: str) -> None:
    """All norms and sums stay finite: bounds of NaN would be exceeded by what is right."""
    e = MatrixChecksums.of(a)
    for x in (e.S, e.Z, e.row_norms, e.column_norms):
        assert np.isfinite(x).all()
    for order in "CF":
        _, report = factored(np.array(a, order=order), mode=mode)
        assert (report.status, report.faults, report.reasons) == (Status.CLEAN, (), ())


@pytest.mark.parametrize("change", [None, 1e-9, 1e-3, 1e10])
def test_a_bound_that_growth_takes_beyond_the_range(change: float | None) -> None:
    """Rows of 2^600 below others that grow by 2^500: S is compared by what is known of its own numbers."""
    a, seen = np.zeros((528, 528)), list[int]()
    a[:520, :520], a[520:, :520] = wilkinson(520, np.float64), normal(8, 520) / 10
    a[520:, 520:] = np.ldexp(normal(8, 8), 600)

    def hook(stage: str, arrays: Any) -> None:
        if stage == "updated" and change and not seen:
            seen.append(1)
            arrays["S"][525] *= 1 + change

    (_, piv), report = factored(a, mode="online", on_stage=hook)
    right = factored(a, mode="offline")[0]
    np.testing.assert_array_equal(piv, right[1])
    assert report.status is (Status.CHECKSUM_FAULT if change else Status.CLEAN)
    assert [(fault.operand, fault.elements) for fault in report.faults] == ([("S", 1)] if change else [])


@pytest.mark.parametrize("again", [True, False], ids=["overflows again", "was hit"])
def test_what_overflows_in_one_order_of_additions_only(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK's factors are not finite, those of the steps are: CORRECTED only where LAPACK gives others again."""
    a, plainly, calls = normal(70, 70), lu.factored_plainly, []

    def overflowing(A: Any, clock: Any) -> Any:
        w, piv, info = plainly(A, clock)
        calls.append(w)
        if again or len(calls) == 1:
            w[-1, -1] = np.inf
        return w, piv, info

    for module in (lu, once_more):
        monkeypatch.setattr(module, "factored_plainly", overflowing)
    (w, piv), report = factored(a, mode="offline")
    assert not lu_outside(w, piv, a).any()
    assert len(calls) == 2
    if again:
        assert (report.status, report.suspicions, report.faults) == (Status.CLEAN, 1, ())
    else:
        assert (report.status, len(report.faults)) == (Status.CORRECTED, 1)


def test_factors_are_lapacks_where_only_the_steps_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(_: Any) -> None:
        raise Overflowed("elements grow beyond the range of the type")

    a = normal(70, 70)
    monkeypatch.setattr(lu.LuFactorisation, "run", overflow)
    (w, piv), report = factored(a, mode="online")
    assert not lu_outside(w, piv, a).any()
    assert (report.status, report.faults, len(report.checks)) == (Status.CLEAN, (), 2)
    monkeypatch.setattr(once_more, "factored_plainly", lambda A, clock: (A.copy(), np.arange(70, dtype=np.int32), 0))
    with pytest.raises(SilentDataCorruptionError):
        factored(a, mode="online")


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_fault_in_factors_that_grow_is_found(mode: str) -> None:
    a = wilkinson(600, np.float64)
    stage = {"offline": "factored", "online": "finished"}[mode]
    for change in (put((300, 10), 1.5), put((20, 599), 2.0**21), put((599, 599), np.inf)):
        (w, _), report = factored(a, mode=mode, on_stage=at(stage, "W", change))
        assert report.status is Status.CORRECTED, report
        np.testing.assert_array_equal(w, factored(a, mode=mode)[0][0])


@pytest.mark.parametrize("name", ["Z", "w"])
def test_any_bit_of_a_checksum_of_a_right_factor(name: str) -> None:
    """Low bits are within what two orders of addition differ by: the good one of a sum and its copy is the nearer."""
    a = positive(40)
    right = protected_cholesky(a, lower=True)
    for bit in range(0, 64, 3):
        for line in (0, 20, 39):

            def flip(x: np.ndarray, bit: int = bit, line: int = line) -> None:
                x[line : line + 1].view(np.uint64)[0] ^= np.uint64(1 << bit)

            hit = [flip]

            def once(stage: str, arrays: Any, hit: list[Any] = hit) -> None:
                if stage == "encoded" and hit:
                    hit.pop()(arrays[name])

            factor, report = protected_cholesky(a, lower=True, return_report=True, on_stage=once)
            assert report.status in (Status.CLEAN, Status.CHECKSUM_FAULT), (bit, line, report)
            np.testing.assert_array_equal(factor, right)
