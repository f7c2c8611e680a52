"""The judge of faults is judged: by an oracle that shares no code with it, and with schemes that lie."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abft_tsm2 import Report, SilentDataCorruptionError, Status, encode, protected_gemm
from abft_tsm2.checksum import verify
from abft_tsm2.checksum.bounds import arithmetic, statistical_bound, statistical_factor
from abft_tsm2.faults import SITES, Plan
from abft_tsm2.faults.judge.product import Assessment, Judge
from abft_tsm2.faults.models import CHANGES, plant
from abft_tsm2.faults.sites import PRODUCT_SITES
from abft_tsm2.faults.trials import schemes
from abft_tsm2.faults.trials.gemm import GemmTrials, located, require_possible
from abft_tsm2.faults.trials.trial import BROKEN, Finding, Trial, Workload
from abft_tsm2.report import Fault
from tests.support.cases import DTYPES
from tests.support.oracles import WIDE, elements_outside
from tests.support.planting import everywhere, pair

OWN = "tests.support.campaign_schemes"
SIDES = ("rows", "columns")


def product(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    C: np.ndarray = (A.astype(np.float32) @ B.astype(np.float32)).astype(A.dtype) if A.itemsize < 4 else A @ B
    return C


class Case:
    """Operands, their product, and its judge."""

    def __init__(self, m: int, k: int, n: int, dtype: Any = np.float64, seed: int = 0) -> None:
        self.A, self.B = pair(m, k, n, np.dtype(dtype), seed)
        self.clean = product(self.A, self.B)
        self.judge = Judge(self.A, self.B, self.clean, self.clean, np)
        checks = protected_gemm(self.A, self.B, check="both", return_report=True)[1].checks
        self.promises = self.judge.promise(sorted(checks, key=lambda check: SIDES.index(check.side)))

    def __call__(self, *seen: np.ndarray, returned: np.ndarray | None = None, sides: slice = slice(1)) -> Assessment:
        batch = np.stack(seen)
        came = batch if returned is None else np.stack([returned] * len(seen))
        return self.judge(batch, came, self.promises[sides])

    def changed(self, plan: Plan) -> np.ndarray:
        C = self.clean.copy()
        plant(C, plan, plan.rng())
        return C


# ---- what is wrong -------------------------------------------------------------------------------------------------

CASES = {
    (shape, dtype.name): Case(*shape, dtype)
    for shape in ((1, 1, 1), (7, 3, 5), (20, 64, 17), (3, 500, 4))
    for dtype in DTYPES
}


@settings(max_examples=400)
@given(st.sampled_from(list(CASES)), st.sampled_from(sorted(CHANGES)), st.integers(0, 2**32), st.floats(1e-9, 10))
def test_an_element_that_is_wrong_never_passes_for_rounding(
    name: tuple[Any, str], model: str, seed: int, factor: float
) -> None:
    case = CASES[name]
    C = case.changed(Plan(model, factor=factor, seed=(seed,)))
    found = case(C)
    outside = elements_outside(C, case.A, case.B)
    assert bool(found.wrong[0]) >= bool(outside.any())
    # Each place that is named was changed, and everything that was changed is named as that.
    changed = C.view(f"u{C.itemsize}") != case.clean.view(f"u{C.itemsize}")
    assert set(map(tuple, found.touched[0].T.tolist())) == set(map(tuple, np.argwhere(changed).tolist()))
    assert set(map(tuple, found.places[0].T.tolist())) <= set(map(tuple, np.argwhere(changed).tolist()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 50, 30), (9, 700, 11), (64, 64, 64)])
def test_other_orders_of_summation_pass_for_rounding(shape: tuple[int, int, int], dtype: np.dtype[Any]) -> None:
    for seed in range(4):
        case = Case(*shape, dtype, seed)
        A, B, k = case.A, case.B, shape[1]
        half = k // 2
        kind = np.float32 if dtype.itemsize < 4 else dtype
        a, b = A.astype(kind), B.astype(kind)
        others = (
            (a[:, ::-1] @ b[::-1]).astype(dtype),
            (a[:, :half] @ b[:half] + a[:, half:] @ b[half:]).astype(dtype),
            (b.T @ a.T).T.astype(dtype),
            (A.astype(WIDE) @ B.astype(WIDE)).astype(dtype),
        )
        assert not case(*others).wrong.any()
        assert not case(*others).effect.any()


def test_the_product_without_a_fault_is_not_wrong_and_a_wrong_one_is_no_reference() -> None:
    case = Case(20, 64, 17)
    found = case(case.clean)
    assert not (found.wrong | found.effect | found.above | found.hidden | found.unexplained).any()
    assert (found.size, found.relative) == (0, 0)
    bad = case.clean.copy()
    bad[3, 4] *= 1.001
    with pytest.raises(ArithmeticError, match="the product without a fault is off by"):
        Judge(case.A, case.B, bad, bad, np)


def test_what_came_back_is_judged_and_not_what_was_seen() -> None:
    case = Case(20, 64, 17)
    bad = case.clean.copy()
    bad[3, 4] += 1
    repaired, spoilt = case(bad, returned=case.clean), case(case.clean, returned=bad)
    assert (repaired.wrong[0], repaired.effect[0], repaired.above[0]) == (False, True, True)
    assert (spoilt.wrong[0], spoilt.effect[0], spoilt.above[0], spoilt.unexplained[0]) == (True, False, False, True)
    assert repaired.places[0].T.tolist() == [[3, 4]]
    assert repaired.relative[0] == pytest.approx(1 / np.sqrt(np.mean(case.clean**2)), rel=1e-12)


# ---- the promise ---------------------------------------------------------------------------------------------------


def moved_and_limit(case: Case, C: np.ndarray, side: str) -> tuple[np.ndarray, np.ndarray]:
    """|sum_j v_j d_ij| of each line, and what it has to exceed, in the widest type; no code of the judge's."""
    A, B, before, after = (x.astype(WIDE) for x in (case.A, case.B, case.clean, C))
    if side == "columns":
        A, B, before, after = B.T, A.T, before.T, after.T
        v = encode(case.A, side="columns").weights.columns[:, 0].astype(WIDE)
    else:
        v = encode(case.B, side="rows").weights.rows[:, 0].astype(WIDE)
    how, (k, n) = arithmetic(case.A.dtype.name, case.A.dtype.name), B.shape
    with np.errstate(all="ignore"):
        products, stored = np.sqrt((A * A) @ ((B * B) @ (v * v))), np.sqrt((before * before) @ (v * v))
        lost = how.underflow(k) * abs(v).sum()
        bound = statistical_bound(np, how, k, n, products=products, stored=stored, added=None, underflow=lost)
        units = max(0.75 * math.sqrt(2 * n), min(12, 2 * n * math.sqrt(n)))
        again = 2.0**-53 * units * np.maximum(products, stored)  # of the sum of the faulty line
        limit = (bound + abs(before @ v - A @ (B @ v)) + again) / (1 - statistical_factor(how, k, n))
        return abs((after - before) @ v), limit


@pytest.mark.parametrize("side", [0, 1], ids=SIDES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_is_above_the_promise_is_what_the_weighted_sums_say(dtype: str, side: int) -> None:
    case, rng, told = Case(40, 50, 30, dtype), np.random.default_rng(5), Counter[bool]()
    for _ in range(300):
        C = case.clean.copy()
        i, j = int(rng.integers(40)), int(rng.integers(30))
        C[i, j] += np.dtype(dtype).type(case.judge.rms * 10 ** rng.uniform(-17, -3))
        moved, limit = moved_and_limit(case, C, SIDES[side])
        ratio = float((moved / limit).max())
        found = case(C, sides=slice(side, side + 1))
        if abs(ratio - 1) > 0.15:  # the residual without a fault is the judge's own, rounded in float64
            assert bool(found.above[0]) == (ratio > 1)
            told[ratio > 1] += 1
        assert found.size[0] == pytest.approx(ratio, rel=0.15)
    assert min(told[True], told[False]) > 30


@pytest.mark.parametrize("check", ["rows", "columns"])
def test_what_is_above_the_promise_is_found(check: str) -> None:
    case, rng = Case(40, 50, 30), np.random.default_rng(6)
    at = SIDES.index(check)
    just_above = 0
    for _ in range(200):
        i, j = int(rng.integers(40)), int(rng.integers(30))
        C = case.clean.copy()
        C[i, j] += case.judge.rms * 10 ** rng.uniform(-15, -12.5)
        found = case(C, sides=slice(at, at + 1))

        def hook(stage: str, arrays: Any, C: np.ndarray = C) -> None:
            if stage == "multiplied":
                arrays["C"][...] = C

        _, report = protected_gemm(case.A, case.B, check=check, on_stage=hook, return_report=True)
        if found.above[0]:
            assert report.status is Status.CORRECTED
            just_above += found.size[0] < 2
    assert just_above > 5


def test_not_a_number_is_above_every_promise() -> None:
    case = Case(20, 64, 17)
    for value in (np.nan, np.inf, -np.inf, 1e308):
        C = case.clean.copy()
        C[3, 4] = value
        found = case(C)
        assert found.wrong[0]
        assert found.above[0]
        assert np.isinf(found.size[0])


def test_changes_that_cancel_are_hidden_on_one_side_and_not_on_the_other() -> None:
    case = Case(40, 50, 100)
    v = case.promises[0].v
    j, k = min(((j, k) for j in range(100) for k in range(j)), key=lambda pair: abs(v[pair[0]] - v[pair[1]]))
    d = 0.2 * float(case.promises[0].limit(case.clean[None])[0, 7]) / abs(v[j] - v[k])
    C = case.clean.copy()
    C[7, j] += d
    C[7, k] -= d
    one, both = case(C), case(C, sides=slice(2))
    assert (one.wrong[0], one.above[0], one.hidden[0], one.unexplained[0]) == (True, False, True, False)
    assert (both.wrong[0], both.above[0], both.hidden[0], both.unexplained[0]) == (True, True, False, True)
    assert one.size[0] < 1 < both.size[0]
    assert re.match(r"row 7: \|sum v d\| = \S+ is within the bound \S+, one element alone moves", one.reasons[0])
    assert 0.1 / 100 < one.chance[0] < 1 / 5
    assert (both.chance[0], both.reasons[0]) == (0, "")
    swapped = case.clean.copy()
    swapped[:, [j, k]] = swapped[:, [k, j]]
    found = case(swapped)
    assert (found.above[0], found.chance[0], found.unexplained[0]) == (True, 0, True)


def test_large_changes_that_cancel_round_by_as_much_as_a_small_one() -> None:
    dtype = DTYPES[-1]
    if dtype.name != "bfloat16":
        pytest.skip("ml_dtypes is not installed")
    case = Case(40, 50, 100, dtype)
    v, alone = case.promises[0].v, float(case.promises[0].limit(case.clean[None])[0, 7])
    j, k = min(((j, k) for j in range(100) for k in range(j)), key=lambda pair: abs(v[pair[0]] - v[pair[1]]))
    C = case.clean.copy()
    C[7, j] += dtype.type(1.5 * alone / abs(v[j] - v[k]))
    C[7, k] -= C[7, j] - case.clean[7, j]
    found = case(C)
    assert float(case.promises[0].moved(C[None].astype(float) - case.clean.astype(float))[0, 7]) > alone
    assert (found.wrong[0], found.above[0], found.hidden[0], found.unexplained[0]) == (True, False, True, False)
    C[7, k] = case.clean[7, k]
    assert case(C).above[0]


# ---- places --------------------------------------------------------------------------------------------------------


def fault(rows: tuple[int, ...], columns: tuple[int, ...], elements: int, operand: str = "C") -> Fault:
    return Fault(operand, "block", rows, columns, elements, 1.0)


@pytest.mark.parametrize(
    ("faults", "answer"),
    [
        ([fault((3,), (4,), 1), fault((5,), (6,), 1)], "exact"),
        ([fault((3, 5), (4, 6), 2)], "exact"),
        ([fault((3, 5), (4, 6), 4)], "covered"),
        ([fault((), (4, 6), 40)], "covered"),
        ([fault((3,), (), 1), fault((5,), (), 1)], "exact"),
        ([fault((3,), (4,), 1)], "wrong"),
        ([fault((3,), (6,), 1), fault((5,), (4,), 1)], "wrong"),
        ([fault((3, 5), (4, 6), 2, "u")], "wrong"),
        ([fault((), (), 0, "B")], ""),  # which is what was wrong, and said
        ([], "wrong"),
    ],
)
def test_places_are_exact_covered_or_wrong(faults: list[Fault], answer: str) -> None:
    places = np.array([[3, 5], [4, 6]])
    report = Report(Status.CORRECTED, "gemm", 9, 9, 9, "float64", faults=tuple(faults))
    assert located(report, places, places) == answer


# ---- whole trials --------------------------------------------------------------------------------------------------


def workload(m: int = 40, k: int = 50, n: int = 30, dtype: str = "float64", seed: int = 1) -> Workload:
    return Workload("gemm", m, k, n, dtype, "normal", "C", (seed,))


def found(scheme: str, *plans: Plan, scene: GemmTrials | None = None) -> Finding:
    """What becomes of one trial."""
    (finding,) = (scene or GemmTrials(workload(), np)).run([Trial(0, plans, scheme)])
    return finding


FLIP = Plan("bit_flip", bits="exponent_high")
LASTING = replace(FLIP, persistent=True)


@pytest.mark.parametrize(
    ("scheme", "plan", "outcome", "status"),
    [
        ("protected", FLIP, "corrected", "CORRECTED"),
        ("both", FLIP, "corrected", "CORRECTED"),
        ("protected", LASTING, "detected", "UNCORRECTABLE"),
        ("detect", FLIP, "detected", "UNCORRECTABLE"),
        ("protected", Plan("bit_flip", "A", "exponent_high", persistent=True), "detected", "INPUT_CHANGED"),
        ("none", FLIP, "sdc", ""),
        ("double", FLIP, "detected", "DIFFERENT"),
        ("double", LASTING, "sdc", "SAME"),
        ("rtol", FLIP, "detected", "NOT CLOSE"),
        ("fixed", FLIP, "detected", "FAILED"),
        ("fixed", Plan("offset", factor=1e-12), "sdc", "PASSED"),
        ("fixed", Plan("offset", factor=1e-14), "below_bound", "PASSED"),
        ("protected", Plan("bit_flip", bits="0"), "masked", "CLEAN"),
        ("none", Plan("bit_flip", bits="0"), "masked", ""),
        ("protected", Plan("offset", factor=1e-14), "below_bound", "CLEAN"),
        ("none", Plan("offset", factor=1e-14), "below_bound", ""),
        ("rtol", Plan("offset", factor=1e-9), "sdc", "CLOSE"),
        (f"{OWN}:believes", FLIP, "sdc", ""),
        (f"{OWN}:compares", FLIP, "detected", "REFUSED"),
        (f"{OWN}:raises", FLIP, "crash", ""),
    ],
)
def test_outcomes_by_hand(scheme: str, plan: Plan, outcome: str, status: str) -> None:
    finding = found(scheme, plan)
    assert (finding.outcome, finding.status) == (outcome, status)
    assert finding.outcome not in ("corrected",) or finding.located == "exact"
    assert finding.to_line()["note"] == (
        "ZeroDivisionError: one fault too many" if outcome == "crash" else finding.note
    )


@pytest.mark.parametrize(
    ("scheme", "outcome"),
    [
        *(("protected", "clean"), ("none", "clean"), (f"{OWN}:believes", "clean"), (f"{OWN}:compares", "clean")),
        *((f"{OWN}:refuses", "false_alarm"), (f"{OWN}:wrong", "sdc")),
    ],
)
def test_trials_without_a_fault(scheme: str, outcome: str) -> None:
    assert found(scheme).outcome == outcome


@pytest.mark.parametrize("status", [Status.CORRECTED, Status.CHECKSUM_FAULT, Status.UNVERIFIABLE, Status.UNCORRECTABLE])
def test_a_clean_product_that_is_reported_or_refused_is_a_false_alarm(
    monkeypatch: pytest.MonkeyPatch, status: Status
) -> None:
    honest, scene = protected_gemm, GemmTrials(workload(), np)
    assert found("protected", scene=scene).outcome == "clean"

    def alarmed(*arguments: Any, **options: Any) -> Any:
        C, report = honest(*arguments, **options)
        report = replace(report, status=status)
        if status is Status.UNCORRECTABLE:
            raise SilentDataCorruptionError(report)
        return C, report

    monkeypatch.setattr(schemes, "protected_gemm", alarmed)
    finding = found("protected", scene=scene)
    assert (finding.outcome, finding.status) == ("false_alarm", status.name)
    assert finding.to_line()["note"].startswith("gemm")  # the first line of the report


def test_with_the_check_disabled_flips_of_the_exponent_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = GemmTrials(workload(), np)
    trials = [Trial(i, (replace(FLIP, seed=(i,)),), "protected") for i in range(20)]
    assert {finding.outcome for finding in scene.run(trials)} == {"corrected"}

    def blind(honest: Any, *arguments: Any) -> verify.SideVerdict:
        verdict = honest(*arguments)
        return replace(verdict, ok=np.ones_like(verdict.ok))

    for honest in (verify.judge, verify.explained_verdict):
        everywhere(monkeypatch, honest, partial(blind, honest))
    findings = list(scene.run(trials))
    assert {finding.outcome for finding in findings} == {"sdc"}
    assert all(finding.to_line()["note"].startswith("gemm") for finding in findings)


def test_no_fault_at_any_site_makes_a_protected_product_break_a_promise() -> None:
    # A sample of the campaigns that benchmarks/campaigns describe: every model, every site.
    scene = GemmTrials(workload(33, 64, 47, "float32"), np)
    plans = [
        Plan(model, site, persistent=persistent, seed=(number,))
        for number, (site, model) in enumerate((site, model) for site in PRODUCT_SITES for model in sorted(CHANGES))
        for persistent in (False, True)
    ]
    outcomes = Counter[str]()
    for scheme in ("protected", "both", "encoded"):
        possible = []
        for plan in plans:
            try:
                require_possible("gemm", scheme, plan)
            except ValueError:
                assert plan.site.endswith(".stored") or plan.site == "kept.v"
                continue
            possible.append(Trial(len(possible), (plan,), scheme))
        for trial, finding in zip(possible, scene.run(possible), strict=True):
            assert finding.outcome not in BROKEN, (trial, finding)
            outcomes[finding.outcome] += 1
    assert outcomes["corrected"] > 100
    assert outcomes["detected"] > 50


def test_what_changes_places_in_a_stored_operand_is_seen_by_the_quick_look() -> None:
    scene = GemmTrials(workload(33, 64, 47), np)
    outcomes = {found("encoded", Plan("swap_columns", "B.stored", seed=(i,)), scene=scene).outcome for i in range(9)}
    assert outcomes <= {"corrected", "detected"}
    E = encode(scene.B.copy())
    E.array[:, [3, 5]] = E.array[:, [5, 3]]
    assert E.changed()
    assert E.verify().status is Status.INPUT_CHANGED


def test_products_have_the_sites_of_products_alone() -> None:
    for site in SITES:
        plan = Plan(sorted(SITES[site].models)[0], site)
        if site in PRODUCT_SITES:
            require_possible("gemm", "encoded", plan)
        else:
            with pytest.raises(ValueError, match="cannot be planted into a product under scheme"):
                require_possible("gemm", "encoded", plan)
    for site in ("s", "t", "u", "repaired"):
        with pytest.raises(ValueError, match="cannot be planted"):
            require_possible("gemm", "none", Plan("nan", site))


def test_sizes_are_in_units_of_the_promise_and_limits_those_of_the_report() -> None:
    scene = GemmTrials(workload(), np)
    finding = found("protected", Plan("offset", factor=1e-6), scene=scene)
    assert finding.relative == pytest.approx(1e-6, rel=1e-6)
    assert finding.report is not None
    rms = float(np.sqrt(np.mean((scene.A @ scene.B) ** 2)))
    assert finding.limit == pytest.approx(finding.report.checks[0].detection_limit / rms, rel=0.01)
    assert finding.size is not None
    assert 0.5 < finding.size / (finding.relative / finding.limit) < 2  # weights are 1 to 1.5
    assert math.isinf(found("protected", Plan("nan"), scene=scene).size or 0)
