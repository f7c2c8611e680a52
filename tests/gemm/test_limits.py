"""`Report.limit`: a change of an element of more than that is found, in every line, whatever the data."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Report, Status, encode, monitor, protected_gemm, verify_gemm
from tests.support.cases import DTYPES
from tests.support.planting import at, put

SHAPES = {"wide": (40, 30, 90), "tall": (150, 200, 40), "large": (200, 600, 300)}


def operands(data: str, shape: tuple[int, int, int], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    m, k, n = shape
    rng = np.random.default_rng([m, k, n])
    A, B = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    if data == "one row is larger":
        A[5] *= 100 if np.dtype(dtype).itemsize == 2 else 1e6
    elif data == "rows of many decades":
        A *= 10.0 ** rng.uniform(*((-1, 1) if np.dtype(dtype).itemsize == 2 else (-6, 6)), (m, 1))
    elif data == "positive":
        A, B = abs(A), abs(B)
    elif data == "half of k small":
        A[:, : k // 2] *= 1e-3
    elif data == "sparse":  # with lines that are 0 because what they meet is
        A, B = A * (rng.random(A.shape) < 0.02), B * (rng.random(B.shape) < 0.02)
        A[5], B[7] = 0, 0
        A[5, 7] = 1
    return A.astype(dtype), B.astype(dtype)


def test_the_next_number_beyond_the_limit_of_few_terms_is_found() -> None:
    for seed in range(400):
        rng = np.random.default_rng(seed)
        m, k, n = (int(x) for x in rng.integers(2, 30, 3))
        A, B, i, j = rng.random((m, k)), rng.random((k, n)), int(rng.integers(m)), int(rng.integers(n))
        a = encode(A) if seed % 2 else A
        C, clean = protected_gemm(a, B, return_report=True)
        limit = clean.limit(i, j)
        for way in (1, -1):
            wrong = C[i, j] + way * limit
            while abs(wrong - C[i, j]) <= limit:
                wrong = np.nextafter(wrong, way * np.inf)
            change = at("multiplied", "C", put((i, j), wrong))
            _, report = protected_gemm(a, B, return_report=True, on_stage=change)
            assert report.suspicions or report.status is not Status.CLEAN, (seed, way)


@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "data", ["normal", "one row is larger", "rows of many decades", "positive", "half of k small", "sparse"]
)
def test_a_change_beyond_its_limit_is_found(data: str, dtype: Any, check: str) -> None:
    rng = np.random.default_rng(7)
    for shape in SHAPES.values():
        A, B = operands(data, shape, dtype)
        m, _, n = shape
        for b in (B, encode(B, side="rows", recheck=False)):
            if b is not B and check != "rows":
                continue
            C, clean = protected_gemm(A, b, check=check, return_report=True)
            for _ in range(3):
                i, j = int(rng.integers(m)), int(rng.integers(n))
                if data == "one row is larger":
                    i = 5
                value = float(C[i, j]) + 1.01 * clean.limit(i, j) * rng.choice([-1, 1])
                wrong = C.dtype.type(value)
                if abs(float(wrong) - float(C[i, j])) < 1.01 * clean.limit(i, j):  # rounded back
                    wrong = np.nextafter(wrong, C.dtype.type(np.copysign(np.inf, value))) if C.itemsize > 2 else wrong
                    if abs(float(wrong) - float(C[i, j])) < clean.limit(i, j):
                        continue
                report = protected_gemm(
                    A, b, check=check, return_report=True, on_stage=at("multiplied", "C", put((i, j), wrong))
                )[1]
                assert report.status is Status.CORRECTED or report.suspicions, (shape, i, j, value, report)


def test_limits_of_one_large_row_are_those_of_that_row() -> None:
    A, B = operands("one row is larger", SHAPES["tall"], np.float64)
    report = protected_gemm(A, B, check="rows", return_report=True)[1]
    (check,) = report.checks
    assert report.limit(5, 3) > 1e5 * report.limit(6, 3)
    assert check.detection_limit >= max(report.limit(5, j) for j in range(B.shape[1]))
    assert check.median_limit < check.detection_limit / 1e5
    assert f"sure to find a change of {check.detection_limit:.2g}" in str(check)
    assert f"of {check.median_limit:.2g} in half of the rows" in str(check)


def test_the_better_side_counts() -> None:
    A, B = operands("one row is larger", SHAPES["tall"], np.float64)
    both, rows = (protected_gemm(A, B, check=check, return_report=True)[1] for check in ("both", "rows"))
    each = [check.limits for check in both.checks]
    assert both.limit(9, 4) == min(one.of(9, 4) for one in each if one is not None)
    assert rows.limit(9, 4) == both.checks[0].limits.of(9, 4)  # type: ignore[union-attr]


def test_limits_of_a_batch_are_those_of_its_products() -> None:
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((5, 20, 30)), rng.standard_normal((5, 30, 10))
    A[3] *= 1e5
    report = protected_gemm(A, B, return_report=True)[1]
    with pytest.raises(ValueError, match=r"5 products: ask report.products\[i\].limit"):
        report.limit(0, 0)
    alone = [protected_gemm(a, b, return_report=True)[1].limit(2, 7) for a, b in zip(A, B, strict=True)]
    assert [one.limit(2, 7) for one in report.products] == pytest.approx(alone, rel=1e-6)


def test_limits_of_what_is_not_asked_for_are_not_told() -> None:
    A, B = operands("normal", SHAPES["wide"], np.float64)
    with monitor() as log:
        protected_gemm(A, B)
    (report,) = log
    assert math.isnan(report.checks[0].detection_limit)
    assert "sure to find" not in str(report)
    with pytest.raises(ValueError, match="return_report=True"):
        report.limit(0, 0)


def test_limits_are_indexed_as_c_is_and_stay_out_of_the_json() -> None:
    A, B = operands("normal", SHAPES["wide"], np.float64)
    report = protected_gemm(A, B, return_report=True)[1]
    assert report.limit(-1, -1) == report.limit(39, 89)
    for wrong in ((40, 0), (0, 90), (-41, 0)):
        with pytest.raises(IndexError, match="40 x 90"):
            report.limit(*wrong)
    read = Report.from_dict(json.loads(report.to_json()))
    assert read == report
    assert "limits" not in report.to_dict()["checks"][0]
    with pytest.raises(ValueError, match="not measured"):
        read.limit(0, 0)


@pytest.mark.parametrize("scale", [1e-200, 1e-160, 1e150])
def test_limits_where_squares_leave_the_range(scale: float) -> None:
    A, B = operands("normal", SHAPES["wide"], np.float64)
    usual, found = (protected_gemm(A * x, B, return_report=True)[1] for x in (1.0, scale))
    assert found.limit(3, 4) / scale == pytest.approx(usual.limit(3, 4), rel=0.5)


@pytest.mark.parametrize(("left", "right"), [(505, -700), (505, -900), (-900, 505), (-505, 900), (-300, -300)])
def test_limits_are_those_of_operands_in_other_units(left: int, right: int) -> None:
    """Squares of the operands, or of one of them, are beyond the range where those of the product may not be."""
    A, B = operands("normal", SHAPES["wide"], np.float64)
    C, of = protected_gemm(A, B, check="rows", return_report=True)
    _, scaled = protected_gemm(np.ldexp(A, left), np.ldexp(B, right), check="rows", return_report=True)
    for i in range(C.shape[0]):
        assert math.ldexp(scaled.limit(i, 0), -left - right) == pytest.approx(of.limit(i, 0), rel=1e-6)


def test_limits_of_a_product_from_elsewhere_include_the_tolerance_of_any_order() -> None:
    A, B = operands("positive", SHAPES["wide"], np.float32)
    C, own = protected_gemm(A, B, return_report=True)
    assert verify_gemm(A, B, C).limit(1, 2) >= own.limit(1, 2)
