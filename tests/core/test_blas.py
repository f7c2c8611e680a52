"""The steps of factorisations (`abft_tsm2.core.blas`) on parts of larger matrices that stay as they are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import linalg

from abft_tsm2.arrays import namespace, to_host
from abft_tsm2.core import blas as steps
from tests.support import factor_cases
from tests.support.cases import arrange
from tests.support.factor_cases import DTYPES, EMPTY, gamma, lu_outside, positive
from tests.support.oracles import WIDE, elements_outside
from tests.support.planting import bits, normal

strict = pytest.importorskip("array_api_strict")
Shape = tuple[int, ...]

# F and C are NumPy's column-major and row-major parts, S is one of array_api_strict.
ONE = ("F", "C", "S")
TWO = ("FF", "FC", "CF", "CC", "SS")
THREE = (*map("".join, itertools.product("FC", repeat=3)), "SSS")

SIZES = (0, 1, 2, 7, 64, 65, 130)
LARGE = (1025, 1031), (1 << 20, 1)
SHAPES = (*EMPTY, (1, 1), (1, 9), (9, 1), (2, 3), (31, 31), (65, 7), (7, 65))

lowers = pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
units = pytest.mark.parametrize("unit", [False, True], ids=["", "unit"])
kinds = pytest.mark.parametrize("kind", ["array", "vector"])


@pytest.fixture(scope="module", params=DTYPES, ids=[dtype.name for dtype in DTYPES])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


def foreign(shape: Shape, dtype: Any) -> np.ndarray:
    """None of a step's business: some elements are NaN, to find out who reads them; some 1000, who adds to them."""
    return np.where(normal(*shape) > 0, np.nan, 1000).astype(dtype)


class Part:
    """A matrix amid a larger one: `array` is what a step gets, `vector` its first column, contiguous in order F."""

    def __init__(self, x: np.ndarray, order: str) -> None:
        m, n = x.shape
        self._at = slice(2, 2 + m), slice(1, 1 + n)
        self._before = foreign((m + 3, n + 4), x.dtype)
        self._before[self._at] = x
        whole = self._before.copy(order="F" if order == "F" else "C")
        self._whole = strict.asarray(whole) if order == "S" else whole
        self.array: Any = self._whole[self._at]

    @property
    def vector(self) -> Any:
        return self.array[:, 0]

    @property
    def now(self) -> np.ndarray:
        return np.array(to_host(self.array))

    def kept(self, *, but: Any = False) -> bool:
        """Whether nothing has changed, in the part or around it, except these elements of the part."""
        free = np.zeros(self._before.shape, bool)
        free[self._at] = but
        return bool((free | (bits(to_host(self._whole)) == bits(self._before))).all())


def parts(orders: str, *matrices: np.ndarray) -> list[Part]:
    return [Part(x, order) for x, order in zip(matrices, orders, strict=True)]


def kept(*operands: Part) -> bool:
    return all(x.kept() for x in operands)


def below(m: int, n: int) -> np.ndarray:
    """Where the lower triangle is."""
    return np.tri(m, n, dtype=bool)


def lower_half(a: np.ndarray) -> np.ndarray:
    return np.where(below(*a.shape), a, foreign(a.shape, a.dtype))


def triangle(n: int, dtype: Any, *, lower: bool, unit: bool) -> tuple[np.ndarray, np.ndarray]:
    """A well-conditioned triangle, as a step gets it and as it is meant."""
    t = normal(n, n, dtype=dtype, seed=3) / dtype.type(n + 1) + 2 * np.eye(n, dtype=dtype)
    read = np.tri(n, k=-1 if unit else 0, dtype=bool)
    read = read if lower else read.T
    return np.where(read, t, foreign(t.shape, dtype)), np.where(read, t, np.eye(n, dtype=dtype))


# ---- panels, exchanges ----------------------------------------------------------------------------------------------


in_halves = pytest.mark.parametrize("narrow", [None, 1, 3], ids=["", "halves to 1", "halves to 3"])


@in_halves
@pytest.mark.parametrize("order", ["F", "S"])
@pytest.mark.parametrize("shape", [*SHAPES, (300, 140), (140, 300)], ids=str)
def test_a_panel_has_the_factors_and_pivots_of_lapack(shape: Shape, order: str, narrow: int | None, dtype: Any) -> None:
    a = normal(*shape, dtype=dtype)
    X = Part(a, order)
    pivots, info = steps.factor_panel(X.array, narrow)
    assert (info, pivots.dtype.name) == (0, "int32")
    np.testing.assert_array_equal(pivots, linalg.lu_factor(a)[1])
    assert not lu_outside(X.now, pivots, a).any()
    assert X.kept(but=True)


@in_halves
@pytest.mark.parametrize("order", ["F", "S"])
@pytest.mark.parametrize("zeros", [[0], [4], [2, 4]], ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (9, 5), (5, 9), (70, 40)], ids=str)
def test_the_first_zero_pivot_is_reported(
    shape: Shape, zeros: list[int], order: str, narrow: int | None, dtype: Any
) -> None:
    a = np.eye(*shape, dtype=dtype)
    a[:, zeros] = 0
    X = Part(a, order)
    assert steps.factor_panel(X.array, narrow)[1] == linalg.get_lapack_funcs("getrf", (a,))(a)[2] == zeros[0] + 1
    np.testing.assert_array_equal(X.now, a)
    assert X.kept(but=True)


def test_a_panel_by_rows_is_refused() -> None:
    X = Part(normal(5, 3), "C")
    with pytest.raises(ValueError, match="column-major"):
        steps.factor_panel(X.array)
    assert X.kept()


@pytest.mark.parametrize("numbers", [np.int32, np.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("back", [False, True], ids=["", "back"])
@pytest.mark.parametrize("order", ONE)
@pytest.mark.parametrize("shape", [*SHAPES, (9, 130)], ids=str)
def test_rows_are_exchanged_in_turn_and_back(shape: Shape, order: str, back: bool, numbers: Any, dtype: Any) -> None:
    m, a = shape[0], normal(*shape, dtype=dtype)
    for count in (0, m // 2, m):
        pivots = np.random.default_rng(count).integers(np.arange(count), m, dtype=numbers)
        held, expected = pivots.copy(), a.copy()
        for i, p in list(enumerate(pivots))[:: -1 if back else 1]:
            expected[[i, p]] = expected[[p, i]]
        X = Part(a, order)
        steps.exchange_rows(X.array, pivots, back=back)
        np.testing.assert_array_equal(bits(X.now), bits(expected))
        np.testing.assert_array_equal(pivots, held)
        assert X.kept(but=True)


@pytest.mark.parametrize(("pivots", "m"), [([], 0), ([], 3), ([0], 1), ([2, 2], 4), ([3, 1, 3, 3], 4)], ids=str)
def test_the_permutation_is_that_of_the_exchanges(pivots: list[int], m: int) -> None:
    found = steps.permutation(np.array(pivots, np.int32), m)
    assert found.dtype.name == "int64"
    np.testing.assert_array_equal(found, factor_cases.permutation(np.array(pivots, int), m))


@pytest.mark.parametrize("pivots", [[4], [0, -1], [0, 1, 2, 3, 3]], ids=str)
def test_exchanges_with_no_row_are_refused(pivots: list[int]) -> None:
    with pytest.raises(IndexError, match="of 4"):
        steps.permutation(np.array(pivots, np.int32), 4)


# ---- triangles ------------------------------------------------------------------------------------------------------


@units
@lowers
@pytest.mark.parametrize("right", [False, True], ids=["left", "right"])
@pytest.mark.parametrize("orders", TWO)
@settings(max_examples=6)
@example(shape=(0, 3))
@example(shape=(3, 0))
@example(shape=(1, 1))
@example(shape=(65, 7))
@example(shape=(7, 65))
@given(shape=st.tuples(*[st.integers(0, 40)] * 2))
def test_any_triangle_is_solved(shape: Shape, orders: str, right: bool, lower: bool, unit: bool, dtype: Any) -> None:
    """|T X - B| <= gamma_n |T||X| (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, theorem 8.5),
    with two operations more, for libraries that multiply by the reciprocal of the diagonal."""
    n = shape[right]
    passed, meant = triangle(n, dtype, lower=lower, unit=unit)
    b = normal(*shape, dtype=dtype)
    T, B = parts(orders, passed, b)
    steps.solve_triangle(T.array, B.array, lower=lower, unit=unit, right=right)
    t, x = meant.astype(WIDE), B.now.astype(WIDE)
    back, size = (x @ t, abs(x) @ abs(t)) if right else (t @ x, abs(t) @ abs(x))
    assert (abs(back - b) <= gamma(n + 2, dtype) * size).all()
    assert T.kept()
    assert B.kept(but=True)


@units
@lowers
@pytest.mark.parametrize("orders", TWO)
@pytest.mark.parametrize("n", [0, 1, 7, 65])
def test_a_triangle_is_multiplied(n: int, orders: str, lower: bool, unit: bool, dtype: Any) -> None:
    passed, meant = triangle(n, dtype, lower=lower, unit=unit)
    x = normal(n, 1, dtype=dtype)
    T, X = parts(orders, passed, x)
    y = np.array(to_host(steps.multiply_triangle(T.array, X.vector, lower=lower, unit=unit)))
    assert (y.shape, y.dtype) == ((n,), dtype)
    assert not elements_outside(y[:, None], meant, x).any()
    assert kept(T, X)


# ---- products -------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("orders", THREE)
@settings(max_examples=15)
@example(shape=(0, 2, 3), scales={})
@example(shape=(2, 0, 3), scales={"beta": -3.0})
@example(shape=(2, 3, 0), scales={})
@example(shape=(1, 1, 1), scales={})
@example(shape=(31, 65, 7), scales={"alpha": 0.25, "beta": 0.0})
@example(shape=(7, 31, 65), scales={"alpha": -3.0, "beta": 0.25})
@given(
    shape=st.tuples(*[st.integers(0, 40)] * 3),
    scales=st.fixed_dictionaries({}, optional=dict.fromkeys(("alpha", "beta"), st.sampled_from([-3.0, 0.0, 0.25]))),
)
def test_any_product_is_added(shape: Shape, scales: dict[str, float], orders: str, kind: str, dtype: Any) -> None:
    m, k, n = shape if kind == "array" else (*shape[:2], 1)
    c, a, b = (normal(*size, dtype=dtype, seed=seed) for seed, size in enumerate([(m, n), (m, k), (k, n)]))
    meant = {"alpha": -1.0, "beta": 1.0, **scales}
    if meant["beta"] == 0:
        c[...] = np.nan  # is not read
    C, A, B = parts(orders, c, a, b)
    steps.add_product(getattr(C, kind), A.array, getattr(B, kind), **scales)
    assert not elements_outside(C.now, a, b, c, **meant).any()
    assert C.kept(but=True)
    assert kept(A, B)


@kinds
@pytest.mark.parametrize("orders", TWO)
@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (1, 1, 1), (31, 65, 7)], ids=str)
def test_a_product_is_new(shape: Shape, orders: str, kind: str, dtype: Any) -> None:
    m, k, n = shape if kind == "array" else (*shape[:2], 1)
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype, seed=1)
    A, B = parts(orders, a, b)
    found = steps.product(A.array, getattr(B, kind))
    assert namespace(found) is namespace(A.array)
    assert found.shape == ((m, n) if kind == "array" else (m,))
    assert not elements_outside(np.array(to_host(found)).reshape(m, n), a, b).any()
    assert kept(A, B)


@pytest.mark.parametrize("orders", TWO)
@pytest.mark.parametrize("shape", [*SHAPES, (4 * steps.TILE + 9, 3)], ids=str)
def test_a_square_is_subtracted_below(shape: Shape, orders: str, dtype: Any) -> None:
    n, a = shape[0], normal(*shape, dtype=dtype)
    c = lower_half(normal(n, n, dtype=dtype, seed=1))
    C, A = parts(orders, c, a)
    steps.subtract_square(C.array, A.array)
    assert not elements_outside(C.now, a, a.T, c, alpha=-1.0, beta=1.0)[below(n, n)].any()
    assert C.kept(but=below(n, n))
    assert A.kept()


@pytest.mark.parametrize("orders", TWO)
@pytest.mark.parametrize("n", SIZES)
def test_a_symmetric_matrix_is_multiplied(n: int, orders: str, dtype: Any) -> None:
    a, x = normal(n, n, dtype=dtype), normal(n, 1, dtype=dtype, seed=1)
    A, X = parts(orders, lower_half(a), x)
    y = np.array(to_host(steps.symmetric_product(A.array, X.vector)))
    assert (y.shape, y.dtype) == ((n,), dtype)
    assert not elements_outside(y[:, None], np.tril(a) + np.tril(a, -1).T, x).any()
    assert kept(A, X)


STEPS: Mapping[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "factor_panel": lambda X, _: steps.factor_panel(X),
    "exchange_rows": lambda X, _: steps.exchange_rows(X, np.array([3, 2], np.int32)),
    "factor_definite": lambda X, _: steps.factor_definite(X),
    "solve_triangle, T": lambda X, M: steps.solve_triangle(X, M, lower=True),
    "solve_triangle, B": lambda X, M: steps.solve_triangle(M, X, lower=True, right=True),
    "multiply_triangle": lambda X, M: steps.multiply_triangle(X, M[0], lower=True),
    "add_product, C": lambda X, M: steps.add_product(X, M, M),
    "add_product, A": lambda X, M: steps.add_product(M, X, M),
    "add_product, B": lambda X, M: steps.add_product(M, M, X),
    "add_product, vectors": lambda X, M: steps.add_product(M[0], X, M[1]),
    "subtract_square, C": lambda X, M: steps.subtract_square(X, M),
    "subtract_square, A": lambda X, M: steps.subtract_square(M, X),
    "symmetric_product": lambda X, M: steps.symmetric_product(X, M[0]),
}


@pytest.mark.parametrize("neither", ["strided", "reversed"])
@pytest.mark.parametrize("step", STEPS)
def test_a_part_with_neither_rows_nor_columns_is_refused(step: str, neither: str) -> None:
    X, M = arrange(positive(6), neither), positive(6)
    held = X.copy()
    with pytest.raises(ValueError, match=r"6 x 6 part with strides .* neither rows nor columns"):
        STEPS[step](X, M)
    np.testing.assert_array_equal(X, held)
    np.testing.assert_array_equal(M, positive(6))


# ---- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ONE)
@pytest.mark.parametrize("shape", [(5,), (0, 3), (4, 6)], ids=str)
def test_arrays_like_another(shape: Shape, order: str, dtype: Any) -> None:
    X = Part(normal(2, 3, dtype=dtype), order).array
    for asked in (None, namespace(X).int32):
        found = steps.like_columns(X, shape, asked)
        assert namespace(found) is namespace(X)
        assert (found.shape, found.dtype) == (shape, X.dtype if asked is None else asked)
        assert order == "S" or found.flags.f_contiguous


@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize("order", ONE)
@pytest.mark.parametrize("shape", [*EMPTY, (1, 1), (1, 9), (9, 2), (64, 64), (63, 200), (200, 65), *LARGE], ids=str)
def test_a_copy_by_columns(shape: Shape, order: str, extra: int, dtype: Any) -> None:
    (m, n), a = shape, normal(*shape, dtype=dtype)
    A = Part(a, order)
    found = steps.copy_by_columns(A.array, extra)
    assert namespace(found) is namespace(A.array)
    assert found.shape == (m, n + extra)
    assert order == "S" or found.flags.f_contiguous
    np.testing.assert_array_equal(bits(np.array(to_host(found))[:, :n]), bits(a))
    found[...] = 0.0
    assert A.kept()


# ---- Cholesky -------------------------------------------------------------------------------------------------------

definite_matrix = functools.cache(positive)  # NumPy's threads rest while SciPy's work
factors = pytest.mark.parametrize(
    ("factor", "more"), [(steps.factor_definite, 0), (steps.factor_columns, 0), (steps.factor_columns, 9)]
)


def columns_outside(x: np.ndarray, a: np.ndarray, done: int) -> np.ndarray:
    """Boolean m x b: where A - L L' - R exceeds gamma_done (|L||L'| + |R|) (Higham, lemma 8.4), with two operations
    more as in `cholesky_outside`. The columns of x that are done are those of L, the others R, what is left of A."""
    (m, b), columns = x.shape, np.arange(x.shape[1])
    half = np.tril(x.astype(WIDE))
    L, R = half * (columns < done), half * (columns >= done)
    bound = gamma(done + 2, x.dtype) * (abs(L) @ abs(L[:b]).T + abs(R))
    outside: np.ndarray = ~(abs(a - L @ L[:b].T - R) <= bound) & below(m, b)
    return outside


@factors
@pytest.mark.parametrize("order", ONE)
@pytest.mark.parametrize("b", SIZES)
def test_columns_are_factored(b: int, order: str, factor: Any, more: int, dtype: Any) -> None:
    a = definite_matrix(b + more, dtype)[:, :b]
    X = Part(lower_half(a), order)
    assert factor(X.array) == 0
    assert not columns_outside(X.now, a, b).any()
    assert X.kept(but=below(*a.shape))


@factors
@pytest.mark.parametrize("order", ONE)
@pytest.mark.parametrize("at", [0, 63, 64, 90])
def test_the_minor_that_is_not_positive_is_reported(at: int, order: str, factor: Any, more: int, dtype: Any) -> None:
    a = definite_matrix(100 + more, dtype)[:, :100].copy()
    a[[at, 99], [at, 99]] = -3
    X = Part(lower_half(a), order)
    stopped = factor(X.array)
    assert stopped == linalg.get_lapack_funcs("potrf", (a,))(a[:100], lower=True)[1] == at + 1
    if factor is steps.factor_columns:
        assert not columns_outside(X.now, a, steps.factored(stopped, 100)).any()
    assert X.kept(but=below(*a.shape))


@pytest.mark.parametrize(
    ("stopped", "b", "done"), [(0, 0, 0), (0, 130, 130), (1, 5, 0), (64, 130, 0), (65, 130, 64), (129, 130, 128)]
)
def test_how_many_columns_are_finished(stopped: int, b: int, done: int) -> None:
    assert steps.factored(stopped, b) == done


@pytest.mark.parametrize("order", ONE)
@pytest.mark.parametrize("n", SIZES)
def test_zeros_above(n: int, order: str, dtype: Any) -> None:
    X = Part(lower_half(normal(n, n, dtype=dtype)), order)
    steps.clear_above(X.array)
    assert not bits(X.now)[~below(n, n)].any()
    assert X.kept(but=~below(n, n))
