"""kernels/tsm2/tsm2r_tensor.cu on a GPU: what the tensor cores do against what the plain twins do. ``pytest -m gpu``.

The cases of the CPU tests run in tests/core/test_streams_on_gpu.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from abft_tsm2.core import compiler, split_k
from abft_tsm2.core.device import device_of
from abft_tsm2.core.kernels import Stream, candidates
from tests.support.cases import finfo
from tests.support.oracles import elements_outside
from tests.support.stream_kernel_cases import TENSOR, TYPES, Case, Operands, b_orders, cases, faults, order_of
from tests.support.stream_runs import on_gpu

pytestmark = pytest.mark.gpu

REPEATS = 10
DOUBLE = (*TENSOR[1:4:2], *TENSOR[12:14])  # order 0 and 1, several tiles of a warp; both with B along its columns
# float16 and bfloat16; both with B along its columns; the same of columns
SHORT = (*TENSOR[7:9], *TENSOR[14:16], *TENSOR[20:25])
# After which the plain twins of what the tensor cores and their copies do are to be found, in the text of a kernel.
PRODUCTS = {"float64": "INLINE void multiply_tile(double", "float32": "INLINE void multiply_tile(float"}
PAIRS, COPIES = (
    "INLINE void load_b(unsigned",
    ("constexpr bool same<X, X> = true;", "INLINE unsigned place(unsigned j,"),
)
NEWEST, ANY = ">= 900", ">= "


def plain(text: str, *starts: str, of: str = ANY) -> str:
    """A kernel's text with what stands behind the first ``#if`` after each of `starts` left to its plain twin."""
    for start in starts:
        head, found, rest = text.partition(start)
        assert found
        conditions, other, tail = rest.partition("#else")
        changed = re.sub(rf"defined\(__CUDA_ARCH__\) && __CUDA_ARCH__ {of}\d*", "0", conditions)
        assert changed != conditions
        text = head + start + changed + other + tail
    return text


def compiled(cp: Any, config: Stream, text: str) -> Any:
    return cp.RawModule(code=text, options=compiler.OPTIONS).get_function(config.name)


def several_parts(config: Stream) -> Operands:
    """Several tiles and parts of k, with rests."""
    sizes = (3 * config.tile + 5, 9 * config.step + 3, config.t2)
    return Operands.of(Case(config, *sizes, steps=4, extra=1, b_order=b_orders(config)[0], batch=2, data="normal"))


@pytest.mark.parametrize("of", [ANY, NEWEST], ids=["plain", "of compute capability 8.0"])
@pytest.mark.parametrize("config", DOUBLE, ids=lambda config: config.name)
def test_products_of_float64_agree_with_their_twins(cp: Any, config: Stream, of: str) -> None:
    agree(cp, config, plain(compiler.source(config), PRODUCTS[config.sums], of=of))


@pytest.mark.parametrize("config", SHORT, ids=lambda config: config.name)
def test_products_of_16_bit_elements_agree_with_their_twins(cp: Any, config: Stream) -> None:
    agree(cp, config, plain(compiler.source(config), PRODUCTS[config.sums]))


def agree(cp: Any, config: Stream, text: str) -> None:
    """Both are what can be computed, and differ by rounding at most: by 2 k u |A||B|, and where C is stored."""
    operands = several_parts(config)
    expected, twin = on_gpu(cp, operands), on_gpu(cp, operands, compiled(cp, config, text))
    for memory, tickets in (expected, twin):
        assert not faults(operands, memory, tickets, flushes=True)
    a, b, left, right = (
        x.astype(np.float64)
        for x in (operands.a.matrix(), operands.b.matrix(), operands.c.matrix(expected[0]), operands.c.matrix(twin[0]))
    )
    stored = float(finfo(TYPES[config.out]).eps) * np.maximum(abs(left), abs(right)) if config.out != config.sums else 0
    bound = 2 * operands.case.k * np.finfo(config.sums).eps / 2 * (abs(a) @ abs(b)) + stored
    assert (abs(left - right) <= bound).all()


@pytest.mark.parametrize("config", SHORT, ids=lambda config: config.name)
@pytest.mark.parametrize("starts", [(PAIRS,), COPIES], ids=["loads", "copies"])
def test_what_moves_16_bit_elements_agrees_with_its_twin(cp: Any, config: Stream, starts: tuple[str, ...]) -> None:
    same(cp, config, plain(compiler.source(config), *starts))


@pytest.mark.parametrize("config", DOUBLE, ids=lambda config: config.name)
def test_copies_of_float64_agree_with_their_twins(cp: Any, config: Stream) -> None:
    same(cp, config, plain(compiler.source(config), COPIES[0]))


def same(cp: Any, config: Stream, text: str) -> None:
    operands = several_parts(config)
    expected, _ = on_gpu(cp, operands)
    assert not faults(operands, expected, np.zeros(0), flushes=True)
    assert on_gpu(cp, operands, compiled(cp, config, text))[0].tobytes() == expected.tobytes()


def test_what_moves_wrongly_is_seen(cp: Any) -> None:
    """The rows of B in another order than `ldmatrix` is told to read."""
    config = SHORT[0]
    text = compiler.source(config).replace("r / 2 * 8 + 2 * i + r % 2", "r / 2 * 8 + i + r % 2 * 4")
    operands = several_parts(config)
    assert faults(operands, *on_gpu(cp, operands, compiled(cp, config, text)), flushes=True)


def test_truncation_does_not_grow_with_k(cp: Any) -> None:
    """Tensor cores cut sums off, all to one side where they are of one sign: each stage has sums of its own.

    Which a sum over all of k, for comparison, has not.
    """
    config = TENSOR[6]
    operands = Operands.of(Case(config, 2 * config.tile, 512 * config.step, config.t2))
    a, b = (x.matrix()[0].astype(np.float64) for x in (operands.a, operands.b))
    promotion = "if constexpr (SIZE == 2) add(total, sum);"
    text = compiler.source(config)
    assert text.count(promotion) == 2
    growing = compiled(cp, config, text.replace(promotion, "", 1))

    def error(function: Any = None) -> float:
        memory, _ = on_gpu(cp, operands, function)
        return float((abs(operands.c.matrix(memory)[0] - a @ b) / (a @ b)).max())

    u = 2.0**-24
    assert error() <= 100 * u
    assert error(growing) > 400 * u


# ---- as the library launches them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [x for x in TENSOR if x.dtype != "bfloat16"], ids=lambda config: config.name)
def test_every_path_as_the_library_launches_it(cp: Any, config: Stream) -> None:
    for case in cases(config):
        operands = Operands.of(case)
        buffer = cp.asarray(operands.c.memory)
        A, B, C = (*(x.matrix(cp.asarray(x.memory)) for x in (operands.a, operands.b)), operands.c.matrix(buffer))
        # A single line lies in any order, and at any multiple: the problem is posed for what the kernel was made for.
        problem = split_k.problem_of(A, B, C)
        problem = replace(problem, order=order_of(config), width=16, b_order="F" if config.turned else problem.b_order)
        split_k.launched(config, problem, device_of(A.device.id), A, B, C)(A, B, C, case.alpha, case.beta)
        assert not faults(operands, cp.asnumpy(buffer), np.zeros(0), flushes=True), str(case)


@pytest.mark.parametrize(
    ("order", "dtype", "n"),
    [
        *product("FC", ["float64"], [5, 16, 29, 32]),
        *(("C", "float16", n) for n in (5, 16, 29, 32)),
        *(("F", "float16", n) for n in (5, 16)),
    ],
)
def test_repeats_of_what_ships_are_equal_bit_for_bit(cp: Any, order: str, dtype: str, n: int) -> None:
    m, k, rng = 2001, 12_345, np.random.default_rng(n)
    out = "float32" if dtype == "float16" else dtype
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n)))
    A = cp.zeros((k + 7, m + 7) if order == "F" else (m + 7, k + 7), dtype)  # lines at multiples of 16 bytes
    A = (A.T if order == "F" else A)[:m, :k]
    A[...] = cp.asarray(a)
    B, C = cp.asarray(b), cp.empty((m, n), out)
    problem, device = split_k.problem_of(A, B, C), device_of(A.device.id)
    config = next(x for x in candidates(problem) if x.form == "tensor")
    launch = split_k.launched(config, problem, device, A, B, C)
    assert launch.grid[1] > 1  # k is divided
    results = set()
    for _ in range(REPEATS):
        C.fill(cp.nan)
        launch(A, B, C, 1.0, 0.0)
        results.add(cp.asnumpy(C).tobytes())
    assert len(results) == 1
    rows = [0, 1, 15, 16, 1000, m - 1]
    assert not elements_outside(cp.asnumpy(C)[rows], a[rows].astype(out), b.astype(out)).any()
