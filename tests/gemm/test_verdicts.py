"""What the host believes of records: a verdict proves that it was made, whatever else a record's memory may hold.

The kernels that judge and repair run on the CPU, one behind the other as on a card, and may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from abft_tsm2.checksum import bounds
from abft_tsm2.checksum.device.kernels import JudgeKernel, RepairKernel
from abft_tsm2.checksum.device.record import CallInfo, DeviceOutcome, DeviceVerdict, clean
from abft_tsm2.core.memory import WORDS, DeviceRecord
from abft_tsm2.gemm import pending
from abft_tsm2.gemm.pending import Pending, QueuedCall
from abft_tsm2.gemm.plan import CallOptions
from abft_tsm2.report import Report, Status
from tests.support.check_cases import CALL_WORD, JUDGED_WORD
from tests.support.cuda_on_cpu import Library
from tests.support.libraries import library_of, texts
from tests.support.repair_faults import Case
from tests.support.repair_model import CALL, ENCODED, NULL, Work

JUDGE, REPAIR = JudgeKernel(), RepairKernel("float32", "float32", t1=64)
library = library_of(lambda: texts((JUDGE, REPAIR)))
M, K, N = 37, 45, 51
INFO = CallInfo("gemm", (M, K, N), "float32", None, (), ("rows",), (M,))


def record_of(words: np.ndarray) -> DeviceRecord:
    """A record of the call, as it was brought."""
    on_device = SimpleNamespace(data=SimpleNamespace(ptr=0))
    page: Any = SimpleNamespace(on_device=on_device, on_host=_Pinned(8 * WORDS), at=0)
    record = DeviceRecord(0, page, 0)
    record.call, record.lines = CALL, M
    record.words[...] = words
    return record


class _Pinned(bytearray):
    """Memory of the host that a device writes to."""

    ptr = 0


def left_behind(library: Library, fault: str, *, judge: bool = True, repair: bool = True, short: int = 0) -> np.ndarray:
    """The words that the kernels leave of a product; `short`: lines by which the count falls short."""
    return left_of(library, Case(fault).work(REPAIR), judge=judge, repair=repair, short=short)


def left_of(library: Library, work: Work, *, judge: bool = True, repair: bool = True, short: int = 0) -> np.ndarray:
    work.record[...] = 0
    arguments, c = list(work.arguments()), work.checks
    lines, tau = np.zeros(M, np.uint32), np.zeros(M)
    work.state[...] = 0  # the first kernel of a product wipes it
    weighted = work.C.astype(np.float64) * work.v[:, None, :].astype(np.float64)
    u, squares = (np.ascontiguousarray(x) for x in (weighted.sum(2), (weighted**2).sum(2)))
    factors = bounds.bound_factors(c["arithmetic"], c["terms"], N)
    verdict = (1.0, 0.0, c["t"], c["p2"], NULL, NULL, c["sizes"], 0, *(float(x) for x in factors), tau, lines)
    if judge:
        guards = (c["guards"], NULL, ENCODED, CALL)
        library.run(JUDGE.name, (1, 1), JUDGE.t1, (M, u, squares, *verdict, work.state, *guards))
    work.state[JUDGED_WORD] = int(work.state[JUDGED_WORD]) - short if judge else 0
    arguments[-8] = lines
    if repair:
        library.run(REPAIR.name, 2, REPAIR.t1, tuple(arguments))
    return work.record


def test_the_kernels_leave_verdicts(library: Library) -> None:
    for fault, status in (("clean", Status.CLEAN), ("element", Status.CORRECTED)):
        verdict = DeviceVerdict([record_of(left_behind(library, fault))], INFO)
        assert verdict.outcome is (DeviceOutcome.CLEAN if fault == "clean" else DeviceOutcome.REPAIRED)
        assert verdict.settled
        assert verdict.report().status is status
        assert verdict.checks[0].verified == M
        assert verdict.flagged == len(verdict.faults) == (status is Status.CORRECTED)
    assert clean([record_of(left_behind(library, "clean"))])
    assert not clean([record_of(left_behind(library, "element"))])


def _kept(library: Library) -> np.ndarray:
    words = left_behind(library, "clean").copy()
    words[0] -= np.uint64(1)
    words[7] = int(words[7]) - (1 << 8)
    return words


NO_VERDICTS: dict[str, Callable[[Library], np.ndarray]] = {
    "zeroed": lambda library: np.zeros(WORDS, np.uint64),
    "all ones": lambda library: np.full(WORDS, 2**64 - 1, np.uint64),
    "kept from the call before": _kept,
    "the repair's kernel skipped": lambda library: left_behind(library, "clean", repair=False),
    "the verdict's kernel skipped": lambda library: left_behind(library, "element", judge=False),
    "both skipped": lambda library: left_behind(library, "element", judge=False, repair=False),
    "a line not judged": lambda library: left_behind(library, "clean", short=1),
    "a line not judged, and a repair": lambda library: left_behind(library, "element", short=1),
    "a line judged twice": lambda library: left_behind(library, "clean", short=-1),
}


@pytest.mark.parametrize("name", NO_VERDICTS)
def test_what_is_no_verdict_is_not_believed(library: Library, name: str) -> None:
    record = record_of(NO_VERDICTS[name](library))
    assert not record.made(record.head)
    assert not clean([record])
    good = record_of(left_behind(library, "clean"))
    for found, sides in (([record], 1), ([good, record], 2), ([record, good], 2)):
        info = CallInfo("gemm", (M, K, N), "float32", None, (), ("rows", "columns")[:sides], (M, N)[:sides])
        if sides == 2:
            found[1].lines = M
        verdict = DeviceVerdict(found, info)
        assert verdict.outcome is DeviceOutcome.NO_VERDICT
        assert not any((verdict.settled, verdict.explained, verdict.repaired))
        assert verdict.replaced
        assert verdict.flagged == M  # all lines
        assert not verdict.faults
        assert {check.verified for check in verdict.checks} <= {0, M, N}
        assert 0 in {check.verified for check in verdict.checks}


def test_a_state_that_was_not_wiped_counts_too_many_lines(library: Library) -> None:
    """Then no kernel has encoded either: each first one wipes the state."""
    work = Case("clean").work(REPAIR)
    left_of(library, work)
    before = work.state.copy()
    assert int(before[CALL_WORD]) == CALL
    words = left_of(library, work, short=-int(before[JUDGED_WORD]))
    record = record_of(words)
    assert not record.made(record.head)


# ---- what is still in a queue --------------------------------------------------------------------------------------


class _Second:
    """A second verification, and how often it is asked for."""

    def __init__(self, status: Status) -> None:
        self.status, self.asked = status, 0

    def __call__(self, problem: Any, operation: str) -> Report:
        self.asked += 1
        return Report(self.status, operation, M, K, N, "float32")


class _Pending(Pending):
    """Without a device."""

    def __init__(self, found: list[DeviceRecord], *, gone: bool) -> None:
        spec = SimpleNamespace(arithmetic=SimpleNamespace(u_in=0.0), cast="")
        plan: Any = SimpleNamespace(checks=[SimpleNamespace(spec=spec)])
        places: Any = [SimpleNamespace(address=1, x=None if gone else np.zeros((2, 2), np.float32))] * 3 + [None]
        call = QueuedCall(plan, CallOptions((None,), 1.0, 0.0, True, (0,)), INFO, _Context(), tuple(places))
        done = SimpleNamespace(synchronize=lambda: None, done=True)
        super().__init__(found, done, call, (True, True, True, None))


class _Context:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def bring(found: Iterable[DeviceRecord]) -> None:
        list(found)

    monkeypatch.setattr("abft_tsm2.core.memory.bring", bring)
    monkeypatch.setattr(DeviceRecord, "free", lambda self: None)
    monkeypatch.setattr(pending, "_alive", lambda owner, place: place and place.x)
    monkeypatch.setattr(pending, "problem_of", lambda *arrays, **named: SimpleNamespace(c=arrays[0]))


Waited = Callable[..., Report]


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> Waited:
    """What a pending verdict comes to, of records with these words; `second`: the second verification."""

    def wait(words: np.ndarray, second: _Second, *, gone: bool) -> Report:
        monkeypatch.setattr("abft_tsm2.gemm.fallback.run", second)
        return _Pending([record_of(words)], gone=gone).wait()

    return wait


@pytest.mark.parametrize("name", NO_VERDICTS)
def test_what_is_no_verdict_is_never_dismissed(library: Library, name: str) -> None:
    good = _Pending([record_of(left_behind(library, "clean"))], gone=False)
    bad = _Pending([record_of(NO_VERDICTS[name](library))], gone=False)
    assert Pending.dismiss([good, bad, good]) == [bad]


@pytest.mark.parametrize("name", NO_VERDICTS)
def test_what_is_no_verdict_is_verified_on_the_host(library: Library, waited: Waited, name: str) -> None:
    words = NO_VERDICTS[name](library)
    fine, wrong = _Second(Status.CLEAN), _Second(Status.UNCORRECTABLE)
    report = waited(words, fine, gone=False)
    # Right by its operands as they are now: nothing shows that these are what was multiplied.
    assert (report.status, fine.asked) == (Status.UNVERIFIABLE, 1)
    assert report.suspicions == M
    report = waited(words, wrong, gone=False)
    assert (report.status, wrong.asked) == (Status.UNCORRECTABLE, 1)
    report = waited(words, fine, gone=True)
    assert (report.status, fine.asked) == (Status.UNCORRECTABLE, 1)
    assert "no verdict" in report.reasons[-1]


def test_a_verdict_is_not_verified_again(library: Library, waited: Waited) -> None:
    second = _Second(Status.UNCORRECTABLE)
    report = waited(left_behind(library, "element"), second, gone=True)
    assert (report.status, second.asked) == (Status.CORRECTED, 0)


def _interrupted_once(monkeypatch: pytest.MonkeyPatch, place: Any, name: str) -> None:
    """The first call of this function is interrupted when it has done its work."""
    real, left = getattr(place, name), [1]

    def first(*arguments: Any, **named: Any) -> Any:
        made = real(*arguments, **named)
        if left:
            left.pop()
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(place, name, first)


@pytest.mark.parametrize("step", ["brought", "read", "freed", "reported"])
def test_an_interrupt_of_the_wait_loses_no_verdict(
    library: Library, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    freed = list[DeviceRecord]()
    monkeypatch.setattr(DeviceRecord, "free", lambda self: freed.append(self))
    place: tuple[Any, str] = {
        "brought": (pending.memory, "bring"),
        "read": (pending, "DeviceVerdict"),
        "freed": (DeviceRecord, "free"),
        "reported": (DeviceVerdict, "report"),
    }[step]
    _interrupted_once(monkeypatch, *place)
    records = [record_of(left_behind(library, "element"))]
    verdict = _Pending(list(records), gone=False)
    with pytest.raises(KeyboardInterrupt):
        verdict.wait()
    assert verdict.wait().status is Status.CORRECTED
    assert freed == records  # once: two calls shall not write to one


def test_what_was_dismissed_was_clean(library: Library) -> None:
    good = _Pending([record_of(left_behind(library, "clean"))], gone=False)
    assert Pending.dismiss([good]) == []
    report = good.wait()
    assert (report.status, report.m, report.k, report.n) == (Status.CLEAN, M, K, N)
