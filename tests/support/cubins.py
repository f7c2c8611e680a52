"""Kernels that NVRTC has compiled, kept from one run of the tests to the next; and which of them every run compiles."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks import registers


class Cubins:
    """`benchmarks.registers.compiled`, kept in a folder by a hash of text, architecture, its options and NVRTC."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._salt = version("nvidia-cuda-nvrtc") + Path(registers.__file__).read_text()

    def __call__(self, text: str, architecture: str) -> tuple[bytes, str]:
        key = hashlib.sha256("\0".join([self._salt, architecture, text]).encode()).hexdigest()[:32]
        path = self._folder / f"{key}.cubin"
        if path.exists():
            os.utime(path)  # what is not used for a week goes (cuda_on_cpu/build.py)
            code, log = pickle.loads(path.read_bytes())
            return code, log
        made = registers.compiled(text, architecture)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(pickle.dumps(made))
        unfinished.replace(path)
        return made


TUNED = "sm_90"  # the architecture of the results


def mostly_tuned(pairs: Iterable[tuple[Any, str]], heaviest: Iterable[Any] = ()) -> list[Any]:
    """Kernels and architectures: the heaviest kernels for all that they are paired with; others for `TUNED`, and in the
    full run for one more, in turn: neighbours differ little."""
    kept, of = set(heaviest), dict[Any, list[str]]()
    for config, architecture in pairs:
        of.setdefault(config, []).append(architecture)
    chosen = []
    for turn, (config, architectures) in enumerate(of.items()):
        others = [one for one in architectures if one != TUNED]
        in_turn = others if config in kept else others[turn % max(1, len(others)) :][:1]
        chosen += [(config, one) for one in architectures if one == TUNED or one in in_turn]
    return tuned_first(chosen, kept)


def tuned_first(pairs: Iterable[tuple[Any, str]], kept: Iterable[Any] = ()) -> list[Any]:
    """These kernels and architectures; in the full run only, unless it is `TUNED`, or the kernel is `kept`."""
    return [
        pytest.param(config, architecture, marks=() if architecture == TUNED or config in kept else pytest.mark.full)
        for config, architecture in pairs
    ]
