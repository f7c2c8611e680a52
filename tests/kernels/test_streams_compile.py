"""The kernels for today's GPUs compile for every architecture, without a GPU, and keep what they have in registers.

Each shape that ships is compiled with the most columns that it serves, where it needs most registers: for 16-byte loads
on every architecture, for narrower ones, which differ little, on every other one in turn. And every combination of
types once, with one column.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from abft_tsm2.core.compiler import source
from abft_tsm2.core.device import known
from abft_tsm2.core.kernels import COLUMNS, Shape, Stream, candidates, why_not
from abft_tsm2.core.problem import SIZES, Problem
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.cubins import Cubins, mostly_tuned

SINGLE, DOUBLE, HALF, BRAIN = "float32", "float64", "float16", "bfloat16"
SHIPPED = ((SINGLE, SINGLE), (DOUBLE, DOUBLE), (SINGLE, DOUBLE), (HALF, SINGLE), (BRAIN, DOUBLE))  # types of A and C
TYPES = [  # of A, B and C
    *((SINGLE, SINGLE, SINGLE), (SINGLE, SINGLE, DOUBLE), (SINGLE, DOUBLE, DOUBLE), (SINGLE, HALF, SINGLE)),
    *((DOUBLE, DOUBLE, DOUBLE), (DOUBLE, SINGLE, DOUBLE), (DOUBLE, HALF, DOUBLE)),
    *((half, b, c) for half in (HALF, BRAIN) for b, c in ((half, SINGLE), (half, half), (half, DOUBLE))),
    *((half, b, b) for half in (HALF, BRAIN) for b in (SINGLE, DOUBLE)),
]


def chosen(problem: Problem) -> list[Stream]:
    """The kernels for it, but those of TSM2L."""
    device = known("H200")
    return [c for c in candidates(problem) if c.form != "small" and why_not(problem, c, device) is None]


def shipped() -> list[tuple[Stream, str]]:
    """Kernels and architectures."""
    made: list[tuple[Stream, str]] = []
    for order in "FC":
        for a, c in SHIPPED:
            for width in (width for width in (16, 8, 4, 2) if width >= SIZES[a]):
                largest = {}
                for n, b_order in itertools.product(COLUMNS, "CF"):
                    problem = Problem(10_000, 10_000, n, a, order, out=c, width=width, b_order=b_order)
                    for config in chosen(problem):
                        largest[config.form, config.shape, config.turned] = config
                for turn, config in enumerate(largest.values()):
                    made += [(config, x) for x in (ARCHITECTURES if width == 16 else ARCHITECTURES[turn % 2 :: 2])]
    return made


def of_every_type() -> Iterator[tuple[Stream, str]]:
    """Kernels and architectures."""
    for turn, (a, b, c) in enumerate(TYPES):
        for order in "FC":
            problem = Problem(10_000, 10_000, 1, a, order, b, c, width=16)
            yield chosen(problem)[0], ARCHITECTURES[(turn + (order == "C")) % len(ARCHITECTURES)]


def label(value: object) -> str:
    return value.name if isinstance(value, Stream) else str(value)


def heaviest() -> Iterator[Stream]:
    """Of each file, the one that holds most in registers."""
    configs = [config for config, _ in shipped()]
    for file in {config.file for config in configs}:
        of_file = (config for config in configs if config.file == file)
        yield max(of_file, key=lambda config: (config.t2 * SIZES[config.sums], config.turned, config.width))


EVERY = mostly_tuned([*shipped(), *of_every_type()], heaviest())


@pytest.mark.parametrize(("config", "architecture"), EVERY, ids=label)
def test_every_kernel_compiles_without_spills(compiled: Cubins, config: Stream, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log
    if config.form in ("columns", "rows", "tensor", "staged"):
        assert re.findall(r"(\d+) bytes smem", log) == [str(config.shared_bytes)]


def test_every_form_type_and_width_is_among_them() -> None:
    found = {(config.form, config.dtype, config.sums, config.width) for config, _ in shipped()}
    for form, (a, c) in ((form, types) for form in ("columns", "rows") for types in SHIPPED):
        sums = Problem(1, 1, 1, a, out=c).sums
        assert {width for *key, width in found if key == [form, a, sums]} == {w for w in (16, 8, 4, 2) if w >= SIZES[a]}
    assert {config.t2 for config, _ in shipped()} >= {2, 4, 8, 16, 32}
    turned = {(config.form, config.dtype, config.order) for config, _ in shipped() if config.turned}
    columns = {("columns", dtype, 0) for dtype in (SINGLE, DOUBLE)}
    assert turned == columns | {("tensor", dtype, order) for dtype in (DOUBLE, HALF) for order in (0, 1)}


def test_spills_are_seen(compiled: Cubins) -> None:
    config = Stream("columns", *(SINGLE,) * 4, 16, 16, Shape(128, 1, 8, 1, 6))
    assert spilled(compiled(source(config), "sm_90")[1]) > 0
    assert spilled(compiled(source(replace(config, shape=Shape(128, 1, 8, 1, 2))), "sm_90")[1]) == 0
