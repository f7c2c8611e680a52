"""The kernels of kernels/factor that solve for rows of U, on the CPU.

What they give has to be L X = B element by element, within what a substitution may round: a factorisation with rows
that are right in norm only is convicted by its evidence. What lies around the rows is NaN, and stays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg

from abft_tsm2.linalg.device import move_config as moves
from abft_tsm2.linalg.device.move_config import MoveKernel
from tests.kernels.test_moves_on_cpu import DTYPES, Exchange, padded, same
from tests.support.cuda_on_cpu import ORDERS, KernelFault
from tests.support.libraries import Libraries, library_of, texts, with_faults
from tests.support.lu_matrices import MATRICES

KERNELS = [MoveKernel(routine, dtype) for dtype in DTYPES for routine in ("solve_rows", "exchange_solve")]
ROWS, EXCHANGES = MoveKernel("solve_rows"), MoveKernel("exchange_solve")
FAULTS = {
    "not_yet_there": (ROWS, "__syncthreads();", 0, ""),
    "not_yet_exchanged": (ROWS, "__syncwarp();", 0, ""),
    "not_yet_read": (MoveKernel("solve_rows", "float32"), "__syncwarp();", 1, ""),
    "one_buffer": (MoveKernel("solve_rows", "float32"), "number % 2 *", 0, "0 *"),
    "rows_beyond": (ROWS, "row + 2 * part + 1 < b", 0, "true"),
    "columns_beyond": (ROWS, "if (column < columns) {", 0, "{"),
    "columns_between": (ROWS, "column += step)", 0, "column += step + 8)"),
    "a_tile_short": (ROWS, "u <= count", 1, "u < count"),
    "not_its_own_tile": (ROWS, "update_tile(x[0], x[0], at, step, known);", 0, ""),
    "late_rows": (ROWS, "late ? x1 : x0", 0, "x0"),
    "read_late": (EXCHANGES, "__syncthreads();", 0, ""),
    "moves_nothing": (EXCHANGES, "target = place_of(places1, leaves, ld, k + row)", 0, "target = places0[leaves]"),
}
READS = {
    "reads_columns_beyond": (EXCHANGES, "row < rows && c < count ? columns[source", 0, "row < rows ? columns[source"),
    "reads_rows_beyond": (ROWS, "row < rows && column < columns ?", 0, "column < columns ?"),
}
library = library_of(lambda: [*texts(KERNELS), *with_faults(FAULTS)])
sanitized = library_of(lambda: [*texts([ROWS, EXCHANGES]), *with_faults(READS)], sanitize=True)


def gaussian(b: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Of an inverse of moderate size."""
    return np.tril(rng.standard_normal((b, b)) / np.sqrt(b), -1)


def graded(b: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Rows and columns of all sizes below 1."""
    of_rows, of_columns = 2.0 ** -rng.integers(0, 30, (b, 1)), 2.0 ** -rng.integers(0, 30, b)
    return np.tril(of_rows * rng.uniform(-1, 1, (b, b)) * of_columns, -1)


def largest(b: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """With an inverse as large as any that partial pivoting gives."""
    return -np.tri(b, k=-1)


FAMILIES = (gaussian, graded, largest)
HARD = ("breast cancer", "cauchy", "rbf kernel")
"""Of their rows of U little is left where right sides cancel: there a product with inv(L11) is too far off."""


def first_panel(name: str, b: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Multipliers of the first panel of a matrix that is hard to factor, and its rows right of the panel, exchanged."""
    A = MATRICES[name](b + 125, np.random.default_rng(1), np.dtype(dtype)).astype(dtype)
    lu, pivots = scipy.linalg.lu_factor(A[:, :b])
    for i, pivot in enumerate(pivots):
        A[[i, pivot]] = A[[pivot, i]]
    return np.tril(lu[:b], -1).astype(dtype), np.asfortranarray(A[:b, b : b + 8])


def with_triangle(rng: np.random.Generator, W: np.ndarray, k: int, triangle: np.ndarray) -> np.ndarray:
    """L11 of W, when W has these multipliers; what lies on and above the diagonal there is U's, and may be NaN."""
    b = len(triangle)
    W[k : k + b, k : k + b] = np.where(np.tri(b, k=-1, dtype=bool), triangle, np.nan)
    return np.tril(W[k : k + b, k : k + b], -1).astype(np.longdouble) + np.eye(b) if b > 1 else np.eye(1)


def residual(L: np.ndarray, X: np.ndarray, B: np.ndarray) -> float:
    """The largest |L X - B| relative to gamma_b |L||X|: Higham, 2002, theorem 8.5, of any order of the operations."""
    limits, b = np.finfo(X.dtype), len(L)
    X, B = X.astype(np.longdouble), B.astype(np.longdouble)
    unit = float(limits.eps) / 2
    bound = b * unit / (1 - b * unit) * (abs(L) @ abs(X)) + b * np.longdouble(limits.smallest_subnormal)
    return float((abs(L @ X - B) / bound).max()) if np.isfinite(X).all() else np.inf


def solved(
    library: Libraries,
    name: str,
    triangle: np.ndarray,
    columns: int,
    k: int = 0,
    more: tuple[int, int] = (0, 0),
    order: str = "forward",
    multiprocessors: int = 132,
    seed: int = 0,
    G: np.ndarray | None = None,
) -> float:
    """`residual` of solve_rows.cu, of random right sides unless there are some; infinite where all else has changed."""
    rng, (b, dtype) = np.random.default_rng(seed), (len(triangle), triangle.dtype.name)
    step = 16 // triangle.itemsize
    ld = -(-(k + b + more[0]) // step) * step
    W = padded(rng, ld, k + b + columns + 2, dtype, 0)
    W[k + b :] = np.nan
    L = with_triangle(rng, W, k, triangle)
    G = padded(rng, b, columns, dtype, more[1]) if G is None else G
    c0, c1 = k + b + 1, k + b + 1 + columns
    W[k : k + b, c0:c1] = np.nan
    before, X = W.copy("F"), G[:b].copy()
    launch = moves.solve_rows(dtype, columns, multiprocessors)
    args = (W, len(W), k, b, c0, c1, G, len(G))
    library.run(name, launch.grid, launch.threads, args, shared_bytes=launch.shared_bytes, order=order, seed=seed)
    found = W[k : k + b, c0:c1].copy()
    before[k : k + b, c0:c1] = found
    return residual(L, found, X) if same(W, before) else np.inf


SHAPES = (  # b, columns, k, rows of W below, rows of G below
    *((1, 1, 0, (0, 0)), (2, 9, 128, (3, 1)), (7, 3, 0, (1, 0)), (8, 8, 128, (0, 0)), (9, 17, 0, (2, 3))),
    *((16, 64, 0, (0, 0)), (33, 5, 0, (1, 1)), (100, 20, 128, (0, 4)), (127, 7, 0, (5, 0)), (128, 70, 0, (4, 0))),
    *((128, 30, 128, (1, 1)), (128, 24, 0, (0, 512 - 128))),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_rows_of_u(library: Libraries, dtype: str, shape: int) -> None:
    b, columns, k, more = SHAPES[shape]
    triangle = gaussian(b, dtype, np.random.default_rng(shape)).astype(dtype)
    name = MoveKernel("solve_rows", dtype).name
    assert solved(library, name, triangle, columns, k, more, ORDERS[shape % 3], 17 + shape % 3, shape) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_triangles_of_all_sorts(library: Libraries, dtype: str, family: Callable[..., np.ndarray]) -> None:
    name = MoveKernel("solve_rows", dtype).name
    for seed, b in enumerate((128, 75)):
        triangle = family(b, dtype, np.random.default_rng(seed)).astype(dtype)
        assert solved(library, name, triangle, 8, seed=seed) <= 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("matrix", HARD)
def test_every_element_is_as_right_as_a_substitution_is(library: Libraries, dtype: str, matrix: str) -> None:
    name = MoveKernel("solve_rows", dtype).name
    for b in (128, 75):
        triangle, G = first_panel(matrix, b, dtype)
        assert solved(library, name, triangle, 8, G=G) <= 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_with_an_inverse_would_be_found(dtype: str) -> None:
    """Be it of the whole triangle or of blocks of 8 rows."""
    triangle, G = first_panel("breast cancer", 75, dtype)
    L, X = triangle + np.eye(75, dtype=dtype), G.copy()
    whole = scipy.linalg.solve_triangular(L, np.eye(75, dtype=dtype), lower=True, unit_diagonal=True) @ G
    for i in range(0, 75, 8):
        rows = slice(i, min(75, i + 8))
        eye = np.eye(rows.stop - i, dtype=dtype)
        X[rows] = scipy.linalg.solve_triangular(L[rows, rows], eye, lower=True, unit_diagonal=True) @ X[rows]
        X[rows.stop :] -= L[rows.stop :, rows] @ X[rows]
    wide = L.astype(np.longdouble)
    assert residual(wide, whole, G) > 1
    assert residual(wide, X, G) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormal_numbers_are_not_flushed(library: Libraries, dtype: str) -> None:
    tiny = np.finfo(dtype).smallest_subnormal
    L = np.full((128, 128), np.nan, dtype, order="F")
    L[:, :] = np.tri(128, k=-1)
    G = np.zeros((128, 1), dtype, order="F")
    G[0] = tiny
    W = np.concatenate([L, np.zeros((128, 1), dtype)], axis=1)
    W = np.asfortranarray(W)
    launch = moves.solve_rows(dtype, 1, 1)
    name, shared = MoveKernel("solve_rows", dtype).name, launch.shared_bytes
    library.run(name, launch.grid, launch.threads, (W, 128, 0, 128, 128, 129, G, 128), shared_bytes=shared)
    assert W[0, 128] == tiny
    assert W[1, 128] == -tiny
    assert not W[2:, 128].any()


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_touches_no_row_above_it(library: Libraries, dtype: str, value: float) -> None:
    rng = np.random.default_rng(13)
    b, columns = 70, 11
    for at in (0, 5, 17, 40, 69):
        W, G = padded(rng, 72, b + columns, dtype, 0), padded(rng, b, columns, dtype, 2)
        with_triangle(rng, W, 0, gaussian(b, dtype, rng))
        G[at, 3] = value
        launch = moves.solve_rows(dtype, columns, 132)
        args = (W, 72, 0, b, b, b + columns, G, len(G))
        name = MoveKernel("solve_rows", dtype).name
        library.run(name, launch.grid, launch.threads, args, shared_bytes=launch.shared_bytes)
        touched = ~np.isfinite(W[:b, b:])
        assert touched[at:, 3].all()
        assert touched.sum() == b - at


def exchanged(
    library: Libraries, name: str, case: Exchange, triangle: np.ndarray, order: str = "forward", seed: int = 0
) -> float:
    """`residual` of exchange_solve.cu; infinite where a row does not lie where it should."""
    rng = np.random.default_rng(seed)
    L = with_triangle(rng, case.W, case.k, triangle)
    W, columns = case.W.copy("F"), case.c1 - case.c0
    launch = moves.exchange_solve(W.dtype.name, columns)
    args = (W, len(W), case.k, case.b, case.c0, case.c1, *case.snapshots)
    library.run(name, launch.grid, launch.threads, args, shared_bytes=launch.shared_bytes, order=order, seed=seed)
    rows, at = slice(case.k, case.k + case.b), slice(case.c0, case.c1)
    found, expected = W[rows, at].copy(), case.W.copy("F")
    expected[:, at] = case.moved[:, at]
    right = residual(L, found, expected[rows, at])
    expected[rows, at] = found
    return right if same(W, expected) else np.inf


def drawn(rng: np.random.Generator, dtype: str, b: int, k: int, columns: int, below: int) -> Exchange:
    """With columns that begin at multiples of 16 bytes."""
    step = 16 // np.dtype(dtype).itemsize
    return Exchange.draw(rng, dtype, b, k, columns, below, -(k + b + below) % step + step)


EXCHANGED = ((1, 0, 1, 0), (1, 128, 5, 3), (5, 0, 8, 7), (127, 0, 17, 30), (128, 128, 9, 50), (128, 0, 3, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", range(len(EXCHANGED)))
def test_rows_are_exchanged_and_solved(library: Libraries, dtype: str, shape: int) -> None:
    rng, (b, k, columns, below) = np.random.default_rng(shape), EXCHANGED[shape]
    family = FAMILIES[shape % len(FAMILIES)]
    case = drawn(rng, dtype, b, k, columns, below)
    triangle = family(b, dtype, rng).astype(dtype)
    name = MoveKernel("exchange_solve", dtype).name
    assert exchanged(library, name, case, triangle, ORDERS[shape % 3], shape) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_kernels_give_the_same_bits(library: Libraries, dtype: str) -> None:
    """So the factors do not depend on which columns are near the panel."""
    rng, b, columns = np.random.default_rng(5), 75, 6
    step = 16 // np.dtype(dtype).itemsize
    W = padded(rng, -(-b // step) * step, b + columns, dtype, 0)
    with_triangle(rng, W, 0, gaussian(b, dtype, rng))
    G, near, far = W[:b, b:].copy("F"), W.copy("F"), W.copy("F")
    launch = moves.solve_rows(dtype, columns, 1)
    args = (far, len(W), 0, b, b, b + columns, G, b)
    name, shared = MoveKernel("solve_rows", dtype).name, launch.shared_bytes
    library.run(name, launch.grid, launch.threads, args, shared_bytes=shared)
    launch = moves.exchange_solve(dtype, columns)
    orders = [np.arange(b, dtype=np.int32) for _ in range(4)]
    name, exchange = MoveKernel("exchange_solve", dtype).name, (near, *args[1:6], *orders)
    library.run(name, launch.grid, launch.threads, exchange, shared_bytes=launch.shared_bytes)
    assert same(near, far)
    assert not same(near, W)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_rows_of_u_are_found(library: Libraries, fault: str) -> None:
    def right(order: str) -> bool:
        rng = np.random.default_rng(12)
        kernel = FAULTS[fault][0]
        triangle = gaussian(119, kernel.dtype, rng).astype(kernel.dtype)
        try:
            if kernel.routine == "solve_rows":
                return solved(library, fault, triangle, 70, 0, (4, 0), order, 1) <= 1
            return exchanged(library, fault, drawn(rng, "float64", 119, 0, 5, 20), triangle, order) <= 1
        except KernelFault:
            return False

    assert not all(right(order) for order in ORDERS)


def test_nothing_is_read_beyond_an_array(sanitized: Libraries) -> None:
    rng = np.random.default_rng(21)
    triangle = gaussian(45, "float64", rng)
    case = Exchange.draw(rng, "float64", 45, 0, 5, 21, 0)
    case.W, case.moved = (np.asfortranarray(x[:, : case.c1]) for x in (case.W, case.moved))  # nothing lies behind
    assert exchanged(sanitized, EXCHANGES.name, case, triangle) <= 1
    assert solved(sanitized, ROWS.name, triangle, 9) <= 1
    with pytest.raises(KernelFault, match="address error"):
        exchanged(sanitized, "reads_columns_beyond", case, triangle)
    with pytest.raises(KernelFault, match="address error"):
        solved(sanitized, "reads_rows_beyond", triangle, 9)
