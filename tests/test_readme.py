"""The pages: their examples run, their tables are those of the CSVs, what they name exists, the README is one page."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import abft_tsm2
from benchmarks import tables

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.rst"))
MODULES = [
    module.name
    for module in pkgutil.walk_packages(abft_tsm2.__path__, "abft_tsm2.")
    if not module.name.endswith("__main__")
]


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Line number and source of each block fenced as python."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start()) + 2, match[1]) for match in found]


def run_blocks(text: str, name: str) -> int:
    """Execute the blocks in order, in one namespace; an error shows the line of the page."""
    namespace: dict[str, Any] = {"__name__": "readme"}
    blocks = python_blocks(text)
    for line, source in blocks:
        exec(compile("\n" * (line - 1) + source, name, "exec"), namespace)
    return len(blocks)


def test_the_readme_runs():
    text = README.read_text(encoding="utf-8")
    assert run_blocks(text, README.name) == text.count("```python") > 0


def test_a_wrong_block_fails():
    with pytest.raises(AssertionError):
        run_blocks("# Title\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n", "page")


def test_the_readme_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text(encoding="utf-8")
    (_, source), *_ = python_blocks(text)
    exec(source, {"__name__": "readme"})
    said = re.search(r"^```\n(gemm .*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert said is not None
    number = re.compile(r"\d[\d.]*(e-?\d+)?")
    assert number.sub("#", capsys.readouterr().out) == number.sub("#", said[1])


def test_the_readme_is_one_page() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 180


def test_the_readme_shows_losing_rows() -> None:
    text = README.read_text(encoding="utf-8")
    for machine, lost in (("CPU", "float32 256 x 256 x 256"), ("GPU", "float16 1024 x 1024 x 1024")):
        assert len(re.findall(rf"^\| {machine}, (loop of )?A @ B \| {lost} \|", text, re.MULTILINE)) == 1


def test_what_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^):]+)\)", README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_each_table_stands_in_one_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (README, *PAGES))
    places = re.findall(r"^(?:<!--|\.\.) table:([\w-]+)", text, re.MULTILINE)
    assert sorted(places) == sorted(tables.known())


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_the_tables_are_those_of_the_results(page: Path) -> None:
    assert tables.main(["--check", str(page)]) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_the_documentation_run(page: Path) -> None:
    result = doctest.testfile(str(page), module_relative=False)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed; the output above has them"


def named(text: str) -> list[str]:
    """The full names of the objects that a page of the documentation lists or refers to."""
    found = re.findall(r":(?:class|func):`~?(abft_tsm2[\w.]*)`", text)
    module, listed = "", False
    for line in text.splitlines():
        if line.startswith(".. currentmodule:: "):
            module = line.split()[-1]
        elif line and not line.startswith(" "):
            listed = line == ".. autosummary::"
        elif listed and re.fullmatch(r"   [A-Za-z_][\w.]*", line):
            found.append(f"{module}.{line.strip()}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_the_documentation_names_exists(page: Path) -> None:
    names = named(page.read_text(encoding="utf-8"))
    assert names or page.stem not in ("api", "kernels", "model")
    for name in names:
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("name", ["abft_tsm2", *MODULES])
def test_the_docstring_examples_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed; the output above has them"
