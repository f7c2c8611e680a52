"""The kernels on a GPU: the cases of the CPU tests, and what only a GPU can show. ``pytest -m gpu``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2.core import choose, compiler
from abft_tsm2.core.compiler import kernel, precompile
from abft_tsm2.core.device import query
from abft_tsm2.core.kernels import why_not
from abft_tsm2.core.paper import profile
from abft_tsm2.core.paper.config import TSM2R, VARIANTS, Config, launch, published
from abft_tsm2.core.problem import Problem
from tests.support.compute_sanitizer import PLANTS
from tests.support.kernel_cases import CONFIGS, DTYPES, Case, Operands, cases, faults
from tests.support.oracles import elements_outside

pytestmark = pytest.mark.gpu

REPEATS = 10


def run(cp: Any, operands: Operands) -> np.ndarray:
    """The buffer of C after the kernel has run on a copy of it."""
    case = operands.case
    a, b, c = (cp.asarray(placed.memory) for placed in (operands.a, operands.b, operands.c))
    shape = launch(case.problem, case.config)
    if case.m and case.n:
        views = (operands.a.matrix(a), operands.b.matrix(b), operands.c.matrix(c))
        args = (np.int64(x) if isinstance(x, int) else x for x in operands.arguments(*views))
        kernel(case.config)((shape.grid,), (shape.block,), tuple(args))
    return cp.asnumpy(c)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_variant(cp: Any, config: Config) -> None:
    for case in cases(config):
        operands = Operands.of(case)
        assert not faults(operands, run(cp, operands), flushes=True), str(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_repeats_are_equal_bit_for_bit(cp: Any, variant: str, dtype: str) -> None:
    config = published(Problem(5000, 3000, 16, dtype), variant)
    operands = Operands.of(Case(config, 5000, 3000, 19, lda_extra=3, data="normal"))
    results = {run(cp, operands).tobytes() for _ in range(REPEATS)}
    assert len(results) == 1
    assert not faults(operands, np.frombuffer(results.pop(), dtype), flushes=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_than_2_to_the_32_elements(cp: Any, variant: str) -> None:
    m, k, n = 66_000, 65_300, 2
    assert m * k > 2**32
    A = cp.empty((k, m), cp.float32).T
    cp.random.default_rng(0).random(out=A.T, dtype=cp.float32)
    B = cp.random.default_rng(1).random((k, n), dtype=cp.float32)
    C = cp.full((m, n), cp.nan, cp.float32)
    (ft.tsm2r if variant in TSM2R else ft.tsm2l)(A, B, variant=variant, out=C)
    rows = np.array([0, 1, m // 2, m - 129, m - 2, m - 1])
    part = cp.asnumpy(cp.ascontiguousarray(A[rows]))
    assert not elements_outside(cp.asnumpy(C)[rows], part, cp.asnumpy(B)).any()
    # Every row: row sums of the products, in float64, against the product with the sum of the columns of B.
    weights = B.sum(axis=1, dtype=cp.float64)
    for at in range(0, m, 8192):
        block = A[at : at + 8192].astype(cp.float64)
        error = abs(C[at : at + 8192].sum(axis=1, dtype=cp.float64) - block @ weights)
        assert bool((error <= k * 2.0**-24 * (abs(block) @ weights)).all())


# ---- the public functions -----------------------------------------------------------------------------------------


def operands_of(cp: Any, m: int, k: int, n: int, dtype: str = "float64") -> tuple[Any, Any]:
    rng = np.random.default_rng([m, k, n])
    a, b = (cp.asarray(rng.standard_normal(shape).astype(dtype)) for shape in ((m, k), (k, n)))
    return cp.asfortranarray(a), b


def outside(cp: Any, c: Any, a: Any, b: Any, before: Any = None, **factors: float) -> bool:
    host = [None if x is None else cp.asnumpy(x) for x in (c, a, b, before)]
    return bool(elements_outside(*host, **factors).any())


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_row_major_unless_out_says_otherwise(cp: Any, variant: str) -> None:
    product = ft.tsm2r if variant in TSM2R else ft.tsm2l
    a, b = operands_of(cp, 300, 200, 5)
    c = product(a, b, variant=variant)
    assert isinstance(c, cp.ndarray)
    assert c.flags.c_contiguous
    assert not outside(cp, c, a, b)
    out = cp.asfortranarray(cp.ones_like(c))
    assert product(a, b, variant=variant, out=out, alpha=-0.5, beta=2.0) is out
    assert not outside(cp, out, a, b, cp.ones_like(c), alpha=-0.5, beta=2.0)
    view = a[7:107, 3:50]  # a leading dimension larger than m
    assert not outside(cp, product(view, b[3:50], variant=variant), view, b[3:50])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("shape", [(5000, 8, 8), (3000, 2000, 3), (300, 300, 300), (7, 9, 2), (0, 3, 2), (3, 0, 2)])
def test_dispatch_serves_every_shape_order_and_type(
    cp: Any, shape: tuple[int, int, int], dtype: str, order: str
) -> None:
    a, b = operands_of(cp, *shape, dtype)
    a = cp.asarray(a, order=order)
    c = ft.tall_skinny_matmul(a, b)
    assert c.dtype == dtype
    assert c.flags.c_contiguous
    assert not outside(cp, c, a, b)
    out = cp.full(c.shape, cp.nan, dtype, order="F")
    assert ft.tall_skinny_matmul(a, b, out=out, alpha=2.0) is out
    assert not outside(cp, out, a, b, alpha=2.0)


def test_what_a_kernel_cannot_serve_is_refused_with_the_reason(cp: Any) -> None:
    a, b = operands_of(cp, 300, 200, 5)
    refused = (
        (cp.ascontiguousarray(a), b, "A is not column-major: V3 reads it column by column"),
        (a.astype(cp.float32), b, "the kernel multiplies float32, the operands are float32 and float64"),
        (a.astype(cp.float16), b.astype(cp.float16), "V3 multiplies float32 and float64, not float16"),
    )
    for x, y, reason in refused:
        with pytest.raises(ft.NotSuitable, match=reason):
            ft.tsm2r(x, y, variant="V3")
    with pytest.raises(ft.NotSuitable, match="t3 = 5"):
        ft.tsm2r(a, b, config=Config("V3", "float64", 128, 16, 5))
    with pytest.raises(TypeError, match=r"cupy.asarray"):
        ft.tsm2r(a, cp.asnumpy(b))
    with pytest.raises(ValueError, match="out shares memory"):
        ft.tsm2r(a, b, out=a[:, :5])


def test_the_operands_own_device_does_the_work(cp: Any) -> None:
    last = cp.cuda.runtime.getDeviceCount() - 1  # with one GPU it is the current one
    with cp.cuda.Device(last):
        a, b = operands_of(cp, 700, 300, 3)
    with cp.cuda.Device(0):
        products = (ft.tsm2r(a, b, variant="V3"), ft.tall_skinny_matmul(a, b))
        for c in (*products, ft.tsm2l(a[:, :8], b[:8], variant="Opt-1")):
            assert c.device.id == last
        assert cp.cuda.runtime.getDevice() == 0
        assert not outside(cp, ft.tsm2r(a, b, variant="V3"), a, b)
        if last:
            with pytest.raises(ValueError, match=r"A lies on .*1.*, B on .*0.*: move one of them"):
                ft.tsm2r(a, cp.asarray(cp.asnumpy(b)), variant="V3")


def test_a_kernel_that_does_not_compile_says_where(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = compiler.source(Config("V3", "float32", 64, 2, 4)).replace("store_tile(currB, nextB);", "store_tile();", 1)
    monkeypatch.setattr(compiler, "source", lambda config: broken)
    monkeypatch.setattr(compiler, "_kernels", {})
    with pytest.raises(ft.KernelCompileError, match=r"(?s)t1=64, t2=2, t3=4.*prefetch\.cuh\(\d+\): error"):
        kernel(Config("V3", "float32", 64, 2, 4))


def test_a_cache_that_cannot_be_written_is_done_without(cp: Any) -> None:
    program = (  # no kernel of CuPy's own: those need a cache
        "import cupy, numpy, abft_tsm2 as ft; A, B = (cupy.asarray(numpy.ones(shape)) for shape in ((5, 1), (1, 2)));"
        "print(cupy.asnumpy(ft.tsm2r(A, B, variant='V3')).sum())"
    )
    nowhere = {**os.environ, "CUPY_CACHE_DIR": "/proc/self/fdinfo", "CUPY_CACHE_IN_MEMORY": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=nowhere, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["10.0"], done.stderr


def test_kernels_run_on_the_callers_stream(cp: Any) -> None:
    a, b = operands_of(cp, 4000, 3000, 4)
    expected = ft.tsm2r(a, b, variant="V3")
    text = 'extern "C" __global__ void wait(long long n) { long long t = clock64(); while (clock64() - t < n); }'
    slow = cp.RawKernel(text, "wait")
    stream = cp.cuda.Stream(non_blocking=True)
    late = cp.zeros_like(a)
    cp.cuda.Device().synchronize()
    with stream:
        slow((1,), (1,), (np.int64(200_000_000),))
        late[...] = a
        c = ft.tsm2r(late, b, variant="V3")
        done = stream.record()
    assert not done.done  # it was queued, and the host did not wait
    stream.synchronize()
    assert bool((c == expected).all())


def test_calls_can_be_captured_in_a_graph(cp: Any) -> None:
    a, b = operands_of(cp, 3000, 500, 4)
    c, expected = cp.zeros((3000, 4)), ft.tsm2r(a, b, variant="V3")
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        ft.tsm2r(a, b, variant="V3", out=c)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert bool((c == expected).all())


def test_threads_share_the_kernels(cp: Any) -> None:
    a, b = operands_of(cp, 2000, 300, 3)
    expected = ft.tsm2r(a, b, variant="V2")
    cp.cuda.Device().synchronize()
    wrong: list[bool] = []

    def work() -> None:
        with cp.cuda.Stream(non_blocking=True) as stream:
            wrong.extend(not bool((ft.tsm2r(a, b, variant="V2") == expected).all()) for _ in range(20))
            stream.synchronize()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 80


def test_the_library_decides_as_documented(cp: Any) -> None:
    device = query()
    assert precompile(published(Problem(1000, 1000, 4, "float64"), variant) for variant in TSM2R) == len(TSM2R)
    times = profile.profile_t1(Problem(20000, 2000, 8, "float64"), repeats=3)
    assert set(times) <= {64, 128, 256}
    assert list(times.values()) == sorted(times.values())
    times = profile.profile_tcf(Problem(100_000, 16, 16, "float32"), repeats=3)
    assert len(times) > 3
    problem = Problem(20000, 20000, 2, "float32", "C")
    choice = choose.choose(problem, device)
    assert choice.source in ("measured", "table", "model")
    assert all(why_not(problem, config, device) is None for config in choice.configs)


# ---- compute-sanitizer --------------------------------------------------------------------------------------------


def sanitize(
    tool: str, *arguments: str, module: str = "compute_sanitizer", options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not on the PATH")
    command = [program, "--tool", tool, "--error-exitcode", "9", *options, sys.executable, "-m"]
    run = [*command, f"tests.support.{module}", *arguments]
    return subprocess.run(run, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(cp: Any, tool: str) -> None:
    done = sanitize(tool)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "launches" in done.stdout


@pytest.mark.parametrize(
    ("tool", "plant"),
    [("racecheck", "no-barrier"), *(("memcheck", plant) for plant in PLANTS if plant != "no-barrier")],
)
def test_compute_sanitizer_finds_what_is_planted(cp: Any, tool: str, plant: str) -> None:
    assert plant in PLANTS
    done = sanitize(tool, "--plant", plant)
    assert done.returncode == 9, done.stdout + done.stderr
