"""Products with operands that were encoded beforehand: changed, restored, refused; and their carried checksums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Encoded, SilentDataCorruptionError, Status, encode, protected_gemm, verify_gemm, weights
from tests.support.cases import DTYPES, ORDERS, arrange
from tests.support.oracles import elements_outside
from tests.support.planting import at, bits, both, normal, pair, put, transient

IDS = [dtype.name for dtype in DTYPES]
SIDES = ("rows", "columns", "both")


def protect(*operands: Any, **options: Any) -> tuple[Any, Any]:
    return protected_gemm(*operands, return_report=True, **options)


def encoded(name: str, A: np.ndarray, B: np.ndarray, **options: Any) -> tuple[Any, Any, Encoded]:
    """(left, right, the one of them that is encoded)"""
    E = encode(A if name == "A" else B, **options)
    return (E, B, E) if name == "A" else (A, E, E)


# ---- clean --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("order", ORDERS)
def test_the_product_is_that_of_the_plain_operands(order: str, dtype: Any) -> None:
    A, B = (arrange(x, order) for x in pair(40, 50, 30, dtype))
    plain = protected_gemm(A, B)
    for left, right in ((encode(A), B), (A, encode(B)), (encode(A), encode(B)), (encode(A, "columns"), B)):
        for check in ("auto", *SIDES):
            C, report = protect(left, right, check=check)
            assert report.status is Status.CLEAN
            assert np.array_equal(C, plain)
            assert verify_gemm(left, right, C, check=check).status is Status.CLEAN


@pytest.mark.parametrize(("name", "side"), [("A", "columns"), ("B", "rows")])
def test_auto_uses_the_side_that_is_carried(name: str, side: str) -> None:
    for shape in ((60, 20, 10), (10, 20, 60)):
        left, right, _ = encoded(name, *pair(*shape))
        assert [c.side for c in protect(left, right)[1].checks] == [side]


@pytest.mark.parametrize("shape", [(1, 30), (30, 1), (1, 1), (0, 5), (5, 0)])
@pytest.mark.parametrize("side", SIDES)
def test_narrow_and_empty_matrices(shape: tuple[int, int], side: str) -> None:
    p, q = shape
    E = encode(normal(p, q), side)
    for left, right in ((E, normal(q, 7, seed=1)), (normal(7, p, seed=1), E)):
        C, report = protect(left, right)
        assert report.status is Status.CLEAN
        assert not report.faults
        a, b = (x.array if isinstance(x, Encoded) else x for x in (left, right))
        assert np.allclose(C, a @ b)


def test_in_a_batch_and_with_vectors() -> None:
    E = encode(normal(30, 20))
    stack = normal(3, 10, 30)
    C, report = protect(stack, E)
    assert np.allclose(C, stack @ E.array)
    assert [p.status for p in report.products] == [Status.CLEAN] * 3
    assert np.allclose(protected_gemm(normal(30), E), normal(30) @ E.array)
    assert np.allclose(protected_gemm(E, normal(20)), E.array @ normal(20))


@pytest.mark.parametrize("kind", ["ones", "linear", "signs", "normal", "vandermonde", "chebyshev", "dct"])
@pytest.mark.parametrize("r", [1, 3])
def test_any_weights_in_any_number_of_columns(kind: str, r: int) -> None:
    A, B = pair(40, 50, 30)
    E = encode(B, "rows", weights=weights(kind, 30, r))
    C, report = protect(A, E)
    assert report.status is Status.CLEAN
    assert report.checks[0].vectors == r
    C, report = protect(A, E, on_stage=at("multiplied", "C", put((3, 4), 1e3)))
    assert report.status is Status.CORRECTED
    assert not elements_outside(C, A, B).any()


def test_a_weight_of_zero_is_refused() -> None:
    v = weights("balanced", 30)[:, 0].copy()
    v[4] = 0.0
    with pytest.raises(ValueError, match=r"1 elements \(first: 4\), which nothing would check"):
        encode(normal(50, 30), "rows", weights=v)


# ---- an operand that changed --------------------------------------------------------------------------------

# How the change comes about: before the call, or while it runs, after the recheck.
WHEN = {
    "before the call": lambda E, name, change: change(E.array),
    "at inputs": lambda E, name, change: at("inputs", name, change),
    "at encoded": lambda E, name, change: at("encoded", name, change),
    "at multiplied": lambda E, name, change: lambda stage, _: stage == "multiplied" and change(E.array),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("when", ["before the call", "at inputs", "at encoded"])
@pytest.mark.parametrize("repair", [True, False])
@pytest.mark.parametrize("check", ["auto", "both"])
def test_a_change_is_restored_bit_for_bit(check: str, repair: bool, when: str, name: str, dtype: Any) -> None:
    A, B = pair(40, 50, 30, dtype)
    plain = protected_gemm(A, B)
    left, right, E = encoded(name, A, B, repair=repair)
    right_bits = bits(E.array).copy()
    done: list[int] = []

    def change(x: np.ndarray) -> None:
        if not done:
            x[3, 4], x[9, 2] = -7, np.nan
            done.append(1)

    hook = WHEN[when](E, name, change)
    C, report = protect(left, right, check=check, on_stage=hook)
    assert report.status is Status.CORRECTED
    assert np.array_equal(C, plain)
    assert {(f.operand, f.rows, f.columns) for f in report.faults} == {(name, (3,), (4,)), (name, (9,), (2,))}
    assert all("bit for bit" in f.repair for f in report.faults)
    assert np.array_equal(bits(E.array), right_bits) == repair
    if not repair:  # the copy was for this product only, and the caller is told
        assert all("E.correct()" in f.repair for f in report.faults)
        assert E.verify().status is Status.INPUT_CHANGED
        assert E.correct().status is Status.CORRECTED
    assert protect(left, right)[1].status is Status.CLEAN
    assert E.verify().status is Status.CLEAN


@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("recheck", [True, False])
def test_a_small_change_is_seen_by_the_recheck_only(recheck: bool, name: str) -> None:
    A, B = pair(40, 50, 30)
    left, right, E = encoded(name, A, B, recheck=recheck)
    E.array[3, 4] = np.nextafter(E.array[3, 4], 9)
    _, report = protect(left, right)
    assert report.status is (Status.CORRECTED if recheck else Status.CLEAN)


@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("check", ["auto", "both"])
def test_without_recheck_the_carried_checksums_see_what_matters(check: str, name: str) -> None:
    A, B = pair(40, 50, 30)
    plain = A @ B
    left, right, E = encoded(name, A, B, recheck=False)
    E.array[3, 4] = 7
    C, report = protect(left, right, check=check)
    assert report.status is Status.CORRECTED
    assert {f.operand for f in report.faults} == {name}
    assert np.allclose(C, plain, rtol=1e-12)


def spread(x: np.ndarray) -> None:
    """Two wrong elements in each of two rows and two columns: the integers do not say which."""
    x[np.ix_([3, 5], [4, 6])] = 7


@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("when", ["before the call", "at encoded"])
@pytest.mark.parametrize("repair", [True, False])
def test_what_cannot_be_restored_is_refused_and_left(repair: bool, when: str, name: str) -> None:
    left, right, E = encoded(name, *pair(40, 50, 30), repair=repair)
    hook = WHEN[when](E, name, spread)
    with pytest.raises(SilentDataCorruptionError) as caught:
        protected_gemm(left, right, on_stage=hook)
    report = caught.value.report
    assert report.status is Status.INPUT_CHANGED
    assert any(f.operand == name for f in report.faults)
    assert any("load or compute" in reason for reason in report.reasons)
    assert (E.array[np.ix_([3, 5], [4, 6])] == 7).all()
    assert protect(left, right, on_error="detect")[1].status is Status.INPUT_CHANGED


def test_detect_restores_nothing() -> None:
    A, B = pair(40, 50, 30)
    E = encode(A, repair=True)
    A[3, 4] = 7
    for call in (
        lambda: protect(E, B, on_error="detect")[1],
        lambda: verify_gemm(E, B, A @ B, on_error="detect"),
    ):
        report = call()
        assert report.status is Status.INPUT_CHANGED
        assert [(f.operand, f.rows, f.columns, f.repair) for f in report.faults] == [("A", (3,), (4,), "")]
        assert A[3, 4] == 7


def test_a_read_only_array_is_restored_in_a_copy() -> None:
    A, B = pair(40, 50, 30)
    plain = A @ B
    E = encode(A, repair=True)
    A[3, 4] = 7
    A.flags.writeable = False
    C, report = protect(E, B)
    assert report.status is Status.CORRECTED
    assert np.allclose(C, plain, rtol=1e-12)
    assert A[3, 4] == 7


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(40, 50), (40, 1), (1, 50)])
def test_a_restored_copy_serves_in_any_order_also_with_a_fault_in_c(shape: tuple[int, int], order: str) -> None:
    A = arrange(normal(*shape), order)
    B = normal(shape[1], 30, seed=2)
    plain = A @ B
    E = encode(A)
    A[0, 0] = 7
    C, report = protect(E, B, on_stage=at("multiplied", "C", put((0, 3), 1e3)))
    assert report.status is Status.CORRECTED
    assert {f.operand for f in report.faults} == {"A", "C"}
    assert np.allclose(C, plain, rtol=1e-12)


# ---- faults of what is carried, and of C --------------------------------------------------------------------


@pytest.mark.parametrize("value", [1e3, np.nan, np.inf])
@pytest.mark.parametrize("name", ["A", "B"])
def test_a_carried_checksum_that_was_hit_is_no_fault_of_the_data(name: str, value: float) -> None:
    A, B = pair(40, 50, 30)
    left, right, E = encoded(name, A, B)
    carried = E.row_checksums if name == "B" else E.column_checksums.T
    carried[7, 0] = value
    C, report = protect(left, right)
    assert report.status is Status.CHECKSUM_FAULT
    assert report.ok
    assert np.array_equal(C, A @ B)
    C, report = protect(left, right, on_stage=at("multiplied", "C", put((3, 4), np.inf)))
    assert report.status is Status.CORRECTED
    assert report.also == (Status.CHECKSUM_FAULT,)
    assert not elements_outside(C, A, B).any()


@pytest.mark.parametrize("name", ["A", "B"])
def test_a_fault_of_c_and_a_transient_one_of_the_operand(name: str) -> None:
    A, B = pair(40, 50, 30)
    left, right, _ = encoded(name, A, B)
    hook = both(transient(name, (7, 8), 50.0), at("multiplied", "C", put((3, 4), np.nan)))
    C, report = protect(left, right, on_stage=hook)
    assert report.status is Status.CORRECTED
    assert not elements_outside(C, A, B).any()


def test_c_that_is_overwritten_is_kept_for_the_second_product() -> None:
    A, B = pair(40, 50, 30)
    c = normal(40, 30, seed=3)
    start = c.copy()
    E = encode(B)
    done: list[int] = []

    def once(x: np.ndarray) -> None:
        if not done:
            x[3, 4] = 7
            done.append(1)

    C, report = protect(A, E, c, beta=2.0, out=c, on_stage=at("encoded", "B", once))
    assert report.status is Status.CORRECTED
    assert E.correct().status is Status.CORRECTED
    assert C is c
    assert not elements_outside(C, A, E.array, start, beta=2.0).any()


# ---- changes that cancel in a plain sum, of operands that are not encoded beforehand ------------------------


def two_signs(x: np.ndarray) -> None:
    x[3, [4, 6]] *= -1


def two_places(x: np.ndarray) -> None:
    x[3, [4, 6]] = x[3, [6, 4]]


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("change", [two_signs, two_places])
def test_changes_that_cancel_are_no_checksum_fault(change: Any, name: str, side: str, dtype: Any) -> None:
    A, B = pair(40, 50, 30, dtype)
    operand = {"A": A, "B": B}[name]
    operand[3, 4], operand[3, 6] = 9, -5
    done: list[int] = []

    def hook(stage: str, arrays: Any) -> None:
        if stage == "encoded" and not done:  # which comes once for each side
            change(operand)
            done.append(1)

    with pytest.raises(SilentDataCorruptionError, match=f"{name} changed"):
        protected_gemm(A, B, check=side, on_stage=hook)
