"""Replays of protected products in CUDA graphs: false alarms, and faults that are planted on the device.

    python -m benchmarks.replays                        a million replays, and 5,000 with 500 faults; two minutes
    python -m benchmarks.replays --quick                one hundredth of them
    python -m benchmarks.replays --only float16         cells whose name contains the text; repeatable

A graph writes new operands, multiplies them under protection, and compares C with a product of cuBLAS that nothing was
planted in. Where faults are planted, an element is overwritten between the product and its check, in replays that a
hash of their number chooses. Rows go to results/replays.csv. The exit code is 1 where a replay was not judged, a clean
one was repaired or refused, a fault was not repaired, or C was wrong.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import abft_tsm2 as ft
from abft_tsm2.arrays import Array
from abft_tsm2.core import cublas
from abft_tsm2.core.problem import SIZES, Problem
from benchmarks import gpu_timing, sheet
from benchmarks.operands import element_type

SEED = 0x9E3779B97F4A7C15
EVERY = 10  # replays to a fault
BITS = {
    "float16": (10, 15),
    "bfloat16": (7, 127),
    "float32": (23, 127),
    "float64": (52, 1023),
}  # of a mantissa; the bias
KERNELS = r"""
typedef unsigned long long Bits;
__device__ Bits mixed(Bits x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}
// counts: replays that have begun, faults that were planted, elements that were wrong at the end
extern "C" __global__ void refill(WORD* x, long long n, const Bits* counts, Bits seed) {
  const Bits replay = counts[0];
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    const Bits z = mixed(mixed(seed + replay) + i);
    const Bits mantissa = z & ((1ull << MANTISSA) - 1), octave = __clzll(z << 1 | 1) & 7;
    x[i] = WORD(z >> 63 << (8 * sizeof(WORD) - 1) | Bits(BIAS - 1 - octave) << MANTISSA | mantissa);
  }
}
extern "C" __global__ void plant(WORD* x, long long n, Bits* counts, Bits every, Bits value) {
  const Bits z = mixed(counts[0] ^ 0x5DEECE66Dull);
  if (every && z % every == 0) {
    x[mixed(z) % n] = WORD(value);
    counts[1]++;
  }
}
extern "C" __global__ void compare(const WORD* x, const WORD* y, long long n, Bits* counts, double most) {
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll) {
    if (x[i] == y[i]) continue;
    double difference = 0;
    for (int side = 0; side < 2; side++) {
      const Bits z = Bits(side ? x[i] : y[i]), sign = z >> (8 * sizeof(WORD) - 1);
      const Bits exponent = (z >> MANTISSA) & ((1ull << (8 * sizeof(WORD) - 1 - MANTISSA)) - 1);
      const double fraction = double(z & ((1ull << MANTISSA) - 1)) / double(1ull << MANTISSA) + (exponent ? 1 : 0);
      const double size = ldexp(fraction, int(exponent ? exponent : 1) - BIAS);
      difference += (side ? 1 : -1) * (sign ? -size : size);
    }
    if (!(fabs(difference) <= most)) atomicAdd(counts + 2, 1ull);
  }
}
extern "C" __global__ void end(Bits* counts) { counts[0]++; }
"""


@dataclass(frozen=True)
class Cell:
    """A product of two n x n matrices, and how often its graph is replayed."""

    dtype: str
    n: int
    replays: int
    faults: bool = False

    @property
    def name(self) -> str:
        return f"{self.dtype} {self.n}{' with faults' * self.faults}"


CLEAN = (
    *(
        ("float32", n, count)
        for n, count in ((16, 100_000), (64, 100_000), (128, 50_000), (256, 50_000), (512, 50_000))
    ),
    *(
        ("float64", n, count)
        for n, count in ((16, 100_000), (64, 100_000), (128, 50_000), (256, 50_000), (512, 50_000))
    ),
    *(("float16", n, count) for n, count in ((64, 50_000), (256, 50_000), (1024, 50_000), (2048, 40_000))),
    *(("bfloat16", n, count) for n, count in ((64, 50_000), (256, 25_000), (1024, 25_000), (2048, 40_000))),
    *(("float32", 1024, 10_000), ("float64", 1024, 10_000)),
)
CELLS = tuple(Cell(*given) for given in CLEAN) + tuple(
    Cell(dtype, n, 5000, faults=True) for dtype, n in (("float32", 512), ("float64", 256), ("float16", 1024))
)


class Replayed:
    """The graph of a cell.

    Attributes
    ----------
    counts : (3,) CuPy array of uint64
        Replays, planted faults, wrong elements.
    report : Report
        PENDING.
    """

    def __init__(self, cell: Cell, stream: Any) -> None:
        import cupy

        self.cell, self.stream, kind = cell, stream, element_type(cell.dtype)
        mantissa, bias = BITS[cell.dtype]
        word = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}[SIZES[cell.dtype]]
        code = f"typedef {word} WORD;\n{KERNELS}"
        self._module = cupy.RawModule(code=code, options=(f"-DMANTISSA={mantissa}", f"-DBIAS={bias}"))
        self.counts = cupy.zeros(3, np.uint64)
        A, B, C, D = (cupy.zeros((cell.n, cell.n), kind) for _ in range(4))
        self._arrays = A, B, C, D
        u = {2: 2.0**-8 if cell.dtype == "bfloat16" else 2.0**-11, 4: 2.0**-24, 8: 2.0**-53}[SIZES[cell.dtype]]
        # 16 bits: of one rounding and the next; elements are below n, sums in float32 and float64 have n roundings.
        most = 4 * u * np.sqrt(cell.n) if SIZES[cell.dtype] == 2 else 2 * u * cell.n
        plain = cublas.Gemm.of(Problem(cell.n, cell.n, cell.n, cell.dtype, out=cell.dtype), A, B, D)
        stream.synchronize()
        with stream, ft.errstate(sync=False):
            ft.protected_gemm(A, B, out=C)
            stream.synchronize()
            space = cupy.empty(cublas.WORKSPACE, np.uint8)
            stream.begin_capture()
            for i, x in enumerate((A, B)):
                self._run("refill", x, x.size, self.counts, np.uint64((SEED * (i + 1)) % 2**64), blocks=264)
            with self._planted(C) if cell.faults else _nothing():
                self.report = ft.protected_gemm(A, B, out=C, return_report=True)[1]
            with cublas.captured_on(stream.ptr, space) as handle:
                plain.on(handle, A, B, D, 1.0, 0.0)
            self._run("compare", C, D, C.size, self.counts, np.float64(most), blocks=264)
            self._run("end", self.counts)
            self.graph = stream.end_capture()
        self._space = space

    def _run(self, name: str, *arguments: Any, blocks: int = 1) -> None:
        self._module.get_function(name)((blocks,), (256 if blocks > 1 else 1,), arguments)

    @contextmanager
    def _planted(self, C: Array) -> Iterator[None]:
        """Let a fault follow the product in a replay of ten."""
        multiply = cublas.Gemm.on
        value = np.array(6e4 if self.cell.dtype == "float16" else 1e6, C.dtype)
        bits = np.uint64(value.view(f"u{value.itemsize}"))

        def and_plant(*arguments: Any) -> None:
            multiply(*arguments)
            self._run("plant", C, C.size, self.counts, np.uint64(EVERY), bits)

        with patch.object(cublas.Gemm, "on", and_plant):
            yield

    def row(self) -> dict[str, Any]:
        """Replay it, and say what came of it."""
        begun = time.perf_counter()
        for _ in range(self.cell.replays):
            self.graph.launch(self.stream)
        with ft.errstate(corrected="ignore", uncorrectable="log"):
            report = self.report.wait()
        replays, planted, wrong = (int(x) for x in self.counts.get())
        repaired = sum(fault.elements for fault in report.faults)
        row = {
            "dtype": self.cell.dtype,
            "n": self.cell.n,
            "faults": self.cell.faults,
            "replays": replays,
            "judged": report.replays,
            "planted": planted,
            "repaired": repaired,
            "wrong": wrong,
            "suspicions": report.suspicions,
            "status": report.status.name,
            "closest": f"{report.closest:.3g}",
            "seconds": f"{time.perf_counter() - begun:.1f}",
        }
        return row | {"reasons": "; ".join(report.reasons)} | environment()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@functools.cache
def environment() -> dict[str, str]:
    return gpu_timing.environment()


def held(row: dict[str, Any]) -> bool:
    """Whether a row shows what it should."""
    status = "CORRECTED" if row["planted"] else "CLEAN"
    judged = row["replays"] == row["judged"] and row["status"] == status
    return judged and row["planted"] == row["repaired"] and row["wrong"] == 0 and bool(row["planted"]) == row["faults"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replays",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one replay in a hundred, in no file unless --output")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cells whose name contains it")
    parser.add_argument("--list", action="store_true", help="names of the cells")
    parser.add_argument("--output", metavar="FILE", help="instead of results/replays.csv")
    options = parser.parse_args(arguments)
    cells = [cell for cell in CELLS if not options.only or any(text in cell.name for text in options.only)]
    if not cells:
        parser.error(f"no cell has {' or '.join(options.only)} in its name; --list shows them")
    if options.list:
        print("\n".join(f"{cell.name}: {cell.replays} replays" for cell in cells))
        return 0
    import cupy

    stream, rows = cupy.cuda.Stream(non_blocking=True), []
    for cell in cells:
        count = max(100, cell.replays // 100) if options.quick else cell.replays
        rows.append(Replayed(Cell(cell.dtype, cell.n, count, cell.faults), stream).row())
        row, fine = rows[-1], "as it should be" if held(rows[-1]) else "WRONG"
        print(
            f"{cell.name}: {row['judged']} of {row['replays']} replays judged, {row['planted']} faults planted, "
            f"{row['repaired']} repaired, {row['wrong']} wrong elements, {row['suspicions']} suspicions, "
            f"{row['status']}, {row['seconds']} s: {fine} {row['reasons']}",
            flush=True,
        )
        if options.output or not options.quick:
            path = Path(options.output) if options.output else sheet.RESULTS / "replays.csv"
            with sheet.Sheet(path, list(row), append=len(rows) > 1) as file:  # what is done stays, whatever interrupts
                file.append(row)
    return 0 if all(map(held, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
