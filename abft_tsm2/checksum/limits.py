"""The smallest changes of elements that a check is sure to find, from the whole norms behind the bounds of all lines.

A change d of element (i, j) moves the residual of line i by v_j d. It also enlarges ``||C_i o v||``, and with it the
bound, by no more than the bound's factors times ``|v_j d|``; and what follows in the sum u rounds otherwise, which its
own part of the bound covers (`recomputed_noise_factor`). So it is found where ``|v_j d| (1 - f - f_out)`` exceeds the
line's bound plus its clean residual plus that part. A verdict needs these norms of few lines; a report has them of all.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, namespace, to_host
from abft_tsm2.checksum.bounds import (
    bound_factors,
    largest_norm,
    lost_in_checksum,
    recomputed_noise_factor,
    statistical_bound,
)
from abft_tsm2.checksum.rescaled import verify_rescaled
from abft_tsm2.checksum.sides import Floats, Mask, Side
from abft_tsm2.core.row_sums import summed_squares
from abft_tsm2.report import Check, LineLimits

_LARGEST = 2.0**1000  # of squares: none of what is added to them overflows
_LOST = 2.0**-1000  # of a square, to underflow
_FAINT = 2.0**-40  # of a sum of squares, of no account in its root


class SideLimits(NamedTuple):
    """Bounds and limits of all lines of one side of a product, or of each of a stack, (...); host arrays.

    Attributes
    ----------
    bounds, ratios : (..., m) arrays
        Bounds by whole norms, and clean residuals in units of them.
    allowed : (..., m) array
        By how much a residual may change unseen.
    moduli : (..., n) array
        Of the weights.
    """

    bounds: Floats
    ratios: Floats
    allowed: Floats
    moduli: Floats

    def of(self, check: Check, at: Any = ()) -> Check:
        """The check of one of these products, with what was measured."""
        bounds, ratios, allowed, moduli = (x[at] if x.ndim > 1 else x for x in self)
        line = int(np.argmax(ratios))
        limits = LineLimits(check.side, allowed.tolist(), moduli.tolist())
        return check.with_limits(limits, float(np.median(bounds)), float(ratios[line]), line)


def measured(check: Check, lines: Side, V: Array, residual: Floats, excused: float = 0.0) -> Check:
    """The check with bounds, closest residual and limits of all lines, all of which were verified; else as it is.

    Parameters
    ----------
    check : Check
        As the verdict has left it.
    V, residual, excused
        As in `limits_of`.
    """
    if 0 in (*residual.shape, V.shape[0]) or check.verified < check.lines:
        return check
    return limits_of(lines, V, residual, excused).of(check)


@np.errstate(all="ignore")
def limits_of(lines: Side, V: Array, residual: Floats, excused: float = 0.0) -> SideLimits:
    """Measure the limits of a product, or of each of a stack of small ones: reads L, R and C once more.

    Parameters
    ----------
    V : (..., n, r) array
        The weights.
    residual : (..., m, r) array
        ``|u - alpha t - beta t0|``, of the same sums as the verdict's.
    excused : float
        A change of less than so many bounds of its line is taken for rounding.
    """
    tau, weights = _bounds_of_lines(lines, V), np.abs(to_host(V))
    n = weights.shape[-2]
    factors = bound_factors(lines.arithmetic, lines.terms, n, lines.alpha)
    noise = min(1.0, recomputed_noise_factor(n, partial=lines.partial) / factors.factor) * tau
    allowed = (max(1.0, excused) * tau + residual + noise) / (1 - factors.factor - factors.out_factor)
    known = np.isfinite(residual) & np.isfinite(tau)  # else an Inf that is right
    allowed, ratios = np.where(known, allowed, np.inf), np.where(known & (residual != 0), residual / tau, 0.0)
    ratios = np.where(ratios <= 1, ratios, 0.0)  # of others, evidence has found that they are right
    return SideLimits(tau.max(axis=-1), ratios.max(axis=-1), allowed.max(axis=-1), weights.max(axis=-1))


def _bounds_of_lines(lines: Side, V: Array) -> Floats:
    """The bounds by whole norms, (..., m, r); where squares leave the range, by what `verify_rescaled` has, of a stack
    none."""
    a, n, V2 = lines.arithmetic, V.shape[-2], V * V
    of_right = summed_squares(lines.R, V2, True)
    xp = namespace(of_right)
    both = to_host(summed_squares(lines.L, xp.concat((of_right, xp.ones_like(of_right[..., :1])), axis=-1), True))
    squares, of_left = [both[..., :-1]], both[..., -1:]  # of products; of L alone
    squares.append(to_host(summed_squares(lines.C, V2, True)))
    added = None
    if lines.C0 is not None:
        squares.append(to_host(summed_squares(lines.C0, V2, True)))
        added = abs(lines.beta) * np.sqrt(squares[2])
    known: Any = {"products": abs(lines.alpha) * np.sqrt(squares[0]), "added": added}
    total = np.abs(to_host(V)).sum(axis=-2, keepdims=True)
    lost = np.maximum(a.underflow(lines.terms, lines.alpha) * total, lost_in_checksum())
    known["underflow"] = lost if V.ndim > 2 else lost[0]
    largest = largest_norm(lines.terms, **known)
    tau: Floats = statistical_bound(np, a, lines.terms, n, stored=np.sqrt(squares[1]), largest=largest, **known)
    largest_of = functools.reduce(np.maximum, squares)
    # By how much they may be too small: each of the squares that are added up, of L, R, C and C0, by _LOST.
    of_weights = np.maximum(1.0, to_host(V2).sum(axis=-2, keepdims=True))
    lost_squares = _LOST * (of_weights * (1 + of_left) + to_host(of_right).sum(axis=-2, keepdims=True))
    fine = (largest_of < _LARGEST) & (lost_squares <= _FAINT * largest_of)
    if fine.all():
        return tau
    fine |= (largest_of == 0) & _holds_nothing(lines)[..., None]
    if lines.C.ndim > 2:
        return np.where(fine, tau, np.inf)
    return tau if fine.all() else np.maximum(verify_rescaled(lines, V).bounds, lost_in_checksum())


def _holds_nothing(lines: Side) -> Mask:
    """Which lines are 0 because every term of theirs has a factor of zeros: an element of L, or a row of R."""
    xp = namespace(lines.L)
    present = xp.any(lines.R != 0, axis=-1)
    terms = (lines.L != 0) & present[..., None, :]
    return ~np.asarray(to_host(xp.any(terms, axis=-1)), np.bool_)
