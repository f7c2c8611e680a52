"""One protected product on a GPU: everything queued in its order, and what the host makes of the verdict."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from abft_tsm2.arrays import Array
from abft_tsm2.checksum.device.layout import CarriedChecksum
from abft_tsm2.checksum.device.record import CallInfo, DeviceVerdict
from abft_tsm2.core import memory
from abft_tsm2.core.memory import DeviceRecord
from abft_tsm2.gemm.host import Hook
from abft_tsm2.gemm.operands import GemmProblem, GemmTask
from abft_tsm2.gemm.plan import LaunchSequence, Operands, ProductPlan, multiply
from abft_tsm2.gemm.plan import run as run_steps
from abft_tsm2.report import Fault, Report

ROUNDS = 3  # repairs that somebody undid before giving up
_numbers = itertools.count(1)  # of the calls of this process, and of each verdict that is given once more


@dataclass(frozen=True, eq=False)
class CallOptions:
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

    way: ProductPlan
    facts: CallInfo
    kept: tuple[CarriedChecksum | None, ...]
    alpha: float
    beta: float
    write: bool


class Look(Protocol):
    """What is done with a product that the kernels could not settle: `abft_tsm2.gemm.fallback.look_at`."""

    def __call__(
        self,
        call: DeviceProduct,
        verdict: DeviceVerdict,
        program: LaunchSequence,
        problem: GemmProblem,
        task: GemmTask | None,
        /,
    ) -> Report: ...


class DeviceProduct:
    """One protected product, or a batch of them, on the current device and stream."""

    def __init__(self, plan: CallOptions, operands: Operands, on_stage: Hook | None = None) -> None:
        self.plan, self.operands, self.on_stage = plan, operands, on_stage
        self._number = next(_numbers)

    def stage(self, name: str, **arrays: Array) -> None:
        if self.on_stage is not None:
            self.on_stage(name, arrays)

    # ---- what is queued ----

    def queue(self, program: LaunchSequence, stream: Any) -> list[DeviceRecord]:
        """Queue everything; the records are there when the stream has come so far."""
        plan, o, here = self.plan, self.operands, stream.ptr
        sides, where = plan.way.sides, self._where()
        if plan.way.beside:
            fork, join, side = _beside(stream)
            fork.record(stream)
            side.wait_event(fork)
            for i in range(len(sides)):
                run_steps(program.encode[i], side.ptr, where[i])
            join.record(side)
            self._multiply()
            stream.wait_event(join)  # also before the account is somebody else's
        else:
            self.stage("inputs", A=o.A, B=o.B)
            for i in range(len(sides)):
                run_steps(program.encode[i], here, where[i])
            if self.on_stage is not None:  # all sides are encoded before anybody is told
                for i, checker in enumerate(plan.way.checkers):
                    s, t = checker.encoded(program.accounts[i], plan.kept[i])
                    self.stage("encoded", A=o.A, B=o.B, s=s, t=t)
            self._multiply()
        return self._check(program, stream, where, self._number)

    def _where(self) -> list[dict[str, int]]:
        """Addresses of the operands for each side, and the number of the call."""
        return [{**self.operands.where(side), "encoded": self._number} for side in self.plan.way.sides]

    def _check(
        self, program: LaunchSequence, stream: Any, where: list[dict[str, int]], number: int, *, again: bool = False
    ) -> list[DeviceRecord]:
        """Queue the verdict of every side under a number, and the repairs; `again`: after a repair."""
        plan, o, here = self.plan, self.operands, stream.ptr
        found = []
        for i, checker in enumerate(plan.way.checkers):
            where[i]["call"] = number
            run_steps(program.verify[i], here, where[i])
            if self.on_stage is not None:
                if not again:
                    self.stage("verified", C=o.multiplied, u=checker.observed(program.accounts[i]))
                if o.wide is not None:  # what a hook may have changed, rounded; repairs are rounded as they are made
                    o.C[...] = o.wide
                run_steps(program.judge[i], here, where[i])
            record = memory.take(number, checker.case.m * checker.case.batch)
            where[i]["record"] = record.address
            run_steps(program.repair[i], here, where[i])
            found.append(record)
        return found

    def _multiply(self) -> None:
        if self.plan.way.gemm is None:
            return
        multiply(self.plan.way.gemm, self.operands, self.plan.alpha, self.plan.beta)
        self.stage("multiplied", C=self.operands.multiplied)

    # ---- what the host makes of it ----

    def report(self, asked: Callable[[], tuple[GemmProblem, GemmTask | None]], look_at: Look) -> Report:
        """Do it, wait for the verdict, and say how it went; `asked`: the problem, and the product of a batch;
        `look_at`: what is done where the kernels could not settle it."""
        import cupy

        plan, stream = self.plan, cupy.cuda.get_current_stream()
        key, program = plan.way.take(stream.ptr, plan.kept, plan.alpha, plan.beta, plan.write)
        faults: list[tuple[int, Fault]] = []
        try:
            verdict = self._verdict(self.queue(program, stream), stream)
            for _ in range(ROUNDS if self.on_stage is not None else 0):
                if not (verdict.settled and verdict.repaired):
                    break
                faults += verdict.faults
                self.stage("corrected", C=self.operands.multiplied)  # which may have changed it
                program.forget(stream.ptr)
                again = self._check(program, stream, self._where(), next(_numbers), again=True)
                verdict = self._verdict(again, stream)
            else:
                if self.on_stage is not None and verdict.repaired:
                    verdict.give_up()
            if faults and verdict.settled and self._operands_changed(program):  # by what was told of the repair
                verdict.doubt()
            verdict.faults = faults + verdict.faults
            verdict.replaced |= bool(faults)
            return verdict.report() if verdict.settled else look_at(self, verdict, program, *asked())
        finally:
            plan.way.give(key, program)

    def encode_again(
        self, program: LaunchSequence, *, observe: bool = False
    ) -> tuple[LaunchSequence, list[dict[str, tuple[int, ...]]]]:
        """Encode once more, and for each side what is not the same now (`Checker.differences`); `observe`: u too.

        Synchronises.
        """
        import cupy

        plan, stream = self.plan, cupy.cuda.get_current_stream().ptr
        again, found = LaunchSequence(plan.way, plan.kept, plan.alpha, plan.beta, False), []
        for i, (checker, where) in enumerate(zip(plan.way.checkers, self._where(), strict=True)):
            run_steps(again.encode[i], stream, where)
            if observe:
                run_steps(again.verify[i], stream, where)
            found.append(
                checker.differences(program.accounts[i], again.accounts[i], plan.kept[i], where, observed=observe)
            )
        return again, found

    def _operands_changed(self, program: LaunchSequence) -> bool:
        """Whether A, B or c is not what was encoded."""
        return any(name in found for found in self.encode_again(program)[1] for name in ("L", "R", "C0"))

    def _verdict(self, found: list[DeviceRecord], stream: Any) -> DeviceVerdict:
        """Wait for records, and read them."""
        for record in found:
            record.bring(stream.ptr)
        stream.synchronize()
        verdict = DeviceVerdict(found, self.plan.facts)
        for record in found:
            record.free()
        return verdict

    def queued(self) -> list[DeviceRecord]:
        """Do it, and wait for nothing."""
        import cupy

        plan, stream = self.plan, cupy.cuda.get_current_stream()
        key, program = plan.way.take(stream.ptr, plan.kept, plan.alpha, plan.beta, plan.write)
        found = self.queue(program, stream)
        plan.way.give(key, program)
        return found


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
