"""Faults that campaigns found to be judged or repaired wrongly, each as it was found: they stay mended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Status, protected_lu_factor, weights
from abft_tsm2.checksum import correct
from abft_tsm2.faults.judge.factor_oracle import lu_error, unit
from abft_tsm2.faults.plan import Plan
from abft_tsm2.faults.trials import factor
from abft_tsm2.faults.trials.trial import Trial, Workload
from tests.support.lu_matrices import rectangular
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
    ("family", "dtype", "seed", "sizes", "order", "block"),
    [
        pytest.param("cauchy", "float64", (0, 2071), (1, 400, 2), "F", 64, id="sums that cancel"),
        pytest.param("mild growth", "float64", (1, 3148), (1, 17, 1), "C", 32, id="a panel that grows"),
        pytest.param("breast cancer", "float32", (0, 1023), (16, 301, 1), "F", None, id="a pattern in float32"),
        pytest.param("breast cancer", "float64", (0, 4255), (16, 301, 1), "F", 32, id="a pattern in float64"),
    ],
)
def test_a_clean_factorisation_that_looked_wrong(
    family: str, dtype: str, seed: tuple[int, int], sizes: tuple[int, int, int], order: str, block: int | None
) -> None:
    rng = np.random.default_rng(seed)
    rng.random()
    m, n = (int(size) for size in np.broadcast_to(rng.integers(*sizes), 2))
    a = np.asarray(rectangular(family, m, n, rng, dtype), order=order)  # type: ignore[call-overload]
    lu, report = protected_lu_factor(a, mode="online", block=block, return_report=True)
    assert report.status is Status.CLEAN
    assert lu_error(a, lu) <= 4 * (lu_error(a, linalg.lu_factor(a)) + unit(a.dtype))
