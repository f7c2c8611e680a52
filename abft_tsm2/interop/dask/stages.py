"""What `on_stage` sees of a task, and sums that are taken there: of what is checked next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from abft_tsm2.checksum.words import WordSums
from abft_tsm2.interop.dask.task import GraphOptions, Hook


def hook_of(options: GraphOptions, step: tuple[Any, ...]) -> Hook | None:
    """The hook of the caller, which is told the task that it is called in."""
    hook = options.on_stage
    if hook is None:
        return None

    def told(stage: str, arrays: Mapping[str, Any]) -> None:
        hook(stage, {**arrays, "task": step})

    return told


def watched(hook: Hook | None, stages: Mapping[str, str], taken: list[WordSums]) -> Hook:
    """The same hook, and sums of an array taken at each of these stages, after it: before the check reads the array.
    What changes later is not what was checked."""

    def watch(stage: str, arrays: Mapping[str, Any]) -> None:
        if hook is not None:
            hook(stage, arrays)
        if stage in stages:
            taken[:] = [WordSums.of(arrays[stages[stage]])]

    return watch
