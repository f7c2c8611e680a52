"""Ways to protect a product, most of them bad: ``tests.support.campaign_schemes:name`` in a campaign."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from abft_tsm2.core.flushing import flushes

Matrix = np.ndarray
SLOWLY = 0.02  # seconds
STOPS = "ABFT_TSM2_TEST_STOPS"  # the variable that says after how many products a process of `slow` stands still
Multiply = Callable[[Matrix, Matrix], Matrix]


def believes(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix:
    """Whatever comes is right."""
    return multiply(A, B)


def refuses(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix | None:
    """Right the first time, when it is asked what the product is; then nothing is good enough."""
    return None if _seen(A) else multiply(A, B)


def sees_subnormals(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix | None:
    """Refuses where subnormal numbers are zero."""
    C = multiply(A, B)
    return None if flushes() else C


def compares(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix | None:
    """Computes twice."""
    first, second = multiply(A, B), multiply(A, B)
    return first if np.array_equal(first, second, equal_nan=True) else None


def wrong(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix:
    """Spoils whatever comes."""
    return multiply(A, B) * 1.5


def _faulty(A: Matrix, B: Matrix, C: Matrix) -> bool:
    with np.errstate(all="ignore"):
        return not np.allclose(C, A @ B, rtol=1e-3, atol=1e-3)


def raises(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix:
    C = multiply(A, B)
    if _faulty(A, B, C):
        raise ZeroDivisionError("one fault too many")
    return C


def hangs(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix:
    C = multiply(A, B)
    if np.isnan(C).any():
        if told := os.environ.get("ABFT_TSM2_TEST_HANGS"):
            Path(told).touch()
        time.sleep(3600)
    return C


def aborts(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix:
    C = multiply(A, B)
    if np.isnan(C).any():
        os.abort()
    return C


def exits(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix:
    C = multiply(A, B)
    if np.isnan(C).any():
        os._exit(7)
    return C


def counts_threads(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix:
    """Complains where BLAS may take more than one thread, or an operand is not as it should be."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    found = [os.environ.get(name) for name in names]
    if found != ["1"] * 3:
        raise RuntimeError(f"BLAS threads: {found}")
    return multiply(A, B)


def slow(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix:
    """So that a campaign can be interrupted, before it ends, on a machine of any speed."""
    time.sleep(3600 if next(_CALLS) == int(os.environ.get(STOPS, -1)) else SLOWLY)
    return multiply(A, B)


_KNOWN: list[Matrix] = []
_CALLS = itertools.count()


def _seen(A: Matrix) -> bool:
    """Whether these operands have been here before."""
    if any(np.array_equal(A, one) for one in _KNOWN):
        return True
    _KNOWN.append(A.copy())
    return False
