"""Protected products on a GPU: encoding, product, verdict and repair are queued behind one another, and the host looks
at the end, or not at all.

`run` serves CuPy arrays in the layouts that kernels and cuBLAS take as they are. What the kernels could not settle by
themselves (everything wrong, a checksum that was hit, an operand that changed, patterns of rounding) is looked at by
`abft_tsm2.protect.Product`, the procedure of every other array.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, is_cupy
from abft_tsm2.checksum.account import Kept
from abft_tsm2.checksum.encode import Encoded
from abft_tsm2.core import records, vendor
from abft_tsm2.core.records import Record
from abft_tsm2.deferred import Deferred
from abft_tsm2.operands import Problem, Task, problem_of
from abft_tsm2.protect import Hook, Product
from abft_tsm2.report import Fault, Report, Status
from abft_tsm2.verdicts import Facts, Verdict, clean
from abft_tsm2.ways import Operands, Program, Way, mark, way_of
from abft_tsm2.ways import run as run_steps

_MUCH_LONGER = 4  # lines along memory are checked until they are so many times longer than those across


def serves(problem: Problem) -> bool:
    """Whether these are arrays that the kernels and cuBLAS take as they are."""
    p = problem
    if p.wide and p.c0 is not None:
        return False
    if not is_cupy(p.c) or 0 in p.c.shape or p.a.shape[-1] == 0 or p.a.dtype != p.b.dtype or len(p.batch) > 1:
        return False
    if any(e is not None and e.device is None for e in (p.encoded_a, p.encoded_b)):
        return False
    return all(vendor.layout(x) != "A" for x in (p.a, p.b, p.c, p.c0) if x is not None)


def run(
    problem: Problem, operation: str, on_stage: Hook | None, write: bool, on_error: str | None, key: Any = None
) -> Report:
    """Multiply and check on the current stream of the operands' device; PENDING under ``errstate(sync=False)``.

    `key`: of `key_of` the arguments, to serve the next call with such arguments quickly.
    """
    with problem.c.device:
        sides, watched = _sides(problem), on_stage is not None
        if problem.batch and (watched or sides != ("rows",)):
            reports = []
            for one in problem.tasks():
                plan, operands = _planned(problem, operation, sides, one, write, watched)
                reports.append(Call(plan, operands, on_stage).report(lambda one=one: (problem, one)))  # type: ignore[misc]
            return Report.merge(reports, operation=operation)
        task = None if problem.batch else next(problem.tasks())
        plan, operands = _planned(problem, operation, sides, task, write, watched)
        if key is not None and not problem.squeeze:
            _learn(key, plan, operands, problem)
        call = Call(plan, operands, on_stage)
        if policy.synchronous() or watched:
            return call.report(lambda: (problem, task))
        return Deferred.of(call.deferred(), plan.facts, on_error)


def _planned(
    problem: Problem, operation: str, sides: tuple[str, ...], task: Task | None, write: bool, watched: bool
) -> tuple[Plan, Operands]:
    """The plan of a product, or of a whole batch where `task` is None, and its arrays."""
    import cupy

    p = problem
    A, B, C, C0 = (p.a, p.b, p.c, p.c0) if task is None else (task.A, task.B, task.C, task.C0)
    wide = cupy.empty(C.shape, cupy.float32) if p.wide and not p.exists else None
    operands = Operands(A, B, C, C0, wide)
    kept = tuple(_kept(p, side) for side in sides)
    way = way_of(operands, p, sides, kept, watched)
    products, index = (p.batch[0], ()) if task is None else (None, task.index)
    lines = tuple(checker.case.m for checker in way.checkers)
    facts = Facts(operation, (A.shape[-2], A.shape[-1], B.shape[-1]), p.dtype, products, index, sides, lines)
    return Plan(way, facts, kept, p.alpha, p.beta, write), operands


def _kept(problem: Problem, side: str) -> Kept | None:
    """What the right operand of that side carries, if it is encoded."""
    owner = problem.encoded_b if side == "rows" else problem.encoded_a
    return None if owner is None or owner.device is None else owner.device.kept(side, owner.recheck)


def _sides(problem: Problem) -> tuple[str, ...]:
    """Which lines are checked; "auto": what is encoded, else the shorter ones, but those along memory where these are
    not much longer."""
    if problem.check == "both":
        return ("rows", "columns")
    if problem.check != "auto":
        return (problem.check,)
    carried = [side for side in ("rows", "columns") if _kept(problem, side) is not None]
    if len(carried) == 1:
        return (carried[0],)
    m, n = problem.c.shape[-2:]
    if problem.batch:
        return ("rows",)
    if vendor.layout(problem.c) == "C":
        return ("rows",) if n <= _MUCH_LONGER * m else ("columns",)
    return ("columns",) if m <= _MUCH_LONGER * n else ("rows",)


@dataclass(frozen=True, eq=False)
class Plan:
    """All of a protected call but its arrays.

    Attributes
    ----------
    way : Way
    facts : Facts
    kept : tuple of Kept or None
        What operands carry that were encoded before, for each side.
    alpha, beta : float
    write : bool
        Whether C may be repaired.
    """

    way: Way
    facts: Facts
    kept: tuple[Kept | None, ...]
    alpha: float
    beta: float
    write: bool


# ---- the same again, with little work for the host ------------------------------------------------------------------


class _Known(NamedTuple):
    """A plan for arguments that were checked once, and what is left to look at."""

    plan: Plan
    shape: tuple[int, ...]
    dtype: Any
    wide: bool
    extents: tuple[int, int, int]


_known: dict[Any, _Known] = {}
_MOST_KNOWN = 4096


def key_of(a: Any, b: Any, out: Any, options: tuple[Any, ...]) -> Any:
    """All that a call depends on but addresses, where it is of the kind that is remembered; else None."""
    kept = None
    if isinstance(b, Encoded):
        kept, b = None if b.device is None else b.device.kept("rows", b.recheck), b.array
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
    return mark(a), mark(b), mark(out), kept, device, options


def _learn(key: Any, plan: Plan, o: Operands, problem: Problem) -> None:
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    extents = tuple(_extent(x) for x in (o.A, o.B, o.C))
    _known[key] = _Known(plan, o.C.shape, o.C.dtype, problem.wide, extents)  # type: ignore[arg-type]


def _extent(x: Array) -> int:
    """Bytes from the first element to the end of the last."""
    return int(sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)) + x.itemsize)


def again(key: Any, a: Any, b: Any, out: Any, on_error: str | None, problem: Callable[[Any], Problem]) -> Any:
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
    wide = cupy.empty(known.shape, cupy.float32) if known.wide else None
    plan, ndim = known.plan, len(known.shape)
    if ndim == 3:
        A, B = (x if x.ndim == 3 else cupy.broadcast_to(x, (known.shape[0], *x.shape)) for x in (A, B))
    call = Call(plan, Operands(A, B, C, None, wide))
    if not policy.synchronous():
        return C, Deferred.of(call.deferred(), plan.facts, on_error)

    def asked() -> tuple[Problem, Task | None]:
        found = problem(C)
        return found, None if found.batch else next(found.tasks())

    return C, call.report(asked)


# ---- one call ------------------------------------------------------------------------------------------------------


class Call:
    """One protected product, or a batch of them, on the current device and stream."""

    def __init__(self, plan: Plan, operands: Operands, on_stage: Hook | None = None) -> None:
        self.plan, self.operands, self.on_stage = plan, operands, on_stage

    def stage(self, name: str, **arrays: Array) -> None:
        if self.on_stage is not None:
            self.on_stage(name, arrays)

    # ---- what is queued ----

    def queue(self, program: Program, stream: Any) -> list[Record]:
        """Queue everything; the records are there when the stream has come so far."""
        plan, o, here = self.plan, self.operands, stream.ptr
        sides = plan.way.sides
        where = [o.where(side) for side in sides]
        if plan.way.beside:
            fork, join, side = _beside(stream)
            fork.record(stream)
            side.wait_event(fork)
            with side:
                for i in range(len(sides)):
                    run_steps(program.encode[i], side.ptr, where[i])
            join.record(side)
            self._multiply()
            stream.wait_event(join)  # also before the account is somebody else's
        else:
            self.stage("inputs", A=o.A, B=o.B)
            for i, checker in enumerate(plan.way.checkers):
                run_steps(program.encode[i], here, where[i])
                if self.on_stage is not None:
                    s, t = checker.encoded(program.accounts[i], plan.kept[i])
                    self.stage("encoded", A=o.A, B=o.B, s=s, t=t)
            self._multiply()
        found = []
        for i, checker in enumerate(plan.way.checkers):
            run_steps(program.verify[i], here, where[i])
            if self.on_stage is not None:
                self.stage("verified", C=o.multiplied, u=checker.observed(program.accounts[i]))
                run_steps(program.judge[i], here, where[i])
            record = records.take()
            where[i]["record"] = record.address
            run_steps(program.repair[i], here, where[i])
            found.append(record)
        return found

    def _multiply(self) -> None:
        gemm, o, plan = self.plan.way.gemm, self.operands, self.plan
        if gemm is None:
            return
        if o.C0 is not None:
            o.multiplied[...] = o.C0
        gemm(o.A, o.B, o.multiplied, plan.alpha, plan.beta)
        self.stage("multiplied", C=o.multiplied)

    # ---- what the host makes of it ----

    def report(self, asked: Callable[[], tuple[Problem, Task | None]]) -> Report:
        """Do it, wait for the verdict, and say how it went; `asked`: the problem, and the product of a batch."""
        import cupy

        plan, stream = self.plan, cupy.cuda.get_current_stream()
        key, program = plan.way.take(stream.ptr, plan.kept, plan.alpha, plan.beta, plan.write)
        found = self.queue(program, stream)
        try:
            for record in found:
                record.bring(stream.ptr)
            stream.synchronize()
            verdict = Verdict(found, plan.facts)
            if not verdict.settled:
                return self._looked_at(verdict, program, *asked())
            if verdict.repaired:
                self.stage("corrected", C=self.operands.multiplied)
            return verdict.report()
        finally:
            for record in found:
                record.free()
            plan.way.give(key, program)

    def deferred(self) -> _Pending:
        """Do it, and wait for nothing."""
        import cupy

        plan, stream = self.plan, cupy.cuda.get_current_stream()
        key, program = plan.way.take(stream.ptr, plan.kept, plan.alpha, plan.beta, plan.write)
        found = self.queue(program, stream)
        plan.way.give(key, program)
        return _Pending(found, self, stream)

    def _looked_at(self, verdict: Verdict, program: Program, problem: Problem, task: Task | None) -> Report:
        """The report of what the kernels left to the host."""
        changed, hit = self._differences(program)
        tasks = [task] if task is not None else list(problem.tasks())
        reports = [_Look(one, problem, self, changed, hit, verdict).report() for one in tasks]
        if self.operands.wide is not None:
            self.operands.C[...] = self.operands.wide  # whatever was repaired
        facts = self.plan.facts
        return reports[0] if facts.products is None else Report.merge(reports, operation=facts.operation)

    def _differences(self, program: Program) -> tuple[set[str], str]:
        """Which of A, B and c are not what was encoded, and which checksum not what it was: encode again."""
        import cupy

        plan, stream = self.plan, cupy.cuda.get_current_stream().ptr
        again = Program(plan.way, plan.kept, plan.alpha, plan.beta, False)
        changed: set[str] = set()
        hit = ""
        for i, checker in enumerate(plan.way.checkers):
            where = self.operands.where(plan.way.sides[i])
            run_steps(again.encode[i], stream, where)
            if self.on_stage is not None:
                run_steps(again.verify[i], stream, where)
            names = checker.differences(program.accounts[i], again.accounts[i], plan.kept[i], where)
            left, right = "AB" if plan.way.sides[i] == "rows" else "BA"
            changed |= {{"L": left, "R": right, "C0": "c"}[name] for name in names if name in ("L", "R", "C0")}
            hit = hit or next((name for name in names if name in ("v", "s", "t", "u")), "")
        return changed, hit


class _Look(Product):
    """A product that the kernels could not settle, looked at as any other."""

    def __init__(self, task: Task, problem: Problem, call: Call, changed: set[str], hit: str, verdict: Verdict) -> None:
        wide = call.operands.wide
        if wide is not None:
            task = replace(task, C=wide if wide.ndim == 2 else wide[task.index])
        plan = call.plan
        super().__init__(task, problem, plan.facts.operation, None, plan.write, np.geterr())
        self.differing, self.hit, self.verdict, self._corrected = changed, hit, verdict, call.on_stage

    def stage(self, name: str, **arrays: Array) -> None:
        """Only what was not told before."""
        if name == "corrected" and self._corrected is not None:
            self._corrected(name, arrays)

    def report(self) -> Report:
        intact = self.look_after_encoded()
        if self.differing:
            self.changed = set(self.differing)
            if intact and (Status.CORRECTED in self.statuses or self.restore_changed()):
                self.product()  # with the restored operands, once
            elif Status.INPUT_CHANGED not in self.statuses:
                self.statuses.append(Status.INPUT_CHANGED)
            return self.summary()
        self.settle([self.encode(side) for side in self.verdict.facts.sides])
        held = [status for decision in self.decisions for status in decision.statuses]
        if not held and self.hit:
            self.statuses.append(Status.CHECKSUM_FAULT)
            self.faults.append(Fault(self.hit, "checksum", (), (), 0, float("nan"), "computed again"))
        report = self.summary()
        if report.status is Status.CLEAN:  # what the kernels suspected, and nobody else does
            report = replace(report, suspicions=max(report.suspicions, self.verdict.flagged))
        return report


class _Pending:
    """The verdict on a product that is still in the queue; it keeps none of the user's arrays alive."""

    def __init__(self, found: list[Record], call: Call, stream: Any) -> None:
        import cupy

        self._records, self._device = found, cupy.cuda.Device()
        self._done = cupy.cuda.Event(disable_timing=True)
        self._done.record(stream)
        o = call.operands
        self._plan, self._arrays = call.plan, tuple(_later(x) for x in (o.A, o.B, o.C, o.C0))

    @property
    def there(self) -> bool:
        return bool(self._done.done)

    @staticmethod
    def dismiss(pending: Iterable[_Pending]) -> list[_Pending]:
        """Of verdicts that are there, those that somebody has to hear of; the others are done with."""
        done = list(pending)
        records.bring(record for one in done for record in one._records)
        left = [one for one in done if not clean(one._records)]
        for one in done:
            if one not in left:
                for record in one._records:
                    record.free()
        return left

    def wait(self) -> Report:
        self._done.synchronize()
        with self._device:
            records.bring(self._records)
        verdict = Verdict(self._records, self._plan.facts)
        for record in self._records:
            record.free()
        return verdict.report() if verdict.settled else self._late(verdict)

    def _late(self, verdict: Verdict) -> Report:
        """What can still be said of a product that the kernels could not settle: its operands may be gone."""
        arrays = [later and _found(later) for later in self._arrays]
        gone = any(array is None and later is not None for array, later in zip(arrays, self._arrays, strict=True))
        report, why = verdict.report(), "its operands are gone"
        if not gone:
            A, B, C, c = arrays
            plan = self._plan
            problem = problem_of(A, B, c, alpha=plan.alpha, beta=plan.beta, existing=C, check="auto")
            with policy.errstate(sync=True):
                report = run(problem, plan.facts.operation, None, False, "detect")
            if report.status in (Status.CLEAN, Status.UNVERIFIABLE):
                return replace(report, suspicions=max(report.suspicions, verdict.flagged))
            why = "it still disagrees"
        reason = (
            f"{verdict.flagged} lines of C failed the check, more than the device repairs by itself, and {why}: "
            "repeat the product under errstate(sync=True)"
        )
        return replace(report, status=Status.UNCORRECTABLE, also=(), reasons=(*report.reasons, reason))


class _Later(NamedTuple):
    """An array that may be gone when somebody looks for it."""

    owner: weakref.ref[Any]
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


def _later(x: Array | None) -> _Later | None:
    if x is None:
        return None
    owner = x if x.base is None else x.base
    return _Later(weakref.ref(owner), x.data.ptr, x.shape, x.strides, x.dtype)


def _found(later: _Later) -> Array | None:
    import cupy

    owner = later.owner()
    if owner is None:
        return None
    at = owner.data + (later.address - owner.data.ptr)
    return cupy.ndarray(later.shape, later.dtype, at, later.strides)


_streams: dict[tuple[int, int], tuple[Any, Any, Any]] = {}


def _beside(stream: Any) -> tuple[Any, Any, Any]:
    """Two events and the stream on which what runs beside a stream's products is queued."""
    import cupy

    key = cupy.cuda.runtime.getDevice(), stream.ptr
    found = _streams.get(key)
    if found is None:
        events = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        found = _streams[key] = (*events, cupy.cuda.Stream(non_blocking=True))
    return found
