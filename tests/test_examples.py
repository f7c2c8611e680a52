"""Every example runs as it is, without a warning, and prints what it is about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRINTS = {
    "ex01_gemm.py": "CLEAN",
    "ex02_fault.py": "C[123, 45]",
    "ex03_encoded.py": "A[17, 42]",
    "ex04_lu.py": "CORRECTED",
    "ex05_cluster.py": "were wrong",
}


def test_every_example_is_known() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == PRINTS.keys()


@pytest.mark.parametrize("name", PRINTS)
def test_example(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert PRINTS[name] in done.stdout
    assert list(tmp_path.iterdir()) == []
