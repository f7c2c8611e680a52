"""One factorisation of a plan, queued in parts: all at once, or with the verdicts of steps read on the way."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from abft_tsm2.arrays import Array
from abft_tsm2.core.graphs import Graph
from abft_tsm2.core.launch import Step
from abft_tsm2.linalg.device.buffers import KEPT, RunSums
from abft_tsm2.linalg.device.places import FactorPlaces
from abft_tsm2.linalg.device.schedule import CHECKS, Segment, Task

if TYPE_CHECKING:
    from abft_tsm2.linalg.device.plan import FactorPlan

GRAPHS = 4  # runs of a plan that are remembered, and that graphs are kept of
After = Callable[[Task], None]
Calls = Sequence[tuple[Task, list[Step]]]


class GraphsOfRuns:
    """Graphs of the parts of those runs of a plan that come more than once: for factors and sums at one address."""

    def __init__(self) -> None:
        import cupy

        self._recorder = cupy.cuda.Stream(non_blocking=True)
        self._seen: deque[tuple[int, RunSums]] = deque(maxlen=GRAPHS)
        self._graphs: OrderedDict[tuple[int, RunSums], list[Graph | None]] = OrderedDict()

    def of(
        self, key: tuple[int, RunSums], parts: list[Segment], queue: Callable[[int, Segment], None]
    ) -> list[Graph | None] | None:
        """Those of a run, recorded when it comes a second time; None for a part that cannot be recorded alone."""
        found = self._graphs.pop(key, None)
        if found is None and key in self._seen:
            recorder = self._recorder.ptr
            found = [
                Graph(recorder, lambda part=part: queue(recorder, part)) if part.whole else None  # type: ignore[misc]
                for part in parts
            ]
        self._seen.append(key)
        if found is not None:
            self._graphs[key] = found
            while len(self._graphs) > GRAPHS:
                self._graphs.popitem(last=False)
        return found


class QueuedRun:
    """A factorisation that is queued behind a stream.

    Parameters
    ----------
    plan : FactorPlan
    main : int
        Handle of the stream.
    A, W : (m, n) CuPy arrays
        W with the leading dimension of the plan.
    piv : (K,) int32 CuPy array
    sums : RunSums
    after : callable, optional
        Called with each task when it has run, before the next one is queued.
    places : FactorPlaces, optional
        Where faults are planted.

    Attributes
    ----------
    where : dict
        Addresses by name.
    """

    def __init__(
        self,
        plan: FactorPlan,
        main: int,
        A: Array,
        W: Array,
        piv: Array,
        sums: RunSums,
        after: After | None = None,
        places: FactorPlaces | None = None,
    ) -> None:
        from cupy.cuda import runtime

        self.plan, self.sums, self._main, self._piv, self._after, self._places = plan, sums, main, piv, after, places
        where, first, size = sums.addresses(), plan.schedule.steps[0].j1, plan.size
        where |= {"fixed": 0, "down": A.strides[0] // size, "along": A.strides[1] // size}
        where |= {"A": A.data.ptr, "W": W.data.ptr, "lead": A.strides[plan.kind.turned] // size}
        for part, c0 in (("first", 0), ("rest", first)):
            where[f"A {part}"] = where["A"] + c0 * A.strides[1]
            where[f"W {part}"] = where["W"] + c0 * plan.ld * size
            where[f"largest {part}"] = where["column_largest"] + c0 * size
        self.where: dict[str, int] = where
        self._graphs: list[Graph | None] | None = None
        runtime.streamWaitEvent(main, plan.finished.ptr)  # the run before may have been on another stream
        if plan.recordable and after is None and places is None:  # what is planted, is planted once
            self._graphs = plan.graphs.of((where["W"], sums), plan.schedule.parts, self._record)
        self.begin()

    def begin(self) -> None:
        """Queue what comes before the parts."""
        self.sums.status[:] = 0
        self._queue(self.plan.calls[: self.plan.schedule.prefix])

    def part(self, number: int) -> None:
        """Queue a part: of a step, where steps are tracked."""
        from cupy.cuda import runtime

        plan, (start, stop, whole) = self.plan, self.plan.schedule.parts[number]
        self.sums.looked[number % KEPT] = np.nan  # what nothing has written agrees with nothing
        if graph := self._graphs and self._graphs[number]:
            graph.launch(self._main)
        else:
            self._queue(plan.calls[start:stop])
        if number < len(plan.judged):
            stream = self._main if whole else plan.handles(self._main)[CHECKS]
            runtime.eventRecord(plan.judged[number].ptr, stream)

    def verdict(self, step: int) -> int:
        """Wait for that on a step."""
        self.plan.judged[step].synchronize()
        return int(self.sums.status[step])

    def panels(self, step: int) -> None:
        """Factor those of a step, where its part does not, because that of the step before has done so."""
        self._alone(self.plan.schedule.panels[step])

    def certificate(self) -> None:
        """Verify finished factors again."""
        self._alone(self.plan.schedule.certificate)

    def before(self, stream: int) -> None:
        """Let all that is queued come before what follows on a stream."""
        from cupy.cuda import runtime

        for handle in self.plan.handles(self._main).values():
            runtime.eventRecord(self.plan.forked.ptr, handle)
            runtime.streamWaitEvent(stream, self.plan.forked.ptr)

    def behind(self, stream: int) -> None:
        """Let what follows come behind what is queued on a stream."""
        from cupy.cuda import runtime

        runtime.eventRecord(self.plan.forked.ptr, stream)
        for handle in self.plan.handles(self._main).values():  # not all parts begin on the main one
            runtime.streamWaitEvent(handle, self.plan.forked.ptr)

    def end(self) -> None:
        """Queue what comes behind the parts."""
        from cupy.cuda import runtime

        piv, where, plan = self._piv, self.where, self.plan
        runtime.memcpyAsync(piv.data.ptr, where["piv"], piv.nbytes, runtime.memcpyDeviceToDevice, self._main)
        runtime.eventRecord(plan.finished.ptr, self._main)

    def all(self) -> None:
        """Queue all parts."""
        for number in range(len(self.plan.schedule.parts)):
            self.part(number)
        self.end()

    def _alone(self, tasks: slice) -> None:
        """Queue some tasks, for which all streams wait, and which all streams wait for."""
        from cupy.cuda import runtime

        event = self.plan.forked.ptr
        runtime.eventRecord(event, self._main)
        for stream in self.plan.handles(self._main).values():
            runtime.streamWaitEvent(stream, event)
        self._queue(self.plan.calls[tasks])
        self.before(self._main)

    def _record(self, recorder: int, part: Segment) -> None:
        self._do(self.plan.recorded[part.start : part.stop], recorder)

    def _queue(self, calls: Calls) -> None:
        self._do(calls, self._main, self._after, self._places)

    def _do(self, calls: Calls, main: int, after: After | None = None, places: FactorPlaces | None = None) -> None:
        handles, where = self.plan.handles(main), self.where
        for task, steps in calls:
            stream = handles[task.lane]
            if places is not None:
                places.before(task, stream)
            for step in steps:
                step(stream, where)
            if places is not None:
                places.behind(task, stream)
            if after is not None:
                import cupy

                cupy.cuda.runtime.deviceSynchronize()
                after(task)
