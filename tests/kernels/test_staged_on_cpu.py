"""kernels/tsm2/tsm2r_staged.cu, run on the CPU (tests/support/cuda_on_cpu) and judged element by element.

And the tests tested: faults planted into the kernel's own text are caught. What no test here can see, since blocks run
one after the other and copies to shared memory are done at once: `arrived`, `committed`, and `__threadfence`.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from abft_tsm2.core.compiler import source
from abft_tsm2.core.kernels import Stream
from tests.support.libraries import in_every_order, library_of, some, texts, with_faults
from tests.support.stream_kernel_cases import STAGED, Case, cases
from tests.support.stream_runs import (
    check_drawn_problems,
    check_in_every_order,
    check_in_turn,
    check_what_is_not_finite,
    what_is_found,
)

RING, WIDE, ODD, HALVES = STAGED[:4]
EIGHTS = STAGED[-1]  # eight vectors of a row, four rows at a time
HEALTHY = (RING, WIDE, ODD, HALVES, EIGHTS)
SYNC = "__syncthreads();"
RACE, UNSET = "race: ", "uninitialised shared memory: "
WRONG = "elements are wrong"
OUTSIDE = "global memory overrun|around C were written|elements are wrong"
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
PLANTED = {
    "stage_used_too_early": (RING, SYNC, 2, "", RACE + "|" + UNSET),
    "barrier_for_some": (WIDE, SYNC, 2, f"if (threadIdx.x < 32) {SYNC}", f"divergent barriers|{RACE}|{UNSET}"),
    "stage_filled_too_early": (RING, "(s + PAIRS - 1) % PAIRS", 0, "(s + PAIRS) % PAIRS", f"{RACE}|{UNSET}|{WRONG}"),
    "ring_without_a_stage": (RING, "s = 1 - PAIRS;", 0, "s = 2 - PAIRS;", UNSET + "|" + WRONG),
    "one_stage_of_rows": (RING, "tile + s % PAIRS * VECTORS", 0, "tile", WRONG),
    "one_stage_of_b": (RING, "weights + s % PAIRS * WEIGHTS", 0, "weights", WRONG),
    "whole_stages_only": (RING, "(left + DEPTH - 1) / DEPTH", 0, "left / DEPTH", WRONG),
    "rows_that_do_not_go_on": (RING, "A += DEPTH;", 0, "", WRONG),
    "b_that_does_not_go_on": (RING, "B += DEPTH * rsb;", 0, "", WRONG),
    "without_end": (RING, "left -= DEPTH;", 0, "", WRONG),
    "elements_of_rows": (RING, "load(at, left)", 0, "load(at)", WRONG),
    "vectors_of_rows": (RING, "A, apart, follow, left - offset", 0, "A, apart, follow, left", WRONG),
    "no_zeros": (HALVES, "memset(&a, 0, WIDTH);", 0, "", WRONG),
    "rows_of_a_block": (RING, "if (i < follow) at += apart;", 0, "", WRONG),
    "rows_of_a_block_at_the_end": (RING, "if (i < follow) at += apart;", 1, "", WRONG),
    "vectors_are_whole": (RING, "if (left >= V) {", 0, "if (true) {", WRONG),
    "rows_apart": (WIDE, "apart = COPIED * lda", 0, "apart = lda", WRONG),
    "places_written": (RING, "place(threadIdx.x / T3, threadIdx.x % T3)", 0, "threadIdx.x", WRONG),
    "places_read": (RING, "place(threadIdx.x, u)", 0, "(threadIdx.x * T3 + u)", WRONG),
    "places_of_other_rows": (WIDE, "/ 8 % T3", 0, "/ 8", f"out of bounds|{RACE}|{WRONG}"),
    "places_of_four_rows": (EIGHTS, "^ (i * (T1 / 8) % T3)", 0, "", f"{UNSET}|{RACE}|{WRONG}"),
    "rows_of_b": (ODD, "int(j) < rows && q < n", 0, "q < n", WRONG),
    "rows_of_b_in_patches": (ODD, " j < rows && q < n", 0, " q < n", WRONG),
    "rows_of_dense_b": (RING, "int(i) < rows * T2", 0, "true", WRONG),
    "neighbours_of_b": (WIDE, "if (q < T2) COPY", 0, "COPY", f"{RACE}|{WRONG}|out of bounds"),
    "columns_of_a_patch": (WIDE, "threadIdx.x / PATCH % 4", 0, "threadIdx.x / PATCH % 2", f"{RACE}|{UNSET}|{WRONG}"),
    "rows_of_a_patch": (EIGHTS, "j += T1 / 4", 0, "j += T1", f"{UNSET}|{WRONG}"),
    "order_of_b": (WIDE, "B + j + q * csb", 0, "B + j * csb + q", f"{WRONG}|overrun"),
    "any_b_is_dense": (RING, "csb == 1 && rsb == T2", 0, "csb == 1", WRONG),
    "no_sums": (ODD, "sum[i] = ACC(0);", 1, ";", WRONG + "|uninitialised register"),
    "nothing_is_divided": (RING, "begin + slice)", 0, "k)", WRONG),
    "parts_of_other_rows": (RING, "Index(blockIdx.z) * gridDim.x + blockIdx.x", 0, "blockIdx.z", WRONG + "|ticket"),
    "rows_of_c": (RING, "r >= own_row && r < m", 0, "r >= own_row", OUTSIDE),
    "columns_of_c": (RING, "if (q < count) *at", 0, "*at", OUTSIDE),
    "rows_of_the_tile_before": (RING, "r >= own_row && ", 0, "", WRONG + "|" + RACE),
    "tile_too_early": (RING, "m - tile)", 0, "m - tile - 1)", OUTSIDE + "|" + UNSET),
    "rows_of_a_chain": (RING, "lines[i % CHAINS] += CHAINS * apart", 0, "lines[i % CHAINS] += apart", WRONG),
    "one_a_for_all": (RING, "blockIdx.z * bsa + ", 0, "", WRONG),
    "one_b_for_all": (RING, "blockIdx.z * bsb + ", 0, "", WRONG),
    "one_c_for_all": (RING, "C += blockIdx.z * bsc;", 0, "", OUTSIDE),
}
# What is read and then not used: only AddressSanitizer sees it.
ADDRESSES = {
    "rows_beyond_m": (RING, "smaller(row + threadIdx.x / T3, m - 1)", 0, "row + threadIdx.x / T3"),
    "every_row_is_there": (RING, "m >= ROWS ? COPIES", 0, "true ? COPIES"),
    "rows_that_follow": (RING, "if (i < follow) at +=", 0, "at +="),
    "one_row_more": (RING, "(m - 1 - first) / COPIED", 0, "(m - first) / COPIED"),
    "rows_that_follow_at_the_end": (RING, "if (i < follow) at +=", 1, "at +="),
    "elements_beyond_rows": (RING, "load(at, left)", 0, "load(at)"),
    "columns_of_b": (ODD, "int(j) < rows && q < n", 0, "int(j) < rows"),
    "columns_of_b_in_patches": (ODD, " j < rows && q < n", 0, " j < rows"),
}


library = library_of(lambda: texts(STAGED))
sanitized = library_of(lambda: texts(STAGED), sanitize=True)
faulty = library_of(lambda: [*with_faults(PLANTED), *texts(HEALTHY)])
faulty_addresses = library_of(lambda: with_faults(ADDRESSES), sanitize=True)


def names(config: Stream) -> str:
    return config.name


@pytest.mark.parametrize("config", STAGED, ids=names)
def test_every_path_in_every_order(library, config, orders):
    check_in_every_order(library, cases(config), orders)


@pytest.mark.parametrize("config", some(STAGED, 8), ids=names)
def test_every_path_under_address_sanitizer(sanitized, config):
    check_in_turn(sanitized, cases(config))


@pytest.mark.parametrize("b_order", ["dense", "C", "F", "turned"])
@pytest.mark.parametrize("config", STAGED, ids=names)
def test_what_is_not_finite_stays_in_its_row_and_column(library, config, b_order):
    m, k, n, pairs = config.tile + 3, (config.shape.pairs + 1) * config.step + 1, config.t2, config.shape.pairs
    check_what_is_not_finite(library, Case(config, m, k, n, steps=pairs, extra=1, b_order=b_order))


def test_drawn_problems(library):
    check_drawn_problems(library, STAGED)


@pytest.mark.parametrize("t3", [1, 2, 4, 8])
def test_eight_threads_meet_in_no_bank(t3):
    """`place`: one for each vector of a tile, in eight different banks of 16 bytes for threads side by side."""
    expression = re.search(r"place\(unsigned r, unsigned u\) { return (.*); }", source(RING))[1].replace("/", "//")
    r, u = np.mgrid[:64, :t3]
    place = eval(expression, {"r": r, "u": u, "T3": t3})
    assert sorted(place.ravel()) == list(range(64 * t3))
    for eight in (*place.reshape(-1, 8), *place.T.reshape(-1, 8)):  # as they copy, as they read
        assert sorted(eight % 8) == list(range(8))


# ---- the tests tested ---------------------------------------------------------------------------------------------


@in_every_order("name", PLANTED)
def test_faults_planted_into_the_kernel_are_caught(faulty, name, order):
    config, *_, expected = PLANTED[name]
    assert re.search(expected, what_is_found(faulty, name, config, order))


@pytest.mark.parametrize("name", some(ADDRESSES, 4))
def test_reads_outside_of_the_matrices_are_caught(faulty_addresses, name):
    found = what_is_found(faulty_addresses, name, ADDRESSES[name][0], "forward")
    assert re.search(rf"(?s)address error: kernel {name}.*heap-buffer-overflow.*READ of size.*\.cuh?:\d+", found)


@in_every_order("config", HEALTHY)
def test_the_kernels_without_the_planted_faults_pass(faulty, config, order):
    assert what_is_found(faulty, config.name, config, order) == "nothing"
