"""How a matrix is to be factored by LU: the modes, and which one is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from abft_tsm2.arrays import Array, is_cupy
from abft_tsm2.linalg.blocked import FactorOptions
from abft_tsm2.linalg.device.host_copy import DEVICE, HOST, PLACES, require_in_place

MODES = ("auto", "online", "offline")
OFFLINE_UP_TO = 4096  # what one factorisation of this size takes may be lost: a second or two on two cores
OFFLINE_ON_GPU = 32768  # the same, 0.6 seconds on an H200


@dataclass(frozen=True, kw_only=True)
class LuOptions(FactorOptions):
    """Those of LU."""

    mode: str
    check_finite: bool
    preserve: str = DEVICE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r}: choose one of {', '.join(MODES)}")
        if self.preserve not in PLACES:
            raise ValueError(f"unknown preserve {self.preserve!r}: choose one of {', '.join(PLACES)}")

    def require_memory(self, a: Any, overwrite_a: bool) -> None:
        """ValueError for what cannot be factored in its own memory, where that is asked for."""
        if self.preserve == HOST:
            require_in_place(a, overwrite_a)

    def chosen(self, A: Array) -> tuple[str, str]:
        """Online or offline, for this matrix, and why; on a GPU, what a hook costs."""
        mode, why = self._chosen(A)
        hooked = self.queues(A) and self.on_stage is not None
        return mode, why + "; no graphs and no look-ahead, for on_stage" * hooked

    def _chosen(self, A: Array) -> tuple[str, str]:
        if self.mode != "auto":
            return self.mode, "as asked"
        K, most = min(A.shape), OFFLINE_ON_GPU if is_cupy(A) else OFFLINE_UP_TO
        if most >= K:
            return "offline", f"a certificate is cheapest, and another factorisation of {K} columns is soon done"
        return "online", f"another factorisation of {K} columns would take long: a fault is to cost one step"

    def queues(self, A: Array) -> bool:
        """Whether this matrix is factored by `abft_tsm2.linalg.device`."""
        return is_cupy(A)
