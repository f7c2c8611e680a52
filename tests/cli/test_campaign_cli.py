"""The command ``abft-tsm2 campaign``: trials again, exit codes, and one line for each error."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from abft_tsm2.faults.campaign.file import load, parse
from abft_tsm2.faults.campaign.machine import require_machine
from abft_tsm2.faults.campaign.run import replay, run
from tests.support.command_line import in_process
from tests.support.command_line import run as run_command
from tests.support.small_campaigns import OWN, SLOW, SMALL, done, lines, manifest, timeless

__all__ = ["done"]

# ---- replay --------------------------------------------------------------------------------------------------------


def test_a_trial_carried_out_again_ends_as_it_did(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for one in lines(done):
        again = replay(done, one["trial"])
        assert again.same, again.differing
        assert again.before == one
    flip = next(one for one in lines(done) if (one["outcome"], one["model"]) == ("corrected", "bit_flip"))
    code, out, err = in_process(capsys, "campaign", "replay", str(done), str(flip["trial"]))
    assert (code, err) == (0, "")
    assert '"model": "bit_flip"' in out.splitlines()[0]
    assert f"trial: {flip['trial']}" in out
    assert "recomputed" in out  # the report
    code, out, err = in_process(capsys, "campaign", "replay", str(done), str(flip["trial"]), "-q")
    assert (code, out, err) == (0, "", "")


def test_in_processes_like_those_of_the_campaign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # BLAS with another number of threads may add in another order.
    campaign = parse(SLOW.replace(":slow", ":counts_threads").replace("trials = 200", "trials = 4"))
    run(campaign, tmp_path / "it", jobs=1)
    assert [replay(tmp_path / "it", number).differing for number in range(4)] == [[]] * 4


def test_what_differs_from_what_was_written_is_named(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("campaign.toml", "manifest.json"):
        (tmp_path / name).write_bytes((done / name).read_bytes())
    changed = [dict(one) for one in lines(done)]
    number = next(one["trial"] for one in changed if one["size"] == "Infinity")
    changed[number] |= {"outcome": "clean", "located": "wrong", "seconds": 1e9}
    (tmp_path / "trials.jsonl").write_text("".join(json.dumps(one) + "\n" for one in changed[: number + 1]))
    code, _, err = in_process(capsys, "campaign", "replay", str(tmp_path), str(number), "-q")
    assert code == 1
    assert f"Error: trial {number} differs from DIR in outcome, located;" in err
    assert replay(tmp_path, number + 1).before is None  # not done yet: carried out all the same
    assert replay(tmp_path, number + 1).same


@pytest.mark.parametrize("number", ["84", "100000"])
def test_a_trial_that_is_not_there(done: Path, capsys: pytest.CaptureFixture[str], number: str) -> None:
    code, _, err = in_process(capsys, "campaign", "replay", str(done), number)
    assert code == 2
    assert f"the campaign has trials 0 to 83, not {number}" in err


# ---- the command ---------------------------------------------------------------------------------------------------


def test_a_campaign_on_the_command_line(tmp_path: Path, done: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    found = run_command(tmp_path, "campaign", "run", "small.toml", "-o", "out", "--jobs", "1")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("84 of 84 trials, ")
    assert "see abft-tsm2 campaign report out" in found.stdout
    assert manifest(tmp_path / "out")["command"] == "abft-tsm2 campaign run small.toml -o out --jobs 1"
    assert timeless(tmp_path / "out") == timeless(done)
    again = run_command(tmp_path, "campaign", "run", "small.toml", "-o", "out", "-q")
    assert (again.returncode, again.stdout) == (2, "")
    assert "out holds trials already: pass --resume to go on" in again.stderr


@pytest.mark.parametrize(("scheme", "code"), [(f"{OWN}:believes", 1), ("none", 0), (f"{OWN}:compares", 0)])
def test_a_broken_promise_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str, code: int
) -> None:
    path = tmp_path / "it.toml"
    path.write_text(SLOW.replace(f"{OWN}:slow", scheme).replace("factor = 1.0", "factor = 9.0"))
    found, out, err = in_process(capsys, "campaign", "run", str(path), "-o", str(tmp_path / "out"), "--jobs", "0")
    assert found == code
    assert ("trials broke a promise" in err) == bool(code)
    assert ("sdc" in out) == (scheme != f"{OWN}:compares")
    if code:
        assert int(err.split()[1]) == Counter(one["outcome"] for one in lines(tmp_path / "out"))["sdc"]


@pytest.mark.parametrize("words", [(), ("--help",), ("run", "--help"), ("replay", "--help"), ("report", "--help")])
def test_help(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, out, err = in_process(capsys, "campaign", *words)
    assert (code, err) == (0, "")
    assert "Example:" in out
    assert "abft-tsm2 campaign" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("campaign", "rnu", "x.toml"), "no command 'rnu' (did you mean run?)"),
        (("campagne",), "no command 'campagne' (did you mean campaign?)"),
        (("campaign", "run", "no.toml", "-o", "out"), "cannot read no.toml: no such file or directory"),
        (("campaign", "run", "no.toml"), "Missing option '-o'"),
        (("campaign", "replay", "nowhere", "3"), "cannot read nowhere/campaign.toml"),
        (("campaign", "replay", "nowhere", "-3"), "nowhere"),
        (("campaign", "run", "x.toml", "-o", "out", "--jobs", "-1"), "Invalid value for '--jobs'"),
        (
            ("campaign", "run", "x.toml", "-o", "out", "--jobs", "2", "--scheduler", "tcp://127.0.0.1:9"),
            "--jobs counts processes of this machine, and does not go with --scheduler; see",
        ),
    ],
)
def test_one_line_for_what_is_asked_for_wrongly(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = in_process(capsys, *words)
    assert (code, out) == (2, "")
    if "-3" not in words:
        assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


FILES = """[[suite]]
name = "own data"
operation = "gemm"
trials = 100
shapes = [[4, 5, 3], [8, 2, 3]]
files = [["a.npy", "b.npy"]]
[[suite.fault]]
model = "nan"
"""
FEW_STEPS = """[[suite]]
name = "small ones"
operation = "lu"
trials = 100
schemes = ["online"]
shapes = [[40, 40, 40]]
[[suite.fault]]
model = "nan"
site = "lu.trailing"
"""


def test_a_library_that_is_missing_is_said_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("abft_tsm2.faults.campaign.machine.find_spec", lambda name: None)
    Path("it.toml").write_text(SMALL.replace('"float32"]', '"bfloat16"]'))
    code, out, err = in_process(capsys, "campaign", "run", "it.toml", "-o", "out", "--jobs", "1")
    assert (code, out) == (2, "")
    assert "bfloat16 needs the package ml_dtypes, which is not installed here: pip install ml_dtypes" in err
    assert err.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.parametrize(("operation", "scheme", "needed"), [("gemm", "protected", 2.8e9), ("storage", "crc", 1.6e9)])
def test_shapes_beyond_the_memory_are_said_before_the_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    operation: str,
    scheme: str,
    needed: float,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f'[[suite]]\nname = "large"\noperation = "{operation}"\ntrials = 4\nshapes = [[20000, 10000, 5000]]\n'
    Path("it.toml").write_text(f'{text}schemes = ["{scheme}"]\nclean = 1.0\n')
    for memory, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr("abft_tsm2.faults.campaign.machine.physical_memory", lambda memory=memory: memory)
        if fits:
            require_machine(load("it.toml"))
    code, out, err = in_process(capsys, "campaign", "run", "it.toml", "-o", "out", "--jobs", "0")
    assert (code, out) == (2, "")
    assert f"suite large: matrices of the shape [20000, 10000, 5000] take {needed / 1e9} GB in float64, and this" in err
    assert err.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.parametrize("out", ["/dev/stdout", "it.toml", "it.toml/out"])
def test_results_go_to_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("it.toml").write_text(SMALL)
    code, printed, err = in_process(capsys, "campaign", "run", "it.toml", "-o", out, "--jobs", "0")
    assert (code, printed) == (2, "")
    assert err.startswith(f"Error: cannot write {out}: ")
    assert err.endswith("no folder: name one\n")


def test_more_processes_than_do_any_good_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("it.toml").write_text(SMALL)
    monkeypatch.setattr("abft_tsm2.faults.campaign.machine.cores", lambda: 3)
    for jobs in ("49", "1000000"):
        code, out, err = in_process(capsys, "campaign", "run", "it.toml", "-o", "out", "--jobs", jobs)
        assert (code, out) == (2, "")
        assert f"{jobs} jobs are too many for 3 cores: say 48 at most" in err
        assert err.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        (FILES, None, "suite own data: a.npy: no such file"),
        (FILES, (8, 4), "suite own data: a.npy is 8 x 4, the campaign wants 8 x 5 of it: choose smaller shapes"),
        (FEW_STEPS, None, "lu.trailing is not there in visit 0 of a 40 x 40 matrix, factored in 1 steps of 64 columns"),
        (FEW_STEPS + "visit = 3\n", None, "lu.trailing is not there in visit 3"),
    ],
)
def test_what_no_trial_could_be_carried_out_with_ends_it_before_the_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    shape: tuple[int, int] | None,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("it.toml").write_text(text)
    if shape is not None:
        np.save("a.npy", np.ones(shape))
        np.save("b.npy", np.ones((5, 3)))
    code, out, err = in_process(capsys, "campaign", "run", "it.toml", "-o", "out", "--jobs", "0")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"40": "120"}, "lu.trailing is not there in visit 0 of a 120 x 120 matrix, factored in 1 steps on a GPU"),
        ({"40": "250", 'lu.trailing"': 'lu.solved"\nvisit = 1'}, "lu.solved is not there in visit 1 of a 250 x 250"),
        ({"40": "90", '"lu': '"cholesky', "online": "protected"}, "Cholesky's factorisation on the CPU only"),
    ],
)
def test_what_a_gpu_does_not_do_ends_it_before_the_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = FEW_STEPS
    for old, new in changes.items():
        text = text.replace(old, new)
    Path("it.toml").write_text(text)
    code, out, err = in_process(capsys, "campaign", "run", "it.toml", "-o", "out", "--jobs", "0", "--device", "gpu")
    assert (code, out) == (2, "")
    assert message in err
    assert not Path("out").exists()


def test_files_that_are_large_enough_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.random.default_rng(0).standard_normal((8, 5)))
    np.save("b.npy", np.random.default_rng(1).standard_normal((5, 3)))
    count = run(parse(FILES.replace("trials = 100", "trials = 20")), tmp_path / "out", jobs=0)
    assert (count.done, count.broken) == (20, 0)
    larger = FEW_STEPS.replace("[[40, 40, 40]]", "[[70, 70, 70]]")
    assert parse(larger).trials == 100
    assert parse(FEW_STEPS.replace("trials = 100", "trials = 100\noptions = { block = [16, 32] }")).trials == 100


def test_the_manifest_names_the_kernels_of_blas(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from threadpoolctl import threadpool_info

    kernel = manifest(done)["versions"]["blas kernel"]
    assert {one.get("architecture") for one in threadpool_info() if one["user_api"] == "blas"} & set(kernel.split())
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    run(parse(SLOW.replace("trials = 200", "trials = 1")), tmp_path / "it", jobs=0)
    assert manifest(tmp_path / "it")["versions"]["blas kernel"] is None
