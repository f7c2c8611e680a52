"""CuPy made of NumPy, whose kernels run on the CPU: products as on a GPU, launches and records included.

Arrays lie in the host's memory, streams run what is queued at once, cuBLAS is that of `fake_card`, and what is launched
by `abft_tsm2.core.launch` is compiled by `cuda_on_cpu` at its first launch. Not a test of kernels: their arguments are
bare addresses, and nothing is watched.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import array_api_compat.numpy as compatible
import numpy as np
import pytest

from abft_tsm2 import arrays, gemm, policy
from abft_tsm2.checksum.device import check
from abft_tsm2.core import cublas, encode_both, launch, memory
from abft_tsm2.core.capture import Capture
from abft_tsm2.core.compiler import Kernel, source
from abft_tsm2.core.device import KNOWN
from abft_tsm2.gemm import captured, known, plan, replays
from tests.support.cuda_on_cpu import build
from tests.support.cuda_on_cpu.library import ORDERS, _Launch, borrowed_stacks, load
from tests.support.fake_card import Card, silently

CREATES = (
    *("empty", "empty_like", "zeros", "ones", "full", "asarray", "ascontiguousarray", "arange", "broadcast_to"),
    "stack",
)
MULTIPROCESSORS = 4


class MemoryPointer:
    """An address, and what keeps its memory."""

    device_id = 0

    def __init__(self, owner: Any, offset: int) -> None:
        self.owner, self.ptr = owner, owner.ptr + offset

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self, offset)


class ndarray(np.ndarray):
    """NumPy's array with the attributes and the constructor of CuPy's."""

    __module__ = "cupy"

    def __new__(cls, shape: Any, dtype: Any, data: MemoryPointer, strides: Any = None) -> ndarray:
        kind = np.dtype(dtype)
        strides = np.empty(shape, kind).strides if strides is None else strides
        reach = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + kind.itemsize
        buffer = (ctypes.c_char * reach).from_address(data.ptr)
        buffer.owner = data  # type: ignore[attr-defined]
        return np.ndarray(shape, kind, buffer, 0, strides).view(cls)

    @property
    def data(self) -> Any:
        return MemoryPointer(SimpleNamespace(array=self, ptr=self.ctypes.data), 0)

    @property
    def base(self) -> Any:
        found = np.ndarray.base.__get__(self)  # type: ignore[attr-defined]
        return found if isinstance(found, ndarray) else None

    @property
    def device(self) -> Any:
        return Device()


class Device:
    compute_capability = "90"
    id = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...


class Event:
    done = True

    def __init__(self, **_: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class Stream:
    """The default stream; with options, one of its own."""

    current: ClassVar[list[Stream]] = []
    handles = itertools.count(1000)

    def __init__(self, **options: Any) -> None:
        self.ptr = next(Stream.handles) if options else 0

    def __enter__(self) -> Stream:
        Stream.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        Stream.current.pop()

    def wait_event(self, event: Event) -> None: ...
    def synchronize(self) -> None: ...
    def use(self) -> None: ...
    def is_capturing(self) -> bool:
        return recording[-1] is not None

    def begin_capture(self) -> None:
        recording.append([])

    def end_capture(self) -> CapturedGraph:
        return CapturedGraph(recording.pop() or [])


recording: list[list[Callable[[], Any]] | None] = [None]
"""Of captures that have begun, what was queued."""


def run(work: Callable[[], Any]) -> None:
    """Run what is queued, or record it."""
    if recording[-1] is None:
        work()
    else:
        recording[-1].append(work)


class CapturedGraph:
    """A CUDA graph: what was recorded.

    Attributes
    ----------
    dropped : bool
        Whether it, and all that was made of it, are gone.
    """

    captured: ClassVar[list[list[Any]]] = []

    def __init__(self, work: list[Callable[[], Any]]) -> None:
        self.work = work

    def launch(self, stream: Any = None) -> None:
        for one in self.work:
            one()

    @classmethod
    def of(cls, stream: int, queue: Callable[[], None]) -> CapturedGraph:
        """`abft_tsm2.core.graphs.Graph`."""
        recording.append([])
        try:
            queue()
        finally:
            work = recording.pop()
        return cls(work or [])


class Kept:
    """`abft_tsm2.core.capture.Kept`."""

    made: ClassVar[list[Kept]] = []

    def __init__(self, graph: int, *things: Any) -> None:
        self.things, self.needed = things, True
        Kept.made.append(self)


class _Pinned(np.ndarray):
    @classmethod
    def zeros(cls, nbytes: int) -> Any:
        return np.zeros(nbytes, np.uint8).view(cls)

    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)


def _external(handle: int) -> Stream:
    stream = Stream()
    stream.ptr = handle
    return stream


def _copy_lines(to: int, pitch: int, of: int, of_pitch: int, width: int, height: int, kind: int, stream: int) -> None:
    for line in range(height):
        ctypes.memmove(to + line * pitch, of + line * of_pitch, width)


def _on_card(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its results CuPy's."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        named.pop("device", None)
        found = function(*arguments, **named)
        return found.view(ndarray) if isinstance(found, np.ndarray) else found

    return call


class ElementwiseKernel:
    """The one that there is: `arrays.in_float64`."""

    def __init__(self, takes: str, makes: str, text: str, name: str) -> None:
        assert (takes, makes) == ("float32 x", "float64 y")
        assert "cvt.f64.f32" in text

    def __call__(self, x: ndarray, y: ndarray) -> ndarray:
        assert (x.dtype, y.dtype, x.shape) == (np.float32, np.float64, y.shape)
        y[...] = x
        return y


def _astype(x: Any, dtype: Any, *, copy: bool = True) -> Any:
    """Flushes subnormal float32 to zero, as all that CuPy computes with them does."""
    if x.dtype == np.float32 and np.dtype(dtype) == np.float64:
        x = np.where(abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
    return compatible.astype(x, dtype, copy=copy)


class Kernels:
    """Kernels by a handle, compiled when they are first run.

    Attributes
    ----------
    runs : bool
        Whether launches run; if not, the repair's record says that all is clean.
    """

    def __init__(self, cache: Path) -> None:
        self.runs, self._cache = True, cache
        self._configs: list[Kernel] = []

    def handle(self, config: Kernel) -> Any:
        if config not in self._configs:
            self._configs.append(config)
        return SimpleNamespace(ptr=self._configs.index(config) + 1)

    @functools.lru_cache(None)  # noqa: B019
    def _loaded(self, config: Kernel) -> Any:
        return load(build([(config.name, source(config))], cache=self._cache).path)

    def launch(self, config: int, function: int, pointers: int, extra: None) -> int:
        """cuLaunchKernelEx."""
        run(lambda: self._run(config, function, pointers))
        return 0

    def _run(self, config: int, function: int, pointers: int) -> None:
        shape, kernel = launch._LaunchConfig.from_address(config), self._configs[function - 1]
        if not self.runs:
            if kernel.file == "repair/repair.cu":
                _write_clean(pointers)
            return
        loaded, text, offset = self._loaded(kernel), ctypes.c_char_p(), ctypes.c_size_t()
        entry = ctypes.cast(getattr(loaded, f"call_{kernel.name}"), ctypes.c_void_p)
        size, order = (shape.grid, shape.block, shape.shared_bytes), ORDERS.index("forward")
        with borrowed_stacks() as stacks:
            how = _Launch(kernel.name.encode(), *size, order, 0, stacks)
            where = ctypes.addressof(how), entry, pointers, ctypes.addressof(text), ctypes.addressof(offset)
            assert loaded.cuda_on_cpu_launch(*where) == 0, text.value


def _write_clean(pointers: int) -> None:
    """The record of a product in which nothing was found, by the arguments of its repair."""
    values = [ctypes.c_longlong.from_address(at).value for at in (ctypes.c_void_p * 58).from_address(pointers)]
    call, at, tally, ring = values[-4:]
    turn = 0
    if tally:
        words = (ctypes.c_uint64 * 16).from_address(tally)
        call, words[0] = words[0], words[0] + 1
        turn = words[2] = words[2] + 1
        at += 8 * memory.WORDS * (call & (ring - 1))
    record = (ctypes.c_uint64 * memory.WORDS).from_address(at)
    record[0], record[1], record[2], record[4], record[7] = call, values[0] * values[3] << 32, 0, turn, call << 8
    record[6] = 0


def install(patch: pytest.MonkeyPatch, cache: Path) -> tuple[ModuleType, Kernels]:
    """Put it in place of CuPy; the module, and its kernels."""
    kernels, modules = Kernels(cache), Card().modules()
    cupy = modules["cupy"]
    for name in dir(np):
        if not (name.startswith("_") or hasattr(cupy, name)):
            setattr(cupy, name, getattr(np, name))
    for name in CREATES:
        setattr(cupy, name, _on_card(getattr(np, name)))
    cupy.__dict__.update(
        ndarray=ndarray,
        ElementwiseKernel=ElementwiseKernel,
        matmul=silently(np.matmul),
        may_share_memory=np.shares_memory,
    )
    vars(cupy.cuda).update(
        Device=Device,
        Event=Event,
        Stream=Stream,
        ExternalStream=_external,
        get_current_stream=lambda: Stream.current[-1] if Stream.current else Stream(),
        MemoryPointer=MemoryPointer,
        UnownedMemory=lambda address, nbytes, owner, device=0: SimpleNamespace(ptr=address, owner=owner),
        PinnedMemory=_Pinned.zeros,
        alloc_pinned_memory=_Pinned.zeros,
    )
    vars(cupy.cuda.runtime).update(
        getDevice=lambda: 0,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDefault=4,
        memcpy2DAsync=_copy_lines,
        memcpyAsync=lambda to, of, nbytes, kind, stream: ctypes.memmove(to, of, nbytes),
        memsetAsync=lambda at, value, nbytes, stream: ctypes.memset(at, value, nbytes),
        streamSynchronize=lambda stream: None,
    )
    modules["cupy.cuda"] = cupy.cuda
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    xp = ModuleType("array_api_compat.cupy")
    for name in dir(compatible):
        found = getattr(compatible, name)
        if not name.startswith("_"):
            setattr(xp, name, _on_card(found) if callable(found) and not isinstance(found, type) else found)
    xp.astype = _on_card(_astype)  # type: ignore[attr-defined]
    of_others = arrays._namespace_of
    patch.setattr(arrays, "_namespace_of", lambda kind: xp if issubclass(kind, ndarray) else of_others(kind))
    patch.setattr(encode_both, "_on_device", lambda task, multiprocessors: encode_both._by_blocks(task))
    patch.setattr(launch, "kernel", kernels.handle)
    patch.setattr(launch, "_driver", lambda: kernels.launch)
    card = replace(KNOWN["H200"], multiprocessors=MULTIPROCESSORS)
    for module in (plan, check, encode_both):
        patch.setattr(module, "device_of", lambda index: card)
    for module, names in (
        (plan, ("_side_streams", "_plans")),
        (known, ("_known",)),
        (memory, ("_free", "_kept", "_streams")),
    ):
        for name in names:
            patch.setattr(module, name, {})
    patch.setattr(policy, "_open", deque())  # no report outlives the kernels
    patch.setattr(replays, "Graph", CapturedGraph.of)
    patch.setattr(replays, "relaxed", contextlib.nullcontext)
    patch.setattr(gemm, "relaxed", contextlib.nullcontext)
    for name in ("_made", "_seen", "_workspaces"):
        patch.setattr(replays, name, {})
    patch.setattr(cublas, "captured_on", lambda stream, workspace: contextlib.nullcontext(stream))
    patch.setattr(cublas, "prepare_capture", lambda: None)
    patch.setattr(
        cublas.Gemm, "on", lambda gemm, handle, *arguments: run(lambda: cublas.Gemm.__call__(gemm, *arguments))
    )
    for name, stands_for in {
        "relaxed": contextlib.nullcontext,
        "capture_of": lambda handle: Capture(len(recording), 0) if recording[-1] is not None else None,
        "Kept": Kept,
        "release": lambda: None,
    }.items():
        patch.setattr(captured, name, stands_for)
    patch.setattr(captured, "_streams", {})
    patch.setattr(check, "_base_on", functools.lru_cache(check._base_on.__wrapped__))
    return cupy, kernels


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> tuple[Any, Kernels]:
    """CuPy and the kernels, for the tests of a module that has this, and `cp`, among its names."""
    return install(monkeypatch, build_cache)


@pytest.fixture
def cp(card: tuple[Any, Kernels]) -> Any:
    return card[0]
