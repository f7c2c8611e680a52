"""The five steps of one product on any array library: encode, multiply, verify, locate and correct, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, is_numpy, is_writable, namespace
from abft_tsm2.checksum.bounds import Arithmetic
from abft_tsm2.checksum.diagnose import Decision, diagnose
from abft_tsm2.checksum.encode import OperandChecksum, carry, encoded_right
from abft_tsm2.checksum.encoded import Encoded, storage_faults
from abft_tsm2.checksum.limits import measured
from abft_tsm2.checksum.predicted import PredictedSums, changed_operands, predict, recompute_checksum, residual_of
from abft_tsm2.checksum.second_product import excusable
from abft_tsm2.checksum.sides import Side
from abft_tsm2.checksum.storage import restore
from abft_tsm2.checksum.verify import SideVerdict, judge
from abft_tsm2.checksum.weights import balanced
from abft_tsm2.core import faultpoint
from abft_tsm2.core.matmul import multiply, same_layout
from abft_tsm2.gemm.operands import GemmProblem, GemmTask
from abft_tsm2.place import device_name
from abft_tsm2.report import Check, Fault, Report, Status, by_precedence

Hook = Callable[[str, Mapping[str, Array]], None]
_PASSES = 3  # over both sides of one product


def carried_by(R: Array, arithmetic: Arithmetic) -> OperandChecksum:
    """What a right operand carries into a product of that arithmetic."""
    return carry(R, balanced(R.shape[1]), partial=R.shape[0] >= arithmetic.parts_from)


def encoded_now(lines: Side) -> OperandChecksum:
    """What the right operand of a side carries, or each of a stack; in the caller's error state."""
    return encoded_right(lines.R, balanced(lines.R.shape[-1]), lines.partial)


Verified = tuple[Array, SideVerdict]  # the checksums of C along a side, and their verdict


class EncodedSide(NamedTuple):
    """The lines of one side of a product, and the sums that are predicted for them."""

    lines: Side
    predicted: PredictedSums


class Product:
    """One protected product of two matrices."""

    def __init__(
        self,
        task: GemmTask,
        problem: GemmProblem,
        operation: str,
        on_stage: Hook | None,
        write: bool,
        caller: Any,
        *,
        limits: bool = True,
    ) -> None:
        self.task, self.problem, self.operation = task, problem, operation
        self.on_stage, self.write, self.caller, self.limits = on_stage, write, caller, limits
        self.planter = faultpoint.current() if on_stage is None and not problem.exists else None
        self.A, self.B = task.A, task.B
        self.seconds: dict[str, float] = {}
        self.statuses: list[Status] = []
        self.faults: list[Fault] = []
        self.reasons: list[str] = []
        self.decisions: list[Decision] = []
        self.checks: list[Check] = []
        self.distrusted: list[Encoded] = []
        self.changed: set[str] = set()

    def took(self, step: str, start: float) -> None:
        """Add the time since `start` to that of a step."""
        self.seconds[step] = self.seconds.get(step, 0.0) + perf_counter() - start

    def stage(self, name: str, **arrays: Array) -> None:
        if self.on_stage is not None:
            self.on_stage(name, arrays)
        elif self.planter is not None:
            faultpoint.reach(self.planter, name, **arrays)

    @property
    def is_seen(self) -> bool:
        """Whether a hook or a planter sees the live arrays at each stage."""
        return self.on_stage is not None or self.planter is not None

    def report(self) -> Report:
        """Multiply, verify, and repair; restore operands that changed, and repeat. The report."""
        if self.on_stage is not None:
            self.stage("inputs", A=self.A, B=self.B)
        encodings = self.encodings()
        intact = self.verify_encoded()  # behind the reads that predict C: of what changes later C disagrees with them
        if self.statuses:
            encodings = self.encodings()
        return self.concluded(self.multiplied(encodings), intact=intact)

    def concluded(self, first: Sequence[EncodedSide], *, intact: bool) -> Report:
        """The report, after operands that changed have been restored and the product has been repeated.

        `intact`: whether encoded operands were all right before."""
        if intact and self.changed and self.restore_changed():
            self.decisions.clear()
            self.changed.clear()
            self.product(first)  # with the restored operands, once
        return self.summary()

    # -- the steps --

    def encodings(self) -> list[EncodedSide]:
        """What is encoded of every side."""
        start = perf_counter()
        encodings = [self.encode(side) for side in self.task.sides]
        self.took("encode", start)
        return encodings

    def product(self, before: Sequence[EncodedSide] = ()) -> list[EncodedSide]:
        """Encode, multiply, and settle. `before`: what was encoded for the product that this one repeats, of which what
        was not restored has to be the same."""
        encodings = self.encodings()
        for e, old in zip(encodings, before, strict=False):
            if e.predicted.carried is old.predicted.carried:
                self.note_changed(e.lines, changed_operands(e.lines, old.predicted, e.predicted))
        if self.changed:
            self.statuses.append(Status.INPUT_CHANGED)
            self.restore_changed()  # refused: says what to do
            return encodings
        return self.multiplied(encodings)

    def multiplied(self, encodings: list[EncodedSide]) -> list[EncodedSide]:
        """Multiply, and settle by what was encoded before: that."""
        for e in encodings if self.is_seen else ():
            self.stage("encoded", A=self.A, B=self.B, s=e.predicted.carried.sums, t=e.predicted.t)
        C = self.task.C
        if not self.problem.exists:
            start = perf_counter()
            with np.errstate(**self.caller):
                self.multiply(self.A, self.B, C, self.task.C0, "multiplied")
            self.took("multiply", start)
            if self.on_stage is not None:
                self.stage("multiplied", C=C)
        self.settle(encodings)
        return encodings

    def shown(self, side: str) -> dict[str, bool]:
        """Of the operands of a side that are encoded, whether they have the bits that were encoded, rechecked or not:
        one read of each."""
        left, right = "AB" if side == "rows" else "BA"
        names, arrays = {left: "L", right: "R"}, {"A": self.A, "B": self.B}
        return {names[name]: encoded.holds(arrays[name]) for name, encoded in self.encoded()}

    def note_changed(self, lines: Side, operands: Sequence[str]) -> None:
        """Remember which of A, B and c are not what was encoded."""
        left, right = "AB" if lines.side == "rows" else "BA"
        self.changed |= {{"L": left, "R": right, "C0": "c"}[name] for name in operands}

    def settle(self, encodings: list[EncodedSide], found: Sequence[Verified | None] = ()) -> None:
        """Verify C along every side, and diagnose and repair what failed, until all sides agree. `found`: verdicts that
        were given before, one for each side or none."""
        for turn in range(_PASSES):
            given = found if turn == 0 and found else [None] * len(encodings)
            verdicts = [one or self.check(e) for e, one in zip(encodings, given, strict=True)]
            self.checks, repaired, before = [], False, len(self.decisions)
            for e, (u, verdict) in zip(encodings, verdicts, strict=True):
                decision = self.decide(e, u, verdict, repaired)
                repaired |= decision is not None and decision.repaired
            if len(encodings) == 1 or self.changed or not repaired:
                self.refine(self.decisions[before:])
                return
        # a repair that satisfies one side has to satisfy the other
        self.statuses.append(Status.UNCORRECTABLE)
        self.reasons.append(f"rows and columns of C still disagree after {_PASSES} repairs: damage is being added")

    def refine(self, decisions: Sequence[Decision]) -> None:
        """Write what was computed again of elements that no side calls wrong."""
        refined = [one for decision in decisions for one in decision.refined]
        if self.write and not self.changed:
            for one in refined:
                one.write()
                self.reasons.append(one.text)

    def encode(self, side: str) -> EncodedSide:
        lines = self.lines(side)
        return EncodedSide(lines, predict(lines, self.carried(side, lines)))

    def carried(self, side: str, lines: Side) -> OperandChecksum:
        """What the right operand of that side carries: of before, or encoded now."""
        owner = self.task.encoded_b if side == "rows" else self.task.encoded_a
        if owner is not None and owner not in self.distrusted:
            before = owner.right if side == "rows" else owner.left
            if before is not None:
                return before
        return encoded_now(lines)

    def decide(self, e: EncodedSide, u: Array, verdict: SideVerdict, repaired: bool) -> Decision | None:
        """Diagnose what failed along one side, and repair it where that is allowed; None where nothing did.

        `repaired`: along the other side, since the verdict was given.
        """
        earlier = None
        if repaired:
            earlier = np.flatnonzero(~verdict.ok)
            u, verdict = self.check(e)
        if (
            np.count_nonzero(verdict.ok) == verdict.ok.size
            and (earlier is None or earlier.size == 0)
            and e.predicted.intact()
        ):
            if not self.problem.exists:
                self.checks.append(self.measured(verdict.check, e, u))
                return None
            decision = Decision(verdict.check)
        else:
            start = perf_counter()
            decision = diagnose(
                e.lines,
                e.predicted,
                u,
                verdict,
                write=self.write,
                foreign=self.problem.exists,
                earlier=earlier,
                corrected=lambda: self.stage("corrected", C=self.task.C),
                shown=partial(self.shown, e.lines.side),
            )
            self.took("correct", start)
            self.note_changed(e.lines, decision.changed)
        if self.problem.exists:  # how a product from elsewhere was added up is not known: its limit holds for any order
            start = perf_counter()
            decision.excused = max(decision.excused, excusable(e.lines, e.predicted.carried.weights))
            self.took("verify", start)
        if self.limits and not decision.changed:
            decision.check = self.measured(
                decision.check, e, recompute_checksum(e.lines, e.predicted.carried), decision
            )
        self.decisions.append(decision)
        self.checks.append(decision.check)
        return decision

    def check(self, e: EncodedSide) -> Verified:
        """Recompute the checksums of C along one side, and verify every line."""
        start = perf_counter()
        u = recompute_checksum(e.lines, e.predicted.carried)
        if self.is_seen:
            self.took("verify", start)
            self.stage("verified", C=self.task.C, u=u)
            start = perf_counter()
        verdict = judge(e.lines, e.predicted, u, self.limits or policy.observed())
        self.took("verify", start)
        return u, verdict

    def measured(self, check: Check, e: EncodedSide, u: Array, decision: Decision | None = None) -> Check:
        """The check with the limits of all lines, where a report was asked for."""
        if not self.limits:
            return check
        start, excused = perf_counter(), 0.0 if decision is None else decision.excused
        residual = np.abs(residual_of(e.lines, e.predicted, u))
        found = measured(check, e.lines, e.predicted.carried.weights, residual, excused)
        self.took("verify", start)
        return found

    def encoded(self) -> list[tuple[str, Encoded]]:
        a, b = self.task.encoded_a, self.task.encoded_b
        return ([] if a is None else [("A", a)]) + ([] if b is None else [("B", b)])

    def multiply(self, A: Array, B: Array, C: Array, C0: Array | None, stage: str) -> None:
        given = stage if self.planter is not None else None
        multiply(A, B, C, C0, alpha=self.problem.alpha, beta=self.problem.beta, stage=given)

    def lines(self, side: str) -> Side:
        """The product along one side, and how to repeat it with the same roundings."""
        A, B, C, C0 = self.A, self.B, self.task.C, self.task.C0
        p, again = self.problem, partial(self.again, side)
        arithmetic: Arithmetic = p.arithmetic
        k = A.shape[1]
        terms = k + (0 if p.alpha == 1.0 and C0 is None else 2)
        partial_sums = k >= arithmetic.parts_from
        if side == "columns":
            A, B, C, C0 = B.T, A.T, C.T, None if C0 is None else C0.T
        return Side(side, A, B, C, C0, p.alpha, p.beta, arithmetic, again, terms, partial_sums)

    def again(self, side: str, at: Any = None) -> Array:
        """The product once more, whole and in the same layout: else roundings may be others. Or these lines alone."""
        A, B, C, by_rows = self.A, self.B, same_layout(self.task.C), side == "rows"
        if at is None:
            self.multiply(A, B, C, self.task.C0, "repeated")
        else:  # they lie in memory as lines of the whole do
            A, B, C = (A[at], B, C[: at.size]) if by_rows else (A, B[:, at], C[:, : at.size])
            multiply(A, B, C, alpha=self.problem.alpha)
        return C if by_rows else C.T

    # -- operands that are encoded --

    def verify_encoded(self) -> bool:
        """Recheck encoded operands and what they carry; restore a corrupted one. False if that was refused."""
        if self.task.encoded_a is None and self.task.encoded_b is None:
            return True
        operands, fine, start = self.encoded(), True, perf_counter()
        for name, encoded in operands:
            if encoded.is_in_doubt():
                fine = self.restore(name, encoded) and fine
        if not fine:
            self.statuses.append(Status.INPUT_CHANGED)
        self.took("encode", start)
        return fine

    def restore_changed(self) -> bool:
        """Restore the operands that changed during the product, if all of them are encoded."""
        owners = dict(self.encoded())
        names = sorted(self.changed)
        encoded = [(name, owners.get(name)) for name in names]
        if not self.write or any(e is None for _, e in encoded):
            located = {fault.operand for fault in self.faults}
            self.faults += [Fault(name, "operand", (), (), 0, float("nan")) for name in names if name not in located]
            self.reasons.append(
                f"{', '.join(names)} changed between its encoding and the end of the product; "
                "load it again and repeat the product (an operand from encode() is restored by itself)"
            )
            return False
        done = [self.restore(name, e) for name, e in encoded if e is not None]  # every one, also after a refusal
        return all(done)

    def restore(self, name: str, encoded: Encoded) -> bool:
        found = encoded.diagnose()
        if not (found.refused or found.corruptions):  # what the operand carries was hit, the operand was not
            self.distrusted.append(encoded)
            self.statuses.append(Status.CHECKSUM_FAULT)
            self.reasons.append(f"the checksums carried by {name} are damaged, the matrix is not: encode it again")
            return True
        if found.refused:
            self.faults += storage_faults(found, encoded.array, name, "")
            self.reasons.append(f"{name}: {found.refused}")
            return False
        if found.corruptions:
            array = encoded.array
            where = "restored bit for bit in your array"
            if not encoded.repair or not is_writable(array):
                array = namespace(array).asarray(array, copy=True)
                where = "restored bit for bit in a copy; your array still holds the fault: call E.correct()"
            if self.write:
                restore(array, found.corruptions)
                if name == "A":
                    self.A = array
                else:
                    self.B = array
            self.faults += storage_faults(found, encoded.array, name, where if self.write else "")
            self.statuses.append(Status.CORRECTED if self.write else Status.INPUT_CHANGED)
        return True

    def summary(self) -> Report:
        (m, k), n, p = self.A.shape, self.B.shape[1], self.problem
        sizes: Any = {"operation": self.operation, "m": m, "k": k, "n": n, "dtype": p.dtype}
        if not is_numpy(self.A):
            sizes["device"] = device_name(self.A)
        made: Any = {"checks": tuple(self.checks), "seconds": self.seconds, "index": self.task.index}
        if not (self.statuses or self.decisions or self.faults or self.reasons):
            return Report.made_of(status=Status.CLEAN, **sizes, **made)
        statuses, faults, reasons = list(self.statuses), list(self.faults), list(self.reasons)
        suspicions, multiplications = 0, 0.0
        for one in self.decisions:
            statuses += one.statuses
            faults += one.faults
            reasons += one.reasons
            suspicions += one.suspicions
            multiplications += one.multiplications
        status, also = by_precedence(statuses) if statuses else (Status.CLEAN, ())
        return Report.made_of(
            status=status,
            **sizes,
            **made,
            faults=tuple(faults),
            suspicions=int(suspicions),
            recomputed=float(multiplications / max(1, m * k * n)),
            also=also,
            reasons=tuple(dict.fromkeys(reasons)),
        )
