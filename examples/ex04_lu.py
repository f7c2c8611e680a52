"""A fault planted in the middle of a factorisation, its repair, and the system solved with the factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import abft_tsm2 as ft

rng = np.random.default_rng(0)
A, b = rng.standard_normal((500, 500)), rng.standard_normal(500)


def flip_a_bit(stage: str, arrays: Mapping[str, Any]) -> None:
    """Invert the sign of one element of the trailing matrix, after the first panel has been taken off it."""
    if stage == "updated" and arrays["step"][0] == 0:
        arrays["W"][412, 345] *= -1


(lu, piv), report = ft.protected_lu_factor(A, mode="online", return_report=True, on_stage=flip_a_bit)
print(report)

# Every later step has gone over the wrong element; it is found when its panel is next, and computed again from A.
assert report.status is ft.Status.CORRECTED
assert report.faults[0].columns == (345,)

x, report = ft.protected_lu_solve((lu, piv), b, return_report=True)
print(report)
assert report.status is ft.Status.CLEAN
print(f"largest residual: {abs(A @ x - b).max():.1e}")
assert np.allclose(A @ x, b, rtol=0, atol=1e-9)
