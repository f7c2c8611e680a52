"""Calls of factorisations and solutions under a scheme, with faults in them, and what each fault changed."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from abft_tsm2.arrays import bit_pattern
from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.faults.injection import Injector
from abft_tsm2.faults.judge.factor_effect import Moment
from abft_tsm2.faults.judge.factor_oracle import cholesky_error, lu_error, solution_error, unit
from abft_tsm2.faults.operands.matrices import DEFINITE, FAMILIES, part_of
from abft_tsm2.faults.plan import Plan
from abft_tsm2.faults.sites import SITES
from abft_tsm2.faults.trials.trial import Workload, quiet
from abft_tsm2.linalg.cholesky import protected_cholesky
from abft_tsm2.linalg.lu import protected_lu_factor
from abft_tsm2.linalg.solve import protected_solve
from abft_tsm2.report import Report

Matrix = np.ndarray[Any, np.dtype[Any]]
Hook = Callable[[str, Mapping[str, Any]], None]
CHANGED = ("A", "W", "x", "z")  # what a fault may change that has an effect on the result
NOTED = (*CHANGED, "perm", "piv")


class Watch:
    """An ``on_stage`` hook that plants faults, and keeps what each of them changed.

    Attributes
    ----------
    injector : Injector
    moments : list of Moment
        Of each plan the first time.
    seen : dict of str to array
        Weights of A as they were when it was encoded; packed factors and pivots of a solution.
    """

    def __init__(self, *plans: Plan) -> None:
        self.injector = Injector(*plans)
        self.moments: list[Moment] = []
        self.seen: dict[str, Matrix] = {}

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        due = [(SITES[plan.site].stage, plan.visit) for plan in self.injector.plans]
        if stage == "encoded":
            self.seen |= {name: np.array(arrays[name]) for name in "vw" if name in arrays and name not in self.seen}
        if (stage, self.injector.visits[stage]) not in due:
            self.injector(stage, arrays)
        else:
            before = {name: np.array(arrays[name]) for name in NOTED if name in arrays}
            self.injector(stage, arrays)
            after = {name: np.array(x) for name, x in arrays.items() if name in CHANGED and _differ(x, before[name])}
            factors = {name: x for name, x in self.seen.items() if stage == "forward" and name in NOTED}
            self.moments.append(Moment(stage, arrays.get("step"), {**factors, **before}, after))
        if stage == "factored":
            self.seen |= {name: arrays[name] for name in ("W", "piv")}


def _differ(x: Any, y: Any) -> bool:
    return bool((bit_pattern(x) != bit_pattern(y)).any())


@dataclass
class FactorAnswer:
    """The outcome of a call.

    Attributes
    ----------
    result : what it returned, None where it refused
    report : Report or None
        Of a protected one.
    seconds : float
    """

    result: Any
    report: Report | None
    seconds: float


@dataclass(frozen=True)
class FactorProblem:
    """A matrix to factor, or a system to solve.

    Attributes
    ----------
    operation : {"lu", "solve", "cholesky"}
    a : (m, n) array
    b : (n,) array
        A right-hand side.
    options : mapping
        For the call.
    """

    operation: str
    a: Matrix
    b: Matrix
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: Workload, *more: int) -> FactorProblem:
        """The one that follows from a workload's seed; `more` for another one of the kind. One of several options is
        drawn."""
        w, rng = workload, np.random.default_rng([*workload.seed, 0xFAC7, *more])
        order: Any = w.order
        a = part_of(FAMILIES[w.family], w.m, w.n, rng, w.dtype)
        b = np.asarray(rng.standard_normal(w.m), w.dtype)
        if w.operation == "cholesky" and w.family not in DEFINITE:
            a = _definite(a)
        options = {name: rng.choice(x).item() if isinstance(x, list) else x for name, x in w.options}
        return cls(w.operation, np.asarray(a, order=order), b, options)

    def call(self, scheme: str, watch: Watch) -> FactorAnswer:
        """Carry it out under a scheme; no warnings."""
        a, b = self.a.copy("K"), self.b.copy()
        with warnings.catch_warnings(), np.errstate(all="ignore"), quiet():
            warnings.simplefilter("ignore")
            begun = time.perf_counter()
            try:
                if scheme == "none":
                    result, report = self._plain(a, b, watch), None
                else:
                    result, report = self._protected(a, b, scheme, watch)
            except SilentDataCorruptionError as error:
                result, report = None, error.report
            return FactorAnswer(result, report, time.perf_counter() - begun)

    def _protected(self, a: Matrix, b: Matrix, scheme: str, hook: Hook) -> tuple[Any, Report]:
        options: dict[str, Any] = {**self.options, "on_stage": hook, "return_report": True}
        if self.operation == "lu":
            result, report = protected_lu_factor(a, mode=scheme, **options)
        elif self.operation == "solve":
            result, report = protected_solve(a, b, assume_a="gen", **options)
        else:
            result, report = protected_cholesky(a, lower=True, **options)
        return result, report

    def _plain(self, a: Matrix, b: Matrix, hook: Hook) -> Any:
        """SciPy's own functions, with faults in what they return."""
        from scipy import linalg

        if self.operation == "cholesky":
            factor = np.array(linalg.cholesky(a, lower=True, check_finite=False), order="F")
            hook("finished", {"W": factor})
            return factor
        lu, piv = linalg.lu_factor(a, check_finite=False)
        hook("factored", {"W": lu, "piv": piv})
        if self.operation == "lu":
            return lu, piv
        x = np.array(linalg.lu_solve((lu, piv), b, check_finite=False))
        hook("backward", {"x": x})
        return x

    def nearly_singular(self) -> bool:
        """Whether rounding decides if the matrix can be factored: a pivot, or the smallest eigenvalue, of a size that
        is below n u times the largest one."""
        n = len(self.a)
        with np.errstate(all="ignore"):
            values = self._pivots() if self.operation != "cholesky" else np.linalg.eigvalsh(self.a.astype(np.float64))
            return not bool(values.min() > n * unit(self.a.dtype) * values.max())

    def has_skipped_pivot(self) -> bool:
        """Whether a pivot is so small that LAPACK does not divide by it, because its reciprocal may overflow; twice
        that, for rounding."""
        return self.operation != "cholesky" and bool((self._pivots() < 2 * np.finfo(self.a.dtype).tiny).any())

    def _pivots(self) -> Matrix:
        """The sizes of the pivots that SciPy finds."""
        from scipy import linalg

        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return np.asarray(abs(np.diag(linalg.lu_factor(self.a, check_finite=False)[0])))

    def error(self, answer: FactorAnswer) -> float:
        """The backward error of what was returned."""
        if self.operation == "lu":
            return lu_error(self.a, answer.result)
        if self.operation == "solve":
            return solution_error(self.a, answer.result, self.b)
        return cholesky_error(self.a, answer.result)


def _definite(a: Matrix) -> Matrix:
    """Products of a matrix's rows, scaled to 1, and a diagonal."""
    wide = a.astype(np.float64)
    for power in (np.inf, 2):  # by the largest element first, so that no square overflows
        norm = np.linalg.norm(wide, power, axis=1, keepdims=True)
        wide /= np.where(norm > 0, norm, 1.0)
    return np.asarray(wide @ wide.T + 1e-3 * np.eye(len(wide)), a.dtype)


def same(one: Any, other: Any) -> bool:
    """Whether two results are, bit by bit."""
    if isinstance(one, tuple):
        return all(same(x, y) for x, y in zip(one, other, strict=True))
    return bool(one.shape == other.shape and one.dtype == other.dtype and one.tobytes("A") == other.tobytes("A"))


def at_visit(plan: Plan, visits: int) -> Plan:
    """A plan with its visit drawn, from its seed, among those at which its site is there, unless it names one.

    Raises
    ------
    ValueError
        If there is none: the matrix is factored in too few steps.
    """
    among = SITES[plan.site].among(visits)
    if plan.visit:
        return plan
    if not among:
        raise ValueError(
            f"{plan.site} is not there in a factorisation of {visits} steps: choose a smaller block, or a larger matrix"
        )
    return replace(plan, visit=int(np.random.default_rng([*plan.seed, 0x51]).choice(among)))


def rms(x: Matrix) -> float:
    """The root mean square of an array."""
    return math.sqrt(float(np.mean(np.square(x.astype(np.float64))))) or 1.0
