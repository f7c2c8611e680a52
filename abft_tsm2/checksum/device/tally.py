"""What replays of a product in a graph add up on the device: a `ReplayTally`, and what it says (`Replays`)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.core.memory import DeviceRecord, Page, bring

# As kernels/repair/tally.cuh has them.
NUMBER, STARTED, VERDICTS, ENDED, MISSING, UNJUDGED, REPAIRED, CLEARED, UNBOUND, REFUSED = range(10)
FIRST_UNJUDGED, FIRST_UNBOUND, FIRST_REFUSED, ELEMENTS, LINES, LARGEST, FLAGS, LOGGED = range(10, 18)
ENTRIES_AT, LOG = 24, 256
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
    where : dict
        What kernels are given as addresses and numbers: the number of a call is the tally's address, marked as such.
    first : int
        The number of the first replay.
    records : list of DeviceRecord
        That of replay i is ``records[i % ring]``.
    """

    def __init__(self, device: int, lines: int, ring: int = 1) -> None:
        self._page = Page(ring, WORDS)
        at = self._page.on_device.data.ptr
        number = at - (1 << 63)
        self.where = {"encoded": number, "call": number, "record": self._page.address, "tally": at, "ring": ring}
        self.lines, self.first = lines, (next(_tallies) << _APART) % (1 << 55) + 1
        self.records = [DeviceRecord(device, self._page, i, of_ring=True) for i in range(ring)]
        self._page.write_head([self.first])

    def record(self, replay: int) -> DeviceRecord:
        """The record that replay number `first` + `replay` will leave."""
        record = self.of(replay)
        record.call, record.lines, record.turn = self.first + replay, self.lines, replay + 1
        return record

    def of(self, replay: int) -> DeviceRecord:
        """Where that will be, now perhaps of another replay."""
        return self.records[(self.first + replay) % len(self.records)]

    def read(self) -> Replays:
        """What replays that have ended have added up. Synchronises with the copy alone."""
        bring(self.records[:1])
        words = self._page.head.copy()
        log = words[ENTRIES_AT : ENTRIES_AT + 4 * min(LOG, int(words[LOGGED]))].reshape(-1, 4)
        count = [int(x) for x in words[:ENTRIES_AT]]
        first = {x: count[x] - self.first if count[x] else -1 for x in (FIRST_UNJUDGED, FIRST_UNBOUND, FIRST_REFUSED)}
        return Replays(
            ended=count[ENDED],
            begun=max(count[STARTED], count[VERDICTS]),
            missing=count[MISSING],
            unjudged=count[UNJUDGED],
            repaired=count[REPAIRED],
            cleared=count[CLEARED],
            unbound=count[UNBOUND],
            refused=count[REFUSED],
            first_unjudged=first[FIRST_UNJUDGED],
            first_unbound=first[FIRST_UNBOUND],
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
    ended, begun, missing : int
        Replays that left a record; all that began, the one that runs among them; those that others followed although
        they left none.
    unjudged, repaired, cleared, unbound, refused : int
        Of those that left one, by what they came to (kernels/repair/tally.cuh); the others were clean.
    first_unjudged, first_unbound, first_refused : int
        Which replay, from 0 on; negative for none.
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
    begun: int
    missing: int
    unjudged: int
    repaired: int
    cleared: int
    unbound: int
    refused: int
    first_unjudged: int
    first_unbound: int
    first_refused: int
    elements: int
    lines: int
    largest: int
    flags: int
    replays: list[int] = field(repr=False)
    faults: Any = field(repr=False)
    last: DeviceRecord = field(repr=False)

    @property
    def unended(self) -> int:
        """Replays that began and have left no record: the last one may be running."""
        return max(0, self.begun - self.ended - self.missing)
