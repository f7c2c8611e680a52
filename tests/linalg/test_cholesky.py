"""`protected_cholesky`, `protected_cho_factor` in place of SciPy's: the same goes in and comes out, and it is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg

from abft_tsm2 import (
    Report,
    SilentDataCorruptionError,
    Status,
    errstate,
    monitor,
    protected_cho_factor,
    protected_cholesky,
)
from tests.support.cases import ORDERS, arrange
from tests.support.factor_cases import DTYPES, INPUTS, computed_in, described, outcome, positive, solved
from tests.support.factor_cases import cholesky_outside as outside
from tests.support.planting import bits, normal

IDS = [dtype.name for dtype in DTYPES]
SIZES = (1, 2, 3, 7, 31, 63, 64, 65, 97, 128, 129)
PAIRS = ((protected_cholesky, linalg.cholesky), (protected_cho_factor, linalg.cho_factor))


def clean(a: Any, **options: Any) -> np.ndarray:
    """The factor of a matrix, which has to be called clean."""
    c, report = protected_cholesky(a, return_report=True, **options)
    assert report.status is Status.CLEAN, report
    return np.asarray(c)


# ---- the same as SciPy's ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("n", SIZES)
def test_factors_of_every_size(n: int, lower: bool, dtype: Any) -> None:
    a = positive(n, dtype)
    held = a.copy()
    c = clean(a, lower=lower)
    assert described(c) == described(linalg.cholesky(a, lower=lower)) == ((n, n), dtype)
    assert c.flags.f_contiguous
    assert c.flags.writeable
    assert not outside(c, a, lower).any()
    assert not (np.triu(c, 1) if lower else np.tril(c, -1)).any()
    assert (np.diagonal(c) > 0).all()
    np.testing.assert_array_equal(bits(a), bits(held))


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("n", [1, 2, 31, 65, 129])
def test_cho_factor_serves_cho_solve(n: int, lower: bool, dtype: Any) -> None:
    a, b = positive(n, dtype), normal(n, 3, dtype=dtype)
    c, flag = protected_cho_factor(a, lower=lower)
    assert described(c) == described(linalg.cho_factor(a, lower=lower)[0])
    assert flag is lower
    assert not outside(c, a, lower).any()
    assert solved(linalg.cho_solve((c, flag), b), a, b)


@pytest.mark.parametrize("readonly", [False, True], ids=["", "read-only"])
@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_in_memory(order: str, lower: bool, readonly: bool) -> None:
    plain = positive(70)
    a = arrange(plain, order)
    a.flags.writeable = not readonly
    assert not outside(clean(a, lower=lower), plain, lower).any()
    np.testing.assert_array_equal(a, plain)


@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("block", [1, 2, 7, 16, 64, 1000])
def test_every_size_of_block(block: int, lower: bool) -> None:
    for n in (1, 31, 50):
        a = positive(n)
        assert not outside(clean(a, lower=lower, block=block), a, lower).any()


@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
def test_only_one_half_is_read(lower: bool) -> None:
    a = positive(40)
    other = np.tril(a) if lower else np.triu(a)
    other = other + (np.triu(normal(40, 40), 1) if lower else np.tril(normal(40, 40), -1))
    np.testing.assert_array_equal(clean(other, lower=lower), clean(a, lower=lower))
    (c, _), report = protected_cho_factor(other, lower=lower, return_report=True)
    assert report.status is Status.CLEAN
    assert not outside(c, a, lower).any()
    other[(5, 30) if lower else (30, 5)] = np.nan
    with np.errstate(all="ignore"):
        assert not outside(protected_cholesky(other, lower=lower, check_finite=False), a, lower).any()


@pytest.mark.parametrize("kind", INPUTS)
def test_what_scipy_takes_for_a_matrix(kind: str) -> None:
    a = INPUTS[kind](10 * positive(20))
    c = clean(a)
    assert described(c) == (linalg.cholesky(a).shape, computed_in(a))
    assert type(c) is np.ndarray
    assert not outside(c, np.asarray(a, c.dtype), False).any()


@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_overwrite_a(order: str, lower: bool) -> None:
    for readonly in (False, True):
        a = arrange(positive(80), order)
        held = a.copy()
        a.flags.writeable = not readonly
        assert not outside(clean(a, lower=lower, overwrite_a=True), held, lower).any()
        assert not readonly or np.array_equal(a, held)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 3, 5, 5)], ids=str)
def test_batches(shape: tuple[int, ...]) -> None:
    a = np.empty(shape)
    for seed, at in enumerate(np.ndindex(*shape[:-2])):
        a[at] = positive(shape[-1], seed=seed)
    c, report = protected_cholesky(a, return_report=True)
    assert (c.shape, report.status, len(report.products)) == (shape, Status.CLEAN, np.prod(shape[:-2]))
    for at in np.ndindex(*shape[:-2]):
        assert not outside(c[at], a[at], False).any()
    a[(1,) * (len(shape) - 2)] *= -1
    with pytest.raises(linalg.LinAlgError, match="1-th leading minor"):
        protected_cholesky(a)


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 3, 3), (3, 0, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_batches_are_numpys(shape: tuple[int, ...], dtype: Any) -> None:
    a = np.empty(shape, dtype)
    for c, report in (
        protected_cholesky(a, return_report=True),
        (lambda found: (found[0][0], found[1]))(protected_cho_factor(a, return_report=True)),
    ):
        right = np.linalg.cholesky(a)
        assert (c.shape, c.dtype, report.status) == (right.shape, right.dtype, Status.CLEAN)
    with pytest.raises(ValueError, match="square"):
        protected_cholesky(np.empty((0, 2, 3)))


PLAIN: Mapping[str, Any] = {
    "empty": np.empty((0, 0)),
    "empty float32": np.empty((0, 0), np.float32),
    "empty int": np.empty((0, 0), int),
    "no rows": np.empty((0, 3)),
    "oblong": np.ones((2, 3)),
    "vector": np.ones(3),
    "number": 4.0,
    "0-D": np.array(4.0),
    "batch of oblong": np.ones((2, 2, 3)),
    "NaN": np.full((3, 3), np.nan),
    "infinite": np.diag([1.0, np.inf, 1]),
    "all 0": np.zeros((4, 4)),
    "all 1": np.ones((40, 40)),
    "negative": -np.eye(3),
    "the last negative": np.diag(np.r_[np.ones(39), -1]),
    "one in the middle 0": np.diag((np.arange(40) != 17).astype(float)),
    "indefinite": np.eye(40)[::-1],
    "list": [[4.0, 2.0], [2.0, 5.0]],
    "ragged": [[1, 2], [3]],
}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["cholesky", "cho_factor"])
@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("kind", PLAIN)
def test_shapes_types_and_messages_are_scipys(kind: str, lower: bool, ours: Any, theirs: Any) -> None:
    found, expected = (outcome(function, PLAIN[kind], lower=lower) for function in (ours, theirs))
    assert found.kind == expected.kind
    assert found.warned == expected.warned == ()


@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("at", [0, 15, 16, 40, 63, 64, 79])
def test_the_minor_that_is_not_positive_is_the_same(at: int, dtype: Any, lower: bool) -> None:
    a = positive(80, dtype)
    a[at, at] = -3
    found = outcome(protected_cholesky, a, lower=lower, block=16)
    assert found.kind == outcome(linalg.cholesky, a, lower=lower).kind
    assert isinstance(found.error, linalg.LinAlgError)
    assert f"{at + 1}-th leading minor" in str(found.error)


def test_zeros_and_powers_of_two_give_the_same_bits() -> None:
    a = np.eye(50) * 4 + np.eye(50, k=25) * 2 + np.eye(50, k=-25) * 2
    for lower in (False, True):
        for x in (a, a.astype(np.float32), np.diag(4.0 ** np.arange(-20, 20))):
            np.testing.assert_array_equal(clean(x, lower=lower, block=16), linalg.cholesky(x, lower=lower))


FAMILIES: Mapping[str, Callable[[], np.ndarray]] = {
    "identity": lambda: np.eye(70),
    "moments": lambda: linalg.hilbert(70) + 1e-10 * np.eye(70),
    "rows of all sizes": lambda: scaled(2.0 ** np.random.default_rng(1).integers(-200, 200, 70)),
    "tiny": lambda: positive(70) * 2.0**-1000,
    "huge": lambda: positive(70) * 2.0**1000,
    "ill-conditioned": lambda: np.diag(10.0 ** -np.arange(12)) + 1e-13 * positive(12),
    "all 1 and a little": lambda: np.ones((70, 70)) + 1e-9 * np.eye(70),
    "second differences": lambda: 2 * np.eye(70) - np.eye(70, k=1) - np.eye(70, k=-1),
}


def scaled(sizes: np.ndarray) -> np.ndarray:
    product: np.ndarray = positive(len(sizes)) * sizes * sizes[:, None]
    return product


@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_clean(family: str, lower: bool) -> None:
    a = FAMILIES[family]()
    with np.errstate(all="ignore"):
        assert not outside(clean(a, lower=lower), a, lower).any()


# ---- what is refused, faults, reports -----------------------------------------------------------------------


@pytest.mark.parametrize("function", [protected_cholesky, protected_cho_factor], ids=["cholesky", "cho_factor"])
def test_what_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"(?s)complex.*(scipy|real)"):
        function(np.eye(3) + 0j)
    with pytest.raises(ValueError, match=r"on_error.*'fix'.*detect"):
        function(np.eye(3), on_error="fix", on_stage=pytest.fail)
    with pytest.raises(ValueError, match="block"):
        function(np.eye(3), block=0, on_stage=pytest.fail)
    with pytest.raises(TypeError):
        function(np.eye(3), False, False, True, "online")


@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
def test_what_is_not_finite_is_unverifiable(lower: bool) -> None:
    a = positive(20)
    a[3, 7] = a[7, 3] = np.nan
    with np.errstate(all="ignore"), errstate(unverifiable="ignore"):
        ours, theirs = (outcome(f, a, lower=lower, check_finite=False) for f in (protected_cholesky, linalg.cholesky))
        assert ours.kind == theirs.kind
        if ours.error is None:
            _, report = protected_cholesky(a, lower=lower, check_finite=False, return_report=True)
            assert report.status is Status.UNVERIFIABLE


def hit(change: Callable[[np.ndarray], None], stage: str | None = None, times: int = 1) -> Any:
    """A hook that changes the live factor, from the first stage on (or at this one)."""
    left = [times]

    def hook(reached: str, arrays: Any) -> None:
        if "W" in arrays and left[0] and reached == (stage or reached):
            left[0] -= 1
            change(arrays["W"])

    return hook


def both_halves(value: float) -> Callable[[np.ndarray], None]:
    def change(W: np.ndarray) -> None:
        W[30, 25] = W[25, 30] = value

    return change


@pytest.mark.parametrize("lower", [False, True], ids=["upper", "lower"])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("value", [50.0, np.nan])
@pytest.mark.parametrize("stage", [None, "finished"])
@pytest.mark.parametrize("function", [protected_cholesky, protected_cho_factor], ids=["cholesky", "cho_factor"])
def test_a_fault_is_repaired(function: Any, stage: str | None, value: float, dtype: Any, lower: bool) -> None:
    a = positive(40, dtype)
    with monitor() as log:
        hook = hit(both_halves(value), stage)
        result, report = function(a, lower=lower, block=16, on_stage=hook, return_report=True)
    c = result if function is protected_cholesky else result[0]
    assert report.status is Status.CORRECTED
    assert report.faults
    assert log.reports == [report]
    assert not outside(c, a, lower).any()


def test_on_error_decides() -> None:
    a = positive(40)

    def call(**options: Any) -> Report:
        hook = hit(both_halves(50.0))
        report: Report = protected_cholesky(a, block=16, on_stage=hook, return_report=True, **options)[1]
        return report

    assert call(on_error="detect").status is Status.UNCORRECTABLE
    with pytest.raises(SilentDataCorruptionError):
        call(on_error="raise")
    with errstate(corrected="raise"), pytest.raises(SilentDataCorruptionError):
        call()


def test_a_fault_that_stays_is_raised_and_never_blamed_on_the_matrix() -> None:
    a = positive(40)
    with pytest.raises(SilentDataCorruptionError) as caught:
        protected_cholesky(a, block=16, on_stage=hit(both_halves(np.nan), times=10**6))
    assert caught.value.report.status is Status.UNCORRECTABLE


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_the_report(dtype: Any) -> None:
    a = positive(60, dtype)
    with monitor() as log:
        c, report = protected_cholesky(a, return_report=True)
        (_, lower), other = protected_cho_factor(a, return_report=True)
    assert (described(c), lower) == (((60, 60), dtype), False)
    assert log.reports == [report, other]
    assert (report.operation, report.status, report.dtype) == ("cholesky", Status.CLEAN, dtype.name)
    assert report.faults == ()
    assert report.checks
    assert all(check.verified == check.lines > 0 for check in report.checks)
    assert report.seconds
    jsonschema.Draft202012Validator(Report.schema()).validate(report.to_dict())
    assert Report.from_dict(report.to_dict()) == report


def test_strict_settings_of_the_caller_do_not_reach_inside() -> None:
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for family in ("tiny", "all 1 and a little"):
            clean(FAMILIES[family]())


@settings(max_examples=100)
@given(
    st.integers(1, 70),
    st.sampled_from([None, 1, 2, 5, 16, 33, 64]),
    st.sampled_from(DTYPES),
    st.sampled_from(ORDERS),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_any_positive_matrix_is_factored(
    n: int, block: int | None, dtype: Any, order: str, lower: bool, seed: int
) -> None:
    plain = positive(n, dtype, seed)
    assert not outside(clean(arrange(plain, order), lower=lower, block=block), plain, lower).any()


@pytest.mark.parametrize("at", [(0, 0), (5, 3), (11, 11)], ids=str)
def test_the_judge_sees_one_wrong_element(at: tuple[int, int]) -> None:
    a = positive(12)
    c = linalg.cholesky(a, lower=True)
    assert not outside(c, a, True).any()
    c[at] += 1e-10
    assert outside(c, a, True).any()
