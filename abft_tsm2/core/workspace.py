"""Memory that kernels use between their own blocks: partial sums, and the tickets that say which block comes last.

It belongs to a device and a stream, so that calls on different streams never share it, and it stays: an allocation a
call would take longer than a small product. A buffer that has become too small is replaced, and CuPy's pool hands
the old one to later work on the same stream only.
"""

from __future__ import annotations

import threading
from typing import Any

_kept: dict[tuple[int, int, int], tuple[Any, Any]] = {}
_captured: list[Any] = []
_PER_THREAD = 2  # the handle of each thread's own default stream


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
    # Two threads may queue work on one stream, a launch of one between two of the other: that is in order, and safe.
    key = (cupy.cuda.runtime.getDevice(), stream.ptr, threading.get_ident() if stream.ptr == _PER_THREAD else 0)
    found = _kept.get(key)
    if found is None or found[0].size < nbytes or found[1].size < tickets:
        before = (0, 0) if found is None else (found[0].size, found[1].size)
        found = (
            cupy.empty(max(nbytes, before[0], 1 << 20), cupy.uint8),
            cupy.zeros(max(tickets, before[1], 1 << 12), cupy.uint32),
        )
        _kept[key] = found
    return found
