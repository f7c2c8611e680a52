"""Ask the processor whether it takes subnormal numbers for zero: flush-to-zero, denormals-are-zero; FZ on ARM.

Each thread has its own mode. `torch.set_flush_denormal` sets it, and so does loading a library that was linked with
-ffast-math, for the thread that loads it and those that it starts.
"""

from __future__ import annotations

import sys

_SMALLEST = sys.float_info.min  # the smallest normal number: half of it is subnormal


def flushes() -> bool:
    """Whether this thread's results or operands that are subnormal count as zero."""
    return _SMALLEST * 0.5 == 0.0
