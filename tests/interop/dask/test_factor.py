"""Factorisations and solutions of Dask arrays: against SciPy, on hard matrices, and the graphs they are."""

import warnings
from collections import Counter

import dask
import dask.array as da
import numpy as np
import pytest
import scipy.linalg
from dask.order import order

import abft_tsm2 as ft
from abft_tsm2.errors import UnverifiableWarning
from abft_tsm2.faults.operands.matrices import FAMILIES
from abft_tsm2.interop import dask as on_dask
from abft_tsm2.interop.dask import graphs, panel, tiles
from abft_tsm2.report import Status
from tests.support.dask_factors import A48, CALLS, blocks_of, factored, same
from tests.support.factor_cases import backward_error, cholesky_outside, lu_outside, positive, unit
from tests.support.planting import normal

PANELS = ("one", "tournament")


@pytest.fixture(autouse=True)
def _in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


# ---- what is computed ---------------------------------------------------------------------------------------------

SHAPES = [(64, 64, 16), (60, 60, 16), (61, 61, 15), (70, 33, 16), (33, 70, 16), (70, 5, 16), (5, 70, 16), (40, 1, 8)]
SHAPES += [(1, 40, 8), (1, 1, 4), (20, 20, 64)]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("m", "n", "size"), SHAPES)
def test_a_panel_on_one_worker_has_the_pivots_of_scipy(m, n, size, dtype):
    a = normal(m, n, dtype=dtype)
    lu, piv, report = factored(a, size, panel="one")
    expected, pivots = scipy.linalg.lu_factor(a)
    assert (lu.dtype, piv.dtype, piv.shape) == (dtype, np.int32, pivots.shape)
    np.testing.assert_array_equal(piv, pivots)
    assert not lu_outside(lu, piv, a).any()
    np.testing.assert_allclose(lu, expected, rtol=0, atol=2000 * unit(dtype))
    assert report.status is Status.CLEAN
    assert (report.operation, report.m, report.k, report.n) == ("lu_factor", m, min(m, n), n)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("m", "n", "size"), SHAPES)
def test_a_tournament_gives_factors(m, n, size, dtype):
    a = normal(m, n, dtype=dtype)
    lu, piv, report = factored(a, size, panel="tournament")
    assert (piv.dtype, piv.shape) == (np.int32, (min(m, n),))
    assert (piv >= np.arange(len(piv))).all()
    assert not lu_outside(lu, piv, a).any()
    assert abs(np.tril(lu, -1)).max() < 8
    assert report.status is Status.CLEAN


@pytest.mark.parametrize("chunks", [((7, 20, 3, 30), (60,)), ((16, 16, 16, 12), (30, 30)), ((60,), (20, 20, 20)), 13])
def test_chunks_of_any_sizes(chunks):
    a = normal(60, 60)
    lu, piv = ft.protected_lu_factor(da.from_array(a, chunks=chunks))
    assert lu.chunks[0] == lu.chunks[1]
    assert sum(piv.chunks[0]) == 60
    np.testing.assert_array_equal(piv.compute(), scipy.linalg.lu_factor(a)[1])
    assert not lu_outside(lu.compute(), piv.compute(), a).any()


@pytest.mark.parametrize(
    ("chunks", "side"),
    [
        (((8, 8, 8), (8, 8, 8)), 8),
        (((8, 8, 8), (24,)), 8),
        (((8, 8, 8), (12, 12)), 8),
        (((24,), (12, 12)), 12),
        (((24,), (24,)), 24),
        (((3, 21), (16, 8)), 16),
        (((3, 21), (4, 20)), 20),
    ],
)
def test_squares(chunks, side):
    found = tiles.in_squares(da.zeros((24, 24), chunks=chunks))
    assert found.chunks == da.zeros((24, 24), chunks=side).chunks


@pytest.mark.parametrize("way", PANELS)
def test_zeros_on_the_diagonal(way):
    n = 32
    a = np.block([[np.zeros((n, n)), np.eye(n)], [np.eye(n), normal(n, n)]])
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((ValueError, np.linalg.LinAlgError)):  # Dask exchanges no rows of two blocks
            da.linalg.solve(blocks_of(a, n), blocks_of(a[0], n)).compute()
    lu, piv, report = factored(a, n, panel=way)
    assert not lu_outside(lu, piv, a).any()
    b = normal(2 * n)
    x = ft.protected_solve(blocks_of(a, n), b).compute()
    assert report.status is Status.CLEAN
    assert backward_error(a, x, b) <= 3 * unit(float)


EASY = ("normal", "uniform", "graded", "positive definite", "condition 1e10", "sparse", "toeplitz", "dominant")
HARD = (
    *("vander 0.1 3", "vander 0.99 1.01", "vander -1 1", "chebvand", "chebspec", "moler", "pascal", "binomial"),
    *("hilbert", "lotkin", "cauchy", "parter", "invhilb", "ipjfact", "rosser", "hankel", "fiedler", "prolate"),
    *("wilkinson", "forsythe", "lauchli", "frank", "redheff", "riemann", "gcdmat", "hadamard", "kahan", "condex"),
    *("gfpp", "orthog 2", "gaussian kernel", "nearly ones"),
)


@pytest.mark.parametrize("name", [*EASY, *HARD])
def test_solutions_are_as_good_as_those_of_scipy(name):
    n, number = 54, (*EASY, *HARD).index(name)
    dtype = (np.float64, np.float32)[number % 3 == 2]
    a, b = FAMILIES[name](n, np.random.default_rng(number), dtype), normal(n, 2, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.linalg.LinAlgWarning)
        least = backward_error(a, scipy.linalg.solve(a, b, assume_a="gen"), b)
    x, report = dask.compute(*ft.protected_solve(blocks_of(a, 18), b, return_report=True))
    assert report.status is Status.CLEAN, report
    assert backward_error(a, x, b) <= 3 * max(least, unit(dtype))
    if number % 2:
        y, report = dask.compute(*on_dask.protected_solve(blocks_of(a, 18), b, return_report=True, panel="tournament"))
        assert report.status is Status.CLEAN, report
        assert backward_error(a, y, b) <= 3 * max(least, unit(dtype))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(50,), (50, 1), (50, 7)])
@pytest.mark.parametrize("trans", [0, 1, 2])
def test_solutions_with_factors_of_scipy(shape, trans, dtype):
    a, b = normal(50, 50, dtype=dtype), normal(*shape, dtype=dtype)
    lu, piv = scipy.linalg.lu_factor(a)
    x = ft.protected_lu_solve((blocks_of(lu, 16), piv), b, trans)
    y, report = dask.compute(*ft.protected_lu_solve((lu, piv), da.from_array(b, chunks=4), trans, return_report=True))
    x = x.compute()
    assert (x.shape, x.dtype, y.shape, report.status) == (b.shape, dtype, b.shape, Status.CLEAN)
    for found in (x, y):
        assert backward_error(a.T if trans else a, found, b) <= 100 * unit(dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_solve_takes_everything_that_is_a_matrix(transposed):
    a, b = np.rint(9 * normal(40, 40)).astype(int), np.rint(9 * normal(40, 3)).astype(np.float32)
    x = ft.protected_solve(blocks_of(a, 16), da.from_array(b, chunks=(9, 2)), transposed=transposed)
    assert x.dtype == np.float64
    assert x.chunks == ((16, 16, 8), (2, 1))
    assert backward_error(a.T if transposed else a, x.compute(), b) <= 100 * unit(float)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("n", "size"), [(48, 16), (50, 16), (17, 32), (1, 1)])
@pytest.mark.parametrize("lower", [False, True])
def test_cholesky(n, size, lower, dtype):
    a = positive(n, dtype)
    kept = np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T
    read = np.where(kept, a, np.nan).astype(dtype)  # the other triangle is not
    c, report = dask.compute(*ft.protected_cholesky(blocks_of(read, size), lower, return_report=True))
    assert (c.dtype, report.status, report.operation) == (dtype, Status.CLEAN, "cholesky")
    assert not c[~kept].any()
    assert not cholesky_outside(c, a, lower).any()


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("minor", [3, 20, 45])
def test_cholesky_of_what_is_not_definite(minor, lower):
    a = positive(48)
    a[minor - 1, minor - 1] = -1
    with pytest.raises(np.linalg.LinAlgError) as expected:
        scipy.linalg.cholesky(a, lower=lower)
    with pytest.raises(np.linalg.LinAlgError) as found:
        ft.protected_cholesky(blocks_of(a, 16), lower).compute()
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("way", PANELS)
def test_a_singular_matrix(way):
    a = normal(48, 48)
    a[:, 20] = a[:, 40] = 0
    with pytest.warns(scipy.linalg.LinAlgWarning) as expected:
        scipy.linalg.lu_factor(a)
    with pytest.warns(scipy.linalg.LinAlgWarning) as found:
        lu, piv, report = factored(a, 16, panel=way)
    assert [str(one.message) for one in found] == [str(expected[0].message)]
    assert report.status is Status.CLEAN
    assert report.reasons[:1] == (str(expected[0].message),)
    assert not lu_outside(lu, piv, a).any()
    with pytest.raises(np.linalg.LinAlgError, match="A singular matrix detected"):
        on_dask.protected_solve(blocks_of(a, 16), a[0], panel=way).compute()


@pytest.mark.parametrize("name", ["ones", "magic", "one element", "zeros"])
def test_a_tournament_of_what_has_no_rank(name):
    a = FAMILIES[name](48, np.random.default_rng(0), np.float64) if name in FAMILIES else np.zeros((48, 48))
    with pytest.warns(scipy.linalg.LinAlgWarning) if name != "magic" else warnings.catch_warnings():
        warnings.simplefilter("always")
        lu, piv, report = factored(a, 16, panel="tournament")
    assert report.status is Status.CLEAN
    assert np.isfinite(lu).all()
    assert not lu_outside(lu, piv, a).any()


def test_multipliers_of_a_zero_pivot_are_refused():
    options = tiles.GraphOptions("test", "lu_factor")
    U, L = np.triu(normal(8, 8)), normal(5, 8, seed=1)
    U[3, 3] = 0.0
    X, report = tiles.solution(options, ("factor", 1, 0), panel.LOWER, U, L @ U, [])
    assert report.status is Status.CLEAN
    np.testing.assert_allclose(X @ U, L @ U, atol=1e-12)
    wrong = L @ U
    wrong[2, 3] += 1e-3
    _, report = tiles.solution(options, ("factor", 1, 0), panel.LOWER, U, wrong, [])
    assert report.status is Status.UNCORRECTABLE
    assert "tournament" in report.reasons[0]


def test_what_is_not_finite():
    a = normal(40, 40)
    a[30, 5] = np.nan
    for lazy in (ft.protected_lu_factor(blocks_of(a, 16))[0], ft.protected_solve(blocks_of(a, 16), a[0])):
        with pytest.raises(ValueError, match="array must not contain infs or NaNs"):
            lazy.compute()
    with pytest.raises(ValueError, match="array must not contain infs or NaNs"):
        ft.protected_cholesky(blocks_of(np.where(np.isnan(a), a, positive(40)), 16), lower=True).compute()
    with pytest.warns(UnverifiableWarning):
        (_, _), report = dask.compute(*ft.protected_lu_factor(blocks_of(a, 16), check_finite=False, return_report=True))
    assert report.status is Status.UNVERIFIABLE


def test_empty_ones():
    for shape in ((0, 0), (0, 5), (5, 0)):
        (lu, piv), report = dask.compute(*ft.protected_lu_factor(da.zeros(shape), return_report=True))
        assert (lu.shape, piv.shape, piv.dtype, report.status) == (shape, (0,), np.int32, Status.CLEAN)
    x, report = dask.compute(*ft.protected_solve(da.eye(4, chunks=2), np.ones((4, 0)), return_report=True))
    assert (x.shape, report.operation) == ((4, 0), "solve")
    assert ft.protected_cholesky(da.zeros((0, 0))).compute().shape == (0, 0)


SQUARE_MATRIX = da.ones((6, 6), chunks=2)
UNKNOWN = SQUARE_MATRIX[SQUARE_MATRIX.sum(axis=1) > 0]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda a: ft.protected_lu_factor(a, block=2), TypeError, "block=2 has no meaning"),
        (lambda a: ft.protected_lu_factor(a, preserve="host"), TypeError, "preserve='host' has no meaning"),
        (lambda a: ft.protected_lu_factor(a, mode="fast"), ValueError, "unknown mode"),
        (lambda a: on_dask.protected_lu_factor(a, panel="two"), ValueError, "unknown panel 'two'"),
        (lambda a: on_dask.protected_solve(a, a[0], panel="two"), ValueError, "unknown panel 'two'"),
        (lambda a: ft.protected_lu_factor(a[0]), ValueError, "a must be a matrix"),
        (lambda a: ft.protected_lu_factor(a.astype(complex)), TypeError, "complex"),
        (lambda a: ft.protected_lu_factor(UNKNOWN), ValueError, "compute_chunk_sizes"),
        (lambda a: ft.protected_lu_factor(a, on_error="hope"), ValueError, "unknown on_error"),
        (lambda a: ft.protected_lu_solve(a, a[0]), TypeError, "lu_and_piv"),
        (lambda a: ft.protected_lu_solve((a, np.arange(6)), a[:4]), ValueError, "incompatible"),
        (lambda a: ft.protected_lu_solve((a[:4], np.arange(6)), a), ValueError, "square"),
        (lambda a: ft.protected_lu_solve((a, np.arange(6)), a[0], trans=3), ValueError, "trans is 3"),
        (lambda a: ft.protected_lu_solve((a, np.arange(5)), a[0]), ValueError, "piv has shape"),
        (lambda a: ft.protected_lu_solve((a, da.arange(5)), a[0]), ValueError, "piv has shape"),
        (lambda a: ft.protected_solve(a, a[0], refine=True), TypeError, "refine=True has no meaning"),
        (lambda a: ft.protected_solve(a, a[0], assume_a="posi"), ValueError, "posi is not a recognized"),
        (lambda a: ft.protected_solve(a, dask.delayed(np.ones)(6)), TypeError, "b is a Delayed"),
        (lambda a: ft.protected_solve(a[:4], a[0]), ValueError, "Expected square matrix"),
        (lambda a: ft.protected_solve(a[0], a[0]), ValueError, "a must be a matrix"),
        (lambda a: ft.protected_solve(a, a[0, :4]), ValueError, "incompatible shapes"),
        (lambda a: ft.protected_cholesky(a[:4]), ValueError, "expected to be square"),
        (lambda a: ft.protected_cholesky(a, block=2), TypeError, "block=2 has no meaning"),
        (lambda a: ft.protected_cho_factor(a), TypeError, "protected_cholesky"),
    ],
)
def test_what_is_refused_at_once(call, error, match):
    with pytest.raises(error, match=match):
        call(SQUARE_MATRIX)


@pytest.mark.parametrize(
    ("call", "operand"),
    [
        (ft.protected_lu_factor, "a"),
        (ft.protected_cholesky, "a"),
        (lambda wrong: ft.protected_solve(wrong, da.ones(4, chunks=2)), "a"),
        (lambda wrong: ft.protected_solve(da.eye(4, chunks=2), wrong), "b"),
        (lambda wrong: ft.protected_lu_solve((wrong, da.arange(4, chunks=2)), da.ones(4, chunks=2)), "lu"),
        (lambda wrong: ft.protected_lu_solve((da.eye(4, chunks=2), wrong[:, 0]), da.ones(4, chunks=2)), "piv"),
    ],
)
@pytest.mark.parametrize("changed", [lambda x: x[:1], lambda x: x.astype(np.float16)])
def test_a_chunk_that_is_not_what_the_array_says_is_refused(call, operand, changed):
    wrong = da.map_blocks(changed, da.eye(4, chunks=2), chunks=((2, 2), (2, 2)), dtype=float, meta=np.empty((0, 0)))
    result = call(wrong)
    with pytest.raises(ValueError, match=f"{operand} has a chunk of shape .* where the Dask array says "):
        dask.compute(result)


@pytest.mark.parametrize(
    ("piv", "error"), [([0, 0, 2, 3], ValueError), ([0, 1, 2, 4], ValueError), ([0.5, 1, 2, 3], ValueError)]
)
def test_pivots_that_are_none_are_refused(piv, error):
    x = ft.protected_lu_solve((da.eye(4, chunks=2), da.from_array(np.array(piv), chunks=2)), np.ones(4))
    with pytest.raises(error, match="piv holds"):
        x.compute()


def test_pivots_of_another_type_are_refused():
    x = ft.protected_lu_solve((da.eye(4, chunks=2), da.ones(4, dtype=bool, chunks=2)), np.ones(4))
    with pytest.raises(TypeError, match="piv holds bool"):
        x.compute()


# ---- graphs -------------------------------------------------------------------------------------------------------

COUNTS = {"one": 4 + 6 + 14, "cholesky": 4 + 6 + 10, "lu_solve": 8 + 12}
COUNTS |= {"tournament": 7 + 5 + 3 + 1 + 6 + 6 + 14, "transposed": 20, "solve": 24 + 20 + 16 + 20 + 4}


@pytest.mark.parametrize("name", CALLS)
def test_each_task_runs_once_and_has_one_report(name, right, monkeypatch):
    result, report = right[name]
    assert report.status is Status.CLEAN
    runs, add = Counter(), tiles.TileTasks.add

    def counting(self, task, kind, at, *arguments):
        def counted(*given):
            runs[kind, at] += 1
            return task(*given)

        return add(self, counted, kind, at, *arguments)

    monkeypatch.setattr(tiles.TileTasks, "add", counting)
    with ft.monitor() as log:
        again, report = dask.compute(*CALLS[name](return_report=True))
    assert set(runs.values()) == {1}
    assert len({id(one) for one in report.products}) == len(report.products) == len(log)
    assert {one.index for one in report.products} == {one.index for one in log}
    assert len(report.products) == COUNTS.get(name, len(log))
    assert same(again, result)


def test_results_and_report_are_lazy():
    def never(x):
        raise AssertionError("computed")

    a = da.ones((8, 8), chunks=4).map_blocks(never, dtype=float, meta=np.ones((0, 0)))
    for call in (ft.protected_lu_factor, ft.protected_cholesky, lambda a, **o: ft.protected_solve(a, a[0], **o)):
        call(a, return_report=True)


def test_the_same_names_for_the_same_arrays():
    a = blocks_of(A48, 12)
    assert ft.protected_lu_factor(a)[0].name == ft.protected_lu_factor(a)[0].name
    names = {ft.protected_lu_factor(a, mode=mode)[0].name for mode in ("auto", "online", "offline")}
    assert len(names | {on_dask.protected_lu_factor(a, panel=way)[0].name for way in PANELS}) == 5


def kind_of(key):
    return key[0].partition("-protected")[0]


def test_the_next_panel_comes_before_the_rest_of_the_step():
    lu, piv = CALLS["one"]()
    graph = dask.base.collections_to_expr([lu, piv]).optimize().__dask_graph__()
    ranks = order(dict(graph))
    rank = {(kind_of(key), *key[1:]): n for key, n in ranks.items() if isinstance(key, tuple)}
    for j in (1, 2):
        rest = [rank["product", i, k, j - 1] for k in range(j + 1, 4) for i in range(j, 4)]
        assert rank["panel", j] < min(rest)


def test_a_panel_that_has_no_room_is_for_a_tournament(monkeypatch):
    def panels():
        lu, _ = ft.protected_lu_factor(blocks_of(A48, 12))
        kinds = map(kind_of, dict(lu.dask))
        return sorted(kind for kind in kinds if kind in ("panel", "champion"))

    assert panels() == ["panel"] * 4
    room = panel.COPIES * 24 * 12 * 8 / graphs.SHARE  # for a panel of two blocks
    monkeypatch.setattr(graphs, "smallest_worker", lambda: (room, 1))
    monkeypatch.setattr(graphs, "warn_of_large", lambda *_: None)
    assert panels() == ["champion"] * 2 + ["panel"] * 2
    monkeypatch.setattr(graphs, "smallest_worker", lambda: (0, 1))  # not known
    assert panels() == ["panel"] * 4
