"""The cases of tests/support/stream_kernel_cases.py, run: on the CPU (tests/support/cuda_on_cpu), and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abft_tsm2.core import split_k
from abft_tsm2.core.compiler import kernel
from abft_tsm2.core.device import known
from abft_tsm2.core.kernels import Stream, candidates
from tests.support.cuda_on_cpu import ORDERS, Library
from tests.support.fake_card import Array
from tests.support.kernel_cases import SCALARS
from tests.support.libraries import first_fault
from tests.support.stream_kernel_cases import B_ORDERS, C_ORDERS, Case, Operands, b_orders, cases, faults, order_of


def on_cpu(
    library: Library, operands: Operands, order: str, *, name: str = "", seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The buffer of C, and the tickets, after a kernel has run on a copy of it; `name` is another than the case's."""
    case, grid = operands.case, operands.case.grid
    memory, (partial, tickets) = operands.c.memory.copy(), operands.scratch()
    args = operands.arguments(operands.a.matrix(), operands.b.matrix(), operands.c.matrix(memory), partial, tickets)
    blocks = (grid.tiles, grid.parts, grid.batch)
    library.run(name or case.config.name, blocks, case.config.shape.t1, args, order=order, seed=seed)
    return memory, tickets


def check_in_every_order(library: Library, taken: Iterable[Case], orders: Callable[[int], tuple[str, ...]]) -> None:
    """Correct, tickets 0 again, and the same bit for bit, in whatever order the threads run."""
    for number, case in enumerate(taken):
        operands = Operands.of(case)
        results = [on_cpu(library, operands, order) for order in orders(number)]
        assert not faults(operands, *results[0]), str(case)
        for order, (memory, tickets) in zip(orders(number), results, strict=True):
            assert not tickets.any()
            assert memory.tobytes() == results[0][0].tobytes(), f"{case}: another result in {order} order"


def check_in_turn(library: Library, taken: Iterable[Case]) -> None:
    """Correct, each in another order of the threads than the one before."""
    for number, case in enumerate(taken):
        operands = Operands.of(case, 1)
        assert not faults(operands, *on_cpu(library, operands, ORDERS[number % 3])), str(case)


def check_what_is_not_finite(library: Library, case: Case) -> None:
    """NaN and Inf in two rows of A and in the last column of B stay in these rows and this column of C."""
    operands = Operands.of(case)
    a, b = operands.a.matrix()[0], operands.b.matrix()[0]
    rows, column = [1, case.m - 1], case.n - 1
    a[1, case.k - 1], a[case.m - 1, 0], b[case.k // 2, column] = np.nan, np.inf, -np.inf
    c = operands.c.matrix(on_cpu(library, operands, "forward")[0])[0]
    expected = np.ones(c.shape, bool)
    expected[rows], expected[:, column] = False, False
    assert (np.isfinite(c) == expected).all()


def check_drawn_problems(library: Library, configs: Sequence[Stream]) -> None:
    """Problems that Hypothesis draws, for any of the kernels: nothing is wrong with one of them."""

    @given(
        case=st.sampled_from(configs).flatmap(
            lambda config: st.builds(
                Case,
                config=st.just(config),
                m=st.integers(1, 3 * config.tile),
                k=st.integers(1, 10 * config.step),
                n=st.integers(1, config.t2),
                steps=st.integers(0, 5),
                idle=st.integers(0, 2),
                extra=st.integers(0, 5),
                b_order=st.sampled_from(b_orders(config)),
                c_order=st.sampled_from(C_ORDERS),
                batch=st.integers(1, 3),
                shared=st.booleans(),
                alpha=st.sampled_from(SCALARS),
                beta=st.sampled_from(SCALARS),
                data=st.sampled_from(["uniform", "normal"]),
            )
        ),
        order=st.sampled_from(ORDERS),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(case: Case, order: str, seed: int) -> None:
        operands = Operands.of(case, seed)
        assert not faults(operands, *on_cpu(library, operands, order, seed=seed)), str(case)

    check()


def check_launches(
    library: Library, monkeypatch: pytest.MonkeyPatch, chosen: Callable[[str], Stream], n: int, examples: int
) -> None:
    """`plan.problem_of`, `stream.candidates`, `grid`, `workspace` and `plan.launched`, with a shape that ships.

    `chosen` is the kernel that the library takes for n columns of B, by their order.
    """
    config = chosen("C")
    left: list[np.ndarray] = []

    def kernel(config: Stream) -> Callable[..., None]:
        def launch(grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            args = [np.zeros(0, np.uint8) if isinstance(x, np.uintp) else x for x in arguments]
            library.run(config.name, grid, block, args, order="random", seed=grid[1])

        return launch

    def scratch(nbytes: int, tickets: int) -> tuple[np.ndarray, np.ndarray]:
        left.append(np.zeros(tickets, np.uint32))
        return np.full(nbytes, 0xFB, np.uint8), left[-1]

    monkeypatch.setattr(split_k, "kernel", kernel)
    monkeypatch.setattr(split_k, "scratch", scratch)

    @settings(max_examples=examples)
    @given(
        m=st.integers(1, 2 * config.tile + 5),
        k=st.integers(1, 5 * config.step),
        multiprocessors=st.integers(1, 132),
        batch=st.integers(1, 2),
        extra=st.integers(0, 3),
        orders=st.tuples(st.sampled_from(B_ORDERS), st.sampled_from(C_ORDERS)),
        beta=st.sampled_from(SCALARS),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(
        m: int, k: int, multiprocessors: int, batch: int, extra: int, orders: tuple[str, str], beta: float, seed: int
    ) -> None:
        case = Case(config, m, k, n, 0, 0, extra, *orders, batch, False, -0.5, beta, "normal")
        operands = Operands.of(case, seed)
        memory = operands.c.memory.copy()
        A, B, C = (x.view(Array) for x in (operands.a.matrix(), operands.b.matrix(), operands.c.matrix(memory)))
        # A single line lies in any order, and at any multiple: the problem is posed for what the kernel was made for.
        problem = split_k.problem_of(A, B, C)
        launched = chosen(problem.b_order)  # which may read B along its columns
        if min(m, k) > 1:
            assert (problem.order, problem.width, problem.batch) == (order_of(config), config.width, batch)
            assert launched in candidates(problem)
        problem = replace(problem, order=order_of(config), width=config.width)
        device = replace(known("H200"), multiprocessors=multiprocessors)
        split_k.launched(launched, problem, device, A, B, C)(A, B, C, -0.5, beta)
        assert not faults(operands, memory, left.pop() if left else np.zeros(0)), str(case)

    check()


def what_is_found(library: Library, name: str, config: Stream, order: str) -> str:
    """The first thing that is wrong with a kernel over all cases of `config`."""

    def judged(case: Case) -> list[str]:
        operands = Operands.of(case)
        return faults(operands, *on_cpu(library, operands, order, name=name))

    return first_fault(cases(config), judged)


def on_gpu(cp: Any, operands: Operands, function: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The same on the current device; `function` is another compiled kernel than the case's."""
    case, shape = operands.case, operands.case.grid
    places = (operands.a, operands.b, operands.c)
    # As integers, since CuPy does not know all types; for a matrix, the address of its first element.
    buffers = [cp.asarray(placed.memory.view(f"u{placed.memory.itemsize}")) for placed in places]
    addresses = [np.uint64(x.data.ptr + placed.offset * x.itemsize) for x, placed in zip(buffers, places, strict=True)]
    partial, tickets = (cp.asarray(x) for x in operands.scratch())
    args = (np.int64(x) if isinstance(x, int) else x for x in operands.arguments(*addresses, partial, tickets))
    blocks = (shape.tiles, shape.parts, shape.batch)
    (function or kernel(case.config))(blocks, (case.config.shape.t1,), tuple(args))
    return cp.asnumpy(buffers[2]).view(operands.c.memory.dtype), cp.asnumpy(tickets)
