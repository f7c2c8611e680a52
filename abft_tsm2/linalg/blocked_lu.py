"""P A = L U, blocked and right-looking, with the checksums of A carried through every step.

Each step (columns j:j1 of the panel, b of them)::

    factor the panel W(j:, j:j1)                            g = w'L              check  g U11 = Z(j:j1) - g(:j) U01
    exchange rows of W, S and w outside of it
    U12 = L11^-1 A12                                        y = U v              check  L11 y = S(j:j1)
    A22 -= L21 U12             S(j1:) -= L21 y

and at the end one reading of L and U: w'L = g, U v = y, and w'A v = g y. What fails is a suspicion: evidence, element
by element (`abft_tsm2.linalg.evidence`), tells whether it is wrong. What is wrong is repaired from A, which is
kept, by `abft_tsm2.linalg.lu_repair`; a factorisation that stays wrong is begun again once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, dtype_name, namespace
from abft_tsm2.core.blas import add_product, copy_by_columns, exchange_rows, factor_panel, solve_triangle
from abft_tsm2.linalg.certify import certificate, changed, has_changed, read, whole
from abft_tsm2.linalg.encode import MatrixChecksums
from abft_tsm2.linalg.evidence import Evidence, FactorEvidence, Lines, evidence_of_lines
from abft_tsm2.linalg.lu_checks import ROWS, LuChecksums, are_exchanges, blind_lines, sees_all
from abft_tsm2.linalg.lu_repair import LuRepair
from abft_tsm2.linalg.outcome import ROUNDS, Findings, Unrepairable
from abft_tsm2.report import SIDES, Check, Fault, Status

Hook = Callable[[str, Mapping[str, Any]], None]


def block_size(K: int) -> int:
    """Columns of a panel. Wide ones cost fewer checks, and are as fast without them because panels are halved; narrow
    ones leave less to compute again after a fault: a quarter of all at most, but for small matrices."""
    return max(64, min(512, K // 4 // 64 * 64))


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def unprotected(A: Array, block: int | None = None) -> tuple[Array, Any]:
    """The blocked factorisation without any check: packed L \\\\ U and pivots. What protection is measured against."""
    W = copy_by_columns(A)
    pivots = np.empty(min(A.shape), np.int32)
    b = block or block_size(pivots.size)
    for j in range(0, pivots.size, b):
        j1 = min(j + b, pivots.size)
        local, _ = factor_panel(W[j:, j:j1])
        pivots[j:j1] = local + np.int32(j)
        _exchange(W, local, j, j1)
        solve_triangle(W[j:j1, j:j1], W[j:j1, j1:], lower=True, unit=True)
        add_product(W[j1:, j1:], W[j1:, j:j1], W[j:j1, j1:])
    return W, pivots


def _exchange(W: Array, local: Any, j: int, j1: int) -> None:
    """The panel's exchanges in the columns left and right of it."""
    exchange_rows(W[j:, :j], local)
    exchange_rows(W[j:, j1:], local)


class LuFactorisation:
    """One protected factorisation.

    Attributes
    ----------
    W, pivots : arrays
        Packed L \\\\ U and the pivots on the host, once `run` has returned.
    info : int
        Number, from 1, of the first pivot that is exactly zero; 0 where there is none.
    findings : Findings
    """

    def __init__(
        self,
        A: Array,
        block: int | None,
        on_stage: Hook | None,
        clock: Clock,
        *,
        repair: bool,
        encoding: MatrixChecksums | None = None,
    ) -> None:
        self._given = encoding
        self.A, self.on_stage, self.clock, self.repair = A, on_stage, clock, repair
        self.K = min(A.shape)
        self.block = block or block_size(self.K)
        self.findings = Findings()
        self.info = 0

    def stage(self, name: str, **more: Any) -> None:
        if self.on_stage is not None:
            c = self.carried
            live = {"W": self.W, "piv": self.pivots, "S": c.S, "Z": c.Z, "g": c.g, "y": c.y, "w": c.w}
            self.on_stage(name, {**live, "perm": c.rows[:, ROWS.place], "A": self.A, **more})

    def run(self) -> None:
        """Factor A; twice if need be. Raises Unrepairable, or Overflowed."""
        try:
            self._once()
        except Unrepairable as reason:
            if not self.repair or self._changed():
                raise
            self.findings.reasons.append(f"begun again: {reason}")
            self.findings.statuses.append(Status.CORRECTED)
            self._once()

    def _changed(self) -> bool:
        """Whether A is not what was encoded."""
        with np.errstate(all="ignore"):
            changed = has_changed(self.A, self.encoding)
        if changed:
            self.findings.statuses.append(Status.INPUT_CHANGED)
            self.findings.faults.append(Fault("A", "operand", (), (), 0, float("nan")))
        return changed

    def _once(self) -> None:
        with self.clock("encode"):
            self.encoding, self._given = self._given or MatrixChecksums.of(self.A), None
            room = copy_by_columns(self.A, int(dtype_name(self.A.dtype) == "float64"))
        if self.on_stage is not None:
            e = self.encoding
            self.on_stage("encoded", {"A": self.A, "S": e.S, "Z": e.Z, "v": e.v, "w": e.w})
        with self.clock("encode"):
            self.carried = LuChecksums(self.A, self.encoding, room)
            self.W = self.carried.W
            self.pivots = np.zeros(self.K, np.int32)
        self.mender = LuRepair(self.A, self.W, self.pivots, self.carried, self.findings)
        self.proved_rows, self.proved_columns = np.zeros((2, self.K), bool)
        self.info = 0
        for j in range(0, self.K, self.block):
            self._step(j, min(j + self.block, self.K))
        self.stage("finished")
        if self.repair:
            self._certify()

    def _step(self, j: int, j1: int) -> None:
        W, c, at = self.W, self.carried, (j, j1)
        self._panel(j, j1)
        local = self.pivots[j:j1] - np.int32(j)
        if not self.repair and not are_exchanges(local, W.shape[0] - j):  # LAPACK would write outside of the matrix
            raise Unrepairable(f"the pivots of columns {j} to {j1 - 1} are no rows below them")
        with self.clock("swap"):
            _exchange(c.room, local, j, j1)
        self.stage("swapped", step=at)
        with self.clock("solve"):
            solve_triangle(W[j:j1, j:j1], W[j:j1, j1:], lower=True, unit=True)
        self.stage("solved", step=at)
        self._agree(
            functools.partial(c.check_rows, j, j1),
            lambda: self.mender.before_rows(j, j1),
            lambda: self._evidence_of_rows(j, j1),
            lambda: self.mender.rows(j, j1),
            f"rows {j} to {j1 - 1} of U",
        )
        with self.clock("update"):
            c.take_off(j, j1)
        with self.clock("check"):
            c.advance(j, j1)
        self.stage("updated", step=at)

    def _panel(self, j: int, j1: int) -> None:
        """Factor the panel; when it agrees, the rows of the table are in its order."""
        W, c = self.W, self.carried

        def factored() -> None:
            with self.clock("panel"):
                local, info = factor_panel(W[j:, j:j1])
                self.pivots[j:j1] = local + np.int32(j)
            self.first_zero = j + info if info else 0
            self.stage("panel", step=(j, j1))

        def again() -> None:
            self.mender.panel(j, j1)
            factored()

        factored()
        self._agree(
            functools.partial(c.check_panel, self.pivots[j:j1], j, j1),
            lambda: self.mender.finished(j, j, j),
            lambda: self._evidence_of_panel(j, j1),
            again,
            f"the panel of columns {j} to {j1 - 1}",
        )
        self.info = self.info or self.first_zero

    def _agree(
        self,
        check: Callable[..., bool],
        before: Callable[[], None],
        evidence: Callable[[], Evidence],
        repair: Callable[[], None],
        where: str,
    ) -> None:
        """Check; where that fails, and what the check rests on is right (`before` looks at it), ask for evidence; and
        repair what is wrong until it agrees."""
        if not self.repair:
            check()  # for the sums that the next steps use
            return
        for attempt in range(ROUNDS + 1):
            with self.clock("check"), np.errstate(all="ignore"):
                if check(again=attempt > 0):
                    return
            seen = len(self.findings.statuses)
            with self.clock("correct"), np.errstate(all="ignore"):
                before()
                self._forget(seen)
            with self.clock("evidence"), np.errstate(all="ignore"):
                found = evidence()
            if found.right:
                with np.errstate(all="ignore"):
                    check(proved=True)
                self.findings.proved(found)
                return
            if attempt < ROUNDS:
                with self.clock("correct"), np.errstate(all="ignore"):
                    repair()
                if len(self.findings.statuses) == seen:
                    self.findings.statuses.append(Status.CORRECTED)
                    self.findings.convicted(found)
                self._forget(seen)
                self.stage("repaired")
        raise Unrepairable(f"{where} failed the check after {ROUNDS} repairs")

    def _forget(self, seen: int) -> None:
        """What has been repaired is not what was proved."""
        if len(self.findings.statuses) > seen:
            self.proved_rows[:] = self.proved_columns[:] = False

    def _evidence_of_panel(self, j: int, j1: int) -> Evidence:
        """P A - L U in the columns of a panel, but for rows above it that are proved already."""
        m, local = self.W.shape[0], self.pivots[j:j1] - np.int32(j)
        if not are_exchanges(local, m - j):
            return Evidence(columns=set(range(j, j1)), count=j1 - j, magnitude=float("nan"))
        evidence = FactorEvidence(self.A, self.W, self.pivots[:j1])
        exchange_rows(self.W[j:, :j], local)  # as the step will do, once its panel is right
        for rows in (*runs(~self.proved_rows[:j]), slice(j, m)):
            evidence.look(rows, slice(j, j1), j1)
        exchange_rows(self.W[j:, :j], local, back=True)
        found = evidence.verdict()
        self.proved_columns[j:j1] = found.right
        return found

    def _evidence_of_rows(self, j: int, j1: int) -> Evidence:
        """The same of rows, right of their panel."""
        evidence = FactorEvidence(self.A, self.W, self.pivots[:j1])
        evidence.look(slice(j, j1), slice(j1, self.W.shape[1]), j1)
        found = evidence.verdict()
        self.proved_rows[j:j1] = found.right
        return found

    def _evidence_of_rest(self) -> Evidence:
        """The same of all columns that are not proved yet; what is proved is as it was then, by its sums."""
        (m, n), K = self.W.shape, self.K
        evidence = FactorEvidence(self.A, self.W, self.pivots)
        for columns in (*runs(~self.proved_columns), slice(K, n)):
            first = min(columns.start, K)
            for rows in (*runs(~self.proved_rows[:first]), slice(first, m)):
                evidence.look(rows, columns, K)
        return evidence.verdict()

    def _certify(self) -> None:
        """The finished factors as they lie in memory, against their sums and those of A."""
        K = self.K
        for attempt in range(ROUNDS + 1):
            with self.clock("certify"), np.errstate(all="ignore"):
                self.mender.order(K)
                lines = changed(self.W, self.carried, *read(self.W, self.carried, K, K))
                fine = not any(lines) and (whole(self.carried).clean or self._by_lines())
            if fine:
                self._look_where_blind()
                return
            if attempt < ROUNDS:
                seen = len(self.findings.statuses)
                with np.errstate(all="ignore"):
                    if any(lines):
                        with self.clock("correct"):
                            self.mender.finished(K, K, K)
                    elif self._proved():
                        return
                self._forget(seen)
                self.stage("repaired")
        raise Unrepairable(f"L and U failed the check after {ROUNDS} repairs")

    def _proved(self) -> bool:
        """The factors are what they were when each of them was checked, and yet not those of A by the sums of all:
        whether evidence bears them out. False where sums of A were wrong."""
        seen = len(self.findings.statuses)
        with self.clock("correct"):
            self.mender.look_at_A()
        if len(self.findings.statuses) > seen:
            return False
        with self.clock("evidence"):
            found = self._evidence_of_rest()
        self._borne_out(found)
        return True

    def _look_where_blind(self) -> None:
        """Where the checks would not have shown what happened to elements, in any step or afterwards: the certificate
        line by line, and evidence of what that does not show either, or of all after a repair that needs it."""
        blind: Lines | None = (np.ones(self.W.shape[0], bool), np.ones(self.W.shape[1], bool))
        with self.clock("certify"), np.errstate(all="ignore"):
            if not self.mender.doubted:
                if sees_all(self.carried):
                    return
                rows, columns = certificate(self.A, self.W, self.carried)
                if rows.clean and columns.clean:
                    blind = blind_lines(self.A, self.carried, (rows.bound, columns.bound))
        if blind is None:
            return
        with self.clock("evidence"), np.errstate(all="ignore"):
            found = evidence_of_lines(self.A, self.W, self.pivots, blind)
        self._borne_out(found)

    def _borne_out(self, found: Evidence) -> None:
        """What evidence says of finished factors that cannot be repaired line by line."""
        if not found.right:
            self.findings.convicted(found, "factored again")
            raise Unrepairable("L U is not P A, element by element")
        self.findings.proved(found)

    def _by_lines(self) -> bool:
        """The certificate line by line, where that of the whole is in doubt; where most of it has been proved element
        by element, the rest is as soon."""
        if np.count_nonzero(self.proved_columns) > self.K // 2:
            return False
        clean = all(verdict.clean for verdict in certificate(self.A, self.W, self.carried))
        self.findings.suspicions += clean
        return clean

    def checks(self) -> tuple[Check, ...]:
        """Of rows and of columns, for the report."""
        found = []
        for side, seen, weight in zip(SIDES, self.carried.seen, (self.carried.v, self.carried.encoding.w), strict=True):
            xp, empty = namespace(weight), weight[:0]
            residual, bound = (xp.concat([x[part] for x in seen] or [empty]) for part in (0, 1))
            found.append(check_of(side, residual, bound, float(xp.min(xp.abs(weight)))))
        return tuple(found)


def runs(mask: Any) -> list[slice]:
    """Runs of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))).tolist()
    return [slice(lo, hi) for lo, hi in zip(edges[::2], edges[1::2], strict=True)]


def check_of(side: str, residual: Array, bound: Array, smallest_weight: float) -> Check:
    """What the check of a side says in a report."""
    xp = namespace(residual)
    lines = int(residual.shape[0])
    if lines == 0:
        return Check(side, 1, 0, 0, 0.0, 0.0, -1, 0.0)
    with np.errstate(all="ignore"):
        ratio = xp.abs(residual) / bound
        ratio = xp.where(bound > 0, ratio, xp.zeros_like(ratio))
        ratio = xp.where(ratio <= 1, ratio, xp.full_like(ratio, -1.0))  # what evidence has borne out, or convicted
        middle = float(xp.sort(bound)[lines // 2])
        limit = float(np.divide(middle, smallest_weight))
    worst, verified = int(xp.argmax(ratio)), int(xp.sum(xp.astype(ratio >= 0, xp.int64)))
    if not verified:
        return Check(side, 1, lines, 0, middle, 0.0, -1, limit)
    return Check(side, 1, lines, verified, middle, float(ratio[worst]), worst, limit)
