"""Positive definite matrices and their factors as the kernels of a certificate take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg

from abft_tsm2.arrays import FLOATS
from abft_tsm2.checksum.bounds import FLOOR_TERMS
from abft_tsm2.linalg import cholesky
from abft_tsm2.linalg.cholesky_checks import base_weights
from abft_tsm2.linalg.device.cholesky_config import (
    AddTriangleParts,
    CopyTriangle,
    DefiniteSizes,
    DefiniteWeights,
    JudgeDefinite,
    TriangleSums,
    TriangleTiles,
    tolerances,
)
from tests.support.planting import kept, normal

DTYPES = ("float64", "float32")
HALVES = (True, False)
COPIES = [
    *(CopyTriangle(dtype, lower) for dtype in DTYPES for lower in HALVES),
    *(
        CopyTriangle(dtype, lower, diagonal=False, read=read, zero=zero)
        for dtype in DTYPES
        for lower in HALVES
        for read, zero in ((True, True), (False, True), (True, False))
    ),
]
SUMS = [
    make(dtype, lower)
    for make in (TriangleSums.of_matrix, TriangleSums.of_factor, TriangleSums.of_product)
    for dtype in DTYPES
    for lower in HALVES
]
KERNELS = [
    *COPIES,
    *SUMS,
    AddTriangleParts(),
    DefiniteSizes(),
    *(kernel(dtype) for kernel in (DefiniteWeights, JudgeDefinite) for dtype in DTYPES),
]

Launch = Callable[[str, tuple[int, ...], int, tuple[Any, ...]], None]
"""Kernel, grid, threads, arguments."""


def wishart(n: int) -> np.ndarray:
    x = normal(n, n + 3)
    return x @ x.T


def graded(n: int) -> np.ndarray:
    scale = np.logspace(-9, 9, n)[np.random.default_rng(1).permutation(n)]
    return scale[:, None] * wishart(n) * scale


def equal(n: int) -> np.ndarray:
    return np.full((n, n), 0.75) + 0.25 * np.eye(n)


def second_difference(n: int) -> np.ndarray:
    return 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)


def smooth(n: int) -> np.ndarray:
    """A covariance that decays fast: most of what is left of it is tiny."""
    x = np.linspace(0, 4, n)
    return np.exp(-((x[:, None] - x) ** 2)) + 1e-4 * np.eye(n)


def block_diagonal(n: int) -> np.ndarray:
    return np.kron(np.eye(-(-n // 5)), wishart(5))[:n, :n]


def arrow(n: int) -> np.ndarray:
    """Everything is filled in: what is left of it is larger than A."""
    a = np.eye(n)
    a[0, 1:] = a[1:, 0] = 0.99 / np.sqrt(n)
    return a


def scattered(n: int) -> np.ndarray:
    """A with small elements and factors that cancel."""
    x = scipy.linalg.hadamard(1 << max(0, (n - 1).bit_length()))[:n, :n] / np.sqrt(n)
    return x @ x.T + 0.01 * np.eye(n)


MATRICES = {
    "normal": wishart,
    "graded": graded,
    "equal": equal,
    "second difference": second_difference,
    "smooth": smooth,
    "block diagonal": block_diagonal,
    "diagonal": lambda n: np.diag(np.logspace(-30, 30, n)),
    "arrow": arrow,
    "scattered": scattered,
}


class OnKernels:
    """What the kernels make of a matrix and its factor: each method launches what it is named after.

    Parameters
    ----------
    a : (n, n) array
        Symmetric.
    dtype : {"float64", "float32"}
    lower : bool
        Which triangle is factored; the other one of A, and what lies between columns, is NaN, in L it is 7.
    turned : bool
        Whether A's rows are contiguous, and not its columns.
    """

    def __init__(
        self, a: np.ndarray, dtype: str, launch: Launch, *, lower: bool = True, turned: bool = False, cards: int = 1
    ) -> None:
        self.n, self.dtype, self.lower, self.turned, self._launch = len(a), dtype, lower, turned, launch
        n, half = self.n, np.tril if lower else np.triu
        self.a = a.astype(dtype)
        whole = np.full((n, n + 3), np.nan, dtype)
        self.A = whole[:, :n] if turned else whole.T[:n]
        inside = half(np.ones((n, n), bool))
        self.A[inside] = self.a[inside]
        self.L = scipy.linalg.cholesky(self.a, lower=lower).astype(dtype)
        self.W = np.full((n, n + 1), 7, dtype).T  # of which n + 1 rows lie there
        self.W[:n][inside] = self.L[inside]
        self.tiles = TriangleTiles.of(n, cards)
        self.counts: dict[str, np.ndarray] = {}
        self.base = base_weights(n)
        self.w = np.full(n, np.nan)

    def count(self, name: str) -> np.ndarray:
        return self.counts.setdefault(name, np.zeros(1, np.uint64))

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any) -> None:
        self._launch(kernel.name, grid, kernel.threads, args)

    @property
    def factor(self) -> np.ndarray:
        """L in float64, lower."""
        L = self.W[: self.n].astype(float)
        return np.tril(L) if self.lower else np.triu(L).T

    def weights(self) -> None:
        kernel = DefiniteWeights(self.dtype)
        step = sum(self.A.strides) // self.A.itemsize
        self.launch(kernel, kernel.grid(self.n), self.A, step, kept(self.base), self.w, self.n)

    def sums(self, kernel: TriangleSums, X: np.ndarray, ld: int, x: np.ndarray, name: str) -> np.ndarray:
        """Sums, and squares where the kernel takes them."""
        n, tiles, add, sides = self.n, self.tiles, AddTriangleParts(), 1 + kernel.squares
        parts = np.full(tiles.column_parts, np.nan), np.full(tiles.row_parts, np.nan)
        self.launch(kernel, tiles.grid, X, ld, n, x, *parts, self.count(name))
        out = np.full(sides * n, np.nan)
        numbers = tiles.rows * kernel.columns, tiles.columns * kernel.rows
        self.launch(add, add.grid(n, kernel.squares), *parts, *numbers, n, out)
        return out

    def encode(self) -> np.ndarray:
        """Z = A w, and squared norms behind."""
        X, below = (self.A.T, not self.lower) if self.turned else (self.A, self.lower)
        kernel = TriangleSums.of_matrix(self.dtype, below)
        return self.sums(kernel, X, X.strides[1] // X.itemsize, self.w, "encoded")

    def read(self) -> np.ndarray:
        """g = w'L."""
        return self.sums(TriangleSums.of_factor(self.dtype, self.lower), self.W, self.n + 1, self.w, "read")

    def read_again(self, g: np.ndarray) -> np.ndarray:
        """L g, and squares behind."""
        return self.sums(TriangleSums.of_product(self.dtype, self.lower), self.W, self.n + 1, g, "read_again")

    def measure(self, Z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sizes of lines, and what is said of all of them."""
        kernel, sizes, summary = DefiniteSizes(), np.full(self.n, np.nan), np.full(3, np.nan)
        self.launch(kernel, kernel.grid, Z, self.w, self.n, sizes, summary)
        return sizes, summary

    def judge(self, Lg: np.ndarray, Z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Residuals and bounds."""
        n, kernel, (sizes, summary), W = self.n, JudgeDefinite(self.dtype), self.measure(Z), self.W
        residuals, bounds = np.full(n, np.nan), np.full(n, np.nan)
        counts = [self.count(name) for name in ("right", "positive", "closest")]
        limits = *tolerances(FLOATS[self.dtype], n), residuals, bounds, *counts
        self.launch(kernel, kernel.grid(n), Lg, Z, sizes, W, n + 1, n, summary, *limits)
        self.closest = counts.pop()
        del self.counts["closest"]
        return residuals, bounds

    def certify(self) -> dict[str, int]:
        """All of it: what was counted."""
        self.weights()
        Z = self.encode()
        self.judge(self.read_again(self.read()), Z)
        return {name: int(count[0]) for name, count in self.counts.items()}

    @property
    def full(self) -> dict[str, int]:
        tiles = self.tiles.rows * self.tiles.columns
        return {"encoded": tiles, "read": tiles, "read_again": tiles, "right": self.n, "positive": self.n}

    @property
    def operations(self) -> np.ndarray:
        return np.arange(self.n) + FLOOR_TERMS


def factored_by_blocks(patch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the matrices that are factored by blocks from now on: those that no GPU has certified."""
    found: list[int] = []
    of_blocks = cholesky.CholeskyFactorisation.online

    def online(run: Any) -> None:
        found.append(run.K)
        of_blocks(run)

    patch.setattr(cholesky.CholeskyFactorisation, "online", online)
    return found
