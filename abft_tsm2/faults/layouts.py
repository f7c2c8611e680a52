"""Where a product is put: the orders and strides that ``out`` may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Array = Any
Layout = Callable[[Any, int, int, Any], Array | None]

LAYOUTS: Mapping[str, Layout] = {
    "none": lambda xp, m, n, dtype: None,
    "C": lambda xp, m, n, dtype: xp.zeros((m, n), dtype),
    "F": lambda xp, m, n, dtype: xp.zeros((n, m), dtype).T,
    "strided": lambda xp, m, n, dtype: xp.zeros((2 * m, 3 * n), dtype)[::2, 1::3],
    "part": lambda xp, m, n, dtype: xp.zeros((m + 3, n + 5), dtype)[2 : m + 2, 4 : n + 4],
    "transposed": lambda xp, m, n, dtype: xp.zeros((n + 5, m + 3), dtype)[4 : n + 4, 2 : m + 2].T,
    "negative": lambda xp, m, n, dtype: xp.zeros((m, n), dtype)[::-1, ::-1],
}
"""Functions of the array module, m, n and a type that make an array to write to, or None for none."""
