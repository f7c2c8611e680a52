"""Verdicts that arrive later: a product is queued, and its report awaited by `abft_tsm2.policy.Deferred`."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from abft_tsm2.arrays import Array, float_type
from abft_tsm2.checksum.device.record import CallInfo, DeviceOutcome, DeviceVerdict, clean, report_of
from abft_tsm2.core import memory
from abft_tsm2.core.memory import DeviceRecord
from abft_tsm2.gemm import fallback
from abft_tsm2.gemm.device import DeviceProduct, Keep, products_of
from abft_tsm2.gemm.operands import GemmProblem, problem_of
from abft_tsm2.gemm.plan import CallOptions, Operands, ProductPlan
from abft_tsm2.gemm.replays import ArrayPlace, GraphCall, forget
from abft_tsm2.policy import Deferred
from abft_tsm2.report import Report, Status


def run(
    problem: GemmProblem, operation: str, on_error: str | None, *, write: bool, keep: Keep | None = None
) -> Deferred:
    """Multiply and verify on the current stream of the operands' device, and wait for nothing.

    `keep`: called with the product, to know the next call with such arguments.
    """
    with problem.c.device:
        product = next(products_of(problem, operation, None, write=write, keep=keep))
        info, verdict = product.info, queue(product)
    known: Any = {"operation": info.operation, "sizes": info.sizes, "dtype": info.dtype, "device": info.device}
    return Deferred.of(verdict, on_error, **known)


def queue(product: DeviceProduct) -> Pending:
    """Queue a product: its verdict."""
    import cupy

    o, records, done = product.operands, product.queue(), cupy.cuda.Event(disable_timing=True)
    done.record()
    owners, places = zip(*map(_weak, o[:4]), strict=True)
    call = QueuedCall(product.plan, product.options, product.info, cupy.cuda.Device(), places)
    return Pending(records, done, call, owners)


_MOST = 4096
_latest: dict[int, int] = {}  # by the address of a result, the last product that was written there
_turns = itertools.count(1)


class QueuedCall(NamedTuple):
    """What a verdict needs to know of its call: as `GraphCall` has it."""

    plan: ProductPlan
    options: CallOptions
    info: CallInfo
    device: Any
    places: tuple[ArrayPlace | None, ...]


class Pending:
    """The verdict on a product that is queued here; it keeps none of the user's arrays alive.

    Parameters
    ----------
    records : list of DeviceRecord
    done : Event
        Behind the product.
    call : QueuedCall or GraphCall
    owners : tuple
        `owner_of` A, B, C and c.
    """

    __slots__ = ("_call", "_done", "_lock", "_owners", "_records", "_turn", "_verdict")
    repeats, last = False, None

    def __init__(
        self, records: list[DeviceRecord], done: Any, call: QueuedCall | GraphCall, owners: tuple[Any, ...]
    ) -> None:
        self._records, self._done, self._call, self._owners = records, done, call, owners
        self._lock, self._turn = threading.Lock(), next(_turns)
        self._verdict: DeviceVerdict | None = None
        if len(_latest) >= _MOST:
            _latest.clear()
        C = call.places[2]
        assert C is not None
        _latest[C.address] = self._turn
        for record in records:
            record.owner = self

    @property
    def arrived(self) -> bool:
        done = self._done
        return done is None or bool(done.done)

    @staticmethod
    def dismiss(pending: Iterable[Pending]) -> list[Pending]:
        """Of verdicts that have arrived, those that are not clean; the others are done with."""
        done = list(pending)
        memory.bring(record for one in done for record in one._records)
        return [one for one in done if not one._dismissed()]

    def _dismissed(self) -> bool:
        """Free the records if they are clean; whether they were."""
        with self._lock:  # not while they are detached
            if not clean(self._records):
                return False
            self._free()
        return True

    def _free(self) -> None:
        """Free the records, each once even if this is interrupted and repeated."""
        while self._records:
            self._records.pop().free()

    def detach(self) -> None:
        """Keep what the records say, which have arrived: their memory is wanted again."""
        stream = memory.own_stream()
        with self._lock:
            for record in self._records:
                record.bring(stream.ptr)
            stream.synchronize()
            self._records, self._done = [record.detached() for record in self._records], None

    def wait(self) -> Report:
        if (done := self._done) is not None:
            done.synchronize()
        verdict = self._read()
        if verdict is None:
            return report_of(self._call.info, (), [])
        if isinstance(self._call, GraphCall) and verdict.outcome is DeviceOutcome.NO_VERDICT:
            forget(self._call)
        return verdict.report() if verdict.settled else self._verify_late(verdict)

    def _read(self) -> DeviceVerdict | None:
        """The verdict, which stays where the call that waits for it is interrupted; None where it was dismissed."""
        with self._lock:
            if self._verdict is None and self._records:
                with self._call.device:
                    memory.bring(self._records)
                self._verdict = DeviceVerdict(self._records, self._call.info)
            self._free()
        return self._verdict

    def _verify_late(self, verdict: DeviceVerdict) -> Report:
        """What can still be said of a product that the kernels could not settle: its operands may be gone."""
        owners, places = (*self._owners, None)[:4], (*self._call.places, None)[:4]
        arrays = [_alive(*one) for one in zip(owners, places, strict=True)]
        gone = any(array is None and owner is not None for array, owner in zip(arrays, owners, strict=True))
        report, why = verdict.report(), "its operands are gone"
        if verdict.changed:
            reason = "an operand is not what was encoded: load it again and repeat the product"
            return replace(report, status=Status.INPUT_CHANGED, also=(), reasons=(*report.reasons, reason))
        C = self._call.places[2]
        if C is None or _latest.get(C.address) != self._turn:
            gone, why = True, "another product has been written to the same place since"
        held, lost = verdict.outcome <= DeviceOutcome.CLEARED, verdict.outcome is DeviceOutcome.NO_VERDICT
        # Right in every element, whatever its operands are by now; perhaps less sharp than can be, as its limit says.
        if held and (gone or not verdict.missed):
            return report if verdict.explained else replace(report, suspicions=verdict.flagged)
        failed = f"{verdict.flagged} lines of C failed the check, more than the device repairs by itself"
        failed = "the device has left no verdict on C" if lost else failed
        if not gone:
            # What C is compared with here clears or accuses it only if it is what the device has multiplied.
            shown = held or self._are_encoded(verdict, *arrays)
            late, right = self._verify_again(report, *arrays) if shown or lost else (report, False)
            if right and shown:
                return replace(late, suspicions=max(late.suspicions, verdict.flagged))
            if right or held or not (shown or lost):
                failed = "a sharper check than the device's failed" if held else failed
                reason = f"{failed}, and nothing shows that its operands are what was multiplied: wait for the report "
                reason += "before they are updated, or repeat the product under errstate(sync=True)"
                found: dict[str, Any] = {"status": Status.UNVERIFIABLE, "suspicions": verdict.flagged}
                return replace(report, **found, also=(), reasons=(*report.reasons, reason))
            report, why = late, "it still disagrees"
        reason = f"{failed}, and {why}: repeat the product under errstate(sync=True)"
        return replace(report, status=Status.UNCORRECTABLE, also=(), reasons=(*report.reasons, reason))

    def _are_encoded(self, verdict: DeviceVerdict, A: Array, B: Array, C: Array, c: Array | None) -> bool:
        """Whether operands are bit for bit what was encoded for the product: encoded again, by the same kernels, they
        give what these have left in the records."""
        if not any(verdict.digests):
            return False
        plan, options = self._call.plan, self._call.options
        owners = [None if one is None else one.owner() for one in options.carried]
        for side, one, owner in zip(plan.sides, options.carried, owners, strict=True):
            if one is not None and (owner is None or not owner.holds(B if side == "rows" else A)):
                return False
        product = DeviceProduct(plan, options, self._call.info, Operands(A, B, C, c, None))
        return all(then in (None, now) for then, now in zip(verdict.digests, product.digests(), strict=True))

    def _verify_again(self, first: Report, A: Array, B: Array, C: Array, c: Array | None) -> tuple[Report, bool]:
        """The report of a second verification of C, which repairs nothing, and whether C is right."""
        spec, options = self._call.plan.checks[0].spec, self._call.options
        precision = "tf32" if spec.arithmetic.u_in else None
        # What was checked of a product in float32 is gone, and of its 16 bits a check is not as sharp: once more, then.
        how: dict[str, Any] = {"verify": "float32"} if spec.cast else {"existing": C}
        problem = problem_of(A, B, c, alpha=options.alpha, beta=options.beta, check="auto", precision=precision, **how)
        report = first.followed_by(fallback.run(problem, self._call.info.operation))
        right = report.status in (Status.CLEAN, Status.CORRECTED, Status.UNVERIFIABLE)
        return report, right and (not spec.cast or _same(C, problem.c))


def _same(C: Array, again: Array) -> bool:
    """Whether 16-bit products are the same but for the last bit."""
    import cupy

    kind = float_type(C)
    x, y = (part.astype(cupy.float32) for part in (C, again))
    near = abs(x - y) <= 2 * kind.unit_roundoff * cupy.maximum(abs(x), abs(y)) + kind.smallest_subnormal
    return bool((near | (x == y) | (cupy.isnan(x) & cupy.isnan(y))).all())


def owner_of(x: Array) -> weakref.ref[Any]:
    """Of the memory of an array, which may be gone when its product is verified again."""
    return weakref.ref(x if x.base is None else x.base)


def _weak(x: Array | None) -> tuple[weakref.ref[Any] | None, ArrayPlace | None]:
    """Owner and place of an array."""
    if x is None:
        return None, None
    return owner_of(x), ArrayPlace.of(x)


def _alive(owner: weakref.ref[Any] | None, place: ArrayPlace | None) -> Array | None:
    """The array at a place, where its memory is still there."""
    import cupy

    memory = None if owner is None else owner()
    if memory is None or place is None:
        return None
    at = memory.data + (place.address - memory.data.ptr)
    return cupy.ndarray(place.shape, place.dtype, at, place.strides)
