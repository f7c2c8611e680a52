"""What a product on a GPU needs to know beforehand; arrays of NumPy's with an address stand for CuPy's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.core import split_k, tsm2
from abft_tsm2.core.device import known
from abft_tsm2.core.division import grid, workspace
from abft_tsm2.core.kernels import candidates
from abft_tsm2.core.problem import Problem
from abft_tsm2.errors import NotSuitable
from tests.support.fake_card import Array
from tests.support.kernel_cases import Placed

H200 = known("H200")


def array(
    shape: tuple[int, ...], strides: tuple[int, ...] | None = None, dtype: Any = np.float32, shift: int = 0
) -> Any:
    """In elements, `shift` of them beyond a multiple of 16 bytes; row-major where no strides are given."""
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return Placed.strided(shape, dtype, strides, shift).matrix().view(Array)


def posed(A: Any, n: int = 3, **out: Any) -> Problem:
    """The problem of A times n columns."""
    B = array((A.shape[-1], n), dtype=A.dtype)
    return split_k.problem_of(A, B, array((*A.shape[:-1], n), dtype=A.dtype, **out))


@pytest.mark.parametrize(
    ("strides", "shift", "order", "width"),
    [
        ((64, 1), 0, "C", 16),
        ((1, 128), 0, "F", 16),
        ((64, 1), 2, "C", 8),
        ((64, 1), 1, "C", 4),
        ((1, 128), 3, "F", 4),
        ((66, 1), 0, "C", 8),
        ((67, 1), 0, "C", 4),
        ((1, 102), 0, "F", 8),
        ((1, 101), 0, "F", 4),
        ((68, 1), 4, "C", 16),
        ((130, 2), 0, "A", 4),
        ((2, 202), 0, "A", 4),
        ((-64, 1), 0, "A", 4),
        ((64, -1), 0, "A", 4),
        ((0, 1), 0, "A", 4),
        ((1, 0), 0, "A", 4),
        ((32, 1), 0, "A", 4),  # rows overlap
    ],
)
def test_order_and_width_of_a_matrix(strides: tuple[int, int], shift: int, order: str, width: int) -> None:
    problem = posed(array((100, 64), strides, shift=shift))
    assert (problem.order, problem.width) == (order, width)
    assert (problem.m, problem.k, problem.n, problem.batch) == (100, 64, 3, 1)


@pytest.mark.parametrize(
    ("dtype", "shift", "width"),
    [(np.float64, 1, 8), (np.float64, 2, 16), (np.float16, 1, 2), (np.float16, 2, 4), (np.float16, 4, 8)],
)
def test_width_is_of_bytes_not_of_elements(dtype: Any, shift: int, width: int) -> None:
    assert posed(array((100, 64), dtype=dtype, shift=shift)).width == width


def test_a_stack_is_as_wide_as_its_step() -> None:
    for step, width in ((6400, 16), (6402, 8), (6401, 4)):
        assert posed(array((5, 100, 64), (step, 64, 1))).width == width
    one = posed(array((1, 100, 64), (6401, 64, 1)))  # the step of one matrix is none
    assert (one.width, one.batch) == (16, 1)


def test_strides_of_single_lines_do_not_matter() -> None:
    assert posed(array((1, 64), (999, 1))).width == 4  # a column-major matrix of one row: a leading dimension of 1
    assert posed(array((100, 1), (1, 999))) == posed(array((100, 1), (1, 128)))
    assert posed(array((100, 1), (1, 999))).width == 16


@pytest.mark.parametrize(
    ("shape", "strides", "shift", "dtype", "b_order"),
    [
        ((64, 3), (1, 64), 0, np.float32, "F"),
        ((64, 3), (1, 64), 1, np.float32, "C"),
        ((64, 3), (1, 66), 0, np.float32, "C"),
        ((64, 3), (1, 66), 0, np.float64, "F"),
        ((64, 3), (1, 68), 4, np.float32, "F"),
        ((64, 3), (1, 68), 0, np.float16, "C"),
        ((64, 3), (1, -64), 0, np.float32, "F"),
        ((64, 3), (3, 1), 0, np.float32, "C"),
        ((64, 3), (2, 128), 0, np.float32, "C"),
        ((64, 1), (1, 64), 0, np.float32, "C"),  # one column is a row-major matrix too
        ((5, 64, 3), (192, 1, 64), 0, np.float32, "F"),
        ((5, 64, 3), (193, 1, 64), 0, np.float32, "C"),
        ((1, 64, 3), (193, 1, 64), 0, np.float32, "F"),
    ],
)
def test_columns_of_b_that_begin_at_multiples_of_16_bytes(
    shape: tuple[int, ...], strides: tuple[int, ...], shift: int, dtype: Any, b_order: str
) -> None:
    A, C = array((*shape[:-2], 100, 64), dtype=dtype), array((*shape[:-2], 100, shape[-1]), dtype=dtype)
    assert split_k.problem_of(A, array(shape, strides, dtype, shift), C).b_order == b_order


def test_plans_are_kept_for_the_same_problem_only() -> None:
    found: dict[Any, set[Problem]] = {}
    for a, b, c in product(range(5), repeat=3):
        for strides in ((3, 1), (1, 64), (1, 66)):
            A, B, C = array((100, 64), shift=a), array((64, 3), strides, shift=b), array((100, 3), shift=c)
            found.setdefault(tsm2._key(A, B, C, None), set()).add(split_k.problem_of(A, B, C))
    assert len(found) == 3 * 4**3  # addresses that differ by 16 bytes are alike
    assert {len(problems) for problems in found.values()} == {1}


def test_types_and_batches_are_those_of_the_operands() -> None:
    A, B = array((5, 100, 64), dtype=np.float16), array((64, 3))
    C = array((5, 100, 3), (300, 1, 100), np.float64)
    problem = split_k.problem_of(A, B, C)
    expected = Problem(100, 64, 3, "float16", "C", weights="float32", out="float64", batch=5, out_order="F")
    assert problem == expected
    assert problem.sums == "float64"
    assert posed(array((100, 64))) == Problem(100, 64, 3, "float32", "C")
    shared = split_k.problem_of(array((100, 64)), array((5, 64, 3)), array((5, 100, 3)))
    assert shared.batch == 5


def test_strides_that_are_no_elements_are_refused() -> None:
    def broken() -> Iterator[tuple[Any, Any, Any]]:
        odd = np.zeros(10_000, np.uint8)
        for at in range(3):
            shapes = ((10, 5), (5, 3), (10, 3))
            made = [array(shape) for shape in shapes]
            made[at] = np.ndarray(shapes[at], np.float32, odd, 0, (33, 4)).view(Array)
            yield tuple(made)

    for operands in broken():
        with pytest.raises(NotSuitable, match=r"strides of \(33, 4\) bytes are not multiples of 4-byte elements"):
            split_k.problem_of(*operands)


# ---- the launch ---------------------------------------------------------------------------------------------------


class Calls:
    """What the compiled kernel and the workspace are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[Any] = []
        self.scratch: list[tuple[int, int]] = []
        monkeypatch.setattr(split_k, "kernel", lambda config: lambda *arguments: self.launches.append(arguments))
        monkeypatch.setattr(split_k, "scratch", self.made)

    def made(self, nbytes: int, tickets: int) -> tuple[str, str]:
        self.scratch.append((nbytes, tickets))
        return "partial", "tickets"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("out", [np.float32, np.float64])
def test_a_launch_has_what_the_kernel_takes(calls: Calls, order: str, out: Any) -> None:
    lda = 704 if order == "C" else 304
    A = array((2, 300, 700), (2**18, lda, 1) if order == "C" else (2**18, 1, lda))
    B, C = array((700, 3), (1, 800)), array((2, 300, 3), (5000, 1, 400), out)
    problem = split_k.problem_of(A, B, C)
    config = next(c for c in candidates(problem) if c.form in ("columns", "rows"))
    shape = grid(problem, config, H200)
    launch = split_k.launched(config, problem, H200, A, B, C)
    assert calls.launches == []
    launch(A, B, C, -0.5, 2.0)
    blocks, threads, arguments = calls.launches.pop()
    assert blocks == (shape.tiles, shape.parts, 2)
    assert threads == (config.shape.t1,)
    assert shape.parts > 1
    assert calls.scratch == [workspace(config, shape)]
    numbers = [300, 700, 3, -0.5, lda, 2**18, 1, 800, 0, 2.0, 1, 400, 5000, shape.slice]
    places = [0, 1, 2, 3, 5, 6, 8, 9, 10, 11, 13, 14, 15, 16]
    assert [arguments[i] for i in places] == numbers
    assert [arguments[i] is x for i, x in ((4, A), (7, B), (12, C))] == [True] * 3
    assert arguments[17:] == ("partial", "tickets")
    types = {type(arguments[i]) for i in places}
    assert types == {np.int64, out}  # of sizes and strides; of alpha and beta
    launch(A, B, C, 1.0, 0.0)
    assert len(calls.launches) == 1


def test_a_whole_k_takes_no_workspace(calls: Calls) -> None:
    A, B, C = array((10_000, 64)), array((64, 3)), array((10_000, 3))
    problem = split_k.problem_of(A, B, C)
    config = next(c for c in candidates(problem) if c.form == "rows")
    assert grid(problem, config, H200).parts == 1
    split_k.launched(config, problem, H200, A, B, C)(A, B, C, 1.0, 0.0)
    assert calls.scratch == []
    assert [type(x) for x in calls.launches[0][2][17:]] == [np.uintp] * 2


def test_what_a_kernel_cannot_serve_is_refused_before_it_is_compiled(calls: Calls, monkeypatch: Any) -> None:
    A, B, C = array((100, 64)), array((64, 3)), array((100, 3))
    problem = split_k.problem_of(A, B, C)
    config = next(c for c in candidates(problem) if c.form == "rows")
    monkeypatch.setattr(split_k, "kernel", None)
    with pytest.raises(NotSuitable, match="rows reads A of order C, and this one is F"):
        split_k.launched(config, replace(problem, order="F"), H200, A, B, C)


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from("CF"),
    st.integers(0, 9),
    st.integers(0, 9),
    st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_a_load_of_the_width_is_aligned_wherever_a_line_begins(
    shape: tuple[int, int], order: str, extra: int, shift: int, dtype: Any
) -> None:
    line = (shape[1] if order == "C" else shape[0]) + extra
    A = array(shape, (line, 1) if order == "C" else (1, line), dtype, shift)
    problem = posed(A)
    assert problem.width >= A.itemsize
    starts = [A[i:, :] for i in range(shape[0])] if problem.order == "C" else [A[:, j:] for j in range(shape[1])]
    assert all(start.data.ptr % problem.width == 0 for start in starts)


def test_products_of_the_vendor_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_k.cublas.Gemm, "of", lambda *arguments: arguments)
    problem = Problem(10, 20, 3, "float32")
    A, B, C = array((10, 20)), array((20, 3)), array((10, 3))
    assert split_k.by_vendor(problem, A, B, C) == (problem, A, B, C)
    for other, strided in ((replace(problem, out="float64"), B), (problem, array((20, 3), (12, 2)))):
        with pytest.raises(NotSuitable, match=r"cuBLAS has no product in one call for .* and a B of strides \("):
            split_k.by_vendor(other, A, strided, C)
