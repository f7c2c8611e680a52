"""What was found and done in a factorisation, until it becomes a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, to_host
from abft_tsm2.linalg.evidence import Evidence
from abft_tsm2.report import Fault, Status

ROUNDS = 3  # repairs before giving up
FACTORS = "LU"  # how faults in W are named: the packed factors, rows in their present order
AGAIN = "computed again from A"
SUBNORMAL = (
    "it is subnormal, or nearly so: LAPACK does not divide by one so small, and its factors are not those of a; "
    "multiply a by a power of two"
)


def differing(old: Array, new: Array, bound: Array) -> tuple[Any, Any]:
    """Where old is not new but for rounding, and how far off it is: boolean and float64 arrays on the host."""
    with np.errstate(all="ignore"):
        distance = np.abs(to_host(old) - to_host(new))
        limit = to_host(bound)
        return ~((distance <= limit) & np.isfinite(limit)), distance


def largest(x: Any) -> float:
    """max |x|, NaN where there is one, 0 where there is nothing."""
    return float(np.max(np.abs(x), initial=0.0))


class Unrepairable(Exception):
    """A repair did not lead to an agreement; the message says where."""


class Overflowed(Exception):
    """Recomputation gives numbers beyond the type's range again: the factors themselves are not finite."""


@dataclass
class Findings:
    """What was found on the way, for the report."""

    statuses: list[Status] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    suspicions: int = 0
    multiplications: float = 0.0

    def wrong_sums(self, name: str, lines: Any, magnitude: float, repair: str = "computed again") -> None:
        lines = tuple(int(i) for i in lines)
        self.statuses.append(Status.CHECKSUM_FAULT)
        self.faults.append(Fault(name, "checksum", lines, (), len(lines), magnitude, repair))

    def proved(self, found: Evidence) -> None:
        """Evidence has shown that what was suspected is right, or why it cannot be."""
        self.suspicions += 1
        if found.subnormal:
            column, pivot = found.subnormal
            self.statuses.append(Status.UNVERIFIABLE)
            self.reasons.append(f"the pivot of column {column} is {pivot:.3g}: {SUBNORMAL}")

    def convicted(self, found: Evidence, repair: str = AGAIN) -> None:
        """Evidence has shown elements of W to be wrong."""
        rows, columns = (tuple(sorted(int(i) for i in lines)) for lines in (found.rows, found.columns))
        self.faults.append(Fault(FACTORS, "block", rows, columns, found.count, found.magnitude, repair))

    def wrong_elements(self, differ: Any, distance: Any, first: tuple[int, int]) -> None:
        """Elements of W that were replaced: a boolean matrix, how far they were off, and where its corner lies."""
        i, c = np.nonzero(differ)
        if not i.size:
            return
        rows = tuple(np.unique(i + first[0]).tolist())
        columns = tuple(np.unique(c + first[1]).tolist())
        kind = "element" if i.size == 1 else "row" if len(rows) == 1 else "column" if len(columns) == 1 else "block"
        self.statuses.append(Status.CORRECTED)
        self.faults.append(Fault(FACTORS, kind, rows, columns, int(i.size), largest(distance[differ]), AGAIN))
