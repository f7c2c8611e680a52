"""Memory bandwidth where k is small (the paper's figure that motivates TSM2L).

python -m benchmarks.paper.small_k
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.paper import figure


def draw(source: Path | None, target: Path) -> None:
    cells = figure.cells("small_k", source)
    dtypes = figure.distinct(cells, "dtype")
    picture, axes = figure.panels(len(dtypes), 1)
    picture.set_figwidth(7)
    for (axis,), dtype in zip(axes, dtypes, strict=True):
        shown = [cell for _, cell in figure.subset(cells, dtype=dtype)]
        names = {"V3": "TSM2R V3", "Opt-1": "TSM2L Opt-1", "Opt-2": "TSM2L Opt-2"}
        series = {label: [figure.value(cell, name, "gbs") for cell in shown] for name, label in names.items()}
        series["best cuBLAS"] = [figure.best_vendor(cell, "gbs") for cell in shown]
        labels = [figure.one(cell)["k"] for cell in shown]
        figure.bars(axis, labels, series, title=f"{dtype}, by k", unit="GB/s")
    row = figure.one(cells[0][1])
    title = f"Memory bandwidth at small k, m = {row['m']}, n = {row['n']}"
    figure.finish(picture, axes, title, row, target)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("small_k", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
