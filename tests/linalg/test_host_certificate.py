"""Sums of NumPy's factors, and the certificate in few calls: against sums in longer arithmetic, the certificate line by
line, and planted faults; each check is missed where it is taken away."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Status, protected_lu_factor
from abft_tsm2.checksum.bounds import factored_bound
from abft_tsm2.checksum.rigorous import largest_multiplier
from abft_tsm2.linalg import certify, host_certificate, host_sums
from abft_tsm2.linalg.encode import MatrixChecksums
from abft_tsm2.linalg.host_certificate import checks_of_clean
from abft_tsm2.linalg.host_sums import factor_sums, multipliers_within
from abft_tsm2.linalg.outcome import FactorOutcome
from tests.support.factor_cases import DTYPES, lu_outside, permutation
from tests.support.planting import everywhere, normal

Patch = pytest.MonkeyPatch
SHAPES = [
    (1, 1),
    (7, 7),
    (64, 64),
    (65, 65),
    (129, 129),
    (300, 300),
    (300, 120),
    (120, 300),
    (1, 9),
    (9, 1),
    (260, 257),
]
OF_TYPE = pytest.mark.parametrize("dtype", DTYPES, ids=[dtype.name for dtype in DTYPES])
OF_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)
VANDER = np.vander(np.linspace(-1, 1, 100))


def long(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.longdouble)


def near(found: np.ndarray, exact: np.ndarray, size: np.ndarray) -> bool:
    """Within what sums in float64 round, of terms the moduli of which add up to `size`."""
    return bool((abs(found - exact) <= 1e3 * np.finfo(float).eps * size).all()) and found.dtype == np.float64


def triangles(W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    K = min(W.shape)
    return np.tril(long(W)[:, :K], -1) + np.eye(len(W), K), np.triu(long(W)[:K])


@pytest.fixture(params=[512, 64, 7])
def widened(request: pytest.FixtureRequest, monkeypatch: Patch) -> None:
    """Columns that are widened at once."""
    monkeypatch.setattr(host_sums, "WIDENED", request.param)
    monkeypatch.setattr(host_sums, "KEPT", 2)


@OF_TYPE
@OF_SHAPE
@pytest.mark.usefixtures("widened")
def test_sums_of_factors(shape: tuple[int, int], dtype: Any) -> None:
    W = np.array(normal(*shape), dtype, order="F")
    if not host_sums.reads_at_once(W):
        assert dtype == np.float64
        assert shape[0] != shape[1]  # `certify.read` serves it
        return
    v, w = normal(shape[1], seed=1), normal(shape[0], seed=2)
    L, U = triangles(W)
    found = factor_sums(W, w, v)
    g, y = long(w) @ L, U @ long(v)
    of_g, of_y = abs(long(w)) @ abs(L), abs(U) @ abs(long(v))
    assert near(found.g, g, of_g)
    assert near(found.y, y, of_y)
    assert near(found.gU, g @ U, of_g @ abs(U))
    assert near(found.Ly, L @ y, abs(L) @ of_y)


@OF_TYPE
@OF_SHAPE
def test_multipliers_above_one_are_found(shape: tuple[int, int], dtype: Any) -> None:
    rng, (m, n) = np.random.default_rng(0), shape
    W = np.array(rng.uniform(-1, 1, shape), dtype, order="F")
    W[np.triu_indices(m, 0, n)] = np.nan  # U is not looked at
    assert multipliers_within(W, 1.0)
    below = [(i, j) for i in range(m) for j in range(min(i, n))]
    some = below if len(below) < 300 else [below[k] for k in rng.integers(0, len(below), 300)]
    for at in some:
        kept = W[at]
        for value in (1.5, -1.5, np.inf, -np.inf):
            W[at] = value
            assert not multipliers_within(W, 1.0), at
        W[at] = kept


# ---- the certificate -----------------------------------------------------------------------------------------------


def factored(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, MatrixChecksums]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", linalg.LinAlgWarning)  # some are singular
        lu, piv = linalg.lu_factor(a)
    return np.array(lu, order="F"), piv, MatrixChecksums.of(a)


def line_by_line(a: np.ndarray, W: np.ndarray, piv: np.ndarray, e: MatrixChecksums, patch: Patch) -> Any:
    """The other certificate."""
    with patch.context() as without:
        without.setattr(certify, "reads_at_once", lambda W: False)
        return certify.certified(a, W, piv, e)


def matrices(dtype: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((150, 150))
    return {
        "normal": x,
        "tall": rng.standard_normal((150, 60)),
        "wide": rng.standard_normal((60, 150)),
        "graded rows": x * np.logspace(0, -12, 150)[:, None],
        "graded columns": x * np.logspace(8, -8, 150),
        "large": x * 1e25,
        "small": x * 1e-25,
        "uniform": rng.random((150, 150)),
        "integers": rng.integers(-3, 4, (150, 150)).astype(float),
        "diagonal": np.diag(rng.random(150)),
        "triangle": np.tril(x),
        "zero row": np.where(np.arange(150)[:, None] == 70, 0.0, x),
        "rank 1": np.outer(x[0], x[1]),
        "one": np.ones((1, 1)),
    }


@OF_TYPE
@pytest.mark.parametrize("name", matrices(float))
def test_it_agrees_with_the_certificate_line_by_line(name: str, dtype: Any, monkeypatch: Patch) -> None:
    a = matrices(float)[name].astype(dtype)
    W, piv, e = factored(a)
    with np.errstate(all="ignore"):
        other = line_by_line(a, W, piv, e, monkeypatch)
        found = checks_of_clean(W, piv, e) if host_sums.reads_at_once(W) else None
    if found:
        assert other.outcome is FactorOutcome.CERTIFIED
        for one, two in zip(found, other.checks, strict=True):
            assert (one.side, one.lines, one.verified) == (two.side, two.lines, two.verified)
            assert one.bound == pytest.approx(two.bound, rel=1e-9)
            assert one.detection_limit == pytest.approx(two.detection_limit, rel=1e-9)
            assert one.closest == pytest.approx(two.closest, rel=0.05, abs=0.02)
    if name in ("normal", "graded columns", "large", "uniform"):
        assert found


def planted(W: np.ndarray, piv: np.ndarray, rng: np.random.Generator, size: float) -> None:
    """A fault of this size, in units of an element, in L, in U or in a pivot."""
    i, j = rng.integers(W.shape[0]), rng.integers(W.shape[1])
    W[i, j] += W.dtype.type(size) * max(abs(W[i, j]), W.dtype.type(0.1))


@OF_TYPE
def test_it_doubts_what_the_certificate_line_by_line_does_not_certify(dtype: Any, monkeypatch: Patch) -> None:
    rng, seen = np.random.default_rng(5), {True: 0, False: 0}
    for n in (65, 200):
        a = normal(n, n, dtype=dtype)
        lu, piv, e = factored(a)
        u = np.finfo(dtype).eps / 2
        for size in u * np.geomspace(1.0, 1e9, 60):
            W = lu.copy(order="F")
            planted(W, piv, rng, float(size))
            outcome = line_by_line(a, W, piv, e, monkeypatch).outcome
            doubted = checks_of_clean(W, piv, e) is None
            seen[doubted] += 1
            # it estimates norms, where the other computes them; and never certifies more
            assert doubted or outcome is FactorOutcome.CERTIFIED
    assert min(seen.values()) > 10


@OF_TYPE
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [(50, 20), (20, 50), (33, 33)], ids=str)
def test_it_doubts_what_is_not_finite(where: tuple[int, int], value: float, dtype: Any) -> None:
    W, piv, e = factored(normal(90, 90, dtype=dtype))
    assert checks_of_clean(W, piv, e)
    W[where] = value
    with np.errstate(all="ignore"):
        assert checks_of_clean(W, piv, e) is None


@pytest.mark.parametrize("change", [(3, 90), (80, 2), (3, -1)], ids=["beyond", "above", "negative"])
def test_it_doubts_pivots_that_are_none(change: tuple[int, int]) -> None:
    W, piv, e = factored(normal(90, 90))
    piv[change[0]] = change[1]
    assert checks_of_clean(W, piv, e) is None


@pytest.mark.parametrize("name", ["S", "Z", "row_norms", "column_norms", "w", "v", "row_sizes", "column_sizes"])
def test_a_nan_in_what_was_kept_is_a_doubt(name: str) -> None:
    W, piv, e = factored(normal(90, 90))
    getattr(e, name)[40] = np.nan
    with np.errstate(all="ignore"):
        assert checks_of_clean(W, piv, e) is None


# ---- each check is missed ------------------------------------------------------------------------------------------


class Changed:
    """Once, when LAPACK has returned."""

    def __init__(self, change: Any) -> None:
        self.change, self.done = change, False

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        if stage == "factored" and not self.done:
            self.done = True
            self.change(arrays["W"], arrays["piv"])


def report_and_wrong(a: np.ndarray, change: Any) -> tuple[Any, bool]:
    (lu, piv), report = protected_lu_factor(a, mode="offline", on_stage=Changed(change), return_report=True)
    return report, bool(lu_outside(lu, piv, a).any())


def in_L(W: np.ndarray, piv: np.ndarray) -> None:
    W[70, 20] += 0.5


@OF_TYPE
def test_sums_are_compared_with_bounds(dtype: Any, monkeypatch: Patch) -> None:
    a = normal(100, 100, dtype=dtype)
    report, wrong = report_and_wrong(a, in_L)
    assert (report.status, wrong) == (Status.CORRECTED, False)
    monkeypatch.setattr(host_certificate, "factored_bound", lambda *given: 0.0 * factored_bound(*given) + 1e300)
    monkeypatch.setattr(host_certificate, "_rows_show_all", lambda *_: True)  # such bounds are blind
    report, wrong = report_and_wrong(a, in_L)
    assert (report.status, wrong) == (Status.CLEAN, True)


def test_an_infinite_bound_is_none(monkeypatch: Patch) -> None:
    W, piv, e = factored(normal(100, 100))
    monkeypatch.setattr(host_certificate, "factored_bound", lambda *given: 0.0 * factored_bound(*given) + np.inf)
    monkeypatch.setattr(host_certificate, "_rows_show_all", lambda *_: True)
    assert checks_of_clean(W, piv, e) is None


@OF_TYPE
def test_a_pivot_that_is_not_the_largest_is_seen(dtype: Any, monkeypatch: Patch) -> None:
    a = normal(100, 100, dtype=dtype)

    def other(W: np.ndarray, piv: np.ndarray) -> None:
        """The factors of P A for another P: with the second largest of the first column on top."""
        second = int(np.argsort(abs(a[:, 0]))[-2])
        swapped = a.copy()
        swapped[[0, second]] = swapped[[second, 0]]
        below = swapped[1:, 0] / swapped[0, 0]
        rest, rows = linalg.lu_factor(swapped[1:, 1:] - np.outer(below, swapped[0, 1:]))
        W[0], W[1:, 0], W[1:, 1:] = swapped[0], below[permutation(rows, 99)], rest
        piv[0], piv[1:] = second, rows + 1

    report, wrong = report_and_wrong(a, other)
    assert (report.status, wrong) == (Status.CORRECTED, False)
    monkeypatch.setattr(host_certificate, "multipliers_within", lambda *_: True)
    (lu, _), report = protected_lu_factor(a, mode="offline", on_stage=Changed(other), return_report=True)
    assert report.status is Status.CLEAN
    assert abs(np.tril(lu, -1)).max() > largest_multiplier(a_type(a))


def a_type(a: np.ndarray) -> Any:
    return host_certificate._counts(a.dtype.char, *a.shape, False).type


def test_elements_that_no_sum_shows_are_left_to_evidence(monkeypatch: Patch) -> None:
    def change(W: np.ndarray, piv: np.ndarray) -> None:
        W[56, 98] *= -1

    report, wrong = report_and_wrong(VANDER, change)
    assert (report.status, wrong) == (Status.CORRECTED, False)
    monkeypatch.setattr(host_certificate, "_rows_show_all", lambda *_: True)
    report, wrong = report_and_wrong(VANDER, change)
    assert (report.status, wrong) == (Status.CLEAN, True)


def test_the_short_answer_is_that_of_all_lines() -> None:
    """Where the smallest row and the largest bound say that sums show all, each row's bound does."""
    answers = set()
    for a in [*matrices(float).values(), VANDER]:
        W, piv, e = factored(a)
        if not host_sums.reads_at_once(W):
            continue
        n, place = len(a), np.array(permutation(piv, len(a)))
        plan = host_certificate._counts("d", n, n, False)
        for power in range(-60, 60, 4):
            bounds = [np.full(n, 2.0**power) * np.exp2(e.row_sizes[place].clip(-50, 50)), np.full(n, 2.0**power)]
            short = host_certificate._rows_show_all(plan, abs(e.v), e, bounds[0])
            exact = host_certificate._all_is_seen(plan, (e.w[place], e.v), e, place, bounds)
            assert exact or not short
            answers.add((short, exact))
    assert {(True, True), (False, False)} <= answers


def test_large_bounds_everywhere_are_no_certificate(monkeypatch: Patch) -> None:
    everywhere(monkeypatch, factored_bound, lambda *given: 0.0 * factored_bound(*given) + 1e300)
    W, piv, e = factored(normal(100, 100))
    assert checks_of_clean(W, piv, e) is None
