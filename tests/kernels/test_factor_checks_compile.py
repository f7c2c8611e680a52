"""Kernels that carry and judge checksums of LU compile without a GPU, each for two architectures, and do not spill."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from abft_tsm2.arrays import FLOATS
from abft_tsm2.core.compiler import Kernel, source
from abft_tsm2.linalg.device.check_config import (
    CONSTANTS,
    Advance,
    ColumnSums,
    JudgeStep,
    RowSums,
    SumModuli,
    chunks_of,
    constants,
)
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.cubins import Cubins, mostly_tuned

CHUNKS = (4, 8, 16)
CONFIGS: list[Kernel] = [SumModuli()]
for dtype in ("float64", "float32"):
    CONFIGS += [ColumnSums(dtype), Advance(dtype)]
    CONFIGS += [kind(dtype, chunks) for kind in (RowSums, JudgeStep) for chunks in CHUNKS]
# Some pointers that no loop needs; an architecture of slow float64, on which no panel of a cluster runs.
SPILLED = {(kind("float64", 16), "sm_120"): 64 for kind in (RowSums, JudgeStep)}
HEAVIEST = (RowSums("float64", 16), JudgeStep("float64", 16))


@pytest.mark.parametrize(
    ("config", "architecture"),
    mostly_tuned(itertools.product(CONFIGS, ARCHITECTURES), HEAVIEST),
    ids=lambda x: getattr(x, "name", x),
)
def test_every_kernel_compiles_without_spills(compiled: Cubins, config: Kernel, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) <= SPILLED.get((config, architecture), 0), log


def test_constants_have_one_order_in_both_languages() -> None:
    text = (Path(__file__).parents[2] / "kernels/factor/line_verdict.cuh").read_text()
    found = re.search(r"enum Constant \{(.*?)\}", text, re.DOTALL)
    assert found
    names = [name.strip().lower().replace("_", " ") for name in found[1].split(",")]
    assert names == [*CONSTANTS, "constants"]
    assert all(len(constants(FLOATS[name])) == len(CONSTANTS) for name in ("float64", "float32"))


def test_every_width_has_its_kernel() -> None:
    assert [chunks_of(b) for b in (1, 128, 129, 256, 257, 512)] == [4, 4, 8, 8, 16, 16]
    for b in (1, 100, 128, 200, 256, 300, 512):
        rows = RowSums.of("float64", b)
        assert rows.grid(0) == 0
        assert rows.grid(1) == 1
        assert rows.grid(10**6) * 32 * rows.chunks <= 65536
