"""Cells and rows of results/stream.csv: products by a few columns, tall-skinny ones, both encodings of a matrix and the
host time of a call; what a row says of a contender. The bars are in `benchmarks.stream_bars`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from abft_tsm2.arrays import FLOATS
from abft_tsm2.core.problem import Problem
from abft_tsm2.core.split_k import problem_of
from benchmarks.rows import ERRORS, TIMES, short

ORDERS = ("rows", "columns", "transposed")
"""Of A. With "rows", B and C are row-major too; with "columns", column-major; "transposed" is the A.T of a row-major A
with row-major B and C: what `A.T @ B` is in NumPy."""

SUITES = (*ORDERS, "odd", "leading", "stream", "batches", "complaints", "both", "host")
SQUARE = (10240, 20480, 30720)
TYPES = (
    ("float32", "float32", (1, 2, 4, 8, 16)),
    ("float64", "float64", (1, 2, 4, 8, 16)),
    ("float32", "float64", (1, 2, 4)),
    ("bfloat16", "float32", (2, 4, 8, 16)),
    ("float16", "float32", (2, 4, 8, 16)),
)
"""Types of A and C, and columns of B."""

PLAIN = ("float32", "float64")
COMPLAINTS = ((40960, 2), (10**6, 3), (2**20, 16))  # rows of A; its columns and those of B
SHORT = 4 * 10**8  # bytes below which the launch counts, and a product is also timed in a graph


@dataclass(frozen=True)
class Cell:
    """One product: A is m x k, B is k x n. Of "both", n is the number of columns of V and of W.

    Attributes
    ----------
    suite, order : str
    m, k, n : int
    dtype, out : str
        Of A and of C.
    products : int
        How many of them in one call.
    lead : int
        By how much the leading dimension of A exceeds its rows or columns.
    default : bool
        Whether it is of the subset for every day.
    """

    suite: str
    order: str
    m: int
    k: int
    n: int
    dtype: str
    out: str
    products: int = 1
    lead: int = 0
    default: bool = True

    def __str__(self) -> str:
        order = f"{self.order} " if self.suite in ("odd", "leading", "stream", "batches") else ""
        types = self.dtype if self.out == self.dtype else f"{self.dtype}->{self.out}"
        several = f"{self.products} of " if self.products > 1 else ""
        lead = f" +{self.lead}" if self.lead else ""
        return f"{self.suite} {order}{types} {several}{self.m}x{self.k}x{self.n}{lead}"

    @property
    def weights(self) -> str:
        """Type of B."""
        return self.out if self.out == "float64" else self.dtype

    @property
    def sums(self) -> str:
        """Type in which it is added."""
        return "float64" if self.out == "float64" else "float32"

    @property
    def bytes(self) -> int:
        """The least that has to move: A, and B or V and W, read once, the results written once."""
        size, weight, result = (FLOATS[name].bits // 8 for name in (self.dtype, self.weights, self.out))
        if self.suite == "both":
            return (self.m * self.k + (self.m + self.k) * (2 * self.n + 1)) * size
        return self.products * (self.m * self.k * size + self.k * self.n * weight + self.m * self.n * result)

    @property
    def flops(self) -> int:
        return 2 * self.products * self.m * self.k * self.n * (2 if self.suite == "both" else 1)

    @property
    def ceiling(self) -> str:
        """A product that writes about as much as it reads is held against a copy, any other against reading."""
        return "copy" if self.suite != "both" and self.k <= 4 * self.n else "read"

    @property
    def short(self) -> bool:
        """Whether it takes so little time that the launch counts."""
        return self.suite in ("stream", "batches", "complaints") and self.bytes < SHORT

    @property
    def group(self) -> tuple[Any, ...]:
        """Cells with the same A, which are measured together."""
        return self.suite, self.order, self.m, self.k, self.dtype, self.out, self.products, self.lead

    @property
    def letters(self) -> str:
        """Orders of A, B and C: in columns ("F") or in rows ("C")."""
        return {"rows": "CCC", "columns": "FFF", "transposed": "FCC"}[self.order]

    @property
    def problem(self) -> Problem:
        """What `tall_skinny_matmul` is asked."""
        stack = (self.products,) if self.products > 1 else ()
        shapes = (self.m, self.k), (self.k, self.n), (self.m, self.n)
        types, leads = (self.dtype, self.weights, self.out), (self.lead, 0, 0)
        arrays = zip(shapes, types, self.letters, leads, strict=True)
        return problem_of(*(Layout((*stack, *shape), name, order, lead) for shape, name, order, lead in arrays))


@dataclass(frozen=True)
class Layout:
    """What `problem_of` asks an array, without its memory, which begins at an aligned address."""

    shape: tuple[int, ...]
    name: str
    order: str
    lead: int = 0
    data = SimpleNamespace(ptr=0)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.name)

    @property
    def itemsize(self) -> int:
        return FLOATS[self.name].bits // 8

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        rows, columns = self.shape[-2:]
        line, lines = (columns, rows) if self.order == "C" else (rows, columns)
        step = (line + self.lead) * self.itemsize
        two = (step, self.itemsize) if self.order == "C" else (self.itemsize, step)
        return (lines * step, *two) if self.ndim == 3 else two


@functools.cache
def grid() -> tuple[Cell, ...]:
    """All cells; those with `default` are the subset for every day."""
    cells = (*_square(), *_odd(), *_leading(), *_tall(), *_complaints(), *_both(), *_host())
    return tuple(sorted(cells, key=lambda cell: SUITES.index(cell.suite)))


def _square() -> Iterator[Cell]:
    for order in ORDERS:
        for dtype, out, widths in TYPES:
            for m in SQUARE:
                # For every day the middle size is enough of mixed types and of transposes, and nothing of both.
                rare = (dtype != out) + (order == "transposed")
                default = rare == 0 or (rare == 1 and m == 20480)
                yield from (Cell(order, order, m, m, n, dtype, out, default=default) for n in widths)


def _odd() -> Iterator[Cell]:
    for order in ORDERS[:2]:
        for dtype in PLAIN:
            yield from (Cell("odd", order, 10007, 10239, n, dtype, dtype, default=n in (3, 13)) for n in (3, 5, 7, 13))


def _leading() -> Iterator[Cell]:
    for order in ORDERS[:2]:
        for dtype in PLAIN:
            for lead in (8, 3):
                yield Cell("leading", order, 20480, 20480, 4, dtype, dtype, lead=lead, default=dtype == "float32")


def _tall() -> Iterator[Cell]:
    for order in ORDERS[:2]:
        for dtype in PLAIN:
            for n in (8, 16):
                yield from (Cell("stream", order, 10**power, n, n, dtype, dtype) for power in (4, 5, 6, 7))
                yield Cell("batches", order, 10**4, n, n, dtype, dtype, products=1000)


def _complaints() -> Iterator[Cell]:
    return (Cell("complaints", "rows", m, n, n, "float32", "float32") for m, n in COMPLAINTS)


def _both() -> Iterator[Cell]:
    for dtype in PLAIN:
        for m in SQUARE:
            yield from (Cell("both", "rows", m, m, r, dtype, dtype, default=m == 20480) for r in (1, 2, 4))


def _host() -> Iterator[Cell]:
    return (Cell("host", "rows", m, m, n, "float32", "float32") for m, n in ((64, 2), (1024, 4)))


# ---- rows ---------------------------------------------------------------------------------------------------------

CUPY, GEMV, TORCH = "CuPy A @ B", "cuBLAS, n x gemv", "cuBLAS through PyTorch"
FUNCTION = "tall_skinny_matmul"
"""Contenders."""

OWN, VENDOR, PAPER, OTHER = "own", "cuBLAS", "paper", "other"
"""Families of contenders: this package's functions; cuBLAS, however it is called; the paper's kernels; and what has
another result type and is there for the record."""

CELL = ("suite", "order", "dtype", "out", "m", "k", "n", "products", "lead")
COLUMNS = (
    *CELL,
    *("contender", "family", "kernel", "source", "layout"),
    *TIMES,
    *("best_cublas", "best_cublas_ms", "speedup", "speedup_alike", "cupy_ms", "speedup_cupy"),
    *("host_us", "host_us_lower_quartile", "host_us_upper_quartile", "host_us_beyond_cupy"),
    *ERRORS,
    *("note", "error", "sm_mhz"),
)
"""Of a row, before those of `gpu_timing.environment`. `layout` are the orders of A, B and C, in columns ("F") or in
rows ("C"); `source` is what chose the kernel; `products` those of a call; `lead` what the leading dimension of A has
beyond its rows or columns. Speedups compare calls that were timed the same way, queued or in a graph: `speedup` with
the best cuBLAS, B and C laid out as it likes best, `speedup_alike` with the best of the row's own layout."""

Key = tuple[str, ...]
"""The values of the columns `CELL`, as text."""


def key(row: Mapping[str, Any]) -> Key:
    """The cell that a row belongs to."""
    return tuple(str(row[column]) for column in CELL)


def empty_row(cell: Cell, contender: str) -> dict[str, Any]:
    """A row of a cell and a contender without numbers."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row.update({column: getattr(cell, column) for column in CELL}, contender=contender)
    return row


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Fill in, for the rows of one cell, what relates one contender to another."""
    good = [row for row in rows if row["ms"] != "" and not row["error"]]
    for row in good:
        rivals = [other for other in good if other["family"] == VENDOR and other["how"] == row["how"]]
        best = min(rivals, key=lambda rival: float(rival["ms"]), default=None)
        if best is not None:
            row.update(best_cublas=best["contender"], best_cublas_ms=best["ms"])
            row["speedup"] = short(best["ms"] / row["ms"])
        alike = min((float(rival["ms"]) for rival in rivals if _alike(row, rival)), default=None)
        if alike is not None:
            row["speedup_alike"] = short(alike / row["ms"])
        cupy = next((other for other in good if other["contender"] == CUPY and other["how"] == row["how"]), None)
        if cupy is not None:
            row.update(cupy_ms=cupy["ms"], speedup_cupy=short(cupy["ms"] / row["ms"]))
    base = next((row["host_us"] for row in rows if row["contender"] == CUPY and not row["error"]), "")
    for row in rows:
        if row["host_us"] != "" and base != "":
            row["host_us_beyond_cupy"] = short(row["host_us"] - base)


def _alike(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether A, B and C lie alike: of one column any order is the same, and `encode_both` has no rival of its kind."""
    mine, its = row["layout"], other["layout"]
    return row["suite"] == "both" or mine == its or (mine[:1] == its[:1] and int(row["n"]) == 1)
