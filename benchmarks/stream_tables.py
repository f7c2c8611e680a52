"""Tables of the tall and skinny products, from results/stream.csv, for `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import stream_bars
from benchmarks.markup import csv_table, footer, number, percent, ratio
from benchmarks.sheet import Row, read
from benchmarks.stream_grid import CELL, ORDERS, OWN, Key, key

Rows = Mapping[str, Row]
"""The last row of each contender of a cell."""

_A = {"rows": "A @ B, rows", "columns": "A @ B, columns", "transposed": "A.T @ B, rows"}


def latest(suites: Sequence[str], path: Path | None = None) -> dict[Key, Rows]:
    """Cells of some suites in the order of their sizes."""
    cells: dict[Key, dict[str, Row]] = {}
    for row in read("stream", path):
        if row["suite"] in suites and row["contender"]:
            cells.setdefault(key(row), {})[row["contender"]] = row

    def rank(at: Key) -> tuple[object, ...]:
        cell = dict(zip(CELL, at, strict=True))
        numbers = (int(cell[name]) for name in ("products", "m", "k", "n", "lead"))
        return suites.index(cell["suite"]), ORDERS.index(cell["order"]), cell["dtype"], cell["out"], *numbers

    return dict(sorted(cells.items(), key=lambda item: rank(item[0])))


def own(rows: Rows) -> Row:
    """The better row of this package's functions, or one without a time where none has any."""
    ours = [row for row in rows.values() if row["family"] == OWN]
    timed = [row for row in ours if row["ms"] and not row["error"]]
    return min(timed, key=lambda row: float(row["ms"]), default=(ours or list(rows.values()))[0])


def types(row: Row) -> str:
    """float32, or float32 -> float64 where the result is of another type."""
    return row["dtype"] if row["dtype"] == row["out"] else f"{row['dtype']} -> {row['out']}"


def tsm2r() -> str:
    """Share of the read rate, and speed relative to the best cuBLAS, by order, type, size and columns of B."""
    return _by_columns(ORDERS, lambda row: f"{_A[row['order']]}, {types(row)}, m = k = {row['m']}")


def odd() -> str:
    """As `tsm2r`, of sizes that are multiples of nothing, and of matrices that are part of larger ones."""

    def label(row: Row) -> str:
        lead = f", leading dimension + {row['lead']}" if row["lead"] != "0" else ""
        return f"{_A[row['order']]}, {types(row)}, {row['m']} x {row['k']}{lead}"

    return _by_columns(("odd", "leading"), label)


def _by_columns(suites: Sequence[str], label: Callable[[Row], str]) -> str:
    cells = [own(rows) for rows in latest(suites).values()]
    widths = sorted({int(row["n"]) for row in cells})
    lines: dict[str, dict[int, str]] = {}
    for row in cells:
        lines.setdefault(label(row), {})[int(row["n"])] = _short(row)
    body = [(name, *(of_line.get(n, "") for n in widths)) for name, of_line in lines.items()]
    head = ("product", *(f"n = {n}" for n in widths))
    return csv_table(head, body) + _footer(cells, "Share of the read rate, and speed over the best cuBLAS")


def _short(row: Row) -> str:
    if row["error"] or not row["ms"]:
        return "failed" if row["error"] else row["note"].partition(":")[0]
    speed = f", {ratio(row['speedup'])} x" if row["speedup"] else ""
    return percent(row["share_of_ceiling"]) + speed


def tsm2l() -> str:
    """Products by a small B, alone and a thousand in a call: time, share of the copy rate, speed."""
    cells = [own(rows) for rows in latest(("stream", "batches", "complaints")).values()]
    head = ("A @ B", "ms", "timed", "of a copy", "best cuBLAS, ms", "which", "x cuBLAS", "x CuPy")
    body = []
    for row in cells:
        several = f"{row['products']} of " if row["products"] != "1" else ""
        size = f"{several}{row['m']} x {row['k']} x {row['n']}"
        body.append((f"{row['order']}, {types(row)}, {size}", *_timed(row)))
    return csv_table(head, body) + _footer(cells, "Operands outside of the cache")


def _timed(row: Row) -> tuple[str, ...]:
    if row["error"] or not row["ms"]:
        return ("failed" if row["error"] else row["note"].partition(":")[0], *[""] * 6)
    vendor = number(row["best_cublas_ms"]) if row["best_cublas_ms"] else ""
    speeds = ratio(row["speedup"]), ratio(row["speedup_cupy"])
    return number(row["ms"]), row["how"], percent(row["share_of_ceiling"]), vendor, row["best_cublas"], *speeds


def both() -> str:
    """`encode_both` with squares against two products by cuBLAS."""
    cells = [own(rows) for rows in latest(("both",)).values()]
    head = ("encode_both", "ms", "timed", "of one read", "A V and W' A, ms", "by", "x cuBLAS", "x CuPy")
    body = [(f"{types(row)}, m = k = {row['m']}, r = {row['n']}", *_timed(row)) for row in cells]
    return csv_table(head, body) + _footer(cells, "With weighted sums of squares of rows and columns")


def host() -> str:
    """What a call costs the host."""
    rows = [row for cell in latest(("host",)).values() for row in cell.values()]
    head = ("call", "float32 product", "host time, us", "beyond CuPy's @, us")
    body = [
        (
            row["contender"].replace(", out", ", into a given C"),
            f"{row['m']} x {row['k']} x {row['n']}",
            number(row["host_us"]) if row["host_us"] else "failed",
            f"{float(row['host_us_beyond_cupy']):.1f}" if row["host_us_beyond_cupy"] else "",
        )
        for row in rows
    ]
    return csv_table(head, body) + _footer(rows, "Medians of 2000 calls and more, the card idle")


def bars() -> str:
    """What was asked of these kernels, and what was measured."""
    return csv_table(*stream_bars.cells(stream_bars.verdicts(row for row in read("stream") if row["contender"])))


def _footer(rows: Iterable[Row], how: str) -> str:
    timed = [row for row in rows if row["ms"] or row["host_us"]]
    return footer(how, timed, {row["ceiling"]: row["ceiling_gbs"] for row in timed if row["ceiling"]})


TABLES: Mapping[str, Callable[[], str]] = {
    "stream-tsm2r": tsm2r,
    "stream-odd": odd,
    "stream-tsm2l": tsm2l,
    "both": both,
    "host": host,
    "bars": bars,
}
