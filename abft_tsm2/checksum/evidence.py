"""Measure the errors of single lines and elements against an accurate product, and bound what rounding may leave.

The bounds that raise suspicions are statistical; a line that exceeds one may be right, where its roundings have one
direction (long sums of equal terms). What decides then is the line's own error, against what honest arithmetic was
measured to leave, or, for the products of other libraries, against what a sum from the first term to the last, or from
the last to the first, may leave at most.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, float_type, from_host, namespace, to_host
from abft_tsm2.checksum.rigorous import sequential_bound
from abft_tsm2.checksum.sides import Floats, Integers, Scale, Side
from abft_tsm2.core.accurate import residual
from abft_tsm2.core.row_sums import rows_per_block, take_rows

_TERMS = 1 << 22  # products of elements held at a time
_SCALED_BYTES = 2 << 20  # of one of the temporaries of columns that are scaled


def line_errors(lines: Side, scale: Scale, at: Integers, X: Array, columns: Integers | None = None) -> Floats:
    """Measure the errors of lines of a product, against ``alpha L R + beta C0``; scaled, on the host.

    Parameters
    ----------
    at : integer array
        Which lines these are.
    X : (lines, n) or (lines, columns) array
        Those lines of the product, or some columns of them. What cannot be checked is 0 in the result.
    columns : integer array, optional
        By default all.
    """
    columns = np.arange(lines.R.shape[1]) if columns is None else columns
    step = rows_per_block(lines.R.shape[0], _SCALED_BYTES)
    if columns.size > step:  # as many as may be scaled at once
        parts = [slice(lo, min(columns.size, lo + step)) for lo in range(0, columns.size, step)]
        every = [line_errors(lines, scale, at, X[:, part], columns[part]) for part in parts]
        return np.concatenate(every, axis=1)
    with np.errstate(all="ignore"):
        left = scale.left_lines(take_rows(lines.L, at), at) * from_host(scale.gain(lines.alpha, at), lines.L)
        right = scale.right_rows(_columns(lines.R, columns), slice(None), columns)
        # Products of narrower elements are exact in float64, but for an alpha, which rounds less than their sum.
        narrow = float_type(lines.R).bits < 64
        off = residual(scale.result_lines(X, at, columns), left, right, narrow=narrow)
        if lines.C0 is not None:
            off = off - scale.added_lines(lines.beta, _columns(take_rows(lines.C0, at), columns), at, columns)
    return np.where(scale.usable_column[columns][None, :], to_host(off), 0.0)


def _columns(X: Array, columns: Integers) -> Array:
    return X if columns.size == X.shape[1] else namespace(X).take(X, from_host(columns, X), axis=1)


def summed_in_order(lines: Side, line: int, columns: Integers) -> Array:
    """Sum the terms of elements of a line from the first to the last: (1, columns), on the device of C.

    No honest order of summation rounds much worse where all roundings have one direction.
    """
    kind = np.dtype(lines.arithmetic.accumulator.name)
    at = np.asarray([line])

    def host(X: Array) -> Any:
        return to_host(namespace(X).astype(X, getattr(namespace(X), kind.name)))

    with np.errstate(all="ignore"):
        terms = host(take_rows(lines.L, at))[0][:, None] * host(_columns(lines.R, columns))
        total = np.add.accumulate(terms, axis=0)[-1:] if len(terms) else np.zeros((1, columns.size), kind)
        total = kind.type(lines.alpha) * total
        if lines.C0 is not None:
            total = total + kind.type(lines.beta) * host(_columns(take_rows(lines.C0, at), columns))
    return from_host(total, lines.C)


def sequential_errors(lines: Side, scale: Scale, line: int, columns: Integers) -> Floats:
    """Bound the errors of elements of a line that were summed in order, from either end; scaled.

    The partial sums ``S_l = sum_{p <= l} l_ip r_pj`` are what a running error bound is made of.
    """
    k, at = lines.R.shape[0], np.asarray([line])
    out = np.empty(columns.size)
    step = max(1, _TERMS // max(k, 1))
    with np.errstate(all="ignore"):
        left = to_host(scale.left_lines(take_rows(lines.L, at), at))[0] * float(scale.gain(lines.alpha, at)[0, 0])
        added = np.zeros(columns.size)
        if lines.C0 is not None:
            base = _columns(take_rows(lines.C0, at), columns)
            added = np.abs(to_host(scale.added_lines(lines.beta, base, at, columns))[0])
        underflow = lines.arithmetic.underflow(lines.terms, lines.alpha)
        for lo in range(0, columns.size, step):
            part = columns[lo : lo + step]
            terms = left[:, None] * to_host(scale.right_rows(_columns(lines.R, part), slice(None), part))
            sums = np.cumsum(terms, axis=0)
            total = sums[-1] if k else np.zeros(part.size)
            forward = np.abs(sums).sum(axis=0)
            backward = np.abs(total[None, :] - sums + terms).sum(axis=0)
            out[lo : lo + step] = sequential_bound(
                lines.arithmetic,
                partial_sums=np.maximum(forward, backward),
                products=np.abs(terms).sum(axis=0),
                result=np.abs(total),
                added=added[lo : lo + step],
                underflow=np.ldexp(underflow, -(scale.line[line] + scale.column[part])),
            )
    return out


def weighted_norms(X: Any, V: Floats) -> Floats:
    """``||X_i o v||_2`` for each line and weight column: (lines, r)."""
    with np.errstate(all="ignore"):
        return np.asarray(np.sqrt((X * X) @ (V * V)))
