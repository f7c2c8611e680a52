"""The compiler: the text it makes, its caches, threads and errors; a stand-in plays CuPy."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from abft_tsm2.core import compiler
from abft_tsm2.core.kernels import Shape, Stream
from abft_tsm2.core.paper.config import Config
from abft_tsm2.errors import KernelCompileError

CONFIG = Config("Opt-2", "float64", 128, 16, 12, 4)
STREAM = Stream("rows", "float16", "float16", "float32", "float32", 16, 4, Shape(128, 4, 1, 2, 3))

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


class CompileException(Exception):
    """CuPy's."""


class Driver:
    """What the compiler sees of CuPy, with a count of what it is asked for."""

    def __init__(self, compile_module: Callable[[], None] = lambda: None) -> None:
        self.compile_module = compile_module
        self.device, self.texts, self.uncached = 0, [], 0

    def module(self, code: str, options: tuple[str, ...], backend: str) -> Any:
        assert (options, backend) == (compiler.OPTIONS, "nvrtc")
        self.texts.append(code)
        return SimpleNamespace(compile=self.compile_module, get_function=lambda name: (name, "cached"))

    def compile_using_nvrtc(self, code: str, options: tuple[str, ...], filename: str) -> tuple[bytes, None]:
        self.uncached += 1
        return code.encode(), None

    def as_cupy(self) -> Any:
        loaded = SimpleNamespace(load=lambda cubin: None, get_function=lambda name: (name, "in memory"))
        cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: self.device),
            compiler=SimpleNamespace(CompileException=CompileException, compile_using_nvrtc=self.compile_using_nvrtc),
            function=SimpleNamespace(Module=lambda: loaded),
        )
        return SimpleNamespace(cuda=cuda, RawModule=self.module)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Driver], Driver]:
    def install(driver: Driver) -> Driver:
        monkeypatch.setattr(compiler, "_kernels", {})
        monkeypatch.setattr(compiler, "_locks", {})
        monkeypatch.setitem(sys.modules, "cupy", driver.as_cupy())
        return driver

    return install


def test_the_text_is_complete() -> None:
    text = compiler.source(CONFIG)
    assert "#include" not in text
    assert "#pragma once" not in text
    for name, value in (("REAL", "double"), ("T1", 128), ("T2", 16), ("T3", 12), ("TCF", 4), ("VARIANT", "opt2")):
        assert f"#define {name} {value}\n" in text
    assert f"#define ENTRY {CONFIG.name}\n" in text
    assert text.count("INLINE void load_A") == 1  # tile.cuh is included twice


def test_the_text_of_a_kernel_for_todays_gpus_is_complete() -> None:
    text = compiler.source(STREAM)
    assert "#include" not in text
    types = {"A_TYPE": "float16", "B_TYPE": "float16", "ACC": "float", "C_TYPE": "float"}
    sizes = {"WIDTH": 16, "T1": 128, "T2": 4, "T3": 1, "TCF": 4, "PAIRS": 2, "BLOCKS": 3}
    for name, value in {**types, **sizes, "ENTRY": STREAM.name}.items():
        assert f"#define {name} {value}\n" in text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CONFIG, {"tsm2/index.cuh", "paper/tile.cuh", "paper/prefetch.cuh", "paper/tsm2l.cu"}),
        (STREAM, {f"tsm2/{name}" for name in ("index.cuh", "wide.cuh", "pieces.cuh", "split.cuh", "tsm2r_rows.cu")}),
    ],
)
def test_line_directives_lead_to_the_line_of_the_file(config: compiler.Kernel, expected: set[str]) -> None:
    """Every line of the text that has words is the line of the file that the last #line says it is."""
    files = {str(p.relative_to(KERNELS)): p.read_text().splitlines() for p in KERNELS.glob("*/*.cu*")}
    file, number, seen = "", 0, set()
    for line in compiler.source(config).splitlines():
        directive = re.fullmatch(r'#line (\d+) "([\w./]+)"', line)
        if directive:
            number, file = int(directive[1]), directive[2]
            continue
        if file and line.strip():
            assert files[file][number - 1] == line
            seen.add(file)
        number += 1
    assert seen == expected


def test_every_constant_changes_the_text() -> None:
    configs = [CONFIG, Config("Opt-1", "float64", 128, 16, 12, 4), Config("Opt-2", "float32", 128, 16, 12, 4)]
    configs += [Config("Opt-2", "float64", *numbers) for numbers in ((64, 16, 12, 4), (128, 8, 12, 4), (128, 16, 8, 4))]
    configs.append(Config("Opt-2", "float64", 128, 16, 12, 2))
    assert len({compiler.source(config) for config in configs}) == len(configs)


def test_a_kernel_is_compiled_once_a_device(play: Callable[[Driver], Driver]) -> None:
    driver = play(Driver())
    first = compiler.kernel(CONFIG)
    assert first == (CONFIG.name, "cached")
    assert compiler.kernel(CONFIG) is first
    assert len(driver.texts) == 1
    driver.device = 1
    compiler.kernel(CONFIG)
    assert len(driver.texts) == 2
    assert compiler.precompile([CONFIG, Config("V0", "float32", 128)]) == 2
    assert len(driver.texts) == 3


def test_threads_wait_for_the_one_that_compiles(play: Callable[[Driver], Driver]) -> None:
    driver = play(Driver(lambda: time.sleep(0.05)))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.kernel(CONFIG))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.texts) == 1
    assert len(found) == 8
    assert all(kernel is found[0] for kernel in found)


def test_a_cache_that_cannot_be_written_is_done_without(play: Callable[[Driver], Driver]) -> None:
    def read_only() -> None:
        raise PermissionError("read-only file system")

    driver = play(Driver(read_only))
    assert compiler.kernel(CONFIG) == (CONFIG.name, "in memory")
    assert driver.uncached == 1
    compiler.kernel(CONFIG)
    assert driver.uncached == 1


def test_an_error_has_the_compilers_words_and_the_configuration_and_is_not_remembered(
    play: Callable[[Driver], Driver],
) -> None:
    def broken() -> None:
        raise CompileException('tsm2l.cu(17): error: identifier "x" is undefined')

    driver = play(Driver(broken))
    for _ in range(2):
        with pytest.raises(KernelCompileError, match=r"(?s)Opt-2.*t2=16.*tsm2l\.cu\(17\): error"):
            compiler.kernel(CONFIG)
    driver.compile_module = lambda: None
    assert compiler.kernel(CONFIG) == (CONFIG.name, "cached")
