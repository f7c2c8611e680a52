"""Measured sweeps of one parameter of the paper's kernels: t1 of TSM2R, tcf of TSM2L (sections 3.1.5 and 3.2.3)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace

from abft_tsm2.core.choose import modelled
from abft_tsm2.core.device import Device, query
from abft_tsm2.core.paper.config import T1, TCF, TSM2L, Config, is_valid, published
from abft_tsm2.core.paper.launch import run
from abft_tsm2.core.problem import Problem
from abft_tsm2.errors import NotSuitable


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
