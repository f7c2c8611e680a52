"""Recover a block that changed between two tasks: restored, fetched again, or made again.

Dask itself does not: ``retries=`` runs the task that complains once more, on the same corrupt block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, to_host
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.interop.dask import delivered, events
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.messages import ELSEWHERE, FOUND, RAISED, RUN_AGAIN
from abft_tsm2.interop.dask.place import located, worker
from abft_tsm2.report import Fault, Status


class Rerun(Exception):
    """The sources of a block run again: this task has to wait for them. The fault that was found is its argument."""


_one_at_a_time = threading.Lock()  # tasks of two threads may find the same block changed


def recovered(name: str, block: Block, identity: str, before: Iterable[Fault] = ()) -> list[tuple[Status, Fault]]:
    """Recover a block that changed, in its place, and say how; nothing where another task has recovered it already.

    Parameters
    ----------
    name : str
    block : Block
    identity : str
        Of the step that reads it.
    before : iterable of Fault
        What this step has found already.

    Raises
    ------
    Rerun
        The scheduler has released the block, and the tasks behind it run again.

    Notes
    -----
    A block that could not be recovered is left as it is: its fault names no repair.
    """
    with _one_at_a_time:
        return [_recovered(name, block, identity, before)] if bool(block.words.differ(block.array)) else []


def _recovered(name: str, block: Block, identity: str, before: Iterable[Fault]) -> tuple[Status, Fault]:
    if block.words.damaged(block.array):
        block.words = WordSums.of(block.array)
        return Status.CHECKSUM_FAULT, Fault(name, "checksum", (), (), 0, float("nan"), "its sums taken again")
    changed = block.array
    if (found := block.words.restored(changed)) is not None:
        block.array, rows, columns = found
        fault = _fault(name, changed, block.array, rows, columns)
        return Status.CORRECTED, _in_result(fault, changed, block.array)
    lost = (name, "block", *block.words.lines(changed), 0, float("nan"))
    key = _known_as(block)
    if (source := _fetch_again(block, key)) is not None:
        return Status.CORRECTED, _in_result(Fault(*lost, f"fetched again from {source}"), changed, block.array)
    again = Fault(*lost, "made again from its sources")
    if key is not None and _ask(RUN_AGAIN, identity, [*before, again], key=key):
        raise Rerun(again)
    return Status.INPUT_CHANGED, Fault(*lost)


def _in_result(fault: Fault, changed: Array, now: Array) -> Fault:
    """The fault of a block that has another array `now`, once the result that was returned in its old one has these
    words as well."""
    if not delivered.written_back(changed, now):
        return fault
    return replace(fault, repair=f"{fault.repair}, in the result that was returned as well")


def elsewhere(identity: str, faults: Iterable[Fault]) -> bool:
    """Ask for another worker to run this thread's task, a step of which has found these faults and cannot repair them;
    False where there is no other, or no scheduler to ask."""
    here = worker()
    then = "computed again by another worker"
    found = [replace(fault, repair=f"{fault.repair}, then {then}" if fault.repair else then) for fault in faults]
    return here is not None and _ask(ELSEWHERE, identity, found, worker=here.address)


def found_before(identity: str) -> list[Fault]:
    """What a step found in earlier runs of this thread's task, which then had to wait, or was given to this worker."""
    return [Fault.from_dict(fault) for step, fault in _found(_task()) if step == identity]


def remember(identity: str, faults: Iterable[Fault]) -> None:
    """Keep what a step has found until its task ends: a later step may have the task run again."""
    task = _task()
    if task is not None and (found := _entries(identity, faults)):
        task.annotations = {**(task.annotations or {}), FOUND: [*_found(task), *found]}


def raised() -> None:
    """Tell the scheduler that a step of this thread's task has raised for what was found: if the task is tried again,
    as by ``retries=``, it begins anew."""
    if _found(_task()):
        _call(RAISED)


def _ask(handler: str, identity: str, faults: Iterable[Fault], **what: Any) -> bool:
    """Whether the scheduler did what `guard` has it do, and keeps what was found for the next run of the task."""
    return _call(handler, found=[*_found(_task()), *_entries(identity, faults)], **what)


def _call(handler: str, **what: Any) -> bool:
    """What the scheduler says; False where there is none, or it has no such handler."""
    from distributed.utils import sync

    here = worker()
    if here is None or not events.guarded(here):
        return False
    try:
        return bool(sync(here.loop, getattr(here.scheduler, handler), task=here.get_current_task(), **what))
    except OSError:
        return False


def _task() -> Any:
    """This thread's task, as its worker knows it; None outside of a cluster."""
    here = worker()
    return None if here is None else here.state.tasks.get(here.get_current_task())


def _found(task: Any) -> list[Any]:
    return [] if task is None else (task.annotations or {}).get(FOUND, [])


def _entries(identity: str, faults: Iterable[Fault]) -> list[Any]:
    return [[identity, located(fault).to_dict()] for fault in faults]


def _known_as(block: Block) -> Any:
    """The key that the task under way reads the block by: where Dask has fused the one that made it with another, that
    is an alias, and the task behind it has no data."""
    here, task = worker(), _task()
    for needed in () if task is None else list(task.dependencies):
        if _holds(here.data.get(needed.key), block):
            return needed.key
    return block.key


def _holds(value: Any, block: Block) -> bool:
    return value is block or (isinstance(value, tuple) and any(_holds(part, block) for part in value))


def _fetch_again(block: Block, key: Any) -> str | None:
    """Take the block from a worker that has another copy, and say which; None where none has it as it was. This worker
    has one where the block was made again while the task held on to the old one."""
    here = worker()
    if here is None or key is None:
        return None
    from distributed.utils import sync
    from distributed.utils_comm import gather_from_workers

    if _taken(here.data.get(key), block):
        return str(here.address)
    holders = sync(here.loop, here.scheduler.who_has, keys=[key]).get(key, ())
    for holder in holders:
        if holder != here.address:
            data, *_ = sync(here.loop, gather_from_workers, {key: [holder]}, rpc=here.rpc)
            if _taken(data.get(key), block):
                return str(holder)
    return None


def _taken(other: Any, block: Block) -> bool:
    """Whether the block has got the array of another one, which is as it was."""
    if not isinstance(other, Block) or other is block or other.changed() or block.words.differ(other.array):
        return False
    block.array = other.array
    return True


def _fault(name: str, held: Any, restored: Any, rows: Any, columns: Any) -> Fault:
    """What was wrong at these places."""
    at = tuple(rows), tuple(columns)
    with np.errstate(all="ignore"):
        off = np.abs(to_host(held[at]).astype(np.float64) - to_host(restored[at]).astype(np.float64))
    size = float(off.max()) if off.size and not np.isnan(off).any() else float("nan")
    kind = "element" if len(rows) == 1 else "block"
    where = tuple(np.unique(rows).tolist()), tuple(np.unique(columns).tolist())
    return Fault(name, kind, *where, len(rows), size, "restored bit for bit from the sums it travelled with")
