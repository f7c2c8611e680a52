"""What every test runs under: BLAS threads, no measured choices, Hypothesis' settings, compiled kernels kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:
    # One process a core already: more BLAS threads only wait for one another. Read by NumPy's first import.
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

# What was measured on this machine decides nothing here.
os.environ["ABFT_TSM2_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), "abft_tsm2-tests-measure-nothing")

import pytest
from hypothesis import settings

# The same examples on every machine, and no deadline: a slow machine is not a fault.
# A longer, random search: make test ARGS="--hypothesis-profile=search"
settings.register_profile("default", derandomize=True, deadline=None, database=None)
settings.register_profile("search", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile("default")


def pytest_report_header() -> str:
    """Which kernels of a BLAS were loaded (OPENBLAS_CORETYPE chooses others): what is rounded, and how, is theirs."""
    import numpy
    from threadpoolctl import threadpool_info

    loaded = (f"{one['internal_api']} {one['version']} {one.get('architecture', '')}" for one in threadpool_info())
    return f"NumPy {numpy.__version__}, {', '.join(loaded) or 'a BLAS that does not say what it is'}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-gpu", action="store_true", help="run tests of products on a GPU: see tests/support/on_gpu.py"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--on-gpu"):
        from tests.support.on_gpu import CPU_ALONE

        for item in items:
            why = CPU_ALONE.get(item.name.partition("[")[0])
            if why is not None:
                item.add_marker(pytest.mark.skip(reason=f"of the CPU: {why}"))


@pytest.fixture(autouse=True)
def _on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.config.getoption("--on-gpu"):
        from tests.support import on_gpu, planting

        for module in (request.module, planting):
            on_gpu.put_in(module, monkeypatch)


@pytest.fixture(scope="session")
def build_cache(request: pytest.FixtureRequest) -> Path:
    """Where compiled kernels are kept, from one run to the next."""
    return Path(request.config.cache.mkdir("cuda_on_cpu"))


@pytest.fixture(params=["in turn", pytest.param("every order", marks=pytest.mark.full)])
def orders(request: pytest.FixtureRequest) -> Callable[[int], tuple[str, ...]]:
    """Orders of the threads that a case of this number runs in on the CPU: the first one's in all of them, so that the
    results can be compared, the others' in one in turn; in the full run in all."""
    from tests.support.cuda_on_cpu import ORDERS

    return lambda number: ORDERS if number == 0 or request.param == "every order" else (ORDERS[number % len(ORDERS)],)


@pytest.fixture(scope="session")
def compiled(build_cache: Path) -> Any:
    """`benchmarks.registers.compiled`, which compiles a text once: for an architecture, by a version of NVRTC."""
    from tests.support.cubins import Cubins

    return Cubins(build_cache)


@pytest.fixture
def cp() -> Iterator[Any]:
    """CuPy. What its pool has kept goes back to the card afterwards, for tests that run beside this one."""
    cupy = pytest.importorskip("cupy")
    yield cupy
    cupy.get_default_memory_pool().free_all_blocks()
