"""The paper's choice of t2 and t3 run for every known card, beside what its Tables 3 and 4 print.

    python -m benchmarks.paper.parameters     write results/parameters.csv, parameters_choices.csv and resources.csv

Arithmetic only: no GPU, the same numbers everywhere. docs/model.rst shows the three files and says why they differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from abft_tsm2.core.device import KNOWN, known
from abft_tsm2.core.paper.config import BYTES
from abft_tsm2.core.paper.model import (
    AS_PRINTED,
    REGISTER_BYTES,
    WELL_POSED,
    Choices,
    is_compute_bound,
    optimise,
    t2_threshold,
)
from abft_tsm2.core.problem import Problem
from benchmarks.sheet import write

N = 16  # the paper's parameters "depend on n (n = 16)"
SIZES = (10240, 20480, 30720)  # m = k


@dataclass(frozen=True)
class Printed:
    """A row of Table 3 (TSM2R) or 4 (TSM2L), at n = 16.

    Attributes
    ----------
    table : int
    kernel : str
        The card in Table 3, the variant in Table 4 (there on a V100).
    dtype : str
    t1, t2, t3 : int
    shared_bytes : int
        The shared memory column, its formula evaluated.
    registers : int
    """

    table: int
    kernel: str
    dtype: str
    t1: int
    t2: int
    t3: int
    shared_bytes: int
    registers: int


TABLES = (
    Printed(3, "K40c", "float32", 128, N, 4, 512 * N * 4, 64),
    Printed(3, "K40c", "float64", 128, N, 4, 1024 * N * 8, 128),
    Printed(3, "M40", "float32", 256, 8, 4, 8192, 40),
    Printed(3, "M40", "float64", 256, 8, 4, 16384, 70),
    Printed(3, "P100", "float32", 128, 4, 4, 2048, 32),
    Printed(3, "P100", "float64", 128, 4, 4, 4096, 56),
    Printed(3, "V100", "float32", 128, N, 32, 512 * N * 4, 144),
    Printed(3, "V100", "float64", 128, N, 16, 1024 * N * 8, 180),
    Printed(3, "V100", "float64", 128, N, 12, 1024 * N * 8, 168),
    Printed(4, "Opt-1", "float32", 128, N, 32, 512 * N * 4, 144),
    Printed(4, "Opt-1", "float64", 128, N, 16, 1024 * N * 8, 180),
    Printed(4, "Opt-1", "float64", 128, N, 12, 1024 * N * 8, 168),
    Printed(4, "Opt-2", "float32", 128, N, 32, 512 * N * 4, 251),
    Printed(4, "Opt-2", "float64", 128, N, 16, 1024 * N * 8, 254),
    Printed(4, "Opt-2", "float64", 128, N, 12, 1024 * N * 8, 252),
)

# One choice at a time, from the procedure as printed.
VARIATIONS: Mapping[str, Choices] = {
    "as printed": AS_PRINTED,
    "C = 6 registers": replace(AS_PRINTED, fixed_registers=6),
    "C = 32 registers": replace(AS_PRINTED, fixed_registers=32),
    "memory latency 800 cycles": replace(AS_PRINTED, memory_latency_cycles=800),
    "time in milliseconds": replace(AS_PRINTED, seconds_per_unit=1e-3),
    "stop on the change of the time": replace(AS_PRINTED, stop_on="time"),
    "stop at 1e-3": replace(AS_PRINTED, stop=1e-3),
    "utilisation capped at 1": replace(AS_PRINTED, cap=True),
    "multiply-add counts twice": replace(AS_PRINTED, flops=2),
    "capped, step times the elasticity": replace(AS_PRINTED, cap=True, relative=True),
    "the same, multiply-add counts twice, t3 up": WELL_POSED,
}


def procedure(cards: Iterable[str] = tuple(KNOWN)) -> list[dict[str, Any]]:
    """t2, t3 for every card and type: as printed at three sizes, well posed, and from Table 3."""
    rows = []
    for device in map(known, cards):
        for dtype in BYTES:
            problems = {size: Problem(size, size, N, dtype) for size in SIZES}
            printed = [row for row in TABLES if row.table == 3 and (row.kernel, row.dtype) == (device.name, dtype)]
            bound = "compute" if is_compute_bound(problems[SIZES[0]], device) else "memory"
            rows.append(
                {
                    "card": device.name,
                    "type": dtype,
                    "threshold": f"{t2_threshold(device, dtype):.1f}",
                    "bound": bound,
                    **{f"m = {size}": _pair(problem, device.name, AS_PRINTED) for size, problem in problems.items()},
                    "well posed": _pair(problems[SIZES[0]], device.name, WELL_POSED),
                    "Table 3": " or ".join(f"{row.t2}, {row.t3}" for row in printed),
                }
            )
    return rows


def variations(cards: Iterable[str] = ("K40c", "M40", "P100", "V100")) -> list[dict[str, Any]]:
    """t2, t3 in float64 at m = k = 20480, one choice changed at a time."""
    problem = Problem(20480, 20480, N, "float64")
    return [
        {"choice": name, **{card: _pair(problem, card, choices) for card in cards}}
        for name, choices in VARIATIONS.items()
    ]


def resources() -> list[dict[str, Any]]:
    """Registers and shared memory of Tables 3 and 4 beside the paper's own formulas."""
    rows = []
    for row in TABLES:
        tiles = 4 if row.kernel == "Opt-2" else 3  # Algorithm 7 adds nextC, t2 values
        values = tiles * row.t2 + 2 * row.t3
        registers = values * BYTES[row.dtype] // REGISTER_BYTES
        shared = row.t1 * row.t2 * BYTES[row.dtype]
        rows.append(
            {
                "table": row.table,
                "kernel": row.kernel,
                "type": row.dtype,
                "t1, t2, t3": f"{row.t1}, {row.t2}, {row.t3}",
                "registers printed": row.registers,
                "registers of the tiles": registers,
                "the rest, C": row.registers - registers,
                "shared bytes printed": row.shared_bytes,
                "t1 t2 bytes": shared,
                "printed over computed": row.shared_bytes // shared,
            }
        )
    return rows


RESULTS: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    "parameters": procedure,
    "parameters_choices": variations,
    "resources": resources,
}


def _pair(problem: Problem, card: str, choices: Choices) -> str:
    found = optimise(problem, known(card), choices)
    return f"{found.t2}, {found.t3}" + ("" if found.converged else f" (not ended after {found.steps} steps)")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    for name, rows in RESULTS.items():
        print(write(name, rows()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
