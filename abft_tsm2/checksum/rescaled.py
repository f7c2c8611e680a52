"""Verify lines of C that failed their check: everything computed anew, rescaled so that nothing overflows, without the
columns and lines that hold NaN or Inf from the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, from_host, to_host
from abft_tsm2.checksum.bounds import largest_norm, statistical_bound
from abft_tsm2.checksum.encode import middle
from abft_tsm2.checksum.sides import Floats, Scale, Side, lost_to_underflow, scale_of
from abft_tsm2.checksum.verify import SideVerdict, lines_check, worst_ratio
from abft_tsm2.core.row_sums import rows_per_block, widened


@dataclass(frozen=True, eq=False)
class RescaledVerdict:
    """The verdict of `verify_rescaled`, its scale, and what a change of a line is measured with.

    Attributes
    ----------
    verdict : SideVerdict
        Lines that cannot be checked count as ok.
    scale : Scale
    V : (n, r) array
        Scaled weights, 0 in the columns that cannot be checked.
    tau : (m, r) array
        Bounds in the scaled domain.
    bounds : (m, r) array
        In the user's units; inf where these have no such number.
    """

    verdict: SideVerdict
    scale: Scale
    V: Floats
    tau: Floats
    bounds: Floats


def blocks(count: int, columns: int) -> list[slice]:
    """Runs of rows, as many at a time as a temporary may hold."""
    step = rows_per_block(columns)
    return [slice(at, min(count, at + step)) for at in range(0, count, step)]


def verify_rescaled(lines: Side, weights: Array, scale: Scale | None = None) -> RescaledVerdict:
    """Verify all lines anew, exactly rescaled, in blocks. Synchronises with the host."""
    v = to_host(weights)
    scale = scale_of(lines, v) if scale is None else scale
    L, R, C, C0, a = lines.L, lines.R, lines.C, lines.C0, lines.arithmetic
    m, (k, n) = L.shape[0], R.shape
    keep = scale.usable_column
    with np.errstate(all="ignore"):
        V = np.ldexp(v, scale.column[:, None])
        lost, exponent = lost_to_underflow(lines, v)
        V[~keep] = 0.0
        r = V.shape[1]
        V_, V2_ = from_host(V, R), from_host(V * V, R)
        s, q2 = np.zeros((k, r)), np.zeros((k, r))
        for part in blocks(k, n):  # s = R V, q2 = (R o R)(V o V)
            block = scale.right_rows(widened(R, part.start, part.stop), part)
            s[part], q2[part] = to_host(block @ V_), to_host((block * block) @ V2_)
        s_, q2_ = from_host(s, R), from_host(q2, R)
        residual, tau, plausible = np.zeros((m, r)), np.zeros((m, r)), np.ones(m, np.bool_)
        for part in blocks(m, max(k, n)):
            gain = scale.gain(lines.alpha, part)
            left = scale.left_lines(widened(L, part.start, part.stop), part)
            value = scale.result_lines(widened(C, part.start, part.stop), part)
            expected = gain * to_host(left @ s_)
            products = np.abs(gain) * np.sqrt(to_host((left * left) @ q2_))
            stored = np.sqrt(to_host((value * value) @ V2_))
            added = None
            if C0 is not None:
                base = scale.added_lines(lines.beta, widened(C0, part.start, part.stop), part)
                expected = expected + to_host(base @ V_)
                added = np.sqrt(to_host((base * base) @ V2_))
            residual[part] = np.abs(to_host(value @ V_) - expected)
            underflow = np.ldexp(lost[None, :], (exponent - scale.line[part])[:, None])
            sizes: Any = {"products": products, "added": added, "underflow": underflow}
            largest = largest_norm(lines.terms, **sizes)
            tau[part] = statistical_bound(np, a, lines.terms, n, stored=stored, largest=largest, **sizes)
            plausible[part] = np.all(stored <= largest, axis=1)
        usable = scale.usable_line & bool(keep.any() or n == 0)
        # A bound of 0 compares nothing: there is none in this domain, unless lines have no elements.
        bounded = np.isfinite(tau) & ((tau > 0) | (n == 0))
        ok = (np.all((residual <= tau) & bounded, axis=1) & plausible) | ~usable
    ratio = np.where(usable, worst_ratio(residual, tau), 0.0)
    bounds = np.ldexp(tau, scale.line[:, None])
    in_users_units = bounds.max(axis=1, initial=0.0)
    seen = in_users_units[usable & np.isfinite(in_users_units)]  # a line with an Inf that is right has no bound
    bound = float(middle(seen)) if seen.size else 0.0
    check = lines_check(lines, v, ok & usable, ratio, bound, int(np.count_nonzero(usable)))
    return RescaledVerdict(SideVerdict(ok, ratio, check), scale, V, tau, bounds)
