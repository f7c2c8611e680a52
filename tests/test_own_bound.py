"""Faults so large that they would widen the bound they are compared with, and whose weighted sum nearly cancels.

What a line of C can amount to is known from the operands alone: ||C_i o v|| <= sqrt(k) ||a_i o (B o v)||.
"""

from __future__ import annotations

from typing import Any

import pytest

from abft_tsm2 import weights
from tests.cases import DTYPES, finfo
from tests.planting import Product, pair, put

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
