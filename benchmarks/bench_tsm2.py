"""The tall-skinny kernels against cuBLAS and CuPy, on the paper's grid and the card that is present.

    python -m benchmarks.bench_tsm2                         the default subset, within 4 minutes on an H200
    python -m benchmarks.bench_tsm2 --full                  the whole grid
    python -m benchmarks.bench_tsm2 --only "tsm2r float64"  the cells whose name contains the text; repeatable
    python -m benchmarks.bench_tsm2 --list                  names of the cells; needs no GPU

Operands are uniform in [0, 1), as in the paper, where products are timed; normally distributed ones are multiplied
once more, to be judged. Every timed output is compared with a product in more precision, element by element.

Each row goes to the CSV as soon as its cell is done: an interrupted run keeps what it has. The exit code is 1 if
a product was wrong or failed, or a bar is missed; 130 after an interrupt. `python -m benchmarks.tables README.md` and
the scripts of `benchmarks/paper` make tables and figures of it.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from abft_tsm2.core import tune
from abft_tsm2.core.config import Config
from abft_tsm2.core.device import Device, query
from abft_tsm2.errors import NotSuitable
from benchmarks import ceilings, contenders, tables, tsm2_grid
from benchmarks.contenders import Contender
from benchmarks.gpu_products import Operands, Reference, errors
from benchmarks.gpu_timing import (
    DeviceLostError,
    Stopwatch,
    card_state,
    copies,
    environment,
    message,
    require_device,
)
from benchmarks.sheet import Sheet
from benchmarks.tsm2_grid import COLUMNS, Cell

LAST = 15.0  # no new group of cells begins so few seconds before the time limit


class Bench:
    """One run: the device, its ceilings, and the sheet that rows go to."""

    def __init__(self, device: Device, sheet: Sheet, env: dict[str, str], deadline: float, torch: bool) -> None:
        self.device, self.sheet, self.env, self.deadline, self.torch = device, sheet, env, deadline, torch
        self.watch = Stopwatch(deadline=deadline)
        self.ceilings = ceilings.measure(self.watch)
        # The published code was timed on this card alone.
        self.published = tsm2_grid.published_ms() if "H200" in env["device"] else {}
        self.begun = time.monotonic()
        begun = time.perf_counter()
        card_state("clocks.sm")
        self.clocks = time.perf_counter() - begun < 0.2  # on some machines the answer takes seconds
        self.rows: list[dict[str, Any]] = []

    def group(self, cells: Sequence[Cell]) -> None:
        """Measure cells that share A; what goes wrong ends up in their rows."""
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        needed, free = self._bytes(cells), int(cupy.cuda.runtime.memGetInfo()[0])
        try:
            if needed > free:
                for cell in cells:
                    note = f"not measured: takes {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free"
                    self._emit(cell, [{**tsm2_grid.empty_row(cell, ""), "note": note}])
            else:
                self._measure(cells)
        except Exception as error:
            done = {tsm2_grid.key(row) for row in self.rows}
            for cell in cells:
                if cell.key not in done:
                    self._emit(cell, [{**tsm2_grid.empty_row(cell, ""), "error": message(error)}])
            if isinstance(error, DeviceLostError):
                raise
            require_device(error)

    def _measure(self, cells: Sequence[Cell]) -> None:
        suite, m, k, dtype = cells[0].group
        widest = max(cell.n for cell in cells)
        operands = Operands(m, k, widest, dtype, copies=self._copies(cells))
        seed = sum(map(ord, suite)) + m + k
        expected = operands.fill("normal", seed)
        entries: dict[Cell, list[Contender]] = {}
        rows: dict[Cell, dict[str, dict[str, Any]]] = {}
        for cell in cells:
            entries[cell], rows[cell] = self._contenders(cell, operands)
            for entry in entries[cell]:
                self._multiply_once(entry, expected.columns(cell.n), k, rows[cell][entry.name])
        expected = operands.fill("uniform", seed + 1)
        for cell in cells:
            self._time(cell, entries[cell], expected.columns(cell.n), rows[cell])
            del entries[cell]  # its outputs make room

    def _contenders(self, cell: Cell, operands: Operands) -> tuple[list[Contender], dict[str, dict[str, Any]]]:
        """All contenders of a cell that can be had, and a row for each, also of those that cannot."""
        chosen = tsm2_grid.kernels(cell)
        for variant, configs in tsm2_grid.sweep(cell, self.device).items():
            best = self._fastest(configs, cell, operands)
            if best is not None:
                chosen[f"{variant} swept"] = best
        if cell.suite == "tsm2l":  # the kernel that tall_skinny_matmul takes; cuBLAS where there is none
            for config in tune.choose(cell.problem, self.device)[:1]:
                chosen["tall_skinny_matmul"] = config
        entries = [contenders.kernel(name, c, self.device, operands, cell.n) for name, c in chosen.items()]
        rows = {}
        square = cell.suite == "tsm2r"
        for name, make in contenders.vendor(gemv=square, torch=self.torch and not square).items():
            try:
                entries.append(make(operands, cell.n))
            except Exception as error:
                require_device(error)
                kind = "note" if name == contenders.TORCH else "error"  # we can do without PyTorch
                rows[name] = {**tsm2_grid.empty_row(cell, name), kind: message(error)}
        return entries, {entry.name: self._row(cell, entry) for entry in entries} | rows

    def _fastest(self, configs: Sequence[Config], cell: Cell, operands: Operands) -> Config | None:
        """The one that a short look finds fastest; its time is then taken anew."""
        shared = contenders.kernel("", configs[0], self.device, operands, cell.n).outputs
        entries = {c: contenders.kernel(c.name, c, self.device, operands, cell.n, shared) for c in configs}
        watch = Stopwatch(budget=0.01, rounds=(3, 5), deadline=self.deadline)
        times = watch.measure({config.name: entry.call for config, entry in entries.items()})
        medians = {c: statistics.median(times[c.name].seconds) for c in configs if times[c.name].seconds}
        return min(medians, key=lambda config: medians[config], default=None)

    def _row(self, cell: Cell, entry: Contender) -> dict[str, Any]:
        row = tsm2_grid.empty_row(cell, entry.name)
        row.update(layout=entry.layout, copies=entry.call.copies)
        if entry.config is not None:
            config = entry.config
            row.update(config=config.name, t1=config.t1, t2=config.t2, t3=config.t3, tcf=config.tcf)
        return row

    def _multiply_once(self, entry: Contender, expected: Reference, k: int, row: dict[str, Any]) -> None:
        """One product of normal operands, judged; an error stays in the row, and the entry out of the timing."""
        import cupy

        entry.poison()
        cupy.cuda.Device().synchronize()
        try:
            with self.watch.stream:
                entry.call.run(0)
            self.watch.stream.synchronize()
            found = errors(entry.outputs[0], expected, k, cupy)
            row.update(tsm2_grid.judged(found, "normal_"))
            if not found.ok:
                row["error"] = f"wrong product of normal operands: {found}"
        except NotSuitable as reason:
            row["note"] = f"not suitable: {reason}"
        except Exception as error:
            row["error"] = message(error)
            require_device(error)

    def _time(
        self, cell: Cell, entries: Sequence[Contender], expected: Reference, rows: dict[str, dict[str, Any]]
    ) -> None:
        import cupy

        able = [entry for entry in entries if not rows[entry.name]["error"] and not rows[entry.name]["note"]]
        for entry in able:
            entry.poison()
        times = self.watch.measure({entry.name: entry.call for entry in able})
        clock = card_state("clocks.sm")["clocks.sm"] if self.clocks else ""
        for entry in able:
            row = rows[entry.name]
            row.update(tsm2_grid.timed(cell, times[entry.name], self.ceilings), sm_mhz=clock)
            if row["error"]:
                continue
            found = errors(entry.outputs[0], expected, cell.k, cupy)
            if len(entry.outputs) > 1:  # the copies that were multiplied last, too
                reached = min(len(entry.outputs), times[entry.name].batch) - 1
                found = tsm2_grid.worse(found, errors(entry.outputs[reached], expected, cell.k, cupy))
            row.update(tsm2_grid.judged(found))
            if not found.ok:
                row["error"] = f"wrong product: {found}"
        self._emit(cell, list(rows.values()))

    def _emit(self, cell: Cell, rows: list[dict[str, Any]]) -> None:
        tsm2_grid.compare(rows, self.published)
        for row in rows:
            self.sheet.append({**row, **self.env})
        self.rows += rows
        print(f"{time.monotonic() - self.begun:5.0f} s  {_line(cell, rows)}", flush=True)

    def _copies(self, cells: Sequence[Cell]) -> int:
        return max(copies((cell.m * cell.k + cell.m * cell.n) * cell.itemsize) for cell in cells)

    def _bytes(self, cells: Sequence[Cell]) -> int:
        """An upper estimate of what a group takes."""
        cell, several = max(cells, key=lambda cell: cell.n), self._copies(cells)
        outputs = sum(cell.m * cell.n * cell.itemsize * several * (len(tsm2_grid.kernels(cell)) + 9) for cell in cells)
        return Operands.bytes(cell.m, cell.k, cell.n, cell.dtype, several) + outputs


def _line(cell: Cell, rows: Sequence[dict[str, Any]]) -> str:
    """A cell in one line of text: the best of ours, cuBLAS, and what went wrong."""
    timed = [row for row in rows if row["ms"] != ""]
    ours = min((row for row in timed if row["config"]), key=lambda row: float(row["ms"]), default=None)
    text = f"{cell!s:36s}"
    if ours is not None:
        text += f" {ours['contender']:12s} {ours['ms']:9.4f} ms {ours['share_of_ceiling']:6.1%} of {ours['ceiling']}"
        if ours["best_cublas"]:
            text += f", {ours['speedup']:5.2f} x {ours['best_cublas']}"
    for row in rows:
        if row["ratio_to_published"] != "":
            text += f", {row['contender']} {row['ratio_to_published']:.2f} of the published time"
        if row["error"] or (row["note"] and row["ms"] == ""):
            text += f"\n    {row['contender'] or 'all'}: {row['error'] or row['note']}"
    return text


def _chosen(options: argparse.Namespace) -> list[Cell]:
    cells = [cell for cell in tsm2_grid.grid() if options.full or options.only or cell.default]
    return [cell for cell in cells if not options.only or any(text in str(cell) for text in options.only)]


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def run(cells: Sequence[Cell], options: argparse.Namespace) -> int:
    """Measure the cells; returns the exit code."""
    begun = time.monotonic()
    deadline = begun + options.limit_seconds
    device, env = query(), environment()
    signal.signal(signal.SIGTERM, _interrupt)  # `timeout` sends it; what is measured is on disk
    with Sheet(options.output, (*COLUMNS, *env), append=options.append or bool(options.only)) as sheet:
        bench, left = Bench(device, sheet, env, deadline, options.torch), ""
        print(f"{env['device']}: read {bench.ceilings.read_gbs:.0f} GB/s, copy {bench.ceilings.copy_gbs:.0f} GB/s")
        configs = [config for cell in cells for config in tsm2_grid.kernels(cell).values()]
        configs += [c for cell in cells for several in tsm2_grid.sweep(cell, device).values() for c in several]
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
    done = {tsm2_grid.key(row) for row in bench.rows}
    faults = tsm2_grid.verdict(bench.rows, bench.published)
    for fault in faults:
        print(f"FAULT {fault}")
    rest = f"; {len(cells) - len(done)} cells left out after {left}" if left else ""
    print(f"{len(done)} of {len(cells)} cells in {time.monotonic() - begun:.0f} s, {len(faults)} faults{rest}")
    print(f"rows in {sheet.path}")
    return stopped or int(bool(faults) or left == "the loss of the device")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--full", action="store_true", help="all cells, not the default subset")
    made.add_argument("--only", action="append", default=[], metavar="TEXT", help="cells whose name contains TEXT")
    made.add_argument("--list", action="store_true", help="print the names of the chosen cells and stop")
    made.add_argument("--limit-seconds", type=float, default=math.inf, metavar="S", help="begin nothing new near S")
    made.add_argument("--append", action="store_true", help="keep the rows of the CSV; with --only that is so anyway")
    made.add_argument("--no-torch", dest="torch", action="store_false", help="leave PyTorch's graphs of cuBLAS out")
    made.add_argument(
        "--output", type=Path, default=tables.RESULTS / "tsm2.csv", metavar="CSV", help="default: %(default)s"
    )
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    cells = _chosen(options)
    if not cells:
        print(f"no cell is named like {' or '.join(options.only)}: --list --full names all")
        return 2
    if options.list:
        for cell in cells:
            print(cell)
        return 0
    try:
        return run(cells, options)
    except NotSuitable as reason:
        print(f"nothing can be measured here: {reason}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
