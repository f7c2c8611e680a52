"""Which kernel multiplies a problem fastest on the card that is present: measured, and every product checked.

The operands' elements are multiples of 1/256 and 1/8 of at most 1, so that no sum is rounded: a product is right if it
is equal to the one in float64, to the last bit where C has at least 32 of them.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS, Array, bit_pattern, from_host, to_host
from abft_tsm2.core import cublas
from abft_tsm2.core.choose import shipped
from abft_tsm2.core.device import Device
from abft_tsm2.core.kernels import Stream
from abft_tsm2.core.problem import SIZES, Problem
from abft_tsm2.core.split_k import by_vendor, launched
from abft_tsm2.core.tuning_file import VENDOR, Entry, alternatives
from abft_tsm2.errors import AbftError, NotSuitable

Contender = Stream | None
"""A kernel, or None for the vendor library."""

MARGIN = 0.03
"""By so much of its time another contender has to be ahead of what is shipped to take its place: more than noise."""

ROUNDS = 11
_OCCUPIED = 1e-4  # seconds that a copy keeps the card busy, at least, while the host queues what is timed
_ENOUGH, _MOST = 0.05, 10  # milliseconds of a sample (an event is good to half a microsecond), and launches in one
_PERIOD = 2**20 + 7  # random numbers; longer matrices repeat them
_ROWS = 64  # of C that are checked
_A_STEPS, _B_STEPS = 256, 8  # to 1: bfloat16 holds them all


class WrongProduct(AbftError):
    """A kernel or the vendor library multiplied wrongly: no time counts then."""


def contenders(problem: Problem, device: Device, *, quick: bool = False) -> tuple[Contender, ...]:
    """What may be fastest for a problem; nothing where only the vendor library has a product.

    Parameters
    ----------
    problem : Problem
    device : Device
    quick : bool
        The first kernel and the vendor library, not the other kernels.
    """
    kernels = alternatives(problem, device)
    first = shipped(problem, device).configs[:1] or kernels[:1]
    library = (None,) if kernels and cublas.serves(problem) else ()
    return (*(first if quick else dict.fromkeys((*first, *kernels))), *library)


def winner(times: Mapping[Contender, float], default: Contender) -> Contender:
    """The fastest contender if it is ahead of the default by more than `MARGIN`; else the default."""
    best = min(times, key=lambda contender: times[contender])
    return best if times[best] < (1 - MARGIN) * times.get(default, math.inf) else default


def judged(problem: Problem, device: Device, times: Mapping[Contender, float]) -> Entry:
    """The entry of a problem: of `contenders`, those that could serve, and their milliseconds."""
    default = next(iter(shipped(problem, device).configs), None)
    best = winner(times, default)
    form = alternatives(problem, device)[0].form
    kernel, shape = (VENDOR, None) if best is None else (best.form, best.shape)
    return Entry(problem, form, kernel, shape, times[best], times.get(None))


def nbytes(problem: Problem) -> int:
    """Bytes of A, B and C."""
    m, k, n, batch = problem.m, problem.k, problem.n, problem.batch
    return batch * m * (k * SIZES[problem.dtype] + n * SIZES[problem.out]) + k * n * SIZES[problem.weights]


def operands(problem: Problem) -> tuple[Array, Array, Array]:
    """CuPy arrays A, B and C that pose a problem, on the current device; C row-major and not initialised."""
    import cupy

    stack = (problem.batch,) if problem.batch > 1 else ()
    size = problem.batch * problem.m * problem.k
    A = _filled(size, problem.dtype, _A_STEPS)
    if problem.order == "C":
        A = A.reshape(*stack, problem.m, problem.k)
    else:
        A = A.reshape(*stack, problem.k, problem.m).swapaxes(-1, -2)
    B = _filled(problem.k * problem.n, problem.weights, _B_STEPS)
    B = B.reshape(problem.n, problem.k).T if problem.b_order == "F" else B.reshape(problem.k, problem.n)
    return A, B, cupy.empty((*stack, problem.m, problem.n), dtype=_dtype(problem.out))


class Contest:
    """Measures contenders on the current device.

    Parameters
    ----------
    device : Device
        The current one.

    Notes
    -----
    Holds the memory of two arrays that take 0.1 ms to copy. Before each sample one is copied to the other: meanwhile
    the host queues what is timed, so that the card does not wait for it, and nothing of the operands is left in the
    cache. (`cupyx.profiler.benchmark` waits for the card before each call, and charges it the host's time.)
    """

    def __init__(self, device: Device) -> None:
        import cupy

        self.device = device
        size = max(int(_OCCUPIED * 1e9 * device.peak_gbs), 2 * device.l2_bytes)
        self._source, self._target = (cupy.empty(size, dtype="uint8") for _ in range(2))

    def measure(self, problem: Problem, configs: Iterable[Contender]) -> dict[Contender, float]:
        """Milliseconds of one product by each contender that serves, the median of interleaved rounds.

        Raises
        ------
        WrongProduct
            If one multiplies wrongly.
        KernelCompileError

        Notes
        -----
        Waits for the device. Products of less than 0.05 ms are repeated within a sample, and then find in the cache
        what fits into it.
        """
        A, B, C = operands(problem)
        judge = _OutputCheck(problem, A, B)
        runs = {}
        for config in configs:
            try:
                plan = (
                    by_vendor(problem, A, B, C) if config is None else launched(config, problem, self.device, A, B, C)
                )
            except NotSuitable:
                continue
            C.view("uint8").fill(255)  # NaN, where nothing is written
            plan(A, B, C, 1.0, 0.0)
            judge.check(C, "the vendor library" if config is None else config.name)
            runs[config] = functools.partial(plan, A, B, C, 1.0, 0.0)
        return self._milliseconds(runs)

    def _milliseconds(self, runs: Mapping[Contender, Callable[[], None]]) -> dict[Contender, float]:
        import cupy

        card = cupy.cuda.Device()

        def sample(run: Callable[[], None], launches: int) -> tuple[Any, Any]:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            cupy.copyto(self._target, self._source)
            start.record()
            for _ in range(launches):
                run()
            end.record()
            return start, end

        def elapsed(pair: tuple[Any, Any]) -> float:
            return float(cupy.cuda.get_elapsed_time(*pair))

        first = {name: sample(run, 1) for name, run in runs.items()}
        card.synchronize()
        launches = {name: min(_MOST, math.ceil(_ENOUGH / max(elapsed(pair), 1e-3))) for name, pair in first.items()}
        rounds = [{name: sample(run, launches[name]) for name, run in runs.items()} for _ in range(ROUNDS)]
        card.synchronize()
        return {name: statistics.median(elapsed(pairs[name]) for pairs in rounds) / launches[name] for name in runs}


class _OutputCheck:
    """Knows some rows of a product: the first, the last, and random ones of all products of a stack."""

    def __init__(self, problem: Problem, A: Array, B: Array) -> None:
        count = problem.batch * problem.m
        ends = np.arange(min(_ROWS // 4, count))
        some = np.random.default_rng(1).integers(0, count, _ROWS // 2)
        self.problem = problem
        self._rows = np.unique(np.concatenate([ends, count - 1 - ends, some]))
        self._right = self._taken(A) @ to_host(B).astype(np.float64)

    def check(self, C: Array, name: str) -> None:
        found, right = self._taken(C), self._right
        # cuBLAS may round partial sums to 16 bits as well.
        out = FLOATS[self.problem.out]
        bound = 4 * out.unit_roundoff * np.abs(right).max() if out.bits < 32 else 0.0
        with np.errstate(invalid="ignore"):
            ok = np.abs(found - right) <= bound
        if not ok.all():
            at, column = (int(i[0]) for i in np.nonzero(~ok))
            product, row = divmod(int(self._rows[at]), self.problem.m)
            raise WrongProduct(
                f"{name} multiplied wrongly: C[{row}, {column}] of product {product} is {found[at, column]} and "
                f"should be {right[at, column]}, for {self.problem}: nothing is stored for it; if a second run finds "
                "the same it is a fault of the kernel, else of the card"
            )

    def _taken(self, x: Array) -> np.ndarray[Any, Any]:
        """The rows in question in float64; taken as bit patterns, which every library can index."""
        stack = bit_pattern(x) if x.ndim == 3 else bit_pattern(x)[None]
        product, row = (from_host(i, like=x) for i in divmod(self._rows, self.problem.m))
        rows: np.ndarray[Any, Any] = to_host(stack[product, row]).view(x.dtype).astype(np.float64)
        return rows


def _filled(size: int, dtype: str, steps: int) -> Array:
    """A vector of multiples of 1 / steps in [-1, 1]."""
    import cupy

    numbers = bit_pattern(_numbers(dtype, steps))
    x = cupy.empty(size, dtype=numbers.dtype)
    done = min(size, _PERIOD)
    x[:done] = cupy.asarray(numbers[:done])
    while done < size:
        more = min(done, size - done)
        x[done : done + more] = x[:more]
        done += more
    return x.view(_dtype(dtype))


@functools.cache
def _numbers(dtype: str, steps: int) -> np.ndarray[Any, Any]:
    """Random ones."""
    return (np.random.default_rng(steps).integers(-steps, steps + 1, _PERIOD) / steps).astype(_dtype(dtype))


def _dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name, of ml_dtypes where NumPy has none."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16
