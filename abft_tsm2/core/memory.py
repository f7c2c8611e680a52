"""Memory of kernels beside their operands: partial sums and tickets (`scratch`), and the records that they leave for
the host.

A scratch buffer belongs to a device and a stream, so that calls on different streams never share it, and it stays: an
allocation a call would take longer than a small product. A buffer that has become too small is replaced, and CuPy's
pool hands the old one to later work on the same stream only.

A record is written by the kernel behind a product. The host copies it when it needs it, one at a time or a page at a
time; no kernel waits for the transfer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from abft_tsm2.core import capture

_PER_THREAD = 2  # the handle of each thread's own default stream
WORDS = 160  # of a record: 1280 bytes
_PAGE = 64  # records
_BOUNDS = 128  # the words from here on are bounds of lines


class Page:
    """Records that lie together, on a device and on the host.

    Parameters
    ----------
    records : int
        How many there are.
    words : int
        Of other data in front of them.

    Attributes
    ----------
    address : int
        Of the first record, on the device.
    at : int
        Bytes in front of it.
    head : (words,) uint64 ndarray
        The other data, as they were when records were brought.
    """

    def __init__(self, records: int = _PAGE, words: int = 0) -> None:
        import cupy

        self.at, self.nbytes = 8 * words, 8 * (words + WORDS * records)
        self.on_host = cupy.cuda.alloc_pinned_memory(self.nbytes)
        with uncaptured():
            self.on_device = cupy.zeros(self.nbytes, cupy.uint8)
        self.address = self.on_device.data.ptr + self.at
        self.head = np.frombuffer(self.on_host, np.uint64, words)

    def write_head(self, values: list[int]) -> None:
        """Set the first of the other data, on the device; waits for nothing but the transfer."""
        from cupy.cuda import runtime

        self.head[: len(values)] = values
        with uncaptured() as stream:
            here, there = self.on_host.ptr, self.on_device.data.ptr
            runtime.memcpyAsync(there, here, 8 * len(values), runtime.memcpyHostToDevice, stream)


class DeviceRecord:
    """One record.

    Attributes
    ----------
    address : int
        Where a kernel writes it.
    words : (160,) uint64 ndarray
        As it was when it was brought; kernels/repair/repair.cu says what they mean.
    call, lines : int
        Number of the call whose verdict it is for, less than 2^56, and 0 for a record that is free; how many lines the
        verdict is on.
    turn : int
        Which replay of its graph the call is, from 1 on; 0 for a call that is none.
    owner : object or None
        Who reads it, of one in a ring: its memory is wanted again.
    """

    __slots__ = ("_device", "_of_ring", "_on_host", "_page", "address", "call", "lines", "owner", "turn", "words")

    _page: Page | None

    def __init__(self, device: int, page: Page, number: int, *, of_ring: bool = False) -> None:
        at = page.at + 8 * WORDS * number
        self._device, self._page, self._of_ring = device, page, of_ring
        self.address, self._on_host = page.on_device.data.ptr + at, page.on_host.ptr + at
        self.words = np.frombuffer(page.on_host, np.uint64, WORDS, at)
        self.call = self.lines = self.turn = 0
        self.owner: Any = None

    def bring(self, stream: int) -> None:
        """Queue its copy to the host on a stream, given by its handle."""
        from cupy.cuda import runtime

        runtime.memcpyAsync(self._on_host, self.address, 8 * WORDS, runtime.memcpyDeviceToHost, stream)

    def detached(self) -> DeviceRecord:
        """A copy of what was brought; this one is free."""
        copy = DeviceRecord.__new__(DeviceRecord)
        copy._device, copy._page, copy._of_ring, copy.address, copy._on_host = self._device, None, True, 0, 0
        copy.words, copy.call, copy.lines = self.words.copy(), self.call, self.lines
        copy.turn, copy.owner = self.turn, None
        self.free()
        return copy

    @property
    def head(self) -> list[int]:
        """The first eight words: all but faults and bounds."""
        head: list[int] = self.words[:8].tolist()
        return head

    def made(self, head: list[int]) -> bool:
        """Whether a record with this head holds the verdict of its call, on all of its lines.

        The kernel that repairs writes the number that it was launched with, and the number and the count of lines that
        those which judge have left in the state; of a replay, how often those have run. Zeros, what an earlier call has
        left, or a kernel that did not run are no verdict.
        """
        numbers = head[0] == self.call == head[7] >> 8 and head[4] == self.turn
        return numbers and head[1] >> 32 == self.lines

    @property
    def usual_bound(self) -> float:
        """The median of the bounds of 32 lines, evenly spread."""
        return float(sorted(self.words[_BOUNDS:].view(np.float64).tolist())[15])

    def free(self) -> None:
        """Give it back: it is not read any more, and what is queued to write it precedes all later work."""
        self.call, self.owner = 0, None
        if not self._of_ring:
            with _lock:
                _free[self._device].append(self)


_free: dict[int, list[DeviceRecord]] = {}
_lock = threading.Lock()


def take(call: int, lines: int) -> DeviceRecord:
    """A record on the current device, for the verdict of the call of that number on so many lines."""
    import cupy

    device = cupy.cuda.runtime.getDevice()
    with _lock:
        free = _free.setdefault(device, [])
        if not free:
            page = Page()
            free += [DeviceRecord(device, page, number) for number in range(_PAGE)]
        record = free.pop()
    record.call, record.lines = call, lines
    return record


def bring(records: Iterable[DeviceRecord]) -> None:
    """Bring records whose kernels have ended, each page once. Synchronises."""
    from cupy.cuda import runtime

    pages = {id(record._page): record._page for record in records if record._page is not None}
    stream = own_stream().ptr
    for page in pages.values():
        here, there = page.on_host.ptr, page.on_device.data.ptr
        runtime.memcpyAsync(here, there, page.nbytes, runtime.memcpyDeviceToHost, stream)
    runtime.streamSynchronize(stream)


_streams: dict[int, Any] = {}


def own_stream() -> Any:
    """A stream of its own, so that nothing that is queued has to be waited for."""
    import cupy

    device = cupy.cuda.runtime.getDevice()
    if device not in _streams:
        _streams[device] = cupy.cuda.Stream(non_blocking=True)
    return _streams[device]


@contextmanager
def uncaptured() -> Iterator[int]:
    """Queue what the block queues on that stream, and wait for it: it is there whatever stream uses it next, and in no
    graph although the caller's stream may be captured. Its handle."""
    stream = own_stream()
    with capture.current(stream):
        yield stream.ptr
    stream.synchronize()


def thread_of(stream: int) -> int:
    """The thread whose stream a handle means; 0 if all threads mean the same one by it.

    Two threads may queue work on one stream, a launch of one between two of the other: that is in order, and they can
    share memory and events. Default streams that each thread has for itself have one handle, and must not.
    """
    return threading.get_ident() if stream == _PER_THREAD else 0


_kept: dict[tuple[int, int, int], tuple[Any, Any]] = {}
_asked = threading.local()


@contextmanager
def own_scratch() -> Iterator[list[Any]]:
    """Let all `scratch` of the block be memory of its own: what is returned, to be kept."""
    _asked.own = []
    try:
        yield _asked.own
    finally:
        _asked.own = None


def scratch(nbytes: int, tickets: int) -> tuple[Any, Any]:
    """Memory of the current device and stream for one launch.

    Parameters
    ----------
    nbytes : int
        Of partial sums.
    tickets : int
        How many.

    Returns
    -------
    partial : (nbytes or more,) CuPy array of uint8
        Not initialised.
    tickets : (tickets or more,) CuPy array of uint32
        0, and every kernel leaves them so.

    Notes
    -----
    Valid until the next call on the same device, stream and thread. What is asked for while the stream is captured into
    a graph belongs to that graph, which may be replayed anywhere, and is freed with it. No host synchronisation.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    if (own := getattr(_asked, "own", None)) is not None:
        own.append(made := (cupy.empty(nbytes, cupy.uint8), cupy.zeros(tickets, cupy.uint32)))
        return made
    if stream.ptr and stream.is_capturing():
        # Zeroed by the graph itself: what runs while it is recorded is not run.
        made = cupy.empty(nbytes, cupy.uint8), cupy.zeros(tickets, cupy.uint32)
        here = capture.capture_of(stream.ptr)
        assert here is not None
        capture.Kept(here.graph, made)
        return made
    key = cupy.cuda.runtime.getDevice(), stream.ptr, thread_of(stream.ptr)
    found = _kept.get(key)
    if found is None or found[0].size < nbytes or found[1].size < tickets:
        before = (0, 0) if found is None else (found[0].size, found[1].size)
        found = (
            cupy.empty(max(nbytes, before[0], 1 << 20), cupy.uint8),
            cupy.zeros(max(tickets, before[1], 1 << 12), cupy.uint32),
        )
        _kept[key] = found
    return found
