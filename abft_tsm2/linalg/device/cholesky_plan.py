"""Factor a positive definite matrix on a GPU by cuSOLVER, and certify the factor there: the host waits once.

A = L L'. Of three streams the first two run side by side:

    factor    L = a copy of A's triangle; potrf;        then g = w'L, L g, and the verdict L g = Z
    beside    the other triangle: zeros, or A's, and whether it is finite;   w from A's diagonal, Z = A w and norms
    main      the caller's, which both follow and which waits for both

A plan belongs to a size, a type and a thread, and is kept: launches, and what little memory outlives a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from abft_tsm2.arrays import FLOATS, Array, dtype_name
from abft_tsm2.core import faultpoint
from abft_tsm2.core.capture import current
from abft_tsm2.core.compiler import Kernel
from abft_tsm2.core.device import device_of
from abft_tsm2.core.kept import thrice
from abft_tsm2.core.launch import PreparedLaunch, Step, Value
from abft_tsm2.core.problem import SIZES
from abft_tsm2.linalg.cholesky_checks import base_weights
from abft_tsm2.linalg.device.buffers import NAN_BYTE
from abft_tsm2.linalg.device.cholesky_config import (
    COUNTERS,
    AddTriangleParts,
    CopyTriangle,
    DefiniteSizes,
    DefiniteWeights,
    JudgeDefinite,
    TriangleSums,
    TriangleTiles,
    tolerances,
)
from abft_tsm2.linalg.device.kept import PlansOfThread
from abft_tsm2.linalg.inputs import for_kernels
from abft_tsm2.report import Check

KEPT = 8  # plans of a thread
WORD = 8  # bytes
ENCODED, FACTORED = "encoded", "factored"
"""Stages of a run: before potrf, and after it."""
After = Callable[[str, dict[str, Any]], None]

NOT_DEFINITE, POSITIVE = "definite", "positive"  # of what is missing: potrf has stopped; the diagonal's signs


@dataclass(frozen=True)
class CholeskyKind:
    """What a plan is made for.

    Attributes
    ----------
    n : int
    dtype : {"float64", "float32"}
    lower : bool
        Whether A's lower triangle is read, and L returned; else the upper one, and its transpose.
    clear : bool
        Whether the other triangle gets zeros, or what A has there.
    check_finite : bool
        Whether the other triangle of A has to be finite, too.
    turned : bool
        Whether A's rows are contiguous, and not its columns.
    """

    n: int
    dtype: str
    lower: bool
    clear: bool
    check_finite: bool
    turned: bool


class Launched(Kernel, Protocol):
    """A kernel that knows the threads of its blocks."""

    @property
    def threads(self) -> int:
        """Of a block."""


class CholeskyPlan:
    """The launches of one kind of factorisation on the current device, and the memory of its checks.

    Attributes
    ----------
    kind : CholeskyKind
    tiles : TriangleTiles
    """

    def __init__(self, kind: CholeskyKind) -> None:
        import cupy

        n, dtype = kind.n, kind.dtype
        self.kind, self.size = kind, SIZES[dtype]
        self.tiles = TriangleTiles.of(n, device_of(cupy.cuda.runtime.getDevice()).multiprocessors)
        sizes = {**dict.fromkeys((*COUNTERS, "info", "closest"), 1), "summary": 3}
        self._brought = sum(sizes.values())
        sizes |= {"w": n, "Z": 2 * n, "sizes": n, "g": n, "Lg": 2 * n, "residuals": n, "bounds": n}
        ends = np.cumsum(list(sizes.values())).tolist()
        self._slices = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}
        self._device = cupy.empty(ends[-1])
        self._pinned = cupy.cuda.alloc_pinned_memory(WORD * self._brought)
        self._host = np.frombuffer(self._pinned, np.float64, self._brought)
        self._base = cupy.asarray(thrice(base_weights(n)))
        start = int(self._device.data.ptr)
        self._places = {name: start + WORD * at.start for name, at in self._slices.items()}
        self._tolerances = tolerances(FLOATS[dtype], n)
        self._letter = {"float64": "d", "float32": "s"}[dtype]
        self._workspace_size: int | None = None
        self.factor, self.beside = (cupy.cuda.Stream(non_blocking=True, priority=p) for p in (-5, 0))
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(4)]
        self._prepare()
        cupy.cuda.get_current_stream().synchronize()  # what was set here may be used on any stream

    # -- launches --

    def _prepare(self) -> None:
        kind, n = self.kind, self.kind.n
        other = CopyTriangle(
            *(kind.dtype, not kind.lower),
            diagonal=False,
            read=kind.check_finite or not kind.clear,
            zero=kind.clear,
        )
        own, weights, add = CopyTriangle(kind.dtype, kind.lower), DefiniteWeights(kind.dtype), AddTriangleParts()
        measure, judge = DefiniteSizes(), JudgeDefinite(kind.dtype)
        taken = "A", "down", "along", n, "W", n
        below = kind.lower != kind.turned  # whether that triangle of A is below the diagonal of the column-major matrix
        encode = TriangleSums.of_matrix(kind.dtype, below)
        read, again = (make(kind.dtype, kind.lower) for make in (TriangleSums.of_factor, TriangleSums.of_product))
        judged = (
            *("Lg", "Z", "sizes", "W", n, n, "summary", *self._tolerances),
            *("residuals", "bounds", "right", "positive", "closest"),
        )
        self._copy = self._launch(own, own.grid(n), *taken, "finite")
        # The other triangle first: behind the sums it made 8192 columns 1 % longer on an H100.
        self._beside = [
            self._launch(other, other.grid(n), *taken, "finite_beside"),
            self._launch(weights, weights.grid(n), "A", "diagonal", self._base.data.ptr, "w", n),
            *self._sums(encode, add, "A", "lead", "w", "Z", "encoded"),
            self._launch(measure, measure.grid, "Z", "w", n, "sizes", "summary"),
        ]
        self._certify = [
            *self._sums(read, add, "W", n, "w", "g", "read"),
            *self._sums(again, add, "W", n, "g", "Lg", "read_again"),
            self._launch(judge, judge.grid(n), *judged),
        ]
        self._full = {**dict.fromkeys(("encoded", "read", "read_again"), self.tiles.rows * self.tiles.columns)}
        self._full |= {"right": n, "positive": n, "finite": own.full_count(n)}
        if kind.check_finite:
            self._full["finite_beside"] = other.full_count(n)

    def _launch(self, config: Launched, grid: tuple[int, ...], *values: Value) -> Step:
        tolerances = any(isinstance(value, float) for value in values)
        return PreparedLaunch(config, grid, config.threads, values, chained=False, compared=tolerances)

    def _sums(
        self, sums: TriangleSums, add: AddTriangleParts, of: str, lead: Value, x: str, out: str, count: str
    ) -> list[Step]:
        """Weighted sums of a triangle, tile by tile, and of these."""
        n, tiles = self.kind.n, self.tiles
        parts = "column_parts", "row_parts"
        number = tiles.rows * sums.columns, tiles.columns * sums.rows
        return [
            self._launch(sums, tiles.grid, of, lead, n, x, *parts, count),
            self._launch(add, add.grid(n, sums.squares), *parts, *number, n, out),
        ]

    def _workspace(self, W: Array) -> Array:
        """Memory that cuSOLVER wants."""
        import cupy
        from cupy_backends.cuda.libs import cusolver

        if self._workspace_size is None:
            size = getattr(cusolver, f"{self._letter}potrf_bufferSize")
            n, half = self.kind.n, self._half
            self._workspace_size = int(size(cupy.cuda.device.get_cusolver_handle(), half, n, W.data.ptr, n))
        return cupy.empty(self._workspace_size, self.kind.dtype)

    @property
    def _half(self) -> int:
        from cupy_backends.cuda.libs import cublas

        return int(cublas.CUBLAS_FILL_MODE_LOWER if self.kind.lower else cublas.CUBLAS_FILL_MODE_UPPER)

    def _potrf(self, W: Array, workspace: Array) -> None:
        """Queue cuSOLVER's factorisation on the stream for it."""
        import cupy
        from cupy_backends.cuda.libs import cusolver

        n, space = self.kind.n, (workspace.data.ptr, workspace.size)
        with current(self.factor):  # which CuPy hands to cuSOLVER
            handle = cupy.cuda.device.get_cusolver_handle()
            getattr(cusolver, f"{self._letter}potrf")(
                *(handle, self._half, n, W.data.ptr, n, *space, self._places["info"])
            )

    def _plant(self, A: Array, W: Array) -> None:
        """Let a planter of faults reach the factor, on the stream that it is made on."""
        if (planter := faultpoint.current()) is not None:
            with current(self.factor):
                planter("finished", {"W": W if self.kind.lower else W.T, "A": A, "one_half": True})

    def run(self, A: Array, after: After | None = None) -> CholeskyRun:
        """Factor a matrix of this kind, and wait until it is done.

        Parameters
        ----------
        A : (n, n) CuPy array
        after : callable, optional
            Called with the name of each stage and the arrays of the device, when that has come to it: for planting
            faults.
        """
        import cupy
        from cupy.cuda import runtime

        kind, n = self.kind, self.kind.n
        main, (begin, copied, encoded, done) = cupy.cuda.get_current_stream(), self._events
        factor, beside = self.factor.ptr, self.beside.ptr
        W = cupy.empty((n, n), kind.dtype, order="F")
        parts, workspace = cupy.empty(self.tiles.column_parts + self.tiles.row_parts), self._workspace(W)
        down, along = (stride // self.size for stride in A.strides)
        where = self._places | {"A": A.data.ptr, "W": W.data.ptr, "down": down, "along": along}
        where |= {"lead": down if kind.turned else along, "diagonal": down + along, "column_parts": parts.data.ptr}
        where["row_parts"] = parts.data.ptr + WORD * self.tiles.column_parts

        def stage(name: str) -> None:
            if after is not None:
                runtime.deviceSynchronize()
                after(name, {"A": A, "W": W, **{one: self._device[at] for one, at in self._slices.items()}})
                runtime.deviceSynchronize()

        self._host[:] = 0  # nothing of the run before counts
        memory, counted, length = self._device.data.ptr, self._host.nbytes, self._device.nbytes
        runtime.eventRecord(begin.ptr, main.ptr)
        runtime.streamWaitEvent(factor, begin.ptr)
        try:
            runtime.memsetAsync(memory, 0, counted, factor)
            self._copy(factor, where)
            runtime.eventRecord(copied.ptr, factor)  # which takes all that memory can give: nothing is won beside it
            runtime.streamWaitEvent(beside, copied.ptr)
            runtime.memsetAsync(memory + counted, NAN_BYTE, length - counted, beside)
            for step in self._beside:
                step(beside, where)
            runtime.eventRecord(encoded.ptr, beside)
            stage(ENCODED)
            self._potrf(W, workspace)
            self._plant(A, W)
            stage(FACTORED)
            runtime.streamWaitEvent(factor, encoded.ptr)
            for step in self._certify:
                step(factor, where)
            runtime.memcpyAsync(self._pinned.ptr, memory, counted, runtime.memcpyDeviceToHost, factor)
            runtime.eventRecord(done.ptr, factor)
            runtime.streamWaitEvent(main.ptr, done.ptr)
            runtime.streamSynchronize(factor)
        except BaseException:
            runtime.deviceSynchronize()  # before anybody else gets memory that is still written to
            raise
        missing, check = self._verdict()
        at, known = self._slices, bool(missing) and "encoded" not in missing
        kept = (self._device[at["w"]].copy(), self._device[at["Z"]][:n].copy()) if known else None
        return CholeskyRun(W, missing, check, kept)

    def _verdict(self) -> tuple[tuple[str, ...], Check | None]:
        """What is missing, and what the certificate says in a report; of the last run, brought to the host."""
        at, words = self._slices, self._host.view(np.uint64).tolist()
        missing = [name for name, full in self._full.items() if words[at[name].start] != full]
        if self._host[at["info"]].view(np.int32)[0]:
            missing.insert(0, NOT_DEFINITE)
        if missing:
            return tuple(missing), None
        rounding, walk, underflow = self._tolerances
        modulus, least, middle = self._host[at["summary"]].tolist()
        bound = rounding * walk * middle + underflow * modulus
        ratio = float(self._host[at["closest"]].view(np.float32)[1])  # the upper half
        line = ~words[at["closest"].start] & 0xFFFFFFFF
        return (), Check("columns", 1, self.kind.n, self.kind.n, bound, ratio, line, bound / least)


class CholeskyRun(NamedTuple):
    """What a run has made of a matrix.

    Attributes
    ----------
    W : (n, n) CuPy array, column-major
    missing : tuple of str
        Counters that are short of their full numbers, and "definite" where potrf has stopped; empty for a factor that
        is certified.
    check : Check or None
        What the certificate says in a report; None where something is missing.
    sums : pair of arrays, or None
        w and Z of A as it was encoded, where something is missing and they are not.
    """

    W: Array
    missing: tuple[str, ...]
    check: Check | None
    sums: tuple[Array, Array] | None


_kept = PlansOfThread(KEPT)


def factor_definite_on_device(
    A: Array, *, lower: bool, clear: bool, check_finite: bool, after: After | None = None
) -> CholeskyRun:
    """Factor an (n, n) CuPy array, n > 0, and certify the factor. Synchronises with the host, once.

    Parameters
    ----------
    A : (n, n) CuPy array
        float64 or float32, of any strides; never written.
    lower, clear, check_finite : bool
        As in `CholeskyKind`.
    after : callable, optional
        As in `CholeskyPlan.run`.
    """
    A = for_kernels(A)
    turned = A.strides[0] != A.itemsize
    kind = CholeskyKind(int(A.shape[0]), dtype_name(A.dtype), lower, clear, check_finite, turned)
    plan: CholeskyPlan = _kept.of(kind, lambda: CholeskyPlan(kind))
    return plan.run(A, after)
