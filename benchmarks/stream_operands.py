"""The operands of the stream suites on the card, of any type, order and leading dimension, and the references by which
products of them are judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS, dtype_name
from abft_tsm2.faults.judge.oracle import (
    BLOCK_BYTES,
    Array,
    Reference,
    ReferenceArithmetic,
    reference,
    require,
    rounded_to_bfloat16,
)
from benchmarks.gpu_products import CHUNK, DISTRIBUTIONS, Errors, errors, worse
from benchmarks.stream_grid import Cell

_BFLOAT16_NAN = 0x7FC0


def array(shape: Sequence[int], dtype: str, order: str = "C", lead: int = 0) -> Array:
    """An (..., rows, columns) array with contiguous rows ("C") or columns ("F"), `lead` elements apart; what lies
    between them is NaN: who reads it shows."""
    import cupy

    *stack, rows, columns = shape
    lines, line = (rows, columns) if order == "C" else (columns, rows)
    base = cupy.empty((*stack, lines, line + lead), dtype=_type(dtype))
    fill_nan(base)
    found = base[..., :line]
    return found if order == "C" else found.swapaxes(-1, -2)


def fill_nan(x: Array) -> None:
    """NaN in every element."""
    if dtype_name(x.dtype) == "bfloat16":
        x.view("uint16").fill(_BFLOAT16_NAN)
    else:
        x.fill(math.nan)


def fill(x: Array, draw: Any) -> None:
    """Random numbers in every element, from ``draw(count, dtype)``; 16-bit ones are rounded from float32."""
    name = dtype_name(x.dtype)
    real = np.dtype("float64" if name == "float64" else "float32")
    lines = x if x.strides[-1] == x.itemsize else x.swapaxes(-1, -2)
    lines = _bits(lines).reshape(-1, lines.shape[-1]) if lines.ndim > 2 else _bits(lines)
    step = max(1, CHUNK // max(1, lines.shape[1]))
    for at in range(0, lines.shape[0], step):
        part = lines[at : at + step]
        numbers = draw(part.size, dtype=real).reshape(part.shape)
        part[...] = rounded_to_bfloat16(numbers) if name == "bfloat16" else numbers


def _bits(x: Array) -> Array:
    """x, or its bit patterns where CuPy may not compute with it."""
    return x.view("uint16") if dtype_name(x.dtype) == "bfloat16" else x


def _type(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _draw(distribution: str, seed: int) -> Any:
    import cupy

    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"there is no distribution {distribution!r}: choose from {', '.join(DISTRIBUTIONS)}")
    random = cupy.random.default_rng(seed)
    return random.random if distribution == "uniform" else random.standard_normal


def _bytes(cell: Cell) -> int:
    """What a reference and the random numbers take at their peak."""
    lines = cell.products * max(cell.m, cell.k)
    elements = cell.products * cell.m * cell.k
    return 12 * min(8 * elements, BLOCK_BYTES + 8 * lines) + 6 * 8 * lines * cell.n + 4 * 8 * min(elements, CHUNK)


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
            _bits(self._rows[n])[...] = _bits(columns)
        return self._rows[n]

    def fill(self, draw: Any) -> None:
        fill(self.all, draw)
        for n, rows in self._rows.items():
            _bits(rows)[...] = _bits(self.all[..., :n])


class Products:
    """A and B of cells that share A.

    Parameters
    ----------
    cells : sequence of Cell
        Of one group.
    copies : int
        Of A, as many as a cold cache needs.
    """

    def __init__(self, cells: Sequence[Cell], copies: int) -> None:
        self.cell, self.copies = cells[0], copies
        cell, stack = self.cell, self._stack(self.cell)
        order = "C" if cell.order == "rows" else "F"
        self.A = [array((*stack, cell.m, cell.k), cell.dtype, order, cell.lead) for _ in range(copies)]
        self._b = Columns((*stack, cell.k, max(one.n for one in cells)), cell.weights)
        self.expected: Reference | None = None

    @staticmethod
    def bytes(cells: Sequence[Cell], copies: int) -> int:
        """An upper estimate of what operands, references and outputs take."""
        cell = max(cells, key=lambda one: one.n)
        size = FLOATS[cell.dtype].bits // 8
        outputs = sum(12 * copies * one.products * one.m * one.n * 8 for one in cells)
        converted = 8 * cell.m * cell.k if cell.weights != cell.dtype else 0  # by CuPy's @
        return copies * cell.products * (cell.m + cell.lead) * (cell.k + cell.lead) * size + (
            _bytes(cell) + outputs + converted
        )

    @staticmethod
    def _stack(cell: Cell) -> tuple[int, ...]:
        return (cell.products,) if cell.products > 1 else ()

    def B(self, n: int, order: str) -> Array:
        """The first n columns of B, in columns ("F") or in rows ("C"); `fill` renews both."""
        return self._b.first(n, order)

    def outputs(self, n: int, order: str, dtype: str = "") -> list[Array]:
        """C for each copy of A."""
        shape = (*self._stack(self.cell), self.cell.m, n)
        return [array(shape, dtype or self.cell.out, order) for _ in range(self.copies)]

    def fill(self, distribution: str, seed: int) -> None:
        """New random numbers, uniform in [0, 1) or normal, and the reference for them."""
        import cupy

        draw = _draw(distribution, seed)
        fill(self.A[0], draw)
        for other in self.A[1:]:
            _bits(other)[...] = _bits(self.A[0])
        self._b.fill(draw)
        A, B, sums = self.A[0], self._b.all, self.cell.sums
        self.expected = None  # its memory serves the next one
        self.expected = reference(A, B, cupy, sums=sums)
        require(self.expected, A, B, cupy, sums=sums)

    def judge(self, results: Sequence[Array]) -> Errors:
        """What is wrong with the product of a copy, the only one of `results`."""
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
        """New random numbers, and the references for them: A V, A' W, and the squares by those of the first columns."""
        import cupy

        draw = _draw(distribution, seed)
        fill(self.A[0], draw)
        for other in self.A[1:]:
            other[...] = self.A[0]
        for x in self._weights:
            x.fill(draw)
        self.expected = []
        for squared in (False, True):
            for A, x in zip((self.A[0], self.A[0].T), self._weights, strict=True):
                weights = x.first(1, "F") ** 2 if squared else x.all
                found = reference(A, weights, cupy, squared=squared)
                require(found, A, weights, cupy, squared=squared)
                # The weights and the elements are squared, and rounded, too.
                self.expected.append((found, A.shape[1] + 3 * squared))

    def judge(self, results: Sequence[Array]) -> Errors:
        """What is wrong with A V and A' W, (m, r) and (k, r), and, where they follow, with the squares as columns."""
        import cupy

        if not self.expected or not results:
            raise ValueError("nothing is expected before `fill`, or nothing was computed")
        found = [
            errors(C, expected.columns(C.shape[1]), terms, cupy)
            for C, (expected, terms) in zip(results, self.expected, strict=False)
        ]
        worst = found[0]
        for one in found[1:]:
            worst = worse(worst, one)
        return worst
