"""NumPy in the place of CuPy, and a cuBLAS behind raw pointers, for tests of benchmarks.rounding."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.rounding.engines import Engine
from benchmarks.rounding.operands import rounded, widened
from tests.support.fake_card import Array


def tf32(x: np.ndarray) -> np.ndarray:
    """To the nearest of TF32, ties away from zero, as cvt.rna does."""
    return ((x.view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


def computed(engine: Engine, A: Any, B: Any) -> Any:
    """What a good library gives; an emulating engine is the plain one."""
    sums = "float64" if engine.inputs == "float64" else "float32"
    a, b = (widened(x, engine.inputs).astype(sums) for x in (A, B))
    if engine.reduced:
        a, b = tf32(a), tf32(b)
    return rounded((a @ b).astype(np.float64), engine.out)


class Strict(Array):
    """An array that, like CuPy's, computes with none of NumPy's and knows no NumPy functions."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if any(isinstance(x, np.ndarray) and not isinstance(x, Strict) for x in inputs):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        if out is not None:
            options["out"] = tuple(plain(x) for x in out)
        found = getattr(ufunc, method)(*map(plain, inputs), **options)
        return out[0] if out is not None else strict(found)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        raise TypeError(f"{function.__name__} of NumPy was given an array of CuPy")


def plain(x: Any) -> Any:
    return x.view(np.ndarray) if isinstance(x, Strict) else x


def strict(x: Any) -> Any:
    return x.view(Strict) if isinstance(x, np.ndarray) else x


def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return strict(function(*map(plain, arguments), **options))

    return call


REALS = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}  # cudaDataType_t


def gemm_ex(handle: int, *arguments: Any) -> None:
    """Column-major, from raw addresses; TF32 is 77, BF16x9 (78) is not there, and 79 is float64."""
    ta, tb, m, n, k, alpha, a, of_a, lda, b, of_b, ldb, beta, c, of_c, ldc, compute, algorithm = arguments
    assert (handle, ta, tb, algorithm) == (1, 0, 0, -1)
    sums = {68: np.float32, 77: np.float32, 70: np.float64, 79: np.float64}.get(compute)
    if sums is None:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    def at(pointer: int, dtype: Any, rows: int, columns: int, lead: int) -> np.ndarray:
        assert lead >= rows
        size = np.dtype(dtype).itemsize
        memory = (ctypes.c_char * (size * lead * columns)).from_address(pointer)
        return np.frombuffer(memory, dtype).reshape(columns, lead)[:, :rows].T

    assert [float(at(x, sums, 1, 1, 1)[0, 0]) for x in (alpha, beta)] == [1, 0]
    A, B = (at(a, REALS[of_a], m, k, lda).astype(sums), at(b, REALS[of_b], k, n, ldb).astype(sums))
    if compute == 77:
        A, B = tf32(np.ascontiguousarray(A)), tf32(np.ascontiguousarray(B))
    at(c, REALS[of_c], m, n, ldc)[...] = (A @ B).astype(REALS[of_c])
