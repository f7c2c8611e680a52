"""Loops of calls that take turns, the reports of their calls, and the judge of their products."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2 import errstate, monitor
from abft_tsm2.arrays import FLOATS, dtype_name
from abft_tsm2.faults.judge.oracle import Array, widened
from abft_tsm2.report import Status
from benchmarks.calls_grid import Cell, Row, compared
from benchmarks.gpu_timing import message
from benchmarks.rows import short

COLUMNS_JUDGED = 8  # of the plain product that are compared with float64
UNITS = 64  # of rounding of the sums, relative to the largest element, by which two right products may differ

RAISED: dict[str, Any] = dict.fromkeys(("corrected", "checksum_fault", "input_changed", "uncorrectable"), "raise")

Step = Callable[[], object]


@dataclass
class Loop:
    """Calls of one contender, timed as a whole.

    Attributes
    ----------
    call : function
        One call.
    calls : int
        Of a loop.
    C : array
        Where the product goes.
    products : int
        Of a call.
    waits : bool
        Whether the verdict is read after each call, ``errstate(sync=...)``.
    watched : bool
        Whether a monitor keeps the reports of the calls that are timed. Else a call that finds anything raises, and
        after them comes one whose report is kept: without one, verdicts that are not waited for come too late to raise.
    reports : int
        Of a call; the plain product has none.
    seconds, returned : list of float
        For each round, over the products of the loop: until the last one was there, and until the last call returned.
    statuses : Counter of str
        Of the reports of all calls so far.
    due : int
        How many reports there should be.
    at_once : int
        Reports that were not pending when their loop was queued.
    error : str
        Empty, or why there are no times.
    """

    call: Step
    calls: int
    C: Array
    products: int = 1
    waits: bool = True
    watched: bool = True
    reports: int = 0
    seconds: list[float] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    due: int = 0
    at_once: int = 0
    error: str = ""

    def once(self, synchronize: Step, calls: int = 0) -> tuple[float, float]:
        """A loop: its seconds, and those until the last call returned; no report is waited for within them."""
        many = range(calls or self.calls)
        if self.watched:
            return self._kept(many, synchronize)
        with errstate(**RAISED):
            times = self._timed(many, synchronize)
        self._kept(range(1), synchronize)
        return times

    def _kept(self, many: range, synchronize: Step) -> tuple[float, float]:
        """`_timed`, with the reports of all calls."""
        self.due += self.reports * len(many)
        log = None
        try:
            with errstate(sync=self.waits), monitor() as log:
                times = self._timed(many, synchronize)
                self.at_once += sum(report.status is not Status.PENDING for report in log)
        finally:
            self.note({} if log is None else {status.name: count for status, count in log.counts.items()})
        return times

    def _timed(self, many: range, synchronize: Step) -> tuple[float, float]:
        call = self.call
        synchronize()
        begun = time.perf_counter()
        for _ in many:
            call()
        returned = time.perf_counter() - begun
        synchronize()
        return time.perf_counter() - begun, returned

    def note(self, statuses: Mapping[str, int]) -> None:
        """Count reports."""
        self.statuses.update(statuses)

    def settle(self) -> None:
        """Collect reports that no monitor has, when all is timed."""

    @property
    def status(self) -> str:
        """The status of all reports, or how many have which."""
        counts = sorted(self.statuses.items())
        return counts[0][0] if len(counts) == 1 else ", ".join(f"{count} {name}" for name, count in counts)

    @property
    def trouble(self) -> str:
        """What is wrong with the reports; empty where nothing is."""
        right = self.statuses[Status.CLEAN.name]
        if right == self.due == self.statuses.total():
            return ""
        return f"{self.due} reports should say CLEAN; there are {self.status or 'none'}"


def race(
    loops: Mapping[str, Loop],
    rounds: tuple[int, int],
    budget: float,
    synchronize: Step = lambda: None,
    failed: Callable[[Exception], object] = lambda error: None,
) -> None:
    """Run the loops in rounds, starting with another one each time, so that all see the same machine; one that raises
    gets no times but the error.

    Parameters
    ----------
    loops : mapping of names to loops
    rounds : pair of int
        Fewest and most of them; one before the first warms up.
    budget : float
        Seconds that the rounds may take beyond the fewest.
    synchronize : function
        Waits for all that is queued.
    failed : function
        Is told of each error.
    """
    names, number, most = list(loops), -1, rounds[1]
    begun = time.perf_counter()
    while number < most:
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            loop = loops[name]
            if loop.error:
                continue
            try:
                took, returned = loop.once(synchronize)
            except Exception as error:
                loop.error = message(error)
                loop.seconds.clear()
                failed(error)
                continue
            if number >= 0:
                loop.seconds.append(took / (loop.calls * loop.products))
                loop.returned.append(returned / (loop.calls * loop.products))
        if number < 0:
            once = max(time.perf_counter() - begun, 1e-9)
            most = max(rounds[0], min(rounds[1], int(budget / once)))
        number += 1


def finish(cell: Cell, row: Row, plain: Loop, mine: Loop, xp: Any = np) -> None:
    """The columns of a cell after the rounds: times, reports, and whether both products are the same."""
    row.update(calls=mine.calls * mine.products, status=mine.status)
    if plain.error or mine.error:
        row["error"] = f"the plain product: {plain.error}" if plain.error else mine.error
        return
    if mine.at_once and not mine.waits:
        row["note"] = f"{mine.at_once} of {mine.due} calls were waited for: the kernels do not serve this product"
    row.update(compared(cell, plain.seconds, mine.seconds, float(row["read_gbs"])))
    worst = difference(mine.C, plain.C, xp)
    row["judged"] = short(worst)
    if not worst <= 1:
        row["error"] = f"wrong product: {worst:.3g} of the difference that is allowed"
    else:
        row["error"] = mine.trouble


def host_columns(plain: list[float], mine: list[float]) -> Row:
    """Medians of the seconds of the host."""
    return {
        "plain_host_us": short(1e6 * statistics.median(plain)),
        "host_us": short(1e6 * statistics.median(mine)),
    }


# ---- the judge ----------------------------------------------------------------------------------------------------


def difference(C: Array, D: Array, xp: Any = np) -> float:
    """The largest |C - D| over what rounding may make of it; NaN where C or D has one.

    Sums of float64 or float32 may differ in a few units of their largest; a 16-bit result by its last bit as well, and
    by one in the largest, for cuBLAS may add up parts of a product in 16 bits.
    """
    kind = dtype_name(C.dtype)
    unit = FLOATS[kind].unit_roundoff
    x, y = widened(C, xp), widened(D, xp)
    largest = float(abs(y).max())
    sums = FLOATS["float64" if kind == "float64" else "float32"].unit_roundoff
    allowed = 2 * UNITS * sums * largest
    if FLOATS[kind].bits == 16:
        allowed = allowed + 2 * unit * largest + 4 * unit * abs(y)
    worst = float((abs(x - y) / allowed).max())
    return worst if math.isfinite(worst) else math.nan


def require_product(A: Array, B: Array, C: Array, xp: Any = np) -> None:
    """ArithmeticError if some columns of C are not those of A B in float64."""
    step = max(1, C.shape[1] // COLUMNS_JUDGED)
    worst = difference(C[:, ::step], widened(A, xp) @ widened(B[:, ::step], xp), xp)
    if not worst <= 1:
        raise ArithmeticError(f"the plain product is wrong: {worst:.3g} of the difference that is allowed")
