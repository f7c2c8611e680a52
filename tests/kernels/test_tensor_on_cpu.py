"""kernels/tsm2/tsm2r_tensor.cu, run on the CPU (tests/support/cuda_on_cpu) and judged element by element.

The tensor cores' instructions have plain twins here; that these do the same, tests/core/test_tensor_on_gpu.py shows.

And the tests tested: faults planted into the kernel's own text are caught. What no test here can see, since blocks run
one after the other, copies to shared memory are done at once and sums are rounded to nearest: `copies_done`,
`__threadfence`, that each stage of 16-bit elements has sums of its own, and at what multiples copies begin.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from abft_tsm2.core.compiler import source
from abft_tsm2.core.division import Grid
from abft_tsm2.core.kernels import Stream, candidates
from abft_tsm2.core.problem import Problem
from tests.support.libraries import in_every_order, library_of, some, texts, with_faults
from tests.support.stream_kernel_cases import TENSOR, Case, Operands, b_orders, cases, faults
from tests.support.stream_runs import (
    check_drawn_problems,
    check_in_every_order,
    check_in_turn,
    check_launches,
    check_what_is_not_finite,
    on_cpu,
    what_is_found,
)

COLUMNS, TILES, STAGES = TENSOR[:3]  # columns of A are contiguous
ROWS, LONG, WIDE = TENSOR[3:6]  # rows are
HALVES, SHORT = TENSOR[6:8]  # rows of 16-bit elements
TURNED, TURNED_TILES, TURNED_ROWS, TURNED_HALVES = TENSOR[11:15]  # B is read along its columns
LINES = TENSOR[21]  # columns of 16-bit elements
NARROW = TENSOR[16]  # a vector is loaded in halves
SANITIZED = (*TENSOR[1:11:2], HALVES, *TENSOR[12::2])  # among them kernels with several tiles of a warp
KERNEL = 'extern "C" __global__ void'
SYNC = "__syncthreads();"
ODD = "if (s + i + half < steps)"
STEP_ON = "if (s + i + half + 1 < steps) done += step;"
INSIDE = "int(j) < rows && q < n"
ELEMENTS = "j + i * APART < rows && q < n"
OF_PATCH = " j < rows && q < n"
OF_UNIT = "j + V <= rows && q < n"
WHOLE = "tile_row + ROWS <= m"
RACE, UNSET = "race: ", "uninitialised shared memory: "
WRONG = "elements are wrong"
OUTSIDE = "global memory overrun|around C were written|elements are wrong"
# name: (kernel, what is replaced, which occurrence, by what, what is then said). What both headers have is 0 in that of
# float64, and 1 in the other.
PLANTED = {
    "b_used_too_early": (COLUMNS, SYNC, 3, "", f"{RACE}|{UNSET}|{WRONG}"),
    "rest_filled_too_early": (ROWS, SYNC, 4, "", f"{RACE}|{WRONG}"),
    "rest_used_too_early": (HALVES, SYNC, 5, "", f"{RACE}|{UNSET}|{WRONG}"),
    "barrier_for_some": (COLUMNS, SYNC, 3, f"if (threadIdx.x < 32) {SYNC}", f"divergent barriers|{RACE}|{UNSET}"),
    "parts_of_other_rows": (COLUMNS, "Index(blockIdx.z) * gridDim.x + blockIdx.x", 0, "blockIdx.z", WRONG + "|ticket"),
    "nothing_is_divided": (COLUMNS, "begin + slice)", 0, "k)", WRONG),
    "b_from_the_start": (COLUMNS, "bsb + begin * rsb", 0, "bsb", WRONG),
    "columns_from_the_start": (COLUMNS, "(begin + first_column()) * lda", 0, "first_column() * lda", WRONG),
    "rows_from_the_start": (ROWS, "* lda + begin + member() * V", 0, "* lda + member() * V", WRONG),
    "same_columns": (COLUMNS, "(begin + first_column()) * lda", 0, "begin * lda", WRONG),
    "same_vectors_of_rows": (HALVES, "* lda + begin + member() * V", 0, "* lda + begin", WRONG),
    "one_stage": (COLUMNS, "stage = 1 - stage;", 0, "", f"{RACE}|{WRONG}"),
    "stage_filled_too_early": (COLUMNS, "weights + (1 - stage) * WEIGHTS", 0, "weights + stage * WEIGHTS", RACE),
    "stage_multiplied": (HALVES, "weights + stage * WEIGHTS, (i", 0, "weights, (i", f"{RACE}|{WRONG}"),
    "steps_of_a_stage": (STAGES, "(i + half) * STEP", 0, "half * STEP", WRONG),
    "halves_of_a_step": (HALVES, "(i + half) * STEP", 0, "i * STEP", WRONG),
    "next_stage": (LONG, "(s + 2 * PAIRS) * Index(STEP)", 0, "s * Index(STEP)", WRONG),
    "odd_step": (COLUMNS, ODD, 0, "", WRONG),
    "odd_step_of_halves": (HALVES, ODD, 0, "", WRONG),
    "no_prefetch": (COLUMNS, STEP_ON, 0, "", WRONG),
    "one_step_more": (ROWS, "/ STEP) : 0", 0, "/ STEP) + 1 : 0", OUTSIDE + "|misaligned or outside"),
    "rest_from_the_start": (ROWS, "+ Index(steps) * STEP; first", 0, "; first", WRONG),
    "rest_of_a": (ROWS, "copies_done();\n    done += step;", 0, "copies_done();", WRONG),
    "rest_of_b": (COLUMNS, "B + (first - begin) * rsb", 0, "B", WRONG),
    "end_of_rows": (ROWS, "left - j)", 0, "V)", WRONG),
    "end_of_short_rows": (HALVES, "left - j)", 0, "left)", WRONG),
    "end_of_columns": (COLUMNS, "j < left ? rows", 0, "true ? rows", WRONG),
    "tiles_of_columns": (TILES, "+ row_of(c));", 0, ");", WRONG),
    "tiles_of_columns_at_the_end": (TILES, "lda + row_of(c),", 0, "lda,", WRONG),
    "tiles_of_rows": (ROWS, "2 * c + v % 2", 0, "v % 2", WRONG),
    "tiles_of_rows_at_the_end": (ROWS, "2 * c + v % 2", 1, "v % 2", WRONG),
    "no_sums": (TILES, "sum[c][p][i] = ACC(0);", 0, ";", WRONG + "|uninitialised register"),
    "last_stage_is_lost": (HALVES, "if constexpr (SIZE == 2) add(total, sum);", 1, "", WRONG),
    "stages_count_twice": (HALVES, "clear(sum);\n}", 0, "}", WRONG),
    "order_of_b": (ROWS, "i / 2 * 8 + 2 * member() + i % 2 :", 0, "4 * i + member() :", WRONG),
    "order_of_a": (WIDE, "a[c][t][i / 4 * 2 + i % 2]", 0, "a[c][t][i / 4 + i % 2 * 2]", WRONG),
    "order_of_pairs": (HALVES, "low[2], high[2], low[3], high[3]", 0, "low[3], high[3], low[2], high[2]", WRONG),
    "order_in_pairs": (SHORT, "low.bits | unsigned(high.bits)", 0, "high.bits | unsigned(low.bits)", WRONG),
    "order_of_rows": (SHORT, "low[0], high[0], low[1], high[1]", 0, "high[0], low[0], high[1], low[1]", WRONG),
    "depths_of_a_step": (WIDE, "first + t * DEPTH, p * 8", 0, "first, p * 8", WRONG),
    "bands_of_b": (TILES, "first + t * DEPTH, p * 8", 0, "first + t * DEPTH, 0", WRONG),
    "place_of_rows": (HALVES, "j % 8 * 4 + j % DEPTH / 8", 0, "j % 8 * 4 + j / 8 % 2", f"{RACE}|{UNSET}|{WRONG}"),
    "rows_of_b": (COLUMNS, INSIDE, 0, "q < n", WRONG),
    "rows_of_short_b": (HALVES, ELEMENTS, 0, "q < n", WRONG),
    "rows_of_dense_b": (COLUMNS, "int(i) < rows * T2", 0, "true", WRONG),
    "rows_of_dense_short_b": (HALVES, "int(i) < rows * T2", 1, "true", WRONG),
    "rows_of_b_in_patches": (COLUMNS, OF_PATCH, 0, " q < n", WRONG),
    "rows_of_few_columns": (HALVES, "B + j * rsb, j < rows)", 0, "B + j * rsb, true)", WRONG),
    "columns_beyond_few": (HALVES, "clear_stages(weights);", 0, ";", UNSET),
    "columns_beyond_few_in_one_stage": (HALVES, "i < 2 * WEIGHTS", 0, "i < WEIGHTS", UNSET),
    "columns_beyond_few_cleared_too_late": (HALVES, SYNC, 2, "", RACE),
    "one_column_of_few": (HALVES, "COPY_HALVES(N, weights", 0, "COPY_HALVES(N - 1, weights", WRONG),
    "all_rows_are_of_few_columns": (HALVES, "return n == N &&", 0, "return n >= N &&", WRONG),
    "few_columns_of_any_strides": (HALVES, "n == N && csb == 1", 0, "n == N", WRONG + "|overrun"),
    "place_of_columns_when_read": (
        SHORT,
        "2 * i + 1, column + group())",
        0,
        "2 * i + 1, 0) + column + group()",
        f"{RACE}|{WRONG}",
    ),
    "place_of_columns_when_written": (
        SHORT,
        "place(j + i * APART, q)] =",
        0,
        "place(j + i * APART, 0) + q] =",
        f"{RACE}|{UNSET}|{WRONG}",
    ),
    "place_of_dense_columns": (
        SHORT,
        "place(i / T2, i % T2)",
        0,
        "place(i / T2, 0) + i % T2",
        f"{RACE}|{UNSET}|{WRONG}",
    ),
    "turned_columns_apart": (TURNED_TILES, "* COLUMN + first", 1, "* STAGE + first", f"{UNSET}|{WRONG}"),
    "turned_columns_of_rows_apart": (TURNED_ROWS, "* COLUMN + first", 0, "* STAGE + first", f"{UNSET}|{WRONG}"),
    "turned_columns_of_halves_apart": (TURNED_HALVES, "* COLUMN + first", 2, "* STAGE + first", f"{UNSET}|{WRONG}"),
    "turned_places_apart": (TURNED_ROWS, "q * COLUMN + j", 0, "q * STAGE + j", f"{RACE}|{UNSET}|{WRONG}"),
    "turned_places_of_halves_apart": (TURNED_HALVES, "q * COLUMN + j", 0, "q * STAGE + j", f"{RACE}|{UNSET}|{WRONG}"),
    "turned_pairs": (TURNED_ROWS, "b[i + 1] = two.x[1]", 0, "b[i + 1] = two.x[0]", WRONG),
    "turned_members": (TURNED_HALVES, "first + 8 * member()", 0, "first", WRONG),
    "turned_bands": (TURNED_TILES, "first + t * DEPTH, p * 8", 0, "first + t * DEPTH, 0", WRONG),
    "turned_rest": (TURNED, "multiply<false>", 0, "multiply<true>", f"{UNSET}|{WRONG}"),
    "neighbours_of_b": (WIDE, "if (q < T2) COPY", 0, "COPY", f"{RACE}|{WRONG}|out of bounds"),
    "rows_of_elements": (HALVES, "threadIdx.x / ACROSS * rsb + q * csb", 0, "q * csb", WRONG),
    "another_element": (HALVES, "= x[i];", 0, "= x[0];", WRONG),
    "rows_of_c": (COLUMNS, "r >= own_row && r < m", 0, "r >= own_row", OUTSIDE),
    "rows_of_the_tile_before": (COLUMNS, "r >= own_row && ", 0, "", WRONG + "|" + RACE),
    "tile_too_early": (COLUMNS, "m - tile)", 0, "m - tile - V)", OUTSIDE + "|" + UNSET),
    "tile_between_vectors": (COLUMNS, "m % unit == 0 &&", 0, "", "misaligned|" + WRONG),
    "columns_of_c": (HALVES, "if (q < count) *at", 0, "*at", OUTSIDE),
    "tiles_of_c": (TILES, "return 16 * c + (ORDER", 0, "return (ORDER", WRONG),
    "bands_of_c": (WIDE, "i / 4 % BANDS * 8 + 2", 0, "2", WRONG),
    "halves_of_vectors": (NARROW, "const Word*>(at + i)", 0, "const Word*>(at)", WRONG),
    "places_of_halves": (NARROW, "memcpy(&a.x[i], &word, ALIGNED)", 0, "memcpy(&a.x[0], &word, ALIGNED)", WRONG),
    "pairs_of_columns": (LINES, "next[c % 4] << 16", 0, "next[c % 4]", WRONG),
    "second_rows_of_columns": (LINES, "one[c % 4] >> 16", 0, "one[c % 4] & 0xffffu", WRONG),
    "rows_of_a_word": (LINES, "(one[c % 4] & 0xffffu)", 0, "(one[0] & 0xffffu)", WRONG),
    "columns_of_a_tile": (LINES, "c % 4 * 2 + v", 0, "v", WRONG),
    "first_of_eight_columns": (LINES, "return 8 * member()", 0, "return member()", WRONG),
    "tiles_of_short_columns": (LINES, "c / 4 * 64", 0, "0", WRONG),
    "words_of_other_tiles": (LINES, "c / 4 * 4 + i", 0, "i", WRONG),
    "rows_of_a_tile_of_c": (LINES, "8 * group() + c % 4 * 2", 0, "8 * group()", WRONG),
    "one_a_for_all": (COLUMNS, "A += blockIdx.z * bsa;", 0, "", WRONG),
    "one_b_for_all": (ROWS, "B += blockIdx.z * bsb + ", 0, "B += ", WRONG),
    "one_c_for_all": (HALVES, "C += blockIdx.z * bsc;", 0, "", OUTSIDE),
}
# What is read and then not used: only AddressSanitizer sees it.
ADDRESSES = {
    "tile_before_the_matrix": (COLUMNS, " && m >= tile ?", 0, " ?"),
    "whole_tiles": (COLUMNS, WHOLE, 0, "tile_row <= m"),
    "rows_beyond_m": (HALVES, "smaller(row + group() + 8 * i, m - 1)", 0, "(row + group() + 8 * i)"),
    "rows_of_columns": (TILES, "rows - row_of(c) - V * group()", 0, "V"),
    "after_the_last_columns": (COLUMNS, STEP_ON, 0, "done += step;"),
    "after_the_last_vectors": (ROWS, STEP_ON, 0, "done += step;"),
    "rows_of_next_stage": (COLUMNS, "end - begin - next, n, dense", 0, "end - begin, n, dense"),
    "columns_of_b": (COLUMNS, INSIDE, 0, "int(j) < rows"),
    "columns_of_short_b": (HALVES, ELEMENTS, 0, "j + i * APART < rows"),
    "columns_of_b_in_patches": (COLUMNS, OF_PATCH, 0, " j < rows"),
    "elements_of_few_columns": (HALVES, "COPY_HALVES(N, weights", 0, "COPY_HALVES(N + 1, weights"),
    "columns_of_turned_b": (TURNED, OF_UNIT, 0, "j + V <= rows"),
    "rows_of_turned_b": (TURNED, OF_UNIT, 0, "q < n"),
    "unit_that_turned_b_ends_in": (TURNED_ROWS, OF_UNIT, 0, "j < rows && q < n"),
    "columns_of_turned_short_b": (TURNED_HALVES, OF_UNIT, 0, "j + V <= rows"),
    "rows_of_turned_short_b": (TURNED_HALVES, OF_UNIT, 0, "q < n"),
    "unit_that_turned_short_b_ends_in": (TURNED_HALVES, OF_UNIT, 0, "j < rows && q < n"),
}


library = library_of(lambda: texts(TENSOR))
sanitized = library_of(lambda: texts(SANITIZED), sanitize=True)
faulty = library_of(lambda: with_faults(PLANTED))
faulty_addresses = library_of(lambda: with_faults(ADDRESSES), sanitize=True)


def names(config: Stream) -> str:
    return config.name


@pytest.mark.parametrize("config", TENSOR, ids=names)
def test_every_path_in_every_order(library, config, orders):
    check_in_every_order(library, cases(config)[::2], orders)  # every shape once; all others under AddressSanitizer


@pytest.mark.parametrize("config", some(SANITIZED, 4), ids=names)
def test_every_path_under_address_sanitizer(sanitized, config):
    check_in_turn(sanitized, cases(config)[1::2])


def of_orders(*orders: str) -> pytest.MarkDecorator:
    """Every kernel, with those of some orders of B that it takes."""
    taken = [(config, order) for config in TENSOR for order in orders if order in b_orders(config)]
    return pytest.mark.parametrize(("config", "b_order"), taken, ids=lambda x: getattr(x, "name", x))


@of_orders("dense", "C", "F", "turned")
def test_what_is_not_finite_stays_in_its_row_and_column(library, config, b_order):
    m, k, n = config.tile + 3, 3 * config.step + 1, config.t2
    check_what_is_not_finite(library, Case(config, m, k, n, steps=2, extra=1, b_order=b_order))


@dataclass(frozen=True)
class Sliced(Case):
    """A part of k has so many vectors, and need not be a multiple of a step."""

    vectors: int = 1

    @property
    def grid(self) -> Grid:
        part = self.vectors * self.config.vector
        return replace(super().grid, parts=-(-self.k // part), slice=part)


@of_orders("dense", "F", "turned")
def test_a_part_of_k_is_any_number_of_vectors(library, config, b_order):
    step = config.step // config.vector
    for vectors in (1, step - 1, 2 * step + 1):
        case = Sliced(config, config.tile + 1, 3 * config.step + 1, config.t2, b_order=b_order, vectors=vectors)
        operands = Operands.of(case)
        assert not faults(operands, *on_cpu(library, operands, "random")), str(case)


def test_drawn_problems(library):
    check_drawn_problems(library, TENSOR)


# ---- where B lies in shared memory ----------------------------------------------------------------------------------


def probe(config: Stream) -> tuple[str, str]:
    """`probe`, with the kernel's own functions: where the threads of a warp read B, and where each row of it lies."""
    double = "for (int i = 0; i < 4; i++) out[i * 32 + threadIdx.x] = depth(i) * ROW + group();"
    short = "for (int p = 0; p < BANDS; p++) out[p * 32 + threadIdx.x] = place(threadIdx.x, p * 8);"
    turned = "for (int i = 0; i < 4; i++) out[i * 32 + threadIdx.x] = group() * COLUMN + "
    along = {"float64": "depth(i);", "float32": "8 * member();"}  # by the type of the sums
    name = f"probe_{config.name}"
    body = turned + along[config.sums] if config.turned else double if config.dtype == "float64" else short
    return name, f"{source(config).partition(KERNEL)[0]}{KERNEL} {name}(int* out) {{ {body} }}\n"


places = library_of(lambda: [probe(config) for config in TENSOR])


@pytest.mark.parametrize(
    "config", [x for x in TENSOR if x.dtype == "float64" and not (x.turned and x.order)], ids=names
)
def test_a_warp_reads_b_evenly_from_the_banks(places, config):
    """8 bytes a thread: twice from each of the 16 places that shared memory has for them, and none can do better."""
    at = np.zeros((4, 32), np.int32)
    places.run(f"probe_{config.name}", 1, 32, [at])
    assert len(np.unique(at)) == 4 * 32
    for i in range(4):
        assert (np.bincount(at[i] % 16, minlength=16) == 2).all()


@pytest.mark.parametrize("config", [x for x in TENSOR if x.turned and x.order == 1], ids=names)
def test_eight_threads_read_columns_of_b_from_other_banks(places, config):
    """16 bytes a thread, by a quarter of a warp at a time."""
    at, unit = np.zeros((4, 32), np.int32), 2 if config.dtype == "float64" else 8
    places.run(f"probe_{config.name}", 1, 32, [at])
    for eight in at[::2].reshape(-1, 8):
        assert (eight % unit == 0).all()
        assert sorted(eight // unit % 8) == list(range(8))


@pytest.mark.parametrize("config", [x for x in TENSOR if x.dtype != "float64" and not x.turned], ids=names)
def test_rows_that_are_read_together_lie_side_by_side(places, config):
    """The 8 rows of a matrix that `ldmatrix` reads, 16 bytes of each, from 8 such places; and every one has its own."""
    at = np.zeros((config.t2 // 8, 32), np.int32)
    places.run(f"probe_{config.name}", 1, 32, [at])
    assert sorted(at.ravel()) == list(range(0, 32 * config.t2, 8))
    r = np.arange(8)
    for band in at:
        for i in range(4):
            rows = band[r // 2 * 8 + 2 * i + r % 2]
            assert sorted(rows // 8 % 8) == list(range(8))


# ---- as the library launches them -----------------------------------------------------------------------------------

CHOSEN = [("F", "float64", 8), ("F", "float64", 13), ("C", "float64", 5), ("C", "float16", 8), ("C", "float16", 32)]


def chosen(order: str, dtype: str, n: int, b_order: str = "C") -> Stream:
    """The kernel on tensor cores that the library takes."""
    out = "float32" if dtype == "float16" else dtype
    problem = Problem(99, 99, n, dtype, order, dtype, out, width=16, b_order=b_order)
    return next(config for config in candidates(problem) if config.form == "tensor")


shipped = library_of(lambda: texts(sorted({chosen(*plan, b_order) for plan in CHOSEN for b_order in "CF"}, key=names)))


@pytest.mark.parametrize("plan", CHOSEN, ids=str)
def test_drawn_problems_as_the_library_launches_them(shipped, monkeypatch, plan):
    check_launches(shipped, monkeypatch, lambda b_order: chosen(*plan, b_order), plan[2], examples=20)


# ---- the tests tested -----------------------------------------------------------------------------------------------


@in_every_order("name", PLANTED)
def test_faults_planted_into_the_kernel_are_caught(faulty, name, order):
    config, *_, expected = PLANTED[name]
    assert re.search(expected, what_is_found(faulty, name, config, order))


@pytest.mark.parametrize("name", some(ADDRESSES, 4))
def test_reads_outside_of_the_matrices_are_caught(faulty_addresses, name):
    found = what_is_found(faulty_addresses, name, ADDRESSES[name][0], "forward")
    assert re.search(rf"(?s)address error: kernel {name}.*heap-buffer-overflow.*READ of size.*\.cuh?:\d+", found)
