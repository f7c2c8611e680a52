"""Cells and rows of results/gemm_device.csv: products, variants of their protection, and what a row says of the cost.

Cells of the same product are measured together, in the same rounds as the plain product by cuBLAS. Times are those of
one call, in microseconds. The overhead is the median over the rounds of (protected - plain) / plain, in per cent; `low`
and `high` enclose it with 95 % confidence. `floor_pct` is what the least of bytes would cost at the rate at which a
kernel that only reads gets them, `hidden` the rounds in which the host was ahead of the card in both samples. With
faults, plain is the product by cuBLAS, and the overhead what they add to a protected product without one: by the card's
clock, or, of `WAITED` calls, by the host's. `benchmarks.gemm_suite` measures, `benchmarks.gemm_bars` has the bars.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from abft_tsm2.arrays import FLOATS
from abft_tsm2.checksum.device.kernels import Equilibrate, RepairKernel, line_sums, sums_of
from abft_tsm2.core.problem import Problem
from benchmarks.gpu_timing import Times
from benchmarks.rows import short
from benchmarks.timing import summary

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
    # Reports that are not waited for are settled by later calls: that one comes last.
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


# ---- rows ---------------------------------------------------------------------------------------------------------

CELL = ("suite", "dtype", "out", "m", "k", "n", "batch", "variant", "faults")
COLUMNS = (
    *CELL,
    *("plain_us", "protected_us", "overhead_us", "overhead_pct", "low_pct", "high_pct", "floor_pct"),
    *("samples", "hidden", "copies", "plain_calls", "protected_calls", "host_us"),
    *("status", "suspicions", "judged", "note", "error", "sm_mhz", "read_gbs"),
)
"""Of a row, before those of `gpu_timing.environment`. `plain_calls` and `protected_calls` are those of a sample;
`judged` is the largest error over what is allowed to it."""

Key = tuple[str, ...]
"""The values of the columns `CELL`, as text."""


def key(row: Mapping[str, Any]) -> Key:
    """The cell that a row belongs to."""
    return tuple(str(row[column]) for column in CELL)


def empty_row(cell: Cell) -> dict[str, Any]:
    """A row of a cell without numbers."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row.update({column: getattr(cell, column) for column in CELL})
    return row


def floor(cell: Cell, plain: float, read_gbs: float) -> float:
    """The time in which the check's bytes can be read, in per cent of a plain product of so many seconds."""
    return 100 * 1e-9 * cell.checked_bytes / read_gbs / plain


def compared(
    cell: Cell, plain: Sequence[float], base: Sequence[float], mine: Sequence[float], read_gbs: float
) -> dict[str, Any]:
    """The columns that follow from the seconds of the same rounds: what `mine` takes beyond `base`, by `plain`."""
    extra = [x - y for x, y in zip(mine, base, strict=True)]
    found = summary([x / y for x, y in zip(extra, plain, strict=True)])
    return {
        "samples": found.count,
        "plain_us": short(1e6 * statistics.median(plain)),
        "protected_us": short(1e6 * statistics.median(mine)),
        "overhead_us": short(1e6 * statistics.median(extra)),
        "overhead_pct": short(100 * found.median),
        "low_pct": short(100 * found.low),
        "high_pct": short(100 * found.high),
        "floor_pct": short(floor(cell, statistics.median(plain), read_gbs)) if cell.faults == CLEAN else "",
    }


def timed(cell: Cell, plain: Times, mine: Times, read_gbs: float, base: Times | None = None) -> dict[str, Any]:
    """The columns that follow from what the stopwatch read; `base` is what `mine` is compared with, if not `plain`."""
    base = base or plain
    error = plain.error or base.error or mine.error or ("" if plain.seconds else "no samples before the time limit")
    if error:
        return {"error": error}
    row = compared(cell, plain.seconds, base.seconds, mine.seconds, read_gbs)
    row["hidden"] = min(plain.hidden, base.hidden, mine.hidden)
    return {**row, "plain_calls": plain.batch, "protected_calls": mine.batch}


def text(row: Mapping[str, Any]) -> str:
    """The numbers of a row in a line."""
    if row["host_us"] != "":
        return f"{row['host_us']:.2f} us of the host"
    if row["overhead_pct"] == "":
        return ""
    line = f"{row['plain_us']:10.1f} us plain, {row['overhead_pct']:+7.2f} % [{row['low_pct']:.2f}, "
    line += f"{row['high_pct']:.2f}], {row['overhead_us']:+.1f} us"
    if row["floor_pct"] != "" and row["faults"] == CLEAN:
        line += f", floor {row['floor_pct']:.2f} %"
    if row["hidden"] != "" and row["hidden"] < row["samples"]:
        line += f", hidden {row['hidden']} of {row['samples']}"
    return line
