"""The kernels that check products compile for every architecture, without a GPU, and keep what they have in registers.

Each configuration that `line_sums` chooses for these sizes and 16 bytes a load is compiled for the architecture where
all its blocks share a multiprocessor (LEAST_BLOCKS of kernels/check/tsm2r_rows.cu); where a thread has most loads on
their way also for another one, in turn. Of narrower loads each shape is compiled once for each type and width: for what
is asked, and for the architecture, whose turn it is. Those that sum rows of L beside those of C are compiled for that
architecture whatever they load at a time, and for another one in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from abft_tsm2.checksum.device.kernels import Equilibrate, JudgeKernel, LineSums, WipeKernel, line_sums, sums_of
from abft_tsm2.core.compiler import source
from abft_tsm2.core.device import KNOWN
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.check_cases import TYPES_OF_SUMS, WIDTHS
from tests.support.cubins import TUNED, Cubins, mostly_tuned

SIZES = (1, 64, 512, 1024, 4096, 16384)
MULTIPROCESSORS = sorted({device.multiprocessors for device in KNOWN.values()})
CASTS = {("float32", "float32"): ("float16", "bfloat16")}  # of C: its type, that of the products with weights


def kinds(dtype: str, acc: str) -> list[dict[str, object]]:
    """What is asked for of a matrix: as right and as left operand, as C0, as C before and with the verdict."""
    asked: list[dict[str, object]] = [{"words": True, "out": acc}, {"words": True, "given": True}, {"words": True}, {}]
    return [*asked, *({"verdict": True, "out": out} for out in ("", *CASTS.get((dtype, acc), ())))]


def chosen() -> list[LineSums]:
    found: dict[LineSums, None] = {}
    for (dtype, acc), p, q, multiprocessors in itertools.product(TYPES_OF_SUMS, SIZES, SIZES, MULTIPROCESSORS):
        for width, kind in itertools.product(WIDTHS[dtype], kinds(dtype, acc)):
            config = line_sums(dtype, p, q, multiprocessors, acc=acc, width=width, **kind)  # type: ignore[arg-type]
            found[config] = None
    return list(found)


def joint() -> Iterator[LineSums]:
    """What is chosen where rows of L are summed beside those of C, of that type: each once."""
    found = (
        line_sums(dtype, p, q, multiprocessors, acc=sums_of(dtype), verdict=True, out="", width=width, joint=True)
        for dtype, widths in WIDTHS.items()
        for width, p, q, multiprocessors in itertools.product(widths, SIZES, SIZES, MULTIPROCESSORS)
    )
    yield from dict.fromkeys(found)


CHOSEN, JOINT = chosen(), list(joint())
MOST = max(config.rows * config.ahead for config in CHOSEN)
KINDS = ("given", "words", "verdict", "out")
OTHERS = tuple(architecture for architecture in ARCHITECTURES if architecture != TUNED)


def shape(config: LineSums) -> tuple[object, ...]:
    """All but what is asked for."""
    return (config.dtype, config.acc, config.width, config.t1, config.team, config.rows, config.ahead, config.blocks)


def pairs() -> Iterator[tuple[LineSums, str]]:
    """What is compiled, and for which architecture."""
    wide = [config for config in CHOSEN if config.width == 16]
    yield from ((config, TUNED) for config in wide)
    yield from zip((x for x in wide if x.rows * x.ahead == MOST), itertools.cycle(OTHERS), strict=False)
    narrow: dict[tuple[object, ...], list[LineSums]] = {}
    for config in CHOSEN:
        if config.width < 16:
            narrow.setdefault(shape(config), []).append(config)
    met: set[object] = set()
    for turn, same in enumerate(narrow.values()):
        in_turn = same[turn % len(same) :] + same[: turn % len(same)]
        config = max(in_turn, key=lambda one: len(asked(one) - met))  # the first of those that add most
        met |= asked(config)
        yield config, ARCHITECTURES[turn % len(ARCHITECTURES)]
    yield from ((config, TUNED) for config in JOINT)
    yield from zip(JOINT, itertools.cycle(OTHERS), strict=False)


def asked(config: LineSums) -> set[object]:
    """What a kernel is asked for."""
    return {(name, getattr(config, name)) for name in KINDS}


CONFIGS = list(pairs())
WEIGHTS = [Equilibrate(dtype, turned, width) for dtype in WIDTHS for turned in (False, True) for width in WIDTHS[dtype]]
KERNELS = [JudgeKernel(), WipeKernel(), *WEIGHTS]
OTHER_KERNELS = [*((kernel, TUNED) for kernel in KERNELS), *zip(KERNELS, itertools.cycle(OTHERS), strict=False)]


HEAVIEST = max(
    (config for config, architecture in CONFIGS if architecture != TUNED),
    key=lambda config: (config.rows * config.ahead * config.width, config.dtype == "float64"),
)


def label(value: object) -> str:
    return getattr(value, "name", str(value))


@pytest.mark.parametrize(("config", "architecture"), mostly_tuned(CONFIGS, [HEAVIEST]), ids=label)
def test_no_choice_spills(compiled: Cubins, config: LineSums, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log
    assert " 0 bytes stack frame" in log, log


@pytest.mark.parametrize(("config", "architecture"), mostly_tuned(OTHER_KERNELS), ids=label)
def test_neither_do_the_others(
    compiled: Cubins, config: JudgeKernel | WipeKernel | Equilibrate, architecture: str
) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log
    assert " 0 bytes stack frame" in log, log


def test_every_kind_is_among_them() -> None:
    for (dtype, acc), kind in ((types, kind) for types in TYPES_OF_SUMS for kind in kinds(*types)):
        same = [
            x for x in CHOSEN if (x.dtype, x.acc) == (dtype, acc) and all(getattr(x, k) == v for k, v in kind.items())
        ]
        assert {config.width for config in same} == set(WIDTHS[dtype])
        assert len({config.team for config in same}) > 1
        assert len({config.rows for config in same}) > 1
    compiled_ones = [config for config, _ in CONFIGS if not config.joint]
    assert {shape(config) for config in compiled_ones} == {shape(config) for config in CHOSEN}
    for name in KINDS:
        for narrow in (False, True):
            wanted = {getattr(config, name) for config in CHOSEN}
            assert {getattr(config, name) for config in compiled_ones if (config.width < 16) == narrow} == wanted
    for narrow in (False, True):
        assert {at for config, at in CONFIGS if (config.width < 16) == narrow} == set(ARCHITECTURES)
    assert len({config.name for config in (*CHOSEN, *JOINT)}) == len(CHOSEN) + len(JOINT)


def test_every_type_and_width_of_load_has_joint_passes() -> None:
    for dtype, widths in WIDTHS.items():
        same = [config for config in JOINT if config.dtype == dtype]
        assert {config.width for config in same} == set(widths)
        assert len({config.team for config in same}) == (1 if dtype == "float64" else 2)
