"""Encode a symmetric positive definite matrix, carry its checksums through A = L L', and check its panels and L.

With weights w, ``Z = w'A`` takes part in every step: where the trailing matrix loses L21 L21', Z loses g L21', with
``g = w'L`` of the columns just finished. So Z is the sum of what the trailing matrix, both of its halves, should be, g
that of what is finished, and a panel is right where ``L11 g = Z(J)``. An error in the trailing matrix stays where it
is, added to one element, until its column is factored, and is seen then.

At the end one reading of L certifies it as it lies in memory: ``w'L = g``, and ``L (L'w) = A w`` line by line.

|a_ij|^2 <= a_ii a_jj, in A and in every trailing matrix: weights that undo the diagonal undo the norms of all lines,
and nothing grows (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 10.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.arrays import Array, float_type, from_host, is_numpy, namespace, to_host
from abft_tsm2.checksum.bounds import (
    DEFINITE_COMPUTED,
    DEFINITE_LEAST,
    DEFINITE_USUAL,
    changed_bound,
    definite_bound,
    definite_element,
    rigorous_factored,
)
from abft_tsm2.checksum.encode import exponents, middle
from abft_tsm2.checksum.rigorous import definite_rounding
from abft_tsm2.checksum.weights import weights
from abft_tsm2.core.blas import (
    add_product,
    like_columns,
    multiply_triangle,
    product,
    subtract_square,
    symmetric_product,
)
from abft_tsm2.linalg.encode import add_sums, wide
from abft_tsm2.linalg.line_check import LineCheck, growth, norm
from abft_tsm2.linalg.outcome import Origin
from abft_tsm2.linalg.triangular import Triangle, modulus

BLOCK, NARROW = 256, 64  # columns that are read at a time; those that are widened
GROUPS, GROUP = 4, 4  # norms are taken of so many groups of lines that lie side by side
LARGEST = 4.0  # in units of the diagonal: larger norms are seen in a sample
MEDIAN = 0.675  # of the modulus of a standard normal number


@dataclass(eq=False)
class SymmetricChecksums:
    """What is kept of A (n x n, its lower triangle) before it is factored; all float64.

    Attributes
    ----------
    w, Z : (n,) arrays
        Weights, scaled by powers of two that undo the diagonal, and ``w'A``.
    copies : tuple of arrays
        The same once more: what differs from its copy has changed, and not A.
    roots : (n,) array
        ``sqrt(a_ii)``.
    norms : (n,) array
        ``||A_c o w||``, estimated.
    """

    w: Array
    Z: Array
    copies: tuple[Array, Array]
    roots: Array
    norms: Array

    @classmethod
    def of(cls, A: Array) -> SymmetricChecksums:
        """Encode A, whose rows or columns are contiguous: reads one triangle once."""
        xp = namespace(A)
        with np.errstate(all="ignore"):
            roots = xp.sqrt(xp.abs(wide(xp.linalg.diagonal(A))))
            w = weighting(roots)
            Z = symmetric_sums(A, w)
            # of the usual column: random signs make |Z_c| an estimate of its norm
            usual = to_host(xp.abs(Z) / roots)
            usual = usual[np.isfinite(usual)]
            floor = min(LARGEST, max(1.0, float(middle(usual)) / MEDIAN)) if usual.size else 1.0
            norms = roots * xp.maximum(_sampled(A, w, roots), floor)
            copies = xp.asarray(w, copy=True), xp.asarray(Z, copy=True)
            return cls(w, Z, copies, roots, xp.maximum(norms, xp.abs(Z)))

    def is_of_finite(self, A: Array) -> bool:
        """Whether the triangle of A holds neither NaN nor Inf; it is read only where Z is not finite."""
        xp = namespace(A)
        return bool(xp.all(xp.isfinite(self.Z))) or bool(xp.all(xp.isfinite(xp.tril(A))))


def _sampled(A: Array, w: Array, roots: Array) -> Array:
    """``||A_c o w|| / sqrt(a_cc)`` without the diagonal, from some groups of lines that lie side by side."""
    xp, n = namespace(A), A.shape[0]
    ends = range(n, 0, -max(GROUP, n // GROUPS))
    groups = [(max(0, end - GROUP), end) for end in ends]
    lines = np.concatenate([np.arange(*group) for group in groups])
    chosen = like_columns(w, (n, lines.size))
    at = 0
    for lo, hi in groups:
        part = chosen[:, at : at + hi - lo]
        part[:lo, :], part[hi:, :] = A[lo:hi, :lo].T, A[hi:, lo:hi]
        corner = xp.tril(wide(A[lo:hi, lo:hi]), k=-1)
        part[lo:hi, :] = corner + corner.T
        at += hi - lo
    chosen *= xp.take(w, from_host(lines, w))[None, :]
    chosen /= xp.where(roots > 0, roots, xp.ones_like(roots))[:, None]
    chosen *= chosen
    return xp.sqrt(xp.sum(chosen, axis=1) * (n / lines.size))


def weighting(roots: Array) -> Array:
    """Weights that undo a diagonal, of which these are the roots; always the same for the same ones.

    They are distinct, and a little noise keeps a few of them from adding up to nothing: else equal errors in some rows
    would not show.
    """
    scale = exponents(np.log2(to_host(roots)))
    return from_host(np.ldexp(base_weights(roots.shape[0]), -scale), roots)


def base_weights(n: int) -> NDArray[np.float64]:
    """The weights of a matrix whose diagonal is 1."""
    noise = weights("normal", n, seed=1) / (16 * max(1, n))
    return (weights("balanced", n, seed=0) + noise)[:, 0]


def symmetric_sums(A: Array, weight: Array) -> Array:
    """``A weight`` in float64, for the symmetric matrix of either type whose lower triangle A holds."""
    if not is_numpy(A) or A.dtype == weight.dtype:
        return symmetric_product(wide(A), weight)
    out = np.zeros(A.shape[0])
    for at in range(0, A.shape[0], NARROW):
        block = wide(A[at:, at : at + NARROW])
        b = block.shape[1]
        here, below = slice(at, at + b), slice(at + b, None)
        out[here] += symmetric_product(block[:b, :], weight[here])
        add_product(out[here], block[b:, :].T, weight[below], alpha=1.0)
        add_product(out[below], block[b:, :], weight[here], alpha=1.0)
    return out


class CholeskyChecksums:
    """The checksums beside the matrix W that becomes L in its lower triangle, all of them live.

    Attributes
    ----------
    A, W : (n, n) arrays
        Only the lower triangles are read.
    kept : SymmetricChecksums
    w, Z, g : (n,) arrays
        Weights, sums of the trailing matrix's columns, and ``w'L`` of the columns that are finished.
    seen, failed : list, tuple
        Residuals and bounds of the columns that agreed, step by step; those that failed the last check.
    """

    def __init__(self, A: Array, W: Array, kept: SymmetricChecksums) -> None:
        xp = namespace(A)
        self.xp, self.type, self.A, self.W, self.kept = xp, float_type(A), A, W, kept
        self.w, self.Z, self.g = kept.w, kept.Z, xp.zeros_like(kept.Z)
        self.modulus = float(xp.sum(xp.abs(kept.w)))
        self.seen: list[tuple[Array, Array]] = []
        self.failed: tuple[int, ...] = ()
        self.terms, self.shrunk = 0.0, 1.0

    def begin(self) -> None:
        """Z to be carried."""
        self.Z = self.xp.asarray(self.kept.Z, copy=True)

    # -- the check of a step, and what the step does --

    def check(self, j: int, j1: int, origin: Origin = Origin.COMPUTED) -> bool:
        """Whether the columns j:j1 are what they should be, ``L11 g = Z(j:j1)`` with ``g = w'L``; sets g(j:j1).

        Norms are estimated first; where that does not do, those of every trailing matrix are summed up. What was
        recomputed may round in a pattern, up to the rigorous bound.
        """
        again = origin is Origin.RECOMPUTED
        corner, self._below, n = wide(self.W[j:j1, j:j1]), self.W[j1:, j:j1], self.W.shape[0]
        g = multiply_triangle(corner.T, self.w[j:j1], lower=False)
        add_sums(g, self._below.T, self.w[j1:])
        residual = multiply_triangle(corner, g, lower=True) - self.Z[j:j1]
        norms, terms = self.kept.norms[j:j1], self.terms + self.shrunk * (j1 - j)
        bound = definite_bound(self.type, norms, terms, n, self.modulus)
        verdict = LineCheck.relative_to_median(residual, bound, DEFINITE_USUAL, DEFINITE_LEAST)
        if not verdict.clean:
            runs = [slice(0, j1 - j)] if again else verdict.suspected
            for run in runs:
                bound[run] = self._exact_bound(corner, g, j, run, again=again)
            if again:
                verdict = LineCheck.of(residual, bound)
            else:
                verdict = LineCheck.relative_in_runs(residual, bound, runs, DEFINITE_COMPUTED, DEFINITE_LEAST)
        verdict.ok[...] = verdict.ok & (self.xp.linalg.diagonal(corner) > 0)  # L L' does not tell a column's sign
        self.g[j:j1] = g
        if verdict.clean:
            self.seen.append((residual, verdict.bound))
        else:
            self.failed = tuple((j + np.flatnonzero(~to_host(verdict.ok))).tolist())
        return verdict.clean

    def _exact_bound(self, corner: Array, g: Array, j: int, run: slice, *, again: bool) -> Array:
        """The bound of some columns, counted from j, that exceed what is granted to all."""
        xp, j1, lines = self.xp, j + g.shape[0], slice(j + run.start, j + run.stop)
        last = (g * xp.linalg.diagonal(corner))[run]  # what is left of a column when all before it have been taken off
        size = xp.maximum(self.kept.norms[lines], xp.maximum(xp.abs(self.Z[lines]), xp.abs(last)))
        rows = xp.concat([wide(self.W[lines, :j]), xp.tril(corner[run, :], k=run.start)], axis=1)
        size = size + self._remaining_norms(rows * xp.concat([self.g[:j], g])[None, :], lines.start)
        bound = definite_bound(self.type, size, j1, self.W.shape[0], self.modulus)
        return bound + self._rigorous(rows) if again else bound

    def _remaining_norms(self, parts: Array, j: int) -> Array:
        """The root mean square of the sums that columns had in every trailing matrix, from their parts g_l L_cl."""
        xp = self.xp
        roots = self.kept.roots[j : j + parts.shape[0]]
        left = xp.cumulative_sum(xp.flip(parts / roots[:, None], axis=1), axis=1)
        return roots * xp.sqrt(xp.mean(left * left, axis=1))

    def _rigorous(self, rows: Array) -> Array:
        """gamma ``|w|'|L||L|'``, for some rows of L."""
        xp, n = self.xp, self.W.shape[0]
        sizes = Triangle(self.W.T, False, False).times(xp.abs(self.w), modulus)
        return rigorous_factored(self.type, 2 * n) * product(xp.abs(rows), sizes[: rows.shape[1]])

    def trailing_update(self, j: int, j1: int) -> None:
        """``A22 -= L21 L21'``."""
        subtract_square(self.W[j1:, j1:], self.W[j1:, j:j1])

    def advance(self, j: int, j1: int) -> None:
        """``Z(j1:) -= g L21'``, with the columns that were checked last."""
        add_sums(self.Z[j1:], self._below, self.g[j:j1], alpha=-1.0)
        self.terms += self.shrunk * (j1 - j)
        self.shrunk = min(1.0, growth(self.kept.norms[j1:], self.Z[j1:]))

    # -- what is finished --

    def read(self, count: int) -> tuple[Array, Array]:
        """``w'L`` of the first `count` columns as they are now, and L times that."""
        xp, W, w = self.xp, self.W, self.w
        now, back = (xp.zeros(size, dtype=xp.float64, device=W.device) for size in (count, W.shape[0]))
        width = max(1, count) if W.dtype == w.dtype else NARROW
        for at in range(0, count, width):
            stop = min(at + width, count)
            block = wide(W[at:, at:stop])
            corner, below = block[: stop - at, :], block[stop - at :, :]
            part = multiply_triangle(corner.T, w[at:stop], lower=False)
            add_product(part, below.T, w[stop:], alpha=1.0)
            back[at:stop] += multiply_triangle(corner, part, lower=True)
            add_product(back[stop:], below, part, alpha=1.0)
            now[at:stop] = part
        return now, back

    def changed(self, now: Array) -> list[int]:
        """Columns of L that are no longer what they were, or whose g is not.

        The norm that the bound needs is at least that of any part; columns that are flagged get theirs computed.
        """
        xp, (count, n) = self.xp, (now.shape[0], self.W.shape[0])
        diagonal = wide(xp.linalg.diagonal(self.W))[:count] * self.w[:count]
        size = xp.maximum(xp.abs(self.g[:count]), xp.abs(diagonal))
        verdict = LineCheck.of(now - self.g[:count], changed_bound(size, n))
        found = []
        for c in np.flatnonzero(~to_host(verdict.ok)).tolist():
            exact = changed_bound(norm(wide(self.W[c:, c]) * self.w[c:]), n)
            found.extend([c] * (not abs(float(verdict.residual[c])) <= exact < math.inf))
        return found

    def certificate(self, back: Array) -> LineCheck:
        """``L (L'w) = A w`` line by line, from `read`; lines that fail are compared element by element."""
        n, kept = self.W.shape[0], self.kept
        verdict = LineCheck.of(back - kept.Z, definite_bound(self.type, kept.norms, n, 2 * n, self.modulus))
        flagged = np.flatnonzero(~to_host(verdict.ok))
        for at in range(0, flagged.size, NARROW):
            lines = flagged[at : at + NARROW]
            fine = to_host(self._explained(lines))
            for line, ok in zip(lines.tolist(), fine.tolist(), strict=True):
                verdict.ok[line] = ok
        return verdict

    def _explained(self, lines: Any) -> Array:
        """Whether all elements of some columns of A - L L' are what rounding usually is, and no more than it may be:
        evidence does not compare them again."""
        xp, W, n = self.xp, self.W, self.W.shape[0]
        roots = xp.where(self.kept.roots > 0, self.kept.roots, xp.ones_like(self.kept.roots))
        exact = symmetric_columns(self.A, lines)
        scale = roots[:, None] * xp.take(roots, from_host(lines, W))[None, :]
        rows = xp.take(W, from_host(lines, W), axis=0)
        value, sizes, squares = (xp.zeros_like(exact) for _ in range(3))
        places = np.arange(n)
        for at in range(0, n, BLOCK):
            stop = min(at + BLOCK, n)
            keep = from_host(places[None, at:stop] <= lines[:, None], W)
            right = xp.where(keep, wide(rows[:, at:stop]), xp.asarray(0.0, dtype=exact.dtype)).T
            below = from_host(places[at:, None] >= places[None, at:stop], W)
            left = xp.where(below, wide(W[at:, at:stop]), xp.asarray(0.0, dtype=exact.dtype))
            value[at:, :] += product(left, right)
            sizes[at:, :] += product(xp.abs(left), xp.abs(right))
            left, right = left / roots[at:, None], right / xp.take(roots, from_host(lines, W))[None, :]
            squares[at:, :] += product(left * left, right * right)
        usual = definite_element(self.type, xp.abs(exact) + scale * xp.sqrt(squares), n)
        most = definite_rounding(self.type, np.minimum(places[:, None], np.asarray(lines)[None, :]) + 1)
        return xp.all(LineCheck.of(exact - value, xp.minimum(usual, from_host(most, W) * sizes)).ok, axis=0)


def symmetric_columns(A: Array, columns: Any, first: int = 0) -> Array:
    """Some columns, in ascending order, of the symmetric matrix whose lower triangle A holds, in float64, from row
    `first` on."""
    xp, columns = namespace(A), np.asarray(columns)
    lo, hi = int(columns[0]), int(columns[-1]) + 1
    if hi - lo == columns.size:  # NumPy's take may copy all of A first
        below, beside = A[first:, lo:hi], A[lo:hi, first:]
    else:
        which = from_host(columns, A)
        below, beside = xp.take(A[first:, :], which, axis=1), xp.take(A[:, first:], which, axis=0)
    lower = from_host(np.arange(first, A.shape[0])[:, None] >= columns[None, :], A)
    return xp.where(lower, wide(below), wide(beside).T)
