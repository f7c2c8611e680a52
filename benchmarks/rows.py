"""What a row of a GPU benchmark's CSV says of the times and errors of one contender, whatever the grid.

Times in milliseconds, rates in 10^9 a second; `low` and `high` enclose the median with 95 % confidence; `batch` is the
number of calls between two events, `hidden` the share of samples in which the host was ahead of the card.
"""

from __future__ import annotations

from typing import Any, Protocol

from abft_tsm2.core.device import Ceilings
from benchmarks.gpu_timing import Times
from benchmarks.judge import Errors
from benchmarks.timing import summary

TIMES = (
    *("how", "copies", "batch", "samples", "hidden"),
    *("ms", "ms_lower_quartile", "ms_upper_quartile", "ms_low", "ms_high"),
    *("gbs", "ceiling", "ceiling_gbs", "share_of_ceiling", "gflops"),
)
ERRORS = (
    *("norm_error_over_bound", "worst_element_over_bound", "elements_outside"),
    *("normal_norm_error_over_bound", "normal_worst_element_over_bound", "normal_elements_outside"),
)


class Cell(Protocol):
    """What is measured, as far as a row needs to know."""

    @property
    def bytes(self) -> int:
        """The least that has to move."""

    @property
    def flops(self) -> int:
        """Multiplications and additions."""

    @property
    def ceiling(self) -> str:
        """What the bytes a second are held against: "read" or "copy"."""


def timed(cell: Cell, times: Times, ceilings: Ceilings) -> dict[str, Any]:
    """The columns that follow from the times."""
    how = {"how": "graph" if times.graph else "queued", "batch": times.batch, "note": times.note}
    if times.error or not times.seconds:
        return {**how, "error": times.error or "no samples before the time limit"}
    found, peak = summary(times.seconds), ceilings.of(cell.ceiling)
    gbs = 1e-9 * cell.bytes / found.median
    return {
        **how,
        "samples": found.count,
        "hidden": short(times.hidden / found.count),
        "ms": short(1e3 * found.median),
        "ms_lower_quartile": short(1e3 * found.lower_quartile),
        "ms_upper_quartile": short(1e3 * found.upper_quartile),
        "ms_low": short(1e3 * found.low),
        "ms_high": short(1e3 * found.high),
        "gbs": short(gbs),
        "ceiling": cell.ceiling,
        "ceiling_gbs": short(peak),
        "share_of_ceiling": short(gbs / peak),
        "gflops": short(1e-9 * cell.flops / found.median),
    }


def judged(found: Errors, prefix: str = "") -> dict[str, Any]:
    """The columns that say how far the product was from the reference."""
    return {
        f"{prefix}norm_error_over_bound": short(found.norm),
        f"{prefix}worst_element_over_bound": short(found.worst),
        f"{prefix}elements_outside": found.outside,
    }


def short(value: float) -> float:
    """Six digits: more than any time is good for."""
    return float(f"{value:.6g}")
