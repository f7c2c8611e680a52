"""Overhead of protected_gemm on a GPU against the size of square matrices, by type; dashed, what it costs to read A, B
and C once at the read rate of the run.

    python -m benchmarks.gemm_figure

It is drawn from results/gemm_device.csv, which `python -m benchmarks.bench_gemm --device --full` writes, and needs
matplotlib and no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gemm_device import ONE
from benchmarks.gemm_tables import latest
from benchmarks.paper import figure

TYPES = ("float32", "float64", "float16", "bfloat16")


def draw(source: Path | None, target: Path) -> None:
    rows = [row for row in latest("square", source) if row["variant"] == ONE and row["overhead_pct"]]
    rows = [row for row in rows if not row["error"]]
    if not rows:
        raise ValueError("there are no times: run python -m benchmarks.bench_gemm --device --full")
    picture, axes = figure.panels(1, 1)
    picture.set_size_inches(6, 4.5)
    axis = axes[0][0]
    for dtype, colour in zip(TYPES, figure.COLOURS, strict=False):
        of_type = {int(row["n"]): row for row in rows if row["dtype"] == dtype}
        if not of_type:
            continue
        for column, style in (("overhead_pct", "-"), ("floor_pct", "--")):
            # What noise makes zero or less has no place on a logarithmic axis.
            line = {n: float(row[column]) for n, row in of_type.items() if float(row[column]) > 0}
            label, marker = (dtype, "o") if style == "-" else (None, None)
            axis.plot(list(line), list(line.values()), style, color=colour, label=label, marker=marker, markersize=3)
    sizes = sorted({int(row["n"]) for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axis.set_xlabel("m = k = n")
    axis.set_ylabel("overhead")
    axis.grid(which="both", linewidth=0.3)
    figure.finish(picture, axes, "protected_gemm over cuBLAS; dashed: A, B and C read once", rows[0], target)


def main(arguments: list[str] | None = None) -> int:
    return figure.run("gemm", __doc__, draw, arguments, results="gemm_device.csv")


if __name__ == "__main__":
    sys.exit(main())
