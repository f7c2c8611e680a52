"""Integer checksums: every wrong bit of a stored matrix is found, and restored exactly or refused."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abft_tsm2.checksum import storage as integers
from abft_tsm2.checksum.storage import Corruption, Diagnosis, diagnose_storage, integer_checksums, restore
from abft_tsm2.errors import AbftError
from tests.support.cases import DTYPES, ORDERS, arrange

SHAPES = ((1, 1), (1, 6), (6, 1), (3, 5), (17, 2), (2, 17), (16, 16), (31, 33))
LONG = 2500  # long enough for three multipliers in arithmetic progression
IDS = [dtype.name for dtype in DTYPES]


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


def sample(shape: tuple[int, int], dtype: Any, seed: int = 0) -> np.ndarray:
    """Any bit pattern at all, NaN payloads included."""
    rng = np.random.default_rng([seed, *shape])
    return rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)[..., 0]


def flip(x: np.ndarray, i: int, j: int, bit: int) -> None:
    bits(x)[i, j] ^= bits(x).dtype.type(1) << bit


def with_changes(shape: tuple[int, int], changes: dict[tuple[int, int], int]) -> tuple[Any, Any, Any]:
    """A float32 matrix of patterns near 2**20, its checksums, and a copy with these patterns changed."""
    right = (np.random.default_rng(1).integers(0, 1000, shape) + 2**20).astype(np.uint32).view(np.float32)
    wrong = right.copy()
    for place, change in changes.items():
        bits(wrong)[place] = int(bits(wrong)[place]) + change
    return right, integer_checksums(right), wrong


def is_restored(right: np.ndarray, sums: Any, wrong: np.ndarray) -> bool:
    """The oracle: restored bit for bit, or refused; anything else fails, and so does touching the matrix."""
    held = bits(wrong).copy()
    found = diagnose_storage(wrong, sums)
    assert np.array_equal(bits(wrong), held)
    assert sum(map(bool, (found.clean, found.corruptions, found.refused, found.checksum_fault))) == 1
    if np.array_equal(held, bits(right)):
        assert found == Diagnosis(clean=True)
        return True
    if found.refused:
        return False
    places = np.argwhere(bits(wrong) != bits(right)).tolist()
    assert [[c.row, c.column] for c in found.corruptions] == places
    restore(wrong, found.corruptions)
    assert np.array_equal(bits(wrong), bits(right))
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("order", ORDERS)
def test_sums_are_those_of_python_integers(dtype: np.dtype[Any], order: str) -> None:
    for shape in SHAPES:
        x = arrange(sample(shape, dtype), order)
        sums = integer_checksums(x)
        a, b = integers._multipliers(shape[1]).tolist(), integers._multipliers(shape[0]).tolist()
        for w in range(2 if dtype.itemsize == 8 else 1):
            words = [[(p >> 32 * w) & 0xFFFFFFFF for p in row] for row in bits(x).tolist()]
            rows = [[sum(row), sum(map(int.__mul__, row, a)) % 2**64] for row in words]
            columns = [[sum(c), sum(map(int.__mul__, c, b)) % 2**64] for c in zip(*words, strict=True)]
            assert sums.rows[w].T.tolist() == rows
            assert sums.columns[w].T.tolist() == columns


def test_sums_do_not_depend_on_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample((70, 90), np.float64)
    whole = integer_checksums(x)
    for tile in (1, 16, 100, 1000):
        monkeypatch.setattr(integers, "_TILE", tile)
        assert np.array_equal(integer_checksums(x).rows, whole.rows)
        assert np.array_equal(integer_checksums(x).columns, whole.columns)


def test_multipliers_are_fixed_odd_and_different() -> None:
    a = integers._multipliers(200_000)
    # Sums stored by an older version must stay valid.
    assert a[:3].tolist() == [1218489105, 861219799, 1723548553]
    assert np.all(a % 2 == 1)
    assert a.max() < 2**31
    assert np.unique(a).size == a.size
    assert np.array_equal(integers._multipliers(1000), a[:1000])


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_empty_matrices_are_clean(shape: tuple[int, int]) -> None:
    x = np.empty(shape)
    sums = integer_checksums(x)
    assert diagnose_storage(x, sums).clean
    restore(x, ())
    if x.shape[0]:
        sums.rows[0, 0, 2] ^= np.uint64(8)
        assert diagnose_storage(x, sums).checksum_fault


@pytest.mark.parametrize("order", ["F", "strided"])
def test_never_a_full_size_copy(order: str) -> None:
    x = arrange(sample((1500, 1700), np.float64), order)
    integer_checksums(x[:2, :2])
    tracemalloc.start()
    sums = integer_checksums(x)
    assert diagnose_storage(x, sums).clean
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3e6 < x.nbytes / 6


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_every_single_bit_is_found_and_restored(dtype: np.dtype[Any]) -> None:
    for shape in ((1, 1), (1, 5), (5, 1), (3, 4)):
        right = sample(shape, dtype)
        sums = integer_checksums(right)
        assert diagnose_storage(right, sums).clean
        for i, j, bit in np.ndindex(*shape, 8 * dtype.itemsize):
            wrong = right.copy()
            flip(wrong, i, j, bit)
            found = diagnose_storage(wrong, sums)
            expected = Corruption(i, j, int(bits(wrong)[i, j]), int(bits(right)[i, j]))
            assert found == Diagnosis(False, (expected,), rows=(i,), columns=(j,))
            assert is_restored(right, sums, wrong)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_any_order_and_size(dtype: np.dtype[Any], order: str) -> None:
    for shape in (*SHAPES, (700, 3), (3, 700), (130, 257)):
        right = sample(shape, dtype)
        x = arrange(right, order)
        sums = integer_checksums(x)
        assert diagnose_storage(right, sums).clean
        flip(x, shape[0] - 1, shape[1] // 2, 8 * dtype.itemsize - 1)
        assert is_restored(right, sums, x)


@pytest.mark.parametrize("special", [0x7FF0DEADBEEF0001, 0xFFF8000000000123, 1 << 63, 0x7FF << 52, 1, 0])
def test_nan_payloads_and_signed_zeros_survive(special: int) -> None:
    right = np.ones((4, 4))
    bits(right)[:] = special
    sums = integer_checksums(right)
    wrong = right.copy()
    wrong[2] = -0.0
    wrong[3, 1] = np.nan
    assert is_restored(right, sums, wrong)


@settings(max_examples=400)
@given(
    shape=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(ORDERS),
    flips=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 63)), min_size=1, max_size=8),
)
def test_restored_bit_for_bit_or_refused(shape: Any, dtype: Any, order: str, flips: Any) -> None:
    right = sample(shape, dtype)
    x = arrange(right, order)
    sums = integer_checksums(x)
    for i, j, bit in flips:
        flip(x, i % shape[0], j % shape[1], bit % (8 * dtype.itemsize))
    rows, columns = np.nonzero(bits(x) != bits(right))
    promised = len(set(rows)) == len(rows) or len(set(columns)) == len(columns)
    assert is_restored(right, sums, x) or not promised


@settings(max_examples=200)
@given(
    places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8, unique=True),
    signs=st.lists(st.sampled_from([1, -1]), min_size=8, max_size=8),
)
def test_equal_and_opposite_changes(places: Any, signs: Any) -> None:
    changes = {place: 4096 * sign for place, sign in zip(places, signs, strict=False)}
    rows, columns = ({place[axis] for place in places} for axis in (0, 1))
    restored = is_restored(*with_changes((4, 4), changes))
    assert restored or len(places) not in (len(rows), len(columns))


@pytest.mark.parametrize(
    ("changes", "also"),
    [
        ({(1, 2): 64, (4, 5): 64}, {(1, 5): 64, (4, 2): 64}),  # equal flips: the other diagonal
        ({(1, 2): 64, (1, 5): -64, (4, 5): 64}, {(4, 2): 64}),  # three corners: one fault in the fourth
    ],
)
def test_what_plain_sums_would_pair_wrongly(changes: Any, also: Any) -> None:
    """Needs the weighted sums: the plain ones cannot tell the changes from others."""
    right, sums, wrong = with_changes((6, 7), changes)
    now, other = integer_checksums(wrong), integer_checksums(with_changes((6, 7), also)[2])
    assert np.array_equal(now.rows[:, 0], other.rows[:, 0])
    assert np.array_equal(now.columns[:, 0], other.columns[:, 0])
    assert {(c.row, c.column) for c in diagnose_storage(wrong, sums).corruptions} == set(changes)
    assert is_restored(right, sums, wrong)


def test_a_whole_rectangle_is_refused_not_called_clean() -> None:
    right, sums, wrong = with_changes((6, 7), {(1, 2): 64, (1, 5): -64, (4, 5): 64, (4, 2): -64})
    found = diagnose_storage(wrong, sums)
    assert (found.rows, found.columns) == ((1, 4), (2, 5))
    assert "2 of 6 rows and 2 of 7 columns" in found.refused
    assert not is_restored(right, sums, wrong)


def progression(length: int) -> tuple[int, int, int]:
    """Places whose multipliers are an arithmetic progression, the mean first."""
    a = integers._multipliers(length).astype(np.int64)
    place = {int(value): at for at, value in enumerate(a)}
    for i, j in itertools.combinations(range(length), 2):
        mean = place.get(int(a[i] + a[j]) // 2)
        if mean is not None:
            return mean, i, j
    raise AssertionError("no progression: take a longer line")


def test_what_one_wrong_word_explains() -> None:
    a = integers._multipliers(9).tolist()
    explained = [(64, 64 * a[5]), (-1, -a[0]), (2**32 - 1, (2**32 - 1) * a[8])]
    b = 64 * a[5]
    others = [(0, 64), (64, 0), (64, -b), (64, b + 1), (64, b + 64), (2**32, 2**32 * a[5])]
    residual = np.array([[x % 2**64 for x in pair] for pair in explained + others], np.uint64).T
    lines, places, changes = integers._single(residual, 32, 9)
    assert (lines.tolist(), places.tolist()) == ([0, 1, 2], [5, 0, 8])
    assert changes.tolist() == [64, 2**64 - 1, 2**32 - 1]


@pytest.mark.parametrize("transposed", [False, True])
def test_two_changes_that_look_like_one_in_their_line(transposed: bool) -> None:
    """Needs the other side: by its own sums, the line says twice the change at a third place."""
    mean, i, j = progression(LONG)
    right, sums, wrong = with_changes((3, LONG), {(1, i): 32, (1, j): 32})
    if transposed:
        right, wrong = right.T, wrong.T
        sums = integer_checksums(right)
    now = integer_checksums(wrong)
    left = (now.columns - sums.columns if transposed else now.rows - sums.rows)[0]
    line, place, change = integers._single(left, 32, LONG)
    assert (line.tolist(), place.tolist(), change.tolist()) == ([1], [mean], [64])
    assert is_restored(right, sums, wrong)


def test_changes_that_cancel_in_both_sums_of_their_column() -> None:
    """The column says nothing at all; the rows alone name the three places, which is no checksum fault."""
    mean, i, j = progression(LONG)
    right, sums, wrong = with_changes((LONG, 3), {(i, 2): 32, (j, 2): 32, (mean, 2): -64})
    assert diagnose_storage(wrong, sums).columns == ()
    assert is_restored(right, sums, wrong)


def test_a_restored_word_out_of_range_is_refused() -> None:
    right = np.zeros((3, 3), np.float16)
    sums = integer_checksums(right)
    # Sums of a matrix whose element (1, 1) was -1: no bit pattern is.
    for line in (sums.rows[0], sums.columns[0]):
        line[:, 1] -= np.array([1, integers._multipliers(3)[1]], np.uint64)
    found = diagnose_storage(right, sums)
    assert (bool(found.refused), found.corruptions) == (True, ())


def test_changes_that_cancel_in_a_column_are_found_by_rows() -> None:
    right, sums, wrong = with_changes((6, 8), {(1, 2): 64, (4, 2): -64})
    assert is_restored(right, sums, wrong)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_a_hit_stored_sum_is_a_checksum_fault(dtype: np.dtype[Any], side: str) -> None:
    for shape in ((1, 1), (3, 4)):
        right = sample(shape, dtype)
        sums = integer_checksums(right)
        for at in np.ndindex(*getattr(sums, side).shape):
            for bit in range(64):
                hit = getattr(sums, side).copy()
                hit[at] ^= np.uint64(1) << np.uint64(bit)
                found = diagnose_storage(right, replace(sums, **{side: hit}))
                assert found == Diagnosis(False, checksum_fault=True, **{side: (at[2],)})


def test_lost_sums_of_one_side_are_a_checksum_fault_and_another_matrix_is_refused() -> None:
    right = sample((50, 60), np.float64)
    sums = integer_checksums(right)
    assert not is_restored(right, sums, sample((50, 60), np.float64, seed=1))
    rng = np.random.default_rng(0)
    for rows in (np.zeros_like(sums.rows), rng.integers(0, 2**64, sums.rows.shape, dtype=np.uint64)):
        found = diagnose_storage(right, replace(sums, rows=rows))
        assert found.checksum_fault
        assert len(found.rows) == 50


def test_a_fault_of_the_checksums_never_alters_the_matrix_with_one_of_its_own() -> None:
    right, sums, wrong = with_changes((6, 7), {(1, 2): 64})
    for side, line in (("rows", 1), ("rows", 4), ("columns", 2), ("columns", 5)):
        hit = getattr(sums, side).copy()
        hit[0, 0, line] += np.uint64(64)
        found = diagnose_storage(wrong, replace(sums, **{side: hit}))
        assert "stored checksums" in found.refused
        assert found.corruptions == ()
    assert is_restored(right, sums, wrong)


def test_both_sums_of_a_line_hit_as_one_element_would_is_refused() -> None:
    right, sums, _ = with_changes((6, 7), {})
    sums.rows[0, :, 2] -= np.array([64, 64 * int(integers._multipliers(7)[3])], np.uint64)
    found = diagnose_storage(right, sums)
    assert (bool(found.refused), found.rows, found.columns) == (True, (2,), ())


def test_what_cannot_be_encoded() -> None:
    with pytest.raises(TypeError, match="int64"):
        integer_checksums(np.zeros((2, 2), np.int64))
    with pytest.raises(ValueError, match="encode its parts"):
        integer_checksums(np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match="at most 1073741824"):
        integer_checksums(np.broadcast_to(np.float16(0), (1, 2**30 + 1)))


def test_checksums_of_another_matrix() -> None:
    sums = integer_checksums(np.zeros((3, 4)))
    for other in (np.zeros((4, 3)), np.zeros((3, 4), np.float32)):
        with pytest.raises(ValueError, match=r"\(3, 4\) matrix with 8-byte"):
            diagnose_storage(other, sums)


def test_restore_writes_all_or_nothing() -> None:
    right, sums, wrong = with_changes((6, 7), {(1, 2): 64, (3, 3): 64})
    corruptions = diagnose_storage(wrong, sums).corruptions
    flip(wrong, 3, 3, 9)
    held = wrong.copy()
    with pytest.raises(AbftError, match=r"element \(3, 3\) holds 0x.* diagnose the matrix again"):
        restore(wrong, corruptions)
    with pytest.raises(ValueError, match="outside the 2 x 2"):
        restore(wrong[:2, :2], corruptions)
    with pytest.raises(ValueError, match="outside"):
        restore(wrong, [Corruption(-1, 0, 0, 0)])
    assert np.array_equal(bits(wrong), bits(held))
    flip(wrong, 3, 3, 9)
    wrong.flags.writeable = False
    assert diagnose_storage(wrong, sums).corruptions == corruptions
    with pytest.raises(ValueError, match="read-only"):
        restore(wrong, corruptions)
    wrong.flags.writeable = True
    restore(wrong, corruptions)
    restore(wrong, corruptions)  # a second time does no harm
    assert np.array_equal(bits(wrong), bits(right))


def test_through_the_array_api_standard() -> None:
    strict = pytest.importorskip("array_api_strict")
    right = np.arange(12.0).reshape(3, 4)
    sums = integer_checksums(strict.asarray(right))
    assert np.array_equal(sums.rows, integer_checksums(right).rows)
    wrong = right.copy()
    flip(wrong, 2, 1, 0)
    found = diagnose_storage(strict.asarray(wrong), sums)
    assert [(c.row, c.column) for c in found.corruptions] == [(2, 1)]
