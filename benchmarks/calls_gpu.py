"""Loops of products on a GPU, protected and not, eager and as CUDA graphs, for `benchmarks.bench_calls`.

All of it runs on a stream of its own: graphs cannot be recorded on the default one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from abft_tsm2 import encode, errstate, protected_gemm
from abft_tsm2.core import cublas
from abft_tsm2.core.problem import Problem
from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.faults.judge.oracle import Array
from abft_tsm2.report import Report
from benchmarks import gemm_grid
from benchmarks.calls_grid import CALLS, COLUMNS, ENCODED, GRAPH, TRUSTED, WAITED, Cell, Row, empty_row, key, text
from benchmarks.calls_loop import Loop, Step, finish, host_columns, race, require_product
from benchmarks.gemm_suite import Reports
from benchmarks.gpu_timing import graph, host_times, message, require_device
from benchmarks.operands import array, fill, fill_nan
from benchmarks.suite import Suite

RECORDED = 100  # products of a graph
HOST_CALLS = 100  # whose host time is taken, in bursts that the queue takes in
PLAIN, PLAIN_GRAPH = "plain", "plain graph"
CUPY, CUBLAS = "cupy.matmul", "cuBLAS"


class Recorded(Loop):
    """Launches of a graph of products.

    Parameters
    ----------
    record : function
        Queues the products on the current stream, once, and returns their reports.
    stream : cupy.cuda.Stream
        The current one.
    C : array
    """

    def __init__(self, record: Callable[[], Iterable[Report]], stream: Any, C: Array) -> None:
        self.recorded: list[Any] = []
        replay = graph(lambda: self.recorded.extend(record()), stream)
        super().__init__(replay, CALLS // RECORDED, C, RECORDED, waits=False, reports=len(self.recorded))

    def settle(self) -> None:
        """Read what the reports of the graph have seen: each of them every launch."""
        for report in self.recorded:
            try:
                final = report.wait()
            except SilentDataCorruptionError as error:
                final = error.report
            self.note({final.status.name: final.replays})


class CallsSuite(Suite):
    """One run over cells of `benchmarks.calls_grid.grid`."""

    columns = COLUMNS
    rounds = (5, 15)
    seconds = 1.5  # of the rounds of a group, beyond the fewest

    def kernels(self, cells: Sequence[Cell]) -> list[Any]:
        shapes = dict.fromkeys(gemm_grid.Cell("square", cell.n, cell.n, cell.n, cell.dtype) for cell in cells)
        return [one for shape in shapes for one in gemm_grid.kernels(shape, self.device.multiprocessors)]

    def bytes(self, cells: Sequence[Cell]) -> int:
        n, size = cells[0].n, cells[0].size
        return n * n * (size * (4 + len(cells)) + 6 * 8)

    def empty(self, cell: Cell, contender: str = "") -> Row:
        return empty_row(cell, self.ceilings.read_gbs)

    def line(self, cell: Cell, rows: Sequence[Row]) -> str:
        return "\n".join(text(cell, row) for row in rows)

    def conclude(self) -> tuple[str, list[str]]:
        return "", [f"{' '.join(key(row))}: {row['error']}" for row in self.rows if row["error"]]

    def measure(self, cells: Sequence[Cell]) -> None:
        with self.watch.stream:
            self._measure(cells)

    def _measure(self, cells: Sequence[Cell]) -> None:
        import cupy

        synchronize = cupy.cuda.Device().synchronize
        cell = cells[0]
        A, B = operands(cell)
        rows = {cell: self.empty(cell) for cell in cells}
        base, beside = plain(cell, A, B)
        require_product(A, B, base.C, cupy)
        loops = {PLAIN: base}
        makers = {cell.variant: partial(protected, cell, A, B, self.watch.stream) for cell in cells}
        if GRAPH in makers:
            makers[PLAIN_GRAPH] = partial(plain_graph, cell, A, B, self.watch.stream)
        for name, make in makers.items():
            try:
                loops[name] = make()
            except Exception as error:
                loops[name] = Loop(base.call, CALLS, base.C, error=message(error))
                require_device(error)
        synchronize()
        for loop in loops.values():
            fill_nan(loop.C)
        race(loops, self.rounds, self.seconds, synchronize, require_device)
        hosts = host_seconds(loops)
        for loop in loops.values():
            try:
                loop.settle()
            except Exception as error:
                loop.error = loop.error or message(error)
                require_device(error)
        for cell, row in rows.items():
            recorded = cell.variant == GRAPH
            name = PLAIN_GRAPH if recorded else PLAIN
            row["beside"] = CUBLAS if recorded else beside
            finish(cell, row, loops[name], loops[cell.variant], cupy)
            if cell.variant in hosts and name in hosts:
                row.update(host_columns(hosts[name], hosts[cell.variant]))
            self.emit(cell, [row])


class QuickCalls(CallsSuite):
    """The same in few rounds."""

    rounds = (3, 3)


def operands(cell: Cell) -> tuple[Array, Array]:
    """Normal random A and B, in rows."""
    import cupy

    A, B = (array((cell.n, cell.n), cell.dtype) for _ in range(2))
    drawn = cupy.random.default_rng(cell.n).standard_normal
    for x in (A, B):
        fill(x, drawn)
    return A, B


# ---- contenders ---------------------------------------------------------------------------------------------------


def plain(cell: Cell, A: Array, B: Array) -> tuple[Loop, str]:
    """The eager unprotected product, which was made once, and its function."""
    import cupy

    C = array(A.shape, cell.dtype)
    call: Step = partial(cupy.matmul, A, B, out=C)
    try:
        call()
        beside = CUPY
    except Exception as error:  # of a type that CuPy does not multiply
        require_device(error)
        call, beside = vendor(cell, A, B, C), CUBLAS
    return Loop(call, CALLS, C, waits=False), beside


def plain_graph(cell: Cell, A: Array, B: Array, stream: Any) -> Loop:
    """A graph of unprotected products, of which one was made before."""
    import cupy

    C, space = array(A.shape, cell.dtype), cupy.empty(cublas.WORKSPACE, np.uint8)
    vendor(cell, A, B, C)
    gemm = _gemm(cell, A, B, C)

    def record() -> Iterable[Report]:
        with cublas.captured_on(stream.ptr, space) as handle:
            for _ in range(RECORDED):
                gemm.on(handle, A, B, C, 1.0, 0.0)
        return ()

    return Recorded(record, stream, C)


def vendor(cell: Cell, A: Array, B: Array, C: Array) -> Step:
    """A call of cuBLAS, which was made once."""
    call = partial(_gemm(cell, A, B, C), A, B, C, 1.0, 0.0)
    call()
    return call


def _gemm(cell: Cell, A: Array, B: Array, C: Array) -> cublas.Gemm:
    return cublas.Gemm.of(Problem(cell.n, cell.n, cell.n, cell.dtype, "C", out=cell.dtype), A, B, C)


def protected(cell: Cell, A: Array, B: Array, stream: Any) -> Loop:
    """The loop of a cell; its call was made once."""
    C = array(A.shape, cell.dtype)
    right = encode(B, side="rows", recheck=cell.variant != TRUSTED) if cell.variant in (ENCODED, TRUSTED) else B
    call = partial(protected_gemm, A, right, out=C)
    if cell.variant != GRAPH:
        loop = Loop(call, CALLS, C, waits=cell.variant == WAITED, reports=1)
        loop.once(stream.synchronize, calls=1)
        return loop
    with errstate(sync=False):
        call(return_report=True)[1].wait()
        stream.synchronize()
        return Recorded(lambda: [call(return_report=True)[1] for _ in range(RECORDED)], stream, C)


# ---- the host -----------------------------------------------------------------------------------------------------


def host_seconds(loops: Mapping[str, Loop]) -> dict[str, list[float]]:
    """Seconds that a product takes the host, where nothing is waited for: those of calls on an idle card, and those of
    the launch of a graph."""
    found = {name: loop.returned for name, loop in loops.items() if isinstance(loop, Recorded) and loop.returned}
    eager = {name: loop for name, loop in loops.items() if not (loop.error or loop.waits or isinstance(loop, Recorded))}
    reports = {name: Reports() for name, loop in eager.items() if loop.reports}
    calls = {name: _reporting(loop.call, reports[name]) if loop.reports else loop.call for name, loop in eager.items()}
    try:
        with errstate(sync=False):
            found |= host_times(calls, HOST_CALLS)
            for name, those in reports.items():
                those.collect()
                eager[name].note(those.statuses)
                eager[name].due += those.statuses.total()
    except Exception as error:
        for name in reports:
            eager[name].error = f"host times: {message(error)}"
        require_device(error)
    return found


def _reporting(call: Any, reports: Reports) -> Step:
    return lambda: reports.add(call(return_report=True)[1])
