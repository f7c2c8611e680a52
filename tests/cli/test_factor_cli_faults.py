"""``abft-tsm2 lu`` and ``solve`` when something goes wrong underway: faults, signals; and what a terminal shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2.report import Report, Status
from tests.support.command_line import ENVIRONMENT, in_process, new_files, run, start
from tests.support.factor_cases import lu_outside, solved
from tests.support.planting import normal

N = 90


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the process runs; the matrices lie elsewhere, behind links."""
    folder = tmp_path / "matrices"
    folder.mkdir()
    A, b = normal(N, N), normal(N)
    lu, piv = linalg.lu_factor(A)
    np.save(folder / "A.npy", A)
    np.save(folder / "b.npy", b)
    np.savez(folder / "scipy.npz", lu=lu, piv=piv)
    np.save(folder / "large.npy", normal(300, 300))
    np.save(folder / "long.npy", normal(300))
    here = tmp_path / "here"
    here.mkdir()
    for path in folder.iterdir():
        (here / path.name).symlink_to(path)
    monkeypatch.chdir(here)
    return here


def report() -> Report:
    return Report.from_dict(json.loads(Path("r.json").read_text()))


WITHIN = """
import time, abft_tsm2
from abft_tsm2.__main__ import main
real, reached = abft_tsm2.{name}, []
def {name}(*args, **options):
    def hook(stage, arrays):
        reached.append(stage)
        {body}
    return real(*args, **{{**options, "on_stage": hook}})
abft_tsm2.{name} = {name}
main()
"""


def script(name: str, body: str) -> list[str]:
    """Arguments of an interpreter that runs the command with a hook in one protected function."""
    return ["-c", WITHIN.format(name=name, body=body)]


ONCE = "if reached.count({stage!r}) == 1 and stage == {stage!r}: arrays[{array!r}][{at}] = 1e30"


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_fault_in_the_factors_is_repaired(here: Path, mode: str) -> None:
    fault = ONCE.format(stage="updated" if mode == "online" else "factored", array="W", at="80, 75")
    words = ["lu", "A.npy", "-o", "lu.npz", "--report", "r.json", "--mode", mode]
    done = run(here, *words, code=script("protected_lu_factor", fault))
    assert (done.returncode, done.stderr) == (0, "")
    assert report().status is Status.CORRECTED
    with np.load("lu.npz") as written:
        assert not lu_outside(written["lu"], written["piv"], np.load("A.npy")).any()


@pytest.mark.parametrize(("a", "name"), [("A.npy", "protected_solve"), ("scipy.npz", "protected_lu_solve")])
def test_a_fault_in_the_solution_is_repaired(here: Path, a: str, name: str) -> None:
    fault = ONCE.format(stage="backward", array="x", at="17")
    words = ["solve", a, "b.npy", "-o", "x.npy", "--report", "r.json"]
    done = run(here, *words, code=script(name, fault))
    assert (done.returncode, done.stderr) == (0, "")
    assert report().status is Status.CORRECTED
    assert solved(np.load("x.npy"), np.load("A.npy"), np.load("b.npy"))


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_corruption_that_stays_is_1_and_leaves_no_factors(here: Path, mode: str) -> None:
    fault = "if 'W' in arrays: arrays['W'][80, 75] = float('nan')"
    words = ["lu", "A.npy", "-o", "lu.npz", "--report", "r.json", "--mode", mode]
    done = run(here, *words, code=script("protected_lu_factor", fault))
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "lu.npz was not written" in done.stderr
    assert done.stderr.count("\n") == 1
    assert report().status is Status.UNCORRECTABLE
    assert new_files(here) == ["r.json"]


def test_corruption_that_stays_leaves_no_solution(here: Path) -> None:
    fault = "if 'x' in arrays: arrays['x'][3] = float('nan')"
    done = run(here, "solve", "A.npy", "b.npy", "-o", "x.npy", code=script("protected_solve", fault))
    assert done.returncode == 1
    assert "x.npy was not written" in done.stderr
    assert new_files(here) == []


@pytest.mark.parametrize("words", [["lu", "A.npy", "-o", "o.npz"], ["solve", "A.npy", "b.npy", "-o", "o.npy"]])
def test_what_cannot_be_checked_is_3(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    import abft_tsm2

    name = {"lu": "protected_lu_factor", "solve": "protected_solve"}[words[0]]
    result: Any = (np.eye(N), np.arange(N)) if words[0] == "lu" else np.ones(N)
    said = Report(Status.UNVERIFIABLE, words[0], N, N, N, "float64", reasons=("the sums overflow",))
    monkeypatch.setattr(abft_tsm2, name, lambda *_, **__: (result, said), raising=False)
    code, _, err = in_process(capsys, *words)
    assert code == 3
    assert err == f"Warning: a part could not be checked: the sums overflow; {words[-1]} was written\n"
    assert new_files(here) == [words[-1]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("protected_lu_factor", ["lu", "A.npy", "-o", "o.npz", "--report", "r.json"]),
        ("protected_solve", ["solve", "A.npy", "b.npy", "-o", "o.npy"]),
    ],
    ids=["lu", "solve"],
)
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_a_signal_leaves_no_file(here: Path, sent: signal.Signals, code: int, name: str, words: list[str]) -> None:
    body = "open('reached', 'w').close(); time.sleep(600)"
    with start(here, *words, code=script(name, body)) as process:
        deadline = time.monotonic() + 300
        while "reached" not in new_files(here) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert any(file.startswith(".abft_tsm2-") for file in new_files(here))
        process.send_signal(sent)
        out, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert (out, err) == ("", "Interrupted: unfinished files were removed\n")
    assert new_files(here) == ["reached"]


def on_a_terminal(here: Path, *words: str) -> tuple[str, str]:
    """What the command writes to a terminal that is its stderr, and to stdout."""
    pty = pytest.importorskip("pty")
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "abft_tsm2", *words]
    done = subprocess.run(
        command, cwd=here, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=inside, check=True, text=True
    )
    os.set_blocking(terminal, False)
    try:
        shown = os.read(terminal, 100_000).decode()
    except BlockingIOError:
        shown = ""
    os.close(inside)
    os.close(terminal)
    return shown, done.stdout


@pytest.mark.parametrize("mode", ["auto", "online", "offline"])
@pytest.mark.parametrize(
    "words",
    [["lu", "large.npy", "-o", "o.npz"], ["solve", "large.npy", "long.npy", "-o", "o.npy"]],
    ids=["lu", "solve"],
)
def test_progress_on_a_terminal(here: Path, words: list[str], mode: str) -> None:
    shown, out = on_a_terminal(here, *words, "--mode", mode)
    assert "columns" in shown
    assert "100%" in shown
    assert "100%" not in out
    if mode == "online":  # more than the two ends
        assert len({part for part in shown.split() if part.endswith("%")}) > 2


def test_no_progress_elsewhere(here: Path) -> None:
    words = ["lu", "large.npy", "-o", "o.npz", "--mode", "online"]
    assert on_a_terminal(here, *words, "-q") == ("", "")
    assert run(here, *words).stderr == ""


def test_verbose_logs_to_stderr(here: Path) -> None:
    loud = run(here, "lu", "A.npy", "-o", "lu.npz", "-q", "-vv")
    assert loud.stdout == ""
    assert "DEBUG lu_factor" in loud.stderr
    assert "CLEAN" in loud.stderr
