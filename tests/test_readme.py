"""The examples a reader sees run: the README's Python blocks and the docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import abft_tsm2

README = Path(__file__).resolve().parents[1] / "README.md"
TABLES = (
    *("overhead", "tightness", "tsm2r", "tsm2l", "ladder"),
    *("stream-tsm2r", "stream-odd", "stream-tsm2l", "both", "host", "bars"),
    *("gemm-square", "gemm-shapes", "gemm-repair", "gemm-host", "gemm-bars"),
)
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


@pytest.mark.parametrize("table", TABLES)
def test_the_readme_has_a_place_for_each_table(table):
    text = README.read_text(encoding="utf-8")
    assert len(re.findall(rf"^<!-- table:{table} -->$.*?^<!-- /table -->$", text, re.MULTILINE | re.DOTALL)) == 1


@pytest.mark.parametrize("name", ["abft_tsm2", *MODULES])
def test_the_docstring_examples_run(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples failed; the output above has them"
