"""An encoded left operand on a GPU: whatever changes in it after its encoding is seen, also what changes places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status
from abft_tsm2.checksum.device import tuned
from abft_tsm2.core import faultpoint
from tests.support import cupy_on_cpu
from tests.support.planted_products import QUIET
from tests.support.planting import bits, normal

card, cp = cupy_on_cpu.card, cupy_on_cpu.cp
M, K, N = 40, 56, 48


def swapped_in_a_row(X: Any) -> None:
    X[3, [5, 9]] = X[3, [9, 5]]


def swapped_in_a_column(X: Any) -> None:
    X[[3, 8], 5] = X[[8, 3], 5]


def one_bit(X: Any) -> None:
    X.view(f"u{X.dtype.itemsize}")[7, 11] ^= X.view(f"u{X.dtype.itemsize}").dtype.type(1 << 14)


def up_and_down(X: Any) -> None:
    words = X.view(f"u{X.dtype.itemsize}")
    words[7, 11] += words.dtype.type(1 << 13)
    words[7, 20] -= words.dtype.type(1 << 13)


CHANGES = [swapped_in_a_row, swapped_in_a_column, one_bit, up_and_down]


@pytest.fixture(params=[True, False], ids=["joint", "apart"])
def joint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of A are summed where those of C are judged, or by a kernel of their own."""
    monkeypatch.setattr(tuned, "JOINT", tuned.JOINT if request.param else 0)


class Once:
    """A planter that changes A, once, where it has been encoded."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change: Callable[[Any], None] | None = change

    def __call__(self, stage: str, arrays: Any) -> None:
        if stage == "encoded" and self.change is not None:
            self.change(arrays["A"])
            self.change = None


def restored(cp: Any, change: Callable[[Any], None], dtype: Any, order: str, *, at_rest: bool) -> None:
    """A x B is right although A changes, at rest or behind its sums, and A is repaired; CLEAN without a change."""
    a, b = (cp.asarray(np.asarray(normal(*shape, dtype=dtype), order=order)) for shape in ((M, K), (K, N)))
    E, wanted = ft.encode(a, repair=True), cp.asnumpy(ft.protected_gemm(a, b))
    held = cp.asnumpy(a).copy()
    for _ in range(2):  # the second product is known
        _, report = ft.protected_gemm(E, b, return_report=True)
        assert report.status is Status.CLEAN
        if at_rest:
            change(a)
        with ft.errstate(**QUIET), faultpoint.planting(None if at_rest else Once(change)):
            c, report = ft.protected_gemm(E, b, return_report=True)
        assert report.status is Status.CORRECTED, report
        assert np.array_equal(bits(cp.asnumpy(a)), bits(held))
        assert np.allclose(cp.asnumpy(c).astype(float), wanted.astype(float), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("at_rest", [True, False], ids=["at rest", "meanwhile"])
@pytest.mark.parametrize("change", CHANGES)
def test_of_a_card_whose_kernels_run_on_the_cpu(
    cp: Any, joint: None, change: Callable[[Any], None], at_rest: bool, order: str
) -> None:
    restored(cp, change, np.float32, order, at_rest=at_rest)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_of_other_types(cp: Any, joint: None, dtype: Any) -> None:
    restored(cp, swapped_in_a_row, dtype, "C", at_rest=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("at_rest", [True, False], ids=["at rest", "meanwhile"])
@pytest.mark.parametrize("change", CHANGES)
def test_of_a_card(joint: None, change: Callable[[Any], None], at_rest: bool, order: str, dtype: Any) -> None:
    restored(pytest.importorskip("cupy"), change, dtype, order, at_rest=at_rest)
