"""The kernel that sums words of a matrix and compares the sums, run on the CPU: as it is, and with faults in it."""

from __future__ import annotations

from typing import Any

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
    "compares_only_columns": (COMPARE, "of_rows == nullptr", 0, "of_rows != nullptr"),
    "sums_of_the_first_row": (COMPARE, "of_rows[i]", 0, "of_rows[0]"),
    "never_differs": (COMPARE, "done[1] = 1", 0, "done[1] = 0"),
    "never_compares": (COMPARE, "== gridDim.x - 1", 0, "== gridDim.x"),
    "the_first_block_compares": (COMPARE, "== gridDim.x - 1", 0, "== 0"),
    "without_the_last_row": (SUM, "first + lane < rows", 0, "first + lane < rows - 1"),
    "without_the_last_word": (SUM, "at < size", 0, "at < size - 1"),
    "beyond_the_last_word": (SUM, "j < length && at < size", 0, "j < length && first + q < rows"),
    "sums_without_the_last_column": (SUM, "j < length && at", 0, "j < length - 1 && at"),
}
library = library_of(lambda: [*texts([SUM, COMPARE]), *with_faults(FAULTS)])
SIZES = [(1, 1), (120, 40), (42000, 600), (49500, 1500), (30, 7), (70 * 600, 601), (5, 11)]  # words, in such rows


def word_sums(x: Any, length: int) -> tuple[Any, Any]:
    """The sums of lines of so many words, of which the last may be shorter, and across them."""
    lines = np.concatenate([x.reshape(-1), np.zeros(-x.size % length, np.uint64)]).reshape(-1, length)
    return lines.sum(axis=1, dtype=np.uint64), lines.sum(axis=0, dtype=np.uint64)


def wrong(library: Libraries, name: str, config: WordsConfig, case: tuple[int, int], order: str) -> list[str]:
    """What is wrong with the sums of a matrix, and with the verdicts: as it was, with one bit of one word flipped, and
    with two that cancel in a row or in a column, of which one alone may be compared."""
    size, length = case
    rng = np.random.default_rng(case)
    words = rng.integers(0, 2**64, size, dtype=np.uint64)
    rows, columns = word_sums(words, length)
    last, some = size - 1, int(rng.integers(size))
    changes = [[], [0], [last], [some], [last, last % length], [last, last - last % length]]
    found = []
    for places in changes if config.compare else [[]]:
        changed = words.copy()
        for place, change in zip(places, (1 << 41, 2**64 - (1 << 41)), strict=False):
            changed[place] = (int(changed[place]) + change) % 2**64
        now = word_sums(changed, length)
        for of_rows in (rows, None):
            sums = np.zeros(rows.size + length + 2, np.uint64)
            watched = np.concatenate([changed, rng.integers(0, 2**64, length, dtype=np.uint64)])  # not to be read
            args = (size, length, watched, of_rows, columns, sums)
            library.run(name, (config.blocks(size, length),), config.t1, args, order=order)
            if not np.array_equal(sums[:-2], np.concatenate(now)):
                found.append(f"{case}, {places}: other sums")
            expected = (now[1] != columns).any() or (of_rows is not None and (now[0] != rows).any())
            if bool(sums[-1]) != (config.compare and bool(expected)):
                found.append(f"{case}, {places}: {sums[-1]}")
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("config", [SUM, COMPARE], ids=lambda config: config.name)
def test_the_sums_and_what_changed(library: Libraries, config: WordsConfig, order: str) -> None:
    assert [wrong(library, config.name, config, case, order) for case in SIZES] == [[]] * len(SIZES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("config", [SUM, COMPARE], ids=lambda config: config.name)
def test_it_compiles_without_spills(compiled: Cubins, config: WordsConfig, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log


@pytest.mark.parametrize("fault", FAULTS)
def test_the_test_sees_faults(library: Libraries, fault: str) -> None:
    config = FAULTS[fault][0]
    assert first_complaint(SIZES, lambda case: wrong(library, fault, config, case, "forward")) != "nothing"
