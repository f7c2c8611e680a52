"""LU, Cholesky and solutions on a GPU under compute-sanitizer, which has to find what is planted, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.core.test_kernels_on_gpu import sanitize
from tests.support.sanitized_factors import BARRIERS, PLANTS

pytestmark = pytest.mark.gpu

OPTIONS = "--show-backtrace", "device", "--kernel-name-exclude", "kernel_substring=trsm_"
"""A backtrace of the host keeps Python's frames, and with them every array, so that nothing comes to one address twice.
cuBLAS has kernels for triangular systems with barriers in divergent code, which synccheck reports."""


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(cp: Any, tool: str) -> None:
    done = sanitize(tool, module="sanitized_factors", options=OPTIONS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "factorisations" in done.stdout


@pytest.mark.parametrize("plant", PLANTS)
def test_memcheck_finds_what_is_planted(cp: Any, plant: str) -> None:
    done = sanitize("memcheck", "--plant", plant, module="sanitized_factors", options=OPTIONS)
    assert done.returncode == 9, done.stdout + done.stderr
    assert "Invalid __global__" in done.stdout  # and not only that a report is not what it should be
    assert Path(PLANTS[plant].file).stem in done.stdout


@pytest.mark.parametrize("plant", BARRIERS)
def test_synccheck_finds_what_is_planted(cp: Any, plant: str) -> None:
    done = sanitize("synccheck", "--plant", plant, module="sanitized_factors", options=OPTIONS)
    assert done.returncode == 9, done.stdout + done.stderr
    assert "Barrier error" in done.stdout
    assert Path(BARRIERS[plant].file).stem in done.stdout
