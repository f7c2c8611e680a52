"""Write recomputed elements into C, and record the faults they repair for the report."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from abft_tsm2.arrays import from_host, namespace
from abft_tsm2.checksum.sides import Floats, Integers, Mask, Side
from abft_tsm2.report import Fault

RECOMPUTED, AGAIN = "recomputed in float64", "multiplied again"


@dataclass
class Written:
    """What has been replaced of C so far.

    Attributes
    ----------
    lines : dict
        By line, which of its elements.
    columns : set
        Columns that were recomputed along their whole length.
    """

    lines: dict[int, Mask] = field(default_factory=dict)
    columns: set[int] = field(default_factory=set)

    def add(self, line: int, places: Integers, length: int) -> None:
        """Elements of a line have been replaced."""
        self.lines.setdefault(line, np.zeros(length, np.bool_))[places] = True


@dataclass(frozen=True, eq=False)
class Refined:
    """Elements of a line that may be wrong or rounded badly, and what belongs there: it is written at last, where all
    else has been settled, for both sides compare C with a second product until then.

    Attributes
    ----------
    lines : Side
    line : int
    places : integer array
    value : array
        Of the whole line, on the host.
    """

    lines: Side
    line: int
    places: Integers
    value: Floats

    def write(self) -> None:
        replace(self.lines, self.line, self.places, self.value, True)

    @property
    def text(self) -> str:
        """What was done, for the report."""
        i, j = (self.line, int(self.places[0])) if self.lines.side == "rows" else (int(self.places[0]), self.line)
        return (
            f"C[{i}, {j}] and {self.places.size - 1} elements beside it were computed again in float64: two products "
            "agree in them, but sums of the same terms in other orders are closer: rounding, or a fault that came twice"
        )


@dataclass
class RepairOutcome:
    """The findings of one round of `abft_tsm2.checksum.correct`, whose steps add to them.

    `excused`: a change of so many bounds of its line would have been found in those that were cleared. `refined`: by
    none of them said to be wrong.
    """

    faults: list[Fault] = field(default_factory=list)
    cleared: int = 0
    excused: float = 0.0
    refined: list[Refined] = field(default_factory=list)
    overflowed: int = 0
    multiplications: float = 0.0
    columns: set[int] = field(default_factory=set)
    written: Written = field(default_factory=Written)


def replace(lines: Side, line: int, places: Integers, value: Floats, write: bool) -> None:
    """C(line, places) = value(places); the other elements keep their bits."""
    if not write or places.size == 0:
        return
    xp = namespace(lines.C)
    row = lines.C[line, :]
    new = xp.astype(from_host(value, lines.C), lines.C.dtype)
    chosen = np.zeros(value.shape, np.bool_)
    chosen[places] = True
    lines.C[line, :] = xp.where(from_host(chosen, lines.C), new, row)


def place(lines: Side, line: int, position: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows, columns) of the user's C."""
    return ((line,), (position,)) if lines.side == "rows" else ((position,), (line,))


def line_faults(
    lines: Side, line: int, wrong: Mask, found: Floats, value: Floats, whole: bool, write: bool
) -> list[Fault]:
    """The faults of one line: one of the `whole` line, or one for each wrong element."""
    if whole:
        return [fault(lines, "row", line, (), wrong, found, value, write)]
    faults = []
    for position in np.flatnonzero(wrong):
        only = np.arange(wrong.size) == position
        faults.append(fault(lines, "element", line, (int(position),), only, found, value, write))
    return faults


def fault(
    lines: Side,
    kind: str,
    line: int,
    at: tuple[int, ...],
    wrong: Mask,
    found: Floats,
    value: Floats,
    write: bool,
) -> Fault:
    """The fault of the `wrong` elements of a line, in rows and columns of the user's C."""
    with np.errstate(all="ignore"):
        off = np.abs(found - value)[wrong]
    magnitude = float("nan") if np.isnan(off).any() else float(off.max(initial=0.0))
    rows, columns = ((line,), at) if lines.side == "rows" else (at, (line,))
    if kind == "row" and lines.side == "columns":
        kind = "column"
    return Fault("C", kind, rows, columns, int(np.count_nonzero(wrong)), magnitude, RECOMPUTED if write else "")
