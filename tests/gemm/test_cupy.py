"""CuPy arrays go through the same code. These tests need a GPU: ``pytest -m gpu``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status
from tests.support.oracles import Exact

pytestmark = pytest.mark.gpu

SHAPES = ((64, 48, 32), (130, 257, 70), (33, 200, 300), (1, 5, 1), (512, 512, 512))
FAULTS = {
    "element": lambda c: c.__setitem__((0, 0), -3 * c[0, 0] - 1),
    "nan": lambda c: c.__setitem__((0, 0), float("nan")),
    "row": lambda c: c.__setitem__(0, 2 * c[0] + 1),
    "column": lambda c: c.__setitem__((slice(None), 0), 2 * c[:, 0] + 1),
    "all": lambda c: c.__setitem__(..., 2 * c + 1),
}


def operands(cp: Any, shape: tuple[int, int, int], dtype: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    m, k, n = shape
    return cp.asarray(rng.standard_normal((m, k)).astype(dtype)), cp.asarray(rng.standard_normal((k, n)).astype(dtype))


def outside(cp: Any, a: Any, b: Any, c: Any) -> np.ndarray:
    return Exact.of(cp.asnumpy(a), cp.asnumpy(b)).outside(cp.asnumpy(c))


@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_clean_products_are_clean_and_stay_on_the_device(
    cp: Any, shape: tuple[int, int, int], dtype: str, check: str
) -> None:
    a, b = operands(cp, shape, dtype)
    c, report = ft.protected_gemm(a, b, check=check, return_report=True)
    assert isinstance(c, cp.ndarray)
    assert c.dtype == dtype
    assert report.status is Status.CLEAN
    assert report.closest < 1
    assert not outside(cp, a, b, c).any()


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("check", ["rows", "columns"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_faults_are_found_and_repaired(cp: Any, dtype: str, check: str, kind: str) -> None:
    a, b = operands(cp, SHAPES[1], dtype)

    def plant(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            FAULTS[kind](arrays["C"])

    c, report = ft.protected_gemm(a, b, check=check, return_report=True, on_stage=plant)
    assert report.status is Status.CORRECTED
    assert not outside(cp, a, b, c).any()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_encoded_matrices_are_guarded_and_reused(cp: Any, dtype: str) -> None:
    a, b = operands(cp, SHAPES[1], dtype)
    kept = b.copy()
    encoded = ft.encode(b, repair=True)
    assert encoded.verify().status is Status.CLEAN
    b[3, 4] = -b[3, 4]
    c, report = ft.protected_gemm(a, encoded, return_report=True)
    assert report.status is Status.CORRECTED
    assert bool((b == kept).all())
    assert not outside(cp, a, kept, c).any()
    b[5, 6] += 1
    assert encoded.correct().status is Status.CORRECTED
    assert bool((b == kept).all())


def test_a_mix_of_libraries_is_refused_with_advice(cp: Any) -> None:
    with pytest.raises(TypeError, match=r"cupy.asarray"):
        ft.protected_gemm(cp.ones((2, 2)), np.ones((2, 2)))


def test_alpha_beta_and_out(cp: Any) -> None:
    a, b = operands(cp, SHAPES[1], "float64")
    c = cp.ones((SHAPES[1][0], SHAPES[1][2]))
    out = ft.protected_gemm(a, b, c, alpha=2.0, beta=-0.5, out=c)
    assert out is c
    assert bool(cp.allclose(c, 2 * (a @ b) - 0.5))


def test_out_that_overlaps_itself_is_refused_each_time(cp: Any) -> None:
    a, b = operands(cp, (64, 48, 32), "float32")
    for out in (
        cp.broadcast_to(cp.zeros(32, a.dtype), (64, 32)),
        cp.lib.stride_tricks.as_strided(cp.zeros(64 * 32, a.dtype), (64, 32), (16, 4)),
    ):
        for _ in range(2):  # what was refused once is not remembered as known
            with pytest.raises(ValueError, match="elements of out share memory"):
                ft.protected_gemm(a, b, out=out)
    stack = cp.stack([a, a])
    with pytest.raises(ValueError, match="elements of out share memory"):
        ft.protected_gemm(stack, b, out=cp.broadcast_to(cp.zeros((64, 32), a.dtype), (2, 64, 32)))


def test_options_are_judged_as_on_numpy_each_time(cp: Any) -> None:
    a, b = operands(cp, (64, 48, 32), "float32")
    for _ in range(2):
        c = ft.protected_gemm(a, b, alpha=np.array(2.0))
        assert (c == ft.protected_gemm(a, b, alpha=2.0)).all()
        with pytest.raises(TypeError, match="alpha is"):
            ft.protected_gemm(a, b, alpha=2 + 0j)
        with pytest.raises(ValueError, match="check is"):
            ft.protected_gemm(a, b, check=["rows"])
        with pytest.raises(ValueError, match="out_dtype"):
            ft.protected_gemm(a, b, out_dtype=[])
