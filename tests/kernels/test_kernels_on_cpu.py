"""Every variant of the paper's kernels, run on the CPU (tests/support/cuda_on_cpu) and judged element by element.

And the tests tested: faults planted into the kernels' own text are caught, a wrong element planted into C is found.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.core.paper.config import VARIANTS, Config, launch
from tests.support.cuda_on_cpu import ORDERS, Library
from tests.support.kernel_cases import CONFIGS, DTYPES, SCALARS, Case, Operands, cases, faults
from tests.support.kernel_cases import ORDERS as LAYOUTS
from tests.support.libraries import first_fault, in_every_order, library_of, some, texts, with_faults
from tests.support.oracles import elements_outside

V0, V1, V2, V3 = (
    Config("V0", "float64", 32),
    Config("V1", "float64", 32, 4),
    Config("V2", "float64", 32, 4, 12),
    Config("V3", "float64", 32, 4, 12),
)
WIDE, OPT1, OPT2 = (
    Config("V3", "float32", 128, 16, 32),
    Config("Opt-1", "float64", 32, 4, 12, 2),
    Config("Opt-2", "float64", 32, 4, 12, 2),
)
SYNC, ROWS = "__syncthreads();", "if (row < m) "
RACE, UNSET = "race: ", "uninitialised shared memory: "
WRONG = "elements are wrong"
OUTSIDE = "global memory overrun|around C were written|elements are wrong"
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
PLANTED = {
    "v2_fill_too_early": (V2, SYNC, 2, "", RACE),
    "v2_read_too_early": (V2, SYNC, 3, "", RACE + "|" + UNSET),
    "v3_read_too_early": (V3, SYNC, 0, "", RACE + "|" + UNSET),
    "v3_fill_too_early": (V3, SYNC, 1, "", RACE),
    "wide_read_too_early": (WIDE, SYNC, 0, "", RACE + "|" + UNSET),
    "wide_fill_too_early": (WIDE, SYNC, 1, "", RACE),
    "opt1_fill_too_early": (OPT1, SYNC, 1, "", RACE),
    "opt2_read_too_early": (OPT2, SYNC, 2, "", RACE + "|" + UNSET),
    "opt2_fill_too_early": (OPT2, SYNC, 3, "", RACE),
    "barrier_for_some": (V3, SYNC, 0, ROWS + SYNC, "divergent barriers|" + RACE + "|" + UNSET),
    "barrier_at_two_places": (V3, SYNC, 0, f"{ROWS}{SYNC}\nelse {SYNC}", "divergent barriers: .*prefetch.cuh"),
    "early_exit": (
        V3,
        "multiply_row(currB, global",
        0,
        "if (global_tid() >= m) return; multiply_row(currB, global",
        UNSET,
    ),
    "past_the_tile": (
        V3,
        "-GROUP) + i]",
        0,
        "-GROUP) + i + 1]",
        r"shared memory overrun: .*touches currB\[128\]|" + WRONG,
    ),
    "ragged_tile": (V3, "if (l + g < rows)", 0, "if (true)", r"shared memory overrun: .*touches currB\[1\d\d\]"),
    "no_zeros_v1": (V1, "clear(c);", 1, "", WRONG),
    "no_zeros_v2": (V2, "clear(c);", 2, "", WRONG),
    "no_zeros_v3": (V3, "clear(c);", 0, "", WRONG),
    "no_zeros_opt2": (OPT2, "clear(c);", 1, "", WRONG),
    "rows_of_v0": (V0, "if (row >= m) return;", 0, "", OUTSIDE),
    "rows_of_v2": (V2, ROWS, 1, "", OUTSIDE),
    "rows_of_v3": (V3, ROWS, 0, "", OUTSIDE),
    "rows_of_opt2": (OPT2, ROWS, 1, "", OUTSIDE),
    "columns": (V3, "if (p + q < n) at", 0, "at", OUTSIDE),
    "c_is_read": (V3, "beta == REAL(0) ? alpha * c[q] :", 0, "", WRONG),
    "tile_of_b_by_n": (V3, "if (j + T1 < k) load_B", 0, "if (j + T1 < n) load_B", WRONG),
    "tile_of_b_by_global_thread": (V2, "j + threadIdx.x, p", 0, "j + global_tid(), p", WRONG),
    "a_not_reloaded": (
        OPT2,
        "load_A(nextA, A, lda, smaller(next, m - 1)",
        0,
        "if (false) load_A(nextA, A, lda, 0",
        WRONG,
    ),
    "sums_scaled_again": (OPT2, "j == 0 ? beta : REAL(1)", 0, "beta", WRONG),
}
# What is read and then not used: only AddressSanitizer sees it.
ADDRESSES = {
    "rows_of_a": (V3, "smaller(row, m - 1)", 0, "row"),
    "columns_of_a": (V3, "first + i < end ? *at : REAL(0)", 0, "*at"),
    "rows_of_b": (V3, "row < k && p + q < n", 0, "p + q < n"),
    "columns_of_b": (V3, "row < k && p + q < n", 0, "row < k"),
    "columns_of_b_v1": (V1, "smaller(p + q, n - 1)", 0, "(p + q)"),
    "rows_of_c": (OPT2, "row < m && p + q < n && beta", 0, "p + q < n && beta"),
}


faulty = library_of(lambda: with_faults(PLANTED))
faulty_addresses = library_of(lambda: with_faults(ADDRESSES), sanitize=True)
library = library_of(lambda: texts(CONFIGS))
sanitized = library_of(lambda: texts(CONFIGS), sanitize=True)


def run(library: Library, operands: Operands, order: str, *, name: str = "", seed: int = 0) -> np.ndarray:
    """The buffer of C after the kernel has run on a copy of it."""
    case = operands.case
    memory = operands.c.memory.copy()
    shape = launch(case.problem, case.config)
    if case.m and case.n:  # as the launcher does, a launch of no blocks being an error of CUDA
        args = operands.arguments(operands.a.matrix(), operands.b.matrix(), operands.c.matrix(memory))
        library.run(name or case.config.name, shape.grid, shape.block, args, order=order, seed=seed)
    return memory


def names(config: Config) -> str:
    return config.name


@pytest.mark.parametrize("config", CONFIGS, ids=names)
def test_every_variant_in_every_order(library, config, orders):
    for number, case in enumerate(cases(config)):
        operands = Operands.of(case)
        results = [run(library, operands, order) for order in orders(number)]
        assert not faults(operands, results[0]), str(case)
        for order, memory in zip(orders(number), results, strict=True):
            assert memory.tobytes() == results[0].tobytes(), f"{case}: another result in {order} order"


@pytest.mark.parametrize("config", some(CONFIGS, 20), ids=names)
def test_every_variant_under_address_sanitizer(sanitized, config):
    for number, case in enumerate(cases(config)):
        operands = Operands.of(case)
        assert not faults(operands, run(sanitized, operands, ORDERS[number % 3])), str(case)


@pytest.mark.parametrize("config", [config for config in CONFIGS if config.t1 == 32], ids=names)
def test_what_is_not_finite_stays_in_its_row_and_column(library, config):
    operands = Operands.of(Case(config, 70, 45, 9, 1, "F", "C"))
    a, b = operands.a.matrix(), operands.b.matrix()
    a[3, 10], a[69, 44], b[20, 5], b[44, 8] = np.nan, np.inf, -np.inf, np.nan
    c = operands.c.matrix(run(library, operands, "forward"))
    assert not elements_outside(c, a, b).any()
    assert np.isfinite(c).sum() == 68 * 7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_drawn_problems(library, variant, dtype):
    configs = [config for config in CONFIGS if (config.variant, config.dtype) == (variant, dtype)]
    small = st.integers(0, 40)

    @given(
        case=st.builds(
            Case,
            config=st.sampled_from(configs),
            m=st.integers(0, 300),
            k=small | st.integers(41, 150),
            n=small,
            lda_extra=st.integers(0, 9),
            b_order=st.sampled_from(LAYOUTS),
            c_order=st.sampled_from(LAYOUTS),
            alpha=st.sampled_from(SCALARS),
            beta=st.sampled_from(SCALARS),
            data=st.sampled_from(["uniform", "normal"]),
        ),
        order=st.sampled_from(ORDERS),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(case, order, seed):
        operands = Operands.of(case, seed)
        assert not faults(operands, run(library, operands, order, seed=seed)), str(case)

    check()


def what_is_found(library: Library, name: str, config: Config, order: str) -> str:
    """The first thing that is wrong with a kernel over all cases."""

    def judged(case: Case) -> list[str]:
        operands = Operands.of(case)
        return faults(operands, run(library, operands, order, name=name))

    return first_fault(cases(config), judged)


@in_every_order("name", PLANTED)
def test_faults_planted_into_the_kernels_are_caught(faulty, name, order):
    config, *_, expected = PLANTED[name]
    assert re.search(expected, what_is_found(faulty, name, config, order))


@pytest.mark.parametrize("name", some(ADDRESSES, 4))
def test_reads_outside_of_the_matrices_are_caught(faulty_addresses, name):
    found = what_is_found(faulty_addresses, name, ADDRESSES[name][0], "forward")
    assert re.search(rf"(?s)address error: kernel {name}.*heap-buffer-overflow.*READ of size 8.*\.cuh?:\d+", found)


@in_every_order("config", [V0, V1, V2, V3, WIDE, OPT1, OPT2])
def test_the_kernels_without_the_planted_faults_pass(library, config, order):
    assert what_is_found(library, config.name, config, order) == "nothing"


JUDGED = Case(V3, 23, 40, 9, 3, "F", "strided", -0.5, 2.0, "normal")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scalars", [(1.0, 0.0), (-0.5, 2.0)])
@pytest.mark.parametrize("wrong", ["nan", "inf", "zero", "few units", "neighbour", "guard", "gap", "none"])
def test_the_judge_finds_one_wrong_element(dtype, scalars, wrong):
    case = replace(JUDGED, config=replace(V3, dtype=dtype), alpha=scalars[0], beta=scalars[1])
    operands = Operands.of(case)
    a, b, before = operands.a.matrix(), operands.b.matrix(), operands.c.matrix()
    memory = operands.c.memory.copy()
    c = operands.c.matrix(memory)
    wide = case.alpha * (a.astype(np.longdouble) @ b)
    c[...] = wide if case.beta == 0 else wide + case.beta * before.astype(np.longdouble)
    i, j = 11, 4
    # The bound is k + 3 units of M, of which the sum's magnitude is a part.
    units = (
        2
        * (case.k + 3)
        * np.finfo(dtype).eps
        / 2
        * (abs(case.alpha) * (abs(a) @ abs(b)) + 2 * abs(case.beta) * 9)[i, j]
    )
    if wrong == "guard":
        memory[3] = 0
    elif wrong == "gap":
        memory[operands.c.offset + 1] = 1
    elif wrong != "none":
        c[i, j] = {"nan": np.nan, "inf": np.inf, "zero": 0, "few units": c[i, j] + units, "neighbour": c[i, j + 1]}[
            wrong
        ]
    found = faults(operands, memory)
    assert bool(found) == (wrong != "none"), found
    if wrong in ("guard", "gap"):
        assert found == ["1 element(s) around C were written"]
    elif wrong != "none":
        assert f"1 of {c.size} elements are wrong, the first C[11, 4]" in found[0]


def test_the_judge_knows_of_flushed_subnormals():
    case = Case(replace(V3, dtype="float32"), 3, 4, 2)
    operands = Operands.of(case)
    operands.a.matrix()[...] = 2.0**-80
    operands.b.matrix()[...] = 2.0**-60
    memory = operands.c.memory.copy()
    operands.c.matrix(memory)[...] = 0
    assert not faults(operands, memory, flushes=True)
    assert faults(operands, memory)
