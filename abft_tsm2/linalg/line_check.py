"""Compare the residuals of many lines with their bounds, and with their median."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, is_numpy, namespace, to_host

BESIDE = 24  # lines to either side of those in doubt
SMALLEST = 1e-300  # in place of a norm that is zero
CHI_SQUARED = 0.455  # the median, of one degree of freedom
GROWN = 1e145  # times as large as A: more counts as that, whose square times all operations is in the range


class LineCheck(NamedTuple):
    """What a check says of its lines: residuals, bounds, and which lines are fine; float64, on A's device."""

    residual: Array
    bound: Array
    ok: Array

    @classmethod
    def of(cls, residual: Array, bound: Array) -> LineCheck:
        xp = namespace(residual)
        return cls(residual, bound, (xp.abs(residual) <= bound) & xp.isfinite(bound))

    @classmethod
    def relative_to_median(cls, residual: Array, bound: Array, usual: float, least: float) -> LineCheck:
        """Fine is what is within its bound, and no more than `usual` times as far from clean, in units of the bound, as
        the median; up to `least` of the bound always is. Synchronises with the host."""
        xp = namespace(residual)
        ratio = xp.abs(residual) / bound
        middle = float(np.sort(to_host(ratio))[ratio.shape[0] // 2])  # faster than `numpy.partition` for some hundred
        limit = min(1.0, max(least, usual * middle))
        return cls(residual, bound, (ratio <= limit) & xp.isfinite(bound))

    @classmethod
    def relative_in_runs(
        cls, residual: Array, bound: Array, runs: list[slice], usual: float, least: float
    ) -> LineCheck:
        """`relative_to_median` of the lines in these runs; the others are fine."""
        xp = namespace(residual)
        ok = xp.ones(bound.shape, dtype=xp.bool, device=bound.device)
        if not runs:
            return cls(residual, bound, ok)
        residuals, bounds = (xp.concat([x[run] for run in runs]) for x in (residual, bound))
        found, at = cls.relative_to_median(residuals, bounds, usual, least), 0
        for run in runs:
            ok[run] = found.ok[at : at + run.stop - run.start]
            at += run.stop - run.start
        return cls(residual, bound, ok)

    @property
    def clean(self) -> bool:
        return bool(self.ok.all() if is_numpy(self.ok) else namespace(self.ok).all(self.ok))

    @property
    def suspected(self) -> list[slice]:
        """Runs of the lines that are not fine, and of some around each of them."""
        n = int(self.ok.shape[0])
        found = runs(~to_host(self.ok), 2 * BESIDE + 1)
        return [slice(max(0, run.start - BESIDE), min(n, run.stop + BESIDE)) for run in found]


def runs(mask: Any, apart: int = 1) -> list[slice]:
    """Runs of True; two with less than `apart` lines from the one to the other are one."""
    found: list[slice] = []
    for line in np.flatnonzero(mask).tolist():
        if found and line - found[-1].stop < apart:
            found[-1] = slice(found[-1].start, line + 1)
        else:
            found.append(slice(line, line + 1))
    return found


def norm(x: Array) -> float:
    """The 2-norm of a vector, whose squares may be beyond the range."""
    xp = namespace(x)
    square = float(x @ x)
    if SMALLEST < square < math.inf:
        return math.sqrt(square)
    largest = float(xp.max(xp.abs(x))) if x.shape[0] else 0.0
    if not 0.0 < largest < math.inf:
        return largest
    return largest * math.sqrt(float(xp.sum((x / largest) ** 2)))


def column_norms(X: Array) -> Array:
    """The 2-norms of X's columns, whose squares may be beyond the range."""
    xp = namespace(X)
    if not X.shape[0]:
        return xp.zeros(X.shape[1], dtype=X.dtype, device=X.device)
    squares = xp.sum(X * X, axis=0)
    if bool(xp.all((squares > SMALLEST) & xp.isfinite(squares))):
        return xp.sqrt(squares)
    largest = xp.max(xp.abs(X), axis=0)
    scale = xp.where((largest > 0) & xp.isfinite(largest), largest, xp.ones_like(largest))
    return scale * xp.sqrt(xp.sum((X / scale[None, :]) ** 2, axis=0))


def growth(floor: Array, sums: Array) -> float:
    """How many times larger the squared norms of the trailing matrix's lines are than those of A's.

    The square of a line's own sum may be much too small an estimate; the median of some hundred is a good one. What has
    grown by more than GROWN counts as less: bounds stay finite, and what exceeds them is computed again. Growth that is
    not finite stays so, and certifies nothing.
    """
    step = sums.shape[0] // 128 + 1
    ratios = np.sort(np.abs(to_host(sums[::step]) / (to_host(floor[::step]) + SMALLEST)))
    usual = float(ratios[ratios.size // 2]) if ratios.size else math.sqrt(CHI_SQUARED)
    return _squared(usual)


def _squared(usual: float) -> float:
    usual = GROWN if GROWN < usual < math.inf else usual
    return usual * usual / CHI_SQUARED


def growths(floor: Any, sums: Any, count: int) -> list[float]:
    """`growth` of every `count` lines, 128 at most; on the host."""
    whole = sums.size // count * count
    ratios = np.abs(sums[:whole] / (floor[:whole] + SMALLEST)).reshape(-1, count)
    usual = np.sort(ratios, axis=1)[:, count // 2]
    found = [_squared(x) for x in usual.tolist()]
    return found + [growth(floor[whole:], sums[whole:])] * (whole < sums.size)
