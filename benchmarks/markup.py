"""How tables and their numbers are written, in Markdown and in reStructuredText."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.sheet import Row


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown: the first column left-aligned, the others right-aligned."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)) + "\n"


def csv_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of reStructuredText, aligned likewise (docs/_static/tables.css); nothing of no rows, which is none."""
    rows = list(rows)
    if not rows:
        return ""
    options = (":header-rows: 1", ":delim: |", ":widths: auto", ":class: numbers", "")
    lines = (*options, *(" | ".join(cells).rstrip() for cells in (head, *rows)))
    return ".. csv-table::\n" + "".join(f"   {line}".rstrip() + "\n" for line in lines)


def number(text: str | float) -> str:
    """Three digits, or all before the point."""
    return f"{float(text):.3g}" if float(text) < 1000 else f"{float(text):.0f}"


def percent(text: str) -> str:
    """A share; nothing for NaN."""
    return "" if text == "nan" else f"{float(text):.1%}"


def ratio(text: str) -> str:
    """Two digits behind the point; nothing for an empty text."""
    return f"{float(text):.2f}" if text else ""


def shown(row: Mapping[str, str], key: str) -> str:
    """A number, or why there is none."""
    if row.get(key):
        return number(row[key])
    return "failed" if row.get("error") else "not suitable" if row.get("note") else ""


def groups_of(rows: Iterable[Row], *keys: str) -> list[tuple[Any, list[Row]]]:
    # In order of appearance.
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.items())


def footer(how: str, rows: Sequence[Row], peaks: Mapping[str, str]) -> str:
    """The line below a table: how and on what its rows were measured, and rates of the memory by ceiling, in GB/s."""
    if not rows:
        return ""
    names = {"read": "reading", "copy": "a copy"}
    rates = "".join(f"; {names[name]} reaches {float(peak):.0f} GB/s" for name, peak in sorted(peaks.items()))
    return f"\n{how}; {gpu(*rows)}{rates}.\n"


def gpu(*rows: Mapping[str, str]) -> str:
    """What rows were measured on, in one line: by the last one, and from which day on."""
    last, days = rows[-1], sorted({row["date"] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{last['device']}, driver {last['driver']}, CUDA {last['cuda']}, CuPy {last['cupy']}, {when}"
