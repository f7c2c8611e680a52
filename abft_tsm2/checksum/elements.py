"""Sums of the terms of single elements, whatever the range of the terms: each element has an exponent of its own.

Row p of R and column p of L are scaled so that both are of one size, then lines of L and columns of R to at most 1: so
blocks of elements are products of matrices. An element of which that leaves too little, because its own terms are small
beside others of its line and of its column, is summed by itself, with the exponents of its terms apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, from_host, in_float64, namespace, to_host
from abft_tsm2.checksum.sides import Floats, Integers, Mask, Side, exponents_above, largest_logs, scaled
from abft_tsm2.core.row_sums import rows_per_block, take_rows, widened

_LEAST = 2.0**-400  # sums of moduli: the squares of their terms, and what underflows beside them, are far from the end
_TERMS = 1 << 20  # terms held at a time of elements that are summed by themselves
_TILE_BYTES = 4 << 20  # of one of the temporaries
NOTHING = -20000  # the exponent of an element without terms


class ElementSums(NamedTuple):
    """Sums over the terms of elements, (lines, n), in units of 2^exponent: themselves, of moduli, of squares."""

    exact: Floats
    moduli: Floats
    squares: Floats
    exponent: Integers


@dataclass(frozen=True, eq=False)
class Balance:
    """The powers of two for elements of some lines: L(i, p) 2^-inner_p and R(p, j) 2^(inner_p - column_j).

    Attributes
    ----------
    inner, column : integer arrays (k,), (n,)
    terms : boolean array (k,)
        False where the column of L or the row of R is 0: whatever the size of the other, it counts for nothing.
    usable : boolean array (n,)
        Columns that are computed.
    """

    inner: Integers
    column: Integers
    terms: Mask
    usable: Mask

    @classmethod
    def of(cls, lines: Side, at: Integers, usable: Mask) -> Balance:
        """For these lines: one read of them, and two of R."""
        k = lines.R.shape[0]
        left = np.full(k, -np.inf)
        for part in np.array_split(at, -(-at.size // rows_per_block(k))) if at.size else ():
            left = np.maximum(left, largest_logs(take_rows(lines.L, part).T, 0.0, np.ones(part.size, np.bool_)))
        right = largest_logs(lines.R, 0.0, usable)
        terms = np.isfinite(left) & np.isfinite(right)
        with np.errstate(invalid="ignore"):
            inner = np.where(terms, np.rint((left - right) / 2), 0.0).astype(np.int64)
        return cls(inner, exponents_above(largest_logs(lines.R.T, inner, terms)), terms, usable)


def element_sums(lines: Side, balance: Balance, at: Integers) -> ElementSums:
    """Sum the terms of all elements of the lines `at`."""
    k, n = lines.R.shape
    rows, xp = take_rows(lines.L, at), namespace(lines.L)
    scale = exponents_above(largest_logs(rows, -balance.inner, balance.terms))
    left = scaled(in_float64(rows), scale, balance.inner, balance.terms)
    exact, moduli, squares = (np.zeros((at.size, n)) for _ in range(3))
    for part in _parts(k, n):
        right = scaled(widened(lines.R, part.start, part.stop), -balance.inner[part], balance.column, balance.usable)
        if not balance.terms[part].all():
            right = xp.where(from_host(balance.terms[part][:, None], right), right, xp.zeros_like(right))
        mine = left[:, part]
        exact += to_host(mine @ right)
        moduli += to_host(xp.abs(mine) @ xp.abs(right))
        squares += to_host((mine * mine) @ (right * right))
    sums = ElementSums(exact, moduli, squares, scale[:, None] + balance.column[None, :])
    alone = ~(moduli >= _LEAST) & np.isfinite(moduli) & balance.usable[None, :]
    if alone.any():
        alone &= _have_terms(lines, rows, balance.terms)
        _sum_alone(lines, rows, balance.terms, alone, sums)
    return sums


def _parts(k: int, n: int) -> list[slice]:
    step = rows_per_block(n, _TILE_BYTES)
    return [slice(lo, min(k, lo + step)) for lo in range(0, k, step)]


def _have_terms(lines: Side, rows: Array, terms: Mask) -> Mask:
    """Which elements have a term that is not 0."""
    xp, (k, n) = namespace(lines.L), lines.R.shape
    count = np.zeros((rows.shape[0], n))
    present = (rows != 0) & from_host(terms[None, :], rows)
    for part in _parts(k, n):
        count += to_host(xp.astype(present[:, part], xp.float32) @ xp.astype(lines.R[part, :] != 0, xp.float32))
    return np.asarray(count > 0)


def _sum_alone(lines: Side, rows: Array, terms: Mask, alone: Mask, sums: ElementSums) -> None:
    """Sum these elements each by itself, in units of its largest term."""
    k = lines.R.shape[0]
    for i in np.flatnonzero(alone.any(axis=1)).tolist():
        used = terms & (to_host(rows[i, :]) != 0)
        x, of_x = np.frexp(to_host(in_float64(rows[i : i + 1, :]))[0][used])
        columns = np.flatnonzero(alone[i])
        for part in _few(columns, k):
            taken = to_host(in_float64(namespace(lines.R).take(lines.R, from_host(part, lines.R), axis=1)))[used]
            y, of_y = np.frexp(taken)
            exponent = np.where(y != 0, of_x[:, None] + of_y, NOTHING)
            most = exponent.max(axis=0, initial=NOTHING)
            products = np.ldexp(x[:, None] * y, exponent - most[None, :])
            sums.exact[i, part], sums.moduli[i, part] = products.sum(axis=0), np.abs(products).sum(axis=0)
            sums.squares[i, part] = (products * products).sum(axis=0)
            sums.exponent[i, part] = most


def _few(columns: Integers, k: int) -> Iterator[Integers]:
    step = max(1, _TERMS // max(1, k))
    for lo in range(0, columns.size, step):
        yield columns[lo : lo + step]
