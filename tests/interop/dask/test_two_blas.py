"""Workers whose BLAS rounds otherwise: what one has summed is no evidence against an operand at another one."""

import contextlib
import os

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

import abft_tsm2 as ft
from abft_tsm2.interop.dask import graphs
from abft_tsm2.report import Status
from benchmarks import dask_planting as planting

NORMAL = np.random.default_rng(0).standard_normal((96, 96))
CONSTANT = np.outer(np.arange(1, 97), np.ones(96)) / 7  # of which clean products raise suspicions


def spoiled(stage, arrays):
    if stage == "multiplied":
        arrays["C"][0, 0] += 1 + abs(arrays["C"][0, 0])


def operands(x, dtype):
    return [da.from_array(x.astype(dtype), chunks=32) for _ in "ab"]


def summed_elsewhere(R, arithmetic):
    """What another BLAS makes of the same matrix: other last bits."""
    here = carried_by(R, arithmetic)
    sums, squares = (np.nextafter(x, np.inf * (-1) ** np.arange(len(x))[:, None]) for x in (here.sums, here.squares))
    sums, squares = sums.astype(here.sums.dtype), squares.astype(here.squares.dtype)
    return here._replace(sums=sums, squares=squares, guard=(here.guard[0], sums.copy(), squares.copy()))


carried_by = graphs.carried_by


@pytest.mark.parametrize("x", [NORMAL, CONSTANT])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_a_fault_in_a_product_is_not_said_of_its_operands(monkeypatch, x, dtype):
    monkeypatch.setattr(graphs, "carried_by", summed_elsewhere)
    with dask.config.set(scheduler="synchronous"):
        _, report = dask.compute(*ft.protected_gemm(*operands(x, dtype), return_report=True))
        assert report.status is Status.CLEAN
        for on_error, status in ((None, Status.CORRECTED), ("detect", Status.UNCORRECTABLE)):
            lazy = ft.protected_gemm(*operands(x, dtype), on_stage=spoiled, on_error=on_error, return_report=True)
            _, report = dask.compute(*lazy)
            assert (report.status, report.also) == (status, ())
            assert {fault.operand for one in report.products for fault in one.faults} == {"C"}


@pytest.fixture(scope="module")
def two_cores():
    """A worker with the kernels that OpenBLAS has for each x86-64, and one with those for this processor."""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENBLAS_CORETYPE", "Nehalem")
        settings = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
        cluster = stack.enter_context(LocalCluster(**settings, silence_logs=50))
        client = stack.enter_context(Client(cluster))
        client.wait_for_workers(1)
        os.environ.pop("OPENBLAS_CORETYPE", None)
        cluster.scale(2)
        client.wait_for_workers(2)
        yield client


@pytest.mark.full
@pytest.mark.parametrize("x", [NORMAL, CONSTANT])
def test_workers_of_two_kinds(two_cores, x):
    for kind in ("float64", "float32"):
        _, report = dask.compute(*ft.protected_gemm(*operands(x, kind), return_report=True))
        assert report.status is Status.CLEAN
        _, report = dask.compute(*ft.protected_gemm(*operands(x, kind), on_stage=spoiled, return_report=True))
        assert (report.status, report.also) == (Status.CORRECTED, ())
        assert {fault.operand for one in report.products for fault in one.faults} == {"C"}
    _, report = dask.compute(*ft.protected_lu_factor(operands(NORMAL, "float64")[0], return_report=True))
    assert report.status is Status.CLEAN


@pytest.mark.full
@pytest.mark.parametrize("pattern", [planting.SINGLE, planting.SQUARE])
def test_blocks_that_change_on_the_wire_between_workers_of_two_kinds(two_cores, pattern):
    two_cores.run(planting.on_arrival, pattern, 3, 4)
    try:
        _, report = dask.compute(*ft.protected_gemm(*operands(NORMAL, "float64"), return_report=True))
    finally:
        planted = sum(two_cores.run(planting.arrivals).values())
    assert planted > 0
    assert report.status is Status.CORRECTED
    assert all(fault.repair for one in report.products for fault in one.faults)
