"""The judge of the stream suites: operands of every type and order, references, and what is called wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest

from abft_tsm2.arrays import FLOATS
from abft_tsm2.core.encode_both import encode_both
from abft_tsm2.core.split_k import problem_of
from abft_tsm2.faults.judge.oracle import ReferenceArithmetic, reference, require, widened
from benchmarks.judge import errors
from benchmarks.operands import Encodings, Products, array, fill
from benchmarks.stream_grid import Cell
from tests.benchmarks.test_bench_stream import SMALL
from tests.support.fake_card import Card


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    for name, module in card.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return card


# ---- operands and judge -------------------------------------------------------------------------------------------


def test_the_problem_of_a_cell_is_that_of_its_arrays(card: Card) -> None:
    for cell in SMALL:
        if cell.suite == "both":
            continue
        operands = Products([cell], 1)
        b, c = {"rows": "CC", "columns": "FF", "transposed": "CC"}[cell.order]
        found = problem_of(operands.A[0], operands.B(cell.n, b), operands.outputs(cell.n, c)[0])
        aligned = operands.A[0].ctypes.data % 16 == 0  # as CuPy's memory is
        assert found == (cell.problem if aligned else replace(cell.problem, width=found.width))


@pytest.mark.parametrize("lead", [0, 3])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_arrays_lie_as_asked_with_nan_between(card: Card, dtype: str, order: str, lead: int) -> None:
    x = array((2, 5, 4), dtype, order, lead)
    size, line = FLOATS[dtype].bits // 8, (4 if order == "C" else 5) + lead
    assert x.strides[1:] == ((line * size, size) if order == "C" else (size, line * size))
    assert np.isnan(widened(x)).all()
    fill(x, np.random.default_rng(0).random)
    values = widened(x)
    assert len(np.unique(values)) > 20
    assert ((values >= 0) & (values <= 1)).all()
    assert np.isnan(widened(x.base)).sum() == 2 * lead * (5 if order == "C" else 4)


def test_bfloat16_is_rounded_to_nearest_as_by_its_own_library(card: Card) -> None:
    numbers = np.random.default_rng(1).standard_normal((40, 30)).astype(np.float32)
    x = array((40, 30), "bfloat16")
    fill(x, lambda count, dtype: numbers.reshape(-1)[:count])
    np.testing.assert_array_equal(x, numbers.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(widened(x), numbers.astype(ml_dtypes.bfloat16).astype(np.float64))


@pytest.mark.parametrize("cell", [cell for cell in SMALL if cell.suite != "both"], ids=str)
def test_an_error_in_one_element_is_found(card: Card, cell: Cell) -> None:
    operands = Products([cell], 1)
    operands.fill("normal", 3)
    A, B = (widened(x) for x in (operands.A[0], operands.B(cell.n, "C")))
    C = operands.outputs(cell.n, "C")[0]
    C[...] = A @ B
    assert operands.judge([C]).ok
    C[..., 3, -1] *= 1 + 3 * cell.k * FLOATS[cell.sums].unit_roundoff * (abs(A) @ abs(B) / abs(A @ B))[..., 3, -1]
    assert operands.judge([C]).outside == cell.products


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_error_in_one_sum_of_an_encoding_is_found(card: Card, dtype: str, which: int) -> None:
    operands = Encodings([Cell("both", "rows", 60, 40, 2, dtype, dtype)], 1)
    operands.fill("uniform", 3)
    V, W = operands.weights(2, "F")
    found = encode_both(operands.A[0], V, W, squares=True)
    assert found.row_squares is not None
    assert found.column_squares is not None
    results = [found.rows, found.columns.T, found.row_squares[:, None], found.column_squares[:, None]]
    assert operands.judge(results).ok
    assert operands.judge(results[:2]).ok
    results[which][5, 0] *= 1 + 200 * FLOATS[dtype].unit_roundoff
    assert operands.judge(results).outside == 1
    with pytest.raises(ValueError, match="nothing was computed"):
        operands.judge([])


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float64", "float64"), ("float32", "float64")])
@pytest.mark.parametrize("squared", [False, True])
def test_the_reference_is_exact_but_for_a_sliver_of_the_bound(dtypes: tuple[str, str], squared: bool) -> None:
    rng = np.random.default_rng(5)
    a, b = (
        rng.standard_normal(shape).astype(dtype) for shape, dtype in zip(((2, 5, 30), (2, 30, 3)), dtypes, strict=True)
    )
    sums = dtypes[1]
    found = reference(a, b, sums=sums, squared=squared)
    require(found, a, b, sums=sums, squared=squared)
    for at, i, j in product(range(2), range(5), range(3)):
        pairs = zip(a[at, i], b[at, :, j], strict=True)
        exact = sum(Fraction(float(x)) ** (1 + squared) * Fraction(float(y)) for x, y in pairs)
        distance = abs(exact - Fraction(found.high[at, i, j]) - Fraction(found.low[at, i, j]))
        assert distance <= 2e-5 * 30 * FLOATS[sums].unit_roundoff * found.magnitude[at, i, j]


def test_a_reference_of_squares_that_is_off_is_refused() -> None:
    a, b = (np.random.default_rng(6).random(shape) for shape in ((4, 20), (20, 2)))
    right = reference(a, b, squared=True)
    with pytest.raises(ArithmeticError, match="nothing can be judged"):
        require(right, a, b)
    with pytest.raises(ArithmeticError, match="nothing can be judged"):
        require(replace(right, high=right.high * (1 + 1e-14)), a, b, squared=True)


def test_sums_that_are_cut_off_are_allowed_twice_the_error_and_a_bias() -> None:
    k, unit = 4096, FLOATS["float32"].unit_roundoff
    a, b = np.ones((3, k), np.float16), np.ones((k, 1), np.float16)
    expected = reference(a, b, sums="float32")
    exact, cut = ReferenceArithmetic("float32", "float32"), ReferenceArithmetic("float32", "float32", truncating=True)
    for factor, fits_exact, fits_cut in ((100, True, True), (400, False, True), (900, False, False)):
        C = (expected.high * (1 - factor * unit)).astype(np.float32)
        assert errors(C, expected, k, arithmetic=exact).ok == fits_exact
        assert errors(C, expected, k, arithmetic=cut).ok == fits_cut


def test_a_result_that_is_rounded_to_sixteen_bits_is_allowed_that() -> None:
    a, b = (np.random.default_rng(7).random(shape).astype(np.float16) for shape in ((5, 30), (30, 2)))
    expected = reference(a, b, sums="float32")
    C = expected.high.astype(np.float16)
    assert errors(C, expected, 30, arithmetic=ReferenceArithmetic("float32", "float16", truncating=True)).ok
    assert not errors(C.astype(np.float32), expected, 30, arithmetic=ReferenceArithmetic("float32", "float32")).ok


def test_lines_of_different_scales_keep_their_accuracy() -> None:
    """A float64 product is split in units of each line; in those of the largest one, small ones would be lost."""
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((60, 24)), rng.standard_normal((24, 50))
    A *= 2.0 ** rng.integers(-20, 21, (60, 1))
    B *= 2.0 ** rng.integers(-20, 21, (1, 50))
    A[[0, 20, 59]] *= 2.0**-30  # rows that `require` compares
    require(reference(A, B), A, B)
