"""What the scheduler of a cluster does: release a block that is lost, retire what is found faulty again and again."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

from abft_tsm2.interop.dask import events
from abft_tsm2.interop.dask.place import place
from abft_tsm2.interop.dask.recovery import ELSEWHERE, FOUND, RUN_AGAIN

ATTEMPTS = 3  # to make a block again, or to run a task elsewhere


def install(client: Any = None, *, quarantine_after: int | None = None) -> Any:
    """Have a cluster recover lost blocks, count faults, and retire the hosts or devices that have too many.

    Parameters
    ----------
    client : distributed.Client, optional
        The current one unless given.
    quarantine_after : int, optional
        Reports with faults, from one device of one host, after which its workers are retired: what they hold is moved,
        what they were to do runs elsewhere, and a worker that starts there later is retired as well. None: nothing is
        retired. The last device that is left is never retired.

    Returns
    -------
    None, or with an asynchronous client something to await.

    Raises
    ------
    ValueError
        If `quarantine_after` is below 1, or there is no client.

    Notes
    -----
    Without a call of it, each operation on Dask arrays has its client do the same with the defaults. The package has to
    be installed where the scheduler runs. Faults are counted by host and device, because a worker that was started
    again has another address. The device is the UUID of a GPU, the value of the environment variable
    ``ABFT_TSM2_DEVICE`` where a worker has it, or "cpu". Events of the topic "abft-tsm2" tell of each fault, and of
    what was retired; the dashboard's table of workers has a column "abft faults".

    Examples
    --------
    >>> from distributed import Client, LocalCluster
    >>> from abft_tsm2.interop.dask import install
    >>> cluster = LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0")
    >>> with cluster, Client(cluster) as client:
    ...     install(client, quarantine_after=3)
    """
    if quarantine_after is not None and quarantine_after < 1:
        raise ValueError(f"quarantine_after is {quarantine_after}: at least 1 fault, or None for no quarantine")
    client = events.current_client() if client is None else client
    if client is None:
        raise ValueError("there is no client: make a distributed.Client first, or pass one")
    return client.sync(_installed, client, quarantine_after)


async def _installed(client: Any, quarantine_after: int | None) -> None:
    await _present(client)
    await client.scheduler.abft_tsm2_quarantine(after=quarantine_after)


async def _present(client: Any) -> None:
    client._abft_installed = True
    events.subscribe(client)
    await client.register_plugin(ClusterGuard())


def install_once(client: Any) -> None:
    """`install` with the defaults, on a cluster that has it not."""
    if client.__dict__.get("_abft_installed"):
        return
    done = client.sync(_present, client)
    if client.asynchronous:
        client._abft_installing = asyncio.ensure_future(done)  # kept, or it would be collected


class ClusterGuard(SchedulerPlugin):
    """The scheduler's part.

    Attributes
    ----------
    faults : Counter
        Reports with faults, by (host, device).
    retired : set of (host, device)
    """

    name = "abft-tsm2"
    idempotent = True

    def __init__(self) -> None:
        self.quarantine_after: int | None = None
        self.faults: Counter[tuple[str, str]] = Counter()
        self.retired: set[tuple[str, str]] = set()
        self.attempts: Counter[tuple[str, Any]] = Counter()
        self.scheduler: Any = None
        self.under_way: set[asyncio.Task[None]] = set()

    async def start(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        scheduler.handlers[RUN_AGAIN] = self.run_again
        scheduler.handlers[ELSEWHERE] = self.elsewhere
        scheduler.handlers["abft_tsm2_quarantine"] = self.quarantine

    async def quarantine(self, after: int | None) -> None:
        """Retire from so many faults on, those that had them before as well."""
        self.quarantine_after = after
        for where in list(self.faults):
            self._retire_if_faulty(where)

    async def run_again(self, key: Any, task: Any, found: list[Any]) -> bool:
        """Release what a task has made, so that it runs again, and with it what it needs; False where it cannot.

        `task` is the one that reads it, and will have to know what it found in this run.
        """
        source, attempt = self.scheduler.tasks.get(key), (RUN_AGAIN, key)
        if source is None or not source.run_spec:
            return False
        if source.state == "memory":  # else another reader has asked
            self.attempts[attempt] += 1
            if self.attempts[attempt] > ATTEMPTS:
                return False
            self.scheduler.transitions({key: "released"}, stimulus_id=f"abft-tsm2-{self.attempts[attempt]}")
        self._remember(task, found)
        return True

    def _remember(self, key: Any, found: list[Any]) -> None:
        """Have the next run of a task know what this one found: its worker is sent the annotations."""
        task = self.scheduler.tasks.get(key)
        if task is not None:
            before = task.annotations or {}
            task.annotations = {**before, FOUND: [*before.get(FOUND, ()), *found]}

    def transition(self, key: Any, start: str, finish: str, *args: Any, **kwargs: Any) -> None:
        if finish == "forgotten":
            for handler in (RUN_AGAIN, ELSEWHERE):
                self.attempts.pop((handler, key), None)

    async def elsewhere(self, task: Any, worker: str, found: list[Any]) -> bool:
        """Keep a task from running on that worker; False where there is no other."""
        scheduler, known = self.scheduler, self.scheduler.tasks.get(task)
        self.attempts[ELSEWHERE, task] += 1
        before = getattr(known, "worker_restrictions", None) or {ws.address for ws in scheduler.running}
        others = {address for address in before if address in scheduler.workers} - {worker}
        if known is None or not others or self.attempts[ELSEWHERE, task] > ATTEMPTS:
            return False
        scheduler.set_restrictions(worker={task: list(others)})
        self._remember(task, found)
        return True

    def log_event(self, topic: str, msg: Any) -> None:
        """Count faults, and retire where there are too many."""
        if topic != events.FAULTS or "retired" in msg:
            return
        where = msg["host"], msg["device"]
        self.faults[where] += 1
        self._retire_if_faulty(where)

    def _retire_if_faulty(self, where: tuple[str, str]) -> None:
        if (
            self.quarantine_after is not None
            and self.faults[where] >= self.quarantine_after
            and where not in self.retired
        ):
            self.retired.add(where)
            self._later(self._retire(where))

    def add_worker(self, scheduler: Any, worker: str) -> None:
        if self.retired:  # it may be there again, under another address
            self._later(self._retire_if_known(worker))

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)

    async def _retire(self, where: tuple[str, str]) -> None:
        places = await self._places(list(self.scheduler.workers))
        there = [address for address, at in places.items() if at == where]
        if not there:
            return
        if len(there) == len(places):
            self.retired.discard(where)
            text = f"{where[0]}, {where[1]} has had {self.faults[where]} faults and is all that is left: kept"
            self.scheduler.log_event(events.FAULTS, {"retired": "", "why": text})
            return
        await self._close(there, where)

    async def _retire_if_known(self, worker: str) -> None:
        where = (await self._places([worker])).get(worker)
        if where in self.retired:
            await self._close([worker], where)

    async def _close(self, workers: list[str], where: tuple[str, str]) -> None:
        text = f"{where[0]}, {where[1]} has had {self.faults[where]} faults: retired"
        self.scheduler.log_event(events.FAULTS, {"retired": ", ".join(workers), "why": text})
        await self.scheduler.retire_workers(workers=workers, close_workers=True, remove=True)

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
