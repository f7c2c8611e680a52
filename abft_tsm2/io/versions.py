"""What ``abft-tsm2 info`` prints: versions, devices, and what this installation is configured to do."""

from __future__ import annotations

import importlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from abft_tsm2 import __version__, policy
from abft_tsm2.core import tuning_file
from abft_tsm2.core.choose import described
from abft_tsm2.core.device import query
from abft_tsm2.io import matrix

_PACKAGES = ("numpy", "scipy", "array-api-compat", "click", "ml-dtypes", "scikit-learn", "pillow")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def collected() -> dict[str, dict[str, Any]]:
    """Sections of names and values; None for a package that is not installed. No host synchronisation."""
    found = {dist.name.replace("_", "-"): dist.version for dist in metadata.distributions()}
    cupy = next((version for name, version in found.items() if name.startswith("cupy")), None)
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    gpus, choices = _gpus()
    return {
        "versions": {
            "abft_tsm2": __version__,
            "python": platform.python_version(),
            **{name: found.get(name) for name in _PACKAGES},
            "cupy": cupy,
            "blas": f"{blas['name']} {blas['version']}",
        },
        "devices": {
            "system": platform.platform(),
            "cpu": f"{platform.machine()}, {os.cpu_count()} logical cores",
            "memory": f"{matrix.physical_memory() / 1e9:.1f} GB",
            **gpus,
        },
        "configuration": {
            **{f"on {status}": action for status, action in policy.geterr().items()},
            "panel": f"{matrix.PANEL_BYTES / 2**20:g} MB",
            "mapped from": f"{matrix.MAP_BYTES / 2**20:g} MB",
            "cache": str(tuning_file.folder()),
            **choices,
            **{name: os.environ[name] for name in _THREADS if name in os.environ},
        },
    }


def _gpus() -> tuple[dict[str, str], dict[str, str]]:
    """The cards, and what decides on each of them which kernel multiplies."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return {"gpu": "none (CuPy is not installed)"}, {}
    if not cupy.is_available():
        return {"gpu": "none (CuPy finds no CUDA device)"}, {}
    gpus, choices = {}, {}
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(number)
        name, memory = properties["name"].decode(), properties["totalGlobalMem"]
        gpus[f"gpu {number}"] = f"{name}, {memory / 1e9:.1f} GB, driver {tuning_file.driver()}"
        choices[f"choice on gpu {number}"] = described(query(number))
    return gpus, choices


def processor() -> str:
    """The name of this machine's processor."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
