"""LU, Cholesky and solutions on a GPU under compute-sanitizer, which has to find what is planted, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.core.test_kernels_on_gpu import sanitize
from tests.support.sanitized_factors import BARRIERS, PLANTS

pytestmark = pytest.mark.gpu

OPTIONS = "--show-backtrace", "device"
"""A backtrace of the host keeps Python's frames, and with them every array: nothing would come to one address twice."""
SYNCCHECK = *OPTIONS, *(f"--kernel-name-exclude=kernel_substring={name}" for name in ("trsm_", "panel_float32"))
"""synccheck reports barriers in divergent code of cuBLAS's kernels for triangular systems; and, in the panel kernel of
float32, barriers of the ninth block of the cluster as not initialized, where all blocks initialize theirs before all of
them meet: the emulation of tests/support/cluster_on_cpu.h runs that kernel in any order of threads and messages."""


@pytest.mark.parametrize(("tool", "options"), [("memcheck", OPTIONS), ("synccheck", SYNCCHECK)])
def test_compute_sanitizer_finds_nothing(cp: Any, tool: str, options: tuple[str, ...]) -> None:
    done = sanitize(tool, module="sanitized_factors", options=options)
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
    done = sanitize("synccheck", "--plant", plant, module="sanitized_factors", options=SYNCCHECK)
    assert done.returncode == 9, done.stdout + done.stderr
    assert "Barrier error" in done.stdout
    assert Path(BARRIERS[plant].file).stem in done.stdout
