"""A matrix that is factored in its own memory: a copy of it in host memory, which repairs read.

The copy is pinned, so that kernels, cuBLAS and CuPy read it over the bus by its address, as they read the device's own
memory. What is read of a whole matrix before its factors take its place is read there; of the copy, only what repairs
and the evidence behind a suspicion need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from abft_tsm2.arrays import Array, dtype_name, is_cupy
from abft_tsm2.linalg.device.buffers import ALIGNED, leading_dimension
from abft_tsm2.linalg.inputs import NATIVE

PLACES = DEVICE, HOST = "device", "host"
"""Where A is while it is factored."""


class HostCopy:
    """The memory of A, and of a copy of it.

    Parameters
    ----------
    A : (m, n) CuPy array
        One that `require_in_place` lets pass. Not written before `begin`.

    Attributes
    ----------
    memory : (m, n) CuPy array
        A itself, which its factors replace.
    array : (m, n) CuPy array, column-major
        The copy, to be read by the device: filled by the first `begin`. Its host memory is freed with it.

    Raises
    ------
    MemoryError
        The host has no such memory, or does not allow so much of it to be pinned.
    """

    def __init__(self, A: Array) -> None:
        import cupy

        (m, n), size = A.shape, A.itemsize
        pitch = leading_dimension(m, size) * size
        try:  # not of CuPy's pool, which would keep it
            pinned = cupy.cuda.PinnedMemory(pitch * n)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            text = f'preserve="{HOST}" takes {pitch * n / 1e9:.3g} GB of pinned host memory for a copy of a, of shape'
            raise MemoryError(
                f"{text} ({m}, {n}), {dtype_name(A.dtype)}, and this host gives less ({error}): free some of it, or "
                f'raise the limit of locked memory (ulimit -l); preserve="{DEVICE}" takes as much of the GPU\'s instead'
            ) from error
        memory = cupy.cuda.UnownedMemory(pinned.ptr, pitch * n, pinned, A.device.id)
        place = cupy.cuda.MemoryPointer(memory, 0)
        self.memory, self.array = A, cupy.ndarray((m, n), A.dtype, place, (size, pitch))
        self._filled = False

    def begin(self, stream: int) -> None:
        """Queue the copy of A, on a stream given by its handle; once it has been made, the way back."""
        from cupy.cuda import runtime

        of, to = (self.array, self.memory) if self._filled else (self.memory, self.array)
        (m, n), size = of.shape, of.itemsize
        places = to.data.ptr, to.strides[1], of.data.ptr, of.strides[1]
        runtime.memcpy2DAsync(*places, m * size, n, runtime.memcpyDefault, stream)
        self._filled = True

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Where factors are made in other memory of the GPU at last; MemoryError says what that is for."""
        try:
            yield
        except MemoryError as error:
            (m, n), size = self.memory.shape, self.memory.itemsize
            raise MemoryError(
                f"the factors of a, of shape ({m}, {n}), {dtype_name(self.memory.dtype)}, are wrong, and to factor it "
                f"by steps takes {m * n * size / 1e9:.3g} GB of the GPU's memory beside it, which are not free: a is "
                "lost; make it again, and factor it once more"
            ) from error


def require_in_place(a: Any, overwrite_a: bool) -> None:
    """ValueError for what cannot be factored in its own memory, and what is to be passed instead."""
    if not overwrite_a:
        raise ValueError(
            f'preserve="{HOST}" makes the factors in the memory of a, and a user\'s array is changed only where the '
            f'call says so: pass overwrite_a=True with it, or preserve="{DEVICE}"'
        )
    how = f'preserve="{HOST}" factors a CuPy array in its own memory'
    if not is_cupy(a):
        kind = f"{type(a).__module__}.{type(a).__name__}"
        raise ValueError(f"{how}, and a is a {kind}, which is not on a GPU that would be short of memory: leave it out")
    if a.ndim != 2:
        raise ValueError(
            f"{how}, and a has {a.ndim} dimensions, shape {a.shape}: pass matrices one by one, each in columns"
        )
    (m, n), dtype, size = a.shape, dtype_name(a.dtype), a.itemsize
    if dtype not in NATIVE:
        raise ValueError(f"{how}, and a is {dtype}: pass float64 or float32")
    down, along = a.strides
    beyond = a.data.ptr % ALIGNED
    if down != size or along < m * size or along % ALIGNED or beyond:
        ld = leading_dimension(m, size)
        raise ValueError(
            f"{how}, whose columns are contiguous and begin at multiples of {ALIGNED} bytes; the strides of a are "
            f"{a.strides} bytes, for shape ({m}, {n}), and its first element lies {beyond} bytes beyond such a "
            f'multiple: make it as cupy.empty(({ld}, {n}), "{dtype}", order="F")[:{m}]'
        )
