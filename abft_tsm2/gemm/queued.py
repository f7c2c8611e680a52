"""Protected products on a GPU: encoding, product, verdict and repair are queued behind one another, and the host looks
at the end, or not at all.

`run` serves CuPy arrays in the layouts that kernels and cuBLAS take as they are. What the kernels could not settle by
themselves (everything wrong, a checksum that was hit, an operand that changed, patterns of rounding) is looked at by
`abft_tsm2.gemm.host.Product`, the procedure of every other array.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, is_cupy
from abft_tsm2.checksum.device.layout import CarriedChecksum
from abft_tsm2.checksum.device.record import CallInfo
from abft_tsm2.checksum.encoded import Encoded
from abft_tsm2.core import cublas
from abft_tsm2.gemm.device import CallOptions, DeviceProduct
from abft_tsm2.gemm.fallback import look_at
from abft_tsm2.gemm.host import Hook
from abft_tsm2.gemm.operands import GemmProblem, GemmTask
from abft_tsm2.gemm.pending import Pending
from abft_tsm2.gemm.plan import Operands, mark, plan_of
from abft_tsm2.policy import Deferred
from abft_tsm2.report import Report

_MUCH_LONGER = 4  # lines along memory are checked until they are so many times longer than those across


def serves(problem: GemmProblem) -> bool:
    """Whether these are arrays that the kernels and cuBLAS take as they are."""
    p = problem
    if p.wide and (p.c0 is not None or order_of(p.c) is None):
        return False
    if not is_cupy(p.c) or 0 in p.c.shape or p.a.shape[-1] == 0 or p.a.dtype != p.b.dtype or len(p.batch) > 1:
        return False
    if any(e is not None and e.device is None for e in (p.encoded_a, p.encoded_b)):
        return False
    return all(cublas.layout(x) != "A" for x in (p.a, p.b, p.c, p.c0) if x is not None)


def order_of(C: Array) -> str | None:
    """The order of a float32 product whose rounding to C kernels write line by line: lines of both are contiguous or
    those of neither. "C", "F", or None where there is none."""
    m, n = C.shape[-2:]
    down, along = C.strides[-2:]
    if min(m, n) == 1 < max(m, n) and (down if n == 1 else along) != C.itemsize:
        return None  # a vector whose elements lie apart
    order = cublas.layout(C)
    return None if order == "A" else order


def _wide(shape: tuple[int, ...], order: str | None) -> Array:
    """A float32 product, or a stack of them, in that order."""
    import cupy

    if order == "F":
        return cupy.empty((*shape[:-2], shape[-1], shape[-2]), cupy.float32).swapaxes(-1, -2)
    return cupy.empty(shape, cupy.float32)


def run(
    problem: GemmProblem, operation: str, on_stage: Hook | None, write: bool, on_error: str | None, key: Any = None
) -> Report:
    """Multiply and check on the current stream of the operands' device; PENDING under ``errstate(sync=False)``.

    `key`: of `key_of` the arguments, to serve the next call with such arguments quickly.
    """
    with problem.c.device:
        sides, watched = _sides(problem), on_stage is not None
        if problem.batch and watched:
            reports = []
            for one in problem.tasks():
                plan, operands = _planned(problem, operation, sides, one, write, watched)
                reports.append(DeviceProduct(plan, operands, on_stage).report(lambda one=one: (problem, one), look_at))  # type: ignore[misc]
            return Report.merge(reports, operation=operation)
        task = None if problem.batch else next(problem.tasks())
        plan, operands = _planned(problem, operation, sides, task, write, watched)
        if key is not None and not problem.squeeze:
            _learn(key, plan, operands, problem)
        call = DeviceProduct(plan, operands, on_stage)
        if policy.synchronous() or watched:
            return call.report(lambda: (problem, task), look_at)
        return Deferred.of(Pending(call.queued(), call, _look_again), plan.facts, on_error)


def _look_again(problem: GemmProblem, operation: str) -> Report:
    """Check an existing product, and wait for the verdict; nothing is repaired."""
    with policy.errstate(sync=True):
        return run(problem, operation, None, False, "detect")


def _planned(
    problem: GemmProblem, operation: str, sides: tuple[str, ...], task: GemmTask | None, write: bool, watched: bool
) -> tuple[CallOptions, Operands]:
    """The plan of a product, or of a whole batch where `task` is None, and its arrays."""
    p = problem
    A, B, C, C0 = (p.a, p.b, p.c, p.c0) if task is None else (task.A, task.B, task.C, task.C0)
    wide = _wide(C.shape, order_of(C)) if p.wide and not p.exists else None
    operands = Operands(A, B, C, C0, wide)
    kept = tuple(_kept(p, side) for side in sides)
    way = plan_of(operands, p, sides, kept, watched)
    products, index = (p.batch[0], ()) if task is None else (None, task.index)
    lines = tuple(checker.case.m for checker in way.checkers)
    facts = CallInfo(operation, (A.shape[-2], A.shape[-1], B.shape[-1]), p.dtype, products, index, sides, lines)
    return CallOptions(way, facts, kept, p.alpha, p.beta, write), operands


def _kept(problem: GemmProblem, side: str) -> CarriedChecksum | None:
    """What the right operand of that side carries, if it is encoded."""
    owner = problem.encoded_b if side == "rows" else problem.encoded_a
    return None if owner is None or owner.device is None else owner.device.carried(side, owner.recheck)


def _sides(problem: GemmProblem) -> tuple[str, ...]:
    """Which lines are checked: by choice the shorter ones, but those along memory where these are not much longer."""
    (m, n), p = problem.c.shape[-2:], problem
    if p.batch:
        usual = "rows"
    elif cublas.layout(p.c) == "C":
        usual = "rows" if n <= _MUCH_LONGER * m else "columns"
    else:
        usual = "columns" if m <= _MUCH_LONGER * n else "rows"
    return p.sides(usual)


# ---- the same again, with little work for the host ------------------------------------------------------------------


class _Known(NamedTuple):
    """A plan for arguments that were checked once, and what is left to look at."""

    plan: CallOptions
    shape: tuple[int, ...]
    dtype: Any
    wide: str | None
    extents: tuple[int, int, int]


_known: dict[Any, _Known] = {}
_MOST_KNOWN = 4096


def key_of(a: Any, b: Any, out: Any, options: tuple[Any, ...]) -> Any:
    """All that a call depends on but addresses, where it is of the kind that is remembered; else None."""
    kept = None
    if isinstance(b, Encoded):
        kept, b = None if b.device is None else b.device.carried("rows", b.recheck), b.array
        if kept is None:
            return None
    cupy = sys.modules.get("cupy")
    if cupy is None or type(a) is not cupy.ndarray or type(b) is not cupy.ndarray:
        return None
    if out is not None and type(out) is not cupy.ndarray:
        return None
    device = a.data.device_id
    if not device == b.data.device_id == cupy.cuda.runtime.getDevice() or (
        out is not None and out.data.device_id != device
    ):
        return None
    try:
        hash(options)
    except TypeError:  # the checks of the operands say what is wrong with them
        return None
    return mark(a), mark(b), mark(out), kept, device, options


def _learn(key: Any, plan: CallOptions, o: Operands, problem: GemmProblem) -> None:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    extents = tuple(_extent(x) for x in (o.A, o.B, o.C))
    _known[key] = _Known(plan, o.C.shape, o.C.dtype, order_of(o.C) if problem.wide else None, extents)  # type: ignore[arg-type]


def _extent(x: Array) -> int:
    """Bytes from the first element to the end of the last."""
    return int(sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)) + x.itemsize)


def again(key: Any, a: Any, b: Any, out: Any, on_error: str | None, problem: Callable[[Any], GemmProblem]) -> Any:
    """Result and report of a call of which `run` has seen the like; None where it has not.

    `problem` is asked for, with the result, only where something is left to the host.
    """
    import cupy

    known = _known.get(key)
    if known is None:
        return None
    A, B = a, b.array if isinstance(b, Encoded) else b
    if out is not None:
        at, reach = out.data.ptr, known.extents[2]
        if any(at < x.data.ptr + n and x.data.ptr < at + reach for x, n in zip((A, B), known.extents, strict=False)):
            return None  # they may share memory
    C = cupy.empty(known.shape, known.dtype) if out is None else out
    wide = _wide(known.shape, known.wide) if known.wide else None
    plan, ndim = known.plan, len(known.shape)
    if ndim == 3:
        A, B = (x if x.ndim == 3 else cupy.broadcast_to(x, (known.shape[0], *x.shape)) for x in (A, B))
    call = DeviceProduct(plan, Operands(A, B, C, None, wide))
    if not policy.synchronous():
        return C, Deferred.of(Pending(call.queued(), call, _look_again), plan.facts, on_error)

    def asked() -> tuple[GemmProblem, GemmTask | None]:
        found = problem(C)
        return found, None if found.batch else next(found.tasks())

    return C, call.report(asked, look_at)
