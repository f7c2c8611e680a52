"""What was found and done in a factorisation, until it becomes a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.report import Fault, Status

FACTORS = "LU"  # how faults in W are named: the packed factors, rows in their present order
AGAIN = "computed again from A"


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

    def wrong_elements(self, differ: Any, distance: Any, first: tuple[int, int], rows: Any = None) -> None:
        """Elements of W that were replaced: a boolean matrix, how far they were off, and where its corner lies."""
        i, c = np.nonzero(differ)
        if not i.size:
            return
        rows = tuple(np.unique(i + first[0]).tolist()) if rows is None else tuple(rows)
        columns = tuple(np.unique(c + first[1]).tolist())
        kind = "element" if i.size == 1 else "row" if len(rows) == 1 else "column" if len(columns) == 1 else "block"
        with np.errstate(all="ignore"):
            largest = float(np.max(distance[differ]))
        self.statuses.append(Status.CORRECTED)
        self.faults.append(Fault(FACTORS, kind, rows, columns, int(i.size), largest, AGAIN))
