"""Operands as `numpy.matmul` takes them, BLAS's alpha, beta, c and out around them, and nothing else touched."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Status, encode, protected_gemm, tall_skinny_matmul, verify_gemm
from tests.support.cases import DTYPES, ORDERS, Case, arrange, cases
from tests.support.oracles import elements_outside
from tests.support.planting import Product, at, bits, normal, pair, put

IDS = [dtype.name for dtype in DTYPES]
SIDES = ("auto", "rows", "columns", "both")


def protect(*operands: Any, **options: Any) -> tuple[Any, Any]:
    return protected_gemm(*operands, return_report=True, **options)


# ---- shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(), ids=str)
def test_every_shape_order_and_type_clean_and_with_a_fault(case: Case) -> None:
    rng = np.random.default_rng(3)
    A = arrange(rng.standard_normal((case.m, case.k)).astype(case.dtype), case.order_a)
    B = arrange(rng.standard_normal((case.k, case.n)).astype(case.dtype), case.order_b)
    for check in ("auto", "both"):
        clean = Product(A, B, None, check=check)
        assert clean.status == "CLEAN"
        assert clean.report.suspicions == 0
        assert not clean.wrong.any()
        assert clean.C.dtype == case.dtype
        place = case.m // 2, case.n // 3
        faulty = Product(A, B, put(place, np.nan), check=check)
        assert faulty.status == "CORRECTED"
        assert not faulty.wrong.any()
        assert np.array_equal(bits(faulty.C)[~faulty.hit], bits(faulty.clean)[~faulty.hit])


SHAPES_OF_MATMUL = (
    ((4,), (4,)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (2, 4, 5)),
    ((2, 3, 4), (4,)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((5, 1, 3, 4), (2, 4, 6)),
    ((1, 3, 4), (5, 4, 2)),
    ((0, 3, 4), (4, 5)),
    ((0, 3, 4), (0, 4, 5)),
    ((2, 0, 3, 4), (4,)),
    ((0,), (0,)),
    ((0, 4), (4, 5)),
    ((3, 0), (0, 5)),
    ((3, 4), (4, 0)),
    ((2, 0, 4), (2, 4, 5)),
    ((2, 3, 0), (0, 5)),
    ((0, 0), (0, 0)),
)


@pytest.mark.parametrize("check", SIDES)
@pytest.mark.parametrize(("a", "b"), SHAPES_OF_MATMUL)
def test_shapes_and_types_of_the_result_are_those_of_matmul(a: Any, b: Any, check: str) -> None:
    A, B = normal(*a), normal(*b, seed=1)
    expected = A @ B
    C, report = protect(A, B, check=check)
    assert type(C) is type(expected)
    assert np.shape(C) == expected.shape
    assert C.dtype == expected.dtype
    assert np.allclose(C, expected, rtol=1e-13, atol=1e-13)
    assert report.status is Status.CLEAN
    assert verify_gemm(A, B, C, check=check).status is Status.CLEAN


def test_each_product_of_a_batch_has_its_own_report() -> None:
    A, B = normal(3, 1, 20, 30), normal(2, 30, 10)
    seen: list[tuple[int, ...]] = []

    def third(stage: str, arrays: Any) -> None:
        assert all(x.ndim == 2 for name, x in arrays.items() if name in "ABC")
        if stage == "multiplied":
            seen.append(arrays["C"].shape)
            if len(seen) == 3:
                arrays["C"][4, 5] = 1e9

    C, report = protect(A, B, on_stage=third)
    assert seen == [(20, 10)] * 6
    assert [p.index for p in report.products] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [p.status.name for p in report.products] == ["CLEAN"] * 2 + ["CORRECTED"] + ["CLEAN"] * 3
    assert report.status is Status.CORRECTED
    assert report.products[2].faults[0].rows == (4,)
    assert np.allclose(C, A @ B, rtol=1e-12)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ((3, 4), (5, 6), "inner dimensions 4 and 5"),
        ((2, 3, 4), (3, 4, 5), "broadcast"),
        ((), (4, 5), "at least one dimension"),
        ((4,), (5,), "inner dimensions"),
    ],
)
def test_what_matmul_refuses_is_refused(a: Any, b: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        np.matmul(np.ones(a), np.ones(b))
    with pytest.raises(ValueError, match=said):
        protected_gemm(np.ones(a), np.ones(b))


# ---- types --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", DTYPES, ids=IDS)
@pytest.mark.parametrize("left", DTYPES, ids=IDS)
def test_mixed_types_are_promoted(left: Any, right: Any) -> None:
    A, B = normal(30, 40, dtype=left), normal(40, 20, dtype=right)
    if {left.name, right.name} == {"float16", "bfloat16"}:  # NumPy knows no common type
        with pytest.raises(TypeError, match=r"float16.*convert"):
            protected_gemm(A, B)
        return
    for change in (None, put((3, 4), np.inf)):
        product = Product(A, B, change)
        assert product.C.dtype == np.result_type(left, right)
        assert product.report.dtype == np.result_type(left, right).name
        assert product.status == ("CLEAN" if change is None else "CORRECTED")
        assert not product.wrong.any()


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=IDS[2:])
def test_halves_with_a_single_precision_result_are_not_rounded_to_16_bits(dtype: Any) -> None:
    A, B = pair(40, 300, 20, dtype)
    wide, report = protect(A, B, out_dtype=np.float32)
    assert wide.dtype == np.float32
    assert not elements_outside(wide, A.astype(np.float32), B.astype(np.float32)).any()
    assert report.checks[0].detection_limit < protect(A, B)[1].checks[0].detection_limit / 10
    assert verify_gemm(A, B, wide).status is Status.CLEAN
    assert np.array_equal(protected_gemm(A, B, out=np.empty_like(wide), out_dtype="float32"), wide)
    C, report = protect(A, B, out_dtype=np.float32, on_stage=at("multiplied", "C", put((3, 4), 1e3)))
    assert report.status is Status.CORRECTED
    assert not elements_outside(C, A.astype(np.float32), B.astype(np.float32)).any()


def test_other_result_types_are_refused() -> None:
    A, B = pair(3, 4, 5, np.float32)
    for wrong in (np.float64, np.float16, int, "no type"):
        with pytest.raises((TypeError, ValueError), match=r"out_dtype|no type"):
            protected_gemm(A, B, out_dtype=wrong)
    assert protected_gemm(A, B, out_dtype=np.float32).dtype == np.float32


# ---- alpha, beta, c, out ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize(("alpha", "beta"), [(-1.0, 0.0), (0.5, 2.0), (1.0, 1.0), (0.0, 3.0), (0.0, 0.0), (-8, 1)])
def test_alpha_beta_and_c(alpha: float, beta: float, check: str, dtype: Any) -> None:
    A, B = pair(25, 60, 35, dtype)
    c = normal(25, 35, dtype=dtype, seed=2)
    for change in (None, put((7, 8), np.nan), put(slice(None), np.nan)):
        product = Product(A, B, change, c=c, alpha=alpha, beta=beta, check=check)
        assert product.status == ("CLEAN" if change is None else "CORRECTED")
        assert not product.wrong.any()
    assert verify_gemm(A, B, product.C, c, alpha=alpha, beta=beta, check=check).status is Status.CLEAN


def test_c_is_not_read_where_beta_is_zero() -> None:
    A, B = pair(20, 30, 10)
    poison = np.full((20, 10), np.nan)
    for c in (poison, np.zeros(3), object()):
        C, report = protect(A, B, c, beta=0.0)
        assert report.status is Status.CLEAN
        assert np.array_equal(C, A @ B)
    C, report = protect(A, B, poison, beta=0.0, out=poison)
    assert C is poison
    assert report.status is Status.CLEAN
    assert np.array_equal(C, A @ B)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("change", [None, put((2, 3), -1e6), put(slice(None), np.nan)])
def test_out_may_be_c_itself(change: Any, order: str) -> None:
    A, B = pair(20, 30, 10)
    start = normal(20, 10, seed=2)
    out = arrange(start, order)
    hook = None if change is None else at("multiplied", "C", change)
    C, report = protect(A, B, out, alpha=0.5, beta=2.0, out=out, on_stage=hook)
    assert C is out
    assert report.status.name == ("CLEAN" if change is None else "CORRECTED")
    assert not elements_outside(C, A, B, start, alpha=0.5, beta=2.0).any()


def test_out_may_overlap_c_in_part() -> None:
    A, B = pair(20, 30, 10)
    buffer = normal(21, 10, seed=2)
    start = buffer[:-1].copy()
    C = protected_gemm(A, B, buffer[:-1], beta=1.0, out=buffer[1:])
    assert not elements_outside(C, A, B, start, beta=1.0).any()


def test_out_of_every_shape() -> None:
    for a, b in (((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (4,)), ((4,), (4,))):
        A, B = normal(*a), normal(*b, seed=1)
        out = np.full(np.shape(A @ B), np.nan)
        assert protected_gemm(A, B, out=out) is out
        assert np.allclose(out, A @ B)


def test_out_must_not_overlap_an_operand() -> None:
    buffer = np.ones((20, 20))
    before = buffer.copy()
    A, B = buffer[:10], buffer[:, 10:]
    for a, b, out, name in (
        (A, np.ones((20, 20)), A, "a"),
        (np.ones((10, 20)), B, B[::2], "b"),
        (A, np.ones((20, 20)), buffer[5:15], "a"),
        (encode(buffer), np.ones((20, 20)), buffer, "a"),
    ):
        with pytest.raises(ValueError, match=f"out shares memory with {name}"):
            protected_gemm(a, b, out=out)
    assert np.array_equal(buffer, before)
    protected_gemm(buffer[::2], np.ones((20, 20)), out=buffer[1::2])  # interleaved, and no element in common


@pytest.mark.parametrize(
    ("batch", "strides"),
    [((2,), (0, 40, 8)), ((2,), (120, 0, 8)), ((2,), (40, 40, 8)), ((), (8, 8)), ((), (4, 8)), ((), (40, 0))],
    ids=str,
)
def test_out_must_not_overlap_itself(batch: tuple[int, ...], strides: tuple[int, ...]) -> None:
    A, B = normal(*batch, 3, 4), normal(*batch, 4, 5, seed=1)
    buffer = np.zeros(100)
    out = np.lib.stride_tricks.as_strided(buffer, (*batch, 3, 5), strides)
    for c in (None, out):
        with pytest.raises(ValueError, match=r"elements of out share memory: its strides are \("):
            protected_gemm(A, B, c, beta=0.0 if c is None else 1.0, out=out)
    if not batch:
        with pytest.raises(ValueError, match="elements of out share memory"):
            tall_skinny_matmul(A, B, out=out)
    assert not buffer.any()


def test_out_may_have_strides_that_interleave() -> None:
    A, B = pair(2, 4, 3)
    buffer = np.zeros(9)
    out = np.lib.stride_tricks.as_strided(buffer, (2, 3), (24, 16))  # elements 0, 2, 4 and 3, 5, 7
    assert protect(A, B, out=out)[1].status is Status.CLEAN
    assert np.allclose(buffer[[0, 2, 4, 3, 5, 7]], (A @ B).ravel())
    out = np.zeros((3, 2, 9))[::-1, :, ::-3]
    assert protect(np.stack([A] * 3), B, out=out)[1].status is Status.CLEAN
    assert np.allclose(out, A @ B)


def test_c_may_overlap_itself_as_it_is_only_read() -> None:
    A, B = pair(5, 4, 3)
    c = np.broadcast_to(normal(3, seed=9), (5, 3))
    C, report = protect(A, B, c, beta=2.0)
    assert report.status is Status.CLEAN
    assert np.allclose(C, A @ B + 2 * c)


def test_a_product_that_is_not_there_is_not_verified() -> None:
    A, B = pair(5, 4, 3)
    with pytest.raises(TypeError, match="C is None"):
        verify_gemm(A, B, None)
    with pytest.raises(TypeError, match="C has dtype object"):
        verify_gemm(A, B, [None])


def test_the_other_byte_order_is_read_but_not_written() -> None:
    A, B = pair(5, 4, 3)
    c = normal(5, 3, seed=9)
    swapped = [x.astype(x.dtype.newbyteorder()) for x in (A, B, c)]
    C, report = protect(*swapped, beta=2.0)
    assert (report.status, C.dtype.isnative) == (Status.CLEAN, True)
    assert np.array_equal(C, protected_gemm(A, B, c, beta=2.0))
    assert verify_gemm(A, B, C.astype(swapped[0].dtype), swapped[2], beta=2.0).status is Status.CLEAN
    C[2, 1] *= -1
    found = verify_gemm(A, B, C.astype(swapped[0].dtype), c, beta=2.0, on_error="detect")
    assert (found.faults[0].rows, found.faults[0].columns) == ((2,), (1,))
    with pytest.raises(ValueError, match=r"out is stored as .f8, in the other byte order"):
        protected_gemm(A, B, out=np.zeros((5, 3), swapped[0].dtype))


def test_out_must_be_the_array_that_is_written() -> None:
    class Copies:  # a container that NumPy can only copy from
        dtype, shape = np.dtype("f8"), (5, 3)

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.zeros(self.shape)

    with pytest.raises(TypeError, match="out is a Copies"):
        protected_gemm(*pair(5, 4, 3), out=Copies())
    for out in (Copies(), [[0.0] * 3] * 5, 5.0):
        with pytest.raises(TypeError, match="out is a "):
            tall_skinny_matmul(*pair(5, 4, 3), out=out)


def test_out_must_be_a_writable_array_of_the_right_kind() -> None:
    A, B = pair(3, 4, 5)
    frozen = np.zeros((3, 5))
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        protected_gemm(A, B, out=frozen)
    with pytest.raises(TypeError, match="out"):
        protected_gemm(A, B, out=[[0.0] * 5] * 3)
    for out in (np.zeros((3, 4)), np.zeros((3, 5), np.float32), np.zeros((1, 3, 5))):
        with pytest.raises(ValueError, match="out has shape"):
            protected_gemm(A, B, out=out)


def test_c_must_fit() -> None:
    A, B = pair(3, 4, 5)
    with pytest.raises(ValueError, match="beta = 2 needs c"):
        protected_gemm(A, B, beta=2.0)
    for c in (np.zeros((3, 4)), np.zeros((3, 5), np.float32), np.zeros(5)):
        with pytest.raises(ValueError, match="c has shape"):
            protected_gemm(A, B, c, beta=1.0)
    with pytest.raises(ValueError, match="C has shape"):
        verify_gemm(A, B, np.zeros((5, 3)))


def test_alpha_and_beta_must_be_numbers_of_the_result_type() -> None:
    A, B = pair(3, 4, 5, np.float32)
    c = np.ones((3, 5), np.float32)
    for wrong in (np.nan, np.inf, 1e39):
        with pytest.raises(ValueError, match="alpha"):
            protected_gemm(A, B, alpha=wrong)
        with pytest.raises(ValueError, match="beta"):
            protected_gemm(A, B, c, beta=wrong)
    no_numbers = (1j, np.complex128(2 + 1j), np.array(2 + 1j), "two", "2", b"2", np.array("2"), np.timedelta64(2))
    for no_number in (*no_numbers, True, np.False_, np.array(True), [1.0, 2.0], np.array([2.0]), None):
        with pytest.raises(TypeError, match="alpha"):
            protected_gemm(A, B, alpha=no_number)
        with pytest.raises(TypeError, match="beta"):
            verify_gemm(A, B, c, c, beta=no_number)
        with pytest.raises(TypeError, match="alpha"):
            tall_skinny_matmul(A, B, alpha=no_number)
    for beyond in (10**400, -(10**5000), Fraction(10**400)):
        with pytest.raises(ValueError, match=r"alpha is beyond 1.8e\+308"):
            protected_gemm(A, B, alpha=beyond)
        with pytest.raises(ValueError, match=r"alpha is beyond 1.8e\+308"):
            tall_skinny_matmul(A, B, alpha=beyond)
    for two in (2, np.float32(2), np.int8(2), np.array(2.0), Fraction(2), Decimal(2)):
        assert np.array_equal(protected_gemm(A, B, alpha=two), protected_gemm(A, B, alpha=2.0))


def test_check_must_be_known() -> None:
    with pytest.raises(ValueError, match="check is 'row'"):
        protected_gemm(np.eye(2), np.eye(2), check="row")


# ---- inputs are never changed -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_inputs_keep_every_bit(dtype: Any, order: str) -> None:
    A, B = (arrange(x, order) for x in pair(40, 30, 20, dtype))
    c = arrange(normal(40, 20, dtype=dtype, seed=5), order)
    kept = [bits(x).copy() for x in (A, B, c)]
    for x in (A, B, c):
        x.flags.writeable = False
    for change in (put((1, 2), np.nan), put(slice(None), 7), put((slice(None), 3), 1e3), put(5, np.inf)):
        for check in ("rows", "columns"):
            _, report = protect(A, B, c, beta=2.0, check=check, on_stage=at("multiplied", "C", change))
            assert report.status is Status.CORRECTED
    assert all(np.array_equal(bits(x), before) for x, before in zip((A, B, c), kept, strict=True))


def test_verify_leaves_a_wrong_product_as_it_is() -> None:
    A, B = pair(40, 30, 20)
    C = A @ B
    C[3, 4], C[7] = np.nan, 0.0
    kept = bits(C).copy()
    C.flags.writeable = False
    for check in SIDES:
        assert verify_gemm(A, B, C, check=check, on_error="detect").status is Status.UNCORRECTABLE
    assert np.array_equal(bits(C), kept)


def test_broadcast_and_zero_stride_operands() -> None:
    row = normal(1, 30)
    A, B = np.broadcast_to(row, (40, 30)), normal(30, 20)
    for change in (None, put((3, 4), np.nan), put(slice(None), np.nan)):
        product = Product(A, B, change)
        assert product.status == ("CLEAN" if change is None else "CORRECTED")
        assert not product.wrong.any()


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize(("small", "large"), [(1e-100, 1e300), (1e-307, 1e200), (1e-307, 1e307)])
def test_a_large_c_beside_a_tiny_product_stays_as_it_is(small: float, large: float, side: str) -> None:
    """Rescaled, c is multiplied by a large power of two and a small one: in the wrong order it overflows."""
    A, B, c = np.full((2, 1), small), np.ones((1, 17)), large * normal(2, 17)
    if side == "rows":
        A, B, c = B.T, A.T, c.T
    C, report = protect(A, B, c, beta=1.0, check=side)
    assert report.status is Status.CLEAN
    assert np.array_equal(C, c)
    C, report = protect(A, B, c, beta=1.0, check=side, on_stage=at("multiplied", "C", put((1, 1), 0.0)))
    assert report.status is Status.CORRECTED
    assert np.array_equal(C, c)
