"""tsm2r_rows.cu and judge.cu on the CPU: sums, verdicts, both at once, copies; whether planted faults are found."""

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
from tests.support.check_cases import FULL, OVERRUN, RACE, SUMMING, WRONG, Case, Launch
from tests.support.cuda_on_cpu import ORDERS, Library
from tests.support.libraries import first_complaint, first_fault, in_every_order, library_of, some, texts, with_faults
from tests.support.verdict_cases import (
    JOINED,
    JUDGE,
    JUDGING,
    Judged,
    Trial,
    Verdicts,
    apart,
    trials,
    verdict_faults,
    verdicts,
)

names = {"ids": lambda x: getattr(x, "name", x)}
library = library_of(lambda: texts((*SUMMING, *JUDGING, JUDGE, *JOINED)))
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
        assert len({(getattr(x, a), getattr(x, b)) for x in JOINED}) == (9 if b == "rows" else 6), (a, b)
    for dtype, acc in types:
        some = [config for config in SUMMING if (config.dtype, config.acc) == (dtype, acc)]
        assert {(config.given, config.words) for config in some} == set(itertools.product((False, True), repeat=2))
        assert {config.width for config in some} == set(cases.WIDTHS[dtype])


# ---- verdicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [*JUDGING, JUDGE, *JOINED], **names)
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
            assert [x.tobytes() for x in other.left] == [x.tobytes() for x in results[0].left], str(trial)


@given(
    config=st.sampled_from((*JUDGING, JUDGE, *JOINED)),
    p=st.integers(1, 60),
    q=st.integers(1, 600),
    batch=st.integers(1, 3),
    gap=st.integers(0, 2),
    shared=st.booleans(),
    alpha=st.sampled_from([1.0, -0.5, 3.0, 1e-3]),
    beta=st.sampled_from([0.0, 1.0, -2.0, 0.25]),
    special=st.booleans(),
    tf32=st.booleans(),
    k=st.integers(1, 600),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**32),
)
def test_drawn_verdicts(library, config, p, q, batch, gap, shared, alpha, beta, special, tf32, k, order, seed):
    trial = Trial(config, p, q, batch, gap, shared, alpha, beta, special, tf32, left_columns=k)
    judged = trial.judged(seed)
    assert not verdict_faults(judged, verdicts(judged, launch_on(library, order))), str(trial)


def test_nearly_every_line_of_a_trial_is_decided_both_ways() -> None:
    for config in (*JUDGING, JUDGE, *JOINED):
        decided, ok = (
            np.concatenate([getattr(trial.judged(), name).ravel() for trial in trials(config)])
            for name in ("decided", "ok")
        )
        assert decided.mean() > 0.98, config.name
        assert 0.2 < ok.mean() < 0.8, config.name


separate = library_of(lambda: texts(itertools.chain(*map(apart, JOINED[::4]))))


@pytest.mark.parametrize("config", JOINED[::4], **names)
def test_a_joint_kernel_gives_what_two_passes_give(library: Library, separate: Library, config: LineSums) -> None:
    _, judging = apart(config)
    launch = launch_on(separate, "reverse")
    for trial in trials(config):
        judged, guards = trial.judged(), np.zeros((trial.batch, trial.p), np.uint64)
        assert judged.left is not None
        made = verdicts(judged, launch_on(library, "random"))
        sums = cases.summed(judged.left, launch, guards=guards)
        for found, wanted in zip(made.left, (sums.y, sums.z, sums.words, guards), strict=True):
            assert found.tobytes() == wanted.tobytes(), str(trial)
        terms = judged.terms._replace(t=sums.y.copy(), p2=sums.z.copy())
        again = verdicts(replace(judged, config=judging, terms=terms, left=None), launch)
        assert made.tau.tobytes() == again.tau.tobytes(), str(trial)
        assert made.state.tobytes() == again.state.tobytes(), str(trial)
        assert _listed(made) == _listed(again), str(trial)


@pytest.mark.parametrize("config", [JUDGING[0], JUDGE, JOINED[0]], **names)
def test_the_verdict_on_a_replay_is_counted(library: Library, config: LineSums | JudgeKernel) -> None:
    assert not replay_faults(Trial(config, 50, 20, 2, beta=2.0).judged(), launch_on(library, "random"))


def replay_faults(judged: Judged, launch: Launch) -> list[str]:
    """What is wrong with the verdict on a replay, whose numbers are in tallies, and with these."""
    encoded, call = cases.Tally(cases.ENCODED), cases.Tally(cases.CALL)
    made = verdicts(judged, launch, guards=(*judged.terms.guards[:2], encoded.number, call.number))
    return [*verdict_faults(judged, made), *encoded.faults(), *call.faults(cases.VERDICTS_WORD)]


@pytest.mark.parametrize("config", [JUDGING[0], JUDGE, JOINED[0]], **names)
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

CHECKED = (*SUMMING[::2], *JUDGING[1::2], JUDGE, *JOINED[::2])
READS = {
    "rows_beyond": (FULL, "smaller(first + i, p - 1)", 0, "(first + i)"),
    "elements_beyond": (FULL, "if (l >= q) return;", 0, ""),
    "vectors_beyond": (FULL, "j < whole; j += STRIDE", 0, "j < q; j += STRIDE"),
    "vectors_ahead_beyond": (FULL, "j + (AHEAD - 1) * STRIDE < whole", 0, "j < whole"),
    "rows_of_the_left_beyond": (JOINED[0], "first, p, of_x", 0, "first, of_x ? p : p + TEAMS * ROWS, of_x"),
    "rows_of_the_product_beyond": (JOINED[0], "first, p, of_x", 0, "first, of_x ? p + TEAMS * ROWS : p, of_x"),
    "vectors_of_the_left_beyond": (JOINED[0], "walk<true, true>(k,", 0, "walk<true, true>(k + V,"),
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
    launch = launch_on(sanitized, "forward", name)
    if READS[name][0].joint:
        judged = (trial.judged() for trial in trials(READS[name][0]))
        found = first_fault(judged, lambda one: verdict_faults(one, verdicts(one, launch)))
    else:
        tasks = (Case(FULL, p, q).task() for p, q in cases.shapes(FULL))
        found = first_fault(tasks, lambda task: cases.faults(task, cases.summed(task, launch)))
    assert re.search(r"(?s)heap-buffer-overflow.*READ of size", found)


# ---- planted faults ------------------------------------------------------------------------------------------------


COPY = next(config for config in JUDGING if config.out and config.team > 1)
PLAIN = next(config for config in JUDGING if not config.out)
JOINT = JOINED[0]  # whose blocks have two teams of two warps for rows of L
STORED = next(config for config in JUDGING if config.dtype == "float16")  # whose bound is not NaN where it is infinite
LISTED, CLOSEST, COUNTED = "listed", "the closest", "counted"
PLANTED: dict[str, tuple[LineSums | JudgeKernel, str, int, str, str]] = {
    **cases.SUM_FAULTS,
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
    "nothing_is_compared_with_nothing": (JUDGE, "bound >= FAINTEST && ", 0, "", LISTED),
    "closest_ratio_of_no_bound": (JUDGE, "if (bits >> 52 == 0) return 0;", 0, "", CLOSEST),
    "no_root_of_squares": (JUDGE, "found = root_of(squares)", 0, "found = squares", "bounds are wrong|listed"),
    "no_root_of_products": (PLAIN, "root_of(squares);", 0, "squares;", "bounds are wrong|listed"),
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
    "a_verdict_for_no_call": (PLAIN, "state[CALL] = e.call;", 0, ";", COUNTED),
    "the_call_of_the_last_line": (PLAIN, "line == 0 ? number_of(call)", 0, "line ? number_of(call)", COUNTED),
    "a_call_without_a_number": (JUDGE, "? number_of(call) : 0", 0, "? encoded : 0", COUNTED),
    "expected_of_a_tally": (PLAIN, "p2[line], line, number_of(encoded)", 0, "p2[line], line, encoded", LISTED),
    "added_of_a_tally": (PLAIN, "added2[line], line, number_of(encoded)", 0, "added2[line], line, encoded", LISTED),
    "no_replay_is_judged": (PLAIN, "count_replay(call, VERDICTS_AT);", 0, "", "replays are counted"),
    "replays_of_all_lines": (JUDGE, "count_replay(call, V", 0, "} { count_replay(call, V", "replays are counted"),
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
    "rest_elsewhere": (COPY, "to[i * ldd + l]", 0, "to[i * ld + l]", f"{OVERRUN}|copy is wrong|between two rows"),
    "packed_wherever_it_begins": (COPY, "(to) % 8 == 0 && ldd", 0, "(to) % 2 == 0 && ldd", "misaligned"),
    "packed_whatever_the_rows": (COPY, "% 8 == 0 && ldd % 4 == 0", 0, "% 8 == 0", "misaligned"),
    "packed_twice": (COPY, "memcpy(&word, narrow, 8)", 0, "memcpy(&word, narrow + 2, 4)", "copy is wrong"),
    "copied_to_the_first": (COPY, "product * cast_step", 0, "0", "copy is wrong"),
    "copy_truncated": (COPY, "0xfffu + (size >> 13 & 1u)", 0, "0u", "copy is wrong"),
    "copy_of_ties": (COPY, "0xfffu + (size >> 13 & 1u)", 0, "0x1000u", "copy is wrong"),
    # Rows of L beside those of C
    "what_is_expected_unfinished": (JOINT, "__syncthreads();", 2, "", RACE),
    "no_barrier_of_joint_teams": (JOINT, "__syncthreads();", 1, "", RACE),
    "sums_of_another_team": (JOINT, "left_y[beside], l", 0, "left_y[place], l", LISTED),
    "squares_of_another_team": (JOINT, "left_z[beside])", 0, "left_z[place])", "bounds are wrong"),
    "teams_in_one_place": (JOINT, "beside = team * ROWS + place", 0, "beside = place", f"race: |{LISTED}"),
    "teams_of_all_warps": (JOINT, "team = warp % OF_X / TEAM", 0, "team = warp / TEAM", "uninitialised shared|outside"),
    "weights_of_the_product": (JOINT, "(k, j, s + product * s_step", 0, "(k, j, w", "y are wrong"),
    "weights_of_the_left": (JOINT, "(q, j, w, w2", 0, "(q, j, s, w2", LISTED),
    "square_weights_of_the_product": (JOINT, "s2 + product * s_step, early", 0, "w, early", "z are wrong"),
    "the_first_weights_of_the_left": (JOINT, "(k, j, s + product * s_step", 0, "(k, j, s", "y are wrong"),
    "the_first_square_weights_of_the_left": (JOINT, "s2 + product * s_step, early", 0, "s2, early", "z are wrong"),
    "columns_of_the_product": (JOINT, "(k, j, s", 0, "(q, j, s", "y are wrong"),
    "columns_of_the_left": (JOINT, "walk<GIVEN, WORDS>(q,", 0, "walk<GIVEN, WORDS>(k,", LISTED),
    "rows_as_far_as_the_products": (JOINT, "of_x ? ld : l_ld", 0, "ld", f"y {WRONG}|misaligned"),
    "rows_as_far_as_the_lefts": (JOINT, "of_x ? ld : l_ld", 0, "l_ld", f"{LISTED}|misaligned"),
    "the_first_left_only": (JOINT, "L + product * l_step", 0, "L", "y are wrong"),
    "the_first_product_only": (JOINT, "X + product * step", 0, "X", LISTED),
    "squares_of_the_left_not_given": (JOINT, "walk<true, true>", 0, "walk<false, true>", "z are wrong"),
    "words_of_the_left_left_out": (JOINT, "walk<true, true>", 0, "walk<true, false>", "words are wrong"),
    "the_rest_of_the_left_forgotten": (
        JOINT,
        "if (!of_x) rows.take_rest",
        0,
        "if (false) rows.take_rest",
        "y are wrong",
    ),
    "the_rest_of_the_products_columns": (JOINT, "take_rest<true>(k,", 0, "take_rest<true>(q,", "y are wrong"),
    "the_rest_by_other_weights": (
        JOINT,
        "take_rest<true>(k, s + product * s_step",
        0,
        "take_rest<true>(k, w",
        "y are wrong",
    ),
    "square_weights_of_the_rest_not_given": (JOINT, "take_rest<true>(k", 0, "take_rest<false>(k", "z are wrong"),
    "words_of_a_lane": (
        JOINT,
        "WORDS || JOINT ? over_warp<ROWS>(rows.words) : 0",
        0,
        "rows.words[0]",
        "words are wrong",
    ),
    "words_of_the_left_warp": (JOINT, "(WORDS || JOINT) word_sum +=", 0, "(WORDS) word_sum +=", "words are wrong"),
    "left_lines_of_the_first": (JOINT, "own = product * p + row", 0, "own = row", "y are wrong"),
    "sums_not_stored": (JOINT, "t_out[own] = y_sum", 0, "y_sum", "y are wrong"),
    "squares_not_stored": (JOINT, "p2_out[own] = double(z_sum)", 0, "double(z_sum)", "z are wrong"),
    "words_not_stored": (JOINT, "words_out[own] = word_sum;", 0, "", "words are wrong"),
    "guards_not_stored": (JOINT, "guards_out[own] = guard", 0, "guard", "guards are wrong"),
    "guards_of_another_call": (
        JOINT,
        "double(z_sum), own, number)",
        0,
        "double(z_sum), own, call)",
        "guards are wrong",
    ),
    "guards_of_the_left_of_a_tally": (
        JOINT,
        "Bits number = number_of(encoded);",
        0,
        "Bits number = encoded;",
        "guards are wrong",
    ),
    "guards_of_rows": (JOINT, "double(z_sum), own, number)", 0, "double(z_sum), row, number)", "guards are wrong"),
    "both_halves_store": (JOINT, "if (mine && !of_x) {", 0, "if (mine) {", f"race: |{WRONG}"),
    "both_halves_judge": (JOINT, "judged = mine && of_x", 0, "judged = mine", COUNTED),
    "the_other_half_judges": (JOINT, "judged = mine && of_x", 0, "judged = mine && !of_x", LISTED),
    "the_products_not_expected": (JOINT, "if (mine && of_x) expect_products", 0, "if (false) expect_products", LISTED),
    "alpha_left_out": (JOINT, "expect_products(known, alpha", 0, "expect_products(known, 1", LISTED),
    "c0_of_the_first": (JOINT, "JOINT ? ADDED_TO(product * p + row", 0, "JOINT ? ADDED_TO(row", f"{LISTED}|bounds"),
    "c0_left_out": (JOINT, "if (mine && of_x) known = JOINT", 0, "if (false) known = JOINT", f"{LISTED}|bounds"),
    "products_in_place_of_c0": (JOINT, "e.sum += alpha * sum;", 0, "e.sum = alpha * sum;", LISTED),
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
        judged = lambda trial: replay_faults(trial, launch)  # noqa: E731
    return first_complaint(problems, judged)


@in_every_order("name", PLANTED)
def test_planted_faults_are_caught(faulty: Library, name: str, order: str) -> None:
    config, *_, expected = PLANTED[name]
    assert re.search(expected, what_is_found(faulty, config, order, name))


@in_every_order("config", USED)
def test_without_them_nothing_is_found(faulty: Library, config: LineSums | JudgeKernel, order: str) -> None:
    assert what_is_found(faulty, config, order) == "nothing"
