"""The paper's kernels against cuBLAS and CuPy, on the paper's grid (`benchmarks.tsm2_grid`)."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

from abft_tsm2.core.paper.config import Config
from abft_tsm2.faults.judge.oracle import Reference
from benchmarks import contenders, tsm2_grid
from benchmarks.campaign import Campaign, Judge, Row, troubles
from benchmarks.contenders import Contender
from benchmarks.gpu_products import Errors, Operands, errors
from benchmarks.gpu_timing import Stopwatch, copies, message, require_device
from benchmarks.tsm2_grid import COLUMNS, Cell


class PaperCampaign(Campaign):
    """One run over cells of the paper's grid."""

    columns = COLUMNS

    @functools.cached_property
    def published(self) -> dict[tsm2_grid.Key, float]:
        """The published code was timed on this card alone."""
        return tsm2_grid.published_ms() if "H200" in self.env["device"] else {}

    def kernels(self, cells: Sequence[Cell]) -> list[Config]:
        configs = [config for cell in cells for config in tsm2_grid.kernels(cell).values()]
        return configs + [c for x in cells for several in tsm2_grid.sweep(x, self.device).values() for c in several]

    def measure(self, cells: Sequence[Cell]) -> None:
        suite, m, k, dtype = cells[0].group
        widest = max(cell.n for cell in cells)
        operands = Operands(m, k, widest, dtype, copies=_copies(cells))
        seed = sum(map(ord, suite)) + m + k
        expected = operands.fill("normal", seed)
        entries: dict[Cell, list[Contender]] = {}
        rows: dict[Cell, dict[str, Row]] = {}
        for cell in cells:
            entries[cell], rows[cell] = self._contenders(cell, operands)
            for entry in entries[cell]:
                self.once(entry, _judge(entry, expected.columns(cell.n), k), rows[cell][entry.name])
        expected = operands.fill("uniform", seed + 1)
        for cell in cells:
            judges = {entry.name: _judge(entry, expected.columns(cell.n), k) for entry in entries[cell]}
            self.race(cell, entries.pop(cell), judges, rows[cell])

    def _contenders(self, cell: Cell, operands: Operands) -> tuple[list[Contender], dict[str, Row]]:
        """All contenders of a cell that can be had, and a row for each, also of those that cannot."""
        chosen = tsm2_grid.kernels(cell)
        for variant, configs in tsm2_grid.sweep(cell, self.device).items():
            best = self._fastest(configs, cell, operands)
            if best is not None:
                chosen[f"{variant} swept"] = best
        entries = [contenders.kernel(name, c, self.device, operands, cell.n) for name, c in chosen.items()]
        if cell.suite == "tsm2l":
            entries.append(contenders.function(self.device, operands, cell.n))
        rows = {}
        square = cell.suite == "tsm2r"
        for name, make in contenders.vendor(gemv=square, torch=self.torch and not square).items():
            try:
                entries.append(make(operands, cell.n))
            except Exception as error:
                require_device(error)
                kind = "note" if name == contenders.TORCH else "error"  # we can do without PyTorch
                rows[name] = {**self.empty(cell, name), kind: message(error)}
        return entries, {entry.name: self._row(cell, entry) for entry in entries} | rows

    def _fastest(self, configs: Sequence[Config], cell: Cell, operands: Operands) -> Config | None:
        """The one that a short look finds fastest; its time is then taken anew."""
        shared = contenders.kernel("", configs[0], self.device, operands, cell.n).outputs
        entries = {c: contenders.kernel(c.name, c, self.device, operands, cell.n, shared) for c in configs}
        watch = Stopwatch(budget=0.01, rounds=(3, 5), deadline=self.deadline)
        times = watch.measure({config.name: entry.call for config, entry in entries.items()})
        medians = {c: statistics.median(times[c.name].seconds) for c in configs if times[c.name].seconds}
        return min(medians, key=lambda config: medians[config], default=None)

    def empty(self, cell: Cell, contender: str) -> Row:
        return tsm2_grid.empty_row(cell, contender)

    def _row(self, cell: Cell, entry: Contender) -> Row:
        row = {**self.empty(cell, entry.name), "layout": entry.layout, "copies": entry.call.copies}
        if entry.config is not None:
            config = entry.config
            row.update(config=config.name, t1=config.t1, t2=config.t2, t3=config.t3, tcf=config.tcf)
        return row | ({"config": entry.chosen} if entry.chosen else {})

    def compare(self, rows: list[Row]) -> None:
        tsm2_grid.compare(rows, self.published)

    def line(self, cell: Cell, rows: Sequence[Row]) -> str:
        """The best of ours, cuBLAS, and what went wrong."""
        timed = [row for row in rows if row["ms"] != ""]
        ours = min((row for row in timed if row["config"]), key=lambda row: float(row["ms"]), default=None)
        text = f"{cell!s:36s}"
        if ours is not None:
            text += (
                f" {ours['contender']:12s} {ours['ms']:9.4f} ms {ours['share_of_ceiling']:6.1%} of {ours['ceiling']}"
            )
            if ours["best_cublas"]:
                text += f", {ours['speedup']:5.2f} x {ours['best_cublas']}"
        for row in rows:
            if row["ratio_to_published"] != "":
                text += f", {row['contender']} {row['ratio_to_published']:.2f} of the published time"
        return text + troubles(rows)

    def conclude(self) -> tuple[str, list[str]]:
        return "", tsm2_grid.verdict(self.rows, self.published)

    def bytes(self, cells: Sequence[Cell]) -> int:
        cell, several = max(cells, key=lambda cell: cell.n), _copies(cells)
        outputs = sum(cell.m * cell.n * cell.itemsize * several * (len(tsm2_grid.kernels(cell)) + 10) for cell in cells)
        return Operands.bytes(cell.m, cell.k, cell.n, cell.dtype, several) + outputs


def _judge(entry: Contender, expected: Reference, k: int) -> Judge:
    def judge(i: int) -> Errors:
        import cupy

        return errors(entry.outputs[i], expected, k, cupy)

    return judge


def _copies(cells: Sequence[Any]) -> int:
    return max(copies((cell.m * cell.k + cell.m * cell.n) * cell.itemsize) for cell in cells)
