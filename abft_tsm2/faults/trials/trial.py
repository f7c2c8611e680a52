"""One trial: its operands, its faults, its finding, and what trials of every operation share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from abft_tsm2.faults.plan import Plan
from abft_tsm2.faults.trials.flushing import as_wanted
from abft_tsm2.policy import errstate
from abft_tsm2.report import Report

OUTCOMES = (
    *("clean", "false_alarm", "masked", "below_bound", "cancelled"),
    *("corrected", "detected", "sdc", "crash", "hang"),
)
"""What may become of a trial; docs/campaigns.rst says when each is given."""


@dataclass(frozen=True)
class Workload:
    """The operands that the trials of a scene, the group that shares them, are carried out with; they follow from the
    seed.

    Attributes
    ----------
    operation : str
    m, k, n : int
        A is m x k and B is k x n; a matrix that is factored is m x n.
    dtype, family, order : str
        Type, distribution, and the order of the operands in memory ("C" or "F").
    seed : tuple of int
    options : tuple of (str, value) pairs
        What the suite adds, for the operation.
    """

    operation: str
    m: int
    k: int
    n: int
    dtype: str
    family: str
    order: str
    seed: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Trial:
    """One trial: the faults that are planted, none in a clean one, and how the operation is protected."""

    number: int
    plans: tuple[Plan, ...]
    scheme: str


@dataclass
class Finding:
    """What became of a trial.

    Attributes
    ----------
    outcome : str
        One of `OUTCOMES`.
    status : str
        The report's, or what another scheme says.
    bit : int
        The number of the bit that was changed, -1 where it was not one bit.
    located : str
        Of what was found: "exact" if the report names the places and no others, "covered" if they are among those
        it names, "wrong" if not; empty where there is nothing to locate.
    size : float or None
        By how much the fault moved the checksum of a line, in units of what is promised to be found.
    relative : float or None
        The largest change of an element, relative to the root mean square of the result.
    limit : float or None
        The detection limit, relative to the same.
    chance : float or None
        The probability that changes of several elements, some of which would be found alone, are hidden by random
        weights; None where there is no such change, or where it is not worked out.
    closest : float or None
        The largest clean residual over its bound, of trials without a fault.
    restarted : bool
        Whether a factorisation was restarted from A, because it stayed wrong after a repair.
    sharpness : float or None
        The bound of the check without a fault, in the judge's own yardsticks (medians over the lines).
    seconds : float
        That the call took.
    note : str
        What went wrong in the experiment itself, or why a line hides a fault.
    report : Report or None
        Of the protected operation; its first line is kept where a promise is broken.
    """

    outcome: str
    status: str = ""
    bit: int = -1
    located: str = ""
    size: float | None = None
    relative: float | None = None
    limit: float | None = None
    chance: float | None = None
    closest: float | None = None
    sharpness: float | None = None
    restarted: bool = False
    seconds: float = 0.0
    note: str = ""
    report: Report | None = None

    def to_line(self) -> dict[str, Any]:
        """What is written down."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "report"}
        if (self.outcome in BROKEN or self.located == WRONG_PLACE) and self.report is not None and not self.note:
            found["note"] = self.report.headline
        return found


BROKEN = ("sdc", "false_alarm", "crash", "hang")
"""Outcomes that a protected operation must not have."""

WRONG_PLACE = "wrong"
"""How a fault must not be located."""

REFUSED = "refused"
DETECTING = ("detect", "second seed")  # schemes that repair nothing, or not what their second check finds
COMPUTED = ("product", "partial")  # sites of a product after which it can be computed again
FACTORED = ("lu", "solve", "lu_solve", "cholesky", "cho_solve")
OPERANDS = ("A", "b", "lu", "c")  # at sites of these: what a repair would be made from


class TrialGroup(ABC):
    """Operands, an oracle, and the trials that share them.

    Parameters
    ----------
    workload : Workload
    xp : module
        NumPy or CuPy.
    """

    @abstractmethod
    def __init__(self, workload: Workload, xp: Any) -> None: ...

    def run(self, trials: Sequence[Trial], batch: int = 1) -> Iterator[Finding]:
        """Yield the finding of each trial, in their order; up to `batch` of them are carried out before one is
        yielded."""
        for trial in trials:
            yield self.one(trial)

    @abstractmethod
    def one(self, trial: Trial) -> Finding:
        """Carry out a trial and judge it."""


@contextmanager
def quiet() -> Iterator[None]:
    """For the calls that are tried: outcomes are counted, not warned of; SilentDataCorruptionError is still raised.
    Subnormal numbers are zero in them where that is wanted."""
    with errstate(corrected="ignore", checksum_fault="ignore", unverifiable="ignore"), as_wanted():
        yield


def drawn_from(given: Any) -> list[Any]:
    """The values that an option of a suite may take: a list of them, or the one that is given."""
    return given if isinstance(given, list) and given else [given]


PEERS = ("none", "double", "rtol", "fixed", "crc", "fingerprint")
"""Schemes that campaigns compare with: they promise nothing, and break no promise."""


def protects(scheme: str) -> bool:
    """Whether a scheme makes promises that it can break.

    Examples
    --------
    >>> protects("protected"), protects("double")
    (True, False)
    """
    return scheme not in PEERS


def breach(line: Mapping[str, Any]) -> str:
    """Which promise of its scheme a trial breaks, by what is written of it; empty where it keeps them all.

    An outcome of `BROKEN`; `WRONG_PLACE`, where a fault was said to be elsewhere; or `REFUSED`, where a result was
    refused though its fault came once, and what it is computed from was right.
    """
    scheme, outcome = line.get("scheme", "none"), line.get("outcome", "")
    if not protects(scheme):
        return ""
    if outcome in BROKEN:
        return str(outcome)
    if line.get("located") == WRONG_PLACE and line.get("operation") not in FACTORED:  # whose share counts
        return WRONG_PLACE
    return REFUSED if outcome == "detected" and scheme not in DETECTING and _repairable(line) else ""


def _repairable(line: Mapping[str, Any]) -> bool:
    """Whether all that a repair needs is there."""
    site = line.get("site", "")
    array = site.rpartition(".")[2].rpartition("_")[2]
    computed = site in COMPUTED or (line.get("operation") in FACTORED and "+" not in site and array not in OPERANDS)
    return computed and not line.get("persistent", True) and line.get("status") == "UNCORRECTABLE"
