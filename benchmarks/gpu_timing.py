"""The stopwatch of a GPU: events around queued calls, in rounds that every contender takes part in.

A sample is: a kernel that spins for a while, an event, the calls, an event. While the kernel spins the host queues
the calls, so that the card goes through them without waiting for Python; the stopwatch checks that it was ahead and
spins longer where it was not. Short calls share a pair of events, or a CUDA graph; calls that would find their
operands in the cache walk through several copies of them.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Replay = Callable[[], Any]
Capture = Callable[[Callable[[], None], Any], Replay]
"""Records what a function launches into a CUDA graph; takes the stream on which the graph is replayed."""

QUEUE = 400  # launches that a stream takes in while it waits (1024 on today's drivers), and some to spare
GRAPH = 1024  # launches in one graph
SHORT = 2e-4  # seconds below which gaps between launches are worth a graph
LONGEST_SPIN = 0.1
CALLS, BURST = 2000, 20  # host times of each call; calls after which the queue is drained, far fewer than it takes in
CACHES = 4  # operands spread over this many times the level-2 cache are read from memory

# The clock cycles are there for a timer that stands still: the kernel ends within seconds whatever happens.
_SPIN = r"""
extern "C" __global__ void spin(long long nanoseconds) {
  const long long first = clock64();
  long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds && clock64() - first < (1LL << 32));
}
"""


class DeviceLostError(RuntimeError):
    """The card takes no more work in this process, typically after a kernel read where nothing is."""


@dataclass(frozen=True)
class Call:
    """One contender.

    Attributes
    ----------
    run : function of an int
        Queues one call, on copy i of the operands, on CuPy's current stream; does not wait for it and allocates
        nothing.
    copies : int
        How many copies of the operands there are; successive calls walk through them.
    launches : int
        Kernels that one call launches.
    capture : Capture, optional
        Allows short calls to be timed in a CUDA graph, and says how it is recorded.
    """

    run: Callable[[int], Any]
    copies: int = 1
    launches: int = 1
    capture: Capture | None = None


@dataclass
class Times:
    """What the stopwatch read of one contender.

    Attributes
    ----------
    seconds : list of float
        Of one call, one for each sample.
    batch : int
        Calls of a sample.
    graph : bool
        Whether they were replayed from a graph.
    hidden : int
        Samples in which the host had queued all calls before the first one began.
    note : str
        What went otherwise than asked: no graph, for one.
    error : str
        Empty, or why there are no times.
    """

    seconds: list[float] = field(default_factory=list)
    batch: int = 0
    graph: bool = False
    hidden: int = 0
    note: str = ""
    error: str = ""


@dataclass
class _Series:
    """A contender that is ready to be timed."""

    enqueue: Callable[[], Any]
    times: Times
    spin: float
    rounds: int = 0


class Stopwatch:
    """Times contenders on the current device.

    Parameters
    ----------
    least : float
        Seconds of a sample, at the least: shorter calls are repeated within it. An event is good to half a
        microsecond, and the first call after one starts with a delay of its own.
    budget : float
        Seconds that a contender may take of the card, within the limits of `rounds`.
    rounds : tuple of two int
        Fewest and most samples of a contender. Half of the fewest suffice where even these take 10 budgets.
    deadline : float
        `time.monotonic()` after which no further round begins.
    even : bool
        Whether every contender takes part in every round, so that the samples of a round can be compared one by one.
    tries : int
        How often a sample is taken at most, where the host was not ahead of the card. More calls than the queue takes
        in keep it from being so.

    Attributes
    ----------
    after : function
        Called after each sample, outside of its time: for what contenders have left pending.
    """

    def __init__(
        self,
        *,
        least: float = 1e-3,
        budget: float = 0.15,
        rounds: tuple[int, int] = (7, 41),
        deadline: float = math.inf,
        even: bool = False,
        tries: int = 4,
    ) -> None:
        import cupy

        self.least, self.budget, self.rounds, self.deadline, self.even = least, budget, rounds, deadline, even
        self.tries = tries
        self.after: Callable[[], object] = lambda: None
        # Non-blocking: work on the null stream, of another library for one, must not order itself between samples.
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._kernel = cupy.RawKernel(_SPIN, "spin")
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def measure(self, calls: Mapping[str, Call]) -> dict[str, Times]:
        """Times of all calls, interleaved so that all of them see the same state of the card.

        Each round takes a sample of every contender, starting with another one each time; slow contenders sit out
        some of the rounds. A contender that raises gets no times but the error, and the others go on.

        Raises
        ------
        DeviceLostError
            If the card takes no more work after an error.
        """
        import cupy

        cupy.cuda.Device().synchronize()  # what was queued elsewhere, the operands for one, has to be there
        times = {name: Times() for name in calls}
        ready: dict[str, _Series] = {}
        with self.stream:
            for name, call in calls.items():
                with self._guard(times[name]):
                    ready[name] = self._prepare(call, times[name])
            most = max((series.rounds for series in ready.values()), default=0)
            if self.even:
                for series in ready.values():
                    series.rounds = most
            for number in range(most):
                self._round(number, ready)
                if time.monotonic() > self.deadline:
                    break
            self.stream.synchronize()
        return times

    def spin(self, seconds: float) -> None:
        """Queue, on the current stream, a kernel that takes so long and does nothing."""
        self._kernel((1,), (1,), (np.int64(1e9 * seconds),))

    def _round(self, number: int, ready: dict[str, _Series]) -> None:
        most = max(series.rounds for series in ready.values())
        names = list(ready)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            series = ready[name]
            if (number + 1) * series.rounds // most == number * series.rounds // most:
                continue  # its samples are spread evenly over the rounds
            with self._guard(series.times):
                seconds, hidden = self._sample(series)
                series.times.seconds.append(seconds)
                series.times.hidden += hidden
            if series.times.error:
                del ready[name]
                if not ready:
                    return

    def _prepare(self, call: Call, times: Times) -> _Series:
        """Warm the call up, find out how long it takes, and settle how it is sampled."""
        call.run(0)  # compiles, loads, picks an algorithm
        self.stream.synchronize()
        times.batch = 1
        turn = 0

        def enqueue() -> None:
            nonlocal turn
            for _ in range(times.batch):
                call.run(turn % call.copies)
                turn += 1

        series = _Series(enqueue, times, spin=2e-3)
        taken, _ = self._sample(series)
        if taken < self.least:  # one call between two events is too long by the delay of its launch
            times.batch = max(1, min(8, QUEUE // call.launches))
            taken, _ = self._sample(series)
        wanted = max(math.ceil(self.least / max(taken, 1e-9)), call.copies)
        if call.capture is not None and taken < SHORT:
            turn, times.batch = 0, max(1, min(wanted, GRAPH // call.launches))
            try:
                series.enqueue, times.graph = call.capture(enqueue, self.stream), True
            except Exception as error:
                times.note = f"no graph: {message(error)}"
                require_device(error)
        if not times.graph:
            times.batch = max(1, min(wanted, QUEUE // call.launches))
        taken, _ = self._sample(series)
        cost = taken * times.batch + series.spin
        fewest, most = self.rounds
        if fewest * cost > 10 * self.budget:
            fewest = max(1, fewest // 2)
        series.rounds = max(fewest, min(most, int(self.budget / cost)))
        return series

    def _sample(self, series: _Series) -> tuple[float, bool]:
        """Seconds of one call, and whether the host was ahead of the card."""
        import cupy

        for _ in range(self.tries):
            self.spin(series.spin)
            self._start.record(self.stream)
            begun = time.perf_counter()
            series.enqueue()
            host = time.perf_counter() - begun
            self._end.record(self.stream)
            hidden = not self._start.done
            self._end.synchronize()
            if hidden:
                series.spin = min(LONGEST_SPIN, 1.5 * host + 1e-4)
                break
            series.spin = min(LONGEST_SPIN, 2 * max(host, series.spin))
        self.after()
        elapsed: float = cupy.cuda.get_elapsed_time(self._start, self._end)  # milliseconds
        return 1e-3 * elapsed / series.times.batch, hidden

    @contextlib.contextmanager
    def _guard(self, times: Times) -> Any:
        try:
            yield
        except Exception as error:
            times.error = message(error)
            times.seconds.clear()
            require_device(error)


def host_times(calls: Mapping[str, Callable[[], Any]], count: int = 0) -> dict[str, list[float]]:
    """Seconds of each call on the host, `count` of them at least, or `CALLS`, in bursts that take turns.

    The card is idle when a burst begins: no call waits for a place in the queue. Waiting is not part of the times, nor
    is the first call of a burst, which the wait before it slows down.
    """
    import cupy

    device = cupy.cuda.Device()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names, collecting = list(calls), gc.isenabled()
    gc.disable()
    try:
        for number in range(-(-(count or CALLS) // BURST)):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                call, times = calls[name], seconds[name]
                device.synchronize()
                call()
                for _ in range(BURST):
                    begun = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - begun)
    finally:
        if collecting:
            gc.enable()
    device.synchronize()
    return seconds


def message(error: BaseException) -> str:
    """An exception in one line, for a cell of a table."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def require_device(error: BaseException) -> None:
    """Raise `DeviceLostError` from `error` if the card takes no more work."""
    import cupy

    try:
        cupy.cuda.Device().synchronize()
    except Exception as lost:
        raise DeviceLostError(
            f"the card takes no more work ({message(lost)}) after {message(error)}; run the failing one alone with "
            "--only, under compute-sanitizer"
        ) from error


def graph(record: Callable[[], None], stream: Any) -> Replay:
    """`Capture` of launches through CuPy. cuBLAS is not among them: CuPy refuses it in a capture."""
    stream.begin_capture()
    try:
        record()
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to report
            stream.end_capture()
        raise
    captured = stream.end_capture()
    captured.upload(stream)
    return lambda: captured.launch(stream)


def torch_graph(record: Callable[[], None], stream: Any) -> Replay:
    """`Capture` of launches through PyTorch, which does record cuBLAS."""
    import torch

    captured, outside = torch.cuda.CUDAGraph(), torch.cuda.ExternalStream(stream.ptr)
    with torch.cuda.graph(captured, stream=outside):
        record()

    def replay() -> None:
        with torch.cuda.stream(outside):
            captured.replay()

    return replay


def copies(bytes_of_a_call: int) -> int:
    """How many copies of the operands a call has to walk through to find none of them in the cache."""
    import cupy

    cache = int(cupy.cuda.Device().attributes["L2CacheSize"])
    return max(1, math.ceil(CACHES * cache / max(1, bytes_of_a_call)))


def environment() -> dict[str, str]:
    """What the numbers were measured on: card, driver, versions, day."""
    import cupy
    from cupy_backends.cuda.libs import cublas

    device = cupy.cuda.Device()
    found = card_state("driver_version", "clocks.max.sm", "clocks.max.mem")
    return {
        "device": cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode(),
        "driver": found["driver_version"] or _version(cupy.cuda.runtime.driverGetVersion()),
        "cuda": _version(cupy.cuda.runtime.runtimeGetVersion()),
        "cublas": str(cublas.getVersion(cupy.cuda.device.get_cublas_handle())),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "max_sm_mhz": found["clocks.max.sm"],
        "max_memory_mhz": found["clocks.max.mem"],
        "date": datetime.date.today().isoformat(),
    }


def card_state(*queries: str) -> dict[str, str]:
    """What nvidia-smi says of the current device; empty texts where it is absent or does not know."""
    nothing = dict.fromkeys(queries, "")
    try:
        import cupy

        bus = cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id)
        command = ["nvidia-smi", f"--id={bus}", f"--query-gpu={','.join(queries)}", "--format=csv,noheader,nounits"]
        environ = {**os.environ, "LC_ALL": "C"}
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=environ)
    except Exception:  # not installed, not allowed, another make of card: the times are good without it
        return nothing
    values = [value.strip() for value in answer.stdout.strip().split(",")]
    return dict(zip(queries, values, strict=True)) if len(values) == len(queries) else nothing


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
