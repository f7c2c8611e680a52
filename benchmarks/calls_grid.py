"""Cells and rows of results/calls.csv and calls_gpu.csv: loops of calls, how they are protected, and what a row says.

Times are those of one call, in microseconds: the time of a loop, by the host's clock, over its products. The overhead
is the median over the rounds of (protected - plain) / plain, in per cent; `low` and `high` enclose it with 95 %
confidence, or with what so few rounds allow. `floor_pct` is what it takes to read A, B and C once (A and C where B is
trusted) at the rate at which this machine's memory is read. `host_us` is the time until a call returns on an idle card;
of a graph, until its launch does, over its products. `benchmarks.calls_cpu` and `benchmarks.calls_gpu` measure.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from abft_tsm2.arrays import FLOATS
from benchmarks.rows import short
from benchmarks.timing import summary

CALLS = 200  # of a loop, unless it would take too long on a CPU
CPU, GPU = "numpy", "cupy"
TYPES = ("float64", "float32", "float16", "bfloat16")
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
QUICK = (16, 256, 2048)
LARGEST = {(CPU, "float16"): 512, (CPU, "bfloat16"): 2048}
"""Of products for which there is no BLAS: NumPy takes a second for one of float16 at the size beyond."""

PROTECTED, DEFERRED, WAITED, ENCODED, TRUSTED, GRAPH = (
    *("protected", "deferred", "waited", "encoded", "trusted"),
    "graph",
)
"""How products are protected: on a CPU; on a GPU without a wait; with the verdict read after each call; with B encoded
beforehand, and not verified again; recorded as a CUDA graph, beside a graph of plain products. B is encoded, and
verified before each product, in `ENCODED`; on a GPU nothing but `WAITED` waits."""

VARIANTS = {CPU: (PROTECTED, ENCODED), GPU: (DEFERRED, WAITED, ENCODED, TRUSTED, GRAPH)}
EAGER = {CPU: PROTECTED, GPU: DEFERRED}
FILES = {CPU: "calls", GPU: "calls_gpu"}
COMMANDS = {CPU: "python -m benchmarks.bench_calls", GPU: "python -m benchmarks.bench_calls --device"}

CELL = ("library", "dtype", "n", "variant")
COLUMNS = (
    *CELL,
    *("beside", "calls", "rounds", "plain_us", "protected_us", "overhead_us", "overhead_pct", "low_pct", "high_pct"),
    *("floor_pct", "plain_host_us", "host_us", "status", "judged", "note", "error", "read_gbs"),
)
"""Of a row, before those of the environment. `beside` is the plain product's function; `status` is that of all reports;
`judged` the largest difference between both products over what is allowed to it."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A loop of products of n x n matrices.

    Attributes
    ----------
    library : str
        `CPU` or `GPU`.
    dtype : str
    n : int
    variant : str
        One of `VARIANTS` of the library.
    """

    library: str
    dtype: str
    n: int
    variant: str

    def __str__(self) -> str:
        return f"{self.library} {self.dtype} {self.n} {self.variant}"

    @property
    def group(self) -> tuple[str, str, int]:
        """Cells that are measured in the same rounds."""
        return self.library, self.dtype, self.n

    @property
    def quick(self) -> bool:
        """Whether it is of the subset for a minute."""
        return self.n in QUICK

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return FLOATS[self.dtype].bits // 8

    @property
    def checked_bytes(self) -> int:
        """What a check has to read at the least."""
        return (2 if self.variant == TRUSTED else 3) * self.size * self.n**2


@cache
def grid(library: str) -> tuple[Cell, ...]:
    """All cells of a library; groups are neighbours."""
    return tuple(
        Cell(library, dtype, n, variant)
        for dtype in TYPES
        for n in SIZES
        if n <= LARGEST.get((library, dtype), n)
        for variant in VARIANTS[library]
    )


# ---- rows ---------------------------------------------------------------------------------------------------------


def key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cell that a row belongs to."""
    return tuple(str(row[column]) for column in CELL)


def empty_row(cell: Cell, read_gbs: float) -> Row:
    """A row of a cell without numbers."""
    row: Row = dict.fromkeys(COLUMNS, "")
    row.update({column: getattr(cell, column) for column in CELL}, read_gbs=short(read_gbs))
    return row


def compared(cell: Cell, plain: Sequence[float], mine: Sequence[float], read_gbs: float) -> Row:
    """The columns that follow from the seconds of a product in the same rounds."""
    extra = [x - y for x, y in zip(mine, plain, strict=True)]
    found = summary([x / y for x, y in zip(extra, plain, strict=True)])
    beside = statistics.median(plain)
    return {
        "rounds": found.count,
        "plain_us": short(1e6 * beside),
        "protected_us": short(1e6 * statistics.median(mine)),
        "overhead_us": short(1e6 * statistics.median(extra)),
        "overhead_pct": short(100 * found.median),
        "low_pct": short(100 * found.low),
        "high_pct": short(100 * found.high),
        "floor_pct": short(100 * 1e-9 * cell.checked_bytes / read_gbs / beside),
    }


def text(cell: Cell, row: Mapping[str, Any]) -> str:
    """A row in a line, and what went wrong in a second one."""
    line = f"{cell!s:32s}"
    if row["overhead_pct"] != "":
        line += f" {row['calls']:4d} calls, {row['plain_us']:10.2f} us plain, {row['overhead_pct']:+9.2f} %"
        line += f" [{row['low_pct']:.2f}, {row['high_pct']:.2f}], floor {row['floor_pct']:.3g} %"
    if row["host_us"] != "":
        line += f", host {row['plain_host_us']} -> {row['host_us']} us"
    return line + "".join(f"\n    {row[column]}" for column in ("error", "note") if row[column])
