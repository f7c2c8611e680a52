"""array_api_strict with the protected functions under the names of the standard: the module that array-api-tests test.

A subprocess imports it, and ABFT_TSM2_OUTSIDE_MODE names the way of `tests.outside.borrowed`.
"""

from __future__ import annotations

import os
from typing import Any

import array_api_strict

import abft_tsm2 as ft
from tests.outside.borrowed import Calls, Namespace, Swap


def matmul(x1: Any, x2: Any, /) -> Any:
    return ft.protected_gemm(x1, x2)


def solve(x1: Any, x2: Any, /) -> Any:
    return ft.protected_solve(x1, x2)


def cholesky(x: Any, /, *, upper: bool = False) -> Any:
    return ft.protected_cholesky(x, lower=not upper)


_mode, _calls, _linalg = os.environ["ABFT_TSM2_OUTSIDE_MODE"], Calls(), array_api_strict.linalg
_matmul = _calls.through(Swap(matmul, array_api_strict.matmul, integers=False), _mode)
xp = Namespace(
    array_api_strict,
    {
        "matmul": _matmul,
        "linalg": Namespace(
            _linalg,
            {
                "matmul": _matmul,
                "solve": _calls.through(Swap(solve, _linalg.solve), _mode),
                "cholesky": _calls.through(Swap(cholesky, _linalg.cholesky), _mode),
            },
        ),
    },
)
