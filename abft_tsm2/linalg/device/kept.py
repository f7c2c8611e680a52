"""Plans that are made once and used again: those of a thread, which no other thread queues at the same time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class PlansOfThread(threading.local):
    """The plans of each thread that it has used last.

    Parameters
    ----------
    most : int
        Of a thread, on all devices.
    """

    def __init__(self, most: int) -> None:
        self.most, self.plans = most, OrderedDict[Hashable, Any]()

    def of(self, kind: Hashable, make: Callable[[], Any]) -> Any:
        """That of this kind, on the current device."""
        import cupy

        key = kind, int(cupy.cuda.runtime.getDevice())
        found = self.plans.pop(key, None) or make()
        self.plans[key] = found
        while len(self.plans) > self.most:
            self.plans.popitem(last=False)
        return found
