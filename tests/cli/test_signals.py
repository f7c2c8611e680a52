"""Signals to the command: from its first moment to its last, one line and the exit code that shells expect."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2.faults.campaign.workers import OF_TERMINAL, _heed_the_parent, started
from tests.support.command_line import run

WHILE_IMPORTING = """
import os, signal, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder)
from abft_tsm2.__main__ import main
main()
"""
AT = """
import os, signal, sys
from abft_tsm2.__main__ import main
from abft_tsm2.cli import process

{before}

process.run, honest = carried_out, process.run
main()
"""
LOST = """
import ctypes, time

class Key:
    def __hash__(self):
        return 1

    def __eq__(self, other):
        os.kill(os.getpid(), signal.SIGINT)
        return False

def carried_out(args):
    get = ctypes.pythonapi.PyDict_GetItem  # it drops any exception, as code in C may
    get.argtypes, get.restype = [ctypes.py_object] * 2, ctypes.c_void_p
    get({1: 2}, Key())
    try:
        time.sleep(60)
    finally:
        time.sleep(0.5)  # longer than it takes to raise it again
        open("cleaned", "w").close()
"""
AT_ITS_END = """
import atexit

def carried_out(args):
    code = honest(args)
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    return code
"""


@pytest.mark.parametrize(
    ("module", "sent"),
    [
        ("click", signal.SIGINT),
        ("numpy", signal.SIGINT),
        ("numpy", signal.SIGTERM),
        ("abft_tsm2.cli.main", signal.SIGHUP),
    ],
)
def test_while_it_is_being_imported(tmp_path: Path, module: str, sent: signal.Signals) -> None:
    done = run(tmp_path, "info", code=["-c", WHILE_IMPORTING.format(module=module, number=int(sent))])
    assert (done.returncode, done.stdout) == (128 + sent, "")
    assert done.stderr == "Interrupted: nothing had begun yet\n"


def test_an_exception_that_is_lost_on_its_way_is_raised_again(tmp_path: Path) -> None:
    done = run(tmp_path, "info", code=["-c", AT.format(before=LOST)])
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "Interrupted: unfinished files were removed\n"
    assert (tmp_path / "cleaned").exists()


def test_when_all_is_done_its_exit_code_stays(tmp_path: Path) -> None:
    np.save(tmp_path / "A.npy", np.eye(3))
    words = ["gemm", "A.npy", "A.npy", "-o", "C.npy", "-q"]
    done = run(tmp_path, *words, code=["-c", AT.format(before=AT_ITS_END)])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert np.array_equal(np.load(tmp_path / "C.npy"), np.eye(3))


def ask(pipe: Connection) -> None:
    """What a process of a campaign hears when it begins, and when it has begun."""
    found: list[Any] = [signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    _heed_the_parent()
    found += [signal.pthread_sigmask(signal.SIG_BLOCK, []), [signal.getsignal(number) for number in OF_TERMINAL]]
    pipe.send(found)


def test_what_a_terminal_sends_to_all_is_for_the_parent_while_processes_start() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    process, pipe = started(ask)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    at_first, later, heard = pipe.recv()
    process.join()
    assert set(OF_TERMINAL) <= at_first
    assert not set(OF_TERMINAL) & later
    assert heard == [signal.SIG_IGN] * 2
