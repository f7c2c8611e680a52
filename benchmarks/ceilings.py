"""Ceilings of the card's memory, which every time of the same run is compared with.

    python -m benchmarks.ceilings

A product that reads a large matrix once is held against a kernel that only reads; one that writes as much as it reads,
against a copy within the card.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import numpy as np

from abft_tsm2.core.device import Ceilings
from benchmarks.gpu_timing import Call, Stopwatch, environment

BYTES = 4 << 30  # of a buffer: 70 times the largest level-2 cache of today
_THREADS, _BLOCKS = 512, 4  # threads of a block, blocks of a multiprocessor: as many as it holds

# Four independent loads of 16 bytes are in flight a thread. The sum is stored only if it is a value that the buffer
# cannot give, which the compiler does not know.
_READ = r"""
extern "C" __global__ void __launch_bounds__(512) read_only(const uint4* __restrict__ x, long long n, unsigned* out) {
  const long long step = (long long)gridDim.x * blockDim.x;
  unsigned sum = 0;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i + 3 * step < n; i += 4 * step) {
    const uint4 a = __ldcs(x + i), b = __ldcs(x + i + step), c = __ldcs(x + i + 2 * step), d = __ldcs(x + i + 3 * step);
    sum |= a.x | a.y | a.z | a.w | b.x | b.y | b.z | b.w | c.x | c.y | c.z | c.w | d.x | d.y | d.z | d.w;
  }
  if (sum == 0xffffffffu) *out = sum;
}
"""


def measure(watch: Stopwatch) -> Ceilings:
    """Both ceilings of the current device: of reading the better of two kernels, medians of what `watch` samples."""
    import cupy

    size = min(BYTES, cupy.cuda.runtime.memGetInfo()[0] // 8) // (1 << 20) * (1 << 20)
    if size == 0:
        raise RuntimeError("less than 8 MiB of the card's memory are free: end what else runs there")
    x = cupy.full(size // 4, 1.0, dtype=cupy.float32)
    y, total, flag = cupy.empty_like(x), cupy.empty((), dtype=cupy.float32), cupy.zeros(1, dtype=cupy.uint32)
    kernel = cupy.RawKernel(_READ, "read_only")
    blocks = _BLOCKS * int(cupy.cuda.Device().attributes["MultiProcessorCount"])
    step = blocks * _THREADS
    vectors = size // 16 // (4 * step) * (4 * step)  # whole rounds: no remainder
    runtime = cupy.cuda.runtime

    def copy(_: int) -> None:
        stream = cupy.cuda.get_current_stream().ptr
        runtime.memcpyAsync(y.data.ptr, x.data.ptr, size, runtime.memcpyDeviceToDevice, stream)

    moved = {"read": 16 * vectors, "sum": size, "copy": 2 * size}
    times = watch.measure(
        {
            "read": Call(lambda _: kernel((blocks,), (_THREADS,), (x, np.int64(vectors), flag))),
            "sum": Call(lambda _: cupy.sum(x, out=total), launches=4),
            "copy": Call(copy),
        }
    )
    failed = {name: taken.error or "no samples" for name, taken in times.items() if not taken.seconds}
    if failed:
        raise RuntimeError(f"the ceilings could not be measured, and no share can be given without them: {failed}")
    gbs = {name: 1e-9 * moved[name] / statistics.median(taken.seconds) for name, taken in times.items()}
    return Ceilings(max(gbs["read"], gbs["sum"]), gbs["copy"])


def main(arguments: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    found = measure(Stopwatch())
    print(f"{environment()['device']}: read {found.read_gbs:.0f} GB/s, copy {found.copy_gbs:.0f} GB/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
