"""Faults that are planted on a GPU between a product and its check, for repairs that are timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np

from abft_tsm2.arrays import bit_pattern
from abft_tsm2.core import cublas
from abft_tsm2.faults.judge.oracle import Array, narrowed, widened
from abft_tsm2.gemm import replays
from benchmarks.gemm_grid import CLEAN, FAULTS

TILE = 128
SURE = 1.01  # detection limits of a report, which hold for every line
SETS = 8  # of places of faults, which successive calls walk through

Plant = Callable[[Array], None]
"""Plants faults into a product C."""


@contextmanager
def planted(plant: Plant, *, graphs: bool = False) -> Iterator[None]:
    """In its block, let `plant` follow each product of cuBLAS that is queued, in front of its check: a hook
    for ``on_stage`` would let the host wait at every stage. No call becomes a graph, in which nothing could be planted,
    unless `graphs`."""
    multiply = cublas.Gemm.__call__

    def and_plant(gemm: cublas.Gemm, A: Array, B: Array, C: Array, alpha: float, beta: float) -> None:
        multiply(gemm, A, B, C, alpha, beta)
        plant(C)

    with patch.object(cublas.Gemm, "__call__", and_plant), nullcontext() if graphs else replays.step_by_step():
        yield


class Faults:
    """Elements of a product that are overwritten, on the card: one element, or sixteen in different rows, by 1 - 3 x,
    or a tile of 128 x 128 by a large number.

    Each changes its row by so much that the check has to find it, whatever type C is stored in. An element of a clean
    product is overwritten by itself, so that the difference of two calls is the repair and not the planting.

    Parameters
    ----------
    clean : (m, n) CuPy array, row-major
        The right product: elements that the change would leave nearly as they are, are left out.
    k : int
        Terms of an element.
    limit : float
        A change of an element that is larger is sure to be found, as the right product's report says.
    seed : int
    """

    def __init__(self, clean: Array, k: int, limit: float, seed: int) -> None:
        import cupy

        rng, patterns = np.random.default_rng(seed), bit_pattern(clean).reshape(-1)
        least = max(math.sqrt(k) / 4, SURE * limit)
        # No row of a product of normal operands can have a norm of k sqrt(n) (`checksum.bounds.largest_norm`): one with
        # such elements is found whatever their weights are. Of zeros the weighted sum may be small, within the bound of
        # 16 bits.
        large = k * math.sqrt(clean.shape[1])
        self.sets: dict[str, list[tuple[Array, Array]]] = {}
        for name in FAULTS:
            self.sets[name] = []
            for _ in range(SETS):
                if name == "tile":
                    places = _tile(clean.shape, rng)
                    values = narrowed(np.full(places.size, large), clean.dtype)
                elif name == CLEAN:
                    places = np.zeros(1, np.int64)
                    values = cupy.asnumpy(patterns[:1])
                else:
                    places, changed = _elements(clean, int(name), least, rng)
                    values = narrowed(changed, clean.dtype)
                self.sets[name].append((cupy.asarray(places), cupy.asarray(values)))

    def plant(self, faults: str) -> Plant:
        """Plants another set at each call, the first one at the first."""
        sets, turns = self.sets[faults], count()

        def plant(C: Array) -> None:
            places, values = sets[next(turns) % SETS]
            bit_pattern(C).reshape(-1).put(places, values)

        return plant


def _elements(C: Array, several: int, least: float, rng: np.random.Generator) -> tuple[Any, Any]:
    """Places of elements x in different rows, and 1 - 3 x, which differs from x by `least` or more."""
    import cupy

    patterns, n = bit_pattern(C).reshape(-1), C.shape[1]
    places, values = np.zeros(0, np.int64), np.zeros(0)
    while places.size < several:
        more = rng.integers(0, C.size, 4 * several)
        x = widened(np.asarray(cupy.asnumpy(patterns[cupy.asarray(more)])).view(C.dtype))
        far = abs(1 - 4 * x) >= least
        places, values = np.concatenate([places, more[far]]), np.concatenate([values, 1 - 3 * x[far]])
        first = np.unique(places // n, return_index=True)[1]
        places, values = places[first], values[first]
    chosen = rng.permutation(places.size)[:several]
    return places[chosen], values[chosen]


def _tile(shape: tuple[int, int], rng: np.random.Generator) -> Any:
    """Places of the elements of a tile, as cuBLAS would lay it."""
    side = min(TILE, *shape)
    row, column = (side * int(rng.integers(0, length // side)) for length in shape)
    rows, columns = row + np.arange(side, dtype=np.int64)[:, None], column + np.arange(side, dtype=np.int64)
    return (rows * shape[1] + columns).reshape(-1)
