"""Products of small NumPy matrices by the full procedure, to compare the short one with, and what reports say."""

from __future__ import annotations

from typing import Any

import pytest

from abft_tsm2 import Report, protected_gemm
from abft_tsm2.gemm import small


def told(report: Report) -> dict[str, Any]:
    """What a report says, but for times."""
    return {name: value for name, value in report.to_dict().items() if name != "seconds"}


def fully(*operands: Any, **options: Any) -> Any:
    """The product by the full procedure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "known", lambda *_: None)
        patch.setattr(small, "form_of", lambda *_: None)
        return protected_gemm(*operands, **options)
