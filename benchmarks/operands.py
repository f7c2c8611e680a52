"""Operands of tall-skinny products on the card: arrays of any type, order and leading dimension, random numbers in
them, and the references that results are judged by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS, bit_pattern, dtype_name
from abft_tsm2.faults.judge import oracle
from abft_tsm2.faults.judge.oracle import Array, Reference, ReferenceArithmetic, narrowed, reference, require
from benchmarks.judge import Errors, errors, worse
from benchmarks.stream_grid import Cell

CHUNK = 1 << 27  # random numbers at a time: the generator makes a temporary of them
DISTRIBUTIONS = ("uniform", "normal")
_BFLOAT16_NAN = 0x7FC0


def array(shape: Sequence[int], dtype: str, order: str = "C", lead: int = 0) -> Array:
    """An (..., rows, columns) array with contiguous rows ("C") or columns ("F"), `lead` elements apart; what lies
    between them is NaN: a kernel that reads it shows."""
    import cupy

    *stack, rows, columns = shape
    lines, line = (rows, columns) if order == "C" else (columns, rows)
    base = cupy.empty((*stack, lines, line + lead), dtype=element_type(dtype))
    fill_nan(base)
    found = base[..., :line]
    return found if order == "C" else found.swapaxes(-1, -2)


def element_type(name: str) -> Any:
    """The dtype of that name, bfloat16 among them."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def fill_nan(x: Array) -> None:
    """Write NaN into every element."""
    if dtype_name(x.dtype) == "bfloat16":
        x.view("uint16").fill(_BFLOAT16_NAN)
    else:
        x.fill(math.nan)


def fill(x: Array, draw: Any) -> None:
    """Write random numbers from ``draw(count, dtype)`` into every element; 16-bit ones are rounded from float32."""
    real = np.dtype("float64" if dtype_name(x.dtype) == "float64" else "float32")
    lines = bit_pattern(x if x.strides[-1] == x.itemsize else x.swapaxes(-1, -2))
    lines = lines.reshape(-1, lines.shape[-1]) if lines.ndim > 2 else lines
    step = max(1, CHUNK // max(1, lines.shape[1]))
    for at in range(0, lines.shape[0], step):
        part = lines[at : at + step]
        part[...] = narrowed(draw(part.size, dtype=real).reshape(part.shape), x.dtype)


def copy_bits(to: Array, of: Array) -> None:
    """Copy elements of any type, CuPy's or not."""
    bit_pattern(to)[...] = bit_pattern(of)


def draw(distribution: str, seed: int) -> Any:
    """The generator of random numbers uniform in [0, 1), or normally distributed."""
    import cupy

    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"there is no distribution {distribution!r}: choose from {', '.join(DISTRIBUTIONS)}")
    random = cupy.random.default_rng(seed)
    return random.random if distribution == "uniform" else random.standard_normal


def _bytes(cell: Cell) -> int:
    """What a reference and the random numbers take at their peak."""
    lines = cell.products * max(cell.m, cell.k)
    elements = cell.products * cell.m * cell.k
    return (
        12 * min(8 * elements, oracle.BLOCK_BYTES + 8 * lines) + 6 * 8 * lines * cell.n + 5 * 8 * min(elements, CHUNK)
    )


class Columns:
    """The columns of B, the first n of them in either order."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.all = array(shape, dtype, "F")
        self._rows: dict[int, Array] = {}

    def first(self, n: int, order: str) -> Array:
        """The first n, in columns ("F") or in rows ("C"); `fill` renews both."""
        columns = self.all[..., :n]
        if order == "F":
            return columns
        if n not in self._rows:
            self._rows[n] = array(columns.shape, dtype_name(columns.dtype))
            copy_bits(self._rows[n], columns)
        return self._rows[n]

    def fill(self, drawn: Any) -> None:
        fill(self.all, drawn)
        for n, rows in self._rows.items():
            copy_bits(rows, self.all[..., :n])


class Products:
    """A and B of cells that share A.

    Parameters
    ----------
    cells : sequence of Cell
        Of one group.
    copies : int
        Of A, as many as a cold cache needs.
    orders : str
        Letters of the orders in which A is kept; that of the cells where none are given.
    """

    def __init__(self, cells: Sequence[Cell], copies: int, orders: str = "") -> None:
        self.cell, self.copies = cells[0], copies
        cell, shape = self.cell, (*self._stack, self.cell.m, self.cell.k)
        self.in_order = {
            order: [array(shape, cell.dtype, order, cell.lead) for _ in range(copies)]
            for order in orders or cell.letters[0]
        }
        self.A = self.in_order[cell.letters[0]]
        self._b = Columns((*self._stack, cell.k, max(one.n for one in cells)), cell.weights)
        self.expected: Reference | None = None

    @staticmethod
    def bytes(cells: Sequence[Cell], copies: int, orders: str = "F", contenders: int = 12) -> int:
        """An upper estimate of what operands, references and outputs take."""
        cell = max(cells, key=lambda one: one.n)
        size = FLOATS[cell.dtype].bits // 8
        outputs = sum(contenders * copies * one.products * one.m * one.n * 8 for one in cells)
        converted = 8 * cell.m * cell.k if cell.weights != cell.dtype else 0  # by CuPy's @
        of_a = len(orders) * copies * cell.products * (cell.m + cell.lead) * (cell.k + cell.lead) * size
        return of_a + _bytes(cell) + outputs + converted

    @property
    def _stack(self) -> tuple[int, ...]:
        return (self.cell.products,) if self.cell.products > 1 else ()

    def B(self, n: int, order: str) -> Array:
        """The first n columns of B, in columns ("F") or in rows ("C"); `fill` renews both."""
        return self._b.first(n, order)

    def outputs(self, n: int, order: str, dtype: str = "") -> list[Array]:
        """C for each copy of A."""
        shape = (*self._stack, self.cell.m, n)
        return [array(shape, dtype or self.cell.out, order) for _ in range(self.copies)]

    def fill(self, distribution: str, seed: int) -> None:
        """Draw new random numbers, uniform in [0, 1) or normal, and compute the reference for them."""
        import cupy

        drawn = draw(distribution, seed)
        fill(self.A[0], drawn)
        for others in self.in_order.values():
            for other in others:
                if other is not self.A[0]:
                    copy_bits(other, self.A[0])
        self._b.fill(drawn)
        A, B, sums = self.A[0], self._b.all, self.cell.sums
        self.expected = None  # its memory serves the next one
        self.expected = reference(A, B, cupy, sums=sums)
        require(self.expected, A, B, cupy, sums=sums)

    def judge(self, results: Sequence[Array]) -> Errors:
        """Errors of the product of a copy, the only one of `results`."""
        import cupy

        (C,) = results
        if self.expected is None:
            raise ValueError("nothing is expected before `fill`")
        arithmetic = ReferenceArithmetic(self.cell.sums, dtype_name(C.dtype), FLOATS[self.cell.dtype].bits == 16)
        return errors(C, self.expected.columns(C.shape[-1]), self.cell.k, cupy, arithmetic=arithmetic)


class Encodings:
    """A row-major, V and W of cells that share A."""

    def __init__(self, cells: Sequence[Cell], copies: int) -> None:
        self.cell, self.copies = cells[0], copies
        cell, r = self.cell, max(one.n for one in cells)
        self.A = [array((cell.m, cell.k), cell.dtype) for _ in range(copies)]
        self._weights = [Columns((size, r), cell.dtype) for size in (cell.k, cell.m)]
        self.expected: list[tuple[Reference, int]] = []

    @staticmethod
    def bytes(cells: Sequence[Cell], copies: int) -> int:
        """An upper estimate of what operands, references and outputs take."""
        cell = max(cells, key=lambda one: one.n)
        return copies * cell.m * cell.k * FLOATS[cell.dtype].bits // 8 + 3 * _bytes(cell)

    def weights(self, r: int, order: str) -> tuple[Array, Array]:
        """The first r columns of V (k rows) and of W (m rows); `fill` renews them."""
        V, W = self._weights
        return V.first(r, order), W.first(r, order)

    def fill(self, distribution: str, seed: int) -> None:
        """Draw new random numbers, and compute the references for them: A V, A' W, and the squares by those of the
        first columns."""
        import cupy

        drawn = draw(distribution, seed)
        fill(self.A[0], drawn)
        for other in self.A[1:]:
            other[...] = self.A[0]
        for x in self._weights:
            x.fill(drawn)
        self.expected = []
        for squared in (False, True):
            for A, x in zip((self.A[0], self.A[0].T), self._weights, strict=True):
                weights = x.first(1, "F") ** 2 if squared else x.all
                found = reference(A, weights, cupy, squared=squared)
                require(found, A, weights, cupy, squared=squared)
                # The weights and the elements are squared, and rounded, too.
                self.expected.append((found, A.shape[1] + 3 * squared))

    def judge(self, results: Sequence[Array]) -> Errors:
        """Errors of A V and A' W, (m, r) and (k, r), and, where they follow, of the squares as columns."""
        import cupy

        if not self.expected or not results:
            raise ValueError("nothing is expected before `fill`, or nothing was computed")
        worst = Errors(0.0, 0.0, 0)
        for C, (expected, terms) in zip(results, self.expected, strict=False):
            worst = worse(worst, errors(C, expected.columns(C.shape[1]), terms, cupy))
        return worst
