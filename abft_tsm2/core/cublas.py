"""Products by cuBLAS, called directly: CuPy's own `matmul` chooses the layout by itself, and has no float32 result of
16-bit operands. While a stream is captured CuPy's bindings refuse; the library itself does not (`Handle`).

float32 is float32 (TF32 only where that is asked for, or the environment forces it: `forces_tf32`), 16-bit operands are
multiplied by the tensor cores and added in float32.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array
from abft_tsm2.core.problem import Problem

CUDA_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}  # cudaDataType_t
_COMPUTE_32F, _COMPUTE_TF32, _DEFAULT = 68, 77, -1  # cublasComputeType_t, cublasGemmAlgo_t
_SUMS_IN_FLOAT32 = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
WORKSPACE = 32 << 20  # bytes that cuBLAS may use on a stream: what NVIDIA recommends for Hopper
SERVED = {
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
    *((half, half, out) for half in ("float16", "bfloat16") for out in (half, "float32")),
}
"""Types of A, B and C."""
_FUNCTIONS = {
    "gemmEx": "cublasGemmEx",
    "sgemm": "cublasSgemm_v2",
    "dgemm": "cublasDgemm_v2",
    "gemmStridedBatchedEx": "cublasGemmStridedBatchedEx",
    "sgemmStridedBatched": "cublasSgemmStridedBatched",
    "dgemmStridedBatched": "cublasDgemmStridedBatched",
}
"""What the functions of CuPy are called in the library."""


def serves(problem: Problem) -> bool:
    """Whether cuBLAS multiplies these types in this layout in one call."""
    types = problem.dtype, problem.weights, problem.out
    return (
        types in SERVED and "A" not in (problem.order, problem.out_order) and min(problem.m, problem.k, problem.n) > 0
    )


TF32_FORCED = (
    "NVIDIA_TF32_OVERRIDE makes cuBLAS round float32 operands to 11 significant bits, which checks of float32 factors "
    "and solutions do not allow: unset it, or use float64"
)


@functools.cache  # cuBLAS and CuPy read their variables once
def forces_tf32() -> bool:
    """Whether NVIDIA's libraries are told to round float32 operands to TF32, whatever is asked of them."""
    return _number("NVIDIA_TF32_OVERRIDE") > 0


@functools.cache
def cupy_rounds_to_tf32() -> bool:
    """Whether CuPy's own products of float32 matrices, ``A @ B``, round their operands to TF32."""
    forbidden = "NVIDIA_TF32_OVERRIDE" in os.environ and not forces_tf32()
    return forces_tf32() or (_number("CUPY_TF32") > 0 and not forbidden)


def _number(variable: str) -> int:
    text = os.environ.get(variable, "").strip()
    return int(text) if text.isdecimal() else 0


@functools.cache
def library() -> Any:
    """cuBLAS as CuPy has loaded it: its own bindings take no prepared arguments, check every one, and refuse to be
    captured."""
    from cupy_backends.cuda.libs import cublas

    handle = cublas.create()
    version = cublas.getVersion(handle) // 10000
    cublas.destroy(handle)
    return ctypes.CDLL(f"libcublas.so.{version}")


def check_status(status: int) -> None:
    """Raise what a status of cuBLAS says, unless it is success."""
    if status:
        from cupy_backends.cuda.libs import cublas

        raise cublas.CUBLASError(status)


class Handle:
    """A handle of the library, never destroyed: that would wait for the device.

    Attributes
    ----------
    value : ctypes.c_void_p
    """

    def __init__(self) -> None:
        self.value = ctypes.c_void_p()
        check_status(library().cublasCreate_v2(ctypes.byref(self.value)))

    def place(self, stream: int, workspace: Array) -> None:
        """Queue on this stream from now on, with this memory as workspace: whatever shares neither runs side by side.

        The memory has to live as long as what was queued, or captured, with it.
        """
        address, size = ctypes.c_void_p(workspace.data.ptr), ctypes.c_size_t(workspace.nbytes)
        check_status(library().cublasSetStream_v2(self.value, ctypes.c_void_p(stream)))
        check_status(library().cublasSetWorkspace_v2(self.value, address, size))


_own: dict[int, Handle] = {}
_lock = threading.Lock()


def prepare_capture() -> None:
    """Make the handle of the current device, which would spoil a capture that has begun."""
    import cupy

    device = cupy.cuda.runtime.getDevice()
    if device not in _own:
        with _lock:
            _own.setdefault(device, Handle())


@contextmanager
def captured_on(stream: int, workspace: Array) -> Iterator[Handle]:
    """A handle for products on a stream that is captured, given by its handle, of the current device; for one thread
    at a time.

    Raises
    ------
    RuntimeError
        If it was not prepared.
    """
    import cupy

    handle = _own.get(cupy.cuda.runtime.getDevice())
    if handle is None:
        raise RuntimeError(
            "cuBLAS cannot be set up while a stream is captured: call protected_gemm once on this device before that"
        )
    with _lock:
        handle.place(stream, workspace)
        yield handle


@dataclass(frozen=True)
class Gemm:
    """A plan: one call of cuBLAS.

    Attributes
    ----------
    function, handle : callable
        Of cuBLAS; and what gives its handle of the current device.
    swapped : bool
        Whether B is the first operand: to cuBLAS a row-major matrix is the transpose of a column-major one, and a
        row-major C is C^T = B^T A^T.
    real : type of alpha and beta
    head, first, second, result, tail : tuple of int
        What the function is given beside the handle, the factors and the addresses: operations and sizes; after each
        address its type, where there is a choice, leading dimension, and step in a stack; then what is left.
    unit : array
        alpha = 1 and beta = 0, at `unit_at`.
    modes : pair of callables or None
        What reads and what sets cuBLAS's mode, where the result has 16 bits: it may then add up parts of a product in
        16 bits, unless it is told not to.
    """

    function: Callable[..., None]
    handle: Callable[[], int]
    swapped: bool
    real: Any
    head: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    result: tuple[int, ...]
    tail: tuple[int, ...]
    unit: Any
    unit_at: int
    modes: tuple[Callable[[int], int], Callable[[int, int], None]] | None = None

    @classmethod
    def of(cls, problem: Problem, A: Array, B: Array, C: Array, *, tf32: bool = False) -> Gemm:
        """The plan for a problem that cuBLAS `serves`, and arrays of such strides.

        Parameters
        ----------
        problem : Problem
        A, B, C : (m, k), (k, n), (m, n) CuPy arrays, or stacks of `problem.batch` of them
            Rows or columns contiguous, in each of them; A or B may be one matrix for all products.
        tf32 : bool
            Let tensor cores round float32 operands to 11 significant bits.
        """
        import cupy
        from cupy_backends.cuda.libs import cublas

        m, k, n = problem.m, problem.k, problem.n
        (a_op, lda), (b_op, ldb), (c_op, ldc) = (_leading(x) for x in (A, B, C))
        head = (1 - b_op, 1 - a_op, n, m, k) if c_op else (a_op, b_op, m, n, k)
        operands = ((B, ldb), (A, lda), (C, ldc)) if c_op else ((A, lda), (B, ldb), (C, ldc))
        mixed, stacked = A.itemsize < 4 or tf32, problem.batch > 1
        types = problem.dtype, problem.dtype, problem.out
        first, second, result = (
            ((CUDA_TYPES[dtype],) if mixed else ()) + (leading,) + ((step(x) // x.itemsize,) if stacked else ())
            for dtype, (x, leading) in zip(types, operands, strict=True)
        )
        name = "gemm" if mixed else {"float32": "sgemm", "float64": "dgemm"}[problem.dtype]
        name += "StridedBatched" * stacked + "Ex" * mixed
        real = np.float64 if problem.sums == "float64" else np.float32
        unit = np.array((1, 0), real)
        return cls(
            getattr(cublas, name),
            cupy.cuda.device.get_cublas_handle,
            bool(c_op),
            real,
            head,
            first,
            second,
            result,
            (problem.batch,) * stacked + (_COMPUTE_TF32 if tf32 else _COMPUTE_32F, _DEFAULT) * mixed,
            unit,
            unit.ctypes.data,
            (cublas.getMathMode, cublas.setMathMode) if C.itemsize == 2 else None,
        )

    def on(self, handle: Handle, A: Array, B: Array, C: Array, alpha: float, beta: float) -> None:
        """Queue ``C = alpha A B + beta C`` on the stream of a handle, which may be captured."""
        of, number, address = library(), ctypes.c_int, ctypes.c_void_p
        x, y = (B, A) if self.swapped else (A, B)
        factors, at = self._factors(alpha, beta)
        stacked = len(self.tail) % 2 == 1  # the number of products, in front of two for types

        def placed(x: Array, rest: tuple[int, ...]) -> list[Any]:
            sizes = [*map(number, rest[: len(rest) - stacked]), *map(ctypes.c_longlong, rest[len(rest) - stacked :])]
            return [address(x.data.ptr), *sizes]

        if self.modes is not None:
            check_status(of.cublasSetMathMode(handle.value, number(_SUMS_IN_FLOAT32)))
        operands = *placed(x, self.first), *placed(y, self.second)
        result = address(at + factors.itemsize), *placed(C, self.result)
        call = getattr(of, _FUNCTIONS[self.function.__name__])
        check_status(
            call(handle.value, *map(number, self.head), address(at), *operands, *result, *map(number, self.tail))
        )

    def _factors(self, alpha: float, beta: float) -> tuple[Any, int]:
        """Both factors as an array, and its address."""
        if alpha == 1 and beta == 0:
            return self.unit, self.unit_at
        factors = np.array((alpha, beta), self.real)
        return factors, factors.ctypes.data

    def __call__(self, A: Array, B: Array, C: Array, alpha: float, beta: float) -> None:
        """Queue ``C = alpha A B + beta C`` on the current device and stream."""
        x, y = (B, A) if self.swapped else (A, B)
        factors, at = self._factors(alpha, beta)
        handle = self.handle()
        if self.modes is not None:
            read, write = self.modes
            mode = read(handle)
            write(handle, mode | _SUMS_IN_FLOAT32)
        self.function(
            *(handle, *self.head, at, x.data.ptr, *self.first, y.data.ptr, *self.second),
            *(at + factors.itemsize, C.data.ptr, *self.result, *self.tail),
        )
        if self.modes is not None:
            write(handle, mode)


def _leading(x: Array) -> tuple[int, int]:
    """cuBLAS's operation (0 as it is, 1 transposed) of a matrix with contiguous columns or rows, and its leading
    dimension."""
    (rows, columns), (down, along), size = x.shape[-2:], x.strides[-2:], x.itemsize
    apart = rows == 1 and along != size  # a column-major row: its elements lie a leading dimension apart
    if (down == size or apart) and (along >= rows * size or columns == 1):
        return 0, max(along // size if columns > 1 else 1, rows)
    return 1, max(down // size if rows > 1 else 1, columns)


def step(x: Any) -> int:
    """Bytes from one matrix of a stack to the next; 0 where there is one for all."""
    return x.strides[0] if x.ndim == 3 and x.shape[0] > 1 else 0


def layout(x: Any) -> str:
    """``"F"``, ``"C"`` or, where neither columns nor rows are contiguous, ``"A"``."""
    (rows, columns), (down, along), size = x.shape[-2:], x.strides[-2:], x.itemsize
    if (down == size or rows <= 1) and (along >= rows * size or columns <= 1):
        return "F"
    if (along == size or columns <= 1) and (down >= columns * size or rows <= 1):
        return "C"
    return "A"
