"""Blocks of a result change in the memory that the user gets, while others read them, or after all have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import get_worker

import abft_tsm2 as ft
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.interop import dask as on_dask
from abft_tsm2.interop.dask import delivered, tiles
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.recovery import recovered
from abft_tsm2.interop.dask.task import GraphOptions, run
from abft_tsm2.report import Status
from benchmarks.dask_planting import SINGLE, damaged
from tests.support.dask_factors import CALLS, blocks_of, same
from tests.support.planting import normal

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
        super().__init__("", "A", 0)
        self.task = task

    def __reduce__(self) -> Any:
        return OnWorker, (self.task,)

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        planted = f"_planted_{self.task}"
        if stage == "encoded" and arrays.get("task", self.task) == self.task and not hasattr(get_worker(), planted):
            setattr(get_worker(), planted, True)
            arrays["A"][np.ix_([1, 3], [0, 2])] *= [[-1, -2], [-3, -4]]


# ---- read by another operation ------------------------------------------------------------------------------------

M40, N40, B40 = normal(40, 40), normal(40, 40, seed=2), normal(40, 3, seed=1)


def in_two_operations(kind: str, hook: Any = None) -> tuple[Any, ...]:
    """Results of an operation and of one that reads them, and both reports."""
    X = blocks_of(M40, 10)
    if kind == "product":
        C, first = on_dask.protected_gemm(X, X, return_report=True)
        return C, *on_dask.protected_gemm(C, X, return_report=True, on_stage=hook), first
    if kind == "square":
        C, first = on_dask.protected_gemm(X, X, return_report=True)
        return C, *on_dask.protected_gemm(C, C, return_report=True, on_stage=hook), first
    factors, first = on_dask.protected_lu_factor(X, return_report=True)
    return *factors, *on_dask.protected_lu_solve(factors, B40, return_report=True, on_stage=hook), first


class InProduct(WhileRead):
    """The same of any product."""

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        super().__call__(stage, {"task": (self.kind,), **arrays} if "B" in arrays else {"task": ("",)})


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
@pytest.mark.parametrize(("kind", "task"), [("product", ""), ("square", ""), ("solve", "forward-product")])
def test_a_result_that_changes_while_another_operation_reads_it_is_written_back(
    kind: str, task: str, scheduler: str
) -> None:
    right = dask.compute(*in_two_operations(kind))
    assert [one.status for one in right[-2:]] == [Status.CLEAN, Status.CLEAN]
    for number in range(0, 6, 2):
        hook = (WhileRead if task else InProduct)(task, "A", number)
        # chunks are put together when all tasks have ended: Dask does so while others are read
        found = dask.compute(*dask.persist(*in_two_operations(kind, hook), scheduler=scheduler))
        assert hook.done
        assert same(found[:-2], right[:-2]), number
        assert found[-2].status is Status.CORRECTED
        assert "in the result that was returned as well" in str([one.faults for one in found[-2].products])


@pytest.mark.parametrize("twice", ["a and b", "a and c", "b and c"])
def test_a_chunk_of_two_operands_is_read_once(twice: str) -> None:
    planted: list[Any] = []

    class BehindFirstRead(dask.callbacks.Callback):  # type: ignore[misc]
        def _posttask(self, key: Any, block: Any, *others: Any) -> None:
            if not planted and str(key).startswith("('read-") and same(block.array, M40[20:30, :10]):
                planted.append(key)
                block.array[1, 0] *= -1

    X = blocks_of(M40, 10).map_blocks(np.copy, dtype=M40.dtype).persist()  # chunks that blocks lie in the memory of
    Y = blocks_of(N40, 10)
    operands, beta, right = {
        "a and b": ((X, X), 0.0, M40 @ M40),
        "a and c": ((X, Y, X), 1.0, M40 @ N40 + M40),
        "b and c": ((Y, X, X), 1.0, N40 @ M40 + M40),
    }[twice]
    with BehindFirstRead():
        C, report = dask.compute(*on_dask.protected_gemm(*operands, beta=beta, return_report=True))
    assert planted
    np.testing.assert_allclose(C, right, atol=1e-10)
    assert report.status is Status.CORRECTED


def test_what_a_user_writes_into_a_result_stays() -> None:
    C = on_dask.protected_gemm(blocks_of(M40, 40), blocks_of(M40, 40)).compute()
    C[1, 5] = 7.0
    was = C.copy()
    D = on_dask.protected_gemm(da.from_delayed(dask.delayed(C, traverse=False), C.shape, C.dtype), blocks_of(M40, 40))
    np.testing.assert_allclose(D.compute(), was @ M40, atol=1e-10)
    block = Block.of(C)
    C[1, 0] *= -1
    C[1, 7] += 1.0
    recovered("A", block, "test")
    assert same(block.array, was)
    assert C[1, 5] == 7.0
    assert C[1, 7] == was[1, 7] + 1.0  # the user's, too, for all that the sums of what was returned say


def test_what_was_read_while_a_result_was_written_back_is_read_again() -> None:
    returned = normal(6, 6)
    delivered.remember(returned, WordSums.of(returned))
    was, one, other, reads = returned.copy(), Block.of(returned), Block.of(returned), list[Any]()

    def work(A: Any) -> Any:
        if not reads:
            returned[2, 3] *= -1
        reads.append(A.copy())
        if len(reads) == 1:  # by another thread
            recovered("A", one, "test")
        return reads[-1]

    found, report = run(GraphOptions("test", "gemm"), ("step", 0), {"A": other}, work)
    assert len(reads) == 2
    assert not same(reads[0], was)
    assert same(found, was)
    assert same(returned, was)
    assert report.status is Status.CLEAN


@on_cluster
def test_an_operand_made_again_on_a_cluster_is_not_read_from_memory_that_changed(client: Any) -> None:
    X = blocks_of(M40, 10)
    with dask.config.set(scheduler=client), ft.monitor() as log:
        Y = da.map_blocks(np.add, X, 1.0, dtype=X.dtype)
        hook = OnWorker((1, 2, 0))
        C, report = on_dask.protected_gemm(Y, X, return_report=True, on_stage=hook)
        C, _, _ = dask.compute(C, report, Y)  # whose chunks are kept: the blocks lie in their memory
    np.testing.assert_allclose(C, (M40 + 1) @ M40, atol=1e-10)
    assert log.counts[Status.CORRECTED] >= 1


@on_cluster
@pytest.mark.parametrize("at", [(2, 1, 0), (3, 3, 1)])
def test_a_block_made_again_on_a_cluster_is_the_one_that_is_returned(at: Any, client: Any, right: Any) -> None:
    with dask.config.set(scheduler=client), ft.monitor() as log:
        call = CALLS["cholesky"](return_report=True, on_stage=OnWorker(("product", *at)))
        result, report = dask.compute(*call)
    wanted = right["cholesky"][0]
    if at[0] != at[1]:
        assert same(result, wanted)
    else:  # NumPy rounds A A' (syrk) otherwise than A B' for another array B of A's numbers: A was made again
        rounding = len(wanted) * np.finfo(float).eps * np.abs(wanted).max()  # Higham (2002), theorem 10.3
        np.testing.assert_allclose(result, wanted, rtol=0, atol=rounding)
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
