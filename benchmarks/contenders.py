"""Contenders of tall-skinny products and encodings: this package's functions as they are called, the paper's kernels,
and cuBLAS in every layout, as n products with a vector, through CuPy's ``A @ B`` and through PyTorch.

All find the same operands resident and write into outputs that exist beforehand, with alpha = 1 and beta = 0. Each has
outputs of its own, so that what was timed can be judged afterwards.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS, dtype_name
from abft_tsm2.core import config as paper
from abft_tsm2.core import cublas as vendor
from abft_tsm2.core.choose import choose
from abft_tsm2.core.device import Device
from abft_tsm2.core.encode_both import encode_both
from abft_tsm2.core.paper.config import TSM2L, Config
from abft_tsm2.core.paper.launch import run
from abft_tsm2.core.split_k import problem_of
from abft_tsm2.core.tsm2 import tall_skinny_matmul
from abft_tsm2.errors import NotSuitable
from benchmarks.gpu_timing import Call, Stopwatch, graph, torch_graph
from benchmarks.operands import Encodings, Products, array, fill_nan
from benchmarks.stream_grid import CUPY, FUNCTION, GEMV, OTHER, OWN, PAPER, TORCH, VENDOR, Cell

Array = Any
BOTH, TWO, LT = "encode_both", "cuBLAS, A V and W' A", "cuBLASLt through PyTorch"
LAYOUTS = {"cuBLAS": "FFF", "cuBLAS, A in rows": "CFF", "cuBLAS, C in rows": "FFC"}
"""Orders of A, B and C on the paper's grid: in columns ("F"), as its kernels have them, or in rows ("C")."""

OPTIONAL = {LT, TORCH}  # these, and the family `OTHER`, may be missing
FEW = 2  # columns up to which reading A for each of them may be worth a try


@dataclass(frozen=True)
class Contender:
    """A computation of what a cell asks for.

    Attributes
    ----------
    name, family : str
    call : Call
    outputs : list of list of array
        What `Products.judge` or `Encodings.judge` takes, for each copy of A.
    layout : str
        Which of A, B and C are column-major ("F") and row-major ("C"), in this order.
    kernel, source : str
        What multiplies, and what chose it.
    config : Config, optional
        Of one of the paper's kernels.
    """

    name: str
    family: str
    call: Call
    outputs: list[list[Array]]
    layout: str = ""
    kernel: str = ""
    source: str = ""
    config: Config | None = None
    keep: list[Any] = field(default_factory=list, repr=False)  # what the call points to and Python must not free

    def poison(self) -> None:
        """Fill the outputs with NaN, so that an element that is not written shows."""
        for outputs in self.outputs:
            for x in outputs:
                fill_nan(x)


@dataclass(frozen=True)
class Anew(Contender):
    """A call that makes its outputs, and leaves them in the list."""

    def poison(self) -> None:
        """Write NaN into what the next call is given, if it takes the same memory: the pool hands out what was freed
        last."""
        super().poison()
        for outputs in self.outputs:
            outputs.clear()


Makers = Iterator[tuple[str, str, Callable[[], Contender]]]
"""Name, family and maker of each contender of a cell; a maker may raise where something is not installed."""


# ---- products -----------------------------------------------------------------------------------------------------


def products(cell: Cell, operands: Products, device: Device, torch: bool) -> Makers:
    """Contenders of the stream suites."""
    if cell.suite == "host":
        yield from _host(cell, operands)
        return
    yield FUNCTION, OWN, partial(_function, FUNCTION, cell, operands, device)
    if cell.short:
        yield f"{FUNCTION}, graph", OWN, partial(_function, f"{FUNCTION}, graph", cell, operands, device, graph)
    a, same = cell.letters[0], cell.dtype == cell.out
    if same or FLOATS[cell.dtype].bits == 16:
        for layout in ("CC",) if cell.n == 1 else ("CC", "CF", "FC", "FF"):
            yield f"cuBLAS {a}{layout}", VENDOR, partial(_gemm, f"cuBLAS {a}{layout}", cell, operands, a + layout)
    if same and cell.n <= FEW and cell.products == 1:
        yield GEMV, VENDOR, partial(_gemv, cell, operands)
    yield CUPY, OTHER if FLOATS[cell.dtype].bits == 16 else VENDOR, partial(_matmul, cell, operands)
    if torch and same:
        yield LT, VENDOR, partial(_torch, LT, "cublaslt", cell, operands, cell.short)
        if cell.short:
            yield TORCH, VENDOR, partial(_torch, TORCH, "cublas", cell, operands, True)
    for name, config in published(cell, device).items():
        yield name, PAPER, partial(of_paper, name, config, cell, operands, device, graph if cell.short else None)


def published(cell: Cell, device: Device) -> dict[str, Config]:
    """The paper's last variants, with the published parameters, where they serve."""
    if cell.order != "columns" or cell.suite not in ("columns", "stream") or cell.dtype != cell.out:
        return {}
    names = TSM2L if cell.suite == "stream" else ("V3",)
    found = {name: paper.published(cell.problem, name) for name in names}
    return {name: config for name, config in found.items() if paper.is_valid(cell.problem, config, device)}


def on_papers_grid(
    cell: Cell, operands: Products, device: Device, torch: bool, configs: Mapping[str, Config]
) -> Makers:
    """Contenders on the paper's grid: `configs` of its kernels, and the vendor."""
    for name, config in configs.items():
        yield name, PAPER, partial(of_paper, name, config, cell, operands, device)
    if cell.suite == "tsm2l":
        yield FUNCTION, OWN, partial(_function, FUNCTION, cell, operands, device, graph)
    for name, layout in LAYOUTS.items():
        yield name, VENDOR, partial(_gemm, name, cell, operands, layout)
    if cell.suite == "tsm2r":
        yield GEMV, VENDOR, partial(_gemv, cell, operands)
    yield CUPY, VENDOR, partial(_matmul, cell, operands)
    if torch and cell.suite != "tsm2r":
        yield TORCH, VENDOR, partial(_torch, TORCH, "cublas", cell, operands, True)


def _function(name: str, cell: Cell, operands: Products, device: Device, capture: Any = None) -> Contender:
    layout = cell.letters
    A, B, C = operands.A, operands.B(cell.n, layout[1]), operands.outputs(cell.n, layout[2])
    dtype = None if cell.dtype == cell.out else cell.out

    def call(i: int) -> None:
        tall_skinny_matmul(A[i], B, out=C[i], dtype=dtype)

    chosen = _chosen(A[0], B, C[0], device)
    return Contender(name, OWN, Call(call, operands.copies, capture=capture), [[c] for c in C], layout, *chosen)


def _chosen(A: Array, B: Array, C: Array, device: Device) -> tuple[str, str]:
    """What `tall_skinny_matmul` takes for such operands, and what decides."""
    try:
        problem = problem_of(A, B, C)
    except NotSuitable:
        return "CuPy", ""
    choice = choose(problem, device)
    if choice.configs:
        return choice.configs[0].name, choice.source
    return "cuBLAS" if vendor.serves(problem) else "CuPy", choice.source


def of_paper(
    name: str,
    config: Config,
    cell: Cell,
    operands: Products,
    device: Device,
    capture: Any = graph,
    outputs: list[Array] | None = None,
) -> Contender:
    """One of the paper's kernels, column-major throughout; `outputs` may be shared where they are not judged."""
    A, B = operands.A, operands.B(cell.n, "F")
    C = operands.outputs(cell.n, "F") if outputs is None else outputs
    call = Call(lambda i: run(config, device, A[i], B, C[i]), operands.copies, capture=capture)
    return Contender(name, PAPER, call, [[c] for c in C], "FFF", config.name, config=config)


def _gemm(name: str, cell: Cell, operands: Products, layout: str) -> Contender:
    """gemm in a layout: CuPy's own wrappers choose it themselves."""
    A, B, C = operands.in_order[layout[0]], operands.B(cell.n, layout[1]), operands.outputs(cell.n, layout[2])
    multiply = vendor.Gemm.of(problem_of(A[0], B, C[0]), A[0], B, C[0])
    call = Call(lambda i: multiply(A[i], B, C[i], 1.0, 0.0), operands.copies)
    return Contender(name, VENDOR, call, [[c] for c in C], layout, "cuBLAS")


def _gemv(cell: Cell, operands: Products) -> Contender:
    import cupy
    from cupy_backends.cuda.libs import cublas

    A, B, C, layout = operands.A, operands.B(cell.n, "F"), operands.outputs(cell.n, "F"), f"{cell.letters[0]}FF"
    function = cublas.sgemv if cell.dtype == "float32" else cublas.dgemv
    one, zero, size = np.ones(1, cell.dtype), np.zeros(1, cell.dtype), A[0].itemsize
    # To cuBLAS a row-major matrix is the transpose of a column-major one.
    transposed = layout[0] == "C"
    op, sizes = (cublas.CUBLAS_OP_T, (cell.k, cell.m)) if transposed else (cublas.CUBLAS_OP_N, (cell.m, cell.k))
    lda = sizes[0] + cell.lead

    def call(i: int) -> None:
        handle = cupy.cuda.device.get_cublas_handle()
        for j in range(cell.n):  # C(:, j) = A B(:, j)
            x, y = B.data.ptr + j * cell.k * size, C[i].data.ptr + j * cell.m * size
            function(handle, op, *sizes, one.ctypes.data, A[i].data.ptr, lda, x, 1, zero.ctypes.data, y, 1)

    outputs = [[c] for c in C]
    return Contender(GEMV, VENDOR, Call(call, operands.copies, launches=cell.n), outputs, layout, "cuBLAS")


def _matmul(cell: Cell, operands: Products) -> Contender:
    """CuPy's ``A @ B``, row-major as it makes it; 16-bit products are rounded to 16 bits."""
    import cupy

    a = "C" if "C" in operands.in_order else cell.letters[0]
    A, B, C = operands.in_order[a], operands.B(cell.n, "C"), operands.outputs(cell.n, "C", cell.weights)
    call = Call(lambda i: cupy.matmul(A[i], B, out=C[i]), operands.copies)
    return Contender(CUPY, OTHER if cell.weights != cell.out else VENDOR, call, [[c] for c in C], f"{a}CC", "CuPy")


def _torch(name: str, library: str, cell: Cell, operands: Products, captured: bool) -> Contender:
    """torch.matmul: it can be captured in a graph, and can be told to take cuBLASLt."""
    import cupy
    import torch

    layout = cell.letters
    B, C = operands.B(cell.n, layout[1]), operands.outputs(cell.n, layout[2])
    a, b, c = ([torch.as_tensor(x, device="cuda") for x in several] for several in (operands.A, [B], C))
    prefer = torch.backends.cuda.preferred_blas_library
    prefer(library)

    def call(i: int) -> None:
        prefer(library)
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            torch.matmul(a[i], b[0], out=c[i])

    timed = Call(call, operands.copies, capture=torch_graph if captured else None)
    return Contender(name, VENDOR, timed, [[x] for x in C], layout, library, keep=[a, b, c])


def _host(cell: Cell, operands: Products) -> Makers:
    """The functions as users call them: with a new result, and into a given one."""
    import cupy

    A, B, C = operands.A[0], operands.B(cell.n, "C"), operands.outputs(cell.n, "C")[0]

    def made(name: str, family: str, function: Callable[..., Array], **named: Array) -> Contender:
        outputs: list[list[Array]] = [[]]

        def call(_: int) -> None:
            outputs[0][:] = (function(A, B, **named),)

        return Anew(name, family, Call(call), outputs, "CCC")

    for name, family, function in ((FUNCTION, OWN, tall_skinny_matmul), (CUPY, VENDOR, cupy.matmul)):
        yield name, family, partial(made, name, family, function)
        yield f"{name}, out", family, partial(made, f"{name}, out", family, function, out=C)


# ---- both sides ---------------------------------------------------------------------------------------------------


def encodings(cell: Cell, operands: Encodings, deadline: float) -> Makers:
    """Contenders for A V and W' A: in one call, and in two."""
    yield BOTH, OWN, partial(_both, cell, operands)
    yield TWO, VENDOR, partial(_two, cell, operands, deadline)
    yield CUPY, VENDOR, partial(_two_matmuls, cell, operands)


def _both(cell: Cell, operands: Encodings) -> Contender:
    A, (V, W) = operands.A, operands.weights(cell.n, "F")
    outputs: list[list[Array]] = [[] for _ in A]

    def call(i: int) -> None:
        outputs[i].clear()
        found = encode_both(A[i], V, W, squares=True)
        squares = found.row_squares, found.column_squares
        outputs[i] += (found.rows, found.columns.T, *(x[:, None] for x in squares if x is not None))

    return Anew(BOTH, OWN, Call(call, operands.copies, launches=2), outputs, "CFF", BOTH)


def _two(cell: Cell, operands: Encodings, deadline: float) -> Contender:
    """Two products by cuBLAS, each in the layout that short samples find fastest."""
    chosen = []
    for side, sides in enumerate((operands.A, [A.T for A in operands.A])):
        entries = {
            layout: _one(sides, operands.weights(cell.n, layout[0])[side], layout[1])
            for layout in ("CC", "CF", "FC", "FF")
        }
        layout = fastest({layout: Call(call, operands.copies) for layout, (call, _) in entries.items()}, deadline)
        chosen.append((layout, *entries[layout]))
    (right, first, C), (left, second, D) = chosen

    def call(i: int) -> None:
        first(i)
        second(i)

    outputs = [list(pair) for pair in zip(C, D, strict=True)]
    return Contender(TWO, VENDOR, Call(call, operands.copies, launches=2), outputs, f"C{right} F{left}", "cuBLAS")


def fastest(calls: Mapping[str, Call], deadline: float) -> str:
    """The call that short samples find fastest."""
    times = Stopwatch(budget=0.015, rounds=(3, 5), deadline=deadline).measure(calls)
    medians = {name: statistics.median(taken.seconds) for name, taken in times.items() if taken.seconds}
    if not medians:
        raise RuntimeError(f"none could be timed: {next(iter(times.values())).error or 'no samples in the time limit'}")
    return min(medians, key=lambda name: medians[name])


def _one(sides: list[Array], B: Array, order: str) -> tuple[Callable[[int], None], list[Array]]:
    """The product of each side and B, in this order."""
    C = [array((A.shape[0], B.shape[1]), dtype_name(A.dtype), order) for A in sides]
    multiply = vendor.Gemm.of(problem_of(sides[0], B, C[0]), sides[0], B, C[0])

    def call(i: int) -> None:
        multiply(sides[i], B, C[i], 1.0, 0.0)

    return call, C


def _two_matmuls(cell: Cell, operands: Encodings) -> Contender:
    import cupy

    A, (V, W) = operands.A, operands.weights(cell.n, "C")
    C, D = ([array(shape, cell.dtype) for _ in A] for shape in ((cell.m, cell.n), (cell.n, cell.k)))

    def call(i: int) -> None:
        cupy.matmul(A[i], V, out=C[i])
        cupy.matmul(W.T, A[i], out=D[i])

    outputs = [[c, d.T] for c, d in zip(C, D, strict=True)]
    return Contender(CUPY, VENDOR, Call(call, operands.copies, launches=2), outputs, "CFC", "CuPy")
