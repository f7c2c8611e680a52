"""Weights that kernels make: what the host says they are. tests/test_encode_both.py compares the kernels with it."""

from __future__ import annotations

import numpy as np
import pytest

from abft_tsm2.core.generated import Generated


def test_generated_weights_are_what_they_say() -> None:
    x = Generated("balanced", 3, 5).weights(100_000)
    steps = (abs(x) - 1) * 128
    assert (np.unique(steps) == np.arange(65)).all()
    assert (abs(np.bincount(steps.astype(int).ravel()) - 300_000 / 65) < 5 * np.sqrt(300_000 / 65)).all()
    assert (abs(np.sign(x).sum(0)) < 5 * np.sqrt(100_000)).all()
    assert (abs(np.corrcoef(x.T) - np.eye(3)) < 0.02).all()
    assert (x != Generated("balanced", 3, 6).weights(100_000)).mean() > 0.9
    assert (Generated("ramp", 3).weights(4)[:, 2] == (np.arange(1, 5) / 4) ** 2).all()
    for arguments in (("normal",), ("ones", 0), ("balanced", 1, -1), ("balanced", 1, 2**64)):
        with pytest.raises(ValueError, match=r"choose from|at least one column|seed"):
            Generated(*arguments)
