"""Protected factorisations and solutions on the GPU that is present, beside those of its vendor's library.

    python -m benchmarks.bench_lu_gpu                              all of it, within 8 minutes on an H200
    python -m benchmarks.bench_lu_gpu --only "factor float64"      the cells whose name contains the text; repeatable
    python -m benchmarks.bench_lu_gpu --suite solve                the cells of a suite; repeatable
    python -m benchmarks.bench_lu_gpu --list                       names of the cells; needs no GPU
    python -m benchmarks.bench_lu_gpu --phases --only "F 8192"     each task of a factorisation alone

Suites: factor (LU of normal matrices, by the card's clock and as it is called), structured (of others), read (verdicts
on the way, beside the same steps queued without reading them, and as a whole), repair (of one planted fault), solve
(with factors), cholesky. All contenders of a cell take part in the same rounds, but that lu_factor as it is called has
rounds of other libraries and rounds of this package; all results are judged in that run.

Each row goes to results/lu_gpu.csv, or lu_gpu_phases.csv, as soon as its cell is done: an interrupted run keeps what it
has. The exit code is 1 if a result was wrong, a report did not say what it should, or a bar is missed; 130 after an
interrupt. `python -m benchmarks.tables` and `python -m benchmarks.figures lu_gpu` make tables and a figure.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np

import abft_tsm2
from abft_tsm2.arrays import Array, to_host
from abft_tsm2.core.device import Device
from abft_tsm2.report import Status
from benchmarks import lu_gpu_contenders as contenders
from benchmarks import lu_gpu_grid, sheet, suite
from benchmarks.bench_lu import FAULTS
from benchmarks.gpu_timing import Call, Stopwatch, message, require_device
from benchmarks.lu_gpu_contenders import Called, Getrf, Getrs, Potrf, planted
from benchmarks.lu_gpu_grid import LINE, ON_CARD, Cell
from benchmarks.lu_gpu_judge import cholesky_error, lu_error, solution_error, wrong
from benchmarks.lu_gpu_phases import PhaseSuite
from benchmarks.rows import short
from benchmarks.sheet import Sheet
from benchmarks.suite import Row, Suite
from benchmarks.timing import overhead, paired

BRIEF = 1024  # columns up to which the host has to be ahead of the card; beyond, the queue is full before that
SOLVED = 41  # rounds of solutions
LEAD = 2e-3  # seconds that a host has to queue the first steps
UNSPENT = 1e9  # seconds of the card: the rounds alone say how many samples there are


class LuGpuSuite(Suite):
    """One run over cells of `benchmarks.lu_gpu_grid.grid`."""

    columns = lu_gpu_grid.COLUMNS

    def __init__(self, device: Device, sheet: Sheet, env: dict[str, str], deadline: float, torch: bool) -> None:
        super().__init__(device, sheet, env, deadline, torch)
        self.watch = Stopwatch(least=0.0, deadline=deadline, budget=UNSPENT, even=True)

    def kernels(self, cells: Sequence[Cell]) -> list[Any]:
        return [one for cell in cells for one in contenders.kernels(cell)]

    def bytes(self, cells: Sequence[Cell]) -> int:
        return contenders.memory(cells[0])

    def group(self, cells: Sequence[Cell]) -> None:
        contenders.free_torch()
        super().group(cells)

    def measure(self, cells: Sequence[Cell]) -> None:
        measures: Mapping[str, Callable[[Cell], list[Row]]] = {
            "factor": self._factor,
            "structured": self._factor,
            "read": self._read,
            "repair": self._repair,
            "solve": self._solve,
            "cholesky": self._cholesky,
        }
        for cell in cells:
            with self.watch.stream:
                found = measures[cell.suite](cell)
            self.emit(cell, found)

    def empty(self, cell: Cell, contender: str = "") -> Row:
        return {**lu_gpu_grid.empty_row(cell), "copy_gbs": short(self.ceilings.copy_gbs)}

    def line(self, cell: Cell, rows: Sequence[Row]) -> str:
        troubles = "".join(f"\n    {row[kind]}" for row in rows for kind in ("error", "note") if row[kind])
        return f"{cell!s:42s} {'; '.join(map(lu_gpu_grid.text, rows))}{troubles}"

    def conclude(self) -> tuple[str, list[str]]:
        faults = [
            f"{' '.join(filter(None, lu_gpu_grid.key(row)))}: {trouble}"
            for row in self.rows
            for trouble in ([row["error"]] if row["error"] else lu_gpu_grid.missed(row))
        ]
        return "", faults

    # ---- LU ----

    def _factor(self, cell: Cell) -> list[Row]:
        A, row = contenders.matrix(cell), self.empty(cell)
        row.update(lu_gpu_grid.bars(cell), rounds=cell.rounds)
        judge = _FactorJudge(A, row)
        self._on_card(cell, A, row, judge)
        _free()
        self._as_called(cell, A, row, judge)
        expected = lu_gpu_grid.line_through(cell, self.rows) if cell.suite == "factor" else None
        if expected is not None and row["online_ms"] != "":
            row.update(line=short(row["online_ms"] / expected), line_bar=LINE)
        return [row]

    def _on_card(self, cell: Cell, A: Array, row: Row, judge: _FactorJudge) -> None:
        """Columns by the card's clock."""
        getrf = Getrf(A)
        judge.vendor(getrf.factors())
        calls: dict[str, Call] = {"getrf": Call(getrf)}
        queued = contenders.queued(A)
        for name, entry in queued.items():
            with _errors_in(row, name):
                judge.queued(name, *entry.factors())
                calls[name] = Call(entry)
        self.watch.rounds, self.watch.tries = (cell.rounds, cell.rounds), 4 if cell.n <= BRIEF else 1
        self.watch.after = getrf.restore
        try:
            times = self.watch.measure(calls)
        finally:
            self.watch.after = lambda: None
        for name in [name for name in calls if name in queued]:
            with _errors_in(row, name):
                judge.queued(name, *queued[name].factors())  # by now as a graph
        for name, taken in times.items():
            if taken.error:
                _add_error(row, name, taken.error)
        seconds = {name: taken.seconds for name, taken in times.items() if taken.seconds}
        row.update({f"{name}_ms": _median(taken) for name, taken in seconds.items()})
        row["hidden"] = short(min(times[name].hidden / len(seconds[name]) for name in seconds)) if seconds else ""
        row.update(compared(seconds, cell.n))
        getrf.close()

    def _as_called(self, cell: Cell, A: Array, row: Row, judge: _FactorJudge) -> None:
        """Columns by the host's clock."""
        others: dict[str, Callable[[], Any]] = {}
        taken: dict[str, Callable[[Any], Any]] = {}
        own = {mode: contenders.lu_factor(A, mode) for mode in ("offline", "online")}
        if cell.suite == "factor":
            others["cupy"] = contenders.of_cupy(A)
        if others and self.torch:
            for contender, library in contenders.LIBRARIES.items():
                try:
                    others[contender], taken[contender] = contenders.of_torch(A, library)
                    row["torch"] = sys.modules["torch"].__version__
                except Exception as error:
                    row["note"] = "; ".join(filter(None, (row["note"], f"no {contender}: {message(error)}")))
                    require_device(error)
        row["own_rounds"] = cell.own_rounds
        for group, rounds in ((others, cell.rounds), (own, cell.own_rounds)):
            calls: dict[str, Callable[[], Any]] = {}
            for name, call in group.items():
                with _errors_in(row, f"{name}, as called"):
                    found = call()
                    judge.called(name, taken.get(name, _as_it_is)(found), own=name in own)
                    del found
                    calls[name] = self._waited(call)
            seconds = paired(calls, rounds) if calls else {}
            row.update({f"{name}_call_ms": _median(times) for name, times in seconds.items()})
        for name, entry in own.items():
            if entry.trouble:
                _add_error(row, f"{name}, as called", entry.trouble)

    def _waited(self, call: Callable[[], Any]) -> Callable[[], Any]:
        def waited() -> Any:
            found = call()
            self.watch.stream.synchronize()
            return found

        return waited

    # ---- what a host adds that reads verdicts on the way ----

    def _read(self, cell: Cell) -> list[Row]:
        """By the card's clock, from the first kernel to the last one."""
        import cupy

        A, row = contenders.matrix(cell), self.empty(cell)
        row.update(lu_gpu_grid.bars(cell), rounds=cell.own_rounds)
        runs = contenders.tracked(A)
        judge, seconds = _FactorJudge(A, row), {name: list[float]() for name in runs}
        judge.vendor(runs["online"].factors()[0])
        judge.queued("read", *runs["read"].factors())
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        with contenders.ended(end):
            for number in range(-1, cell.own_rounds):
                for name in sorted(runs, reverse=number % 2 == 1):
                    self.watch.spin(LEAD)
                    start.record()
                    runs[name]()
                    end.synchronize()
                    if number >= 0:
                        seconds[name].append(1e-3 * cupy.cuda.get_elapsed_time(start, end))
        row.update({f"{name}_ms": _median(times) for name, times in seconds.items()})
        row["idle"] = short(overhead(seconds, "read", "parts"))
        return [row]

    # ---- what a repair costs ----

    def _repair(self, cell: Cell) -> list[Row]:
        A = contenders.matrix(cell)

        def factored(fault: str) -> Called:
            def call() -> Any:
                with planted(fault) if fault else nullcontext():
                    return abft_tsm2.protected_lu_factor(A, mode="online", return_report=True)

            return Called(call, Status.CORRECTED if fault else Status.CLEAN)

        clean, row = factored(""), self.empty(cell)
        judge = _FactorJudge(A, row)
        judge.vendor(clean())
        calls = {fault: factored(fault) for fault in FAULTS}
        with abft_tsm2.errstate(corrected="ignore"):
            for fault, call in calls.items():
                judge.called(fault, call(), own=True)
            seconds = paired({name: self._waited(call) for name, call in {"": clean, **calls}.items()}, cell.rounds)
        rows = []
        for fault, call in calls.items():
            found = {**row, "fault": fault, "rounds": cell.rounds, "online_call_ms": _median(seconds[""])}
            added = statistics.median(x - y for x, y in zip(seconds[fault], seconds[""], strict=True))
            found.update(repair_ms=short(1e3 * added), repair=short(overhead(seconds, fault, "")))
            for trouble in filter(None, (call.trouble, clean.trouble)):
                _add_error(found, fault, trouble)
            rows.append(found)
        return rows

    # ---- solutions, and Cholesky's factorisation ----

    def _solve(self, cell: Cell) -> list[Row]:
        A, B = contenders.matrix(cell), contenders.right_hand_sides(cell)
        factors = abft_tsm2.protected_lu_factor(A, mode="offline")
        getrs = Getrs(factors, B)
        own = Called(partial(abft_tsm2.protected_lu_solve, factors, B, return_report=True))
        reads = 2e-9 * cell.bytes / self.ceilings.copy_gbs
        row = self._beside_vendor(cell, getrs, own, partial(_solution_error, A, B), reads, SOLVED)
        row["reads_ms"] = short(1e3 * reads)
        getrs.close()
        return [row]

    def _cholesky(self, cell: Cell) -> list[Row]:
        A = contenders.definite(cell)
        potrf = Potrf(A)
        own = Called(partial(abft_tsm2.protected_cholesky, A, lower=True, return_report=True))
        row = self._beside_vendor(cell, potrf, own, partial(cholesky_error, A), 0.0, cell.rounds, potrf.restore)
        potrf.close()
        return [row]

    def _beside_vendor(
        self,
        cell: Cell,
        vendor: Callable[[], Array],
        own: Called,
        error_of: Callable[[Array], float],
        allowance: float,
        rounds: int,
        restore: Callable[[], Any] = lambda: None,
    ) -> Row:
        """The row of a function beside the vendor's, which is given so many seconds more; both are waited for."""
        row = self.empty(cell)
        row.update(lu_gpu_grid.bars(cell), rounds=rounds)
        first = [error_of(call()) for call in (vendor, own)]

        def before() -> None:
            restore()
            self.watch.stream.synchronize()

        calls = {"vendor": self._waited(vendor), "protected": self._waited(own)}
        seconds = paired(calls, rounds, before)
        row.update({f"{name}_call_ms": _median(times) for name, times in seconds.items()})
        given = {"vendor": [x + allowance for x in seconds["vendor"]], "protected": seconds["protected"]}
        row["protected"] = short(1 + overhead(given, "protected", "vendor"))
        restore()
        last = [error_of(call()) for call in (vendor, own)]
        row.update(vendor_error_u=_digits(first[0]), worst_error_u=_digits(max(*first, *last)))
        for name, errors in zip(calls, zip(first, last, strict=True), strict=True):
            if trouble := wrong(max(errors), first[0], cell.n):
                _add_error(row, name, trouble)
        if own.trouble:
            _add_error(row, "protected", own.trouble)
        return row


class _FactorJudge:
    """Judges factors of A, and notes in a row what is wrong with them."""

    def __init__(self, A: Array, row: Row) -> None:
        self._A, self._row, self._error = A, row, 0.0
        self._pivots = np.empty(0, np.int32)

    def vendor(self, factors: contenders.Factors) -> None:
        """Those that others are compared with; ArithmeticError where they are wrong."""
        self._error, self._pivots = lu_error(self._A, *factors), to_host(factors[1])
        if trouble := wrong(self._error, self._error, len(self._A)):
            raise ArithmeticError(f"what others are compared with is {trouble}")
        self._row.update(vendor_error_u=_digits(self._error), worst_error_u=_digits(self._error))

    def queued(self, name: str, factors: contenders.Factors, clean: bool) -> None:
        """This package's, queued."""
        self.called(name, factors, own=True)
        if not clean and name not in self._row["suspected"]:
            self._row["suspected"] = ", ".join(filter(None, (self._row["suspected"], name)))

    def called(self, name: str, factors: contenders.Factors, *, own: bool) -> None:
        """Those of a function. Another pivot than the vendor's is right where the candidates are equal but for
        rounding, which of normal numbers in float64 they never are."""
        row, error = self._row, lu_error(self._A, *factors)
        row["worst_error_u"] = _digits(max(error, row["worst_error_u"]))
        if trouble := wrong(error, self._error, len(self._A)):
            _add_error(row, name, trouble)
        if own:
            differ = int(np.count_nonzero(to_host(factors[1]) != self._pivots))
            row["pivots_differ"] = max(differ, row["pivots_differ"] or 0)
            if differ and (row["dtype"], row["matrix"]) == ("float64", "normal"):
                _add_error(row, name, f"{differ} pivots are not the vendor's")


def compared(seconds: Mapping[str, list[float]], n: int) -> Row:
    """The columns that relate what was measured by the card's clock."""
    found: Row = {}
    if "getrf" in seconds:
        found["gflops"] = short(2e-9 / 3 * n**3 / statistics.median(seconds["getrf"]))
        for name in ON_CARD[1:]:
            if name in seconds:
                found[name] = short(1 + overhead(seconds, name, "getrf"))
    if {"unprotected", "online"} <= set(seconds):
        found["checks"] = short(overhead(seconds, "online", "unprotected"))
    if {"getrf", "unprotected", "offline"} <= set(seconds):
        fastest = min(("getrf", "unprotected"), key=lambda name: statistics.median(seconds[name]))
        found["certificate"] = short(1 + overhead(seconds, "offline", fastest))
    return found


def _solution_error(A: Array, B: Array, X: Array) -> float:
    return solution_error(A, X, B)


def _as_it_is(found: Any) -> Any:
    return found


def _median(seconds: Sequence[float]) -> float:
    return short(1e3 * statistics.median(seconds))


def _digits(error: float) -> float:
    return float(f"{error:.3g}")


def _add_error(row: Row, name: str, text: str) -> None:
    told = f"{name}: {text}"
    if told not in row["error"]:
        row["error"] = "; ".join(filter(None, (row["error"], told)))


@contextmanager
def _errors_in(row: Row, name: str) -> Any:
    """Keeps an exception in a row; raises where the card is lost."""
    try:
        yield
    except Exception as error:
        _add_error(row, name, message(error))
        require_device(error)


def _free() -> None:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


def main(arguments: list[str] | None = None) -> int:
    parser = suite.parser(__doc__)
    parser.add_argument("--suite", action="append", choices=lu_gpu_grid.SUITES, help="the cells of a suite; repeatable")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave out PyTorch's lu_factor")
    parser.add_argument("--phases", action="store_true", help="each task of a factorisation alone, not all together")
    parser.set_defaults(torch=True)
    options = parser.parse_args(arguments)
    cells = lu_gpu_grid.grid()
    if options.phases:
        options.output = options.output or sheet.RESULTS / "lu_gpu_phases.csv"
        by_columns = [cell for cell in cells if (cell.suite, cell.order) == ("factor", "F")]
        return suite.main(PhaseSuite, by_columns, options)
    options.output = options.output or sheet.RESULTS / "lu_gpu.csv"
    return suite.main(LuGpuSuite, cells, options)


if __name__ == "__main__":
    sys.exit(main())
