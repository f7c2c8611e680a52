"""Find elements whose errors stand out although a product and its repetition have them alike.

Two products of one call have the same bits where nothing went wrong, and where the same went wrong twice, as it does on
a broken processor. An element beyond the rigorous bound is wrong. One within it, whose error stands out among its line,
or in a line that stands out among others, is compared with what rounding leaves where its terms are added otherwise: in
order, and in the opposite order, by the library, at another place of the product. What still stands out may be a fault,
or what another order of additions makes of such terms: nobody is alarmed, and the element is computed again.
"""

from __future__ import annotations

import numpy as np

from abft_tsm2.arrays import Array, from_host, namespace
from abft_tsm2.checksum.bounds import OUTLIER, STANDS_OUT, usual_of
from abft_tsm2.checksum.evidence import line_errors, summed_in_order, weighted_norms
from abft_tsm2.checksum.sides import Floats, Integers, Mask, Scale, Side
from abft_tsm2.core.matmul import multiply, same_layout
from abft_tsm2.core.row_sums import take_rows

_EXAMINED = 8  # lines, and controls


def outlying_from(size: Floats, tau: Floats) -> Floats:
    """From what on an element stands out among its line: (lines, 1).

    Parameters
    ----------
    size : (lines, n) array
        Moduli of what the elements add to a residual.
    tau : (lines, r) array
    """
    return np.asarray(np.maximum(OUTLIER * usual_of(size), tau.min(axis=1, keepdims=True) / OUTLIER))


def standing_out(
    lines: Side, scale: Scale, suspects: Integers, controls: Integers, V: Floats, tau: Floats
) -> dict[int, Mask]:
    """Of the worst suspects that came back bit for bit, the elements whose errors no other order of additions explains.

    Parameters
    ----------
    suspects : integer array
        Finite lines, the worst first.
    controls : integer array
        Lines that were not suspected.
    V, tau : (n, r), (m, r) arrays
        Scaled weights and bounds.

    Returns
    -------
    found : dict
        By line, a boolean array of its elements: all of them where it is the line that stands out.
    """
    at = suspects[:_EXAMINED]
    sample = np.concatenate([at, controls[:: max(1, -(-controls.size // _EXAMINED))]])
    errors = np.abs(line_errors(lines, scale, sample, take_rows(lines.C, sample)))
    usable, heaviest = scale.usable_column, np.abs(V).max(axis=1)
    with np.errstate(all="ignore"):
        sizes = (weighted_norms(errors, V) / tau[sample]).max(axis=1)
        usual = max(float(np.median(sizes[at.size :])), 1 / OUTLIER) if controls.size else float(np.inf)
        outlying = ~(errors * heaviest <= outlying_from(errors * heaviest, tau[sample])) & usable
    beyond = ~(sizes <= STANDS_OUT * usual)
    examined = [p for p in range(at.size) if beyond[p] or outlying[p].any()]
    if not examined:
        return {}
    backwards, found = _added_backwards(lines), dict[int, Mask]()
    for p in examined:
        line = int(at[p])
        columns = np.flatnonzero(usable if beyond[p] else outlying[p])
        honest = _rounding(lines, scale, line, columns, backwards)
        with np.errstate(all="ignore"):
            most = (weighted_norms(honest[None], V[columns]) / tau[line]).max()
            unexplained = outlying[p].copy()
            unexplained[columns] &= ~(errors[p, columns] <= STANDS_OUT * honest)
            if beyond[p] and not unexplained.any() and not sizes[p] <= STANDS_OUT * max(usual, most):
                unexplained = usable
        if unexplained.any():
            found[line] = unexplained
    return found


def _rounding(lines: Side, scale: Scale, line: int, columns: Integers, backwards: Array) -> Floats:
    """Moduli of the errors that elements of a line have where their terms are added in order or backwards, the larger
    of the two; scaled."""
    at, along = np.asarray([line]), from_host(columns, lines.C)
    others = summed_in_order(lines, line, columns), namespace(lines.C).take(take_rows(backwards, at), along, axis=1)
    return np.asarray(np.fmax(*(np.abs(line_errors(lines, scale, at, X, columns)[0]) for X in others)))


def _added_backwards(lines: Side) -> Array:
    """The product of everything in the opposite order: the terms of each element, the lines, and their elements."""

    def turned(X: Array) -> Array:
        return namespace(X).asarray(X[::-1, ::-1], copy=True)

    C, C0 = same_layout(lines.C), None if lines.C0 is None else turned(lines.C0)
    with np.errstate(all="ignore"):
        tf32 = lines.arithmetic.u_in > 0
        multiply(turned(lines.L), turned(lines.R), C, C0, alpha=lines.alpha, beta=lines.beta, tf32=tf32)
    return C[::-1, ::-1]
