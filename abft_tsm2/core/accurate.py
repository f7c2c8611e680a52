"""Compute X - L R with an error far below the roundoff of X's own type, by error-free splitting.

Products of float32 and 16-bit elements are exact in float64, which adds them up. Elements of float64 are split without
error (K. Ozaki, T. Ogita, S. Oishi and S. M. Rump, Error-free transformations of matrix multiplication, Numer.
Algorithms 59 (2012) 95)::

    L = L1 + ... + Ls,  R = R1 + ... + Rs         slices of beta bits, 2 beta + log2 k = 53; the last ones hold the rest
    L R = sum_{p+q<=s} Lp Rq + sum_p Lp (R - R1 - ... - R(s-p))

The products of the first sum are exact, whatever the order of their sums; they are taken off X with compensation
(two-sum), so that nothing is lost where they cancel. Those of the second sum are small. Lines are scaled by powers of
two first, ``2^-e_i l_ip 2^d_p`` and ``2^-d_p r_pj 2^-f_j``: then all are at most 1, and nothing overflows. d_p takes
the row of R to 1, or the column of L, or both to one size, whichever leaves the lines largest. An element whose own
terms are still so small beside 1 that its error decides is summed by itself: no term of another counts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, dtype_name, from_host, in_float64, is_numpy, namespace, to_host
from abft_tsm2.core.blas import add_product

BLOCK = 512  # lines, and terms of a sum, at a time: blocks of 2 MB
ON_DEVICE = 4096  # lines at a time there, where the other side has few: a block takes longer than its launches then
SPLIT = 44  # bytes of an element that is split
KEPT = 400 << 20  # bytes of a strip of R that are kept so, but for one block of columns
SLICE = {2: 21, 3: 22}  # bits of a slice, where there are so many: 2^(53 - 2 bits) of their products have an exact sum
UNIT, UNIT32 = 2.0**-53, 2.0**-24
CUT, CUT32 = 2.0**-150, 2.0**-60  # less than that beside 1 is dropped: products of subnormal numbers are slow
ALONE, SMALLEST = 1 << 21, 32  # terms of elements, and lines of a block, that are summed by themselves
TERMS = 1 << 18  # held at a time of elements that are summed by themselves
NONE = -5000  # the exponent of what is 0
FAR = 900  # exponents beyond which a power of two is applied together with the others

Part = Callable[[slice, slice], Array]  # some rows and columns of a matrix


class Measured(NamedTuple):
    """A block of ``X - L R``, all float64.

    Attributes
    ----------
    residual : array
    bound : array
        ``factor (|L| |R|)_ij``, and what the residual may be off by.
    sharp : bool
        Whether the residual is known well enough to say everywhere on which side of ``factor |L| |R|`` it is.
    open : boolean array or None
        Of which elements it is not.
    """

    residual: Array
    bound: Array
    sharp: bool
    open: Array | None = None


def residual(X: Array, L: Array, R: Array, *, narrow: bool = False) -> Array:
    """X - L R, more accurately than any of their type.

    Parameters
    ----------
    X : (m, n) array
    L : (m, k) array
    R : (k, n) array
        Floating-point, of one library.
    narrow : bool
        Elements of float64 have no more digits than a narrower type.

    Returns
    -------
    residual : (m, n) array of float64
        Off by at most ``2^-86 k max_p |2^d_p l_ip| max_p |2^-d_p r_pj|`` for float64, d_p as above, and by
        ``2^-53 k (|L| |R|)_ij`` for narrower types. NaN where the sum has NaN or Inf in it.

    Examples
    --------
    >>> import numpy as np
    >>> L, R = np.array([[1 + 2.0**-30, 1.0]]), np.array([[1 - 2.0**-30], [-1.0]])
    >>> float((L @ R)[0, 0]), float(-residual(np.zeros((1, 1)), L, R)[0, 0]) == -(2.0**-60)
    (0.0, True)
    """
    xp = namespace(X, L, R)
    (m, n), k = X.shape, L.shape[1]
    difference = Difference(lambda i, p: L[i, p], lambda p, j: R[p, j], (m, k, n), L, narrow=narrow)
    out = xp.empty((m, n), dtype=xp.float64, device=X.device)
    for rows, columns in difference.blocks():
        found = difference.block(X[rows, columns], rows, columns).residual
        out[rows, columns] = xp.where(xp.isfinite(found), found, xp.asarray(xp.nan, dtype=xp.float64))
    return out


def parts(count: int, most: int | None = None) -> list[slice]:
    """The fewest runs of lines of nearly one length, at most `most`: `BLOCK`, if not given."""
    pieces = max(1, -(-count // (most or BLOCK)))
    ends = [count * at // pieces for at in range(pieces + 1)]
    return [slice(lo, hi) for lo, hi in pairwise(ends) if hi > lo]


def lines_at_once(like: Array, k: int) -> int:
    """Rows and columns of a block where the other side has few, and sums k terms: more on a device than on a host."""
    return BLOCK if is_numpy(like) else max(BLOCK, min(ON_DEVICE, KEPT // (SPLIT * max(k, 1))))


class Difference:
    """X - L R, block by block.

    Parameters
    ----------
    left, right : callable
        ``left(rows, terms)`` is that block of L, ``right(terms, columns)`` of R.
    shape : (m, k, n)
    like : array
        Of the type, library and device of L and R.

    Attributes
    ----------
    lines : int
        Rows and columns of a block, at most: `BLOCK`, if not given.
    slices : int
        How many the next block of float64 is split into: as many as the last one needed.
    """

    def __init__(
        self,
        left: Part,
        right: Part,
        shape: tuple[int, int, int],
        like: Array,
        lines: int | None = None,
        *,
        narrow: bool = False,
    ) -> None:
        self.left, self.right, self.like = left, right, like
        self.xp, (self.m, self.k, self.n) = namespace(like), shape
        self.scaled = dtype_name(like.dtype) == "float64" and not narrow
        self.lines = lines or BLOCK
        self.slices = 2
        self._left: dict[tuple[int, int], _Factor] = {}  # of the rows that were asked for last, split
        self._right: dict[tuple[int, int, int], _Factor] = {}  # of a strip of columns
        if self.scaled:
            with np.errstate(all="ignore"):
                self._equilibrate()

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of all blocks of X, in an order in which few blocks of L are split again: once in each strip
        of columns."""
        columns = parts(self.n, self.lines)
        wide = max(1, KEPT // (SPLIT * self.lines * max(self.k, 1)))
        for at in range(0, len(columns), wide):
            self._right.clear()
            for rows in parts(self.m, self.lines):
                self._left.clear()
                for one in columns[at : at + wide]:
                    yield rows, one

    def _equilibrate(self) -> None:
        """The exponents d, e and f: float64, on the host. Two reads of L and R."""
        left, right = largest = np.full((2, self.k), -np.inf)
        for side, terms, _, logs in self._logs():
            largest[side, terms] = np.maximum(largest[side, terms], _largest(logs, axis=side))
        # What meets nothing but zeros sets no scale.
        self.counts = np.isfinite(left) & np.isfinite(right)
        choices = [np.where(self.counts, np.rint(d), 0.0) for d in (right, (right - left) / 2, -left)]
        scales = [(np.full(self.m, -np.inf), np.full(self.n, -np.inf)) for _ in choices]
        for side, terms, lines, logs in self._logs():
            for d, scale in zip(choices, scales, strict=True):
                shift = np.where(self.counts[terms], (-d if side else d)[terms], -np.inf)
                shifted = logs + from_host(np.expand_dims(shift, side), logs)
                scale[side][lines] = np.maximum(scale[side][lines], _largest(shifted, axis=1 - side))
        best = int(np.argmin([sum(float(np.mean(_exponent(x))) if x.size else 0.0 for x in pair) for pair in scales]))
        self.d, (self.e, self.f) = choices[best], map(_exponent, scales[best])

    def _logs(self) -> Iterator[tuple[int, slice, slice, Array]]:
        """log2 of the moduli of L (side 0: lines and terms) and of R (1: terms and lines), part by part; -inf of what
        is not finite."""
        for terms in parts(self.k):
            for rows in parts(self.m, self.lines):
                yield 0, terms, rows, _log2(self.left(rows, terms))
            for columns in parts(self.n, self.lines):
                yield 1, terms, columns, _log2(self.right(terms, columns))

    def block(
        self,
        X: Array,
        rows: slice,
        columns: slice,
        *,
        terms: int | None = None,
        factor: float = 0.0,
        closely: bool = False,
    ) -> Measured:
        """The block X of the given rows and columns, and a bound ``factor |L| |R|``.

        `terms`: the sum has no more of them that are not 0. Elements are split into two numbers where these tell which
        of the residuals are within the bound, else into three, and without a `factor`: two leave an error of at most
        ``2^-64 k``, three of ``2^-86 k``, in units of the largest elements of the lines. Residuals of which that does
        not tell it either are summed by themselves. `closely`: their errors have to be a quarter of the bound at most.
        """
        with np.errstate(all="ignore"):
            k = self.k if terms is None else terms
            if not self.scaled:
                return self._widened(X, rows, columns, k, factor)
            if not factor:
                return self._split(X, rows, columns, k, factor, 3)
            found = self._split(X, rows, columns, k, factor, self.slices, closely=closely)
            if self.slices == 2 and not found.sharp:
                self.slices = 3
                found = self._split(X, rows, columns, k, factor, 3, closely=closely)
            else:
                self.slices = 2 if found.sharp else 3
            return found if found.sharp else self._decided(found, X, rows, columns, k, factor, closely=closely)

    def _widened(self, X: Array, rows: slice, columns: slice, k: int, factor: float) -> Measured:
        xp = self.xp
        out = in_float64(X, copy=True)
        reach = xp.zeros_like(out)
        for at in parts(k):
            left = in_float64(self.left(rows, at))
            right = in_float64(self.right(at, columns))
            add_product(out, left, right)
            if factor:
                add_product(reach, xp.abs(left), xp.abs(right), alpha=1.0)
        return Measured(out, (factor + k * UNIT) * reach, True)

    def _split(
        self, X: Array, rows: slice, columns: slice, k: int, factor: float, slices: int, *, closely: bool = False
    ) -> Measured:
        xp, e, f = self.xp, self.e[rows], self.f[columns]
        high = scaled(X, e, f)
        alone = xp.isinf(high) & xp.isfinite(X)  # 2^1000 times as large as L R can be: the residual itself
        high = xp.where(alone, xp.zeros_like(high), high)
        low, reach = xp.zeros_like(high), xp.zeros_like(high, dtype=xp.float32)
        runs = [at for at in parts(self.k) if at.start < k]
        pairs = [(p, q) for p in range(slices) for q in range(slices - 1 - p)]
        bits = SLICE[slices]
        exactly = max(1, 2 ** (53 - 2 * bits) // BLOCK)  # parts
        for first in range(0, len(runs), exactly):
            exact = [xp.zeros_like(high) for _ in pairs]
            for at in runs[first : first + exactly]:
                L, R = self._factors(rows, at, columns, slices)
                if factor:
                    add_product(reach, L.size, R.size, alpha=1.0)
                for total, (p, q) in zip(exact, pairs, strict=True):
                    add_product(total, L.slices[p], R.slices[q])
                for p in range(slices):
                    add_product(low, L.slices[p], R.rests[slices - 1 - p])
            for total in exact:
                high, lost = _two_sum(high, total)
                low += lost
        # the inexact products: `slices` of them in each part, of numbers at most 2^-bits(slices - 1) and 1
        terms = slices * k * 2.0 ** -(bits * (slices - 1))
        error = (min(k, BLOCK) + len(parts(k)) + 2) * UNIT * terms + 2 * k * CUT
        found = high + low
        bound = factor * (1 + k * UNIT32) * xp.astype(reach, xp.float64)
        told = bound >= 4 * error if closely else xp.abs(xp.abs(found) - bound) > error
        alone &= xp.isfinite(found)
        residual = xp.where(alone, xp.astype(X, high.dtype, copy=False), scaled(found, -e, -f))
        sharp = not factor or bool(xp.all(told))
        return Measured(residual, scaled(bound + error, -e, -f), sharp, None if sharp else ~told & xp.isfinite(found))

    def _decided(
        self, found: Measured, X: Array, rows: slice, columns: slice, k: int, factor: float, *, closely: bool
    ) -> Measured:
        """What was `found`, and the elements that are open: few of them each summed by itself, more in quarters of the
        block, whose lines may have scales that suit them. On the host."""
        still = to_host(found.open)
        if not still.any():
            return found
        nothing = np.zeros((still.shape[0], 0)), np.zeros((0, still.shape[1]))
        left = np.concatenate([nothing[0], *(to_host(in_float64(self.left(rows, at))) for at in parts(k))], axis=1)
        right = np.concatenate([nothing[1], *(to_host(in_float64(self.right(at, columns))) for at in parts(k))], axis=0)
        given = to_host(in_float64(X))
        residual, bound = (np.array(to_host(x)) for x in (found.residual, found.bound))
        empty = still & ~(
            (left != 0).astype(np.float32) @ (right != 0).astype(np.float32) > 0
        )  # elements without terms
        residual[empty], bound[empty] = given[empty], 0.0
        still &= ~empty
        i, j = np.nonzero(still)
        if i.size * k <= ALONE or max(still.shape) <= SMALLEST:
            step = max(1, TERMS // max(k, 1))
            for at in (slice(lo, lo + step) for lo in range(0, i.size, step)):
                here = i[at], j[at]
                residual[here], bound[here] = _exactly(given[here], left[i[at]], right[:, j[at]].T, factor)
            return Measured(from_host(residual, found.residual), from_host(bound, found.bound), True)
        for across, along in product(np.array_split(np.unique(i), 2), np.array_split(np.unique(j), 2)):
            block = np.ix_(across, along)
            if still[block].any():
                one = _whole(left[across], right[:, along], given[block], factor, closely=closely)
                residual[block] = np.where(still[block], one.residual, residual[block])
                bound[block] = np.where(still[block], one.bound, bound[block])
        return Measured(from_host(residual, found.residual), from_host(bound, found.bound), True)

    def _factors(self, rows: slice, terms: slice, columns: slice, slices: int) -> tuple[_Factor, _Factor]:
        """Blocks of L and R, split: each is asked for again and again with others."""
        left, right = (terms.start, slices), (columns.start, terms.start, slices)
        if left not in self._left:
            part = _counted(self.left(rows, terms), self.counts[None, terms])
            self._left[left] = _factor(scaled(part, self.e[rows], -self.d[terms]), 1, slices)
        if right not in self._right:
            part = _counted(self.right(terms, columns), self.counts[terms, None])
            self._right[right] = _factor(scaled(part, self.d[terms], self.f[columns]), 0, slices)
        return self._left[left], self._right[right]


class _Factor(NamedTuple):
    """A block of L or R, scaled.

    Attributes
    ----------
    slices : list of array
    rests : list of array
        What is left before each of them.
    size : array
        Of elements, float32: what is cut off is less than the error allowed for.
    """

    slices: list[Array]
    rests: list[Array]
    size: Array


def scaled(X: Array, rows: Any, columns: Any) -> Array:
    """``x_ij 2^-(rows_i + columns_j)`` for exponents on the host, without overflow or underflow on the way."""
    X = in_float64(X)
    if not X.size:
        return X
    if np.abs(rows).max() + np.abs(columns).max() <= FAR:  # one of X and the result is near 1: so is what lies between
        for axis, power in enumerate((rows, columns)):
            X = X * _powers(power, axis, X) if power.any() else X
        return X
    # Rows and columns together: one may shrink what the other one makes large again.
    total = np.clip(rows[:, None] + columns[None, :], -2200, 2200).astype(np.int64)
    third = np.trunc(total / 3).astype(np.int64)
    for part in (third, third, total - 2 * third):
        X = X * from_host(np.ldexp(1.0, -part), X)
    return X


def _cut(X: Array, size: Array, least: float) -> Array:
    """X without elements whose size is less."""
    xp = namespace(X)
    small = size < least
    return xp.where(small, xp.zeros_like(X), X) if bool(xp.any(small)) else X


def _powers(exponents: Any, axis: int, like: Array) -> Array:
    powers = np.ldexp(1.0, -exponents.astype(np.int64))
    return from_host(np.expand_dims(powers, 1 - axis), like)


def _counted(X: Array, counts: Any) -> Array:
    """X with 0 where it does not count, but for NaN and Inf."""
    return X if counts.all() else in_float64(X) * from_host(counts.astype(np.float64), X)


def _log2(X: Array) -> Array:
    xp = namespace(X)
    logs = xp.log2(xp.abs(X))
    return xp.where(logs < np.inf, logs, xp.full_like(logs, -np.inf))  # as NaN is not


def _largest(X: Array, axis: int) -> Any:
    """max over an axis on the host."""
    xp = namespace(X)
    return to_host(xp.max(X, axis=axis))


def _exponent(log2_largest: Any) -> Any:
    """The exponents of powers of two above these numbers; 0 for those that are 0, Inf or NaN."""
    found = np.floor(log2_largest) + 1
    return np.where(np.isfinite(found), found, 0.0)


def _factor(X: Array, axis: int, count: int) -> _Factor:
    """X = X1 + ... + Xcount, where all but the last are multiples of one power of two in each line along `axis`, and
    of so many bits: (X + sigma) - sigma rounds to them."""
    xp = namespace(X)
    size = xp.abs(X)
    X = _cut(X, size, CUT)
    exponent = np.clip(_exponent(np.log2(to_host(xp.max(size, axis=axis)))), -900, 900)
    found, rests, bits = [], [X], SLICE[count]
    for _ in range(count - 1):
        sigma = from_host(np.ldexp(1.5, (exponent + 52 - bits).astype(np.int64)), X)
        sigma = sigma[:, None] if axis == 1 else sigma[None, :]
        found.append((rests[-1] + sigma) - sigma)
        rests.append(rests[-1] - found[-1])
        exponent = exponent - bits - 1
    return _Factor([*found, rests[-1]], rests, xp.astype(_cut(size, size, CUT32), xp.float32))


def _whole(L: Any, R: Any, X: Any, factor: float, *, closely: bool) -> Measured:
    """The one block of `Difference` of these."""
    (m, n), k = X.shape, L.shape[1]
    difference = Difference(lambda i, p: L[i, p], lambda p, j: R[p, j], (m, k, n), L)
    return difference.block(X, slice(0, m), slice(0, n), factor=factor, closely=closely)


def _exactly(x: Any, left: Any, right: Any, factor: float) -> tuple[Any, Any]:
    """``x_e - sum_p left_ep right_ep`` on the host, and ``factor sum_p |left_ep right_ep|`` with the error of both.

    Products are exact in two numbers (T. J. Dekker, Numer. Math. 18 (1971) 224) whose sum is compensated, each element
    in units of its largest term: what is lost is of second order, whatever the others are.
    """
    (a, of_a), (b, of_b), (c, of_c) = np.frexp(left), np.frexp(right), np.frexp(x)
    high = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    low = a2 * b2 - (((high - a1 * b1) - a2 * b1) - a1 * b2)
    exponent = np.where(high != 0, of_a + of_b, NONE)
    unit = np.maximum(exponent.max(axis=1, initial=NONE), np.where(c != 0, of_c, NONE))
    high, low = (np.ldexp(part, exponent - unit[:, None]) for part in (high, low))
    reach, lost = np.abs(high).sum(axis=1), np.zeros(x.shape)
    terms = np.concatenate([np.ldexp(c, of_c - unit)[:, None], -high, -low], axis=1)
    while (count := terms.shape[1]) > 1:
        total, rounded = _two_sum(terms[:, : count // 2], terms[:, count // 2 : count // 2 * 2])
        lost += rounded.sum(axis=1)
        terms = np.concatenate([total, terms[:, count // 2 * 2 :]], axis=1)
    found = terms[:, 0] + lost
    error = 4 * (left.shape[1] + 2) ** 2 * UNIT**2 * (reach + np.abs(np.ldexp(c, of_c - unit))) + UNIT * np.abs(found)
    return np.ldexp(found, unit), np.ldexp(factor * (1 + left.shape[1] * UNIT) * reach + error, unit)


def _halves(a: Any) -> tuple[Any, Any]:
    """a in two numbers of half as many digits each (G. W. Veltkamp)."""
    high = a * (2.0**27 + 1)
    high = high - (high - a)
    return high, a - high


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b rounded, and what rounding took (D. E. Knuth, The Art of Computer Programming 2, section 4.2.2)."""
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)
