"""Run a campaign, resume it, and replay one of its trials."""

from __future__ import annotations

import importlib
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from abft_tsm2.errors import NotSuitable
from abft_tsm2.faults.analysis.sharpness import Sharpness
from abft_tsm2.faults.campaign.cluster import Cluster, connected
from abft_tsm2.faults.campaign.file import Campaign, load, require_device
from abft_tsm2.faults.campaign.folder import CAMPAIGN, CampaignFileError, Folder, earlier, line_of, plain
from abft_tsm2.faults.campaign.machine import require_jobs, require_machine
from abft_tsm2.faults.campaign.workers import Line, Pool, Unit, alone, array_module, carry_out, line
from abft_tsm2.faults.trials.flushing import require, want
from abft_tsm2.faults.trials.trial import Finding, breach
from abft_tsm2.io import versions

GPU_JOBS = 8  # processes on one GPU: the host has more to do for a trial than the card
MPS = "nvidia-cuda-mps-control"
FLUSHED = "flushed"  # of a manifest: whether subnormal numbers were zero

Progress = Callable[["Count"], None]


@dataclass
class Count:
    """The progress of a campaign: trials planned, those that were there at its begin, and the outcomes since.

    Attributes
    ----------
    broken : int
        Trials that break a promise of a scheme that protects, those that were there included.
    sharpness : Sharpness
        How sharp the checks were, in all trials: `Sharpness.broken` has the promises that all of them together break.
    """

    planned: int
    before: int
    outcomes: Counter[str] = field(default_factory=Counter)
    broken: int = 0
    sharpness: Sharpness = field(default_factory=Sharpness)
    begun: float = field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        return self.before + sum(self.outcomes.values())

    @property
    def rate(self) -> float:
        """Trials in a second."""
        return (self.done - self.before) / max(time.monotonic() - self.begun, 1e-9)

    def add(self, one: Line) -> None:
        self.outcomes[one["outcome"]] += 1
        self.broken += bool(breach(one))


def run(
    campaign: Campaign,
    folder: str | Path,
    *,
    resume: bool = False,
    jobs: int | None = None,
    scheduler: str | None = None,
    gpu: bool = False,
    flush: bool = False,
    command: str = "",
    progress: Progress = lambda count: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Count:
    """Carry out a campaign.

    Parameters
    ----------
    campaign : Campaign
        From `load`.
    folder : path
        Where it is written: ``campaign.toml``, ``manifest.json``, and a line for each trial in ``trials.jsonl``.
    resume : bool
        Go on with what is in the folder.
    jobs : int, optional
        Worker processes, of one BLAS thread each; by default one for each core, and `GPU_JOBS` of them for a GPU, which
        keep it busy between them. 0: this process, which a trial that hangs or dies takes with it.
    scheduler : str, optional
        Address of the scheduler of a Dask cluster, or the file that it has written it to: processes of its workers, one
        for each of their threads, carry out the trials.
    gpu : bool
        Compute on the current GPU, and judge products there; factorisations are judged on the host.
    flush : bool
        Take subnormal numbers for zero in the calls that are tried, results and operands (x86-64, glibc).
    command : str
        How to carry it out again, for the report.
    progress : callable
        Called with the `Count` after each trial.
    tell : callable
        Called with a text where a cluster has to be waited for.

    Returns
    -------
    Count

    Raises
    ------
    CampaignFileError
        If the folder cannot be used, or a file of operands; or the campaign, on a GPU; or the machine lacks a library,
        or memory.
    NotSuitable
        If there is no GPU, or for more `jobs` than do any good; or if it is not known how this machine flushes.
    ClusterError
        If the cluster cannot be used, or is lost.
    ValueError
        For both `jobs`, or `flush`, and `scheduler`.

    Notes
    -----
    An exception, a signal, or the end of the machine leaves all trials that were done, but those of the last second.
    """
    require_device(campaign, gpu)
    if flush:
        require()
    with _pool(campaign, jobs, scheduler, gpu, flush, tell) as pool:
        pool.ask(require_machine, campaign)
        return _run(pool, folder, resume, flush, command, progress)


def _run(
    pool: Pool | Cluster, folder: str | Path, resume: bool, flush: bool, command: str, progress: Progress
) -> Count:
    campaign, (device, libraries) = pool.campaign, _together(pool.ask(_machine, pool.gpu))
    with Folder(Path(folder), campaign.text, resume=resume) as kept:
        before = earlier(kept.path) if resume else {}
        if before and before.get(FLUSHED, False) != flush:
            raise CampaignFileError(
                f"{kept.path} was begun {'with' if before.get(FLUSHED) else 'without'} --flush: go on so, or choose "
                "another folder"
            )
        left = units(campaign, kept.done)
        count = Count(campaign.trials, len(kept.done), broken=kept.broken, sharpness=kept.sharpness)
        manifest = {
            "name": campaign.name,
            "seed": campaign.seed,
            "trials": campaign.trials,
            "device": device,
            "versions": libraries,
            "started": before.get("started") or _now(),
            "finished": None,
            "seconds": before.get("seconds", 0.0),
            "command": command,
            "jobs": pool.jobs,
            **({FLUSHED: True} if flush else {}),
        }
        kept.manifest(manifest)
        try:
            for one in pool.run(left):
                kept.append(one)
                count.add(one)
                progress(count)
        finally:
            finished = _now() if len(kept.done) == campaign.trials else None
            kept.flush()
            kept.manifest(
                manifest | {"finished": finished, "seconds": manifest["seconds"] + time.monotonic() - count.begun}
            )
    return count


def _pool(
    campaign: Campaign, jobs: int | None, scheduler: str | None, gpu: bool, flush: bool, tell: Callable[[str], None]
) -> AbstractContextManager[Pool | Cluster]:
    if scheduler is not None:
        if jobs is not None:
            raise ValueError(f"jobs = {jobs} are processes of this machine: leave it out, or the scheduler")
        if flush:
            raise ValueError("flush is for processes of this machine: leave it out, or the scheduler")
        return connected(campaign, scheduler, gpu, tell)
    if jobs is None:
        jobs = min(GPU_JOBS, versions.cores()) if gpu else versions.cores()
    require_jobs(jobs)
    return nullcontext(Pool(campaign, jobs, gpu, flush))


def units(campaign: Campaign, done: set[int]) -> list[Unit]:
    """What is left to do, scene by scene."""
    found = []
    for index, suite in enumerate(campaign.suites):
        first = campaign.first(index)
        for scene in range(suite.scenes):
            numbers = tuple(first + number for number in suite.numbers(scene) if first + number not in done)
            if numbers:
                found.append(Unit(index, scene, numbers))
    return found


@dataclass(frozen=True)
class Replayed:
    """A trial that was carried out again: its line, the line that was written then, if any, and what was found."""

    line: Line
    before: Line | None
    finding: Finding

    @property
    def differing(self) -> list[str]:
        """The entries that are otherwise than they were then, times aside."""
        if self.before is None:
            return []
        now, then = plain(self.line), self.before
        return [name for name in {**now, **then} if name != "seconds" and now.get(name) != then.get(name)]

    @property
    def same(self) -> bool:
        """Whether the trial ended as it did then, times aside."""
        return not self.differing


def replay(folder: str | Path, number: int, *, gpu: bool = False) -> Replayed:
    """Carry out one trial of a campaign again, alone, in a process like those of the campaign.

    Raises
    ------
    CampaignFileError
        If the folder has no campaign, or the campaign no such trial.
    """
    path = Path(folder)
    campaign = load(path / CAMPAIGN)
    try:
        place = campaign.place(number)
    except IndexError as error:
        raise CampaignFileError(f"{path}: {error}") from error
    _device(gpu)
    then = earlier(path)
    if then.get("jobs") == 0:
        want(then.get(FLUSHED, False))
        _, finding = next(carry_out(campaign, Unit(*place, (number,), True), array_module(gpu)))
    else:
        finding = alone(campaign, number, gpu, then.get(FLUSHED, False))
    return Replayed(line(campaign, number, finding), line_of(path, number), finding)


def _machine(gpu: bool) -> tuple[str, dict[str, Any]]:
    """What a manifest says about a machine that carries out trials: its device and its libraries."""
    return _device(gpu), versions.collected()["versions"] | {"blas kernel": _blas_kernel()}


def _together(machines: Sequence[tuple[str, dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    """What a manifest says about several; where they differ, all that they have."""
    devices = Counter(device for device, _ in machines)
    libraries = {
        name: different[0] if len(different) == 1 else ", ".join(map(str, different))
        for name in machines[0][1]
        if (different := list(dict.fromkeys(each[name] for _, each in machines)))
    }
    if len(machines) == 1:
        return machines[0][0], libraries
    return "; ".join(f"{number} workers: {device}" for device, number in devices.items()), libraries


def _device(gpu: bool) -> str:
    if not gpu:
        return f"{versions.processor()}, {versions.cores()} cores"
    try:
        import cupy

        from abft_tsm2.core.device import query

        return query(cupy.cuda.runtime.getDevice()).name + ", shared by MPS" * side_by_side()
    except (ImportError, NotSuitable) as error:
        raise NotSuitable(f"there is no GPU to run a campaign on: {error}; leave --device gpu away") from error


def _blas_kernel() -> str | None:
    """Which of its kernels the BLAS of NumPy has chosen for this processor, or was told to by OPENBLAS_CORETYPE; None
    where that is not known because threadpoolctl is not installed."""
    try:
        threadpools = importlib.import_module("threadpoolctl")
    except ImportError:
        return None
    loaded = [one for one in threadpools.threadpool_info() if one["user_api"] == "blas"]
    return ", ".join(dict.fromkeys(f"{one['internal_api']} {one.get('architecture')}" for one in loaded)) or None


def side_by_side() -> bool:
    """Whether processes may use the GPU at the same time: NVIDIA's Multi-Process Service runs. Else they take turns."""
    try:
        asked = subprocess.run([MPS], input="get_server_list\n", text=True, capture_output=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
