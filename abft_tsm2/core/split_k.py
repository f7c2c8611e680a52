"""What a product on a GPU needs to know beforehand, found out once for shapes, strides and types: which kernel, how it
is divided among blocks, how much memory it takes between them.

A call then costs the host a look into a table, the output, and the launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, dtype_name
from abft_tsm2.core import cublas, division, kernels
from abft_tsm2.core.compiler import kernel
from abft_tsm2.core.device import Device
from abft_tsm2.core.kernels import Stream
from abft_tsm2.core.memory import scratch
from abft_tsm2.core.problem import Problem
from abft_tsm2.errors import NotSuitable

ProductLaunch = Callable[[Array, Array, Array, float, float], None]
"""Queues ``C = alpha A B + beta C`` on the current stream, for arrays like those that the plan was made for."""


def problem_of(A: Array, B: Array, C: Array) -> Problem:
    """The problem that (m, k), (k, n) and (m, n) CuPy arrays pose, or stacks of such matrices.

    Raises
    ------
    NotSuitable
        If the address or the strides of one of them are not multiples of an element.
    """
    for x in (A, B, C):
        if x.data.ptr % x.itemsize or any(stride % x.itemsize for stride in x.strides):
            raise NotSuitable(
                f"the address {x.data.ptr:#x} or strides of {x.strides} bytes are not multiples of {x.itemsize}-byte "
                "elements"
            )
    (m, k), n = A.shape[-2:], B.shape[-1]
    order = cublas.layout(A)
    lines = A.strides[-1] if order == "F" else A.strides[-2]
    count = k if order == "F" else m
    width = math.gcd(16, A.data.ptr, lines if count > 1 else 0, cublas.step(A)) if order != "A" else A.itemsize
    return Problem(
        m,
        k,
        n,
        dtype_name(A.dtype),
        order,
        weights=dtype_name(B.dtype),
        out=dtype_name(C.dtype),
        batch=C.shape[0] if C.ndim == 3 else 1,
        width=width,
        out_order=cublas.layout(C),
        b_order="F" if _is_turned(B) else "C",
        small=(_small(A), _small(C)),
    )


def _is_turned(B: Array) -> bool:
    """Whether the columns of B are contiguous, more than one, and begin at multiples of 16 bytes."""
    down, along = B.strides[-2:]
    return B.shape[-1] > 1 and down == B.itemsize and not any(x % 16 for x in (B.data.ptr, along, cublas.step(B)))


def _small(x: Array) -> tuple[int, int]:
    """How TSM2L takes a matrix: along its columns (0), its rows without (1) or with gaps (2), in so many bytes."""
    (rows, columns), (down, along), size = x.shape[-2:], x.strides[-2:], x.itemsize
    step = cublas.step(x)
    if (along == size or columns == 1) and (down == columns * size or rows == 1):
        return 1, math.gcd(16, x.data.ptr, step)
    if down == size:
        return 0, math.gcd(16, x.data.ptr, step, along)
    if along == size:
        return 2, math.gcd(16, x.data.ptr, step, down, columns * size)
    return (0 if abs(down) <= abs(along) else 2), size


@dataclass(frozen=True)
class StreamLaunch:
    """A plan: one launch of a kernel.

    Attributes
    ----------
    function : compiled kernel
    grid, block : tuple of int
    real : type of alpha and beta
    sizes, a, b, c : tuple
        m, k and n; strides in elements of A, B and C, of the matrices of a stack too.
    part : int
        What a block has of k.
    workspace : tuple of int
        Bytes of partial sums, and tickets.
    """

    function: Any
    grid: tuple[int, int, int]
    block: tuple[int]
    real: Any
    sizes: tuple[Any, ...]
    a: tuple[Any, ...]
    b: tuple[Any, ...]
    c: tuple[Any, ...]
    part: Any
    workspace: tuple[int, int]

    def __call__(self, A: Array, B: Array, C: Array, alpha: float, beta: float) -> None:
        partial, tickets = scratch(*self.workspace) if self.workspace[1] else _NOTHING
        real = self.real
        arguments = (
            *(*self.sizes, real(alpha), A, *self.a, B, *self.b, real(beta), C, *self.c, self.part, partial, tickets),
        )
        self.function(self.grid, self.block, arguments)


_NOTHING = np.uintp(0), np.uintp(0)


def launched(config: Stream, problem: Problem, device: Device, A: Array, B: Array, C: Array) -> ProductLaunch:
    """The plan of a kernel, which is compiled if need be.

    Raises
    ------
    NotSuitable
        With the reason why the kernel cannot serve the problem.
    KernelCompileError
    """
    reason = kernels.why_not(problem, config, device)
    if reason is not None:
        raise NotSuitable(reason)
    grid = division.grid(problem, config, device)
    (down, along, step_a), (rsb, csb, step_b), (rsc, csc, step_c) = (_strides(x) for x in (A, B, C))
    a = (down, along) if config.form == "small" else (along if problem.order == "F" else down,)
    return StreamLaunch(
        kernel(config),
        (grid.tiles, grid.parts, grid.batch),
        (config.shape.t1,),
        np.dtype(config.sums).type,
        tuple(np.int64(x) for x in (problem.m, problem.k, problem.n)),
        (*a, step_a),
        (rsb, csb, step_b),
        (rsc, csc, step_c),
        np.int64(grid.slice),
        division.workspace(config, grid),
    )


def _strides(x: Array) -> tuple[Any, Any, Any]:
    """Of rows, of columns, and from one matrix of a stack to the next, in elements."""
    down, along, step = (np.int64(stride // x.itemsize) for stride in (*x.strides[-2:], cublas.step(x)))
    return down, along, step


def by_vendor(problem: Problem, A: Array, B: Array, C: Array) -> ProductLaunch:
    """The plan of a call of cuBLAS, for arrays of such strides.

    Raises
    ------
    NotSuitable
        If it has no such product.
    """
    if not cublas.serves(problem) or cublas.layout(B) == "A":
        raise NotSuitable(f"cuBLAS has no product in one call for {problem} and a B of strides {B.strides}")
    return cublas.Gemm.of(problem, A, B, C)
