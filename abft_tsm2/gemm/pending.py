"""The verdict on a product that is still in a queue."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from abft_tsm2.arrays import Array, float_type
from abft_tsm2.checksum.device.record import DeviceVerdict, clean
from abft_tsm2.core import memory
from abft_tsm2.core.memory import DeviceRecord
from abft_tsm2.gemm.device import DeviceProduct
from abft_tsm2.gemm.operands import GemmProblem, problem_of
from abft_tsm2.report import Report, Status


class Pending:
    """The verdict on a product that is still in the queue; it keeps none of the user's arrays alive."""

    def __init__(
        self, found: list[DeviceRecord], call: DeviceProduct, look: Callable[[GemmProblem, str], Report]
    ) -> None:
        import cupy

        self._records, self._device, self._look = found, cupy.cuda.Device(), look
        self._done = cupy.cuda.Event(disable_timing=True)
        self._done.record()
        o = call.operands
        self._plan, self._arrays = call.plan, tuple(_later(x) for x in (o.A, o.B, o.C, o.C0))

    @property
    def there(self) -> bool:
        return bool(self._done.done)

    @staticmethod
    def dismiss(pending: Iterable[Pending]) -> list[Pending]:
        """Of verdicts that are there, those that somebody has to hear of; the others are done with."""
        done = list(pending)
        memory.bring(record for one in done for record in one._records)
        left = [one for one in done if not clean(one._records)]
        for one in done:
            if one not in left:
                for record in one._records:
                    record.free()
        return left

    def wait(self) -> Report:
        self._done.synchronize()
        with self._device:
            memory.bring(self._records)
        verdict = DeviceVerdict(self._records, self._plan.facts)
        for record in self._records:
            record.free()
        return verdict.report() if verdict.settled else self._late(verdict)

    def _late(self, verdict: DeviceVerdict) -> Report:
        """What can still be said of a product that the kernels could not settle: its operands may be gone."""
        arrays = [later and _found(later) for later in self._arrays]
        gone = any(array is None and later is not None for array, later in zip(arrays, self._arrays, strict=True))
        report, why = verdict.report(), "its operands are gone"
        # Right in every element, whatever its operands are by now; perhaps less sharp than can be, as its limit says.
        if verdict.cleared and verdict.held and (gone or not verdict.missed):
            return report if verdict.known else replace(report, suspicions=verdict.flagged)
        if not gone:
            report, fine = self._looked_at(report, *arrays)
            if fine:
                return replace(report, suspicions=max(report.suspicions, verdict.flagged))
            why = "it still disagrees"
        failed = f"{verdict.flagged} lines of C failed the check, more than the device repairs by itself"
        if not verdict.made:
            failed = "the device has left no verdict on C"
        reason = f"{failed}, and {why}: repeat the product under errstate(sync=True)"
        return replace(report, status=Status.UNCORRECTABLE, also=(), reasons=(*report.reasons, reason))

    def _looked_at(self, first: Report, A: Array, B: Array, C: Array, c: Array | None) -> tuple[Report, bool]:
        """The report of a second look at C, and whether C is right."""
        plan, case = self._plan, self._plan.way.checkers[0].case
        precision = "tf32" if case.arithmetic.u_in else None
        # What was checked of a product in float32 is gone, and of its 16 bits a check is not as sharp: once more, then.
        how: dict[str, Any] = {"verify": "float32"} if case.cast else {"existing": C}
        problem = problem_of(A, B, c, alpha=plan.alpha, beta=plan.beta, check="auto", precision=precision, **how)
        report = first.followed_by(self._look(problem, plan.facts.operation))
        fine = report.status in (Status.CLEAN, Status.CORRECTED, Status.UNVERIFIABLE)
        return report, fine and (not case.cast or _same(C, problem.c))


def _same(C: Array, again: Array) -> bool:
    """Whether 16-bit products are the same but for the last bit."""
    import cupy

    kind = float_type(C)
    x, y = (part.astype(cupy.float32) for part in (C, again))
    near = abs(x - y) <= 2 * kind.unit_roundoff * cupy.maximum(abs(x), abs(y)) + kind.smallest_subnormal
    return bool((near | (x == y) | (cupy.isnan(x) & cupy.isnan(y))).all())


class _Later(NamedTuple):
    """An array that may be gone when somebody looks for it."""

    owner: weakref.ref[Any]
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


def _later(x: Array | None) -> _Later | None:
    if x is None:
        return None
    owner = x if x.base is None else x.base
    return _Later(weakref.ref(owner), x.data.ptr, x.shape, x.strides, x.dtype)


def _found(later: _Later) -> Array | None:
    import cupy

    owner = later.owner()
    if owner is None:
        return None
    at = owner.data + (later.address - owner.data.ptr)
    return cupy.ndarray(later.shape, later.dtype, at, later.strides)
