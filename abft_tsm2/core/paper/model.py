"""The paper's performance model of TSM2R and its choice of t2 and t3 (Algorithm 5): arithmetic, no GPU.

C. Rivera et al., TSM2X, J. Parallel Distrib. Comput. 151 (2021), "Performance Metrics Estimation" and "Deciding
Parameters". A thread computes t2 elements of a row of C at a time and loads t3 elements of A at a time; how many
threads fit into a multiprocessor says how many loads and operations are under way, and Little's law (concurrency =
latency x throughput) how many are needed. The utilisation is the quotient of the two::

    R_thread = (3 t2 + 2 t3) bytes / 4 + C                        registers of a thread
    S_thread = t2 bytes                                           shared memory of a thread, bytes
    occupancy = min(HW_MAX, R_SM / R_thread, S_SM / S_thread)     threads of a multiprocessor
    util_mem  = occupancy t3 bytes / (latency_mem peak_gbs / (SMs clock))
    util_comp = occupancy t3 t2 2  / (latency_comp peak_gflops / (SMs clock))

Both are counted in the units of their peak: bytes against bytes/s, and two operations a multiply-add against
operations/s (the paper counts elements against bytes, and a multiply-add once). Its printed threshold of t2 counts a
multiply-add once as well; that convention is a choice here, `Choices.flops`, as is all else that the paper leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from abft_tsm2.arrays import type_name
from abft_tsm2.core.device import Device
from abft_tsm2.core.paper.config import BYTES
from abft_tsm2.core.problem import Problem

FLOPS = 2  # operations of a multiply-add
REGISTER_BYTES = 4
_START = 1.0  # of t2 and of t3 (the paper, section "Deciding Parameters")


@dataclass(frozen=True)
class Choices:
    """What the paper leaves open. The defaults are the procedure as printed; `WELL_POSED` is one with an optimum.

    Attributes
    ----------
    fixed_registers : float
        C, the registers that a kernel has beside its tiles: profiled, not printed. Table 3's register counts less the
        formula leave 6 to 32, with median 16.
    memory_latency_cycles, arithmetic_latency_cycles : float or None
        Profiled, not printed. None takes the device's, which are other people's measurements.
    cap : bool
        Whether no utilisation exceeds 1. As printed it may, and time then falls with t3 without end.
    flops : int
        Operations that the threshold of t2 counts for a multiply-add: 1 as printed, or 2, as the peak counts them.
    seconds_per_unit : float
        Unit of the time that is descended. The gradient scales with it, and so do the steps: in milliseconds
        the same descent goes on much longer than in seconds. Bytes over bytes/s are seconds.
    relative : bool
        What the step multiplies: the gradient of the time (False, "gradient descent"), or its elasticities
        d log(time) / d log(t), which have no unit and do not depend on m and k, for steps in proportion to t (True).
    step : float
        0.1 as printed.
    stop : float
        1e-4 as printed.
    stop_on : str
        What is compared with `stop`: ``"move"``, the larger change of t2 and t3 in a step, or ``"time"``, the change
        of the time. The paper does not say; on the time, the printed 1e-4 ends most descents at once.
    t3_up : bool
        Whether t3 is rounded up and not, as printed, to the nearest integer. Capped, t3 is the least that keeps enough
        loads under way; the integer below it costs up to a third (H100, float64, n = 16: 1.4).
    derivative_step : float
        Relative step of the central differences that stand for the derivatives: the occupancy's minimum has none at
        its corners. 1e-6 balances truncation (1e-12) and rounding (1e-10).
    limit : int
        Steps after which a descent counts as not converged. As printed, n = 16 and m = k = 40960 take below 30000.

    Examples
    --------
    >>> Choices().cap, WELL_POSED.cap
    (False, True)
    """

    fixed_registers: float = 16.0
    memory_latency_cycles: float | None = None
    arithmetic_latency_cycles: float | None = None
    cap: bool = False
    flops: int = 1
    seconds_per_unit: float = 1.0
    relative: bool = False
    step: float = 0.1
    stop: float = 1e-4
    stop_on: str = "move"
    t3_up: bool = False
    derivative_step: float = 1e-6
    limit: int = 100_000

    def __post_init__(self) -> None:
        if self.stop_on not in ("move", "time"):
            raise ValueError(f"stop_on = {self.stop_on!r}: a descent stops on 'move' or on 'time'")


AS_PRINTED = Choices()
WELL_POSED = Choices(cap=True, flops=FLOPS, relative=True, t3_up=True)


@dataclass(frozen=True)
class Parameters:
    """What `optimise` found.

    Attributes
    ----------
    t2, t3 : int
    seconds : float
        The time that was descended, where the descent ended: before rounding, and below the attainable where
        utilisations are not capped.
    compute_bound : bool
        Whether it is the time of computing (Line 9) or of reading A (Lines 4 and 14).
    steps : int
        Of the descent that won.
    converged : bool
        False if that descent ran into `Choices.limit`.
    """

    t2: int
    t3: int
    seconds: float
    compute_bound: bool
    steps: int
    converged: bool


def registers_per_thread(dtype: Any, t2: float, t3: float, choices: Choices = AS_PRINTED) -> float:
    """32-bit registers of a thread: C, nextB and the row of currB in use, t2 each; currA and nextA, t3 each.

    Examples
    --------
    >>> registers_per_thread("float64", t2=16, t3=4)
    128.0
    """
    return (3 * t2 + 2 * t3) * _bytes(dtype) / REGISTER_BYTES + choices.fixed_registers


def shared_bytes_per_thread(dtype: Any, t2: float) -> float:
    """A thread's share of the t1 x t2 tile of B, which t1 threads hold together.

    Examples
    --------
    >>> 128 * shared_bytes_per_thread("float64", t2=16)
    16384
    """
    return t2 * _bytes(dtype)


def max_occupancy(device: Device, dtype: Any, t2: float, t3: float, choices: Choices = AS_PRINTED) -> float:
    """Threads that a multiprocessor holds at most, by the hardware, its registers and its shared memory.

    An estimate: it knows neither whole blocks nor the steps in which registers are given out.

    Examples
    --------
    >>> from abft_tsm2.core.device import known
    >>> max_occupancy(known("K40c"), "float64", t2=16, t3=4)
    384.0
    """
    return min(
        device.max_threads_per_sm,
        device.registers_per_sm / registers_per_thread(dtype, t2, t3, choices),
        device.shared_bytes_per_sm / shared_bytes_per_thread(dtype, t2),
    )


def memory_utilisation(device: Device, dtype: Any, t2: float, t3: float, choices: Choices = AS_PRINTED) -> float:
    """Bytes of A under way over those that peak bandwidth needs (Little's law); above 1 unless `choices.cap`."""
    latency = choices.memory_latency_cycles or device.memory_latency_cycles
    needed = latency * device.peak_gbs / (device.multiprocessors * device.clock_ghz)  # 10^9 of both cancel
    under_way = max_occupancy(device, dtype, t2, t3, choices) * t3 * _bytes(dtype)
    return _capped(under_way / needed, choices)


def compute_utilisation(device: Device, dtype: Any, t2: float, t3: float, choices: Choices = AS_PRINTED) -> float:
    """Operations under way over those that peak arithmetic needs (Little's law); above 1 unless `choices.cap`."""
    latency = choices.arithmetic_latency_cycles or device.arithmetic_latency_cycles
    needed = latency * device.peak_gflops(dtype) / (device.multiprocessors * device.clock_ghz)
    under_way = max_occupancy(device, dtype, t2, t3, choices) * t3 * t2 * FLOPS
    return _capped(under_way / needed, choices)


def ratio(device: Device, dtype: Any, t2: float, *, flops: int = 1) -> float:
    """r = time_comp / time_mem of the innermost loop: above 1 the computation is compute-bound.

    Occupancy and the number of multiprocessors, by which the paper divides both times, cancel.

    Parameters
    ----------
    device : Device
    dtype : dtype or str
    t2 : float
    flops : int
        Operations of a multiply-add: 1 as printed, 2 as the peak counts them.
    """
    return flops * t2 / _bytes(dtype) * device.peak_gbs / device.peak_gflops(dtype)


def t2_threshold(device: Device, dtype: Any, *, flops: int = 1) -> float:
    """The t2 at which `ratio` is 1, in elements.

    As printed a multiply-add counts once while the peak counts it twice: the times really balance at half of
    this, which ``flops=2`` gives.

    Examples
    --------
    >>> from abft_tsm2.core.device import known
    >>> [round(t2_threshold(known(card), "float64"), 1) for card in ("K40c", "M40", "P100", "V100", "A100")]
    [39.7, 5.9, 51.1, 66.7, 49.9]
    """
    return device.peak_gflops(dtype) / device.peak_gbs * _bytes(dtype) / flops


def is_compute_bound(problem: Problem, device: Device, *, flops: int = 1) -> bool:
    """Whether the undivided problem (t2 = n) is compute-bound: n above `t2_threshold` (Line 1)."""
    return problem.n > t2_threshold(device, problem.dtype, flops=flops)


def memory_time(problem: Problem, device: Device, t2: float, t3: float, choices: Choices = AS_PRINTED) -> float:
    """Seconds to read A, n / t2 times (Lines 2 to 4; Lines 12 to 14 with m k n for the printed n n k)."""
    total_bytes = problem.m * problem.k * problem.n / t2 * _bytes(problem.dtype)
    return total_bytes / (device.peak_gbs * 1e9 * memory_utilisation(device, problem.dtype, t2, t3, choices))


def compute_time(problem: Problem, device: Device, t2: float, t3: float, choices: Choices = AS_PRINTED) -> float:
    """Seconds of the 2 m k n operations (Lines 7 to 9)."""
    total_flops = FLOPS * problem.m * problem.k * problem.n
    rate = device.peak_gflops(problem.dtype) * 1e9
    return total_flops / (rate * compute_utilisation(device, problem.dtype, t2, t3, choices))


def predicted_time(problem: Problem, device: Device, t2: float, t3: float, choices: Choices = WELL_POSED) -> float:
    """Seconds of TSM2R: loading and computing overlap, so the longer of the two; no utilisation exceeds 1.

    A lower estimate: full occupancy throughout (the paper's assumption, which small k or m break), peaks of the data
    sheet, and no traffic but A's.

    Examples
    --------
    >>> from abft_tsm2.core.device import known
    >>> problem = Problem(20480, 20480, 16, "float64")
    >>> round(1e3 * predicted_time(problem, known("V100"), t2=16, t3=12), 2)
    3.73
    """
    capped = replace(choices, cap=True)
    return max(memory_time(problem, device, t2, t3, capped), compute_time(problem, device, t2, t3, capped))


def predicted_gain(new: Device, old: Device, dtype: Any = "float64", *, n: int = 16) -> float:
    """How much faster the same product is on `new` than on `old`, both at their peaks and reading A once.

    Parameters
    ----------
    new, old : Device
    dtype : dtype or str
    n : int
        Columns of B: memory-bound on both cards, it does not matter, and the gain is that of the bandwidth.

    Examples
    --------
    >>> from abft_tsm2.core.device import known
    >>> round(predicted_gain(known("A100"), known("V100"), "float64"), 2)
    1.73
    """

    def seconds(device: Device) -> float:  # of 10^9 elements of A
        return max(_bytes(dtype) / device.peak_gbs, FLOPS * n / device.peak_gflops(dtype))

    return seconds(old) / seconds(new)


def optimise(problem: Problem, device: Device, choices: Choices = AS_PRINTED) -> Parameters:
    """t2 and t3 by the paper's Algorithm 5: gradient descent on the time of what bounds the problem.

    Memory-bound (n <= t2_threshold): the time of reading A, with 1 <= t2 <= n. Compute-bound: the time of computing
    with t2_threshold <= t2 <= n, and that of reading A with 1 <= t2 <= t2_threshold; the shorter one wins. t3 >= 1
    throughout. Each step is projected on the bounds, and the end rounded to integers.

    Parameters
    ----------
    problem : Problem
        With m k n = 0 there is nothing to descend, and t2 = t3 = 1.
    device : Device
    choices : Choices
        What the paper leaves open. The result of the default depends on m and k, see the documentation's page on
        the model; that of `WELL_POSED` does not.

    Returns
    -------
    parameters : Parameters
        Any integers; a kernel for them need not exist.

    Examples
    --------
    >>> from abft_tsm2.core.device import known
    >>> found = optimise(Problem(20480, 20480, 16, "float64"), known("K40c"))
    >>> found.t2, found.t3
    (5, 5)
    >>> found = optimise(Problem(20480, 20480, 16, "float64"), known("K40c"), WELL_POSED)
    >>> found.t2, found.t3
    (16, 3)
    """
    if not problem.m * problem.k * problem.n:
        return Parameters(1, 1, 0.0, False, 0, True)

    def reading(t2: float, t3: float) -> float:
        return memory_time(problem, device, t2, t3, choices)

    def computing(t2: float, t3: float) -> float:
        return compute_time(problem, device, t2, t3, choices)

    threshold = t2_threshold(device, problem.dtype, flops=choices.flops)
    if problem.n <= threshold:
        return _descend(reading, 1.0, float(problem.n), choices, compute_bound=False)
    by_computing = _descend(computing, max(1.0, threshold), float(problem.n), choices, compute_bound=True)
    by_reading = _descend(reading, 1.0, max(1.0, threshold), choices, compute_bound=False)
    return by_computing if by_computing.seconds < by_reading.seconds else by_reading


def _descend(
    time: Callable[[float, float], float], lowest: float, highest: float, choices: Choices, *, compute_bound: bool
) -> Parameters:
    """Projected gradient descent from t2 = t3 = 1 with lowest <= t2 <= highest and 1 <= t3; time is in seconds."""
    h, t2, t3 = choices.derivative_step, max(_START, lowest), _START
    now = time(t2, t3)
    steps, converged = 0, False
    while steps < choices.limit and not converged:
        # Differences over 2 h t, t times the derivative: the elasticity is that over the time.
        by_t2 = (time(t2 * (1 + h), t3) - time(t2 * (1 - h), t3)) / (2 * h)
        by_t3 = (time(t2, t3 * (1 + h)) - time(t2, t3 * (1 - h))) / (2 * h)
        if choices.relative:
            move2, move3 = (choices.step * t * by / now for t, by in ((t2, by_t2), (t3, by_t3)))
        else:
            move2, move3 = (choices.step * by / t / choices.seconds_per_unit for t, by in ((t2, by_t2), (t3, by_t3)))
        before, t2_before, t3_before = now, t2, t3
        t2, t3 = min(max(t2 - move2, lowest), highest), max(t3 - move3, 1.0)
        now = time(t2, t3)
        moved = max(abs(t2 - t2_before), abs(t3 - t3_before))
        change = moved if choices.stop_on == "move" else abs(now - before) / choices.seconds_per_unit
        steps, converged = steps + 1, change <= choices.stop
    # The threshold among the bounds is a balance of two estimates, not a limit: rounding may step over it.
    whole3 = math.ceil(t3) if choices.t3_up else _nearest(t3)
    return Parameters(_nearest(t2), whole3, now, compute_bound, steps, converged)


def _nearest(x: float) -> int:
    return math.floor(x + 0.5)  # round() takes halves to the even neighbour


def _capped(utilisation: float, choices: Choices) -> float:
    return min(utilisation, 1.0) if choices.cap else utilisation


def _bytes(dtype: Any) -> int:
    name = type_name(dtype)
    if name not in BYTES:
        raise ValueError(f"the model knows {' and '.join(BYTES)}, not {name!r}")
    return BYTES[name]
