"""Trials without a fault: operands that belong together, results in every order, products that were made elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import verify_gemm
from abft_tsm2.faults.campaign.file import parse
from abft_tsm2.faults.campaign.folder import CampaignFileError
from abft_tsm2.faults.operands.pairs import PAIRS
from abft_tsm2.faults.operands.products import operands
from abft_tsm2.faults.plan import Plan
from abft_tsm2.faults.trials import verify
from abft_tsm2.faults.trials.gemm import LAYOUTS, GemmTrials
from abft_tsm2.faults.trials.trial import Trial, Workload
from tests.support.oracles import elements_outside

SUITE = '[[suite]]\nname = "one"\noperation = "{}"\ntrials = 4\nclean = 1.0\nshapes = [[9, 8, 7]]\n'


def workload(operation: str, dtype: str = "float64", family: str = "normal", **options: Any) -> Workload:
    return Workload(operation, 17, 40, 23, dtype, family, "C", (1, 2, 3), tuple(options.items()))


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_finite_and_follow_from_the_seed(name: str, dtype: str) -> None:
    first, second = (operands(workload("gemm", dtype, name)) for _ in range(2))
    assert [x.shape for x in first] == [(17, 40), (40, 23)]
    assert all(np.isfinite(x).all() and x.dtype == dtype for x in first)
    assert all(x.tobytes() == y.tobytes() for x, y in zip(first, second, strict=True))
    assert all(
        x.shape == y for x, y in zip(PAIRS[name][1](np.random.default_rng(0), 1, 1, 1), [(1, 1)] * 2, strict=True)
    )


def test_layouts_are_what_their_names_say() -> None:
    made = {name: layout(np, 5, 7, np.dtype("f4")) for name, layout in LAYOUTS.items()}
    assert made.pop("none") is None
    assert all(x.shape == (5, 7) and x.dtype == np.float32 for x in made.values())
    strides = {name: tuple(s // 4 for s in x.strides) for name, x in made.items()}
    assert strides == {
        **{"C": (7, 1), "F": (1, 5), "strided": (42, 3), "part": (12, 1)},
        **{"transposed": (1, 8), "negative": (-7, -1)},
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_product_in_any_order_is_clean_and_a_fault_in_it_is_found(layout: str, dtype: str) -> None:
    scene = GemmTrials(workload("gemm", dtype, "normal", out=layout), np)
    fault = Plan("inf", seed=(4,))
    clean, hit = scene.run([Trial(0, (), "protected"), Trial(1, (fault,), "protected")])
    assert (clean.outcome, clean.status) == ("clean", "CLEAN")
    assert hit.outcome == "corrected"


def test_the_order_is_drawn_for_each_trial_and_stays() -> None:
    scene = GemmTrials(workload("gemm", out=list(LAYOUTS)), np)
    drawn = [scene._layout(Trial(number, (), "protected")) for number in range(60)]
    assert set(drawn) == set(LAYOUTS)
    assert drawn == [scene._layout(Trial(number, (), "protected")) for number in range(60)]


def test_products_of_nothing_but_zeros_are_clean() -> None:
    (found,) = GemmTrials(workload("gemm", "float32", "zeros"), np).run([Trial(0, (), "protected")])
    assert found.outcome == "clean"


# ---- made elsewhere ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", verify.SUMS)
def test_orders_of_summation_are_products(name: str) -> None:
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((6, 70)).astype("f4"), rng.standard_normal((70, 5)).astype("f4")
    C = verify.SUMS[name](A, B, np)
    assert C.dtype == np.float32
    assert not elements_outside(C, A, B).any()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_right_products_are_clean_and_alarms_are_counted(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [Trial(number, (), name) for number, name in enumerate(verify.SUMS)]
    scene = verify.VerifyTrials(workload("verify", dtype, check=["rows", "both"]), np)
    assert {found.outcome for found in scene.run(trials)} == {"clean"}

    def spoilt(A: np.ndarray, B: np.ndarray, C: np.ndarray, **options: Any) -> Any:
        wrong = C.copy()
        wrong[3, 4] = 1e3
        return verify_gemm(A, B, wrong, **options)

    monkeypatch.setattr(verify, "verify_gemm", spoilt)
    found = list(scene.run(trials))
    assert {one.outcome for one in found} == {"false_alarm"}
    assert {one.status for one in found} == {"UNCORRECTABLE"}


def test_a_product_that_is_wrong_is_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify.SUMS, "wrong", lambda A, B, xp: 1.001 * (A @ B))  # type: ignore[misc]
    scene = verify.VerifyTrials(workload("verify"), np)
    with pytest.raises(ArithmeticError, match="'wrong' is off by more than rounding"):
        next(scene.run([Trial(0, (), "wrong")]))


@pytest.mark.parametrize(
    ("operation", "more", "message"),
    [
        ("gemm", 'options = { out = "G" }', "unknown layout 'G'"),
        ("gemm", 'options = { out = "C" }\nschemes = ["double"]', "scheme 'double' has no options"),
        ("gemm", 'schemes = ["protectet"]', "did you mean 'protected'"),
        ("lu", 'schemes = ["onlin"]', "did you mean 'online'"),
        ("storage", 'schemes = ["cr"]', "did you mean 'crc'"),
        ("verify", 'schemes = ["einsums"]', "did you mean 'einsum'"),
        ("verify", 'schemes = ["einsum"]\noptions = { check = "row" }', "did you mean 'rows'"),
        ("verify", 'schemes = ["einsum"]\noptions = { out = "C" }', "unknown option of verify 'out'"),
        ("verify", 'schemes = ["einsum"]\nfault = [{ model = "nan" }]', "are checked without faults"),
    ],
)
def test_what_there_is_not_is_refused_before_anything_runs(operation: str, more: str, message: str) -> None:
    text = SUITE.format(operation).replace("[[9, 8, 7]]", "[[9, 9, 9]]" if operation == "lu" else "[[9, 8, 7]]")
    with pytest.raises(CampaignFileError, match=message):
        parse(text + more)
