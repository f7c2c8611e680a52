"""tsm2r, tsm2l and tall_skinny_matmul: their arguments, and what they do without a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2 import NotSuitable, tall_skinny_matmul, tsm2l, tsm2r
from abft_tsm2.core.kernels import Shape, Stream
from abft_tsm2.core.paper.config import VARIANTS, Config
from tests.support.cases import DTYPES, ORDERS, arrange
from tests.support.oracles import elements_outside

IDS = [dtype.name for dtype in DTYPES]
PRODUCTS = (tall_skinny_matmul, tsm2r, tsm2l)
STREAM = Stream("rows", *("float64",) * 4, 16, 2, Shape(128, 4, 1, 2, 3))
SHAPES = ((100, 5, 2), (5, 100, 1), (1, 1, 1), (0, 3, 2), (3, 0, 2), (3, 2, 0), (257, 129, 8))


def matrix(shape: tuple[int, int], dtype: Any, order: str = "C", seed: int = 0) -> np.ndarray:
    return arrange(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype), order)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_on_numpy_it_is_the_librarys_product(product: Any, dtype: np.dtype[Any], order: str) -> None:
    for m, k, n in SHAPES:
        a, b = matrix((m, k), dtype, order), matrix((k, n), dtype, "C", 1)
        c = product(a, b)
        assert c.dtype == dtype
        if dtype.itemsize >= 4:
            np.testing.assert_array_equal(c, a @ b)
        assert not elements_outside(c, a, b).any()  # NumPy itself is less accurate in 16 bits
        assert c.flags.c_contiguous


@pytest.mark.parametrize("product", PRODUCTS)
@given(
    st.tuples(*[st.integers(0, 40)] * 3),
    st.sampled_from(DTYPES),
    st.sampled_from(ORDERS),
    st.sampled_from([1.0, -0.5, 2.0, 0.0]),
    st.sampled_from([0.0, 1.0, -0.25]),
)
def test_out_alpha_and_beta(
    product: Any, shape: tuple[int, int, int], dtype: np.dtype[Any], order: str, alpha: float, beta: float
) -> None:
    m, k, n = shape
    a, b, before = matrix((m, k), dtype), matrix((k, n), dtype, "F", 1), matrix((m, n), dtype, "C", 2)
    if beta == 0:
        before[...] = np.nan  # must not be read
    out = arrange(before, order)
    assert product(a, b, out=out, alpha=alpha, beta=beta) is out
    assert not elements_outside(out, a, b, before, alpha=alpha, beta=beta).any()
    if beta == 0:
        # Not bit by bit: for an output in another order some BLAS adds in another order.
        assert not elements_outside(product(a, b, alpha=alpha), a, b, alpha=alpha).any()


def test_operands_of_two_types_are_multiplied_in_the_wider_one() -> None:
    a, b = np.ones((3, 2), np.float32), np.ones((2, 1))
    assert tall_skinny_matmul(a, b).dtype == np.float64
    assert tall_skinny_matmul(a, b, alpha=2.0).dtype == np.float64


@pytest.mark.parametrize(
    ("dtype", "asked", "expected"),
    [
        *(("float32", x, "float64") for x in ("float64", np.float64, np.dtype("float64"))),
        *(("float16", x, "float32") for x in ("float32", np.float32, np.dtype("float32"))),
        *(("float16", "float64", "float64"), ("float64", "float64", "float64"), ("float16", "float16", "float16")),
    ],
)
def test_sums_and_result_are_as_wide_as_asked_for(dtype: str, asked: Any, expected: str) -> None:
    a, b = matrix((30, 500), dtype), matrix((500, 3), dtype, "F", 1)
    wide = a.astype(expected), b.astype(expected)
    for c in (tall_skinny_matmul(a, b, dtype=asked), tall_skinny_matmul(a, b, out=np.full((30, 3), np.nan, expected))):
        assert c.dtype == expected
        assert not elements_outside(c, *wide).any()
    out = np.ones((30, 3), expected, order="F")
    assert tall_skinny_matmul(a, b, dtype=asked, out=out, alpha=2.0, beta=-0.5) is out
    assert not elements_outside(out, *wide, np.ones((30, 3), expected), alpha=2.0, beta=-0.5).any()


def test_a_result_narrower_than_the_operands_is_refused() -> None:
    a, b = np.ones((3, 2)), np.ones((2, 1), np.float32)
    for narrow in ("float32", "float16", np.dtype("float32")):
        with pytest.raises(TypeError, match=r"a result of float\d\d is narrower than float64"):
            tall_skinny_matmul(a, b, dtype=narrow)
    for other in ("int64", np.int64, "complex128", "nonsense"):
        with pytest.raises(TypeError, match="float64, float32, float16, bfloat16"):
            tall_skinny_matmul(a, b, dtype=other)
    with pytest.raises(ValueError, match=r"of float64, the product is \(1, 1\) of float32"):
        tall_skinny_matmul(b[:1], b[:1].T[:, :1], dtype="float32", out=np.ones((1, 1)))


def test_the_standards_arrays_have_wider_results_and_factors_too() -> None:
    xp = pytest.importorskip("array_api_strict")
    a, b = xp.ones((3, 2), dtype=xp.float32), xp.ones((2, 1), dtype=xp.float32)
    for asked in ("float64", xp.float64):
        c = tall_skinny_matmul(a, b, dtype=asked)
        assert c.dtype == xp.float64
        assert bool(xp.all(c == 2.0))
    out = xp.ones((3, 1), dtype=xp.float64)
    assert bool(xp.all(tall_skinny_matmul(a, b, out=out, alpha=3.0, beta=0.5) == 6.5))


# ---- stacks -------------------------------------------------------------------------------------------------------

STACKS = [((), (4,)), ((4,), ()), ((4,), (4,)), ((1,), (4,)), ((2, 1), (3,)), ((0,), ()), ((2, 3), (2, 3))]


@pytest.mark.parametrize(("left", "right"), STACKS)
@pytest.mark.parametrize(
    "types", [("float64", "float64"), ("float32", "float64"), ("float16", "float32")], ids="-".join
)
def test_stacks_broadcast_as_in_numpy(left: tuple[int, ...], right: tuple[int, ...], types: tuple[str, str]) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((*left, 7, 5)).astype(types[0]), rng.standard_normal((*right, 5, 3)).astype(types[0])
    wide = a.astype(types[1]), b.astype(types[1])
    c = tall_skinny_matmul(a, b, dtype=types[1])
    expected = np.matmul(*wide)
    assert (c.shape, c.dtype) == (expected.shape, expected.dtype)
    out = np.ones(expected.shape, types[1])
    assert tall_skinny_matmul(a, b, out=out, alpha=-0.5, beta=2.0) is out
    lefts, rights = (np.broadcast_to(x, (*expected.shape[:-2], *x.shape[-2:])) for x in wide)
    for at in np.ndindex(*expected.shape[:-2]):
        assert not elements_outside(c[at], lefts[at], rights[at]).any()
        factors = {"alpha": -0.5, "beta": 2.0}
        assert not elements_outside(out[at], lefts[at], rights[at], np.ones((7, 3), types[1]), **factors).any()


def test_stacks_that_do_not_fit_are_refused() -> None:
    a, b = np.ones((2, 4, 3)), np.ones((3, 3, 2))
    with pytest.raises(ValueError, match=r"stacks of \(2,\) and \(3,\) matrices do not broadcast"):
        tall_skinny_matmul(a, b)
    with pytest.raises(ValueError, match=r"out is \(4, 2\) of float64, the product is \(2, 4, 2\) of float64"):
        tall_skinny_matmul(a, b[0], out=np.ones((4, 2)))


@pytest.mark.parametrize("product", PRODUCTS)
def test_products_are_of_matrices(product: Any) -> None:
    good = np.ones((3, 2))
    for a, b in ((good, good), (good[0], good), (good, good[0]), (good[None], good), (good[0, 0], good)):
        with pytest.raises(ValueError, match=r"are not .* matrices"):
            product(a, b)


@pytest.mark.parametrize("product", PRODUCTS)
def test_an_out_that_does_not_fit_is_refused_and_left_alone(product: Any) -> None:
    a, b = np.ones((4, 3)), np.ones((3, 2))
    whole = np.ones((6, 6))
    read_only = np.ones((4, 2))
    read_only.flags.writeable = False
    doubled = np.lib.stride_tricks.as_strided(np.ones(2), (4, 2), (0, 8))
    for out, message in (
        (np.ones((4, 3)), r"out is \(4, 3\) of float64, the product is \(4, 2\) of float64"),
        (np.ones((4, 2), np.float32), r"of float32, the product .* float64"),
        (read_only, r"read-only"),
        (doubled, r"share memory: its strides are \(0, 8\) bytes"),
    ):
        before = out.copy()
        with pytest.raises(ValueError, match=message):
            product(a, b, out=out)
        np.testing.assert_array_equal(out, before)
    with pytest.raises(ValueError, match="out shares memory with A or B"):
        product(whole[:4, :3], b, out=whole[:4, 2:4])
    with pytest.raises(ValueError, match=r"beta = 1.0 multiplies what `out` holds: pass out="):
        product(a, b, beta=1.0)


@pytest.mark.parametrize(
    "call",
    [
        *(lambda a, b, v=v: (tsm2l if v.startswith("Opt") else tsm2r)(a, b, variant=v) for v in VARIANTS),
        lambda a, b: tsm2r(a, b, config=Config("V3", "float64", 128, 2, 4)),
        lambda a, b: tsm2r(a, b, variant="auto"),
        lambda a, b: tsm2l(a, b, variant="auto"),
        lambda a, b: tsm2r(a, b, config=STREAM),
    ],
)
def test_asking_for_a_kernel_without_a_gpu_says_what_is_missing(call: Any) -> None:
    with pytest.raises(
        NotSuitable, match=r"is a CUDA kernel, and A is a numpy.ndarray of 2 dimensions: it needs a GPU"
    ):
        call(np.ones((4, 3)), np.ones((3, 2)))


def test_a_variant_of_the_other_family_is_refused() -> None:
    a, b = np.ones((4, 3)), np.ones((3, 2))
    with pytest.raises(ValueError, match=r"no variant 'Opt-1' here: choose from auto, V0, V1, V2, V3"):
        tsm2r(a, b, variant="Opt-1")
    with pytest.raises(ValueError, match=r"no variant 'v3' here: choose from auto, Opt-1, Opt-2"):
        tsm2l(a, b, variant="v3")
    with pytest.raises(ValueError, match=r"leave one of them out"):
        tsm2r(a, b, variant="V2", config=Config("V3", "float64", 128, 2, 4))
    with pytest.raises(ValueError, match=r"leave one of them out"):
        tsm2r(a, b, variant="V2", config=STREAM)


def test_what_follows_the_operands_is_named() -> None:
    for product in PRODUCTS:
        kinds = [parameter.kind for parameter in inspect.signature(product).parameters.values()]
        assert kinds[2:] == [inspect.Parameter.KEYWORD_ONLY] * (len(kinds) - 2)


def test_types_are_what_numpy_takes_as_one() -> None:
    A, B = np.ones((5, 4), np.float32), np.ones((4, 2), np.float32)
    for dtype in ("f8", ">f8", float, np.float64, np.dtype("f8")):
        assert tall_skinny_matmul(A, B, dtype=dtype).dtype == np.float64
