"""What is prepared once for a shape: the plan of a product on a GPU, and its launches.

A `ProductPlan` serves all operands of the same shapes, layouts and types. A `LaunchSequence` is all its launches on one
stream, where only the addresses of the operands are missing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from abft_tsm2.arrays import Array, dtype_name
from abft_tsm2.checksum.device import tuned
from abft_tsm2.checksum.device.check import DeviceCheck
from abft_tsm2.checksum.device.kernels import STATE
from abft_tsm2.checksum.device.layout import CarriedChecksum, CheckSpec, Layout, OrderedLines
from abft_tsm2.core import cublas
from abft_tsm2.core.capture import current_stream, is_captured
from abft_tsm2.core.device import device_of
from abft_tsm2.core.launch import Step, Where
from abft_tsm2.core.memory import thread_of
from abft_tsm2.core.problem import Problem as Shape
from abft_tsm2.gemm.operands import GemmProblem

_MOST = 4096  # plans that are kept
_MOST_SEQUENCES = 64  # streams and options of a plan whose sequences are kept
_MUCH_LONGER = 4  # lines along memory are checked until they are so many times longer than those across


class Operands(NamedTuple):
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

    def of(self, side: str) -> dict[str, Array | None]:
        """As the check of one side names them: its lines are rows of C, or of its transpose."""
        left, right = (self.A, self.B) if side == "rows" else (self.B, self.A)
        copy = None if self.wide is None else self.C
        return {"L": left, "R": right, "C": self.multiplied, "C0": self.C0, "D": copy}

    def where(self, side: str) -> dict[str, int]:
        """Their addresses."""
        left, right = (self.A, self.B) if side == "rows" else (self.B, self.A)
        where = {"L": left.data.ptr, "R": right.data.ptr, "C": self.multiplied.data.ptr}
        if self.C0 is not None:
            where["C0"] = self.C0.data.ptr
        if self.wide is not None:
            where["D"] = self.C.data.ptr
        return where


class CallOptions(NamedTuple):
    """What launches depend on beside a plan and addresses.

    Attributes
    ----------
    carried : tuple of CarriedChecksum or None
        For each side, of an operand that was encoded before.
    alpha, beta : float
    write : bool
        Whether C may be repaired.
    left : tuple of OrderedLines or None
        For each side, what the left operand had when it was encoded before, if that is to be compared.
    """

    carried: tuple[CarriedChecksum | None, ...]
    alpha: float
    beta: float
    write: bool
    left: tuple[OrderedLines | None, ...]


class LaunchSequence:
    """The launches of a plan, with workspaces of its own: for one call at a time.

    Attributes
    ----------
    encode, verify, judge, repair : tuple of lists of Step
        For each side; `judge` is empty unless a hook sees every stage.
    key : tuple or None
        Under which the plan keeps it.

    Parameters
    ----------
    side : Stream, optional
        The stream on which operands will be encoded, and whose scratch memory that takes. Default: the current one.
    """

    def __init__(self, plan: ProductPlan, options: CallOptions, key: Any = None, side: Any = None) -> None:
        import cupy

        self.key = key
        self.memory = cupy.empty(sum(check.workspace.nbytes for check in plan.checks), cupy.uint8)
        self.workspaces: list[int] = []
        self.encode: list[list[Step]] = []
        self.verify: list[list[Step]] = []
        self.judge: list[list[Step]] = []
        self.repair: list[list[Step]] = []
        at, (every, alpha, beta, write, lefts) = self.memory.data.ptr, options
        for check, carried, left in zip(plan.checks, every, lefts, strict=True):
            self.workspaces.append(at)
            with side or nullcontext():  # which is not in order with what other threads queue on this stream
                self.encode.append(check.encode(at, carried, left))
            self.verify.append(check.verify(at, carried, alpha, beta, left))
            self.judge.append(check.judge(at, carried, alpha, beta) if check.spec.split else [])
            self.repair.append(check.repair(at, carried, alpha, beta, write=write))
            at += check.workspace.nbytes

    def forget(self, stream: int) -> None:
        """Wipe what verdicts have left, so that C may be judged again."""
        from cupy.cuda import runtime

        for at in self.workspaces:
            runtime.memsetAsync(at, 0, 8 * STATE, stream)


@dataclass(eq=False)
class ProductPlan:
    """How products of one shape are multiplied and checked.

    Attributes
    ----------
    sides : tuple of str
    checks : tuple of DeviceCheck
        One for each side.
    gemm : Gemm or None
        None where the product exists already.
    on_side_stream : bool
        Whether operands are encoded on a side stream, while cuBLAS multiplies.
    """

    sides: tuple[str, ...]
    checks: tuple[DeviceCheck, ...]
    gemm: cublas.Gemm | None
    on_side_stream: bool
    _idle: dict[Any, deque[LaunchSequence]] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def take(self, stream: int, options: CallOptions) -> LaunchSequence:
        """A sequence that no other call uses, until `give` takes it back."""
        key = stream, thread_of(stream), options
        try:
            return self._idle[key].popleft()
        except (KeyError, IndexError):
            side = side_stream(stream)[2] if self.on_side_stream else None
            return LaunchSequence(self, options, key, side)

    def give(self, sequence: LaunchSequence) -> None:
        """Take a sequence back: all that it queued precedes what the next call queues on the same stream. One without a
        key is kept elsewhere."""
        idle, key = self._idle, sequence.key
        if key is None:
            return
        with self._lock:
            if key not in idle:
                if len(idle) >= _MOST_SEQUENCES:
                    idle.clear()
                idle[key] = deque()
            idle[key].append(sequence)


_side_streams: dict[tuple[int, int, int], tuple[Any, Any, Any]] = {}


def side_stream(stream: int) -> tuple[Any, Any, Any]:
    """Two events and the side stream of a stream."""
    import cupy

    key = cupy.cuda.runtime.getDevice(), stream, thread_of(stream)
    found = _side_streams.get(key)
    if found is None:
        events = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        found = _side_streams[key] = (*events, cupy.cuda.Stream(non_blocking=True))
    return found


# ---- the plan of a problem -----------------------------------------------------------------------------------------


def serves(problem: GemmProblem) -> bool:
    """Whether these CuPy arrays are such as the kernels and cuBLAS take as they are."""
    p = problem
    if p.wide and (p.c0 is not None or order_of(p.c) is None):
        return False
    if 0 in p.c.shape or p.a.shape[-1] == 0 or p.a.dtype != p.b.dtype or len(p.batch) > 1:
        return False
    if any(e is not None and e.device is None for e in (p.encoded_a, p.encoded_b)):
        return False
    return all(cublas.layout(x) != "A" for x in (p.a, p.b, p.c, p.c0) if x is not None)


def sides_of(problem: GemmProblem) -> tuple[str, ...]:
    """Which lines are checked: by choice the shorter ones, but those along memory where these are not much longer."""
    (m, n), p = problem.c.shape[-2:], problem
    if p.batch:
        usual = "rows"
    elif cublas.layout(p.c) == "C":
        usual = "rows" if n <= _MUCH_LONGER * m else "columns"
    else:
        usual = "columns" if m <= _MUCH_LONGER * n else "rows"
    return p.sides(usual)


def order_of(C: Array) -> str | None:
    """The order of a float32 product whose rounding to C kernels write line by line: lines of both are contiguous or
    those of neither. "C", "F", or None where there is none."""
    m, n = C.shape[-2:]
    down, along = C.strides[-2:]
    if min(m, n) == 1 < max(m, n) and (down if n == 1 else along) != C.itemsize:
        return None  # a vector whose elements lie apart
    order = cublas.layout(C)
    return None if order == "A" else order


def wide_product(shape: tuple[int, ...], order: str | None) -> Array:
    """Memory for a float32 product, or a stack of them, in that order."""
    import cupy

    if order == "F":
        return cupy.empty((*shape[:-2], shape[-1], shape[-2]), cupy.float32).swapaxes(-1, -2)
    return cupy.empty(shape, cupy.float32)


_plans: dict[Any, ProductPlan] = {}


def plan_of(
    operands: Operands,
    problem: GemmProblem,
    sides: tuple[str, ...],
    carried: tuple[CarriedChecksum | None, ...],
    hooked: bool,
) -> ProductPlan:
    """The plan for such operands on the current device; `hooked`: a hook sees every stage."""
    import cupy

    o, device = operands, cupy.cuda.runtime.getDevice()
    arrays = (mark(o.A), mark(o.B), mark(o.C), mark(o.C0), o.wide is None)
    encoded = tuple(None if one is None else one.recheck for one in carried)
    key = (arrays, sides, encoded, hooked, problem.alpha == 1.0, problem.arithmetic, problem.exists, device)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST:
            _plans.clear()
        if not problem.exists and not is_captured(current_stream()):
            cublas.prepare_capture()
        plan = _plans[key] = _planned(o, problem, sides, encoded, hooked)
    return plan


def mark(x: Array | None) -> Any:
    """What a plan depends on of an array."""
    return None if x is None else (x.shape, x.strides, x.dtype, x.data.ptr & 15)


def _planned(
    o: Operands, problem: GemmProblem, sides: tuple[str, ...], encoded: tuple[bool | None, ...], hooked: bool
) -> ProductPlan:
    import cupy

    device = device_of(cupy.cuda.runtime.getDevice())
    (m, k), n = o.A.shape[-2:], o.B.shape[-1]
    batch = problem.batch[0] if o.C.ndim == 3 else 1
    dtype, out, a = dtype_name(o.A.dtype), dtype_name(o.multiplied.dtype), problem.arithmetic
    gemm = None if problem.exists else gemm_of(o, batch, tf32=a.u_in > 0)
    beside = gemm is not None and not hooked and o.wide is None and dtype == out
    checks = []
    for side, recheck in zip(sides, encoded, strict=True):
        arrays, transposed = o.of(side), side == "columns"
        layouts: Any = {name: None if x is None else Layout.of(x, transposed=transposed) for name, x in arrays.items()}
        lines, length = (n, m) if transposed else (m, n)
        R: Any = arrays["R"]
        # The product is so short, and fills the card so, that it hides no pass over L.
        short = beside and tuned.are_joint(o.A.itemsize, lines, k, length, batch)
        spec = CheckSpec(
            m=lines,
            k=k,
            n=length,
            batch=batch,
            right_batch=1 if R.ndim == 2 or R.strides[0] == 0 else batch,
            dtype=dtype,
            out=out,
            cast="" if o.wide is None else dtype_name(o.C.dtype),
            **layouts,
            arithmetic=a,
            terms=k + (0 if problem.alpha == 1.0 and o.C0 is None else 2),
            carried=recheck is not None,
            recheck=bool(recheck),
            split=hooked,
            joint=short and layouts["L"].contiguous and layouts["C"].contiguous,
        )
        checks.append(DeviceCheck(spec, device.multiprocessors))
    return ProductPlan(sides, tuple(checks), gemm, on_side_stream=not hooked and gemm is not None)


def gemm_of(o: Operands, batch: int, *, tf32: bool) -> cublas.Gemm:
    """cuBLAS's plan for a product, or a stack of so many."""
    (m, k), n = o.A.shape[-2:], o.B.shape[-1]
    shape = Shape(m, k, n, dtype_name(o.A.dtype), out=dtype_name(o.multiplied.dtype), batch=batch)
    return cublas.Gemm.of(shape, o.A, o.B, o.multiplied, tf32=tf32)


Place = Callable[[str, dict[str, Array]], Any]
"""Where a planter of faults is called with a stage and the live arrays."""


def multiply(
    gemm: cublas.Gemm,
    o: Operands,
    alpha: float,
    beta: float,
    handle: cublas.Handle | None = None,
    place: Place | None = None,
) -> None:
    """Queue the product, by a plan for such operands, on the current stream.

    Parameters
    ----------
    handle : Handle, optional
        Of cuBLAS, on that stream, where it is captured.
    place : callable, optional
        Plants faults into operands, which are encoded, and into the product.
    """
    if place is not None:
        place("encoded", {"A": o.A, "B": o.B})
    if o.C0 is not None:
        o.multiplied[...] = o.C0
    if handle is None:
        gemm(o.A, o.B, o.multiplied, alpha, beta)
    else:
        gemm.on(handle, o.A, o.B, o.multiplied, alpha, beta)
    if place is not None:
        place("multiplied", {"A": o.A, "B": o.B, "C": o.multiplied})


def run_steps(steps: list[Step], stream: int, where: Where) -> None:
    """Queue steps in their order."""
    for step in steps:
        step(stream, where)
