"""The commands as a process carries them out: one line for each error, and its exit code."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import click

from abft_tsm2.cli.main import cli
from abft_tsm2.cli.output import CORRUPTED, discard_output, say
from abft_tsm2.errors import AbftError, SilentDataCorruptionError
from abft_tsm2.io.atomic import reason

ERROR, BROKEN_PIPE = 2, 141


def run(args: Sequence[str]) -> int:
    """Carry out a command; returns its exit code.

    Parameters
    ----------
    args : sequence of str
        The words after the program's name.
    """
    try:
        return _invoke(args)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        help_of = f"; see {context.command_path} --help" if context else ""
        say(f"Error: {error.format_message().rstrip('.')}{help_of}")
    except MemoryError as error:
        say(f"Error: out of memory ({error or 'no details'}); pass a smaller --panel-mb, or use .npy files")
    except SilentDataCorruptionError as error:
        say(f"Error: {error}")
        return CORRUPTED
    except AbftError as error:
        say(f"Error: {error}")
    except Exception as error:
        return _unexpected(error)
    return ERROR


def _unexpected(error: Exception) -> int:
    """The last resort: one line instead of a traceback, which says nothing to users of the command. The exit code."""
    if isinstance(error, BrokenPipeError):  # quiet, as all that is piped into head
        discard_output()
        return BROKEN_PIPE
    if isinstance(error, OSError) and error.filename is None and not _can_print():
        discard_output()
        say(f"Error: cannot write standard output: {reason(error)}")
    else:
        logging.getLogger("abft_tsm2").debug("unexpected error", exc_info=error)
        say(f"Error: {type(error).__name__}: {error}; run again with -vv to see where it comes from")
    return ERROR


def _can_print() -> bool:
    try:
        print(flush=True)  # a flush alone does not tell: what failed before is not tried again
    except OSError:
        return False
    return True


def _invoke(args: Sequence[str]) -> int:
    # Not cli.main(): what it does at Ctrl-C, a broken pipe and usage errors has other codes and more lines.
    if "_ABFT_TSM2_COMPLETE" in os.environ:
        cli.main(list(args), prog_name="abft-tsm2")  # the shell asks for completions
    with cli.make_context("abft-tsm2", list(args)) as context:
        code: int = cli.invoke(context) or 0
    return code
