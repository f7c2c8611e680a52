"""The graph of a protected LU with partial pivoting, right-looking: SLATE's and PLASMA's order of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
from dask.delayed import delayed

from abft_tsm2.arrays import dtype_name
from abft_tsm2.interop.dask import graphs
from abft_tsm2.interop.dask.exchange import Exchange
from abft_tsm2.interop.dask.panel import (
    COPIES,
    PanelOptions,
    below_diagonal,
    champion,
    contender,
    on_diagonal,
    part_of,
    whole,
    winner,
    zero_of,
)
from abft_tsm2.interop.dask.task import GraphOptions, Hook
from abft_tsm2.interop.dask.tiles import (
    BLOCKS_HELD,
    Key,
    TileProduct,
    TileSolve,
    TileTasks,
    as_collection,
    blocks,
    computed_in,
    in_squares,
    solved,
    starts,
    updated,
)
from abft_tsm2.linalg.lu_options import LuOptions
from abft_tsm2.linalg.outcome import Findings

PANELS = ("auto", "one", "tournament")
UNIT_LOWER = TileSolve(lower=True, unit=True)


def protected_lu_factor(
    a: Any,
    overwrite_a: bool = False,
    check_finite: bool = True,
    *,
    mode: str = "auto",
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
    block: int | None = None,
    preserve: str = "device",
    panel: str = "auto",
) -> Any:
    """`abft_tsm2.protected_lu_factor` of a Dask array, lazy: ``P A = L U`` with partial pivoting across all blocks.

    Parameters
    ----------
    a : (m, n) dask array
        Of NumPy or CuPy chunks. Rechunked to squares, of the size of its chunks of rows where these are of one size, so
        that square chunks stay as they are. Other real types than float32 are computed in float64.
    overwrite_a : bool
        Accepted for SciPy's sake; saves nothing.
    check_finite : bool
        Refuse NaN and Inf, when it is computed.
    mode : {"auto", "online", "offline"}
        As in `abft_tsm2.protected_lu_factor`, of each panel.
    on_error : {None, "correct", "detect", "raise"}
        As in `protected_gemm`.
    return_report : bool
        Return ``((lu, piv), report)`` with a `dask.delayed.Delayed` of the report of all tasks. Compute all at once.
    on_stage : callable, optional
        Called on the workers with the stages of the functions that a task is made of: of `protected_lu_factor`
        ("factored" and others), of `protected_gemm` ("multiplied" and others), "forward" (X) of a triangular solve,
        "moved" (X) where rows were put together. ``arrays["task"]`` names the task: ("product", i, k, j) is that of
        block (i, k) in step j. Has to be pickled.
    block, preserve
        Have no meaning here: the blocks are the chunks.
    panel : {"auto", "one", "tournament"}
        Where a panel (a column of blocks from the diagonal down) is factored. "one": as a whole, by one worker, whose
        pivots are LAPACK's. "tournament": block by block, with pivots that the blocks' pivot rows make out among
        themselves, two blocks at a time. "auto": "one" as long as four copies of the panel fit into 60 % of a worker's
        memory.

    Returns
    -------
    lu : (m, n) dask array
        U, and below its diagonal L without its unit diagonal, in the square chunks.
    piv : (min(m, n),) dask array of int32
        Row i was exchanged with row ``piv[i]``; a chunk for each panel.
    report : Delayed of Report
        With ``return_report=True``; ``report.products`` has one for each task that computed something, and for those
        that moved rows where something was found.

    Raises
    ------
    TypeError, ValueError
        What cannot be factored; `block` or `preserve` that are given. NaN or Inf in a, when it is computed.
    SilentDataCorruptionError
        When it is computed: a block of the result is wrong, or lost.

    Warns
    -----
    scipy.linalg.LinAlgWarning
        When it is computed: a pivot is exactly zero, the first of all panels; on a cluster at the client. The report
        says it as a reason.
    UnverifiableWarning
        The factors are not finite.

    See Also
    --------
    protected_lu_solve, protected_solve : solutions of linear systems.

    Notes
    -----
    Right-looking, by steps j: the panel is factored; the rows that its pivots exchange move, in all other columns;
    ``U(j, k) = L(j, j)^-1 A(j, k)``; ``A(i, k) -= L(i, j) U(j, k)``. Each is checked and repaired where it is computed,
    and blocks travel as in `protected_gemm`. No task reads a column of blocks but that of a panel on one worker: of the
    others only rows travel that move, and are compared with their sums where they arrive. The number of tasks is about
    N^3 for N x N blocks: 16 to 32 block columns keep some dozens of workers busy. With "one" pivots are those of
    `scipy.linalg.lu_factor`, but for candidates that are equal within rounding. A tournament factors each panel twice;
    its multipliers may be larger than 1, and elements grow more, but seldom by much (L. Grigori, J. W. Demmel and
    H. Xiang, SIAM J. Matrix Anal. Appl. 32 (2011) 1317). K.-H. Huang and J. A. Abraham, IEEE Trans. Computers C-33
    (1984) 518.

    Examples
    --------
    >>> import dask, dask.array as da
    >>> import abft_tsm2 as ft
    >>> from scipy.linalg import lu_solve
    >>> A = da.random.default_rng(0).standard_normal((200, 200), chunks=50)
    >>> A, factors, report = dask.compute(A, *ft.protected_lu_factor(A, return_report=True))
    >>> report.status.name, len(report.products)
    ('CLEAN', 24)
    >>> bool(abs(A @ lu_solve(factors, A[0]) - A[0]).max() < 1e-10)
    True
    """
    LuOptions(on_stage=on_stage, on_error=on_error, mode=mode, check_finite=check_finite)
    refuse(block=(block, None), preserve=(preserve, "device"))
    if panel not in PANELS:
        raise ValueError(f"unknown panel {panel!r}: choose one of {', '.join(PANELS)}")
    a = as_collection(a, "a")
    if a.ndim != 2:
        raise ValueError(f"a must be a matrix; it has {a.ndim} dimensions, shape {a.shape}")
    dtype, K = computed_in(a), min(a.shape)
    problem = a.shape[0], K, a.shape[1], dtype_name(dtype)
    if K == 0:
        piv = da.zeros_like(a, shape=(0,), dtype=np.int32)
        report = delayed(Findings().report)("lu_factor", (a.shape[0], 0, a.shape[1]), problem[3], {})
        return ((a.astype(dtype), piv), report) if return_report else (a.astype(dtype), piv)
    a = in_squares(a)
    label = graphs.name("lu", a, dtype, check_finite, mode, panel, on_error, on_stage)
    options = GraphOptions(label, "lu_factor", on_error, on_stage)
    graphs.warn_of_large(np.dtype(dtype).itemsize, BLOCKS_HELD, a)

    operand = blocks(options, "a", a, dtype, check_finite)
    tasks = TileTasks(options, starts(a.chunks[0]))
    factors = Factors.of(tasks, operand, PanelOptions(mode), panel)
    graph = graphs.TaskGraph(options, tasks.layer, [operand], tasks.end())
    meta = np.empty_like(a._meta, shape=(0, 0), dtype=dtype)
    lu = graph.array("lu", factors.lu, a.chunks, meta)
    counts = tuple(min(n, K - first) for n, first in zip(a.chunks[1], starts(a.chunks[1]), strict=True) if first < K)
    pivots: dict[tuple[int, ...], Key] = {(0, j): key for j, key in factors.piv.items()}
    piv = graph.array("piv", pivots, ((1,), counts), np.empty_like(meta, dtype=np.int32))[0]
    return ((lu, piv), graph.report(factors.told(), problem)) if return_report else (lu, piv)


def refuse(**given: tuple[Any, Any]) -> None:
    """TypeError for an argument that is not as it is by default; `given`: each with its default."""
    for name, (value, default) in given.items():
        if value != default:
            raise TypeError(f"{name}={value!r} has no meaning for Dask arrays: their chunks are the blocks, and stay")


@dataclass
class Factors:
    """The keys of the factors of a matrix, and of its pivots.

    Attributes
    ----------
    tasks : TileTasks
    lu : dict of (i, k) to key
    piv : dict of j to key
    """

    tasks: TileTasks
    lu: dict[tuple[int, ...], Key]
    piv: dict[int, Key]

    @classmethod
    def of(cls, tasks: TileTasks, operand: graphs.Blocks, how: PanelOptions, panel: str) -> Factors:
        """Add the tasks that factor a matrix in square blocks."""
        M, N = operand.array.numblocks
        found = cls(tasks, {(i, k): operand.key(i, k) for i, k in np.ndindex(M, N)}, {})
        zero: Any = 0
        for j in range(min(M, N)):
            exchange = Exchange(tasks.starts[j], operand.array.chunks[0][j])
            if j == M - 1 or not by_tournament(operand.array, j, panel):
                zero = found._by_one(j, how, zero)
            else:
                zero = found._by_tournament(j, how, zero, exchange)
            column = [i for i in range(M) if i >= j]
            for k in range(N):
                rows = {i: found.lu[i, k] for i in column}
                if k > j:
                    found._trailing(j, k, exchange, rows)
                elif k < j:
                    tasks.exchange("left", (k, j), exchange, rows, j, found.piv[j])
                    found.lu |= {(i, k): key for i, key in rows.items()}
        return found

    def told(self) -> list[Key]:
        """The keys that have reports, each of other tasks."""
        return [*self.lu.values(), *self.piv.values(), *self.tasks.told]

    def _by_one(self, j: int, how: PanelOptions, zero: Any) -> Key:
        """Step j's panel, by one worker."""
        tasks, column = self.tasks, [i for i, k in self.lu if k == j and i >= j]
        blocks = [self.lu[i, j] for i in column]
        panel = tasks.add(whole, "panel", (j,), how, tasks.starts[j], zero, blocks)
        for number, i in enumerate(column):
            self.lu[i, j] = tasks.add(part_of, "factor", (i, j), panel, number)
        return self._pivots(j, panel)

    def _pivots(self, j: int, panel: Key) -> Key:
        self.piv[j] = self.tasks.add(part_of, "pivots", (j,), panel, None)
        return self.tasks.add(zero_of, "zero", (j,), panel)

    def _by_tournament(self, j: int, how: PanelOptions, zero: Any, exchange: Exchange) -> Key:
        """Step j's panel, by a tournament."""
        tasks, column = self.tasks, {i: key for (i, k), key in self.lu.items() if k == j and i >= j}
        low = tasks.starts
        left = [tasks.add(contender, "contender", (i, j), how, low[i], key) for i, key in column.items()]
        turn = 0
        while len(left) > 2:
            pairs = [left[at : at + 2] for at in range(0, len(left), 2)]
            left = [
                tasks.add(winner, "winner", (turn, at, j), how, *pair) if len(pair) == 2 else pair[0]
                for at, pair in enumerate(pairs)
            ]
            turn += 1
        panel = tasks.add(champion, "champion", (j,), how, low[j], zero, *left)
        packed = tasks.add(part_of, "packed", (j,), panel, 0)
        tasks.told.append(packed)
        following, piv = self._pivots(j, panel), self.piv[j]
        down = tasks.rows_down("panel", (j,), exchange, column[j], piv)
        for i, key in column.items():
            if i == j:
                self.lu[i, j] = tasks.add(on_diagonal, "factor", (i, j), exchange, key, piv, packed)
            else:
                self.lu[i, j] = tasks.add(below_diagonal, "factor", (i, j), exchange, low[i], key, down, piv, packed)
        return following

    def _trailing(self, j: int, k: int, exchange: Exchange, rows: Mapping[int, Key]) -> None:
        """U(j, k) = L(j, j)^-1 A(j, k), and A(i, k) -= L(i, j) U(j, k), of rows that have been exchanged."""
        tasks, piv, lows = self.tasks, self.piv[j], self.tasks.starts
        ups, down = tasks.moving("right", (k, j), exchange, rows, j, piv)
        moved = exchange, lows[j + 1 :], ups, piv
        U = self.lu[j, k] = tasks.add(solved, "solved", (j, k), UNIT_LOWER, self.lu[j, j], rows[j], *moved)
        for i, key in rows.items():
            if i > j:
                moved_below = exchange, lows[i], down, piv
                L = self.lu[i, j]
                self.lu[i, k] = tasks.add(updated, "product", (i, k, j), TileProduct(), key, L, U, *moved_below)


def by_tournament(a: Any, j: int, panel: str) -> bool:
    """Whether panel j is for a tournament: where it is asked for, or a worker has no room for it."""
    if panel != "auto":
        return panel == "tournament"
    limit, _ = graphs.smallest_worker()
    rows: int = sum(a.chunks[0][j:])
    return bool(limit and COPIES * rows * a.chunks[1][j] * a.itemsize > graphs.SHARE * limit)
