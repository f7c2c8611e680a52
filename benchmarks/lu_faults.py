"""Faults planted in protected factorisations: what is repaired, what is refused, what escapes.

    python -m benchmarks.lu_faults                        20000 faults and more, on all cores
    python -m benchmarks.lu_faults --only 17              those of matrix 17 again, with their reports
    python -m benchmarks.lu_faults --only 17 --kind NaN   of these the kinds whose name contains NaN

Faults are planted through on_stage: see `benchmarks.lu_plans` for what, where and when. The judge does not believe the
report: it takes the backward error of what was returned, relative to that of the same call without a fault. A fault is

    repaired      the report says so, and the error is up to 20 times what it is without a fault
    harmless      the same, and the report says that nothing was found
    refused       no result, or one that its report says not to use
    escaped       a result that is worse: by more than 20 times, and by more than 1000
    crashed       any other exception, or the process ended

No fault may escape, and of those that are not harmless 99.5 % must be repaired; a fault in A itself may be refused. Of
random bits some are in between what is seen and what is harmless: 2 % may escape, by no more than 1000 times. Writes
results/lu_faults.csv; the exit code is 1 where this is broken. Ctrl-C keeps what is done.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

import abft_tsm2
from abft_tsm2 import Report, SilentDataCorruptionError, Status, errstate
from benchmarks import tables
from benchmarks.lu_judge import OUTCOMES, cholesky_error, lu_error, outcome, ratio, solution_error
from benchmarks.lu_plans import PLANS, Plan, Watch
from benchmarks.lu_runs import Lost, Progress, common_options, spread
from tests.lu_matrices import MATRICES, Matrix

FAMILIES = (
    *("normal", "uniform", "graded", "positive definite"),
    *("condition 1e10", "sparse", "toeplitz", "dominant"),
)
OPERATIONS = {"lu": "protected_lu_factor", "solve": "protected_solve", "cholesky": "protected_cholesky"}
REPAIRED, MAY_ESCAPE = 0.995, 0.02
LOST = "no fault, or the process was lost"


def planned() -> list[tuple[int, Plan]]:
    """The plans that this package has an operation for, numbered among all."""
    return [(number, plan) for number, plan in enumerate(PLANS) if hasattr(abft_tsm2, OPERATIONS[plan.operation])]


@dataclass(frozen=True)
class Case:
    """One matrix, in which every kind of fault is planted; everything follows from the seed and the index."""

    seed: int
    index: int
    family: str
    a: Matrix
    block: int

    @classmethod
    def draw(cls, seed: int, index: int) -> Case:
        """Families take turns, and the types."""
        rng = np.random.default_rng([seed, index])
        family, dtype = FAMILIES[index % len(FAMILIES)], ("float64", "float32")[index // len(FAMILIES) % 2]
        n, block = int(rng.integers(96, 321)), int(rng.choice([16, 24, 32, 48]))
        a = np.asarray(MATRICES[family](n, rng, dtype), order=str(rng.choice(["C", "F"])))  # type: ignore[call-overload]
        return cls(seed, index, family, a, block)

    @cached_property
    def b(self) -> Matrix:
        """A right-hand side."""
        rng = np.random.default_rng([self.seed, self.index, len(self.a)])
        return np.asarray(rng.standard_normal(len(self.a)), self.a.dtype)

    @cached_property
    def definite(self) -> Matrix:
        """What Cholesky's method is for: products of A's rows, scaled to 1, and a diagonal."""
        wide = self.a.astype(np.float64)
        wide /= np.sqrt((wide * wide).sum(1, keepdims=True))
        return np.asarray(wide @ wide.T + 1e-3 * np.eye(len(wide)), self.a.dtype)

    def run(self, operation: str, mode: str, hook: Watch) -> tuple[float, Report]:
        """Call what is protected, and return the backward error of its result with the report."""
        options: dict[str, Any] = {"return_report": True, "on_stage": hook}
        function: Callable[..., Any] = getattr(abft_tsm2, OPERATIONS[operation])
        with warnings.catch_warnings(), np.errstate(all="ignore"), errstate(unverifiable="ignore"):
            warnings.simplefilter("ignore")
            if operation == "lu":
                result, report = function(self.a.copy("K"), mode=mode, block=self.block, **options)
                return lu_error(self.a, result), report
            if operation == "solve":
                result, report = function(self.a.copy("K"), self.b.copy(), assume_a="gen", **options)
                return solution_error(self.a, result, self.b), report
            result, report = function(self.definite.copy(), lower=True, block=self.block, **options)
            return cholesky_error(self.definite, result), report

    def __str__(self) -> str:
        n, order = len(self.a), "C" if self.a.flags.c_contiguous else "F"
        return f"{self.index}: {self.family} {self.a.dtype.name} {n}x{n} {order} block={self.block}"


class Planted(NamedTuple):
    """What became of one fault."""

    operation: str
    kind: str
    dtype: str
    outcome: str
    ratio: float
    text: str


def plant(case: Case, kind: str = "") -> Iterator[Planted]:
    """Plant the faults whose kind contains a text, one at a time; those that change no bit are left out."""
    references: dict[tuple[str, str], tuple[float, int]] = {}
    for number, plan in planned():
        if kind not in plan.kind:
            continue
        run = plan.operation, plan.mode
        if run not in references:
            watch = Watch()
            error, report = case.run(*run, watch)
            if report.status is not Status.CLEAN or not math.isfinite(error):
                raise RuntimeError(f"{case}: wrong without any fault, error {error}: see benchmarks.lu_clean\n{report}")
            references[run] = error, watch.steps
        error, steps = references[run]
        for repeat in range(plan.times):
            rng = np.random.default_rng([case.seed, case.index, number, repeat])
            found = _planted(case, plan, Watch(plan, plan.step(steps, rng), rng), error)
            if found is not None:
                yield found


def _planted(case: Case, plan: Plan, watch: Watch, without_fault: float) -> Planted | None:
    times: float | None = None
    try:
        error, report = case.run(plan.operation, plan.mode, watch)
        times = ratio(error, without_fault, case.a.dtype)
    except SilentDataCorruptionError as refusal:
        report = refusal.report
    except Exception as error:
        text = f"{case}; {plan.operation} {plan.kind}: {type(error).__name__}: {error}"
        return Planted(plan.operation, plan.kind, case.a.dtype.name, "crashed", 0.0, text)
    if not watch.changed:
        return None
    found = outcome(times, report)
    size = "" if times is None else f", error x {times:.3g}"
    text = f"{case}; {plan.operation} {plan.kind}{watch.where}: {found}{size}: {report}"
    return Planted(plan.operation, plan.kind, case.a.dtype.name, found, times or 0.0, text)


def one(seed: int, kind: str, index: int) -> list[Planted]:
    """What a process does."""
    case, found = Case.draw(seed, index), list[Planted]()
    try:
        for fault in plant(case, kind):
            found.append(fault)
    except Exception as error:
        found.append(_lost(case, f"{type(error).__name__}: {error}"))
    return found


def _lost(case: Case, reason: str) -> Planted:
    return Planted("lu", LOST, case.a.dtype.name, "crashed", 0.0, f"{case}; {reason}")


class Campaign:
    """Counts of the faults by operation, kind and type, and what is to be said of those that went wrong."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str, str], Counter[str]] = {}
        self.worst: dict[tuple[str, str, str], float] = {}
        self.told: dict[tuple[str, str], list[tuple[int, str]]] = {}

    def add(self, index: int, fault: Planted) -> None:
        at = fault.operation, fault.kind, fault.dtype
        tally = self.counts.setdefault(at, Counter())
        tally["planted"] += 1
        tally[fault.outcome] += 1
        if fault.outcome == "escaped1000":
            tally["escaped20"] += 1
        if fault.outcome != "refused":
            self.worst[at] = max(self.worst.get(at, 0.0), fault.ratio)
        if fault.outcome not in ("repaired", "harmless"):
            self.told.setdefault(at[:2], []).append((index, fault.text))
        if fault.outcome in ("escaped20", "escaped1000", "crashed"):
            print(f"{fault.outcome.upper()} {fault.text}", flush=True)

    @property
    def planted(self) -> int:
        return sum(tally["planted"] for tally in self.counts.values())

    @property
    def escaped(self) -> int:
        return sum(tally["escaped20"] + tally["crashed"] for tally in self.counts.values())

    def rows(self) -> list[dict[str, Any]]:
        """In the order of the plans."""
        place = {(plan.operation, plan.kind): number for number, plan in enumerate(PLANS)}
        order = sorted(self.counts, key=lambda at: (place.get(at[:2], -1), at[2]))
        return [
            {
                **dict(zip(("operation", "kind", "dtype"), at, strict=True)),
                **{name: self.counts[at][name] for name in ("planted", *OUTCOMES)},
                "worst": f"{self.worst.get(at, 0.0):.3g}",
            }
            for at in order
        ]

    def never(self, kind: str) -> list[str]:
        """Kinds that were asked for and changed nothing: their stage or array is not there."""
        there = {at[:2] for at in self.counts}
        wanted = [(plan.operation, plan.kind) for _, plan in planned() if kind in plan.kind]
        return [" ".join(at) for at in wanted if at not in there]


def missed(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """Operation and kind of the faults that miss their bar, and how.

    Repairs are counted of both types together; random bits that escape of one type, wherever they were planted.
    """
    plans = {(plan.operation, plan.kind): plan for plan in PLANS}
    groups: dict[tuple[str, str], Counter[str]] = {}
    bits: dict[tuple[str, str], Counter[str]] = {}
    found: dict[tuple[str, str], str] = {}
    for row in rows:
        at = row["operation"], row["kind"]
        counts = Counter({name: int(row[name]) for name in ("planted", *OUTCOMES)})
        groups.setdefault(at, Counter()).update(counts)
        if at in plans and plans[at].gradual:
            bits.setdefault((row["operation"], row["dtype"]), Counter()).update(counts)
    for at, counts in groups.items():
        reasons = [f"{counts['crashed']} crashed"] if counts["crashed"] else []
        if at in plans and plans[at].gradual:
            reasons += [f"{counts['escaped1000']} escaped by more than 1000 times"] if counts["escaped1000"] else []
        else:
            reasons += [f"{counts['escaped20']} escaped"] if counts["escaped20"] else []
            harmful, repaired = counts["planted"] - counts["harmless"], counts["repaired"]
            if repaired < REPAIRED * harmful and not (at in plans and plans[at].refusable):
                refused = f"{counts['refused']} refused" if counts["refused"] else "none refused"
                reasons.append(f"{repaired} of {harmful} repaired (at least {REPAIRED:.1%}), {refused}")
        if reasons:
            found[at] = ", ".join(reasons)
    for (operation, dtype), counts in bits.items():
        share = counts["escaped20"] / counts["planted"]
        if share > MAY_ESCAPE:
            found[operation, f"all random bits, {dtype}"] = f"{share:.1%} escaped (at most {MAY_ESCAPE:.0%})"
    return found


def campaign(
    indices: Sequence[int], seed: int = 0, jobs: int = 0, kind: str = "", *, reports: bool = False
) -> tuple[Campaign, bool]:
    """Plant the faults of these matrices; whether it was interrupted."""
    found, progress = Campaign(), Progress("faults")
    try:
        for index, faults in spread(partial(one, seed, kind), indices, jobs):
            if isinstance(faults, Lost):
                faults = [_lost(Case.draw(seed, index), faults.reason)]
            for fault in faults:
                found.add(index, fault)
                if reports:
                    print(fault.text)
            progress(found.planted, found.escaped)
    except KeyboardInterrupt:
        return found, True
    return found, False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser, 20_000, "lu_faults")
    parser.add_argument("--kind", default="", metavar="TEXT", help="kinds of faults whose name contains TEXT")
    options = parser.parse_args(arguments)
    each = sum(plan.times for _, plan in planned() if options.kind in plan.kind)
    if not each:
        print(f"no kind is named like {options.kind!r}; there are {', '.join(plan.kind for _, plan in planned())}")
        return 2
    # Some change nothing, as a row exchanged with itself: a tenth more are planted.
    indices = options.only or range(math.ceil(1.1 * options.count / each))
    jobs = min(options.jobs, 1) if options.only else options.jobs
    found, stopped = campaign(indices, options.seed, jobs, options.kind, reports=bool(options.only))
    rows = found.rows()
    if rows and not options.only:
        tables.write(options.output, rows)
    for name in found.never(options.kind):
        print(f"never planted: {name}")
    total = {name: sum(row[name] for row in rows) for name in ("planted", *OUTCOMES)}
    print(f"{len(indices)} matrices: {', '.join(f'{count} {name}' for name, count in total.items())}")
    broken = missed(rows)
    for at, reason in broken.items():
        print(f"BAR MISSED {' '.join(at)}: {reason}")
        for index, text in sorted(found.told.get(at, [])):
            kind = "" if at[1] == LOST else f" --kind {at[1]!r}"
            again = f"--seed {options.seed} --only {index}{kind}"
            print(f"    python -m benchmarks.lu_faults {again}: {text.splitlines()[0]}")
    return 130 if stopped else int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
