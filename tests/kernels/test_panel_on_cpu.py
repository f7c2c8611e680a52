"""panel.cu on the CPU, in drawn orders of threads and messages: pivots, factors, exchanges; planted faults."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abft_tsm2.linalg.device.panel_config import PanelConfig
from abft_tsm2.linalg.device.schedule import PANEL
from tests.support.cluster_on_cpu import FAULTS, ClusterFault, build
from tests.support.libraries import some

DTYPES = ("float64", "float32")
CONFIGS = [config for dtype in DTYPES for m in (1, 5000, 10000, 20000) if (config := PanelConfig.of(dtype, m))]
Launch = Callable[..., None]
ROOM = 1 << 20


@pytest.fixture(scope="session")
def launches(build_cache: Path) -> Callable[[PanelConfig], Launch]:
    made: dict[PanelConfig, Launch] = {}

    def launch(config: PanelConfig) -> Launch:
        if config not in made:
            made[config] = build(config, build_cache)
        return made[config]

    return launch


# ---- a panel, what the kernel makes of it, and what LAPACK would -----------------------------------------------------


@dataclass
class Panel:
    """W with a panel at k, and all that the kernel writes."""

    W: np.ndarray  # ld x (k + b) or some more columns, of which m rows and columns k to k + b count
    m: int
    k: int
    b: int
    piv: np.ndarray
    order0: np.ndarray
    order1: np.ndarray
    places1: np.ndarray
    info: np.ndarray
    started: np.ndarray

    @classmethod
    def of(cls, A: np.ndarray, k: int, rng: np.random.Generator, gap: int = 0) -> Panel:
        """With A as the panel, NaN in the rows between m and ld and something in all other places."""
        (rows, b), step = A.shape, 16 // A.itemsize
        m = k + rows
        ld = -(-m // step) * step + gap * step
        W = _before_a_guard((ld, k + b + 3 * (gap != 1)), A.dtype)
        W[...] = rng.standard_normal(W.shape)
        W[m:] = np.nan
        W[k:m, k : k + b] = A
        order0 = rng.permutation(m).astype(np.int32)
        piv, order1, places1 = (_with_room(np.full(count, -7, np.int32)) for count in (k + b + 2, m, m))
        info, started = _with_room(np.zeros(1, np.int32)), _with_room(np.zeros(1, np.uint32))
        return cls(W, m, k, b, piv, order0, order1, places1, info, started)

    def factor(
        self, config: PanelConfig, launch: Launch, seed: int, fault: tuple[str, int] = ("none", 0), warps: int = 0
    ) -> None:
        moved = _with_room(np.zeros(PANEL, np.int32))
        sizes = [self.W, self.W.shape[0], self.m, self.k, self.b, self.piv, self.order0, self.order1, self.places1]
        rest = [moved, self.info, self.started, 77]
        threads = 32 * warps or config.threads(self.m - self.k)
        launch(threads, config.shared_bytes, [*sizes, *rest], seed, fault)

    @property
    def factors(self) -> np.ndarray:
        """Rows k to m of the panel."""
        return self.W[self.k : self.m, self.k : self.k + self.b]


def _before_a_guard(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Column-major; behind its end lies what must not be touched, before it room for what a fault writes: rows that a
    fault makes up are of 16 bits."""
    size = shape[0] * shape[1] * dtype.itemsize
    pages = -(-(size + ROOM) // mmap.PAGESIZE) * mmap.PAGESIZE
    raw = np.frombuffer(mmap.mmap(-1, pages + ROOM), np.uint8)
    address = raw.__array_interface__["data"][0] + pages
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(ROOM), 0) == 0
    return raw[pages - size : pages].view(dtype).reshape(shape, order="F")


def _with_room(x: np.ndarray) -> np.ndarray:
    """A copy, with room on both sides: a fault may write at a place that no row has, and not into Python's memory."""
    raw = np.frombuffer(mmap.mmap(-1, 2 * ROOM + x.nbytes), np.uint8)
    copy = raw[ROOM : ROOM + x.nbytes].view(x.dtype)
    copy[:] = x
    return copy


def getf2(A: np.ndarray) -> tuple[np.ndarray, list[int], int]:
    """LAPACK's unblocked factors of a copy, its pivots, and info."""
    A, pivots, info = A.copy(), [], 0
    tiny = np.finfo(A.dtype).tiny
    with np.errstate(all="ignore"):
        for j in range(A.shape[1]):
            size = abs(A[j:, j])
            p = j if np.isnan(size[0]) else j + int(np.argmax(np.where(np.isnan(size), -1, size)))
            pivots.append(p)
            if A[p, j] == 0:
                info = info or j + 1
            else:
                A[[j, p]] = A[[p, j]]
                pivot = A[j, j]
                A[j + 1 :, j] = A[j + 1 :, j] * (1 / pivot) if abs(pivot) >= tiny else A[j + 1 :, j] / pivot
            A[j + 1 :, j + 1 :] -= np.outer(A[j + 1 :, j], A[j, j + 1 :])
    return A, pivots, info


def faults_of(panel: Panel, before: Panel, A: np.ndarray) -> list[str]:
    """What is wrong with the factors of A; elements that are not finite are not looked at."""
    k, b, m = panel.k, panel.b, panel.m
    rows, eps = m - k, float(np.finfo(A.dtype).eps)
    _, pivots, info = getf2(A)
    found = []

    def check(what: str, fine: bool) -> None:
        if not fine:
            found.append(what)

    got = panel.piv[k : k + b] - k
    check(f"pivots {got} instead of {np.array(pivots)}", got.tolist() == pivots)
    check("piv elsewhere", (np.delete(panel.piv, np.s_[k : k + b]) == -7).all())
    check(f"info {panel.info} instead of {info}", panel.info[0] == (info and k + info))
    check("token", panel.started[0] == 77)
    order = before.order0.copy()
    for j, p in enumerate(pivots):
        order[[k + j, k + p]] = order[[k + p, k + j]]
    check("order1", (panel.order1 == order).all())
    check("places1", (panel.places1[order] == np.arange(m)).all())
    outside = panel.W.copy(), before.W.copy()
    for W in outside:
        W[k:m, k : k + b] = 0
    check("W outside of the panel", outside[0].tobytes("F") == outside[1].tobytes("F"))
    if found:
        return found  # the rest would only say so again

    # |P A - L U| <= gamma_b |L| |U| (Higham, 2002, theorem 9.3)
    with np.errstate(all="ignore"):
        exact = panel.factors.astype(np.longdouble)
        L, U = np.tril(exact, -1)[:, :b] + np.eye(rows, b), np.triu(exact[:b])
        places = np.arange(rows)
        for j, p in enumerate(pivots):
            places[[j, p]] = places[[p, j]]
        bound = 2 * (b + 2) * eps * (abs(L) @ abs(U)) + (b + 2) * np.finfo(A.dtype).smallest_subnormal
        error = abs(A[places] - L @ U)
        finite = np.isfinite(L @ U) & np.isfinite(A[places])
        check(
            f"L U is off by {np.nanmax((error / bound)[finite], initial=0):.3g} bounds", (error <= bound)[finite].all()
        )
        check("|L| > 1", not (abs(L) > 1 + 4 * eps).any())
    return found


def factored(
    A: np.ndarray, config: PanelConfig, launch: Launch, seed: int, k: int = 0, gap: int = 0, warps: int = 0
) -> tuple[Panel, list[str]]:
    """A's panel after the kernel, and what is wrong with it."""
    panel, before = (Panel.of(A, k, np.random.default_rng(seed), gap) for _ in range(2))
    panel.factor(config, launch, seed, warps=warps)
    return panel, faults_of(panel, before, A)


# ---- families of panels ----------------------------------------------------------------------------------------------


def gaussian(rows: int, b: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((rows, b)).astype(dtype)


def ties(rows: int, b: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Exact arithmetic, and pivots that are often one of several equal ones.

    A = L U, where a row of L ends with 1 or -1 in the column that the row belongs to and has 0 and halves before it.
    Rows that belong to column j are the candidates of step j, and 0 after it, whichever of them is chosen.
    """
    of_column = np.concatenate([np.arange(b), rng.integers(0, b, rows - b)])
    L = np.where(np.arange(b) < of_column[:, None], rng.integers(-1, 2, (rows, b)) / 2, 0)
    L[np.arange(rows), of_column] = rng.choice([-1, 1], rows)
    U = np.triu(rng.integers(-2, 3, (b, b)), 1) + np.diag(rng.choice([-2, -1, 1, 2], b))
    return (L @ U)[rng.permutation(rows)].astype(dtype)


def with_zero_columns(rows: int, b: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    A = gaussian(rows, b, dtype, rng)
    A[:, rng.random(b) < 0.2] = 0
    return A


def graded(rows: int, b: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Columns of which some have pivots whose reciprocals are no normal numbers."""
    exponents = {"float64": (-1032, 0, 1020), "float32": (-130, 0, 124)}[dtype]
    return np.ldexp(gaussian(rows, b, dtype, rng), rng.choice(exponents, b)).astype(dtype)


def nearly_ties(rows: int, b: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """In double, candidates that differ in their low words alone; in float, equal ones."""
    apart = {"float64": 2.0**-40, "float32": 0}[dtype]
    return (ties(rows, b, "float64", rng) * (1 + apart * rng.permutation(rows)[:, None])).astype(dtype)


FAMILIES = (gaussian, ties, with_zero_columns, graded, nearly_ties)
SHAPES = [(128, 128, 0), (1, 1, 128), (5, 5, 0), (600, 41, 128), (9, 8, 0), (47, 33, 128), (130, 97, 128), (129, 17, 0)]
named = {"ids": lambda x: getattr(x, "name", x)}


@pytest.mark.parametrize("config", CONFIGS, **named)
def test_pivots_factors_and_exchanges(launches, config: PanelConfig) -> None:
    rng = np.random.default_rng(CONFIGS.index(config))
    for number, (rows, b, k) in enumerate(SHAPES):
        if (number, CONFIGS.index(config) % 2) in ((0, 1), (6, 0)):  # the large ones by turns
            continue
        family = FAMILIES[(number + number // 4 + CONFIGS.index(config)) % len(FAMILIES)]
        A = family(rows, b, config.dtype, rng)
        _, found = factored(A, config, launches(config), number, k, number % 3)
        assert not found, f"{family.__name__} {rows} x {b} at {k}"


@settings(max_examples=20)
@given(
    config=st.sampled_from(CONFIGS),
    rows=st.integers(1, 400),
    b=st.integers(1, PANEL),
    k=st.sampled_from([0, 128]),
    gap=st.integers(0, 3),
    family=st.sampled_from(FAMILIES),
    warps=st.sampled_from([4, 4, 5, 8]),
    seed=st.integers(0, 2**32),
)
def test_drawn_panels(launches, config, rows, b, k, gap, family, warps, seed):
    A = family(max(rows, b), b, config.dtype, np.random.default_rng(seed))
    _, found = factored(A, config, launches(config), seed, k, gap, warps)
    assert not found


@pytest.mark.parametrize("config", CONFIGS, **named)
def test_a_panel_of_several_full_blocks(launches, config: PanelConfig) -> None:
    rows = 4 * 8 * config.rows_a_lane * 2 + 3  # of two blocks, and a little
    for family in (gaussian, ties):
        A = family(rows, 19, config.dtype, np.random.default_rng(rows))
        assert not factored(A, config, launches(config), rows)[1]


def test_numbers_do_not_depend_on_the_order_of_messages(launches) -> None:
    for config in CONFIGS[::3]:
        A = gaussian(150, 45, config.dtype, np.random.default_rng(3))
        made = []
        for seed in range(4):
            panel = Panel.of(A, 0, np.random.default_rng(3))
            panel.factor(config, launches(config), seed)
            made.append((panel.W.tobytes(), panel.piv.tobytes()))
        assert len(set(made)) == 1


# ---- numbers at the ends of the range --------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, **named)
def test_pivots_whose_reciprocals_overflow(launches, config: PanelConfig) -> None:
    """The smallest number of all as a pivot; pivots near the largest one; multipliers that are themselves subnormal."""
    info = np.finfo(config.dtype)
    tiny, huge = float(info.smallest_subnormal), float(info.max)
    A = np.array([[tiny, 1, 2], [-3 * tiny, 5, 6], [2 * tiny, 3, 1], [0, 1, 1]], config.dtype)
    B = np.array([[huge, 1, 2], [-huge / 2, 5, 6], [0, 3, 1], [tiny, 1, 1]], config.dtype)
    for matrix in (A, B, A[:, :1], B[:, :1], A[::-1].copy(), B[::-1].copy()):
        panel, found = factored(matrix, config, launches(config), 1)
        assert not found
        expected, _, _ = getf2(matrix)
        np.testing.assert_allclose(panel.factors, expected, rtol=8 * info.eps, atol=2 * tiny)
    thirds = (np.array([[3], [1], [2], [-1]]) * tiny).astype(config.dtype)
    panel, _ = factored(thirds, config, launches(config), 2)
    np.testing.assert_allclose(panel.factors[1:, 0], np.array([1, 2, -1]) / 3, rtol=4 * info.eps)


def test_info_is_the_first_zero_pivot_of_all_panels(launches) -> None:
    for config in CONFIGS[::3]:
        A = gaussian(30, 9, config.dtype, np.random.default_rng(8))
        A[:, [4, 7]] = 0
        for earlier in (0, 3):
            panel = Panel.of(A, 128, np.random.default_rng(8))
            panel.info[0] = earlier
            panel.factor(config, launches(config), 5)
            assert panel.info[0] == (earlier or 128 + 4 + 1)
            assert (panel.piv[[128 + 4, 128 + 7]] == [128 + 4, 128 + 7]).all()  # no exchange
            assert (panel.factors[5:, 4] == 0).all()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("config", CONFIGS[::3], **named)
def test_what_is_not_finite(launches, config: PanelConfig, value: float) -> None:
    """NaN is the pivot where it stands first and nowhere else, infinity is the largest: so idamax of the BLAS."""
    places = [
        [(0, 0)],
        [(5, 0)],
        [(3, 3)],
        [(30, 7)],
        [(0, 0), (9, 0)],
        [(9, 2), (4, 20)],
        [(2, 38), (39, 38)],
        [(1, 9)],
    ]
    for number, where in enumerate(places):
        A = gaussian(40, 39, config.dtype, np.random.default_rng(number))
        for place in where:
            A[place] = value
        if number == 7:  # nothing but zeros beside it
            A[np.arange(40) != 1, 9] = 0
            A[:, :9] = 0
        panel, found = factored(A, config, launches(config), number)
        assert not found, where
        with np.errstate(all="ignore"):
            expected, _, _ = getf2(A)
        below = np.tri(40, 39, -1, bool)
        kinds = [np.where(np.isnan(x), 2, np.where(np.isinf(x), 1, 0)) for x in (panel.factors, expected)]
        assert (kinds[0] == kinds[1])[below].all(), where
        wrong = (np.isfinite(expected) > np.isfinite(panel.factors)) & ~below
        for i, j in np.argwhere(wrong):  # above what is not finite in a tile of U, elements may be lost
            assert not np.isfinite(expected[i + 1 : min(j, i | 7) + 1, j]).all(), (where, i, j)


# ---- faults ----------------------------------------------------------------------------------------------------------

PLANTED = [
    *(("no_cluster_barrier", number) for number in range(4)),
    *(("no_block_barrier", number) for number in (0, 1, 7, 8, 30)),
    *(("wrong_parity", number) for number in (0, 1, 2, 9, 25)),
    *(("lost_message", number) for number in (0, 5, 900)),
    *(("early_end", number) for number in range(4)),
    *(("expected_twice", number) for number in (0, 40, 100)),
]


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: f"{fault[0]}-{fault[1]}")
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-2]], **named)
def test_planted_faults_are_found(launches, config: PanelConfig, fault: tuple[str, int]) -> None:
    A = gaussian(300, 40, config.dtype, np.random.default_rng(2))
    for seed in range(1, 13):
        panel, before = (Panel.of(A, 0, np.random.default_rng(2)) for _ in range(2))
        try:
            panel.factor(config, launches(config), seed, fault)
        except ClusterFault:
            return
        if faults_of(panel, before, A):
            return
    pytest.fail("nothing was found")


def test_every_fault_is_planted() -> None:
    assert {name for name, _ in PLANTED} == set(FAULTS) - {"none"}


# Kernel text that is replaced, by what, and a family of panels that shows it.
CHANGES = {
    "largest place of equals in a lane": ("(l == low && place[u] < at)", "(l == low && place[u] > at)", ties),
    "largest place of equals in a warp": (
        "smallest_of_warp(equal ? place : ~0u)",
        "largest_of_warp(equal ? place : 0)",
        ties,
    ),
    "no low words": ("rank_of_nan(of_block.x == ~0u, high, low);", "low = 0;", nearly_ties),
    "never scaled": ("high < SMALLEST_NORMAL ? Real(0x1p64) : Real(0x1p-64);", "1;", graded),
    "subnormal reciprocals": ("WIDTH == 8 ? 0x7fc00000u", "WIDTH == 8 ? 0x7fefffffu", graded),
    "last info": ("*info == 0) *info", "*info >= 0) *info", with_zero_columns),
    "rows beyond m": ("if (int(place[u]) < rows) active", "active", gaussian),
    "columns beyond b": ("if (c < b && warp_row", "if (warp_row", gaussian),
    "columns beyond b above": ("z < K && c + r < b ?", "z < K ?", gaussian),
    "expects beyond b": ("threadIdx.x == 0 && J + 2 < b)", "threadIdx.x == 0)", gaussian),
    "another rounding of U": ("at_start = active;", "at_start = t ? at_start : active;", nearly_ties),
}


@pytest.mark.parametrize("change", some(CHANGES, 4))
def test_changes_of_the_kernel_are_found(build_cache: Path, change: str) -> None:
    config = CONFIGS[1]  # two rows a lane
    old, new, family = CHANGES[change]
    launch = build(config, build_cache, (old, new))
    for seed in range(1, 9):
        A = family(299, 43, config.dtype, np.random.default_rng(seed))
        try:
            if factored(A, config, launch, seed, 0, 1)[1]:
                return
        except ClusterFault:
            return
    pytest.fail("nothing was found")
