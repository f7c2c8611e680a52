"""Stacks whose matrices lie in any way, also one for all products: sums are those of each matrix alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status
from abft_tsm2.arrays import converted
from abft_tsm2.gemm import stack

BATCH, M, K, N = (2, 3), 13, 24, 20
DTYPES = ("float64", "float32", "float16", "bfloat16")
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "C": lambda x: x,
    "F": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "sliced": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "one for all": lambda x: x[0, 0],
    "one for a row of the stack": lambda x: x[0],
    "one for a column of the stack": lambda x: x[:, :1],
    "a view of one": lambda x: np.broadcast_to(x[:1, :1], x.shape),
}


def drawn(dtype: str, *shape: int) -> np.ndarray:
    if dtype == "bfloat16":
        kind = pytest.importorskip("ml_dtypes").bfloat16
    else:
        kind = np.dtype(dtype)
    return np.random.default_rng(shape).standard_normal(shape).astype(kind)


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_is_repaired_however_the_matrices_lie(dtype: str, side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = drawn(dtype, *BATCH, M, K), drawn(dtype, *BATCH, K, N)
    honest = stack.multiply

    def wrong(A: Any, B: Any, C: Any, *more: Any, **named: Any) -> None:
        honest(A, B, C, *more, **named)
        C.reshape(-1, M, N)[-1, 7, 5] += 64

    for left in LAYOUTS.values():
        for right in LAYOUTS.values():
            a, b = left(A), right(B)
            if a.ndim == b.ndim == 2:
                continue
            C, clean = ft.protected_gemm(a, b, check=side, return_report=True)
            assert clean.status is Status.CLEAN, clean
            with monkeypatch.context() as patch:
                patch.setattr(stack, "multiply", wrong)
                repaired, report = ft.protected_gemm(a, b, check=side, return_report=True)
            assert report.status is Status.CORRECTED, report
            size = 2.0**-8 if np.dtype(dtype).itemsize == 2 else 1e-5
            assert abs(repaired.astype("f8") - C.astype("f8")).max() <= size * 64


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_has_not_changed(dtype: str) -> None:
    A, B = drawn(dtype, *BATCH, M, K), drawn(dtype, BATCH[1], K, N)
    B[0, 1, 2] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for b in (B, np.broadcast_to(B, (*BATCH, K, N)), np.broadcast_to(B, (*BATCH, K, N)).copy()):
            assert ft.protected_gemm(A, b, return_report=True)[1].status is Status.UNVERIFIABLE


def test_a_converted_stack_has_the_layout_of_each_matrix() -> None:
    for layout in LAYOUTS.values():
        stack = np.broadcast_to(layout(drawn("float32", *BATCH, K, N)), (*BATCH, K, N))
        for order in (stack, stack.swapaxes(-1, -2)):
            wide = converted(order, np.float64)
            alone = converted(order[1, 2], np.float64)
            assert wide[1, 2].strides == alone.strides
            assert (wide == order).all()


@pytest.mark.parametrize("batch", [(1,), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_row_that_the_sample_missed(dtype: str, batch: tuple[int, ...]) -> None:
    """Of one matrix of the stack: weights of the others stay."""
    A, B = drawn(dtype, *batch, 20, 600), drawn(dtype, *batch, 600, 20)
    for row in range(0, 600, 50):
        outstanding = B.copy()
        outstanding[(-1,) * len(batch)][row] *= 1e6
        C, report = ft.protected_gemm(A, outstanding, return_report=True)
        assert report.status is Status.CLEAN
        assert np.allclose(C, A @ outstanding, rtol=1e-3, atol=1e-2 * abs(C).max())
