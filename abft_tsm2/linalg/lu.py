"""Factor a matrix by LU with partial pivoting, protected: SciPy's `lu_factor`, and the steps of LU.

Online, checksums are carried through every step of `abft_tsm2.linalg.blocked`; offline, LAPACK factors and the result
is certified. The repairs are in `abft_tsm2.linalg.lu_repair`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, dtype_name, from_host, is_numpy, namespace, served_elsewhere, to_host
from abft_tsm2.core.blas import NoPermutation, copy_by_columns, exchange_rows, factor_panel, solve_triangle
from abft_tsm2.linalg.blocked import Hook, Part
from abft_tsm2.linalg.certify import (
    Certificate,
    certificate,
    certified,
    changed,
    read,
    whole,
)
from abft_tsm2.linalg.evidence import Evidence, FactorEvidence, Lines, factor_evidence, may_be_undivided
from abft_tsm2.linalg.inputs import as_array, for_blas, matrices_of, merged, not_finite, stacked
from abft_tsm2.linalg.line_check import runs
from abft_tsm2.linalg.lu_checks import ROWS, LuChecksums, are_exchanges, blind_lines, sees_all
from abft_tsm2.linalg.lu_on_device import NOT_FINITE, LuOnDevice
from abft_tsm2.linalg.lu_options import LuOptions
from abft_tsm2.linalg.lu_repair import LuRepair
from abft_tsm2.linalg.once_more import give_up, overflows_again
from abft_tsm2.linalg.operand import UNDECIDED, Operand, compare, encoded
from abft_tsm2.linalg.outcome import (
    CHANGED,
    FACTORS,
    FactorOutcome,
    Findings,
    Origin,
    Overflowed,
    Unrepairable,
    check_of_steps,
    largest,
)
from abft_tsm2.linalg.pending import PendingFactors
from abft_tsm2.linalg.plain_lu import GROWN, factored_plainly, overflows, warn_of_zero
from abft_tsm2.place import device_name
from abft_tsm2.policy import Deferred
from abft_tsm2.report import SIDES, Check, Fault, Report, Status

WRITTEN = "a was written to before the verdict was read, which needed it once more: leave it alone until report.wait()"


def protected_lu_factor(
    a: Any,
    overwrite_a: bool = False,
    check_finite: bool = True,
    *,
    mode: str = "auto",
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
    block: int | None = None,
    preserve: str = "device",
) -> Any:
    """LU with partial pivoting that finds, locates and repairs silent data corruption: ``P A = L U``.

    Parameters
    ----------
    a : (..., m, n) array_like
        float64 or float32, NumPy or CuPy, any order; other real types are computed in float64, but for integers of
        CuPy, which are refused. Kept for repairs and never written, but with ``preserve="host"``. A Dask array is
        factored by `abft_tsm2.interop.dask.protected_lu_factor`.
    overwrite_a : bool
        Accepted for SciPy's sake, and asked for by ``preserve="host"``. It saves nothing else, because a is needed to
        the end.
    check_finite : bool
        Refuse NaN and Inf. Without it, such a matrix is factored by LAPACK and reported UNVERIFIABLE.
    mode : {"auto", "online", "offline"}
        "online": blocked, with checksums carried along; a fault costs the repair of what it hit. "offline": LAPACK's
        own factorisation and a certificate at the end; a fault costs a second factorisation, online. "auto": offline
        as long as that is no more than a second or two, online beyond; the report says which and why.
    on_error : {None, "correct", "detect", "raise"}
        As in `protected_gemm`.
    return_report : bool
        Return ``((lu, piv), report)``.
    on_stage : callable, optional
        ``on_stage(stage, arrays)`` with the live arrays, which it may write to: "inputs" (A), "encoded" (A, S, Z, v,
        w); online in each step "panel", "swapped", "solved", "updated" (W, piv, S, Z, g, y, perm, w, A and
        ``step = (j, j1)``), "finished" before the last check, "repaired" after each repair; offline "factored" (W,
        piv).
    block : int, optional
        Columns of a panel, online.
    preserve : {"device", "host"}
        Where a is kept for repairs. "device": where it is, and its factors take as much memory again. "host", for a
        CuPy array that one GPU has no room for twice: a is copied to the host and factored in its own memory; lu is a.
        a is one matrix, float64 or float32, in contiguous columns that begin at multiples of 16 bytes; columns may lie
        further apart. Needs ``overwrite_a=True``.

    Returns
    -------
    lu : (..., m, n) array
        U, and below its diagonal L without its unit diagonal; column-major. Of a's library, as are the pivots.
    piv : (..., min(m, n)) int32 array
        Row i was exchanged with row ``piv[i]``.
    report : Report
        With ``return_report=True``; ``report.products`` holds one for each matrix of a stack.

    Raises
    ------
    SilentDataCorruptionError
        The factors are wrong and could not be repaired, or a changed meanwhile.
    TypeError, ValueError
        What cannot be factored, or not in its own memory with ``preserve="host"``; the message says what to do.
    MemoryError
        The factors do not fit beside a on the GPU, or the copy of a on the host; the message says what they need. With
        ``preserve="host"`` also where nothing is left but to factor by steps in other memory, and there is none.

    Warns
    -----
    scipy.linalg.LinAlgWarning
        A pivot is exactly zero.
    UnverifiableWarning
        The factors are not finite, or a suspicion rests on an a that nothing shows to be what was encoded.

    See Also
    --------
    protected_lu_solve, protected_solve : solutions of linear systems.

    Notes
    -----
    lu and piv are what `scipy.linalg.lu_factor` returns, and either function's are fit for the other's `lu_solve`;
    where two candidates for a pivot are equal but for rounding, another one may be chosen. K.-H. Huang and
    J. A. Abraham, IEEE Trans. Computers C-33 (1984) 518; N. J. Higham, Accuracy and Stability of Numerical Algorithms,
    2002, algorithm 9.2 and theorem 9.3: what a statistical bound suspects is compared with
    ``gamma |L||U|`` element by element before anything is called wrong. Extra memory: O(m + n) beside lu, and at most
    0.7 GB and 80 kB a row where something is suspected (0.27 GB at 4200); on a GPU another lu, where it is factored
    once more then. Thread-safe.

    On a GPU the factorisation is queued on the current stream, with its checks. Offline the host waits once, at the
    end, and what is wrong is factored again. Online it reads the verdict on each step of 128 to 512 columns while
    the next one is under way, and takes the matrix back to what a wrong step found: a fault costs these two steps,
    and a finished line that has changed only itself. Under ``errstate(sync=False)`` the host does not wait
    at all: the report is PENDING, a is to be left alone until ``report.wait()``, which factors again what is wrong
    (and says UNVERIFIABLE of an a that is not finite, whatever `check_finite`). Pivots are LAPACK's; panels of more
    than 16,384 rows, 32,768 in float32, and all of a card without clusters of 16 blocks, are cuSOLVER's, which may
    never return where a pivot is subnormal. Columns of lu may lie further apart than m. Beside lu some 100 MB stay with
    the thread for its next factorisation, and 16 bytes for every row of every 128 columns. With `on_stage` all
    synchronises with the host after each operation, without graphs or look-ahead, and L's rows move at the end: until
    then they are in the order of the step that made them.

    With ``preserve="host"`` a is as it was after errors that are found before it is factored: bad arguments, and memory
    that is not there then. After any other exception (SilentDataCorruptionError, NaN or Inf in a, KeyboardInterrupt)
    it holds whatever was written last: a is lost. Until the call ends, or the report that was PENDING has been waited
    for, its size is taken of the host as pinned memory. Without a fault the cost is to get that memory, for which the
    host may wait for what is queued before, and to copy a, once, before anything else: m n elements at the speed of the
    bus (PCIe, NVLink-C2C). Repairs, and the evidence behind suspicions, read what they need of A over the bus, its rows
    in the order of P A.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> A = np.random.default_rng(0).standard_normal((200, 200))
    >>> def cosmic_ray(stage, arrays):
    ...     if stage == "updated" and arrays["step"] == (64, 128):
    ...         arrays["W"][150, 170] *= -1
    >>> (lu, piv), report = ft.protected_lu_factor(A, mode="online", return_report=True, on_stage=cosmic_ray)
    >>> report.status.name, report.faults[0].columns
    ('CORRECTED', (170,))
    >>> L, U = np.tril(lu, -1) + np.eye(200), np.triu(lu)
    >>> for i, p in enumerate(piv):
    ...     A[[i, p]] = A[[p, i]]
    >>> bool(np.allclose(L @ U, A))
    True
    """
    if (door := served_elsewhere(a)) is not None:
        given: Any = {"mode": mode, "on_error": on_error, "return_report": return_report, "on_stage": on_stage}
        return door.protected_lu_factor(a, overwrite_a, check_finite, **given, block=block, preserve=preserve)
    options = LuOptions(
        block=block, on_stage=on_stage, on_error=on_error, mode=mode, check_finite=check_finite, preserve=preserve
    )
    options.require_memory(a, overwrite_a)
    A = as_array(a, "a", check_finite=False)
    if A.ndim < 2:
        raise ValueError(f"a must be a matrix or a stack of them; it has {A.ndim} dimensions, shape {A.shape}")
    if 0 in A.shape:
        xp = namespace(A)
        lu, piv = xp.empty_like(A), xp.zeros((*A.shape[:-2], min(A.shape[-2:])), dtype=xp.int32)
        more: Any = {"mode": "nothing to do", "device": device_name(A)}
        report = Findings().report("lu_factor", _sizes(A), dtype_name(A.dtype), {}, **more)
    elif A.ndim == 2 and options.queues(A) and not policy.synchronous():
        # Whether A is finite is not known before the verdict, which then says so.
        verdict = PendingFactors(_run_of(A, replace(options, check_finite=False)))
        lu, piv = verdict.factors
        known: Any = {"sizes": _sizes(A), "dtype": dtype_name(A.dtype), "device": device_name(A)}
        report = Deferred.of(verdict, on_error, operation="lu_factor", **known)
    elif A.ndim == 2:
        factors = factored(A, options)
        lu, piv, report = factors.W, factors.piv, factors.report
    else:
        batch = tuple(A.shape[:-2])
        done = [(one.W, one.piv, one.report) for one in (factored(matrix, options) for matrix in matrices_of(A))]
        packed, pivots, reports = zip(*done, strict=True)
        lu, piv, report = stacked(packed, batch), stacked(pivots, batch), merged(reports, batch, "lu_factor")
    policy.deliver(report, on_error)
    return ((lu, piv), report) if return_report else (lu, piv)


def factored(A: Array, options: LuOptions, *, warn: bool = True, kept: bool = False) -> LuFactorisation:
    """Factor one matrix that is not empty. `kept`: its checksums, until they are released."""
    with np.errstate(all="ignore"):  # what is not finite shows in a verdict
        A = for_blas(A)
        run = _run_of(A, options)
        run.keeps = kept
        run.factored()
    if run.info and warn:
        warn_of_zero(run.info)
    return run


def _run_of(A: Array, options: LuOptions) -> LuFactorisation:
    return LuFactorisation(A, options, block_size(min(A.shape)))


def _sizes(A: Array) -> tuple[int, int, int]:
    m, n = int(A.shape[-2]), int(A.shape[-1])
    return m, min(m, n), n


def block_size(K: int) -> int:
    """Columns of a panel. Wide ones cost fewer checks, and are as fast without them because panels are halved; narrow
    ones leave less to compute again after a fault: a quarter of all at most, but for small matrices."""
    return max(64, min(512, K // 4 // 64 * 64))


class LuFactorisation(LuOnDevice):
    """P A = L U, packed in W.

    Attributes
    ----------
    verified : int32 array on the host
        The pivots of the present panel, online, as they were when its check, or evidence, read them.
    deferred : bool
        Whether the verdict is read after the call, when its caller may have written to A.
    checks : tuple of Check
        For the report; empty where the factors were not checked to the end.
    """

    EQUATION, RECHECKS = "L U = P A", False
    checksums: LuChecksums
    repair: LuRepair
    verified: Any
    report: Report
    deferred = False
    checks: tuple[Check, ...] = ()

    def encode(self) -> None:
        with self.clock("encode"):
            self.encoding = encoded(self.A)

    def stage_encoded(self) -> None:
        e = self.encoding
        self.options.stage("encoded", {"A": self.A, "S": e.S, "Z": e.Z, "v": e.v, "w": e.w})

    def factored(self) -> None:
        """Factor A in the mode that is asked for, and set the report."""
        self.options.stage("inputs", {"A": self.A})
        mode, why = self.options.chosen(self.A)
        if self.options.queues(self.A):
            with self.clock("factor"):
                queued = self.queued(mode)
            self.await_device(queued, mode, why)
            return
        self.encode()
        if not self.encoding.is_of_finite(self.A):
            if self.options.check_finite:
                raise not_finite()
            mode, why = "offline", "A is not finite"
            self.W, self.pivots, self.info = factored_plainly(self.A, self.clock)
            self.findings.unverifiable(NOT_FINITE)
        elif mode == "online":
            self.online()
        else:
            self.offline()
        self.finish(mode, why)

    def finish(self, mode: str, why: str) -> None:
        """Set the report."""
        self.confirm_input()
        self.findings.name_tf32(self.A)
        more: dict[str, Any] = {"checks": self.checks, "mode": f"{mode}: {why}", "device": device_name(self.W)}
        kind = _sizes(self.A), dtype_name(self.A.dtype), self.clock.seconds
        self.report = self.findings.report("lu_factor", *kind, **more)

    def confirm_input(self) -> None:
        """What was computed from A after a suspicion counts only where A is still what was encoded."""
        findings = self.findings
        if not findings.any or not self.encoding.is_of_finite(self.A):
            return
        if Status.INPUT_CHANGED not in findings.statuses:
            operand = compare(self.A, self.encoding).operand
            if operand is Operand.UNKNOWN:
                findings.undecided(UNDECIDED)
            elif operand is Operand.CHANGED:
                findings.changed("A", CHANGED)
        if self.deferred and Status.INPUT_CHANGED in findings.statuses:
            findings.statuses[:] = []
            findings.faults.clear()
            findings.undecided(WRITTEN)

    @property
    def piv(self) -> Array:
        """The pivots in the library of A."""
        if self.pivots is None:
            return self.device_pivots
        return self.pivots if is_numpy(self.W) else from_host(self.pivots, self.W)

    # -- offline: LAPACK's own factorisation, and a certificate --

    def offline(self) -> None:
        """Factor and certify; factor again, online, where the result is wrong."""
        self.stage_encoded()
        self.W, self.pivots, self.info = factored_plainly(self.A, self.clock)
        self.options.stage("factored", {"W": self.W, "piv": self.pivots})
        if self.is_wrong("factored again, online"):
            self.online()

    def is_changed(self) -> bool:
        return compare(self.A, self.encoding).operand is Operand.CHANGED

    def is_wrong(self, repair: str) -> bool:
        """Verify factors of which nothing is known; whether they are wrong, and are to be repaired: this way."""
        found = self.verify_whole()
        if found.outcome is FactorOutcome.CERTIFIED:
            self.checks = found.checks
            return False
        rows, columns = found.rows, found.columns
        elements = max(1, len(rows) * len(columns) or len(rows or columns))
        if not self.options.repair:
            self.refuse(found, elements)
            return False
        if repair and overflows_again(self):
            self.findings.recomputed(None)
        elif repair:
            self.findings.statuses.append(Status.CORRECTED)
            fault = Fault(FACTORS, "block", rows, columns, elements, float("nan"), repair)
            self.findings.faults.append(fault)
        return True

    def verify_whole(self) -> Certificate:
        """Verify factors of which nothing is known; what is suspected, element by element."""
        try:
            return self._verified_whole()
        except NoPermutation:  # pivots that have changed since they were found to be in order
            return Certificate(FactorOutcome.DISAGREES)

    def _verified_whole(self) -> Certificate:
        with self.clock("certify"):
            found = certified(self.A, self.W, self.pivots, self.encoding)
        by_steps = found.outcome is FactorOutcome.CERTIFIED and any(lines.any() for lines in self.suspects)
        if found.outcome is not FactorOutcome.SUSPECTED and not by_steps:
            return found
        with self.clock("evidence"):
            if by_steps:
                return found.after(self.evidence_of_lines(self.suspects))
            return found.after(self.evidence_of(None if found.rows or found.columns else found.blind))

    def evidence_of_lines(self, lines: Lines) -> Evidence:
        """Compare all elements of some rows and columns; factors of another matrix than was encoded are wrong."""
        if self.is_changed():
            return Evidence(count=1, magnitude=float("nan"))
        evidence, (m, n) = FactorEvidence(self.A, self.W, self.pivots), self.W.shape
        columns_of_all = [(slice(0, m), columns) for columns in runs(lines[1])]
        for rows, columns in [*((rows, slice(0, n)) for rows in runs(lines[0])), *columns_of_all]:
            evidence.compare(rows, columns, self.K)
        found = evidence.verdict()
        if found.right:
            self.findings.proved(found)
        return found

    def evidence_of(self, blind: Lines | None) -> Evidence:
        """Compare all elements, or those of `blind` lines; factors of another matrix than was encoded are wrong.

        Sums of A that were suspected in vain are compared as well.
        """
        A, e = self.A, self.encoding
        operand, sums = compare(A, e)
        if operand is Operand.CHANGED:
            return Evidence(count=1, magnitude=float("nan"))
        found = factor_evidence(A, self.W, self.pivots, blind)
        if found.right:
            for name, before, (lines, again) in zip(("S of A", "Z of A"), (e.S, e.Z), sums, strict=True):
                if lines.size and operand is Operand.SAME:
                    self.findings.wrong_sums(name, lines, largest((to_host(before) - to_host(again))[lines]))
            self.findings.proved(found)
        return found

    def refuse(self, found: Certificate, elements: int) -> None:
        """Note that the factors are wrong, or that those of this matrix cannot be right."""
        if self.is_changed():
            self.findings.changed("A", CHANGED)
        elif self.grows():
            self.findings.unverifiable(GROWN)
        else:
            self.findings.refused(found.rows, found.columns, elements)
            self.checks = found.checks

    def grows(self) -> bool:
        """Whether factors of A leave the range of the type, as far as there is memory to tell."""
        try:
            return overflows(factored_plainly(self.A, self.clock)[0], self.A)
        except MemoryError:
            return False

    # -- online: the steps --

    def online(self) -> None:
        """Factor with checksums carried along."""
        try:
            self.run()
        except (Unrepairable, Overflowed) as reason:
            give_up(self, reason)
            return
        if self.options.repair:
            c = self.checksums
            sides = zip(SIDES, c.seen, (c.v, c.encoding.w), strict=True)
            self.checks = tuple(check_of_steps(side, seen, weight) for side, seen, weight in sides)

    def factor(self) -> None:
        try:
            super().factor()
        except NoPermutation as reason:  # pivots have changed while a step was using them
            raise Unrepairable(str(reason)) from reason

    def begin(self) -> None:
        with self.clock("encode"):
            workspace = copy_by_columns(self.A, int(dtype_name(self.A.dtype) == "float64"))
        self.stage_encoded()
        with self.clock("encode"):
            self.checksums = LuChecksums(self.A, self.encoding, workspace)
            self.W, self.pivots = self.checksums.W, np.zeros(self.K, np.int32)
        self.repair = LuRepair(self.A, self.W, self.pivots, self.checksums, self.findings)
        self.proved = self.proved_rows, self.proved_columns = np.zeros(self.K, bool), np.zeros(self.K, bool)
        self.info = 0

    def live(self) -> dict[str, Any]:
        c = self.checksums
        arrays = {"W": self.W, "piv": self.pivots, "S": c.S, "Z": c.Z, "g": c.g, "y": c.y, "w": c.w}
        return {**arrays, "perm": c.rows[:, ROWS.place], "A": self.A}

    def panel(self, j: int, j1: int) -> None:
        self.factor_panel(j, j1)
        self.agree(
            Part(
                f"the panel of columns {j} to {j1 - 1}",
                lambda origin: self.check_panel(j, j1, origin),
                lambda: self.repair.finished(j, j, j),
                lambda: self.evidence_of_panel(j, j1),
                lambda: self.recompute_panel(j, j1),
            )
        )
        self.info = self.info or self.first_zero

    def check_panel(self, j: int, j1: int, origin: Origin) -> bool:
        """Check the panel and a copy of its pivots, which `exchange` compares with the pivots that it finds."""
        if origin is not Origin.PROVED:
            self.verified = self.pivots[j:j1].copy()
        return self.checksums.check_panel(self.verified, j, j1, origin)

    def factor_panel(self, j: int, j1: int) -> None:
        with self.clock("panel"):
            local, info = factor_panel(self.W[j:, j:j1])
            self.pivots[j:j1] = local + np.int32(j)
        self.first_zero = j + info if info else 0
        self.stage("panel", step=(j, j1))

    def recompute_panel(self, j: int, j1: int) -> None:
        self.repair.panel(j, j1)
        self.factor_panel(j, j1)
        self.forget_proofs()

    def exchange(self, j: int, j1: int) -> None:
        if self.pivots[j:j1].tobytes() != self.verified.tobytes():  # which is quicker than `numpy.array_equal`
            if not self.options.repair:
                raise Unrepairable(f"the pivots of columns {j} to {j1 - 1} have changed since their panel was checked")
            with self.clock("correct"):
                self.repair.order(j1)  # the table of what travels with the rows is in their order already
        local = self.pivots[j:j1] - np.int32(j)
        with self.clock("swap"):
            for outside in (slice(0, j), slice(j1, None)):
                exchange_rows(self.checksums.workspace[j:, outside], local)
        self.stage("swapped", step=(j, j1))

    def solve(self, j: int, j1: int) -> None:
        with self.clock("solve"):
            solve_triangle(self.W[j:j1, j:j1], self.W[j:j1, j1:], lower=True, unit=True)
        self.stage("solved", step=(j, j1))
        self.agree(
            Part(
                f"rows {j} to {j1 - 1} of U",
                lambda origin: self.checksums.check_rows(j, j1, origin),
                lambda: self.repair.before_rows(j, j1),
                lambda: self.evidence_of_rows(j, j1),
                lambda: self.recompute_rows(j, j1),
            )
        )

    def recompute_rows(self, j: int, j1: int) -> None:
        self.repair.rows(j, j1)
        self.forget_proofs()

    def evidence_of_panel(self, j: int, j1: int) -> Evidence:
        """Compare the columns of a panel, but for rows above it that are proved already."""
        m, pivots = self.W.shape[0], self.pivots[:j1].copy()
        self.verified = pivots[j:]
        local = self.verified - np.int32(j)
        if not are_exchanges(local, m - j):
            return Evidence(columns=set(range(j, j1)), count=j1 - j, magnitude=float("nan"))
        evidence = FactorEvidence(self.A, self.W, pivots)
        exchange_rows(self.W[j:, :j], local)  # as the step will do, once its panel is right
        for rows in (*runs(~self.proved_rows[:j]), slice(j, m)):
            evidence.compare(rows, slice(j, j1), j1)
        exchange_rows(self.W[j:, :j], local, back=True)
        found = evidence.verdict()
        self.proved_columns[j:j1] = found.right
        return found

    def evidence_of_rows(self, j: int, j1: int) -> Evidence:
        """Compare rows in all columns that their sums are over: what cancels in the sum of a column of a panel shows in
        these alone."""
        evidence = FactorEvidence(self.A, self.W, self.pivots[:j1])
        evidence.compare(slice(j, j1), slice(0, self.W.shape[1]), j1)
        found = evidence.verdict()
        self.proved_rows[j:j1] = found.right
        return found

    # -- online: the end --

    def verify_finished(self) -> FactorOutcome:
        W, c, K = self.W, self.checksums, self.K
        self.repair.order(K)
        if any(changed(W, c, *read(W, c, K, K))):
            return FactorOutcome.CHANGED
        return FactorOutcome.CERTIFIED if whole(c).clean or self.clean_by_lines() else FactorOutcome.DISAGREES

    def clean_by_lines(self) -> bool:
        """Whether the certificate is clean line by line, where that of the whole is in doubt; not asked where most has
        been proved element by element: then the rest is as soon."""
        if np.count_nonzero(self.proved_columns) > self.K // 2:
            return False
        clean = all(verdict.clean for verdict in certificate(self.A, self.W, self.checksums))
        self.findings.suspicions += clean
        return clean

    def repair_finished(self) -> None:
        self.repair.finished(self.K, self.K, self.K)

    def evidence_of_rest(self) -> list[Evidence]:
        (m, n), K = self.W.shape, self.K
        if not sees_all(self.checksums):  # sums may not show what has happened to lines since they were proved
            self.forget_proofs()
        evidence = FactorEvidence(self.A, self.W, self.pivots)
        for columns in (*runs(~self.proved_columns), slice(K, n)):
            first = min(columns.start, K)
            for rows in (*runs(~self.proved_rows[:first]), slice(first, m)):
                evidence.compare(rows, columns, K)
        return [evidence.verdict()]

    def verify_blind_lines(self) -> None:
        """Verify, by the certificate and evidence, lines with elements that no check of a step or of the finished
        factors would have shown; all of them after a repair that only evidence can vouch for."""
        A, W, c = self.A, self.W, self.checksums
        blind: Lines | None = (np.ones(W.shape[0], bool), np.ones(W.shape[1], bool))
        with self.clock("certify"):
            if not self.repair.doubted and not may_be_undivided(W):
                if sees_all(c):
                    return
                rows, columns = certificate(A, W, c)
                if rows.clean and columns.clean:
                    blind = blind_lines(A, c, (rows.bound, columns.bound))
        if blind is not None:
            with self.clock("evidence"):
                found = factor_evidence(A, W, self.pivots, blind)
            self.require(found)

    def detect(self) -> None:
        found = self.verify_whole()
        if found.outcome is FactorOutcome.CERTIFIED:
            self.checks = found.checks
        else:
            self.refuse(found, len(found.rows) + len(found.columns))
