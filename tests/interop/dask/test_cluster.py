"""Products on a cluster of processes: what changes between two tasks is found, recovered, and named."""

import itertools
import math
import os
import signal
import time

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, wait

import abft_tsm2 as ft
from abft_tsm2.interop.dask import install
from abft_tsm2.interop.dask.gemm import LINKS
from abft_tsm2.interop.dask.messages import FOUND
from abft_tsm2.report import Status
from benchmarks import dask_planting as planting

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:Sending large graph")

TASKS = 6 * 4 * math.ceil(5 / LINKS["numpy"])  # of chains of five products
X = np.random.default_rng(0).standard_normal((192, 160))
Y = np.random.default_rng(1).standard_normal((160, 128))


def operands(chunks=32):
    """New names each time: nothing that is known from before."""
    names = [f"{name}-{time.monotonic_ns()}" for name in "xy"]
    return [da.from_array(x, chunks=chunks, name=name) for x, name in zip((X, Y), names, strict=True)]


@pytest.mark.parametrize("after", [1.5, 0, -1, float("nan"), True, "3"])
def test_a_quarantine_counts_whole_faults(after):
    with pytest.raises(ValueError, match=r"quarantine_after is .*: a whole number of faults, 1 or more, or None"):
        install(quarantine_after=after)


@pytest.fixture(scope="module")
def right(client):
    """What the product is without a fault, bit for bit."""
    C, report = dask.compute(*ft.protected_gemm(*operands(), return_report=True))
    assert report.status is Status.CLEAN
    np.testing.assert_allclose(C, X @ Y, rtol=0, atol=1e-12)
    return C


def same(C, right):
    np.testing.assert_array_equal(C.view(np.uint64), right.view(np.uint64))


def repairs(log):
    return {fault.repair.partition(" from ")[0] for report in log for fault in report.faults}


@pytest.mark.parametrize(
    ("pattern", "repair"), [(planting.SINGLE, "restored bit for bit"), (planting.SQUARE, "fetched again")]
)
def test_blocks_damaged_on_the_wire(client, right, pattern, repair):
    client.run(planting.on_arrival, pattern, 3, 4)
    try:
        with ft.monitor() as log:
            C, report = dask.compute(*ft.protected_gemm(*operands(), return_report=True))
    finally:
        planted = sum(client.run(planting.arrivals).values())
    assert planted > 0
    same(C, right)
    assert report.status is Status.CORRECTED
    assert repair in repairs(log)
    assert log.counts[Status.CORRECTED] >= 1
    faulty = [fault for one in report.products for fault in one.faults]
    workers = report.by_worker()
    assert set(workers) == set(client.scheduler_info()["workers"])
    assert sum(found["tasks"] for found in workers.values()) == len(report.products) == TASKS
    assert {fault.worker for fault in faulty} <= set(workers)
    assert all(fault.worker and fault.host and fault.device for fault in faulty)
    told = [message for _, message in client.get_events("abft-tsm2")]
    assert {fault.worker for fault in faulty} <= {message["worker"] for message in told if "worker" in message}


def held(client, C, part):
    """Have tasks of a graph computed of which the keys name this part, and their blocks kept in the workers' memory."""
    keys = [key for layer in C.dask.layers.values() for key in layer if part in str(key)]
    futures = client.get(C.dask, keys, sync=False)
    wait(futures)
    return futures


@pytest.mark.parametrize(
    ("pattern", "repair"), [(planting.SINGLE, "restored bit for bit"), (planting.SQUARE, "made again")]
)
def test_blocks_damaged_in_memory(client, right, pattern, repair):
    C, told = ft.protected_gemm(*operands(), return_report=True)
    kept = held(client, C, "read-a-")
    planted = sum(client.run(planting.in_memory, "read-a-", pattern).values())
    assert planted == len(kept) == 30
    with ft.monitor() as log:
        C, report = dask.compute(C, told)
    same(C, right)
    assert repair in repairs(log) & repairs(report.products)
    assert len(log) == len(report.products) == TASKS  # those that ran twice count once
    assert sum(found["faulty"] for found in report.by_worker().values()) > 0


def test_all_that_a_task_finds_is_said_once(client, right):
    """Its blocks of A are restored, and then it has to wait for one of B."""
    C, told = ft.protected_gemm(*operands(), return_report=True)
    kept = held(client, C, "read-")
    assert len(kept) == 50
    client.run(planting.in_memory, "read-a-", planting.SINGLE)
    client.run(planting.in_memory, "read-b-", planting.SQUARE)
    with ft.monitor() as log:
        C, told = client.persist([C, told])
        wait([C, told])
    same(C.compute(), right)
    report = told.compute()
    assert {fault.operand for one in report.products for fault in one.faults} == {
        *(f"A({i}, {j})" for i in range(6) for j in range(5)),
        *(f"B({i}, {j})" for i in range(5) for j in range(4)),
    }
    assert len(log) == TASKS
    assert client.run_on_scheduler(left_on_tasks) == []  # computed again, they begin anew


@pytest.mark.parametrize("pattern", [planting.SINGLE, planting.SQUARE])
def test_the_result_is_compared_by_the_task_that_returns_it(client, right, pattern):
    """Beside a report, that is another task than the one that has settled it."""
    C, told = ft.protected_gemm(*operands(), return_report=True)
    kept = held(client, C, "-settled")
    assert len(kept) == 24
    assert sum(client.run(planting.in_memory, "-settled", pattern).values()) == 24
    with ft.monitor() as log:
        C, told = client.persist([C, told])
        wait([C, told])
    same(C.compute(), right)
    assert {fault.operand for report in log for fault in report.faults} == {"C"}


def left_on_tasks(dask_scheduler):
    """Tasks that have restrictions, or know of faults."""
    return [
        key
        for key, task in dask_scheduler.tasks.items()
        if task.worker_restrictions or FOUND in (task.annotations or ())
    ]


def test_a_block_that_is_lost_in_each_run_is_given_up(client):
    """It is made by the task that reads it."""
    A = da.map_blocks(_ones, chunks=((32, 32), (32, 32)), dtype=float, meta=np.empty((0, 0)))
    with pytest.raises(ft.SilentDataCorruptionError) as caught:
        client.compute(ft.protected_gemm(A, A, on_stage=_losing)).result(timeout=60)
    assert Status.INPUT_CHANGED in (caught.value.report.status, *caught.value.report.also)


def _ones(block_info=None):
    return np.ones(block_info[None]["chunk-shape"])


def _losing(stage, arrays):
    if stage == "encoded":
        arrays["A"].flags.writeable = True
        arrays["A"][...] = planting.damaged(arrays["A"], planting.SQUARE, np.random.default_rng())


def test_data_that_cannot_be_checked_are_no_fault_of_a_worker(client):
    x, y = operands(64)
    with ft.errstate(unverifiable="ignore"):
        _, report = dask.compute(*ft.protected_gemm(da.where(x > 2, np.nan, x), y, return_report=True))
    assert report.status is Status.UNVERIFIABLE
    assert {found["faulty"] for found in report.by_worker().values()} == {0}
    told = [message for _, message in client.get_events("abft-tsm2")]
    assert not [message for message in told if message.get("status") == "UNVERIFIABLE"]


def test_many_tasks_that_lose_one_block_wait_for_it_once():
    """Also where the graph is made before the cluster."""
    x, y = da.from_array(X[:96, :16], chunks=16), da.from_array(Y[:16], chunks=(16, 128))
    C, told = ft.protected_gemm(x, y, on_stage=_longer_and_longer, return_report=True)
    with (
        LocalCluster(n_workers=1, threads_per_worker=6, processes=False, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
        ft.monitor() as log,
    ):
        kept = held(client, C, "read-")
        assert len(kept) == 7
        assert sum(client.run(planting.in_memory, "read-b-", planting.SQUARE).values()) == 1
        C, report = dask.compute(C, told)
    np.testing.assert_allclose(C, X[:96, :16] @ Y[:16], rtol=0, atol=1e-12)
    assert report.status is Status.CORRECTED
    assert set(log.counts) <= {Status.CORRECTED, Status.CLEAN}


def _longer_and_longer(stage, arrays):
    if stage == "multiplied":
        time.sleep(0.05 * next(_turn))


_turn = itertools.count()


def test_a_damaged_file_of_a_spilled_block(client, right):
    C = ft.protected_gemm(*operands())
    kept = held(client, C, "read-a-")
    client.run(planting.spill)
    planted = sum(client.run(planting.in_files).values())
    assert planted > 0
    with ft.monitor() as log:
        same(C.compute(), right)
    assert log.counts[Status.CORRECTED] + log.counts[Status.CHECKSUM_FAULT] > 0
    del kept


def corrupting(stage, arrays):
    """A worker that gets every fifth product wrong: a bit of C, beyond what a sum in float64 hides."""
    corrupting.calls = getattr(corrupting, "calls", 0) + (stage == "multiplied")
    if stage == "multiplied" and corrupting.calls % 5 == 0:
        arrays["C"][1, 2] += 1.0


def test_a_worker_that_corrupts_every_fifth_block(client, right):
    with ft.monitor() as log:
        C, report = dask.compute(*ft.protected_gemm(*operands(), on_stage=corrupting, return_report=True))
    np.testing.assert_allclose(C, right, rtol=0, atol=1e-12)  # a repaired element may be rounded otherwise
    assert report.status is Status.CORRECTED
    assert log.counts[Status.CORRECTED] >= 10
    assert {fault.operand for one in report.products for fault in one.faults} == {"C"}


def hopeless(stage, arrays):
    """One worker adds damage faster than it is repaired: nothing that it computes can be used."""
    from distributed import get_worker

    if get_worker().name == 0 and stage in ("multiplied", "corrected"):
        rng = np.random.default_rng()
        arrays["C"][...] += rng.standard_normal(arrays["C"].shape)


def test_what_a_worker_cannot_do_is_done_by_another(client, right):
    with ft.monitor() as log:
        C, report = dask.compute(*ft.protected_gemm(*operands(64), on_stage=hopeless, return_report=True))
    np.testing.assert_allclose(C, right, rtol=0, atol=1e-12)
    assert report.ok
    assert any(
        repair.endswith("computed again by another worker") for repair in repairs(report.products) & repairs(log)
    )
    assert len(log) == len(report.products) == log.counts[Status.CORRECTED] + log.counts[Status.CLEAN]
    workers = {address: one["name"] for address, one in client.scheduler_info()["workers"].items()}
    bad, good = sorted(report.by_worker().items(), key=lambda one: workers[one[0]])
    assert (bad[1]["tasks"], bad[1]["faulty"] > 0) == (0, True)
    assert (good[1]["tasks"], good[1]["faults"]) == (len(log), ())
    told = [message for _, message in client.get_events("abft-tsm2") if message.get("status") == "UNCORRECTABLE"]
    assert {message["worker"] for message in told} == {bad[0]}  # the one that did them is not to blame


def _once(stage, arrays):
    from distributed import get_worker

    if stage == "inputs" and not hasattr(get_worker(), "_raised_once"):
        get_worker()._raised_once = True
        raise RuntimeError("a task fails")


def test_a_task_that_raises_runs_again(client, right):
    C = ft.protected_gemm(*operands(), on_stage=_once)
    with ft.monitor() as log:
        same(client.compute(C, retries=2).result(), right)
    assert log.counts[Status.CLEAN] == len(log) == TASKS


def test_errstate_goes_with_the_graph(client):
    with ft.errstate(corrected="raise"):
        C = ft.protected_gemm(*operands(), on_stage=corrupting)
    with pytest.raises(ft.SilentDataCorruptionError) as caught:
        C.compute()
    assert caught.value.report.status is Status.CORRECTED
    with ft.errstate(corrected="warn"):
        C = ft.protected_gemm(*operands(), on_stage=corrupting)
    seen = []
    with pytest.MonkeyPatch.context() as patch:  # the client warns, in a thread of its own
        patch.setattr("warnings.warn", lambda text, category, **_: seen.append(category))
        C.compute()
    assert ft.errors.CorruptionWarning in seen


def test_the_dashboard_has_a_column(client):
    dask.compute(ft.protected_gemm(*operands(), on_stage=corrupting))
    columns = client.run(lambda dask_worker: "abft faults" in dask_worker.metrics)
    assert any(columns.values())


def _slowly(stage, arrays):
    if stage == "inputs":
        time.sleep(0.02)


def test_a_worker_is_killed(client, right):
    C = ft.protected_gemm(*operands(), on_stage=_slowly)
    with ft.monitor() as log:
        future = client.compute(C)
        time.sleep(0.6)
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
        same(future.result(timeout=60), right)
    assert len(log) == TASKS  # those that ran twice count once
    client.wait_for_workers(2, timeout=30)


def _device(number, dask_worker=None):
    os.environ["ABFT_TSM2_DEVICE"] = f"socket {number if dask_worker.name else 'bad'}"


def on_the_bad_device(stage, arrays):
    if stage == "multiplied" and os.environ["ABFT_TSM2_DEVICE"] == "socket bad":
        arrays["C"][1, 2] += 1.0


def test_a_device_with_repeated_faults_is_retired(client, right):
    client.wait_for_workers(2, timeout=30)
    client.run(_device, 1)
    install(client, quarantine_after=3)
    try:
        C, report = dask.compute(*ft.protected_gemm(*operands(), on_stage=on_the_bad_device, return_report=True))
        np.testing.assert_allclose(C, right, rtol=0, atol=1e-12)
        names = {found["device"] for found in report.by_worker().values()}
        assert names == {"socket bad", "socket 1"}
        deadline = time.monotonic() + 20
        while len(client.scheduler_info()["workers"]) > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        (left,) = client.scheduler_info()["workers"].values()
        assert left["name"] != 0
        retired = [message for _, message in client.get_events("abft-tsm2") if message.get("retired")]
        assert "socket bad has had" in retired[-1]["why"]
        # all of it on what is left
        _, report = dask.compute(*ft.protected_gemm(*operands(), on_stage=on_the_bad_device, return_report=True))
        assert report.status is Status.CLEAN
    finally:
        install(client)
