"""The graph of a protected product: each block of C is summed along k by a chain of protected products.

C(i, j) = beta C0(i, j) + alpha A(i, 1) B(1, j), and then C(i, j) += alpha A(i, l) B(l, j) for l = 2, 3, ...: a chain
has one partial sum at a time, which its next product checks as its operand c. A task is a few links of a chain. Blocks
of a batch are stacks of matrices, and travel as one matrix: one under the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import FLOATS, Array, dtype_name, is_numpy, namespace, type_name
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.gemm import protected_gemm as product_here
from abft_tsm2.gemm.operands import factor, problem_of
from abft_tsm2.interop.dask import graphs
from abft_tsm2.interop.dask.block import Block, as_matrix
from abft_tsm2.interop.dask.stages import checked, watched
from abft_tsm2.interop.dask.task import GraphOptions, Hook, run

LINKS = {"numpy": 4, "cupy": 8}  # products of a task: what a GPU is waited for once


def protected_gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    check: str = "auto",
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
    verify: str | None = None,
    precision: str | None = None,
) -> Any:
    """`abft_tsm2.protected_gemm` of Dask arrays, lazy: ``alpha a @ b + beta c``.

    Parameters
    ----------
    a : (..., m, k) or (k,) dask array
        Of NumPy or CuPy chunks, of any sizes that are known. One of a and b may be an array, which Dask takes in. The
        axes of a batch broadcast.
    b : (..., k, n) or (k,) dask array
    c : (..., m, n) dask array or array, optional
        Of the product's shape. Lazy as well; read only where ``beta != 0``, by the first product of each chain.
    alpha, beta, out_dtype, check, on_error, verify, precision
        As in `abft_tsm2.protected_gemm`, for each product of blocks. 16-bit partial sums are kept in float32.
    out : None
        A lazy product is not written anywhere: ``dask.array.store(C, out)`` writes it.
    return_report : bool
        Return ``(C, report)`` with a `dask.delayed.Delayed` of the report of all tasks. Compute both at once,
        ``C, report = dask.compute(C, report)``, or all is computed twice.
    on_stage : callable, optional
        Called on the workers, for each product of blocks: has to be pickled.

    Returns
    -------
    C : (..., m, n) dask array
        With the chunks of a's rows and b's columns.
    report : Delayed of Report
        With ``return_report=True``; ``report.products`` has one for each task, with the index (..., i, j, l) of its
        first product of blocks.

    Raises
    ------
    TypeError, ValueError
        As in `abft_tsm2.protected_gemm`; where chunks of unknown sizes, or `out` are given.
    SilentDataCorruptionError
        When it is computed: a block of the result is wrong, or lost.

    Warns
    -----
    dask.array.PerformanceWarning
        Chunks are too large for the memory of the workers; the message says which to choose.

    Notes
    -----
    Each block product is checked and repaired on its worker. Blocks travel with the sums of their words
    (`abft_tsm2.checksum.words`), from the first task that reads them to the one that returns them: a block that changed
    in memory, on the wire or on disk is restored bit for bit, or fetched from another worker, or made again by the
    tasks behind it. Operands of which each chunk is read from a file by a task of its own (`dask.array.map_blocks`, or
    `dask.array.from_array` with ``inline_array=True``) are read by each task that needs them, and not kept: ``persist``
    them to keep them. `errstate` is that of the call, and not of where it is computed. K.-H. Huang and J. A. Abraham,
    IEEE Trans. Computers C-33 (1984) 518. Cost, and how to choose chunks: see the guide, "Many machines".

    Examples
    --------
    >>> import dask, dask.array as da
    >>> import abft_tsm2 as ft
    >>> A = da.random.default_rng(0).standard_normal((300, 200), chunks=100)
    >>> C, report = dask.compute(*ft.protected_gemm(A, A.T, return_report=True))
    >>> C.shape, report.status.name, len(report.products)
    ((300, 300), 'CLEAN', 9)
    """
    policy.check_on_error(on_error)
    alpha, beta = factor(alpha, "alpha"), factor(beta, "beta")
    if out is not None:
        raise TypeError("out: a lazy product is not written before it is computed: use dask.array.store(C, out)")
    a, b = graphs.as_collection(a, "a"), graphs.as_collection(b, "b")
    if 0 in (a.ndim, b.ndim):
        raise ValueError(
            f"a has {a.ndim} and b {b.ndim} dimensions: vectors, matrices, or batches of these are expected"
        )
    squeeze = (*((-2,) if a.ndim == 1 else ()), *((-1,) if b.ndim == 1 else ()))
    shapes = f"a {tuple(a.shape)} and b {tuple(b.shape)}"
    a = a[None, :] if a.ndim == 1 else a
    b = b[:, None] if b.ndim == 1 else b
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"{shapes} cannot be multiplied: the inner dimensions {a.shape[-1]} and {b.shape[-2]} differ")
    batch, sizes, (a, b) = _unified(a, b, shapes)
    like, other = (np.ones_like(x._meta, shape=(1,) * x.ndim) for x in (a, b))
    settings: dict[str, Any] = {"alpha": alpha, "check": check, "verify": verify, "precision": precision}
    given: Any = {**settings, "out_dtype": out_dtype}
    sample = problem_of(like, other, None, beta=0.0, **given)
    dtype = sample.c.dtype
    wide = FLOATS[dtype_name(dtype)].bits < 32
    if wide:
        settings |= {"out_dtype": "float32", "verify": None}
    elif out_dtype is not None:
        settings["out_dtype"] = type_name(out_dtype)
    shape, chunks = (*batch, a.shape[-2], b.shape[-1]), (*sizes, a.chunks[-2], b.chunks[-1])
    base = _added(c, beta, shape, chunks, squeeze, dtype)
    options = GraphOptions(
        graphs.name("gemm", a, b, base, beta, str(dtype), wide, settings, on_error, on_stage),
        "gemm",
        on_error,
        on_stage,
    )
    links = min(a.numblocks[-1], LINKS["numpy" if is_numpy(like) else "cupy"])
    graphs.warn_of_large(max(x.itemsize for x in (a, b)), blocks_held(links), a, b)

    carries = sample.arithmetic if check in ("auto", "rows") and not batch else None
    right = graphs.blocks(options, "b", b, carries, stream=True)
    left = graphs.read_once(graphs.blocks(options, "a", a, stream=True), right)
    added = None if base is None else graphs.read_once(graphs.blocks(options, "c", base), left, right)
    # Without a report Dask makes one task of a chain and of what returns its block, under one name.
    products = options.label("product") if return_report else f"{options.name}-product"
    layer: dict[Any, Any] = {}
    last: dict[tuple[int, ...], Any] = {}
    for at in np.ndindex(*map(len, chunks)):
        *where, i, j = at
        before: Any = None if added is None else added.key(*at)
        for first in range(0, a.numblocks[-1], links):
            steps = range(first, min(first + links, a.numblocks[-1]))
            pairs = [[_block(left, where, i, step), _block(right, where, step, j)] for step in steps]
            key = (products, *at, first)
            given = {**settings, "beta": beta if first == 0 else 1.0, "widen": wide}
            layer[key] = (chain, options, (*at, first), pairs, before, given)
            before = key
        last[at] = before
    graph = graphs.TaskGraph(options, layer, [x for x in (left, right, added) if x is not None])
    meta = np.empty_like(like, shape=(0,) * len(shape), dtype=dtype)
    C = graph.array("c", last, chunks, meta, dtype if wide else None)
    for axis in squeeze:
        C = C[..., 0, :] if axis == -2 else C[..., 0]
    if not return_report:
        return C
    return C, graph.report(list(last.values()), (shape[-2], a.shape[-1], shape[-1], dtype_name(dtype)))


def _unified(a: Any, b: Any, shapes: str) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[Any, Any]]:
    """Shape and chunks of a batch, and its operands in these chunks, in which they meet along k as well."""
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(f"{shapes} cannot be multiplied: their batch axes do not broadcast") from None
    axes = range(len(batch))
    pairs = [(a, (*axes[len(batch) + 2 - a.ndim :], "i", "k")), (b, (*axes[len(batch) + 2 - b.ndim :], "k", "j"))]
    sizes, operands = da.core.unify_chunks(*(part for pair in pairs for part in pair))
    return batch, tuple(sizes[axis] for axis in axes), tuple(operands)


def _block(operand: graphs.Blocks, where: Sequence[int], i: int, j: int) -> Any:
    """The block of a batch at this place, of an operand that is broadcast to it."""
    counts = operand.array.numblocks[:-2]
    there = where[len(where) - len(counts) :]
    return operand.key(*(min(at, count - 1) for at, count in zip(there, counts, strict=True)), i, j)


def _added(c: Any, beta: float, shape: Any, chunks: Any, squeeze: Any, dtype: Any) -> Any:
    """c as a matrix in the chunks of the product, or None where it is not read."""
    if beta == 0.0:
        return None
    if c is None:
        raise ValueError(f"beta = {beta:g} needs c, the array it multiplies")
    c = graphs.as_collection(c, "c")
    shown = tuple(n for axis, n in enumerate(shape, -len(shape)) if axis not in squeeze)
    if tuple(c.shape) != shown or dtype_name(c.dtype) != dtype_name(dtype):
        raise ValueError(f"c has shape {c.shape} and dtype {c.dtype}: the product has {shown} and {dtype}")
    for axis in reversed(squeeze):
        c = c[..., None] if axis == -1 else c[..., None, :]
    return c.rechunk(chunks)


def blocks_held(links: int) -> int:
    """Blocks that a task holds: its operands, C0 and C, and two on their way to the next one."""
    return 2 * links + 4


def chain(
    options: GraphOptions,
    step: tuple[int, ...],
    pairs: Sequence[tuple[Block | graphs.Streamed, Block | graphs.Streamed]],
    c0: Block | None,
    settings: dict[str, Any],
) -> Block:
    """Some products of blocks, added: C = alpha A(i, l) B(l, j) + ... + beta C0, for l = at, at + 1, ..."""
    settings = dict(settings)
    widen, beta = settings.pop("widen"), settings.pop("beta")
    taken: list[WordSums] = []
    *where, i, j, at = step
    hook = options.on_stage if where else watched(options.on_stage, {"multiplied": "C"}, taken)
    links = [tuple(one.read() if isinstance(one, graphs.Streamed) else one for one in pair) for pair in pairs]

    def multiply(C0: Array | None = None, **_: Array) -> Array:
        taken.clear()
        C = C0 if c0 is None else c0.as_given(C0)
        if widen and C is not None:
            C = namespace(C).astype(C, namespace(C).float32)
        for number, (a, b) in enumerate(links):
            final = number == len(links) - 1
            watch = hook if final and is_numpy(a.array) else options.on_stage
            factor = 0.0 if C is None else beta if number == 0 else 1.0
            given = {**settings, "on_error": on_error, "on_stage": watch}
            C = product_here(a.as_given(a.array), b.as_given(b.as_right()), C, beta=factor, **given)
        if not is_numpy(C):  # behind the repairs of the kernels
            taken[:] = [WordSums.of(as_matrix(C))]
        return C

    on_error = None if options.repairs else "detect"
    blocks: dict[str, Block | None] = {"C0": c0}
    for number, (a, b) in enumerate(links):
        blocks |= {_named("A", *where, i, at + number): a, _named("B", *where, at + number, j): b}
    # a hook sees every stage when it is done: such products are not queued, and do not take turns
    C, report = run(options, step, blocks, multiply, sync=options.on_stage is not None)
    return checked(C, () if c0 is None else c0.reports, report, taken)


def _named(operand: str, *at: int) -> str:
    return f"{operand}({', '.join(map(str, at))})"
