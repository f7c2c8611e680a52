"""View a product along the lines that one side checks, and rescale it exactly.

Rows of C are checked with ``C v = A (B v)``; its columns are the rows of ``C^T = B^T A^T``. So everything behind
the encoding knows one case only: *lines* of C (m of them, n long) ``= alpha L R + beta C0``, with L (m x k) and
R (k x n) and all of them views.

What fails its check is verified rescaled, in a domain where nothing overflows, and underflows only where it is nothing
beside the rest of its line: rows of R by their largest weighted element, lines of L by their largest term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.arrays import Array, from_host, in_float64, namespace, to_host
from abft_tsm2.checksum.bounds import Arithmetic
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
        ``again()`` multiplies once more, as C was computed and into the same layout; (m, n). On NumPy ``again(at)``
        multiplies these lines alone.
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
    again: Callable[..., Array]
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
    """Exact powers of two for a check of lines with weights v, and which numbers are finite.

    ::

        C(i, j) v_j 2^-line_i = (C(i, j) 2^-(line_i + column_j)) V_j,    V_j = v_j 2^column_j
        = alpha 2^(left_i - line_i) sum_p (L(i, p) 2^(inner_p - left_i)) (R(p, j) 2^-(inner_p + column_j)) V_j + ...

    No factor is larger than 1, and in each row of R, in each line of L one is at least 1/2: what underflows is
    2^-1074 times the largest term of its line.

    Attributes
    ----------
    left, inner, column : integer arrays (m,), (k,), (n,)
    line : integer array (m,)
        It differs from left where alpha, beta C0 or what underflow may take from C is what counts in a line.
    terms : boolean array (k,)
        False where R's row is 0: then L's column does not count, whatever its size.
    usable_line, usable_column : boolean arrays (m,), (n,)
        False where L's row (or C0's) or R's column holds NaN or Inf.
    """

    left: Integers
    inner: Integers
    column: Integers
    line: Integers
    terms: Mask
    usable_line: Mask
    usable_column: Mask

    def left_lines(self, X: Array, at: Any) -> Array:
        """These lines of L, scaled; in float64."""
        return scaled(in_float64(X), self.left[at], -self.inner, self.terms)

    def right_rows(self, X: Array, terms: Any, at: Any = slice(None)) -> Array:
        """These rows and columns of R, scaled; in float64."""
        return scaled(in_float64(X), self.inner[terms], self.column[at], self.usable_column[at])

    def result_lines(self, X: Array, lines: Any, at: Any = slice(None)) -> Array:
        """These lines and columns of C, scaled; in float64."""
        return scaled(in_float64(X), self.line[lines], self.column[at], self.usable_column[at])

    def added_lines(self, beta: float, X: Array, lines: Any, at: Any = slice(None)) -> Array:
        """These lines and columns of ``beta C0``, scaled; in float64."""
        size, exponent = np.frexp(beta)
        return float(size) * scaled(in_float64(X), self.line[lines] - exponent, self.column[at], self.usable_column[at])

    def gain(self, alpha: float, at: Any) -> Floats:
        """What multiplies scaled lines of L R: ``alpha 2^(left - line)``, (lines, 1)."""
        return np.asarray(np.ldexp(alpha, (self.left - self.line)[at][:, None]))


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


def largest_logs(X: Array, by_column: Any, keep: Mask) -> Floats:
    """The largest ``log2 |X(i, j)| + by_column_j`` of each row of X, over its finite elements in columns to be kept;
    -inf of nothing. One read of X."""
    xp, found, step = namespace(X), np.full(X.shape[0], -np.inf), rows_per_block(X.shape[1])
    if X.shape[1] == 0:
        return found
    shift = from_host(np.where(keep, by_column, -np.inf)[None, :], X)
    with np.errstate(all="ignore"):
        for at in range(0, X.shape[0], step):
            part = slice(at, min(X.shape[0], at + step))
            logs = xp.log2(xp.abs(widened(X, at, part.stop))) + shift
            logs = xp.where(logs < np.inf, logs, xp.full_like(logs, -np.inf))  # as NaN is not
            found[part] = to_host(xp.max(logs, axis=1))
    return found


def exponents_above(logs: Floats) -> Integers:
    """The exponents of powers of two above numbers of these logarithms; 0 for those that are 0."""
    return np.where(np.isfinite(logs), np.floor(np.where(np.isfinite(logs), logs, 0.0)) + 1, 0).astype(np.int64)


def lost_to_underflow(lines: Side, weights: Floats) -> tuple[Floats, int]:
    """``Arithmetic.underflow ||v||_1`` of each column of weights, as multiples of a power of two, and its exponent."""
    sizes, exponents = np.frexp(np.abs(weights))
    top = int(exponents.max(initial=-2000))
    lost, exponent = np.frexp(lines.arithmetic.underflow(lines.terms, lines.alpha))
    return lost * np.ldexp(sizes, exponents - top).sum(axis=0), top + int(exponent)


def scale_of(lines: Side, weights: Floats) -> Scale:
    """Choose the powers of two for these weights, (n, r); two reads of each operand. Synchronises with the host."""
    usable_line, usable_column = finite_lines(lines.L), finite_lines(lines.R.T)
    with np.errstate(all="ignore"):
        largest = np.abs(weights).max(axis=1, initial=0.0)
        column = np.where(np.isfinite(largest), -np.frexp(largest)[1], 0).astype(np.int64)
        of_rows = largest_logs(lines.R, -column, usable_column)
        inner, terms = exponents_above(of_rows), np.isfinite(of_rows)
        of_lines = largest_logs(lines.L, inner, terms)
        lost, exponent = lost_to_underflow(lines, weights)
        size = np.maximum(of_lines + np.log2(np.abs(lines.alpha)), exponent + np.log2(lost.max(initial=0.0)))
        if lines.C0 is not None:
            usable_line = usable_line & finite_lines(lines.C0)
            size = np.fmax(size, largest_logs(lines.C0, -column, usable_column) + np.log2(np.abs(lines.beta)))
    line = exponents_above(size)
    left = np.where(
        np.isfinite(of_lines), exponents_above(of_lines), line
    )  # of a line of zeros, which nothing may enlarge
    return Scale(left, inner, column, line, terms, usable_line, usable_column)
