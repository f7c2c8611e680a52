"""Blocks of a result change in the memory that the user gets, while others read them, or after all have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dask
import numpy as np
import pytest
from distributed import get_worker

import abft_tsm2 as ft
from abft_tsm2.interop.dask import tiles
from abft_tsm2.report import Status
from benchmarks.dask_planting import SINGLE, damaged
from tests.support.dask_factors import CALLS, same

on_cluster = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:Sending large graph")


@pytest.fixture(autouse=True)
def _in_this_thread() -> Iterator[None]:
    with dask.config.set(scheduler="synchronous"):
        yield


class WhileRead:
    """A hook that changes an operand of one product in its memory, once it has been encoded."""

    def __init__(self, kind: str, name: str, number: int) -> None:
        self.kind, self.name, self.number = kind, name, number
        self.seen, self.done, self.lock = 0, False, threading.Lock()

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        if stage != "encoded" or arrays["task"][0] != self.kind:
            return
        with self.lock:
            if self.seen == self.number:
                arrays[self.name][1, 0] *= -1
                self.done = True
            self.seen += 1


READ = [
    *(("one", "product", name) for name in "AB"),
    *(("tournament", "product", name) for name in "AB"),
    *(("cholesky", "product", name) for name in "AB"),
    *((call, "backward-product", "B") for call in ("lu_solve", "solve")),
    ("transposed", "backward-product", "B"),
]


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
@pytest.mark.parametrize(("call", "kind", "name"), READ)
def test_a_block_that_changes_while_it_is_read_is_returned_as_it_was(
    call: str, kind: str, name: str, scheduler: str, right: Any
) -> None:
    for number in range(6):
        hook = WhileRead(kind, name, number)
        result, report = dask.compute(*CALLS[call](return_report=True, on_stage=hook), scheduler=scheduler)
        assert hook.done
        assert same(result, right[call][0]), number
        assert report.status is Status.CORRECTED


def changing_late(monkeypatch: pytest.MonkeyPatch, kind: str, last: tuple[str, tuple[int, ...]]) -> list[Any]:
    """Have the first block of a kind changed in its memory when a task has ended, maybe the last one that computes;
    what is returned has the block's array then."""
    add, held, done = tiles.TileTasks.add, list[Any](), list[Any]()

    def planted(self: Any, task: Callable[..., Any], name: str, at: tuple[int, ...], *arguments: Any) -> Any:
        def watched(*given: Any) -> Any:
            result = task(*given)
            if name == kind and not held:
                held.append(result.array)
            if (name, at) == last and not done:
                held[0][...] = damaged(held[0], SINGLE)
                done.append(held[0])
            return result

        return add(self, watched if name in (kind, last[0]) else task, name, at, *arguments)

    monkeypatch.setattr(tiles.TileTasks, "add", planted)
    return done


LATE = [
    *(("one", kind, ("panel", (3,))) for kind in ("solved", "factor", "pivots")),
    *(("tournament", kind, ("panel", (3,))) for kind in ("solved", "factor", "pivots")),
    *(("cholesky", kind, ("factored", (3,))) for kind in ("solved", "factored")),
    ("lu_solve", "backward", ("backward", (0, 0))),
    ("solve", "backward", ("backward", (0, 0))),
]


@pytest.mark.parametrize("with_report", [True, False])
@pytest.mark.parametrize(("call", "kind", "last"), LATE)
def test_a_block_that_changes_after_its_last_reader_is_returned_as_it_was(
    call: str, kind: str, last: Any, with_report: bool, right: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = changing_late(monkeypatch, kind, last)
    with ft.monitor() as log:
        if with_report:
            result, report = dask.compute(*CALLS[call](return_report=True))
            assert report.status is Status.CORRECTED
        else:
            found = CALLS[call]()
            result = dask.compute(*found) if isinstance(found, tuple) else found.compute()
    assert len(done) == 1
    assert same(result, right[call][0])
    assert log.counts[Status.CORRECTED] >= 1


class OnWorker(WhileRead):
    """The same on a cluster: the task is named, for each worker has a hook of its own, which changes four elements
    that cannot be restored."""

    def __init__(self, task: tuple[Any, ...]) -> None:
        super().__init__(task[0], "A", 0)
        self.task = task

    def __reduce__(self) -> Any:
        return OnWorker, (self.task,)

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        if stage == "encoded" and arrays["task"] == self.task and not hasattr(get_worker(), "_planted"):
            get_worker()._planted = True
            arrays["A"][np.ix_([1, 3], [0, 2])] *= [[-1, -2], [-3, -4]]


@on_cluster
def test_a_block_made_again_on_a_cluster_is_the_one_that_is_returned(client: Any, right: Any) -> None:
    with dask.config.set(scheduler=client), ft.monitor() as log:
        call = CALLS["cholesky"](return_report=True, on_stage=OnWorker(("product", 3, 2, 0)))
        result, report = dask.compute(*call)
    assert same(result, right["cholesky"][0])
    assert log.counts[Status.CORRECTED] >= 1
    assert report.status is Status.CORRECTED


@pytest.mark.parametrize("call", ["one", "tournament", "tall", "cholesky", "lu_solve", "transposed", "solve"])
def test_blocks_of_the_result_are_returned_when_nothing_reads_them(call: str, right: Any) -> None:
    ended: list[Any] = []

    class Told(dask.callbacks.Callback):  # type: ignore[misc]
        def _posttask(self, key: Any, *others: Any) -> None:
            ended.append(str(key[0] if isinstance(key, tuple) else key))

    with Told(), ft.monitor() as log:
        result, report = dask.compute(*CALLS[call](return_report=True))
    settled = [at for at, name in enumerate(ended) if name.endswith("-settled")]
    others = "report", "zeros"  # which read no blocks
    working = [at for at, name in enumerate(ended) if "-protected-" in name and not name.startswith(others)]
    assert settled
    assert max(working) < min(settled)
    assert same(result, right[call][0])
    assert report.status is Status.CLEAN
    assert not [one for one in log if one.status is not Status.CLEAN]
