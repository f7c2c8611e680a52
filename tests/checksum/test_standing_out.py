"""An error that a product and its repetition have alike, as a broken processor makes it, does not stay in C."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import encode, errstate, protected_gemm
from abft_tsm2.core.faultpoint import planting


def planted(A: Any, B: Any, change: Any, **options: Any) -> tuple[Any, Any, list[str]]:
    """The product, its report, and the stages of each product in which ``change(C)`` was carried out."""
    reached: list[str] = []

    def plant(stage: str, arrays: Any) -> None:
        if stage in ("multiplied", "repeated"):
            change(arrays["C"])
            reached.append(stage)

    with planting(plant), errstate(corrected="ignore"):
        C, report = protected_gemm(A, B, return_report=True, **options)
    return C, report, reached


@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize(("dtype", "n"), [("float64", 400), ("float64", 512), ("float32", 512), ("float64", 1040)])
def test_an_element_that_is_wrong_in_both_products_is_computed_again(dtype: str, n: int, check: str) -> None:
    rng = np.random.default_rng(n)
    A, B = rng.standard_normal((2, n, n)).astype(dtype)
    clean, report = protected_gemm(A, B, return_report=True, check=check)
    for _ in range(3):
        i, j = (int(x) for x in rng.integers(n, size=2))
        d = np.dtype(dtype).type(2 * report.limit(i, j))

        def change(C: Any, i: int = i, j: int = j, d: Any = d) -> None:
            C[i, j] += d

        C, found, reached = planted(A, B, change, check=check)
        assert reached[0] == "multiplied"
        assert np.abs(C - clean).max() < d / 8
        assert found.status.name == "CORRECTED" or f"C[{i}, {j}]" in found.reasons[0]


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_row_that_is_wrong_in_both_products_is_computed_again(dtype: str, carried: bool) -> None:
    n, rng = 512, np.random.default_rng(5)
    A, B = rng.standard_normal((2, n, n)).astype(dtype)
    clean, report = protected_gemm(A, B, return_report=True, check="rows")
    d = (4 * report.limit(7, 0) / np.sqrt(n) * rng.standard_normal(n)).astype(dtype)

    def change(C: Any) -> None:
        C[7] += d

    C, found, _ = planted(A, encode(B) if carried else B, change, check="rows")
    assert found.status.name == "CORRECTED" or "C[7, " in found.reasons[0]
    assert np.abs(C - clean).max() < np.abs(d).max() / 8


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_worst_of_lines_that_are_all_suspected_is_examined(dtype: str) -> None:
    """Constant data: all lines exceed their bounds by the rounding of equal terms."""
    n = 512
    A, B = np.full((n, n), 0.7, dtype), np.full((n, n), 1.3, dtype)
    A[1:] *= np.linspace(0.5, 0.6, n - 1, dtype=dtype)[:, None]
    clean, report = protected_gemm(A, B, return_report=True, check="rows")
    assert report.status.name == "CLEAN"
    d = np.dtype(dtype).type(4 * report.limit(0, 9))

    def change(C: Any) -> None:
        C[0, 9] += d

    C, found, _ = planted(A, B, change, check="rows")
    assert found.status.name == "CORRECTED" or "C[0, 9]" in found.reasons[0]
    assert abs(C[0, 9] - clean[0, 9]) < d / 8


def test_rounding_that_stands_out_among_other_lines_is_no_fault() -> None:
    """A row of equal terms among random ones, and elements whose terms begin with large equal ones."""
    n = 512
    rng = np.random.default_rng(2)
    A, B = rng.standard_normal((n, 4096)).astype(np.float32), rng.random((4096, n)).astype(np.float32)
    A[3] = 0.7
    A[9] = np.where(np.arange(4096) < 2048, 1.0, 1e-3)
    B[:, 5] = 1.3
    for left, right in ((A, B), (B.T, A.T)):
        for check in ("rows", "columns", "both"):
            C, report = protected_gemm(left, right, return_report=True, check=check)
            assert report.status.name == "CLEAN"
            assert np.array_equal(C, left @ right)


@pytest.mark.parametrize("check", ["rows", "columns", "both"])
def test_rounding_that_depends_on_the_blocks_of_blas_is_no_fault(check: str) -> None:
    """Sums that begin at 0 in the middle of k, where a BLAS begins a block, lose all of the constants behind the 1."""
    n, k, rng = 256, 640, np.random.default_rng(0)
    for begins in (320, 256, 384):
        A = rng.standard_normal((n, k)).astype(np.float32)
        A[5] = 0.999 * 2.0**-24
        A[5, : begins - 64], A[5, begins - 64 : begins], A[5, begins] = 0, -1 / 64, 1
        B = np.outer(np.ones(k), rng.choice([-1, 1], n)).astype(np.float32)
        C, report = protected_gemm(A, B, return_report=True, check=check)
        assert report.status.name == "CLEAN"
        assert np.abs(C - A.astype(np.float64) @ B).max() <= np.abs(A @ B - A.astype(np.float64) @ B).max()
