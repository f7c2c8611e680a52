"""Memory between the blocks of a launch: to whom it belongs, how it grows; a stand-in plays CuPy. And on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from abft_tsm2.core import memory
from abft_tsm2.core.memory import scratch


class Driver:
    """What `scratch` sees of CuPy: a device, a stream, and whether it is captured."""

    def __init__(self) -> None:
        self.device, self.stream, self.capturing = 0, 0, False

    def current(self) -> Any:
        return SimpleNamespace(ptr=self.stream, is_capturing=lambda: self.capturing)

    def as_cupy(self) -> Any:
        cuda = SimpleNamespace(get_current_stream=self.current, runtime=SimpleNamespace(getDevice=lambda: self.device))
        # What `empty` gives is not zero.
        empty = lambda size, dtype: np.full(size, 0xAB, dtype)  # noqa: E731
        return SimpleNamespace(cuda=cuda, empty=empty, zeros=np.zeros, uint8=np.uint8, uint32=np.uint32)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_kept", {})


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "cupy", made.as_cupy())
    return made


def test_it_is_large_enough_and_tickets_are_zero(driver: Driver) -> None:
    for nbytes, count in ((1, 1), (100, 5000), (1 << 21, 2), (1 << 22, 9000), (0, 0)):
        partial, tickets = scratch(nbytes, count)
        assert partial.size >= nbytes
        assert partial.dtype == np.uint8
        assert tickets.size >= count
        assert tickets.dtype == np.uint32
        assert not tickets.any()


def test_it_stays_until_it_is_too_small_and_never_shrinks(driver: Driver) -> None:
    first = scratch(1000, 10)
    assert scratch(1, 1)[0] is first[0]
    assert scratch(first[0].size, first[1].size)[0] is first[0]
    more = scratch(first[0].size + 1, 1)
    assert more[0] is not first[0]
    assert more[1].size >= first[1].size
    most = scratch(1, first[1].size + 1)
    assert most[0].size >= more[0].size
    assert scratch(more[0].size, first[1].size + 1)[0] is most[0]


def test_each_device_and_stream_has_its_own(driver: Driver) -> None:
    made = []
    for driver.device in (0, 1):
        for driver.stream in (0, 1, 12345):
            made.append(scratch(1, 1))
            assert scratch(1, 1)[1] is made[-1][1]
    assert len({id(partial) for partial, _ in made}) == len({id(tickets) for _, tickets in made}) == 6


@pytest.mark.parametrize(("stream", "shared"), [(0, True), (12345, True), (2, False)])
def test_threads_share_a_stream_but_for_those_default_streams_that_are_their_own(
    driver: Driver, stream: int, shared: bool
) -> None:
    driver.stream = stream
    with ThreadPoolExecutor(1) as thread:
        assert (thread.submit(scratch, 1, 1).result()[0] is scratch(1, 1)[0]) is shared


def test_a_captured_launch_has_memory_of_its_own_that_stays(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    belongs: list[Any] = []
    monkeypatch.setattr(memory.capture, "capture_of", lambda stream: SimpleNamespace(graph=stream + 1))
    monkeypatch.setattr(memory.capture, "Kept", lambda graph, made: belongs.append((graph, made)))
    driver.stream = 7
    kept = scratch(1, 1)
    driver.capturing = True
    made = [scratch(10, 3) for _ in range(3)]
    assert len({id(partial) for partial, _ in (kept, *made)}) == 4
    assert [(partial.size, tickets.size) for partial, tickets in made] == [(10, 3)] * 3
    assert not any(tickets.any() for _, tickets in made)
    assert [graph for graph, *_ in belongs] == [8] * 3
    assert all(both is pair for (_, both), pair in zip(belongs, made, strict=True))  # a replay writes into it
    driver.capturing = False
    assert scratch(1, 1)[0] is kept[0]


# ---- on a GPU -----------------------------------------------------------------------------------------------------


@contextmanager
def captured(cp: Any) -> Iterator[Any]:
    """A stream, and the graph of what is queued on it."""
    stream, found = cp.cuda.Stream(non_blocking=True), SimpleNamespace(stream=None, graph=None)
    found.stream = stream
    with stream:
        stream.begin_capture()
        yield found
        found.graph = stream.end_capture()


@pytest.mark.gpu
def test_on_a_gpu_streams_have_their_own_and_captured_tickets_are_zeroed_by_the_graph() -> None:
    cp = pytest.importorskip("cupy")
    stream = cp.cuda.Stream(non_blocking=True)
    default = scratch(100, 3)
    with stream:
        other = scratch(100, 3)
        assert other[0].data.ptr != default[0].data.ptr
        assert scratch(1, 1)[1] is other[1]
    assert not cp.asnumpy(default[1]).any()
    with captured(cp) as found:
        tickets = scratch(100, 3)[1]
        copy = tickets + cp.uint32(1)
    for _ in range(2):
        found.graph.launch(found.stream)
        found.stream.synchronize()
        assert (cp.asnumpy(copy) == 1).all()


@pytest.mark.gpu
def test_on_a_gpu_memory_that_is_replaced_is_not_handed_to_another_stream_while_in_use() -> None:
    cp = pytest.importorskip("cupy")
    import abft_tsm2 as ft

    rng = cp.random.default_rng(0)
    A, B = rng.random((200, 200_000), dtype=cp.float32), rng.random((200_000, 4), dtype=cp.float32)
    tall = rng.random((20_000, 40_000), dtype=cp.float32)
    right = rng.random((40_000, 4), dtype=cp.float32)
    expected, wide = cp.asnumpy(ft.tsm2r(A, B)), cp.asnumpy(ft.tsm2r(tall, right))
    for _ in range(5):
        with cp.cuda.Stream(non_blocking=True) as stream:
            few, many = ft.tsm2r(A, B), ft.tsm2r(tall, right)  # the second one may want a larger workspace
            again = ft.tsm2r(A, B)
            stream.synchronize()
        assert cp.asnumpy(few).tobytes() == cp.asnumpy(again).tobytes() == expected.tobytes()
        assert cp.asnumpy(many).tobytes() == wide.tobytes()
