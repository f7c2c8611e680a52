"""Kernels that compare a step of LU with A compile without a GPU, each for two architectures, and nearly without
spills; `found` has one order in both languages."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from abft_tsm2.core.compiler import source
from abft_tsm2.linalg.device import evidence_config
from abft_tsm2.linalg.device.evidence_config import EvidenceKernel
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.cubins import Cubins, mostly_tuned

CONFIGS = [
    EvidenceKernel(routine, dtype)
    for routine in ("step_factors", "judge_elements", "grown_columns", "line_squares")
    for dtype in ("float64", "float32")
]
SPILLED = {("factor_judge_elements_float64", "sm_100"): 16}  # outside of the loop over R


@pytest.mark.parametrize(
    ("config", "architecture"),
    mostly_tuned(itertools.product(CONFIGS, ARCHITECTURES), [EvidenceKernel("judge_elements", "float32")]),
    ids=lambda x: getattr(x, "name", x),
)
def test_every_kernel_compiles_without_spills(compiled: Cubins, config: EvidenceKernel, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) <= SPILLED.get((config.name, architecture), 0), log


def test_counts_have_one_order_in_both_languages() -> None:
    text = (Path(__file__).parents[2] / "kernels/factor/evidence.cuh").read_text()
    found = re.search(r"enum Found \{(.*?)\}", text)
    assert found
    *names, count = found[1].split(",")
    assert [getattr(evidence_config, name.strip()) for name in names] == list(range(len(names)))
    assert count.strip() == "FOUND"
    assert len(names) == evidence_config.COUNTS
