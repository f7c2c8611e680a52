"""The kernel that plants faults in graphs compiles without a GPU."""

from __future__ import annotations

import pytest

from abft_tsm2.core.compiler import source
from abft_tsm2.faults.recorded import PlantKernel
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.cubins import Cubins


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_it_compiles_without_spills(compiled: Cubins, width: int, architecture: str) -> None:
    config = PlantKernel(width)
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log
