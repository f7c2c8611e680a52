"""A = L L', blocked and right-looking, with the checksums of A carried through every step.

Each step (columns J = j:j1 of the panel)::

    factor the corner W(J, J); L21 = A21 L11'^-1            g = w'L              check  L11 g = Z(J)
    Z(j1:) -= g L21'           A22 -= L21 L21'

and at the end one reading of L: w'L = g, L (L'w) = A w. What fails is a suspicion: evidence, element by element
(`abft_tsm2.linalg.evidence`), tells whether it is wrong. What is wrong is repaired from A, which is kept, by
`abft_tsm2.linalg.cholesky_repair`; a factorisation that stays wrong is begun again once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, namespace
from abft_tsm2.core.blas import copy_by_columns, factor_columns, factor_definite, subtract_square
from abft_tsm2.linalg.blocked_lu import Clock, Hook, check_of, runs
from abft_tsm2.linalg.cholesky_checks import CholeskyChecksums, SymmetricChecksums
from abft_tsm2.linalg.cholesky_repair import Changed, CholeskyRepair, NotDefinite
from abft_tsm2.linalg.evidence import Evidence, definite_evidence
from abft_tsm2.linalg.outcome import FACTORS, ROUNDS, Findings, Unrepairable
from abft_tsm2.report import Check, Fault, Status


def block_size(n: int) -> int:
    """Columns of a panel: the fastest of those measured on two cores, 512 to 4096."""
    return 64 if n <= 256 else 128 if n <= 768 else 256


class CholeskyFactorisation:
    """One protected factorisation of the lower triangle of a matrix, or of its upper one, transposed.

    Attributes
    ----------
    result, W : arrays
        The factor, column-major, and L in the lower triangle of W: the same array, or its transpose.
    findings : Findings
    """

    def __init__(self, A: Array, lower: bool, block: int | None, on_stage: Hook | None, *, repair: bool) -> None:
        self.given, self.lower, self.on_stage, self.repair = A, lower, on_stage, repair
        self.A, self.n = A if lower else A.T, A.shape[0]
        self.block = block or block_size(self.n)
        self.clock, self.findings = Clock(), Findings()
        self.suspects: tuple[int, ...] = ()

    def stage(self, name: str, **arrays: Any) -> None:
        if self.on_stage is not None:
            self.on_stage(name, {"A": self.A, **arrays})

    def stage_of_step(self, name: str, **more: Any) -> None:
        s = self.state
        self.stage(name, W=self.W, Z=s.Z, g=s.g, w=s.w, **more)

    def run(self) -> None:
        """Factor A; twice if need be. Raises LinAlgError where a leading minor of A is not positive."""
        self.stage("inputs")
        try:
            try:
                self._once()
            except Changed:
                raise
            except Unrepairable as reason:
                if not self.repair:
                    raise
                self._begin_again(str(reason))
        except Unrepairable as reason:
            self._given_up(str(reason))
        except NotDefinite as minor:
            raise _not_definite(minor.args[0]) from None

    def _begin_again(self, reason: str) -> None:
        with self.clock("correct"):
            self.remake.look_at_A()
        self.findings.reasons.append(f"begun again: {reason}")
        self.findings.statuses.append(Status.CORRECTED)
        self.findings.multiplications += self.n**3 / 3
        self._once()

    def _once(self) -> None:
        xp = namespace(self.A)
        with self.clock("encode"):
            kept = SymmetricChecksums.of(self.A)
            self._copy()
        self.state = CholeskyChecksums(self.A, self.W, kept)
        if not bool(xp.all(xp.isfinite(kept.Z))) and not bool(xp.all(xp.isfinite(xp.tril(self.A)))):
            self._plain()
            self.findings.statuses.append(Status.UNVERIFIABLE)
            self.findings.reasons.append("a holds NaN or Inf: its factor was not checked")
            return
        self.remake, self.proved = CholeskyRepair(self.state, self.findings), np.zeros(self.n, bool)
        self.stage("encoded", Z=kept.Z, w=kept.w)
        self.state.begin()
        for j in range(0, self.n, self.block):
            self._step(j, min(j + self.block, self.n))
        self.stage_of_step("finished")
        with self.clock("certify"):
            if self.repair:
                self._certify()
            else:
                self._judge()

    def _copy(self) -> None:
        self.result = copy_by_columns(self.given)
        self.W = self.result if self.lower else self.result.T

    def _step(self, j: int, j1: int) -> None:
        self._panel(j, j1)
        if self.repair:
            self._agree(j, j1)
        else:
            self._look(j, j1)
        with self.clock("check"):
            self.state.advance(j, j1)
        with self.clock("update"):
            subtract_square(self.W[j1:, j1:], self.W[j1:, j:j1])
        self.stage_of_step("updated", step=(j, j1))

    def _panel(self, j: int, j1: int) -> None:
        with self.clock("panel"):
            self.stopped = factor_columns(self.W[j:, j:j1])
        self.stage_of_step("panel", step=(j, j1))

    def _agree(self, j: int, j1: int) -> None:
        """Check the panel; where that fails, ask for evidence, and repair what is wrong until it agrees."""
        for attempt in range(ROUNDS + 1):
            with self.clock("check"):
                if not self.stopped and self.state.check(j, j1, again=attempt > 0):
                    return
            seen = len(self.findings.statuses)
            with self.clock("correct"):
                self.remake.before(j, j1)
                self._forget(seen)
            again = not self.stopped and self.state.check(j, j1, again=attempt > 0)  # sums may be others now
            if again and len(self.findings.statuses) > seen:
                return
            found = None if self.stopped else self._evidence(slice(j, j1))
            if found and found.right:
                self.findings.proved(found)
                return
            if attempt == ROUNDS:
                raise Unrepairable(f"columns {j} to {j1 - 1} failed the check after {ROUNDS} repairs")
            with self.clock("correct"):
                self.stopped = self.remake.panel(j, j1, self.stopped)
            if len(self.findings.statuses) > seen:
                self._forget(seen)
            elif found:
                self.findings.statuses.append(Status.CORRECTED)
                self.findings.convicted(found)
            else:
                self.findings.suspicions += 1
            self.stage_of_step("repaired")

    def _evidence(self, columns: slice) -> Evidence:
        """A - L L', element by element."""
        with self.clock("evidence"):
            found = definite_evidence(self.A, self.W, columns)
            self.proved[columns] = found.right
        return found

    def _forget(self, seen: int) -> None:
        """What has been repaired is not what was proved."""
        if len(self.findings.statuses) > seen:
            self.proved[:] = False

    def _look(self, j: int, j1: int) -> None:
        """Check the panel where nothing is to be repaired."""
        if self.stopped:
            raise Unrepairable(f"the factorisation stopped in column {j + self.stopped - 1}")
        with self.clock("check"):
            if not self.state.check(j, j1) and not self.suspects:
                self.suspects = self.state.failed

    def _certify(self) -> None:
        """The factor as it lies in memory, against its sums and those of A."""
        for attempt in range(ROUNDS + 1):
            now, back = self.state.read(self.n)
            wrong = bool(self.state.changed(now))
            if not wrong and self.state.certificate(back).clean:
                return
            if attempt == ROUNDS:
                raise Unrepairable(f"L failed the check after {ROUNDS} repairs")
            seen = len(self.findings.statuses)
            if wrong:
                self.remake.finished(self.n)
            else:
                self.remake.look_at_A()
            if len(self.findings.statuses) == seen:
                borne_out = [] if wrong else [self._bears_out(part) for part in runs(~self.proved)]
                if not wrong and all(borne_out):
                    return
                raise Unrepairable("L L' is not A, by the sums of both")
            self._forget(seen)
            self.stage_of_step("repaired")

    def _bears_out(self, columns: slice) -> bool:
        """Whether evidence says that these columns are right; who is wrong is named."""
        found = self._evidence(columns)
        if found.right:
            self.findings.proved(found)
        else:
            self.findings.convicted(found, "factored again")
        return found.right

    def _judge(self) -> None:
        """The same where nothing is to be repaired: only the verdict."""
        self.remake.sums()
        now, back = self.state.read(self.n)
        changed = self.state.changed(now)
        if not changed and not self.suspects and self.state.certificate(back).clean:
            return
        found = self._evidence(slice(0, self.n))
        if not found.right:
            self._refuse(tuple(sorted({*found.columns, *changed, *self.suspects})), "L L' is not A, element by element")
            return
        self.remake.look_at_A()
        for c in changed:
            self.remake.wrong_g(c, float(now[c]))
        if not self.findings.statuses:
            self.findings.proved(found)

    def _refuse(self, columns: tuple[int, ...], reason: str) -> None:
        self.findings.statuses.append(Status.UNCORRECTABLE)
        self.findings.reasons.append(reason)
        self.findings.faults.append(Fault(FACTORS, "block", (), columns, max(1, len(columns)), float("nan")))

    def _given_up(self, reason: str) -> None:
        """What LAPACK makes of it tells whether A is not positive definite, or the machine beyond repair."""
        if Status.INPUT_CHANGED in self.findings.statuses:
            self.findings.reasons.append(reason)
            return
        kept = self.result, self.W
        self._copy()
        self._plain()
        self.result, self.W = kept
        self._refuse(self.suspects, reason)

    def _plain(self) -> None:
        """LAPACK's own factorisation."""
        with self.clock("factor"):
            stopped = factor_definite(self.W)
        if stopped:
            raise _not_definite(stopped)

    def checks(self) -> tuple[Check, ...]:
        """Of the columns, for the report."""
        seen, xp = self.state.seen, namespace(self.A)
        if not seen:
            return ()
        residual, bound = (xp.concat([x[part] for x in seen]) for part in (0, 1))
        return (check_of("columns", residual, bound, float(xp.min(xp.abs(self.state.w)))),)


def _not_definite(minor: int) -> np.linalg.LinAlgError:
    return np.linalg.LinAlgError(f"{minor}-th leading minor of the array is not positive definite")
