"""How a product on a GPU is computed and checked: a `ProductPlan` for all operands of the same shapes, layouts and
types, and
`LaunchSequence`, all its steps on one stream, where only the addresses of the operands are missing."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from abft_tsm2.arrays import Array, dtype_name
from abft_tsm2.checksum.device.check import DeviceCheck
from abft_tsm2.checksum.device.kernels import STATE
from abft_tsm2.checksum.device.layout import CarriedChecksum, CheckSpec, Layout
from abft_tsm2.core import cublas
from abft_tsm2.core.device import device_of
from abft_tsm2.core.launch import Step, Where
from abft_tsm2.core.problem import Problem as Shape
from abft_tsm2.gemm.operands import GemmProblem

_MOST = 4096  # ways that are remembered
_MOST_PROGRAMS = 64  # of a way that are remembered
_READ_FIRST = 2 << 20, 8 << 20  # bytes of float32: on an H200, 5.5 us instead of 8.8 us beside 1024 x 1024 x 1024


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


class LaunchSequence:
    """The steps of a way on one stream, with an account of its own: for one call at a time.

    Attributes
    ----------
    encode, verify, judge, repair : tuple of lists of Step
        For each side; `judge` is empty unless somebody looks at every stage.
    """

    def __init__(
        self, way: ProductPlan, kept: tuple[CarriedChecksum | None, ...], alpha: float, beta: float, write: bool
    ) -> None:
        import cupy

        self.memory = cupy.empty(sum(checker.account.nbytes for checker in way.checkers), cupy.uint8)
        self.accounts: list[int] = []
        self.encode: list[list[Step]] = []
        self.verify: list[list[Step]] = []
        self.judge: list[list[Step]] = []
        self.repair: list[list[Step]] = []
        at = self.memory.data.ptr
        for checker, one in zip(way.checkers, kept, strict=True):
            self.accounts.append(at)
            self.encode.append(checker.encode(at, one))
            self.verify.append(checker.verify(at, one, alpha, beta))
            self.judge.append(checker.judge(at, one, alpha, beta) if checker.case.split else [])
            self.repair.append(checker.repair(at, one, alpha, beta, write=write))
            at += checker.account.nbytes

    def forget(self, stream: int) -> None:
        """Wipe what verdicts have left, so that C may be judged again."""
        from cupy.cuda import runtime

        for at in self.accounts:
            runtime.memsetAsync(at, 0, 8 * STATE, stream)


@dataclass(frozen=True, eq=False)
class ProductPlan:
    """One way to multiply and check.

    Attributes
    ----------
    sides : tuple of str
    checkers : tuple of Checker
        One for each side.
    gemm : Gemm or None
        None where the product exists already.
    beside : bool
        Whether encoding runs beside the product, on a stream of its own.
    """

    sides: tuple[str, ...]
    checkers: tuple[DeviceCheck, ...]
    gemm: cublas.Gemm | None
    beside: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "_idle", {})
        object.__setattr__(self, "_lock", threading.Lock())

    def take(
        self, stream: int, kept: tuple[CarriedChecksum | None, ...], alpha: float, beta: float, write: bool
    ) -> tuple[Any, LaunchSequence]:
        """A program that nobody else uses, and the key under which to `give` it back."""
        key = (stream, threading.get_ident() if stream == _PER_THREAD else 0, kept, alpha, beta, write)
        idle: dict[Any, deque[LaunchSequence]] = self._idle  # type: ignore[attr-defined]
        try:
            return key, idle[key].popleft()
        except (KeyError, IndexError):
            return key, LaunchSequence(self, kept, alpha, beta, write)

    def give(self, key: Any, program: LaunchSequence) -> None:
        """Give a program back: all that it queued precedes what the next call queues on the same stream."""
        idle: dict[Any, deque[LaunchSequence]] = self._idle  # type: ignore[attr-defined]
        with self._lock:  # type: ignore[attr-defined]
            if key not in idle:
                if len(idle) >= _MOST_PROGRAMS:
                    idle.clear()
                idle[key] = deque()
            idle[key].append(program)


_PER_THREAD = 2  # the handle of each thread's own default stream
_ways: dict[Any, ProductPlan] = {}


def plan_of(
    operands: Operands,
    problem: GemmProblem,
    sides: tuple[str, ...],
    kept: tuple[CarriedChecksum | None, ...],
    watched: bool,
) -> ProductPlan:
    """The way for such operands on the current device; `watched`: somebody looks at every stage."""
    import cupy

    o, device = operands, cupy.cuda.runtime.getDevice()
    arrays = (mark(o.A), mark(o.B), mark(o.C), mark(o.C0), o.wide is None)
    encoded = tuple(None if one is None else one.recheck for one in kept)
    key = (arrays, sides, encoded, watched, problem.alpha == 1.0, problem.arithmetic, problem.exists, device)
    way = _ways.get(key)
    if way is None:
        if len(_ways) >= _MOST:
            _ways.clear()
        way = _ways[key] = _made(o, problem, sides, encoded, watched)
    return way


def mark(x: Array | None) -> Any:
    """What a way depends on of an array."""
    return None if x is None else (x.shape, x.strides, x.dtype, x.data.ptr & 15)


def _made(
    o: Operands, problem: GemmProblem, sides: tuple[str, ...], encoded: tuple[Any, ...], watched: bool
) -> ProductPlan:
    import cupy

    device = device_of(cupy.cuda.runtime.getDevice())
    (m, k), n = o.A.shape[-2:], o.B.shape[-1]
    batch = problem.batch[0] if o.C.ndim == 3 else 1
    dtype, out, a = dtype_name(o.A.dtype), dtype_name(o.multiplied.dtype), problem.arithmetic
    gemm = None if problem.exists else gemm_of(o, batch, tf32=a.u_in > 0)
    faster_read = gemm is not None and a.u_in == 0 and _faster_read(o)
    checkers = []
    for side, recheck in zip(sides, encoded, strict=True):
        arrays, turned = o.of(side), side == "columns"
        layouts: Any = {name: None if x is None else Layout.of(x, turned=turned) for name, x in arrays.items()}
        lines, length = (n, m) if turned else (m, n)
        R: Any = arrays["R"]
        case = CheckSpec(
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
            recheck=recheck is not None and (recheck or faster_read),
            split=watched,
        )
        checkers.append(DeviceCheck(case, device.multiprocessors))
    beside = not watched and gemm is not None
    return ProductPlan(sides, tuple(checkers), gemm, beside)


def _faster_read(o: Operands) -> bool:
    """Whether cuBLAS waits so long for an encoded operand that a look at it beside the product, which brings it to the
    cache, saves more than it costs."""
    return all(dtype_name(x.dtype) == "float32" and _READ_FIRST[0] <= x.nbytes < _READ_FIRST[1] for x in (o.A, o.B))


def gemm_of(o: Operands, batch: int, *, tf32: bool) -> cublas.Gemm:
    """cuBLAS's plan for a product, or a stack of so many."""
    (m, k), n = o.A.shape[-2:], o.B.shape[-1]
    shape = Shape(m, k, n, dtype_name(o.A.dtype), out=dtype_name(o.multiplied.dtype), batch=batch)
    return cublas.Gemm.of(shape, o.A, o.B, o.multiplied, tf32=tf32)


def multiply(gemm: cublas.Gemm, o: Operands, alpha: float, beta: float) -> None:
    """Queue the product, by a plan for such operands, on the current stream."""
    if o.C0 is not None:
        o.multiplied[...] = o.C0
    gemm(o.A, o.B, o.multiplied, alpha, beta)


def run(steps: list[Step], stream: int, where: Where) -> None:
    """Queue steps in their order."""
    for step in steps:
        step(stream, where)
