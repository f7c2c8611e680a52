"""Campaigns on a Dask cluster end with the lines of campaigns on one machine, whatever happens to its workers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2.errors import AbftError
from abft_tsm2.faults.campaign import cluster as on_cluster
from abft_tsm2.faults.campaign.cluster import ClusterError
from abft_tsm2.faults.campaign.file import Campaign, parse
from abft_tsm2.faults.campaign.run import Count, run
from abft_tsm2.faults.campaign.workers import ONE_THREAD, line
from abft_tsm2.faults.trials.trial import Finding
from tests.support.campaign_schemes import Matrix, Multiply
from tests.support.command_line import in_process
from tests.support.small_campaigns import OWN, SLOW, lines, manifest, timeless

if find_spec("distributed") is None:
    pytest.skip("needs Dask", allow_module_level=True)

HERE = "tests.faults.test_campaign_on_cluster"
MIXED = f"""seed = 5
[[suite]]
name = "products"
operation = "gemm"
trials = 24
shapes = [[12, 14, 10], [9, 16, 11]]
per_scene = 3
schemes = ["protected", "{OWN}:counts_threads", "{OWN}:raises"]
[[suite.fault]]
model = "bit_flip"
bits = "exponent_high"

[[suite]]
name = "stored"
operation = "storage"
trials = 8
shapes = [[12, 14, 1]]
schemes = ["encoded", "crc"]
[[suite.fault]]
model = "bit_flip"
site = "stored"
"""
ENDS = f"""
[[suite]]
name = "ended"
operation = "gemm"
trials = 3
shapes = [[8, 9, 7]]
schemes = ["none", "{OWN}:aborts"]
clean = 0
[[suite.fault]]
model = "nan"
"""


STANDS = 3600.0  # seconds, in processes that import this module anew


def takes_along(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix:
    """A scheme that ends the Dask worker of its process, where there is a NaN."""
    C = multiply(A, B)
    if np.isnan(C).any():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return C


def stands_still(A: Matrix, B: Matrix, multiply: Multiply) -> Matrix:
    """A scheme that does not end, where there is a NaN."""
    C = multiply(A, B)
    if np.isnan(C).any():
        time.sleep(STANDS)
    return C


def scheme(name: str, trials: int, per_scene: int) -> Campaign:
    """Trials of one scheme, one of which has a NaN, but not the first."""
    for seed in range(1000):
        campaign = parse(
            f'seed = {seed}\n[[suite]]\nname = "one"\noperation = "gemm"\ntrials = {trials}\nshapes = [[8, 9, 7]]\n'
            f'per_scene = {per_scene}\nschemes = ["{HERE}:{name}"]\n[[suite.fault]]\nmodel = "offset"\nshare = 4\n'
            '[[suite.fault]]\nmodel = "nan"\n'
        )
        models = [[plan.model for plan in campaign.trial(number).plans] for number in range(trials)]
        if models[1:].count(["nan"]) == models.count(["nan"]) == 1:
            return campaign
    raise AssertionError("no such seed")


@pytest.fixture(scope="module")
def empty() -> Iterator[Any]:
    """A cluster without workers yet; they allow BLAS two threads, and a task whose worker ends is not tried again."""
    import dask
    import distributed  # not at the top: processes that carry out trials import this module

    with pytest.MonkeyPatch.context() as patch, dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        for name in ONE_THREAD:
            patch.setenv(name, "2")
        options = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
        with distributed.LocalCluster(n_workers=0, threads_per_worker=1, **options) as cluster:
            yield cluster


@pytest.fixture
def workers(empty: Any) -> Any:
    """The same with two of them, which are processes: both answer, also where the last test has ended one."""
    import distributed

    empty.scale(2)
    with distributed.Client(empty, set_as_default=False) as client:
        wait_for(lambda: [*client.run(int, on_error="return").values()] == [0, 0])
    return empty


def text(folder: Path) -> list[str]:
    """The lines as they are written, in the order of their numbers, but for the times."""
    found = (folder / "trials.jsonl").read_text().splitlines()
    return sorted((re.sub(r'"seconds": [^,]*, ', "", one) for one in found), key=lambda one: json.loads(one)["trial"])


def wait_for(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return found


def processes(cluster: Any) -> set[int]:
    """Those that carry out trials."""
    import psutil

    found = set()
    for worker in cluster.workers.values():
        for child in psutil.Process(worker.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "_serve" in " ".join(child.cmdline()):
                    found.add(child.pid)
    return found


def test_it_waits_for_workers_and_the_lines_are_those_of_one_machine(
    empty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def join(told: str) -> None:
        assert "the cluster has no workers, waiting for one: dask worker tcp://" in told
        empty.scale(2)

    monkeypatch.setattr(on_cluster, "TURN", 0.1)
    assert not empty.scheduler.workers
    campaign = parse(MIXED + ENDS)
    count = run(campaign, tmp_path / "out", scheduler=empty.scheduler_address, tell=join)
    assert (count.done, count.planned, count.before) == (35, 35, 0)
    for name, value in ONE_THREAD.items():  # those of processes
        monkeypatch.setenv(name, value)
    run(parse(MIXED), tmp_path / "alone", jobs=0)
    *found, before, ended, after = text(tmp_path / "out")
    assert found == text(tmp_path / "alone")
    crash = line(campaign, 33, Finding("crash", note="its process ended with signal SIGABRT"))
    assert ended == re.sub(r'"seconds": [^,]*, ', "", json.dumps(crash))
    assert [json.loads(one)["outcome"] for one in (before, after)] == ["sdc", "sdc"]
    crashes = {(one["scheme"], one["note"]) for one in map(json.loads, found) if one["outcome"] == "crash"}
    assert crashes == {(f"{OWN}:raises", "ZeroDivisionError: one fault too many")}

    kept, then = manifest(tmp_path / "out"), manifest(tmp_path / "alone")
    number = kept["jobs"]
    assert (kept["device"], kept["versions"]) in [
        (then["device"], then["versions"]),
        (f"2 workers: {then['device']}", then["versions"]),
    ]
    assert number in (1, 2)
    (tmp_path / "it.toml").write_text(MIXED + ENDS)
    (tmp_path / "scheduler.json").write_text(json.dumps({"address": empty.scheduler_address}))
    words = ("campaign", "run", str(tmp_path / "it.toml"), "-o", str(tmp_path / "out"), "--resume", "--scheduler")
    code, out, err = in_process(capsys, *words, str(tmp_path / "scheduler.json"))
    assert (code, out.splitlines()[0]) == (1, "35 of 35 trials, 0 a second: nothing to do")
    assert "trials broke a promise" in err
    assert manifest(tmp_path / "out")["command"].endswith(f" -o out --scheduler {tmp_path / 'scheduler.json'}")


def test_a_trial_that_ends_its_workers_is_known(workers: Any, tmp_path: Path) -> None:
    count = run(scheme("takes_along", 4, 4), tmp_path / "it", scheduler=workers.scheduler_address)
    found = timeless(tmp_path / "it")
    assert [one["trial"] for one in found] == list(range(4))
    lost = [(one["model"], one["note"]) for one in found if one["outcome"] == "crash"]
    assert lost == [("nan", "every Dask worker that carried it out has ended")]
    assert count.outcomes["crash"] == 1


def test_interrupted_it_ends_its_processes_and_goes_on_elsewhere(
    workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "STANDS", 0.0)  # of trials in this process

    def interrupt(count: Count) -> None:
        if count.done == 5:
            wait_for(lambda: len(processes(workers) - before) == 2)
            raise KeyboardInterrupt

    campaign, before = scheme("stands_still", 10, 5), processes(workers)
    with pytest.raises(KeyboardInterrupt):
        run(campaign, tmp_path / "it", scheduler=workers.scheduler_address, progress=interrupt)
    assert len(lines(tmp_path / "it")) == 5
    assert manifest(tmp_path / "it")["finished"] is None
    wait_for(lambda: len(processes(workers) - before) == 1, 30)  # which waits for more trials
    run(campaign, tmp_path / "it", jobs=0, resume=True)
    run(campaign, tmp_path / "undisturbed", jobs=0)
    assert text(tmp_path / "it") == text(tmp_path / "undisturbed")


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_another_version_is_refused(workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    campaign = parse(SLOW)
    monkeypatch.setattr(on_cluster, "__version__", "99.0")
    with pytest.raises(ClusterError, match=r"this is abft_tsm2 99.0, and worker tcp://\S+ has version \d.*: install"):
        run(campaign, tmp_path / "it", scheduler=workers.scheduler_address)
    assert not (tmp_path / "it").exists()
    with pytest.raises(ClusterError, match=r"started by abft_tsm2 98.0, and a worker has version 99.0"):
        on_cluster._carry_out("98.0", campaign.text, False, (0, 0, (0,)))


def test_files_that_workers_do_not_find_end_it_before_the_first_trial(
    workers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.ones((12, 14)))
    campaign = parse(SLOW.replace("schemes = [", 'files = [["a.npy", "a.npy"]]\nschemes = ['))
    with pytest.raises(AbftError, match=r"worker tcp://\S+: suite slow: a.npy: no such file"):
        run(campaign, "it", scheduler=workers.scheduler_address)
    assert not Path("it").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://127.0.0.1:9", "no Dask scheduler answers at tcp://127.0.0.1:9: Timed out trying to connect"),
        ("nowhere", "no Dask scheduler answers at nowhere: missing port number"),
        ("{silent}", "no Dask scheduler answers at tcp://127.0.0.1:"),
        ("{file}", "is no scheduler file: KeyError: 'address'; dask scheduler --scheduler-file writes one"),
    ],
)
def test_an_address_at_which_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str, message: str
) -> None:
    monkeypatch.setattr(on_cluster, "CONNECT", 0.2)
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("{}")
    Path("slow.toml").write_text(SLOW)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = address.format(silent=f"tcp://127.0.0.1:{silent.getsockname()[1]}", file="file")
        code, out, err = in_process(capsys, "campaign", "run", "slow.toml", "-o", "out", "--scheduler", where)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("out").exists()


def test_without_dask_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ClusterError, match=re.escape('pip install "abft_tsm2[dask]"')):
        run(parse(SLOW), tmp_path / "it", scheduler="tcp://127.0.0.1:9")


def test_processes_here_and_a_cluster_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="jobs = 2 are processes of this machine: leave it out, or the scheduler"):
        run(parse(SLOW), tmp_path / "it", jobs=2, scheduler="tcp://127.0.0.1:9")
