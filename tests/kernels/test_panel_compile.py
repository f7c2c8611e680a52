"""panel.cu by NVRTC, for compute capability 9.0 and newer; and how it is launched."""

from __future__ import annotations

import itertools

import pytest

from abft_tsm2.core.compiler import source
from abft_tsm2.linalg.device.panel_config import PanelConfig
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.cubins import TUNED, Cubins, mostly_tuned

LIMITS = {"float64": (4096, 8192, 16384), "float32": (4096, 8192, 16384, 32768)}
CONFIGS = [config for dtype, limits in LIMITS.items() for m in limits if (config := PanelConfig.of(dtype, m))]
TIGHT = PanelConfig.of("float64", 8192)  # a strip of 128 registers
CLUSTERS = [architecture for architecture in ARCHITECTURES if int(architecture.removeprefix("sm_")) >= 90]
EVERY = mostly_tuned(itertools.product(CONFIGS, CLUSTERS), [TIGHT])


@pytest.mark.parametrize(("config", "architecture"), EVERY, ids=lambda x: getattr(x, "name", x))
def test_panels_compile_and_keep_their_columns_in_registers(
    compiled: Cubins, config: PanelConfig, architecture: str
) -> None:
    """`TIGHT` stores some addresses between its phases, none of them in the loop over columns."""
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) <= (0 if architecture == TUNED and config != TIGHT else 512), log


def test_each_number_of_rows_has_the_smallest_kernel_that_holds_it() -> None:
    assert len({config.name for config in CONFIGS}) == len(CONFIGS) == 7
    for dtype, limits in LIMITS.items():
        for below, most in itertools.pairwise((0, *limits)):
            assert PanelConfig.of(dtype, below + 1) == PanelConfig.of(dtype, most)
        assert PanelConfig.of(dtype, limits[-1] + 1) is None


def test_a_launch_has_room_for_all_rows() -> None:
    for config in CONFIGS:
        most = LIMITS[config.dtype][[c for c in CONFIGS if c.dtype == config.dtype].index(config)]
        for m in (1, 100, most // 2 + 1, most - 1, most):
            threads = config.threads(m)
            assert 128 <= threads <= 256
            assert config.grid * threads // 32 * 8 * config.rows_a_lane >= m
        assert config.threads(1) == 128
        with pytest.raises(ValueError, match="rows"):
            config.threads(8 * 16 * 8 * config.rows_a_lane + 1)
        assert config.shared_bytes <= 227 << 10
