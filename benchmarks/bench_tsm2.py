"""Tall-skinny products against cuBLAS, CuPy and the memory of the card that is present.

    python -m benchmarks.bench_tsm2                         the default subset, within 4 minutes on an H200
    python -m benchmarks.bench_tsm2 --full                  the whole grid, within 10 minutes
    python -m benchmarks.bench_tsm2 --suite rows            one suite; repeatable
    python -m benchmarks.bench_tsm2 --only "rows float64"   the cells whose name contains the text; repeatable
    python -m benchmarks.bench_tsm2 --list                  names of the cells; needs no GPU
    python -m benchmarks.bench_tsm2 --paper                 the paper's kernels on its grid; the same options

Suites are those of `benchmarks.stream_grid`: `tall_skinny_matmul` and `encode_both` as they are called, everything
that a call does included. Operands are uniform in [0, 1), as in the paper, where products are timed; normally
distributed ones are multiplied once more, to be judged. Every timed output is compared with a product in more
precision, element by element.

Each row goes to the CSV as soon as its cell is done: an interrupted run keeps what it has. The exit code is 1 if
a product was wrong or failed, or a bar is missed; 130 after an interrupt. `python -m benchmarks.tables`,
`python -m benchmarks.stream_figure` and the scripts of `benchmarks/paper` make tables and figures of it.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from abft_tsm2.errors import NotSuitable
from benchmarks import stream_grid, tables, tsm2_grid
from benchmarks.campaign import run
from benchmarks.paper_suites import PaperCampaign
from benchmarks.stream_suites import StreamCampaign


def _chosen(options: argparse.Namespace) -> list[Any]:
    everything = tsm2_grid.grid() if options.paper else stream_grid.grid()
    cells = [cell for cell in everything if options.full or options.only or cell.default]
    cells = [cell for cell in cells if not options.suite or cell.suite in options.suite]
    return [cell for cell in cells if not options.only or any(text in str(cell) for text in options.only)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = sorted({*stream_grid.SUITES, *tsm2_grid.SUITES})
    made.add_argument("--paper", action="store_true", help="the paper's kernels on the paper's grid")
    made.add_argument("--full", action="store_true", help="all cells, not the default subset")
    made.add_argument("--suite", action="append", default=[], choices=suites, metavar="NAME", help=", ".join(suites))
    made.add_argument("--only", action="append", default=[], metavar="TEXT", help="cells whose name contains TEXT")
    made.add_argument("--list", action="store_true", help="print the names of the chosen cells and stop")
    made.add_argument("--limit-seconds", type=float, default=math.inf, metavar="S", help="begin nothing new near S")
    made.add_argument("--append", action="store_true", help="keep the CSV's rows; as with --only and --suite")
    made.add_argument("--no-torch", dest="torch", action="store_false", help="leave out cuBLAS through PyTorch")
    made.add_argument("--output", type=Path, metavar="CSV", help="default: results/stream.csv; tsm2.csv with --paper")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.output is None:
        options.output = tables.RESULTS / ("tsm2.csv" if options.paper else "stream.csv")
    cells = _chosen(options)
    if not cells:
        print(f"no cell is named like {' or '.join((*options.suite, *options.only))}: --list --full names all")
        return 2
    if options.list:
        for cell in cells:
            print(cell)
        return 0
    try:
        return run(PaperCampaign if options.paper else StreamCampaign, cells, options)
    except NotSuitable as reason:
        print(f"nothing can be measured here: {reason}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
