"""Which kernel, and with which parameters: by the shape, and by what was measured.

`choose` decides without measuring anything, `shipped` without what was measured on this card. `modelled` takes t2 and
t3 from the paper's model; `profile_t1` and `profile_tcf` measure the two parameters that the model leaves to profiling
(C. Rivera et al., TSM2X, 2021, "Deciding Parameters" and "Proposed Optimizations").
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from abft_tsm2.core import cublas, tuning_file
from abft_tsm2.core import kernels as stream
from abft_tsm2.core.device import Device
from abft_tsm2.core.kernels import SMALL, Stream, candidates
from abft_tsm2.core.paper import model
from abft_tsm2.core.paper.config import PAPER_T1, Config, choices
from abft_tsm2.core.problem import SIZES, Problem
from abft_tsm2.core.tuned import BUSY, COLUMNS_AHEAD, DEEP


@dataclass(frozen=True)
class Choice:
    """What multiplies.

    Attributes
    ----------
    configs : tuple of Stream
        Kernels to try, best first; where none serves, the vendor library.
    source : str
        What decided: ``"measured"`` (``abft-tsm2 tune``), ``"table"`` (shipped for this card) or ``"model"``.
    """

    configs: tuple[Stream, ...]
    source: str


@functools.lru_cache(4096)
def choose(problem: Problem, device: Device) -> Choice:
    """Which kernels to try for a problem; none where the vendor library is the better choice.

    Parameters
    ----------
    problem : Problem
    device : Device

    Returns
    -------
    choice : Choice

    Notes
    -----
    Nothing is measured here. What `abft-tsm2 tune` found on this card comes first (`abft_tsm2.core.tuning_file.kernels`
    says which problems it speaks for), then what is `shipped`. Raises nothing. No host synchronisation.
    """
    configs = tuning_file.kernels(problem, device)
    return shipped(problem, device) if configs is None else Choice(configs, "measured")


def shipped(problem: Problem, device: Device) -> Choice:
    """What `choose` says of a card on which nothing was measured: by the table that ships, else by the model.

    In the model a kernel is memory-bound as long as its multiply-adds, at the peak bandwidth, keep the arithmetic units
    busy for less than `BUSY` of the time.
    """
    configs = tuple(c for c in candidates(problem) if stream.why_not(problem, c, device) is None)
    configs = tuple(c for c in configs if c.form == "small" or (problem.k >= DEEP or problem.m >= 64 * problem.k))
    table = COLUMNS_AHEAD.get(device.name)
    if not configs or not cublas.serves(problem):  # the vendor has no such product in one call
        return Choice(configs, "table" if table else "model")
    config = configs[0]
    if table is not None:
        return Choice(configs if problem.n <= _columns(table, problem, config) else (), "table")
    work = 2 * problem.n * device.peak_gbs / SIZES[problem.dtype]  # flops a second while A streams by
    if config.form == "small":
        work *= problem.k / (problem.k + problem.n)
    return Choice(configs if work <= BUSY * device.peak_gflops(problem.sums) else (), "model")


def _columns(table: Mapping[tuple[str, ...], int], problem: Problem, config: Stream) -> int:
    """With how many columns of C at most a kernel is ahead of cuBLAS: what the table says of it most closely."""
    if config.form == "small":
        return SMALL
    key = problem.order, problem.dtype, problem.sums, config.form, problem.b_order + problem.out_order
    return next((table[key[:length]] for length in (5, 4, 3) if key[:length] in table), 0)


def described(device: Device) -> str:
    """What decides on a card, in words."""
    there = tuning_file.found(device.name)
    rule = f"table shipped for {device.name}"
    if device.name not in COLUMNS_AHEAD:
        rule = "model: no measurement of this card; run abft-tsm2 tune"
    if there.ignored:
        return f"{rule} ({there.path} is ignored: {there.ignored})"
    if there.measurements is None:
        return rule
    kept = there.measurements
    cases = f"measured on {kept.date} with driver {kept.driver}, {len(kept.entries)} cases, {there.path}"
    return f"{cases}; elsewhere the {rule.partition(':')[0]}"


def forget() -> None:
    """Choose anew: the file of this card has changed."""
    tuning_file.forget()
    choose.cache_clear()


def modelled(problem: Problem, device: Device) -> Config:
    """V3 with t2 and t3 from the paper's model (Algorithm 5), and t1 = 128, rounded to a kernel that exists.

    The next larger t3 is taken, because fewer loads under way than the model asks for leave bandwidth unused; and of t2
    the nearest.
    """
    asked = model.optimise(problem, device, model.WELL_POSED)
    kernels = [c for c in choices(device, variant="V3", dtype=problem.dtype) if c.t1 == PAPER_T1]
    return min(kernels, key=lambda c: (c.t3 < asked.t3, abs(c.t2 - asked.t2), abs(c.t3 - asked.t3)))
