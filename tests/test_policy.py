"""The policy: every status, action and on_error acts as specified, in its own thread, and monitors see it."""

from __future__ import annotations

import asyncio
import contextvars
import doctest
import gc
import itertools
import logging
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import abft_tsm2.policy
from abft_tsm2.errors import AbftError, CorruptionWarning, SilentDataCorruptionError, UnverifiableWarning
from abft_tsm2.policy import ACTIONS, ON_ERROR, check_on_error, deliver, errstate, geterr, monitor
from abft_tsm2.report import Fault, Report, Status
from tests.support.nesting import after_calls

DEFAULTS = {
    "corrected": "log",
    "checksum_fault": "log",
    "unverifiable": "warn",
    "input_changed": "raise",
    "uncorrectable": "raise",
}
SERIOUS = ("input_changed", "uncorrectable")


def example(status: Status, *also: Status, **changes: object) -> Report:
    fault = Fault("C", "element", (17,), (203,), 1, 3.2e7, "recomputed")
    return Report(status, "gemm", 4, 5, 6, "float64", faults=(fault,), also=also, seconds={"multiply": 1.0}, **changes)


def outcome(report: Report, on_error: str | None, log: pytest.LogCaptureFixture) -> tuple[str, ...]:
    """Deliver, and name what happened."""
    log.clear()
    raised: list[Report] = []
    with warnings.catch_warnings(record=True) as caught, log.at_level(logging.DEBUG, "abft_tsm2"):
        warnings.simplefilter("always")
        try:
            deliver(report, on_error)
        except SilentDataCorruptionError as error:
            raised.append(error.report)
    [record] = log.records
    assert all(other is report for other in (record.report, *raised))
    assert record.getMessage() == str(report)
    logged = ["log"] if record.levelno == logging.WARNING else []
    assert logged or record.levelno == logging.DEBUG
    return (*logged, *(warning.category.__name__ for warning in caught), *("raise" for _ in raised))


def specified(key: str, action: str, on_error: str | None) -> tuple[str, ...]:
    """The rules in words: on_error decides first, then the policy."""
    if on_error == "detect" and action == "raise":
        return ("log",)
    if on_error == "correct" and key in SERIOUS:
        return ("raise",)
    if on_error == "raise" and key in (*SERIOUS, "corrected"):
        return ("raise",)
    warning = "UnverifiableWarning" if key == "unverifiable" else "CorruptionWarning"
    return {"ignore": (), "log": ("log",), "warn": (warning,), "raise": ("raise",)}[action]


@pytest.mark.parametrize("on_error", [None, *ON_ERROR])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("key", DEFAULTS)
def test_every_status_action_and_on_error(
    key: str, action: str, on_error: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if action == "ignore" and key in SERIOUS:
        with pytest.raises(ValueError, match=f"{key}='ignore' .* never silent: choose one of log, warn, raise"):
            errstate(**{key: action})
        return
    with errstate(**{key: action}):
        assert outcome(example(Status[key.upper()]), on_error, caplog) == specified(key, action, on_error)


@pytest.mark.parametrize("on_error", [None, *ON_ERROR])
@pytest.mark.parametrize("status", [Status.CLEAN, Status.PENDING])
def test_clean_and_pending_only_log_at_debug(
    status: Status, on_error: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with errstate(**dict.fromkeys(DEFAULTS, "raise")):
        assert outcome(example(status), on_error, caplog) == ()


def test_defaults(caplog: pytest.LogCaptureFixture) -> None:
    assert geterr() == DEFAULTS
    for key, action in DEFAULTS.items():
        assert outcome(example(Status[key.upper()]), None, caplog) == specified(key, action, None)


def test_every_status_that_holds_is_acted_upon(caplog: pytest.LogCaptureFixture) -> None:
    both = example(Status.CORRECTED, Status.UNVERIFIABLE)
    assert outcome(both, None, caplog) == ("log", "UnverifiableWarning")
    assert outcome(both, "raise", caplog) == ("raise",)
    with errstate(corrected="warn"):
        assert outcome(both, None, caplog) == ("CorruptionWarning",)
    with errstate(corrected="ignore", unverifiable="raise"):
        assert outcome(both, None, caplog) == ("raise",)
        assert outcome(both, "detect", caplog) == ("log",)
    lost = example(Status.UNCORRECTABLE, Status.CORRECTED, Status.UNVERIFIABLE)
    assert outcome(lost, None, caplog) == ("log", "raise")  # the exception's report tells the warning's text


def test_turning_warnings_into_errors_does_not_hide_the_exception() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SilentDataCorruptionError):
            deliver(example(Status.UNCORRECTABLE, Status.UNVERIFIABLE))
        with pytest.raises(UnverifiableWarning):
            deliver(example(Status.UNVERIFIABLE))


def test_unknown_keys_and_values_name_the_choices() -> None:
    with pytest.raises(TypeError, match=r"no repaired, lost: choose from corrected, checksum_fault, unverifiable"):
        errstate(repaired="log", lost="raise")
    with pytest.raises(ValueError, match="corrected='print' is not allowed: choose one of ignore, log, warn, raise"):
        errstate(corrected="print")
    with pytest.raises(ValueError, match="uncorrectable=True is not allowed: choose one of log, warn, raise"):
        errstate(uncorrectable=True)
    for call in (check_on_error, lambda on_error: deliver(example(Status.CLEAN), on_error)):
        with pytest.raises(ValueError, match="unknown on_error 'fix': choose None or one of correct, detect, raise"):
            call("fix")
    with monitor() as log, pytest.raises(ValueError, match="unknown on_error"):
        deliver(example(Status.CLEAN), "fix")
    assert len(log) == 0


def test_errstate_nests_restores_and_reenters() -> None:
    quiet = errstate(corrected="ignore")
    with quiet:
        with errstate(checksum_fault="warn"):
            assert geterr() == DEFAULTS | {"corrected": "ignore", "checksum_fault": "warn"}
            with errstate(corrected="raise"), quiet:
                assert geterr()["corrected"] == "ignore"
                with quiet:
                    assert geterr()["corrected"] == "ignore"
        assert geterr() == DEFAULTS | {"corrected": "ignore"}
    assert geterr() == DEFAULTS

    def fail() -> None:
        with quiet, errstate(unverifiable="raise"):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert geterr() == DEFAULTS
    geterr()["corrected"] = "raise"  # a copy
    assert geterr() == DEFAULTS


def test_errstate_decorates_functions() -> None:
    @errstate(corrected="raise")
    def depth(levels: int, *, fail: bool = False) -> list[str]:
        """Recurse."""
        if fail and not levels:
            raise KeyError("mine")
        inner = depth(levels - 1, fail=fail) if levels else []
        return [geterr()["corrected"], *inner]

    assert (depth.__name__, depth.__doc__) == ("depth", "Recurse.")
    assert depth(3) == ["raise"] * 4
    assert geterr() == DEFAULTS
    with pytest.raises(KeyError):
        depth(2, fail=True)
    assert geterr() == DEFAULTS


def test_errstate_refuses_functions_whose_body_runs_later() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None: ...

    async def both() -> object:
        yield 1

    for function in (generator, coroutine, both):
        with pytest.raises(TypeError, match=r"cannot decorate .* put `with errstate"):
            errstate(corrected="raise")(function)


def test_a_suspended_block_leaves_no_trace() -> None:
    def block() -> Iterator[None]:
        with errstate(corrected="raise"):
            yield

    suspended = block()
    next(suspended)
    with errstate(corrected="ignore"):
        suspended.close()
    assert geterr() == DEFAULTS


def test_each_thread_has_its_own_policy() -> None:
    shared = errstate(corrected="raise")
    barrier = threading.Barrier(4, timeout=10)
    seen: list[dict[str, str]] = []

    def work(enter: bool) -> None:
        for _ in range(20):
            if enter:
                with shared:
                    barrier.wait()
                    seen.append(geterr())
                    barrier.wait()
            else:
                barrier.wait()
                seen.append(geterr())
                barrier.wait()
            assert geterr() == DEFAULTS

    with shared, ThreadPoolExecutor(4) as pool:  # new threads start from the defaults, as NumPy's do
        list(pool.map(work, [True, False, True, False]))
        copied = contextvars.copy_context()
        assert pool.submit(copied.run, geterr).result()["corrected"] == "raise"
    assert len(seen) == 80
    assert seen.count(DEFAULTS) == 40
    assert seen.count(DEFAULTS | {"corrected": "raise"}) == 40


def test_each_asynchronous_task_has_its_own_policy() -> None:
    async def work(action: str) -> None:
        with errstate(corrected=action):
            for _ in range(5):
                await asyncio.sleep(0)
                assert geterr()["corrected"] == action

    async def together() -> None:
        await asyncio.gather(*(work(action) for action in ACTIONS))
        assert geterr() == DEFAULTS

    asyncio.run(together())


def test_monitors_collect_and_nest() -> None:
    deliver(example(Status.CLEAN))
    with monitor() as outer:
        deliver(example(Status.CLEAN))
        with monitor() as inner:
            deliver(example(Status.CORRECTED))
            with pytest.raises(SilentDataCorruptionError):
                deliver(example(Status.UNCORRECTABLE))
        deliver(example(Status.CLEAN))
    deliver(example(Status.CLEAN))
    assert [report.status.name for report in inner] == ["CORRECTED", "UNCORRECTABLE"]
    assert [report.status.name for report in outer] == ["CLEAN", "CORRECTED", "UNCORRECTABLE", "CLEAN"]
    assert outer.counts == {Status.CLEAN: 2, Status.CORRECTED: 1, Status.UNCORRECTABLE: 1}
    assert isinstance(outer.counts, dict)
    assert outer.counts[Status.PENDING] == 0
    assert (len(outer), len(inner), repr(inner)) == (4, 2, "<Monitor: 1 CORRECTED, 1 UNCORRECTABLE>")
    outer.reports.clear()  # a copy
    assert outer.reports == list(outer)
    assert len(outer) == 4


def test_a_monitor_ends_with_its_block_also_when_it_raises() -> None:
    with pytest.raises(SilentDataCorruptionError), monitor() as log:
        deliver(example(Status.UNCORRECTABLE))
    deliver(example(Status.CLEAN))
    assert len(log) == 1


def test_a_monitor_sees_every_thread() -> None:
    threads, each = 8, 250
    barrier = threading.Barrier(threads, timeout=10)

    def work(thread: int) -> int:
        barrier.wait()
        with monitor() as own:
            for number in range(each):
                deliver(example(Status.CLEAN, index=(thread, number)))
        return [report.index[0] for report in own].count(thread)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with monitor() as log, ThreadPoolExecutor(threads) as pool:
            own = list(pool.map(work, range(threads)))
    finally:
        sys.setswitchinterval(interval)
    assert own == [each] * threads
    assert sorted(report.index for report in log) == sorted(itertools.product(range(threads), range(each)))


def test_a_monitor_ends_while_the_collector_runs() -> None:
    """The collector may run wherever objects are made, and with it another thread, or a finaliser, that delivers."""

    def amid(_phase: str, _info: dict[str, int]) -> None:
        deliver(example(Status.CLEAN))

    threshold = gc.get_threshold()
    with monitor() as log:
        for _ in range(5000):  # more pairs than CPython keeps free
            deliver(example(Status.CLEAN))
        gc.callbacks.append(amid)
        gc.set_threshold(1)
        try:
            log._collect()
        finally:
            gc.set_threshold(*threshold)
            gc.callbacks.remove(amid)
    assert log.counts[Status.CLEAN] == len(log) >= 5000


def test_a_monitor_amid_the_beginning_and_the_end_of_another() -> None:
    """In a signal handler, say."""
    lengths = []

    def amid() -> None:
        with monitor() as inner:
            deliver(example(Status.CLEAN))
        lengths.append(len(inner))

    with after_calls(lambda path: path == abft_tsm2.policy.__file__, amid), monitor() as log:
        deliver(example(Status.CORRECTED))
    deliver(example(Status.CLEAN))
    assert log.counts[Status.CORRECTED] == 1
    assert set(lengths) == {1}
    assert len(lengths) > 5


def in_package(name: str, source: str) -> Callable[..., object]:
    """A function that, to every onlooker, was defined in a module of the package."""
    module = {"__name__": f"abft_tsm2.{name}", "deliver": deliver}
    exec(compile(source, f"{name}.py", "exec"), module)
    return module[name]


def line_here() -> int:
    return sys._getframe(1).f_lineno


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_warnings_and_log_records_point_at_the_caller(frames: int, caplog: pytest.LogCaptureFixture) -> None:
    source = "def step(report, depth):\n    return step(report, depth - 1) if depth else deliver(report)"
    step = in_package("step", source)
    expected = line_here() + 2
    with pytest.warns(UnverifiableWarning) as caught:
        step(example(Status.UNVERIFIABLE), frames - 1)
    assert (caught[0].filename, caught[0].lineno) == (__file__, expected)
    expected = line_here() + 1
    step(example(Status.CORRECTED), frames - 1)
    record = caplog.records[-1]
    assert (record.pathname, record.lineno, record.levelname) == (__file__, expected, "WARNING")


def test_warnings_point_at_a_direct_caller_and_at_a_decorated_function() -> None:
    expected = line_here() + 2
    with pytest.warns(UnverifiableWarning) as caught:
        deliver(example(Status.UNVERIFIABLE))
    assert (caught[0].filename, caught[0].lineno) == (__file__, expected)

    @errstate(corrected="warn")
    def decorated() -> int:
        deliver(example(Status.CORRECTED))
        return line_here() - 1

    with pytest.warns(CorruptionWarning) as caught:
        expected = decorated()
    assert (caught[0].filename, caught[0].lineno) == (__file__, expected)


def test_a_package_with_a_longer_name_is_a_caller() -> None:
    module = {"__name__": "abft_tsm2_extras.job", "deliver": deliver, "report": example(Status.UNVERIFIABLE)}
    with pytest.warns(UnverifiableWarning) as caught:
        exec(compile("deliver(report)", "job.py", "exec"), module)
    assert caught[0].filename == "job.py"


def test_a_repeated_warning_has_one_text() -> None:
    texts = []
    for seconds in (0.1, 0.2):
        report = example(Status.UNVERIFIABLE, reasons=("row 5 of A holds NaN",))
        report.seconds["verify"] = seconds
        with pytest.warns(UnverifiableWarning) as caught:
            deliver(report)
        texts.append(str(caught[0].message))
    assert texts[0] == texts[1]
    assert texts[0] == (
        "gemm m=4 k=5 n=6 float64: UNVERIFIABLE, a part could not be checked; row 5 of A holds NaN; "
        "C[17, 203] was off by 3.2e+07: recomputed"
    )


def test_without_logging_set_up_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("abft_tsm2")
    assert any(isinstance(handler, logging.NullHandler) for handler in logger.handlers)
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        deliver(example(Status.CORRECTED))
    finally:
        root.handlers = handlers
    assert capfd.readouterr() == ("", "")


def test_the_exception_carries_its_report_through_pickle() -> None:
    report = example(Status.UNCORRECTABLE, reasons=("C is read-only",))
    with pytest.raises(AbftError) as caught:
        deliver(report)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is SilentDataCorruptionError
    assert copy.report == report
    assert str(copy) == str(report)
    assert "reason: C is read-only" in str(copy)


def test_docstring_examples() -> None:
    results = doctest.testmod(abft_tsm2.policy)
    assert results.attempted > 0
    assert results.failed == 0
