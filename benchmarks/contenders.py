"""Who is timed: our kernels, and every way to have cuBLAS compute the same product.

All of them find the same operands resident and write into an output that exists beforehand, with alpha = 1 and
beta = 0. Each has its own output, so that what was timed can be judged afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from abft_tsm2.core.choose import choose
from abft_tsm2.core.compiler import kernel as compiled
from abft_tsm2.core.device import Device
from abft_tsm2.core.kernels import Stream
from abft_tsm2.core.paper.config import Config
from abft_tsm2.core.paper.launch import run
from abft_tsm2.core.split_k import problem_of
from abft_tsm2.core.tsm2 import tall_skinny_matmul
from benchmarks.gpu_products import Operands
from benchmarks.gpu_timing import Call, graph, torch_graph

Array = Any
CUPY, GEMV, TORCH = "CuPy A @ B", "cuBLAS, n x gemv", "cuBLAS through PyTorch"
LAYOUTS = {"cuBLAS": "FFF", "cuBLAS, A in rows": "CFF", "cuBLAS, C in rows": "FFC"}
"""Orders of A, B and C: in columns ("F"), as our kernels have them, or in rows ("C")."""


@dataclass(frozen=True)
class Contender:
    """One way to compute the product.

    Attributes
    ----------
    name : str
    call : Call
    outputs : list of (m, n) array
        C for each copy of A.
    layout : str
        Which of A, B and C are column-major ("F") and row-major ("C"), in this order.
    config : Config, optional
        Of one of the paper's kernels.
    chosen : str
        What `tall_skinny_matmul` takes; empty for any other contender.
    """

    name: str
    call: Call
    outputs: list[Array]
    layout: str
    config: Config | None = None
    chosen: str = ""
    keep: list[Any] = field(default_factory=list, repr=False)  # what the call points to and Python must not free

    def poison(self) -> None:
        """Fill the outputs with NaN, so that an element that is not written shows."""
        for C in self.outputs:
            C.fill(float("nan"))


def kernel(
    name: str, config: Config, device: Device, operands: Operands, n: int, outputs: list[Array] | None = None
) -> Contender:
    """One of the paper's kernels, column-major throughout; `outputs` may be shared where nobody judges them."""
    B, C = operands.B(n, "F"), _outputs(operands, n, "F") if outputs is None else outputs

    def call(i: int) -> None:
        run(config, device, operands.columns[i], B, C[i])

    return Contender(name, Call(call, operands.copies, capture=graph), C, "FFF", config)


def function(device: Device, operands: Operands, n: int) -> Contender:
    """`tall_skinny_matmul`, column-major throughout."""
    B, C = operands.B(n, "F"), _outputs(operands, n, "F")
    choice = choose(problem_of(operands.columns[0], B, C[0]), device)
    chosen = choice.configs[0].name if choice.configs else "cuBLAS"
    call = Call(lambda i: tall_skinny_matmul(operands.columns[i], B, out=C[i]), operands.copies, capture=graph)
    return Contender("tall_skinny_matmul", call, C, "FFF", chosen=chosen)


def vendor(*, gemv: bool, torch: bool) -> dict[str, Callable[[Operands, int], Contender]]:
    """cuBLAS over layouts of A and C, as n products with a vector, through CuPy's ``A @ B`` and through PyTorch."""
    makers: dict[str, Callable[[Operands, int], Contender]] = {name: partial(_gemm, name) for name in LAYOUTS}
    if gemv:
        makers[GEMV] = _gemv
    makers[CUPY] = _matmul
    if torch:
        makers[TORCH] = _torch
    return makers


def _gemm(name: str, operands: Operands, n: int) -> Contender:
    """gemm called directly: CuPy's own wrappers choose the layout themselves."""
    import cupy
    from cupy_backends.cuda.libs import cublas

    layout = LAYOUTS[name]
    a_order, b_order, c_order = tuple(layout)
    m, k = operands.m, operands.k
    A = operands.columns if a_order == "F" else operands.rows
    B, C = operands.B(n, b_order), _outputs(operands, n, c_order)
    function = cublas.sgemm if operands.dtype == "float32" else cublas.dgemm
    one, zero = np.ones(1, operands.dtype), np.zeros(1, operands.dtype)
    a_stride, b_stride = m if a_order == "F" else k, k if b_order == "F" else n
    ops = (cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T)

    def call(i: int) -> None:
        handle = cupy.cuda.device.get_cublas_handle()
        a, b, c = A[i].data.ptr, B.data.ptr, C[i].data.ptr
        # To cuBLAS a row-major matrix is the transpose of a column-major one; a row-major C is C^T = B^T A^T.
        if c_order == "F":
            trans = ops[a_order == "C"], ops[b_order == "C"]
            function(handle, *trans, m, n, k, one.ctypes.data, a, a_stride, b, b_stride, zero.ctypes.data, c, m)
        else:
            trans = ops[b_order == "F"], ops[a_order == "F"]
            function(handle, *trans, n, m, k, one.ctypes.data, b, b_stride, a, a_stride, zero.ctypes.data, c, n)

    return Contender(name, Call(call, operands.copies), C, layout, keep=[B, one, zero])


def _gemv(operands: Operands, n: int) -> Contender:
    import cupy
    from cupy_backends.cuda.libs import cublas

    m, k = operands.m, operands.k
    B, C = operands.B(n, "F"), _outputs(operands, n, "F")
    function = cublas.sgemv if operands.dtype == "float32" else cublas.dgemv
    one, zero = np.ones(1, operands.dtype), np.zeros(1, operands.dtype)

    def call(i: int) -> None:
        handle = cupy.cuda.device.get_cublas_handle()
        a, b, c, size = operands.columns[i].data.ptr, B.data.ptr, C[i].data.ptr, one.itemsize
        for j in range(n):  # C(:, j) = A B(:, j)
            x, y = b + j * k * size, c + j * m * size
            function(handle, cublas.CUBLAS_OP_N, m, k, one.ctypes.data, a, m, x, 1, zero.ctypes.data, y, 1)

    return Contender(GEMV, Call(call, operands.copies, launches=n), C, "FFF", keep=[B, one, zero])


def _matmul(operands: Operands, n: int) -> Contender:
    import cupy

    B, C = operands.B(n, "C"), _outputs(operands, n, "C")
    return Contender(CUPY, Call(lambda i: cupy.matmul(operands.rows[i], B, out=C[i]), operands.copies), C, "CCC")


def _torch(operands: Operands, n: int) -> Contender:
    """torch.mm, which can be captured in a graph: for calls so short that the launch counts."""
    import cupy
    import torch

    B, C = operands.B(n, "F"), _outputs(operands, n, "F")

    def tensor(x: Array) -> Any:  # the same memory; transposed it is row-major, which is what torch takes as it is
        return torch.as_tensor(x.T, device="cuda")

    a, b, c = [tensor(x) for x in operands.columns], tensor(B), [tensor(x) for x in C]

    def call(i: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            torch.mm(b, a[i], out=c[i])  # C^T = B^T A^T

    return Contender(TORCH, Call(call, operands.copies, capture=torch_graph), C, "FFF", keep=[a, b, c])


def _outputs(operands: Operands, n: int, order: str) -> list[Array]:
    import cupy

    return [cupy.empty((operands.m, n), dtype=operands.dtype, order=order) for _ in range(operands.copies)]


def precompile(configs: Sequence[Config | Stream], threads: int = 8) -> float:
    """Compile our kernels side by side; returns the seconds. One that fails shows again where it is timed."""
    import cupy

    device = cupy.cuda.Device().id
    begun = time.perf_counter()

    def compile_one(config: Config | Stream) -> None:
        with cupy.cuda.Device(device):
            compiled(config)

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(compile_one, config) for config in dict.fromkeys(configs)]:
            future.exception()
    return time.perf_counter() - begun
