"""Factor once more: on a GPU where evidence finds factors right, and sums of all of their product do not; by LAPACK
where the factorisation by steps has failed, or numbers have left the range.

An error that rounding might have made, but did not, does not come again; what overflows does, in the same order of
additions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from abft_tsm2.arrays import Array, namespace, same_bits
from abft_tsm2.linalg.evidence import factor_evidence
from abft_tsm2.linalg.outcome import FactorOutcome, Findings, Overflowed
from abft_tsm2.linalg.plain_lu import GROWN, factored_plainly, overflows
from abft_tsm2.report import Status

if TYPE_CHECKING:
    from abft_tsm2.linalg.lu import LuFactorisation
    from abft_tsm2.linalg.lu_on_device import LuOnDevice


def factored_once_more(run: LuOnDevice, mode: str) -> None:
    """Take the second factors if nothing is suspected of them, and they are those of the same matrix; else all is as it
    was, also where there is no memory for them. A hook's exceptions are raised.

    `run`: settled, its factors beside A.
    """
    kept, e, known = dict(vars(run)), run.encoding, run.findings
    if not known.suspicions:
        known.recomputed(None)
    run.findings = Findings()  # of factors that may not be taken
    taken = False
    try:
        with run.clock("factor"):
            again = run.queued(mode)
            again.wait()
            sums = again.encoding()
        taken = run.take(again) and same_bits(sums.S, e.S) and same_bits(sums.Z, e.Z)
    except MemoryError:
        if run.options.on_stage is not None:
            raise
    finally:
        found = run.findings
        if not taken:
            vars(run).update(kept)
    if taken:
        known.join(found)
        run.findings = known


def overflows_again(run: LuFactorisation) -> bool:
    """Whether the same factorisation of A ends beyond the range with the same bits: no fault, and another order of
    additions may stay within it."""
    xp, W = namespace(run.W), run.W
    if bool(xp.all(xp.isfinite(W))):
        return False
    try:
        again = factored_plainly(run.A, run.clock)[0]
    except MemoryError:
        return False
    return bool(xp.all((again == W) | (xp.isnan(again) & xp.isnan(W))))


def give_up(run: LuFactorisation, reason: Exception) -> None:
    """Compare with what LAPACK makes of A: numbers may be beyond the type's range, or have been on the way of the
    steps; else the machine is at fault."""
    findings = run.findings
    if Status.INPUT_CHANGED not in findings.statuses:
        plain = W, pivots, _ = factored_plainly(run.A, run.clock)
        finite = bool(namespace(W).all(namespace(W).isfinite(W)))
        if finite and (isinstance(reason, Overflowed) or overflows(W, run.A)):
            _take(run, *plain)
            certificate = run.verify_whole()
            if certificate.outcome is FactorOutcome.CERTIFIED:
                run.checks = certificate.checks
                findings.suspicions += 1  # of the steps: A is confirmed at the end
                return
        found = factor_evidence(run.A, W, pivots) if finite else None
        if found is None or found.subnormal:
            _take(run, *plain)
            if found is None:
                findings.unverifiable(GROWN)
            else:
                findings.proved(found)
            return
        findings.statuses.append(Status.UNCORRECTABLE)
    findings.reasons.append(str(reason))


def _take(run: LuFactorisation, W: Array, pivots: Any, info: int) -> None:
    """Take other factors; of those that are given up nothing is said."""
    run.W, run.pivots, run.info = W, pivots, info
    run.findings.statuses.clear()
    run.findings.faults.clear()
