"""The wheel a user installs holds everything the source tree does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import abft_tsm2

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "abft_tsm2": (".py", ".typed", ".json"),
    "kernels": (".py", ".cu", ".cuh"),
}
PROBE = "// device code"
INSTALLED = {"abft_tsm2": "abft_tsm2", "kernels": "abft_tsm2/kernels"}


def expected_files(root: Path) -> set[str]:
    """Paths inside the wheel of every source of the tree."""
    return {
        f"{INSTALLED[folder]}/{path.relative_to(root / folder).as_posix()}"
        for folder, suffixes in SOURCES.items()
        for path in (root / folder).rglob("*")
        if path.suffix in suffixes
    }


def copy_of_the_tree(to: Path) -> Path:
    """What a build reads, and nothing an earlier build left behind."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return to


def build(source: Path, to: Path) -> Path:
    """The wheel, by way of the source distribution, without a network."""
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(to)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, timeout=120)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    [sdist] = to.glob("*.tar.gz")
    subprocess.run([*pip, "--wheel-dir", to, sdist], check=True, capture_output=True, timeout=120)
    [wheel] = to.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = copy_of_the_tree(tmp_path_factory.mktemp("source"))
    # Device code of its own, so that the mapping is tried whatever the tree holds.
    for name in ("probe.cu", "probe.cuh"):
        (source / "kernels" / "paper" / name).write_text(PROBE)
    return build(source, tmp_path_factory.mktemp("built"))


def test_the_wheel_holds_every_source(wheel):
    files = set(zipfile.ZipFile(wheel).namelist())
    assert expected_files(ROOT) <= files
    assert {"abft_tsm2/py.typed", "abft_tsm2/report.schema.json", "abft_tsm2/kernels/__init__.py"} <= files
    assert {"abft_tsm2/kernels/paper/probe.cu", "abft_tsm2/kernels/paper/probe.cuh"} <= files
    assert {name.partition("/")[0] for name in files if ".dist-info" not in name} == {"abft_tsm2"}


def test_a_package_left_out_is_noticed(tmp_path):
    source, built = tmp_path / "source", tmp_path / "built"
    source.mkdir()
    built.mkdir()
    copy_of_the_tree(source)
    text = (source / "pyproject.toml").read_text()
    assert '"abft_tsm2.core", ' in text
    (source / "pyproject.toml").write_text(text.replace('"abft_tsm2.core", ', ""))
    assert not expected_files(ROOT) <= set(zipfile.ZipFile(build(source, built)).namelist())


def run_in(installed: Path, code: str) -> list[str]:
    """Lines printed by code that sees the unpacked wheel before anything else."""
    code = f"import sys; sys.path.insert(0, {str(installed)!r}); {code}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_is_importable_by_itself(installed):
    code = (
        "import abft_tsm2; from importlib import resources; print(abft_tsm2.__file__);"
        "print((resources.files('abft_tsm2.kernels') / 'paper' / 'probe.cu').read_text());"
        "print(abft_tsm2.Report.schema()['title'])"
    )
    where, kernel, schema = run_in(installed, code)
    assert where == str(installed / "abft_tsm2" / "__init__.py")
    assert kernel == PROBE
    assert schema


def test_the_command_of_the_wheel_runs(installed):
    [entry_points] = installed.glob("*.dist-info/entry_points.txt")
    module, function = re.findall(r"^abft-tsm2 = ([\w.]+):(\w+)$", entry_points.read_text(), re.MULTILINE)[0]
    [line] = run_in(installed, f"from {module} import {function}; {function}(['--version'])")
    assert line.startswith("abft-tsm2")
    assert abft_tsm2.__version__ in line


def test_the_version_stands_in_one_place(wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert wheel.name.startswith(f"abft_tsm2-{abft_tsm2.__version__}-")
    assert f"## {abft_tsm2.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_tools_have_the_same_versions_everywhere():
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["lint"]
    pinned = dict(requirement.split("==") for requirement in lint)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    found = dict(re.findall(r"repo: \S+/(?:mirrors-)?(\w+?)(?:-pre-commit)?\n\s+rev: v(\S+)", hooks))
    assert found == pinned
