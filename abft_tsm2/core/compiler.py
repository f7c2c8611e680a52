"""Kernel text and a `Config` in, a launchable kernel out: NVRTC through CuPy.

The text that is compiled is complete: the constants stand in front of it as ``#define``s and included files are
inlined, so that CuPy's disk cache, which knows the text but not the files, sees every change. Options are always the
same: distinct ones cost a run of the preprocessor in each process. Each kernel is one ``extern "C"`` entry, named after
its configuration.

CuPy adds ``-ftz=true``: in float32, subnormal operands and results count as zero.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Hashable, Iterable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Protocol

from abft_tsm2.errors import KernelCompileError

OPTIONS = ("-std=c++17",)
_INCLUDE = re.compile(r'#include "(?P<name>[\w./]+)"\n')
_ONCE = "#pragma once\n"


class Kernel(Hashable, Protocol):
    """What a compiled kernel is described by: a frozen configuration."""

    @property
    def name(self) -> str:
        """Name of the compiled kernel, different for each configuration."""

    @property
    def file(self) -> str:
        """The file of kernels/ that holds it."""

    @property
    def macros(self) -> Mapping[str, str | int]:
        """The constants that the file asks for."""


_kernels: dict[tuple[Kernel, int], Any] = {}
_locks: dict[tuple[Kernel, int], threading.Lock] = {}
_guard = threading.Lock()


def source(config: Kernel) -> str:
    """The complete CUDA C++ text of one kernel."""
    constants = {**config.macros, "ENTRY": config.name}
    head = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    return head + _inlined(config.file)


@functools.cache
def _folder() -> Traversable:
    """kernels/: inside the installed package, and beside it in a source tree."""
    package = resources.files("abft_tsm2")
    installed = package.joinpath("kernels")
    return installed if installed.is_dir() else package.joinpath("..", "kernels")


@functools.cache
def _inlined(name: str) -> str:
    """A file of kernels/ with what it includes in place of the ``#include``s, each file once."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        seen.add(name)
        text = _folder().joinpath(name).read_text(encoding="utf-8")
        text = text.replace(_ONCE, "\n", 1)  # the line stays, so that messages count right

        def included(match: re.Match[str]) -> str:
            after = text.count("\n", 0, match.end()) + 1
            inner = "" if match["name"] in seen else expand(match["name"])
            return f'{inner}#line {after} "{name}"\n'

        return f'#line 1 "{name}"\n' + _INCLUDE.sub(included, text)

    return expand(name)


def kernel(config: Kernel) -> Any:
    """The compiled kernel, to be called as ``kernel(grid, block, arguments)`` on the current device and stream.

    Compiled at the first use, or loaded from CuPy's cache on disk (``CUPY_CACHE_DIR``); where that cannot be written,
    each process compiles anew. May be called from any thread.

    Raises
    ------
    KernelCompileError
        With the compiler's messages, which name file and line, and the configuration.
    """
    import cupy

    key = (config, int(cupy.cuda.runtime.getDevice()))
    found = _kernels.get(key)
    if found is None:
        with _guard:
            lock = _locks.setdefault(key, threading.Lock())
        with lock:  # one thread compiles, the others wait for it
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = _compiled(config)
    return found


def precompile(configs: Iterable[Kernel]) -> int:
    """Compile kernels for the current device ahead of their first use; returns how many.

    Raises
    ------
    KernelCompileError
        For the first one that does not compile.
    """
    count = 0
    for config in configs:
        kernel(config)
        count += 1
    return count


def _compiled(config: Kernel) -> Any:
    import cupy

    text = source(config)
    try:
        module = cupy.RawModule(code=text, options=OPTIONS, backend="nvrtc")
        try:
            module.compile()
        except OSError:  # the cache on disk: read-only, or full
            cubin, _ = cupy.cuda.compiler.compile_using_nvrtc(text, OPTIONS, filename=Path(config.file).name)
            module = cupy.cuda.function.Module()
            module.load(cubin)
        return module.get_function(config.name)
    except cupy.cuda.compiler.CompileException as error:
        raise KernelCompileError(f"{config} does not compile:\n{error}") from error
