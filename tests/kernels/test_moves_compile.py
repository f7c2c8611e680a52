"""Kernels that move rows and solve for rows of U compile without a GPU, each for two architectures, and without
spills."""

from __future__ import annotations

import itertools

import pytest

from abft_tsm2.core.compiler import source
from abft_tsm2.linalg.device.move_config import INTEGER, MoveKernel
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.cubins import Cubins, mostly_tuned

ROUTINES = (
    *("identity", "gate", "exchange_rows", "exchange_solve", "solve_rows", "left_map", "left_rows"),
    *("measure", "take_rows", "scale_weights", "pivots_to_order"),
)
CONFIGS = [
    MoveKernel(routine, dtype)
    for routine in ROUTINES
    for dtype in ("float64", "float32")
    if dtype == "float64" or routine not in INTEGER
]
HEAVIEST = (MoveKernel("exchange_solve"), MoveKernel("solve_rows"))


@pytest.mark.parametrize(
    ("config", "architecture"),
    mostly_tuned(itertools.product(CONFIGS, ARCHITECTURES), HEAVIEST),
    ids=lambda x: getattr(x, "name", x),
)
def test_every_kernel_compiles_without_spills(compiled: Cubins, config: MoveKernel, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log
