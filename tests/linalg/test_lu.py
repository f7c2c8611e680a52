"""`protected_lu_factor` in place of ``scipy.linalg.lu_factor``: the same goes in and comes out, and it is right."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg

from abft_tsm2 import SilentDataCorruptionError, Status, errstate, protected_lu_factor
from abft_tsm2.errors import UnverifiableWarning
from tests.support.cases import ORDERS, arrange
from tests.support.factor_cases import (
    DTYPES,
    EMPTY,
    INPUTS,
    MODES,
    OBLONG,
    SQUARE,
    clean,
    computed_in,
    described,
    lu_outside,
    outcome,
)
from tests.support.planting import bits, normal

IDS = [dtype.name for dtype in DTYPES]


# ---- the same as SciPy's ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SQUARE + OBLONG, ids=str)
def test_factors_of_every_shape(shape: tuple[int, int], mode: str, dtype: Any) -> None:
    a = normal(*shape, dtype=dtype)
    held = a.copy()
    lu, piv = clean(a, mode=mode)
    expected = linalg.lu_factor(a)
    assert described((lu, piv)) == described(expected)
    assert lu.flags.f_contiguous
    assert lu.flags.writeable
    assert piv.flags.writeable
    assert not np.shares_memory(lu, a)
    assert not lu_outside(lu, piv, a).any()
    np.testing.assert_array_equal(piv, expected[1])
    np.testing.assert_array_equal(bits(a), bits(held))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_matrices_without_elements(shape: tuple[int, int], dtype: Any, mode: str) -> None:
    a = np.empty(shape, dtype)
    assert described(clean(a, mode=mode)) == described(linalg.lu_factor(a))


@pytest.mark.parametrize("readonly", [False, True], ids=["", "read-only"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(70, 70), (90, 40), (40, 90)], ids=str)
def test_every_order_in_memory(shape: tuple[int, int], order: str, mode: str, readonly: bool) -> None:
    plain = normal(*shape)
    a = arrange(plain, order)
    a.flags.writeable = not readonly
    lu, piv = clean(a, mode=mode)
    assert lu.flags.f_contiguous
    assert not lu_outside(lu, piv, plain).any()
    np.testing.assert_array_equal(piv, linalg.lu_factor(plain)[1])
    np.testing.assert_array_equal(a, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("mode", ["auto", "online"])
@pytest.mark.parametrize("block", [1, 2, 7, 16, 64, 1000])
@pytest.mark.parametrize("shape", [(49, 49), (50, 31), (31, 50)], ids=str)
def test_every_size_of_block(shape: tuple[int, int], block: int, mode: str, dtype: Any) -> None:
    a = normal(*shape, dtype=dtype)
    lu, piv = clean(a, mode=mode, block=block)
    assert not lu_outside(lu, piv, a).any()
    np.testing.assert_array_equal(piv, linalg.lu_factor(a)[1])


@pytest.mark.parametrize("kind", INPUTS)
def test_what_scipy_takes_for_a_matrix(kind: str) -> None:
    a = INPUTS[kind](normal(20, 20))
    lu, piv = clean(a)
    assert described((lu, piv)) == (((20, 20), computed_in(a)), ((20,), np.int32))
    assert described((lu, piv))[0][0] == linalg.lu_factor(a)[0].shape
    assert type(lu) is np.ndarray
    assert lu.dtype.isnative
    assert not lu_outside(lu, piv, np.asarray(a, lu.dtype)).any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_overwrite_a_gives_the_same_factors(dtype: Any, order: str, mode: str) -> None:
    a = arrange(normal(80, 80, dtype=dtype), order)
    held = a.copy()
    lu, piv = clean(a, overwrite_a=True, mode=mode)
    assert not lu_outside(lu, piv, held).any()
    np.testing.assert_array_equal(piv, linalg.lu_factor(held)[1])


@pytest.mark.parametrize("order", ["C", "F"])
def test_overwrite_a_writes_to_nothing_that_is_read_only(order: str) -> None:
    a = arrange(normal(80, 80), order)
    held = a.copy()
    a.flags.writeable = False
    lu, piv = clean(a, overwrite_a=True)
    assert not lu_outside(lu, piv, held).any()
    np.testing.assert_array_equal(a, held)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 9, 5), (1, 5, 9), (2, 0, 3), (0, 3, 3)], ids=str)
def test_batches(shape: tuple[int, ...], mode: str, dtype: Any) -> None:
    a = normal(*shape, dtype=dtype)
    (lu, piv), report = protected_lu_factor(a, mode=mode, return_report=True)
    k = min(shape[-2:])
    assert (lu.shape, lu.dtype) == (shape, dtype)
    assert (piv.shape, piv.dtype) == ((*shape[:-2], k), np.int32)
    assert report.status is Status.CLEAN
    assert len(report.products) == (np.prod(shape[:-2]) if a.size else 0)
    for at in np.ndindex(*shape[:-2]):
        assert not lu_outside(lu[at], piv[at], a[at]).any()
        np.testing.assert_array_equal(piv[at], linalg.lu_factor(a[at])[1])


def test_the_same_call_gives_the_same_bits() -> None:
    a = normal(150, 150)
    first = protected_lu_factor(a, mode="online")
    for _ in range(3):
        again = protected_lu_factor(a, mode="online")
        assert all(np.array_equal(bits(x), bits(y)) for x, y in zip(first, again, strict=True))


def test_arguments_go_by_position_and_by_name_as_with_scipy() -> None:
    a = normal(9, 9)
    expected = protected_lu_factor(a)
    for found in (protected_lu_factor(a, False, True), protected_lu_factor(a=a, overwrite_a=False, check_finite=False)):
        assert all(np.array_equal(x, y) for x, y in zip(found, expected, strict=True))
    with pytest.raises(TypeError):
        protected_lu_factor(a, False, True, "online")


# ---- matrices that are no random numbers --------------------------------------------------------------------


def rank(n: int, r: int) -> np.ndarray:
    product: np.ndarray = normal(n, r) @ normal(r, n, seed=1)
    return product


def growing(n: int) -> np.ndarray:
    """Wilkinson's matrix, whose elimination doubles the last column at every step."""
    a = np.tril(-np.ones((n, n)), -1) + np.eye(n)
    a[:, -1] = 1
    return a


FAMILIES: Mapping[str, np.ndarray] = {
    "identity": np.eye(70),
    "exchange": np.eye(70)[::-1],
    "permutation": np.eye(70)[np.random.default_rng(0).permutation(70)],
    "uniform": np.random.default_rng(0).uniform(0, 1, (70, 70)),
    "dominant": normal(70, 70) + 100 * np.eye(70),
    "lower": np.tril(normal(70, 70)),
    "upper": np.triu(normal(70, 70)),
    "hilbert": linalg.hilbert(70),
    "symmetric": normal(70, 70) + normal(70, 70).T,
    "orthogonal": np.linalg.qr(normal(70, 70))[0],
    "of rank 5": rank(70, 5),
    "all 1 and a little": 1 + 1e-10 * normal(70, 70),
    "rows of all sizes": normal(70, 70) * 2.0 ** np.random.default_rng(1).integers(-400, 400, (70, 1)),
    "columns of all sizes": normal(70, 70) * 2.0 ** np.random.default_rng(1).integers(-400, 400, 70),
    "tiny": normal(70, 70) * 2.0**-1000,
    "huge": normal(70, 70) * 2.0**1000,
    "a few": np.where(np.random.default_rng(2).uniform(size=(70, 70)) < 0.04, normal(70, 70), 0) + np.eye(70),
    "growing": growing(50),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_clean(family: str, mode: str) -> None:
    a = FAMILIES[family]
    with np.errstate(all="ignore"):
        lu, piv = clean(a, mode=mode)
    assert not lu_outside(lu, piv, a).any()


def zeroed(n: int, *columns: int) -> np.ndarray:
    """A matrix whose elimination is exact, but for columns of zeros."""
    a = growing(n)
    a[:, list(columns)] = 0
    return a


SINGULAR: Mapping[str, np.ndarray] = {
    "0": np.zeros((1, 1)),
    "all 0": np.zeros((40, 40)),
    "all 1": np.ones((40, 40)),
    "tall and all 1": np.ones((50, 20)),
    "wide and all 0": np.zeros((20, 50)),
    "first column": zeroed(40, 0),
    "a column": zeroed(40, 17),
    "a column at the edge of a block": zeroed(40, 15, 16),
    "last column": zeroed(40, 39),
    "a row": growing(40) * (np.arange(40) != 23)[:, None],
    "two rows alike": np.eye(40)[np.r_[:39, 20]],
    "tall, columns of 0": np.eye(50, 20) * (np.arange(20) % 3 != 1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", SINGULAR)
def test_singular_matrices_have_the_same_factors_and_the_same_warning(family: str, mode: str, dtype: Any) -> None:
    a = SINGULAR[family].astype(dtype)
    theirs = outcome(linalg.lu_factor, a)
    ours = outcome(protected_lu_factor, a, mode=mode, block=16)
    assert ours.error is None
    assert theirs.warned
    assert ours.warned == theirs.warned
    for x, y in zip(ours.value, theirs.value, strict=True):
        np.testing.assert_array_equal(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", linalg.LinAlgWarning)
        clean(a, mode=mode)  # singular is not corrupted


def test_the_warning_names_the_line_that_called() -> None:
    with pytest.warns(linalg.LinAlgWarning, match="Diagonal number 1 is exactly zero") as caught:
        protected_lu_factor(np.zeros((3, 3)))
    assert caught[0].filename == __file__


def test_exact_eliminations_give_the_same_bits() -> None:
    for a in (growing(40), np.eye(40)[::-1], np.triu(normal(40, 40)), -growing(33).astype(np.float32)):
        for mode in MODES:
            for x, y in zip(protected_lu_factor(a, mode=mode, block=16), linalg.lu_factor(a), strict=True):
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("exponent", [-1022, -1030, -1060])
def test_what_lapack_gets_wrong_is_not_called_clean(exponent: int, mode: str) -> None:
    # Under a subnormal pivot, some LAPACK libraries multiply by a reciprocal that is infinite, or do not divide.
    a = normal(40, 40) * 2.0**exponent
    try:
        with errstate(unverifiable="ignore"):
            (lu, piv), report = protected_lu_factor(a, mode=mode, return_report=True)
    except SilentDataCorruptionError:
        return
    assert not report.ok or not lu_outside(lu, piv, a).any()


# ---- what is refused, and what cannot be checked ------------------------------------------------------------


@pytest.mark.parametrize("a", [np.ones(3), np.float64(3), 3.0, []], ids=["vector", "0-D", "number", "empty list"])
def test_what_is_no_matrix_is_refused(a: Any) -> None:
    with pytest.raises(ValueError, match=r"2|two|dimension"):
        protected_lu_factor(a)


@pytest.mark.parametrize("a", [np.eye(3) + 0j, np.eye(3, dtype=np.complex64)], ids=["complex128", "complex64"])
def test_complex_numbers_are_refused_with_advice(a: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)complex.*(scipy|real)"):
        protected_lu_factor(a)


@pytest.mark.parametrize("a", [[["a", "b"], ["c", "d"]], [[1, 2], [3]], {"a": 1}], ids=["words", "ragged", "mapping"])
def test_what_is_no_number_is_refused(a: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        protected_lu_factor(a)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite(mode: str, bad: float) -> None:
    a = normal(20, 20)
    a[7, 3] = bad
    ours, theirs = (outcome(f, a) for f in (protected_lu_factor, linalg.lu_factor))
    assert ours.kind == theirs.kind == (ValueError, "array must not contain infs or NaNs")
    with np.errstate(all="ignore"), errstate(unverifiable="ignore"):
        (lu, piv), report = protected_lu_factor(a, check_finite=False, mode=mode, return_report=True)
        assert report.status is Status.UNVERIFIABLE
        assert report.reasons
        assert not report.ok
        assert described((lu, piv)) == described(linalg.lu_factor(a, check_finite=False))
    with pytest.warns(UnverifiableWarning):
        protected_lu_factor(a, check_finite=False, mode=mode)


def test_unknown_choices_are_refused_before_any_work() -> None:
    a = np.eye(3)
    with pytest.raises(ValueError, match=r"mode.*'onlin'.*online"):
        protected_lu_factor(a, mode="onlin", on_stage=pytest.fail)
    with pytest.raises(ValueError, match=r"on_error.*'fix'.*detect"):
        protected_lu_factor(a, on_error="fix", on_stage=pytest.fail)
    for block in (0, -1, True, False, 2.0):
        with pytest.raises(ValueError, match="block"):
            protected_lu_factor(a, block=block, on_stage=pytest.fail)


# ---- any shape, block, order and type -----------------------------------------------------------------------


@settings(max_examples=150)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from([None, 1, 2, 3, 5, 8, 16, 33, 64]),
    st.sampled_from(DTYPES),
    st.sampled_from(ORDERS),
    st.sampled_from(MODES),
    st.integers(0, 2**16),
)
def test_pa_is_lu_and_pivots_are_scipys(
    shape: tuple[int, int], block: int | None, dtype: Any, order: str, mode: str, seed: int
) -> None:
    plain = normal(*shape, dtype=dtype, seed=seed)
    lu, piv = clean(arrange(plain, order), mode=mode, block=block)
    assert not lu_outside(lu, piv, plain).any()
    np.testing.assert_array_equal(piv, linalg.lu_factor(plain)[1])


@pytest.mark.parametrize("off", [1e-10, np.nan])
@pytest.mark.parametrize("at", [(0, 0), (5, 3), (3, 5), (11, 11)], ids=str)
def test_the_judge_sees_one_wrong_element(at: tuple[int, int], off: float) -> None:
    a = normal(12, 12)
    lu, piv = linalg.lu_factor(a)
    assert not lu_outside(lu, piv, a).any()
    lu[at] += off
    assert lu_outside(lu, piv, a).any()
    assert lu_outside(linalg.lu_factor(a)[0], piv[::-1], a).any()
