"""Faults for tests: planted through `on_stage` and compared with what the product should have been."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Report, protected_gemm
from abft_tsm2.core.kept import thrice
from tests.support.oracles import elements_outside

Change = Callable[[np.ndarray], Any]
Hook = Callable[[str, Any], None]


def normal(*shape: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def pair(m: int, k: int, n: int, dtype: Any = np.float64, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Operands of independent normal entries."""
    return normal(m, k, dtype=dtype, seed=seed), normal(k, n, dtype=dtype, seed=seed + 1)


def at(stage: str, name: str, change: Change) -> Hook:
    """A hook that applies `change` to one array each time its stage is reached."""

    def hook(reached: str, arrays: Any) -> None:
        if reached == stage:
            change(arrays[name])

    return hook


def both(*hooks: Hook) -> Hook:
    def hook(stage: str, arrays: Any) -> None:
        for one in hooks:
            one(stage, arrays)

    return hook


def put(where: Any, value: Any) -> Change:
    """The change that writes `value` there."""

    def change(x: np.ndarray) -> None:
        x[where] = value

    return change


def scale(where: Any, factor: float) -> Change:
    def change(x: np.ndarray) -> None:
        x[where] *= x.dtype.type(factor)

    return change


def everywhere(patch: pytest.MonkeyPatch, function: Any, by: Any) -> None:
    """Replace a function of the package in every module that has imported it."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "abft_tsm2":
            for attribute, value in list(vars(module).items()):
                if value is function:
                    patch.setattr(module, attribute, by)


def transient(name: str, where: Any, value: Any) -> Hook:
    """An operand that is wrong only while the product is computed, and right again when it is looked at."""
    kept: list[Any] = []

    def hook(stage: str, arrays: Any) -> None:
        if stage == "encoded" and not kept:
            x = arrays[name]
            kept.extend((x, x[where].copy()))
            x[where] = value
        elif stage == "multiplied" and len(kept) == 2:
            kept[0][where] = kept[1]
            kept.append("done")

    return hook


def bits(x: np.ndarray) -> np.ndarray:
    """The bit patterns of any array; equal where the arrays are equal down to NaN payloads and signs of zero."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


class Product:
    """One protected product with a fault in it.

    Attributes
    ----------
    C, report : what came back
    clean : C before the fault
    hit : boolean, which elements the fault changed
    wrong : boolean, which elements of the returned C are beyond rounding
    """

    def __init__(self, A: np.ndarray, B: np.ndarray, change: Change | None, **options: Any) -> None:
        seen: dict[str, np.ndarray] = {}
        extra = options.pop("on_stage", None)

        def hook(stage: str, arrays: Any) -> None:
            if stage == "multiplied":
                seen.setdefault("before", arrays["C"].copy())
                if change is not None:
                    change(arrays["C"])
                seen.setdefault("after", arrays["C"].copy())
            if extra is not None:
                extra(stage, arrays)

        self.C: np.ndarray
        self.report: Report
        self.C, self.report = protected_gemm(A, B, return_report=True, on_stage=hook, **options)
        self.clean = seen["before"]
        self.hit = bits(seen["before"]) != bits(seen["after"])
        scaling = {name: options[name] for name in ("alpha", "beta") if name in options}
        self.wrong = elements_outside(self.C, A, B, options.get("c"), **scaling)

    @property
    def status(self) -> str:
        return self.report.status.name

    @property
    def error(self) -> float:
        """The largest difference from the product before the fault, relative to its root mean square."""
        clean = self.clean.astype(np.float64)
        with np.errstate(all="ignore"):
            return float(np.abs(self.C.astype(np.float64) - clean).max() / np.sqrt(np.mean(clean**2)))


def kept(values: Any, room: int = 0, *, seed: int = 0) -> np.ndarray:
    """What a GPU keeps of some numbers, with a bit of each element flipped in one of the three copies."""
    copies = thrice(values, room)
    words, rng = bits(copies.reshape(3, -1)), np.random.default_rng([seed, copies.size])
    one = words.dtype.type(1)
    for element, copy in enumerate(rng.integers(0, 3, words.shape[1])):
        words[copy, element] ^= one << words.dtype.type(rng.integers(0, 8 * words.itemsize))
    return copies
