"""What `on_stage` sees of a task, and sums that are taken there: of what is checked next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from abft_tsm2.arrays import Array
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.core import faultpoint
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.task import GraphOptions, Hook
from abft_tsm2.report import Report, Status


def hook_of(options: GraphOptions, step: tuple[Any, ...]) -> Hook | None:
    """The hook of the caller, which is told the task that it is called in."""
    hook = options.on_stage
    if hook is None:
        return None

    def told(stage: str, arrays: Mapping[str, Any]) -> None:
        hook(stage, {**arrays, "task": step})

    return told


def watched(
    hook: Hook | None,
    stages: Mapping[str, str],
    taken: list[WordSums],
    sums: Callable[[Array], WordSums] = WordSums.of,
) -> Hook:
    """The same hook, or a planter of faults, and sums of an array taken at each of these stages, after it: before the
    check reads the array. What changes later is not what was checked."""

    def watch(stage: str, arrays: Mapping[str, Any]) -> None:
        if (watcher := faultpoint.watcher(hook)) is not None:
            watcher(stage, arrays)
        if stage in stages:
            taken[:] = [sums(arrays[stages[stage]])]

    return watch


def checked(X: Array, before: Iterable[Report], report: Report, taken: list[WordSums]) -> Block:
    """The block of a result, and its report behind those `before`. Its sums are those that were taken as it was
    checked, unless the check had anything to repair."""
    words = taken[0] if report.status is Status.CLEAN and taken and X.flags.forc else None
    return Block.of(X, (*before, report), words)
