"""Verify lines of C that failed their check: everything computed anew, rescaled so that nothing overflows, without the
columns and lines that hold NaN or Inf from the start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, from_host, to_host
from abft_tsm2.checksum.bounds import largest_norm, statistical_bound
from abft_tsm2.checksum.encode import middle
from abft_tsm2.checksum.sides import Floats, Scale, Side, scale_of, scaled
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


def verify_rescaled(lines: Side, weights: Array, scale: Scale | None = None) -> RescaledVerdict:
    """Verify all lines anew, exactly rescaled, in blocks. Synchronises with the host."""
    scale = scale_of(lines) if scale is None else scale
    L, R, C, C0, a = lines.L, lines.R, lines.C, lines.C0, lines.arithmetic
    m, (k, n) = L.shape[0], R.shape
    zero_k = np.zeros(k, np.int64)
    keep, everywhere = scale.usable_column, np.ones(k, np.bool_)
    with np.errstate(all="ignore"):
        common = int(scale.column.max(initial=-2000))  # of all weights: dividing by it keeps their squares in range
        V = np.ldexp(to_host(weights), (scale.column - common)[:, None])
    V[~keep] = 0.0
    r = V.shape[1]
    V_, V2_ = from_host(V, R), from_host(V * V, R)
    rows = rows_per_block(max(k, n))
    with np.errstate(all="ignore"):
        s, q2 = np.zeros((k, r)), np.zeros((k, r))
        for at in range(0, k, rows):  # s = R V, q2 = (R o R)(V o V)
            part = slice(at, min(k, at + rows))
            block = scaled(widened(R, at, part.stop), zero_k[part], scale.right, keep)
            s[part], q2[part] = to_host(block @ V_), to_host((block * block) @ V2_)
        s_, q2_ = from_host(s, R), from_host(q2, R)
        residual, tau, plausible = np.zeros((m, r)), np.zeros((m, r)), np.ones(m, np.bool_)
        shift = int(scale.column.min(initial=0))
        total = (np.abs(V) * np.ldexp(1.0, shift - scale.column)[:, None]).sum(axis=0)
        for at in range(0, m, rows):
            part = slice(at, min(m, at + rows))
            gain = scale.gain(lines.alpha, part, slice(0, 0 if n == 0 else 1))
            gain = gain if n else np.zeros((part.stop - at, 1))
            left = scaled(widened(L, at, part.stop), scale.left[part], zero_k, everywhere)
            value = scaled(widened(C, at, part.stop), scale.line[part], scale.column, keep)
            expected = gain * to_host(left @ s_)
            products = np.abs(gain) * np.sqrt(to_host((left * left) @ q2_))
            stored = np.sqrt(to_host((value * value) @ V2_))
            added = None
            if C0 is not None:
                base = lines.beta * scaled(widened(C0, at, part.stop), scale.line[part], scale.column, keep)
                expected = expected + to_host(base @ V_)
                added = np.sqrt(to_host((base * base) @ V2_))
            residual[part] = np.abs(to_host(value @ V_) - expected)
            underflow = np.ldexp(a.underflow(lines.terms, lines.alpha) * total, -shift - scale.line[part][:, None])
            sizes: Any = {"products": products, "added": added, "underflow": underflow}
            largest = largest_norm(lines.terms, **sizes)
            tau[part] = statistical_bound(np, a, lines.terms, n, stored=stored, largest=largest, **sizes)
            plausible[part] = np.all(stored <= largest, axis=1)
        usable = scale.usable_line & bool(keep.any() or n == 0)
        ok = (np.all((residual <= tau) & np.isfinite(tau), axis=1) & plausible) | ~usable
    ratio = np.where(usable, worst_ratio(residual, tau), 0.0)
    bounds = np.ldexp(tau, (scale.line + common)[:, None])
    in_users_units = bounds.max(axis=1, initial=0.0)
    seen = in_users_units[usable & np.isfinite(in_users_units)]  # a line with an Inf that is right has no bound
    bound = float(middle(seen)) if seen.size else 0.0
    check = lines_check(lines, to_host(weights), ok & usable, ratio, bound, int(np.count_nonzero(usable)))
    return RescaledVerdict(SideVerdict(ok, ratio, check), scale, V, tau, bounds)
