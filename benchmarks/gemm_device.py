"""What is measured of protected products on a GPU, and who takes part: the grid, operands, contenders.

A cell is a product and a variant of its protection. Cells of the same product are measured together, in the same
rounds as the plain product by cuBLAS. `benchmarks.gemm_suites` measures them, `benchmarks.gemm_bars` has the bars.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from abft_tsm2 import encode, protected_gemm
from abft_tsm2.arrays import FLOATS, bit_pattern
from abft_tsm2.checksum.device.kernels import Equilibrate, RepairKernel, line_sums, sums_of
from abft_tsm2.core.cublas import Gemm
from abft_tsm2.core.problem import Problem
from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.faults.judge.oracle import BLOCK_BYTES, Array
from abft_tsm2.report import Report, Status
from benchmarks.gemm_judge import SAMPLED, WHOLE
from benchmarks.gpu_products import CHUNK
from benchmarks.gpu_timing import Call, copies
from benchmarks.stream_operands import array, fill, fill_nan

SUITES = ("square", "skinny", "batched", "repair", "host")
ONE, TWO, ENCODED, RECHECKED = "one-sided", "two-sided", "encoded", "encoded, rechecked"
WIDE, TF32 = "float32", "TF32"
"""Variants: the default check; both sides; B encoded beforehand, and its bits compared at each use; a 16-bit product
that is checked in float32; float32 by TF32, beside the plain product by TF32."""

OPTIONS: Mapping[str, Mapping[str, str]] = {
    TWO: {"check": "both"},
    WIDE: {"verify": "float32"},
    TF32: {"precision": "tf32"},
}
CLEAN, FAULTS = "clean", ("clean", "1", "16", "tile")
PLAIN = "plain"
QUEUED, DROPPED, WAITED, CUPY, PLAN = (
    *("errstate(sync=False)", "errstate(sync=False), report dropped", "errstate(sync=True)"),
    *("cupy.matmul", "cuBLAS"),
)
"""Calls whose host time is taken."""

HALVES = ("float16", "bfloat16")
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
SKINNY = ((64, 8192, 8192), (1, 4096, 4096), (16, 8192, 8192), (256, 16384, 4096))
TALL = ((8192, 64, 8192), (16384, 512, 16384))
BATCHED = ((64, 512), (256, 128), (16, 1024))
MOST_BYTES = 60 * 10**9  # of all copies of the operands
LAUNCHES = 10  # entries of the queue that one side's check takes: kernels, events, and waits for them
DISTINCT = 8  # encodings among the copies of B; they are of a few kilobytes, and shared by all copies beyond


@dataclass(frozen=True)
class Cell:
    """A is m x k, B is k x n, `batch` of each; C has the type of both.

    Attributes
    ----------
    suite : str
        One of `SUITES`.
    m, k, n : int
    dtype : str
    variant : str
        How it is protected; of "host", which call; of "repair", `ONE` by the card's clock, `WAITED` by the host's.
    faults : str
        One of `FAULTS`: what is planted between the product and the check.
    batch : int
    default : bool
        Whether it is of the subset for every day.
    """

    suite: str
    m: int
    k: int
    n: int
    dtype: str
    variant: str = ONE
    faults: str = CLEAN
    batch: int = 1
    default: bool = False

    def __str__(self) -> str:
        several = f"{self.batch} of " if self.batch > 1 else ""
        faults = f", faults: {self.faults}" if self.suite == "repair" else ""
        return f"{self.suite} {self.dtype} {several}{self.m}x{self.k}x{self.n} {self.variant}{faults}"

    @property
    def out(self) -> str:
        """Type of C."""
        return self.dtype

    @property
    def group(self) -> tuple[Any, ...]:
        """Cells that are measured beside the same plain product."""
        return self.suite, self.dtype, self.m, self.k, self.n, self.batch, self.tf32

    @property
    def tf32(self) -> bool:
        return self.variant == TF32

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return FLOATS[self.dtype].bits // 8

    @property
    def stack(self) -> tuple[int, ...]:
        return (self.batch,) if self.batch > 1 else ()

    @property
    def bytes(self) -> int:
        """Of A, B and C."""
        return self.batch * self.size * (self.m * self.k + self.k * self.n + self.m * self.n)

    @property
    def checked_bytes(self) -> int:
        """What a check has to move at the least: each matrix once, but for a B that was encoded beforehand, and the
        product twice in float32 and once in 16 bits where it is checked in float32."""
        left, right, result = self.m * self.k, self.k * self.n, self.m * self.n
        of_c = 2 * 4 + self.size if self.variant == WIDE else self.size
        of_b = 0 if self.variant == ENCODED else self.size
        return self.batch * (left * self.size + right * of_b + result * of_c)

    @property
    def problem(self) -> Problem:
        """What cuBLAS is asked."""
        return Problem(self.m, self.k, self.n, self.dtype, "C", out=self.out, batch=self.batch)


# ---- the grid -----------------------------------------------------------------------------------------------------

_EVERY_DAY = {
    *(("square", "float32", 512, ONE), ("square", "float32", 2048, ONE), ("square", "float32", 2048, ENCODED)),
    *(("square", "float32", 8192, ONE), ("square", "float32", 8192, TWO), ("square", "float64", 4096, ONE)),
    *(("square", "bfloat16", 4096, variant) for variant in (ONE, ENCODED, WIDE)),
    *(("square", "bfloat16", 8192, ONE), ("skinny", "bfloat16", 64, ENCODED), ("batched", "float32", 512, ONE)),
    *(("repair", "float32", 8192, ONE), ("host", "float32", 512, QUEUED), ("host", "float32", 512, PLAN)),
}


@functools.cache
def grid() -> tuple[Cell, ...]:
    """All cells; those with `default` are the subset for every day."""
    cells = (*_square(), *_skinny(), *_batched(), *_repair(), *_host())
    return tuple(
        replace(cell, default=(cell.suite, cell.dtype, cell.m, cell.variant) in _EVERY_DAY and cell.faults != "16")
        for cell in cells
    )


def _square() -> Iterator[Cell]:
    variants = {"float32": (ONE, TWO, ENCODED, RECHECKED, TF32), "float64": (ONE, ENCODED, RECHECKED)}
    variants |= dict.fromkeys(HALVES, (ONE, ENCODED, RECHECKED, WIDE))
    for dtype, of_type in variants.items():
        for tf32 in (False, True):
            for n in SIZES[:-1] if dtype == "float64" else SIZES:
                yield from (Cell("square", n, n, n, dtype, one) for one in of_type if (one == TF32) == tf32)


def _skinny() -> Iterator[Cell]:
    for dtype in HALVES:
        for shape in SKINNY:
            yield from (Cell("skinny", *shape, dtype, variant) for variant in (ENCODED, RECHECKED))
    for shape in TALL:
        yield from (Cell("skinny", *shape, "float32", variant) for variant in (ONE, ENCODED))


def _batched() -> Iterator[Cell]:
    for dtype in ("float32", "bfloat16"):
        yield from (Cell("batched", n, n, n, dtype, batch=batch) for batch, n in BATCHED)


def _repair() -> Iterator[Cell]:
    for dtype in ("float32", "float64", "bfloat16"):
        for n in SIZES[2:5]:
            yield from (Cell("repair", n, n, n, dtype, clock, faults) for clock in (ONE, WAITED) for faults in FAULTS)


def _host() -> Iterator[Cell]:
    # Reports that nobody waits for are looked at by later calls: that one comes last.
    return (Cell("host", 512, 512, 512, "float32", call) for call in (CUPY, PLAN, QUEUED, WAITED, DROPPED))


def kernels(cell: Cell, multiprocessors: int) -> Iterator[Any]:
    """The kernels of a check by rows, to be compiled side by side beforehand; one that is missing here is compiled at
    its first use."""
    m, k, n, dtype = cell.m, cell.k, cell.n, cell.dtype
    acc, stored, cast = sums_of(dtype), dtype, ""
    if cell.variant == WIDE:
        stored, cast = "float32", dtype
    sums = partial(line_sums, multiprocessors=multiprocessors, acc=acc)
    yield sums(dtype, k, n, words=True, out=acc)
    yield sums(dtype, m, k, given=True, words=True)
    yield sums(stored, m, n, verdict=True, out=cast)
    yield from (Equilibrate(dtype), RepairKernel(dtype, stored, cast))


# ---- operands -----------------------------------------------------------------------------------------------------


class Operands:
    """A and B in rows, normally distributed, as many copies of them as a cold cache needs; all copies are alike."""

    def __init__(self, cell: Cell, copies: int, seed: int) -> None:
        import cupy

        self.cell, self.copies = cell, copies
        self.A = [array((*cell.stack, cell.m, cell.k), cell.dtype) for _ in range(copies)]
        self.B = [array((*cell.stack, cell.k, cell.n), cell.dtype) for _ in range(copies)]
        draw = cupy.random.default_rng(seed).standard_normal
        for first, *others in (self.A, self.B):
            fill(first, draw)
            for other in others:
                bit_pattern(other)[...] = bit_pattern(first)
        self._encoded: list[Any] = []

    def outputs(self) -> list[Array]:
        """C for each copy, of NaN."""
        return [array((*self.cell.stack, self.cell.m, self.cell.n), self.cell.out) for _ in range(self.copies)]

    def encoded(self, recheck: bool) -> list[Any]:
        """Each copy of B, encoded."""
        if not self._encoded:
            some = [encode(B, side="rows", recheck=False) for B in self.B[:DISTINCT]]
            self._encoded = [replace(some[i % len(some)], array=B) for i, B in enumerate(self.B)]
        return [replace(one, recheck=recheck) for one in self._encoded]


def copies_of(cell: Cell, outputs: int) -> int:
    """How many copies of operands, with so many outputs of each, leave none of them in the cache."""
    return max(1, min(copies(cell.bytes), MOST_BYTES // _copy(cell, outputs)))


def memory(cell: Cell, outputs: int) -> int:
    """An upper estimate of what operands, outputs, random numbers, the judge and the check take."""
    whole = cell.batch * cell.m * cell.k * cell.n <= WHOLE
    rows = cell.m if whole else 2 * SAMPLED
    judged = 6 * 8 * cell.batch * (cell.k * cell.n + rows * (cell.k + 2 * cell.n))
    judged += 2 * min(BLOCK_BYTES, 8 * cell.batch * cell.m * max(cell.k, cell.n))
    drawn = 3 * 8 * min(CHUNK, cell.batch * max(cell.m, cell.n) * cell.k)
    wide = 4 * cell.batch * cell.m * cell.n
    return copies_of(cell, outputs) * _copy(cell, outputs) + judged + drawn + wide


def _copy(cell: Cell, outputs: int) -> int:
    return cell.bytes + (outputs - 1) * cell.batch * cell.m * cell.n * cell.size


# ---- contenders ---------------------------------------------------------------------------------------------------


class Reports:
    """What became of the reports of a contender: `collect` waits for those that are pending.

    Attributes
    ----------
    statuses : Counter of str
    suspicions : int
    at_once : int
        Reports that were not pending when the call returned.
    """

    def __init__(self) -> None:
        self._open: list[Report] = []
        self.statuses: Counter[str] = Counter()
        self.suspicions = self.at_once = 0

    def add(self, report: Report) -> None:
        self._open.append(report)

    def collect(self) -> None:
        for report in self._open:
            self.at_once += report.status is not Status.PENDING
            try:
                final = report.wait()
            except SilentDataCorruptionError as error:
                final = error.report
            self.statuses[final.status.name] += 1
            self.suspicions += final.suspicions
        self._open.clear()

    def trouble(self, expected: Status) -> str:
        """What is wrong with the statuses; empty where nothing is."""
        others = {name: count for name, count in self.statuses.items() if name != expected.name}
        total = sum(self.statuses.values())
        if not total:
            return f"no report says {expected.name}: there is none"
        told = ", ".join(f"{count} {name}" for name, count in others.items())
        return f"of {total} reports that should say {expected.name}, there are {told}" if others else ""

    def __str__(self) -> str:
        counts = sorted(self.statuses.items())
        return counts[0][0] if len(counts) == 1 else ", ".join(f"{count} {name}" for name, count in counts)


@dataclass(frozen=True)
class Contender:
    """One way to have the product.

    Attributes
    ----------
    call : Call
    outputs : list of arrays
        C for each copy of the operands.
    reports : Reports
        Of the calls so far; the plain product has none.
    """

    call: Call
    outputs: list[Array]
    reports: Reports = field(default_factory=Reports)

    def poison(self) -> None:
        """Fill the outputs with NaN, so that an element that is not written shows."""
        for C in self.outputs:
            fill_nan(C)


def plain(cell: Cell, operands: Operands) -> Contender:
    """The unprotected product: one call of cuBLAS."""
    A, B, C = operands.A, operands.B, operands.outputs()
    gemm = Gemm.of(cell.problem, A[0], B[0], C[0], tf32=cell.tf32)
    # A product that k is divided for among blocks has a kernel that adds up.
    return Contender(Call(lambda i: gemm(A[i], B[i], C[i], 1.0, 0.0), operands.copies, launches=2), C)


def protected(cell: Cell, operands: Operands) -> Contender:
    """The same, protected; it waits for nothing under ``errstate(sync=False)``."""
    A, C, reports = operands.A, operands.outputs(), Reports()
    B: Sequence[Any] = operands.B
    if cell.variant in (ENCODED, RECHECKED):
        B = operands.encoded(cell.variant == RECHECKED)
    named: dict[str, Any] = {**OPTIONS.get(cell.variant, {}), "return_report": True}

    def run(i: int) -> None:
        reports.add(protected_gemm(A[i], B[i], out=C[i], **named)[1])

    launches = LAUNCHES * (1 + (cell.variant == TWO))
    return Contender(Call(run, operands.copies, launches), C, reports)


def seed_of(cell: Cell) -> int:
    """Of the random numbers of its operands."""
    return math.prod((cell.m, cell.k + 1, cell.n + 2, cell.batch + 3)) % 2**32
