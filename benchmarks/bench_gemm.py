"""Protected products beside plain ones: on a CPU, those of `benchmarks.timing` under pytest-benchmark, also with B
encoded beforehand; with --device, those of `benchmarks.gemm_device` on the GPU that is present.

    pytest benchmarks/bench_gemm.py                              CPU, all
    pytest benchmarks/bench_gemm.py -k "float32 and 2048"        some
    pytest benchmarks/bench_gemm.py --benchmark-json out.json    for pytest-benchmark compare

    python -m benchmarks.bench_gemm --device                     GPU, a subset within one minute on an H200
    python -m benchmarks.bench_gemm --device --full              the whole grid, within five
    python -m benchmarks.bench_gemm --device --only bfloat16     the cells whose name contains the text; repeatable
    python -m benchmarks.bench_gemm --device --list              names of the cells; needs no GPU

`python -m benchmarks.overhead` measures the CPU's products pair by pair, which on a busy machine is the fairer
comparison, and writes the CSV behind the tables.

On a GPU each row goes to results/gemm_device.csv as soon as its cell is done: an interrupted run keeps what it has.
The exit code is 1 if a product was wrong or failed, a report did not say what it should, or a bar is missed; 130 after
an interrupt. `python -m benchmarks.tables` and `python -m benchmarks.gemm_figure` make tables and a figure.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import encode, protected_gemm
from abft_tsm2.errors import NotSuitable
from benchmarks import gemm_device, tables
from benchmarks.campaign import run
from benchmarks.gemm_suites import GemmCampaign
from benchmarks.timing import PROBLEMS, Problem, machine

WAYS: dict[str, Callable[[np.ndarray, np.ndarray], Callable[[], Any]]] = {
    "plain": lambda a, b: lambda: a @ b,
    "protected": lambda a, b: lambda: protected_gemm(a, b),
    "encoded": lambda a, b: partial(protected_gemm, a, encode(b, side="rows")),
}
operands = lru_cache(maxsize=1)(Problem.operands)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: str(problem).replace(" ", "-"))
def test_gemm(benchmark: Any, problem: Problem, way: str) -> None:
    call = WAYS[way](*operands(problem))
    benchmark.group = str(problem)
    benchmark.extra_info.update(machine(), flops=2 * problem.m * problem.k * problem.n)
    result = benchmark.pedantic(call, rounds=problem.pairs, warmup_rounds=1)
    assert result.shape == (problem.m, problem.n)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", action="store_true", help="measure on a GPU; the CPU is pytest's")
    made.add_argument("--full", action="store_true", help="all cells, not the default subset")
    made.add_argument("--only", action="append", default=[], metavar="TEXT", help="cells whose name contains TEXT")
    made.add_argument("--list", action="store_true", help="print the names of the chosen cells and stop")
    made.add_argument("--limit-seconds", type=float, default=math.inf, metavar="S", help="begin nothing new near S")
    made.add_argument("--append", action="store_true", help="keep the CSV's rows; as with --only")
    made.add_argument("--output", type=Path, default=tables.RESULTS / "gemm_device.csv", metavar="PATH")
    made.set_defaults(suite=[], torch=False)
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not options.device:
        print("--device measures on a GPU; products on the CPU are timed by: pytest benchmarks/bench_gemm.py")
        return 2
    cells = [cell for cell in gemm_device.grid() if options.full or options.only or cell.default]
    cells = [cell for cell in cells if not options.only or any(text in str(cell) for text in options.only)]
    if not cells:
        print(f"no cell is named like {' or '.join(options.only)}: --device --list --full names all")
        return 2
    if options.list:
        print(*cells, sep="\n")
        return 0
    try:
        return run(GemmCampaign, cells, options)
    except NotSuitable as reason:
        print(f"nothing can be measured here: {reason}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
