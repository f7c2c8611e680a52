"""Exceptions and warnings of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from abft_tsm2.report import Report


class AbftError(Exception):
    """Base class of the package's exceptions."""


class SilentDataCorruptionError(AbftError):
    """A result is known to be wrong and was not repaired.

    Parameters
    ----------
    report : Report
        What was checked, what was found and why it could not be repaired.

    Attributes
    ----------
    report : Report
        The same report.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[SilentDataCorruptionError], tuple[Report]]:
        # BaseException would rebuild from the message, and a worker process could not send the report home.
        return type(self), (self.report,)


class NotSuitable(AbftError):
    """A kernel cannot serve this problem; the message is the reason, and the next kernel is tried."""


class KernelCompileError(AbftError):
    """A kernel does not compile; the message has the configuration and what the compiler says, with file and line."""


class UnverifiableWarning(UserWarning):
    """A part of a result could not be checked (for example because the input holds NaN)."""


class CorruptionWarning(UserWarning):
    """Corruption was found and the policy asked for a warning."""
