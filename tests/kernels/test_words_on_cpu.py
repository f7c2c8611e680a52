"""The kernel that compares words of a matrix with their sums, run on the CPU: as it is, and with faults in it."""

from __future__ import annotations

import numpy as np
import pytest

from abft_tsm2.checksum.device.words import WordsConfig
from tests.support.cuda_on_cpu import ORDERS
from tests.support.libraries import Libraries, first_complaint, library_of, texts, with_faults

KERNEL = WordsConfig()
FAULTS = {
    "every_second_word": (KERNEL, "j += 32", 0, "j += 64"),
    "without_the_first": (KERNEL, "j = lane", 0, "j = lane + 32"),
    "half_of_the_warp": (KERNEL, "away = 16", 0, "away = 8"),
    "rows_of_another_length": (KERNEL, "words + i * length", 0, "words + i * (length - 1)"),
    "sums_of_the_first_row": (KERNEL, "sum != sums[i]", 0, "sum != sums[0]"),
    "never_differs": (KERNEL, "*differ = true", 0, "*differ = false"),
    "half_of_the_rows": (KERNEL, "if (i >= rows)", 0, "if (2 * i >= rows)"),
}
library = library_of(lambda: [*texts([KERNEL]), *with_faults(FAULTS)])
SHAPES = [(1, 1), (3, 40), (9, 512), (130, 33)]


def wrong(library: Libraries, name: str, shape: tuple[int, int], order: str = "forward") -> list[str]:
    """What is wrong with the verdicts on a matrix as it was, and with one bit of one word flipped."""
    rng = np.random.default_rng(shape)
    words = rng.integers(0, 2**64, shape, dtype=np.uint64)
    sums, found = words.sum(axis=1, dtype=np.uint64), []
    places = [None, (0, 0), (shape[0] - 1, shape[1] - 1), tuple(int(rng.integers(size)) for size in shape)]
    for place in places:
        if place is not None:
            words[place] ^= np.uint64(1 << int(rng.integers(64)))
        differ = np.zeros(1, np.bool_)
        each = KERNEL.t1 // 32
        args = (shape[0], shape[1], words, sums, differ)
        library.run(name, (-(-shape[0] // each),), KERNEL.t1, args, order=order)
        if bool(differ[0]) != (place is not None):
            found.append(f"{shape}, {place}: {bool(differ[0])}")
        sums = words.sum(axis=1, dtype=np.uint64)
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_a_flipped_bit_is_found_and_nothing_else(library: Libraries, order: str) -> None:
    assert [wrong(library, KERNEL.name, shape, order) for shape in SHAPES] == [[]] * len(SHAPES)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_test_sees_faults(library: Libraries, fault: str) -> None:
    assert first_complaint(SHAPES, lambda shape: wrong(library, fault, shape)) != "nothing"
