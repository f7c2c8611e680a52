"""Diagnose a failed check: from suspected lines to statuses, faults and repairs.

In order: Did an operand change since it was encoded? Was it a checksum that was wrong? Verified rescaled, which lines
still disagree? Which elements of those are wrong? After each repair the whole of C is verified again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.arrays import Array, is_numpy
from abft_tsm2.checksum.correct import few, locate_and_correct
from abft_tsm2.checksum.encode import carry
from abft_tsm2.checksum.predicted import (
    PredictedSums,
    changed_operands,
    differing,
    have_same_bits,
    is_as_before,
    predict,
    recompute,
    recompute_checksum,
    residual_of,
)
from abft_tsm2.checksum.repairs import Refined, Written
from abft_tsm2.checksum.reproduced import Reproduced, reproduce
from abft_tsm2.checksum.rescaled import verify_rescaled
from abft_tsm2.checksum.sides import Scale, Side
from abft_tsm2.checksum.subnormals import FLUSHED, lines_of_subnormals
from abft_tsm2.checksum.verify import SideVerdict
from abft_tsm2.checksum.weights import weights
from abft_tsm2.report import Check, Fault, Status

_ROUNDS = 3  # repairs before giving up: each starts from what the last one left


@dataclass
class Decision:
    """The diagnosis of one side: statuses, faults and what was done.

    Attributes
    ----------
    statuses : list of Status
        Every status that holds; empty when all is well.
    changed : list of str
        Which of "L", "R", "C0" changed after they were encoded; nothing else was verified then.
    excused : float
        A change of less than so many bounds of its line is taken for rounding.
    refined : list of Refined
        Elements to be written when both sides have been settled.
    """

    check: Check
    statuses: list[Status] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    suspicions: int = 0
    multiplications: float = 0.0
    excused: float = 0.0
    repaired: bool = False
    refined: list[Refined] = field(default_factory=list)

    def input_changed(self, *operands: str) -> Decision:
        """The decision where operands are not what was encoded: nothing can be said of C."""
        self.changed += operands
        self.statuses.append(Status.INPUT_CHANGED)
        return self


def diagnose(
    lines: Side,
    expected: PredictedSums,
    u: Array,
    verdict: SideVerdict,
    *,
    write: bool,
    foreign: bool = False,
    earlier: NDArray[np.int64] | None = None,
    corrected: Callable[[], None] = lambda: None,
    shown: Callable[[], Mapping[str, bool]] = dict,
) -> Decision:
    """Diagnose a verdict that is not all ok, and repair C where `write`.

    Parameters
    ----------
    lines : Side
    expected, u, verdict
        What the fast check computed and found.
    write : bool
        Repair C; otherwise locate only.
    foreign : bool
        C was not computed by this call.
    earlier : integer array, optional
        Lines that failed before the other side repaired C: what is left of their faults may hide in rounding.
    corrected : callable
        Called after each repair, before C is verified again.
    shown : callable
        Compares operands that have integer sums with them: whether "L" and "R" have the bits that were encoded. Others
        are compared by their checksums.

    Notes
    -----
    Evidence may clear a suspicion, and a repair may be verified, only where every operand it was computed from is shown
    to be what was encoded: operands are compared before, as one that is wrong for a while may be right again behind it,
    and behind all that was computed from them, and C is not written before.
    """
    decision, again = Decision(verdict.check), Reproduced(False, None, 0)
    if 0 in lines.C.shape:  # whatever the operands hold, nothing follows from it
        return decision
    V = expected.carried.weights
    failing = np.flatnonzero(~verdict.ok)
    failing = failing[np.argsort(-verdict.residual[failing], kind="stable")]  # worst first
    intact = expected.intact() and expected.carried.intact()
    now, fault, held = expected, None, shown()
    if not (intact and all(held.values()) and is_as_before(lines, expected, u)):
        now = recompute(lines, expected)
        if changed := changed_operands(lines, expected, now, held):
            return decision.input_changed(*changed)
        fault = differing(lines, expected, now, (u, recompute_checksum(lines, expected.carried)))
        if fault is None and not expected.intact():  # what bounds the residual was hit, not the sums
            fault = Fault("t", "checksum", (), (), 0, float("nan"), "computed again")
    if fault is not None:
        decision.statuses.append(Status.CHECKSUM_FAULT)
        decision.faults.append(fault)
    else:
        decision.suspicions = failing.size
        exact = now is expected or is_numpy(lines.C)
        if not foreign and earlier is None and (exact or not _lines_moved(lines, expected, now, u, verdict, held)):
            again = reproduce(lines, failing)
        if again.same:
            if since := _changed_since(lines, expected, now, shown()):
                return decision.input_changed(*since)
            decision.multiplications += again.lines * lines.R.size
            return decision
    if fault is not None and fault.operand == "s":  # then the weights may have been hit as well
        V = carry(lines.R, weights("balanced", lines.R.shape[1])).weights
    rescaled = verify_rescaled(lines, V)
    right, flushed = lines_of_subnormals(lines, np.flatnonzero(~rescaled.verdict.ok))
    found: list[Fault] = []
    mass, written = False, Written()
    for turn in range(_ROUNDS + 1):
        suspects = np.setdiff1d(np.flatnonzero(~rescaled.verdict.ok), np.concatenate([right, flushed]))
        others = suspects[:0]
        if turn == 0 and earlier is not None:
            others = np.setdiff1d(earlier, suspects)
        if suspects.size + others.size == 0:
            break
        worst_first = suspects[np.argsort(-rescaled.verdict.residual[suspects], kind="stable")]
        outcome = locate_and_correct(
            lines if again.product is None or turn else lines._replace(again=lambda: again.product),
            rescaled.scale,
            worst_first,
            others[rescaled.scale.usable_line[others]],
            rescaled.V,
            rescaled.tau,
            write=write and turn < _ROUNDS,
            foreign=foreign,
            mass=mass,
            written=written,
        )
        mass = mass or suspects.size > few(lines)
        decision.multiplications += outcome.multiplications
        decision.excused = max(decision.excused, outcome.excused)
        if outcome.overflowed:
            decision.statuses.append(Status.UNVERIFIABLE)
            decision.reasons.append(
                f"{outcome.overflowed} {lines.side} of C hold Inf or NaN where partial sums may have overflowed: "
                "whether they did depends on the order of summation; scale the operands"
            )
        if outcome.faults and write and turn < _ROUNDS:
            decision.repaired = True
            corrected()
        # What was read has to be what was encoded: else C is made wrong, or called right.
        if since := _changed_since(lines, expected, now, shown()):
            return decision.input_changed(*since)
        if not outcome.faults:
            decision.refined = outcome.refined
            break
        if not write or turn == _ROUNDS:
            decision.statuses.append(Status.UNCORRECTABLE)
            found += outcome.faults
            if write:
                decision.reasons.append(
                    f"{suspects.size} {lines.side} of C still disagree after {_ROUNDS} repairs: "
                    "the data change faster than they are recomputed; compute the product on another machine"
                )
            break
        found += outcome.faults
        rescaled = verify_rescaled(lines, V, rescaled.scale)
    if found:
        decision.faults += found
        decision.suspicions = 0
        if Status.UNCORRECTABLE not in decision.statuses:
            decision.statuses.append(Status.CORRECTED)
    elif fault is None and not is_numpy(lines.C) and (moved := _lines_moved(lines, expected, now, u, verdict, shown())):
        decision.statuses.append(Status.UNVERIFIABLE)
        decision.reasons.append(
            f"{moved} {lines.side} of C failed the check and agree with the operands as they are now, whose checksums "
            "differ from those of before by more than the bound: repeat the product"
        )
    decision.check = rescaled.verdict.check
    if flushed.size:
        decision.statuses.append(Status.UNVERIFIABLE)
        decision.reasons.append(f"{flushed.size} {lines.side} of C (first: {int(flushed[0])}) {FLUSHED}")
    decision.reasons += unverifiable(lines, rescaled.scale)
    if not (rescaled.scale.usable_line.all() and rescaled.scale.usable_column.all()):
        decision.statuses.append(Status.UNVERIFIABLE)
        decision.suspicions = 0
    return decision


def _lines_moved(
    lines: Side,
    expected: PredictedSums,
    now: PredictedSums,
    u: Array,
    verdict: SideVerdict,
    shown: Mapping[str, bool],
) -> int:
    """How many lines have failed from which the checksums of the operands as they are now are apart by more than the
    bound: that these are the same as before to within their own rounding shows nothing of such lines. On NumPy they are
    the same bit for bit."""
    failed = np.flatnonzero(~verdict.ok)
    again = now if "R" in shown else predict(lines, now.carried)
    with np.errstate(all="ignore"):
        before, after = (residual_of(lines, sums, u)[failed] for sums in (expected, again))
        off, size = (np.abs(x).max(axis=1, initial=0.0) for x in (after - before, before))
        same = (off == 0) | (off <= size / verdict.residual[failed])  # a residual of 0 tells no bound
    return int(np.count_nonzero(np.isfinite(size) & ~same))


def _changed_since(
    lines: Side, expected: PredictedSums, now: PredictedSums, shown: Mapping[str, bool]
) -> tuple[str, ...]:
    """The operands that are not what they were when `now` was computed."""
    since = None if have_same_bits(lines, now) else differing(lines, now, recompute(lines, expected))
    operand = None if since is None else {"s": "R", "t": "L", "t0": "C0"}[since.operand]
    wrong = [name for name, same in shown.items() if not same]
    return (*wrong, *([operand] if operand is not None and operand not in shown else []))


def unverifiable(lines: Side, scale: Scale) -> list[str]:
    """Name the parts of C that cannot be checked, in the user's terms."""
    reasons = []
    rows_first = lines.side == "rows"
    for usable, line in ((scale.usable_line, rows_first), (scale.usable_column, not rows_first)):
        bad = np.flatnonzero(~usable)
        if bad.size:
            operand, kind = ("A", "row") if line else ("B", "column")
            if lines.C0 is not None and (usable is scale.usable_line):
                operand += " or c"
            reasons.append(
                f"{bad.size} of {usable.size} {kind}s of C follow from NaN or Inf in {operand} "
                f"(first: {kind} {int(bad[0])}) and could not be checked; the rest was"
            )
    return reasons
