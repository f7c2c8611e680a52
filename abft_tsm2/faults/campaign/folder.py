"""The folder of a campaign: its file, its manifest, and one line for each trial that is done.

A line is written when its trial is judged, and is on the disk within a second: whatever happens to the process or the
machine, nothing that was done is done again. A line that was cut off is not there.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from abft_tsm2.errors import AbftError
from abft_tsm2.faults.analysis.sharpness import Sharpness
from abft_tsm2.faults.trials.trial import breach
from abft_tsm2.io.atomic import output_file, reason

CAMPAIGN, MANIFEST, TRIALS = "campaign.toml", "manifest.json", "trials.jsonl"
SCHEMA = "abft_tsm2/campaign/1"
BATCH, SECONDS = 500, 1.0  # lines, and time, after which they are brought to the disk


class CampaignFileError(AbftError):
    """A file of a campaign is missing or cannot be understood; the message says which, where and what to do next."""


class Folder:
    """The folder of a campaign, held by one process at a time.

    Parameters
    ----------
    path : Path
    campaign : str
        The text of the campaign file.
    resume : bool
        Whether to go on with what is there.

    Attributes
    ----------
    done : set of int
        The numbers of the trials that have their lines.
    broken : int
        How many of those that were there break a promise of a scheme that protects.

    Raises
    ------
    CampaignFileError
        If there are trials and `resume` is not given, if they are another campaign's, if another process writes there,
        or the folder cannot be written.
    """

    def __init__(self, path: Path, campaign: str, *, resume: bool) -> None:
        self.path = path
        self.done: set[int] = set()
        self.broken = 0
        self.sharpness = Sharpness()
        self._waiting = 0
        self._last = time.monotonic()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise CampaignFileError(f"cannot write {path}: {reason(error)}") from error
        try:
            self._hold()
            self._prepare(campaign, resume)
            self._file: IO[bytes] = (path / TRIALS).open("ab")
        except BaseException as error:
            self._lock.close()
            if isinstance(error, OSError):
                raise CampaignFileError(f"cannot write {path}: {reason(error)}") from error
            raise

    def _hold(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CampaignFileError(
                f"{self.path}: another process runs a campaign there; name another folder"
            ) from None

    def _prepare(self, campaign: str, resume: bool) -> None:
        trials, text = self.path / TRIALS, self.path / CAMPAIGN
        if trials.exists() and trials.stat().st_size and not resume:
            raise CampaignFileError(f"{self.path} holds trials already: pass --resume to go on, or name another folder")
        if text.exists() and resume and text.read_text(encoding="utf-8") != campaign:
            raise CampaignFileError(f"{text} is another campaign than the one to go on with: name another folder")
        if trials.exists():
            self.done, self.broken = _whole_lines(trials, self.sharpness)
        with output_file(text) as keep:
            keep(campaign.encode())

    def manifest(self, content: Mapping[str, Any]) -> None:
        """Write the manifest, whole or not at all."""
        with output_file(self.path / MANIFEST) as keep:
            keep((json.dumps({"schema": SCHEMA, **content}, indent=2) + "\n").encode())

    def append(self, line: Mapping[str, Any]) -> None:
        """Write the line of a trial, whose entry "trial" comes first; numbers that are not finite become text."""
        self._file.write(json.dumps(plain(line)).encode() + b"\n")
        self.done.add(line["trial"])
        self.sharpness.add(line)
        self._waiting += 1
        if self._waiting >= BATCH or time.monotonic() - self._last > SECONDS:
            self.flush()

    def flush(self) -> None:
        """Bring all lines to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._waiting, self._last = 0, time.monotonic()

    def close(self) -> None:
        self.flush()
        self._file.close()
        self._lock.close()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def earlier(path: Path) -> dict[str, Any]:
    """The manifest of a folder, empty where there is none."""
    try:
        return dict(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CampaignFileError(
            f"cannot read {path / MANIFEST}: {error}; run the campaign in another folder"
        ) from error


def line_of(path: Path, trial: int) -> dict[str, Any] | None:
    """What was written about a trial, or None."""
    start = b'{"trial": %d,' % trial
    try:
        with (path / TRIALS).open("rb") as lines:
            found = next((line for line in lines if line.startswith(start) and line.endswith(b"\n")), None)
    except FileNotFoundError:
        return None
    return None if found is None else dict(json.loads(found))


def _whole_lines(path: Path, sharpness: Sharpness) -> tuple[set[int], int]:
    """The numbers of the trials, and how many broke a promise; a last line that was cut off is removed."""
    done, broken, end = set(), 0, 0
    with path.open("rb+") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            trial = _trial(line)
            if trial is None:
                raise CampaignFileError(f"{path}, line {number} is no trial: move the file away, or remove the line")
            done.add(trial["trial"])
            broken += bool(breach(trial))
            sharpness.add(trial)
            end += len(line)
        lines.truncate(end)
    return done, broken


def _trial(line: bytes) -> dict[str, Any] | None:
    """What a line says of a trial; None where it is no line of one."""
    try:
        trial = json.loads(line)
    except ValueError:
        return None
    return trial if isinstance(trial, dict) and isinstance(trial.get("trial"), int) else None


def plain(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line as it is written: numbers that are not finite are text."""
    return {name: _text(x) if isinstance(x, float) and x - x != 0 else x for name, x in line.items()}


def _text(x: float) -> str:
    return "NaN" if x != x else "Infinity" if x > 0 else "-Infinity"
