"""Sixteen decisions between a fault and rounding, numbered: each is a case that a simpler procedure gets wrong."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, detection_limit, encode, protected_gemm
from abft_tsm2.core.matmul import multiply
from abft_tsm2.errors import UnverifiableWarning
from benchmarks import families
from tests.support.cases import DTYPES
from tests.support.oracles import Exact, rows_outside
from tests.support.planting import Product, at, everywhere, normal, pair, put, scale, transient

IDS = [dtype.name for dtype in DTYPES]
SIDES = ("rows", "columns")


def chain(
    A: Any,
    B: Any,
    out: Any,
    C0: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    tf32: bool = False,
    stage: Any = None,
) -> None:
    """A product summed strictly from left to right, as some machines do."""
    out[...] = 0
    for l in range(A.shape[1]):  # noqa: E741
        out += A[:, l, None] * B[None, l, :]


# ---- 1: a suspicion that the recomputation clears ends CLEAN ------------------------------------------------


@pytest.mark.parametrize("family", ["const", "rank1const", "cancel_half", "hilbert"])
@pytest.mark.parametrize("check", ["rows", "columns", "both"])
def test_1_a_cleared_suspicion_ends_clean_and_is_counted(
    family: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere(monkeypatch, multiply, chain)
    A, B = families.operands(family, 40, 8000, 24, np.random.default_rng(1), np.float32)
    product = Product(A, B, None, check=check)
    assert product.status == "CLEAN"
    assert product.report.suspicions > 0
    assert not product.report.faults
    assert np.array_equal(product.C, product.clean)
    # among lines that are suspected for nothing, the one that is wrong is found
    faulty = Product(A, B, put((5, 7), 2 * product.C[5, 7] + 1), check=check)
    assert faulty.status == "CORRECTED"
    assert not faulty.wrong.any()
    assert {f.rows for f in faulty.report.faults} == {(5,)} or {f.columns for f in faulty.report.faults} == {(7,)}


@pytest.mark.parametrize("k", [600, 1000, 2000])
def test_1_lines_suspected_on_one_side_only_do_not_spoil_a_repair(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch, multiply, chain)
    A, B = families.operands("rank1const", 200, k, 3, np.random.default_rng(1), np.float32)
    product = Product(A, B, put((5, 1), 1e3), check="both")
    assert product.status == "CORRECTED"
    assert not product.wrong.any()


# ---- 2: a mass suspicion is not accepted on its worst rows --------------------------------------------------

MASS = {
    "all of C": slice(None),
    "64 columns": (slice(None), slice(64, 128)),
    "every fourth column": (slice(None), slice(0, None, 4)),
    "a 64 x 64 tile": (slice(32, 96), slice(100, 164)),
    "64 rows": slice(3, 67),
    "a row": 200,
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("where", MASS.values(), ids=MASS)
def test_2_a_scaled_part_of_c_is_no_rounding_pattern(where: Any, side: str) -> None:
    A, B = pair(256, 4096, 256, np.float32)
    product = Product(A, B, scale(where, 1.001), check=side)
    assert product.status == "CORRECTED"
    assert not product.wrong.any()
    assert product.error < 1e-5
    assert np.array_equal(product.C[~product.hit], product.clean[~product.hit])


# ---- 3: a bound that is not finite bounds nothing -----------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("side", SIDES)
def test_3_a_fault_that_overflows_its_own_bound_is_found(dtype: Any, side: str) -> None:
    A, B = pair(40, 60, 30, dtype)
    largest = Exact.of(A, B).value.dtype.type(1.0) * float(np.nextafter(dtype.type(np.inf), dtype.type(0)))
    for value in (largest, -largest, largest / 2**30 if dtype.itemsize > 2 else largest, np.inf):
        product = Product(A, B, put((5, 7), value), check=side)
        assert product.status == "CORRECTED"
        assert not product.wrong.any()
        assert [(f.rows, f.columns) for f in product.report.faults] == [((5,), (7,))]


# ---- 4: an overflow that is right ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=IDS[:2])
@pytest.mark.parametrize("side", SIDES)
def test_4_an_infinity_that_is_right_leaves_the_rest_checked(dtype: Any, side: str) -> None:
    A, B = pair(40, 60, 30, dtype)
    big = dtype.type(np.sqrt(float(np.finfo(dtype).max))) * dtype.type(2)
    A[3], B[:, 4] = big, big  # C[3, 4] overflows, and nothing else does
    with np.errstate(over="ignore"):
        clean = Product(A, B, None, check=side)
        assert np.isinf(clean.C[3, 4])
        assert clean.status == "CLEAN"
        assert not clean.report.faults
        assert np.isfinite(clean.report.checks[0].bound)
        for place in ((3, 9), (8, 4), (20, 20)):  # in its row, in its column, elsewhere
            for value in (-clean.C[place], np.nan, np.inf):
                product = Product(A, B, put(place, value), check=side)
                assert product.status == "CORRECTED"
                assert not product.wrong.any()
                assert [(f.rows, f.columns) for f in product.report.faults] == [((place[0],), (place[1],))]
        lost = Product(A, B, put((3, 4), 1.0), check=side)  # the infinity itself
        assert lost.status == "CORRECTED"
        assert np.isinf(lost.C[3, 4])


# ---- 5: NaN and Inf in the operands -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("side", ["rows", "columns", "both"])
def test_5_what_follows_from_nan_is_unverifiable_and_the_rest_is_checked(dtype: Any, side: str) -> None:
    A, B = pair(40, 60, 30, dtype)
    A[3, 5], B[7, 4], B[1, 9] = np.nan, np.inf, np.nan
    with pytest.warns(UnverifiableWarning, match="could not be checked"):
        clean = Product(A, B, None, check=side)
    assert (clean.status, clean.report.ok, clean.report.faults) == ("UNVERIFIABLE", False, ())
    for said in ("1 of 40 rows of C follow from NaN or Inf in A (first: row 3)", "in B (first: column 4)"):
        assert any(said in reason for reason in clean.report.reasons)
    lines = {"rows": (39, 40), "columns": (28, 30)}
    for check in clean.report.checks:
        assert (check.verified, check.lines) == lines[check.side]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for value in (1e3, np.nan, np.inf):
            product = Product(A, B, put((20, 8), value), check=side)
            assert (product.status, product.report.also) == ("CORRECTED", (Status.UNVERIFIABLE,))
            rest = np.delete(np.delete(product.wrong, 3, 0), (4, 9), 1)
            assert not rest.any()
            assert np.isnan(product.C[3]).all()
            assert np.isnan(product.C[:, 9]).all()


def test_5_nan_in_c_makes_its_line_unverifiable() -> None:
    A, B = pair(40, 60, 30)
    c = normal(40, 30, seed=7)
    c[11, 12] = np.nan
    with pytest.warns(UnverifiableWarning, match=r"A or c \(first: row 11"):
        _, report = protected_gemm(A, B, c, beta=1.0, check="rows", return_report=True)
    assert report.status is Status.UNVERIFIABLE
    assert report.checks[0].verified == 39


# ---- 6: weights that fit every column -----------------------------------------------------------------------


def an_outlier_row(B: np.ndarray, row: int = 3) -> None:
    B[row, :100] *= 1e8


def an_outlier_element(B: np.ndarray) -> None:
    B[777, 5] = 1e10


def columns_of_other_scales(B: np.ndarray) -> None:
    B *= np.logspace(-8, 8, B.shape[1])


def every_eighth_row_unlike_the_rest(B: np.ndarray) -> None:
    B[::8, : B.shape[1] // 2] *= 1e-6


def sparse(B: np.ndarray) -> None:
    B *= np.random.default_rng(1).random(B.shape) < 2e-3
    B[:, ::7] = 0.0


@pytest.mark.parametrize(
    "change",
    [
        an_outlier_row,
        partial(an_outlier_row, row=500),  # a sample of the rows can hardly hold all three
        partial(an_outlier_row, row=-1),
        an_outlier_element,
        columns_of_other_scales,
        every_eighth_row_unlike_the_rest,
        sparse,
    ],
    ids=lambda change: getattr(change, "__name__", "an_outlier_in_another_row"),
)
def test_6_no_column_is_drowned_by_another(change: Any) -> None:
    A, B = pair(96, 1024, 200)
    change(B)
    rng = np.random.default_rng(2)
    size = np.sqrt(np.mean((A @ B) ** 2, axis=0))
    size[size == 0] = size[size > 0].min()
    found = 0
    for _ in range(40):  # a change of a millionth of what is usual in its column, anywhere
        i, j = rng.integers(96), rng.integers(200)
        hook = at("multiplied", "C", lambda C, i=i, j=j: C.__setitem__((i, j), C[i, j] + 1e-6 * size[j]))
        _, report = protected_gemm(A, B, check="rows", on_error="detect", return_report=True, on_stage=hook)
        found += report.status is Status.UNCORRECTABLE
    assert found == 40


# ---- 7: beta C0 close to -A B -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=IDS[:2])
@pytest.mark.parametrize("side", SIDES)
def test_7_cancellation_against_c_stays_far_from_the_bound(dtype: Any, side: str) -> None:
    A, B = pair(100, 3000, 100, dtype)
    c = -(A @ B)
    product = Product(A, B, None, c=c, beta=1.0, check=side)
    assert product.status == "CLEAN"
    assert product.report.suspicions == 0
    assert product.report.closest < 0.5
    # and one of another size is checked as well
    faulty = Product(A, B, put((3, 4), 1.0), c=c, beta=1.0, check=side)
    assert faulty.status == "CORRECTED"
    assert not faulty.wrong.any()


# ---- 8: the bound of float64 --------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "most"), [(np.float64, 12), (np.float32, 10)])
def test_8_the_bound_is_within_ten_of_the_largest_clean_residual(dtype: Any, most: float) -> None:
    closest = []
    for seed in range(8):
        A, B = pair(256, 256, 256, dtype, seed=10 * seed)
        closest.append(protected_gemm(A, B, return_report=True)[1].closest)
    assert 1 / most < np.median(closest) < 1


# ---- 9: statistics in the data's own precision --------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=IDS[:2])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("end", ["large", "small"])
def test_9_squares_that_leave_the_range_hide_nothing(dtype: Any, side: str, end: str) -> None:
    limits = np.finfo(dtype)
    factor = float(limits.max) ** 0.35 if end == "large" else float(limits.smallest_normal) ** 0.35
    A, B = (x * dtype.type(factor) for x in pair(60, 80, 70, dtype))
    clean = Product(A, B, None, check=side)
    assert (clean.status, clean.report.faults) == ("CLEAN", ())
    product = Product(A, B, scale((5, 7), -1.0), check=side)
    assert product.status == "CORRECTED"
    assert not product.wrong.any()


# ---- 10: fingerprints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["rows", "columns", "both"])
@pytest.mark.parametrize("name", ["A", "B", "c"])
def test_10_an_operand_that_changed_is_no_checksum_fault(name: str, side: str) -> None:
    A, B = pair(40, 60, 30)
    c = normal(40, 30, seed=7)
    operand = {"A": A, "B": B, "c": c}[name]

    def hook(stage: str, arrays: Any) -> None:
        if stage == "encoded":
            operand[2, 3] += 1e-3

    with pytest.raises(SilentDataCorruptionError, match=f"{name} changed") as caught:
        protected_gemm(A, B, c, beta=1.0, check=side, on_stage=hook)
    report = caught.value.report
    assert (report.status, report.ok) == (Status.INPUT_CHANGED, False)
    assert {f.operand for f in report.faults} == {name}


# ---- 11: which side -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "side"), [((50, 9, 8), "rows"), ((8, 9, 50), "columns")])
def test_11_auto_sums_over_the_shorter_side(shape: Any, side: str) -> None:
    A, B = pair(*shape)
    (check,) = protected_gemm(A, B, return_report=True)[1].checks
    assert (check.side, check.lines) == (side, 50)
    other = "rows" if side == "columns" else "columns"
    (longer,) = protected_gemm(A, B, check=other, return_report=True)[1].checks
    assert check.detection_limit < longer.detection_limit


# ---- 12: what is promised -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("shape", [(200, 300, 200), (300, 40, 20), (20, 40, 300)])
def test_12_every_change_above_the_limit_of_the_report_is_found(dtype: Any, shape: Any) -> None:
    A, B = pair(*shape, dtype)
    C, report = protected_gemm(A, B, return_report=True)
    limit = report.checks[0].detection_limit
    size = float(np.sqrt(np.mean(C.astype(np.float64) ** 2)))
    assert 0.4 < limit / size / detection_limit(*shape, dtype) < 2.5
    rng = np.random.default_rng(3)
    found = {0.001: 0, 1.5: 0}
    for factor in found:
        for _ in range(40):
            i, j = rng.integers(shape[0]), rng.integers(shape[2])
            wanted = float(C[i, j]) + rng.choice([-1, 1]) * factor * limit
            hook = at("multiplied", "C", put((i, j), wanted))
            status = protected_gemm(A, B, on_error="detect", return_report=True, on_stage=hook)[1].status
            found[factor] += status is Status.UNCORRECTABLE
    assert found == {0.001: 0, 1.5: 40}


# ---- 13: a column that is hit is completed ------------------------------------------------------------------


@pytest.mark.parametrize(("name", "side"), [("B", "rows"), ("A", "columns"), ("B", "columns"), ("A", "rows")])
@pytest.mark.parametrize("k", [8, 256])  # where the single element's bound is below that of its line, and above
@pytest.mark.parametrize("bit", [8, 13, 16, 18, 22, 24])
def test_13_what_a_transient_fault_in_an_operand_left_is_repaired_to_its_end(
    name: str, side: str, k: int, bit: int
) -> None:
    found = 0
    for seed in range(6):
        A, B = pair(128, k, 96, np.float32, seed=seed)
        operand, place = {"A": (A, (23, 5)), "B": (B, (5, 23))}[name]
        kept = operand.copy()
        flipped = (operand[place].view(np.uint32) ^ np.uint32(1 << bit)).view(np.float32)
        product = Product(A, B, None, check=side, on_stage=transient(name, place, flipped))
        assert np.array_equal(operand, kept)
        if product.status == "CORRECTED":
            found += 1
            assert not product.wrong.any()
            exact = A.astype(np.float64) @ B
            assert np.abs(product.C - exact).max() < 2 * np.abs(A @ B - exact).max()
    assert found >= (0 if bit < 20 else 5)


# ---- 14: integer checksums ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize(
    "places", [[(2, 3), (2, 9), (5, 3)], [(2, 3), (7, 9)], [(2, 3), (2, 9)], [(2, 3), (6, 3)]], ids=str
)
def test_14_equal_flips_neither_cancel_nor_pair_up(places: list[tuple[int, int]], dtype: Any) -> None:
    A = normal(20, 30, dtype=dtype)
    B = normal(30, 10, dtype=dtype, seed=4)
    E = encode(A.copy(), repair=True)
    for place in places:
        E.array[place] = -E.array[place]
    C, report = protected_gemm(E, B, return_report=True)
    assert report.status is Status.CORRECTED
    assert {(f.operand, f.rows[0], f.columns[0]) for f in report.faults} == {("A", i, j) for i, j in places}
    assert np.array_equal(E.array, A)
    assert np.array_equal(C, protected_gemm(A, B))


# ---- 15: precedence -----------------------------------------------------------------------------------------


def test_15_the_worst_status_wins_and_the_report_lists_the_rest() -> None:
    A, B = pair(40, 60, 30)
    A[3, 5] = np.nan
    fault = put((20, 8), 1e3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        corrected = Product(A, B, fault).report
        assert (corrected.status, corrected.also) == (Status.CORRECTED, (Status.UNVERIFIABLE,))
        detected = Product(A, B, fault, on_error="detect").report
        assert (detected.status, detected.also) == (Status.UNCORRECTABLE, (Status.UNVERIFIABLE,))
        checksum = Product(A, B, None, on_stage=at("verified", "u", put((9, 0), 1e3))).report
        assert (checksum.status, checksum.also) == (Status.UNVERIFIABLE, (Status.CHECKSUM_FAULT,))
    E = encode(normal(40, 60), repair=False)
    E.array[2, 3] = 5.0
    assert protected_gemm(E, B, return_report=True)[1].status is Status.CORRECTED
    with pytest.raises(SilentDataCorruptionError):
        Product(A, B, None, on_stage=at("encoded", "B", put((1, 1), 9.0)))


# ---- 16: half precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=IDS[2:])
@pytest.mark.parametrize("side", SIDES)
def test_16_halves_are_summed_in_float32_and_rounded_once(dtype: Any, side: str) -> None:
    A, B = pair(60, 2500, 50, dtype)
    product = Product(A, B, None, check=side)
    assert product.status == "CLEAN"
    assert not product.wrong.any()
    wide = A.astype(np.float32) @ B.astype(np.float32)
    same = np.count_nonzero(wide.astype(dtype) == product.C)
    assert same / product.C.size > 0.99
    assert not rows_outside(product.C, A, B, np.random.default_rng(0)).any()
    assert not Product(np.abs(A), np.abs(B), None, check=side).wrong.any()  # sums that in 16 bits would stop growing
