"""A layer of tasks, computed for whoever sends it; it refuses a computation of which nobody would be told."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from dask.highlevelgraph import MaterializedLayer

from abft_tsm2.interop.dask.task import GraphOptions


class TaskLayer(MaterializedLayer):
    """The protected tasks of a graph. A client sends layers, the scheduler single tasks.

    Raises
    ------
    ValueError
        When they are computed: with ``scheduler="processes"``.
    """

    def __init__(self, mapping: Mapping[Any, Any], options: GraphOptions) -> None:
        super().__init__(mapping)
        self.options = options

    def __getstate__(self) -> dict[str, Any]:
        self.options.claim()
        return self.__dict__

    def __iter__(self) -> Iterator[Any]:
        if _by_processes():
            raise ValueError(
                'scheduler="processes" cannot bring reports and warnings of protected tasks back to the caller: '
                'compute with scheduler="threads", or with a distributed.Client, whose workers are processes as well'
            )
        return iter(self.mapping)


def _by_processes() -> bool:
    """Whether Dask asks for the tasks to send them to processes that have no way to answer but with their results."""
    multiprocessing, frame = sys.modules.get("dask.multiprocessing"), sys._getframe()
    above: FrameType | None = frame if multiprocessing is not None else None
    while above is not None and above.f_code is not multiprocessing.get.__code__:  # type: ignore[union-attr]
        above = above.f_back
    return above is not None
