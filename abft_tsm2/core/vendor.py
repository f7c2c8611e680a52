"""Products by cuBLAS, called directly: CuPy's own `matmul` chooses the layout by itself, and has no float32 result of
16-bit operands.

float32 is float32 (never TF32), 16-bit operands are multiplied by the tensor cores and added in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from abft_tsm2.arrays import Array
from abft_tsm2.core.config import Problem

_CUDA_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}  # cudaDataType_t
_COMPUTE_32F, _DEFAULT = 68, -1  # cublasComputeType_t, cublasGemmAlgo_t
SERVED = {
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    *((half, half, out) for half in ("float16", "bfloat16") for out in (half, "float32")),
}
"""Types of A, B and C."""


def serves(problem: Problem) -> bool:
    """Whether cuBLAS multiplies these types in this layout in one call."""
    types = problem.dtype, problem.weights, problem.out
    return (
        types in SERVED and "A" not in (problem.order, problem.out_order) and min(problem.m, problem.k, problem.n) > 0
    )


def gemm(problem: Problem, A: Array, B: Array, C: Array, alpha: float, beta: float) -> None:
    """``C = alpha A B + beta C`` by one call of cuBLAS, on the current device and stream.

    Parameters
    ----------
    problem : Problem
        Which `serves`.
    A, B, C : (m, k), (k, n), (m, n) CuPy arrays, or stacks of `problem.batch` of them
        Rows or columns contiguous, in each of them; B may be one matrix for all products.
    """
    import cupy
    from cupy_backends.cuda.libs import cublas

    handle = cupy.cuda.device.get_cublas_handle()
    m, k, n = problem.m, problem.k, problem.n
    # To cuBLAS a row-major matrix is the transpose of a column-major one; a row-major C is C^T = B^T A^T.
    (a_op, lda), (b_op, ldb), (c_op, ldc) = (_leading(x) for x in (A, B, C))
    if c_op:
        first, second, sizes, ops = (B, ldb), (A, lda), (n, m, k), (1 - b_op, 1 - a_op)
    else:
        first, second, sizes, ops = (A, lda), (B, ldb), (m, n, k), (a_op, b_op)
    real = np.float64 if problem.sums == "float64" else np.float32
    one, other = np.array(alpha, real), np.array(beta, real)
    x, y, z = first[0].data.ptr, second[0].data.ptr, C.data.ptr
    kind = "gemmEx" if C.itemsize < 4 or A.itemsize < 4 else {"float32": "sgemm", "float64": "dgemm"}[problem.dtype]
    strides = [a.strides[0] // a.itemsize if a.ndim == 3 and a.shape[0] > 1 else 0 for a in (first[0], second[0], C)]
    pointers = one.ctypes.data, other.ctypes.data
    if kind == "gemmEx":
        types = _CUDA_TYPES[problem.dtype], _CUDA_TYPES[problem.out]
        if problem.batch == 1:
            cublas.gemmEx(
                *(handle, *ops, *sizes, pointers[0], x, types[0], first[1], y, types[0], second[1]),
                *(pointers[1], z, types[1], ldc, _COMPUTE_32F, _DEFAULT),
            )
        else:
            cublas.gemmStridedBatchedEx(
                *(handle, *ops, *sizes, pointers[0], x, types[0], first[1], strides[0]),
                *(y, types[0], second[1], strides[1], pointers[1], z, types[1], ldc, strides[2]),
                *(problem.batch, _COMPUTE_32F, _DEFAULT),
            )
    elif problem.batch == 1:
        getattr(cublas, kind)(handle, *ops, *sizes, pointers[0], x, first[1], y, second[1], pointers[1], z, ldc)
    else:
        getattr(cublas, f"{kind}StridedBatched")(
            *(handle, *ops, *sizes, pointers[0], x, first[1], strides[0], y, second[1], strides[1]),
            *(pointers[1], z, ldc, strides[2], problem.batch),
        )


def _leading(x: Array) -> tuple[int, int]:
    """cuBLAS's operation (0 as it is, 1 transposed) of a matrix with contiguous columns or rows, and its leading
    dimension."""
    (rows, columns), (down, along), size = x.shape[-2:], x.strides[-2:], x.itemsize
    if down == size and (along >= rows * size or columns == 1):
        return 0, max(along // size if columns > 1 else 1, rows)
    return 1, max(down // size if rows > 1 else 1, columns)


def layout(x: Any) -> str:
    """``"F"``, ``"C"`` or, where neither columns nor rows are contiguous, ``"A"``."""
    (rows, columns), (down, along), size = x.shape[-2:], x.strides[-2:], x.itemsize
    if (down == size or rows <= 1) and (along >= rows * size or columns <= 1):
        return "F"
    if (along == size or columns <= 1) and (down >= columns * size or rows <= 1):
        return "C"
    return "A"
