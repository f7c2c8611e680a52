"""Campaigns notice a package that has been sabotaged: each of these changes breaks a promise of a small one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2.checksum import bounds, correct, repairs, verify, weights
from abft_tsm2.checksum.sides import Side
from abft_tsm2.faults.analysis.summary import Summary
from abft_tsm2.faults.campaign.file import parse
from abft_tsm2.faults.campaign.run import Count, run
from abft_tsm2.linalg import certify
from abft_tsm2.linalg.lu_repair import LuRepair
from abft_tsm2.linalg.outcome import FactorOutcome
from tests.support.planting import everywhere

Patch = pytest.MonkeyPatch
Sabotage = Callable[[Patch], None]
PRODUCTS = """
seed = 7
[[suite]]
name = "products"
operation = "gemm"
trials = 60
per_scene = 15
clean = 0.2
shapes = [[{m}, 40, 36]]
dtypes = ["float64", "float32"]
families = ["normal", "symmetric"]
[[suite.fault]]
model = "bit_flip"
bits = "exponent"
[[suite.fault]]
model = "offset"
factor = [1e-3, 1.0]
"""
FACTORS = """
seed = 7
[[suite]]
name = "factors"
operation = "lu"
trials = 30
per_scene = 15
shapes = [[{m}, {m}, {m}]]
schemes = ["{scheme}"]
options = {options}
[[suite.fault]]
model = "bit_flip"
bits = "exponent"
site = "{site}"
"""
OFFLINE = {"scheme": "offline", "site": "lu.factored", "options": "{}"}
ONLINE = {"scheme": "online", "site": "lu.trailing", "options": "{ block = 16 }"}


def carried_out(text: str, folder: Path) -> Count:
    return run(parse(text), folder, jobs=0)


def breaks(count: Count) -> bool:
    """What the command ends with exit code 1 for."""
    return bool(count.broken or count.sharpness.broken)


def verdict_always_clean(patch: Patch) -> None:
    def blind(honest: Any, *arguments: Any) -> verify.SideVerdict:
        verdict = honest(*arguments)
        return replace(verdict, ok=np.ones_like(verdict.ok))

    for honest in (verify.judge, verify.explained_verdict):
        everywhere(patch, honest, partial(blind, honest))


def equal_weights(patch: Patch) -> None:
    everywhere(patch, weights._made, lambda kind, n, r, seed: np.ones((n, r)))


def bounds_times(factor: float) -> Sabotage:
    def sabotage(patch: Patch) -> None:
        honest = bounds.statistical_factor
        everywhere(patch, honest, lambda *arguments: factor * honest(*arguments))

    return sabotage


def repair_is_off(patch: Patch) -> None:
    honest = repairs.replace

    def off(lines: Side, line: int, places: Any, value: Any, write: bool) -> None:
        honest(lines, line, places, value * (1 + 1e-6), write)

    everywhere(patch, honest, off)


def location_is_off(patch: Patch) -> None:
    honest = repairs.fault

    def off(*arguments: Any) -> Any:
        fault = honest(*arguments)
        return replace(fault, columns=tuple((column + 1) % 36 for column in fault.columns))

    everywhere(patch, honest, off)


def evidence_is_always_right(patch: Patch) -> None:
    recomputed, compared = correct._recompute, correct.compare

    def right(lines: Side, scale: Any, at: Any) -> Any:
        tile = recomputed(lines, scale, at)
        none = np.zeros_like(tile.wrong)
        return replace(tile, wrong=none, unclear=none, distance=np.zeros_like(tile.distance), found=tile.value)

    def same(*arguments: Any, **options: Any) -> Any:
        second, wrong = compared(*arguments, **options)
        return second, np.zeros_like(wrong)

    everywhere(patch, recomputed, right)
    everywhere(patch, compared, same)


def bounds_of_factors(patch: Patch) -> None:
    honest = bounds.factored_bound
    everywhere(patch, honest, lambda *arguments: 10 * honest(*arguments))


def repair_of_factors(patch: Patch) -> None:
    patch.setattr(LuRepair, "panel", lambda self, j, j1: None)
    patch.setattr(LuRepair, "rows", lambda self, j, j1: None)


def certificate_of_everything(patch: Patch) -> None:
    honest = certify.certified

    def sure(*arguments: Any) -> certify.Certificate:
        return honest(*arguments)._replace(outcome=FactorOutcome.CERTIFIED, rows=(), columns=(), blind=None)

    everywhere(patch, honest, sure)


IN_PRODUCTS: dict[str, Sabotage] = {
    "verdict": verdict_always_clean,
    "weights": equal_weights,
    "bounds x 10": bounds_times(10.0),
    "bounds x 0.02": bounds_times(0.02),
    "repair": repair_is_off,
    "location": location_is_off,
    "evidence": evidence_is_always_right,
}
IN_FACTORS: dict[str, tuple[Sabotage, dict[str, str]]] = {
    "bounds": (bounds_of_factors, ONLINE),
    "repair": (repair_of_factors, ONLINE),
    "certificate": (certificate_of_everything, OFFLINE),
}


@pytest.mark.parametrize("name", IN_PRODUCTS)
def test_a_sabotaged_product_fails_a_campaign(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    # Shapes of their own: what small products of a shape keep was made with the sabotage.
    text = PRODUCTS.format(m=41 + list(IN_PRODUCTS).index(name))
    IN_PRODUCTS[name](monkeypatch)
    count = carried_out(text, tmp_path / "sabotaged")
    assert breaks(count), count
    assert Summary.read(tmp_path / "sabotaged").broken


@pytest.mark.parametrize("name", IN_FACTORS)
def test_sabotaged_factors_fail_a_campaign(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    sabotage, suite = IN_FACTORS[name]
    sabotage(monkeypatch)
    count = carried_out(FACTORS.format(m=64, **suite), tmp_path / "sabotaged")
    assert breaks(count), count
    assert Summary.read(tmp_path / "sabotaged").broken


@pytest.mark.parametrize(
    "text", [PRODUCTS.format(m=40), *(FACTORS.format(m=64, **suite) for suite in (ONLINE, OFFLINE))]
)
def test_without_sabotage_they_keep_every_promise(text: str, tmp_path: Path) -> None:
    count = carried_out(text, tmp_path / "honest")
    assert not breaks(count), (count, count.sharpness.broken)
    assert Summary.read(tmp_path / "honest").broken == []
