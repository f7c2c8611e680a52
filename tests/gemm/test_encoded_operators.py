"""Operators of encoded matrices: products are protected, transposes carry the same sums, all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, encode, monitor, protected_gemm
from abft_tsm2.checksum.encoded import Encoded
from tests.support import cupy_on_cpu
from tests.support.cases import ORDERS, arrange
from tests.support.planting import normal

card, cp = cupy_on_cpu.card, cupy_on_cpu.cp
DTYPES = [np.dtype(name) for name in ("float64", "float32", "float16", ml_dtypes.bfloat16)]
IDS = [dtype.name for dtype in DTYPES]
PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "A @ E": lambda A, B: A @ encode(B),
    "E @ B": lambda A, B: encode(A) @ B,
    "E @ E": lambda A, B: encode(A) @ encode(B),
    "A @ E.T": lambda A, B: A @ encode(np.ascontiguousarray(B.T)).T,
    "E.T @ B": lambda A, B: encode(np.ascontiguousarray(A.T), recheck=False).T @ B,
    "E.T.T @ B": lambda A, B: encode(A).T.T @ B,
    "list @ E": lambda A, B: A.tolist() @ encode(B) if A.dtype == np.float64 else A @ encode(B),
    "one side": lambda A, B: A @ encode(np.ascontiguousarray(B.T), "columns").T,
    "the other": lambda A, B: A @ encode(np.ascontiguousarray(B.T), "rows").T,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_are_protected(product: str, dtype: Any) -> None:
    A, B = normal(20, 30, dtype=dtype), normal(30, 40, dtype=dtype, seed=1)
    with monitor() as log:
        C = PRODUCTS[product](A, B)
    assert [(report.operation, report.status) for report in log] == [("gemm", Status.CLEAN)]
    assert (type(C), C.dtype, C.shape) == (np.ndarray, dtype, (20, 40))
    np.testing.assert_array_equal(C.astype(float), protected_gemm(A, B).astype(float))


def test_products_of_vectors_and_batches() -> None:
    E, x, stack = encode(normal(20, 30)), normal(30), normal(4, 30, 5)
    np.testing.assert_array_equal(E @ x, protected_gemm(E.array, x))
    np.testing.assert_array_equal(normal(20) @ E, protected_gemm(normal(20), E.array))
    np.testing.assert_allclose(E @ stack, E.array @ stack, rtol=0, atol=1e-13)


def test_cupy_leaves_products_to_it(cp: Any) -> None:
    rng = np.random.default_rng(0)
    A, B = (cp.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in ((60, 50), (50, 70)))
    right = np.asarray(A) @ np.asarray(B)
    for product in (lambda: A @ encode(B), lambda: encode(A) @ B, lambda: A @ encode(B.T.copy()).T):
        with monitor() as log:
            C = product()
        assert isinstance(C, cp.ndarray)
        assert log.counts == {Status.CLEAN: 1}
        np.testing.assert_allclose(np.asarray(C), right, rtol=0, atol=1e-4)


# ---- the transpose ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(30, 20), (1, 20), (20, 1), (1, 1), (0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_a_transpose_is_what_was_encoded(dtype: Any, shape: tuple[int, int], order: str) -> None:
    E = encode(arrange(normal(*shape, dtype=dtype), order))
    T = E.T
    assert T.shape == shape[::-1]
    assert np.shares_memory(T.array, E.array) or not E.array.size
    assert (T.changed(), T.is_in_doubt(), T.verify().status) == (False, False, Status.CLEAN)
    for one, other in ((T.row_checksums, E.column_checksums), (T.norms.rows, E.norms.columns)):
        np.testing.assert_array_equal(one, other.T)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_what_changes_is_found_and_restored_through_the_transpose(dtype: Any) -> None:
    A, B = normal(30, 20, dtype=dtype), normal(30, 10, dtype=dtype, seed=1)
    held = A.copy()
    T = encode(A).T
    A[3, 5] += 1
    assert T.changed()
    fault = T.verify().faults[0]
    assert (fault.rows, fault.columns) == ((5,), (3,))
    C, report = protected_gemm(T, B, return_report=True)
    assert report.status is Status.CORRECTED
    np.testing.assert_array_equal(C.astype(float), protected_gemm(held.T, B).astype(float))
    assert T.correct().status is Status.CORRECTED
    np.testing.assert_array_equal(A.astype(float), held.astype(float))


def test_a_product_that_is_wrong_raises() -> None:
    A = normal(30, 20)
    T = encode(A).T
    A[3:5, 5:7] += 1  # not located beyond doubt
    with pytest.raises(SilentDataCorruptionError, match="INPUT_CHANGED"):
        T @ normal(30, 10)


def test_rows_that_cannot_be_told_from_columns_have_no_transpose() -> None:
    hankel = np.lib.stride_tricks.as_strided(normal(20), (10, 10), (8, 8))
    with pytest.raises(TypeError, match=r"no strides, or equal ones.*encode A\.T"):
        encode(hankel).T  # noqa: B018


# ---- all else ---------------------------------------------------------------------------------------------------


REFUSED: dict[str, Callable[[Encoded, Any], Any]] = {
    "asarray": lambda E, A: np.asarray(E),
    "array": lambda E, A: np.array(E, dtype=float),
    "dot": lambda E, A: np.dot(A, E),
    "einsum": lambda E, A: np.einsum("ij,jk", A, E),
    "solve": lambda E, A: np.linalg.solve(E, A),
    "matmul": lambda E, A: np.matmul(A, E),
    "out": lambda E, A: np.matmul(A, A, out=E),
    "A @= E": lambda E, A: A.__imatmul__(E),
    "A + E": lambda E, A: A + E,
    "E + A": lambda E, A: E + A,
    "A * E": lambda E, A: A * E,
    "2 * E": lambda E, A: 2 * E,
    "-E": lambda E, A: -E,  # type: ignore[operator]
    "E[0]": lambda E, A: E[0],  # type: ignore[index]
    "list": lambda E, A: list(E),  # type: ignore[call-overload]
    "c": lambda E, A: protected_gemm(A, A, E, beta=1.0),
    "of a string": lambda E, A: "x" @ E,
}


@pytest.mark.parametrize("use", REFUSED)
def test_all_else_is_a_type_error_that_says_why(use: str) -> None:
    A = normal(4, 4)
    with pytest.raises(TypeError, match=r"Encoded|E\.array|__array_ufunc__|supported are"):
        REFUSED[use](encode(A), A)


@pytest.mark.parametrize("side", ["both", "rows", "columns"])
def test_its_text_has_three_lines(side: str) -> None:
    text = repr(encode(normal(300, 200), side))
    first, carries, how = text.split("\n")
    assert first == "Encoded: 300 x 200 float64, numpy array on cpu"
    assert ("row checksums (300, 1)" in carries) == (side != "columns")
    assert ("column checksums (1, 200)" in carries) == (side != "rows")
    assert how == "  repair=False, recheck=True"
