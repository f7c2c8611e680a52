"""Tall-skinny products: `tsm2r` (large times a few columns), `tsm2l` (tall and skinny times small), and their dispatch.

C. Rivera, J. Chen et al., TSM2X: High-performance tall-and-skinny matrix-matrix multiplication on GPUs, Journal of
Parallel and Distributed Computing 151, 2021. On CuPy a product is one kernel launch, or the vendor library's where no
kernel serves or the library is faster; on any other array library it is the library's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from abft_tsm2.arrays import (
    FLOATS,
    Array,
    as_operand,
    as_output,
    dtype_name,
    float_type,
    is_cupy,
    namespace,
    overlap,
    real_number,
    type_name,
)
from abft_tsm2.core.choose import choose
from abft_tsm2.core.device import device_of
from abft_tsm2.core.kernels import Stream, candidates
from abft_tsm2.core.matmul import multiply
from abft_tsm2.core.paper.config import TSM2L, TSM2R, Config, published
from abft_tsm2.core.paper.launch import run
from abft_tsm2.core.split_k import ProductLaunch, by_vendor, launched, problem_of
from abft_tsm2.errors import NotSuitable

AUTO = "auto"
_KEPT = 4096  # plans
_plans: dict[tuple[Any, ...], tuple[ProductLaunch, tuple[int, ...], Any]] = {}


def tall_skinny_matmul(
    A: Array,
    B: Array,
    *,
    out: Array | None = None,
    dtype: Any = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Array:
    """``alpha A B + beta out`` for a matrix that is tall and skinny, or one that is multiplied by a few columns.

    Parameters
    ----------
    A : (..., m, k) array, float16, float32, float64 or bfloat16
        Any order and strides; `A.T` is as good as `A`. Stacks broadcast as in `numpy.matmul`.
    B : (..., k, n) array
        n is small.
    out : (..., m, n) array, optional
        Receives the result: of any order and strides, sharing no memory with A or B.
    dtype : dtype, optional
        Of the sums and the result, at least as wide as A and B; their common type where neither this nor `out` says
        otherwise. float64 of float32 operands costs a GPU nothing while A streams by.
    alpha, beta : float
        beta other than 0 needs `out`, which is read then and only then.

    Returns
    -------
    C : (..., m, n) array
        `out` if given, else a new row-major array.

    Raises
    ------
    TypeError
        For integers, booleans, complex, arrays of different libraries, or a result narrower than the operands.
    ValueError
        If the operands are not matrices whose inner dimensions agree, lie on different devices, or `out` does not fit.

    Notes
    -----
    On NumPy this is the array library's product. On CuPy what `abft_tsm2.core.choose.choose` names multiplies, in one
    launch on the caller's current stream of the operands' device: a kernel that reads A once, in any order, and adds
    in a fixed order, so that results are equal bit for bit from run to run, or the vendor library. Sums are float32 at
    least, float64 where an operand or the result is. 2 m k n flops, one reading of A. No host synchronisation; the
    first product of a kind compiles its kernel.

    Examples
    --------
    >>> import numpy as np
    >>> from abft_tsm2 import tall_skinny_matmul
    >>> tall_skinny_matmul(np.eye(3), np.ones((3, 1))).ravel()
    array([1., 1., 1.])
    """
    alpha, beta = real_number(alpha, "alpha"), real_number(beta, "beta")
    on_gpu = is_cupy(A) and is_cupy(B) and (beta == 0 if out is None else is_cupy(out))
    key = _key(A, B, out, dtype) if on_gpu else None
    found = _plans.get(key) if key is not None else None
    if found is None:
        A, B, out_type = _checked(A, B, out, dtype, beta)
        found = _remember(key, A, B, out, out_type) if key is not None else None
    if found is not None:
        return _planned(found, A, B, out, alpha, beta)
    return _library_product(A, B, out, out_type, alpha, beta)


def tsm2r(
    A: Array,
    B: Array,
    *,
    variant: str | None = None,
    config: Config | Stream | None = None,
    out: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Array:
    """``alpha A B + beta out`` by TSM2R: a large A times a tall and skinny B.

    Parameters
    ----------
    A : (m, k) array
        On a GPU rows or columns contiguous, any leading dimension; for V0 to V3 the columns, float32 or float64.
    B : (k, n) array
        Any strides; n at most 32, of a few columns for V0 to V3 and of A's type.
    variant : {"auto", "V0", "V1", "V2", "V3"}, optional
        "auto", where none is given, is the kernel for today's GPUs. The others are those of the paper: Algorithm 1
        (inner product), 2 (outer product), 3 (shared memory) or 4 (prefetch).
    config : Stream or Config, optional
        A kernel with all its parameters; where none is given, those that were found fastest on an H200 ("auto") or
        those that the paper found on a V100.
    out, alpha, beta
        As in `tall_skinny_matmul`.

    Returns
    -------
    C : (m, n) array
        `out` if given, else a new row-major array.

    Raises
    ------
    NotSuitable
        If the kernel cannot serve these operands, with the reason; `tall_skinny_matmul` takes any.
    TypeError, ValueError
        As `tall_skinny_matmul`.

    Notes
    -----
    NumPy arrays, and those of any library but CuPy, are multiplied by their library; asking for a variant of a CUDA
    kernel raises then. Results are equal bit for bit from run to run. No host synchronisation.

    Examples
    --------
    >>> import numpy as np
    >>> from abft_tsm2 import tsm2r
    >>> tsm2r(np.eye(3), np.ones((3, 2)), alpha=2.0)[0]
    array([2., 2.])
    """
    return _by_name(A, B, out, alpha, beta, variant, config, TSM2R)


def tsm2l(
    A: Array,
    B: Array,
    *,
    variant: str | None = None,
    config: Config | Stream | None = None,
    out: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Array:
    """``alpha A B + beta out`` by TSM2L: a tall and skinny A times a small B.

    Parameters
    ----------
    A : (m, k) array
        On a GPU any order, k at most 32; for Opt-1 and Opt-2 the columns contiguous, float32 or float64, any k.
    B : (k, n) array
        Any strides; n at most 32. For Opt-1 and Opt-2 of A's type, any n.
    variant : {"auto", "Opt-1", "Opt-2"}, optional
        "auto", where none is given, is the kernel for today's GPUs. The others are those of the paper: Algorithm 6
        (each tile of A meets B in turn) or 7 (each tile of B meets all of A).
    config : Stream or Config, optional
        A kernel with all its parameters; where none is given, those that were found fastest on an H200 ("auto") or
        those that the paper found on a V100.
    out, alpha, beta
        As in `tall_skinny_matmul`.

    Returns
    -------
    C : (m, n) array
        `out` if given, else a new row-major array.

    Raises
    ------
    NotSuitable, TypeError, ValueError
        As `tsm2r`.

    Notes
    -----
    As for `tsm2r`. With more than t1 rows of B, Opt-2 keeps the sums so far in C.

    Examples
    --------
    >>> import numpy as np
    >>> from abft_tsm2 import tsm2l
    >>> tsm2l(np.ones((1000, 2)), np.eye(2)).shape
    (1000, 2)
    """
    return _by_name(A, B, out, alpha, beta, variant, config, TSM2L)


def _by_name(
    A: Array,
    B: Array,
    out: Array | None,
    alpha: float,
    beta: float,
    variant: str | None,
    config: Config | Stream | None,
    family: tuple[str, ...],
) -> Array:
    """The product by the kernel that was asked for; away from CuPy the library's, unless one was asked for by name."""
    alpha, beta = real_number(alpha, "alpha"), real_number(beta, "beta")
    own = config.variant if isinstance(config, Config) else AUTO
    if config is not None and variant not in (None, own):
        raise ValueError(f"variant={variant!r}, but the configuration is {config.name}: leave one of them out")
    name = own if config is not None else variant or AUTO
    if name not in (AUTO, *family):
        raise ValueError(f"there is no variant {name!r} here: choose from {', '.join((AUTO, *family))}")
    A, B, out_type = _checked(A, B, out, None, beta)
    if is_cupy(A) and A.ndim == B.ndim == 2:
        with A.device:
            C = _output(A, B, out, out_type)
            problem, device = problem_of(A, B, C), device_of(A.device.id)
            if name != AUTO:
                paper = config if isinstance(config, Config) else published(problem, name)
                run(paper, device, A, B, C, alpha, beta, problem=problem)
            elif C.size:
                small = family == TSM2L
                found = (c for c in candidates(problem) if (c.form == "small") == small)
                kernel = config if isinstance(config, Stream) else next(found, None)
                if kernel is None:
                    raise NotSuitable(f"{'TSM2L' if small else 'TSM2R'} has no kernel for {problem}")
                launched(kernel, problem, device, A, B, C)(A, B, C, alpha, beta)
            return C
    if variant is None and config is None:
        return _library_product(A, B, out, out_type, alpha, beta)
    raise NotSuitable(
        f"{config.name if config is not None else name} is a CUDA kernel, and A is a "
        f"{type(A).__module__}.{type(A).__name__} of {A.ndim} dimensions: it needs a GPU, CuPy (abft_tsm2[cu13]) and "
        "two CuPy matrices (cupy.asarray(A)); without a variant the array library multiplies"
    )


# ---- plans --------------------------------------------------------------------------------------------------------


def _key(A: Array, B: Array, out: Array | None, dtype: Any) -> tuple[Any, ...]:
    """All that a plan depends on: device, shapes, strides, types, and how far addresses are aligned."""
    given = None if out is None else (out.shape, out.strides, out.dtype, out.data.ptr % 16)
    return (
        *(A.data.device_id, A.shape, A.strides, A.dtype, A.data.ptr % 16),
        *(B.data.device_id, B.shape, B.strides, B.dtype, B.data.ptr % 16, given, dtype),
    )


def _remember(key: tuple[Any, ...], A: Array, B: Array, out: Array | None, out_type: Any) -> Any:
    """Find out what multiplies arrays like these, and keep it: plan, shape and type of C; None for the library."""
    if max(A.ndim, B.ndim) > 3:
        return None
    with A.device:
        C = _output(A, B, out, out_type)
        plan = _plan(A, B, C)
    if plan is None:
        return None
    if len(_plans) >= _KEPT:
        _plans.clear()
    _plans[key] = found = plan, C.shape, C.dtype
    return found


def _plan(A: Array, B: Array, C: Array) -> ProductLaunch | None:
    """The first of the chosen kernels that serves; else the vendor library in one call, where it can."""
    if C.size == 0 or A.shape[-1] == 0:
        return None
    try:
        problem, device = problem_of(A, B, C), device_of(A.device.id)
        for config in choose(problem, device).configs:
            try:
                return launched(config, problem, device, A, B, C)
            except NotSuitable:
                continue
        return by_vendor(problem, A, B, C)
    except NotSuitable:
        return None


def _planned(
    found: tuple[ProductLaunch, tuple[int, ...], Any], A: Array, B: Array, out: Array | None, alpha: float, beta: float
) -> Array:
    import cupy

    plan, shape, dtype = found
    if out is not None and (overlap(out, A) or overlap(out, B)):
        raise ValueError("out shares memory with A or B, which are read while it is written: pass another array")
    device = A.data.device_id
    if cupy.cuda.runtime.getDevice() == device:
        C = cupy.empty(shape, dtype) if out is None else out
        plan(A, B, C, alpha, beta)
        return C
    with cupy.cuda.Device(device):
        C = cupy.empty(shape, dtype) if out is None else out
        plan(A, B, C, alpha, beta)
        return C


# ---- operands -----------------------------------------------------------------------------------------------------


def _checked(A: Array, B: Array, out: Array | None, dtype: Any, beta: float) -> tuple[Array, Array, Any]:
    """A and B as arrays, and the type of the result; they and `out` fit together."""
    A, B = as_operand(A, "A"), as_operand(B, "B")
    out = None if out is None else as_output(out)
    if min(A.ndim, B.ndim) < 2 or A.shape[-1] != B.shape[-2]:
        raise ValueError(f"A {tuple(A.shape)} and B {tuple(B.shape)} are not (..., m, k) and (..., k, n) matrices")
    xp = namespace(A, B)  # one library
    if out is None and beta != 0:
        raise ValueError(f"beta = {beta} multiplies what `out` holds: pass out=")
    if A.device != B.device:
        raise ValueError(f"A lies on {A.device}, B on {B.device}: move one of them")
    try:
        shape = (*np.broadcast_shapes(A.shape[:-2], B.shape[:-2]), A.shape[-2], B.shape[-1])
    except ValueError:
        raise ValueError(f"stacks of {A.shape[:-2]} and {B.shape[:-2]} matrices do not broadcast") from None
    common = xp.result_type(A, B)
    wanted = common if dtype is None else _named(dtype, xp, common)
    if dtype is None and out is not None and _bits(out.dtype) >= _bits(common):
        wanted = out.dtype
    if dtype_name(wanted) not in FLOATS or _bits(wanted) < _bits(common):
        raise TypeError(
            f"a result of {dtype_name(wanted)} is narrower than {dtype_name(common)}, the common type of A and B, or "
            f"none of {', '.join(FLOATS)}"
        )
    if out is not None:
        _check_out(out, A, B, shape, wanted)
    return A, B, wanted


def _named(dtype: Any, xp: Any, common: Any) -> Any:
    """The library's own dtype object."""
    name = type_name(dtype)
    if name == dtype_name(common):
        return common
    if not hasattr(xp, name):
        raise TypeError(f"{xp.__name__} has no {name}: choose from {', '.join(FLOATS)}")
    found = getattr(xp, name)
    return np.dtype(found) if isinstance(found, type) else found


def _bits(dtype: Any) -> int:
    found = FLOATS.get(dtype_name(dtype))
    return found.bits if found is not None else 0


def _output(A: Array, B: Array, out: Array | None, dtype: Any) -> Array:
    if out is not None:
        return out
    shape = (*np.broadcast_shapes(A.shape[:-2], B.shape[:-2]), A.shape[-2], B.shape[-1])
    return namespace(A).empty(shape, dtype=dtype, device=A.device)


def _library_product(A: Array, B: Array, out: Array | None, dtype: Any, alpha: float, beta: float) -> Array:
    """By the array library: whole where it can, else matrix by matrix."""
    xp = namespace(A)
    plain = out is None and alpha == 1.0 and max(float_type(A).bits, float_type(B).bits) > 16
    if plain and dtype == xp.result_type(A, B):
        return xp.matmul(A, B)
    C = _output(A, B, out, dtype)
    left, right = (xp.broadcast_to(x, (*C.shape[:-2], *x.shape[-2:])) for x in (A, B))
    for at in (...,) if C.ndim == 2 else np.ndindex(*C.shape[:-2]):
        before = xp.asarray(C[at], copy=True) if beta != 0 else None
        multiply(left[at], right[at], C[at], before, alpha=alpha, beta=beta)
    return C


def _check_out(out: Array, A: Array, B: Array, shape: tuple[int, ...], dtype: Any) -> None:
    namespace(A, out)
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ValueError(
            f"out is {tuple(out.shape)} of {dtype_name(out.dtype)}, the product is {shape} of {dtype_name(dtype)}"
        )
    if out.device != A.device:
        raise ValueError(f"out lies on {out.device}, A on {A.device}: move one of them")
    if overlap(out, A) or overlap(out, B):
        raise ValueError("out shares memory with A or B, which are read while it is written: pass another array")
