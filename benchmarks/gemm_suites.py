"""Protected products against the plain ones by cuBLAS on a GPU (`benchmarks.gemm_device`).

What protection costs is timed on the card, in the same rounds as the plain product. So is what a repair costs, and once
more by the host's clock, call by call, with the wait for the verdict. What a call costs the host itself is timed there.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from abft_tsm2 import errstate, protected_gemm
from abft_tsm2.core.device import Device
from abft_tsm2.faults.judge.oracle import arithmetic
from abft_tsm2.report import Status
from benchmarks import gemm_bars, gemm_device, gemm_rows
from benchmarks.campaign import Campaign, Row
from benchmarks.gemm_device import CLEAN, CUPY, DROPPED, ONE, PLAIN, PLAN, QUEUED, WAITED, Cell, Contender, Operands
from benchmarks.gemm_faults import Faults, Plant, planted
from benchmarks.gemm_judge import Judge
from benchmarks.gemm_rows import compared, empty_row, timed
from benchmarks.gpu_timing import Stopwatch, Times, card_state, message, require_device
from benchmarks.rows import short
from benchmarks.sheet import Sheet
from benchmarks.timing import paired

ROUNDS = (9, 51)
PAIRS = (15, 61)  # rounds of repairs
PAIRED_SECONDS = 0.6  # of the card, for each contender
CALLS, REPEATS = 300, 5  # of which the host time is the mean, and the best


class GemmCampaign(Campaign):
    """One run over cells of `benchmarks.gemm_device.grid`."""

    columns = gemm_rows.COLUMNS
    budget = 0.25

    def __init__(self, device: Device, sheet: Sheet, env: dict[str, str], deadline: float, torch: bool) -> None:
        super().__init__(device, sheet, env, deadline, torch)
        self.watch = Stopwatch(deadline=deadline, budget=self.budget, rounds=ROUNDS, even=True)

    def kernels(self, cells: Sequence[Cell]) -> list[Any]:
        return [one for cell in cells for one in gemm_device.kernels(cell, self.device.multiprocessors)]

    def bytes(self, cells: Sequence[Cell]) -> int:
        return gemm_device.memory(cells[0], _outputs(cells))

    def measure(self, cells: Sequence[Cell]) -> None:
        suite = {"repair": self._repair, "host": self._host}.get(cells[0].suite, self._overhead)
        with self.watch.stream:  # encodings, too, are computed on it
            suite(cells)

    def empty(self, cell: Cell, contender: str) -> Row:
        return {**empty_row(cell), "read_gbs": short(self.ceilings.read_gbs)}

    def compare(self, rows: list[Row]) -> None:
        """Nothing: each row has all that it needs."""

    def line(self, cell: Cell, rows: Sequence[Row]) -> str:
        troubles = "".join(f"\n    {row['error'] or row['note']}" for row in rows if row["error"] or row["note"])
        return f"{cell!s:52s} {''.join(map(gemm_rows.text, rows))}{troubles}"

    def conclude(self) -> tuple[str, list[str]]:
        found = gemm_bars.verdicts(self.rows)
        faults = [f"{' '.join(gemm_rows.key(row))}: {row['error']}" for row in self.rows if row["error"]]
        faults += [str(one) for one in found if one.holds is False]
        return f"\n{gemm_bars.table(one for one in found if one.cells)}\n", faults

    # ---- what protection costs ----

    def _overhead(self, cells: Sequence[Cell]) -> None:
        operands, base, judge = self._begin(cells)
        rows = {cell: self.empty(cell, cell.variant) for cell in cells}
        entries: dict[Cell, Contender] = {}
        for cell in cells:
            with _Errors(rows[cell]):
                entry = gemm_device.protected(cell, operands)
                with errstate(sync=False):
                    self._once(entry, judge, rows[cell])
                if not rows[cell]["error"]:
                    entries[cell] = entry
        calls = self._race(base, entries, rows)
        for cell, entry in entries.items():
            self._finish(entry, judge, rows[cell], int(rows[cell]["protected_calls"] or 1))
        trouble = self._wrong(base, judge, calls)
        for cell in cells:
            if trouble:
                rows[cell]["error"] = f"the plain product: {trouble}"
            rows[cell]["copies"] = operands.copies
            self.emit(cell, [rows[cell]])

    def _race(self, base: Contender, entries: Mapping[Cell, Contender], rows: Mapping[Cell, Row]) -> int:
        """Times of all contenders in the same rounds; verdicts are waited for between the samples. Returns the plain
        calls of a sample."""
        for entry in (base, *entries.values()):
            entry.poison()
        times = _queued(self.watch, {PLAIN: base, **{cell.variant: entry for cell, entry in entries.items()}})
        clock = card_state("clocks.sm")["clocks.sm"] if self.clocks else ""
        for cell in entries:
            rows[cell].update(timed(cell, times[PLAIN], times[cell.variant], self.ceilings.read_gbs), sm_mhz=clock)
        return max(1, times[PLAIN].batch)

    def _begin(self, cells: Sequence[Cell]) -> tuple[Operands, Contender, Judge]:
        """Operands, the plain product, judged, and the judge."""
        import cupy

        cell = cells[0]
        operands = Operands(cell, gemm_device.copies_of(cell, _outputs(cells)), gemm_device.seed_of(cell))
        base = gemm_device.plain(cell, operands)
        judge = Judge(operands.A[0], operands.B[0], arithmetic(cell.dtype, cell.tf32), cupy)
        row: Row = {"error": ""}
        self._once(base, judge, row)
        if row["error"]:
            raise ArithmeticError(f"the plain product: {row['error']}")
        return operands, base, judge

    def _once(self, entry: Contender, judge: Judge, row: Row) -> None:
        """One call, judged."""
        entry.poison()
        self.watch.stream.synchronize()
        entry.call.run(0)
        entry.reports.collect()
        self.watch.stream.synchronize()
        found = judge(entry.outputs[0])
        row["judged"] = short(found)
        if math.isnan(found) or found > 1:
            row["error"] = f"wrong product: {found:.3g} of what is allowed"

    def _wrong(self, entry: Contender, judge: Judge, calls: int, row: Row | None = None) -> str:
        """What is wrong with the results of so many calls, on the first copy and on the last; empty if nothing."""
        worst = 0.0
        for i in {0, min(entry.call.copies, calls) - 1}:
            found = judge(entry.outputs[i])
            worst = found if math.isnan(found) else max(worst, found)
        if row is not None:
            row["judged"] = short(worst)
        return "" if worst <= 1 else f"wrong product: {worst:.3g} of what is allowed"

    def _finish(
        self, entry: Contender, judge: Judge, row: Row, calls: int, expected: Status = Status.CLEAN, queued: bool = True
    ) -> None:
        """What reports and results say when all is timed."""
        reports = entry.reports
        reports.collect()
        row.update(status=str(reports), suspicions=reports.suspicions)
        if row["error"]:
            return
        row["error"] = self._wrong(entry, judge, calls, row) or reports.trouble(expected)
        if queued and reports.at_once:
            row["note"] = f"{reports.at_once} calls were waited for: the kernels do not serve this product"

    # ---- what a repair costs ----

    def _repair(self, cells: Sequence[Cell]) -> None:
        import cupy

        operands, base, _ = self._begin(cells)
        first = cells[0]
        report = protected_gemm(operands.A[0], operands.B[0], out=base.outputs[0], return_report=True)[1]
        limit = report.checks[0].detection_limit
        faults = Faults(base.outputs[0], first.k, limit, gemm_device.seed_of(first))
        judge = Judge(operands.A[0], operands.B[0], arithmetic(first.dtype), cupy, faults.rows)
        rows = {cell: self.empty(cell, cell.variant) for cell in cells}
        entries: dict[str, Contender] = {PLAIN: base}
        with errstate(corrected="ignore"):
            for name in dict.fromkeys((CLEAN, *(cell.faults for cell in cells))):
                tried: Row = {"error": ""}
                with _Errors(tried), errstate(sync=False):
                    entry = _with(gemm_device.protected(first, operands), faults.plant(name))
                    self._once(entry, judge, tried)
                    if not tried["error"]:
                        entries[name] = entry
                if name == CLEAN and name not in entries:
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
        """Columns by the card's clock: nobody waits for a verdict before all calls of a sample are queued."""
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
        entry = gemm_device.protected(cells[0], operands)
        calls: dict[str, Callable[[], object]] = {
            CUPY: lambda: cupy.matmul(A, B, out=C),
            PLAN: partial(base.call.run, 0),
            QUEUED: partial(entry.call.run, 0),
            DROPPED: lambda: protected_gemm(A, B, out=C),
            WAITED: lambda: protected_gemm(A, B, out=C),
        }
        for cell in cells:
            row = self.empty(cell, cell.variant)
            with _Errors(row), errstate(sync=cell.variant == WAITED):
                base.poison()
                entry.poison()
                best = _host_seconds(calls[cell.variant], entry.reports.collect)
                row.update(host_us=short(1e6 * best), samples=CALLS * REPEATS)
                if cell.variant == QUEUED:
                    self._finish(entry, judge, row, 1)
                else:
                    row["error"] = self._wrong(base, judge, 1, row)
            self.emit(cell, [row])


class _Errors:
    """Keeps an exception in a row; raises where the card is lost."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._row["error"] = message(error)
        require_device(error)
        return True


def _outputs(cells: Sequence[Cell]) -> int:
    """How many contenders there are: the plain product, those of the cells, and a repair's without a fault. Cells of
    the same faults share one."""
    return 2 + len({cell.faults for cell in cells if cell.suite == "repair"} or cells)


def _with(entry: Contender, plant: Plant) -> Contender:
    """A contender into whose products faults are planted."""

    def run(i: int) -> None:
        with planted(plant):
            entry.call.run(i)

    return replace(entry, call=replace(entry.call, run=run))


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
