"""Bars of protected products on an H200, as data, and the verdict of a run on each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import gemm_grid, stream_bars
from benchmarks.gemm_grid import ENCODED, HALVES, ONE, QUEUED, TWO, WIDE, empty_row, key
from benchmarks.stream_bars import Verdict, judged, table

__all__ = ["BARS", "Bar", "Verdict", "table", "verdicts"]

Row = Mapping[str, Any]
OF_ENCODED = 0.7  # of the bar of the default check: what is left with B encoded beforehand

_LIMITS: tuple[tuple[tuple[str, ...], str, Mapping[int, float]], ...] = (
    (("float32",), ONE, {1024: 18, 2048: 4, 4096: 1.5, 8192: 0.9, 16384: 0.5}),
    (("float64",), ONE, {1024: 28, 2048: 7, 4096: 3.5, 8192: 1.8}),
    (HALVES, ONE, {2048: 60, 4096: 20, 8192: 8, 16384: 3.5}),
    (HALVES, WIDE, {2048: 70, 4096: 28, 8192: 12, 16384: 5}),
    (("float32",), TWO, {1024: 26, 2048: 6, 4096: 2.5, 8192: 1.3, 16384: 0.8}),
)
"""Types, variant, and by size the overhead in per cent."""


@dataclass(frozen=True)
class Bar(stream_bars.Bar):
    """A number of a cell, or of several, that may not be larger."""

    column: str = "overhead_pct"
    at_most: bool = True

    def value(self, rows: stream_bars.Rows) -> float | None:
        """The number of a cell: of its last row, unless that is wrong."""
        last = rows[-1]
        return float(last[self.column]) if last[self.column] != "" and not last["error"] else None

    def show(self, number: float) -> str:
        """Per cent, or microseconds."""
        return f"{number:.2f} %" if self.column == "overhead_pct" else f"{number:.1f} us"


def _bars() -> Iterator[Bar]:
    for dtypes, variant, limits in _LIMITS:
        for dtype in dtypes:
            for chosen, factor in ((variant, 1.0), (ENCODED, OF_ENCODED))[: 1 + (variant == ONE)]:
                for n, limit in limits.items():
                    where = {"suite": ("square",), "dtype": (dtype,), "n": (n,), "variant": (chosen,)}
                    yield Bar(f"{_title(dtype, chosen)}, n = {n}", round(factor * limit, 3), where=where)
    default = {"variant": (ONE,), "dtype": ("float32",)}
    single = {**default, "suite": ("square",), "n": (512,)}
    yield Bar("a float32 product of n = 512", 20, "overhead_us", single)
    batched = {**default, "suite": ("batched",), "n": (512,)}
    yield Bar("64 float32 products of n = 512 in a call", 20, where=batched)
    inference = {"suite": ("skinny",), "dtype": ("bfloat16",), "m": (64,), "variant": (ENCODED,)}
    yield Bar("bfloat16 64 x 8192 x 8192, B encoded", 20, where=inference)
    for faults, what, limit in (("1", "one element", 1), ("tile", "a tile of 128 x 128", 3)):
        repair = {"suite": ("repair",), "dtype": ("float32",), "n": (8192,), "variant": (ONE,), "faults": (faults,)}
        yield Bar(f"repair of {what}, float32, n = 8192", limit, where=repair)
    yield Bar("host time of a call that is not waited for", 80, "host_us", {"suite": ("host",), "variant": (QUEUED,)})


def _title(dtype: str, variant: str) -> str:
    return f"{dtype}, { ({ENCODED: 'B encoded', WIDE: 'checked in float32'}.get(variant, variant)) }"


BARS = tuple(_bars())


def verdicts(rows: Iterable[Row], bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """The verdict of rows, of a run or of its CSV, on each bar; the last row of a cell counts."""
    return judged(rows, bars, {key(empty_row(cell)): cell for cell in gemm_grid.grid()}, key)
