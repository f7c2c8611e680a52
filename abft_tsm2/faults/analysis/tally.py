"""The trials of a campaign, read in one pass and counted: one cell for each combination of what they have in common.

A cell keeps a count, and of numbers every one, in 8 bytes: medians are exact, and a million trials take some 20 MB.
"""

from __future__ import annotations

import json
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from abft_tsm2.faults.analysis.sharpness import Sharpness
from abft_tsm2.faults.campaign.folder import CampaignFileError
from abft_tsm2.faults.trials.trial import OUTCOMES, breach, protects
from abft_tsm2.io.atomic import short

FOUND = ("corrected", "detected")
HARMLESS = ("masked", "below_bound")
LOST = ("cancelled", "sdc", "crash", "hang")
ALARMS = ("CORRECTED", "CHECKSUM_FAULT", "INPUT_CHANGED", "UNVERIFIABLE", "UNCORRECTABLE")  # statuses of reports
LOCATED = ("exact", "covered", "wrong", "")
EXAMPLES = 20  # trials that broke a promise, kept whole
CANCELLED = 100  # trials of each type whose fault was hidden, kept whole
NOTES = 1000  # different notes that are counted; each may be different from all others
BATCH = 200  # lines that are parsed in one go: a third faster than one by one
LARGEST_NUMBER = 1 << 31  # of a trial; a byte is kept for each number below the largest


class FaultKey(NamedTuple):
    """What trials of one cell have in common, where a fault was planted."""

    suite: str
    operation: str
    scheme: str
    k: int
    dtype: str
    site: str
    model: str
    bits: str
    bit: int
    persistent: bool
    single: bool
    outcome: str
    located: str
    status: str

    @property
    def noticed(self) -> bool:
        """Whether the fault was found, or of several faults those that could be."""
        return self.outcome in FOUND or (self.outcome in HARMLESS and self.status in ALARMS)


class CleanKey(NamedTuple):
    """What trials of one cell have in common, where no fault was planted."""

    suite: str
    operation: str
    scheme: str
    m: int
    k: int
    n: int
    dtype: str
    outcome: str


def _numbers() -> array[float]:
    return array("d")


@dataclass(slots=True)
class Cell:
    """Trials that have all labels in common.

    Attributes
    ----------
    count : int
    sizes, relatives, limits : array of float
        Of faults, in the order read; a trial that has no such number is left out, so they may differ in length.
    chances : array of float
        Of faults that may be hidden, those that are not 0.
    closest, seconds : array of float
        Of trials without a fault.
    """

    count: int = 0
    sizes: array[float] = field(default_factory=_numbers)
    relatives: array[float] = field(default_factory=_numbers)
    limits: array[float] = field(default_factory=_numbers)
    chances: array[float] = field(default_factory=_numbers)
    closest: array[float] = field(default_factory=_numbers)
    seconds: array[float] = field(default_factory=_numbers)


@dataclass
class Tally:
    """All trials of a campaign.

    Attributes
    ----------
    faults, clean : dict
        The cells of trials with a fault and without.
    trials : int
        How many were counted.
    repeated, contradicted : int
        Lines of a trial that had been counted already, and those of them that name another outcome.
    torn : bool
        Whether the last line was cut off, and was left out.
    examples : list of (int, dict)
        The trials with the lowest numbers that broke a promise, `EXAMPLES` at most.
    cancelled : dict of str to list of (int, dict)
        By type, the trials with the lowest numbers in which a scheme that protects returned a fault that its sums hid,
        `CANCELLED` at most of each.
    notes : Counter
        Of (note, outcome), those of hidden faults aside.
    breaches : Counter
        Of (suite, scheme, promise that was broken).
    sharpness : Sharpness
        How sharp the checks were.
    """

    faults: dict[FaultKey, Cell] = field(default_factory=dict)
    clean: dict[CleanKey, Cell] = field(default_factory=dict)
    trials: int = 0
    repeated: int = 0
    contradicted: int = 0
    torn: bool = False
    examples: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    cancelled: dict[str, list[tuple[int, dict[str, Any]]]] = field(default_factory=dict)
    notes: Counter[tuple[str, str]] = field(default_factory=Counter)
    breaches: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    sharpness: Sharpness = field(default_factory=Sharpness)


Key = TypeVar("Key", FaultKey, CleanKey)
Lines = list[tuple[int, dict[str, Any]]]


def read_trials(path: Path) -> Tally:
    """Read and count the trials of a campaign.

    A trial whose number was read before does not count again: a campaign that was interrupted runs it a second time,
    from the same plan, so the first line says all that the later ones do.

    Parameters
    ----------
    path : Path
        A file with one JSON object a line, in any order; a last line that is cut off is left out.

    Raises
    ------
    CampaignFileError
        If the file cannot be read, or a line cannot be understood; the message has the number of the line.
    """
    tally = Tally()
    try:
        with path.open("rb") as file:
            _Counting(tally, path).all_of(file)
    except OSError as error:
        raise CampaignFileError(f"cannot read {path}: {short(error)}; run the campaign first") from error
    return tally


class _Counting:
    """One pass over a file."""

    def __init__(self, tally: Tally, path: Path) -> None:
        self.tally = tally
        self.path = path
        self.seen = bytearray(1 << 16)  # by number of trial: 0, or 1 + the position of its outcome in OUTCOMES
        self.code = {outcome: number for number, outcome in enumerate(OUTCOMES, 1)}
        self.fault_cells: dict[tuple[Any, ...], Cell] = {}
        self.clean_cells: dict[tuple[Any, ...], Cell] = {}

    def all_of(self, file: BufferedReader) -> None:
        for records in self._batches(file):
            try:
                for record in records:
                    self._count(record)
            except KeyError as error:
                raise self._bad(self._line(), f"has no {error}") from error
            except (TypeError, ValueError, OverflowError) as error:
                raise self._bad(self._line(), f"is not a trial: {short(error)}") from error
            except _Unknown as error:
                raise self._bad(self._line(), str(error)) from error
        self.tally.faults = {FaultKey(*key): cell for key, cell in self.fault_cells.items()}
        self.tally.clean = {CleanKey(*key): cell for key, cell in self.clean_cells.items()}

    def _line(self) -> int:
        """The number of the line being read, from 1."""
        return self.tally.trials + self.tally.repeated + 1

    def _batches(self, file: BufferedReader) -> Iterator[list[dict[str, Any]]]:
        """Parsed lines."""
        while lines := list(islice(file, BATCH)):
            try:
                records = json.loads(b"[" + b",".join(lines) + b"]")
                whole = len(records) == len(lines)
            except ValueError:
                whole = False
            if not whole:
                records = self._one_by_one(lines, torn_may_be=not file.peek(1))
            yield records

    def _one_by_one(self, lines: list[bytes], torn_may_be: bool) -> list[dict[str, Any]]:
        """Read lines of which one is bad, to name it; the last one of the file may be cut off."""
        records: list[dict[str, Any]] = []
        for place, line in enumerate(lines):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                if torn_may_be and place == len(lines) - 1:
                    self.tally.torn = True
                    continue
                raise self._bad(self._line() + place, "is not JSON") from error
        return records

    def _bad(self, number: int, why: str) -> CampaignFileError:
        return CampaignFileError(
            f"{self.path}, line {number} {why}. Remove the line, or run the campaign again in an empty folder"
        )

    def _count(self, record: dict[str, Any]) -> None:
        """This runs a million times: it looks up and appends, and checks what it is given only where it is new."""
        tally = self.tally
        trial, outcome, note = record["trial"], record["outcome"], record["note"]
        if not 0 <= trial < len(self.seen):
            self._make_room(trial)
        if before := self.seen[trial]:
            tally.repeated += 1
            tally.contradicted += before != self.code.get(outcome)
            return
        if record["model"]:
            key = _OF_FAULT(record)
            cell = self.fault_cells.get(key)
            if cell is None:
                cell = self.fault_cells[key] = _new(key, FaultKey)
            size, relative, limit = _SIZES(record)
            if size is not None:
                cell.sizes.append(float(size))
            if relative is not None:
                cell.relatives.append(float(relative))
            if limit is not None:
                cell.limits.append(float(limit))
            if (chance := record.get("chance")) is not None:
                cell.chances.append(float(chance))
        else:
            key = _OF_CLEAN(record)
            cell = self.clean_cells.get(key)
            if cell is None:
                cell = self.clean_cells[key] = _new(key, CleanKey)
            cell.seconds.append(record["seconds"])
            if record["closest"] is not None:
                cell.closest.append(float(record["closest"]))
        cell.count += 1
        tally.trials += 1
        tally.sharpness.add(record)
        self.seen[trial] = self.code[outcome]
        if broken := breach(record):
            tally.breaches[record["suite"], record["scheme"], broken] += 1
            _keep(tally.examples, EXAMPLES, trial, record)
        if outcome == "cancelled":
            if protects(record["scheme"]):
                _keep(tally.cancelled.setdefault(record["dtype"], []), CANCELLED, trial, record)
        elif note:
            entry = (str(note), outcome)
            if entry in tally.notes or len(tally.notes) < NOTES:
                tally.notes[entry] += 1

    def _make_room(self, trial: int) -> None:
        if not 0 <= trial < LARGEST_NUMBER:
            raise _Unknown(f"has trial {trial}, which is not the number of one")
        self.seen.extend(bytes(max(len(self.seen), trial + 1 - len(self.seen))))


def _keep(kept: list[tuple[int, dict[str, Any]]], most: int, trial: int, record: dict[str, Any]) -> None:
    """Keep a trial if its number is among the lowest."""
    insort(kept, (trial, record), key=itemgetter(0))
    del kept[most:]


_OF_FAULT = itemgetter(*FaultKey._fields)
_OF_CLEAN = itemgetter(*CleanKey._fields)
_SIZES = itemgetter("size", "relative", "limit")
_KINDS = {"str": str, "int": int, "bool": bool}


class _Unknown(Exception):
    """What is wrong with a line."""


def _annotations(kind: type) -> list[tuple[str, str]]:
    # A NamedTuple wraps the text of an annotation.
    return [(name, str(getattr(text, "__forward_arg__", text))) for name, text in kind.__annotations__.items()]


def _new(key: tuple[Any, ...], kind: type[FaultKey] | type[CleanKey]) -> Cell:
    """An empty cell, its labels checked."""
    for (name, annotation), value in zip(_annotations(kind), key, strict=True):
        if not isinstance(value, _KINDS[annotation]):
            raise _Unknown(f"has {name} {value!r}, which is no {annotation}")
    for name, known in (("outcome", OUTCOMES), ("located", LOCATED)):
        if name in kind._fields and (value := key[kind._fields.index(name)]) not in known:
            choices = ", ".join(map(repr, known))
            raise _Unknown(f"has the unknown {name} {value!r} (known are {choices})")
    return Cell()
