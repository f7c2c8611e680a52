"""Call BLAS and LAPACK in place, for the steps of blocked factorisations: factor a panel, exchange rows, solve with a
triangle, subtract a product.

On NumPy they are SciPy's BLAS and LAPACK, working on parts of a larger matrix where they lie: SciPy's wrappers copy
what is not contiguous as a whole, so the routines are called by the addresses that ``scipy.linalg.cython_blas`` and
``cython_lapack`` export. The products with a few columns in between go to BLAS as well. NumPy's matmul would serve them
as well, but brings threads of its own, and two pools that take turns keep each other from the cores: 40 ms instead
of 16 for a product of 1024 x 1024 matrices with a thin one after it, on two cores.

For CuPy, and any other array library, a step is that library's own (`cupyx.scipy.linalg`), written back in place.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, Namespace, from_host, is_column_major, is_cupy, is_numpy, namespace, to_host
from abft_tsm2.core.matmul import multiply
from abft_tsm2.core.tsm2 import tall_skinny_matmul

Integers = np.ndarray[Any, np.dtype[np.int32]]
Order = np.ndarray[Any, np.dtype[np.int64]]
NARROW = 128  # columns that getrf factors as fast as halves of them; twice as many take a sixth longer


class NoPermutation(IndexError):
    """Pivots name a row outside of the matrix, or the order that they lead to does not hold each row once."""


# ---- SciPy's routines ---------------------------------------------------------------------------------------------

_SCALAR = {"f": ctypes.c_float, "d": ctypes.c_double}  # by NumPy's letter of the type; BLAS has s for f


@functools.cache
def _routine(name: str, letter: str) -> Callable[..., None]:
    """A BLAS or LAPACK routine of SciPy, all of whose arguments are pointers."""
    from scipy.linalg import cython_blas, cython_lapack

    module = cython_lapack if name in ("getrf", "laswp", "potrf") else cython_blas
    exported = module.__pyx_capi__[("s" if letter == "f" else "d") + name]
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    signature = api.PyCapsule_GetName(exported)
    count = signature.count(b",") + 1
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * count)(api.PyCapsule_GetPointer(exported, signature))


@functools.cache
def _lapack() -> Any:
    """SciPy's own wrappers: of what is contiguous as a whole, several times as fast to call as by address."""
    return importlib.import_module("scipy.linalg.lapack")


@functools.lru_cache(maxsize=1 << 14)
def _pointed(kind: type, value: Any) -> tuple[int, Any]:
    """Where a scalar argument lies, and what has to live as long as it is used there. Read only."""
    box = kind(value)
    return ctypes.addressof(box), box


def _call(name: str, letter: str, *arguments: Any) -> int:
    """Call a routine: bytes are characters, Python integers and floats scalars, arrays their first element; a list
    receives `info`, which is returned."""
    info = ctypes.c_int(0)
    given: list[int] = []
    boxes = []
    for x in arguments:
        if isinstance(x, np.ndarray):
            given.append(x.ctypes.data)
        elif isinstance(x, list):
            given.append(ctypes.addressof(info))
        else:
            kind = ctypes.c_int if isinstance(x, int) else ctypes.c_char if isinstance(x, bytes) else _SCALAR[letter]
            address, box = _pointed(kind, x)
            given.append(address)
            boxes.append(box)
    _routine(name, letter)(*given)
    found: int = info.value
    return found


def _by_columns(X: np.ndarray[Any, Any]) -> bool:
    """Whether BLAS sees X (by columns) and not its transpose; ValueError where it sees neither."""
    m, n = X.shape
    first, second = (stride // X.itemsize for stride in X.strides)
    if (first == 1 or m == 1) and (second >= max(1, m) or n == 1):
        return True
    if (second == 1 or n == 1) and (first >= max(1, n) or m == 1):
        return False
    raise ValueError(f"a {m} x {n} part with strides {X.strides} has neither rows nor columns that BLAS can take")


def _leading(X: np.ndarray[Any, Any], by_columns: bool) -> int:
    lines: int
    length: int
    lines, length = (X.shape[1], X.shape[0]) if by_columns else X.shape
    stride: int = X.strides[1 if by_columns else 0] // X.itemsize
    return max(1, length) if lines <= 1 else max(stride, length, 1)


# ---- the steps ----------------------------------------------------------------------------------------------------


def factor_panel(X: Array, narrow: int | None = None) -> tuple[Integers, int]:
    """Replace X (m x b, m >= b or not) by its packed factors L \\ U with partial pivoting.

    Parameters
    ----------
    X : (m, b) array, float32 or float64
        On NumPy a part of a column-major matrix.
    narrow : int, optional
        On NumPy, so many columns or fewer go to getrf at once; by default `NARROW`.

    Returns
    -------
    pivots : int32 array on the host
        Row i was exchanged with row ``pivots[i] >= i``, in this order, counted from X's first row.
    info : int
        Number, from 1, of the first pivot that is exactly zero; 0 where there is none.

    Notes
    -----
    LAPACK getrf of halves of halves (S. Toledo, Locality of reference in LU decomposition with partial pivoting, 1997),
    or `cupyx.scipy.linalg.lu_factor` for CuPy, which synchronises with the host.
    """
    if is_numpy(X):
        if X.size and not _by_columns(X):
            raise ValueError("getrf needs a panel of a column-major matrix")
        pivots = np.empty(min(X.shape), np.int32)
        return pivots, _factor_halves(X, pivots, narrow or NARROW)
    if is_cupy(X):
        linalg = importlib.import_module("cupyx.scipy.linalg")
        import warnings

        with warnings.catch_warnings():  # a zero pivot is the caller's to tell
            warnings.simplefilter("ignore")
            packed, found = linalg.lu_factor(X, check_finite=False)
        X[...] = packed
        diagonal = to_host(namespace(X).linalg.diagonal(X) == 0)
        return to_host(found).astype(np.int32), int(diagonal.argmax()) + 1 if diagonal.any() else 0
    host = np.array(to_host(X), order="F")
    pivots, info = factor_panel(host)
    X[...] = from_host(host, X)
    return pivots, info


def _factor_halves(X: np.ndarray[Any, Any], pivots: Integers, narrow: int) -> int:
    """`factor_panel` of a panel by columns, into `pivots`; returns `info`."""
    (m, b), half = X.shape, pivots.size // 2
    if pivots.size == 0:
        return 0
    if pivots.size <= narrow:
        info = _call("getrf", X.dtype.char, m, b, X, _leading(X, True), pivots, [])
        pivots -= np.int32(1)
        return info
    # X(:, :half) = P L U;  U12 = L11^-1 X12;  X22 -= L21 U12;  X22 = P L U
    left, right = X[:, :half], X[:, half:]
    info = _factor_halves(left, pivots[:half], narrow)
    exchange_rows(right, pivots[:half])
    solve_triangle(left[:half, :], right[:half, :], lower=True, unit=True)
    add_product(right[half:, :], left[half:, :], right[:half, :])
    below = _factor_halves(right[half:, :], pivots[half:], narrow)
    exchange_rows(left[half:, :], pivots[half:])
    pivots[half:] += np.int32(half)
    return info or (below and below + half)


def exchange_rows(X: Array, pivots: Integers, *, back: bool = False) -> None:
    """Exchange row i of X with row ``pivots[i]``, for i = 0, 1, ... in turn, or in the opposite order: LAPACK laswp.

    Raises NoPermutation where one of them names no row of X, which is not written to then.
    """
    if 0 in X.shape or pivots.size == 0:
        return
    if is_numpy(X) and _by_columns(X):
        step = -1 if back else 1
        counted = _within(pivots, X.shape[0])
        counted += 1
        _call("laswp", X.dtype.char, X.shape[1], X, _leading(X, True), 1, counted.size, counted, step)
        return
    order = permutation(pivots, X.shape[0])
    X[...] = namespace(X).take(X, from_host(np.argsort(order) if back else order, X), axis=0)


def _within(pivots: Integers, m: int) -> Integers:
    """A copy of pivots for laswp, which writes wherever they point to: each names one of m rows. The copy is checked,
    for the pivots themselves may change behind their check. Raises NoPermutation."""
    copy = pivots.astype(np.int32)
    if copy.size > m or np.maximum.reduce(copy.view(np.uint32)) >= m:  # as which negative ones are the largest
        raise NoPermutation(f"{copy.size} pivots name rows {copy.min()} to {copy.max()} of {m}")
    return copy


def permutation(pivots: Integers, m: int) -> Order:
    """Which of m rows each place holds after the exchanges, each row once.

    Raises NoPermutation where a pivot names no row, or the order changes each time it is computed.
    """
    for _ in range(2):  # an order of other rows has changed meanwhile, and is right the next time
        order = np.arange(m, dtype=np.int64)
        if pivots.size:  # laswp moves the eight bytes of a number, whatever they mean
            moved = _lapack().dlaswp(order.view(np.float64)[:, None], _within(pivots, m), overwrite_a=1)
            order = moved[:, 0].view(np.int64)
        if int(np.add.reduce(order)) == m * (m - 1) // 2:  # which no bit that flips leaves as it is
            return order
    raise NoPermutation(f"twice, the order of {m} rows after {pivots.size} exchanges does not hold each row once")


def factor_definite(X: Array) -> int:
    """Replace the lower triangle of X by its Cholesky factor; the order of the first leading minor that is not
    positive definite, or 0. What is above the diagonal stays. LAPACK potrf."""
    if X.shape[0] == 0:
        return 0
    if is_numpy(X):
        by_columns = _by_columns(X)
        return _call("potrf", X.dtype.char, b"L" if by_columns else b"U", X.shape[0], X, _leading(X, by_columns), [])
    host = np.array(to_host(X), order="F")
    info = factor_definite(host)
    X[...] = from_host(host, X)
    return info


def solve_triangle(T: Array, B: Array, *, lower: bool, unit: bool = False, right: bool = False) -> None:
    """B := T^-1 B, or B T^-1 with `right`, for the triangle of T that `lower` names: BLAS trsm; trsv of one column, as
    LAPACK's getrs, for trsm may multiply by reciprocals, which the smallest pivots do not have."""
    if right:
        solve_triangle(T.T, B.T, lower=not lower, unit=unit)
        return
    if 0 in B.shape:
        return
    if not is_numpy(B):
        _solve_by_library(T, B, lower=lower, unit=unit)
        return
    t = _by_columns(T)
    if B.shape[1] == 1:
        alone = b"L" if lower == t else b"U", b"N" if t else b"T", b"U" if unit else b"N"
        step = B.strides[0] // B.itemsize if B.shape[0] > 1 else 1
        _call("trsv", B.dtype.char, *alone, B.shape[0], T, _leading(T, t), B, step)
        return
    b = _by_columns(B)
    # What BLAS sees of a matrix by rows is its transpose: T^T is upper where T is lower; (T^-1 B)^T = B^T T^-T.
    side, triangle = b"L" if b else b"R", b"L" if lower == t else b"U"
    turned = b"N" if t == b else b"T"
    m, n = B.shape if b else B.shape[::-1]
    how = side, triangle, turned, b"U" if unit else b"N"
    _call("trsm", B.dtype.char, *how, m, n, 1.0, T, _leading(T, t), B, _leading(B, b))


def _solve_by_library(T: Array, B: Array, *, lower: bool, unit: bool) -> None:
    if is_cupy(B):
        solve = importlib.import_module("cupyx.scipy.linalg").solve_triangular
        B[...] = solve(T, B, lower=lower, unit_diagonal=unit, check_finite=False)
        return
    host = np.array(to_host(B), order="F")
    solve_triangle(np.array(to_host(T), order="F"), host, lower=lower, unit=unit)
    B[...] = from_host(host, B)


def multiply_triangle(T: Array, x: Array, *, lower: bool, unit: bool = False) -> Array:
    """``T x`` as a new vector, for the triangle of the square T that `lower` names. BLAS trmv."""
    xp = namespace(x)
    if not is_numpy(x):
        T = xp.tril(T, k=-1 if unit else 0) if lower else xp.triu(T, k=1 if unit else 0)
        return x + T @ x if unit else T @ x
    y = x.copy()
    if x.size:
        by_columns = _by_columns(T)
        how = b"L" if lower == by_columns else b"U", b"N" if by_columns else b"T", b"U" if unit else b"N"
        _call("trmv", x.dtype.char, *how, x.size, T, _leading(T, by_columns), y, 1)
    return y


def add_product(C: Array, A: Array, B: Array, *, alpha: float = -1.0, beta: float = 1.0) -> None:
    """C := beta C + alpha A B for matrices; for vectors C and B, the same with one column. BLAS gemm, gemv.

    Parameters
    ----------
    C : (m, n) or (m,) array
    A : (m, k) array
    B : (k, n) or (k,) array
        All of one type. Shares no memory with C.
    """
    alpha, beta = float(alpha), float(beta)
    if 0 in C.shape:
        return
    if A.shape[1] == 0:
        C[...] = C * beta if beta else 0.0
        return
    if not is_numpy(C):
        _add_by_library(C, A, B, alpha, beta)
        return
    a = _by_columns(A)
    if C.ndim == 1:
        m, n = A.shape if a else A.shape[::-1]
        steps = [x.strides[0] // x.itemsize if x.size > 1 else 1 for x in (B, C)]
        _call("gemv", C.dtype.char, b"N" if a else b"T", m, n, alpha, A, _leading(A, a), B, steps[0], beta, C, steps[1])
        return
    c, b = _by_columns(C), _by_columns(B)
    if not c:  # C^T = B^T A^T
        add_product(C.T, B.T, A.T, alpha=alpha, beta=beta)
        return
    turned = (b"N" if a else b"T", b"N" if b else b"T")
    sizes = (*C.shape, A.shape[1])
    leading = (_leading(A, a), _leading(B, b), _leading(C, True))
    _call("gemm", C.dtype.char, *turned, *sizes, alpha, A, leading[0], B, leading[1], beta, C, leading[2])


def _add_by_library(C: Array, A: Array, B: Array, alpha: float, beta: float) -> None:
    if C.ndim == 1:
        tall = tall_skinny_matmul(A, B[:, None])[:, 0]
        C[...] = alpha * tall if beta == 0 else beta * C + alpha * tall
    elif is_cupy(C):
        multiply(A, B, C, C, alpha=alpha, beta=beta)
    else:
        C[...] = alpha * (A @ B) if beta == 0 else beta * C + alpha * (A @ B)


def subtract_square(C: Array, A: Array) -> None:
    """C -= A A' in the lower triangle of C, which shares no memory with A; what is above stays. BLAS syrk."""
    if 0 in A.shape:
        return
    if is_numpy(C):
        c, a = _by_columns(C), _by_columns(A)
        how = b"L" if c else b"U", b"N" if a else b"T"
        n, k = A.shape
        _call("syrk", C.dtype.char, *how, n, k, -1.0, A, _leading(A, a), 1.0, C, _leading(C, c))
        return
    xp, n = namespace(C), C.shape[0]
    for at in range(0, n, 4 * TILE):
        end = min(at + 4 * TILE, n)
        square = C[at:end, at:end]
        above = xp.triu(square, k=1)
        add_product(C[at:, at:end], A[at:, :], A[at:end, :].T)
        square[...] = xp.tril(square) + above


def symmetric_product(A: Array, x: Array) -> Array:
    """``A x`` as a new vector, for the symmetric matrix whose lower triangle A holds; one type. BLAS symv."""
    xp, n = namespace(x), x.shape[0]
    if is_numpy(x):
        y = np.zeros(n, x.dtype)
        if n:
            by_columns = _by_columns(A)
            half = b"L" if by_columns else b"U"
            _call("symv", x.dtype.char, half, n, 1.0, A, _leading(A, by_columns), np.ascontiguousarray(x), 1, 0.0, y, 1)
        return y
    return xp.tril(A) @ x + xp.tril(A, k=-1).T @ x


def product(A: Array, B: Array) -> Array:
    """``A B`` as a new array; B a matrix or a vector, both of one type."""
    xp = namespace(A)
    shape = (A.shape[0], *B.shape[1:])
    out = np.zeros(shape, A.dtype, order="F") if is_numpy(A) else xp.zeros(shape, dtype=A.dtype, device=A.device)
    add_product(out, A, B, alpha=1.0, beta=0.0)
    return out


def like_columns(X: Array, shape: tuple[int, ...], dtype: Any = None) -> Array:
    """An array of X's library and device that is not filled, column-major where the library knows orders."""
    xp: Namespace = namespace(X)
    dtype = X.dtype if dtype is None else dtype
    if is_numpy(X):
        return np.empty(shape, dtype, order="F")
    if is_cupy(X):
        import cupy

        return cupy.empty(shape, dtype, order="F")
    return xp.empty(shape, dtype=dtype, device=X.device)


TILE = 64


def copy_by_columns(A: Array, extra: int = 0) -> Array:
    """A copy of A (m x n), column-major, with `extra` columns to the right of it that are not filled.

    Tile by tile where A is row-major, so that what is read and what is written both stay in the cache.
    """
    m, n = A.shape
    copy = like_columns(A, (m, n + extra))
    if not is_numpy(A) or A.strides[0] <= A.strides[1]:
        copy[:, :n] = A
        return copy
    for j in range(0, n, TILE):
        for i in range(0, m, TILE):
            copy[i : i + TILE, j : min(j + TILE, n)] = A[i : i + TILE, j : j + TILE]
    return copy


DEFINITE_NARROW = 64  # columns that are factored at a time


def factor_columns(X: Array) -> int:
    """Replace X (m x b, m >= b), the first columns of a matrix, by those of its Cholesky factor.

    Returns
    -------
    stopped : int
        Order of the first leading minor that is not positive definite, or 0. Where the factorisation stops, the first
        `factored` columns are finished, and from the others has been taken off what these take off.

    Notes
    -----
    Corners are factored by LAPACK (potrf) where they are small and lie side by side, and put back.
    """
    xp, b = namespace(X), X.shape[1]
    for h in range(0, b, DEFINITE_NARROW):
        end = min(h + DEFINITE_NARROW, b)
        corner = xp.asarray(X[h:end, h:end], copy=True)
        stopped = factor_definite(corner)
        if stopped:
            return h + stopped
        X[h:end, h:end] = corner
        solve_triangle(corner.T, X[end:, h:end], lower=False, right=True)
        subtract_square(X[end:b, end:b], X[end:b, h:end])
        add_product(X[b:, end:b], X[b:, h:end], X[end:b, h:end].T)
    return 0


def factored(stopped: int, b: int) -> int:
    """How many of b columns `factor_columns` has finished."""
    return (stopped - 1) // DEFINITE_NARROW * DEFINITE_NARROW if stopped else b


def clear_above(X: Array) -> None:
    """Zeros above the diagonal of the square X."""
    xp, n = namespace(X), X.shape[0]
    for at in range(0, n, TILE):
        end = min(at + TILE, n)
        if is_column_major(X):
            X[:at, at:end] = 0.0
        else:
            X[at:end, end:] = 0.0
        X[at:end, at:end] = xp.tril(X[at:end, at:end])
