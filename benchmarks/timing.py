"""The only stopwatch, and the list of products that are timed."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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


def paired(calls: Mapping[str, Call], pairs: int) -> dict[str, list[float]]:
    """Seconds of each call, `pairs` times, interleaved so that all of them see the same machine.

    Each round makes every call once, starting with another one each time; a round before the first warms up.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, pairs):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
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


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "device": _processor(),
        "cores": str(_cores()),
        "threads": _blas_threads(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _blas_threads() -> str:
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or "default"
    return "/".join(sorted({str(pool["num_threads"]) for pool in threadpool_info() if pool["user_api"] == "blas"}))
