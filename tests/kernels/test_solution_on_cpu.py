"""The kernels that check solutions of linear systems, on the CPU: sums, weights, bounds and verdicts of triangular.py;
planted faults."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.linalg

from abft_tsm2.arrays import FLOATS
from abft_tsm2.core.blas import permutation
from abft_tsm2.linalg.device.check_config import ROOM, constants
from abft_tsm2.linalg.device.solution_config import (
    COUNTS,
    RIGHT_BACKWARD,
    RIGHT_EXCHANGES,
    RIGHT_PLACES,
    RIGHT_SOLUTION,
    SolutionKernel,
    part_sums,
)
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.triangular import (
    Triangle,
    Weighed,
    check_solution,
    check_substitution,
    modulus,
    square,
    summing_weights,
)
from tests.support.cuda_on_cpu import ORDERS, KernelFault
from tests.support.cuda_on_cpu.library import _Address
from tests.support.libraries import Libraries, library_of, some, texts, with_faults
from tests.support.planting import kept
from tests.support.solution_cases import KERNELS

DTYPES = ("float64", "float32")
NOTHING = _Address(0)
"""A null pointer."""
EPS = 2.0**-53
SIZES = [(1, 1), (5, 3), (33, 1), (130, 70), (257, 2), (521, 5)]
library = library_of(lambda: texts(KERNELS))
sanitized = library_of(lambda: texts(KERNELS), sanitize=True)


@dataclass
class Kernels:
    """Each method runs the kernel that it is named after."""

    library: Libraries
    dtype: str = "float64"
    order: str = "forward"
    replaced: str = ""

    def _run(self, kernel: SolutionKernel, grid: tuple[int, ...], *args: Any) -> None:
        name = self.replaced if kernel == PLANTED.get(self.replaced, (None,))[0] else kernel.name
        self.library.run(name, grid, kernel.threads, args, order=self.order)

    def _launch(self, routine: str, n: int, *args: Any, more: bool = False) -> None:
        kernel = SolutionKernel(
            routine, self.dtype if routine not in ("pivot_moves", "follow_moves") else "float64", more
        )
        if routine == "judge_solution":
            kernel = SolutionKernel(routine, more=more)
        self._run(kernel, kernel.launch(n).grid, *args)

    def order_of(self, piv: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Order, places and counts."""
        n, panels = piv.size, -(-piv.size // 128)
        moves, counts = np.full((panels, n), -1, np.int32), np.zeros(COUNTS, np.uint64)
        order, places = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
        self._launch("pivot_moves", n, piv, n, moves, counts)
        self._launch("follow_moves", n, moves, n, panels, order, places, counts)
        return order, places, counts

    def sum_weights(self, B: np.ndarray, base: np.ndarray) -> tuple[np.ndarray, float]:
        count, word = B.shape[1], {8: np.uint64, 4: np.uint32}[B.itemsize]
        sizes = np.max(np.abs(B).copy().view(word), axis=0)  # bits are ordered as moduli are
        logs, t, moduli = np.full(count, np.nan), np.full(count, np.nan), np.full(1, np.nan)
        self._launch("sum_weights", 1, sizes, kept(base), count, logs, t, moduli)
        return t, float(moduli[0])

    def weigh_rows(
        self, X: np.ndarray, t: np.ndarray, gather: Any = NOTHING, to: Any = NOTHING, scatter: Any = NOTHING
    ):
        n, count = X.shape
        sums, squares = np.full(n, np.nan), np.full(n, np.nan)
        steps = [stride // X.itemsize for stride in X.strides]
        ld = to.strides[1] // to.itemsize if isinstance(to, np.ndarray) else n
        self._launch("weigh_rows", n, X, *steps, n, count, gather, t, to, ld, scatter, sums, squares)
        return sums, squares

    def checked(
        self,
        M: np.ndarray,
        least: int,
        most: int,
        x: Any,
        given: Any,
        t: np.ndarray,
        *,
        multiprocessors: int = 2,
        by_rows: bool = True,
        unit: bool = False,
        more: Any = None,
        places: Any = NOTHING,
        reached: Any = NOTHING,
        count: int = RIGHT_BACKWARD,
    ) -> tuple[LineCheck, np.ndarray, int]:
        """Residuals, bounds and, as far as they are counted, right lines of ``M X = B`` by these sums; the last sums;
        how many lines were counted. M column-major, its rows beyond n not to be touched."""
        n, asks = M.shape[1], more is not None
        kernel = part_sums(self.dtype, by_rows=by_rows, more=asks)
        launch, tiles = kernel.tiled(n, multiprocessors)
        parts, last = np.full((2 + asks) * tiles * n, np.nan), np.full(n, np.nan)
        third = more if asks else NOTHING
        self._run(kernel, launch.grid, M, M.strides[1] // M.itemsize, n, least, most, *x, third, parts)
        residual, bound, counts = np.full(n, np.nan), np.full(n, np.nan), np.zeros(COUNTS, np.uint64)
        judged = parts, tiles, n, t.size, int(unit), *x, third, *given, places, reached, last
        tolerances = np.array([np.sum(np.abs(t))]), kept(constants(FLOATS[self.dtype]), ROOM)
        self._launch("judge_solution", n, *judged, *tolerances, residual, bound, counts, count, more=asks)
        return LineCheck.of(residual, bound), last, int(counts[count])


# ---- exchanges -------------------------------------------------------------------------------------------------------


def pivots(n: int, seed: int = 0) -> np.ndarray:
    """Some rows stay, some are exchanged near, some far, some with the last ones again and again."""
    rng = np.random.default_rng([seed, n])
    choices = [(i, int(rng.integers(i, min(n, i + 9))), int(rng.integers(i, n)), max(i, n - 2)) for i in range(n)]
    return np.array([choice[kind] for choice, kind in zip(choices, rng.integers(0, 4, n), strict=True)], np.int32)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 2, 127, 128, 129, 300, 700])
def test_the_order_is_that_of_the_exchanges_in_turn(library: Libraries, n: int, order: str) -> None:
    piv = pivots(n)
    found, places, counts = Kernels(library, order=order).order_of(piv)
    np.testing.assert_array_equal(found, permutation(piv, n))
    np.testing.assert_array_equal(places, np.argsort(found))
    assert counts.tolist()[:2] == [n, n]
    assert not counts[2:].any()


@pytest.mark.parametrize("pivot", [-1, 140, 299, -(2**31), 2**31 - 1])
def test_pivots_that_lapack_would_not_give_are_counted_out(library: Libraries, pivot: int) -> None:
    piv = pivots(299)
    piv[[141, 200]] = pivot
    found, _, counts = Kernels(library).order_of(piv)
    assert counts[RIGHT_EXCHANGES] == 297
    assert counts[RIGHT_PLACES] == 299
    assert sorted(found) == list(range(299))


def test_moves_that_name_no_row(library: Libraries) -> None:
    n, kernel = 200, SolutionKernel("follow_moves")
    moves, counts = np.tile(np.arange(n, dtype=np.int32), (2, 1)), np.zeros(COUNTS, np.uint64)
    moves[1, 5], moves[0, 7] = n, -1
    order, places = np.full(n, -1, np.int32), np.full(n, -1, np.int32)
    library.run(kernel.name, kernel.launch(n).grid, kernel.threads, (moves, n, 2, order, places, counts))
    assert counts[RIGHT_PLACES] == n - 2
    assert order[5] == order[7] == places[5] == places[7] == -1


# ---- weights, and sums of rows ---------------------------------------------------------------------------------------


def columns(n: int, count: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Right-hand sides of different sizes."""
    rng = np.random.default_rng([seed, n, count])
    return np.asfortranarray((rng.standard_normal((n, count)) * 10.0 ** rng.integers(-9, 9, count)).astype(dtype))


def base(count: int) -> np.ndarray:
    """What `summing_weights` scales."""
    return summing_weights(np.ones((1, count)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 64, 70, 700])
def test_weights_are_those_of_the_host(library: Libraries, count: int, dtype: str) -> None:
    B = columns(9, count, dtype)
    for special in ((), (0.0,), (0.0, np.nan, np.inf), (FLOATS[dtype].smallest_subnormal, FLOATS[dtype].largest)):
        if len(special) <= count:
            B[3, : len(special)] = special
            B[:3, : len(special)] = B[4:, : len(special)] = 0
            t, moduli = Kernels(library, dtype).sum_weights(B, base(count))
            np.testing.assert_array_equal(t, summing_weights(B))
            assert moduli == pytest.approx(np.sum(np.abs(t)), rel=1e-14)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_weights_where_no_column_is_a_number(library: Libraries, value: float) -> None:
    B = np.full((4, 3), value)
    np.testing.assert_array_equal(Kernels(library).sum_weights(B, base(3))[0], summing_weights(B))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "count"), SIZES)
def test_rows_are_summed_and_moved(library: Libraries, n: int, count: int, dtype: str) -> None:
    B, rng, kernels = columns(n, count, dtype), np.random.default_rng(n), Kernels(library, dtype)
    t, order = summing_weights(B), rng.permutation(n).astype(np.int32)
    for X in (B, np.ascontiguousarray(B), B[::-1]):
        wide = X.astype(float)
        to = np.full((n + 3, count), np.nan, dtype, order="F")
        sums, squares = kernels.weigh_rows(X, t, order, to)
        assert (abs(sums - (wide @ t)[order]) <= 4 * EPS * np.sqrt(count) * (abs(wide) @ abs(t))[order]).all()
        np.testing.assert_allclose(squares, ((wide * t) ** 2).sum(axis=1)[order], rtol=1e-13)
        assert (to[:n] == X[order]).all()
        assert np.isnan(to[n:]).all()
        again = np.full((n, count), np.nan, dtype, order="F")
        by_place, _ = kernels.weigh_rows(X, t, NOTHING, again, order)
        assert (by_place[order] == sums).all()
        assert (again[order] == X).all()


def test_a_row_that_the_order_does_not_name(library: Libraries) -> None:
    B, order = columns(40, 3, "float64"), np.arange(40, dtype=np.int32)
    order[[4, 39]] = -1, 40
    to = np.zeros((40, 3), order="F")
    sums, squares = Kernels(library).weigh_rows(B, summing_weights(B), order, to)
    assert np.flatnonzero(np.isnan(sums)).tolist() == np.flatnonzero(np.isnan(squares)).tolist() == [4, 39]
    assert not to[[4, 39]].any()


# ---- checks ----------------------------------------------------------------------------------------------------------


@dataclass
class System:
    """Factors in memory of more rows than they have, NaN in those; right-hand sides, and what substitution gives."""

    n: int
    count: int
    dtype: str
    seed: int = 0

    def __post_init__(self) -> None:
        rng, n = np.random.default_rng([self.seed, self.n, self.count]), self.n
        self.A = np.asfortranarray(rng.standard_normal((n, n)).astype(self.dtype))
        lu, piv = scipy.linalg.lu_factor(self.A)
        self.lu = np.full((n + 5, n), np.nan, self.dtype, order="F")
        self.lu[:n] = lu
        self.order = permutation(piv, n)
        self.B = columns(n, self.count, self.dtype, self.seed)
        self.t = summing_weights(self.B)
        self.Z = self.solved(lu, self.B[self.order], lower=True, unit=True)
        self.X = self.solved(lu, self.Z, lower=False, unit=False)

    @staticmethod
    def solved(T: np.ndarray, B: np.ndarray, *, lower: bool, unit: bool) -> np.ndarray:
        X = scipy.linalg.solve_triangular(T, B, lower=lower, unit_diagonal=unit, check_finite=False)
        return np.asfortranarray(X)

    def sums(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wide = X.astype(float)
        return wide @ self.t, wide**2 @ self.t**2


def agree(found: LineCheck, count: int, wanted: LineCheck, sizes: np.ndarray) -> None:
    """`sizes`: what rounding of the sums of a line is a multiple of."""
    assert (abs(found.residual - wanted.residual) <= 16 * EPS * sizes).all()
    np.testing.assert_allclose(found.bound, wanted.bound, rtol=1e-12)
    np.testing.assert_array_equal(found.ok, wanted.ok)
    assert count == int(found.ok.sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize(("n", "count"), SIZES)
def test_triangles_are_checked_as_on_the_host(
    library: Libraries, n: int, count: int, lower: bool, turned: bool, dtype: str
) -> None:
    of = System(n, count, dtype)
    lu = of.lu[:n]
    T = lu.T if turned else lu
    unit = lower != turned
    triangle = Triangle(T, lower, unit)
    X = of.solved(T, of.B, lower=lower, unit=unit)
    part = (0 if not unit else 1, n) if lower != turned else (-n, -int(unit))
    wide = np.abs(X.astype(float)) @ np.abs(of.t)
    sizes = triangle.times(wide, modulus) + np.abs(of.B.astype(float)) @ np.abs(of.t)
    for multiprocessors in (1, 40):
        how = {"by_rows": not turned, "unit": unit, "multiprocessors": multiprocessors}
        found, last, right = Kernels(library, dtype).checked(of.lu, *part, of.sums(X), of.sums(of.B), of.t, **how)
        agree(found, right, check_substitution(triangle, Weighed.of(X, of.t), Weighed.of(of.B, of.t)), sizes)
        np.testing.assert_allclose(last, triangle.times(of.sums(X)[1], square), rtol=1e-12)
        assert right == n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize(("n", "count"), SIZES)
def test_solutions_are_certified_as_on_the_host(library: Libraries, n: int, count: int, order: str, dtype: str) -> None:
    of, kernels = System(n, count, dtype, seed=1), Kernels(library, dtype)
    turned = order == "C"
    lu, A = (np.asfortranarray(M.T) if turned else M for M in (of.lu[:n], of.A))
    below, above = ((-n, -1), (0, n)) if turned else ((1, n), (-n, 0))
    x, z = of.sums(of.X), of.sums(of.Z)
    given = tuple(sums[of.order] for sums in of.sums(of.B))
    how = {"by_rows": not turned, "multiprocessors": 3}
    _, of_U, right = kernels.checked(lu, *above, x, z, of.t, **how)
    assert right == n
    _, of_L, right = kernels.checked(lu, *below, z, given, of.t, unit=True, more=of_U, **how)
    assert right == n
    factors = Triangle(of.lu[:n], True, True), Triangle(of.lu[:n], False, False)
    np.testing.assert_allclose(of_L, factors[0].times(factors[1].times(x[1], square), square), rtol=1e-12)
    places = np.argsort(of.order).astype(np.int32)
    how |= {"places": places, "reached": of_L, "count": RIGHT_SOLUTION}
    found, _, right = kernels.checked(A, -n, n, x, given, of.t, **how)
    wide = np.abs(of.A.astype(float)) @ (np.abs(of.X.astype(float)) @ np.abs(of.t))
    sizes = wide + np.abs(of.B.astype(float)) @ np.abs(of.t)
    agree(found, right, check_solution(of.A, factors, of.order, Weighed.of(of.X, of.t), Weighed.of(of.B, of.t)), sizes)
    places[3 % n] = -1
    assert kernels.checked(A, -n, n, x, given, of.t, **how)[2] == n - 1


FAULTS = {
    "an element of X": lambda of: of.X.__setitem__((77, 1), of.X[77, 1] + 1e-3 * abs(of.X).max()),
    "NaN in X": lambda of: of.X.__setitem__((77, 1), np.nan),
    "infinity in X": lambda of: of.X.__setitem__((0, 1), np.inf),
    "an element of U": lambda of: of.lu.__setitem__((5, 60), of.lu[5, 60] + 9),
    "NaN in U": lambda of: of.lu.__setitem__((5, 60), np.nan),
    "an element of Z": lambda of: of.Z.__setitem__((9, 0), of.Z[9, 0] * 2 + of.Z.max()),
}


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_faults_show_in_the_lines_that_they_show_in_on_the_host(library: Libraries, what: str, dtype: str) -> None:
    of = System(150, 4, dtype, seed=2)
    FAULTS[what](of)
    found, _, right = Kernels(library, dtype).checked(of.lu, -150, 0, of.sums(of.X), of.sums(of.Z), of.t)
    triangle = Triangle(of.lu[:150], False, False)
    with np.errstate(all="ignore"):
        size, wide = square(of.t), of.X.astype(float)
        reach = triangle.times(wide**2 @ size, square) + of.Z.astype(float) ** 2 @ size
        residual = triangle.times(wide @ of.t) - of.Z.astype(float) @ of.t
    wrong = ~np.isfinite(reach) | ~np.isfinite(residual) if "N" in what or "inf" in what else ~found.ok
    assert right == int(found.ok.sum()) < 150
    np.testing.assert_array_equal(~found.ok, wrong)
    if "element" in what:
        wanted = check_substitution(triangle, Weighed.of(of.X, of.t), Weighed.of(of.Z, of.t))
        np.testing.assert_array_equal(found.ok, wanted.ok)


def test_the_same_bits_in_every_order_of_threads(library: Libraries) -> None:
    of, found = System(300, 5, "float64"), []
    for order in ORDERS:
        kernels = Kernels(library, order=order)
        weighed = kernels.weigh_rows(of.X, of.t)
        down = kernels.checked(of.lu, -300, 0, of.sums(of.X), of.sums(of.Z), of.t)[0]
        along = kernels.checked(of.lu, -300, 0, of.sums(of.X), of.sums(of.Z), of.t, by_rows=False)[0]
        t = kernels.sum_weights(of.B, base(5))[0]
        found.append([x.tobytes() for x in (*weighed, down.residual, down.bound, along.residual, along.bound, t)])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", some(DTYPES, 2))
def test_nothing_is_read_that_is_not_there(sanitized: Libraries, dtype: str) -> None:
    of, kernels = System(37, 3, dtype), Kernels(sanitized, dtype)
    whole = np.asfortranarray(of.lu[:37])
    for part in ((1, 37), (-37, 0), (-37, 37)):
        for by_rows in (True, False):
            kernels.checked(whole, *part, of.sums(of.X), of.sums(of.Z), of.t, by_rows=by_rows, more=of.sums(of.X)[1])
    kernels.weigh_rows(of.X, of.t, of.order.astype(np.int32), np.zeros_like(of.X))
    kernels.order_of(pivots(37))


# ---- faults in the kernels: what tests find --------------------------------------------------------------------------

RACE = "race|uninitialised"
BARRIER = "__syncthreads();"
MOVES, FOLLOW, WEIGHTS, WEIGH, ROWS, ALONG, JUDGE = (
    SolutionKernel(routine)
    for routine in (
        *("pivot_moves", "follow_moves", "sum_weights", "weigh_rows", "part_rows", "part_columns", "judge_solution"),
    )
)
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
PLANTED: dict[str, tuple[SolutionKernel, str, int, str, str]] = {
    "slots_unfinished": (MOVES, f"{BARRIER}\n  if (t == 0)", 0, "if (t == 0)", RACE),
    "moves_unfinished": (MOVES, f"{BARRIER}\n  if (t < b) own_moves", 0, "if (t < b) own_moves", RACE),
    "twice_the_row": (MOVES, "pivot[first] != own", 0, "first < t", "order"),
    "panels_forward": (FOLLOW, "moves[p * n + row]", 0, "moves[(panels - 1 - p) * n + row]", "order"),
    "median_of_all": (WEIGHTS, "(number - 1) / 2) around", 0, "count / 2) around", "weights"),
    "logs_unfinished": (WEIGHTS, f"{BARRIER}  // logs", 0, "//", f"{RACE}|nothing"),
    "warps_unfinished": (WEIGH, f"{BARRIER}\n  if (warp > 0", 0, "if (warp > 0", RACE),
    "sums_of_one_warp": (WEIGH, "other < WARPS", 0, "other < 1", "rows"),
    "vectors_unfinished": (ROWS, f"{BARRIER}\n\n", 0, "\n\n", RACE),
    "no_diagonal": (ROWS, "r - first_column - least)", 0, "r - first_column - least - 1)", "sums|overrun"),
    "a_column_less": (ROWS, "first_row - most)", 0, "first_row - most + 1)", "sums"),
    "lines_beyond": (ROWS, "r < n ? int(r", 0, "true ? int(r", "sums|overrun|beyond|nothing"),
    "a_column_short": (ALONG, "c + columns + most", 0, "c + most", "sums"),
    "from_too_far": (ALONG, "c + least - first_row", 0, "c + 40 + least - first_row", "sums"),
    "parts_unfinished": (JUDGE, f"{BARRIER}\n  if (warp > 0)", 0, "if (warp > 0)", RACE),
    "not_the_floor": (JUDGE, "double(n) + constants[FLOOR_TERMS]", 0, "double(n)", "bounds"),
}
faulty = library_of(lambda: texts(KERNELS) + with_faults(PLANTED))


def found_by(kernels: Kernels) -> str:
    """What differs from the host's."""
    piv = pivots(300)
    order, _, _ = kernels.order_of(piv)
    if not np.array_equal(order, permutation(piv, 300)):
        return "order"
    B = columns(9, 40, "float64")
    B[:, 3:9] = 0
    if not np.array_equal(kernels.sum_weights(B, base(40))[0], summing_weights(B)):
        return "weights"
    of = System(530, 3, "float64")
    if not np.allclose(kernels.weigh_rows(of.X, of.t), of.sums(of.X), rtol=1e-9):
        return "rows"
    x, z = of.sums(of.X), of.sums(of.Z)
    triangle = Triangle(of.lu[:530], False, False)
    wanted = check_substitution(triangle, Weighed.of(of.X, of.t), Weighed.of(of.Z, of.t))
    found, last, right = kernels.checked(of.lu, -530, 0, x, z, of.t)
    transposed = np.asfortranarray(of.lu[:530].T)
    again, last_again, _ = kernels.checked(transposed, 0, 530, x, z, of.t, by_rows=False)
    for check, squares in ((found, last), (again, last_again)):
        if not np.allclose(squares, triangle.times(x[1], square), rtol=1e-9):
            return "sums"
        if not np.allclose(check.residual, wanted.residual, atol=np.max(wanted.bound)):
            return "sums"
        if not np.allclose(check.bound, wanted.bound, rtol=1e-9, atol=0):
            return "bounds"
    last = kernels.checked(of.lu, -530, 0, x, z, of.t, by_rows=False)[1]
    if not np.allclose(last, Triangle(of.lu[:530].T, True, False).times(x[1], square), rtol=1e-9):
        return "sums"
    return "nothing" if right == 530 else "lines"


@pytest.mark.parametrize("name", some(PLANTED, 3))
def test_faults_in_kernels_are_found(faulty: Libraries, name: str) -> None:
    try:
        found = found_by(Kernels(faulty, order="random", replaced=name))
    except KernelFault as fault:
        found = str(fault)
    assert re.search(PLANTED[name][-1], found), found


def test_nothing_is_found_where_no_fault_is(library: Libraries) -> None:
    assert found_by(Kernels(library, order="random")) == "nothing"
