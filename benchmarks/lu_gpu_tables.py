"""Tables of factorisations on a GPU, from results/lu_gpu.csv and lu_gpu_phases.csv, for `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.lu_gpu_grid import AS_CALLED, ON_CARD, TYPES, key
from benchmarks.lu_tables import ORDERS
from benchmarks.markup import csv_table, gpu, number, percent, ratio
from benchmarks.sheet import Row, read

HOW = "Medians of interleaved rounds"


def latest(suite: str, path: Path | None = None) -> list[Row]:
    """The last row of each cell of a suite, by type, order and size."""
    found = {key(row): row for row in read("lu_gpu", path) if row["suite"] == suite}
    return sorted(found.values(), key=lambda row: (TYPES.index(row["dtype"]), row["order"] != "F", int(row["n"])))


def name(row: Row) -> str:
    """Type, size and order of a matrix."""
    return f"{row['dtype']} {row['n']} x {row['n']}, {ORDERS[row['order']]}"


def times() -> str:
    """Factorisations by the card's clock, relative to cuSOLVER's."""
    rows = latest("factor")
    head = (
        *("lu_factor on a GPU", "cuSOLVER, ms", "unprotected, x cuSOLVER", "certified at the end, x cuSOLVER"),
        *("checked in every step, x cuSOLVER", "target", "checks"),
    )
    body = [
        (
            *(name(row), _shown(row, "getrf_ms"), ratio(row["unprotected"]), ratio(row["offline"])),
            *(ratio(row["online"]), ratio(row["online_bar"]), percent(row["checks"] or "nan")),
        )
        for row in rows
    ]
    return csv_table(head, body) + _footer(rows, "by the card's clock, of calls that are queued")


def called() -> str:
    """Factorisations by the host's clock."""
    rows = latest("factor")
    names = ("CuPy", "PyTorch", "MAGMA", "protected, at the end", "protected, every step")
    columns = [f"{contender}_call_ms" for contender in AS_CALLED]
    shown = [(title, column) for title, column in zip(names, columns, strict=True) if any(row[column] for row in rows)]
    body = [(name(row), *(_shown(row, column) for _, column in shown)) for row in rows]
    head = ("lu_factor as it is called", *(f"{title}, ms" for title, _ in shown))
    return csv_table(head, body) + _footer(rows, "this package's apart, by the host's clock, of calls waited for")


def verdicts() -> str:
    """What a host adds that reads verdicts on the way."""
    rows = latest("read")
    head = (
        *("checked in every step, on a GPU", "queued as a whole, ms", "step by step, ms"),
        *("verdicts read on the way, ms", "added by that", "target"),
    )
    body = [
        (
            *(name(row), _shown(row, "online_ms"), _shown(row, "parts_ms"), _shown(row, "read_ms")),
            *(percent(row["idle"] or "nan"), percent(row["idle_bar"] or "nan")),
        )
        for row in rows
    ]
    return csv_table(head, body) + _footer(rows, "by the card's clock, from the first kernel to the last one")


def structured() -> str:
    """Factorisations of other matrices than normal ones."""
    rows = latest("structured")
    head = (
        *("lu_factor on a GPU", "cuSOLVER, ms", "unprotected, ms", "at the end, ms", "every step, ms"),
        *("at the end, as called, ms", "every step, as called, ms", "suspected at first"),
    )
    body = [
        (
            f"{row['matrix']}, {row['dtype']} {row['n']} x {row['n']}",
            *(_shown(row, f"{contender}_ms") for contender in ON_CARD),
            *(_shown(row, f"{mode}_call_ms") for mode in ("offline", "online")),
            row["suspected"],
        )
        for row in rows
    ]
    return csv_table(head, body) + _footer(rows)


def repair() -> str:
    """What one fault adds to a factorisation that is checked in every step."""
    rows = latest("repair")
    head = ("lu_factor, where a bit is flipped halfway", "without a fault, ms", "repair, ms", "repair")
    body = [
        (
            f"{name(row)}, {row['fault']}",
            *(_shown(row, "online_call_ms"), _shown(row, "repair_ms"), percent(row["repair"] or "nan")),
        )
        for row in rows
    ]
    return csv_table(head, body) + _footer(rows)


def solutions() -> str:
    """Solutions and Cholesky's factorisation, relative to cuSOLVER's."""
    solved, definite = latest("solve"), latest("cholesky")
    head = ("lu_solve on a GPU", "cuSOLVER, ms", "two reads of the factors, ms", "protected, ms", "x all of that")
    below = ("cholesky on a GPU", "cuSOLVER, ms", "protected, ms", "x cuSOLVER", "target")
    of_solved = [
        (
            f"{name(row)}, {row['right_hand_sides']} right-hand side{'s' * (row['right_hand_sides'] != '1')}",
            *(_shown(row, column) for column in ("vendor_call_ms", "reads_ms", "protected_call_ms")),
            ratio(row["protected"]),
        )
        for row in solved
    ]
    of_definite = [
        (
            *(name(row), _shown(row, "vendor_call_ms"), _shown(row, "protected_call_ms")),
            *(ratio(row["protected"]), ratio(row["protected_bar"])),
        )
        for row in definite
    ]
    tables = [csv_table(*table) for table in ((head, of_solved), (below, of_definite)) if table[1]]
    return "\n".join(tables) + _footer([*solved, *definite], "by the host's clock")


def phases() -> str:
    """What each task of a factorisation takes alone, that of the largest share first."""
    found = {(row["dtype"], row["n"], row["lane"], row["task"]): row for row in read("lu_gpu_phases") if row["ms"]}
    rows = sorted(found.values(), key=lambda row: (TYPES.index(row["dtype"]), int(row["n"]), -float(row["ms"])))
    head = (
        "lu_factor on a GPU, checked in every step",
        "task",
        "stream",
        "calls",
        "median, us",
        "all, ms",
        "whole, ms",
    )
    body = [
        (
            *(f"{row['dtype']} {row['n']} x {row['n']}", row["task"], row["lane"], row["count"]),
            *(number(row[column]) for column in ("us", "ms", "whole_ms")),
        )
        for row in rows
    ]
    return csv_table(head, body) + _footer(rows, "each task alone; as a whole they overlap")


def _shown(row: Row, column: str) -> str:
    if row["error"]:
        return "failed"
    if row["note"].startswith("not measured"):
        return "does not fit"
    return number(row[column]) if row[column] else ""


def _footer(rows: Sequence[Row], more: str = "") -> str:
    how = f"{HOW}, {more}" if more else HOW
    return f"\n{how}; {gpu(*rows)}.\n" if rows else ""


TABLES: Mapping[str, Callable[[], str]] = {
    "lu-gpu": times,
    "lu-gpu-calls": called,
    "lu-gpu-verdicts": verdicts,
    "lu-gpu-solutions": solutions,
    "lu-gpu-structured": structured,
    "lu-gpu-repair": repair,
    "lu-gpu-phases": phases,
}
