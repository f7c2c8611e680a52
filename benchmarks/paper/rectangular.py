"""TSM2R where A has fewer columns than rows: k = m, m / 2, m / 4, m / 8 (the paper's figure for rectangular input).

python -m benchmarks.paper.rectangular
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.paper import figure


def draw(source: Path | None, target: Path) -> None:
    cells = figure.cells("rectangular", source)
    dtypes = figure.distinct(cells, "dtype")
    picture, axes = figure.panels(len(dtypes), 2)
    for (left, right), dtype in zip(axes, dtypes, strict=True):
        shown = [cell for _, cell in figure.subset(cells, dtype=dtype)]
        labels = [figure.one(cell)["k"] for cell in shown]
        share = "share_of_ceiling"
        speedup = {"TSM2R V3": [figure.value(cell, "V3", "speedup") for cell in shown]}
        figure.bars(left, labels, speedup, title=f"{dtype}, by k", unit="speedup over the best cuBLAS", line=1)
        shares = {
            "TSM2R V3": [figure.value(cell, "V3", share) for cell in shown],
            "best cuBLAS": [figure.best_vendor(cell, share) for cell in shown],
        }
        figure.bars(right, labels, shares, title=f"{dtype}, by k", unit="share of the reading rate", line=1)
    row = figure.one(cells[0][1])
    title = f"TSM2R with rectangular A, m = {row['m']}, n = {row['n']}"
    figure.finish(picture, axes[:, ::-1], title, row, target)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("rectangular", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
