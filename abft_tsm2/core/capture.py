"""Streams that their owner captures into a CUDA graph: which graph it will be, what lives as long as that, and how
something is prepared meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from abft_tsm2.core.graphs import RELAXED
from abft_tsm2.core.launch import driver_call

_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_UNORDERED, _GIVEN = 1, 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CU_GRAPH_USER_OBJECT_MOVE


class Capture(NamedTuple):
    """A capture that has begun: its number in this process, and the handle of its graph."""

    number: int
    graph: int


def capture_of(stream: int) -> Capture | None:
    """The capture that a stream, given by its handle, is part of; None where it is not captured."""
    if stream in (0, 1):  # the legacy default stream never is, and must not be asked while another one is
        return None
    status, number, graph = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_void_p()
    found = ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), None, None
    driver_call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *found)
    return Capture(number.value, graph.value or 0) if status.value == _CAPTURING else None


def current_stream() -> Any:
    """CuPy's."""
    import cupy

    return cupy.cuda.get_current_stream()


def is_captured(stream: Any) -> bool:
    """Whether a CuPy stream is captured."""
    return stream.ptr not in (0, 1) and bool(stream.is_capturing())


class _Owned:
    """The address of a stream, by the protocol of CUDA streams."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def stream_at(pointer: int) -> Any:
    """CuPy's view of the stream at this address, which stays its owner's."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Owned(pointer))
    return cupy.cuda.ExternalStream(pointer)  # before CuPy 14


@contextlib.contextmanager
def current(stream: Any) -> Iterator[None]:
    """Make a CuPy stream the current one; then again the one before, also where that was set by its `use`: CuPy's own
    ``with stream``, which `get` of an array enters as well, would go back to the default stream."""
    import cupy

    before = cupy.cuda.get_current_stream()
    try:
        with stream:
            yield
    finally:
        before.use()


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread allocate memory, load kernels and wait for other streams although one is captured."""
    mode = ctypes.c_int(RELAXED)
    driver_call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        driver_call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


# ---- what lives as long as a graph -----------------------------------------------------------------------------------


class Kept:
    """Things that a graph needs, kept until it and all that was made of it are gone.

    Attributes
    ----------
    things : tuple
        Empty afterwards.
    """

    def __init__(self, graph: int, *things: Any) -> None:
        self.things = things
        # A graph calls the destructor on a thread of the driver, which must not wait, not for Python's lock either: it
        # posts a semaphore, and `release` sees that.
        release()
        self._gone = ctypes.c_void_p(_libc().malloc(ctypes.c_size_t(64)))  # sem_t; stays: it may be posted at any time
        _libc().sem_init(self._gone, 0, 0)
        self._object = ctypes.c_void_p()
        post = ctypes.cast(_libc().sem_post, ctypes.c_void_p)
        count, flags = ctypes.c_uint(1), ctypes.c_uint(_UNORDERED)
        driver_call("cuUserObjectCreate", ctypes.byref(self._object), self._gone, post, count, flags)
        driver_call("cuGraphRetainUserObject", ctypes.c_void_p(graph), self._object, count, ctypes.c_uint(_GIVEN))
        with _lock:
            _kept.add(self)

    @property
    def needed(self) -> bool:
        """Whether the graph may still be replayed."""
        if self.things and _libc().sem_trywait(self._gone) == 0:
            self.things = ()
            with _lock:
                _kept.discard(self)
        return bool(self.things)


_kept: set[Kept] = set()
_lock = threading.Lock()


def release() -> None:
    """Let go of what belonged to graphs that are gone."""
    for one in list(_kept):
        one.needed  # noqa: B018


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    return libc
