"""Products whose terms span the range of the type along k: a wrong element is repaired, and none is invented."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status, faults
from abft_tsm2.arrays import FLOATS
from abft_tsm2.core.faultpoint import planting
from abft_tsm2.faults.operands.wide import WIDE
from benchmarks.planting import planted
from tests.support import cupy_on_cpu

card, cp = cupy_on_cpu.card, cupy_on_cpu.cp

Pair = tuple[np.ndarray, np.ndarray]
M, K, N = 14, 24, 11


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape)


def factorials() -> Pair:
    """Taylor coefficients and derivatives, over all of float64's range."""
    f = np.cumprod(np.arange(1.0, 171))[::5]
    return normal(M, f.size) * f, normal(f.size, N) / f[:, None]


def ratios(decades: float, order: Callable[[np.ndarray], np.ndarray]) -> Callable[[], Pair]:
    def make() -> Pair:
        scale = 10.0 ** order(np.linspace(-decades / 2, decades / 2, K))
        return normal(M, K) * scale, normal(K, N) / scale[:, None]

    return make


def sentinel(left: float, right: float) -> Callable[[], Pair]:
    """One column of A and one row of B are constant: one of them 0, say, the other a mark."""

    def make() -> Pair:
        a, b = normal(M, K), normal(K, N)
        a[:, 3], b[3] = left, right
        return a, b

    return make


def graded() -> Pair:
    return normal(M, K) * np.logspace(0, -30, M)[:, None], normal(K, N) * np.logspace(0, -30, N)


def blocks() -> Pair:
    """Two products of very different sizes, of which neither has a term in the other's rows."""
    a, b = np.zeros((M, K)), normal(K, N)
    a[:7, :12], a[7:, 12:] = normal(7, 12) * 1e140, normal(7, 12) * 1e-140
    b[:12] *= 1e140
    b[12:] *= 1e-140
    return a, b


def one_hot() -> Pair:
    a = np.zeros((M, K))
    a[np.arange(M), np.arange(M) % K] = 10.0 ** np.linspace(-150, 150, M)
    return a, normal(K, N) * 10.0 ** np.linspace(150, -150, K)[:, None]


def with_zeros() -> Pair:
    a, b = ratios(300, np.sort)()
    a[2], a[:, 5], b[:, 4], b[7] = 0.0, 0.0, 0.0, 0.0
    return a, b


def lost_in_checksums() -> Pair:
    """Weights that suit the large row, which meets zeros, leave nothing of the row that counts."""
    a, b = np.zeros((M, 2)), np.full((2, N), 1e-180)
    a[:, 0], b[1] = 1e150 * normal(M), 1e300
    return a, b


def lost_in_sums_of_c() -> Pair:
    """The same of C itself."""
    a, b = lost_in_checksums()
    return a * 1e-180, b / np.array([[1.0], [1e150]])


FAMILIES: dict[str, Callable[[], Pair]] = {
    "factorials": factorials,
    "ratios of 1e150, falling": ratios(150, lambda p: p[::-1]),
    "ratios of 1e600": ratios(600, np.sort),
    "ratios of 1e600, in any order": ratios(600, np.random.default_rng(0).permutation),
    "a mark in A": sentinel(1e250, 0.0),
    "the largest number in A": sentinel(np.finfo(float).max, 0.0),
    "a mark in B": sentinel(0.0, 1e250),
    "a mark and its inverse": sentinel(1e300, 1e-305),
    "graded rows and columns": graded,
    "blocks": blocks,
    "one-hot": one_hot,
    "zeros": with_zeros,
    "lost in checksums": lost_in_checksums,
    "lost in sums of C": lost_in_sums_of_c,
    "small": lambda: (normal(M, K) * 1e-200, normal(K, N) * 1e-100),
}


def exact(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A B and |A| |B|, in rational numbers."""
    a, b = (np.vectorize(Fraction, otypes=[object])(x) for x in (a, b))
    return (a @ b).astype(float), (abs(a) @ abs(b)).astype(float)


def off(c: Any, a: np.ndarray, b: np.ndarray) -> float:
    """The largest error in units of |A| |B|; below the range, of its smallest number."""
    value, size = exact(a, b)
    return float(np.max(abs(np.asarray(c) - value) / np.maximum(size, np.finfo(float).tiny)))


def largest_of(side: str, a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """The element with the largest terms beside the norm of its column, or row, that weights undo: what happens to it
    is beyond the bound of its line."""
    size = exact(a, b)[1]
    norms = np.abs(b).max(axis=0)[None, :] if side == "rows" else np.abs(a).max(axis=1)[:, None]
    weighted = size / np.where(norms > 0, norms, 1.0)
    i, j = np.unravel_index(np.argmax(weighted), size.shape)
    return int(i), int(j)


@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize("name", FAMILIES)
def test_clean_products_are_clean(name: str, check: str) -> None:
    a, b = FAMILIES[name]()
    c, report = ft.protected_gemm(a, b, check=check, return_report=True)
    assert (report.status, report.faults) == (Status.CLEAN, ())
    assert np.array_equal(c, a @ b)
    assert ft.verify_gemm(a, b, c, check=check).status is Status.CLEAN


@pytest.mark.parametrize("check", ["rows", "columns"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("value", [lambda x: 3 * x + 1e-3, lambda x: np.nan, lambda x: -x], ids=["3 x", "NaN", "-x"])
def test_a_wrong_element_is_repaired(name: str, check: str, value: Callable[[float], float]) -> None:
    a, b = FAMILIES[name]()
    at = largest_of(check, a, b)

    def fault(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            arrays["C"][at] = value(float(arrays["C"][at]))

    c, report = ft.protected_gemm(a, b, check=check, on_stage=fault, return_report=True)
    assert report.status is Status.CORRECTED
    assert [(f.rows, f.columns) for f in report.faults] == [((at[0],), (at[1],))]
    assert off(c, a, b) < 1e-13


def returned(a: np.ndarray, b: np.ndarray, check: str, plan: faults.Plan) -> np.ndarray | None:
    """The product, or that of a stack, with a fault; None where it is refused."""
    with faults.inject(plan):
        try:
            return np.asarray(ft.protected_gemm(a, b, check=check))
        except ft.SilentDataCorruptionError:
            return None


@pytest.mark.parametrize("check", ["rows", "columns"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("blocks", "one-hot")])  # with wide limits
def test_an_operand_that_changes_behind_its_encoding(name: str, check: str) -> None:
    """Underflow leaves every row that counts a checksum: a change of what it meets shows."""
    a, b = FAMILIES[name]()
    right, size = exact(a, b)
    for seed, site in product(range(8), "AB"):
        plan = faults.Plan("scaled", site, factor=-8.0, persistent=True, seed=(seed,))
        c = returned(a.copy(), b.copy(), check, plan)
        stack = returned(np.stack([a] * 2), np.stack([b] * 2), check, plan)
        for found in (c, None if stack is None else stack[0]):
            assert found is None or (abs(found - right) <= 1e-12 * np.maximum(size, np.finfo(float).tiny)).all()


def test_a_row_of_which_single_precision_leaves_nothing() -> None:
    """Checksums of many terms of float32 are summed in its panels."""
    d = 10.0 ** np.linspace(-34, 34, 1024)
    a, b = ((normal(9, 1024) * d).astype(np.float32), (normal(1024, 8) / d[:, None]).astype(np.float32))
    right = a.astype(float) @ b.astype(float)
    for check, (site, at) in product(
        ("rows", "columns"), (("A", (3, -1)), ("A", (3, 0)), ("B", (-1, 3)), ("B", (0, 3)))
    ):
        operands = {"A": a.copy(), "B": b.copy()}

        def change(stage: str, arrays: Any) -> None:
            if stage == "encoded":
                operands[site][at] *= -8  # noqa: B023

        with planting(change):
            try:
                c = ft.protected_gemm(operands["A"], operands["B"], check=check)
            except ft.SilentDataCorruptionError:
                continue
        assert abs(c - right).max() < 1e-3


@pytest.mark.parametrize("check", ["rows", "columns"])
@pytest.mark.parametrize("name", FAMILIES)
def test_zeros_are_not_the_product(name: str, check: str) -> None:
    a, b = FAMILIES[name]()
    for zeros in (np.zeros((a.shape[0], b.shape[1])), np.zeros((3, a.shape[0], b.shape[1]))):
        report = (
            ft.verify_gemm(a, b, zeros, check=check, on_error="detect")
            if zeros.ndim == 2
            else ft.verify_gemm(np.stack([a] * 3), np.stack([b] * 3), zeros, check=check, on_error="detect")
        )
        assert report.status is Status.UNCORRECTABLE


def test_a_line_of_zeros_beside_large_numbers_is_left_alone() -> None:
    small = np.array([[0.0, 0.0], [1e119, 0.0]]), np.array([[1.0], [1e223]])
    a, b = np.zeros((20, 30)), np.ones((30, 10))
    a[1:, :15], b[15:] = normal(19, 15) * 1e119, normal(15, 10) * 1e223
    for left, right in (small, (a, b)):
        for check in ("rows", "columns", "both"):
            c, report = ft.protected_gemm(left, right, check=check, return_report=True)
            assert report.status is Status.CLEAN
            assert np.array_equal(c, left @ right)


@pytest.mark.parametrize("check", ["rows", "columns"])
def test_a_zero_that_has_become_the_smallest_normal_number(check: str) -> None:
    a, b = with_zeros()
    c = a @ b
    c[2, 4] = np.finfo(float).tiny
    assert ft.verify_gemm(a, b, c, check=check, on_error="detect").status is Status.UNCORRECTABLE


@pytest.mark.parametrize("check", ["rows", "columns"])
def test_rows_beside_an_infinity_that_is_right(check: str) -> None:
    a, b = normal(M, K) * 1e-165, normal(K, N) * 1e-105
    a[0, 0], b[0, 0] = 1e200, 1e200  # overflows
    with np.errstate(over="ignore"):
        right = a @ b
    assert np.isinf(right[0, 0])
    assert np.isfinite(right[1:, 1:]).all()

    def fault(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            arrays["C"][5, 6] *= -1

    for hook in (None, fault):
        with np.errstate(over="ignore"):
            c, report = ft.protected_gemm(a, b, check=check, on_stage=hook, return_report=True)
        assert report.status is (Status.CORRECTED if hook else Status.CLEAN)
        assert np.array_equal(c == right, np.ones(right.shape, bool)) or off(c[1:, 1:], a[1:], b[:, 1:]) < 1e-13


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_narrow_types_across_their_range(kind: Any) -> None:
    most = 36.0 if kind is np.float32 else 3.0
    scale = 10.0 ** np.linspace(-most, most, K)
    a, b = (normal(M, K) * scale).astype(kind), (normal(K, N) / scale[:, None]).astype(kind)

    def fault(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            arrays["C"][3, 4] += kind(300)

    c, report = ft.protected_gemm(a, b, return_report=True)
    assert report.status is Status.CLEAN
    again, report = ft.protected_gemm(a, b, return_report=True, on_stage=fault)
    assert report.status is Status.CORRECTED
    assert np.allclose(again, c, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("alpha", [1e160, 1e-160])
@pytest.mark.parametrize("beta", [1e-300, 1e300])
def test_alpha_and_beta_that_undo_the_sizes(alpha: float, beta: float) -> None:
    scale = 10.0 ** np.linspace(-140, 140, K)
    a, b, c0 = normal(M, K) * scale / alpha, normal(K, N) / scale[:, None], normal(M, N) / beta

    def fault(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            arrays["C"][3, 4] += 1.0

    expected = alpha * (a @ b) + beta * c0
    for hook in (None, fault):
        c, report = ft.protected_gemm(a, b, c=c0.copy(), alpha=alpha, beta=beta, on_stage=hook, return_report=True)
        assert report.status is (Status.CORRECTED if hook else Status.CLEAN)
        assert np.allclose(c, expected, rtol=1e-10, atol=1e-10)


def test_a_long_k_is_read_in_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few columns of R many rows fit a temporary, however long k is."""
    from abft_tsm2.checksum import sides

    calls: list[int] = []
    scaled = sides.scaled

    def counted(block: Any, *args: Any) -> Any:
        calls.append(block.shape[0])
        return scaled(block, *args)

    monkeypatch.setattr(sides, "scaled", counted)
    a, b = normal(3, 1 << 16), normal(1 << 16, 3)
    a[1, 7] = np.nan
    with pytest.warns(ft.errors.UnverifiableWarning):
        _, report = ft.protected_gemm(a, b, return_report=True)
    assert report.status is Status.UNVERIFIABLE
    assert 0 < len(calls) < 30


# ---- kernels, on the CPU --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", ["rows", "columns"])
@pytest.mark.parametrize("name", ["factorials", "a mark in B", "zeros", "lost in sums of C"])
def test_kernels_leave_to_the_host_what_they_cannot_compare(cp: Any, name: str, check: str) -> None:
    a, b = (cp.asarray(x) for x in FAMILIES[name]())
    at = largest_of(check, np.asarray(a), np.asarray(b))

    def fault(c: Any) -> None:
        c[at] = -3 * c[at] - 1e-3

    c, report = ft.protected_gemm(a, b, check=check, return_report=True)
    assert (report.status, report.faults) == (Status.CLEAN, ())
    assert off(c, np.asarray(a), np.asarray(b)) < 1e-13
    zeros = ft.verify_gemm(a, b, cp.zeros_like(c), check=check, on_error="detect")
    assert zeros.status is Status.UNCORRECTABLE
    with planted(fault):
        c, report = ft.protected_gemm(a, b, check=check, return_report=True)
    assert report.status is Status.CORRECTED
    assert off(c, np.asarray(a), np.asarray(b)) < 1e-13


@pytest.mark.parametrize("name", WIDE)
def test_clean_products_of_other_libraries(name: str) -> None:
    """Whose checksums are compared within bounds: a line whose residual is 0 tells none."""
    strict = pytest.importorskip("array_api_strict")
    for seed in range(12):
        rng = np.random.default_rng(seed)
        m, k, n = rng.integers(3, 50, 3).tolist()
        operands = WIDE[name][1](rng, m, k, n, FLOATS["float64"])
        assert ft.protected_gemm(*map(strict.asarray, operands), return_report=True)[1].status is Status.CLEAN
