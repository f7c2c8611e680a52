"""How the kernel of `encode_both` is compiled and laid out: `BothConfig`, the predicate over it, and `EncodePlan`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from abft_tsm2.core.generated import KINDS
from abft_tsm2.core.problem import C_TYPES, SIZES
from abft_tsm2.core.tuned import ENCODE_TILES

SUMS = {"float64": ("float64",), "float32": ("float32", "float64")}  # of A: types of its sums; of the halves as float32
MOST_COLUMNS = 4  # of weights
PANEL = 32  # rows whose weights are fetched at a time: kernels/tsm2/encode_both.cu
_SHARED_BYTES = 48 << 10  # that a block may declare
_READ = "read"


@dataclass(frozen=True)
class BothConfig:
    """Compile-time constants of kernels/tsm2/encode_both.cu.

    Attributes
    ----------
    dtype, sums : str
        Types of A and of its sums.
    r : int
        Columns of V and of W, whichever has more.
    width : int
        Bytes of A in a load.
    squares, words : bool
        Whether those sums are taken too.
    right, left : str
        "read", or the kind of `Generated` that V and W are.
    t1, t3, rows, tcf, blocks : int
        Threads of a block; rows loaded ahead; rows added over a warp at a time; vectors of a thread in a row; blocks of
        a multiprocessor.
    """

    file: ClassVar[str] = "tsm2/encode_both.cu"

    dtype: str
    sums: str
    r: int
    width: int = 16
    squares: bool = False
    words: bool = False
    right: str = _READ
    left: str = _READ
    t1: int = 128
    t3: int = 4
    rows: int = 4
    tcf: int = 1
    blocks: int = 2

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        flags = "_squares" * self.squares + "_words" * self.words
        sizes = f"t1_{self.t1}_t3_{self.t3}_rows_{self.rows}_tcf_{self.tcf}_blocks_{self.blocks}"
        return f"both_{self.dtype}_{self.sums}_{self.right}_{self.left}_r_{self.r}_{self.width}{flags}_{sizes}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        sums = C_TYPES[self.sums]
        types: dict[str, str | int] = {"A_TYPE": C_TYPES[self.dtype], "B_TYPE": sums, "ACC": sums, "C_TYPE": sums}
        sizes = {"WIDTH": self.width, "T1": self.t1, "T2": self.r, "T3": self.t3, "ROWS": self.rows, "TCF": self.tcf}
        wanted = {"SQUARES": int(self.squares), "WORDS": int(self.words), "BLOCKS": self.blocks}
        return {**types, **sizes, **wanted, "RIGHT": self.right.upper(), "LEFT": self.left.upper()}

    @property
    def values(self) -> int:
        """Sums of a row, and of a column."""
        return self.r + self.squares

    @property
    def stripe(self) -> int:
        """Columns of a block."""
        return self.t1 * self.tcf * self.width // SIZES[self.dtype]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the weights of two panels, and what each warp has of the sums of their rows."""
        size = SIZES[self.sums]
        line = -(-self.values * size // 16) * 16
        warps = self.t1 // 32
        return 2 * PANEL * (line + warps * self.values * size + warps * 8 * self.words)


@dataclass(frozen=True)
class AddConfig:
    """Compile-time constants of kernels/tsm2/add_parts.cu, which adds what blocks have left behind."""

    file: ClassVar[str] = "tsm2/add_parts.cu"

    sums: str
    words: bool
    t1: int = 256

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"add_parts_{self.sums}{'_words' * self.words}_t1_{self.t1}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"ACC": C_TYPES[self.sums], "T1": self.t1, "WORDS": int(self.words)}


def sums_of(dtype: str) -> tuple[str, ...]:
    """Types that sums of elements of that type may have, the default first."""
    return SUMS.get(dtype, SUMS["float32"])


def why_not(config: BothConfig) -> str | None:
    """Why no kernel is compiled for `config`; None if one can be.

    Examples
    --------
    >>> why_not(BothConfig("float32", "float32", r=4))
    >>> why_not(BothConfig("float32", "float32", r=5))
    'r = 5: the kernel takes 1 to 4 columns of weights'
    """
    return next(_objections(config), None)


def _objections(config: BothConfig) -> Iterator[str]:
    if config.dtype not in SIZES or config.sums not in sums_of(config.dtype):
        yield f"elements of {config.dtype} are not added in {config.sums}"
        return
    if not 1 <= config.r <= MOST_COLUMNS:
        yield f"r = {config.r}: the kernel takes 1 to {MOST_COLUMNS} columns of weights"
    if config.width not in (16, 8, 4, 2) or config.width < SIZES[config.dtype]:
        yield f"width = {config.width}: loads have 16, 8, 4 or 2 bytes, at least one element"
    for kind in (config.right, config.left):
        if kind not in (_READ, *KINDS):
            yield f"weights are {_READ} or {', '.join(KINDS)}, not {kind}"
    if config.t1 % 32 or not 32 <= config.t1 <= 1024:
        yield f"t1 = {config.t1}: a block is 1 to 32 warps"
    if min(config.t3, config.rows, config.tcf, config.blocks) < 1 or PANEL % config.t3 or config.t3 % config.rows:
        yield f"t3 = {config.t3}, rows = {config.rows}: rows divides t3, t3 {PANEL}, tcf and blocks are positive"
    if config.rows * config.values > 32:
        yield f"{config.rows} rows of {config.values} sums are more than the 32 that a warp adds at a time"
    if config.shared_bytes > _SHARED_BYTES:
        yield f"{config.shared_bytes} bytes of shared memory, a block has {_SHARED_BYTES}"


@functools.cache
def choose(
    dtype: str,
    sums: str,
    r: int,
    *,
    width: int = 16,
    squares: bool = False,
    words: bool = False,
    right: str = _READ,
    left: str = _READ,
) -> BothConfig:
    """The configuration for elements of `dtype` that are added in `sums`."""
    size = SIZES[dtype]
    t1, t3, rows, columns, blocks = ENCODE_TILES[size, sums][min(r, 3) - 1]
    columns = min(columns, 4) if words else columns
    width = min(width, columns * size)
    narrow = width < min(16, columns * size)
    if words or narrow:  # more sums, or more loads
        t3 = rows = 2 if words and narrow else 4
        blocks = 2
    tcf = columns * size // width
    return BothConfig(dtype, sums, r, width, squares, words, right, left, t1, t3, rows, tcf, blocks)


def choices() -> tuple[BothConfig, ...]:
    """Every configuration that `choose` may return, but for the kinds of weights: all are read."""
    found = (
        choose(dtype, sums, r, width=width, squares=squares, words=words)
        for dtype, size in SIZES.items()
        for sums in sums_of(dtype)
        for r, width in product(range(1, MOST_COLUMNS + 1), (16, 8, 4, 2))
        for squares, words in product((False, True), repeat=2)
        if width >= size
    )
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class EncodePlan:
    """How a matrix is divided: stripes of columns times groups of `slice` rows.

    Attributes
    ----------
    m, k : int
    stripes, groups, slice : int
    """

    m: int
    k: int
    stripes: int
    groups: int
    slice: int

    @classmethod
    def of(cls, config: BothConfig, m: int, k: int, multiprocessors: int, waves: int = 2) -> EncodePlan:
        """Of an m x k matrix, both positive: about `waves` times as many blocks as there is room for at once.

        More blocks even out what the last ones leave idle; each leaves a part of every column's sums to be added.
        """
        stripes = -(-k // config.stripe)
        groups = max(1, min(-(-m // PANEL), waves * config.blocks * multiprocessors // stripes))
        rows = -(-m // groups)
        return cls(m, k, stripes, -(-m // rows), rows)


def adder_of(config: BothConfig, plan: EncodePlan) -> AddConfig:
    """What adds the parts: with more warps where they are many, as those of a matrix of a few long rows."""
    return AddConfig(config.sums, config.words, 1024 if max(plan.stripes, plan.groups) > 512 else 256)
