"""The model of a cluster's time, and the simulation of the same tasks: what has to hold for any parameters."""

from dataclasses import fields, replace

import numpy as np
import pytest

pytest.importorskip("distributed")

import dask.array
from distributed import Client, LocalCluster

import abft_tsm2 as ft
from abft_tsm2.interop.dask import ClusterModel, graphs
from abft_tsm2.interop.dask.gemm import LINKS, blocks_held
from benchmarks import dask_model
from benchmarks.dask_model import Hazards, simulate

MODEL = ClusterModel(flop_rate=1e12, read_rate=5e10, bandwidth=1.25e9)
N = 16384


@pytest.mark.parametrize("protected", [True, False])
def test_more_workers_have_less_to_do_and_more_to_receive_in_all(protected):
    counts = (1, 2, 3, 5, 8, 16, 50, 64, 200)
    found = [MODEL.seconds(N, N, N, 2048, workers=w, protected=protected) for w in counts]
    for part in ("compute", "checks", "tasks"):
        times = [getattr(one, part) for one in found]
        assert times == sorted(times, reverse=True)
    received = [w * MODEL.blocks_received(N, N, N, 2048, w) for w in counts]
    assert received == sorted(received)
    assert received[0] == 0
    assert received[-1] < 2 * 8**3  # at most two for each product
    assert len({one.scheduling for one in found}) == 1


@pytest.mark.parametrize("name", [field.name for field in fields(ClusterModel)])
def test_what_is_faster_takes_no_longer(name):
    rate = name in ("flop_rate", "read_rate", "bandwidth")
    better = replace(MODEL, **{name: True if name == "gpu" else getattr(MODEL, name) * (2 if rate else 0.5)})
    for workers in (1, 4, 1000):
        for protected in (True, False):
            given = (N, N // 2, N, 2048, "float32", workers, protected)
            assert better.seconds(*given).total <= MODEL.seconds(*given).total
    assert any(
        better.seconds(N, N, N, 2048, "float64", w) != MODEL.seconds(N, N, N, 2048, "float64", w) for w in (1, 4)
    )


def test_a_device_hides_what_the_host_does_meanwhile_and_no_more():
    for block in (256, 4096):
        one, other = (replace(MODEL, gpu=gpu).seconds(N, N, N, block, workers=4) for gpu in (True, False))
        calls = (N // block) ** 3 / 4 * MODEL.per_product
        device, host = one.compute + one.checks, other.tasks + calls
        assert other.checks - one.checks == pytest.approx(calls)
        assert one.tasks == pytest.approx(max(0.0, host - device))
        assert (host > device) is (block == 256)


def test_protection_costs_what_it_reads_and_is_the_less_the_larger_the_blocks():
    found = MODEL.seconds(2048, 4096, 2048, 2048)
    block = 8 * 2048**2
    assert found.compute == pytest.approx(2 * 2048 * 4096 * 2048 / 1e12)
    # two products of A (2), B (1), C (3), one of them of C0 (3); two blocks of A read (2), two of B (3); C at the end
    assert found.checks == pytest.approx((2 * 6 + 3 + 2 * 2 + 2 * 3 + 1) * block / 5e10 + 2 * MODEL.per_product)
    assert found.tasks == pytest.approx((2 + 4 + 1) * MODEL.per_task)
    overheads = [MODEL.overhead(N, N, N, block, workers=4) for block in (512, 1024, 2048, 4096)]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] > 1


def test_the_scheduler_bounds_what_many_workers_do():
    few, many = (MODEL.seconds(2**17, 2**14, 2**17, 2048, workers=w) for w in (16, 4096))
    assert few.total == sum(few[:4]) > few.scheduling
    assert many.total == many.scheduling > sum(many[:4])


def test_narrow_types_are_multiplied_and_summed_in_float32():
    half, single, double = (MODEL.seconds(N, N, N, 2048, dtype, 4) for dtype in ("bfloat16", "float32", "float64"))
    assert half.compute == single.compute == double.compute / 2
    assert half.transfers < single.transfers < double.transfers
    assert MODEL.memory(512, "float16") == MODEL.memory(512, "float32")


@pytest.mark.parametrize(("dtype", "size"), [("float64", 8), ("float32", 4)])
def test_memory_is_that_of_the_blocks_that_tasks_hold(dtype, size):
    for gpu, kind in ((False, "numpy"), (True, "cupy")):
        assert replace(MODEL, gpu=gpu).memory(1000, dtype, 3) == blocks_held(LINKS[kind]) * 3 * size * 1000**2


@pytest.mark.parametrize("memory", [1e5, 1e7, 1e9, 64e9])
@pytest.mark.parametrize("workers", [1, 64, 5000])
def test_the_block_that_is_chosen_fits_and_none_is_better(memory, workers):
    block = MODEL.choose_block(N, N, N, memory, workers=workers, threads=4)
    assert MODEL.memory(block, threads=4) <= graphs.SHARE * memory
    assert block % 256 == 0 or MODEL.memory(256, threads=4) > graphs.SHARE * memory
    best = MODEL.seconds(N, N, N, block, workers=workers).total
    for other in range(256, N + 1, 256):
        if MODEL.memory(other, threads=4) <= graphs.SHARE * memory:
            assert best <= MODEL.seconds(N, N, N, other, workers=workers).total


def test_what_cannot_be_is_refused():
    for wrong in ({"flop_rate": 0.0}, {"bandwidth": -1.0}, {"latency": -1e-9}, {"read_rate": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            replace(MODEL, **wrong)
    with pytest.raises(ValueError, match="at least 1"):
        MODEL.seconds(N, N, N, 512, workers=0)
    with pytest.raises(ValueError, match="no room"):
        MODEL.choose_block(N, N, N, 50)
    with pytest.raises(TypeError, match="int32"):
        MODEL.memory(512, "int32")
    with pytest.raises(ValueError, match="at least 256"):
        ClusterModel.measured(object(), 64)
    for wrong in ([1.0], "cupy", dask.array.ones(4), np):
        with pytest.raises(TypeError, match="like is a"):
            ClusterModel.measured(object(), like=wrong)
    with pytest.raises(TypeError, match="True or False"):
        replace(MODEL, gpu=1)


def test_it_is_measured_on_a_cluster(monkeypatch):
    monkeypatch.setattr("abft_tsm2.interop.dask.cost._REPEATS", 2)
    settings = {"threads_per_worker": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(n_workers=2, **settings) as cluster, Client(cluster) as client, ft.monitor() as log:
        model = ClusterModel.measured(client, 256, "float32")
    assert len(log) == 0  # what is measured is no product of the user's
    assert all(getattr(model, field.name) >= 0 for field in fields(model))
    assert model.seconds(1024, 1024, 1024, 256, "float32", 2).total > 0
    with (
        LocalCluster(n_workers=1, **settings) as cluster,
        Client(cluster) as client,
        pytest.raises(ValueError, match="two"),
    ):
        ClusterModel.measured(client)


# ---- simulated -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protected", [True, False])
def test_one_simulated_worker_takes_the_sum_of_its_tasks(protected):
    model = replace(MODEL, scheduler=0.0)
    given = (8192, 16384, 4096, 2048)
    found = simulate(model, *given, protected=protected)
    assert found.seconds == pytest.approx(model.seconds(*given, protected=protected).total)
    assert found.seconds == pytest.approx(found.busy)
    assert (found.finished, found.products, found.received) == (8, 64, 0)


@pytest.mark.parametrize("workers", [2, 7, 16, 40])
def test_simulated_workers_are_between_their_share_and_all_of_it(workers):
    given = (16384, 8192, 16384, 2048)
    found, alone = (simulate(MODEL, *given, workers=count) for count in (workers, 1))
    assert found.busy / workers <= found.seconds <= alone.seconds
    assert found.seconds >= MODEL.seconds(*given).scheduling
    assert (found.finished, found.products, found.again) == (64, 256, 0)


def test_a_serial_scheduler_bounds_the_simulation():
    slow = replace(MODEL, scheduler=0.05)
    found = simulate(slow, 16384, 8192, 16384, 2048, workers=64)
    tasks = 256 + 64 + 2 * 8 * 4
    assert found.seconds >= tasks * 0.05 > simulate(MODEL, 16384, 8192, 16384, 2048, workers=64).seconds


def test_blocks_that_travel_are_about_those_that_are_expected():
    given = (32768, 8192, 32768, 2048)
    for workers in (4, 16, 64):
        found = simulate(MODEL, *given, workers=workers).received / workers
        assert found == pytest.approx(MODEL.blocks_received(*given, workers), rel=0.15)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("workers", [1, 8, 40])
def test_faults_lengthen_the_run_and_nothing_is_lost(workers, seed):
    given = (16384, 8192, 16384, 2048)
    clean = simulate(MODEL, *given, workers=workers, seed=seed)
    hazards = Hazards(rate=1.0, faulty=0.25, faulty_rate=30.0, lost=0.5, quarantine_after=4)
    found = simulate(MODEL, *given, workers=workers, seed=seed, hazards=hazards)
    assert found.seconds > clean.seconds
    assert found.faults > 0
    assert found.again > 0
    assert found.finished == clean.finished == 64
    assert found.products == clean.products + found.again
    assert found.retired < workers
    assert found.retired > 0 or workers == 1


def test_without_checks_no_fault_is_seen():
    given = (8192, 8192, 8192, 2048)
    assert simulate(MODEL, *given, workers=4, protected=False, hazards=Hazards(rate=1e3)).faults == 0


def test_rows_and_figure(tmp_path):
    pytest.importorskip("matplotlib")
    rows = list(dask_model.simulation((1, 4), (1024,)))
    assert [row["run"] for row in rows] == 2 * [dask_model.PLAIN, dask_model.PROTECTED, dask_model.FAULTY]
    source = tmp_path / "rows.csv"
    with dask_model.sheet.Sheet(source, list(rows[0])) as file:
        for row in rows:
            file.append(row)
    picture = tmp_path / "scaling.svg"
    dask_model.figures.finish(*dask_model.scaling(source), picture)
    assert picture.read_bytes().count(b"<path") > 20
