"""The summary of a campaign: its files read, its trials counted, its promises checked."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from abft_tsm2.faults.analysis import cancelled, tables
from abft_tsm2.faults.analysis.stats import clopper_pearson, rate_text
from abft_tsm2.faults.analysis.tables import Row
from abft_tsm2.faults.analysis.tally import FOUND, Tally, read_trials
from abft_tsm2.faults.campaign.folder import CAMPAIGN, MANIFEST, TRIALS, CampaignFileError
from abft_tsm2.faults.campaign.folder import SCHEMA as READS
from abft_tsm2.faults.trials.trial import BROKEN, REFUSED, WRONG_PLACE, protects
from abft_tsm2.io.atomic import short

SCHEMA = "abft_tsm2/campaign-summary/1"
NEEDED: Mapping[str, type | tuple[type, ...]] = {
    "name": str,
    "seed": int,
    "trials": int,
    "device": str,
    "versions": dict,
    "started": str,
    "finished": (str, type(None)),
    "seconds": (int, float),
    "command": str,
    "jobs": int,
}
"""The entries of a manifest, and their types."""

BREACHES = {
    "sdc": "a silent corruption",
    "false_alarm": "a false alarm",
    "crash": "a crash",
    "hang": "a call that did not return",
    WRONG_PLACE: "a fault that was said to be elsewhere",
    REFUSED: "a result that was refused though it could be repaired",
}
FILE_TABLE = ("suite", "operation", "scheme", "site", "model", "bits", "dtype")
PAGE_TABLE = ("suite", "operation", "scheme", "site", "model", "persistent", "bits")


@dataclass(frozen=True)
class Summary:
    """The counted results of a campaign; `read` makes it from a campaign's folder.

    Parameters
    ----------
    manifest : mapping
        What manifest.json holds.
    campaign : str
        The text of campaign.toml.
    tally : Tally
        The counted trials.

    Examples
    --------
    >>> import json, pathlib, tempfile
    >>> from abft_tsm2.faults.analysis.summary import Summary
    >>> versions = {"abft_tsm2": "1.0"}
    >>> manifest = {"schema": "abft_tsm2/campaign/1", "name": "short", "seed": 1, "trials": 0, "device": "CPU"}
    >>> manifest |= {"versions": versions, "started": "", "finished": None, "seconds": 0.0, "command": "", "jobs": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     files = {"campaign.toml": "", "manifest.json": json.dumps(manifest), "trials.jsonl": ""}
    ...     for name, text in files.items():
    ...         _ = pathlib.Path(folder, name).write_text(text)
    ...     summary = Summary.read(folder)
    >>> summary.tally.trials, summary.broken
    (0, [])
    """

    manifest: Mapping[str, Any]
    campaign: str
    tally: Tally

    @classmethod
    def read(cls, folder: str | PathLike[str]) -> Summary:
        """Read a campaign's folder; its trials once, line by line.

        Raises
        ------
        CampaignFileError
            If a file is missing or cannot be understood: which one, the line, and what to do next.
        """
        path = Path(folder)
        if not path.is_dir():
            raise CampaignFileError(f"there is no folder {path}: name the folder that a campaign was written to")
        campaign = _text(path / CAMPAIGN)
        return cls(_manifest(path / MANIFEST), campaign, read_trials(path / TRIALS))

    # ---- in short --------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def planned(self) -> int:
        """How many trials the campaign has."""
        return int(self.manifest["trials"])

    @property
    def unfinished(self) -> bool:
        return self.tally.trials < self.planned

    @cached_property
    def verdict(self) -> Row:
        """The numbers that matter most, of schemes that protect alone.

        "planted" and "clean_trials" are trials with a fault and without; then how many had each outcome that a promise
        forbids, the interval of silent corruption, and what was found, located and repaired. "above" are the faults of
        the product promised to be found, "above_found" those that were.
        """
        rows = [row for row in self.totals if row["protects"]]
        total: Counter[str] = Counter()
        for row in rows:
            total.update({name: count for name, count in row.items() if type(count) is int})
        faults, silent = total["faults"], total["sdc"]  # which may be of trials without a fault as well
        low, high = clopper_pearson(silent, faults if silent <= faults else faults + total["clean_trials"])
        found = sum(total[outcome] for outcome in FOUND)
        places = [row for row in self.locations if protects(row["scheme"])]
        located = {place: sum(row[place] for row in places) for place in ("exact", "covered", "wrong")}
        sharp = [row for row in self.tightness if protects(row["scheme"])]
        return {
            "schemes": sorted({row["scheme"] for row in rows}, key=tables.by_scheme),
            "planted": total["faults"],
            "clean_trials": total["clean_trials"],
            **{outcome: total[outcome] for outcome in (*BROKEN, "cancelled", "below_bound", "masked", *FOUND)},
            "sdc_low": low,
            "sdc_high": high,
            "found": found,
            "above": sum(row["above"] for row in sharp),
            "above_found": sum(row["above_found"] for row in sharp),
            "located": located,
        }

    @cached_property
    def broken(self) -> list[str]:
        """The promises that were broken, in words; empty if all were kept.

        Schemes that are there to be compared with (`abft_tsm2.faults.trials.trial.PEERS`) promise nothing.
        """
        texts = []
        for row in self.totals:
            trials = row["faults"] + row["clean_trials"]
            for outcome, what in BREACHES.items():
                broken = self.tally.breaches[row["suite"], row["scheme"], outcome]
                if broken:
                    rate = rate_text(broken, trials)
                    texts.append(f"suite {row['suite']!r}, scheme {row['scheme']!r}: trials with {what}, {rate}")
        return [*texts, *self.tally.sharpness.broken]

    @cached_property
    def remarks(self) -> list[str]:
        """What a reader has to know of the data before any number: what is missing, torn, or there twice."""
        tally, texts = self.tally, []
        if self.unfinished:
            missing = self.planned - tally.trials
            texts.append(
                f"This campaign is not finished: {tally.trials} of {self.planned} planned trials have run,"
                f" {missing} are missing. What follows holds for those that have run."
            )
        if tally.trials > self.planned:
            texts.append(
                f"The file holds {tally.trials} trials, though {self.planned} were planned: it may be of two campaigns."
            )
        if tally.torn:
            texts.append("The last line of the trials was cut off and is left out.")
        if tally.repeated:
            texts.append(f"{tally.repeated} lines repeat a trial that stands above them; each trial counts once.")
        if tally.contradicted:
            texts.append(
                f"{tally.contradicted} of the repeated lines name another outcome than the first one: trials should"
                " be reproducible, and these are not."
            )
        unseen = sum(row["above_harmless"] for row in self.tightness if protects(row["scheme"]))
        if unseen:
            texts.append(
                f"{unseen} faults above the promised limit were not found, though what they changed was judged to be"
                " harmless: the size and the outcome of a trial contradict each other."
            )
        return texts

    # ---- tables ----------------------------------------------------------------------------------------------------

    @cached_property
    def suites(self) -> list[str]:
        """In the order of the campaign's file; those it does not name come last."""
        try:
            given = [str(suite.get("name", "")) for suite in tomllib.loads(self.campaign).get("suite", [])]
        except (tomllib.TOMLDecodeError, AttributeError):
            given = []  # it is shown as it is, and the order is all that it is read for
        known = {key.suite for key in self.tally.faults} | {key.suite for key in self.tally.clean}
        return [*dict.fromkeys(suite for suite in given if suite in known), *sorted(known - set(given))]

    @cached_property
    def schemes(self) -> list[str]:
        """Those that protect first."""
        known = {key.scheme for key in self.tally.faults} | {key.scheme for key in self.tally.clean}
        return sorted(known, key=tables.by_scheme)

    def _in_order(self, rows: list[Row]) -> list[Row]:
        return sorted(rows, key=lambda row: self.suites.index(row["suite"]))  # stable: schemes stay as they are

    @cached_property
    def totals(self) -> list[Row]:
        """By suite and scheme; see `tables.totals`."""
        return self._in_order(tables.totals(self.tally))

    @cached_property
    def outcomes(self) -> list[Row]:
        """Faults by suite, operation, scheme, site, model, whether they come back, and bits."""
        return self._in_order(tables.outcomes(self.tally, PAGE_TABLE))

    @cached_property
    def file_rows(self) -> list[Row]:
        """The rows of summary.csv: like `outcomes`, by type as well."""
        return self._in_order(tables.outcomes(self.tally, FILE_TABLE))

    @cached_property
    def contest(self) -> list[Row]:
        """Scheme against scheme, of suites that ran several; see `tables.contest`."""
        return self._in_order(tables.contest(self.tally))

    @cached_property
    def bits(self) -> list[Row]:
        """Single flipped bits of the product by position; see `tables.bits`."""
        return tables.bits(self.tally)

    @cached_property
    def alarms(self) -> list[Row]:
        """Trials without a fault; see `tables.alarms`."""
        return tables.alarms(self.tally)

    @cached_property
    def locations(self) -> list[Row]:
        """Whether faults were located; see `tables.locations`."""
        return tables.locations(self.tally)

    @cached_property
    def tightness(self) -> list[Row]:
        """Bounds beside residuals, limits beside faults; see `tables.tightness`."""
        return tables.tightness(self.tally)

    @cached_property
    def detectable(self) -> list[Row]:
        """The smallest error that is found; see `tables.detectable`."""
        return tables.detectable(self.tally)

    @cached_property
    def sizes(self) -> list[Row]:
        """Faults by size, in units of what is promised to be found; see `tables.histogram`."""
        return tables.histogram(self.tally, "sizes")

    @cached_property
    def relatives(self) -> list[Row]:
        """Faults by the largest change over the rms of the result; see `tables.histogram`."""
        return tables.histogram(self.tally, "relatives")

    @cached_property
    def cost(self) -> list[Row]:
        """Seconds of clean trials; see `tables.cost`."""
        return tables.cost(self.tally)

    @cached_property
    def examples(self) -> list[Row]:
        """The first trials that broke a promise, as they stand in the file."""
        return [record for _, record in self.tally.examples]

    @cached_property
    def cancellation(self) -> list[Row]:
        """What weighted sums have hidden, and what is to be expected; see `cancelled.cancellation`."""
        return cancelled.cancellation(self.tally)

    @cached_property
    def cancelled(self) -> list[Row]:
        """Trials whose fault was hidden, each with the reason, as they stand in the file."""
        return cancelled.cases(self.tally)

    @cached_property
    def notes(self) -> list[Row]:
        """Notes, the most frequent first."""
        counts = sorted(self.tally.notes.items(), key=lambda entry: (-entry[1], entry[0]))
        return [{"note": note, "outcome": outcome, "trials": count} for (note, outcome), count in counts]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON types; floats that are not finite are "NaN", "Infinity" and "-Infinity"."""
        tally = self.tally
        return dict(
            _plain(
                {
                    "schema": SCHEMA,
                    "manifest": dict(self.manifest),
                    "trials": tally.trials,
                    "unfinished": self.unfinished,
                    "repeated": tally.repeated,
                    "contradicted": tally.contradicted,
                    "torn": tally.torn,
                    "remarks": self.remarks,
                    "broken": self.broken,
                    "verdict": self.verdict,
                    **{name: table(self) for name, table in TABLES.items()},
                    "examples": self.examples,
                    "cancelled": self.cancelled,
                    "notes": self.notes,
                }
            )
        )

    def to_json(self, indent: int | None = 2) -> str:
        """Return `to_dict` as strict JSON (RFC 8259: no NaN or Infinity tokens)."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)


TABLES: Mapping[str, Callable[[Summary], list[Row]]] = {
    "totals": lambda summary: summary.totals,
    "outcomes": lambda summary: summary.outcomes,
    "contest": lambda summary: summary.contest,
    "bits": lambda summary: summary.bits,
    "alarms": lambda summary: summary.alarms,
    "locations": lambda summary: summary.locations,
    "tightness": lambda summary: summary.tightness,
    "detectable": lambda summary: summary.detectable,
    "sizes": lambda summary: summary.sizes,
    "relatives": lambda summary: summary.relatives,
    "cost": lambda summary: summary.cost,
    "cancellation": lambda summary: summary.cancellation,
}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CampaignFileError(f"cannot read {path}: {short(error)}; name the folder of a campaign") from error


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(_text(path))
    except ValueError as error:
        raise CampaignFileError(f"{path} is not JSON: {short(error)}; run the campaign again") from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != READS:
        raise CampaignFileError(
            f"{path} has schema {schema!r}, this version reads {READS!r}: use the one that wrote it"
        )
    for name, kind in NEEDED.items():
        if not isinstance(manifest.get(name), kind) or name not in manifest:
            raise CampaignFileError(f"{path} has no {name} that could be read; run the campaign again")
    return dict(manifest)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
