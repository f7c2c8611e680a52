"""Products by `abft_tsm2.core.matmul` where cuBLAS is at hand: every type of operands and results, in every order."""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import Any

import array_api_compat.numpy
import ml_dtypes
import numpy as np
import pytest

from abft_tsm2.core import matmul as module
from abft_tsm2.core.matmul import multiply
from tests.support import fake_card
from tests.support.oracles import elements_outside

TYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
BITS = {name: np.dtype(dtype).itemsize * 8 for name, dtype in TYPES.items()}
TAKEN = [
    types
    for types in itertools.product(TYPES, repeat=3)
    if BITS[types[2]] >= max(BITS[types[0]], BITS[types[1]]) and len({name for name in types if BITS[name] == 16}) <= 1
]
"""Types of A, B and C: C is as wide as both, and there is one of 16 bits."""


class OnCard(fake_card.Array):
    """An array that cuBLAS is asked to multiply."""

    device: Any = contextlib.nullcontext()


class Library:
    """Its array module: NumPy's, but copies stay on the card."""

    def __getattr__(self, name: str) -> Any:
        return getattr(array_api_compat.numpy, name)

    def asarray(self, x: np.ndarray, **named: Any) -> np.ndarray:
        made: np.ndarray = array_api_compat.numpy.asarray(x, **named).view(OnCard)
        return made


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fake in fake_card.Card().modules().items():
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(module, "is_cupy", lambda x: isinstance(x, OnCard))
    monkeypatch.setattr(module, "namespace", lambda *_: Library())


def laid_out(x: np.ndarray, dtype: str, order: str) -> np.ndarray:
    """A copy whose columns or rows are contiguous; "A": neither."""
    made = x.astype(TYPES[dtype])
    if order == "A":
        wide = np.repeat(made, 2, axis=1)
        return np.repeat(wide, 2, axis=0)[::2, ::2].view(OnCard)
    return np.array(made, order=order).view(OnCard)  # type: ignore[call-overload]


@pytest.mark.parametrize("orders", ["CCC", "FCC", "CFF", "ACC", "CAF", "CCA"])
@pytest.mark.parametrize(("dtype", "weights", "out"), TAKEN)
def test_products_of_every_type(card: None, dtype: str, weights: str, out: str, orders: str) -> None:
    rng = np.random.default_rng(0)
    A, B, C0 = (
        laid_out(rng.standard_normal(shape), name, order)
        for shape, name, order in zip(((30, 20), (20, 7), (30, 7)), (dtype, weights, out), orders, strict=True)
    )
    for alpha, beta, addend in ((1.0, 0.0, None), (2.0, -0.5, C0)):
        C = laid_out(np.full((30, 7), np.nan), out, orders[2])
        multiply(A, B, C, addend, alpha=alpha, beta=beta)
        plain = [None if x is None else np.asarray(x) for x in (C, A, B, addend)]
        assert not elements_outside(*plain, alpha=alpha, beta=beta).any()  # type: ignore[arg-type]
