"""What tests of small products share."""

from __future__ import annotations

from typing import Any

import pytest

from abft_tsm2 import Report
from abft_tsm2.gemm import small


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of products that went the short way, whether they had to be settled."""
    calls: list[bool] = []
    honest, settled = small.SmallForm.product, small.SmallForm._settled

    def counted(self: small.SmallForm, *arguments: Any, **options: Any) -> Report:
        calls.append(False)
        return honest(self, *arguments, **options)

    def noted(self: small.SmallForm, *arguments: Any) -> Report:
        calls[-1] = True
        return settled(self, *arguments)

    monkeypatch.setattr(small.SmallForm, "product", counted)
    monkeypatch.setattr(small.SmallForm, "_settled", noted)
    return calls
