"""The protected functions of Dask arrays with the names and signatures of Dask's own."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np

import abft_tsm2.interop.dask as ft


def on_dask(a: Any, b: Any) -> tuple[Any, Any]:
    """Both as Dask's, which `da.matmul` and `da.dot` do to them too."""
    return da.asanyarray(a), da.asanyarray(b)


def matmul(a: Any, b: Any) -> Any:
    return ft.protected_gemm(*on_dask(a, b))


def dot(a: Any, b: Any) -> Any:
    """Of operands with at most two axes; of others it is another product than `matmul`."""
    a, b = on_dask(a, b)
    return ft.protected_gemm(a, b) if a.ndim <= 2 and b.ndim <= 2 else da.dot(a, b)


def cholesky(a: Any, lower: bool = False) -> Any:
    return ft.protected_cholesky(a, lower=lower)


def lu(a: Any) -> tuple[Any, Any, Any]:
    """P, L and U of a square matrix from its packed factors and swaps of rows."""
    packed, swaps = dask.persist(*ft.protected_lu_factor(a))  # once, though the test computes P, L and U one by one
    rows = np.arange(a.shape[0])
    for i, other in enumerate(swaps.compute()):
        rows[[i, other]] = rows[[other, i]]
    eye = da.eye(a.shape[0], chunks=packed.chunks[0][0], dtype=packed.dtype)
    permutation = da.from_array(np.eye(a.shape[0])[:, rows], chunks=packed.chunks)
    return permutation, da.tril(packed, -1) + eye, da.triu(packed)
