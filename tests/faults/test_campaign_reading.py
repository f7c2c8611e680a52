"""How a summary reads what a campaign wrote: lines that are torn, repeated or wrong, and files that are not there."""

from __future__ import annotations

import json

import pytest

from abft_tsm2.errors import AbftError
from abft_tsm2.faults.analysis import summary as module
from abft_tsm2.faults.analysis import tally
from abft_tsm2.faults.analysis.summary import Summary
from abft_tsm2.faults.campaign.folder import CampaignFileError
from tests.support.campaign_folders import folder, numbered, read, trial


def test_a_torn_last_line_is_left_out(tmp_path):
    whole = folder(tmp_path, numbered(trial(0), trial(0)))
    file = whole / "trials.jsonl"
    for kept in (len(json.dumps(trial(0))) + 2, file.stat().st_size - 3, file.stat().st_size - 150):
        torn = file.read_bytes()[:kept]
        other = folder(tmp_path / str(kept), numbered(trial(0), trial(0)))
        (other / "trials.jsonl").write_bytes(torn)
        summary = Summary.read(other)
        assert (summary.tally.trials, summary.tally.torn, summary.unfinished) == (1, True, True)
        assert any("cut off" in text for text in summary.remarks)


def test_a_line_torn_inside_a_character_is_left_out(tmp_path):
    path = folder(tmp_path, numbered(trial(0)))
    with (path / "trials.jsonl").open("ab") as file:
        file.write(b'{"note": "\xc3')
    assert Summary.read(path).tally.torn


def test_a_last_line_without_an_end_is_whole(tmp_path):
    path = folder(tmp_path, numbered(trial(0), trial(0)))
    text = (path / "trials.jsonl").read_text(encoding="utf-8")
    (path / "trials.jsonl").write_text(text.rstrip("\n"), encoding="utf-8")
    assert (Summary.read(path).tally.trials, Summary.read(path).tally.torn) == (2, False)


def test_a_repeated_trial_counts_once_and_the_first_wins(tmp_path):
    trials = [*numbered(*[trial(0)] * 5), trial(2), trial(3, outcome="sdc"), trial(5)]
    summary = read(tmp_path, trials, trials=6)
    assert (summary.tally.trials, summary.tally.repeated, summary.tally.contradicted) == (6, 2, 1)
    assert [row["corrected"] for row in summary.totals] == [6]
    assert not summary.unfinished
    assert summary.broken == []
    assert ["reproducible" in text for text in summary.remarks] == [False, True]


def test_numbers_of_trials_far_apart(tmp_path):
    trials = [trial(0), trial(3_000_000), trial(70_000), trial(3_000_000)]
    assert read(tmp_path, trials, trials=4).tally.repeated == 1


def test_more_trials_than_planned_are_told(tmp_path):
    (text,) = read(tmp_path, numbered(trial(0), trial(0)), trials=1).remarks
    assert "2 trials, though 1" in text


@pytest.mark.parametrize("outcome", ["masked", "below_bound", "sdc", "corrected"])
@pytest.mark.parametrize("scheme", ["protected", "none"])
def test_a_size_that_contradicts_its_outcome_is_told(tmp_path, scheme, outcome):
    remarks = read(tmp_path, numbered(trial(0, size=7.0, outcome=outcome, scheme=scheme, status="CLEAN"))).remarks
    wrong = scheme == "protected" and outcome in ("masked", "below_bound")
    assert ["contradict each other" in text for text in remarks] == [True] * wrong


def test_an_unfinished_campaign_says_how_much_is_missing(tmp_path):
    summary = read(tmp_path, numbered(trial(0)), trials=10, finished=None)
    assert summary.unfinished
    assert "1 of 10" in summary.remarks[0]
    assert "9 are missing" in summary.remarks[0]


def test_nothing_has_run(tmp_path):
    summary = read(tmp_path, [], trials=10, finished=None)
    assert summary.unfinished
    assert summary.broken == []
    assert summary.verdict["planted"] == 0
    for name in module.TABLES:
        assert summary.to_dict()[name] == []


LINE = json.dumps(trial(0))


@pytest.mark.parametrize("before", [0, 1, tally.BATCH - 1, tally.BATCH, 2 * tally.BATCH + 17])
@pytest.mark.parametrize(
    ("line", "told"),
    [
        pytest.param(LINE.replace('"corrected"', '"lucky"'), "unknown outcome 'lucky'", id="outcome"),
        pytest.param(LINE.replace('"exact"', '"there"'), "unknown located 'there'", id="located"),
        pytest.param(LINE.replace('"size"', '"weight"'), "has no 'size'", id="missing"),
        pytest.param(LINE.replace("1000000.0", '"large"'), "is not a trial: could not convert", id="no-number"),
        pytest.param(LINE.replace('"k": 512', '"k": "512"'), "has k '512', which is no int", id="type"),
        pytest.param(LINE.replace('"trial": 0', '"trial": -1'), "has trial -1", id="negative"),
        pytest.param(LINE.replace('"trial": 0', '"trial": 1e300'), "has trial 1e", id="huge"),
        pytest.param(LINE[:-20], "is not JSON", id="torn-in-the-middle"),
        pytest.param("", "is not JSON", id="blank"),
        pytest.param("[1, 2]", "is not a trial", id="list"),
        pytest.param("7", "is not a trial", id="number"),
        pytest.param(f"{LINE}, {LINE}", "is not JSON", id="two"),
    ],
)
def test_a_bad_line_is_named(tmp_path, before, line, told):
    path = folder(tmp_path, [])
    good = [json.dumps(trial(number + 1)) for number in range(before)]
    after = json.dumps(trial(before + 2))
    (path / "trials.jsonl").write_text("\n".join([*good, line, after, ""]), encoding="utf-8")
    with pytest.raises(CampaignFileError) as caught:
        Summary.read(path)
    assert f"line {before + 1} " in str(caught.value)
    assert told in str(caught.value)
    assert "run the campaign again" in str(caught.value)


@pytest.mark.parametrize("name", ["campaign.toml", "manifest.json", "trials.jsonl"])
def test_a_missing_file_is_named(tmp_path, name):
    path = folder(tmp_path, numbered(trial(0)))
    (path / name).unlink()
    with pytest.raises(CampaignFileError, match=name):
        Summary.read(path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CampaignFileError, match=r"there is no folder .*nowhere"):
        Summary.read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not JSON"),
        ("[]", "has schema None"),
        ('{"schema": "abft_tsm2/campaign/2"}', "has schema 'abft_tsm2/campaign/2'"),
        ('{"schema": "abft_tsm2/campaign/1"}', "has no name"),
    ],
)
def test_a_bad_manifest_is_told(tmp_path, text, told):
    path = folder(tmp_path, [])
    (path / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(AbftError, match=told):
        Summary.read(path)


@pytest.mark.parametrize("name", module.NEEDED)
def test_every_entry_of_the_manifest_is_asked_for(tmp_path, name):
    path = folder(tmp_path, [])
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    for bad in ({key: value for key, value in manifest.items() if key != name}, manifest | {name: [1]}):
        (path / "manifest.json").write_text(json.dumps(bad), encoding="utf-8")
        with pytest.raises(CampaignFileError, match=f"has no {name}"):
            Summary.read(path)
