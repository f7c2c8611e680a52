"""The command line, as a process or in this one, and what it leaves in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def start(folder: Path, *words: str, code: Sequence[str] = ("-m", "abft_tsm2")) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, *code, *words]
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True, preexec_fn=signals_of_a_terminal
    )


def signals_of_a_terminal() -> None:
    """What tests that run under nohup, or behind a shell's `&`, would hand on is to ignore them; others block them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def run(folder: Path, *words: str, code: Sequence[str] = ("-m", "abft_tsm2")) -> subprocess.CompletedProcess[str]:
    with start(folder, *words, code=code) as process:
        out, err = process.communicate(timeout=300)
    assert "Traceback" not in err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def in_process(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The same entry point without a new process, for the many small cases."""
    from abft_tsm2.__main__ import SIGNALS, main

    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with pytest.raises(SystemExit) as left:
        main(words)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def new_files(here: Path) -> list[str]:
    """Those of a folder in which what was there before is linked to."""
    return sorted(path.name for path in here.iterdir() if not path.is_symlink())
