"""Tall-skinny products against cuBLAS, CuPy and the memory of the card that is present.

    python -m benchmarks.bench_tsm2                         the default subset, within 4 minutes on an H200
    python -m benchmarks.bench_tsm2 --full                  the whole grid, within 10 minutes
    python -m benchmarks.bench_tsm2 --suite rows            one suite; repeatable
    python -m benchmarks.bench_tsm2 --only "rows float64"   the cells whose name contains the text; repeatable
    python -m benchmarks.bench_tsm2 --list                  names of the cells; needs no GPU
    python -m benchmarks.bench_tsm2 --paper                 the paper's kernels on its grid; the same options

Suites are those of `benchmarks.stream_grid` and, with --paper, of `benchmarks.tsm2_grid`: `tall_skinny_matmul` and
`encode_both` as they are called, everything that a call does included. Operands are uniform in [0, 1), as in the paper,
where products are timed; normally distributed ones are multiplied once more, to be judged. Every timed output is
compared with a product in more precision, element by element.

Each row goes to the CSV as soon as its cell is done: an interrupted run keeps what it has. The exit code is 1 if
a product was wrong or failed, or a bar is missed; 130 after an interrupt. `python -m benchmarks.tables` and
`python -m benchmarks.figures` make tables and figures of it.
"""

from __future__ import annotations

import functools
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from abft_tsm2.core.choose import choose
from abft_tsm2.core.paper.config import Config
from abft_tsm2.errors import NotSuitable
from benchmarks import contenders, gpu_timing, rows, sheet, stream_bars, stream_grid, suite, tsm2_grid
from benchmarks.contenders import OPTIONAL, Contender, Makers
from benchmarks.gpu_timing import copies, message, require_device
from benchmarks.judge import worse
from benchmarks.operands import Encodings, Products
from benchmarks.rows import short
from benchmarks.stream_grid import CUPY, OTHER, OWN, Cell
from benchmarks.suite import Row, Suite
from benchmarks.timing import summary

Work = Products | Encodings


class TallSkinny(Suite):
    """A run in which every contender of a cell is first judged and then timed, in the same rounds as the others."""

    @abstractmethod
    def work(self, cells: Sequence[Cell]) -> Work:
        """The operands of a group."""

    @abstractmethod
    def makers(self, cell: Cell, work: Any) -> Makers:
        """The contenders of a cell."""

    @abstractmethod
    def columns_of(self, entry: Contender) -> Row:
        """Columns that say what multiplies."""

    @abstractmethod
    def compare(self, found: list[Row]) -> None:
        """Fill in, for the rows of one cell, what relates one contender to another."""

    def measure(self, cells: Sequence[Cell]) -> None:
        work = self.work(cells)
        seed = sum(map(ord, str(cells[0])))
        work.fill("normal", seed)
        entries: dict[Cell, list[Contender]] = {}
        found: dict[Cell, dict[str, Row]] = {}
        for cell in cells:
            entries[cell], found[cell] = self._contenders(cell, work)
            for entry in entries[cell]:
                self._once(entry, work, found[cell][entry.name])
        work.fill("uniform", seed + 1)
        for cell in cells:
            out = {name for name, row in found[cell].items() if row["error"] or row["note"]}
            able = [entry for entry in entries.pop(cell) if entry.name not in out]
            if cell.suite == "host":
                self._time_host(able, found[cell])
            else:
                self._race(cell, able, work, found[cell])
            self.compare(list(found[cell].values()))
            self.emit(cell, list(found[cell].values()))

    def _contenders(self, cell: Cell, work: Work) -> tuple[list[Contender], dict[str, Row]]:
        """All contenders of a cell that can be had, and a row for each, also of those that cannot."""
        entries, found = [], {}
        for name, family, make in self.makers(cell, work):
            row = found[name] = self.empty(cell, name)
            if "family" in row:
                row["family"] = family
            try:
                entry = make()
            except Exception as error:
                require_device(error)
                row["note" if name in OPTIONAL or family == OTHER else "error"] = message(error)
                continue
            entries.append(entry)
            row.update(self.columns_of(entry), layout=entry.layout, copies=entry.call.copies)
        return entries, found

    def _once(self, entry: Contender, work: Work, row: Row) -> None:
        """Judge one product of normal operands; an error stays in the row, and the entry out of the timing."""
        import cupy

        entry.poison()
        cupy.cuda.Device().synchronize()
        kind = "note" if entry.family == OTHER or entry.name in OPTIONAL else "error"
        try:
            with self.watch.stream:
                entry.call.run(0)
            self.watch.stream.synchronize()
            found = work.judge(entry.outputs[0])
            row.update(rows.judged(found, "normal_"))
            if not found.ok:
                row[kind] = f"wrong product of normal operands: {found}"
        except NotSuitable as reason:
            row["note"] = f"not suitable: {reason}"
        except Exception as error:
            row[kind] = message(error)
            require_device(error)

    def _race(self, cell: Cell, entries: Sequence[Contender], work: Work, found: Mapping[str, Row]) -> None:
        """Time the entries, and judge what they have multiplied."""
        for entry in entries:
            entry.poison()
        times = self.watch.measure({entry.name: entry.call for entry in entries})
        clock = self.clock
        for entry in entries:
            row, taken = found[entry.name], times[entry.name]
            row.update(rows.timed(cell, taken, self.ceilings), sm_mhz=clock)
            if row["error"]:
                continue
            # The copies that were multiplied last, too.
            last = min(entry.call.copies, taken.batch) - 1
            errors = work.judge(entry.outputs[0])
            if last:
                errors = worse(errors, work.judge(entry.outputs[last]))
            row.update(rows.judged(errors))
            if not errors.ok:
                row["error"] = f"wrong product: {errors}"

    @staticmethod
    def _copies(cells: Sequence[Cell]) -> int:
        return 1 if cells[0].suite == "host" else max(copies(cell.bytes) for cell in cells)

    def _time_host(self, entries: Sequence[Contender], found: Mapping[str, Row]) -> None:
        with self.watch.stream:
            times = gpu_timing.host_times({entry.name: partial(entry.call.run, 0) for entry in entries})
        for name, seconds in times.items():
            one = summary(seconds)
            found[name].update(how="host", batch=1, samples=one.count, host_us=short(1e6 * one.median))
            found[name]["host_us_lower_quartile"] = short(1e6 * one.lower_quartile)
            found[name]["host_us_upper_quartile"] = short(1e6 * one.upper_quartile)


class StreamSuite(TallSkinny):
    """`tall_skinny_matmul` and `encode_both` against cuBLAS, CuPy and the ceilings."""

    columns = stream_grid.COLUMNS
    budget = 0.08

    def kernels(self, cells: Sequence[Cell]) -> list[Any]:
        cells = [cell for cell in cells if cell.suite != "both"]
        own = [config for cell in cells for config in choose(cell.problem, self.device).configs[:1]]
        return own + [config for cell in cells for config in contenders.published(cell, self.device).values()]

    def bytes(self, cells: Sequence[Cell]) -> int:
        kind = Encodings if cells[0].suite == "both" else Products
        return kind.bytes(cells, self._copies(cells))

    def work(self, cells: Sequence[Cell]) -> Work:
        return (Encodings if cells[0].suite == "both" else Products)(cells, self._copies(cells))

    def makers(self, cell: Cell, work: Any) -> Makers:
        if cell.suite == "both":
            return contenders.encodings(cell, work, self.deadline)
        return contenders.products(cell, work, self.device, self.torch)

    def empty(self, cell: Cell, contender: str) -> Row:
        return stream_grid.empty_row(cell, contender)

    def columns_of(self, entry: Contender) -> Row:
        return {"kernel": entry.kernel, "source": entry.source}

    def compare(self, found: list[Row]) -> None:
        stream_grid.compare(found)

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
        return text + _troubles(rows)

    def conclude(self) -> tuple[str, list[str]]:
        found = stream_bars.verdicts(self.rows, stream_bars.BARS)
        wrong = [row for row in self.rows if row["error"]]
        # Others that multiplied wrongly are compared with nothing, and are no fault of this package.
        others = [row for row in wrong if row["family"] != OWN and _judged_wrong(row)]
        faults = [f"{_name(row)}: {row['error']}" for row in wrong if row not in others]
        faults += [str(one) for one in found if one.holds is False]
        left_out = "".join(f"left out: {_name(row)}: {row['error']}\n" for row in others)
        return f"\n{stream_bars.table(one for one in found if one.cells)}\n{left_out}", faults


def _judged_wrong(row: Row) -> bool:
    pairs = ((row[f"{of}norm_error_over_bound"], row[f"{of}elements_outside"]) for of in ("normal_", ""))
    return any(norm != "" and not (norm <= 1 and outside == 0) for norm, outside in pairs)


def _name(row: Row) -> str:
    return f"{' '.join(str(row[column]) for column in stream_grid.CELL)} {row['contender']}"


class PaperSuite(TallSkinny):
    """The paper's kernels against cuBLAS and CuPy, on the paper's grid."""

    columns = tsm2_grid.COLUMNS

    @functools.cached_property
    def published(self) -> dict[tsm2_grid.Key, float]:
        """The published code was timed on this card alone."""
        return tsm2_grid.published_ms() if "H200" in self.env["device"] else {}

    def kernels(self, cells: Sequence[Cell]) -> list[Config]:
        configs = [config for cell in cells for config in tsm2_grid.kernels(cell).values()]
        return configs + [c for x in cells for several in tsm2_grid.sweep(x, self.device).values() for c in several]

    def bytes(self, cells: Sequence[Cell]) -> int:
        most = max(len(tsm2_grid.kernels(cell)) for cell in cells) + 10
        return Products.bytes(cells, self._copies(cells), "FC", most)

    def work(self, cells: Sequence[Cell]) -> Products:
        return Products(cells, self._copies(cells), "FC")

    def makers(self, cell: Cell, work: Any) -> Makers:
        chosen = tsm2_grid.kernels(cell)
        for variant, configs in tsm2_grid.sweep(cell, self.device).items():
            shared = work.outputs(cell.n, "F")
            calls = {c.name: contenders.of_paper("", c, cell, work, self.device, outputs=shared).call for c in configs}
            best = contenders.fastest(calls, self.deadline)
            chosen[f"{variant} swept"] = next(config for config in configs if config.name == best)
        return contenders.on_papers_grid(cell, work, self.device, self.torch, chosen)

    def empty(self, cell: Cell, contender: str) -> Row:
        return tsm2_grid.empty_row(cell, contender)

    def columns_of(self, entry: Contender) -> Row:
        config = entry.config
        if config is None:
            return {"config": entry.kernel if entry.family == OWN else ""}
        return {"config": config.name, "t1": config.t1, "t2": config.t2, "t3": config.t3, "tcf": config.tcf}

    def compare(self, found: list[Row]) -> None:
        tsm2_grid.compare(found, self.published)

    def line(self, cell: Cell, rows: Sequence[Row]) -> str:
        """The best of this package's kernels, cuBLAS, and what went wrong."""
        timed = [row for row in rows if row["ms"] != "" and row["config"]]
        text = f"{cell!s:36s}"
        if timed:
            best = min(timed, key=lambda row: float(row["ms"]))
            text += (
                f" {best['contender']:12s} {best['ms']:9.4f} ms {best['share_of_ceiling']:6.1%} of {best['ceiling']}"
            )
            text += f", {best['speedup']:5.2f} x {best['best_cublas']}" if best["best_cublas"] else ""
        for row in rows:
            if row["ratio_to_published"] != "":
                text += f", {row['contender']} {row['ratio_to_published']:.2f} of the published time"
        return text + _troubles(rows)

    def conclude(self) -> tuple[str, list[str]]:
        return "", tsm2_grid.verdict(self.rows, self.published)


def _troubles(found: Sequence[Row]) -> str:
    """Lines that say what is wrong with a cell's rows, or why they have no times."""
    return "".join(
        f"\n    {row['contender'] or 'all'}: {row['error'] or row['note']}"
        for row in found
        if row["error"] or (row["note"] and row["how"] == "")
    )


def main(arguments: list[str] | None = None) -> int:
    parser = suite.parser(__doc__)
    suites = sorted({*stream_grid.SUITES, *tsm2_grid.SUITES})
    parser.add_argument("--paper", action="store_true", help="the paper's kernels on the paper's grid")
    parser.add_argument("--suite", action="append", choices=suites, metavar="NAME", help=", ".join(suites))
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave out cuBLAS through PyTorch")
    parser.set_defaults(torch=True)
    options = parser.parse_args(arguments)
    options.output = options.output or sheet.RESULTS / ("tsm2.csv" if options.paper else "stream.csv")
    kind, grid = (PaperSuite, tsm2_grid.grid()) if options.paper else (StreamSuite, stream_grid.grid())
    return suite.main(kind, grid, options)


if __name__ == "__main__":
    sys.exit(main())
