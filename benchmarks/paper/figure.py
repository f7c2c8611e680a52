"""What the figures of this folder share: the rows they show, bars side by side, and a file that is always the same.

Each script beside this one makes one figure of the paper for the card of results/tsm2.csv, which
`python -m benchmarks.bench_tsm2 --paper` writes; they need matplotlib and no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tables

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
Cells = Sequence[tuple[str, Mapping[str, tables.Row]]]
Series = Mapping[str, Sequence[float | None]]
RELATIVE = {"speedup": "speedup over the best cuBLAS", "share_of_ceiling": "share of the copy rate"}
"""Columns of TSM2L's figures, and what they are called."""
COLOURS = ("#1f4e79", "#c8590b", "#7f9f3f", "#8064a2", "#4bacc6", "#7f7f7f")


def cells(suite: str, path: Path | None) -> list[tuple[str, dict[str, tables.Row]]]:
    """Cells of a suite that have times, each contender's last row by its name.

    Raises
    ------
    ValueError
        If there are none.
    """
    timed = [
        (label, {name: row for name, row in cell.items() if row["ms"]}) for label, cell in tables.latest(suite, path)
    ]
    found = [(label, cell) for label, cell in timed if cell]
    if not found:
        raise ValueError(
            f"there are no times of {suite!r}: run python -m benchmarks.bench_tsm2 --paper --suite {suite}"
        )
    return found


def one(cell: Mapping[str, tables.Row]) -> tables.Row:
    """Any row of a cell: all of them name the same product and card."""
    return next(iter(cell.values()))


def value(cell: Mapping[str, tables.Row], contender: str, column: str) -> float | None:
    """A number of a contender's row; None where there is none."""
    text = cell.get(contender, {}).get(column, "")
    return float(text) if text else None


def best_vendor(cell: Mapping[str, tables.Row], column: str) -> float | None:
    """A number of the fastest way through cuBLAS."""
    return value(cell, one(cell)["best_cublas"], column)


def best_kernel(cell: Mapping[str, tables.Row], column: str) -> float | None:
    """A number of the fastest of the paper's kernels."""
    ours = [row for row in cell.values() if row["t1"]]
    return float(min(ours, key=lambda row: float(row["ms"]))[column] or "nan") if ours else None


def subset(all_cells: Cells, **wanted: Any) -> list[tuple[str, Mapping[str, tables.Row]]]:
    """The cells whose columns have these values."""
    return [(label, cell) for label, cell in all_cells if all(one(cell)[key] == str(x) for key, x in wanted.items())]


def distinct(all_cells: Cells, column: str) -> list[str]:
    """The values of a column, numbers in their order."""
    found = {one(cell)[column] for _, cell in all_cells}
    return sorted(found, key=lambda text: (int(text), "") if text.isdigit() else (0, text))


def panels(rows: int, columns: int) -> tuple[Any, Any]:
    """A figure and its axes, rows x columns, drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "abft_tsm2", "font.size": 8, "axes.axisbelow": True})
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(2.9 * columns + 0.6, 2.3 * rows + 0.9), squeeze=False)


def by_type_and_width(
    all_cells: Cells, series: Callable[[Sequence[Mapping[str, tables.Row]]], Series], unit: str
) -> tuple[Any, Any]:
    """A panel for each type and n, bars by m."""
    dtypes, widths = distinct(all_cells, "dtype"), distinct(all_cells, "n")
    figure, axes = panels(len(dtypes), len(widths))
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, n in zip(row, widths, strict=True):
            shown = [cell for _, cell in subset(all_cells, dtype=dtype, n=n)]
            labels = [one(cell)["m"] for cell in shown]
            bars(axis, labels, series(shown), title=f"{dtype}, n = {n}", unit=unit, line=1)
    return figure, axes


def bars(axis: Any, labels: Sequence[str], series: Series, *, title: str, unit: str, line: float | None = None) -> None:
    """Groups of bars, one group a label and one bar a series; what was not measured has no bar."""
    width = 0.8 / max(1, len(series))
    for number, (name, heights) in enumerate(series.items()):
        at = [(place + (number - (len(series) - 1) / 2) * width, x) for place, x in enumerate(heights) if x is not None]
        colour = COLOURS[number % len(COLOURS)]
        axis.bar([x for x, _ in at], [height for _, height in at], width, label=name, color=colour)
    if line is not None:
        axis.axhline(line, color="black", linewidth=0.8)
    axis.set_xticks(range(len(labels)), labels)
    axis.set_title(title)
    axis.set_ylabel(unit)
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", linewidth=0.3)


def finish(figure: Any, axes: Any, title: str, row: Mapping[str, str], path: Path) -> None:
    """Title with the card, one legend for all panels, and the file; its bytes depend on the numbers alone."""
    from matplotlib import pyplot

    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=len(names), frameon=False)
    figure.suptitle(f"{title}\n{tables.gpu(row)}")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    print(path)


def run(
    name: str,
    text: str | None,
    draw: Callable[[Path | None, Path], None],
    arguments: list[str] | None,
    *,
    results: str = "tsm2.csv",
) -> int:
    """The command line of every script that draws one figure of one file of results."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, metavar="CSV", help=f"default: results/{results}")
    parser.add_argument(
        "--output", type=Path, default=FIGURES / f"{name}.svg", metavar="FILE", help=".svg or .png; %(default)s"
    )
    options = parser.parse_args(arguments)
    try:
        draw(options.input, options.output)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
