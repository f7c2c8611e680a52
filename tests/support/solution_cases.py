"""Linear systems solved by the kernels of `abft_tsm2.linalg.device.solution` on the CPU: CuPy made of NumPy, and cuBLAS
made of SciPy, to which its own arguments are given."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg

from abft_tsm2.linalg.device import solution, substitution_calls
from abft_tsm2.linalg.device.kept import PlansOfThread
from abft_tsm2.linalg.device.solution_config import TYPED, WITH_MORE, SolutionKernel
from tests.support import cupy_on_cpu

ROUTINES = (
    "pivot_moves",
    "follow_moves",
    "sum_weights",
    "weigh_rows",
    "part_rows",
    "part_columns",
    "judge_solution",
)
KERNELS = [
    SolutionKernel(routine, dtype, more)
    for routine in ROUTINES
    for dtype in ("float64", "float32")[: 1 + (routine in TYPED)]
    for more in (False, True)[: 1 + (routine in WITH_MORE)]
]


class ScipyBlas:
    """cuBLAS's routines by name, on NumPy's memory; `damage` is called with each solution, in turn counted from 0."""

    def __init__(self) -> None:
        self.damage: Callable[[int, np.ndarray], None] = lambda call, X: None
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        routine = getattr(self, "_" + name.removeprefix("cublas").removesuffix("_v2")[1:])
        real = np.float64 if name[6] == "D" else np.float32

        def call(handle: Any, *given: Any) -> int:
            self.calls.append(name)
            routine(real, *(getattr(getattr(x, "contents", x), "value", x) for x in given))
            return 0

        return call

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def cublasSetStream_v2(self, handle: Any, stream: Any) -> int:
        """As it is called; there are no streams here."""
        return 0

    @staticmethod
    def _matrix(real: Any, address: int, rows: int, columns: int, ld: int) -> np.ndarray:
        count = (columns - 1) * ld + rows
        buffer = (ctypes.c_char * (count * np.dtype(real).itemsize)).from_address(address)
        step = np.dtype(real).itemsize
        return np.ndarray((rows, columns), real, buffer, 0, (step, ld * step))

    def _trsm(self, real: Any, side: int, uplo: int, op: int, unit: int, *rest: Any) -> None:
        n, count, alpha, T, ld, X, ld_x = rest
        assert (side, alpha) == (0, 1.0)
        x, t = self._matrix(real, X, n, count, ld_x), self._matrix(real, T, n, n, ld)
        x[...] = scipy.linalg.solve_triangular(t, x, trans=op, lower=not uplo, unit_diagonal=unit, check_finite=False)
        self.damage(sum("trs" in name for name in self.calls) - 1, x)

    def _trsv(self, real: Any, uplo: int, op: int, unit: int, n: int, T: int, ld: int, X: int, step: int) -> None:
        self._trsm(real, 0, uplo, op, unit, n, 1, 1.0, T, ld, X, n)

    def _gemm(self, real: Any, op: int, none: int, *rest: Any) -> None:
        m, n, k, alpha, A, lda, B, ldb, beta, C, ldc = rest
        a = self._matrix(real, A, k, m, lda).T if op else self._matrix(real, A, m, k, lda)
        assert (none, beta) == (0, 1.0)
        self._matrix(real, C, m, n, ldc)[...] += real(alpha) * (a @ self._matrix(real, B, k, n, ldb))

    def _gemv(self, real: Any, op: int, m: int, n: int, alpha: float, A: int, lda: int, x: int, *rest: Any) -> None:
        step, beta, y, step_y = rest
        lines, terms = (n, m) if op else (m, n)
        assert beta == 1.0
        a = self._matrix(real, A, m, n, lda)
        product = self._matrix(real, x, 1, terms, step) @ (a if op else a.T)
        self._matrix(real, y, 1, lines, step_y)[...] += real(alpha) * product


def install(patch: pytest.MonkeyPatch, cache: Path) -> ScipyBlas:
    """Let `solve_on_device` run without a GPU; what stands for cuBLAS."""
    return install_beside(patch, cupy_on_cpu.install(patch, cache)[0])


def install_beside(patch: pytest.MonkeyPatch, cupy: Any) -> ScipyBlas:
    """The same with this CuPy, which has been put in place."""
    from dataclasses import replace

    from abft_tsm2.core.device import KNOWN

    blas = ScipyBlas()
    if vars(cupy.cuda).setdefault("device", None) is None:
        cupy.cuda.device = SimpleNamespace()
    cupy.cuda.device.get_cublas_handle = lambda: 1
    card = replace(KNOWN["H200"], multiprocessors=2)
    patch.setattr(solution, "device_of", lambda index: card)
    patch.setattr(solution, "_kept", PlansOfThread(solution.KEPT))
    patch.setattr(substitution_calls, "library", lambda: blas)
    cupy.array = cupy_on_cpu._on_card(np.array)
    cupy.ascontiguousarray = cupy_on_cpu._on_card(np.ascontiguousarray)
    return blas


def on_card(x: np.ndarray) -> Any:
    """The same memory, as CuPy's."""
    return x.view(cupy_on_cpu.ndarray)
