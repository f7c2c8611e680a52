"""Tall-skinny products: `tsm2r` (large times a few columns), `tsm2l` (tall and skinny times small), and their dispatch.

C. Rivera, J. Chen et al., TSM2X: High-performance tall-and-skinny matrix-matrix multiplication on GPUs, Journal of
Parallel and Distributed Computing 151, 2021. On CuPy a product is one kernel launch, or the vendor library's where no
kernel serves or the library is faster; on any other array library it is the library's own.
"""

from __future__ import annotations

import contextlib

from abft_tsm2.arrays import Array, as_operand, dtype_name, float_type, is_cupy, is_writable, namespace, overlap
from abft_tsm2.core.config import TSM2L, TSM2R, Config, Problem, published
from abft_tsm2.core.launch import device_of, problem_of, run
from abft_tsm2.core.multiply import multiply
from abft_tsm2.core.tune import choose
from abft_tsm2.errors import NotSuitable


def tall_skinny_matmul(A: Array, B: Array, *, out: Array | None = None, alpha: float = 1.0, beta: float = 0.0) -> Array:
    """``alpha A B + beta out`` for a matrix that is tall and skinny, or one that is multiplied by a few columns.

    Parameters
    ----------
    A : (m, k) array, float16, float32, float64 or bfloat16
        Any order and strides.
    B : (k, n) array
        n is small.
    out : (m, n) array, optional
        Receives the result: of the common type of A and B, of any order and strides, sharing no memory with A or B.
    alpha, beta : float
        beta other than 0 needs `out`, which is read then and only then.

    Returns
    -------
    C : (m, n) array
        `out` if given, else a new row-major array of the common type of A and B.

    Raises
    ------
    TypeError
        For integers, booleans, complex, or arrays of different libraries.
    ValueError
        If the operands are not matrices whose inner dimensions agree, lie on different devices, or `out` does not fit.

    Notes
    -----
    On NumPy this is the array library's product. On CuPy the shape decides: few rows of B go to `tsm2l`, few columns
    to `tsm2r`, with the parameters that `abft_tsm2.core.tune.choose` names, on the caller's current stream of the
    operands' device; the vendor library has the last word wherever no kernel serves. 2 m k n flops, one reading of A.
    No host synchronisation.

    Examples
    --------
    >>> import numpy as np
    >>> from abft_tsm2 import tall_skinny_matmul
    >>> tall_skinny_matmul(np.eye(3), np.ones((3, 1))).ravel()
    array([1., 1., 1.])
    """
    A, B = _checked(A, B, out, beta)
    return (_by_shape if is_cupy(A) else _library_product)(A, B, out, alpha, beta)


def tsm2r(
    A: Array,
    B: Array,
    *,
    variant: str | None = None,
    config: Config | None = None,
    out: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Array:
    """``alpha A B + beta out`` by TSM2R: a large A times a tall and skinny B.

    Parameters
    ----------
    A : (m, k) array, float32 or float64
        Column-major on a GPU: the columns contiguous, any leading dimension.
    B : (k, n) array of the same type
        Any strides; n of a few columns.
    variant : {"V0", "V1", "V2", "V3"}, optional
        Algorithm 1 (inner product), 2 (outer product), 3 (shared memory) or 4 (prefetch) of the paper; "V3" where
        none is given.
    config : Config, optional
        Variant and parameters t1, t2, t3; where none is given, those that the paper found on a V100.
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
    return _by_name(A, B, out, alpha, beta, variant, config, TSM2R, "V3")


def tsm2l(
    A: Array,
    B: Array,
    *,
    variant: str | None = None,
    config: Config | None = None,
    out: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Array:
    """``alpha A B + beta out`` by TSM2L: a tall and skinny A times a small B.

    Parameters
    ----------
    A : (m, k) array, float32 or float64
        Column-major on a GPU: the columns contiguous, any leading dimension. k of a few columns serves best.
    B : (k, n) array of the same type
        Any strides.
    variant : {"Opt-1", "Opt-2"}, optional
        Algorithm 6 (each tile of A meets B in turn) or 7 (each tile of B meets all of A) of the paper; "Opt-1" where
        none is given.
    config : Config, optional
        Variant and parameters t1, t2, t3, tcf; where none is given, those that the paper found on a V100.
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
    return _by_name(A, B, out, alpha, beta, variant, config, TSM2L, "Opt-1")


def _by_name(
    A: Array,
    B: Array,
    out: Array | None,
    alpha: float,
    beta: float,
    variant: str | None,
    config: Config | None,
    family: tuple[str, ...],
    default: str,
) -> Array:
    """The product by the kernel that was asked for; away from CuPy the library's, unless one was asked for by name."""
    if config is not None and variant not in (None, config.variant):
        raise ValueError(f"variant={variant!r}, but the configuration is {config.name}: leave one of them out")
    name = config.variant if config is not None else variant or default
    if name not in family:
        raise ValueError(f"there is no variant {name!r} here: choose from {', '.join(family)}")
    A, B = _checked(A, B, out, beta)
    if is_cupy(A):
        with A.device:
            problem = problem_of(A, B)
            return _launched(config or published(problem, name), problem, A, B, out, alpha, beta)
    if variant is None and config is None:
        return _library_product(A, B, out, alpha, beta)
    raise NotSuitable(
        f"{config.name if config is not None else name} is a CUDA kernel, and A is a "
        f"{type(A).__module__}.{type(A).__name__}: it needs a GPU, CuPy (abft_tsm2[cu13]) and CuPy arrays "
        "(cupy.asarray(A)); without a variant the array library multiplies"
    )


def _by_shape(A: Array, B: Array, out: Array | None, alpha: float, beta: float) -> Array:
    """The product by the first of the chosen kernels that serves, of CuPy arrays; else the vendor library's."""
    with A.device:
        try:
            problem = problem_of(A, B)
        except NotSuitable:
            return _library_product(A, B, out, alpha, beta)
        for config in choose(problem, device_of(A.device.id)):
            with contextlib.suppress(NotSuitable):
                return _launched(config, problem, A, B, out, alpha, beta)
        return _library_product(A, B, out, alpha, beta)


def _launched(
    config: Config, problem: Problem, A: Array, B: Array, out: Array | None, alpha: float, beta: float
) -> Array:
    C = out if out is not None else namespace(A).empty((problem.m, problem.n), dtype=A.dtype)
    run(config, device_of(A.device.id), A, B, C, alpha, beta, problem=problem)
    return C


def _checked(A: Array, B: Array, out: Array | None, beta: float) -> tuple[Array, Array]:
    """A and B as arrays; they and `out` fit together."""
    A, B = as_operand(A, "A"), as_operand(B, "B")
    if A.ndim != 2 or B.ndim != 2 or A.shape[1] != B.shape[0]:
        raise ValueError(f"A {tuple(A.shape)} and B {tuple(B.shape)} are not (m, k) and (k, n) matrices")
    namespace(A, B)  # one library
    if out is None and beta != 0:
        raise ValueError(f"beta = {beta} multiplies what `out` holds: pass out=")
    if A.device != B.device:
        raise ValueError(f"A lies on {A.device}, B on {B.device}: move one of them")
    if out is not None:
        _check_out(out, A, B)
    return A, B


def _library_product(A: Array, B: Array, out: Array | None, alpha: float, beta: float) -> Array:
    xp = namespace(A)
    if out is None and alpha == 1.0 and max(float_type(A).bits, float_type(B).bits) > 16:
        return xp.matmul(A, B)
    if out is None:
        out = xp.empty((A.shape[0], B.shape[1]), dtype=xp.result_type(A, B), device=A.device)
    before = xp.asarray(out, copy=True) if beta != 0 else None
    multiply(A, B, out, before, alpha=alpha, beta=beta)
    return out


def _check_out(out: Array, A: Array, B: Array) -> None:
    xp = namespace(A, out)
    shape, dtype = (A.shape[0], B.shape[1]), xp.result_type(A, B)
    if tuple(out.shape) != shape or out.dtype != dtype:
        raise ValueError(
            f"out is {tuple(out.shape)} of {dtype_name(out.dtype)}, the product is {shape} of {dtype_name(dtype)}"
        )
    if out.device != A.device:
        raise ValueError(f"out lies on {out.device}, A on {A.device}: move one of them")
    if not is_writable(out):
        raise ValueError("out is read-only: pass an array that may be written")
    strides = getattr(out, "strides", ())
    if 0 not in shape and any(stride == 0 and size > 1 for stride, size in zip(strides, shape, strict=False)):
        raise ValueError(f"elements of out share memory (strides {strides}): pass an array of its own")
    if overlap(out, A) or overlap(out, B):
        raise ValueError("out shares memory with A or B, which are read while it is written: pass another array")
