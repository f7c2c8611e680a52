"""Kernels compiled for the CPU, as fixtures: as they are, and with faults planted into them; and in which orders of the
threads a test runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from abft_tsm2.core.compiler import Kernel, source
from tests.support.cuda_on_cpu import ORDERS, KernelFault, Library, build
from tests.support.cuda_on_cpu.build import KERNELS_PER_UNIT
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
    """A fixture of the whole session, to be assigned to its name: these kernels, compiled as they are asked for."""

    @pytest.fixture(scope="session")
    def library(build_cache: Path) -> Iterator[Libraries]:
        made = Libraries(made_of(), sanitize, build_cache)
        yield made
        made.close()

    return library


class Libraries:
    """Kernels, a unit of them compiled when one of them is first run; those to be sanitized one by one."""

    def __init__(self, kernels: Texts, sanitize: bool, cache: Path) -> None:
        count = 1 if sanitize else KERNELS_PER_UNIT
        self._units = [kernels[i : i + count] for i in range(0, len(kernels), count)]
        self._unit_of = {name: i for i, unit in enumerate(self._units) for name, _ in unit}
        assert len(self._unit_of) == len(kernels), "two kernels of one name"
        self._made: dict[int, Library] = {}
        self._sanitize, self._cache = sanitize, cache

    def run(self, name: str, *args: Any, **options: Any) -> None:
        """`Library.run`, by the library that holds the kernel."""
        unit = self._unit_of[name]
        if unit not in self._made:
            self.close()  # of processes under AddressSanitizer one is kept
            self._made[unit] = build(self._units[unit], sanitize=self._sanitize, cache=self._cache)
        self._made[unit].run(name, *args, **options)

    def close(self) -> None:
        for library in self._made.values():
            library.close()


def some(values: Iterable[Any], step: int) -> list[Any]:
    """Values of a parameter: every `step`-th in every run of the tests, the others in the full one."""
    return [pytest.param(value, marks=pytest.mark.full if i % step else ()) for i, value in enumerate(values)]


def in_every_order(parameter: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """Each value with one `order` of the threads, in turn; in the full run with every one."""
    pairs = [
        pytest.param(value, order, marks=pytest.mark.full if (i - j) % len(ORDERS) else ())
        for i, value in enumerate(values)
        for j, order in enumerate(ORDERS)
    ]
    return pytest.mark.parametrize((parameter, "order"), pairs, ids=lambda x: getattr(x, "name", x))


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
