"""Share of the read rate against the columns of B, by order and type: `tall_skinny_matmul`, and the best cuBLAS dashed.

    python -m benchmarks.stream_figure

It is drawn from results/stream.csv, which `python -m benchmarks.bench_tsm2` writes, and needs matplotlib and no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.paper import figure
from benchmarks.stream_grid import ORDERS, SQUARE, TYPES
from benchmarks.stream_tables import latest, own, types
from benchmarks.tables import Row

Lines = Mapping[int, Row]
"""The rows of this package's function by the number of columns of B."""


def draw(source: Path | None, target: Path) -> None:
    cells = [row for row in (own(rows) for rows in latest(ORDERS, source).values()) if row["ms"]]
    if not cells:
        raise ValueError("there are no times: run python -m benchmarks.bench_tsm2 --suite rows --suite columns")
    kinds = [
        (dtype, out) for dtype, out, _ in TYPES if any((row["dtype"], row["out"]) == (dtype, out) for row in cells)
    ]
    orders = [order for order in ORDERS if any(row["order"] == order for row in cells)]
    picture, axes = figure.panels(len(kinds), len(orders))
    for line, kind in zip(axes, kinds, strict=True):
        for axis, order in zip(line, orders, strict=True):
            shown = [row for row in cells if (row["dtype"], row["out"], row["order"]) == (*kind, order)]
            _panel(axis, shown, f"{order}: {types({'dtype': kind[0], 'out': kind[1]})}")
    title = "tall_skinny_matmul, m = k; dashed: the best cuBLAS"
    figure.finish(picture, axes, title, cells[0], target)


def _panel(axis: Any, rows: list[Row], title: str) -> None:
    for m, colour in zip(SQUARE, figure.COLOURS, strict=False):
        by_width = {int(row["n"]): row for row in sorted(rows, key=lambda row: int(row["n"])) if row["m"] == str(m)}
        ours = {n: float(row["share_of_ceiling"]) for n, row in by_width.items()}
        vendor = {n: ours[n] / float(row["speedup"]) for n, row in by_width.items() if row["speedup"]}
        axis.plot(list(ours), list(ours.values()), color=colour, marker="o", markersize=3, label=f"m = {m}")
        axis.plot(list(vendor), list(vendor.values()), color=colour, linestyle="--", linewidth=1)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axis.set_ylim(0, 1.05)
    axis.set_title(title)
    axis.set_xlabel("n")
    axis.set_ylabel("share of the read rate")
    axis.grid(linewidth=0.3)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("stream", __doc__, draw, arguments, results="stream.csv")


if __name__ == "__main__":
    sys.exit(main())
