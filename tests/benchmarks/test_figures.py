"""Figures of the committed results: drawn, and the same bytes each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import figures, sheet

LATER = {"lu_gpu": ("lu_gpu",), "calls": ("calls", "calls_gpu")}
MEASURED = [
    name for name in figures.DRAWN if all((sheet.RESULTS / f"{file}.csv").exists() for file in LATER.get(name, ()))
]
"""Those of the others are drawn from made-up numbers in test_bench_lu_gpu.py and test_bench_calls.py, too."""


@pytest.mark.parametrize("name", MEASURED)
def test_figures_are_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "folder" / f"{name}.svg"
    assert figures.main([name, "--output", str(file)]) == 0
    assert file.read_bytes().count(b"<path") > 20


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{number}.svg" for number in range(2)]
    for file in files:
        assert figures.main(["small_k", "--output", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_is_missing_or_unknown_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.csv"
    for name in figures.DRAWN:
        assert figures.main([name, "--input", str(tmp_path / "absent.csv")]) == 1
        assert "is missing" in capsys.readouterr().err
    empty.write_text("suite,contender,variant,overhead_pct,error\n")
    for name in ("tcf", "gemm", "stream", "lu", "lu_gpu", "calls"):
        assert figures.main([name, "--input", str(empty)]) == 1
        assert "there are no times" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        figures.main(["speedup", "tall", "--input", str(empty)])
    with pytest.raises(SystemExit):
        figures.main(["neither"])
