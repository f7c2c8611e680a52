"""Trials on a GPU end as they do on the CPU; of products nothing but verdicts leaves the card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import protected_gemm
from abft_tsm2.arrays import to_host
from abft_tsm2.faults.campaign.file import load
from abft_tsm2.faults.campaign.workers import Unit, carry_out
from abft_tsm2.faults.judge.oracle import widened
from abft_tsm2.faults.judge.product import weights_of
from abft_tsm2.faults.plan import Plan
from abft_tsm2.faults.sites import FACTOR_SITES, sites_of
from abft_tsm2.faults.trials import verify
from abft_tsm2.faults.trials.factor import FactorTrials
from abft_tsm2.faults.trials.gemm import LAYOUTS, GemmTrials
from abft_tsm2.faults.trials.trial import Trial, Workload
from benchmarks import shipped_campaigns
from tests.support.planting import everywhere

pytestmark = pytest.mark.gpu

FAULTS: tuple[dict[str, Any], ...] = (
    {"model": "bit_flip", "bits": "exponent_high"},
    {"model": "nan"},
    {"model": "inf"},
    {"model": "random_value"},
    {"model": "row", "factor": 0.0},
    {"model": "tile", "factor": -1.0},
    {"model": "swap_rows"},
    {"model": "bit_flip", "bits": "exponent_high", "site": "partial"},
    {"model": "bit_flip", "bits": "exponent_high", "site": "A"},
    {"model": "nan", "site": "t"},
    {"model": "bit_flip", "bits": "exponent_high", "site": "B", "persistent": True},
)


WORKLOAD = Workload("gemm", 192, 256, 160, "float32", "normal", "C", (1, 2))


def trials(scheme: str) -> list[Trial]:
    """One with each fault that the scheme has a site for, and one without."""
    possible = [fault for fault in FAULTS if scheme in ("protected", "both") or fault.get("site") != "t"]
    return [*(Trial(i, (Plan(**fault, seed=(i,)),), scheme) for i, fault in enumerate(possible)), Trial(99, (), scheme)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scheme", ["protected", "both", "double", "none"])
def test_trials_end_as_on_the_cpu(scheme: str, dtype: str, cp: Any) -> None:
    workload = replace(WORKLOAD, dtype=dtype)
    on_cpu, on_gpu = ([one.outcome for one in GemmTrials(workload, xp).run(trials(scheme), 4)] for xp in (np, cp))
    assert on_gpu == on_cpu


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_products_are_judged_there(dtype: str, cp: Any) -> None:
    found = [one.outcome for one in GemmTrials(replace(WORKLOAD, dtype=dtype), cp).run(trials("float32"), 4)]
    assert found[-1] == "clean"
    assert set(found[:-1]) <= {"corrected", "detected", "masked"}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_promises_are_for_the_weights_that_the_kernels_have(side: str, dtype: str, cp: Any) -> None:
    """u = C v: weights from norms of another sample differ in a column here and there."""
    for seed in range(4):
        scene = GemmTrials(replace(WORKLOAD, m=512, k=512, n=512, dtype=dtype, seed=(9, seed)), cp)
        found: dict[str, Any] = {}

        def hook(stage: str, arrays: Any, found: dict[str, Any] = found) -> None:
            if stage == "verified":
                found.update({name: arrays[name].copy() for name in ("C", "u")})

        protected_gemm(scene.A, scene.B, check=side, on_stage=hook)
        C = widened(found["C"] if side == "rows" else found["C"].T, cp)
        v = weights_of(scene.B if side == "rows" else scene.A, side, cp)
        off = abs(C @ v - found["u"][:, 0]) / (abs(C) @ abs(v))
        assert float(off.max()) < 1e-6  # a weight that is twice another would be 1e-3


@pytest.mark.parametrize("number", [896748, 881234, 880434])
def test_what_gemm_gpu_has_found_stays_mended(number: int, cp: Any) -> None:
    """Rows wrong all over, by little: other weights passed one; of others not all was told that was replaced."""
    campaign = load(shipped_campaigns.CAMPAIGNS / "gemm-gpu.toml")
    ((line, _),) = carry_out(campaign, Unit(*campaign.place(number), (number,)), cp)
    assert line["outcome"] in ("corrected", "detected")
    assert line["located"] in ("exact", "covered", "")  # none where no element has to be named


def test_no_product_comes_to_the_host(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched for a batch are verdicts and places, not matrices."""
    scene, fetched = GemmTrials(WORKLOAD, cp), list[int]()
    asked = [one for one in trials("protected") if one.plans and one.plans[0].model in ("bit_flip", "nan", "inf")]
    list(scene.run(asked, 4))

    def counting(x: Any) -> Any:
        fetched.append(x.size)
        return to_host(x)

    everywhere(monkeypatch, to_host, counting)
    list(scene.run(asked, 4))
    assert 0 < max(fetched) < WORKLOAD.m * WORKLOAD.n


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_columns_and_elements_that_change_places_are_found_there(dtype: str, cp: Any) -> None:
    plans = [Plan(model, seed=(i,)) for i in range(8) for model in ("swap_columns", "swap_rows", "swap_elements")]
    scene = GemmTrials(replace(WORKLOAD, dtype=dtype), cp)
    found = list(scene.run([Trial(i, (plan,), "protected") for i, plan in enumerate(plans)], 8))
    assert {one.outcome for one in found} == {"corrected"}
    assert all((one.chance or 0) < 0.5 for one in found)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["normal", "halves cancel"])
def test_products_in_arrays_of_any_order_are_clean_there(dtype: str, family: str, cp: Any) -> None:
    for layout in LAYOUTS:
        workload = replace(WORKLOAD, dtype=dtype, family=family, options=(("out", layout),))
        (found,) = GemmTrials(workload, cp).run([Trial(0, (), "protected")])
        assert (found.outcome, found.status) == ("clean", "CLEAN"), layout


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_products_that_were_added_up_otherwise_are_clean_there(dtype: str, cp: Any) -> None:
    scene = verify.VerifyTrials(replace(WORKLOAD, operation="verify", dtype=dtype, m=24, n=20), cp)
    found = list(scene.run([Trial(i, (), name) for i, name in enumerate(verify.SUMS)]))
    assert {one.outcome for one in found} == {"clean"}


# ---- LU ------------------------------------------------------------------------------------------------------------


FACTORS = Workload("lu", 300, 300, 300, "float64", "normal", "F", (1, 2))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scheme", ["online", "offline"])
def test_faults_in_every_site_of_lu_are_found_there(scheme: str, dtype: str, cp: Any) -> None:
    scene = FactorTrials(replace(FACTORS, dtype=dtype), cp)
    for site in sorted(sites_of("lu", scheme)):
        models = FACTOR_SITES[site].models
        model = next(name for name in ("offset", "not_exchanged", "wrong_index") if name in models)
        plans = [Plan(model, site, factor=100.0, seed=(seed,)) for seed in range(3)]
        found = list(scene.run([Trial(i, (plan,), scheme) for i, plan in enumerate(plans)]))
        # what A was, or a sum, may not be read again, and then nothing is wrong
        assert {one.outcome for one in found} <= {"corrected", "masked", "detected"}, site
        if site.rpartition("_")[2] in ("L", "U", "pivots") or "_" not in site:
            assert {one.outcome for one in found} <= {"corrected"}, site


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scheme", ["online", "offline", "auto", "none"])
def test_factorisations_without_a_fault_are_clean_there(scheme: str, dtype: str, order: str, cp: Any) -> None:
    for n in (1, 100, 300, 700):
        scene = FactorTrials(replace(FACTORS, m=n, k=n, n=n, dtype=dtype, order=order), cp)
        (found,) = scene.run([Trial(0, (), scheme)])
        assert (found.outcome, found.note) == ("clean", ""), n


def test_without_protection_faults_in_lu_escape_there(cp: Any) -> None:
    plans = [Plan("offset", f"lu.factored_{name}", factor=100.0) for name in "LU"]
    trials = [Trial(i, (plan,), "none") for i, plan in enumerate(plans)]
    assert {one.outcome for one in FactorTrials(FACTORS, cp).run(trials)} == {"sdc"}
