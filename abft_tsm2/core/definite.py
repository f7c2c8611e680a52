"""The steps of a blocked Cholesky factorisation, in place, on the lower triangle of a matrix."""

from __future__ import annotations

from abft_tsm2.arrays import Array, is_column_major, namespace
from abft_tsm2.core.factoring import TILE, add_product, factor_definite, solve_triangle, subtract_square

NARROW = 64  # columns that are factored at a time


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
    for h in range(0, b, NARROW):
        end = min(h + NARROW, b)
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
    return (stopped - 1) // NARROW * NARROW if stopped else b


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
