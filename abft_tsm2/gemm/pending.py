"""Verdicts that arrive later: a product is queued, and its report awaited by `abft_tsm2.policy.Deferred`."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from abft_tsm2.arrays import Array, float_type
from abft_tsm2.checksum.device.record import DeviceOutcome, DeviceVerdict, clean
from abft_tsm2.core import memory
from abft_tsm2.gemm import fallback
from abft_tsm2.gemm.device import DeviceProduct, products_of
from abft_tsm2.gemm.operands import GemmProblem, problem_of
from abft_tsm2.gemm.replays import forget
from abft_tsm2.policy import Deferred
from abft_tsm2.report import Report, Status


def run(problem: GemmProblem, operation: str, on_error: str | None, *, write: bool, key: Any = None) -> Deferred:
    """Multiply and verify on the current stream of the operands' device, and wait for nothing.

    `key`: of `plan.key_of` the arguments, to know the next call with such arguments.
    """
    with problem.c.device:
        return queue(next(products_of(problem, operation, None, write=write, key=key)), on_error)


def queue(product: DeviceProduct, on_error: str | None) -> Deferred:
    """Queue a product; its report is PENDING."""
    info = product.info
    return Deferred.of(Pending(product), on_error, operation=info.operation, sizes=info.sizes, dtype=info.dtype)


class Pending:
    """The verdict on a product that is queued here; it keeps none of the user's arrays alive."""

    repeats, last = False, None

    def __init__(self, product: DeviceProduct) -> None:
        import cupy

        (self._records, self._done), self._device, o = product.queue(), cupy.cuda.Device(), product.operands
        self._lock, self._graph = threading.Lock(), product.graph
        for record in self._records:
            record.owner = self
        self._spec, self._options, self._info = product.plan.checks[0].spec, product.options, product.info
        self._arrays = _weak(o.A), _weak(o.B), _weak(o.C), _weak(o.C0)

    @property
    def arrived(self) -> bool:
        return bool(self._done.done)

    @staticmethod
    def dismiss(pending: Iterable[Pending]) -> list[Pending]:
        """Of verdicts that have arrived, those that are not clean; the others are done with."""
        done = list(pending)
        memory.bring(record for one in done for record in one._records)
        left = [one for one in done if not clean(one._records)]
        for one in done:
            if one not in left:
                for record in one._records:
                    record.free()
        return left

    def detach(self) -> None:
        """Keep what the records said when they were brought, which is after `arrived`: their memory is wanted again."""
        with self._lock:
            self._records = [record.detached() for record in self._records]

    def wait(self) -> Report:
        self._done.synchronize()
        with self._lock:
            records, self._records = self._records, []
        with self._device:
            memory.bring(records)
        verdict = DeviceVerdict(records, self._info)
        if self._graph is not None and verdict.outcome is DeviceOutcome.NO_VERDICT:
            forget(self._graph)
        for record in records:
            record.free()
        return verdict.report() if verdict.settled else self._verify_late(verdict)

    def _verify_late(self, verdict: DeviceVerdict) -> Report:
        """What can still be said of a product that the kernels could not settle: its operands may be gone."""
        arrays = [weak and _alive(weak) for weak in self._arrays]
        gone = any(array is None and weak is not None for array, weak in zip(arrays, self._arrays, strict=True))
        report, why = verdict.report(), "its operands are gone"
        # Right in every element, whatever its operands are by now; perhaps less sharp than can be, as its limit says.
        if verdict.outcome <= DeviceOutcome.CLEARED and (gone or not verdict.missed):
            return report if verdict.explained else replace(report, suspicions=verdict.flagged)
        if not gone:
            report, right = self._verify_again(report, *arrays)
            if right:
                return replace(report, suspicions=max(report.suspicions, verdict.flagged))
            why = "it still disagrees"
        failed = f"{verdict.flagged} lines of C failed the check, more than the device repairs by itself"
        if verdict.outcome is DeviceOutcome.NO_VERDICT:
            failed = "the device has left no verdict on C"
        reason = f"{failed}, and {why}: repeat the product under errstate(sync=True)"
        return replace(report, status=Status.UNCORRECTABLE, also=(), reasons=(*report.reasons, reason))

    def _verify_again(self, first: Report, A: Array, B: Array, C: Array, c: Array | None) -> tuple[Report, bool]:
        """The report of a second verification of C, which repairs nothing, and whether C is right."""
        spec, options = self._spec, self._options
        precision = "tf32" if spec.arithmetic.u_in else None
        # What was checked of a product in float32 is gone, and of its 16 bits a check is not as sharp: once more, then.
        how: dict[str, Any] = {"verify": "float32"} if spec.cast else {"existing": C}
        problem = problem_of(A, B, c, alpha=options.alpha, beta=options.beta, check="auto", precision=precision, **how)
        report = first.followed_by(fallback.run(problem, self._info.operation))
        right = report.status in (Status.CLEAN, Status.CORRECTED, Status.UNVERIFIABLE)
        return report, right and (not spec.cast or _same(C, problem.c))


def _same(C: Array, again: Array) -> bool:
    """Whether 16-bit products are the same but for the last bit."""
    import cupy

    kind = float_type(C)
    x, y = (part.astype(cupy.float32) for part in (C, again))
    near = abs(x - y) <= 2 * kind.unit_roundoff * cupy.maximum(abs(x), abs(y)) + kind.smallest_subnormal
    return bool((near | (x == y) | (cupy.isnan(x) & cupy.isnan(y))).all())


class _WeakArray(NamedTuple):
    """An array that may be gone when its product is verified again."""

    owner: weakref.ref[Any]
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


def _weak(x: Array | None) -> _WeakArray | None:
    if x is None:
        return None
    owner = x if x.base is None else x.base
    return _WeakArray(weakref.ref(owner), x.data.ptr, x.shape, x.strides, x.dtype)


def _alive(weak: _WeakArray) -> Array | None:
    """The array, where its memory is still there."""
    import cupy

    owner = weak.owner()
    if owner is None:
        return None
    at = owner.data + (weak.address - owner.data.ptr)
    return cupy.ndarray(weak.shape, weak.dtype, at, weak.strides)
