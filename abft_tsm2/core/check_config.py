"""The kernels that check a product on a GPU, as frozen configurations: `LineSums`, `Equilibrate`, `Judge`.

kernels/line_sums.cu, kernels/equilibrate.cu and kernels/judge.cu say what each of them does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from abft_tsm2.core.config import C_TYPES, SIZES

WARP = 32
COLUMNS = 32  # of a block of kernels/equilibrate.cu
SAMPLE = 128  # rows that it looks at, where there are more
MISSED, CHANGED = 1, 2
"""Flags of passes: a row stands out that the sample for the weights may have missed; an operand is not what it was."""
STATE = 32  # words of a product's account
_MANY_ROWS = 64  # of a multiprocessor: enough for warps that take several each
_FEW_ROWS = 2  # of a multiprocessor, so long that a block takes each
_MOST_ROWS = 48  # of a multiprocessor, so that three blocks are there whose warps take two each


def sums_of(dtype: str) -> str:
    """The type in which elements of `dtype` are multiplied by weights."""
    return "float32" if SIZES[dtype] == 2 else "float64"


def _types(dtype: str, width: int = 16, acc: str = "") -> dict[str, str | int]:
    acc = C_TYPES[acc or sums_of(dtype)]
    return {"A_TYPE": C_TYPES[dtype], "B_TYPE": acc, "ACC": acc, "C_TYPE": acc, "T2": 1, "WIDTH": 16, "ALIGNED": width}


@dataclass(frozen=True)
class Sums:
    """What a pass over the lines of X takes, however they lie: constants of line_sums.cu and of across_sums.cu.

    Attributes
    ----------
    dtype, acc : str
        Types of X, and of its products with weights: float64 unless operands have 16 bits.
    given : bool
        Whether the squares have weights of their own.
    words : bool
        Whether the lines' bits are added.
    verdict : bool
        Whether each line is judged.
    out : str
        Type of the sums; where `verdict`, of the copy that is stored, or "".
    width : int
        Bytes of a load.
    """

    dtype: str
    acc: str
    given: bool = False
    words: bool = False
    verdict: bool = False
    out: str = "float64"
    width: int = 16

    @property
    def kind(self) -> str:
        """The part of a kernel's name that says what it takes."""
        kind = ("verdict" if self.verdict else "sums") + "_given" * self.given + "_words" * self.words
        return f"{kind}_{self.dtype}_{self.acc}_{self.out}_{self.width}"

    @property
    def flags(self) -> dict[str, str | int]:
        """The constants that say what it takes."""
        flags = {"GIVEN": self.given, "WORDS": self.words, "VERDICT": self.verdict}
        flags |= {"CAST": self.verdict and bool(self.out), "LEAVES_FIRST": False}  # the product needs X, too
        out = C_TYPES[self.out or self.dtype]
        return {"OUT": out, "D_TYPE": out} | {name: int(value) for name, value in flags.items()}


@dataclass(frozen=True)
class LineSums(Sums):
    """Compile-time constants of kernels/line_sums.cu.

    Attributes
    ----------
    t1, team, rows, ahead, blocks : int
        Threads of a block, warps of a row, rows of a team at a time, vectors loaded at a time, blocks of a
        multiprocessor.
    """

    t1: int = 256
    team: int = 1
    rows: int = 4
    ahead: int = 2
    blocks: int = 2

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"line_{self.kind}_{self.t1}_{self.team}_{self.rows}_{self.ahead}_{self.blocks}"

    @property
    def file(self) -> str:
        """The file of kernels/ that holds it."""
        return "line_sums.cu"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        sizes = {"T1": self.t1, "TEAM": self.team, "ROWS": self.rows, "AHEAD": self.ahead, "BLOCKS": self.blocks}
        return {**_types(self.dtype, self.width, self.acc), **self.flags, **sizes}

    @property
    def lines(self) -> int:
        """Rows of a block."""
        return self.rows * self.t1 // (WARP * self.team)


@dataclass(frozen=True)
class Equilibrate:
    """Compile-time constants of kernels/equilibrate.cu: the type of R, and whether its columns are contiguous."""

    dtype: str
    turned: bool = False
    t1: int = 512

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"equilibrate_{self.dtype}{'_turned' * self.turned}"

    @property
    def file(self) -> str:
        """The file of kernels/ that holds it."""
        return "equilibrate.cu"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {**_types(self.dtype), "T1": self.t1, "TURNED": int(self.turned)}


@dataclass(frozen=True)
class Judge:
    """Compile-time constants of kernels/judge.cu."""

    t1: int = 256

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"judge_{self.t1}"

    @property
    def file(self) -> str:
        """The file of kernels/ that holds it."""
        return "judge.cu"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {**_types("float64"), "T1": self.t1}


FIXED = 73888
"""Bytes of `Fixed` in kernels/repair_problem.cuh."""


@dataclass(frozen=True)
class Repair:
    """Compile-time constants of kernels/repair.cu: types of the operands, of C and of its copy; the order of R."""

    dtype: str
    out: str
    cast: str = ""
    turned: bool = False
    t1: int = 128
    blocks: int = 2

    @property
    def stripe(self) -> int:
        """Columns of R that a block reads at a time."""
        return 2 * self.t1

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"repair_{self.dtype}_{self.out}_{self.cast}{'_turned' * self.turned}_{self.t1}_{self.blocks}"

    @property
    def file(self) -> str:
        """The file of kernels/ that holds it."""
        return "repair.cu"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        types = {"A_TYPE": C_TYPES[self.dtype], "ACC": C_TYPES[sums_of(self.dtype)], "C_TYPE": C_TYPES[self.out]}
        sizes = {"WIDTH": SIZES[self.dtype], "T1": self.t1, "BLOCKS": self.blocks, "TURNED": int(self.turned)}
        return {**types, "D_TYPE": C_TYPES[self.cast or self.out], **sizes, "FIXED": FIXED}


@functools.cache
def line_sums(
    dtype: str,
    p: int,
    q: int,
    multiprocessors: int,
    *,
    acc: str,
    given: bool = False,
    words: bool = False,
    verdict: bool = False,
    out: str = "float64",
    width: int = 16,
    products: int = 1,
) -> LineSums:
    """The configuration for p rows of q elements, of each of so many products; shapes from a sweep on an H200."""
    size, vectors = SIZES[dtype], -(-q * SIZES[dtype] // 16)
    t1, blocks = 128, 4
    if p * products >= _MANY_ROWS * multiprocessors and vectors <= 256 and size < 8:
        team, rows, ahead = (1, 8, 1) if vectors <= 32 else (1, 4, 1) if vectors <= 64 else (1, 4, 2)
        blocks = 4 if ahead == 1 or (verdict and size == 4) else 3
    elif vectors <= 64:
        team, rows, ahead = (2 if vectors > WARP else 1), 2, 1
    elif p <= _FEW_ROWS * multiprocessors and vectors >= 512:
        team, rows, ahead, t1, blocks = (16, 1, 2, 512, 1) if given else (8, 1, 4, 256, 2)
    elif size == 8 and vectors <= 512:
        team, rows, ahead = (4, 1, 2) if verdict else (1, 2, 4)
        t1, blocks = (128, 4) if verdict else (64, 8)  # beside a product, in as few places of the card as serve
    elif size == 8 and verdict and vectors <= 1024:
        team, rows, ahead = 4, 2, 2
    elif size == 8:
        team, rows, ahead = 2, 2, 4
    elif size == 2 and vectors <= 256:
        team, rows, ahead = 4, 2, 1
        t1, blocks = (256, 3) if verdict else (128, 6)
    elif vectors <= (512 if size == 2 else 256):
        team, rows, ahead = 4, 2, 1
        blocks = 8 if given and size == 2 else 4
    elif verdict and out:  # what is stored takes turns with what is loaded
        team = next(team for team in (1, 2, 4) if team == 4 or p * products * team >= _MOST_ROWS * multiprocessors)
        rows, ahead, t1, blocks = 2, 2, 256, 4
    elif vectors <= 512:
        team, rows, ahead = 2, 2, 4
    else:
        team, rows, ahead = 1, 2, 4
        blocks = 3 if given and size == 2 else 4  # one register too many for four
    return LineSums(dtype, acc, given, words, verdict, out, width, t1, team, rows, ahead, blocks)
