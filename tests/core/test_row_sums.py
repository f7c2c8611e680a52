"""Passes over a matrix: sums, squares and fingerprints, in any order, type and size, on one core or several."""

from __future__ import annotations

import concurrent.futures.thread
import itertools
import multiprocessing
import os
import signal
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.arrays import is_column_major
from abft_tsm2.core import row_sums
from abft_tsm2.core.flushing import flushing_mode
from abft_tsm2.core.ordered_sums import multipliers
from abft_tsm2.core.row_sums import (
    column_squares,
    encoding_pass,
    fingerprint,
    rows_per_block,
    squares_of_columns,
    summed_squares,
    weighted_squares,
    weighted_sums,
    widened,
)
from tests.support.cases import DTYPES, ORDERS, arrange
from tests.support.nesting import after_calls

IDS = [dtype.name for dtype in DTYPES]
SHAPES = ((0, 0), (0, 5), (5, 0), (1, 1), (1, 9), (9, 1), (3, 4), (8, 8), (17, 33), (130, 67), (7, 3001), (3001, 7))
BIG = (700, 401)  # above the size from which a pass is shared between cores


def sample(shape: tuple[int, int], dtype: Any, order: str = "C", seed: int = 0) -> np.ndarray:
    return arrange(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype), order)


def weight_columns(n: int, r: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, r))


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with four cores, however small the matrix."""
    monkeypatch.setattr(row_sums, "workers", lambda: 4)
    monkeypatch.setattr(row_sums, "SERIAL_ELEMENTS", 1)
    monkeypatch.setattr(row_sums, "BLOCK_BYTES", 4096)


def check_pass(x: np.ndarray, r: int, h: int) -> None:
    """Sums and squares of a matrix against float64."""
    W, W2 = weight_columns(x.shape[1], r), weight_columns(h, r, 2) ** 2
    sums = encoding_pass(x, W)
    wide = x.astype(np.float64)
    assert sums.shape == (x.shape[0], r)
    assert sums.dtype == np.float64
    k = x.shape[1]
    assert (np.abs(sums - wide @ W) <= 2 * (k + 1) * 2.0**-53 * (np.abs(wide) @ np.abs(W))).all()
    for in_double in (False, True):
        squares = weighted_squares(x, W2, wide=in_double)
        assert squares.shape == (x.shape[0], r)
        assert squares.dtype == (np.float64 if in_double or x.dtype.itemsize == 8 else np.float32)
        np.testing.assert_allclose(squares, wide[:, :h] ** 2 @ W2, rtol=1e-13 if in_double else 1e-4)


# ---- one pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_a_pass_over_any_order_type_and_size(dtype: np.dtype[Any], order: str) -> None:
    for shape in SHAPES:
        check_pass(sample(shape, dtype, order), 1, shape[1])
        check_pass(sample(shape, dtype, order), 3, (shape[1] + 1) // 2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_a_pass_in_many_blocks_on_several_cores(four_cores: None, dtype: np.dtype[Any], order: str) -> None:
    for shape in SHAPES:
        check_pass(sample(shape, dtype, order), 2, shape[1] // 2)
    check_pass(sample((2, 3001), dtype, order), 1, 3001)  # fewer lines than cores


def test_strides_of_zero_and_other_oddities() -> None:
    row = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    check_pass(np.broadcast_to(row, (30, 40)), 1, 40)
    check_pass(np.broadcast_to(row[:30, None], (30, 40)), 2, 40)
    check_pass(np.zeros((30, 40), [("a", "i1"), ("x", "f4")])["x"], 1, 40)
    check_pass(sample((30, 40), ">f8"), 2, 20)
    check_pass(sample((40, 30), ">f4").T, 2, 20)
    readonly = sample((30, 40), np.float16)
    readonly.flags.writeable = False
    check_pass(readonly, 1, 40)


@given(
    shape=st.tuples(st.integers(0, 40), st.integers(1, 40)),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(ORDERS),
    head=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
def test_part_of_the_squares_never_exceeds_the_whole(
    shape: tuple[int, int], dtype: Any, order: str, head: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = arrange((rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape)).astype(dtype), order)
    W2 = weight_columns(shape[1], 2, seed) ** 2
    part = weighted_squares(x, W2[: min(head, shape[1])])
    whole = weighted_squares(x, W2)
    assert (part <= whole * (1 + 1e-5)).all()  # up to the rounding of the sums themselves
    assert (part >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_what_is_not_finite_stays_in_its_row(dtype: np.dtype[Any]) -> None:
    for order in ("C", "F"):
        for bad in (np.nan, np.inf, -np.inf):
            x = sample((60, 50), dtype, order)
            x[7, 9] = bad
            W = weight_columns(50, 2)
            for found in (encoding_pass(x, W), encoding_pass(x, W, partial=True), weighted_squares(x, W * W)):
                assert np.flatnonzero(~np.isfinite(found).all(axis=1)).tolist() == [7]


def test_wide_squares_do_not_overflow_where_narrow_ones_do() -> None:
    x = np.full((3, 4), 1e30, np.float32)
    assert np.isinf(weighted_squares(x, np.ones((4, 1)))).all()
    np.testing.assert_allclose(weighted_squares(x, np.ones((4, 1)), wide=True), np.full((3, 1), 4e60), rtol=1e-6)


@pytest.mark.parametrize("order", ["C", "F"])
def test_partial_sums_round_as_stated(order: str) -> None:
    """Runs of 256 terms in float32: within 8 u sqrt(sum x^2 w^2) of float64, and not equal to it. OpenBLAS adds in
    fewer lanes on some processors: 2 u rms on one, 5 u on another."""
    x, W = sample((400, 3000), np.float32, order), weight_columns(3000, 2)
    exact = x.astype(np.float64) @ W
    size = np.sqrt(x.astype(np.float64) ** 2 @ W**2)
    off = np.abs(encoding_pass(x, W, partial=True) - exact) / (2.0**-24 * size)
    assert 0.2 < np.sqrt(np.mean(off**2)) < 8
    assert np.abs(encoding_pass(x, W) - exact).max() < 1e-10
    W[5] = 2.0**70  # weights outside float32's safe range are not narrowed
    assert np.array_equal(encoding_pass(x, W, partial=True), encoding_pass(x, W))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_column_squares(dtype: np.dtype[Any], order: str) -> None:
    for shape in (*SHAPES, BIG):
        x = sample(shape, dtype, order)
        found = column_squares(x)
        assert found.shape == (shape[1],)
        assert found.dtype == (np.float64 if dtype == np.float64 else np.float32)
        np.testing.assert_allclose(found, (x.astype(np.float64) ** 2).sum(axis=0), rtol=1e-4)


# ---- fingerprints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_every_flipped_bit_changes_the_fingerprint(dtype: np.dtype[Any], order: str) -> None:
    for shape in ((1, 1), (1, 5), (3, 4), (5, 8)):
        x = sample(shape, dtype, order)
        before = fingerprint(x)
        assert before.dtype == np.uint64
        bits = x.view(f"u{dtype.itemsize}")
        rng = np.random.default_rng(0)
        for bit in range(8 * dtype.itemsize):
            at = rng.integers(shape[0]), rng.integers(shape[1])
            bits[at] ^= bits.dtype.type(1) << bit
            assert np.count_nonzero(fingerprint(x) != before) == 1  # a word of one line along the storage order
            bits[at] ^= bits.dtype.type(1) << bit
        assert np.array_equal(fingerprint(x), before)
        bits[...] = ~bits
        assert not np.array_equal(fingerprint(x), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("orders", [("C", "padded", "strided", "reversed"), ("F", "transposed")])
def test_the_fingerprint_depends_on_the_values_and_the_order_alone(orders: tuple[str, ...], dtype: Any) -> None:
    for shape in ((1, 2), (2, 1), (3, 4), (4, 8), (8, 5), (300, 64)):
        x = sample(shape, dtype)
        found = [fingerprint(arrange(x, order)).tolist() for order in orders]
        assert all(one == found[0] for one in found), shape


def test_the_fingerprint_wraps_around() -> None:
    x = np.full((3, 10**4), np.nan)
    x.view(np.uint64)[...] = 2**64 - 1
    total = sum(multipliers(10**4).tolist()) * (2**32 - 1) % 2**64
    assert fingerprint(x).tolist() == [[total] * 3] * 2


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_the_fingerprint_is_that_of_python_integers(dtype: np.dtype[Any], order: str) -> None:
    for shape in ((1, 1), (3, 5), (8, 64), (200, 99)):
        x = sample(shape, dtype, order)
        lines = (x.T if is_column_major(x) else x).view(f"u{dtype.itemsize}").tolist()
        a = multipliers(len(lines[0])).tolist()
        words = [[[p >> 32 * w & 0xFFFFFFFF for p in line] for line in lines] for w in range(1 + (dtype.itemsize == 8))]
        assert fingerprint(x).tolist() == [[sum(map(int.__mul__, line, a)) % 2**64 for line in word] for word in words]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_elements_that_change_places_change_the_fingerprint(dtype: np.dtype[Any], order: str) -> None:
    rng = np.random.default_rng(3)
    x = sample((6, 70), dtype, order)
    x[:, 1], x[:, 2] = -x[:, 0], 4 * x[:, 0]  # such as differ in their topmost bits alone
    before = fingerprint(x)
    places = [
        (0, 0),
        (0, 1),
        (0, 2),
        *((int(i), int(j)) for i, j in zip(rng.integers(6, size=40), range(3, 43), strict=True)),
    ]
    for count in (2, 3, 5):
        for at in itertools.islice(itertools.combinations(places, count), 300):
            held = [x[p].copy() for p in at]
            for p, value in zip(at, held[1:] + held[:1], strict=True):
                x[p] = value
            assert len({h.tobytes() for h in held}) == 1 or not np.array_equal(fingerprint(x), before), at
            for p, value in zip(at, held, strict=True):
                x[p] = value
    for left, right in (((slice(None), 0), (slice(None), 9)), ((0,), (3,)), ((4, slice(0, 32)), (4, slice(35, 67)))):
        held = x[left].copy()
        x[left] = x[right]
        x[right] = held
        assert not np.array_equal(fingerprint(x), before)
        held = x[left].copy()
        x[left] = x[right]
        x[right] = held
    assert np.array_equal(fingerprint(x), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_changes_whose_bits_cancel_change_the_fingerprint(dtype: np.dtype[Any]) -> None:
    x = sample((6, 70), dtype)
    before, bits = fingerprint(x), x.view(f"u{dtype.itemsize}")
    top = 8 * dtype.itemsize - 1
    for i, j in ((1, 4), (2, 3), (60, 69)):
        for bit in (0, 7, top - 1):
            held, d = bits[[2, 5]].copy(), bits.dtype.type(1 << bit)
            for row, plus, minus in ((2, i, j), (5, j, i)):  # after the second one no column tells either
                bits[row, plus : plus + 1] += d
                bits[row, minus : minus + 1] -= d
                assert not np.array_equal(fingerprint(x), before)
            bits[[2, 5]] = held
        tile = np.ix_([2, 5], [i, j])
        x[tile] = -x[tile]
        assert not np.array_equal(fingerprint(x), before)
        x[tile] = -x[tile]
    assert np.array_equal(fingerprint(x), before)


def test_the_fingerprint_of_equal_bits_does_not_depend_on_blocks_or_cores(four_cores: None) -> None:
    x = sample(BIG, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sums, "workers", lambda: 1)
        patch.setattr(row_sums, "BLOCK_BYTES", 1 << 20)
        alone = fingerprint(x)
    assert np.array_equal(fingerprint(x), alone)


# ---- the same bits again ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_the_same_array_gives_the_same_bits_again(dtype: np.dtype[Any], order: str) -> None:
    x, W = sample(BIG, dtype, order), weight_columns(BIG[1], 2)
    first = encoding_pass(x, W), weighted_squares(x, W * W)
    for _ in range(5):
        again = encoding_pass(x, W), weighted_squares(x, W * W)
        assert [y.tobytes() for y in again] == [y.tobytes() for y in first]
        assert np.array_equal(column_squares(x), column_squares(x))


def test_one_pass_in_each_of_many_threads(four_cores: None) -> None:
    x, W = sample(BIG, np.float32), weight_columns(BIG[1], 1)
    expected = encoding_pass(x, W).tobytes(), fingerprint(x).tobytes()
    wrong: list[int] = []

    def repeat(number: int) -> None:
        for _ in range(5):
            if (encoding_pass(x, W).tobytes(), fingerprint(x).tobytes()) != expected:
                wrong.append(number)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_an_error_in_one_share_reaches_the_caller(four_cores: None) -> None:
    def task(lo: int, hi: int) -> int:
        if hi == 100:
            raise ZeroDivisionError("in the last share")
        return lo

    with pytest.raises(ZeroDivisionError, match="in the last share"):
        row_sums._on_all_cores(np.zeros((100, 10)), task)
    parts = row_sums._on_all_cores(np.zeros((100, 10)), lambda lo, hi: (lo, hi))
    assert [i for lo, hi in parts for i in range(lo, hi)] == list(range(100))
    assert len(parts) == 16


@pytest.mark.parametrize(
    ("asked", "most"), [("1", 1), ("3,2", 3), ("", 8), ("many", 8), ("0", 1), ("1000", 8), (None, 8)]
)
def test_how_many_cores(monkeypatch: pytest.MonkeyPatch, asked: str | None, most: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert row_sums.workers() == most
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5}, raising=False)
    assert row_sums.workers() == 1


# ---- within each other --------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="alarms are POSIX")
def test_a_pass_amid_every_step_of_another(four_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a signal handler, say: the locks of the threads that help may be held just then."""
    x, W = sample(BIG, np.float32), weight_columns(BIG[1], 1)
    places = {module.__file__ for module in (row_sums, threading, concurrent.futures.thread)}
    expected, wrong, asked = encoding_pass(x, W).tobytes(), [], []
    monkeypatch.setattr(row_sums, "_pools", {})  # so that threads are started

    def stuck(*_: Any) -> None:
        raise TimeoutError("a pass waits for a lock that its own thread holds")

    def within() -> None:
        asked.append(row_sums._own.asking)
        if encoding_pass(x, W).tobytes() != expected:
            wrong.append(len(asked))

    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(20)
    try:
        with after_calls(places.__contains__, within):
            assert encoding_pass(x, W).tobytes() == expected
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not wrong
    assert set(asked) == {False, True}
    assert row_sums._own.asking is False
    assert (
        row_sums._threads(flushing_mode()).submit(lambda: row_sums._helpers(print, 3)).result() == []
    )  # helpers ask nobody


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[3:5],
        lambda x: x.T[:, ::2],
        lambda x: x.reshape(-1)[7:9].view(np.uint8),
        lambda x: np.asarray(memoryview(x))[1:],
    ],
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_memory_that_is_kept_is_nobody_elses_while_a_view_of_it_lives(view: Any, order: str) -> None:
    x = sample((250, 300), np.float64, order)
    row_sums._own.pieces.clear()
    squares = row_sums.squares_of(x)
    seen = view(squares)
    expected = seen.copy()
    del squares
    others = [row_sums.squares_of(2 * x), row_sums.copied(x, np.float64), row_sums.squares_at(x, np.arange(200))]
    weighted_sums(x.astype(np.float32), np.ones((300, 1)))
    summed_squares(x.astype(np.float16), np.ones((300, 1)))
    assert np.array_equal(seen, expected)
    assert not any(np.may_share_memory(one, another) for one, another in itertools.combinations([seen, *others], 2))
    assert len(row_sums._own.pieces) <= row_sums._PIECES
    row_sums._own.pieces.clear()
    others.clear()
    del seen
    again = row_sums.squares_of(x)
    place = again.__array_interface__["data"][0]
    del again
    for _ in range(3):
        assert row_sums.copied(x, np.float64).__array_interface__["data"][0] == place
    assert row_sums.squares_of(np.full((500, 600), 3.0)).sum() == 2.7e6  # larger than what is kept
    assert len(row_sums._own.pieces) == 1


# ---- after a fork -------------------------------------------------------------------------------------------


def pass_in_child(queue: Any) -> None:
    x, W = sample(BIG, np.float32), weight_columns(BIG[1], 1)
    queue.put(encoding_pass(x, W).tobytes())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks are POSIX")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_makes_its_own_threads(four_cores: None) -> None:
    x, W = sample(BIG, np.float32), weight_columns(BIG[1], 1)
    expected = encoding_pass(x, W).tobytes()
    assert row_sums._pools
    child = os.fork()
    if child == 0:  # pragma: no cover - the child leaves no trace but its exit code
        signal.alarm(20)  # a child that waits for threads it does not have is ended
        found = encoding_pass(x, W).tobytes()
        os._exit(0 if found == expected else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert encoding_pass(x, W).tobytes() == expected  # the parent's threads go on


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks are POSIX")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_worker_process(four_cores: None) -> None:
    x, W = sample(BIG, np.float32), weight_columns(BIG[1], 1)
    expected = encoding_pass(x, W).tobytes()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=pass_in_child, args=(queue,), daemon=True)
    process.start()
    assert queue.get(timeout=30) == expected
    process.join(30)
    assert process.exitcode == 0


# ---- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_no_pass_copies_the_matrix(dtype: np.dtype[Any], order: str) -> None:
    x, W = sample((3000, 1000), dtype, order), weight_columns(1000, 1)
    encoding_pass(x[:3], W)
    tracemalloc.start()
    encoding_pass(x, W)
    weighted_squares(x, W * W)
    fingerprint(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2 * (1 << 20)  # a block or two of each core, widened
    assert rows_per_block(1000) * 8000 <= 8 << 20
    assert widened(x, 5, 9).shape == (4, 1000)


# ---- tall and skinny products -------------------------------------------------------------------------------


# ---- stacks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F", "strided", "reversed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("shape", [(3, 16, 20), (2, 1, 30), (2, 30, 1), (2, 3, 64, 65), (2, 200, 300)])
def test_each_of_a_stack_has_the_bits_that_it_has_by_itself(
    dtype: np.dtype[Any], order: str, shape: tuple[int, ...]
) -> None:
    x = np.random.default_rng(5).standard_normal(shape).astype(dtype)
    if order == "F":
        x = np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    elif order != "C":
        x = np.repeat(x, 2, axis=-1)[..., ::2] if order == "strided" else x[..., ::-1, ::-1]
    W = np.abs(np.random.default_rng(0).standard_normal((*shape[:-2], shape[-1], 1)))
    shared = np.ascontiguousarray(W[(0,) * (len(shape) - 2)])
    half = (shape[-1] + 1) // 2
    for w in (W, shared):
        sums, squares, wide = (
            weighted_sums(x, w),
            summed_squares(x, w[..., :half, :]),
            summed_squares(x, w, wide=True),
        )
        for at in np.ndindex(*shape[:-2]):
            v = w if w.ndim == 2 else w[at]
            assert np.array_equal(sums[at], encoding_pass(x[at], v))
            assert np.array_equal(squares[at], weighted_squares(x[at], v[:half]))
            assert np.array_equal(wide[at], weighted_squares(x[at], v, wide=True))
    if dtype.itemsize >= 4:
        for at in np.ndindex(*shape[:-2]):
            assert np.array_equal(squares_of_columns(x)[at], column_squares(x[at]))


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_memory_that_a_thread_keeps_is_its_own(dtype: np.dtype[Any]) -> None:
    x, W = sample((250, 300), dtype, "C"), weight_columns(300, 1)
    expected = encoding_pass(x, W).tobytes(), weighted_squares(x, W * W).tobytes()

    def work(_: int) -> bool:
        return all((encoding_pass(x, W).tobytes(), weighted_squares(x, W * W).tobytes()) == expected for _ in range(50))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))
