"""tsm2r_rows.cu and judge.cu on the CPU: sums, verdicts, copies; whether planted faults are found."""

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

from abft_tsm2.checksum.device.kernels import JudgeKernel, LineSums
from tests.support import check_cases as cases
from tests.support.check_cases import SUMMING, Case, Launch
from tests.support.cuda_on_cpu import ORDERS, Library
from tests.support.libraries import first_complaint, first_fault, in_every_order, library_of, some, texts, with_faults
from tests.support.verdict_cases import JUDGE, JUDGING, Trial, Verdicts, trials, verdict_faults, verdicts

names = {"ids": lambda x: getattr(x, "name", x)}
library = library_of(lambda: texts((*SUMMING, *JUDGING, JUDGE)))
PLAIN_LINES = JUDGING[0]


def launch_on(library: Library, order: str, renamed: str = "") -> Launch:
    def launch(name: str, grid: tuple[int, ...], threads: int, args: tuple[Any, ...]) -> None:
        library.run(renamed or name, grid, threads, args, order=order)

    return launch


# ---- sums ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", SUMMING, **names)
def test_sums_in_every_order(library: Library, config: LineSums, orders: Callable[[int], tuple[str, ...]]) -> None:
    for number, case in enumerate(cases.cases(config)):
        task = case.task()
        results = [cases.summed(task, launch_on(library, order)) for order in orders(number)]
        assert not cases.faults(task, results[0]), str(case)
        for other in results[1:]:
            for x, y in zip(results[0], other, strict=True):
                assert x is y is None or x.tobytes() == y.tobytes(), str(case)
        if number % 3 == 0:
            assert not cases.flag_faults(task, launch_on(library, ORDERS[number % 2])), str(case)


@given(
    config=st.sampled_from(SUMMING),
    p=st.integers(1, 40),
    q=st.integers(1, 900),
    batch=st.integers(1, 3),
    gap=st.integers(0, 3),
    shared=st.booleans(),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**32),
)
def test_drawn_sums(library, config, p, q, batch, gap, shared, order, seed):
    case = Case(config, p, q, batch, gap, shared)
    task = case.task(seed)
    assert not cases.faults(task, cases.summed(task, launch_on(library, order))), str(case)


@pytest.mark.parametrize("config", SUMMING, **names)
def test_what_is_not_finite_stays_in_its_row(library: Library, config: LineSums) -> None:
    task = Case(config, config.lines + 2, 77, 2, 1).task()
    X, p = task.X.x, config.lines + 2
    X[0, 0, 76], X[0, p - 1, 0], X[1, 1, 40] = np.nan, np.inf, -np.inf
    X[1, 0, 3], X[1, 0, 70] = np.inf, np.inf * np.sign(-task.w[-1, 3] * task.w[-1, 70])
    sums = cases.summed(task, launch_on(library, "random"))
    for name, (value, _) in cases.exactly(task).items():
        found, wanted = getattr(sums, name), value.astype(np.float64)
        other = ~np.isfinite(wanted)
        assert other.sum() == 4, name
        assert np.array_equal(found[other], wanted[other], equal_nan=True), name
        assert np.isfinite(found[~other]).all(), name
    assert np.isnan(sums.y[1, 0])
    if sums.words is not None:
        assert np.array_equal(sums.words, cases.words_of(X))


def test_nan_is_no_outstanding_row(library: Library) -> None:
    task = Case(SUMMING[0], 5, 30).task()
    task.X.x[0, 2, 3] = np.nan
    assert cases.summed(task, launch_on(library, "forward"), outstanding=1e9).state[0] == 0
    task.X.x[0, 2, 3] = np.inf
    assert cases.summed(task, launch_on(library, "forward"), outstanding=1e9).state[0] == 1 << 32


def test_any_two_constants_meet() -> None:
    types = {(config.dtype, config.acc) for config in SUMMING}
    for a, b in itertools.combinations(("team", "rows", "ahead"), 2):
        assert len({(getattr(x, a), getattr(x, b)) for x in SUMMING}) == (9 if a == "rows" else 12), (a, b)
    for dtype, acc in types:
        some = [config for config in SUMMING if (config.dtype, config.acc) == (dtype, acc)]
        assert {(config.given, config.words) for config in some} == set(itertools.product((False, True), repeat=2))
        assert {config.width for config in some} == set(cases.WIDTHS[dtype])


# ---- verdicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*JUDGING, JUDGE], **names)
def test_verdicts_in_every_order(
    library: Library, config: LineSums | JudgeKernel, orders: Callable[[int], tuple[str, ...]]
) -> None:
    for number, trial in enumerate(trials(config)):
        judged = trial.judged()
        results = [verdicts(judged, launch_on(library, order)) for order in orders(number)]
        assert not verdict_faults(judged, results[0]), str(trial)
        for other in results[1:]:
            assert not verdict_faults(judged, other), str(trial)
            assert other.tau.tobytes() == results[0].tau.tobytes(), str(trial)
            assert other.state.tobytes() == results[0].state.tobytes(), str(trial)


@given(
    config=st.sampled_from((*JUDGING, JUDGE)),
    p=st.integers(1, 60),
    q=st.integers(1, 600),
    batch=st.integers(1, 3),
    gap=st.integers(0, 2),
    shared=st.booleans(),
    alpha=st.sampled_from([1.0, -0.5, 3.0, 1e-3]),
    beta=st.sampled_from([0.0, 1.0, -2.0, 0.25]),
    special=st.booleans(),
    tf32=st.booleans(),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**32),
)
def test_drawn_verdicts(library, config, p, q, batch, gap, shared, alpha, beta, special, tf32, order, seed):
    trial = Trial(config, p, q, batch, gap, shared, alpha, beta, special, tf32)
    judged = trial.judged(seed)
    assert not verdict_faults(judged, verdicts(judged, launch_on(library, order))), str(trial)


def test_nearly_every_line_of_a_trial_is_decided_both_ways() -> None:
    for config in (*JUDGING, JUDGE):
        decided, ok = (
            np.concatenate([getattr(trial.judged(), name).ravel() for trial in trials(config)])
            for name in ("decided", "ok")
        )
        assert decided.mean() > 0.98, config.name
        assert 0.2 < ok.mean() < 0.8, config.name


@pytest.mark.parametrize("config", [JUDGING[0], JUDGE], **names)
def test_verdicts_add_to_a_state(library: Library, config: LineSums | JudgeKernel) -> None:
    judged = Trial(config, 50, 20, 2, near=config == JUDGE).judged()
    launch = launch_on(library, "random")
    first = verdicts(judged, launch)
    count = int(first.state[0])
    assert 0 < count < 100
    # Flags stay, and so does a residual that is closer; one that is not gives way.
    for before, kept in ((0x3F80_0001_0000_0007, True), (1, False)):
        state = first.state.copy()
        state[0], state[1] = 3 << 32, before
        again = verdicts(judged, launch, state).state
        assert again[0] == 3 << 32 | count
        assert again[1] == (before if kept else first.state[1])
    assert int(first.state[1]) >> 32 <= 0x3F80_0000  # it passed: at most 1


@pytest.mark.parametrize("config", [config for config in JUDGING if config.out], **names)
def test_the_copy_is_rounded_as_by_numpy(library: Library, config: LineSums) -> None:
    rng = np.random.default_rng(3)
    judged = Trial(config, 40, 203, special=False).judged()
    assert judged.C is not None
    bits = rng.integers(0, 2**32, judged.C.x.shape, dtype=np.uint32)
    near = rng.integers(0x3000_0000, 0x4800_0000, judged.C.x.shape, dtype=np.uint32) & ~np.uint32(0xFFF)
    signs = rng.integers(0, 2, judged.C.x.shape, dtype=np.uint32) << np.uint32(31)
    judged.C.x[...] = np.where(rng.random(bits.shape) < 0.5, bits, near | signs).view(np.float32)
    made = verdicts(judged, launch_on(library, "reverse"))
    wrong = [fault for fault in verdict_faults(judged, made) if "copy" in fault]
    assert not wrong
    assert made.D is not None
    assert np.isnan(made.D.astype(np.float32)).any()


@pytest.mark.parametrize("beta", [0.0, -1.5])
@pytest.mark.parametrize("config", [PLAIN_LINES, JUDGE], **names)
def test_a_line_fails_whose_prediction_was_lost_with_it(
    library: Library, config: LineSums | JudgeKernel, beta: float
) -> None:
    judged = Trial(config, 50, 20, 2, beta=beta, special=False).judged()
    terms, launch = judged.terms, launch_on(library, "random")
    clean = {int(line) for line in _listed(verdicts(judged, launch))}
    lost = 1, 7, 70
    for number, parts in enumerate((("t", "p2"), ("t",), ("p2",), ("t0", "added2"), ("t0",), ("added2",))):
        if not beta and number > 2:
            continue
        then = terms.guards
        others = {part: getattr(terms, part).copy() for part in parts}
        for x in others.values():
            x.ravel()[list(lost)] = 0
        # A line of zeros and its sums, which agree with a t of zero.
        C, u, squares = judged.C, judged.u.copy(), judged.squares.copy()
        for line in lost if number == 0 and not beta else ():
            u.ravel()[line] = squares.ravel()[line] = 0
            if C is not None:
                C.x.reshape(100, 20)[line] = 0
        changed = replace(judged, terms=terms._replace(**others), u=u, squares=squares)
        assert _listed(verdicts(changed, launch, guards=then)) >= set(lost), parts
        if number == 0 and not beta:  # the guards are what tells
            assert not _listed(verdicts(changed, launch)) & set(lost)
    assert _listed(verdicts(judged, launch, guards=(terms.guards[0], terms.guards[1], 3, 5))) == set(range(100))
    assert clean < set(range(100))


def _listed(made: Verdicts) -> set[int]:
    return {int(line) for line in made.lines[: int(made.state[0]) & 0xFFFFFFFF]}


# ---- under AddressSanitizer ----------------------------------------------------------------------------------------

CHECKED = (*SUMMING[::2], *JUDGING[1::2], JUDGE)
FULL = next(config for config in SUMMING if config.ahead > 1 and config.rows > 1 and config.team < 8)
READS = {
    "rows_beyond": (FULL, "smaller(first + i, p - 1)", 0, "(first + i)"),
    "elements_beyond": (FULL, "whole + lane < q && ", 0, ""),
    "vectors_beyond": (FULL, "j < whole; j += STRIDE", 0, "j < q; j += STRIDE"),
    "vectors_ahead_beyond": (FULL, "j + (AHEAD - 1) * STRIDE < whole", 0, "j < whole"),
}
sanitized = library_of(lambda: [*texts(CHECKED), *with_faults(READS)], sanitize=True)


@pytest.mark.parametrize("config", some(CHECKED, 8), **names)
def test_every_path_under_address_sanitizer(sanitized: Library, config: LineSums | JudgeKernel) -> None:
    for number, case in enumerate(cases.cases(config) if config in SUMMING else ()):
        task, launch = case.task(), launch_on(sanitized, ORDERS[number % 3])
        assert not cases.faults(task, cases.summed(task, launch)), str(case)
    for number, trial in enumerate(trials(config) if config not in SUMMING else ()):
        judged, launch = trial.judged(), launch_on(sanitized, ORDERS[number % 3])
        assert not verdict_faults(judged, verdicts(judged, launch)), str(trial)


@pytest.mark.parametrize("name", some(READS, 3))
def test_reads_beyond_the_matrix_are_caught(sanitized: Library, name: str) -> None:
    found = first_fault(
        (Case(FULL, p, q).task() for p, q in cases.shapes(FULL)),
        lambda task: cases.faults(task, cases.summed(task, launch_on(sanitized, "forward", name))),
    )
    assert re.search(r"(?s)heap-buffer-overflow.*READ of size", found)


# ---- planted faults ------------------------------------------------------------------------------------------------


TEAM = next(config for config in SUMMING if config.team > 2 and config.given and config.words and config.width > 4)
ALONE = replace(SUMMING[0], words=True, rows=4)
NARROW = next(config for config in SUMMING if config.dtype == "float16" and config.words)
COPY = next(config for config in JUDGING if config.out and config.team > 1)
PLAIN = next(config for config in JUDGING if not config.out)
STORED = next(config for config in JUDGING if config.dtype == "float16")  # whose bound is not NaN where it is infinite
RACE, WRONG, OVERRUN = "race: |uninitialised shared", "are wrong", "global memory overrun"
FLAGS, LISTED, CLOSEST, COUNTED = "word 0 of the state", "listed", "the closest", "counted"
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
PLANTED: dict[str, tuple[LineSums | JudgeKernel, str, int, str, str]] = {
    "no_barrier_of_a_team": (TEAM, "__syncthreads();", 1, "", RACE),
    "a_member_twice": (TEAM, "y_parts[(warp + member)", 0, "y_parts[(warp + member - 1)", "y are wrong"),
    "squares_of_members": (TEAM, "z_parts[(warp + member)", 0, "z_parts[(warp + 1)", "z are wrong"),
    "words_of_members": (TEAM, "word_parts[(warp + member)", 0, "word_parts[(warp + 1)", "words are wrong"),
    "every_warp_stores": (
        TEAM,
        "place < ROWS && warp % TEAM == 0 && row",
        0,
        "place < ROWS && row",
        f"{WRONG}|{FLAGS}",
    ),
    "every_lane_adds": (TEAM, "if (place < ROWS) {", 0, "if (true) {", f"{RACE}|{WRONG}|overrun"),
    "rows_beyond_are_stored": (ALONE, "warp % TEAM == 0 && row < p", 0, "warp % TEAM == 0", f"{OVERRUN}|between two"),
    "a_row_in_two_places": (ALONE, "product * out_step + line] = OUT(y)", 0, "line] = OUT(y)", WRONG),
    "rows_of_the_neighbour": (ALONE, "smaller(first + i, p - 1)", 0, "smaller(first + i + 1, p - 1)", WRONG),
    "the_first_matrix_only": (ALONE, "X + product * step", 0, "X", WRONG),
    "the_first_weights_only": (ALONE, "weights + product * w_step", 0, "weights", WRONG),
    "weights_of_y_for_squares": (TEAM, "z += x * x * w2", 0, "z += x * x * w", "z are wrong"),
    "squares_of_weights_given": (TEAM, "squares + product * w_step", 0, "weights + product * w_step", "z are wrong"),
    "not_squared": (ALONE, "z += term * term;", 0, "z += x * term;", "z are wrong"),
    "vectors_beyond_the_row": (FULL, "j < whole; j += STRIDE", 0, "j < q; j += STRIDE", f"{WRONG}|{OVERRUN}"),
    "vectors_ahead_beyond": (FULL, "j + (AHEAD - 1) * STRIDE < whole", 0, "j < whole", f"{WRONG}|{OVERRUN}"),
    "last_vectors_forgotten": (FULL, "j < whole; j += STRIDE", 0, "false; j += STRIDE", WRONG),
    "the_first_vectors_only": (FULL, "take(x[a], j + a * STRIDE);", 0, "take(x[0], j + a * STRIDE);", WRONG),
    "weights_of_the_first_vectors": (FULL, "take(x[a], j + a * STRIDE);", 0, "take(x[a], j);", WRONG),
    "the_rest_forgotten": (ALONE, "whole + lane < q && ", 0, "false && ", WRONG),
    "the_rest_beyond_the_row": (TEAM, "whole + lane < q && ", 0, "", f"{WRONG}|{OVERRUN}"),
    "the_rest_by_every_warp": (TEAM, "< q && warp % TEAM == 0", 0, "< q", WRONG),
    "the_rest_of_the_first_row": (ALONE, "at[i][whole + lane]", 0, "at[0][whole + lane]", WRONG),
    "weights_of_the_rest": (TEAM, "right = w[whole + lane]", 0, "right = w[lane]", "y are wrong"),
    "square_weights_of_the_rest": (TEAM, "w2[whole + lane]", 0, "w2[lane]", "z are wrong"),
    "words_of_the_rest": (ALONE, "words[i] += pattern(element);", 0, "", "words are wrong"),
    "words_differ": (ALONE, "words += pattern(x.x[e]);", 0, "words ^= pattern(x.x[e]);", "words are wrong"),
    "words_of_narrow_elements": (NARROW, "words += sum;", 0, "words = sum;", "words are wrong"),
    "outstanding_below": (ALONE, "double(z) > outstanding", 0, "double(z) < outstanding", FLAGS),
    "outstanding_unseen": (ALONE, "+ 1, 1u)", 0, "+ 1, 0u)", FLAGS),
    "expected_of_the_first": (ALONE, "expected[product * out_step + line]", 0, "expected[line]", FLAGS),
    "the_other_flag": (ALONE, "+ 1, 2u)", 0, "+ 1, 1u)", FLAGS),
    "half_of_the_state": (ALONE, "threadIdx.x < 32) state", 0, "threadIdx.x < 16) state", "were not wiped"),
    "sizes_of_the_first_product": (ALONE, "sizes + 2 * product", 0, "sizes", "sizes are wrong"),
    "sizes_of_32_blocks": (ALONE, "b + 32 * i < count;", 0, "i == 0 && b < count;", "sizes are wrong"),
    "sizes_of_64_blocks": (ALONE, "b += 32 * AT_ONCE", 0, "b += 999", "sizes are wrong"),
    "sizes_from_the_first_product": (ALONE, "parts + 2 * product * part_count", 0, "parts", "sizes are wrong"),
    "least_of_a_lane": (ALONE, "least = fmin(least, __shfl", 0, "least = fmax(least, __shfl", "sizes are wrong"),
    # Verdicts
    "no_barrier_of_a_verdict": (PLAIN, "__syncthreads();", 0, "", RACE),
    "infinite_bounds_pass_of_rows": (STORED, " && bound <= 0x1.fffffffffffffp1023", 0, "", LISTED),
    "infinite_bounds_pass": (JUDGE, " && bound <= 0x1.fffffffffffffp1023", 0, "", LISTED),
    "large_norms_pass": (PLAIN, " && found <= largest)", 0, ")", LISTED),
    "large_norms_widen": (PLAIN, "found <= largest ? found : largest;", 0, "found;", "bounds are wrong"),
    "nan_passes": (PLAIN, "if (residual <= bound", 0, "if (!(residual > bound)", LISTED),
    "sign_of_alpha": (PLAIN, "fabs(alpha)", 0, "alpha", "bounds are wrong"),
    "sign_of_beta": (PLAIN, "fabs(beta)", 0, "beta", "bounds are wrong"),
    "nothing_added": (PLAIN, "beta * guarded(t0[line]", 0, "0 * guarded(t0[line]", LISTED),
    "largest_without_what_is_added": (PLAIN, "1.01 * ", 0, "0 * ", f"{LISTED}|bounds are wrong"),
    "input_rounding": (JUDGE, "input_factor * ", 0, "0 * ", "bounds are wrong"),
    "stored_twice": (PLAIN, "(stored > size", 0, "(stored < size", "bounds are wrong"),
    "sizes_of_the_first": (PLAIN, "product * sizes_step", 0, "0", "bounds are wrong"),
    "underflow_forgotten": (PLAIN, "underflow * sizes[", 0, "0 * sizes[", "bounds are wrong"),
    "closest_of_a_lane": (PLAIN, "mine = other > mine ? other : mine;", 0, "", CLOSEST),
    "closest_of_a_warp": (PLAIN, "mine = other > mine ? other : mine;", 1, "", CLOSEST),
    "closest_not_kept": (PLAIN, "mine > kept", 0, "mine < kept", CLOSEST),
    "closest_of_the_last_block": (JUDGE, "atomicMax(state + CLOSEST, mine)", 0, "state[1] = mine - 1", CLOSEST),
    "closest_ratio_upside_down": (JUDGE, "ratio_of(residual, bound)", 0, "ratio_of(bound, residual)", CLOSEST),
    "closest_ratio_of_no_bound": (JUDGE, "if (bits >> 52 == 0) return 0;", 0, "", CLOSEST),
    "no_root_of_squares": (JUDGE, "found = root_of(squares)", 0, "found = squares", "bounds are wrong|listed"),
    "no_root_of_products": (PLAIN, "root_of(p2[line])", 0, "p2[line]", "bounds are wrong|listed"),
    "no_root_of_what_is_added": (PLAIN, "root_of(added2[line])", 0, "added2[line]", "bounds are wrong|listed"),
    "roots_of_other_digits": (JUDGE, "Bits(2 * half)", 0, "Bits(2 * half + 1)", "bounds are wrong"),
    "roots_of_six_digits": (JUDGE, "sqrtf(float(m))", 0, "sqrtf(float(m) * 0.9999995f)", "bounds are wrong"),
    "root_of_zero": (PLAIN, "!(x > 0 && x <=", 0, "!(x <=", "bounds are wrong|listed"),
    "root_of_infinity": (JUDGE, "!(x > 0 && x <= 0x1.fffffffffffffp1023)", 0, "!(x > 0)", "listed"),
    "lines_not_counted": (PLAIN, "atomicAdd(state + JUDGED, Bits(count))", 0, "", COUNTED),
    "lines_of_a_warp_counted": (PLAIN, "count += counts[w]", 0, "", COUNTED),
    "lines_of_a_lane_counted": (JUDGE, "count += __shfl_xor_sync(~0u, count, bit)", 0, "", COUNTED),
    "lines_beyond_counted": (JUDGE, "keep_closest<T1>(mine,", 0, "keep_closest<T1>(true,", COUNTED),
    "one_verdict_a_block": (PLAIN, "unsigned count = judged;", 0, "unsigned count = threadIdx.x == 0;", COUNTED),
    "a_verdict_for_no_call": (PLAIN, "state[CALL] = number_of(call);", 0, ";", COUNTED),
    "guards_of_the_sum_alone": (
        ALONE,
        "pattern(sum) ^ (bits << 32 | bits >> 32)",
        0,
        "pattern(sum)",
        "guards are wrong",
    ),
    "guards_of_the_first_product": (ALONE, "guards[own]", 0, "guards[line]", "guards are wrong"),
    "guards_of_no_call": (ALONE, "own, number_of(encoded))", 0, "own, 0)", "guards are wrong"),
    "lines_of_the_first": (PLAIN, "GIVE_VERDICT(product * p + row", 0, "GIVE_VERDICT(row", "listed|bounds are wrong"),
    "lines_of_the_first_judge": (JUDGE, "line = product * count + i", 0, "line = i", "listed|bounds are wrong"),
    "a_line_beyond": (JUDGE, "mine = i < count;", 0, "mine = i <= count;", f"{OVERRUN}|listed|the closest"),
    "copied_beyond_the_rows": (COPY, "if (first + i < p) store", 0, "store", f"{OVERRUN}|between two rows"),
    "rest_beyond_the_rows": (COPY, "if (first + i < p) to", 0, "to", f"{OVERRUN}|between two rows|copy is wrong"),
    "the_rest_is_not_copied": (COPY, "if (first + i < p) to", 0, "if (false) to", "copy is wrong"),
    "copied_elsewhere": (
        COPY,
        "to + i * ldd + l",
        0,
        "to + i * ld + l",
        f"{OVERRUN}|misaligned|copy is wrong|between two rows",
    ),
    "rest_elsewhere": (COPY, "to[i * ldd + whole", 0, "to[i * ld + whole", f"{OVERRUN}|copy is wrong|between two rows"),
    "packed_wherever_it_begins": (COPY, "(to) % 8 == 0 && ldd", 0, "(to) % 2 == 0 && ldd", "misaligned"),
    "packed_whatever_the_rows": (COPY, "% 8 == 0 && ldd % 4 == 0", 0, "% 8 == 0", "misaligned"),
    "packed_twice": (COPY, "memcpy(&word, narrow, 8)", 0, "memcpy(&word, narrow + 2, 4)", "copy is wrong"),
    "copied_to_the_first": (COPY, "product * cast_step", 0, "0", "copy is wrong"),
    "copy_truncated": (COPY, "0xfffu + (size >> 13 & 1u)", 0, "0u", "copy is wrong"),
    "copy_of_ties": (COPY, "0xfffu + (size >> 13 & 1u)", 0, "0x1000u", "copy is wrong"),
}
USED = tuple({plan[0]: 0 for plan in PLANTED.values()})
faulty = library_of(lambda: [*with_faults(PLANTED), *texts(USED)])


def what_is_found(library: Library, config: LineSums | JudgeKernel, order: str, renamed: str = "") -> str:
    launch = launch_on(library, order, renamed)
    judged: Callable[[Any], list[str]]
    if isinstance(config, LineSums) and not config.verdict:
        problems: Iterator[Any] = (case.task() for case in cases.cases(config))
        judged = lambda task: cases.flag_faults(task, launch)  # noqa: E731
    else:
        problems = (trial.judged() for trial in trials(config))
        judged = lambda trial: verdict_faults(trial, verdicts(trial, launch))  # noqa: E731
    return first_complaint(problems, judged)


@in_every_order("name", PLANTED)
def test_planted_faults_are_caught(faulty: Library, name: str, order: str) -> None:
    config, *_, expected = PLANTED[name]
    assert re.search(expected, what_is_found(faulty, config, order, name))


@in_every_order("config", USED)
def test_without_them_nothing_is_found(faulty: Library, config: LineSums | JudgeKernel, order: str) -> None:
    assert what_is_found(faulty, config, order) == "nothing"
