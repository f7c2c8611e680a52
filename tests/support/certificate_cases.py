"""Finished factors as the kernels of a certificate take them, and what certify.py says of the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.linalg

from abft_tsm2.arrays import FLOATS
from abft_tsm2.checksum.bounds import FLOOR_TERMS, factored_bound
from abft_tsm2.linalg.certify import read
from abft_tsm2.linalg.device.certificate_config import COUNTS, PANEL, TYPED, CertificateKernel, Tiles, constants
from abft_tsm2.linalg.device.check_config import ROOM, initial_state
from abft_tsm2.linalg.encode import MatrixChecksums
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.lu_checks import ROWS, LuChecksums
from tests.support.cuda_on_cpu.library import _Address
from tests.support.planting import kept

NOTHING = _Address(0)
"""A null pointer."""
Launch = Callable[[str, tuple[int, ...], int, tuple[Any, ...]], None]
"""Kernel, grid, threads, arguments."""
ROUTINES = (
    "factor_sums",
    "add_factor_parts",
    "count_growth",
    "judge_factors",
    "compare_sums",
    "replay_pivots",
    "least_weights",
    "see_all",
)
KERNELS = [
    *(
        CertificateKernel(routine, dtype)
        for routine in ROUTINES
        for dtype in ("float64", "float32")[: 1 + (routine in TYPED)]
    ),
    *(CertificateKernel("factor_sums", dtype, norms=True) for dtype in ("float64", "float32")),
    CertificateKernel("judge_factors", norms=True),
]
RIGHT_ROWS, RIGHT_COLUMNS, SMALL_MULTIPLIERS, SAME_COLUMNS, SAME_ROWS, RIGHT_PANELS, SEES_ALL = 0, 1, 2, 4, 5, 6, 7


def snapshots(pivots: np.ndarray, m: int) -> np.ndarray:
    """The order of rows before each panel, and after the last one: (P + 1, m)."""
    order, found = np.arange(m, dtype=np.int32), []
    for at, pivot in enumerate(pivots.tolist()):
        if at % PANEL == 0:
            found.append(order.copy())
        order[[at, pivot]] = order[[pivot, at]]
    return np.stack([*found, order])


@dataclass
class Factors:
    """A matrix, its factors in memory of `ld` rows a column, and all that is known of them on the host.

    What lies in the rows from m on is NaN: it must not count.
    """

    A: np.ndarray
    dtype: str
    multiprocessors: int = 1
    W: np.ndarray = field(init=False)
    pivots: np.ndarray = field(init=False)
    orders: np.ndarray = field(init=False)
    carried: LuChecksums = field(init=False)

    def __post_init__(self) -> None:
        m, n = self.A.shape
        packed, pivots = scipy.linalg.lu_factor(self.A)
        unit = 16 // self.A.itemsize
        self.ld = -(-m // unit) * unit + unit
        self.W = np.full((n, self.ld), np.nan, self.dtype).T
        self.W[:m] = packed
        self.pivots = pivots.astype(np.int32)
        self.orders = snapshots(self.pivots, m)
        self.carried = LuChecksums(self.A, MatrixChecksums.of(self.A), self.W[:m])
        assert self.carried.order_by(self.pivots)
        self.refresh()

    def refresh(self) -> None:
        """Take the sums of the factors as they are now."""
        K, carried = min(self.A.shape), self.carried
        carried.g[...], carried.y[...] = read(carried.W, carried, K, K)
        carried.growth, carried.done = 1.0, list(initial_state(FLOATS[self.dtype], *self.A.shape)[1:])
        carried.count_operations()

    @property
    def order(self) -> np.ndarray:
        return self.orders[-1].copy()

    @property
    def tiles(self) -> Tiles:
        return Tiles.of(self.dtype, *self.A.shape, self.multiprocessors)

    @property
    def constants(self) -> np.ndarray:
        return kept(constants(FLOATS[self.dtype], *self.A.shape), ROOM)

    def judged(self, Ly: np.ndarray, gU: np.ndarray) -> list[LineCheck]:
        """What `certificate` says of rows and columns before it computes norms."""
        carried, K = self.carried, min(self.A.shape)
        sides = (Ly, carried.encoding.S[carried.place], carried.rows[:, ROWS.floor]), (gU, carried.Z, carried.floor)
        found = []
        for side, (now, then, floor) in enumerate(sides):
            reach = carried.reach(side, floor, 0.0, FLOOR_TERMS, then)
            bound = factored_bound(carried.type, reach, K, carried.moduli[1 - side])
            found.append(LineCheck.of(now - then, bound))
        return found

    @property
    def lower(self) -> np.ndarray:
        """L in float64, (m, K)."""
        m, n = self.A.shape
        return np.tril(self.W[:m, : min(m, n)], -1).astype(float) + np.eye(m, min(m, n))

    @property
    def upper(self) -> np.ndarray:
        return np.triu(self.W[: min(self.A.shape)]).astype(float)


def factors(m: int, n: int, dtype: str, seed: int = 0, multiprocessors: int = 1, *, scaled: bool = False) -> Factors:
    """Of a matrix of normal numbers; `scaled`: rows and columns of different sizes."""
    rng = np.random.default_rng([seed, m, n])
    A = rng.standard_normal((m, n))
    if scaled:
        A *= 10.0 ** rng.integers(-1, 2, (m, 1)) * 10.0 ** rng.integers(-1, 2, n)
    return Factors(np.asfortranarray(A.astype(dtype)), dtype, multiprocessors)


class OnKernels:
    """What the kernels find of factors: each method launches what it is named after.

    `norms`: whether those are taken into account.
    """

    def __init__(self, of: Factors, launch: Launch, *, norms: bool = False) -> None:
        self.of, self._launch, self._norms = of, launch, norms
        self.m, self.n = of.A.shape
        self.K = min(of.A.shape)
        e = of.carried.encoding
        self.w, self.v, self.S, self.Z = (x.copy() for x in (e.w, e.v, e.S, e.Z))
        self.row_floor, self.column_floor = e.row_norms.copy(), e.column_norms.copy()
        self.moduli = np.array(of.carried.moduli)
        self.state = np.array(initial_state(FLOATS[of.dtype], self.m, self.n))
        self.verified, self.differs = np.zeros(COUNTS, np.uint64), np.full(self.K, np.nan)
        self.constants, self.orders, self.pivots = of.constants, of.orders.copy(), of.pivots.copy()
        self.row_largest, self.column_largest = (np.max(abs(of.A), axis=axis) for axis in (1, 0))

    def launch(self, routine: str, *args: Any, grid: tuple[int, ...] | None = None, norms: bool = False) -> None:
        kernel = CertificateKernel(routine, self.of.dtype, norms)
        self._launch(kernel.name, grid or kernel.grid(self.m, self.n), kernel.threads, args)

    def _sums(self, lines: tuple[int, int], ends: Any, sums: tuple[Any, Any], made: list[Any], *, norms: bool) -> None:
        tiles, (m, n) = self.of.tiles, (self.m, self.n)
        parts = 3 * tiles.column_parts, 3 * tiles.row_parts, tiles.column_parts
        columns, rows, largest = (np.full(x, np.nan) for x in parts)
        order, W = (self.orders[-1] if ends is None else self.orders).copy(), self.of.W
        of_lines = m, n, *lines, order, NOTHING if ends is None else ends
        args = W, W.shape[0], *of_lines, self.w, self.v, *sums, columns, rows, largest
        self.launch("factor_sums", *args, grid=tiles.grid, norms=norms)
        count = (m, n) if norms else (lines[1] - lines[0],) * 2
        grid = CertificateKernel("add_factor_parts", norms=norms).grid(*count)
        sizes = *tiles.grid, *tiles.at(lines[0]), *of_lines
        self.launch("add_factor_parts", columns, rows, largest, *sizes, self.w, sums[1], *made, grid=grid, norms=norms)

    def read(self, first: int = 0, last: int = 0, ends: Any = None) -> tuple[np.ndarray, ...]:
        """w'L, U v, and the largest elements of L's columns: of some lines, by default all. `ends`: where these have
        arrived, for the orders of all panels."""
        found = [np.full(self.K, np.nan) for _ in range(3)]
        self._sums((first, last or self.K), ends, (NOTHING, NOTHING), [*found, NOTHING, NOTHING], norms=False)
        return tuple(found)

    def whole(self, g: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
        """g U and L y, behind them sums of squares; w'L, U v and the largest elements of L's columns."""
        found = [np.full(self.K, np.nan) for _ in range(3)]
        products = [np.full(2 * size, np.nan) for size in (self.n, self.m)]
        self._sums((0, self.K), None, (g, y), [*found, *products], norms=True)
        return (*products, *found)

    def product_sums(self, g: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
        """g U and L y; behind them, with norms, the sums of squares."""
        gU, Ly, *_ = self.whole(g, y)
        return (gU, Ly) if self._norms else (gU[: self.n].copy(), Ly[: self.m].copy())

    def count_growth(self, y: np.ndarray) -> None:
        args = y, self.orders[-1].copy(), self.row_floor, self.m, self.n, self.constants, self.state
        self.launch("count_growth", *args)

    def judge_factors(self, Ly: np.ndarray, gU: np.ndarray, largest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Residuals and bounds, rows in [0], columns in [1]."""
        shape = 2, max(self.m, self.n)
        residuals, bounds = np.zeros(shape), np.zeros(shape)
        known = self.orders[-1].copy(), self.S, self.Z, self.row_floor, self.column_floor, largest, self.moduli
        out = residuals, bounds, self.verified
        args = self.state, self.m, self.n, self.constants, *out
        self.launch("judge_factors", Ly, gU, *known, *args, norms=self._norms)
        return residuals, bounds

    def compare_sums(self, wL: np.ndarray, g: np.ndarray, Uv: np.ndarray, y: np.ndarray) -> None:
        W = self.of.W
        known = self.column_floor, self.row_floor, self.w, self.orders[-1].copy(), self.m, self.K
        out = self.verified, self.differs
        self.launch("compare_sums", wL, g, Uv, y, W, W.shape[0], *known, self.constants, *out)

    def replay_pivots(self) -> None:
        self.launch("replay_pivots", self.pivots, self.orders, self.m, self.K, self.verified)

    def see_all(self, bounds: np.ndarray) -> None:
        """`bounds`: of the certificate."""
        least, largest = np.full(4, np.nan), (self.row_largest, self.column_largest)
        sizes = self.m, self.n, self.constants
        self.launch("least_weights", self.w, self.v, *largest, *sizes, least)
        self.launch("see_all", self.orders[-1].copy(), *largest, least, *sizes, bounds, self.verified)

    def certify(self) -> list[int]:
        """All of it, of factors of which only the result is known, compared with what is read again: `verified`."""
        g, y, _ = self.read()
        self.count_growth(y)
        gU, Ly, *again, largest = self.whole(g, y)
        if not self._norms:
            gU, Ly = gU[: self.n].copy(), Ly[: self.m].copy()
        bounds = self.judge_factors(Ly, gU, largest)[1]
        self.compare_sums(again[0], g, again[1], y)
        self.replay_pivots()
        self.see_all(bounds)
        return [int(x) for x in self.verified]
