"""Where a task runs: worker, host and device, and the key that the scheduler knows it by."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any, NamedTuple

from abft_tsm2.place import cpu_name, gpu_name, host_name
from abft_tsm2.report import Fault


class Place(NamedTuple):
    """Where a task runs. Worker is an address, which another process may have later; host and device stay."""

    worker: str
    host: str
    device: str


def worker() -> Any:
    """The worker of this thread's task; None outside of a cluster, and in a thread that a task has started."""
    if "distributed" not in sys.modules:
        return None
    from distributed import get_worker

    try:
        here = get_worker()
    except ValueError:
        return None
    return here if threading.get_ident() in here.active_threads else None


def task_key() -> Any:
    """The scheduler's key of the task under way; None outside of a cluster."""
    here = worker()
    return None if here is None else here.get_current_task()


def place() -> Place:
    """Where this thread's task runs.

    The device is the current GPU where the process has one in use, else the CPU, by their names in reports.
    """
    here = worker()
    address = "" if here is None else here.address
    return Place(address, host_name(), _device())


def located(fault: Fault) -> Fault:
    """The fault, with the place where this thread's task runs, unless it was found at another one."""
    return fault if fault.worker else replace(fault, **place()._asdict())


def _device() -> str:
    if "cupy" in sys.modules:
        import cupy

        return gpu_name(cupy.cuda.runtime.getDevice())
    return cpu_name()
