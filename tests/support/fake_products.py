"""Products on a fake card, protected and not, for tests of benchmarks.bench_gemm."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from abft_tsm2 import SilentDataCorruptionError, policy
from abft_tsm2.checksum.encoded import Encoded
from abft_tsm2.core import cublas
from abft_tsm2.report import Check, Report, Status
from tests.support.fake_card import Card

TYPES = ("float32", "float64", "bfloat16")
BETWEEN = 1e-6  # seconds of the card from a protected product to the next one, beyond its own


def operands(dtype: str, shape: tuple[int, ...] = (40, 30, 50), seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    import ml_dtypes

    *batch, m, k, n = shape
    rng, kind = np.random.default_rng(seed), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return rng.standard_normal((*batch, m, k)).astype(kind), rng.standard_normal((*batch, k, n)).astype(kind)


def multiplied(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    wide = np.float64 if A.dtype == np.float64 else np.float32
    product: np.ndarray = (A.astype(wide) @ B.astype(wide)).astype(A.dtype)
    return product


# A product that is there already.
DONE = cublas.Gemm(lambda *_: None, lambda: 0, False, np.float32, (), (), (), (), (), np.ones(2, np.float32), 0)


class Protected:
    """What protected_gemm is on the fake card: 1.1 times as slow as cuBLAS, 1.4 times if it is waited for.

    Attributes
    ----------
    asked : Counter of str
        Variants, as they were asked for.
    wrong : str
        What goes wrong.
    """

    def __init__(self, card: Card) -> None:
        self.card, self.asked, self.wrong, self.calls = card, Counter[str](), "", 0

    def __call__(self, A: Any, B: Any, *, out: Any, return_report: bool = False, **named: str) -> Any:
        self.calls += 1
        variant = ", ".join(f"{name}={value}" for name, value in named.items())
        if isinstance(B, Encoded):
            assert B.array.shape == (A.shape[-1], out.shape[-1])
            variant, B = f"encoded, recheck={B.recheck}", B.array
        self.asked[variant or "plain"] += 1
        right = multiplied(A, B)
        self.card.launch(lambda: np.copyto(out, right), 1.1 * self.card.gemm_seconds + BETWEEN)
        status = Status.CLEAN
        cublas.Gemm.__call__(DONE, A, B, out, 1.0, 0.0)  # behind which faults are planted
        bad = int((out != right).sum())
        if bad:
            status = Status.CORRECTED
            self.card.launch(lambda: np.copyto(out, right), 1e-5 * bad**0.5)
            if self.wrong == "not repaired":
                out[...] = out + (out != right)  # nothing
                out[int(np.flatnonzero(right)[0])] *= 2
        if self.wrong == "element" and self.calls > 20:
            out[..., 1, 1] += 100
        if self.wrong == "not written":
            out[..., -1, :] = np.nan
        if self.wrong == "raises":
            raise ValueError("no such luck")
        if self.wrong == "alarm" and self.calls % 10 == 0:
            status = Status.CORRECTED
        final = report_of(status)
        waits = policy.synchronous()
        if waits:
            self.card.host = max(self.card.host, self.card.free)
        report = final if waits or self.wrong == "not queued" else Pending(final, self.wrong == "corruption")
        return (out, report) if return_report else out


def report_of(status: Status) -> Report:
    checks = (Check("rows", 1, 1, 1, 0.1, 0.5, 0, detection_limit=0.2),)
    return Report(status, "gemm", 1, 1, 1, "float32", checks, suspicions=2 if status is Status.CLEAN else 0)


class Pending(SimpleNamespace):
    def __init__(self, final: Report, raises: bool) -> None:
        super().__init__(status=Status.PENDING, final=final, raises=raises)

    def wait(self) -> Report:
        if self.raises:
            raise SilentDataCorruptionError(replace(self.final, status=Status.UNCORRECTABLE))
        return self.final
