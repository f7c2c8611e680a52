"""Protected products, factorisations and solutions of Dask arrays, on one machine or many.

The public names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from abft_tsm2.interop.dask.cholesky import protected_cholesky
    from abft_tsm2.interop.dask.cost import ClusterModel
    from abft_tsm2.interop.dask.gemm import protected_gemm
    from abft_tsm2.interop.dask.lu import protected_lu_factor
    from abft_tsm2.interop.dask.scheduler import install
    from abft_tsm2.interop.dask.solve import protected_lu_solve, protected_solve

__all__ = [
    "ClusterModel",
    "install",
    "protected_cholesky",
    "protected_gemm",
    "protected_lu_factor",
    "protected_lu_solve",
    "protected_solve",
]

_HOME = {
    "ClusterModel": "cost",
    "install": "scheduler",
    "protected_cholesky": "cholesky",
    "protected_gemm": "gemm",
    "protected_lu_factor": "lu",
    "protected_lu_solve": "solve",
    "protected_solve": "solve",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # found directly from now on
    return value
