"""A cluster of two processes for the tests that need one, and faults that are planted in its workers."""

import dask
import pytest
from distributed import Client, LocalCluster

from tests.support.dask_factors import CALLS


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Two workers of one thread, each with a name for its device, as if it had one of its own."""
    where = tmp_path_factory.mktemp("cluster")
    settings = {"distributed.worker.memory.pause": False, "distributed.worker.memory.terminate": False}
    with (
        dask.config.set({**settings, "temporary-directory": str(where)}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0", silence_logs=50) as cluster,
        Client(cluster, set_as_default=True) as client,
    ):
        yield client


@pytest.fixture(scope="session")
def right():
    """What each call gives without a fault, and its report."""
    with dask.config.set(scheduler="synchronous"):
        return {name: dask.compute(*call(return_report=True)) for name, call in CALLS.items()}
