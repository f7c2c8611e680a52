"""Trials of factorisations and solutions: one matrix, an oracle, and many faults.

The judge does not believe the report: it takes the backward error of what was returned, relative to that of the same
call without a fault. More than `factor_oracle.ESCAPED` times that is wrong. A wrong result is excused where the fault
is one that the check does not promise to find: see `abft_tsm2.faults.judge.factor_effect`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.linalg import LinAlgError

from abft_tsm2.faults.judge.factor_effect import (
    Effect,
    Moment,
    MovedLines,
    Residuals,
    errors_of,
    of_cholesky,
    of_lu,
    rounding_of,
)
from abft_tsm2.faults.judge.factor_oracle import ESCAPED, order, ratio, unpack, valid_pivots
from abft_tsm2.faults.operands.matrices import FAMILIES
from abft_tsm2.faults.plan import Plan, require_known
from abft_tsm2.faults.sites import FACTOR_SITES, STAGES, sites_of
from abft_tsm2.faults.trials.factor_calls import SOLUTIONS, FactorAnswer, FactorProblem, Watch, at_visit, rms, same
from abft_tsm2.faults.trials.trial import Finding, Trial, TrialGroup, Workload, drawn_from
from abft_tsm2.linalg import cholesky, lu
from abft_tsm2.linalg.device.schedule import steps_of
from abft_tsm2.report import Report, Status

BLOCK = {"block": "columns of a panel, or a list of such numbers of which each matrix has one"}
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "lu": BLOCK,
    "solve": {"refine": "whether to refine the solution, true or false"},
    "lu_solve": {},
    "cholesky": BLOCK,
    "cho_solve": {},
}
STEPS = {("lu", "online"): lu.block_size, ("cholesky", "protected"): cholesky.block_size}
"""By operation and scheme, where a matrix is factored panel by panel: the columns of one by default."""
LIBRARIES = {"lu": ("numpy", "cupy"), **dict.fromkeys((*SOLUTIONS, "cholesky"), ("numpy",))}
"""By operation, those that faults are planted with."""
PROMISING = {"lu": "offline", **dict.fromkeys((*SOLUTIONS, "cholesky"), "protected")}
"""The scheme whose promise counts where "none" makes none, so that all are judged alike."""


def require_scheme(operation: str, scheme: str, options: Mapping[str, Any]) -> None:
    """ValueError for a scheme that the operation does not have."""
    require_known(f"scheme of {operation}", scheme, [name for of, name in STAGES if of == operation])


def require_possible(operation: str, scheme: str, plan: Plan) -> None:
    """ValueError where an operation that is protected so has no such site, or a model makes no sense there."""
    require_scheme(operation, scheme, {})
    require_known("site", plan.site, FACTOR_SITES)
    if plan.site not in sites_of(operation, scheme):
        there = ", ".join(sorted(sites_of(operation, scheme)))
        raise ValueError(f"{operation} under scheme {scheme!r} has no site {plan.site!r}; it has {there}")
    models = FACTOR_SITES[plan.site].models
    if plan.model not in models:
        raise ValueError(
            f"{plan.model} cannot be planted at {plan.site!r}; there it may be {', '.join(sorted(models))}"
        )


def require_fits(workload: Workload, scheme: str, plan: Plan, gpu: bool = False) -> None:
    """ValueError where a matrix of that shape is factored in too few steps for a site."""
    w, site = workload, FACTOR_SITES[plan.site]
    if (w.operation, scheme) not in STEPS or site.stage not in ("panel", "swapped", "solved", "updated"):
        return
    where = f"{plan.site} is not there in visit {plan.visit} of a {w.m} x {w.n} matrix, factored in"
    if gpu:  # which has blocks of its own, and no stage where nothing is right of a step
        ends = [step.j1 for step in steps_of(w.m, w.n)]
        visits = sum(end < w.n for end in ends) if site.stage in ("swapped", "solved") else len(ends)
        if not site.among(visits, len(ends)) or plan.visit >= visits:
            raise ValueError(f"{where} {len(ends)} steps on a GPU: choose a larger shape")
        return
    order = min(w.m, w.n)
    for block in drawn_from(dict(w.options).get("block", STEPS[w.operation, scheme](order))):
        steps = -(-order // block)
        if not site.among(steps) or plan.visit >= steps:
            raise ValueError(
                f"{where} {steps} steps of {block} columns: choose a larger shape, or a smaller block in options"
            )


def require_library(operation: str, library: str) -> None:
    """ValueError where no faults are planted in an operation on arrays of a library."""
    if library not in LIBRARIES[operation]:
        raise ValueError(
            "faults are planted in LU on the CPU or by CuPy on a GPU, in solutions and Cholesky's factorisation on the "
            "CPU only: leave out the device"
        )


def require_workload(workload: Workload) -> None:
    """ValueError for a matrix that there is not, or that cannot be factored."""
    w = workload
    require_known("family of matrices", w.family, FAMILIES)
    if w.dtype not in ("float64", "float32"):
        raise ValueError(f"dtype {w.dtype}: factorisations have float64 and float32")
    if w.k != w.n or (w.operation != "lu" and w.m != w.n):
        square = "of LU also [m, n, n]" if w.operation == "lu" else "all three the same"
        raise ValueError(f"shape [{w.m}, {w.k}, {w.n}]: the order of a matrix three times, {square}")
    for name, given in w.options:
        require_known(f"option of {w.operation}", name, OPTIONS[w.operation])
        for one in drawn_from(given):
            if not isinstance(one, int) or one < (name == "block"):
                raise ValueError(f"{name} = {given!r}: {OPTIONS[w.operation][name]}")


class FactorTrials(TrialGroup):
    """A matrix, what becomes of it without a fault, and the judge of what faults make of it, who is on the host."""

    def __init__(self, workload: Workload, xp: Any) -> None:
        require_library(workload.operation, getattr(xp, "__name__", ""))
        require_workload(workload)
        self.workload, self.xp = workload, xp
        self._runners: dict[str, _FactorRunner] = {}

    @functools.cached_property
    def problem(self) -> FactorProblem:
        """Of the trials with a fault; each of the others has one of its own."""
        return FactorProblem.of(self.workload, xp=self.xp)

    def one(self, trial: Trial) -> Finding:
        for plan in trial.plans:
            require_possible(self.workload.operation, trial.scheme, plan)
        if trial.plans:
            return self._runner(trial.scheme).faulty(trial)
        return _clean(FactorProblem.of(self.workload, trial.number, xp=self.xp), trial.scheme)

    def _runner(self, scheme: str) -> _FactorRunner:
        if scheme not in self._runners:
            default = self._runner(PROMISING[self.workload.operation]) if scheme == "none" else None
            self._runners[scheme] = _FactorRunner(self.problem, scheme, default)
        return self._runners[scheme]


def _clean(problem: FactorProblem, scheme: str) -> Finding:
    """A trial without a fault. It has a matrix of its own, of the same kind: one matrix would always give the same. And
    it has no hook, for which a GPU would go another way.

    What SciPy refuses as singular, or as not positive definite, may be refused, and so may what is so but for rounding;
    of a solution that is not finite in SciPy either, nothing more is said than that. On a GPU the comparison is with
    SciPy as well: cuSOLVER's getrf may never return where pivots are subnormal (Vandermonde matrices of 3000 rows in
    float32, and of 8192 in float64, on an H100; CUDA 13.2).
    """
    try:
        without = problem.error(replace(problem, xp=np).call("none"))
    except LinAlgError:
        without = np.inf
    try:
        answer = problem.call(scheme)
    except LinAlgError as error:
        right = without == np.inf or problem.nearly_singular()
        return Finding("clean" if right else "crash", type(error).__name__, note="" if right else _described(error))
    except Exception as error:
        return Finding("crash", note=_described(error))
    found = _finding("clean", answer)
    if answer.report is not None:
        found.closest = answer.report.closest
        if answer.report.status is not Status.CLEAN and not _excused(answer.report, problem, without):
            found.outcome = "false_alarm"
    vouched = answer.report is None or answer.report.status is not Status.UNVERIFIABLE
    if answer.result is not None and vouched and np.isfinite(without):
        times = ratio(problem.error(answer), without, problem.a.dtype)
        if times > ESCAPED:
            found.outcome, found.note = "sdc", f"no fault, and an error of {times:.3g} times SciPy's"
    return found


def _excused(report: Report, problem: FactorProblem, without: float) -> bool:
    """Whether nothing can be verified: LAPACK does not divide by a pivot so small, or its result is not finite."""
    return report.status is Status.UNVERIFIABLE and (not np.isfinite(without) or problem.has_skipped_pivot())


def _finding(outcome: str, answer: FactorAnswer) -> Finding:
    status = "" if answer.report is None else answer.report.status.name
    restarted = answer.report is not None and answer.report.restarted
    return Finding(outcome, status, seconds=answer.seconds, restarted=restarted, report=answer.report)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class _FactorRunner:
    """One scheme on the matrix of a group, and what it promises."""

    def __init__(self, problem: FactorProblem, scheme: str, default: _FactorRunner | None) -> None:
        self.problem, self.scheme = problem, scheme
        watch = Watch()
        self.clean = problem.call(scheme, watch)
        if self.clean.result is None:
            raise ArithmeticError(f"scheme {scheme!r} refuses the matrix without a fault: {self.clean.report}")
        self.error = problem.error(self.clean)
        self.visits: Counter[str] = watch.injector.visits
        self.lines: MovedLines | Residuals
        self.scale, self.limit = 1.0, 0.0
        if default is not None:
            self.lines, self.scale, self.limit = default.lines, default.scale, default.limit
        elif self.clean.report is not None:
            self._promise(self.clean.report, watch)

    def _promise(self, report: Report, watch: Watch) -> None:
        p, result = self.problem, self.clean.result
        self.scale = rms(p.b if p.operation in SOLUTIONS else p.a)
        self.limit = min(check.detection_limit for check in report.checks) / self.scale
        if p.operation == "cholesky":
            L = np.tril(result)
            self.lines = MovedLines(
                p.a, None, watch.seen["w"], rounding_of(L, L.T, L.dtype), errors_of(p.a, L, L.T), report
            )
            return
        if p.operation == "cho_solve":
            self.lines = Residuals(p.a, result, p.b, (p.lower, p.lower.T, np.arange(p.b.size)), report)
            return
        W, piv = result if p.operation == "lu" else (watch.seen["W"], watch.seen["piv"])
        rows, (L, U) = order(piv, len(W)), unpack(W)
        if p.operation != "lu":
            self.lines = Residuals(p.a, result, p.b, (L, U, rows), report)
            return
        rounding, errors = np.empty(W.shape), np.empty(W.shape)
        rounding[rows], errors[rows] = rounding_of(L, U, W.dtype), errors_of(p.a[rows], L, U)
        self.lines = MovedLines(p.a, watch.seen["v"], watch.seen["w"], rounding, errors, report)

    def faulty(self, trial: Trial) -> Finding:
        """Carry out a trial, and judge it."""
        steps = self.visits["panel"]
        plans = [at_visit(plan, self.visits[FACTOR_SITES[plan.site].stage], steps) for plan in trial.plans]
        watch = Watch(*plans)
        try:
            answer = self.problem.call(self.scheme, watch)
        except Exception as error:
            found = Finding("crash", note=_described(error))
        else:
            found = _finding("crash", answer)
            if not watch.injector.planted:
                found.note = f"nothing was planted at {', '.join(plan.site for plan in plans)}"
                return found
            self._judge(found, answer, watch.moments)
        found.bit = watch.injector.bit
        return found

    def _judge(self, found: Finding, answer: FactorAnswer, moments: Sequence[Moment]) -> None:
        effects = [effect for moment in moments if (effect := self._effect(moment)) is not None]
        if effects:
            found.size = max(effect.size for effect in effects)
            found.relative = max(effect.largest for effect in effects) / self.scale
            found.limit = self.limit
            found.sharpness = None if self.scheme == "none" else self.lines.sharpness
        if answer.report is not None and len(moments) == len(effects) == 1:
            found.located = located(answer.report, effects[0])
        if answer.result is None or not (answer.report is None or answer.report.ok):
            found.outcome = "detected"
            return
        times = 1.0
        if not same(answer.result, self.clean.result):
            times = ratio(self.problem.error(answer), self.error, self.problem.a.dtype)
        if times <= ESCAPED:
            found_nothing = answer.report is None or answer.report.status is Status.CLEAN
            found.outcome = "masked" if found_nothing else "corrected"
            return
        found.outcome = _of_wrong(effects, len(moments))
        if found.outcome == "sdc" and (rest := self._rest(answer)) is not None:
            found.outcome = _of_wrong([rest], 1)
        found.note = f"error x {times:.3g}"

    def _rest(self, answer: FactorAnswer) -> Effect | None:
        """The effect of faults that remain in factors that were returned, by how far off L U is: all that is sure to
        be found should be gone. None where it is not known."""
        p, W = self.problem, answer.result
        if isinstance(self.lines, Residuals):
            return None
        rows = np.arange(len(p.a))
        if p.operation == "lu":
            W, piv = W
            if not valid_pivots(piv, len(p.a), min(p.a.shape)):
                return None
            rows = order(piv, len(p.a))
        with np.errstate(all="ignore"):
            L, U = (
                unpack(W.astype(np.float64)) if p.operation == "lu" else (wide := np.tril(W.astype(np.float64)), wide.T)
            )
            return self.lines.effect(p.a.astype(np.float64)[rows] - L @ U, rows)

    def _effect(self, moment: Moment) -> Effect | None:
        if isinstance(self.lines, Residuals):
            return self.lines.effect(moment)
        return (of_cholesky if self.problem.operation == "cholesky" else of_lu)(moment, self.lines)


def _of_wrong(effects: Sequence[Effect], faults: int) -> str:
    """What became of faults that left a wrong result: nothing excuses those whose effect is not known."""
    if len(effects) < faults or any(effect.size > 1 for effect in effects):
        return "sdc"
    return "cancelled" if any(effect.alone > 1 for effect in effects) else "below_bound"


# ---- where it is said to be ----------------------------------------------------------------------------------------


def located(report: Report, effect: Effect) -> str:
    """Whether a report names what a fault has changed of L and U, or of a solution: "exact", "covered" or "wrong".

    Empty where it names none of these, or the fault was elsewhere; and where all was restarted, since then it names
    what had been found until then. Rows of factors under way are exchanged later, and only the columns are compared. Of
    factors that are checked when they are finished either side may tell: errors of a column of U are spread over rows.
    """
    named = [fault for fault in report.faults if fault.operand in ("LU", "L", "x", "z")]
    if report.restarted:
        return ""
    sides = ((effect.rows, [fault.rows for fault in named]), (effect.columns, [fault.columns for fault in named]))
    found = {places.compared(lines) for places, lines in sides if places is not None and named}
    return next((word for word in ("exact", "covered", "wrong") if word in found), "")


GROUP = FactorTrials  # what a campaign asks a module of trials for
