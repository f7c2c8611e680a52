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

_LOOKED_AT = 2  # forgotten reports that are looked at for each new one


class Pending(Protocol):
    """A verdict on its way."""

    @property
    def there(self) -> bool:
        """Whether it has arrived."""

    def wait(self) -> Report:
        """Wait for it, and say what it came to. Called once."""


class Deferred(Report):
    """A PENDING report: `wait` gives the final one."""

    _pending: Pending | None
    _final: Report | None
    _lock: threading.Lock
    _on_error: str | None

    @classmethod
    def of(
        cls, pending: Pending, operation: str, sizes: tuple[int, int, int], dtype: str, on_error: str | None
    ) -> Deferred:
        """The report of a product whose verdict is pending."""
        m, k, n = sizes
        self = cls.plain(status=Status.PENDING, operation=operation, m=m, k=k, n=n, dtype=dtype)
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
    for _ in range(_LOOKED_AT):
        try:
            old, verdict = _open.popleft()
        except IndexError:
            break
        held = old()
        if held is not None:
            if held._pending is not None:
                _open.append((old, verdict))
        elif verdict.there:
            _forgotten(verdict)
        else:
            _open.append((old, verdict))
    _open.append((weakref.ref(report), pending))


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
