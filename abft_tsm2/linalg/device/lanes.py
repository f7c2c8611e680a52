"""Streams of a factorisation on a GPU, and cuBLAS and cuSOLVER on each of them."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from abft_tsm2.core.capture import current
from abft_tsm2.core.cublas import WORKSPACE, Handle, check_status, library
from abft_tsm2.core.launch import Where
from abft_tsm2.linalg.device.schedule import CHECKS, LANES, LEFT, MAIN, PANELS, PRODUCTS, ROWS

EARLY_CHECKS = "early checks"
PRIORITIES = {PANELS: -5, LEFT: -5, ROWS: -2, PRODUCTS: -1, CHECKS: 0, EARLY_CHECKS: -2}
"""Of streams; of two for checks, the second one where all streams are joined behind every step, which checks behind its
product would make 2 to 3 % longer. It gains nothing where most steps are longer, and not joined."""
_OPERATION_NONE, _TRANSPOSED = 0, 1


class Lanes:
    """The streams that one factorisation at a time uses, beside that of the caller.

    Attributes
    ----------
    streams : dict
        CuPy streams by lane.
    blas : dict
        Handles of cuBLAS by lane, each with a workspace of its own: products of several lanes run side by side.
    products : dict
        `products` by type.
    solver : int
        A handle of cuSOLVER.
    """

    def __init__(self) -> None:
        import cupy
        from cupy_backends.cuda.libs import cusolver

        self.streams = {lane: cupy.cuda.Stream(non_blocking=True, priority=p) for lane, p in PRIORITIES.items()}
        self.blas, self._keeps = {}, []
        for lane in (PANELS, ROWS, PRODUCTS):
            handle, space = Handle(), cupy.empty(WORKSPACE, cupy.uint8)
            self._keeps.append(space)
            handle.place(self.streams[lane].ptr, space)
            self.blas[lane] = handle.value
        self.products = {dtype: products(dtype) for dtype in ("float64", "float32")}
        self.solver = cusolver.create()

    def handles(self, main: int, *, early: bool = False) -> dict[str, int]:
        """Handles of the streams; that of the caller among them, and for checks the one that runs before products where
        they are `early`."""
        found = {lane: main if lane == MAIN else self.streams[lane].ptr for lane in LANES}
        return found | {CHECKS: self.streams[EARLY_CHECKS if early else CHECKS].ptr}


_kept = threading.local()


def lanes() -> Lanes:
    """Those of this thread, on the current device."""
    import cupy

    device = int(cupy.cuda.runtime.getDevice())
    found: Lanes | None = _kept.__dict__.get(str(device))
    if found is None:
        found = _kept.__dict__[str(device)] = Lanes()
    return found


class PreparedProduct:
    """``C = alpha A B + beta C`` of column-major float64 or float32 matrices by cuBLAS, on a lane.

    Parameters
    ----------
    lanes : Lanes
    lane : str
    dtype : {"float64", "float32"}
    sizes : (int, int, int)
        m, n and k of the product.
    alpha, beta : float
    A, B, C : ((str, int), int)
        Name of an address, bytes behind it, and the leading dimension.
    """

    def __init__(
        self, lanes: Lanes, lane: str, dtype: str, sizes: Any, alpha: float, A: Any, B: Any, beta: float, C: Any
    ):
        self._call = library().cublasDgemm_v2 if dtype == "float64" else library().cublasSgemm_v2
        factors = _factor(dtype, alpha), _factor(dtype, beta)
        self._operands = tuple((ctypes.c_void_p(), *place) for place, _ in (A, B, C))
        (a, *_), (b, *_), (c, *_) = self._operands
        lda, ldb, ldc = (ctypes.c_int(leading) for _, leading in (A, B, C))
        none = ctypes.c_int(_OPERATION_NONE)
        m, n, k = (ctypes.c_int(size) for size in sizes)
        self._arguments = lanes.blas[lane], none, none, m, n, k, factors[0], a, lda, b, ldb, factors[1], c, ldc

    def __call__(self, stream: int, where: Where) -> None:
        """Queue the product on the stream of its lane."""
        for operand, name, offset in self._operands:
            operand.value = where[name] + offset
        status = self._call(*self._arguments)
        if status:
            check_status(status)


def _factor(dtype: str, value: float) -> Any:
    """A number where cuBLAS reads it: made anew, as a bit of it may flip."""
    return ctypes.pointer((ctypes.c_double if dtype == "float64" else ctypes.c_float)(value))


def add_product(lanes: Lanes, lane: str, dtype: str, alpha: float, A: Any, B: Any, C: Any) -> None:
    """Queue ``C += alpha A B`` on the stream of a lane: CuPy matrices, not empty, with contiguous columns.

    Parameters
    ----------
    lanes : Lanes
    lane : str
    dtype : {"float64", "float32"}
    alpha : float
    A : (m, k) array
    B : (k, n) array
    C : (m, n) array
    """
    (m, n), k, handle, factors = C.shape, A.shape[1], lanes.blas[lane], (_factor(dtype, alpha), _factor(dtype, 1.0))
    (a, lda), (b, ldb), (c, ldc) = ((X.data.ptr, max(X.shape[0], X.strides[1] // X.itemsize)) for X in (A, B, C))
    line, whole = lanes.products[dtype]  # of a line gemm would make milliseconds
    if n == 1:
        status = line(handle, _OPERATION_NONE, m, k, factors[0], a, lda, b, 1, factors[1], c, 1)
    elif m == 1:  # C' += alpha B' A'
        status = line(handle, _TRANSPOSED, k, n, factors[0], b, ldb, a, lda, factors[1], c, ldc)
    else:
        none = (_OPERATION_NONE,) * 2
        status = whole(handle, *none, m, n, k, factors[0], a, lda, b, ldb, factors[1], c, ldc)
    check_status(status)


def products(dtype: str) -> tuple[Any, Any]:
    """gemv and gemm of cuBLAS, to be called with Python's numbers."""
    letter, address, number = "D" if dtype == "float64" else "S", ctypes.c_void_p, ctypes.c_int
    line, whole = (library()[f"cublas{letter}{name}_v2"] for name in ("gemv", "gemm"))
    operands = (address, number) * 2, (address, address, number)  # A, B; beta, C
    line.argtypes = address, *(number,) * 3, address, *operands[0], *operands[1]
    whole.argtypes = address, *(number,) * 5, address, *operands[0], *operands[1]
    return line, whole


class LibraryPanel:
    """A panel factored by cuSOLVER's getrf on the lane of panels, where it is taller than the kernel's are.

    Parameters
    ----------
    lanes : Lanes
    dtype : {"float64", "float32"}
    m, b : int
        Rows and columns.
    place : (str, int)
        Name of the address of the factors, and bytes from there to the panel.
    ld, pivots, info : int
        Leading dimension; addresses of its results.
    """

    def __init__(
        self, lanes: Lanes, dtype: str, m: int, b: int, place: tuple[str, int], ld: int, pivots: int, info: int
    ) -> None:
        import cupy
        from cupy_backends.cuda.libs import cusolver

        letter = {"float64": "d", "float32": "s"}[dtype]
        self._handle, self._call = lanes.solver, getattr(cusolver, f"{letter}getrf")
        self._stream = lanes.streams[PANELS]
        size = getattr(cusolver, f"{letter}getrf_bufferSize")(self._handle, m, b, 0, ld)
        self._space = cupy.empty(size, dtype)
        self._name, self._offset = place
        self._sizes, self._results = (m, b), (self._space.data.ptr, pivots, info)
        self._ld = ld

    def __call__(self, stream: int, where: Where) -> None:
        """Queue it on the stream of its lane."""
        place = where[self._name] + self._offset
        with current(self._stream):  # which CuPy hands to cuSOLVER, whatever the handle's was
            self._call(self._handle, *self._sizes, place, self._ld, *self._results)
