"""Faults so large that they would widen the bound they are compared with, and whose weighted sum nearly cancels.

What a line of C can amount to is known from the operands alone: ||C_i o v|| <= sqrt(k) ||a_i o (B o v)||.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Status, encode, protected_gemm, weights
from abft_tsm2.checksum.bounds import arithmetic, statistical_bound
from tests.support.cases import DTYPES, finfo
from tests.support.planting import Product, pair, put

IDS = [dtype.name for dtype in DTYPES]


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_a_line_of_one_large_value_is_found(side: str, dtype: Any) -> None:
    for n in range(2, 101, 3):  # for some of them the weights add up to very little
        A, B = pair(n, 5, n, dtype, seed=n)
        for where in (n // 2, (slice(None), n // 3)):
            product = Product(A, B, put(where, -1e4), check=side)
            assert product.status == "CORRECTED", (n, where)
            assert not product.wrong.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("n", [48, 130])
def test_two_huge_elements_of_nearly_opposite_weight_are_found(n: int, side: str, dtype: Any) -> None:
    A, B = pair(n, 20, n, dtype)
    v = weights("balanced", n)[:, 0]
    # Of a long line only a part is looked at where its checksum holds: weights that cancel exactly are beyond it.
    pairs = sorted((abs(v[i] + v[j]), i, j) for i in range(n) for j in range(i) if n <= 64 or v[i] != -v[j])
    huge = float(finfo(dtype).max) ** 0.9
    for _, i, j in pairs[:8]:
        where = (5, [i, j]) if side == "rows" else ([i, j], 5)
        product = Product(A, B, put(where, huge), check=side)
        assert product.status == "CORRECTED"
        assert not product.wrong.any()


@pytest.mark.parametrize("data", ["normal", "positive", "half of k small"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
def test_the_closest_line_is_that_of_whole_norms(data: str, dtype: Any) -> None:
    """Lower bounds from a part of the terms pass nearly all lines; what the report says is of all terms."""
    rng = np.random.default_rng(0)
    A, B = (
        rng.random(shape) if data == "positive" else rng.standard_normal(shape) for shape in ((500, 3000), (3000, 400))
    )
    if data == "half of k small":
        A[:, :1500] *= 1e-3
    A, B = A.astype(dtype), B.astype(dtype)
    E = encode(B, side="rows", recheck=False)
    C, report = protected_gemm(A, E, return_report=True)
    assert report.status is Status.CLEAN
    assert report.suspicions == 0
    # (float32 checksums round a little themselves)
    V, wide = E.weights.rows, [x.astype(np.float64) for x in (A, B, C)]
    residual = np.abs(wide[2] @ V - wide[0] @ (wide[1] @ V))
    sizes = np.sqrt(wide[0] ** 2 @ (wide[1] ** 2 @ V**2)), np.sqrt(wide[2] ** 2 @ V**2)
    how = arithmetic(A.dtype.name, C.dtype.name)
    tau = statistical_bound(np, how, 3000, 400, products=sizes[0], stored=sizes[1], added=None, underflow=0.0)
    # Three checksums of a float32 line round by 5 u each, its bound is 4 sqrt(k) u.
    noise = 3 * 5 / (4 * np.sqrt(3000)) if A.dtype == np.float32 else 0.0
    np.testing.assert_allclose(report.closest, (residual / tau).max(), rtol=0.5, atol=noise)
