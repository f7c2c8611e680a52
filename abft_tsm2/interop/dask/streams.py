"""A stream of its own for each thread of a worker that has a GPU.

On a stream that they share, the verdict on one thread's task would arrive behind all that the others have queued; on
streams of one priority, tasks of two threads would share the GPU and end together, and it would be idle until both have
begun another one. So each thread has another priority, as far as the GPU has them. Work of the user's tasks, on the
default stream, and of these streams waits for one another, as CUDA has it for streams that are not "non-blocking"; a
task leaves nothing on its stream when it ends.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from abft_tsm2.arrays import Array, is_cupy

_own = threading.local()
_threads = itertools.count()
_PRIORITIES = 6  # 0 to -5; a GPU that has fewer takes the nearest


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
            streams[first.device.id] = cupy.cuda.Stream(priority=-(next(_threads) % _PRIORITIES))
        stream = streams[first.device.id]
        with stream:
            yield
            stream.synchronize()
