"""Rounding of the checksums of clean products on a GPU, measured for every engine of cuBLAS.

    python -m benchmarks.rounding                      eight shapes, one or two minutes on an H200
    python -m benchmarks.rounding --quick              three small ones
    python -m benchmarks.rounding --output NAME        results/NAME.csv, NAME_summary.csv, NAME_bias.csv

An engine computes C = A B: types of the operands and of C, and a compute type of cublasGemmEx. Its product
of each family of operands and each shape is checked by rows as protected_gemm checks: s = B v, t = A s, u = C v, in
float64 and with the package's weights. The residual r = |u - t| of each row is then compared with what the constants of
`abft_tsm2.checksum.bounds` multiply, and with the bound itself. docs/rounding.rst explains the columns.

Everything but `benchmarks.rounding.engines.Cublas` is written against the array module `xp`, NumPy or CuPy; bfloat16 is
kept as its bit patterns.
The exit code is 1 where something failed, which "not offered on this card" is not.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from abft_tsm2.arrays import Array, bit_pattern
from abft_tsm2.checksum.bounds import DETECT, arithmetic
from abft_tsm2.faults.judge.oracle import reference
from benchmarks import gpu_timing, markup, sheet
from benchmarks.rounding.engines import ENGINES, Cublas, Engine, Multiply, declined, reduction
from benchmarks.rounding.lines import MEASURES, Encoded, measure
from benchmarks.rounding.operands import FAMILIES, Draw, fitted, rounded, widened

Shape = tuple[int, int, int]  # m, k, n
Row = dict[str, Any]

SHAPES: tuple[Shape, ...] = (
    (1024, 1024, 1024),
    (4096, 4096, 4096),
    (2048, 16384, 2048),
    (512, 65536, 512),
    (8192, 512, 512),
    (64, 8192, 8192),
    (512, 262144, 64),
    (257, 1000, 129),
)
QUICK: tuple[Shape, ...] = ((1024, 1024, 1024), (8192, 512, 512), (257, 1000, 129))
BIAS_SIZE = 512  # rows and columns of the products whose elements are judged
BIAS_TERMS = (256, 1024, 4096, 16384, 65536, 262144)
BIAS_TERMS_QUICK = (256, 1024, 4096)
MOST_FLOAT64 = 2**37  # multiplications


# ---- all products ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One product.

    Attributes
    ----------
    measured : dict
        What `measure` found; empty where there is no product.
    same : bool or None
        Whether an emulating engine gave the plain one's result bit for bit.
    note : str
        Why there is no product.
    """

    engine: Engine
    shape: Shape
    kind: str
    family: str
    measured: dict[str, float] = field(default_factory=dict)
    same: bool | None = None
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.note.startswith("failed")


def products(shape: Shape, multiply: Multiply, draw: Draw, engines: Sequence[Engine] = ENGINES) -> Iterator[Cell]:
    """Every family of operands by every engine; an error is noted in the cells it concerns, and the others go on."""
    m, k, n = shape
    for kind, families in FAMILIES.items():
        for family, make in families.items():
            begun: list[Cell] = []
            try:
                A, B = make(draw, m, k, n)
                for cell in _of_operands(Cell(engines[0], shape, kind, family), A, B, multiply, draw.xp, engines):
                    begun.append(cell)
            except Exception as error:
                done = {cell.engine for cell in begun}
                note = f"failed: {gpu_timing.message(error)}"
                begun += [Cell(one, shape, kind, family, note=note) for one in engines if one not in done]
            yield from begun


def _of_operands(
    of: Cell, A: Array, B: Array, multiply: Multiply, xp: Any, engines: Sequence[Engine]
) -> Iterator[Cell]:
    for inputs in dict.fromkeys(engine.inputs for engine in engines):
        a, b = (rounded(x, inputs, xp) for x in fitted(A, B, inputs))
        encoded = Encoded.of(a, b, inputs, xp)
        results: dict[str, Array] = {}
        for engine in engines:
            if engine.inputs != inputs:
                continue
            if inputs == "float64" and math.prod(of.shape) > MOST_FLOAT64:
                yield replace(of, engine=engine, note="left out: takes too long")
                continue
            try:
                C = multiply(engine, a, b)
            except RuntimeError as error:
                yield replace(of, engine=engine, note=declined(error))
                continue
            if any(other.plain == engine.name for other in engines):
                results[engine.name] = C
            plain = results.get(engine.plain)
            same = None if plain is None else bool((bit_pattern(C) == bit_pattern(plain)).all())
            yield replace(of, engine=engine, same=same, measured=measure(encoded.lines(C, engine.out, xp), engine))


def rows(cells: Iterable[Cell]) -> list[Row]:
    """One for each engine, shape and kind of family: the largest of each measure, and the family it comes from."""
    groups: dict[tuple[Engine, Shape, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.engine, cell.shape, cell.kind), []).append(cell)
    found = []
    for (engine, (m, k, n), kind), group in groups.items():
        row: Row = {"engine": engine.name, "inputs": engine.inputs, "output": engine.out, "compute": engine.compute}
        row |= {"m": m, "k": k, "n": n, "kind": kind, "families": sum(bool(cell.measured) for cell in group)}
        for name in MEASURES:
            value, family = max(((c.measured[name], c.family) for c in group if name in c.measured), default=("", ""))
            row |= {name: f"{value:.4g}" if family else "", f"{name}_family": family}
        found.append(row | {"note": _note(group)})
    return found


def _note(group: Sequence[Cell]) -> str:
    notes = dict.fromkeys(f"{c.family}: {c.note}" if c.failed else c.note for c in group if c.note)
    compared = [cell.same for cell in group if cell.same is not None]
    if compared and all(compared):
        notes["bit for bit the plain product: the library did not emulate"] = None
    elif any(compared):
        notes[f"bit for bit the plain product in {sum(map(bool, compared))} of {len(compared)} families"] = None
    return "; ".join(notes)


# ---- single elements ------------------------------------------------------------------------------------------------


def bias(k: int, multiply: Multiply, draw: Draw, engines: Sequence[Engine] = ENGINES) -> list[Row]:
    """Mean and root mean square of the relative error of single elements, for operands uniform in [0, 1).

    An adder that rounds errs to both sides, one that truncates towards zero: the mean tells. Results that are rounded
    once more on storing tell nothing of it and are left out.
    """
    xp, size, found = draw.xp, BIAS_SIZE, []
    A, B = draw.uniform(size, k), draw.uniform(k, size)
    for inputs in dict.fromkeys(engine.inputs for engine in engines):
        a, b = (rounded(x, inputs, xp) for x in (A, B))
        sums = arithmetic(inputs, inputs).accumulator.name
        exact = reference(widened(a, inputs, xp), widened(b, inputs, xp), xp, sums=sums)
        for engine in engines:
            if engine.inputs != inputs or engine.arithmetic.u_out:
                continue
            row: Row = {"engine": engine.name, "k": k, "mean / u": "", "mean / (u k)": "", "rms / u": "", "note": ""}
            try:
                C = widened(multiply(engine, a, b), engine.out, xp)
            except RuntimeError as error:
                found.append(row | {"note": declined(error)})
                continue
            relative, u = ((C - exact.high) - exact.low) / exact.high, engine.arithmetic.u
            mean, rms = float(relative.mean()) / u, math.sqrt(float((relative * relative).mean())) / u
            numbers = {"mean / u": mean, "mean / (u k)": mean / k, "rms / u": rms}
            found.append(row | {name: f"{value:.3g}" for name, value in numbers.items()})
    return found


# ---- what comes of it -----------------------------------------------------------------------------------------------

_WORST: Mapping[str, tuple[str, str]] = {  # column: measure, kind
    "ratio, generic": ("ratio", "generic"),
    "ratio, structured": ("ratio", "structured"),
    "linear": ("linear", ""),
    "stored": ("stored", "generic"),
    "inputs 2^-11": ("inputs_11", "generic"),
    "r / tau, generic": ("over_tau", "generic"),
    "r / tau, structured": ("over_tau", "structured"),
}


def summarise(cells: Sequence[Cell], reductions: Mapping[str, str], where: str = "") -> list[Row]:
    """One row for each engine: the worst of its products, with family and shape, and what constants would cover them.

    ``DETECT`` is the largest ratio over generic families; ``TRUNCATION`` the least c for which
    ``(DETECT sqrt(k) + c k) u max(P2, cn)``, with the package's DETECT, covers them. Where operands or results are
    rounded as well, ratios in units of u tell nothing and are left out.
    """
    found = []
    for engine in dict.fromkeys(cell.engine for cell in cells):
        own = [cell for cell in cells if cell.engine == engine]
        own_sums = not engine.arithmetic.u_out and not engine.reduced
        row: Row = {"engine": engine.name}
        for column, (name, kind) in _WORST.items():
            worst = max(
                (cell for cell in own if name in cell.measured and kind in ("", cell.kind)),
                key=lambda cell: cell.measured[name],
                default=None,
            )
            if worst is None or (name in ("ratio", "linear") and not own_sums):
                row[column] = ""
            else:
                row[column] = f"{worst.measured[name]:.3g} ({worst.family}, {_times(worst.shape)})"
        generic = [(c.measured["ratio"], c.shape[1]) for c in own if c.measured and c.kind == "generic"]
        least = max(((ratio - DETECT) / math.sqrt(k) for ratio, k in generic), default=0.0)
        row["DETECT"] = f"{max(generic)[0]:.2f}" if generic and own_sums else ""
        truncating = bool(generic) and own_sums and engine.arithmetic.truncating
        row["TRUNCATION"] = f"{max(0.0, least):.4f}" if truncating else ""
        row["operands"] = reductions.get(engine.name, "")
        found.append(row | {"note": _note(own), "measured on": where})
    return found


def _times(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def _print(found: Sequence[Row]) -> None:
    shown = [{name: value for name, value in row.items() if name != "measured on"} for row in found]
    print(markup.markdown(list(shown[0]), [[str(value) for value in row.values()] for row in shown]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small shapes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="rounding", metavar="NAME", help="results/NAME.csv and its companions")
    options = parser.parse_args(arguments)
    # cuBLAS reads it when it starts: wherever an emulating compute type is asked for, not only where that is faster.
    os.environ.setdefault("CUBLAS_EMULATION_STRATEGY", "eager")
    import cupy

    start, multiply = time.monotonic(), Cublas()
    environment = gpu_timing.environment()
    where = "{device}, driver {driver}, CUDA {cuda}, cuBLAS {cublas}, CuPy {cupy}, {date}".format(**environment)
    print(where, flush=True)
    cells: list[Cell] = []
    for number, shape in enumerate(QUICK if options.quick else SHAPES):
        cells += products(shape, multiply, Draw(options.seed + number, cupy))
        sheet.write(options.output, [row | environment for row in rows(cells)])
        cupy.get_default_memory_pool().free_all_blocks()
        print(f"{time.monotonic() - start:6.1f} s: {_times(shape)}", flush=True)
    biases: list[Row] = []
    for k in BIAS_TERMS_QUICK if options.quick else BIAS_TERMS:
        biases += bias(k, multiply, Draw(options.seed + k, cupy))
        cupy.get_default_memory_pool().free_all_blocks()
    sheet.write(f"{options.output}_bias", biases)
    reductions = {e.name: reduction(e, multiply, cupy) for e in ENGINES if e.inputs == "float32"}
    summary = summarise(cells, reductions, where)
    sheet.write(f"{options.output}_summary", summary)
    _print(summary)
    _print(biases)
    failed = [cell for cell in cells if cell.failed]
    for cell in failed:
        print(f"{cell.engine.name}, {cell.family}, {_times(cell.shape)}: {cell.note}")
    measured = sum(bool(cell.measured) for cell in cells)
    print(f"{measured} products, {len(failed)} failed, in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
