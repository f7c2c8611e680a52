"""Ask the processor whether it takes subnormal numbers for zero: flush-to-zero, denormals-are-zero; FZ on ARM.

Each thread has its own mode. `torch.set_flush_denormal` sets it, and so does loading a library that was linked with
-ffast-math, for the thread that loads it and those that it starts.
"""

from __future__ import annotations

import struct
import sys

_SMALLEST = sys.float_info.min  # the smallest normal number: half of it is subnormal
_SUBNORMAL: float = struct.unpack("<d", bytes([1, *bytes(7)]))[0]  # from its bits: no arithmetic to flush it


def flushes() -> bool:
    """Whether this thread's results or operands that are subnormal count as zero."""
    return _SMALLEST * 0.5 == 0.0


def flushing_mode() -> bytes:
    """What tells apart the modes of threads: of two with the same bytes, the same sums have the same bits."""
    return struct.pack("dd", _SMALLEST * 0.5, _SUBNORMAL * 2.0**1000)  # of a subnormal result, and of an operand
