"""Load efficiency of the kernels, by Nsight Compute: the paper's gld_efficiency, and the load of the memory.

    python -m benchmarks.load_efficiency            every variant in both types, some seconds each

The paper reads the metric gld_efficiency from nvprof to see whether all loads are coalesced (section 4.1). nvprof does
not know today's cards; Nsight Compute calls the same ratio, of the bytes that were asked for to the bytes of the
sectors that were moved, smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct. Writes
results/load_efficiency.csv; the exit code is 1 where the profiler is missing or may not read the counters.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from abft_tsm2.core.paper.config import TSM2L, VARIANTS, published
from abft_tsm2.core.problem import Problem
from benchmarks import sheet

METRICS = {
    "gld_efficiency": "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct",
    "sectors_per_request": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_percent_of_peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "nanoseconds": "gpu__time_duration.sum",
}
REFUSALS = {
    "ERR_NVGPUCTRPERM": "reading the counters needs rights: run as root, or allow all users with the driver's option "
    "NVreg_RestrictProfilingToAdminUsers=0",
    "LibraryNotLoaded": "the profiler cannot be initialised on this machine",
    "No kernels were profiled": "no kernel of that name ran",
    "Failed to find metric": "this version of Nsight Compute lacks a metric, or calls it something else",
}


class ProfilerError(RuntimeError):
    """The profiler gave no numbers; the message says why."""


def problem(variant: str, dtype: str) -> Problem:
    """Products whose memory traffic is that of A: 10240 x 10240 x 16 for TSM2R, 10^6 x 16 x 16 for TSM2L."""
    return Problem(10**6, 16, 16, dtype) if variant in TSM2L else Problem(10240, 10240, 16, dtype)


def multiply(variant: str, dtype: str) -> None:
    """What the profiler watches: one product by one kernel."""
    import cupy

    from abft_tsm2.core.tsm2 import tsm2l, tsm2r

    asked = problem(variant, dtype)
    random = cupy.random.default_rng(0)
    A, B = (random.random((y, x), dtype=dtype).T for x, y in ((asked.m, asked.k), (asked.k, asked.n)))
    C = cupy.empty((asked.m, asked.n), dtype=dtype, order="F")
    product = tsm2l if variant in TSM2L else tsm2r
    product(A, B, config=published(asked, variant), out=C)
    cupy.cuda.Device().synchronize()


def command(variant: str, dtype: str, profiler: str = "ncu") -> list[str]:
    """The profiler's command line. The clocks stay as they are: they are the machine's, not ours."""
    family = published(problem(variant, dtype), variant).family
    asked = ["--metrics", ",".join(METRICS.values()), "--kernel-name", f"regex:^{family}_", "--launch-count", "1"]
    form = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--target-processes", "all"]
    child = [sys.executable, "-m", "benchmarks.load_efficiency", "--child", variant, dtype]
    return [profiler, *form, *asked, *child]


def parse(text: str) -> dict[str, float]:
    """The metrics in the profiler's CSV, which stands among other lines.

    One metric a column with the units in the second line (page "raw"), or one metric a line (page "details").

    Raises
    ------
    ProfilerError
        If a metric is not there.
    """
    table = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    found: dict[str, str] = {}
    if table and {"Metric Name", "Metric Value"} <= set(table[0]):
        name, value = table[0].index("Metric Name"), table[0].index("Metric Value")
        found = {row[name]: row[value] for row in table[1:]}
    elif len(table) >= 3:
        found = dict(zip(table[0], table[2], strict=False))
    numbers = {}
    for short, metric in METRICS.items():
        try:
            numbers[short] = float(found[metric].replace(",", ""))
        except (KeyError, ValueError):
            raise ProfilerError(f"no number for {metric} in the profiler's answer: {_end(text)}") from None
    return numbers


def profile(variant: str, dtype: str, profiler: str) -> dict[str, float]:
    """Metrics of one kernel.

    Raises
    ------
    ProfilerError
        If the profiler fails, or may not read the counters.
    """
    try:
        answer = subprocess.run(
            command(variant, dtype, profiler), capture_output=True, text=True, timeout=180, check=False
        )
    except subprocess.TimeoutExpired as slow:
        raise ProfilerError(f"the profiler took more than {slow.timeout:.0f} s") from None
    text = answer.stdout + answer.stderr
    for sign, reason in REFUSALS.items():
        if sign in text:
            raise ProfilerError(f"{reason} ({sign})")
    if answer.returncode != 0:
        raise ProfilerError(f"exit code {answer.returncode}: {_end(text)}")
    return parse(answer.stdout)


def _end(text: str) -> str:
    return " ".join(text.split())[-300:] or "nothing"


def _rows(variants: Sequence[str], profiler: str) -> list[dict[str, Any]]:
    rows = []
    for variant in variants:
        for dtype in ("float32", "float64"):
            asked = problem(variant, dtype)
            config = published(asked, variant)
            row: dict[str, Any] = {"variant": variant, "dtype": dtype, "m": asked.m, "k": asked.k, "n": asked.n}
            row.update(config=config.name, **dict.fromkeys(METRICS, ""), error="")
            try:
                row.update(profile(variant, dtype, profiler))
                print(f"{config.name}: {row['gld_efficiency']:.1f} % of the loaded bytes are used", flush=True)
            except ProfilerError as error:
                row["error"] = str(error)
                print(f"{config.name}: {error}", flush=True)
            rows.append(row)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="repeatable; default: all")
    parser.add_argument("--profiler", default="ncu", metavar="PATH", help="default: %(default)s")
    parser.add_argument("--output", default="load_efficiency", metavar="NAME", help="results/NAME.csv")
    parser.add_argument("--child", nargs=2, metavar=("VARIANT", "DTYPE"), help="one product; the profiler calls this")
    options = parser.parse_args(arguments)
    if options.child:
        multiply(*options.child)
        return 0
    profiler = shutil.which(options.profiler)
    if profiler is None:
        print(f"{options.profiler} is not there: install Nsight Compute, or name it with --profiler")
        return 1
    rows = _rows(options.variant or VARIANTS, profiler)
    sheet.write(options.output, rows)
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
