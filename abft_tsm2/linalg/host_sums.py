"""Weighted sums of NumPy's matrices, and of packed factors: float32 widened while it is in the cache, and read once.

SciPy's own wrappers of BLAS take matrices that are contiguous as a whole without a copy, twenty times as fast as a call
by address: what counts for some hundred columns. The threads are those of the factorisation; NumPy's matmul would bring
its own, and two pools that take turns keep each other from the cores.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, is_numpy
from abft_tsm2.core.blas import product

IN_CACHE = 1 << 17  # elements in float64 of some columns: a megabyte
FEWEST = 128  # columns, where they are long
SQUARE, CORNER = 128, 64  # columns whose multipliers are compared at once; those whose moduli are
READ = 1 << 15  # elements that a search for the largest one reads at a time


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


def add_times(out: Array, X: Array, x: Array) -> Array:
    """``out + X x`` for NumPy's float64 that is contiguous and not empty; in the place of out where that can be."""
    if X.flags.f_contiguous:
        return _blas().dgemv(1.0, X, x, 1.0, out, overwrite_y=1)
    return _blas().dgemv(1.0, X.T, x, 1.0, out, trans=1, overwrite_y=1)


def sums_on_host(X: Array, v: Array, w: Array) -> tuple[Array, Array]:
    """``X v`` and ``w'X`` in float64, for NumPy's X of either type, whose rows or columns are contiguous."""
    if X.dtype.char == "d":
        return times(X, v), times(X.T, w)
    if abs(X.strides[0]) > abs(X.strides[1]):
        down, across = sums_on_host(X.T, w, v)
        return across, down
    m, n = X.shape
    S, Z, room = np.zeros(m), np.empty(n), _Room(m, n)
    # S += X(:, J) v(J);  Z(J) = w'X(:, J)
    for J in room.parts:
        part = room.widened(X[:, J])
        S = add_times(S, part, v[J])
        Z[J] = times(part.T, w)
    return S, Z


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
    """Of W = L \\ U, m x n, which `reads_at_once`; in float32 some columns at a time, U once and L twice."""
    (m, n), K = W.shape, min(W.shape)
    if not is_narrow(W):
        g, y = _triangle(W.T, w, lower=0, unit=1), _triangle(W, v, lower=0)
        return FactorSums(g, y, _triangle(W, y, lower=1, unit=1), _triangle(W.T, g, lower=1))
    g, y, gU, Ly, room = np.empty(K), np.zeros(K), np.empty(n), np.zeros(m), _Room(m, n, K)
    for J in room.parts:
        j, j1 = min(J.start, K), min(J.stop, K)
        if j < K:
            # g(J) = w(J)'L(J, J) + w(j1:)'L(j1:, J);  g U(:, J) = g(J) U(J, J);  y(J) = U(J, J) v(J)
            square = room.widened(W[J, J])
            g[J] = _triangle(square.T, w[J], lower=0, unit=1)
            if j1 < m:
                below = room.widened(W[j1:, J], room.second)
                g[J] = add_times(g[J], below.T, w[j1:])
            gU[J] = _triangle(square.T, g[J], lower=1)
            y[J] = _triangle(square, v[J], lower=0)
        else:
            gU[J] = 0.0
        if j:
            # g U(:, J) += g(:j) U(:j, J);  y(:j) += U(:j, J) v(J)
            above = room.widened(W[:j, J], room.second)
            gU[J] = add_times(gU[J], above.T, g[:j])
            y[:j] = add_times(y[:j], above, v[J])
    for J in room.parts[: room.square]:
        # L y(J) += L(J, J) y(J);  L y(j1:) += L(j1:, J) y(J)
        j1 = J.stop
        Ly[J] += _triangle(room.widened(W[J, J]), y[J], lower=1, unit=1)
        if j1 < m:
            Ly[j1:] = add_times(Ly[j1:], room.widened(W[j1:, J], room.second), y[J])
    return FactorSums(g, y, Ly, gU)


def order_after(pivots: Any, m: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Which of m rows each place holds after these exchanges, each with a row of theirs: `core.blas.permutation`."""
    order = np.arange(m, dtype=np.float64)[:, None]  # which hold numbers of rows exactly
    if pivots.size:
        order = _lapack().dlaswp(order, pivots, overwrite_a=1)
    found: np.ndarray[Any, np.dtype[np.int64]] = order[:, 0].astype(np.int64)
    return found


def multipliers_within(W: Array, limit: float) -> bool:
    """Whether no modulus in L of packed factors W = L \\ U is larger than `limit`; of NumPy, contiguous by columns.

    A NaN may be passed over here: it is in the sums of its row and its column.
    """
    K = min(W.shape)
    whole = K // SQUARE * SQUARE
    # transposes of what is below squares along the diagonal, and of the lower left quarters of the squares
    parts = [W[at + SQUARE :, at : at + SQUARE].T for at in range(0, whole, SQUARE)] + [W[K:, whole:K].T]
    parts.append(_along_diagonal(W, whole // SQUARE, CORNER, step=SQUARE, below=CORNER))
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


@functools.cache
def _on_or_above(b: int) -> Any:
    """Where the transpose of a b x b matrix has what is not below the diagonal."""
    return np.tri(b, dtype=bool)


class _Room:
    """Where some columns of an m x n matrix are widened, and which ones at a time: those of its triangles first."""

    def __init__(self, m: int, n: int, K: int = 0) -> None:
        b = max(1, min(n, max(FEWEST, IN_CACHE // max(1, m))))
        of_triangles = [slice(at, min(at + b, K)) for at in range(0, K, b)]
        self.square = len(of_triangles)
        self.parts = of_triangles + [slice(at, min(at + b, n)) for at in range(K, n, b)]
        self.first, self.second = np.empty(b * b if K else m * b), np.empty(m * b if K else 0)

    def widened(self, X: Array, memory: Array | None = None) -> Array:
        """X in float64, by columns and contiguous, until the next one is widened there."""
        out = (self.first if memory is None else memory)[: X.size].reshape(X.shape, order="F")
        np.copyto(out, X)
        return out


def _triangle(T: Array, x: Array, *, lower: int, unit: int = 0) -> Array:
    """``T x`` as a new vector, for a triangle of the square T in float64, contiguous."""
    if T.flags.f_contiguous:
        return _blas().dtrmv(T, x, lower=lower, diag=unit)
    return _blas().dtrmv(T.T, x, lower=1 - lower, trans=1, diag=unit)


@functools.cache
def _blas() -> Any:
    return importlib.import_module("scipy.linalg.blas")


@functools.cache
def _lapack() -> Any:
    return importlib.import_module("scipy.linalg.lapack")
