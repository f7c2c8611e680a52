"""Protected LU: SciPy's `lu_factor`, with the factors checked, repaired and certified.

`abft_tsm2.linalg.blocked_lu` is the factorisation, `abft_tsm2.linalg.solve` what is done with its result.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import FLOATS, Array, dtype_name, from_host, is_numpy, namespace, to_host
from abft_tsm2.core.blas import copy_by_columns, factor_panel
from abft_tsm2.linalg.blocked_lu import Clock, Hook, LuFactorisation, check_of
from abft_tsm2.linalg.certify import certificate, differing_sums, read
from abft_tsm2.linalg.encode import MatrixChecksums
from abft_tsm2.linalg.evidence import Evidence, Lines, evidence_of_lines, factor_evidence
from abft_tsm2.linalg.inputs import as_array, for_blas, not_finite, over_batch, report_of, stacked
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.lu_checks import LuChecksums, blind_lines
from abft_tsm2.linalg.outcome import FACTORS, Findings, Overflowed, Unrepairable, largest
from abft_tsm2.report import SIDES, Fault, Report, Status

GROWN = "elements of the factors grow beyond the range of the type"
MODES = ("auto", "online", "offline")
SQUARED = 1e140  # growth whose square leaves float64 room for sums
OFFLINE_UP_TO = 4096  # what one factorisation of this size takes may be lost: a second or two on two cores


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
) -> Any:
    """LU with partial pivoting that finds, locates and repairs silent data corruption: ``P A = L U``.

    Parameters
    ----------
    a : (..., m, n) array_like
        float64 or float32, NumPy or CuPy, any order; other real types are computed in float64. Kept for repairs and
        never written.
    overwrite_a : bool
        Accepted for SciPy's sake. It saves nothing here, because a is needed to the end.
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
        What cannot be factored; the message says what to do.

    Warns
    -----
    scipy.linalg.LinAlgWarning
        A pivot is exactly zero.
    UnverifiableWarning
        The factors are not finite.

    See Also
    --------
    protected_lu_solve, protected_solve : solutions of linear systems.

    Notes
    -----
    lu and piv are what `scipy.linalg.lu_factor` returns, and either function's are fit for the other's `lu_solve`;
    where two candidates for a pivot are equal but for rounding, another one may be chosen. K.-H. Huang and
    J. A. Abraham, IEEE Trans. Computers C-33 (1984) 518; N. J. Higham, Accuracy and Stability of Numerical Algorithms,
    2002, algorithm 9.2 and theorem 9.3: what a statistical bound suspects is compared with
    ``gamma |L||U|`` element by element before anything is called wrong. Extra memory: O(m + n) beside lu, and
    at most 0.7 GB and 80 kB a row where something is suspected (0.27 GB at 4200). Thread-safe. On a GPU every step
    synchronises with the host.

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
    policy.check_on_error(on_error)
    check_options(mode, block)
    A = as_array(a, "a", check_finite=False)
    if A.ndim < 2:
        raise ValueError(f"a must be a matrix or a stack of them; it has {A.ndim} dimensions, shape {A.shape}")
    asked = FactorOptions(mode, block, on_stage, repair=on_error != "detect", check_finite=check_finite)
    if 0 in A.shape:
        xp = namespace(A)
        lu, piv = xp.empty_like(A), xp.zeros((*A.shape[:-2], min(A.shape[-2:])), dtype=xp.int32)
        report = report_of(Findings(), "lu_factor", _sizes(A), dtype_name(A.dtype), {}, mode="nothing to do")
    elif A.ndim == 2:
        factors = factored(A, asked)
        lu, piv, report = factors.W, factors.piv, factors.report
    else:
        done = over_batch(lambda one: (factored(one, asked),), A)
        batch = tuple(A.shape[:-2])
        lu, piv = (stacked([getattr(one, name) for (one,) in done], batch) for name in ("W", "piv"))
        places = list(np.ndindex(batch))
        reports = [replace(one.report, index=at) for at, (one,) in zip(places, done, strict=True)]
        report = Report.merge(reports, operation="lu_factor")
    policy.deliver(report, on_error)
    return ((lu, piv), report) if return_report else (lu, piv)


def check_options(mode: str, block: int | None) -> None:
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
    if block is not None and (isinstance(block, bool) or not isinstance(block, int | np.integer) or block < 1):
        raise ValueError(f"block is {block!r}: the columns of a panel, at least 1, or None")


@dataclass(frozen=True)
class FactorOptions:
    """How a matrix is to be factored."""

    mode: str
    block: int | None
    on_stage: Hook | None
    repair: bool
    check_finite: bool

    def stage(self, name: str, **arrays: Any) -> None:
        if self.on_stage is not None:
            self.on_stage(name, arrays)


@dataclass(frozen=True, eq=False)
class LuFactors:
    """A factored matrix: what `lu_factor` returns, and what the checks know of it."""

    W: Array
    piv: Array
    info: int
    report: Report


def factored(A: Array, asked: FactorOptions, *, warn: bool = True) -> LuFactors:
    """Factor one matrix that is not empty."""
    with np.errstate(all="ignore"):  # what is not finite shows in a verdict
        factors = _factored(A, asked)
    if factors.info and warn:
        _warn_of_zero(factors.info)
    return factors


def _factored(A: Array, asked: FactorOptions) -> LuFactors:
    clock, A = Clock(), for_blas(A)
    asked.stage("inputs", A=A)
    mode, why = _chosen(asked.mode, min(A.shape))
    with clock("encode"):
        encoding = MatrixChecksums.of(A)
    if not encoding.is_of_finite(A):
        if asked.check_finite:
            raise not_finite()
        findings, mode, why = Findings(), "offline", "A is not finite"
        W, pivots, info = _plain(A, clock)
        _unverifiable(findings, "A holds NaN or Inf: its factors were not checked")
        done: tuple[Any, ...] = (W, pivots, info, findings, ())
    elif mode == "online":
        done = _online(A, asked, clock, Findings(), encoding)
    else:
        done = _offline(A, asked, clock, encoding)
    W, pivots, info, findings, checks = done
    more: Mapping[str, Any] = {"checks": checks, "mode": f"{mode}: {why}"}
    report = report_of(findings, "lu_factor", _sizes(A), dtype_name(A.dtype), clock.seconds, **more)
    return LuFactors(W, pivots if is_numpy(W) else from_host(pivots, W), info, report)


def _sizes(A: Array) -> tuple[int, int, int]:
    m, n = int(A.shape[-2]), int(A.shape[-1])
    return m, min(m, n), n


def _chosen(mode: str, K: int) -> tuple[str, str]:
    if mode != "auto":
        return mode, "as asked"
    if K <= OFFLINE_UP_TO:
        return "offline", f"a certificate is cheapest, and another factorisation of {K} columns is soon done"
    return "online", f"another factorisation of {K} columns would take long: a fault is to cost one step"


def _plain(A: Array, clock: Clock) -> tuple[Array, Any, int]:
    """LAPACK's own factorisation of a copy."""
    with clock("encode"):
        W = copy_by_columns(A)
    with clock("factor"):
        pivots, info = factor_panel(W, narrow=min(W.shape))
    return W, pivots, info


def _offline(A: Array, asked: FactorOptions, clock: Clock, encoding: MatrixChecksums) -> tuple[Any, ...]:
    """Factor, look at the result; factor again, online, where it is not right."""
    asked.stage("encoded", A=A, S=encoding.S, Z=encoding.Z, v=encoding.v, w=encoding.w)
    W, pivots, info = _plain(A, clock)
    asked.stage("factored", W=W, piv=pivots)
    findings = Findings()
    with clock("certify"), np.errstate(all="ignore"):
        rows, columns, blind, checks = _certified(A, W, pivots, encoding)
    if rows is not None and not rows and not columns and blind is None:
        return W, pivots, info, findings, checks
    if rows is not None:
        found = _evidence(A, W, pivots, encoding, findings, clock, blind if not rows and not columns else None)
        if found.right:
            return W, pivots, info, findings, checks
        rows, columns = _lines(found, rows, columns)
    size = max(1, len(rows or ()) * len(columns or ()) if rows and columns else len(rows or columns or ()))
    if not asked.repair:
        if _overflows(_plain(A, clock)[0], A):
            _unverifiable(findings, GROWN)
            return W, pivots, info, findings, ()
        findings.statuses.append(Status.UNCORRECTABLE)
        findings.faults.append(Fault(FACTORS, "block", rows or (), columns or (), size, float("nan")))
        return W, pivots, info, findings, checks
    fault = Fault(FACTORS, "block", rows or (), columns or (), size, float("nan"), "factored again, online")
    findings.statuses.append(Status.CORRECTED)
    findings.faults.append(fault)
    return _online(A, asked, clock, findings, encoding)


def _certified(
    A: Array, W: Array, pivots: Any, encoding: MatrixChecksums
) -> tuple[tuple[int, ...] | None, tuple[int, ...], Lines | None, tuple[Any, ...]]:
    """Rows and columns in which L U is not P A, of a factorisation of which nothing is known; None where the pivots are
    none. Also lines that the checks are blind for, if any, and the checks, for the report."""
    K = min(W.shape)
    carried = LuChecksums(A, encoding, W)
    if not carried.order_by(pivots):
        return None, (), None, ()
    carried.g[...], carried.y[...] = read(W, carried, K, K)
    carried.count_operations()
    verdicts = certificate(A, W, carried)
    lines = [_failed(verdict) for verdict in verdicts]
    small = carried.too_large()
    checks = tuple(
        check_of(side, verdict.residual, verdict.bound, float(namespace(A).min(abs(weight))))
        for side, verdict, weight in zip(SIDES, verdicts, (carried.v, carried.w), strict=True)
    )
    blind = blind_lines(A, carried, (verdicts[0].bound, verdicts[1].bound))
    return lines[0], tuple(sorted({*lines[1], *small})), blind, checks


def _evidence(
    A: Array,
    W: Array,
    pivots: Any,
    encoding: MatrixChecksums,
    findings: Findings,
    clock: Clock,
    blind: Lines | None = None,
) -> Evidence:
    """Whether a suspected factorisation is wrong, element by element; one of another matrix than was encoded is. Sums
    of A that suspected it in vain are tried as well. Where nothing is suspected but lines that the checks are `blind`
    for, it is those that count."""
    with clock("evidence"), np.errstate(all="ignore"):
        sums = differing_sums(A, encoding)
        if all(lines.size for lines, _ in sums):
            return Evidence(count=1, magnitude=float("nan"))
        found = factor_evidence(A, W, pivots) if blind is None else evidence_of_lines(A, W, pivots, blind)
        if not found.right:
            return found
        kept = zip(("S of A", "Z of A"), (encoding.S, encoding.Z), sums, strict=True)
        for name, before, (lines, again) in kept:
            if lines.size:
                findings.wrong_sums(name, lines, largest((to_host(before) - to_host(again))[lines]))
    findings.proved(found)
    return found


def _lines(found: Evidence, rows: tuple[int, ...], columns: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where wrong elements are, or what was suspected where evidence names none."""
    if not found.rows:
        return rows, columns
    return tuple(sorted(found.rows)), tuple(sorted(found.columns))


def _failed(verdict: LineCheck) -> tuple[int, ...]:
    return tuple(np.flatnonzero(~to_host(verdict.ok)).tolist())


def _online(
    A: Array, asked: FactorOptions, clock: Clock, findings: Findings, encoding: MatrixChecksums | None = None
) -> tuple[Any, ...]:
    """Factor with checksums carried along."""
    run = LuFactorisation(A, asked.block, asked.on_stage, clock, repair=asked.repair, encoding=encoding)
    run.findings = findings
    try:
        run.run()
    except (Unrepairable, Overflowed) as reason:
        return _given_up(A, run, clock, reason)
    if not asked.repair:
        with clock("certify"), np.errstate(all="ignore"):
            rows, columns, blind, checks = _certified(A, run.W, run.pivots, run.encoding)
        if rows is not None and (rows or columns or blind is not None):
            which = None if rows or columns else blind
            found = _evidence(A, run.W, run.pivots, run.encoding, findings, clock, which)
            rows, columns = ((), ()) if found.right else _lines(found, rows or (), columns)
        if rows is None or rows or columns:
            if _overflows(_plain(A, clock)[0], A):
                _unverifiable(findings, GROWN)
                return run.W, run.pivots, run.info, findings, ()
            size = max(1, len(rows or ()) + len(columns))
            findings.statuses.append(Status.UNCORRECTABLE)
            findings.faults.append(Fault(FACTORS, "block", rows or (), columns, size, float("nan")))
        return run.W, run.pivots, run.info, findings, checks
    return run.W, run.pivots, run.info, findings, run.checks()


def _given_up(A: Array, run: LuFactorisation, clock: Clock, reason: Exception) -> tuple[Any, ...]:
    """What LAPACK makes of it tells whether the numbers are beyond the type's range, or the machine beyond repair."""
    findings = run.findings
    with np.errstate(all="ignore"):
        W, pivots, info = _plain(A, clock)
    if _overflows(W, A) and Status.INPUT_CHANGED not in findings.statuses:
        findings.statuses.clear()
        findings.faults.clear()
        _unverifiable(findings, GROWN)
        return W, pivots, info, findings, ()
    with np.errstate(all="ignore"):
        found = factor_evidence(A, W, pivots) if Status.INPUT_CHANGED not in findings.statuses else Evidence(count=1)
    if found.subnormal:
        findings.statuses.clear()
        findings.faults.clear()
        findings.proved(found)
        return W, pivots, info, findings, ()
    findings.reasons.append(str(reason))
    if Status.INPUT_CHANGED not in findings.statuses:
        findings.statuses.append(Status.UNCORRECTABLE)
    return run.W, run.pivots, run.info, findings, ()


def _overflows(W: Array, A: Array) -> bool:
    """Whether factors are too large for their type, or their squares for the checks. The limit may be Inf itself, where
    A is near the end of the range, and then bounds nothing."""
    xp = namespace(W)
    double = W.dtype == xp.float64
    limit = float(xp.max(xp.abs(A))) * SQUARED if double else FLOATS["float32"].largest
    return not bool(xp.all((xp.abs(W) <= limit) & xp.isfinite(W)))


def _unverifiable(findings: Findings, reason: str) -> None:
    findings.statuses.append(Status.UNVERIFIABLE)
    findings.reasons.append(reason)


def _warn_of_zero(info: int) -> None:
    """SciPy's warning, at the caller's line."""
    linalg = importlib.import_module("scipy.linalg")
    text = f"Diagonal number {info} is exactly zero. Singular matrix."
    warnings.warn(text, linalg.LinAlgWarning, stacklevel=policy.caller_level())
