"""Products that are captured into the user's CUDA graph: queued with memory of their own; what all replays found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from abft_tsm2.checksum.device.record import CallInfo, check_of, faults_of, report_of
from abft_tsm2.checksum.device.tally import Replays, ReplayTally
from abft_tsm2.core import cublas, memory
from abft_tsm2.core.capture import Kept, capture_of, current_stream, is_captured, relaxed, release
from abft_tsm2.gemm.device import products_of
from abft_tsm2.gemm.operands import GemmProblem
from abft_tsm2.gemm.plan import LaunchSequence, serves
from abft_tsm2.gemm.replays import ReplayedProduct
from abft_tsm2.policy import Deferred
from abft_tsm2.report import Check, Report, Status, by_precedence

_LOOKS = 3
_workspaces: WeakValueDictionary[tuple[int, int], Any] = WeakValueDictionary()


def run(problem: GemmProblem, operation: str, on_error: str | None, *, write: bool) -> Deferred:
    """Capture the product, its check and its repair on the current stream.

    Raises
    ------
    ValueError
        For operands that kernels and cuBLAS do not take as they are.
    """
    import cupy

    if not serves(problem):
        raise ValueError(
            "such operands cannot be multiplied while the stream is captured: use matrices of one type, not empty, "
            "with contiguous rows or columns, alpha that is not 0, and no c where verify='float32'"
        )
    if problem.c.device != (here_now := cupy.cuda.Device()):
        raise ValueError(
            f"the captured stream is of {here_now}, the operands lie on {problem.c.device}: use one device"
        )
    stream = cupy.cuda.get_current_stream()
    here = capture_of(stream.ptr)
    assert here is not None
    _streams[here.number] = stream
    product = next(products_of(problem, operation, None, write=write))
    plan, options, operands = product.plan, product.options, product.operands
    with memory.uncaptured(), memory.own_scratch() as scratch:
        sequence = LaunchSequence(plan, options)
        replayed = ReplayedProduct(plan, options, operands, sequence, 1)
    workspace = _workspaces.get((here.number, stream.ptr))
    if workspace is None:  # not shared with other graphs: both may be replayed at a time
        workspace = _workspaces[here.number, stream.ptr] = cupy.empty(cublas.WORKSPACE, cupy.uint8)
    encoded = [one.device for one in (problem.encoded_a, problem.encoded_b) if one is not None]
    kept = Kept(
        here.graph,
        sequence,
        scratch,
        workspace,
        operands.C0,
        operands.wide,
        encoded,
        replayed.tallies,
        replayed.planted,
    )
    replayed.queue(stream, workspace)
    verdict = CapturedVerdict(replayed.tallies, product.info, kept, here.number)
    info = product.info
    known: Any = {"operation": info.operation, "sizes": info.sizes, "dtype": info.dtype, "device": info.device}
    return Deferred.of(verdict, on_error, **known)


class CapturedVerdict:
    """What the replays of a captured product have found so far.

    Attributes
    ----------
    last : Report or None
        As it was told last.
    """

    repeats = True

    def __init__(self, tallies: list[ReplayTally], info: CallInfo, kept: Kept, capture: int) -> None:
        import cupy

        self._tallies, self._info, self._kept = tallies, info, kept
        self._capture, self._device = capture, cupy.cuda.Device()
        self.last: Report | None = None

    @property
    def arrived(self) -> bool:
        """Whether there will be no other replay."""
        return not self._kept.needed

    @staticmethod
    def dismiss(pending: Iterable[CapturedVerdict]) -> list[CapturedVerdict]:
        """Of verdicts that are final, those to be read."""
        return list(pending)

    def wait(self) -> Report:
        """Wait for the device, and sum up all replays so far; PENDING where there was none.

        Raises
        ------
        RuntimeError
            While a stream is captured, which forbids to wait for the device and is spoilt by that.
        """
        with self._device, relaxed():
            found = self._read()
            for _ in range(_LOOKS):  # where another thread replays the graph, the last one may be running
                if not any(one.unended for one in found):
                    break
                before, found = found, self._read()
                found = [
                    replace(one, begun=one.ended + one.missing) if _went_on(one, old) else one
                    for one, old in zip(found, before, strict=True)
                ]
        release()
        self.last = _report(found, self._info)
        return self.last

    def _read(self) -> list[Replays]:
        if not self.arrived and self._capture not in (captures := _captures()):
            if captures or is_captured(current_stream()):
                raise RuntimeError("a stream is captured, and nothing can be waited for: wait when that has ended")
            self._device.synchronize()
        return [tally.read() for tally in self._tallies]


def _went_on(now: Replays, before: Replays) -> bool:
    """Whether replays have ended since: what began before them and did not end is counted as missing then."""
    return now.ended > before.ended


_streams: dict[int, Any] = {}


def _captures() -> set[int]:
    """Of captures with protected products, those that have not ended."""
    for number, stream in list(_streams.items()):
        try:
            here = capture_of(stream.ptr)
        except RuntimeError:  # a stream that is gone
            here = None
        if here is None or here.number != number:
            _streams.pop(number, None)
    return set(_streams)


def _report(found: list[Replays], info: CallInfo) -> Report:
    """The report of all sides."""
    replays = max(max(one.ended + one.missing, one.begun) for one in found)
    if not replays:
        m, k, n = info.sizes
        known: Any = {"operation": info.operation, "m": m, "k": k, "n": n, "dtype": info.dtype, "device": info.device}
        return Report.made_of(status=Status.PENDING, **known, seconds={})
    checks, faults, wrong, open = [], [], list[str](), list[str]()
    for one, side, lines in zip(found, info.sides, info.lines, strict=True):
        checks.append(_check(one, side, lines))
        if one.elements:
            how = [f"recomputed in float64 on the device, in replay {i}" for i in one.replays]
            faults += faults_of(one.faults, one.elements, side, lines, how)
        wrong += _wrong(one, side)
        if one.unbound:
            open.append(
                f"{one.unbound} replays have {side} for which NaN or Inf in the operands leave no bound, the first of "
                f"them replay {one.first_unbound}"
            )
    report = report_of(info, tuple(checks), faults)
    statuses = [report.status, *report.also]
    statuses += [Status.UNCORRECTABLE] * bool(wrong) + [Status.UNVERIFIABLE] * bool(open)
    status, also = by_precedence(statuses)
    suspicions = sum(one.lines for one in found)
    return replace(report, status=status, also=also, reasons=(*wrong, *open), suspicions=suspicions, replays=replays)


def _check(found: Replays, side: str, lines: int) -> Check:
    """The check of one side: the closest residual of all replays, bound and limit of the last."""
    if found.ended == found.unjudged:
        return Check(side, 1, lines, 0, float("nan"), 0.0, -1, float("nan"))
    return check_of(found.last, found.largest, found.last.head[5], side, lines)


def _wrong(found: Replays, side: str) -> list[str]:
    """Why C was not verified, or is wrong, in some replays."""
    reasons, replays = [], found.ended + found.missing + found.unended
    if found.unjudged or found.first_unjudged >= 0:
        reasons.append(
            f"{found.unjudged} of {replays} replays have no verdict on all {side}, the first of them replay "
            f"{found.first_unjudged}: launch the graph again, and see that nothing else writes its memory"
        )
    if found.missing or found.unended:
        reasons.append(f"of {replays} replays that began {found.missing + found.unended} left no record along {side}")
    if found.refused or found.first_refused >= 0:
        changed = ", or an operand had changed" if found.flags & 2 else ""
        reasons.append(
            f"{found.refused} of {replays} replays failed the check along {side} and could not be repaired on the "
            f"device{changed}, the first of them replay {found.first_refused}: repeat it under errstate(sync=True)"
        )
    return reasons
