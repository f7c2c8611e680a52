"""What is measured of factorisations on a GPU, the bars, and what a row of results/lu_gpu.csv holds.

Times in milliseconds. `X_ms` is by the card's clock, of calls that are queued and not waited for; `X_call_ms` by the
host's, of calls that are waited for, as a user makes them. Ratios are medians over rounds in which all take part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from abft_tsm2.core.problem import SIZES

Row = dict[str, Any]

TYPES = ("float64", "float32")
SIZES_MEASURED = (512, 1024, 2048, 4096, 8192, 16384, 24576, 32768)
BETWEEN = {5000: (4096, 8192), 10007: (8192, 16384)}
"""Sizes that no block divides, and their neighbours in `SIZES_MEASURED`."""

BY_ROWS = (4096, 8192)
"""Sizes of matrices in rows, of which each is compared with the same in columns."""

STRUCTURED = ("graded rows", "graded columns", "orthogonal", "integers", "triangle and noise", "dominant")
STRUCTURED_SIZE = 8192
READ = (4096, 8192, 16384, 24576, 32768)
REPAIRED = (4096, 8192, 16384)
SOLVED, RIGHT_HAND_SIDES = (8192, 16384), (1, 64)
DEFINITE = (4096, 8192, 16384)
SUITES = ("factor", "structured", "read", "repair", "solve", "cholesky")

ROUNDS = {2048: 21, 4096: 13, 8192: 9, 16384: 7, 24576: 3, 32768: 2}
"""Up to which size how many rounds."""

FEW = {"structured": 5, "repair": 5}
"""Most rounds of suites in which a call may take many times as long as without a suspicion."""

OWN = 5
"""Least rounds in which this package's calls are alone."""

ON_CARD = ("getrf", "unprotected", "offline", "online")
AS_CALLED = ("cupy", "torch", "magma", "offline", "online")
"""Contenders by either clock: cuSOLVER's getrf in place, this package's without checks, certified at the end, and
checked in every step; lu_factor of cupyx.scipy.linalg and of torch.linalg, by its default library and by MAGMA."""

ONLINE: Mapping[str, Mapping[int, float]] = {
    "float64": {512: 1.0, 1024: 1.0, 2048: 0.65, 4096: 0.56, 8192: 0.55, 16384: 0.65, 24576: 0.76, 32768: 0.87},
    "float32": {512: 1.0, 1024: 1.0, 2048: 0.70, 4096: 0.55, 8192: 0.56, 16384: 0.72, 24576: 0.82, 32768: 0.90},
}
"""By type and size, checked in every step relative to cuSOLVER's getrf."""

CHECKS = 0.05
"""What the checks of the steps and the certificate add to the same factorisation without them."""

CERTIFIED, CERTIFIED_FROM = 1.02, 4096
"""Certified at the end relative to the faster one of getrf and the same without a certificate, and from which size."""

IDLE = 0.01
"""What it adds to a factorisation that a host queues step by step, that it reads the verdict on each before it goes on:
how long the card waits for it."""

LINE = 1.05
"""Sizes that no block divides, by time per n^3, relative to the line through their neighbours; rows to columns."""

CHOLESKY, CHOLESKY_FROM = 1.10, 8192
"""protected_cholesky relative to cuSOLVER's potrf in place."""

SOLUTION = 1.0
"""protected_lu_solve relative to cuSOLVER's getrs and two reads of the factors, at the rate of a copy."""

BARRED = ("online", "certificate", "checks", "idle", "line", "protected")
COLUMNS = (
    *("suite", "dtype", "order", "n", "matrix", "right_hand_sides", "fault", "rounds", "own_rounds", "hidden"),
    *(f"{name}_ms" for name in ON_CARD),
    *(f"{name}_call_ms" for name in AS_CALLED),
    *("parts_ms", "read_ms", "vendor_call_ms", "protected_call_ms", "reads_ms", "gflops", "unprotected", "offline"),
    *(column for name in BARRED for column in (name, f"{name}_bar")),
    *("repair_ms", "repair", "worst_error_u", "vendor_error_u", "pivots_differ", "suspected", "copy_gbs", "torch"),
    *("note", "error"),
)
_KEY = ("suite", "dtype", "order", "n", "matrix", "right_hand_sides", "fault")


@dataclass(frozen=True)
class Cell:
    """One matrix, and what is done with it.

    Attributes
    ----------
    suite : one of SUITES
    dtype : one of TYPES
    n : int
    order : {"F", "C"}
        Whether columns are contiguous, or rows.
    matrix : str
        "normal", or one of STRUCTURED.
    right_hand_sides : int
        Of a system; 0 where none is solved.
    default : bool
        All are measured unless the command line says otherwise.
    """

    suite: str
    dtype: str
    n: int
    order: str = "F"
    matrix: str = "normal"
    right_hand_sides: int = 0
    default: bool = True

    def __str__(self) -> str:
        of = {"structured": f" {self.matrix}", "solve": f" {self.right_hand_sides}"}.get(self.suite, "")
        return f"{self.suite} {self.dtype} {self.order} {self.n}{of}"

    @property
    def group(self) -> Cell:
        """Each is measured alone: memory is freed in between."""
        return self

    @property
    def bytes(self) -> int:
        """Of the matrix."""
        return self.n * self.n * SIZES[self.dtype]

    @property
    def rounds(self) -> int:
        """In which all contenders take part; in suite "factor" by the host's clock, those of other libraries."""
        of_size = next(count for n, count in ROUNDS.items() if self.n <= n or n == max(ROUNDS))
        return min(of_size, FEW.get(self.suite, of_size))

    @property
    def own_rounds(self) -> int:
        """In which this package's calls take part by the host's clock, and suite "read". Apart from others, for large
        ones are as fast as the power of the card allows, and what was called before has used some."""
        return max(self.rounds, OWN)


def grid(sizes: Sequence[int] = SIZES_MEASURED) -> list[Cell]:
    """All there is to measure; what others are compared with comes before them."""
    cells = []
    for dtype in TYPES:
        cells += [Cell("factor", dtype, n) for n in sizes]
        cells += [Cell("factor", dtype, n) for n, neighbours in BETWEEN.items() if set(neighbours) <= set(sizes)]
        cells += [Cell("factor", dtype, n, "C") for n in BY_ROWS if n in sizes]
    for dtype in TYPES:
        cells += [Cell("structured", dtype, STRUCTURED_SIZE, matrix=matrix) for matrix in STRUCTURED]
    for dtype in TYPES:
        cells += [Cell("read", dtype, n) for n in READ if n in sizes]
    for dtype in TYPES:
        cells += [Cell("repair", dtype, n) for n in REPAIRED]
    for dtype in TYPES:
        cells += [Cell("solve", dtype, n, right_hand_sides=r) for n in SOLVED for r in RIGHT_HAND_SIDES]
    return [*cells, *(Cell("cholesky", dtype, n) for dtype in TYPES for n in DEFINITE)]


# ---- rows -------------------------------------------------------------------------------------------------------


def empty_row(cell: Cell) -> Row:
    """A row without numbers."""
    row: Row = {name: getattr(cell, name, "") for name in COLUMNS}
    return {**row, "rounds": "", "own_rounds": "", "right_hand_sides": cell.right_hand_sides or ""}


def key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What names a row; the last one of a name counts."""
    return tuple(str(row[name]) for name in _KEY)


def bars(cell: Cell) -> Row:
    """The bars of a cell by column; a line has one where its neighbours were measured."""
    if cell.suite == "factor":
        found: Row = {"checks_bar": CHECKS}
        if cell.order == "F" and cell.n in ONLINE[cell.dtype]:
            found["online_bar"] = ONLINE[cell.dtype][cell.n]
        if cell.n >= CERTIFIED_FROM:
            found["certificate_bar"] = CERTIFIED
        return found
    if cell.suite == "read":
        return {"idle_bar": IDLE}
    if cell.suite == "solve":
        return {"protected_bar": SOLUTION}
    return {"protected_bar": CHOLESKY} if cell.suite == "cholesky" and cell.n >= CHOLESKY_FROM else {}


def line_through(cell: Cell, measured: Sequence[Mapping[str, Any]]) -> float | None:
    """Milliseconds that a factorisation checked in every step is to take by its neighbours: by the same matrix in
    columns, or by the times per n^3 of the next sizes, linear in log n. None where they were not measured."""
    times = {
        int(row["n"]): float(row["online_ms"])
        for row in measured
        if (row["suite"], row["dtype"], row["order"]) == ("factor", cell.dtype, "F") and row["online_ms"] != ""
    }
    if cell.order == "C":
        return times.get(cell.n)
    if cell.n not in BETWEEN or not set(BETWEEN[cell.n]) <= set(times):
        return None
    low, high = BETWEEN[cell.n]
    share = math.log(cell.n / low) / math.log(high / low)
    return cell.n**3 * ((1 - share) * times[low] / low**3 + share * times[high] / high**3)


def met(row: Mapping[str, Any]) -> bool:
    """Whether a row keeps its bars, and its results are right. A number that is missing keeps none."""
    return not row["error"] and not missed(row)


def missed(row: Mapping[str, Any]) -> list[str]:
    """The bars that a row misses, in words; not those of a row without times, which tells why."""
    if row["error"] or row["note"].startswith("not measured"):
        return []
    found = []
    for name in BARRED:
        number, bar = row[name], row[f"{name}_bar"]
        if bar != "" and not (number != "" and float(number) <= float(bar)):
            found.append(f"{name} {number if number != '' else 'unknown'} > {bar}")
    return found


def text(row: Mapping[str, Any]) -> str:
    """What a row says, in one line."""
    return " ".join([*_told(row), *(f"BAR MISSED: {one}" for one in missed(row))])


def _told(row: Mapping[str, Any]) -> Iterator[str]:
    if row["suite"] == "repair":
        if row["repair_ms"] != "":
            whole = f"{row['repair']:.1%} of {row['online_call_ms']:.2f} ms"
            yield f"fault in {row['fault']}: {row['repair_ms']:.2f} ms, {whole}"
        return
    for name in ("getrf", "read", "vendor_call"):
        if row[f"{name}_ms"] != "":
            yield f"{name.split('_')[0]} {row[f'{name}_ms']:.2f} ms"
    for name in ("unprotected", "offline", *BARRED):
        if row[name] != "":
            form = "+.1%" if name in ("checks", "idle") else ".3f"
            bar = row.get(f"{name}_bar", "")
            yield f"{name} {row[name]:{form}}" + ("" if bar == "" else f" (bar {bar})")
    called = [f"{name} {row[f'{name}_call_ms']:.2f}" for name in AS_CALLED if row[f"{name}_call_ms"] != ""]
    if called:
        yield f"as called, ms: {', '.join(called)}"
