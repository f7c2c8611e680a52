"""The stopwatch of a CPU, statistics of times, and the products that are timed on a CPU.

Calls on a GPU are timed by `benchmarks.gpu_timing`, which takes its statistics from here.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.io.versions import cores, processor

Call = Callable[[], Any]


@dataclass(frozen=True)
class Problem:
    """One product to time: A is m x k, B is k x n, and how many pairs the median is taken over."""

    m: int
    k: int
    n: int
    dtype: str
    pairs: int = 15

    def __str__(self) -> str:
        return f"{self.dtype} {self.m}x{self.k}x{self.n}"

    def operands(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Normal random A and B, in C order."""
        rng = np.random.default_rng(seed)
        a, b = (rng.standard_normal(shape).astype(self.dtype) for shape in ((self.m, self.k), (self.k, self.n)))
        return a, b


SHAPES = (
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (32768, 512, 512),  # tall A
    (512, 512, 32768),  # wide B
    (512, 32768, 512),  # long sums
    (4096, 4096, 64),  # a few columns: the passes of the check read as much as the product
    (64, 4096, 4096),
)
PROBLEMS = tuple(
    Problem(*shape, dtype, pairs={(2048,) * 3: 81, (4096,) * 3: 61}.get(shape, 25))
    for dtype in ("float64", "float32")
    for shape in SHAPES
)


def paired(calls: Mapping[str, Call], pairs: int, before: Call = lambda: None) -> dict[str, list[float]]:
    """Seconds of each call, `pairs` times, interleaved so that all of them see the same machine.

    Each round makes every call once, starting with another one each time; a round before the first warms up. What is
    done `before` each call is not part of its time.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, pairs):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            before()
            start = time.perf_counter()
            result = calls[name]()
            took = time.perf_counter() - start
            del result  # freeing it is not part of the next call
            if number >= 0:
                seconds[name].append(took)
    return seconds


def overhead(seconds: Mapping[str, list[float]], name: str, base: str) -> float:
    """Median over the rounds of `name` / `base` - 1: a slow phase of the machine slows both of a pair."""
    return statistics.median(x / y for x, y in zip(seconds[name], seconds[base], strict=True)) - 1


@dataclass(frozen=True)
class Summary:
    """What repeated times of one call say; all in the unit of the times.

    Attributes
    ----------
    median, lower_quartile, upper_quartile : float
        The spread is between the quartiles.
    low, high : float
        A confidence interval of the median.
    coverage : float
        The probability with which that interval holds the true median: at least what was asked for, except where there
        are too few times for it (below 6 for 95 %).
    count : int
        How many times there are.
    """

    median: float
    lower_quartile: float
    upper_quartile: float
    low: float
    high: float
    coverage: float
    count: int


def summary(times: Sequence[float], confidence: float = 0.95) -> Summary:
    """Median, quartiles, and a confidence interval of the median that assumes no distribution.

    Parameters
    ----------
    times : sequence of float, at least one
    confidence : float
        Between 0 and 1.

    Raises
    ------
    ValueError
        Without times, or if one is not finite.

    Notes
    -----
    Of n independent times the i-th smallest and the i-th largest enclose the median with probability
    1 - 2 P(Bin(n, 1/2) < i), whatever their distribution: the interval takes the largest i that suffices. H. A. David
    and H. N. Nagaraja, Order Statistics, 3rd edition, 2003, section 7.1.

    Examples
    --------
    >>> summary([3.0, 1.0, 2.0, 5.0, 4.0, 7.0, 6.0]).median
    4.0
    """
    ordered = sorted(times)
    count = len(ordered)
    if not count or not all(map(math.isfinite, ordered)):
        raise ValueError(f"a summary needs finite times, at least one; there are {list(times)!r}: measure again")
    rank, outside = 1, 2 / 2**count  # of integers: they may be larger than any float
    while rank < (count + 1) // 2:
        wider = outside + 2 * math.comb(count, rank) / 2**count
        if 1 - wider < confidence:
            break
        rank, outside = rank + 1, wider
    if count == 1:
        lower = upper = ordered[0]
    else:
        lower, _, upper = statistics.quantiles(ordered, n=4, method="inclusive")
    median = statistics.median(ordered)
    return Summary(median, lower, upper, ordered[rank - 1], ordered[-rank], max(0.0, 1 - outside), count)


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "device": processor(),
        "cores": str(cores()),
        "threads": _blas_threads(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
    }


def _blas_threads() -> str:
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or "default"
    return "/".join(sorted({str(pool["num_threads"]) for pool in threadpool_info() if pool["user_api"] == "blas"}))
