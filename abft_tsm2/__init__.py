"""Matrix products that notice, locate and repair silent data corruption.

The public names below are imported when they are first used: importing the package loads neither NumPy nor
SciPy nor CuPy.

Examples
--------
>>> import numpy as np
>>> import abft_tsm2 as ft
>>> rng = np.random.default_rng(0)
>>> A, B = rng.standard_normal((200, 300)), rng.standard_normal((300, 100))
>>> C, report = ft.protected_gemm(A, B, return_report=True)
>>> report.status.name
'CLEAN'
>>> bool(np.allclose(C, A @ B))
True
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # for type checkers it is true; typing takes a while, in which the command would not hear Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from abft_tsm2.checksum.bounds import detection_limit
    from abft_tsm2.checksum.encoded import Encoded, encode
    from abft_tsm2.checksum.weights import weights
    from abft_tsm2.core.encode_both import encode_both
    from abft_tsm2.core.tsm2 import tall_skinny_matmul, tsm2l, tsm2r
    from abft_tsm2.errors import (
        AbftError,
        CorruptionWarning,
        KernelCompileError,
        NotSuitable,
        SilentDataCorruptionError,
        UnverifiableWarning,
    )
    from abft_tsm2.gemm import protected_gemm, verify_gemm
    from abft_tsm2.linalg.cholesky import protected_cho_factor, protected_cholesky
    from abft_tsm2.linalg.lu import protected_lu_factor
    from abft_tsm2.linalg.solve import protected_cho_solve, protected_lu_solve, protected_solve
    from abft_tsm2.policy import errstate, geterr, monitor, seterr
    from abft_tsm2.report import Check, Fault, Report, Status

__version__ = "0.1.0"

__all__ = [
    "AbftError",
    "Check",
    "CorruptionWarning",
    "Encoded",
    "Fault",
    "KernelCompileError",
    "NotSuitable",
    "Report",
    "SilentDataCorruptionError",
    "Status",
    "UnverifiableWarning",
    "__version__",
    "detection_limit",
    "encode",
    "encode_both",
    "errstate",
    "geterr",
    "monitor",
    "protected_cho_factor",
    "protected_cho_solve",
    "protected_cholesky",
    "protected_gemm",
    "protected_lu_factor",
    "protected_lu_solve",
    "protected_solve",
    "seterr",
    "tall_skinny_matmul",
    "tsm2l",
    "tsm2r",
    "verify_gemm",
    "weights",
]

_NAMES = {
    "abft_tsm2.checksum.bounds": ("detection_limit",),
    "abft_tsm2.checksum.encoded": ("Encoded", "encode"),
    "abft_tsm2.checksum.weights": ("weights",),
    "abft_tsm2.linalg.cholesky": ("protected_cho_factor", "protected_cholesky"),
    "abft_tsm2.core.encode_both": ("encode_both",),
    "abft_tsm2.core.tsm2": ("tall_skinny_matmul", "tsm2l", "tsm2r"),
    "abft_tsm2.errors": (
        "AbftError",
        "CorruptionWarning",
        "KernelCompileError",
        "NotSuitable",
        "SilentDataCorruptionError",
        "UnverifiableWarning",
    ),
    "abft_tsm2.gemm": ("protected_gemm", "verify_gemm"),
    "abft_tsm2.linalg.lu": ("protected_lu_factor",),
    "abft_tsm2.linalg.solve": ("protected_cho_solve", "protected_lu_solve", "protected_solve"),
    "abft_tsm2.policy": ("errstate", "geterr", "monitor", "seterr"),
    "abft_tsm2.report": ("Check", "Fault", "Report", "Status"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found directly from now on
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
