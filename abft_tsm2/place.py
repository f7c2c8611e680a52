"""Where work is done: the names of this host and of its CPU or GPU, as reports have them.

What every report needs is found once in a process, and again after a fork: whoever forks a worker may name its device.
"""

from __future__ import annotations

import os
import uuid
from functools import cache
from typing import Any

from abft_tsm2.arrays import Array, is_cupy

DEVICE_VARIABLE = "ABFT_TSM2_DEVICE"


@cache
def host_name() -> str:
    """The name of this machine."""
    return os.uname().nodename


def cpu_name() -> str:
    """What ABFT_TSM2_DEVICE says now (several workers of a host may each have a socket of their own), else "cpu"."""
    return os.environ.get(DEVICE_VARIABLE) or "cpu"


usual_device = cache(cpu_name)  # the environment is slow to read


@cache
def gpu_name(number: int) -> str:
    """UUID and name of a GPU: "GPU-5a4c1f4e-0b7e-11ef-8f3b-0242ac120002 (NVIDIA H100 80GB HBM3)". Where CuPy tells no
    UUID, its place on the bus: "GPU 0000:3B:00.0 (NVIDIA H100 80GB HBM3)"."""
    import cupy

    runtime = cupy.cuda.runtime
    found: dict[str, Any] = runtime.getDeviceProperties(number)
    name = found["name"].decode()
    identity = bytes(found.get("uuid", b""))  # AMD's cards have none, and CuPy's copy ends at a byte that is 0
    if len(identity) == 16:
        return f"GPU-{uuid.UUID(bytes=identity)} ({name})"
    return f"GPU {runtime.deviceGetPCIBusId(number)} ({name})"


def device_name(x: Array) -> str:
    """The name of the device that an array lies on."""
    return gpu_name(x.data.device_id) if is_cupy(x) else usual_device()


def _forget() -> None:
    for name in (host_name, usual_device, gpu_name):
        name.cache_clear()


os.register_at_fork(after_in_child=_forget)
