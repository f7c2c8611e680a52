"""Check the operands of factorisations and linear systems, as SciPy does; split stacks of them, and join results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from abft_tsm2.arrays import (
    Array,
    as_operand,
    dtype_name,
    in_numpy,
    is_cupy,
    is_numpy,
    namespace,
    refuse_other_containers,
    to_host,
)
from abft_tsm2.report import Report

NATIVE = ("float32", "float64")


def as_array(x: Any, name: str, *, check_finite: bool = True) -> Array:
    """`x` in float32 or float64, as SciPy would compute with it; x itself where it is that.

    Raises
    ------
    TypeError
        For complex numbers, objects, masked arrays and other libraries' containers.
    ValueError
        If `check_finite` and there are NaN or Inf: SciPy's message.
    """
    if isinstance(x, np.ndarray | np.generic | list | tuple | int | float) and not isinstance(x, np.ma.MaskedArray):
        x = np.asarray(x)
        if x.dtype.kind in "iub" or dtype_name(x.dtype) == "float16" or (x.dtype.kind == "f" and x.dtype.itemsize > 8):
            with np.errstate(over="ignore"):  # then it is not finite, which is judged below
                x = x.astype(np.float64)
        elif not x.dtype.isnative:
            x = x.astype(x.dtype.newbyteorder("="))
        if x.dtype.kind == "c":
            raise TypeError(f"{name} has dtype {x.dtype}: complex systems are not protected; use scipy.linalg")
    x = as_operand(x, name)
    xp = namespace(x)
    if dtype_name(x.dtype) not in NATIVE:
        x = xp.astype(x, xp.float64)
    if check_finite and not _is_finite(x):
        raise not_finite()
    return x


def pair_of(given: Any, name: str = "lu_and_piv", parts: str = "(lu, piv)") -> tuple[Any, Any]:
    """The two parts of a pair; TypeError for what is none."""
    try:
        first, second = given
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is a {type(given).__name__}: the pair {parts} is expected") from error
    return first, second


def pivots_of(piv: Any, shape: tuple[int, ...]) -> Any:
    """Pivots, as LAPACK takes them, of an lu of that shape; ValueError where one of them is no row."""
    *batch, n, _ = shape
    refuse_other_containers(piv, "piv")
    foreign = is_cupy(piv) or (hasattr(piv, "__array_namespace__") and not isinstance(piv, np.generic))
    given = to_host(piv) if foreign else in_numpy(piv, "piv")
    if given.size and given.dtype.kind not in "iuf":
        raise TypeError(f"piv holds {given.dtype}: the numbers of rows are expected, as lu_factor returns them")
    if given.ndim == 0 or given.shape[-1] != n or not _broadcasts(given.shape[:-1], tuple(batch)):
        raise ValueError(f"piv has shape {given.shape}: for an lu of {shape} it is {shape[:-1]}")
    with np.errstate(invalid="ignore"):
        wrong = ~((given >= 0) & (given < n) & (given == np.floor(given)))
    if wrong.any():
        raise ValueError(f"piv holds {given[wrong][0]}: the numbers of rows are whole, 0 to {n - 1}")
    return given.astype(np.int32)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _is_finite(x: Array) -> bool:
    """Whether x holds neither NaN nor Inf: mostly its sum tells, which is not finite where one of its terms is not."""
    xp = namespace(x)
    with np.errstate(all="ignore"):
        return bool(xp.isfinite(xp.sum(x))) or bool(xp.all(xp.isfinite(x)))


def not_finite() -> ValueError:
    """SciPy's error."""
    return ValueError("array must not contain infs or NaNs")


def for_blas(A: Array) -> Array:
    """A, or a copy of it where neither its rows nor its columns are contiguous and aligned."""
    if not is_numpy(A):
        return A
    m, n = A.shape
    item = A.itemsize
    down, right = A.strides
    taken = (down == item and right >= item * m) or (right == item and down >= item * n)
    return A if taken and A.flags.aligned else np.array(A, order="F")


def for_kernels(A: Array) -> Array:
    """A CuPy array, or a copy of it where neither its rows nor its columns are contiguous and aligned."""
    import cupy

    size = A.itemsize
    if size in A.strides and A.data.ptr % size == 0 and all(stride > 0 and stride % size == 0 for stride in A.strides):
        return A
    return cupy.array(A, order="F")


def matrices_of(stack: Array) -> list[Array]:
    """The matrices of a stack, in order."""
    return [stack[(*index, ...)] for index in np.ndindex(tuple(stack.shape[:-2]))]


def stacked(items: Sequence[Any], batch: tuple[int, ...]) -> Any:
    """Results of a stack in one array."""
    xp = namespace(items[0])
    return xp.reshape(xp.stack(items), (*batch, *items[0].shape))


def merged(reports: Iterable[Report], batch: tuple[int, ...], operation: str) -> Report:
    """The report of a stack, from those of its matrices in order."""
    each = zip(np.ndindex(batch), reports, strict=True)
    return Report.merge([replace(one, index=index) for index, one in each], operation=operation)
