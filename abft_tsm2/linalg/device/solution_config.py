"""The kernels that check solutions of linear systems on a GPU, as frozen configurations, and how they are launched.

Each is a file of kernels/factor, which says there what it does and takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from abft_tsm2.core.problem import C_TYPES, SIZES
from abft_tsm2.linalg.device.move_config import Launch

PANEL = 128
"""Pivots of a block of pivot_moves.cu."""
LINES = 32
"""Of a block of weigh_rows.cu and judge_solution.cu."""
WIDEST, HEIGHT = 512, 512
"""Columns of a tile of part_rows.cu, at most, and rows of one of part_columns.cu."""
TILES = 12
"""So many tiles for each multiprocessor keep a card busy where half of them lie beyond a triangle's diagonal."""
TYPED = frozenset({"sum_weights", "weigh_rows", "part_rows", "part_columns"})
"""Kernels that read matrices; the others know no real type."""
WITH_MORE = frozenset({"part_rows", "part_columns", "judge_solution"})
"""Kernels that take a third sum of each line where they are asked to."""
RIGHT_EXCHANGES, RIGHT_PLACES, RIGHT_FORWARD, RIGHT_BACKWARD, RIGHT_SOLUTION, SAME_LINES, COUNTS = 0, 1, 2, 3, 4, 5, 8
"""Elements of `verified`, as kernels/factor/solution.cuh has them, and how many there are."""


@dataclass(frozen=True)
class SolutionKernel:
    """A file of kernels/factor that takes part in the checks of a solution.

    Attributes
    ----------
    routine : str
        The file's name without its suffix.
    dtype : {"float64", "float32"}
        Of the matrices; of no account to kernels that are not in `TYPED`.
    more : bool
        Whether a third sum is taken of each line; of account to those in `WITH_MORE`.
    """

    routine: str
    dtype: str = "float64"
    more: bool = False

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        name = f"solution_{self.routine}" + f"_{self.dtype}" * (self.routine in TYPED)
        return name + "_more" * (self.more and self.routine in WITH_MORE)

    @property
    def file(self) -> str:
        """The file of kernels/ that holds it."""
        return f"factor/{self.routine}.cu"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        macros: dict[str, str | int] = {"REAL": C_TYPES[self.dtype if self.routine in TYPED else "float64"]}
        if self.routine not in ("pivot_moves", "follow_moves"):
            macros["T1"] = self.threads
        if self.routine in WITH_MORE:
            macros["MORE"] = int(self.more)
        if self.routine.startswith("part_"):
            macros["BLOCKS"] = 4
        return macros

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 if self.routine.startswith("part_") else 256

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return HEIGHT if self.routine == "part_columns" else self.threads * 16 // SIZES[self.dtype]

    @property
    def group(self) -> int:
        """What the columns of a tile are a multiple of."""
        return self.threads // 8 if self.routine == "part_columns" else SIZES[self.dtype]

    def launch(self, n: int) -> Launch:
        """For n equations; that of part_rows.cu and part_columns.cu is `tiled`."""
        blocks = {
            "pivot_moves": _parts(n, PANEL),
            "follow_moves": _parts(n, self.threads),
            "weigh_rows": _parts(n, LINES),
            "judge_solution": _parts(n, LINES),
        }
        return Launch((blocks.get(self.routine, 1),), self.threads)

    def tiled(self, n: int, multiprocessors: int) -> tuple[Launch, int]:
        """For an n x n matrix, with the widest tiles that are enough; and how many parts each line's sums have.

        Examples
        --------
        >>> SolutionKernel("part_rows").tiled(8192, 132)
        (Launch(grid=(32, 64), threads=128, shared_bytes=0), 64)
        """
        rows, width = _parts(n, self.height), WIDEST
        while width > 2 * self.group and rows * _parts(n, width) < TILES * multiprocessors:
            width //= 2
        across = _parts(n, width)
        return Launch((rows, across), self.threads), rows if self.routine == "part_columns" else across


def part_sums(dtype: str, *, by_rows: bool, more: bool = False) -> SolutionKernel:
    """The kernel for sums of rows, or of columns, of a matrix whose columns are contiguous."""
    return SolutionKernel("part_rows" if by_rows else "part_columns", dtype, more)


def _parts(count: int, size: int) -> int:
    return -(-count // size)
