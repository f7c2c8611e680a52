"""tsm2r_columns.cu on the CPU: sums, verdicts and copies of lines across memory, and faults planted into it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.checksum.device.kernels import AcrossPlan, AcrossSums, LineSums, across_sums, sums_of
from abft_tsm2.checksum.device.tuned import MOST_GROUPS
from abft_tsm2.core.compiler import source
from abft_tsm2.core.problem import SIZES
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support import check_cases as cases
from tests.support.across_cases import (
    JUDGING,
    SUMMING,
    Case,
    exactly,
    faults,
    flag_faults,
    judged_by_digits,
    slices,
    some_cases,
    summed,
    trials,
    vector_of,
    verdicts,
)
from tests.support.check_cases import TYPES_OF_SUMS, WIDTHS
from tests.support.cubins import Cubins, mostly_tuned
from tests.support.cuda_on_cpu import ORDERS, Library
from tests.support.libraries import first_complaint, first_fault, in_every_order, library_of, some, texts, with_faults
from tests.support.verdict_cases import Trial, verdict_faults

names = {"ids": lambda x: getattr(x, "name", x)}


library = library_of(lambda: texts((*SUMMING, *JUDGING)))


# ---- sums ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", SUMMING, **names)
def test_sums_in_every_order(library: Library, config: AcrossSums, orders: Callable[[int], tuple[str, ...]]) -> None:
    for number, case in enumerate(some_cases(config)):
        task = case.task()
        results = [summed(task, library, order) for order in orders(number)]
        assert not faults(task, results[0]), str(case)
        for other in results[1:]:
            assert all(x.tobytes() == y.tobytes() for x, y in zip(results[0], other, strict=True)), str(case)
        if number % 3 == 1:
            assert not flag_faults(task, library, ORDERS[number % 2]), str(case)


@given(
    config=st.sampled_from(SUMMING),
    vectors=st.integers(1, 90),
    q=st.integers(1, 200),
    slice=st.integers(1, 250),
    batch=st.integers(1, 3),
    gap=st.integers(0, 3),
    shared=st.booleans(),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**32),
)
def test_drawn_sums(library, config, vectors, q, slice, batch, gap, shared, order, seed):
    case = Case(config, vectors * vector_of(config), q, max(slice, q // 40), batch, gap, shared)
    task = case.task(seed)
    assert not faults(task, summed(task, library, order)), str(case)


@pytest.mark.parametrize("config", SUMMING, **names)
def test_what_is_not_finite_stays_in_its_line(library: Library, config: AcrossSums) -> None:
    v, slice = vector_of(config), 40
    p = config.lines + v
    task = Case(config, p, 77, slice, 2, 1).task()
    X = task.lines
    X[0, 0, 76], X[0, p - 1, 0], X[1, v - 1, 40] = np.nan, np.inf, -np.inf
    X[1, p // 2, 3], X[1, p // 2, 70] = np.inf, np.inf * np.sign(-task.w[-1, 3] * task.w[-1, 70])
    sums = summed(task, library, "random")
    for name, (value, _) in exactly(task).items():
        found, wanted = getattr(sums, name), value.astype(np.float64)
        other = ~np.isfinite(wanted)
        assert other.sum() == 4, name
        assert np.array_equal(found[other], wanted[other], equal_nan=True), name
        assert np.isfinite(found[~other]).all(), name
    if config.words:
        assert np.array_equal(sums.words, cases.words_of(X))


def test_words_of_a_warp_do_not_overflow(library: Library) -> None:
    config = next(x for x in SUMMING if x.words and x.dtype == "float16" and x.width < 8)
    q = (1 << 16) * config.warps
    task = Case(config, vector_of(config), q, q).task()
    task.X.x.view(np.uint16)[...] = 0xFFFF
    assert (summed(task, library).words == 0xFFFF * q).all()


# ---- verdicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", JUDGING, **names)
def test_verdicts_in_every_order(
    library: Library, config: AcrossSums, orders: Callable[[int], tuple[str, ...]]
) -> None:
    for number, trial in enumerate(trials(config)):
        judged, slice = judged_by_digits(trial), slices(config, trial.q)[number % 3]
        results = [verdicts(config, judged, slice, library, order, gap=number) for order in orders(number)]
        for made in results:
            assert not verdict_faults(judged, made), str(trial)
            assert made.tau.tobytes() == results[0].tau.tobytes(), str(trial)
            assert made.state.tobytes() == results[0].state.tobytes(), str(trial)


@given(
    config=st.sampled_from(JUDGING),
    vectors=st.integers(1, 70),
    q=st.integers(1, 150),
    slice=st.integers(1, 200),
    batch=st.integers(1, 3),
    gap=st.integers(0, 2),
    shared=st.booleans(),
    alpha=st.sampled_from([1.0, -0.5, 3.0, 1e-3]),
    beta=st.sampled_from([0.0, 1.0, -2.0, 0.25]),
    special=st.booleans(),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**32),
)
def test_drawn_verdicts(library, config, vectors, q, slice, batch, gap, shared, alpha, beta, special, order, seed):
    like = LineSums(config.dtype, config.acc, verdict=True, out=config.out)
    trial = Trial(like, vectors * vector_of(config), q, batch, 0, shared, alpha, beta, special)
    judged = judged_by_digits(trial, seed)
    assert not verdict_faults(judged, verdicts(config, judged, slice, library, order, gap=gap)), str(trial)


# ---- under AddressSanitizer, and with faults -----------------------------------------------------------------------

CHECKED = (*SUMMING[1::4], SUMMING[10], SUMMING[12], *JUDGING[::2])
READS = {
    "lines_beyond": (SUMMING[5], "first + lane * V < p", 0, "true"),
    "rows_beyond": (SUMMING[5], "smaller(q, (blockIdx.y + 1) * slice)", 0, "((blockIdx.y + 1) * slice)"),
    "weights_beyond": (SUMMING[5], "a * WARPS < left ? w[", 0, "true ? w["),
}
sanitized = library_of(lambda: [*texts(CHECKED), *with_faults(READS)], sanitize=True)


@pytest.mark.parametrize("config", some(CHECKED, 5), **names)
def test_every_path_under_address_sanitizer(sanitized: Library, config: AcrossSums) -> None:
    for number, case in enumerate(some_cases(config) if config in SUMMING else ()):
        task = case.task()
        assert not faults(task, summed(task, sanitized, ORDERS[number % 3])), str(case)
    for number, trial in enumerate(trials(config) if config in JUDGING else ()):
        judged, slice = judged_by_digits(trial), slices(config, trial.q)[number % 3]
        assert not verdict_faults(judged, verdicts(config, judged, slice, sanitized, ORDERS[number % 3], gap=number))


@pytest.mark.parametrize("name", some(READS, 3))
def test_reads_beyond_the_matrix_are_caught(sanitized: Library, name: str) -> None:
    found = first_fault(
        (case.task() for case in some_cases(SUMMING[5])),
        lambda task: faults(task, summed(task, sanitized, renamed=name)),
    )
    assert re.search(r"(?s)heap-buffer-overflow.*READ of size", found)


FULL = next(x for x in SUMMING if x.given and x.words and x.t1 > x.lines)
PLAIN = next(x for x in SUMMING if x.words and not x.given and vector_of(x) > 1)
COPY = next(x for x in JUDGING if x.out)
RACE, WRONG = "race: |uninitialised shared", "are wrong"
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
PLANTED: dict[str, tuple[AcrossSums, str, int, str, str]] = {
    "no_barrier_of_the_warps": (FULL, "__syncthreads();", 1, "", RACE),
    "no_barrier_of_the_ticket": (FULL, "__syncthreads();", 3, "", RACE),
    "rows_of_the_next_group": (FULL, "smaller(q, (blockIdx.y + 1) * slice)", 0, "q", WRONG),
    "rows_beyond_the_end": (FULL, "smaller(q, (blockIdx.y + 1) * slice)", 0, "((blockIdx.y + 1) * slice)", WRONG),
    "rows_not_cleared": (FULL, "memset(&x[a], 0, WIDTH);", 0, "", WRONG),
    "weights_beyond_the_end": (FULL, "a * WARPS < left ? w[", 0, "true ? w[", WRONG),
    "squares_by_the_other_weights": (FULL, "element * right2[a]", 0, "element * right[a]", "z are wrong"),
    "not_squared": (PLAIN, "term * term;", 0, "element * term;", "z are wrong"),
    "words_differ": (PLAIN, "words[e] += BitSum", 0, "words[e] ^= BitSum", "words are wrong"),
    "the_first_matrix_only": (PLAIN, "X + product * step", 0, "X", WRONG),
    "the_first_weights_only": (PLAIN, "weights + product * w_step", 0, "weights", WRONG),
    "lines_out_of_order": (PLAIN, "own % V * APART + own / V", 0, "own / 32 * APART + own % 32", WRONG),
    "threads_without_a_line": (FULL, "own < LINES && line < p", 0, "line < p", "y_parts"),
    "lines_beyond_are_stored": (PLAIN, "own < LINES && line < p", 0, "own < LINES", "overrun|between two"),
    "groups_in_one_place": (FULL, "sums + blockIdx.y * (", 0, "sums + 0 * (", WRONG),
    "one_group_too_many": (FULL, "group + g < gridDim.y", 0, "group + g <= gridDim.y", WRONG),
    "eight_groups_only": (FULL, "group += AT_ONCE,", 0, "group += 1 << 20,", WRONG),
    "the_first_block_adds": (FULL, "== gridDim.y - 1;", 0, "== 0;", WRONG),
    "tickets_stay": (
        FULL,
        "atomicInc(tickets + stripe, gridDim.y - 1)",
        0,
        "atomicAdd(tickets + stripe, 1u)",
        "tickets",
    ),
    "stripes_share_a_ticket": (FULL, "product * gridDim.x + blockIdx.x;", 0, "product;", WRONG),
    "the_state_is_wiped": (PLAIN, "if (!GIVEN && parts", 0, "state[0] = 0; if (!GIVEN && parts", "word 0 of the state"),
    "flags_are_replaced": (
        PLAIN,
        "atomicOr(reinterpret_cast<unsigned*>(state) + 1, 1u)",
        0,
        "reinterpret_cast<unsigned*>(state)[1] = 1u",
        "word 0 of the state",
    ),
    "guards_of_no_call": (PLAIN, "own, number);", 0, "own, 0);", "guards are wrong"),
    "guards_of_a_tally": (PLAIN, "guards ? number_of(encoded) : 0", 0, "guards ? encoded : 0", "guards are wrong"),
    "the_other_flag": (PLAIN, "+ 1, 2u)", 0, "+ 1, 1u)", "word 0 of the state"),
    "outstanding_unseen": (PLAIN, "+ 1, 1u)", 0, "+ 1, 0u)", "word 0 of the state"),
    "parts_of_the_first": (PLAIN, "parts + 2 * product * part_count", 0, "parts", "sizes are wrong"),
    "copied_to_the_first": (COPY, "product * cast_step", 0, "0", "copy is wrong"),
    "copied_beyond_the_rows": (
        COPY,
        "if (there && a * WARPS < left) store",
        0,
        "if (there) store",
        "overrun|between two",
    ),
    "copied_beyond_the_lines": (
        COPY,
        "if (there && a * WARPS < left) store",
        0,
        "if (a * WARPS < left) store",
        "overrun|two",
    ),
    "copied_by_whole_words": (COPY, "bool whole =", 0, "bool whole = true ||", "misaligned|alignment|illegal|SIG"),
    "lines_of_the_first": (COPY, "GIVE_VERDICT(product * p + line", 0, "GIVE_VERDICT(line", "listed|bounds are wrong"),
    "expected_of_the_first": (COPY, "EXPECTED_OF(product * p + line", 0, "EXPECTED_OF(line", "listed|bounds are wrong"),
}
USED = tuple({plan[0]: 0 for plan in PLANTED.values()})
faulty = library_of(lambda: [*with_faults(PLANTED), *texts(USED)])


def what_is_found(library: Library, config: AcrossSums, order: str, renamed: str = "") -> str:
    if config.verdict:
        some = ((judged_by_digits(trial), slices(config, trial.q)[n % 3], n) for n, trial in enumerate(trials(config)))
        return first_complaint(
            some,
            lambda x: verdict_faults(x[0], verdicts(config, x[0], x[1], library, order, renamed, x[2])),
        )
    tasks = (case.task() for case in some_cases(config))
    return first_complaint(tasks, lambda task: flag_faults(task, library, order, renamed))


@in_every_order("name", PLANTED)
def test_planted_faults_are_caught(faulty: Library, name: str, order: str) -> None:
    config, *_, expected = PLANTED[name]
    assert re.search(expected, what_is_found(faulty, config, order, name))


@in_every_order("config", USED)
def test_without_them_nothing_is_found(faulty: Library, config: AcrossSums, order: str) -> None:
    assert what_is_found(faulty, config, order) == "nothing"


# ---- configurations ------------------------------------------------------------------------------------------------


def chosen() -> Iterator[tuple[AcrossSums, str]]:
    """The kernels that are chosen, with all that needs registers, and architectures."""
    kinds: tuple[dict[str, Any], ...] = (
        {"words": True, "given": True},
        {"words": True},
        {"verdict": True, "out": ""},
        {"verdict": True, "out": "float16"},
    )
    turn = 0
    for dtype, acc in TYPES_OF_SUMS:
        for width, kind in itertools.product(WIDTHS[dtype], kinds if dtype == "float32" else kinds[:3]):
            config = across_sums(dtype, 10**5, 10**5, 132, acc=acc, width=width, **kind)
            for architecture in ARCHITECTURES if width == 16 and acc == sums_of(dtype) else (ARCHITECTURES[turn % 4],):
                yield config, architecture
            turn += 1


def heaviest() -> AcrossSums:
    return across_sums("float64", 10**5, 10**5, 132, acc="float64", width=16, words=True, given=True)


@pytest.mark.parametrize(("config", "architecture"), mostly_tuned(chosen(), [heaviest()]), **names)
def test_no_kernel_spills(compiled: Cubins, config: AcrossSums, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log


def test_spills_are_seen(compiled: Cubins) -> None:
    config = replace(across_sums("float16", 4096, 10**5, 132, acc="float32", words=True), ahead=16)
    assert spilled(compiled(source(config), "sm_90")[1]) > 0


@given(
    dtype=st.sampled_from(sorted(SIZES)),
    p=st.integers(1, 10**6) | st.integers(1, 70),
    q=st.integers(1, 10**6) | st.integers(1, 70) | st.integers(1, 10**9),
    products=st.integers(1, 300),
    width=st.sampled_from([16, 8, 4, 2]),
    words=st.booleans(),
    multiprocessors=st.sampled_from([1, 68, 132]),
)
def test_plans(dtype, p, q, products, width, words, multiprocessors):
    width = max(width, SIZES[dtype])
    config = across_sums(dtype, p, q, multiprocessors, acc="float32", words=words, width=width, products=products)
    assert config.width <= width
    assert p * SIZES[dtype] % config.width == 0
    assert config.t1 >= config.lines
    plan = AcrossPlan.of(config, p, q, multiprocessors, products)
    stripes, groups, z = plan.grid
    assert (z, plan.tickets) == (products, stripes * products)
    assert (stripes - 1) * config.lines < p <= stripes * config.lines
    assert (groups - 1) * plan.slice < q <= groups * plan.slice
    assert plan.slice >= 16 * config.warps
    assert plan.slice <= (1 << 16) * config.warps
    assert groups <= MOST_GROUPS or plan.slice > (1 << 15) * config.warps
    assert plan.nbytes == (groups > 1) * stripes * groups * products * (2 + words) * config.lines * 8


def test_plans_fill_the_card() -> None:
    for size, dtype in itertools.product((2048, 4096, 10_000, 20_000), SIZES):
        config = across_sums(dtype, size, size, 132, acc="float32")
        stripes, groups, _ = AcrossPlan.of(config, size, size, 132).grid
        assert stripes * groups >= 0.7 * 132 * config.blocks, (size, dtype)


def test_loads_take_lines_that_are_there() -> None:
    assert across_sums("float16", 65_536, 256, 132, acc="float32").width == 16
    assert across_sums("float16", 65_532, 256, 132, acc="float32").width == 8
    assert across_sums("float32", 65_531, 256, 132, acc="float64").width == 4
    config = across_sums("float32", 65_536, 256, 132, acc="float64")
    with pytest.raises(ValueError, match="65535 lines of float32 are no multiple of 16 bytes"):
        AcrossPlan.of(config, 65_535, 256, 132)
