"""Multiply by the array library's own product, with BLAS's alpha, beta and c around it: what is protected.

float32 and float64 go to the library in one call. 16-bit operands are multiplied through float32 in blocks and
rounded once, because NumPy's own 16-bit product is neither fast nor accurate; no operand is copied whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from abft_tsm2.arrays import Array, converted, dtype_name, float_type, is_cupy, is_numpy, namespace
from abft_tsm2.core import cublas, faultpoint
from abft_tsm2.core.problem import Problem

BLOCK_BYTES = 16 << 20  # of one temporary; at most three live at once
_ALIGNED = 512  # bytes: what any allocation is aligned to


def multiply(
    A: Array,
    B: Array,
    out: Array,
    C0: Array | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    tf32: bool = False,
    stage: str | None = None,
) -> None:
    """``out = alpha A B + beta C0``; on NumPy also of each of a stack of small matrices.

    Parameters
    ----------
    A : (m, k) array
    B : (k, n) array
    out : (m, n) array
        Written; shares no memory with the others. Its type is that of the sums, at least as wide as A's and B's.
    C0 : (m, n) array, optional
        Read only where ``beta != 0``.
    tf32 : bool
        On a GPU, let tensor cores round float32 operands to 11 significant bits.
    stage : str, optional
        As which a planter of faults reaches ``out`` (`abft_tsm2.core.faultpoint`), where this is a product that is
        checked.
    """
    if type(out) is np.ndarray and A.dtype == B.dtype == out.dtype and out.dtype.itemsize >= 4:
        np.matmul(A, B, out=out)
        _add(out, C0, alpha, beta)
    else:
        _multiply_otherwise(A, B, out, C0, alpha, beta, tf32)
    if stage is not None and (planter := faultpoint.current()) is not None:
        faultpoint.reach(planter, stage, A=A, B=B, C=out)


def _multiply_otherwise(
    A: Array, B: Array, out: Array, C0: Array | None, alpha: float, beta: float, tf32: bool
) -> None:
    """What is not one call of NumPy."""
    if is_cupy(out) and cublas.serves(problem := _problem(A, B, out)):
        _multiply_by_vendor(problem, A, B, out, C0, alpha, beta, tf32)
        return
    if float_type(A).bits < 32 and float_type(B).bits < 32 and float_type(out).bits <= 32:
        _multiply_halves(A, B, out, C0, alpha, beta)
        return
    if A.dtype != out.dtype or B.dtype != out.dtype:
        _multiply_widened(A, B, out)
    elif is_numpy(out):
        np.matmul(A, B, out=out)
    else:  # the standard's matmul has no `out`, and cuBLAS takes no such array
        out[...] = _product(A, B)
    _add(out, C0, alpha, beta)


def _add(out: Array, C0: Array | None, alpha: float, beta: float) -> None:
    """out = alpha out + beta C0."""
    if alpha != 1.0:
        out *= alpha
    if C0 is not None and beta != 0.0:
        for at in _parts(out.shape[0], out.shape[1]):  # C(i:j, :) += beta C0(i:j, :)
            out[at, :] += C0[at, :] if beta == 1.0 else beta * C0[at, :]


def same_layout(X: Array) -> Array:
    """An array that is not initialised, of X's type, shape and, on NumPy and CuPy, strides and alignment.

    A library chooses its kernel by these: a product into such an array is rounded as the one in X was.
    """
    if not (is_numpy(X) or is_cupy(X)) or 0 in X.shape:
        return namespace(X).empty(X.shape, dtype=X.dtype, device=X.device)
    reach = [(n - 1) * stride for n, stride in zip(X.shape, X.strides, strict=True)]
    before, behind = -sum(min(x, 0) for x in reach), sum(max(x, 0) for x in reach) + X.itemsize
    if is_cupy(X):
        memory = namespace(X).empty(before + behind + _ALIGNED, dtype="uint8", device=X.device)
        at = before + (X.data.ptr - before - memory.data.ptr) % _ALIGNED
        return type(X)(X.shape, X.dtype, memory.data + at, X.strides)
    memory = np.empty(before + behind + _ALIGNED, np.uint8)
    at = before + (X.ctypes.data - before - memory.ctypes.data) % _ALIGNED
    return np.ndarray(X.shape, X.dtype, memory, at, X.strides)


def _problem(A: Array, B: Array, out: Array) -> Problem:
    (m, k), n = A.shape, B.shape[1]
    dtype, weights, result = (dtype_name(x.dtype) for x in (A, B, out))
    return Problem(m, k, n, dtype, weights=weights, out=result, out_order=cublas.layout(out))


def _multiply_by_vendor(
    problem: Problem, A: Array, B: Array, out: Array, C0: Array | None, alpha: float, beta: float, tf32: bool
) -> None:
    """One call of cuBLAS; an operand with neither rows nor columns contiguous is copied, as everywhere on a GPU."""
    A, B = (x if cublas.layout(x) != "A" else namespace(x).asarray(x, copy=True, order="C") for x in (A, B))
    if C0 is not None and beta != 0.0:
        out[...] = C0
    with out.device:
        cublas.Gemm.of(problem, A, B, out, tf32=tf32)(A, B, out, alpha, beta if C0 is not None else 0.0)


def _product(A: Array, B: Array) -> Array:
    """A B of one type in a new array. CuPy's own product would round float32 operands where CUPY_TF32 is set."""
    xp = namespace(A)
    if not is_cupy(A) or 0 in (*A.shape, *B.shape):
        return xp.matmul(A, B)
    out = xp.empty((A.shape[0], B.shape[1]), dtype=A.dtype)
    multiply(A, B, out)
    return out


def _multiply_widened(A: Array, B: Array, out: Array) -> None:
    """out(i:j, p:q) = A(i:j, :) B(:, p:q) in the type of out, the narrower operands widened block by block: the library
    would widen all of them at once."""
    xp = namespace(out)
    k = A.shape[1]
    for columns in _parts(B.shape[1], k) if B.dtype != out.dtype else (slice(None),):
        right = xp.astype(B[:, columns], out.dtype, copy=False)
        for rows in _parts(A.shape[0], k) if A.dtype != out.dtype else (slice(None),):
            out[rows, columns] = _product(xp.astype(A[rows, :], out.dtype, copy=False), right)


def _multiply_halves(A: Array, B: Array, out: Array, C0: Array | None, alpha: float, beta: float) -> None:
    """out(i:j, p:q) = round(alpha A(i:j, :) B(:, p:q) + beta C0(i:j, p:q)), in float32 blocks."""
    if type(out) is np.ndarray and max(A.size, B.size, out.size) <= BLOCK_BYTES // 8:  # one part, or a stack
        product = np.matmul(_in_single(A), _in_single(B))
        _add(product, None if C0 is None else _in_single(C0), alpha, beta)
        out[...] = product
        return
    xp = namespace(out)
    (m, k), n = A.shape, B.shape[1]

    def single(x: Array) -> Array:
        return xp.astype(x, xp.float32) if float_type(x).bits < 32 else x

    for columns in _parts(n, k):
        right = single(B[:, columns])
        for rows in _parts(m, max(k, right.shape[1])):
            block = alpha * xp.matmul(single(A[rows, :]), right)
            if C0 is not None and beta != 0.0:
                block += beta * single(C0[rows, columns])
            out[rows, columns] = xp.astype(block, out.dtype)


def _in_single(X: Array) -> Array:
    return X if X.dtype == np.float32 else converted(X, np.float32)


def _parts(count: int, width: int) -> Iterator[slice]:
    """Slices of `count` lines of `width` (at most 8-byte) elements, each of which fits one temporary."""
    step = max(1, BLOCK_BYTES // (8 * max(1, width)))
    for at in range(0, count, step):
        yield slice(at, min(count, at + step))
