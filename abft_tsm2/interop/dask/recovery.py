"""Recover a block that changed between two tasks: restored, fetched again, or made again.

Dask itself does not: ``retries=`` runs the task that complains once more, on the same corrupt block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from abft_tsm2.arrays import to_host
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.place import located, worker
from abft_tsm2.report import Fault, Status

RUN_AGAIN, ELSEWHERE = "abft_tsm2_run_again", "abft_tsm2_elsewhere"  # what the scheduler is asked for
FOUND = "abft_tsm2_found"  # annotation of a task: what steps of it found in earlier runs


class Rerun(Exception):
    """The sources of a block run again: this task has to wait for them. The fault that was found is its argument."""


_one_at_a_time = threading.Lock()  # tasks of two threads may find the same block changed


def recovered(name: str, block: Block, identity: str) -> list[tuple[Status, Fault]]:
    """Recover a block that changed, in its place, and say how; nothing where another task has recovered it already.
    `identity`: of the step that reads it.

    Raises
    ------
    Rerun
        The scheduler has released the block, and the tasks behind it run again.

    Notes
    -----
    A block that could not be recovered is left as it is: its fault names no repair.
    """
    with _one_at_a_time:
        return [_recovered(name, block, identity)] if bool(block.words.differ(block.array)) else []


def _recovered(name: str, block: Block, identity: str) -> tuple[Status, Fault]:
    if block.words.damaged(block.array):
        block.words = WordSums.of(block.array)
        return Status.CHECKSUM_FAULT, Fault(name, "checksum", (), (), 0, float("nan"), "its sums taken again")
    if (found := block.words.restored(block.array)) is not None:
        array, rows, columns = found
        fault = _fault(name, block.array, array, rows, columns)
        block.array = array
        return Status.CORRECTED, fault
    lost = (name, "block", *block.words.lines(block.array), 0, float("nan"))
    key = _known_as(block)
    if (source := _fetch_again(block, key)) is not None:
        return Status.CORRECTED, Fault(*lost, f"fetched again from {source}")
    again = Fault(*lost, "made again from its sources")
    if key is not None and _ask(RUN_AGAIN, identity, [again], key=key):
        raise Rerun(again)
    return Status.INPUT_CHANGED, Fault(*lost)


def elsewhere(identity: str, faults: Iterable[Fault]) -> bool:
    """Ask for another worker to run this thread's task, a step of which has found these faults and cannot repair them;
    False where there is no other, or no scheduler to ask."""
    here = worker()
    found = [replace(fault, repair=fault.repair or "computed again by another worker") for fault in faults]
    return here is not None and _ask(ELSEWHERE, identity, found, worker=here.address)


def found_before(identity: str) -> list[Fault]:
    """What a step found in earlier runs of this thread's task, which then had to wait, or was given to this worker."""
    here = worker()
    task = None if here is None else here.state.tasks.get(here.get_current_task())
    kept = () if task is None else (task.annotations or {}).get(FOUND, ())
    return [Fault.from_dict(fault) for step, fault in kept if step == identity]


def _ask(handler: str, identity: str, faults: Iterable[Fault], **what: Any) -> bool:
    """Whether the scheduler did what `scheduler` has it do, and keeps the faults for the next run of this step; False
    where that is not installed."""
    from distributed.utils import sync

    here = worker()
    if here is None:
        return False
    found = [[identity, located(fault).to_dict()] for fault in faults]
    given = {"task": here.get_current_task(), "found": found, **what}
    try:
        return bool(sync(here.loop, getattr(here.scheduler, handler), **given))
    except (AttributeError, KeyError, OSError):
        return False


def _known_as(block: Block) -> Any:
    """The key that the task under way reads the block by: where Dask has fused the one that made it with another, that
    is an alias, and the task behind it has no data."""
    here = worker()
    task = None if here is None else here.state.tasks.get(here.get_current_task())
    for needed in () if task is None else list(task.dependencies):
        if _holds(here.data.get(needed.key), block):
            return needed.key
    return block.key


def _holds(value: Any, block: Block) -> bool:
    return value is block or (isinstance(value, tuple) and any(_holds(part, block) for part in value))


def _fetch_again(block: Block, key: Any) -> str | None:
    """Take the block from another worker that has it, and say which; None where none has it as it was."""
    here = worker()
    if here is None or key is None:
        return None
    from distributed.utils import sync
    from distributed.utils_comm import gather_from_workers

    holders = sync(here.loop, here.scheduler.who_has, keys=[key]).get(key, ())
    for holder in holders:
        if holder != here.address:
            data, *_ = sync(here.loop, gather_from_workers, {key: [holder]}, rpc=here.rpc)
            other = data.get(key)
            if isinstance(other, Block) and not other.changed() and not block.words.differ(other.array):
                block.array = other.array
                return str(holder)
    return None


def _fault(name: str, held: Any, restored: Any, rows: Any, columns: Any) -> Fault:
    """What was wrong at these places."""
    at = tuple(rows), tuple(columns)
    with np.errstate(all="ignore"):
        off = np.abs(to_host(held[at]).astype(np.float64) - to_host(restored[at]).astype(np.float64))
    size = float(off.max()) if off.size and not np.isnan(off).any() else float("nan")
    kind = "element" if len(rows) == 1 else "block"
    where = tuple(np.unique(rows).tolist()), tuple(np.unique(columns).tolist())
    return Fault(name, kind, *where, len(rows), size, "restored bit for bit from the sums it travelled with")
