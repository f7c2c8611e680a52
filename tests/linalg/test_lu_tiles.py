"""A whole tile of L or U that went wrong is repaired as a whole, also where some of its elements are off by little."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Status, errstate, protected_lu_factor
from abft_tsm2.core.faultpoint import planting
from abft_tsm2.faults.judge.factor_oracle import ESCAPED, lu_error, ratio
from abft_tsm2.faults.operands.matrices import BASIC

PARTS = {"L": (slice(64, 128), slice(0, 56)), "U": (slice(0, 56), slice(64, 128))}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("seed", range(12))
def test_a_tile_of_another_sign_is_repaired(seed: int, part: str) -> None:
    a = BASIC["condition 1e10"](131, np.random.default_rng(seed), np.float32)

    def plant(stage: str, arrays: Any) -> None:
        if stage == "finished":
            arrays["W"][PARTS[part]] *= -1

    without = lu_error(a, protected_lu_factor(a, mode="online"))
    with planting(plant), errstate(corrected="ignore"):
        factors, report = protected_lu_factor(a, mode="online", return_report=True)
    assert report.status is Status.CORRECTED
    assert ratio(lu_error(a, factors), without, a.dtype) <= ESCAPED
