"""kernels/tsm2/tsm2r_columns.cu and tsm2r_rows.cu, run on the CPU (tests/support/cuda_on_cpu) and judged element by
element.

And the tests tested: faults planted into the kernels' own text are caught. What no test here can see, since blocks run
one after the other and copies to shared memory are done at once: `copies_done`, `__threadfence`, and the barrier before
a ticket is drawn.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from abft_tsm2.core.kernels import Shape, Stream, candidates
from abft_tsm2.core.problem import Problem
from tests.support.cuda_on_cpu import ORDERS
from tests.support.kernel_cases import planted
from tests.support.libraries import in_every_order, library_of, some, texts, with_faults
from tests.support.stream_kernel_cases import CONFIGS, FORMS, TYPES, Case, Operands, b_orders, cases, faults
from tests.support.stream_runs import (
    check_drawn_problems,
    check_in_every_order,
    check_in_turn,
    check_launches,
    check_what_is_not_finite,
    on_cpu,
    what_is_found,
)

SINGLE, DOUBLE = ("float32",) * 4, ("float64",) * 4
HALF = ("float16", "float16", "float32", "float32")
COLUMNS = Stream("columns", *SINGLE, 16, 4, Shape(64, 1, 2, 1, 1))
WIDE = Stream("columns", *SINGLE, 16, 12, Shape(64, 1, 1, 1, 1))
THREE = Stream("columns", *DOUBLE, 8, 3, Shape(64, 3, 1, 1, 1))
ROWS = Stream("rows", *SINGLE, 16, 4, Shape(64, 2, 2, 1, 1))
STEPS = Stream("rows", *SINGLE, 16, 4, Shape(64, 1, 1, 0, 1))
ODD = Stream("rows", *DOUBLE, 8, 3, Shape(64, 3, 1, 1, 1))
HALVES = Stream("rows", *HALF, 16, 4, Shape(64, 1, 1, 2, 1))
PADDED = Stream("columns", *SINGLE, 16, 8, Shape(64, 1, 1, 1, 1))  # gaps between rows of B
TURNED = Stream("columns", *SINGLE, 16, 12, Shape(64, 1, 4, 1, 1), turned=True)
CONVERTING = Stream("columns", *HALF, 16, 4, Shape(64, 1, 4, 2, 1))
SHORT = Stream("columns", *HALF, 4, 3, Shape(64, 3, 1, 1, 1))  # fewer elements of B than threads
HELD = Stream("rows", *HALF, 16, 2, Shape(64, 1, 1, 1, 1))  # 16-bit elements of B in registers
HELD_STEPS = Stream("rows", *HALF, 16, 4, Shape(64, 1, 1, 0, 1))
HELD_ODD = Stream("rows", *HALF, 4, 3, Shape(64, 1, 1, 1, 1))
HELD_ONE = Stream("rows", *HALF, 8, 1, Shape(128, 1, 1, 1, 1))
HEALTHY = (
    *(COLUMNS, WIDE, THREE, ROWS, STEPS, ODD, HALVES, PADDED, TURNED),
    *(CONVERTING, SHORT, HELD, HELD_STEPS, HELD_ODD, HELD_ONE),
)
SYNC = "__syncthreads();"
RACE, UNSET = "race: ", "uninitialised shared memory: "
WRONG = "elements are wrong"
OUTSIDE = "global memory overrun|around C were written|elements are wrong"
IN_COLUMNS = "i < rows && q < n"
IN_ROWS = "int(j) < rows && q < n"  # 0 where B is held in registers, 1 where it is copied
PUT = "put(weights, held);"
PUT_ROWS = "put(weights, held, rsb, dense);"
LOADED, LOADED_ROWS = "\n    load_columns(a[0], at, lda);\n    ", "\n    load_rows(a[0], A, lda, rows);\n    "
FIRST = "fetch_stage(weights, held, B, rsb, csb, end - begin, n, dense);"
FIRST_ROWS = "fetch(weights, held, B, rsb, csb, length, n, dense);"
REST = "fetch(weights, held, from + first * rsb, rsb, csb, end - first, n, dense);"
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
PLANTED = {
    "ticket_read_too_early": (COLUMNS, SYNC, 1, "", RACE + "|" + UNSET),
    "columns_b_used_too_early": (COLUMNS, SYNC, 2, "", WRONG),
    "columns_rest_filled_too_early": (COLUMNS, SYNC, 3, "", WRONG),
    "columns_rest_used_too_early": (COLUMNS, SYNC, 4, "", WRONG),
    "columns_exchange_too_early": (WIDE, SYNC, 5, "", RACE),
    "columns_sums_too_early": (COLUMNS, SYNC, 6, "", RACE + "|" + UNSET),
    "rows_b_used_too_early": (ROWS, SYNC, 2, "", WRONG),
    "rows_rest_filled_too_early": (ROWS, SYNC, 3, "", WRONG),
    "rows_rest_used_too_early": (ROWS, SYNC, 4, "", WRONG),
    "barrier_for_some": (COLUMNS, SYNC, 2, f"if (warp == 0) {SYNC}", "divergent barriers|" + WRONG),
    "shuffle_for_some": (ROWS, "over_warp(x);", 0, "lane < 16 ? over_warp(x) : ACC(0);", WRONG),
    "tickets_stay": (COLUMNS, "atomicInc(tickets + tile, splits - 1)", 0, "atomicAdd(tickets + tile, 1u)", "ticket"),
    "one_ticket": (ROWS, "atomicInc(tickets + tile,", 0, "atomicInc(tickets,", WRONG + "|ticket"),
    "last_part": (COLUMNS, "s < splits; s++", 0, "s + 1 < splits; s++", WRONG),
    "one_part_early": (ROWS, "== splits - 1;", 0, "== splits - 2;", WRONG),
    "own_part_twice": (ROWS, "sum[i] = ACC(0);", 0, ";", WRONG),
    "parts_of_all_tiles": (COLUMNS, "partial + tile * splits", 0, "partial + tile", WRONG),
    "nothing_is_divided": (COLUMNS, "begin + slice)", 0, "k)", WRONG),
    "slices_of_rows": (ROWS, "begin + slice)", 0, "k)", WRONG),
    "columns_one_step_more": (COLUMNS, "(end - begin) / COLUMNS)", 0, "(end - begin) / COLUMNS) + 1", OUTSIDE),
    "rows_one_step_more": (ROWS, "length / STEP)", 0, "length / STEP) + 1", OUTSIDE),
    "columns_stage": (COLUMNS, "stage = 1 - stage;", 0, "", WRONG),
    "rows_stage": (ROWS, "stage = 1 - stage;", 1, "", WRONG),
    "rows_stage_of_a_step": (STEPS, "PAIRS == 0 && now < steps", 0, "PAIRS == 0 && half == 0", WRONG),
    "rows_b_of_a_step_used_too_early": (STEPS, SYNC, 2, "", WRONG),
    "columns_odd_step": (COLUMNS, "if (s + i + half < steps)", 0, "", WRONG),
    "rows_odd_step": (ROWS, "if (now < steps) multiply", 0, "multiply", WRONG),
    "columns_no_prefetch": (COLUMNS, "if (s + i + half + 1 < steps) at +=", 0, "if (s + i + half < 0) at +=", WRONG),
    "columns_rows_of_b": (THREE, IN_COLUMNS, 0, "q < n", WRONG),
    "columns_rows_of_dense_b": (COLUMNS, "i < rows * T2", 0, "true", f"{UNSET}|{WRONG}"),
    "rows_rows_of_b": (ODD, "int(i) < rows && q < n", 0, "q < n", WRONG),
    "rows_rows_of_b_by_columns": (ODD, IN_ROWS, 1, "q < n", WRONG),
    "rows_rows_of_dense_b": (ROWS, "int(i) < rows * T2", 0, "true", f"{UNSET}|{WRONG}"),
    "columns_neighbours_of_b": (WIDE, "if (q >= T2) return;", 0, "", "|".join([RACE, WRONG, "overrun"])),
    "columns_rows_without_gaps": (PADDED, "i / T2 * LINE + i % T2", 0, "i", f"{UNSET}|{WRONG}"),
    "columns_rows_of_b_in_patches": (WIDE, " j < rows && q < n", 0, " q < n", WRONG),
    "columns_of_a_patch": (WIDE, "threadIdx.x / PATCH % 4", 0, "threadIdx.x / PATCH % 2", f"{RACE}|{UNSET}|{WRONG}"),
    "rows_of_a_patch": (WIDE, "threadIdx.x / (4 * PATCH) * PATCH", 0, "0", f"{RACE}|{UNSET}|{WRONG}"),
    "columns_put_too_early": (CONVERTING, FIRST + LOADED + PUT, 0, PUT + FIRST + LOADED, WRONG),
    "columns_rest_put_too_early": (CONVERTING, f"{REST}\n    {PUT}", 0, PUT + REST, WRONG),
    "columns_first_not_put": (CONVERTING, PUT, 0, "", f"{UNSET}|{WRONG}"),
    "columns_rest_not_put": (CONVERTING, PUT, 1, "", f"{UNSET}|{WRONG}"),
    "columns_next_not_put": (CONVERTING, "put(weights + next, held);", 0, "", f"{UNSET}|{WRONG}"),
    "columns_put_into_use": (
        CONVERTING,
        "put(weights + next,",
        0,
        "put(weights + stage * STAGE * LINE,",
        f"{RACE}|{WRONG}",
    ),
    "columns_put_unasked": (CONVERTING, SYNC, 3, "", f"{RACE}|{WRONG}"),
    "columns_held_beyond_b": (CONVERTING, "+ j < rows && q < n ?", 0, "+ j < STAGE && q < n ?", WRONG),
    "columns_put_beyond_a_stage": (SHORT, "row < STAGE)", 0, "true)", f"{RACE}|{WRONG}|overrun"),
    "columns_held_by_others": (CONVERTING, "i * (T1 / ACROSS) + j; row", 0, "i + j; row", f"{RACE}|{UNSET}|{WRONG}"),
    "turned_columns_apart": (TURNED, "weights[q * STAGE + first + u]", 0, "weights[q * COLUMNS + first + u]", WRONG),
    "turned_elements_of_a": (TURNED, "a[c][(u + i) % T3]", 0, "a[c][u]", WRONG),
    "turned_rest": (TURNED, "multiply(sum, a, weights,", 0, "multiply_turned(sum, a, weights,", f"{UNSET}|{WRONG}"),
    "turned_columns_of_b": (TURNED, "B + j + q * csb", 1, "B + j", WRONG),
    "rows_put_too_early": (HELD, FIRST_ROWS + LOADED_ROWS + PUT_ROWS, 0, PUT_ROWS + FIRST_ROWS + LOADED_ROWS, WRONG),
    "rows_first_not_put": (HELD, PUT_ROWS, 0, "", f"{UNSET}|{WRONG}"),
    "rows_rest_not_put": (HELD, PUT_ROWS, 1, "", f"{UNSET}|{WRONG}"),
    "rows_put_into_one_stage": (
        HELD,
        "put(weights + (1 - stage) * WEIGHTS, held",
        1,
        "put(weights, held",
        f"{RACE}|{UNSET}|{WRONG}",
    ),
    "rows_put_into_use": (HELD_STEPS, "put(weights + (1 - stage)", 0, "put(weights + stage", f"{RACE}|{UNSET}|{WRONG}"),
    "rows_held_beyond_b": (HELD, IN_ROWS, 0, "q < n", WRONG),
    "rows_held_beyond_dense_b": (HELD, "at + v < rows * T2 ? B[at + v] : B_TYPE{0}", 0, "B[at + v]", WRONG),
    "rows_group_that_b_ends_in": (HELD, "at + UNIT <= rows * T2", 0, "at < rows * T2", WRONG),
    "rows_put_beyond_a_row": (HELD_ODD, "j < STAGE && q < T2", 0, "j < STAGE", f"{RACE}|{WRONG}"),
    "rows_put_beyond_a_stage": (HELD_ONE, "j < STAGE && q < T2", 0, "q < T2", f"{RACE}|{WRONG}|overrun"),
    "rows_dense_put_beyond_a_stage": (HELD_ONE, "if (at < STAGE * T2)", 0, "", f"{RACE}|{WRONG}|overrun"),
    "any_b_is_dense": (COLUMNS, "csb == 1 && rsb == T2", 0, "csb == 1", WRONG),
    "columns_of_a": (COLUMNS, "u < columns ? rows - c * 32 * V : 0", 0, "rows - c * 32 * V", WRONG),
    "elements_of_a": (ROWS, "if (i < count)", 0, "", WRONG),
    "no_zeros": (HALVES, "memset(&a, 0, WIDTH);", 0, "", WRONG),
    "vectors_of_a": (ROWS, "left - t * ACROSS_A", 0, "left", WRONG),
    "columns_next_warp": (COLUMNS, "(first + warp * T3) * lda", 0, "first * lda", WRONG),
    "columns_no_sums": (THREE, "sum[c][v][q] = ACC(0);", 0, ";", WRONG + "|uninitialised register"),
    "rows_no_sums": (ODD, "sum[r][q] = ACC(0);", 0, ";", WRONG),
    "rows_sums_of_warp": (ODD, "if constexpr (HALF == 0) x[0] +=", 0, "if constexpr (HALF == 0) x[0] =", WRONG),
    "rows_of_c": (COLUMNS, "r >= own_row && r < m", 0, "r >= own_row", OUTSIDE),
    "runs_of_a_warp": (WIDE, "const int at = warp * ROUNDS + i, q", 0, "const int at = i, q", WRONG),
    "runs_within_a_row": (SHORT, "at / (V * T2) * (32 * V) + at / T2 % V", 0, "at / (V * T2) * (32 * V)", WRONG),
    "sums_that_are_not_there": (THREE, "if (at < SUMS && r", 0, "if (r", OUTSIDE),
    "rows_of_the_tile_before": (COLUMNS, "r >= own_row && ", 0, "", WRONG + "|" + RACE),
    "tile_too_early": (COLUMNS, "m - tile)", 0, "m - tile - V)", OUTSIDE + "|" + UNSET),
    "tile_between_vectors": (COLUMNS, "m % unit == 0 &&", 0, "", "misaligned|" + WRONG),
    "columns_of_c": (COLUMNS, "if (q < count) *at", 0, "*at", OUTSIDE),
    "columns_of_c_that_is_read": (COLUMNS, "if (q < count) *at", 1, "*at", OUTSIDE),
    "columns_of_c_at_once": (COLUMNS, "count >= COUNT && ", 0, "", OUTSIDE),
    "any_c_is_row_major": (COLUMNS, "csc == 1 && ", 0, "", OUTSIDE),
    "any_c_is_aligned": (COLUMNS, "reinterpret_cast<unsigned long long>(at) % 16 == 0", 0, "true", "misaligned"),
    "c_is_not_read_at_once": (COLUMNS, "beta == ACC(0) && csc", 0, "csc", WRONG),
    "places_at_once": (WIDE, "narrowed(alpha * sum[q + i]", 0, "narrowed(alpha * sum[q]", WRONG),
    "no_alpha_at_once": (COLUMNS, "narrowed(alpha * sum[q + i]", 0, "narrowed(sum[q + i]", WRONG),
    "rows_of_c_in_rows": (ROWS, "at < SUMS && r < m)", 0, "at < SUMS)", OUTSIDE),
    "columns_of_c_in_rows": (ROWS, "if (q < count) *at", 0, "*at", OUTSIDE),
    "c_is_read": (ROWS, "if (beta == ACC(0)) {", 0, "if (false) {", WRONG),
    "c_is_not_read": (COLUMNS, "beta * ACC(widened(*at))", 0, "ACC(0)", WRONG),
    "one_a_for_all": (COLUMNS, "A += blockIdx.z * bsa;", 0, "", WRONG),
    "one_b_for_all": (ROWS, "blockIdx.z * bsb + ", 0, "", WRONG),
    "one_c_for_all": (ROWS, "C += blockIdx.z * bsc;", 0, "", OUTSIDE),
}
# What is read and then not used: only AddressSanitizer sees it.
ADDRESSES = {
    "tile_before_the_matrix": (COLUMNS, " && m >= tile ?", 0, " ?"),
    "whole_tiles": (COLUMNS, "tile_row + 32 * V * TCF <= m", 0, "tile_row <= m"),
    "after_the_last_column": (COLUMNS, "if (s + i + half + 1 < steps) at +=", 0, "at +="),
    "after_the_last_step": (ROWS, "if (now + 1 < steps) A +=", 0, "A +="),
    "after_the_last_of_single_steps": (STEPS, "if (now + 1 < steps) A +=", 0, "A +="),
    "rows_beyond_m": (ROWS, "smaller(row, m - 1) * lda", 0, "row * lda"),
    "rows_of_a_warp": (ROWS, "if (r < rows) at += lda;", 0, "at += lda;"),
    "rows_of_a_warp_at_the_end": (ROWS, "if (r < rows) at += lda;", 1, "at += lda;"),
    "columns_of_b": (THREE, IN_COLUMNS, 0, "i < rows"),
    "columns_of_b_for_rows": (ODD, "int(i) < rows && q < n", 0, "int(i) < rows"),
    "columns_of_b_by_columns": (ODD, IN_ROWS, 1, "int(j) < rows"),
    "columns_of_b_in_patches": (WIDE, " j < rows && q < n", 0, " j < rows"),
    "columns_of_b_to_convert": (CONVERTING, "+ j < rows && q < n ?", 0, "+ j < rows ?"),
    "columns_of_turned_b": (TURNED, "j <= rows && q < n", 0, "j <= rows"),
    "rows_of_turned_b": (TURNED, "j <= rows && q < n", 0, "q < n"),
    "unit_that_turned_b_ends_in": (TURNED, "smaller(left, STAGE)) - UNIT", 0, "smaller(left, STAGE)) - 1"),
    "columns_of_held_b": (HELD, IN_ROWS, 0, "int(j) < rows"),
    "group_that_held_b_ends_in": (HELD, "at + UNIT <= rows * T2", 0, "at < rows * T2"),
    "parts": (COLUMNS, "(split * PIECES + p) * T1", 0, "((split + 1) * PIECES + p) * T1"),
}
FOUND_BY_ORDER = (  # parts added as they come
    "parts_as_they_come",
    ROWS,
    "__ldcg(parts + p * T1)",
    0,
    "__ldcg(parts + (Index((s + split) % splits) - Index(s)) * (PIECES * T1) + p * T1)",
)


library = library_of(lambda: texts(CONFIGS))
sanitized = library_of(lambda: texts(CONFIGS), sanitize=True)
faulty = library_of(lambda: [*with_faults(PLANTED), planted(*FOUND_BY_ORDER), *texts(HEALTHY)])
faulty_addresses = library_of(lambda: with_faults(ADDRESSES), sanitize=True)


def names(config: Stream) -> str:
    return config.name


@pytest.mark.parametrize("config", CONFIGS, ids=names)
def test_every_path_in_every_order(library, config, orders):
    check_in_every_order(library, cases(config), orders)


@pytest.mark.parametrize("config", some(CONFIGS[::2], 8), ids=names)
def test_every_path_under_address_sanitizer(sanitized, config):
    check_in_turn(sanitized, cases(config)[CONFIGS.index(config) // 2 % 2 :: 2])  # a kernel and the next one have all


@pytest.mark.parametrize("config", CONFIGS, ids=names)
def test_what_is_not_finite_stays_in_its_row_and_column(library, config):
    m, k, n = config.tile + 3, 3 * config.step + 1, config.t2
    check_what_is_not_finite(library, Case(config, m, k, n, steps=2, extra=1, b_order=b_orders(config)[0]))


@pytest.mark.parametrize("form", FORMS)
def test_drawn_problems(library, form):
    check_drawn_problems(library, [config for config in CONFIGS if config.form == form])


# ---- as the library launches them ---------------------------------------------------------------------------------

TYPES_CHOSEN = {"float32": ("float32", "float32"), "float64": ("float64", "float64"), "float16": ("float16", "float32")}
CHOSEN = [
    (order, dtype, n, width)
    for order, dtype in (("F", "float32"), ("C", "float32"), ("C", "float64"), ("F", "float16"), ("C", "float16"))
    for n, width in ((2, 16), (3, TYPES[dtype].itemsize))
]


def chosen(order: str, dtype: str, n: int, width: int, b_order: str = "C") -> Stream:
    """The kernel that the library takes."""
    weights, out = TYPES_CHOSEN[dtype]
    problem = Problem(99, 99, n, dtype, order, weights, out, width=width, b_order=b_order)
    return next(config for config in candidates(problem) if config.form in FORMS)


shipped = library_of(lambda: texts(sorted({chosen(*plan, b_order) for plan in CHOSEN for b_order in "CF"}, key=names)))


@pytest.mark.parametrize("plan", CHOSEN, ids=str)
def test_drawn_problems_as_the_library_launches_them(shipped, monkeypatch, plan):
    check_launches(shipped, monkeypatch, lambda b_order: chosen(*plan, b_order), plan[2], examples=100)


# ---- the tests tested ---------------------------------------------------------------------------------------------


@in_every_order("name", PLANTED)
def test_faults_planted_into_the_kernels_are_caught(faulty, name, order):
    config, *_, expected = PLANTED[name]
    assert re.search(expected, what_is_found(faulty, name, config, order))


@pytest.mark.parametrize("name", some(ADDRESSES, 5))
def test_reads_and_writes_outside_of_the_matrices_are_caught(faulty_addresses, name):
    found = what_is_found(faulty_addresses, name, ADDRESSES[name][0], "forward")
    assert re.search(
        rf"(?s)address error: kernel {name}.*heap-buffer-overflow.*(READ|WRITE) of size.*\.cuh?:\d+", found
    )


@in_every_order("config", HEALTHY)
def test_the_kernels_without_the_planted_faults_pass(faulty, config, order):
    assert what_is_found(faulty, config.name, config, order) == "nothing"


def test_parts_that_are_added_as_they_come_are_caught(faulty):
    name, config = FOUND_BY_ORDER[:2]
    operands = Operands.of(Case(config, 5, 10 * config.step, 4, steps=1, data="normal"))
    results = {on_cpu(faulty, operands, order, name=name)[0].tobytes() for order in ORDERS}
    assert len(results) > 1
    assert len({on_cpu(faulty, operands, order)[0].tobytes() for order in ORDERS}) == 1


@pytest.mark.parametrize("types", [SINGLE, DOUBLE, HALF, ("float16", "float16", "float32", "float16")])
@pytest.mark.parametrize("wrong", ["nan", "zero", "few units", "neighbour", "guard", "gap", "ticket", "none"])
def test_the_judge_finds_one_wrong_element(types, wrong):
    config = Stream("rows", *types, TYPES[types[0]].itemsize, 3, Shape(64, 1, 1, 1, 1))
    operands = Operands.of(Case(config, 23, 40, 3, steps=1, batch=2, c_order="F", alpha=-0.5, beta=2.0, data="normal"))
    memory, tickets = operands.c.memory.copy(), operands.scratch()[1]
    a, b, c = (x.matrix().astype(np.longdouble) for x in (operands.a, operands.b, operands.c))
    result, exact = operands.c.matrix(memory), -0.5 * (a @ b) + 2 * c
    result[...] = exact
    at, size = (1, 11, 1), (0.5 * (abs(a) @ abs(b)) + 2 * abs(c))[1, 11, 1]
    units = 2 * (43 * np.finfo(config.sums).eps / 2 + (config.out != config.sums) * np.finfo(config.out).eps)
    values = {"nan": np.nan, "zero": 0, "few units": exact[at] + units * size, "neighbour": exact[1, 11, 2]}
    if wrong == "guard":
        memory[3] = 0
    elif wrong == "gap":
        memory[operands.c.offset + 23] = 1
    elif wrong == "ticket":
        tickets[1] = 1
    elif wrong != "none":
        result[at] = values[wrong]
    found = faults(operands, memory, tickets)
    if wrong in values:
        assert len(found) == 1
        assert re.match(r"1 of 138 elements are wrong, the first C\[1, 11, 1\]", found[0])
    else:
        around = ["1 element(s) around C were written"]
        assert found == {"none": [], "ticket": ["1 ticket(s) are not 0 again"]}.get(wrong, around)
