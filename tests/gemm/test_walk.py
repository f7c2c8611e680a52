"""A clean product goes straight through the five steps: few calls, few files."""

from __future__ import annotations

import pytest

from benchmarks import walk


def test_a_clean_product_is_a_short_walk() -> None:
    found = walk.walk()
    assert found.total <= 110
    assert len(found.files) <= 8
    assert found.outside <= 60


def test_the_walk_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert walk.main(["--verbose"]) == 0
    text = capsys.readouterr().out
    assert "calls of" in text
    assert "gemm/host.py Product.report" in text
