"""Checks of substitution: T x = b for a triangle T, by the residual of all right-hand sides at once.

The right-hand sides are added up with random weights first, ``X t`` and ``B t``, so that a check costs two products of
T with a vector, however many there are. The bound is that of a random walk of the rounding errors; what exceeds it is
computed again, and what is the same again is judged by the rigorous one (Higham 2002, theorem 8.5): substitution in any
order gives ``|b - T x| <= gamma_n |T| |x|``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, float_type, from_host, namespace, to_host
from abft_tsm2.checksum.alike import Verdict
from abft_tsm2.checksum.bounds import FLOOR_TERMS, factored_bound, operations, rigorous_factored
from abft_tsm2.checksum.factor_encode import wide
from abft_tsm2.checksum.weights import exponents, weights
from abft_tsm2.core.factoring import add_product, multiply_triangle, product

BLOCK = 128


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


def check_substitution(triangle: Triangle, X: Array, B: Array, t: Array, *, rigorous: bool = False) -> Verdict:
    """Of ``T X = B``, row by row."""
    of = modulus if rigorous else square
    with np.errstate(all="ignore"):
        residual = triangle.times(product(wide(X), t)) - product(wide(B), t)
        reach = triangle.times(_sizes(X, t, of), of) + _sizes(B, t, of)
        return Verdict.of(residual, _bound(X, t, reach, rigorous=rigorous))


def check_solution(
    A: Array, factors: tuple[Triangle, Triangle], order: Array, X: Array, B: Array, t: Array, *, rigorous: bool = False
) -> Verdict:
    """Of ``A X = B`` by its residual; its bound is made of |L||U||X| (Higham 2002, theorem 9.4), and |A||X|.

    `order`: which row of A each row of L is.
    """
    xp, of = namespace(A), modulus if rigorous else square
    with np.errstate(all="ignore"):
        residual = _times(A, product(wide(X), t)) - product(wide(B), t)
        sizes = _sizes(X, t, of)
        reach = factors[0].times(factors[1].times(sizes, of), of)
        reach = 3 * xp.take(reach, xp.argsort(order)) + _times(A, sizes, of) + _sizes(B, t, of)
        return Verdict.of(residual, _bound(X, t, reach, rigorous=rigorous))


def _sizes(X: Array, t: Array, of: Callable[[Array], Array]) -> Array:
    return product(of(wide(X)), of(t))


def _bound(X: Array, t: Array, reach: Array, *, rigorous: bool) -> Array:
    xp, (n, count), kind = namespace(X), X.shape, float_type(X)
    moduli = float(xp.sum(xp.abs(t)))
    if rigorous:
        return rigorous_factored(kind, n + count) * reach + n * kind.smallest_subnormal * moduli
    return factored_bound(kind, xp.sqrt(operations(kind, n + FLOOR_TERMS, count) * reach), n, moduli)


def _times(A: Array, x: Array, of: Callable[[Array], Array] = wide) -> Array:
    """f(A) x in float64, block by block."""
    xp = namespace(A)
    out = xp.zeros(A.shape[0], dtype=xp.float64, device=A.device)
    for at in range(0, A.shape[1], BLOCK):
        part = slice(at, min(at + BLOCK, A.shape[1]))
        add_product(out, of(wide(A[:, part])), x[part], alpha=1.0)
    return out
