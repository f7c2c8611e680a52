"""Problems for kernels/tsm2/tsm2l_stream.cu, their data in memory, and the judge of what the kernel made of them.

Why this grid
-------------
*Configurations* (`CONFIGS`) are the kernel's paths: each order of A with each of C; loads and stores of 16 bytes and of
every narrower width; rows whose bytes are multiples of 16, 8, 4 and 2, and so the ways through shared memory; k and n
that are 1, powers of two, odd, and no multiple of the columns that are computed at a time, which are 4 or more; tiles
that all loads of a warp just fill, and ones that they exceed; the types of A, B, C and the sums.

*m* (`rows`) is 0 and 1, one below, at and one above a run of a thread's rows, a warp's tile and a block's, and several
tiles. The grid has a block, or fewer warps than tiles, or one warp a tile, or warps without a tile.

*Memory.* Where a configuration loads 16 bytes, addresses are multiples of 16; where it loads fewer, they are odd
multiples of so many. Where strides are free they are larger than needed, of unit size in no direction, or negative. NaN
surrounds all matrices; what surrounds C has to be what it was, bit by bit.

alpha, beta, data and batches vary together with these, in cycles of lengths without a common factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from abft_tsm2.core.problem import C_TYPES
from tests.support.cases import finfo
from tests.support.kernel_cases import ALPHA_BETA, GUARD

ORDERS = ("columns", "rows", "any")  # A_ORDER and C_ORDER
SHORT = {"float64": "d", "float32": "s", "float16": "h", "bfloat16": "b"}


@dataclass(frozen=True)
class Stream:
    """A configuration of the kernel. Types are names of NumPy's; the orders are of `ORDERS`."""

    a: str
    c: str
    k: int
    n: int
    a_order: str = "columns"
    c_order: str = "columns"
    tcf: int = 1
    width: int = 16
    c_width: int = 16
    acc: str = ""
    b: str = ""
    t1: int = 64
    group: int = 4
    leaves_first: bool = False

    @property
    def sums(self) -> str:
        """Type of products and sums: that of C where nothing else is said."""
        return self.acc or self.c

    @property
    def name(self) -> str:
        types = "".join(SHORT[x] for x in (self.a, self.b or self.a, self.sums, self.c))
        orders = f"{self.a_order}{self.width}_{self.c_order}{self.c_width}"
        sizes = f"t1_{self.t1}_tcf_{self.tcf}_g_{self.group}_p_{self.leaves_first:d}"
        return f"tsm2l_stream_{types}_{self.k}_{self.n}_{orders}_{sizes}"

    @property
    def file(self) -> str:
        return "tsm2/tsm2l_stream.cu"

    @property
    def macros(self) -> dict[str, str | int]:
        types = {"A_TYPE": self.a, "B_TYPE": self.b or self.a, "ACC": self.sums, "C_TYPE": self.c}
        orders = {"A_ORDER": ORDERS.index(self.a_order), "C_ORDER": ORDERS.index(self.c_order)}
        sizes = {"T1": self.t1, "T2": self.n, "T3": self.k, "TCF": self.tcf, "BLOCKS": 1}
        widths = {"WIDTH": self.width, "C_WIDTH": self.c_width, "GROUP": self.n if self.n <= 2 else self.group}
        return {
            **{macro: C_TYPES[dtype] for macro, dtype in types.items()},
            **{"LEAVES_FIRST": int(self.leaves_first), **orders, **sizes, **widths},
        }

    @property
    def run(self) -> int:
        """Rows of a thread that lie side by side."""
        if self.a_order == "columns":
            return self.width // dtype_of(self.a).itemsize
        return self.c_width // dtype_of(self.c).itemsize if self.c_order == "columns" else 1

    @property
    def tile(self) -> int:
        """Rows of a warp."""
        return 32 * self.tcf * self.run


CONFIGS: Sequence[Stream] = (
    Stream("float32", "float32", 8, 8),
    Stream("float32", "float32", 3, 5, tcf=2),
    Stream("float32", "float32", 13, 7, width=8, c_width=8),
    Stream("float32", "float32", 2, 2, width=4, c_width=4, tcf=3),
    Stream("float32", "float32", 5, 3, width=16, c_width=4),
    Stream("float32", "float32", 5, 3, width=4, c_width=16),
    Stream("float64", "float64", 16, 16),
    Stream("float64", "float64", 5, 1, width=8, c_width=8),
    Stream("float64", "float64", 32, 2),
    Stream("float32", "float32", 8, 8, "rows", "rows", 4),
    Stream("float32", "float32", 16, 16, "rows", "rows", 2),
    Stream("float32", "float32", 3, 3, "rows", "rows", 4),
    Stream("float32", "float32", 2, 2, "rows", "rows", 8),
    Stream("float32", "float32", 5, 7, "rows", "rows", 2),
    Stream("float32", "float32", 5, 2, "rows", "rows", 2),
    Stream("float32", "float32", 8, 6, "rows", "rows", 2),
    Stream("float32", "float32", 7, 13, "rows", "rows", 1, 4, 4),
    Stream("float32", "float32", 24, 1, "rows", "rows", 1, 8, 8),
    Stream("float64", "float64", 16, 16, "rows", "rows", 2),
    Stream("float64", "float64", 3, 2, "rows", "rows", 2),
    Stream("float64", "float64", 32, 32, "rows", "rows", 1),
    Stream("float64", "float64", 13, 5, "rows", "rows", 1, 8, 8),
    Stream("float32", "float32", 8, 8, "any", "any", 2),
    Stream("float32", "float32", 6, 6, "any", "any", 2, 8, 8),
    Stream("float32", "float32", 7, 3, "any", "any", 1, 4, 4),
    Stream("float64", "float64", 4, 7, "any", "any", 2, 16, 8),
    Stream("float32", "float32", 8, 8, "columns", "rows"),
    Stream("float64", "float64", 4, 3, "columns", "rows", 2),
    Stream("float32", "float32", 8, 8, "rows", "columns"),
    Stream("float64", "float64", 3, 5, "any", "columns", 2, 8),
    Stream("float16", "float32", 8, 8),
    Stream("float16", "float32", 16, 16, "rows", "rows", 2),
    Stream("float16", "float32", 5, 3, "rows", "rows", 8),
    Stream("float16", "float16", 6, 4, "rows", "rows", 2, 2, 2, acc="float32"),
    Stream("float16", "float64", 4, 4, "columns", "rows", width=8),
    Stream("bfloat16", "float32", 16, 13, width=8, b="float32"),
    Stream("bfloat16", "bfloat16", 8, 8, "rows", "rows", 4, acc="float32"),
    Stream("bfloat16", "bfloat16", 3, 4, acc="float32"),
    Stream("float32", "float64", 8, 8),
    Stream("float32", "float64", 16, 16, "rows", "rows", 2, b="float64"),
    Stream("float32", "float32", 5, 4, "rows", "rows", 4, acc="float64"),
    Stream("float32", "float32", 13, 7, width=8, c_width=8, group=8, leaves_first=True),
    Stream("float64", "float64", 16, 16, width=8, group=16),
    Stream("float32", "float32", 16, 16, "rows", "rows", 2, group=16, leaves_first=True),
    Stream("float64", "float64", 5, 20, "rows", "rows", 1, 8, 8, group=12),
    Stream("float16", "float32", 4, 30, "columns", "rows", width=4, group=16),
)


@dataclass(frozen=True)
class Case:
    """A call of the kernel: C = alpha A B + beta C for each of some products.

    extra and free make strides larger than needed: the former where one is bound to 1, the latter, of `FREE`, where
    none is.
    """

    config: Stream
    m: int
    blocks: int = 1
    products: int = 1
    extra: int = 0
    free: str = "odd"
    b_order: str = "C"
    alpha: float = 1.0
    beta: float = 0.0
    data: str = "uniform"

    def __str__(self) -> str:
        memory = f"extra={self.extra} {self.free} B-{self.b_order}"
        return f"{self.config.name} m={self.m} blocks={self.blocks} products={self.products} {memory} " + (
            f"alpha={self.alpha} beta={self.beta} {self.data}"
        )


FREE = ("odd", "strided", "reversed")
B_ORDERS = ("C", "F", "strided", "reversed")


def rows(config: Stream) -> list[int]:
    """The m at which the kernel has its edges."""
    run, tile, block = config.run, config.tile, config.tile * config.t1 // 32
    edges = (edge + step for edge in (run, tile, block) for step in (-1, 0, 1))
    return sorted({0, 1, *edges, 3 * tile + run // 2 + 1, 5 * tile + 3})


def cases(config: Stream) -> list[Case]:
    """Every m of a configuration, with grids, strides, scalars and data in turn; and several tiles a warp."""
    start = CONFIGS.index(config) if config in CONFIGS else 0

    def case(turn: int, m: int) -> Case:
        full = -(-m // (config.tile * config.t1 // 32))
        blocks = max(1, (full, 1, full // 2, full + 1)[turn % 4])
        alpha, beta = (float(x) for x in ALPHA_BETA[turn % len(ALPHA_BETA)])
        memory = (turn % 3, FREE[turn % 3], B_ORDERS[turn // 2 % 4])
        return Case(config, m, blocks, 3 if turn % 5 == 4 else 1, *memory, alpha, beta, ("uniform", "normal")[turn % 2])

    made = [case(5 * start + i, m) for i, m in enumerate(rows(config))]
    return [*made, replace(made[-1], blocks=1, alpha=1.0, beta=0.0)]


@dataclass(frozen=True)
class Stack:
    """Matrices in a buffer, one of each product: where their elements lie, in elements; NaN around them."""

    memory: np.ndarray
    offset: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]

    @classmethod
    def empty(cls, shape: tuple[int, int, int], dtype: str, strides: tuple[int, int], shift: int) -> Stack:
        """All NaN; `shift` elements from where addresses are multiples of 16 bytes."""
        reach = [(size - 1) * stride for size, stride in zip(shape[1:], strides, strict=True) if size]
        low, high = sum(min(step, 0) for step in reach), sum(max(step, 0) for step in reach)
        batch = -(-(high - low + 1) // 16) * 16 + 16  # the products' addresses are shifted alike
        before = GUARD + -(low // 16) * 16
        memory = np.full(before + shape[0] * batch + GUARD, np.nan, dtype_of(dtype))
        return cls(memory, before + shift, shape, (batch, *strides))

    def matrices(self, memory: np.ndarray | None = None) -> np.ndarray:
        """The products' matrices as a view of the memory, or of a copy of it."""
        memory = self.memory if memory is None else memory
        size = memory.itemsize
        return np.ndarray(self.shape, memory.dtype, memory, self.offset * size, [s * size for s in self.strides])

    def surroundings(self, memory: np.ndarray) -> np.ndarray:
        """The bit patterns of all elements of `memory` that are not the matrices'."""
        outside = np.ones(memory.shape, bool)
        np.ndarray(self.shape, bool, outside, self.offset, self.strides)[...] = False
        return memory.view(f"u{memory.itemsize}")[outside]


@dataclass(frozen=True)
class Operands:
    """A, B and C of a case in memory, and C as it was: NaN where beta is 0."""

    case: Case
    a: Stack
    b: Stack
    c: Stack

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> Operands:
        rng = np.random.default_rng(seed)
        draw = rng.random if case.data == "uniform" else rng.standard_normal
        config, count, m, k, n = case.config, case.products, case.m, case.config.k, case.config.n
        vector = config.width // dtype_of(config.a).itemsize
        piece = config.c_width // dtype_of(config.c).itemsize
        a = Stack.empty((count, m, k), config.a, *_strides(m, k, config.a_order, vector, config.width, case))
        c = Stack.empty((count, m, n), config.c, *_strides(m, n, config.c_order, piece, config.c_width, case))
        order = {"C": (n + 2, 1), "F": (1, k + 2), "strided": (2 * n + 3, 2), "reversed": (-n - 2, -1)}[case.b_order]
        b = Stack.empty((count, k, n), config.b or config.a, order, 3)
        for stack in (a, b, c) if case.beta != 0 else (a, b):
            stack.matrices()[...] = draw(stack.shape)
        return cls(case, a, b, c)

    def arguments(self, memory: np.ndarray) -> tuple[Any, ...]:
        """The kernel's arguments; C is in `memory`."""
        case, sums = self.case, dtype_of(self.case.config.sums)
        (bsa, *sa), (bsb, *sb), (bsc, *sc) = (stack.strides for stack in (self.a, self.b, self.c))
        a, b, c = self.a.matrices(), self.b.matrices(), self.c.matrices(memory)
        sizes = (case.m, case.config.k, case.config.n)
        unused = (0, np.zeros(1, sums), np.zeros(1, np.uint32))
        return (*sizes, sums.type(case.alpha), a, *sa, bsa, b, *sb, bsb, sums.type(case.beta), c, *sc, bsc, *unused)


def faults(operands: Operands, memory: np.ndarray) -> list[str]:
    """What is wrong with C; nothing, if it is a correctly computed alpha A B + beta C and all else is as it was.

    Element by element ``|C - exact| <= f u M + f tiny`` as in `kernel_cases.faults`, of the type of the sums,
    and a rounding to the type of C where it is another one.
    """
    case = operands.case
    found = []
    changed = operands.c.surroundings(memory) != operands.c.surroundings(operands.c.memory)
    if changed.any():
        found.append(f"{np.count_nonzero(changed)} element(s) around C were written")
    a, b, before = (_wide(stack.matrices()) for stack in (operands.a, operands.b, operands.c))
    c = _wide(operands.c.matrices(memory))
    exact, magnitude = case.alpha * (a @ b), abs(case.alpha) * (abs(a) @ abs(b))
    if case.beta != 0:
        exact, magnitude = exact + case.beta * before, magnitude + abs(case.beta * before)
    sums, stored = finfo(dtype_of(case.config.sums)), finfo(dtype_of(case.config.c))
    factor = case.config.k if (case.alpha, case.beta) == (1, 0) else case.config.k + 3
    bound = factor * (float(sums.eps) / 2 * magnitude + float(sums.smallest_subnormal))
    bound += factor * np.finfo(np.longdouble).eps * magnitude
    if case.config.c != case.config.sums:
        bound += float(stored.eps) / 2 * (abs(exact) + bound) + float(stored.smallest_subnormal)
    with np.errstate(invalid="ignore"):  # whatever a faulty kernel has left
        error = abs(c - exact)
        ok = error <= bound
    if not ok.all():
        at = tuple(np.argwhere(~ok)[0])
        found.append(
            f"{np.count_nonzero(~ok)} of {ok.size} elements are wrong, the first C{list(map(int, at))} = {c[at]}, "
            f"not {exact[at]} (off by {error[at]:.3g}, rounding explains {bound[at]:.3g})"
        )
    return found


def dtype_of(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _strides(
    lines: int, columns: int, order: str, together: int, width: int, case: Case
) -> tuple[tuple[int, int], int]:
    """Strides of a matrix of which `together` elements, `width` bytes, are loaded at a time; and its shift."""
    shift = together if width < 16 else 0
    odd = width < 16  # multiples of the width, and of nothing larger
    if order == "rows":
        return (columns, 1), shift
    if together == 1 and case.free != "odd":  # no stride is bound
        strides = (2 * columns + 3, 2) if order == "any" else (2, 2 * lines + 3)
        return (strides if case.free == "strided" else (-strides[0], -strides[1])), shift
    line = lines if order == "columns" else columns
    length = (-(-line // together) + case.extra) * together
    if odd and length // together % 2 == 0:
        length += together
    return ((1, length) if order == "columns" else (length, 1)), shift


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64).astype(np.longdouble)
