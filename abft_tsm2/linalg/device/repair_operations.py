"""What a repair does with the matrices of a factorisation on a GPU: rows of A and of the factors, products, copies to
the host, and tasks of the schedule, queued on the current stream; products on that of repairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array
from abft_tsm2.core.launch import Step as Queued
from abft_tsm2.linalg.device import evidence_config, move_config
from abft_tsm2.linalg.device.buffers import RunSums
from abft_tsm2.linalg.device.lanes import add_product
from abft_tsm2.linalg.device.plan import FactorPlan
from abft_tsm2.linalg.device.queued import QueuedRun
from abft_tsm2.linalg.device.schedule import PRODUCTS, Task


@dataclass(eq=False)
class RepairOperations:
    """A run, and what can be done with its matrices.

    Attributes
    ----------
    plan : FactorPlan
    run : QueuedRun
    A, W : (m, n) CuPy arrays
    sums : RunSums
    arrived : int
        Columns whose rows are known to be in order when so many are factored.
    """

    plan: FactorPlan
    run: QueuedRun
    A: Array
    W: Array
    sums: RunSums
    arrived: int = field(default=0, init=False)
    _sent: list[Any] = field(default_factory=list, init=False)  # what copies may still be read

    def __post_init__(self) -> None:
        self.steps, self.buffers = self.plan.schedule.steps, self.plan.buffers
        self.stream, self.dtype = self.plan.lanes.streams[PRODUCTS], self.plan.kind.dtype

    def _on_host(self, *arrays: Array) -> list[Any]:
        """Arrays of the device on the host, with one wait for all of them."""
        import cupy

        arrays = tuple(cupy.ascontiguousarray(x) for x in arrays)  # all memory comes before what uses it
        found = [self._copied(x) for x in arrays]
        cupy.cuda.get_current_stream().synchronize()
        return found

    def _copied(self, x: Array) -> Any:
        """A contiguous array of the device as it is by now, on the host when the stream has been waited for."""
        import cupy
        from cupy.cuda import runtime

        memory, stream = cupy.cuda.alloc_pinned_memory(x.nbytes), cupy.cuda.get_current_stream().ptr
        runtime.memcpyAsync(memory.ptr, x.data.ptr, x.nbytes, runtime.memcpyDeviceToHost, stream)
        return np.frombuffer(memory, x.dtype, x.size).reshape(x.shape)

    def _put(self, values: Any, to: Array) -> None:
        """A contiguous row or column of the host's, in page-locked memory, to one of W."""
        import cupy
        from cupy.cuda import runtime

        (m, n), size, stream = to.shape, to.itemsize, cupy.cuda.get_current_stream().ptr
        pitch, width = (to.strides[1], size) if n > 1 else (m * size,) * 2
        place, of, way = to.data.ptr, values.ctypes.data, runtime.memcpyDefault
        runtime.memcpy2DAsync(place, pitch, of, width, width, n, way, stream)
        self._sent.append(values)

    def _empty(self, m: int, n: int) -> Array:
        import cupy

        return cupy.empty((m, n), self.W.dtype, order="F")

    def _queue(self, steps: list[Queued]) -> None:
        import cupy

        stream = cupy.cuda.get_current_stream().ptr
        for step in steps:
            step(stream, self.run.where)

    def _evidence_kernel(self, routine: str, launch: move_config.Launch, *values: Any) -> None:
        self._queue(self.plan.kernel(evidence_config.EvidenceKernel(routine, self.dtype), launch, *values))

    def _take(self, X: Array, gather: int, to: Array, rows: int, scatter: int = 0) -> None:
        """Rows of X, which an address names, to rows of another matrix; of as many columns."""
        launch, size = move_config.take_rows(rows, to.shape[1]), X.itemsize
        strides = (stride // size for stride in X.strides)
        values = X.data.ptr, *strides, gather, rows, to.shape[1], to.data.ptr, to.strides[1] // size, scatter
        self._queue(self.plan.move("take_rows", launch, *values))

    def _from_A(self, rows: int, columns: slice, to: Array) -> None:
        """Rows of A, which an address names, and some of its columns."""
        self._take(self.A[:, columns], rows, to, to.shape[0])

    def _left(self, at: Array, j: int) -> Array:
        """L(at, :j)."""
        found = self._empty(len(at), j)
        if j:
            self._take(self.W[:, :j], at.data.ptr, found, len(at))
        return found

    def _subtract(self, L: Array, U: Array, C: Array) -> None:
        self._add(-1.0, L, U, C)

    def _add(self, alpha: float, L: Array, U: Array, C: Array) -> None:
        """C += alpha L U, all of them with contiguous columns."""
        if 0 not in (*C.shape, L.shape[1]):
            add_product(self.plan.lanes, PRODUCTS, self.dtype, alpha, L, U, C)

    def _bring_left(self, j: int) -> None:
        """L(:, :j) with its rows in the order of step j:j1. They move once more when all steps are done."""
        if j and self.arrived != j:
            for name in ("left_map", "left_rows", "left_done"):
                self._task(name, j)
        self.arrived = j

    def _task(self, name: str, *numbers: int) -> None:
        """Queue a task of a schedule."""
        self._queue(self.plan.launches(Task(PRODUCTS, name, numbers)))
