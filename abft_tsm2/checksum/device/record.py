"""What the records of the kernels say: a `DeviceVerdict`, and the report of one that is settled."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np

from abft_tsm2.checksum.device.kernels import CHANGED, MISSED
from abft_tsm2.core.memory import DeviceRecord
from abft_tsm2.report import Check, Fault, Report, Status

_CLEAN, _REPAIRED, _CLEARED = 0, 1, 3  # what a record says; everything else is for the host
_FAULTS = 40  # that a record has room for
_REPAIR = "recomputed in float64 on the device"
_HALF = 0xFFFFFFFF
_WORDS, _CLOSEST = struct.Struct("=QQ"), struct.Struct("=Ifd")
_ELEMENT = {"operand": "C", "kind": "element", "elements": 1, "repair": _REPAIR}


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
    """

    operation: str
    sizes: tuple[int, int, int]
    dtype: str
    products: int | None
    index: tuple[int, ...]
    sides: tuple[str, ...]
    lines: tuple[int, ...]


def clean(found: list[DeviceRecord]) -> bool:
    """Whether nothing was found, as nearly always."""
    heads = [record.head for record in found]
    return all(r.made(head) for r, head in zip(found, heads, strict=True)) and _all_say(heads, _CLEAN)


def _all_say(heads: list[list[int]], *any_of: int) -> bool:
    """Whether each verdict says one of these, and no operand has changed."""
    return all(head[2] in any_of and not head[7] & CHANGED for head in heads)


class DeviceVerdict:
    """What the records of a call say, one for each side. Of one that is no verdict nothing is believed."""

    def __init__(self, found: list[DeviceRecord], facts: CallInfo) -> None:
        self.facts = facts
        heads = [record.head for record in found]
        made = [record.made(head) for record, head in zip(found, heads, strict=True)]
        believed = [head for head, is_verdict in zip(heads, made, strict=True) if is_verdict]
        self.made = all(made)
        self._settled = self.made and _all_say(heads, _CLEAN, _REPAIRED)
        # Whether C is right, whatever the check says.
        self.cleared = self.made and _all_say(heads, _CLEAN, _REPAIRED, _CLEARED)
        self.missed = any(head[7] & MISSED for head in believed)  # whether weights may be far off
        self.held = True  # whether repairs lasted
        self.replaced = not self.made or any(head[6] for head in heads)  # whether C is not what the verdict was on
        self.repaired = any(head[2] == _REPAIRED for head in believed)
        self.flagged = sum(head[1] & _HALF for head in believed) + sum(
            record.lines for record, is_verdict in zip(found, made, strict=True) if not is_verdict
        )
        each = list(zip(found, heads, facts.sides, facts.lines, made, strict=True))
        self.checks = tuple(self._check(*one) for one in each)
        self.faults = [fault for one in each for fault in self._faults(*one)]

    def give_up(self) -> None:
        """What this verdict found was found again and again."""
        self.held = False
        self.faults = [(product, replace(fault, repair="")) for product, fault in self.faults]

    def doubt(self) -> None:
        """Something that it rests on is not what it was: the host has to look."""
        self._settled = False

    @property
    def known(self) -> bool:
        """Whether all that failed the check is explained, and repaired."""
        return self._settled and self.held

    @property
    def settled(self) -> bool:
        """Whether the host need not look."""
        return self.known and not self.missed

    def _check(self, record: DeviceRecord, head: list[int], side: str, m: int, is_verdict: bool) -> Check:
        if not is_verdict:
            return Check(side, 1, m, 0, float("nan"), 0.0, -1, float("nan"))
        line, ratio, least = _CLOSEST.unpack(_WORDS.pack(head[3], head[5]))
        bound = record.usual_bound
        limit = (1 + ratio) * bound / least if least else float("inf")
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

    def _faults(
        self, record: DeviceRecord, head: list[int], side: str, m: int, is_verdict: bool
    ) -> list[tuple[int, Fault]]:
        """Product and fault of each wrong element; those that found no room in the record in one."""
        count = head[6] if is_verdict else 0
        if count == 0:
            return []
        told = record.words[8 : 8 + 3 * min(count, _FAULTS)].reshape(-1, 3)
        values = told[:, 1:].copy().view(np.float64)
        with np.errstate(all="ignore"):
            off = abs(values[:, 0] - values[:, 1]).tolist()
        where = told[:, 0].astype(np.int64)
        product, line = divmod(where & 0xFFFFFFFF, m)
        rows, columns = (line, where >> 32) if side == "rows" else (where >> 32, line)
        each = zip(product.tolist(), rows.tolist(), columns.tolist(), off, strict=True)
        made = Fault.made_of
        faults = [(b, made(rows=(i,), columns=(j,), magnitude=size, **_ELEMENT)) for b, i, j, size in each]
        if count > _FAULTS:
            left = Fault("C", "block", (), (), count - _FAULTS, float("nan"), _REPAIR)
            faults.append((faults[-1][0], left))
        return faults

    def report(self) -> Report:
        """The report of a verdict that is settled."""
        facts, (m, k, n) = self.facts, self.facts.sizes
        reports = []
        for number in range(facts.products or 1):
            faults = tuple(fault for product, fault in self.faults if product == number)
            reports.append(
                Report.made_of(
                    status=Status.CORRECTED if faults else Status.CLEAN,
                    operation=facts.operation,
                    m=m,
                    k=k,
                    n=n,
                    dtype=facts.dtype,
                    checks=self.checks,
                    faults=faults,
                    index=facts.index if facts.products is None else (number,),
                )
            )
        return reports[0] if facts.products is None else Report.merge(reports, operation=facts.operation)
