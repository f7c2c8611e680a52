"""Where faults are planted into a factorisation on a GPU: behind operations, on the streams that they are queued on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from abft_tsm2.arrays import Array
from abft_tsm2.core import faultpoint
from abft_tsm2.core.capture import current, stream_at
from abft_tsm2.linalg.device.schedule import MAIN, Schedule, Task


class FactorPlaces:
    """The places of LU: a panel, rows of U, a part of the trailing matrix, and the finished factors.

    A stage is reached once for each operation, of which a step may have several: the columns of the next step go ahead
    of the others, and these may come in chunks. Which are meant is said by ``columns``.

    Parameters
    ----------
    planter : callable
    schedule : Schedule
    arrays : mapping
        W, piv and A.
    """

    def __init__(self, planter: faultpoint.Planter, schedule: Schedule, arrays: Mapping[str, Array]) -> None:
        self._planter, self._schedule, self._arrays = planter, schedule, dict(arrays)
        self._ends = {step.j1: step for step in schedule.steps}
        self._first_check = schedule.tasks[schedule.certificate.start]

    def before(self, task: Task, stream: int) -> None:
        """Reach the finished factors, before the first check of them is queued on a stream."""
        if task is self._first_check:
            self._reach("finished" if self._schedule.checked else "factored", task, stream)

    def behind(self, task: Task, stream: int) -> None:
        """Reach what a task has made, when it is queued on a stream."""
        numbers = task.numbers
        if task.name == "panel":
            self._of_step("panel", task, stream, sum(numbers))
        elif task.name == "update":
            self._of_step("updated", task, stream, sum(numbers[:2]), numbers[2:])
        elif task.name == "exchange_solve":
            self._of_step("solved", task, stream, sum(numbers[:2]), numbers[2:])
        elif task.name == "solve_rows":
            self._of_step("solved", task, stream, sum(numbers[2:4]), numbers[4:])

    def _of_step(self, stage: str, task: Task, stream: int, end: int, columns: tuple[int, ...] = ()) -> None:
        """Reach a stage of the step that ends there; what ends elsewhere is within a step."""
        if (step := self._ends.get(end)) is not None:
            self._reach(stage, task, stream, step=(step.j, step.j1), **({"columns": columns} if columns else {}))

    def _reach(self, stage: str, task: Task, stream: int, **more: Any) -> None:
        arrays = {**self._arrays, **more}
        if task.lane == MAIN:
            self._planter(stage, arrays)
        else:
            with current(stream_at(stream)):
                self._planter(stage, arrays)
