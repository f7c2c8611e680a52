"""Dismiss a suspicion where a second product has the same bits, and the worst lines hold element by element.

Equal terms round in one direction, so that clean products of constant data exceed bounds that count with random
directions. A second product of the same operands by the same call tells such a pattern from a fault that has passed; an
accurate product of the worst lines, compared element by element with the rigorous bound, from one that has not. A fault
that both products have alike may be within that bound: then its element stands out among its line, or its line among
others, and nothing is dismissed here.

Only for matrices in the middle of their range, where nothing has to be rescaled: `abft_tsm2.checksum.correct` decides
about all others, and about all that this does not dismiss.
"""

from __future__ import annotations

import numpy as np

from abft_tsm2.arrays import Array, in_float64, namespace, to_host
from abft_tsm2.checksum.bounds import OUTLIER, STANDS_OUT, element_noise, rigorous_factor
from abft_tsm2.checksum.sides import Integers, Side
from abft_tsm2.core.row_sums import rows_per_block, take_rows

_WORST = 8  # lines that are compared element by element, and others beside them
_USUAL = 0.9  # of the elements of a line
_MODERATE = 2.0**-300, 2.0**300  # largest elements of operands and of C; products of two stay far from both ends


def second_product(lines: Side, suspects: Integers) -> Array | None:
    """A second product where the worst of the suspects are within rounding of an accurate one; else None.

    Where it has the bits of C, and the operands are what was encoded, the suspicion is dismissed. Synchronises with the
    host.

    Parameters
    ----------
    suspects : integer array
        Lines whose residuals exceed their bounds, the worst first.
    """
    if not all(map(_is_moderate, (lines.L, lines.R, lines.C))) or lines.C0 is not None:
        return None
    return lines.again() if _hold(lines, suspects[:_WORST]) else None


def _is_moderate(X: Array) -> bool:
    """Whether all elements are finite, and the largest is in the middle of the range of float64."""
    xp = namespace(X)
    if 0 in X.shape:
        return False
    high, low = (abs(float(xp.astype(ends(X), xp.float64))) for ends in (xp.max, xp.min))
    largest = np.maximum(high, low)  # NaN where one is, of which no comparison is true
    return bool((largest == 0) | ((largest > _MODERATE[0]) & (largest < _MODERATE[1])))


def _hold(lines: Side, at: Integers) -> bool:
    """Whether elements of these lines are within the rigorous bound of `bounds.rigorous_factor`, as
    ``|c - exact| <= gamma (|L||R|) (1 + u_out) + u_out |exact| + underflow``, and none of them, and none of the lines
    among some others, is much further off than the rest."""
    a, xp, (m, n) = lines.arithmetic, namespace(lines.L), lines.C.shape
    sample = np.concatenate([at, np.arange(0, m, -(-m // _WORST))])
    left, found = (in_float64(take_rows(X, sample)) for X in (lines.L, lines.C))
    step = rows_per_block(lines.R.shape[0])
    distance = np.empty((sample.size, n))
    with np.errstate(all="ignore"):
        for lo in range(0, n, step):
            part = slice(lo, min(n, lo + step))
            right = in_float64(lines.R[:, part])
            exact = lines.alpha * to_host(left @ right)
            total = abs(lines.alpha) * to_host(xp.abs(left) @ xp.abs(right))
            size = abs(lines.alpha) * np.sqrt(to_host((left * left) @ (right * right)))
            rounded = a.u_out * np.abs(exact) + a.underflow(lines.terms, lines.alpha)
            bound = rigorous_factor(a, lines.terms) * (1 + a.u_out) * total + rounded
            error = np.abs(to_host(found[:, part]) - exact)
            if not ((error <= bound) & np.isfinite(bound))[: at.size].all():
                return False
            distance[:, part] = np.divide(error, element_noise(a, lines.terms) * size + rounded)
    usual = np.quantile(distance, _USUAL, axis=1, method="lower")
    among = max(1.0, float(np.median(usual[at.size :])))
    stands_out = distance > OUTLIER * np.maximum(1.0, usual)[:, None]
    return not stands_out[: at.size].any() and bool((usual[: at.size] <= STANDS_OUT * among).all())


def are_equal(X: Array, Y: Array) -> bool:
    """Whether two matrices of finite numbers are equal, in blocks."""
    rows, xp = rows_per_block(X.shape[1]), namespace(X)
    parts = (slice(at, min(X.shape[0], at + rows)) for at in range(0, X.shape[0], rows))
    return all(bool(xp.all(X[part, :] == Y[part, :])) for part in parts)
