"""What a product does not read, and what does not follow from it: operands times 0, products without elements, an Inf
that depends on the order of summation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, encode, errstate, protected_gemm, verify_gemm
from tests.support.planting import at, normal, put

NOT_FINITE = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])


@NOT_FINITE
@pytest.mark.parametrize("beta", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("n", [2, 64, 200])
def test_alpha_of_zero_reads_neither_operand(n: int, dtype: Any, beta: float, bad: float) -> None:
    """As in BLAS (J. J. Dongarra et al., ACM Trans. Math. Softw. 16 (1990) 1): C = beta c."""
    a, b, c = np.ones((n, n), dtype), np.eye(n, dtype=dtype), normal(n, n, dtype=dtype)
    a[0, 0] = b[1, 0] = bad
    for left, right in ((a, b), (encode(np.ones_like(a)), b), (np.stack([a, a]), b)):
        found, report = protected_gemm(
            left, right, np.broadcast_to(c, found_shape(left, n)), alpha=0.0, beta=beta, return_report=True
        )
        assert (report.status, report.faults) == (Status.CLEAN, ()), report
        np.testing.assert_array_equal(found, np.broadcast_to(dtype(beta) * c, found.shape))
    assert verify_gemm(a, b, dtype(beta) * c, c, alpha=0.0, beta=beta).status is Status.CLEAN


def found_shape(left: Any, n: int) -> tuple[int, ...]:
    return (*left.shape[:-2], n, n)


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_a_fault_is_found_where_alpha_is_zero(beta: float) -> None:
    a, b, c = normal(40, 30), normal(30, 50), normal(40, 50)
    hook = at("multiplied", "C", put((3, 4), 7.0))
    found, report = protected_gemm(a, b, c, alpha=0.0, beta=beta, return_report=True, on_stage=hook)
    assert (report.status, report.faults[0].rows) == (Status.CORRECTED, (3,))
    np.testing.assert_array_equal(found, beta * c)
    with pytest.raises(SilentDataCorruptionError):
        verify_gemm(a, b, beta * c + np.eye(40, 50), c, alpha=0.0, beta=beta)


@NOT_FINITE
@pytest.mark.parametrize("check", ["auto", "rows", "columns", "both"])
def test_nothing_follows_in_a_product_without_elements(check: str, bad: float) -> None:
    for m, k, n in ((3, 4, 0), (0, 4, 3), (0, 4, 0)):
        a, b = np.ones((m, k)), np.ones((k, n))
        (a if a.size else b)[:1, :1] = bad
        c, report = protected_gemm(a, b, check=check, return_report=True)
        assert c.shape == (m, n)
        assert (report.status, report.reasons, report.suspicions) == (Status.CLEAN, (), 0)
        assert verify_gemm(a, b, c, check=check).status is Status.CLEAN


@pytest.mark.parametrize("lines", [1, 40])
@pytest.mark.parametrize("inf", [np.inf, -np.inf])
def test_an_infinity_that_only_some_orders_of_summation_give(inf: float, lines: int) -> None:
    """1.7e308 + 1.7e308 - 1.7e308 - 1.7e308 is 0, or Inf of either sign."""
    a, b = np.tile([1.7e308, 1.7e308, -1.7e308, -1.7e308], (lines, 1)), np.ones((4, 1))
    with errstate(unverifiable="ignore"):
        for c in (inf, 0.0):
            report = verify_gemm(a, b, np.full((lines, 1), c), on_error="detect")
            assert report.status is (Status.CLEAN if c == 0 else Status.UNVERIFIABLE), report
        a[:, 2:] = 0  # what belongs there is Inf, in any order
        assert verify_gemm(a, b, np.full((lines, 1), np.inf), on_error="detect").status is Status.CLEAN
