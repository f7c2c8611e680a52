"""Reports that are pending: waiting, monitors, and verdicts that are never waited for."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, errstate, monitor
from abft_tsm2 import policy as module
from abft_tsm2.errors import CorruptionWarning
from abft_tsm2.policy import Deferred, deliver, synchronous
from abft_tsm2.report import Report


class Verdict:
    """A verdict that has arrived, or not."""

    def __init__(self, status: Status = Status.CLEAN, arrived: bool = True) -> None:
        self.status, self.arrived, self.waits = status, arrived, 0
        self.repeats, self.last = False, None

    def wait(self) -> Report:
        self.waits += 1
        return Report(self.status, "gemm", 2, 3, 4, "float32")

    @staticmethod
    def dismiss(pending: Iterable[Verdict]) -> list[Verdict]:
        return [verdict for verdict in pending if verdict.status is not Status.CLEAN]


@pytest.fixture(autouse=True)
def _nothing_open() -> Any:
    module._open.clear()
    module._interval[0] = 1
    yield
    module._open.clear()


def pending(verdict: Verdict, on_error: str | None = None) -> Deferred:
    return Deferred.of(verdict, on_error, operation="gemm", sizes=(2, 3, 4), dtype="float32")


def _many(count: int) -> None:
    for _ in range(count):
        pending(Verdict())


def test_a_pending_report_waits_once_and_gives_the_same_report_again() -> None:
    verdict = Verdict()
    report = pending(verdict)
    assert (report.status, report.ok, report.m, report.k, report.n) == (Status.PENDING, False, 2, 3, 4)
    assert report.wait() is report.wait()
    assert report.wait().status is Status.CLEAN
    assert verdict.waits == 1


def test_a_report_that_is_final_waits_for_nothing() -> None:
    report = Report(Status.CLEAN, "gemm", 2, 3, 4, "float32")
    assert report.wait() is report


def test_a_wrong_result_raises_at_each_wait_unless_it_was_only_to_be_detected() -> None:
    report = pending(Verdict(Status.UNCORRECTABLE))
    for _ in range(2):
        with pytest.raises(SilentDataCorruptionError):
            report.wait()
    assert pending(Verdict(Status.UNCORRECTABLE), "detect").wait().status is Status.UNCORRECTABLE


def test_the_end_of_a_monitor_collects_and_raises_when_all_have_been_collected() -> None:
    verdicts = [Verdict(), Verdict(Status.UNCORRECTABLE), Verdict()]
    watching = monitor()
    log = watching.__enter__()
    for verdict in verdicts:
        deliver(pending(verdict))
    assert log.counts[Status.PENDING] == 3
    with pytest.raises(SilentDataCorruptionError):
        watching.__exit__(None, None, None)
    assert [report.status for report in log] == [Status.CLEAN, Status.UNCORRECTABLE, Status.CLEAN]
    assert [verdict.waits for verdict in verdicts] == [1, 1, 1]


def test_a_pending_report_becomes_a_plain_one_in_another_process() -> None:
    copy = pickle.loads(pickle.dumps(pending(Verdict())))
    assert type(copy) is Report
    assert copy.status is Status.PENDING


def test_json_of_a_pending_report() -> None:
    assert pending(Verdict()).to_dict()["status"] == "PENDING"


def test_verdicts_that_are_never_waited_for_are_acted_on_later() -> None:
    pending(Verdict(Status.UNCORRECTABLE))
    gc.collect()
    with pytest.warns(CorruptionWarning, match="never waited"):
        _many(2 * module._SWEPT_AFTER)
    assert len(module._open) <= 2 * module._SWEPT_AFTER


@pytest.mark.parametrize("sweep", [module._sweep, module._sweep_at_exit])
def test_a_verdict_that_was_waited_for_is_acted_on_once(sweep: Callable[[], None]) -> None:
    verdict = Verdict(Status.UNCORRECTABLE)
    report = pending(verdict, "detect")
    report.wait()
    del report
    gc.collect()
    sweep()
    assert verdict.waits == 1
    assert not module._open


def test_those_on_their_way_and_those_that_are_held_are_left_alone() -> None:
    late, held = Verdict(Status.UNCORRECTABLE, arrived=False), Verdict(Status.UNCORRECTABLE)
    pending(late)
    report = pending(held)
    for _ in range(3 * module._SWEPT_AFTER):
        pending(Verdict())
    assert (late.waits, held.waits) == (0, 0)
    with pytest.raises(SilentDataCorruptionError):
        report.wait()


def test_what_is_left_at_the_end_is_not_silent() -> None:
    pending(Verdict(Status.UNCORRECTABLE, arrived=False))
    with pytest.warns(CorruptionWarning, match="never waited"):
        module._sweep_at_exit()
    assert not module._open


class Interrupted(Verdict):
    """Whoever waits for it, or looks at it, is interrupted, the first time."""

    interrupts = 1

    def wait(self) -> Report:
        type(self)._interrupt()
        return super().wait()

    @classmethod
    def _interrupt(cls) -> None:
        if cls.interrupts:
            cls.interrupts -= 1
            raise KeyboardInterrupt


class InterruptedLook(Interrupted):
    @staticmethod
    def dismiss(pending: Iterable[Verdict]) -> list[Verdict]:
        InterruptedLook._interrupt()
        return Verdict.dismiss(pending)

    def wait(self) -> Report:
        return Verdict.wait(self)


@pytest.mark.parametrize("kind", [Interrupted, InterruptedLook], ids=["acted on", "looked at"])
def test_verdicts_that_an_interrupted_sweep_has_not_acted_on_are_told_later(
    kind: type[Interrupted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "interrupts", 1)
    verdicts = [kind(Status.UNCORRECTABLE) for _ in range(3)]
    for verdict in verdicts:
        pending(verdict)
    gc.collect()
    with pytest.raises(KeyboardInterrupt):
        module._sweep()
    with pytest.warns(CorruptionWarning, match="never waited"):
        module._sweep()
    assert [verdict.waits for verdict in verdicts] == [1, 1, 1]
    assert not module._open


def test_plain_reports_equal_converted_ones() -> None:
    given: Any = {"status": Status.CLEAN, "operation": "gemm", "m": 2, "k": 3, "n": 4, "dtype": "float32"}
    assert Report.made_of(**given) == Report(**given)
    assert Report.made_of(**given).to_json() == Report(**given).to_json()


def test_sync_is_a_part_of_errstate() -> None:
    assert synchronous()
    with errstate(sync=False):
        assert not synchronous()
        with errstate(corrected="warn"):
            assert not synchronous()
        with errstate(sync=True):
            assert synchronous()
    assert synchronous()
    with pytest.raises(TypeError, match="sync is 1"):
        errstate(sync=1)  # type: ignore[arg-type]
