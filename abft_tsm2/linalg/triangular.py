"""Check solutions of T X = B, for a triangle T, and of A X = B: by the residual of all right-hand sides at once.

The right-hand sides are added up with random weights first, ``X t`` and ``B t``, so that a check costs two products of
T with a vector, however many there are. The bound is that of a random walk of the rounding errors; what exceeds it is
suspected, and judged by evidence: all elements of the residual, computed more precisely, and bounds that hold whatever
the order of the substitution (Higham 2002, theorems 8.5 and 9.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, float_type, from_host, is_numpy, namespace, to_host
from abft_tsm2.checksum.bounds import FLOOR_TERMS, changed_bound, factored_bound, operations
from abft_tsm2.checksum.encode import exponents
from abft_tsm2.checksum.rigorous import flushed, solved_rounding, substituted_rounding, underflow
from abft_tsm2.checksum.weights import weights
from abft_tsm2.core.accurate import Difference, Part, parts
from abft_tsm2.core.blas import add_product, multiply_triangle
from abft_tsm2.linalg.encode import wide
from abft_tsm2.linalg.host_sums import is_whole, times, triangle_times
from abft_tsm2.linalg.line_check import LineCheck, column_norms

BLOCK = 128
HIDDEN = 2.0**6  # how far weighted solutions may be apart for the check of their sum: its bound is that of the largest
SMALL = 2.0**-600  # what solutions are multiplied with where |T| |X|, or |L| |U| |X|, is beyond the range
FAR = 300  # exponents: sums of products of numbers of 2^300 and 2^-300 are in the range with all their digits
FAINT = 2.0**-600  # squares, the largest of which is smaller, may have lost digits, or all of them
LOST = 2.0**-900  # so may a sum of squares that is smaller


class Weighed(NamedTuple):
    """Right-hand sides or solutions, and what their columns add up to with weights.

    Attributes
    ----------
    X : (n, r) array
    t : (r,) float64 array
    sums, squares : (n,) float64 arrays
        ``X t`` and ``(X o X)(t o t)``.
    """

    X: Array
    t: Array
    sums: Array
    squares: Array

    @classmethod
    def of(cls, X: Array, t: Array) -> Weighed:
        with np.errstate(all="ignore"):
            values = wide(X)
            return cls(X, t, times(values, t), times(square(values), square(t)))

    def rows(self, order: Array) -> Weighed:
        """Its rows in another order: a copy of X, with the sums that were taken of it."""
        X, sums, squares = (namespace(x).take(x, order, axis=0) for x in (self.X, self.sums, self.squares))
        return Weighed(X, self.t, sums, squares)

    @property
    def same(self) -> bool:
        """Whether X adds up to what it did, but for the order of addition."""
        xp, terms = namespace(self.sums), int(self.X.shape[1])
        with np.errstate(all="ignore"):
            values = wide(self.X)
            now = times(values, self.t)
            norms = column_norms(xp.matrix_transpose(values * self.t[None, :]))
            close = LineCheck.of(now - self.sums, changed_bound(norms, terms)).ok
            return bool(xp.all(close | (now == self.sums) | (xp.isnan(now) & xp.isnan(self.sums))))


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
        if of is wide and is_whole(self.T):
            return triangle_times(self.T, x, lower=self.lower, unit=self.unit)
        (out,) = self._products((x, of))
        return out

    def times_both(self, x: Array, squares: Array) -> tuple[Array, Array]:
        """``T x`` and ``(T o T) squares``, in float64."""
        if is_whole(self.T):
            return self.times(x), self.times(squares, square)
        first, second = self._products((x, wide), (squares, square))
        return first, second

    def _products(self, *wanted: tuple[Array, Callable[[Array], Array]]) -> list[Array]:
        """f(T) x for each of some x and f."""
        xp, n = namespace(self.T), self.T.shape[0]
        found = [xp.zeros(n, dtype=xp.float64, device=self.T.device) for _ in wanted]
        for at in range(0, n, BLOCK):
            here = slice(at, min(at + BLOCK, n))
            away = slice(here.stop, n) if self.lower else slice(0, at)
            corner, beside = (wide(self.T[rows, here]) for rows in (here, away))
            for out, (x, of) in zip(found, wanted, strict=True):
                out[here] += multiply_triangle(of(corner), x[here], lower=self.lower, unit=self.unit)
                add_product(out[away], of(beside), x[here], alpha=1.0)
        return found


def triangles(lu: Array, trans: int) -> tuple[Triangle, Triangle]:
    """Those of A, or of A' = U' L' P, as they are solved for one after the other."""
    if trans:
        return Triangle(lu.T, True, False), Triangle(lu.T, False, True)
    return Triangle(lu, True, True), Triangle(lu, False, False)


def summing_weights(B: Array) -> Array:
    """Weights of right-hand sides (n x r) that make none of them vanish beside the others."""
    with np.errstate(all="ignore"):
        largest = largest_of_columns(B)
        largest = np.where(np.isfinite(largest), largest, 0.0)
        scale = exponents(np.log2(largest))
    return from_host(np.ldexp(weights("balanced", B.shape[1], seed=2)[:, 0], -scale), B)


def largest_of_columns(X: Array) -> Any:
    """The largest modulus of each column of X, in float64 on the host; NaN where there is one."""
    if not X.shape[0]:
        return np.zeros(X.shape[1])
    if is_numpy(X):
        return np.maximum.reduce(np.abs(X), axis=0).astype(np.float64)
    xp = namespace(X)
    return to_host(xp.max(xp.abs(X), axis=0)).astype(np.float64)


def hides_columns(largest: Any, t: Any, B: Array) -> bool:
    """Whether a fault in the smallest of some solutions for right-hand sides B may be lost in their sum with weights t.

    `largest`: the largest modulus of each solution; like t on the host.
    """
    sizes = (largest * np.abs(t))[largest > 0]
    if sizes.size > 1 and np.maximum.reduce(sizes) > HIDDEN * np.minimum.reduce(sizes):
        return True
    return sizes.size < t.size and bool(largest_of_columns(B)[largest == 0].any())


def modulus(X: Array) -> Array:
    return namespace(X).abs(X)


def square(X: Array) -> Array:
    return X * X


Elements = Callable[[Array], Array]  # of a block of a matrix
Lines = Callable[..., tuple[Array, Array]]


def _squared(of: Elements) -> Elements:
    return lambda T: square(of(T))


def check_substitution(triangle: Triangle, X: Weighed, B: Weighed) -> LineCheck:
    """Of ``T X = B``, row by row."""

    def lines(y: Array, sizes: Array, of: Elements = wide) -> tuple[Array, Array]:
        if of is wide:
            return triangle.times_both(y, sizes)
        return triangle.times(y, of), triangle.times(sizes, _squared(of))

    # The ones of a unit triangle are not stored, and stay as they are.
    return _check(X, B, lines, lambda: 0 if triangle.unit else _power(_stored(triangle)))


def check_solution(A: Array, factors: tuple[Triangle, Triangle], order: Array, X: Weighed, B: Weighed) -> LineCheck:
    """Of ``A X = B`` by its residual; its bound is made of |L||U||X| (Higham 2002, theorem 9.4), and |A||X|.

    `order`: which row of A each row of L is.
    """
    xp, (lower, upper) = namespace(A), factors

    def lines(y: Array, sizes: Array, of: Elements = wide) -> tuple[Array, Array]:
        reach = lower.times(upper.times(sizes, _squared(of)), square)
        reach = 3 * xp.take(reach, xp.argsort(order))
        return _times(A, y, of), reach + _times(A, sizes, _squared(of))

    return _check(X, B, lines, lambda: max(_power(A), _power(_stored(upper))))


def check_by_factors(first: Triangle, second: Triangle, X: Weighed, B: Weighed) -> LineCheck:
    """Of ``M X = B``, M the product of these, when X is what both substitutions have given; bounded as in
    `check_solution`."""

    def lines(y: Array, sizes: Array, of: Elements = wide) -> tuple[Array, Array]:
        reach = first.times(second.times(sizes, _squared(of)), _squared(of))
        return first.times(second.times(y, of), of), 3 * reach

    return _check(X, B, lines, lambda: 0)


def _check(X: Weighed, B: Weighed, lines: Lines, power: Callable[[], int]) -> LineCheck:
    """Of ``M X = B`` for the matrix M of which ``lines(y, s, f)`` gives ``f(M) y`` and ``f(M)^2 s``, elements squared.

    What fails and has squares beyond the range is checked once more with M and X scaled, by powers of two, to 1, and
    what may hide a fault in one of its columns with columns scaled, unless B is not what it was. `power`: the exponent
    of M.
    """
    xp, n, t = namespace(X.X), X.X.shape[0], B.t
    with np.errstate(all="ignore"):
        residual, reached = lines(X.sums, X.squares)
        reached = reached + B.squares
        found = LineCheck.of(residual - B.sums, _bound(X.X, reached, t))
        most = float(xp.max(reached)) if n else 1.0
        hidden = found.clean and t.size > 1 and hides_columns(largest_of_columns(X.X), to_host(t), B.X)
        if not hidden and (found.clean or FAINT < most < 1 / FAINT):
            return found
        down, own = power(), summing_weights(X.X)
        half = down // 2

        def weighed(by: Array) -> LineCheck:
            """With these weights. Half of M's exponent comes off B before it is weighted and half after, so that it
            does not leave the range on the way."""
            weighted = wide(X.X) * by
            residual, reach = lines(xp.sum(weighted, axis=1), xp.sum(square(weighted), axis=1), _of(down))
            given = (wide(B.X) * 2.0**-half) * by * 2.0 ** (half - down)
            residual, reach = residual - xp.sum(given, axis=1), reach + xp.sum(square(given), axis=1)
            bound = _bound(X.X, reach, by * 2.0**-down)
            lost = reach < LOST
            if bool(xp.any(lost)):  # rows that are so small beside others are left to evidence, but for those of zeros
                bound = xp.where(lost & ~_are_empty(X.X, B.X, lines), float("nan"), bound)
            return LineCheck.of(residual, bound)

        scaled = weighed(own)  # which undo the solution's columns, where t undoes those of B
        largest = largest_of_columns(X.X)
        ok = scaled.ok & ~_are_unsolved(largest, B.X) & B.same
        if hidden:
            return LineCheck(found.residual, found.bound, found.ok & ok)
        if t.size > 1:  # a row of a solution that is huge elsewhere vanishes beside other solutions then
            ok &= weighed(_together(largest, t)).ok
        # The report's residuals are in the units of t.
        unit = float(xp.min(xp.abs(own))), float(xp.min(xp.abs(t)))
        residual, bound = (x * 2.0**down / unit[0] * unit[1] for x in (scaled.residual, scaled.bound))
        return LineCheck(residual, bound, ok)


def _are_empty(X: Array, B: Array, lines: Lines) -> Array:
    """Which rows of ``M X = B`` have zeros alone: B's, and every term. `lines`: as in `_check`."""
    xp = namespace(X)

    def present(T: Array) -> Array:
        return xp.astype(T != 0, xp.float64)

    solved = present(xp.max(modulus(X), axis=1))
    return (lines(solved, solved, present)[0] == 0) & ~xp.any(B != 0, axis=1)


def _are_unsolved(largest: Any, B: Array) -> Array:
    """Which rows of B are not 0 where their solution is nothing but zeros: no weight would show it beside others.
    `largest`: as in `hides_columns`."""
    return namespace(B).any((B != 0) & from_host(largest == 0, B)[None, :], axis=1)


def _together(largest: Any, t: Array) -> Array:
    """The weights t times a power of two which brings the largest weighted solution to 1; `largest`: as in
    `hides_columns`."""
    with np.errstate(divide="ignore"):
        sizes = np.log2(largest) + np.log2(np.abs(to_host(t)))
    most = np.max(sizes, where=np.isfinite(sizes), initial=-np.inf)
    return from_host(np.ldexp(to_host(t), -math.ceil(most) if math.isfinite(most) else 0), t)


def _of(power: int) -> Elements:
    """What multiplies a matrix by 2^-power."""
    return (lambda T: T * 2.0**-power) if power else wide


def _power(T: Array) -> int:
    """The exponent of the largest element, so far from the ends of the range that its power of two has an inverse."""
    largest = float(namespace(T).max(modulus(T)))
    return max(-1000, min(1000, math.frexp(largest)[1])) if 0.0 < largest < math.inf else 0


def far_power(X: Array) -> int:
    """The same, but 0 where products of two such numbers are far from the ends of the range."""
    power = _power(X)
    return power if abs(power) > FAR else 0


def scaled_down(X: Array, power: int) -> Array:
    """2^-power X in float64, by two halves: 2^-power itself may be beyond the range."""
    half = power // 2
    return (wide(X) * 2.0**-half) * 2.0 ** (half - power) if power else wide(X)


def _stored(triangle: Triangle) -> Array:
    xp = namespace(triangle.T)
    return xp.tril(triangle.T) if triangle.lower else xp.triu(triangle.T)


def substitution_evidence(triangle: Triangle, X: Array, B: Array) -> LineCheck:
    """Of ``T X = B``, row by row, from all elements: ``|B - T X| <= gamma_n |T| |X|``."""
    n, kind = X.shape[0], float_type(X)
    with np.errstate(all="ignore"):
        residual = _residual(triangle.block, X, B)
        moduli = partial(_moduli, triangle.block)
        reach, scale = _reached(moduli, X)
        lost = underflow(kind, n, _pivots(triangle))[:, None] + _of_operands(moduli, X)
        return _all(residual, substituted_rounding(kind, n), reach, lost, scale)


def solution_evidence(A: Array, factors: tuple[Triangle, Triangle], order: Array, X: Array, B: Array) -> LineCheck:
    """Of ``A X = B``, row by row, from all elements: ``|B - A X| <= gamma_3n P'|L| |U| |X|``."""
    xp, n, kind = namespace(X), X.shape[0], float_type(X)
    with np.errstate(all="ignore"):
        residual = _residual(lambda rows, columns: A[rows, columns], X, B)
        reach, lost, scale = _solved_by(*factors, X)
        # P A = L U + F, where F is what underflow took from the factors
        largest = float(xp.max(_pivots(factors[1])))
        lost = lost + xp.sum(underflow(kind, n, largest) * xp.abs(wide(X)), axis=0)[None, :]
        back = xp.argsort(order)
        reach, lost = (xp.take(x, back, axis=0) for x in (reach, lost))
        return _all(residual, solved_rounding(kind, n), reach, lost, scale)


def evidence_by_factors(first: Triangle, second: Triangle, X: Array, B: Array) -> LineCheck:
    """Of ``M X = B``, M the product of these, row by row, from all elements: as `solution_evidence`, and what float64
    rounds in the product of `second` and X."""
    n, kind = X.shape[0], float_type(X)
    with np.errstate(all="ignore"):
        residual = _residual(first.block, _product(second.block, wide(X)), B)
        factor = solved_rounding(kind, n) + substituted_rounding(float_type(residual), n)
        reach, lost, scale = _solved_by(first, second, X)
        return _all(residual, factor, reach, lost, scale)


def _solved_by(first: Triangle, second: Triangle, X: Array) -> tuple[Array, Array, float]:
    """``|L| |U| |X|`` times a scale, what underflow has taken of a solution X by L and U, element by element, and the
    scale: as `_reached`."""
    n, kind = X.shape[0], float_type(X)

    def moduli(sizes: Array) -> Array:
        return _moduli(first.block, _moduli(second.block, sizes))

    reach, scale = _reached(moduli, X)
    lost = first.times(underflow(kind, n, _pivots(second)), modulus) + underflow(kind, n, _pivots(first))
    return reach, lost[:, None] + _of_operands(moduli, X), scale


def _pivots(triangle: Triangle) -> Array:
    """The moduli of its diagonal, and 1 where that is more."""
    xp, T = namespace(triangle.T), triangle.T
    ones = xp.ones(T.shape[0], dtype=xp.float64, device=T.device)
    return ones if triangle.unit else xp.maximum(ones, xp.abs(wide(xp.linalg.diagonal(T))))


def _reached(of: Callable[[Array], Array], X: Array) -> tuple[Array, float]:
    """What `of` makes of |X|, or of a multiple of it where that is beyond the range; and the multiple."""
    xp = namespace(X)
    sizes = xp.abs(wide(X))
    reach = of(sizes)
    return (reach, 1.0) if bool(xp.all(xp.isfinite(reach))) else (of(SMALL * sizes), SMALL)


def _of_operands(of: Callable[[Array], Array], X: Array) -> Array | float:
    """What is lost in a product of a matrix and X where elements of either count as zero; `of`: as in `_reached`."""
    xp, tiny = namespace(X), flushed(float_type(X))
    if not tiny:
        return 0.0
    sizes = xp.abs(wide(X))
    return of(xp.full_like(sizes, tiny)) + xp.sum(tiny * sizes, axis=0)[None, :]


def _all(residual: Array, factor: float, reach: Array, lost: Array, scale: float) -> LineCheck:
    """Rows all of whose elements are within ``factor reach / scale``, and what underflow has `lost` in each element."""
    xp = namespace(residual)
    bound = factor * reach + scale * lost
    ok = xp.all((scale * xp.abs(residual) <= bound) & xp.isfinite(bound), axis=1)
    return LineCheck(xp.max(xp.abs(residual), axis=1), xp.max(bound, axis=1) / scale, ok)


def _residual(left: Part, X: Array, B: Array) -> Array:
    """B - M X, with an error far below rounding, for the matrix M of which `left` gives blocks."""
    xp, (n, count) = namespace(X), X.shape
    difference = Difference(left, lambda rows, columns: X[rows, columns], (n, n, count), X)
    factor = substituted_rounding(float_type(X), n)  # the least that it is compared with
    out = xp.empty((n, count), dtype=xp.float64, device=X.device)
    for rows, columns in difference.blocks():
        measured = difference.block(B[rows, columns], rows, columns, factor=factor, closely=True)
        out[rows, columns] = measured.residual
    return out


def _moduli(left: Part, X: Array) -> Array:
    """|M| X."""
    return _product(lambda rows, terms: modulus(left(rows, terms)), X)


def _product(left: Part, X: Array) -> Array:
    """M X in float64, for the matrix M of which `left` gives blocks, and X in float64."""
    n, out = X.shape[0], namespace(X).zeros_like(X)
    for rows in parts(n):
        for terms in parts(n):
            out[rows, :] += wide(left(rows, terms)) @ X[terms, :]
    return out


def _bound(X: Array, reach: Array, t: Array) -> Array:
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
