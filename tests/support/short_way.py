"""Products of small NumPy matrices by the full procedure, to compare the short one with, and what reports say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Report, protected_gemm
from abft_tsm2.checksum import small as checksum_small
from abft_tsm2.checksum.weights import weights
from abft_tsm2.gemm import host, small


def told(report: Report) -> dict[str, Any]:
    """What a report says, but for times."""
    return {name: value for name, value in report.to_dict().items() if name != "seconds"}


def fully(*operands: Any, **options: Any) -> Any:
    """The product by the full procedure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "known", lambda *_: None)
        patch.setattr(small, "form_of", lambda *_: None)
        return protected_gemm(*operands, **options)


def unrounded(
    patch: pytest.MonkeyPatch, m: int, k: int, n: int, dtype: Any = np.float64, batch: tuple[int, ...] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Operands and, from now on, weights of so few digits that all sums of their product are exact, in whatever order a
    BLAS adds: no residual is other than zero, or can raise a suspicion."""
    patch.setattr(small, "_forms", {})  # which keep weights
    for module in (checksum_small, host):
        patch.setattr(module, "balanced", lambda n: np.rint(weights("balanced", n) * 16) / 16)
    rng = np.random.default_rng([m, k, n])
    return rng.integers(-1, 2, (*batch, m, k)).astype(dtype), rng.integers(-1, 2, (*batch, k, n)).astype(dtype)
