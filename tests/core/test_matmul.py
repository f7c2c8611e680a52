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

from abft_tsm2.core import cublas
from abft_tsm2.core import matmul as module
from abft_tsm2.core.matmul import multiply
from abft_tsm2.gemm import operands
from abft_tsm2.linalg import outcome
from abft_tsm2.linalg.outcome import Findings
from abft_tsm2.report import Status
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


VARIABLES = [
    ({}, (False, False)),
    ({"CUPY_TF32": "1"}, (False, True)),
    ({"CUPY_TF32": "0", "NVIDIA_TF32_OVERRIDE": "1"}, (True, True)),
    ({"CUPY_TF32": "1", "NVIDIA_TF32_OVERRIDE": "0"}, (False, False)),
    ({"CUPY_TF32": "on", "NVIDIA_TF32_OVERRIDE": ""}, (False, False)),
]


@pytest.mark.parametrize(("variables", "told"), VARIABLES)
def test_tf32_in_the_environment(
    variables: dict[str, str], told: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = cublas.forces_tf32, cublas.cupy_rounds_to_tf32
    for name in ("CUPY_TF32", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    try:
        for function in asked:
            function.cache_clear()
        assert tuple(function() for function in asked) == told
        forms = [form("float32", None), form("float32", "float32"), form("float64", "float64")]
        assert tuple(one.arithmetic.u_in > 0 for one in forms) == (*told, False)
        if told[0]:
            findings = Findings(statuses=[Status.UNCORRECTABLE])
            monkeypatch.setattr(outcome, "is_cupy", lambda _: True)
            findings.name_tf32(np.ones(3))
            assert findings.reasons == []
            findings.name_tf32(np.ones(3, np.float32))
            assert "NVIDIA_TF32_OVERRIDE" in findings.reasons[0]
    finally:
        for function in asked:
            function.cache_clear()


def form(dtype: str, existing: str | None) -> Any:
    """A product of CuPy's arrays, by their types alone."""
    of_cupy, types = type("ndarray", (), {"__module__": "cupy"}), np.dtype(dtype)
    return operands._form(np, of_cupy, (4, 4), (4, 4), types, types, None, existing and types, None, None, False)


def test_cupys_own_product_multiplies_no_float32_matrices(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which CUPY_TF32 would let it round to 11 bits."""
    monkeypatch.setattr(Library, "matmul", None, raising=False)
    rng = np.random.default_rng(0)
    for dtype, weights, order in (
        ("float32", "float32", "A"),
        ("float16", "float32", "C"),
        ("float32", "bfloat16", "A"),
    ):
        A, B = laid_out(rng.standard_normal((30, 20)), dtype, "C"), laid_out(rng.standard_normal((20, 7)), weights, "C")
        C = laid_out(np.full((30, 7), np.nan), "float32", order)
        multiply(A, B, C)
        assert not elements_outside(np.asarray(C), np.asarray(A), np.asarray(B), None).any()
