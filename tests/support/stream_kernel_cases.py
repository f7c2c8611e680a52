"""Problems for kernels/tsm2/tsm2r_columns.cu, _rows.cu, _staged.cu and _tensor.cu, their data in memory, and the judge
of
what they made.

Why this grid
-------------
*Configurations* are the kernels' paths. Of columns and rows (`CONFIGS`): both forms; every combination of types that a
product can have; loads of 16, 8, 4 and 2 bytes; every t2, those among them whose columns of B are no multiple of 16
bytes, and so many sums of a thread that they are exchanged in several rounds; one and several vectors of a thread, and
rows of a warp, and a number of them that is no power of two; two warps, and four. Of rows that go through shared memory
(`STAGED`): every number of vectors in a stage, so every way in which they change places; rings of 2, 3 and 4 stages;
rows of B that fill units of 16 bytes and such that do not. Of tensor cores (`TENSOR`): both orders of float64, both
16-bit types with results of 32 bits and 16; 8, 16, 24 and 32 columns; one warp and two, of one tile and of two; vectors
of float64 that are loaded in halves. Of both forms that may read B along its columns, some that do.

*Shapes* (`shapes`) are where these have their edges: m one below, at and one above a tile, within a vector, and several
tiles; k one below, at and one above a step, a stage of B and several stages, and shorter than a vector; n = 1, t2 - 1
and t2, and the 2 and 4 that tensor cores copy at once. k is one part, or in parts of one to three steps, the last of
which is not full; some parts have nothing at all.

*Memory.* Where 16 bytes are loaded, address and strides of A are multiples of 16; where fewer are, odd multiples of so
many. B is dense (which is copied 16 bytes at a time), the same at another address, of rows with as many elements
between them ("spaced"), row-major, column-major, the same with columns that begin at multiples of 16 bytes ("turned":
all that a kernel that reads along them gets), of strides that are unit in neither direction, or negative; C is one of
the plain ones, or dense: what lies side by side in it is stored 16 bytes at a time. There are stacks of three products,
with one B for each or for all. NaN surrounds all matrices; what surrounds C has to be what it was, bit by bit.

alpha, beta and data vary together with these, in cycles of lengths without a common factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from abft_tsm2.core.division import Grid, workspace
from abft_tsm2.core.kernels import Shape, Stream
from tests.support.cases import DTYPES, finfo
from tests.support.kernel_cases import ALPHA_BETA, DATA, Placed, strides_of, wrong_elements

TYPES = {dtype.name: dtype for dtype in DTYPES}
B_ORDERS = ("dense", "C", "F", "turned", "shifted", "strided", "reversed", "spaced")
C_ORDERS = ("C", "F", "strided", "dense", "reversed")
FORMS = {"columns": "F", "rows": "C"}  # of `CONFIGS`, and the order of A
GAP = 5  # elements between the matrices of a stack


def _configs() -> Iterator[Stream]:
    """Types of A, B, sums and C; width, t2; and t1, tcf, t3, pairs, which both forms take."""
    single, double = "float32", "float64"
    for form in FORMS:
        plans = [
            (single, single, single, single, 16, 4, (64, 1, 2, 1)),
            (single, single, single, single, 8, 3, (64, 2, 1, 2)),
            (single, single, single, single, 4, 1, (64, 3, 2, 1)),
            (single, single, single, single, 16, 12, (128, 1, 1, 1)),
            (single, single, single, single, 16, 16, (64, 2, 1, 1)),
            (single, single, single, single, 4, 32, (64, 2, 1, 1)),
            (double, double, double, double, 16, 4, (64, 2, 2, 1)),
            (double, double, double, double, 8, 3, (64, 3, 1, 1)),
            (double, double, double, double, 16, 1, (64, 4, 1, 4)),
            (double, double, double, double, 8, 24, (64, 1, 1, 1)),
            (single, single, double, double, 16, 2, (64, 2, 1, 2)),
            (single, single, double, double, 4, 6, (64, 1, 2, 1)),
            (single, double, double, double, 16, 4, (64, 1, 1, 1)),
            (single, double, double, double, 8, 3, (64, 2, 1, 1)),
            (double, single, double, double, 8, 2, (64, 1, 2, 1)),
        ]
        if form == "rows":  # pairs = 0: B is fetched for a step at a time; 16-bit B of few columns waits in registers
            plans += [
                (single, single, single, single, 16, 4, (64, 2, 1, 0)),
                (double, double, double, double, 8, 6, (64, 1, 2, 0)),
                ("float16", "float16", single, single, 16, 2, (64, 2, 1, 1)),
                ("float16", "float16", single, single, 8, 1, (128, 1, 1, 1)),
                ("float16", "float16", single, "float16", 4, 3, (64, 1, 1, 1)),
                ("bfloat16", "bfloat16", single, single, 16, 4, (64, 1, 1, 0)),
            ]
        else:  # several of them a thread
            plans += [
                ("float16", "float16", single, single, 16, 4, (64, 1, 4, 2)),
                ("bfloat16", "bfloat16", single, "bfloat16", 8, 6, (64, 2, 2, 2)),
            ]
        for half in ("float16", "bfloat16"):
            plans += [
                (half, half, single, single, 16, 4, (64, 1, 1, 2)),
                (half, half, single, single, 4, 8, (64, 2, 1, 1)),
                (half, single, single, single, 8, 2, (64, 1, 2, 1)),
                (half, half, single, half, 2, 3, (64, 3, 1, 1)),
                (half, half, double, double, 16, 2, (64, 1, 1, 1)),
            ]
        for *types, width, t2, shape in plans:
            if types[0] in TYPES:
                yield Stream(form, *types, width, t2, Shape(*shape, 1))
    for *types, width, t2, shape in (
        (single, single, single, single, 16, 4, (64, 1, 4, 1)),
        (single, single, single, single, 4, 12, (64, 1, 4, 2)),
        (single, single, single, single, 16, 16, (128, 1, 8, 1)),
        (double, double, double, double, 16, 8, (64, 1, 2, 1)),
        (double, double, double, double, 8, 3, (64, 2, 4, 1)),
        ("float16", single, single, single, 8, 6, (64, 1, 4, 1)),
    ):
        yield Stream("columns", *types, width, t2, Shape(*shape, 1), turned=True)


def _wide(
    form: str, *plans: tuple[str, int, tuple[int, int, int, int], int], width: int = 16, turned: bool = False
) -> Iterator[Stream]:
    """Types of A, B, sums and C, a letter each; t2; t1, tcf, t3, pairs; and the order of A."""
    names = {"s": "float32", "d": "float64", "h": "float16", "b": "bfloat16"}
    for types, t2, shape, order in plans:
        a, b, sums, c = (names[letter] for letter in types)
        if a in TYPES:
            yield Stream(form, a, b, sums, c, width, t2, Shape(*shape, 1), order, turned=turned)


CONFIGS: Sequence[Stream] = tuple(_configs())
STAGED: Sequence[Stream] = tuple(
    _wide(
        "staged",
        ("ssss", 16, (32, 2, 4, 3), 0),
        ("ssss", 12, (64, 2, 4, 2), 0),
        ("dddd", 9, (64, 1, 2, 3), 0),
        ("hhss", 16, (32, 1, 1, 2), 0),
        ("ssss", 9, (64, 1, 8, 3), 0),
        ("ssss", 32, (32, 1, 2, 4), 0),
        ("ssss", 8, (64, 1, 8, 2), 0),
        ("ssdd", 10, (32, 1, 4, 2), 0),
        ("sddd", 8, (32, 3, 2, 2), 0),
        ("dddd", 16, (64, 2, 4, 2), 0),
        ("dsdd", 24, (32, 1, 2, 3), 0),
        ("hsss", 12, (32, 1, 2, 2), 0),
        ("bbsb", 7, (32, 2, 2, 2), 0),
        ("bbdd", 16, (64, 1, 1, 4), 0),
        ("ssss", 16, (32, 2, 8, 2), 0),
    )
)
TENSOR: Sequence[Stream] = (
    *_wide(
        "tensor",
        ("dddd", 8, (64, 1, 1, 1), 0),
        ("dddd", 16, (32, 2, 2, 1), 0),
        ("dddd", 24, (32, 1, 1, 2), 0),
        ("dddd", 8, (64, 2, 1, 1), 1),
        ("dddd", 16, (32, 1, 1, 2), 1),
        ("dddd", 24, (32, 1, 2, 1), 1),
        ("hhss", 8, (64, 1, 1, 1), 1),
        ("hhsh", 16, (32, 2, 1, 2), 1),
        ("bbss", 24, (32, 1, 2, 1), 1),
        ("bbsb", 8, (32, 1, 1, 2), 1),
        ("bbss", 32, (64, 1, 1, 1), 1),
    ),
    *_wide(
        "tensor",
        ("dddd", 8, (64, 1, 1, 1), 0),
        ("dddd", 24, (32, 2, 2, 1), 0),
        ("dddd", 16, (64, 1, 1, 2), 1),
        ("hhsh", 16, (32, 2, 1, 2), 1),
        ("bbss", 8, (64, 1, 2, 1), 1),
        turned=True,
    ),
    *_wide("tensor", ("dddd", 16, (32, 2, 1, 1), 0), ("dddd", 8, (64, 1, 1, 2), 1), width=8),
    *_wide("tensor", ("dddd", 8, (32, 1, 2, 1), 0), ("dddd", 16, (64, 1, 1, 1), 1), width=8, turned=True),
    *_wide("tensor", ("hhss", 8, (64, 4, 1, 1), 0), ("bbss", 16, (32, 8, 1, 2), 0), ("bbsb", 24, (32, 4, 2, 1), 0)),
    *_wide("tensor", ("bbss", 16, (64, 4, 1, 1), 0), ("hhsh", 8, (32, 4, 1, 2), 0), turned=True),
)


@dataclass(frozen=True)
class Case:
    """One call: C = alpha A B + beta C, for each of `batch` products.

    A line of A is `extra` vectors longer in memory than it has to be. A part of k has so many `steps`, 0 standing for
    all; `idle` parts lie beyond the end of k. `shared` is one B for all products.
    """

    config: Stream
    m: int
    k: int
    n: int
    steps: int = 0
    idle: int = 0
    extra: int = 0
    b_order: str = "C"
    c_order: str = "C"
    batch: int = 1
    shared: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    data: str = "uniform"

    @property
    def grid(self) -> Grid:
        config = self.config
        total = -(-self.k // config.step)
        steps = self.steps or total
        return Grid(-(-self.m // config.tile), -(-total // steps) + self.idle, steps * config.step, self.batch)

    def __str__(self) -> str:
        parts = f"{self.steps} steps, {self.idle} idle" if self.steps else "whole"
        layout = f"+{self.extra} B-{self.b_order} C-{self.c_order} batch={self.batch}{' shared' * self.shared}"
        scalars = f"alpha={self.alpha} beta={self.beta} {self.data}"
        return f"{self.config.name} {self.m}x{self.k}x{self.n} {parts} {layout} {scalars}"


def order_of(config: Stream) -> str:
    """Of A: F where its columns are contiguous, C where its rows are."""
    return "FC"[config.order] if config.form == "tensor" else FORMS.get(config.form, "C")


def b_orders(config: Stream) -> Sequence[str]:
    """Those of `B_ORDERS` that a kernel takes."""
    return ("turned",) if config.turned else B_ORDERS


def stage_of(config: Stream) -> int:
    """Elements of k for which a kernel fetches B at a time."""
    return config.step * max(1, 2 * config.shape.pairs)


def shapes(config: Stream) -> list[tuple[int, int, int]]:
    """The (m, k, n) at which a kernel of these constants has its edges."""
    tile, step, stage, t2, vector = config.tile, config.step, stage_of(config), config.t2, config.vector
    return [
        (1, 1, 1),
        (tile - 1, step - 1, max(1, t2 - 1)),
        (tile, step, t2),
        (tile + 1, step + 1, t2),
        (tile // 2 + 1, stage - 1, t2),
        (2 * tile, stage, t2),
        (tile + vector // 2 + 1, stage + 1, 1),
        (2 * tile + 3, 2 * stage + step // 2 + 1, t2),
        (tile, 3 * stage + step - 1, t2),
        (2 * tile, stage + 2 * step, t2),
        (tile + 2 * vector, 3 * step + max(1, vector - 1), max(1, t2 - 1)),
        (2 * vector, step + max(1, vector - 1), t2),
        (3 * tile - 1, 4 * stage, t2),
    ]


def cases(config: Stream) -> list[Case]:
    """Every shape of a configuration twice, with parts, layouts, scalars and data in turn; more with a rest."""
    known, orders = (*CONFIGS, *STAGED, *TENSOR), b_orders(config)
    start = known.index(config) if config in known else 0

    def case(i: int, shape: tuple[int, int, int]) -> Case:
        turn = 7 * start + i
        alpha, beta = (float(x) for x in ALPHA_BETA[turn % len(ALPHA_BETA)])
        steps = (0, 1, 2, 3)[turn % 4]
        parts = (steps, (0, 1, 0, 2, 0)[turn % 5] if steps else 0)
        layout = (turn % 3, orders[(turn + turn // 8) % len(orders)], C_ORDERS[turn // 3 % len(C_ORDERS)])
        batch = (3 if turn % 7 == 4 else 1, turn % 4 < 2)
        return Case(config, *shape, *parts, *layout, *batch, alpha, beta, DATA[turn % 3])

    made = [case(i, shape) for i, shape in enumerate(shapes(config) * 2)]
    more = [(config.t2, orders[0])] * 4  # which is copied at once, with every number of steps
    if config.form == "tensor" and config.t2 == 8 and config.dtype != "float64" and not config.turned:
        more += product((2, 4), ("dense", "spaced", "C", "shifted", "strided"))
    sizes = config.tile + 3, 2 * stage_of(config) + config.step // 2 + 1
    return made + [replace(case(i, (*sizes, n)), b_order=order, alpha=-0.5) for i, (n, order) in enumerate(more)]


@dataclass(frozen=True)
class Operands:
    """A, B and C of a case in memory, and C as it was: NaN where beta is 0."""

    case: Case
    a: Placed
    b: Placed
    c: Placed

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> Operands:
        rng = np.random.default_rng(seed)
        draw = rng.random if case.data == "uniform" else rng.standard_normal
        config, batch = case.config, case.batch
        strides, shift = _strides_of_a(case)
        a = Placed.strided((batch, case.m, case.k), TYPES[config.dtype], strides, shift)
        b = _stack((case.k, case.n), TYPES[config.weights], case.b_order, 3, batch, shared=case.shared)
        c = _stack((case.m, case.n), TYPES[config.out], case.c_order, 1, batch)
        for placed in (a, b, c) if case.beta != 0 else (a, b):
            placed.matrix()[...] = draw(placed.shape)
        return cls(case, a, b, c)

    def arguments(self, a: Any, b: Any, c: Any, partial: Any, tickets: Any) -> tuple[Any, ...]:
        """A kernel's arguments; the five stand for what it takes pointers to."""
        case, real = self.case, np.dtype(self.case.config.sums).type
        (bsa, *sa), (bsb, *sb), (bsc, *sc) = (placed.strides for placed in (self.a, self.b, self.c))
        lda = max(sa)  # the other one is 1
        sizes = (case.m, case.k, case.n)
        factors = real(case.alpha), real(case.beta)
        return (
            *sizes,
            factors[0],
            a,
            lda,
            bsa,
            b,
            *sb,
            bsb,
            factors[1],
            c,
            *sc,
            bsc,
            case.grid.slice,
            partial,
            tickets,
        )

    def scratch(self) -> tuple[np.ndarray, np.ndarray]:
        """Memory for partial sums, of the exact size and all NaN, and tickets."""
        size, tickets = workspace(self.case.config, self.case.grid)
        sums = np.dtype(self.case.config.sums)
        return np.full(size // sums.itemsize, np.nan, sums), np.zeros(tickets, np.uint32)


def _strides_of_a(case: Case) -> tuple[tuple[int, int, int], int]:
    """Of products, rows and columns; and how far the first element is from a multiple of 16 bytes."""
    config = case.config
    vector, narrow = config.vector, config.width < 16
    columns = order_of(config) == "F"
    line, lines = (case.m, case.k) if columns else (case.k, case.m)
    vectors = -(-line // vector) + case.extra
    lda = (vectors + (narrow and vectors % 2 == 0)) * vector
    apart = (lines * lda // vector + 1) * vector
    return ((apart, 1, lda) if columns else (apart, lda, 1)), vector if narrow else 0


def _stack(shape: tuple[int, int], dtype: Any, order: str, extra: int, batch: int, *, shared: bool = False) -> Placed:
    rows, columns = shape
    unit = 16 // np.dtype(dtype).itemsize
    aligned = {
        "dense": (columns, 1),
        "shifted": (columns, 1),
        "spaced": (2 * columns, 1),
        "turned": (1, -(-rows // unit) * unit),
    }
    strides = aligned.get(order) or strides_of(shape, order, extra)
    span = 1 + sum((size - 1) * abs(stride) for size, stride in zip(shape, strides, strict=True))
    apart = 0 if shared else -(-span // 8) * 8 + 8 if order in aligned else span + GAP  # 8 elements: 16 bytes and more
    return Placed.strided((batch, *shape), dtype, (apart, *strides), int(order == "shifted"))


def faults(operands: Operands, memory: np.ndarray, tickets: np.ndarray, *, flushes: bool = False) -> list[str]:
    """What is wrong; nothing, if C is a correctly computed alpha A B + beta C and all else is as it was.

    Parameters
    ----------
    operands : Operands
        As they were before the kernel ran.
    memory, tickets : 1-D ndarrays
        The buffer of C, and the tickets, afterwards.
    flushes : bool
        Whether the kernel takes subnormal float32 numbers for zero, as kernels compiled through CuPy do, and cuts off
        sums of 16-bit products, as tensor cores do, instead of rounding them to nearest.

    Notes
    -----
    Element by element ``|C - exact| <= f u M + f tiny`` as in `kernel_cases.faults`, of the type of the sums,
    and a rounding to the type of C where it is another one.
    """
    case, config = operands.case, operands.case.config
    found = operands.c.written_around(memory)
    if tickets.any():
        found.append(f"{np.count_nonzero(tickets)} ticket(s) are not 0 again")
    wide = np.float64 if config.sums == "float32" else np.longdouble
    a, b, before, c = (
        _widened(x, wide)
        for x in (operands.a.matrix(), operands.b.matrix(), operands.c.matrix(), operands.c.matrix(memory))
    )
    exact, magnitude = case.alpha * (a @ b), abs(case.alpha) * (abs(a) @ abs(b))
    if case.beta != 0:
        exact, magnitude = exact + case.beta * before, magnitude + abs(case.beta * before)
    limits = np.finfo(config.sums)
    single = config.sums == "float32"
    tiny = limits.smallest_normal if flushes and single else limits.smallest_subnormal
    factor = case.k if (case.alpha, case.beta) == (1, 0) else case.k + 3
    if flushes and single and config.form == "tensor":
        factor *= 2
    bound = factor * (float(limits.eps) / 2 * magnitude + float(tiny))
    bound += (case.k + 3) * np.finfo(wide).eps / 2 * magnitude
    if config.out != config.sums:
        stored = finfo(TYPES[config.out])
        bound += float(stored.eps) / 2 * (abs(exact) + bound) + float(stored.smallest_subnormal)
    return found + wrong_elements(c, exact, bound)


def _widened(x: np.ndarray, wide: Any) -> np.ndarray:
    return x.astype(np.float32).astype(wide) if x.itemsize == 2 else x.astype(wide)
