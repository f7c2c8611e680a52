"""Exit codes, output options and final messages of all commands."""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.io import matrix
from abft_tsm2.io.atomic import short
from abft_tsm2.io.matrix import MatrixFileError
from abft_tsm2.report import Report, Status

OK, CORRUPTED, UNVERIFIABLE = 0, 1, 3
PRINTED = "-"  # the name of a report that goes to standard output
EXIT_CODES = """\b
Exit codes: 0 clean or repaired, 1 corruption that was not repaired, 2 usage or
file error, 3 a part could not be checked, 130 interrupted (by SIGTERM 143, by
SIGHUP 129)."""
FLOAT = click.Choice(["float32", "float64"])


class Group(click.Group):
    """A group of commands that suggests the nearest name for one that does not exist."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            names = self.list_commands(ctx)
            nearest = difflib.get_close_matches(args[0], names, 1) or names
            hint = f"did you mean {' or '.join(nearest)}?"
            raise click.UsageError(f"no command '{args[0]}' ({hint})", ctx) from error


class Finite(click.FloatRange):
    """Numbers in a range: no NaN, which is in every range, and no infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number", param, ctx)
        return number


def _log(context: click.Context, option: click.Parameter, verbose: int) -> None:
    if verbose:
        logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stderr)
        logging.getLogger("abft_tsm2").setLevel(logging.INFO if verbose == 1 else logging.DEBUG)


quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
verbose_option = click.option(
    "-v", "--verbose", count=True, expose_value=False, callback=_log, help="Log to stderr; -vv: more."
)


def computing(*own: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """The options of commands that compute: those that all of them have, and their `own`."""
    report = click.option("--report", metavar="FILE", help="Write the full report as JSON; -: to stdout, alone.")
    dtype = click.option("--dtype", type=FLOAT, help="Convert the inputs first; needed for integers.")

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        for option in (verbose_option, quiet_option, *reversed(own), dtype, report):
            command = option(command)
        return command

    return decorate


def refuse_same_file(inputs: Sequence[str], *outputs: str | None) -> None:
    taken = [os.path.realpath(matrix.split_name(name)[0]) for name in inputs]
    for name in filter(None, outputs):
        if name == PRINTED:
            continue
        if os.path.realpath(name) in taken:
            raise MatrixFileError(f"{name} is given twice and would be overwritten; name another file")
        taken.append(os.path.realpath(name))


@contextlib.contextmanager
def report_to(name: str | None) -> Iterator[Callable[[Report], None]]:
    """Yield a function that writes the report to a file, which is opened first: a bad name is known before the work.

    `PRINTED` is standard output.
    """
    if name is None:
        yield lambda report: None
    elif name == PRINTED:
        yield lambda report: click.echo(report.to_json(indent=2))
    else:
        with matrix.output_file(name) as keep:
            yield lambda report: keep(f"{report.to_json(indent=2)}\n".encode())


def exit_code(report: Report) -> int:
    statuses = {report.status, *report.also}
    if statuses & {Status.UNCORRECTABLE, Status.INPUT_CHANGED}:
        return CORRUPTED
    return UNVERIFIABLE if Status.UNVERIFIABLE in statuses else OK


def refuse(report: Report) -> None:
    """SilentDataCorruptionError, so that no file is written, where the result stays wrong."""
    if exit_code(report) == CORRUPTED:
        raise SilentDataCorruptionError(report)


def conclude_file(report: Report, quiet: bool, name: str) -> int:
    """Print the report and whether the file was written; returns the exit code."""
    written = f"{name} was {'not ' if exit_code(report) == CORRUPTED else ''}written"
    return conclude(report, quiet, written, "run it again, on another machine if it stays")


def conclude(report: Report, quiet: bool, outcome: str, advice: str) -> int:
    """Print the report and the outcome for the file; returns the exit code."""
    if not quiet:
        announce(f"{report}\n{outcome}", outcome)
    code = exit_code(report)
    first, *others = [*map(str, report.faults), *report.reasons, "see the report"]
    more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
    if code == CORRUPTED:
        say(f"Error: {report.status.value}: {first}{more}; {outcome}; {advice}")
    elif code == UNVERIFIABLE:
        say(f"Warning: {Status.UNVERIFIABLE.value}: {first}{more}; {outcome}")
    return code


def announce(text: str, kept: str) -> None:
    """Print the result of a command on stdout; where that fails, say so and what is `kept`.

    The exit code is not changed: the work and its files are complete.
    """
    try:
        click.echo(text.encode("utf-8", "backslashreplace").decode())  # names of files may be any bytes
    except OSError as error:
        discard_output()
        say(f"Warning: nothing more can be printed: standard output: {short(error)}; {kept}")


def discard_output() -> None:
    """Discard what could not be printed on stdout, so that the interpreter does not try again at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(line: str) -> None:
    """Print the text as one line on stderr, unless stderr is closed or full."""
    with contextlib.suppress(OSError):
        click.echo(" ".join(line.split()), err=True)
