"""A library that multiplies rightly in the place of cuBLAS, for tests of benchmarks.rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.rounding.engines import Engine
from benchmarks.rounding.operands import rounded, widened


def tf32(x: np.ndarray) -> np.ndarray:
    """To the nearest of TF32, ties away from zero, as cvt.rna does."""
    return ((x.view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000)).view(np.float32)


def computed(engine: Engine, A: Any, B: Any) -> Any:
    """What a good library gives; an emulating engine is the plain one."""
    sums = "float64" if engine.inputs == "float64" else "float32"
    a, b = (widened(x, engine.inputs).astype(sums) for x in (A, B))
    if engine.reduced:
        a, b = tf32(a), tf32(b)
    return rounded((a @ b).astype(np.float64), engine.out)
