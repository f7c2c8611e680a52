"""Steps on the tiles of a matrix, of which factorisations and solutions are made, and the graph that they form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dask.array as da
import numpy as np
from dask.core import keys_in_tasks

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, dtype_name, float_type, is_numpy, namespace
from abft_tsm2.checksum.rigorous import substituted_rounding
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.gemm import protected_gemm as product_here
from abft_tsm2.interop.dask import graphs
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.exchange import (
    Exchange,
    exchanged_above,
    exchanged_below,
    gathered,
    named,
    replaced,
    reports_of,
    rows_down,
    rows_up,
)
from abft_tsm2.interop.dask.stages import checked, hook_of, watched
from abft_tsm2.interop.dask.task import GraphOptions, run
from abft_tsm2.linalg.inputs import as_array, for_blas
from abft_tsm2.linalg.outcome import Findings
from abft_tsm2.linalg.substitution import Work, substitution
from abft_tsm2.linalg.triangular import Triangle, Weighed, summing_weights
from abft_tsm2.report import Report, Status

Key = tuple[Any, ...]
BLOCKS_HELD = 6  # by a task: A, L, U, the rows that come down, the result, and one on its way to the next


# ---- operands -----------------------------------------------------------------------------------------------------


def as_collection(x: Any, name: str) -> Any:
    """A dask array of known chunks, of a type that LAPACK has or that is computed in one; an array is taken in."""
    graphs.require_shape(x, name)
    if not isinstance(x, da.Array):
        x = da.from_array(as_array(x, name, check_finite=False))
    if any(math.isnan(n) for n in x.shape):
        raise ValueError(f"{name} has chunks of unknown sizes: call {name}.compute_chunk_sizes() first")
    as_array(x._meta, name, check_finite=False)
    return x


def computed_in(*operands: Any) -> Any:
    """The type in which these are factored or solved."""
    return np.result_type(*(as_array(x._meta, "a", check_finite=False).dtype for x in operands))


def in_squares(a: Any) -> Any:
    """The matrix in square chunks, but for the last ones: of the size that its rows have, or else its columns; where
    neither is one size, of about as many elements as the largest one has."""
    rows, columns = (_uniform(sizes) for sizes in a.chunks)
    most = max(a.shape)
    several = [size for size, sizes in ((rows, a.chunks[0]), (columns, a.chunks[1])) if size and len(sizes) > 1]
    if several:
        side = several[0]
    elif rows and columns:
        side = min(most, max(rows, columns))
    else:
        side = min(most, math.isqrt(max(a.chunks[0]) * max(a.chunks[1])))
    return a.rechunk((side, side))


def _uniform(sizes: Sequence[int]) -> int:
    """The size of all but the last, which is no larger; 0 where there is none."""
    return sizes[0] if {*sizes[:-1]} <= {sizes[0]} and sizes[-1] <= sizes[0] else 0


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each of these begins."""
    return [0, *np.cumsum(sizes).tolist()][: len(sizes)]


def read(chunk: graphs.Chunk, x: Any, dtype: Any, check_finite: bool) -> Block:
    """A chunk of an operand, by rows, as the first task that reads it has it."""
    chunk.require(x)
    return Block.of(by_rows(as_array(x, chunk.operand, check_finite=check_finite), dtype))


def by_rows(x: Array, dtype: Any) -> Array:
    xp = namespace(x)
    x = xp.astype(x, dtype, copy=False)
    return x if x.flags.c_contiguous else xp.asarray(x, copy=True, order="C")


def blocks(options: GraphOptions, operand: str, x: Any, dtype: Any, check_finite: bool) -> graphs.Blocks:
    """The tasks that read the chunks of a matrix, and sum their words."""
    label = options.label(f"read-{operand}")
    chunks = graphs.chunks_of(operand, x)
    layer = {(label, *at): (read, chunk, (x.name, *at), dtype, check_finite) for at, chunk in chunks.items()}
    return graphs.Blocks(label, layer, x)


# ---- the graph ----------------------------------------------------------------------------------------------------


@dataclass
class TileTasks:
    """The tasks of one operation.

    Attributes
    ----------
    options : GraphOptions
    starts : list of int
        The first row of each row of blocks.
    layer : dict
    told : list of keys
        Blocks that have reports, beside those of the result: many tasks read them, and none passes their reports on.
    """

    options: GraphOptions
    starts: list[int]
    layer: dict[Key, Any] = field(default_factory=dict)
    told: list[Key] = field(default_factory=list)

    def add(self, task: Callable[..., Any], kind: str, at: tuple[int, ...], *arguments: Any) -> Key:
        """Add a task, and return its key."""
        key = (self.options.label(kind), *at)
        self.layer[key] = (task, self.options, (kind, *at), *arguments)
        return key

    def end(self) -> Key:
        """Add the task behind all that there are so far: what it waits for stays where it is, and is not read."""
        read = set(keys_in_tasks(self.layer, self.layer.values()))
        unread = [key for key in self.layer if key not in read]
        return self.add(ended, "end", (), [self.add(ended, "ended", (at,), key) for at, key in enumerate(unread)])

    def moving(
        self, kind: str, at: tuple[int, ...], exchange: Exchange, column: Mapping[int, Key], j: int, piv: Key
    ) -> tuple[list[Key], Key | None]:
        """The rows of a column of blocks that change places in step j: of each block below block j those that go up
        there, and those that leave it. `at`: which column, and when."""
        below = [i for i in column if i > j]
        ups = [self.add(rows_up, f"{kind}-up", (i, *at), exchange, self.starts[i], column[i], piv) for i in below]
        return ups, self.rows_down(kind, at, exchange, column[j], piv) if below else None

    def rows_down(self, kind: str, at: tuple[int, ...], exchange: Exchange, above: Key, piv: Key) -> Key:
        """The rows that leave the first block of an exchange."""
        down = self.add(rows_down, f"{kind}-down", at, exchange, above, piv)
        self.told.append(down)
        return down

    def exchange(
        self, kind: str, at: tuple[int, ...], exchange: Exchange, column: dict[int, Key], j: int, piv: Key
    ) -> None:
        """Exchange the rows of a column of blocks, whose keys are replaced."""
        ups, down = self.moving(kind, at, exchange, column, j, piv)
        lows = self.starts[j + 1 :]
        above = self.add(exchanged_above, f"{kind}-above", at, exchange, lows, column[j], ups, piv)
        for i in [i for i in column if i > j]:
            arguments = exchange, self.starts[i], column[i], down, piv
            column[i] = self.add(exchanged_below, f"{kind}-below", (i, *at), *arguments)
        column[j] = above


def ended(options: GraphOptions, step: tuple[Any, ...], result: Any) -> None:
    """Nothing: a task that waits for this one waits for those that it needs, and has none of their data."""


# ---- C - A B ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileProduct:
    """How a product is taken off a block: ``C -= A B``, with A or B transposed."""

    turn_a: bool = False
    turn_b: bool = False


def updated(
    options: GraphOptions,
    step: tuple[Any, ...],
    how: TileProduct,
    c: Block,
    a: Block,
    b: Block,
    exchange: Exchange | None = None,
    low: int = 0,
    rows: Block | None = None,
    piv: Block | None = None,
) -> Block:
    """``C(i, k) -= A(i, j) B(j, k)``, once C has got its new `rows` where there is an exchange."""
    taken: list[WordSums] = []
    hook = hook_of(options, step)

    def work(C: Array, A: Array, B: Array, rows: Array = None, piv: Array = None) -> Array:
        taken.clear()
        if exchange is not None and piece is not None:
            C, _ = replaced(options, step, c, piece, *exchange.placed(piv, low, C.shape[0]))
        watch = watched(hook, {"multiplied": "C"}, taken) if is_numpy(C) else hook
        A, B = A.T if how.turn_a else A, B.T if how.turn_b else B
        with np.errstate(all="ignore"):  # what is not finite shows in a verdict
            return product_here(A, B, C, alpha=-1.0, beta=1.0, on_stage=watch, on_error=on_error)

    piece = rows
    on_error = None if options.repairs else "detect"
    C, report = run(options, step, {"C": c, "A": a, "B": b, "rows": rows, "piv": piv}, work)
    return checked(C, c.reports, report, taken)


# ---- T^-1 B -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileSolve:
    """How a triangular system is solved.

    Attributes
    ----------
    lower, unit : bool
        Which triangle, of T or where `turned` of T', and whether its diagonal is ones.
    turned : bool
        The system is T' X = B.
    right : bool
        B is transposed first, and so is the solution at the end: with `turned` X T = B, without X T' = B.
    singular : bool
        Whether T may have zeros on its diagonal, of which the numerators have to be zeros, too, but for rounding: they
        are not divided.
    """

    lower: bool
    unit: bool
    turned: bool = False
    right: bool = False
    singular: bool = False


def solved(
    options: GraphOptions,
    step: tuple[Any, ...],
    how: TileSolve,
    t: Block,
    b: Block,
    exchange: Exchange | None = None,
    lows: Sequence[int] = (),
    pieces: Sequence[Block] = (),
    piv: Block | None = None,
) -> Block:
    """``X(j, k) = T(j, j)^-1 B(j, k)``, once B has got its new rows where there is an exchange: T's first columns, or
    rows, where it is not square."""
    taken: list[WordSums] = []

    def work(T: Array, B: Array, piv: Array = None, **others: Array) -> Array:
        taken.clear()
        if exchange is not None:
            B, _ = gathered(options, step, (b, *pieces), exchange.stacked(piv, lows))
        X, report = solution(options, step, how, T, B, taken)
        policy.deliver(report)
        return X

    X, report = run(options, step, {"T": t, "piv": piv, **named("B", b, pieces)}, work)
    return checked(X, reports_of(b, *pieces), report, taken)


def solution(
    options: GraphOptions, step: tuple[Any, ...], how: TileSolve, T: Array, B: Array, taken: list[WordSums]
) -> tuple[Array, Report]:
    """Solve, and check; the report is to be delivered. `taken`: is given the sums of X, as it was checked."""
    hook = hook_of(options, step)
    k = min(T.shape)
    T, zeros = T[:k, :k], None
    if how.singular:
        T, zeros = _without_zeros(T)
    T, B = (T.T if how.turned else T), (B.T if how.right else B)
    stage = "forward" if how.lower else "backward"
    watch = watched(hook, {stage: "X"}, taken) if is_numpy(T) else hook
    work = Work(watch, options.repairs)
    with np.errstate(all="ignore"):  # what is not finite shows in a verdict
        triangle = Triangle(for_blas(T), how.lower, how.unit)
        X = substitution(triangle, Weighed.of(for_blas(B), summing_weights(B)), stage, "X", work).X
        if zeros is not None and zeros.size:
            _require_no_pivots(triangle, X, B, zeros, work.findings)
    sizes, seconds = (k, k, int(B.shape[1])), work.clock.seconds
    report = work.findings.report(options.operation, sizes, dtype_name(B.dtype), seconds, checks=work.checks)
    if how.right:
        taken[:] = [replace(words, transposed=not words.transposed) for words in taken]
    return (X.T if how.right else X), report


def _without_zeros(U: Array) -> tuple[Array, Any]:
    """U with ones for zeros on its diagonal, and where."""
    xp = namespace(U)
    zeros = np.flatnonzero(np.asarray(xp.linalg.diagonal(U) == 0))
    if zeros.size:
        U = xp.asarray(U, copy=True)
        U[zeros, zeros] = 1.0
    return U, zeros


def _require_no_pivots(triangle: Triangle, X: Array, B: Array, zeros: Any, findings: Findings) -> None:
    """Refuse multipliers of a pivot that is zero, unless they are what rounding leaves of zeros."""
    xp, n = namespace(X), X.shape[0]
    sizes = xp.abs(triangle.T) @ xp.abs(X) + xp.abs(B)
    bound = substituted_rounding(float_type(X), 4 * n) * sizes[zeros, :]
    if not bool(xp.all((xp.abs(X[zeros, :]) <= bound) & xp.isfinite(bound))):
        findings.statuses.append(Status.UNCORRECTABLE)
        findings.reasons.append('a pivot that the tournament chose is zero and others are not: use panel="one"')
