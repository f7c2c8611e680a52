"""The kernels that certify a Cholesky factor on a GPU, as frozen configurations, and what they are launched with.

Each is a file of kernels/factor, which says there what it does and takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from abft_tsm2.arrays import FloatType
from abft_tsm2.checksum import bounds
from abft_tsm2.core.problem import C_TYPES

COUNTERS = "encoded", "read", "read_again", "right", "positive", "finite", "finite_beside"
"""What the kernels count: blocks of triangle_sums.cu that have come to their end; lines that are right, and positive
diagonal elements; tiles of A that are finite, in the triangle that is factored and in the other one."""
GROUP, WIDEST, TALL = 8, 128, 256
"""Columns of a tile of triangle_sums.cu: a multiple of the first, at most the second; and its rows."""
TILES = 4
"""So many tiles for each multiprocessor keep a card busy."""
SQUARE = 64
"""Rows and columns of a tile of copy_triangle.cu."""
LINES = 32
"""Of a block of add_triangle_parts.cu."""


@dataclass(frozen=True)
class CopyTriangle:
    """Compile-time constants of kernels/factor/copy_triangle.cu.

    Attributes
    ----------
    dtype : {"float64", "float32"}
    lower, diagonal : bool
        Which triangle, and whether it has the diagonal.
    read, zero : bool
        Whether A is read; whether zeros are written.
    """

    file: ClassVar[str] = "factor/copy_triangle.cu"
    threads: ClassVar[int] = 256

    dtype: str
    lower: bool
    diagonal: bool = True
    read: bool = True
    zero: bool = False

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        more = "_strict" * (not self.diagonal) + "_unread" * (not self.read) + "_zero" * self.zero
        return f"copy_triangle_{self.dtype}_{_triangle(self.lower)}{more}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        which = {"LOWER": self.lower, "DIAGONAL": self.diagonal, "READ": self.read, "ZERO": self.zero}
        return {"REAL": C_TYPES[self.dtype], **{name: int(value) for name, value in which.items()}}

    def grid(self, n: int) -> tuple[int, ...]:
        """Blocks for a matrix of n columns."""
        return (_parts(n, SQUARE) ** 2,)

    def full_count(self, n: int) -> int:
        """Tiles that are finite where all of them are."""
        tiles = _parts(n, SQUARE)
        return tiles * (tiles + 1) // 2


@dataclass(frozen=True)
class DefiniteWeights:
    """Compile-time constants of kernels/factor/definite_weights.cu."""

    file: ClassVar[str] = "factor/definite_weights.cu"
    threads: ClassVar[int] = 256

    dtype: str

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"definite_weights_{self.dtype}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"REAL": C_TYPES[self.dtype]}

    def grid(self, n: int) -> tuple[int, ...]:
        """Blocks for a matrix of n columns."""
        return (_parts(n, self.threads),)


@dataclass(frozen=True)
class TriangleSums:
    """Compile-time constants of kernels/factor/triangle_sums.cu.

    Attributes
    ----------
    dtype : {"float64", "float32"}
    lower : bool
        Whether the triangle is below the diagonal of the column-major matrix.
    rows, columns : bool
        Which sums are taken.
    squares, operations : bool
        Whether squares are, too, and times the operations on each element.
    """

    file: ClassVar[str] = "factor/triangle_sums.cu"
    threads: ClassVar[int] = TALL

    dtype: str
    lower: bool
    rows: bool
    columns: bool
    squares: bool = False
    operations: bool = False

    @classmethod
    def of_matrix(cls, dtype: str, lower: bool) -> TriangleSums:
        """``A x`` of a symmetric matrix, and norms of its lines, with these weights."""
        return cls(dtype, lower, rows=True, columns=True, squares=True)

    @classmethod
    def of_factor(cls, dtype: str, lower: bool) -> TriangleSums:
        """``w'L``, of L or of its transpose above the diagonal."""
        return cls(dtype, lower, rows=not lower, columns=lower)

    @classmethod
    def of_product(cls, dtype: str, lower: bool) -> TriangleSums:
        """``L g``, likewise, with squares."""
        return cls(dtype, lower, rows=lower, columns=not lower, squares=True, operations=True)

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        sums = "_rows" * self.rows + "_columns" * self.columns + "_squares" * self.squares
        return f"triangle_sums_{self.dtype}_{_triangle(self.lower)}{sums}" + "_operations" * self.operations

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        which = {"LOWER": self.lower, "ROWS": self.rows, "COLUMNS": self.columns}
        which |= {"SQUARES": self.squares, "OPERATIONS": self.operations}
        numbers = {name: int(value) for name, value in which.items()}
        return {"REAL": C_TYPES[self.dtype], "T1": self.threads, "BLOCKS": self.blocks, **numbers}

    @property
    def blocks(self) -> int:
        """Blocks that share a multiprocessor: as many as have the registers for it."""
        return 3 if self.squares and self.columns else 4


@dataclass(frozen=True)
class AddTriangleParts:
    """Compile-time constants of kernels/factor/add_triangle_parts.cu."""

    file: ClassVar[str] = "factor/add_triangle_parts.cu"
    name: ClassVar[str] = "add_triangle_parts"
    threads: ClassVar[int] = 256

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"REAL": C_TYPES["float64"], "LOWER": 1, "T1": self.threads}

    def grid(self, n: int, squares: bool) -> tuple[int, ...]:
        """Blocks for n lines."""
        return _parts(n, LINES), 1 + squares


@dataclass(frozen=True)
class DefiniteSizes:
    """Compile-time constants of kernels/factor/definite_sizes.cu."""

    file: ClassVar[str] = "factor/definite_sizes.cu"
    name: ClassVar[str] = "definite_sizes"
    threads: ClassVar[int] = 1024
    grid: ClassVar[tuple[int, ...]] = (1,)

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"REAL": C_TYPES["float64"], "LOWER": 1, "T1": self.threads}


@dataclass(frozen=True)
class JudgeDefinite:
    """Compile-time constants of kernels/factor/judge_definite.cu."""

    file: ClassVar[str] = "factor/judge_definite.cu"
    threads: ClassVar[int] = 256

    dtype: str

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"judge_definite_{self.dtype}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"REAL": C_TYPES[self.dtype], "LOWER": 1, "T1": self.threads}

    def grid(self, n: int) -> tuple[int, ...]:
        """Blocks for n lines."""
        return (_parts(n, self.threads),)


@dataclass(frozen=True)
class TriangleTiles:
    """How triangle_sums.cu divides an n x n matrix; tiles outside of the triangle are counted as well.

    Attributes
    ----------
    rows, columns : int
        Tiles on top of and beside each other.
    n : int
    """

    rows: int
    columns: int
    n: int

    @classmethod
    def of(cls, n: int, multiprocessors: int) -> TriangleTiles:
        """The widest tiles that are enough for so many multiprocessors, half of all being outside.

        Examples
        --------
        >>> TriangleTiles.of(8192, 132)
        TriangleTiles(rows=32, columns=64, n=8192)
        """
        rows, width = _parts(n, TALL), WIDEST
        while width > GROUP and rows * _parts(n, width) < 2 * TILES * multiprocessors:
            width //= 2
        return cls(rows, _parts(n, width), n)

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of triangle_sums.cu."""
        return self.rows, self.columns

    @property
    def column_parts(self) -> int:
        """Numbers in column_parts, with squares."""
        return 2 * self.rows * self.n

    @property
    def row_parts(self) -> int:
        """Numbers in row_parts, with squares."""
        return 2 * self.columns * self.n


def tolerances(stored: FloatType, n: int) -> tuple[float, float, float]:
    """Of judge_definite.cu: f u, the walk of `definite_bound` for the certificate of n lines, and underflow."""
    rounding = bounds.DEFINITE[stored.name] * stored.unit_roundoff
    share = bounds.DEFINITE_SHARE * 2 * n * (bounds.CHECKSUM_UNIT / stored.unit_roundoff) ** 2
    walk = math.sqrt(bounds.FLOOR_TERMS + n + share)
    return rounding, walk, (n + bounds.FLOOR_TERMS) * bounds.lost(stored)


def _triangle(lower: bool) -> str:
    return "lower" if lower else "upper"


def _parts(count: int, size: int) -> int:
    return -(-count // size)
