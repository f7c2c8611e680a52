"""Faults in a Cholesky factorisation: repaired, located, reported, or refused; and every check is needed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import linalg

from abft_tsm2 import Report, SilentDataCorruptionError, Status, protected_cho_factor, protected_cholesky
from abft_tsm2.checksum.bounds import definite_bound
from abft_tsm2.linalg import cholesky_checks, evidence
from abft_tsm2.linalg.cholesky_checks import CholeskyChecksums, SymmetricChecksums
from abft_tsm2.linalg.cholesky_repair import CholeskyRepair
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.outcome import ROUNDS
from tests.support.factor_cases import DTYPES, outcome, positive, unit
from tests.support.factor_cases import cholesky_outside as outside
from tests.support.oracles import WIDE
from tests.support.planting import Change, Hook, bits, both, everywhere, put, scale

Patch = pytest.MonkeyPatch
N, BLOCK, STEPS = 56, 16, 3  # the steps that leave something to do
STAGES = ("panel", "updated", "finished")
REPAIRED, MISSED = (Status.CORRECTED, False), (Status.CLEAN, True)
CASES = list(itertools.product((False, True), DTYPES))
halves_and_types = pytest.mark.parametrize(("lower", "dtype"), CASES, ids=[f"{'UL'[x]}-{t}" for x, t in CASES])
functions = pytest.mark.parametrize("function", [protected_cholesky, protected_cho_factor], ids=lambda f: f.__name__)


@dataclass
class Strike:
    """A hook that changes a live array at a stage (of the step that begins with column `first`, if it has steps), and
    after repairs again, so many times in all. `places`: what the first time changed; `repairs`: how many there were."""

    stage: str
    change: Change
    name: str = "W"
    first: int = 0
    times: int = 1
    places: Any = None
    repairs: int = field(default=0, init=False)

    def __call__(self, stage: str, arrays: Any) -> None:
        self.repairs += stage == "repaired"
        due = stage == self.stage and arrays.get("step", (self.first,))[0] == self.first
        if self.times and (due or (stage == "repaired" and self.places is not None)):
            self.times -= 1
            before = bits(arrays[self.name]).copy()
            with np.errstate(all="ignore"):
                self.change(arrays[self.name])
            if self.places is None:
                self.places = np.argwhere(bits(arrays[self.name]) != before)


def flip(bit: int) -> Change:
    """One bit, counted from the sign, which is 1."""

    def change(x: np.ndarray) -> None:
        pattern = bits(x)
        x[...] = (pattern ^ pattern.dtype.type(1 << (8 * x.itemsize - bit))).view(x.dtype)

    return change


KINDS = {"sign": flip(1), "exponent": flip(2), "NaN": put(..., np.nan), "Inf": put(..., np.inf)}
KINDS |= {"1e30": scale(..., 1e30), "tile": scale(..., -1.5), "row": scale(..., 1.25), "column": scale(..., 1.25)}


def strike(kind: str, stage: str, rng: np.random.Generator, first: int | None = None) -> Strike:
    """A fault of this kind at random, below the diagonal, in what a random step (or this one) has just written: the
    panel, the trailing matrix, L."""
    first = BLOCK * int(rng.integers(STEPS)) if first is None else first
    low, high = {"panel": (first, first + BLOCK), "updated": (first + BLOCK, N), "finished": (0, N)}[stage]
    c = int(rng.integers(low, min(high, N - 1)))
    i = int(rng.integers(c + 1, N))
    rows = {"tile": slice(i, i + 8), "column": slice(c, N)}.get(kind, slice(i, i + 1))
    columns = {"tile": slice(c // 8 * 8, c + 1), "row": slice(low, min(i + 1, high))}.get(kind, slice(c, c + 1))
    return Strike(stage, lambda W: KINDS[kind](W[rows, columns]), first=first)


def seeded(*of: Any) -> np.random.Generator:
    return np.random.default_rng(list("-".join(map(str, of)).encode()))


def located(report: Report, places: np.ndarray, lower: bool) -> bool:
    """Whether all the places are among the rows and columns of the faults: all of them, where none are named."""
    for at, lines in enumerate(("rows", "columns") if lower else ("columns", "rows")):
        named = [getattr(fault, lines) for fault in report.faults if fault.operand in "LU"]
        if not named or (all(named) and not set(places[:, at].tolist()) <= set().union(*named)):
            return False
    return True


class Result(NamedTuple):
    """What became of a matrix; `verdict`: the status, and whether c is wrong by an oracle that is not ours."""

    c: np.ndarray
    report: Report
    verdict: tuple[Status, bool]


def factored(a: np.ndarray, hook: Hook | None = None, lower: bool = True, **options: Any) -> Result:
    try:
        c, report = protected_cholesky(
            a.copy(), lower, on_stage=hook, return_report=True, **{"block": BLOCK, **options}
        )
    except SilentDataCorruptionError as error:
        return Result(np.empty(0), error.report, (error.report.status, False))
    return Result(c, report, (report.status, not right(c, a, lower)))


def right(c: np.ndarray, a: np.ndarray, lower: bool) -> bool:
    return bool(np.isfinite(c).all() and (np.diagonal(c) > 0).all() and not outside(c, a, lower).any())


@halves_and_types
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_repaired_and_located(kind: str, stage: str, lower: bool, dtype: Any) -> None:
    a, fault = positive(N, dtype), strike(kind, stage, seeded(kind, stage, lower, dtype))
    (c, _), report = protected_cho_factor(a, lower, block=BLOCK, on_stage=replace(fault), return_report=True)
    np.testing.assert_array_equal(*(np.triu(x, 1) if lower else np.tril(x, -1) for x in (a, c)))
    np.testing.assert_array_equal(factored(a, fault, lower).c, np.tril(c) if lower else np.triu(c))
    assert (report.status, report.also, len(fault.places) > 0) == (Status.CORRECTED, (), True)
    assert located(report, fault.places, lower)
    if kind == "sign" and stage != "panel":
        assert [(one.kind, one.elements, len(one.repair) > 0) for one in report.faults] == [("element", 1, True)]
    assert right(c, a, lower)


IN_SUMS: Mapping[str, Change] = {"+ 3": lambda x: np.add(x, 3, out=x), **{x: KINDS[x] for x in ("sign", "NaN", "Inf")}}
SUMS = [("encoded", "Z"), ("encoded", "w"), *itertools.product(STAGES[:2], "Zgw"), ("finished", "g"), ("finished", "w")]


def in_sums(kind: str, stage: str, name: str, rng: np.random.Generator) -> Strike:
    """A fault in a sum that is still needed: Z of what is not factored yet, g of what is."""
    first = BLOCK * int(rng.integers(1, STEPS))
    done = {"encoded": 0, "panel": first, "updated": first + BLOCK, "finished": N}[stage]
    at = int(rng.integers(*{"Z": (done, N), "g": (0, done), "w": (0, N)}[name]))
    return Strike(stage, lambda x: IN_SUMS[kind](x[at : at + 1]), name, first)


@halves_and_types
@pytest.mark.parametrize(("stage", "name"), SUMS)
@pytest.mark.parametrize("kind", IN_SUMS)
def test_a_fault_in_a_checksum_is_none_in_l(kind: str, stage: str, name: str, lower: bool, dtype: Any) -> None:
    a, fault = positive(N, dtype), in_sums(kind, stage, name, seeded(kind, stage, name, lower, dtype))
    asked = factored(a, replace(fault), lower, on_error="detect")
    always = factored(a, replace(fault, times=10**6), lower)
    found = factored(a, fault, lower)
    assert (*found.verdict, found.report.also) == (Status.CHECKSUM_FAULT, False, ())
    assert {one.operand[0] for one in found.report.faults} == {name}  # "Z of A" is one, too
    assert {line for one in found.report.faults for line in one.rows} == set(fault.places[:, 0].tolist())
    assert (asked.report.ok, asked.verdict[1]) == (True, False)
    assert always.verdict in ((Status.CHECKSUM_FAULT, False), (Status.UNCORRECTABLE, False))


@halves_and_types
@pytest.mark.parametrize("stage", ["encoded", *STAGES])
@pytest.mark.parametrize("kind", IN_SUMS)
def test_nothing_is_repaired_from_a_matrix_that_has_changed(kind: str, stage: str, lower: bool, dtype: Any) -> None:
    a, rng = positive(N, dtype), seeded(kind, stage, lower, dtype)
    i, c = sorted(rng.integers(0, N, 2), reverse=True)
    of_a = Strike(stage, lambda A: IN_SUMS[kind](A[i : i + 1, c : c + 1]), "A", BLOCK * int(rng.integers(STEPS)))
    of_l = strike("sign", "finished", rng)
    alone = factored(a, replace(of_a), lower)  # A is read only where something is suspected
    assert alone.verdict in ((Status.CLEAN, False), (Status.INPUT_CHANGED, False))
    refused = factored(a, both(replace(of_a), replace(of_l)), lower).report
    assert (refused.status, refused.faults[-1].operand) == (Status.INPUT_CHANGED, "A")
    assert not factored(a, both(of_a, of_l), lower, on_error="detect").report.ok


@halves_and_types
def test_what_is_there_at_the_start_is_what_is_factored(lower: bool, dtype: Any) -> None:
    a = positive(N, dtype)
    c = factored(a, Strike("inputs", put((50, 50), 7.0), "A"), lower).c
    a[50, 50] = 7
    assert right(c, a, lower)


@halves_and_types
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "exponent"])
def test_on_error_detect_and_raise(kind: str, stage: str, lower: bool, dtype: Any) -> None:
    a, fault = positive(N, dtype), strike(kind, stage, seeded(kind, stage, lower, dtype))
    once = replace(fault)
    found = factored(a, once, lower, on_error="detect")
    assert (*found.verdict, once.repairs) == (Status.UNCORRECTABLE, True, 0)
    assert located(found.report, once.places[:1], lower)
    assert not any(one.repair for one in found.report.faults)
    with pytest.raises(SilentDataCorruptionError) as caught:
        protected_cholesky(a, lower, block=BLOCK, on_stage=replace(fault), on_error="raise")
    raised, repaired = caught.value.report, factored(a, fault, lower).report
    assert {**raised.to_dict(), "seconds": {}} == {**repaired.to_dict(), "seconds": {}}


@halves_and_types
@pytest.mark.parametrize("on_error", ["correct", "detect", "raise"])
def test_without_a_fault_no_mode_alarms(on_error: str, lower: bool, dtype: Any) -> None:
    for n in (1, 15, 16, 17, N):
        found = factored(positive(n, dtype), None, lower, on_error=on_error)
        assert (*found.verdict, found.report.faults) == (Status.CLEAN, False, ())


# ---- more than one -------------------------------------------------------------------------------------------------


@halves_and_types
@pytest.mark.parametrize("seed", range(6))
def test_faults_in_several_panels(seed: int, lower: bool, dtype: Any) -> None:
    rng = np.random.default_rng(seed)
    faults = [strike(rng.choice([*KINDS]), rng.choice(STAGES), rng, BLOCK * step) for step in range(STEPS)]
    found = factored(positive(N, dtype), both(*faults), lower)
    assert found.verdict == REPAIRED
    assert all(located(found.report, fault.places, lower) for fault in faults)


@halves_and_types
@pytest.mark.parametrize("repairs", [0, 1], ids=["", "and a repair reads them"])
@pytest.mark.parametrize("kind", KINDS)
def test_finished_columns_change_while_later_steps_run(kind: str, repairs: int, lower: bool, dtype: Any) -> None:
    rng = seeded(kind, repairs, lower, dtype)
    fault = replace(strike(kind, "panel", rng, BLOCK), stage="updated", first=2 * BLOCK)
    found = factored(positive(N, dtype), both(fault, *[strike("sign", "updated", rng, 2 * BLOCK)] * repairs), lower)
    assert found.verdict == REPAIRED
    assert located(found.report, fault.places, lower)


@halves_and_types
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_stays_after_repairs_is_refused(kind: str, stage: str, lower: bool, dtype: Any) -> None:
    a, fault = positive(N, dtype), strike(kind, stage, seeded(kind, stage, lower, dtype))
    refused, again = (factored(a, replace(fault, times=times), lower) for times in (10**6, ROUNDS + 1))
    assert (refused.verdict[0], again.verdict) == (Status.UNCORRECTABLE, REPAIRED)
    assert f"after {ROUNDS} repairs" in refused.report.reasons[-1]
    assert again.report.restarted
    assert "restarted" not in again.report.to_dict()


@halves_and_types
@pytest.mark.parametrize("on_error", ["correct", "detect"])
def test_a_fault_in_a_stack_is_reported_with_its_index(on_error: str, lower: bool, dtype: Any) -> None:
    a = np.stack([positive(40, dtype, seed) for seed in range(6)]).reshape(2, 3, 40, 40)
    begun: list[str] = []
    fault = Strike("updated", put((35, 30), 1e3))

    def hook(stage: str, arrays: Any) -> None:
        begun.extend([stage] * (stage == "inputs"))
        if len(begun) == 5:  # the one at (1, 1)
            fault(stage, arrays)

    c, report = protected_cholesky(a, lower, block=BLOCK, on_stage=hook, return_report=True, on_error=on_error)
    assert report.status is (Status.CORRECTED if on_error == "correct" else Status.UNCORRECTABLE)
    assert [one.index for one in report.products if one.status is not Status.CLEAN] == [(1, 1)]
    wrong = [at for at in np.ndindex(2, 3) if not right(c[at], a[at], lower)]
    assert wrong == [(1, 1)] * (on_error == "detect")


# ---- not positive definite -----------------------------------------------------------------------------------------


@functions
@halves_and_types
@pytest.mark.parametrize("on_error", ["correct", "detect", "raise"])
def test_an_indefinite_matrix_is_refused_as_scipy_does(on_error: str, function: Any, lower: bool, dtype: Any) -> None:
    theirs = linalg.cholesky if function is protected_cholesky else linalg.cho_factor
    for at in (0, 15, 16, 50, 55):
        a = positive(N, dtype)
        a[at, at] = -3
        ours = outcome(function, a, lower=lower, block=BLOCK, on_error=on_error)
        assert ours.kind == outcome(theirs, a, lower=lower).kind
        assert isinstance(ours.error, linalg.LinAlgError)


@halves_and_types
@pytest.mark.parametrize("value", [-1.0, 0.0, -1e30, np.nan])
@pytest.mark.parametrize("stage", STAGES)
def test_a_pivot_that_a_fault_made_is_not_the_matrix_s(stage: str, value: float, lower: bool, dtype: Any) -> None:
    a = positive(N, dtype)
    for at in (16, 40, 55):
        fault = Strike(stage, put((at, at), value), first=at // BLOCK * BLOCK - BLOCK * (stage == "updated"))
        assert factored(a, replace(fault), lower).verdict == REPAIRED
        assert factored(a, fault, lower, on_error="detect").verdict[0] is Status.UNCORRECTABLE


@halves_and_types
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", ["panel", "updated"])
def test_an_indefinite_matrix_stays_indefinite(stage: str, kind: str, lower: bool, dtype: Any) -> None:
    a = positive(N, dtype)
    a[50, 50] = -3
    hidden = Strike("updated", put((50, 50), 50.0), first=2 * BLOCK)
    for first in (0, 2 * BLOCK):
        fault = strike(kind, stage, seeded(kind, stage, lower, dtype), first)
        with pytest.raises(linalg.LinAlgError, match="51-th leading minor of the array is not positive definite"):
            protected_cholesky(a, lower, block=BLOCK, on_stage=both(fault, replace(hidden)))
        assert fault.places is not None


def error(c: np.ndarray, a: np.ndarray) -> float:
    """max|A - L L'| / max|A|; infinite where L is not finite, or has a pivot that is not positive."""
    L = c.astype(WIDE)
    fit = np.isfinite(c).all() and (np.diagonal(c) > 0).all()
    return float(abs(a - L @ L.T).max() / abs(a).max()) if fit else np.inf


@settings(max_examples=100)
@given(
    st.integers(1, 200),
    st.sampled_from([1, 2, 16, 33, 64, 128, 200]),
    st.sampled_from(STAGES),
    st.tuples(*[st.floats(0, 1, exclude_max=True)] * 3),
    st.integers(1, 64),
    st.integers(0, 2**16),
)
def test_no_bit_of_any_element_spoils_the_factor(
    n: int, block: int, stage: str, where: tuple[float, float, float], bit: int, seed: int
) -> None:
    """At most 20 times the error without a fault, or what is usual for n roundings: less is not seen in sums."""
    a, step, c = positive(n, seed=seed), int(where[0] * n) // block * block, int(where[1] * n)
    i = c + int(where[2] * (n - c))
    assume((stage, bit, i, c) != ("panel", 1, n - 1, n - 1))
    fault = Strike(stage, lambda W: flip(bit)(W[i : i + 1, c : c + 1]), first=step)
    usual = max(error(protected_cholesky(a, True, block=block), a), 2 * n**0.5 * unit(a.dtype))
    found = factored(a, fault, block=block)
    assert not found.report.ok or error(found.c, a) <= 20 * usual


# ---- each check is needed ------------------------------------------------------------------------------------------


def unheard(patch: Patch, name: str) -> None:
    """What a check of `CholeskyChecksums` says is not heard: all is well."""
    honest, well = getattr(CholeskyChecksums, name), LineCheck.of(np.zeros(1), np.ones(1))
    answer = {"check": True, "changed": [], "certificate": well}[name]
    patch.setattr(CholeskyChecksums, name, lambda *given, **options: (honest(*given, **options), answer)[1])


def at_stage(stage: str = "panel") -> Strike:
    return Strike(stage, put((50, 20), 0.5), first=BLOCK)


@pytest.mark.parametrize(("name", "stage"), [("check", "panel"), ("changed", "finished")])
def test_checks_locate_what_the_certificate_only_sees(name: str, stage: str, monkeypatch: Patch) -> None:
    found = factored(positive(N), at_stage(stage))
    assert (found.verdict, found.report.faults[0].rows) == (REPAIRED, (50,))
    unheard(monkeypatch, name)
    late = factored(positive(N), at_stage(stage))
    assert (late.verdict, late.report.faults[0].repair) == (REPAIRED, "factored again")
    assert 50 in late.report.faults[0].rows
    assert late.report.restarted
    assert "L L' = A does not hold" in late.report.reasons[0]
    unheard(monkeypatch, "certificate")
    for on_error in ("correct", "detect"):
        assert factored(positive(N), at_stage(stage), on_error=on_error).verdict == MISSED


def test_without_the_certificate_a_sum_vouches_for_what_is_wrong(monkeypatch: Patch) -> None:
    a = positive(N)
    of_l = Strike("finished", lambda W: np.add.at(W, (50, 20), 0.5))
    of_g = Strike("finished", lambda g: np.add.at(g, 20, 0.5 * SymmetricChecksums.of(a).w[50]), "g")
    assert factored(a, both(replace(of_l), replace(of_g))).verdict == REPAIRED
    unheard(monkeypatch, "certificate")
    assert factored(a, both(of_l, of_g)).verdict == MISSED


def test_what_stands_out_is_computed_again(monkeypatch: Patch) -> None:
    """A fault within the bounds, and far from what the other columns have."""
    fault = Strike("panel", scale((40, 20), 1 + 7e-14), first=BLOCK)
    assert factored(positive(60), replace(fault)).verdict == REPAIRED
    monkeypatch.setattr(cholesky_checks, "DEFINITE_USUAL", 1e9)
    assert factored(positive(60), fault).verdict == MISSED


def test_a_repair_looks_at_the_matrix_it_reads(monkeypatch: Patch) -> None:
    def found() -> Result:
        return factored(positive(N), both(Strike("panel", put((52, 20), 1.0), "A", BLOCK), at_stage()))

    assert found().verdict[0] is Status.INPUT_CHANGED
    monkeypatch.setattr(CholeskyRepair, "verify_input", lambda self: None)
    assert found().verdict == (Status.CORRECTED, True)


def test_a_bound_is_needed_and_an_infinite_one_is_none(monkeypatch: Patch) -> None:
    """An infinite statistical bound is a suspicion, an infinite one of the evidence a conviction."""

    def bounded(patch: Patch, value: float) -> None:
        everywhere(patch, definite_bound, lambda *given: 0.0 * definite_bound(*given) + value)

    with monkeypatch.context() as patch:
        bounded(patch, 1e300)
        assert factored(positive(N), at_stage()).verdict == MISSED
    bounded(monkeypatch, np.inf)
    assert factored(positive(N)).report.suspicions
    assert factored(positive(N), at_stage()).verdict == REPAIRED
    monkeypatch.setattr(evidence, "definite_rounding", lambda *_: np.inf)
    for hook in (None, at_stage()):
        assert factored(positive(N), hook).verdict[0] is Status.UNCORRECTABLE
    monkeypatch.setattr(LineCheck, "clean", property(lambda self: bool((abs(self.residual) <= self.bound).all())))
    assert factored(positive(N), at_stage()).verdict == MISSED
