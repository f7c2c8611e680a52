"""The kernels that certify finished factors compile without a GPU, each for two architectures, and hold what they have
in registers."""

from __future__ import annotations

import itertools

import pytest

from abft_tsm2.core.compiler import source
from abft_tsm2.linalg.device.certificate_config import CertificateKernel
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.certificate_cases import KERNELS
from tests.support.cubins import Cubins, mostly_tuned

HEAVIEST = [kernel for kernel in KERNELS if kernel.routine == "factor_sums"]


@pytest.mark.parametrize(
    ("kernel", "architecture"),
    mostly_tuned(itertools.product(KERNELS, ARCHITECTURES), HEAVIEST),
    ids=lambda x: getattr(x, "name", x),
)
def test_every_kernel_compiles_without_spills(compiled: Cubins, kernel: CertificateKernel, architecture: str) -> None:
    code, log = compiled(source(kernel), architecture)
    assert kernel.name.encode() in code
    assert spilled(log) == 0, log
