"""Trials of protected products: one pair of operands, one oracle, and many faults."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from abft_tsm2.arrays import bit_pattern, dtype_name, is_cupy
from abft_tsm2.faults.injection import Injector
from abft_tsm2.faults.judge.oracle import Reference
from abft_tsm2.faults.judge.product import Assessment, Judge, Promise
from abft_tsm2.faults.operands.products import operands, require_family
from abft_tsm2.faults.plan import Plan, require_known
from abft_tsm2.faults.recorded import OF_WORDS
from abft_tsm2.faults.sites import DEVICE_SITES, FUNCTION_SITES, GRAPH_SITES, PRODUCT_SITES, SITES
from abft_tsm2.faults.trials.schemes import GemmHook, Scheme, SchemeAnswer, SchemeCall, faulty, refused, scheme_of
from abft_tsm2.faults.trials.trial import Finding, Trial, TrialGroup, Workload, drawn_from, quiet
from abft_tsm2.report import Fault, Report, Status

Array = Any
Layout = Callable[[Any, int, int, Any], Array | None]

LAYOUTS: Mapping[str, Layout] = {
    "none": lambda xp, m, n, dtype: None,
    "C": lambda xp, m, n, dtype: xp.zeros((m, n), dtype),
    "F": lambda xp, m, n, dtype: xp.zeros((n, m), dtype).T,
    "strided": lambda xp, m, n, dtype: xp.zeros((2 * m, 3 * n), dtype)[::2, 1::3],
    "part": lambda xp, m, n, dtype: xp.zeros((m + 3, n + 5), dtype)[2 : m + 2, 4 : n + 4],
    "transposed": lambda xp, m, n, dtype: xp.zeros((n + 5, m + 3), dtype)[4 : n + 4, 2 : m + 2].T,
    "negative": lambda xp, m, n, dtype: xp.zeros((m, n), dtype)[::-1, ::-1],
}
"""Functions of the array module, m, n and a type that make an array to write to, or None for none."""


def require_possible(operation: str, scheme: str, plan: Plan) -> None:
    """ValueError where a product that is protected so has no such site."""
    kind = scheme_of(scheme)
    require_known("site", plan.site, SITES)
    there: tuple[str, ...] = PRODUCT_SITES if kind.own else FUNCTION_SITES
    if kind.captured:
        there = tuple(GRAPH_SITES) if plan.model in OF_WORDS else ()
    if kind.own and scheme != "encoded":  # what is encoded only now was not stored with its checksums
        there = tuple(site for site in there if not site.endswith(".stored"))
    if plan.site not in there or plan.model not in SITES[plan.site].models:
        raise ValueError(f"{plan.model} at {plan.site!r} cannot be planted into a product under scheme {scheme!r}")


def require_scheme(operation: str, scheme: str, options: Mapping[str, Any]) -> None:
    """ValueError for a scheme that there is not, or that puts its result where it wants."""
    kind = scheme_of(scheme)
    if options and (not kind.own or scheme == "stacked"):
        raise ValueError(f"scheme {scheme!r} has no options: leave out {', '.join(options)}")


def require_library(scheme: str, library: str) -> None:
    """ValueError for a scheme that is for arrays of another library."""
    if scheme_of(scheme).captured and library != "cupy":
        raise ValueError(f"scheme {scheme!r} is for a GPU: say --device gpu")


def require_workload(workload: Workload) -> None:
    """ValueError for a family or an option that does not exist."""
    require_family(workload.family)
    for name, given in workload.options:
        require_known("option of gemm", name, ("out",))
        for one in drawn_from(given):
            require_known("layout", one, LAYOUTS)


@dataclass
class _GemmRun:
    """A trial that has been carried out and not judged yet."""

    trial: Trial
    answer: SchemeAnswer
    bit: int
    seconds: float
    error: str = ""


class GemmTrials(TrialGroup):
    """Operands, their product without a fault, and the judge of what faults make of it.

    Raises
    ------
    ArithmeticError
        If the product is wrong without any fault.
    """

    def __init__(self, workload: Workload, xp: Any) -> None:
        self.xp = xp
        self.A, self.B = operands(workload, xp)
        self._seed, self._layouts = workload.seed, dict(workload.options).get("out", "none")
        self._runners: dict[tuple[str, str], _GemmRunner] = {}

    def one(self, trial: Trial) -> Finding:
        return next(self.run([trial]))

    def run(self, trials: Sequence[Trial], batch: int = 16) -> Iterator[Finding]:
        """Carry out trials, those of one scheme together, and judge them in their order."""
        for start in range(0, len(trials), batch):
            some = trials[start : start + batch]
            found: dict[int, Finding] = {}
            kinds = [(trial.scheme, self._layout(trial)) for trial in some]
            for kind in dict.fromkeys(kinds):
                mine = [trial for trial, of in zip(some, kinds, strict=True) if of == kind]
                found.update(zip((trial.number for trial in mine), self._runner(*kind).judged(mine), strict=True))
            for trial in some:
                yield found[trial.number]

    def _layout(self, trial: Trial) -> str:
        """The name of the layout of ``out``; of several one is drawn."""
        if isinstance(self._layouts, str):
            return self._layouts
        return str(np.random.default_rng([*self._seed, trial.number, 0x1A7]).choice(self._layouts))

    def _runner(self, scheme: str, layout: str) -> _GemmRunner:
        kind = (scheme, layout)
        if kind not in self._runners:
            default = None if scheme_of(scheme).own else self._runner("protected", layout)
            expected = next((other.judge.expected for other in self._runners.values()), None)
            self._runners[kind] = _GemmRunner(self.A, self.B, scheme, LAYOUTS[layout], self.xp, default, expected)
        return self._runners[kind]


class _GemmRunner:
    """One scheme on the operands of a group, and what it promises.

    `default` is the runner whose promise counts for schemes that make none, so that all are judged alike; `expected`
    the product in more precision, where it is known.
    """

    def __init__(
        self,
        A: Array,
        B: Array,
        scheme: str,
        layout: Layout,
        xp: Any,
        default: _GemmRunner | None,
        expected: Reference | None,
    ) -> None:
        self.A, self.B, self.xp = A, B, xp
        self.scheme: Scheme = scheme_of(scheme)
        self.layout, self.default, self.shape = layout, default, (A.shape[0], B.shape[1])
        self.keep: dict[str, Any] = {}
        self.limit: float | None = None
        seen: list[Array] = []
        with quiet(), np.errstate(all="ignore"):
            answer, _, _ = self._call((), seen.append)
        if not seen:
            raise ArithmeticError(f"scheme {scheme!r} computed no product")
        clean, returned = seen[0], seen[0] if answer.C is None else answer.C
        if dtype_name(clean.dtype) == dtype_name(returned.dtype):
            returned = clean
        self.judge = Judge(A, B, clean, returned, xp, tf32=scheme == "tf32", expected=expected)
        self.clean, self.returned = clean, returned
        checks = () if answer.report is None else answer.report.checks
        self.checks = checks
        if default is not None:
            self.limit = default.limit
        elif checks:
            self.limit = min(check.detection_limit for check in checks) / (self.judge.rms or 1.0)

    @cached_property
    def sharpness(self) -> float | None:
        """Of the less sharp side; None of schemes that make no promise."""
        return max((promise.sharpness for promise in self.promises), default=None) if self.default is None else None

    @cached_property
    def promises(self) -> list[Promise]:
        """What is promised to be found of faults."""
        return self.judge.promise(self.checks) if self.default is None else self.default.promises

    def judged(self, trials: Sequence[Trial]) -> list[Finding]:
        """Carry out a batch, and judge it."""
        xp, shape = self.xp, (len(trials), *self.clean.shape)
        seen = xp.empty(shape, self.clean.dtype)
        # Where a product is not rounded last, that what is checked is also what comes back.
        came = xp.empty(shape, self.returned.dtype)
        bit_pattern(seen)[...], bit_pattern(came)[...] = bit_pattern(self.clean), bit_pattern(self.returned)
        runs = []
        with quiet(), np.errstate(all="ignore"):
            for slot, trial in enumerate(trials):
                runs.append(self._one(trial, bit_pattern(seen)[slot], bit_pattern(came)[slot]))
        faults = any(trial.plans for trial in trials)
        assessed = self.judge(seen, came, self.promises if faults else ())
        return [self._finding(run, assessed, slot) for slot, run in enumerate(runs)]

    def _one(self, trial: Trial, seen: Array, came: Array) -> _GemmRun:
        """One trial; its products are written to `seen` and `came`."""
        first = True

        def watch(C: Array) -> None:
            nonlocal first
            if first:
                seen[...] = bit_pattern(C)
            first = False

        try:
            answer, injector, seconds = self._call(trial.plans, watch)
        except Exception as error:
            return _GemmRun(trial, SchemeAnswer(None), -1, 0.0, f"{type(error).__name__}: {error}")
        if answer.C is not None:
            came[...] = bit_pattern(answer.C)
        # A fault of a repair, or of evidence, has no place where none was needed.
        lost = [plan.site for plan in injector.missing() if SITES[plan.site].stage not in ("corrected", "repeated")]
        if lost:
            return _GemmRun(trial, answer, -1, seconds, f"nothing was planted at {', '.join(lost)}")
        return _GemmRun(trial, answer, injector.bit, seconds)

    def _call(self, plans: tuple[Plan, ...], watch: Any) -> tuple[SchemeAnswer, Injector, float]:
        """The product under this scheme, with faults; the seconds that it took."""
        injector = Injector(*plans)
        A, B = self.A, self.B
        if self.scheme.own:  # which are given the live operands; an encoded one is a copy already
            hit = {plan.site.partition(".")[0] for plan in plans}
            A, B = (x.copy(order="K") if name in hit else x for name, x in (("A", A), ("B", B)))
        multiply = refused if self.scheme.own else faulty(injector, self.xp, watch)
        out = self.layout(self.xp, *self.shape, A.dtype)
        call = SchemeCall(A, B, self.xp, GemmHook(injector, watch), multiply, self.keep, out)
        call.hooked = is_cupy(A) and any(plan.site not in DEVICE_SITES for plan in plans)
        begun = time.perf_counter()
        answer = self.scheme.run(call)
        if is_cupy(A) and not self.scheme.own:
            self.xp.cuda.get_current_stream().synchronize()
        return answer, injector, time.perf_counter() - begun

    # ---- what became of it ----

    def _finding(self, run: _GemmRun, assessed: Assessment, slot: int) -> Finding:
        a, answer, report = assessed, run.answer, run.answer.report
        found = Finding("", answer.status, run.bit, seconds=run.seconds, limit=self.limit, report=report)
        found.sharpness = self.sharpness
        if run.error:
            found.outcome, found.note = "crash", run.error
            return found
        wrong = answer.C is not None and bool(a.wrong[slot])
        if not run.trial.plans:
            alarmed = answer.C is None or answer.found or answer.status == "UNVERIFIABLE"
            found.outcome = "sdc" if wrong else "false_alarm" if alarmed else "clean"
            found.closest = None if report is None else report.closest
        else:
            found.size, found.relative = _number(a.size[slot]), _number(a.relative[slot])
            found.outcome = self._outcome(answer, a, slot, wrong)
            found.chance = float(a.chance[slot]) ** self.scheme.seeds or None
            found.note = a.reasons[slot] if found.outcome == "cancelled" else ""
            if answer.found and report is not None and a.places[slot].shape[1]:
                found.located = located(report, a.places[slot], a.touched[slot])
        return found

    def _outcome(self, answer: SchemeAnswer, a: Assessment, slot: int, wrong: bool) -> str:
        if answer.C is None:
            return "detected"
        if not wrong:
            return "corrected" if answer.found else "masked"
        if a.unexplained[slot]:
            return "sdc"
        return "cancelled" if a.hidden[slot] else "below_bound"


def _number(x: Any) -> float:
    return math.inf if math.isnan(x) else float(x)


def located(report: Report, places: Any, touched: Any) -> str:
    """Whether a report names the elements that were changed: "exact", "covered" or "wrong"; empty where it names an
    operand in their place, or says that operands have changed.

    Parameters
    ----------
    report : Report
    places : (2, c) int array
        Rows and columns of those that it has to name.
    touched : (2, t) int array
        Those of all that were changed: it may name these, too.
    """
    if not report.faults and report.status is not Status.CORRECTED:
        return ""  # a result that is refused, as where operands changed before anyone waited: nothing is placed
    named = [fault for fault in report.faults if fault.operand == "C"]
    elsewhere = "" if any(fault.operand in ("A", "B") for fault in report.faults) else "wrong"
    if not named:
        return elsewhere
    cells = [_cells(fault, report.m, report.n) for fault in named]
    those = np.concatenate(cells)
    if not np.isin(_numbers(places, report.n), those).all():
        return elsewhere
    owner = np.repeat(np.arange(len(named)), [one.size for one in cells])
    found = np.bincount(owner[np.isin(those, _numbers(touched, report.n))], minlength=len(named))
    return "exact" if (found >= [fault.elements for fault in named]).all() else "covered"


def _cells(fault: Fault, m: int, n: int) -> Any:
    """The elements of an m x n matrix where the fault is said to be, numbered."""
    rows, columns = (np.array(names or range(size)) for names, size in ((fault.rows, m), (fault.columns, n)))
    return (rows[:, None] * n + columns).ravel()


def _numbers(places: Any, n: int) -> Any:
    return places[0].astype(np.int64) * n + places[1]


GROUP = GemmTrials  # what a campaign asks a module of trials for
