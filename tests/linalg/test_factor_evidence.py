"""Statistical bounds raise suspicions, evidence convicts: factorisations and solutions, element by element."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import scipy.linalg

from abft_tsm2 import Status, protected_cholesky, protected_lu_factor, protected_solve
from abft_tsm2.errors import SilentDataCorruptionError, UnverifiableWarning
from abft_tsm2.linalg import certify, evidence
from abft_tsm2.linalg.cholesky_checks import CholeskyChecksums, SymmetricChecksums
from abft_tsm2.linalg.encode import MatrixChecksums
from abft_tsm2.linalg.evidence import definite_evidence, factor_evidence
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.lu_checks import LuChecksums
from tests.support.factor_cases import lu_outside

Arrays = Mapping[str, Any]


def orthogonal(n: int, rng: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((n, n)))[0]


def lehmer(n: int) -> np.ndarray:
    i = np.arange(1.0, n + 1)
    return np.minimum.outer(i, i) / np.maximum.outer(i, i)


def clustered(n: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    return orthogonal(n, rng) @ np.diag(np.r_[1, np.full(n - 1, 1e-8)]) @ orthogonal(n, rng)


def rank_one(n: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    return np.outer(rng.standard_normal(n), rng.standard_normal(n)) + 1e-9 * rng.standard_normal((n, n))


def scaled_rows(n: int) -> np.ndarray:
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, n)) * 10.0 ** rng.integers(-150, 150, (n, 1))


# Rounding errors that are no random walk: every one was refused, or called CORRECTED, by bounds that take them for one.
STRUCTURED = {
    "vandermonde": np.vander(np.linspace(0.1, 3, 360)),
    "vandermonde around 1": np.vander(np.linspace(0.5, 1.5, 341)),
    "increasing": np.vander(np.linspace(0.1, 1.3, 163), increasing=True),
    "lehmer": lehmer(261).astype(np.float32),
    "clustered": clustered(257).astype(np.float32),
    "rank one": rank_one(115).astype(np.float32),
    "scaled rows": scaled_rows(315),
}


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("name", STRUCTURED)
def test_right_factors_of_structured_matrices_are_clean(name: str, mode: str) -> None:
    (_, _), report = protected_lu_factor(STRUCTURED[name], mode=mode, return_report=True)
    assert (report.status, report.faults) == (Status.CLEAN, ())


def test_they_were_suspected() -> None:
    reports = [protected_lu_factor(a, mode="online", return_report=True)[1] for a in STRUCTURED.values()]
    assert sum(report.suspicions > 0 for report in reports) >= 3
    assert all("evidence" in report.seconds for report in reports if report.suspicions)


@pytest.mark.parametrize("name", ["lehmer", "scaled rows", "increasing"])
def test_their_solutions_are_clean(name: str) -> None:
    a = STRUCTURED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are ill-conditioned
        _, report = protected_solve(a, a @ np.ones(len(a), a.dtype), return_report=True)
    assert (report.status, report.faults) == (Status.CLEAN, ())


# ---- what evidence convicts ----------------------------------------------------------------------------------------


def unpivoted(a: np.ndarray) -> np.ndarray:
    """Packed factors without exchanges."""
    w = a.copy()
    for k in range(len(a)):
        w[k + 1 :, k] /= w[k, k]
        w[k + 1 :, k + 1 :] -= np.outer(w[k + 1 :, k], w[k, k + 1 :])
    return w


def small_pivot() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Factors with a pivot that was not the largest of its column: L of 1e13, and a residual within gamma |L||U|."""
    a = np.random.default_rng(0).standard_normal((40, 40))
    a[0, 0] = 1e-13
    return a, unpivoted(a), np.arange(40, dtype=np.int32)


def test_a_wrong_small_pivot_hides_within_the_bound_and_is_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    a, w, piv = small_pivot()
    lower, upper = np.tril(w, -1) + np.eye(40), np.triu(w)
    assert abs(lower).max() > 1e12
    assert abs(lower @ upper - a).max() > 1e-5
    assert not lu_outside(w, piv, a).any()
    found = factor_evidence(a, w, piv)
    assert not found.right
    assert 0 in found.columns
    monkeypatch.setattr(evidence, "largest_multiplier", lambda _: np.inf)
    assert factor_evidence(a, w, piv).right


def planted(a: np.ndarray, w: np.ndarray, piv: np.ndarray) -> Callable[[str, Arrays], None]:
    def hook(stage: str, arrays: Arrays) -> None:
        if stage == "factored":
            arrays["W"][...], arrays["piv"][...] = w, piv

    return hook


def test_a_wrong_small_pivot_is_factored_again() -> None:
    a, w, piv = small_pivot()
    (lu, found), report = protected_lu_factor(a, mode="offline", return_report=True, on_stage=planted(a, w, piv))
    assert report.status is Status.CORRECTED
    assert not lu_outside(lu, found, a).any()
    assert abs(np.tril(lu, -1)).max() <= 1
    with pytest.raises(SilentDataCorruptionError):
        protected_lu_factor(a, mode="offline", on_error="raise", on_stage=planted(a, w, piv))


@pytest.mark.parametrize("of", ["L", "pivots"])
def test_rows_in_the_wrong_order_are_convicted(of: str) -> None:
    a = np.random.default_rng(1).standard_normal((60, 60))
    w, piv = scipy.linalg.lu_factor(a)
    assert factor_evidence(a, w, piv).right
    if of == "L":
        w[[40, 50], :30] = w[[50, 40], :30]
        expected = {40, 50}
    else:
        changed = next(i for i in range(60) if piv[i] not in (i, 59))
        piv[changed] += 1
        expected = set()
    found = factor_evidence(a, w, piv)
    assert not found.right
    assert expected <= found.rows


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_any_element_that_is_far_off_is_convicted(value: float, dtype: Any) -> None:
    a = np.random.default_rng(2).standard_normal((50, 70)).astype(dtype)
    w, piv = scipy.linalg.lu_factor(a)
    for place in ((30, 20), (20, 30), (20, 20), (10, 69)):
        wrong = w.copy()
        wrong[place] = value
        assert not factor_evidence(a, wrong, piv).right


def test_blocks_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("abft_tsm2.core.accurate.BLOCK", 16)
    for shape in ((50, 70), (70, 50), (64, 64)):
        a = np.random.default_rng(3).standard_normal(shape)
        w, piv = scipy.linalg.lu_factor(a)
        assert factor_evidence(a, w, piv).right
        w[40, 45] *= 1 + 1e-9
        found = factor_evidence(a, w, piv)
        assert 40 in found.rows
        assert 45 in found.columns


# ---- in the middle of a factorisation ------------------------------------------------------------------------------


@pytest.fixture
def suspicious(monkeypatch: pytest.MonkeyPatch) -> None:
    """All statistical checks fail."""
    monkeypatch.setattr(LuChecksums, "_judged", lambda *_: False)
    monkeypatch.setattr(CholeskyChecksums, "check", _failing(CholeskyChecksums.check))
    monkeypatch.setattr("abft_tsm2.linalg.lu.whole", lambda *_: LineCheck.of(np.ones(1), np.zeros(1)))
    monkeypatch.setattr("abft_tsm2.linalg.lu.certificate", lambda *_, **__: [LineCheck.of(np.ones(1), np.zeros(1))])


def _failing(check: Callable[..., bool]) -> Callable[..., bool]:
    def fails(*given: Any, **options: Any) -> bool:
        check(*given, **options)
        return False

    return fails


@pytest.mark.usefixtures("suspicious")
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(70, 70), (90, 60), (60, 90)])
def test_where_every_step_is_suspected_the_result_is_the_same(shape: tuple[int, int], dtype: Any) -> None:
    a = np.random.default_rng(4).standard_normal(shape).astype(dtype)
    (lu, piv), report = protected_lu_factor(a, mode="online", block=16, return_report=True)
    assert (report.status, report.faults) == (Status.CLEAN, ())
    assert report.suspicions == 2 * len(range(0, min(shape), 16)) + 1
    assert not lu_outside(lu, piv, a).any()


@pytest.mark.usefixtures("suspicious")
@pytest.mark.parametrize("stage", ["panel", "solved", "updated"])
def test_where_every_step_is_suspected_a_fault_is_found(stage: str) -> None:
    a = np.random.default_rng(5).standard_normal((80, 80))

    def fault(now: str, arrays: Arrays) -> None:
        if now == stage and arrays["step"] == (16, 32) and not seen:
            seen.append(now)
            place = {"panel": (60, 20), "solved": (20, 60), "updated": (60, 70)}[stage]
            arrays["W"][place] += 0.25

    seen: list[str] = []
    (lu, piv), report = protected_lu_factor(a, mode="online", block=16, return_report=True, on_stage=fault)
    assert report.status is Status.CORRECTED
    assert not lu_outside(lu, piv, a).any()


@pytest.mark.usefixtures("suspicious")
def test_cholesky_where_every_step_is_suspected() -> None:
    x = np.random.default_rng(6).standard_normal((70, 90))
    _, report = protected_cholesky(x @ x.T, block=16, return_report=True)
    assert (report.status, report.faults, report.suspicions) == (Status.CLEAN, (), 5)


def test_a_matrix_that_changed_is_not_borne_out() -> None:
    """The factors of what A has become are right, and not those that were asked for."""

    def change(stage: str, arrays: Arrays) -> None:
        if stage == "encoded":
            arrays["A"][3, 4] += 1.0

    a = np.random.default_rng(7).standard_normal((50, 50))
    with pytest.raises(SilentDataCorruptionError) as caught:
        protected_lu_factor(a, mode="offline", on_stage=change)
    assert Status.INPUT_CHANGED in (caught.value.report.status, *caught.value.report.also)


# ---- Cholesky ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_evidence_of_cholesky(dtype: Any) -> None:
    x = np.random.default_rng(8).standard_normal((60, 90))
    a = (x @ x.T).astype(dtype)
    lower = np.tril(scipy.linalg.cholesky(a, lower=True))
    assert definite_evidence(a, lower, slice(0, 60)).right
    assert definite_evidence(a, lower, slice(20, 40)).right
    wrong = lower.copy()
    wrong[50, 30] *= 1 + 1e6 * np.finfo(dtype).eps
    found = definite_evidence(a, wrong, slice(0, 60))
    assert (50 in found.rows, 30 in found.columns) == (True, True)
    assert definite_evidence(a, wrong, slice(0, 20)).right
    turned = lower.copy()
    turned[:, 30] *= -1  # the same product
    assert definite_evidence(a, turned, slice(0, 60)).columns == {30}


# ---- the ends of the range -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "scale"), [(np.float64, 1e-310), (np.float32, 1e-39), (np.float32, 1e-42)])
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_subnormal_pivots_are_unverifiable_and_named(mode: str, dtype: Any, scale: float) -> None:
    a = (np.random.default_rng(0).standard_normal((5, 5)) * scale).astype(dtype)
    lu, _ = scipy.linalg.lu_factor(a)
    with pytest.warns(UnverifiableWarning):
        _, report = protected_lu_factor(a, mode=mode, return_report=True)
    assert report.status is Status.UNVERIFIABLE
    assert report.faults == ()
    assert f"the pivot of column 0 is {lu[0, 0]:.3g}" in report.reasons[0]


@pytest.mark.filterwarnings("ignore:Diagonal number")  # SciPy warns of a pivot that is zero
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("n", [17, 64])
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_columns_down_to_the_smallest_numbers_are_unverifiable(mode: str, n: int, dtype: Any) -> None:
    """The first pivots are subnormal, the last of them zero."""
    tiny = np.finfo(dtype).tiny
    a = np.random.default_rng(0).standard_normal((n, n)) * np.logspace(-1, -20, n) * tiny
    a = a.astype(dtype)
    pivot = scipy.linalg.lu_factor(a)[0][0, 0]
    with pytest.warns(UnverifiableWarning):
        _, report = protected_lu_factor(a, mode=mode, return_report=True)
    assert (report.status, report.faults) == (Status.UNVERIFIABLE, ())
    assert f"the pivot of column 0 is {pivot:.3g}" in report.reasons[0]


@pytest.mark.filterwarnings("ignore:An ill-conditioned")
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_factors_less_than_what_underflow_may_take_are_unverifiable(mode: str) -> None:
    """LAPACK's L is zero but for its diagonal, and all sums are within their bounds."""
    n = 200
    a = np.ldexp(np.eye(n) - np.tril(np.full((n, n), 0.63), -1), -140).astype(np.float32)
    a[:, -1] = 2.0**-140
    b = np.ldexp(np.ones(n), -70).astype(np.float32)
    with pytest.warns(UnverifiableWarning):
        _, report = protected_lu_factor(a, mode=mode, return_report=True)
    assert (report.status, report.faults) == (Status.UNVERIFIABLE, ())
    assert "the pivot of column 0 is" in report.reasons[0]
    with pytest.warns(UnverifiableWarning):
        _, report = protected_solve(a, b, mode=mode, return_report=True)
    assert (report.status, report.faults) == (Status.UNVERIFIABLE, ())
    assert "the pivot of column 0 is" in report.reasons[0]


def test_a_subnormal_pivot_excuses_no_fault() -> None:
    a = np.random.default_rng(9).standard_normal((30, 30))
    a[:, 29] *= 1e-310
    w, piv = scipy.linalg.lu_factor(a)
    assert factor_evidence(a, w, piv).right
    w[10, 20] *= 1.001
    assert not factor_evidence(a, w, piv).right


def test_a_matrix_of_small_numbers_is_clean() -> None:
    a = np.random.default_rng(10).standard_normal((60, 60)) * 1e-300
    assert protected_lu_factor(a, return_report=True)[1].status is Status.CLEAN


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("power", [155, 250, 300, -155, -250, -300])
@pytest.mark.parametrize("of", ["a", "b"])
def test_solutions_of_any_scale_are_clean(of: str, power: int, refine: bool) -> None:
    rng = np.random.default_rng(11)
    a, b = rng.standard_normal((30, 30)), rng.standard_normal((30, 2))
    scaled = {"a": a, "b": b, of: {"a": a, "b": b}[of] * 10.0**power}
    x, report = protected_solve(scaled["a"], scaled["b"], refine=refine, return_report=True)
    assert (report.status, report.faults) == (Status.CLEAN, ())
    expected = scipy.linalg.solve(a, b)
    assert np.allclose(x / 10.0 ** (power if of == "b" else 0) * (10.0**power if of == "a" else 1), expected)


@pytest.mark.parametrize("stage", ["forward", "backward", "refined"])
@pytest.mark.parametrize("power", [0, 200, -200])
def test_a_fault_in_a_solution_of_any_scale_is_found(power: int, stage: str) -> None:
    rng = np.random.default_rng(12)
    a, b = rng.standard_normal((30, 30)), rng.standard_normal(30) * 10.0**power
    seen: list[str] = []

    def fault(now: str, arrays: Arrays) -> None:
        name = {"forward": "z", "backward": "x", "refined": "x"}[stage]
        if now == stage and not seen:
            seen.append(now)
            arrays[name][7] *= 1.01

    x, report = protected_solve(a, b, refine=True, return_report=True, on_stage=fault)
    assert report.status is Status.CORRECTED
    assert np.allclose(a @ x / 10.0**power, b / 10.0**power)


def test_a_refinement_that_leads_astray_is_no_fault() -> None:
    a = np.triu(np.random.default_rng(106).standard_normal((166, 166)))  # its condition number is beyond 1/u
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, report = protected_solve(a, a @ np.ones(166), refine=True, return_report=True)
        expected = protected_solve(a, a @ np.ones(166))
    assert (report.status, report.faults) == (Status.CLEAN, ())
    assert np.array_equal(x, expected)


# ---- lines that a certificate suspects -----------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_an_element_beyond_all_that_rounding_may_do_is_not_explained(dtype: Any, axis: int) -> None:
    """It may be within what rounding of its line usually is, which counts every element of it for the largest."""
    a = np.random.default_rng(3).random((160, 160)).astype(dtype)
    lu, piv = scipy.linalg.lu_factor(a)
    W, at = np.array(lu, order="F"), (92, 155)
    carried = LuChecksums(a, MatrixChecksums.of(a), W)
    assert carried.order_by(piv)
    L, U = np.tril(abs(W), -1) + np.eye(160), np.triu(abs(W))
    assert certify._explained(a, W, carried, at[axis], axis)
    W[at] += 2.5 * 93 * np.finfo(dtype).eps / 2 * (L @ U)[at]
    assert lu_outside(W, piv, a)[at]
    assert not certify._explained(a, W, carried, at[axis], axis)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_nor_is_one_of_a_triangle(dtype: Any) -> None:
    a = lehmer(160).astype(dtype)
    W, at = np.asfortranarray(np.linalg.cholesky(a)), (155, 12)
    state = CholeskyChecksums(a, W, SymmetricChecksums.of(a))
    line = np.array([at[1]])
    assert bool(state._explained(line)[0])
    W[at] += 2 * 16 * np.finfo(dtype).eps / 2 * (abs(W) @ abs(W).T)[at] / W[12, 12]
    assert not bool(state._explained(line)[0])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("column", [0, 7, 20])
def test_rows_show_what_cancels_in_the_sum_of_a_column(column: int, dtype: Any) -> None:
    """Two elements of a column of the trailing matrix change so that w'W stays: in the next panel, or right of it. The
    sums of their rows show it, and evidence that clears these has to look at that column."""
    n, block = 60, 16
    a = np.random.default_rng(column).standard_normal((n, n)).astype(dtype)
    for first, second in ((20, 50), (40, 55), (17, 18)):
        planted: list[float] = []

        def cancelling(stage: str, arrays: Arrays) -> None:
            if stage == "updated" and not planted:  # noqa: B023
                W, w = arrays["W"], np.asarray(arrays["w"], np.float64)
                for i, sign in ((first, 1), (second, -1)):  # noqa: B023
                    W[i, block + column] += dtype(sign * 0.01 / w[i])
                    planted.append(float(w[i]))  # noqa: B023

        factors, report = protected_lu_factor(a, mode="online", block=block, return_report=True, on_stage=cancelling)
        assert len(planted) == 2
        assert report.status is Status.CORRECTED
        assert not lu_outside(*factors, a).any()
