"""Encoding: what an encoded matrix carries into products, and how it is guarded in memory."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2 import Encoded, SilentDataCorruptionError, Status, encode, monitor, protected_gemm, weights
from benchmarks import families
from tests.support.cases import DTYPES, ORDERS, arrange
from tests.support.oracles import WIDE, elements_outside

IDS = [dtype.name for dtype in DTYPES]
SHAPES = ((1, 1), (1, 9), (9, 1), (3, 4), (40, 30), (200, 33), (33, 700))


def sample(shape: tuple[int, int], dtype: Any = np.float64, order: str = "C", seed: int = 0) -> np.ndarray:
    return arrange(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype), order)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def flip(x: np.ndarray, i: int, j: int, bit: int) -> None:
    bits(x)[i, j] ^= bits(x).dtype.type(1) << bit


def close(sums: np.ndarray, left: np.ndarray, right: np.ndarray) -> bool:
    """Whether `sums` is left @ right up to the rounding of float64 sums."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    k = left.shape[1]
    return bool((abs(sums - left @ right) <= 2 * (k + 1) * 2.0**-53 * (abs(left) @ abs(right))).all())


# ---- checksums ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_both_sides(dtype: np.dtype[Any], order: str) -> None:
    for p, q in SHAPES:
        A = sample((p, q), dtype, order)
        E = encode(A)
        assert E.array is A
        assert E.shape == (p, q)
        assert E.row_checksums.shape == (p, 1)
        assert E.column_checksums.shape == (1, q)
        assert E.weights.rows.shape == (q, 1)
        assert E.weights.columns.shape == (p, 1)
        assert E.row_checksums.dtype == E.column_checksums.dtype == np.float64
        assert close(E.row_checksums, A, E.weights.rows)
        assert close(E.column_checksums, E.weights.columns.T, A)
        wide = A.astype(np.float64)
        np.testing.assert_allclose(E.norms.rows, np.linalg.norm(wide, axis=1), rtol=1e-4)
        np.testing.assert_allclose(E.norms.columns, np.linalg.norm(wide, axis=0), rtol=1e-4)


def test_one_side() -> None:
    A = sample((5, 7))
    rows, columns = encode(A, side="rows"), encode(A, side="columns")
    assert rows.column_checksums is None
    assert rows.weights.columns is None
    assert close(rows.row_checksums, A, rows.weights.rows)
    assert columns.row_checksums is None
    assert columns.weights.rows is None
    assert close(columns.column_checksums, columns.weights.columns.T, A)


@pytest.mark.parametrize("kind", ["ones", "linear", "signs", "normal", "vandermonde", "chebyshev", "dct"])
def test_a_family_is_used_as_it_is(kind: str) -> None:
    A = sample((20, 30), np.float32)
    E = encode(A, weights=kind)
    assert np.array_equal(E.weights.rows, weights(kind, 30))
    assert np.array_equal(E.weights.columns, weights(kind, 20))
    assert close(E.row_checksums, A, weights(kind, 30))


def test_explicit_weights() -> None:
    A = sample((20, 30))
    V, W = weights("balanced", 30, 3), weights("normal", 20, 2)
    E = encode(A, weights=(V, W))
    assert np.array_equal(E.weights.rows, V)
    assert np.array_equal(E.weights.columns, W)
    assert E.row_checksums.shape == (20, 3)
    assert E.column_checksums.shape == (2, 30)
    assert close(E.row_checksums, A, V)
    assert close(E.column_checksums, W.T, A)
    assert encode(A, side="rows", weights=[1.0] * 30).row_checksums.shape == (20, 1)
    assert np.array_equal(encode(A, weights=("ones", None)).weights.rows, np.ones((30, 1)))
    square = sample((9, 9))
    assert np.array_equal(encode(square, weights=np.arange(1.0, 10)).weights.columns[:, 0], np.arange(1.0, 10))


def test_refused() -> None:
    A = sample((5, 7))
    for bad, message in (
        (np.ones(6), r"row weights have shape \(6,\): expected \(7,\) or \(7, r\)"),
        (np.ones((7, 0)), "row weights have shape"),
        (np.ones((7, 1, 1)), "row weights have shape"),
        (np.full(7, np.nan), "row weights hold NaN or Inf"),
        (np.full(7, np.inf), "row weights hold NaN or Inf"),
        ("random", "unknown weights 'random'"),
    ):
        with pytest.raises(ValueError, match=message):
            encode(A, side="rows", weights=bad)
    with pytest.raises(ValueError, match="column weights"):
        encode(A, weights=(np.ones(7), np.ones(4)))
    with pytest.raises(ValueError, match="side is 'row': choose"):
        encode(A, side="row")
    for batch in (np.ones(3), np.ones((2, 3, 4)), 1.0):
        with pytest.raises(ValueError, match="encode takes one matrix"):
            encode(batch)
    with pytest.raises(TypeError, match=r"pass A\.array"):
        encode(encode(A))


@pytest.mark.parametrize("at", [slice(None), 2])
def test_weights_that_see_nothing_are_refused(at: Any) -> None:
    V = np.ones(7)
    V[at] = 0.0
    with pytest.raises(ValueError, match="weight"):
        encode(sample((5, 7)), side="rows", weights=V)
    several = np.stack([V, np.ones(7)], axis=1)  # what one column does not see, another does
    assert encode(sample((5, 7)), side="rows", weights=several).row_checksums.shape == (5, 2)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1), (5, 1), (1, 5)])
@pytest.mark.parametrize("side", ["rows", "columns", "both"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_empty_and_smallest(shape: tuple[int, int], side: str, order: str) -> None:
    E = encode(np.ones(shape, order=order), side=side)
    assert not E.changed()
    assert E.verify().status is Status.CLEAN
    assert E.correct().status is Status.CLEAN
    C = protected_gemm(E, np.ones((shape[1], 3)))
    assert np.array_equal(C, np.full((shape[0], 3), float(shape[1])))


# ---- equilibration ------------------------------------------------------------------------------------------


def scales(A: np.ndarray) -> np.ndarray:
    """log2 of each column's norm times its weight: how loud it is in a checksum."""
    V = encode(A, side="rows").weights.rows
    wide = A.astype(WIDE)  # the square of 1e300 is in its range
    return np.log2(np.sqrt((wide * wide).sum(axis=0)) * abs(V[:, 0]))


@pytest.mark.parametrize("k", [64, 128, 256, 300, 1000, 1024, 4096])
def test_homogeneous_columns_get_one_scale(k: int) -> None:
    V = encode(sample((k, 60), np.float32), side="rows").weights.rows
    assert abs(V).max() <= 1.5 * abs(V).min() * (1 if k >= 128 else 2)


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("k", [5, 200, 3000])
def test_no_column_drowns_another(name: str, k: int) -> None:
    for family in ("illrowcol", "illinner", "normal", "uniform01", "lowrank"):
        _, B = families.operands(family, 3, k, 50, np.random.default_rng(1), np.dtype(name))
        assert np.ptp(scales(B)) <= 5, family


@pytest.mark.parametrize("factor", [1e2, 1e6, 1e12])
@pytest.mark.parametrize("row", [0, 777, 2999])
def test_an_outlier_that_a_sample_misses_is_noticed(row: int, factor: float) -> None:
    A = sample((3000, 20))
    A[row, 5] *= factor
    assert np.ptp(scales(A)) <= 6
    A[row] *= factor
    assert np.ptp(scales(A)) <= 6


def test_zero_columns_and_huge_and_tiny_ones() -> None:
    A = sample((50, 6))
    A[:, 1] = 0
    A[:, 2] *= 1e300
    A[:, 3] *= 1e-300
    A[:, 4] = 5e-324
    V = encode(A, side="rows").weights.rows[:, 0]
    assert np.isfinite(V).all()
    assert (V != 0).all()
    with np.errstate(divide="ignore"):
        assert np.ptp(scales(A)[[0, 2, 3, 5]]) <= 2
    assert 0.5 <= abs(V[1] / V[4]) <= 2  # a zero column takes the smallest scale of the others


# ---- storage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["both", "rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_any_flipped_bit_is_found_and_restored(dtype: np.dtype[Any], side: str) -> None:
    A = sample((6, 5), dtype)
    A[1, 1], A[2, 2], A[3, 3] = np.nan, -np.inf, -0.0
    right = A.copy()
    E = encode(A, side=side)
    assert not E.changed()
    assert E.verify().status is Status.CLEAN
    for bit in range(8 * dtype.itemsize):
        i, j = bit % 6, bit % 5
        flip(A, i, j, bit)
        assert E.changed()
        report = E.verify()
        assert report.status is Status.INPUT_CHANGED
        assert report.operation == "encoded"
        assert [(f.operand, f.rows, f.columns, f.repair) for f in report.faults] == [("A", (i,), (j,), "")]
        report = E.correct()
        assert report.status is Status.CORRECTED
        assert report.ok
        assert "bit for bit" in report.faults[0].repair
        assert np.array_equal(bits(A), bits(right))
    assert not E.changed()


def test_several_rows_at_once() -> None:
    A = sample((30, 20), np.float32, "F")
    right, E = A.copy(), encode(A)
    for i in range(0, 30, 2):
        flip(A, i, i % 20, 30)
    with monitor() as log:
        assert len(E.verify().faults) == 15
        assert E.correct().status is Status.CORRECTED
    assert [report.status for report in log] == [Status.INPUT_CHANGED, Status.CORRECTED]
    assert np.array_equal(bits(A), bits(right))


@pytest.mark.parametrize("repair", [False, True])
def test_what_cannot_be_determined_is_refused_and_left(repair: bool) -> None:
    A = sample((6, 6))
    E = encode(A, repair=repair)
    A[1:3, 1:3] += 1.0  # two wrong elements in each of two rows and columns
    wrong = A.copy()
    assert E.verify().status is Status.INPUT_CHANGED
    with pytest.raises(SilentDataCorruptionError, match="wrong elements share rows and columns") as error:
        E.correct()
    assert error.value.report.status is Status.UNCORRECTABLE
    assert error.value.report.reasons
    with pytest.raises(SilentDataCorruptionError):
        protected_gemm(E, np.ones((6, 2)))
    assert np.array_equal(bits(A), bits(wrong))


def test_a_read_only_array_is_not_written() -> None:
    A = sample((6, 6))
    right = A.copy()
    for repair in (False, True):
        E = encode(A, repair=repair)
        flip(A, 2, 3, 40)
        A.flags.writeable = False
        assert E.verify().status is Status.INPUT_CHANGED
        with pytest.raises(ValueError, match="read-only"):
            E.correct()
        C, report = protected_gemm(E, np.eye(6), return_report=True)
        assert report.status is Status.CORRECTED
        assert np.array_equal(C, right)
        assert not np.array_equal(A, right)
        A.flags.writeable = True
        E.correct()
        assert np.array_equal(A, right)


def test_a_damaged_integer_checksum_is_not_a_damaged_matrix() -> None:
    A = sample((6, 6))
    right, E = A.copy(), encode(A)
    E.integers.rows[0, 0, 2] ^= np.uint64(8)
    assert E.verify().status is Status.CHECKSUM_FAULT
    assert E.correct().status is Status.CHECKSUM_FAULT
    assert np.array_equal(A, right)


def test_an_encoded_matrix_survives_pickling() -> None:
    E = pickle.loads(pickle.dumps(encode(sample((9, 8), np.float32))))
    assert isinstance(E, Encoded)
    flip(E.array, 2, 3, 5)
    assert E.correct().status is Status.CORRECTED


# ---- in products --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["both", "rows", "columns"])
@pytest.mark.parametrize("check", ["auto", "rows", "columns", "both"])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_reused_over_many_products(dtype: np.dtype[Any], check: str, side: str) -> None:
    B = sample((40, 30), dtype, seed=1)
    E = encode(B, side=side)
    for p in (1, 7, 90):
        left, right = sample((p, 40), dtype), sample((30, p), dtype)
        for a, b, plain in ((left, E, (left, B)), (E, right, (B, right)), (E, encode(right), (B, right))):
            C, report = protected_gemm(a, b, check=check, return_report=True)
            assert report.status is Status.CLEAN
            assert np.array_equal(C, protected_gemm(*plain))
    batch = np.stack([sample((5, 40), dtype, seed=s) for s in range(3)])
    C, report = protected_gemm(batch, E, check=check, return_report=True)
    assert report.status is Status.CLEAN
    assert np.array_equal(C[2], protected_gemm(batch[2], B))


@pytest.mark.parametrize("recheck", [True, False])
@pytest.mark.parametrize("repair", [True, False])
@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize("operand", ["A", "B"])
def test_an_operand_that_changed_is_restored(operand: str, check: str, repair: bool, recheck: bool) -> None:
    A, B = sample((30, 20)), sample((20, 25), seed=1)
    C = A @ B
    held = {"A": A, "B": B}[operand]
    E = encode(held, repair=repair, recheck=recheck)
    right = held.copy()
    flip(held, 3, 4, 58)
    carries = {"A": ("columns", "both"), "B": ("rows", "both")}[operand]
    if not recheck and check not in carries:
        return  # nothing of the encoding is looked at then
    a, b = (E, B) if operand == "A" else (A, E)
    found, report = protected_gemm(a, b, check=check, return_report=True)
    assert report.status is Status.CORRECTED
    assert [(f.operand, f.rows, f.columns) for f in report.faults] == [(operand, (3,), (4,))]
    assert not elements_outside(found, {"A": right, "B": A}[operand], {"A": B, "B": right}[operand]).any()
    assert np.array_equal(found, C)
    assert np.array_equal(held, right) is repair


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30, 1.0, 0.0])
@pytest.mark.parametrize("fault", [False, True])
def test_damaged_carried_checksums(bad: float, fault: bool) -> None:
    A, B = sample((30, 20)), sample((20, 25), seed=1)

    def damage(stage: str, arrays: Any) -> None:
        if fault and stage == "multiplied":
            arrays["C"][4, 2] *= -3

    for check in ("rows", "columns"):
        E = encode(B if check == "rows" else A)
        sums = E.row_checksums if check == "rows" else E.column_checksums.T
        sums[2, 0] = bad
        a, b = (A, E) if check == "rows" else (E, B)
        C, report = protected_gemm(a, b, check=check, return_report=True, on_stage=damage)
        assert report.status is (Status.CORRECTED if fault else Status.CHECKSUM_FAULT)
        assert Status.CHECKSUM_FAULT in (report.status, *report.also)
        assert not elements_outside(C, A, B).any()
        assert np.array_equal(np.delete(C, 4, axis=0), np.delete(A @ B, 4, axis=0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300, 1e30, 1.0, 0.0])
def test_damaged_weights_hide_no_fault(bad: float) -> None:
    A, B = sample((30, 20)), sample((20, 25), seed=1)

    def damage(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            arrays["C"][4, 2] *= -3

    E = encode(B)
    E.weights.rows[2, 0] = bad
    C, report = protected_gemm(A, E, check="rows", return_report=True, on_stage=damage)
    assert report.status is Status.CORRECTED
    assert not elements_outside(C, A, B).any()


@given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES), st.sampled_from(families.names()))
def test_any_data_can_be_encoded(seed: int, dtype: Any, family: str) -> None:
    rng = np.random.default_rng(seed)
    A, B = families.operands(family, 9, 12, 7, rng, dtype)
    for X, E in ((A, encode(A)), (B, encode(B))):
        assert not E.changed()
        assert np.isfinite(E.weights.rows).all()
        assert np.isfinite(E.weights.columns).all()
        flip(X, int(rng.integers(X.shape[0])), int(rng.integers(X.shape[1])), int(rng.integers(16)))
        assert E.changed()
        assert E.correct().status is Status.CORRECTED
        assert not E.changed()


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "f2"), ("dtype", "i4"), ("dtype", ">f4"), ("dtype", "i2"), ("shape", (4, 7))],
    ids=str,
)
def test_an_array_that_was_typed_anew_in_place_is_refused(name: str, value: Any) -> None:
    A = sample((7, 4), np.float32)
    E = encode(A)
    kept = getattr(A, name)
    setattr(A, name, value)
    uses = (lambda: protected_gemm(np.ones((2, 7), np.float32), E), lambda: protected_gemm(E, np.ones((4, 2))))
    for use in (*uses, E.changed, E.verify, E.correct):
        with pytest.raises(ValueError, match=r"encoded as \(7, 4\) of float32 and is .* now"):
            use()
    setattr(A, name, kept)
    assert E.verify().status is Status.CLEAN
    assert protected_gemm(np.ones((2, 7), np.float32), E, return_report=True)[1].status is Status.CLEAN


def test_wrong_arguments_of_encode_are_named() -> None:
    A = sample((3, 4))
    for wrong in (np.ones(4) * 1j, np.ones(4) > 0, ["1"] * 4, [10**400] * 4):
        with pytest.raises(TypeError, match="row weights have dtype"):
            encode(A, "rows", weights=wrong)
    for wrong in ((), (None,), (None, None, None)):
        with pytest.raises(ValueError, match="a pair is expected"):
            encode(A, weights=wrong)
    for name in ("repair", "recheck"):
        with pytest.raises(TypeError, match=f"{name} is 'no': True or False"):
            encode(A, **{name: "no"})
    assert encode(A, repair=np.True_).repair
