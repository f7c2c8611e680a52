"""Calls with the processor made to take subnormal numbers for zero, as torch or a library of -ffast-math leaves it.

The mode belongs to a thread, and those that it starts begin with it. It is in force in the calls that are tried, and
nowhere else: who judges them computes with all numbers.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from abft_tsm2.core.flushing import flushes
from abft_tsm2.errors import NotSuitable

FTZ, DAZ = 0x8000, 0x0040  # of MXCSR: results, operands
_PLACE = slice(28, 32)  # of MXCSR in glibc's fenv_t on x86-64
_wanted = False


def want(flush: bool) -> None:
    """Have all calls of this process's trials flush from now on, or none.

    Raises
    ------
    NotSuitable
        Where it is not known how that is set.
    """
    global _wanted
    _wanted = False
    if flush:
        require()
    _wanted = flush


def require() -> None:
    """NotSuitable on a machine on which it is not known how subnormal numbers are flushed."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.libc_ver()[0] != "glibc":
        raise NotSuitable(
            f"how subnormal numbers are flushed on {platform.machine()} is not known here: leave --flush away"
        )


@contextmanager
def as_wanted() -> Iterator[None]:
    """Flush in the block, if that is wanted."""
    if not _wanted or flushes():
        yield
        return
    libm = ctypes.CDLL("libm.so.6")
    before = ctypes.create_string_buffer(64)
    libm.fegetenv(before)
    then: Any = ctypes.create_string_buffer(before.raw, 64)
    bits = int.from_bytes(before.raw[_PLACE], "little") | FTZ | DAZ
    then[_PLACE] = bits.to_bytes(4, "little")
    libm.fesetenv(then)
    try:
        yield
    finally:
        libm.fesetenv(before)
