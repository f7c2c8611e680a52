"""Weighted sums of NumPy's packed factors, in few calls, and their largest multipliers.

SciPy's own wrappers of BLAS take matrices that are contiguous as a whole without a copy, twenty times as fast as a call
by address: what counts for some hundred columns. The threads are those of the factorisation; NumPy's matmul would bring
its own, and two pools that take turns keep each other from the cores. Nor are there many calls with threads: where the
cores are shared, each may wait some milliseconds for its turn.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, is_numpy
from abft_tsm2.core.blas import product
from abft_tsm2.core.kept import compared

WIDENED = 512  # columns of float32 whose triangles are widened at once
KEPT = 8  # such squares that are kept to be read again: 16 MB
SQUARE, CORNER = 128, 32  # columns whose multipliers are compared at once; those whose moduli are
READ = 1 << 15  # elements that a search for the largest one reads at a time


def is_whole(T: Array) -> bool:
    """Whether `triangle_times` takes this square matrix."""
    return is_numpy(T) and T.dtype.char == "d" and (T.flags.f_contiguous or T.flags.c_contiguous) and T.size > 0


def is_narrow(X: Array) -> bool:
    """Whether X is NumPy's, and has to be widened for sums in float64."""
    return is_numpy(X) and X.dtype.char != "d"


def times(X: Array, x: Array) -> Array:
    """``X x`` as a new vector, both of one type: `product`, and faster for NumPy's float64 that is contiguous."""
    if is_numpy(X) and X.dtype.char == "d" and X.size:
        if X.flags.f_contiguous:
            return _blas().dgemv(1.0, X, x)
        if X.flags.c_contiguous:
            return _blas().dgemv(1.0, X.T, x, trans=1)
    return product(X, x)


class FactorSums(NamedTuple):
    """What packed factors add up to; all float64.

    Attributes
    ----------
    g, y : (K,) arrays
        ``w'L`` and ``U v``.
    Ly, gU : (m,), (n,) arrays
        ``L y`` and ``g U``.
    """

    g: Array
    y: Array
    Ly: Array
    gU: Array


def reads_at_once(W: Array) -> bool:
    """Whether `factor_sums` is the quickest way to read W: NumPy's, by columns, and narrow, or square."""
    if not (is_numpy(W) and W.flags.f_contiguous):
        return False
    return is_narrow(W) or W.shape[0] == W.shape[1]


def factor_sums(W: Array, w: Array, v: Array) -> FactorSums:
    """Of W = L \\ U, m x n, which `reads_at_once`; in float32 with triangles that are widened."""
    (m, n), K = W.shape, min(W.shape)
    if not is_narrow(W):
        g, y = triangle_times(W.T, w, lower=False, unit=True), triangle_times(W, v, lower=False)
        return FactorSums(g, y, triangle_times(W, y, lower=True, unit=True), triangle_times(W.T, g, lower=True))
    g, y, gU, Ly = np.empty(K), np.empty(K), np.zeros(n), np.zeros(m)
    squares: list[Array] = []
    parts = [slice(j, min(j + WIDENED, K)) for j in range(0, K, WIDENED)]
    for J in parts:
        # g(J) = w(J)'L(J, J) + w(j1:)'L(j1:, J);  y(J) = U(J, J) v(J) + U(J, j1:) v(j1:)
        # g U(:, J) = g(J) U(J, J) + g(:j) U(:j, J)
        j, j1 = J.start, J.stop
        square = np.array(W[J, J], np.float64, order="F")
        squares += [square] * (len(squares) < KEPT)
        g[J] = triangle_times(square.T, w[J], lower=False, unit=True)
        y[J] = triangle_times(square, v[J], lower=False)
        if j1 < m:
            g[J] += _widening(W[j1:, J].T, w[j1:])
        if j1 < n:
            y[J] += _widening(W[J, j1:], v[j1:])
        gU[J] = triangle_times(square.T, g[J], lower=True)
        if j:
            gU[J] += _widening(W[:j, J].T, g[:j])
    if n > K:
        gU[K:] = _widening(W[:, K:].T, g)
    for i, J in enumerate(parts):
        square = squares[i] if i < KEPT else np.array(W[J, J], np.float64, order="F")
        # L y(J) += L(J, J) y(J);  L y(j1:) += L(j1:, J) y(J)
        Ly[J] += triangle_times(square, y[J], lower=True, unit=True)
        if J.stop < m:
            Ly[J.stop :] += _widening(W[J.stop :, J], y[J])
    return FactorSums(g, y, Ly, gU)


def _widening(X: Array, x: Array) -> Array:
    """``X x`` in float64, for X in float32, widened as it is read; in one thread."""
    return np.einsum("ij,j->i", X, x)


def multipliers_within(W: Array, limit: float) -> bool:
    """Whether no modulus in L of packed factors W = L \\ U is larger than `limit`; of NumPy, contiguous by columns.

    A NaN may be passed over here: it is in the sums of its row and its column.
    """
    K = min(W.shape)
    whole = K // SQUARE * SQUARE
    # transposes of what is below squares along the diagonal, of the lower left quarters of the squares, and so on
    parts = [W[at + SQUARE :, at : at + SQUARE].T for at in range(0, whole, SQUARE)] + [W[K:, whole:K].T]
    b = SQUARE // 2
    while b >= CORNER:  # W(j + b : j + 2 b, j : j + b) for j = 0, 2 b, ...
        parts.append(_along_diagonal(W, whole // (2 * b), b, step=2 * b, below=b))
        b //= 2
    search = _blas().idamax if W.dtype.char == "d" else _blas().isamax
    memory = np.empty(max(READ, W.shape[0]), W.dtype)
    for part in parts:
        if not part.size:
            continue
        # a copy in the cache, and BLAS's search in it, are quicker than two reductions of what is not contiguous
        step = max(1, READ // part[0].size)
        for at in range(0, len(part), step):
            some = part[at : at + step]
            copy = memory[: some.size]
            np.copyto(copy.reshape(some.shape), some)
            if not abs(copy[search(copy)]) <= limit:
                return False
    corners = _along_diagonal(W, whole // CORNER, CORNER, step=CORNER)
    last = np.tril(W[whole:K, whole:K], k=-1)
    return bool(np.all((np.abs(corners) <= limit) | _on_or_above(CORNER)) and np.all(np.abs(last) <= limit))


def _along_diagonal(W: Array, count: int, b: int, *, step: int, below: int = 0) -> Array:
    """The transposes of ``W(j + below : j + below + b, j : j + b)`` for j = 0, step, ...; a view."""
    down, right = W.strides
    if not count:
        return np.empty((0, b, b), W.dtype)
    return np.ndarray((count, b, b), W.dtype, W.T, below * down, (step * (down + right), right, down))


@compared
def _on_or_above(b: int) -> Any:
    """Where the transpose of a b x b matrix has what is not below the diagonal."""
    return np.tri(b, dtype=bool)


def triangle_times(T: Array, x: Array, *, lower: bool, unit: bool = False) -> Array:
    """``T x`` as a new vector of their type, for a triangle of the square T, contiguous."""
    trmv = _blas().dtrmv if T.dtype.char == "d" else _blas().strmv
    if T.flags.f_contiguous:
        return trmv(T, x, lower=lower, diag=unit)
    return trmv(T.T, x, lower=not lower, trans=1, diag=unit)


@functools.cache
def _blas() -> Any:
    return importlib.import_module("scipy.linalg.blas")
