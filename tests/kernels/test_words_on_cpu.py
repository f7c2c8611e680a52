"""The kernel that sums words of a matrix and compares the sums, run on the CPU: as it is, and with faults in it."""

from __future__ import annotations

import numpy as np
import pytest

from abft_tsm2.checksum.device.words import COMPARE, SUM, WordsConfig
from abft_tsm2.core.compiler import source
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.cubins import Cubins
from tests.support.cuda_on_cpu import ORDERS
from tests.support.libraries import Libraries, first_complaint, library_of, texts, with_faults

FAULTS = {
    "every_second_step": (COMPARE, "step++", 0, "step += 2"),
    "without_the_first_row": (COMPARE, "int q = 0; q < ROWS", 1, "int q = 1; q < ROWS"),
    "half_of_the_warp": (COMPARE, "away = 16", 0, "away = 8"),
    "rows_of_another_length": (COMPARE, "(first + q) * length", 0, "(first + q) * (length - 1)"),
    "columns_of_the_first_block": (COMPARE, "sums + rows + j", 0, "sums + rows + j % 32"),
    "rows_of_the_first_block": (COMPARE, "sums + first + lane", 0, "sums + lane"),
    "compares_only_rows": (COMPARE, "i < rows + length", 0, "i < rows"),
    "compares_only_columns": (COMPARE, "Index i = threadIdx.x", 0, "Index i = rows + threadIdx.x"),
    "sums_of_the_first_row": (COMPARE, "of_rows[i]", 0, "of_rows[0]"),
    "never_differs": (COMPARE, "done[1] = 1", 0, "done[1] = 0"),
    "never_compares": (COMPARE, "== gridDim.x - 1", 0, "== gridDim.x"),
    "the_first_block_compares": (COMPARE, "== gridDim.x - 1", 0, "== 0"),
    "without_the_last_row": (SUM, "first + lane < rows", 0, "first + lane < rows - 1"),
    "sums_without_the_last_column": (SUM, "j < length && first", 0, "j < length - 1 && first"),
}
library = library_of(lambda: [*texts([SUM, COMPARE]), *with_faults(FAULTS)])
SHAPES = [(1, 1), (3, 40), (70, 600), (33, 1500)]


def wrong(library: Libraries, name: str, config: WordsConfig, shape: tuple[int, int], order: str) -> list[str]:
    """What is wrong with the sums of a matrix, and with the verdicts: as it was, with one bit of one word flipped, and
    with two that cancel in a row or in a column."""
    rng = np.random.default_rng(shape)
    words = rng.integers(0, 2**64, shape, dtype=np.uint64)
    rows, columns = words.sum(axis=1, dtype=np.uint64), words.sum(axis=0, dtype=np.uint64)
    last, some = (shape[0] - 1, shape[1] - 1), tuple(int(rng.integers(size)) for size in shape)
    changes: list[list[tuple[int, ...]]] = [[], [(0, 0)], [last], [some], [last, (0, last[1])], [last, (last[0], 0)]]
    found = []
    for places in changes if config.compare else [[]]:
        changed = words.copy()
        for place, change in zip(places, (1 << 41, 2**64 - (1 << 41)), strict=False):
            changed[place] = (int(changed[place]) + change) % 2**64
        sums = np.zeros(sum(shape) + 2, np.uint64)
        args = (*shape, changed, rows, columns, sums)
        library.run(name, (config.blocks(*shape),), config.t1, args, order=order)
        now = np.concatenate([changed.sum(axis=1, dtype=np.uint64), changed.sum(axis=0, dtype=np.uint64)])
        if not np.array_equal(sums[:-2], now):
            found.append(f"{shape}, {places}: other sums")
        if bool(sums[-1]) != (config.compare and not np.array_equal(changed, words)):
            found.append(f"{shape}, {places}: {sums[-1]}")
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("config", [SUM, COMPARE], ids=lambda config: config.name)
def test_the_sums_and_what_changed(library: Libraries, config: WordsConfig, order: str) -> None:
    assert [wrong(library, config.name, config, shape, order) for shape in SHAPES] == [[]] * len(SHAPES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("config", [SUM, COMPARE], ids=lambda config: config.name)
def test_it_compiles_without_spills(compiled: Cubins, config: WordsConfig, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log


@pytest.mark.parametrize("fault", FAULTS)
def test_the_test_sees_faults(library: Libraries, fault: str) -> None:
    config = FAULTS[fault][0]
    assert first_complaint(SHAPES, lambda shape: wrong(library, fault, config, shape, "forward")) != "nothing"
