"""Reports of products that are still in a queue: `Deferred`, and what becomes of those that nobody waits for.

A verdict that is there and that nobody has asked for is looked at when later products are queued, and at the end of
the process: a wrong result is never silent.
"""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from collections import deque
from dataclasses import dataclass, fields
from typing import Any, Protocol

from abft_tsm2 import policy
from abft_tsm2.errors import CorruptionWarning
from abft_tsm2.report import Report, Status

_LOOKED_AT = 64  # pending reports, after which those are looked for that nobody has any more


class Pending(Protocol):
    """A verdict on its way."""

    @property
    def there(self) -> bool:
        """Whether it has arrived."""

    def wait(self) -> Report:
        """Wait for it, and say what it came to. Called once."""

    @staticmethod
    def dismiss(pending: Any, /) -> Any:
        """Of verdicts that have arrived, those that somebody has to hear of."""


class Facts(Protocol):
    """What is known of a product before its verdict."""

    @property
    def operation(self) -> str: ...
    @property
    def sizes(self) -> tuple[int, int, int]: ...
    @property
    def dtype(self) -> str: ...


class Deferred(Report):
    """A PENDING report: `wait` gives the final one."""

    _open: _Open
    _final: Report | None
    _lock: threading.Lock
    _on_error: str | None

    @classmethod
    def of(cls, pending: Pending, facts: Facts, on_error: str | None) -> Deferred:
        """The report of a product whose verdict is pending."""
        m, k, n = facts.sizes
        self = cls.made_of(status=Status.PENDING, operation=facts.operation, m=m, k=k, n=n, dtype=facts.dtype)
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
            The final one, the same at each call.

        Raises
        ------
        SilentDataCorruptionError
            The result is wrong and was not repaired.
        """
        with self._lock:
            if self._open.verdict is not None:
                self._final, self._open.verdict = self._open.verdict.wait(), None
        assert self._final is not None
        policy.act(self._final, self._on_error)
        return self._final

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process cannot wait for it.
        return Report, tuple(getattr(self, part.name) for part in fields(Report))


@dataclass(eq=False)
class _Open:
    """A report that somebody may have, and its verdict until that has been waited for: it is heard of once."""

    report: weakref.ref[Deferred]
    verdict: Pending | None


_open: deque[_Open] = deque()


def _remember(entry: _Open) -> None:
    _open.append(entry)
    if len(_open) >= _LOOKED_AT * _interval[0]:
        _look()


def _look() -> None:
    """Let go of what was waited for, and look at verdicts that have arrived and whose reports nobody has."""
    with _looking:
        forgotten = []
        for _ in range(len(_open)):
            entry = _open.popleft()
            verdict = entry.verdict
            if verdict is None:
                continue
            if entry.report() is None and verdict.there:
                forgotten.append(verdict)
            else:
                _open.append(entry)
        _interval[0] = 1 + 2 * len(_open) // _LOOKED_AT  # not each time at the same ones
    kinds = {type(verdict) for verdict in forgotten}
    for kind in kinds:
        for verdict in kind.dismiss([one for one in forgotten if type(one) is kind]):
            _forgotten(verdict)


_looking = threading.Lock()
_interval = [1]


def _forgotten(verdict: Pending) -> None:
    """Say what a verdict came to whose report nobody has any more."""
    report = verdict.wait()
    if not report.ok:
        policy.logger.warning("nobody waited for: %s", report, extra={"report": report})
        warnings.warn(f"nobody waited for a report: {report.headline}", CorruptionWarning, stacklevel=2)


@atexit.register
def _last() -> None:
    while _open:
        entry = _open.popleft()
        if entry.verdict is not None:
            _forgotten(entry.verdict)
