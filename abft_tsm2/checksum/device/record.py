"""The verdict that kernels leave in their records: a `DeviceVerdict`, and the report of one that is settled."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from abft_tsm2.checksum.device.kernels import CHANGED, MISSED
from abft_tsm2.core.memory import DeviceRecord
from abft_tsm2.report import Check, Fault, Report, Status

_FAULTS, _ENCODED = 39, 127  # that a record has space for; the word behind them
REPAIR = "recomputed in float64 on the device"
_HALF = 0xFFFFFFFF
_WORDS, _CLOSEST = struct.Struct("=QQ"), struct.Struct("=Ifd")
_ELEMENT = {"operand": "C", "kind": "element", "elements": 1}


class DeviceOutcome(IntEnum):
    """What a verdict came to, from the best to the worst."""

    CLEAN = 0  # every line passed
    REPAIRED = 1  # what failed was located and repaired
    CLEARED = 2  # C is right, but what failed is not explained
    UNSETTLED = 3  # the host has to verify C, or operands
    NOT_HELD = 4  # repaired again and again
    NO_VERDICT = 5  # the kernels have left none: nothing is believed


_OUTCOMES = {
    0: DeviceOutcome.CLEAN,
    1: DeviceOutcome.REPAIRED,
    3: DeviceOutcome.CLEARED,
}  # by a record's third word; else for the host


@dataclass(frozen=True)
class CallInfo:
    """What a report says of a call before its verdict is known; holds no arrays.

    Attributes
    ----------
    products : int or None
        Of a batch.
    index : tuple of int
        In a batch, of one of its products.
    lines : tuple of int
        Of each side.
    device : str
        The GPU, as `place.device_name` has it.
    """

    operation: str
    sizes: tuple[int, int, int]
    dtype: str
    products: int | None
    index: tuple[int, ...]
    sides: tuple[str, ...]
    lines: tuple[int, ...]
    device: str = ""


def untouched(record: DeviceRecord) -> bool:
    """Whether it says that nothing was found, and nothing is left to say."""
    head = record.head
    return head[2] == 0 and head[7] & 0xFF == 0 and record.made(head)


def clean(found: list[DeviceRecord]) -> bool:
    """Whether nothing was found, as nearly always."""
    return all(_outcome(record, record.head) is DeviceOutcome.CLEAN for record in found)


def _outcome(record: DeviceRecord, head: list[int]) -> DeviceOutcome:
    """Of one side, by its record."""
    if not record.made(head):
        return DeviceOutcome.NO_VERDICT
    return DeviceOutcome.UNSETTLED if head[7] & CHANGED else _OUTCOMES.get(head[2], DeviceOutcome.UNSETTLED)


def check_of(record: DeviceRecord, closest: int, least: int, side: str, m: int) -> Check:
    """What is told of a check of m lines: by a record's bounds, and its words for the closest residual and the least
    weight."""
    line, ratio, weight = _CLOSEST.unpack(_WORDS.pack(closest, least))
    bound = record.usual_bound
    limit = (1 + ratio) * bound / weight if weight else float("inf")
    return Check.made_of(
        side=side,
        vectors=1,
        lines=m,
        verified=m,
        bound=bound,
        closest=ratio,
        closest_line=line % m,
        detection_limit=limit,
    )


def faults_of(
    told: np.ndarray, count: int, side: str, m: int, repairs: Sequence[str] | None = None
) -> list[tuple[int, Fault]]:
    """Product and fault of each of `count` wrong elements, by the three words of each; those that are not told in one.

    `repairs`: of each, how it was repaired.
    """
    values = told[:, 1:].copy().view(np.float64)
    with np.errstate(all="ignore"):
        off = abs(values[:, 0] - values[:, 1]).tolist()
    where = told[:, 0].astype(np.int64)
    product, line = divmod(where & 0xFFFFFFFF, m)
    rows, columns = (line, where >> 32) if side == "rows" else (where >> 32, line)
    each = zip(product.tolist(), rows.tolist(), columns.tolist(), off, repairs or [REPAIR] * len(off), strict=True)
    made = Fault.made_of
    faults = [
        (b, made(rows=(i,), columns=(j,), magnitude=size, repair=repair, **_ELEMENT)) for b, i, j, size, repair in each
    ]
    if count > len(faults):
        left = Fault("C", "block", (), (), count - len(faults), float("nan"), REPAIR)
        faults.append((faults[-1][0] if faults else 0, left))
    return faults


class DeviceVerdict:
    """What the records of a call say, one for each side.

    Attributes
    ----------
    outcome : DeviceOutcome
        The worst of all sides.
    repaired : bool
        Whether any side's repair is complete.
    missed : bool
        Whether weights may be far off.
    digests : list of int or None
        For each side that is not settled, of what was encoded (`abft_tsm2.checksum.device.differences.digest_of`).
    changed : bool
        Whether an operand is not what was encoded.
    replaced : bool
        Whether C is not what the verdict was on.
    flagged : int
        Lines that failed, or have no verdict.
    checks : tuple of Check
    faults : list of (int, Fault)
        Product and fault of each wrong element.
    """

    def __init__(self, found: list[DeviceRecord], info: CallInfo) -> None:
        self.info = info
        self.outcome, self.flagged = DeviceOutcome.CLEAN, 0
        self.repaired = self.missed = self.changed = self.replaced = False
        checks, self.faults, self.digests = [], list[tuple[int, Fault]](), list[int | None]()
        for record, side, lines in zip(found, info.sides, info.lines, strict=True):
            head = record.head
            outcome = _outcome(record, head)
            self.outcome = max(self.outcome, outcome)
            self.digests.append(int(record.words[_ENCODED]) if outcome is DeviceOutcome.UNSETTLED else None)
            if outcome is DeviceOutcome.NO_VERDICT:
                self.replaced = True
                self.flagged += record.lines
                checks.append(Check(side, 1, lines, 0, float("nan"), 0.0, -1, float("nan")))
                continue
            self.repaired |= outcome is DeviceOutcome.REPAIRED
            self.missed |= bool(head[7] & MISSED)
            self.changed |= bool(head[7] & CHANGED)
            self.replaced |= head[6] > 0
            self.flagged += head[1] & _HALF
            checks.append(check_of(record, head[3], head[5], side, lines))
            if head[6]:
                told = record.words[8 : 8 + 3 * min(head[6], _FAULTS)].reshape(-1, 3)
                self.faults += faults_of(told, head[6], side, lines)
        self.checks = tuple(checks)

    @property
    def explained(self) -> bool:
        """Whether all that failed the check is explained, and repaired."""
        return self.outcome <= DeviceOutcome.REPAIRED

    @property
    def settled(self) -> bool:
        """Whether nothing is left to the host."""
        return self.explained and not self.missed

    def give_up(self) -> None:
        """What this verdict found was found again and again."""
        self.outcome = DeviceOutcome.NOT_HELD
        self.faults = [(product, replace(fault, repair="")) for product, fault in self.faults]

    def report(self) -> Report:
        """The report of a verdict that is settled."""
        return report_of(self.info, self.checks, self.faults)


def report_of(info: CallInfo, checks: tuple[Check, ...], found: list[tuple[int, Fault]]) -> Report:
    """The report of a call by its checks, and products and faults of what was repaired."""
    m, k, n = info.sizes
    reports = []
    for number in range(info.products or 1):
        faults = tuple(fault for product, fault in found if product == number)
        reports.append(
            Report.made_of(
                status=Status.CORRECTED if faults else Status.CLEAN,
                operation=info.operation,
                m=m,
                k=k,
                n=n,
                dtype=info.dtype,
                checks=checks,
                faults=faults,
                index=info.index if info.products is None else (number,),
                device=info.device,
            )
        )
    return reports[0] if info.products is None else Report.merge(reports, operation=info.operation)
