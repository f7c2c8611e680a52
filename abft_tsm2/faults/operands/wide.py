"""Pairs of operands whose elements span the range of their type, and whose product does not show it.

What is large along k meets what is small; a number that stands for "none" meets zeros; lines differ by 30 decades. Only
normal numbers are made but for the zeros, so that all is the same where subnormal numbers count as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from abft_tsm2.arrays import FloatType

Matrix = np.ndarray[Any, np.dtype[Any]]
Generator = np.random.Generator
WidePair = Callable[[Generator, int, int, int, FloatType], tuple[Matrix, Matrix]]
DECADES = 30  # that lines differ by, where the type has them


def decades_of(kind: FloatType) -> float:
    """So many decades on either side of 1 may scales be, for elements of ordinary size times them to be normal."""
    return min(kind.max_exponent - 3, -kind.min_exponent - 5) * math.log10(2)


def _numbers(rng: Generator, rows: int, columns: int) -> Matrix:
    """Of either sign, from 1/16 to 4: near normal ones."""
    x = rng.standard_normal((rows, columns))
    return np.copysign(np.clip(abs(x), 1 / 16, 4), x)


def _inside(rng: Generator, m: int, n: int, scales: Matrix) -> tuple[Matrix, Matrix]:
    return _numbers(rng, m, scales.size) * scales, _numbers(rng, scales.size, n) / scales[:, None]


def _wide_inside(rng: Generator, m: int, k: int, n: int, kind: FloatType) -> tuple[Matrix, Matrix]:
    most = rng.uniform(0.2, 1) * decades_of(kind)
    return _inside(rng, m, n, 10.0 ** rng.uniform(-most, most, k))


def _factorials(rng: Generator, m: int, k: int, n: int, kind: FloatType) -> tuple[Matrix, Matrix]:
    logs = np.cumsum(np.log10(np.arange(1.0, k + 1)))
    return _inside(rng, m, n, 10.0 ** (logs * min(1.0, decades_of(kind) / max(float(logs[-1]), 1e-9))))


def _sentinel(rng: Generator, m: int, k: int, n: int, kind: FloatType) -> tuple[Matrix, Matrix]:
    A, B, p = _numbers(rng, m, k), _numbers(rng, k, n), int(rng.integers(k))
    none = 10.0 ** (rng.uniform(0.5, 1) * decades_of(kind))
    column, row = (none, 0.0) if rng.integers(2) else (0.0, none)
    A[:, p], B[p] = column, row
    return A, B


def _graded_columns(rng: Generator, m: int, k: int, n: int, kind: FloatType) -> tuple[Matrix, Matrix]:
    return _numbers(rng, m, k), _numbers(rng, k, n) * _grades(rng, n, kind)


def _graded_lines(rng: Generator, m: int, k: int, n: int, kind: FloatType) -> tuple[Matrix, Matrix]:
    rows, columns = (_grades(rng, size, kind, share=0.5) for size in (m, n))
    return _numbers(rng, m, k) * rows[:, None], _numbers(rng, k, n) * columns


def _grades(rng: Generator, size: int, kind: FloatType, share: float = 1.0) -> Matrix:
    """Scales over 30 decades, or what a share of those of the type leaves, the ends included."""
    most = min(DECADES / 2, share * decades_of(kind) - 1)
    grades = rng.uniform(-most, most, size)
    grades[rng.permutation(size)[:2]] = (-most, most)[: min(2, size)]
    return np.asarray(10.0**grades)


def _one_of_each_and_noise(rng: Generator, m: int, k: int, n: int, kind: FloatType) -> tuple[Matrix, Matrix]:
    A = _numbers(rng, m, k) * 2.0 ** -(kind.precision // 2)
    A[np.arange(m), rng.permutation(max(m, k))[:m] % k] = 1
    return A, _numbers(rng, k, n)


WIDE: Mapping[str, tuple[str, WidePair]] = {
    "wide inside": ("columns of A and rows of B of scales that cancel, over up to all of the range", _wide_inside),
    "factorials": ("columns of A times p!, rows of B over p!, as far as the range goes", _factorials),
    "sentinel": ("a column of A of one huge number and a row of zeros in B, or the other way round", _sentinel),
    "graded columns": ("columns of B of scales over 30 decades, in 16 bits of what the range has", _graded_columns),
    "graded lines": ("rows of A and columns of B of such scales", _graded_lines),
    "one of each and noise": ("rows of A with a single 1, and noise of half of the digits", _one_of_each_and_noise),
}
"""Functions of a generator, m, k and n, and a type, each with what it makes."""
