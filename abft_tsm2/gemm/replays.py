"""Products that are queued once and run many times, as CUDA graphs: what of theirs has to stay (`ReplayedProduct`); and
calls with the same operands again and again, which become graphs by themselves (`GraphCall`).

A launch of a graph costs the host a tenth of the launches in it. It is made for addresses: a call whose operands lie
elsewhere is queued step by step, as the first ones of each are.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from abft_tsm2.checksum.device.record import CallInfo
from abft_tsm2.checksum.device.tally import ReplayTally
from abft_tsm2.core import cublas, faultpoint
from abft_tsm2.core.capture import relaxed
from abft_tsm2.core.graphs import Graph
from abft_tsm2.core.memory import DeviceRecord, thread_of
from abft_tsm2.gemm.plan import (
    CallOptions,
    LaunchSequence,
    Operands,
    Place,
    ProductPlan,
    multiply,
    run_steps,
    side_stream,
)

RING = 128  # launches of a graph whose records stay on the device: host and device are so far apart at most
_SEEN_BEFORE = 2  # calls with operands at these addresses, before a graph is made of the next one
_MOST_SEEN = 4096  # addresses that are remembered
_MOST = 128  # graphs that are kept,
_UNUSED = 4096  # until the oldest has not been launched for so many calls
_LARGEST = 1 << 36  # multiplications of a product: of a larger one the launches do not count, and its memory does


class ArrayPlace(NamedTuple):
    """Where an array lies."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, x: Any) -> ArrayPlace:
        """Of a CuPy array."""
        return cls(x.data.ptr, x.shape, x.strides, x.dtype)


class ReplayedProduct:
    """The steps of a product, each with numbers that the device counts.

    Attributes
    ----------
    sequence : LaunchSequence
    tallies : list of ReplayTally
        One for each side.
    planted : list
        What faults in its graph need.
    """

    def __init__(
        self, plan: ProductPlan, options: CallOptions, operands: Operands, sequence: LaunchSequence, ring: int
    ) -> None:
        import cupy

        device = cupy.cuda.runtime.getDevice()
        self.sequence, self._plan, self._options, self._operands = sequence, plan, options, operands
        self.tallies = [ReplayTally(device, check.spec.m * check.spec.batch, ring) for check in plan.checks]
        self.planted: list[Any] = []

    def queue(self, stream: Any, workspace: Any) -> None:
        """Queue all steps on a stream that is captured, and on its side stream; cuBLAS with this workspace."""
        fork, join, side = side_stream(stream.ptr)
        o, plan = self._operands, self._plan
        where = [{**o.where(side), **tally.where} for side, tally in zip(plan.sides, self.tallies, strict=True)]
        fork.record(stream)
        side.wait_event(fork)
        assert plan.gemm is not None
        place = self._place(stream)
        try:
            if place is not None:  # operands are changed when they have been encoded
                self._encode(side, where)
                join.record(side)
                stream.wait_event(join)
            with cublas.captured_on(stream.ptr, workspace) as handle:
                multiply(plan.gemm, o, self._options.alpha, self._options.beta, handle, place)
            if place is None:
                self._encode(side, where)
        finally:
            join.record(side)
            stream.wait_event(join)  # in a graph that fails as well: its owner can end the capture
        for i, at in enumerate(where):
            run_steps(self.sequence.verify[i], stream.ptr, at)
            run_steps(self.sequence.repair[i], stream.ptr, at)

    def _encode(self, side: Any, where: list[dict[str, int]]) -> None:
        for steps, at in zip(self.sequence.encode, where, strict=True):
            run_steps(steps, side.ptr, at)

    def _place(self, stream: Any) -> Place | None:
        """Where a planter puts its faults into the graph."""
        planter = faultpoint.current()
        if planter is None:
            return None
        return lambda stage, arrays: self.planted.extend(faultpoint.record(planter, stage, stream.ptr, arrays))


class GraphCall:
    """A product with operands at certain addresses, as a graph for one stream.

    Attributes
    ----------
    plan, options, info, sequence
        Of the product; and its workspaces.
    places : tuple of ArrayPlace
        Of A, B and C. No array of the user's is kept: those of the next call lie at the same addresses.
    wide : array or None
        The float32 product behind a C of 16 bits.
    device : Device
    used : int
        When it was launched last.
    """

    def __init__(
        self, plan: ProductPlan, options: CallOptions, info: CallInfo, operands: Operands, stream: int
    ) -> None:
        import cupy

        self.plan, self.options, self.info, self.used, self.device = plan, options, info, 0, cupy.cuda.Device()
        self.places = tuple(map(ArrayPlace.of, operands[:3]))
        self.sequence, self.wide = LaunchSequence(plan, options, None, side_stream(stream)[2]), operands.wide
        product = ReplayedProduct(plan, options, operands, self.sequence, RING)
        self._tallies, self._lock, self._launched = product.tallies, threading.Lock(), 0
        workspace, capturing = _workspace(stream), _capture_stream()
        self._keeps = workspace, product.planted
        with relaxed():
            self._graph = Graph(capturing.ptr, lambda: product.queue(capturing, workspace))
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(RING)]

    def launch(self, stream: Any) -> tuple[list[DeviceRecord], Any] | None:
        """Queue it on a stream: the records, and an event behind it.

        Waits where the launch `RING` ones before has not ended. None where another thread reads its verdict just now.
        """
        with self._lock:
            number, event = self._launched, self._events[self._launched % len(self._events)]
            for tally in self._tallies:
                if (old := tally.of(number)).call and not _freed(old, event):
                    return None
            # First: where the launch fails, or is interrupted, the host counts one too many, and believes nothing more.
            self._launched += 1
            self._graph.launch(stream.ptr)
            event.record(stream)
            self.used = _calls[0] = _calls[0] + 1
            return [tally.record(number) for tally in self._tallies], event


def _freed(record: DeviceRecord, event: Any) -> bool:
    """Let a verdict that is still awaited keep what its records say; whether this one is free now."""
    event.synchronize()
    if (owner := record.owner) is not None:
        owner.detach()
    return record.call == 0


_made: dict[GraphCall, tuple[dict[Any, GraphCall], Any]] = {}
_seen: dict[Any, int] = {}
_lock = threading.Lock()
_calls, _full_until = [0], [0]
enabled = [True]


def due(known: Any, where: Any, operands: Callable[[], Operands]) -> GraphCall | None:
    """Make the graph of a known call with operands at these addresses, if it is time to; it is one of its `graphs`."""
    _calls[0] += 1
    if known.plan.gemm is None or math.prod(known.info.sizes) > _LARGEST:
        return None
    with _lock:
        key = id(known), where
        seen = _seen.get(key, 0)
        if seen < _SEEN_BEFORE:
            if len(_seen) >= _MOST_SEEN:
                _seen.clear()
            _seen[key] = seen + 1
            return None
        if len(_made) >= _MOST and not _made_place():
            return None
        try:
            made = GraphCall(known.plan, known.options, known.info, operands(), where[3])
        except Exception:  # out of memory, say: step by step it goes as before
            _seen[key] = -_UNUSED
            return None
        _seen.pop(key, None)
        made.used, known.graphs[where] = _calls[0], made
        _made[made] = known.graphs, where
        return made


def _made_place() -> bool:
    """Drop the graph that was launched least recently, if that is long ago."""
    if _calls[0] < _full_until[0]:
        return False
    oldest = min(_made, key=lambda call: call.used)
    if _calls[0] - oldest.used < _UNUSED:
        _full_until[0] = _calls[0] + _UNUSED // 4
        return False
    _drop(oldest)
    return True


def _drop(call: GraphCall) -> None:
    graphs, where = _made.pop(call, ({}, None))
    graphs.pop(where, None)


def forget(call: GraphCall) -> None:
    """Do not launch it any more: it has left no verdict."""
    with _lock:
        _drop(call)


@contextmanager
def step_by_step() -> Iterator[None]:
    """Queue every product of the block step by step, in all threads."""
    before, enabled[0] = enabled[0], False
    try:
        yield
    finally:
        enabled[0] = before


_workspaces: WeakValueDictionary[Any, Any] = WeakValueDictionary()
_capture_streams = threading.local()


def _workspace(stream: int) -> Any:
    """Memory for cuBLAS of all graphs of a stream, which follow one another."""
    import cupy

    key = cupy.cuda.runtime.getDevice(), stream, thread_of(stream)
    found = _workspaces.get(key)
    if found is None:
        found = _workspaces[key] = cupy.empty(cublas.WORKSPACE, cupy.uint8)
    return found


def _capture_stream() -> Any:
    """A stream of this thread and the current device, on which graphs are made and nothing runs."""
    import cupy

    device = str(cupy.cuda.runtime.getDevice())
    if device not in _capture_streams.__dict__:
        _capture_streams.__dict__[device] = cupy.cuda.Stream(non_blocking=True)
    return _capture_streams.__dict__[device]
