"""Substitute forward and backward; check each solution by its residual, and solve again where that is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, float_type, from_host, is_cupy, namespace, to_host
from abft_tsm2.core import faultpoint
from abft_tsm2.core.blas import like_columns, permutation, solve_triangle
from abft_tsm2.linalg.blocked import Hook
from abft_tsm2.linalg.device.solution import DeviceSolution, solve_on_device
from abft_tsm2.linalg.given import Given, GivenFactors, GivenPivots, GivenTriangle
from abft_tsm2.linalg.inputs import for_blas, pivots_of
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.operand import Operand
from abft_tsm2.linalg.outcome import Clock, Findings, check_of, largest
from abft_tsm2.linalg.triangular import (
    Triangle,
    Weighed,
    check_by_factors,
    check_substitution,
    evidence_by_factors,
    hides_columns,
    substitution_evidence,
    summing_weights,
    triangles,
)
from abft_tsm2.report import Check, Fault, Status

ATTEMPTS = 3


@dataclass
class Work:
    """One solution under way.

    Attributes
    ----------
    given : tuple of Given
        Operands, encoded: what is computed from them after a suspicion counts only where they are the same.
    """

    on_stage: Hook | None
    repair: bool
    findings: Findings = field(default_factory=Findings)
    given: tuple[Given, ...] = ()
    checks: tuple[Check, ...] = ()
    clock: Clock = field(default_factory=Clock)

    def stage(self, name: str, **arrays: Any) -> None:
        if (watcher := faultpoint.watcher(self.on_stage)) is not None:
            watcher(name, arrays)

    def confirm(self, suspected: bool = True, of: tuple[Given, ...] | None = None) -> bool:
        """Note which operands, all that are given or these, have changed and, where a check has failed, which may have;
        whether none is shown to have changed."""
        found = [(one.name, one.compare()) for one in (self.given if of is None else of)]
        fine = [self.note(name, operand) for name, operand in found if suspected or operand is not Operand.UNKNOWN]
        return all(fine)

    def note(self, name: str, operand: Operand) -> bool:
        """The same of what is known of one."""
        if operand is Operand.CHANGED and self.said(name):
            self.findings.changed(name, f"{name} is not what it was when the call began: pass it once more")
        elif operand is Operand.UNKNOWN:
            self.findings.undecided(f"a check failed, and nothing shows that {name} did not change: solve once more")
        return operand is not Operand.CHANGED

    def said(self, name: str) -> bool:
        """Whether that has still to be said."""
        return not any(fault.operand == name and fault.kind == "operand" for fault in self.findings.faults)


def solved_by_kernels(lu: Array, B: Array, work: Work) -> bool:
    """Whether kernels of a GPU solve with these factors, or those of this matrix."""
    return work.on_stage is None and is_cupy(lu) and is_cupy(B) and 0 not in B.shape


def queued(lu: Array, piv: Any, B: Array, trans: int, work: Work, A: Array | None = None) -> DeviceSolution | None:
    """The solution by kernels of a GPU, its checks among them, and those of ``A X = B`` where A is given; None where
    there is no GPU, or a hook wants to see the stages."""
    if not solved_by_kernels(lu, B, work):
        return None
    return by_kernels(lu, piv, B, trans, work, A, compared=A is not None)


def by_kernels(
    lu: Array, piv: Any, B: Array, trans: int, work: Work, A: Array | None = None, *, compared: bool = False
) -> DeviceSolution:
    """The solution by kernels of a GPU. `compared`: it is clean only where lu is shown to be what it was before."""
    with work.clock("solve"):
        piv = piv if is_cupy(piv) else from_host(piv, lu)
        found = solve_on_device(lu, piv, B, trans, A, compared=compared)
    if found.clean and found.t.size > 1 and hides_columns(found.largest, found.t, B):
        with work.clock("check"):
            order = permutation(pivots_of(found.left().piv, tuple(lu.shape)), int(lu.shape[0]))
            right = _is_right(found.X, triangles(lu, trans), order, Weighed.of(B, summing_weights(B)), trans)
            found = found._replace(clean=right)
    if found.clean:
        work.checks = (found.check(),)
    return found


def as_read(found: DeviceSolution | None, B: Array) -> Weighed:
    """B with its sums: those of kernels that have read it, or as it is now."""
    return (found and found.weighed(B)) or Weighed.of(for_blas(B), summing_weights(B))


def substituted_carefully(
    lu: Array,
    pivots: GivenPivots,
    B: Array,
    trans: int,
    work: Work,
    suspected: DeviceSolution | None = None,
    weighed: Weighed | None = None,
    given: GivenFactors | None = None,
) -> Array:
    """The solution for right-hand sides B (n x r), both substitutions checked, with evidence and repairs where a check
    fails; B is not changed.

    `suspected`: what kernels have found, not all right. `weighed`, `given`: B and the factors as they were encoded.
    """
    findings, before = work.findings, (len(work.findings.statuses), work.findings.suspicions)
    lu = for_blas(lu)
    B = weighed or as_read(suspected, B)
    factors = triangles(lu, trans)
    X, last = namespace(lu).full_like(B.X, float("nan")), None
    for _ in range(ATTEMPTS):
        order = order_of(pivots)
        if order is not None:
            X = _substituted(factors, given.triangles if given else (None, None), order, B, trans, work)
            if np.array_equal(order, order_of(pivots)):
                break
            last = X
    else:
        order = None
    if not work.confirm(suspected=False, of=(pivots,)):  # no sum of a solution shows that the order is another
        return X
    if order is None:
        findings.statuses.append(Status.UNCORRECTABLE)
        findings.reasons.append(f"the rows were in another order than piv gives, in {ATTEMPTS} solutions")
        return X
    if last is not None:
        _note_repair(findings, "x", last, X)
    if given is not None:
        _confirm_unseen(given, X, work)
    if suspected is None or before != (len(findings.statuses), findings.suspicions):  # it is said what was found
        return X
    if not work.confirm():
        return X
    if same(suspected.X, X) or _is_right(suspected.X, factors, order, B, trans, evidence=True):
        findings.suspicions += 1
    elif work.repair:
        _note_repair(findings, "x", suspected.X, X)
    else:
        findings.statuses.append(Status.UNCORRECTABLE)
        findings.faults.append(_fault("x", suspected.X, X, ""))
        return suspected.X
    return X


def order_of(pivots: GivenPivots) -> Any:
    """The row of B at each place; None where a pivot is no row."""
    try:
        return permutation(pivots.array, pivots.array.size)
    except IndexError:
        return None


def _is_right(
    X: Array, factors: tuple[Triangle, Triangle], order: Any, B: Weighed, trans: int, *, evidence: bool = False
) -> bool:
    """Whether this is what the factors make of B, whatever the order of the operations was. `evidence`: where a check
    does not show it, all elements decide."""
    xp, place = namespace(X), from_host(order, X)
    X, B = (xp.take(X, place, axis=0), B) if trans else (X, B.rows(place))
    if check_by_factors(*factors, Weighed.of(X, B.t), B).clean:
        return True
    return evidence and evidence_by_factors(*factors, X, B.X).clean


def _substituted(
    factors: tuple[Triangle, Triangle],
    given: tuple[GivenTriangle | None, GivenTriangle | None],
    order: Any,
    B: Weighed,
    trans: int,
    work: Work,
) -> Array:
    xp, like = namespace(B.X), B.X
    B = B if trans else B.rows(from_host(order, like))
    z = substitution(factors[0], B, "forward", "z", work, given[0])
    y = substitution(factors[1], z, "backward", "x", work, given[1]).X
    if not trans:
        return y
    x = like_columns(y, y.shape)
    x[...] = xp.take(y, from_host(np.argsort(order), like), axis=0)  # x = P' y
    return x


def substituted_twice(factors: GivenFactors, B: Weighed, work: Work) -> Array:
    """The solution of ``L L' X = B``, for factors L and L' as they were encoded, both substitutions checked."""
    first, second = factors.of(factors.array)
    z = substitution(first, B, "forward", "z", work, factors.triangles[0])
    X = substitution(second, z, "backward", "x", work, factors.triangles[1]).X
    _confirm_unseen(factors, X, work)
    return X


def _confirm_unseen(given: GivenFactors, X: Array, work: Work) -> None:
    """Note whether factors have changed, where the checks of the solution X may not have shown it."""
    if not given.are_seen_by(int(X.shape[1])):
        work.note(given.name, given.compare())


def substitution(
    triangle: Triangle, B: Weighed, stage: str, name: str, work: Work, given: GivenTriangle | None = None
) -> Weighed:
    """Solve, check, and solve again where the check failed. `given`: the triangle as it was encoded."""
    last, tried = None, 0
    while tried < ATTEMPTS:
        tried += 1
        with work.clock("solve"), np.errstate(all="ignore"):
            solved = like_columns(B.X, B.X.shape)
            solved[...] = B.X
            solve_triangle(triangle.T, solved, lower=triangle.lower, unit=triangle.unit)
        work.stage(stage, **{name: solved})
        with work.clock("check"):
            X = Weighed.of(solved, B.t)
            verdict = check_substitution(triangle, X, B)
            if name != "z":  # which another one follows, that a report tells of
                work.checks = (check_of("rows", verdict.residual, verdict.bound, B.t),)
        failed = not verdict.clean
        if failed:
            with work.clock("evidence"):
                verdict = substitution_evidence(triangle, solved, B.X)
        else:
            agrees = given is None or given.agrees(X, B, verdict)
            if last is None and agrees and (given is None or given.shows_all(verdict)):
                return X
            work.findings.suspicions += last is None and not agrees
        right = verdict.clean
        if right:  # once more, with operands that are shown to be what was encoded
            if not work.confirm():
                return X
            if failed:
                right = B.same and substitution_evidence(triangle, solved, B.X).clean
                work.findings.suspicions += right
            else:
                right = check_substitution(triangle, X, B).clean
        if right:
            if last is not None:
                _note_repair(work.findings, name, last.X, solved)
            return X
        if last is not None and same(last.X, solved):
            break
        last = X
        if not work.repair:
            break
    if _beyond_range(triangle, solved, B.X):
        if work.confirm():
            if Status.UNVERIFIABLE not in work.findings.statuses or _is_finite(B.X):  # else known why
                work.findings.reasons.append(_why_beyond(triangle, solved, B.X))
            work.findings.statuses.append(Status.UNVERIFIABLE)
    elif work.confirm():
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


def _is_finite(X: Array) -> bool:
    xp = namespace(X)
    return bool(xp.all(xp.isfinite(X)))


def _beyond_range(triangle: Triangle, solved: Array, B: Array) -> bool:
    """Whether no fault is needed for a solution that cannot be checked: it is not finite, and is so once more; or the
    triangle is not, which leaves zeros in the solution where a pivot is Inf."""
    if not _is_finite(solved):
        X = like_columns(B, B.shape)
        X[...] = B
        with np.errstate(all="ignore"):
            solve_triangle(triangle.T, X, lower=triangle.lower, unit=triangle.unit)
        return not _is_finite(X)
    whole = slice(0, B.shape[0])
    return not _is_finite(triangle.block(whole, whole))


def _why_beyond(triangle: Triangle, solved: Array, B: Array) -> str:
    xp, kind = namespace(B), float_type(B)
    if not _is_finite(B):
        what = "the right-hand sides are not finite"
    elif not triangle.unit and bool(xp.any(xp.linalg.diagonal(triangle.T) == 0)):
        what = "the matrix is singular, a pivot is exactly zero"
    elif not _is_finite(triangle.T):
        what = "the factors are not finite"
    else:
        what = f"it overflows, or a number on the way to it does ({kind.name} ends at {kind.largest:.3g})"
    return f"the solution {'cannot be checked' if _is_finite(solved) else 'is not finite'}: {what}"


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
