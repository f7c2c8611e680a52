"""The graphs of protected solutions: substitution by blocks, and the residual of what was solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dask.array as da
import numpy as np
from dask.delayed import delayed

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, FloatType, dtype_name, float_type, namespace, to_host
from abft_tsm2.checksum.rigorous import solved_rounding, underflow
from abft_tsm2.gemm import protected_gemm as product_here
from abft_tsm2.interop.dask import graphs
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.exchange import Exchange, reports_of, told
from abft_tsm2.interop.dask.lu import PANELS, Factors, refuse
from abft_tsm2.interop.dask.panel import PanelOptions
from abft_tsm2.interop.dask.stages import hook_of
from abft_tsm2.interop.dask.task import GraphOptions, Hook, run
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
from abft_tsm2.linalg.inputs import pair_of, pivots_of
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.lu_options import LuOptions
from abft_tsm2.linalg.outcome import Findings, check_of
from abft_tsm2.linalg.structure import structure_of
from abft_tsm2.linalg.substitution import wrong_rows
from abft_tsm2.report import Status


def protected_lu_solve(
    lu_and_piv: Any,
    b: Any,
    trans: int = 0,
    overwrite_b: bool = False,
    check_finite: bool = True,
    *,
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
) -> Any:
    """`abft_tsm2.protected_lu_solve` of Dask arrays, lazy: ``a x = b`` with the factors of a.

    Parameters
    ----------
    lu_and_piv : tuple
        From `protected_lu_factor` or `scipy.linalg.lu_factor`: lu (n, n) and piv (n,), Dask arrays or arrays.
    b : (n,) or (n, r) dask array or array
        Rechunked to the rows of lu.
    trans : {0, 1, 2}
        0: ``a x = b``; 1 and 2: ``a' x = b``.
    overwrite_b : bool
        Accepted for SciPy's sake; saves nothing.
    check_finite : bool
        Refuse NaN and Inf, when it is computed.
    on_error, return_report, on_stage
        As in `protected_lu_factor`.

    Returns
    -------
    x : dask array
        Of b's shape.
    report : Delayed of Report
        With ``return_report=True``; one product for each task that computed something.

    Raises
    ------
    TypeError, ValueError
        Shapes that do not fit; when it is computed, NaN or Inf, and pivots that are not those of an LU: row i is
        exchanged with itself or a row below.
    SilentDataCorruptionError
        When it is computed: a block of the solution is wrong, or lost.

    Warns
    -----
    UnverifiableWarning
        The solution is not finite.

    Notes
    -----
    ``z(i) = L(i, i)^-1 (b(i) - sum_j L(i, j) z(j))``, j < i, and backward with U. Substitutions obey ``|b - T x| <=
    gamma_n |T| |x|`` in blocks as well (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 8.5
    and chapter 13). Rows of b move as in `protected_lu_factor`: no task reads all of b.

    Examples
    --------
    >>> import dask.array as da
    >>> import abft_tsm2 as ft
    >>> A = da.random.default_rng(0).standard_normal((120, 120), chunks=40).persist()
    >>> x = ft.protected_lu_solve(ft.protected_lu_factor(A), A[0])
    >>> bool(abs(A @ x - A[0]).max() < 1e-10)
    True
    """
    policy.check_on_error(on_error)
    if trans not in (0, 1, 2):
        raise ValueError(f"trans is {trans!r}: 0 for a x = b, 1 or 2 for a' x = b")
    lu, piv = pair_of(lu_and_piv)
    lu, b = as_collection(lu, "lu"), as_collection(b, "b")
    if lu.ndim != 2 or lu.shape[0] != lu.shape[1]:
        raise ValueError(f"lu has to be square, the factors of a square matrix; its shape is {lu.shape}")
    if b.ndim not in (1, 2) or b.shape[0] != lu.shape[0]:
        raise ValueError(f"Shapes of lu {lu.shape} and b {b.shape} are incompatible")
    dtype = computed_in(lu, b)
    if 0 in b.shape:
        return _nothing(b, dtype, "lu_solve", return_report)
    lu = in_squares(lu)
    piv = _pivots(piv, lu)
    label = graphs.name("lu-solve", lu, piv, b, dtype, trans, check_finite, on_error, on_stage)
    options = GraphOptions(label, "lu_solve", on_error, on_stage)
    right, shape = _in_rows(b, lu.chunks[0])
    graphs.warn_of_large(np.dtype(dtype).itemsize, BLOCKS_HELD, lu, right)

    factors, rights = (blocks(options, name, x, dtype, check_finite) for name, x in (("lu", lu), ("b", right)))
    tasks, numbers = TileTasks(options, starts(lu.chunks[0])), range(lu.numblocks[0])
    name, first, n = options.label("read-piv"), tasks.starts, lu.shape[0]
    chunks = graphs.chunks_of("piv", piv)
    layer = {(name, 0, j): (read_pivots, chunks[(j,)], (piv.name, j), first[j], n) for j in numbers}
    pivots = graphs.Blocks(name, layer, piv)
    keys: dict[tuple[int, ...], Key] = {(i, j): factors.key(i, j) for i in numbers for j in numbers}
    solution = Solution(tasks, Factors(tasks, keys, {j: pivots.key(0, j) for j in numbers}), lu.chunks[0])
    for c in range(right.numblocks[1]):
        solution.solve(c, {i: rights.key(i, c) for i in numbers}, int(trans))
    graph = graphs.TaskGraph(options, tasks.layer, [factors, rights, pivots], tasks.end())
    return solution.returned(graph, right, shape, dtype, return_report)


def protected_solve(
    a: Any,
    b: Any,
    lower: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    check_finite: bool = True,
    assume_a: str | None = None,
    transposed: bool = False,
    *,
    mode: str = "auto",
    refine: bool = False,
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
    panel: str = "auto",
) -> Any:
    """`abft_tsm2.protected_solve` of Dask arrays, lazy: ``a x = b`` by LU, and the residual of the solution checked.

    Parameters
    ----------
    a : (n, n) dask array or array
        Rechunked to squares, as in `protected_lu_factor`.
    b : (n,) or (n, r) dask array or array
        Rechunked to the rows of a.
    lower, assume_a
        SciPy's; every structure is solved by LU with pivoting, of all of a. With "sym", "her" or "pos" only the
        triangle that `lower` names is read.
    overwrite_a, overwrite_b
        Accepted for SciPy's sake.
    check_finite : bool
        Refuse NaN and Inf, when it is computed.
    transposed : bool
        Solve ``a' x = b``.
    refine : False
        There is no refinement of Dask arrays.
    mode, on_error, return_report, on_stage, panel
        As in `protected_lu_factor`.

    Returns
    -------
    x : dask array
        Of b's shape. Each of its blocks waits for the check of the whole residual.
    report : Delayed of Report
        With ``return_report=True``.

    Raises
    ------
    TypeError, ValueError
        Shapes that do not fit, with SciPy's messages; arguments that have no meaning here.
    numpy.linalg.LinAlgError
        When it is computed: a is singular, a pivot is exactly zero.
    SilentDataCorruptionError
        When it is computed: the solution is wrong, or a block is lost.

    Notes
    -----
    The residual obeys ``|b - A x| <= gamma_3n |L| |U| |x|`` (N. J. Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, theorem 9.4), element by element, with what rounding adds to the computed residual: n + 1
    operations of ``|A| |x| + |b|``. What fails is refused: factors and substitutions have been checked, and repaired,
    by then. The residual and the bound are sums of protected products, O(n^2 r) operations. The condition of a is not
    estimated: there is no warning of a matrix that is singular within rounding.

    Examples
    --------
    >>> import dask, dask.array as da
    >>> import abft_tsm2 as ft
    >>> A = da.random.default_rng(0).standard_normal((120, 120), chunks=40).persist()
    >>> x, report = dask.compute(*ft.protected_solve(A, A[0], return_report=True))
    >>> report.status.name, bool(abs(A @ x - A[0]).max() < 1e-10)
    ('CLEAN', True)
    """
    LuOptions(on_stage=on_stage, on_error=on_error, mode=mode, check_finite=check_finite)
    structure = structure_of(assume_a)
    refuse(refine=(refine, False))
    if panel not in PANELS:
        raise ValueError(f"unknown panel {panel!r}: choose one of {', '.join(PANELS)}")
    a, b = as_collection(a, "a"), as_collection(b, "b")
    if a.ndim != 2:
        raise ValueError(f"a must be a matrix; it has {a.ndim} dimensions, shape {a.shape}")
    if a.shape[0] != a.shape[1]:
        raise ValueError(f"Expected square matrix, got a1.shape={a.shape}")
    if b.ndim not in (1, 2) or b.shape[0] != a.shape[0]:
        raise ValueError(f"incompatible shapes: a1.shape={a.shape} and b1.shape={b.shape}")
    dtype = computed_in(a, b)
    if 0 in b.shape:
        return _nothing(b, dtype, "solve", return_report)
    a = _whole(a, structure, lower)
    a = in_squares(a.T if transposed else a)
    label = graphs.name("solve", a, b, dtype, check_finite, mode, panel, on_error, on_stage)
    options = GraphOptions(label, "solve", on_error, on_stage)
    right, shape = _in_rows(b, a.chunks[0])
    graphs.warn_of_large(np.dtype(dtype).itemsize, BLOCKS_HELD, a, right)

    matrix, rights = (blocks(options, name, x, dtype, check_finite) for name, x in (("a", a), ("b", right)))
    tasks, numbers = TileTasks(options, starts(a.chunks[0])), range(a.numblocks[0])
    factors = Factors.of(tasks, matrix, PanelOptions(mode, solves=True), panel)
    solution = Solution(tasks, factors, a.chunks[0])
    for c in range(right.numblocks[1]):
        keys = {i: rights.key(i, c) for i in numbers}
        solution.solve(c, dict(keys), 0)
        solution.check(c, keys, matrix)
    graph = graphs.TaskGraph(options, tasks.layer, [matrix, rights], tasks.end())
    return solution.returned(graph, right, shape, dtype, return_report, factors.told())


# ---- operands -----------------------------------------------------------------------------------------------------


def _whole(a: Any, structure: str, lower: bool) -> Any:
    """All of a matrix, of which `structure` says what is read."""
    if structure == "mirrored":
        half, other = (da.tril(a), da.tril(a, -1)) if lower else (da.triu(a), da.triu(a, 1))
        return half + other.T
    above, below = {"lower": (0, None), "upper": (None, 0), "diagonal": (0, 0), "tridiagonal": (1, -1)}.get(
        structure, (None, None)
    )
    a = a if above is None else da.tril(a, above)
    return a if below is None else da.triu(a, below)


def _in_rows(b: Any, rows: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """Right-hand sides as a matrix in these chunks of rows, and their shape."""
    matrix = b[:, None] if b.ndim == 1 else b
    return matrix.rechunk({0: tuple(rows)}), b.shape


def _nothing(b: Any, dtype: Any, operation: str, return_report: bool) -> Any:
    """The solution of a system that has none of it."""
    x, (n, *r) = da.zeros_like(b, dtype=dtype), b.shape
    report = delayed(Findings().report)(operation, (n, n, *(r or [1])), dtype_name(np.dtype(dtype)), {})
    return (x, report) if return_report else x


def _pivots(piv: Any, lu: Any) -> Any:
    """Pivots in the chunks of the rows of lu; ValueError where they cannot be those."""
    if not isinstance(piv, da.Array):
        piv = da.from_array(pivots_of(piv, lu.shape))
    if piv.shape != lu.shape[:1]:
        raise ValueError(f"piv has shape {piv.shape}: for an lu of {lu.shape} it is {lu.shape[:1]}")
    return piv.rechunk((lu.chunks[0],))


def read_pivots(chunk: graphs.Chunk, piv: Array, first: int, n: int) -> Block:
    """The pivots of one block of rows, which begins at row `first` of n."""
    chunk.require(piv)
    if isinstance(piv, np.ma.MaskedArray):
        raise TypeError("piv has masked chunks, whose masks would be ignored: pass dask.array.ma.filled(piv, value)")
    found = to_host(piv)
    if found.dtype.kind not in "iuf":
        raise TypeError(f"piv holds {found.dtype}: the numbers of rows are expected, as lu_factor returns them")
    wrong = ~((found >= np.arange(first, first + found.size)) & (found < n) & (found == np.floor(found)))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"piv holds {found[at]} for row {first + at}: a row is exchanged with itself or one below, up to {n - 1}"
        )
    return Block.of(found.astype(np.int32)[None, :])


# ---- the graph ----------------------------------------------------------------------------------------------------


@dataclass
class Solution:
    """The keys of a solution, one column of blocks after the other.

    Attributes
    ----------
    tasks : TileTasks
    factors : Factors
    rows : sequence of int
        Sizes of the blocks.
    x : dict of (i, c) to key
    told : list of keys
        Blocks that have reports, beside those of x.
    """

    tasks: TileTasks
    factors: Factors
    rows: Sequence[int]
    x: dict[tuple[int, ...], Key] = field(default_factory=dict)
    told: list[Key] = field(default_factory=list)

    def solve(self, c: int, column: dict[int, Key], trans: int) -> None:
        """Add the tasks that solve for column c of the right-hand sides."""
        if trans:  # A' = U' L' P: U' z = b, L' y = z, x = P' y
            self.substitute(c, column, TileSolve(lower=True, unit=False, turned=True))
            self.substitute(c, column, TileSolve(lower=False, unit=True, turned=True))
            self.permute("x", c, column, back=True)
        else:
            self.permute("b", c, column)
            self.substitute(c, column, TileSolve(lower=True, unit=True))
            self.substitute(c, column, TileSolve(lower=False, unit=False))
        self.x |= {(i, c): key for i, key in column.items()}

    def permute(self, kind: str, c: int, column: dict[int, Key], *, back: bool = False) -> None:
        """P X(c), or P' X(c)."""
        steps = range(len(self.rows))
        for j in reversed(steps) if back else steps:
            exchange = Exchange(self.tasks.starts[j], self.rows[j], back)
            self.tasks.exchange(kind, (c, j), exchange, column, j, self.factors.piv[j])

    def substitute(self, c: int, column: dict[int, Key], how: TileSolve) -> None:
        """X(j) = T(j, j)^-1 B(j), and then B(i) -= T(i, j) X(j)."""
        tasks, lu, steps = self.tasks, self.factors.lu, range(len(self.rows))
        kind = "forward" if how.lower else "backward"
        for j in steps if how.lower else reversed(steps):
            column[j] = tasks.add(solved, kind, (j, c), how, lu[j, j], column[j])
            for i in steps[j + 1 :] if how.lower else reversed(steps[:j]):
                T = lu[j, i] if how.turned else lu[i, j]
                product = TileProduct(turn_a=how.turned)
                column[i] = tasks.add(updated, f"{kind}-product", (i, c, j), product, column[i], T, column[j])

    def check(self, c: int, b: Mapping[int, Key], a: graphs.Blocks) -> None:
        """Have column c of x wait for the check of its residual.

        R(i) = B(i) - sum_j A(i, j) X(j) is compared with P' |L| |U| |X|: S(i) = sum_j |U(i, j)| |X(j)|, j >= i, and
        then T(i) = sum_j |L(i, j)| S(j), j <= i.
        """
        tasks, steps = self.tasks, range(len(self.rows))
        x, residual, n = {i: self.x[i, c] for i in steps}, dict(b), sum(self.rows)
        for i in steps:
            for j in steps:
                arguments = residual[i], a.key(i, j), x[j]
                residual[i] = tasks.add(updated, "residual", (i, c, j), TileProduct(), *arguments)
        upper = self.reach(c, "upper", x)
        sums = self.reach(c, "lower", upper)
        self.told += upper.values()
        self.permute("reach", c, sums, back=True)
        checks = [tasks.add(checked, "check", (i, c), n, residual[i], sums[i]) for i in steps]
        self.told += checks
        self.x |= {(i, c): tasks.add(accepted, "accepted", (i, c), x[i], checks) for i in steps}

    def reach(self, c: int, part: str, x: Mapping[int, Key]) -> dict[int, Key]:
        """|T| X for a triangle T of the factors."""
        steps, n = range(len(self.rows)), sum(self.rows)
        sums: dict[int, Key] = {}
        for i in steps:
            for j in steps[i:] if part == "upper" else steps[: i + 1]:
                T = part if i == j else "", n, self.factors.lu[i, j]
                sums[i] = self.tasks.add(reached, f"{part}-reach", (i, c, j), *T, x[j], sums.get(i))
        return sums

    def returned(
        self,
        graph: graphs.TaskGraph,
        b: Any,
        shape: tuple[int, ...],
        dtype: Any,
        return_report: bool,
        told: Sequence[Key] = (),
    ) -> Any:
        """The solution of right-hand sides b, in its shape, and the report of all tasks, of these `told` as well."""
        meta = np.empty_like(b._meta, shape=(0, 0), dtype=dtype)
        x = graph.array("x", self.x, b.chunks, meta)
        x = x[:, 0] if len(shape) == 1 else x
        if not return_report:
            return x
        keys = [*self.x.values(), *self.told, *(told or self.tasks.told)]
        return x, graph.report(keys, (b.shape[0], b.shape[0], b.shape[1], dtype_name(np.dtype(dtype))))


# ---- the residual -------------------------------------------------------------------------------------------------


def reached(
    options: GraphOptions, step: tuple[Any, ...], part: str, n: int, t: Block, x: Block, before: Block | None
) -> Block:
    """``|T(i, j)| |X(j)|`` in float64, added to what there is; of a triangle of the factors on the diagonal."""

    def work(T: Array, X: Array, S: Array | None = None) -> Array:
        xp, kind = namespace(T), float_type(T)
        sizes, X = xp.abs(xp.astype(T, xp.float64)), xp.abs(xp.astype(X, xp.float64))
        if part == "lower":
            sizes = xp.tril(sizes, k=-1) + xp.eye(*sizes.shape, dtype=xp.float64, device=T.device)
        elif part == "upper":
            sizes = xp.triu(sizes)
            # what underflow may have lost, in units of the bound's factor
            pivots = xp.maximum(xp.linalg.diagonal(sizes), xp.asarray(1.0, device=T.device))
            S = xp.zeros_like(X) + (underflow(kind, n, pivots) / _rounding(kind, n))[:, None]
        beta = 0.0 if S is None else 1.0
        with np.errstate(all="ignore"):  # what is not finite shows in a verdict
            return product_here(sizes, X, S, beta=beta, on_error=None if options.repairs else "detect", on_stage=hook)

    hook = hook_of(options, step)
    S, report = run(options, step, {"T": t, "X": x, "S": before}, work)
    return Block.of(S, (*(before.reports if before is not None else ()), report))


def _rounding(kind: FloatType, n: int) -> float:
    """3 n operations of the solution, and n + 1 of the residual on ``|A| |x|`` and on ``|b|``, of which neither is
    larger than ``|L| |U| |x|`` but for rounding."""
    return float(solved_rounding(kind, 2 * n))


def checked(options: GraphOptions, step: tuple[Any, ...], n: int, r: Block, t: Block) -> Block:
    """Compare a block of the residual with its bound; what is left is the largest ratio of the two."""

    def work(R: Array, T: Array) -> Array:
        xp, kind, findings = namespace(R), float_type(R), Findings()
        with np.errstate(all="ignore"):
            residual, bound = xp.abs(xp.astype(R, xp.float64)), _rounding(kind, n) * T
            ok = (residual <= bound) & xp.isfinite(bound)
            lines = LineCheck(xp.max(residual, axis=1), xp.max(bound, axis=1), xp.all(ok, axis=1))
        if not lines.clean:
            if bool(xp.all(xp.isfinite(R))) and bool(xp.all(xp.isfinite(bound))):
                findings.statuses.append(Status.UNCORRECTABLE)
                findings.faults.append(wrong_rows("x", lines))
                findings.reasons.append("a x = b fails its check: the residual is more than rounding explains")
            else:
                findings.unverifiable("the residual of the solution, or its bound, is not finite")
        ones = xp.ones(R.shape[1], dtype=xp.float64, device=R.device)
        checks = (check_of("rows", lines.residual, lines.bound, ones),)
        sizes = n, n, int(R.shape[1])
        policy.deliver(findings.report(options.operation, sizes, kind.name, {}, checks=checks))
        return xp.max(xp.astype(~ok, xp.float64), axis=0)[None, :]

    wrong, report = run(options, step, {"R": r, "T": t}, work)
    return Block.of(wrong, (*reports_of(r, t), report))


def accepted(options: GraphOptions, step: tuple[Any, ...], x: Block, checks: Sequence[Block]) -> Block:
    """A block of the solution, once all of the residual has been checked."""
    X, report = run(options, step, {"x": x}, lambda x: x)
    return Block.of(X, (*x.reports, *told(report)), x.words)
