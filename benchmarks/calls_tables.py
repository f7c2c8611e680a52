"""Tables of calls in a loop, from results/calls.csv and calls_gpu.csv, for `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import cpu_tables, sheet
from benchmarks.calls_grid import (
    COMMANDS,
    CPU,
    DEFERRED,
    ENCODED,
    FILES,
    GPU,
    GRAPH,
    PROTECTED,
    TRUSTED,
    WAITED,
    empty_row,
    grid,
    key,
)
from benchmarks.markup import csv_table, gpu, number
from benchmarks.sheet import Row, read

Variants = Mapping[str, Row]
"""The last row of each variant of a product."""


def there(library: str) -> bool:
    """Whether the loops of a library were measured."""
    return (sheet.RESULTS / f"{FILES[library]}.csv").exists()


def latest(library: str, path: Path | None = None) -> list[Row]:
    """The last row of each cell, in the order of the grid."""
    found = {key(row): row for row in read(FILES[library], path)}
    return [found[at] for at in (key(empty_row(cell, 0.0)) for cell in grid(library)) if at in found]


def products(library: str, path: Path | None = None) -> dict[str, Variants]:
    """By type and size, the rows of each variant."""
    found: dict[str, dict[str, Row]] = {}
    for row in latest(library, path):
        found.setdefault(f"{row['dtype']} {row['n']} x {row['n']} x {row['n']}", {})[row["variant"]] = row
    return found


def on_cpu() -> str:
    """Loops of NumPy's products."""
    head = ("A @ B", "calls", "numpy.matmul, us", "protected, us", "overhead", "95 %", "floor", "B encoded")
    return _table(CPU, head, _line_on_cpu)


def _line_on_cpu(name: str, rows: Variants) -> tuple[str, ...]:
    row = rows.get(PROTECTED, {})
    return (
        *(name, row.get("calls", ""), _shown(row, "plain_us"), _shown(row, "protected_us"), overhead(row)),
        *(_interval(row), _percent(row, "floor_pct"), overhead(rows.get(ENCODED, {}))),
    )


def on_gpu() -> str:
    """Loops of CuPy's products, eager and in graphs."""
    head = (
        *("A @ B", "cupy.matmul, us", "protected, us", "overhead", "95 %", "floor", "verdict at each call"),
        *("B encoded", "not rechecked", "host: plain, us", "protected, us"),
        *("in a graph: plain, us", "protected, us", "overhead"),
    )
    return _table(GPU, head, _line_on_gpu)


def _line_on_gpu(name: str, rows: Variants) -> tuple[str, ...]:
    row, recorded = rows.get(DEFERRED, {}), rows.get(GRAPH, {})
    return (
        *(name, _shown(row, "plain_us"), _shown(row, "protected_us"), overhead(row), _interval(row)),
        *(_percent(row, "floor_pct"), *(overhead(rows.get(variant, {})) for variant in (WAITED, ENCODED, TRUSTED))),
        *(_shown(row, "plain_host_us"), _shown(row, "host_us")),
        *(_shown(recorded, "plain_us"), _shown(recorded, "protected_us"), overhead(recorded)),
    )


def where(library: str, *rows: Row) -> str:
    """What rows were measured on."""
    return f"{cpu_tables.where(rows[-1])}, {rows[-1]['date']}" if library == CPU else gpu(*rows)


def _table(library: str, head: tuple[str, ...], line: Callable[[str, Variants], tuple[str, ...]]) -> str:
    if not there(library):
        return f"Not measured yet: ``{COMMANDS[library]}``.\n"
    found = products(library)
    rows = [row for variants in found.values() for row in variants.values() if row["plain_us"]]
    table = csv_table(head, [line(name, variants) for name, variants in found.items()])
    rates = f"; reading reaches {number(rows[-1]['read_gbs'])} GB/s" if rows else ""
    return table + (f"\nMedians of interleaved loops; {where(library, *rows)}{rates}.\n" if rows else "")


def _shown(row: Row, column: str) -> str:
    """A number, or that there is none because the product failed."""
    if row.get("error"):
        return "failed"
    return number(row[column]) if row.get(column) else ""


def overhead(row: Row) -> str:
    """What protection adds, in per cent: with digits after the point where they say something."""
    return _percent(row, "overhead_pct", "+")


def _percent(row: Row, column: str, sign: str = "") -> str:
    if row.get("error"):
        return "failed"
    if not row.get(column):
        return ""
    value = float(row[column])
    return f"{value:{sign}.{1 if abs(value) < 1000 else 0}f}%"


def _interval(row: Row) -> str:
    low, high = _percent(row, "low_pct"), _percent(row, "high_pct")
    return f"{low} to {high}" if low and not row["error"] else ""


TABLES: Mapping[str, Callable[[], str]] = {"calls": on_cpu, "calls-gpu": on_gpu}
