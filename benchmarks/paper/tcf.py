"""TSM2L over the thread count factor tcf: speedup over the best cuBLAS and share of the copy rate (the paper's figure).

python -m benchmarks.paper.tcf
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.paper import figure


def draw(source: Path | None, target: Path) -> None:
    cells = figure.cells("tcf", source)
    picture, axes = figure.panels(len(cells), len(figure.RELATIVE))
    for row, (_, cell) in zip(axes, cells, strict=True):
        factors = sorted({int(entry["tcf"]) for entry in cell.values() if entry["config"]})
        for axis, (column, unit) in zip(row, figure.RELATIVE.items(), strict=True):
            series = {
                variant: [figure.value(cell, f"{variant} tcf {factor}", column) for factor in factors]
                for variant in ("Opt-1", "Opt-2")
            }
            title = f"{figure.one(cell)['dtype']}, by tcf"
            figure.bars(axis, [str(factor) for factor in factors], series, title=title, unit=unit, line=1)
    row = figure.one(cells[0][1])
    title = f"TSM2L, m = {row['m']}, k = {row['k']}, n = {row['n']}"
    figure.finish(picture, axes, title, row, target)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("tcf", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
