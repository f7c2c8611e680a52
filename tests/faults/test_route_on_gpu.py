"""Faults on the route of calls without a hook on a GPU: queued, deferred, in graphs, and in campaigns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, errstate, protected_gemm
from abft_tsm2.faults import Plan, inject
from abft_tsm2.faults.trials.gemm import GemmTrials
from abft_tsm2.faults.trials.trial import Trial, Workload
from tests.support.oracles import elements_outside
from tests.support.planting import bits, normal, pair

pytestmark = pytest.mark.gpu

BIG = "exponent_high"
QUIET: dict[str, Any] = {"corrected": "ignore", "checksum_fault": "ignore", "unverifiable": "ignore"}
WORKLOAD = Workload("gemm", 256, 192, 320, "float32", "normal", "C", (5,))


def there(cp: Any, *batch: int) -> tuple[Any, Any, Any]:
    A, B = normal(*batch, 130, 257, dtype=np.float32), normal(*batch, 257, 70, dtype=np.float32, seed=1)
    return cp.asarray(A), cp.asarray(B), cp.zeros((*batch, 130, 70), np.float32)


def right(cp: Any, A: Any, B: Any, C: Any) -> bool:
    a, b, c = map(cp.asnumpy, (A, B, C))
    return not any(elements_outside(c[i], a[i], b[i]).any() for i in np.ndindex(*c.shape[:-2]))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "deferred"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
@pytest.mark.parametrize("site", ["product", "partial", "A", "B"])
def test_a_product_with_a_fault_is_right_or_refused(
    cp: Any, site: str, batch: tuple[int, ...], sync: bool, persistent: bool
) -> None:
    A, B, C = there(cp, *batch)
    kept = A.copy(), B.copy()
    with errstate(sync=sync, **QUIET), inject(Plan("bit_flip", site, BIG, persistent=persistent)) as injector:
        try:
            report = protected_gemm(A, B, out=C, return_report=True)[1].wait()
        except SilentDataCorruptionError as error:
            report = error.report
    assert injector.planted
    if site == "A" and persistent and report.status is Status.CLEAN:  # where A is encoded behind the product
        assert right(cp, A, B, C)
        return
    assert report.status is not Status.CLEAN
    assert right(cp, *kept, C) or not report.ok
    if not persistent:
        assert all(bool((x == y).all()) for x, y in zip((A, B), kept, strict=True))


def test_without_a_fault_every_bit_is_that_of_a_call_alone(cp: Any) -> None:
    A, B, _ = there(cp)
    expected = protected_gemm(A, B)
    with inject() as injector:
        C = protected_gemm(A, B)
    assert injector.visits["multiplied"] == 1
    np.testing.assert_array_equal(bits(cp.asnumpy(C)), bits(cp.asnumpy(expected)))


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "deferred"])
@pytest.mark.parametrize("site", ["product", "A", "B"])
def test_calls_that_become_a_graph_keep_their_faults(cp: Any, site: str, sync: bool) -> None:
    A, B, C = there(cp)
    found = []
    plans = (Plan("bit_flip", site, BIG, visit=visit, seed=(visit,)) for visit in (1, 9, 17))
    with errstate(sync=sync, uncorrectable="log", **QUIET), inject(*plans) as injector:
        for _ in range(24):
            report = protected_gemm(A, B, out=C, return_report=True)[1].wait()
            found.append(report.status)
            assert right(cp, A, B, C) or not report.ok
    assert [i for i, status in enumerate(found) if status is not Status.CLEAN] == [1, 9, 17]
    assert len(injector.planted) == 3
    assert protected_gemm(A, B, out=C, return_report=True)[1].status is Status.CLEAN


@pytest.mark.parametrize("site", ["product", "A", "B"])
def test_chosen_replays_of_a_captured_graph_are_hit(cp: Any, site: str) -> None:
    A, B, C = there(cp)
    cp.cuda.Device().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    plan = Plan("bit_flip", site, BIG, visit=3)
    with stream, errstate(sync=False, uncorrectable="log", **QUIET), inject(plan) as injector:
        stream.begin_capture()
        _, report = protected_gemm(A, B, out=C, return_report=True)
        graph = stream.end_capture()
        for i in range(6):
            graph.launch(stream)
            stream.synchronize()
            assert right(cp, A, B, C) or i == 3
        final = report.wait()
        assert final.status is not Status.CLEAN
        assert right(cp, A, B, C)
    assert len(injector.planted) == 1
    faults = len(final.faults)
    for _ in range(3):  # nothing is planted behind the block
        graph.launch(stream)
    stream.synchronize()
    with errstate(uncorrectable="log", **QUIET):
        assert len(report.wait().faults) == faults


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scheme", ["protected", "deferred", "captured", "encoded", "hooked"])
def test_trials_of_a_campaign_keep_every_promise(cp: Any, scheme: str, dtype: str) -> None:
    sites = ["product", "A", "B"] if scheme == "captured" else ["product", "partial", "A", "B"]
    plans = [
        Plan(model, site, seed=(i,), persistent=bool(i % 3 == 0))
        for i, (model, site) in enumerate((m, s) for m in ("bit_flip", "nan", "random_value") for s in sites)
    ]
    trials = [Trial(i, (plan,), scheme) for i, plan in enumerate(plans)] + [Trial(len(plans), (), scheme)]
    found = list(GemmTrials(replace(WORKLOAD, dtype=dtype), cp).run(trials, 4))
    assert [one.note for one in found if one.outcome in ("sdc", "crash", "false_alarm", "hang")] == []
    assert found[-1].outcome == "clean"
    assert {one.outcome for one in found} & {"corrected", "detected"}


def test_pairs_of_other_layouts_are_hit_where_they_lie(cp: Any) -> None:
    """A view that cuBLAS takes as it is, of which the kernel has to find the words."""
    A, B = (cp.asarray(x) for x in pair(64, 48, 80, np.float64))
    wide, out = cp.zeros((48, 200)), cp.zeros((80, 64)).T
    wide[:, 40:120] = B
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    plans = Plan("bit_flip", "B", BIG, seed=(3,)), Plan("bit_flip", "product", BIG, visit=1)
    with stream, errstate(sync=False, uncorrectable="log", **QUIET), inject(*plans) as injector:
        stream.begin_capture()
        _, report = protected_gemm(A, wide[:, 40:120], out=out, return_report=True)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
        assert right(cp, A, B, out)
        report.wait()
    assert len(injector.planted) == 2
    assert bool((wide[:, 40:120] == B).all())
