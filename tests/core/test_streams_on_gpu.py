"""The kernels for today's GPUs on one: the cases of the CPU tests, and what only a GPU can show. ``pytest -m gpu``."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2.core import split_k as plan
from abft_tsm2.core.device import device_of
from abft_tsm2.core.division import grid
from abft_tsm2.core.kernels import Stream, candidates, why_not
from tests.support.oracles import elements_outside
from tests.support.stream_kernel_cases import CONFIGS, STAGED, TENSOR, TYPES, Case, Operands, b_orders, cases, faults
from tests.support.stream_runs import on_gpu

pytestmark = pytest.mark.gpu

REPEATS = 10
ORDERS = ("C", "F")


@pytest.mark.parametrize("config", [*CONFIGS, *STAGED, *TENSOR], ids=lambda config: config.name)
def test_every_path(cp: Any, config: Stream) -> None:
    for case in cases(config):
        operands = Operands.of(case)
        memory, tickets = on_gpu(cp, operands)
        assert not faults(operands, memory, tickets, flushes=True), str(case)


@pytest.mark.parametrize("config", [*CONFIGS[::6], *STAGED[::4], *TENSOR[::3]], ids=lambda config: config.name)
def test_repeats_in_many_parts_are_equal_bit_for_bit(cp: Any, config: Stream) -> None:
    sizes, b_order = (6 * config.tile + 3, 60 * config.step + 1, config.t2), b_orders(config)[0]
    case = Case(config, *sizes, steps=1, b_order=b_order, batch=3, data="normal")
    operands = Operands.of(case)
    results = {on_gpu(cp, operands)[0].tobytes() for _ in range(REPEATS)}
    assert len(results) == 1
    memory = np.frombuffer(results.pop(), operands.c.memory.dtype)
    assert not faults(operands, memory, np.zeros(0), flushes=True)


# ---- the public functions -----------------------------------------------------------------------------------------


def operands_of(
    cp: Any, m: int, k: int, n: int, dtype: str = "float32", order: str = "C", extra: int = 0, shift: int = 0
) -> tuple[Any, Any]:
    """Normal numbers; lines of A are `extra` elements longer, its address is `shift` elements from a multiple of 16."""
    rng = np.random.default_rng([m, k, n])
    shape = (m, k + extra) if order == "C" else (k, m + extra)
    memory = cp.zeros(shape[0] * shape[1] + shift, dtype)[shift:].reshape(shape)
    a = memory[:, : shape[1] - extra]
    a[...] = cp.asarray(rng.standard_normal(a.shape).astype(dtype))
    return (a if order == "C" else a.T), cp.asarray(rng.standard_normal((k, n)).astype(dtype))


def outside(cp: Any, c: Any, a: Any, b: Any, before: Any = None, **factors: float) -> bool:
    """Whether C is none that sums in its own type, or in float32, can give."""
    host = [None if x is None else cp.asnumpy(x) for x in (c, a, b, before)]
    if host[0].dtype.itemsize > 2:
        host[1:3] = (x.astype(host[0].dtype) for x in host[1:3])
    return bool(elements_outside(*host, **factors).any())


def form_of(A: Any, B: Any, C: Any) -> str:
    """Which kernel the library has for these."""
    problem = plan.problem_of(A, B, C)
    return next(c.form for c in candidates(problem) if why_not(problem, c, device_of(A.device.id)) is None)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("extra_shift", [(0, 0), (3, 0), (8, 1), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "types", [("float32", "float32"), ("float64", "float64"), ("float16", "float32")], ids="-".join
)
def test_sizes_and_strides_of_every_kind(
    cp: Any, types: tuple[str, str], extra_shift: tuple[int, int], order: str
) -> None:
    for (m, k), n in product(((300, 701), (1003, 515), (77, 2000)), (1, 3, 4)):
        a, b = operands_of(cp, m, k, n, types[0], order, *extra_shift)
        c = ft.tsm2r(a, b, variant="auto", out=cp.full((m, n), cp.nan, types[1]))
        assert not outside(cp, c, a, b)
        out = cp.ones((m, n), types[1], order="F")
        assert ft.tall_skinny_matmul(a, b, out=out, alpha=-0.5, beta=2.0) is out
        assert not outside(cp, out, a, b, cp.ones_like(out), alpha=-0.5, beta=2.0)


@pytest.mark.parametrize("order", ORDERS)
def test_up_to_32_columns(cp: Any, order: str) -> None:
    for n in (2, 5, 7, 8, 12, 13, 16, 17, 31, 32, 33):
        a, b = operands_of(cp, 1000, 700, n, "float32", order)
        assert not outside(cp, ft.tall_skinny_matmul(a, b), a, b)


@pytest.mark.parametrize("order", ORDERS)
def test_wider_results_and_sums(cp: Any, order: str) -> None:
    a, b = operands_of(cp, 3000, 5000, 3, "float32", order)
    for c in (ft.tall_skinny_matmul(a, b, dtype="float64"), ft.tall_skinny_matmul(a, b.astype(cp.float64))):
        assert c.dtype == cp.float64
        assert not outside(cp, c, a, b)
    half = a.astype(cp.float16)
    for dtype in ("float16", "float32", "float64"):
        c = ft.tall_skinny_matmul(half, b.astype(cp.float16), dtype=dtype)
        assert c.dtype == dtype
        assert not outside(cp, c, half, b.astype(cp.float16))


@pytest.mark.parametrize("order", ORDERS)
def test_a_transpose_is_as_good_as_a_matrix(cp: Any, order: str) -> None:
    a, b = operands_of(cp, 2000, 3000, 4, "float32", order)
    right = cp.random.default_rng(0).random((2000, 4), dtype=cp.float32)
    c = cp.empty((3000, 4), cp.float32)
    assert form_of(a.T, right, c) != form_of(a, b, c[:2000])
    assert not outside(cp, ft.tsm2r(a.T, right), a.T, right)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("left", "right"), [((5,), ()), ((), (5,)), ((5,), (5,)), ((1,), (5,)), ((2, 3), ())])
def test_stacks(cp: Any, left: tuple[int, ...], right: tuple[int, ...], order: str) -> None:
    rng = cp.random.default_rng(0)
    a = rng.random((*left, 300, 200) if order == "C" else (*left, 200, 300), dtype=cp.float32)
    a = a if order == "C" else cp.swapaxes(a, -1, -2)
    b = rng.random((*right, 200, 3), dtype=cp.float32)
    c = ft.tall_skinny_matmul(a, b)
    out = cp.ones(c.shape, cp.float64)
    ft.tall_skinny_matmul(a, b, out=out, alpha=2.0, beta=-0.5)
    lefts, rights = (cp.broadcast_to(x, (*c.shape[:-2], *x.shape[-2:])) for x in (a, b))
    ones = cp.ones((300, 3))
    for at in np.ndindex(*c.shape[:-2]):
        assert not outside(cp, c[at], lefts[at], rights[at])
        assert not outside(cp, out[at], lefts[at], rights[at], ones, alpha=2.0, beta=-0.5)


@pytest.mark.parametrize("order", ORDERS)
def test_nan_in_out_is_not_read_and_stays_in_rows_and_columns(cp: Any, order: str) -> None:
    a, b = operands_of(cp, 700, 3001, 4, "float64", order)
    a[3, 3000], b[5, 2] = cp.nan, cp.inf
    c = ft.tall_skinny_matmul(a, b, out=cp.full((700, 4), cp.nan))
    assert int(cp.isfinite(c).sum()) == 699 * 3


@pytest.mark.parametrize("order", ORDERS)
def test_more_than_2_to_the_32_elements(cp: Any, order: str) -> None:
    m, k, n = (66_000, 65_300, 2)
    assert m * k > 2**32
    memory = cp.random.default_rng(0).random((m, k) if order == "C" else (k, m), dtype=cp.float32)
    A, B = memory if order == "C" else memory.T, cp.random.default_rng(1).random((k, n), dtype=cp.float32)
    C = ft.tsm2r(A, B, variant="auto", out=cp.full((m, n), cp.nan, cp.float32))
    weights = B.sum(axis=1, dtype=cp.float64)
    for at in range(0, m, 16_384):  # row sums of the products, against the product with the sum of the columns
        block = A[at : at + 16_384].astype(cp.float64)
        error = abs(C[at : at + 16_384].sum(axis=1, dtype=cp.float64) - block @ weights)
        assert bool((error <= k * 2.0**-24 * (abs(block) @ weights)).all())
    rows = np.array([0, 1, m // 2, m - 129, m - 2, m - 1])
    part = cp.asnumpy(cp.ascontiguousarray(A[rows]))
    assert not elements_outside(cp.asnumpy(C)[rows], part, cp.asnumpy(B)).any()


# ---- streams, graphs, threads, devices ----------------------------------------------------------------------------


def in_parts(cp: Any, order: str = "C", n: int = 4) -> tuple[Any, Any, Any]:
    """A product whose k is divided, and what it gives."""
    a, b = operands_of(cp, 500, 60_000, n, "float32", order)
    c = cp.empty((500, n), cp.float32)
    problem = plan.problem_of(a, b, c)
    assert grid(problem, next(iter(candidates(problem))), device_of(a.device.id)).parts > 4
    return a, b, ft.tsm2r(a, b, out=c)


@pytest.mark.parametrize("order", ORDERS)
def test_repeats_are_equal_bit_for_bit(cp: Any, order: str) -> None:
    a, b, expected = in_parts(cp, order)
    assert {cp.asnumpy(ft.tall_skinny_matmul(a, b, out=cp.empty_like(expected))).tobytes() for _ in range(REPEATS)} == {
        cp.asnumpy(ft.tall_skinny_matmul(a, b)).tobytes()
    }
    assert {cp.asnumpy(ft.tsm2r(a, b)).tobytes() for _ in range(REPEATS)} == {cp.asnumpy(expected).tobytes()}


def test_kernels_run_on_the_callers_stream(cp: Any) -> None:
    a, b, expected = in_parts(cp)
    text = 'extern "C" __global__ void wait(long long n) { long long t = clock64(); while (clock64() - t < n); }'
    slow, late = cp.RawKernel(text, "wait"), cp.zeros_like(a)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        ft.tsm2r(late, b)  # workspace of this stream
        slow((1,), (1,), (np.int64(200_000_000),))
        late[...] = a
        c = ft.tsm2r(late, b)
        done = stream.record()
    assert not done.done  # it was queued, and the host did not wait
    stream.synchronize()
    assert bool((c == expected).all())


def test_calls_can_be_captured_in_a_graph_and_replayed(cp: Any) -> None:
    a, b, expected = in_parts(cp)
    c, d = cp.zeros_like(expected), cp.zeros_like(expected)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        ft.tsm2r(a, b, out=c)
        ft.tsm2r(a, b, out=d)
        graph = stream.end_capture()
        for _ in range(3):
            c.fill(0)
            graph.launch(stream)
            ft.tsm2r(a, b)  # beside the graph, in the stream's own workspace
            stream.synchronize()
            assert bool((c == expected).all())
            assert bool((d == expected).all())


def test_threads_on_streams_of_their_own_do_not_meet(cp: Any) -> None:
    plans = [in_parts(cp, order, n) for order, n in product(ORDERS, (2, 4))]
    cp.cuda.Device().synchronize()
    wrong: list[bool] = []

    def work(a: Any, b: Any, expected: Any) -> None:
        with cp.cuda.Stream(non_blocking=True) as stream:
            results = [ft.tsm2r(a, b) for _ in range(20)]
            stream.synchronize()
            wrong.extend(not bool((c == expected).all()) for c in results)

    threads = [threading.Thread(target=work, args=plan) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [False] * 80


def test_the_operands_own_device_does_the_work(cp: Any) -> None:
    last = cp.cuda.runtime.getDeviceCount() - 1  # with one GPU it is the current one
    made = []
    for index in {0, last}:
        with cp.cuda.Device(index):
            made.append(in_parts(cp))
    with cp.cuda.Device(0):
        for a, b, expected in made:
            for c in (ft.tsm2r(a, b), ft.tall_skinny_matmul(a, b)):
                assert c.device == a.device
            assert cp.asnumpy(ft.tsm2r(a, b)).tobytes() == cp.asnumpy(expected).tobytes()
        assert cp.cuda.runtime.getDevice() == 0
    assert len({cp.asnumpy(expected).tobytes() for _, _, expected in made}) == 1


def test_bfloat16_has_kernels_too(cp: Any) -> None:
    if "bfloat16" not in TYPES:
        pytest.skip("bfloat16 needs ml_dtypes")
    rng = np.random.default_rng(0)
    host = [rng.standard_normal(shape).astype(TYPES["bfloat16"]) for shape in ((400, 3000), (3000, 3))]
    try:
        a, b = (cp.asarray(x) for x in host)
    except (TypeError, ValueError):
        pytest.skip("this CuPy has no bfloat16")
    for dtype in ("float32", "float64"):
        c = cp.asnumpy(ft.tall_skinny_matmul(a, b, dtype=dtype))
        assert not elements_outside(c, *(x.astype(dtype) for x in host)).any()
