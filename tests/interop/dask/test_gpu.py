"""Products of Dask arrays of CuPy chunks: in one process, and by two workers that share a GPU."""

from concurrent.futures import ThreadPoolExecutor

import dask
import dask.array as da
import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2.interop.dask import ClusterModel, gemm, protected_lu_factor
from abft_tsm2.report import Status
from benchmarks.dask_planting import SINGLE, SQUARE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),  # of libraries on the workers
]


def operands(dtype="float32", n=512, chunks=128):
    import cupy

    x, y = (np.random.default_rng(seed).standard_normal((n, n)).astype(dtype) for seed in (1, 2))
    return (
        x,
        y,
        *(da.from_array(z, chunks=chunks).map_blocks(cupy.asarray, meta=cupy.empty((0, 0), dtype)) for z in (x, y)),
    )


def near(C, x, y):
    import cupy

    assert isinstance(C, cupy.ndarray)
    unit = float(np.finfo(C.dtype).eps) / 2
    exact = x.astype(np.float64) @ y.astype(np.float64)
    assert np.all(abs(C.get() - exact) <= 64 * unit * (abs(x.astype(np.float64)) @ abs(y)) + unit * abs(exact))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_clean(dtype):
    x, y, a, b = operands(dtype)
    with dask.config.set(scheduler="synchronous"), ft.monitor() as log:
        C, report = dask.compute(*ft.protected_gemm(a, b, return_report=True))
    assert C.dtype == np.dtype(dtype)
    near(C, x, y)
    assert report.status is Status.CLEAN
    assert len(report.products) == len(log) == 16
    assert all(one.device.startswith("GPU-") for one in report.products)


def test_added():
    x, y, a, b = operands("float64")
    with dask.config.set(scheduler="threads"):
        C = ft.protected_gemm(a, b, a, alpha=-1.0, beta=2.0).compute()
    assert np.all(abs(C.get() - (2 * x - x @ y)) <= 1e-11)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_batch(dtype):
    import cupy

    x, y = (np.random.default_rng(seed).standard_normal((4, 96, 96)).astype(dtype) for seed in (1, 2))
    a, b = (
        da.from_array(z, chunks=(2, 48, 48)).map_blocks(cupy.asarray, meta=cupy.empty((0,) * 3, dtype)) for z in (x, y)
    )
    with dask.config.set(scheduler="synchronous"):
        for one, other in ((a, b), (a, b[0])):
            C, report = dask.compute(*ft.protected_gemm(one, other, return_report=True))
            exact = x.astype(float) @ (y if other.ndim == 3 else y[0]).astype(float)
            assert np.all(abs(C.get() - exact) <= (1e-12 if dtype == "float64" else 0.1))
            assert report.status is Status.CLEAN


@pytest.mark.parametrize("task", ["right-up", "product", "left-below"])
def test_elements_that_change_places_in_rows_that_move(task):
    _, _, a, _ = operands("float64", 96, 32)
    done = []

    def swap(stage, arrays):
        if stage == "moved" and arrays["task"][0] == task and not done and arrays["X"].size:
            done.append(task)
            arrays["X"][0] = arrays["X"][0, ::-1].copy()

    with dask.config.set(scheduler="synchronous"):
        (lu, piv), _ = dask.compute(*protected_lu_factor(a, return_report=True, panel="one"))
        (found, rows), report = dask.compute(*protected_lu_factor(a, return_report=True, panel="one", on_stage=swap))
    assert done
    assert report.status is Status.CORRECTED
    assert np.array_equal(rows.get(), piv.get())
    np.testing.assert_allclose(found.get(), lu.get(), rtol=0, atol=1e-11)


def ray(stage, arrays):
    if stage == "multiplied":
        arrays["C"][3, 4] += 1000.0


def test_repaired():
    x, y, a, b = operands()
    with dask.config.set(scheduler="synchronous"):
        C, report = dask.compute(*ft.protected_gemm(a, b, on_stage=ray, return_report=True))
    near(C, x, y)
    assert {one.status for one in report.products} == {Status.CORRECTED}


@pytest.mark.parametrize("operand", ["A(1, 1)", "B(1, 2)", "C0"])
@pytest.mark.parametrize("pattern", [SINGLE, SQUARE])
def test_a_block_that_changed_between_two_tasks(monkeypatch, operand, pattern):
    import cupy

    x, y, a, b = operands()
    monkeypatch.setitem(gemm.LINKS, "cupy", 1)
    made = gemm.chain

    def chain(options, step, pairs, c0, settings):
        if step == (1, 2, 1):
            ((a, b),) = pairs
            block = {"A(1, 1)": a, "B(1, 2)": b, "C0": c0}[operand]
            bits = cupy.array(block.array, order="K")
            at = ([5], [6]) if pattern == SINGLE else ([5, 5, 6, 6], [7, 9, 7, 9])
            change = cupy.asarray([1 << 20, 1 << 18, 1 << 19, 1 << 17][: len(at[0])], dtype=cupy.uint32)
            bits.view(cupy.uint32)[at] ^= change
            block.array = bits
        return made(options, step, pairs, c0, settings)

    monkeypatch.setattr(gemm, "chain", chain)
    with dask.config.set(scheduler="synchronous"):
        C, report = ft.protected_gemm(a, b, return_report=True)
        if pattern == SQUARE:
            with pytest.raises(ft.SilentDataCorruptionError, match="no copy of it is as it was"):
                C.compute()
            return
        C, report = dask.compute(C, report)
    near(C, x, y)
    (fault,) = [fault for one in report.products for fault in one.faults]
    assert (fault.operand, fault.rows, fault.columns) == (operand, (5,), (6,))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_share_it(workers, tmp_path):
    from distributed import Client, LocalCluster

    from benchmarks import dask_planting as planting

    x, y, a, b = operands()
    with (
        dask.config.set({"temporary-directory": str(tmp_path)}),
        LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0", silence_logs=50
        ) as cluster,
        Client(cluster) as client,
    ):
        with ft.monitor() as log:
            C, report = dask.compute(*ft.protected_gemm(a, b, return_report=True))
        near(C, x, y)
        assert report.status is Status.CLEAN
        assert log.counts == {Status.CLEAN: 16}
        if workers == 2:
            model = ClusterModel.measured(client, 256, "float32", like=a._meta)
            assert model.gpu
            assert model.seconds(512, 512, 512, 128, "float32", 2).total > 0
            client.run(planting.on_arrival, SINGLE, 3, 5)
            C, report = dask.compute(*ft.protected_gemm(a, b, return_report=True, check="rows"))
            assert sum(client.run(planting.arrivals).values()) > 0
            near(C, x, y)
            assert report.status is Status.CORRECTED


def test_long_tasks_take_turns():
    """What another thread queues does not begin before: no update is lost, though none is waited for."""
    import cupy

    from abft_tsm2.interop.dask.streams import in_turn, stream_for

    x, work = cupy.zeros(1 << 20), cupy.ones((1024, 1024))

    def add():
        with stream_for(x), in_turn(x):
            before = x.copy()
            cupy.matmul(work, work)
            x[...] = before + 1

    with ThreadPoolExecutor(4) as threads:
        for task in [threads.submit(add) for _ in range(64)]:
            task.result()
    assert float(x.min()) == float(x.max()) == 64


def test_a_hook_may_compute_another_product():
    x, y, a, b = operands()
    inner = []

    def hook(stage, arrays):
        if stage == "multiplied" and not inner:
            inner.append(None)
            inner.append(ft.protected_gemm(b, a).compute(scheduler="synchronous"))

    with dask.config.set(scheduler="synchronous"):
        C = ft.protected_gemm(a, b, on_stage=hook).compute()
    near(C, x, y)
    near(inner[1], y, x)
