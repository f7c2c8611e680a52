"""Which kernels a call launches, in which order and with what: recorded where the package launches them.

Kernels are launched by `abft_tsm2.core.launch.PreparedLaunch`, or by what `abft_tsm2.core.compiler.kernel` returns. An
address is written as a number: how many others the call has passed under the same name before. (Not of all addresses:
memory that was freed comes back under other names, and not in every run.)
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SMALLEST_ADDRESS = 1 << 32
"""Of an argument whose type is not known: a number that is no smaller is an address."""
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w*ARGUMENTS\w*)[ \t]*(.*)$", re.MULTILINE)
_PARAMETERS = re.compile(r"\bENTRY\s*\((?P<all>[^)]*)\)")


class Recorder:
    """The launches of a call.

    Attributes
    ----------
    lines : list of str
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._addresses: dict[str, dict[int, int]] = {}

    def begin(self) -> None:
        self.lines = []
        self._addresses.clear()

    def launch(self, config: Any, shape: str, values: Sequence[Any], where: Any) -> None:
        """Note one launch; values that are words are names of addresses."""
        names = parameters(config, len(values))
        shown = (
            f"{name}={self._shown(name, value, pointer, where)}"
            for (name, pointer), value in zip(names, values, strict=True)
        )
        self.lines.append(f"{config.name} {shape} {' '.join(shown)}")

    def _shown(self, name: str, value: Any, pointer: bool | None, where: Any) -> str:
        if isinstance(value, str):
            return f"{value}@{self._number(name, where[value])}"
        if isinstance(value, int) and (value >= SMALLEST_ADDRESS if pointer is None else pointer):
            return f"@{self._number(name, value)}"
        at = getattr(getattr(value, "data", None), "ptr", None)
        return repr(value) if at is None else f"@{self._number(name, at)}"

    def _number(self, name: str, address: int) -> str:
        seen = self._addresses.setdefault(name, {})
        return str(seen.setdefault(address, len(seen))) if address else "null"


@functools.cache
def parameters(config: Any, count: int) -> list[tuple[str, bool | None]]:
    """Names of a kernel's parameters, and whether they are addresses, by its text: the one way of reading its macros in
    which there are so many; numbers where there is none."""
    text = importlib.import_module("abft_tsm2.core.compiler").source(config)
    text = re.sub(r"//[^\n]*", "", text).replace("\\\n", " ")
    macros: dict[str, list[str]] = {}
    for name, value in _MACRO.findall(text):
        macros.setdefault(name, []).append(value)
    head = _PARAMETERS.search(text)
    for declared in _expanded(head["all"] if head else "", macros):
        names = [one.strip() for one in declared.split(",") if one.strip()]
        if len(names) == count:
            return [(re.findall(r"\w+", one)[-1], "*" in one) for one in names]
    return [(f"#{i}", None) for i in range(count)]


def _expanded(text: str, macros: dict[str, list[str]]) -> Iterator[str]:
    """The text with its macros of arguments replaced, in every way that the file defines them."""
    for name in re.findall(r"\w*ARGUMENTS\w*", text):
        for value in macros.get(name, [""]):
            yield from _expanded(re.sub(rf"\b{name}\b", lambda _, value=value: value, text), macros)
        return
    yield text


@contextmanager
def recorded(recorder: Recorder) -> Iterator[bool]:
    """Note all launches in the block; whether this version has the places where they are noted."""
    try:
        prepared: Any = importlib.import_module("abft_tsm2.core.launch").PreparedLaunch
        kernel = importlib.import_module("abft_tsm2.core.compiler").kernel
    except (ImportError, AttributeError):
        yield False
        return
    initialise, queue = prepared.__init__, prepared.__call__

    def made(self: Any, config: Any, grid: Any, threads: int, values: Any, *more: Any, **named: Any) -> None:
        shared = named.get("shared_bytes", 0)
        self.recorded = config, f"grid {tuple(grid)} block {threads} shared {shared}", tuple(values)
        initialise(self, config, grid, threads, values, *more, **named)

    def called(self: Any, stream: int, where: Any) -> None:
        if hasattr(self, "recorded"):
            config, shape, values = self.recorded
            recorder.launch(config, shape, values, where)
        queue(self, stream, where)

    replaced: list[tuple[Any, str]] = []
    wrapped: Any = functools.cache(lambda config: _Launched(kernel(config), config, recorder))
    try:
        prepared.__init__, prepared.__call__ = made, called
        for name, module in sorted(sys.modules.items()):
            if name.startswith("abft_tsm2.") and vars(module).get("kernel") is kernel and name != kernel.__module__:
                replaced.append((module, "kernel"))
                module.kernel = wrapped  # type: ignore[attr-defined]
        yield True
    finally:
        prepared.__init__, prepared.__call__ = initialise, queue
        for module, name in replaced:
            setattr(module, name, kernel)


class _Launched:
    """A compiled kernel whose launches are noted."""

    def __init__(self, function: Any, config: Any, recorder: Recorder) -> None:
        self._function, self._config, self._recorder = function, config, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, grid: Any, block: Any, arguments: Any, **more: Any) -> Any:
        shape = f"grid {tuple(grid)} block {tuple(block)} shared {more.get('shared_mem', 0)}"
        self._recorder.launch(self._config, shape, arguments, {})
        return self._function(grid, block, arguments, **more)


def noting(call: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """The call, before which what was noted is forgotten."""

    def noted(*operands: Any, **options: Any) -> Any:
        recorder.begin()
        return call(*operands, **options)

    return noted
