"""The kernels that encode, verify and repair a product on a GPU, as frozen configurations; which one serves a shape.

`Equilibrate`, `LineSums`, `AcrossSums`, `JudgeKernel` and `WipeKernel` are files of kernels/check, `RepairKernel` is
kernels/repair/repair.cu: each says there what it does. Fields have the names of the macros that they set.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from abft_tsm2.checksum.device import tuned
from abft_tsm2.core.problem import C_TYPES, SIZES

WARP = 32
COLUMNS = 32  # whose weights kernels/check/equilibrate.cu adds together
SAMPLE = 128  # rows that it reads, where there are more
MISSED, CHANGED = 1, 2
"""Flags of passes: a row stands out that the sample for the weights may have missed; an operand is not what it was."""
STATE = 32  # words of a product's workspace


def sums_of(dtype: str) -> str:
    """The type in which elements of `dtype` are multiplied by weights."""
    return "float32" if SIZES[dtype] == 2 else "float64"


def _types(dtype: str, width: int = 16, acc: str = "") -> dict[str, str | int]:
    acc = C_TYPES[acc or sums_of(dtype)]
    return {"A_TYPE": C_TYPES[dtype], "B_TYPE": acc, "ACC": acc, "C_TYPE": acc, "T2": 1, "WIDTH": 16, "ALIGNED": width}


@dataclass(frozen=True)
class Sums:
    """What a pass over the lines of X takes, however they lie: constants of tsm2r_rows.cu and of tsm2r_columns.cu.

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
    """Compile-time constants of kernels/check/tsm2r_rows.cu.

    Attributes
    ----------
    t1, team, rows, ahead, blocks : int
        Threads of a block, warps of a row, rows of a team at a time, vectors loaded at a time, blocks of a
        multiprocessor.
    joint : bool
        Whether rows of L are summed beside those that are judged.
    """

    file: ClassVar[str] = "check/tsm2r_rows.cu"

    t1: int = 256
    team: int = 1
    rows: int = 4
    ahead: int = 2
    blocks: int = 2
    joint: bool = False

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        joint = "joint_" * self.joint
        return f"line_{joint}{self.kind}_{self.t1}_{self.team}_{self.rows}_{self.ahead}_{self.blocks}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        sizes = {"T1": self.t1, "TEAM": self.team, "ROWS": self.rows, "AHEAD": self.ahead, "BLOCKS": self.blocks}
        return {**_types(self.dtype, self.width, self.acc), **self.flags, **sizes, "JOINT": int(self.joint)}

    @property
    def lines(self) -> int:
        """Rows of a block."""
        return self.rows * self.t1 // (WARP * self.team * (1 + self.joint))


@dataclass(frozen=True)
class Equilibrate:
    """Compile-time constants of kernels/check/equilibrate.cu: type of R, whether its columns are contiguous, bytes of a
    load."""

    file: ClassVar[str] = "check/equilibrate.cu"

    dtype: str
    turned: bool = False
    width: int = 16
    t1: int = 512

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"equilibrate_{self.dtype}{'_turned' * self.turned}_{self.width}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        flags = {"T1": self.t1, "TURNED": int(self.turned), "LEAVES_FIRST": 0}
        blocks = 1 if self.dtype == "bfloat16" else 2  # whose columns are eight to a thread, and their squares float64
        return {**_types(self.dtype, self.width), **flags, "BLOCKS": blocks}

    @property
    def columns(self) -> int:
        """Of a block."""
        return WARP * 16 // SIZES[self.dtype]


@dataclass(frozen=True)
class WipeKernel:
    """kernels/check/wipe.cu, which is compiled for all types at once."""

    file: ClassVar[str] = "check/wipe.cu"
    name: ClassVar[str] = "wipe_state"
    macros: ClassVar[dict[str, str | int]] = {**_types("float32"), "T1": STATE}


@dataclass(frozen=True)
class JudgeKernel:
    """Compile-time constants of kernels/check/judge.cu."""

    file: ClassVar[str] = "check/judge.cu"

    t1: int = 256

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"judge_{self.t1}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {**_types("float64"), "T1": self.t1}


@dataclass(frozen=True)
class OrderedKernel:
    """Compile-time constants of kernels/check/ordered.cu.

    Attributes
    ----------
    size, piece, t1 : int
        Bytes of an element, elements that a warp takes, and threads of a block.
    answer : {"flag", "keep", "count"}
        Whether a line of another sum is flagged, the sums are kept, or lines of the same sum are counted.
    """

    file: ClassVar[str] = "check/ordered.cu"

    size: int
    piece: int = 2048
    t1: int = 256
    answer: Literal["flag", "keep", "count"] = "flag"

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"ordered_{self.answer}_{self.size}_{self.piece}_{self.t1}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        types = _types({2: "float16", 4: "float32", 8: "float64"}[self.size])
        answers = {"KEEPS": int(self.answer == "keep"), "COUNTS": int(self.answer == "count")}
        return {**types, "T1": self.t1, "ELEMENT_BYTES": self.size, "PIECE": self.piece, **answers}

    @property
    def words(self) -> int:
        """Of an element, each of which has a sum."""
        return -(-self.size // 4)

    def pieces(self, length: int) -> int:
        """Of a line."""
        return max(1, -(-length // self.piece))

    def blocks(self, lines: int, length: int) -> int:
        """Of a launch."""
        return -(-lines * self.pieces(length) // (self.t1 // WARP))


FIXED = 73888
"""Bytes of `Fixed` in kernels/repair/repair_problem.cuh."""


@dataclass(frozen=True)
class RepairKernel:
    """Constants of kernels/repair/repair.cu: types of the operands, of C and of its copy; the order of R."""

    file: ClassVar[str] = "repair/repair.cu"

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
    joint: bool = False,
) -> LineSums:
    """The configuration for p rows of q elements, of each of so many products."""
    size, vectors = SIZES[dtype], -(-q * SIZES[dtype] // 16)
    wanted = {"given": given, "verdict": verdict, "stored": bool(out), "joint": joint}
    shape = tuned.line_shape(size, vectors, p, products, multiprocessors, **wanted)
    return LineSums(dtype, acc, given, words, verdict, out, width, *shape, joint)


MOST_NARROW = 1 << 16  # rows of a warp whose bits, of elements of 16, are added in 32 bits


@dataclass(frozen=True)
class AcrossSums(Sums):
    """Compile-time constants of kernels/check/tsm2r_columns.cu.

    Attributes
    ----------
    width : int
        As of all `Sums`, in bytes; of these many lines a thread takes all.
    t1, ahead, blocks : int
        Threads of a block, rows of memory that a warp loads at a time, blocks of a multiprocessor.
    """

    file: ClassVar[str] = "check/tsm2r_columns.cu"

    t1: int = 256
    ahead: int = 6
    blocks: int = 2

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"across_{self.kind}_{self.t1}_{self.ahead}_{self.blocks}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        acc = C_TYPES[self.acc]
        types = {"A_TYPE": C_TYPES[self.dtype], "B_TYPE": acc, "ACC": acc, "C_TYPE": acc}
        sizes = {"T2": 1, "WIDTH": self.width, "T1": self.t1, "AHEAD": self.ahead, "BLOCKS": self.blocks}
        return {**types, **self.flags, **sizes}

    @property
    def warps(self) -> int:
        """Of a block: rows of memory that it reads at the same time."""
        return self.t1 // WARP

    @property
    def lines(self) -> int:
        """Of a block."""
        return WARP * self.width // SIZES[self.dtype]


@dataclass(frozen=True)
class AcrossPlan:
    """Which block of kernels/check/tsm2r_columns.cu takes what.

    Attributes
    ----------
    grid : (int, int, int)
        Stripes of lines, groups of positions, products.
    slice : int
        Positions of a group.
    nbytes : int
        Of memory for what groups have found; 0 where there is one group.
    tickets : int
        Zeros that say which group comes last.
    """

    grid: tuple[int, int, int]
    slice: int
    nbytes: int
    tickets: int

    @classmethod
    def of(cls, config: AcrossSums, p: int, q: int, multiprocessors: int, products: int = 1) -> AcrossPlan:
        """For `products` matrices of p lines of q positions each.

        All blocks take turns on the card, and as many groups share a stripe as let them end soonest; but a warp keeps
        some rows of memory, and there are at most `tuned.MOST_GROUPS`.

        Raises
        ------
        ValueError
            If a load would take lines beyond the last one.

        Examples
        --------
        >>> config = across_sums("float16", 4096, 4096, 132, acc="float32")
        >>> AcrossPlan.of(config, 4096, 4096, 132)
        AcrossPlan(grid=(16, 15, 1), slice=288, nbytes=983040, tickets=16)
        >>> AcrossPlan.of(config, 4096, 100, 132)
        AcrossPlan(grid=(16, 1, 1), slice=144, nbytes=0, tickets=16)
        """
        if p * SIZES[config.dtype] % config.width:
            raise ValueError(f"{p} lines of {config.dtype} are no multiple of {config.width} bytes, which a load takes")
        stripes, places = -(-p // config.lines), config.blocks * multiprocessors
        turn = config.warps * config.ahead  # positions of a block at a time
        least = -(-tuned.LEAST_ROWS * config.warps // turn) * turn
        most = MOST_NARROW * config.warps // turn * turn

        def time(slice: int) -> int:
            return -(-stripes * products * -(-q // slice) // places) * (slice + tuned.FIXED_ROWS)

        even = (-(-q // (groups * turn)) * turn for groups in range(1, tuned.MOST_GROUPS + 1))
        slice = min((max(least, min(most, x)) for x in even), key=time)
        groups = -(-q // slice)
        blocks = stripes * groups * products
        nbytes = blocks * (2 + config.words) * config.lines * 8 if groups > 1 else 0
        return cls((stripes, groups, products), slice, nbytes, stripes * products)


@functools.cache
def across_sums(
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
) -> AcrossSums:
    """The configuration for p lines of q positions, at addresses that are multiples of `width` bytes.

    A load takes lines that are there, and so fewer bytes where p is odd; and where stripes are too few to keep the card
    busy, narrower ones make more of them.
    """
    common = p * SIZES[dtype] | width
    width = common & -common
    while True:
        sums, verdicts, blocks = tuned.AHEAD[width]
        ahead = verdicts if verdict else sums - (given and words and width == 16)
        config = AcrossSums(dtype, acc, given, words, verdict, out, width, 256, ahead, blocks)
        grid = AcrossPlan.of(config, p, q, multiprocessors, products).grid
        if width == SIZES[dtype] or 2 * math.prod(grid) >= blocks * multiprocessors:
            return config
        width //= 2
