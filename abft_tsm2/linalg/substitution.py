"""Substitute forward and backward; check each solution by its residual, and solve again where that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, float_type, from_host, is_cupy, namespace, to_host
from abft_tsm2.core import faultpoint
from abft_tsm2.core.blas import like_columns, permutation, solve_triangle
from abft_tsm2.linalg.blocked import Hook
from abft_tsm2.linalg.device.solution import DeviceSolution, solve_on_device
from abft_tsm2.linalg.inputs import for_blas, pivots_of
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.outcome import Clock, Findings, check_of, largest
from abft_tsm2.linalg.triangular import (
    Triangle,
    check_by_factors,
    check_substitution,
    substitution_evidence,
    summing_weights,
)
from abft_tsm2.report import Check, Fault, Status

ATTEMPTS = 3


@dataclass
class Work:
    """One solution under way."""

    on_stage: Hook | None
    repair: bool
    findings: Findings = field(default_factory=Findings)
    checks: tuple[Check, ...] = ()
    clock: Clock = field(default_factory=Clock)

    def stage(self, name: str, **arrays: Any) -> None:
        if (watcher := faultpoint.watcher(self.on_stage)) is not None:
            watcher(name, arrays)


def queued(lu: Array, piv: Any, B: Array, trans: int, work: Work, A: Array | None = None) -> DeviceSolution | None:
    """The solution by kernels of a GPU, its checks among them, and those of ``A X = B`` where A is given; None where
    there is no GPU, or a hook wants to see the stages."""
    if work.on_stage is not None or not is_cupy(lu) or not is_cupy(B) or 0 in B.shape:
        return None
    with work.clock("solve"):
        found = solve_on_device(lu, piv if is_cupy(piv) else from_host(piv, lu), B, trans, A)
    if found.clean:
        work.checks = (found.check(),)
    return found


def substituted(
    lu: Array, piv: Any, B: Array, trans: int, work: Work, verify: Callable[[], None] = lambda: None
) -> Array:
    """The solution for right-hand sides B (n x r), both substitutions checked; B is not changed.

    `verify`: raises what is to be said of operands that are not fit; not called where they have led to a solution that
    is right.
    """
    found = queued(lu, piv, B, trans, work)
    if found is not None and found.clean:
        return found.X
    verify()
    return substituted_carefully(lu, piv, B, trans, work, found)


def substituted_carefully(
    lu: Array, piv: Any, B: Array, trans: int, work: Work, suspected: DeviceSolution | None = None
) -> Array:
    """The same, with evidence and repairs where a check fails; `suspected`: what kernels have found, not all right."""
    findings, piv = work.findings, pivots_of(piv, tuple(lu.shape))
    before = len(findings.statuses), findings.suspicions
    lu, B, order = for_blas(lu), for_blas(B), permutation(piv, lu.shape[0])
    X = _substituted(lu, order, B, trans, work)
    if suspected is None or before != (len(findings.statuses), findings.suspicions):  # it is said what was found
        return X
    if same(suspected.X, X) or _is_right(suspected.X, lu, order, B, trans):
        findings.suspicions += 1
    elif work.repair:
        _note_repair(findings, "x", suspected.X, X)
    else:
        findings.statuses.append(Status.UNCORRECTABLE)
        findings.faults.append(_fault("x", suspected.X, X, ""))
        return suspected.X
    return X


def _is_right(X: Array, lu: Array, order: Any, B: Array, trans: int) -> bool:
    """Whether this is what the factors make of B, whatever the order of the operations was."""
    xp, place = namespace(lu), from_host(order, lu)
    if trans:
        first, second, X = Triangle(lu.T, True, False), Triangle(lu.T, False, True), xp.take(X, place, axis=0)
    else:
        first, second, B = Triangle(lu, True, True), Triangle(lu, False, False), xp.take(B, place, axis=0)
    return check_by_factors(first, second, X, B, summing_weights(B)).clean


def _substituted(lu: Array, order: Any, B: Array, trans: int, work: Work) -> Array:
    xp = namespace(lu)
    t = summing_weights(B)
    lower, upper = Triangle(lu, True, True), Triangle(lu, False, False)
    if trans:
        # A' = U' L' P: U' z = b, L' y = z, x = P' y
        first, second = Triangle(lu.T, True, False), Triangle(lu.T, False, True)
        z = substitution(first, B, t, "forward", "z", work)
        y = substitution(second, z, t, "backward", "x", work)
        x = like_columns(y, y.shape)
        x[...] = xp.take(y, from_host(np.argsort(order), lu), axis=0)
        return x
    z = substitution(lower, xp.take(B, from_host(order, lu), axis=0), t, "forward", "z", work)
    return substitution(upper, z, t, "backward", "x", work)


def substitution(triangle: Triangle, B: Array, t: Array, stage: str, name: str, work: Work) -> Array:
    """Solve, check, and solve again where the check failed."""
    xp, last = namespace(B), None
    tried = 0
    while tried < ATTEMPTS:
        tried += 1
        with work.clock("solve"), np.errstate(all="ignore"):
            X = like_columns(B, B.shape)
            X[...] = B
            solve_triangle(triangle.T, X, lower=triangle.lower, unit=triangle.unit)
        work.stage(stage, **{name: X})
        with work.clock("check"):
            verdict = check_substitution(triangle, X, B, t)
            work.checks = (check_of("rows", verdict.residual, verdict.bound, t),)
        if verdict.clean:
            if last is not None:
                _note_repair(work.findings, name, last, X)
            return X
        with work.clock("evidence"):
            verdict = substitution_evidence(triangle, X, B)
        if verdict.clean:
            work.findings.suspicions += 1
            if last is not None:
                _note_repair(work.findings, name, last, X)
            return X
        if last is not None and same(last, X):
            break
        last = X
        if not work.repair:
            break
    if not bool(xp.all(xp.isfinite(X))) and not _finite_again(triangle, B):
        if Status.UNVERIFIABLE not in work.findings.statuses or bool(xp.all(xp.isfinite(B))):  # else it is known why
            work.findings.reasons.append(_why_not_finite(triangle, B))
        work.findings.statuses.append(Status.UNVERIFIABLE)
        return X
    work.findings.statuses.append(Status.UNCORRECTABLE)
    work.findings.faults.append(wrong_rows(name, verdict))
    work.findings.reasons.append(f"{stage} substitution failed its check {tried} times")
    return X


def same(x: Array, y: Array) -> bool:
    return bool(namespace(x).all((x == y) | ((x != x) & (y != y))))


def wrong_rows(name: str, verdict: LineCheck, repair: str = "") -> Fault:
    """The rows of a solution that failed a check."""
    rows = tuple(np.flatnonzero(~to_host(verdict.ok)).tolist())
    return Fault(name, "rows", rows, (), len(rows), largest(to_host(verdict.residual)), repair)


def _finite_again(triangle: Triangle, B: Array) -> bool:
    X = like_columns(B, B.shape)
    X[...] = B
    with np.errstate(all="ignore"):
        solve_triangle(triangle.T, X, lower=triangle.lower, unit=triangle.unit)
    return bool(namespace(X).all(namespace(X).isfinite(X)))


def _why_not_finite(triangle: Triangle, B: Array) -> str:
    xp, kind = namespace(B), float_type(B)
    if not bool(xp.all(xp.isfinite(B))):
        what = "the right-hand sides are not finite"
    elif not triangle.unit and bool(xp.any(xp.linalg.diagonal(triangle.T) == 0)):
        what = "the matrix is singular, a pivot is exactly zero"
    elif not bool(xp.all(xp.isfinite(triangle.T))):
        what = "the factors are not finite"
    else:
        what = f"it overflows, or a number on the way to it does ({kind.name} ends at {kind.largest:.3g})"
    return f"the solution is not finite: {what}"


def _note_repair(findings: Findings, name: str, wrong: Array, right: Array) -> None:
    findings.statuses.append(Status.CORRECTED)
    findings.faults.append(_fault(name, wrong, right, "solved again"))


def _fault(name: str, wrong: Array, right: Array, repair: str) -> Fault:
    """Where a solution is not the right one."""
    x, y = to_host(wrong), to_host(right)
    with np.errstate(all="ignore"):
        distance = np.abs(x - y)
        differ = ~(distance == 0)
        i, c = np.nonzero(differ)
    rows, columns = tuple(np.unique(i).tolist()), tuple(np.unique(c).tolist())
    return Fault(name, "block", rows, columns, int(i.size), largest(distance[differ]), repair)
