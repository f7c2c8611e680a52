"""The kernels that certify a Cholesky factor compile without a GPU, each for two architectures, and hold what they
have in registers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from abft_tsm2.core.compiler import source
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.cholesky_cases import KERNELS, SUMS
from tests.support.cubins import Cubins, mostly_tuned

HEAVIEST = [kernel for kernel in SUMS if kernel.columns and kernel.squares]


@pytest.mark.parametrize(
    ("kernel", "architecture"),
    mostly_tuned(itertools.product(KERNELS, ARCHITECTURES), HEAVIEST),
    ids=lambda x: getattr(x, "name", x),
)
def test_every_kernel_compiles_without_spills(compiled: Cubins, kernel: Any, architecture: str) -> None:
    code, log = compiled(source(kernel), architecture)
    assert kernel.name.encode() in code
    assert spilled(log) == 0, log
