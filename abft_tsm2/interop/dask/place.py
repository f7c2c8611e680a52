"""Where a task runs: worker, host and device, and the key that the scheduler knows it by."""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
from dataclasses import replace
from typing import Any, NamedTuple

from abft_tsm2.report import Fault

DEVICE_VARIABLE = "ABFT_TSM2_DEVICE"


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

    The device is the UUID of the current GPU where the process has one in use, else what the environment variable
    ABFT_TSM2_DEVICE says (several workers of a host may each have a socket of their own), else "cpu".
    """
    here = worker()
    address = "" if here is None else here.address
    return Place(address, socket.gethostname(), _device())


def located(fault: Fault) -> Fault:
    """The fault, with the place where this thread's task runs, unless it was found at another one."""
    return fault if fault.worker else replace(fault, **place()._asdict())


def _device() -> str:
    if named := os.environ.get(DEVICE_VARIABLE):
        return named
    if "cupy" in sys.modules:
        import cupy

        return _name_of_gpu(cupy.cuda.Device().id)
    return "cpu"


@functools.cache
def _name_of_gpu(number: int) -> str:
    import cupy

    return f"GPU-{bytes(cupy.cuda.runtime.getDeviceProperties(number)['uuid']).hex()}"
