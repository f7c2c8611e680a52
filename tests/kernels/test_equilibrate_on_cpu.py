"""equilibrate.cu and wipe.cu on the CPU: weights, their sizes, what is wiped, and whether planted faults are found."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.checksum import bounds
from abft_tsm2.checksum.device.kernels import Equilibrate, LineSums, WipeKernel
from tests.support import check_cases as cases
from tests.support.check_cases import Launch, Stack
from tests.support.cuda_on_cpu import ORDERS, Library
from tests.support.equilibrate_cases import (
    EQUILIBRATING,
    WIPE,
    Columns,
    Scaled,
    Weights,
    begin_faults,
    equilibrated,
    matrices,
    sample_faults,
    weight_faults,
    wiped,
)
from tests.support.libraries import first_complaint, first_fault, in_every_order, library_of, some, texts, with_faults
from tests.support.verdict_cases import Judged, Terms, verdicts

names = {"ids": lambda x: getattr(x, "name", x)}
library = library_of(lambda: texts((*EQUILIBRATING, WIPE)))
SMALL, TURNED, BRAIN = EQUILIBRATING[2], EQUILIBRATING[1], EQUILIBRATING[7]
CHECKED = EQUILIBRATING[::3]
READS = {
    "columns_beyond": (SMALL, "below > 0 ? aside : 0", 0, "below > 0 ? V : 0"),
    "turned_columns_beyond": (TURNED, "aside > 0 ? below : 0", 0, "below"),
    "rows_beyond": (SMALL, "smaller(length, k - row)", 0, "length"),
    "all_is_there": (SMALL, "rows == RUN && first + COLUMNS <= n", 0, "true"),
    "turned_rows_beyond": (TURNED, "smaller(length, k - row)", 0, "length"),
    "all_columns_are_there": (TURNED, "RUN && first + COLUMNS <= n", 0, "RUN"),
    "turned_columns_beyond_the_next": (TURNED, "beyond - right(i, half)", 0, "beyond"),
}
sanitized = library_of(lambda: [*texts(CHECKED), *with_faults(READS)], sanitize=True)


def launch_on(library: Library, order: str, renamed: str = "") -> Launch:
    def launch(name: str, grid: tuple[int, ...], threads: int, args: tuple[Any, ...]) -> None:
        library.run(renamed or name, grid, threads, args, order=order)

    return launch


@pytest.mark.parametrize("config", EQUILIBRATING, **names)
def test_weights_in_every_order(
    library: Library, config: Equilibrate, orders: Callable[[int], tuple[str, ...]]
) -> None:
    for number, case in enumerate(matrices(config)):
        task = case.matrices(number)
        results = [equilibrated(task, launch_on(library, order)) for order in orders(number)]
        assert not weight_faults(task, results[0]), str(case)
        for other in results[1:]:
            for x, y in zip(results[0], other, strict=True):
                assert x.tobytes() == y.tobytes(), str(case)


@given(
    config=st.sampled_from(EQUILIBRATING),
    k=st.integers(1, 128),
    n=st.integers(1, 130),
    batch=st.integers(1, 3),
    scales=st.sampled_from(["equal", "octaves", "tens", "large", "zero"]),
    special=st.lists(st.sampled_from(["nan", "inf", "zero"]), max_size=5),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**32),
)
def test_drawn_matrices(library, config, k, n, batch, scales, special, order, seed):
    case = Columns(config, k, n, batch, scales, tuple(special))
    task = case.matrices(seed)
    assert not weight_faults(task, equilibrated(task, launch_on(library, order))), str(case)


@pytest.mark.parametrize("config", EQUILIBRATING, **names)
def test_columns_as_large_and_as_small_as_the_type_allows(library: Library, config: Equilibrate) -> None:
    for number, (scales, special) in enumerate(
        (scales, special) for scales in ("extreme", "beyond") for special in ((), ("zero", "nan"))
    ):
        case = Columns(config, 12, 40, 2, scales=scales, special=special)
        task = case.matrices(number)
        assert not weight_faults(task, equilibrated(task, launch_on(library, "random"))), str(case)


@pytest.mark.parametrize("turned", [False, True])
def test_squares_that_are_nearly_zero_limit_a_scale(library: Library, turned: bool) -> None:
    # Between columns with a scale and those of 1e-162 without: squares have lost digits, weights are too small.
    task = Columns(Equilibrate("float64", turned), 12, 40).matrices()
    task.R.x[...] *= 10.0 ** -np.linspace(155.5, 160, 40)
    made = equilibrated(task, launch_on(library, "forward"))
    size = abs(made.v * np.sqrt((task.R.x.astype(np.longdouble) ** 2).sum(1)) / task.base)
    assert (size < 2.01).all()
    assert (abs(made.v) > 2.0**510).all()


@pytest.mark.parametrize("k", [129, 136, 257, 1000, 2051])
@pytest.mark.parametrize("config", EQUILIBRATING[2:4], **names)
def test_of_many_rows_runs_are_sampled(library: Library, config: Equilibrate, k: int) -> None:
    assert not sample_faults(config, k, launch_on(library, "forward"))


@pytest.mark.parametrize("config", [*EQUILIBRATING[:2], *EQUILIBRATING[4:]], **names)
def test_runs_are_sampled_in_every_type(library: Library, config: Equilibrate) -> None:
    assert not sample_faults(config, 300, launch_on(library, "random"))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kernel", [WIPE, SMALL, TURNED], **names)
def test_a_product_begins_with_a_wiped_state_and_a_replay_is_counted(
    library: Library, kernel: Equilibrate | WipeKernel, order: str
) -> None:
    assert not what_begins(kernel, launch_on(library, order))


def what_begins(kernel: Equilibrate | WipeKernel, launch: Launch) -> list[str]:
    """What is wrong with the state behind the first kernel of a product; that of weights has four blocks."""
    if isinstance(kernel, WipeKernel):
        return begin_faults(lambda encoded: wiped(launch, encoded))
    task = Columns(kernel, 5, 2 * kernel.columns, 2).matrices()
    return begin_faults(lambda encoded: equilibrated(task, launch, encoded).state)


# ---- columns whose squares are no numbers ---------------------------------------------------------------------------

RIGHT, LEFT, VERDICT = (
    LineSums("float64", "float64", given, False, verdict, "" if verdict else "float64", width=8, t1=64, rows=2)
    for given, verdict in ((False, False), (True, False), (False, True))
)
chain = library_of(lambda: texts([*EQUILIBRATING[:2], RIGHT, LEFT, VERDICT]))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("power", [-200, -158, 200])
@pytest.mark.parametrize("alone", [False, True])
def test_no_wrong_line_passes_whatever_has_no_scale(chain: Library, power: int, alone: bool, turned: bool) -> None:
    """Columns beyond 1e+-154 count as columns without a scale: their weights are finite, and not 0.

    The product's check stays valid. Small ones among others disturb nothing; large ones leave no finite bound, and no
    line passes; where all are small, no line passes unless its residual is next to nothing. Lines that do not pass are
    looked at again, where nothing overflows (`abft_tsm2.checksum.sides`).
    """
    task = Columns(Equilibrate("float64", turned), 40, 70, 1).matrices(3)
    task.R.x[:, :, :: 1 if alone else 7] *= 10.0**power
    launch, rng = launch_on(chain, "random"), np.random.default_rng(4)
    made = equilibrated(task, launch)
    assert power == -158 or not weight_faults(task, made)  # squares that are nearly zero: see above
    assert np.isfinite(made.v).all()
    assert (made.v != 0).all()
    L = Stack.rows(1, 9, 40, "float64", 8)
    L.x[...] = rng.standard_normal(L.x.shape)
    R = task.R.x[0]
    C = Stack.rows(1, 9, 70, "float64", 8)
    C.x[0] = L.x[0] @ R
    clean = _listed(task, made, L, C, launch)
    if power != -200 or not alone:
        assert clean == (set() if power < 0 else set(range(9)))
    for line, column in ((2, 7), (5, 8)):  # 7 is beyond
        C.x[0] = L.x[0] @ R
        C.x[0, line, column] += 1e-3 * max(abs(C.x[0, line]))
        assert _listed(task, made, L, C, launch) == clean | {line}


def _listed(task: Scaled, made: Weights, L: Stack, C: Stack, launch: Launch) -> set[int]:
    """Lines of C = L R that do not pass."""
    (_, m, k), n = L.x.shape, C.x.shape[2]
    v = cases.laid_out(made.v)
    R = Stack.rows(1, k, n, "float64", 8)
    R.x[...] = task.R.x
    right = cases.summed(cases.Task(RIGHT, R, v, None), launch)
    left = cases.summed(cases.Task(LEFT, L, cases.laid_out(right.y), cases.laid_out(right.z)), launch)
    sizes = np.stack([made.parts[:, :, 0].sum(1), made.parts[:, :, 1].min(1)], 1)
    factors = bounds.bound_factors(bounds.arithmetic("float64", "float64"), k, n)
    t, p2 = (np.ascontiguousarray(x) for x in (left.y, left.z))
    terms, nothing = Terms(1.0, 0.0, t, p2, None, None, sizes, factors), np.zeros((1, m))
    judged = Judged(VERDICT, C, v, nothing, nothing, terms, *[nothing] * 5, 0.0)
    found = verdicts(judged, launch)
    return {int(line) for line in found.lines[: int(found.state[0])]}


# ---- under AddressSanitizer, and with faults -------------------------------------------------------------------------


@pytest.mark.parametrize("config", some(CHECKED, 3), **names)
def test_every_path_under_address_sanitizer(sanitized: Library, config: Equilibrate) -> None:
    for number, case in enumerate(matrices(config)):
        task = case.matrices(number)
        made = equilibrated(task, launch_on(sanitized, ORDERS[number % 3]))
        assert not weight_faults(task, made), str(case)


@pytest.mark.parametrize("name", some(READS, 3))
def test_reads_beyond_the_matrix_are_caught(sanitized: Library, name: str) -> None:
    found = first_fault(
        (case.matrices() for case in matrices(READS[name][0])),
        lambda task: weight_faults(task, equilibrated(task, launch_on(sanitized, "forward", name))),
    )
    assert re.search(r"(?s)heap-buffer-overflow.*READ of size", found)


RACE, WRONG, OVERRUN = "race: |uninitialised shared", "weights are wrong", "global memory overrun"
COUNTED = "replays are counted"
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
PLANTED: dict[str, tuple[Equilibrate | WipeKernel, str, int, str, str]] = {
    "squares_unfinished": (SMALL, "__syncthreads();", 0, "", RACE),
    "squares_unfinished_turned": (TURNED, "__syncthreads();", 0, "", RACE),
    "the_next_columns_begun": (SMALL, "__syncthreads();", 1, "", "race: "),
    "the_next_columns_begun_turned": (TURNED, "__syncthreads();", 1, "", "race: "),
    "the_first_turn_only": (SMALL, "first += Index(gridDim.x) * COLUMNS", 0, "first = n", WRONG),
    "every_other_turn": (TURNED, "first += Index(gridDim.x) * COLUMNS", 0, "first += 2 * gridDim.x * COLUMNS", WRONG),
    "blocks_of_32_columns": (SMALL, "first = Index(blockIdx.x) * COLUMNS", 0, "first = Index(blockIdx.x) * 32", WRONG),
    "weights_of_a_warp": (SMALL, "if (warp < V) {", 0, "if (warp < 1) {", WRONG),
    "vectors_of_the_neighbour": (SMALL, "lane * V)) * cs", 0, "lane)) * cs", f"{WRONG}|misaligned"),
    "rows_in_half_a_vector": (TURNED, "start - start % V", 0, "start", f"{WRONG}|misaligned"),
    "all_is_there": (SMALL, "rows == RUN && first + COLUMNS <= n", 0, "true", WRONG),
    "all_is_there_turned": (TURNED, "rows == RUN && first + COLUMNS <= n", 0, "true", WRONG),
    "all_rows_are_there": (SMALL, "rows == RUN && first", 0, "first", WRONG),
    "counts_of_the_other_order": (
        SMALL,
        "TURNED ? (aside > 0 ? below : 0) : (below > 0 ? aside : 0)",
        0,
        "TURNED ? (below > 0 ? aside : 0) : (aside > 0 ? below : 0)",
        WRONG,
    ),
    "counts_of_the_other_order_turned": (TURNED, "aside > 0 ? below : 0", 0, "below > 0 ? aside : 0", WRONG),
    "rows_below_again": (TURNED, "rows - down(i, half)", 0, "rows", WRONG),
    "down_to_the_right": (TURNED, "i % (RUN / V) * V : half", 0, "i / (RUN / V) * V : half", WRONG),
    "right_and_down": (TURNED, "+ i) / (RUN / V) * 32", 0, "+ i) % (RUN / V) * 32", f"{WRONG}|outside of an array"),
    "rows_of_a_half": (SMALL, ": half * HALF + i; }", 0, ": i; }", WRONG),
    "columns_of_a_half": (TURNED, "(half * HALF + i) / (RUN", 0, "i / (RUN", WRONG),
    "the_first_half_only": (TURNED, "half < 2", 0, "half < 1", f"{WRONG}|uninitialised shared"),
    "the_second_half_only": (SMALL, "if (TURNED || half == 0) sum", 0, "sum", WRONG),
    "both_halves_together": (TURNED, "if (TURNED || half == 0) sum", 0, "if (half == 0) sum", WRONG),
    "halves_in_one_place": (TURNED, "(half * SUMS + c) * 32", 0, "c * 32", f"{WRONG}|uninitialised shared"),
    "sums_of_the_first_columns": (BRAIN, "sum[TURNED ? right(i, 0) / 32", 0, "sum[TURNED ? 0", WRONG),
    "sums_elsewhere": (SMALL, "lane * V + c)] = sum", 0, "c * 32 + lane)] = sum", WRONG),
    "sums_elsewhere_turned": (TURNED, "+ c) * 32 + lane :", 0, "+ c) + lane * V :", WRONG),
    "squares_of_the_first_columns": (SMALL, "w * COLUMNS + threadIdx.x]", 0, "w * COLUMNS + lane]", WRONG),
    "squares_of_float": (BRAIN, "typedef decltype(square_of(A_TYPE())) Square;", 0, "typedef float Square;", WRONG),
    "few_rows_twice": (SMALL, "smaller(length, k - row)", 0, "RUN", f"{WRONG}|{OVERRUN}"),
    "the_last_row_again": (SMALL, "smaller(length, k - row)", 0, "length", f"{WRONG}|{OVERRUN}"),
    "the_last_column_again": (SMALL, " && own_column < n", 0, "", f"{WRONG}|{OVERRUN}"),
    "few_rows_left_out": (SMALL, "int(k + WARPS - 1) / WARPS", 0, "int(k) / WARPS", f"{WRONG}|division by zero"),
    "other_stride": (TURNED, "at + row * rs + (first", 0, "at + row * cs + (first", f"{WRONG}|{OVERRUN}|misaligned"),
    "the_first_matrix_only": (SMALL, "R + product * step", 0, "R", WRONG),
    "a_part_of_the_squares": (SMALL, "w < WARPS; w++) {", 0, "w < WARPS - 1; w++) {", WRONG),
    "a_part_of_the_rows": (TURNED, "e < V; e++) sum[", 0, "e < V - 1; e++) sum[", WRONG),
    "runs_of_few_rows": (SMALL, "k < RUN * WARPS", 0, "false", WRONG),
    "few_where_there_are_many": (
        SMALL,
        "k < RUN * WARPS",
        0,
        "k < 2 * RUN * WARPS",
        f"115 rows are looked at|{WRONG}",
    ),
    "runs_beyond_their_part": (SMALL, "group - RUN + 1;", 0, "group + RUN;", f"{WRONG}|no runs|rows are looked at"),
    "runs_in_one_part": (TURNED, "warp * Index(group)", 0, "warp * Index(RUN)", "no runs|rows are looked at"),
    "periodic_runs": (SMALL, "scattered(warp) %", 0, "0 *", "periodic"),
    "nearly_periodic_runs": (TURNED, "scattered(warp) %", 0, "warp % 2 %", "periodic"),
    "not_enlarged": (SMALL, "square * (enlarge * ", 0, "square * (", WRONG),
    "the_mean_not_enlarged": (TURNED, "common * (float(k) / float(looked))", 0, "common / looked", WRONG),
    "the_count_of_a_run": (SMALL, "runs * ROWS)", 0, "ROWS)", WRONG),
    "the_count_of_all_runs": (
        SMALL,
        "int runs = few ? (int(k) + length - 1) / length : WARPS",
        0,
        "int runs = WARPS",
        WRONG,
    ),
    "no_mean": (SMALL, "if (has_size(mean)) centre", 0, "if (false) centre", WRONG),
    "a_mean_of_infinity": (SMALL, "if (has_size(mean)) centre", 0, "centre", WRONG),
    "the_mean_of_the_block": (
        TURNED,
        "rs + own_column * cs",
        0,
        "rs + smaller(Index(blockIdx.x) * COLUMNS + own_column, n - 1) * cs",
        WRONG,
    ),
    "the_mean_of_a_warp": (
        SMALL,
        "common += of_all[w * 32 + lane]",
        0,
        "common = of_all[w * 32 + lane]",
        WRONG,
    ),
    "the_mean_of_a_lane": (SMALL, "common += __shfl_xor_sync(~0u, common, bit)", 0, "", WRONG),
    "zero_has_a_scale": (SMALL, "square > 0 && square <=", 0, "square <=", WRONG),
    "infinity_has_a_scale": (SMALL, "square > 0 && square <= 0x1.fffffffffffffp1023", 0, "square > 0", WRONG),
    "nan_has_a_scale": (
        SMALL,
        "square > 0 && square <= 0x1.fffffffffffffp1023",
        0,
        "square != 0 && !(square > 0x1.fffffffffffffp1023)",
        WRONG,
    ),
    "half_an_exponent": (SMALL, "1023) >> 1", 0, "1022) >> 1", WRONG),
    "rounded_down": (SMALL, "pattern(2 * x)", 0, "pattern(x)", WRONG),
    "unlimited_scale": (BRAIN, "max(-FAR, min(FAR, ", 0, "max(-FAR, (", WRONG),
    "unlimited_below": (
        BRAIN,
        "max(-FAR, min(FAR, -half_exponent(norm2)))",
        0,
        "min(FAR, -half_exponent(norm2))",
        WRONG,
    ),
    "of_eight_bits": (
        SMALL,
        "double(own_base)",
        0,
        "double(from_bits(to_bits(own_base) + 0x8000u & 0xffff0000u))",
        WRONG,
    ),
    "weights_of_the_first": (SMALL, "v[product * v_step + j]", 0, "v[j]", WRONG),
    "weights_of_the_first_columns": (SMALL, "of_three(base, n, j)", 0, "of_three(base, n, threadIdx.x)", WRONG),
    "weights_of_one_copy": (SMALL, "of_three(base, n, j)", 0, "base[j]", WRONG),
    "a_weight_beyond": (SMALL, "if (j < n)", 0, "if (true)", f"{OVERRUN}|between the weights"),
    "smallest_scale_for_zero": (SMALL, "top = max(top, ", 0, "top = min(top, ", WRONG),
    "scale_of_a_lane_for_zero": (SMALL, "top = max(top, __shfl_xor_sync(~0u, top, bit))", 0, "", WRONG),
    "no_mean_of_sparse": (SMALL, "square = max(square, of_sparse", 0, "square = max(square, 0 * of_sparse", WRONG),
    "a_mean_of_all_columns": (SMALL, "j < n && 2 * runs_with < WARPS", 0, "j < n", WRONG),
    "a_mean_of_a_few_columns": (SMALL, "2 * sparse_columns >= min", 0, "sparse_columns >= 0 * min", WRONG),
    "a_mean_of_zeros_of_another_group": (SMALL, "min(n - j + lane, Index(32))", 0, "32", WRONG),
    "no_scale_for_zero": (SMALL, "top == NONE ? 0 : top", 0, "top", WRONG),
    "zero_columns_of_one": (SMALL, "top == NONE ? 0 : top", 0, "0", WRONG),
    "all_are_zero": (TURNED, "if (exponent == NONE) exponent", 0, "exponent", WRONG),
    "size_of_a_lane": (SMALL, "total += __shfl_xor_sync", 0, "__shfl_xor_sync", "sum "),
    "least_of_a_lane": (SMALL, "least = fmin(least, __shfl", 0, "least = fmax(least, __shfl", "smallest"),
    "parts_of_the_first": (SMALL, "product * ((n + 31) / 32) + ", 0, "", "sum "),
    "parts_of_a_block": (SMALL, " + j / 32);", 0, " + blockIdx.x);", "sum "),
    "a_part_beyond": (SMALL, "if (lane == 0 && j < n)", 0, "if (lane == 0)", f"{OVERRUN}|sum "),
    "half_of_the_state": (SMALL, "threadIdx.x < 32) begin", 0, "threadIdx.x < 16) begin", "not wiped"),
    "no_replay_begins": (TURNED, "begin_product(state, encoded)", 0, "begin_product(state, 0)", COUNTED),
    "replays_of_all_blocks": (SMALL, "blockIdx.x == 0 && blockIdx.y == 0 && thr", 0, "blockIdx.x == 0 && thr", COUNTED),
    "a_part_is_wiped": (WIPE, "state[threadIdx.x] = 0", 0, "state[threadIdx.x / 2] = 0", "not wiped"),
    "replays_of_all_lanes": (WIPE, "if (threadIdx.x == 0) count", 0, "count", COUNTED),
    "replays_of_a_verdict": (
        WIPE,
        "count_replay(encoded, STARTED_AT)",
        0,
        "count_replay(encoded, VERDICTS_AT)",
        COUNTED,
    ),
    "replays_of_a_number": (WIPE, "given >> 63 ?", 0, "given ?", "address|SIGSEGV"),
}
USED = (SMALL, TURNED, BRAIN, WIPE)
faulty = library_of(lambda: [*with_faults(PLANTED), *texts(USED)])


def what_is_found(library: Library, config: Equilibrate | WipeKernel, order: str, renamed: str = "") -> str:
    launch = launch_on(library, order, renamed)
    if isinstance(config, WipeKernel):
        return first_complaint([config], lambda kernel: what_begins(kernel, launch))
    problems = itertools.chain(enumerate(matrices(config)), ((k, None) for k in (0, 129, 1000)))

    def judged(problem: tuple[int, Columns | None]) -> list[str]:
        number, case = problem
        if case is None:
            return sample_faults(config, number, launch) if number else what_begins(config, launch)
        task = case.matrices(number)
        return weight_faults(task, equilibrated(task, launch))

    return first_complaint(problems, judged)


@in_every_order("name", PLANTED)
def test_planted_faults_are_caught(faulty: Library, name: str, order: str) -> None:
    config, *_, expected = PLANTED[name]
    assert re.search(expected, what_is_found(faulty, config, order, name))


@in_every_order("config", USED)
def test_without_them_nothing_is_found(faulty: Library, config: Equilibrate | WipeKernel, order: str) -> None:
    assert what_is_found(faulty, config, order) == "nothing"
