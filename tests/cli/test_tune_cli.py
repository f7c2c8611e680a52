"""``abft-tsm2 tune`` as its users meet it: the file, the table, the progress, and every way it can end."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from abft_tsm2.cli import tune
from abft_tsm2.core import choose, tuning_file
from abft_tsm2.core.autotune import Contender, WrongProduct
from abft_tsm2.core.device import known
from abft_tsm2.core.problem import Problem
from abft_tsm2.io import versions
from tests.support.command_line import in_process

CARD = replace(known("H200"), name="Some card")
QUICK = len(tune.problems(quick=True))
PROBLEM = Problem(10240, 10240, 8, "float32")


class Race:
    """Stands in for `Contest`: kernels take 1 ms and the vendor library 2, unless a test says otherwise."""

    def __init__(self) -> None:
        self.measured: list[Problem] = []
        self.at: dict[int, Callable[[], None]] = {}  # what happens at a case
        self.vendor = 2.0

    def measure(self, problem: Problem, configs: tuple[Contender, ...]) -> Mapping[Contender, float]:
        self.at.pop(len(self.measured), lambda: None)()
        self.measured.append(problem)
        return {config: self.vendor if config is None else 1.0 for config in configs}


@pytest.fixture
def memory() -> dict[str, float]:
    return {"free": 1e12}


@pytest.fixture
def race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: dict[str, float]) -> Iterator[Race]:
    """A card, an empty cache directory, and a contest that takes no time."""
    runtime = SimpleNamespace(
        driverGetVersion=lambda: 13000,
        memGetInfo=lambda: (memory["free"], 1e12),
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda number: {"name": CARD.name.encode(), "totalGlobalMem": 8e9},
    )
    cupy = SimpleNamespace(
        __version__="14.2.0",
        is_available=lambda: True,
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
        cuda=SimpleNamespace(runtime=runtime),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv(tuning_file.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    race = Race()
    monkeypatch.setattr(tune, "Contest", lambda device: race)
    monkeypatch.setattr(tune, "query", lambda: CARD)
    monkeypatch.setattr(versions, "query", lambda number: CARD)
    choose.forget()
    yield race
    choose.forget()


def path() -> Path:
    return tuning_file.path_of(CARD.name)


def stored() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(path().read_text())["entries"]
    return entries


def files() -> list[str]:
    return sorted(str(file.relative_to(Path.cwd())) for file in Path.cwd().rglob("*") if file.is_file())


# ---- what is measured ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [False, True])
def test_problems_are_distinct_and_have_the_layout_that_their_operands_have(quick: bool) -> None:
    found = tune.problems(quick=quick)
    assert len(set(found)) == len(found)
    for problem in found:
        lines = problem.m if problem.order == "F" else problem.k
        assert problem.width == max(w for w in (2, 4, 8, 16) if lines * tune.SIZES[problem.dtype] % w == 0)
        assert (problem.out_order == "F") == (problem.n == 1)
    assert set(tune.problems(quick=True)) <= set(tune.problems())


def test_what_is_measured_speaks_for_what_users_multiply(race: Race) -> None:
    tune.run(quick=False, output=None, quiet=True)
    sizes = ((256, 512), (8192, 8192), (30720, 30720), (40960, 40960), (2**17, 600), (300, 10**5))
    counted = 0
    for (m, k), n, order, dtype in product(sizes, range(1, 33), "FC", ("float32", "bfloat16", "float64")):
        problem = Problem(m, k, n, dtype, order, out_order="F" if n == 1 else "C")
        if tuning_file.alternatives(problem, CARD):
            assert choose.choose(problem, CARD).source == "measured", problem
            counted += 1
    assert counted > 500


# ---- how it goes ---------------------------------------------------------------------------------------------------


def test_what_was_measured_decides(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    assert choose.choose(PROBLEM, CARD).source == "model"
    code, out, err = in_process(capsys, "tune", "--quick")
    assert code == 0
    cases = len(race.measured)
    assert 0 < cases <= QUICK
    assert out.splitlines()[0].split() == ["case", "chosen", "ms", "vendor", "ms", "gain"]
    changed = out.count(" *  ")
    assert len(out.splitlines()) == cases + 2 + (changed > 0)
    assert re.search(r"float32, A in columns, \(10240 x 10240 x 8\) +columns [\d/]+ +1 +2 +2.00\n", out)
    assert out.endswith(f"{cases} cases on {CARD.name}, {changed} of them differ from what is shipped: {path()}\n")
    assert err.splitlines()[-1] == f"tune: {cases} of {cases} cases"
    assert len(err.splitlines()) == 10
    assert len(stored()) == cases
    assert choose.choose(PROBLEM, CARD).source == "measured"
    assert choose.choose(PROBLEM, CARD).configs[0] == choose.shipped(PROBLEM, CARD).configs[0]
    record = json.loads(path().read_text())
    identity = {"device": CARD.name, "driver": "13.0", "cupy": "14.2.0", "schema": 1}
    assert identity.items() <= record.items()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])


@pytest.mark.parametrize(("vendor", "choice"), [(0.98, "columns"), (0.96, "vendor")])
def test_the_library_wins_by_a_margin_or_not_at_all(
    race: Race, capsys: pytest.CaptureFixture[str], vendor: float, choice: str
) -> None:
    race.vendor = vendor
    code, out, _ = in_process(capsys, "tune", "--quick")
    assert code == 0
    assert bool(choose.choose(PROBLEM, CARD).configs) == (choice != "vendor")
    (line,) = (line for line in out.splitlines() if line.startswith("float32, A in columns, (10240 x 10240 x 8)"))
    assert ("vendor library *" in line) == (choice == "vendor")
    assert ("\n* differs from" in out) == (" *  " in out)


def test_a_full_run_shows_only_what_changed(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = in_process(capsys, "tune")
    assert code == 0
    assert len(stored()) == len(race.measured) > QUICK
    rows = [line for line in out.splitlines() if line.startswith(("float", "bfloat"))]
    assert all(" * " in row for row in rows)
    assert f"{len(rows)} of them differ from what is shipped" in out


def test_quiet_prints_nothing(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(capsys, "tune", "--quick", "-q") == (0, "", "")
    assert stored()


def test_a_bar_on_a_terminal_and_lines_elsewhere(
    race: Race, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    code, out, err = in_process(capsys, "tune", "--quick")
    assert code == 0
    assert "100%" in err
    assert "cases" not in err
    assert "100%" not in out


def test_a_later_run_adds_to_an_earlier_one(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    in_process(capsys, "tune", "-q")
    everything = len(stored())
    race.vendor = 0.5
    in_process(capsys, "tune", "--quick", "-q")
    assert len(stored()) == everything
    assert choose.choose(PROBLEM, CARD).configs == ()
    assert choose.choose(replace(PROBLEM, n=32), CARD).configs != ()


def test_a_run_with_another_driver_begins_anew(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    in_process(capsys, "tune", "-q")
    everything = len(stored())
    sys.modules["cupy"].cuda.runtime.driverGetVersion = lambda: 13020
    in_process(capsys, "tune", "--quick", "-q")
    assert 0 < len(stored()) < everything
    assert choose.choose(PROBLEM, CARD).source == "measured"


def test_another_file_decides_nothing(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = in_process(capsys, "tune", "--quick", "--output", "mine.json")
    assert code == 0
    assert "mine.json" in out
    assert files() == ["mine.json"]
    assert tuning_file.read(Path("mine.json"), CARD.name).entries
    assert choose.choose(PROBLEM, CARD).source == "model"


def test_reset_deletes_the_file(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(capsys, "tune", "--reset") == (0, f"nothing was measured: there is no {path()}\n", "")
    in_process(capsys, "tune", "--quick", "-q")
    assert choose.choose(PROBLEM, CARD).source == "measured"
    assert in_process(capsys, "tune", "--reset") == (0, f"deleted {path()}\n", "")
    assert files() == []
    assert choose.choose(PROBLEM, CARD).source == "model"
    code, _, err = in_process(capsys, "tune", "--reset", "--quick")
    assert (code, err.count("\n")) == (2, 1)


def test_cases_that_do_not_fit_are_skipped_and_named(
    race: Race, capsys: pytest.CaptureFixture[str], memory: dict[str, float]
) -> None:
    memory["free"] = 1e8
    code, out, _ = in_process(capsys, "tune", "--quick")
    assert code == 0
    assert all(problem.m * problem.k * 4 < 1e8 for problem in race.measured)
    skipped = [line for line in out.splitlines() if line.startswith("skipped: ")]
    assert "skipped: float64, A in rows, (10240 x 10240 x 2) takes 0.8 GB, and 0.1 GB are free" in skipped
    assert len(stored()) == len(race.measured)
    # Memory that goes while a case is measured costs that case.
    memory["free"] = 1e6
    code, out, err = in_process(capsys, "tune", "--quick", "--output", "other.json")
    assert (code, out) == (2, "")
    assert "nothing was measured: " in err
    assert "other.json" not in files()
    memory["free"] = 1e12
    before = len(race.measured)

    def take() -> None:
        raise MemoryError("taken")

    race.at = {before + QUICK // 2: take}
    code, out, _ = in_process(capsys, "tune", "--quick", "--output", "other.json")
    assert code == 0
    assert out.count("skipped: ") == 1


# ---- how it ends ---------------------------------------------------------------------------------------------------


@pytest.fixture
def _heard() -> Iterator[None]:
    """Ctrl-C is heard, also where these tests run behind a shell's `&`, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heard")
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_interrupted_it_keeps_what_it_has(
    race: Race, capsys: pytest.CaptureFixture[str], sent: signal.Signals, code: int
) -> None:
    race.at = {5: lambda: os.kill(os.getpid(), sent)}
    left, out, err = in_process(capsys, "tune", "--quick")
    assert (left, out) == (code, "")
    assert re.search(rf"^5 of \d+ cases were measured and are kept in {path()}$", err, re.MULTILINE)
    assert err.endswith("Interrupted: unfinished files were removed\n")
    assert len(stored()) == 5
    assert files() == [str(path().relative_to(Path.cwd()))]
    assert tuning_file.found(CARD.name).measurements is not None


@pytest.mark.usefixtures("_heard")
def test_interrupted_at_once_it_leaves_what_was_there(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    race.at = {0: lambda: os.kill(os.getpid(), signal.SIGINT)}
    assert in_process(capsys, "tune", "--quick")[0] == 130
    assert files() == []
    race.at = {}
    in_process(capsys, "tune", "--quick", "-q")
    before = path().read_bytes()
    race.at = {len(race.measured): lambda: os.kill(os.getpid(), signal.SIGINT)}
    assert in_process(capsys, "tune")[0] == 130
    assert path().read_bytes() == before
    assert len(files()) == 1


def test_while_it_measures_the_file_is_the_old_one(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    in_process(capsys, "tune", "--quick", "-q")
    before, seen = path().read_bytes(), []
    race.vendor = 0.5
    race.at = {number: lambda: seen.append(path().read_bytes()) for number in range(10**3)}
    in_process(capsys, "tune", "--quick", "-q")
    assert set(seen) == {before}
    assert path().read_bytes() != before


def test_a_wrong_product_is_1_and_never_stored(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise WrongProduct("columns multiplied wrongly: C[0, 0] is 1")

    race.at = {3: fail}
    code, out, err = in_process(capsys, "tune", "--quick")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "Error: columns multiplied wrongly: C[0, 0] is 1"
    assert len(stored()) == 3


def test_a_place_that_cannot_be_written_is_known_before_the_work(
    race: Race, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    code, out, err = in_process(capsys, "tune", "--quick")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert tuning_file.VARIABLE in err
    assert "--output" in err
    code, _, err = in_process(capsys, "tune", "--quick", "--output", "no/such/file.json")
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no folder" in err
    (tmp_path / "cache").unlink()
    path().mkdir(parents=True)
    assert in_process(capsys, "tune", "--quick")[0] == 2
    assert in_process(capsys, "tune", "--reset")[0] == 2
    assert race.measured == []


def test_without_a_gpu_it_says_what_is_missing(
    race: Race, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["tune"], ["tune", "--quick"], ["tune", "--reset"]):
        monkeypatch.setattr(sys.modules["cupy"], "is_available", lambda: False)
        code, out, err = in_process(capsys, *words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "CuPy finds none: check nvidia-smi" in err
    monkeypatch.setitem(sys.modules, "cupy", None)
    code, out, err = in_process(capsys, "tune")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "install abft_tsm2[cu13]" in err
    assert files() == []


def test_a_card_without_memory_says_so(
    race: Race, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(device: Any) -> None:
        raise MemoryError("out of memory allocating 480,000,000 bytes")

    monkeypatch.setattr(tune, "Contest", full)
    code, _, err = in_process(capsys, "tune", "--quick")
    assert code == 2
    assert "too little GPU memory is free" in err
    assert files() == []


# ---- info ----------------------------------------------------------------------------------------------------------


def test_info_says_what_decides(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    def shown() -> dict[str, Any]:
        configuration: dict[str, Any] = json.loads(in_process(capsys, "info", "--json")[1])["configuration"]
        return configuration

    assert shown()["choice on gpu 0"] == "model: no measurement of this card; run abft-tsm2 tune"
    assert shown()["cache"] == str(tuning_file.folder())
    in_process(capsys, "tune", "--quick", "-q")
    date = json.loads(path().read_text())["date"]
    expected = f"measured on {date} with driver 13.0, {len(stored())} cases, {path()}; elsewhere the model"
    assert shown()["choice on gpu 0"] == expected
    path().write_text("{")
    choose.forget()
    assert f"model: no measurement of this card; run abft-tsm2 tune ({path()} is ignored: " in str(shown())


# ---- on a card -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")
    from abft_tsm2.core.device import query

    device = query()
    monkeypatch.setenv(tuning_file.VARIABLE, str(tmp_path))
    choose.forget()
    try:
        code, out, _ = in_process(capsys, "tune", "--quick")
        assert code == 0
        found = tuning_file.found(device.name).measurements
        assert found is not None
        assert choose.choose(PROBLEM, device).source == "measured"
        assert found.driver in choose.described(device)
        assert str(len(found.entries)) in out
        for entry in found.entries:
            assert entry.vendor is None or entry.milliseconds <= entry.vendor / 0.97
    finally:
        choose.forget()
