"""Decide by evidence, element by element, whether factors that a statistical bound suspects are right.

P A - L U, A - L L' and b - A x are computed with an error far below rounding (`abft_tsm2.core.accurate`) and compared
with what rounding may do, whatever its pattern (`abft_tsm2.checksum.rigorous`). Structured matrices correlate
their rounding errors, and exceed bounds that take them for a random walk; they are right all the same. A wrong small
pivot hides in ``gamma |L| |U|``, because its column of L is huge: so multipliers above 1 are evidence as well.

It costs seven to ten times the factorisation (4200 columns, two cores), and is paid for suspicions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, float_type, from_host, is_numpy, namespace, to_host
from abft_tsm2.checksum.rigorous import (
    definite_rounding,
    factored_rounding,
    flushed,
    largest_multiplier,
    skipped_pivots,
    smallest_pivot,
    underflow,
)
from abft_tsm2.core.accurate import Difference, Measured, lines_at_once, parts
from abft_tsm2.core.blas import permutation
from abft_tsm2.core.row_sums import take_rows
from abft_tsm2.linalg.encode import wide
from abft_tsm2.linalg.line_check import runs

Lines = tuple[Any, Any]  # masks of rows, in the order of P A, and of columns; on the host
APART = 32  # lines between two that are compared with them: each call splits all of the other factor


@dataclass
class Evidence:
    """What the evidence says of a part of a factorisation.

    Attributes
    ----------
    rows, columns : set of int
        Of the elements that are wrong, rows in the order of P A.
    count, magnitude : int, float
        How many they are, and by how much they are off at most.
    subnormal : int, float or None
        The first pivot that was too small for LAPACK to divide by, where that explains all that is wrong: its column
        and its value.
    """

    rows: set[int] = field(default_factory=set)
    columns: set[int] = field(default_factory=set)
    count: int = 0
    magnitude: float = 0.0
    subnormal: tuple[int, float] | None = None

    @property
    def right(self) -> bool:
        return not self.count

    def add(self, wrong: Any, distance: Any, first: tuple[int, int]) -> None:
        """Wrong elements of a block, the corner of which is at `first`."""
        i, c = np.nonzero(wrong)
        self.rows.update((i + first[0]).tolist())
        self.columns.update((c + first[1]).tolist())
        self.count += i.size
        self.magnitude = float(np.max(distance[i, c], initial=self.magnitude))


class FactorEvidence:
    """Compares P A with L U, in parts of a factorisation under way or done.

    Parameters
    ----------
    A, W : (m, n) arrays
        W holds L \\\\ U.
    pivots : int32 array on the host
        Of the columns that are finished; valid exchanges.
    """

    def __init__(self, A: Array, W: Array, pivots: Any) -> None:
        self.A, self.W, self.type = A, W, float_type(A)
        self.place = permutation(pivots, A.shape[0])
        self.found = Evidence()
        self.pivots, self._explained = pivots, False

    def compare(self, rows: slice, columns: slice, depth: int) -> None:
        """Compare ``(PA)(rows, columns)`` with ``L(rows, :depth) U(:depth, columns)``, which have no more terms."""
        W, (first, across) = self.W, (rows.start, columns.start)
        # L and U have zeros beyond; elements of theirs that only meet those must not set the scale of a line
        shape = rows.stop - first, min(depth, rows.stop, columns.stop), columns.stop - across
        if 0 in shape:
            return
        self._skipped(depth)

        def left(i: slice, p: slice) -> Array:
            return unit_lower(wide(W[first + i.start : first + i.stop, p]), first + i.start - p.start)

        def right(p: slice, j: slice) -> Array:
            block, above = W[p, across + j.start : across + j.stop], p.start - across - j.start
            return block if p.stop - 1 <= across + j.start else namespace(W).triu(block, k=above)

        difference = Difference(left, right, shape, W)
        for i, j in difference.blocks():
            at, here = slice(first + i.start, first + i.stop), slice(across + j.start, across + j.stop)
            terms = min(depth, at.stop, here.stop)
            X = wide(take_rows(self.A[:, here], self.place[at]))
            measured = difference.block(X, i, j, terms=terms, factor=factored_rounding(self.type, terms))
            lost = underflow(self.type, terms, self._divisors(here, depth)) + _of_operands(W[:terms, here])
            self._judge(measured, lost, (at.start, here.start))
        self._multipliers(rows, slice(across, min(columns.stop, depth)))

    def _divisors(self, columns: slice, depth: int) -> Any:
        """The pivots that these columns of L were divided by, at least 1."""
        own = np.abs(self._diagonal(depth)[columns])
        return np.concatenate([np.maximum(1.0, own), np.ones(columns.stop - columns.start - own.size)])

    def _diagonal(self, depth: int) -> Any:
        pivots = namespace(self.W).linalg.diagonal(self.W)[: min(depth, min(self.W.shape))]
        return to_host(pivots).astype(np.float64)

    def _skipped(self, depth: int) -> None:
        """Columns that LAPACK's getf2 has left as they were, because the reciprocal of their pivot may overflow: all of
        their multipliers are as small. OpenBLAS does not exchange the rows of L then, which the pivots name."""
        limit, pivots = smallest_pivot(self.type), self._diagonal(depth)
        self.skipped, named = [], set()
        for p in np.flatnonzero(np.abs(pivots) < limit).tolist():
            if 0.0 < float(namespace(self.W).max(abs(wide(self.W[p:, p])))) < limit:
                self.skipped.append(p)
        order = np.arange(self.W.shape[0])
        for p in range(min(depth, self.pivots.size)) if self.skipped else ():
            pair = [p, int(self.pivots[p])]
            order[pair] = order[pair[::-1]]
            if p in self.skipped:
                named.update(order[pair].tolist())
        self.exchanged = np.isin(self.place, list(named))
        self.smallest = (self.skipped[0], float(pivots[self.skipped[0]])) if self.skipped else None

    def _judge(self, measured: Measured, lost: Any, first: tuple[int, int]) -> None:
        wrong, distance = beyond(measured, lost, self.W)
        if self.skipped and wrong.any():
            m, n = wrong.shape
            columns = np.arange(first[1], first[1] + n)
            above = np.abs(np.stack([to_host(self.W[p, columns[0] : columns[0] + n]) for p in self.skipped]))
            above = np.where(np.array(self.skipped)[:, None] <= columns[None, :], above, 0.0).astype(np.float64)
            still, _ = beyond(measured, lost + skipped_pivots(self.type, above.sum(axis=0)), self.W)
            still &= ~(self.exchanged[first[0] : first[0] + m, None] & np.isfinite(distance))
            self._explained |= bool((wrong & ~still).any())
            wrong = still
        self.found.add(wrong, distance, first)

    def _multipliers(self, rows: slice, columns: slice) -> None:
        """|l| <= 1: else a pivot was not the largest element of its column."""
        limit, xp = largest_multiplier(self.type), namespace(self.W)
        for i in parts(rows.stop - rows.start):
            here = slice(rows.start + i.start, rows.start + i.stop)
            left = slice(columns.start, max(columns.start, min(columns.stop, here.stop)))
            block = xp.abs(xp.tril(self.W[here, left], k=here.start - columns.start - 1))
            if not bool(xp.all(block <= limit)):
                sizes = to_host(block)
                self.found.add(~(sizes <= limit), sizes, (here.start, columns.start))

    def verdict(self) -> Evidence:
        """The evidence of all parts that were compared."""
        if self._explained and self.found.right:
            self.found.subnormal = self.smallest
        return self.found


def may_be_undivided(W: Array) -> bool:
    """Whether LAPACK may have left columns of NumPy's as they were, for a pivot that is subnormal, or nearly so. Sums
    do not tell: what such matrices may lose to underflow is as large as they are."""
    if not is_numpy(W):
        return False
    pivots, limit = np.abs(W.diagonal()), smallest_pivot(float_type(W))
    return bool(np.minimum.reduce(pivots) < limit) and bool(((pivots > 0) & (pivots < limit)).any())


def factor_evidence(A: Array, W: Array, pivots: Any, lines: Lines | None = None) -> Evidence:
    """Compare a whole factorisation, packed L \\ U and pivots that are valid exchanges, with P A.

    `lines`: rows and columns in which no sums show what happens to elements; then those rows alone, or those columns,
    whichever are fewer.
    """
    evidence, (m, n) = FactorEvidence(A, W, pivots), W.shape
    parts = [(slice(0, m), slice(0, n))]
    if lines is not None:
        across = int(np.count_nonzero(lines[1]) * m <= np.count_nonzero(lines[0]) * n)
        parts = [(slice(0, m), run) if across else (run, slice(0, n)) for run in runs(lines[across], APART)]
    for rows, columns in parts:
        evidence.compare(rows, columns, min(m, n))
    return evidence.verdict()


def compare_sum(
    found: Evidence,
    X: Array,
    left: tuple[Array, Array],
    right: tuple[Array, Array],
    pivots: Any,
    first: tuple[int, int],
) -> None:
    """Compare X with ``L0 U0 + L1 U1``, whose corner lies at `first` of the factorisation, for what is `found`.

    `pivots`: those that columns were divided by; on the host.
    """
    (L0, L1), (U0, U1) = left, right
    xp, kind, j = namespace(X), float_type(X), L0.shape[1]
    terms = j + L1.shape[1]

    def joined(both: Sequence[Array], p: slice, axis: int) -> Array:
        of_both = slice(min(p.start, j), min(p.stop, j)), slice(max(p.start, j) - j, max(p.stop, j) - j)
        picked = [Y[:, at] if axis else Y[at, :] for Y, at in zip(both, of_both, strict=True) if at.stop > at.start]
        return wide(picked[0]) if len(picked) == 1 else xp.concat([wide(Y) for Y in picked], axis=axis)

    difference = Difference(
        lambda i, p: joined((L0[i, :], L1[i, :]), p, 1),
        lambda p, c: joined((U0[:, c], U1[:, c]), p, 0),
        (X.shape[0], terms, X.shape[1]),
        X,
        lines_at_once(X, terms),
    )
    for i, c in difference.blocks():
        measured = difference.block(wide(X[i, c]), i, c, terms=terms, factor=factored_rounding(kind, terms))
        lost = underflow(kind, terms, np.maximum(1.0, pivots[c])) + _of_operands(U0[:, c]) + _of_operands(U1[:, c])
        wrong, distance = beyond(measured, lost, X)
        found.add(wrong, distance, (first[0] + i.start, first[1] + c.start))


def definite_evidence(A: Array, W: Array, columns: slice) -> Evidence:
    """Compare A with L L' in some columns of the lower triangle, L in that of W, finished up to there."""
    xp, n, kind, found, depth = namespace(W), W.shape[0], float_type(A), Evidence(), columns.stop
    first = columns.start

    def left(i: slice, p: slice) -> Array:
        return _triangle(W, slice(first + i.start, first + i.stop), p)

    def right(p: slice, j: slice) -> Array:
        return xp.matrix_transpose(_triangle(W, slice(first + j.start, first + j.stop), p))

    difference = Difference(left, right, (n - first, depth, depth - first), W)
    diagonal = np.abs(to_host(xp.linalg.diagonal(W)[:depth]).astype(np.float64))
    zero = xp.asarray(0.0, dtype=xp.float64)
    for i, j in difference.blocks():
        rows, here = slice(first + i.start, first + i.stop), slice(first + j.start, first + j.stop)
        if rows.stop <= here.start:
            continue
        terms = min(here.stop, rows.stop)
        below = from_host(np.arange(rows.start, rows.stop)[:, None] >= np.arange(here.start, here.stop)[None, :], W)
        X = xp.where(below, wide(A[rows, here]), zero)
        measured = difference.block(X, i, j, terms=terms, factor=definite_rounding(kind, terms))
        measured = measured._replace(residual=xp.where(below, measured.residual, zero))
        lost = underflow(kind, terms, np.maximum(1.0, diagonal[here])) + np.max(
            _of_operands(left(i, slice(0, terms)).T)
        )
        wrong, distance = beyond(measured, lost, W)
        found.add(wrong & to_host(below), distance, (rows.start, here.start))
    signs = ~(to_host(xp.linalg.diagonal(W)[first:depth]) > 0)  # L L' does not tell a column's sign
    found.add(np.diag(signs), np.diag(diagonal[first:]), (first, first))
    return found


def beyond(measured: Measured, lost: Any, like: Array) -> tuple[Any, Any]:
    """Where a residual is more than rounding explains, and what underflow has `lost` in each column; and its size. On
    the host; all 0 where it is nowhere more."""
    xp = namespace(like)
    with np.errstate(all="ignore"):
        size, bound = xp.abs(measured.residual), measured.bound + from_host(lost, like)[None, :]
        ok = (size <= bound) & xp.isfinite(bound)
        if bool(xp.all(ok)):  # all that has to come to the host, mostly
            return np.zeros(size.shape, bool), np.zeros(size.shape)
        return ~to_host(ok), to_host(size)


def _of_operands(X: Array) -> Any:
    """What products of each column of X with numbers that are subnormal lose where these count as zero; on the host."""
    tiny = flushed(float_type(X))
    if not tiny:
        return np.zeros(X.shape[1])
    return tiny * to_host(namespace(X).sum(namespace(X).abs(wide(X)), axis=0))


def unit_lower(X: Array, above: int = 0) -> Array:
    """The unit lower triangle of X, below which there may be more rows; `above` rows of the square one are missing."""
    xp, (m, n) = namespace(X), X.shape
    if above >= n:
        return X
    return xp.tril(X, k=above - 1) + xp.eye(m, n, k=above, dtype=X.dtype, device=X.device)


def _triangle(W: Array, rows: slice, columns: slice) -> Array:
    """A block of the lower triangle of W."""
    block = W[rows, columns]
    return block if rows.start >= columns.stop - 1 else namespace(W).tril(block, k=rows.start - columns.start)
