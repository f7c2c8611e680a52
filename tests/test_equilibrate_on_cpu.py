"""kernels/equilibrate.cu on the CPU: weights, their sizes, what is wiped, and whether planted faults are found."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.core.check_config import Equilibrate
from tests import check_cases as cases
from tests.check_cases import EQUILIBRATING, Columns, Launch
from tests.cuda_on_cpu import ORDERS, Library
from tests.libraries import first_fault, library_of, texts, with_faults

names = {"ids": lambda x: getattr(x, "name", x)}
library = library_of(lambda: texts(EQUILIBRATING))
SMALL, TURNED, BRAIN = EQUILIBRATING[2], EQUILIBRATING[1], EQUILIBRATING[-1]
CHECKED = EQUILIBRATING[::3]
READS = {
    "columns_beyond": (SMALL, "first + lane < n ?", 0, "true ?"),
    "turned_columns_beyond": (TURNED, "j < n ?", 0, "true ?"),
}
sanitized = library_of(lambda: [*texts(CHECKED), *with_faults(READS)], sanitize=True)


def launch_on(library: Library, order: str, renamed: str = "") -> Launch:
    def launch(name: str, grid: tuple[int, ...], threads: int, args: tuple[Any, ...]) -> None:
        library.run(renamed or name, grid, threads, args, order=order)

    return launch


@pytest.mark.parametrize("config", EQUILIBRATING, **names)
def test_weights_in_every_order(library: Library, config: Equilibrate) -> None:
    for number, case in enumerate(cases.matrices(config)):
        task = case.matrices(number)
        results = [cases.equilibrated(task, launch_on(library, order)) for order in ORDERS]
        assert not cases.weight_faults(task, results[0]), str(case)
        for other in results[1:]:
            for x, y in zip(results[0], other, strict=True):
                assert x.tobytes() == y.tobytes(), str(case)


@given(
    config=st.sampled_from(EQUILIBRATING),
    k=st.integers(1, 80),
    n=st.integers(1, 130),
    batch=st.integers(1, 3),
    scales=st.sampled_from(["equal", "tens", "zero"]),
    special=st.lists(st.sampled_from(["nan", "inf", "zero"]), max_size=5),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**32),
)
def test_drawn_matrices(library, config, k, n, batch, scales, special, order, seed):
    case = Columns(config, k, n, batch, scales, tuple(special))
    task = case.matrices(seed)
    assert not cases.weight_faults(task, cases.equilibrated(task, launch_on(library, order))), str(case)


@pytest.mark.parametrize("config", EQUILIBRATING, **names)
def test_columns_as_large_and_as_small_as_the_type_allows(library: Library, config: Equilibrate) -> None:
    for number, special in enumerate(((), ("zero", "nan"))):
        case = Columns(config, 12, 40, 2, scales="extreme", special=special)
        task = case.matrices(number)
        assert not cases.weight_faults(task, cases.equilibrated(task, launch_on(library, "random"))), str(case)


@pytest.mark.parametrize("k", [256, 257, 1000, 4099])
@pytest.mark.parametrize("config", EQUILIBRATING[2:4], **names)
def test_of_many_rows_runs_are_sampled(library: Library, config: Equilibrate, k: int) -> None:
    # An element of each column is large: its weight tells whether the element was seen.
    launch = launch_on(library, "forward")
    task = Columns(config, k, k).matrices()
    task.R.x[...] = np.float32(1)
    task.R.x[0, np.arange(k), np.arange(k)] = 2.0**20
    sample = np.flatnonzero(abs(cases.equilibrated(task, launch).v[0]) < 2.0**-10)
    runs = sample.reshape(16, 8)
    assert (np.diff(runs, axis=1) == 1).all()
    assert (runs[:, 0] // (k // 16) == np.arange(16)).all()
    assert k < 1000 or len(set(np.diff(runs[:, 0]))) > 2  # at no fixed distance
    for number, special in enumerate(((), ("zero", "nan"))):
        some = Columns(config, k, 40, 2, special=special).matrices(number, sample)
        made = cases.equilibrated(some, launch)
        assert not cases.weight_faults(some, made)
        if not special:  # what a sample of 128 misses
            size = abs(made.v * np.sqrt((some.R.x.astype(np.float64) ** 2).sum(1)) / some.base)
            assert (abs(size - 1) < 0.25).all()
    outside = Columns(config, k, 40, 2).matrices()
    outside.R.x[:, sample, 5] = 0
    assert not cases.weight_faults(outside._replace(sample=sample), cases.equilibrated(outside, launch))


@pytest.mark.parametrize("config", CHECKED, **names)
def test_every_path_under_address_sanitizer(sanitized: Library, config: Equilibrate) -> None:
    for number, case in enumerate(cases.matrices(config)):
        task = case.matrices(number)
        made = cases.equilibrated(task, launch_on(sanitized, ORDERS[number % 3]))
        assert not cases.weight_faults(task, made), str(case)


@pytest.mark.parametrize("name", READS)
def test_reads_beyond_the_matrix_are_caught(sanitized: Library, name: str) -> None:
    found = first_fault(
        (case.matrices() for case in cases.matrices(READS[name][0])),
        lambda task: cases.weight_faults(task, cases.equilibrated(task, launch_on(sanitized, "forward", name))),
    )
    assert re.search(r"(?s)heap-buffer-overflow.*READ of size", found)


RACE, WRONG, OVERRUN = "race: |uninitialised shared", "weights are wrong", "global memory overrun"
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
PLANTED: dict[str, tuple[Equilibrate, str, int, str, str]] = {
    "squares_unfinished": (SMALL, "__syncthreads();", 0, "", RACE),
    "squares_unfinished_turned": (TURNED, "__syncthreads();", 0, "", RACE),
    "a_row_twice": (SMALL, "return s;", 0, "return s > 0 ? s - 1 : s;", WRONG),
    "other_stride": (TURNED, "rs + j * cs", 0, "cs + j * rs", f"{WRONG}|{OVERRUN}"),
    "the_first_matrix_only": (SMALL, "R + product * step", 0, "R", WRONG),
    "a_part_of_the_squares": (SMALL, "w < WARPS; w++) square", 0, "w < WARPS - 1; w++) square", WRONG),
    "no_norm": (SMALL, "norm > 0 && norm", 0, "norm", WRONG),
    "unlimited_scale": (BRAIN, "scale > HIGHEST ? HIGHEST : scale", 0, "scale", WRONG),
    "truncated": (SMALL, "(1ull << 44)", 0, "0", WRONG),
    "seven_bits": (SMALL, "(1ull << 45) - 1", 0, "(1ull << 46) - 1", WRONG),
    "nine_bits": (SMALL, "(1ull << 45) - 1", 0, "(1ull << 44) - 1", "more than eight"),
    "weights_of_the_first": (SMALL, "v[product * v_step + j]", 0, "v[j]", WRONG),
    "weights_of_the_first_columns": (SMALL, "base[j]", 0, "base[lane]", WRONG),
    "a_weight_beyond": (SMALL, "if (j < n)", 0, "if (true)", f"{OVERRUN}|between the weights"),
    "smallest_scale_for_zero": (SMALL, "top = fmax(top, ", 0, "top = fmin(top, ", WRONG),
    "no_scale_for_zero": (SMALL, "top > 0 ? top : 1", 0, "top", WRONG),
    "zero_columns_of_one": (SMALL, "top > 0 ? top : 1", 0, "1", WRONG),
    "size_of_a_lane": (SMALL, "total += __shfl_xor_sync", 0, "__shfl_xor_sync", "sum "),
    "least_of_a_lane": (SMALL, "least = fmin(least, ", 0, "least = fmax(least, ", "smallest"),
    "parts_of_the_first": (SMALL, "product * gridDim.x + blockIdx.x)] ", 0, "blockIdx.x)] ", "sum "),
    "half_of_the_state": (SMALL, "threadIdx.x < 32) state", 0, "threadIdx.x < 16) state", "not wiped"),
}
faulty = library_of(lambda: [*with_faults(PLANTED), *texts((SMALL, TURNED, BRAIN))])


def what_is_found(library: Library, config: Equilibrate, order: str, renamed: str = "") -> str:
    launch = launch_on(library, order, renamed)
    try:
        return first_fault(
            (case.matrices(number) for number, case in enumerate(cases.matrices(config))),
            lambda task: cases.weight_faults(task, cases.equilibrated(task, launch)),
        )
    except AssertionError as fault:
        return str(fault)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_caught(faulty: Library, name: str) -> None:
    config, *_, expected = PLANTED[name]
    for order in ORDERS:
        assert re.search(expected, what_is_found(faulty, config, order, name)), order


@pytest.mark.parametrize("config", [SMALL, TURNED, BRAIN], **names)
def test_without_them_nothing_is_found(faulty: Library, config: Equilibrate) -> None:
    for order in ORDERS:
        assert what_is_found(faulty, config, order) == "nothing", order
