"""The kernels that check the steps of LU, on the CPU: whole factorisations beside `LuChecksums`, steps with residuals
of all sizes, and whether planted faults are found, in the factors and in the kernels."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.linalg import get_lapack_funcs, solve_triangular

from abft_tsm2.arrays import FLOATS
from abft_tsm2.checksum.bounds import LEAST, USUAL, factored_bound, operations
from abft_tsm2.checksum.rigorous import largest_multiplier
from abft_tsm2.linalg.device.check_config import (
    ROOM,
    Advance,
    ColumnSums,
    JudgeStep,
    RowSums,
    SumModuli,
    constants,
    initial_state,
)
from abft_tsm2.linalg.encode import MatrixChecksums
from abft_tsm2.linalg.line_check import LineCheck, growth
from abft_tsm2.linalg.lu_checks import LuChecksums
from tests.support.cuda_on_cpu import ORDERS
from tests.support.libraries import Libraries, first_complaint, in_every_order, library_of, texts, with_faults
from tests.support.planting import kept

DTYPES = ("float64", "float32")
CHUNKS = (4, 8, 16)
CONFIGS = [SumModuli()]
for dtype in DTYPES:
    CONFIGS += [ColumnSums(dtype), Advance(dtype)]
    CONFIGS += [kind(dtype, chunks) for kind in (RowSums, JudgeStep) for chunks in CHUNKS]
library = library_of(lambda: texts(CONFIGS))
Launch = Callable[[Any, int, tuple[Any, ...]], None]
Wide = np.longdouble
ROUNDING = 2.0**-53
ROWS_WRONG, COLUMNS_WRONG, PIVOT_WRONG = 1, 2, 4


def launch_on(kernels: Libraries, order: str = "forward", renamed: tuple[str, str] = ("", "")) -> Launch:
    """`renamed`: a kernel, and the one that runs in its place."""

    def launch(config: Any, grid: int, args: tuple[Any, ...]) -> None:
        name = renamed[1] if config.name == renamed[0] else config.name
        kernels.run(name, grid, config.threads, args, order=order)

    return launch


# ---- factorisations --------------------------------------------------------------------------------------------------


class Recorded(LuChecksums):
    """LuChecksums whose lines are all judged by estimated norms alone, and are taken to be fine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.found: dict[int, LineCheck] = {}
        self.grown: dict[int, float] = {}

    def _judged(self, side, residual, reach, terms, exact, rigorous):
        bound = factored_bound(self.type, reach, terms, self.moduli[1 - side])
        self.found[side] = LineCheck.relative_to_median(residual, bound, USUAL, LEAST)
        self.grown[side] = self._grown
        return True


class Device:
    """What lies on the device: W with rows beyond it that are NaN, and all vectors of the checks."""

    def __init__(self, A: np.ndarray, steps: int, launch: Launch) -> None:
        (m, n), self.dtype, self.launch = A.shape, A.dtype.name, launch
        self.m, self.n, K = m, n, min(A.shape)
        per_load = 16 // A.itemsize
        self.ld = -(-m // per_load) * per_load + per_load
        self.memory = np.full((n, self.ld), np.nan, A.dtype)
        self.W = self.memory.T[:m]
        self.W[...] = A
        self.order = np.arange(m, dtype=np.int32)
        self.encoding = MatrixChecksums.of(A)
        self.w, self.v, self.S, self.Z, self.row_floor, self.column_floor = (
            np.array(x)
            for x in (
                *(self.encoding.w, self.encoding.v, self.encoding.S, self.encoding.Z),
                *(self.encoding.row_norms, self.encoding.column_norms),
            )
        )
        self.g, self.y, self.biggest = (np.full(K, np.nan) for _ in range(3))
        self.residuals, self.bounds = (np.full((2, max(m, n)), np.nan) for _ in range(2))
        self.status, self.in_doubt = np.zeros(steps, np.int64), np.full(1, -1)
        self.moduli = np.full(2, np.nan)
        stored = FLOATS[self.dtype]
        self.state, self.constants = np.array(initial_state(stored, m, n)), kept(constants(stored), ROOM)
        self.parts = np.zeros(0)
        self.launch(SumModuli(), 1, (self.w, m, self.v, n, self.moduli))

    def sums(self, j: int, b: int) -> None:
        """g and the largest multipliers of a step."""
        config = ColumnSums(self.dtype)
        of_columns = (self.memory, self.ld, self.m, j, b, self.order, self.w, self.g, self.biggest)
        self.launch(config, config.grid(b), of_columns)

    def across(self, j: int, b: int) -> None:
        """What is right of a step."""
        config = RowSums.of(self.dtype, b)
        blocks = -(-config.grid(self.n - j - b) // 2)  # so that they take several columns in turn
        self.parts = np.full((blocks, b), np.nan)
        if blocks:
            self.launch(config, blocks, (self.memory, self.ld, self.n, j, b, self.v, self.g, self.Z, self.parts))

    def judged(self, j: int, b: int, at: int, token: int) -> None:
        """y, and the verdict."""
        self.launch(
            JudgeStep.of(self.dtype, b),
            1,
            (
                *(self.memory, self.ld, self.m, self.n, j, b, self.order, self.w, self.v, self.g, self.S, self.Z),
                *(self.biggest, self.parts, self.parts.shape[0], self.y, self.row_floor, self.column_floor),
                *(self.moduli, self.state, self.residuals, self.bounds, self.status, at, token, self.in_doubt),
                self.constants,
            ),
        )

    def advanced(self, j: int, b: int) -> None:
        """S of the rows that are left."""
        config = Advance(self.dtype)
        if below := self.m - j - b:
            self.launch(config, config.grid(below), (self.memory, self.ld, self.m, j, b, self.order, self.y, self.S))

    def beyond(self, j: int, j1: int) -> int:
        """Sides with a residual of this step that is not within its bound. What is only much further from clean than
        the median is suspected: one of some dozen honest steps is, which one depends on the BLAS."""
        with np.errstate(invalid="ignore"):
            within = np.abs(self.residuals[:, j:j1]) <= self.bounds[:, j:j1]
        return sum(flag for flag, side in zip((ROWS_WRONG, COLUMNS_WRONG), within, strict=True) if not side.all())


Plant = Callable[[str, int, np.ndarray], None]


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    b: int
    dtype: str

    def matrix(self, seed: int = 0) -> np.ndarray:
        rng = np.random.default_rng([seed, self.m, self.n, self.b])
        scales = 2.0 ** rng.integers(-3, 4, (self.m, 1))
        return np.asfortranarray((rng.standard_normal((self.m, self.n)) * scales).astype(self.dtype))

    @property
    def steps(self) -> list[tuple[int, int]]:
        K = min(self.m, self.n)
        return [(j, min(j + self.b, K)) for j in range(0, K, self.b)]

    def __str__(self) -> str:
        return f"{self.m}x{self.n}-{self.b}-{self.dtype}"


def factored(
    shape: Shape, launch: Launch, plant: Plant | None = None, *, beside: bool = False
) -> tuple[Device, list[str]]:
    """Factor step by step, with the kernels behind each; `plant` changes W after "panel", "solved", "updated" of a
    step. `beside`: returns also what is wrong, as LuChecksums on the same matrix has it."""
    device = Device(shape.matrix(), len(shape.steps), launch)
    W, found = device.W, []
    carried = Recorded(shape.matrix(), device.encoding, W) if beside else None
    getrf = get_lapack_funcs("getrf", (W,))
    for number, (j, j1) in enumerate(shape.steps):
        W[j:, j:j1], pivots, _ = getrf(W[j:, j:j1])
        if plant:
            plant("panel", number, W)
        for i, pivot in enumerate(pivots):
            for rows in (device.order[j:], W[j:, :j], W[j:, j1:]):
                rows[[i, pivot]] = rows[[pivot, i]]
        before = {name: np.array(getattr(device, name)) for name in ("S", "Z", "state")}
        if carried:
            assert carried.check_panel(pivots + np.int32(j), j, j1)
        square = W[j:j1, j:j1]
        with np.errstate(all="ignore"):
            W[j:j1, j1:] = solve_triangular(square, W[j:j1, j1:], lower=True, unit_diagonal=True, check_finite=False)
        if plant:
            plant("solved", number, W)
        if carried:
            assert carried.check_rows(j, j1)
            carried.y[j:j1] = carried._y
        with np.errstate(all="ignore"):
            W[j1:, j1:] -= W[j1:, j:j1] @ W[j:j1, j1:]
        if plant:
            plant("updated", number, W)
        device.sums(j, j1 - j)
        device.across(j, j1 - j)
        device.judged(j, j1 - j, number, 7 + number)
        device.advanced(j, j1 - j)
        if carried:
            carried.advance(j, j1)
            found += [f"step {number}: {what}" for what in differences(device, carried, before, number, (j, j1))]
    return device, found


def differs(x: Any, wanted: Any, size: Any, terms: int) -> bool:
    """Whether x is further from what is wanted than rounding of `terms` numbers may be; their moduli add up to size."""
    return not bool(np.all(np.abs(Wide(x) - wanted) <= (terms + 4) * ROUNDING * size))


def differences(
    device: Device, carried: Recorded, before: dict[str, np.ndarray], number: int, step: tuple[int, int]
) -> list[str]:
    """What the kernels of a step made otherwise than NumPy in extended precision, from the same numbers, and otherwise
    than LuChecksums."""
    (j, j1), m, n = step, device.m, device.n
    J, found = slice(j, j1), []
    W, S, Z = Wide(device.W), Wide(before["S"])[device.order], Wide(before["Z"])
    w, v = Wide(device.w)[device.order], Wide(device.v)
    lower, upper = np.tril(W[j:, J], -1), np.triu(W[J, j:])
    lower[np.arange(j1 - j), np.arange(j1 - j)] = 1
    L11, U11 = lower[: j1 - j], upper[:, : j1 - j]

    def compare(what: str, x: Any, terms: int, *factors: Any, plus: Any = 0.0) -> None:
        """x = product of the factors + plus"""
        wanted, size = factors[0], abs(factors[0])
        for factor in factors[1:]:
            wanted, size = wanted @ factor, size @ abs(factor)
        if differs(x, wanted + plus, size + abs(plus), terms):
            found.append(f"{what} is {x}, not {np.float64(wanted + plus)}")

    compare("sum |w|", device.moduli[:1], m, abs(w)[None, :], np.ones((m, 1)))
    compare("sum |v|", device.moduli[1:], n, abs(v)[None, :], np.ones((n, 1)))
    compare("g", device.g[J], m, w[j:], lower)
    compare("y", device.y[J], n, upper, v[j:])
    g, y = Wide(device.g), Wide(device.y)
    compare("Z", device.Z[j1:], j1 - j, -g[J], W[J, j1:], plus=Z[j1:])
    compare("Z before", device.Z[:j1], 0, Z[:j1])
    now = device.S[device.order]
    compare("S", now[j1:], j1 - j, -lower[j1 - j :], y[J], plus=S[j1:])
    compare("S before", now[:j1], 0, S[:j1])
    compare("residual of rows", device.residuals[0, J], j1 - j, L11, y[J], plus=-S[J])
    compare("residual of columns", device.residuals[1, J], j1 - j, g[J], U11, plus=-Z[J])
    largest = [max(abs(device.W[c + 1 :, c]), default=0) for c in range(j, j1)]
    if not np.array_equal(device.biggest[J], largest):
        found.append(f"the largest multipliers are {device.biggest[J]}, not {largest}")

    for side, name in enumerate(("rows", "columns")):
        verdict, bound = carried.found[side], device.bounds[side, J]
        if not np.allclose(bound, verdict.bound, rtol=1e-8, atol=0):
            found.append(f"bounds of {name} are {bound}, not {verdict.bound}")
        # Of float64, residuals are as much the rounding of sums as of factors.
        apart = 1e-6 if device.dtype == "float32" else 2.0
        if not np.all(abs(device.residuals[side, J] - verdict.residual) <= apart * bound):
            found.append(f"residuals of {name} are {device.residuals[side, J]}, not {verdict.residual}")
        if device.dtype == "float32" and bool(device.status[number] & (1 << side)) == verdict.clean:
            found.append(f"the verdict on {name} is {device.status[number] & 7}, that of LuChecksums {verdict.clean}")
        again = LineCheck.relative_to_median(device.residuals[side, J], bound, USUAL, LEAST)
        if bool(device.status[number] & (1 << side)) == again.clean:
            found.append(f"the verdict on {name} is {device.status[number] & 7}")
    if device.status[number] >> 3 != 7 + number:
        found.append(f"the token is {device.status[number] >> 3}")
    if device.in_doubt[0] != device.status[number] & 7:
        found.append(f"in doubt is {device.in_doubt[0]}, of the status {device.status[number]}")
    state = [carried.growth, *carried.done]
    if not np.allclose(device.state, state, rtol=1e-8, atol=0):
        found.append(f"the state is {device.state}, not {state}")
    return found


SHAPES = (
    *(Shape(96, 96, 32, dtype) for dtype in DTYPES),
    *(Shape(97, 203, 40, dtype) for dtype in DTYPES),
    Shape(203, 203, 100, "float32"),
    *(Shape(190, 77, 33, dtype) for dtype in DTYPES),
    Shape(130, 130, 128, "float64"),
    Shape(150, 260, 150, "float32"),
    Shape(310, 301, 260, "float64"),
    Shape(5, 9, 2, "float64"),
    Shape(1, 1, 32, "float32"),
    Shape(3, 1, 1, "float64"),
    Shape(1, 3, 1, "float32"),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_factorisations_as_lu_checksums_has_them(
    library: Libraries, shape: Shape, orders: Callable[[int], tuple[str, ...]]
) -> None:
    runs = [factored(shape, launch_on(library, order), beside=True) for order in orders(SHAPES.index(shape))]
    for device, found in runs:
        assert not found
        assert not any(device.beyond(*step) for step in shape.steps)
        assert not (device.status & PIVOT_WRONG).any()
    for device, _ in runs[1:]:
        for name in ("residuals", "bounds", "state", "S", "Z", "g", "y", "moduli"):
            assert getattr(device, name).tobytes() == getattr(runs[0][0], name).tobytes()


# ---- faults in the factors -------------------------------------------------------------------------------------------

# What is changed, after which part of step 1, columns 40:80: (rows, columns), and what this step says of it;
# None where the change waits for a later one.
REGIONS: dict[str, tuple[str, tuple[slice, slice], int | None]] = {
    "diagonal of U": ("panel", (slice(50, 51), slice(50, 51)), ROWS_WRONG | COLUMNS_WRONG),
    "U of the panel": ("panel", (slice(42, 43), slice(71, 72)), ROWS_WRONG | COLUMNS_WRONG),
    "L of the square": ("panel", (slice(70, 71), slice(45, 46)), ROWS_WRONG | COLUMNS_WRONG),
    "L of the square, later": ("solved", (slice(70, 71), slice(45, 46)), ROWS_WRONG | COLUMNS_WRONG),
    "L below": ("panel", (slice(-1, None), slice(40, 41)), COLUMNS_WRONG),
    "U to the right": ("solved", (slice(79, 80), slice(-1, None)), ROWS_WRONG),
    "what is left": ("updated", (slice(82, 83), slice(83, 84)), None),
    "the last element": ("updated", (slice(-1, None), slice(-1, None)), None),
}


@pytest.mark.parametrize("value", ["small", "nan", "inf"])
@pytest.mark.parametrize("region", REGIONS)
def test_a_changed_element_is_seen_by_the_right_side(library: Libraries, region: str, value: str) -> None:
    sizes = enumerate(((90, 105), (105, 90)))
    for number, (m, n) in sizes if value == "small" else [next(sizes)]:
        shape = Shape(m, n, 40, DTYPES[number % 2])
        stage, where, expected = REGIONS[region]

        def plant(at: str, step: int, W: np.ndarray, stage: str = stage, where: Any = where) -> None:
            if (at, step) == (stage, 1):
                largest = 1.0 if where[1].start == 45 or where[1].start == 40 else np.abs(W).max()
                W[where] = W[where] + {"small": largest * 2.0**-7, "nan": np.nan, "inf": np.inf}[value]

        device, _ = factored(shape, launch_on(library, ORDERS[number]), plant)
        flags = device.status & 7
        assert not device.beyond(0, 40)
        if expected is None:
            assert not device.beyond(40, 80)
            assert flags[2] & (ROWS_WRONG | COLUMNS_WRONG)
        else:
            assert flags[1] & expected == expected, (region, m, n)
            assert value != "small" or device.beyond(40, 80) & ~expected == 0, (region, m, n)


@pytest.mark.parametrize("name", ["S", "Z", "g", "y", "w", "v", "row_floor", "column_floor", "state", "moduli"])
def test_a_changed_sum_is_seen(library: Libraries, name: str) -> None:
    shape = Shape(60, 70, 30, "float64")
    for value in (1e3, np.nan):
        if value > 0 and name in ("row_floor", "column_floor", "state", "moduli"):
            continue  # it is what tells how large an error may be
        device = Device(shape.matrix(), 2, launch_on(library))
        W = device.W
        W[...], pivots, _ = get_lapack_funcs("getrf", (W,))(W)
        for i, pivot in enumerate(pivots):
            device.order[[i, pivot]] = device.order[[pivot, i]]
        device.sums(0, 30)
        device.across(0, 30)
        device.judged(0, 30, 0, 1)
        assert not device.beyond(0, 30)
        device.advanced(0, 30)
        changed = getattr(device, name)
        changed[(int(device.order[50]) if name in ("S", "w", "row_floor") else 45) % changed.size] = value
        if name != "g":
            device.sums(30, 30)
        device.across(30, 30)
        device.judged(30, 30, 1, 1)
        if name == "y":  # which is made anew
            assert not device.beyond(30, 60)
        else:
            assert device.status[1] & 3, value


@pytest.mark.parametrize("row", [-1, 60, 2**31 - 1, -(2**31)])
def test_an_order_of_no_rows_is_seen_and_no_address(library: Libraries, row: int) -> None:
    shape = Shape(60, 50, 30, "float32")
    for place in (5, 55):
        device = Device(shape.matrix(), 1, launch_on(library))
        device.order[place] = row
        S = device.S.copy()
        device.sums(0, 30)
        device.across(0, 30)
        device.judged(0, 30, 0, 1)
        device.advanced(0, 30)
        assert device.status[0] & 3 == 3
        assert device.S[place] == S[place]


@pytest.mark.parametrize("dtype", DTYPES)
def test_multipliers_beyond_one_are_seen(library: Libraries, dtype: str) -> None:
    shape, largest = Shape(40, 40, 20, dtype), largest_multiplier(FLOATS[dtype])
    for value, wrong in ((largest, 0), (-largest, 0), (2.0, 4), (-1.001, 4), (np.nan, 4), (-np.inf, 4), (1.0, 0)):
        device = Device(shape.matrix(), 1, launch_on(library))
        device.W[...] *= 1e-3
        device.W[39, 7] = value
        device.W[3, 7] = 1e3  # above the diagonal
        device.sums(0, 20)
        device.across(0, 20)
        device.judged(0, 20, 0, 1)
        stored = abs(np.float64(device.W[39, 7]))
        assert device.biggest[7] == (stored if stored == stored else np.inf)
        assert device.status[0] & 4 == wrong, value


# ---- verdicts: residuals of all sizes --------------------------------------------------------------------------------


def judged_faults(b: int, dtype: str, seed: int, launch: Launch) -> list[str]:
    """What is wrong with the verdicts on a step of b columns whose residuals are as they may be."""
    rng = np.random.default_rng([b, seed])
    m, n, j, blocks = b + 9, b + 5, 3, int(rng.integers(0, 4))
    device = Device(rng.standard_normal((m, n)).astype(dtype), 3, launch)
    device.order[...] = rng.permutation(m)
    J, stored = slice(j, j + b), FLOATS[dtype]
    device.g[...], device.parts = rng.standard_normal(device.g.size), rng.standard_normal((blocks, b))
    device.biggest[...] = rng.uniform(0, 1, device.biggest.size)
    device.state[...] = 2.0 ** rng.uniform(-2, 2), *(1e2 * rng.uniform(1, 2, 2))
    state = device.state.copy()
    small = 2.0 ** (10 * (seed % 2))  # beside the norms, so that the rounding of sums is no large part of a residual
    device.row_floor[...], device.column_floor[...] = (small * 2.0 ** rng.uniform(-3, 3, x) for x in (m, n))
    square = Wide(device.W[J, J])
    L, U = np.tril(square, -1) + np.eye(b), np.triu(square)
    y = U @ device.v[J] + device.parts.sum(0)
    # Residuals up to some 60 u, near the bound, or some hundredth of it; much alike, or not at all.
    unit, largest, spread = 60 * stored.unit_roundoff, 10.0 ** rng.uniform(-2.5, 0.5, 2), rng.uniform(0, 3, 2)
    noise = [
        unit * x * rng.choice([-1, 1], b) * 10.0 ** rng.uniform(-y, 0, b) for x, y in zip(largest, spread, strict=True)
    ]
    rows = device.order[J]
    device.S[rows] = np.float64(L @ y) - noise[0] * device.row_floor[rows]
    device.Z[J] = np.float64(device.g[J] @ U) - noise[1] * device.column_floor[J]
    if seed % 4 == 3:
        (device.S if seed % 8 == 3 else device.Z)[rows[b // 2] if seed % 8 == 3 else j + b // 2] = np.nan
    if seed % 8 == 6 and b > 1:  # a residual that is NaN while its bound is not
        device.W[j + b - 1, j] = np.nan
        L[b - 1, 0] = np.nan
    device.judged(j, b, 1, 5)

    found = []
    firsts, lasts = (device.S[rows], device.Z[J]), (np.float64(y), device.g[J] * np.float64(np.diagonal(U)))
    floors = device.row_floor[rows], device.column_floor[J]
    exact = L @ y - device.S[rows], device.g[J] @ U - device.Z[J]
    sizes = abs(L) @ (abs(U) @ abs(device.v[J]) + abs(device.parts).sum(0)), abs(device.g[J]) @ abs(U)
    grown = [growth(floors[side], lasts[side]) for side in (0, 1)]
    weights = abs(device.v).sum(), abs(device.w).sum()
    for side in (0, 1):
        more = np.arange(1, b + 1) / b * operations(stored, b, (n, m)[side] - j)
        carried = SimpleNamespace(xp=np, done=state[1:])
        weighted = more * max(grown[side], state[0])
        reach = LuChecksums.reach(carried, side, floors[side], weighted, j + more, firsts[side], lasts[side])
        bound = factored_bound(stored, reach, j + b, weights[side])
        residual, given = device.residuals[side, J], device.bounds[side, J]
        if not np.allclose(given, bound, rtol=1e-9, atol=0, equal_nan=True):
            found.append(f"bounds of side {side} are {given}, not {bound}")
        off = abs(residual - exact[side]) > 4 * (b + blocks + 8) * ROUNDING * (sizes[side] + abs(firsts[side]))
        if off.any() or (np.isnan(residual) != np.isnan(exact[side])).any():
            found.append(f"residuals of side {side} are {residual}, not {np.float64(exact[side])}")
        clean = LineCheck.relative_to_median(residual, given, USUAL, LEAST).clean
        if bool(device.status[1] & (1 << side)) == clean:
            found.append(f"the verdict on side {side} is {device.status[1]}, should be {clean}")
    done = [state[1 + side] + operations(stored, b, (n, m)[side] - j) * grown[0] for side in (0, 1)]
    if not np.allclose(device.state, [grown[0], *done], rtol=1e-9, atol=0):
        found.append(f"the state is {device.state}, not {grown[0], *done}")
    if device.status[1] >> 3 != 5 or device.status[0] or device.status[2] or device.in_doubt[0] != device.status[1] & 7:
        found.append(f"status is {device.status}, in doubt {device.in_doubt}")
    beside = np.ones(max(m, n), bool)
    beside[J] = False
    if not (np.isnan(device.residuals[:, beside]).all() and np.isnan(device.bounds[:, beside]).all()):
        found.append("residuals or bounds of other lines were written")
    return found


WIDTHS = (1, 2, 3, 31, 32, 33, 64, 127, 128, 129, 200, 256, 257, 300, 383, 384, 511, 512)


@pytest.mark.parametrize("b", WIDTHS)
def test_verdicts_are_relative_to_the_median(library: Libraries, b: int) -> None:
    for seed in range(12 if b <= 64 else 3):
        dtype, order = DTYPES[seed // 2 % 2], ORDERS[seed % 3]
        assert not judged_faults(b, dtype, seed, launch_on(library, order)), (dtype, seed)


def test_of_these_verdicts_some_are_clean_and_some_not(library: Libraries) -> None:
    found = set()
    for seed in range(8):
        launch = launch_on(library)
        seen: list[Any] = []
        judged_faults(33, "float64", seed, lambda *x, seen=seen, launch=launch: (seen.append(x), launch(*x)))
        found.add(int(seen[-1][2][22][1]) & 3)
    assert found >= {0, 3} or found >= {0, 1, 2}


# ---- under AddressSanitizer ------------------------------------------------------------------------------------------

COLUMNS, ROWS, JUDGE, BELOW = ColumnSums("float64"), RowSums("float64", 4), JudgeStep("float64", 4), Advance("float64")
READS = {
    "columns_read_beyond": (COLUMNS, "r < m; r += T1", 0, "r < m + T1; r += T1"),
    "rows_read_beyond": (BELOW, "part > 0 || r >= m", 0, "part > 0"),
}
checked = [SumModuli(), COLUMNS, ROWS, JUDGE, BELOW]
sanitized = library_of(lambda: [*texts(checked), *with_faults(READS)], sanitize=True)


def test_every_kernel_under_address_sanitizer(sanitized: Libraries) -> None:
    for shape in (Shape(37, 50, 20, "float64"), Shape(50, 37, 37, "float64")):
        assert not factored(shape, launch_on(sanitized), beside=True)[1]


@pytest.mark.parametrize("name", READS)
def test_reads_beyond_the_matrix_are_caught(sanitized: Libraries, name: str) -> None:
    launch = launch_on(sanitized, renamed=(READS[name][0].name, name))
    found = first_complaint([Shape(50, 37, 37, "float64")], lambda shape: factored(shape, launch, beside=True)[1])
    assert re.search(r"(?s)heap-buffer-overflow.*READ of size", found)


# ---- faults in the kernels -------------------------------------------------------------------------------------------
# name: (kernel, what is replaced, which occurrence, by what)
PLANTED: dict[str, tuple[Any, str, int, str]] = {
    "the_first_weights_only": (SumModuli(), "i += T1) sum +=", 0, "i += T1) sum ="),
    "no_moduli": (SumModuli(), "fabs(x[i])", 0, "x[i]"),
    "no_diagonal": (COLUMNS, "if (r == first + c) sum[c] += weight;", 0, ""),
    "with_the_diagonal": (COLUMNS, "r > first + c", 0, "r >= first + c"),
    "weights_by_place": (COLUMNS, "const int input = order1[r]", 0, "const int input = int(r)"),
    "multipliers_with_signs": (COLUMNS, "nan_is_infinite(fabs(x))", 0, "x"),
    "rows_beyond": (COLUMNS, "r < m; r += T1", 0, "r < ld; r += T1"),
    "sum_without_a_barrier": (COLUMNS, "__syncthreads();", 0, ""),
    "largest_without_a_barrier": (COLUMNS, "__syncthreads();", 2, ""),
    "columns_of_the_first_block": (ROWS, "Index(blockIdx.x) * WARPS + warp", 0, "warp"),
    "a_part_of_the_columns": (ROWS, "Index(gridDim.x) * WARPS * AT_ONCE", 0, "n"),
    "rows_of_the_step_and_more": (ROWS, "lane + 32 * i < b && c + q < n", 0, "c + q < n"),
    "columns_beyond": (ROWS, "lane + 32 * i < b && c + q < n", 0, "lane + 32 * i < b"),
    "sums_of_the_first_warp": (ROWS, "sum += sums_of_rows[k * ROWS + i]", 0, "sum += sums_of_rows[i]"),
    "Z_with_the_other_sign": (ROWS, "Z[c + q] -= z", 0, "Z[c + q] += z"),
    "parts_without_a_barrier": (ROWS, "__syncthreads();\n  for (int i", 0, "for (int i"),
    "S_by_place": (BELOW, "S[input] -= sum", 0, "S[r] -= sum"),
    "a_part_of_the_sum": (BELOW, "int k = 1; k < PARTS", 0, "int k = 2; k < PARTS"),
    "advance_without_a_barrier": (BELOW, "__syncthreads();\n  if (part", 0, "if (part"),
    "parts_of_the_first_group": (JUDGE, "k = t / ROWS", 0, "k = 0"),
    "U_without_the_diagonal": (JUDGE, "row <= column", 0, "row < column"),
    "L_with_the_diagonal": (JUDGE, "row > column", 0, "row >= column"),
    "S_of_the_place": (JUDGE, "known == input ? S[input]", 0, "known == input ? S[line]"),
    "floors_of_the_place": (JUDGE, "row_floor[input]", 0, "row_floor[line]"),
    "v_in_place_of_y": (JUDGE, "y[line] = right_of[t] = row_last", 0, "y[line] = row_last"),
    "half_of_the_warps": (JUDGE, "sums_of_rows[warp * ROWS + lane + 32 * i] +=", 0, "if (false) sums_of_rows[0] +="),
    "U_without_a_barrier": (JUDGE, "__syncthreads();\n\n  // y(J)", 0, "// y(J)"),
    "y_without_a_barrier": (JUDGE, "__syncthreads();\n\n  // What a", 0, "// What a"),
    "halves_without_a_barrier": (JUDGE, "__syncthreads();\n#pragma unroll\n  for (int i = 0", 0, "for (int i = 0"),
    "rows_without_a_barrier": (JUDGE, "__syncthreads();\n  double sum = 0;", 0, "double sum = 0;"),
    "ratios_without_a_barrier": (JUDGE, "__syncthreads();\n  if (t < 2", 0, "if (t < 2"),
    "growth_without_a_barrier": (JUDGE, "__syncthreads();\n\n  // Bounds", 0, "// Bounds"),
    "growth_of_the_rows_alone": (JUDGE, "double of_side = grown[side]", 0, "double of_side = grown[0]"),
    "growth_of_the_columns": (JUDGE, "growth = grown[ROWS_SIDE]", 0, "growth = grown[COLUMNS_SIDE]"),
    "growth_before_left_out": (JUDGE, "larger(of_side, growth_before)", 0, "of_side"),
    "another_median": (JUDGE, "before == count / 2", 0, "before == (count - 1) / 2"),
    "weights_left_out": (JUDGE, "* constants[UNDERFLOW] * weight", 0, "* weight"),
    "an_operation_less": (JUDGE, "double(t + 1) / b", 0, "double(t) / b"),
    "lengths_of_the_side": (JUDGE, "{n - j, m - j}", 0, "{m - j, n - j}"),
    "not_relative": (JUDGE, "lower < lines / 2 + 1", 0, "true"),
    "half_a_line_more": (JUDGE, "lower < lines / 2 + 1", 0, "lower <= lines / 2 + 1"),
    "half_a_line_less": (JUDGE, "lower < lines / 2 + 1", 0, "lower < lines / 2"),
    "never_least": (JUDGE, "largest <= constants[LEAST] ||", 0, ""),
    "beyond_the_bound": (JUDGE, "largest <= 1 &&", 0, ""),
    "nan_is_fine": (JUDGE, "return x == x ? x : ", 0, "return x == x ? x : 0 *"),
    "sides_exchanged": (JUDGE, "(rows_fine ? 0 : 1) + (columns_fine", 0, "(columns_fine ? 0 : 1) + (rows_fine"),
    "never_in_doubt": (
        JUDGE,
        "status[at] = 8 * token + *in_doubt",
        0,
        "status[at] = 8 * token + *in_doubt, *in_doubt = 0",
    ),
    "other_columns_of_residuals": (JUDGE, "residuals[side * lines + line]", 0, "residuals[side * m + line]"),
}
faulty = library_of(lambda: [*with_faults(PLANTED), *texts(CONFIGS)])


def what_is_found(kernels: Libraries, name: str, order: str) -> str:
    config = PLANTED[name][0] if name else COLUMNS
    launch = launch_on(kernels, order, (config.name, name or config.name))

    def judged(problem: Any) -> Sequence[str]:
        if isinstance(problem, Shape):
            return factored(problem, launch, beside=True)[1]
        return judged_faults(*problem, launch)

    steps = [(b, "float64", seed) for b, seed in itertools.product((3, 33, 64, 128), range(8))]
    small = [Shape(70, 143, 40, "float64"), Shape(103, 70, 40, "float64")]
    if isinstance(config, SumModuli):
        small = [Shape(1100, 2, 2, "float64"), Shape(2, 1100, 2, "float64")]
    problems = [*(steps if isinstance(config, JudgeStep) else ()), *small]
    return first_complaint(problems, judged)


@in_every_order("name", PLANTED)
def test_planted_faults_are_caught(faulty: Libraries, name: str, order: str) -> None:
    assert what_is_found(faulty, name, order) != "nothing"


@pytest.mark.parametrize("order", ORDERS)
def test_without_them_nothing_is_found(faulty: Libraries, order: str) -> None:
    assert what_is_found(faulty, "", order) == "nothing"
