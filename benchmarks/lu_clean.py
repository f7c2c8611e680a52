"""False alarms of protected factorisations: matrices that are hard to factor, and no fault.

    python -m benchmarks.lu_clean                        5000 factorisations, on all cores
    python -m benchmarks.lu_clean --count 200 --jobs 1   a quick look
    python -m benchmarks.lu_clean --only 1234 1235       these again, with their reports

Any status but CLEAN is a false alarm, a refusal too; but where SciPy's factors come near the ends of the type's range
a part may be unverifiable. The factors are compared with SciPy's: the pivots are the same unless two rows tie, and
max|PA - LU| / max(|L||U|) is of the same size. Writes results/lu_clean.csv; the exit code is 1 after an alarm, and
where factors are worse than SciPy's. Ctrl-C keeps what is done.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import abft_tsm2
from abft_tsm2 import Report, SilentDataCorruptionError, Status, errstate
from abft_tsm2.faults.judge.factor_oracle import MULTIPLIER, Matrix, backward_error, largest_multiplier, unit
from benchmarks import tables
from benchmarks.lu_judge import same_pivots
from benchmarks.lu_runs import Lost, Progress, common_options, spread
from tests.support.lu_matrices import MATRICES, NEAR_TIES, rectangular

Factors = tuple[Matrix, Matrix]
WORSE = 4.0
"""How many times SciPy's error, and how many units roundoff beside, the factors may be wrong by."""

BLOCKS = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Case:
    """One reproducible factorisation: everything follows from the seed and the index."""

    seed: int
    index: int
    family: str
    a: Matrix
    mode: str
    block: int | None

    @classmethod
    def draw(cls, seed: int, index: int) -> Case:
        """Matrices take turns, and the types; the rest is random."""
        rng = np.random.default_rng([seed, index])
        names = list(MATRICES)
        family, dtype = names[index % len(names)], ("float64", "float32")[index // len(names) % 2]
        m, n = _shape(rng)
        a = rectangular(family, m, n, rng, dtype)
        a = np.asarray(a, order=str(rng.choice(["C", "F"])))  # type: ignore[call-overload]
        mode = str(rng.choice(["online", "online", "offline", "auto"]))
        block = None if rng.random() < 0.4 else int(rng.choice(BLOCKS))
        return cls(seed, index, family, a, mode, block)

    def factor(self, **options: Any) -> tuple[Factors, Report]:
        """The protected factors and their report."""
        with errstate(unverifiable="ignore"), warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # singular ones are among them
            result: tuple[Factors, Report] = abft_tsm2.protected_lu_factor(
                self.a, mode=self.mode, block=self.block, return_report=True, **options
            )
        return result

    def __str__(self) -> str:
        m, n = self.a.shape
        order = "C" if self.a.flags.c_contiguous else "F"
        block = "" if self.block is None else f" block={self.block}"
        return f"{self.index}: {self.family} {self.a.dtype.name} {m}x{n} {order} mode={self.mode}{block}"


def _shape(rng: np.random.Generator) -> tuple[int, int]:
    """Mostly squares of the middle sizes; mistakes at the edges show in small ones, and in what is not square."""
    what = rng.random()
    if what < 0.12:
        m, n = rng.integers(1, 400, 2)
        return int(m), int(n)
    low, high = (1, 17) if what < 0.22 else (16, 301) if what < 0.95 else (512, 513) if what < 0.98 else (1024, 1025)
    n = rng.integers(low, high)
    return int(n), int(n)


@dataclass(frozen=True)
class Verdict:
    """What is said of one case; `alarm` and `wrong` are empty where nothing is wrong."""

    family: str
    dtype: str
    text: str
    alarm: str = ""
    wrong: str = ""
    suspicions: int = 0
    unverifiable: bool = False
    closest: float = 0.0
    pivots_differ: bool = False
    ratio: float = 0.0


def judge(case: Case) -> Verdict:
    """Factor a matrix, and compare with SciPy."""
    from scipy import linalg

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        theirs = linalg.lu_factor(case.a, check_finite=False)
    before = case.a.copy()
    factors: Factors | None = None
    try:
        factors, report = case.factor()
    except SilentDataCorruptionError as error:
        report = error.report
    excused = out_of_range(theirs[0])
    held = {report.status, *report.also}
    allowed = {Status.CLEAN, Status.UNVERIFIABLE} if excused else {Status.CLEAN}
    if factors is None and excused:
        allowed.add(Status.UNCORRECTABLE)
    wrong, ratio, differ = [], 0.0, False
    if not np.array_equal(before, case.a):
        wrong.append("the matrix was changed")
    if factors is not None and not (excused and not np.isfinite(factors[0]).all()):
        differ = not np.array_equal(factors[1], theirs[1])
        mine, reference = backward_error(before, *factors), backward_error(before, *theirs)
        u = unit(case.a.dtype)
        ratio = mine / max(reference, u)
        if not mine <= WORSE * (reference + u) and np.isfinite(reference):
            wrong.append(f"backward error {mine / u:.3g} u, SciPy's is {reference / u:.3g} u")
        if not largest_multiplier(factors[0]) <= MULTIPLIER:
            wrong.append("a multiplier above 1")
        if differ and case.family not in NEAR_TIES and not same_pivots(*factors, theirs[1]):
            wrong.append("other pivots than SciPy's, and no tie")
    return Verdict(
        case.family,
        case.a.dtype.name,
        f"{case}: {report}",
        alarm=", ".join(sorted(status.name for status in held - allowed)),
        wrong="; ".join(wrong),
        suspicions=report.suspicions,
        unverifiable=Status.UNVERIFIABLE in held or factors is None,
        closest=report.closest,
        pivots_differ=differ,
        ratio=ratio,
    )


def out_of_range(lu: Matrix) -> bool:
    """Whether factors come near the largest number of their type, or their squares near that of float64."""
    largest = float(abs(lu.astype(np.float64)).max(initial=0.0))
    return not largest <= min(1e-2 * float(np.finfo(lu.dtype).max), 0.1 * float(np.finfo(np.float64).max) ** 0.5)


def one(seed: int, index: int) -> Verdict:
    """What a process does; an exception is a failure of this case."""
    case = Case.draw(seed, index)
    try:
        return judge(case)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return Verdict(case.family, case.a.dtype.name, str(case), wrong=reason)


@dataclass
class Tally:
    """What happened to the matrices of one family and type."""

    factorisations: int = 0
    alarms: int = 0
    wrong: int = 0
    suspicions: int = 0
    unverifiable: int = 0
    closest: float = 0.0
    pivots_differ: int = 0
    worst_ratio: float = 0.0

    def add(self, verdict: Verdict) -> None:
        self.factorisations += 1
        self.alarms += bool(verdict.alarm)
        self.wrong += bool(verdict.wrong)
        self.suspicions += verdict.suspicions
        self.unverifiable += verdict.unverifiable
        self.closest = max(self.closest, verdict.closest)
        self.pivots_differ += verdict.pivots_differ
        self.worst_ratio = max(self.worst_ratio, verdict.ratio)


def sweep(
    indices: Iterable[int], seed: int = 0, jobs: int = 0, *, reports: bool = False
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """Factor the cases: rows of the table, one line for each failure, and whether it was interrupted."""
    tallies: dict[tuple[str, str], Tally] = {}
    failures: dict[int, str] = {}
    progress, stopped = Progress("factorisations"), False
    try:
        for done, (index, verdict) in enumerate(spread(partial(one, seed), indices, jobs), 1):
            if isinstance(verdict, Lost):
                case = Case.draw(seed, index)
                verdict = Verdict(case.family, case.a.dtype.name, str(case), wrong=verdict.reason)
            tallies.setdefault((verdict.family, verdict.dtype), Tally()).add(verdict)
            if verdict.alarm or verdict.wrong:
                what = " and ".join(filter(None, (verdict.alarm and f"FALSE ALARM {verdict.alarm}", verdict.wrong)))
                failures[index] = f"{what}: {verdict.text}"
                print(failures[index], flush=True)
            elif reports:
                print(f"as good as SciPy's, error x {verdict.ratio:.2g}: {verdict.text}")
            progress(done, len(failures))
    except KeyboardInterrupt:
        stopped = True
    rows = [{"family": family, "dtype": dtype, **vars(tally)} for (family, dtype), tally in sorted(tallies.items())]
    return rows, [f"--only {index}: {failures[index].splitlines()[0]}" for index in sorted(failures)], stopped


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_options(parser, 5000, "lu_clean")
    options = parser.parse_args(arguments)
    if options.only:
        rows, failures, stopped = sweep(options.only, options.seed, min(options.jobs, 1), reports=True)
        return 130 if stopped else int(bool(failures))
    rows, failures, stopped = sweep(range(options.count), options.seed, options.jobs)
    if not rows:
        return 130 if stopped else 0
    tables.write(options.output, rows)
    names = ("factorisations", "alarms", "suspicions", "unverifiable", "pivots_differ", "wrong")
    total = {key: sum(row[key] for row in rows) for key in names}
    closest, worst = (
        max((row[key], row["family"], row["dtype"]) for row in rows) for key in ("closest", "worst_ratio")
    )
    print(
        f"{total['factorisations']} clean factorisations: {total['alarms']} false alarms, {total['wrong']} wrong, "
        f"{total['suspicions']} suspicions cleared, {total['unverifiable']} unverifiable or refused where numbers "
        f"overflow, other pivots than SciPy's in {total['pivots_differ']}; closest residual {closest[0]:.3f} of its "
        f"bound ({closest[1]}, {closest[2]}), largest error {worst[0]:.2g} times SciPy's ({worst[1]}, {worst[2]})"
    )
    for line in failures:
        print(f"failure: --seed {options.seed} {line}")
    return 130 if stopped else int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
