"""Campaigns end with the same trials and outcomes, whatever happens to them on the way."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from abft_tsm2.core.flushing import flushes
from abft_tsm2.faults.campaign.file import Campaign, load, parse
from abft_tsm2.faults.campaign.folder import CampaignFileError
from abft_tsm2.faults.campaign.run import MPS, Count, replay, run, side_by_side, units
from abft_tsm2.faults.trials.trial import BROKEN
from tests.support import campaign_schemes
from tests.support.command_line import ENVIRONMENT, start
from tests.support.command_line import run as run_command
from tests.support.small_campaigns import OWN, SLOW, SMALL, done, lines, manifest, timeless

__all__ = ["done"]


def test_every_trial_has_one_line_and_the_manifest_says_how(done: Path) -> None:
    found = lines(done)
    assert [one["trial"] for one in found] == list(range(84))
    assert Counter(one["suite"] for one in found) == {"products": 64, "stored": 20}
    kept = manifest(done)
    assert {"schema": "abft_tsm2/campaign/1", "trials": 84, "seed": 3, "jobs": 0}.items() <= kept.items()
    assert kept["command"] == "abft-tsm2 campaign run small.toml"
    assert kept["started"] <= kept["finished"]
    assert (done / "campaign.toml").read_text() == SMALL
    assert {one["outcome"] for one in found if one["scheme"] in ("protected", "encoded")} <= {
        *("clean", "masked", "below_bound", "corrected", "detected"),
    }
    assert {"sdc", "clean", "masked"} <= {one["outcome"] for one in found if one["scheme"] == "none"}


def test_two_processes_find_what_one_does(done: Path, tmp_path: Path) -> None:
    count = run(parse(SMALL), tmp_path / "two", jobs=2)
    assert (count.done, count.planned, count.before) == (84, 84, 0)
    assert timeless(tmp_path / "two") == timeless(done)


@pytest.mark.parametrize("jobs", [0, 1])
def test_subnormal_numbers_are_zero_where_that_is_asked_for(jobs: int, tmp_path: Path) -> None:
    """In what is tried, in every process; the judge and this one go on with them."""
    seen = SMALL.replace('"double"', f'"{OWN}:sees_subnormals"').replace("trials = 64", "trials = 16")
    for flush in (False, True)[jobs:]:
        folder = tmp_path / f"{flush}"
        run(parse(seen), folder, jobs=jobs, flush=flush)
        own = [one for one in lines(folder) if one["scheme"].endswith("sees_subnormals")]
        assert {one["status"] for one in own} == {"REFUSED" if flush else ""}
        assert manifest(folder).get("flushed", False) is flush
        assert all(one["outcome"] not in BROKEN for one in lines(folder) if one["scheme"] in ("protected", "encoded"))
        if not jobs:
            assert replay(folder, own[0]["trial"]).line["status"] == own[0]["status"]
        with pytest.raises(CampaignFileError, match="was begun"):
            run(parse(seen), folder, jobs=0, flush=not flush, resume=True)
    assert not flushes()
    with pytest.raises(ValueError, match="processes of this machine"):
        run(parse(seen), tmp_path / "cluster", scheduler="tcp://127.0.0.1:1", flush=True)


def test_what_is_left_is_what_was_not_done(done: Path) -> None:
    campaign = parse(SMALL)
    left = units(campaign, {0, 5, 63, 64, *range(32, 63)})
    assert [number for unit in left for number in unit.numbers] == [*range(1, 5), *range(6, 32), *range(65, 84)]
    assert units(campaign, set(range(84))) == []


def test_an_interrupted_campaign_goes_on_where_it_stopped(done: Path, tmp_path: Path) -> None:
    def interrupt(count: Count) -> None:
        if count.done == stop:
            raise KeyboardInterrupt

    campaign, folder = parse(SMALL), tmp_path / "it"
    for stop in (10, 11, 70):
        with pytest.raises(KeyboardInterrupt):
            run(campaign, folder, jobs=0, resume=folder.exists(), progress=interrupt)
        assert len(lines(folder)) == stop
        assert manifest(folder)["finished"] is None
    kept = manifest(folder)
    count = run(campaign, folder, jobs=0, resume=True)
    assert (count.before, count.done) == (70, 84)
    assert timeless(folder) == timeless(done)
    assert manifest(folder)["started"] == kept["started"]
    assert manifest(folder)["seconds"] > kept["seconds"] > 0
    assert manifest(folder)["finished"]
    assert run(campaign, folder, jobs=0, resume=True).outcomes == {}


def test_rates_and_broken_promises_are_counted() -> None:
    count = Count(10, 2)
    for scheme, outcome in (
        ("none", "sdc"),
        ("protected", "sdc"),
        ("x:y", "crash"),
        ("double", "hang"),
        ("both", "masked"),
    ):
        count.add({"scheme": scheme, "outcome": outcome})
    assert (count.done, count.broken) == (7, 2)
    assert count.rate > 0


# ---- processes that end --------------------------------------------------------------------------------------------


def ends(scheme: str, timeout: float) -> Campaign:
    """Sixteen trials, of which one scheme's ends its process in one; the other scheme bears the same fault."""
    for seed in range(1000):
        campaign = parse(
            f'seed = {seed}\ntimeout = {timeout}\n[[suite]]\nname = "one"\noperation = "gemm"\ntrials = 16\n'
            f'clean = 0.2\nshapes = [[8, 9, 7]]\nschemes = ["{OWN}:{scheme}", "none"]\n'
            '[[suite.fault]]\nmodel = "bit_flip"\n'
            'bits = "mantissa"\nshare = 9\n[[suite.fault]]\nmodel = "nan"\n'
        )
        models = [plan.model for number in range(16) for plan in campaign.trial(number).plans]
        if models.count("nan") == 2 and campaign.trial(0).plans[:1] != () and models[:4].count("nan") == 0:
            return campaign
    raise AssertionError("no such seed")


@pytest.mark.parametrize(
    ("scheme", "outcome", "note", "timeout"),
    [
        pytest.param("hangs", "hang", "no answer after 20 s", 20, marks=pytest.mark.full),
        ("aborts", "crash", "its process ended with signal SIGABRT", 60),
        ("exits", "crash", "its process ended with exit code 7", 60),
    ],
)
def test_a_process_that_ends_or_hangs_costs_its_trial_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str, outcome: str, note: str, timeout: float
) -> None:
    folder = tmp_path / scheme
    count = run(ends(scheme, timeout), folder, jobs=1)
    found = timeless(folder)
    assert [one["trial"] for one in found] == list(range(16))
    lost = [one for one in found if one["note"]]
    assert [(one["outcome"], one["note"], one["model"]) for one in lost] == [(outcome, note, "nan")]
    assert {one["outcome"] for one in found if one not in lost} <= {"clean", "masked", "below_bound", "sdc"}
    assert next(one for one in found if one["trial"] == lost[0]["trial"] + 1)["outcome"] == "sdc"
    assert count.broken >= 1
    if scheme != "hangs":  # and it can be looked at again, without taking this process along
        assert replay(folder, lost[0]["trial"]).same


def test_a_process_that_never_begins_is_no_trials_fault(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"from abft_tsm2.faults.campaign.run import run\nfrom abft_tsm2.faults.campaign.file import parse\n"
        f"print(run(parse({SMALL!r}), {str(tmp_path / 'out')!r}, jobs=1))\n"
    )
    ran = subprocess.run([sys.executable, script], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1
    assert "a process of the campaign did not start: its process ended with exit code 1; a script" in ran.stderr
    assert lines(tmp_path / "out") == []
    script.write_text(script.read_text().replace("print(", 'if __name__ == "__main__":\n    print('))
    ran = subprocess.run([sys.executable, script], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0
    assert len(lines(tmp_path / "out")) == 84


def test_an_error_of_the_experiment_is_a_crash_of_all_that_it_concerns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("abft_tsm2.faults.campaign.run.require_machine", lambda campaign: None)  # it goes missing later
    missing = SLOW.replace("schemes = [", 'files = [["no.npy", "no.npy"]]\nfamilies = ["normal"]\nschemes = [')
    campaign = parse(missing.replace(":slow", ":believes"))
    run(campaign, tmp_path / "it", jobs=0)
    by_file = Counter((one["family"] == "normal", one["outcome"]) for one in lines(tmp_path / "it"))
    assert set(by_file) == {(True, "clean"), (True, "masked"), (False, "crash")}
    assert all("no.npy" in one["note"] for one in lines(tmp_path / "it") if one["outcome"] == "crash")


def test_processes_have_one_blas_thread(tmp_path: Path) -> None:
    campaign = parse(SLOW.replace(":slow", ":counts_threads").replace("trials = 200", "trials = 30"))
    kept = {name: os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    count = run(campaign, tmp_path / "it", jobs=2)
    assert set(count.outcomes) <= {"clean", "masked"}, lines(tmp_path / "it")[0]["note"]
    assert {name: os.environ.get(name) for name in kept} == kept


# ---- killed and resumed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("script", "runs"), [("exit 0", True), ("exit 1", False), (None, False)])
def test_whether_processes_share_a_gpu_is_what_its_service_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, runs: bool
) -> None:
    if script is not None:
        (tmp_path / MPS).write_text(f'#!/bin/sh\nread question && [ "$question" = get_server_list ] && {script}\n')
        (tmp_path / MPS).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert side_by_side() is runs


def wait_for(what: Callable[[], Any], seconds: float = 300.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return found


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits to be asked how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def size(folder: Path) -> int:
    path = folder / "trials.jsonl"
    return path.stat().st_size if path.exists() else 0


@contextmanager
def begun(here: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The command, under way; it does not outlive the block."""
    with start(here, "campaign", "run", "slow.toml", "-o", "out", "--jobs", "1", *words) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.full  # in one process: test_an_interrupted_campaign_goes_on_where_it_stopped
def test_killed_again_and_again_and_resumed_it_ends_as_if_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.toml").write_text(SLOW)
    with monkeypatch.context() as patch:
        patch.setattr(campaign_schemes, "SLOWLY", 0.0)
        run(load(tmp_path / "slow.toml"), tmp_path / "undisturbed", jobs=0)
    folder, rng, workers = tmp_path / "out", random.Random(5), []
    for attempt in range(3):
        before = size(folder)
        monkeypatch.setitem(ENVIRONMENT, campaign_schemes.STOPS, str(rng.randrange(10, 40)))
        with begun(tmp_path, *["--resume"] * (attempt > 0)) as process:
            wait_for(lambda before=before: size(folder) > before)  # type: ignore[misc]
            time.sleep(rng.uniform(0, 0.5))
            workers += children(process.pid)
            process.kill()
            process.wait(300)  # its output may be held open by a process that has not ended
        assert process.returncode == -signal.SIGKILL
    assert workers
    monkeypatch.delitem(ENVIRONMENT, campaign_schemes.STOPS)
    wait_for(lambda: all(map(ended, workers)))
    found = run_command(tmp_path, "campaign", "run", "slow.toml", "-o", "out", "--jobs", "2", "--resume")
    assert found.returncode == 0
    assert "200 of 200 trials" in found.stdout
    assert timeless(folder) == timeless(tmp_path / "undisturbed")


def test_ctrl_c_keeps_what_was_done_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.toml").write_text(SLOW)
    monkeypatch.setitem(ENVIRONMENT, campaign_schemes.STOPS, "40")
    with begun(tmp_path) as process:
        wait_for(lambda: size(tmp_path / "out"))
        workers = children(process.pid)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "out keeps what was done: continue with --resume" in err
    assert "Traceback" not in err
    assert 0 < len(lines(tmp_path / "out")) < 200
    assert manifest(tmp_path / "out")["finished"] is None
    wait_for(lambda: all(map(ended, workers)))


def test_a_process_that_hangs_ends_soon_after_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.toml").write_text(ends("hangs", 600).text)
    monkeypatch.setitem(ENVIRONMENT, "ABFT_TSM2_TEST_HANGS", str(tmp_path / "now"))
    with begun(tmp_path) as process:
        wait_for((tmp_path / "now").exists)
        workers = children(process.pid)
        process.kill()
        process.wait(300)  # its output may be held open by a process that has not ended
    assert workers
    wait_for(lambda: all(map(ended, workers)))


def test_processes_of_a_campaign_leave_the_end_of_the_terminal_to_their_parent() -> None:
    script = (
        "import os, signal; from abft_tsm2.faults.campaign import workers; workers._heed_the_parent();"
        "[os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGHUP)]; print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.stdout == "alive\n", done.stderr
