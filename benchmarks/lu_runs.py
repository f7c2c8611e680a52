"""Cases of a campaign, spread over processes that have one BLAS thread each.

A process that dies (LAPACK follows a wrong pivot out of the matrix) or hangs costs the case it was at and no other.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from abft_tsm2.faults.campaign.workers import end_of, started
from abft_tsm2.io.versions import cores

T = TypeVar("T")
Judge = Callable[[int], T]
LIMIT = 600.0
"""Seconds after which a case counts as hung."""


@dataclass(frozen=True)
class Lost:
    """What is known of a case whose process did not come back with an answer."""

    reason: str


def spread(judge: Judge[T], indices: Iterable[int], jobs: int) -> Iterator[tuple[int, T | Lost]]:
    """``judge(index)`` of each index as it comes in, from `jobs` processes; with 0 jobs in this one, in order.

    `judge` has to be importable by name, or a partial of what is.
    """
    if jobs == 0:
        yield from ((index, judge(index)) for index in indices)
        return
    queue, busy = iter(indices), dict[Any, _Worker]()

    def begin(worker: _Worker | None) -> None:
        """The next case, for this worker or for a new one."""
        index = next(queue, None)
        if index is not None:
            worker = worker or _Worker(judge)
            worker.give(index)
            busy[worker.pipe] = worker
        elif worker is not None:
            worker.give(None)

    try:
        for _ in range(jobs):
            begin(None)
        while busy:
            for pipe in wait(list(busy), timeout=1.0):
                worker = busy.pop(pipe)
                index, answer = worker.index, worker.answer()
                begin(None if isinstance(answer, Lost) else worker)
                yield index, answer
            for worker in [worker for worker in busy.values() if worker.overdue]:
                busy.pop(worker.pipe).process.kill()
                begin(None)
                yield worker.index, Lost(f"no answer after {LIMIT:.0f} s")
    finally:
        for worker in busy.values():
            worker.process.terminate()


class _Worker:
    """A process and the case it is at."""

    def __init__(self, judge: Judge[Any]) -> None:
        self.process, self.pipe = started(_work, judge)
        self.index, self.begun = -1, 0.0

    def give(self, index: int | None) -> None:
        """A case, or None: there are no more."""
        self.index, self.begun = -1 if index is None else index, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # answer() tells
            self.pipe.send(index)

    def answer(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return Lost(end_of(self.process))

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.begun > LIMIT


def _work(judge: Judge[Any], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    with contextlib.suppress(EOFError):
        while (index := pipe.recv()) is not None:
            pipe.send(judge(index))


def common_options(parser: argparse.ArgumentParser, count: int, output: str) -> None:
    """The options of every campaign."""
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=cores(), help="processes; default: one a core")
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="INDEX", help="these again, with reports")
    parser.add_argument("--output", default=output, metavar="NAME", help="results/NAME.csv")


class Progress:
    """A line on stderr every few seconds."""

    def __init__(self, what: str, every: float = 10.0) -> None:
        self.what, self.every, self.told = what, every, time.monotonic()

    def __call__(self, done: int, failures: int) -> None:
        if time.monotonic() - self.told >= self.every:
            self.told = time.monotonic()
            print(f"{done} {self.what}, {failures} failures", file=sys.stderr, flush=True)
