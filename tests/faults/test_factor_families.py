"""The matrices that campaigns factor without a fault are what they are said to be, and are judged as SciPy does."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.linalg import LinAlgError

from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.faults.judge.factor_oracle import backward_error, lu_error, unit
from abft_tsm2.faults.operands.matrices import BASIC, DEFINITE, FAMILIES
from abft_tsm2.faults.operands.spectra import VALUES
from abft_tsm2.faults.trials import factor_calls
from abft_tsm2.faults.trials.factor import FactorTrials, require_workload
from abft_tsm2.faults.trials.factor_calls import FactorProblem, Watch
from abft_tsm2.faults.trials.trial import Finding, Trial, Workload
from abft_tsm2.report import Status

NEW = [name for name in FAMILIES if name not in BASIC]


def made(name: str, n: int, dtype: str = "float64", seed: int = 0) -> np.ndarray:
    return FAMILIES[name](n, np.random.default_rng([seed, n]), dtype)


def workload(operation: str, family: str, n: int = 40, dtype: str = "float64", **options: Any) -> Workload:
    return Workload(operation, n, n, n, dtype, family, "F", (1, 2), tuple(options.items()))


def clean(operation: str, scheme: str, family: str, *args: Any, **options: Any) -> Finding:
    """What becomes of one trial without a fault."""
    (found,) = FactorTrials(workload(operation, family, *args, **options), np).run([Trial(5, (), scheme)])
    return found


def test_there_are_more_than_sixty_kinds() -> None:
    assert len(NEW) >= 60
    assert set(BASIC) <= set(FAMILIES)
    assert set(FAMILIES) >= DEFINITE


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", NEW)
def test_they_are_finite_and_follow_from_the_seed_and_lapack_factors_them(name: str, dtype: str) -> None:
    from scipy import linalg

    for n in (1, 2, 3, 34, 90):
        a = made(name, n, dtype)
        assert (a.shape, a.dtype) == ((n, n), np.dtype(dtype))
        assert np.isfinite(a).all()
        assert a.tobytes() == made(name, n, dtype).tobytes()
        if name == "subnormal":
            assert (abs(a) < np.finfo(dtype).tiny).all()
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", linalg.LinAlgWarning)
            lu, piv = linalg.lu_factor(a)
        assert backward_error(a, lu, piv) <= 50 * unit(dtype)
        if name in DEFINITE:
            np.testing.assert_array_equal(a, a.T)


def test_some_are_what_their_names_say() -> None:
    np.testing.assert_allclose(made("vander 0.5 1.5", 5), np.vander(np.linspace(0.5, 1.5, 5)), rtol=1e-14)
    np.testing.assert_allclose(
        made("vander 0.1 1.3 increasing", 5), np.vander(np.linspace(0.1, 1.3, 5), increasing=True), rtol=1e-14
    )
    np.testing.assert_allclose(made("vander -1 1", 5), np.vander(np.linspace(-1, 1, 5)), rtol=1e-14)
    np.testing.assert_array_equal(made("moler", 3), [[1, -1, -1], [-1, 2, 0], [-1, 0, 3]])
    np.testing.assert_array_equal(made("frank", 4), [[4, 3, 2, 1], [3, 3, 2, 1], [0, 2, 2, 1], [0, 0, 1, 1]])
    np.testing.assert_array_equal(made("pascal", 4), [[1, 1, 1, 1], [1, 2, 3, 4], [1, 3, 6, 10], [1, 4, 10, 20]])
    np.testing.assert_array_equal(made("gfpp", 3), [[1, 0, 1], [-1, 1, 1], [-1, -1, 1]])
    np.testing.assert_allclose(made("binomial", 3), [[1, 0, 0], [0.5, -0.5, 0], [0.25, -0.5, 0.25]])
    np.testing.assert_array_equal(made("magic", 3).sum(0), [15, 15, 15])
    np.testing.assert_allclose(made("invhilb", 6) @ made("hilbert", 6), np.eye(6), atol=1e-8)
    np.testing.assert_allclose(made("invol", 6) @ made("invol", 6), np.eye(6), atol=1e-7)
    np.testing.assert_array_equal(made("hadamard", 8) @ made("hadamard", 8).T, 8 * np.eye(8))
    for number in (1, 2, 3, 4, 5, 6):
        q = made(f"orthog {number}", 7)
        if number == 3:  # its first column is longer
            q[:1] /= np.sqrt(7)
            q[1:] *= np.sqrt(2 / 7)
        np.testing.assert_allclose(q @ q.T, np.eye(7), atol=1e-13)
    values = np.linalg.svd(made("svd log", 30), compute_uv=False)
    np.testing.assert_allclose(values, VALUES["log"](30, np.random.default_rng(), 2.0**26), rtol=1e-6)
    assert np.linalg.eigvalsh(made("poev cluster0", 30))[0] > 0
    assert np.linalg.matrix_rank(made("rank 10", 40)) == 10


def test_definite_ones_are_factored_as_they_are_and_products_of_others_are() -> None:
    assert np.array_equal(FactorProblem.of(workload("cholesky", "lehmer")).a, made("lehmer", 40))
    for name in ("vander -1 1", "tiny", "one element", "rows scaled by powers of ten"):
        a = FactorProblem.of(workload("cholesky", name)).a
        assert np.isfinite(a).all()
        assert np.linalg.eigvalsh(a)[0] > 0


# ---- what becomes of a trial without a fault -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["online", "offline", "auto"])
def test_a_right_factorisation_is_clean(mode: str) -> None:
    assert clean("lu", mode, "normal").outcome == "clean"


@pytest.mark.parametrize(
    ("operation", "scheme", "family", "status"),
    [
        ("lu", "online", "one element", "CLEAN"),  # a zero pivot is a warning
        ("solve", "protected", "one element", "LinAlgError"),
        ("cholesky", "protected", "hilbert", "LinAlgError"),
    ],
)
def test_what_is_singular_is_as_it_is_in_scipy(operation: str, scheme: str, family: str, status: str) -> None:
    found = clean(operation, scheme, family)
    assert (found.outcome, found.status) == ("clean", status)


def test_a_matrix_is_singular_by_its_pivots_and_eigenvalues() -> None:
    assert not FactorProblem.of(workload("solve", "normal")).nearly_singular()
    assert FactorProblem.of(workload("solve", "rank 10")).nearly_singular()
    assert not FactorProblem.of(workload("cholesky", "tridiag")).nearly_singular()
    assert FactorProblem.of(workload("cholesky", "hilbert")).nearly_singular()


def test_refusing_what_scipy_factors_is_none_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise LinAlgError("no")

    monkeypatch.setattr(factor_calls, "protected_cholesky", refuse)
    monkeypatch.setattr(factor_calls, "protected_solve", refuse)
    assert clean("cholesky", "protected", "tridiag").outcome == "crash"
    assert clean("solve", "protected", "normal").outcome == "crash"
    assert clean("solve", "protected", "rank 10").outcome == "clean"


@pytest.mark.parametrize(
    ("status", "family", "outcome"),
    [
        (Status.UNVERIFIABLE, "subnormal", "clean"),
        (Status.UNVERIFIABLE, "normal", "false_alarm"),
        (Status.CORRECTED, "subnormal", "false_alarm"),
        (Status.UNCORRECTABLE, "normal", "false_alarm"),
    ],
)
def test_any_other_verdict_is_an_alarm_but_of_subnormal_numbers(
    status: Status, family: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = factor_calls.protected_lu_factor

    def otherwise(*args: Any, **options: Any) -> Any:
        result, report = said(*args, **options)
        report = replace(report, status=status)
        if status is Status.UNCORRECTABLE:
            raise SilentDataCorruptionError(report)
        return result, report

    monkeypatch.setattr(factor_calls, "protected_lu_factor", otherwise)
    assert clean("lu", "online", family).outcome == outcome


@pytest.mark.parametrize(("status", "outcome"), [(Status.CLEAN, "sdc"), (Status.UNVERIFIABLE, "false_alarm")])
def test_a_wrong_result_that_is_called_clean_is_silent_corruption(
    status: Status, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = factor_calls.protected_lu_factor

    def spoilt(*args: Any, **options: Any) -> Any:
        (lu, piv), report = said(*args, **options)
        lu[-1, -1] *= 1.0001
        return (lu, piv), replace(report, status=status)

    monkeypatch.setattr(factor_calls, "protected_lu_factor", spoilt)
    assert clean("lu", "online", "normal").outcome == outcome


def test_of_large_factors_some_rows_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = FactorProblem.of(workload("lu", "normal", 300))
    answer = problem.call("offline", Watch())
    full = lu_error(problem.a, answer.result)
    monkeypatch.setattr("abft_tsm2.faults.judge.factor_oracle.LARGE", 200)
    # Not at most `full`: the error is in units of the largest row that is judged, which the rows left out may exceed.
    assert 0 < lu_error(problem.a, answer.result) <= 2 * full
    answer.result[0][-1, :] += 1.0  # the last row is among them
    assert lu_error(problem.a, answer.result) > 1e6 * full


def test_a_family_that_there_is_not_is_told_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'lehmer'"):
        require_workload(workload("lu", "lehmar"))
