"""How a product on a GPU is computed and checked: one `Way` for all operands of the same shapes, layouts and types."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from abft_tsm2.arrays import Array, dtype_name
from abft_tsm2.checksum.on_device import Arrays, Case, Checker, Kept, Layout
from abft_tsm2.core import vendor
from abft_tsm2.core.config import Problem as Shape
from abft_tsm2.core.launch import device_of
from abft_tsm2.operands import Problem

_MOST = 4096  # ways that are remembered


@dataclass(frozen=True, eq=False)
class Operands:
    """The arrays of one call: matrices, or stacks of them; `wide` is the float32 product behind a C of 16 bits."""

    A: Array
    B: Array
    C: Array
    C0: Array | None
    wide: Array | None

    @property
    def multiplied(self) -> Array:
        """What the product is written to, and checked."""
        return self.C if self.wide is None else self.wide

    def arrays(self, side: str) -> Arrays:
        """As the check of one side takes them: its lines are rows of C, or of its transpose."""
        turned = side == "columns"
        left, right = (self.B, self.A) if turned else (self.A, self.B)
        return Arrays(left, right, self.multiplied, self.C0, None if self.wide is None else self.C, turned)


@dataclass(frozen=True, eq=False)
class Way:
    """One way to multiply and check.

    Attributes
    ----------
    checkers : tuple of Checker
        One for each side.
    gemm : Gemm or None
        None where the product exists already.
    beside : bool
        Whether encoding runs beside the product, on a stream of its own.
    """

    checkers: tuple[Checker, ...]
    gemm: vendor.Gemm | None
    beside: bool

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where the account of each side begins."""
        return tuple(accumulate((checker.nbytes for checker in self.checkers[:-1]), initial=0))

    @cached_property
    def nbytes(self) -> int:
        """Of all accounts."""
        return sum(checker.nbytes for checker in self.checkers)


_ways: dict[Any, Way] = {}


def way_of(
    operands: Operands, problem: Problem, sides: tuple[str, ...], kept: tuple[Kept | None, ...], watched: bool
) -> Way:
    """The way for such operands on the current device; `watched`: somebody looks at every stage."""
    import cupy

    o, device = operands, cupy.cuda.runtime.getDevice()
    arrays = (_mark(o.A), _mark(o.B), _mark(o.C), _mark(o.C0), o.wide is None)
    encoded = tuple(None if one is None else one.recheck for one in kept)
    key = (arrays, sides, encoded, watched, problem.alpha == 1.0, problem.arithmetic, problem.exists, device)
    way = _ways.get(key)
    if way is None:
        if len(_ways) >= _MOST:
            _ways.clear()
        way = _ways[key] = _made(o, problem, sides, encoded, watched)
    return way


def _mark(x: Array | None) -> Any:
    return None if x is None else (x.shape, x.strides, x.dtype, x.data.ptr & 15)


def _made(o: Operands, problem: Problem, sides: tuple[str, ...], encoded: tuple[Any, ...], watched: bool) -> Way:
    import cupy

    device = device_of(cupy.cuda.runtime.getDevice())
    (m, k), n = o.A.shape[-2:], o.B.shape[-1]
    batch = problem.batch[0] if o.C.ndim == 3 else 1
    dtype, out, a = dtype_name(o.A.dtype), dtype_name(o.multiplied.dtype), problem.arithmetic
    checkers = []
    for side, recheck in zip(sides, encoded, strict=True):
        L, R, C, C0, D, turned = o.arrays(side)
        layouts: Any = [None if x is None else Layout.of(x, turned=turned) for x in (L, R, C, C0, D)]
        lines, length = (n, m) if turned else (m, n)
        shared = R.ndim == 2 or R.strides[0] == 0 or batch == 1
        case = Case(
            m=lines,
            k=k,
            n=length,
            batch=batch,
            right_batch=1 if shared else batch,
            dtype=dtype,
            out=out,
            cast="" if D is None else dtype_name(D.dtype),
            L=layouts[0],
            R=layouts[1],
            C=layouts[2],
            C0=layouts[3],
            D=layouts[4],
            arithmetic=a,
            terms=k + (0 if problem.alpha == 1.0 and C0 is None else 2),
            carried=recheck is not None,
            recheck=bool(recheck),
            split=watched,
        )
        checkers.append(Checker(case, device.multiprocessors))
    gemm = None
    if not problem.exists:
        gemm = vendor.Gemm.of(Shape(m, k, n, dtype, out=out, batch=batch), o.A, o.B, o.multiplied, tf32=a.u_in > 0)
    # Tensor cores leave no time to hide in: beside a product of 16-bit operands the passes cost more than before it.
    beside = not watched and gemm is not None and dtype in ("float32", "float64")
    return Way(tuple(checkers), gemm, beside)
