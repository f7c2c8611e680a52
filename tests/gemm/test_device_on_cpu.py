"""Products of CuPy arrays whose kernels run on the CPU: what is queued, verified, repaired and left to the host.

On a card the same is tested at length: tests/gemm/test_device_gemm.py, tests/gemm/test_device_verdicts.py.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status
from abft_tsm2.checksum.device import tuned
from abft_tsm2.checksum.device.check import DeviceCheck, carried_on_device
from abft_tsm2.checksum.device.layout import elements
from abft_tsm2.gemm import replays
from abft_tsm2.gemm.plan import LaunchSequence, ProductPlan
from benchmarks.planting import planted
from benchmarks.walk import Walk
from tests.support import cupy_on_cpu
from tests.support.oracles import Exact
from tests.support.planted_products import QUIET, everything

ELEMENT = (3, 5)


card, cp = cupy_on_cpu.card, cupy_on_cpu.cp


def normal(cp: Any, *shape: int, seed: int = 0) -> Any:
    return cp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32))


def pair(cp: Any, *batch: int) -> tuple[Any, Any]:
    return normal(cp, *batch, 60, 50), normal(cp, *batch, 50, 70, seed=1)


@pytest.fixture(params=[True, False], ids=["joint", "apart"])
def joint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of A are summed where those of C are judged, or by a kernel of their own."""
    monkeypatch.setattr(tuned, "JOINT", tuned.JOINT if request.param else 0)


def wrong(a: Any, b: Any, c: Any) -> bool:
    return bool(Exact.of(np.asarray(a), np.asarray(b), None).outside(np.asarray(c)).any())


def one_element(C: Any) -> None:
    C[(..., *ELEMENT)] = 1e4


def once(plant: Callable[[Any], None]) -> Callable[[Any], None]:
    """Of the products that follow, only the first."""
    left = [plant]
    return lambda C: left.pop()(C) if left else None


# ---- the side stream ------------------------------------------------------------------------------------------------


def test_operands_are_encoded_in_memory_of_the_side_stream(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The caller's is used meanwhile by what another thread has queued on the same stream. Where rows lie across memory,
    # blocks share sums.
    used: list[LaunchSequence] = []
    monkeypatch.setattr(ProductPlan, "give", lambda plan, sequence: used.append(sequence))
    a, b, out = (cp.asarray(np.asfortranarray(x)) for x in (*pair(cp), np.empty((60, 70), np.float32)))
    ft.protected_gemm(a, b, out=out, check="rows")
    (encode,), (verify,) = used[0].encode, used[0].verify
    kept = [[step._keeps[0] for step in steps if isinstance(step._keeps[0], tuple)] for steps in (encode, verify)]
    assert all(kept)
    assert not any(np.shares_memory(x, y) for i, j in itertools.product(*kept) for x, y in zip(i, j, strict=True))


def test_a_product_that_fails_waits_for_its_side_stream(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its workspaces are free again behind it.
    waits: list[int] = []
    monkeypatch.setattr(cupy_on_cpu.Stream, "wait_event", lambda stream, event: waits.append(stream.ptr))

    def fails(C: Any) -> None:
        raise MemoryError("of the product")

    with planted(fails), pytest.raises(MemoryError, match="of the product"):
        ft.protected_gemm(*pair(cp))
    assert len(waits) == 2
    assert waits[1] == 0


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "queued"])
def test_products_and_repairs(cp: Any, joint: None, sync: bool, check: str, batch: tuple[int, ...]) -> None:
    a, b = pair(cp, *batch)
    for _ in range(2):  # the second call is known
        with ft.errstate(sync=sync):
            c, report = ft.protected_gemm(a, b, check=check, return_report=True)
        assert (report.status is Status.PENDING) is not sync
        assert report.wait().status is Status.CLEAN
        with ft.errstate(sync=sync, **QUIET), planted(once(one_element)):
            c, report = ft.protected_gemm(a, b, check=check, return_report=True)
            report = report.wait()
        assert report.status is Status.CORRECTED
        faults = [fault for one in report.products or (report,) for fault in one.faults]
        assert {(fault.rows, fault.columns) for fault in faults} == {((3,), (5,))}
        assert not any(wrong(x, y, z) for x, y, z in (zip(a, b, c, strict=True) if batch else [(a, b, c)]))


@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "batch"])
def test_what_the_kernels_do_not_settle_is_left_to_the_host(cp: Any, joint: None, batch: tuple[int, ...]) -> None:
    a, b = pair(cp, *batch)
    for _ in range(2):
        with ft.errstate(**QUIET), planted(once(everything)):
            c, report = ft.protected_gemm(a, b, return_report=True)
        assert report.status is Status.CORRECTED
        assert not any(wrong(x, y, z) for x, y, z in (zip(a, b, c, strict=True) if batch else [(a, b, c)]))


def test_a_queued_product_that_is_not_settled_says_what_to_do(cp: Any) -> None:
    a, b = pair(cp)
    with ft.errstate(sync=False, **QUIET), planted(once(everything)):
        _, report = ft.protected_gemm(a, b, return_report=True)
        found = report.wait()
        assert found.status is Status.UNCORRECTABLE
        assert "it still disagrees: repeat the product under errstate(sync=True)" in found.reasons[-1]
    with ft.errstate(sync=False, **QUIET), planted(once(everything)):
        _, report = ft.protected_gemm(*pair(cp), return_report=True)
        gc.collect()
        assert "its operands are gone" in report.wait().reasons[-1]


@pytest.mark.parametrize("skipped", ["verify", "repair"])
def test_a_verdict_that_was_not_made_is_not_believed(
    cp: Any, joint: None, skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceCheck, skipped, lambda self, memory, *arguments, **named: [])
    a, b = pair(cp)
    c, report = ft.protected_gemm(a, b, return_report=True)
    assert (report.status, report.suspicions) == (Status.CLEAN, 60)
    with ft.errstate(sync=False, unverifiable="ignore"):  # nothing of what was multiplied has been kept
        c, report = ft.protected_gemm(a, b, return_report=True)
        report = report.wait()
    assert report.status is Status.UNVERIFIABLE
    assert "left no verdict on C, and nothing shows" in report.reasons[-1]
    with ft.errstate(**QUIET), planted(once(one_element)):
        c, report = ft.protected_gemm(a, b, return_report=True)
    assert report.status is Status.CORRECTED
    assert not wrong(a, b, c)


HOOKS: dict[str, tuple[str, Callable[[Any], None], int, Status]] = {
    "element": ("multiplied", lambda x: one_element(x["C"]), 1, Status.CORRECTED),
    "checksum": ("encoded", lambda x: x["t"].__setitem__(3, 0), 1, Status.CHECKSUM_FAULT),
    "operand": ("encoded", lambda x: x["A"].__setitem__((7, 11), 3), 1, Status.INPUT_CHANGED),
    "again and again": ("corrected", lambda x: one_element(x["C"]), 99, Status.UNCORRECTABLE),
}


@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_changes_is_found(cp: Any, name: str) -> None:
    at, change, times, status = HOOKS[name]
    told: list[str] = []
    a, b = pair(cp)

    def hook(stage: str, arrays: Any) -> None:
        told.append(stage)
        if stage == at and told.count(stage) <= times:
            change(arrays)
        if at == "corrected" and stage == "multiplied":
            one_element(arrays["C"])

    with ft.errstate(checksum_fault="ignore", **QUIET):
        c, report = ft.protected_gemm(a, b, return_report=True, on_stage=hook)
    assert report.status is status
    assert told[:4] == ["inputs", "encoded", "multiplied", "verified"]
    assert not wrong(a, b, c)  # by the operands as they are now, and the last repair


def test_an_encoded_operand_that_changed_is_restored(cp: Any, joint: None) -> None:
    a, b = pair(cp)
    kept, E = b.copy(), ft.encode(b, side="rows")
    assert ft.protected_gemm(a, E, return_report=True)[1].status is Status.CLEAN
    b[5, 6] += 1e-3  # too little for the check of C, not for that of the bits
    with ft.errstate(**QUIET):
        c, report = ft.protected_gemm(a, E, return_report=True)
    assert report.status is Status.CORRECTED
    assert {(f.operand, f.rows, f.columns) for f in report.faults} == {("B", (5,), (6,))}
    assert not wrong(a, kept, c)


@pytest.mark.parametrize("side", ["both", "rows", "columns"])
@pytest.mark.parametrize("outstanding", [False, True])
def test_encode_gives_the_weights_and_sums_of_the_kernels(cp: Any, side: str, outstanding: bool) -> None:
    A = normal(cp, 300, 40)
    if outstanding:  # in a row that the sample of 128 may miss: then from exact norms
        A[:, ::2] *= 1e-6
        A[150, ::2] = 1e6
    E = ft.encode(A, side=side)
    wide = np.asarray(A, np.longdouble)
    for one, carried, R in (("rows", E.right, wide), ("columns", E.left, wide.T)):
        assert (carried is not None) == (side in ("both", one))
        if carried is None:
            continue
        alone = carried_on_device(A, one)
        v, sums = carried.weights[:, 0], np.asarray(carried.sums[:, 0])
        assert np.array_equal(v, alone.weights)
        bound = 2 * (v.size + 1) * 2.0**-53 * (abs(R) @ abs(np.asarray(v, np.longdouble)))
        assert (abs(sums - R @ np.asarray(v, np.longdouble)) <= bound).all()
        pointers = getattr(E.device.sides, one)
        for name, kind in (("s", alone.weights.dtype), ("bit_sums", "uint64")):
            mine, others = (elements(getattr(x, name), sums.size, kind) for x in (pointers, alone.right))
            assert np.array_equal(mine, others) if name == "bit_sums" else (abs(mine - others) <= bound + 1e-300).all()
    np.testing.assert_allclose(E.norms.rows, np.sqrt((wide * wide).sum(axis=1)).astype(float), rtol=1e-10)
    product = ft.protected_gemm(normal(cp, 20, 300), E, return_report=True)[1] if side != "columns" else None
    assert product is None or product.status is Status.CLEAN


def test_an_existing_product_is_verified(cp: Any) -> None:
    a, b = pair(cp)
    c = a @ b
    assert ft.verify_gemm(a, b, c).status is Status.CLEAN
    one_element(c)
    assert ft.verify_gemm(a, b, c, on_error="detect").status is Status.UNCORRECTABLE
    assert c[ELEMENT] == 1e4


@pytest.mark.parametrize(
    ("sync", "graph", "least", "most"),
    [(True, False, 30, 62), (False, False, 30, 62), (True, True, 15, 40), (False, True, 15, 40)],
    ids=["sync", "queued", "sync graph", "queued graph"],
)
def test_a_known_product_makes_few_calls(
    card: tuple[Any, cupy_on_cpu.Kernels], sync: bool, graph: bool, least: int, most: int
) -> None:
    cp, kernels = card
    kernels.runs = False
    a, b = pair(cp)
    c = cp.empty((60, 70), np.float32)
    how = contextlib.nullcontext() if graph else replays.step_by_step()
    with ft.errstate(sync=sync), how:
        for _ in range(5):
            ft.protected_gemm(a, b, out=c)
        walk, before = Walk(), sys.getprofile()
        sys.setprofile(walk)
        try:
            ft.protected_gemm(a, b, out=c)
        finally:
            sys.setprofile(before)
        _, report = ft.protected_gemm(a, b, out=c, return_report=True)
    assert report.wait().status is Status.CLEAN
    assert least < walk.total <= most, walk.calls
