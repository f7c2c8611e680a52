"""Kernels compiled for the CPU, as fixtures: as they are, and with faults planted into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from abft_tsm2.core.compiler import Kernel, source
from tests.support.cuda_on_cpu import KernelFault, Library, build
from tests.support.kernel_cases import planted

Texts = list[tuple[str, str]]
"""Names of kernels, and their text."""
Case = TypeVar("Case")


def texts(configs: Iterable[Kernel]) -> Texts:
    """The kernels as they are."""
    return [(config.name, source(config)) for config in configs]


def with_faults(plans: Mapping[str, tuple[Any, ...]]) -> Texts:
    """Kernels with a fault each: name: (kernel, what is replaced, which occurrence, by what, and more)."""
    return [planted(name, *plan[:4]) for name, plan in plans.items()]


def library_of(made_of: Callable[[], Texts], *, sanitize: bool = False) -> Any:
    """A fixture of the whole session, to be assigned to its name: a library of these kernels."""

    @pytest.fixture(scope="session")
    def library(build_cache: Path) -> Iterator[Library]:
        made = build(made_of(), sanitize=sanitize, cache=build_cache)
        yield made
        made.close()

    return library


def first_fault(cases: Iterable[Case], judged: Callable[[Case], Sequence[str]]) -> str:
    """What `judged` says of the first case that it finds anything in, or what stopped the kernel; else "nothing"."""
    for case in cases:
        try:
            found = judged(case)
        except KernelFault as fault:
            return str(fault)
        if found:
            return "; ".join(found)
    return "nothing"


def first_complaint(cases: Iterable[Case], judged: Callable[[Case], Sequence[str]]) -> str:
    """`first_fault`, or what a launch asserts of memory that should have stayed as it was."""
    try:
        return first_fault(cases, judged)
    except AssertionError as fault:
        return str(fault)
