"""What the kernels leave to the host: everything wrong, a checksum that was hit, an operand that changed, patterns of
rounding. It is looked at by `abft_tsm2.gemm.host.Product`, the procedure of every other array."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from abft_tsm2.arrays import Array
from abft_tsm2.checksum.device.check import DeviceOperandChecksum, carried_on_device
from abft_tsm2.checksum.device.layout import CarriedChecksum
from abft_tsm2.checksum.device.record import DeviceVerdict
from abft_tsm2.checksum.encode import OperandChecksum, carried
from abft_tsm2.checksum.sides import Side
from abft_tsm2.core.matmul import same_layout
from abft_tsm2.gemm.device import ROUNDS, DeviceProduct
from abft_tsm2.gemm.host import Product
from abft_tsm2.gemm.operands import GemmProblem, GemmTask
from abft_tsm2.gemm.plan import LaunchSequence, Operands, gemm_of, multiply, plan_of
from abft_tsm2.report import Fault, Report, Status


def look_at(
    call: DeviceProduct, verdict: DeviceVerdict, program: LaunchSequence, problem: GemmProblem, task: GemmTask | None
) -> Report:
    """The report of a call that the kernels could not settle; `program` holds what they found.

    Synchronises with the host many times.
    """
    facts, operands = call.plan.facts, call.operands
    if verdict.known:
        return _look_closer(call, verdict, problem, task)
    with np.errstate(all="ignore"):  # what is not finite shows in a verdict
        changed, hit, weights = _differences(call, program, verdict.replaced)
        tasks = [task] if task is not None else list(problem.tasks())
        second = _SecondPass(call, problem)
        if changed or verdict.missed:  # weights of what has changed, or that may be far off
            weights = {}
        reports = [HostFallback(one, problem, call, changed, hit, weights, verdict, second).report() for one in tasks]
        if operands.wide is not None:
            operands.C[...] = operands.wide  # whatever was repaired
    return reports[0] if facts.products is None else Report.merge(reports, operation=facts.operation)


def _look_closer(call: DeviceProduct, verdict: DeviceVerdict, problem: GemmProblem, task: GemmTask | None) -> Report:
    """The report of a call whose weights may be far off, after a second look at C where they are."""
    o, first = call.operands, verdict.report()
    if task is not None:
        return _looked_closer(call, o, first, problem, task)
    one_of = [Operands(*(x if x is None else x[i] for x in o)) for i in range(o.C.shape[0])]
    each = zip(one_of, first.products, problem.tasks(), strict=True)
    reports = [_looked_closer(call, one, report, problem, task) for one, report, task in each]
    return Report.merge(reports, operation=first.operation)


def _looked_closer(call: DeviceProduct, o: Operands, first: Report, problem: GemmProblem, task: GemmTask) -> Report:
    """`first`, and what weights from exact norms find in one product."""
    plan, sides = call.plan, call.plan.way.sides
    made = [None if kept is not None else _carried_again(o, side) for side, kept in zip(sides, plan.kept, strict=True)]
    if not any(one is not None and one.exact for one in made):
        return first
    kept = tuple(
        CarriedChecksum(one.right, False) if one is not None else old for one, old in zip(made, plan.kept, strict=True)
    )
    way = plan_of(o, replace(problem, exists=True), sides, kept, False)
    facts = replace(plan.facts, products=None, index=task.index)
    again = DeviceProduct(replace(plan, way=way, kept=kept, facts=facts), o)
    return first.followed_by(again.report(lambda: (problem, task), look_at))


def _carried_again(o: Operands, side: str) -> DeviceOperandChecksum:
    """What the right operand of that side carries, encoded anew."""
    X = o.B if side == "rows" else o.A
    return carried_on_device(X if X.ndim == 2 else X[0], side)  # one for all products


def _differences(
    call: DeviceProduct, program: LaunchSequence, replaced: bool
) -> tuple[set[str], Fault | None, dict[str, Array]]:
    """Which of A, B and c are not what was encoded, and which checksum is not what it was: encode again. And the
    weights of each side.

    `replaced`: C has been repaired since u was taken of it, which tells nothing then.
    """
    plan = call.plan
    again, differing = call.encode_again(program, observe=call.on_stage is not None and not replaced)
    changed: set[str] = set()
    hit, weights = None, dict[str, Array]()
    for i, (checker, found) in enumerate(zip(plan.way.checkers, differing, strict=True)):
        side = plan.way.sides[i]
        if plan.kept[i] is None:
            weights[side] = checker.account.array(again.accounts[i], "v").astype("float64")
        else:
            weights[side] = _carried_again(call.operands, side).weights[None].astype("float64")
        left, right = "AB" if side == "rows" else "BA"
        changed |= {{"L": left, "R": right, "C0": "c"}[name] for name in found if name in ("L", "R", "C0")}
        for name in ("v", "s", "t") if replaced else ("v", "s", "t", "u"):
            if name in found and hit is None:
                places = found[name]
                hit = Fault(name, "checksum", places[:1000], (), len(places), float("nan"), "computed again")
    return changed, hit, weights


class _SecondPass:
    """The whole product once more, by the same call of cuBLAS: of a part of it, or of one of a batch, roundings would
    be others. It is computed when it is first asked for."""

    def __init__(self, call: DeviceProduct, problem: GemmProblem) -> None:
        self._call, self._problem = call, problem
        self._made: Array = None

    def of(self, task: GemmTask) -> Array:
        """C of one product."""
        if self._made is None:
            o, plan = self._call.operands, self._call.plan
            whole = o._replace(C=same_layout(o.multiplied), wide=None)
            batch = self._problem.batch[0] if whole.C.ndim == 3 else 1
            gemm = gemm_of(whole, batch, tf32=self._problem.arithmetic.u_in > 0)
            multiply(gemm, whole, plan.alpha, plan.beta)
            self._made = whole.C
        return self._made if self._made.ndim == 2 else self._made[task.index]


class HostFallback(Product):
    """A product that the kernels could not settle, looked at as any other, with the same weights: by others it might
    pass."""

    def __init__(
        self,
        task: GemmTask,
        problem: GemmProblem,
        call: DeviceProduct,
        changed: set[str],
        hit: Fault | None,
        weights: dict[str, Array],
        verdict: DeviceVerdict,
        second: _SecondPass,
    ) -> None:
        wide = call.operands.wide
        if wide is not None:
            task = replace(task, C=wide if wide.ndim == 2 else wide[task.index])
        plan = call.plan
        super().__init__(task, problem, plan.facts.operation, None, plan.write, np.geterr())
        self.differing, self.hit, self.verdict, self._corrected = changed, hit, verdict, call.on_stage
        self._second, self._weights = second, weights

    def carried(self, side: str, lines: Side) -> OperandChecksum:
        if side not in self._weights:
            return super().carried(side, lines)
        v = self._weights[side]
        return carried(lines.R, v[self._product() if len(v) > 1 else 0][:, None], partial=lines.partial)

    def _product(self) -> int:
        """Which of a batch it is."""
        return self.task.index[0] if self.task.index and self.verdict.facts.products is not None else 0

    def again(self, side: str) -> Array:
        if self.A is not self.task.A or self.B is not self.task.B:  # operands that have been restored
            return super().again(side)
        whole = self._second.of(self.task)
        return whole if side == "rows" else whole.T

    def stage(self, name: str, **arrays: Array) -> None:
        """Only what was not told before."""
        if name == "corrected" and self._corrected is not None:
            self._corrected(name, arrays)

    def report(self) -> Report:
        intact = self.verify_encoded()
        if self.differing:
            self.changed = set(self.differing)
            if intact and (Status.CORRECTED in self.statuses or self.restore_changed()):
                self.changed.clear()
                self.product()  # with the restored operands, once
            elif Status.INPUT_CHANGED not in self.statuses:
                self.statuses.append(Status.INPUT_CHANGED)
            return self.summary()
        self.settle([self.encode(side) for side in self.verdict.facts.sides])
        if self.hit is not None:
            self.statuses.append(Status.CHECKSUM_FAULT)
            self.faults.append(self.hit)
        repaired = [fault for product, fault in self.verdict.faults if product == self._product()]
        if repaired and self.write:  # by the kernels, before they left the rest to the host
            self.statuses += [Status.CORRECTED] * self.verdict.held
            self.faults += repaired
        if not self.verdict.held:
            self.statuses.append(Status.UNCORRECTABLE)
            self.reasons.append(
                f"{ROUNDS} repairs did not hold: the machine is damaging data faster than it can be recomputed"
            )
        report = self.summary()
        if report.status is Status.CLEAN:  # what the kernels suspected, and nobody else does
            report = replace(report, suspicions=max(report.suspicions, self.verdict.flagged))
        return report
