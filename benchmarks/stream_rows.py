"""What a row of results/stream.csv says: which product, who multiplied, how fast, and beside whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.contenders import CUPY
from benchmarks.rows import ERRORS, TIMES, short
from benchmarks.stream_grid import Cell

OWN, VENDOR, PAPER, OTHER = "own", "cuBLAS", "paper", "other"
"""Families of contenders: this package's functions; cuBLAS, however it is called; the paper's kernels; and what has
another result type and is there for the record."""

CELL = ("suite", "order", "dtype", "out", "m", "k", "n", "products", "lead")
COLUMNS = (
    *CELL,
    *("contender", "family", "kernel", "source", "layout"),
    *TIMES,
    *("best_cublas", "best_cublas_ms", "speedup", "speedup_alike", "cupy_ms", "speedup_cupy"),
    *("host_us", "host_us_lower_quartile", "host_us_upper_quartile", "host_us_beyond_cupy"),
    *ERRORS,
    *("note", "error", "sm_mhz"),
)
"""Of a row, before those of `gpu_timing.environment`. `layout` are the orders of A, B and C, in columns ("F") or in
rows ("C"); `source` is what chose the kernel; `products` those of a call; `lead` what the leading dimension of A has
beyond its rows or columns. Speedups compare calls that were timed the same way, queued or in a graph: `speedup` with
the best cuBLAS, B and C laid out as it likes best, `speedup_alike` with the best of the row's own layout."""

Key = tuple[str, ...]
"""The values of the columns `CELL`, as text."""


def key(row: Mapping[str, Any]) -> Key:
    """Which cell a row belongs to."""
    return tuple(str(row[column]) for column in CELL)


def empty_row(cell: Cell, contender: str) -> dict[str, Any]:
    """A row that says which product and who; all else is empty."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row.update({column: getattr(cell, column) for column in CELL}, contender=contender)
    return row


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Fill in, for the rows of one cell, what relates one contender to another."""
    good = [row for row in rows if row["ms"] != "" and not row["error"]]
    for row in good:
        rivals = [other for other in good if other["family"] == VENDOR and other["how"] == row["how"]]
        best = min(rivals, key=lambda rival: float(rival["ms"]), default=None)
        if best is not None:
            row.update(best_cublas=best["contender"], best_cublas_ms=best["ms"])
            row["speedup"] = short(best["ms"] / row["ms"])
        alike = min((float(rival["ms"]) for rival in rivals if _alike(row, rival)), default=None)
        if alike is not None:
            row["speedup_alike"] = short(alike / row["ms"])
        cupy = next((other for other in good if other["contender"] == CUPY and other["how"] == row["how"]), None)
        if cupy is not None:
            row.update(cupy_ms=cupy["ms"], speedup_cupy=short(cupy["ms"] / row["ms"]))
    base = next((row["host_us"] for row in rows if row["contender"] == CUPY and not row["error"]), "")
    for row in rows:
        if row["host_us"] != "" and base != "":
            row["host_us_beyond_cupy"] = short(row["host_us"] - base)


def _alike(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether A, B and C lie alike: of one column any order is the same, and `encode_both` has no rival of its kind."""
    mine, its = row["layout"], other["layout"]
    return row["suite"] == "both" or mine == its or (mine[:1] == its[:1] and int(row["n"]) == 1)
