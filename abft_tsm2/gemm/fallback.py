"""What the kernels leave to the host: everything wrong, a checksum that was hit, an operand that changed, patterns of
rounding. It is verified by `abft_tsm2.gemm.host.Product`, the procedure of every other array.

`run` ties both together: the product by kernels, and the host where they do not settle it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array
from abft_tsm2.checksum.device.check import DeviceOperandChecksum, carried_on_device
from abft_tsm2.checksum.device.differences import predicted_otherwise, was_other
from abft_tsm2.checksum.device.layout import CarriedChecksum
from abft_tsm2.checksum.device.record import DeviceOutcome, DeviceVerdict
from abft_tsm2.checksum.encode import OperandChecksum, carried
from abft_tsm2.checksum.sides import Side
from abft_tsm2.core import faultpoint
from abft_tsm2.core.matmul import same_layout
from abft_tsm2.gemm.device import ROUNDS, DeviceProduct, Keep, products_of
from abft_tsm2.gemm.host import Hook, Product
from abft_tsm2.gemm.operands import GemmProblem, GemmTask
from abft_tsm2.gemm.plan import LaunchSequence, Operands, gemm_of, multiply, plan_of
from abft_tsm2.report import Fault, Report, Status


def run(
    problem: GemmProblem,
    operation: str,
    on_stage: Hook | None = None,
    *,
    write: bool = False,
    keep: Keep | None = None,
    limits: bool = False,
) -> Report:
    """Multiply and verify on the current stream of the operands' device, and wait for the verdict.

    `keep`: called with each product, to know the next call with such arguments. `limits`: measure how small changes are
    sure to be found.
    """
    with problem.c.device:
        products = products_of(problem, operation, on_stage, write=write, keep=keep, limits=limits)
        reports = [product.report() or verify_on_host(product, problem) for product in products]
    return Report.merge(reports, operation=operation) if problem.batch and on_stage is not None else reports[0]


def verify_on_host(product: DeviceProduct, problem: GemmProblem) -> Report:
    """The report of a product that the kernels have left `unsettled`.

    Synchronises with the host many times.
    """
    assert product.unsettled is not None
    (verdict, sequence), info = product.unsettled, product.info
    tasks = [task for task in problem.tasks() if info.products is not None or task.index == info.index]
    if verdict.explained:
        reports = _verify_with_exact_weights(product, verdict, problem, tasks)
    else:
        with np.errstate(all="ignore"):  # what is not finite shows in a verdict
            differences = _differences(product, sequence, verdict, problem)
            second = _SecondProduct(product, problem)
            reports = [HostFallback(one, problem, product, verdict, differences, second).report() for one in tasks]
            if product.operands.wide is not None:
                product.operands.C[...] = product.operands.wide  # whatever was repaired
    product.plan.give(sequence)
    return reports[0] if info.products is None else Report.merge(reports, operation=info.operation)


def _verify_with_exact_weights(
    product: DeviceProduct, verdict: DeviceVerdict, problem: GemmProblem, tasks: list[GemmTask]
) -> list[Report]:
    """The reports of products whose weights may be far off, verified again by exact ones where they are."""
    o, first = product.operands, verdict.report()
    if product.info.products is None:
        return [_verified_again(product, o, first, problem, tasks[0])]
    one_of = [Operands(*(x if x is None else x[i] for x in o)) for i in range(o.C.shape[0])]
    each = zip(one_of, first.products, tasks, strict=True)
    return [_verified_again(product, one, report, problem, task) for one, report, task in each]


def _verified_again(product: DeviceProduct, o: Operands, first: Report, problem: GemmProblem, task: GemmTask) -> Report:
    """`first`, and what weights from exact norms find in one product."""
    sides, options = product.plan.sides, product.options
    made = [
        None if old is not None else _carried_again(o, side) for side, old in zip(sides, options.carried, strict=True)
    ]
    if not any(one is not None and one.exact for one in made):
        return first
    exact = tuple(
        old if one is None else CarriedChecksum(one.right, False)
        for one, old in zip(made, options.carried, strict=True)
    )
    plan = plan_of(o, replace(problem, exists=True), sides, exact, False)
    info = replace(product.info, products=None, index=task.index)
    again = DeviceProduct(plan, options._replace(carried=exact), info, o)
    return first.followed_by(again.report() or verify_on_host(again, problem))


def _carried_again(o: Operands, side: str) -> DeviceOperandChecksum:
    """What the right operand of that side carries, encoded anew."""
    X = o.B if side == "rows" else o.A
    return carried_on_device(X if X.ndim == 2 else X[0], side)  # one for all products


class Differences(NamedTuple):
    """What is not what it was when the operands were encoded.

    Attributes
    ----------
    changed : set of str
        Of A, B and c.
    hit : Fault or None
        In a checksum.
    weights : dict
        Of each side, (products, length) in float64; empty where they cannot be trusted.
    """

    changed: set[str]
    hit: Fault | None
    weights: dict[str, Array]


def _differences(
    product: DeviceProduct, sequence: LaunchSequence, verdict: DeviceVerdict, problem: GemmProblem
) -> Differences:
    """Encode again, and compare; u as well, unless C has been repaired since it was taken: then it tells nothing."""
    plan, replaced = product.plan, verdict.replaced
    again, differing = product.encode_again(sequence, recompute=product.on_stage is not None and not replaced)
    owners = {"A": problem.encoded_a, "B": problem.encoded_b}
    shown = {name: owner.holds(owner.array) for name, owner in owners.items() if owner is not None}
    changed = {name for name, same in shown.items() if not same}
    hit, weights = None, dict[str, Array]()
    for i, (check, found) in enumerate(zip(plan.checks, differing, strict=True)):
        side = plan.sides[i]
        if check.spec.joint and verdict.outcome is DeviceOutcome.NO_VERDICT:  # nor, perhaps, sums of L
            found = {name: places for name, places in found.items() if name not in ("L", "t")}
        if product.options.carried[i] is None:
            weights[side] = check.workspace.array(again.workspaces[i], "v").astype("float64")
        else:
            weights[side] = _carried_again(product.operands, side).weights[None].astype("float64")
        left, right = "AB" if side == "rows" else "BA"
        operands = {"L": left, "R": right, "C0": "c"}
        changed |= {operands[name] for name in found if name in operands and operands[name] not in shown}
        workspaces = sequence.workspaces[i], again.workspaces[i]
        if not changed and "t0" in found and was_other(check, *workspaces, "t0"):
            changed.add("c")
        if not changed and "t" in found and not {left, right} <= shown.keys():
            owner = owners[right] if product.options.carried[i] is not None else None
            carried = None if owner is None else owner.right if side == "rows" else owner.left
            copy = None if carried is None else carried.sums
            if predicted_otherwise(check, *workspaces, product.options.carried[i], copy, product.call_of(i)):
                changed.add(left if right in shown or ("s" not in found and left not in shown) else right)
        for name in ("v", "s", "t", "t0") if replaced else ("v", "s", "t", "t0", "u"):
            if name in found and hit is None:
                places = found[name]
                hit = Fault(name, "checksum", places[:1000], (), len(places), float("nan"), "computed again")
    if changed or verdict.missed:  # weights of what has changed, or that may be far off
        weights = {}
    return Differences(changed, hit, weights)


class _SecondProduct:
    """The whole product once more, by the same call of cuBLAS: of a part of it, or of one of a batch, roundings would
    be others. It is computed when it is first asked for."""

    def __init__(self, product: DeviceProduct, problem: GemmProblem) -> None:
        self._product, self._problem = product, problem
        self._made: Array = None

    def of(self, task: GemmTask) -> Array:
        """C of one product."""
        if self._made is None:
            o, options = self._product.operands, self._product.options
            whole = o._replace(C=same_layout(o.multiplied), wide=None)
            batch = self._problem.batch[0] if whole.C.ndim == 3 else 1
            gemm = gemm_of(whole, batch, tf32=self._problem.arithmetic.u_in > 0)
            multiply(gemm, whole, options.alpha, options.beta)
            if (planter := self._product.planter()) is not None:
                faultpoint.reach(planter, "repeated", A=whole.A, B=whole.B, C=whole.C)
            self._made = whole.C
        return self._made if self._made.ndim == 2 else self._made[task.index]


class HostFallback(Product):
    """A product that the kernels could not settle, verified as any other, with the same weights: by others it might
    pass."""

    def __init__(
        self,
        task: GemmTask,
        problem: GemmProblem,
        product: DeviceProduct,
        verdict: DeviceVerdict,
        differences: Differences,
        second: _SecondProduct,
    ) -> None:
        wide = product.operands.wide
        if wide is not None:
            task = replace(task, C=wide if wide.ndim == 2 else wide[task.index])
        how = product.options.write, np.geterr()
        super().__init__(task, problem, product.info.operation, None, *how, limits=product.limits)
        self.verdict, self.differences = verdict, differences
        self._second, self._corrected = second, product.on_stage
        self.planter = product.planter()
        self._number = task.index[0] if task.index and product.info.products is not None else 0  # of a batch

    def carried(self, side: str, lines: Side) -> OperandChecksum:
        v = self.differences.weights.get(side)
        if v is None:
            return super().carried(side, lines)
        return carried(lines.R, v[self._number if len(v) > 1 else 0][:, None], partial=lines.partial)

    def again(self, side: str, at: Any = None) -> Array:
        if self.A is not self.task.A or self.B is not self.task.B:  # operands that have been restored
            return super().again(side, at)
        whole = self._second.of(self.task)
        return whole if side == "rows" else whole.T

    def stage(self, name: str, **arrays: Array) -> None:
        """Only what was not told before."""
        watcher = self.planter if self._corrected is None else self._corrected
        if name == "corrected" and watcher is not None:
            watcher(name, arrays)

    def report(self) -> Report:
        intact = self.verify_encoded()
        if self.differences.changed:
            self.changed = set(self.differences.changed)
            if intact and (Status.CORRECTED in self.statuses or self.restore_changed()):
                self.changed.clear()
                self.product()  # with the restored operands, once
            elif Status.INPUT_CHANGED not in self.statuses:
                self.statuses.append(Status.INPUT_CHANGED)
            return self.summary()
        held = self.verdict.outcome is not DeviceOutcome.NOT_HELD
        self.settle([self.encode(side) for side in self.verdict.info.sides])
        if self.differences.hit is not None:
            self.statuses.append(Status.CHECKSUM_FAULT)
            self.faults.append(self.differences.hit)
        repaired = [fault for product, fault in self.verdict.faults if product == self._number]
        if repaired and self.write:  # by the kernels, before they left the rest to the host
            self.statuses += [Status.CORRECTED] * held
            self.faults += repaired
        if not held:
            self.statuses.append(Status.UNCORRECTABLE)
            self.reasons.append(
                f"{ROUNDS} repairs did not hold: the machine is damaging data faster than it can be recomputed"
            )
        report = self.summary()
        if report.status is Status.CLEAN:  # what only the kernels suspected
            report = replace(report, suspicions=max(report.suspicions, self.verdict.flagged))
        return report
