"""The memory of a factorisation on a GPU, beside A: what a plan keeps, and what a run leaves."""

from __future__ import annotations

from typing import Any

import numpy as np

from abft_tsm2.arrays import Array
from abft_tsm2.core.kept import thrice
from abft_tsm2.linalg.device.certificate_config import COUNTS, Tiles
from abft_tsm2.linalg.device.check_config import ROOM, RowSums
from abft_tsm2.linalg.device.move_config import LeftRows
from abft_tsm2.linalg.device.schedule import PANEL, PANELS, ROWS, Schedule

ALIGNED = 16  # bytes that a kernel loads at a time
WORD = 8  # bytes
NAN_BYTE = 0xFF  # of which NaN is made: what nothing has written agrees with nothing
STATE = 3  # numbers that are carried beside S and Z
KEPT = 4  # steps whose sums are kept


def leading_dimension(m: int, itemsize: int) -> int:
    """Elements from one column of the factors to the next: whole loads."""
    return -(-m * itemsize // ALIGNED) * ALIGNED // itemsize


class Buffers:
    """Arrays of a plan on the current device.

    Attributes
    ----------
    order, places : (P + 1, m) int32 arrays
        Which row of A lies where, and where each row of A lies, before each of P panels and after the last.
    started, moved, getrf_pivots, getrf_info : int32 arrays
        Token of the panel that runs; scratch of a panel; what cuSOLVER says of one.
    gathered : dict
        By lane, rows on their way to U.
    map, ends, first_ends, scratch : arrays
        Of the exchanges left of each step; `ends` is where each panel's rows are in order now.
    line_sums : (5, K) float64 array
        g and y, of the steps or of finished factors; both as the certificate finds them at the end, `g_again` and
        `y_again`; and `differs`, which of them are no longer the same, as compare_sums.cu notes it.
    biggest, parts, moduli, least, initial, constants : float64 arrays
        Of the steps' checks.
    in_doubt : int64 array
        What the judge says of the step that it has judged last.
    kept : (KEPT, m + n + 3) float64 array
        What steps carry, before each of the last ones.
    largest, column_parts, row_parts, largest_parts, state : float64 arrays
        Of the certificate.
    """

    least: Array
    state: Array

    def __init__(
        self, schedule: Schedule, dtype: str, tiles: Tiles, left: LeftRows | None, constants: Any, initial: Any
    ) -> None:
        import cupy

        m, n, widest = schedule.m, schedule.n, max(step.width for step in schedule.steps)
        K = min(m, n)
        panels = schedule.snapshot(K)
        self.order, self.places = (cupy.empty((panels + 1, m), cupy.int32) for _ in range(2))
        self.moved, self.getrf_pivots = (cupy.empty(PANEL, cupy.int32) for _ in range(2))
        self.started, self.getrf_info = (cupy.zeros(1, cupy.int32) for _ in range(2))
        self.in_doubt = cupy.zeros(1, cupy.int64)
        across = min(schedule.chunk, n)
        self.gathered = {PANELS: cupy.empty(widest * widest, dtype), ROWS: cupy.empty(widest * across, dtype)}
        self.first_ends = cupy.asarray(schedule.ends, cupy.int32)
        self.ends = self.first_ends.copy()
        if left:
            self.map = cupy.empty((panels, m), cupy.int32)
            self.scratch = cupy.empty(left.scratch_elements, dtype)
        of_rows = max(RowSums.of(dtype, step.width).grid(n) * step.width for step in schedule.steps)
        self.line_sums = cupy.zeros((5, K))
        self.g, self.y, self.g_again, self.y_again, self.differs = self.line_sums
        sizes = {"biggest": K, "parts": of_rows, "moduli": 2, "least": 4, "state": 3}
        sizes |= {"largest": K}
        parts = {"column_parts": 3 * tiles.column_parts, "row_parts": 3 * tiles.row_parts}
        sizes |= {**parts, "largest_parts": tiles.column_parts}
        for name, size in sizes.items():
            setattr(self, name, cupy.zeros(size))
        self.kept = cupy.empty((KEPT * schedule.tracked, m + n + STATE))
        self.constants, self.initial = cupy.asarray(thrice(constants, ROOM)), cupy.asarray(thrice(initial))

    def __getitem__(self, name: str) -> int:
        """Address of one of them."""
        return int(getattr(self, name).data.ptr)


class RunSums:
    """What a run leaves of its checks: on the device, and some of it on the host once that was brought. A plan lends it
    to one run at a time.

    Its arrays are "row_largest" and "column_largest", moduli of A's type; "verified" as kernels/factor/certificate.cuh
    counts, uint64; "info"; "residuals" and "bounds" of the certificate's rows and, from
    max(m, n) on, of its columns; weights "v" and "w"; residuals and bounds of the steps; sums over the factors "Ly" and
    "gU", with squares behind them; "piv"; "S" and "Z" of A, and as steps carry them, with their state; norms of A's
    lines, and sums of their words. The weights are brought as soon as they are there, all from "verified" to "bounds"
    at the end.

    Attributes
    ----------
    status : (steps,) int64 array
        What the judge says of each step, on the host, where it writes.
    looked : (KEPT, 6 widest) float64 array
        What line_squares.cu says of one that is in doubt, there as well; of a run whose steps are read on the way.
    bytes_wiped : int
        From "row_largest" on, where counts and maxima begin at zero.
    bytes_of : dict
        What is brought as "verdict" and as "weights", from the address "verdict of" to "verdict to" and so on.
    """

    def __init__(self, m: int, n: int, steps: int, widest: int) -> None:
        import cupy

        both = 2 * max(m, n)
        sizes = {"row_largest": m, "column_largest": n, "verified": COUNTS, "info": 1}
        sizes |= {"residuals": both, "bounds": both, "v": n, "w": m}
        sizes |= {"step_residuals": both, "step_bounds": both, "Ly": 2 * m, "gU": 2 * n, "piv": -(-min(m, n) // 2)}
        sizes |= {"S": m, "Z": n, "carried_S": m, "carried_Z": n, "steps_state": STATE}
        sizes |= {"row_floor": m, "column_floor": n, "row_words": m, "column_words": n}
        ends = np.cumsum(list(sizes.values())).tolist()
        self._slices = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        self._device = cupy.empty(ends[-1])
        brought = {"verdict": ("verified", "bounds"), "weights": ("v", "w")}
        self._parts = {x: slice(self._slices[a].start, self._slices[b].stop) for x, (a, b) in brought.items()}
        self._first, length = self._slices["verified"].start, self._slices["w"].stop - self._slices["verified"].start
        self.bytes_wiped = WORD * self._slices["info"].stop
        self.bytes_of = {name: WORD * (part.stop - part.start) for name, part in self._parts.items()}
        self._pinned = cupy.cuda.alloc_pinned_memory(WORD * length)
        self._host = np.frombuffer(self._pinned, np.float64, length)
        self._verdicts = cupy.cuda.alloc_pinned_memory(WORD * (steps + KEPT * 6 * widest))
        self.status = np.frombuffer(self._verdicts, np.int64, steps)
        self.looked = np.frombuffer(self._verdicts, np.float64, KEPT * 6 * widest, WORD * steps).reshape(KEPT, -1)

    def addresses(self) -> dict[str, int]:
        """Of all arrays, by name."""
        start = int(self._device.data.ptr)
        found = {name: start + WORD * at.start for name, at in self._slices.items()}
        found["status"] = int(self._verdicts.ptr)
        for number, looked in enumerate(self.looked):
            found[f"looked {number}"] = int(looked.ctypes.data)
        for name, part in self._parts.items():
            found[f"{name} of"] = start + WORD * part.start
            found[f"{name} to"] = int(self._pinned.ptr) + WORD * (part.start - self._first)
        return found

    def on_device(self, name: str, dtype: Any = np.float64) -> Any:
        """One of the arrays, on the device."""
        return self._device[self._slices[name]].view(dtype)

    def on_host(self, name: str, dtype: Any = np.float64) -> Any:
        """One of those that were brought."""
        at, first = self._slices[name], self._first
        return self._host[at.start - first : at.stop - first].view(dtype)
