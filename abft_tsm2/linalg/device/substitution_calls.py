"""Substitution with a triangle of packed factors by cuBLAS, its arguments prepared."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from abft_tsm2.core.cublas import check_status, library
from abft_tsm2.core.problem import SIZES

_LEFT = 0


@dataclass(frozen=True)
class SolveMethod:
    """How cuBLAS is asked for ``T^-1 B``.

    Attributes
    ----------
    single : {"trsm", "trsv"}
        The routine for one right-hand side.
    block : int
        Solve so many equations at a time, and take them out of the others by a product; 0 for all in one call.
    """

    single: str = "trsm"
    block: int = 0


def handle_on(stream: int) -> int:
    """CuPy's handle of cuBLAS for this thread and device, set to a stream: only CuPy's own calls do that themselves."""
    import cupy

    handle: int = cupy.cuda.device.get_cublas_handle()
    check_status(library().cublasSetStream_v2(ctypes.c_void_p(handle), ctypes.c_void_p(stream)))
    return handle


class TriangularSolve:
    """``X := op(T)^-1 X`` of column-major matrices, T a triangle of an n x n matrix.

    Parameters
    ----------
    dtype : {"float64", "float32"}
    n, count : int
        Rows and columns of X.
    ld, ld_x : int
        Leading dimensions.
    lower, turned, unit : bool
        Which triangle; whether op transposes it; whether its diagonal is ones, which are not read.
    method : SolveMethod
    """

    def __init__(
        self,
        dtype: str,
        n: int,
        count: int,
        ld: int,
        ld_x: int,
        *,
        lower: bool,
        turned: bool,
        unit: bool,
        method: SolveMethod,
    ) -> None:
        self._real = ctypes.c_double if dtype == "float64" else ctypes.c_float
        self._letter, self._size = "d" if dtype == "float64" else "s", SIZES[dtype]
        self._ld, self._ld_x, self._count = ld, ld_x, count
        self._turned, self._how = turned, (not lower, turned, unit)  # as cuBLAS counts them
        self._handle = ctypes.c_void_p()
        self._calls: list[tuple[Any, tuple[Any, ...], list[tuple[ctypes.c_void_p, int, int]]]] = []
        width, forward = method.block or n, lower != turned
        starts = range(0, n, width)
        for k in starts if forward else reversed(starts):
            b = min(width, n - k)
            self._solve(k, b, method.single)
            # X(rest) -= op(T)(rest, k:k+b) X(k:k+b)
            first, last = (k + b, n) if forward else (0, k)
            if last > first:
                self._subtract(first, last - first, k, b)

    def _solve(self, k: int, b: int, single: str) -> None:
        T, X = (0, (k + k * self._ld) * self._size), (1, k * self._size)
        uplo, op, diagonal = (ctypes.c_int(x) for x in self._how)
        if self._count == 1 and single == "trsv":
            self._add("trsv", uplo, op, diagonal, self._int(b), T, self._int(self._ld), X, self._int(1))
            return
        sizes = self._int(b), self._int(self._count)
        leading = self._int(self._ld), self._int(self._ld_x)
        left, one = self._int(_LEFT), self._factor(1.0)
        self._add("trsm", left, uplo, op, diagonal, *sizes, one, T, leading[0], X, leading[1])

    def _subtract(self, first: int, rows: int, k: int, b: int) -> None:
        row, column = (k, first) if self._turned else (first, k)
        T = 0, (row + column * self._ld) * self._size
        X, to = (1, k * self._size), (1, first * self._size)
        op, minus, one, ld = self._int(self._turned), self._factor(-1.0), self._factor(1.0), self._int(self._ld)
        if self._count == 1:
            sizes = (b, rows) if self._turned else (rows, b)
            taken = op, *map(self._int, sizes), minus, T, ld, X, self._int(1)
            self._add("gemv", *taken, one, to, self._int(1))
            return
        sizes3, ld_x = map(self._int, (rows, self._count, b)), self._int(self._ld_x)
        self._add("gemm", op, self._int(0), *sizes3, minus, T, ld, X, ld_x, one, to, ld_x)

    @staticmethod
    def _int(value: int) -> Any:
        return ctypes.c_int(value)

    def _factor(self, value: float) -> Any:
        return ctypes.pointer(self._real(value))

    def _add(self, routine: str, *arguments: Any) -> None:
        """A call; pairs among its arguments are places: of T (0) or X (1), and bytes from there."""
        places, given = [], []
        for x in arguments:
            if isinstance(x, tuple):
                address = ctypes.c_void_p()
                places.append((address, *x))
                given.append(address)
            else:
                given.append(x)
        call = getattr(library(), f"cublas{self._letter.upper()}{routine}_v2")
        self._calls.append((call, (self._handle, *given), places))

    def __call__(self, handle: int, T: int, X: int) -> None:
        """Queue it by this handle of cuBLAS, for matrices at these addresses."""
        self._handle.value = handle
        where = T, X
        for call, arguments, places in self._calls:
            for address, which, offset in places:
                address.value = where[which] + offset
            status = call(*arguments)
            if status:
                check_status(status)
