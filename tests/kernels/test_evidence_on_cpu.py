"""The kernels that compare a step of LU with A, and the one that takes rows, on the CPU, beside NumPy.

What is no part of U(:j+b, c) is NaN where elements are judged, and so is all that lies below the rows of a matrix: it
must take part in nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest

from abft_tsm2.arrays import FLOATS
from abft_tsm2.checksum.rigorous import compared_rounding, largest_multiplier, underflow
from abft_tsm2.linalg.device import evidence_config as evidence
from abft_tsm2.linalg.device import move_config as moves
from abft_tsm2.linalg.device.evidence_config import COUNTS, FARTHEST, LARGE_MULTIPLIERS, UNBOUNDED, WRONG
from abft_tsm2.linalg.device.evidence_config import EvidenceKernel as Kernel
from abft_tsm2.linalg.device.move_config import MoveKernel
from abft_tsm2.linalg.device.repair import GROWN
from tests.kernels.test_evidence_compile import CONFIGS
from tests.kernels.test_moves_on_cpu import DTYPES, NOTHING, STRIDES, drawn, exchanged, inverse, laid_out, padded, same
from tests.support.cuda_on_cpu import ORDERS, KernelFault
from tests.support.libraries import Libraries, first_complaint, library_of, texts, with_faults

Wide = np.longdouble
TAKE, FACTORS = MoveKernel("take_rows"), Kernel("step_factors", "float64")
JUDGE, GREW = Kernel("judge_elements", "float64"), Kernel("grown_columns", "float64")
TAKE_FAULTS = {
    "take_not_yet_full": (TAKE, "__syncthreads();", 0, ""),
    "take_no_gather": (TAKE, "gather ? Index(gather[row + p]) : row + p", 0, "row + p"),
    "take_no_scatter": (TAKE, "scatter ? Index(scatter[row + line]) : row + line", 0, "row + line"),
    "take_first_columns": (TAKE, "(column + c) * ld", 0, "c * ld"),
    "take_rows_below": (TAKE, "if (line >= height) return;", 0, ""),
    "take_columns_apart": (TAKE, "tile[line + c * APART]", 0, "tile[line + c * TILE]"),
}
FACTOR_FAULTS = {
    "factors_no_unit": (FACTORS, "Real(r == c)", 0, "Real(0)"),
    "factors_pivot_in_L": (FACTORS, "r > c ?", 0, "r >= c ?"),
    "factors_order": (FACTORS, "places1, order0[j + p]", 0, "order0, places1[j + p]"),
    "factors_from_the_top": (FACTORS, "order0[j + p]", 1, "order0[p]"),
    "factors_came_from_the_top": (FACTORS, "order1[j + p]", 0, "order1[p]"),
    "factors_came_after": (FACTORS, "place_of(places0", 0, "place_of(places1"),
    "factors_corner_moved": (FACTORS, "corner[p + c * b] = p > c ? own", 0, "corner[p + c * b] = p > c ? x"),
    "factors_no_pivot": (FACTORS, "p <= c ? own", 0, "p < c ? own"),
    "factors_NaN": (FACTORS, "!(fabs(exactly(x)) <= largest_multiplier)", 0, "fabs(exactly(x)) > largest_multiplier"),
    "factors_limit": (FACTORS, "<= largest_multiplier", 0, "< largest_multiplier"),
    "factors_one_counts": (
        FACTORS,
        "atomicAdd(found + LARGE_MULTIPLIERS, Count(1))",
        0,
        "found[LARGE_MULTIPLIERS] = 1",
    ),
    "factors_rows_beyond": (FACTORS, "if (p >= b) return;", 0, ""),
}
JUDGE_FAULTS = {
    "judge_NaN": (JUDGE, "distance <= bound &&", 0, "!(distance > bound) &&"),
    "judge_no_bound": (JUDGE, "distance <= bound && is_finite(bound)", 0, "distance <= bound"),
    "judge_fault_widens": (JUDGE, "is_finite(now) ? now : 0", 0, "now"),
    "judge_own_forgotten": (JUDGE, "is_finite(now) ? now : 0", 0, "0"),
    "judge_L_counts": (JUDGE, "smaller(b, column + 1 - j)", 0, "b"),
    "judge_no_pivot": (JUDGE, "smaller(b, column + 1 - j)", 0, "smaller(b, column - j)"),
    "judge_A_forgotten": (JUDGE, "(exactly(column_largest[column]) + 2 * of_U)", 0, "(2 * of_U)"),
    "judge_above_forgotten": (JUDGE, "before + (is_finite", 0, "(is_finite"),
    "judge_U_once": (JUDGE, "2 * of_U", 0, "of_U"),
    "judge_nothing_lost": (JUDGE, "2 * of_U) + lost", 0, "2 * of_U)"),
    "judge_rows_from_0": (JUDGE, "flags[first + i]", 0, "flags[i]"),
    "judge_columns_from_0": (JUDGE, "flags[m + column]", 0, "flags[m + blockIdx.x]"),
    "judge_last_counts": (JUDGE, "atomicAdd(found + WRONG, Count(count))", 0, "found[WRONG] = Count(count)"),
    "judge_last_is_farthest": (JUDGE, "atomicMax(found + FARTHEST, bits)", 0, "found[FARTHEST] = bits"),
    "judge_NaN_is_near": (JUDGE, "nan_is_infinite(distance)", 0, "distance"),
    "judge_own_thread": (JUDGE, "largest_over_block<T1>(farthest)", 0, "farthest"),
    "judge_rows_left_out": (JUDGE, "i += T1", 0, "i += T1 + 1"),
    "judge_bounds_not_counted": (JUDGE, "if (!is_finite(bound)) atomicAdd", 0, "if (false) atomicAdd"),
    "judge_signs": (JUDGE, "sum += fabs(exactly(X[i]))", 0, "sum += exactly(X[i])"),
    "judge_norm_left_out": (JUDGE, "i += THREADS", 0, "i += 2 * THREADS"),
}
GROWN_FAULTS = {
    "grown_NaN": (GREW, "!(made <= most * larger(of_A, before))", 0, "made > most * larger(of_A, before)"),
    "grown_NaN_is_nothing": (GREW, "nan_is_infinite(fabs(exactly(X[i]))));", 0, "fabs(exactly(X[i])));"),
    "grown_limit": (GREW, "made <= most", 0, "made < most"),
    "grown_A_alone": (GREW, "larger(of_A, before)", 0, "of_A"),
    "grown_above_alone": (GREW, "larger(of_A, before)", 0, "before"),
    "grown_first_columns": (GREW, "c0 + blockIdx.x", 0, "blockIdx.x"),
    "grown_all_rows": (GREW, "W + j + column * ld, e - j", 0, "W + column * ld, e - j"),
}
FAULTS = TAKE_FAULTS | FACTOR_FAULTS | JUDGE_FAULTS | GROWN_FAULTS
library = library_of(
    lambda: [*texts([*CONFIGS, *(MoveKernel("take_rows", dtype) for dtype in DTYPES)]), *with_faults(FAULTS)]
)
# What reads beyond an array may not be run but under AddressSanitizer, which sees it.
READS = {
    "take_reads_beyond": (TAKE, "p >= height || ", 0, ""),
    "factors_read_beyond": (FACTORS, "if (p >= rows) return;", 0, ""),
    "judge_reads_beyond": (JUDGE, "Index(blockIdx.x) * ldr", 0, "column * ldr"),
    "grown_reads_beyond": (GREW, "e - j", 0, "e"),
}
sanitized = library_of(lambda: [*texts([TAKE, FACTORS, JUDGE, GREW]), *with_faults(READS)], sanitize=True)


# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass
class Taken:
    """Rows of X in the order `gather`, to rows `scatter`; None: as they are."""

    X: np.ndarray
    n: int
    gather: np.ndarray | None
    scatter: np.ndarray | None
    ld: int

    @classmethod
    def draw(cls, rng: np.random.Generator, X: np.ndarray, n: int, gathers: bool, scatters: bool) -> Taken:
        """n rows, some of them several times if they are gathered."""
        ld = n + 70 * scatters + 3
        gather = rng.integers(0, len(X), n).astype(np.int32) if gathers else None
        scatter = rng.permutation(ld)[:n].astype(np.int32) if scatters else None
        return cls(X, n, gather, scatter, ld)

    def wrong(self, library: Libraries, name: str, order: str = "forward") -> list[str]:
        """What is wrong with the rows that were taken."""
        X, count = self.X, self.X.shape[1]
        to = np.full((self.ld, count), np.nan, X.dtype, order="F")
        expected = to.copy("F")
        source = slice(self.n) if self.gather is None else self.gather
        expected[slice(self.n) if self.scatter is None else self.scatter] = X[source]
        launch = moves.take_rows(self.n, count)
        gather, scatter = (NOTHING if x is None else x for x in (self.gather, self.scatter))
        strides = (stride // X.itemsize for stride in X.strides)
        args = (X, *strides, gather, self.n, count, to, self.ld, scatter)
        library.run(name, launch.grid, launch.threads, args, order=order, seed=self.n)
        return [] if same(to, expected) else ["rows"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", STRIDES)
def test_rows_are_taken(library: Libraries, dtype: str, kind: str) -> None:
    rng = np.random.default_rng(31)
    sizes = ((100, 1, 64), (1, 1, 1)) if kind == "one column" else ((70, 67, 130), (64, 64, 64), (5, 3, 5), (1, 129, 2))
    pointers = itertools.cycle(itertools.product((True, False), repeat=2))
    cases = zip((size for size in sizes for _ in range(3)), pointers, itertools.cycle(ORDERS), strict=False)
    for (m, count, n), (gathers, scatters), order in cases:
        task = Taken.draw(rng, laid_out(rng, kind, m, count, dtype), n if gathers else min(m, n), gathers, scatters)
        assert not task.wrong(library, MoveKernel("take_rows", dtype).name, order), (m, count, n)


@pytest.mark.parametrize("fault", TAKE_FAULTS)
def test_faults_in_taking_rows_are_found(library: Libraries, fault: str) -> None:
    rng = np.random.default_rng(32)
    tasks = [Taken.draw(rng, laid_out(rng, kind, 90, 70, "float64"), 66, True, True) for kind in STRIDES[:2]]
    tasks.append(Taken.draw(rng, laid_out(rng, "column-major", 70, 3, "float64"), 66, False, False))
    assert first_complaint(tasks, lambda task: task.wrong(library, fault)) != "nothing"


# ---- factors of a step -----------------------------------------------------------------------------------------------


@dataclass
class Step:
    """W behind a step j:j+b, and the order of its rows before and after it."""

    W: np.ndarray
    m: int
    j: int
    b: int
    order0: np.ndarray
    order1: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, m: int, j: int, b: int, dtype: str, more: int = 2) -> Step:
        """With multipliers of all sizes, of which some are just allowed, some just not, and some no numbers."""
        W = padded(rng, m, j + b + min(more, 1), dtype, more)
        limit = W.dtype.type(largest_multiplier(FLOATS[dtype]))
        special = np.array([limit, -limit, np.nextafter(limit, W.dtype.type(2)), np.nan, -np.inf], dtype)
        at = rng.random((m - j, b)) < 0.1
        W[j:m, j : j + b][at] = rng.choice(special, np.count_nonzero(at))
        order0 = rng.permutation(m).astype(np.int32)
        return cls(W, m, j, b, order0, exchanged(order0, j, drawn(rng, m, j, b)))

    def wrong(self, library: Libraries, name: str, order: str = "forward") -> list[str]:
        """What is wrong with the factors of the step."""
        m, j, b, W = self.m, self.j, self.b, self.W
        limit, n = largest_multiplier(FLOATS[W.dtype.name]), W.shape[1]
        places0, places1 = inverse(self.order0), inverse(self.order1)
        found = np.zeros(COUNTS + -(-(m + 2 * n) // 8), np.uint64)
        came = np.full(b, -1, np.int32)
        L, corner, U = (np.full(shape, np.nan, W.dtype, order="F") for shape in ((m - j, b), (b, b), (b, b)))
        launch = evidence.step_factors(m - j, b)
        orders = self.order0, places0, self.order1, places1
        args = (W, len(W), m, j, b, *orders, came, L, corner, U, limit, found)
        library.run(name, launch.grid, launch.threads, args, order=order)
        lower = np.tril(W[j:m, j : j + b], -1) + np.eye(m - j, b, dtype=W.dtype)
        moved = lower[places1[self.order0[j:]] - j]
        counts = np.zeros_like(found)
        counts[LARGE_MULTIPLIERS] = np.count_nonzero(~(abs(moved) <= limit))
        pairs = {
            **{"L": (L, moved), "corner": (corner, lower[:b]), "U": (U, np.triu(W[j : j + b, j : j + b]))},
            **{"came": (came, places0[self.order1[j : j + b]]), "found": (found, counts)},
        }
        return [name for name, (x, y) in pairs.items() if not np.array_equal(x, y, equal_nan=True)]


STEPS = ((1, 0, 1), (3, 2, 1), (257, 0, 1), (40, 7, 20), (300, 128, 72), (390, 128, 128), (515, 0, 512), (530, 3, 512))


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_of_a_step(library: Libraries, dtype: str) -> None:
    rng = np.random.default_rng(33)
    for i, shape in enumerate(STEPS):
        task = Step.draw(rng, *shape, dtype)
        assert not task.wrong(library, Kernel("step_factors", dtype).name, ORDERS[i % 3]), shape


@pytest.mark.parametrize("fault", FACTOR_FAULTS)
def test_faults_in_the_factors_are_found(library: Libraries, fault: str) -> None:
    task = Step.draw(np.random.default_rng(34), 300, 17, 40, "float64")
    assert first_complaint([task], lambda task: task.wrong(library, fault)) != "nothing"


# ---- elements --------------------------------------------------------------------------------------------------------


@dataclass
class Elements:
    """R = T - L U in columns c0 on, of a step j:j+b of an m x n matrix, and what its bounds are made of."""

    R: np.ndarray
    p: int
    W: np.ndarray
    m: int
    j: int
    b: int
    c0: int
    largest: np.ndarray

    @classmethod
    def draw(
        cls, rng: np.random.Generator, m: int, n: int, j: int, b: int, dtype: str, panel: bool, more: int = 2
    ) -> Elements:
        """The last columns of the panel or of the matrix, of very different sizes. The largest element of one is now in
        A, now above, now in U(J, c). R is 0."""
        sizes = 10.0 ** rng.integers(-25, 25, n) * rng.choice([1.0, 30.0], (3, n))
        W, U = np.full((m + more, n), np.nan, dtype, order="F"), rng.uniform(-1, 1, (j + b, n))
        U[:j] *= sizes[1]
        U[j:] *= sizes[2]
        W[: j + b] = np.where(np.arange(j + b)[:, None] <= np.maximum(np.arange(n), j - 1), U, np.nan)
        largest = (sizes[0] * rng.uniform(0.5, 1, n)).astype(dtype)
        largest[rng.random(n) < 0.1] = 0
        q = min(40, b if panel else n - j - b)
        p, c0 = (m - j, j + b - q) if panel else (b, n - q)
        R = np.full((p + more, q), np.nan, dtype, order="F")
        R[:p] = 0
        return cls(R, p, W, m, j, b, c0, largest)

    def copy(self) -> Elements:
        return replace(self, R=self.R.copy("F"), W=self.W.copy("F"), largest=self.largest.copy())

    @property
    def columns(self) -> range:
        return range(self.c0, self.c0 + self.R.shape[1])

    def bounds(self) -> np.ndarray:
        """Of each column, as rigorous.py has it; in float64 the sum of a column may overflow."""
        j, b, kind, found = self.j, self.b, FLOATS[self.R.dtype.name], []
        unit = np.float64(compared_rounding(kind, j + b) * largest_multiplier(kind))
        for c in self.columns:
            above, own = (self.W[rows, c].astype(Wide) for rows in (slice(j), slice(j, min(j + b, max(c + 1, j)))))
            now = np.sum(abs(own))
            size = np.sum(abs(above)) + (now if np.isfinite(now) else 0)
            found.append(Wide(self.largest[c]) + 2 * size)
        with np.errstate(over="ignore"):
            sizes = np.array(found).astype(np.float64).astype(Wide)
        return (unit * sizes + underflow(kind, j + b, 1.0)).astype(np.float64).astype(Wide)

    def edge(self, beyond: bool) -> np.ndarray:
        """For each column the number nearest to its bound: of those that are larger, or of those that are not."""
        kind, bounds = self.R.dtype.type, self.bounds()
        side = 1 if beyond else -1  # the kernel's bound is a float64, which may be subnormal
        target = bounds * (1 + side * 1e-12) + side * FLOATS["float64"].smallest_subnormal
        values = target.astype(kind)
        missed = values.astype(Wide) < target if beyond else values.astype(Wide) > target
        return np.where(missed, np.nextafter(values, kind(np.inf if beyond else 0)), values)

    def expected(self) -> np.ndarray:
        """What `found` should be."""
        bounds, distance = self.bounds(), abs(self.R[: self.p]).astype(np.float64)
        wrong = ~(distance <= bounds) | ~np.isfinite(bounds)
        found, flags = self.nothing()
        found[UNBOUNDED], found[WRONG] = np.count_nonzero(~np.isfinite(bounds)), np.count_nonzero(wrong)
        distance = np.where(np.isnan(distance), np.inf, distance)
        found[FARTHEST] = np.max(distance[wrong], initial=0.0).view(np.uint64)
        flags[self.j : self.j + self.p] = wrong.any(1)
        flags[self.m + np.array(self.columns)] = wrong.any(0)
        return found

    def nothing(self) -> tuple[np.ndarray, np.ndarray]:
        """`found` before a kernel, and its flags of rows and columns."""
        found = np.zeros(COUNTS + -(-(self.m + 2 * self.W.shape[1]) // 8), np.uint64)
        return found, found[COUNTS:].view(np.uint8)

    def judged(self, library: Libraries, name: str, order: str) -> np.ndarray:
        """`found` as the kernel leaves it."""
        found, _ = self.nothing()
        launch = evidence.by_columns(self.R.shape[1])
        tolerances = evidence.judged_by(self.R.dtype.name, self.j + self.b)
        of_R, of_W = (self.R, len(self.R), self.p), (self.W, len(self.W), self.m, self.j, self.b, self.c0, self.j)
        args = (*of_R, *of_W, self.largest, *tolerances, found)
        library.run(name, launch.grid, launch.threads, args, order=order)
        return found

    def wrong(self, library: Libraries, name: str, order: str = "forward") -> list[str]:
        """What is wrong with `found`."""
        found, expected = self.judged(library, name, order), self.expected()
        return [str(at) for at in np.flatnonzero(found != expected)]


SHAPES = (  # m, n, j, b
    *((1, 1, 0, 1), (5, 3, 0, 2), (40, 70, 7, 20), (300, 200, 128, 72), (130, 131, 129, 1), (9, 301, 0, 9)),
    *((601, 9, 0, 9), (390, 380, 257, 50), (530, 515, 0, 512), (645, 648, 130, 512)),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("panel", [True, False])
def test_elements_at_their_bounds(library: Libraries, dtype: str, panel: bool) -> None:
    rng, name = np.random.default_rng(35), Kernel("judge_elements", dtype).name
    for i, (m, n, j, b) in enumerate(shape for shape in SHAPES if panel or shape[1] > sum(shape[2:])):
        task, order = Elements.draw(rng, m, n, j, b, dtype, panel), ORDERS[i % 3]
        shape = task.p, task.R.shape[1]
        task.R[: task.p] = task.edge(False) * rng.choice([-1, 1], shape)
        assert not task.judged(library, name, order).any(), (m, n, j, b)
        row, column = rng.integers(shape)
        task.R[row, column] = -task.edge(True)[column]
        found = task.judged(library, name, order)
        assert (found[WRONG], found[UNBOUNDED]) == (1, 0)
        assert (found == task.expected()).all(), (m, n, j, b)
        wrong = rng.random(shape) < rng.choice([0.01, 0.9])
        task.R[: task.p][wrong] = (task.edge(True) * rng.uniform(1, 1e6, shape))[wrong]
        assert not task.wrong(library, name, order), (m, n, j, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("panel", [True, False])
def test_what_is_no_number(library: Libraries, dtype: str, panel: bool) -> None:
    rng, name = np.random.default_rng(36), Kernel("judge_elements", dtype).name
    task = Elements.draw(rng, 290, 90, 30, 40, dtype, panel)
    for value in (np.nan, np.inf, -np.inf):
        row, column = rng.integers((task.p, task.R.shape[1]))
        for place in ("R", "A", "above", "J"):
            case = task.copy()
            if place == "R":
                case.R[row, column] = value
            elif place == "A":
                case.largest[task.columns[column]] = abs(value)
            else:
                case.W[7 if place == "above" else case.j, task.columns[column]] = value
            if place == "J":  # the bound is that of all the others
                case.R[: case.p, column], case.R[row, column] = (case.edge(beyond)[column] for beyond in (False, True))
            found = case.judged(library, name, "random")
            assert (found == case.expected()).all(), (place, value)
            counts = {"R": (1, 0), "J": (1, 0)}.get(place, (case.p, 1))
            assert (found[WRONG], found[UNBOUNDED]) == counts, (place, value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_at_the_ends_of_the_range(library: Libraries, dtype: str) -> None:
    rng, name, stored = np.random.default_rng(37), Kernel("judge_elements", dtype).name, FLOATS[dtype]
    tiny, terms = stored.smallest_subnormal, 33 + 21 + 2
    task = Elements.draw(rng, 70, 60, 33, 21, dtype, False)
    for size in (0.0, tiny, 9 * tiny, stored.smallest_normal, stored.largest / 1e8, stored.largest):
        task.W[:54, 54:] = np.asarray(size, dtype) * rng.choice([1.0, -1.0, 0.0], (54, 6)).astype(dtype)
        task.largest[54:] = size
        unbounded = dtype == "float64" and size == stored.largest
        assert np.isfinite(task.bounds()).all() == (not unbounded)
        if not size:
            assert (task.bounds() == terms * Wide(tiny)).all()
            for more in (0, 1):
                task.R[: task.p] = (terms + more) * tiny
                assert task.judged(library, name, "forward")[WRONG] == more * task.R[: task.p].size
        for beyond in () if unbounded else (False, True):
            task.R[: task.p] = task.edge(beyond)
            assert task.judged(library, name, "forward")[WRONG] == beyond * task.R[: task.p].size, size
        assert not task.wrong(library, name), size


def spoiled(rng: np.random.Generator, panel: bool) -> Elements:
    """Elements of which some are at their bounds and some beyond, and what is no number everywhere."""
    task = Elements.draw(rng, 700, 420, 300, 60, "float64", panel)
    task.largest[rng.random(420) < 0.1] = np.nan
    task.W[299, rng.random(420) < 0.1] = np.inf
    task.W[300, rng.random(420) < 0.2] = np.nan
    task.W[320, rng.random(420) < 0.1] *= 1e3
    bounded = np.isfinite(task.bounds())
    task.R[: task.p] = np.where(bounded, task.edge(False), 0)
    at = rng.random((task.p, task.R.shape[1])) < rng.choice([0, 0.01], task.R.shape[1])
    beyond = np.where(bounded, task.edge(True), 1) * rng.uniform(1, 2, at.shape)
    task.R[: task.p][at] = beyond[at]
    return task


@pytest.mark.parametrize("fault", JUDGE_FAULTS)
def test_faults_in_the_judge_are_found(library: Libraries, fault: str) -> None:
    rng = np.random.default_rng(38)
    tasks = [spoiled(rng, True), spoiled(rng, False)]
    zero = Elements.draw(rng, 70, 60, 33, 21, "float64", False)
    zero.W[:54, 54:] = zero.largest[54:] = 0
    zero.R[: zero.p] = zero.edge(False)
    large = zero.copy()
    large.W[:54, 54:] = large.largest[54:] = 1e300
    near = Elements.draw(rng, 7, 7, 0, 7, "float64", True)
    near.largest[:] = 0  # the pivot alone makes the first column's bound
    near.R[: near.p] = near.edge(False)
    near.R[2, 4], near.R[3, 5] = np.nan, 10 * near.edge(True)[5]
    assert first_complaint([*tasks, zero, large, near], lambda task: task.wrong(library, fault)) != "nothing"


# ---- columns ---------------------------------------------------------------------------------------------------------


@dataclass
class Columns:
    """Columns c0 on of W, of which rows j:e may have grown."""

    W: np.ndarray
    j: int
    e: int
    c0: int
    largest: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, j: int, e: int, c0: int, q: int, dtype: str, more: int = 2) -> Columns:
        """Some of them exactly as large as they may be, or a little larger. What lies below e is larger still, or NaN;
        some elements are subnormal, and some are no numbers."""
        kind = np.dtype(dtype).type
        W = padded(rng, e + more, c0 + q, dtype, 1 if more else 0)
        W[e:] = rng.choice([np.nan, 1e9], W[e:].shape)
        largest = abs(rng.standard_normal(c0 + q)).astype(dtype)
        W[:, ::7] *= FLOATS[dtype].smallest_normal
        largest[::7] *= FLOATS[dtype].smallest_normal
        for c in range(c0, c0 + q) if e > j else ():
            W[:j, c] *= rng.choice([0.1, 10.0])
            allowed = kind(GROWN) * max(largest[c], np.max(abs(W[:j, c]), initial=kind(0)))
            grown = (allowed, -np.nextafter(allowed, kind(np.inf)), np.nan, np.inf, W[j, c], W[j, c])
            W[rng.integers(j, e), c] = grown[c % 6]
        largest[rng.random(c0 + q) < 0.05] = np.nan
        if j:
            W[j - 1, rng.random(c0 + q) < 0.05] = np.nan
        return cls(W, j, e, c0, largest)

    def wrong(self, library: Libraries, name: str, order: str = "forward") -> list[str]:
        """Columns that are not flagged as they should be."""
        columns = slice(self.c0, None)
        U = abs(self.W[: self.e, columns]).astype(np.float64)
        U[np.isnan(U)] = np.inf
        above, made = (np.max(part, axis=0, initial=0) for part in (U[: self.j], U[self.j :]))
        expected = ~(made <= GROWN * np.maximum(self.largest[columns].astype(np.float64), above))
        flags = np.full(expected.size, 7, np.uint8)
        launch = evidence.by_columns(expected.size)
        args = (self.W, len(self.W), self.j, self.e, self.c0, self.largest, GROWN, flags)
        library.run(name, launch.grid, launch.threads, args, order=order)
        return [str(c) for c in np.flatnonzero(flags != expected)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_that_have_grown(library: Libraries, dtype: str) -> None:
    rng = np.random.default_rng(39)
    shapes = ((0, 1, 0, 1), (0, 256, 256, 40), (128, 384, 390, 61), (300, 300, 300, 9), (7, 520, 530, 30))
    for i, (j, e, c0, q) in enumerate(shapes):
        task = Columns.draw(rng, j, e, c0, q, dtype)
        assert not task.wrong(library, Kernel("grown_columns", dtype).name, ORDERS[i % 3]), (j, e, c0, q)


@pytest.mark.parametrize("fault", GROWN_FAULTS)
def test_faults_in_the_growth_are_found(library: Libraries, fault: str) -> None:
    tasks = [Columns.draw(np.random.default_rng(40), 128, 290, 300, 50, "float64")]
    assert first_complaint(tasks, lambda task: task.wrong(library, fault)) != "nothing"


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", READS)
def test_nothing_is_read_beyond_an_array(sanitized: Libraries, fault: str) -> None:
    rng = np.random.default_rng(41)
    tasks = {  # their arrays end with the last element that is to be read
        "take_reads_beyond": Taken.draw(rng, np.asfortranarray(rng.standard_normal((66, 3))), 66, True, False),
        "factors_read_beyond": Step.draw(rng, 70, 11, 20, "float64", more=0),
        "judge_reads_beyond": Elements.draw(rng, 40, 31, 11, 20, "float64", True, more=0),
        "grown_reads_beyond": Columns.draw(rng, 20, 50, 50, 4, "float64", more=0),
    }
    assert not tasks[fault].wrong(sanitized, READS[fault][0].name)
    with pytest.raises(KernelFault, match="address error"):
        tasks[fault].wrong(sanitized, fault)
