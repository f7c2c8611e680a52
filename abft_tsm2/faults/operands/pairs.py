"""Pairs of operands that belong together: products whose rounding errors add up coherently, or that cancel.

A is m x k and B is k x n; their elements fit into 16 bits, and so do their products for k up to some thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Matrix = np.ndarray[Any, np.dtype[Any]]
Generator = np.random.Generator
Pair = Callable[[Generator, int, int, int], tuple[Matrix, Matrix]]


def _constant(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    return np.full((m, k), 0.1), np.full((k, n), 0.3)


def _constant_lines(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    return np.repeat(rng.uniform(0.1, 1, (m, 1)), k, 1), np.repeat(rng.uniform(0.1, 1, (1, n)), k, 0)


def _signed_lines(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    return np.repeat(rng.standard_normal((m, 1)), k, 1), np.repeat(rng.standard_normal((1, n)), k, 0)


def _halves_cancel(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    A, B = _constant_lines(rng, m, k, n)
    A[:, k // 2 :] *= -1
    return A, B


def _halves_nearly_cancel(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    h = k // 2
    A, B = np.zeros((m, k)), np.zeros((k, n))
    A[:, :h], B[:h] = rng.random((m, h)) + 0.5, rng.random((h, n)) + 0.5
    A[:, h : 2 * h] = A[:, :h] * (1 + 1e-6 * rng.standard_normal((m, h)))
    B[h : 2 * h] = -B[:h] * (1 + 1e-6 * rng.standard_normal((h, n)))
    return A, B


def _neighbours_cancel(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    A, B, h = rng.random((m, k)) + 0.5, rng.random((k, n)) + 0.5, k // 2
    B[1::2] = -B[0 : 2 * h : 2] * (1 + 1e-6 * rng.standard_normal((h, n)))
    A[:, 1::2] = A[:, 0 : 2 * h : 2]
    return A, B


def _sorted(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    return np.sort(rng.standard_normal((m, k)), 1), np.sort(rng.standard_normal((k, n)), 0)


def _sine(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    x = 2 * np.pi * np.arange(k) / k
    A = np.sin(np.outer(rng.integers(1, 8, m), x) + rng.uniform(0, 6, (m, 1)))
    return A, np.cos(np.outer(x, rng.integers(1, 8, n)) + rng.uniform(0, 6, (1, n)))


def _harmonic(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    falling = 1 / np.arange(1.0, k + 1)
    return np.repeat(falling[None, :], m, 0) * rng.uniform(0.5, 1, (m, 1)), np.ones((k, n)) * rng.uniform(0.5, 1, n)


def _hilbert(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    inner = np.arange(k)
    return 1 / (np.arange(m)[:, None] + inner + 1.0), 1 / (inner[:, None] + np.arange(n) + 1.0)


def _equal_columns(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    return rng.random((m, k)), np.repeat(rng.random((k, 1)), n, 1)


def _counted_up(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    return np.arange(m * k).reshape(m, k) / (m * k), np.arange(k * n).reshape(k, n) / (k * n)


def _one_of_each(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    A = np.zeros((m, k))
    A[np.arange(m), rng.permutation(max(m, k))[:m] % k] = 1
    return A, rng.standard_normal((k, n))


def _outliers(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    A, B = rng.standard_normal((m, k)), rng.standard_normal((k, n)) / 16
    A[rng.integers(m)] *= 32
    B[:, rng.integers(n)] *= 32
    return A, B


def _graded_inside(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    d = 2.0 ** rng.integers(-5, 6, k)
    return rng.standard_normal((m, k)) * d, rng.standard_normal((k, n)) / d[:, None]


def _mixed_rows(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    A = rng.standard_normal((m, k))
    A[::100] = abs(A[::100])  # one row in a hundred adds up and does not average out
    return A, rng.standard_normal((k, n)) + 1


def _softmax(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    z = np.exp(3 * rng.standard_normal((m, k)))
    return z / z.sum(1, keepdims=True), rng.standard_normal((k, n))


def _nearly_low_rank(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    A = rng.standard_normal((m, 3)) @ rng.standard_normal((3, k)) + 1e-3 * rng.standard_normal((m, k))
    return A, rng.standard_normal((k, 3)) @ rng.standard_normal((3, n)) + 1e-3 * rng.standard_normal((k, n))


def _zeros(rng: Generator, m: int, k: int, n: int) -> tuple[Matrix, Matrix]:
    return np.zeros((m, k)), np.zeros((k, n))


PAIRS: Mapping[str, tuple[str, Pair]] = {
    "constant": ("all elements alike: rounding errors are, too", _constant),
    "constant lines": ("rows of A and columns of B constant and positive", _constant_lines),
    "signed lines": ("rows of A and columns of B constant, of either sign", _signed_lines),
    "halves cancel": ("the second half of a sum takes away all of the first, exactly", _halves_cancel),
    "halves nearly cancel": ("the second half takes away all but a millionth of the first", _halves_nearly_cancel),
    "neighbours cancel": ("each second term takes away the one before it", _neighbours_cancel),
    "sorted": ("rows of A and columns of B in ascending order", _sorted),
    "sine": ("waves: most sums are nearly 0", _sine),
    "harmonic": ("terms 1, 1/2, 1/3, ...", _harmonic),
    "hilbert": ("two Hilbert matrices", _hilbert),
    "equal columns": ("all columns of B alike", _equal_columns),
    "counted up": ("0, 1, 2, ... in the order of memory", _counted_up),
    "one of each": ("rows of A with a single 1", _one_of_each),
    "outliers": ("a row of A and a column of B that are 32 times larger", _outliers),
    "graded inside": ("columns of A and rows of B of scales that cancel", _graded_inside),
    "mixed rows": ("one row of A in a hundred without a minus", _mixed_rows),
    "softmax": ("rows of A that add up to 1, of few large elements", _softmax),
    "nearly low rank": ("rank 3 and a thousandth of noise", _nearly_low_rank),
    "zeros": ("nothing but zeros", _zeros),
}
"""Functions of a generator and m, k and n, each with what it makes."""
