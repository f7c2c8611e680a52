"""Exchange rows of a column of blocks: what travels are the rows that move.

The pivots of a step exchange rows of its first block, one after the other, each with itself or a row below. Whatever
comes up stays there, and what goes down comes from the first block: so this one gets rows from all blocks, and the
others get rows from it alone. No task reads a whole column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, bit_pattern, dtype_name, from_host, namespace, to_host
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.core.blas import permutation
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.stages import hook_of
from abft_tsm2.interop.dask.task import ATTEMPTS, GraphOptions, run
from abft_tsm2.report import Fault, Report, Status

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Exchange:
    """The exchanges of one step.

    Attributes
    ----------
    first, height : int
        Where its first block begins, and how many rows that has.
    back : bool
        Whether they are undone.
    """

    first: int
    height: int
    back: bool = False

    def moves(self, piv: Array) -> tuple[Rows, Rows]:
        """The places whose row changes, in order, and the rows that they get."""
        others = np.asarray(to_host(piv)).ravel()
        rows = np.unique(np.concatenate([np.arange(self.first, self.first + others.size), others]))
        order = permutation(np.searchsorted(rows, others).astype(np.int32), rows.size)
        order = np.argsort(order) if self.back else order
        found = order != np.arange(rows.size)
        return rows[found], rows[order[found]]

    def above(self, rows: Rows) -> Any:
        """Which of these are in the first block."""
        return rows < self.first + self.height

    def down(self, piv: Array) -> Rows:
        """The rows of the first block that leave it, in the order of their places."""
        places, rows = self.moves(piv)
        leave: Rows = rows[~self.above(places)] - self.first
        return leave

    def up(self, piv: Array, low: int, size: int) -> Rows:
        """Those of the block of rows `low` to `low + size` that go to the first one."""
        places, rows = self.moves(piv)
        arrive: Rows = rows[self.above(places) & (rows >= low) & (rows < low + size)] - low
        return arrive

    def placed(self, piv: Array, low: int, size: int) -> tuple[Rows, Rows]:
        """Places in that block, and which of the rows of `down` each gets."""
        places, _ = self.moves(piv)
        places = places[~self.above(places)]
        here = (places >= low) & (places < low + size)
        return places[here] - low, np.flatnonzero(here)

    def gathered(self, piv: Array) -> Rows:
        """The rows that the first block gets."""
        found = np.arange(self.first, self.first + self.height)
        places, rows = self.moves(piv)
        found[places[self.above(places)] - self.first] = rows[self.above(places)]
        return found

    def stacked(self, piv: Array, lows: Sequence[int]) -> Rows:
        """Where these are, if the rows of the first block, and those of `up` of all others, which begin at the rows
        `lows`, lie one under the other."""
        found = self.gathered(piv)
        away = ~self.above(found)
        blocks = np.searchsorted(lows, found[away], side="right")
        found -= self.first
        found[away] = self.height + np.argsort(np.argsort(blocks, kind="stable"))
        return found


# ---- rows that move, compared with what they were -----------------------------------------------------------------


def differing(X: Array, Y: Array) -> Array:
    """Where two matrices have not the same bits."""
    return bit_pattern(X) != bit_pattern(Y)


def moved(
    options: GraphOptions, step: tuple[Any, ...], rows: Callable[[], Array], wrong: Callable[[Array], Array]
) -> tuple[Array, WordSums]:
    """Put rows together, and compare them with those where they come from; again where they differ.

    `rows`: makes a matrix that is contiguous by rows; `wrong`: says where it is `differing` from blocks that are
    themselves compared with their sums when the task is done. The sums of its words are returned as well: they are of
    what is compared.
    """
    hook, faults = hook_of(options, step), []
    for _ in range(ATTEMPTS if options.repairs else 1):
        X = rows()
        if hook is not None:
            hook("moved", {"X": X})
        words, off = WordSums.of(X), wrong(X)
        found = np.flatnonzero(to_host(off).any(axis=1)).tolist() if bool(off.any()) else []
        if not found:
            break
        faults.append(Fault("X", "rows", tuple(found), (), len(found), float("nan"), "moved again"))
    if faults:
        status, faults = Status.CORRECTED, faults[-1:]
        if found:
            status, faults = Status.UNCORRECTABLE, [replace(faults[-1], repair="")]
        sizes = int(X.shape[0]), 0, int(X.shape[1]), dtype_name(X.dtype)
        policy.deliver(Report(status, options.operation, *sizes, faults=tuple(faults)))
    return X, words


def gathered(
    options: GraphOptions, step: tuple[Any, ...], blocks: Sequence[Block], which: Rows | None = None
) -> tuple[Array, WordSums]:
    """These rows, or all, of blocks that lie one under the other."""

    def rows() -> Array:
        xp = namespace(blocks[0].array)
        X = blocks[0].array if len(blocks) == 1 else xp.concat([block.array for block in blocks], axis=0)
        return X if which is None else xp.take(X, from_host(which, X), axis=0)

    if which is None and len(blocks) == 1:
        return blocks[0].array, blocks[0].words
    return moved(options, step, rows, lambda X: differing(X, rows()))


def replaced(
    options: GraphOptions, step: tuple[Any, ...], block: Block, piece: Block, places: Rows, which: Rows
) -> tuple[Array, WordSums]:
    """A block with rows of a piece in some places; itself where there are none."""

    def new(X: Array) -> tuple[Array, Array]:
        return from_host(places, X), namespace(X).take(piece.array, from_host(which, X), axis=0)

    def rows() -> Array:
        X = namespace(block.array).asarray(block.array, copy=True, order="C")
        at, those = new(X)
        X[at] = those
        return X

    def wrong(X: Array) -> Array:
        off, (at, those) = differing(X, block.array), new(X)
        off[at] = differing(namespace(X).take(X, at, axis=0), those)
        return off

    return moved(options, step, rows, wrong) if places.size else (block.array, block.words)


# ---- tasks --------------------------------------------------------------------------------------------------------


def told(report: Report) -> tuple[Report, ...]:
    """The report of a task that only moves rows, where there was something to say."""
    return () if report.status is Status.CLEAN else (report,)


def rows_up(options: GraphOptions, step: tuple[Any, ...], exchange: Exchange, low: int, A: Block, piv: Block) -> Block:
    """The rows of a block that go up to the first one."""

    def work(A: Array, piv: Array) -> tuple[Array, WordSums]:
        return gathered(options, step, [block], exchange.up(piv, low, A.shape[0]))

    block = A
    (X, words), report = run(options, step, {"A": A, "piv": piv}, work)
    return Block.of(X, told(report), words)


def rows_down(options: GraphOptions, step: tuple[Any, ...], exchange: Exchange, A: Block, piv: Block) -> Block:
    """The rows of the first block that leave it."""

    def work(A: Array, piv: Array) -> tuple[Array, WordSums]:
        return gathered(options, step, [block], exchange.down(piv))

    block = A
    (X, words), report = run(options, step, {"A": A, "piv": piv}, work)
    return Block.of(X, told(report), words)


def exchanged_above(
    options: GraphOptions,
    step: tuple[Any, ...],
    exchange: Exchange,
    lows: Sequence[int],
    A: Block,
    pieces: Sequence[Block],
    piv: Block,
) -> Block:
    """The first block, with its new rows."""

    def work(piv: Array, **arrays: Array) -> tuple[Array, WordSums]:
        return gathered(options, step, (A, *pieces), exchange.stacked(piv, lows))

    (X, words), report = run(options, step, {"piv": piv, **named("A", A, pieces)}, work)
    return Block.of(X, (*reports_of(A, *pieces), *told(report)), words)


def exchanged_below(
    options: GraphOptions, step: tuple[Any, ...], exchange: Exchange, low: int, A: Block, piece: Block, piv: Block
) -> Block:
    """Another block, with its new rows."""

    def work(A: Array, piv: Array, rows: Array) -> tuple[Array, WordSums]:
        return replaced(options, step, block, piece, *exchange.placed(piv, low, A.shape[0]))

    block = A
    (X, words), report = run(options, step, {"A": A, "piv": piv, "rows": piece}, work)
    return Block.of(X, (*A.reports, *told(report)), words)


def named(name: str, block: Block, pieces: Sequence[Block]) -> dict[str, Block]:
    """A block and pieces of others, as the faults of a report call them."""
    return {name: block, **{f"rows {i}": piece for i, piece in enumerate(pieces)}}


def reports_of(*blocks: Block) -> tuple[Report, ...]:
    """Those of all these blocks."""
    return tuple(report for block in blocks for report in block.reports)
