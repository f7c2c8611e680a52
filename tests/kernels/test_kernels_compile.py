"""Every kernel that can be chosen compiles without a GPU, and keeps its tiles in registers: for the architecture of the
results and, in turn, for one of the others; the kernels that hold most, for all of them.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from abft_tsm2.core.compiler import source
from abft_tsm2.core.device import KNOWN, known
from abft_tsm2.core.paper.config import T2, Config, choices, is_valid
from benchmarks.registers import ARCHITECTURES
from tests.support.cubins import Cubins, mostly_tuned

CONFIGS = sorted({config for device in KNOWN.values() for config in choices(device)}, key=lambda config: config.name)
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def spilled(log: str) -> int:
    """Bytes stored to memory for want of registers."""
    stores, loads = _SPILLS.findall(log)[0]
    return int(stores) + int(loads)


def is_the_papers_opt2(config: Config) -> bool:
    """Opt-2 at the paper's float64 parameters holds more than 255 registers do (benchmarks/results/registers.csv)."""
    return (config.variant, config.dtype, config.t2) == ("Opt-2", "float64", T2[-1]) and config.t3 in (12, 16)


def heaviest(file: str) -> Config:
    """The one of a file that holds most in registers."""
    held = [config for config in CONFIGS if config.file == file and not is_the_papers_opt2(config)]
    return max(held, key=lambda config: (config.dtype == "float64", config.t2, config.t3 * config.tcf))


HEAVIEST = [heaviest(file) for file in sorted({config.file for config in CONFIGS})]
EVERY = mostly_tuned(itertools.product(CONFIGS, ARCHITECTURES), HEAVIEST)


@pytest.mark.parametrize(("config", "architecture"), EVERY, ids=lambda x: getattr(x, "name", x))
def test_every_kernel_compiles_without_spills(compiled: Cubins, config: Config, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert is_the_papers_opt2(config) or spilled(log) == 0, log


def test_spills_are_seen(compiled: Cubins) -> None:
    config = Config("V3", "float64", 128, 16, 64)
    assert not is_valid(None, config, known("H200"))
    assert spilled(compiled(source(config), "sm_90")[1]) > 0


def test_the_list_is_finite_and_what_the_predicate_lets_through() -> None:
    assert 200 < len(CONFIGS) < 400
    device = known("H200")
    for config in choices(device):
        assert is_valid(None, config, device)
        for name in ("t1", "t2", "t3", "tcf"):
            assert not is_valid(None, replace(config, **{name: 7}), device)


def test_messages_name_the_file_and_the_line(compiled: Cubins) -> None:
    text = source(Config("V3", "float32", 128, 16, 32))
    broken = text.replace("store_C(C, rsc, csc, row, p, n, alpha, c, beta);", "store_C(C, rsc);", 1)
    assert broken != text
    with pytest.raises(Exception, match=r"prefetch\.cuh\(\d+\)"):
        compiled(broken, "sm_90")
