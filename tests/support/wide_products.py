"""Products of float64 matrices that are exact but for one rounding to long double, by a BLAS.

A long double product has no BLAS, and takes a hundred times as long. Each operand is cut into slices of so few bits
that float64 products of two slices are exact in any order of summation (Ozaki, Ogita, Oishi and Rump, Numerical
Algorithms 59, 2012, 95-118); these products are added in long double, largest last.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

WIDE = np.longdouble
SMALL = 24_000  # multiplications that are not worth slices
REACH = 400  # binary exponents within which no slice and no product of two leaves the range of float64


def wide_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a b in long double, for operands of any real type that long double holds."""
    if a.shape[0] * a.shape[1] * b.shape[1] <= SMALL or not (_sliceable(a) and _sliceable(b)):
        product: np.ndarray = a.astype(WIDE) @ b.astype(WIDE)
        return product
    bits = (53 - math.ceil(math.log2(a.shape[1] + 1))) // 2
    left, right = _slices(a.astype(np.float64), 1, bits), _slices(b.astype(np.float64), 0, bits)
    found = np.zeros((a.shape[0], b.shape[1]), WIDE)
    pairs = itertools.product(range(len(left)), range(len(right)))
    for i, j in sorted(pairs, key=sum, reverse=True):
        found += left[i] @ right[j]
    return found


def wide_moduli(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """No more than |a| |b|, and less by no more than rounding in float64 explains: for bounds."""
    a, b = abs(a), abs(b)
    if a.shape[0] * a.shape[1] * b.shape[1] <= SMALL or not (_sliceable(a) and _sliceable(b)):
        product: np.ndarray = a.astype(WIDE) @ b.astype(WIDE)
        return product
    rounded = a.astype(np.float64) @ b.astype(np.float64)
    lower: np.ndarray = rounded.astype(WIDE) * (1 - WIDE(2 * a.shape[1] * float(np.finfo(np.float64).eps)))
    return lower


def _sliceable(x: np.ndarray) -> bool:
    """Whether float64 holds it, well within its range."""
    with np.errstate(all="ignore"):
        narrow = x.astype(np.float64)
        exponents = np.frexp(abs(narrow[narrow != 0]))[1]
    if not np.isfinite(narrow).all() or (x.dtype.itemsize > 8 and not np.array_equal(narrow.astype(x.dtype), x)):
        return False
    return exponents.size == 0 or bool(exponents.min() > -REACH and exponents.max() < REACH)


def _slices(x: np.ndarray, axis: int, bits: int) -> list[Any]:
    """Matrices whose sum is x; in each line along the axis, a slice's elements are multiples of one power of two, of
    no more than these bits."""
    found = []
    while x.any():
        exponent = np.frexp(abs(x).max(axis, keepdims=True))[1]
        # Adding and subtracting rounds x to multiples of 2^(exponent - bits).
        shift = np.ldexp(0.75, exponent + 53 - bits)
        part = (x + shift) - shift
        found.append(part)
        x = x - part
    return found or [x]
