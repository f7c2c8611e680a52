"""The tables of README.md and docs/, which are generated from results/*.csv.

    python -m benchmarks.tables                        rewrite the tables of all pages
    python -m benchmarks.tables README.md              of one page
    python -m benchmarks.tables --check                exit code 1 if a table differs from the CSVs

A table stands between the markers `<!-- table:NAME -->` and `<!-- /table -->`, in docs/*.rst between `.. table:NAME`
and `.. /table`; NAME is one of those in the TABLES of `MODULES`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    calls_tables,
    campaign_tables,
    cpu_tables,
    dask_tables,
    gemm_tables,
    lu_gpu_tables,
    lu_tables,
    readme_tables,
    replays_tables,
    stream_tables,
    tsm2_tables,
)

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.rst")))
_TABLE = re.compile(
    r"^(?P<open>(?:<!--|\.\.) table:(?P<name>[\w-]+)(?: -->)?\n).*?(?P<close>^(?:<!--|\.\.) /table)",
    re.DOTALL | re.MULTILINE,
)


MODULES = (
    *(cpu_tables, tsm2_tables, stream_tables, gemm_tables, lu_tables, lu_gpu_tables, campaign_tables),
    *(calls_tables, replays_tables, dask_tables, readme_tables),
)


def known() -> dict[str, Callable[[], str]]:
    """All tables by name."""
    return {name: table for module in MODULES for name, table in module.TABLES.items()}


def fill(text: str) -> str:
    """The text with every table between markers made anew."""
    tables = known()

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in tables:
            raise ValueError(f"there is no table {name!r}: choose from {', '.join(tables)}")
        gap = "" if match["open"].startswith("<") else "\n"
        return match["open"] + gap + tables[name]() + gap + match["close"]

    return _TABLE.sub(table, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="*", default=PAGES, help="without one: README.md and docs/*.rst")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a page would change")
    options = parser.parse_args(arguments)
    differ = False
    for page in options.pages:
        before = page.read_text(encoding="utf-8")
        after = fill(before)
        differ |= after != before
        if options.check and after != before:
            print(f"{page} differs from the CSVs: run python -m benchmarks.tables")
        if not options.check and after != before:
            page.write_text(after, encoding="utf-8")
    return int(options.check and differ)


if __name__ == "__main__":
    sys.exit(main())
