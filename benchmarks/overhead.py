"""Overhead of protected_gemm over A @ B on a CPU, interleaved in one process, on random operands.

    python -m benchmarks.overhead                      all products, about ten minutes on two cores
    python -m benchmarks.overhead --only 2048          those whose name contains 2048

Prints a table and writes results/overhead.csv; the exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from typing import Any

import numpy as np

from abft_tsm2 import encode, protected_gemm
from benchmarks import sheet
from benchmarks.timing import PROBLEMS, Problem, machine, overhead, paired

BARS = {
    ("float64", 2048): 0.07,
    ("float64", 4096): 0.03,
    ("float32", 2048): 0.12,
    ("float32", 4096): 0.06,
}
"""Largest overhead of a square product; with B encoded beforehand, two thirds of it."""

STEPS = ("encode", "multiply", "verify", "correct")


def measure(problem: Problem) -> dict[str, Any]:
    """One row of the table: medians of the seconds, overheads, and the share of each step."""
    a, b = problem.operands()
    encoded = encode(b, side="rows")
    trusted = encode(b, side="rows", recheck=False)
    same_product(a @ b, protected_gemm(a, b))
    same_product(a @ b, protected_gemm(a, encoded))
    steps: list[dict[str, float]] = []

    def protected() -> Any:
        c, report = protected_gemm(a, b, return_report=True)
        steps.append(dict(report.seconds))
        return c

    calls = {"plain": lambda: a @ b, "protected": protected, "encoded": lambda: protected_gemm(a, encoded)}
    calls["trusted"] = lambda: protected_gemm(a, trusted)
    seconds = paired(calls, problem.pairs)
    plain = statistics.median(seconds["plain"])
    bar = BARS.get((problem.dtype, problem.m), math.nan) if problem.m == problem.k == problem.n else math.nan
    return {
        "dtype": problem.dtype,
        "m": problem.m,
        "k": problem.k,
        "n": problem.n,
        "pairs": problem.pairs,
        **{f"{name}_ms": round(1e3 * statistics.median(times), 4) for name, times in seconds.items()},
        "gflops": round(2e-9 * problem.m * problem.k * problem.n / plain, 2),
        "overhead": round(overhead(seconds, "protected", "plain"), 5),
        "bar": bar,
        "overhead_encoded": round(overhead(seconds, "encoded", "plain"), 5),
        "bar_encoded": round(bar * 2 / 3, 5),
        "overhead_trusted": round(overhead(seconds, "trusted", "plain"), 5),
        **{f"{step}_ms": _median_ms(steps, step) for step in STEPS},
    }


def same_product(plain: np.ndarray, protected: np.ndarray) -> None:
    """Both sides must have done the same work: equal results but for rounding."""
    k_terms = 64 * float(np.finfo(plain.dtype).eps) * float(abs(plain).max())
    np.testing.assert_allclose(protected, plain, rtol=0, atol=k_terms)


def met(row: dict[str, Any]) -> bool:
    """Whether a row keeps its bars; a row without bars does."""
    pairs = (("overhead", "bar"), ("overhead_encoded", "bar_encoded"))
    return all(math.isnan(row[bar]) or row[value] <= row[bar] for value, bar in pairs)


def line(problem: Problem, row: dict[str, Any]) -> str:
    """The row as one line of text."""
    text = f"{problem!s:28s} plain {row['plain_ms']:9.2f} ms"
    for name, value, bar in (
        ("protected", "overhead", "bar"),
        ("B encoded", "overhead_encoded", "bar_encoded"),
    ):
        text += f"  {name} {row[value]:+7.1%}" + ("" if math.isnan(row[bar]) else f" (bar {row[bar]:.1%})")
    return text if met(row) else f"{text}  BAR MISSED"


def _median_ms(steps: list[dict[str, float]], step: str) -> float:
    times = [taken[step] for taken in steps if step in taken]
    return round(1e3 * statistics.median(times), 4) if times else 0.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="products whose name contains TEXT")
    parser.add_argument("--output", default="overhead", metavar="NAME", help="results/NAME.csv")
    options = parser.parse_args(arguments)
    rows = []
    for problem in PROBLEMS:
        if options.only not in str(problem):
            continue
        row = measure(problem)
        rows.append(row)
        print(line(problem, row), flush=True)
    if not rows:
        print(f"no product is named like {options.only!r}; there are {', '.join(map(str, PROBLEMS))}")
        return 2
    sheet.write(options.output, [{**row, **machine()} for row in rows])
    return 0 if all(map(met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
