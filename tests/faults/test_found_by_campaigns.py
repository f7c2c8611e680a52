"""Faults that campaigns found to be judged or repaired wrongly, each as it was found: they stay mended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from abft_tsm2 import weights
from abft_tsm2.checksum import correct
from abft_tsm2.faults.plan import Plan
from abft_tsm2.faults.trials import factor
from abft_tsm2.faults.trials.trial import Trial, Workload
from benchmarks import lu_clean
from tests.support.planting import Product, pair

# An error in a panel that its own check is too coarse for, in a column of L: rows that disagreed were taken for a
# pattern of rounding, because parts had been computed again. Which of these come so far depends on how BLAS rounds.
PANEL = Workload("lu", 320, 320, 320, "float32", "toeplitz", "F", (7, 0, 118), (("block", [16, 24, 32, 48]),))
IN_PANEL = (
    *(("float32", 118, 5700), ("float32", 119, 5770), ("float32", 120, 5865), ("float32", 122, 5965)),
    *(("float64", 120, 5844), ("float64", 120, 5881)),
)


def of_factors() -> set[str]:
    outcomes = set()
    for dtype, scene, number in IN_PANEL:
        plan = Plan("bit_flip", "lu.panel", bits="exponent", seed=(7, 0, number))
        workload = replace(PANEL, dtype=dtype, seed=(7, 0, scene))
        outcomes |= {one.outcome for one in factor.FactorTrials(workload, np).run([Trial(number, (plan,), "online")])}
    return outcomes


def test_a_line_that_is_off_everywhere_is_replaced_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element of B, wrong while the product was computed, leaves a column of C wrong. The check was by columns:
    three elements stood out, and were all that was replaced."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (2000, 64))
    hidden = signs[np.abs(signs @ weights("balanced", 64)[:, 0]).argmin()]  # which the column's checksum does not see

    def off_everywhere(C: np.ndarray) -> None:
        C[:, 7] += (2e-4 * hidden).astype(np.float32)
        C[[3, 30, 50], 7] += 1

    def left() -> float:
        product = Product(*pair(64, 512, 128, np.float32), off_everywhere, check="columns")
        assert product.status == "CORRECTED"
        return float(np.abs(product.C - product.clean)[:, 7].max())

    def only_outliers(distance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        outliers, all_of_it = rule(distance)
        return outliers, np.zeros_like(all_of_it)

    assert left() < 5e-5
    rule = correct._outliers
    monkeypatch.setattr(correct, "_outliers", only_outliers)
    assert left() > 1e-4


def test_a_pattern_of_rounding_has_many_lines() -> None:
    assert "sdc" not in of_factors()


@pytest.mark.parametrize(
    ("seed", "index"),
    [(0, 2071), (1, 3148), (0, 1023), (0, 4255)],
    ids=["sums that cancel", "a panel that grows", "a pattern in float32", "a pattern in float64"],
)
def test_a_clean_factorisation_that_looked_wrong(seed: int, index: int) -> None:
    found = lu_clean.one(seed, index)
    assert (found.alarm, found.wrong) == ("", ""), found.text
