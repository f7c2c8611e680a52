"""Time of protected factorisations relative to SciPy's lu_factor against the size of the matrix, by way; a panel for
each type and order.

    python -m benchmarks.lu_figure

It is drawn from results/lu.csv, which `python -m benchmarks.bench_lu` writes, and needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.lu_tables import ORDERS, latest, where
from benchmarks.paper import figure
from benchmarks.tables import Row

LINES = {
    "unprotected": "the same blocks, no checks",
    "online": "checked in every step",
    "offline": "checked at the end",
    "auto": "chosen",
}


def draw(source: Path | None, target: Path) -> None:
    rows = [row for row in latest("factor", source) if not row["error"]]
    if not rows:
        raise ValueError("there are no times: run python -m benchmarks.bench_lu")
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    picture, axes = figure.panels(len(dtypes), len(ORDERS))
    for line, dtype in zip(axes, dtypes, strict=True):
        for axis, (order, name) in zip(line, ORDERS.items(), strict=True):
            shown = [row for row in rows if (row["dtype"], row["order"]) == (dtype, order)]
            _panel(axis, shown, f"{dtype}, {name}")
    _finish(picture, axes, rows[-1], target)


def _panel(axis: Any, rows: list[Row], title: str) -> None:
    sizes = [int(row["n"]) for row in rows]
    for (way, label), colour in zip(LINES.items(), figure.COLOURS, strict=False):
        axis.plot(sizes, [float(row[way]) for row in rows], color=colour, marker="o", markersize=3, label=label)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)
    axis.set_title(title)
    axis.set_xlabel("n")
    axis.set_ylabel("time / SciPy's")
    axis.grid(linewidth=0.3)


def _finish(picture: Any, axes: Any, row: Row, target: Path) -> None:
    """As `figure.finish` does, with a processor in the title; the bytes of the file depend on the numbers alone."""
    from matplotlib import pyplot

    handles, names = axes[0][0].get_legend_handles_labels()
    picture.legend(handles, names, loc="lower center", ncols=2, frameon=False)
    picture.suptitle(f"protected_lu_factor beside scipy.linalg.lu_factor\n{where(row)}")
    picture.tight_layout(rect=(0, 0.09, 1, 1))
    target.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    pyplot.close(picture)
    print(target)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("lu", __doc__, draw, arguments, results="lu.csv")


if __name__ == "__main__":
    sys.exit(main())
