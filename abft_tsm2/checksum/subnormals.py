"""Tell apart what a processor makes of subnormal operands that count as zero, and what is wrong.

Where a processor is in that mode, some of its threads may be, and others not: a product may hold the terms of such
operands or lack them, and so may all that it is compared with. What they account for cannot be verified.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, float_type, in_float64, is_numpy, to_host
from abft_tsm2.checksum.bounds import rigorous_factor
from abft_tsm2.checksum.sides import Integers, Side
from abft_tsm2.core.row_sums import rows_per_block, take_rows

FLUSHED = (
    "follow from subnormal numbers in the operands, which this processor takes for zero in its present mode "
    "(flush-to-zero, denormals-are-zero), and could not be checked: multiply an operand by a power of two, or leave "
    "that mode (torch.set_flush_denormal(False))"
)


def lines_of_subnormals(lines: Side, at: Integers) -> tuple[Integers, Integers]:
    """Of the lines `at` those in which terms with subnormal operands count for more than rounding: which are right as
    this thread multiplies, element by element, and which differ by no more than such terms account for.

    Both empty where the processor does not take subnormal numbers for zero.
    """
    a, found = lines.arithmetic, ([at[:0]], [at[:0]])
    if not (a.flushes and is_numpy(lines.C)) or not at.size:
        return at[:0], at[:0]
    of_R = _subnormal(lines.R)
    if not (of_R.any() or _subnormal(take_rows(lines.L, at)).any()):
        return at[:0], at[:0]
    step = rows_per_block(max(lines.R.shape))
    with np.errstate(all="ignore"):
        R = np.abs(in_float64(lines.R))
        for some in (at[lo : lo + step] for lo in range(0, at.size, step)):
            stored = take_rows(lines.L, some)
            L, C = in_float64(stored), in_float64(take_rows(lines.C, some))
            exact, reach = lines.alpha * (L @ in_float64(lines.R)), abs(lines.alpha) * (np.abs(L) @ R)
            if lines.C0 is not None:
                added = lines.beta * in_float64(take_rows(lines.C0, some))
                exact, reach = exact + added, reach + np.abs(added)
            off, tiny = np.abs(C - exact), a.accumulator.smallest_normal
            rounded = rigorous_factor(a, lines.terms) * reach + 2 * a.u_out * np.abs(exact)
            rounded += a.underflow(lines.terms, lines.alpha)
            terms = _subnormal(stored).astype(np.float64) @ (tiny * R) + (tiny * np.abs(L)) @ of_R.astype(np.float64)
            terms *= abs(lines.alpha)
            right, explained = (((off <= x) & np.isfinite(x)).all(axis=1) for x in (rounded, rounded + terms))
            explained &= (terms > rounded).any(axis=1)
            found[0].append(some[explained & right])
            found[1].append(some[explained & ~right])
    return np.concatenate(found[0]), np.concatenate(found[1])


def _subnormal(X: Array) -> Any:
    """Which elements are subnormal and count as zero, by their bits: in that mode comparisons do not tell them from
    zero. Those of float16 are normal in the type that they are multiplied in."""
    X, kind = to_host(X), float_type(X)
    if kind.name == "float16":
        return np.zeros(X.shape, np.bool_)
    bits = X.view(f"u{kind.bits // 8}")
    fraction = (1 << (kind.precision - 1)) - 1
    exponent = (1 << (kind.bits - 1)) - 1 - fraction
    return ((bits & exponent) == 0) & ((bits & fraction) != 0)
