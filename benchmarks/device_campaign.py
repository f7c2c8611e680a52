"""The two campaigns that protected products on a GPU have to pass.

    python -m benchmarks.device_campaign clean                          no false alarm in 8e7 rows without a fault
    python -m benchmarks.device_campaign clean --rows 1e6 --only loguni8
    python -m benchmarks.device_campaign planted                        1e5 faults, found and repaired
    python -m benchmarks.device_campaign planted --count 1e4 --seconds 60

Clean: families of data, types and ways to check, shapes, batches, orders, alpha, beta and c; a row is the residual of
one line. An alarm is a report that speaks of a fault, or of what cannot be verified though its numbers are in the
normal range. Operands are drawn once on the host for each family, type and shape; all others are made of them on the
card by permutations and powers of two (`benchmarks.device_operands`). Writes results/device_clean.csv.

Planted: faults in C between product and check. What is changed by more than the promised limit has to be repaired,
what a call returns with a good report has to be right, and may hold nothing of what was planted but changes that are
too small (`benchmarks.device_faults`). Writes results/device_planted.csv.

The exit code is 1 after an alarm or a broken promise, each of which is printed with the arguments that show it again;
2 where no GPU is; 130 after an interrupt, which keeps what is counted so far.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from abft_tsm2.core.device import query
from abft_tsm2.errors import NotSuitable
from benchmarks import device_clean, device_planted, tables
from benchmarks.contenders import precompile
from benchmarks.device_faults import OUTCOMES
from benchmarks.device_operands import MODES, kernels, modes
from benchmarks.device_runs import Run
from benchmarks.gpu_timing import DeviceLostError, environment
from benchmarks.sheet import Sheet

Rows = Sequence[Mapping[str, Any]]


def clean(run: Run, options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Check clean products; returns the exit code."""
    names = options.only
    asked = [
        group for group in device_clean.groups(modes(run.xp)) if not names or any(name in str(group) for name in names)
    ]
    if not asked:
        print(f"no group is named like {' or '.join(names)}; one is called {device_clean.groups(modes(run.xp))[0]}")
        return 2
    campaign = device_clean.Clean(run, asked)

    def work() -> None:
        if options.call is None:
            campaign.check(options.rows)
        for group in asked if options.call is not None else ():
            campaign.call(group, options.call)
        campaign.collect()

    path = options.output or (None if names else tables.RESULTS / "device_clean.csv")
    code, rows = carried_out(run, work, campaign.table, path, (*device_clean.COLUMNS, *env), env)
    counted = ("products", "rows", "alarms", "suspicions", "unverifiable")
    for names in (("family",), ("dtype", "mode"), ("batch", "m", "k", "n")):
        print(f"\n{summed(rows, names, counted, largest='closest')}")
    print(f"\n{campaign.rows:.4g} rows in {run.seconds:.0f} s, {sum(row['alarms'] for row in rows)} false alarms")
    return code


def planted(run: Run, options: argparse.Namespace, env: Mapping[str, str]) -> int:
    """Plant faults; returns the exit code."""
    campaign = device_planted.Campaign(run, modes(run.xp))

    def work() -> None:
        for number in options.scene:
            campaign.scene(number)
        if not options.scene:
            campaign.plant(options.count)

    path = options.output or (None if options.scene else tables.RESULTS / "device_planted.csv")
    code, rows = carried_out(run, work, campaign.table, path, (*device_planted.COLUMNS, *env), env)
    for names in (("kind",), ("dtype", "mode")):
        print(f"\n{summed(rows, names, OUTCOMES)}")
    print(f"\n{campaign.planted} faults in {run.seconds:.0f} s")
    return code


def carried_out(
    run: Run,
    work: Callable[[], None],
    table: Callable[[], Rows],
    path: Path | None,
    columns: Sequence[str],
    env: Mapping[str, str],
) -> tuple[int, Rows]:
    """Do the work and write the table, also of what an interrupt leaves; returns the exit code and the table."""
    stopped = 0
    try:
        work()
    except KeyboardInterrupt:
        stopped = 130
    except DeviceLostError as error:  # after a failure, which is counted
        print(error)
    finally:
        rows = table()
        if path is not None:
            with Sheet(path, columns) as sheet:
                for row in rows:
                    sheet.append({**row, **env})
            print(f"rows in {path}")
    print(f"{len(run.failures)} failures" + "; interrupted" * bool(stopped))
    return stopped or int(bool(run.failures)), rows


def summed(rows: Rows, names: Sequence[str], counted: Sequence[str], largest: str = "") -> str:
    """A table of sums over all rows that agree in `names`, and of the largest of one column."""
    total: dict[str, dict[str, float]] = {}
    for row in rows:
        found = total.setdefault(" ".join(str(row[name]) for name in names), dict.fromkeys(counted, 0))
        for name in counted:
            found[name] += row[name]
        if largest:
            found[largest] = max(found.get(largest, 0.0), row[largest])
    head = (" ".join(names), *counted, *([largest] if largest else []))
    cells = (
        (name, *(f"{x:.3f}" if isinstance(x, float) else str(x) for x in one.values())) for name, one in total.items()
    )
    return tables.markdown(head, cells)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="what", required=True)
    clean = commands.add_parser("clean", help="products without a fault")
    clean.add_argument("--rows", type=float, default=8e7, help="residuals to check, 8e7 by default")
    named = "groups whose name contains TEXT, as normal or 'float32 one-sided 64 of 512x512x512'; repeatable"
    clean.add_argument("--only", action="append", default=[], metavar="TEXT", help=named)
    clean.add_argument("--call", type=int, metavar="N", help="this call of each group alone, with its report")
    planted = commands.add_parser("planted", help="products with planted faults")
    planted.add_argument("--count", type=float, default=1e5, help="faults, 1e5 by default")
    planted.add_argument("--scene", type=int, nargs="+", default=[], metavar="N", help="these alone, with all reports")
    for command in (clean, planted):
        command.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="begin nothing new after S")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--output", type=Path, metavar="PATH", help="the CSV; results/device_*.csv by default")
    return made


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        device = query()
    except NotSuitable as reason:
        print(f"nothing can be checked here: {reason}")
        return 2
    import cupy

    signal.signal(signal.SIGTERM, _interrupt)  # `timeout` sends it
    alone = bool(options.scene if options.what == "planted" else options.call is not None)
    run = Run(cupy, options.seed, time.monotonic() + options.seconds, show=alone)
    campaign, shapes = {"clean": (clean, device_clean.SHAPES), "planted": (planted, device_planted.SHAPES)}[
        options.what
    ]
    seconds = precompile(list(kernels(MODES, shapes, device.multiprocessors)))
    run.progress(f"kernels compiled or found in the cache in {seconds:.0f} s")
    return campaign(run, options, environment())


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
