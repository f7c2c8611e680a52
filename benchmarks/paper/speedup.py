"""Speedup of TSM2R over the best cuBLAS and over CuPy's A @ B, for each n (the paper's figures for K40c and V100).

python -m benchmarks.paper.speedup
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.paper import figure


def draw(source: Path | None, target: Path) -> None:
    cells = figure.cells("tsm2r", source)
    picture, axes = figure.by_type_and_width(
        cells,
        lambda shown: {
            "V3 over the best cuBLAS": [figure.value(cell, "V3", "speedup") for cell in shown],
            "V3 over CuPy's A @ B": [figure.value(cell, "V3", "speedup_cupy") for cell in shown],
        },
        "speedup",
    )
    figure.finish(picture, axes, "TSM2R, m = k, published parameters", figure.one(cells[0][1]), target)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("speedup", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
