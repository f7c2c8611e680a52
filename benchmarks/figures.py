"""Figures of the measured numbers, from results/*.csv: the paper's, for the card of tsm2.csv, and those of stream.csv,
gemm_device.csv, calls.csv, calls_gpu.csv, lu.csv and lu_gpu.csv. They need matplotlib and no GPU.

    python -m benchmarks.figures                       all of them, into docs/figures
    python -m benchmarks.figures speedup ladder        these
    python -m benchmarks.figures gemm --input other.csv --output gemm.png

bandwidth    share of the measured reading rate that TSM2R, cuBLAS and CuPy reach, for each n; bytes are the least
             that have to move: A and B read once, C written once
calls        overhead of loops of protected_gemm against the size of square matrices, by type: NumPy, CuPy, and
             CUDA graphs; dashed, the floor of reading A, B and C once; points of no overhead are left out. With
             --input: of one of both CSVs
gemm         overhead of protected_gemm on a GPU against the size of square matrices, by type; dashed, what it costs to
             read A, B and C once at the read rate of the run
ladder       what each step of TSM2R gains, V0 to V1 to V2 to V3, beside the range that the paper gives for a K40c
lu           time of protected factorisations relative to SciPy's lu_factor, by type and order
lu_gpu       the same on a GPU, relative to cuSOLVER's getrf, by type; dotted, the bars of the one checked in every step
rectangular  TSM2R where A has fewer columns than rows: k = m, m / 2, m / 4, m / 8
small_k      memory bandwidth where k is small (the paper's figure that motivates TSM2L)
speedup      speedup of TSM2R over the best cuBLAS and over CuPy's A @ B, for each n
stream       share of the read rate against the columns of B, by order and type; dashed, the best cuBLAS
tall         TSM2L: speedup over the best cuBLAS and share of the measured copy rate, k = n = 8 and 16
tcf          the same over the thread count factor tcf
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import calls_tables, gemm_tables, lu_gpu_tables, lu_tables, stream_tables
from benchmarks.calls_grid import CPU, DEFERRED, GPU, GRAPH, PROTECTED
from benchmarks.gemm_grid import ONE
from benchmarks.markup import gpu
from benchmarks.sheet import Row
from benchmarks.stream_grid import CUPY, ORDERS, SQUARE, TYPES
from benchmarks.tsm2_tables import latest

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
COLOURS = ("#1f4e79", "#c8590b", "#7f9f3f", "#8064a2", "#4bacc6", "#7f7f7f")
RELATIVE = {"speedup": "speedup over the best cuBLAS", "share_of_ceiling": "share of the copy rate"}
"""Columns of TSM2L's figures, and what they are called."""

SHARE = "share_of_ceiling"
STEPS = {
    "V1": ("outer product, V1 over V0", (2.2, 4.7)),
    "V2": ("shared memory, V2 over V1", (1.1, 2.1)),
    "V3": ("prefetch, V3 over V2", (1.3, 3.5)),
}
"""The paper's ranges on a K40c, section 4.2.1."""

CALL_PANELS = {CPU: {PROTECTED: "NumPy"}, GPU: {DEFERRED: "CuPy, not waited for", GRAPH: "CuPy, a CUDA graph"}}
PROTECTED_LU = {
    "unprotected": "the same blocks, no checks",
    "online": "checked in every step",
    "offline": "checked at the end",
    "auto": "chosen",
}
PROTECTED_LU_ON_GPU = {
    "unprotected": "the same without checks",
    "offline": "certified at the end",
    "online": "checked in every step",
}
GEMM_TYPES = ("float32", "float64", "float16", "bfloat16")

Cell = Mapping[str, Row]
"""The last row of each contender of a product, by its name."""

Series = Mapping[str, Sequence[float | None]]
Drawn = tuple[Any, Any, str, str]
"""A figure, its axes, the title, and what the numbers were measured on."""


# ---- rows ---------------------------------------------------------------------------------------------------------


def cells(suite: str, path: Path | None) -> list[Cell]:
    """Cells of a suite of the paper's grid that have times.

    Raises
    ------
    ValueError
        If there are none.
    """
    timed = [{name: row for name, row in cell.items() if row["ms"]} for _, cell in latest(suite, path)]
    if not any(timed):
        raise ValueError(
            f"there are no times of {suite!r}: run python -m benchmarks.bench_tsm2 --paper --suite {suite}"
        )
    return [cell for cell in timed if cell]


def one(cell: Cell) -> Row:
    """Any row of a cell: all of them name the same product and card."""
    return next(iter(cell.values()))


def card(found: Sequence[Cell]) -> str:
    """What the rows of cells were measured on."""
    return gpu(*(row for cell in found for row in cell.values()))


def value(cell: Cell, contender: str, column: str) -> float | None:
    """A number of a contender's row; None where there is none."""
    text = cell.get(contender, {}).get(column, "")
    return float(text) if text else None


def best_vendor(cell: Cell, column: str) -> float | None:
    """A number of the fastest contender through cuBLAS."""
    return value(cell, one(cell)["best_cublas"], column)


def best_kernel(cell: Cell, column: str) -> float | None:
    """A number of the fastest of the paper's kernels."""
    ours = [row for row in cell.values() if row["t1"]]
    return float(min(ours, key=lambda row: float(row["ms"]))[column] or "nan") if ours else None


def subset(all_cells: Sequence[Cell], **wanted: Any) -> list[Cell]:
    """The cells whose columns have these values."""
    return [cell for cell in all_cells if all(one(cell)[key] == str(x) for key, x in wanted.items())]


def distinct(all_cells: Sequence[Cell], column: str) -> list[str]:
    """The values of a column, numbers in their order."""
    found = {one(cell)[column] for cell in all_cells}
    return sorted(found, key=lambda text: (int(text), "") if text.isdigit() else (0, text))


# ---- axes ---------------------------------------------------------------------------------------------------------


def panels(rows: int, columns: int) -> tuple[Any, Any]:
    """A figure and its axes, rows x columns, drawn without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "abft_tsm2", "font.size": 8, "axes.axisbelow": True})
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(2.9 * columns + 0.6, 2.3 * rows + 0.9), squeeze=False)


def by_type_and_width(
    all_cells: Sequence[Cell], series: Callable[[Sequence[Cell]], Series], unit: str
) -> tuple[Any, Any]:
    """A panel for each type and n, bars by m."""
    dtypes, widths = distinct(all_cells, "dtype"), distinct(all_cells, "n")
    figure, axes = panels(len(dtypes), len(widths))
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, n in zip(row, widths, strict=True):
            shown = subset(all_cells, dtype=dtype, n=n)
            bars(axis, [one(cell)["m"] for cell in shown], series(shown), f"{dtype}, n = {n}", unit)
    return figure, axes


def bars(axis: Any, labels: Sequence[str], series: Series, title: str, unit: str, line: float | None = 1) -> None:
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


def by_size(axis: Any, sizes: Sequence[int], title: str, x: str, y: str) -> None:
    """Labels of an axis of sizes in powers of two, and a line at 1."""
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(linewidth=0.3)


# ---- the paper's figures ------------------------------------------------------------------------------------------


def bandwidth(source: Path | None) -> Drawn:
    found = cells("tsm2r", source)
    figure, axes = by_type_and_width(
        found,
        lambda shown: {
            "TSM2R V3": [value(cell, "V3", SHARE) for cell in shown],
            "best cuBLAS": [best_vendor(cell, SHARE) for cell in shown],
            "CuPy's A @ B": [value(cell, CUPY, SHARE) for cell in shown],
        },
        "share of the reading rate",
    )
    row = one(found[0])
    title = f"TSM2R, m = k: memory bandwidth, of {float(row['ceiling_gbs']):.0f} GB/s measured in the same run"
    return figure, axes, title, card(found)


def ladder(source: Path | None) -> Drawn:
    found = cells("tsm2r", source)
    dtypes, widths = distinct(found, "dtype"), distinct(found, "n")
    figure, axes = panels(len(dtypes), len(STEPS))
    for row, dtype in zip(axes, dtypes, strict=True):
        of_type = subset(found, dtype=dtype)
        at = {(one(cell)["n"], one(cell)["m"]): cell for cell in of_type}
        for axis, (variant, (step, (lowest, highest))) in zip(row, STEPS.items(), strict=True):
            series = {
                f"m = {m}": [value(at.get((n, m), {}), variant, "gain") for n in widths] for m in distinct(of_type, "m")
            }
            axis.axhspan(lowest, highest, color="#dddddd", zorder=0)
            bars(axis, widths, series, f"{dtype}: {step}", "gain, by n")
    return figure, axes, "The ladder of TSM2R, m = k; grey: the paper's range on a K40c", card(found)


def rectangular(source: Path | None) -> Drawn:
    found = cells("rectangular", source)
    dtypes = distinct(found, "dtype")
    figure, axes = panels(len(dtypes), 2)
    for (left, right), dtype in zip(axes, dtypes, strict=True):
        shown = subset(found, dtype=dtype)
        labels = [one(cell)["k"] for cell in shown]
        speedups = {"TSM2R V3": [value(cell, "V3", "speedup") for cell in shown]}
        bars(left, labels, speedups, f"{dtype}, by k", "speedup over the best cuBLAS")
        shares = {
            "TSM2R V3": [value(cell, "V3", SHARE) for cell in shown],
            "best cuBLAS": [best_vendor(cell, SHARE) for cell in shown],
        }
        bars(right, labels, shares, f"{dtype}, by k", "share of the reading rate")
    row = one(found[0])
    return figure, axes[:, ::-1], f"TSM2R with rectangular A, m = {row['m']}, n = {row['n']}", card(found)


def small_k(source: Path | None) -> Drawn:
    found = cells("small_k", source)
    dtypes = distinct(found, "dtype")
    figure, axes = panels(len(dtypes), 1)
    figure.set_figwidth(7)
    for (axis,), dtype in zip(axes, dtypes, strict=True):
        shown = subset(found, dtype=dtype)
        names = {"V3": "TSM2R V3", "Opt-1": "TSM2L Opt-1", "Opt-2": "TSM2L Opt-2"}
        series = {label: [value(cell, name, "gbs") for cell in shown] for name, label in names.items()}
        series["best cuBLAS"] = [best_vendor(cell, "gbs") for cell in shown]
        bars(axis, [one(cell)["k"] for cell in shown], series, f"{dtype}, by k", "GB/s", line=None)
    row = one(found[0])
    return figure, axes, f"Memory bandwidth at small k, m = {row['m']}, n = {row['n']}", card(found)


def speedup(source: Path | None) -> Drawn:
    found = cells("tsm2r", source)
    figure, axes = by_type_and_width(
        found,
        lambda shown: {
            "V3 over the best cuBLAS": [value(cell, "V3", "speedup") for cell in shown],
            "V3 over CuPy's A @ B": [value(cell, "V3", "speedup_cupy") for cell in shown],
        },
        "speedup",
    )
    return figure, axes, "TSM2R, m = k, published parameters", card(found)


def tall(source: Path | None) -> Drawn:
    found = cells("tsm2l", source)
    kinds = [(dtype, n) for dtype in distinct(found, "dtype") for n in distinct(found, "n")]
    figure, axes = panels(len(RELATIVE), len(kinds))
    for row, (column, unit) in zip(axes, RELATIVE.items(), strict=True):
        for axis, (dtype, n) in zip(row, kinds, strict=True):
            shown = subset(found, dtype=dtype, n=n)
            series = {
                "Opt-1, published": [value(cell, "Opt-1", column) for cell in shown],
                "Opt-2, published": [value(cell, "Opt-2", column) for cell in shown],
                "best of a sweep": [best_kernel(cell, column) for cell in shown],
            }
            if column == SHARE:
                series["best cuBLAS"] = [best_vendor(cell, column) for cell in shown]
            labels = [f"{int(one(cell)['m']):.0e}".replace("e+0", "e") for cell in shown]
            bars(axis, labels, series, f"{dtype}, k = n = {n}", unit)
    # The last row has all the series: its legend serves both.
    return figure, axes[::-1], "TSM2L, operands outside of the cache", card(found)


def tcf(source: Path | None) -> Drawn:
    found = cells("tcf", source)
    figure, axes = panels(len(found), len(RELATIVE))
    for row, cell in zip(axes, found, strict=True):
        factors = sorted({int(entry["tcf"]) for entry in cell.values() if entry["config"]})
        for axis, (column, unit) in zip(row, RELATIVE.items(), strict=True):
            series = {
                variant: [value(cell, f"{variant} tcf {factor}", column) for factor in factors]
                for variant in ("Opt-1", "Opt-2")
            }
            bars(axis, [str(factor) for factor in factors], series, f"{one(cell)['dtype']}, by tcf", unit)
    first = one(found[0])
    return figure, axes, f"TSM2L, m = {first['m']}, k = {first['k']}, n = {first['n']}", card(found)


# ---- this package's figures ---------------------------------------------------------------------------------------


def stream(source: Path | None) -> Drawn:
    found = [stream_tables.own(rows) for rows in stream_tables.latest(ORDERS, source).values()]
    found = [row for row in found if row["ms"]]
    if not found:
        raise ValueError("there are no times: run python -m benchmarks.bench_tsm2 --suite rows --suite columns")
    kinds = [kind[:2] for kind in TYPES if any((row["dtype"], row["out"]) == kind[:2] for row in found)]
    orders = [order for order in ORDERS if any(row["order"] == order for row in found)]
    figure, axes = panels(len(kinds), len(orders))
    for line, (dtype, out) in zip(axes, kinds, strict=True):
        for axis, order in zip(line, orders, strict=True):
            shown = [row for row in found if (row["dtype"], row["out"], row["order"]) == (dtype, out, order)]
            for m, colour in zip(SQUARE, COLOURS, strict=False):
                of_size = sorted((row for row in shown if row["m"] == str(m)), key=lambda row: int(row["n"]))
                ours = {int(row["n"]): float(row[SHARE]) for row in of_size}
                vendor = {int(r["n"]): float(r[SHARE]) / float(r["speedup"]) for r in of_size if r["speedup"]}
                axis.plot(list(ours), list(ours.values()), color=colour, marker="o", markersize=3, label=f"m = {m}")
                axis.plot(list(vendor), list(vendor.values()), color=colour, linestyle="--", linewidth=1)
            title = f"{order}: {stream_tables.types({'dtype': dtype, 'out': out})}"
            by_size(axis, (1, 2, 4, 8, 16), title, "n", "share of the read rate")
            axis.set_ylim(0, 1.05)
    return figure, axes, "tall_skinny_matmul, m = k; dashed: the best cuBLAS", gpu(*found)


def gemm(source: Path | None) -> Drawn:
    rows = [row for row in gemm_tables.latest("square", source) if row["variant"] == ONE and row["overhead_pct"]]
    rows = [row for row in rows if not row["error"]]
    if not rows:
        raise ValueError("there are no times: run python -m benchmarks.bench_gemm --device --full")
    figure, axes = panels(1, 1)
    figure.set_size_inches(6, 4.5)
    by_type(axes[0][0], rows, "overhead")
    return figure, axes, "protected_gemm over cuBLAS; dashed: A, B and C read once", gpu(*rows)


def calls(source: Path | None) -> Drawn:
    drawn: list[tuple[str, list[Row]]] = []
    where = []
    for library, variants in CALL_PANELS.items():
        rows = [row for row in calls_tables.latest(library, source) if row["overhead_pct"] and not row["error"]]
        of_variants = [(title, [row for row in rows if row["variant"] == name]) for name, title in variants.items()]
        drawn += [(title, shown) for title, shown in of_variants if shown]
        where += [calls_tables.where(library, *rows)] if rows else []
    if not drawn:
        raise ValueError("there are no times: run python -m benchmarks.bench_calls, with and without --device")
    figure, axes = panels(1, len(drawn))
    figure.set_figheight(4)
    for axis, (title, rows) in zip(axes[0], drawn, strict=True):
        by_type(axis, rows, "overhead of a loop of calls")
        axis.set_title(title)
        axis.tick_params(axis="x", rotation=45)
    # A legend for all panels: types that one of them lacks are in another.
    most = max(range(len(drawn)), key=lambda i: len(axes[0][i].get_legend_handles_labels()[0]))
    first = [[axes[0][most], *(axis for axis in axes[0] if axis is not axes[0][most])]]
    return figure, first, "Calls in a loop; dashed: A, B and C read once", "\n".join(where)


def by_type(axis: Any, rows: Sequence[Row], name: str) -> None:
    """A line of the overhead for each type, and a dashed one of the floor, over the size on logarithmic axes."""
    for dtype, colour in zip(GEMM_TYPES, COLOURS, strict=False):
        of_type = {int(row["n"]): row for row in rows if row["dtype"] == dtype}
        for column, style in (("overhead_pct", "-"), ("floor_pct", "--")) if of_type else ():
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
    axis.set_ylabel(name)
    axis.grid(which="both", linewidth=0.3)


def lu(source: Path | None) -> Drawn:
    rows = [row for row in lu_tables.latest("factor", source) if not row["error"]]
    if not rows:
        raise ValueError("there are no times: run python -m benchmarks.bench_lu")
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = panels(len(dtypes), len(lu_tables.ORDERS))
    for line, dtype in zip(axes, dtypes, strict=True):
        for axis, (order, name) in zip(line, lu_tables.ORDERS.items(), strict=True):
            shown = [row for row in rows if (row["dtype"], row["order"]) == (dtype, order)]
            sizes = [int(row["n"]) for row in shown]
            for (method, label), colour in zip(PROTECTED_LU.items(), COLOURS, strict=False):
                times = [float(row[method]) for row in shown]
                axis.plot(sizes, times, color=colour, marker="o", markersize=3, label=label)
            by_size(axis, sizes, f"{dtype}, {name}", "n", "time / SciPy's")
            axis.minorticks_off()
            axis.set_ylim(bottom=0)
    return figure, axes, "protected_lu_factor beside scipy.linalg.lu_factor", lu_tables.where(rows[-1])


def lu_gpu(source: Path | None) -> Drawn:
    rows = [row for row in lu_gpu_tables.latest("factor", source) if row["online"] and row["order"] == "F"]
    rows = [row for row in rows if not row["error"]]
    if not rows:
        raise ValueError("there are no times: run python -m benchmarks.bench_lu_gpu")
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = panels(1, len(dtypes))
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        shown = [row for row in rows if row["dtype"] == dtype]
        for (method, label), colour in zip(PROTECTED_LU_ON_GPU.items(), COLOURS, strict=False):
            line = {int(row["n"]): float(row[method]) for row in shown if row[method]}
            axis.plot(list(line), list(line.values()), color=colour, marker="o", markersize=3, label=label)
        limits = {int(row["n"]): float(row["online_bar"]) for row in shown if row["online_bar"]}
        axis.plot(list(limits), list(limits.values()), color="black", linestyle=":", linewidth=0.8)
        by_size(axis, sorted(limits), dtype, "n", "time / cuSOLVER's")
        axis.minorticks_off()
        axis.tick_params(axis="x", rotation=45)
        axis.set_ylim(bottom=0)
    return figure, axes, "protected_lu_factor on a GPU beside cuSOLVER's getrf; dotted: the bars", gpu(*rows)


DRAWN: Mapping[str, Callable[[Path | None], Drawn]] = {
    draw.__name__: draw
    for draw in (bandwidth, calls, gemm, ladder, lu, lu_gpu, rectangular, small_k, speedup, stream, tall, tcf)
}


def finish(figure: Any, axes: Any, title: str, where: str, path: Path) -> None:
    """Add title and legend, one for all panels, and write the file; its bytes depend on the numbers alone."""
    from matplotlib import pyplot

    handles, names = axes[0][0].get_legend_handles_labels()
    lines = 1 + (max(map(len, names)) > 20 and len(names) > 3)
    figure.legend(handles, names, loc="lower center", ncols=-(-len(names) // lines), frameon=False)
    figure.suptitle(f"{title}\n{where}")
    figure.tight_layout(rect=(0, 0.03 + 0.03 * lines, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    print(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the list above; all where none is given")
    parser.add_argument("--input", type=Path, metavar="CSV", help="default: the file of benchmarks/results")
    parser.add_argument("--output", type=Path, metavar="FILE", help=".svg or .png; default: docs/figures/NAME.svg")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(DRAWN):
        parser.error(f"there is no figure {', '.join(sorted(unknown))}: choose from {', '.join(DRAWN)}")
    names = options.names or list(DRAWN)
    if len(names) > 1 and (options.input or options.output):
        parser.error("--input and --output are of one figure: name it")
    try:
        for name in names:
            finish(*DRAWN[name](options.input), options.output or FIGURES / f"{name}.svg")
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
