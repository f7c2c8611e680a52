"""Products in CUDA graphs on a GPU: captured by CuPy and by PyTorch, replayed side by side, dropped; and calls that
become graphs by themselves. ``pytest -m gpu``; without a GPU tests/gemm/test_graphs_on_cpu.py and
test_captures_on_cpu.py have the verdicts."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status
from abft_tsm2.core import capture
from abft_tsm2.gemm import known, replays
from benchmarks import replays as benchmark
from tests.support.cases import DTYPES
from tests.support.oracles import Exact

pytestmark = pytest.mark.gpu

NAMES = [dtype.name for dtype in DTYPES]
TYPES = dict(zip(NAMES, DTYPES, strict=True))


def normal(cp: Any, *shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return cp.asarray(x.astype(TYPES[dtype]))


def operands(cp: Any, m: int, k: int, n: int, seed: int = 0) -> tuple[Any, Any, Any]:
    return normal(cp, m, k, seed=seed), normal(cp, k, n, seed=100 + seed), cp.zeros((m, n), "f")


def wrong(cp: Any, a: Any, b: Any, c: Any) -> bool:
    return bool(Exact.of(cp.asnumpy(a), cp.asnumpy(b), None).outside(cp.asnumpy(c)).any())


@pytest.fixture(autouse=True)
def _one_call_before(request: pytest.FixtureRequest) -> None:
    cp = request.getfixturevalue("cp")
    ft.protected_gemm(*operands(cp, 5, 6, 7)[:2])


def captured(cp: Any, *calls: Callable[[], Any], stream: Any = None) -> tuple[Any, Any, list[Any]]:
    stream = stream or cp.cuda.Stream(non_blocking=True)
    with stream, ft.errstate(sync=False):
        stream.begin_capture()
        try:
            found = [call() for call in calls]
        finally:
            graph = stream.end_capture()
    return graph, stream, found


@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (64, 48, 32), (130, 257, 70), (1024, 512, 768)], ids=str)
def test_replays_give_the_same_bits_as_calls(cp: Any, shape: tuple[int, int, int], dtype: str, check: str) -> None:
    m, k, n = shape
    A, B = normal(cp, m, k, dtype=dtype), normal(cp, k, n, dtype=dtype, seed=1)
    C = cp.zeros((m, n), A.dtype)
    graph, stream, ((result, report),) = captured(
        cp, lambda: ft.protected_gemm(A, B, out=C, check=check, return_report=True)
    )
    assert result is C
    for i in range(3):
        A[...] = normal(cp, m, k, dtype=dtype, seed=i)
        cp.cuda.Device().synchronize()
        graph.launch(stream)
        final = report.wait()
        assert final.status is Status.CLEAN
        assert final.replays == i + 1
        assert cp.asnumpy(C).tobytes() == cp.asnumpy(ft.protected_gemm(A, B, check=check)).tobytes()
        assert not wrong(cp, A, B, C)


@pytest.mark.parametrize("how", ["alpha and beta", "stack", "encoded", "float32", "tf32", "new result"])
def test_options_are_captured(cp: Any, how: str) -> None:
    dtype, batch = ("float16" if how == "float32" else "float32"), ((5,) if how == "stack" else ())
    A, B = normal(cp, *batch, 100, 80, dtype=dtype), normal(cp, *batch, 80, 120, dtype=dtype, seed=1)
    C = cp.zeros((*batch, 100, 120), A.dtype)
    given: dict[str, Any] = {"out": C, "return_report": True}
    right: Any = B
    if how == "alpha and beta":
        given |= {"alpha": 0.5, "beta": 2.0, "c": normal(cp, 100, 120, seed=2)}
    elif how == "encoded":
        right = ft.encode(B)
    elif how == "float32":
        given["verify"] = "float32"
    elif how == "tf32":
        given["precision"] = "tf32"
    elif how == "new result":
        del given["out"]
    graph, stream, ((C, report),) = captured(cp, lambda: ft.protected_gemm(A, right, **given))
    for _ in range(4):
        graph.launch(stream)
    final = report.wait()
    assert final.status is Status.CLEAN
    assert final.replays == 4
    expected = ft.protected_gemm(A, right, **(given | {"out": None, "return_report": False}))
    assert cp.asnumpy(C).tobytes() == cp.asnumpy(expected).tobytes()


def test_the_first_call_of_a_kind_may_be_captured(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are loaded and plans are made meanwhile."""
    from abft_tsm2.core import cublas
    from abft_tsm2.gemm import plan

    plan._plans.clear()
    known._known.clear()
    A, B = normal(cp, 77, 91), normal(cp, 91, 83, seed=1)
    graph, stream, ((C, report),) = captured(cp, lambda: ft.protected_gemm(A, B, check="columns", return_report=True))
    graph.launch(stream)
    assert report.wait().status is Status.CLEAN
    assert not wrong(cp, A, B, C)
    monkeypatch.setattr(cublas, "_own", {})
    with pytest.raises(RuntimeError, match="call protected_gemm once on this device"):
        captured(cp, lambda: ft.protected_gemm(A, B))


@pytest.mark.parametrize(
    "cell", [benchmark.Cell("float32", 200, 400, True), benchmark.Cell("bfloat16", 96, 400)], ids=str
)
def test_faults_in_replays_are_repaired_and_counted(cp: Any, cell: benchmark.Cell) -> None:
    row = benchmark.Replayed(cell, cp.cuda.Stream(non_blocking=True)).row()
    assert benchmark.held(row), row
    assert (row["planted"] > 20) is cell.faults


def test_the_benchmark_sees_what_is_not_repaired(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = benchmark.Cell("float32", 64, 300, True)
    replayed = benchmark.Replayed(cell, cp.cuda.Stream(non_blocking=True))
    monkeypatch.setattr(benchmark.Replayed, "_planted", lambda self, C: benchmark._nothing())
    unprotected = benchmark.Replayed(cell, cp.cuda.Stream(non_blocking=True))
    with unprotected.stream:  # a fault behind the check
        unprotected._run("plant", unprotected._arrays[2], 1, unprotected.counts, np.uint64(1), np.uint64(0x49742400))
        unprotected._run(
            *("compare", unprotected._arrays[2], unprotected._arrays[3], 64 * 64, unprotected.counts, np.float64(1)),
            blocks=264,
        )
    assert benchmark.held(replayed.row())
    assert not benchmark.held(unprotected.row())


def test_graphs_are_replayed_side_by_side(cp: Any) -> None:
    cells = [
        (normal(cp, 600, 500, seed=i), normal(cp, 500, 700, seed=10 + i), cp.zeros((600, 700), "f")) for i in range(4)
    ]
    made = [
        captured(cp, lambda A=A, B=B, C=C: ft.protected_gemm(A, B, out=C, return_report=True)[1]) for A, B, C in cells
    ]
    for _ in range(200):
        for graph, stream, _ in made:
            graph.launch(stream)
    for (_, _, (report,)), (A, B, C) in zip(made, cells, strict=True):
        final = report.wait()
        assert (final.status, final.replays) == (Status.CLEAN, 200)
        assert cp.asnumpy(C).tobytes() == cp.asnumpy(ft.protected_gemm(A, B)).tobytes()


def test_a_stack_of_products_is_captured_as_one_graph(cp: Any) -> None:
    given = [(normal(cp, 64, 64, seed=i), normal(cp, 64, 64, seed=100 + i)) for i in range(100)]
    outs = [cp.zeros((64, 64), "f") for _ in given]
    calls = [
        lambda A=A, B=B, C=C: ft.protected_gemm(A, B, out=C, return_report=True)[1]
        for (A, B), C in zip(given, outs, strict=True)
    ]
    with ft.monitor() as log:
        graph, stream, reports = captured(cp, *calls)
        for _ in range(5):
            graph.launch(stream)
    assert log.counts[Status.CLEAN] == len(log) == 100
    assert {report.wait().replays for report in reports} == {5}
    for (A, B), C in zip(given, outs, strict=True):
        assert not wrong(cp, A, B, C)


def test_a_graph_that_is_dropped_frees_its_memory(cp: Any) -> None:
    A, B, C = normal(cp, 300, 200), normal(cp, 200, 400, seed=1), cp.zeros((300, 400), "f")
    pool = cp.get_default_memory_pool()
    captured(cp, lambda: ft.protected_gemm(A, B, out=C))
    gc.collect()
    cp.cuda.Device().synchronize()
    capture.release()
    before, kept = pool.used_bytes(), len(capture._kept)
    graph, stream, (report,) = captured(cp, lambda: ft.protected_gemm(A, B, out=C, return_report=True)[1])
    assert pool.used_bytes() > before + (32 << 20)
    graph.launch(stream)
    assert report.wait().replays == 1
    del graph
    gc.collect()
    cp.cuda.Device().synchronize()
    for _ in range(100):
        capture.release()
        if len(capture._kept) <= kept:
            break
        threading.Event().wait(0.01)
    assert report.wait().replays == 1  # it is remembered
    del report
    assert pool.used_bytes() <= before
    assert len(capture._kept) <= kept


def test_a_capture_that_fails_leaves_nothing(cp: Any) -> None:
    A, B, C = normal(cp, 300, 200), normal(cp, 200, 400, seed=1), cp.zeros((300, 400), "f")
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="sync=False"):
            ft.protected_gemm(A, B, out=C)
        with ft.errstate(sync=False), pytest.raises(ValueError, match="contiguous"):
            ft.protected_gemm(A[::2, ::2], B[::2], out=C[:150])
        stream.end_capture()
    assert ft.protected_gemm(A, B, out=C, return_report=True)[1].status is Status.CLEAN


def test_a_report_may_be_waited_for_while_it_is_captured(cp: Any) -> None:
    A, B, C = normal(cp, 300, 200), normal(cp, 200, 400, seed=1), cp.zeros((300, 400), "f")
    _graph, _, (other,) = captured(cp, lambda: ft.protected_gemm(A, B, out=C, return_report=True)[1])
    stream = cp.cuda.Stream(non_blocking=True)
    with stream, ft.errstate(sync=False):
        stream.begin_capture()
        report = ft.protected_gemm(A, B, out=C, return_report=True)[1]
        assert report.wait().status is Status.PENDING
        with pytest.raises(RuntimeError, match="wait when that has ended"):
            other.wait()
        graph = stream.end_capture()
    graph.launch(stream)
    assert report.wait().status is Status.CLEAN


def test_pytorch_captures_it_too(cp: Any) -> None:
    torch = pytest.importorskip("torch")
    X, Y = torch.randn(256, 128, device="cuda"), torch.randn(128, 192, device="cuda")
    A, B, C = cp.asarray(X), cp.asarray(Y), cp.zeros((256, 192), "f")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        Y *= 1.0
        with cp.cuda.Stream.from_external(stream), ft.errstate(sync=False):
            report = ft.protected_gemm(A, B, out=C, return_report=True)[1]
        Z = torch.relu(torch.as_tensor(C, device="cuda"))
    for i in range(5):
        X.normal_(generator=torch.Generator("cuda").manual_seed(i))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(Z, torch.relu(X.double() @ Y.double()).float(), atol=1e-3)
    final = report.wait()
    assert (final.status, final.replays) == (Status.CLEAN, 5)


# ---- calls that become graphs ----------------------------------------------------------------------------------------


@pytest.fixture
def _no_graphs() -> Any:
    replays._made.clear()
    known._known.clear()
    replays._seen.clear()


@pytest.mark.usefixtures("_no_graphs")
@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "queued"])
def test_repeated_calls_become_a_graph_with_the_same_bits(cp: Any, sync: bool, dtype: str) -> None:
    A, B = normal(cp, 500, 300, dtype=dtype), normal(cp, 300, 400, dtype=dtype, seed=1)
    C = cp.zeros((500, 400), A.dtype)
    with ft.errstate(sync=sync), ft.monitor() as log:
        ft.protected_gemm(A, B, out=C)
        first = cp.asnumpy(C).tobytes()
        for _ in range(400):  # more than a graph has records
            ft.protected_gemm(A, B, out=C)
    assert len(replays._made) == 1
    assert log.counts[Status.CLEAN] == 401
    assert cp.asnumpy(C).tobytes() == first
    A[3, 4] = 0
    ft.protected_gemm(A, B, out=C)
    assert not wrong(cp, A, B, C)


@pytest.mark.usefixtures("_no_graphs")
def test_threads_share_graphs_or_have_their_own(cp: Any) -> None:
    given = [
        (normal(cp, 200, 300, seed=i), normal(cp, 300, 100, seed=9 + i), cp.zeros((200, 100), "f")) for i in range(3)
    ]
    failed: list[Any] = []

    def work(number: int) -> None:
        A, B, C = given[number]
        with cp.cuda.Device(0), ft.errstate(sync=bool(number % 2)):
            for _ in range(300):
                report = ft.protected_gemm(A, B, out=C, return_report=True)[1]
                if report.wait().status is not Status.CLEAN:
                    failed.append(report)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for A, B, C in given:
        assert not wrong(cp, A, B, C)
