"""Speedup of TSM2R over the best cuBLAS and over CuPy's A @ B, for each n (the paper's figures for K40c and V100).

python -m benchmarks.paper.speedup
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.paper import figure


def draw(source: Path | None, target: Path) -> None:
    cells = figure.cells("tsm2r", source)
    dtypes, widths = figure.distinct(cells, "dtype"), figure.distinct(cells, "n")
    picture, axes = figure.panels(len(dtypes), len(widths))
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, n in zip(row, widths, strict=True):
            shown = [cell for _, cell in figure.subset(cells, dtype=dtype, n=n)]
            series = {
                "V3 over the best cuBLAS": [figure.value(cell, "V3", "speedup") for cell in shown],
                "V3 over CuPy's A @ B": [figure.value(cell, "V3", "speedup_cupy") for cell in shown],
            }
            labels = [figure.one(cell)["m"] for cell in shown]
            figure.bars(axis, labels, series, title=f"{dtype}, n = {n}", unit="speedup", line=1)
    figure.finish(picture, axes, "TSM2R, m = k, published parameters", figure.one(cells[0][1]), target)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("speedup", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
