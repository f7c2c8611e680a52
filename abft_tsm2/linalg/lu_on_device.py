"""The part of an LU factorisation that a GPU does: its factors, what is suspected of them, and what comes of that."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from abft_tsm2.arrays import to_host
from abft_tsm2.linalg.blocked import BlockedFactorisation
from abft_tsm2.linalg.device.factorisation import DeviceFactorisation
from abft_tsm2.linalg.device.host_copy import HOST, HostCopy
from abft_tsm2.linalg.encode import MatrixChecksums
from abft_tsm2.linalg.evidence import Lines
from abft_tsm2.linalg.inputs import not_finite
from abft_tsm2.linalg.lu_options import LuOptions
from abft_tsm2.linalg.once_more import factored_once_more
from abft_tsm2.report import Check

NOT_FINITE = "A holds NaN or Inf: its factors were not checked"


class LuOnDevice(BlockedFactorisation):
    """One LU factorisation, wherever it is done.

    Attributes
    ----------
    pivots : int32 array on the host, or None
        None where only the device has them, in `device_pivots`.
    host : HostCopy, or None
        Where the factors take the place of A, which is its copy from then on.
    suspects : pair of boolean arrays
        Rows and columns that a GPU's checks of the steps have found wrong.
    agrees : bool
        Whether a GPU has found sums of the product of its factors to be those of A.
    keeps : bool
        Whether checksums of A on a GPU may be read after all is done: until `release`.
    info : int
        Number, from 1, of the first pivot that is exactly zero; 0 where there is none.
    """

    options: LuOptions
    encoding: MatrixChecksums
    checks: tuple[Check, ...]
    pivots: Any = None
    device_pivots: Any = None
    host: HostCopy | None = None
    suspects: Lines = np.zeros(0, bool), np.zeros(0, bool)
    agrees = False
    keeps = False
    info = 0
    _unread: DeviceFactorisation | None = None

    def queued(self, mode: str, *, later: bool = False) -> DeviceFactorisation:
        """A factorisation on the GPU, the verdict on which is awaited now, or later."""
        findings = self.findings if self.options.repair and not later else None
        if self.options.preserve == HOST and self.host is None:
            self.host = HostCopy(self.A)
            self.A = self.host.array
        return DeviceFactorisation(
            self.A, host=self.host, checked=mode == "online", findings=findings, hook=self.options.on_stage
        )

    def await_device(self, queued: DeviceFactorisation, mode: str, why: str) -> None:
        """Wait for what a GPU factors, settle what its checks suspect, and set the report."""
        if not self.take(queued):
            if self.encoding.is_of_finite(self.A):
                self.settle(mode)
            elif self.options.check_finite:
                raise not_finite()
            else:
                mode, why = "offline", "A is not finite"
                self.findings.unverifiable(NOT_FINITE)
        self.finish(mode, why)

    def take(self, queued: DeviceFactorisation) -> bool:
        """Wait for factors; whether nothing is suspected of them."""
        with self.clock("factor"):
            queued.wait()
            self.W, self.info, self.device_pivots = queued.W, queued.info, queued.piv
            self.suspects = queued.suspects
            if clean := queued.clean:
                self.pivots, self.checks = None, queued.checks()
            else:
                self.pivots, self.agrees = to_host(queued.piv), queued.agrees
            self._unread = queued
            if not clean or self.findings.any:
                self.checksums_of_input()
            elif not self.keeps:
                self.release()
        return clean

    def checksums_of_input(self) -> MatrixChecksums:
        """Those of A; of a GPU's, they are read now."""
        if self._unread is not None:
            self.encoding = self._unread.encoding()
            self.release()
        return self.encoding

    def release(self) -> None:
        """Give back the memory of checksums of a GPU, which nobody is to read any more."""
        if self._unread is not None:
            self._unread.release()
            self._unread = None

    def settle(self, mode: str) -> None:
        """Verify what a GPU has factored and suspects; factor again where it is wrong, there and at last by steps."""
        encoding = self.encoding
        if not self.is_wrong("factored again"):
            if self.options.repair and not (self.agrees or self.host or self.findings.reasons):
                factored_once_more(self, mode)
        elif self.is_changed() or not (self.take(self.queued(mode)) or not self.is_wrong("")):
            self.encoding = encoding
            self.online_beside()
        self.encoding = encoding  # with which A is to agree at the end

    def online_beside(self) -> None:
        """Factor by steps where a GPU has failed; in memory of its own, from which the factors go to where A was."""
        if self.host is None:
            self.online()
            return
        with self.host.beside():
            self.online()
        self.host.memory[...] = self.W
        self.W = self.host.memory

    # -- what is the same wherever it is done --

    @abstractmethod
    def is_wrong(self, repair: str) -> bool:
        """Verify factors of which nothing is known; whether they are wrong, and are to be repaired: this way."""

    @abstractmethod
    def is_changed(self) -> bool:
        """Whether A is shown not to be what was encoded."""

    @abstractmethod
    def online(self) -> None:
        """Factor with checksums carried along."""

    @abstractmethod
    def finish(self, mode: str, why: str) -> None:
        """Set the report."""
