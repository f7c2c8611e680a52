"""Extra memory: at most 64 MB and O(m + k + n) beyond the operands and the result, in repair too.

Traced by `tracemalloc`, which NumPy reports its arrays to. Where a product would take long, its shape is such that
only one of A, B and C is large: a full-size copy of that one is then more than is allowed.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import encode, protected_gemm
from tests.support.cases import DTYPES
from tests.support.planting import Change, at, normal, put, scale

MB = 2**20
MOST = 64 * MB

FAULTS: dict[str, Change | None] = {
    "clean": None,
    "element": put((5, 3), 1e4),
    "row": put(5, 1e3),
    "column": put((slice(None), 3), 1e3),
    "row and column": lambda C: (put(5, 1e3)(C), put((slice(None), 3), 1e3)(C)),
    "tile": scale((slice(100, 164), slice(200, 264)), 1.25),
    "all": scale(slice(None), 1.25),
}


def peak(call: Callable[[], Any]) -> tuple[int, Any]:
    """The most memory in use at any time of the call, beyond what was before, and what it returned."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = call()
        return tracemalloc.get_traced_memory()[1] - before, result
    finally:
        tracemalloc.stop()


def extra(A: np.ndarray, B: np.ndarray, fault: str, **options: Any) -> int:
    """Peak of one product with a fault, beyond C."""
    change = FAULTS[fault]
    hook = None if change is None else at("multiplied", "C", change)
    most, (C, report) = peak(lambda: protected_gemm(A, B, return_report=True, on_stage=hook, **options))
    assert report.status.name == ("CLEAN" if change is None else "CORRECTED")
    return int(most) - C.nbytes


def test_the_measurement_sees_a_copy() -> None:
    x = np.zeros(MB)
    assert peak(x.copy)[0] > 8 * MB
    assert peak(lambda: x[:10].copy())[0] < MB


@pytest.mark.parametrize("fault", ["clean", "row and column", "all"])
def test_single_precision_3000(fault: str) -> None:
    n = 3000
    A, B = (np.tile(normal(n, 100, dtype=np.float32, seed=seed), 30) for seed in (0, 1))
    assert extra(A, B, fault) < MOST


@pytest.mark.parametrize(
    ("side", "fault"),
    [("rows", fault) for fault in FAULTS if fault != "row and column"]
    + [("columns", fault) for fault in ("clean", "element", "all")],
)
def test_no_copy_of_a_large_c(side: str, fault: str) -> None:
    A, B = normal(4200, 8, dtype=np.float32), normal(8, 4200, dtype=np.float32)
    again = 4 * 4200**2 if fault == "all" else 0  # where every line fails the product is computed once more, whole
    assert extra(A, B, fault, check=side) < MOST + again


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_no_copy_of_a_large_c_of_any_type(dtype: Any) -> None:
    columns = 100 * MB // 3000 // 8  # a float64 copy of C would be 100 MB
    A, B = normal(3000, 4, dtype=dtype), normal(4, columns, dtype=dtype)
    assert extra(A, B, "all") < MOST + dtype.itemsize * 3000 * columns


@pytest.mark.parametrize(
    ("large", "order", "fault"),
    [
        ("A", "C", "clean"),
        ("A", "F", "element"),
        ("A", "strided", "all"),
        ("B", "C", "all"),
        ("B", "F", "clean"),
        ("B", "strided", "element"),
    ],
)
def test_no_copy_of_a_large_operand(large: str, order: str, fault: str) -> None:
    big = np.tile(normal(18000, 50, dtype=np.float32), 20)
    if order == "F":
        big = np.asfortranarray(big)
    elif order == "strided":
        big = np.repeat(big, 2, axis=1)[:, ::2]
    small = normal(1000, 8, dtype=np.float32)
    small[:, 1:] = small[:, :1]
    A, B = (big, small) if large == "A" else (small.T, big.T)
    assert big.nbytes > MOST
    assert extra(A, B, fault) < MOST


def test_no_copy_of_an_operand_of_another_type() -> None:
    big = np.tile(normal(18000, 50, dtype=np.float32), 20)
    assert extra(big, normal(1000, 8), "clean") < MOST
    assert extra(normal(8, 1000), big.T, "element") < MOST


@pytest.mark.parametrize("fault", ["clean", "row", "column", "all"])
def test_half_precision(fault: str) -> None:
    A, B = normal(2000, 300, dtype=np.float16), normal(300, 2000, dtype=np.float16)
    assert extra(A, B, fault) < MOST


def test_a_large_operand_in_half_precision() -> None:
    big = np.tile(normal(20000, 50, dtype=np.float16), 20)  # in float32 80 MB
    assert extra(big, normal(1000, 4, dtype=np.float16), "element") < MOST
    assert extra(normal(4, 1000, dtype=np.float16), big.T, "clean", check="rows") < MOST


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_encoding(dtype: Any) -> None:
    A = np.tile(normal(5000, 50, dtype=dtype), 100)
    most, E = peak(lambda: encode(A))
    assert most < MOST
    A[7, 8] = 99
    assert peak(E.verify)[0] < MOST
    assert peak(E.correct)[0] < MOST


def test_c_that_is_added_and_c_that_is_overwritten() -> None:
    A, B = normal(4200, 8, dtype=np.float32), normal(8, 4200, dtype=np.float32)
    c = np.ones((4200, 4200), np.float32)
    assert extra(A, B, "row", c=c, beta=2.0) < MOST
    hook = at("multiplied", "C", put(5, 1e3))
    most, _ = peak(lambda: protected_gemm(A, B, c, beta=2.0, out=c, on_stage=hook))
    assert most < MOST + c.nbytes  # the copy that a repair needs


def test_a_report_keeps_nothing_alive() -> None:
    A, B = normal(1000, 8), normal(8, 1000)

    def reports() -> list[Any]:
        hook = at("multiplied", "C", put(slice(None), np.nan))
        return [protected_gemm(A, B, return_report=True, on_stage=hook)[1] for _ in range(3)]

    tracemalloc.start()
    try:
        kept = reports()
        assert tracemalloc.get_traced_memory()[0] < 4 * MB  # C has 8
        assert len(kept) == 3
    finally:
        tracemalloc.stop()
