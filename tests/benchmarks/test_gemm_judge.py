"""benchmarks.gemm_judge: what it lets pass of a product, and what not."""

from __future__ import annotations

import numpy as np
import pytest

from abft_tsm2.faults.judge.oracle import arithmetic
from benchmarks import (
    gemm_judge,
)
from benchmarks.gemm_judge import Judge
from tests.support.fake_products import TYPES, multiplied, operands


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("shape", [(40, 30, 50), (3, 40, 30, 50), (1, 64, 200), (200, 8, 90)])
@pytest.mark.parametrize("dtype", [*TYPES, "float16"])
def test_a_right_product_passes_and_a_wrong_element_does_not(
    monkeypatch: pytest.MonkeyPatch, dtype: str, shape: tuple[int, ...], whole: bool
) -> None:
    monkeypatch.setattr(gemm_judge, "WHOLE", 2**33 if whole else 0)
    monkeypatch.setattr(gemm_judge, "SAMPLED", 7)
    A, B = operands(dtype, shape)
    judge = Judge(A, B, arithmetic(dtype), np)
    C = multiplied(A, B)
    assert judge(C) <= (1 if C.itemsize == 2 else 0.6)
    m = C.shape[-2]
    for row in {0, m // 2 + 1 if m > 1 else 0, m - 1}:  # the second is none of those that are sampled
        wrong = C.copy()
        wrong[..., row, 3] = 3e3
        assert judge(wrong) > 1
        wrong[..., row, 3] = np.nan
        assert np.isnan(judge(wrong))


def test_rows_that_are_asked_for_are_compared_element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_judge, "WHOLE", 0)
    monkeypatch.setattr(gemm_judge, "SAMPLED", 4)
    A, B = operands("float32", (90, 30, 50))
    C = multiplied(A, B)
    C[17, 5] += 2e-4  # too little for the random vector
    assert Judge(A, B, arithmetic("float32"), np)(C) <= 1
    assert Judge(A, B, arithmetic("float32"), np, [17])(C) > 1


def test_tf32_is_allowed_what_cutting_its_operands_takes_and_no_more() -> None:
    A, B = operands("float32", (60, 400, 50))
    cut = [(x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (A, B)]
    C = multiplied(*cut)
    assert Judge(A, B, arithmetic("float32", tf32=True), np)(C) <= 1
    assert Judge(A, B, arithmetic("float32"), np)(C) > 1
    C[3, 4] += 2
    assert Judge(A, B, arithmetic("float32", tf32=True), np)(C) > 1
