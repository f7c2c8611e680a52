"""Tables of protected products on a GPU, from results/gemm_device.csv, for `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import gemm_bars, stream_bars
from benchmarks.gemm_grid import ENCODED, FAULTS, ONE, RECHECKED, TF32, TWO, WAITED, WIDE, Key, empty_row, grid, key
from benchmarks.markup import csv_table, footer, number
from benchmarks.sheet import Row, read

Variants = Mapping[str, Row]
"""The last row of each variant of a product."""


def latest(suite: str, path: Path | None = None) -> list[Row]:
    """The last row of each cell of a suite, in the order of the grid."""
    found: dict[Key, Row] = {key(row): row for row in read("gemm_device", path)}
    order = (key(empty_row(cell)) for cell in grid() if cell.suite == suite)
    return [found[at] for at in order if at in found]


def products(suite: str, path: Path | None = None) -> list[tuple[str, Variants]]:
    """Products of a suite, each with its variants; TF32 is a product of its own."""
    found: dict[str, dict[str, Row]] = {}
    for row in latest(suite, path):
        found.setdefault(_product(row), {})[row["variant"]] = row
    return list(found.items())


def _product(row: Row) -> str:
    several = f"{row['batch']} of " if row["batch"] != "1" else ""
    types = f"{row['dtype']} by TF32" if row["variant"] == TF32 else row["dtype"]
    return f"{types} {several}{row['m']} x {row['k']} x {row['n']}"


def square() -> str:
    """Overhead of each variant, the interval of the first, the floor, and what single steps take."""
    found = products("square")
    head = (
        *("A @ B", "plain, us", "protected", "95 %", "floor", "both sides", "B encoded", "and rechecked"),
        *("checked in float32", "encoding B, us", "rechecking B, us"),
    )
    body = []
    for name, rows in found:
        first = rows.get(ONE) or rows.get(TF32) or {}
        body.append(
            (
                name,
                _number(next(iter(rows.values())), "plain_us"),
                *(_percent(first, "overhead_pct"), _interval(first), _percent(first, "floor_pct")),
                *(_percent(rows.get(variant, {}), "overhead_pct") for variant in (TWO, ENCODED, RECHECKED, WIDE)),
                *(_difference(rows, *pair) for pair in ((ONE, ENCODED), (RECHECKED, ENCODED))),
            )
        )
    return csv_table(head, body) + _footer((row for _, rows in found for row in rows.values()), "interleaved rounds")


def shapes() -> str:
    """Products with few rows or terms, and many in a call."""
    rows = [(name, row) for suite in ("skinny", "batched") for name, of in products(suite) for row in of.values()]
    head = ("A @ B", "protected", "plain, us", "overhead", "95 %", "overhead, us", "floor")
    body = [
        (
            *(name, row["variant"], _number(row, "plain_us"), _percent(row, "overhead_pct"), _interval(row)),
            *(_number(row, "overhead_us"), _percent(row, "floor_pct")),
        )
        for name, row in rows
    ]
    return csv_table(head, body) + _footer((row for _, row in rows), "interleaved rounds")


def repair() -> str:
    """What planted faults add, in per cent of the plain product and in microseconds."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in latest("repair"):
        clock = "host, with the wait for the verdict" if row["variant"] == WAITED else "card"
        found.setdefault((_product(row), clock), {})[row["faults"]] = row
    names = {"1": "one element", "16": "16 elements", "tile": "tile of 128 x 128"}
    head = ("A @ B", "clock", "plain, us", *(names[faults] for faults in FAULTS[1:]))
    body = []
    for (name, clock), rows in found.items():
        planted = (rows.get(faults, {}) for faults in FAULTS[1:])
        cells = (f"{_percent(row, 'overhead_pct')}, {_number(row, 'overhead_us')} us" if row else "" for row in planted)
        body.append((name, clock, _number(next(iter(rows.values())), "plain_us"), *cells))
    return csv_table(head, body) + _footer((row for rows in found.values() for row in rows.values()), "rounds")


def host() -> str:
    """What a call costs the host."""
    rows = latest("host")
    body = [(f"{_call(row)}, float32 {row['m']} x {row['k']} x {row['n']}", _number(row, "host_us")) for row in rows]
    return csv_table(("call", "host time, us"), body) + _footer(rows, "")


def bars() -> str:
    """What was asked of protected products, and what was measured."""
    return csv_table(*stream_bars.cells(gemm_bars.verdicts(read("gemm_device"))))


def _call(row: Row) -> str:
    protected = row["variant"].startswith("errstate")
    return f"protected_gemm, {row['variant']}" if protected else row["variant"]


def _number(row: Row, column: str) -> str:
    if row.get("error"):
        return "failed"
    return number(row[column]) if row.get(column) else ""


def _percent(row: Row, column: str) -> str:
    if row.get("error"):
        return "failed"
    return f"{float(row[column]):.2f}%" if row.get(column) else ""


def _interval(row: Row) -> str:
    low, high = _percent(row, "low_pct"), _percent(row, "high_pct")
    return f"{low} to {high}" if low and not row["error"] else ""


def _difference(rows: Variants, more: str, less: str) -> str:
    """What one variant takes longer than another, in microseconds."""
    pair = rows.get(more, {}), rows.get(less, {})
    if not all(row.get("overhead_us") and not row["error"] for row in pair):
        return ""
    return f"{float(pair[0]['overhead_us']) - float(pair[1]['overhead_us']):.1f}"


def _footer(rows: Iterable[Row], what: str) -> str:
    timed: Sequence[Row] = [row for row in rows if row["plain_us"] or row["host_us"]]
    how = f"Medians of {what}" if what else "Best of 5 queues of 300 calls, the card idle"
    return footer(how, timed, {"read": timed[-1]["read_gbs"]} if timed else {})


TABLES: Mapping[str, Callable[[], str]] = {
    "gemm-square": square,
    "gemm-shapes": shapes,
    "gemm-repair": repair,
    "gemm-host": host,
    "gemm-bars": bars,
}
