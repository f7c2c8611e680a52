"""Operands that are not what was encoded, changed so that sums of bits add up: no evidence is computed from them.

Evidence may clear a suspicion, and a repair may be verified, only where every operand it was computed from is shown to
be what was encoded. On a card the same is tested in tests/gemm/test_changed_operands_on_gpu.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Encoded, Report, SilentDataCorruptionError, Status, encode, errstate, protected_gemm, verify_gemm
from abft_tsm2.checksum import encoded
from benchmarks.planting import planted
from tests.support import cupy_on_cpu
from tests.support.cases import DTYPES
from tests.support.oracles import elements_outside
from tests.support.planted_products import QUIET
from tests.support.planting import at, both, normal, pair, put

card, cp = cupy_on_cpu.card, cupy_on_cpu.cp
IDS = [dtype.name for dtype in DTYPES]
SIZES = {"small": (32, 8, 40), "full": (300, 260, 600), "stack": (32, 8, 40)}


def two_in_a_row(x: Any, far: int = 4) -> None:
    x[3, [1, 1 + far]] = x[3, [1 + far, 1]]


def two_in_a_column(x: Any) -> None:
    x[[1, 6], 5] = x[[6, 1], 5]


def cycle_in_a_row(x: Any) -> None:
    x[2, [0, 3, 7]] = x[2, [3, 7, 0]]


def rows(x: Any) -> None:
    x[[2, 7]] = x[[7, 2]]


def columns(x: Any) -> None:
    x[:, [0, 5]] = x[:, [5, 0]]


def signs_of_a_tile(x: Any) -> None:
    x[2:4, 4:6] = -x[2:4, 4:6]


def bits_that_cancel(x: Any) -> None:
    """An element of a row gets what another one loses."""
    one = x.dtype.type(2)
    x[4, 2], x[4, 6] = one, one * 2
    x[4, 2], x[4, 6] = one * 2, one


CHANGES: dict[str, Callable[[Any], None]] = {
    **{f"two of a row, {far} apart": lambda x, far=far: two_in_a_row(x, far) for far in (1, 2, 4, 6)},  # type: ignore[misc]
    **{f.__name__: f for f in (two_in_a_column, cycle_in_a_row, rows, columns, signs_of_a_tile, bits_that_cancel)},
}


def changed(x: Any, change: Callable[[Any], None]) -> None:
    held = x.copy()
    change(x)
    assert not np.array_equal(np.asarray(held), np.asarray(x))


def operands_of(report: Report) -> set[str]:
    """In which there were faults."""
    return {fault.operand for one in report.products or (report,) for fault in one.faults}


# ---- on NumPy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_recheck_sees_what_changes_places(change: str, name: str, size: str, dtype: Any) -> None:
    A, B = pair(*SIZES[size], dtype)
    right, E = A.astype(float) @ B.astype(float), encode(A if name == "A" else B)
    left, other = (E, B) if name == "A" else (A, E)
    if size == "stack":
        left, other = (E, np.stack([B] * 3)) if name == "A" else (np.stack([A] * 3), E)
    assert protected_gemm(left, other, return_report=True)[1].status is Status.CLEAN
    changed(E.array, CHANGES[change])
    with errstate(**QUIET):
        C, report = protected_gemm(left, other, return_report=True)
    if report.status is Status.INPUT_CHANGED:  # and cannot be restored
        assert change in ("rows", "columns", "signs_of_a_tile")
        return
    assert report.status is Status.CORRECTED
    assert operands_of(report) == {name}
    assert not np.any(abs(C.astype(float) - right) > 0.1 * right.std())


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize == 2], ids=lambda dtype: dtype.name)
def test_what_rounding_to_16_bits_hides_is_seen_by_the_recheck(
    dtype: Any, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded, "small", lambda A: not large)  # whose bits are compared with a copy
    rng = np.random.default_rng(0)
    for _ in range(100):
        A, B = rng.standard_normal((32, 8)).astype(dtype), rng.standard_normal((8, 40)).astype(dtype)
        C, E = protected_gemm(A, B), encode(B)
        assert (E.bits is None) is large
        i, (p, q) = rng.integers(8), 4 * rng.choice(10, 2, replace=False)
        changed(B, lambda x, i=i, p=p, q=q: x.__setitem__((i, [p, q]), x[i, [q, p]]))  # type: ignore[misc]
        found, report = protected_gemm(A, E, return_report=True)
        assert report.status is Status.CORRECTED
        assert np.array_equal(found, C)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("side", ["auto", "both"])
def test_a_suspicion_is_not_settled_by_an_operand_that_changed(name: str, side: str, size: str, dtype: Any) -> None:
    # Not rechecked, and in such a way that the sums of the operand are those that it had: nothing but its bits tell.
    A, B = pair(*SIZES[size], dtype)
    right = A.astype(float) @ B.astype(float)
    X, along = (A, "columns") if name == "A" else (B, "rows")
    E = encode(X, along, weights="ones", recheck=False)
    change = two_in_a_row if name == "B" else lambda x: two_in_a_row(x.T)
    changed(X, change)
    wrong = (1, 1) if name == "B" else (1, 5)
    left, other = (E, B) if name == "A" else (A, E)
    if size == "stack":
        left, other = (E, np.stack([B] * 2)) if name == "A" else (np.stack([A] * 2), E)
        wrong = (..., *wrong)
    hook = at("multiplied", "C", put(wrong, 999))
    C, report = protected_gemm(left, other, return_report=True, on_stage=hook, check=side)
    assert report.status is Status.CORRECTED
    assert name in operands_of(report)
    assert not np.any(abs(C.astype(float) - right) > 0.1 * right.std())
    existing = (A.astype(float) @ B.astype(float)).astype(dtype)  # of what the operand is now
    existing[3, 3] = 999
    found = verify_gemm(*((E, B) if name == "A" else (A, E)), existing, on_error="detect")
    assert found.status is Status.INPUT_CHANGED


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("recheck", [True, False])
def test_an_operand_from_another_process_is_known_by_its_bits(recheck: bool, dtype: Any) -> None:
    A, B = pair(40, 50, 30, dtype)
    E: Encoded = pickle.loads(pickle.dumps(encode(B, recheck=recheck)))
    hook = at("multiplied", "C", put((3, 4), 999))
    C, report = protected_gemm(A, E, return_report=True, on_stage=hook)
    assert (report.status, {fault.operand for fault in report.faults}) == (Status.CORRECTED, {"C"})
    assert not elements_outside(C, A, B).any()
    changed(E.array, two_in_a_row)
    C, report = protected_gemm(A, E, return_report=True, on_stage=hook)
    assert report.status is Status.CORRECTED
    assert {fault.operand for fault in report.faults} >= {"B"}
    assert not elements_outside(C, A, B).any()


def test_a_fingerprint_that_was_hit_is_no_fault_of_the_operand() -> None:
    A, B = pair(40, 50, 30)
    for recheck in (True, False):
        E = encode(B, recheck=recheck)
        E.fingerprint[0, 3] ^= np.uint64(1 << 40)
        E.bits[3, 4] ^= np.uint64(1 << 40)
        hook = at("multiplied", "C", put((3, 4), 999))
        C, report = protected_gemm(A, E, return_report=True, on_stage=hook)
        assert report.status is Status.CORRECTED
        assert {fault.operand for fault in report.faults} == {"C"}
        assert not elements_outside(C, A, B).any()


def test_an_operand_that_changes_while_c_is_repaired_is_seen() -> None:
    A, B = pair(40, 50, 30)
    E = encode(B, "rows", weights="ones", recheck=False)
    change = at("corrected", "C", lambda C: two_in_a_row(B) if not E.changed() else None)
    hook = both(at("multiplied", "C", put((3, 4), 999)), change)
    right = A @ B
    C, report = protected_gemm(A, E, return_report=True, on_stage=hook)
    assert report.status is Status.CORRECTED
    assert "B" in {fault.operand for fault in report.faults}
    assert np.allclose(C, right, rtol=1e-12)


# ---- in another array library ---------------------------------------------------------------------------------------


def test_checksums_that_are_less_sharp_than_the_bound_clear_nothing() -> None:
    # Elsewhere they agree to within their own rounding only, which small changes of all rows of B together exceed.
    strict = pytest.importorskip("array_api_strict")
    a, b = abs(np.random.default_rng(0).standard_normal((4, 2000))), normal(2000, 30)
    moved = b.copy()
    moved[:, 3] += 2.0**-46
    for before, status in ((b, Status.CLEAN), (moved, Status.UNVERIFIABLE)):
        A, B = strict.asarray(a), strict.asarray(b)

        def hook(stage: str, arrays: Any, B: Any = B, before: Any = before) -> None:
            if stage == "encoded":
                B[...] = strict.asarray(before)

        with errstate(unverifiable="ignore"):
            _, report = protected_gemm(A, B, check="rows", on_stage=hook, return_report=True)
        assert report.status is status
        assert report.reasons == () or "agree with the operands as they are now" in report.reasons[0]


# ---- on a card whose kernels run on the CPU -------------------------------------------------------------------------


def on_card(cp: Any, *shape: int, seed: int) -> Any:
    return cp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
@pytest.mark.parametrize("recheck", [True, False])
@pytest.mark.parametrize("name", ["A", "B"])
def test_an_encoded_operand_on_a_card(cp: Any, name: str, recheck: bool, batch: tuple[int, ...]) -> None:
    A, B = on_card(cp, 20, 30, seed=1), on_card(cp, 30, 40, seed=2)
    right = np.asarray(A, float) @ np.asarray(B, float)
    for number, change in enumerate((two_in_a_row, two_in_a_column, signs_of_a_tile)):
        x, y = A.copy(), B.copy()
        E = encode(x if name == "A" else y, recheck=recheck)
        left, other = (E, y) if name == "A" else (x, E)
        if batch:
            left, other = (E, cp.stack([y] * 2)) if name == "A" else (cp.stack([x] * 2), E)
        side = "columns" if name == "A" else "rows"
        assert protected_gemm(left, other, return_report=True, check=side)[1].status is Status.CLEAN
        changed(E.array, change)
        with errstate(**QUIET):
            C, report = protected_gemm(left, other, return_report=True, check=side)
        if number == 2:  # which cannot be restored
            assert report.status is Status.INPUT_CHANGED
            continue
        assert report.status is Status.CORRECTED
        assert name in operands_of(report)
        assert abs(np.asarray(C, float) - right).max() < 1e-4


@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("check", ["rows", "columns"])
def test_an_operand_of_a_call_on_a_card(cp: Any, check: str, name: str) -> None:
    A, B = on_card(cp, 20, 30, seed=1), on_card(cp, 30, 40, seed=2)

    def hook(stage: str, arrays: Any) -> None:
        if stage == "encoded":
            two_in_a_row({"A": A, "B": B}[name])

    with pytest.raises(SilentDataCorruptionError, match=f"{name} changed"):
        protected_gemm(A, B, check=check, on_stage=hook)


@pytest.mark.parametrize("hit", ["s", "t"])
@pytest.mark.parametrize("check", ["rows", "columns"])
def test_a_checksum_that_was_hit_on_a_card_is_no_fault_of_an_operand(cp: Any, check: str, hit: str) -> None:
    A, B = on_card(cp, 20, 30, seed=1), on_card(cp, 30, 40, seed=2)

    def hook(stage: str, arrays: Any) -> None:
        if stage == "encoded":
            arrays[hit][3, 0] += 100

    with errstate(checksum_fault="ignore"):
        C, report = protected_gemm(A, B, check=check, on_stage=hook, return_report=True)
    assert report.status in (Status.CHECKSUM_FAULT, Status.CLEAN)  # s alone is read no more
    assert np.allclose(np.asarray(C), np.asarray(A) @ np.asarray(B), atol=1e-4)


@pytest.mark.parametrize("recheck", [True, False])
@pytest.mark.parametrize("calls", [1, 4])  # as a graph, too
def test_a_queued_product_of_an_operand_that_changed_is_not_clean(cp: Any, calls: int, recheck: bool) -> None:
    A, B, C = on_card(cp, 20, 30, seed=1), on_card(cp, 30, 40, seed=2), cp.asarray(np.zeros((20, 40), np.float32))
    E = encode(B, recheck=recheck)
    for _ in range(calls):
        with errstate(sync=False):
            report = protected_gemm(A, E, out=C, return_report=True)[1]
        assert report.wait().status is Status.CLEAN
    two_in_a_row(B)
    with errstate(sync=False, unverifiable="ignore", **QUIET):
        report = protected_gemm(A, E, out=C, return_report=True)[1].wait()
    assert report.status in (Status.UNVERIFIABLE, Status.UNCORRECTABLE)


def test_an_operand_that_is_updated_after_a_queued_call_is_no_fault(cp: Any) -> None:
    A, B = on_card(cp, 20, 30, seed=1), on_card(cp, 30, 40, seed=2)
    with errstate(sync=False):
        report = protected_gemm(A, B, return_report=True)[1]
        B[...] = 1
        assert report.wait().status is Status.CLEAN
        with planted(lambda C: C.__setitem__((3, 4), 999)):
            report = protected_gemm(A, B, return_report=True)[1]
        B[...] = 2
        with errstate(corrected="ignore"):
            assert report.wait().status is Status.CORRECTED


@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
@pytest.mark.parametrize("check", ["rows", "columns", "both", "auto"])
@pytest.mark.parametrize("how", ["waited for", "queued"])
def test_both_encoded_operands_are_rechecked_on_a_card(cp: Any, how: str, check: str, batch: tuple[int, ...]) -> None:
    A, B = on_card(cp, 20, 30, seed=1), on_card(cp, 30, 40, seed=2)
    right = np.asarray(A, float) @ np.asarray(B, float)
    for name in "A" if batch else "AB":
        x, y = A.copy(), B.copy()
        E, F = encode(x), cp.stack([y] * 2) if batch else encode(y)
        with errstate(sync=how != "queued"):
            assert protected_gemm(E, F, check=check, return_report=True)[1].wait().status is Status.CLEAN
        (x if name == "A" else y)[3, 4] += 1e-3  # too little for a check
        with errstate(sync=how != "queued", **QUIET):
            C, report = protected_gemm(E, F, check=check, return_report=True)
            report = report.wait()
        if how == "queued":
            assert report.status is Status.INPUT_CHANGED
        else:
            assert report.status is Status.CORRECTED
            assert operands_of(report) == {name}
            assert abs(np.asarray(C, float) - right).max() < 1e-4


@pytest.mark.parametrize("check", ["auto", "rows", "columns", "both"])
@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("shape", [(40, 30, 20), (200, 300, 100), (500, 520, 610)])
def test_an_encoded_operand_that_changes_behind_its_recheck_is_found(
    shape: tuple[int, int, int], name: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever operand's checksums the check uses: the recheck is behind the read that predicts from the other one."""
    A, B = pair(*shape)
    right, X = A @ B, {"A": A, "B": B}[name]
    E, F = encode(A), encode(B)
    recheck, owner, hit = Encoded.changed, {"A": E, "B": F}[name], []

    def changed(self: Encoded) -> bool:
        found = recheck(self)
        if self is owner and not hit:
            hit.append(name)
            X[3, 4] = -X[3, 4]
        return found

    monkeypatch.setattr(Encoded, "changed", changed)
    with errstate(**QUIET):
        C, report = protected_gemm(E, F, check=check, return_report=True)
    assert hit
    assert report.status is Status.CORRECTED
    assert np.allclose(C, right)
