"""Matrices on a card, and what factors them: cuSOLVER called directly, this package, CuPy's and PyTorch's functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

import abft_tsm2
from abft_tsm2.arrays import Array, dtype_name, namespace
from abft_tsm2.core.capture import current
from abft_tsm2.core.compiler import Kernel
from abft_tsm2.core.problem import SIZES
from abft_tsm2.linalg.device.certificate_config import CertificateKernel
from abft_tsm2.linalg.device.check_config import Advance, ColumnSums, JudgeStep, RowSums, StartSums, SumModuli
from abft_tsm2.linalg.device.evidence_config import EvidenceKernel
from abft_tsm2.linalg.device.factorisation import DeviceFactorisation
from abft_tsm2.linalg.device.move_config import MoveKernel
from abft_tsm2.linalg.device.panel_config import PanelConfig
from abft_tsm2.linalg.device.queued import QueuedRun
from abft_tsm2.linalg.device.repair import JUDGED
from abft_tsm2.linalg.device.schedule import CHECKS, PANEL, PRODUCTS
from abft_tsm2.linalg.outcome import Findings
from abft_tsm2.report import Report, Status
from benchmarks.lu_gpu_grid import Cell
from benchmarks.operands import array, draw, fill

Factors = tuple[Array, Array]
"""Packed L and U, and pivots counted from 0."""

LIBRARIES = {"torch": "default", "magma": "magma"}
"""Of PyTorch, by contender."""

_LETTER = {"float64": "d", "float32": "s"}
_LOWER, _NOT_TRANSPOSED = 0, 0  # cublasFillMode_t, cublasOperation_t
GRADED = 60  # powers of two from the first row, or column, to the last
INTEGERS = 4.0  # standard deviation
NOISE = 1e-6  # below the diagonal of a triangle of elements of size 1
CERTIFICATE = (
    *(("factor_sums", False), ("factor_sums", True), ("add_factor_parts", False), ("count_growth", False)),
    *(("judge_factors", True), ("replay_pivots", False), ("least_weights", False), ("see_all", False)),
    ("compare_sums", False),
)
"""Files of kernels/factor, and whether norms are taken in them."""

MOVES = ("measure", "exchange_rows", "exchange_solve", "solve_rows", "left_rows", "scale_weights", "pivots_to_order")


# ---- matrices ---------------------------------------------------------------------------------------------------


def matrix(cell: Cell) -> Array:
    """A of a cell; its random numbers depend on the size alone."""
    A = array((cell.n, cell.n), cell.dtype, cell.order)
    fill(A, draw("normal", cell.n))
    _SHAPED[cell.matrix](A)
    return A


def right_hand_sides(cell: Cell) -> Array:
    """B in columns; a vector where it is one."""
    B = array((cell.n, cell.right_hand_sides), cell.dtype, "F")
    fill(B, draw("normal", cell.n + 1))
    return B if cell.right_hand_sides > 1 else B[:, 0]


def definite(cell: Cell) -> Array:
    """The sums of products of independent normal rows, over n, and 1 on the diagonal."""
    G = matrix(cell)
    xp = namespace(G)
    A = array(G.shape, cell.dtype, "F")
    A[...] = G @ G.T
    A /= cell.n
    A[...] = xp.tril(A) + xp.tril(A, k=-1).T  # a product is symmetric but for rounding
    _diagonal(A)[...] += 1
    return A


def _diagonal(A: Array) -> Array:
    """A view of it."""
    lines = A if A.strides[1] == A.itemsize else A.T
    return lines.reshape(-1)[:: A.shape[0] + 1]


def _scales(A: Array) -> Array:
    xp, n = namespace(A), A.shape[0]
    return xp.exp2(-GRADED / n * xp.arange(n, dtype=xp.float64)).astype(A.dtype)


def _graded_rows(A: Array) -> None:
    A *= _scales(A)[:, None]


def _graded_columns(A: Array) -> None:
    A *= _scales(A)


def _orthogonal(A: Array) -> None:
    # MATLAB's gallery("orthog", n, 1)
    xp, n = namespace(A), A.shape[0]
    i = xp.arange(1, n + 1)
    A[...] = (2 / (n + 1)) ** 0.5 * xp.sin(xp.pi / (n + 1) * ((i[:, None] * i) % (2 * n + 2)))


def _integers(A: Array) -> None:
    A[...] = namespace(A).rint(INTEGERS * A)


def _triangle_and_noise(A: Array) -> None:
    xp = namespace(A)
    A[...] = xp.triu(A) + NOISE * xp.tril(A, k=-1)


def _dominant(A: Array) -> None:
    sizes = abs(A)
    _diagonal(A)[...] = sizes.sum(1) + sizes.sum(0)


_SHAPED: Mapping[str, Callable[[Array], None]] = {
    "normal": lambda A: None,
    "graded rows": _graded_rows,
    "graded columns": _graded_columns,
    "orthogonal": _orthogonal,
    "integers": _integers,
    "triangle and noise": _triangle_and_noise,
    "dominant": _dominant,
}


# ---- cuSOLVER ---------------------------------------------------------------------------------------------------


class _Vendor:
    """Calls of cuSOLVER on CuPy's current stream, for matrices in columns."""

    def __init__(self, dtype: str, *routines: str) -> None:
        import cupy
        from cupy_backends.cuda.libs import cusolver

        self._solver, self._handle = cusolver, cusolver.create()
        self._calls = [getattr(cusolver, _LETTER[dtype] + routine) for routine in routines]
        self.info = cupy.zeros(1, dtype=cupy.int32)

    def _queued_behind(self) -> int:
        """The handle, on the current stream."""
        import cupy

        self._solver.setStream(self._handle, cupy.cuda.get_current_stream().ptr)
        return int(self._handle)

    def close(self) -> None:
        """Give back what the handle holds."""
        self._solver.destroy(self._handle)


class Getrf(_Vendor):
    """LU in place of a copy of A, which `restore` makes again."""

    def __init__(self, A: Array) -> None:
        import cupy

        dtype, (m, n) = dtype_name(A.dtype), A.shape
        super().__init__(dtype, "getrf", "getrf_bufferSize")
        self._call, size = self._calls
        self.A, self.W = A, array(A.shape, dtype, "F")
        self._sizes = m, n, self.W.data.ptr, m
        self._space = cupy.empty(size(self._queued_behind(), *self._sizes), dtype=A.dtype)
        self.pivots = cupy.zeros(min(m, n), dtype=cupy.int32)
        self.restore()

    def restore(self) -> None:
        """Queue the copy."""
        self.W[...] = self.A

    def __call__(self, _: int = 0) -> None:
        rest = self._space.data.ptr, self.pivots.data.ptr, self.info.data.ptr
        self._call(self._queued_behind(), *self._sizes, *rest)

    def factors(self) -> Factors:
        """Of A."""
        self.restore()
        self()
        return self.W, self.pivots - 1


class Getrs(_Vendor):
    """A copy of B, and the substitutions in its place, with factors in columns."""

    def __init__(self, factors: Factors, B: Array) -> None:
        import cupy

        lu, piv = factors
        super().__init__(dtype_name(lu.dtype), "getrs")
        self._lu, self._pivots = lu, (piv + 1).astype(cupy.int32)
        self._B, self.X = B, cupy.empty(B.shape, dtype=B.dtype, order="F")

    def __call__(self) -> Array:
        lu, n = self._lu, self._lu.shape[0]
        self.X[...] = self._B
        columns = 1 if self.X.ndim == 1 else self.X.shape[1]
        taken = lu.data.ptr, lu.strides[1] // lu.itemsize, self._pivots.data.ptr, self.X.data.ptr, n
        self._calls[0](self._queued_behind(), _NOT_TRANSPOSED, n, columns, *taken, self.info.data.ptr)
        return self.X


class Potrf(_Vendor):
    """Cholesky's factor in the lower triangle of a copy of A, which `restore` makes again."""

    def __init__(self, A: Array) -> None:
        import cupy

        dtype = dtype_name(A.dtype)
        super().__init__(dtype, "potrf", "potrf_bufferSize")
        self._call, size = self._calls
        self.A, self.W = A, array(A.shape, dtype, "F")
        self._sizes = _LOWER, A.shape[0], self.W.data.ptr, A.shape[0]
        self._length = size(self._queued_behind(), *self._sizes)
        self._space = cupy.empty(self._length, dtype=A.dtype)
        self.restore()

    def restore(self) -> None:
        """Queue the copy."""
        self.W[...] = self.A

    def __call__(self) -> Array:
        self._call(self._queued_behind(), *self._sizes, self._space.data.ptr, self._length, self.info.data.ptr)
        return self.W


# ---- this package, and functions as they are called --------------------------------------------------------------


@dataclass
class Queued:
    """This package's factorisation, queued.

    Attributes
    ----------
    A : array
    encoded, checked : bool
        Whether the factors are certified, and whether each step is checked.
    parts, read : bool
        Whether a host queues the steps one by one, and whether it reads the verdict on each before it goes on.
    """

    A: Array
    encoded: bool = True
    checked: bool = False
    parts: bool = False
    read: bool = False

    def _queue(self) -> DeviceFactorisation:
        findings = {"findings": Findings()} if self.parts else {}
        return DeviceFactorisation(self.A, encoded=self.encoded, checked=self.checked, **findings)

    def __call__(self, _: int = 0) -> None:
        made = self._queue()
        if self.parts:
            with nullcontext() if self.read else unread():
                made.wait()
        made.release()

    def factors(self) -> tuple[Factors, bool]:
        """And whether nothing is suspected in them, as far as they were checked."""
        made = self._queue()
        made.wait()
        clean = not self.encoded or made.clean
        made.release()
        return (made.W, made.piv), clean


def unread() -> Any:
    """In its block, take each step for right, without waiting for the verdict."""
    return patch.object(QueuedRun, "verdict", lambda self, step: JUDGED)


def ended(event: Any) -> Any:
    """In its block, record an event on the current stream whenever all of a factorisation has been queued."""
    end = QueuedRun.end

    def recorded(self: QueuedRun) -> None:
        end(self)
        event.record()

    return patch.object(QueuedRun, "end", recorded)


def planted(fault: str) -> Any:
    """In its block, flip a bit of the exponent in the next factorisation that is tracked, when half of the columns are
    finished: in the trailing matrix, or in a column of L that nothing reads any more. It is queued as all else is."""
    import cupy

    part, pending = QueuedRun.part, [fault]

    def with_fault(self: QueuedRun, number: int) -> None:
        part(self, number)
        plan = self.plan
        if not pending or 2 * plan.schedule.steps[number].j1 < plan.K:
            return
        pending.clear()
        n, j1, size = plan.K, plan.schedule.steps[number].j1, plan.size
        row, column = ((n + j1) // 2, (n + j1) // 2) if fault == "trailing" else (n - 1, j1 // 2)
        place = cupy.cuda.UnownedMemory(self.where["W"] + (row + column * plan.ld) * size, size, None)
        word = cupy.ndarray((1,), f"u{size}", cupy.cuda.MemoryPointer(place, 0))
        whole = plan.schedule.parts[number].whole
        lane = PRODUCTS if fault == "trailing" else CHECKS
        with current(cupy.cuda.get_current_stream() if whole else cupy.cuda.ExternalStream(plan.handles(0)[lane])):
            word ^= word.dtype.type(1 << (np.finfo(f"f{size}").nmant + 4))

    return patch.object(QueuedRun, "part", with_fault)


def queued(A: Array) -> dict[str, Queued]:
    """All of them."""
    return {"unprotected": Queued(A, encoded=False), "offline": Queued(A), "online": Queued(A, checked=True)}


def tracked(A: Array) -> dict[str, Queued]:
    """Checked in every step: queued as a whole, step by step, and step by step with the verdicts read on the way."""
    online = Queued(A, checked=True)
    return {"online": online, "parts": replace(online, parts=True), "read": replace(online, parts=True, read=True)}


@dataclass
class Called:
    """A function of the package as it is called, and what its last report says.

    Attributes
    ----------
    call : function
        Returns a result and a report.
    expected : Status
    """

    call: Callable[[], tuple[Any, Report]]
    expected: Status = Status.CLEAN
    trouble: str = field(default="", init=False)

    def __call__(self) -> Any:
        found, report = self.call()
        if report.status is not self.expected:
            self.trouble = f"a report says {report.status.name}, not {self.expected.name}"
        return found


def lu_factor(A: Array, mode: str) -> Called:
    """This package's lu_factor."""
    return Called(partial(abft_tsm2.protected_lu_factor, A, mode=mode, return_report=True))


def of_cupy(A: Array) -> Callable[[], Factors]:
    """CuPy's lu_factor; it looks at what is found."""
    from cupyx.scipy import linalg

    return lambda: linalg.lu_factor(A, check_finite=False)


def of_torch(A: Array, library: str = "default") -> tuple[Callable[[], Any], Callable[[Any], Factors]]:
    """PyTorch's lu_factor by a library, and what makes CuPy's arrays of its result; ImportError where there is none."""
    import cupy
    import torch

    if library == "magma" and not torch.cuda.has_magma:
        raise ImportError("this PyTorch has no MAGMA")
    taken, choose = torch.from_dlpack(A), torch.backends.cuda.preferred_linalg_library

    def call() -> Any:
        before = choose()
        choose(library)
        try:
            with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
                return torch.linalg.lu_factor(taken)
        finally:
            choose(before)

    return call, lambda found: (cupy.from_dlpack(found[0]), cupy.from_dlpack(found[1]) - 1)


def free_torch() -> None:
    """Give back what PyTorch keeps of the card's memory, where it is loaded."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()


def kernels(cell: Cell) -> list[Kernel]:
    """Those that factor such a matrix, as far as their compilation takes long."""
    dtype, widths = cell.dtype, [PANEL << i for i in range(3)]
    panels = {PanelConfig.of(dtype, rows) for rows in range(PANEL, cell.n + PANEL, PANEL)}
    return [
        *(one for one in panels if one),
        *(MoveKernel(routine, dtype) for routine in MOVES),
        *(CertificateKernel(routine, dtype, norms) for routine, norms in CERTIFICATE),
        *(kind.of(dtype, width) for kind in (RowSums, JudgeStep) for width in widths),
        *(ColumnSums(dtype), Advance(dtype), StartSums(), SumModuli(), EvidenceKernel("line_squares", dtype)),
    ]


def memory(cell: Cell) -> int:
    """An upper estimate of what a cell takes: the matrix, factors of each library and the work of some, blocks of the
    judge."""
    matrices = {"solve": 5, "cholesky": 6}.get(cell.suite, 7)
    return matrices * cell.bytes + 12 * 2048 * 8 * cell.n + 64 * SIZES[cell.dtype] * cell.n + (1 << 29)
