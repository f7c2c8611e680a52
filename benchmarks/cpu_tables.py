"""Tables of what runs on a CPU: the overhead of protected products, and how tight their bounds are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from benchmarks.markup import csv_table, groups_of, number, percent
from benchmarks.sheet import Row, read


def overhead() -> str:
    """Overhead of protected_gemm, with the machine it was measured on."""
    rows = read("overhead")
    head = (
        "A @ B",
        "plain, ms",
        "protected",
        "target",
        "B encoded",
        "target",
        "not rechecked",
        "encode, ms",
        "verify, ms",
    )
    body = [
        (
            f"{row['dtype']} {row['m']} x {row['k']} x {row['n']}",
            number(row["plain_ms"]),
            percent(row["overhead"]),
            percent(row["bar"]),
            percent(row["overhead_encoded"]),
            percent(row["bar_encoded"]),
            percent(row["overhead_trusted"]),
            number(row["encode_ms"]),
            number(row["verify_ms"]),
        )
        for row in rows
    ]
    return f"{csv_table(head, body)}\nMedians of interleaved pairs; {where(rows[0])}.\n"


def where(row: Row) -> str:
    """What a row of overhead.csv was measured on."""
    return f"{row['device']}, {row['cores']} cores, {row['blas']}, NumPy {row['numpy']}, Python {row['python']}"


def tightness() -> str:
    """Median of bound / largest clean residual by type and size."""
    rows = read("tightness")
    head = ("type", "size", "median bound / residual", "smallest", "largest")
    body = []
    for (dtype, n), group in groups_of(rows, "dtype", "n"):
        ratios = sorted(float(row["ratio"]) for row in group)
        body.append((dtype, n, f"{median(ratios):.1f}", f"{ratios[0]:.1f}", f"{ratios[-1]:.1f}"))
    return csv_table(head, body)


TABLES: Mapping[str, Callable[[], str]] = {"overhead": overhead, "tightness": tightness}
