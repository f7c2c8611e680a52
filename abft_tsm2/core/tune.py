"""Which kernel, and with which parameters: by the shape, and by what was measured.

`choose` decides without measuring anything. `modelled` takes t2 and t3 from the paper's model; `profile_t1` and
`profile_tcf` measure the two parameters that the model leaves to profiling (C. Rivera et al., TSM2X, 2021, "Deciding
Parameters" and "Proposed Optimizations").
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from abft_tsm2.core import model
from abft_tsm2.core.config import (
    BYTES,
    PAPER_T1,
    T1,
    T2,
    T3,
    TCF,
    TSM2L,
    Config,
    Problem,
    choices,
    fitting,
    is_valid,
    published,
)
from abft_tsm2.core.device import Device, query
from abft_tsm2.core.launch import run
from abft_tsm2.errors import NotSuitable

COLUMNS = 64  # more columns of B than that are no longer few: the vendor's product is made for them
ROWS = 16  # with no more rows of B than that a thread of TSM2R has too little to do
BLOCKS = 2  # of TSM2L on a multiprocessor, before a thread gets more rows of C
# Cards on which cuBLAS was measured to be ahead of V3, but for products of at least so many rows with at most so many
# columns (benchmarks/results/tsm2.csv).
V3_AHEAD = {
    ("NVIDIA H200", "float32"): (40960, 4),
    ("NVIDIA H200", "float64"): (math.inf, 0),
}


@functools.lru_cache(4096)
def choose(problem: Problem, device: Device) -> tuple[Config, ...]:
    """The configurations to try for a problem, best first; none where the vendor library is the better choice.

    Parameters
    ----------
    problem : Problem
    device : Device

    Returns
    -------
    configs : tuple of Config
        Each of them can serve the problem.

    Notes
    -----
    By shape: m much larger than k and n, both few, is TSM2L's case; few columns of B is TSM2R's. Elsewhere, and where
    it was measured to be ahead, the vendor library is the better choice.
    """
    m, k, n = problem.m, problem.k, problem.n
    if problem.dtype not in BYTES or n > COLUMNS or m < 4 * min(k, n):
        return ()
    if k <= ROWS:
        config = streaming(problem, device)
    else:
        rows, columns = V3_AHEAD.get((device.name, problem.dtype), (0, n))
        if m < rows or n > columns:
            return ()
        config = published(problem, "V3")
    return (config,) if is_valid(problem, config, device) else ()


def modelled(problem: Problem, device: Device) -> Config:
    """V3 with t2 and t3 from the paper's model (Algorithm 5), and t1 = 128, rounded to a kernel that exists.

    The next larger t3 is taken, because fewer loads under way than the model asks for leave bandwidth unused; and of t2
    the nearest.
    """
    asked = model.optimise(problem, device, model.WELL_POSED)
    kernels = [c for c in choices(device, variant="V3", dtype=problem.dtype) if c.t1 == PAPER_T1]
    return min(kernels, key=lambda c: (c.t3 < asked.t3, abs(c.t2 - asked.t2), abs(c.t3 - asked.t3)))


def streaming(problem: Problem, device: Device) -> Config:
    """Opt-2 that loads a row of A at once, in a thread as many rows as leave every multiprocessor enough blocks.

    t2 is the first that n fits into, t3 the first that k fits into. So chosen it was the fastest of both variants on an
    H200 for k = n = 8 and 16, or within some per cent of it (benchmarks/results/tsm2.csv).
    """
    t2, t3 = fitting(T2[1:], problem.n), fitting(T3["tsm2l", problem.dtype], problem.k)
    enough = BLOCKS * device.multiprocessors * PAPER_T1
    tcf = max((tcf for tcf in TCF if tcf <= 8 and problem.m >= tcf * enough), default=1)
    return Config("Opt-2", problem.dtype, PAPER_T1, t2, t3, tcf)


def profile_t1(problem: Problem, *, config: Config | None = None, repeats: int = 10) -> Mapping[int, float]:
    """Milliseconds of a product for every t1 that can be chosen, other parameters kept.

    Parameters
    ----------
    problem : Problem
        Its operands are made on the current device: m k + k n + m n random numbers.
    config : Config, optional
        The parameters that stay; those of `modelled` where none is given.
    repeats : int
        The median of so many runs counts.

    Returns
    -------
    milliseconds : dict from t1 to float
        Best first.

    Raises
    ------
    NotSuitable
        Without CuPy or a GPU, or if no t1 serves.

    Notes
    -----
    Waits for the device after each run.
    """
    device = query()
    config = config or modelled(problem, device)
    return _profile(problem, device, {t1: replace(config, t1=t1) for t1 in T1}, repeats)


def profile_tcf(problem: Problem, *, config: Config | None = None, repeats: int = 10) -> Mapping[int, float]:
    """Milliseconds of a product by TSM2L for every tcf that can be chosen, other parameters kept.

    Parameters, result and errors as of `profile_t1`; where no configuration is given, Opt-1 with the published one.
    """
    config = config or published(problem, "Opt-1")
    if config.variant not in TSM2L:
        raise ValueError(f"{config.variant} has no tcf: choose from {', '.join(TSM2L)}")
    return _profile(problem, query(), {tcf: replace(config, tcf=tcf) for tcf in TCF}, repeats)


def _profile(problem: Problem, device: Device, configs: Mapping[int, Config], repeats: int) -> dict[int, float]:
    suitable = {value: config for value, config in configs.items() if is_valid(problem, config, device)}
    if not suitable:
        tried = ", ".join(config.name for config in configs.values())
        raise NotSuitable(f"no configuration serves {problem} on {device.name}: tried {tried}")
    import cupy
    from cupyx.profiler import benchmark

    random = cupy.random.default_rng(0)
    A, B = (random.random(shape, dtype=problem.dtype) for shape in ((problem.k, problem.m), (problem.k, problem.n)))
    C = cupy.empty((problem.m, problem.n), problem.dtype, order="F")

    def milliseconds(config: Config) -> float:
        runs = benchmark(run, (config, device, A.T, B, C), n_repeat=repeats, n_warmup=2).gpu_times[0]
        return 1e3 * statistics.median(float(seconds) for seconds in runs)

    times = {value: milliseconds(config) for value, config in suitable.items()}
    return dict(sorted(times.items(), key=lambda item: item[1]))
