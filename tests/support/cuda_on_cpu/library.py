"""Kernels compiled for the CPU, and how one is run: in this process, or under AddressSanitizer in another."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

ORDERS = ("forward", "reverse", "random")
GUARD = 4096  # bytes on both sides of an array: NaN to read, and compared after the run
POISON = np.array([0xFB, 0xFF], np.uint8)  # NaN in every format, as in shared memory
MOST_THREADS = 1024


@dataclass(frozen=True)
class _Address:
    value: int


# What a letter of a kernel's signature takes: the ctypes type, the types of arguments, and how to say it.
_PARAMETERS: dict[str, tuple[Any, Any, str]] = {
    "q": (ctypes.c_longlong, (int, np.int64, np.uint64), "an int (long long)"),
    "i": (ctypes.c_int, (np.int32, np.uint32), "a numpy.int32 or numpy.uint32"),
    "f": (ctypes.c_float, np.float32, "a numpy.float32"),
    "d": (ctypes.c_double, float, "a numpy.float64"),
    "p": (ctypes.c_void_p, _Address, "a NumPy array"),
}


class KernelFault(Exception):
    """What a kernel did wrong, where, and in which thread."""


class _Launch(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("order", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("stacks", ctypes.c_void_p),
    )


_free_stacks: list[Any] = []


@contextlib.contextmanager
def borrowed_stacks() -> Iterator[int]:
    """Address of the stacks of a block's threads, for one launch: kernels of all libraries run on the same."""
    try:
        stacks = _free_stacks.pop()
    except IndexError:
        stacks = (ctypes.c_void_p * MOST_THREADS)()
    try:
        yield ctypes.addressof(stacks)
    finally:
        _free_stacks.append(stacks)


@dataclass
class Memory:
    """The bytes from an array's first element in memory to its last: all that a kernel may touch.

    Attributes
    ----------
    data : (bytes,) uint8 ndarray
    start : int
        Where element [0, ...] lies in them.
    address : int
        Of the original, whose alignment to 16 bytes a copy keeps.
    writeable : bool
    """

    data: np.ndarray
    start: int
    address: int
    writeable: bool

    @classmethod
    def of(cls, array: np.ndarray) -> Memory:
        """A view of the array's memory."""
        address = array.__array_interface__["data"][0]
        if array.size == 0:
            return cls(np.empty(0, np.uint8), 0, address, False)
        reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
        low = sum(step for step in reach if step < 0)
        count = sum(step for step in reach if step > 0) - low + array.itemsize
        data = np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address + low))
        return cls(data, -low, address + low, array.flags.writeable)


class Library:
    """Kernels that `tests.support.cuda_on_cpu.build` has compiled."""

    def __init__(self, path: Path, names: Sequence[str], *, sanitizer: Path | None = None) -> None:
        self.path = path
        self.names = tuple(names)
        self._sanitizer = sanitizer
        self._lock = threading.Lock()
        self._loaded: Any = None
        self._worker: _Worker | None = None

    def run(
        self,
        name: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[Any],
        *,
        shared_bytes: int = 0,
        order: str = "forward",
        seed: int = 0,
    ) -> None:
        """Run a kernel to its end; arrays are changed in place.

        Parameters
        ----------
        name : str
        grid, block : int or tuple of up to three
        args : sequence
            As in a CUDA launch: NumPy arrays for pointers (to element [0, ...], the kernel may touch what lies between
            the first and the last element in memory), int for long long, NumPy scalars by their type. No two arrays
            may overlap.
        shared_bytes : int
            Dynamic shared memory of a block.
        order : {"forward", "reverse", "random"}
            In which blocks run, and threads between two barriers.
        seed : int
            Of the random order.

        Raises
        ------
        KernelFault
            With kernel, place, block, thread, array and index as far as they are known. Arrays are left as they were.
        TypeError, ValueError
            For arguments that are not the kernel's, or a launch that CUDA refuses.
        """
        if name not in self.names:
            raise ValueError(f"there is no kernel {name!r} here, but {', '.join(self.names)}")
        if order not in ORDERS:
            raise ValueError(f"order {order!r} is not one of {', '.join(ORDERS)}")
        grid, block = _three(grid, "grid"), _three(block, "block")
        if np.prod(block) > MOST_THREADS:
            raise ValueError(f"a block of {block} has {np.prod(block)} threads, at most {MOST_THREADS} are possible")
        given = [Memory.of(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        _check_apart([arg for arg in given if isinstance(arg, Memory)])
        request = (name, grid, block, given, shared_bytes, ORDERS.index(order), seed)
        with self._lock:
            if self._sanitizer is None:
                if self._loaded is None:
                    self._loaded = load(self.path)
                results = execute(self._loaded, *request, guard=GUARD)
            else:
                if self._worker is None:
                    self._worker = _Worker(self.path, self._sanitizer)
                try:
                    results = self._worker.ask(request)
                finally:
                    if self._worker.gone:
                        self._worker = None
        for memory, result in zip([arg for arg in given if isinstance(arg, Memory)], results, strict=True):
            if memory.writeable:
                memory.data[...] = result

    def close(self) -> None:
        """End the process that runs under AddressSanitizer, if there is one; the next run starts another."""
        with self._lock:
            if self._worker is not None:
                self._worker.stop()
                self._worker = None


def load(path: Path) -> Any:
    loaded = ctypes.CDLL(str(path))
    loaded.cuda_on_cpu_launch.argtypes = [ctypes.c_void_p] * 5
    return loaded


def execute(
    loaded: Any,
    name: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[Any],
    shared_bytes: int,
    order: int,
    seed: int,
    *,
    guard: int,
) -> list[np.ndarray]:
    """Run a kernel on copies of its arrays between `guard` bytes; returns the copies.

    Raises
    ------
    KernelFault
    TypeError
    """
    signature_of = getattr(loaded, f"signature_{name}")
    signature_of.restype = ctypes.c_char_p
    signature = signature_of().decode()
    if len(signature) != len(args):
        raise TypeError(f"{name} takes {len(signature)} arguments, not {len(args)}")
    copies = {i: _Copy(arg, guard) for i, arg in enumerate(args) if isinstance(arg, Memory)}
    try:
        values = [
            _value(name, i, letter, copies[i].pointer if i in copies else arg)
            for i, (letter, arg) in enumerate(zip(signature, args, strict=True))
        ]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        shape = (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block)
        text, offset = ctypes.c_char_p(), ctypes.c_size_t()
        entry = ctypes.cast(getattr(loaded, f"call_{name}"), ctypes.c_void_p)
        with borrowed_stacks() as stacks:
            launch = _Launch(name.encode(), *shape, shared_bytes, order, seed, stacks)
            where = (ctypes.addressof(launch), entry, pointers, ctypes.addressof(text), ctypes.addressof(offset))
            failed = loaded.cuda_on_cpu_launch(*where)
        if failed:
            message = (text.value or b"").decode(errors="replace")
            raise KernelFault(message + _source_line(Path(loaded._name), offset.value))
        for i, copy in copies.items():
            copy.check(name, i)
        return [copy.result() for copy in copies.values()]
    finally:
        for copy in copies.values():
            copy.free()


class _Copy:
    """An array's bytes in memory of its own, exactly as long: under AddressSanitizer each byte outside is trapped."""

    def __init__(self, memory: Memory, guard: int) -> None:
        self._size = memory.data.size
        skip = memory.address % 16  # malloc gives multiples of 16
        self._base = _libc().malloc(ctypes.c_size_t(skip + self._size + 2 * guard))
        before = self._base + skip
        self._zones = {"before": _bytes_at(before, guard), "after": _bytes_at(before + guard + self._size, guard)}
        for zone in self._zones.values():
            zone[...] = np.resize(POISON, guard)
        self._inside = _bytes_at(before + guard, self._size)
        self._inside[...] = memory.data
        self.pointer = _Address(before + guard + memory.start)

    def check(self, name: str, argument: int) -> None:
        for side, zone in self._zones.items():
            wrong = np.flatnonzero(zone != np.resize(POISON, zone.size))
            if wrong.size:
                distance = wrong[0] + 1 if side == "after" else zone.size - wrong[-1]
                raise KernelFault(
                    f"global memory overrun: kernel {name} wrote {wrong.size} byte(s) outside of argument {argument}, "
                    f"the nearest one {distance} byte(s) {side} it ({self._size} bytes)"
                )

    def result(self) -> np.ndarray:
        return self._inside.copy()

    def free(self) -> None:
        _libc().free(ctypes.c_void_p(self._base))


class _Worker:
    """The process that runs kernels under AddressSanitizer, which ends it at the first error."""

    def __init__(self, library: Path, sanitizer: Path) -> None:
        options = "detect_leaks=0:detect_stack_use_after_return=0:symbolize=1"  # Python's own leaks are no matter here
        environment = {**os.environ, "LD_PRELOAD": str(sanitizer), "ASAN_OPTIONS": options}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by _stop
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.sanitized", str(library)],
            cwd=Path(__file__).parents[3],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.stop = weakref.finalize(self, _stop, self._process, self._errors)

    @property
    def gone(self) -> bool:
        return not self.stop.alive

    def ask(self, request: tuple[Any, ...]) -> list[np.ndarray]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError):
            self._process.wait()
            self._errors.seek(0)
            report = self._errors.read().decode(errors="replace")
            self.stop()
            raise KernelFault(f"address error: kernel {request[0]}\n{_summary(report)}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _stop(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()  # the worker ends with its input
    process.wait()
    errors.close()


def _summary(report: str) -> str:
    """What AddressSanitizer says of the error and of the memory, and the lines of the kernel."""
    kept = re.compile(r"ERROR: AddressSanitizer|(READ|WRITE) of size|^\s+#\d+ .* in |is located|^kernel ")
    lines = [line for line in report.splitlines() if kept.search(line)]
    return "\n".join(lines[:16] or report.splitlines()[-16:])


def _source_line(library: Path, offset: int) -> str:
    """`` (tsm2r.cu:80)``: the line of the kernel that a place in the library's code comes from; empty if not known."""
    if not offset or shutil.which("addr2line") is None:
        return ""
    command = ["addr2line", "-i", "-e", str(library), hex(offset)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    places = [Path(line.partition(" ")[0]).name for line in found]
    return next((f" ({place})" for place in places if place.partition(":")[0] not in ("cuda_on_cpu.h", "??")), "")


def _three(sizes: int | tuple[int, ...], what: str) -> tuple[int, ...]:
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"{what} is {sizes}: one to three sizes of at least 1")
    return (*sizes, 1, 1)[:3]


def _check_apart(memories: Sequence[Memory]) -> None:
    spans = sorted((memory.address, memory.address + memory.data.size) for memory in memories if memory.data.size)
    if any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        raise ValueError("two arrays overlap: each would be a copy of its own here; pass arrays that lie apart")


def _value(name: str, number: int, letter: str, arg: Any) -> Any:
    """The argument as the ctypes value that a parameter of this letter takes."""
    if letter not in _PARAMETERS:
        raise TypeError(f"parameter {number} of {name} is neither a pointer nor of 4 or 8 bytes")
    made, types, wanted = _PARAMETERS[letter]
    if arg is None and types is _Address:
        return made(0)
    if not isinstance(arg, types) or isinstance(arg, bool):
        given = "NumPy array" if isinstance(arg, _Address) else type(arg).__name__
        raise TypeError(f"argument {number} of {name} is a {given}, the kernel takes {wanted}")
    if isinstance(arg, _Address):
        return made(arg.value)
    return made(float(arg) if letter in "fd" else int(arg))


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    return libc


def _bytes_at(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
