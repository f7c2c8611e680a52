"""A stand-in for protected factorisations, for tests of what is measured with them.

It factors with SciPy, shows the live arrays of a blocked factorisation at every stage, and compares with what it has
seen without a fault: so it finds everything, and does with it what its manner is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from scipy import linalg

import abft_tsm2
from abft_tsm2 import Report, SilentDataCorruptionError, Status

Hook = Callable[[str, Mapping[str, Any]], None]
Arrays = dict[str, Any]


class FakeLibrary:
    """Protected operations that answer as told.

    Parameters
    ----------
    manner : {"honest", "careless", "timid", "alarming", "wrong", "broken"}
        What becomes of a fault: it is repaired, left and not told, refused; or there always is an alarm, a wrong result
        that is called clean, an exception.
    """

    def __init__(self, manner: str = "honest") -> None:
        self.manner = manner

    def protected_lu_factor(
        self, a: Any, *, mode: str = "auto", block: int | None = None, on_stage: Hook | None = None, **options: Any
    ) -> Any:
        arrays = started(a)
        before = held(arrays)
        show(arrays, on_stage or (lambda stage, arrays: None), block or 16, mode)
        factors = linalg.lu_factor(before["A"])
        faulty = any(not same(arrays[name], x) for name, x in before.items())
        if self.manner in ("careless", "wrong") and (not same(arrays["W"], before["W"]) or self.manner == "wrong"):
            factors = factors[0] * factors[0].dtype.type(1.5), factors[1]
        return self._answer("lu", factors, faulty, not same(arrays["A"], before["A"]), a, options)

    def protected_solve(self, a: Any, b: Any, *, on_stage: Hook | None = None, **options: Any) -> Any:
        arrays: Arrays = {"x": linalg.solve(a, b)}
        before = held(arrays)
        if on_stage is not None:
            on_stage("forward", {"z": arrays["x"]})
            on_stage("backward", arrays)
        return self._answer("solve", before["x"], not same(arrays["x"], before["x"]), False, a, options)

    def _answer(self, operation: str, result: Any, faulty: bool, lost: bool, a: Any, options: Any) -> Any:
        if self.manner == "broken":
            raise ZeroDivisionError("as told")
        found = faulty and self.manner in ("honest", "timid")
        refused = found and (lost or self.manner == "timid")
        status = Status.UNCORRECTABLE if refused else Status.CORRECTED if found else Status.CLEAN
        if self.manner == "alarming":
            status = Status.CHECKSUM_FAULT
        m, n = a.shape
        report = Report(status, operation, m, n, n, a.dtype.name, seconds={"panel": 1e-3, "check": 2e-3})
        if refused:
            raise SilentDataCorruptionError(report)
        return (result, report) if options.get("return_report") else result


def library(monkeypatch: pytest.MonkeyPatch, manner: str = "honest") -> None:
    """Put one in the place of the true library, which keeps its Cholesky."""
    fake = FakeLibrary(manner)
    for name in ("protected_lu_factor", "protected_solve"):
        monkeypatch.setattr(abft_tsm2, name, getattr(fake, name), raising=False)


def started(a: Any) -> Arrays:
    """All arrays of a factorisation of A; W is finished, whatever the stage."""
    m, n = a.shape
    lu, piv = linalg.lu_factor(a)
    rng = np.random.default_rng(0)
    sizes = {"S": m, "Z": n, "g": min(m, n), "y": min(m, n), "v": n, "w": m}
    sums = {name: rng.standard_normal(size) for name, size in sizes.items()}
    return {"A": np.array(a), "W": np.array(lu, order="F"), "piv": piv, "perm": np.arange(float(m)), **sums}


def show(arrays: Arrays, hook: Hook, block: int, mode: str) -> None:
    """All stages, one after the other."""

    def some(*names: str) -> Arrays:
        return {name: arrays[name] for name in names}

    K = min(arrays["W"].shape)
    live = {name: x for name, x in arrays.items() if name != "v"}
    hook("inputs", some("A"))
    hook("encoded", some("A", "S", "Z", "v", "w"))
    if mode == "offline":
        hook("factored", some("A", "W", "piv"))
        return
    for j in range(0, K, block):
        for stage in ("panel", "swapped", "solved", "updated"):
            hook(stage, {**live, "step": (j, min(j + block, K))})
    hook("finished", live)


def held(arrays: Arrays) -> Arrays:
    return {name: np.array(x) for name, x in arrays.items()}


def same(x: Any, y: Any) -> bool:
    return bool(np.array(x).tobytes() == np.array(y).tobytes())
