"""Handling of what a check has found: ignore, log, warn or raise; monitors, and reports that are still pending.

The policy lives in a context variable, as NumPy's floating-point error state does: each thread and each
asynchronous task has its own, and a new thread has the defaults. Monitors see the reports of all threads.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import sys
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import wraps
from types import FrameType, MappingProxyType
from typing import Any, Literal, Never, ParamSpec, Protocol, TypeVar

from abft_tsm2.errors import CorruptionWarning, SilentDataCorruptionError, UnverifiableWarning
from abft_tsm2.report import PRECEDENCE, REASONS_SHOWN, Report, Status

Action = Literal["ignore", "log", "warn", "raise"]
OnError = Literal["correct", "detect", "raise"]

ACTIONS: tuple[Action, ...] = ("ignore", "log", "warn", "raise")
ON_ERROR: tuple[OnError, ...] = ("correct", "detect", "raise")
DEFAULTS: Mapping[str, Action] = MappingProxyType(
    {
        "corrected": "log",
        "checksum_fault": "log",
        "unverifiable": "warn",
        "input_changed": "raise",
        "uncorrectable": "raise",
    }
)
_KEYS = {Status[key.upper()]: key for key in DEFAULTS}
_WRONG = frozenset({Status.INPUT_CHANGED, Status.UNCORRECTABLE})  # the result itself is wrong

logger = logging.getLogger("abft_tsm2")
logger.addHandler(logging.NullHandler())

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class _Scope:
    """The actions in force, and the scope to return to."""

    actions: Mapping[str, Action]
    outer: _Scope | None
    sync: bool = True
    kept: list[Report] | None = None  # where reports go instead of being delivered


_OUTERMOST = _Scope(DEFAULTS, None)
_scope: ContextVar[_Scope] = ContextVar("abft_tsm2_errstate", default=_OUTERMOST)


class errstate:
    """Set, for a block or a function, what happens when something was found.

    Used as `numpy.errstate`: a context manager or a decorator. What is not given stays as it was outside. One
    object may be entered again while it is active, and shared between threads.

    Parameters
    ----------
    corrected : {"ignore", "log", "warn", "raise"}, optional
        Faults were found and repaired; by default "log".
    checksum_fault : {"ignore", "log", "warn", "raise"}, optional
        Only a checksum was wrong; by default "log".
    unverifiable : {"ignore", "log", "warn", "raise"}, optional
        A part could not be checked; by default "warn".
    input_changed : {"log", "warn", "raise"}, optional
        An operand changed after it was encoded; by default "raise".
    uncorrectable : {"log", "warn", "raise"}, optional
        The result is wrong; by default "raise".
    sync : bool, optional
        False: products on a GPU are queued, or captured into a CUDA graph, repairs included, and their reports stay
        PENDING: the host waits for nothing. ``report.wait()``, or the end of a `monitor` block, collects them, and acts
        and raises as said above.
        True, which is the default: a protected product returns when its verdict is known.

    Raises
    ------
    TypeError
        For an unknown keyword, and where a generator or coroutine function is decorated.
    ValueError
        For an unknown action, and for "ignore" where a wrong result would be returned in silence.

    See Also
    --------
    seterr : the same without a block.
    geterr : the actions in force.

    Notes
    -----
    "raise" raises `SilentDataCorruptionError`, whose ``report`` tells which case it is. A thread started in
    the block has the defaults, as with NumPy, unless it is run in a copy of the context.

    Examples
    --------
    >>> with errstate(corrected="raise"):
    ...     geterr()["corrected"]
    'raise'
    >>> geterr()["corrected"]
    'log'
    """

    def __init__(
        self,
        *,
        corrected: Action | None = None,
        checksum_fault: Action | None = None,
        unverifiable: Action | None = None,
        input_changed: Action | None = None,
        uncorrectable: Action | None = None,
        sync: bool | None = None,
        **unknown: Never,  # for the message; type checkers refuse them
    ) -> None:
        if unknown:
            raise TypeError(f"errstate has no {', '.join(unknown)}: choose from {', '.join(DEFAULTS)}, sync")
        if not (sync is None or isinstance(sync, bool)):
            raise TypeError(f"sync is {sync!r}: True or False")
        given = {
            "corrected": corrected,
            "checksum_fault": checksum_fault,
            "unverifiable": unverifiable,
            "input_changed": input_changed,
            "uncorrectable": uncorrectable,
        }
        self._changes = {key: _checked(key, action) for key, action in given.items() if action is not None}
        self._sync = sync

    def _changed(self, scope: _Scope, outer: _Scope | None) -> _Scope:
        """This policy instead of that of a scope, and the scope to return to."""
        sync = scope.sync if self._sync is None else self._sync
        return _Scope({**scope.actions, **self._changes}, outer, sync, scope.kept)

    def __enter__(self) -> None:
        # The scope to return to is kept in the context, not in this object, which several threads may hold at once.
        outer = _scope.get()
        _scope.set(self._changed(outer, outer))

    def __exit__(self, *exception: object) -> None:
        outer = _scope.get().outer
        if outer is not None:
            _scope.set(outer)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: its body runs under this policy."""
        suspends = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(test(function) for test in suspends):
            # Their bodies run after the call has returned, when the policy would no longer hold.
            raise TypeError(
                f"errstate cannot decorate {function!r}, a generator or coroutine function: "
                "put `with errstate(...):` inside of it"
            )

        @wraps(function)
        def under_policy(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return under_policy


def _checked(key: str, action: Action) -> Action:
    wrong = Status[key.upper()] in _WRONG
    choices = tuple(choice for choice in ACTIONS if not (wrong and choice == "ignore"))
    if action not in choices:
        why = ", because a wrong result is never silent" if wrong and action == "ignore" else ""
        raise ValueError(f"{key}={action!r} is not allowed{why}: choose one of {', '.join(choices)}")
    return action


def geterr() -> dict[str, Action]:
    """Return the actions in force here.

    Returns
    -------
    dict
        The keywords of `errstate`, each with its action.

    Examples
    --------
    >>> geterr()["uncorrectable"]
    'raise'
    """
    return dict(_scope.get().actions)


def seterr(
    *,
    corrected: Action | None = None,
    checksum_fault: Action | None = None,
    unverifiable: Action | None = None,
    input_changed: Action | None = None,
    uncorrectable: Action | None = None,
    sync: bool | None = None,
    **unknown: Never,
) -> dict[str, Any]:
    """Set what happens when something was found: here, from now on, as `numpy.seterr` does.

    Parameters
    ----------
    corrected, checksum_fault, unverifiable, input_changed, uncorrectable, sync : optional
        As of `errstate`. What is not given stays as it is. Inside of an `errstate` block they hold to its end.

    Returns
    -------
    dict
        What was in force before, ``sync`` included: ``seterr(**old)`` restores it.

    Raises
    ------
    TypeError, ValueError
        As of `errstate`; then nothing has changed.

    See Also
    --------
    errstate : for a block or a function.
    geterr : the actions in force.

    Examples
    --------
    >>> old = seterr(corrected="raise")
    >>> geterr()["corrected"]
    'raise'
    >>> _ = seterr(**old)
    >>> geterr()["corrected"]
    'log'
    """
    given: dict[str, Any] = {
        "corrected": corrected,
        "checksum_fault": checksum_fault,
        "unverifiable": unverifiable,
        "input_changed": input_changed,
        "uncorrectable": uncorrectable,
    }
    new, scope = errstate(**given, sync=sync, **unknown), _scope.get()
    _scope.set(new._changed(scope, scope.outer))
    return {**scope.actions, "sync": scope.sync}


def synchronous() -> bool:
    """Whether a protected product waits for its verdict here: ``errstate(sync=...)``."""
    return _scope.get().sync


def observed() -> bool:
    """Whether anything sees the report of a clean operation: a monitor, one that this is a part of, or the log."""
    return bool(_monitors) or _scope.get().kept is not None or logger.isEnabledFor(logging.DEBUG)


@contextmanager
def reports_kept(*, sync: bool = True) -> Iterator[list[Report]]:
    """Keep the reports of the block: no monitor sees them and nothing is done about them. For an operation that is made
    of others, and delivers one report of them all. `sync`: as in `errstate`."""
    outer = _scope.get()
    kept: list[Report] = []
    _scope.set(_Scope(outer.actions, outer, sync, kept))
    try:
        yield kept
    finally:
        _scope.set(outer)


class Monitor:
    """The reports of a `monitor` block, in order of arrival.

    ``len(log)`` is their number, iterating gives them; a batch counts as one report. Reports that are PENDING are
    collected at the end of the block, and replaced by the final ones. A task of a cluster that ran twice in one
    computation has one report, the worse one.
    """

    def __init__(self) -> None:
        self._reports: dict[object, Report] = {}  # by identity, or a key of its own where there is none
        self._lock = threading.RLock()

    def _receive(self, report: Report, identity: str) -> None:
        """Take a report in, unless this identity has one that is no better.

        Reports without an identity need no lock: one that another thread held while the process was forked would never
        be released.
        """
        if not identity:
            self._reports[object()] = report
            return
        with self._lock:
            known = self._reports.get(identity)
            if known is None or PRECEDENCE.index(report.status) < PRECEDENCE.index(known.status):
                self._reports[identity] = report

    @property
    def reports(self) -> list[Report]:
        """The reports so far (a new list)."""
        return list(self._reports.copy().values())

    @property
    def counts(self) -> Counter[Status]:
        """How many reports have each status; 0 for a status that none has."""
        return Counter(report.status for report in self.reports)

    def _collect(self) -> None:
        """Wait for what is pending; raise the first of what they raise when all have been collected."""
        raised: list[SilentDataCorruptionError] = []
        # A copy of the dictionary, whose making runs no Python code: a list of its items makes tuples, the collector
        # may run meanwhile, and with it another thread that delivers.
        for key, report in self._reports.copy().items():
            if report.status is Status.PENDING:
                try:
                    self._reports[key] = report.wait()
                except SilentDataCorruptionError as error:
                    self._reports[key] = error.report
                    raised.append(error)
        if raised:
            raise raised[0]

    def __len__(self) -> int:
        return len(self._reports)

    def __iter__(self) -> Iterator[Report]:
        return iter(self.reports)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {status.name}" for status, count in self.counts.items())
        return f"<Monitor: {counts or 'no reports'}>"


# Replaced as a whole under the lock and read without it: a process forked while another thread delivers must
# not inherit a lock that is never released. A signal handler that comes meanwhile may begin and end one, too.
_monitors: tuple[Monitor, ...] = ()
_lock = threading.RLock()


class ReportSource(Protocol):
    """Where reports come from beside the calls of this process."""

    def begin(self) -> None:
        """A monitor begins."""

    def end(self) -> None:
        """A monitor ends: `receive` what has not been handed over yet."""


_sources: list[ReportSource] = []


def add_source(source: ReportSource) -> None:
    """Have every monitor collect from there, too."""
    _sources.append(source)


@contextmanager
def monitor() -> Iterator[Monitor]:
    """Collect every report of the block, from all threads of the process.

    Yields
    ------
    Monitor
        With ``reports``, ``counts``, ``len()`` and iteration; it can still be read after the block.

    Examples
    --------
    >>> with monitor() as log:
    ...     deliver(Report(Status.CLEAN, "gemm", 2, 3, 4, "float64"))
    >>> len(log), log.counts[Status.CLEAN]
    (1, 1)
    """
    global _monitors
    log = Monitor()
    for source in _sources:
        source.begin()
    with _lock:
        _monitors = (*_monitors, log)
    try:
        yield log
    finally:
        for source in _sources:
            source.end()
        with _lock:
            _monitors = tuple(other for other in _monitors if other is not log)
        log._collect()


def check_on_error(on_error: str | None) -> None:
    """Raise ValueError, with the choices, unless `on_error` is one that `deliver` knows."""
    if on_error is not None and on_error not in ON_ERROR:
        raise ValueError(f"unknown on_error {on_error!r}: choose None or one of {', '.join(ON_ERROR)}")


def deliver(report: Report, on_error: str | None = None, *, identity: str = "") -> None:
    """Hand a finished report to the monitors, then do what the policy says.

    Every protected operation calls this once, at its end. Each status that holds (``report.status`` and
    ``report.also``) has its action; there is at most one log record, one warning and one exception.

    Parameters
    ----------
    report : Report
        What was checked and found.
    on_error : {None, "correct", "detect", "raise"}
        None: as `errstate`. "correct": a wrong result raises whatever `errstate` says. "detect": nothing
        raises, and what would have is logged at WARNING. "raise": a repaired result raises too.
    identity : str
        Of the task that made the report, where it may run twice: a monitor counts it once.

    Raises
    ------
    SilentDataCorruptionError
        With the report, when an action is "raise".
    ValueError
        If `on_error` is unknown.

    Notes
    -----
    Every report goes to the logger "abft_tsm2", and the record carries it as ``record.report``: at WARNING if
    an action is "log", at DEBUG otherwise (CLEAN, for one). Log records and warnings name the line outside of
    the package that called it.
    """
    if on_error is not None:
        check_on_error(on_error)
    if (kept := _scope.get().kept) is not None:
        kept.append(report)
        return
    if _monitors:
        receive(report, identity)
    act(report, on_error)


def receive(report: Report, identity: str = "") -> None:
    """`deliver` to the monitors alone, for a report that was acted on in another process."""
    for log in _monitors:
        log._receive(report, identity)


def act(report: Report, on_error: str | None = None) -> None:
    """`deliver` without the monitors, for the final report of a pending one, which they have; nothing where reports are
    kept."""
    if _scope.get().kept is not None:
        return
    quiet = report.status in (Status.CLEAN, Status.PENDING) and not report.also
    if quiet and not logger.isEnabledFor(logging.DEBUG):
        return
    actions = {} if quiet else actions_for(report, on_error)
    level = logging.WARNING if "log" in actions.values() else logging.DEBUG
    if logger.isEnabledFor(level):
        logger.log(level, "%s", report, stacklevel=caller_level(), extra={"report": report})
    # First, so that a filter that turns warnings into errors cannot hide the more serious exception.
    if "raise" in actions.values():
        raise SilentDataCorruptionError(report)
    if (category := warning_for(actions)) is not None:
        warnings.warn(warning_text(report), category, stacklevel=caller_level())


def actions_for(report: Report, on_error: str | None = None) -> dict[Status, Action]:
    """What is to be done about each status that holds."""
    return {status: _action(status, on_error) for status in (report.status, *report.also) if status in _KEYS}


def warning_for(actions: Mapping[Status, Action]) -> type[Warning] | None:
    """The category of the warning among these actions; None where nothing is to be warned of."""
    warned = {status for status, action in actions.items() if action == "warn"}
    return (UnverifiableWarning if warned == {Status.UNVERIFIABLE} else CorruptionWarning) if warned else None


def _action(status: Status, on_error: str | None) -> Action:
    action = _scope.get().actions[_KEYS[status]]
    if on_error == "detect":
        return "log" if action == "raise" else action
    always = {"correct": _WRONG, "raise": _WRONG | {Status.CORRECTED}}.get(on_error or "", frozenset())
    return "raise" if status in always else action


def warning_text(report: Report) -> str:
    """Leave out times and residuals: Python shows a warning once per place and text, and keeps every text."""
    found = (*report.reasons, *map(str, report.faults))
    return "; ".join((report.headline, *found[:REASONS_SHOWN]))


def caller_level() -> int:
    """Return the stacklevel, seen from the calling function, of the first frame outside of the package."""
    package = __name__.partition(".")[0]
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame = frame.f_back
        level += 1
    return level


_SWEPT_AFTER = 64  # pending reports, after which those are acted on that were dropped


class PendingReport(Protocol):
    """A verdict that is awaited."""

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return at once, and say the last word."""

    @property
    def repeats(self) -> bool:
        """Whether there may be more to say later: of a product in a graph. Else `wait` is called once."""

    @property
    def last(self) -> Report | None:
        """What was said last, where it `repeats`."""

    def wait(self) -> Report:
        """Wait for it, and return its report."""

    @staticmethod
    def dismiss(pending: Any, /) -> Any:
        """Of verdicts that have arrived, those that are not clean."""


class Deferred(Report):
    """A PENDING report: `wait` gives the final one."""

    _open: _Open
    _final: Report | None
    _lock: threading.Lock
    _on_error: str | None

    @classmethod
    def of(
        cls,
        pending: PendingReport,
        on_error: str | None,
        *,
        operation: str,
        sizes: tuple[int, int, int],
        dtype: str,
        device: str = "",
    ) -> Deferred:
        """The report of a product whose verdict is pending."""
        m, k, n = sizes
        known: dict[str, Any] = {"operation": operation, "m": m, "k": k, "n": n, "dtype": dtype, "device": device}
        self = cls.made_of(status=Status.PENDING, **known, seconds={})
        entry = _Open(weakref.ref(self), pending)
        state = {"_open": entry, "_final": None, "_lock": threading.Lock(), "_on_error": on_error}
        self.__dict__.update(state)
        _remember(entry)
        return self

    def wait(self) -> Report:
        """Wait for the verdict and act on it as `errstate` says here.

        Returns
        -------
        report : Report
            The final one, the same at each call. Of a product in a CUDA graph: on all replays so far.

        Raises
        ------
        SilentDataCorruptionError
            The result is wrong and was not repaired.
        """
        with self._lock:
            if (verdict := self._open.verdict) is not None:
                final = verdict.repeats and verdict.arrived
                self._final = verdict.wait()
                if final or not verdict.repeats:
                    self._open.verdict = None
        assert self._final is not None
        act(self._final, self._on_error)
        return self._final

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process cannot wait for it.
        return Report, tuple(getattr(self, part.name) for part in fields(Report))


@dataclass(eq=False)
class _Open:
    """A report that may still be waited for, and its verdict until that was: it is acted on once."""

    report: weakref.ref[Deferred] | None
    verdict: PendingReport | None

    @property
    def dropped(self) -> bool:
        """Whether the report is unobserved: dropped, or never made."""
        return self.report is None or self.report() is None


_open: deque[_Open] = deque()


class CallFacts(Protocol):
    """What a PENDING report says of its operation."""

    @property
    def operation(self) -> str: ...
    @property
    def sizes(self) -> tuple[int, int, int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...


def queued(verdict: PendingReport, on_error: str | None, info: CallFacts | None) -> Deferred | None:
    """The PENDING report of a verdict, by `CallFacts`; None without these: it is unobserved, and what is found is
    told when verdicts are swept."""
    if info is None:
        _remember(_Open(None, verdict))
        return None
    known: dict[str, Any] = {"operation": info.operation, "sizes": info.sizes, "dtype": info.dtype}
    return Deferred.of(verdict, on_error, **known, device=info.device)


def _remember(entry: _Open) -> None:
    _open.append(entry)
    if entry.verdict is not None and entry.verdict.repeats:  # within a capture nothing is waited for
        return
    if len(_open) >= _SWEPT_AFTER * _interval[0]:
        _sweep()


def _sweep() -> None:
    """Let go of what was waited for, and act on verdicts that have arrived and whose reports were dropped."""
    dropped: list[PendingReport] = []
    try:
        with _sweeping:
            for _ in range(len(_open)):
                entry = _open.popleft()
                verdict = entry.verdict
                if verdict is None:
                    continue
                if entry.dropped and verdict.arrived:
                    dropped.append(verdict)
                else:
                    _open.append(entry)
            _interval[0] = 1 + 2 * len(_open) // _SWEPT_AFTER  # not each time at the same ones
        kinds = {type(verdict) for verdict in dropped}
        left = [v for kind in kinds for v in kind.dismiss([one for one in dropped if type(one) is kind])]
    except BaseException:  # an interrupt: they are swept the next time
        _open.extend(_Open(None, verdict) for verdict in dropped)
        raise
    _act_on_all(left)


_sweeping = threading.Lock()
_interval = [1]


def _act_on_all(verdicts: Iterable[PendingReport]) -> None:
    """Act on each, whatever acting on another one raises; the first of that at the end."""
    raised: list[Exception] = []
    left = deque(verdicts)
    try:
        while left:
            try:
                _act_on_dropped(left[0])
            except Exception as error:
                raised.append(error)
            left.popleft()
    finally:  # after an interrupt: they are acted on the next time
        _open.extend(_Open(None, verdict) for verdict in left)
    if raised:
        raise raised[0]


def _act_on_dropped(verdict: PendingReport) -> None:
    """Wait for a verdict whose report was dropped, and warn if it is not ok."""
    told = verdict.last
    report = verdict.wait()
    if not report.ok and report.status is not Status.PENDING and report != told:
        logger.warning("never waited for: %s", report, extra={"report": report})
        warnings.warn(f"a report was never waited for: {report.headline}", CorruptionWarning, stacklevel=2)


@atexit.register
def _sweep_at_exit() -> None:
    left = [entry.verdict for entry in _open if entry.verdict is not None]
    _open.clear()
    _act_on_all(left)
