"""`encode_both`: the checksums of both sides of a matrix, and its statistics, in one read of it.

On CuPy a kernel walks down stripes of columns and keeps the sums of columns in registers, while those of rows are
added across each warp (kernels/tsm2/encode_both.cu); a second, small one adds what the blocks of the first have left
behind, always in the same order. On other array libraries, and for what no kernel reads, blocks of rows that stay in
the cache are multiplied from both sides."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import (
    Array,
    as_operand,
    bit_pattern,
    dtype_name,
    from_host,
    is_column_major,
    is_cupy,
    is_numpy,
    namespace,
)
from abft_tsm2.core.compiler import kernel
from abft_tsm2.core.device import device_of
from abft_tsm2.core.encode_config import MOST_COLUMNS, AddConfig, BothConfig, EncodePlan, adder_of, choose, sums_of
from abft_tsm2.core.generated import Generated
from abft_tsm2.core.memory import scratch
from abft_tsm2.core.problem import SIZES
from abft_tsm2.core.tsm2 import tall_skinny_matmul

_BLOCK_BYTES = 1 << 20  # of a block of rows: half of a common level-2 cache
_DEVICE_BLOCK_BYTES = 64 << 20


class Encoding(NamedTuple):
    """What `encode_both` returns; what was not asked for is None.

    Attributes
    ----------
    rows : (m, r) array
        A V.
    columns : (r', k) array
        W' A.
    row_squares : (m,) array
        (A o A) q, with q = v o v of the first column v of V unless given.
    column_squares : (k,) array
        (A o A)' p, with p = w o w of the first column w of W unless given.
    row_words, column_words : (m,) and (k,) arrays of uint64
        Sums modulo 2^64 of the elements' bit patterns, as unsigned integers of their width.
    """

    rows: Array
    columns: Array
    row_squares: Array | None = None
    column_squares: Array | None = None
    row_words: Array | None = None
    column_words: Array | None = None

    @property
    def transposed(self) -> Encoding:
        """The encoding of the transposed matrix."""
        squares = self.column_squares, self.row_squares
        return Encoding(self.columns.T, self.rows.T, *squares, self.column_words, self.row_words)


@dataclass(frozen=True)
class EncodeTask:
    """A matrix and what is to be taken of it: V and W are arrays of the type of the sums, or `Generated`."""

    A: Array
    V: Array | Generated
    W: Array | Generated
    p: Array | None
    q: Array | None
    squares: bool
    words: bool
    sums: str

    @property
    def transposed(self) -> EncodeTask:
        """The same of A': rows and columns have changed places."""
        return EncodeTask(self.A.T, self.W, self.V, self.q, self.p, self.squares, self.words, self.sums)


def encode_both(
    A: Array,
    V: Array | Generated,
    W: Array | Generated,
    *,
    squares: bool | tuple[Array, Array] = False,
    words: bool = False,
    dtype: Any = None,
) -> Encoding:
    """``A V`` and ``W' A``, and where asked weighted sums of squares and sums of bit patterns, in one read of A.

    Parameters
    ----------
    A : (m, k) array, float16, float32, float64 or bfloat16
        Any order and strides; never copied whole.
    V : (k, r) array, or Generated
        Weights of the columns. Rounded to the type of the sums where they are wider.
    W : (m, r') array, or Generated
        Weights of the rows.
    squares : bool or pair of arrays
        Whether to take weighted sums of squares; a pair (p, q) of m and of k elements has their weights, that of the
        columns' sums first, else they are the squares of the first columns of W and V.
    words : bool
        Whether to add the bit patterns.
    dtype : {"float32", "float64"}, optional
        Type of sums and results, not narrower than A; float32 for 16-bit A and the type of A otherwise, unless given.

    Returns
    -------
    encoding : Encoding
        ``rows`` (m, r), ``columns`` (r', k), ``row_squares`` (m,), ``column_squares`` (k,), ``row_words`` (m,),
        ``column_words`` (k,), new arrays of the library of A, possibly views of common memory.

    Raises
    ------
    TypeError
        For integers, booleans, complex, or arrays of different libraries.
    ValueError
        If shapes do not fit, arrays lie on different devices, or `dtype` is not one that sums of A may have.

    Notes
    -----
    On CuPy, up to four columns of weights on either side are one kernel and a small one that adds its parts, on the
    caller's current stream of A's device, row-major and column-major alike; weights beyond that, and an A whose
    elements are contiguous in no direction, are multiplied in blocks of rows. Sums are taken in a fixed order: a call
    repeated gives the same bits. 2 m k (r + r') flops, and 6 m k for the squares. NaN and Inf spread as in a product.
    In float32, kernels compiled through CuPy take subnormal numbers for zero. No host synchronisation.

    Weighted checksums of both sides: K.-H. Huang, J. A. Abraham, Algorithm-based fault tolerance for matrix operations,
    IEEE Trans. Computers C-33 (1984) 518-528.

    Examples
    --------
    >>> import numpy as np
    >>> from abft_tsm2.core.encode_both import encode_both
    >>> A = np.arange(6.0).reshape(2, 3)
    >>> encoding = encode_both(A, np.ones((3, 1)), np.ones((2, 1)), squares=True)
    >>> encoding.rows.ravel(), encoding.columns.ravel(), encoding.row_squares
    (array([ 3., 12.]), array([3., 5., 7.]), array([ 5., 50.]))
    """
    task = _checked(A, V, W, squares, words, dtype)
    if not is_cupy(task.A):
        return _by_blocks(task)
    with task.A.device:
        return _on_device(task, device_of(task.A.device.id).multiprocessors)


# ---- the arguments -------------------------------------------------------------------------------------------------


def _checked(A: Array, V: Any, W: Any, squares: Any, words: bool, dtype: Any) -> EncodeTask:
    A = as_operand(A, "A")
    if A.ndim != 2:
        raise ValueError(f"A has shape {tuple(A.shape)}: pass a matrix")
    name, (m, k) = dtype_name(A.dtype), A.shape
    allowed = sums_of(name)
    sums = allowed[0] if dtype is None else dtype if isinstance(dtype, str) else _name_of(dtype)
    if sums not in allowed:
        raise ValueError(f"dtype = {sums}: sums of {name} elements are taken in {' or '.join(allowed)}")
    V, W = _weights(A, V, "V", "k", k, sums), _weights(A, W, "W", "m", m, sums)
    p = q = None
    if not isinstance(squares, bool):
        if not isinstance(squares, tuple | list) or len(squares) != 2:
            raise ValueError("squares is True, False, or a pair (p, q) of weights: p of m elements, q of k")
        p, q = (_vector(A, x, *of, sums) for x, of in zip(squares, (("p", m), ("q", k)), strict=True))
    elif squares and 0 in (_columns(V), _columns(W)):
        raise ValueError("without a column of V and of W squares need weights of their own: pass squares=(p, q)")
    return EncodeTask(A, V, W, p, q, bool(squares) if isinstance(squares, bool) else True, bool(words), sums)


def _name_of(dtype: Any) -> str:
    return dtype_name(np.dtype(dtype) if isinstance(dtype, type) else dtype)


def _columns(V: Array | Generated) -> int:
    return V.r if isinstance(V, Generated) else int(V.shape[1])


def _weights(A: Array, V: Any, name: str, size: str, n: int, sums: str) -> Array | Generated:
    if isinstance(V, Generated):
        return V
    V = as_operand(V, name)
    if V.ndim != 2 or V.shape[0] != n:
        raise ValueError(f"{name} has shape {tuple(V.shape)}, A {tuple(A.shape)}: {name} has {size} = {n} rows")
    return _converted(A, V, name, sums)


def _vector(A: Array, x: Any, name: str, n: int, sums: str) -> Array:
    x = as_operand(x, name)
    if tuple(x.shape) != (n,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}: weights of the squares of A {tuple(A.shape)} are ({n},)")
    return _converted(A, x, name, sums)


def _converted(A: Array, x: Array, name: str, sums: str) -> Array:
    xp = namespace(A, x)
    if x.device != A.device:
        raise ValueError(f"A lies on {A.device}, {name} on {x.device}: move one of them")
    return xp.astype(x, getattr(xp, sums), copy=False)


# ---- in blocks of rows ---------------------------------------------------------------------------------------------


def _by_blocks(task: EncodeTask) -> Encoding:
    if is_column_major(task.A):
        return _rows_blockwise(task.transposed).transposed
    return _rows_blockwise(task)


def _rows_blockwise(task: EncodeTask) -> Encoding:
    A, xp = task.A, namespace(task.A)
    m, k = A.shape
    kind = getattr(xp, task.sums)
    V, W = _stored(task.V, k, task), _stored(task.W, m, task)
    product = np.matmul if is_numpy(A) else tall_skinny_matmul

    def zeros(*shape: int, dtype: Any = kind) -> Array:
        return xp.zeros(shape, dtype=dtype, device=A.device)

    rows, columns = zeros(m, V.shape[1]), zeros(W.shape[1], k)
    row_squares, column_squares = zeros(m, 1), zeros(1, k)
    words: tuple[Array, ...] = (zeros(m, dtype=xp.uint64), zeros(k, dtype=xp.uint64)) if task.words else ()
    if task.squares:
        p = (W[:, 0] ** 2 if task.p is None else task.p)[None, :]
        q = (V[:, 0] ** 2 if task.q is None else task.q)[:, None]
    budget = _BLOCK_BYTES if is_numpy(A) else _DEVICE_BLOCK_BYTES
    step = max(1, budget // max(1, k * SIZES[task.sums]))
    with np.errstate(all="ignore"):  # NaN, Inf and overflow show in the result
        for lo in range(0, m if k else 0, step):
            at = slice(lo, min(m, lo + step))
            # rows(at, :) = A(at, :) V, columns += W(at, :)' A(at, :); the same of the squares
            block = xp.astype(A[at, :], kind, copy=False)
            rows[at, :] = product(block, V)
            columns += product(W[at, :].T, block)
            if task.squares:
                block = block * block
                row_squares[at, :] = product(block, q)
                column_squares += product(p[:, at], block)
            if words:
                bits = bit_pattern(xp.asarray(A[at, :], copy=True))
                words[0][at] = from_host(bits.sum(axis=1, dtype=np.uint64), A)
                words[1][:] += from_host(bits.sum(axis=0, dtype=np.uint64), A)
    squares: tuple[Any, Any] = (row_squares[:, 0], column_squares[0, :]) if task.squares else (None, None)
    return Encoding(rows, columns, *squares, *words)


def _stored(V: Array | Generated, n: int, task: EncodeTask) -> Array:
    return from_host(V.weights(n).astype(task.sums), task.A) if isinstance(V, Generated) else V


# ---- by the kernels ------------------------------------------------------------------------------------------------


def launched_by(launch: LaunchOf, A: Array, V: Array, W: Array, spared: int = 0) -> Encoding:
    """`encode_both` with squares and words, in float64, of a CuPy array whose rows or columns are contiguous, by a
    caller who launches the kernels as often as there is something to encode in these places.

    Parameters
    ----------
    launch : callable
        ``launch(config, grid, args)``, once for each kernel, in this order; the first has A's address and leading
        dimension at `PLACE`, and all arguments have eight bytes.
    A, V, W : arrays
        As there. What is returned is theirs as soon as the launches have run, and needs the memory in `args`.
    spared : int
        Multiprocessors that are left to others: no block waits for one of these.
    """
    import cupy

    task = _checked(A, V, W, True, True, "float64")
    multiprocessors = max(1, device_of(A.device.id).multiprocessors - spared)
    memory = functools.partial(cupy.empty, dtype=cupy.uint8)
    return _by_kernels(task, multiprocessors, launch, memory, waves=1 if spared else 2)


PLACE = slice(2, 4)
LaunchOf = Callable[[BothConfig | AddConfig, tuple[int, ...], tuple[Any, ...]], None]


def _launched(config: BothConfig | AddConfig, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    kernel(config)(grid, (config.t1,), args)


def _on_device(task: EncodeTask, multiprocessors: int) -> Encoding:
    """The encoding of a CuPy array on the current device, which has so many multiprocessors."""
    return _by_kernels(task, multiprocessors, _launched, lambda size: scratch(size, 0)[0])


def _by_kernels(
    task: EncodeTask, multiprocessors: int, launch: LaunchOf, memory: Callable[[int], Array], waves: int = 2
) -> Encoding:
    """The same, its kernels launched by this function, with so many bytes of memory as are asked for."""
    size = task.A.itemsize
    if task.A.strides[1] != size and task.A.shape[1] > 1:
        if task.A.strides[0] == size or task.A.shape[0] == 1:
            return _by_kernels(task.transposed, multiprocessors, launch, memory, waves).transposed
        return _by_blocks(task)
    counts = _columns(task.V), _columns(task.W)
    # The address, and all that is added to it: the lowest bit of them that is set is what they are multiples of.
    multiple = task.A.data.ptr | task.A.strides[0] | task.A.shape[1] * size | 16
    width = multiple & -multiple
    if task.A.size == 0 or min(counts) < 1 or max(counts) > MOST_COLUMNS or width < size:
        return _by_blocks(task)
    right, left = (x.kind if isinstance(x, Generated) else "read" for x in (task.V, task.W))
    options: dict[str, Any] = {"squares": task.squares, "words": task.words, "right": right, "left": left}
    config = choose(dtype_name(task.A.dtype), task.sums, max(counts), width=width, **options)
    plan = EncodePlan.of(config, task.A.shape[0], task.A.shape[1], multiprocessors, waves)
    return run(config, plan, task, memory(workspace_bytes(config, plan)), launch)


def workspace_bytes(config: BothConfig, plan: EncodePlan) -> int:
    """What blocks leave behind: `run` takes it from the caller."""
    return sum(size for _, size in _sections(config, plan))


def _sections(config: BothConfig, plan: EncodePlan) -> list[tuple[int, int]]:
    """Number of parts, and bytes of them all in the workspace, of sums of rows, of columns, of words of both.

    A single part needs no memory: it is the result.
    """
    size = config.values * SIZES[config.sums]
    counts = [(plan.stripes, plan.m * size), (plan.groups, plan.k * size)]
    counts += [(plan.stripes, plan.m * 8), (plan.groups, plan.k * 8)] if config.words else []
    return [(parts, 0 if parts == 1 else -(-parts * nbytes // 16) * 16) for parts, nbytes in counts]


def run(config: BothConfig, plan: EncodePlan, task: EncodeTask, workspace: Array, launch: Any) -> Encoding:
    """Both kernels, through ``launch(config, grid, args)``: on CuPy arrays, or wherever their text has been compiled.

    Parameters
    ----------
    config : BothConfig
    plan : Plan
        Of this configuration and of the shape of A.
    task : Task
        A is row-major: its rows are contiguous.
    workspace : (nbytes,) array of uint8
        At least `workspace_bytes`, at a multiple of 16; overwritten.
    launch : callable
    """
    A, xp = task.A, namespace(task.A)
    m, k, kind, number = plan.m, plan.k, getattr(xp, task.sums), config.values
    results = [xp.empty((number, m), dtype=kind), xp.empty((number, k), dtype=kind)]
    results += [xp.empty(n if config.words else 0, dtype=xp.uint64) for n in (m, k)]
    nothing, parts, at = results[0][:0], list(results), 0
    for i, (count, nbytes) in enumerate(_sections(config, plan)):
        if count > 1:
            parts[i] = workspace[at : at + count * results[i].nbytes].view(results[i].dtype)
            at += nbytes
    arguments: list[Any] = [_long(m), _long(k), A, _long(A.strides[0] // A.itemsize)]
    for V, given in ((task.V, task.q), (task.W, task.p)):
        arguments += _weight_arguments(V, given, nothing)
    launch(config, (plan.stripes, plan.groups), (*arguments, _long(plan.slice), *parts))
    if max(plan.stripes, plan.groups) > 1:
        adder = adder_of(config, plan)
        added: list[Any] = []
        for i, length in enumerate((number * m, number * k, m, k)):
            if i < 2:  # the words have as many parts
                added.append(_long((plan.stripes, plan.groups)[i]))
            added += [_long(length), nothing if parts[i] is results[i] else parts[i], results[i]]
        launch(adder, (-(-number * max(m, k) // 32), 4 if config.words else 2), tuple(added))
    rows, columns = results[:2]
    squares: tuple[Any, Any] = (rows[config.r], columns[config.r]) if config.squares else (None, None)
    words = results[2:] if config.words else []
    return Encoding(rows[: _columns(task.V)].T, columns[: _columns(task.W)], *squares, *words)


def _weight_arguments(V: Array | Generated, given: Array | None, nothing: Array) -> list[Any]:
    """An array or a seed, and the weights of the squares: what `Weights` of kernels/tsm2/generated.cuh is made of."""
    squares = [nothing if given is None else given, _stride(given, 0), _long(given is not None)]
    if isinstance(V, Generated):
        return [nothing, _long(0), _long(0), _long(V.r), np.uint64(V.seed), *squares]
    return [V, _stride(V, 0), _stride(V, 1), _long(V.shape[1]), np.uint64(0), *squares]


def _stride(x: Array | None, axis: int) -> np.int64:
    return _long(0 if x is None else x.strides[axis] // x.itemsize)


def _long(x: int) -> np.int64:
    return np.int64(x)
