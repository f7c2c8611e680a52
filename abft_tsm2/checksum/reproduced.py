"""Dismiss a suspicion where a second product has the same bits, and the worst lines hold element by element.

Equal terms round in one direction, so that clean products of constant data exceed bounds that count with random
directions. A second product of the same operands by the same call tells such a pattern from a fault that has passed; an
accurate product of the worst lines, compared element by element with the rigorous bound, from one that has not. A fault
that both products have alike may be within that bound: then its element stands out among its line, or its line among
others, and nothing is dismissed here.

Only for products in the middle of their range, where nothing has to be rescaled: `abft_tsm2.checksum.correct` decides
about all others, and about all that this does not dismiss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, in_float64, is_column_major, is_numpy, namespace, to_host
from abft_tsm2.checksum.bounds import OUTLIER, STANDS_OUT, element_noise, rigorous_factor, usual_of
from abft_tsm2.checksum.sides import Floats, Integers, Side
from abft_tsm2.core.row_sums import rows_per_block, take_rows, workers

_WORST = 8  # lines that are compared element by element, and others beside them
_MODERATE = 2.0**-300, 2.0**300  # the largest sum of moduli; products of two stay far from both ends
_TILE_BYTES, _FAR_BYTES = 1 << 18, 64 << 20  # of a part of R on NumPy, where it stays in the cache, and on a GPU
# Lines that the kernels of a BLAS compute together, or a multiple, by the bytes of an element: which of them a line is
# decides how it is rounded.
_TOGETHER = {4: 24, 8: 8}


class Reproduced(NamedTuple):
    """What a second product tells of suspected lines.

    Attributes
    ----------
    same : bool
        The suspects have the same bits, and the worst of them are within rounding of an accurate product. Where the
        operands are what was encoded, the suspicion is dismissed.
    product : (m, n) array or None
        The second product, where all of it was computed.
    lines : int
        How many lines were multiplied.
    """

    same: bool
    product: Array | None
    lines: int


def reproduce(lines: Side, suspects: Integers) -> Reproduced:
    """Multiply once more where the worst of the suspects are within rounding of an accurate product: on NumPy the
    suspects alone, and all lines where these are rounded otherwise. Synchronises with the host.

    Parameters
    ----------
    suspects : integer array
        Lines whose residuals exceed their bounds, the worst first.
    """
    if lines.C0 is not None or not _hold(lines, suspects[:_WORST]):
        return Reproduced(False, None, 0)
    m, few = lines.C.shape[0], 0
    if is_numpy(lines.C) and lines.C.dtype.itemsize in _TOGETHER:
        at, places = _among_others(suspects, _TOGETHER[lines.C.dtype.itemsize])
        if 2 * at.size <= m:
            few = at.size
            if are_equal(take_rows(lines.C, at[places]), take_rows(lines.again(at), places)):
                return Reproduced(True, None, few)
    product = lines.again()
    return Reproduced(are_equal(lines.C, product), product, few + m)


def _among_others(suspects: Integers, together: int) -> tuple[Integers, Integers]:
    """Lines to be multiplied, and at which places among them the suspects are: at such as a kernel rounds alike, and as
    many for each core."""
    kind = suspects % together
    order = kind.argsort(kind="stable")
    kind = kind[order]
    turn = np.arange(kind.size) - kind.searchsorted(kind)  # which one of its kind
    places = together * turn + kind
    at = np.arange(together * max(workers(), int(turn.max(initial=0)) + 1))
    at[places] = suspects[order]
    return at, places


def _hold(lines: Side, at: Integers) -> bool:
    """Whether elements of these lines are within the rigorous bound of `bounds.rigorous_factor`, as
    ``|c - exact| <= gamma (|L||R|) (1 + u_out) + u_out |exact| + underflow``, and none of them, and none of the lines
    among some others, is much further off than the rest.

    ``|exact| <= |L||R|``, which takes a second read of R only where that does not decide."""
    a, xp, m, count = lines.arithmetic, namespace(lines.L), lines.C.shape[0], at.size
    sample = np.concatenate([at, np.arange(0, m, -(-m // _WORST))])
    left, found = (in_float64(take_rows(X, sample)) for X in (lines.L, lines.C))
    with np.errstate(all="ignore"):
        exact = lines.alpha * _times(left, lines.R, lambda X: X)
        error = np.abs(to_host(found) - exact)
        size = np.abs(exact)
        rounded = a.u_out * size + a.underflow(lines.terms, lines.alpha)
        held = error[:count] <= (rigorous_factor(a, lines.terms) * size + rounded)[:count]
        if not (_is_moderate(size[:count]) and held.all()):
            total = abs(lines.alpha) * _times(xp.abs(left[:count, :]), lines.R, xp.abs)
            bound = rigorous_factor(a, lines.terms) * (1 + a.u_out) * total + rounded[:count]
            moderate = _is_moderate(total) or not total.any()
            if not (moderate and ((error[:count] <= bound) & np.isfinite(bound)).all()):
                return False
        if _none_stands_out(error, count, 0.0):
            return True
        size = abs(lines.alpha) * np.sqrt(_times(left * left, lines.R, lambda X: X * X))
        return _none_stands_out(error / (element_noise(a, lines.terms) * size + rounded), count, 1.0)


def _none_stands_out(distance: Floats, count: int, least: float) -> bool:
    """Whether no element of the first lines is much further off than its line, and none of these lines than the rest,
    in a unit of which `least` is nothing."""
    usual = np.maximum(least, usual_of(distance))
    outlying = ~(distance[:count] <= OUTLIER * usual[:count])
    return not outlying.any() and bool((usual[:count] <= STANDS_OUT * np.median(usual[count:])).all())


def _is_moderate(sizes: Floats) -> bool:
    """Whether the largest of these is in the middle of the range of float64; not where one is NaN."""
    return bool(_MODERATE[0] < sizes.max(initial=0.0) < _MODERATE[1])


def _times(left: Array, R: Array, made: Callable[[Array], Array]) -> Floats:
    """``left f(R)`` in float64 on the host, with what is `made` of a part of R in the cache."""
    (k, n), columns, xp = R.shape, is_column_major(R), namespace(R)
    total = xp.zeros((left.shape[0], n), dtype=xp.float64, device=R.device)
    step = rows_per_block(k if columns else n, _TILE_BYTES if is_numpy(R) else _FAR_BYTES)
    length = n if columns else k
    for part in (slice(lo, min(lo + step, length)) for lo in range(0, length, step)):
        if columns:
            total[:, part] = left @ made(in_float64(R[:, part]))
        else:
            total += left[:, part] @ made(in_float64(R[part, :]))
    return to_host(total)


def are_equal(X: Array, Y: Array) -> bool:
    """Whether two matrices of finite numbers are equal, in blocks."""
    rows, xp = rows_per_block(X.shape[1], 8 << 20 if is_numpy(X) else _FAR_BYTES), namespace(X)
    parts = (slice(at, min(X.shape[0], at + rows)) for at in range(0, X.shape[0], rows))
    return all(bool(xp.all(X[part, :] == Y[part, :])) for part in parts)
