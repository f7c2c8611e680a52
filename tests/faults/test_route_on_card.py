"""Faults on the route of calls without a hook on a GPU: queued, deferred, and in graphs; kernels run on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status
from abft_tsm2.checksum.device import tuned
from abft_tsm2.core import faultpoint
from abft_tsm2.faults import Plan, inject
from abft_tsm2.faults.recorded import changes
from abft_tsm2.gemm import replays
from tests.support import cupy_on_cpu
from tests.support.planted_products import QUIET, operands, right
from tests.support.planting import bits

card, cp = cupy_on_cpu.card, cupy_on_cpu.cp
BIG = "exponent_high"


def calls(A: Any, B: Any, C: Any, count: int, **options: Any) -> list[Status]:
    """The statuses of some products, each of which is right or refused."""
    found = []
    for _ in range(count):
        C[...] = 0
        with np.errstate(all="ignore"):  # of this card's products
            found.append(ft.protected_gemm(A, B, out=C, return_report=True, **options)[1].wait().status)
        assert right(A, B, C) or found[-1] is Status.UNCORRECTABLE
    return found


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "queued"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
@pytest.mark.parametrize("site", ["product", "partial", "A", "B"])
def test_a_fault_of_a_call_is_repaired(cp: Any, site: str, batch: tuple[int, ...], sync: bool) -> None:
    A, B, C = operands(cp, *batch)
    kept = A.copy(), B.copy()
    with ft.errstate(sync=sync, **QUIET), inject(Plan("bit_flip", site, BIG, visit=2)) as injector:
        found = calls(A, B, C, 1 if batch else 3)
    assert [one.plan.site for one in injector.planted] == [site]
    late = Status.UNCORRECTABLE if site == "B" and not sync else Status.CORRECTED  # a column: more than kernels repair
    assert found[:-1] == [Status.CLEAN] * (len(found) - 1)
    assert found[-1] in (Status.CORRECTED, late)
    for x, y in zip((A, B), kept, strict=True):
        np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "queued"])
def test_without_a_fault_every_bit_is_that_of_a_call_alone(cp: Any, sync: bool) -> None:
    A, B, C = operands(cp)
    with ft.errstate(sync=sync):
        expected = ft.protected_gemm(A, B)
        with inject() as injector:
            C, report = ft.protected_gemm(A, B, return_report=True)
            final = report.wait()
    assert (report.status is Status.PENDING) is not sync
    assert final.status is Status.CLEAN
    assert injector.visits["multiplied"] == 1
    np.testing.assert_array_equal(bits(C), bits(expected))


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "apart"])
@pytest.mark.parametrize(
    ("site", "check", "sync"), [("product", "both", False), ("A", "rows", True), ("B", "rows", False)]
)
def test_calls_that_become_a_graph_keep_their_faults(
    cp: Any, site: str, check: str, sync: bool, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "JOINT", tuned.JOINT if joint else 0)
    A, B, C = operands(cp)
    with ft.errstate(sync=sync, **QUIET):
        calls(A, B, C, 4, check=check)
        (alone,) = replays._made
        launched = alone._launched
        plans = (Plan("bit_flip", site, BIG, visit=visit, seed=(visit,)) for visit in (1, 3, 5))
        with inject(*plans) as injector:
            found = calls(A, B, C, 7, check=check)
        assert len(replays._made) == 2  # that with faults is another one
        assert alone._launched == launched
        assert set(calls(A, B, C, 2, check=check)) == {Status.CLEAN}
    assert [i for i, status in enumerate(found) if status is not Status.CLEAN] == [1, 3, 5]
    assert sorted(one.plan.visit for one in injector.planted) == [1, 3, 5]
    assert alone._launched == launched + 2


@pytest.mark.parametrize("site", ["product", "B"])
def test_chosen_replays_of_a_captured_graph_are_hit(cp: Any, site: str) -> None:
    A, B, C = operands(cp)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream, ft.errstate(sync=False, **QUIET), inject(Plan("bit_flip", site, BIG, visit=3)) as injector:
        stream.begin_capture()
        _, report = ft.protected_gemm(A, B, out=C, return_report=True)
        graph = stream.end_capture()
        for _ in range(6):
            with np.errstate(all="ignore"):
                graph.launch()
            assert right(A, B, C)
        final = report.wait()
    assert len(injector.planted) == 1
    assert (final.replays, final.status) == (6, Status.CORRECTED)
    assert final.faults[0].repair == "recomputed in float64 on the device, in replay 3"
    for _ in range(3):  # nothing is planted behind the block
        graph.launch()
    with ft.errstate(**QUIET):
        assert report.wait().faults == final.faults


def test_a_fault_that_comes_back_is_in_every_replay_from_its_first_on(cp: Any) -> None:
    A, B, C = operands(cp)
    stream = cp.cuda.Stream(non_blocking=True)
    plan = Plan("bit_flip", bits=BIG, visit=2, persistent=True)
    with stream, ft.errstate(sync=False, **QUIET), inject(plan) as injector:
        stream.begin_capture()
        _, report = ft.protected_gemm(A, B, out=C, return_report=True)
        graph = stream.end_capture()
        for _ in range(5):
            graph.launch()
    assert len(injector.planted) == 3
    assert [fault.repair.rpartition(" ")[2] for fault in report.wait().faults] == ["2", "3", "4"]


def test_an_operand_that_stays_changed_is_named(cp: Any) -> None:
    A, B, C = operands(cp)
    plan = Plan("bit_flip", "B", BIG, persistent=True)
    with pytest.raises(ft.SilentDataCorruptionError) as caught, inject(plan):
        ft.protected_gemm(A, B, out=C)
    assert caught.value.report.status is Status.INPUT_CHANGED


@pytest.mark.parametrize("plan", [Plan("nan", "t"), Plan("nan", "partial"), Plan("scaled")], ids=str)
def test_what_a_graph_cannot_have_is_refused(cp: Any, plan: Plan) -> None:
    A, B, C = operands(cp)
    stream = cp.cuda.Stream(non_blocking=True)
    refused = pytest.raises(ValueError, match=r"no site '\w+' in a graph|depends on the values")
    with stream, ft.errstate(sync=False), refused, inject(plan):
        stream.begin_capture()
        try:
            ft.protected_gemm(A, B, out=C)
        finally:
            stream.end_capture()


def test_a_function_plants_nothing_into_a_graph(cp: Any) -> None:
    A, B, C = operands(cp)
    stream = cp.cuda.Stream(non_blocking=True)
    refused = pytest.raises(RuntimeError, match=r"use faults\.inject")
    with stream, ft.errstate(sync=False), refused, faultpoint.planting(lambda stage, arrays: None):
        stream.begin_capture()
        try:
            ft.protected_gemm(A, B, out=C)
        finally:
            stream.end_capture()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize(
    "model", ["bit_flip", "multi_bit", "stuck_at_0", "stuck_at_1", "random_value", "nan", "inf", "row"]
)
def test_changes_of_words_are_those_of_the_model(model: str, dtype: str) -> None:
    from abft_tsm2.faults.models import plant

    plan = Plan(model, count=3, factor=0.0 if model == "row" else 2.0, seed=(4,))
    x = np.random.default_rng(0).standard_normal((9, 7)).astype(dtype)
    if model == "row":
        with pytest.raises(ValueError, match="depends on the values"):  # the sign of a zero
            changes(plan, x.shape, x.dtype)
        return
    words = bits(x).copy()
    rows, columns, keep, flip = changes(plan, x.shape, x.dtype)
    words[rows, columns] = (words[rows, columns] & keep) ^ flip
    plant(x, plan, plan.rng())
    np.testing.assert_array_equal(bits(x), words)
