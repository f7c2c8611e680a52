"""The products of `benchmarks.timing` under pytest-benchmark: plain, protected, and with B encoded
beforehand.

    pytest benchmarks/bench_gemm.py                              all
    pytest benchmarks/bench_gemm.py -k "float32 and 2048"        some
    pytest benchmarks/bench_gemm.py --benchmark-json out.json    for pytest-benchmark compare

`python -m benchmarks.overhead` measures the same products pair by pair, which on a busy machine is the fairer
comparison, and writes the CSV behind the README's table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import encode, protected_gemm
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
