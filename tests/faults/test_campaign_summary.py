"""What a summary counts, against campaigns whose counts are known; and how it says that a file is wrong."""

from __future__ import annotations

import doctest
import json
import random
from collections import Counter
from typing import Any

import pytest

from abft_tsm2.faults.analysis import summary as module
from abft_tsm2.faults.analysis import tables, tally
from abft_tsm2.faults.analysis.stats import clopper_pearson
from abft_tsm2.faults.trials.trial import OUTCOMES, PEERS
from tests.support.campaign_folders import CAMPAIGN, clean, lifelike, numbered, read, trial


def rows(table: list[dict[str, Any]], **labels: Any) -> list[dict[str, Any]]:
    return [row for row in table if all(row[name] == label for name, label in labels.items())]


def only(table: list[dict[str, Any]], **labels: Any) -> dict[str, Any]:
    (row,) = rows(table, **labels)
    return row


# ---- what is counted -----------------------------------------------------------------------------------------------


def test_every_outcome_is_counted_once_where_it_belongs(tmp_path):
    # Outcome number i occurs i + 1 times, which no mix-up survives.
    trials = numbered(
        *(
            (clean if outcome in ("clean", "false_alarm") else trial)(0, outcome=outcome)
            for place, outcome in enumerate(OUTCOMES)
            for _ in range(place + 1)
        )
    )
    row = only(read(tmp_path, trials).totals)
    assert {outcome: row[outcome] for outcome in OUTCOMES} == {name: i + 1 for i, name in enumerate(OUTCOMES)}
    assert (row["clean_trials"], row["faults"]) == (1 + 2, sum(range(3, 11)))


def test_a_lifelike_campaign_is_counted_as_a_plain_loop_counts_it(tmp_path):
    trials = list(lifelike(3000))
    random.Random(3).shuffle(trials)
    summary = read(tmp_path, trials)
    plain = Counter((one["suite"], one["scheme"], one["outcome"]) for one in trials)
    found = {
        (row["suite"], row["scheme"], outcome): row[outcome]
        for row in summary.totals
        for outcome in OUTCOMES
        if row[outcome]
    }
    assert found == dict(plain)
    assert summary.tally.trials == 3000
    assert sum(row["faults"] for row in summary.outcomes) == sum(bool(one["model"]) for one in trials)
    assert sum(row["faults"] for row in summary.file_rows) == sum(bool(one["model"]) for one in trials)


def test_the_order_of_the_lines_changes_nothing(tmp_path):
    trials = list(lifelike(800))
    first = read(tmp_path / "a", trials).to_json()
    random.Random(5).shuffle(trials)
    assert read(tmp_path / "b", trials).to_json() == first


def test_bits_are_of_single_flips_in_the_product(tmp_path):
    summary = read(
        tmp_path,
        numbered(
            *[trial(0, bit=23, outcome="corrected")] * 3,
            trial(0, bit=23, outcome="detected"),
            trial(0, bit=23, outcome="sdc"),
            trial(0, bit=23, outcome="cancelled"),
            *[trial(0, bit=22, outcome="masked")] * 2,
            trial(0, bit=22, outcome="below_bound"),
            trial(0, bit=31, outcome="hang", scheme="none"),
            trial(0, bit=23, site="operand_a"),
            trial(0, bit=23, model="stuck_at_1"),
            trial(0, bit=23, persistent=True),
            trial(0, bit=-1),
        ),
    )
    assert len(summary.bits) == 3
    high = only(summary.bits, scheme="protected", bit=23)
    assert [high[name] for name in ("faults", "found", "harmless", "lost")] == [6, 4, 0, 2]
    low = only(summary.bits, scheme="protected", bit=22)
    assert [low[name] for name in ("faults", "found", "harmless", "lost")] == [3, 0, 3, 0]
    assert [row["region"] for row in summary.bits] == ["mantissa", "exponent", "sign"]
    assert only(summary.bits, scheme="none")["lost"] == 1


def test_alarms_and_the_closest_residual(tmp_path):
    closest = [0.1, 0.5, 0.2, None]
    summary = read(
        tmp_path,
        numbered(
            *(clean(0, closest=c) for c in closest),
            clean(0, outcome="false_alarm", closest=None),
            clean(0, outcome="crash", closest=None),
            clean(0, scheme="rtol", outcome="false_alarm"),
        ),
    )
    row = only(summary.alarms, scheme="protected")
    assert (row["clean_trials"], row["false_alarm"], row["other"]) == (6, 1, 1)
    assert (row["closest_median"], row["closest_largest"]) == (0.2, 0.5)
    assert (row["false_alarm_low"], row["false_alarm_high"]) == clopper_pearson(1, 6)
    assert only(summary.alarms, scheme="rtol")["false_alarm"] == 1


def test_only_faults_above_the_limit_are_asked_for_their_place(tmp_path):
    summary = read(
        tmp_path,
        numbered(
            trial(0, size=1.5, located="exact"),
            trial(0, size="NaN", located="covered"),
            trial(0, size="Infinity", located="wrong", outcome="detected"),
            trial(0, size=1.0, located="wrong"),  # not above
            trial(0, size=None, located="wrong"),
            trial(0, size=9.0, located="exact", outcome="sdc", status="CLEAN"),  # not found
            trial(0, size=9.0, located="exact", site="checksum"),
            trial(0, size=9.0, located=""),
        ),
    )
    row = only(summary.locations)
    assert [row[name] for name in ("faults", "exact", "covered", "wrong")] == [3, 1, 1, 1]
    assert summary.verdict["located"] == {"exact": 1, "covered": 1, "wrong": 1}
    assert (summary.verdict["above"], summary.verdict["above_found"]) == (5, 4)


def test_how_sharp_the_checks_are(tmp_path):
    summary = read(
        tmp_path,
        numbered(
            trial(0, size=0.4, relative=1e-6, limit=3e-6),
            trial(0, size=2.0, relative=4e-6, limit=2e-6),
            trial(0, size=0.7, relative=2e-6, limit=1e-6, outcome="below_bound", status="CLEAN"),
            trial(0, size=0.1, relative=1e-7, limit=1e-6, outcome="masked", status="CLEAN"),
            # Several elements: they say something about sizes, nothing about the change of one element.
            trial(
                0,
                size=0.9,
                relative=7.0,
                limit=None,
                outcome="below_bound",
                model="row",
                bit=-1,
                single=False,
                status="CLEAN",
            ),
            trial(0, size=0.9, relative=7.0, limit=None, outcome="below_bound", bit=-1, single=False, status=""),
            trial(0, size=5.0, relative=7.0, limit=None, outcome="hang", bit=-1, single=False, status=""),
            # Of two faults the larger one was found; what stayed is below the bound.
            trial(0, size=6.0, relative=7.0, limit=None, outcome="below_bound", bit=-1, single=False),
            clean(0, closest=0.3),
        ),
    )
    row = only(summary.tightness)
    assert (row["missed_largest"], row["found_smallest"]) == (0.9, 0.4)
    assert (row["closest_median"], row["closest_largest"]) == (0.3, 0.3)
    assert (row["above"], row["above_found"]) == (3, 2)
    row = only(summary.detectable, scheme="protected", dtype="float32", k=512)
    assert (row["limit"], row["missed_largest"], row["found_smallest"], row["faults"]) == (1e-6, 2e-6, 1e-6, 4)


def test_sizes_by_powers_of_two(tmp_path):
    sizes = [0.5, 0.999, 1.0, 1.999, 2.0, 0, "Infinity", "NaN", 1e-300, 3.0]
    outcomes = ["below_bound", "below_bound", "corrected", "corrected", "corrected", "masked", "detected", "detected"]
    outcomes += ["masked", "sdc"]
    summary = read(tmp_path, numbered(*(trial(0, size=s, outcome=o) for s, o in zip(sizes, outcomes, strict=True))))
    lowest, highest = tables.POWERS["sizes"]
    found = {row["power"]: row for row in summary.sizes}
    assert {power: row["faults"] for power, row in found.items()} == {
        "none": 1,
        lowest: 1,
        -1: 2,
        0: 2,
        1: 2,
        highest: 2,
    }
    assert (found[1]["corrected"], found[1]["sdc"], found[-1]["below_bound"]) == (1, 1, 2)


def test_cost_is_a_median_beside_that_of_no_protection(tmp_path):
    summary = read(
        tmp_path,
        numbered(
            *(clean(0, seconds=s) for s in (0.2, 0.3, 0.9)),
            *(clean(0, seconds=s, scheme="none") for s in (0.2, 0.1, 5.0)),
            clean(0, seconds=60.0, outcome="hang"),
            trial(0, seconds=70.0),
            clean(0, seconds=1.0, m=1),
        ),
    )
    row = only(summary.cost, scheme="protected", m=256)
    assert (row["seconds"], row["times_none"], row["clean_trials"]) == (0.3, 0.3 / 0.2, 3)
    assert only(summary.cost, scheme="none")["times_none"] == 1
    assert only(summary.cost, m=1)["times_none"] is None


def test_schemes_are_compared_where_a_suite_ran_several(tmp_path):
    summary = read(
        tmp_path,
        numbered(
            *[trial(0)] * 3,
            trial(0, outcome="cancelled"),
            *[trial(0, scheme="none", outcome="sdc")] * 2,
            trial(0, scheme="none", outcome="crash"),
            trial(0, scheme="none", outcome="masked"),
            clean(0, scheme="none"),
            trial(0, suite="alone"),
        ),
    )
    assert {row["suite"] for row in summary.contest} == {"bits"}
    ours, none = summary.contest
    assert (ours["scheme"], ours["found"], ours["escaped"], ours["escaped_share"]) == ("protected", 3, 1, 0.25)
    assert (none["scheme"], none["escaped"], none["failed"], none["harmless"]) == ("none", 2, 1, 1)
    assert (none["escaped_low"], none["escaped_high"]) == clopper_pearson(2, 4)


def test_schemes_that_protect_come_first_and_suites_as_the_campaign_has_them(tmp_path):
    schemes = ["rtol", "none", "both", "another", "fixed", "protected", "double"]
    trials = [trial(0, scheme=scheme, suite=suite) for scheme in schemes for suite in ("a storm", "bits", "aaa")]
    summary = read(tmp_path, numbered(*trials))
    assert summary.suites == ["bits", "a storm", "aaa"]
    assert list(dict.fromkeys(row["suite"] for row in summary.totals)) == summary.suites
    ordered = ["protected", "both", "another", "none", "double", "rtol", "fixed"]
    assert [row["scheme"] for row in rows(summary.totals, suite="bits")] == ordered
    assert summary.verdict["schemes"] == ordered[:3]


@pytest.mark.parametrize("text", ["not = [toml", 'suite = "no table"', "suite = [1]", ""])
def test_a_campaign_file_that_says_nothing_of_suites_is_no_error(tmp_path, text):
    assert read(tmp_path, numbered(trial(0)), campaign=text).suites == ["bits"]


# ---- promises ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        ("sdc", "a silent corruption"),
        ("false_alarm", "a false alarm"),
        ("crash", "a crash"),
        ("hang", "did not return"),
    ],
)
def test_a_broken_promise_is_told(tmp_path, outcome, told):
    make = clean if outcome == "false_alarm" else trial
    summary = read(tmp_path, numbered(trial(0), make(0, outcome=outcome, note="look here")))
    (text,) = summary.broken
    assert told in text
    assert "'bits'" in text
    assert "'protected'" in text
    assert "1 of 2" in text
    assert [row["note"] for row in summary.examples] == ["look here"]


@pytest.mark.parametrize("scheme", PEERS)
@pytest.mark.parametrize("outcome", ["sdc", "crash", "hang"])
def test_others_promise_nothing(tmp_path, scheme, outcome):
    summary = read(tmp_path, numbered(trial(0, scheme=scheme, outcome=outcome)))
    assert (summary.broken, summary.examples, summary.verdict["planted"]) == ([], [], 0)


@pytest.mark.parametrize("outcome", ["masked", "below_bound", "cancelled", "corrected", "detected"])
def test_what_is_no_broken_promise(tmp_path, outcome):
    assert read(tmp_path, numbered(trial(0, outcome=outcome), clean(0))).broken == []


def test_the_examples_are_the_trials_with_the_lowest_numbers(tmp_path):
    trials = [trial(number, outcome="sdc") for number in range(100)]
    random.Random(1).shuffle(trials)
    assert [row["trial"] for row in read(tmp_path, trials).examples] == list(range(tally.EXAMPLES))


def test_the_verdict(tmp_path):
    trials = [*[trial(0)] * 90, *[trial(0, outcome="detected")] * 10, *[clean(0)] * 50]
    verdict = read(tmp_path, numbered(*trials, trial(0, scheme="none", outcome="sdc"))).verdict
    assert (verdict["planted"], verdict["clean_trials"], verdict["sdc"], verdict["false_alarm"]) == (100, 50, 0, 0)
    assert (verdict["found"], verdict["corrected"]) == (100, 90)
    assert (verdict["sdc_low"], verdict["sdc_high"]) == clopper_pearson(0, 100)


def test_a_wrong_result_without_a_fault_is_told(tmp_path):
    summary = read(tmp_path, numbered(*[clean(0)] * 9, clean(0, outcome="sdc")))
    assert (summary.verdict["planted"], summary.verdict["sdc"]) == (0, 1)
    assert (summary.verdict["sdc_low"], summary.verdict["sdc_high"]) == clopper_pearson(1, 10)
    assert summary.broken


# ---- JSON ----------------------------------------------------------------------------------------------------------


def test_the_json_is_strict_and_whole(tmp_path):
    sizes = ["NaN", "Infinity", 2.0]
    summary = read(tmp_path, numbered(*(trial(0, size=s, relative=s, outcome="sdc", scheme="none") for s in sizes)))

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    data = json.loads(summary.to_json(), parse_constant=refuse)
    assert data["schema"] == module.SCHEMA
    assert data["tightness"][0]["missed_largest"] == "NaN"
    assert data["manifest"]["versions"]["cupy"] is None
    assert set(module.TABLES) <= set(data)


def test_notes_are_counted(tmp_path):
    notes = ["one", "two", "two", ""]
    summary = read(tmp_path, numbered(*(trial(0, note=note) for note in notes)))
    assert [(row["note"], row["trials"]) for row in summary.notes] == [("two", 2), ("one", 1)]


def test_notes_that_are_all_different_do_not_fill_the_memory(tmp_path):
    summary = read(tmp_path, [trial(number, note=f"note {number}") for number in range(tally.NOTES + 50)])
    assert len(summary.notes) == tally.NOTES


def test_the_campaign_is_kept_as_it_was_given(tmp_path):
    assert read(tmp_path, []).campaign == CAMPAIGN


@pytest.mark.parametrize("documented", [module, tables, tally])
def test_the_examples_run(documented):
    assert doctest.testmod(documented).failed == 0


# ---- what cancels --------------------------------------------------------------------------------------------------


def test_what_is_hidden_stands_beside_what_is_to_be_expected(tmp_path):
    swap = {"model": "swap_elements", "bit": -1, "single": False}
    summary = read(
        tmp_path,
        numbered(
            *(trial(0, **swap, chance=0.25) for _ in range(8)),
            *(trial(0, **swap, chance=None) for _ in range(5)),
            *(trial(0, **swap, chance=0.5, outcome="cancelled", note=f"reason {i}") for i in range(3)),
            trial(0, **swap, scheme="none", chance=0.5, outcome="cancelled"),
            trial(0, model="swap_columns", dtype="float64", chance=1e-6, outcome="cancelled"),
            trial(0),
        ),
    )
    elements, columns = summary.cancellation
    assert elements == {
        **{"scheme": "protected", "dtype": "float32", "model": "swap_elements", "faults": 16, "cancelled": 3},
        **{"expected": 3.5, "deviation": pytest.approx((8 * 0.25 * 0.75 + 3 * 0.25) ** 0.5), "within": True},
    }
    assert (columns["cancelled"], columns["expected"], columns["within"]) == (1, 1e-6, False)
    assert [row["note"] for row in summary.cancelled] == ["reason 0", "reason 1", "reason 2", ""]
    assert summary.notes == []
    assert summary.broken == []


def test_of_many_cases_those_with_the_lowest_numbers_are_kept(tmp_path):
    many = numbered(*(trial(0, model="opposite", outcome="cancelled", chance=0.5) for _ in range(tally.CANCELLED + 30)))
    kept = read(tmp_path, many[::-1]).cancelled
    assert [row["trial"] for row in kept] == list(range(tally.CANCELLED))
