"""View a product along the lines that one side checks, and rescale it exactly.

Rows of C are checked with ``C v = A (B v)``; its columns are the rows of ``C^T = B^T A^T``. So everything behind
the encoding knows one case only: *lines* of C (m of them, n long) ``= alpha L R + beta C0``, with L (m x k) and
R (k x n) and all of them views.

What fails its check is verified rescaled, in a domain where nothing overflows or underflows: each line i is divided by
``2^E_i`` and each position j by ``2^e_j``, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.arrays import Array, from_host, namespace, to_host
from abft_tsm2.checksum.bounds import Arithmetic
from abft_tsm2.checksum.encode import exponents, log2_column_norms
from abft_tsm2.core.row_sums import rows_per_block, widened

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

FAR = 1000  # exponents: scaling by less than that, half by half, keeps what is in the range in it on the way
MOST = 2200  # exponents: scaling by more makes of every number zero or infinity


class Side(NamedTuple):
    """``C = alpha L R + beta C0``, line by line.

    Attributes
    ----------
    side : str
        "rows" or "columns": what a line is in the user's C.
    L, R, C, C0 : arrays (m, k), (k, n), (m, n), (m, n) or None
        Views of the user's arrays; C0 is None where beta is 0.
    again : callable
        ``again()`` multiplies once more, as C was computed and into the same layout; (m, n).
    terms : int
        Roundings in one element: k, and those of alpha and beta.
    partial : bool
        Whether checksums may be summed from float32 parts: their rounding is below that of the product.

    On NumPy it may also be a stack of small products, each array with the same axes in front, or none where it is the
    same for all: so far as `predict`, `recompute_checksum` and `first_verdict` go.
    """

    side: str
    L: Array
    R: Array
    C: Array
    C0: Array | None
    alpha: float
    beta: float
    arithmetic: Arithmetic
    again: Callable[[], Array]
    terms: int
    partial: bool

    def across(self) -> Side:
        """The same product seen along its other side."""

        def unavailable() -> Array:
            raise AssertionError("lines seen across are not multiplied again")

        side = "columns" if self.side == "rows" else "rows"
        C0 = None if self.C0 is None else self.C0.T
        return self._replace(side=side, L=self.R.T, R=self.L.T, C=self.C.T, C0=C0, again=unavailable)


@dataclass(frozen=True, eq=False)
class Scale:
    """Exact powers of two, and which numbers are finite.

    Attributes
    ----------
    left, right : integer arrays (m,), (n,)
        L(i, :) is scaled by ``2^-left_i``, R(:, j) by ``2^-right_j``.
    line, column : integer arrays (m,), (n,)
        C(i, j) is scaled by ``2^-(line_i + column_j)``; they differ from left and right where alpha or beta C0 is
        what makes C large.
    usable_line, usable_column : boolean arrays (m,), (n,)
        False where L's row (or C0's) or R's column holds NaN or Inf.
    """

    left: Integers
    right: Integers
    line: Integers
    column: Integers
    usable_line: Mask
    usable_column: Mask

    def across(self) -> Scale:
        """The scale of ``Side.across``."""
        return Scale(self.right, self.left, self.column, self.line, self.usable_column, self.usable_line)

    def gain(self, alpha: float, rows: Any, columns: Any) -> Floats:
        """What multiplies the scaled product at these places: ``alpha 2^(left + right - line - column)``."""
        by_row = (self.left - self.line)[rows]
        by_column = (self.right - self.column)[columns]
        return np.asarray(np.ldexp(alpha, by_row[:, None] + by_column[None, :]))


def power_of_two(exponent: Any, like: Array) -> tuple[Array, Array]:
    """``2^exponent`` as two factors, each in range where their product is not."""
    exponent = np.asarray(exponent)
    half = exponent // 2
    return (
        from_host(np.ldexp(np.ones(exponent.shape), half), like),
        from_host(np.ldexp(np.ones(exponent.shape), exponent - half), like),
    )


def scaled(block: Array, by_row: Integers, by_column: Integers, keep: Mask | None = None) -> Array:
    """``block(i, j) 2^-(by_row_i + by_column_j)``, with 0 in the columns that are not to be kept."""
    if np.abs(by_row).max(initial=0) + np.abs(by_column).max(initial=0) <= FAR:
        a, b = power_of_two(-by_row[:, None], block)
        c, d = power_of_two(-by_column[None, :], block)
        block = block * c * a * d * b
    else:  # by thirds of the sum: no partial product leaves the range when the result is in it
        total = np.clip(by_row[:, None] + by_column[None, :], -MOST, MOST)
        third = total // 3
        for part in (third, third, total - 2 * third):
            block = block * from_host(np.ldexp(1.0, -part), block)
    if keep is not None and not keep.all():
        xp = namespace(block)
        block = xp.where(from_host(keep[None, :], block), block, xp.zeros_like(block))
    return block


def finite_lines(X: Array) -> Mask:
    """Which rows of X hold finite numbers only."""
    xp = namespace(X)
    rows = rows_per_block(X.shape[1])
    parts = [
        to_host(xp.all(xp.isfinite(widened(X, at, min(X.shape[0], at + rows))), axis=1))
        for at in range(0, X.shape[0], rows)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.bool_)


def _log2(x: float) -> float:
    return float(np.log2(abs(x))) if x else -np.inf


def scale_of(lines: Side) -> Scale:
    """Choose the powers of two from one read of all operands. Synchronises with the host."""
    left_norm, right_norm = log2_column_norms(lines.L.T), log2_column_norms(lines.R)
    left, right = exponents(left_norm), exponents(right_norm)
    usable_line, usable_column = finite_lines(lines.L), finite_lines(lines.R.T)
    with np.errstate(invalid="ignore"):
        size = left + _log2(lines.alpha)
    largest = np.full(left.shape, -np.inf)
    if lines.C0 is not None:
        usable_line = usable_line & finite_lines(lines.C0)
        rows = rows_per_block(lines.C0.shape[1])
        xp = namespace(lines.C0)
        for at in range(0, left.size, rows):  # log2 |C0(i, j)| - e_j, the largest of each line
            block = to_host(xp.abs(widened(lines.C0, at, min(left.size, at + rows))))
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.where(np.isfinite(block), np.log2(block), -np.inf) - right
            largest[at : at + rows] = logs.max(axis=1, initial=-np.inf)
        largest += _log2(lines.beta)
    size = np.where(np.isneginf(left_norm) & ~np.isfinite(largest), -np.inf, np.maximum(size, largest))
    # A line that must be 0 is not scaled down: the smallest number in it is wrong.
    line = np.where(np.isfinite(size), size, -right.max(initial=0))
    line = np.clip(np.rint(line), -2000, 2040).astype(np.int64)
    return Scale(left, right, line, right, usable_line, usable_column)
