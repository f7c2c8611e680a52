"""The kernels that carry the checksums of LU from step to step on a GPU, and judge the steps, as frozen configurations.

Each is a file of kernels/factor, which says there what it does and takes; `constants` and `initial_state` are the
tolerances and the state that they take, from `abft_tsm2.checksum.bounds`. Fields have the names of the macros that they
set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from abft_tsm2.arrays import FloatType
from abft_tsm2.checksum import bounds
from abft_tsm2.checksum.rigorous import largest_multiplier
from abft_tsm2.core.problem import C_TYPES
from abft_tsm2.linalg.line_check import CHI_SQUARED, SMALLEST

WARP = 32
WIDEST = 512  # columns of a step
LOADS = 16  # of a lane, on their way at the same time
# Parts of y that row_sums leaves to judge_step, whose one block reads them all: 512 kB, as much as half of U(J, J) of
# the widest step; and blocks, two for each multiprocessor of the largest cards.
MOST_PARTS, MOST_BLOCKS = 65536, 256

CONSTANTS = (
    "rounding",
    "underflow",
    "floor terms",
    "share",
    "summed",
    "usual",
    "least",
    "chi squared",
    "smallest",
    "multiplier",
)
"""What the elements of `constants` are, in the order of `enum Constant` in kernels/factor/line_verdict.cuh."""
ROOM = 16
"""Of each of the three copies of `constants` on the device; certificates have more of them."""


def constants(stored: FloatType) -> tuple[float, ...]:
    """The tolerances that kernels take for factors of this type: a float64 array of them lies on the device."""
    return (
        bounds.FACTORISATION[stored.name] * stored.unit_roundoff,
        stored.smallest_subnormal,
        bounds.FLOOR_TERMS,
        bounds.SUM_SHARE * (bounds.CHECKSUM_UNIT / stored.unit_roundoff) ** 2,
        bounds.SUMMED,
        bounds.USUAL,
        bounds.LEAST,
        CHI_SQUARED,
        SMALLEST,
        largest_multiplier(stored),
    )


def initial_state(stored: FloatType, m: int, n: int) -> tuple[float, float, float]:
    """Growth, and the operations on every row and every column of an (m, n) matrix before the first step."""
    granted = bounds.FLOOR_TERMS
    return 1.0, bounds.operations(stored, granted, n), bounds.operations(stored, granted, m)


def chunks_of(b: int) -> int:
    """Runs of 32 rows that a lane of `RowSums` and `JudgeStep` takes, for a step of b <= 512 columns."""
    return next(chunks for chunks in (4, 8, 16) if b <= WARP * chunks)


@dataclass(frozen=True)
class SumModuli:
    """Compile-time constants of kernels/factor/sum_moduli.cu."""

    file: ClassVar[str] = "factor/sum_moduli.cu"
    grid: ClassVar[int] = 1

    threads: int = 1024

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"sum_moduli_{self.threads}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"REAL": C_TYPES["float64"], "T1": self.threads}


@dataclass(frozen=True)
class ColumnSums:
    """Compile-time constants of kernels/factor/column_sums.cu: type of the matrix, threads and columns of a block."""

    file: ClassVar[str] = "factor/column_sums.cu"

    dtype: str
    threads: int = 256
    columns: int = 2

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"column_sums_{self.dtype}_{self.threads}_{self.columns}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"REAL": C_TYPES[self.dtype], "T1": self.threads, "COLUMNS": self.columns}

    def grid(self, b: int) -> int:
        """Blocks for a step of b columns."""
        return -(-b // self.columns)


@dataclass(frozen=True)
class RowSums:
    """Compile-time constants of kernels/factor/row_sums.cu: type of the matrix, runs of 32 rows, threads of a block."""

    file: ClassVar[str] = "factor/row_sums.cu"

    dtype: str
    chunks: int
    threads: int = 256

    @classmethod
    def of(cls, dtype: str, b: int) -> RowSums:
        """The kernel for a step of b columns."""
        return cls(dtype, chunks_of(b))

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"row_sums_{self.dtype}_{self.chunks}_{self.threads}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"REAL": C_TYPES[self.dtype], "T1": self.threads, "CHUNKS": self.chunks}

    def grid(self, columns: int) -> int:
        """Blocks for so many columns right of the step, each with parts of its own; 0 for none."""
        at_once = self.threads // WARP * (LOADS // self.chunks)
        return min(-(-columns // at_once), MOST_PARTS // (WARP * self.chunks), MOST_BLOCKS)


@dataclass(frozen=True)
class JudgeStep:
    """Compile-time constants of kernels/factor/judge_step.cu: type of the matrix, runs of 32 rows."""

    file: ClassVar[str] = "factor/judge_step.cu"
    grid: ClassVar[int] = 1

    dtype: str
    chunks: int
    threads: int = WIDEST

    @classmethod
    def of(cls, dtype: str, b: int) -> JudgeStep:
        """The kernel for a step of b columns."""
        return cls(dtype, chunks_of(b))

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"judge_step_{self.dtype}_{self.chunks}_{self.threads}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"REAL": C_TYPES[self.dtype], "T1": self.threads, "CHUNKS": self.chunks}


@dataclass(frozen=True)
class Advance:
    """Compile-time constants of kernels/factor/advance.cu: type of the matrix, rows of a block, parts of a row."""

    file: ClassVar[str] = "factor/advance.cu"

    dtype: str
    rows: int = 64
    parts: int = 4

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"advance_{self.dtype}_{self.rows}_{self.parts}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"REAL": C_TYPES[self.dtype], "ROWS": self.rows, "PARTS": self.parts}

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.rows * self.parts

    def grid(self, below: int) -> int:
        """Blocks for so many rows below the step; 0 for none."""
        return -(-below // self.rows)


@dataclass(frozen=True)
class StartSums:
    """Compile-time constants of kernels/factor/start_sums.cu."""

    file: ClassVar[str] = "factor/start_sums.cu"
    name: ClassVar[str] = "start_sums"
    threads: ClassVar[int] = 256

    @property
    def macros(self) -> dict[str, str | int]:
        """The file asks for no constants."""
        return {}

    def grid(self, m: int, n: int) -> int:
        """Blocks for the checksums of an (m, n) matrix."""
        return -(-max(m, n) // self.threads)
