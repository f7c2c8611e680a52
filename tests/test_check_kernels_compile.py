"""The kernels that check products compile for every architecture, without a GPU, and keep what they have in registers.

Each configuration that `line_sums` chooses for these sizes is compiled once, for one architecture in turn; what loads
16 bytes of most rows at a time, where a thread needs most registers, for all of them.
"""

from __future__ import annotations

import itertools

import pytest

from abft_tsm2.core.check_config import Equilibrate, Judge, LineSums, line_sums
from abft_tsm2.core.compiler import source
from abft_tsm2.core.device import KNOWN
from benchmarks.registers import ARCHITECTURES, compiled
from tests.check_cases import TYPES_OF_SUMS, WIDTHS
from tests.test_kernels_compile import spilled

SIZES = (1, 64, 512, 1024, 4096, 16384)
MULTIPROCESSORS = sorted({device.multiprocessors for device in KNOWN.values()})
CASTS = {("float32", "float32"): ("float16", "bfloat16")}  # of C: its type, that of the products with weights


def kinds(dtype: str, acc: str) -> list[dict[str, object]]:
    """What is asked for of a matrix: as right and as left operand, as C0, as C before and with the verdict."""
    asked: list[dict[str, object]] = [{"words": True, "out": acc}, {"words": True, "given": True}, {"words": True}, {}]
    return [*asked, *({"verdict": True, "out": out} for out in ("", *CASTS.get((dtype, acc), ())))]


def chosen() -> list[LineSums]:
    found = {}
    for (dtype, acc), p, q, multiprocessors in itertools.product(TYPES_OF_SUMS, SIZES, SIZES, MULTIPROCESSORS):
        for width, kind in itertools.product(WIDTHS[dtype], kinds(dtype, acc)):
            config = line_sums(dtype, p, q, multiprocessors, acc=acc, width=width, **kind)  # type: ignore[arg-type]
            found[config] = None
    return list(found)


CHOSEN = chosen()
MOST = max(config.rows * config.ahead for config in CHOSEN)
CONFIGS = [
    (config, architecture)
    for turn, config in enumerate(CHOSEN)
    for architecture in (
        ARCHITECTURES
        if config.width == 16 and config.rows * config.ahead == MOST
        else ARCHITECTURES[turn % len(ARCHITECTURES) :][:1]
    )
]
OTHERS = [Judge(), *(Equilibrate(dtype, turned) for dtype in WIDTHS for turned in (False, True))]


def label(value: object) -> str:
    return getattr(value, "name", str(value))


@pytest.mark.parametrize(("config", "architecture"), CONFIGS, ids=label)
def test_no_choice_spills(config: LineSums, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log
    assert " 0 bytes stack frame" in log, log


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("config", OTHERS, ids=label)
def test_neither_do_the_others(config: Judge | Equilibrate, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log


def test_every_kind_is_among_them() -> None:
    for (dtype, acc), kind in ((types, kind) for types in TYPES_OF_SUMS for kind in kinds(*types)):
        same = [
            x for x in CHOSEN if (x.dtype, x.acc) == (dtype, acc) and all(getattr(x, k) == v for k, v in kind.items())
        ]
        assert {config.width for config in same} == set(WIDTHS[dtype])
        assert len({config.team for config in same}) > 1
        assert len({config.rows for config in same}) > 1
    assert {architecture for _, architecture in CONFIGS} == set(ARCHITECTURES)
    assert len({config.name for config in CHOSEN}) == len(CHOSEN)
