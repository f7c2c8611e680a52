"""cuSOLVER's potrf and the streams of a factorisation, for `cupy_on_cpu`: Cholesky as on a GPU, without one."""

from __future__ import annotations

import ctypes
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg

from abft_tsm2.core.device import KNOWN
from abft_tsm2.linalg import cholesky
from abft_tsm2.linalg.device import cholesky_plan
from abft_tsm2.linalg.device.kept import PlansOfThread
from tests.support import cupy_on_cpu

LOWER, UPPER = 0, 1


class _Stream(cupy_on_cpu.Stream):
    def use(self) -> None:
        cupy_on_cpu.Stream.current[:] = [self]


class _Event(cupy_on_cpu.Event):
    numbers = itertools.count(1)

    def __init__(self, **_: Any) -> None:
        self.ptr = next(_Event.numbers)


def _matrix(dtype: Any, n: int, at: int, ld: int) -> np.ndarray:
    count = ld * (n - 1) + n
    memory = np.frombuffer((ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(at), dtype)
    return np.lib.stride_tricks.as_strided(memory, (n, n), (memory.itemsize, ld * memory.itemsize))


def _potrf(dtype: str) -> Any:
    def factor(handle: int, half: int, n: int, at: int, ld: int, space: int, size: int, info: int) -> None:
        X = _matrix(dtype, n, at, ld)
        assert size == 4 * n
        names = scipy.linalg.get_lapack_funcs(("potrf",), (X,))
        c, found = names[0](X, lower=half == LOWER, clean=False)
        inside = np.tri(n, dtype=bool) if half == LOWER else np.tri(n, dtype=bool).T
        X[inside] = c[inside]
        ctypes.c_int.from_address(info).value = found

    return factor


def install(patch: pytest.MonkeyPatch, cache: Path) -> ModuleType:
    """Put it in place of CuPy."""
    cupy, _ = cupy_on_cpu.install(patch, cache)
    vars(cupy.cuda).update(Event=_Event, Stream=_Stream, device=SimpleNamespace(get_cusolver_handle=lambda: 1))
    start = _Stream()
    cupy.cuda.get_current_stream = lambda: (cupy_on_cpu.Stream.current or [start])[-1]
    cupy.array = cupy_on_cpu._on_card(np.array)
    waits = dict.fromkeys(("eventRecord", "streamWaitEvent", "deviceSynchronize"), lambda *_: None)
    vars(cupy.cuda.runtime).update(waits)
    solver, blas = ModuleType("cupy_backends.cuda.libs.cusolver"), ModuleType("cupy_backends.cuda.libs.cublas")
    for letter, dtype in (("s", "float32"), ("d", "float64")):
        setattr(solver, f"{letter}potrf", _potrf(dtype))
        setattr(solver, f"{letter}potrf_bufferSize", lambda handle, half, n, at, ld: 4 * n)
    vars(blas).update(CUBLAS_FILL_MODE_LOWER=LOWER, CUBLAS_FILL_MODE_UPPER=UPPER)
    libs = ModuleType("cupy_backends.cuda.libs")
    vars(libs).update(cusolver=solver, cublas=blas)
    patch.setitem(sys.modules, "cupy_backends.cuda.libs", libs)
    for name, module in (("cusolver", solver), ("cublas", blas)):
        patch.setitem(sys.modules, f"cupy_backends.cuda.libs.{name}", module)
    card = replace(KNOWN["H200"], multiprocessors=cupy_on_cpu.MULTIPROCESSORS)
    patch.setattr(cholesky_plan, "device_of", lambda index: card)
    patch.setattr(cholesky_plan, "_kept", PlansOfThread(cholesky_plan.KEPT))
    patch.setattr(cupy_on_cpu.Stream, "current", [])
    given = cholesky.as_array  # which takes this CuPy's arrays for NumPy's
    patch.setattr(cholesky, "as_array", lambda x, name, **how: given(x, name, **how).view(cupy_on_cpu.ndarray))
    return cupy
