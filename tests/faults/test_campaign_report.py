"""The report of a campaign: its numbers on the page, in the CSV and in JSON, and that the page needs nothing else."""

from __future__ import annotations

import csv
import doctest
import io
import json
import re
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from abft_tsm2.errors import AbftError
from abft_tsm2.faults.analysis import charts, report
from abft_tsm2.faults.analysis.report import as_html, as_json, write
from abft_tsm2.faults.analysis.stats import clopper_pearson
from abft_tsm2.faults.analysis.summary import Summary
from abft_tsm2.faults.campaign.folder import CampaignFileError
from abft_tsm2.faults.trials.trial import OUTCOMES
from tests.support.campaign_folders import clean, folder, lifelike, trial

VOID = {"meta", "link", "br", "hr", "img", "input"}
NASTY = "<script>alert('x')</script><img src=x onerror=alert(1)>&\"'"


class Page(HTMLParser):
    """Elements, text and tables of a page; an element that is closed wrongly is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)
        if "table" in self.open and any(tag in self.open for tag in ("td", "th")):
            self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).replace("\u202f", "").split())

    def table(self, *heads: str) -> list[list[str]]:
        """The rows of the one table that has these columns."""
        (found,) = [table for table in self.tables if set(heads) <= set(table[0])]
        return found


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = folder(tmp_path_factory.mktemp("lively"), lifelike(1600))
    write(path)
    return path, (path / "report.html").read_text(encoding="utf-8")


def page_of(path: Path, records: list[dict[str, Any]], **options: Any) -> Page:
    numbered = [one | {"trial": number} for number, one in enumerate(records)]
    return Page(as_html(Summary.read(folder(path, numbered, **options))))


# ---- files ---------------------------------------------------------------------------------------------------------


def test_the_files_are_written_whole(tmp_path):
    path = folder(tmp_path, [trial(0)])
    assert [one.name for one in write(path)] == ["report.html", "summary.csv"]
    assert [one.name for one in write(path, format="csv")] == ["summary.csv"]
    assert [one.name for one in write(path, format="json")] == ["summary.json"]
    assert (path / "summary.json").read_text(encoding="utf-8") == as_json(path) + "\n"
    expected = {"campaign.toml", "manifest.json", "trials.jsonl", "report.html", "summary.csv", "summary.json"}
    assert {one.name for one in path.iterdir()} == expected


def test_a_format_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="choose from html, csv, json"):
        write(tmp_path, format="pdf")


def test_a_bad_campaign_leaves_the_old_report(tmp_path):
    path = folder(tmp_path, [trial(0)])
    write(path)
    before = (path / "report.html").read_bytes()
    folder(tmp_path, [trial(0, outcome="lucky")])
    with pytest.raises(CampaignFileError, match="lucky"):
        write(path)
    assert (path / "report.html").read_bytes() == before


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_a_missing_library_is_told_with_what_to_do(tmp_path, monkeypatch, missing):
    path = folder(tmp_path, [trial(0)])
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(AbftError, match=rf"needs {missing}: pip install 'abft_tsm2\[report\]'"):
        write(path)
    assert write(path, format="csv")


def test_the_page_is_the_same_each_time(lively):
    path, page = lively
    assert as_html(Summary.read(path)) == page


def test_the_csv_has_every_fault(lively):
    path, _ = lively
    rows = list(csv.DictReader(io.StringIO((path / "summary.csv").read_text(encoding="utf-8"))))
    trials = [json.loads(line) for line in (path / "trials.jsonl").read_text(encoding="utf-8").splitlines()]
    faults = [one for one in trials if one["model"]]
    assert sum(int(row["faults"]) for row in rows) == len(faults)
    assert list(rows[0])[:8] == ["suite", "operation", "scheme", "site", "model", "bits", "dtype", "faults"]
    for row in rows:
        labels = {name: row[name] for name in report.FILE_TABLE}
        same = [one for one in faults if {name: str(one[name]) for name in labels} == labels]
        assert int(row["faults"]) == len(same) > 0
        for outcome in OUTCOMES:
            assert int(row[outcome]) == sum(one["outcome"] == outcome for one in same)
        low, high = clopper_pearson(int(row["sdc"]), len(same))
        assert (float(row["sdc_low"]), float(row["sdc_high"])) == (low, high)


# ---- numbers on the page -------------------------------------------------------------------------------------------


def test_the_verdict_has_the_numbers(tmp_path):
    page = page_of(tmp_path, [*[trial(0)] * 1200, *[trial(0, outcome="detected")] * 34, *[clean(0)] * 77])
    assert "Every promise was kept." in page.text
    assert "1234 faults were planted in calls under the scheme protected." in page.text
    assert "Silent corruption above the bound: 0 of 1234 (< 0.30 %)." in page.text
    assert "False alarms in calls without a fault: 0 of 77 (< 4.7 %)." in page.text
    assert "1200 of 1234 found" in page.text
    assert ("section", {"class": "verdict kept", "aria-label": "Verdict"}) in page.elements


def test_a_broken_promise_is_the_first_thing_said(tmp_path):
    page = page_of(tmp_path, [trial(0), trial(0, outcome="sdc", note="element 3, 4"), clean(0)])
    assert ("section", {"class": "verdict broken", "aria-label": "Verdict"}) in page.elements
    assert "A promise was broken." in page.text
    rows = page.table("trial", "note")
    assert (rows[1][0], rows[1][1], rows[1][-1]) == ("1", "silent corruption", "element 3, 4")


def test_several_broken_promises_are_counted(tmp_path):
    page = page_of(tmp_path, [trial(0, outcome="sdc"), clean(0, outcome="false_alarm")])
    assert "2 promises were broken." in page.text


def test_peers_alone_promise_nothing(tmp_path):
    page = page_of(tmp_path, [trial(0, scheme="none", outcome="sdc")])
    assert "No scheme of this campaign promises anything" in page.text


def test_the_table_of_totals(tmp_path):
    counts = {"corrected": 5, "detected": 4, "masked": 3, "below_bound": 2, "cancelled": 1}
    trials = [trial(0, outcome=outcome) for outcome, number in counts.items() for _ in range(number)]
    page = page_of(tmp_path, [*trials, clean(0), clean(0), trial(0, scheme="rtol", outcome="sdc", suite="a storm")])
    head, *rows = page.table("scheme", "corrected", "without a fault")
    assert ["bits"] in rows
    ours = dict(zip(head, next(row for row in rows if row[0] == "protected"), strict=True))
    assert ours == {
        "scheme": "protected",
        "faults": "15",
        "corrected": "5",
        "detected": "4",
        "masked": "3",
        "below bound": "2",
        "cancelled": "1",
        "silent corruption": "0",
        "crash": "0",
        "hang": "0",
        "without a fault": "2",
        "false alarms": "0",
    }
    assert next(row for row in rows if row[0] == "rtol")[7] == "1"


def test_bits_with_the_same_outcomes_share_a_row(tmp_path):
    low = [trial(0, bit=bit, outcome="masked") for bit in range(8)]
    high = [trial(0, bit=bit) for bit in (*range(8, 12), *range(14, 32), 30)]  # 12 and 13 were not flipped
    head, *rows = page_of(tmp_path, [*low, *high]).table("bits", "part of the word")
    assert [row[:5] for row in rows] == [
        ["float32", "protected", "0 to 7", "mantissa", "8"],
        ["float32", "protected", "8 to 22", "mantissa", "13"],
        ["float32", "protected", "23 to 30", "exponent", "9"],
        ["float32", "protected", "31", "sign", "1"],
    ]
    assert rows[0][head.index("masked")] == "8"
    assert rows[2][head.index("corrected")] == "9"


def test_bits_of_16_bit_products_checked_in_float32_are_those_of_float32(tmp_path):
    stored = [trial(0, dtype="bfloat16", bit=bit) for bit in (6, 7, 15)]
    wide = [trial(0, dtype="bfloat16", scheme="float32", bit=bit) for bit in (22, 23, 31)]
    page = page_of(tmp_path, [*stored, *wide])
    _, *rows = page.table("bits", "part of the word")
    parts = ["mantissa", "exponent", "sign"]
    assert [(row[0], row[1], row[3]) for row in rows] == [
        *(("bfloat16", "protected", part) for part in parts),
        *(("float32 from bfloat16", "float32", part) for part in parts),
    ]
    labels = [attributes["aria-label"] for _, attributes in page.elements if "aria-label" in attributes]
    assert sum("flipped bits in" in label for label in labels) == 2


def test_bits_that_a_campaign_numbers_are_one_row(tmp_path):
    page = page_of(tmp_path, [trial(0, bits=str(bit), bit=bit) for bit in range(32)])
    head, *rows = page.table("site", "fault", "bits")
    assert [(row[head.index("bits")], row[head.index("faults")]) for row in rows] == [("each bit", "32")]


def test_cost_stands_beside_no_protection(tmp_path):
    page = page_of(tmp_path, [clean(0, seconds=0.003), clean(0, scheme="none", seconds=0.002)])
    head, row = page.table("calls", "protected", "none")
    cells = dict(zip(head, row, strict=True))
    assert (cells["protected"], cells["none"], cells["calls"]) == ("3 ms (1.5)", "2 ms", "2")


def test_an_unfinished_campaign_says_so_before_anything_else(tmp_path):
    page = page_of(tmp_path, [trial(0)], trials=10, finished=None)
    assert page.text.index("This campaign is not finished: 1 of 10") < page.text.index("Every promise")
    assert "not yet" in page.text


def test_a_finished_campaign_has_no_note(tmp_path):
    assert not any(a.get("class") == "notice" for _, a in page_of(tmp_path, [trial(0)]).elements)


def test_nothing_has_run(tmp_path):
    page = page_of(tmp_path, [], trials=10, finished=None)
    assert "No trial has run yet" in page.text
    assert "0 of 10" in page.text
    assert not any(a.get("role") == "img" for _, a in page.elements)
    assert len(write(tmp_path)) == 2


@pytest.mark.parametrize(
    "trials",
    [
        [clean(0)],
        [clean(0, closest=None)],
        [trial(0, size=None, relative=None, limit=None, located="", bit=-1)],
        [trial(0, dtype="int8", bit=3)],
        [trial(0, site="checksum", bit=-1, size=None)],
        [trial(0, scheme="none", outcome=outcome, size="NaN", relative="NaN") for outcome in ("sdc", "crash", "hang")],
        [clean(0, outcome="crash", seconds=0.0)],
        [trial(0, size=0, outcome="masked")],
        [trial(0, suite=f"suite {place}") for place in range(60)],
        [clean(0, m=place, scheme=scheme) for place in range(60) for scheme in ("none", "both")],
        [trial(0, scheme=f"scheme {place}", bit=place) for place in range(12)],
    ],
)
def test_campaigns_of_one_kind_make_a_page(tmp_path, trials):
    assert "Fault-injection campaign" in page_of(tmp_path, trials).text


def test_a_campaign_without_faults_speaks_of_calls(tmp_path):
    page = page_of(tmp_path, [*(clean(0) for _ in range(40)), clean(0, scheme="both", outcome="false_alarm")])
    assert "41 calls without a fault. False alarms: 1 of 41" in page.text
    assert "faults were planted" not in page.text
    assert "Repaired" not in page.text


def test_what_cancels_is_shown_with_its_reason(tmp_path):
    hidden = trial(0, model="swap_elements", outcome="cancelled", chance=0.25, note="row 3: it is small")
    page = page_of(tmp_path, [hidden, trial(0, model="swap_columns", chance=0.01)])
    rows = page.table("cancelled", "expected", "standard deviation")[1:]
    assert rows == [
        ["protected", "float32", "swap_columns", "1", "0", "0.01", "0.0995"],
        ["protected", "float32", "swap_elements", "1", "1", "0.25", "0.433"],
    ]
    assert page.table("probability", "why")[1][-1] == "row 3: it is small"


def test_how_to_run_it_again_is_there(lively):
    path, text = lively
    page = Page(text)
    assert "abft-tsm2 campaign run campaign.toml" in page.text
    assert " ".join((path / "campaign.toml").read_text(encoding="utf-8").split()) in page.text
    rows = dict(row for row in page.table("what", "this campaign"))
    assert rows["seed"] == "7"
    assert rows["numpy"] == "2.4.6"
    assert rows["cupy"] == "not installed"
    assert rows["time taken"] == "300 s"


# ---- the page by itself --------------------------------------------------------------------------------------------


def test_the_page_needs_no_other_file(lively):
    _, text = lively
    for _, attributes in Page(text).elements:
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            assert (attributes.get(name) or "#").startswith("#"), attributes
    assert "http" not in text
    assert "@import" not in text
    assert "<script" not in text
    assert re.findall(r"url\((?!#)", text) == []


def test_whatever_is_given_is_only_text(tmp_path):
    names = dict.fromkeys(("suite", "operation", "scheme", "dtype", "family", "model", "bits", "note", "status"), NASTY)
    trials = [
        trial(0, **names, site="product", outcome="sdc"),
        trial(0, scheme=NASTY, site=NASTY),
        trial(0, scheme=NASTY, dtype=NASTY, suite=NASTY, size=0.5),
        clean(0, scheme=NASTY, operation=NASTY, dtype=NASTY, suite=NASTY),
        clean(0, scheme="none", operation=NASTY, dtype=NASTY, suite=NASTY),
    ]
    manifest = {"name": NASTY, "device": NASTY, "command": NASTY, "started": NASTY, "versions": {NASTY: NASTY}}
    page = page_of(tmp_path, trials, campaign=f"# {NASTY}", **manifest)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img"}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count("<script>alert('x')</script>") > 15


def test_text_is_never_taken_for_a_formula(tmp_path):
    text = as_html(Summary.read(folder(tmp_path, [trial(0, suite="$x_1$ and \\frac", scheme="$")])))
    assert "$x_1$ and \\frac" in text[text.index("<figure>") :]


def test_names_in_the_page_are_unique_and_links_arrive(lively):
    page = Page(lively[1])
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names))
    links = {attributes["href"] for _, attributes in page.elements if "href" in attributes}
    assert {link.removeprefix("#") for link in links if link} <= set(names)
    used = set(re.findall(r"url\(#([^)]*)\)", lively[1]))
    assert used <= set(names)


def test_the_page_can_be_read_aloud(lively):
    page = Page(lively[1])
    assert ("html", {"lang": "en"}) in page.elements
    assert "made up" in page.text
    heads = [attributes for tag, attributes in page.elements if tag == "th"]
    assert heads
    assert all(a.get("scope") in ("col", "row", "rowgroup") for a in heads)
    pictures = [a for tag, a in page.elements if tag == "svg"]
    assert all(a.get("aria-hidden") or (a["role"] == "img" and len(a["aria-label"] or "") > 30) for a in pictures)
    assert sum(a.get("role") == "img" for a in pictures) == 5
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_a_drawing_takes_its_colours_from_the_page(lively):
    _, text = lively
    drawings = re.findall(r"<svg [^>]*role=.*?</svg>", text, re.DOTALL)
    for drawing in drawings:
        colours = set(re.findall(r"#[0-9a-fA-F]{6}\b", drawing))
        assert colours == set()
    light, dark = (re.findall(r"--([\w-]+): #", part) for part in text.split("prefers-color-scheme: dark")[:2])
    assert set(charts.NAMES) <= set(light)
    assert set(charts.NAMES) <= set(dark)


def test_tables_are_as_wide_as_their_heads(lively):
    for table in Page(lively[1]).tables:
        assert {len(row) for row in table[1:]} - {1} == {len(table[0])}


def test_the_template_is_in_the_package():
    source = Path(report.__file__).with_name("report.html.jinja").read_text(encoding="utf-8")
    assert "| safe" not in source
    assert "autoescape false" not in source


@pytest.mark.parametrize("documented", [report, charts])
def test_the_examples_run(documented):
    assert doctest.testmod(documented).failed == 0
