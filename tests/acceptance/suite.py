"""One run of pytest in a copy of a checkout: how it ended, what failed first, and how long it took."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PLUGIN = Path(__file__).parent / "plugin"
KILLED, SURVIVED, TIMEOUT, ERROR = "killed", "survived", "timeout", "error"
_OF_CODE = {0: SURVIVED, 1: KILLED, 4: ERROR, 5: ERROR}
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_PASSED = re.compile(r"\b(\d+) (?:passed|failed|errors?)\b")


@dataclass(frozen=True)
class Run:
    """`outcome`: killed, survived, timeout or error; `first`: the first test that failed; `tests`: how many ran."""

    outcome: str
    seconds: float
    tests: int
    first: str
    output: str


def environment(tree: Path) -> dict[str, str]:
    """The tree's package is imported by processes that tests start, too; BLAS has one thread."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(tree), str(PLUGIN), os.environ.get("PYTHONPATH")))),
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def command(targets: list[str], options: list[str]) -> list[str]:
    # One cache for all copies: kernels that the tests compile for the CPU are compiled once.
    cache = f"cache_dir={tempfile.gettempdir()}/abft_acceptance_cache"
    return [sys.executable, "-m", "pytest", "-q", "--tb=line", "-o", cache, *options, *targets]


def run(tree: Path, targets: list[str], limit: float, options: list[str], chosen: Path | None = None) -> Run:
    """Run pytest until a test fails or the limit (seconds) is over; `chosen`: a file with the ids of the only tests."""
    environ = environment(tree)
    if chosen is not None:
        environ["ABFT_ONLY_TESTS"] = str(chosen)
        options = ["-p", "only_tests", *options]
    begun = time.monotonic()
    with subprocess.Popen(
        command(targets, ["-x", *options]),
        cwd=tree,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Run(TIMEOUT, time.monotonic() - begun, _tests(output), "", output)
    seconds = time.monotonic() - begun
    first = _FAILED.search(output)
    outcome = _OF_CODE.get(process.returncode, KILLED)  # a crash is seen; so is a module that cannot be imported
    return Run(outcome, seconds, _tests(output), first[1] if first else "", output)


def _tests(output: str) -> int:
    return sum(int(count) for count in _PASSED.findall(output.rpartition("\n=")[2][-300:]))
