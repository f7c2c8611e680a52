"""What a GPU and its launches keep between calls: a bit that flips there hides no fault, and alarms nobody."""

from __future__ import annotations

import gc
import struct
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status
from abft_tsm2.checksum.device import check
from abft_tsm2.core.launch import PreparedLaunch
from benchmarks.planting import planted
from tests.support import cupy_on_cpu
from tests.support.planted_products import QUIET
from tests.support.planting import normal

card, cp = cupy_on_cpu.card, cupy_on_cpu.cp
M, K, N, ELEMENT = 60, 50, 70, (3, 5)


def launches() -> list[PreparedLaunch]:
    """All that there are. PyTorch keeps objects that warn where they are asked what they are an instance of."""
    return [one for one in gc.get_objects() if type(one) is PreparedLaunch]


def factors_times(power: float) -> int:
    """Multiply the factors of bounds in the arguments of all launches that there are; how many."""
    count = 0
    for launch in launches():
        for i, (made,) in enumerate(struct.iter_unpack("d", launch._made)):
            if 1e-12 < abs(made) < 0.5:  # no address, and neither alpha nor beta
                launch._values[i] = struct.unpack("q", struct.pack("d", made * power))[0]
                count += 1
    return count


def weights_hit(base: Any, element: int, copy: int) -> None:
    """Flip the sign and an exponent's bit of one weight in one of its copies."""
    base.view(np.uint32)[copy * N + element] ^= np.uint32(1 << 31 | 1 << 30)


def product(cp: Any, hit: bool) -> ft.Report:
    """Of a product with a fault that a bound finds, or without one."""
    a, b = (cp.asarray(normal(*shape, dtype=np.float32)) for shape in ((M, K), (K, N)))

    def change(C: Any) -> None:
        if hit:
            C[ELEMENT] += 1

    with ft.errstate(**QUIET), planted(change):
        _, report = ft.protected_gemm(a, b, check="rows", return_report=True)
    return report


def whole(cp: Any) -> None:
    assert product(cp, hit=True).status is Status.CORRECTED
    for power in (2.0**300, 2.0**-300):
        assert factors_times(power)
        assert product(cp, hit=True).status is Status.CORRECTED
        assert factors_times(power)
        assert product(cp, hit=False).status is Status.CLEAN
    for copy in range(3):
        for element in (ELEMENT[1], N - 1):
            base = check._base(N)
            weights_hit(base, element, copy)
            assert product(cp, hit=True).status is Status.CORRECTED
            assert product(cp, hit=False).status is Status.CLEAN
            weights_hit(base, element, copy)


def test_of_a_card_whose_kernels_run_on_the_cpu(cp: Any) -> None:
    whole(cp)


@pytest.mark.gpu
def test_of_a_card() -> None:
    whole(pytest.importorskip("cupy"))


def test_without_the_comparison_a_fault_is_hidden(cp: Any) -> None:
    assert product(cp, hit=True).status is Status.CORRECTED
    for launch in launches():
        launch._copy = None
    assert factors_times(2.0**300)
    assert product(cp, hit=True).status is Status.CLEAN
