"""The measured numbers: results/*.csv, and the README's tables, which are generated from them.

    python -m benchmarks.tables README.md              rewrite its tables
    python -m benchmarks.tables --check README.md      exit code 1 if they differ from the CSVs

A table stands between the markers `<!-- table:NAME -->` and `<!-- /table -->`; NAME is one of `TABLES`.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, str]
_TABLE = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def write(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write results/NAME.csv; the columns are those of the first row."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(name: str) -> list[Row]:
    """The rows of results/NAME.csv."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run the benchmark that writes it (see each one's --help)")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is left-aligned and whose others are right-aligned."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)) + "\n"


def overhead() -> str:
    """Overhead of protected_gemm, with the machine it was measured on."""
    rows = read("overhead")
    head = ("A @ B", "plain, ms", "protected", "bar", "B encoded", "bar", "not rechecked", "encode, ms", "verify, ms")
    body = [
        (
            f"{row['dtype']} {row['m']} x {row['k']} x {row['n']}",
            _number(row["plain_ms"]),
            _percent(row["overhead"]),
            _percent(row["bar"]),
            _percent(row["overhead_encoded"]),
            _percent(row["bar_encoded"]),
            _percent(row["overhead_trusted"]),
            _number(row["encode_ms"]),
            _number(row["verify_ms"]),
        )
        for row in rows
    ]
    one = rows[0]
    where = f"{one['device']}, {one['cores']} cores, {one['blas']}, NumPy {one['numpy']}, Python {one['python']}"
    return f"{markdown(head, body)}\nMedians of interleaved pairs; {where}.\n"


def clean() -> str:
    """False alarms by type."""
    rows = read("clean_products")
    head = ("type", "clean products", "false alarms", "suspicions cleared", "closest residual / bound")
    body = [
        (
            dtype,
            *(str(sum(int(row[key]) for row in group)) for key in ("products", "alarms", "suspicions")),
            f"{max(float(row['closest']) for row in group):.2f}",
        )
        for dtype, group in _groups(rows, "dtype")
    ]
    return markdown(head, body)


def faults() -> str:
    """Planted faults by kind, all types together."""
    rows = read("planted_faults")
    keys = ("planted", "above", "found", "repaired", "refused", "missed_above", "wrong_above")
    head = (
        "fault",
        "planted",
        "above the limit",
        "found",
        "repaired",
        "refused",
        "missed above the limit",
        "wrong after repair",
    )
    body = [
        (kind, *(str(sum(int(row[key]) for row in group)) for key in keys)) for kind, group in _groups(rows, "kind")
    ]
    return markdown(head, body)


def escapes() -> str:
    """Single-bit flips over all families that were below the limit and stayed, by type and bit."""
    rows = [row for row in read("planted_bits") if int(row["missed_below"])]
    head = ("type", "bit", "flips", "found", "below the limit and not found")
    body = [(row["dtype"], row["bit"], row["planted"], row["found"], row["missed_below"]) for row in rows]
    return markdown(head, body)


def bits() -> str:
    """Share of flips found by bit, for normal data; only the bits where it is neither none nor all."""
    rows = [row for row in read("bits") if 0 < float(row["found"]) < 1]
    head = ("type, size", "bit", "flips", "found", "design")
    body = [
        (
            f"{row['dtype']} {row['n']}",
            row["bit"],
            row["flips"],
            f"{float(row['found']):.0%}",
            f"{float(row['design']):.0%}" if row["design"] not in ("", "nan") else "",
        )
        for row in rows
    ]
    return markdown(head, body)


def tightness() -> str:
    """Median of bound / largest clean residual by type and size."""
    from statistics import median

    rows = read("tightness")
    head = ("type", "size", "median bound / residual", "smallest", "largest")
    body = []
    for (dtype, n), group in _groups(rows, "dtype", "n"):
        ratios = sorted(float(row["ratio"]) for row in group)
        body.append((dtype, n, f"{median(ratios):.1f}", f"{ratios[0]:.1f}", f"{ratios[-1]:.1f}"))
    return markdown(head, body)


def storage() -> str:
    """What became of flipped bits in a stored matrix, by type: one flip, and patterns of several."""
    head = ("flips", "type", "cases", "restored exactly", "refused", "made worse, or called clean")
    body = []
    for single in (True, False):
        rows = [
            row for row in read("storage") if (row["regime"] == "one flip") == single and "sum" not in row["regime"]
        ]
        for dtype in sorted({row["dtype"] for row in rows}):
            group = [row for row in rows if row["dtype"] == dtype]
            counts = [
                str(sum(int(row[name]) for row in group for name in names))
                for names in (("cases",), ("restored",), ("refused",), ("clean", "wrong"))
            ]
            body.append(("one" if single else "2 to 8", dtype, *counts))
    return markdown(head, body)


TABLES: Mapping[str, Callable[[], str]] = {
    "overhead": overhead,
    "clean": clean,
    "faults": faults,
    "escapes": escapes,
    "bits": bits,
    "tightness": tightness,
    "storage": storage,
}


def fill(text: str) -> str:
    """The text with every table between markers made anew."""

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}: choose from {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[name]()}{match[3]}"

    return _TABLE.sub(table, text)


def _groups(rows: Iterable[Row], *keys: str) -> list[tuple[Any, list[Row]]]:
    # In order of appearance.
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys), []).append(row)
    return list(groups.items())


def _number(text: str) -> str:
    return f"{float(text):.3g}" if float(text) < 1000 else f"{float(text):.0f}"


def _percent(text: str) -> str:
    return "" if text == "nan" else f"{float(text):.1%}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if it would change")
    options = parser.parse_args(arguments)
    before = options.file.read_text(encoding="utf-8")
    after = fill(before)
    if options.check:
        if after != before:
            print(f"{options.file} differs from the CSVs: run python -m benchmarks.tables {options.file}")
        return int(after != before)
    options.file.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
