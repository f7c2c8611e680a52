"""Tables of the paper's kernels on a GPU (benchmarks.bench_tsm2 --paper)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.markup import csv_table, footer, percent, ratio, shown
from benchmarks.sheet import Row, read

Cells = list[tuple[str, dict[str, Row]]]
"""What is multiplied, and the last row of each contender."""


def latest(suite: str, path: Path | None = None) -> Cells:
    """Cells of a suite of bench_tsm2 in order.

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


def tsm2r() -> str:
    """TSM2R V3 with the published parameters beside cuBLAS, CuPy and the published code."""
    head = (
        *("A @ B", "best cuBLAS, ms", "which", "CuPy @, ms", "V3, ms", "of reading", "x cuBLAS", "x CuPy"),
        *("published code, ms", "V3 / published"),
    )
    cells, body = latest("tsm2r"), []
    for label, cell in cells:
        v3 = cell.get("V3", {})
        related = [ratio(v3.get(key, "")) for key in ("speedup", "speedup_cupy")]
        code = shown(v3, "published_ms"), ratio(v3.get("ratio_to_published", ""))
        share = percent(v3.get("share_of_ceiling") or "nan")
        body.append((label, *_vendor(v3), shown(v3, "ms"), share, *related, *code))
    return csv_table(head, body) + _footer(cells)


def tsm2l() -> str:
    """TSM2L with the published parameters, what tall_skinny_matmul takes, and the paper's best; beside cuBLAS, CuPy."""
    head = (
        *("A @ B", "best cuBLAS, ms", "which", "CuPy @, ms", "Opt-1, ms", "Opt-2, ms"),
        *("chosen, ms", "best, ms", "t2, t3, tcf", "of a copy", "x cuBLAS", "published code, ms"),
    )
    cells, body = latest("tsm2l"), []
    for label, cell in cells:
        ours = [row for row in cell.values() if row["t1"] and row["ms"]]
        best = min(ours, key=lambda row: float(row["ms"]), default={})
        known = cell.get("Opt-1", {})
        times = [shown(cell.get(name, {}), "ms") for name in ("Opt-1", "Opt-2", "tall_skinny_matmul")]
        variant = "Opt-1" if "opt1" in best.get("config", "") else "Opt-2"
        which = f"{variant}: {best['t2']}, {best['t3']}, {best['tcf']}" if best else ""
        shares = percent(best.get("share_of_ceiling") or "nan"), ratio(best.get("speedup", ""))
        body.append((label, *_vendor(best), *times, shown(best, "ms"), which, *shares, shown(known, "published_ms")))
    return csv_table(head, body) + _footer(cells)


def ladder() -> str:
    """What each step of TSM2R gains over the one before, beside the paper's gains on a K40c."""
    head = ("A @ B", "V0, ms", "V1 / V0 (2.2-4.7)", "V2 / V1 (1.1-2.1)", "V3 / V2 (1.3-3.5)", "V3, ms")
    body = [
        (
            label,
            shown(cell.get("V0", {}), "ms"),
            *(ratio(cell.get(variant, {}).get("gain", "")) for variant in ("V1", "V2", "V3")),
            shown(cell.get("V3", {}), "ms"),
        )
        for label, cell in latest("tsm2r")
    ]
    return f"{csv_table(head, body)}\nGains in speed; in brackets the paper's, on a K40c.\n"


def tcf() -> str:
    """TSM2L over the thread count factor tcf."""
    cells, body = latest("tcf"), []
    for label, cell in cells:
        ours = [row for row in cell.values() if row["config"]]
        for value in sorted({int(row["tcf"]) for row in ours}):
            pair = [cell.get(f"{variant} tcf {value}", {}) for variant in ("Opt-1", "Opt-2")]
            numbers = [text for row in pair for text in (shown(row, "ms"), ratio(row.get("speedup", "")))]
            body.append((label, str(value), *numbers))
    return csv_table(("A @ B", "tcf", "Opt-1, ms", "x cuBLAS", "Opt-2, ms", "x cuBLAS"), body) + _footer(cells)


def small_k() -> str:
    """Bandwidth where k is small: TSM2R's V3 and both variants of TSM2L."""
    names = ("V3", "Opt-1", "Opt-2")
    body = [
        (label, *(shown(cell.get(name, {}), "gbs") for name in names), shown(cell.get("V3", {}), "best_cublas_ms"))
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
    return shown(row, "best_cublas_ms"), row.get("best_cublas", ""), shown(row, "cupy_ms")


def _footer(cells: Cells) -> str:
    timed = [row for _, cell in cells for row in cell.values() if row["ms"]]
    peaks = {row["ceiling"]: row["ceiling_gbs"] for row in timed if row["ceiling"]}
    return footer("Medians of interleaved rounds", timed, peaks)


TABLES: Mapping[str, Callable[[], str]] = {
    "tsm2r": tsm2r,
    "tsm2l": tsm2l,
    "ladder": ladder,
    "tcf": tcf,
    "small_k": small_k,
    "load_efficiency": load_efficiency,
}
