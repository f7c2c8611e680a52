"""The cases of tests/stream_kernel_cases.py, run: on the CPU (tests/cuda_on_cpu), and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.core.compiler import kernel
from abft_tsm2.core.stream import Stream
from tests.cuda_on_cpu import ORDERS, KernelFault, Library
from tests.kernel_cases import SCALARS
from tests.stream_kernel_cases import C_ORDERS, Case, Operands, b_orders, cases, faults


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


def what_is_found(library: Library, name: str, config: Stream, order: str) -> str:
    """The first thing that is wrong with a kernel over all cases of `config`."""
    for case in cases(config):
        operands = Operands.of(case)
        try:
            found = faults(operands, *on_cpu(library, operands, order, name=name))
        except KernelFault as fault:
            return str(fault)
        if found:
            return "; ".join(found)
    return "nothing"


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
