"""Checks of substitution: T x = b for a triangle T, by the residual of all right-hand sides at once.

The right-hand sides are added up with random weights first, ``X t`` and ``B t``, so that a check costs two products of
T with a vector, however many there are. The bound is that of a random walk of the rounding errors; what exceeds it is
suspected, and judged by evidence: all elements of the residual, computed more precisely, and bounds that hold whatever
the order of the substitution (Higham 2002, theorems 8.5 and 9.4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, float_type, from_host, namespace, to_host
from abft_tsm2.checksum.alike import Verdict
from abft_tsm2.checksum.bounds import FLOOR_TERMS, factored_bound, operations
from abft_tsm2.checksum.factor_encode import wide
from abft_tsm2.checksum.rigorous import solved_rounding, substituted_rounding, underflow
from abft_tsm2.checksum.weights import exponents, weights
from abft_tsm2.core.accurate import Difference, Part, parts
from abft_tsm2.core.factoring import add_product, multiply_triangle, product

BLOCK = 128
SMALL = 2.0**-600  # what solutions are multiplied with where |L| |U| |X| is beyond the range


class Triangle(NamedTuple):
    """One of the triangles of a packed square matrix, or its transpose.

    Attributes
    ----------
    T : (n, n) array
    lower, unit : bool
        Which triangle of T, as given (T is transposed already where its transpose is meant), and whether its diagonal
        is ones.
    """

    T: Array
    lower: bool
    unit: bool

    def block(self, rows: slice, columns: slice) -> Array:
        """Some rows and columns of it."""
        xp, X, first = namespace(self.T), self.T[rows, columns], rows.start - columns.start
        if not self.unit:
            return xp.tril(X, k=first) if self.lower else xp.triu(X, k=first)
        X = xp.tril(X, k=first - 1) if self.lower else xp.triu(X, k=first + 1)
        return X + xp.eye(*X.shape, k=first, dtype=X.dtype, device=X.device)

    def times(self, x: Array, of: Callable[[Array], Array] = wide) -> Array:
        """f(T) x in float64; f works on elements, and leaves ones as they are."""
        xp, n = namespace(self.T), self.T.shape[0]
        out = xp.zeros(n, dtype=xp.float64, device=self.T.device)

        def part(rows: slice, columns: slice) -> Array:
            return of(wide(self.T[rows, columns]))

        for at in range(0, n, BLOCK):
            here = slice(at, min(at + BLOCK, n))
            away = slice(here.stop, n) if self.lower else slice(0, at)
            out[here] += multiply_triangle(part(here, here), x[here], lower=self.lower, unit=self.unit)
            add_product(out[away], part(away, here), x[here], alpha=1.0)
        return out


def summing_weights(B: Array) -> Array:
    """Weights of right-hand sides (n x r) that make none of them vanish beside the others."""
    with np.errstate(all="ignore"):
        largest = np.max(np.abs(to_host(B)), axis=0, initial=0.0).astype(np.float64)
        largest = np.where(np.isfinite(largest), largest, 0.0)
        scale = exponents(np.log2(largest))
    return from_host(np.ldexp(weights("balanced", B.shape[1], seed=2)[:, 0], -scale), B)


def modulus(X: Array) -> Array:
    return namespace(X).abs(X)


def square(X: Array) -> Array:
    return X * X


def check_substitution(triangle: Triangle, X: Array, B: Array, t: Array) -> Verdict:
    """Of ``T X = B``, row by row."""
    with np.errstate(all="ignore"):
        residual = triangle.times(product(wide(X), t)) - product(wide(B), t)
        reach = triangle.times(_sizes(X, t, square), square) + _sizes(B, t, square)
        return Verdict.of(residual, _bound(X, t, reach))


def check_solution(A: Array, factors: tuple[Triangle, Triangle], order: Array, X: Array, B: Array, t: Array) -> Verdict:
    """Of ``A X = B`` by its residual; its bound is made of |L||U||X| (Higham 2002, theorem 9.4), and |A||X|.

    `order`: which row of A each row of L is.
    """
    xp, of = namespace(A), square
    with np.errstate(all="ignore"):
        residual = _times(A, product(wide(X), t)) - product(wide(B), t)
        sizes = _sizes(X, t, of)
        reach = factors[0].times(factors[1].times(sizes, of), of)
        reach = 3 * xp.take(reach, xp.argsort(order)) + _times(A, sizes, of) + _sizes(B, t, of)
        return Verdict.of(residual, _bound(X, t, reach))


def substitution_evidence(triangle: Triangle, X: Array, B: Array) -> Verdict:
    """Of ``T X = B``, row by row, from all elements: ``|B - T X| <= gamma_n |T| |X|``."""
    xp, n, kind = namespace(X), X.shape[0], float_type(X)
    with np.errstate(all="ignore"):
        residual = _residual(triangle.block, X, B)
        reach = _moduli(triangle.block, xp.abs(wide(X)))
        pivots = xp.ones(n, dtype=xp.float64, device=X.device)
        if not triangle.unit:
            pivots = xp.maximum(pivots, xp.abs(wide(xp.linalg.diagonal(triangle.T))))
        return _all(residual, substituted_rounding(kind, n), reach, underflow(kind, n, pivots))


def solution_evidence(A: Array, factors: tuple[Triangle, Triangle], order: Array, X: Array, B: Array) -> Verdict:
    """Of ``A X = B``, row by row, from all elements: ``|B - A X| <= gamma_3n P'|L| |U| |X|``."""
    xp, n, kind = namespace(X), X.shape[0], float_type(X)
    lower, upper = factors
    with np.errstate(all="ignore"):
        residual = _residual(lambda rows, columns: A[rows, columns], X, B)
        sizes, scale = xp.abs(wide(X)), 1.0
        reach = _moduli(lower.block, _moduli(upper.block, sizes))
        if not bool(xp.all(xp.isfinite(reach))):
            scale = SMALL
            reach = _moduli(lower.block, _moduli(upper.block, scale * sizes))
        pivots = xp.maximum(xp.ones(n, dtype=xp.float64, device=X.device), xp.abs(wide(xp.linalg.diagonal(upper.T))))
        lost = lower.times(underflow(kind, n, pivots), modulus) + underflow(kind, n, 1.0)
        back = xp.argsort(order)
        return _all(scale * residual, solved_rounding(kind, n), xp.take(reach, back, axis=0), xp.take(lost, back))


def _all(residual: Array, factor: float, reach: Array, lost: Array) -> Verdict:
    """Rows all of whose elements are within ``factor reach``, and what underflow has `lost` in each row."""
    xp = namespace(residual)
    bound = factor * reach + lost[:, None]
    ok = xp.all((xp.abs(residual) <= bound) & xp.isfinite(bound), axis=1)
    return Verdict(xp.max(xp.abs(residual), axis=1), xp.max(bound, axis=1), ok)


def _residual(left: Part, X: Array, B: Array) -> Array:
    """B - M X, with an error far below rounding, for the matrix M of which `left` gives blocks."""
    xp, (n, count) = namespace(X), X.shape
    difference = Difference(left, lambda rows, columns: X[rows, columns], (n, n, count), X)
    out = xp.empty((n, count), dtype=xp.float64, device=X.device)
    for rows in parts(n):
        for columns in parts(count):
            out[rows, columns] = difference.block(B[rows, columns], rows, columns, slices=3).residual
    return out


def _moduli(left: Part, X: Array) -> Array:
    """|M| X."""
    xp, n = namespace(X), X.shape[0]
    out = xp.zeros_like(X)
    for rows in parts(n):
        for terms in parts(n):
            out[rows, :] += xp.abs(wide(left(rows, terms))) @ X[terms, :]
    return out


def _sizes(X: Array, t: Array, of: Callable[[Array], Array]) -> Array:
    return product(of(wide(X)), of(t))


def _bound(X: Array, t: Array, reach: Array) -> Array:
    xp, (n, count), kind = namespace(X), X.shape, float_type(X)
    moduli = float(xp.sum(xp.abs(t)))
    return factored_bound(kind, xp.sqrt(operations(kind, n + FLOOR_TERMS, count) * reach), n, moduli)


def _times(A: Array, x: Array, of: Callable[[Array], Array] = wide) -> Array:
    """f(A) x in float64, block by block."""
    xp = namespace(A)
    out = xp.zeros(A.shape[0], dtype=xp.float64, device=A.device)
    for at in range(0, A.shape[1], BLOCK):
        part = slice(at, min(at + BLOCK, A.shape[1]))
        add_product(out, of(wide(A[:, part])), x[part], alpha=1.0)
    return out
