"""What replays of a product in a graph add up on the device: a `ReplayTally`, and what it says (`Replays`)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.core.memory import DeviceRecord, Page, bring

# As kernels/repair/tally.cuh has them.
NUMBER, VERDICTS, RING, ENDED, UNJUDGED, REPAIRED, CLEARED, REFUSED = range(8)
FIRST_UNJUDGED, FIRST_REFUSED, ELEMENTS, LINES, LARGEST, FLAGS, LOGGED = range(8, 15)
ENTRIES_AT, LOG = 16, 256
WORDS = ENTRIES_AT + 4 * LOG
_APART = 40  # bits: numbers of two tallies differ by more than there are replays
_tallies = itertools.count(1)


class ReplayTally:
    """Memory where the kernels of one side of a product count its replays, and leave a record of each of the last ones.

    Parameters
    ----------
    device : int
        The current one.
    lines : int
        That each verdict is on.
    ring : int
        How many records there are: a power of two.

    Attributes
    ----------
    address, records_at : int
        Of the tally, and of the first record.
    number : int
        What kernels are given as the number of a call: the address, marked as such.
    first : int
        The number of the first replay.
    records : list of DeviceRecord
        That of replay i is ``records[i % ring]``.
    """

    def __init__(self, device: int, lines: int, ring: int = 1) -> None:
        self._page = Page(ring, WORDS)
        self.address, self.records_at = self._page.on_device.data.ptr, self._page.address
        self.number = self.address - (1 << 63)
        self.lines, self.first = lines, (next(_tallies) << _APART) % (1 << 55) + 1
        self.records = [DeviceRecord(device, self._page, i, of_ring=True) for i in range(ring)]
        self._page.write_head([self.first, 0, ring - 1])

    def record(self, replay: int) -> DeviceRecord:
        """The record that replay number `first` + `replay` will leave."""
        record = self.records[(self.first + replay) % len(self.records)]
        record.call, record.lines = self.first + replay, self.lines
        return record

    def busy(self, replay: int) -> bool:
        """Whether the record that this replay will leave is in use."""
        return self.records[(self.first + replay) % len(self.records)].call != 0

    def read(self) -> Replays:
        """What replays that have ended have added up. Synchronises with the copy alone."""
        bring(self.records[:1])
        words = self._page.head.copy()
        log = words[ENTRIES_AT : ENTRIES_AT + 4 * int(words[LOGGED])].reshape(-1, 4)
        count = [int(x) for x in words[:ENTRIES_AT]]
        first = {x: count[x] - self.first if count[x] else -1 for x in (FIRST_UNJUDGED, FIRST_REFUSED)}
        return Replays(
            ended=count[ENDED],
            verdicts=count[VERDICTS],
            unjudged=count[UNJUDGED],
            repaired=count[REPAIRED],
            cleared=count[CLEARED],
            refused=count[REFUSED],
            first_unjudged=first[FIRST_UNJUDGED],
            first_refused=first[FIRST_REFUSED],
            elements=count[ELEMENTS],
            lines=count[LINES],
            largest=count[LARGEST],
            flags=count[FLAGS],
            replays=(log[:, 0] - np.uint64(self.first)).astype(np.int64).tolist(),
            faults=log[:, 1:],
            last=self.records[(count[NUMBER] - 1) % len(self.records)],
        )


@dataclass(frozen=True)
class Replays:
    """What a tally says.

    Attributes
    ----------
    ended, verdicts : int
        Replays that left a record, and those whose first line was judged.
    unjudged, repaired, cleared, refused : int
        Of these, by what they came to (kernels/repair/tally.cuh); the others were clean.
    first_unjudged, first_refused : int
        Which replay, from 0 on; -1 for none.
    elements, lines : int
        Wrong elements; lines that failed in replays that were cleared.
    largest : int
        The largest residual over its bound, and its line, as a record has it.
    flags : int
    replays : list of int
        Of each fault in the log, which replay it was in.
    faults : (faults, 3) uint64 array
        As a record has them.
    last : DeviceRecord
        Of the last replay.
    """

    ended: int
    verdicts: int
    unjudged: int
    repaired: int
    cleared: int
    refused: int
    first_unjudged: int
    first_refused: int
    elements: int
    lines: int
    largest: int
    flags: int
    replays: list[int] = field(repr=False)
    faults: Any = field(repr=False)
    last: DeviceRecord = field(repr=False)
