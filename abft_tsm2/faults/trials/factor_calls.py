"""Calls of factorisations and solutions under a scheme, with faults in them, and what each fault changed."""

from __future__ import annotations

import functools
import importlib
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from abft_tsm2.arrays import bit_pattern, is_cupy, to_host
from abft_tsm2.core.faultpoint import planting
from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.faults.injection import Injector
from abft_tsm2.faults.judge.factor_effect import Moment
from abft_tsm2.faults.judge.factor_oracle import cholesky_error, lu_error, order, solution_error_by_rows, unit
from abft_tsm2.faults.operands.matrices import DEFINITE, FAMILIES, part_of
from abft_tsm2.faults.plan import Plan
from abft_tsm2.faults.sites import SITES
from abft_tsm2.faults.trials.trial import Workload, quiet
from abft_tsm2.linalg.cholesky import protected_cholesky
from abft_tsm2.linalg.device.schedule import steps_of
from abft_tsm2.linalg.lu import protected_lu_factor
from abft_tsm2.linalg.solve import protected_cho_solve, protected_lu_solve, protected_solve
from abft_tsm2.report import Report

Matrix = np.ndarray[Any, np.dtype[Any]]
Hook = Callable[[str, Mapping[str, Any]], None]
CHANGED = ("A", "W", "x", "z", "b", "lu", "c")  # what a fault may change that has an effect on the result
SOLUTIONS = ("solve", "lu_solve", "cho_solve")
NOTED = (*CHANGED, "perm", "piv")


class Watch:
    """Plants faults, and keeps what each of them changed; on the host, wherever it is.

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
        self._given: dict[str, Any] = {}

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        due = [(SITES[plan.site].stage, plan.visit) for plan in self.injector.plans]
        if stage == "encoded":
            self.seen |= {name: _copied(arrays[name]) for name in "vw" if name in arrays and name not in self.seen}
        self._given |= {name: arrays[name] for name in ("b", "lu", "c") if name in arrays}
        if "lu" in arrays and "piv" in arrays:
            self.seen |= {"W": _copied(arrays["lu"]), "piv": _copied(arrays["piv"])}
        if (stage, self.injector.visits[stage]) not in due:
            self.injector(stage, arrays)
        else:
            live = {**self._given, **arrays}
            before = {name: _copied(live[name]) for name in NOTED if name in live}
            self.injector(stage, arrays)
            now = {name: _copied(x) for name, x in live.items() if name in CHANGED}
            after = {name: x for name, x in now.items() if _differ(x, before[name])}
            if is_cupy(arrays.get("W")):
                _exchange_rows_of_L(stage, arrays.get("step"), before, after)
            factors = {name: x for name, x in self.seen.items() if stage == "forward" and name in NOTED}
            self.moments.append(Moment(stage, arrays.get("step"), {**factors, **before}, after))
        if stage == "factored":
            self.seen |= {name: arrays[name] for name in ("W", "piv")}


def _copied(x: Any) -> Matrix:
    """What an array holds now, on the host."""
    return np.array(to_host(x))


def _differ(x: Any, y: Any) -> bool:
    return bool((bit_pattern(x) != bit_pattern(y)).any())


def _exchange_rows_of_L(
    stage: str, step: tuple[int, int] | None, before: dict[str, Matrix], after: dict[str, Matrix]
) -> None:
    """Put what a GPU holds into the order in which a CPU holds it.

    A GPU exchanges the rows left of a step when all steps are done: columns of L that are finished have theirs in the
    order in which their step has left them. And it says at "panel" already where the rows of that panel come from.
    """
    m, n = before["W"].shape
    j, j1 = step or (0, min(m, n))
    done = j if stage == "panel" else j1
    rows = order(before["piv"][:done], m)
    for first, last in steps_of(m, n):
        if last > done:
            break
        place = np.empty(m, np.intp)
        place[order(before["piv"][:last], m)] = np.arange(m)
        for W in (x["W"] for x in (before, after) if "W" in x):
            W[:, first:last] = W[place[rows], first:last]
    if "perm" in before:
        before["perm"] = rows


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
    operation : {"lu", "solve", "lu_solve", "cholesky", "cho_solve"}
    a : (m, n) array
    b : (n,) array
        A right-hand side.
    options : mapping
        For the call.
    xp : module
        NumPy or CuPy: what it is carried out with. Operands here, and results, are on the host.
    """

    operation: str
    a: Matrix
    b: Matrix
    options: Mapping[str, Any] = field(default_factory=dict)
    xp: Any = np

    @classmethod
    def of(cls, workload: Workload, *more: int, xp: Any = np) -> FactorProblem:
        """The one that follows from a workload's seed; `more` for another one of the kind. One of several options is
        drawn."""
        w, rng = workload, np.random.default_rng([*workload.seed, 0xFAC7, *more])
        layout: Any = w.order
        a = part_of(FAMILIES[w.family], w.m, w.n, rng, w.dtype)
        b = np.asarray(rng.standard_normal(w.m), w.dtype)
        if w.operation in ("cholesky", "cho_solve") and w.family not in DEFINITE:
            a = _definite(a)
        options = {name: rng.choice(x).item() if isinstance(x, list) else x for name, x in w.options}
        return cls(w.operation, np.asarray(a, order=layout), b, options, xp)

    def call(self, scheme: str, hook: Hook | None = None) -> FactorAnswer:
        """Carry it out under a scheme; no warnings."""
        a, b = (self.xp.asarray(x.copy("K"), order="K") for x in (self.a, self.b))
        with warnings.catch_warnings(), np.errstate(all="ignore"), quiet():
            warnings.simplefilter("ignore")
            begun = time.perf_counter()
            try:
                if scheme == "none":
                    result, report = self._plain(a, b, hook or _nothing), None
                else:
                    result, report = self._protected(a, b, scheme, hook)
            except SilentDataCorruptionError as error:
                result, report = None, error.report
            seconds = time.perf_counter() - begun
        return FactorAnswer(_on_host(result), report, seconds)

    def _protected(self, a: Any, b: Any, scheme: str, hook: Hook | None) -> tuple[Any, Report]:
        options: dict[str, Any] = {**self.options, "return_report": True}
        if is_cupy(a):  # whose stages only a hook sees
            options["on_stage"] = hook
        with planting(hook):
            if self.operation == "lu":
                result, report = protected_lu_factor(a, mode=scheme, **options)
            elif self.operation == "solve":
                result, report = protected_solve(a, b, assume_a="gen", **options)
            elif self.operation == "lu_solve":
                result, report = protected_lu_solve(tuple(x.copy("K") for x in self.factors), b, **options)
            elif self.operation == "cho_solve":
                result, report = protected_cho_solve((self.lower.copy("K"), True), b, **options)
            else:
                result, report = protected_cholesky(a, lower=True, **options)
        return result, report

    def _plain(self, a: Any, b: Any, hook: Hook) -> Any:
        """SciPy's own functions, or CuPy's of the same names, with faults in what they return."""
        if is_cupy(a):
            linalg = importlib.import_module("cupyx.scipy.linalg")
        else:
            linalg = importlib.import_module("scipy.linalg")
        if self.operation == "cholesky":
            factor = np.array(linalg.cholesky(a, lower=True, check_finite=False), order="F")
            hook("finished", {"W": factor})
            return factor
        if self.operation == "cho_solve":
            x = np.array(linalg.cho_solve((self.lower, True), b, check_finite=False))
            hook("backward", {"x": x})
            return x
        lu, piv = self.factors if self.operation == "lu_solve" else linalg.lu_factor(a, check_finite=False)
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
            definite = self.operation in ("cholesky", "cho_solve")
            values = np.linalg.eigvalsh(self.a.astype(np.float64)) if definite else self._pivots()
            return not bool(values.min() > n * unit(self.a.dtype) * values.max())

    def has_skipped_pivot(self) -> bool:
        """Whether a pivot is so small that LAPACK does not divide by it, because its reciprocal may overflow; twice
        that, for rounding."""
        return self.operation not in ("cholesky", "cho_solve") and bool(
            (self._pivots() < 2 * np.finfo(self.a.dtype).tiny).any()
        )

    def _pivots(self) -> Matrix:
        """The sizes of the pivots that SciPy finds."""
        return np.asarray(abs(np.diag(self.factors[0])))

    @functools.cached_property
    def factors(self) -> tuple[Matrix, Matrix]:
        """L and U, packed, and the pivots that SciPy finds."""
        from scipy import linalg

        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            lu, piv = linalg.lu_factor(self.a, check_finite=False)
        return np.asarray(lu), np.asarray(piv)

    @functools.cached_property
    def lower(self) -> Matrix:
        """L of Cholesky's factorisation, as SciPy finds it, in a's order of memory; LinAlgError where there is none."""
        from scipy import linalg

        order: Any = "F" if self.a.flags.f_contiguous else "C"
        return np.array(linalg.cholesky(self.a, lower=True, check_finite=False), order=order)

    def error(self, answer: FactorAnswer) -> float:
        """The backward error of what was returned."""
        if self.operation == "lu":
            return lu_error(self.a, answer.result, by_lines=True)
        if self.operation in SOLUTIONS:
            return solution_error_by_rows(self.a, answer.result, self.b, *self.factors)
        return cholesky_error(self.a, answer.result, by_lines=True)


def _nothing(stage: str, arrays: Mapping[str, Any]) -> None:
    """A hook that leaves all as it is."""


def _on_host(result: Any) -> Any:
    """Arrays, or a pair of them, of NumPy; None stays."""
    if isinstance(result, tuple):
        return tuple(_on_host(x) for x in result)
    return None if result is None else to_host(result)


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


def at_visit(plan: Plan, visits: int, steps: int = 0) -> Plan:
    """A plan with its visit drawn, from its seed, among those at which its site is there, unless it names one.

    Parameters
    ----------
    plan : Plan
    visits, steps : int
        Of the stage of its site, and of the factorisation: see `Site.among`.

    Raises
    ------
    ValueError
        If there is none: the matrix is factored in too few steps.
    """
    steps = max(visits, steps)
    among = SITES[plan.site].among(visits, steps)
    if plan.visit:
        return plan
    if not among:
        raise ValueError(
            f"{plan.site} is not there in a factorisation of {steps} steps: choose a smaller block, or a larger matrix"
        )
    return replace(plan, visit=int(np.random.default_rng([*plan.seed, 0x51]).choice(among)))


def rms(x: Matrix) -> float:
    """The root mean square of an array."""
    return math.sqrt(float(np.mean(np.square(x.astype(np.float64))))) or 1.0
