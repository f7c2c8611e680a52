"""Where no weights undo the norms of all lines the checks are blind for some elements, and evidence looks at them; and
right factors stay as they are when a checksum is lost."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Status, protected_lu_factor
from abft_tsm2.errors import UnverifiableWarning
from abft_tsm2.linalg import lu_checks
from abft_tsm2.linalg.evidence import FactorEvidence, factor_evidence
from abft_tsm2.linalg.plain_lu import GROWN
from tests.support.factor_cases import lu_outside
from tests.support.planting import everywhere

Arrays = Mapping[str, Any]
MODES = pytest.mark.parametrize("mode", ["online", "offline"])
VANDER = np.vander(np.linspace(-1, 1, 100))


class Negated:
    """An element of W changes its sign, once: of the trailing matrix after the first step, or of finished factors."""

    def __init__(self, mode: str, at: tuple[int, int]) -> None:
        stages = {"online": "updated", "offline": "factored"}
        self.stage, self.at, self.done = stages.get(mode, mode), at, False

    def __call__(self, stage: str, arrays: Arrays) -> None:
        if stage == self.stage and not self.done:
            self.done = True
            arrays["W"][self.at] *= -1


def arranged(a: np.ndarray, order: str, dtype: Any) -> np.ndarray:
    return np.array(a, dtype, order="F" if order == "F" else "C")


def negated(mode: str, a: np.ndarray, at: tuple[int, int]) -> tuple[Any, bool]:
    """The report, and whether the factors are wrong."""
    fault = Negated(mode, at)
    (lu, piv), report = protected_lu_factor(a, mode=mode, block=8, on_stage=fault, return_report=True)
    assert fault.done
    return report, bool(lu_outside(lu, piv, a).any())


# On row 84 and 56 the row's bound is made of numbers 1e30 times as large as its elements, and so is the column's.
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("mode", "at"), [("online", (84, 98)), ("offline", (56, 98)), ("offline", (70, 96))])
def test_a_fault_that_no_sum_shows_is_found(mode: str, at: tuple[int, int], dtype: Any, order: str) -> None:
    report, wrong = negated(mode, arranged(VANDER, order, dtype), at)
    assert report.status is Status.CORRECTED
    assert not wrong


GRADED = np.random.default_rng(0).standard_normal((60, 60)) * np.logspace(0, -30, 60)
GRADED_BOTH = GRADED * np.logspace(0, -150, 60)[:, None]


@pytest.mark.parametrize("a", [GRADED, GRADED_BOTH, GRADED.T], ids=["columns", "both", "rows"])
@MODES
def test_faults_where_lines_span_many_decades_are_not_dismissed(mode: str, a: np.ndarray) -> None:
    stage = "finished" if mode == "online" else "factored"
    _, report = protected_lu_factor(a, mode=mode, return_report=True)
    assert report.status is Status.CLEAN
    for at in ((50, 55), (30, 58), (55, 20), (58, 58), (20, 59)):
        done: list[int] = []

        def fault(now: str, arrays: Arrays, at: tuple[int, int] = at, done: list[int] = done) -> None:
            if now == stage and not done:
                done.append(1)
                arrays["W"][at] *= 1.1

        (lu, piv), report = protected_lu_factor(a, mode=mode, return_report=True, on_stage=fault)
        assert report.status is Status.CORRECTED
        assert not lu_outside(lu, piv, a).any()


def test_lines_that_changed_unseen_since_they_were_proved_are_not_taken_for_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Evidence has shown a panel to be right; the sums of its columns do not show what happens to them later."""
    monkeypatch.setattr(lu_checks.LuChecksums, "_judged", lambda *_: False)  # all panels are suspected
    rng, scale = np.random.default_rng(2), 10.0 ** -np.linspace(0, 100, 48)
    a = rng.standard_normal((48, 48)) * scale
    a[rng.random((48, 48)) < 0.6] = 0.0
    a += np.diag(scale)
    for at in ((45, 30), (31, 22), (33, 34), (14, 10), (29, 42)):
        fault = Negated("finished", at)
        (lu, piv), report = protected_lu_factor(a, mode="online", return_report=True, on_stage=fault)
        assert report.ok
        assert not lu_outside(lu, piv, a).any()


@MODES
def test_it_is_missed_without(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = (84, 98) if mode == "online" else (56, 98)
    everywhere(monkeypatch, lu_checks.sees_all, lambda *_: True)
    everywhere(monkeypatch, lu_checks.blind_lines, lambda *_: None)
    report, wrong = negated(mode, VANDER, at)
    assert (report.status, report.suspicions) == (Status.CLEAN, 0)
    assert wrong


@MODES
def test_it_is_told_where_nothing_is_to_be_repaired(mode: str) -> None:
    at = (84, 98) if mode == "online" else (56, 98)
    fault = Negated(mode, at)
    _, report = protected_lu_factor(VANDER, mode=mode, block=8, on_stage=fault, on_error="detect", return_report=True)
    assert report.status is Status.UNCORRECTABLE


@MODES
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("a", [VANDER, np.vander(np.linspace(0.5, 1.5, 60))], ids=["-1 to 1", "0.5 to 1.5"])
def test_right_factors_of_such_matrices_are_clean(a: np.ndarray, dtype: Any, mode: str) -> None:
    _, report = protected_lu_factor(a.astype(dtype), mode=mode, return_report=True)
    assert (report.status, report.faults) == (Status.CLEAN, ())


def sighted() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((150, 150))
    scales = 10.0 ** rng.uniform(-6, 6, (2, 150))
    powers = 2.0 ** -(np.arange(150) * 0.4)
    return {
        "normal": normal,
        "large": normal * 1e200,
        "small": normal * 1e-200,
        "dominant": rng.uniform(-1, 1, (150, 150)) + 150 * np.eye(150),
        "rows and columns scaled": scales[0][:, None] * normal * scales[1],
        "graded": powers[:, None] * normal,
        "tall": normal[:, :60],
        "wide": normal[:60],
        "ones and zeros": rng.integers(0, 2, (150, 150)).astype(float),
    }


@MODES
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("name", sighted())
def test_where_all_is_seen_evidence_is_not_asked(name: str, order: str, mode: str) -> None:
    a = arranged(sighted()[name], order, np.float64)
    _, report = protected_lu_factor(a, mode=mode, return_report=True)
    assert (report.status, report.suspicions) == (Status.CLEAN, 0)
    assert "evidence" not in report.seconds


@MODES
@pytest.mark.parametrize("seed", range(3))
def test_wider_scales_may_ask_for_evidence_and_are_clean(seed: int, mode: str) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = 10.0 ** rng.uniform(-12, 12, (2, 150))
    report = protected_lu_factor(
        rows[:, None] * rng.standard_normal((150, 150)) * columns, mode=mode, return_report=True
    )[1]
    assert (report.status, report.faults) == (Status.CLEAN, ())


def test_in_float32_neither() -> None:
    rng = np.random.default_rng(1)
    for n in (20, 150, 600):
        a = rng.standard_normal((n, n)).astype(np.float32)
        for mode in ("online", "offline"):
            report = protected_lu_factor(a, mode=mode, return_report=True)[1]
            assert (report.status, report.suspicions) == (Status.CLEAN, 0)


# ---- near the end of the range -------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("on_error", [None, "detect"])
@pytest.mark.parametrize("seed", [18, 21, 45])
def test_factors_beyond_the_range_are_unverifiable(seed: int, on_error: str | None, mode: str) -> None:
    a = np.random.default_rng(seed).standard_normal((60, 60)) * 1e307
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        (lu, _), report = protected_lu_factor(a, mode=mode, on_error=on_error, return_report=True)
    if np.isfinite(lu).all():
        assert seed == 21  # its U is within the range, which sums on the way leave by some orders of adding alone
        assert (report.status, warned) == (Status.CLEAN, [])
        return
    assert [one.category for one in warned] == [UnverifiableWarning]
    assert report.status is Status.UNVERIFIABLE
    assert GROWN in report.reasons


@MODES
def test_factors_just_within_it_are_clean(mode: str) -> None:
    for seed in range(4):
        a = np.random.default_rng(seed).standard_normal((60, 60)) * 1e306
        assert protected_lu_factor(a, mode=mode, return_report=True)[1].status is Status.CLEAN


# ---- a checksum that is lost ---------------------------------------------------------------------------------------

SYMMETRIC = {(n, kind): np.vander(np.linspace(-1, 1, n)).astype(kind) for n in (40, 64, 100) for kind in "df"}


@pytest.mark.parametrize("name", ["y", "g"])
@pytest.mark.parametrize(("n", "kind", "line"), [(64, "f", 25), (100, "f", 89), (100, "f", 26), (40, "d", 26)])
@pytest.mark.parametrize("value", [np.nan, 1e3])
def test_a_lost_checksum_leaves_the_factors(name: str, n: int, kind: str, line: int, value: float) -> None:
    a = SYMMETRIC[n, kind]

    def lost(stage: str, arrays: Arrays) -> None:
        if stage == "finished":
            arrays[name][line] = value

    (lu, piv), report = protected_lu_factor(a, mode="online", on_stage=lost, return_report=True)
    right = protected_lu_factor(a, mode="online")
    assert report.status is Status.CHECKSUM_FAULT
    np.testing.assert_array_equal(lu, right[0])
    np.testing.assert_array_equal(piv, right[1])


@pytest.mark.parametrize("at", [(25, 25), (25, 40), (50, 25), (63, 63)])
@pytest.mark.parametrize("name", ["vander", "normal"])
def test_a_finished_element_that_is_wrong_is_repaired(name: str, at: tuple[int, int]) -> None:
    a = SYMMETRIC[64, "d"] if name == "vander" else np.random.default_rng(2).standard_normal((64, 64))
    done: list[int] = []

    def wrong(stage: str, arrays: Arrays) -> None:
        if stage == "finished" and not done:
            done.append(1)
            arrays["W"][at] += 1.0

    (lu, piv), report = protected_lu_factor(a, mode="online", on_stage=wrong, return_report=True)
    assert report.status is Status.CORRECTED
    assert not lu_outside(lu, piv, a).any()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_small_elements_of_a_finished_line_are_repaired_with_the_large_ones(dtype: Any) -> None:
    """Two ways to compute an element may be as far apart as rounding of its column's largest: small ones that are wrong
    by less are told by evidence."""
    distance = np.abs(np.subtract.outer(np.arange(96), np.arange(96)))
    a = (0.9**distance).astype(dtype)
    clean = protected_lu_factor(a, mode="online", block=16)
    done: list[int] = []

    def wrong(stage: str, arrays: Arrays) -> None:
        if stage == "finished" and not done:
            done.append(1)
            arrays["W"][27:91, :22] *= 1 + dtype(2e4) * np.finfo(dtype).eps

    (lu, piv), report = protected_lu_factor(a, mode="online", block=16, on_stage=wrong, return_report=True)
    assert report.status is Status.CORRECTED
    np.testing.assert_array_equal(piv, clean[1])
    assert not lu_outside(lu, piv, a).any()


def test_evidence_of_a_part_is_as_sharp_as_that_of_the_whole() -> None:
    """Ones on the diagonal of L that meet nothing in the part must not set the scale of its rows."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((35, 35)) * 10.0 ** rng.integers(-150, 150, (35, 1))
    lu, piv = protected_lu_factor(a)
    sizes = abs(lu[20:, :6])
    i, c = (int(x) for x in np.unravel_index(sizes.argmin(), sizes.shape))
    lu[20 + i, c] *= -1
    evidence = FactorEvidence(a, lu, piv)
    evidence.compare(slice(0, 35), slice(0, 16), 35)
    assert evidence.verdict().rows == factor_evidence(a, lu, piv).rows == {20 + i}


@MODES
@pytest.mark.parametrize("shape", [(51, 40), (40, 51), (45, 45)])
def test_subnormal_matrices_are_unverifiable_whatever_their_shape(shape: tuple[int, int], mode: str) -> None:
    """LAPACK does not divide by such pivots: P A is 1e310 times as large as L U in the rows of a tall one."""
    a = np.random.default_rng(0).standard_normal(shape) * 1e-310
    with pytest.warns(UnverifiableWarning):
        _, report = protected_lu_factor(a, mode=mode, return_report=True)
    assert report.status is Status.UNVERIFIABLE


@pytest.mark.parametrize("wrong", [False, True])
def test_an_infinity_in_a_that_came_later_does_not_excuse_factors(wrong: bool) -> None:
    """Factors of what A has become are beyond the range, which says nothing of those that were asked for."""
    A = VANDER.copy()

    def fault(stage: str, arrays: Any) -> None:
        if stage == "finished":
            arrays["A"][1, 7] = np.inf
            arrays["W"][50, 60] += wrong

    _, report = protected_lu_factor(A, mode="online", block=8, on_stage=fault, on_error="detect", return_report=True)
    assert report.status is Status.INPUT_CHANGED
    assert not any("range of the type" in reason for reason in report.reasons)
