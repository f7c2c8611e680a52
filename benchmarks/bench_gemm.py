"""Protected products beside plain ones: on a CPU, those of `benchmarks.timing` under pytest-benchmark, also with B
encoded beforehand; with --device, those of `benchmarks.gemm_grid` on the GPU that is present.

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
an interrupt. `python -m benchmarks.tables` and `python -m benchmarks.figures gemm` make tables and a figure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import encode, protected_gemm
from benchmarks import gemm_grid, sheet, suite
from benchmarks.gemm_suite import GemmSuite
from benchmarks.timing import PROBLEMS, Problem, machine

CALLS: dict[str, Callable[[np.ndarray, np.ndarray], Callable[[], Any]]] = {
    "plain": lambda a, b: lambda: a @ b,
    "protected": lambda a, b: lambda: protected_gemm(a, b),
    "encoded": lambda a, b: partial(protected_gemm, a, encode(b, side="rows")),
}
operands = lru_cache(maxsize=1)(Problem.operands)


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: str(problem).replace(" ", "-"))
def test_gemm(benchmark: Any, problem: Problem, kind: str) -> None:
    call = CALLS[kind](*operands(problem))
    benchmark.group = str(problem)
    benchmark.extra_info.update(machine(), flops=2 * problem.m * problem.k * problem.n)
    result = benchmark.pedantic(call, rounds=problem.pairs, warmup_rounds=1)
    assert result.shape == (problem.m, problem.n)


def main(arguments: list[str] | None = None) -> int:
    parser = suite.parser(__doc__)
    parser.add_argument("--device", action="store_true", help="measure on a GPU; the CPU is pytest's")
    options = parser.parse_args(arguments)
    if not options.device:
        print("--device measures on a GPU; products on the CPU are timed by: pytest benchmarks/bench_gemm.py")
        return 2
    options.output = options.output or sheet.RESULTS / "gemm_device.csv"
    return suite.main(GemmSuite, gemm_grid.grid(), options)


if __name__ == "__main__":
    sys.exit(main())
