"""What is kept between calls, as kernels take it: three copies (kernels/tsm2/kept.cuh)."""

from __future__ import annotations

import numpy as np

from abft_tsm2.core.kept import thrice
from tests.support.planting import bits, kept


def test_three_copies_with_room() -> None:
    assert thrice([1.0, 2.0], room=3).tolist() == [1, 2, 0] * 3
    assert thrice(np.ones(2, np.float32)).dtype == np.float32


def test_what_kernels_are_tested_with_has_a_bit_flipped_in_one_copy_of_each_element() -> None:
    values = np.linspace(1, 2, 50)
    hit, right = bits(kept(values, 64)), bits(thrice(values, 64))
    flips = [[int(x).bit_count() for x in row] for row in (hit ^ right).reshape(3, -1)]
    assert np.sum(flips, axis=0).tolist() == [1] * 64
    assert all(sum(row) > 5 for row in flips)
