"""Arrays: what is accepted as an operand and what is refused, the table of types, bit patterns, shared memory."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2 import encode, protected_gemm, tall_skinny_matmul, verify_gemm
from abft_tsm2.arrays import (
    FLOATS,
    FloatType,
    as_operand,
    bit_pattern,
    dtype_name,
    float_type,
    from_host,
    in_float64,
    is_column_major,
    namespace,
    overlap,
    overlaps_itself,
    to_host,
    type_name,
)
from tests.support.cases import DTYPES, ORDERS, arrange, finfo

IDS = [dtype.name for dtype in DTYPES]


class Plain(np.ndarray):
    """A subclass of ndarray that changes what multiplication means."""

    def __matmul__(self, other: Any) -> Any:
        raise AssertionError("the subclass was used as it is")


REFUSED = [
    pytest.param(np.ones((2, 2), np.int64), "int64.*astype", id="int64"),
    pytest.param(np.ones((2, 2), np.int8), "int8.*astype", id="int8"),
    pytest.param(np.ones((2, 2), np.uint16), "uint16.*astype", id="uint16"),
    pytest.param(np.ones((2, 2), bool), "bool.*astype", id="bool"),
    pytest.param(np.ones((2, 2), np.complex128), "complex128.*real and imaginary", id="complex128"),
    pytest.param(np.ones((2, 2), np.complex64), "complex64.*real and imaginary", id="complex64"),
    pytest.param(np.full((2, 2), None), "object.*supported are float64", id="object"),
    pytest.param(np.full((2, 2), "1.0"), "str.*supported are float64", id="string"),
    pytest.param(np.full((2, 2), b"1.0"), "bytes.*supported are float64", id="bytes"),
    pytest.param(np.zeros((2, 2), "datetime64[s]"), "datetime64.*supported", id="datetime"),
    pytest.param(np.zeros((2, 2), [("x", float)]), "void.*supported", id="structured"),
    pytest.param([[1, 2], [3, 4]], "int64.*astype", id="list of integers"),
    pytest.param([[True]], "bool.*astype", id="list of booleans"),
    pytest.param([[1.0, 2.0], [3.0]], "not a rectangular array", id="ragged list"),
    pytest.param([[[1.0]], [2.0]], "not a rectangular array", id="ragged depth"),
    pytest.param([["1.0"]], "str", id="list of strings"),
    pytest.param("1.0", "str", id="a string"),
    pytest.param(None, "object", id="None"),
    pytest.param({1.0: 2.0}, "object", id="dict"),
    pytest.param(iter([1.0]), "object", id="iterator"),
    pytest.param(3, "int64", id="an integer"),
    pytest.param(np.ma.masked_array(np.ones((2, 2)), [[0, 1], [0, 0]]), r"filled\(value\)", id="masked"),
    pytest.param(np.ma.ones((2, 2)), r"filled\(value\)", id="masked, nothing hidden"),
    pytest.param(np.ones((2, 2)).view(np.matrix), r"numpy\.matrix.*use np\.asarray", id="matrix"),
]
if np.finfo(np.longdouble).nmant > 52:
    REFUSED.append(pytest.param(np.ones((2, 2), np.longdouble), "supported are", id="longdouble"))


# ---- refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("x", "advice"), REFUSED)
def test_refused_with_advice(x: Any, advice: str) -> None:
    with pytest.raises(TypeError, match=advice) as error:
        as_operand(x, "the left operand")
    assert str(error.value).startswith("the left operand ")


@pytest.mark.parametrize(("x", "advice"), REFUSED)
def test_refused_by_every_operation(x: Any, advice: str) -> None:
    good = np.ones((2, 2))
    optional = [
        lambda: protected_gemm(good, good, x, beta=1.0),
        lambda: protected_gemm(good, good, out=x),
        lambda: verify_gemm(good, good, x),
    ]
    for call in (
        lambda: protected_gemm(x, good),
        lambda: protected_gemm(good, x),
        *(optional if x is not None else []),
        lambda: encode(x),
        lambda: tall_skinny_matmul(x, good),
        lambda: tall_skinny_matmul(good, x),
    ):
        with pytest.raises(TypeError, match=advice):
            call()


def test_refused_narrower_types_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4):
        with pytest.raises(TypeError, match=rf"dtype {np.dtype(kind).name}"):
            as_operand(np.ones((2, 2)).astype(kind), "a")


# ---- accepted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_an_array_is_passed_through_as_it_is(dtype: np.dtype[Any], order: str) -> None:
    x = arrange(np.arange(12.0).reshape(3, 4).astype(dtype), order)
    assert as_operand(x, "a") is x
    x.flags.writeable = False
    assert as_operand(x, "a") is x
    assert as_operand(x[:0], "a").shape == (0, 4)


def test_a_subclass_becomes_a_view_of_its_plain_array(tmp_path: Any) -> None:
    x = np.ones((2, 2)).view(Plain)
    mapped = np.memmap(tmp_path / "x", np.float64, "w+", shape=(2, 2))
    for y in (x, mapped):
        plain = as_operand(y, "a")
        assert type(plain) is np.ndarray
        assert np.shares_memory(plain, y)
    assert np.array_equal(protected_gemm(x, x), np.full((2, 2), 2.0))


@pytest.mark.parametrize("x", [[[1.0, 2.0]], [[1, 2.5]], (1.0, 2.0), [np.ones(3), np.ones(3)], 2.5])
def test_lists_become_float64(x: Any) -> None:
    assert np.array_equal(as_operand(x, "a"), np.asarray(x))
    assert as_operand(x, "a").dtype == np.float64


def test_other_byte_orders_and_unaligned_arrays_multiply_as_they_are() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((7, 5)), rng.standard_normal((5, 6))
    record = np.zeros((7, 5), [("flag", "i1"), ("value", "f8")])  # 9 bytes from one value to the next
    record["value"] = a
    for other in (a.astype(">f8"), record["value"], np.frombuffer(b"\0" + a.tobytes(), "f8", 35, 1).reshape(7, 5)):
        for check in ("rows", "columns"):
            c, report = protected_gemm(other, b, check=check, return_report=True)
            assert report.status.name == "CLEAN"
            assert c.dtype == np.float64
            assert c.dtype.isnative
            np.testing.assert_allclose(c, a @ b, rtol=1e-12)
            assert protected_gemm(b.T, other.T, check=check).shape == (6, 7)


# ---- the table of types -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_the_table_agrees_with_the_libraries(dtype: np.dtype[Any]) -> None:
    t, limits = FLOATS[dtype.name], finfo(dtype)
    assert t.name == dtype.name
    assert t.bits == limits.bits
    assert t.precision == limits.nmant + 1
    assert t.unit_roundoff == float(limits.eps) / 2
    assert t.smallest_normal == float(limits.smallest_normal)
    assert t.smallest_subnormal == float(limits.smallest_subnormal)
    assert t.largest == float(limits.max)
    assert t.min_exponent == limits.minexp
    assert t.max_exponent == limits.maxexp


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_the_table_agrees_with_arithmetic(dtype: np.dtype[Any]) -> None:
    t = FLOATS[dtype.name]

    def rounded(x: float) -> float:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.array([x]).astype(dtype)[0])

    assert rounded(1 + 2 * t.unit_roundoff) > 1
    assert rounded(1 + t.unit_roundoff) == 1  # a tie, to even
    assert rounded(t.smallest_subnormal) == t.smallest_subnormal > 0
    assert rounded(t.largest) == t.largest
    above = math.nextafter(t.largest, math.inf) if dtype == np.float64 else t.largest * (1 + t.unit_roundoff)
    assert math.isinf(rounded(above))


def test_float_type_of_an_array_of_any_library() -> None:
    strict = pytest.importorskip("array_api_strict")
    for dtype in DTYPES:
        assert isinstance(float_type(np.zeros(1, dtype)), FloatType)
        assert float_type(np.zeros(1, dtype)).name == dtype.name
    assert float_type(strict.zeros(1, dtype=strict.float32)).name == "float32"
    assert dtype_name(strict.float64) == "float64"
    assert float_type(np.zeros(1, ">f4")).name == "float32"


# ---- namespaces ---------------------------------------------------------------------------------------------


def test_one_namespace() -> None:
    strict = pytest.importorskip("array_api_strict")
    x, y = np.ones(2), strict.ones(2)
    assert namespace(x, x).asarray([1.0]).__class__ is np.ndarray
    assert namespace(y, y).__name__ == "array_api_strict"
    for pair in ((x, y), (y, x)):
        with pytest.raises(TypeError, match=r"array_api_strict and numpy.*move them to one library"):
            namespace(*pair)


def test_to_the_host_and_back() -> None:
    strict = pytest.importorskip("array_api_strict")
    x = np.arange(6.0).reshape(2, 3)
    assert to_host(x) is x
    assert from_host(x, x) is x
    there = from_host(x, strict.ones(1))
    assert type(there) is type(strict.ones(1))
    assert np.array_equal(to_host(there), x)


# ---- memory -------------------------------------------------------------------------------------------------


def test_column_major_is_told_by_the_strides() -> None:
    x = np.zeros((4, 5))
    expected = {"C": False, "F": True, "padded": False, "strided": False, "transposed": True, "reversed": False}
    assert {order: is_column_major(arrange(x, order)) for order in ORDERS} == expected
    assert is_column_major(arrange(x, "F")[::-1, ::-1])


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_bit_patterns_are_a_view(dtype: np.dtype[Any]) -> None:
    x = np.array([[0.0, -0.0, 1.0, np.inf, np.nan]], dtype)
    bits = bit_pattern(x)
    assert bits.dtype == np.dtype(f"u{dtype.itemsize}")
    assert np.shares_memory(bits, x)
    width, mantissa = 8 * dtype.itemsize, finfo(dtype).nmant
    assert int(bits[0, 0]) == 0
    assert int(bits[0, 1]) == 1 << (width - 1)
    assert int(bits[0, 2]) == ((1 << (width - 2 - mantissa)) - 1) << mantissa
    assert int(bits[0, 3]) == ((1 << (width - 1 - mantissa)) - 1) << mantissa
    bits[0, 0] ^= bits.dtype.type(1 << (width - 1))
    assert np.signbit(x[0, 0].astype(np.float64))
    assert bit_pattern(x[:, :0]).shape == (1, 0)


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_bit_patterns_through_the_array_api_standard(name: str) -> None:
    strict = pytest.importorskip("array_api_strict")
    x = strict.asarray([[1.0, -2.0, float("nan")]], dtype=getattr(strict, name))
    bits = bit_pattern(x)
    assert np.array_equal(bits, bit_pattern(to_host(x)))
    bits[0, 1] ^= bits.dtype.type(1) << np.dtype(name).itemsize * 8 - 1
    assert float(x[0, 1]) == 2.0


def test_overlap_is_exact() -> None:
    x = np.zeros((8, 8))
    for y, shared in (
        (x, True),
        (x.T, True),
        (x[::-1, ::-2], True),
        (x[7:, 7:], True),
        (x.ravel()[63:], True),
        (x.copy(), False),
        (np.zeros((8, 8)), False),
        (x[:0], False),
    ):
        assert overlap(x, y) is shared
        assert overlap(y, x) is shared
    assert not overlap(x[::2], x[1::2])  # the ranges of addresses overlap, the elements do not
    assert not overlap(x[:, :4], x[:, 4:])
    assert overlap(x[:, :5], x[:, 4:])


def test_overlap_in_doubt_is_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whether two strided views meet is a Diophantine equation, which NumPy may give up on.
    def give_up(*arguments: Any, **options: Any) -> bool:
        raise np.exceptions.TooHardError

    x, y = np.zeros((4, 4)), np.zeros((4, 4))
    assert not overlap(x, y)
    monkeypatch.setattr(np, "shares_memory", give_up)
    assert overlap(x, y)


def test_overlap_through_the_array_api_standard() -> None:
    strict = pytest.importorskip("array_api_strict")
    x = strict.ones((4, 4))
    assert overlap(x, x)
    assert not overlap(x, strict.ones((4, 4)))
    assert overlap(x[:2, :], x)
    assert overlap(x.T, x)
    assert not overlap(x[:2, :], x[2:, :])


def strided(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 1) -> SimpleNamespace:
    """What `overlaps_itself` looks at, of any array library."""
    return SimpleNamespace(shape=shape, strides=strides, itemsize=itemsize)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(-40, 40)), max_size=3),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_overlap_with_itself_is_exact(axes: list[tuple[int, int]], itemsize: int, unit: int) -> None:
    shape, strides = tuple(n for n, _ in axes), tuple(unit * s for _, s in axes)
    starts = sorted(sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(shape))
    shared = any(after - before < itemsize for before, after in itertools.pairwise(starts))
    assert overlaps_itself(strided(shape, strides, itemsize)) is shared


def test_what_views_overlap_themselves() -> None:
    x = np.zeros((6, 8, 10))
    views = [x, x.T, x[::2, ::-3, 1::4], x[:, :1], x[:0], x.diagonal(), np.diagonal(x, axis1=0, axis2=2), x[0, 0, 0]]
    views += [x.ravel()[5:], np.moveaxis(x, 0, 2), np.zeros((3, 4), [("p", "f4"), ("q", "f8")])["q"], x.view("f4")]
    views += [np.broadcast_to(x[:, :1], (1, 6, 1, 10)), np.lib.stride_tricks.as_strided(x, (2, 3), (24, 16))]
    assert not any(map(overlaps_itself, views))
    windows = np.lib.stride_tricks.sliding_window_view(x, 3, axis=2)
    for view in (windows, np.broadcast_to(x, (2, 6, 8, 10)), np.lib.stride_tricks.as_strided(x, (9, 9), (8, 8))):
        assert overlaps_itself(view)
    assert not overlaps_itself(strided((2**20, 2**20, 2**10), (2**33, 2**13, 8), 8))  # at once, for any size
    assert overlaps_itself(strided((2**20, 2**20, 2**10), (2**33, 2**13 - 8, 8), 8))


def test_overlap_with_itself_through_the_array_api_standard() -> None:
    strict = pytest.importorskip("array_api_strict")
    assert not overlaps_itself(strict.ones((4, 4)))
    assert not overlaps_itself(strict.ones((4, 4)).T)
    assert overlaps_itself(strict.broadcast_to(strict.ones(4), (4, 4)))


def test_names_of_types_are_what_numpy_takes_and_bfloat16() -> None:
    for given_type in ("f8", ">f8", "d", float, np.float64, np.dtype("f8"), "float64"):
        assert type_name(given_type) == "float64"
    assert (type_name("half"), type_name("bfloat16"), type_name(int)) == ("float16", "bfloat16", "int64")
    assert (type_name("nonsense"), type_name(5), type_name("(")) == ("nonsense", "5", "(")
    strict = pytest.importorskip("array_api_strict")
    assert type_name(strict.float32) == "float32"


def test_out_that_overlaps_an_operand_is_refused() -> None:
    x = np.ones((6, 6))
    before = x.copy()
    for a, b, out in ((x[:3, :3], x[3:, 3:], x[2:5, 2:5]), (x, np.ones((6, 6)), x), (np.ones((6, 6)), x, x.T)):
        with pytest.raises(ValueError, match="shares memory with"):
            protected_gemm(a, b, out=out)
        assert np.array_equal(x, before)
    interleaved = np.ones((6, 12))
    c = protected_gemm(x, interleaved[:, ::2], out=interleaved[:, 1::2])
    assert np.array_equal(c, np.full((6, 6), 6.0))
    assert np.array_equal(interleaved[:, ::2], x)


def test_float64_holds_all_that_was_there() -> None:
    x = np.array([[0.0, -1e-45, 3e-39], [1.0, -np.inf, np.nan]], np.float32, order="F")
    wide = in_float64(x)
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide.astype(np.float32), x)
    assert in_float64(wide) is wide
    assert not np.shares_memory(in_float64(wide, copy=True), wide)
