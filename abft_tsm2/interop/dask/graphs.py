"""Graphs of tasks that hand blocks to one another: their names, keys and layers, and what comes out of them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.blockwise import Blockwise
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, as_operand, dtype_name, float_type, is_numpy, namespace
from abft_tsm2.checksum.bounds import Arithmetic
from abft_tsm2.checksum.encoded import Encoded
from abft_tsm2.core import faultpoint
from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.gemm.host import carried_by
from abft_tsm2.interop.dask import delivered, events
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.layer import TaskLayer
from abft_tsm2.interop.dask.recovery import found_before
from abft_tsm2.interop.dask.streams import stream_for
from abft_tsm2.interop.dask.task import GraphOptions, run
from abft_tsm2.report import Report, Status

SHARE = 0.6  # of a worker's memory that Dask fills before it spills
_ROUND = 256  # chunks to choose are multiples of that


def as_collection(x: Any, name: str) -> Any:
    """A dask array of known chunks and of a type that can be protected; an array is taken in."""
    if isinstance(x, Encoded):
        raise TypeError(f"{name} is encoded: blocks of Dask arrays carry sums of their own; pass its .array")
    require_shape(x, name)
    if not isinstance(x, da.Array):
        x = da.from_array(as_operand(x, name))
    if any(math.isnan(n) for n in x.shape):
        raise ValueError(f"{name} has chunks of unknown sizes: call {name}.compute_chunk_sizes() first")
    as_operand(x._meta, name)
    return x


def require_shape(x: Any, name: str) -> None:
    """TypeError for what Dask computes later and knows no shape of."""
    if isinstance(x, Delayed):
        raise TypeError(f"{name} is a Delayed, of no known shape: pass dask.array.from_delayed({name}, shape, dtype)")


def name(operation: str, *parts: Any) -> str:
    """Of a graph: the same for the same operation on the same arrays under the same policy."""
    return f"protected-{operation}-{tokenize(*parts, policy.geterr(), events.ORIGIN, id(faultpoint.current()))}"


@dataclass(frozen=True)
class Chunk:
    """What a Dask array says of one of its chunks.

    Attributes
    ----------
    operand : str
    shape : tuple of int
    dtype : str
    arithmetic : Arithmetic, optional
        Of the products whose right operand it is: it carries sums into them.
    """

    operand: str
    shape: tuple[int, ...]
    dtype: str
    arithmetic: Arithmetic | None = None

    def require(self, x: Any) -> None:
        """ValueError where the chunk is another one."""
        found = tuple(x.shape), dtype_name(x.dtype)
        if found != (self.shape, self.dtype):
            raise ValueError(
                f"{self.operand} has a chunk of shape {found[0]} and dtype {found[1]} where the Dask array says "
                f"{self.shape} and {self.dtype}: give what made it (map_blocks, from_delayed) the right chunks= or "
                "shape=, and dtype="
            )


def chunks_of(operand: str, x: Any, arithmetic: Arithmetic | None = None) -> dict[tuple[int, ...], Chunk]:
    """Those of a Dask array, by their places in it."""
    dtype = dtype_name(x.dtype)
    return {
        at: Chunk(operand, tuple(sizes[part] for sizes, part in zip(x.chunks, at, strict=True)), dtype, arithmetic)
        for at in np.ndindex(*x.numblocks)
    }


def read(chunk: Chunk, x: Any) -> Block:
    """A chunk of an operand, as the first task that reads it has it, and with the sums that it carries."""
    array = as_operand(x, chunk.operand)
    chunk.require(array)
    with stream_for(array):
        block = Block.of(array)
    if chunk.arithmetic is not None and is_numpy(block.array):
        # to be compared elsewhere, where another BLAS may round otherwise
        block.carried = carried_by(block.array, chunk.arithmetic)._replace(lasting=True)
    return block


@dataclass(frozen=True)
class Streamed:
    """A chunk that each task computes for itself: it comes from a file, and is not kept."""

    chunk: Chunk
    node: Any

    def read(self) -> Block:
        return read(self.chunk, self.node())


@dataclass(frozen=True)
class Blocks:
    """The blocks of an operand: a layer of tasks that read them; or none, where each task reads them for itself."""

    name: str
    layer: Mapping[Any, Any]
    array: Any
    streamed: Mapping[Any, Streamed] | None = None

    def key(self, *at: int) -> Any:
        """What a task is given for a block."""
        return (self.name, *at) if self.streamed is None else self.streamed[at]


def blocks(
    options: GraphOptions, operand: str, x: Any, arithmetic: Arithmetic | None = None, *, stream: bool = False
) -> Blocks:
    """The tasks that read the chunks of a matrix, and sum their words; `arithmetic` as in `Chunk`.

    `stream`: chunks that follow from nothing in memory, as those of files do, are read by each task that needs them, as
    Dask's own product does. To keep them all would take the memory that they were to save.
    """
    label = options.label(f"read-{operand}")
    chunks = chunks_of(operand, x, arithmetic)
    if stream and (nodes := _sources(x)) is not None:
        return Blocks(label, {}, x, {at: Streamed(chunk, nodes[(x.name, *at)]) for at, chunk in chunks.items()})
    layer = {(label, *at): (read, chunk, (x.name, *at)) for at, chunk in chunks.items()}
    return Blocks(label, layer, x)


def read_once(operand: Blocks, *others: Blocks) -> Blocks:
    """The operand, or another one that has read the same array: of two reads of a chunk, the second one would take what
    changed behind the first for the operand."""
    return next((one for one in others if one.streamed is None and one.array.name == operand.array.name), operand)


def _sources(x: Any) -> Mapping[Any, Any] | None:
    """The tasks that make the chunks out of nothing, or None: element by element, without data of their own."""
    if not all(isinstance(layer, Blockwise) for layer in x.dask.layers.values()):
        return None
    keys = [(x.name, *at) for at in np.ndindex(*x.numblocks)]
    nodes = dict(da.Array.__dask_optimize__(x.dask, keys))
    return nodes if all(key in nodes and not nodes[key].dependencies for key in keys) else None


class LazyReport(Delayed):
    """A report to be computed, optimised together with the arrays that it is of: what one of two graphs fuses, and the
    other does not, would be computed by both."""

    __dask_optimize__ = da.Array.__dict__["__dask_optimize__"]


@dataclass(frozen=True)
class TaskGraph:
    """The tasks of one operation, and of reading its operands."""

    options: GraphOptions
    layer: dict[Any, Any]
    operands: Sequence[Blocks]
    end: Any = None  # of an operation whose tasks read blocks of the result: the task behind all of these
    final: dict[Any, Any] = field(default_factory=dict)  # of a block of the result: the task that settles it

    def _high_level(self, label: str, ends: Mapping[Any, Any]) -> Any:
        layers: dict[str, Any] = {}
        depends: dict[str, set[str]] = {}
        for one in self.operands:
            if one.streamed is None:
                layers |= {**one.array.dask.layers, one.name: dict(one.layer)}
                depends |= {**one.array.dask.dependencies, one.name: set(one.array.__dask_layers__())}
        steps = f"{self.options.name}-steps"
        layers |= {name: TaskLayer(dict(tasks), self.options) for name, tasks in ((steps, self.layer), (label, ends))}
        depends |= {steps: {one.name for one in self.operands if one.streamed is None}, label: {steps}}
        return HighLevelGraph(layers, depends)

    def array(self, part: str, keys: Mapping[tuple[int, ...], Any], chunks: Any, meta: Any, dtype: Any = None) -> Any:
        """The dask array of blocks that are there at these keys."""
        label = f"{self.options.name}-{part}"
        final = {key: (f"{label}-settled", *at) for at, key in keys.items()}
        self.final.update(final)
        how = dtype, self.end
        self.layer.update({end: (settled, self.options, (part, *end[1:]), key, *how) for key, end in final.items()})
        ends = {
            (label, *at): (returned, self.options, (f"{part}-returned", *at), final[key]) for at, key in keys.items()
        }
        if (client := events.current_client()) is not None:
            events.subscribe(client)
        return da.Array(self._high_level(label, ends), label, chunks, meta=meta)

    def report(self, keys: Sequence[Any], problem: tuple[int, int, int, str]) -> Any:
        """The report of everything, once it is computed."""
        label = self.options.label("report")
        last = [self.final.get(key, key) for key in keys]
        ends: dict[Any, Any] = {f"{label}-{number}": (_reports_of, key) for number, key in enumerate(last)}
        ends[label] = (gathered, self.options.operation, problem, list(ends))
        return LazyReport(label, self._high_level(label, ends))


def settled(options: GraphOptions, step: tuple[Any, ...], block: Block, dtype: Any = None, end: None = None) -> Block:
    """A block of the result, compared with its sums once more; rounded to 16 bits where it was summed in 32.

    It waits for the `end` of what reads blocks of the result. On one machine these read the memory that the user gets:
    a reader that finds a block changed takes a restored copy, and the memory stays as it is.
    """

    def taken(C: Array) -> Array:
        if dtype is None:
            return C
        xp = namespace(C)
        with np.errstate(all="ignore"):
            rounded = xp.astype(C, dtype)
            off, kind = xp.abs(xp.astype(rounded, C.dtype) - C), float_type(rounded)
            fits = off <= kind.unit_roundoff * xp.abs(C) + kind.smallest_subnormal
            # what is not finite stays as it is, and what is beyond the type has its sign
            beyond = (xp.abs(C) > kind.largest) & xp.isinf(rounded) & (xp.signbit(rounded) == xp.signbit(C))
            fine = fits | beyond | (xp.isnan(C) & xp.isnan(rounded))
        if not bool(xp.all(fine)):
            raise SilentDataCorruptionError(_unrounded(options, block))
        return rounded

    with stream_for(block.array):
        array = taken(block.array)
        if _is_unchanged(options, step, block):
            return block if dtype is None else Block.of(block.as_given(array), block.reports)
    array, report = run(options, step, {"C": block}, taken)
    return Block.of(block.as_given(array), (*block.reports, report))


def returned(options: GraphOptions, step: tuple[Any, ...], block: Block) -> Array:
    """What a chunk of the result is, compared once more: where the report is computed too, Dask fuses this task with
    none, and the block was in memory, or has travelled. The report is another task's, and does not have what is found
    here; monitors have."""
    with stream_for(block.array):
        array: Any = block.array if _is_unchanged(options, step, block) else None
    array = block.as_given(run(options, step, {"C": block}, lambda C: C)[0] if array is None else array)
    delivered.remember(array, block.words)
    return array


def _is_unchanged(options: GraphOptions, step: tuple[Any, ...], block: Block) -> bool:
    """Whether there is nothing to recover, now or in an earlier run."""
    return not bool(block.changed()) and not found_before(options.identity(step))


def _unrounded(options: GraphOptions, block: Block) -> Report:
    m, n = block.array.shape
    reasons = ("the result was not rounded to the nearest number of its type",)
    return Report(Status.UNCORRECTABLE, options.operation, m, 0, n, float_type(block.array).name, reasons=reasons)


def _reports_of(block: Block) -> tuple[Report, ...]:
    return block.reports


def gathered(operation: str, problem: tuple[int, int, int, str], reports: Sequence[Sequence[Report]]) -> Report:
    """One report of all tasks."""
    return Report.merge([one for part in reports for one in part], operation=operation, problem=problem)


def warn_of_large(itemsize: int, held: int, *arrays: Any) -> None:
    """Warn of chunks of which a worker has no room for as many as its tasks hold."""
    largest = max(math.prod(max(sizes, default=0) for sizes in x.chunks) * x.itemsize for x in arrays)
    limit, threads = smallest_worker()
    if not limit or held * threads * largest <= SHARE * limit:
        return
    side = math.isqrt(int(SHARE * limit / (held * threads * itemsize)))
    side = max(1, side // _ROUND * _ROUND or side)
    warnings.warn(
        f"chunks of {largest / 2**20:.0f} MiB are too large: {threads} threads of a worker hold {held} of them each, "
        f"and it has {limit / 2**20:.0f} MiB. Use chunks of {side} x {side} elements, x.rechunk(({side}, {side})), or "
        "fewer threads a worker",
        da.PerformanceWarning,
        stacklevel=4,
    )


def smallest_worker() -> tuple[int, int]:
    """Memory and threads of the worker with the least memory for each; of this machine where there is no cluster."""
    client = events.current_client()
    if client is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), os.cpu_count() or 1
    if client.asynchronous:
        return 0, 1
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    sizes = [(one["memory_limit"], one["nthreads"]) for one in workers if one["memory_limit"]]
    return min(sizes, key=lambda one: one[0] / one[1], default=(0, 1))
