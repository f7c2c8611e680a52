"""Factor a matrix by blocks, right-looking, and check every step: the driver that LU and Cholesky share.

A = L U, with U = L' for Cholesky. The steps, each checked before anything depends on it, are in `abft_tsm2.linalg.lu`
and `abft_tsm2.linalg.cholesky`; here are their order, what happens when a check fails, and the one restart.

What fails a check is a suspicion: evidence, element by element (`abft_tsm2.linalg.evidence`), tells whether it is
wrong. What is wrong is repaired from A, which is kept; a factorisation that stays wrong is restarted from A once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import Array
from abft_tsm2.core import faultpoint
from abft_tsm2.linalg.cholesky_checks import CholeskyChecksums
from abft_tsm2.linalg.cholesky_repair import CholeskyRepair
from abft_tsm2.linalg.evidence import Evidence
from abft_tsm2.linalg.lu_checks import LuChecksums
from abft_tsm2.linalg.lu_repair import LuRepair
from abft_tsm2.linalg.outcome import ROUNDS, Clock, FactorOutcome, Findings, InputChanged, Origin, Unrepairable

Hook = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class FactorOptions:
    """How the caller wants a matrix to be factored; ValueError for what cannot be."""

    block: int | None = None
    on_stage: Hook | None
    on_error: str | None

    def __post_init__(self) -> None:
        policy.check_on_error(self.on_error)
        block = self.block
        if block is not None and (isinstance(block, bool) or not isinstance(block, int | np.integer) or block < 1):
            raise ValueError(f"block is {block!r}: the columns of a panel, at least 1, or None")

    @property
    def repair(self) -> bool:
        """Whether what is wrong is repaired, and not only detected."""
        return self.on_error != "detect"

    def stage(self, name: str, arrays: Mapping[str, Any]) -> None:
        if (watcher := faultpoint.watcher(self.on_stage)) is not None:
            watcher(name, arrays)


class Part(NamedTuple):
    """What a step has computed, and how that is checked and repaired.

    Attributes
    ----------
    name : str
    check : callable
        Whether it agrees with its checksums.
    prepare : callable
        Repair what the check rests on.
    evidence : callable
        Compare it element by element; None where there is nothing to compare.
    recompute : callable
        Compute it again from A.
    """

    name: str
    check: Callable[[Origin], bool]
    prepare: Callable[[], None]
    evidence: Callable[[], Evidence | None]
    recompute: Callable[[], None]


class BlockedFactorisation(ABC):
    """One protected factorisation under way.

    Parameters
    ----------
    A : (m, n) array
        Kept for repairs, and never written.
    block : int
        Columns of a panel, where the options name none.

    Attributes
    ----------
    W : (m, n) array
        What A becomes.
    proved : tuple of boolean arrays
        Lines that evidence has shown to be right; on the host.
    """

    EQUATION: str
    RECHECKS: bool  # whether a check is repeated after what it rests on was repaired; else evidence decides at once
    W: Array
    checksums: LuChecksums | CholeskyChecksums
    repair: LuRepair | CholeskyRepair
    proved: tuple[Any, ...]

    def __init__(self, A: Array, options: FactorOptions, block: int) -> None:
        self.A, self.K, self.options, self.block = A, min(A.shape), options, options.block or block
        self.clock, self.findings = Clock(), Findings()

    def run(self) -> None:
        """Factor A, which is encoded; once more from the beginning where that does not come to agree."""
        try:
            self.factor()
        except InputChanged:
            raise
        except Unrepairable as reason:
            if not self.options.repair:
                raise
            self.encode()
            with self.clock("correct"):
                self.repair.verify_input()  # against what was encoded first: so it was the same in between
            self.findings.restart(str(reason))
            self.factor()

    def factor(self) -> None:
        """Factor A by blocks: J = j:j1 are the columns of a panel, M = j1: what is right of it and below."""
        self.begin()
        for j in range(0, self.K, self.block):
            j1 = min(j + self.block, self.K)
            self.panel(j, j1)  # A(j:, J) = L(j:, J) U(J, J), and its columns are checked
            self.exchange(j, j1)  # rows of A(j:, :j) and A(j:, M), as in the panel
            self.solve(j, j1)  # U(J, M) = L(J, J)^-1 A(J, M), and its rows are checked
            with self.clock("update"):
                self.checksums.trailing_update(j, j1)  # A(M, M) -= L(M, J) U(J, M)
            with self.clock("check"):
                self.checksums.advance(j, j1)  # S(M) -= L(M, J) y(J), or Z(M) -= g(J) U(J, M)
            self.stage("updated", step=(j, j1))
        self.stage("finished")
        if self.options.repair:
            self.certify()
        else:
            self.detect()

    def agree(self, part: Part) -> None:
        """Check a part; where that fails, and evidence does not show it to be right, repair it until it agrees."""
        if not self.options.repair:
            with self.clock("check"):
                part.check(Origin.COMPUTED)  # for the sums that the next steps use
            return
        for attempt in range(ROUNDS + 1):
            origin = Origin.RECOMPUTED if attempt else Origin.COMPUTED
            with self.clock("check"):
                if part.check(origin):
                    return
            known = len(self.findings.statuses)
            with self.clock("correct"):
                part.prepare()
            found_wrong = self.found_since(known)
            if self.RECHECKS and part.check(origin) and found_wrong:
                return
            with self.clock("evidence"):
                found = part.evidence()
            if found and found.right:
                part.check(Origin.PROVED)
                self.findings.proved(found)
                return
            if attempt < ROUNDS:
                with self.clock("correct"):
                    part.recompute()
                if not self.found_since(known):
                    self.findings.recomputed(found)
                self.stage("repaired")
        raise Unrepairable(f"{part.name} failed the check after {ROUNDS} repairs")

    def certify(self) -> None:
        """Verify the finished factors as they lie in memory, and repair them until their product is A."""
        for attempt in range(ROUNDS + 1):
            with self.clock("certify"):
                outcome = self.verify_finished()
            if outcome is FactorOutcome.CERTIFIED:
                self.verify_blind_lines()
                return
            if attempt < ROUNDS:
                known = len(self.findings.statuses)
                with self.clock("correct"):
                    if outcome is FactorOutcome.CHANGED:
                        self.repair_finished()
                    else:
                        self.repair.verify_input()
                if not self.found_since(known) and outcome is FactorOutcome.DISAGREES:
                    with self.clock("evidence"):
                        found = self.evidence_of_rest()
                    self.require(*found)
                    return
                self.stage("repaired")
        raise Unrepairable(f"the finished factors failed the check after {ROUNDS} repairs")

    def require(self, *parts: Evidence) -> None:
        """Note what evidence says of parts of the product; raise Unrepairable where one of them is wrong."""
        for found in parts:
            if found.right:
                self.findings.proved(found)
            else:
                self.findings.convicted(found, "factored again")
        if not all(found.right for found in parts):
            raise Unrepairable(f"{self.EQUATION} does not hold, element by element")

    def found_since(self, known: int) -> bool:
        """Whether more has been found than the statuses `known` before; what is repaired now is not what was proved."""
        if len(self.findings.statuses) == known:
            return False
        self.forget_proofs()
        return True

    def forget_proofs(self) -> None:
        for lines in self.proved:
            lines[:] = False

    def stage(self, name: str, **more: Any) -> None:
        """Hand the live arrays to the caller's hook, or to a planter."""
        if (watcher := faultpoint.watcher(self.options.on_stage)) is not None:
            watcher(name, {**self.live(), **more})

    # -- what a factorisation does not need --

    def exchange(self, j: int, j1: int) -> None:  # noqa: B027
        """Exchange the rows outside of the panel as in the panel."""

    def solve(self, j: int, j1: int) -> None:  # noqa: B027
        """Solve for the rows of U right of the panel, and check them."""

    def verify_blind_lines(self) -> None:  # noqa: B027
        """Verify finished lines with elements that the sums of neither side show."""

    # -- and what each of them has --

    @abstractmethod
    def encode(self) -> None:
        """Encode A."""

    @abstractmethod
    def begin(self) -> None:
        """Copy A into W, and its checksums into those that are carried."""

    @abstractmethod
    def live(self) -> dict[str, Any]:
        """The arrays under way, by name."""

    @abstractmethod
    def panel(self, j: int, j1: int) -> None:
        """Factor the panel, and check it."""

    @abstractmethod
    def verify_finished(self) -> FactorOutcome:
        """Verify finished factors against their sums when they were checked, and against those of A."""

    @abstractmethod
    def repair_finished(self) -> None:
        """Repair lines that have changed since they were checked."""

    @abstractmethod
    def evidence_of_rest(self) -> list[Evidence]:
        """Compare what is not proved yet with A, element by element."""

    @abstractmethod
    def detect(self) -> None:
        """Verify the finished factors where nothing is to be repaired."""
