"""A campaign's results as files: one HTML page that holds all it needs, a CSV table, and JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import Any

from abft_tsm2.errors import AbftError
from abft_tsm2.faults.analysis import charts
from abft_tsm2.faults.analysis.stats import NARROW_SPACE, number, percent, rate_text
from abft_tsm2.faults.analysis.summary import FILE_TABLE, PAGE_TABLE, SCHEMA, Summary
from abft_tsm2.faults.analysis.tables import Row, by_scheme, main_scheme
from abft_tsm2.faults.analysis.tally import FOUND, HARMLESS, LOST
from abft_tsm2.faults.trials.trial import OUTCOMES, protects
from abft_tsm2.io.atomic import output_file

PAGE, TABLE, DATA = "report.html", "summary.csv", "summary.json"
FORMATS = ("html", "csv", "json")
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
ROWS_OPEN = 40  # of a table that is not folded away
ROWS_SHOWN = 2000  # of a table in the page; the files hold them all

TEXTS: Mapping[str, tuple[str, str]] = {
    "corrected": ("corrected", "The fault was found and repaired, and the result is right."),
    "detected": ("detected", "The fault was found and not repaired: the call refused to return the result as right."),
    "masked": ("masked", "The fault changed the result by less than rounding does: there was nothing to find."),
    "below_bound": (
        "below bound",
        "The change is larger than rounding, smaller than what is promised to be found, and was returned.",
    ),
    "cancelled": (
        "cancelled",
        "Single elements changed by more than the limit, but the weighted sum of their line did not: a checksum of"
        " that line cannot see it. It was returned.",
    ),
    "sdc": (
        "silent corruption",
        "A change above the bound was returned as right. Of a scheme that protects, this is a broken promise.",
    ),
    "crash": ("crash", "The call, or the process, ended with an error that is not the package's."),
    "hang": ("hang", "The call did not return in its time."),
    "clean": ("clean", "No fault was planted, nothing was said, and the result is right."),
    "false_alarm": ("false alarm", "No fault was planted, and one was reported."),
}
"""What outcomes are called, and what they mean."""


def write(folder: str | PathLike[str], *, format: str = "html", summary: Summary | None = None) -> list[Path]:
    """Write the report of a campaign into its folder; each file appears whole or not at all.

    Parameters
    ----------
    folder : path
        What a campaign wrote: campaign.toml, manifest.json and trials.jsonl. It may not be finished.
    format : str
        "html" writes report.html, a page that needs no other file and no network, and summary.csv; "csv" and "json"
        write summary.csv or summary.json alone.
    summary : Summary, optional
        Of the same folder, where it was read before.

    Returns
    -------
    paths : list of Path
        The files that were written; the first one is what was asked for.

    Raises
    ------
    ValueError
        If there is no such format.
    CampaignFileError
        If a file of the campaign is missing or cannot be understood.
    AbftError
        If the page cannot be made or written: what is missing, and how to get it.

    Examples
    --------
    >>> from abft_tsm2.faults.analysis.report import write
    >>> write("campaigns/first", format="pdf")
    Traceback (most recent call last):
    ...
    ValueError: there is no format 'pdf': choose from html, csv, json
    """
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}: choose from {', '.join(FORMATS)}")
    summary = summary or Summary.read(folder)
    if format == "json":
        contents = {DATA: summary.to_json() + "\n"}
    else:
        contents = {TABLE: as_csv(summary)}
        if format == "html":
            contents = {PAGE: as_html(summary), **contents}
    return [_written(Path(folder) / name, content) for name, content in contents.items()]


def as_json(folder: str | PathLike[str]) -> str:
    """The summary of a campaign's folder as strict JSON (RFC 8259), as `Summary.to_dict` has it.

    Raises
    ------
    CampaignFileError
        If a file of the campaign is missing or cannot be understood.
    """
    return Summary.read(folder).to_json()


def as_csv(summary: Summary) -> str:
    """Outcomes of planted faults: a row for each suite, operation, scheme, site, model, class of bits and type.

    The columns sdc_low and sdc_high are the interval of the probability of silent corruption, at 95 %.
    """
    file = io.StringIO()
    writer = csv.DictWriter(file, [*FILE_TABLE, "faults", *OUTCOMES, "sdc_low", "sdc_high"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(summary.file_rows)
    return file.getvalue()


def as_html(summary: Summary) -> str:
    """The page; see `write`."""
    try:
        import jinja2
        import matplotlib
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        raise AbftError(f"the page needs {missing}: pip install 'abft_tsm2[report]', or ask for csv or json") from error
    del matplotlib  # it is the charts that need it
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count": count,
        "sig": significant,
        "share": share,
        "seconds": seconds,
        "float_or_text": float_or_text,
    }
    template = resources.files("abft_tsm2.faults.analysis").joinpath("report.html.jinja").read_text(encoding="utf-8")
    return str(environment.from_string(template).render(_content(summary)))


def _content(summary: Summary) -> dict[str, Any]:
    import markupsafe

    flips = by_word(summary.bits)
    schemes = summary.schemes
    sized = main_scheme({row["scheme"] for row in summary.sizes})
    drawn = {
        "outcomes": [charts.outcome_chart(summary.totals)],
        "bits": [charts.bit_chart(rows) for rows in flips],
        "sizes": [charts.size_chart(summary.sizes, sized)],
        "cost": [charts.cost_chart(summary.cost, schemes)],
    }
    return {
        "summary": summary,
        "manifest": summary.manifest,
        "verdict": summary.verdict,
        "headline": headline(summary),
        "charts": {name: [markupsafe.Markup(svg) for svg in svgs if svg] for name, svgs in drawn.items()},
        "sized": sized,
        "flips": [row for rows in flips for row in by_position(rows)],
        "times": by_problem(summary.cost),
        "outcome_rows": {suite: shown_bits(summary.outcomes, suite) for suite in summary.suites},
        "texts": TEXTS,
        "of_faults": [name for name in TEXTS if name not in ("clean", "false_alarm")],
        "rate": lambda events, trials: rate_text(events, trials, grouping=NARROW_SPACE),
        "protects": protects,
        "schema": SCHEMA,
        "rows_open": ROWS_OPEN,
        "rows_shown": ROWS_SHOWN,
    }


def headline(summary: Summary) -> tuple[str, str]:
    """The kind of the verdict, "kept", "broken" or "none", and the verdict in a sentence."""
    verdict, broken = summary.verdict, summary.broken
    if not summary.tally.trials:
        return "none", "No trial has run yet: there is nothing to judge."
    if broken:
        many = "A promise was broken." if len(broken) == 1 else f"{len(broken)} promises were broken."
        return "broken", many
    if not verdict["schemes"]:
        return "none", "No scheme of this campaign promises anything: there is nothing to judge."
    return "kept", "Every promise was kept."


def by_word(flips: Sequence[Row]) -> list[list[Row]]:
    """Rows of single flipped bits, those of each type of operands and of words together."""
    kinds = sorted({(row["dtype"], row["word"]) for row in flips})
    return [[row for row in flips if (row["dtype"], row["word"]) == kind] for kind in kinds]


def by_position(flips: Sequence[Row]) -> list[Row]:
    """Rows of single flipped bits of the main scheme, neighbours with the same kinds of outcomes in one row."""
    merged: list[Row] = []
    harm = (*HARMLESS, *LOST)
    main = main_scheme({row["scheme"] for row in flips})
    for row in flips:
        if row["scheme"] != main:
            continue
        kinds = bool(row["found"]), *(bool(row[name]) for name in harm)
        last = merged[-1] if merged else {}
        if (row["region"], kinds) == (last.get("region"), last.get("kinds")):
            last["last"] = row["bit"]
            for name in ("faults", *FOUND, *harm):
                last[name] += row[name]
        else:
            merged.append({**row, "last": row["bit"], "kinds": kinds})
    return merged


def shown_bits(rows: Sequence[Row], suite: str) -> list[Row]:
    """Rows of one suite; bits that a campaign numbers one by one are together, as there may be 64 of them."""
    merged: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["suite"] != suite:
            continue
        row = {**row, "bits": "each bit" if row["bits"].isdecimal() else row["bits"]}
        place = tuple(row[name] for name in PAGE_TABLE)
        if place in merged:
            for name in ("faults", *OUTCOMES):
                merged[place][name] += row[name]
        else:
            merged[place] = row
    return list(merged.values())


def by_problem(rows: Sequence[Row]) -> list[Row]:
    """Rows of cost by operation: its "schemes", and its "problems", each with what its schemes took, in "times"."""
    operations: dict[str, Row] = {}
    for row in rows:
        empty = {"operation": row["operation"], "schemes": [], "problems": {}}
        operation = operations.setdefault(row["operation"], empty)
        if row["scheme"] not in operation["schemes"]:
            operation["schemes"].append(row["scheme"])
        labels = {name: row[name] for name in ("dtype", "m", "k", "n")}
        problem = {**labels, "clean_trials": 0, "times": {}}
        problem = operation["problems"].setdefault(tuple(labels.values()), problem)
        problem["clean_trials"] += row["clean_trials"]
        problem["times"][row["scheme"]] = row
    for operation in operations.values():
        operation["schemes"].sort(key=by_scheme)
        operation["problems"] = [operation["problems"][labels] for labels in sorted(operation["problems"])]
    return list(operations.values())


# ---- how numbers are shown -----------------------------------------------------------------------------------------


def count(value: int) -> str:
    """A number of trials."""
    return number(value, NARROW_SPACE)


def significant(value: float | None, digits: int = 3) -> str:
    """A number with a few digits; a dash where there is none.

    Examples
    --------
    >>> significant(1234.5), significant(0.00001234), significant(None), significant(float("inf"))
    ('1230', '1.23·10⁻⁵', '–', '∞')
    """
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}g}" if abs(value) < 1000 else f"{float(f'{value:.{digits}g}'):.0f}"
    digits_of, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    return f"{digits_of}·10{str(int(exponent)).translate(RAISED)}"


def float_or_text(value: float | str | None) -> str:
    """A number as it stands in a line of trials, where those that are not finite are text."""
    return significant(None if value is None else float(value))


def share(part: int, whole: int) -> str:
    """A share in per cent; a dash of nothing."""
    return f"{percent(part / whole)}{NARROW_SPACE}%" if whole else "–"


def seconds(value: float | None) -> str:
    """A time with its unit.

    Examples
    --------
    >>> seconds(0.00123), seconds(2.5), seconds(None)
    ('1.23 ms', '2.5 s', '–')
    """
    if value is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{significant(value / size)} {unit}"
    return f"{significant(value * 1e6)} µs"


def _written(path: Path, content: str) -> Path:
    with output_file(path) as keep:
        keep(content.encode())
    return path
