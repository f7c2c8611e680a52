"""Share of the measured reading rate that TSM2R, cuBLAS and CuPy reach, for each n (the paper's bandwidth figures).

    python -m benchmarks.paper.bandwidth

Bytes are the least that have to move: A and B read once, C written once.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.contenders import CUPY
from benchmarks.paper import figure

SHARE = "share_of_ceiling"


def draw(source: Path | None, target: Path) -> None:
    cells = figure.cells("tsm2r", source)
    dtypes, widths = figure.distinct(cells, "dtype"), figure.distinct(cells, "n")
    picture, axes = figure.panels(len(dtypes), len(widths))
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, n in zip(row, widths, strict=True):
            shown = [cell for _, cell in figure.subset(cells, dtype=dtype, n=n)]
            series = {
                "TSM2R V3": [figure.value(cell, "V3", SHARE) for cell in shown],
                "best cuBLAS": [figure.best_vendor(cell, SHARE) for cell in shown],
                "CuPy's A @ B": [figure.value(cell, CUPY, SHARE) for cell in shown],
            }
            labels = [figure.one(cell)["m"] for cell in shown]
            figure.bars(axis, labels, series, title=f"{dtype}, n = {n}", unit="share of the reading rate", line=1)
    rate = float(figure.one(cells[0][1])["ceiling_gbs"])
    title = f"TSM2R, m = k: memory bandwidth, of {rate:.0f} GB/s measured in the same run"
    figure.finish(picture, axes, title, figure.one(cells[0][1]), target)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("bandwidth", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
