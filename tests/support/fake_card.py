"""A GPU made of NumPy and two clocks: what `benchmarks` needs of CuPy, so that the benchmarks run where no card is.

Time is simulated: a launch costs the host `launch_seconds` and occupies the card for as long as the test says, events
take the card's time, and waiting moves the host's clock. Captured launches run when their graph is replayed and not
before. cuBLAS works on raw pointers with leading dimensions, as the real one does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

Work = Callable[[], Any]


class Array(np.ndarray):
    """An array whose address is where CuPy has it."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)


class Card:
    """The clocks in seconds, and what was launched.

    Attributes
    ----------
    host, free : float
        Now, on the host; when the card will have done all that is queued.
    launch_seconds, gemm_seconds : float
        What a launch costs the host; how long cuBLAS takes.
    """

    def __init__(self) -> None:
        self.host, self.free = 0.0, 0.0
        self.launch_seconds, self.gemm_seconds = 1e-5, 2e-3
        self.recording: list[tuple[Work, float]] | None = None
        self.lost = False
        self.capturable = True
        self.memory = 1 << 30
        self.math_mode = 0  # of cuBLAS

    def launch(self, work: Work, seconds: float) -> None:
        """Queue work that takes the card so long."""
        work = silently(work)
        self.host += self.launch_seconds
        if self.recording is not None:
            self.recording.append((work, seconds))
            return
        work()
        self.free = max(self.free, self.host) + seconds

    def modules(self) -> dict[str, ModuleType]:
        """What to put into `sys.modules`."""
        cublas = _module("cupy_backends.cuda.libs.cublas", **_cublas(self))
        libs = _module("cupy_backends.cuda.libs", cublas=cublas)
        cuda = _module("cupy_backends.cuda", libs=libs)
        found = [_cupy(self), _module("cupy_backends", cuda=cuda), cuda, libs, cublas]
        return {module.__name__: module for module in found}


def silently(work: Callable[..., Any]) -> Callable[..., Any]:
    """Work of a card, which raises no flags at NaN and infinity; of NumPy's BLAS it depends on the processor."""

    def done(*arguments: Any, **options: Any) -> Any:
        with np.errstate(all="ignore"):
            return work(*arguments, **options)

    return done


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(contents)
    return module


def _cupy(card: Card) -> ModuleType:
    module = _module("cupy", __version__="0.fake", ndarray=Array)
    of_oracle = ("maximum", "frexp", "ldexp", "ones")
    for name in ("float32", "float64", "uint16", "uint32", "rint", "isfinite", "linalg", "concatenate", *of_oracle):
        setattr(module, name, getattr(np, name))
    for name in ("empty", "empty_like", "zeros", "full", "asarray"):
        setattr(module, name, _maker(getattr(np, name)))

    def matmul(a: Any, b: Any, out: Any = None) -> Any:
        if out is None:
            out = module.empty((*a.shape[:-1], b.shape[-1]), dtype=np.result_type(a, b))
        card.launch(lambda: np.copyto(out, np.matmul(a, b), casting="same_kind"), card.gemm_seconds)
        return out

    def total(x: Any, out: Any) -> None:
        card.launch(lambda: None, x.nbytes / 4e12)

    module.matmul, module.sum, module.asnumpy = matmul, total, np.asarray
    module.random = SimpleNamespace(default_rng=np.random.default_rng)
    module.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    module.RawKernel = lambda code, name: _raw_kernel(card, name)
    module.cuda = _cuda(card)
    return module


def _maker(make: Callable[..., np.ndarray]) -> Callable[..., Array]:
    return lambda *arguments, **named: make(*arguments, **named).view(Array)


def _raw_kernel(card: Card, name: str) -> Callable[..., None]:
    def call(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        seconds = 1e-9 * int(arguments[0]) if name == "spin" else 16 * int(arguments[1]) / 4e12
        card.launch(lambda: None, seconds)

    return call


def _cuda(card: Card) -> Any:
    class Device:
        def __init__(self, index: int | None = None) -> None:
            self.id = 0
            self.attributes = {"L2CacheSize": 1 << 16, "MultiProcessorCount": 2}

        def synchronize(self) -> None:
            if card.lost:
                raise RuntimeError("an illegal memory access was encountered")
            card.host = max(card.host, card.free)

        def __enter__(self) -> Device:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    class Event:
        time = 0.0

        def record(self, stream: Any = None) -> None:
            self.time = max(card.free, card.host)

        @property
        def done(self) -> bool:
            return card.host >= self.time

        def synchronize(self) -> None:
            card.host = max(card.host, self.time)

    class Stream:
        ptr = 1

        def __init__(self, non_blocking: bool = False) -> None:
            pass

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def synchronize(self) -> None:
            card.host = max(card.host, card.free)

        def begin_capture(self) -> None:
            card.recording = []

        def end_capture(self) -> Any:
            recorded, card.recording = card.recording or [], None
            if not card.capturable:
                raise RuntimeError("operation not permitted when stream is capturing")
            return SimpleNamespace(launch=lambda stream: _replay(card, recorded), upload=lambda stream: None)

    runtime = SimpleNamespace(
        memcpyDeviceToDevice=3,
        memcpyAsync=lambda to, of, size, kind, stream: card.launch(lambda: None, 2 * size / 4e12),
        memGetInfo=lambda: (card.memory, 1 << 40),
        getDeviceProperties=lambda index: {"name": b"Fake card"},
        deviceGetPCIBusId=lambda index: "0000:00:00.0",
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13020,
    )
    return SimpleNamespace(
        Device=Device,
        Event=Event,
        Stream=Stream,
        runtime=runtime,
        device=SimpleNamespace(get_cublas_handle=lambda: 1),
        get_current_stream=Stream,
        get_elapsed_time=lambda start, end: 1e3 * (end.time - start.time),
    )


def _replay(card: Card, recorded: list[tuple[Work, float]]) -> None:
    for work, _ in recorded:
        work()
    card.host += card.launch_seconds
    card.free = max(card.free, card.host) + sum(seconds for _, seconds in recorded)


_REALS = {0: np.float32, 1: np.float64, 2: np.float16, 14: ml_dtypes.bfloat16}  # cudaDataType_t
_COMPUTE = {68, 77}  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32


def _cublas(card: Card) -> dict[str, Any]:
    def matrix(pointer: int, dtype: Any, rows: int, columns: int, stride: int) -> np.ndarray:
        if stride < rows:
            raise ValueError(f"CUBLAS_STATUS_INVALID_VALUE: leading dimension {stride} of {rows} rows")
        size, count = np.dtype(dtype).itemsize, stride * (columns - 1) + rows
        flat = np.frombuffer((ctypes.c_char * (size * count)).from_address(pointer), dtype)
        return np.lib.stride_tricks.as_strided(flat, (rows, columns), (size, stride * size))

    def factors(dtype: Any, *pointers: int) -> list[float]:
        return [float(matrix(pointer, dtype, 1, 1, 1)[0, 0]) for pointer in pointers]

    def queue(ops: Any, sizes: Any, sums: Any, a: Any, b: Any, c: Any, scalars: Any, batch: int = 1) -> None:
        """Products of operands given as pointer, type, leading dimension and step from one to the next."""
        (ta, tb), (m, n, k) = ops, sizes
        alpha, beta = factors(sums, *scalars)

        def at(x: Any, i: int, rows: int, columns: int) -> np.ndarray:
            pointer, dtype, stride, step = x
            return matrix(pointer + i * step * np.dtype(dtype).itemsize, dtype, rows, columns, stride)

        def work() -> None:
            for i in range(batch):
                A = at(a, i, k, m).T if ta else at(a, i, m, k)
                B = at(b, i, n, k).T if tb else at(b, i, k, n)
                C = at(c, i, m, n)
                before = beta * C if beta else 0
                np.copyto(C, alpha * (A.astype(sums) @ B.astype(sums)) + before, casting="same_kind")

        for x, rows in ((a, k if ta else m), (b, n if tb else k), (c, m)):
            at(x, 0, rows, 1)  # the leading dimensions are looked at when the call is made
        card.launch(work, card.gemm_seconds)

    def gemm(dtype: Any) -> Callable[..., None]:
        def call(_, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):  # type: ignore[no-untyped-def]
            operands = [(x, dtype, stride, 0) for x, stride in ((a, lda), (b, ldb), (c, ldc))]
            queue((ta, tb), (m, n, k), dtype, *operands, (alpha, beta))

        return call

    def batched(dtype: Any) -> Callable[..., None]:
        def call(_, ta, tb, m, n, k, alpha, a, lda, sa, b, ldb, sb, beta, c, ldc, sc, batch):  # type: ignore[no-untyped-def]
            operands = [(a, dtype, lda, sa), (b, dtype, ldb, sb), (c, dtype, ldc, sc)]
            queue((ta, tb), (m, n, k), dtype, *operands, (alpha, beta), batch)

        return call

    def gemm_ex(_, ta, tb, m, n, k, alpha, a, of_a, lda, b, of_b, ldb, beta, c, of_c, ldc, compute, algorithm):  # type: ignore[no-untyped-def]
        stacked_ex(
            _, ta, tb, m, n, k, alpha, a, of_a, lda, 0, b, of_b, ldb, 0, beta, c, of_c, ldc, 0, 1, compute, algorithm
        )

    def stacked_ex(
        _, ta, tb, m, n, k, alpha, a, of_a, lda, sa, b, of_b, ldb, sb, beta, c, of_c, ldc, sc, batch, compute, algorithm
    ):  # type: ignore[no-untyped-def]
        if compute not in _COMPUTE:
            raise ValueError(f"CUBLAS_STATUS_NOT_SUPPORTED: compute type {compute}")
        operands = [(a, _REALS[of_a], lda, sa), (b, _REALS[of_b], ldb, sb), (c, _REALS[of_c], ldc, sc)]
        queue((ta, tb), (m, n, k), np.float32, *operands, (alpha, beta), batch)

    def gemv(dtype: Any) -> Callable[..., None]:
        def call(_, ta, m, n, alpha, a, lda, x, stride_x, beta, y, stride_y):  # type: ignore[no-untyped-def]
            if factors(dtype, alpha, beta) != [1, 0] or (stride_x, stride_y) != (1, 1):
                raise ValueError("not a plain product")
            A = matrix(a, dtype, m, n, lda)
            A = A.T if ta else A
            rows, columns = A.shape
            X, Y = matrix(x, dtype, columns, 1, columns), matrix(y, dtype, rows, 1, rows)
            card.launch(lambda: np.copyto(Y, A @ X), card.gemm_seconds)

        return call

    def set_mode(handle: int, mode: int) -> None:
        card.math_mode = mode

    return {
        "getMathMode": lambda handle: card.math_mode,
        "setMathMode": set_mode,
        "CUBLAS_OP_N": 0,
        "CUBLAS_OP_T": 1,
        "getVersion": lambda handle: 130100,
        "sgemm": gemm(np.float32),
        "dgemm": gemm(np.float64),
        "sgemmStridedBatched": batched(np.float32),
        "dgemmStridedBatched": batched(np.float64),
        "gemmEx": gemm_ex,
        "gemmStridedBatchedEx": stacked_ex,
        "sgemv": gemv(np.float32),
        "dgemv": gemv(np.float64),
    }
