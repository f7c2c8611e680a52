"""Calls in a loop: the time from the first call until the last product is there, by the host's clock, of 200 plain and
200 protected products of square matrices.

    python -m benchmarks.bench_calls                      NumPy, ten minutes on two cores: numpy.matmul; protected, and
                                                          with B encoded beforehand
    python -m benchmarks.bench_calls --device             CuPy, on the GPU that is present, four minutes: cupy.matmul;
                                                          protected without a wait, with the verdict read after each
                                                          call, with B encoded, and not verified again; CUDA graphs of
                                                          100 plain and 100 protected products, launched twice
    python -m benchmarks.bench_calls --quick              three sizes in few rounds, a minute each
    python -m benchmarks.bench_calls --only "float32 256" the cells whose name contains the text; repeatable
    python -m benchmarks.bench_calls --list               names of the cells; needs no GPU

A loop on a CPU has fewer calls where 200 would take more than 1.5 seconds; float16 ends at 512 and bfloat16 at 2048
there, for NumPy multiplies them without BLAS. The column `calls` has the number.

Rows go to results/calls.csv and calls_gpu.csv, those of --quick to calls_quick.csv and calls_gpu_quick.csv, each as
soon as its size is done: an interrupted run keeps what it has. With --only they are appended. The exit code is 1 if a
product was wrong or failed, or a report did not say CLEAN; 2 if nothing was measured; 130 after an interrupt.
`python -m benchmarks.tables` and `python -m benchmarks.figures calls` make tables and a figure.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from abft_tsm2.errors import NotSuitable
from benchmarks import calls_cpu, sheet, suite
from benchmarks.calls_gpu import CallsSuite, QuickCalls
from benchmarks.calls_grid import CPU, FILES, GPU, Cell, grid


def chosen(cells: tuple[Cell, ...], only: list[str], *, quick: bool) -> list[Cell]:
    """Those of the subset, or whose name contains one of the texts."""
    if only:
        return [cell for cell in cells if any(text in str(cell) for text in only)]
    return [cell for cell in cells if cell.quick or not quick]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", action="store_true", help="measure on a GPU")
    parser.add_argument("--quick", action="store_true", help="three sizes, few rounds; with --only: few rounds")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cells whose name contains TEXT")
    parser.add_argument("--list", action="store_true", help="print the names of the chosen cells and stop")
    parser.add_argument("--limit-seconds", type=float, default=math.inf, metavar="S", help="begin nothing new near S")
    parser.add_argument("--append", action="store_true", help="keep the CSV's rows; as with --only")
    parser.add_argument("--output", type=Path, metavar="CSV", help="default: the file of benchmarks/results")
    parser.set_defaults(suite=[], torch=False)
    options = parser.parse_args(arguments)
    library = GPU if options.device else CPU
    cells = chosen(grid(library), options.only, quick=options.quick)
    if not cells:
        names = ", ".join(dict.fromkeys(cell.variant for cell in grid(library)))
        print(f"no cell of {library} is named like {' or '.join(options.only)}: a name is library, type, size and one")
        print(f"of {names}; --list{' --device' * options.device} has all")
        return 2
    if options.list:
        print(*cells, sep="\n")
        return 0
    options.output = options.output or sheet.RESULTS / f"{FILES[library]}{'_quick' * options.quick}.csv"
    try:
        if options.device:
            return suite.run(QuickCalls if options.quick else CallsSuite, cells, options)
        loops, append = calls_cpu.Loops(quick=options.quick), options.append or bool(options.only)
        return calls_cpu.run(cells, options.output, loops, append=append, limit=options.limit_seconds)
    except NotSuitable as reason:
        print(f"nothing can be measured here: {reason}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
