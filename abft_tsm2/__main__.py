"""``python -m abft_tsm2``: the process around the commands: its signals, from the first moment to the last.

Nothing is imported before they are heard: NumPy and the commands take a while, in which Ctrl-C would show a traceback.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType
    from typing import Any, NoReturn

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
AGAIN = 0.1  # seconds after which a signal that was lost on its way is raised again


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code.

    Parameters
    ----------
    args : sequence of str, optional
        The words after the program's name; by default those of the process.
    """
    _hear(_leave_at_once)
    from abft_tsm2.cli.output import say
    from abft_tsm2.cli.process import run

    try:
        _hear(_leave)
        code = run(sys.argv[1:] if args is None else args)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except _Stopped as stop:
        signal.setitimer(signal.ITIMER_REAL, 0)  # before it is gone, and would be taken for lost
        code = _code(stop.args[0])
        say("Interrupted: unfinished files were removed")
    _hear(lambda number, frame: os._exit(code))  # the work is done, and all of it is printed
    sys.exit(code)


def _hear(handler: Callable[[int, FrameType | None], Any]) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handler)


def _code(number: int) -> int:
    """The exit code of a process that a signal has ended, as shells count."""
    return 128 + number


def _leave_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Nothing has begun yet that would have to be removed."""
    try:
        os.write(2, b"Interrupted: nothing had begun yet\n")
    finally:
        os._exit(_code(number))


class _Stopped(BaseException):
    """A signal asked the process to end: an exception, so that temporary files are removed on the way."""


def _leave(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:  # once is enough: a second Ctrl-C must not interrupt the cleaning up
        signal.signal(each, signal.SIG_IGN)
    _raise_until_heard(number)


def _raise_until_heard(number: int) -> None:
    """Raise, and again as long as nobody unwinds: code in C (of an import, say) may drop any exception in silence."""
    from weakref import ref

    stop = [_Stopped(number)]
    raised = ref(stop[0])

    def again(_: int, frame: FrameType | None) -> None:
        if raised() is None:
            _raise_until_heard(number)

    signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, AGAIN, AGAIN)
    raise stop.pop()  # which this frame, a part of its traceback, does not keep


if __name__ == "__main__":
    main()
