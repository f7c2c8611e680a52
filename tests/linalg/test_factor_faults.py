"""Faults in factorisations: planted where they are said to be, judged by what they do, found; missed without checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Report, SilentDataCorruptionError, Status
from abft_tsm2.core import faultpoint
from abft_tsm2.faults.campaign.file import load
from abft_tsm2.faults.judge.factor_effect import MARGIN, Places
from abft_tsm2.faults.operands.matrices import BASIC
from abft_tsm2.faults.plan import Plan
from abft_tsm2.faults.sites import FACTOR_SITES, SITES, STAGES, sites_of
from abft_tsm2.faults.trials import factor_calls
from abft_tsm2.faults.trials.factor import OPTIONS, FactorTrials, require_possible, require_workload
from abft_tsm2.faults.trials.factor_calls import SOLUTIONS
from abft_tsm2.faults.trials.trial import Finding, Trial, Workload
from abft_tsm2.linalg import certify
from abft_tsm2.linalg.cholesky_checks import CholeskyChecksums
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.lu_checks import LuChecksums
from abft_tsm2.linalg.lu_repair import LuRepair
from tests.support.planting import everywhere

N, BLOCK = 96, 16
Patch = pytest.MonkeyPatch
SCHEMES = [(operation, scheme) for operation, scheme in STAGES if scheme != "none"]


def workload(operation: str = "lu", family: str = "normal", dtype: str = "float64", **changes: Any) -> Workload:
    options = () if operation in SOLUTIONS else (("block", BLOCK),)
    return replace(Workload(operation, N, N, N, dtype, family, "F", (5,), options), **changes)


def found(scheme: str, *plans: Plan, number: int = 0, **kind: Any) -> Finding:
    """What becomes of one trial."""
    (finding,) = FactorTrials(workload(**kind), np).run([Trial(number, plans, scheme)])
    return finding


# ---- what is possible ----------------------------------------------------------------------------------------------


def test_what_is_not_there_is_refused() -> None:
    for operation, scheme in STAGES:
        for site in sites_of(operation, scheme):
            require_possible(operation, scheme, Plan(sorted(FACTOR_SITES[site].models)[0], site))
    with pytest.raises(ValueError, match=r"has no site 'lu\.trailing'; it has lu\.encoded_A"):
        require_possible("lu", "offline", Plan("nan", "lu.trailing"))
    with pytest.raises(ValueError, match="scheme of solve"):
        require_possible("solve", "online", Plan("nan", "solve.forward"))
    with pytest.raises(ValueError, match="there it may be swap_elements, wrong_index"):
        require_possible("lu", "online", Plan("nan", "lu.pivots"))
    with pytest.raises(ValueError, match="site 'product'"):
        require_possible("lu", "online", Plan("nan"))
    with pytest.raises(ValueError, match="cannot be planted"):
        list(FactorTrials(workload(), np).run([Trial(0, (Plan("not_exchanged", "lu.panel"),), "online")]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"family": "normla"}, "did you mean 'normal'"),
        ({"dtype": "float16"}, "float64 and float32"),
        ({"k": 7}, "of LU also"),
        ({"operation": "solve", "m": 99}, "all three the same"),
        ({"options": (("blok", 3),)}, "did you mean 'block'"),
        ({"options": (("block", 0),)}, "columns of a panel"),
        ({"options": (("block", [16, "x"]),)}, "columns of a panel"),
    ],
)
def test_workloads_that_are_none_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        require_workload(workload(**changes))
    require_workload(workload("solve", options=(("refine", True),)))
    require_workload(workload(m=120))
    with pytest.raises(ValueError, match="CPU only"):
        FactorTrials(workload(), object())


def test_campaigns_have_every_site() -> None:
    folder = Path(__file__).parents[2] / "benchmarks" / "campaigns"
    campaigns = [load(folder / f"{name}.toml") for name in ("lu-full", "routes")]
    assert campaigns[0].trials >= 20_000
    faults = [fault for one in campaigns for suite in one.suites if suite.operation in OPTIONS for fault in suite.fault]
    assert {fault.site for fault in faults} == FACTOR_SITES.keys()


# ---- trials --------------------------------------------------------------------------------------------------------


def fault_at(site: str, seed: int = 0) -> Plan:
    """One that no bound can hide."""
    models = FACTOR_SITES[site].models
    model = next(name for name in ("offset", "not_exchanged", "wrong_index", "inf") if name in models)
    return Plan(model, site, factor=100.0, seed=(seed,))


PLACES = [(*way, site) for way in SCHEMES for site in sorted(sites_of(*way))]


@pytest.mark.parametrize(("operation", "scheme", "site"), PLACES)
def test_a_fault_is_found_wherever_it_is(operation: str, scheme: str, site: str) -> None:
    trials = [Trial(seed, (fault_at(site, seed),), scheme) for seed in range(4)]
    outcomes = [one.outcome for one in FactorTrials(workload(operation), np).run(trials)]
    assert set(outcomes) <= {"corrected", "detected", "masked"}
    if site.endswith(("_A", "used_b")) and site != "lu.needed_A":  # which may not be read again
        return
    if scheme in ("offline", "auto", "protected") and site in ("lu.encoded_S", "lu.encoded_Z"):
        return  # where all lines fail, A itself tells that they are right
    assert "masked" not in outcomes or site.startswith("lu.swapped")


@pytest.mark.parametrize(("operation", "scheme"), STAGES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_clean_trials_are_clean(operation: str, scheme: str, dtype: str) -> None:
    for number, family in enumerate(BASIC):
        one = found(scheme, operation=operation, family=family, dtype=dtype, number=number)
        assert (one.outcome, one.note) == ("clean", "")
        assert (one.closest is None) == (scheme == "none")


def test_each_clean_trial_has_a_matrix_of_its_own() -> None:
    assert found("online").closest == found("online").closest
    assert found("online").closest != found("online", number=1).closest


def test_the_same_trial_gives_the_same_finding() -> None:
    plan = Plan("bit_flip", "lu.trailing", bits="exponent", seed=(3,))
    lines = [replace(found("online", plan), seconds=0.0, report=None) for _ in range(2)]
    assert lines[0] == lines[1]
    assert lines[0].bit in range(52, 63)


# ---- the tester, tested --------------------------------------------------------------------------------------------

PLAIN = [(operation, site) for operation, scheme in STAGES if scheme == "none" for site in sites_of(operation, scheme)]


@pytest.mark.parametrize(("operation", "site"), sorted(PLAIN))
def test_without_protection_faults_escape(operation: str, site: str) -> None:
    trials = [Trial(seed, (fault_at(site, seed),), "none") for seed in range(3)]
    for one in FactorTrials(workload(operation), np).run(trials):
        assert (one.outcome, one.status) == ("sdc", "")
        assert one.size is None if site.endswith("pivots") else one.size is not None and one.size > 1


def unheard(patch: Patch) -> None:
    """No check of a factorisation that is checked in every step."""
    good = LineCheck.of(np.zeros(1), np.ones(1))
    patch.setattr(LuChecksums, "_judged", lambda *_, **__: True)
    patch.setattr(LuChecksums, "_small", lambda *_: True)
    patch.setattr(LuRepair, "order", lambda *_, **__: None)
    everywhere(patch, certify.changed, lambda *_: ([], []))
    everywhere(patch, certify.whole, lambda *_: good)
    check = CholeskyChecksums.check
    patch.setattr(CholeskyChecksums, "check", lambda *arguments, **options: check(*arguments, **options) or True)
    patch.setattr(CholeskyChecksums, "changed", lambda *_: [])
    patch.setattr(CholeskyChecksums, "certificate", lambda *_: good)


@pytest.mark.parametrize(
    ("operation", "site"),
    [
        *(("lu", f"lu.{name}") for name in ("ahead", "panel", "solved", "trailing", "swapped_left", "swapped_right")),
        *(("lu", f"lu.{name}") for name in ("updated_L", "updated_U", "updated_pivots")),
        *(("lu", f"lu.{name}") for name in ("finished_L", "finished_U", "finished_pivots")),
        *(("cholesky", f"cholesky.{name}") for name in ("updated_L", "finished_L")),
    ],
)
def test_without_checks_faults_escape(operation: str, site: str, monkeypatch: Patch) -> None:
    scheme = "online" if operation == "lu" else "protected"
    kept = [found(scheme, fault_at(site, seed), operation=operation) for seed in range(3)]
    assert {one.outcome for one in kept} <= {"corrected", "masked"}
    unheard(monkeypatch)
    missed = [found(scheme, fault_at(site, seed), operation=operation) for seed in range(3)]
    assert "sdc" in {one.outcome for one in missed}
    assert {one.outcome for one in missed} <= {"sdc", "masked"}
    assert all(one.status == "CLEAN" and one.note.startswith("error x") for one in missed if one.outcome == "sdc")


Answer = Callable[[Any, Report], tuple[Any, Report]]


def answers(patch: Patch, answer: Answer) -> None:
    """A library that gives another answer where a fault was planted."""
    original = factor_calls.protected_lu_factor

    def changed(a: Any, **options: Any) -> Any:
        (lu, piv), report = original(a, **options)
        if faultpoint.current().injector.plans:
            return answer((lu.copy(), piv.copy()), report)
        return (lu, piv), report

    patch.setattr(factor_calls, "protected_lu_factor", changed)


def ruined(factors: Any) -> Any:
    factors[0][40, 60] *= -3
    return factors


def slightly(factors: Any) -> Any:
    """What a repair may leave: off by 3e-13, more than the clean factors are and less than their checks tell."""
    factors[0][40, 60] += 3e-13
    return factors


def refuse(factors: Any, report: Report) -> Any:
    raise SilentDataCorruptionError(replace(report, status=Status.UNCORRECTABLE))


def fail(factors: Any, report: Report) -> Any:
    raise ZeroDivisionError("as told")


CLEAN, REPAIRED = Status.CLEAN, Status.CORRECTED


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (lambda factors, report: (factors, replace(report, status=CLEAN, faults=())), "masked"),
        (lambda factors, report: (factors, replace(report, status=REPAIRED)), "corrected"),
        (lambda factors, report: (ruined(factors), replace(report, status=CLEAN)), "sdc"),
        (lambda factors, report: (ruined(factors), replace(report, status=REPAIRED)), "sdc"),
        (lambda factors, report: (slightly(factors), replace(report, status=REPAIRED)), "below_bound"),
        (lambda factors, report: (ruined(factors), replace(report, status=Status.UNVERIFIABLE)), "detected"),
        (lambda factors, report: ((factors[0] * np.nan, factors[1]), replace(report, status=CLEAN)), "sdc"),
        (lambda factors, report: ((factors[0], factors[1] + 200), replace(report, status=CLEAN)), "sdc"),
        (refuse, "detected"),
        (fail, "crash"),
    ],
)
def test_the_judge_does_not_believe_the_report(answer: Answer, outcome: str, monkeypatch: Patch) -> None:
    answers(monkeypatch, answer)
    one = found("online", fault_at("lu.trailing"))
    assert one.outcome == outcome
    if outcome == "crash":
        assert one.note == "ZeroDivisionError: as told"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (lambda factors, report: (factors, replace(report, status=Status.CHECKSUM_FAULT)), "false_alarm"),
        (lambda factors, report: (ruined(factors), report), "sdc"),
        (refuse, "false_alarm"),
        (fail, "crash"),
    ],
)
def test_clean_trials_are_judged_too(answer: Answer, outcome: str, monkeypatch: Patch) -> None:
    original = factor_calls.protected_lu_factor
    monkeypatch.setattr(factor_calls, "protected_lu_factor", lambda a, **options: answer(*original(a, **options)))
    assert found("online").outcome == outcome


def test_a_fault_that_was_not_planted_is_an_error_of_the_experiment() -> None:
    one = found("online", Plan("nan", "lu.trailing", visit=77))
    assert (one.outcome, one.note) == ("crash", "nothing was planted at lu.trailing")


# ---- how large, and where ------------------------------------------------------------------------------------------


def test_the_size_is_that_of_the_change_in_units_of_the_line() -> None:
    sizes = []
    for factor in (1e-3, 1e-1):
        one = found("none", Plan("offset", "lu.factored_U", factor=factor, seed=(1,)))
        assert one.size is not None
        assert one.relative is not None
        assert one.limit is not None
        sizes.append(one.size)
        assert (
            0.1 < one.size * MARGIN / (one.relative / one.limit) < 100
        )  # a line is not an element, and it is no median
    assert sizes[1] == pytest.approx(100 * sizes[0], rel=1e-3)


@pytest.mark.parametrize(("operation", "site"), [("lu", "lu.factored_L"), ("cholesky", "cholesky.finished_L")])
def test_a_small_fault_is_below_the_bound(operation: str, site: str) -> None:
    trials = [Trial(n, (Plan("offset", site, factor=10.0**n * 1e-15, seed=(n,)),), "none") for n in range(9)]
    seen = list(FactorTrials(workload(operation), np).run(trials))
    outcomes = [one.outcome for one in seen]
    assert outcomes[0] == "masked"
    assert outcomes[-1] == "sdc"
    assert all(one.size is not None and one.size <= 1 for one in seen if one.outcome in ("masked", "below_bound"))


def test_changes_that_cancel_in_a_line_are_told_apart(monkeypatch: Patch) -> None:
    def cancelling(arrays: Any, plan: Plan, rng: Any) -> int:
        arrays["W"][[60, 70], 8] += np.array([1e-3, -1e-3]) / arrays["w"][[60, 70]]
        return -1

    place = FACTOR_SITES["lu.finished_L"]
    monkeypatch.setitem(SITES, "lu.finished_L", replace(place, change=cancelling))
    one = found("online", Plan("offset", "lu.finished_L"))
    assert (one.outcome, one.status) == ("cancelled", "CLEAN")
    assert one.size is not None
    assert one.size < 1


@pytest.mark.parametrize(
    ("operation", "scheme", "site"),
    [
        *(("lu", "online", f"lu.{name}") for name in ("trailing", "panel", "solved", "updated_L", "finished_U")),
        *(("lu", "offline", f"lu.factored_{name}") for name in "LU"),
        *((name, "protected", site) for name in SOLUTIONS for site in ("solve.forward", "solve.backward")),
        *(("cholesky", "protected", f"cholesky.{name}") for name in ("trailing", "panel", "finished_L")),
    ],
)
def test_faults_are_located(operation: str, scheme: str, site: str) -> None:
    for model in {"scaled", "inf", "column"} & FACTOR_SITES[site].models:
        one = found(scheme, Plan(model, site, factor=-30.0, seed=(2,)), operation=operation)
        assert (one.outcome, one.located in ("exact", "covered")) == ("corrected", True)


def test_places_are_compared() -> None:
    places = Places(np.array([3, 4]), np.array([3, 4, 5]))
    assert places.compared([(3,), (4, 5)]) == "exact"
    assert places.compared([(3, 4, 6)]) == "covered"
    assert places.compared([()]) == "covered"
    assert places.compared([(3, 5)]) == "wrong"


def test_several_faults_at_once() -> None:
    plans = fault_at("lu.trailing", 1), fault_at("lu.finished_U", 2)
    one = found("online", *plans)
    assert (one.outcome, one.bit, one.located) == ("corrected", -1, "")
    again = found("online", replace(fault_at("lu.panel"), persistent=True))
    assert again.outcome == "detected"
