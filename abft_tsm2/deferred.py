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
from dataclasses import fields
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

    _pending: Pending | None
    _final: Report | None
    _lock: threading.Lock
    _on_error: str | None

    @classmethod
    def of(cls, pending: Pending, facts: Facts, on_error: str | None) -> Deferred:
        """The report of a product whose verdict is pending."""
        m, k, n = facts.sizes
        self = cls.made_of(status=Status.PENDING, operation=facts.operation, m=m, k=k, n=n, dtype=facts.dtype)
        state = {"_pending": pending, "_final": None, "_lock": threading.Lock(), "_on_error": on_error}
        self.__dict__.update(state)
        _remember(self, pending)
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
            if self._pending is not None:
                self._final, self._pending = self._pending.wait(), None
        assert self._final is not None
        policy.act(self._final, self._on_error)
        return self._final

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process cannot wait for it.
        return Report, tuple(getattr(self, part.name) for part in fields(Report))


_open: deque[tuple[weakref.ref[Deferred], Pending]] = deque()


def _remember(report: Deferred, pending: Pending) -> None:
    _open.append((weakref.ref(report), pending))
    if len(_open) >= _LOOKED_AT * _interval[0]:
        _look()


def _look() -> None:
    """Let go of what was waited for, and look at verdicts that have arrived and whose reports nobody has."""
    with _looking:
        forgotten = []
        for _ in range(len(_open)):
            old, verdict = _open.popleft()
            held = old()
            if held is not None:
                if held._pending is not None:
                    _open.append((old, verdict))
            elif verdict.there:
                forgotten.append(verdict)
            else:
                _open.append((old, verdict))
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
        old, verdict = _open.popleft()
        held = old()
        if held is None or held._pending is not None:
            _forgotten(verdict)
