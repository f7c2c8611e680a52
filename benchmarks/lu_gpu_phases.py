"""What each task of a factorisation on a GPU takes alone, for `benchmarks.bench_lu_gpu --phases`: tasks that run beside
one another in a factorisation are waited for here, so that the sum is more than the whole.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from abft_tsm2.arrays import Array
from abft_tsm2.linalg.device.plan import FactorPlan, Kind
from abft_tsm2.linalg.device.queued import After, Calls, QueuedRun
from benchmarks import lu_gpu_contenders as contenders
from benchmarks.gpu_timing import Call, Stopwatch
from benchmarks.lu_gpu_contenders import Queued
from benchmarks.lu_gpu_grid import Cell
from benchmarks.rows import short
from benchmarks.suite import Row, Suite

HIDDEN = 2e-4  # seconds that the card is kept busy while the host queues a task
REPEATS = 3
EVENTS = ("record", "wait")  # tasks that take no time
COLUMNS = ("dtype", "n", "lane", "task", "count", "us", "ms", "whole_ms", "note", "error")


class TimedRun(QueuedRun):
    """A factorisation whose tasks are run one after the other, each alone, and timed.

    Attributes
    ----------
    milliseconds : list of float
        Of each task that is no event, in the order of the schedule.
    """

    def __init__(self, plan: FactorPlan, A: Array, watch: Stopwatch) -> None:
        import cupy

        self._watch, self._clock = watch, (cupy.cuda.Event(), cupy.cuda.Event())
        self.milliseconds: list[float] = []
        W = cupy.empty((plan.ld, plan.n), dtype=A.dtype, order="F")[: plan.m]
        sums = plan.borrow()
        super().__init__(plan, cupy.cuda.get_current_stream().ptr, A, W, cupy.empty(plan.K, dtype=cupy.int32), sums)
        self.all()
        cupy.cuda.Device().synchronize()
        plan.give_back(sums)

    def _do(self, calls: Calls, main: int, after: After | None = None) -> None:
        import cupy

        handles, (start, end) = self.plan.handles(main), self._clock
        for task, steps in calls:
            handle = handles[task.lane]
            stream = cupy.cuda.ExternalStream(handle)
            timed = task.name not in EVENTS
            if timed:
                cupy.cuda.Device().synchronize()
                with stream:
                    self._watch.spin(HIDDEN)
                start.record(stream)
            for step in steps:
                step(handle, self.where)
            if timed:
                end.record(stream)
                end.synchronize()
                self.milliseconds.append(float(cupy.cuda.get_elapsed_time(start, end)))


class PhaseSuite(Suite):
    """One run over cells of suite "factor"."""

    columns = COLUMNS

    def kernels(self, cells: Sequence[Cell]) -> list[Any]:
        return [one for cell in cells for one in contenders.kernels(cell)]

    def bytes(self, cells: Sequence[Cell]) -> int:
        return contenders.memory(cells[0])

    def measure(self, cells: Sequence[Cell]) -> None:
        for cell in cells:
            with self.watch.stream:
                self.emit(cell, self._rows(cell))

    def _rows(self, cell: Cell) -> list[Row]:
        A = contenders.matrix(cell)
        whole = self.watch.measure({"online": Call(Queued(A, checked=True))})["online"]
        if not whole.seconds:
            return [{**self.empty(cell), "error": whole.error or "no samples before the time limit"}]
        plan = FactorPlan(Kind.of(A, encoded=True, checked=True), A)
        plan.recordable = False
        runs = [TimedRun(plan, A, self.watch).milliseconds for _ in range(REPEATS)][1:]  # the first one loads kernels
        names = [(task.lane, task.name) for task in plan.schedule if task.name not in EVENTS]
        taken: dict[tuple[str, str], list[float]] = {}
        for name, same in zip(names, zip(*runs, strict=True), strict=True):
            taken.setdefault(name, []).append(min(same))
        rows = []
        for (lane, task), times in sorted(taken.items(), key=lambda item: -sum(item[1])):
            row = {**self.empty(cell), "lane": lane, "task": task, "count": len(times)}
            row.update(us=short(1e3 * statistics.median(times)), ms=short(sum(times)))
            rows.append({**row, "whole_ms": short(1e3 * statistics.median(whole.seconds))})
        return rows

    def empty(self, cell: Cell, contender: str = "") -> Row:
        return {**dict.fromkeys(COLUMNS, ""), "dtype": cell.dtype, "n": cell.n}

    def line(self, cell: Cell, rows: Sequence[Row]) -> str:
        shown = [f"{cell!s}"]
        for row in rows:
            if row["ms"] == "":
                shown.append(row["error"] or row["note"])
            else:
                task = f"{row['lane']} {row['task']}"
                shown.append(f"    {task:32s} {row['count']:5d} x {row['us']:9.1f} us, {row['ms']:9.3f} ms")
        if rows and rows[0]["ms"] != "":
            shown.append(f"    together {sum(row['ms'] for row in rows):.3f} ms, as a whole {rows[0]['whole_ms']:.3f}")
        return "\n".join(shown)

    def conclude(self) -> tuple[str, list[str]]:
        return "", [f"{row['dtype']} {row['n']}: {row['error']}" for row in self.rows if row["error"]]
