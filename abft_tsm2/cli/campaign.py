"""The commands ``abft-tsm2 campaign run | report | replay``: experiments with planted faults."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from abft_tsm2.cli.output import CORRUPTED, OK, Group, announce, quiet_option, say, verbose_option

EVERY = 10.0  # seconds between lines, where no bar can be drawn

EXIT_CODES = """\b
Exit codes: 0 every promise was kept, 1 one was broken, 2 usage or file error,
130 interrupted; what was done is kept."""


@click.group(cls=Group, invoke_without_command=True)
@click.pass_context
def campaign(ctx: click.Context) -> None:
    """Run campaigns of planted faults, and count their outcomes.

    \b
    Example:
      abft-tsm2 campaign run campaign.toml -o results
      abft-tsm2 campaign report results
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


_device = click.option(
    "--device", type=click.Choice(["cpu", "gpu"]), default="cpu", help="Where products and LU are computed."
)


@campaign.command(epilog=EXIT_CODES)
@click.argument("file")
@click.option("-o", "--output", "out", metavar="DIR", required=True, help="Folder for trials and tables.")
@click.option("--resume", is_flag=True, help="Continue the campaign that is in the folder.")
@click.option(
    "--jobs", type=click.IntRange(min=0), metavar="N", help="Processes; without it, one for each core, 8 for a GPU."
)
@click.option(
    "--scheduler", metavar="ADDRESS", help="Use the workers of a Dask cluster: tcp://HOST:8786, or a scheduler file."
)
@click.option("--flush", is_flag=True, help="Take subnormal numbers for zero in what is tried (x86-64, glibc).")
@_device
@quiet_option
@verbose_option
def run(
    file: str,
    out: str,
    resume: bool,
    jobs: int | None,
    scheduler: str | None,
    flush: bool,
    device: str,
    quiet: bool,
) -> int:
    """Run the trials that FILE, a .toml, describes.

    Writes a line for each trial to DIR/trials.jsonl as soon as it is done. After Ctrl-C, or a crash, --resume continues
    where it stopped. The documentation explains the entries of FILE, under "Campaigns". --scheduler needs Dask (pip
    install "abft_tsm2[dask]").

    \b
    Example:
      abft-tsm2 campaign run benchmarks/campaigns/quick.toml -o results
    """
    from abft_tsm2.faults.campaign.file import load
    from abft_tsm2.faults.campaign.run import MPS, Count, side_by_side
    from abft_tsm2.faults.campaign.run import run as carry_out

    if scheduler is not None and jobs is not None:
        raise click.UsageError("--jobs counts processes of this machine, and does not go with --scheduler")
    if scheduler is not None and flush:
        raise click.UsageError("--flush is for processes of this machine, and does not go with --scheduler")
    asked = load(file)
    options = " --device gpu" * (device == "gpu") + (f" --jobs {jobs}" if jobs is not None else "")
    options += f" --scheduler {shlex.quote(scheduler)}" if scheduler is not None else " --flush" * flush
    command = f"abft-tsm2 campaign run {shlex.quote(Path(file).name)} -o {shlex.quote(Path(out).name)}{options}"
    here = device == "gpu" and scheduler is None and find_spec("cupy")
    if here and jobs not in (0, 1) and not quiet and not side_by_side():
        say(f"processes take turns on the GPU; start {MPS} -d to let them share it, which is several times as fast")
    with _progress(asked.trials, quiet) as show:
        try:
            count: Count = carry_out(
                asked,
                out,
                resume=resume,
                jobs=jobs,
                scheduler=scheduler,
                gpu=device == "gpu",
                flush=flush,
                command=command,
                progress=show,
                tell=(lambda text: None) if quiet else say,
            )
        except BaseException as error:
            if not isinstance(error, Exception):
                say(f"{out} keeps what was done: continue with --resume")
            raise
    if not quiet:
        told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.outcomes.items())) or "nothing to do"
        done = f"{count.done} of {count.planned} trials, {count.rate:.0f} a second: {told}"
        announce(f"{done}\nsee abft-tsm2 campaign report {out}", f"{out} keeps what was done")
    if count.broken:
        say(f"Error: {count.broken} trials broke a promise; see abft-tsm2 campaign report {out}")
    for text in count.sharpness.broken:
        say(f"Error: {text}")
    return CORRUPTED if count.broken or count.sharpness.broken else OK


@contextlib.contextmanager
def _progress(trials: int, quiet: bool) -> Iterator[Any]:
    """A bar on a terminal, a line every `EVERY` seconds elsewhere."""
    if quiet or not sys.stderr.isatty():
        told = time.monotonic()

        def show(count: Any) -> None:
            nonlocal told
            if not quiet and time.monotonic() - told > EVERY:
                told = time.monotonic()
                left = (count.planned - count.done) / max(count.rate, 1e-9)
                say(f"{count.done} of {count.planned} trials, {_state(count)}, {left:.0f} s left")

        yield show
        return
    bar: Any = click.progressbar(length=trials, label="trials", file=sys.stderr, item_show_func=_state, show_pos=True)
    with bar:

        def draw(count: Any) -> None:
            if count.done - bar.pos >= max(1, trials // 1000) or count.done == trials:
                bar.update(count.done - bar.pos, count)

        yield draw


def _state(count: Any) -> str:
    return "" if count is None else f"{count.rate:.0f} a second, {count.broken} promises broken"


@campaign.command()
@click.argument("folder", metavar="DIR")
@click.option("--format", "form", type=click.Choice(["html", "json", "csv"]), default="html", help="json: to stdout.")
@quiet_option
@verbose_option
def report(folder: str, form: str, quiet: bool) -> int:
    """Write the page and the table of a campaign: DIR/report.html and DIR/summary.csv.

    Needs matplotlib and Jinja2 for the page (pip install "abft_tsm2[report]").

    \b
    Example:
      abft-tsm2 campaign report results
    """
    from abft_tsm2.faults.analysis import report as pages

    if form == "json":
        click.echo(pages.as_json(folder))
        return OK
    for path in pages.write(folder, format=form):
        if not quiet:
            announce(f"wrote {path}", f"wrote {path}")
    return OK


@campaign.command()
@click.argument("folder", metavar="DIR")
@click.argument("trial", type=click.IntRange(min=0))
@_device
@quiet_option
@verbose_option
def replay(folder: str, trial: int, device: str, quiet: bool) -> int:
    """Run one trial of a campaign again, alone, and show all of it.

    Exit code 1 if the outcome differs from the one in DIR.

    \b
    Example:
      abft-tsm2 campaign replay results 17
    """
    from abft_tsm2.faults.campaign.file import load
    from abft_tsm2.faults.campaign.folder import CAMPAIGN
    from abft_tsm2.faults.campaign.run import replay as again

    found = again(folder, trial, gpu=device == "gpu")
    if not quiet:
        for plan in load(Path(folder) / CAMPAIGN).trial(trial).plans:
            click.echo(f"fault: {plan.to_json()}")
        click.echo("\n".join(f"{name}: {json.dumps(x) if x is None else x}" for name, x in found.line.items()))
        if found.finding.report is not None:
            click.echo(str(found.finding.report))
    if not found.same:
        where = ", ".join(found.differing)
        say(f"Error: trial {trial} differs from DIR in {where}; another library or machine may round differently")
        return CORRUPTED
    return OK
