"""Factor a positive definite matrix by Cholesky, protected: SciPy's `cholesky` and `cho_factor`, and their steps.

The loop over blocks is `abft_tsm2.linalg.blocked`, the checksums are `abft_tsm2.linalg.cholesky_checks` and the repairs
`abft_tsm2.linalg.cholesky_repair`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, dtype_name, is_cupy, namespace, served_elsewhere
from abft_tsm2.core.blas import clear_above, copy_by_columns, factor_columns, factor_definite
from abft_tsm2.linalg.blocked import BlockedFactorisation, FactorOptions, Hook, Part
from abft_tsm2.linalg.cholesky_checks import CholeskyChecksums, SymmetricChecksums
from abft_tsm2.linalg.cholesky_repair import CholeskyRepair, NotDefinite
from abft_tsm2.linalg.device.cholesky_plan import NOT_DEFINITE, POSITIVE, factor_definite_on_device
from abft_tsm2.linalg.evidence import Evidence, definite_evidence
from abft_tsm2.linalg.inputs import as_array, for_blas, matrices_of, merged, stacked
from abft_tsm2.linalg.line_check import runs
from abft_tsm2.linalg.outcome import (
    FACTORS,
    Clock,
    FactorOutcome,
    Findings,
    InputChanged,
    Origin,
    Unrepairable,
    check_of_steps,
)
from abft_tsm2.place import device_name
from abft_tsm2.report import Check, Fault, Report, Status


def protected_cholesky(
    a: Any,
    lower: bool = False,
    overwrite_a: bool = False,
    check_finite: bool = True,
    *,
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
    block: int | None = None,
) -> Any:
    """Cholesky factorisation that finds, locates and repairs silent data corruption: ``A = L L'``, or ``A = U'U``.

    Parameters
    ----------
    a : (..., n, n) array_like
        Symmetric positive definite; only one triangle of it is read. float64 or float32, NumPy or CuPy, any order;
        other real types are computed in float64, but for integers of CuPy, which are refused. Kept for repairs and
        never written. A Dask array is factored by `abft_tsm2.interop.dask.protected_cholesky`.
    lower : bool
        Whether to read the lower triangle and return L, or the upper one and U.
    overwrite_a : bool
        Accepted for SciPy's sake. It saves nothing here, because a is needed to the end.
    check_finite : bool
        Refuse NaN and Inf, in the whole matrix. Without it, one with NaN or Inf in the triangle that is read is
        factored by LAPACK and reported UNVERIFIABLE.
    on_error : {None, "correct", "detect", "raise"}
        As in `protected_gemm`.
    return_report : bool
        Return ``(c, report)``.
    on_stage : callable, optional
        ``on_stage(stage, arrays)`` with the live arrays, which it may write to: "inputs" (A), "encoded" (A, Z, w); in
        each step "panel" and "updated" (W, Z, g, w, A and ``step = (j, j1)``); "finished" before the last check,
        "repaired" after each repair. Of A and W the lower triangles count: with ``lower=False`` both are transposed.
    block : int, optional
        Columns of a panel, where a is factored block by block; what is larger than n is as n.

    Returns
    -------
    c : (..., n, n) array
        L or U, with zeros in the other triangle; column-major, of a's library.
    report : Report
        With ``return_report=True``; its faults are in c's rows and columns. ``report.products`` holds one for each
        matrix of a stack.

    Raises
    ------
    numpy.linalg.LinAlgError
        A leading minor of a is not positive. That is said of the matrix only: the panel in which the factorisation
        stopped has been computed again from a, whose sums are those taken before.
    SilentDataCorruptionError
        The factor is wrong and could not be repaired, or a changed meanwhile.
    TypeError, ValueError
        What cannot be factored; the message says what to do.

    Warns
    -----
    UnverifiableWarning
        a holds NaN or Inf.

    See Also
    --------
    protected_cho_factor : the same for `scipy.linalg.cho_solve`.
    protected_lu_factor : for matrices that are not positive definite.

    Notes
    -----
    ``|A - L L'| <= gamma_{n+1} |L||L'|`` (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem
    10.3). K.-H. Huang and J. A. Abraham, IEEE Trans. Computers C-33 (1984) 518. Extra memory: O(n) beside the result;
    on a GPU a twentieth of it and cuSOLVER's workspace. Thread-safe. On a GPU cuSOLVER factors (potrf) and the result
    is certified, with one synchronisation with the host; what is not certified is factored again, block by block, as
    everything is with `on_stage`: then every step synchronises.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> X = np.random.default_rng(0).standard_normal((200, 300))
    >>> A = X @ X.T
    >>> def cosmic_ray(stage, arrays):
    ...     if stage == "updated" and arrays["step"] == (64, 128):
    ...         arrays["W"][170, 150] *= -1
    >>> L, report = ft.protected_cholesky(A, lower=True, return_report=True, on_stage=cosmic_ray)
    >>> print(report.status.name, report.faults[0].rows, report.faults[0].columns)
    CORRECTED (170,) (150,)
    >>> bool(np.allclose(L @ L.T, A))
    True
    """
    if (door := served_elsewhere(a)) is not None:
        given: Any = {"on_error": on_error, "return_report": return_report, "on_stage": on_stage, "block": block}
        return door.protected_cholesky(a, lower, overwrite_a, check_finite, **given)
    options = CholeskyOptions(block=block, on_stage=on_stage, on_error=on_error, lower=bool(lower), clear=True)
    c, report = _factored(a, options, check_finite)
    return (c, report) if return_report else c


def protected_cho_factor(
    a: Any,
    lower: bool = False,
    overwrite_a: bool = False,
    check_finite: bool = True,
    *,
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
    block: int | None = None,
) -> Any:
    """Cholesky factorisation for `scipy.linalg.cho_solve`, protected as by `protected_cholesky`.

    Parameters
    ----------
    a : (..., n, n) array_like
        As all others are, as in `protected_cholesky`.
    lower, overwrite_a, check_finite : bool
    on_error, return_report, on_stage, block : optional

    Returns
    -------
    c : (..., n, n) array
        L or U in one triangle; what a has in the other one is in the other one. Column-major.
    lower : bool
        Which triangle, as given; for a stack, too.
    report : Report
        With ``return_report=True``, which returns ``((c, lower), report)``.

    Raises
    ------
    numpy.linalg.LinAlgError, SilentDataCorruptionError, TypeError, ValueError
        As `protected_cholesky`.

    See Also
    --------
    protected_cholesky : the same with zeros in the other triangle.

    Notes
    -----
    N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 10.1.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.linalg import cho_solve
    >>> import abft_tsm2 as ft
    >>> A = np.array([[9.0, 3, 1, 5], [3, 7, 5, 1], [1, 5, 9, 2], [5, 1, 2, 6]])
    >>> x = cho_solve(ft.protected_cho_factor(A), np.ones(4))
    >>> bool(np.allclose(A @ x, 1))
    True
    """
    if served_elsewhere(a) is not None:
        raise TypeError("a is a Dask array: protected_cholesky factors it, with zeros in the other triangle")
    options = CholeskyOptions(block=block, on_stage=on_stage, on_error=on_error, lower=bool(lower), clear=False)
    c, report = _factored(a, options, check_finite)
    return ((c, lower), report) if return_report else (c, lower)


@dataclass(frozen=True, kw_only=True)
class CholeskyOptions(FactorOptions):
    """Those of Cholesky: which triangle, and whether there are to be zeros in the other one."""

    lower: bool
    clear: bool


def _factored(a: Any, options: CholeskyOptions, check_finite: bool) -> tuple[Array, Report]:
    """Factor a matrix, or a stack of them, and deliver the report."""
    A = as_array(a, "a", check_finite=False)
    kernels = is_cupy(A) and options.on_stage is None and A.ndim >= 2 and A.shape[-2] == A.shape[-1]
    if check_finite and not kernels:
        as_array(A, "a")
    unknown = A if check_finite and kernels else None
    if A.ndim < 2:
        A = namespace(A).reshape(A, (1, -1))
    *batch, m, n = A.shape
    if m != n:
        raise ValueError(f"Input array is expected to be square but has the shape: {(m, n)}.")
    if 0 in A.shape:  # as numpy.linalg.cholesky; SciPy refuses batches of no matrices
        c, report = namespace(A).empty_like(A), _report(Findings(), A, options, Clock())
    elif not batch:
        c, report = _one(A, options, unknown)
    else:
        done = [_one(one, options, unknown) for one in matrices_of(A)]
        c = stacked([one for one, _ in done], tuple(batch))
        report = merged([one for _, one in done], tuple(batch), "cholesky")
    policy.deliver(report, options.on_error)
    return c, report


def _one(A: Array, options: CholeskyOptions, unknown: Array | None) -> tuple[Array, Report]:
    """Factor one matrix that is not empty. `unknown`: what has to be finite, and may not be."""
    with np.errstate(all="ignore"):  # what is not finite shows in a verdict
        suspect, signs, first = None, False, None
        if is_cupy(A) and options.on_stage is None:
            clock = Clock()
            with clock("factor"):
                finite = unknown is not None
                found = factor_definite_on_device(A, lower=options.lower, clear=options.clear, check_finite=finite)
            if found.check is not None:
                return found.W, _report(Findings(), A, options, clock, (found.check,))
            suspect, signs = None if NOT_DEFINITE in found.missing else found.W, POSITIVE in found.missing
            first = found.sums
        if unknown is not None:
            as_array(unknown, "a")
        A = for_blas(A)
        run = CholeskyFactorisation(A if options.lower else A.T, options, block_size(A.shape[0]))
        if suspect is not None and not run.is_wrong(suspect if options.lower else suspect.T, signs):
            return suspect, _report(run.findings, A, options, run.clock)
        run.first = first
        run.online()
        if options.clear:
            clear_above(run.W)
    return run.result, _report(run.findings, A, options, run.clock, run.checks)


def _report(
    findings: Findings, A: Array, options: CholeskyOptions, clock: Clock, checks: tuple[Check, ...] = ()
) -> Report:
    n = int(A.shape[-1])
    findings.name_tf32(A)
    findings.faults[:] = [_in_result(fault, options.lower) for fault in findings.faults]
    more: dict[str, Any] = {"checks": checks, "device": device_name(A)}
    report = findings.report("cholesky", (n, n, n), dtype_name(A.dtype), clock.seconds, **more)
    # half as many operations as an LU
    return replace(report, recomputed=2 * report.recomputed) if report.recomputed else report


def _in_result(fault: Fault, lower: bool) -> Fault:
    """A fault in rows and columns of L or U, as they are returned."""
    if fault.operand != FACTORS:
        return fault
    if lower:
        return replace(fault, operand="L")
    kind = {"row": "column", "column": "row"}.get(fault.kind, fault.kind)
    return replace(fault, operand="U", kind=kind, rows=fault.columns, columns=fault.rows)


def block_size(n: int) -> int:
    """Columns of a panel: the fastest of those measured on two cores, 512 to 4096."""
    return 64 if n <= 256 else 128 if n <= 768 else 256


class CholeskyFactorisation(BlockedFactorisation):
    """A = L L', of lower triangles; for an upper triangle A and W are transposes.

    Attributes
    ----------
    result : (n, n) array
        What is returned: W, or its transpose; column-major.
    stopped : int
        Number, from 1, of the column of the panel at which LAPACK has stopped; 0 where it has not.
    first : pair of arrays, or None
        w and Z of A as a GPU has encoded it, whose factor was wrong.
    suspects : tuple of int
        Columns that failed the first check that failed, where nothing is repaired.
    """

    EQUATION, RECHECKS = "L L' = A", True
    encoding: SymmetricChecksums
    checksums: CholeskyChecksums
    repair: CholeskyRepair
    options: CholeskyOptions
    first: tuple[Array, Array] | None = None
    suspects: tuple[int, ...] = ()
    checks: tuple[Check, ...] = ()

    def is_wrong(self, W: Array, signs: bool) -> bool:
        """Whether a GPU's factor, which its checks suspect, is wrong, element by element, and is to be repaired.

        `signs`: not all of its diagonal is positive, whatever its product is.
        """
        xp = namespace(self.A)
        if not bool(xp.all(xp.isfinite(xp.tril(self.A)))):
            return True  # of which there is more to be said
        with self.clock("evidence"):
            found = definite_evidence(self.A, W, slice(0, self.K))
        wrong = signs or not found.right
        if not wrong:
            self.findings.proved(found)
        elif self.options.repair:
            self.findings.statuses.append(Status.CORRECTED)
            self.findings.convicted(found, "factored again")
        else:
            self.findings.refused(tuple(sorted(found.rows)), tuple(sorted(found.columns)), found.count)
        return wrong and self.options.repair

    def online(self) -> None:
        """Factor with checksums carried along. Raises LinAlgError where a leading minor of A is not positive."""
        self.options.stage("inputs", {"A": self.A})
        self.encode()
        if not self.encoding.is_of_finite(self.A):
            self.result, self.W = self.copied()
            self.by_lapack(self.W)
            self.findings.unverifiable("a holds NaN or Inf: its factor was not checked")
            return
        try:
            self.run()
        except Unrepairable as reason:
            self.give_up(str(reason))
        except NotDefinite as minor:
            self.refuse_definite(minor.args[0])
        self.confirm_input()
        if self.checksums.seen:
            self.checks = (check_of_steps("columns", self.checksums.seen, self.checksums.w),)

    def encode(self) -> None:
        with self.clock("encode"):
            self.encoding = SymmetricChecksums.of(self.A)

    def copied(self) -> tuple[Array, Array]:
        """A copy of A, as it is returned and as it is worked on."""
        with self.clock("encode"):
            result = copy_by_columns(self.A if self.options.lower else self.A.T)
            return result, result if self.options.lower else result.T

    def by_lapack(self, W: Array) -> None:
        """LAPACK's own factorisation."""
        with self.clock("factor"):
            stopped = factor_definite(W)
        if stopped:
            raise _not_definite(stopped)

    # -- the steps --

    def begin(self) -> None:
        e = self.encoding
        if self.findings.restarted:
            self.findings.multiplications += self.K**3 / 3
        self.result, self.W = self.copied()
        self.checksums = CholeskyChecksums(self.A, self.W, e)
        self.repair = CholeskyRepair(self.checksums, self.findings)
        (self.proved_columns,) = self.proved = (np.zeros(self.K, bool),)
        self.options.stage("encoded", {"A": self.A, "Z": e.Z, "w": e.w})
        self.checksums.begin()

    def live(self) -> dict[str, Any]:
        c = self.checksums
        return {"A": self.A, "W": self.W, "Z": c.Z, "g": c.g, "w": c.w}

    def panel(self, j: int, j1: int) -> None:
        with self.clock("panel"):
            self.stopped = factor_columns(self.W[j:, j:j1])
        self.stage("panel", step=(j, j1))
        self.agree(
            Part(
                f"columns {j} to {j1 - 1}",
                lambda origin: self.check(j, j1, origin),
                lambda: self.repair.before(j, j1),
                lambda: None if self.stopped else self.evidence_of(slice(j, j1)),
                lambda: self.recompute(j, j1),
            )
        )

    def check(self, j: int, j1: int, origin: Origin) -> bool:
        if self.stopped and not self.options.repair:
            raise Unrepairable(f"the factorisation stopped in column {j + self.stopped - 1}")
        agrees = origin is Origin.PROVED or (not self.stopped and self.checksums.check(j, j1, origin))
        if not agrees and not self.options.repair:
            self.suspects = self.suspects or self.checksums.failed
        return agrees

    def recompute(self, j: int, j1: int) -> None:
        self.stopped = self.repair.panel(j, j1, self.stopped)

    def evidence_of(self, columns: slice) -> Evidence:
        """Compare some columns."""
        found = definite_evidence(self.A, self.W, columns)
        self.proved_columns[columns] = found.right
        return found

    # -- the end --

    def verify_finished(self) -> FactorOutcome:
        now, back = self.checksums.read(self.K)
        if self.checksums.changed(now):
            return FactorOutcome.CHANGED
        return FactorOutcome.CERTIFIED if self.checksums.certificate(back).clean else FactorOutcome.DISAGREES

    def repair_finished(self) -> None:
        self.repair.finished(self.K)

    def evidence_of_rest(self) -> list[Evidence]:
        return [self.evidence_of(columns) for columns in runs(~self.proved_columns)]

    def detect(self) -> None:
        with self.clock("certify"):
            self.repair.sums()
            now, back = self.checksums.read(self.K)
            changed = self.checksums.changed(now)
            if not changed and not self.suspects and self.checksums.certificate(back).clean:
                return
        with self.clock("evidence"):
            found = self.evidence_of(slice(0, self.K))
        if not found.right:
            columns = tuple(sorted({*found.columns, *changed, *self.suspects}))
            self.refuse(columns, f"{self.EQUATION} does not hold, element by element")
            return
        with self.clock("certify"):
            self.repair.verify_input()
            for c in changed:
                self.repair.wrong_g(c, float(now[c]))
        if not self.findings.statuses:
            self.findings.proved(found)

    def confirm_input(self) -> None:
        """What was computed from A after a suspicion counts only where A is still what was encoded."""
        findings = self.findings
        if Status.INPUT_CHANGED in findings.statuses or not (findings.any or self.first):
            return
        with contextlib.suppress(InputChanged):
            if self.first is not None:
                self.repair.compare_input(*self.first)
            try:
                self.repair.verify_input()
            except InputChanged:
                raise
            except Unrepairable as reason:
                findings.undecided(str(reason))

    def refuse_definite(self, minor: int) -> None:
        """Raise LinAlgError, unless that is said of another matrix than was encoded."""
        self.findings.suspicions += 1
        self.confirm_input()
        if Status.INPUT_CHANGED not in self.findings.statuses:
            raise _not_definite(minor) from None

    def refuse(self, columns: tuple[int, ...], reason: str) -> None:
        self.findings.refused((), columns, len(columns))
        self.findings.reasons.append(reason)

    def give_up(self, reason: str) -> None:
        """Compare with what LAPACK makes of A: it may not be positive definite; else the machine is at fault."""
        if Status.INPUT_CHANGED in self.findings.statuses:
            self.findings.reasons.append(reason)
            return
        if stopped := factor_definite(self.copied()[1]):
            self.refuse_definite(stopped)
        self.refuse(self.suspects, reason)


def _not_definite(minor: int) -> np.linalg.LinAlgError:
    return np.linalg.LinAlgError(f"{minor}-th leading minor of the array is not positive definite")
