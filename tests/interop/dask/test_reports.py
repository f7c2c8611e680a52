"""Who is told of what tasks found: each computation counts, and none runs of which nobody would be told."""

import cloudpickle
import dask
import dask.array as da
import numpy as np
import pytest
from dask.delayed import delayed
from distributed import wait

from abft_tsm2 import Status, monitor
from abft_tsm2.errors import UnverifiableWarning
from abft_tsm2.interop.dask import protected_gemm

N = 20


def spoiled(stage, arrays):
    if stage == "multiplied":
        arrays["C"][0, 0] += 1


def product(**options):
    X = da.from_array(np.random.default_rng(0).standard_normal((N, N)), chunks=10)
    return protected_gemm(X, X, on_stage=spoiled, **options)


def test_each_computation_counts():
    C = product()
    with monitor() as log, dask.config.set(scheduler="threads"):
        for number in range(1, 4):
            C.compute()
            assert log.counts == {Status.CORRECTED: 4 * number}


def _sent_again(C):
    return cloudpickle.loads(cloudpickle.dumps(C))


@pytest.mark.parametrize("change", [lambda C: C, lambda C: dask.optimize(C)[0], _sent_again])
def test_each_computation_by_a_cluster_counts(client, change):
    C = change(product())
    with monitor() as log:
        for number in range(1, 4):
            kept = (C + number).persist()  # what is left of one computation is there in the next
            wait(kept)
            assert log.counts == {Status.CORRECTED: 4 * number}


def test_a_computation_that_another_process_has_made_is_told_to_the_one_that_sends_it(client):
    text = client.submit(_made_there).result()
    C = cloudpickle.loads(text)
    with monitor() as log:
        C.compute()
    assert log.counts == {Status.CORRECTED: 4}


def _made_there():
    return cloudpickle.dumps(product())


def test_a_client_warns_as_a_thread_does(client):
    nan = da.full((N, N), np.nan, chunks=10)
    with pytest.warns(UnverifiableWarning, match="follow from NaN or Inf in A"):
        protected_gemm(nan, nan, check="rows").compute()


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_a_task_may_compute_in_threads_of_its_own(client, scheduler):
    def compute():
        with monitor() as log:
            product().compute(scheduler=scheduler)
        return log.counts

    assert client.submit(compute, pure=False).result() == {Status.CORRECTED: 4}


def read_once(path):
    path.write_text("read")
    return np.ones((N, N))


@pytest.mark.parametrize("optimize_graph", [True, False])
def test_processes_that_tell_nobody_are_refused_before_anything_is_computed(tmp_path, optimize_graph):
    path = tmp_path / "read"
    X = da.from_delayed(delayed(read_once)(path), (N, N), float)
    for lazy in (protected_gemm(X, X), *protected_gemm(X, X, return_report=True), protected_gemm(X, X).sum()):
        with pytest.raises(ValueError, match=r'scheduler="processes" .*: compute with scheduler="threads"'):
            lazy.compute(scheduler="processes", num_workers=1, optimize_graph=optimize_graph)
        assert not path.exists()
