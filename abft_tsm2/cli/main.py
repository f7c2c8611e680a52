"""The command ``abft-tsm2``: the group of all commands, and those of a few lines: info, tune, demo."""

from __future__ import annotations

import json
from pathlib import Path

import click

import abft_tsm2
from abft_tsm2.cli import campaign, gemm, linalg
from abft_tsm2.cli import tune as tuning
from abft_tsm2.cli.output import (
    CORRUPTED,
    EXIT_CODES,
    FLOAT,
    OK,
    Group,
    announce,
    exit_code,
    quiet_option,
    say,
    verbose_option,
)
from abft_tsm2.core.autotune import WrongProduct
from abft_tsm2.io.versions import collected


@click.group(cls=Group, invoke_without_command=True, epilog=EXIT_CODES, context_settings={"show_default": True})
@click.version_option(abft_tsm2.__version__, prog_name="abft-tsm2")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Matrix products and linear systems that notice, locate and repair silent data corruption.

    \b
    Example:
      abft-tsm2 gemm A.npy B.npy -o C.npy --report report.json
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(as_json: bool) -> int:
    """Print versions, devices and configuration.

    \b
    Under configuration:
      on STATUS      what happens when a report has that status
      panel          size of the row panels in which large files are multiplied
      mapped from    .npy files of this size or more are memory-mapped, not read
      cache          folder of what `abft-tsm2 tune` measures (ABFT_TSM2_CACHE_DIR)
      choice on gpu  what decides which kernel multiplies tall and skinny
                     matrices on that GPU

    \b
    Example:
      abft-tsm2 info --json
    """
    facts = collected()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return OK
    for section, entries in facts.items():
        click.echo(f"{section}:")
        for key, value in entries.items():
            click.echo(f"  {key:<18} {'not installed' if value is None else value}")
    return OK


@cli.command(epilog=EXIT_CODES)
@click.option("--quick", is_flag=True, help="The commonest shapes only: under a minute.")
@click.option("--output", metavar="FILE", help="Write there; products do not look there.")
@click.option("--reset", is_flag=True, help="Delete what was measured here, and measure nothing.")
@quiet_option
@verbose_option
def tune(quick: bool, output: str | None, reset: bool, quiet: bool) -> int:
    """Measure which kernel, or the vendor library, multiplies tall and skinny matrices fastest on this GPU.

    What is chosen without it is kept unless something else is more than 3 % faster, and every product is checked.
    The file in the cache directory (ABFT_TSM2_CACHE_DIR) holds for this card and its driver; products in new
    processes follow it. Nothing else measures. Takes some minutes; interrupted, it keeps what it has.

    \b
    Example:
      abft-tsm2 tune --quick
    """
    if reset and (quick or output):
        raise click.UsageError("--reset deletes, and goes with neither --quick nor --output")
    if reset:
        outcome = tuning.reset()
        if not quiet:
            announce(outcome, outcome)
        return OK
    try:
        tuning.run(quick=quick, output=output, quiet=quiet)
    except WrongProduct as error:
        say(f"Error: {error}")
        return CORRUPTED
    return OK


@cli.command(epilog=EXIT_CODES)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of every random choice.")
@click.option("--bit", type=click.IntRange(0, 63), help="Which bit to flip; without it, the top exponent bit.")
@click.option("--dtype", type=FLOAT, default="float64", help="Precision of every product.")
@click.option("--out", metavar="DIR", default="abft_tsm2_demo", help="Folder for the results.")
@quiet_option
@verbose_option
def demo(seed: int, bit: int | None, dtype: str, out: str, quiet: bool) -> int:
    """Spoil a picture with one flipped bit, and see the same flip repaired.

    A photograph is compressed by a randomised SVD, and handwritten digits are classified by their nearest
    neighbours: clean, with a flipped bit in one product, and with the same flip under protection. Prints a
    table, and writes demo.png and demo.json. Needs scikit-learn and Pillow.

    \b
    Example:
      abft-tsm2 demo --seed 1 --bit 62 --out results
    """
    from abft_tsm2.cli.demo import run

    result = run(Path(out), seed=seed, bit=bit, dtype=dtype)
    if not quiet:
        announce(result.text, f"{out} has the results")
    return max(map(exit_code, result.reports))


cli.add_command(gemm.gemm)
cli.add_command(gemm.verify)
cli.add_command(linalg.lu)
cli.add_command(linalg.solve)
cli.add_command(campaign.campaign)
