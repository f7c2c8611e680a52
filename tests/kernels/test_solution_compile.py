"""The kernels that check solutions compile without a GPU, each for two architectures, and hold what they have in
registers."""

from __future__ import annotations

import itertools

import pytest

from abft_tsm2.core.compiler import source
from abft_tsm2.linalg.device.solution_config import SolutionKernel
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.cubins import Cubins, mostly_tuned
from tests.support.solution_cases import KERNELS

HEAVIEST = [kernel for kernel in KERNELS if kernel.routine.startswith("part_") and kernel.more]


@pytest.mark.parametrize(
    ("kernel", "architecture"),
    mostly_tuned(itertools.product(KERNELS, ARCHITECTURES), HEAVIEST),
    ids=lambda x: getattr(x, "name", x),
)
def test_every_kernel_compiles_without_spills(compiled: Cubins, kernel: SolutionKernel, architecture: str) -> None:
    code, log = compiled(source(kernel), architecture)
    assert kernel.name.encode() in code
    assert spilled(log) == 0, log
