"""Times of protected factorisations and solutions against SciPy's, interleaved in one process.

    python -m benchmarks.bench_lu                      all of it, about half an hour on two cores
    python -m benchmarks.bench_lu --only 2048          what contains 2048 in its name; rows are appended
    python -m benchmarks.bench_lu --sizes 128 256      other sizes, which have no bars

Methods: SciPy's lu_factor; the same blocks without a check; checked in every step (online) or at the end
(offline); and as the package chooses (auto). The outputs are judged in the same run. Prints a line for each matrix and
writes results/lu.csv, row by row; the exit code is 1 where a bar is missed or a result is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import abft_tsm2
from abft_tsm2 import Report, Status
from abft_tsm2.core import blas
from abft_tsm2.faults.judge.factor_oracle import Matrix, cholesky_error, lu_error, solution_error, unit
from abft_tsm2.linalg import cholesky as definite
from abft_tsm2.linalg import lu
from benchmarks import sheet
from benchmarks.sheet import Sheet
from benchmarks.timing import machine, overhead, paired

SIZES = (512, 1024, 2048, 4096)
MIDDLE = 2048
"""The size of systems that are solved, and of those with faults."""

PAIRS = {512: 41, 1024: 31, 2048: 25, 4096: 15}
METHODS = ("scipy", "unprotected", "online", "offline", "auto")
WORSE = 4.0
"""Times SciPy's backward error and a roundoff, that an error may be."""

PHASES = ("encode", "panel", "swap", "solve", "update", "check", "correct", "certify")
FAULTS = ("trailing", "finished L")
BARS: Mapping[str, Mapping[int, float]] = {
    "checks": {2048: 0.10, 4096: 0.06},
    "unprotected": {2048: 1.60, 4096: 1.45},
    "offline": {2048: 1.25, 4096: 1.15},
}
"""By column the largest value, for factorisations in float64, whatever the order: what the checks add to the same
blocks without them, and times relative to SciPy's."""

COLUMNS = (
    *("suite", "dtype", "order", "n", "fault", "pairs", *(f"{method}_ms" for method in METHODS), "gflops"),
    *("unprotected", "unprotected_bar", "online", "offline", "offline_bar", "auto", "checks", "checks_bar"),
    *("repair_ms", "repair", "worst_error_u", *(f"{phase}_ms" for phase in PHASES), "error"),
)
ENVIRONMENT = ("device", "cores", "threads", "python", "numpy", "scipy", "blas")
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One matrix, and what is done with it: factor, solve, repair, or Cholesky's factorisation."""

    suite: str
    dtype: str
    order: str
    n: int

    def __str__(self) -> str:
        return f"{self.suite} {self.dtype} {self.order} {self.n}"

    def operands(self, seed: int = 0) -> tuple[Matrix, Matrix]:
        """A, with independent normal elements, and a right-hand side."""
        rng = np.random.default_rng([seed, self.n])
        a = np.asarray(rng.standard_normal((self.n, self.n)), self.dtype, self.order)  # type: ignore[call-overload]
        return a, np.asarray(rng.standard_normal(self.n), self.dtype)

    def definite(self, seed: int = 0) -> Matrix:
        """The sums of products of twice as many independent normal rows."""
        x = np.random.default_rng([seed, self.n]).standard_normal((2 * self.n, self.n))
        return np.asarray(x.T @ x, self.dtype, self.order)  # type: ignore[call-overload]


def grid(sizes: Sequence[int] = SIZES) -> list[Cell]:
    """All there is to measure."""
    middle = MIDDLE if MIDDLE in sizes else max(sizes)
    kinds = [(dtype, order) for dtype in ("float64", "float32") for order in "CF"]
    cells = [Cell("factor", *kind, n) for n in sizes for kind in kinds]
    return [*cells, *(Cell(suite, *kind, middle) for suite in ("solve", "repair", "cholesky") for kind in kinds)]


# ---- what is timed -----------------------------------------------------------------------------------------


def unprotected(A: Matrix) -> tuple[Matrix, Any]:
    """The blocked LU without any check: what protection is measured against."""
    W, pivots = blas.copy_by_columns(A), np.empty(min(A.shape), np.int32)
    b = lu.block_size(pivots.size)
    for j in range(0, pivots.size, b):
        j1 = min(j + b, pivots.size)
        local, _ = blas.factor_panel(W[j:, j:j1])
        pivots[j:j1] = local + np.int32(j)
        blas.exchange_rows(W[j:, :j], local)
        blas.exchange_rows(W[j:, j1:], local)
        blas.solve_triangle(W[j:j1, j:j1], W[j:j1, j1:], lower=True, unit=True)
        blas.add_product(W[j1:, j1:], W[j1:, j:j1], W[j:j1, j1:])
    return W, pivots


def unprotected_cholesky(A: Matrix) -> Matrix:
    """The same of Cholesky, of a lower triangle."""
    W, n = blas.copy_by_columns(A), A.shape[0]
    b = definite.block_size(n)
    for j in range(0, n, b):
        j1 = min(j + b, n)
        if blas.factor_columns(W[j:, j:j1]):
            raise np.linalg.LinAlgError("not positive definite")
        blas.subtract_square(W[j1:, j1:], W[j1:, j:j1])
    blas.clear_above(W)
    return W


def factoring(a: Matrix, online: list[Report]) -> dict[str, Callable[[], Any]]:
    """The methods as functions; the reports of one are kept."""
    from scipy import linalg

    def checked() -> Any:
        factors, report = abft_tsm2.protected_lu_factor(a, mode="online", return_report=True)
        online.append(report)
        return factors

    return {
        "scipy": lambda: linalg.lu_factor(a),
        "unprotected": lambda: unprotected(a),
        "online": checked,
        "offline": lambda: abft_tsm2.protected_lu_factor(a, mode="offline"),
        "auto": lambda: abft_tsm2.protected_lu_factor(a),
    }


def factor(cell: Cell, pairs: int) -> list[Row]:
    """Times of all methods to factor a matrix."""
    a, _ = cell.operands()
    reports: list[Report] = []
    calls = factoring(a, reports)
    wrong, worst = judged({name: lu_error(a, call()) for name, call in calls.items()}, cell.dtype)
    seconds = paired(calls, pairs)
    row = {**_row(cell, pairs), **_medians(seconds), "error": wrong, "worst_error_u": worst}
    row["gflops"] = round(2e-9 / 3 * cell.n**3 / statistics.median(seconds["scipy"]), 2)
    for method in METHODS[1:]:
        row[method] = round(1 + overhead(seconds, method, "scipy"), 4)
    row["checks"] = round(overhead(seconds, "online", "unprotected"), 5)
    if cell.dtype == "float64":
        row.update({f"{name}_bar": limits.get(cell.n, "") for name, limits in BARS.items()})
    for phase in PHASES:
        times = [report.seconds.get(phase, 0.0) for report in reports[-pairs:]]
        row[f"{phase}_ms"] = round(1e3 * statistics.median(times), 4)
    return [row]


def solve(cell: Cell, pairs: int) -> list[Row]:
    """A system with one right-hand side."""
    from scipy import linalg

    a, b = cell.operands()
    calls = {"scipy": lambda: linalg.solve(a, b), "auto": lambda: abft_tsm2.protected_solve(a, b)}
    wrong, worst = judged({name: solution_error(a, call(), b) for name, call in calls.items()}, cell.dtype)
    seconds = paired(calls, pairs)
    row = {**_row(cell, pairs), **_medians(seconds), "error": wrong, "worst_error_u": worst}
    return [{**row, "auto": round(1 + overhead(seconds, "auto", "scipy"), 4)}]


def cholesky(cell: Cell, pairs: int) -> list[Row]:
    """The lower factor of a definite matrix."""
    from scipy import linalg

    a = cell.definite()
    calls = {
        "scipy": lambda: linalg.cholesky(a, lower=True),
        "unprotected": lambda: unprotected_cholesky(a),
        "online": lambda: abft_tsm2.protected_cholesky(a, lower=True),
    }
    wrong, worst = judged({name: cholesky_error(a, call()) for name, call in calls.items()}, cell.dtype)
    seconds = paired(calls, pairs)
    row = {**_row(cell, pairs), **_medians(seconds), "error": wrong, "worst_error_u": worst}
    for method in ("unprotected", "online"):
        row[method] = round(1 + overhead(seconds, method, "scipy"), 4)
    return [{**row, "checks": round(overhead(seconds, "online", "unprotected"), 5)}]


def repair(cell: Cell, pairs: int) -> list[Row]:
    """What one fault adds to a factorisation that is checked in every step."""
    a, _ = cell.operands()
    reports: dict[str, Report] = {}

    def faulty(fault: str) -> Any:
        hook = flip_halfway(fault) if fault else None
        factors, reports[fault] = abft_tsm2.protected_lu_factor(a, mode="online", return_report=True, on_stage=hook)
        return factors

    calls = {fault: lambda fault=fault: faulty(fault) for fault in ("", *FAULTS)}
    wrong, worst = judged({name or "online": lu_error(a, call()) for name, call in calls.items()}, cell.dtype)
    seconds = paired(calls, pairs)
    rows = []
    for fault in FAULTS:
        status = reports[fault].status
        left = wrong or ("" if status is Status.CORRECTED else f"the report says {status.name}")
        added = statistics.median(x - y for x, y in zip(seconds[fault], seconds[""], strict=True))
        rows.append(
            {
                **_row(cell, pairs),
                **_medians({"online": seconds[""]}),
                "fault": fault,
                "repair_ms": round(1e3 * added, 4),
                "repair": round(overhead(seconds, fault, ""), 5),
                "worst_error_u": worst,
                "error": left,
            }
        )
    return rows


def flip_halfway(fault: str) -> Callable[[str, Mapping[str, Any]], None]:
    """A hook that flips a bit of the exponent once, when half of the columns are finished."""
    pending = [fault]

    def hook(stage: str, arrays: Mapping[str, Any]) -> None:
        if stage != "updated" or not pending or 2 * arrays["step"][1] < len(arrays["W"]):
            return
        pending.clear()
        W, j1 = arrays["W"], arrays["step"][1]
        n = len(W)
        at = ((n + j1) // 2, (n + j1) // 2) if fault == "trailing" else (n - 1, j1 // 2)
        word = W[at].reshape(1).view(f"u{W.itemsize}")
        W[at] = (word ^ word.dtype.type(1 << (np.finfo(W.dtype).nmant + 4))).view(W.dtype)[0]

    return hook


def judged(errors: Mapping[str, float], dtype: str) -> tuple[str, float]:
    """What is wrong with results, one of which is SciPy's or without a fault and the first; the largest in units."""
    u, reference = unit(dtype), next(iter(errors.values()))
    wrong = [f"{name}: {error / u:.3g} u" for name, error in errors.items() if not error <= WORSE * (reference + u)]
    text = f"wrong, backward error of {', '.join(wrong)}; {next(iter(errors))}: {reference / u:.3g} u" if wrong else ""
    return text, float(f"{max(errors.values()) / u:.3g}")


def _row(cell: Cell, pairs: int) -> Row:
    return {**dict.fromkeys(COLUMNS, ""), **vars(cell), "pairs": pairs}


def _medians(seconds: Mapping[str, list[float]]) -> Row:
    return {f"{name}_ms": round(1e3 * statistics.median(times), 4) for name, times in seconds.items()}


MEASURES: Mapping[str, Callable[[Cell, int], list[Row]]] = {
    "factor": factor,
    "solve": solve,
    "repair": repair,
    "cholesky": cholesky,
}


# ---- results ------------------------------------------------------------------------------------


def met(row: Mapping[str, Any]) -> bool:
    """Whether a row keeps its bars, and its results are right."""
    kept = all(row[f"{name}_bar"] == "" or float(row[name]) <= float(row[f"{name}_bar"]) for name in BARS)
    return kept and not row["error"]


def line(row: Mapping[str, Any]) -> str:
    """The row as one line of text."""
    text = f"{row['suite']:8s} {row['dtype']} {row['order']} {row['n']:4d}"
    if row["suite"] == "repair":
        text += f" fault in {row['fault']}: {row['repair_ms']:.2f} ms, {row['repair']:.1%} of {row['online_ms']:.1f} ms"
    else:
        text += f" scipy {row['scipy_ms']:9.2f} ms"
        for method in METHODS[1:]:
            text += f"  {method} x {row[method]:.3f}{_bar(row, method)}" if row[method] != "" else ""
        text += f"  checks {row['checks']:+.1%}{_bar(row, 'checks', '.0%')}" if row["checks"] != "" else ""
    if row["error"]:
        return f"{text}  WRONG: {row['error']}"
    return text if met(row) else f"{text}  BAR MISSED"


def _bar(row: Mapping[str, Any], name: str, form: str = ".2f") -> str:
    limit = row.get(f"{name}_bar", "")
    return "" if limit == "" else f" (bar {limit:{form}})"


def run(cells: Iterable[Cell], written: Sheet, pairs: int = 0) -> list[Row]:
    """Measure, print and keep."""
    from scipy import __version__

    rows: list[Row] = []
    environment = {**machine(), "scipy": __version__}
    for cell in cells:
        nearest = min(PAIRS, key=lambda n: abs(n - cell.n))
        for row in MEASURES[cell.suite](cell, pairs or PAIRS[nearest]):
            written.append({**row, **environment})
            print(line(row), flush=True)
            rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="matrices whose name contains TEXT")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=0, metavar="COUNT", help="rounds; by default as many as needed")
    parser.add_argument("--output", default="lu", metavar="NAME", help="results/NAME.csv")
    options = parser.parse_args(arguments)
    every = grid(options.sizes)
    cells = [cell for cell in every if options.only in str(cell)]
    if not cells:
        print(f"no matrix is named like {options.only!r}; there are {', '.join(map(str, every))}")
        return 2
    path = sheet.RESULTS / f"{options.output}.csv"
    with Sheet(path, (*COLUMNS, *ENVIRONMENT), append=bool(options.only)) as written:
        try:
            rows = run(cells, written, options.pairs)
        except KeyboardInterrupt:
            return 130
    return 0 if all(map(met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
