"""Tightness of the bounds: bound / largest residual of a clean product, over the generic families.

    python -m benchmarks.tightness                     256 to 2048 square, about three minutes on two cores

The smaller the ratio, the smaller the changes that are found; at 1 rounding alone would raise a suspicion.
Prints a table, writes results/tightness.csv; the exit code is 1 where the median over families and sizes is
above its bar.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from typing import Any

import numpy as np

from abft_tsm2 import protected_gemm
from benchmarks import families, sheet

SIZES = (256, 512, 1024, 2048)
BARS = {"float32": 8.0, "float64": 6.0}


def measure(family: str, n: int, dtype: str, seed: int = 0) -> dict[str, Any]:
    """Bound over largest clean residual of one n x n x n product."""
    rng = np.random.default_rng([seed, n])
    a, b = families.operands(family, n, n, n, rng, np.dtype(dtype))
    _, report = protected_gemm(a, b, return_report=True, on_error="detect")
    ratio = 1 / report.closest if report.closest else math.inf
    return {"dtype": dtype, "n": n, "family": family, "status": report.status.name, "ratio": round(ratio, 3)}


def median(rows: list[dict[str, Any]], dtype: str) -> float:
    """Median ratio of the rows of one type; NaN, which keeps no bar, where there is none."""
    ratios = [row["ratio"] for row in rows if row["dtype"] == dtype]
    return statistics.median(ratios) if ratios else math.nan


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="tightness", metavar="NAME", help="results/NAME.csv")
    options = parser.parse_args(arguments)
    rows = []
    for dtype in BARS:
        for n in options.sizes:
            new = [measure(family, n, dtype, options.seed) for family in families.names("generic")]
            rows += new
            low, *_, high = sorted((row["ratio"], row["family"]) for row in new)
            print(
                f"{dtype} {n:5d}: median {median(new, dtype):5.2f}, "
                f"from {low[0]:.2f} ({low[1]}) to {high[0]:.2f} ({high[1]})",
                flush=True,
            )
    sheet.write(options.output, rows)
    for dtype, bar in BARS.items():
        print(f"{dtype}: median {median(rows, dtype):.2f} (bar {bar:g})")
    return 0 if all(median(rows, dtype) <= bar for dtype, bar in BARS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
