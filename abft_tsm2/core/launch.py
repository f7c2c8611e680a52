"""Prepared launches of a kernel: all arguments lie ready, but for the addresses that change.

CuPy packs arguments one by one, which for the dozens of a check's kernels takes longer than a small product.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any

from abft_tsm2.core.compiler import Kernel, kernel

Where = Mapping[str, int]
"""Names of operands, and their addresses."""
Value = int | float | str
"""An argument of a launch: a number, or the name of an address."""
Step = Callable[[int, Where], None]
"""Queues something on a stream, given by its handle, for operands at these addresses; not by two threads at a time."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


_PACKED = struct.Struct("@7IPPI0P")  # its layout, to be filled in one call; 0P pads its end
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: may begin before the kernel before has ended
_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ANY_CLUSTER = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_SHARED_WITHOUT_ASKING = 48 << 10
_allowed: dict[tuple[int, int], int] = {}


def _allow(function: int, attribute: int, value: int) -> None:
    """Raise a limit of a kernel; a launch prepared earlier may need what it was."""
    from cupy_backends.cuda.api import driver

    if value > _allowed.get((function, attribute), 0):
        driver.funcSetAttribute(function, attribute, value)
        _allowed[function, attribute] = value


@functools.cache
def _driver() -> Any:
    launch = driver_library().cuLaunchKernelEx
    launch.argtypes = (ctypes.c_void_p,) * 4
    return launch


@functools.cache
def driver_library() -> Any:
    """The driver, to be called with ctypes' own types."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def driver_call(name: str, *arguments: Any) -> None:
    """Call a function of the driver with ctypes' own types; raise what it returns, unless that is success."""
    status = getattr(driver_library(), name)(*arguments)
    if status:
        from cupy_backends.cuda.api import driver

        raise driver.CUDADriverError(status)


class PreparedLaunch:
    """A launch of a compiled kernel on the current device.

    Parameters
    ----------
    config : Kernel
    grid : tuple of int
        Blocks along x and y, and z.
    threads : int
        Of a block.
    values : sequence of int, float or str
        The arguments, all of eight bytes; a name stands for an address that is known when the kernel is queued.
    keeps : object
        Whatever has to live as long as the addresses among the values are used.
    chained : bool
        The kernel is one of a chain (kernels/check/chain.cuh).
    shared_bytes : int
        Of a block, beside what the kernel declares.
    clustered : bool
        Its blocks are one cluster, of more than the eight that every card has.
    compared : bool
        Verdicts rest on numbers among its arguments, which lie here between calls: they are compared with a copy
        whenever the kernel is queued, and made again where a bit has flipped.
    """

    def __init__(
        self,
        config: Kernel,
        grid: tuple[int, ...],
        threads: int,
        values: tuple[Value, ...],
        keeps: Any = None,
        *,
        chained: bool = True,
        shared_bytes: int = 0,
        clustered: bool = False,
        compared: bool = False,
    ) -> None:
        import cupy

        function = kernel(config)
        self._keeps = keeps, function
        self._function = getattr(function, "kernel", function).ptr
        if shared_bytes > _SHARED_WITHOUT_ASKING:
            _allow(self._function, _SHARED_BYTES, shared_bytes)
        if clustered:
            _allow(self._function, _ANY_CLUSTER, 1)
        self._slots, letters, numbers = [], "=", []
        for i, value in enumerate(values):  # in one loop: some launches are prepared to be queued once
            if isinstance(value, str):
                self._slots.append((i, value))
            letters += "d" if isinstance(value, float) else "q"
            numbers.append(0 if isinstance(value, str) else value)
        self._values = (ctypes.c_longlong * (2 * len(values)))()  # and behind them their addresses
        start, behind = ctypes.addressof(self._values), ctypes.addressof(self._values) + 8 * len(values)
        struct.pack_into(f"{letters}{len(values)}Q", self._values, 0, *numbers, *range(start, behind, 8))
        shape, attributes = (*(*grid, 1, 1)[:3], threads, 1, 1), (0, 0)
        if chained and int(cupy.cuda.Device().compute_capability) >= 90:
            self._attribute = _Attribute(_PROGRAMMATIC, 0, (1,))
            attributes = ctypes.addressof(self._attribute), 1
        self._made = bytes(self._values) if compared else b""
        self._copy = type(self._values)() if compared else None
        self._config = _LaunchConfig.from_buffer_copy(_PACKED.pack(*shape, shared_bytes, 0, *attributes))
        self._launch = _driver()
        self._where = ctypes.addressof(self._config), self._function, behind, None

    def __call__(self, stream: int, where: Where) -> None:
        """Queue the kernel. The driver has copied the arguments when this returns."""
        values = self._values
        for i, name in self._slots:
            values[i] = where[name]
        if (copy := self._copy) is not None:
            ctypes.memmove(copy, self._made, len(self._made))
            for i, name in self._slots:
                copy[i] = where[name]
            if bytes(copy) != bytes(values):
                ctypes.memmove(values, copy, len(self._made))
        self._config.stream = stream
        status = self._launch(*self._where)
        if status:
            from cupy_backends.cuda.api import driver

            raise driver.CUDADriverError(status)

    def active_clusters(self) -> int:
        """How many clusters of its blocks the device can hold at a time; 0 where it has none of that size."""
        count = ctypes.c_int()
        config = ctypes.byref(self._config)
        status = driver_library().cuOccupancyMaxActiveClusters(
            ctypes.byref(count), ctypes.c_void_p(self._function), config
        )
        return 0 if status else count.value
