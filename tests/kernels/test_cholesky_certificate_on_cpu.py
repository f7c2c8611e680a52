"""The kernels that certify a Cholesky factor, on the CPU: sums, bounds and verdicts of cholesky_checks.py; faults."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2.arrays import FLOATS
from abft_tsm2.checksum.bounds import DEFINITE, definite_bound
from abft_tsm2.linalg.cholesky_checks import CholeskyChecksums, SymmetricChecksums, base_weights, weighting
from abft_tsm2.linalg.device.cholesky_config import (
    AddTriangleParts,
    CopyTriangle,
    DefiniteSizes,
    DefiniteWeights,
    JudgeDefinite,
    TriangleSums,
    TriangleTiles,
)
from tests.support import cholesky_cases as cases
from tests.support.cholesky_cases import DTYPES, HALVES, MATRICES, Launch, OnKernels
from tests.support.cuda_on_cpu import ORDERS, KernelFault, Library
from tests.support.libraries import library_of, some, texts, with_faults

library = library_of(lambda: texts(cases.KERNELS))
sanitized = library_of(lambda: texts(cases.KERNELS), sanitize=True)
# Ragged in groups, warps and tiles of 64, 128 and 256; two and three tiles of rows.
SIZES = (1, 2, 7, 31, 64, 65, 127, 129, 257, 300, 520)
EPS = 2.0**-53


def launch_on(library: Library, order: str = "forward") -> Launch:
    def launch(name: str, grid: tuple[int, ...], threads: int, args: tuple[Any, ...]) -> None:
        library.run(name, grid, threads, args, order=order)

    return launch


@pytest.fixture
def on(library: Library) -> Callable[..., OnKernels]:
    return lambda a, dtype, **how: OnKernels(a, dtype, launch_on(library), **how)


def every_size() -> list[Any]:
    layouts = list(itertools.product(DTYPES, HALVES, HALVES))
    pairs = [(n, *layout) for i, n in enumerate(SIZES) for j, layout in enumerate(layouts) if n < 100 or (i + j) % 2]
    return pairs


# ---- sums, bounds, verdicts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "dtype", "lower", "turned"), every_size())
def test_sums_and_bounds_are_those_of_cholesky_checks(on: Any, n: int, dtype: str, lower: bool, turned: bool) -> None:
    run = on(MATRICES["normal"](n), dtype, lower=lower, turned=turned, cards=1 + n % 3)
    run.weights()
    half = np.array(run.A if lower else run.A.T)
    kept = SymmetricChecksums.of(half)
    ratio = run.w / kept.w
    assert (ratio == 2.0 ** np.rint(np.log2(ratio))).all()  # powers of two, of which there may be others
    kept.w[...] = run.w
    state = CholeskyChecksums(half, np.asfortranarray(np.tril(run.factor).astype(dtype)), kept)

    a = run.a.astype(float)
    sizes = abs(a) @ abs(run.w)
    Z = run.encode()
    assert (abs(Z[:n] - a @ run.w) <= 8 * EPS * np.sqrt(n) * sizes).all()
    assert np.allclose(Z[n:], (a * a) @ (run.w * run.w), rtol=1e-13, atol=0)

    g, L = run.read(), run.factor
    now, back = state.read(n)
    assert (abs(g - now) <= 8 * EPS * np.sqrt(n) * (abs(L).T @ abs(run.w))).all()
    Lg = run.read_again(now.copy())
    assert (abs(Lg[:n] - back) <= 8 * EPS * np.sqrt(n) * (abs(L) @ abs(now))).all()
    assert np.allclose(Lg[n:], (L * now) ** 2 @ run.operations, rtol=1e-13, atol=0)

    kept.Z[...] = Z[:n]
    kept.norms[...] = np.maximum(np.sqrt(Z[n:]), abs(Z[:n]))
    residuals, bounds = run.judge(Lg, Z)
    assert (residuals == Lg[:n] - Z[:n]).all()
    wanted = definite_bound(FLOATS[dtype], kept.norms, n, 2 * n, state.modulus)
    np.testing.assert_allclose(bounds, wanted, rtol=1e-13)
    assert {name: int(count[0]) for name, count in run.counts.items()} == run.full
    ratio = (abs(residuals) / bounds).astype(np.float32)
    assert run.closest.view(np.float32)[1] == ratio.max()
    assert ~int(run.closest[0]) & 0xFFFFFFFF == ratio.argmax()
    assert state.certificate(back).clean


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_remained_certifies_where_the_norms_of_a_do_not(on: Any, dtype: str) -> None:
    n = 70
    run = on(MATRICES["scattered"](n), dtype)
    run.weights()
    Z, g = run.encode(), run.read()
    Lg = run.read_again(g)
    kind, Z[:n] = FLOATS[dtype], 0.0  # differences from it are exact
    least = definite_bound(kind, np.sqrt(Z[n:]), n, 2 * n, float(np.sum(abs(run.w))))
    more = least + DEFINITE[dtype] * kind.unit_roundoff * np.sqrt((run.factor * g) ** 2 @ run.operations)
    for factor, right in ((0.999, n), (1.001, 0)):
        run.counts.clear()
        Lg[:n] = factor * more
        _, bounds = run.judge(Lg, Z)
        np.testing.assert_allclose(bounds, more, rtol=1e-12)
        assert run.counts["right"] == right


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MATRICES)
def test_factors_are_certified(on: Any, name: str, dtype: str) -> None:
    if name == "graded" and dtype == "float32":
        pytest.skip("a diagonal beyond the range of float32")
    for n, lower in ((3, True), (100, False), (400, True)):
        run = on(MATRICES[name](n), dtype, lower=lower, turned=n == 100)
        assert run.certify() == run.full


@pytest.mark.parametrize("n", [1, 2, 77, 1024, 2500])
def test_sizes_and_their_middle(on: Any, n: int) -> None:
    rng = np.random.default_rng(n)
    run = on(np.eye(2), "float64")
    run.n, run.w = n, rng.standard_normal(n)
    Z = np.concatenate([rng.standard_normal(n), np.exp(20 * rng.standard_normal(n))])
    Z[n // 3], Z[n + n // 3] = 0, 0  # a size of 0
    if n > 70:
        Z[40:60], Z[n + 40 : n + 60] = -0.5, 0.25  # equal ones
    sizes, summary = run.measure(Z)
    wanted = np.maximum(abs(Z[:n]), np.sqrt(Z[n:]))
    np.testing.assert_array_equal(sizes, wanted)
    np.testing.assert_allclose(summary, [abs(run.w).sum(), abs(run.w).min(), np.sort(wanted)[n // 2]], rtol=1e-14)
    Z[0] = np.nan
    assert np.isnan(run.measure(Z)[0][0])


def test_subnormal_numbers_are_not_zero(on: Any) -> None:
    a = MATRICES["normal"](40).astype(np.float32) * np.float32(2e-40)
    run = on(a, "float32")
    run.weights()
    Z = run.encode()
    assert (run.w > 1e18).any()
    np.testing.assert_allclose(Z[:40], a.astype(float) @ run.w, rtol=1e-9, atol=1e-12 * abs(Z[:40]).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_undo_the_diagonal(on: Any, dtype: str) -> None:
    ends = {"float64": (5e-324, 1e308), "float32": (1e-45, 3e38)}[dtype]
    d = np.array([1.0, 0.99, 4.0, 3.99, 0.0, -9.0, np.inf, np.nan, *ends, 2.0], dtype)
    run = on(np.eye(d.size), dtype)
    run.A[np.arange(d.size), np.arange(d.size)] = d
    run.weights()
    ratio = abs(run.w / run.base)
    roots = np.sqrt(abs(d.astype(float)))
    there = np.isfinite(roots) & (roots > 0)
    assert ((ratio * roots)[there] >= 0.5).all()
    assert ((ratio * roots)[there] < 1.0).all()
    assert (ratio[~there] == 1).all()


def test_base_weights_are_those_of_the_host() -> None:
    np.testing.assert_array_equal(weighting(np.ones(77)), base_weights(77))


def test_the_same_bits_in_every_order_of_threads(library: Library) -> None:
    found = []
    for order in ORDERS:
        run = OnKernels(MATRICES["normal"](300), "float64", launch_on(library, order), cards=2)
        run.weights()
        Z, g = run.encode(), run.read()
        Lg = run.read_again(g)
        found.append([x.tobytes() for x in (run.w, Z, g, Lg, *run.judge(Lg, Z), *run.counts.values())])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("lower", some(HALVES, 2))
def test_nothing_is_read_that_is_not_there(sanitized: Library, lower: bool) -> None:
    dtype = DTYPES[lower]
    run = OnKernels(MATRICES["normal"](67), dtype, launch_on(sanitized), lower=lower, turned=lower)
    assert run.certify() == run.full


# ---- planted faults --------------------------------------------------------------------------------------------------


def damaged(what: str, run: OnKernels) -> None:
    """Plant a fault into L; of an upper one into its transpose."""
    L = run.W[: run.n] if run.lower else run.W[: run.n].T
    if what == "an element":
        L[140, 30] += L[140, 140] * (1e-3 if run.dtype == "float32" else 1e-9)
    if what == "an element of the diagonal":
        L[77, 77] *= 1.001
    if what == "a sign of the diagonal":
        L[77, 77] *= -1
    if what == "signs of a column":
        L[:, 77] *= -1
    if what == "NaN":
        L[100, 3] = np.nan
    if what == "infinity":
        L[149, 149] = np.inf
    if what == "NaN on the diagonal":
        L[0, 0] = np.nan
    if what == "two elements exchanged":
        L[[90, 91], 20] = L[[91, 90], 20]
    if what == "zeros in a row":
        L[120, :60] = 0
    if what == "the last element":
        L[149, 149] *= 1.01


FAULTS = (
    *("an element", "an element of the diagonal", "a sign of the diagonal", "signs of a column", "NaN", "infinity"),
    *("NaN on the diagonal", "two elements exchanged", "zeros in a row", "the last element"),
)


@pytest.mark.parametrize(("what", "dtype", "lower"), list(itertools.product(FAULTS, DTYPES, HALVES)))
def test_a_fault_in_the_factor_is_found(on: Any, what: str, dtype: str, lower: bool) -> None:
    run = on(MATRICES["normal"](150), dtype, lower=lower)
    damaged(what, run)
    found = run.certify()
    name = "positive" if what == "signs of a column" else "right"
    assert found[name] < 150
    assert all(found[one] <= full for one, full in run.full.items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-12, 1e6])
def test_a_fault_in_a_small_line_is_found(on: Any, size: float, dtype: str) -> None:
    scale = np.where(np.arange(150) % 2, 1.0, size)
    run = on(scale[:, None] * MATRICES["normal"](150) * scale, dtype)
    run.W[100, 30] *= 1.01
    assert run.certify()["right"] < 150


@pytest.mark.parametrize("which", ["Z", "squares of Z", "Lg", "squares of Lg", "w"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sums_that_are_no_numbers_certify_nothing(on: Any, which: str, bad: float) -> None:
    n = 40
    run = on(MATRICES["normal"](n), "float64")
    run.weights()
    Z = run.encode()
    Lg = run.read_again(run.read())
    if which == "w":
        run.w[5] = bad
        Lg = run.read_again(run.read())
    if which == "squares of Lg":
        Lg[5] += 1.0  # or they are not asked for
    {"Z": Z, "squares of Z": Z[n:], "Lg": Lg, "squares of Lg": Lg[n:], "w": run.w}[which][5] = bad
    run.judge(Lg, Z)
    assert run.counts["right"] == (0 if which == "w" else n - 1)


# ---- the copy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", cases.COPIES, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("n", [1, 5, 64, 65, 150])
def test_triangles_are_copied_and_nothing_else(library: Library, kernel: CopyTriangle, n: int) -> None:
    rng = np.random.default_rng(n)
    half = np.tril if kernel.lower else np.triu
    inside = half(np.ones((n, n), bool), 0 if kernel.diagonal else -1 if kernel.lower else 1)
    for order in ("C", "F", "strided"):
        A = np.full((n, n), np.nan, kernel.dtype)
        A[inside] = rng.standard_normal(np.count_nonzero(inside))
        A = (
            np.asarray(A, order=order)
            if order != "strided"
            else np.repeat(np.repeat(A, 2, 0), 3, 1)[::2, ::-3][:, ::-1]
        )
        W = np.full((n, n + 2), 7, kernel.dtype).T
        finite = np.zeros(1, np.uint64)
        strides = [stride // A.itemsize for stride in A.strides]
        library.run(kernel.name, kernel.grid(n), kernel.threads, (A, *strides, n, W, n + 2, finite))
        wanted = np.full((n, n), 7, kernel.dtype)
        wanted[inside] = 0 if kernel.zero else A[inside]
        np.testing.assert_array_equal(W[:n], wanted)
        assert (W[n:] == 7).all()
        assert finite == kernel.full_count(n)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("kernel", [one for one in cases.COPIES if one.read], ids=lambda kernel: kernel.name)
def test_what_is_not_finite_is_counted(library: Library, kernel: CopyTriangle, bad: float) -> None:
    n = 150
    for i, j in ((0, 149), (70, 70), (64, 63), (149, 0)):
        A, W = np.ones((n, n), kernel.dtype), np.zeros((n, n), kernel.dtype, order="F")
        A[i, j] = bad
        finite = np.zeros(1, np.uint64)
        library.run(kernel.name, kernel.grid(n), kernel.threads, (A, n, 1, n, W, n, finite))
        seen = (i > j) == kernel.lower if i != j else kernel.diagonal
        assert finite == kernel.full_count(n) - seen


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_tiles_cover_every_matrix() -> None:
    for n in (1, 8, 9, 255, 257, 1000, 8192, 16384, 20001):
        for multiprocessors in (1, 20, 132):
            tiles = TriangleTiles.of(n, multiprocessors)
            width = -(-n // (8 * tiles.columns)) * 8  # as triangle_sums.cu has it
            assert width <= 128
            assert (tiles.columns - 1) * width < n <= tiles.columns * width
            assert (tiles.rows - 1) * 256 < n <= tiles.rows * 256


# ---- faults in the kernels: what tests find --------------------------------------------------------------------------

MATRIX, FACTOR, PRODUCT = (
    make("float64", True) for make in (TriangleSums.of_matrix, TriangleSums.of_factor, TriangleSums.of_product)
)
UPPER, ADD, JUDGE, WEIGHTS = (
    TriangleSums.of_product("float64", False),
    AddTriangleParts(),
    JudgeDefinite("float64"),
    DefiniteWeights("float64"),
)
MEASURE = DefiniteSizes()
COPY, OTHER = CopyTriangle("float64", True), CopyTriangle("float64", False, diagonal=False)
RACE, BARRIER = "race|uninitialised", "__syncthreads();"
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
PLANTED: dict[str, tuple[Any, str, int, str, str]] = {
    "sums_before_weights": (PRODUCT, f"{BARRIER}\n\n  // Element", 0, "//", RACE),
    "sums_of_warps_unfinished": (FACTOR, f"{BARRIER}\n  if constexpr (COLUMNS)", 0, "if constexpr (COLUMNS)", RACE),
    "the_diagonal_twice": (MATRIX, "ROWS && offset == j + q ? 0 :", 0, "", "Z"),
    "the_other_triangle": (MATRIX, "offset >= j + q", 0, "true", "Z"),
    "columns_that_warps_leave_out": (FACTOR, "offset_of_warp + 31 >= j", 0, "offset_of_warp >= j", "g"),
    "columns_that_warps_leave_out_above": (UPPER, "offset_of_warp < j + GROUP", 0, "offset_of_warp < j", "U g"),
    "operations_of_the_first": (PRODUCT, "operations_here += 1", 0, "operations_here += 0", "L g"),
    "tiles_outside": (FACTOR, "if (!outside)", 0, "", RACE),
    "parts_of_one_warp": (ADD, "other < WARPS", 0, "other < 1", "Z"),
    "parts_unfinished": (ADD, f"{BARRIER}\n  if (warp == 0", 0, "if (warp == 0", RACE),
    "norms_forgotten": (MEASURE, "larger(sqrt(Z[n + i]), fabs(Z[i]))", 0, "fabs(Z[i])", "bounds"),
    "signs_forgotten": (JUDGE, "exactly(L[i * (ld + 1)]) > 0", 0, "true", "signs"),
    "weights_of_no_power": (WEIGHTS, "1023 - e", 0, "1023 + e", "w"),
    "copy_unfinished": (COPY, f"{BARRIER}\n#pragma unroll", 0, "#pragma unroll", RACE),
    "copy_of_the_diagonal": (OTHER, "DIAGONAL - 1", 0, "0", "copy"),
}
faulty = library_of(lambda: texts(cases.KERNELS) + with_faults(PLANTED))


def found_by(launch: Launch) -> str:
    """What these kernels make of clean factors, compared with NumPy."""
    n = 300
    run = OnKernels(MATRICES["normal"](n), "float64", launch, cards=2)
    other = OnKernels(MATRICES["normal"](n), "float64", launch, lower=False, cards=2)
    for one in (run, other):
        one.weights()
        if not (abs(one.w * np.sqrt(np.diagonal(one.a))) < 1.6).all():
            return "w"
    a, L, w = run.a, run.factor, run.w
    Z = run.encode()
    if not (np.allclose(Z[:n], a @ w) and np.allclose(Z[n:], a * a @ (w * w))):
        return "Z"
    g = run.read()
    if not np.allclose(g, w @ L):
        return "g"
    Lg = run.read_again(g)
    for name, sums in (("L g", Lg), ("U g", other.read_again(g))):
        if not (np.allclose(sums[:n], L @ g) and np.allclose(sums[n:], (L * g) ** 2 @ run.operations)):
            return name
    Z[:n], Lg[:n] = 0, 0
    _, bounds = run.judge(Lg, Z)
    wanted = definite_bound(FLOATS["float64"], np.sqrt(Z[n:]), n, 2 * n, float(np.sum(abs(w))))
    if not np.allclose(bounds, wanted, rtol=1e-9, atol=0):
        return "bounds"
    run.W[9, 9] = -1
    run.counts.clear()
    run.judge(Lg, Z)
    if run.counts["positive"] != n - 1:
        return "signs"
    for kernel in (COPY, OTHER):
        A, W, finite = np.ones((n, n)), np.zeros((n, n), order="F"), np.zeros(1, np.uint64)
        launch(kernel.name, kernel.grid(n), kernel.threads, (A, n, 1, n, W, n, finite))
        if not np.array_equal(W, np.tril(A) if kernel is COPY else np.triu(A, 1)):
            return "copy"
    return "nothing"


@pytest.mark.parametrize("name", some(PLANTED, 3))
def test_faults_in_kernels_are_found(faulty: Library, name: str) -> None:
    kernel, *_, wanted = PLANTED[name]

    def launch(called: str, grid: tuple[int, ...], threads: int, args: tuple[Any, ...]) -> None:
        faulty.run(name if called == kernel.name else called, grid, threads, args, order="random")

    try:
        found = found_by(launch)
    except KernelFault as fault:
        found = str(fault)
    assert re.search(wanted, found), found


def test_nothing_is_found_where_no_fault_is(library: Library) -> None:
    assert found_by(launch_on(library, "random")) == "nothing"
