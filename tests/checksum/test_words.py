"""Sums of words: what changed is noticed, and restored bit for bit where the sums tell what it was."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abft_tsm2.checksum.words import WordSums, contiguous

DTYPES = ["float64", "float32", "float16"]


def matrix(m, n, dtype, order, seed=0):
    bits = np.random.default_rng(seed).integers(0, 256, m * n * np.dtype(dtype).itemsize, dtype=np.uint8)
    return np.asarray(bits.view(dtype).reshape(m, n), order=order)  # NaN and infinities among them


def bits(x):
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


shapes = st.tuples(st.integers(1, 40), st.integers(1, 40))


@given(shapes, st.sampled_from(DTYPES), st.sampled_from("CF"), st.data())
@settings(max_examples=150, deadline=None)
def test_one_flipped_bit_is_found_and_restored(shape, dtype, order, data):
    X = matrix(*shape, dtype, order)
    sums, was = WordSums.of(X), bits(X).copy()
    assert not sums.differ(X)
    assert not sums.damaged(X)
    i, j = (data.draw(st.integers(0, size - 1)) for size in shape)
    flipped = data.draw(st.integers(1, 2 ** (8 * X.itemsize) - 1))
    X.view(f"u{X.itemsize}")[i, j] ^= flipped
    assert sums.differ(X)
    assert not sums.damaged(X)
    restored, rows, columns = sums.restored(X)
    np.testing.assert_array_equal(bits(restored), was)
    assert (rows.tolist(), columns.tolist()) == ([i], [j])
    found = sums.lines(X)
    assert i in found[0]
    assert j in found[1]


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("where", [([3] * 6, range(6)), (range(6), [5] * 6)])
def test_lines_are_restored(where, order):
    X = matrix(24, 32, "float64", order)
    sums, was = WordSums.of(X), bits(X).copy()
    X.view("u8")[tuple(map(list, where))] ^= np.array([1, 2, 4, 8, 1 << 40, 1 << 63], np.uint64)
    restored, _rows, _columns = sums.restored(X)
    np.testing.assert_array_equal(bits(restored), was)


def test_what_the_sums_do_not_tell_is_refused():
    X = matrix(24, 32, "float64", "C")
    sums = WordSums.of(X)
    X.view("u8")[np.ix_([1, 2], [3, 4])] ^= np.array([[1, 2], [4, 8]], np.uint64)  # two in each row and column
    assert sums.differ(X)
    assert sums.restored(X) is None
    assert sums.lines(X) == ((1, 2), (3, 4))


@pytest.mark.parametrize("changes", [[[7, 0], [0, 9]], [[7, 5], [5, 9]], [[1 << 30, 0], [0, 1 << 30]]])
def test_changes_are_not_paired_by_guessing(changes):
    """A square that is its own mirror image leaves the sums that two words on its diagonal do."""
    X = np.zeros((8, 8))
    sums = WordSums.of(X)
    X.view("u8")[1:3, 3:5] += np.array(changes, np.uint64)
    assert sums.differ(X)
    assert sums.restored(X) is None


def test_three_changes_that_cancel_are_not_taken_for_one_at_the_fourth_corner():
    X = matrix(24, 32, "float64", "C")
    sums = WordSums.of(X)
    X.view("u8")[[2, 2, 7], [3, 5, 3]] += np.array([9, -9, -9], np.int64).view(np.uint64)
    assert sums.differ(X)
    assert sums.restored(X) is None


@pytest.mark.parametrize("side", ["rows", "columns", "diagonals"])
def test_sums_that_were_hit_are_told_from_a_matrix_that_was(side):
    X = matrix(24, 32, "float32", "C")
    sums = WordSums.of(X)
    getattr(sums, side)[3] += np.uint64(1)
    assert sums.damaged(X)
    assert sums.differ(X)


@pytest.mark.parametrize("bit", [63, 51])
def test_changes_that_cancel_in_a_row_are_noticed(bit):
    X = np.zeros((8, 8))
    X.view("u8")[2, 5] = 1 << 51
    sums = WordSums.of(X)
    X.view("u8")[2, [1, 5]] ^= np.uint64(1 << bit)
    assert sums.differ(X)


def test_a_swap_of_two_rows_is_noticed():
    X = matrix(24, 32, "float32", "C")
    sums = WordSums.of(X)
    X[[3, 9]] = X[[9, 3]]
    assert sums.differ(X)


@given(shapes, st.sampled_from(DTYPES), st.sampled_from("CF"), st.integers(0, 1), st.randoms())
@settings(max_examples=300, deadline=None)
def test_lines_of_one_sum_that_change_places_are_noticed(shape, dtype, order, axis, random):
    m, n = shape
    X = np.zeros(shape, dtype, order=order)
    X[range(m), [random.randrange(n) for _ in range(m)]] = 1  # all rows have one sum, and some of the columns
    i, j = random.randrange(shape[axis]), random.randrange(shape[axis])
    sums, Y = WordSums.of(X), X.copy(order=order)
    lines = Y if axis == 0 else Y.T
    lines[[i, j]] = lines[[j, i]]
    assert bool(sums.differ(Y)) == (not np.array_equal(X, Y))


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("shape", [(8, 8), (40, 3), (3, 40), (1, 9), (9, 1)])
def test_any_two_elements_that_change_places_are_noticed(shape, order):
    X = np.asarray(np.arange(float(shape[0] * shape[1])).reshape(shape), order=order)
    sums, places = WordSums.of(X), list(np.ndindex(shape))
    for one in places:
        for other in places:
            Y = X.copy(order=order)
            Y[one], Y[other] = X[other], X[one]
            assert bool(sums.differ(Y)) == (one != other)


def test_strided_matrices_are_copied():
    X = np.arange(48.0).reshape(6, 8)
    assert contiguous(X) is X
    assert np.shares_memory(contiguous(X.T), X)
    part = contiguous(X[::2, ::2])
    assert part.flags.c_contiguous
    np.testing.assert_array_equal(part, X[::2, ::2])
