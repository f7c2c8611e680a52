"""An operand that is wrong for a while leaves no wrong product, whatever is computed from it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Report, encode, protected_gemm
from abft_tsm2.arrays import to_host
from abft_tsm2.checksum import diagnose
from tests.support import cupy_on_cpu, for_a_while

card, cp = cupy_on_cpu.card, cupy_on_cpu.cp
CALLS: dict[str, Callable[[Mapping[str, Any]], tuple[Any, Report]]] = {
    **{
        check: lambda x, check=check: protected_gemm(x["A"], x["B"], check=check, return_report=True)
        for check in ("rows", "columns", "both")
    },
    "c": lambda x: protected_gemm(x["A"], x["B"], c=x["c"], beta=2.0, return_report=True),
    "encoded": lambda x: protected_gemm(x["A"], encode(x["B"]), return_report=True),
}
ON_A_CARD = {"columns": "A", "both": "AB"}
"""Operands that the check protects; of others "Bc". The pass behind a short product reads the left one at first."""


def silent(xp: Any, name: str, n: int = 60, dtype: Any = np.float64, operands: str = "ABc") -> list[str]:
    """Where a wrong product is returned, when one of these operands changes."""
    rng = np.random.default_rng(0)
    right = {which: rng.standard_normal((n, n)).astype(dtype) for which in ("A", "B", "c")}
    given = {which: xp.asarray(X.copy()) for which, X in right.items()}
    C = right["A"].astype("f8") @ right["B"] + (2 * right["c"] if name == "c" else 0)
    which = operands if name == "c" else operands.replace("c", "")
    return for_a_while.silent(CALLS[name], given, which, lambda found: to_host(found) - C, 1e-3)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("n", "dtype"), [(60, np.float64), (60, np.float32), (400, np.float64)])
def test_on_numpy(name: str, n: int, dtype: Any) -> None:
    assert not silent(np, name, n, dtype)


@pytest.mark.parametrize("name", CALLS)
def test_of_another_library(name: str) -> None:
    assert not silent(pytest.importorskip("array_api_strict"), name)


@pytest.mark.parametrize("name", CALLS)
def test_on_a_card(cp: Any, name: str) -> None:
    assert not silent(cp, name, operands=ON_A_CARD.get(name, "Bc"))


def test_a_comparison_behind_the_evidence_alone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "is_as_before", lambda lines, expected, u: True)
    assert silent(np, "rows")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [60, 300])
@pytest.mark.parametrize("name", CALLS)
def test_on_a_gpu(name: str, n: int) -> None:
    assert not silent(pytest.importorskip("cupy"), name, n, operands=ON_A_CARD.get(name, "Bc"))
