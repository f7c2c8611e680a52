"""The thread's floating-point unit made to flush subnormal numbers, as torch or a library of -ffast-math leaves it."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FTZ, DAZ = 0x8000, 0x0040  # of MXCSR: results, operands
MODES = {"FTZ": FTZ, "DAZ": DAZ, "FTZ and DAZ": FTZ | DAZ}
_PLACE = slice(28, 32)  # of MXCSR in glibc's fenv_t on x86-64


@contextmanager
def flushing(mode: int) -> Iterator[None]:
    """Set these bits of MXCSR for this thread, and what they were before at last."""
    libm, before = _libm(), ctypes.create_string_buffer(64)
    libm.fegetenv(before)
    then = ctypes.create_string_buffer(before.raw, 64)
    bits = int.from_bytes(before.raw[_PLACE], "little") & ~(FTZ | DAZ) | mode
    then[_PLACE] = bits.to_bytes(4, "little")  # type: ignore[call-overload]  # a slice of bytes
    libm.fesetenv(then)
    try:
        yield
    finally:
        libm.fesetenv(before)


def _libm() -> Any:
    if platform.machine() not in ("x86_64", "AMD64") or platform.libc_ver()[0] != "glibc":
        pytest.skip("the place of MXCSR in fenv_t is known for glibc on x86-64 only")
    return ctypes.CDLL("libm.so.6")
