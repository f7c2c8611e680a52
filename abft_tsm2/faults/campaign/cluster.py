"""Workers of a Dask cluster that carry out scenes of a campaign.

A task is some trials of one scene. The worker does not carry them out itself: each of its threads keeps a process like
those of `workers`, with one BLAS thread, for them. So a trial that ends its process, or does not answer in time, costs
what it costs on one machine, its line says the same, and the worker goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
import pkgutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from abft_tsm2 import __version__
from abft_tsm2.errors import AbftError
from abft_tsm2.faults.campaign.file import Campaign, parse
from abft_tsm2.faults.campaign.workers import BATCH, ONE_THREAD, Line, Pool, Unit, Worker, line, serve
from abft_tsm2.faults.trials.trial import Finding

CONNECT = 8.0  # seconds that a scheduler may take to answer
TRIALS = 4 * BATCH  # of a task: what an interruption loses of each, and what one worker has when others have nothing
AHEAD = 2  # tasks for each thread: one is carried out, one is there when it ends
TURN = 1.0  # seconds after which new workers are seen where no task has ended
IDLE = 60.0  # seconds after which a process without trials ends: campaigns end, and so may the command, without a word


class ClusterError(AbftError):
    """A cluster cannot carry out a campaign, or can no more; the message says why and what to do next."""


# ---- here ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(campaign: Campaign, scheduler: str, gpu: bool, tell: Callable[[str], None]) -> Iterator[Cluster]:
    """Connect to a scheduler, by its address or by the file that it has written it to, and wait for its first worker.

    Raises
    ------
    ClusterError
        If Dask is not installed, if no scheduler answers, or if a worker has another version of this package.
    """
    try:
        distributed = importlib.import_module("distributed")
    except ImportError as error:
        raise ClusterError(f'a cluster needs Dask ({error}): pip install "abft_tsm2[dask]"') from error
    scheduler = _address(scheduler)
    given = {"address": scheduler, "timeout": CONNECT, "set_as_default": False}
    try:
        with ThreadPoolExecutor(1) as apart:  # a notebook has a loop of its own in this thread
            apart.submit(asyncio.run, _answers(distributed.Client, given)).result()
        client = distributed.Client(**given)
    except Exception as error:  # of an address, a protocol, a version of Dask
        raise ClusterError(
            f"no Dask scheduler answers at {scheduler}: {_words(error)}; start one with dask scheduler, and give the "
            "address that it prints"
        ) from error
    with _silenced("distributed.client"), contextlib.closing(client):
        cluster = Cluster(campaign, client, scheduler, gpu, tell)
        while not cluster.threads():
            time.sleep(TURN)
        _require_same_versions(client)
        yield cluster


def _address(scheduler: str) -> str:
    """The address of a scheduler, which a file may hold."""
    if not Path(scheduler).is_file():
        return scheduler
    try:
        return str(json.loads(Path(scheduler).read_text(encoding="utf-8"))["address"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ClusterError(
            f"{scheduler} is no scheduler file: {type(error).__name__}: {error}; dask scheduler "
            "--scheduler-file writes one"
        ) from error


async def _answers(kind: Any, given: dict[str, Any]) -> None:
    """Connect, and disconnect: a client waits for as long as something listens there that does not know Dask."""
    client = kind(**given, asynchronous=True)
    try:
        await asyncio.wait_for(client, 1.2 * CONNECT)
    finally:
        await client.close()


@contextlib.contextmanager
def _silenced(name: str) -> Iterator[None]:
    """Let a logger keep to itself what is said here in one line."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


class Cluster:
    """A Dask cluster, in the place of a `Pool`; `connected` makes it.

    Attributes
    ----------
    jobs : int
        Threads of its workers, now.
    """

    def __init__(self, campaign: Campaign, client: Any, scheduler: str, gpu: bool, tell: Callable[[str], None]) -> None:
        self.campaign, self.client, self.scheduler, self.gpu, self.tell = campaign, client, scheduler, gpu, tell
        self._told = False

    @property
    def jobs(self) -> int:
        return sum(self.client.nthreads().values())

    def threads(self) -> int:
        """Threads of the workers that there are now; says so, once, where there are none."""
        found = self.jobs
        if not found and not self._told:
            self.tell(f"the cluster has no workers, waiting for one: dask worker {self.scheduler}")
        self._told = not found
        return found

    def ask(self, question: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The answers of all workers that there are."""
        answers = self.client.run(question, *arguments, on_error="return")
        for worker, answer in answers.items():
            if isinstance(answer, Exception):
                raise ClusterError(f"worker {worker}: {answer}") from answer
        if not answers:
            raise ClusterError("the last worker of the cluster has just ended: run it again when there are others")
        return list(answers.values())

    def run(self, units: Sequence[Unit]) -> Iterator[Line]:
        """Carry out all units; yields a line for each trial, as they come in."""
        waiting = [part for unit in reversed(units) for part in reversed(parts(unit))]
        running: dict[Any, Unit] = {}
        try:
            while waiting or running:
                room = AHEAD * self.threads()
                while waiting and len(running) < (1 if _alone(waiting[-1], *running.values()) else room):
                    unit = waiting.pop()
                    given = (__version__, self.campaign.text, self.gpu, tuple(unit))
                    running[self.client.submit(_carry_out, *given, pure=False)] = unit
                for future in self._ended(list(running)):
                    yield from self._lines(future, running.pop(future), waiting)
        except (OSError, CancelledError) as error:  # the latter says it of each future
            raise ClusterError(
                f"the scheduler at {self.scheduler} answers no more; continue with --resume when it does"
            ) from error
        finally:
            for future in running:
                future.release()  # cancels what no other client asks for; the tasks see it and end their processes

    def _ended(self, futures: list[Any]) -> list[Any]:
        """Futures that have ended, none if none of them does soon."""
        if not futures:
            time.sleep(TURN)
            return []
        wait = importlib.import_module("distributed").wait
        try:
            with self.client.as_current():
                return list(wait(futures, timeout=TURN, return_when="FIRST_COMPLETED").done)
        except TimeoutError:
            return []

    def _lines(self, future: Any, unit: Unit, waiting: list[Unit]) -> Iterator[Line]:
        """The lines of a task that has ended; those of one that took its workers along are carried out one by one."""
        try:
            yield from future.result()
        except importlib.import_module("distributed").KilledWorker:
            if not unit.alone:
                waiting.extend(unit._replace(numbers=(number,), alone=True) for number in reversed(unit.numbers))
            else:
                note = "every Dask worker that carried it out has ended"
                yield line(self.campaign, unit.numbers[0], Finding("crash", note=note))
        except (AbftError, CancelledError):
            raise
        except Exception as error:
            raise ClusterError(f"a worker of the cluster cannot carry out trials: {_words(error)}") from error
        finally:
            future.release()  # or it would be carried out again if its worker ended


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def parts(unit: Unit) -> list[Unit]:
    """The tasks that a scene is given away in."""
    numbers = unit.numbers
    return [unit._replace(numbers=numbers[start : start + TRIALS]) for start in range(0, len(numbers), TRIALS)]


def _alone(*units: Unit) -> bool:
    """Whether one of these has ended workers: what is carried out beside it would be suspected with it."""
    return any(unit.alone for unit in units)


def _require_same_versions(client: Any) -> None:
    """ClusterError if the scheduler, which unpacks tasks, or a worker has another version than this, or none."""
    asked = (pkgutil.resolve_name, "abft_tsm2:__version__")  # no function of this package, which they could not load
    found = {f"worker {worker}": has for worker, has in client.run(*asked, on_error="return").items()}
    try:
        found["the scheduler"] = client.run_on_scheduler(*asked)
    except ImportError as error:
        found["the scheduler"] = error
    for where, version in found.items():
        if version != __version__:
            has = f"cannot import it ({version})" if isinstance(version, Exception) else f"has version {version}"
            raise ClusterError(f"this is abft_tsm2 {__version__}, and {where} {has}: install the same version on all")


# ---- on a worker ---------------------------------------------------------------------------------------------------


def _carry_out(version: str, text: str, gpu: bool, unit: tuple[Any, ...]) -> list[Line]:
    """The task."""
    if version != __version__:  # of a worker that has joined since
        raise ClusterError(
            f"the campaign was started by abft_tsm2 {version}, and a worker has version {__version__}: install the "
            "same version on all, and continue with --resume"
        )
    return list(_TaskPool(_parsed(text), gpu).run([Unit(*unit)]))


_parsed = lru_cache(maxsize=4)(parse)
_spare: list[Worker] = []  # processes that wait for trials: starting one takes as long as some hundred trials
_lock = threading.Lock()


class _TaskPool(Pool):
    """One process, for one task, which is kept for the next one."""

    ADVICE = "what it printed is in the log of the Dask worker"

    def __init__(self, campaign: Campaign, gpu: bool) -> None:
        super().__init__(campaign, 1, gpu)
        node = importlib.import_module("distributed").get_worker()
        self._tasks, self._key = node.state.tasks, node.get_current_task()

    def heed(self) -> None:
        """End with the task: a thread of a worker cannot be stopped from outside."""
        task = self._tasks.get(self._key)
        if task is None or task.state == "cancelled":
            raise ClusterError("the campaign was interrupted, or is over")

    def hire(self) -> Worker:
        with _lock:
            _spare[:] = [one for one in _spare if one.process.exitcode is None]
            for number, worker in enumerate(_spare):
                if (worker.campaign, worker.gpu) == (self.campaign, self.gpu):
                    return _spare.pop(number)
        return Worker(self.campaign, self.gpu, *_started(self.campaign.text, self.gpu))

    def dismiss(self, worker: Worker) -> None:
        with _lock:
            _spare.append(worker)


class _Process(subprocess.Popen[bytes]):
    """A process with what `workers` asks of one. Those of multiprocessing are not for workers, which are daemons."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def join(self) -> None:
        self.wait()

    def terminate(self) -> None:
        self.kill()
        self.wait()


def _started(text: str, gpu: bool) -> tuple[_Process, Connection]:
    """A process with one BLAS thread that carries out units, and our end of its pipe."""
    ours, theirs = Pipe()
    path = os.pathsep.join(one or os.getcwd() for one in sys.path)
    process = _Process(
        [sys.executable, "-P", "-c", f"from {__name__} import _serve; _serve({theirs.fileno()})"],
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
    )
    theirs.close()  # or the end of the process would not be seen
    with contextlib.suppress(BrokenPipeError):  # it is seen when it is waited for
        ours.send((text, gpu))
    return process, ours


def _serve(handle: int) -> None:
    pipe = Connection(handle)
    text, gpu = pipe.recv()
    serve(text, gpu, pipe, IDLE)
