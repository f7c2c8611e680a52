"""Streams of a worker that has a GPU: one for each of its threads, and one on which chains of products take turns.

On a single stream, the verdict on a short task would arrive behind all that other threads have queued. On streams of
their threads, chains would share the GPU and end together, and it would be idle until the host has begun others. So
chains run one after the other on a stream that threads share, and while one runs, the host ends the one before and
queues the one behind it; all else runs on the streams of threads, which have the highest priority. Work of the user's
tasks, on the default stream, and of these streams waits for one another, as CUDA has it for streams that are not
"non-blocking"; a task leaves nothing on a stream when it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from abft_tsm2.arrays import Array, is_cupy

_HIGHEST = -5  # a GPU that has fewer priorities takes the nearest
_own = threading.local()
_shared: dict[int, tuple[Any, Any]] = {}  # by device: a lock, held while a task is queued, and the stream


@contextmanager
def stream_for(*arrays: Array) -> Iterator[None]:
    """Queue what follows on this thread's stream of the device of the arrays, and wait for it at the end; nothing where
    they are not on a GPU."""
    first = next((x for x in arrays if is_cupy(x)), None)
    if first is None:
        yield
        return
    import cupy

    streams: dict[int, Any] = _own.__dict__.setdefault("streams", {})
    with first.device:
        if first.device.id not in streams:
            streams[first.device.id] = cupy.cuda.Stream(priority=_HIGHEST)
        stream = streams[first.device.id]
        with stream:
            yield
            stream.synchronize()


@contextmanager
def in_turn(*arrays: Array) -> Iterator[None]:
    """Within `stream_for`: queue what follows behind the tasks of all threads that were queued so, and this thread's
    stream behind it. One thread at a time: the others wait while it queues, and while it waits for the device itself,
    as for what kernels do not take. What calls a user's function, which may wait for another task, takes no turn."""
    first = next((x for x in arrays if is_cupy(x)), None)
    if first is None:
        yield
        return
    import cupy

    own = cupy.cuda.get_current_stream()
    if first.device.id not in _shared:
        _shared.setdefault(first.device.id, (threading.Lock(), cupy.cuda.Stream()))
    lock, shared = _shared[first.device.id]
    with lock:
        shared.wait_event(own.record(cupy.cuda.Event(disable_timing=True)))
        try:
            with shared:
                yield
        finally:
            own.wait_event(shared.record(cupy.cuda.Event(disable_timing=True)))
