"""Operands of a product, faults that are planted into some of its calls, and whether what comes out is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.oracles import Exact

QUIET: dict[str, Any] = {"corrected": "ignore", "input_changed": "log", "uncorrectable": "log"}
M, K, N = 60, 50, 70


def operands(cp: Any, *batch: int, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    A, B = (rng.standard_normal((*batch, *shape)).astype(np.float32) for shape in ((M, K), (K, N)))
    return cp.asarray(A), cp.asarray(B), cp.asarray(np.zeros((*batch, M, N), np.float32))


def right(A: Any, B: Any, C: Any) -> bool:
    each = zip(A, B, C, strict=True) if A.ndim == 3 else [(A, B, C)]
    return not any(Exact.of(np.asarray(a), np.asarray(b), None).outside(np.asarray(c)).any() for a, b, c in each)


class Faults:
    """A fault in the product of some calls, counted from 0 on."""

    def __init__(self, *calls: int, plant: Callable[[Any], None] | None = None) -> None:
        self.calls, self.count, self.plant = set(calls), 0, plant or self.element

    @staticmethod
    def element(C: Any) -> None:
        C[..., 3, 5] = 1e4

    def __call__(self, C: Any) -> None:
        if self.count in self.calls:
            self.plant(C)
        self.count += 1


def everything(C: Any) -> None:
    C *= 2
