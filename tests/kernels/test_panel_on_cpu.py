"""panel.cu on the CPU, in drawn orders of threads and messages: pivots, factors, inverse, exchanges; and planted faults."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy.linalg import hadamard

from abft_tsm2.linalg.panel_config import COLUMNS, PanelConfig
from tests.support.cluster_on_cpu import FAULTS, ClusterFault, build
from tests.support.libraries import some

DTYPES = ("float64", "float32")
CONFIGS = [PanelConfig.of(dtype, m) for dtype in DTYPES for m in (1, 5000, 10000, 20000)]
CONFIGS = [config for config in CONFIGS if config is not None]
Launch = Callable[..., None]


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

    W: np.ndarray  # ld x (k + b + 3), of which m rows and columns k to k + b count
    m: int
    k: int
    b: int
    piv: np.ndarray
    order0: np.ndarray
    order1: np.ndarray
    places1: np.ndarray
    inv: np.ndarray
    inv_norm: np.ndarray
    info: np.ndarray
    started: np.ndarray

    @classmethod
    def of(cls, A: np.ndarray, k: int, rng: np.random.Generator, gap: int = 0) -> Panel:
        """With A as the panel, NaN in the rows between m and ld and something in all other places."""
        (rows, b), step = A.shape, 16 // A.itemsize
        m = k + rows
        ld = -(-m // step) * step + gap * step
        W = _aligned((ld, k + b + 3), A.dtype)
        W[...] = rng.standard_normal(W.shape)
        W[m:] = np.nan
        W[k:m, k : k + b] = A
        order0 = rng.permutation(m).astype(np.int32)
        empty = [np.full(m, -7, np.int32) for _ in range(2)]
        inv = np.full((COLUMNS, COLUMNS), 99, A.dtype, order="F")
        counts = np.zeros(1, np.int32), np.zeros(1, np.uint32)
        return cls(W, m, k, b, np.full(k + b + 2, -7, np.int32), order0, *empty, inv, np.full(1, -1.0), *counts)

    def factor(
        self, config: PanelConfig, launch: Launch, seed: int, fault: tuple[str, int] = ("none", 0), warps: int = 0
    ) -> None:
        moved = np.zeros(COLUMNS, np.int32)
        sizes = [self.W, self.W.shape[0], self.m, self.k, self.b, self.piv, self.order0, self.order1, self.places1]
        rest = [self.inv, self.inv_norm, moved, self.info, self.started, 77]
        threads = 32 * warps or config.threads(self.m - self.k)
        launch(threads, config.shared_bytes, [*sizes, *rest], seed, fault)

    @property
    def factors(self) -> np.ndarray:
        """Rows k to m of the panel."""
        return self.W[self.k : self.m, self.k : self.k + self.b]


def _aligned(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Column-major, from a multiple of 16 bytes on, with room behind."""
    size = shape[0] * shape[1]
    raw = np.zeros(size * dtype.itemsize + 64, np.uint8)
    start = -raw.__array_interface__["data"][0] % 16
    return raw[start : start + size * dtype.itemsize].view(dtype).reshape(shape, order="F")


def getf2(A: np.ndarray) -> tuple[np.ndarray, list[int], int]:
    """LAPACK's unblocked factors of a copy, its pivots, and info."""
    A, pivots, info = A.copy(), [], 0
    rows, b = A.shape
    tiny = np.finfo(A.dtype).tiny
    with np.errstate(all="ignore"):
        for j in range(b):
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

    # |P A - L U| <= gamma_b |L| |U| (Higham, 2002, theorem 9.3); |L11 X - I| <= gamma_b |L11| |X| (section 14.2)
    with np.errstate(all="ignore"):
        exact = panel.factors.astype(np.longdouble)
        L, U = np.tril(exact, -1)[:, :b] + np.eye(rows, b), np.triu(exact[:b])
        places = np.arange(rows)
        for j, p in enumerate(pivots):
            places[[j, p]] = places[[p, j]]
        bound = 2 * (b + 2) * eps * (abs(L) @ abs(U)) + (b + 2) * np.finfo(A.dtype).smallest_subnormal
        error = abs(A[places] - L @ U)
        finite = np.isfinite(L @ U) & np.isfinite(A[places])
        check(f"L U is off by {np.nanmax((error / bound)[finite], initial=0):.3g} bounds", (error <= bound)[finite].all())
        check("|L| > 1", not (abs(L) > 1 + 4 * eps).any())
        X = panel.inv[:b, :b].astype(np.longdouble)
        bound = 2 * (b + 2) * eps * (abs(L[:b]) @ abs(X))
        finite = np.isfinite(X) & np.isfinite(bound)
        error = abs(L[:b] @ X - np.eye(b))
        check(f"L11 X is off by {(error / bound)[finite].max(initial=0):.3g} bounds", (error <= bound)[finite].all())
        untouched = panel.inv.copy()
        untouched[:b, :b] = 99
        check("inv outside", (untouched == 99).all())
        norm = float(abs(panel.inv[:b, :b]).max())
        check(f"inv_norm {panel.inv_norm} instead of {norm}", panel.inv_norm[0] == (np.inf if np.isnan(norm) else norm))
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

    A = L U, where a row of L ends with 1 or -1 in the column that the row belongs to and has 0 and halves before it. Rows
    that belong to column j are the candidates of step j, and 0 after it, whichever of them is chosen.
    """
    of_column = np.concatenate([np.arange(b), rng.integers(0, b, rows - b)])
    L = np.where(np.arange(b) < of_column[:, None], rng.integers(-1, 2, (rows, b)) / 2, 0)
    L[np.arange(rows), of_column] = rng.choice([-1, 1], rows)
    U = np.triu(rng.integers(-2, 3, (b, b)), 1) + np.diag(rng.choice([-2, -1, 1, 2], b))
    return (L @ U)[rng.permutation(rows)].astype(dtype)


def scaled(exponent: int) -> Callable[..., np.ndarray]:
    def family(rows: int, b: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
        return np.ldexp(gaussian(rows, b, dtype, rng), exponent).astype(dtype)

    return family
