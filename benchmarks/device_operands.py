"""Operands of the campaigns on a GPU: a pair of `tests.support.families`, drawn on the host, and many made of it on the
card.

A pair A, B gives others by permutations, drawn anew for each product: of the rows of A, of the columns of B, and, in
half of the products, of the inner index of both, which is left alone in the other half because the order along it is
what some families are about. The rows of A are scaled by powers of two in a quarter of the products. All this keeps
the distribution of a family, and gives each product other rounding errors and other weights to its columns.

Random numbers are NumPy's: the same product comes of the same seed on the CPU, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from abft_tsm2.arrays import bit_pattern
from abft_tsm2.checksum.device.kernels import Equilibrate, RepairKernel
from abft_tsm2.faults.judge.oracle import Array
from benchmarks import gemm_device
from benchmarks.gemm_device import HALVES, ONE, OPTIONS, TF32, WIDE, Cell
from tests.support import families
from tests.support.cases import DTYPES

TYPES = {dtype.name: dtype for dtype in DTYPES}
SCALED, LEAST_POWER = 0.25, -3


@dataclass(frozen=True)
class Mode:
    """Type of operands and result, and how the product is computed and checked: variants of `gemm_device`."""

    dtype: str
    variant: str = ONE

    @property
    def options(self) -> Mapping[str, str]:
        return OPTIONS.get(self.variant, {})

    def __str__(self) -> str:
        return f"{self.dtype} {self.variant}"


MODES = (
    *(Mode(dtype) for dtype in ("float64", "float32", *HALVES)),
    *(Mode(dtype, WIDE) for dtype in HALVES),
    Mode("float32", TF32),
)


def modes(xp: Any) -> list[Mode]:
    """Those that an array module has: TF32 is the GPU's."""
    return [mode for mode in MODES if mode.variant != TF32 or xp is not np]


@dataclass(frozen=True)
class Shape:
    """A is m x k, B is k x n, `batch` of each; one in `every` of the families takes part in each mode."""

    m: int
    k: int
    n: int
    batch: int = 1
    every: int = 1

    @property
    def rows(self) -> int:
        """Lines that a call checks, as a rule: columns of a single product that is much wider than high."""
        return self.batch * (self.n if self.batch == 1 and self.n > 4 * self.m else self.m)

    def __str__(self) -> str:
        return f"{self.batch} of {self.m}x{self.k}x{self.n}"


def kernels(modes: Iterable[Mode], shapes: Sequence[Shape], multiprocessors: int) -> Iterator[Any]:
    """The kernels of plain calls, and those that repair by columns, to be compiled side by side beforehand."""
    for mode, shape in itertools.product(modes, shapes):
        cell = Cell("batched", shape.m, shape.k, shape.n, mode.dtype, mode.variant, batch=shape.batch)
        for one in gemm_device.kernels(cell, multiprocessors):
            yield one
            if isinstance(one, (Equilibrate, RepairKernel)):
                yield replace(one, turned=True)


@dataclass(frozen=True)
class Base:
    """A pair of operands, as bit patterns on the card: CuPy computes little with bfloat16.

    Attributes
    ----------
    A, B : (m, k), (k, n) arrays of unsigned integers
    dtype : str
    xp : module
    """

    A: Array
    B: Array
    dtype: str
    xp: Any

    @classmethod
    def draw(cls, family: str, dtype: str, shape: tuple[int, int, int], rng: np.random.Generator, xp: Any = np) -> Base:
        """A pair of a family; `shape` is m, k, n."""
        A, B = families.operands(family, *shape, rng, TYPES[dtype])
        a, b = (xp.asarray(bit_pattern(np.ascontiguousarray(x))) for x in (A, B))
        return cls(a, b, dtype, xp)

    def many(
        self, count: int, rng: np.random.Generator, orders: Sequence[str] = "CC", scaled: float = SCALED
    ) -> tuple[Array, Array]:
        """`count` pairs that are made of this one, in stacks: A and B in rows ("C") or in columns ("F"), the rows of A
        scaled in such a part of the pairs."""
        (m, k), n, xp = self.A.shape, self.B.shape[1], self.xp
        rows, inner, columns = (_permutations(count, size, rng) for size in (m, k, n))
        inner[rng.random(count) < 0.5] = np.arange(k)
        powers = rng.integers(LEAST_POWER, 1, (count, m, 1)) * (rng.random((count, 1, 1)) < scaled)
        rows, inner, columns = (xp.asarray(x) for x in (rows, inner, columns))
        A = self.A[rows[:, :, None], inner[:, None, :]]
        B = self.B[inner[:, :, None], columns[:, None, :]]
        if powers.any():
            A = _scaled(A, xp.asarray(np.ldexp(1.0, powers)), self.dtype, xp)
        a, b = (numbers(x, self.dtype, xp, order) for x, order in zip((A, B), orders, strict=True))
        return a, b


def numbers(bits: Array, dtype: str, xp: Any, order: str = "C") -> Array:
    """An array of that type with these bit patterns, in rows or in columns."""
    lines = bits if order == "C" else bits.swapaxes(-1, -2)
    made = xp.empty(lines.shape, TYPES[dtype])
    bit_pattern(made)[...] = lines
    return made if order == "C" else made.swapaxes(-1, -2)


def _permutations(count: int, size: int, rng: np.random.Generator) -> Any:
    return rng.permuted(np.broadcast_to(np.arange(size, dtype=np.int32), (count, size)), axis=1)


def _scaled(bits: Array, factors: Array, dtype: str, xp: Any) -> Array:
    """Bit patterns of the numbers times powers of two up to 1."""
    if dtype == "bfloat16":  # the upper half of a float32, which only subnormal numbers do not fit in exactly
        wide = (bits.astype(xp.uint32) << 16).view(xp.float32) * factors.astype(xp.float32)
        return (wide.view(xp.uint32) >> 16).astype(xp.uint16)
    return (bits.view(dtype) * factors.astype(dtype)).view(bits.dtype)
