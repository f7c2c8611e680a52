"""A fault planted in a product, and its repair: ``on_stage`` hands out the live arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import abft_tsm2 as ft

rng = np.random.default_rng(0)
A, B = rng.standard_normal((600, 400)), rng.standard_normal((400, 500))


def flip_a_bit(stage: str, arrays: Mapping[str, Any]) -> None:
    """Invert the sign of one element of C, as a particle might, between the product and its check."""
    if stage == "multiplied":
        arrays["C"].view(np.uint64)[123, 45] ^= np.uint64(1 << 63)


C, report = ft.protected_gemm(A, B, return_report=True, on_stage=flip_a_bit)
print(report)

fault = report.faults[0]
assert report.status is ft.Status.CORRECTED
assert (fault.rows, fault.columns) == ((123,), (45,))
assert np.allclose(C, A @ B, rtol=1e-12, atol=1e-12)

# Who would rather stop than go on with a repaired result says so.
try:
    ft.protected_gemm(A, B, on_error="raise", on_stage=flip_a_bit)
except ft.SilentDataCorruptionError as error:
    print("raised:", error.report.status.value)
