"""Tables of protected factorisations, from results/lu.csv, for `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.bench_lu import PHASES
from benchmarks.tables import Row, csv_table, number, percent, ratio, read

ORDERS = {"C": "by rows", "F": "by columns"}


def latest(suite: str, path: Path | None = None) -> list[Row]:
    """The last row of each matrix of a suite, in the order in which they were first measured."""
    found: dict[tuple[str, ...], Row] = {}
    for row in read("lu", path):
        if row["suite"] == suite:
            found[tuple(row[key] for key in ("dtype", "order", "n", "fault"))] = row
    return sorted(found.values(), key=lambda row: (row["dtype"] != "float64", row["order"], int(row["n"])))


def name(row: Row) -> str:
    """Type, size and order of a matrix."""
    return f"{row['dtype']} {row['n']} x {row['n']}, {ORDERS[row['order']]}"


def times() -> str:
    """Factorisations and solutions, relative to SciPy's; then those of definite matrices."""
    rows = latest("factor")
    head = (
        *("lu_factor", "SciPy, ms", "the same blocks, x SciPy", "target", "checked in every step, x SciPy", "checks"),
        *("target", "checked at the end, x SciPy", "target", "chosen, x SciPy"),
    )
    body = [
        (
            *(name(row), _number(row, "scipy_ms"), ratio(row["unprotected"]), ratio(row["unprotected_bar"])),
            *(ratio(row["online"]), percent(row["checks"]), percent(row["checks_bar"] or "nan")),
            *(ratio(row["offline"]), ratio(row["offline_bar"]), ratio(row["auto"])),
        )
        for row in rows
    ]
    solved = [
        (name(row), _number(row, "scipy_ms"), _number(row, "auto_ms"), ratio(row["auto"])) for row in latest("solve")
    ]
    definite = [
        (
            *(name(row), *(_number(row, f"{way}_ms") for way in ("scipy", "unprotected", "online"))),
            *(ratio(row["online"]), percent(row["checks"])),
        )
        for row in latest("cholesky")
    ]
    below = {
        ("solve, one right-hand side", "SciPy, ms", "protected, ms", "x SciPy"): solved,
        ("cholesky", "SciPy, ms", "the same blocks, ms", "checked in every step, ms", "x SciPy", "checks"): definite,
    }
    return "\n".join([csv_table(head, body), *(csv_table(*table) for table in below.items() if table[1])]) + _footer(
        rows
    )


def phases() -> str:
    """What each part of a factorisation takes that is checked in every step."""
    rows = latest("factor")
    shown = [phase for phase in PHASES if any(float(row[f"{phase}_ms"] or 0) for row in rows)]
    body = [(name(row), _number(row, "online_ms"), *(_number(row, f"{phase}_ms") for phase in shown)) for row in rows]
    return csv_table(("lu_factor", "all, ms", *(f"{phase}, ms" for phase in shown)), body) + _footer(rows)


def repair() -> str:
    """What one fault adds."""
    rows = latest("repair")
    body = [
        (f"{name(row)}, {row['fault']}", _number(row, "online_ms"), _number(row, "repair_ms"), percent(row["repair"]))
        for row in rows
    ]
    head = ("lu_factor, where a bit is flipped halfway", "without a fault, ms", "repair, ms", "repair")
    return csv_table(head, body) + _footer(rows)


def _number(row: Row, column: str) -> str:
    if row["error"]:
        return "wrong"
    return number(row[column]) if row[column] else ""


def _footer(rows: list[Row]) -> str:
    return f"\nMedians of interleaved rounds; {where(rows[-1])}.\n" if rows else ""


def where(row: Row) -> str:
    """What a row was measured on."""
    versions = f"NumPy {row['numpy']}, SciPy {row['scipy']}, Python {row['python']}"
    return f"{row['device']}, {row['cores']} cores, {versions}"


TABLES: Mapping[str, Callable[[], str]] = {
    "lu": times,
    "lu-phases": phases,
    "lu-repair": repair,
}
