"""Cells and rows of results/tsm2.csv: the paper's grid, its kernels, and what a row says of a contender.

C. Rivera, J. Chen et al., TSM2X, Journal of Parallel and Distributed Computing 151, 2021, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from abft_tsm2.core.device import Device
from abft_tsm2.core.paper.config import TCF, TSM2L, TSM2R, Config, choices, published
from benchmarks import sheet
from benchmarks.rows import ERRORS, TIMES, short
from benchmarks.stream_grid import CUPY, Cell

Key = tuple[str, str, int, int, int]
"""Suite, type, m, k, n."""

SUITES = ("tsm2r", "tsm2l", "rectangular", "tcf", "small_k")
PUBLISHED = "reference_tsm2x_h200"
BAR = 1.10  # of V3 over the published code, on the card on which that was timed
COLUMNS = (
    *("suite", "dtype", "m", "k", "n", "contender", "config", "t1", "t2", "t3", "tcf", "layout"),
    *TIMES,
    *("best_cublas", "best_cublas_ms", "speedup", "cupy_ms", "speedup_cupy", "gain"),
    *("published_ms", "ratio_to_published"),
    *ERRORS,
    *("note", "error", "sm_mhz"),
)
"""Of a row, before those of `gpu_timing.environment`."""


def product(suite: str, m: int, k: int, n: int, dtype: str, default: bool = True) -> Cell:
    """One product of the grid, column-major throughout."""
    return Cell(suite, "columns", m, k, n, dtype, dtype, default=default)


def grid() -> list[Cell]:
    """All cells; those with `default` are the subset for every day."""
    cells: list[Cell] = []
    for dtype in ("float32", "float64"):
        for m in (10240, 20480, 30720, 40960):
            for n in (2, 4, 8, 16, 64):  # 64 columns are where an H200 becomes compute-bound
                default = (m < 40960 and n <= 16) or (m, n) in {(20480, 64), (40960, 16)}
                cells.append(product("tsm2r", m, m, n, dtype, default))
        for m in (10**4, 10**5, 10**6, 10**7):
            cells += [product("tsm2l", m, n, n, dtype) for n in (8, 16)]
        cells.append(product("tcf", 10**7, 16, 16, dtype))
        # The paper has these two in float64 only.
        double = dtype == "float64"
        cells += [product("rectangular", 15360, 15360 // share, 16, dtype, double) for share in (1, 2, 4, 8)]
        cells += [product("small_k", 15360, 2**power, 16, dtype, double) for power in range(11)]
    return sorted(cells, key=lambda one: SUITES.index(one.suite))


def kernels(cell: Cell) -> dict[str, Config]:
    """The paper's kernels that are timed on a cell: variants with the published parameters, and the sweep of tcf."""
    if cell.suite == "tcf":
        chosen = {variant: published(cell.problem, variant) for variant in TSM2L}
        return {f"{name} tcf {tcf}": replace(config, tcf=tcf) for name, config in chosen.items() for tcf in TCF}
    variants = {"tsm2r": TSM2R, "tsm2l": TSM2L, "rectangular": ("V3",), "small_k": ("V3", *TSM2L)}[cell.suite]
    return {variant: published(cell.problem, variant) for variant in variants}


def sweep(cell: Cell, device: Device) -> dict[str, list[Config]]:
    """Configurations of TSM2L, around the published one, of which the fastest is found before the timing."""
    if cell.suite != "tsm2l":
        return {}

    def near(config: Config) -> bool:
        t2 = published(cell.problem, config.variant).t2
        return t2 <= 2 * config.t2 <= 2 * t2 and config.t3 <= max(8, cell.k) and config.tcf <= 8

    found = {v: [c for c in choices(device, variant=v, dtype=cell.dtype) if near(c)] for v in TSM2L}
    return {variant: configs for variant, configs in found.items() if configs}


def published_ms() -> dict[Key, float]:
    """Milliseconds of the paper's published code on an H200; TSM2L with operands outside of the cache."""
    return {key({**row, "suite": row["kind"]}): float(row["kernel_ms"]) for row in sheet.read(PUBLISHED)}


# ---- rows ---------------------------------------------------------------------------------------------------------


def key(row: Mapping[str, Any]) -> Key:
    """The cell that a row belongs to."""
    return row["suite"], row["dtype"], int(row["m"]), int(row["k"]), int(row["n"])


def empty_row(cell: Cell, contender: str) -> dict[str, Any]:
    """A row of a cell and a contender without numbers."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row.update(suite=cell.suite, dtype=cell.dtype, m=cell.m, k=cell.k, n=cell.n, contender=contender)
    return row


def compare(rows: Sequence[dict[str, Any]], published: Mapping[Key, float]) -> None:
    """Fill in, for the rows of one cell, what relates one contender to another."""
    good = [row for row in rows if row["ms"] != "" and not row["error"]]
    vendors = [row for row in good if not row["config"]]
    best = min(vendors, key=lambda row: float(row["ms"]), default=None)
    cupy = next((row for row in vendors if row["contender"] == CUPY), None)
    before: dict[str, Any] | None = None
    for row in good:
        if best is not None:
            row.update(best_cublas=best["contender"], best_cublas_ms=best["ms"])
            row["speedup"] = short(best["ms"] / row["ms"])
        if cupy is not None:
            row.update(cupy_ms=cupy["ms"], speedup_cupy=short(cupy["ms"] / row["ms"]))
        if row["suite"] == "tsm2r" and row["contender"] in TSM2R:
            rung = TSM2R.index(row["contender"])
            if before is not None and rung and before["contender"] == TSM2R[rung - 1]:
                row["gain"] = short(before["ms"] / row["ms"])
            before = row
        theirs = published.get(key(row))
        if theirs is not None and row["contender"] in ("V3", *TSM2L):
            row.update(published_ms=theirs, ratio_to_published=short(row["ms"] / theirs))


def verdict(rows: Iterable[Mapping[str, Any]], published: Mapping[Key, float]) -> list[str]:
    """Errors and missed bars in words; nothing if all was measured, correct and within the bar."""
    rows = list(rows)
    faults = [f"{_name(row)}: {row['error']}" for row in rows if row["error"]]
    v3 = [row for row in rows if row["suite"] == "tsm2r" and row["contender"] == "V3"]
    for row in v3:
        if not row["error"] and key(row) in published:
            ratio = row["ratio_to_published"]
            if not (ratio != "" and ratio <= BAR):
                faults.append(f"{_name(row)}: {ratio or 'no'} times the published code's time, the bar is {BAR}")
    return faults


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['suite']} {row['dtype']} {row['m']}x{row['k']}x{row['n']} {row['contender']}"
