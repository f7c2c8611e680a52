"""LU without checks, by LAPACK or on a GPU: what a protected factorisation is compared with, and what is said of it."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from abft_tsm2 import policy
from abft_tsm2.arrays import FLOATS, Array, is_cupy, namespace, to_host
from abft_tsm2.core.blas import copy_by_columns, factor_panel
from abft_tsm2.linalg.device.factorisation import DeviceFactorisation
from abft_tsm2.linalg.outcome import Clock

GROWN = "elements of the factors grow beyond the range of the type"
SQUARED = 1e140  # growth whose square float64 can still add up


def factored_plainly(A: Array, clock: Clock) -> tuple[Array, Any, int]:
    """LAPACK's own factorisation of a copy, or a GPU's: packed factors, pivots, and info."""
    if is_cupy(A):
        with clock("factor"):
            queued = DeviceFactorisation(A, encoded=False)
            queued.wait()
            info = queued.info
            queued.release()
            return queued.W, to_host(queued.piv), info
    with clock("encode"):
        W = copy_by_columns(A)
    with clock("factor"):
        pivots, info = factor_panel(W, narrow=min(W.shape))
    return W, pivots, info


def overflows(W: Array, A: Array) -> bool:
    """Whether factors are too large for their type, or their squares for the checks. The limit may be Inf itself, where
    A is near the end of the range, and then bounds nothing."""
    xp = namespace(W)
    double = W.dtype == xp.float64
    limit = float(xp.max(xp.abs(A))) * SQUARED if double else FLOATS["float32"].largest
    return not bool(xp.all((xp.abs(W) <= limit) & xp.isfinite(W)))


def warn_of_zero(info: int) -> None:
    """SciPy's warning, at the caller's line."""
    linalg = importlib.import_module("scipy.linalg")
    text = f"Diagonal number {info} is exactly zero. Singular matrix."
    warnings.warn(text, linalg.LinAlgWarning, stacklevel=policy.caller_level())
