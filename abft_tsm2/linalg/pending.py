"""The verdict on an LU factorisation of a GPU that is queued and not awaited (``errstate(sync=False)``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from abft_tsm2.linalg.plain_lu import warn_of_zero
from abft_tsm2.report import Report

if TYPE_CHECKING:
    from abft_tsm2.linalg.device.factorisation import DeviceFactorisation
    from abft_tsm2.linalg.lu import LuFactorisation


class PendingFactors:
    """The verdict on a factorisation that is queued here; keeps A and the factors until it is waited for.

    Parameters
    ----------
    run : LuFactorisation
        Not begun.

    Attributes
    ----------
    factors : pair of arrays
        lu and piv. What is wrong with them is repaired by `wait`.
    """

    repeats, last = False, None

    def __init__(self, run: LuFactorisation) -> None:
        import cupy

        self._run, self._mode = run, run.options.chosen(run.A)
        run.deferred = True
        queued = run.queued(self._mode[0], later=True)
        self._queued: DeviceFactorisation | None = queued
        self.factors = queued.W, queued.piv
        self._failed: BaseException | None = None
        self._device, self._done = cupy.cuda.Device(), cupy.cuda.Event(disable_timing=True)
        self._done.record()

    @property
    def arrived(self) -> bool:
        return bool(self._done.done)

    @staticmethod
    def dismiss(pending: Iterable[PendingFactors]) -> list[PendingFactors]:
        """Of verdicts that have arrived, those that are not clean; the others are done with."""
        left = []
        for one in pending:
            if one._queued is not None and one._queued.clean:
                one._queued.release()
            else:
                left.append(one)
        return left

    def wait(self) -> Report:
        """The report; an exception of the first time is raised each time."""
        if self._queued is not None:
            with self._device:
                self._done.synchronize()  # an interrupt of this wait leaves all as it was
            queued, self._queued = self._queued, None
            try:
                self._await(queued)
            except BaseException as error:
                self._failed = error
        if self._failed is not None:
            raise self._failed
        if self._run.info:
            warn_of_zero(self._run.info)
        return self._run.report

    def _await(self, queued: DeviceFactorisation) -> None:
        with self._device:
            run, (lu, piv) = self._run, self.factors
            run.await_device(queued, *self._mode)
            if run.W is not lu:
                lu[...] = run.W
            if run.piv is not piv:  # of factors in the same memory as well
                piv[...] = run.piv
