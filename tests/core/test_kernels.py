"""Kernels for today's GPUs before they are launched: names, constants, candidates, the predicate, grid, workspace."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.core.compiler import source
from abft_tsm2.core.device import KNOWN, known
from abft_tsm2.core.division import grid, workspace
from abft_tsm2.core.kernels import COLUMNS, Shape, Stream, candidates, why_not
from abft_tsm2.core.problem import SIZES, Problem
from abft_tsm2.core.tuning_file import alternatives

H200 = known("H200")
ROWS = Stream("rows", *("float32",) * 4, 16, 4, Shape(128, 4, 1, 2, 3))
LINES = Stream("columns", *("float32",) * 4, 16, 4, Shape(128, 1, 4, 2, 3))
SQUARE = Problem(20480, 20480, 4, "float32", "C")
FORMS = {"F": "columns", "C": "rows"}
DTYPES = [
    *(("float32", "float32", "float32"), ("float32", "float32", "float64"), ("float32", "float64", "float64")),
    *(("float64", "float64", "float64"), ("float64", "float32", "float64")),
    *(
        (half, b, c)
        for half in ("float16", "bfloat16")
        for b, c in ((half, half), (half, "float32"), (half, "float64"))
    ),
    *((half, "float32", "float32") for half in ("float16", "bfloat16")),
]


def problems() -> st.SearchStrategy[Problem]:
    """Of every size, type, order and width."""

    def made(m: int, k: int, n: int, types: tuple[str, str, str], order: str, batch: int, power: int) -> Problem:
        a, b, c = types
        return Problem(m, k, n, a, order, b, c, batch, max(SIZES[a], 2**power))

    sizes = st.integers(1, 10**7), st.integers(1, 10**6), st.integers(1, COLUMNS[-1])
    return st.builds(
        made, *sizes, st.sampled_from(DTYPES), st.sampled_from("FC"), st.integers(1, 1000), st.integers(1, 4)
    )


def streams(problem: Problem) -> list[Stream]:
    """The candidates that this file is about: TSM2R on the cores of every GPU."""
    return [c for c in candidates(problem) if c.form in FORMS.values()]


def test_every_constant_is_in_the_name_and_in_the_text() -> None:
    changed: list[Stream] = [
        *(replace(ROWS, form="columns"), replace(ROWS, width=8), replace(ROWS, t2=6)),
        *(replace(ROWS, **{field: "float64"}) for field in ("dtype", "weights", "sums", "out")),
        *(replace(ROWS, **{field: "float16"}) for field in ("dtype", "weights", "out")),
        *(replace(ROWS, **{field: "bfloat16"}) for field in ("dtype", "weights", "out")),
        *(replace(ROWS, shape=replace(ROWS.shape, **{f: 5})) for f in ("t1", "tcf", "t3", "pairs", "blocks")),
        replace(ROWS, shape=replace(ROWS.shape, leaves_first=False)),
        ROWS,
    ]
    assert len({config.name for config in changed}) == len(changed)
    assert len({source(config).replace(config.name, "") for config in changed}) == len(changed)
    assert all(config.name.isidentifier() for config in changed)


def test_numbers_of_a_kernel() -> None:
    """By hand, from what kernels/tsm2/tsm2r_rows.cu and tsm2r_columns.cu say of themselves."""
    half = replace(ROWS, dtype="float16", width=8)
    assert (ROWS.file, LINES.file) == ("tsm2/tsm2r_rows.cu", "tsm2/tsm2r_columns.cu")
    assert (ROWS.vector, LINES.vector, half.vector) == (4, 4, 4)
    assert (ROWS.tile, LINES.tile) == (4 * 4, 32 * 4)  # warps of four rows; vectors of a warp
    assert (ROWS.step, LINES.step) == (32 * 4, 4 * 4)  # vectors of a warp; columns of four warps
    assert (ROWS.sums_per_thread, LINES.sums_per_thread) == (1, 4)  # 4 x 4 over a warp; 4 x 4 over four warps
    assert replace(ROWS, t2=12).sums_per_thread == 2  # 48 sums, 32 at a time
    # Two stages of 2 x 2 steps of 32 threads with 4 rows of B, in 5 units; 16 columns with a unit each; 4 floats a
    # thread, and what says whether the block is the last one.
    assert ROWS.shared_bytes == 2 * (4 * 32) * 5 * 16 + 4
    assert LINES.shared_bytes == 2 * (4 * 16) * 16 + 4 * 128 * 4 + 4


@given(problems())
def test_candidates_are_made_for_the_problem(problem: Problem) -> None:
    for config in streams(problem):
        assert config.form == FORMS[problem.order]
        assert (config.dtype, config.weights, config.out) == (problem.dtype, problem.weights, problem.out)
        assert config.sums == problem.sums
        assert SIZES[problem.dtype] <= config.width <= problem.width
        assert config.t2 >= problem.n
        assert config.t2 == min(t2 for t2 in COLUMNS if t2 >= problem.n)
        assert why_not(problem, config, H200) is None
        assert config.form == "rows" or config.shape.pairs  # only rows can fetch B for a single step


@pytest.mark.parametrize("device", KNOWN.values(), ids=lambda device: device.name)
@pytest.mark.parametrize("order", FORMS)
@pytest.mark.parametrize("types", DTYPES, ids="-".join)
def test_up_to_32_columns_have_a_kernel_whatever_type_order_and_width(
    types: tuple[str, str, str], order: str, device: Any
) -> None:
    for n, power in product(range(1, 33), range(1, 5)):
        width = max(SIZES[types[0]], 2**power)
        problem = Problem(10_000, 10_000, n, types[0], order, *types[1:], width=width)
        assert any(why_not(problem, config, device) is None for config in streams(problem))


@pytest.mark.parametrize(
    "problem",
    [
        *(replace(SQUARE, order="A"), replace(SQUARE, n=33)),
        *(replace(SQUARE, m=0), replace(SQUARE, k=0), replace(SQUARE, n=0)),
    ],
)
def test_what_there_is_no_kernel_for(problem: Problem) -> None:
    assert streams(problem) == []


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (SQUARE, replace(ROWS, form="diagonal"), "there is no form 'diagonal': choose from columns, rows"),
        (SQUARE, replace(ROWS, t2=5), "t2 = 5: rows is compiled for t2 in 1, 2, 3, 4, 6, 8, 12, 16, 24, 32"),
        (None, replace(ROWS, t2=32), "a block takes 135172 bytes of shared memory, and has 49152"),
        (replace(SQUARE, batch=65536), ROWS, "65536 products are more than the 65535 of one launch"),
        (replace(SQUARE, dtype="float16"), ROWS, "the kernel's types of A, B, sums and C are"),
        (replace(SQUARE, weights="float64"), ROWS, "the kernel's types of A, B, sums and C are"),
        (replace(SQUARE, out="float64"), ROWS, "the kernel's types of A, B, sums and C are"),
        (replace(SQUARE, width=8), ROWS, "loads of 16 bytes, but A lies at multiples of 8"),
        (replace(SQUARE, n=5), ROWS, "n = 5 is more than the 4 columns of the kernel"),
        (replace(SQUARE, order="F"), ROWS, "rows reads A of order C, and this one is F"),
        (SQUARE, LINES, "columns reads A of order F, and this one is C"),
    ],
)
def test_every_reason(problem: Problem | None, config: Stream, reason: str) -> None:
    assert why_not(SQUARE, ROWS, H200) is None
    assert why_not(None, LINES, H200) is None
    found = why_not(problem, config, H200)
    assert found is not None
    assert found.startswith(reason)


# ---- TSM2L --------------------------------------------------------------------------------------------------------


def small(m: int, k: int, n: int, dtype: str = "float32", order: str = "C") -> Stream:
    """The first kernel for such a product, A and C in the same order."""
    return next(candidates(Problem(m, k, n, dtype, order, out_order=order)))


@given(
    st.integers(1, 10**8), st.integers(1, 32), st.integers(1, 32), st.sampled_from(["float32", "float64", "float16"])
)
def test_columns_of_c_at_a_time_are_all_or_a_multiple_of_four(m: int, k: int, n: int, dtype: str) -> None:
    for order in "FC":
        problem = Problem(m, k, n, dtype, order, out_order=order)
        for config in alternatives(problem, H200):
            assert config.form != "small" or config.shape.t3 == n or config.shape.t3 % 4 == 0
        config = next(candidates(problem))
        assert config.shape.t3 < n + 4
        assert why_not(problem, config, H200) is None
        for wrong in {1, 2, 3, 6} - {n}:
            reason = why_not(problem, replace(config, shape=replace(config.shape, t3=wrong)), H200)
            assert reason == f"t3 = {wrong} columns at a time: all {n} of them, or a multiple of 4"


def test_few_rows_leave_a_thread_one_of_them_and_all_columns() -> None:
    for dtype, order in product(("float32", "float64"), "FC"):
        few, many = small(10**4, 16, 16, dtype, order), small(10**7, 16, 16, dtype, order)
        assert (few.shape.tcf, few.shape.t3, many.shape.t3) == (1, 16, 4)
    assert small(10**4, 8, 20).shape.t3 == 12  # twice, not 16 and 4


def test_what_fits_the_cache_leaves_it_first() -> None:
    assert small(2**17, 32, 32).shape.leaves_first  # 32 MiB of A and C
    assert not small(2**17 + 1, 32, 32).shape.leaves_first
    assert small(2**16, 32, 32, "float64").macros["LEAVES_FIRST"] == 1
    assert small(2**16 + 1, 32, 32, "float64").macros["LEAVES_FIRST"] == 0


@pytest.mark.parametrize(("dtype", "side"), [("float64", 2**14), ("float16", 2**14)])  # 2 GiB, 512 MiB
def test_tensor_cores_take_another_shape_for_large_matrices(dtype: str, side: int) -> None:
    def shapes(m: int, n: int = 16, width: int = 16) -> list[Shape]:
        problem = Problem(m, side, n, dtype, "F", width=width)
        return [config.shape for config in candidates(problem) if config.form == "tensor"]

    small, large = shapes(side - 8), shapes(side)
    assert small == large[::-1]
    assert large[0] != large[1]
    assert len(shapes(side, 8)) == 1
    assert len(shapes(side, 17)) == len(shapes(side, 16, 8)) == (dtype == "float64")


def test_columns_of_16_bits_make_up_four_tiles_of_the_tensor_cores() -> None:
    problem = Problem(20480, 20480, 16, "float16", out="float32")
    config = next(candidates(problem))
    assert (config.form, config.order, config.shape.tcf % 4) == ("tensor", 0, 0)
    assert config.tile == 16 * config.shape.tcf * config.shape.t1 // 32
    found = why_not(problem, replace(config, shape=replace(config.shape, tcf=6)), H200)
    assert found == "tcf = 6: columns of 16-bit elements make up four tiles at a time"


def test_a_card_with_less_shared_memory_takes_smaller_stages() -> None:
    assert "shared memory" in (why_not(None, ROWS, replace(H200, shared_bytes_per_block=ROWS.shared_bytes - 1)) or "")
    assert why_not(None, ROWS, replace(H200, shared_bytes_per_block=ROWS.shared_bytes)) is None


@given(problems(), st.integers(1, 200))
def test_a_grid_covers_every_row_and_every_element_of_k_once(problem: Problem, multiprocessors: int) -> None:
    for config in streams(problem):
        shape = grid(problem, config, replace(H200, multiprocessors=multiprocessors))
        assert shape.tiles * config.tile >= problem.m > (shape.tiles - 1) * config.tile
        assert shape.parts * shape.slice >= problem.k > (shape.parts - 1) * shape.slice
        assert shape.slice % config.step == 0
        assert 1 <= shape.parts <= 64
        assert shape.batch == problem.batch
        nbytes, tickets = workspace(config, shape)
        if shape.parts == 1:
            assert (nbytes, tickets) == (0, 0)
        else:
            assert tickets == shape.tiles * shape.batch
            sums = tickets * shape.parts * config.shape.t1 * config.sums_per_thread
            assert nbytes == sums * SIZES[config.sums]
            assert sums >= problem.batch * shape.parts * problem.m * problem.n  # each has a place


@pytest.mark.parametrize("order", FORMS)
def test_k_is_divided_where_there_are_few_rows_and_only_there(order: str) -> None:
    def parts(m: int, k: int, batch: int = 1) -> int:
        problem = Problem(m, k, 2, "float32", order, batch=batch)
        return grid(problem, streams(problem)[0], H200).parts

    assert parts(100, 10**6) > 30
    assert parts(2560, 10_240) > 1
    assert parts(10**7, 256) == 1
    assert parts(1000, 500, batch=1000) == 1
    assert parts(100, 1) == 1
