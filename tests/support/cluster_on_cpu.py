"""Runs a kernel that is one cluster on the CPU: cluster_on_cpu.h in place of kernels/factor/cluster.cuh."""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from abft_tsm2.core.compiler import Kernel, source

HERE = Path(__file__).parent
# As in cuda_on_cpu/build.py: variables that nobody has set are wild numbers.
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-w", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing"),
    *("-ffp-contract=off", "-ftrivial-auto-var-init=pattern", "-fno-gnu-unique"),
)
FAULTS = (
    *("none", "no_cluster_barrier", "no_block_barrier", "wrong_parity", "lost_message", "early_end"),
    *("expected_twice",),
)
_REPLACED = re.compile(r'#line 1 "factor/cluster\.cuh"\n.*^#line \d+ "factor/cluster\.cuh"\n.*?(?=^#line)', re.S | re.M)


class ClusterFault(Exception):
    """What went wrong in a launch."""


def text_of(config: Kernel, change: tuple[str, str] = ("", "")) -> str:
    """The kernel's text for the CPU, with what runs it. `change`, a fault to be planted: what is replaced, by what."""
    text = source(config)
    if text.count(change[0]) != 1 and change[0]:
        raise ValueError(f"{change[0]!r} is there {text.count(change[0])} times")
    text = text.replace(*change) if change[0] else text
    kept = re.search(r'#line 1 "tsm2/index\.cuh"\n.*?(?=^#line)', text, re.S | re.M)
    replaced, count = _REPLACED.subn("", text, count=1)
    if kept is None or count != 1 or "asm" in replaced:
        raise ValueError(f"{config.file} does not include factor/cluster.cuh as it did")
    index = "" if kept[0] in replaced else kept[0]
    launch = f"""
extern "C" const char* launch(unsigned threads, unsigned long long shared_bytes, unsigned long long seed, int fault,
                              int number, void** values) {{
  cluster_on_cpu::body = &cluster_on_cpu::Entry<{config.name}>::call;
  cluster_on_cpu::arguments = values;
  return cluster_on_cpu::launch(threads, shared_bytes, seed, fault, number);
}}
"""
    return f'#include "cluster_on_cpu.h"\n{index}{replaced}{launch}'


def build(config: Kernel, cache: Path, change: tuple[str, str] = ("", "")) -> Callable[..., None]:
    """A function that launches the kernel: ``run(threads, shared_bytes, arguments, seed=0, fault=("none", 0))``.

    Arguments are NumPy arrays, of which the kernel gets the first element's address, and ints. The order of threads and
    messages is drawn by the seed; seed 0 takes threads in turn.

    Raises
    ------
    ClusterFault
        By the function, with what was found.
    """
    text = text_of(config, change)
    header = (HERE / "cluster_on_cpu.h").read_text()
    path = cache / f"{hashlib.sha256(repr((text, header, FLAGS)).encode()).hexdigest()[:32]}.so"
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        command = ["g++", "-x", "c++", "-", "-I", str(HERE), *FLAGS, "-o", str(unfinished)]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(f"g++ fails for {config.name}:\n{done.stderr[:4000]}")
        unfinished.replace(path)
    entry = ctypes.CDLL(str(path)).launch
    entry.restype = ctypes.c_char_p
    entry.argtypes = [
        ctypes.c_uint,
        ctypes.c_ulonglong,
        ctypes.c_ulonglong,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]

    def run(
        threads: int, shared_bytes: int, arguments: list[Any], seed: int = 0, fault: tuple[str, int] = ("none", 0)
    ) -> None:
        values = [
            ctypes.c_void_p(x.__array_interface__["data"][0]) if isinstance(x, np.ndarray) else ctypes.c_longlong(x)
            for x in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        found = entry(threads, shared_bytes, seed, FAULTS.index(fault[0]), fault[1], pointers)
        if found is not None:
            raise ClusterFault(found.decode())

    return run
