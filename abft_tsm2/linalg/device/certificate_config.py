"""The kernels that certify finished LU factors on a GPU, as frozen configurations, and what they are launched with.

Each is a file of kernels/factor, which says there what it does and takes. `constants` are the tolerances that they
take, and `full_counts` is what they have counted where everything is right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from abft_tsm2.arrays import FloatType
from abft_tsm2.checksum.bounds import changed_bound
from abft_tsm2.core.problem import C_TYPES, SIZES
from abft_tsm2.linalg.device import check_config
from abft_tsm2.linalg.device.schedule import PANEL
from abft_tsm2.linalg.lu_checks import blind_factor

GROUP, WIDEST = 8, 128
"""Columns of a tile of factor_sums.cu: a multiple of the one, at most the other."""
TILES = 4
"""So many tiles for each multiprocessor keep a card busy: some share one at a time."""
LINES = 32
"""Of a block of add_factor_parts.cu."""
TYPED = frozenset({"factor_sums", "compare_sums", "least_weights", "see_all"})
"""Kernels that read W or A's largest elements; the others know no real type."""
WITH_NORMS = frozenset({"factor_sums", "judge_factors"})
"""Kernels that are compiled otherwise where norms are taken."""
ONE_BLOCK = frozenset({"count_growth", "least_weights"})
BEHIND = len(check_config.CONSTANTS)
"""Elements of `constants` that the kernels of the steps take, too."""
COUNTS, SAME_COLUMNS, SAME_ROWS = 8, 4, 5
"""Elements of `verified`; two of them, as kernels/factor/certificate.cuh numbers them."""


@dataclass(frozen=True)
class CertificateKernel:
    """A file of kernels/factor that takes part in a certificate.

    Attributes
    ----------
    routine : str
        The file's name without its suffix.
    dtype : {"float64", "float32"}
        Of W; of no account to those that are not in `TYPED`.
    norms : bool
        Whether judge_factors.cu takes the norms of lines; factor_sums.cu has them with all other sums, which are three
        times as many as without.
    """

    routine: str
    dtype: str = "float64"
    norms: bool = False

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        name = f"factor_{self.routine.removeprefix('factor_')}" + f"_{self.dtype}" * (self.routine in TYPED)
        return name + "_norms" * (self.norms and self.routine in WITH_NORMS)

    @property
    def file(self) -> str:
        """The file of kernels/ that holds it."""
        return f"factor/{self.routine}.cu"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        real = C_TYPES[self.dtype if self.routine in TYPED else "float64"]
        of_sums, of_judge = {"WHOLE": int(self.norms), "BLOCKS": self.blocks}, {"NORMS": int(self.norms)}
        more = {"factor_sums": of_sums, "judge_factors": of_judge}.get(self.routine, {})
        return {"REAL": real, "T1": self.threads, **more}

    @property
    def threads(self) -> int:
        """Of a block."""
        if self.routine in ONE_BLOCK:
            return 1024
        return 128 if self.routine == "factor_sums" and self.dtype == "float32" else 256

    @property
    def blocks(self) -> int:
        """Blocks of factor_sums.cu that share a multiprocessor: as many as have the registers for it."""
        return 2 if self.dtype == "float64" else 3 if self.norms else 4

    def grid(self, m: int, n: int) -> tuple[int, ...]:
        """Blocks for factors of an (m, n) matrix; that of factor_sums.cu is `Tiles.grid`."""
        K, most = min(m, n), max(m, n)
        grids: dict[str, tuple[int, ...]] = {
            "add_factor_parts": (_parts(most, LINES), 6 if self.norms else 2),
            "see_all": (_parts(most, self.threads), 2),
            "judge_factors": (_parts(most, self.threads), 2),
            "compare_sums": (_parts(K, self.threads),),
            "replay_pivots": (_parts(K, PANEL),),
        }
        return grids.get(self.routine, (1,))


@dataclass(frozen=True)
class Tiles:
    """How factor_sums.cu divides W: each tile leaves a part of the sums of its columns, and of its rows.

    Attributes
    ----------
    rows, columns : int
        Tiles on top of and beside each other.
    m, n : int
        Of W.
    height : int
        Rows of a tile.
    """

    rows: int
    columns: int
    m: int
    n: int
    height: int

    @classmethod
    def of(cls, dtype: str, m: int, n: int, multiprocessors: int) -> Tiles:
        """The widest tiles that are enough for so many multiprocessors.

        Examples
        --------
        >>> Tiles.of("float64", 8192, 8192, 132)
        Tiles(rows=16, columns=64, m=8192, n=8192, height=512)
        """
        height = CertificateKernel("factor_sums", dtype).threads * 16 // SIZES[dtype]
        rows, width = _parts(m, height), WIDEST
        while width > GROUP and rows * _parts(n, width) < TILES * multiprocessors:
            width //= 2
        return cls(rows, _parts(n, width), m, n, height)

    @property
    def grid(self) -> tuple[int, int]:
        """Blocks of factor_sums.cu."""
        return self.rows, self.columns

    def at(self, line: int) -> tuple[int, int]:
        """The tile of a diagonal element.

        Examples
        --------
        >>> Tiles.of("float64", 8192, 8192, 132).at(7168)
        (14, 56)
        """
        width = _parts(self.n, GROUP * self.columns) * GROUP
        return line // self.height, line // width

    @property
    def column_parts(self) -> int:
        """Numbers in column_parts, of one sum of each column, and in largest_parts."""
        return self.rows * self.n

    @property
    def row_parts(self) -> int:
        """Numbers in row_parts, of one sum of each row."""
        return self.columns * self.m


def constants(stored: FloatType, m: int, n: int) -> tuple[float, ...]:
    """The tolerances that kernels take for (m, n) factors of this type: a float64 array of them lies on the device.

    Behind those of the steps' checks: `changed_bound` of sums over m and over n, and of `Sight` the blind factor and
    the least size of a line.
    """
    blind = math.log2(blind_factor(stored, min(m, n), max(m, n)))
    least = math.log2(m + n) + stored.min_exponent + 1  # the smallest subnormal over the unit roundoff
    return (*check_config.constants(stored), changed_bound(1.0, m), changed_bound(1.0, n), blind, least)


def full_counts(m: int, n: int) -> tuple[int, ...]:
    """What the elements of `verified` are where everything is right: see kernels/factor/certificate.cuh."""
    K = min(m, n)
    return m, n, K, 0, K, K, _parts(K, PANEL), m + n


def _parts(count: int, size: int) -> int:
    return -(-count // size)
