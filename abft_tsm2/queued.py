"""Protected products on a GPU: encoding, product, verdict and repair are queued behind one another, and the host looks
at the end, or not at all.

`run` serves CuPy arrays in the layouts that kernels and cuBLAS take as they are. What the kernels could not settle by
themselves (everything wrong, a checksum that was hit, an operand that changed, patterns of rounding) is looked at by
`abft_tsm2.protect.Product`, the procedure of every other array.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, is_cupy
from abft_tsm2.checksum.on_device import Kept
from abft_tsm2.core import records, vendor
from abft_tsm2.core.records import Record
from abft_tsm2.deferred import Deferred
from abft_tsm2.operands import Problem, Task
from abft_tsm2.protect import Hook, Product
from abft_tsm2.report import Check, Fault, Report, Status
from abft_tsm2.ways import Operands, Way, way_of

_CLEAN, _REPAIRED = 0, 1  # what a record says; everything else is for the host
_CHANGED = 2
_FAULTS = 40  # that a record has room for
_MUCH_LONGER = 4  # lines along memory are checked until they are so many times longer than those across
_REPAIR = "recomputed in float64 on the device"


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


def run(problem: Problem, operation: str, on_stage: Hook | None, write: bool, on_error: str | None) -> Report:
    """Multiply and check on the current stream of the operands' device; PENDING under ``errstate(sync=False)``."""
    with problem.c.device:
        sides = _sides(problem)
        if problem.batch and (on_stage is not None or sides != ("rows",)):
            each = (_Call(problem, operation, sides, task, on_stage, write) for task in problem.tasks())
            return Report.merge([call.report() for call in each], operation=operation)
        task = None if problem.batch else next(problem.tasks())
        call = _Call(problem, operation, sides, task, on_stage, write)
        if policy.synchronous() or on_stage is not None:
            return call.report()
        return Deferred.of(_Pending(call), operation, call.facts.sizes, problem.dtype, on_error)


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


@dataclass(frozen=True)
class Facts:
    """What a report says of a call before its verdict is known; holds no arrays.

    Attributes
    ----------
    products : int or None
        Of a batch.
    index : tuple of int
        In a batch, of one of its products.
    lines : tuple of int
        Of each side.
    """

    operation: str
    sizes: tuple[int, int, int]
    dtype: str
    products: int | None
    index: tuple[int, ...]
    sides: tuple[str, ...]
    lines: tuple[int, ...]


class _Call:
    """One protected product, or a batch of them (`task` is None), on the current device and stream."""

    def __init__(
        self,
        problem: Problem,
        operation: str,
        sides: tuple[str, ...],
        task: Task | None,
        on_stage: Hook | None,
        write: bool,
    ) -> None:
        import cupy

        self.problem, self.task, self.on_stage, self.write = problem, task, on_stage, write
        p = problem
        A, B, C, C0 = (p.a, p.b, p.c, p.c0) if task is None else (task.A, task.B, task.C, task.C0)
        wide = cupy.empty(C.shape, cupy.float32) if p.wide and not p.exists else None
        self.operands = Operands(A, B, C, C0, wide)
        self.kept = tuple(_kept(p, side) for side in sides)
        self.way: Way = way_of(self.operands, p, sides, self.kept, on_stage is not None)
        sizes = (A.shape[-2], A.shape[-1], B.shape[-1])
        products, index = (p.batch[0], ()) if task is None and p.batch else (None, () if task is None else task.index)
        lines = tuple(checker.case.m for checker in self.way.checkers)
        self.facts = Facts(operation, sizes, p.dtype, products, index, sides, lines)

    def stage(self, name: str, **arrays: Array) -> None:
        if self.on_stage is not None:
            self.on_stage(name, arrays)

    # ---- what is queued ----

    def queue(self) -> list[Record]:
        """Queue everything; the records are there when the stream has come so far."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        self.memory = cupy.empty(self.way.nbytes, cupy.uint8)
        self.stage("inputs", A=self.operands.A, B=self.operands.B)
        if self.way.beside:
            fork, join, side = _beside(stream)
            fork.record(stream)
            side.wait_event(fork)
            with side:
                self._encode(self.memory.data.ptr, side)
            join.record(side)
            self._multiply()
            stream.wait_event(join)  # also before the account may be somebody else's
        else:
            self._encode(self.memory.data.ptr, stream)
            self._multiply()
        return [self._verify(i, stream) for i in range(len(self.kept))]

    def _encode(self, account: int, stream: Any) -> None:
        o = self.operands
        for checker, place, kept, side in self._each():
            checker.encode(account + place, o.arrays(side), kept, stream.ptr)
            if self.on_stage is not None:
                s, t = checker.encoded(account + place, kept)
                self.stage("encoded", A=o.A, B=o.B, s=s, t=t)

    def _each(self) -> Iterator[Any]:
        return zip(self.way.checkers, self.way.places, self.kept, self.facts.sides, strict=True)

    def _multiply(self) -> None:
        gemm, o, p = self.way.gemm, self.operands, self.problem
        if gemm is None:
            return
        if o.C0 is not None:
            o.multiplied[...] = o.C0
        gemm(o.A, o.B, o.multiplied, p.alpha, p.beta)
        self.stage("multiplied", C=o.multiplied)

    def _verify(self, i: int, stream: Any) -> Record:
        """Queue the verdict on one side, and the repair."""
        o, p, checker, kept = self.operands, self.problem, self.way.checkers[i], self.kept[i]
        account, arrays = self.memory.data.ptr + self.way.places[i], o.arrays(self.facts.sides[i])
        checker.verify(account, arrays, kept, p.alpha, p.beta, stream.ptr)
        if self.on_stage is not None:
            self.stage("verified", C=o.multiplied, u=checker.observed(account))
            checker.judge(account, kept, p.alpha, p.beta, stream.ptr)
        record = records.take()
        checker.repair(account, arrays, kept, p.alpha, p.beta, stream.ptr, record.address, write=self.write)
        return record

    # ---- what the host makes of it ----

    def report(self) -> Report:
        """Do it, wait for the verdict, and say how it went."""
        import cupy

        found = self.queue()
        cupy.cuda.get_current_stream().synchronize()
        try:
            verdict = Verdict(found, self.facts)
            if verdict.settled:
                if verdict.repaired:
                    self.stage("corrected", C=self.operands.multiplied)
                return verdict.report()
            return self._looked_at(verdict)
        finally:
            for record in found:
                record.free()

    def _looked_at(self, verdict: Verdict) -> Report:
        """The report of what the kernels left to the host."""
        changed, hit = self._differences()
        tasks = [self.task] if self.task is not None else list(self.problem.tasks())
        looks = (_Look(task, self, changed, hit, verdict) for task in tasks if task is not None)
        reports = [look.report() for look in looks]
        if self.operands.wide is not None:
            self.operands.C[...] = self.operands.wide  # whatever was repaired
        return reports[0] if self.facts.products is None else Report.merge(reports, operation=self.facts.operation)

    def _differences(self) -> tuple[set[str], str]:
        """Which of A, B and c are not what was encoded, and which checksum not what it was: encode again."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        again = cupy.empty(self.way.nbytes, cupy.uint8)
        changed: set[str] = set()
        hit = ""
        for checker, place, kept, side in self._each():
            now, then = again.data.ptr + place, self.memory.data.ptr + place
            arrays = self.operands.arrays(side)
            checker.encode(now, arrays, kept, stream.ptr)
            if self.on_stage is not None:
                checker.verify(now, arrays, kept, self.problem.alpha, self.problem.beta, stream.ptr)
            names = checker.differences(then, now, kept, arrays)
            left, right = "AB" if side == "rows" else "BA"
            changed |= {{"L": left, "R": right, "C0": "c"}[name] for name in names if name in ("L", "R", "C0")}
            hit = hit or next((name for name in names if name in ("v", "s", "t", "u")), "")
        return changed, hit


class Verdict:
    """What the records of a call say, one for each side."""

    def __init__(self, found: list[Record], facts: Facts) -> None:
        self.facts = facts
        self.settled = all(int(r.words[2]) in (_CLEAN, _REPAIRED) and not int(r.words[7]) & _CHANGED for r in found)
        self.repaired = any(int(r.words[2]) == _REPAIRED for r in found)
        self.flagged = sum(int(r.words[1]) for r in found)
        each = list(zip(found, facts.sides, facts.lines, strict=True))
        self.checks = tuple(self._check(*one) for one in each)
        self.faults = [fault for one in each for fault in self._faults(*one)]

    def _check(self, record: Record, side: str, m: int) -> Check:
        closest, line = int(record.words[3]) >> 32, int(record.words[3]) & 0xFFFFFFFF
        ratio = float(np.array([closest], np.uint32).view(np.float32)[0])
        bound, least = record.number(4), record.number(5)
        with np.errstate(all="ignore"):
            limit = float(np.float64((1 + ratio) * bound) / np.float64(least))
        return Check(side, 1, m, m, bound, ratio, line % m, limit)

    def _faults(self, record: Record, side: str, m: int) -> list[tuple[int, Fault]]:
        """Product and fault of each wrong element; those that found no room in the record in one."""
        count = int(record.words[6])
        faults = []
        for at in range(8, 8 + 3 * min(count, _FAULTS), 3):
            where = int(record.words[at])
            position, line = where >> 32, where & 0xFFFFFFFF
            with np.errstate(all="ignore"):
                off = abs(np.float64(record.number(at + 1)) - np.float64(record.number(at + 2)))
            rows, columns = (line % m, position) if side == "rows" else (position, line % m)
            faults.append((line // m, Fault("C", "element", (rows,), (columns,), 1, float(off), _REPAIR)))
        if count > _FAULTS:
            left = Fault("C", "block", (), (), count - _FAULTS, float("nan"), _REPAIR)
            faults.append((faults[-1][0], left))
        return faults

    def report(self) -> Report:
        """The report of a verdict that is settled."""
        facts, (m, k, n) = self.facts, self.facts.sizes
        reports = []
        for number in range(facts.products or 1):
            faults = tuple(fault for product, fault in self.faults if product == number)
            reports.append(
                Report.plain(
                    status=Status.CORRECTED if faults else Status.CLEAN,
                    operation=facts.operation,
                    m=m,
                    k=k,
                    n=n,
                    dtype=facts.dtype,
                    checks=self.checks,
                    faults=faults,
                    index=facts.index if facts.products is None else (number,),
                )
            )
        return reports[0] if facts.products is None else Report.merge(reports, operation=facts.operation)


class _Look(Product):
    """A product that the kernels could not settle, looked at as any other."""

    def __init__(self, task: Task, call: _Call, changed: set[str], hit: str, verdict: Verdict) -> None:
        wide = call.operands.wide
        if wide is not None:
            task = replace(task, C=wide if wide.ndim == 2 else wide[task.index])
        super().__init__(task, call.problem, call.facts.operation, None, call.write, np.geterr())
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

    def __init__(self, call: _Call) -> None:
        import cupy

        self._records = call.queue()
        self._done = cupy.cuda.Event(disable_timing=True)
        self._done.record()
        p, self._facts = call.problem, call.facts
        self._arrays = tuple(_Later.of(x) for x in (p.a, p.b, p.c, p.c0))
        self._rest = replace(p, a=None, b=None, c=None, c0=None, given=None, encoded_a=None, encoded_b=None)

    @property
    def there(self) -> bool:
        return all(record.there for record in self._records)

    def wait(self) -> Report:
        self._done.synchronize()
        verdict = Verdict(self._records, self._facts)
        for record in self._records:
            record.free()
        if verdict.settled:
            return verdict.report()
        arrays = [later if later is None else later.array() for later in self._arrays]
        gone = any(array is None and later is not None for array, later in zip(arrays, self._arrays, strict=True))
        report = verdict.report()
        if not gone:
            a, b, c, c0 = arrays
            problem = replace(self._rest, a=a, b=b, c=c, c0=c0, exists=True)
            report = run_now(problem, self._facts.operation)
            if report.status in (Status.CLEAN, Status.UNVERIFIABLE):
                return replace(report, suspicions=max(report.suspicions, verdict.flagged))
        why = "its operands are gone" if gone else "it still disagrees"
        reason = (
            f"{verdict.flagged} lines of C failed the check, more than the device repairs by itself, and {why}: "
            "repeat the product under errstate(sync=True)"
        )
        return replace(report, status=Status.UNCORRECTABLE, also=(), reasons=(*report.reasons, reason))


def run_now(problem: Problem, operation: str) -> Report:
    """Look at an existing product and wait for the verdict; nothing is repaired."""
    with problem.c.device:
        task = None if problem.batch else next(problem.tasks())
        return _Call(problem, operation, _sides(problem), task, None, False).report()


@dataclass(frozen=True, eq=False)
class _Later:
    """An array that may be gone when somebody looks for it."""

    owner: weakref.ref[Any]
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, x: Array | None) -> _Later | None:
        if x is None:
            return None
        owner = x if x.base is None else x.base
        return cls(weakref.ref(owner), x.data.ptr, x.shape, x.strides, x.dtype)

    def array(self) -> Array | None:
        import cupy

        owner = self.owner()
        if owner is None:
            return None
        at = owner.data + (self.address - owner.data.ptr)
        return cupy.ndarray(self.shape, self.dtype, at, self.strides)


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
