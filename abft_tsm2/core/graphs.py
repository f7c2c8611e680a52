"""Work of several streams recorded once and launched as one: CUDA graphs, with the priorities of their streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from abft_tsm2.core.launch import driver_call, driver_library

EXTERNAL = 1
"""Flag of a wait for an event that is recorded outside of the graph, before each launch."""
RELAXED, _PRIORITIES = 2, 8  # CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY


class Graph:
    """What a function queues on a stream, and on those that it makes wait for it.

    Parameters
    ----------
    stream : int
        Handle of a stream on which nothing else is queued meanwhile; not the default one.
    queue : callable
        Queues the work; all other streams are joined again at its end. Addresses and numbers are those of now, whenever
        the graph is launched.
    """

    def __init__(self, stream: int, queue: Callable[[], None]) -> None:
        self._exec = ctypes.c_void_p()
        graph, handle = ctypes.c_void_p(), ctypes.c_void_p(stream)
        driver_call("cuStreamBeginCapture_v2", handle, ctypes.c_int(RELAXED))
        try:
            queue()
        finally:
            driver_call("cuStreamEndCapture", handle, ctypes.byref(graph))
        try:
            flags = ctypes.c_ulonglong(_PRIORITIES)
            driver_call("cuGraphInstantiateWithFlags", ctypes.byref(self._exec), graph, flags)
        finally:
            driver_call("cuGraphDestroy", graph)

    def launch(self, stream: int) -> None:
        """Queue all of it on a stream, given by its handle."""
        driver_call("cuGraphLaunch", self._exec, ctypes.c_void_p(stream))

    def __del__(self) -> None:
        if self._exec:
            driver_library().cuGraphExecDestroy(self._exec)
