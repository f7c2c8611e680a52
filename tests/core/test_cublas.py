"""What is asked of cuBLAS: layouts, leading dimensions, arguments. NumPy behind raw pointers stands for the library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from abft_tsm2.core import cublas as vendor
from abft_tsm2.core.problem import Problem
from tests.support.fake_card import Array, Card
from tests.support.kernel_cases import Placed, strides_of

SIZES = (7, 5, 3)


def matrix(shape: tuple[int, int], order: str, extra: int = 0, dtype: Any = np.float32) -> Any:
    """Of random numbers; NaN around them."""
    found = Placed.empty(shape, dtype, order, extra).matrix().view(Array)
    found[...] = np.random.default_rng(0).standard_normal(shape)
    return found


@pytest.mark.parametrize(
    ("strides", "shape", "expected"),
    [
        ((4, 28), (7, 5), "F"),
        ((4, 400), (7, 5), "F"),
        ((20, 4), (7, 5), "C"),
        ((400, 4), (7, 5), "C"),
        ((4, 24), (7, 5), "A"),  # columns overlap
        ((8, 56), (7, 5), "A"),
        ((-4, 28), (7, 5), "A"),
        ((20, -4), (7, 5), "A"),
        ((0, 4), (7, 5), "A"),
        ((4, 0), (7, 1), "F"),
        ((999, 4), (1, 5), "F"),  # one row: columns of one element
        ((999, 8), (1, 5), "F"),
        ((8, 999), (7, 1), "C"),  # one column of a row-major matrix
        ((999, 999), (1, 1), "F"),
        ((4, 28), (0, 5), "F"),
    ],
)
def test_layout(strides: tuple[int, int], shape: tuple[int, int], expected: str) -> None:
    x = np.lib.stride_tricks.as_strided(np.zeros(4000, np.float32)[2000:], shape, strides)
    assert vendor.layout(x) == expected
    stack = np.lib.stride_tricks.as_strided(np.zeros(4000, np.float32)[2000:], (3, *shape), (0, *strides))
    assert vendor.layout(stack) == expected


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(7, 5), (1, 5), (7, 1), (1, 1)])
def test_operation_and_leading_dimension_lead_to_every_element(shape: tuple[int, int], order: str) -> None:
    for extra in (0, 3):
        x = matrix(shape, order, extra)
        transposed, leading = vendor._leading(x)
        rows, columns = reversed(shape) if transposed else shape
        assert leading >= rows  # cuBLAS refuses anything else
        for i, j in product(range(rows), range(columns)):
            at = (j, i) if transposed else (i, j)
            assert x[at[0] :, at[1] :].data.ptr == x.data.ptr + 4 * (i + j * leading)


@pytest.mark.parametrize(
    ("strides", "shape"),
    [
        ((4, 400), (7, 5)),
        ((400, 4), (7, 5)),
        ((999, 4), (1, 5)),
        ((999, 8), (1, 5)),
        ((8, 999), (7, 1)),
        ((9, 9), (1, 1)),
    ],
)
def test_vectors_whose_elements_lie_apart_are_read_where_they_are(
    strides: tuple[int, int], shape: tuple[int, int]
) -> None:
    x = np.lib.stride_tricks.as_strided(np.zeros(4000, np.float32), shape, strides)
    transposed, leading = vendor._leading(x)
    assert leading >= shape[1 if transposed else 0]
    for i, j in product(*map(range, shape)):
        along, across = (j, i) if transposed else (i, j)
        assert 4 * (along + across * leading) == i * strides[0] + j * strides[1]


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        *((("float32",) * 3, True), (("float64",) * 3, True), (("float16",) * 3, True), (("bfloat16",) * 3, True)),
        *((("float16", "float16", "float32"), True), (("bfloat16", "bfloat16", "float32"), True)),
        *((("float32", "float32", "float64"), False), (("float16", "float32", "float32"), False)),
        *((("float16", "float16", "float64"), False), (("float16", "bfloat16", "float32"), False)),
    ],
)
def test_types_that_are_served(types: tuple[str, str, str], expected: bool) -> None:
    a, b, c = types
    problem = Problem(10, 20, 3, a, "C", b, c)
    assert vendor.serves(problem) is expected
    for changed in ({"order": "A"}, {"out_order": "A"}, {"m": 0}, {"k": 0}, {"n": 0}):
        assert not vendor.serves(replace(problem, **changed))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (2.0, 0.0), (1.0, -0.5)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("orders", list(product("CF", repeat=3)), ids="".join)
def test_products_of_every_layout(
    card: Card, orders: tuple[str, str, str], dtype: str, alpha: float, beta: float
) -> None:
    m, k, n = SIZES
    shapes = ((m, k), (k, n), (m, n))
    A, B, C = (matrix(shape, order, 2, dtype) for shape, order in zip(shapes, orders, strict=True))
    expected = alpha * (A @ B) + beta * C
    plan = vendor.Gemm.of(Problem(m, k, n, dtype, orders[0], out_order=orders[2]), A, B, C)
    plan(A, B, C, alpha, beta)
    np.testing.assert_allclose(C, expected, rtol=1e-5 if dtype == "float32" else 1e-14)


def test_a_plan_serves_other_arrays_of_the_same_strides(card: Card) -> None:
    m, k, n = SIZES
    shapes = ((m, k), (k, n), (m, n))
    plan = vendor.Gemm.of(Problem(m, k, n, "float64", "C"), *(matrix(shape, "C", 2, "f8") for shape in shapes))
    A, B, C = (matrix(shape, "C", 2, "f8") for shape in shapes)
    plan(A, B, C, 1.0, 0.0)
    np.testing.assert_allclose(C, A @ B, rtol=1e-14)


def called(monkeypatch: pytest.MonkeyPatch, card: Card, name: str) -> list[Any]:
    """The arguments of each call of that function of cuBLAS."""
    calls: list[Any] = []
    record: Callable[..., None] = lambda *arguments: calls.append(arguments)  # noqa: E731
    monkeypatch.setattr(sys.modules["cupy_backends.cuda.libs.cublas"], name, record, raising=False)
    return calls


def test_stacks_go_by_their_steps(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    m, k, n = SIZES
    calls = called(monkeypatch, card, "dgemmStridedBatched")
    A, C = (Placed.strided((4, *s), "f8", (100, *strides_of(s, "F"))).matrix().view(Array) for s in ((m, k), (m, n)))
    B = matrix((k, n), "C", dtype="f8")
    vendor.Gemm.of(Problem(m, k, n, "float64", batch=4, out_order="F"), A, B, C)(A, B, C, 1.0, 0.0)
    _, *ops, rows, columns, depth, _, a, lda, step_a, b, ldb, step_b, _, c, ldc, step_c, batch = calls[0]
    assert (ops, rows, columns, depth) == ([0, 1], m, n, k)
    assert (a, lda, step_a) == (A.data.ptr, m, 100)
    assert (b, ldb, step_b) == (B.data.ptr, n, 0)
    assert (c, ldc, step_c, batch) == (C.data.ptr, m, 100, 4)


def test_a_stack_of_one_matrix_serves_all_products(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    m, k, n = SIZES
    calls = called(monkeypatch, card, "sgemmStridedBatched")
    A, B = np.zeros((1, m, k), np.float32).view(Array), np.zeros((4, k, n), np.float32).view(Array)
    C = np.zeros((4, m, n), np.float32).view(Array)
    vendor.Gemm.of(Problem(m, k, n, "float32", "C", batch=4), A, B, C)(A, B, C, 1.0, 0.0)
    _, _, _, _, _, _, _, b, _, step_b, a, _, step_a, _, _, _, step_c, _ = calls[0]  # C^T = B^T A^T
    assert (b, a) == (B.data.ptr, A.data.ptr)
    assert (step_b, step_a, step_c) == (k * n, 0, m * n)


@pytest.mark.parametrize(("out", "code"), [("float32", 0), ("float16", 2)])
@pytest.mark.parametrize("batch", [1, 4])
def test_halves_are_added_in_float32_and_never_in_tf32(
    card: Card, monkeypatch: pytest.MonkeyPatch, out: str, code: int, batch: int
) -> None:
    m, k, n = SIZES
    calls = called(monkeypatch, card, "gemmEx" if batch == 1 else "gemmStridedBatchedEx")
    A = np.zeros((batch, m, k), np.float16).view(Array)
    B, C = np.zeros((k, n), np.float16).view(Array), np.zeros((batch, m, n), out).view(Array)
    if batch == 1:
        A, C = A[0], C[0]
    problem = Problem(m, k, n, "float16", "C", out=out, batch=batch)
    vendor.Gemm.of(problem, A, B, C)(A, B, C, 1.0, 0.0)
    (arguments,) = calls
    assert arguments[1:6] == (0, 0, n, m, k)  # C^T = B^T A^T
    assert arguments[-2:] == (68, -1)  # CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
    assert [x for x in arguments if isinstance(x, int) and x in (B.data.ptr, A.data.ptr, C.data.ptr)] == [
        *(B.data.ptr, A.data.ptr, C.data.ptr)
    ]
    types = (8, 11, 15) if batch == 1 else (8, 12, 17)
    assert [arguments[i] for i in types] == [2, 2, code]


@pytest.mark.parametrize("out", ["float32", "float16"])
def test_parts_of_a_sum_are_not_added_in_16_bits(card: Card, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    m, k, n = SIZES
    modes: list[int] = []
    cublas = sys.modules["cupy_backends.cuda.libs.cublas"]
    monkeypatch.setattr(cublas, "gemmEx", lambda *arguments: modes.append(card.math_mode))
    A, B = np.zeros((m, k), np.float16).view(Array), np.zeros((k, n), np.float16).view(Array)
    C = np.zeros((m, n), out).view(Array)
    card.math_mode = 3  # the user's
    vendor.Gemm.of(Problem(m, k, n, "float16", "C", out=out), A, B, C)(A, B, C, 1.0, 0.0)
    assert modes == [3 if out == "float32" else 3 | 16]  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
    assert card.math_mode == 3
