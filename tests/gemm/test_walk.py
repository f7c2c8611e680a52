"""A clean product goes straight through the five steps: few calls, few files.

With no rounding at all: else a first verdict may want a second look, by chance.
"""

from __future__ import annotations

import pytest

from benchmarks import walk
from tests.support.short_way import unrounded


@pytest.mark.parametrize("sizes", [(200, 300, 100), (16, 16, 16)])
def test_a_small_clean_product_is_a_short_walk(sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = walk.walk(*unrounded(monkeypatch, *sizes))
    assert found.total <= 40
    assert len(found.files) <= 8
    assert found.outside <= 12


def test_a_clean_product_is_a_short_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    found = walk.walk(*unrounded(monkeypatch, 400, 500, 300))
    assert found.total <= 110
    assert len(found.files) <= 10
    assert found.outside <= 60


def test_the_walk_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert walk.main(["--verbose"]) == 0
    text = capsys.readouterr().out
    assert "calls of" in text
    assert "gemm/small.py SmallForm.product" in text
