"""Loops of products on a CPU, protected and not, for `benchmarks.bench_calls`."""

from __future__ import annotations

import datetime
import math
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from abft_tsm2 import encode, protected_gemm
from benchmarks.calls_grid import CALLS, COLUMNS, ENCODED, Cell, Row, empty_row, text
from benchmarks.calls_loop import Loop, finish, race, require_product
from benchmarks.gpu_timing import message
from benchmarks.operands import element_type, fill_nan
from benchmarks.sheet import Sheet
from benchmarks.timing import machine

READ_BYTES = 256 << 20  # of an array whose sum is taken: many times a cache
FEWER = (100, 50, 20, 10, 5, 2)  # calls, where the time does not suffice for `CALLS`
TRIAL = 0.05  # seconds of calls from which their number follows
LAST = 5.0  # no new group of cells begins so few seconds before the time limit
PLAIN = "plain"


class Loops:
    """How long loops of a run are.

    Parameters
    ----------
    quick : bool
        Few rounds of short loops.
    """

    def __init__(self, *, quick: bool) -> None:
        self.rounds = (3, 3) if quick else (5, 21)
        self.most = 0.3 if quick else 1.5  # seconds of a loop; longer ones have fewer calls
        self.budget = 1.0 if quick else 10.0  # seconds of the rounds of a group, beyond the fewest

    def calls(self, call: Callable[[], object]) -> int:
        """Of a loop of such calls: a round number."""
        best, spent = math.inf, 0.0
        while spent < TRIAL:  # several short ones, for a single one may have been disturbed
            begun = time.perf_counter()
            call()
            took = time.perf_counter() - begun
            best, spent = min(best, took), spent + took
        return next((count for count in (CALLS, *FEWER) if count * best <= self.most), FEWER[-1])


def run(cells: Sequence[Cell], path: Path, loops: Loops, *, append: bool, limit: float) -> int:
    """Measure cells, each row on disk as soon as its group is done; returns the exit code."""
    begun, stopped, left, faults, done = time.monotonic(), 0, "", 0, 0
    env = {**machine(), "date": datetime.date.today().isoformat()}
    before = signal.signal(signal.SIGTERM, _interrupt)  # `timeout` sends it
    try:
        with Sheet(path, (*COLUMNS, *env), append=append) as sheet:
            read_gbs = read_rate()
            print(f"{env['device']}, {env['cores']} cores: reads {read_gbs:.1f} GB/s", flush=True)
            for _, members in groupby(cells, key=lambda cell: cell.group):
                if time.monotonic() - begun > limit - LAST:
                    left = "the time limit"
                    break
                for cell, row in measure(list(members), loops, read_gbs).items():
                    sheet.append({**row, **env})
                    faults, done = faults + bool(row["error"]), done + 1
                    print(f"{time.monotonic() - begun:5.0f} s  {text(cell, row)}", flush=True)
    except KeyboardInterrupt:
        stopped, left = 130, "an interrupt"
    finally:
        signal.signal(signal.SIGTERM, before)
    rest = f"; {len(cells) - done} left out after {left}" if left else ""
    print(f"{done} of {len(cells)} cells in {time.monotonic() - begun:.0f} s, {faults} faults{rest}; rows in {path}")
    return stopped or int(faults > 0)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def measure(cells: Sequence[Cell], loops: Loops, read_gbs: float) -> dict[Cell, Row]:
    """The rows of a group; what goes wrong ends up in them."""
    rows = {cell: empty_row(cell, read_gbs) for cell in cells}
    try:
        _measure(cells, loops, rows)
    except Exception as error:
        for row in rows.values():
            row["error"] = row["error"] or message(error)
    return rows


def _measure(cells: Sequence[Cell], loops: Loops, rows: dict[Cell, Row]) -> None:
    A, B = operands(cells[0])
    C = {name: np.empty_like(A) for name in (PLAIN, *(cell.variant for cell in cells))}
    multiply = partial(np.matmul, A, B, out=C[PLAIN])
    multiply()
    require_product(A, B, C[PLAIN])
    calls = loops.calls(multiply)
    raced = {PLAIN: Loop(multiply, calls, C[PLAIN])}
    for cell in cells:
        right = encode(B, side="rows") if cell.variant == ENCODED else B
        call = partial(protected_gemm, A, right, out=C[cell.variant])
        raced[cell.variant] = Loop(call, calls, C[cell.variant], watched=False, reports=1)
    for x in C.values():
        fill_nan(x)
    race(raced, loops.rounds, loops.budget)
    for cell, row in rows.items():
        row["beside"] = "numpy.matmul"
        finish(cell, row, raced[PLAIN], raced[cell.variant])


def operands(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Normal random A and B, in rows."""
    rng, kind = np.random.default_rng(cell.n), element_type(cell.dtype)
    A, B = (rng.standard_normal((cell.n, cell.n)).astype(kind) for _ in range(2))
    return A, B


def read_rate() -> float:
    """Gigabytes a second at which memory is read: by the better of a sum and of BLAS, which takes all cores."""
    rows = READ_BYTES // 8 // 4096
    x, v = np.ones((rows, 4096)), np.ones(4096)
    best = 0.0
    for read in (x.sum, partial(np.matmul, x, v)):
        for _ in range(5):
            begun = time.perf_counter()
            read()
            best = max(best, 1e-9 * x.nbytes / (time.perf_counter() - begun))
    return best
