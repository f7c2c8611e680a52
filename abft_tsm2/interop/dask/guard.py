"""The plugin of the scheduler: it releases lost blocks, keeps tasks from workers, and retires what has many faults."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

from abft_tsm2.interop.dask.messages import ELSEWHERE, FAULTS, FOUND, QUARANTINE, RAISED, RUN_AGAIN
from abft_tsm2.interop.dask.place import place

ATTEMPTS = 3  # to make a block again, or to run a task elsewhere


@dataclass
class Avoided:
    """The workers that a task is kept from, and the restrictions that it had before."""

    workers: set[str]
    worker_restrictions: set[str] | None
    host_restrictions: set[str] | None


class ClusterGuard(SchedulerPlugin):
    """The scheduler's part.

    Attributes
    ----------
    faults : Counter
        Reports with faults, by (host, device).
    retired, kept : set of (host, device)
        Those that had too many faults; kept are all that is left.
    """

    name = "abft-tsm2"
    idempotent = True

    def __init__(self) -> None:
        self.quarantine_after: int | None = None
        self.faults: Counter[tuple[str, str]] = Counter()
        self.retired: set[tuple[str, str]] = set()
        self.kept: set[tuple[str, str]] = set()
        self.attempts: Counter[tuple[str, Any]] = Counter()
        self.asked: dict[Any, set[Any]] = {}  # by readers that have not ended: the blocks that they have found lost
        self.avoided: dict[Any, Avoided] = {}
        self.scheduler: Any = None
        self.under_way: set[asyncio.Task[None]] = set()

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.one_at_a_time = asyncio.Lock()
        handlers = {RUN_AGAIN: self.run_again, ELSEWHERE: self.elsewhere, RAISED: self.raised}
        scheduler.handlers.update({**handlers, QUARANTINE: self.quarantine})

    async def quarantine(self, after: int | None) -> None:
        """Retire from so many faults on, those that had them before as well."""
        self.quarantine_after = after
        for where in list(self.faults):
            self._retire_if_faulty(where)

    # ---- tasks that run again --------------------------------------------------------------------------------------

    async def run_again(self, key: Any, task: Any, found: list[Any]) -> bool:
        """Release what a task has made, so that it runs again, and with it what it needs; False where it cannot.

        `task` is the one that reads it, maybe itself the one that made it, and will have to know what it found.
        """
        source, attempt = self.scheduler.tasks.get(key), (RUN_AGAIN, key)
        if source is None or not all(map(_can_run, (source, *(behind := _read_from(source))))):
            return False
        if source.state == "memory" or key == task:  # else another reader has asked
            self.attempts[attempt] += 1
            if self.attempts[attempt] > ATTEMPTS:
                return False
        self.asked.setdefault(task, set()).add(key)
        if source.state == "memory":
            release = {key: "released", **{one.key: "released" for one in behind if one.state == "memory"}}
            self.scheduler.transitions(release, stimulus_id=f"abft-tsm2-{self.attempts[attempt]}")
        self._remember(task, found)
        return True

    async def elsewhere(self, task: Any, worker: str, found: list[Any]) -> bool:
        """Keep a task from running on that worker; False where there is no other."""
        known = self.scheduler.tasks.get(task)
        if known is None or self.attempts[ELSEWHERE, task] >= ATTEMPTS:
            return False
        self.attempts[ELSEWHERE, task] += 1
        before = Avoided(set(), known.worker_restrictions, known.host_restrictions)
        self.avoided.setdefault(task, before).workers.add(worker)
        if not self._keep_away(task):
            return False
        self._remember(task, found)
        return True

    def _keep_away(self, key: Any) -> bool:
        """Let a task run on the workers that it may run on, but for those that it is kept from; False where that leaves
        none, and it may run on all."""
        task, avoided = self.scheduler.tasks[key], self.avoided[key]
        self._unrestrict(task, avoided)
        others = self._able(task) - avoided.workers
        if not others and task.loose_restrictions:  # what the user said was a preference
            task.worker_restrictions = task.host_restrictions = None
            others = self._able(task) - avoided.workers
            self._unrestrict(task, avoided)
        if others:
            task.worker_restrictions, task.host_restrictions = others, None
        return bool(others)

    def _able(self, task: Any) -> set[str]:
        """The workers that a task may run on."""
        valid = self.scheduler.valid_workers(task)
        return {one.address for one in (self.scheduler.running if valid is None else valid)}

    @staticmethod
    def _unrestrict(task: Any, avoided: Avoided) -> None:
        task.worker_restrictions, task.host_restrictions = avoided.worker_restrictions, avoided.host_restrictions

    def _remember(self, key: Any, found: list[Any]) -> None:
        """Have the next run of a task know what was found before: its worker is sent the annotations."""
        task = self.scheduler.tasks.get(key)
        if task is not None and (found or FOUND in (task.annotations or ())):
            others = {name: value for name, value in (task.annotations or {}).items() if name != FOUND}
            task.annotations = {**others, FOUND: found} if found else others or None

    async def raised(self, task: Any) -> None:
        """A task has told the user what was found."""
        self._remember(task, [])

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if start == "processing" and (key in self.asked or key in self.avoided):
            # The worker has room for another task: Dask looks for one where a task ends, but not where it is to run
            # again, and those that it waits for may be in the scheduler's queue.
            self.scheduler.loop.add_callback(self._fill_workers)
        if finish in ("memory", "erred", "forgotten"):  # the task has told, and may be computed anywhere another time
            self._remember(key, [])
            self.attempts.pop((ELSEWHERE, key), None)
            avoided, task = self.avoided.pop(key, None), self.scheduler.tasks.get(key)
            if avoided is not None and task is not None:
                self._unrestrict(task, avoided)
            asked = self.asked.pop(key, set())
            for block in (
                asked if finish == "memory" else ()
            ):  # it was read as it was: what is lost next is another loss
                self.attempts.pop((RUN_AGAIN, block), None)
        if finish == "forgotten":
            self.attempts.pop((RUN_AGAIN, key), None)

    def _fill_workers(self) -> None:
        self.scheduler.stimulus_queue_slots_maybe_opened(stimulus_id="abft-tsm2-room")

    def restart(self, scheduler: Any) -> None:
        for kept in (self.attempts, self.avoided, self.asked):
            kept.clear()

    def add_worker(self, scheduler: Any, worker: str) -> None:
        self._workers_changed()
        self.kept.clear()
        if self.retired:  # it may be there again, under another address
            self._later(self._retire_if_known(worker))

    def remove_worker(self, scheduler: Any, worker: str, **kwargs: Any) -> None:
        self._workers_changed()

    def _workers_changed(self) -> None:
        """Let tasks that are kept from some workers run on those that there are now."""
        for key in list(self.avoided):
            self._keep_away(key)
            if self.scheduler.tasks[key].state == "no-worker":
                self.scheduler.transitions({key: "processing"}, stimulus_id="abft-tsm2-workers-changed")

    # ---- quarantine ------------------------------------------------------------------------------------------------

    def log_event(self, topic: str, msg: Any) -> None:
        """Count faults, and retire where there are too many."""
        if topic != FAULTS or "retired" in msg:
            return
        where = msg["host"], msg["device"]
        self.faults[where] += 1
        self._retire_if_faulty(where)

    def _retire_if_faulty(self, where: tuple[str, str]) -> None:
        if where not in self.retired | self.kept and self._has_too_many(where):
            self._later(self._retire(where))

    def _has_too_many(self, where: tuple[str, str]) -> bool:
        return self.quarantine_after is not None and self.faults[where] >= self.quarantine_after

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    async def _retire(self, where: tuple[str, str]) -> None:
        async with self.one_at_a_time:
            if where not in self.retired | self.kept and self._has_too_many(where):
                self.retired.add(where)
                await self._close(where)

    async def _retire_if_known(self, worker: str) -> None:
        async with self.one_at_a_time:
            where = (await self._places([worker])).get(worker)
            if where in self.retired:
                await self._close(where)

    async def _close(self, where: tuple[str, str]) -> None:
        """Retire the workers of a device, unless they are all that is left."""
        places = await self._places(list(self.scheduler.workers))
        there = [address for address, at in places.items() if at == where]
        if not there:
            return
        text, closed = f"{where[0]}, {where[1]} has had {self.faults[where]} faults", {}
        if len(there) < len(places):
            closed = await self.scheduler.retire_workers(workers=there, close_workers=True, remove=True)
        if closed:
            why = f"{text}: retired"
        else:
            self.retired.discard(where)
            self.kept.add(where)
            left = "is all that is left" if len(there) == len(places) else "holds what no other worker has room for"
            why = f"{text} and {left}: kept"
        self.scheduler.log_event(FAULTS, {"retired": ", ".join(closed), "why": why})

    async def _places(self, workers: list[str]) -> dict[str, tuple[str, str]]:
        """Host and device of workers, as they say themselves."""
        from distributed.protocol.pickle import dumps
        from distributed.protocol.serialize import Serialized, deserialize

        message = {"op": "run", "function": dumps(place), "args": dumps(()), "kwargs": dumps({})}
        found = await self.scheduler.broadcast(msg=message, workers=workers, on_error="ignore")
        places = {}
        for address, answer in found.items():
            if answer is not None and answer.get("status") == "OK":
                said = answer["result"]
                _, host, device = deserialize(said.header, said.frames) if isinstance(said, Serialized) else said
                places[address] = host, device
        return places


def _read_from(task: Any) -> set[Any]:
    """The chunks behind a block that is read for an operation, back to those of results of other operations: the block
    may lie in their memory, and no sums guard them. None behind other blocks, which are made of guarded ones."""
    name = _label(task)
    found: set[Any] = set()
    waiting = [task] if "read-" in name and "protected-" in name else []
    while waiting:
        for one in waiting.pop().dependencies - found:
            found.add(one)
            if "protected-" not in _label(one):
                waiting.append(one)
    return found


def _label(task: Any) -> str:
    return str(task.key[0] if isinstance(task.key, tuple) else task.key)


def _can_run(task: Any) -> bool:
    """Whether a task can run again, and what it needs: scattered data that were freed cannot be made again, and Dask
    would forget all that depends on them."""
    waiting, seen = [task], {task}
    while waiting:
        one = waiting.pop()
        if not one.run_spec or one.has_lost_dependencies:
            return False
        needed = {other for other in one.dependencies if other.state != "memory"} - seen
        seen |= needed
        waiting += needed
    return True
