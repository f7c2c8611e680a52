"""`tall_skinny_matmul` and `encode_both` against cuBLAS, CuPy and the ceilings (`benchmarks.stream_grid`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks import host_times, stream_bars, stream_contenders, stream_rows
from benchmarks.campaign import Campaign, Judge, Row, troubles
from benchmarks.contenders import CUPY, TORCH
from benchmarks.gpu_products import Errors
from benchmarks.gpu_timing import copies, message, require_device
from benchmarks.rows import short
from benchmarks.stream_contenders import LT, Contender
from benchmarks.stream_grid import Cell
from benchmarks.stream_operands import Encodings, Products
from benchmarks.stream_rows import COLUMNS, OTHER, OWN
from benchmarks.timing import summary

OPTIONAL = {LT, TORCH}  # these, and the family `OTHER`, we can do without


class StreamCampaign(Campaign):
    """One run over cells of the stream suites."""

    columns = COLUMNS
    budget = 0.08

    def kernels(self, cells: Sequence[Cell]) -> list[Any]:
        return [config for cell in cells for config in stream_contenders.kernels(cell, self.device)]

    def bytes(self, cells: Sequence[Cell]) -> int:
        return _operands(cells).bytes(cells, _copies(cells))

    def measure(self, cells: Sequence[Cell]) -> None:
        work = _operands(cells)(cells, _copies(cells))
        seed = sum(map(ord, str(cells[0])))
        work.fill("normal", seed)
        entries: dict[Cell, list[Contender]] = {}
        rows: dict[Cell, dict[str, Row]] = {}
        for cell in cells:
            entries[cell], rows[cell] = self._contenders(cell, work)
            for entry in entries[cell]:
                row = rows[cell][entry.name]
                self.once(entry, _judge(work, entry), row)
                if row["error"] and (entry.family == OTHER or entry.name in OPTIONAL):
                    row.update(note=row["error"], error="")
        work.fill("uniform", seed + 1)
        for cell in cells:
            judges = {entry.name: _judge(work, entry) for entry in entries[cell]}
            if cell.suite == "host":
                self._time_host(cell, entries.pop(cell), rows[cell])
            else:
                self.race(cell, entries.pop(cell), judges, rows[cell])

    def _contenders(self, cell: Cell, work: Products | Encodings) -> tuple[list[Contender], dict[str, Row]]:
        """All contenders of a cell that can be had, and a row for each, also of those that cannot."""
        if isinstance(work, Encodings):
            makers = stream_contenders.encodings(cell, work, self.deadline)
        else:
            makers = stream_contenders.products(cell, work, self.device, self.torch)
        entries, rows = [], {}
        for name, family, make in makers:
            row = rows[name] = {**self.empty(cell, name), "family": family}
            try:
                entry = make()
            except Exception as error:
                require_device(error)
                row["note" if name in OPTIONAL or family == OTHER else "error"] = message(error)
                continue
            entries.append(entry)
            row.update({key: getattr(entry, key) for key in ("layout", "kernel", "source")}, copies=entry.call.copies)
        return entries, rows

    def _time_host(self, cell: Cell, entries: Sequence[Contender], rows: Mapping[str, Row]) -> None:
        able = [entry for entry in entries if not rows[entry.name]["error"] and not rows[entry.name]["note"]]
        with self.watch.stream:
            times = host_times.measure({entry.name: partial(entry.call.run, 0) for entry in able})
        for name, seconds in times.items():
            found = summary(seconds)
            rows[name].update(how="host", batch=1, samples=found.count, host_us=short(1e6 * found.median))
            rows[name]["host_us_lower_quartile"] = short(1e6 * found.lower_quartile)
            rows[name]["host_us_upper_quartile"] = short(1e6 * found.upper_quartile)
        self.emit(cell, list(rows.values()))

    def empty(self, cell: Cell, contender: str) -> Row:
        return stream_rows.empty_row(cell, contender)

    def compare(self, rows: list[Row]) -> None:
        stream_rows.compare(rows)

    def line(self, cell: Cell, rows: Sequence[Row]) -> str:
        """What this package's functions reach, and what went wrong."""
        text = f"{cell!s:38s}"
        for row in rows:
            if row["family"] == OWN and row["ms"] != "":
                text += f" {row['ms']:8.4f} ms {row['share_of_ceiling']:6.1%} of {row['ceiling']} ({row['how']}"
                text += f", {row['speedup']:.2f} x {row['best_cublas']})" if row["best_cublas"] else ")"
                if row["speedup_cupy"] != "" and row["best_cublas"] != CUPY:
                    text += f", {row['speedup_cupy']:.2f} x CuPy"
            elif row["host_us"] != "":
                text += f" {row['contender']}: {row['host_us']:.1f} us;"
        return text + troubles(rows)

    def conclude(self) -> tuple[str, list[str]]:
        found = stream_bars.verdicts(self.rows, stream_bars.BARS)
        wrong = [row for row in self.rows if row["error"]]
        # Others that multiplied wrongly are compared with nothing, and are no fault of this package.
        others = [row for row in wrong if row["family"] != OWN and row["error"].startswith("wrong product")]
        faults = [f"{_name(row)}: {row['error']}" for row in wrong if row not in others]
        faults += [str(one) for one in found if one.holds is False]
        left_out = "".join(f"left out: {_name(row)}: {row['error']}\n" for row in others)
        return f"\n{stream_bars.table(one for one in found if one.cells)}\n{left_out}", faults


def _operands(cells: Sequence[Cell]) -> type[Products] | type[Encodings]:
    return Encodings if cells[0].suite == "both" else Products


def _judge(work: Products | Encodings, entry: Contender) -> Judge:
    def judge(i: int) -> Errors:
        return work.judge(entry.outputs[i])

    return judge


def _copies(cells: Sequence[Cell]) -> int:
    return 1 if cells[0].suite == "host" else max(copies(cell.bytes) for cell in cells)


def _name(row: Row) -> str:
    return f"{' '.join(str(row[column]) for column in stream_rows.CELL)} {row['contender']}"
