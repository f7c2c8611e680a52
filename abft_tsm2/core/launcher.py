"""Launches of one kernel with little work for the host: its arguments are packed in one step and handed to the driver.

CuPy packs arguments one by one, which for the dozen of a check's kernels takes longer than a small product.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

from abft_tsm2.core.compiler import Kernel, kernel


class Launcher:
    """A compiled kernel of the current device, with its grid.

    Parameters
    ----------
    config : Kernel
    grid : tuple of int
        Blocks along x and y.
    threads : int
        Of a block.
    letters : str
        One for each argument, all of eight bytes: ``q`` an integer or an address, ``d`` a float64.
    """

    def __init__(self, config: Kernel, grid: tuple[int, int], threads: int, letters: str) -> None:
        from cupy_backends.cuda.api import driver

        self._function = kernel(config)
        self._launch = driver.launchKernel
        self._shape = (self._function.ptr, grid[0], grid[1], 1, threads, 1, 1, 0)
        self._pack = struct.Struct("=" + letters).pack_into
        self._values = ctypes.create_string_buffer(8 * len(letters))
        start = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_void_p * len(letters))(*range(start, start + 8 * len(letters), 8))
        self._where = ctypes.addressof(self._pointers)
        self._lock = threading.Lock()  # the driver has copied the values when a launch returns

    def __call__(self, stream: int, *values: Any) -> None:
        """Queue the kernel on a stream, given by its handle."""
        with self._lock:
            self._pack(self._values, 0, *values)
            self._launch(*self._shape, stream, self._where, 0)
