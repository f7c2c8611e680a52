"""The folder of a campaign keeps what was written, one process at a time, and says what is wrong with it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from abft_tsm2.faults.campaign.folder import BATCH, CampaignFileError, Folder
from tests.support.small_campaigns import lines


def test_a_line_that_was_cut_off_is_not_there(tmp_path: Path) -> None:
    with Folder(tmp_path, "text", resume=False) as folder:
        for number in (4, 2):
            folder.append({"trial": number, "outcome": "clean"})
    whole = (tmp_path / "trials.jsonl").read_bytes()
    (tmp_path / "trials.jsonl").write_bytes(whole + b'{"trial": 7, "outc')
    with Folder(tmp_path, "text", resume=True) as folder:
        assert folder.done == {2, 4}
        assert (tmp_path / "trials.jsonl").read_bytes() == whole
        folder.append({"trial": 7, "outcome": "clean"})
    assert [one["trial"] for one in lines(tmp_path)] == [4, 2, 7]


def test_a_line_that_is_no_trial_is_not_thrown_away(tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").write_text('{"trial": 1, "outcome": "clean"}\nhello\n')
    with pytest.raises(CampaignFileError, match=r"trials\.jsonl, line 2 is no trial: move the file away"):
        Folder(tmp_path, "text", resume=True)
    assert "hello" in (tmp_path / "trials.jsonl").read_text()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with Folder(tmp_path, "text", resume=False) as folder:
        with pytest.raises(CampaignFileError, match="another process runs a campaign there; name another folder"):
            Folder(tmp_path, "text", resume=False)
        folder.append({"trial": 0, "outcome": "clean"})
    with pytest.raises(CampaignFileError, match="holds trials already: pass --resume to go on"):
        Folder(tmp_path, "text", resume=False)
    with pytest.raises(CampaignFileError, match="is another campaign than the one to go on with"):
        Folder(tmp_path, "other", resume=True)
    Folder(tmp_path, "text", resume=True).close()  # nothing holds it: neither of those that were refused does


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CampaignFileError, match="cannot write"):
            Folder(path, "text", resume=False)


def test_numbers_that_are_not_finite_are_text(tmp_path: Path) -> None:
    with Folder(tmp_path, "text", resume=False) as folder:
        folder.append({"trial": 0, "a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 0.1, "e": None})
    assert lines(tmp_path) == [{"trial": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.1, "e": None}]


def test_lines_are_on_the_disk_after_so_many_and_after_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    folder = Folder(tmp_path, "text", resume=False)
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(file))
    for number in range(BATCH):
        folder.append({"trial": number})
    assert len(synced) >= 1
    assert len(lines(tmp_path)) == BATCH
    folder.append({"trial": BATCH})
    later = time.monotonic() + 1.5
    monkeypatch.setattr(time, "monotonic", lambda: later)
    folder.append({"trial": BATCH + 1})
    assert len(lines(tmp_path)) == BATCH + 2
    assert len(synced) >= 2
    folder.close()


def test_promises_that_were_broken_before_count_when_it_goes_on(tmp_path: Path) -> None:
    ended = [("protected", "sdc"), ("none", "sdc"), ("both", "false_alarm"), ("protected", "corrected")]
    with Folder(tmp_path, "text", resume=False) as folder:
        for number, (scheme, outcome) in enumerate(ended):
            folder.append({"trial": number, "suite": "s", "scheme": scheme, "m": 3, "outcome": outcome, "note": ""})
        assert folder.broken == 0
    with Folder(tmp_path, "text", resume=True) as folder:
        assert folder.broken == 2
