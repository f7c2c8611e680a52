"""What each step of TSM2R gains, V0 to V1 to V2 to V3, beside the range that the paper gives for a K40c.

python -m benchmarks.paper.ladder
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.paper import figure

STEPS = {
    "V1": ("outer product, V1 over V0", (2.2, 4.7)),
    "V2": ("shared memory, V2 over V1", (1.1, 2.1)),
    "V3": ("prefetch, V3 over V2", (1.3, 3.5)),
}
"""The paper's ranges on a K40c, section 4.2.1."""


def draw(source: Path | None, target: Path) -> None:
    cells = figure.cells("tsm2r", source)
    dtypes, widths = figure.distinct(cells, "dtype"), figure.distinct(cells, "n")
    picture, axes = figure.panels(len(dtypes), len(STEPS))
    for row, dtype in zip(axes, dtypes, strict=True):
        of_type = figure.subset(cells, dtype=dtype)
        sizes = figure.distinct(of_type, "m")
        for axis, (variant, (step, (lowest, highest))) in zip(row, STEPS.items(), strict=True):
            found = {(figure.one(cell)["n"], figure.one(cell)["m"]): cell for _, cell in of_type}
            series = {f"m = {m}": [figure.value(found.get((n, m), {}), variant, "gain") for n in widths] for m in sizes}
            axis.axhspan(lowest, highest, color="#dddddd", zorder=0)
            figure.bars(axis, widths, series, title=f"{dtype}: {step}", unit="gain, by n", line=1)
    title = "The ladder of TSM2R, m = k; grey: the paper's range on a K40c"
    figure.finish(picture, axes, title, figure.one(cells[0][1]), target)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("ladder", __doc__, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
