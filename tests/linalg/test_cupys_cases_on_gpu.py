"""CuPy's own tests of lu_factor, lu_solve and solve, by their cases, with this package's functions in place of CuPy's.

The cases are those of tests/cupyx_tests/scipy_tests/linalg_tests/test_decomp_lu.py and
tests/cupy_tests/linalg_tests/test_solve.py of cupy/cupy. Where a function differs on purpose, what it documents is
asserted, under "Differences".
"""

import warnings

import numpy as np
import pytest
import scipy.linalg

with warnings.catch_warnings():  # what CuPy's modules say when they are imported is no matter of these tests
    warnings.simplefilter("ignore")
    cupy = pytest.importorskip("cupy")
    import cupyx.scipy.linalg as theirs

import abft_tsm2 as ours
from abft_tsm2.errors import UnverifiableWarning

pytestmark = pytest.mark.gpu

SHAPES = [(1, 1), (2, 2), (3, 3), (5, 5), (1, 5), (5, 1), (2, 5), (5, 2)]
LARGER = [(130, 130), (300, 130), (130, 300)]  # beyond CuPy's: more than one panel
DTYPES = ["float32", "float64"]
COMPLEX = ["complex64", "complex128"]
MODES = ["auto", "online", "offline"]
SYSTEMS = [((4, 4), (4,)), ((5, 5), (5, 2)), ((300, 300), (300, 7))]
STACKS = [((2, 4, 4), (2, 4, 1)), ((2, 5, 5), (2, 5, 2)), ((2, 3, 2, 2), (2, 3, 2, 1)), ((2, 3, 3, 3), (2, 3, 3, 2))]


def random(shape, dtype, seed=0, scale=10.0):
    """Uniform between 0 and scale, as cupy.testing.shaped_random has it."""
    return (np.random.default_rng([seed, *shape]).random(shape) * scale).astype(dtype)


def on_card(x, order="C"):
    return cupy.asarray(np.asarray(x, order=order), order=order)


def lapack(a):
    lu, piv, _ = scipy.linalg.get_lapack_funcs("getrf", (a,))(a)
    return lu, piv


def parts(lu, piv):
    """L, U in float64 and the rows of P A."""
    m, n = lu.shape
    k, wide = min(m, n), lu.astype(np.float64)
    rows = np.arange(m)
    for i, p in enumerate(piv):
        rows[[i, p]] = rows[[p, i]]
    return np.tril(wide[:, :k], -1) + np.eye(m, k), np.triu(wide[:k]), rows


def require_reconstruction(a, lu, piv):
    m, n = a.shape
    assert lu.shape == (m, n)
    assert piv.shape == (min(m, n),)
    L, U, rows = parts(lu, piv)
    bound = 4 * max(m, n) * np.finfo(a.dtype).eps * (np.abs(L) @ np.abs(U)).max() + np.finfo(a.dtype).tiny
    assert np.abs(L @ U - a[rows]).max() <= bound


def require_solution(a, x, b, trans=0):
    """A small residual, and close to what SciPy finds in float64, as far as the condition lets it."""
    wide = a.astype(np.float64).swapaxes(-1, -2) if trans else a.astype(np.float64)
    column = b[..., None] if b.ndim == 1 else b
    found, eps = x[..., None] if b.ndim == 1 else x, np.finfo(x.dtype).eps
    expected = np.linalg.solve(wide, column.astype(np.float64))
    size = np.abs(wide).sum(-1).max() * np.abs(expected).max() + np.abs(column).max()
    assert x.shape == expected.shape[:-1] if b.ndim == 1 else x.shape == expected.shape
    assert np.abs(wide @ found - column).max() <= 50 * a.shape[-1] * eps * size
    far = np.max(np.linalg.cond(wide)) * eps * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=50 * far)


def same_array(x, before):
    np.testing.assert_array_equal(cupy.asnumpy(x), before)


# ---- TestLUFactor ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGER], ids=str)
def test_lu_factor(shape, order, mode, dtype):
    a = random(shape, dtype)
    a_gpu = on_card(a, order)
    found = ours.protected_lu_factor(a_gpu, mode=mode)
    assert isinstance(found, tuple)
    assert len(found) == 2
    assert all(isinstance(x, cupy.ndarray) for x in found)
    lu, piv = (cupy.asnumpy(x) for x in found)
    for expected in (lapack(a), tuple(cupy.asnumpy(x) for x in theirs.lu_factor(a_gpu))):
        assert (lu.dtype, piv.dtype) == (expected[0].dtype, expected[1].dtype)
        if max(shape) <= 5 or dtype == "float64":  # else candidates may be equal but for rounding
            np.testing.assert_array_equal(piv, expected[1])
        if max(shape) <= 5:  # as CuPy's tests have it; beyond that rounding differs by more, and the product decides
            close = 1e-5 if dtype == "float64" else 1e-4
            np.testing.assert_allclose(lu, expected[0], rtol=close, atol=close)
    require_reconstruction(a, lu, piv)
    assert np.abs(np.tril(lu, -1)).max() <= 1 + 4 * np.finfo(dtype).eps
    same_array(a_gpu, a)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] == shape[1]], ids=str)
def test_lu_factor_of_a_singular_matrix(shape, mode, dtype):
    a = random(shape, dtype)
    a -= a.mean(axis=0, keepdims=True)
    a -= a.mean(axis=1, keepdims=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # LinAlgWarning is one, as CuPy's is
        lu, piv = ours.protected_lu_factor(on_card(a), mode=mode)
    require_reconstruction(a, cupy.asnumpy(lu), cupy.asnumpy(piv))


def test_a_pivot_that_is_zero_is_warned_of():
    with pytest.warns(RuntimeWarning, match="Diagonal number 2 is exactly zero. Singular matrix."):
        theirs.lu_factor(on_card(np.array([[1.0, 2.0], [2.0, 4.0]])))
    with pytest.warns(RuntimeWarning, match="Diagonal number 2 is exactly zero. Singular matrix."):
        ours.protected_lu_factor(on_card(np.array([[1.0, 2.0], [2.0, 4.0]])))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, dtype) for shape in SHAPES for dtype in DTYPES), *((shape, "float64") for shape in LARGER)],
    ids=str,
)
def test_factors_are_those_that_lu_splits(shape, dtype):
    """TestLU: P L U, and P L with permute_l, of cupyx.scipy.linalg.lu, from what lu_factor returns."""
    a = random(shape, dtype)
    lu, piv = (cupy.asnumpy(x) for x in ours.protected_lu_factor(on_card(a)))
    L, U, rows = parts(lu, piv)
    P = np.eye(shape[0])[:, rows]
    found = [cupy.asnumpy(x) for x in theirs.lu(on_card(a))]
    np.testing.assert_array_equal(P, found[0])
    close = 1e-5 if dtype == "float64" else 1e-3
    for x, expected in zip((L, U), found[1:], strict=True):
        assert x.shape == expected.shape
        np.testing.assert_allclose(x, expected, rtol=close, atol=close)
    np.testing.assert_allclose(P @ L @ U, a, atol=close)
    np.testing.assert_allclose((P @ L) @ U, a, atol=close)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_lu_factor_refuses_what_is_not_finite(value, mode):
    a = random((5, 5), "float64")
    a[3, 1] = value
    for call in (theirs.lu_factor, lambda x: ours.protected_lu_factor(x, mode=mode)):
        with pytest.raises(ValueError, match="array must not contain infs or NaNs"):
            call(on_card(a))


@pytest.mark.parametrize("shape", [(), (4,)], ids=str)
def test_lu_factor_takes_no_vector(shape):
    for call in (theirs.lu_factor, ours.protected_lu_factor):
        with pytest.raises(ValueError, match=r"\w"):  # LinAlgError is one; each in its words
            call(cupy.ones(shape))


@pytest.mark.parametrize("order", ["C", "F"])
def test_overwrite_a_is_accepted(order):
    a = random((130, 130), "float64")
    lu, piv = ours.protected_lu_factor(on_card(a, order), True)
    require_reconstruction(a, cupy.asnumpy(lu), cupy.asnumpy(piv))


# ---- TestLUSolve -----------------------------------------------------------------------------------------------------

FACTORED = {"ours": ours.protected_lu_factor, "CuPy's": theirs.lu_factor}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", FACTORED)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("trans", [0, 1, 2])
@pytest.mark.parametrize("shapes", SYSTEMS, ids=str)
def test_lu_solve(shapes, trans, order, by, dtype):
    a, b = random(shapes[0], dtype), random(shapes[1], dtype, seed=1)
    factors, b_gpu = FACTORED[by](on_card(a, order)), on_card(b, order)
    x = ours.protected_lu_solve(factors, b_gpu, trans=trans)
    assert isinstance(x, cupy.ndarray)
    assert x.dtype == dtype
    require_solution(a, cupy.asnumpy(x), b, trans)
    expected = scipy.linalg.lu_solve(scipy.linalg.lu_factor(a), b, trans=trans)
    assert (x.dtype, x.shape) == (expected.dtype, expected.shape)
    same_array(b_gpu, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans", [0, 1, 2])
@pytest.mark.parametrize("shapes", SYSTEMS, ids=str)
def test_cupy_solves_with_our_factors(shapes, trans, dtype):
    """Columns of our lu may lie further apart than its rows are many."""
    a, b = random(shapes[0], dtype), random(shapes[1], dtype, seed=1)
    x = theirs.lu_solve(ours.protected_lu_factor(on_card(a)), on_card(b), trans=trans)
    require_solution(a, cupy.asnumpy(x), b, trans)


@pytest.mark.parametrize("overwrite", [False, True])
def test_overwrite_b_is_accepted(overwrite):
    a, b = random((5, 5), "float64"), random((5, 2), "float64", seed=1)
    x = ours.protected_lu_solve(ours.protected_lu_factor(on_card(a)), on_card(b, "F"), 0, overwrite)
    require_solution(a, cupy.asnumpy(x), b)


@pytest.mark.parametrize("shape", [(4,), (4, 2), (6, 5)], ids=str)
def test_lu_solve_refuses_shapes_that_do_not_fit(shape):
    factors, b = theirs.lu_factor(on_card(random((5, 5), "float64"))), cupy.ones(shape)
    for call in (theirs.lu_solve, ours.protected_lu_solve):
        with pytest.raises(ValueError, match=r"\w"):
            call(factors, b)


@pytest.mark.parametrize("shape", [(5, 4), (4, 5)], ids=str)
def test_lu_solve_refuses_factors_that_are_not_square(shape):
    factors, b = theirs.lu_factor(on_card(random(shape, "float64"))), cupy.ones(shape[0])
    for call in (theirs.lu_solve, ours.protected_lu_solve):
        with pytest.raises(ValueError, match=r"\w"):
            call(factors, b)


@pytest.mark.parametrize("trans", [3, -1])
def test_lu_solve_refuses_an_unknown_trans(trans):
    factors = theirs.lu_factor(on_card(random((5, 5), "float64")))
    for call in (theirs.lu_solve, ours.protected_lu_solve):
        with pytest.raises(ValueError, match="trans"):
            call(factors, cupy.ones(5), trans)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_lu_solve_refuses_what_is_not_finite(value):
    lu, piv = theirs.lu_factor(on_card(random((5, 5), "float64")))
    b = cupy.ones((5, 2))
    wrong_lu, wrong_b = lu.copy(), b.copy()
    wrong_lu[2, 1] = wrong_b[3, 1] = value
    for call in (theirs.lu_solve, ours.protected_lu_solve):
        for factors, sides in (((wrong_lu, piv), b), ((lu, piv), wrong_b)):
            with pytest.raises(ValueError, match="array must not contain infs or NaNs"):
                call(factors, sides)


# ---- TestSolve -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shapes", [*SYSTEMS, *STACKS], ids=str)
def test_solve(shapes, order, mode, dtype):
    a, b = random(shapes[0], dtype, scale=20), random(shapes[1], dtype, seed=1)
    a_gpu, b_gpu = on_card(a, order), on_card(b, order)
    x = ours.protected_solve(a_gpu, b_gpu, mode=mode)
    assert isinstance(x, cupy.ndarray)
    assert x.dtype == dtype
    require_solution(a, cupy.asnumpy(x), b)
    close = cupy.asnumpy(cupy.linalg.solve(a_gpu, b_gpu))
    assert (x.dtype, x.shape) == (close.dtype, close.shape)
    require_solution(a, close, b)  # the judge is fair to CuPy's, too
    same_array(a_gpu, a)
    same_array(b_gpu, b)


@pytest.mark.parametrize(
    ("a", "b"), [((2, 3), (4,)), ((3, 3), (2,)), ((3, 3), (2, 2)), ((3, 3, 4), (3,))], ids=str
)  # of CuPy's list, without (2, 3, 3) and (3,): see below
def test_solve_refuses_shapes_that_do_not_fit(a, b):
    for call in (cupy.linalg.solve, ours.protected_solve):
        with pytest.raises(ValueError, match=r"\w"):  # LinAlgError is one; each in its words
            call(cupy.asarray(random(a, "float64")), cupy.asarray(random(b, "float64")))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_solve_refuses_a_singular_matrix(dtype, mode):
    for a in ([[1, 2], [2, 4]], [[[1, 2], [2, 4]]]):
        with pytest.raises(np.linalg.LinAlgError):
            ours.protected_solve(on_card(np.array(a, dtype)), cupy.ones((2, 1), dtype), mode=mode)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_solve_refuses_what_is_not_finite(value):
    a, b = random((5, 5), "float64"), random((5, 2), "float64", seed=1)
    wrong_a, wrong_b = a.copy(), b.copy()
    wrong_a[2, 1] = wrong_b[3, 1] = value
    for matrix, sides in ((wrong_a, b), (a, wrong_b)):
        with pytest.raises(ValueError, match="array must not contain infs or NaNs"):
            ours.protected_solve(on_card(matrix), on_card(sides))


# ---- Differences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*COMPLEX, "int32", "int64", "bool"])
def test_complex_numbers_and_integers_are_refused(dtype):
    """CuPy: lu_factor and lu_solve take complex ones, and say NotImplementedError of integers; solve takes both."""
    a, b = on_card(np.eye(4).astype(dtype)), cupy.ones(4, dtype)
    factors = theirs.lu_factor(on_card(np.eye(4)))
    for call in (
        lambda: ours.protected_lu_factor(a),
        lambda: ours.protected_lu_solve((a, factors[1]), b),
        lambda: ours.protected_lu_solve(factors, b),
        lambda: ours.protected_solve(a, b),
    ):
        with pytest.raises(TypeError):
            call()


def test_float16_is_computed_in_float64():
    """CuPy: NotImplementedError of lu_factor."""
    a, b = random((5, 5), "float16", scale=1), random((5, 2), "float16", seed=1, scale=1)
    with pytest.raises(NotImplementedError):
        theirs.lu_factor(on_card(a))
    factors = lu, piv = ours.protected_lu_factor(on_card(a))
    assert lu.dtype == "float64"
    require_reconstruction(a.astype("float64"), cupy.asnumpy(lu), cupy.asnumpy(piv))
    assert ours.protected_lu_solve(factors, on_card(b)).dtype == "float64"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_stacks_are_factored_and_solved(mode, dtype):
    """CuPy: lu_factor and lu_solve take one matrix, and say LinAlgError of a stack."""
    a, b = random((2, 3, 5, 5), dtype), random((2, 3, 5, 2), dtype, seed=1)
    with pytest.raises(np.linalg.LinAlgError):
        theirs.lu_factor(on_card(a))
    factors = lu, piv = ours.protected_lu_factor(on_card(a), mode=mode)
    assert (lu.shape, piv.shape) == ((2, 3, 5, 5), (2, 3, 5))
    for at in np.ndindex(2, 3):
        np.testing.assert_array_equal(cupy.asnumpy(piv)[at], lapack(a[at])[1])
        require_reconstruction(a[at], cupy.asnumpy(lu)[at], cupy.asnumpy(piv)[at])
    require_solution(a, cupy.asnumpy(ours.protected_lu_solve(factors, on_card(b))), b)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)], ids=str)
def test_empty_matrices_have_empty_factors(shape):
    lu, piv = ours.protected_lu_factor(cupy.empty(shape))
    assert (lu.shape, piv.shape) == (shape, (0,))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_is_factored_unverified(mode):
    """CuPy: the same without a warning."""
    a = random((5, 5), "float64")
    a[3, 1] = np.nan
    with pytest.warns(UnverifiableWarning):
        lu, _ = ours.protected_lu_factor(on_card(a), check_finite=False, mode=mode)
    assert bool(cupy.isnan(lu).any())


def test_a_solution_with_a_zero_pivot_is_unverifiable():
    """CuPy: Inf or NaN without a warning. The factors themselves are finite, as SciPy's are."""
    with pytest.warns(scipy.linalg.LinAlgWarning):
        factors = ours.protected_lu_factor(on_card(np.array([[1.0, 2.0], [2.0, 4.0]])))
    assert bool(cupy.isfinite(factors[0]).all())
    with pytest.warns(UnverifiableWarning):
        x = ours.protected_lu_solve(factors, cupy.ones(2))
    assert not bool(cupy.isfinite(x).all())


def test_types_are_joined():
    """CuPy: the type of lu decides. This is SciPy's way."""
    a, b = random((5, 5), "float32"), random((5, 2), "float64", seed=1)
    factors = ours.protected_lu_factor(on_card(a))
    assert ours.protected_lu_solve(factors, on_card(b)).dtype == "float64"
    assert theirs.lu_solve(factors, on_card(b)).dtype == "float32"


@pytest.mark.parametrize("pivots", [[0, 1, 2, 3, 9], [0, 1, 2, -1, 4]])
def test_pivots_that_are_no_rows_are_refused(pivots):
    """CuPy: whatever cuSOLVER does with them."""
    lu, _ = theirs.lu_factor(on_card(random((5, 5), "float64")))
    with pytest.raises(ValueError, match="the numbers of rows"):
        ours.protected_lu_solve((lu, cupy.asarray(pivots, dtype=cupy.int32)), cupy.ones(5))


def test_arrays_of_two_libraries_are_refused():
    """CuPy: LinAlgError of a NumPy lu."""
    a = random((5, 5), "float64")
    with pytest.raises(TypeError):
        ours.protected_lu_solve(scipy.linalg.lu_factor(a), cupy.ones(5))
    with pytest.raises(TypeError):
        ours.protected_solve(on_card(a), np.ones(5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vector_is_one_right_hand_side_of_all_matrices(dtype):
    """As of NumPy 2 and SciPy: b of one dimension is a vector, of more a matrix or a stack of them. In CuPy it is
    a stack of vectors where it has one dimension less than a, and (2, 3, 3) with (3,) is an error."""
    a, b = random((2, 3, 3), dtype), random((3,), dtype, seed=1)
    x = ours.protected_solve(on_card(a), on_card(b))
    assert x.shape == (2, 3)
    for one, found in zip(a, cupy.asnumpy(x), strict=True):
        require_solution(one, found, b)
    for stack, sides in (((2, 4, 4), (2, 4)), ((2, 3, 2, 2), (2, 3, 2))):
        with pytest.raises(ValueError, match="incompatible shapes"):
            ours.protected_solve(on_card(random(stack, dtype)), on_card(random(sides, dtype)))
