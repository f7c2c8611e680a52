"""What a row of results/gemm_device.csv says: which product, how protected, and what that cost.

Times in microseconds, of one call; the overhead is the median over the rounds of (protected - plain) / plain, in per
cent, and `low` and `high` enclose it with 95 % confidence. `floor_pct` is what the least of bytes would cost at the
rate at which a kernel that only reads gets them, `hidden` the rounds in which the host was ahead of the card in both
samples. With faults, plain is the product by cuBLAS, and the overhead what they add to a protected product behind which
none is planted: by the card's clock, or, of `WAITED` calls, by the host's.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gemm_device import CLEAN, Cell
from benchmarks.gpu_timing import Times
from benchmarks.rows import short
from benchmarks.timing import summary

CELL = ("suite", "dtype", "out", "m", "k", "n", "batch", "variant", "faults")
COLUMNS = (
    *CELL,
    *("plain_us", "protected_us", "overhead_us", "overhead_pct", "low_pct", "high_pct", "floor_pct"),
    *("samples", "hidden", "copies", "plain_calls", "protected_calls", "host_us"),
    *("status", "suspicions", "judged", "note", "error", "sm_mhz", "read_gbs"),
)
"""Of a row, before those of `gpu_timing.environment`. `plain_calls` and `protected_calls` are those of a sample;
`judged` is the largest error over what is allowed to it."""

Key = tuple[str, ...]
"""The values of the columns `CELL`, as text."""


def key(row: Mapping[str, Any]) -> Key:
    """Which cell a row belongs to."""
    return tuple(str(row[column]) for column in CELL)


def empty_row(cell: Cell) -> dict[str, Any]:
    """A row that says which cell; all else is empty."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row.update({column: getattr(cell, column) for column in CELL})
    return row


def floor(cell: Cell, plain: float, read_gbs: float) -> float:
    """The time in which the check's bytes can be read, in per cent of a plain product of so many seconds."""
    return 100 * 1e-9 * cell.checked_bytes / read_gbs / plain


def compared(
    cell: Cell, plain: Sequence[float], base: Sequence[float], mine: Sequence[float], read_gbs: float
) -> dict[str, Any]:
    """The columns that follow from the seconds of the same rounds: what `mine` takes beyond `base`, by `plain`."""
    extra = [x - y for x, y in zip(mine, base, strict=True)]
    found = summary([x / y for x, y in zip(extra, plain, strict=True)])
    return {
        "samples": found.count,
        "plain_us": short(1e6 * statistics.median(plain)),
        "protected_us": short(1e6 * statistics.median(mine)),
        "overhead_us": short(1e6 * statistics.median(extra)),
        "overhead_pct": short(100 * found.median),
        "low_pct": short(100 * found.low),
        "high_pct": short(100 * found.high),
        "floor_pct": short(floor(cell, statistics.median(plain), read_gbs)) if cell.faults == CLEAN else "",
    }


def timed(cell: Cell, plain: Times, mine: Times, read_gbs: float, base: Times | None = None) -> dict[str, Any]:
    """The columns that follow from what the stopwatch read; `base` is what `mine` is compared with, if not `plain`."""
    base = base or plain
    error = plain.error or base.error or mine.error or ("" if plain.seconds else "no samples before the time limit")
    if error:
        return {"error": error}
    row = compared(cell, plain.seconds, base.seconds, mine.seconds, read_gbs)
    row["hidden"] = min(plain.hidden, base.hidden, mine.hidden)
    return {**row, "plain_calls": plain.batch, "protected_calls": mine.batch}


def text(row: Mapping[str, Any]) -> str:
    """What was measured, in a line."""
    if row["host_us"] != "":
        return f"{row['host_us']:.2f} us of the host"
    if row["overhead_pct"] == "":
        return ""
    line = f"{row['plain_us']:10.1f} us plain, {row['overhead_pct']:+7.2f} % [{row['low_pct']:.2f}, "
    line += f"{row['high_pct']:.2f}], {row['overhead_us']:+.1f} us"
    if row["floor_pct"] != "" and row["faults"] == CLEAN:
        line += f", floor {row['floor_pct']:.2f} %"
    if row["hidden"] != "" and row["hidden"] < row["samples"]:
        line += f", hidden {row['hidden']} of {row['samples']}"
    return line
