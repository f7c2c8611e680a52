"""The judge of large factorisations and solutions on a card: residuals of a random vector, computed in float64 and in
blocks of columns. It shares no code with the checks, and believes no report.

An error is the largest of a row: the modulus of the residual over what is added up to it, such as |L||U||x|, so that
a matrix of uneven rows hides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, namespace, to_host
from abft_tsm2.faults.judge.factor_oracle import MULTIPLIER, order, unit, valid_pivots

WIDTH = 2048  # columns that are widened at a time
WORSE = 4.0
"""Times the vendor's error and a roundoff, that an error may be."""

_quiet = np.errstate(all="ignore")  # what is not finite is infinitely wrong


@_quiet
def lu_error(A: Array, lu: Array, piv: Any) -> float:
    """Of P A x = L U x, in unit roundoffs; infinite for what are no factors of partial pivoting."""
    (m, n), xp = A.shape, namespace(A)
    pivots = to_host(piv)
    if lu.shape != A.shape or not valid_pivots(pivots, m, min(m, n)):
        return math.inf
    x = _vector(n, xp)
    Ux, of_U = xp.zeros(m, dtype=xp.float64), xp.zeros(m, dtype=xp.float64)  # U x and |U||x|
    for at, block in _blocks(lu):
        upper = xp.triu(block, k=-at.start)
        Ux += upper @ x[at]
        of_U += abs(upper) @ abs(x[at])
    found, size, largest = Ux.copy(), of_U.copy(), 0.0
    for at, block in _blocks(lu):
        lower = xp.tril(block, k=-at.start - 1)
        found += lower @ Ux[at]
        size += abs(lower) @ of_U[at]
        largest = max(largest, float(abs(lower).max()))  # a NaN shows in the residual
    if not largest <= MULTIPLIER:
        return math.inf
    expected = _times(A, x, xp)[0][xp.asarray(order(pivots, m))]
    return _largest(expected - found, size, A.dtype, xp)


@_quiet
def cholesky_error(A: Array, L: Array) -> float:
    """Of A x = L L' x, in unit roundoffs."""
    n, xp = A.shape[0], namespace(A)
    if L.shape != A.shape:
        return math.inf
    x = _vector(n, xp)
    found, size = xp.zeros(n, dtype=xp.float64), xp.zeros(n, dtype=xp.float64)
    for at, block in _blocks(L):
        lower = xp.tril(block, k=-at.start)
        found += lower @ (lower.T @ x)
        size += abs(lower) @ (abs(lower).T @ abs(x))
    return _largest(_times(A, x, xp)[0] - found, size, A.dtype, xp)


@_quiet
def solution_error(A: Array, x: Array, b: Array) -> float:
    """Of A x = b, in unit roundoffs."""
    xp = namespace(A)
    if x.shape != b.shape:
        return math.inf
    of_A, size = _times(A, x.astype(xp.float64), xp)
    wide = b.astype(xp.float64)
    return _largest(wide - of_A, size + abs(wide), A.dtype, xp)


def wrong(error: float, vendor: float, n: int) -> str:
    """What is wrong with a result, beside the vendor's: no sum of so many terms is that far off either (N. J. Higham,
    Accuracy and Stability of Numerical Algorithms, 2002, theorem 9.3)."""
    if error <= min(WORSE * (vendor + 1), n):
        return ""
    return f"wrong, residual of {error:.3g} u; the vendor's: {vendor:.3g} u"


def _vector(n: int, xp: Any) -> Array:
    return xp.asarray(np.random.default_rng(n).standard_normal(n))


def _blocks(A: Array) -> Iterator[tuple[slice, Array]]:
    """Columns in float64, some at a time, and which they are."""
    for c0 in range(0, A.shape[1], WIDTH):
        at = slice(c0, min(c0 + WIDTH, A.shape[1]))
        yield at, A[:, at].astype(np.float64)


def _times(A: Array, x: Array, xp: Any) -> tuple[Array, Array]:
    """A x and |A||x|."""
    found = xp.zeros((A.shape[0], *x.shape[1:]), dtype=xp.float64)
    size = xp.zeros_like(found)
    for at, block in _blocks(A):
        found += block @ x[at]
        size += abs(block) @ abs(x[at])
    return found, size


def _largest(residual: Array, size: Array, dtype: Any, xp: Any) -> float:
    exact = residual == 0
    found = float(xp.where(exact, 0.0, abs(residual) / xp.where(exact, 1.0, size)).max()) / unit(dtype)
    return found if math.isfinite(found) else math.inf
