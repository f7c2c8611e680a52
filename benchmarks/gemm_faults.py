"""Faults for a product on a GPU: planted between the product and the check, by a kernel of its own.

One element, or sixteen in different rows, become -3 times themselves and 1; or a tile of 128 x 128 becomes a large
number. Each changes its row by so much that the check has to find it, whatever type C is stored in. The same kernel is
launched for all of them, for a clean product too, so that the difference of two calls is the repair and not the
planting. It is queued behind cuBLAS (`planted`): a hook for ``on_stage`` would let the host wait at every stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from abft_tsm2.arrays import bit_pattern, dtype_name
from abft_tsm2.core import cublas
from abft_tsm2.faults.judge.oracle import Array, widened
from benchmarks.gemm_device import CLEAN, FAULTS

TILE = 128
SURE = 2.0  # detection limits: that of a report is of one line, and each line has its own
SETS = 8  # of places, which successive calls walk through
_THREADS = 128
_REALS = {"float32": "float", "float64": "double", "bfloat16": "unsigned short"}
_PLANT = r"""
__device__ double value(float x) { return x; }
__device__ double value(double x) { return x; }
__device__ double value(unsigned short x) {  // bfloat16: the upper half of a float
  const unsigned bits = static_cast<unsigned>(x) << 16;
  return *reinterpret_cast<const float*>(&bits);
}
__device__ void store(float* at, double x) { *at = static_cast<float>(x); }
__device__ void store(double* at, double x) { *at = x; }
__device__ void store(unsigned short* at, double x) {
  const float narrow = static_cast<float>(x);
  const unsigned bits = *reinterpret_cast<const unsigned*>(&narrow);
  *at = static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// C[places[i]] = factor C[places[i]] + shift for `count` of them.
extern "C" __global__ void plant(REAL* C, const long long* places, long long count, double factor, double shift) {
  const long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x;
  if (i < count) store(C + places[i], factor * value(C[places[i]]) + shift);
}
"""


Plant = Callable[[Array], None]
"""Plants faults into a product C."""


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Let `plant` follow each product of cuBLAS that is queued in the block, in front of its check."""
    multiply = cublas.Gemm.__call__

    def and_plant(gemm: cublas.Gemm, A: Array, B: Array, C: Array, alpha: float, beta: float) -> None:
        multiply(gemm, A, B, C, alpha, beta)
        plant(C)

    cublas.Gemm.__call__ = and_plant  # type: ignore[method-assign]
    try:
        yield
    finally:
        cublas.Gemm.__call__ = multiply  # type: ignore[method-assign]


def source(dtype: str) -> str:
    """The text of the kernel for a C of that type."""
    return f"#define REAL {_REALS[dtype]}\n{_PLANT}"


class Faults:
    """Places of faults in a product of some size, and what plants them.

    Parameters
    ----------
    clean : (m, n) CuPy array, row-major
        The right product: elements that the change would leave nearly as they are, are left out.
    k : int
        Terms of an element.
    limit : float
        Sure to be found, as the right product's report says, is a change of an element that is larger.
    seed : int
    """

    def __init__(self, clean: Array, k: int, limit: float, seed: int) -> None:
        import cupy

        self.shape, self.dtype = clean.shape, dtype_name(clean.dtype)
        self._kernel = cupy.RawKernel(source(self.dtype), "plant")
        rng = np.random.default_rng(seed)
        self.places: dict[str, list[np.ndarray[Any, Any]]] = {CLEAN: [np.zeros(1, np.int64)] * SETS}
        least = max(math.sqrt(k) / 4, SURE * limit)
        for faults in FAULTS[1:3]:
            self.places[faults] = [_elements(clean, int(faults), least, rng) for _ in range(SETS)]
        # No row of a product of normal operands can have a norm of k sqrt(n) (`checksum.bounds.largest_norm`): one with
        # such elements is found whatever their weights are. Of zeros the weighted sum may be small, within the bound of
        # 16 bits.
        self._tile = k * math.sqrt(clean.shape[1])
        self.places["tile"] = [_tile(clean.shape, rng) for _ in range(SETS)]
        self._on_card = {name: [cupy.asarray(one) for one in sets] for name, sets in self.places.items()}

    @property
    def rows(self) -> list[int]:
        """Of C, that the first call's faults lie in; three of the tile's."""
        n, found = self.shape[1], set[int]()
        for name, sets in self.places.items():
            lines = sorted({int(place) // n for place in sets[0]})
            found |= {lines[0], lines[len(lines) // 2], lines[-1]} if name == "tile" else set(lines)
        return sorted(found)

    def plant(self, faults: str) -> Plant:
        """Plants another set at each call, the first one at the first."""
        sets, turn = self._on_card[faults], 0
        count = 0 if faults == CLEAN else sets[0].size
        factor, shift = (0.0, self._tile) if faults == "tile" else (-3.0, 1.0)

        def plant(C: Array) -> None:
            nonlocal turn
            grid = (max(1, -(-count // _THREADS)),)
            numbers = np.int64(count), np.float64(factor), np.float64(shift)
            self._kernel(grid, (_THREADS,), (bit_pattern(C), sets[turn % SETS], *numbers))
            turn += 1

        return plant


def _elements(C: Array, count: int, least: float, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Places of elements in different rows, each of which x -> 1 - 3 x changes by `least` or more."""
    import cupy

    patterns, n = bit_pattern(C).reshape(-1), C.shape[1]
    found = np.zeros(0, np.int64)
    while found.size < count:
        places = rng.integers(0, C.size, 4 * count)
        values = widened(np.asarray(cupy.asnumpy(patterns[cupy.asarray(places)])).view(C.dtype))
        found = np.concatenate([found, places[abs(1 - 4 * values) >= least]])
        found = found[np.unique(found // n, return_index=True)[1]]
    chosen: np.ndarray[Any, Any] = rng.permutation(found)[:count]
    return chosen


def _tile(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Places of the elements of a tile, as cuBLAS would lay it."""
    m, n = shape
    side = min(TILE, m, n)
    row, column = (side * int(rng.integers(0, length // side)) for length in shape)
    rows, columns = row + np.arange(side, dtype=np.int64)[:, None], column + np.arange(side, dtype=np.int64)
    found: np.ndarray[Any, Any] = (rows * n + columns).reshape(-1)
    return found
