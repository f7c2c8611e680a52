"""Clean products of data as users have them raise no suspicion, and a fault among them is found.

A suspicion of a clean product costs a second one: data of one sign, with zeros, sorted or of another scale have to pass
by cheaper norms, on every route and in every type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Status, encode, protected_gemm
from tests.support.cases import DTYPES
from tests.support.planting import at, put

Rng = np.random.Generator
Pair = tuple[np.ndarray, np.ndarray]


def half_small(rng: Rng, m: int, k: int, n: int) -> Pair:
    A = rng.standard_normal((m, k))
    A[:, : k // 2] *= 1e-3
    return A, rng.standard_normal((k, n))


def padded(rng: Rng, m: int, k: int, n: int) -> Pair:
    A, B = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    A[-m // 8 :], A[:, -k // 8 :], B[-k // 8 :], B[:, -n // 8 :] = 0, 0, 0, 0
    return A, B


def zero_column(rng: Rng, m: int, k: int, n: int) -> Pair:
    A, B = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    B[:, n // 3] = 0
    A[m // 3] = 0
    return A, B


def softmax(rng: Rng, m: int, k: int, n: int) -> Pair:
    A = np.exp(3 * rng.standard_normal((m, k)))
    return A / A.sum(1, keepdims=True), rng.standard_normal((k, n))


def image(rng: Rng, m: int, k: int, n: int) -> Pair:
    def smooth(p: int, q: int) -> np.ndarray:
        waves = np.sin(7 * np.linspace(0, 1, p))[:, None] * np.cos(5 * np.linspace(0, 1, q))
        return np.clip(np.rint(128 + 60 * waves + 10 * rng.standard_normal((p, q))), 0, 255) / 255

    return smooth(m, k), smooth(k, n)


def each(make: Callable[[Rng, tuple[int, int]], np.ndarray]) -> Callable[[Rng, int, int, int], Pair]:
    return lambda rng, m, k, n: (make(rng, (m, k)), make(rng, (k, n)))


FAMILIES: dict[str, Callable[[Rng, int, int, int], Pair]] = {
    "uniform": each(lambda rng, shape: rng.random(shape)),
    "relu": each(lambda rng, shape: np.maximum(rng.standard_normal(shape), 0)),
    "sparse": each(lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.01)),
    "sorted": lambda rng, m, k, n: (np.sort(rng.standard_normal((m, k)), 1), np.sort(rng.standard_normal((k, n)), 0)),
    "half of k small": half_small,
    "padded": padded,
    "zero column": zero_column,
    "softmax": softmax,
    "image": image,
    "zeros": each(lambda rng, shape: np.zeros(shape)),
    "identity": each(lambda rng, shape: np.eye(*shape)),
    "small": lambda rng, m, k, n: (rng.standard_normal((m, k)), rng.standard_normal((k, n)) * 1e-11),
    "tiny": lambda rng, m, k, n: (rng.standard_normal((m, k)) * 1e-200, rng.standard_normal((k, n))),
    "huge": lambda rng, m, k, n: (rng.standard_normal((m, k)) * 1e150, rng.standard_normal((k, n)) * 1e120),
}
SHAPES = {"small": (40, 30, 50), "middle": (90, 300, 130), "long": (30, 1100, 70), "large": (300, 700, 260)}
WIDE_RANGE = {"small": 4, "tiny": 8, "huge": 8}  # bytes of an element that holds them


def operands(data: str, shape: str, dtype: Any, seed: int = 0) -> Pair:
    if np.dtype(dtype).itemsize < WIDE_RANGE.get(data, 0):
        pytest.skip("beyond the range of the type")
    A, B = FAMILIES[data](np.random.default_rng(seed), *SHAPES[shape])
    return A.astype(dtype), B.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("data", FAMILIES)
def test_no_suspicion_of_a_clean_product(data: str, shape: str, dtype: Any) -> None:
    A, B = operands(data, shape, dtype)
    for check in ("rows", "columns"):
        for a, b in ((A, B), (A, encode(B)), (np.asfortranarray(A), B)):
            C, report = protected_gemm(a, b, check=check, return_report=True)
            assert (report.status, report.suspicions) == (Status.CLEAN, 0), report
            assert np.array_equal(C, protected_gemm(a, b, check=check))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("data", FAMILIES)
def test_no_suspicion_of_a_clean_batch(data: str, dtype: Any) -> None:
    pairs = [operands(data, "small", dtype, seed) for seed in range(4)]
    A, B = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
    report = protected_gemm(A, B, return_report=True)[1]
    assert (report.status, report.suspicions) == (Status.CLEAN, 0), report


@pytest.mark.parametrize("shape", ["small", "large"])
@pytest.mark.parametrize("data", FAMILIES)
def test_a_fault_beyond_the_limit_is_found_in_them(data: str, shape: str) -> None:
    A, B = operands(data, shape, np.float64)
    C, clean = protected_gemm(A, B, return_report=True)
    for i, j in ((0, 0), (7, 11), (C.shape[0] - 1, C.shape[1] - 1)):
        change = put((i, j), C[i, j] + 1.1 * clean.limit(i, j) + 1e-320)
        found, report = protected_gemm(A, B, return_report=True, on_stage=at("multiplied", "C", change))
        assert report.status is Status.CORRECTED or report.suspicions, (i, j, clean.limit(i, j), report)
        assert abs(found[i, j] - C[i, j]) <= clean.limit(i, j)
