"""How a product is divided among blocks: tiles of rows, parts of k, and the memory that the parts meet in."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from abft_tsm2.core.device import Device
from abft_tsm2.core.kernels import Stream
from abft_tsm2.core.problem import SIZES, Problem
from abft_tsm2.core.tuned import DIVIDED_ROWS, DIVIDED_WAVES, FILLED_WAVES, MOST_PARTS, MOVED, OVERHEAD


@dataclass(frozen=True)
class Grid:
    """Blocks of a launch: `tiles` of rows, `parts` of k of `slice` elements each, `batch` products."""

    tiles: int
    parts: int
    slice: int
    batch: int


@functools.lru_cache(4096)
def grid(problem: Problem, config: Stream, device: Device) -> Grid:
    """How a product is divided among blocks.

    Blocks that run at the same time share the bandwidth. So a last wave that fills the slots of the multiprocessors in
    part takes so much less, down to the share that saturates the memory: the division is the cheapest by

        cost = (full waves + max(saturated, rest)) (steps + 2 + sums) + straggler steps + added parts

    with `steps` of a part, of which a block has one, and `sums` the bytes of its sums, four times over, in bytes of a
    step; none where k is not divided. More parts are more even; fewer have less to add at the end.
    """
    tiles = -(-problem.m // config.tile)
    if config.form == "small":
        return Grid(tiles, 1, problem.k, problem.batch)
    slots = device.multiprocessors * config.shape.blocks
    total = max(1, -(-problem.k // config.step))
    moved = MOVED * config.t2 * SIZES[config.sums] / (config.step * SIZES[config.dtype])
    best = (float("inf"), total)
    most = min(MOST_PARTS, total)
    whole = config.form in ("columns", "staged")
    saturated, straggler, added = DIVIDED_WAVES if whole else DIVIDED_ROWS
    filled = {max(1, min(most, waves * slots // (tiles * problem.batch))) for waves in FILLED_WAVES}
    for parts in filled if whole else range(1, most + 1):
        steps = -(-total // parts)
        parts = -(-total // steps)
        waves, rest = divmod(tiles * problem.batch * parts, slots)
        share = waves + (max(saturated, rest / slots) if rest else 0)
        cost = share * (steps + OVERHEAD + (moved if parts > 1 else 0)) + straggler * steps + added * parts
        best = min(best, (cost, steps))
    steps = best[1]
    return Grid(tiles, -(-total // steps), steps * config.step, problem.batch)


def workspace(config: Stream, shape: Grid) -> tuple[int, int]:
    """Bytes of partial sums, and tickets, that a launch takes."""
    if shape.parts == 1:
        return 0, 0
    tiles = shape.tiles * shape.batch
    return tiles * shape.parts * config.shape.t1 * config.sums_per_thread * SIZES[config.sums], tiles
