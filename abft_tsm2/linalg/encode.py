"""Encode a matrix that is to be factored by LU: weights, its weighted sums by rows and by columns, and norms.

Each row's weight undoes the row's norm, each column's that of the column so scaled (as powers of two), so that no large
line hides what happens in the others. Any weights are valid; so the norms they are made from, and those that
bounds start from, are taken of a sample of the columns and rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import (
    Array,
    Namespace,
    from_host,
    in_float64,
    is_column_major,
    is_numpy,
    namespace,
    same_bits,
    to_host,
)
from abft_tsm2.checksum import weights
from abft_tsm2.checksum.bounds import FLOOR_TERMS
from abft_tsm2.checksum.encode import exponents
from abft_tsm2.core.blas import add_product, like_columns
from abft_tsm2.core.encode_both import encode_both
from abft_tsm2.core.kept import compared
from abft_tsm2.core.row_sums import fingerprint
from abft_tsm2.linalg.host_sums import times
from abft_tsm2.linalg.line_check import column_norms

GROUPS, GROUP = 4, 8  # norms are taken of so many groups of lines that lie side by side: memory is read in runs
LARGEST_POWER = 1000  # of two, of a weight
MIDDLE = 900.0  # powers that no limit is near to
EVEN = 20.0  # powers that norms may be apart before an element that no sample has shown takes sums beyond the range
TINY = 1e-280  # squares below have lost digits
_least, _most = np.minimum.reduce, np.maximum.reduce  # half the time of the methods that call them
SMALL = 1e-120  # elements whose squares are far from the ends of the range, those much smaller too


def wide(X: Array) -> Array:
    """X in float64; X itself where it is."""
    if is_numpy(X) and X.dtype.char == "d":
        return X
    return in_float64(X)


def counts(K: int, xp: Namespace, device: Any, first: int = 0) -> Array:
    """Operations on an element up to each of K columns, the first of which is column `first`."""
    return xp.arange(first + FLOOR_TERMS, first + FLOOR_TERMS + K, dtype=xp.float64, device=device)


@dataclass(eq=False)
class Bits:
    """Sums of the words of a matrix by rows and by columns, as `encode_both` takes them together with sums that have
    weights v and w; and its fingerprint, where it was taken."""

    rows: Array
    columns: Array
    v: Array
    w: Array
    lines: Array | None = None

    @classmethod
    def of(cls, A: Array, v: Array, w: Array) -> Bits:
        return cls(*_words(A, v, w), v, w, fingerprint(A))

    def same(self, A: Array) -> bool:
        """Whether A has the same ones. Reads all of A, and synchronises with the host."""
        rows, columns = _words(A, self.v, self.w)
        lines = self.lines is None or same_bits(fingerprint(A), self.lines)
        return lines and same_bits(rows, self.rows) and same_bits(columns, self.columns)


def _words(A: Array, v: Array, w: Array) -> tuple[Array, Array]:
    taken = encode_both(A, v[:, None], w[:, None], words=True, dtype="float64")
    return taken.row_words, taken.column_words


@dataclass(eq=False)
class MatrixChecksums:
    """What is kept of A (m x n) before it is factored, in A's order of rows; all float64.

    Attributes
    ----------
    w, v : (m,), (n,) arrays
        Weights, each line's scaled by a power of two that undoes its norm.
    S, Z : (m,), (n,) arrays
        ``A v`` and ``w'A``.
    row_norms, column_norms : (m,), (n,) arrays
        ``||A_i o v||`` and ``||A_c o w||``, from a sample.
    row_sizes, column_sizes : (m,), (n,) arrays on the host
        Logarithms to base 2 of the norms of A's lines without weights, of the sample alone: sizes of their elements.
    spread : float
        Logarithm to base 2 of how far norms are apart that weights undo, of rows or of columns; infinite where unknown.
    bits : Bits or None
        Sums of the bits of A, taken before S and Z or together with them; on a CPU they are kept only where S and Z are
        blind to a change that counts.
    """

    w: Array
    v: Array
    S: Array
    Z: Array
    row_norms: Array
    column_norms: Array
    row_sizes: Any
    column_sizes: Any
    spread: float = math.inf
    bits: Bits | None = None

    @classmethod
    def of(cls, A: Array) -> MatrixChecksums:
        """Encode A, whose rows or columns are contiguous: reads A twice, and a few of its rows and columns again."""
        with np.errstate(all="ignore"):
            e = cls._of(A, _squares(A, axis=1), _squares(A, axis=0))  # of every row, from some columns
            if e.spread > EVEN and not e._is_finite() and bool(namespace(A).all(namespace(A).isfinite(A))):
                return cls._of(A, _Whole(A), _Whole(A.T))  # the sample has missed what is largest in some lines
            return e

    @classmethod
    def _of(cls, A: Array, rows: _Sampled | _Whole, columns: _Sampled | _Whole) -> MatrixChecksums:
        xp = namespace(A)
        m = A.shape[0]
        diagonal = xp.abs(wide(xp.linalg.diagonal(A)))  # which is large so often that no sample may miss it
        plain, across = rows.log2_norms(), columns.log2_norms()
        on_it = np.log2(to_host(diagonal))
        for sizes in (plain, across):
            np.maximum(sizes[: on_it.size], on_it, out=sizes[: on_it.size])
        powers, apart = _powers(plain)
        w = _weights(powers, A, seed=0)
        column_norms = _at_least(columns.norms(w), diagonal, w)
        # v also undoes the scale of A as a whole, which leaves S, y and their squares in the middle of the range
        usual = int(np.sort(powers)[m // 2]) if m else 0
        of_columns, apart_columns = _powers(np.log2(to_host(column_norms)))
        if apart + apart_columns > MIDDLE:  # no element times its weight may leave the range: S would
            of_columns = np.fmax(of_columns, np.minimum(across, LARGEST_POWER) - MIDDLE - usual).astype(np.int64)
        v = _weights(of_columns, A, seed=1, shift=usual)
        row_norms = _at_least(rows.norms(v), diagonal, v)
        S, Z = sums(A, v), sums(A.T, w)
        floors = xp.maximum(row_norms, xp.abs(S)), xp.maximum(column_norms, xp.abs(Z))
        return cls(w, v, S, Z, *floors, plain, across, max(apart, apart_columns))

    def _is_finite(self) -> bool:
        xp = namespace(self.S)
        return all(bool(xp.all(xp.isfinite(norms))) for norms in (self.row_norms, self.column_norms))

    def is_of_finite(self, A: Array) -> bool:
        """Whether A holds neither NaN nor Inf: no weight is zero, so that either would show in S; A is read only where
        S has overflowed."""
        xp = namespace(A)
        return bool(xp.all(xp.isfinite(self.S))) or bool(xp.all(xp.isfinite(A)))


def _at_least(norms: Array, diagonal: Array, weight: Array) -> Array:
    K = diagonal.shape[0]
    norms[:K] = namespace(norms).maximum(norms[:K], diagonal * namespace(weight).abs(weight[:K]))
    return norms


def sums(A: Array, weight: Array) -> Array:
    """``A weight`` in float64, for A of either type."""
    if is_numpy(A) and A.dtype.char != "d":
        return np.einsum("ij,j->i", A, weight)  # widens as it reads
    return times(wide(A), weight)


def add_sums(out: Array, A: Array, weight: Array, *, alpha: float = 1.0) -> None:
    """``out += alpha A weight`` in float64, for A of either type."""
    if is_numpy(A) and A.dtype.char != "d":
        out += alpha * sums(A, weight)
    else:
        add_product(out, wide(A), weight, alpha=alpha)


class _Sampled(NamedTuple):
    """Squares of some lines of a matrix, and which lines they are."""

    of: Array  # (lines of the result) x (sampled lines)
    lines: Array
    share: float
    scale: float  # a power of two by which elements were multiplied first
    plain: Any  # their sums, on the host

    def norms(self, weight: Array) -> Array:
        """Estimated 2-norms over all lines of (weight x element)."""
        xp = namespace(self.of)
        chosen = xp.take(weight, self.lines)
        largest = float(xp.max(xp.abs(chosen))) if chosen.shape[0] else 1.0
        found = xp.sqrt(sums(self.of, (chosen / largest) ** 2))
        if self.scale != 1.0:  # the largest weight over the scale may be beyond the range: in two steps
            largest, power = math.frexp(largest)
            power -= round(math.log2(self.scale))
            found *= 2.0 ** (power // 2)
            largest *= 2.0 ** (power - power // 2)
        # the share last: the sums may be all that is left of the range
        return largest * math.sqrt(self.share) * found

    def log2_norms(self) -> Any:
        return 0.5 * np.log2(self.plain) - math.log2(self.scale)


class _Whole(NamedTuple):
    """The same of all lines of a matrix, whose sizes a sample does not show: reads it at each call."""

    of: Array

    def norms(self, weight: Array) -> Array:
        return column_norms((wide(self.of) * weight[None, :]).T)

    def log2_norms(self) -> Any:
        xp = namespace(self.of)
        return np.log2(to_host(xp.max(xp.abs(wide(self.of)), axis=1)))


def _squares(A: Array, axis: int) -> _Sampled:
    """Squares of a sample of columns (axis 1) or rows (axis 0); of all where a line of the sample has nothing in it."""
    X = A if axis == 1 else A.T
    count = X.shape[1]
    every = range(0, count, GROUP)
    groups = range(0, count, count // GROUPS) if count >= 2 * GROUP * GROUPS else every
    found = _squared(X, groups)
    if count and found.plain.size and _least(found.plain) > TINY and _most(found.plain) < math.inf:
        return found
    if len(groups) < len(every) and not np.all(found.plain > 0):
        groups = every
        found = _squared(X, groups)
    norms = found.plain
    if norms.size and not np.all((norms > TINY) & np.isfinite(norms)):  # a line of zeros, or squares beyond the range
        moduli = np.abs(to_host(X))
        largest = float(np.max(moduli, initial=0.0, where=np.isfinite(moduli)))
        if not SMALL < largest < 1 / SMALL and largest > 0.0:
            power = min(1000, -int(np.frexp(largest)[1]))  # a subnormal number has no reciprocal
            found = _squared(X, groups, 2.0**power)
    return found


def _squared(X: Array, groups: range, scale: float = 1.0) -> _Sampled:
    xp, count = namespace(X), X.shape[1]
    lines = _lines_of(groups, count)
    share = count / max(1, lines.size)
    if is_numpy(X) and scale == 1.0 and (X.flags.c_contiguous or X.flags.f_contiguous):
        # take copies what is contiguous in runs, several times as fast as slices are
        chosen = wide(X.take(lines, axis=1) if X.flags.c_contiguous else X.T.take(lines, axis=0).T)
        np.multiply(chosen, chosen, out=chosen)
        return _Sampled(chosen, lines, share, scale, times(chosen, np.ones(lines.size)))
    by_columns = is_column_major(X)
    shape = (X.shape[0], lines.size)
    chosen = like_columns(X, shape if by_columns else shape[::-1], xp.float64)
    chosen = chosen if by_columns else chosen.T
    at = 0
    for first in groups:
        block = wide(X[:, first : min(first + GROUP, count)])
        part = chosen[:, at : at + block.shape[1]]
        if scale == 1.0 and is_numpy(X):
            np.multiply(block, block, out=part)
        else:
            part[...] = (block * scale) ** 2
        at += block.shape[1]
    ones = from_host(np.ones(lines.size), X)
    return _Sampled(chosen, from_host(lines, X), share, scale, to_host(sums(chosen, ones)))


@compared
def _lines_of(groups: range, count: int) -> Any:
    """All lines that are in the groups which begin there."""
    lines = (np.array(groups, np.int64)[:, None] + np.arange(GROUP)).reshape(-1)
    return lines[lines < count]


def _powers(log2_norms: Any) -> tuple[Any, float]:
    """`exponents`, in fewer calls where none of them is near the ends of the range; and how far they are apart."""
    n = log2_norms.size
    if not n:
        return exponents(log2_norms), 0.0
    least, most = float(_least(log2_norms)), float(_most(log2_norms))
    if not (least > -MIDDLE and most < MIDDLE):
        return exponents(log2_norms), math.inf
    ordered, half = np.sort(log2_norms), n // 2
    centre = float(ordered[half]) if n % 2 else float(ordered[half - 1] + ordered[half]) / 2
    if not least <= centre <= most:  # as NaN is not
        return exponents(log2_norms), math.inf
    return np.rint(log2_norms - (centre - round(centre))).astype(np.int64), most - least


def _weights(powers: Any, like: Array, seed: int, shift: int = 0) -> Array:
    """Weights that undo norms, powers of two, and 2^shift beside."""
    power = np.minimum(np.maximum(powers + shift, -LARGEST_POWER), LARGEST_POWER)
    return from_host(np.ldexp(balanced(powers.size, seed), -power), like)


def balanced(n: int, seed: int = 0) -> Any:
    """Weights before they are scaled: between 1 and 1.5, of random signs."""
    return weights.balanced(n, seed)[:, 0]
