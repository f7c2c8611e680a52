"""Factor a panel of an LU: a column of blocks, from the diagonal down, on one worker or by a tournament.

On one worker it is factored as a whole, and its pivots are LAPACK's. In a tournament (L. Grigori, J. W. Demmel and
H. Xiang, CALU: a communication optimal LU factorization algorithm, SIAM J. Matrix Anal. Appl. 32, 2011) each block is
factored, and its pivot rows meet those of others, two blocks of rows at a time: no task holds more. The rows that win
are the pivots of the panel. What is left is L(i, j) = A(i, j) U(j, j)^-1.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, bit_pattern, from_host, is_numpy, namespace, to_host
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.core.blas import Integers, permutation
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.exchange import Exchange, differing, gathered, moved, replaced, reports_of, told
from abft_tsm2.interop.dask.place import worker
from abft_tsm2.interop.dask.stages import checked, hook_of, watched
from abft_tsm2.interop.dask.task import ATTEMPTS, GraphOptions, run
from abft_tsm2.interop.dask.tiles import TileSolve, solution
from abft_tsm2.linalg.lu import factored
from abft_tsm2.linalg.lu_options import LuOptions
from abft_tsm2.linalg.plain_lu import warn_of_zero
from abft_tsm2.report import Fault, Report, Status, by_precedence

COPIES = 4  # of a panel that the task which factors it holds: its blocks, A, its factors, and blocks of these
LOWER = TileSolve(lower=True, unit=False, turned=True, right=True, singular=True)  # L U = A, and U' L' = A'


@dataclass(frozen=True)
class PanelOptions:
    """How panels are factored.

    Attributes
    ----------
    mode : {"auto", "online", "offline"}
    solves : bool
        A pivot that is zero is an error, and not a warning.
    """

    mode: str
    solves: bool = False


class Panel(NamedTuple):
    """What a panel has become.

    Attributes
    ----------
    zero : int
        Number, from 1, of the first pivot of all panels so far that is exactly zero; 0 where there is none.
    piv : Block
        One row of them, as `lu_factor` counts.
    blocks : tuple of Block
        The packed factors; of a tournament those on the diagonal.
    """

    zero: int
    piv: Block
    blocks: tuple[Block, ...]


class Contender(NamedTuple):
    """Rows that may be pivots, as they are in A, and which rows of A they are: one row of numbers."""

    rows: Block
    numbers: Block


def zero_of(options: GraphOptions, step: tuple[Any, ...], panel: Panel) -> int:
    return panel.zero


def part_of(options: GraphOptions, step: tuple[Any, ...], panel: Panel, number: int | None) -> Block:
    """A block of a panel, or its pivots, on its own."""
    block = panel.piv if number is None else panel.blocks[number]
    array, report = run(options, step, {"LU": block}, lambda LU: LU)
    return Block.of(array, (*block.reports, *told(report)), block.words)


# ---- on one worker ------------------------------------------------------------------------------------------------


def whole(
    options: GraphOptions, step: tuple[Any, ...], how: PanelOptions, first: int, before: int, column: Sequence[Block]
) -> Panel:
    """``P A(j:, j) = L U``. `first`: the row where the panel begins; `before`: as `Panel.zero`."""
    edges = np.cumsum([0, *(block.array.shape[0] for block in column)]).tolist()
    parts = [slice(*ends) for ends in pairwise(edges)]

    def work(**arrays: Array) -> tuple[list[Array], Array, int]:
        A, _ = gathered(options, step, column)
        copies, piv, info, report = factors_of(options, step, how, A, parts)
        zero = _delivered(report, how, info and first + info)
        return copies, from_host(piv[None, :] + np.int32(first), A), zero

    given = {f"A({i})": block for i, block in enumerate(column, step[1])}
    (copies, piv, zero), report = run(options, step, given, work)
    _warn_once(zero, before)
    return Panel(before or zero, Block.of(piv, (*reports_of(*column), report)), tuple(map(Block.of, copies)))


def factors_of(
    options: GraphOptions, step: tuple[Any, ...], how: PanelOptions, A: Array, parts: Sequence[slice]
) -> tuple[list[Array], Integers, int, Report]:
    """Factor, and copy rows of the packed factors, as they were checked.

    Returns copies by rows, pivots on the host, the number of the first pivot that is exactly zero, and the report: it
    is to be delivered.
    """
    sums: list[WordSums] = []
    hook = hook_of(options, step)
    watch = watched(hook, {"factored": "W", "finished": "W"}, sums) if is_numpy(A) else hook
    on_error = None if options.repairs else "detect"
    lu_options = LuOptions(on_stage=watch, on_error=on_error, mode=how.mode, check_finite=False)
    for attempt in range(ATTEMPTS):
        sums.clear()
        done = factored(A, lu_options, warn=False)
        copies, again = ([_by_rows(done.W[rows]) for rows in parts] for _ in range(2))
        settled = all(map(_same, copies, again))
        if done.report.status is Status.CLEAN and sums:
            settled = settled and not sums[0].differ(done.W)
        if settled or not options.repairs or attempt == ATTEMPTS - 1:
            break
    report = done.report
    if attempt or not settled:
        now = Status.CORRECTED if settled else Status.UNCORRECTABLE
        status, also = by_precedence([now, report.status, *report.also])
        fault = Fault("LU", "block", (), (), 0, float("nan"), "factored again" if settled else "")
        report = replace(report, status=status, also=also, faults=(*report.faults, fault))
    return copies, to_host(done.piv), done.info, report


def _delivered(report: Report, how: PanelOptions, zero: int) -> int:
    """Deliver the report, which says that pivot `zero` is zero, if not 0; the same number."""
    if zero and how.solves:
        raise np.linalg.LinAlgError("A singular matrix detected.")
    policy.deliver(replace(report, reasons=(*report.reasons, _singular(zero))) if zero else report)
    return zero


def _by_rows(X: Array) -> Array:
    return namespace(X).asarray(X, copy=True, order="C")


def _same(X: Array, Y: Array) -> bool:
    return bool(namespace(X).all(bit_pattern(X) == bit_pattern(Y)))


def _singular(number: int) -> str:
    """SciPy's text."""
    return f"Diagonal number {number} is exactly zero. Singular matrix."


def _warn_once(zero: int, before: int) -> None:
    """SciPy's warning, of the first pivot that is zero; on a cluster at the client as well."""
    if not zero or before:
        return
    if worker() is None:
        warn_of_zero(zero)
    else:
        distributed, linalg = importlib.import_module("distributed"), importlib.import_module("scipy.linalg")
        distributed.warn(_singular(zero), linalg.LinAlgWarning)


# ---- by a tournament ----------------------------------------------------------------------------------------------


def contender(options: GraphOptions, step: tuple[Any, ...], how: PanelOptions, low: int, A: Block) -> Contender:
    """The pivot rows of one block, which begins at row `low`."""

    def work(A: Array) -> Any:
        return _winners(options, step, how, [block], np.arange(low, low + A.shape[0])[None, :])

    block = A
    (X, words, numbers), report = run(options, step, {"A": A}, work)
    return Contender(Block.of(X, (), words), Block.of(numbers, (report,)))


def winner(
    options: GraphOptions, step: tuple[Any, ...], how: PanelOptions, one: Contender, other: Contender
) -> Contender:
    """The pivot rows of two contenders."""

    def work(**arrays: Array) -> Any:
        return _winners(options, step, how, [one.rows, other.rows], _numbers(one, other))

    (X, words, numbers), report = run(options, step, _both(one, other), work)
    return Contender(Block.of(X, (), words), Block.of(numbers, (*_reports(one, other), report)))


def champion(
    options: GraphOptions,
    step: tuple[Any, ...],
    how: PanelOptions,
    first: int,
    before: int,
    one: Contender,
    other: Contender,
) -> Panel:
    """The last round: the pivots of the panel, and the factors of their rows."""

    def work(**arrays: Array) -> Any:
        A, _ = gathered(options, step, [one.rows, other.rows])
        k = int(A.shape[1])
        (packed,), piv, info, report = factors_of(options, step, how, A, [slice(0, k)])
        zero = _delivered(report, how, info and first + info)
        numbers = _numbers(one, other)[0, permutation(piv, A.shape[0])[:k]]
        return packed, from_host(_exchanges(numbers.tolist(), first)[None, :], A), zero

    (packed, piv, zero), report = run(options, step, _both(one, other), work)
    _warn_once(zero, before)
    return Panel(before or zero, Block.of(piv, (*_reports(one, other), report)), (Block.of(packed),))


def _winners(
    options: GraphOptions, step: tuple[Any, ...], how: PanelOptions, blocks: Sequence[Block], numbers: Any
) -> tuple[Array, WordSums, Any]:
    """Pivot rows of these blocks, one under the other, and their numbers."""
    A, _ = gathered(options, step, blocks)
    _, piv, _, report = factors_of(options, step, how, A, [])
    if report.status is Status.UNVERIFIABLE:  # these factors are not kept: any rows are as right as any others
        report = replace(report, status=Status.CLEAN, reasons=())
    policy.deliver(report)
    order = permutation(piv, A.shape[0])[: piv.size]
    X, words = gathered(options, step, blocks, order)
    return X, words, numbers[:, order]


def _numbers(one: Contender, other: Contender) -> Any:
    return np.concatenate([one.numbers.array, other.numbers.array], axis=1)


def _both(one: Contender, other: Contender) -> dict[str, Block]:
    return {"rows": one.rows, "numbers": one.numbers, "rows 2": other.rows, "numbers 2": other.numbers}


def _reports(one: Contender, other: Contender) -> tuple[Report, ...]:
    return reports_of(one.numbers, other.numbers)


def _exchanges(rows: Sequence[int], first: int) -> Integers:
    """Exchanges, one after the other, that bring these rows to the places from `first` on: LAPACK's pivots."""
    held: dict[int, int] = {}  # the row at a place, and the place of a row, of those that have moved
    place_of: dict[int, int] = {}
    piv = np.empty(len(rows), np.int32)
    for at, row in enumerate(rows):
        place, there = first + at, place_of.get(row, row)
        piv[at], leaves = there, held.get(place, place)
        held[there], place_of[leaves] = leaves, there
    return piv


def on_diagonal(
    options: GraphOptions, step: tuple[Any, ...], exchange: Exchange, A: Block, piv: Block, packed: Block
) -> Block:
    """Block j after a tournament: the factors of the pivot rows, and below them, where the block has more rows than
    columns, L(j, j) = A(j, j) U(j, j)^-1."""
    taken: list[WordSums] = []

    def work(A: Array, piv: Array, LU: Array) -> tuple[Array, WordSums]:
        xp, k = namespace(LU), LU.shape[0]
        if A.shape[0] == k:
            return LU, packed.words
        rest, _ = gathered(options, step, [block], exchange.gathered(piv)[k:] - exchange.first)
        X, report = solution(options, step, LOWER, LU, rest, taken)
        policy.deliver(report)
        return moved(
            options, step, lambda: xp.concat([LU, X], axis=0), lambda Y: differing(Y, xp.concat([LU, X], axis=0))
        )

    block = A
    (X, words), report = run(options, step, {"A": A, "piv": piv, "LU": packed}, work)
    return Block.of(X, (*A.reports, *((report,) if report.checks else told(report))), words)


def below_diagonal(
    options: GraphOptions,
    step: tuple[Any, ...],
    exchange: Exchange,
    low: int,
    A: Block,
    rows: Block,
    piv: Block,
    packed: Block,
) -> Block:
    """Block i > j after a tournament: ``L(i, j) = A(i, j) U(j, j)^-1``, once A has got its new `rows`."""
    taken: list[WordSums] = []

    def work(A: Array, rows: Array, piv: Array, LU: Array) -> Array:
        taken.clear()
        A, _ = replaced(options, step, block, piece, *exchange.placed(piv, low, A.shape[0]))
        X, report = solution(options, step, LOWER, LU, A, taken)
        policy.deliver(report)
        return X

    block, piece = A, rows
    X, report = run(options, step, {"A": A, "rows": rows, "piv": piv, "LU": packed}, work)
    return checked(X, A.reports, report, taken)
