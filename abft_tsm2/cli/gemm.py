"""The commands ``abft-tsm2 gemm | verify``: the product of two matrix files, and the check of one that is there.

A is read, multiplied and checked in row panels, so that the operands may be larger than the memory.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import click
import numpy as np

import abft_tsm2
from abft_tsm2.cli.output import (
    CORRUPTED,
    EXIT_CODES,
    PRINTED,
    Finite,
    computing,
    conclude,
    conclude_file,
    exit_code,
    refuse,
    refuse_same_file,
    report_to,
)
from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.io import matrix
from abft_tsm2.io.matrix import Matrix, MatrixFileError
from abft_tsm2.report import Check, Report

PANEL_MB = matrix.PANEL_BYTES / 2**20


_options = computing(
    click.option(
        "--check", type=click.Choice(["auto", "rows", "columns", "both"]), default="auto", help="Checksums to compare."
    ),
    click.option(
        "--panel-mb", type=Finite(min=0, min_open=True), default=PANEL_MB, help="Size of a row panel of A and C, in MB."
    ),
)


@click.command(epilog=EXIT_CODES)
@click.argument("a")
@click.argument("b")
@click.option("-o", "--output", "out", metavar="C", required=True, help="Where to write the product.")
@_options
def gemm(
    a: str, b: str, out: str, report: str | None, check: str, dtype: str | None, panel_mb: float, quiet: bool
) -> int:
    """Write the product C = A B, checked and repaired.

    A and B are .npy, .npz (file.npz:name where it holds several arrays), .mtx or .mtx.gz files; so is C.
    Large .npy files are computed in row panels and may be larger than the memory. C is not written when it
    is known to be wrong; the report is written even then.

    \b
    Example:
      abft-tsm2 gemm A.npy weights.npz:layer1 -o C.npy --report report.json
    """
    refuse_same_file([a, b], out, report)
    A, B, common = _operands(a, b, dtype)
    shape = A.shape[0], B.shape[1]
    refused = contextlib.suppress(SilentDataCorruptionError)
    with report_to(report) as keep, refused, matrix.output_matrix(out, shape, common) as C:

        def multiply(rows: slice, B: Any) -> Report:
            panel = matrix.convert(A[rows], common, a)
            product = partial(abft_tsm2.protected_gemm, panel, B, out=C[rows], check=check)
            return cast(Report, product(on_error="correct", return_report=True)[1])

        result = _in_panels(multiply, A, B, panel_mb, quiet, stop=True)
        keep(result)
        refuse(result)
    return conclude_file(result, quiet or report == PRINTED, out)


@click.command(epilog=EXIT_CODES)
@click.argument("a")
@click.argument("b")
@click.argument("c")
@_options
def verify(
    a: str, b: str, c: str, report: str | None, check: str, dtype: str | None, panel_mb: float, quiet: bool
) -> int:
    """Check that an existing C is the product A B, and say where it is not.

    Costs two thin products instead of a full one. The files are the same as for gemm, and only read.

    \b
    Example:
      abft-tsm2 verify A.npy B.npy C.npy
    """
    refuse_same_file([a, b, c], report)
    A, B, common = _operands(a, b, dtype)
    C = matrix.read_matrix(c, dtype=dtype)
    result_type = np.dtype(dtype) if dtype else C.dtype.newbyteorder("=")
    needed = f"{A.shape[0]} x {B.shape[1]} {common.name}"
    wide = common.itemsize == 2 and result_type.name == "float32"  # not rounded to 16 bits: fine too
    if C.shape != (A.shape[0], B.shape[1]) or not (result_type == common or wide):
        found = f"{C.shape[0]} x {C.shape[1]} {result_type.name}"
        raise MatrixFileError(f"{c} is {found}, but {a} times {b} is {needed}; check which product it is")

    def compare(rows: slice, B: Any) -> Report:
        panels = matrix.convert(A[rows], common, a), B, matrix.convert(C[rows], result_type, c)
        return abft_tsm2.verify_gemm(*panels, check=check, on_error="detect")

    with report_to(report) as keep:
        result = _in_panels(compare, A, B, panel_mb, quiet)
        keep(result)
    return conclude(result, quiet or report == PRINTED, f"{c} was only read", "compute it again")


def _operands(a: str, b: str, dtype: str | None) -> tuple[Matrix, Matrix, np.dtype[Any]]:
    """Both factors, B already in the dtype of the product, and that dtype."""
    A, B = matrix.read_matrix(a, dtype=dtype), matrix.read_matrix(b, dtype=dtype)
    if A.shape[1] != B.shape[0]:
        hint = "swap them" if B.shape[1] == A.shape[0] else "transpose one, or check which files they are"
        raise MatrixFileError(
            f"{a} is {A.shape[0]} x {A.shape[1]} and {b} is {B.shape[0]} x {B.shape[1]}: the columns of the "
            f"first ({A.shape[1]}) must equal the rows of the second ({B.shape[0]}); {hint}"
        )
    common = np.dtype(dtype) if dtype else np.result_type(A, B).newbyteorder("=")
    return A, matrix.convert(B, common, b), common


def _in_panels(
    work: Callable[[slice, Any], Report],
    A: Matrix,
    B: Matrix,
    panel_mb: float,
    quiet: bool,
    stop: bool = False,
) -> Report:
    """Call `work` for every row panel, with B encoded once; `stop` where a panel of the result stays wrong."""
    row_bytes = (A.shape[1] + B.shape[1]) * B.itemsize
    panels = list(matrix.row_panels(A.shape[0], row_bytes, int(panel_mb * 2**20)))
    shown = not quiet and sys.stderr.isatty()
    with abft_tsm2.errstate(unverifiable="log"), np.errstate(all="ignore"):
        if len(panels) == 1:
            return _caught(work, panels[0], B)
        started = time.perf_counter()
        encoded = abft_tsm2.encode(B, side="rows")
        encoding = time.perf_counter() - started
        reports: list[Report] = []
        bar: Any = click.progressbar(panels, label="row panels", file=sys.stderr)
        with bar if shown else contextlib.nullcontext(panels) as steps:
            for rows in steps:
                reports.append(_shifted(_caught(work, rows, encoded), rows.start))
                if stop and exit_code(reports[-1]) == CORRUPTED:
                    break
    return _stacked(reports, A.shape[0], encoding)


def _caught(work: Callable[[slice, Any], Report], rows: slice, B: Any) -> Report:
    try:
        return work(rows, B)
    except SilentDataCorruptionError as error:
        return error.report


def _shifted(report: Report, first: int) -> Report:
    """Count the rows from the top of the whole matrix instead of the panel's."""
    faults = [
        replace(fault, rows=tuple(first + row for row in fault.rows or range(report.m)))
        if fault.operand in ("A", "C")
        else fault
        for fault in report.faults
    ]
    checks = [
        replace(check, closest_line=first + check.closest_line)
        if check.side == "rows" and check.closest_line >= 0
        else check
        for check in report.checks
    ]
    where = f"in the panel of rows {first}:{first + report.m}, counted within it"
    reasons = tuple(f"{where}: {reason}" for reason in report.reasons)
    return replace(report, faults=tuple(faults), checks=tuple(checks), reasons=reasons)


def _stacked(reports: Sequence[Report], rows: int, encoding: float) -> Report:
    """One report of the whole product from those of its row panels."""
    merged = Report.merge([replace(report, m=rows) for report in reports], operation=reports[0].operation)
    checks = [check for report in reports for check in report.checks]
    sides = dict.fromkeys(check.side for check in checks)
    done = sum(report.m for report in reports)
    return replace(
        merged,
        products=(),
        checks=tuple(_joined([check for check in checks if check.side == side]) for side in sides),
        faults=tuple(fault for report in reports for fault in report.faults),
        recomputed=sum(report.recomputed * report.m for report in reports) / done,
        reasons=(*merged.reasons, *([f"stopped after row {done} of {rows}"] if done < rows else [])),
        seconds={**merged.seconds, "encode": encoding + merged.seconds.get("encode", 0.0)},
    )


def _joined(checks: Sequence[Check]) -> Check:
    closest = max(checks, key=lambda check: check.closest)
    by_rows = closest.side == "rows"  # a column check of a panel covers a part of every column
    return replace(
        closest,
        lines=sum(c.lines for c in checks) if by_rows else closest.lines,
        verified=sum(c.verified for c in checks) if by_rows else min(c.verified for c in checks),
        bound=statistics.median(c.bound for c in checks),
        detection_limit=statistics.median(c.detection_limit for c in checks),
    )
