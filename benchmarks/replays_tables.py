"""The table of replays, from results/replays.csv, for `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.markup import csv_table, gpu
from benchmarks.sheet import read


def replays() -> str:
    """Replays of captured products, clean ones and with planted faults, by type."""
    rows = read("replays")
    head = (
        "products",
        "n",
        "replays",
        "judged",
        "faults planted",
        "repaired",
        "wrong elements",
        "suspicions",
        "closest",
    )
    kinds = {(row["dtype"], row["faults"]): None for row in rows}
    lines = []
    for dtype, faults in kinds:
        those = [row for row in rows if (row["dtype"], row["faults"]) == (dtype, faults)]
        sizes = ", ".join(row["n"] for row in those)
        counts = (sum(int(row[x]) for row in those) for x in COUNTS)
        closest = max(float(row["closest"]) for row in those)
        lines.append((dtype, sizes, *map(str, counts), f"{closest:.2f}"))
    return csv_table(head, lines) + "\n" + gpu(rows[0]) + "\n"


COUNTS = ("replays", "judged", "planted", "repaired", "wrong", "suspicions")
TABLES: dict[str, Callable[[], str]] = {"replays": replays}
