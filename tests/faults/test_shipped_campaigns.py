"""The campaigns that ship: each can be read, and the quick one, or a tenth of its trials, keeps every promise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from abft_tsm2.faults.analysis import report
from abft_tsm2.faults.campaign.file import load, require_device
from abft_tsm2.faults.campaign.run import run
from abft_tsm2.faults.operands.matrices import FAMILIES
from abft_tsm2.faults.plan import MODELS
from abft_tsm2.faults.trials.trial import PEERS
from benchmarks import campaign_tables, sheet, shipped_campaigns
from benchmarks.campaign_tables import ORDER, summaries
from tests.support.campaign_folders import clean, folder, numbered, trial
from tests.support.small_campaigns import SMALL

LEAST = {
    **{"gemm-full": 300_000, "gemm-gpu": 1_000_000, "lu-full": 20_000, "adversarial": 20_000, "swaps": 100_000},
    **{"swaps-gpu": 20_000, "clean-products": 30_000, "clean-products-gpu": 10_000, "clean-factorisations": 30_000},
    **{"lu-gpu": 4_000, "clean-lu-gpu": 2_000, "routes": 100_000},
}


@pytest.fixture(scope="module", params=["a tenth", pytest.param("all", marks=pytest.mark.full)])
def share(request: pytest.FixtureRequest) -> float:
    """Of the trials of the quick campaign."""
    return {"a tenth": 0.1, "all": 1.0}[request.param]


@pytest.fixture(scope="module")
def file(share: float, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("campaign") / "quick.toml"
    text = (shipped_campaigns.CAMPAIGNS / "quick.toml").read_text()
    file.write_text(re.sub(r"(?m)^trials = (\d+)", lambda found: f"trials = {int(int(found[1]) * share)}", text))
    return file


@pytest.fixture(scope="module")
def quick(file: Path) -> dict[str, Any]:
    """The summary of the quick campaign, carried out and reported by the commands that users type."""
    folder = str(file.parent / "quick")
    program = [sys.executable, "-m", "abft_tsm2", "campaign"]
    for words in (["run", str(file), "-o", folder, "--jobs", "2"], ["report", folder]):
        done = subprocess.run([*program, *words], capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
    page = Path(folder, "report.html").read_text(encoding="utf-8")
    assert "quick" in page
    assert page.rstrip().endswith("</html>")
    found = subprocess.run(
        [*program, "report", folder, "--format", "json"], capture_output=True, text=True, timeout=900
    )
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout))


@pytest.mark.parametrize("name", shipped_campaigns.names())
def test_every_campaign_can_be_read(name: str) -> None:
    campaign = load(shipped_campaigns.CAMPAIGNS / f"{name}.toml")
    assert campaign.name == name in ORDER
    assert campaign.trials >= LEAST.get(name, 1)
    require_device(campaign, gpu=name in shipped_campaigns.ON_GPU)


def test_lu_has_the_same_faults_on_a_gpu() -> None:
    """Under the same schemes, in matrices of the same families."""

    def what(name: str) -> set[tuple[Any, ...]]:
        suites = [s for s in load(shipped_campaigns.CAMPAIGNS / f"{name}.toml").suites if s.operation == "lu"]
        return {
            (scheme, suite.families, fault) for suite in suites for scheme in suite.schemes for fault in suite.fault
        }

    assert what("lu-gpu") == what("lu-full")


def test_clean_matrices_on_a_gpu_are_of_all_families() -> None:
    campaign = load(shipped_campaigns.CAMPAIGNS / "clean-lu-gpu.toml")
    drawn = {
        campaign.workload(i, scene).family for i, suite in enumerate(campaign.suites) for scene in range(suite.scenes)
    }
    assert drawn == FAMILIES.keys()
    assert max(m for suite in campaign.suites for m, _, _ in suite.shapes) == 8192


def test_they_cover_every_fault_model() -> None:
    campaigns = [load(shipped_campaigns.CAMPAIGNS / f"{name}.toml") for name in shipped_campaigns.names()]
    faults = [fault for one in campaigns for suite in one.suites for fault in suite.fault]
    assert {one.model for fault in faults for one in (fault, *fault.also)} == set(MODELS)


def test_the_quick_one_is_complete(quick: dict[str, Any], file: Path) -> None:
    campaign = load(file)
    assert quick["trials"] == campaign.trials
    assert not quick["unfinished"]
    assert {row["suite"] for row in quick["totals"]} == {suite.name for suite in campaign.suites}


def test_the_quick_one_keeps_every_promise(quick: dict[str, Any], share: float) -> None:
    v = quick["verdict"]
    assert quick["broken"] == []
    assert v["planted"] > 4000 * share
    assert v["clean_trials"] > 400 * share
    assert (v["sdc"], v["false_alarm"], v["crash"], v["hang"]) == (0, 0, 0, 0)
    assert v["above_found"] == v["above"] > 1000 * share


def test_the_quick_one_sees_what_others_return(quick: dict[str, Any], share: float) -> None:
    """The same faults do harm where nothing is checked: the experiment has teeth."""
    escaped = {row["scheme"]: row["escaped"] for row in quick["contest"] if row["suite"] == "peers"}
    assert escaped["none"] > 50 * share
    assert escaped["double"] > 20 * share
    assert set(escaped) <= set(PEERS)


def test_no_flip_of_an_exponent_or_sign_is_lost(quick: dict[str, Any], share: float) -> None:
    rows = [row for row in quick["bits"] if row["scheme"] in ("protected", "both", "float32")]
    exponents = [row for row in rows if row["region"] in ("exponent", "sign")]
    assert sum(row["faults"] for row in exponents) > 300 * share
    assert all(row["sdc"] == row["cancelled"] == row["crash"] == row["hang"] == 0 for row in exponents)


def test_the_results_that_are_kept_are_those_of_the_files() -> None:
    for name, summary in summaries().items():
        folder = sheet.RESULTS / "campaigns" / name
        file = shipped_campaigns.CAMPAIGNS / f"{summary['manifest']['name']}.toml"
        assert name.partition(".")[0] == file.stem
        assert (folder / "campaign.toml").read_text() == file.read_text()
        assert summary["trials"] == summary["manifest"]["trials"]
        assert not summary["unfinished"]
        assert not re.search(r"/(root|home|work|tmp)/", (folder / "summary.json").read_text(encoding="utf-8"))


def test_an_unknown_campaign_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        shipped_campaigns.main(["gemm-ful"])
    assert left.value.code == 2
    assert "gemm-full" in capsys.readouterr().err


def kept(path: Path, name: str, records: list[dict[str, Any]], **manifest: Any) -> None:
    """The summary of a made-up campaign, as it is kept."""
    versions = {"numpy": "2.4", "scipy": "1.16", "python": "3.11", "cupy": None, "blas kernel": "openblas Haswell"}
    made = folder(path / "campaigns" / name, numbered(*records), versions=versions, **manifest)
    report.write(made, format="json")


def test_campaigns_without_faults_have_a_table_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheet, "RESULTS", tmp_path)
    kept(tmp_path, "clean-products", [clean(0)] * 30)
    kept(tmp_path, "clean-products.nehalem", [*[clean(0)] * 19, clean(0, outcome="false_alarm")])
    kept(tmp_path, "clean-products-gpu", [clean(0)], device="NVIDIA H200")
    kept(tmp_path, "swaps", [trial(0), trial(0, model="swap_columns", chance=0.25), clean(0)])
    assert list(summaries()) == ["swaps", "clean-products", "clean-products.nehalem", "clean-products-gpu"]
    lines = campaign_tables.without_faults().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("   clean-")]
    assert [row[:3] for row in rows] == [
        ["   clean-products", "openblas Haswell", "30"],
        ["   clean-products.nehalem", "openblas Haswell", "20"],
        ["   clean-products-gpu", "", "1"],
    ]
    assert rows[1][3].startswith("1 (5")
    assert "   swaps | 2 |" in campaign_tables.campaigns()
    assert "clean-products" not in campaign_tables.campaigns()
    assert "   swaps | float32 | swap_columns | 1 | 0 | 0.25 | 0.43\n" in campaign_tables.cancellation()


def test_results_with_a_label_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shipped_campaigns, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(shipped_campaigns, "CAMPAIGNS", tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.setattr(shipped_campaigns, "command", lambda *words: run(load(words[2]), words[4], jobs=0) and 0)
    assert shipped_campaigns.main(["small", "--label", "haswell"]) == 0
    assert (tmp_path / "results" / "campaigns" / "small.haswell" / "summary.json").exists()
