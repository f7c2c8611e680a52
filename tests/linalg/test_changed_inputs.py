"""A matrix that changes while it is factored: neither evidence nor repairs rest on it unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, protected_cholesky, protected_lu_factor
from abft_tsm2.linalg.operand import Operand, compare, encoded

Hook = Callable[[str, Any], None]


def at_stage(stage: str, change: Callable[[Any], None], name: str = "A", step: int = 0) -> Hook:
    """A hook that changes an array once, at the first call of a stage, or that of a step."""
    done: list[int] = []

    def hook(found: str, arrays: Any) -> None:
        if found == stage and not done and arrays.get("step", (step,))[0] >= step:
            done.append(1)
            change(arrays[name])

    return hook


def growing(n: int, growth: float, dtype: Any) -> np.ndarray:
    """Elements of the last column grow by (1 + growth) from row to row."""
    a = np.eye(n) - growth * np.tril(np.ones((n, n)), -1)
    a[:-1, -1] = 1.0
    return a.astype(dtype)


def one_sided(seed: int, n: int = 64) -> np.ndarray:
    """Rows with one element of 1 beside 1e-13: weights of columns span 13 decades, and sums lose small elements."""
    rng = np.random.default_rng(seed)
    return np.eye(n)[rng.integers(0, n, n)] + 1e-13 * rng.standard_normal((n, n))


def lu_is_wrong(a: np.ndarray, lu: np.ndarray, piv: np.ndarray) -> bool:
    """Whether P A - L U is more than a hundred times what rounding may do anywhere."""
    n = len(a)
    order = np.arange(n)
    for i, p in enumerate(piv):
        order[[i, p]] = order[[p, i]]
    L, U = (x.astype(np.longdouble) for x in (np.tril(lu, -1) + np.eye(n), np.triu(lu)))
    with np.errstate(all="ignore"):
        off = np.abs(a[order] - L @ U)
        bound = n * np.finfo(a.dtype).eps * (np.abs(L) @ np.abs(U)) + 1e-300
        return not (off <= 100 * bound).all()


def refused_or_right(a: np.ndarray, hook: Hook, **how: Any) -> Status:
    """The status of a factorisation of a matrix that a hook changes: raised, or the factors are right."""
    given = a.copy()
    try:
        (lu, piv), report = protected_lu_factor(given, return_report=True, on_stage=hook, **how)
    except SilentDataCorruptionError as error:
        return error.report.status
    if report.ok:
        assert not lu_is_wrong(a, lu, piv), report
    return report.status


@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.parametrize(("growth", "dtype"), [(0.7, np.float32), (1.0, np.float64)])
def test_growing_factors_of_a_changed_matrix_are_refused(growth: float, dtype: Any, mode: str) -> None:
    """Bounds grow with the elements; the sums of A itself do not."""
    a, rng = growing(129, growth, dtype), np.random.default_rng(1)
    for _ in range(6):
        i, j = rng.integers(129, size=2)

        def change(A: Any, i: int = i, j: int = j) -> None:
            A[i, j] += 0.25

        assert refused_or_right(a, at_stage("encoded", change), mode=mode) is Status.INPUT_CHANGED


@pytest.mark.parametrize("seed", [20, 36, 3])
@pytest.mark.parametrize("order", ["C", "F"])
def test_what_one_side_alone_shows_is_a_change_of_the_matrix(seed: int, order: str) -> None:
    a = np.array(one_sided(seed), order=order)  # type: ignore[call-overload]
    i, j = np.random.default_rng(seed + 100).integers(64, size=2)
    where = {20: (33, 25), 36: (39, 45)}.get(seed, (i, j))

    def change(A: Any) -> None:
        A[where] += 0.003

    assert refused_or_right(a, at_stage("encoded", change)) is Status.INPUT_CHANGED


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_matrix_whose_sums_are_blind_is_clean(seed: int, mode: str) -> None:
    """What is suspected of it for its scale is cleared by evidence, which its fingerprint lets count."""
    report = protected_lu_factor(one_sided(seed), mode=mode, return_report=True)[1]
    assert report.status is Status.CLEAN


def swap_rows(A: Any) -> None:
    A[[3, 40]] = A[[40, 3]]


def swap_columns(A: Any) -> None:
    A[:, [3, 40]] = A[:, [40, 3]]


def swap_elements(A: Any) -> None:
    A[50, [3, 40]] = A[50, [40, 3]]


def cycle(A: Any) -> None:
    A[[3, 40, 17], 20] = A[[40, 17, 3], 20]


CHANGES = [swap_rows, swap_columns, swap_elements, cycle]
MATRICES = {
    "normal": lambda rng, n: rng.standard_normal((n, n)),
    "permutation": lambda rng, n: np.eye(n)[rng.permutation(n)],
    "blind": lambda rng, n: one_sided(int(rng.integers(100)), n),
    "grown": lambda rng, n: growing(n, 1.0, np.float64),
}


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", ["encoded", "panel", "updated"])
def test_no_other_matrix_is_factored(kind: str, change: Callable[[Any], None], stage: str) -> None:
    for dtype, mode in ((np.float64, "online"), (np.float32, "online"), (np.float64, "offline")):
        a = MATRICES[kind](np.random.default_rng(5), 64).astype(dtype)
        if stage != "encoded" and mode == "offline":
            continue
        refused_or_right(a, at_stage(stage, change), mode=mode, block=16)


def test_sums_that_were_hit_are_told_from_a_matrix_that_has_changed() -> None:
    a = np.random.default_rng(0).standard_normal((64, 64))
    e = encoded(a)
    assert e.bits is None  # even data need none
    assert compare(a, e).operand is Operand.SAME
    e.S[5] *= 1.25
    found = compare(a, e)
    assert found.operand is Operand.SAME
    assert found.sums[0][0].tolist() == [5]
    e.S[5] *= 1 + 2e-14  # so little that no column would have shown it
    e.S[5] = compare(a, e).sums[0][1][5] * (1 + 2e-14)
    assert compare(a, e).operand is Operand.UNKNOWN
    a[5, 7] += 1e-6
    assert compare(a, e).operand is Operand.CHANGED


def test_a_fingerprint_is_kept_of_a_matrix_with_blind_sums() -> None:
    a = one_sided(20)
    e = encoded(a)
    assert e.bits is not None
    assert compare(a, e).operand is Operand.SAME
    a[33, 25] += 1e-9
    assert compare(a, e).operand is Operand.CHANGED


def test_nothing_that_is_undecided_is_called_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is repaired from a matrix whose sums cannot show that it is the same."""
    a = one_sided(7)
    monkeypatch.setattr("abft_tsm2.linalg.operand.Bits.of", lambda *_: None)

    def hit(W: Any) -> None:
        W[40, 20] += 1.0

    hook = at_stage("factored", hit, "W")
    with pytest.warns(UserWarning, match="UNVERIFIABLE"):
        report = protected_lu_factor(a, mode="offline", return_report=True, on_stage=hook)[1]
    assert (report.status, report.ok) == (Status.UNVERIFIABLE, False)
    assert "pass it once more" in " ".join(report.reasons)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stage", ["encoded", "panel", "updated"])
@pytest.mark.parametrize("lower", [False, True])
def test_no_other_positive_matrix_is_factored(change: Callable[[Any], None], stage: str, lower: bool) -> None:
    x = np.random.default_rng(2).standard_normal((64, 200))
    for dtype in (np.float64, np.float32):
        a = (x @ x.T).astype(dtype)
        given = a.copy()
        try:
            c, report = protected_cholesky(
                given, lower=lower, block=16, return_report=True, on_stage=at_stage(stage, change)
            )
        except (SilentDataCorruptionError, np.linalg.LinAlgError):
            continue
        product = c @ c.T if lower else c.T @ c
        assert not report.ok or np.abs(product - a).max() <= 1e3 * np.finfo(dtype).eps * np.abs(a).max()
