"""Where faults are planted into the procedures that users run: places that a planter is called at, and no other route.

An ``on_stage`` hook is an argument of a call, and chooses the procedure that has all stages. A planter is set for a
block of code; every protected operation in it goes the way it goes without, and calls the planter in its places with
the live arrays, as it would call a hook. There is none in ordinary use, and a place costs one look at a context
variable: each thread and each asynchronous task has its own, as with `abft_tsm2.policy.errstate`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array

Planter = Callable[[str, Mapping[str, Array]], None]
"""``planter(stage, arrays)`` writes to the arrays."""

_planter: ContextVar[Planter | None] = ContextVar("abft_tsm2_planter", default=None)
current = _planter.get
"""The planter in force, or None."""


_numbers = itertools.count(1)
_number: ContextVar[int] = ContextVar("abft_tsm2_planting", default=0)
number = _number.get
"""Of the block that is in force: no other block of this process has it. 0 outside of all."""


@contextmanager
def planting(planter: Planter | None) -> Iterator[None]:
    """Let a planter act in the block, in place of the one before; None: none."""
    before = _planter.set(planter), _number.set(0 if planter is None else next(_numbers))
    try:
        yield
    finally:
        _planter.reset(before[0])
        _number.reset(before[1])


def watcher(on_stage: Planter | None) -> Planter | None:
    """What sees the live arrays of a call: its own hook, or the planter in force."""
    return current() if on_stage is None else on_stage


def record(planter: Planter, stage: str, stream: int, arrays: Mapping[str, Array]) -> list[Any]:
    """Let a planter put its faults into the graph that is captured on a stream, given by its handle: what they need, to
    be kept as long as the graph. The arrays are matrices on a GPU, or stacks of them.

    Raises
    ------
    RuntimeError
        For a planter that only acts when it is called: in a graph that would be once.
    """
    if not hasattr(planter, "record"):
        raise RuntimeError("a function plants nothing into a CUDA graph: use faults.inject")
    kept: list[Any] = planter.record(stage, stream, arrays)
    return kept


def reach(planter: Planter, stage: str, **arrays: Array) -> None:
    """Call a planter at a stage with vectors and matrices; with stacks once for each product, in their order.

    A matrix among stacks is that of every product, as in `numpy.matmul`. Warnings of what is planted are not the
    caller's.
    """
    batch = np.broadcast_shapes(*(x.shape[:-2] for x in arrays.values()))
    with np.errstate(all="ignore"):
        for index in np.ndindex(*batch):
            planter(stage, {name: of_product(x, index) for name, x in arrays.items()})


def of_product(X: Array, index: tuple[int, ...]) -> Array:
    """The matrix of a stack that belongs to a product of the batch."""
    own = X.shape[:-2]
    at = index[len(index) - len(own) :]
    return X[tuple(i if size > 1 else 0 for i, size in zip(at, own, strict=True))] if own else X
