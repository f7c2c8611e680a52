"""The measured numbers: results/*.csv, and the tables of README.md and docs/, which are generated from them.

    python -m benchmarks.tables                        rewrite the tables of all pages
    python -m benchmarks.tables README.md              of one page
    python -m benchmarks.tables --check                exit code 1 if a table differs from the CSVs

A table stands between the markers `<!-- table:NAME -->` and `<!-- /table -->`, in docs/*.rst between `.. table:NAME`
and `.. /table`; NAME is one of `TABLES`, here and in the modules that `known` lists.
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
ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.rst")))
Row = dict[str, str]
_TABLE = re.compile(
    r"^(?P<open>(?:<!--|\.\.) table:(?P<name>[\w-]+)(?: -->)?\n).*?(?P<close>^(?:<!--|\.\.) /table)",
    re.DOTALL | re.MULTILINE,
)


def write(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write results/NAME.csv; the columns are those of the first row."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(name: str, path: Path | None = None) -> list[Row]:
    """The rows of results/NAME.csv, or of another CSV."""
    path = path or RESULTS / f"{name}.csv"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run the benchmark that writes it (see each one's --help)")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown: the first column left-aligned, the others right-aligned."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)) + "\n"


def csv_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of reStructuredText, aligned likewise (docs/_static/tables.css)."""
    options = (":header-rows: 1", ":delim: |", ":widths: auto", ":class: numbers", "")
    lines = (*options, *(" | ".join(cells).rstrip() for cells in (head, *rows)))
    return ".. csv-table::\n" + "".join(f"   {line}".rstrip() + "\n" for line in lines)


def overhead() -> str:
    """Overhead of protected_gemm, with the machine it was measured on."""
    rows = read("overhead")
    head = (
        "A @ B",
        "plain, ms",
        "protected",
        "target",
        "B encoded",
        "target",
        "not rechecked",
        "encode, ms",
        "verify, ms",
    )
    body = [
        (
            f"{row['dtype']} {row['m']} x {row['k']} x {row['n']}",
            number(row["plain_ms"]),
            percent(row["overhead"]),
            percent(row["bar"]),
            percent(row["overhead_encoded"]),
            percent(row["bar_encoded"]),
            percent(row["overhead_trusted"]),
            number(row["encode_ms"]),
            number(row["verify_ms"]),
        )
        for row in rows
    ]
    one = rows[0]
    where = f"{one['device']}, {one['cores']} cores, {one['blas']}, NumPy {one['numpy']}, Python {one['python']}"
    return f"{csv_table(head, body)}\nMedians of interleaved pairs; {where}.\n"


def tightness() -> str:
    """Median of bound / largest clean residual by type and size."""
    from statistics import median

    rows = read("tightness")
    head = ("type", "size", "median bound / residual", "smallest", "largest")
    body = []
    for (dtype, n), group in _groups(rows, "dtype", "n"):
        ratios = sorted(float(row["ratio"]) for row in group)
        body.append((dtype, n, f"{median(ratios):.1f}", f"{ratios[0]:.1f}", f"{ratios[-1]:.1f}"))
    return csv_table(head, body)


# ---- tall-skinny kernels on a GPU (benchmarks.bench_tsm2) ----------------------------------------------------------


def latest(suite: str, path: Path | None = None) -> list[tuple[str, dict[str, Row]]]:
    """Cells of a suite of bench_tsm2 in order: what is multiplied, and the last row of each contender.

    Parameters
    ----------
    suite : str
    path : Path, optional
        The CSV; results/tsm2.csv where none is given.
    """
    rows = [row for row in read("tsm2", path) if row["suite"] == suite and row["contender"]]
    cells: dict[tuple[str, int, int, int], dict[str, Row]] = {}
    for row in rows:
        at = row["dtype"], int(row["m"]), int(row["k"]), int(row["n"])
        cells.setdefault(at, {})[row["contender"]] = row
    return [(f"{dtype} {m} x {k} x {n}", cells[dtype, m, k, n]) for dtype, m, k, n in sorted(cells)]


def gpu(row: Mapping[str, str]) -> str:
    """What a row of bench_tsm2 was measured on, in one line."""
    return f"{row['device']}, driver {row['driver']}, CUDA {row['cuda']}, CuPy {row['cupy']}, {row['date']}"


def tsm2r() -> str:
    """TSM2R V3 with the published parameters beside cuBLAS, CuPy and the published code."""
    head = (
        *("A @ B", "best cuBLAS, ms", "which", "CuPy @, ms", "V3, ms", "of reading", "x cuBLAS", "x CuPy"),
        *("published code, ms", "V3 / published"),
    )
    body = []
    for label, cell in latest("tsm2r"):
        v3 = cell.get("V3", {})
        related = [ratio(v3.get(key, "")) for key in ("speedup", "speedup_cupy")]
        code = _cell(v3, "published_ms"), ratio(v3.get("ratio_to_published", ""))
        share = percent(v3.get("share_of_ceiling") or "nan")
        body.append((label, *_vendor(v3), _cell(v3, "ms"), share, *related, *code))
    return csv_table(head, body) + _footer("tsm2r", "read")


def tsm2l() -> str:
    """TSM2L with the published parameters, what tall_skinny_matmul takes, and the paper's best; beside cuBLAS, CuPy."""
    head = (
        *("A @ B", "best cuBLAS, ms", "which", "CuPy @, ms", "Opt-1, ms", "Opt-2, ms"),
        *("chosen, ms", "best, ms", "t2, t3, tcf", "of a copy", "x cuBLAS", "published code, ms"),
    )
    body = []
    for label, cell in latest("tsm2l"):
        ours = [row for row in cell.values() if row["t1"] and row["ms"]]
        best = min(ours, key=lambda row: float(row["ms"]), default={})
        known = cell.get("Opt-1", {})
        times = [_cell(cell.get(name, {}), "ms") for name in ("Opt-1", "Opt-2", "tall_skinny_matmul")]
        variant = "Opt-1" if "opt1" in best.get("config", "") else "Opt-2"
        which = f"{variant}: {best['t2']}, {best['t3']}, {best['tcf']}" if best else ""
        shares = percent(best.get("share_of_ceiling") or "nan"), ratio(best.get("speedup", ""))
        body.append((label, *_vendor(best), *times, _cell(best, "ms"), which, *shares, _cell(known, "published_ms")))
    return csv_table(head, body) + _footer("tsm2l", "copy")


def ladder() -> str:
    """What each step of TSM2R gains over the one before, beside the paper's gains on a K40c."""
    head = ("A @ B", "V0, ms", "V1 / V0 (2.2-4.7)", "V2 / V1 (1.1-2.1)", "V3 / V2 (1.3-3.5)", "V3, ms")
    body = [
        (
            label,
            _cell(cell.get("V0", {}), "ms"),
            *(ratio(cell.get(variant, {}).get("gain", "")) for variant in ("V1", "V2", "V3")),
            _cell(cell.get("V3", {}), "ms"),
        )
        for label, cell in latest("tsm2r")
    ]
    return f"{csv_table(head, body)}\nGains in speed; in brackets the paper's, on a K40c.\n"


def tcf() -> str:
    """TSM2L over the thread count factor tcf."""
    body = []
    for label, cell in latest("tcf"):
        ours = [row for row in cell.values() if row["config"]]
        for value in sorted({int(row["tcf"]) for row in ours}):
            pair = [cell.get(f"{variant} tcf {value}", {}) for variant in ("Opt-1", "Opt-2")]
            numbers = [text for row in pair for text in (_cell(row, "ms"), ratio(row.get("speedup", "")))]
            body.append((label, str(value), *numbers))
    return csv_table(("A @ B", "tcf", "Opt-1, ms", "x cuBLAS", "Opt-2, ms", "x cuBLAS"), body) + _footer("tcf", "copy")


def small_k() -> str:
    """Bandwidth where k is small: TSM2R's V3 and both variants of TSM2L."""
    names = ("V3", "Opt-1", "Opt-2")
    body = [
        (label, *(_cell(cell.get(name, {}), "gbs") for name in names), _cell(cell.get("V3", {}), "best_cublas_ms"))
        for label, cell in latest("small_k")
    ]
    return csv_table(("A @ B", *(f"{name}, GB/s" for name in names), "best cuBLAS, ms"), body)


def load_efficiency() -> str:
    """Share of the loaded bytes that are used, by variant: the paper's gld_efficiency."""
    head = ("kernel", "bytes used", "sectors a request", "memory busy", "registers")
    body = [
        (
            f"{row['variant']} {row['dtype']}",
            f"{float(row['gld_efficiency']):.1f}%",
            f"{float(row['sectors_per_request']):.1f}",
            f"{float(row['dram_percent_of_peak']):.0f}%",
            row["registers"].partition(".")[0],
        )
        for row in read("load_efficiency")
        if not row["error"]
    ]
    return csv_table(head, body)


def _vendor(row: Mapping[str, str]) -> tuple[str, str, str]:
    return _cell(row, "best_cublas_ms"), row.get("best_cublas", ""), _cell(row, "cupy_ms")


def _cell(row: Mapping[str, str], key: str) -> str:
    """A number, or why there is none."""
    if row.get(key):
        return number(row[key])
    return "failed" if row.get("error") else "not suitable" if row.get("note") else ""


def ratio(text: str) -> str:
    """Two digits behind the point; nothing for an empty text."""
    return f"{float(text):.2f}" if text else ""


def _footer(suite: str, ceiling: str) -> str:
    rows = [row for _, cell in latest(suite) for row in cell.values() if row["ms"]]
    if not rows:
        return ""
    peak = next((row["ceiling_gbs"] for row in rows if row["ceiling"] == ceiling), "")
    rate = f"; {'reading' if ceiling == 'read' else 'a copy'} reaches {float(peak):.0f} GB/s" if peak else ""
    return f"\nMedians of interleaved rounds; {gpu(rows[-1])}{rate}.\n"


TABLES: Mapping[str, Callable[[], str]] = {
    "overhead": overhead,
    "tightness": tightness,
    "tsm2r": tsm2r,
    "tsm2l": tsm2l,
    "ladder": ladder,
    "tcf": tcf,
    "small_k": small_k,
    "load_efficiency": load_efficiency,
}


def known() -> dict[str, Callable[[], str]]:
    """All tables by name."""
    from benchmarks import campaign_tables, gemm_tables, lu_tables, readme_tables, stream_tables  # they import this one

    modules = (stream_tables, gemm_tables, lu_tables, campaign_tables, readme_tables)
    return {**TABLES, **{name: table for module in modules for name, table in module.TABLES.items()}}


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


def _groups(rows: Iterable[Row], *keys: str) -> list[tuple[Any, list[Row]]]:
    # In order of appearance.
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys), []).append(row)
    return list(groups.items())


def number(text: str | float) -> str:
    """Three digits, or all before the point."""
    return f"{float(text):.3g}" if float(text) < 1000 else f"{float(text):.0f}"


def percent(text: str) -> str:
    """A share; nothing for NaN."""
    return "" if text == "nan" else f"{float(text):.1%}"


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
