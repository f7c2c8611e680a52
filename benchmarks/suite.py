"""The run of a GPU benchmark, whatever its grid: groups of cells one after the other, each row on disk as soon as its
cell is done, and whatever goes wrong in the rows.
"""

from __future__ import annotations

import argparse
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from abft_tsm2.core.compiler import kernel as compiled
from abft_tsm2.core.device import Device, query
from abft_tsm2.errors import NotSuitable
from benchmarks import ceilings
from benchmarks.gpu_timing import DeviceLostError, Stopwatch, card_state, environment, message, require_device
from benchmarks.sheet import Sheet

LAST = 15.0  # no new group of cells begins so few seconds before the time limit
THREADS = 8  # that compile
Row = dict[str, Any]


class Suite(ABC):
    """One run: the device, its ceilings, and the sheet that rows go to.

    A subclass says what the methods below without a body mean for its grid. A cell has a `group`; cells of the same
    group are neighbours and are measured together.
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
        self._fast = time.perf_counter() - begun < 0.2  # on some machines the answer takes seconds
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
        """A row of a cell and a contender without numbers."""

    @abstractmethod
    def line(self, cell: Any, rows: Sequence[Row]) -> str:
        """A cell in a line of text."""

    @abstractmethod
    def conclude(self) -> tuple[str, list[str]]:
        """The text at the end of a run, and its errors and missed bars."""

    # ---- of every grid ---------------------------------------------------------------------------------------------

    @property
    def clock(self) -> str:
        """The clock of the multiprocessors now, in MHz; empty where the answer takes too long."""
        return card_state("clocks.sm")["clocks.sm"] if self._fast else ""

    def group(self, cells: Sequence[Any]) -> None:
        """Measure cells of one group; what goes wrong ends up in their rows."""
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

    def emit(self, cell: Any, found: list[Row]) -> None:
        """Write and print the rows of a cell that is done."""
        for row in found:
            self.sheet.append({**row, **self.env})
        self.rows += found
        self.done.append(cell)
        print(f"{time.monotonic() - self.begun:5.0f} s  {self.line(cell, found)}", flush=True)


def precompile(configs: Sequence[Any]) -> float:
    """Compile kernels side by side; returns the seconds. One that fails shows again where it is timed."""
    import cupy

    device = cupy.cuda.Device().id
    begun = time.perf_counter()

    def compile_one(config: Any) -> None:
        with cupy.cuda.Device(device):
            compiled(config)

    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(compile_one, config) for config in dict.fromkeys(configs)]:
            future.exception()
    return time.perf_counter() - begun


# ---- the command line ---------------------------------------------------------------------------------------------


def parser(text: str | None) -> argparse.ArgumentParser:
    """The options of every GPU benchmark."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--full", action="store_true", help="all cells, not the default subset")
    made.add_argument("--only", action="append", default=[], metavar="TEXT", help="cells whose name contains TEXT")
    made.add_argument("--list", action="store_true", help="print the names of the chosen cells and stop")
    made.add_argument("--limit-seconds", type=float, default=math.inf, metavar="S", help="begin nothing new near S")
    made.add_argument("--append", action="store_true", help="keep the CSV's rows; as with --only and --suite")
    made.add_argument("--output", type=Path, metavar="CSV", help="default: the file of benchmarks/results")
    made.set_defaults(suite=[], torch=False)
    return made


def main(kind: type[Suite], grid: Sequence[Any], options: argparse.Namespace) -> int:
    """List or measure the cells that the options choose; returns the exit code."""
    cells = [cell for cell in grid if options.full or options.only or cell.default]
    cells = [cell for cell in cells if not options.suite or cell.suite in options.suite]
    cells = [cell for cell in cells if not options.only or any(text in str(cell) for text in options.only)]
    if not cells:
        print(f"no cell is named like {' or '.join((*options.suite, *options.only))}: --list --full names all")
        return 2
    if options.list:
        print(*cells, sep="\n")
        return 0
    try:
        return run(kind, cells, options)
    except NotSuitable as reason:
        print(f"nothing can be measured here: {reason}")
        return 2


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def run(kind: type[Suite], cells: Sequence[Any], options: argparse.Namespace) -> int:
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
        seconds = precompile(configs)
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
