"""TSM2L: speedup over the best cuBLAS and share of the measured copy rate, k = n = 8 and 16 (the paper's two figures).

python -m benchmarks.paper.tall
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.paper import figure


def draw(source: Path | None, target: Path) -> None:
    cells = figure.cells("tsm2l", source)
    dtypes, widths = figure.distinct(cells, "dtype"), figure.distinct(cells, "n")
    picture, axes = figure.panels(len(figure.RELATIVE), len(dtypes) * len(widths))
    kinds = [(dtype, n) for dtype in dtypes for n in widths]
    for row, (column, unit) in zip(axes, figure.RELATIVE.items(), strict=True):
        for axis, (dtype, n) in zip(row, kinds, strict=True):
            shown = [cell for _, cell in figure.subset(cells, dtype=dtype, n=n)]
            series = {
                "Opt-1, published": [figure.value(cell, "Opt-1", column) for cell in shown],
                "Opt-2, published": [figure.value(cell, "Opt-2", column) for cell in shown],
                "best of a sweep": [figure.best_kernel(cell, column) for cell in shown],
            }
            if column == "share_of_ceiling":
                series["best cuBLAS"] = [figure.best_vendor(cell, column) for cell in shown]
            labels = [f"{int(figure.one(cell)['m']):.0e}".replace("e+0", "e") for cell in shown]
            figure.bars(axis, labels, series, title=f"{dtype}, k = n = {n}", unit=unit, line=1)
    # The last row has all the series: its legend serves both.
    title = "TSM2L, operands outside of the cache"
    figure.finish(picture, axes[::-1], title, figure.one(cells[0][1]), target)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("tall", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
