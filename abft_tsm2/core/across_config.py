"""How the kernel that checks lines across memory is compiled and laid out: `AcrossSums` and `AcrossPlan`.

kernels/across_sums.cu says what it does.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from abft_tsm2.core.check_config import WARP, Sums
from abft_tsm2.core.config import C_TYPES, SIZES

MOST_GROUPS = 32  # of blocks that share a stripe: the last of them adds what all have found
_LEAST_ROWS = 16  # of memory that a warp takes
_FIXED_ROWS = 64  # of memory, that a block could read while it begins and ends
_MOST_NARROW = 1 << 16  # rows of a warp whose bits, of elements of 16, are added in 32 bits

# By bytes of a load: rows of memory ahead in sums and in verdicts, blocks of a multiprocessor. As much on its way as
# there are registers for on every architecture.
_AHEAD = {16: (6, 8, 2), 8: (10, 10, 2), 4: (16, 12, 2), 2: (16, 16, 3)}


@dataclass(frozen=True)
class AcrossSums(Sums):
    """Compile-time constants of kernels/across_sums.cu.

    Attributes
    ----------
    width : int
        As of all `Sums`, in bytes; of these many lines a thread takes all.
    t1, ahead, blocks : int
        Threads of a block, rows of memory that a warp loads at a time, blocks of a multiprocessor.
    """

    t1: int = 256
    ahead: int = 6
    blocks: int = 2

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"across_{self.kind}_{self.t1}_{self.ahead}_{self.blocks}"

    @property
    def file(self) -> str:
        """The file of kernels/ that holds it."""
        return "across_sums.cu"

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
    """Which block of kernels/across_sums.cu takes what.

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
        some rows of memory, and there are at most `MOST_GROUPS`.

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
        least = -(-_LEAST_ROWS * config.warps // turn) * turn
        most = _MOST_NARROW * config.warps // turn * turn

        def time(slice: int) -> int:
            return -(-stripes * products * -(-q // slice) // places) * (slice + _FIXED_ROWS)

        even = (-(-q // (groups * turn)) * turn for groups in range(1, MOST_GROUPS + 1))
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
        sums, verdicts, blocks = _AHEAD[width]
        ahead = verdicts if verdict else sums - (given and words and width == 16)
        config = AcrossSums(dtype, acc, given, words, verdict, out, width, 256, ahead, blocks)
        grid = AcrossPlan.of(config, p, q, multiprocessors, products).grid
        if width == SIZES[dtype] or 2 * math.prod(grid) >= blocks * multiprocessors:
            return config
        width //= 2
