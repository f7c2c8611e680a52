"""Protected products against plain ones by cuBLAS on a GPU, for `benchmarks.bench_gemm`: operands, contenders, planted
faults, and the run over the cells of `benchmarks.gemm_grid`.

What protection costs is timed on the card, in the same rounds as the plain product. So is what a repair costs, and once
more by the host's clock, call by call, with the wait for the verdict. What a call costs the host itself is timed there.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from abft_tsm2 import encode, errstate, protected_gemm
from abft_tsm2.core import cublas
from abft_tsm2.core.device import Device
from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.faults.judge.oracle import (
    BLOCK_BYTES,
    Array,
    Reference,
    ReferenceArithmetic,
    arithmetic,
    reference,
    require,
)
from abft_tsm2.report import Report, Status
from benchmarks import gemm_bars, gemm_grid
from benchmarks.gemm_grid import (
    CLEAN,
    CUPY,
    DROPPED,
    ENCODED,
    ONE,
    OPTIONS,
    PLAIN,
    PLAN,
    QUEUED,
    RECHECKED,
    TWO,
    WAITED,
    Cell,
    compared,
    empty_row,
    timed,
)
from benchmarks.gpu_timing import Call, Stopwatch, Times, copies, message, require_device
from benchmarks.judge import errors
from benchmarks.operands import CHUNK, array, copy_bits, fill, fill_nan
from benchmarks.planting import Faults, Plant, planted
from benchmarks.rows import short
from benchmarks.sheet import Sheet
from benchmarks.suite import Row, Suite
from benchmarks.timing import paired

ROUNDS = (9, 51)
PAIRS = (15, 61)  # rounds of repairs
PAIRED_SECONDS = 0.6  # of the card, for each contender
CALLS, REPEATS = 300, 5  # of which the host time is the mean, and the best
MOST_BYTES = 60 * 10**9  # of all copies of the operands
LAUNCHES = 10  # entries of the queue that one side's check takes: kernels, events, and waits for them
DISTINCT = 8  # encodings among the copies of B; they are of a few kilobytes, and shared by all copies beyond
COLUMNS = 16  # of the reference that are compared with longdouble

Judge = Callable[[Array], float]
"""The largest of errors over what is allowed to them: right up to 1. NaN where C has one."""


# ---- operands -----------------------------------------------------------------------------------------------------


class Operands:
    """A and B in rows, normally distributed, as many copies of them as a cold cache needs; all copies are alike."""

    def __init__(self, cell: Cell, copies: int, seed: int) -> None:
        import cupy

        self.cell, self.copies = cell, copies
        self.A = [array((*cell.stack, cell.m, cell.k), cell.dtype) for _ in range(copies)]
        self.B = [array((*cell.stack, cell.k, cell.n), cell.dtype) for _ in range(copies)]
        drawn = cupy.random.default_rng(seed).standard_normal
        for first, *others in (self.A, self.B):
            fill(first, drawn)
            for other in others:
                copy_bits(other, first)
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
    judged = 12 * 8 * cell.batch * cell.m * cell.n
    judged += 4 * min(BLOCK_BYTES, 8 * cell.batch * cell.k * max(cell.m, cell.n))
    drawn = 3 * 8 * min(CHUNK, cell.batch * max(cell.m, cell.n) * cell.k)
    return copies_of(cell, outputs) * _copy(cell, outputs) + judged + drawn + 4 * cell.batch * cell.m * cell.n


def _copy(cell: Cell, outputs: int) -> int:
    return cell.bytes + (outputs - 1) * cell.batch * cell.m * cell.n * cell.size


def seed_of(cell: Cell) -> int:
    """Of the random numbers of its operands."""
    return math.prod((cell.m, cell.k + 1, cell.n + 2, cell.batch + 3)) % 2**32


def judge_of(A: Array, B: Array, how: ReferenceArithmetic, xp: Any) -> Judge:
    """The judge of products of A and B, which believes no report: every element, and the norm of the error."""
    expected = reference(A, B, xp, sums=how.sums)
    step = max(1, B.shape[-1] // COLUMNS)
    few = Reference(*(x[..., ::step] for x in (expected.high, expected.low, expected.magnitude)))
    require(few, A, B[..., ::step], xp, sums=how.sums)

    def judge(C: Array) -> float:
        found = errors(C, expected, A.shape[-1], xp, arithmetic=how)
        return math.nan if math.isnan(found.norm) or math.isnan(found.worst) else max(found.norm, found.worst)

    return judge


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
    """A product that is timed, plain or protected.

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

    def planting(self, plant: Plant) -> Contender:
        """This contender, into whose products faults are planted."""

        def run(i: int) -> None:
            with planted(plant):
                self.call.run(i)

        return replace(self, call=replace(self.call, run=run))


def plain(cell: Cell, operands: Operands) -> Contender:
    """The unprotected product: one call of cuBLAS."""
    A, B, C = operands.A, operands.B, operands.outputs()
    gemm = cublas.Gemm.of(cell.problem, A[0], B[0], C[0], tf32=cell.tf32)
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


# ---- the run ------------------------------------------------------------------------------------------------------


class GemmSuite(Suite):
    """One run over cells of `benchmarks.gemm_grid.grid`."""

    columns = gemm_grid.COLUMNS
    budget = 0.25

    def __init__(self, device: Device, sheet: Sheet, env: dict[str, str], deadline: float, torch: bool) -> None:
        super().__init__(device, sheet, env, deadline, torch)
        self.watch = Stopwatch(deadline=deadline, budget=self.budget, rounds=ROUNDS, even=True)

    def kernels(self, cells: Sequence[Cell]) -> list[Any]:
        return [one for cell in cells for one in gemm_grid.kernels(cell, self.device.multiprocessors)]

    def bytes(self, cells: Sequence[Cell]) -> int:
        return memory(cells[0], _outputs(cells))

    def measure(self, cells: Sequence[Cell]) -> None:
        suite = {"repair": self._repair, "host": self._host}.get(cells[0].suite, self._overhead)
        with self.watch.stream:  # encodings, too, are computed on it
            suite(cells)

    def empty(self, cell: Cell, contender: str = "") -> Row:
        return {**empty_row(cell), "read_gbs": short(self.ceilings.read_gbs)}

    def line(self, cell: Cell, rows: Sequence[Row]) -> str:
        troubles = "".join(f"\n    {row['error'] or row['note']}" for row in rows if row["error"] or row["note"])
        return f"{cell!s:52s} {''.join(map(gemm_grid.text, rows))}{troubles}"

    def conclude(self) -> tuple[str, list[str]]:
        found = gemm_bars.verdicts(self.rows)
        faults = [f"{' '.join(gemm_grid.key(row))}: {row['error']}" for row in self.rows if row["error"]]
        faults += [str(one) for one in found if one.holds is False]
        return f"\n{gemm_bars.table(one for one in found if one.cells)}\n", faults

    # ---- what protection costs ----

    def _overhead(self, cells: Sequence[Cell]) -> None:
        operands, base, judge = self._begin(cells)
        rows = {cell: self.empty(cell) for cell in cells}
        entries: dict[Cell, Contender] = {}
        for cell in cells:
            with _errors_in(rows[cell]):
                entry = protected(cell, operands)
                self._once(entry, judge, rows[cell])
            if not rows[cell]["error"]:
                entries[cell] = entry
        for entry in (base, *entries.values()):
            entry.poison()
        times = _queued(self.watch, {PLAIN: base, **{cell.variant: entry for cell, entry in entries.items()}})
        clock, read_gbs = self.clock, self.ceilings.read_gbs
        for cell, entry in entries.items():
            rows[cell].update(timed(cell, times[PLAIN], times[cell.variant], read_gbs), sm_mhz=clock)
            self._finish(entry, judge, rows[cell])
        of_plain: Row = {"error": ""}
        _judge(base, judge, of_plain, times[PLAIN].batch)
        for cell, row in rows.items():
            row["copies"] = operands.copies
            if of_plain["error"]:
                row["error"] = f"the plain product: {of_plain['error']}"
            self.emit(cell, [row])

    def _begin(self, cells: Sequence[Cell]) -> tuple[Operands, Contender, Judge]:
        """Operands, the plain product, judged, and the judge."""
        import cupy

        cell = cells[0]
        operands = Operands(cell, copies_of(cell, _outputs(cells)), seed_of(cell))
        base = plain(cell, operands)
        judge = judge_of(operands.A[0], operands.B[0], arithmetic(cell.dtype, cell.tf32), cupy)
        self._require(base, judge, "the plain product")
        return operands, base, judge

    def _require(self, entry: Contender, judge: Judge, name: str) -> None:
        """ArithmeticError where a product that others are compared with is wrong."""
        row: Row = {"error": ""}
        self._once(entry, judge, row)
        if row["error"]:
            raise ArithmeticError(f"{name}: {row['error']}")

    def _once(self, entry: Contender, judge: Judge, row: Row) -> None:
        """Judge one call."""
        entry.poison()
        self.watch.stream.synchronize()
        with errstate(sync=False):
            entry.call.run(0)
            entry.reports.collect()
        self.watch.stream.synchronize()
        _judge(entry, judge, row)

    @staticmethod
    def _finish(
        entry: Contender, judge: Judge, row: Row, calls: int = 0, expected: Status = Status.CLEAN, queued: bool = True
    ) -> None:
        """Note what reports and results say when all is timed."""
        reports = entry.reports
        reports.collect()
        row.update(status=str(reports), suspicions=reports.suspicions)
        if row["error"]:
            return
        _judge(entry, judge, row, calls or int(row["protected_calls"] or 1))
        row["error"] = row["error"] or reports.trouble(expected)
        if queued and reports.at_once:
            row["note"] = f"{reports.at_once} calls were waited for: the kernels do not serve this product"

    # ---- what a repair costs ----

    def _repair(self, cells: Sequence[Cell]) -> None:
        operands, base, judge = self._begin(cells)
        first = cells[0]
        report = protected_gemm(operands.A[0], operands.B[0], out=base.outputs[0], return_report=True)[1]
        faults = Faults(base.outputs[0], first.k, report.checks[0].detection_limit, seed_of(first))
        rows = {cell: self.empty(cell) for cell in cells}
        entries: dict[str, Contender] = {PLAIN: base}
        with errstate(corrected="ignore"):
            for name in dict.fromkeys((CLEAN, *(cell.faults for cell in cells))):
                entry, tried = protected(first, operands).planting(faults.plant(name)), {"error": ""}
                with _errors_in(tried):
                    self._once(entry, judge, tried)
                if not tried["error"]:
                    entries[name] = entry
                elif name == CLEAN:
                    raise ArithmeticError(f"the product without a fault: {tried['error']}")
                for cell in cells:
                    if cell.faults == name:
                        rows[cell].update(tried, copies=operands.copies)
            for variant, timing in ((ONE, self._repairs_on_card), (WAITED, self._repairs_on_host)):
                chosen = [cell for cell in cells if cell.variant == variant and cell.faults in entries]
                if not chosen:
                    continue
                raced = {name: entries[name] for name in (PLAIN, CLEAN, *(cell.faults for cell in chosen))}
                for cell, columns in timing(chosen, raced).items():
                    row, expected = rows[cell], Status.CLEAN if cell.faults == CLEAN else Status.CORRECTED
                    row.update(columns)
                    calls = int(row["protected_calls"] or PAIRS[0])
                    self._finish(entries[cell.faults], judge, row, calls, expected, queued=variant == ONE)
        for cell, row in rows.items():
            self.emit(cell, [row])

    def _repairs_on_card(self, cells: Sequence[Cell], entries: Mapping[str, Contender]) -> dict[Cell, Row]:
        """Columns by the card's clock: no verdict is waited for before all calls of a sample are queued."""
        watch = Stopwatch(deadline=self.watch.deadline, budget=PAIRED_SECONDS, rounds=PAIRS, even=True)
        times, read_gbs = _queued(watch, entries), self.ceilings.read_gbs
        return {cell: timed(cell, times[PLAIN], times[cell.faults], read_gbs, times[_before(cell)]) for cell in cells}

    def _repairs_on_host(self, cells: Sequence[Cell], entries: Mapping[str, Contender]) -> dict[Cell, Row]:
        """Columns by the host's clock: every verdict is waited for, and read."""
        import cupy

        device = cupy.cuda.Device()
        calls = {name: _walk(entry, device) for name, entry in entries.items()}
        begun = time.perf_counter()
        calls[PLAIN]()
        pairs = int(PAIRED_SECONDS / (time.perf_counter() - begun))
        seconds = paired(calls, max(PAIRS[0], min(PAIRS[1], pairs)))
        plain, read_gbs = seconds[PLAIN], self.ceilings.read_gbs
        return {cell: compared(cell, plain, seconds[_before(cell)], seconds[cell.faults], read_gbs) for cell in cells}

    # ---- what a call costs the host ----

    def _host(self, cells: Sequence[Cell]) -> None:
        import cupy

        operands, base, judge = self._begin(cells)
        A, B, C = operands.A[0], operands.B[0], base.outputs[0]
        entry = protected(cells[0], operands)
        calls: dict[str, Callable[[], object]] = {
            CUPY: lambda: cupy.matmul(A, B, out=C),
            PLAN: partial(base.call.run, 0),
            QUEUED: partial(entry.call.run, 0),
            DROPPED: lambda: protected_gemm(A, B, out=C),
            WAITED: lambda: protected_gemm(A, B, out=C),
        }
        for cell in cells:
            row = self.empty(cell)
            with _errors_in(row), errstate(sync=cell.variant == WAITED):
                base.poison()
                entry.poison()
                best = _host_seconds(calls[cell.variant], entry.reports.collect)
                row.update(host_us=short(1e6 * best), samples=CALLS * REPEATS)
                if cell.variant == QUEUED:
                    self._finish(entry, judge, row, 1)
                else:
                    _judge(base, judge, row)
            self.emit(cell, [row])


@contextmanager
def _errors_in(row: Row) -> Iterator[None]:
    """Keeps an exception in a row; raises where the card is lost."""
    try:
        yield
    except Exception as error:
        row["error"] = message(error)
        require_device(error)


def _judge(entry: Contender, judge: Judge, row: Row, calls: int = 1) -> None:
    """Judge the results of the first and of the last of so many calls."""
    ratios = [judge(entry.outputs[i]) for i in {0, max(1, min(entry.call.copies, calls)) - 1}]
    worst = max(ratios, key=lambda ratio: (math.isnan(ratio), ratio))
    row["judged"] = short(worst)
    if not worst <= 1:
        row["error"] = f"wrong product: {worst:.3g} of what is allowed"


def _outputs(cells: Sequence[Cell]) -> int:
    """How many contenders there are: the plain product, those of the cells, and a repair's without a fault. Cells of
    the same faults share one."""
    return 2 + len({cell.faults for cell in cells if cell.suite == "repair"} or cells)


def _before(cell: Cell) -> str:
    """What a cell of "repair" is compared with: faults with the protected product without one, that with cuBLAS's."""
    return PLAIN if cell.faults == CLEAN else CLEAN


def _queued(watch: Stopwatch, entries: Mapping[str, Contender]) -> dict[str, Times]:
    """Times of contenders in the same rounds; their reports are waited for between the samples."""

    def collect() -> None:
        for entry in entries.values():
            entry.reports.collect()

    watch.after = collect
    try:
        with errstate(sync=False):
            times = watch.measure({name: entry.call for name, entry in entries.items()})
            collect()
    finally:
        watch.after = lambda: None
    return times


def _walk(entry: Contender, device: Any) -> Callable[[], None]:
    """A call on the next copy of the operands, waited for and with its verdict."""
    turns = count()

    def call() -> None:
        entry.call.run(next(turns) % entry.call.copies)
        device.synchronize()

    return call


def _host_seconds(call: Callable[[], object], tidy: Callable[[], object]) -> float:
    """Seconds that a call takes the host, in the best of several queues of calls on an idle card."""
    import cupy

    device, collecting, seconds = cupy.cuda.Device(), gc.isenabled(), []
    gc.disable()
    try:
        for _ in range(REPEATS + 1):
            device.synchronize()
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            seconds.append((time.perf_counter() - begun) / CALLS)
            device.synchronize()
            tidy()
    finally:
        if collecting:
            gc.enable()
    return min(seconds[1:])
