"""The command line as its users meet it: a process, its exit code, one readable line for each error."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from abft_tsm2.core.device import known
from abft_tsm2.io import versions as facts
from abft_tsm2.io.atomic import output_file
from abft_tsm2.report import Report, Status
from tests.support.command_line import ENVIRONMENT, ROOT, in_process, new_files, run, start


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrices")
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((90, 40)), rng.standard_normal((40, 70))
    wrong, nan = A @ B, A.copy()
    wrong[57, 33] *= -1
    nan[61, 4] = np.nan
    for name, matrix in {
        "A": A,
        "B": B,
        "C": A @ B,
        "wrong": wrong,
        "nan": nan,
        "half": A.astype(np.float16),
        "single": A.astype(np.float32),
        "integers": np.arange(90 * 40).reshape(90, 40),
        "big": np.full((90, 40), 1e300),
        "fortran": np.asfortranarray(A),
        "foreign": A.astype(">f8"),
    }.items():
        np.save(folder / f"{name}.npy", matrix)
    np.savez(folder / "both.npz", x=A, y=B)
    return folder


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reference(here: Path, a: str = "A", b: str = "B") -> np.ndarray:
    product: np.ndarray = np.load(here / f"{a}.npy").astype(float) @ np.load(here / f"{b}.npy").astype(float)
    return product


def test_gemm_and_verify(here: Path) -> None:
    done = run(here, "gemm", "A.npy", "B.npy", "-o", "out.npy", "--report", "r.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "CLEAN" in done.stdout
    assert "out.npy was written" in done.stdout
    np.testing.assert_allclose(np.load(here / "out.npy"), reference(here), rtol=1e-12, atol=1e-12)
    report = Report.from_dict(json.loads((here / "r.json").read_text()))
    assert (report.status, report.m, report.k, report.n) == (Status.CLEAN, 90, 40, 70)
    assert new_files(here) == ["out.npy", "r.json"]

    done = run(here, "verify", "A.npy", "B.npy", "out.npy", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("panels", [[], ["--panel-mb", "0.01"]], ids=["whole", "panels"])
@pytest.mark.parametrize("check", ["auto", "rows", "columns", "both"])
def test_verify_finds_a_wrong_element(
    here: Path, capsys: pytest.CaptureFixture[str], check: str, panels: list[str]
) -> None:
    words = ["A.npy", "B.npy", "wrong.npy", "--report", "r.json", "--check", check, *panels]
    code, _, err = in_process(capsys, "verify", *words)
    assert code == 1
    assert err.startswith("Error: ")
    assert "C[57, 33]" in err
    assert err.count("\n") == 1
    report = Report.from_dict(json.loads((here / "r.json").read_text()))
    assert report.status is Status.UNCORRECTABLE
    assert {(fault.rows, fault.columns) for fault in report.faults} == {((57,), (33,))}
    assert (report.m, report.k, report.n) == (90, 40, 70)
    sides = {"auto": {"rows"}, "both": {"rows", "columns"}}.get(check, {check})
    assert {found.side: found.lines for found in report.checks}.items() <= {"rows": 90, "columns": 70}.items()
    if panels or check != "auto":
        assert {found.side for found in report.checks} == sides


@pytest.mark.parametrize("check", ["auto", "rows", "columns", "both"])
def test_row_panels_give_the_same_product(here: Path, capsys: pytest.CaptureFixture[str], check: str) -> None:
    words = ["A.npy", "B.npy", "-o", "out.npy", "--report", "r.json", "--check", check, "--panel-mb", "0.01"]
    assert in_process(capsys, "gemm", *words)[0] == 0
    np.testing.assert_allclose(np.load(here / "out.npy"), reference(here), rtol=1e-12, atol=1e-12)
    report = Report.from_dict(json.loads((here / "r.json").read_text()))
    assert report.m == 90
    assert report.products == ()
    for found in report.checks:
        assert found.verified == found.lines == {"rows": 90, "columns": 70}[found.side]


@pytest.mark.parametrize(
    ("a", "b", "options", "dtype"),
    [
        ("single.npy", "B.npy", [], "float64"),
        ("A.npy", "B.npy", ["--dtype", "float32"], "float32"),
        ("integers.npy", "B.npy", ["--dtype", "float64"], "float64"),
        ("fortran.npy", "B.npy", ["--panel-mb", "0.01"], "float64"),
        ("foreign.npy", "B.npy", ["--panel-mb", "0.01"], "float64"),
        ("both.npz:x", "both.npz:y", [], "float64"),
        ("single.npy", "B.npy", ["--dtype", "float32", "--panel-mb", "0.01"], "float32"),
    ],
)
def test_kinds_of_input(
    here: Path, capsys: pytest.CaptureFixture[str], a: str, b: str, options: list[str], dtype: str
) -> None:
    code, _, err = in_process(capsys, "gemm", a, b, "-o", "out.npy", *options)
    assert (code, err) == (0, "")
    out = np.load(here / "out.npy")
    assert out.dtype == dtype
    expected = reference(here, "A" if ":" in a else Path(a).stem)
    np.testing.assert_allclose(out, expected, rtol=0, atol=np.finfo(dtype).eps * 100 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["out.npz", "out.mtx", "out.mtx.gz"])
def test_other_formats_go_round(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert in_process(capsys, "gemm", "A.npy", "B.npy", "-o", name, "-q") == (0, "", "")
    assert in_process(capsys, "verify", "A.npy", "B.npy", name, "-q") == (0, "", "")


def test_an_empty_product(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("none.npy", np.empty((0, 40)))
    assert in_process(capsys, "gemm", "none.npy", "B.npy", "-o", "out.npy", "-q")[0] == 0
    assert np.load("out.npy").shape == (0, 70)


@pytest.mark.parametrize("panels", [[], ["--panel-mb", "0.01"]], ids=["whole", "panels"])
def test_unverifiable_is_3_and_says_where(here: Path, capsys: pytest.CaptureFixture[str], panels: list[str]) -> None:
    code, _, err = in_process(capsys, "gemm", "nan.npy", "B.npy", "-o", "out.npy", "-q", *panels)
    assert code == 3
    assert err.startswith("Warning: a part could not be checked")
    assert err.count("\n") == 1
    # 10 kB hold 11 rows of A and C: row 61 is in the panel that begins at 55.
    assert ("row 6" in err and "panel of rows 55:66" in err) if panels else "row 61" in err
    assert np.isnan(np.load("out.npy")[61]).all()


PLANT = """
import sys, abft_tsm2
from abft_tsm2.__main__ import main
real, calls = abft_tsm2.protected_gemm, []
def protected_gemm(*args, **options):
    calls.append(1)
    def fault(stage, arrays):
        if stage in {stages} and len(calls) == {call}:
            arrays["C"][5, 7] = 1e30
    return real(*args, on_stage=fault, **options)
abft_tsm2.protected_gemm = protected_gemm
main()
"""


@pytest.mark.parametrize(("panels", "call", "row"), [([], 1, 5), (["--panel-mb", "0.01"], 3, 27)])
def test_a_fault_in_the_product_is_repaired(here: Path, panels: list[str], call: int, row: int) -> None:
    code = ["-c", PLANT.format(stages=["multiplied"], call=call)]
    words = ["gemm", "A.npy", "B.npy", "-o", "out.npy", "--report", "r.json", *panels]
    done = run(here, *words, code=code)
    assert (done.returncode, done.stderr) == (0, "")
    np.testing.assert_allclose(np.load(here / "out.npy"), reference(here), rtol=1e-12, atol=1e-12)
    report = Report.from_dict(json.loads((here / "r.json").read_text()))
    assert report.status is Status.CORRECTED
    assert [(fault.rows, fault.columns) for fault in report.faults] == [((row,), (7,))]


@pytest.mark.parametrize("panels", [[], ["--panel-mb", "0.01"]], ids=["whole", "panels"])
def test_corruption_that_stays_is_1_and_leaves_no_product(here: Path, panels: list[str]) -> None:
    # Also after each repair: it never comes out right.
    code = ["-c", PLANT.format(stages=["multiplied", "corrected"], call=2 if panels else 1)]
    words = ["gemm", "A.npy", "B.npy", "-o", "out.npy", "--report", "r.json", *panels]
    done = run(here, *words, code=code)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "out.npy was not written" in done.stderr
    assert done.stderr.count("\n") == 1
    assert new_files(here) == ["r.json"]
    report = Report.from_dict(json.loads((here / "r.json").read_text()))
    assert report.status is Status.UNCORRECTABLE
    assert any("stopped after row 22 of 90" in reason for reason in report.reasons) == bool(panels)


ERRORS: Mapping[str, str] = {
    "gemm missing.npy B.npy -o o.npy": "missing.npy: no such file",
    "gemm . B.npy -o o.npy": "extension",
    "gemm integers.npy B.npy -o o.npy": "pass --dtype float64",
    "gemm big.npy B.npy -o o.npy --dtype float32": "beyond the largest float32",
    "gemm A.npy A.npy -o o.npy": "columns of the first (40) must equal the rows of the second (90)",
    "gemm B.npy A.npy -o o.npy": "swap them",
    "gemm A.npy B.npy -o o.csv": "extension",
    "gemm A.npy B.npy -o no/o.npy": "there is no folder",
    "gemm A.npy B.npy -o /dev/stdout": "extension is none of .npy, .npz, .mtx, .mtx.gz; name a file with one of them",
    "gemm A.npy B.npy -o -": "name a file with one of them",
    "gemm A.npy B.npy -o A.npy": "given twice",
    "gemm A.npy B.npy -o o.npy --report o.npy": "given twice",
    "gemm A.npy B.npy -o o.npy --report no/r.json": "there is no folder",
    "gemm both.npz B.npy -o o.npy": "2 arrays (x, y)",
    "gemm A.npy B.npy": "Missing option '-o'",
    "gemm A.npy -o o.npy": "Missing argument 'B'",
    "gemm A.npy B.npy -o o.npy --check row": "'row' is not one of",
    "gemm A.npy B.npy -o o.npy --chek rows": "--check",
    "gemm A.npy B.npy -o o.npy --panel-mb 0": "0",
    "verify A.npy B.npy A.npy": "A.npy is 90 x 40 float64, but A.npy times B.npy is 90 x 70 float64",
    "verify single.npy single.npy A.npy": "transpose one",
    "verify A.npy B.npy C.npy --report C.npy": "given twice",
    "demo --bit 64": "64",
    "demo --dtype float32 --bit 32": "float32 has the bits 0 to 31",
    "gem A.npy B.npy": "did you mean gemm?",
    "verfy": "did you mean verify?",
    "--nonsense": "--nonsense",
}


@pytest.mark.parametrize("words", ERRORS)
def test_every_error_is_one_line_and_2(here: Path, capsys: pytest.CaptureFixture[str], words: str) -> None:
    code, out, err = in_process(capsys, *words.split())
    assert code == 2
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert ERRORS[words] in err
    assert new_files(here) == []


def test_errors_of_a_process_are_the_same(here: Path) -> None:
    done = run(here, "gemm", "missing.npy", "B.npy", "-o", "o.npy")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: missing.npy: no such file; check the name and the folder\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [("MemoryError('too big')", "out of memory (too big)"), ("LookupError('lost')", "LookupError: lost")],
)
def test_even_the_unexpected_is_one_line(here: Path, error: str, message: str) -> None:
    script = (
        "import abft_tsm2\n"
        "from abft_tsm2.__main__ import main\n"
        f"def fail(*args, **options): raise {error}\n"
        "abft_tsm2.protected_gemm = fail\n"
        "main()\n"
    )
    done = run(here, "gemm", "A.npy", "B.npy", "-o", "o.npy", code=["-c", script])
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert new_files(here) == []


def test_places_without_permission(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:  # as a folder without write permission does, to everybody but root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (here / "o.npy").write_bytes(b"before")
    for name, answer in {"access": lambda *_: False, "open": refuse}.items():
        with monkeypatch.context() as patch:
            patch.setattr(os, name, answer)
            code, _, err = in_process(capsys, "gemm", "A.npy", "B.npy", "-o", "o.npy")
        assert (code, err.count("\n")) == (2, 1)
        assert "change the permissions, or write to another folder" in err
    assert (here / "o.npy").read_bytes() == b"before"


@pytest.mark.parametrize("name", ["o.npy", "o.npz", "o.mtx"])
def test_a_file_that_does_not_fit(here: Path, name: str) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
    script = f"{limit}from abft_tsm2.__main__ import main\nmain()\n"
    done = run(here, "gemm", "A.npy", "B.npy", "-o", name, code=["-c", script])
    assert done.returncode == 2
    assert f"cannot write {name}: file too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert new_files(here) == []


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["INT", "TERM", "HUP"],
)
def test_a_signal_leaves_no_file(here: Path, sent: signal.Signals, code: int) -> None:
    np.save("tall.npy", np.ones((20_000, 40)))
    words = ["gemm", "tall.npy", "B.npy", "-o", "o.npy", "--panel-mb", "0.0001"]  # a panel for each row
    with start(here, *words) as process:
        deadline = time.monotonic() + 300
        while len(new_files(here)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert any(name.startswith(".abft_tsm2-") for name in new_files(here))
        time.sleep(0.2)
        process.send_signal(sent)
        out, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert (out, err) == ("", "Interrupted: unfinished files were removed\n")
    assert new_files(here) == ["tall.npy"]


def test_what_a_killed_process_has_left_goes_with_the_next_file(here: Path) -> None:
    np.save("tall.npy", np.ones((20_000, 40)))
    with start(here, "gemm", "tall.npy", "B.npy", "-o", "o.npy", "--panel-mb", "0.0001") as process:
        deadline = time.monotonic() + 300
        while len(new_files(here)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        (left,) = set(new_files(here)) - {"tall.npy"}
        os.utime(left, (0, 0))
        with output_file("of another"):  # the process lives
            assert left in new_files(here)
        process.kill()
    assert new_files(here) == sorted([left, "of another", "tall.npy"])
    os.utime(left)
    with output_file("of another"):  # and may have been made just now
        assert left in new_files(here)
    os.utime(left, (0, 0))
    Path(".abft_tsm2-of another machine-1.tmp").touch()
    os.utime(".abft_tsm2-of another machine-1.tmp", (0, 0))
    assert run(here, "gemm", "A.npy", "B.npy", "-o", "o.npy", "-q").returncode == 0
    assert new_files(here) == [".abft_tsm2-of another machine-1.tmp", "o.npy", "of another", "tall.npy"]


def test_under_nohup_the_end_of_the_terminal_is_ignored(here: Path) -> None:
    script = (
        "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); from abft_tsm2 import __main__;"
        "from abft_tsm2.cli import gemm as cli;"
        "in_panels = cli._in_panels; cli._in_panels = lambda *a, **k: (os.kill(os.getpid(), 1), in_panels(*a, **k))[1];"
        "__main__.main()"
    )
    assert run(here, "gemm", "A.npy", "B.npy", "-o", "o.npy", "-q", code=["-c", script]).returncode == 0
    assert new_files(here) == ["o.npy"]


@pytest.mark.parametrize("words", [["info"], ["--help"], ["gemm", "--help"]])
def test_a_broken_pipe_is_quiet(here: Path, words: list[str]) -> None:
    with start(here, *words) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=300)
    assert err == ""
    assert process.returncode == 141


@pytest.mark.parametrize("stdout", ["| head -c 0", "> /dev/full", ">&-"])
@pytest.mark.parametrize(("c", "code"), [("C", 0), ("wrong", 1)])
def test_what_cannot_be_printed_changes_neither_files_nor_exit_code(here: Path, stdout: str, c: str, code: int) -> None:
    command = f'"{sys.executable}" -m abft_tsm2'
    words = f"{command} verify A.npy B.npy {c}.npy --report r.json"
    script = f"sleep_then() {{ {words}; echo $? >&2; }}; sleep_then {stdout}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=here, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    *said, status = done.stderr.splitlines()
    assert int(status) == code
    assert Report.from_dict(json.loads(Path("r.json").read_text())).ok is (code == 0)
    warned = [line for line in said if line.startswith("Warning: nothing more can be printed: standard output: ")]
    assert len(warned) == (stdout != ">&-")  # where there is none, nothing is printed on purpose
    assert len(said) == len(warned) + (code == 1)
    assert all(line.endswith(f"; {c}.npy was only read") for line in warned)


@pytest.mark.parametrize("words", ["gemm A.npy B.npy -o o.npy", "verify A.npy B.npy C.npy", "lu A.npy -o o.npz"])
def test_a_report_may_be_printed(here: Path, words: str) -> None:
    with open("printed", "w") as printed:  # a file that the shell has opened: /dev/stdout would be replaced
        command = [sys.executable, "-m", "abft_tsm2", *words.split(), "--report", "-"]
        done = subprocess.run(command, env=ENVIRONMENT, stdout=printed, stderr=subprocess.PIPE, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert Report.from_dict(json.loads(Path("printed").read_text())).status is Status.CLEAN
    assert "-" not in new_files(here)


def test_the_report_of_a_wrong_product_is_printed_as_well(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = in_process(capsys, "verify", "A.npy", "B.npy", "wrong.npy", "--report", "-")
    assert code == 1
    assert Report.from_dict(json.loads(out)).status is Status.UNCORRECTABLE
    assert err.startswith("Error: ")


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/stderr", "/dev/null", "/proc/self/fd/1", "/dev/fd/1", "link"])
def test_streams_are_not_replaced(here: Path, name: str) -> None:
    Path("link").symlink_to("/dev/stdout")
    with open("printed", "w") as printed:
        command = [sys.executable, "-m", "abft_tsm2", "gemm", "A.npy", "B.npy", "-o", "o.npy", "--report", name]
        done = subprocess.run(command, env=ENVIRONMENT, stdout=printed, stderr=subprocess.PIPE, text=True, timeout=300)
        assert os.path.samestat(os.fstat(printed.fileno()), os.stat("printed"))
    assert done.returncode == 2
    assert (
        done.stderr == f"Error: {name} is a device or a stream; files are written under another name first, then {END}"
    )
    assert new_files(here) == ["printed"]


END = "renamed: name a file\n"


def test_a_name_that_is_no_text_is_printed_all_the_same(here: Path) -> None:
    name = os.fsdecode(b"o\xff.npy")
    command = [sys.executable, "-m", "abft_tsm2", "gemm", "A.npy", "B.npy", "-o", name]
    strict = {**ENVIRONMENT, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, env=strict, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("o\\udcff.npy was written\n")
    assert np.array_equal(np.load(name), np.load("C.npy"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("words", ["info", "--help"])
def test_what_was_asked_for_on_a_full_output_is_an_error(here: Path, words: str) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "abft_tsm2", words]
        done = subprocess.run(command, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: cannot write standard output: no space left on device")
    assert done.stderr.count("\n") == 1


def test_where_errors_cannot_be_printed_the_exit_code_tells(here: Path) -> None:
    for stderr in ("> /dev/full", ">&-"):
        words = f'"{sys.executable}" -m abft_tsm2 gemm none.npy B.npy -o o.npy 2{stderr}'
        assert subprocess.run(["bash", "-c", words], env=ENVIRONMENT, timeout=300).returncode == 2


@pytest.mark.parametrize("size", ["nan", "inf", "-inf", "0", "-1", "x"])
def test_the_size_of_a_panel_is_a_positive_number(here: Path, capsys: pytest.CaptureFixture[str], size: str) -> None:
    code, out, err = in_process(capsys, "gemm", "A.npy", "B.npy", "-o", "o.npy", "--panel-mb", size)
    assert (code, out, new_files(here)) == (2, "", [])
    assert err.startswith("Error: Invalid value for '--panel-mb'")
    assert in_process(capsys, "gemm", "A.npy", "B.npy", "-o", "o.npy", "--panel-mb", "1e300", "-q")[0] == 0


def test_progress_only_on_a_terminal(here: Path) -> None:
    pty = pytest.importorskip("pty")
    terminal, inside = pty.openpty()
    words = [sys.executable, "-m", "abft_tsm2", "gemm", "A.npy", "B.npy", "-o", "o.npy", "--panel-mb", "0.01"]
    done = subprocess.run(words, cwd=here, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=inside, check=True)
    os.close(inside)
    shown = os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert "100%" in shown
    assert b"100%" not in done.stdout
    assert "100%" not in run(here, *words[3:]).stderr


def test_verbose_logs_to_stderr(here: Path) -> None:
    quiet = run(here, "gemm", "A.npy", "B.npy", "-o", "o.npy", "-q")
    assert quiet.stderr == ""
    loud = run(here, "gemm", "A.npy", "B.npy", "-o", "o.npy", "-q", "-vv")
    assert loud.stderr.startswith("DEBUG gemm m=90 k=40 n=70 float64: CLEAN")
    assert loud.stdout == ""


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = in_process(capsys, "info", "--json")
    facts = json.loads(out)
    assert code == 0
    assert set(facts) == {"versions", "devices", "configuration"}
    assert facts["versions"]["numpy"] == np.__version__
    code, text, _ = in_process(capsys, "info")
    assert code == 0
    for section in facts.values():
        for key, value in section.items():
            assert key in text
            assert value is None or str(value) in text


def test_info_names_the_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda number: {"name": b"GPU " + b"AB"[number : number + 1], "totalGlobalMem": 8e9},
        driverGetVersion=lambda: 13020,
    )
    monkeypatch.setattr(facts, "query", lambda number: replace(known("H200"), name="GPU " + "AB"[number]))
    cupy = SimpleNamespace(is_available=lambda: True, cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    devices = json.loads(in_process(capsys, "info", "--json")[1])["devices"]
    assert (devices["gpu 0"], devices["gpu 1"]) == ("GPU A, 8.0 GB, driver 13.2", "GPU B, 8.0 GB, driver 13.2")
    monkeypatch.setattr(cupy, "is_available", lambda: False)
    assert "no CUDA device" in in_process(capsys, "info")[1]
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "CuPy is not installed" in in_process(capsys, "info")[1]


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    from abft_tsm2.cli.main import cli

    code, overview, _ = in_process(capsys, "--help")
    assert code == 0
    assert in_process(capsys)[1] == overview
    for name, command in cli.commands.items():
        assert name in overview
        code, text, _ = in_process(capsys, name, "--help")
        assert code == 0
        assert f"Example:\n    abft-tsm2 {name}" in text
        for parameter in command.params:
            assert all(option in text for option in parameter.opts if option.startswith("-"))
            assert parameter.param_type_name == "argument" or getattr(parameter, "help", None), parameter.name


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import abft_tsm2

    assert in_process(capsys, "--version")[1] == f"abft-tsm2, version {abft_tsm2.__version__}\n"


def test_the_installed_command_is_this_one() -> None:
    from abft_tsm2.__main__ import main

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["abft-tsm2"].partition(":")
    assert getattr(import_module(module), name) is main
