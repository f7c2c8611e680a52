"""Problems for the tall-skinny kernels, their data in memory, and the judge of what a kernel made of them.

For the kernels on the CPU (tests/support/cuda_on_cpu) and on a GPU alike: nothing here runs a kernel.

Why this grid
-------------
*Shapes* (`shapes`) follow the kernel's own constants, because that is where its edges are. 0 in each position, and
everywhere: nothing to do, or C = beta C, is still to be done. 1 everywhere, and one row with a long k. m one below, at
and one above t1 and the rows of a block, tcf t1; several blocks, the last of them not full, also where only some of a
block's tcf tiles of A exist. k one below, at and one above t3 and t1, k of three tiles of B, k no multiple of t3; t3
that does not divide t1 comes with the configurations. n below and above t2, twice t2 and one more.

*Memory.* The leading dimension of A is m or larger. B and C are row-major, column-major, of strides that are unit in
neither direction, and of negative strides. What surrounds A and B in their buffers is NaN: a result that depends on it
shows. What surrounds C is NaN too, and afterwards has to be what it was, bit by bit.

*alpha and beta* take 1, 0, -0.5 and 2: the numbers that kernels treat apart, a sign, and one more. Where beta is 0, C
is NaN beforehand: it must not be read.

*Data* are uniform in [0, 1), as in the paper, where every rounding error counts alike, or normal, where terms cancel.

These vary together, in cycles whose lengths have no common factor with each other or with the number of shapes: the
full product would be a hundred times larger, and each configuration starts at another point of the cycles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from abft_tsm2.core.compiler import Kernel, source
from abft_tsm2.core.paper.config import Config, published
from abft_tsm2.core.problem import Problem
from tests.support.oracles import rows_outside

DTYPES = ("float64", "float32")
ORDERS = ("C", "F", "strided", "reversed")
SCALARS = (1.0, 0.0, -0.5, 2.0)
ALPHA_BETA = ((1, 0), (2, 0), (1, 1), (-0.5, 2), (1, 0), (0, -0.5), (1, -0.5), (0, 0), (2, 1), (-0.5, 0), (1, 2))
LDA_EXTRA = (0, 3, 1, 0, 7)
DATA = ("uniform", "normal", "uniform")
GUARD = 64  # elements before and after a matrix in its buffer


@dataclass(frozen=True)
class Case:
    """One call of one kernel: C = alpha A B + beta C.

    A is m x k and column-major with leading dimension m + lda_extra; b_order and c_order are of `ORDERS`; data is
    "uniform" or "normal".
    """

    config: Config
    m: int
    k: int
    n: int
    lda_extra: int = 0
    b_order: str = "C"
    c_order: str = "C"
    alpha: float = 1.0
    beta: float = 0.0
    data: str = "uniform"

    @property
    def dtype(self) -> str:
        return self.config.dtype

    @property
    def problem(self) -> Problem:
        return Problem(self.m, self.k, self.n, self.dtype)

    def __str__(self) -> str:
        layout = f"lda+{self.lda_extra} B-{self.b_order} C-{self.c_order}"
        return f"{self.config.name} {self.m}x{self.k}x{self.n} {layout} alpha={self.alpha} beta={self.beta} {self.data}"


def shapes(config: Config) -> list[tuple[int, int, int]]:
    """The (m, k, n) at which a kernel of these constants has its edges."""
    t1, t2, t3, rows = config.t1, config.t2, config.t3, config.t1 * config.tcf
    return [
        *((0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0)),
        *((1, 1, 1), (1, 2 * t1 + 1, t2 + 1), (2, 3, 2)),
        (rows - 1, max(1, t3 - 1), max(1, t2 - 1)),
        (rows, t3, 1),
        (rows + 1, t3 + 1, t2),
        (t1 - 1, t1 - 1, t2 + 1),
        (t1, t1, t2),
        (t1 + 1, t1 + 1, 2 * t2 + 1),
        (2 * t1 - 1, t1 + t3 + 1, 3),
        (3 * rows + 5, 2 * t1 + 3, min(t2, 4)),
        (2 * rows + t1 // 2 + 3, t1 + 5, t2),
        (2 * rows, t1, t2),
        (2 * t1, 2 * t1, 2 * t2),
        (37, 3 * t1 + t3 // 2 + 1, 2 * t2 + 1),
    ]


def cases(config: Config) -> list[Case]:
    """Every shape of a configuration twice, with layouts, scalars and data in turn."""
    start = CONFIGS.index(config) if config in CONFIGS else 0
    turns = count(7 * start)

    def case(shape: tuple[int, int, int]) -> Case:
        turn = next(turns)
        alpha, beta = ALPHA_BETA[turn % len(ALPHA_BETA)]
        orders = ORDERS[turn % 4], ORDERS[turn // 4 % 4]
        return Case(config, *shape, LDA_EXTRA[turn % 5], *orders, float(alpha), float(beta), DATA[turn % 3])

    return [case(shape) for shape in shapes(config) * 2]


def planted(name: str, config: Kernel, old: str, occurrence: int, new: str) -> tuple[str, str]:
    """A name, and the kernel's text under this name with a fault in place of one occurrence of `old`."""
    parts = source(config).split(old)
    assert len(parts) > occurrence + 1, f"{name}: the kernel has not {occurrence + 1} of {old!r}"
    text = old.join(parts[: occurrence + 1]) + new + old.join(parts[occurrence + 1 :])
    assert text != source(config)
    return name, text.replace(config.name, name)


def _configs() -> Iterator[Config]:
    """The published parameters of every variant, and small odd ones that meet many edges in small problems."""
    for dtype in DTYPES:
        for variant in ("V0", "V1", "V2", "V3"):
            for m, n in ((10240, 2), (10240, 16), (40960, 8), (40960, 16)):
                yield published(Problem(m, m, n, dtype), variant)
            for t2, t3 in ((1, 4), (2, 12), (4, 12), (4, 4)):
                yield _without_unused(Config(variant, dtype, 32, t2, t3, 1))
        for variant in ("Opt-1", "Opt-2"):
            for m, n in ((10**4, 8), (10**4, 16), (10**6, 16), (10**7, 8), (10**7, 16)):
                yield published(Problem(m, n, n, dtype), variant)
            for t2, t3, tcf in ((1, 4, 2), (2, 12, 3), (4, 4, 1), (4, 12, 2), (1, 12, 3)):
                yield Config(variant, dtype, 32, t2, t3, tcf)


def _without_unused(config: Config) -> Config:
    unused: dict[str, Any] = {"V0": {"t2": 1, "t3": 1}, "V1": {"t3": 1}}.get(config.variant, {})
    return replace(config, **unused)


CONFIGS: Sequence[Config] = tuple(dict.fromkeys(_configs()))


@dataclass(frozen=True)
class Placed:
    """A matrix, or a stack of them, in a buffer: where its elements lie, in elements.

    Attributes
    ----------
    memory : 1-D ndarray
        The matrix and at least `GUARD` elements on either side.
    offset : int
        Of the first element.
    shape, strides : tuples of int
    """

    memory: np.ndarray
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def empty(cls, shape: tuple[int, int], dtype: Any, order: str, extra: int = 0) -> Placed:
        """All NaN, the surroundings too; a line of the matrix is `extra` elements longer in memory."""
        return cls.strided(shape, dtype, strides_of(shape, order, extra))

    @classmethod
    def strided(cls, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], shift: int = 0) -> Placed:
        """All NaN, the surroundings too; where no stride is negative, the first element lies `shift` elements from a
        multiple of 16 bytes."""
        reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size]
        low, high = sum(min(step, 0) for step in reach), sum(max(step, 0) for step in reach)
        memory = np.full(high - low + 1 + shift + 2 * GUARD, np.nan, dtype)
        return cls(memory, GUARD + shift - low, shape, strides)

    def matrix(self, memory: Any = None) -> Any:
        """The matrix as a view of `memory`: this one's, or a copy of it, of NumPy or CuPy."""
        memory = self.memory if memory is None else memory
        size = memory.itemsize
        strides = tuple(stride * size for stride in self.strides)
        if isinstance(memory, np.ndarray):
            return np.ndarray(self.shape, memory.dtype, memory, self.offset * size, strides)
        import cupy

        return cupy.ndarray(self.shape, memory.dtype, memory.data + self.offset * size, strides)

    def surroundings(self, memory: np.ndarray) -> np.ndarray:
        """The bit patterns of all elements of `memory` that are not the matrix's."""
        outside = np.ones(memory.shape, bool)
        np.ndarray(self.shape, bool, outside, self.offset, self.strides)[...] = False
        return memory.view(f"u{memory.itemsize}")[outside]

    def written_around(self, memory: np.ndarray) -> list[str]:
        """What is wrong with the surroundings: nothing, if `memory`, this one's copy, still has them bit by bit."""
        changed = self.surroundings(memory) != self.surroundings(self.memory)
        return [f"{np.count_nonzero(changed)} element(s) around C were written"] if changed.any() else []


def strides_of(shape: tuple[int, int], order: str, extra: int = 0) -> tuple[int, int]:
    """In elements, of a matrix of an order of `ORDERS`, a line of which is `extra` elements longer in memory."""
    rows, columns = shape
    return {
        "C": (columns + extra, 1),
        "F": (1, rows + extra),
        "strided": (2 * columns + 1 + extra, 2),
        "reversed": (-(columns + extra), -1),
    }[order]


def wrong_elements(c: np.ndarray, exact: np.ndarray, bound: np.ndarray) -> list[str]:
    """What is wrong with C, element by element: nothing, if each is finite and within its bound of the exact one."""
    with np.errstate(invalid="ignore", over="ignore"):  # whatever a faulty kernel has left
        error = abs(c.astype(exact.dtype) - exact)
        ok = (error <= bound) & np.isfinite(bound)
    if ok.all():
        return []
    at = tuple(int(i) for i in np.argwhere(~ok)[0])
    return [
        f"{np.count_nonzero(~ok)} of {ok.size} elements are wrong, the first C{list(at)} = {c[at]}, "
        f"not {exact[at]} (off by {error[at]:.3g}, rounding explains {bound[at]:.3g})"
    ]


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
        made: list[Placed] = []
        places = (((case.m, case.k), "F", case.lda_extra), ((case.k, case.n), case.b_order, 2))
        for shape, order, extra in (*places, ((case.m, case.n), case.c_order, 1)):
            placed = Placed.empty(shape, case.dtype, order, extra)
            if len(made) < 2 or case.beta != 0:
                placed.matrix()[...] = draw(shape)
            made.append(placed)
        return cls(case, *made)

    def arguments(self, a: Any, b: Any, c: Any) -> tuple[Any, ...]:
        """A kernel's arguments; a, b and c stand for the matrices, as the launcher takes them."""
        real = np.dtype(self.case.dtype).type
        case, strides = self.case, (self.a.strides, self.b.strides, self.c.strides)
        (_, lda), (rsb, csb), (rsc, csc) = strides
        sizes = (case.m, case.k, case.n)
        return (*sizes, real(case.alpha), a, lda, b, rsb, csb, real(case.beta), c, rsc, csc)


def faults(operands: Operands, memory: np.ndarray, *, flushes: bool = False) -> list[str]:
    """What is wrong with C; nothing, if it is a correctly computed alpha A B + beta C and all else is as it was.

    Parameters
    ----------
    operands : Operands
        As they were before the kernel ran.
    memory : 1-D ndarray
        The buffer of C afterwards.
    flushes : bool
        Whether the kernel takes subnormal float32 numbers for zero, as kernels compiled through CuPy do.

    Notes
    -----
    Element by element, ``|C - exact| <= f u M + f tiny`` with ``M = |alpha| |A||B| + |beta| |C0|`` and f = k for
    alpha = 1, beta = 0, else k + 3 (Higham, Accuracy and Stability of Numerical Algorithms, 2002, sec. 3.5: one
    rounding for each sum and product on the way of a term); tiny is what one underflow may cost. In norm,
    ``4 sqrt(k) u`` relative to M, which is C itself where nothing cancels. And `oracles.rows_outside`, a random
    combination of the columns, which shares no code with the first two.
    """
    case = operands.case
    found = operands.c.written_around(memory)
    a, b, before, c = operands.a.matrix(), operands.b.matrix(), operands.c.matrix(), operands.c.matrix(memory)
    exact, magnitude, reference = _exact(case, a, b, before)
    u, tiny = _limits(case.dtype, flushes)
    with np.errstate(invalid="ignore", over="ignore"):  # whatever a faulty kernel has left
        factor = case.k if (case.alpha, case.beta) == (1, 0) else case.k + 3
        found += wrong_elements(c, exact, factor * u * magnitude + factor * tiny + reference)
        error_norm, norm = _norm(c.astype(exact.dtype) - exact), _norm(magnitude)
        limit = 4 * np.sqrt(max(case.k, 1)) * u * norm + _norm(factor * tiny + reference)
        if not (error_norm <= limit and np.isfinite(limit)):
            found.append(f"the error is {error_norm:.3g} in norm, at most {limit:.3g} is rounding")
    if (case.alpha, case.beta) == (1, 0) and not flushes:
        rows = rows_outside(c, a, b, np.random.default_rng(1))
        if rows.any():
            found.append(f"a random combination of columns is wrong in rows {np.flatnonzero(rows)[:8].tolist()}")
    return found


def _exact(case: Case, a: np.ndarray, b: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """alpha A B + beta C0 in a wider type, the same of absolute values, and how far the former may be rounded."""
    wide = np.float64 if case.dtype == "float32" else np.longdouble
    a, b = a.astype(wide), b.astype(wide)
    value, magnitude = case.alpha * (a @ b), abs(case.alpha) * (abs(a) @ abs(b))
    if case.beta != 0:
        value, magnitude = value + case.beta * before.astype(wide), magnitude + abs(case.beta * before.astype(wide))
    return value, magnitude, (case.k + 3) * np.finfo(wide).eps / 2 * magnitude


def _limits(dtype: str, flushes: bool) -> tuple[float, float]:
    limits = np.finfo(dtype)
    tiny = limits.smallest_normal if flushes and dtype == "float32" else limits.smallest_subnormal
    return float(limits.eps) / 2, float(tiny)


def _norm(x: np.ndarray) -> float:
    return float(np.sqrt((x.astype(np.longdouble) ** 2).sum()))
