"""The kernels of kernels/factor that move rows, and copy and measure a matrix, on the CPU.

What they have to give is written with the exchanges one after the other, as LAPACK has them. The leading dimension is
larger than m, and rows m to ld - 1 are NaN: they must take part in nothing, and stay what they are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from abft_tsm2.linalg.device import move_config as moves
from abft_tsm2.linalg.device.move_config import PANEL, MoveKernel
from tests.kernels.test_moves_compile import CONFIGS
from tests.support.cuda_on_cpu import ORDERS, KernelFault
from tests.support.cuda_on_cpu.library import _Address
from tests.support.libraries import Libraries, library_of, texts, with_faults
from tests.support.planting import kept

DTYPES = ("float64", "float32")
NOTHING = _Address(0)
"""A null pointer."""
ROWS_FAULTS = {
    "read_late": (MoveKernel("exchange_rows"), "__syncthreads();", 0, ""),
    "moves_all": (MoveKernel("exchange_rows"), "target >= k + b", 0, "true"),
    "column_beyond": (MoveKernel("exchange_rows"), "smaller(COLUMNS, c1 - column)", 0, "COLUMNS"),
}
MEASURE_FAULTS = {
    "row_beyond": (MoveKernel("measure"), "line < height && other < width", 0, "other < width"),
    "with_sign": (MoveKernel("measure"), "bits & (~Word(0) >> 1)", 0, "bits"),
}
LEFT_FAULTS = {
    "not_yet_full": (MoveKernel("left_rows"), "__syncthreads();", 0, ""),
    "not_yet_empty": (MoveKernel("left_rows"), "__syncthreads();", 1, ""),
    "a_batch_short": (MoveKernel("left_rows"), "first += COUNT * THREADS", 0, "first += (COUNT + 1) * THREADS"),
    "before_the_step": (MoveKernel("left_map"), "(end + PANEL - 1) / PANEL", 0, "(end - 1) / PANEL"),
}
ORDER_FAULTS = {
    "twice_the_row": (MoveKernel("pivots_to_order"), "pivot[first] != own", 0, "first < t"),
    "stale_place": (MoveKernel("pivots_to_order"), "atomicOr(&changed", 0, "if (0) atomicOr(&changed"),
    "wild_pivot": (MoveKernel("pivots_to_order"), "p < i || p >= rows ? i : p", 0, "p"),
}
library = library_of(lambda: [*texts(CONFIGS), *with_faults(ROWS_FAULTS | LEFT_FAULTS | MEASURE_FAULTS | ORDER_FAULTS)])


# What reads beyond an array gives right results now and then: AddressSanitizer sees it.
READS = {
    "reads_rows_beyond": (MoveKernel("measure"), "line < length && ", 0, ""),
}
sanitized = library_of(lambda: [*texts(SANITIZED), *with_faults(READS)], sanitize=True)
SANITIZED = [MoveKernel("measure"), MoveKernel("exchange_rows", "float32")]


def padded(rng: np.random.Generator, m: int, n: int, dtype: str, more: int) -> np.ndarray:
    """A random m x n matrix with `more` rows of NaN below it, its columns contiguous."""
    W = np.full((m + more, n), np.nan, dtype, order="F")
    W[:m] = rng.standard_normal((m, n))
    return W


def same(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether all bits agree."""
    return x.tobytes() == y.tobytes()


def drawn(rng: np.random.Generator, m: int, k: int, b: int) -> np.ndarray:
    """Pivots of columns k to k + b - 1: from below the panel, from inside it, some twice, some where they are."""
    kinds = rng.integers(0, 4, b)
    choices = [
        (int(rng.integers(i, m)), int(rng.integers(i, min(m, k + b))), i, max(i, m - 1 - int(rng.integers(0, 3))))
        for i in range(k, k + b)
    ]
    return np.array([choice[kind] for choice, kind in zip(choices, kinds, strict=True)], np.int32)


def exchanged(order: np.ndarray, k: int, pivots: np.ndarray) -> np.ndarray:
    """Rows in this order after the exchanges of place k + i with pivots[i], one after the other."""
    order = order.copy()
    for i, p in enumerate(pivots):
        order[[k + i, p]] = order[[p, k + i]]
    return order


def inverse(order: np.ndarray) -> np.ndarray:
    """places of an order."""
    places = np.empty_like(order)
    places[order] = np.arange(len(order), dtype=order.dtype)
    return places


@dataclass
class Exchange:
    """A step k:k+b, and rows in the orders before and after it."""

    W: np.ndarray
    m: int
    k: int
    b: int
    c0: int
    c1: int
    snapshots: tuple[np.ndarray, ...]
    moved: np.ndarray

    @classmethod
    def draw(
        cls, rng: np.random.Generator, dtype: str, b: int, k: int, columns: int, below: int, more: int = 3
    ) -> Exchange:
        """Of a matrix with `below` rows under the step, at columns behind it."""
        m = k + b + below
        W = padded(rng, m, k + b + columns + 2, dtype, more)
        order0 = rng.permutation(m).astype(np.int32)
        pivots = drawn(rng, m, k, b)
        order1 = exchanged(order0, k, pivots)
        c0, c1 = k + b + 1, k + b + 1 + columns
        moved = W.copy("F")
        moved[:m, c0:c1] = W[:m, c0:c1][exchanged(np.arange(m), k, pivots)]
        return cls(W, m, k, b, c0, c1, (order0, inverse(order0), order1, inverse(order1)), moved)


def run_rows(library: Libraries, name: str, case: Exchange, gathers: bool, order: str) -> bool:
    """Whether rows lie where they should."""
    W, columns = case.W.copy("F"), case.c1 - case.c0
    G = np.full((case.b + 2, columns), np.nan, W.dtype, order="F")
    launch = moves.exchange_rows(case.b, columns)
    given = (G, len(G)) if gathers else (NOTHING, 0)
    args = (W, len(W), case.k, case.b, case.c0, case.c1, *case.snapshots, *given)
    library.run(name, launch.grid, launch.threads, args, order=order, seed=case.b)
    expected, rows = case.moved.copy("F"), slice(case.k, case.k + case.b)
    if gathers:
        wanted = np.full_like(G, np.nan)
        wanted[: case.b] = expected[rows, case.c0 : case.c1]
        expected[rows] = case.W[rows]
        return same(W, expected) and same(G, wanted)
    return same(W, expected)


SHAPES = (  # b, k, columns, rows below
    *((1, 0, 1, 0), (1, 128, 9, 3), (5, 0, 8, 0), (5, 128, 17, 2), (127, 0, 7, 130)),
    *((128, 128, 19, 60), (128, 0, 4, 0), (300, 0, 11, 301), (512, 128, 5, 90)),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gathers", [False, True])
def test_rows_are_exchanged(library: Libraries, dtype: str, gathers: bool) -> None:
    rng = np.random.default_rng(7)
    for i, (b, k, columns, below) in enumerate(SHAPES):
        case = Exchange.draw(rng, dtype, b, k, columns, below)
        name = MoveKernel("exchange_rows", dtype).name
        assert run_rows(library, name, case, gathers, ORDERS[i % 3]), (b, k, columns, below)


def test_columns_before_the_step_may_be_exchanged(library: Libraries) -> None:
    rng = np.random.default_rng(8)
    case = Exchange.draw(rng, "float64", 40, 128, 3, 50)
    order = exchanged(np.arange(case.m), case.k, drawn(rng, case.m, case.k, case.b))
    first = case.snapshots[0]
    case.snapshots = (first, inverse(first), first[order], inverse(first[order]))
    case.c0, case.c1 = 5, 23
    case.moved = case.W.copy("F")
    case.moved[: case.m, 5:23] = case.W[order, 5:23]
    assert run_rows(library, MoveKernel("exchange_rows").name, case, False, "random")


@pytest.mark.parametrize("fault", ROWS_FAULTS)
def test_faults_in_exchanges_are_found(library: Libraries, fault: str) -> None:
    rng = np.random.default_rng(9)
    case = Exchange.draw(rng, "float64", 60, 0, 13, 40)

    def right(gathers: bool) -> bool:
        try:
            return run_rows(library, fault, case, gathers, "forward")
        except KernelFault:
            return False

    assert not (right(False) and right(True))


@pytest.mark.parametrize("count", [1, 256, 257])
def test_the_order_before_the_first_panel(library: Libraries, count: int) -> None:
    order, places = np.full(count, -1, np.int32), np.full(count, -1, np.int32)
    info, started = np.full(1, 7, np.int32), np.full(1, 7, np.uint32)
    launch = moves.identity(count)
    library.run(MoveKernel("identity").name, launch.grid, launch.threads, (order, places, count, info, started))
    assert (order == np.arange(count)).all()
    assert (places == order).all()
    assert info[0] == started[0] == 0


@pytest.mark.parametrize(("started", "token"), [(3, 3), (4, 3), (2**32 - 1, 2**32 - 1), (2, 3)])
def test_the_gate_opens_at_its_token_or_after_a_while(library: Libraries, started: int, token: int) -> None:
    launch = moves.gate()
    library.run(MoveKernel("gate").name, launch.grid, launch.threads, (np.array([started], np.uint32), token))


@dataclass
class Factored:
    """The exchanges of a whole factorisation by steps, and its left columns with all that is to come to them."""

    m: int
    ends: np.ndarray
    orders: np.ndarray
    W: np.ndarray
    expected: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, m: int, K: int, widths: tuple[int, ...], dtype: str) -> Factored:
        """Of K columns, with steps of these widths by turns."""
        ends: list[int] = []
        turn = itertools.cycle(widths)
        while len(ends) * PANEL < K:
            start = len(ends) * PANEL
            end = min(K, start + next(turn))
            ends += [end] * -(-(end - start) // PANEL)
        W = padded(rng, m, K + 2, dtype, 2)
        expected, orders = W.copy("F"), [np.arange(m, dtype=np.int32)]
        for k in range(0, K, PANEL):
            pivots = drawn(rng, m, k, min(PANEL, K - k))
            orders.append(exchanged(orders[-1], k, pivots))
            rows = exchanged(np.arange(m), k, pivots)
            finished = [c for c in range(K) if ends[c // PANEL] <= k]
            expected[:m, finished] = expected[:m, finished][rows]
        return cls(m, np.array(ends, np.int32), np.array(orders), W, expected)


LEFT = (  # m, K, widths of steps
    *((300, 300, (128,)), (301, 301, (256, 128)), (520, 520, (256,)), (600, 390, (128,)), (5, 5, (128,))),
    *((270, 257, (128,)), (700, 641, (512, 128)), (8100, 129, (128,))),
)


def run_left(library: Libraries, names: tuple[str, str], task: Factored, blocks: int, order: str) -> bool:
    """Whether all rows of finished columns lie where they should."""
    m, K, W = task.m, task.W.shape[1] - 2, task.W.copy("F")
    panels = len(task.ends)
    places = np.array([inverse(order) for order in task.orders])
    map_ = np.full((panels, m), -1, np.int32)
    launch = moves.left_map(m, panels)
    args: tuple[Any, ...] = (task.orders[-1].copy(), places, task.ends, m, map_)
    library.run(names[0], launch.grid, launch.threads, args, order=order)
    left = moves.left_rows(W.dtype.name, m, K, int(task.ends[0]), 1)
    launch = left.launch
    buffer = np.full(left.scratch_elements, np.nan, W.dtype) if left.scratch_rows else NOTHING
    args = (W, len(W), m, K, task.ends, map_, buffer, left.scratch_rows)
    grid = min(launch.grid[0], blocks)
    library.run(names[1], grid, launch.threads, args, shared_bytes=launch.shared_bytes, order=order)
    return same(W, task.expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scratch", [False, True])
def test_finished_columns_move_to_their_places(
    library: Libraries, dtype: str, scratch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(15)
    if scratch:
        monkeypatch.setattr(moves, "MOST_SHARED", 0)
        monkeypatch.setattr(moves, "LEAST_SCRATCHES", 3)
        monkeypatch.setattr(moves, "MOST_SCRATCH", 0)
    names = MoveKernel("left_map").name, MoveKernel("left_rows", dtype).name
    for i, (m, K, widths) in enumerate(LEFT):
        task = Factored.draw(rng, m, K, widths, dtype)
        assert run_left(library, names, task, K if i % 2 else 7, ORDERS[i % 3]), (m, K, widths)


@pytest.mark.parametrize("fault", LEFT_FAULTS)
def test_faults_in_finished_columns_are_found(library: Libraries, fault: str) -> None:
    task = Factored.draw(np.random.default_rng(22), 2300, 200, (128,), "float64")
    names = MoveKernel("left_map").name, MoveKernel("left_rows").name
    names = (fault, names[1]) if LEFT_FAULTS[fault][0].routine == "left_map" else (names[0], fault)

    def right(order: str) -> bool:
        try:
            return run_left(library, names, task, 7, order)
        except KernelFault:
            return False

    assert not (right("forward") and right("random"))


STRIDES = ("column-major", "row-major", "reversed rows", "reversed columns", "every other", "one column", "broadcast")


def laid_out(rng: np.random.Generator, kind: str, m: int, n: int, dtype: str) -> np.ndarray:
    """A random matrix, in memory of this kind."""
    A = rng.standard_normal((m, n)).astype(dtype) * 10.0 ** rng.integers(-30, 30, (m, n)).astype(dtype)
    if kind == "row-major":
        return np.ascontiguousarray(A)
    if kind == "reversed rows":
        return np.ascontiguousarray(A)[::-1]
    if kind == "reversed columns":
        return np.asfortranarray(A)[:, ::-1]
    if kind == "every other":
        return np.repeat(np.repeat(A, 2, 0), 3, 1)[::2, ::-3]
    if kind == "broadcast":
        return np.broadcast_to(A[:1], (m, n))
    return np.asfortranarray(A)


def run_measure(library: Libraries, name: str, A: np.ndarray, more: int, order: str) -> bool:
    """Whether A is copied, and the largest moduli of its lines are found."""
    m, n = A.shape
    word = np.uint64 if A.itemsize == 8 else np.uint32
    W = np.full((m + more, n), np.nan, A.dtype, order="F")
    row_max, column_max = np.zeros(m, word), np.zeros(n, word)
    launch = moves.measure(m, n)
    args = (A, A.strides[0] // A.itemsize, A.strides[1] // A.itemsize, m, n, W, len(W), row_max, column_max)
    library.run(name, launch.grid, launch.threads, args, order=order)
    bits = np.ascontiguousarray(abs(A)).view(word)
    padding = np.full((more, n), np.nan, A.dtype)
    copied = same(np.ascontiguousarray(W[:m]), np.ascontiguousarray(A)) and same(W[m:].copy(), padding)
    right = copied and bool((row_max == bits.max(1)).all() and (column_max == bits.max(0)).all())
    again = np.zeros_like(row_max), np.zeros_like(column_max)
    library.run(name, launch.grid, launch.threads, (*args[:5], NOTHING, m, *again), order=order)  # measured alone
    return right and bool((again[0] == row_max).all() and (again[1] == column_max).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", STRIDES)
def test_a_matrix_is_copied_and_measured(library: Libraries, dtype: str, kind: str) -> None:
    rng = np.random.default_rng(16)
    sizes = ((100, 1), (1, 1)) if kind == "one column" else ((1, 70), (65, 67), (130, 33), (64, 64), (3, 5))
    for i, (m, n) in enumerate(sizes):
        A = laid_out(rng, kind, m, n, dtype)
        name = MoveKernel("measure", dtype).name
        assert run_measure(library, name, A, i % 3, ORDERS[i % 3]), (m, n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_the_largest_and_nothing_is_flushed(library: Libraries, dtype: str) -> None:
    tiny = np.finfo(dtype).smallest_subnormal
    A = np.array([[np.nan, 1, np.inf], [-np.inf, 2, 3], [-tiny, tiny, 0], [0, -0.0, 0]], dtype)
    assert run_measure(library, MoveKernel("measure", dtype).name, A, 0, "forward")


@pytest.mark.parametrize("fault", MEASURE_FAULTS)
def test_faults_in_measuring_are_found(library: Libraries, fault: str) -> None:
    A = np.random.default_rng(17).standard_normal((70, 65))
    try:
        right = run_measure(library, fault, np.asfortranarray(A), 2, "forward")
    except KernelFault:
        right = False
    assert not right


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_fit_the_sizes_of_lines(library: Libraries, dtype: str) -> None:
    rng = np.random.default_rng(18)
    info = np.finfo(dtype)
    special = [0, np.nan, np.inf, info.max, info.tiny, info.smallest_subnormal, 3 * info.smallest_subnormal, 1, 2, 0.75]
    word = np.uint64 if info.bits == 64 else np.uint32
    for m, n in ((10, 300), (300, 10), (257, 256)):
        sizes = [np.resize(np.array(special, dtype), count) for count in (m, n)]
        for size in sizes:
            size[len(special) :] *= rng.random(max(0, len(size) - len(special)))
        bases = [rng.choice([-1.0, 1.0], count) * (1 + rng.random(count)) for count in (m, n)]
        found = [np.full(count, np.nan) for count in (m, n)]
        launch = moves.scale_weights(m, n)
        sides = zip(sizes, bases, found, (m, n), strict=True)
        args = [x for size, base, weights, count in sides for x in (size.view(word), kept(base), weights, count)]
        library.run(MoveKernel("scale_weights", dtype).name, launch.grid, launch.threads, args)
        for size, base, weights in zip(sizes, bases, found, strict=True):
            exponents = np.where(np.isfinite(size), np.frexp(size.astype(float))[1], 0)
            assert (weights == np.ldexp(base, -np.clip(exponents, -1000, 1000))).all()


def run_pivots(library: Libraries, name: str, m: int, k: int, b: int, **given: Any) -> list[str]:
    """What is wrong with what is left for a panel with random pivots."""
    rng = np.random.default_rng(19)
    order0 = rng.permutation(m).astype(np.int32)
    pivots = given.get("pivots", drawn(rng, m, k, b))
    ipiv = (pivots - k + 1).astype(np.int32)
    for i, p in zip(given.get("wild", ()), (0, -7, m - k + 1, 2**31 - 1), strict=False):
        ipiv[i], pivots[i] = p, k + i
    order1, places1 = np.full(m, -1, np.int32), np.full(m, -1, np.int32)
    piv, info = np.full(k + b, -1, np.int32), np.array([given.get("info", 0)], np.int32)
    found = np.array([given.get("found", 0)], np.int32)
    launch = moves.pivots_to_order(m)
    args = (ipiv, found, m, k, b, piv, order0, order1, places1, info)
    library.run(name, launch.grid, launch.threads, args, order=given.get("order", "forward"))
    expected = exchanged(order0, k, pivots)
    wrong = []
    if not ((piv[k:] == pivots).all() and (piv[:k] == -1).all()):
        wrong.append("pivots")
    if not ((order1 == expected).all() and (places1 == inverse(expected)).all()):
        wrong.append("order")
    if info[0] != given.get("expected_info", 0):
        wrong.append("info")
    return wrong


def test_what_a_panel_of_getrf_leaves(library: Libraries) -> None:
    name = MoveKernel("pivots_to_order").name
    shapes = ((1, 0, 1), (200, 128, 5), (300, 0, 127), (700, 256, 128), (4300, 0, 128), (128, 0, 128))
    for i, (m, k, b) in enumerate(shapes):
        assert not run_pivots(library, name, m, k, b, order=ORDERS[i % 3]), (m, k, b)
    assert not run_pivots(library, name, 4500, 4090, 17, order="random")  # a panel in two blocks


@pytest.mark.parametrize(("before", "found", "after"), [(0, 0, 0), (0, 3, 131), (9, 3, 9), (9, 0, 9), (0, -3, 0)])
def test_the_first_zero_pivot_counts(library: Libraries, before: int, found: int, after: int) -> None:
    name = MoveKernel("pivots_to_order").name
    assert not run_pivots(library, name, 160, 128, 10, info=before, found=found, expected_info=after)


def test_pivots_that_are_none(library: Libraries) -> None:
    name = MoveKernel("pivots_to_order").name
    assert not run_pivots(library, name, 160, 128, 10, wild=[1, 3, 4, 9])


@pytest.mark.parametrize("fault", ORDER_FAULTS)
def test_faults_in_the_order_are_found(library: Libraries, fault: str) -> None:
    def wrong(**given: Any) -> bool:
        try:
            return bool(run_pivots(library, fault, 200, 0, 60, **given))
        except KernelFault:
            return True

    rng = np.random.default_rng(20)
    for _ in range(2):
        pivots = drawn(rng, 200, 0, 60)
        if wrong(pivots=pivots) or wrong(order="reverse") or wrong(wild=[1, 3, 4, 9]):
            return
    pytest.fail("nothing is found")


def test_nothing_is_read_beyond_an_array(sanitized: Libraries) -> None:
    rng = np.random.default_rng(21)
    measured, rows = (config.name for config in SANITIZED)
    A = np.asfortranarray(rng.standard_normal((65, 67)))
    single = Exchange.draw(rng, "float32", 45, 0, 5, 0, more=0)
    single.W, single.moved = (np.asfortranarray(x[:, : single.c1]) for x in (single.W, single.moved))
    assert run_measure(sanitized, measured, A, 0, "forward")
    with pytest.raises(KernelFault, match="address error"):
        run_measure(sanitized, "reads_rows_beyond", A, 0, "forward")
    for gathers in (False, True):
        assert run_rows(sanitized, rows, single, gathers, "forward")


def test_launches() -> None:
    assert [moves.exchange_rows(b, 17).threads for b in (1, 32, 33, 512)] == [32, 32, 64, 512]
    with pytest.raises(ValueError, match="513"):
        moves.exchange_rows(513, 1)
    assert moves.left_rows("float64", 28672, 20000, 0, 132).launch.shared_bytes == moves.MOST_SHARED
    tall = moves.left_rows("float64", 10**6, 1000, 256, 132)
    assert (tall.launch.grid, tall.scratch_elements) == ((33,), 33 * (10**6 - 256))
    assert moves.left_rows("float32", 10**6, 5, 128, 132).launch.grid == (5,)
    assert moves.solve_rows("float64", 130, 132).grid == (17,)
    assert moves.solve_rows("float64", 8192, 132).grid == (116,)
    assert moves.solve_rows("float64", 8192, 12).grid == (1,)
    assert moves.left_rows("float64", 8192, 8064, 128, 132) == moves.LeftRows(moves.Launch((8064,), 512, 64512), 0)
