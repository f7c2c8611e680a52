"""LU as on a GPU, without one: `cupy_on_cpu`, SciPy in place of cuBLAS and cuSOLVER, and every kernel but the panel's.

A cluster is more than `cuda_on_cpu` runs, so that cuSOLVER factors all panels, as it does tall ones.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.linalg

from abft_tsm2.core import launch
from abft_tsm2.core.device import KNOWN
from abft_tsm2.linalg import lu as lu_module
from abft_tsm2.linalg.device import lanes, plan
from abft_tsm2.linalg.device.kept import PlansOfThread
from abft_tsm2.linalg.device.schedule import PRODUCTS
from tests.support import cupy_on_cpu, solver_on_cpu
from tests.support.solution_cases import ScipyBlas


class LanesOnCpu:
    """Streams, on which nothing waits."""

    solver = 1

    def __init__(self) -> None:
        self.streams = {lane: solver_on_cpu._Stream(lane=lane) for lane in lanes.PRIORITIES}
        self.blas = dict.fromkeys((*lanes.PRIORITIES, PRODUCTS), ctypes.c_void_p(1))
        self.products = {dtype: lanes.products(dtype) for dtype in ("float64", "float32")}

    handles = lanes.Lanes.handles


def _getrf(dtype: str) -> Any:
    def factor(handle: int, m: int, n: int, at: int, ld: int, space: int, pivots: int, info: int) -> None:
        X = ScipyBlas._matrix(np.dtype(dtype), at, m, n, ld)
        lu, piv, found = scipy.linalg.get_lapack_funcs("getrf", (X,))(X)
        X[...] = lu
        places = np.frombuffer((ctypes.c_int * len(piv)).from_address(pivots), np.int32)
        places[:] = piv + 1  # cuSOLVER counts from 1
        ctypes.c_int.from_address(info).value = found

    return factor


def install(patch: pytest.MonkeyPatch, cache: Path) -> ModuleType:
    """Put it in place of CuPy."""
    cupy = solver_on_cpu.install(patch, cache)
    cupy.cuda.runtime.memcpyDeviceToDevice = 3
    solver = sys.modules["cupy_backends.cuda.libs.cusolver"]
    for letter, dtype in (("s", "float32"), ("d", "float64")):
        setattr(solver, f"{letter}getrf", _getrf(dtype))
        setattr(solver, f"{letter}getrf_bufferSize", lambda handle, m, n, at, ld: 1)
    blas = ScipyBlas()
    card = replace(KNOWN["H200"], multiprocessors=cupy_on_cpu.MULTIPROCESSORS)
    patch.setattr(lanes, "library", lambda: blas)
    patch.setattr(launch, "_allow", lambda *_: None)
    patch.setattr(plan, "lanes", LanesOnCpu)
    patch.setattr(plan, "_kept", PlansOfThread(plan.PLANS))
    patch.setattr(plan, "_has_room", lambda config, device: False)
    patch.setattr(plan, "device_of", lambda index: card)
    given = lu_module.as_array  # which takes this CuPy's arrays for NumPy's
    patch.setattr(lu_module, "as_array", lambda x, *more, **named: on_card(given(x, *more, **named)))
    return cupy


def on_card(x: np.ndarray) -> Any:
    """The same memory, as CuPy's."""
    return x.view(cupy_on_cpu.ndarray)
