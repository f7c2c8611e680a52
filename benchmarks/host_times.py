"""What a call costs the host, while the card has nothing else to do and nobody waits for it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

CALLS, BURST = 2000, 20  # calls of each; calls after which the queue is drained, far fewer than it takes in


def measure(calls: Mapping[str, Callable[[], Any]], count: int = CALLS) -> dict[str, list[float]]:
    """Seconds of each call on the host, `count` of them at least, in bursts that take turns.

    The card is idle when a burst begins: no call waits for room in the queue. Waiting is not part of the times, nor is
    the first call of a burst, which the wait before it slows down.
    """
    import cupy

    device = cupy.cuda.Device()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names, collecting = list(calls), gc.isenabled()
    gc.disable()
    try:
        for number in range(-(-count // BURST)):
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
