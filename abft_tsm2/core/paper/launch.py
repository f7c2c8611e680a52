"""Arrays in, kernel arguments out, for the paper's kernels: what a CuPy array must be, and the launch itself.

Everything here runs on the device that is current and on its current stream, and allocates nothing.
"""

from __future__ import annotations

import functools
from typing import Any

from abft_tsm2.arrays import Array, dtype_name
from abft_tsm2.core.compiler import kernel
from abft_tsm2.core.device import Device
from abft_tsm2.core.paper.config import Config, LaunchShape, launch, why_not
from abft_tsm2.core.problem import Problem
from abft_tsm2.core.split_k import problem_of
from abft_tsm2.errors import NotSuitable


def run(
    config: Config,
    device: Device,
    A: Array,
    B: Array,
    C: Array,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    problem: Problem | None = None,
) -> None:
    """``C = alpha A B + beta C`` by one kernel.

    Parameters
    ----------
    config : Config
    device : Device
        Of the GPU that is current.
    A : (m, k) CuPy array, column-major
    B : (k, n) CuPy array, any strides
    C : (m, n) CuPy array, any strides
        Written; shares no memory with A and B.
    problem : Problem, optional
        `problem_of` A, B and C, where the caller has it already.

    Raises
    ------
    NotSuitable
        With the reason why the configuration cannot serve these operands.
    KernelCompileError
    """
    shape = _launch(problem or problem_of(A, B, C), config, device)
    if C.size == 0:
        return
    kernel(config)((shape.grid,), (shape.block,), arguments(A, B, C, alpha, beta))


@functools.lru_cache(4096)  # the predicate takes as long as the launch
def _launch(problem: Problem, config: Config, device: Device) -> LaunchShape:
    reason = why_not(problem, config, device)
    if reason is not None:
        raise NotSuitable(reason)
    return launch(problem, config)


def arguments(A: Array, B: Array, C: Array, alpha: float, beta: float) -> tuple[Any, ...]:
    """What the kernels take: sizes, factors, and each matrix with its strides in elements (kernels/paper/tile.cuh)."""
    import numpy as np

    (m, k), n, size = A.shape, B.shape[1], A.itemsize
    real = np.dtype(dtype_name(A.dtype)).type
    strides = [stride // size for x in (A, B, C) for stride in x.strides]
    _, lda, rsb, csb, rsc, csc = (np.int64(stride) for stride in strides)
    return (np.int64(m), np.int64(k), np.int64(n), real(alpha), A, lda, B, rsb, csb, real(beta), C, rsc, csc)
