"""The product that is protected: the array library's own, with BLAS's alpha, beta and c around it.

float32 and float64 go to the library in one call. 16-bit operands are multiplied through float32 in blocks and
rounded once, because NumPy's own 16-bit product is neither fast nor accurate; no operand is copied whole.
"""

from __future__ import annotations

import numpy as np

from abft_tsm2.arrays import Array, float_type, is_numpy, namespace

BLOCK_BYTES = 16 << 20  # of one temporary; at most three live at once


def multiply(A: Array, B: Array, out: Array, C0: Array | None = None, *, alpha: float = 1.0, beta: float = 0.0) -> None:
    """``out = alpha A B + beta C0``.

    Parameters
    ----------
    A : (m, k) array
    B : (k, n) array
    out : (m, n) array
        Written; shares no memory with the others.
    C0 : (m, n) array, optional
        Read only where ``beta != 0``.
    """
    if any(float_type(x).bits < 32 for x in (A, B, out)):
        _multiply_halves(A, B, out, C0, alpha, beta)
        return
    if is_numpy(out):
        np.matmul(A, B, out=out)
    else:  # the standard's matmul has no `out`
        out[...] = namespace(out).matmul(A, B)
    if alpha != 1.0:
        out *= alpha
    if C0 is not None and beta != 0.0:
        rows = _rows(out.shape[1])
        for i in range(0, out.shape[0], rows):  # C(i:j, :) += beta C0(i:j, :)
            out[i : i + rows, :] += beta * C0[i : i + rows, :]


def _multiply_halves(A: Array, B: Array, out: Array, C0: Array | None, alpha: float, beta: float) -> None:
    """out(i:j, p:q) = round(alpha A(i:j, :) B(:, p:q) + beta C0(i:j, p:q)), in float32 blocks."""
    xp = namespace(out)
    (m, k), n = A.shape, B.shape[1]

    def single(x: Array) -> Array:
        return xp.astype(x, xp.float32) if float_type(x).bits < 32 else x

    width = _rows(k)
    for p in range(0, n, width):
        right = single(B[:, p : p + width])
        rows = min(_rows(k), _rows(right.shape[1]))
        for i in range(0, m, rows):
            block = alpha * xp.matmul(single(A[i : i + rows, :]), right)
            if C0 is not None and beta != 0.0:
                block += beta * single(C0[i : i + rows, p : p + width])
            out[i : i + rows, p : p + width] = xp.astype(block, out.dtype)


def _rows(columns: int) -> int:
    """Rows of that many (at most 8-byte) columns in one temporary."""
    return max(1, BLOCK_BYTES // (8 * max(1, columns)))
