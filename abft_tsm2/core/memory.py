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
from collections.abc import Iterable
from typing import Any

import numpy as np

_PER_THREAD = 2  # the handle of each thread's own default stream
WORDS = 160  # of a record: 1280 bytes
_PAGE = 64  # records
_BOUNDS = 128  # the words from here on are bounds of lines


class _Page:
    """Records that lie together, on a device and on the host."""

    def __init__(self) -> None:
        import cupy

        nbytes = 8 * WORDS * _PAGE
        self.on_device = cupy.zeros(nbytes, cupy.uint8)
        self.on_host = cupy.cuda.alloc_pinned_memory(nbytes)
        cupy.cuda.get_current_stream().synchronize()


class DeviceRecord:
    """One record.

    Attributes
    ----------
    address : int
        Where a kernel writes it.
    words : (160,) uint64 ndarray
        As it was when it was brought; kernels/repair/repair.cu says what they mean.
    call, lines : int
        Number of the call whose verdict it is for, less than 2^56, and how many lines that is on.
    """

    __slots__ = ("_device", "_on_host", "_page", "address", "call", "lines", "words")

    def __init__(self, device: int, page: _Page, number: int) -> None:
        at = 8 * WORDS * number
        self._device, self._page = device, page
        self.address, self._on_host = page.on_device.data.ptr + at, page.on_host.ptr + at
        self.words = np.frombuffer(page.on_host, np.uint64, WORDS, at)
        self.call = self.lines = 0

    def bring(self, stream: int) -> None:
        """Queue its copy to the host on a stream, given by its handle."""
        from cupy.cuda import runtime

        runtime.memcpyAsync(self._on_host, self.address, 8 * WORDS, runtime.memcpyDeviceToHost, stream)

    @property
    def head(self) -> list[int]:
        """The first eight words: all but faults and bounds."""
        head: list[int] = self.words[:8].tolist()
        return head

    def made(self, head: list[int]) -> bool:
        """Whether a record with this head holds the verdict of its call, on all of its lines.

        The kernel that repairs writes the number that it was launched with, and the number and the count of lines that
        those which judge have left in the state. Zeros, what an earlier call has left, or a kernel that did not run are
        no verdict.
        """
        return head[0] == self.call == head[7] >> 8 and head[1] >> 32 == self.lines

    @property
    def usual_bound(self) -> float:
        """The median of the bounds of 32 lines, evenly spread."""
        return float(sorted(self.words[_BOUNDS:].view(np.float64).tolist())[15])

    def free(self) -> None:
        """Give it back: it is not read any more, and what is queued to write it precedes all later work."""
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
            page = _Page()
            free += [DeviceRecord(device, page, number) for number in range(_PAGE)]
        record = free.pop()
    record.call, record.lines = call, lines
    return record


def bring(records: Iterable[DeviceRecord]) -> None:
    """Bring records whose kernels have ended, each page once. Synchronises."""
    from cupy.cuda import runtime

    pages = {id(record._page): record._page for record in records}
    stream = _stream()
    for page in pages.values():
        nbytes = 8 * WORDS * _PAGE
        runtime.memcpyAsync(page.on_host.ptr, page.on_device.data.ptr, nbytes, runtime.memcpyDeviceToHost, stream)
    runtime.streamSynchronize(stream)


_streams: dict[int, Any] = {}


def _stream() -> int:
    """A stream of its own, so that nothing that is queued has to be waited for."""
    import cupy

    device = cupy.cuda.runtime.getDevice()
    if device not in _streams:
        _streams[device] = cupy.cuda.Stream(non_blocking=True)
    return int(_streams[device].ptr)


def thread_of(stream: int) -> int:
    """The thread whose stream a handle means; 0 if all threads mean the same one by it.

    Two threads may queue work on one stream, a launch of one between two of the other: that is in order, and they can
    share memory and events. Default streams that each thread has for itself have one handle, and must not.
    """
    return threading.get_ident() if stream == _PER_THREAD else 0


_kept: dict[tuple[int, int, int], tuple[Any, Any]] = {}
_captured: list[Any] = []


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
    a graph belongs to that graph, which may be replayed anywhere, and is never freed. No host synchronisation.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    if stream.ptr and stream.is_capturing():
        # Zeroed by the graph itself: what runs while it is recorded is not run.
        made = cupy.empty(nbytes, cupy.uint8), cupy.zeros(tickets, cupy.uint32)
        _captured.append(made)
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
