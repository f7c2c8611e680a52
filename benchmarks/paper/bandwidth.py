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
    picture, axes = figure.by_type_and_width(
        cells,
        lambda shown: {
            "TSM2R V3": [figure.value(cell, "V3", SHARE) for cell in shown],
            "best cuBLAS": [figure.best_vendor(cell, SHARE) for cell in shown],
            "CuPy's A @ B": [figure.value(cell, CUPY, SHARE) for cell in shown],
        },
        "share of the reading rate",
    )
    rate = float(figure.one(cells[0][1])["ceiling_gbs"])
    title = f"TSM2R, m = k: memory bandwidth, of {rate:.0f} GB/s measured in the same run"
    figure.finish(picture, axes, title, figure.one(cells[0][1]), target)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("bandwidth", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
