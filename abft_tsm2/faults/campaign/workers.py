"""Processes that carry out scenes of a campaign, one BLAS thread each.

Each finding is sent to the parent process at once. A process that dies, or does not answer in time, loses the trial
that it was carrying out: the others of its scene are given to a new process, one by one, so that this trial is known.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from abft_tsm2.faults.campaign.file import Campaign, Suite, operation_of, parse
from abft_tsm2.faults.trials.flushing import want
from abft_tsm2.faults.trials.trial import Finding, Trial, TrialGroup, Workload

BATCH = 16  # trials that are carried out before they are judged together
READY = "ready"  # the first word of a process
START = 60.0  # seconds that it may take to say it
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # of BLAS
OF_TERMINAL = signal.SIGINT, signal.SIGHUP  # which it sends to all of its processes, at Ctrl-C and at its end


class Unit(NamedTuple):
    """Trials of one scene; `alone`: one at a time, because one of them has ended a process."""

    suite: int
    scene: int
    numbers: tuple[int, ...]
    alone: bool = False


Line = dict[str, Any]


def carry_out(campaign: Campaign, unit: Unit, xp: Any) -> Iterator[tuple[Line, Finding]]:
    """Carry out the trials of a scene, here; yields the line and the finding of each."""
    suite, workload = campaign.suites[unit.suite], campaign.workload(unit.suite, unit.scene)
    trials = [campaign.trial(number) for number in unit.numbers]
    try:
        scene: TrialGroup = operation_of(workload.operation).GROUP(workload, xp)
        findings = scene.run(trials, 1 if unit.alone else BATCH)
        for trial in trials:
            finding = next(findings)
            yield _line(suite, unit.scene, workload, trial, finding), finding
            trials = trials[1:]
    except Exception as error:  # of the experiment, not of what it tests: every remaining trial has failed
        for trial in trials:
            finding = Finding("crash", note=f"{type(error).__name__}: {error}")
            yield _line(suite, unit.scene, workload, trial, finding), finding


def line(campaign: Campaign, number: int, finding: Finding) -> Line:
    """What is written about a trial."""
    index, scene = campaign.place(number)
    return _line(campaign.suites[index], scene, campaign.workload(index, scene), campaign.trial(number), finding)


def _line(suite: Suite, scene: int, w: Workload, trial: Trial, finding: Finding) -> Line:
    plan = trial.plans[0] if trial.plans else None
    return {
        "trial": trial.number,
        "suite": suite.name,
        "scene": scene,
        "operation": suite.operation,
        "scheme": trial.scheme,
        "m": w.m,
        "k": w.k,
        "n": w.n,
        "dtype": w.dtype,
        "family": w.family,
        "order": w.order,
        "model": " + ".join(one.model for one in trial.plans),
        "site": " + ".join(dict.fromkeys(one.site for one in trial.plans)),
        "bits": plan.bits if plan is not None else "",
        "persistent": any(one.persistent for one in trial.plans),
        "single": len(trial.plans) == 1 and trial.plans[0].single,
        **finding.to_line(),
    }


class Pool:
    """Worker processes.

    Parameters
    ----------
    campaign : Campaign
    jobs : int
        Processes; 0: no other than this one, and none that could hang or die.
    gpu : bool
        Whether products are computed on a GPU.
    flush : bool
        Whether the calls that are tried take subnormal numbers for zero.
    """

    ADVICE = 'a script that starts them has to do it under if __name__ == "__main__", or pass jobs=0'

    def __init__(self, campaign: Campaign, jobs: int, gpu: bool, flush: bool = False) -> None:
        self.campaign, self.jobs, self.gpu, self.flush = campaign, jobs, gpu, flush

    def run(self, units: Sequence[Unit]) -> Iterator[Line]:
        """Carry out all units; yields a line for each trial, as they come in."""
        if self.jobs == 0:
            want(self.flush)
            xp = array_module(self.gpu)
            for unit in units:
                yield from (one for one, _ in carry_out(self.campaign, unit, xp))
            return
        waiting, busy = list(reversed(units)), dict[Any, Worker]()
        try:
            while waiting or busy:
                self.heed()
                while waiting and len(busy) < self.jobs:
                    worker = self.hire()
                    worker.give(waiting.pop())
                    busy[worker.pipe] = worker
                for pipe in wait(list(busy), timeout=0.2):
                    yield from self._received(busy, pipe, waiting)
                for worker in [worker for worker in busy.values() if worker.silent > worker.patience]:
                    worker.process.kill()
                    self._require_ready(worker, "it said nothing")
                    yield from self._lost(busy, worker, waiting, "hang", _silence(self.campaign))
        finally:
            for worker in busy.values():
                worker.process.terminate()

    def ask(self, question: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The answers of the machines that carry out trials: of this one."""
        return [question(*arguments)]

    def hire(self) -> Worker:
        """A process that has nothing to do."""
        work = functools.partial(serve, flush=self.flush)
        return Worker(self.campaign, self.gpu, *started(work, self.campaign.text, self.gpu))

    def dismiss(self, worker: Worker) -> None:
        """What becomes of a process that nothing is left for."""
        worker.stop()

    def heed(self) -> None:
        """Called several times a second: what it raises ends the run."""

    def _require_ready(self, worker: Worker, how: str) -> None:
        """RuntimeError if a process has never begun: that is no trial's fault."""
        if not worker.ready:
            raise RuntimeError(_no_start(how, self.ADVICE))

    def _received(self, busy: dict[Any, Worker], pipe: Any, waiting: list[Unit]) -> Iterator[Line]:
        """Receive what a worker has sent: a line, or that its unit is done; or notice that its process has ended."""
        worker = busy[pipe]
        try:
            message = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            how = end_of(worker.process)
            self._require_ready(worker, how)
            yield from self._lost(busy, worker, waiting, "crash", how)
            return
        worker.last = time.monotonic()
        if message == READY:
            worker.ready = True
        elif message is not None:
            worker.left.remove(message["trial"])
            yield message
        elif waiting:
            worker.give(waiting.pop())
        else:
            busy.pop(pipe)
            self.dismiss(worker)

    def _lost(
        self, busy: dict[Any, Worker], worker: Worker, waiting: list[Unit], outcome: str, note: str
    ) -> Iterator[Line]:
        busy.pop(worker.pipe)
        left = worker.left
        if left and worker.unit.alone:  # it was at the first of these
            yield line(self.campaign, left[0], Finding(outcome, note=note))
            left = left[1:]
        if left:
            waiting.append(worker.unit._replace(numbers=tuple(left), alone=True))


@dataclass
class Worker:
    """A process, and the trials of its scene that it has not answered for yet."""

    campaign: Campaign
    gpu: bool
    process: Any
    pipe: Connection

    def __post_init__(self) -> None:
        self.left: list[int] = []
        self.last = time.monotonic()
        self.ready = False

    def give(self, unit: Unit) -> None:
        self.unit, self.left, self.last = unit, list(unit.numbers), time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # the pipe shows it at the next wait
            self.pipe.send(tuple(unit))

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)

    @property
    def silent(self) -> float:
        """Seconds since the last word."""
        return time.monotonic() - self.last

    @property
    def patience(self) -> float:
        """For how many of them nothing is wrong."""
        return self.campaign.timeout if self.ready else max(START, self.campaign.timeout)


def alone(campaign: Campaign, number: int, gpu: bool, flush: bool = False) -> Finding:
    """One trial, in a process like those that campaigns are carried out by: so that BLAS rounds as it did there."""
    process, pipe = started(_work_once, campaign.text, gpu, flush, number)
    ready = False
    try:
        ready = pipe.poll(max(START, campaign.timeout)) and pipe.recv() == READY
        if not pipe.poll(campaign.timeout):
            return Finding("hang", note=_silence(campaign))
        found: Finding = pipe.recv()
        return found
    except (EOFError, ConnectionResetError) as error:
        if not ready:
            raise RuntimeError(_no_start(end_of(process), Pool.ADVICE)) from error
        return Finding("crash", note=end_of(process))
    finally:
        process.kill()


def started(work: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """A process with one BLAS thread that does `work` with these arguments and a pipe, and our end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(*arguments, theirs), daemon=True)
    kept = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)  # read by NumPy's first import, over there
    resource_tracker.ensure_running()  # which lifts the block itself
    heard = signal.pthread_sigmask(
        signal.SIG_BLOCK, OF_TERMINAL
    )  # until it heeds nothing but its parent; here they wait
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        for name, value in kept.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
    theirs.close()  # or the end of the process would not be seen
    return process, ours


def end_of(process: Any) -> str:
    """How a process has ended, in words."""
    process.join()
    code = process.exitcode or 0
    return f"its process ended with {f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}"


def _no_start(how: str, advice: str) -> str:
    return f"a process of the campaign did not start: {how}; {advice}"


def _silence(campaign: Campaign) -> str:
    return f"no answer after {campaign.timeout:g} s"


def array_module(gpu: bool) -> Any:
    """NumPy, or CuPy."""
    if not gpu:
        import numpy

        return numpy
    import cupy

    return cupy


def serve(text: str, gpu: bool, pipe: Connection, idle: float | None = None, *, flush: bool = False) -> None:
    """Carry out the units that come through a pipe, until None comes, or nothing for `idle` seconds."""
    _heed_the_parent()
    want(flush)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    campaign, xp = parse(text), array_module(gpu)
    with contextlib.suppress(EOFError, BrokenPipeError):
        pipe.send(READY)
        while pipe.poll(idle) and (given := pipe.recv()) is not None:
            unit = Unit(*given)
            for one, _ in carry_out(campaign, unit, xp):
                pipe.send(one)
            pipe.send(None)


def _work_once(text: str, gpu: bool, flush: bool, number: int, pipe: Connection) -> None:
    _heed_the_parent()
    want(flush)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    campaign, xp = parse(text), array_module(gpu)
    pipe.send(READY)
    unit = Unit(*campaign.place(number), (number,), True)
    pipe.send(next(carry_out(campaign, unit, xp))[1])


def _heed_the_parent() -> None:
    """What a terminal sends to all of its processes is for the parent to act on."""
    for number in OF_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_TERMINAL)  # what came meanwhile is ignored


def _end_with(parent: int) -> None:
    """End this process soon after its parent, which may be killed while a trial hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
