"""The operands of a protected product: `numpy.matmul`'s rules and BLAS's, checked once, before any work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import (
    FLOATS,
    Array,
    as_operand,
    as_output,
    dtype_name,
    in_native_order,
    is_numpy,
    namespace,
    overlap,
    real_number,
    type_name,
)
from abft_tsm2.checksum.bounds import Arithmetic, arithmetic
from abft_tsm2.checksum.encode import OperandChecksum
from abft_tsm2.checksum.encoded import Encoded
from abft_tsm2.core import cublas
from abft_tsm2.core.flushing import flushes

CHECKS = ("auto", "rows", "columns", "both")
VERIFY = (None, "float32")
PRECISIONS = (None, "tf32")
_UNKNOWN = "unknown"  # the type of what has none


# What is made anew for each product is not frozen: that takes six times as long.


@dataclass(eq=False)
class GemmTask:
    """One product of two matrices: 2-D views of the operands."""

    A: Array
    B: Array
    C: Array
    C0: Array | None
    encoded_a: Encoded | None
    encoded_b: Encoded | None
    sides: tuple[str, ...]
    index: tuple[int, ...]


@dataclass(eq=False)
class GemmProblem:
    """All products of one call.

    Attributes
    ----------
    a, b, c0, c : arrays with at least two dimensions, or None
    batch : tuple of int
        The broadcast batch shape; () for a single product.
    squeeze : tuple of int
        The axes of the result that 1-D operands do not have.
    exists : bool
        C was given, to be checked and not computed.
    wide : bool
        The product is computed and checked in float32, and rounded to c's 16 bits then.
    """

    a: Array
    b: Array
    c: Array
    c0: Array | None
    encoded_a: Encoded | None
    encoded_b: Encoded | None
    alpha: float
    beta: float
    check: str
    batch: tuple[int, ...]
    squeeze: tuple[int, ...]
    given: Array | None
    exists: bool
    arithmetic: Arithmetic
    dtype: str
    wide: bool = False

    def tasks(self) -> Iterator[GemmTask]:
        """One task for each product of the batch, in order."""
        a, b, c, c0 = self.a, self.b, self.c, self.c0
        more = self.encoded_a, self.encoded_b, self.sides()
        if not self.batch:
            return iter([GemmTask(a, b, c, c0, *more, ())])
        each = ((index, (*index, ...)) for index in np.ndindex(*self.batch))
        return (GemmTask(a[at], b[at], c[at], None if c0 is None else c0[at], *more, index) for index, at in each)

    def sides(self, usual: str | None = None) -> tuple[str, ...]:
        """Which lines are checked; "auto": the one side that an encoded operand pays for, else the `usual` one, or
        the one whose lines are shorter."""
        if self.check == "both":
            return ("rows", "columns")
        if self.check != "auto":
            return (self.check,)
        rows, columns = (carried is not None for carried in self.carried())
        if rows != columns:
            return ("rows",) if rows else ("columns",)
        return (usual or ("rows" if self.b.shape[-1] <= self.a.shape[-2] else "columns"),)

    def carried(self) -> tuple[OperandChecksum | None, OperandChecksum | None]:
        """What B carries into a check of rows, and A into one of columns, where it was encoded before."""
        a, b = self.encoded_a, self.encoded_b
        return None if b is None else b.right, None if a is None else a.left

    def encoded(self) -> list[Encoded]:
        """The operands that are."""
        return [operand for operand in (self.encoded_a, self.encoded_b) if operand is not None]

    def result(self) -> Array:
        if self.given is not None:
            return self.given
        C = self.c
        if not self.squeeze:
            return C
        for axis in sorted(self.squeeze, reverse=True):
            C = namespace(C).squeeze(C, axis=axis) if C.ndim > 1 else C[0]
        if C.ndim == 0 and is_numpy(C):
            return C[()]  # numpy.matmul of two vectors gives a scalar
        return C


def problem_of(
    a: Any,
    b: Any,
    c: Any,
    *,
    alpha: float,
    beta: float,
    check: str,
    out: Any = None,
    out_dtype: Any = None,
    existing: Any = None,
    verify: str | None = None,
    precision: str | None = None,
) -> GemmProblem:
    """Check the arguments of a protected product and bring them into one form. Allocates the result."""
    if check not in CHECKS:
        raise ValueError(f"check is {check!r}: choose one of {', '.join(map(repr, CHECKS))}")
    if verify not in VERIFY:
        raise ValueError(f"verify is {verify!r}: choose one of {', '.join(map(repr, VERIFY))}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}: choose one of {', '.join(map(repr, PRECISIONS))}")
    encoded_a, a = (a, a.as_encoded()) if isinstance(a, Encoded) else (None, as_operand(a, "a"))
    encoded_b, b = (b, b.as_encoded()) if isinstance(b, Encoded) else (None, as_operand(b, "b"))
    on_numpy = type(a) is type(b) is np.ndarray
    form = _known_form if on_numpy else _form
    types = a.dtype, b.dtype, out_dtype, _dtype_of(existing)
    p = form(namespace(a, b), type(a), a.shape, b.shape, *types, verify, precision, flushes())
    xp, shapes, full, shown, dtype, squeeze = p.xp, p.shapes, p.full, p.shown, p.dtype, p.squeeze
    if squeeze:
        a = a[None, :] if a.ndim == 1 else a
        b = b[:, None] if b.ndim == 1 else b

    def fits(x: Any, name: str) -> Array:
        x = in_native_order(as_operand(x, name))
        namespace(a, x)
        if tuple(x.shape) != shown or x.dtype != dtype:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and dtype {dtype_name(x.dtype)}: "
                f"the product of {shapes} has {shown} and {dtype_name(dtype)}"
            )
        return xp.reshape(x, full) if squeeze else x

    if (alpha, beta) != (1.0, 0.0):
        alpha, beta = _representable(alpha, "alpha", p.promoted), _representable(beta, "beta", p.promoted)
    c0 = None
    if beta != 0.0:
        if c is None:
            raise ValueError(f"beta = {beta:g} needs c, the array it multiplies")
        c0 = fits(c, "c")
    if alpha == 0.0:  # as in BLAS, which does not read A and B then: NaN in them is not in C
        a, b, encoded_a, encoded_b = a[..., :0], b[..., :0, :], None, None
    given = None
    if existing is not None:
        C = fits(existing, "C")
    elif out is not None:
        C = fits(as_output(out), "out")
        given = out
        if not getattr(out.dtype, "isnative", True):
            raise ValueError(
                f"out is stored as {out.dtype.str}, in the other byte order than this machine's: pass one of "
                f"{dtype_name(out.dtype)}, or none and assign the result, out[...] = C"
            )
        for x, name in ((a, "a"), (b, "b")):
            if overlap(out, x):
                raise ValueError(f"out shares memory with {name}: the product would overwrite its own operand")
        if c0 is not None and overlap(out, c0):
            c0 = xp.asarray(c0, copy=True)  # kept aside: a repair needs what out held before
    elif on_numpy:
        C = np.empty(full, dtype)
    else:
        C = xp.empty(full, dtype=dtype, device=a.device)
    return GemmProblem(
        a=_broadcast(xp, a, p.batch) if p.batch else a,
        b=_broadcast(xp, b, p.batch) if p.batch else b,
        c=C,
        c0=c0,
        encoded_a=encoded_a,
        encoded_b=encoded_b,
        alpha=alpha,
        beta=beta,
        check=check,
        batch=p.batch,
        squeeze=squeeze,
        given=given,
        exists=existing is not None,
        arithmetic=p.arithmetic,
        dtype=p.name,
        wide=p.wide,
    )


class _Form(NamedTuple):
    """What a product is by the shapes and types of its operands alone.

    Attributes
    ----------
    shapes : str
        Of the operands, for messages.
    full, shown : tuple of int
        The result's shape, with the axes that 1-D operands do not have and without them.
    promoted, dtype, name
        The operands' common type, and the result's.
    """

    xp: Any
    shapes: str
    batch: tuple[int, ...]
    squeeze: tuple[int, ...]
    full: tuple[int, ...]
    shown: tuple[int, ...]
    promoted: Any
    dtype: Any
    name: str
    arithmetic: Arithmetic
    wide: bool


def _form(
    xp: Any,
    kind: type,
    a: tuple[int, ...],
    b: tuple[int, ...],
    a_dtype: Any,
    b_dtype: Any,
    out_dtype: Any,
    existing: Any,
    verify: str | None,
    precision: str | None,
    flushed: bool,
) -> _Form:
    """The form of a product of operands of these shapes and types, in arrays of that kind; errors where there is none.

    `existing`: the type of a result that is there already, or None. `flushed`: as of `arithmetic`.
    """
    if not a or not b:
        raise ValueError("a and b must have at least one dimension: multiply by a scalar with *")
    squeeze = (*((-2,) if len(a) == 1 else ()), *((-1,) if len(b) == 1 else ()))
    shapes = f"a {tuple(a)} and b {tuple(b)}"
    a = (1, *a) if len(a) == 1 else a
    b = (*b, 1) if len(b) == 1 else b
    (m, k), (k_b, n) = a[-2:], b[-2:]
    if k != k_b:
        raise ValueError(f"{shapes} cannot be multiplied: the inner dimensions {k} and {k_b} differ")
    try:
        batch = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError:
        raise ValueError(f"{shapes} cannot be multiplied: their batch axes do not broadcast") from None
    promoted = _promoted(xp, a_dtype, b_dtype)
    dtype = _result_dtype(xp, promoted, out_dtype, existing)
    full = (*batch, m, n)
    shown = full if not squeeze else (*batch, *(() if -2 in squeeze else (m,)), *(() if -1 in squeeze else (n,)))
    library = kind.__module__.partition(".")[0]
    name, out_name = dtype_name(promoted), dtype_name(dtype)
    tf32, single = precision == "tf32", library == "cupy" and name == "float32"
    if tf32 and not single:
        raise ValueError(f"precision='tf32' is for float32 CuPy arrays, not for {name} arrays of {library}")
    if single:  # a product that exists may be CuPy's own
        tf32 = tf32 or (cublas.forces_tf32() if existing is None else cublas.cupy_rounds_to_tf32())
    wide = verify == "float32" and FLOATS[out_name].bits < 32 and existing is None
    how = arithmetic(name, "float32" if wide else out_name, library=library, tf32=tf32, flushed=flushed)
    return _Form(xp, shapes, tuple(batch), squeeze, full, shown, promoted, dtype, out_name, how, wide)


_remembered = lru_cache(1024)(_form)


def _known_form(*arguments: Any) -> _Form:
    """`_form` of NumPy's arrays, which was worked out before for most of them."""
    try:
        return _remembered(*arguments)
    except TypeError:  # there is no such product; or what was given as a dtype has no hash
        pass
    return _form(*arguments)


def _dtype_of(existing: Any) -> Any:
    return None if existing is None else getattr(existing, "dtype", _UNKNOWN)


def _broadcast(xp: Any, x: Array, batch: tuple[int, ...]) -> Array:
    return x if tuple(x.shape[:-2]) == batch else xp.broadcast_to(x, (*batch, *x.shape[-2:]))


def factor(value: Any, name: str) -> float:
    """alpha or beta; an error where it is no finite real number."""
    number = value if type(value) is float else real_number(value, name)
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}: nothing could be checked; it must be finite")
    return number


def _representable(value: float, name: str, promoted: Any) -> float:
    """`value` rounded to the type the product is summed in, as BLAS takes it."""
    accumulator = FLOATS[dtype_name(promoted)]
    accumulator = FLOATS["float32"] if accumulator.bits < 32 else accumulator
    if value != 0.0 and not accumulator.smallest_normal <= abs(value) <= accumulator.largest:
        raise ValueError(
            f"{name} = {value:g} is outside the normal range of {accumulator.name} "
            f"({accumulator.smallest_normal:.3g} to {accumulator.largest:.3g}): scale an operand instead"
        )
    return float(np.float32(value)) if accumulator.bits == 32 else value


def _promoted(xp: Any, a: Any, b: Any) -> Any:
    try:
        dtype = xp.result_type(a, b)
    except TypeError as error:
        names = dtype_name(a), dtype_name(b)
        raise TypeError(f"{names[0]} and {names[1]} have no common type: convert one, or both to float32") from error
    if dtype_name(dtype) not in FLOATS:
        raise TypeError(f"{dtype_name(a)} and {dtype_name(b)} promote to {dtype_name(dtype)}: convert one")
    return dtype


def _result_dtype(xp: Any, promoted: Any, out_dtype: Any, existing: Any) -> Any:
    """The promoted type, or float32 for 16-bit operands where that is asked for or given."""
    half = FLOATS[dtype_name(promoted)].bits < 32
    if out_dtype is None and half and existing not in (None, _UNKNOWN):
        out_dtype = existing
    if out_dtype is None:
        return promoted
    asked = type_name(out_dtype)
    if asked == dtype_name(promoted):
        return promoted
    if half and asked == "float32":
        return np.dtype(np.float32) if str(xp.__name__).endswith(("numpy", "cupy")) else xp.float32
    raise ValueError(
        f"out_dtype {asked} for operands of {dtype_name(promoted)}: only that type, "
        "or float32 for 16-bit operands; convert the operands or the result instead"
    )
