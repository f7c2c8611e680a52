"""CUDA C++ text in, a `Library` of kernels that run on this CPU out.

The text is what NVRTC compiles, and so it stays but for the declarations of shared arrays, which C++ has no means to
watch (`translate`). Several kernels share a unit that g++ compiles, each in a namespace of its own and without the
macros of the one before.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.cuda_on_cpu.library import Library

HERE = Path(__file__).parent
RUNTIME = ("runtime.cpp", "fibers.cpp", "watch.cpp")
SOURCES = ("cuda_on_cpu.h", "runtime.h", *RUNTIME)
KERNELS_PER_UNIT = 8  # the header takes g++ 0.3 s a unit, a kernel about as much again
KEPT_SECONDS = 7 * 24 * 3600.0

# Every variable starts with bytes 0xFE, so that one that is used before it was set gives wild numbers. The passes left
# out would let g++ take an unset scalar for whatever suits it, before the pattern gets there. CUDA reads two doubles as
# a double2: no strict aliasing; but from other than multiples of 16 bytes it refuses to, and so does this, as with
# indices outside of a thread's own array. Debug information knows the lines of inlined functions, for messages; of
# version 5, addr2line takes the first file for another.
FLAGS = (
    *("-std=c++17", "-O1", "-gdwarf-4", "-g1", "-fPIC", "-w", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-strict-aliasing", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", "-fno-tree-ccp", "-fno-tree-fre"),
    *("-fno-tree-copy-prop", "-fno-tree-dominator-opts", "-fno-tree-phiprop"),
    *("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"),
)
RUNTIME_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti")

_SKIPPED = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
_TYPE = r"(?:__align__\(\d+\)\s+)?(?P<type>[A-Za-z_]\w*(?:\s+[A-Za-z_]\w*)*)"
_SHARED = re.compile(
    rf"(?P<skipped>{_SKIPPED})"
    rf"|(?P<dynamic>extern\s+)?__shared__\s+{_TYPE}\s+(?P<name>\w+)\s*\[(?P<count>[^\]\n]*)\]\s*;"
    r"|(?P<other>__shared__)",
    re.DOTALL,
)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)


class BuildError(Exception):
    """A kernel that g++ does not compile, or no g++."""


def translate(text: str) -> str:
    """The text with its shared arrays turned into watched ones, line for line.

    Three forms, outside of comments and strings::

        __shared__ T name[count];           an array of cuda_on_cpu.h, at block scope
        extern __shared__ T name[];         the same, of the launch's dynamic shared memory
        f(const T* name, ...)               a parameter with the name of a shared array takes such an array

    Raises
    ------
    BuildError
        For a declaration of any other form.
    """
    names = {found["name"] for found in _SHARED.finditer(text) if found["name"]}

    def declaration(found: re.Match[str]) -> str:
        if found["skipped"] is not None:
            return found[0]
        if found["other"]:
            line = text.count("\n", 0, found.start()) + 1
            raise BuildError(
                f"line {line} declares shared memory in a way that cannot be watched: "
                "write `__shared__ T name[count];` or `extern __shared__ T name[];`, one array a declaration"
            )
        kind, name = found["type"], found["name"]
        made = f"dynamic_array<{kind}>" if found["dynamic"] else f"static_array<{kind}, ({found['count']})>"
        return (
            f'static ::cuda_on_cpu::Declaration {name}_declaration{{"{name}", {{__FILE__, __LINE__}}}}; '
            f"const auto {name} = ::cuda_on_cpu::{made}({name}_declaration);" + "\n" * found[0].count("\n")
        )

    text = _SHARED.sub(declaration, text)
    if not names:
        return text
    parameter = re.compile(
        rf"(?P<skipped>{_SKIPPED})"
        rf"|\b(?:const\s+)?(?P<type>[A-Za-z_]\w*)\s*\*\s*(?:const\s+|__restrict__\s+)*"
        rf"(?P<name>{'|'.join(sorted(names))})(?=\s*[,)])",
        re.DOTALL,
    )

    def taken(found: re.Match[str]) -> str:
        if found["skipped"] is not None or found["type"] in ("return", "const"):
            return found[0]
        return f"const ::cuda_on_cpu::SharedArray<{found['type']}> {found['name']}" + "\n" * found[0].count("\n")

    return parameter.sub(taken, text)


def build(
    kernels: Sequence[tuple[str, str]],
    *,
    sanitize: bool = False,
    ucontext: bool = False,
    cache: Path | None = None,
) -> Library:
    """Compile kernels for this CPU.

    Parameters
    ----------
    kernels : sequence of (name, text)
        The name of each kernel's ``extern "C" __global__`` function, unique here, and its complete CUDA C++ text.
    sanitize : bool
        With AddressSanitizer: every access to memory is checked, and the kernels run in a process of their own.
    ucontext : bool
        Switch between threads by ``swapcontext``, as on other processors, instead of the assembler of x86-64.
    cache : Path, optional
        Folder that keeps what was compiled, by a hash of texts, flags and compiler; a temporary one of the user's by
        default. May be shared by processes.

    Raises
    ------
    BuildError
        With the compiler's message, which names the kernel's file and line.
    """
    cache = cache or Path(tempfile.gettempdir()) / f"cuda_on_cpu-{os.getuid()}"
    cache.mkdir(parents=True, exist_ok=True)
    _forget_old(cache)
    compiler = _compiler()
    extra: tuple[str, ...] = ("-fsanitize=address",) if sanitize else ()
    extra += ("-DCUDA_ON_CPU_UCONTEXT",) if ucontext else ()
    header = "".join((HERE / name).read_text() for name in SOURCES)
    salt = header + _version(compiler)

    def compiled(text: str, flags: Sequence[str]) -> Path:
        key = hashlib.sha256("\0".join([salt, text, *flags]).encode()).hexdigest()[:32]
        return _made(cache / f"{key}.o", [compiler, "-x", "c++", "-", "-c", "-I", str(HERE), *flags], text)

    names = [name for name, _ in kernels]
    if len(set(names)) < len(names):
        raise BuildError(f"two kernels of one name among {', '.join(names)}")
    units = [_unit(kernels[i : i + KERNELS_PER_UNIT]) for i in range(0, len(kernels), KERNELS_PER_UNIT)]
    jobs = [(unit, (*FLAGS, *extra)) for unit in units]
    jobs += [((HERE / name).read_text(), (*RUNTIME_FLAGS, *extra)) for name in RUNTIME]
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    # Two processes that need the same library start at opposite ends of it, each on one core.
    order = jobs[::-1] if worker.removeprefix("gw").isdigit() and int(worker[2:]) % 2 else jobs
    with ThreadPoolExecutor(1 if worker else os.cpu_count()) as pool:
        made = dict(zip(order, pool.map(lambda job: compiled(*job), order), strict=True))
    objects = [str(made[job]) for job in jobs]
    key = hashlib.sha256("\0".join(objects).encode()).hexdigest()[:32]
    library = _made(cache / f"{key}.so", [compiler, "-shared", *extra, *objects, "-ldl"])
    return Library(library, names, sanitizer=_sanitizer(compiler) if sanitize else None)


def _unit(kernels: Sequence[tuple[str, str]]) -> str:
    parts = ['#include "cuda_on_cpu.h"\n']
    for name, text in kernels:
        undefined = "".join(f"#undef {macro}\n" for macro in dict.fromkeys(_DEFINE.findall(text)))
        kernel = f"unit_{name}::{name}"
        parts += [
            f'namespace unit_{name} {{\n#line 1 "{name}"\n{translate(text)}\n}}\n{undefined}',
            f'extern "C" __attribute__((visibility("default"), used)) const char* signature_{name}() '
            f"{{ return cuda_on_cpu::Entry<{kernel}>::signature; }}\n",
            f'extern "C" __attribute__((visibility("default"), used)) void call_{name}(void** arguments) '
            f"{{ cuda_on_cpu::Entry<{kernel}>::call(arguments); }}\n",
        ]
    return "".join(parts)


def _compiler() -> str:
    wanted = os.environ.get("CXX", "g++")
    found = shutil.which(wanted)
    if found is None:
        raise BuildError(
            f"there is no {wanted!r} to compile kernels for the CPU: install g++ 12 or newer "
            "(Debian, Ubuntu: apt-get install g++), or name another one by the variable CXX"
        )
    return found


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout


@functools.cache
def _sanitizer(compiler: str) -> Path:
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    path = Path(found.stdout.strip())
    if not path.is_absolute():
        raise BuildError(f"{compiler} has no AddressSanitizer: install libasan of its version (libgcc-12-dev for 12)")
    return path.resolve()


def _made(target: Path, command: Sequence[str], text: str | None = None) -> Path:
    """`target`, made by the command where it is not there yet: once, whoever else wants it at the same time."""
    with _locked(target.with_suffix(".lock")):
        if target.exists():
            os.utime(target)
            return target
        unfinished = target.with_suffix(".unfinished")
        done = subprocess.run(
            [*command, "-o", str(unfinished)], input=text, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            first = "\n".join(done.stderr.splitlines()[:30])
            raise BuildError(f"{Path(command[0]).name} fails:\n{first}")
        unfinished.replace(target)
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget_old(cache: Path) -> None:
    for path in cache.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if path.stat().st_mtime < time.time() - KEPT_SECONDS:
                path.unlink()
