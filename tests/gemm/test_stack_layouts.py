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
from abft_tsm2.checksum.bounds import arithmetic
from abft_tsm2.checksum.encode import encoded_right, missed_by_sample, sampled_beyond
from abft_tsm2.checksum.predicted import predict, recompute_checksum
from abft_tsm2.checksum.sides import Side
from abft_tsm2.gemm import host, stack
from tests.support.planting import at, bits, put

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
INSIDE: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # of the matrices lie axes of the batch
    "F as a whole": np.asfortranarray,
    "batch last": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -1)), -1, 0),
    "batch between": lambda x: np.ascontiguousarray(x.swapaxes(0, -2)).swapaxes(0, -2),
}
EVERY = {**LAYOUTS, **INSIDE}


def drawn(dtype: str, *shape: int) -> np.ndarray:
    if dtype == "bfloat16":
        kind = pytest.importorskip("ml_dtypes").bfloat16
    else:
        kind = np.dtype(dtype)
    return np.random.default_rng(shape).standard_normal(shape).astype(kind)


def lines_of(L: Any, R: Any, C: Any, C0: Any) -> Side:
    how, terms = arithmetic(C.dtype.name, C.dtype.name), L.shape[-1] + 2
    return Side("rows", L, R, C, C0, 1.0, 1.0, how, stack._alone, terms, False)


def whole(x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x, (*BATCH, *x.shape[-2:]))


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


@pytest.mark.parametrize("layout", EVERY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [K, 300])  # 300: more than is squared as a whole, in memory that is kept
def test_each_is_encoded_as_if_alone(k: int, dtype: str, layout: str) -> None:
    sizes = ((M, k), (k, N), (M, N), (M, N))
    operands = [whole(EVERY[layout](drawn(dtype, *BATCH, *size))) for size in sizes]
    stacked = lines_of(*operands)
    expected = predict(stacked, encoded_right(stacked.R, host.balanced(N)))
    u = recompute_checksum(stacked, expected.carried)
    for one in np.ndindex(*BATCH):
        lines = lines_of(*(x[one] for x in operands))
        alone = predict(lines, encoded_right(lines.R, host.balanced(N)))
        for name in ("weights", "sums", "squares"):
            assert np.array_equal(bits(getattr(expected.carried, name)[one]), bits(getattr(alone.carried, name))), name
        for name in ("t", "products", "t0", "added"):
            assert np.array_equal(bits(getattr(expected, name)[one]), bits(getattr(alone, name))), name
        assert np.array_equal(bits(u[one]), bits(recompute_checksum(lines, alone.carried)))


@pytest.mark.parametrize(("m", "k", "n"), [(M, K, N), (31, 260, 1), (1, 62, 28)])
@pytest.mark.parametrize("layout", EVERY)
@pytest.mark.parametrize("dtype", DTYPES[2:])
def test_products_of_16_bits_in_float32_are_those_of_each_alone(
    dtype: str, layout: str, m: int, k: int, n: int
) -> None:
    a, b = (EVERY[layout](drawn(dtype, *BATCH, *size)) for size in ((m, k), (k, n)))
    C = ft.protected_gemm(whole(a), whole(b), out_dtype="float32")
    for one in np.ndindex(*BATCH):
        assert np.array_equal(bits(C[one]), bits(ft.protected_gemm(whole(a)[one], whole(b)[one], out_dtype="float32")))


@pytest.mark.parametrize(("side", "m", "k", "n"), [("rows", 13, 375, 22), ("columns", 178, 29, 20)])
@pytest.mark.parametrize("layout", ["C", *INSIDE])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_a_weight_that_is_hit_is_no_change_of_an_operand(
    dtype: str, layout: str, side: Any, m: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = (EVERY[layout](drawn(dtype, *BATCH, *size)) for size in ((m, k), (k, n)))
    C, honest = ft.protected_gemm(A, B, check=side), stack.predict

    def hit(*arguments: Any) -> Any:
        expected = honest(*arguments)
        expected.carried.weights[..., 3, 0] *= -3.0
        return expected

    monkeypatch.setattr(stack, "predict", hit)
    again, report = ft.protected_gemm(A, B, check=side, return_report=True)
    assert {one.status for one in report.products} == {Status.CHECKSUM_FAULT}
    assert np.array_equal(bits(again), bits(C))


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", ["a", "b", "both"])
def test_operands_that_are_views_of_one(shared: str, dtype: str, side: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other elements keep their bits, and what is repaired has those that it has in a product by itself."""
    A, B, honest = drawn(dtype, 4, M, K), drawn(dtype, 4, K, N), stack.multiply
    a, b = (np.broadcast_to(x[:1], x.shape) if shared in (name, "both") else x for name, x in (("a", A), ("b", B)))
    C, clean = ft.protected_gemm(a, b, check=side, return_report=True)
    assert clean.status is Status.CLEAN

    def wrong(A: Any, B: Any, C: Any, *more: Any, **named: Any) -> None:
        honest(A, B, C, *more, **named)
        C[2, 7, 5] = 999

    monkeypatch.setattr(stack, "multiply", wrong)
    repaired, report = ft.protected_gemm(a, b, check=side, return_report=True)
    hook = at("multiplied", "C", put((7, 5), 999))
    alone, its = ft.protected_gemm(a[2], b[2], check=side, return_report=True, on_stage=hook)
    assert report.status is its.status is Status.CORRECTED
    assert np.array_equal(bits(repaired[2]), bits(alone))
    C[2] = alone
    assert np.array_equal(bits(repaired), bits(C))
    if shared != "both":
        changed = (B if shared == "a" else A).copy()
        changed[1, 3, 2] = np.nan
        with ft.errstate(unverifiable="ignore"):
            monkeypatch.undo()
            pair = (a, changed) if shared == "a" else (changed, b)
            _, report = ft.protected_gemm(*pair, check=side, return_report=True)
        assert [one.status is Status.UNVERIFIABLE for one in report.products] == [False, True, False, False]


def test_rows_that_the_sample_missed_are_looked_for_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside matrices of zeros, of NaN, and of Inf: each has the weights that it has alone."""
    R = drawn("float64", 4, 2, 600, N)
    beyond = sampled_beyond(600)
    assert beyond is not None
    row = int(np.setdiff1d(np.arange(64, 600), beyond)[100])
    R[0, 1, row, 0] *= 2.0**30
    R[2, 0, row, 4:7] *= 2.0**60
    R[1, 0], R[1, 1, row], R[2, 1, row], R[3, 0, :, 3] = 0, np.nan, np.inf, 0
    looked: list[int] = []

    def counted(R: Any, *more: Any) -> Any:
        looked.append(R.ndim)
        return missed_by_sample(R, *more)

    with np.errstate(all="ignore"):
        alone = {one: encoded_right(R[one], host.balanced(N)) for one in np.ndindex(4, 2)}
        monkeypatch.setattr("abft_tsm2.checksum.encode.missed_by_sample", counted)
        stacked = encoded_right(R, host.balanced(N))
        monkeypatch.setattr("abft_tsm2.checksum.encode.missed_by_sample", lambda *_: None)
        without = encoded_right(R, host.balanced(N))
    for one, own in alone.items():
        assert np.array_equal(bits(stacked.weights[one]), bits(own.weights))
        assert np.array_equal(bits(stacked.sums[one]), bits(own.sums))
        moved = not np.array_equal(stacked.weights[one], without.weights[one])
        assert moved == (one in ((0, 1), (2, 0)))
    assert looked == [2] * 4  # those of which a row stands out
