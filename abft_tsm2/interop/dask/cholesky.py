"""The graph of a protected Cholesky factorisation, right-looking: PLASMA's order of tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
from dask.delayed import delayed

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, dtype_name, is_column_major, is_numpy, namespace
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.interop.dask import graphs
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.lu import refuse
from abft_tsm2.interop.dask.stages import checked, hook_of, watched
from abft_tsm2.interop.dask.task import GraphOptions, Hook, run
from abft_tsm2.interop.dask.tiles import (
    BLOCKS_HELD,
    Key,
    TileProduct,
    TileSolve,
    TileTasks,
    as_collection,
    by_rows,
    computed_in,
    in_squares,
    read,
    solved,
    starts,
    updated,
)
from abft_tsm2.linalg.cholesky import protected_cholesky as factored_here
from abft_tsm2.linalg.inputs import as_array
from abft_tsm2.linalg.outcome import Findings

BELOW = TileSolve(lower=True, unit=False, right=True)  # L(i, j) L(j, j)' = A(i, j), and L(j, j) L(i, j)' = A(i, j)'


def protected_cholesky(
    a: Any,
    lower: bool = False,
    overwrite_a: bool = False,
    check_finite: bool = True,
    *,
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
    block: int | None = None,
) -> Any:
    """`abft_tsm2.protected_cholesky` of a Dask array, lazy: ``A = L L'``, or ``A = U'U``.

    Parameters
    ----------
    a : (n, n) dask array
        Symmetric positive definite, of NumPy or CuPy chunks; only the blocks of one triangle are computed, and of those
        on the diagonal one triangle is read. Rechunked to squares as in `protected_lu_factor`; other real types than
        float32 are computed in float64.
    lower : bool
        Whether to read the lower triangle and return L, or the upper one and U.
    overwrite_a : bool
        Accepted for SciPy's sake; saves nothing.
    check_finite : bool
        Refuse NaN and Inf in the blocks that are computed, when they are.
    on_error, return_report, on_stage
        As in `protected_lu_factor`; the stages are those of `protected_cholesky`, `protected_gemm`, and "forward" (X).
    block : None
        Has no meaning here: the blocks are the chunks.

    Returns
    -------
    c : (n, n) dask array
        L or U, with zeros in the other triangle.
    report : Delayed of Report
        With ``return_report=True``; one product for each task that computed something.

    Raises
    ------
    TypeError, ValueError
        What cannot be factored.
    numpy.linalg.LinAlgError
        When it is computed: a leading minor of a is not positive, with SciPy's text and the order of the minor.
    SilentDataCorruptionError
        When it is computed: a block of the factor is wrong, or lost.

    Notes
    -----
    By steps j: L(j, j) is the factor of A(j, j); ``L(i, j) = A(i, j) L(j, j)^-T``; ``A(i, k) -= L(i, j) L(k, j)'`` for
    ``i >= k > j``. An upper triangle is factored as the transpose of a lower one. K.-H. Huang and J. A. Abraham, IEEE
    Trans. Computers C-33 (1984) 518; N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 10.3.

    Examples
    --------
    >>> import dask, dask.array as da
    >>> import abft_tsm2 as ft
    >>> X = da.random.default_rng(0).standard_normal((120, 200), chunks=40)
    >>> A, L, report = dask.compute(X @ X.T, *ft.protected_cholesky(X @ X.T, lower=True, return_report=True))
    >>> report.status.name, len(report.products), bool(abs(A - L @ L.T).max() < 1e-10)
    ('CLEAN', 10, True)
    """
    policy.check_on_error(on_error)
    refuse(block=(block, None))
    a = as_collection(a, "a")
    if a.ndim != 2 or a.shape[0] != a.shape[1]:
        raise ValueError(f"Input array is expected to be square but has the shape: {a.shape}.")
    dtype, n = computed_in(a), a.shape[0]
    kind = dtype_name(dtype)
    if n == 0:
        report = delayed(Findings().report)("cholesky", (0, 0, 0), kind, {})
        return (a.astype(dtype), report) if return_report else a.astype(dtype)
    a = in_squares(a if lower else a.T)
    numbers = range(a.numblocks[0])
    label = graphs.name("cholesky", a, dtype, check_finite, on_error, on_stage)
    options = GraphOptions(label, "cholesky", on_error, on_stage)
    graphs.warn_of_large(np.dtype(dtype).itemsize, BLOCKS_HELD, a)

    operand = triangle(options, a, dtype, check_finite)
    tasks = TileTasks(options, starts(a.chunks[0]))
    c: dict[tuple[int, ...], Key] = {(i, k): operand.key(i, k) for i in numbers for k in numbers[: i + 1]}
    for j in numbers:
        c[j, j] = tasks.add(factored, "factored", (j,), tasks.starts[j], c[j, j])
        for i in numbers[j + 1 :]:
            c[i, j] = tasks.add(solved, "solved", (i, j), BELOW, c[j, j], c[i, j])
        for k in numbers[j + 1 :]:
            for i in numbers[k:]:
                at = i, k, j
                c[i, k] = tasks.add(updated, "product", at, TileProduct(turn_b=True), c[i, k], c[i, j], c[k, j])
    told, end = list(c.values()), tasks.end()
    meta = np.empty_like(a._meta, shape=(0, 0), dtype=dtype)
    for i, k in np.ndindex(*a.numblocks):
        if i < k:
            c[i, k] = tasks.add(zeros, "zeros", (i, k), meta, (a.chunks[0][i], a.chunks[1][k]))
    graph = graphs.TaskGraph(options, tasks.layer, [operand], end)
    L = graph.array("c", c, a.chunks, meta)
    C = L if lower else L.T
    return (C, graph.report(told, (n, n, n, kind))) if return_report else C


def triangle(options: GraphOptions, a: Any, dtype: Any, check_finite: bool) -> graphs.Blocks:
    """The tasks that read the blocks of the lower triangle."""
    label, layer = options.label("read-a"), {}
    for (i, k), chunk in graphs.chunks_of("a", a).items():
        if i >= k:
            how = read_symmetric if i == k else read
            layer[label, i, k] = how, chunk, (a.name, i, k), dtype, check_finite
    return graphs.Blocks(label, layer, a)


def read_symmetric(chunk: graphs.Chunk, x: Any, dtype: Any, check_finite: bool) -> Block:
    """A chunk on the diagonal, made of its lower triangle."""
    chunk.require(x)
    X = as_array(x, chunk.operand, check_finite=False)
    xp = namespace(X)
    X = xp.tril(X)
    X = as_array(X + xp.matrix_transpose(xp.tril(X, k=-1)), chunk.operand, check_finite=check_finite)
    return Block.of(by_rows(X, dtype))


def factored(options: GraphOptions, step: tuple[Any, ...], first: int, A: Block) -> Block:
    """L(j, j) of A(j, j), which begins at row `first`."""
    taken: list[WordSums] = []
    hook = hook_of(options, step)
    on_error = None if options.repairs else "detect"

    def work(A: Array) -> Array:
        taken.clear()
        watch = watched(hook, {"finished": "W"}, taken, _sums_of_lower) if is_numpy(A) else hook
        try:
            return factored_here(A, lower=True, check_finite=False, on_error=on_error, on_stage=watch)
        except np.linalg.LinAlgError as error:
            number, text = str(error).split("-", 1)  # "5-th leading minor of the array is not positive definite"
            raise np.linalg.LinAlgError(f"{first + int(number)}-{text}") from None

    L, report = run(options, step, {"A": A}, work)
    same = bool(taken) and taken[0].transposed == is_column_major(L)
    return checked(L, A.reports, report, taken if same else [])


def _sums_of_lower(W: Array) -> WordSums:
    """Those of a factor, the other triangle of which is cleared behind its last check."""
    return WordSums.of(np.asarray(np.tril(W), order="F" if is_column_major(W) else "C"))


def zeros(options: GraphOptions, step: tuple[Any, ...], like: Array, shape: tuple[int, int]) -> Block:
    return Block.of(np.zeros_like(like, shape=shape))
