"""The five steps of a product on a GPU, queued on a stream: encode, multiply, verify, locate and repair; the report.

`DeviceProduct` serves CuPy arrays in the layouts that kernels and cuBLAS take as they are. The host waits once, at the
end, or not at all. What the kernels cannot settle (everything wrong, a checksum that was hit, an operand that changed,
patterns of rounding) is left to `abft_tsm2.gemm.fallback`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from abft_tsm2.arrays import Array
from abft_tsm2.checksum.device.differences import differences, digest_of
from abft_tsm2.checksum.device.layout import CarriedChecksum, OrderedLines
from abft_tsm2.checksum.device.record import CallInfo, DeviceOutcome, DeviceVerdict
from abft_tsm2.core import faultpoint, memory
from abft_tsm2.core.memory import DeviceRecord
from abft_tsm2.gemm.host import Hook
from abft_tsm2.gemm.operands import GemmProblem, GemmTask
from abft_tsm2.gemm.plan import (
    CallOptions,
    LaunchSequence,
    Operands,
    ProductPlan,
    multiply,
    order_of,
    plan_of,
    run_steps,
    side_stream,
    sides_of,
    wide_product,
)
from abft_tsm2.gemm.replays import GraphCall, forget
from abft_tsm2.place import device_name
from abft_tsm2.report import Fault, Report

ROUNDS = 3  # repairs that were undone before giving up
_numbers = itertools.count(1)  # of the calls of this process, and of each verdict that is given once more


class DeviceProduct:
    """One protected product, or a batch of them, on the current device and stream.

    Attributes
    ----------
    plan, options, info, operands, on_stage
        What it consists of.
    limits : bool
        Whether reports say how small changes are sure to be found.
    unsettled : (DeviceVerdict, LaunchSequence) or None
        A verdict that is left to the host, and the workspaces that it is from.
    """

    def __init__(
        self,
        plan: ProductPlan,
        options: CallOptions,
        info: CallInfo,
        operands: Operands,
        on_stage: Hook | None = None,
        *,
        limits: bool = False,
    ) -> None:
        self.plan, self.options, self.info, self.operands, self.on_stage = plan, options, info, operands, on_stage
        self.limits = limits
        self.unsettled: tuple[DeviceVerdict, LaunchSequence] | None = None
        self._number = next(_numbers)

    def stage(self, name: str, **arrays: Array) -> None:
        if self.on_stage is not None:
            self.on_stage(name, arrays)

    def report(self) -> Report | None:
        """Multiply, wait for the verdict, and report; None where it is `unsettled`."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        sequence = self.plan.take(stream.ptr, self.options)
        verdict = self._verdict(self._queue(sequence, stream), stream)
        if self.on_stage is not None:
            verdict = self._verify_repairs(verdict, sequence, stream)
        if not verdict.settled:
            self.unsettled = verdict, sequence
            return None
        report = self._measured(verdict.report(), sequence)
        self.plan.give(sequence)
        return report

    def settle(self, found: list[DeviceRecord], call: GraphCall) -> Report | None:
        """`report` of a product that has run as a graph, by its records, which are here."""
        verdict = DeviceVerdict(found, self.info)
        for record in found:
            record.free()
        if verdict.outcome is DeviceOutcome.NO_VERDICT:
            forget(call)
        if not verdict.settled:
            self.unsettled = verdict, call.sequence
            return None
        return self._measured(verdict.report(), call.sequence)

    def _measured(self, report: Report, sequence: LaunchSequence) -> Report:
        """The report with the limits of all lines, where they were asked for."""
        if not self.limits:
            return report
        checks = report.products[0].checks if report.products else report.checks
        each = zip(self.plan.checks, sequence.workspaces, self.options.carried, checks, strict=True)
        own = [check.limits(at, carried, found, self.options.alpha) for check, at, carried, found in each]
        if not report.products:
            return report.like(checks=tuple(one[0] for one in own))
        made = zip(report.products, *own, strict=True)
        return report.like(products=tuple(product.like(checks=tuple(found)) for product, *found in made))

    def queue(self) -> list[DeviceRecord]:
        """Multiply, and wait for nothing; the records are there when the stream has come so far."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        sequence = self.plan.take(stream.ptr, self.options)
        found = self._queue(sequence, stream)
        self.plan.give(sequence)
        return found

    # ---- the steps ----

    def _queue(self, sequence: LaunchSequence, stream: Any) -> list[DeviceRecord]:
        """Queue every step."""
        plan, o, here = self.plan, self.operands, stream.ptr
        sides, where, planter = plan.sides, self._where(), self.planter()
        if plan.on_side_stream:
            fork, join, side = side_stream(stream.ptr)
            fork.record(stream)
            side.wait_event(fork)
            for i in range(len(sides)):
                run_steps(sequence.encode[i], side.ptr, where[i])
            join.record(side)
            try:
                if planter is not None:  # operands are changed when they have been encoded
                    stream.wait_event(join)
                self._multiply(planter)
            finally:
                stream.wait_event(join)  # before another call takes the workspaces, of a product that failed as well
        else:
            self.stage("inputs", A=o.A, B=o.B)
            for i in range(len(sides)):
                run_steps(sequence.encode[i], here, where[i])
            if self.on_stage is not None:  # all sides are encoded before the hook hears of one
                for i, check in enumerate(plan.checks):
                    s, t = check.encoded(sequence.workspaces[i], self.options.carried[i])
                    self.stage("encoded", A=o.A, B=o.B, s=s, t=t)
            self._multiply(planter)
        return self._verify(sequence, stream, where, self._number)

    def digests(self) -> list[int]:
        """Of what operands give now, for each side, as the kernels have it in their records. Synchronises."""
        again = self._encoded_again(False)  # which keeps the memory of its workspaces
        sides = zip(self.plan.checks, again.workspaces, self.options.carried, strict=True)
        return [digest_of(check, memory, carried) for check, memory, carried in sides]

    def _encoded_again(self, recompute: bool) -> LaunchSequence:
        import cupy

        stream = cupy.cuda.get_current_stream().ptr
        again = LaunchSequence(self.plan, self.options._replace(write=False))
        for i, (check, where) in enumerate(zip(self.plan.checks, self._where(), strict=True)):
            run_steps(again.encode[i], stream, where)
            if recompute or check.spec.joint:
                run_steps(again.verify[i], stream, {**where, "call": self._number})
        return again

    def call_of(self, side: int) -> tuple[float, float, dict[str, int]]:
        """alpha and beta, and where the operands of a side are."""
        return self.options.alpha, self.options.beta, self._where()[side]

    def _where(self) -> list[dict[str, int]]:
        """Addresses of the operands for each side, and the number of the call."""
        return [{**self.operands.where(side), "encoded": self._number} for side in self.plan.sides]

    def planter(self) -> faultpoint.Planter | None:
        """Of faults; none of a call with a hook, and of a product that exists."""
        return faultpoint.current() if self.on_stage is None and self.plan.gemm is not None else None

    def _multiply(self, planter: faultpoint.Planter | None) -> None:
        if self.plan.gemm is None:
            return
        place = None if planter is None else partial(_reach, planter)
        multiply(self.plan.gemm, self.operands, self.options.alpha, self.options.beta, place=place)
        self.stage("multiplied", C=self.operands.multiplied)

    def _verify(
        self, sequence: LaunchSequence, stream: Any, where: list[dict[str, int]], number: int, *, again: bool = False
    ) -> list[DeviceRecord]:
        """Queue the verdict of every side under a number, and the repairs; `again`: after a repair."""
        o, here = self.operands, stream.ptr
        found = []
        for i, check in enumerate(self.plan.checks):
            where[i]["call"] = number
            run_steps(sequence.verify[i], here, where[i])
            if self.on_stage is not None:
                if not again:
                    self.stage("verified", C=o.multiplied, u=check.recomputed(sequence.workspaces[i]))
                if o.wide is not None:  # what a hook may have changed, rounded; repairs are rounded as they are made
                    o.C[...] = o.wide
                run_steps(sequence.judge[i], here, where[i])
            record = memory.take(number, check.spec.m * check.spec.batch)
            where[i].update(record=record.address, tally=0, ring=1)
            run_steps(sequence.repair[i], here, where[i])
            found.append(record)
        return found

    # ---- the verdict ----

    def _verdict(self, found: list[DeviceRecord], stream: Any) -> DeviceVerdict:
        """Wait for records, and read them."""
        for record in found:
            record.bring(stream.ptr)
        stream.synchronize()
        verdict = DeviceVerdict(found, self.info)
        for record in found:
            record.free()
        return verdict

    def _verify_repairs(self, verdict: DeviceVerdict, sequence: LaunchSequence, stream: Any) -> DeviceVerdict:
        """Verify C again after each repair that the hook was told of: it may have changed C, or an operand."""
        faults: list[tuple[int, Fault]] = []
        for _ in range(ROUNDS):
            if not (verdict.settled and verdict.repaired):
                break
            faults += verdict.faults
            self.stage("corrected", C=self.operands.multiplied)
            sequence.forget(stream.ptr)
            again = self._verify(sequence, stream, self._where(), next(_numbers), again=True)
            verdict = self._verdict(again, stream)
        else:
            if verdict.repaired:
                verdict.give_up()
        if faults and verdict.settled and self._operands_changed(sequence):
            verdict.outcome = DeviceOutcome.UNSETTLED
        verdict.faults = faults + verdict.faults
        verdict.replaced |= bool(faults)
        return verdict

    def encode_again(
        self, sequence: LaunchSequence, *, recompute: bool = False
    ) -> tuple[LaunchSequence, list[dict[str, tuple[int, ...]]]]:
        """Encode once more, and for each side what is not the same now (`differences`); `recompute`: u too.

        Synchronises.
        """
        again, found = self._encoded_again(recompute), []
        for i, check in enumerate(self.plan.checks):
            then, now = sequence.workspaces[i], again.workspaces[i]
            found.append(differences(check, then, now, self.options.carried[i], recomputed=recompute))
        return again, found

    def _operands_changed(self, sequence: LaunchSequence) -> bool:
        """Whether A, B or c is not what was encoded, or a checksum is not what it was: the host tells them apart."""
        if any(found.keys() - {"u"} for found in self.encode_again(sequence)[1]):
            return True
        sides = zip(self.plan.checks, self.options.carried, self._where(), strict=True)
        return any(one is not None and check.bits_changed(one.right, where) for check, one, where in sides)


def _reach(planter: faultpoint.Planter, stage: str, arrays: dict[str, Array]) -> None:
    faultpoint.reach(planter, stage, **arrays)


Keep = Callable[[DeviceProduct], None]


def products_of(
    problem: GemmProblem,
    operation: str,
    on_stage: Hook | None,
    *,
    write: bool,
    keep: Keep | None = None,
    limits: bool = False,
) -> Iterator[DeviceProduct]:
    """The products of a problem, one by one: of a batch all in one, unless a hook sees the stages of each.

    `keep`: called with each, to know the next call with such arguments.
    """
    sides = sides_of(problem)
    tasks = [None] if problem.batch and on_stage is None else problem.tasks()
    for task in tasks:
        product = _product(problem, operation, sides, task, on_stage, write)
        product.limits = limits
        if keep is not None and not problem.squeeze:
            keep(product)
        yield product


def _product(
    problem: GemmProblem,
    operation: str,
    sides: tuple[str, ...],
    task: GemmTask | None,
    on_stage: Hook | None,
    write: bool,
) -> DeviceProduct:
    """One product, or the whole batch where `task` is None."""
    p = problem
    A, B, C, C0 = (p.a, p.b, p.c, p.c0) if task is None else (task.A, task.B, task.C, task.C0)
    wide = wide_product(C.shape, order_of(C)) if p.wide and not p.exists else None
    operands = Operands(A, B, C, C0, wide)
    carried = tuple(_carried(p, side) for side in sides)
    plan = plan_of(operands, p, sides, carried, on_stage is not None)
    products, index = (p.batch[0], ()) if task is None else (None, task.index)
    lines = tuple(check.spec.m for check in plan.checks)
    shape, device = (A.shape[-2], A.shape[-1], B.shape[-1]), device_name(C)
    info = CallInfo(operation, shape, p.dtype, products, index, sides, lines, device)
    options = CallOptions(carried, p.alpha, p.beta, write, tuple(_rechecked(p, side) for side in sides))
    return DeviceProduct(plan, options, info, operands, on_stage)


def _carried(problem: GemmProblem, side: str) -> CarriedChecksum | None:
    """What the right operand of that side carries, if it is encoded."""
    owner = problem.encoded_b if side == "rows" else problem.encoded_a
    return None if owner is None or owner.device is None else owner.device.carried(side, owner.recheck, owner)


def _rechecked(problem: GemmProblem, side: str) -> OrderedLines | None:
    """What the left operand of that side had, if it is encoded and rechecked."""
    owner = problem.encoded_a if side == "rows" else problem.encoded_b
    return owner.ordered_lines() if owner is not None and owner.device is not None and owner.recheck else None
