"""What a factorisation or a solution has found, done and taken in time, until it becomes a report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NoReturn

import numpy as np

from abft_tsm2.arrays import Array, float_type, is_cupy, namespace, to_host
from abft_tsm2.core.cublas import TF32_FORCED, forces_tf32
from abft_tsm2.linalg.evidence import Evidence
from abft_tsm2.report import Check, Fault, Report, Status, by_precedence

SMALLEST = 5e-324  # above zero
ROUNDS = 3  # repairs before giving up
FACTORS = "LU"  # how faults in W are named: the packed factors, rows in their present order
AGAIN = "computed again from A"
CHANGED = "A is not what was encoded: it changed while it was factored; pass it once more"
SUBNORMAL = (
    "it is subnormal, or nearly so: LAPACK does not divide by a pivot so small, and its factors are not those of a; "
    "multiply a by a power of two"
)


class Origin(Enum):
    """Where the numbers that are checked come from."""

    COMPUTED = "a step of the factorisation"
    RECOMPUTED = "a repair: they may round in a pattern, up to the rigorous bound"
    PROVED = "evidence has shown that they are right: their sums are kept whatever they are"


class FactorOutcome(Enum):
    """What the sums say of finished factors."""

    CERTIFIED = "their product is A"
    CHANGED = "some lines are not what they were when they were checked"
    SUSPECTED = "some lines may be wrong, or their sums would not show it: evidence decides"
    DISAGREES = "their product is not A"


class Unrepairable(Exception):
    """A repair did not lead to an agreement; the message says where."""


class InputChanged(Unrepairable):
    """A is not what was encoded."""


class Overflowed(Exception):
    """Recomputation gives numbers beyond the type's range again: the factors themselves are not finite."""


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass
class Findings:
    """What was found on the way, for the report.

    Attributes
    ----------
    suspicions : int
        Failed checks of what evidence has shown to be right.
    multiplications : float
        Those done again by repairs.
    restarted : bool
        Whether a factorisation that stayed wrong was done again from A.
    decided : bool
        Whether all that was computed from an operand after a suspicion counts: the operand is what was encoded.
    """

    statuses: list[Status] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    suspicions: int = 0
    multiplications: float = 0.0
    restarted: bool = False
    decided: bool = True

    def copy(self) -> Findings:
        """What was found so far."""
        return replace(self, statuses=[*self.statuses], faults=[*self.faults], reasons=[*self.reasons])

    def join(self, later: Findings) -> None:
        """Note as well what was found later."""
        self.statuses += later.statuses
        self.faults += later.faults
        self.reasons += later.reasons
        self.suspicions += later.suspicions
        self.multiplications += later.multiplications
        self.restarted |= later.restarted
        self.decided &= later.decided

    def restart(self, reason: str) -> None:
        """Note that the factorisation is done again from A, and why."""
        self.restarted = True
        self.reasons.append(f"restarted from A: {reason}")
        self.statuses.append(Status.CORRECTED)

    @property
    def any(self) -> bool:
        """Whether anything was suspected, or is to be said."""
        return bool(self.suspicions or self.statuses)

    def changed(self, name: str, reason: str) -> None:
        """Note that an operand is not what was encoded."""
        self.statuses.append(Status.INPUT_CHANGED)
        self.faults.append(Fault(name, "operand", (), (), 0, float("nan")))
        self.reasons.append(reason)

    def input_changed(self) -> NoReturn:
        """Note that A is not what was encoded, and raise InputChanged."""
        self.changed("A", CHANGED)
        raise InputChanged(CHANGED)

    def undecided(self, reason: str) -> None:
        """Note that nothing shows an operand to be what was encoded: nothing that rests on it is right, or repaired."""
        self.decided = False
        self.reasons.append(reason)

    def name_tf32(self, A: Array) -> None:
        """Name the variable behind factors and solutions of a GPU that cannot be right."""
        if Status.UNCORRECTABLE in self.statuses and is_cupy(A) and float_type(A).bits == 32 and forces_tf32():
            self.reasons.append(TF32_FORCED)

    def unverifiable(self, reason: str) -> None:
        self.statuses.append(Status.UNVERIFIABLE)
        self.reasons.append(reason)

    def wrong_sums(self, name: str, lines: Any, magnitude: float, repair: str = "computed again") -> None:
        """Note that a checksum was wrong in these lines, and by how much."""
        lines = tuple(int(i) for i in lines)
        self.statuses.append(Status.CHECKSUM_FAULT)
        self.faults.append(Fault(name, "checksum", lines, (), len(lines), magnitude, repair))

    def proved(self, found: Evidence) -> None:
        """Note that evidence has shown that what was suspected is right, or why it cannot be."""
        self.suspicions += 1
        if found.subnormal:
            column, pivot = found.subnormal
            self.unverifiable(f"the pivot of column {column} is {pivot:.3g}: {SUBNORMAL}")

    def convicted(self, found: Evidence, repair: str = AGAIN) -> None:
        """Note that evidence has shown elements of W to be wrong."""
        rows, columns = (tuple(sorted(int(i) for i in lines)) for lines in (found.rows, found.columns))
        self.faults.append(Fault(FACTORS, "block", rows, columns, found.count, found.magnitude, repair))

    def recomputed(self, found: Evidence | None) -> None:
        """Note what was computed again without a difference beyond rounding; what evidence said of it, if anything."""
        if found is None:
            self.suspicions += 1
        else:
            self.statuses.append(Status.CORRECTED)
            self.convicted(found)

    def refused(self, rows: tuple[int, ...], columns: tuple[int, ...], elements: int) -> None:
        """Note that W is wrong in these lines, and stays so."""
        self.statuses.append(Status.UNCORRECTABLE)
        self.faults.append(Fault(FACTORS, "block", rows, columns, max(1, elements), float("nan")))

    def wrong_elements(self, differ: Any, distance: Any, first: tuple[int, int]) -> None:
        """Note elements of W that were replaced: a boolean matrix, how far they were off, and where its corner lies."""
        count = int(np.count_nonzero(differ))
        if not count:
            return
        rows, columns = (tuple((np.flatnonzero(differ.any(axis=1 - side)) + first[side]).tolist()) for side in (0, 1))
        kind = "element" if count == 1 else "row" if len(rows) == 1 else "column" if len(columns) == 1 else "block"
        self.statuses.append(Status.CORRECTED)
        where = {"operand": FACTORS, "kind": kind, "rows": rows, "columns": columns, "elements": count}
        self.faults.append(Fault.made_of(**where, magnitude=largest(distance[differ]), repair=AGAIN))

    def _not_resting(self) -> list[Status]:
        """What is true whatever the operands are."""
        return [status for status in self.statuses if status not in (Status.CORRECTED, Status.CHECKSUM_FAULT)]

    def report(
        self, operation: str, sizes: tuple[int, int, int], dtype: str, seconds: dict[str, float], **more: Any
    ) -> Report:
        """The report of one factorisation or solution.

        `sizes`: L is m x k and U is k x n, or A m x k and the solution k x n. `more`: checks, mode.
        """
        m, k, n = sizes
        status, also = by_precedence(self.statuses if self.decided else [*self._not_resting(), Status.UNVERIFIABLE])
        return Report.made_of(
            status=status,
            operation=operation,
            m=m,
            k=k,
            n=n,
            dtype=dtype,
            faults=tuple(self.faults),
            suspicions=self.suspicions,
            recomputed=self.multiplications / max(1.0, factor_flops(m, n)),
            also=also,
            reasons=tuple(dict.fromkeys(self.reasons)),
            seconds=dict(seconds),
            restarted=self.restarted,
            **more,
        )


def factor_flops(m: int, n: int) -> float:
    """Floating-point operations of an LU of an m x n matrix."""
    k = min(m, n)
    return 2.0 * m * n * k - (m + n) * k * k + 2.0 * k**3 / 3


def check_of(side: str, residual: Array, bound: Array, weight: Array) -> Check:
    """What the check of a side says in a report; `weight`: of the elements that its sums add up."""
    xp, lines = namespace(residual), int(residual.shape[0])
    if lines == 0:
        return Check(side, 1, 0, 0, 0.0, 0.0, -1, 0.0)
    with np.errstate(all="ignore"):
        ratio = xp.abs(residual) / bound
        ratio = xp.where((residual == 0) & (bound == 0), xp.zeros_like(ratio), ratio)
        ratio = xp.where(ratio <= 1, ratio, xp.full_like(ratio, -1.0))  # evidence has decided about these lines
        bounds = to_host(bound)
        known = bounds[~np.isnan(bounds)]  # of the other lines, evidence alone
        middle = float(np.partition(known, known.size // 2)[known.size // 2]) if known.size else math.nan
        limit = float(np.divide(middle, float(xp.min(xp.abs(weight))) if weight.shape[0] else 1.0))
    worst, verified = int(xp.argmax(ratio)), int(xp.sum(xp.astype(ratio >= 0, xp.int64)))
    if not verified:
        return _check(side, lines, 0, middle, 0.0, -1, limit)
    return _check(side, lines, verified, middle, float(ratio[worst]), worst, limit)


def check_of_clean(side: str, size: Any, bound: Any, least: float) -> Check:
    """`check_of` lines on the host all of which are within their bounds; `size`: moduli of the residuals, `least`: of
    the weights."""
    lines = size.size
    ratio = size / np.maximum(bound, SMALLEST)
    worst, middle = int(ratio.argmax()), float(np.partition(bound, lines // 2)[lines // 2])
    return _check(side, lines, lines, middle, float(ratio[worst]), worst, middle / least if least else math.inf)


def _check(side: str, lines: int, verified: int, bound: float, ratio: float, line: int, limit: float) -> Check:
    """Of Python's own numbers, which need no conversion."""
    found = {"closest": ratio, "closest_line": line, "detection_limit": limit}
    return Check.made_of(side=side, vectors=1, lines=lines, verified=verified, bound=bound, **found)


def check_of_steps(side: str, seen: list[tuple[Array, Array]], weight: Array) -> Check:
    """`check_of` the residuals and bounds of all steps."""
    residual, bound = (namespace(weight).concat([x[part] for x in seen] or [weight[:0]]) for part in (0, 1))
    return check_of(side, residual, bound, weight)


def differing(old: Array, new: Array, bound: Array) -> tuple[Any, Any]:
    """Where old is not new but for rounding, and how far off it is: boolean and float64 arrays on the host."""
    with np.errstate(all="ignore"):
        distance = np.abs(to_host(old) - to_host(new))
        limit = to_host(bound)
        return ~((distance <= limit) & np.isfinite(limit)), distance


def largest(x: Any) -> float:
    """max |x|, NaN where there is one, 0 where there is nothing."""
    return float(np.max(np.abs(x), initial=0.0))
