"""Kernels of a factorisation on a GPU that move rows, solve for rows of U, and read the matrix, and their launches.

Each is a file of kernels/factor, which says what it does. Sizes have the names that the files have.
"""

from __future__ import annotations

from dataclasses import dataclass

from abft_tsm2.core.problem import C_TYPES, SIZES
from abft_tsm2.linalg.device.schedule import PANEL

PANEL_BLOCKS = 16
"""Of kernels/factor/panel.cu, each of which has a multiprocessor of its own."""
MOST_SHARED = 224 << 10
"""Bytes of shared memory that a block of left_rows.cu asks for, at most."""
MOST_SCRATCH = 256 << 20
"""Bytes of scratch memory of all its blocks together, unless fewer than `LEAST_SCRATCHES` would fit."""
LEAST_SCRATCHES = 32
INTEGER = frozenset({"identity", "gate", "left_map", "left_done", "pivots_to_order"})
"""Kernels that know no real type."""


@dataclass(frozen=True)
class MoveKernel:
    """A file of kernels/factor, compiled for a real type.

    Attributes
    ----------
    routine : str
        The file's name without its suffix.
    dtype : {"float64", "float32"}
        Of no account to those in `INTEGER`.
    """

    routine: str
    dtype: str = "float64"

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"factor_{self.routine}" + f"_{self.dtype}" * (self.routine not in INTEGER)

    @property
    def file(self) -> str:
        """The file of kernels/ that holds it."""
        return f"factor/{self.routine}.cu"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {} if self.routine in INTEGER else {"REAL": C_TYPES[self.dtype], "WIDTH": SIZES[self.dtype]}


@dataclass(frozen=True)
class Launch:
    """Blocks along x and y, threads of a block, and bytes of its dynamic shared memory."""

    grid: tuple[int, ...]
    threads: int
    shared_bytes: int = 0


def identity(count: int) -> Launch:
    """Of `count` rows."""
    return Launch((_blocks(count, 256),), 256)


def gate() -> Launch:
    """One thread waits."""
    return Launch((1,), 1)


def exchange_rows(b: int, columns: int) -> Launch:
    """A thread for each of b <= 512 rows, 8 columns a block."""
    if not 1 <= b <= 512:
        raise ValueError(f"a step of {b} columns: a block has a thread for each, at most 512")
    return Launch((_blocks(columns, 8),), _blocks(b, 32) * 32)


def exchange_solve(dtype: str, columns: int) -> Launch:
    """8 columns a block."""
    return Launch((_blocks(columns, 8),), 384, triangle_bytes(dtype))


def solve_rows(dtype: str, columns: int, multiprocessors: int) -> Launch:
    """8 columns a warp. A block a multiprocessor, but for those that the next panel is factored on at the same time."""
    return Launch((min(_blocks(columns, 8), max(1, multiprocessors - PANEL_BLOCKS)),), 256, triangle_bytes(dtype))


def triangle_bytes(dtype: str) -> int:
    """Of L11 in shared memory: the layout of kernels/factor/substitute.cuh.

    Examples
    --------
    >>> triangle_bytes("float64"), triangle_bytes("float32")
    (71680, 36864)
    """
    size = SIZES[dtype]
    columns = PANEL + 16 // size  # elements from column to column, 8 fewer with each block of 8
    return size * sum(8 * (columns - 8 * block) for block in range(PANEL // 8))


def left_map(m: int, panels: int) -> Launch:
    """A row of blocks for each panel."""
    return Launch((_blocks(m, 256), panels), 256)


def left_done() -> Launch:
    """One block."""
    return Launch((1,), 256)


@dataclass(frozen=True)
class LeftRows:
    """How left_rows.cu is launched.

    Attributes
    ----------
    launch : Launch
    scratch_rows : int
        Elements of each block's scratch memory; 0 where a column fits into shared memory.
    """

    launch: Launch
    scratch_rows: int

    @property
    def scratch_elements(self) -> int:
        """Of the scratch memory of all blocks."""
        return self.launch.grid[0] * self.scratch_rows


def left_rows(dtype: str, m: int, finished: int, first_end: int, multiprocessors: int) -> LeftRows:
    """For `finished` columns, those before the last step, of which `first_end` are of the first step.

    Examples
    --------
    >>> left_rows("float64", 8192, 8064, 128, 132)
    LeftRows(launch=Launch(grid=(8064,), threads=512, shared_bytes=64512), scratch_rows=0)
    >>> left_rows("float64", 32768, 32256, 512, 132)
    LeftRows(launch=Launch(grid=(264,), threads=512, shared_bytes=0), scratch_rows=32256)
    """
    rows, size = m - first_end, SIZES[dtype]
    if rows * size <= MOST_SHARED:
        return LeftRows(Launch((finished,), 512, rows * size), 0)
    blocks = max(LEAST_SCRATCHES, min(2 * multiprocessors, MOST_SCRATCH // (rows * size)))
    return LeftRows(Launch((min(finished, blocks),), 512), rows)


def measure(m: int, n: int) -> Launch:
    """Tiles of 64 x 64."""
    return Launch((_blocks(m, 64) * _blocks(n, 64),), 256)


def take_rows(n: int, columns: int) -> Launch:
    """Tiles of 64 x 64."""
    return Launch((_blocks(n, 64) * _blocks(columns, 64),), 256)


def scale_weights(m: int, n: int) -> Launch:
    """A thread for each weight of a side."""
    return Launch((_blocks(max(m, n), 256),), 256)


def pivots_to_order(m: int) -> Launch:
    """4096 places a block."""
    return Launch((_blocks(m, 4096),), 512)


def _blocks(count: int, each: int) -> int:
    return -(-count // each)
