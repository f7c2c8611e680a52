"""Read a large matrix once, for its weighted sums, sums of squares or fingerprint, on any array library.

Encoding and checking are both products of a large matrix with a few weight columns; what they cost is the reading
of the large matrix. So each pass walks it once, in blocks that fit the cache and follow the storage order, whichever
axis is summed; statistics are taken of a part. Sums are always taken in float64.

With `abft_tsm2.core.tsm2` and `multiply` this is where it is asked which array library is served. On NumPy a pass runs
on every core (`workers`); in each core it is a fused cast-multiply-sum (``numpy.einsum``), which needs no temporary;
the order of summation is fixed, so that the same array gives the same bits again. Small matrices, and each of a stack
of them, go to BLAS in one call, which gives each of a stack the bits that it has by itself.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from abft_tsm2.arrays import (
    Array,
    converted,
    float_type,
    from_host,
    in_float64,
    is_column_major,
    is_cupy,
    laid_out,
    namespace,
)
from abft_tsm2.core.flushing import flushing_mode
from abft_tsm2.core.ordered_sums import ordered_sums
from abft_tsm2.core.tsm2 import tall_skinny_matmul

BLOCK_BYTES = 1 << 20  # half of a common level-2 cache
SERIAL_ELEMENTS = 1 << 17  # below this a second core is not awake before the pass has ended
PANEL = 256  # columns whose weighted sum may be taken in float32
_LARGEST_SINGLE = 2.0**60  # weights up to here keep float32 sums clear of both ends of its range
_FAR_BYTES = 64 << 20  # of a temporary on a GPU
_PARTS = 16  # of a pass, taken by whichever core is free


# ---- one pass -----------------------------------------------------------------------------------------------------


def encoding_pass(X: Array, W: Array, *, partial: bool = False) -> Array:
    """``X W`` in float64, in one read of X.

    Parameters
    ----------
    X : (p, q) array of any supported type, order and strides
    W : (q, r) array of float64
    partial : bool
        Allow sums of `PANEL` float32 terms to be taken in float32 (by BLAS) before they are added in float64. They
        round by 2 to 5 units of float32 roundoff, as BLAS adds on a processor: for checks of a product whose own
        rounding is larger.

    Returns
    -------
    Y : (p, r) array of float64
    """
    with np.errstate(all="ignore"):  # overflow shows in the verdict
        return weighted_sums(X, W, partial)


def weighted_sums(X: Array, W: Array, partial: bool = False) -> Array:
    """`encoding_pass` in the caller's error state; on NumPy also of each of a stack, X (..., p, q) and W (..., q, r),
    where its matrices are `small`."""
    if not isinstance(X, np.ndarray):
        if is_cupy(X) or float_type(X).bits == 64:  # kernels widen as they read
            return tall_skinny_matmul(X, W)
        xp = namespace(X)
        return _by_blocks(xp, X, W, lambda block: xp.astype(block, xp.float64), False)
    if X.dtype.itemsize == 8:
        return np.matmul(X, W)
    # BLAS reads at the speed of the memory; other types need a cast, fused by einsum where it would leave the cache.
    if partial and X.dtype == np.float32 and (sums := _panel_sums(X, W)) is not None:
        return sums
    if small(X):
        return np.matmul(copied(X, np.float64), W)
    transposed = is_column_major(X)
    lines = X.T if transposed else X  # its rows are contiguous in memory
    parts = _on_all_cores(lines, lambda lo, hi: _numpy_sums(lines, W, transposed, lo, hi))
    return sum(parts[1:], parts[0]) if transposed else np.concatenate(parts)


def weighted_squares(X: Array, W2: Array, *, wide: bool = False) -> Array:
    """``(X o X)(:, :h) W2``: what is behind the 2-norms of rows. Without overflow h columns never exceed them all.

    Parameters
    ----------
    X : (p, q) array of any supported type, order and strides
    W2 : (h, r) array of float64, h <= q
        Non-negative: the squares of weights.
    wide : bool
        Compute in float64 also where X is narrower: slower, and safe from overflow.

    Returns
    -------
    Y : (p, r) array of float64 or, for narrower X, float32
        Statistics need two digits. Where it overflows the caller computes wider.
    """
    with np.errstate(all="ignore"):
        return summed_squares(X, W2, wide)


def summed_squares(X: Array, W2: Array, wide: bool = False) -> Array:
    """`weighted_squares` in the caller's error state, and of each of a stack as in `weighted_sums`."""
    on_numpy = isinstance(X, np.ndarray)
    if on_numpy and small(X := X[..., : W2.shape[-2]]):
        width = X.dtype.itemsize
        if width < 8 and (wide or width < 4):
            X = copied(X, np.float64 if wide else np.float32)
            return squares_times(np.multiply(X, X, out=X), W2)
        return squares_times(squares_of(X), W2)
    xp = namespace(X)
    kind = xp.float64 if wide or not on_numpy or X.dtype.itemsize == 8 else xp.float32
    scratch = np.empty((0, 0))

    def squared(block: Array) -> Array:
        nonlocal scratch
        if not on_numpy:
            return xp.astype(block, kind) ** 2
        if not scratch.size:  # one temporary for all blocks: fresh memory costs more than the squares
            scratch = np.empty(block.shape, kind)
        squares = scratch[: block.shape[0]]
        if block.dtype == kind:
            return np.multiply(block, block, out=squares)
        squares[...] = block
        squares *= squares
        return squares

    return _by_blocks(xp, X[:, : W2.shape[0]], xp.astype(W2, kind, copy=False), squared, on_numpy, share=4)


def squares_times(squares: Array, W2: Array) -> Array:
    """The product of squares, in float64 or float32, with squares of weights, in their type."""
    return np.matmul(squares, W2 if squares.dtype.itemsize == W2.dtype.itemsize else W2.astype(squares.dtype))


_FRESH = 1 << 16  # bytes: what is larger is new to the process each time, and costs more than what is done with it
_PIECES = 2  # of memory for one thread: squares may live while a copy is made


class _Own(threading.local):
    """What a thread has to itself: pieces of memory, each with a reference to the array that lay in it last; whether it
    is asking others for help."""

    def __init__(self) -> None:
        self.pieces: list[tuple[bytearray, weakref.ref[Any]]] = []
        self.asking = False


_own = _Own()


def _kept(X: Array, dtype: Any) -> Array:
    """An array like X in memory that the thread keeps. Nothing else lies there while that array lives, or a view of it.

    A signal handler or a finaliser may multiply between any two steps: a piece is taken away in one of them, and comes
    back with the reference that tells whether it is in use.
    """
    pieces, busy, size = _own.pieces, [], 8 * X.size
    try:
        while True:
            piece = memory, lying = pieces.pop()
            if lying() is not None:
                busy.append(piece)
            elif len(memory) >= size:
                break
    except IndexError:
        memory = bytearray(max(size, 8 * SERIAL_ELEMENTS))
    lent = np.frombuffer(memory, dtype, X.size)  # the base of all its views, as its own is no array
    pieces += [*busy, (memory, weakref.ref(lent))][-_PIECES:]
    return laid_out(X, lent)


def squares_of(X: Array) -> Array:
    """The squares of float64 or float32, for what is done with them at once."""
    if X.nbytes > _FRESH:
        return np.multiply(X, X, out=_kept(X, X.dtype))
    return X * X if X.ndim == 2 else np.multiply(X, X, out=laid_out(X, np.empty(X.size, X.dtype)))


def squares_at(X: Array, rows: np.ndarray[Any, Any]) -> Array:
    """The squares of these rows, which are contiguous, for what is done with them at once."""
    squares = _kept(X[: rows.size], X.dtype)
    np.take(X, rows, axis=0, out=squares, mode="clip")  # else NumPy takes them twice
    return np.multiply(squares, squares, out=squares)


def copied(X: Array, dtype: Any) -> Array:
    """X in another type, for what is done with it at once."""
    if 8 * X.size <= _FRESH:
        return converted(X, dtype)
    copy = _kept(X, dtype)
    copy[...] = X
    return copy


def small(X: Array) -> bool:
    """Whether a NumPy matrix, or each of a stack, is read by one core and stays in its cache."""
    shape: tuple[int, ...] = X.shape
    return shape[-2] * shape[-1] < SERIAL_ELEMENTS


def in_single(X: Array, partial: bool = False) -> Array:
    """X itself, or a copy in float32 of a `small` NumPy matrix of 16 bits that is read more than once: exact, and each
    conversion of such elements takes several times as long as their sum. Not where its sums would be `partial` then."""
    if partial or not isinstance(X, np.ndarray) or X.dtype.itemsize != 2 or not small(X):
        return X
    return converted(X, np.float32)


def _by_blocks(
    xp: Any, X: Array, W: Array, prepared: Callable[[Array], Array], on_numpy: bool, share: int = 1
) -> Array:
    """``f(X) W`` in the type of W, in blocks of whole lines; f works on elements, and `prepared` is f of a block."""
    transposed = is_column_major(X)
    lines = X.T if transposed else X
    product = np.matmul if on_numpy else tall_skinny_matmul  # blocks are small: no checks of what is known to fit
    rows, total = [], xp.zeros((X.shape[0] if transposed else 0, W.shape[1]), dtype=W.dtype, device=X.device)
    for at, block in _blocks(lines, 0, lines.shape[0], share, on_numpy):
        if transposed:  # Y += f(X)(:, at:end) W(at:end, :)
            total += product(prepared(block).T, W[at : at + block.shape[0], :])
        else:  # Y(at:end, :) = f(X)(at:end, :) W
            rows.append(product(prepared(block), W))
    if transposed:
        return total
    return rows[0] if len(rows) == 1 else xp.concat(rows)


def column_squares(X: Array) -> Array:
    """Sum of squares of each column of X (p x q), in X's own precision (float32 for 16-bit types): two digits serve.

    A result that is 0, subnormal or not finite says nothing: the caller treats that case.
    """
    with np.errstate(all="ignore"):  # overflow shows in the result
        return squares_of_columns(X)


def squares_of_columns(X: Array) -> Array:
    """`column_squares` in the caller's error state, and of each of a stack as in `weighted_sums`."""
    half = X.dtype.itemsize < 4 if isinstance(X, np.ndarray) else float_type(X).bits < 32
    if not half and isinstance(X, np.ndarray):
        return np.einsum("...ij,...ij->...j", X, X)
    xp = namespace(X)
    rows = rows_per_block(X.shape[1])
    total = xp.zeros(X.shape[1], dtype=xp.float32 if half else X.dtype, device=X.device)
    for at in range(0, X.shape[0], rows):
        block = X[at : min(X.shape[0], at + rows), :]
        block = xp.astype(block, xp.float32) if half else block
        total += xp.sum(block * block, axis=0)
    return total


def fingerprint(X: Array) -> Array:
    """The `ordered_sums` of the lines of X along its storage order: (words, lines), uint64.

    Any change of one or two words of a line changes them, elements that change places among these. They tell whether a
    matrix is the one that was encoded; `abft_tsm2.checksum.storage` says what changed.
    """
    lines = X.T if is_column_major(X) else X
    if not isinstance(X, np.ndarray):
        count, rows = lines.shape[0], rows_per_block(lines.shape[1], _FAR_BYTES)
        parts = [ordered_sums(lines[at : min(at + rows, count), :]) for at in range(0, max(1, count), rows)]
        return parts[0] if len(parts) == 1 else namespace(parts[0]).concat(parts, axis=1)
    if small(X):
        return ordered_sums(lines)

    def part(lo: int, hi: int) -> Array:
        return np.concatenate([ordered_sums(block) for _, block in _blocks(lines, lo, hi, share=2)], axis=1)

    # Reading is all there is to it. Of two cores the second is held by BLAS, whose threads keep spinning after a
    # product, and a helper that shares the caller's core makes it slower.
    return np.concatenate(_on_all_cores(lines, part), axis=1) if workers() > 2 else part(0, lines.shape[0])


def _panel_sums(X: Array, W: Array) -> Array | None:
    """``X W`` for float32 X: float32 within panels of columns, float64 across; None if W does not suit float32."""
    size = np.abs(W)
    if not np.maximum.reduce(size, axis=None, initial=0.0) <= _LARGEST_SINGLE:  # as NaN is not
        return None
    if np.minimum.reduce(size, axis=None, initial=1.0) < 1 / _LARGEST_SINGLE and not np.all(
        (size >= 1 / _LARGEST_SINGLE) | (size == 0)
    ):
        return None
    single = W.astype(np.float32)
    width = PANEL // 4 if is_column_major(X) else PANEL  # column by column, BLAS adds to one sum and not to sixteen
    sums = np.matmul(X[:, :width], single[:width]).astype(np.float64)
    for at in range(width, X.shape[1], width):  # Y += X(:, p:q) W(p:q, :)
        sums += np.matmul(X[:, at : at + width], single[at : at + width])
    return sums


# ---- NumPy --------------------------------------------------------------------------------------------------------


def _numpy_sums(lines: Array, W: Array, transposed: bool, lo: int, hi: int) -> Array:
    """The part of ``X W`` that ``lines[lo:hi]`` give, block by block."""
    sums = np.zeros((W.shape[1], lines.shape[1] if transposed else hi - lo))
    for at, block in _blocks(lines, lo, hi):
        end = at + block.shape[0]
        # einsum is slow in float16 and knows no bfloat16
        values = block.astype(np.float32) if block.dtype.itemsize == 2 else block
        for c, y in enumerate(sums):
            if transposed:  # y += X(:, at:end) w(at:end)
                y += np.einsum("ji,j->i", values, W[at:end, c])
            else:  # y(at:end) = X(at:end, :) w
                np.einsum("ij,j->i", values, W[:, c], out=y[at - lo : end - lo])
    return sums.T


def _blocks(lines: Array, lo: int, hi: int, share: int = 1, on_numpy: bool = True) -> list[tuple[int, Array]]:
    """Blocks of whole lines that fit a share of the cache, with the index of their first line; larger ones on a GPU."""
    if on_numpy:
        rows = max(1, BLOCK_BYTES // share // max(1, lines.shape[1] * lines.dtype.itemsize))
    else:
        rows = rows_per_block(lines.shape[1])
    if hi - lo <= rows:
        return [(lo, lines[lo:hi, :])]
    return [(at, lines[at : min(hi, at + rows), :]) for at in range(lo, hi, rows)]


# ---- any other library --------------------------------------------------------------------------------------------


def widened(X: Array, lo: int, hi: int) -> Array:
    """Rows lo to hi of X in float64: a copy."""
    return in_float64(X[lo:hi, :], copy=True)


def take_rows(X: Array, rows: np.ndarray[Any, Any]) -> Array:
    """The rows X(rows, :): a copy of these and of nothing else."""
    if isinstance(X, np.ndarray):
        return X.take(rows, 0) if X.flags.c_contiguous else X[rows, :]  # `take` would first copy all of another X
    xp = namespace(X)
    return xp.take(X, from_host(rows, X), axis=0)


def rows_per_block(columns: int, budget: int = 8 << 20) -> int:
    """How many float64 rows of that many columns fit a temporary of `budget` bytes."""
    return max(1, budget // (8 * max(1, columns)))


# ---- cores --------------------------------------------------------------------------------------------------------

_pools: dict[bytes, ThreadPoolExecutor] = {}  # of each mode of flushing, which threads have from who starts them
_pool_lock = threading.Lock()


def workers() -> int:
    """How many cores a pass on NumPy uses: those of this process, at most 8, at most ``OMP_NUM_THREADS``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return max(1, min(8, cores, int(asked) if asked.isdecimal() else cores))


def _threads(mode: bytes) -> ThreadPoolExecutor:
    with _pool_lock:
        if mode not in _pools:
            _pools[mode] = ThreadPoolExecutor(8, "abft_tsm2", lambda: setattr(_own, "asking", True))
        return _pools[mode]


def _helpers(work: Callable[[], None], number: int) -> list[Future[None]]:
    """So many threads that work; none for what runs in the middle of this, a signal handler say: locks are held here
    that a thread cannot take twice. Helpers have none either.

    They flush subnormal numbers as the caller does, or do nothing: a sum must not depend on who was free to take it.
    """
    if _own.asking or number < 1:
        return []
    _own.asking = True
    try:
        own = flushing_mode()

        def in_that_mode() -> None:
            if flushing_mode() == own:  # elsewhere threads may start in a mode of the system's
                work()

        threads = _threads(own)
        return [threads.submit(in_that_mode) for _ in range(number)]
    finally:
        _own.asking = False


def _forget_threads() -> None:
    """After a fork the child has the pool but not its threads."""
    global _pools, _pool_lock
    _pools, _pool_lock = {}, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def _on_all_cores(lines: Array, task: Callable[[int, int], Any]) -> list[Any]:
    """``[task(lo, hi), ...]`` over equal parts of the lines, in order.

    There are more parts than cores, and each core takes the next one that is left: a core on which something else
    runs (BLAS keeps its threads spinning for a while after a product) does fewer of them and delays no other. The
    parts depend on the size alone, so that sums over them do not depend on the number of cores.
    """
    count = lines.shape[0]
    parts = min(_PARTS, count) if lines.size >= SERIAL_ELEMENTS else 1
    cuts = [count * i // max(1, parts) for i in range(parts + 1)] if parts else [0, 0]
    done: list[Any] = [None] * (len(cuts) - 1)
    ticket = itertools.count()

    def work() -> None:
        with np.errstate(all="ignore"):  # overflow shows in the verdict
            while (i := next(ticket)) < len(done):
                done[i] = task(cuts[i], cuts[i + 1])

    helpers = _helpers(work, min(workers(), len(done)) - 1)
    work()
    for helper in helpers:
        if not helper.cancel():  # one that has not begun finds nothing left to do
            helper.result()
    return done
