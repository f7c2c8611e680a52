"""The kernels that certify finished factors, on the CPU: sums, bounds and verdicts of certify.py; planted faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2.arrays import FLOATS, to_host
from abft_tsm2.checksum.bounds import changed_bound, factored_bound
from abft_tsm2.linalg.certify import _norms_of, product_sums, tail_norms
from abft_tsm2.linalg.device.certificate_config import BEHIND, CertificateKernel, Tiles, full_counts
from abft_tsm2.linalg.device.check_config import initial_state
from abft_tsm2.linalg.lu_checks import ROWS, Sight
from tests.support import certificate_cases as cases
from tests.support.certificate_cases import Factors, Launch, OnKernels, factors
from tests.support.cuda_on_cpu import ORDERS, KernelFault, Library
from tests.support.libraries import library_of, some, texts, with_faults

DTYPES = ("float64", "float32")
library = library_of(lambda: texts(cases.KERNELS))
sanitized = library_of(lambda: texts(cases.KERNELS), sanitize=True)
# Tall and wide, ragged in tiles, loads, runs of 64 and panels; two tiles of 512 or 1024 rows, and of many columns.
SHAPES = [(1, 1), (7, 5), (5, 9), (64, 64), (130, 131), (257, 129), (131, 290), (1037, 20), (33, 150)]
EPS = 2.0**-53


def launch_on(library: Library, order: str = "forward") -> Launch:
    def launch(name: str, grid: tuple[int, ...], threads: int, args: tuple[Any, ...]) -> None:
        library.run(name, grid, threads, args, order=order)

    return launch


@pytest.fixture
def on(library: Library) -> Callable[[Factors], OnKernels]:
    return lambda of: OnKernels(of, launch_on(library))


@pytest.mark.parametrize(
    ("shape", "dtype", "scaled"),
    [(shape, dtype, (i + j) % 2 > 0) for i, shape in enumerate(SHAPES) for j, dtype in enumerate(DTYPES)],
)
def test_sums_bounds_and_counts_are_those_of_certify(on: Any, shape: tuple[int, int], dtype: str, scaled: bool) -> None:
    of = factors(*shape, dtype, multiprocessors=1 + 3 * (shape[1] % 2), scaled=scaled)
    run, carried = on(of), of.carried
    w, v, g, y = carried.w, carried.v, carried.g, carried.y
    L, U = abs(of.lower), abs(of.upper)
    wL, Uv, largest = run.read()
    assert (abs(wL - g) <= 8 * EPS * np.sqrt(shape[0]) * (abs(w) @ L)).all()
    assert (abs(Uv - y) <= 8 * EPS * np.sqrt(shape[1]) * (U @ abs(v))).all()
    assert (largest == np.max(abs(np.tril(of.lower, -1)), axis=0)).all()

    run.count_growth(y.copy())
    assert np.allclose(run.state, [carried.growth, *carried.done], rtol=1e-13)

    gU, Ly = run.product_sums(g.copy(), y.copy())
    for found, wanted, sizes, terms in zip(
        (Ly, gU), product_sums(carried.W, carried), (L @ abs(y), abs(g) @ U), shape, strict=True
    ):
        assert (abs(found - wanted) <= 8 * EPS * np.sqrt(terms) * sizes).all()

    residuals, bounds = run.judge_factors(Ly, gU, largest)
    right = []
    for side, lines in enumerate(of.judged(Ly, gU)):
        count = shape[side]
        assert (residuals[side, :count] == lines.residual).all()
        assert np.allclose(bounds[side, :count], lines.bound, rtol=1e-12, atol=0)
        assert not residuals[side, count:].any()
        assert not bounds[side, count:].any()
        right.append(int(lines.ok.sum()))
    run.compare_sums(wL, g.copy(), Uv, y.copy())
    run.replay_pivots()
    run.see_all(bounds)
    assert tuple(run.verified) == (*right, *full_counts(*shape)[2:])
    assert scaled or right == list(shape)


def sums_of_some(run: OnKernels) -> bool:
    """Whether sums of some lines are those of certify.py: of the first panel, whose rows are not yet where they are at
    the end, and of all others."""
    W, orders, carried = run.of.W, run.orders, run.of.carried
    finished = W[: run.m].copy()
    W[128 : run.m, :128] = finished[np.argsort(orders[-1])[orders[1][128:]], :128]
    early = run.read(0, 128, np.array([128], np.int32))
    W[: run.m] = finished
    late = run.read(128)
    found = (np.concatenate([x[:128], z[128:]]) for x, z in zip(early, late, strict=True))
    wanted = carried.g, carried.y, np.max(abs(np.tril(run.of.lower, -1)), axis=0)
    return all(np.allclose(x, z, rtol=1e-9, atol=1e-9) for x, z in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(600, 200), (200, 600), (530, 530)], ids=str)
def test_sums_of_some_lines(on: Any, shape: tuple[int, int], dtype: str) -> None:
    assert sums_of_some(on(factors(*shape, dtype, multiprocessors=5)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (150, 140), (130, 290), (1037, 20)], ids=str)
def test_norms_certify_where_estimates_do_not(library: Library, shape: tuple[int, int], dtype: str) -> None:
    of = factors(*shape, dtype, seed=1, multiprocessors=2, scaled=True)
    run, carried = OnKernels(of, launch_on(library), norms=True), of.carried
    run.count_growth(carried.y.copy())
    gU, Ly = run.product_sums(carried.g.copy(), carried.y.copy())
    residuals, bounds = run.judge_factors(Ly, gU, np.zeros(min(shape)))
    assert tuple(run.verified[:2]) == shape
    for side, (sums, lines) in enumerate(zip((Ly, gU), of.judged(Ly[: shape[0]], gU[: shape[1]]), strict=True)):
        count = shape[side]
        norms = to_host(_norms_of(carried.W, carried, np.arange(count), side))
        assert np.allclose(np.sqrt(sums[count:]), norms, rtol=1e-12, atol=0)
        more = factored_bound(carried.type, norms, 0, 0.0)
        wanted = np.where(lines.ok, lines.bound, lines.bound + more)
        assert np.allclose(bounds[side, :count], wanted, rtol=1e-12, atol=0)
        assert (abs(residuals[side, :count]) < 0.5 * (lines.bound + more)).all()


def test_the_same_bits_in_every_order_of_threads(library: Library) -> None:
    of = factors(530, 70, "float64", multiprocessors=4)
    found = []
    for order in ORDERS:
        run = OnKernels(of, launch_on(library, order))
        g, y, largest = run.read()
        run.count_growth(y)
        gU, Ly = run.product_sums(g, y)
        judged = run.judge_factors(Ly, gU, largest)
        run.replay_pivots()
        found.append([x.tobytes() for x in (g, y, largest, gU, Ly, run.state, *judged, run.verified)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", some(DTYPES[::-1], 2))
def test_nothing_is_read_that_is_not_there(sanitized: Library, dtype: str) -> None:
    for m, n, norms in ((37, 21, True), (21, 37, False)):
        run = OnKernels(factors(m, n, dtype), launch_on(sanitized), norms=norms)
        assert tuple(run.certify()) == full_counts(m, n)


# ---- how large a difference passes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(140, 90), (90, 140), (600, 300)], ids=str)
def test_the_bounds_of_sums_that_were_kept(on: Any, shape: tuple[int, int]) -> None:
    of = factors(*shape, "float64", seed=1)
    carried, K = of.carried, min(shape)
    # what is kept as 0 has the norm that is guessed from others, and differences that are exact
    g, y = (np.where(np.arange(K) % 2, 0.0, x) for x in (carried.g, carried.y))
    pivots = abs(np.diagonal(of.W[: shape[0]])[:K])
    floor = np.where(np.arange(shape[1]) % 4 == 1, 1e3, 1.0) * carried.floor  # pivots are small there
    guessed = np.minimum(floor[:K] / pivots, tail_norms(carried.w)[:K])
    assert (guessed[1::4] < (floor[:K] / pivots)[1::4]).all()
    assert (guessed[3::4] < tail_norms(carried.w)[3:K:4]).any()
    columns = changed_bound(np.maximum(abs(g), guessed), shape[0])
    rows = changed_bound(np.maximum(abs(y), carried.rows[:K, ROWS.floor]), shape[1])
    margin = np.where(np.arange(K) % 2, 1e-9, 0.05)
    for factor, passing in ((1 - margin, K), (1 + margin, 0)):
        run = on(of)
        run.column_floor = floor
        run.compare_sums(g + factor * columns, g, y - factor * rows, y)
        assert (run.verified[[cases.SAME_COLUMNS, cases.SAME_ROWS]] == passing).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(140, 90), (90, 140), (300, 300)], ids=str)
def test_what_sums_see(on: Any, shape: tuple[int, int], dtype: str) -> None:
    of = factors(*shape, dtype, seed=2)
    carried, place = of.carried, of.carried.place
    bounds = [lines.bound for lines in of.judged(np.zeros(shape[0]), np.zeros(shape[1]))]
    sizes = [np.log2(np.max(abs(of.A), axis=axis).astype(float)) for axis in (1, 0)]
    sight = Sight.of(carried, (sizes[0][place], sizes[1]), (bounds[0], bounds[1]))
    assert not sight.lines(0).size
    assert not sight.lines(1).size
    margins = []
    for side in (0, 1):
        weight = sight.weights[1 - side]
        least = np.minimum(sight.allowed[side] + weight.min(), np.min(weight + sight.allowed[1 - side]))
        margins.append(np.min((least - sight.bounds[side])[bounds[side] > 0]))
    for shift, blind in ((1e-9, 0), (-1e-9, 1)):
        run = on(of)
        run.constants.reshape(3, -1)[:, BEHIND + 2] += shift - min(margins)  # the blind factor
        run.see_all(bounds_of(of))
        assert run.verified[cases.SEES_ALL] == sum(shape) - blind


def bounds_of(of: Factors) -> np.ndarray:
    """Those of the certificate, where nothing is beyond them."""
    found = np.full((2, max(of.A.shape)), np.nan)
    for side, lines in enumerate(of.judged(*(np.zeros(size) for size in of.A.shape))):
        found[side, : of.A.shape[side]] = lines.bound
    return found


# ---- planted faults: the count that shows each -----------------------------------------------------------------------


def damaged(what: str, run: OnKernels) -> None:
    """Plant a fault into what a certificate is about to read."""
    W, m = run.of.W, run.m
    if what == "an element of U":
        W[3, 40] += 0.5 * abs(W[3, 40]) + 1
    if what == "an element of L":
        W[m - 1, 7] = -W[m - 1, 7] + 0.25
    if what == "NaN in L":
        W[60, 5] = np.nan
    if what == "NaN in U":
        W[5, 60] = np.nan
    if what == "infinity on the diagonal":
        W[9, 9] = np.inf
    if what == "S":
        run.S[17] *= 1.01
    if what == "Z":
        run.Z[17] *= 1.01
    if what == "NaN in S":
        run.S[3] = np.nan
    if what == "NaN in Z":
        run.Z[3] = np.nan
    if what == "v":
        run.v[11] *= 1.5
    if what == "w":
        run.w[11] *= 1.5
    if what == "the order":
        run.orders[-1][[70, 71]] = run.orders[-1][[71, 70]]
    if what == "no row in the order":
        run.orders[-1][33] = m


WHERE = {  # fault: counts that are not full
    "an element of U": {cases.RIGHT_ROWS, cases.RIGHT_COLUMNS},
    "an element of L": {cases.RIGHT_ROWS, cases.RIGHT_COLUMNS},
    "NaN in L": {cases.RIGHT_ROWS, cases.RIGHT_COLUMNS, cases.SMALL_MULTIPLIERS, cases.SAME_COLUMNS},
    "NaN in U": {cases.RIGHT_ROWS, cases.RIGHT_COLUMNS, cases.SAME_ROWS},
    "infinity on the diagonal": {cases.RIGHT_ROWS, cases.RIGHT_COLUMNS, cases.SAME_ROWS},
    "S": {cases.RIGHT_ROWS},
    "Z": {cases.RIGHT_COLUMNS},
    "NaN in S": {cases.RIGHT_ROWS},
    "NaN in Z": {cases.RIGHT_COLUMNS},
    "v": {cases.RIGHT_ROWS},
    "w": {cases.RIGHT_COLUMNS},
    "the order": {cases.RIGHT_ROWS, cases.RIGHT_COLUMNS, cases.RIGHT_PANELS},
    "no row in the order": {cases.RIGHT_ROWS, cases.RIGHT_COLUMNS, cases.RIGHT_PANELS},
}


@pytest.mark.parametrize(
    ("what", "dtype", "norms"), [(what, DTYPES[i % 2], i % 4 > 1) for i, what in enumerate([*WHERE, *WHERE])]
)
def test_a_fault_shows_where_it_is_looked_for(library: Library, what: str, dtype: str, norms: bool) -> None:
    run = OnKernels(factors(150, 140, dtype, seed=3), launch_on(library), norms=norms)
    damaged(what, run)
    found, full = run.certify(), full_counts(150, 140)
    assert WHERE[what] <= {i for i in range(len(full)) if found[i] != full[i]}, found
    assert all(x <= y for x, y in zip(found, full, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_changed_since_its_sums_were_kept(on: Any, dtype: str) -> None:
    of = factors(150, 140, dtype, seed=4)
    run, g, y = on(of), of.carried.g.copy(), of.carried.y.copy()
    of.W[100, 20] += 0.5
    of.W[20, 100] *= 1.5
    g[30] *= 1.001
    y[31] = np.nan
    wL, Uv, _ = run.read()
    run.compare_sums(wL, g, Uv, y)
    assert run.verified[cases.SAME_COLUMNS] == 138
    assert run.verified[cases.SAME_ROWS] == 138
    assert {i: int(x) for i, x in enumerate(run.differs) if x} == {20: 3, 30: 2, 31: 1}


@pytest.mark.parametrize("size", [1.5, -1.0 - 2.0**-20, np.inf, np.nan])
def test_large_multipliers_are_counted(on: Any, size: float) -> None:
    of = factors(600, 40, "float32")
    run = on(of)
    of.W[555, 30] = size
    largest = run.read()[2]
    assert np.isinf(largest[30]) if not np.isfinite(size) else largest[30] == abs(size)
    run.judge_factors(np.zeros(600), np.zeros(40), largest)
    assert run.verified[cases.SMALL_MULTIPLIERS] == 39


@pytest.mark.parametrize("weight", ["w", "v"])
def test_a_small_weight_hides_elements(on: Any, weight: str) -> None:
    run = on(factors(140, 150, "float64", seed=5))
    getattr(run, weight)[77] *= 1e-12
    run.see_all(bounds_of(run.of))
    assert run.verified[cases.SEES_ALL] == {"w": run.m, "v": run.n}[weight]


@pytest.mark.parametrize(("kept", "seen"), [("w", 70), ("v", 80), ("row_largest", 69), ("column_largest", 79)])
def test_nan_sees_nothing(on: Any, kept: str, seen: int) -> None:
    run = on(factors(70, 80, "float64", seed=6))
    getattr(run, kept)[-1] = np.nan
    run.see_all(bounds_of(run.of))
    assert run.verified[cases.SEES_ALL] == seen


@pytest.mark.parametrize("place", [(0, 3), (0, 139), (1, 0), (1, 129)])
@pytest.mark.parametrize("bound", [np.nan, np.inf])
def test_a_bound_that_is_no_number_sees_nothing(on: Any, place: tuple[int, int], bound: float) -> None:
    run = on(factors(140, 130, "float32", seed=6))
    bounds = np.full((2, 140), 1e-30)
    for blind in (0, 1):
        run.verified[:] = 0
        run.see_all(bounds)
        assert run.verified[cases.SEES_ALL] == 270 - blind
        bounds[place] = bound


def test_growth_that_is_no_number_certifies_nothing(on: Any) -> None:
    run = on(factors(130, 130, "float64", seed=7))
    y = run.of.carried.y.copy()
    y[:40] = np.nan
    run.count_growth(y)
    assert not np.isfinite(run.state[1:]).any()
    zeros = np.zeros(130)
    run.judge_factors(run.S[run.of.order], run.Z.copy(), zeros)
    assert not run.verified[: cases.SMALL_MULTIPLIERS].any()


# ---- pivots ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (127, 300), (300, 127), (257, 257), (700, 256)], ids=str)
def test_exchanges_of_any_panels_agree(on: Any, shape: tuple[int, int]) -> None:
    m, K = shape[0], min(shape)
    run = on(factors(*shape, "float64"))
    rng = np.random.default_rng(8)
    for pivots in (
        run.pivots,
        np.arange(K),
        np.full(K, m - 1),
        rng.integers(np.arange(K), m),
        np.maximum(np.arange(K), rng.choice(m, 3)[rng.integers(0, 3, K)]),
    ):
        run.pivots = pivots.astype(np.int32)
        run.orders, run.verified[:] = cases.snapshots(run.pivots, m), 0
        run.replay_pivots()
        assert run.verified[cases.RIGHT_PANELS] == full_counts(*shape)[cases.RIGHT_PANELS]


@pytest.mark.parametrize("wrong", [-1, 0, 139, 400, 401, 2**31 - 1, -(2**31)])
def test_pivots_that_are_none_agree_with_nothing(on: Any, wrong: int) -> None:
    run = on(factors(400, 300, "float64"))
    run.pivots[140] = wrong  # in the second of three panels
    run.replay_pivots()
    assert run.verified[cases.RIGHT_PANELS] == 2


@pytest.mark.parametrize(("snapshot", "row"), [(0, 5), (1, 0), (1, 350), (2, 200), (3, 290), (3, 399)])
@pytest.mark.parametrize("change", ["exchanged", "twice", "out of range"])
def test_snapshots_that_are_not_of_the_pivots(on: Any, snapshot: int, row: int, change: str) -> None:
    run = on(factors(400, 300, "float64"))
    order = run.orders[snapshot]
    if change == "exchanged":
        order[[row, row - 1]] = order[[row - 1, row]]
    else:
        order[row] = order[row - 1] if change == "twice" else 400
    run.replay_pivots()
    assert run.verified[cases.RIGHT_PANELS] == {0: 2, 3: 2}.get(snapshot, 1)


def test_another_pivot_is_another_order(on: Any) -> None:
    run = on(factors(400, 300, "float64"))
    for at in range(0, 300, 7):
        run.pivots[at] = at if run.pivots[at] != at else at + 1
    run.replay_pivots()
    assert run.verified[cases.RIGHT_PANELS] == 0


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_cover_every_matrix(dtype: str) -> None:
    for m, n in ((1, 1), (9, 4100), (4100, 9), (2049, 1000), (16384, 16384), (777, 8191)):
        for multiprocessors in (1, 20, 132):
            tiles = Tiles.of(dtype, m, n, multiprocessors)
            width = -(-n // (8 * tiles.columns)) * 8  # as factor_sums.cu has it
            assert width <= 128
            assert (tiles.columns - 1) * width < n <= tiles.columns * width
            assert tiles.rows == -(-m // 512)
            assert (tiles.column_parts, tiles.row_parts) == (tiles.rows * n, tiles.columns * m)


def test_operations_begin_as_on_the_host() -> None:
    of = factors(20, 30, "float32")
    assert initial_state(FLOATS["float32"], 20, 30)[0] == 1.0
    carried = type(of.carried)(of.A, of.carried.encoding, of.W[:20])
    assert list(initial_state(FLOATS["float32"], 20, 30)[1:]) == carried.done


# ---- faults in the kernels: what tests find --------------------------------------------------------------------------

SUMS, ADD, GROWTH, JUDGE, COMPARE, REPLAY, LEAST, SEE = (CertificateKernel(routine) for routine in cases.ROUTINES)
RACE = "race|uninitialised"
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
BARRIER = "__syncthreads();"
PLANTED: dict[str, tuple[CertificateKernel, str, int, str, str]] = {
    "sums_before_weights": (SUMS, f"{BARRIER}\n\n  // Element", 0, "//", RACE),
    "sums_of_warps_unfinished": (
        SUMS,
        f"{BARRIER}\n  for (int j = threadIdx.x; j < columns",
        0,
        "for (int j = threadIdx.x; j < columns",
        RACE,
    ),
    "the_diagonal_in_L": (SUMS, "offset + i > j + q", 0, "offset + i >= j + q", "sums"),
    "the_diagonal_not_in_U": (SUMS, "offset + i <= j + q", 0, "offset + i < j + q", "sums"),
    "rows_that_are_not_there": (SUMS, "i < rows && offset + i > j", 0, "offset + i > j", "sums|uninitialised"),
    "columns_that_warps_leave_out": (SUMS, "offset_of_warp + 32 * V - 1 > j", 0, "offset_of_warp > j", "sums"),
    "the_diagonal_left_out": (ADD, "!of_columns && line < K", 0, "false", "sums"),
    "parts_of_one_warp": (ADD, "other < WARPS", 0, "other < 1", "sums"),
    "parts_unfinished": (ADD, f"{BARRIER}\n  if (warp > 0", 0, "if (warp > 0", RACE),
    "growth_of_others": (GROWTH, "is_middle(ratios + warp * RUN", 0, "is_middle(ratios", f"{RACE}|growth"),
    "growth_unfinished": (GROWTH, f"{BARRIER}\n    if (threadIdx.x == 0)", 0, "if (threadIdx.x == 0)", RACE),
    "growth_of_a_run_unfinished": (GROWTH, "__syncwarp();", 0, "", RACE),
    "terms_of_sums": (JUDGE, "constants[FLOOR_TERMS], then", 0, "double(K), then", "bounds"),
    "operations_of_rows": (JUDGE, "of_rows ? DONE_ROWS : DONE_COLUMNS", 0, "DONE_ROWS", "bounds"),
    "tails_of_the_block": (COMPARE, "sqrt(behind + ", 0, "sqrt(", "sums that were kept"),
    "tails_unfinished": (COMPARE, f"{BARRIER}\n    const double more", 0, "const double more", RACE),
    "pivots_of_any_place": (REPLAY, "place >= k + i &&", 0, "place >= 0 &&", "panels|overrun"),
    "exchanges_unfinished": (REPLAY, f"{BARRIER}\n\n  // the panel's rows", 0, "//", RACE),
    "weights_of_one_side": (SEE, "least + (of_rows ? LEASTS : 0)", 0, "least", "sight"),
    "sizes_of_one_side": (LEAST, "least_of(v, column_largest, n", 0, "least_of(w, row_largest, m", "sight"),
    "lines_before_others": (SUMS, "end_column <= first", 0, "end_column <= last", "sums|uninitialised"),
    "lines_behind_others": (SUMS, "tile_row >= last &&", 0, "tile_row >= first &&", "sums"),
    "parts_of_other_lines": (ADD, "p = from + warp", 0, "p = warp", "sums|uninitialised"),
    "the_order_of_the_end": (SUMS, "(*ends + PANEL - 1) / PANEL * m", 0, "2 * m", "sums"),
}


def planted_faults() -> Any:
    return texts(cases.KERNELS) + with_faults(PLANTED)


faulty = library_of(planted_faults)


def found_by(run: OnKernels) -> str:
    """What these kernels make of clean factors, compared with certify.py."""
    of, carried, (m, n) = run.of, run.of.carried, run.of.A.shape
    g, y, largest = run.read()
    if not sums_of_some(run):
        return "sums"
    gU, Ly = run.product_sums(carried.g.copy(), carried.y.copy())
    wanted = (carried.g, carried.y, *product_sums(carried.W, carried)[::-1])
    if not all(np.allclose(x, z, rtol=1e-9, atol=1e-9) for x, z in zip((g, y, gU, Ly), wanted, strict=True)):
        return "sums"
    run.count_growth(carried.y.copy())
    if not np.allclose(run.state[1:], carried.done, rtol=1e-9):
        return "growth"
    bounds = run.judge_factors(Ly, gU, largest)[1]
    lines = of.judged(Ly, gU)
    if not all(np.allclose(bounds[i, : (m, n)[i]], lines[i].bound, rtol=1e-9, atol=0) for i in (0, 1)):
        return "bounds"
    floor = carried.floor * 1e9
    run.column_floor = floor
    tails = tail_norms(carried.w)[: run.K]
    zeros, same = np.zeros(run.K), 0.999 * changed_bound(tails, m)
    run.compare_sums(same, zeros, carried.y.copy(), carried.y.copy())
    if run.verified[cases.SAME_COLUMNS] != run.K:
        return "sums that were kept"
    run.pivots[140] = 3
    run.replay_pivots()
    if run.verified[cases.RIGHT_PANELS] != full_counts(m, n)[cases.RIGHT_PANELS] - 1:
        return "panels"
    run.column_floor = carried.floor.copy()
    run.v *= 1e3
    bounds = bounds_of(of)
    bounds[0] *= 1e3
    run.see_all(bounds)
    return "nothing" if run.verified[cases.SEES_ALL] == m + n else "sight"


@pytest.mark.parametrize("name", some(PLANTED, 3))
def test_faults_in_kernels_are_found(faulty: Library, name: str) -> None:
    kernel, *_, wanted = PLANTED[name]

    def launch(called: str, grid: tuple[int, ...], threads: int, args: tuple[Any, ...]) -> None:
        faulty.run(name if called == kernel.name else called, grid, threads, args, order="random")

    try:
        found = found_by(OnKernels(factors(601, 290, "float64"), launch))
    except KernelFault as fault:
        found = str(fault)
    assert re.search(wanted, found), found


def test_nothing_is_found_where_no_fault_is(library: Library) -> None:
    assert found_by(OnKernels(factors(601, 290, "float64"), launch_on(library, "random"))) == "nothing"
