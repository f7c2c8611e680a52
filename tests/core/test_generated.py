"""Weights that kernels make: what the host says they are. test_encode_both.py compares the kernels with it."""

from __future__ import annotations

import numpy as np
import pytest

from abft_tsm2.core.generated import MAGNITUDES, Generated


def test_generated_weights_are_what_they_say() -> None:
    x = Generated("balanced", 3, 5).weights(100_000)
    assert (x.astype(np.float32) == x).all()
    assert ((abs(x) >= 1) & (abs(x) < 1.5)).all()
    parts = np.stack([np.histogram(column, 50, (1, 1.5))[0] for column in abs(x).T])
    assert (abs(parts - 2000) < 5 * np.sqrt(2000)).all()
    assert (abs(np.sign(x).sum(0)) < 5 * np.sqrt(100_000)).all()
    assert (abs(np.corrcoef(x.T) - np.eye(3)) < 0.02).all()
    assert (abs(np.corrcoef(abs(x).T) - np.eye(3)) < 0.02).all()
    assert (abs(np.corrcoef(abs(x[1:, 0]), abs(x[:-1, 0]))[0, 1])) < 0.02  # of neighbours
    assert (x != Generated("balanced", 3, 6).weights(100_000)).mean() > 0.9
    assert (Generated("ramp", 3).weights(4)[:, 2] == (np.arange(1, 5) / 4) ** 2).all()
    for arguments in (("normal",), ("ones", 0), ("balanced", 1, -1), ("balanced", 1, 2**64)):
        with pytest.raises(ValueError, match=r"choose from|at least one column|seed"):
            Generated(*arguments)


def test_balanced_weights_differ_pairwise_in_magnitude() -> None:
    for seed in (0, 7, 2**64 - 1):
        for column in abs(Generated("balanced", 2, seed).weights(20_000)).T:
            assert np.unique(column).size == column.size
    steps = (abs(Generated("balanced", 1, 3).weights(MAGNITUDES + 9)) - 1) * 2 * MAGNITUDES
    counts = np.bincount(steps.astype(np.int64).ravel(), minlength=MAGNITUDES)
    assert counts.size == MAGNITUDES
    assert counts.min() == 1
    assert counts.max() == 2
