"""What both campaigns of `benchmarks.device_campaign` run under: array module, seed, time limit, failures."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2 import errstate
from benchmarks.gpu_timing import message, require_device

MOST_FAILURES = 100  # after which nothing new begins: more of them tell nothing new


def quiet(sync: bool) -> errstate:
    """Nothing that is found warns or raises: what reports say is judged here."""
    found = dict.fromkeys(("corrected", "checksum_fault", "unverifiable"), "ignore")
    wrong = dict.fromkeys(("input_changed", "uncorrectable"), "log")
    return errstate(**found, **wrong, sync=sync)  # type: ignore[arg-type]


@dataclass
class Run:
    """One run of a campaign.

    Attributes
    ----------
    xp : module
        CuPy, or NumPy for a campaign on the CPU.
    seed : int
    deadline : float
        `time.monotonic()` after which nothing new begins.
    show : bool
        Whether every report is printed.
    failures : list of str
        One for each broken promise, and how to see it again.
    """

    xp: Any
    seed: int
    deadline: float
    show: bool = False
    failures: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        """Whether nothing new is to begin."""
        return time.monotonic() > self.deadline or len(self.failures) >= MOST_FAILURES

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def progress(self, text: str) -> None:
        print(f"{self.seconds:5.0f} s  {text}", file=sys.stderr, flush=True)

    def fail(self, text: str) -> None:
        self.failures.append(text)
        print(f"FAILURE {text}", flush=True)

    @contextmanager
    def going_on(self, what: object) -> Iterator[None]:
        """An exception on the card is a failure, and the rest goes on; raises where the card is lost."""
        try:
            with np.errstate(all="ignore"):
                yield
        except Exception as error:
            if self.xp is np:
                raise
            self.fail(f"{what}: {message(error)}")
            require_device(error)
