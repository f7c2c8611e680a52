"""What the kernels for today's GPUs are held against on an H200, as data, and what a run says to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from benchmarks import stream_grid
from benchmarks.stream_grid import ORDERS, SQUARE, Cell
from benchmarks.stream_rows import OWN, Key, empty_row, key
from benchmarks.tables import markdown

Rows = Sequence[Mapping[str, Any]]
SLOWER = 1 / 1.03  # of the best cuBLAS: no cell is slower than that


@dataclass(frozen=True)
class Bar:
    """A number that each cell of some, or their geometric mean, has to reach.

    Attributes
    ----------
    name : str
    limit : float
    column : str
        Of a row: what is measured. A share is that of the better row where a product was timed queued and in a graph.
        A speedup is that of the graph where cuBLAS was timed in one too, and that of queued calls if `queued`.
    where : dict from column to tuple
        Which cells; those without `suite` are all but "host".
    mean : bool
        Whether their geometric mean counts, not the worst of them.
    queued : bool
    at_most : bool
        Whether the limit is an upper one.
    """

    name: str
    limit: float
    column: str = "share_of_ceiling"
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    mean: bool = False
    queued: bool = False
    at_most: bool = False

    def covers(self, cell: Cell) -> bool:
        """Whether it speaks of a cell."""
        if "suite" not in self.where and cell.suite == "host":
            return False
        return all(getattr(cell, name) in values for name, values in self.where.items())

    def holds(self, measured: float) -> bool:
        return measured <= self.limit if self.at_most else measured >= self.limit

    def value(self, rows: Rows) -> float | None:
        """The number of a cell: of those of its rows that are this package's."""
        own: Rows = [row for row in rows if row["family"] == OWN and not row["error"] and row[self.column] != ""]
        if self.column.startswith("speedup"):
            own = [row for row in own if row["how"] == "queued"] if self.queued else _graphs_first(own)
        numbers = [float(row[self.column]) for row in own]
        return max(numbers, default=None)

    def show(self, number: float) -> str:
        """A share in per cent, a speedup, or microseconds."""
        if self.column == "share_of_ceiling":
            return f"{number:.1%}"
        return f"{number:.2f} us" if self.column.startswith("host") else f"{number:.3f} x"


def _graphs_first(rows: Rows) -> Rows:
    return [row for row in rows if row["how"] == "graph"] or rows


@dataclass(frozen=True)
class Verdict:
    """What a run says to a bar.

    Attributes
    ----------
    bar : Bar
    measured : float or None
        None where nothing was measured.
    worst : str
        The cell of the smallest number, or of the largest if the limit is an upper one.
    cells, of : int
        How many were measured, and how many the bar speaks of.
    """

    bar: Bar
    measured: float | None
    worst: str
    cells: int
    of: int

    @property
    def holds(self) -> bool | None:
        return None if self.measured is None else self.bar.holds(self.measured)

    def __str__(self) -> str:
        bar = self.bar
        kind = "geometric mean" if bar.mean else "worst"
        number = "nothing" if self.measured is None else bar.show(self.measured)
        return f"{bar.name}: {kind} {number}, the bar is {bar.show(bar.limit)}; {self.worst}"


def _shares() -> Iterator[Bar]:
    """The table of shares: the same for all orders of TSM2R, by order for TSM2L."""
    square: tuple[tuple[str, str, tuple[int, ...], dict[tuple[int, ...], float]], ...] = (
        # dtype, out, sizes, share by columns of B
        ("float32", "float32", (30720,), {(1, 2, 4): 0.97}),
        ("float32", "float32", (20480,), {(1, 2, 4): 0.94}),
        ("float32", "float32", (20480, 30720), {(8,): 0.90, (16,): 0.84}),
        ("float32", "float32", (10240,), {(1, 2, 4): 0.89, (8,): 0.84, (16,): 0.76}),
        ("float64", "float64", (20480, 30720), {(1, 2, 4): 0.96, (8,): 0.94, (16,): 0.93}),
        ("float64", "float64", (10240,), {(1, 2, 4): 0.90, (8,): 0.89, (16,): 0.88}),
        ("float32", "float64", (20480, 30720), {(1, 2, 4): 0.91}),
        *((half, "float32", (20480, 30720), {(2, 4): 0.91, (16,): 0.88}) for half in ("bfloat16", "float16")),
    )
    for order in ORDERS:
        for dtype, out, sizes, shares in square:
            for widths, share in shares.items():
                types = dtype if dtype == out else f"{dtype}->{out}"
                name = f"{order} {types}, m = k = {_list(sizes)}, n = {_list(widths)}"
                where = {"suite": (order,), "dtype": (dtype,), "out": (out,), "m": sizes, "n": widths}
                yield Bar(name, share, where=where)
    tall: dict[tuple[str, str], dict[int, float]] = {
        ("columns", "float32"): {10**7: 0.92, 10**6: 0.80},
        ("rows", "float32"): {10**7: 0.86, 10**6: 0.75},
        ("columns", "float64"): {10**7: 0.93, 10**6: 0.82},
        ("rows", "float64"): {10**7: 0.86, 10**6: 0.78},
    }
    for (order, dtype), by_size in tall.items():
        for m, share in by_size.items():
            where = {"suite": ("stream",), "order": (order,), "dtype": (dtype,), "m": (m,)}
            yield Bar(f"TSM2L {order} {dtype}, m = {m:.0e}, k = n = 8, 16".replace("e+0", "e"), share, where=where)
    yield Bar("1000 products of m = 1e4 in a call", 0.70, where={"suite": ("batches",)})
    both = {"float32": {1: 0.90, 2: 0.84, 4: 0.66}, "float64": {1: 0.90, 2: 0.80, 4: 0.60}}
    for dtype, r in product(both, (1, 2, 4)):
        where = {"suite": ("both",), "dtype": (dtype,), "m": SQUARE[1:], "n": (r,)}
        yield Bar(f"encode_both {dtype}, m = k = {_list(SQUARE[1:])}, r = {r}", both[dtype][r], where=where)


def _speedups() -> Iterator[Bar]:
    widths = (2, 4, 8, 16)
    for order, dtype, column, limit in (
        ("columns", "float32", "speedup", 1.3),
        ("rows", "float32", "speedup", 1.8),
        ("rows", "float32", "speedup_cupy", 2.5),
        ("columns", "float64", "speedup", 1.0),
        ("rows", "float64", "speedup", 1.0),
    ):
        rival = "CuPy's @" if column == "speedup_cupy" else "cuBLAS"
        where = {"suite": (order,), "dtype": (dtype,), "out": (dtype,), "n": widths}
        yield Bar(f"{order} {dtype} over {rival}, n = {_list(widths)}", limit, column, where, mean=True)
    for dtype, limit in (("float32", 2.0), ("float64", 1.6)):
        where = {"suite": ("stream",), "dtype": (dtype,), "m": (10**6, 10**7)}
        yield Bar(f"TSM2L {dtype} over cuBLAS, m = 1e6, 1e7", limit, "speedup", where, mean=True)
    for dtype in ("float32", "float64"):
        where = {"suite": ("both",), "dtype": (dtype,)}
        yield Bar(f"encode_both {dtype} over two calls of cuBLAS", 1.7, "speedup", where, mean=True)
    short = {"suite": ("stream",), "m": (10**4, 10**5)}
    yield Bar("TSM2L over cuBLAS, m = 1e4, 1e5, both queued", 1.0, "speedup", short, queued=True)
    complaints = {"suite": ("complaints",), "n": (2, 3)}
    # What users complain of is `A @ B`: cuBLAS with row-major operands.
    yield Bar("(40960, 2) @ (2, 2), (1e6, 3) @ (3, 3) over cuBLAS by CuPy's @", 5.0, "speedup_cupy", complaints)
    yield Bar("no cell slower than 1.03 times the best cuBLAS of its layout", SLOWER, "speedup_alike", queued=True)


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


HOST = Bar("host time of a call beyond CuPy's @", 15.0, "host_us_beyond_cupy", {"suite": ("host",)}, at_most=True)
BARS = (*_shares(), *_speedups(), HOST)


def verdicts(rows: Iterable[Mapping[str, Any]], bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """What rows, of a run or of its CSV, say to the bars."""
    by_cell: dict[Key, dict[str, Mapping[str, Any]]] = {}
    for row in rows:  # the last of each contender
        by_cell.setdefault(key(row), {})[row["contender"]] = row
    names = {key(empty_row(cell, "")): cell for cell in stream_grid.grid()}
    found = []
    for bar in bars:
        cells = {at: cell for at, cell in names.items() if bar.covers(cell)}
        values = {cell: bar.value(list(by_cell[at].values())) for at, cell in cells.items() if at in by_cell}
        numbers = {str(cell): value for cell, value in values.items() if value is not None}
        worst = (max if bar.at_most else min)(numbers, key=lambda name: numbers[name], default="")
        measured: float | None = None
        if numbers:
            measured = numbers[worst]
            if bar.mean:
                measured = math.exp(math.fsum(math.log(x) for x in numbers.values()) / len(numbers))
        found.append(Verdict(bar, measured, worst, len(numbers), len(cells)))
    return found


def cells(found: Iterable[Verdict]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of a table of targets, what was measured, and whether they are met."""
    body = []
    for one in found:
        bar = one.bar
        kind = "mean" if bar.mean else one.worst
        measured = "not measured" if one.measured is None else f"{bar.show(one.measured)} ({kind})"
        holds = {None: "", True: "yes", False: "**no**"}[one.holds]
        sign = "<=" if bar.at_most else ">="
        body.append((f"{bar.name}: {sign} {bar.show(bar.limit)}", measured, f"{one.cells} of {one.of}", holds))
    return ("target", "measured", "cells", "met"), body


def table(found: Iterable[Verdict]) -> str:
    """The same as Markdown."""
    return markdown(*cells(found))
