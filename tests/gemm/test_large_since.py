"""Elements of operands that became large since they were encoded widen no bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Report, SilentDataCorruptionError, encode, errstate, protected_gemm
from abft_tsm2.checksum.weights import weights
from abft_tsm2.core.faultpoint import planting


def outcome(A: Any, B: Any, plant: Any, **options: Any) -> tuple[Any, Report]:
    with planting(plant), errstate(corrected="ignore"):
        try:
            return protected_gemm(A, B, return_report=True, **options)
        except SilentDataCorruptionError as error:
            return None, error.report


@pytest.mark.parametrize("operand", ["A", "B"])
@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize(
    ("dtype", "huge"), [("float64", 1e13), ("float64", 1e300), ("float32", 1e6), ("float32", 1e38)]
)
@pytest.mark.parametrize("n", [100, 1040])
def test_a_wrong_element_does_not_hide_behind_a_large_operand(
    n: int, dtype: str, huge: float, check: str, operand: str
) -> None:
    rng = np.random.default_rng(n)
    A, B = rng.standard_normal((n, 100)).astype(dtype), rng.standard_normal((100, n)).astype(dtype)
    clean = A @ B

    def plant(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            arrays["C"][5, 7] += 0.5
            (A if operand == "A" else B)[(5, 0) if operand == "A" else (1, 7)] = huge

    C, report = outcome(A, B, plant, check=check)
    assert report.status.name == "INPUT_CHANGED" or abs(C[5, 7] - clean[5, 7]) < 0.1


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("encoded", [False, True])
def test_what_meets_a_small_checksum_is_found_when_it_is_large(encoded: bool, stacked: bool) -> None:
    """A change of B(p, j) moves the residual of column j by the checksum of column p of A, which may be near 0."""
    m, k, n = 64, 640, 64
    for seed in range(4):
        rng = np.random.default_rng(seed)
        A = rng.standard_normal((m, k)).astype(np.float32)
        B = rng.standard_normal((k, n)).astype(np.float32)
        V = weights(n=m)[:, 0]
        p = 64 + int(np.argmin(np.abs(V @ A[:, 64:])))  # beyond the terms whose norms are known
        A[0, p] -= np.float32(V @ A[:, p] * (1 - 1e-7) / V[0])  # the rest is what float32 loses
        clean = A @ B

        def plant(stage: str, arrays: Any, p: int = p) -> None:
            if stage == "encoded":
                b = arrays["B"]
                b[(..., p, 3)] = 1e30

        operands = (np.stack([A, A]), np.stack([B, B])) if stacked else (A, encode(B) if encoded else B)
        C, report = outcome(*operands, plant, check="columns")
        assert C is None or report.status.name != "CLEAN" or np.abs(C - clean).max() < 1.0
