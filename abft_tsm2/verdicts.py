"""What the records of the kernels say: a `Verdict`, and the report of one that is settled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from abft_tsm2.core.check_config import CHANGED, MISSED
from abft_tsm2.core.records import Record
from abft_tsm2.report import Check, Fault, Report, Status

_CLEAN, _REPAIRED, _CLEARED = 0, 1, 3  # what a record says; everything else is for the host
_FAULTS = 40  # that a record has room for
_REPAIR = "recomputed in float64 on the device"
_ELEMENT = {"operand": "C", "kind": "element", "elements": 1, "repair": _REPAIR}


@dataclass(frozen=True)
class Facts:
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


def clean(found: list[Record]) -> bool:
    """Whether nothing was found, as nearly always."""
    return all(record.made for record in found) and _all_say(found, _CLEAN)


def _all_say(found: list[Record], *any_of: int) -> bool:
    """Whether each verdict says one of these, and no operand has changed."""
    return all(int(r.words[2]) in any_of and not r.flags & CHANGED for r in found)


class Verdict:
    """What the records of a call say, one for each side. Of one that is no verdict nothing is believed."""

    def __init__(self, found: list[Record], facts: Facts) -> None:
        self.facts = facts
        made = [record.made for record in found]
        believed = [record for record, is_verdict in zip(found, made, strict=True) if is_verdict]
        self.made = all(made)
        self._settled = self.made and _all_say(found, _CLEAN, _REPAIRED)
        # Whether C is right, whatever the check says.
        self.cleared = self.made and _all_say(found, _CLEAN, _REPAIRED, _CLEARED)
        self.missed = any(r.flags & MISSED for r in believed)  # whether weights may be far off
        self.held = True  # whether repairs lasted
        self.replaced = not self.made or any(int(r.words[6]) for r in found)  # whether C is not what the verdict was on
        self.repaired = any(int(r.words[2]) == _REPAIRED for r in believed)
        self.flagged = sum(r.flagged if is_verdict else r.lines for r, is_verdict in zip(found, made, strict=True))
        each = list(zip(found, facts.sides, facts.lines, made, strict=True))
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

    def _check(self, record: Record, side: str, m: int, is_verdict: bool) -> Check:
        if not is_verdict:
            return Check(side, 1, m, 0, float("nan"), 0.0, -1, float("nan"))
        closest, line = int(record.words[3]) >> 32, int(record.words[3]) & 0xFFFFFFFF
        ratio = float(np.array([closest], np.uint32).view(np.float32)[0])
        bound, least = record.usual_bound, record.number(5)
        with np.errstate(all="ignore"):
            limit = float(np.float64((1 + ratio) * bound) / np.float64(least))
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

    def _faults(self, record: Record, side: str, m: int, is_verdict: bool) -> list[tuple[int, Fault]]:
        """Product and fault of each wrong element; those that found no room in the record in one."""
        count = int(record.words[6]) if is_verdict else 0
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
