"""What every run of a GPU benchmark does, whatever its grid: groups of cells one after the other, each contender first
judged and then timed, each row on disk as soon as its cell is done, and whatever goes wrong in the rows.
"""

from __future__ import annotations

import argparse
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

from abft_tsm2.core.device import Device, query
from abft_tsm2.errors import NotSuitable
from benchmarks import ceilings, contenders, rows
from benchmarks.gpu_products import Errors, worse
from benchmarks.gpu_timing import (
    Call,
    DeviceLostError,
    Stopwatch,
    card_state,
    environment,
    message,
    require_device,
)
from benchmarks.sheet import Sheet

LAST = 15.0  # no new group of cells begins so few seconds before the time limit
Row = dict[str, Any]
Judge = Callable[[int], Errors]
"""What is wrong with the product of copy i of the operands."""


class Cell(rows.Cell, Protocol):
    """One thing that is measured; those of the same group are measured together."""

    @property
    def group(self) -> tuple[Any, ...]: ...


class Entry(Protocol):
    """A contender."""

    @property
    def name(self) -> str: ...

    @property
    def call(self) -> Call: ...

    def poison(self) -> None:
        """Fill the outputs with NaN, so that an element that is not written shows."""


class Campaign(ABC):
    """One run: the device, its ceilings, and the sheet that rows go to.

    A subclass says what the methods below without a body mean for its grid.
    """

    columns: tuple[str, ...]
    budget = 0.15

    def __init__(self, device: Device, sheet: Sheet, env: dict[str, str], deadline: float, torch: bool) -> None:
        self.device, self.sheet, self.env, self.deadline, self.torch = device, sheet, env, deadline, torch
        self.watch = Stopwatch(deadline=deadline, budget=self.budget)
        self.ceilings = ceilings.measure(self.watch)
        self.begun = time.monotonic()
        begun = time.perf_counter()
        card_state("clocks.sm")
        self.clocks = time.perf_counter() - begun < 0.2  # on some machines the answer takes seconds
        self.rows: list[Row] = []
        self.done: list[Any] = []

    # ---- of a grid -------------------------------------------------------------------------------------------------

    @abstractmethod
    def kernels(self, cells: Sequence[Any]) -> list[Any]:
        """Configurations of the kernels that are compiled beforehand, side by side."""

    @abstractmethod
    def bytes(self, cells: Sequence[Any]) -> int:
        """An upper estimate of what a group takes of the card's memory."""

    @abstractmethod
    def measure(self, cells: Sequence[Any]) -> None:
        """Measure a group of cells and `emit` the rows of each."""

    @abstractmethod
    def empty(self, cell: Any, contender: str) -> Row:
        """A row that says which cell and who; all else is empty."""

    @abstractmethod
    def compare(self, rows: list[Row]) -> None:
        """Fill in, for the rows of one cell, what relates one contender to another."""

    @abstractmethod
    def line(self, cell: Any, rows: Sequence[Row]) -> str:
        """A cell in a line of text."""

    @abstractmethod
    def conclude(self) -> tuple[str, list[str]]:
        """What is to be said at the end, and what speaks against the run."""

    # ---- of every grid ---------------------------------------------------------------------------------------------

    def group(self, cells: Sequence[Any]) -> None:
        """Measure cells that share A; what goes wrong ends up in their rows."""
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        needed, free = self.bytes(cells), int(cupy.cuda.runtime.memGetInfo()[0])
        try:
            if needed > free:
                for cell in cells:
                    note = f"not measured: takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free"
                    self.emit(cell, [{**self.empty(cell, ""), "note": note}])
            else:
                self.measure(cells)
        except Exception as error:
            for cell in cells:
                if cell not in self.done:
                    self.emit(cell, [{**self.empty(cell, ""), "error": message(error)}])
            if isinstance(error, DeviceLostError):
                raise
            require_device(error)

    def once(self, entry: Entry, judge: Judge, row: Row) -> None:
        """One product of normal operands, judged; an error stays in the row, and the entry out of the timing."""
        import cupy

        entry.poison()
        cupy.cuda.Device().synchronize()
        try:
            with self.watch.stream:
                entry.call.run(0)
            self.watch.stream.synchronize()
            found = judge(0)
            row.update(rows.judged(found, "normal_"))
            if not found.ok:
                row["error"] = f"wrong product of normal operands: {found}"
        except NotSuitable as reason:
            row["note"] = f"not suitable: {reason}"
        except Exception as error:
            row["error"] = message(error)
            require_device(error)

    def race(self, cell: Cell, entries: Sequence[Entry], judges: Mapping[str, Judge], found: Mapping[str, Row]) -> None:
        """Times of the entries that may be timed, all of which are judged then; emits the rows `found` of the cell."""
        able = [entry for entry in entries if not found[entry.name]["error"] and not found[entry.name]["note"]]
        for entry in able:
            entry.poison()
        times = self.watch.measure({entry.name: entry.call for entry in able})
        clock = card_state("clocks.sm")["clocks.sm"] if self.clocks else ""
        for entry in able:
            row, taken = found[entry.name], times[entry.name]
            row.update(rows.timed(cell, taken, self.ceilings), sm_mhz=clock)
            if row["error"]:
                continue
            # The copies that were multiplied last, too.
            last = min(entry.call.copies, taken.batch) - 1
            errors = judges[entry.name](0)
            if last:
                errors = worse(errors, judges[entry.name](last))
            row.update(rows.judged(errors))
            if not errors.ok:
                row["error"] = f"wrong product: {errors}"
        self.emit(cell, list(found.values()))

    def emit(self, cell: Any, found: list[Row]) -> None:
        """Rows of a cell that is done."""
        self.compare(found)
        for row in found:
            self.sheet.append({**row, **self.env})
        self.rows += found
        self.done.append(cell)
        print(f"{time.monotonic() - self.begun:5.0f} s  {self.line(cell, found)}", flush=True)


def troubles(found: Sequence[Row]) -> str:
    """Lines that say what is wrong with a cell's rows, or why they have no times."""
    return "".join(
        f"\n    {row['contender'] or 'all'}: {row['error'] or row['note']}"
        for row in found
        if row["error"] or (row["note"] and row["how"] == "")
    )


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def run(kind: type[Campaign], cells: Sequence[Any], options: argparse.Namespace) -> int:
    """Measure the cells; returns the exit code."""
    begun = time.monotonic()
    deadline = begun + options.limit_seconds
    device, env = query(), environment()
    signal.signal(signal.SIGTERM, _interrupt)  # `timeout` sends it; what is measured is on disk
    append = options.append or bool(options.only or options.suite)
    with Sheet(options.output, (*kind.columns, *env), append=append) as sheet:
        bench, left = kind(device, sheet, env, deadline, options.torch), ""
        print(f"{env['device']}: read {bench.ceilings.read_gbs:.0f} GB/s, copy {bench.ceilings.copy_gbs:.0f} GB/s")
        configs = bench.kernels(cells)
        seconds = contenders.precompile(configs)
        print(f"{len(set(configs))} kernels compiled or found in the cache in {seconds:.1f} s", flush=True)
        stopped = 0
        try:
            for _, members in groupby(cells, key=lambda cell: cell.group):
                if time.monotonic() > deadline - LAST:
                    left = "the time limit"
                    break
                bench.group(list(members))
        except DeviceLostError as error:
            print(error)
            left = "the loss of the device"
        except KeyboardInterrupt:
            left, stopped = "an interrupt", 130
    text, faults = bench.conclude()
    print(text, end="")
    for fault in faults:
        print(f"FAULT {fault}")
    rest = f"; {len(cells) - len(bench.done)} cells left out after {left}" if left else ""
    print(f"{len(bench.done)} of {len(cells)} cells in {time.monotonic() - begun:.0f} s, {len(faults)} faults{rest}")
    print(f"rows in {sheet.path}")
    return stopped or int(bool(faults) or left == "the loss of the device")
