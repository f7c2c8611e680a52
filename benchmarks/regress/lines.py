"""A case, which is one call of a public function, and the line that says all of what came of it."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import abft_tsm2 as ft
from abft_tsm2.core.faultpoint import planting

OMITTED = {"reasons", "seconds", "time", "detail", "reason", "repaired", "host", "device", "worker"}
"""Of reports and trials: prose, times, and where it was computed."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes
    ----------
    name : str
    operands : callable
        Makes the operands anew: no two calls have an array in common.
    call : callable
        ``call(*operands)``, with ``on_stage=`` where a fault is planted by a hook; what it returns is printed.
    planter : callable, optional
        Makes what plants the fault, which has a list ``planted``.
    by_hook : bool
        Plant through ``on_stage``; else into the procedure that runs without a hook.
    group : str
        Operation and stage of the fault: one fault of each group has to be noticed.
    details : callable, optional
        Makes further lines, once the call has ended.
    """

    name: str
    operands: Callable[[], tuple[Any, ...]]
    call: Callable[..., Any]
    planter: Callable[[], Any] | None = None
    by_hook: bool = False
    group: str = ""
    details: Callable[[], Iterable[str]] = tuple


@dataclass
class Outcome:
    """What came of a case.

    Attributes
    ----------
    line : str
    statuses : Counter
        Of all reports, those of the products of a batch in place of the batch's.
    repairs : Counter
        By the kind of a fault that was repaired.
    planted : int
        Faults.
    noticed : bool
        A fault was planted, and the outcome is not that of a clean call.
    """

    line: str = ""
    statuses: Counter[str] = field(default_factory=Counter)
    repairs: Counter[str] = field(default_factory=Counter)
    planted: int = 0
    noticed: bool = False


def run(case: Case) -> Outcome:
    """Carry out a case."""
    operands, planter = case.operands(), None if case.planter is None else case.planter()
    found: Any = None
    reports: list[Any] = []
    raised = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            if case.by_hook:
                found = case.call(*operands, on_stage=planter)
            else:
                with planting(planter):
                    found = case.call(*operands)
        except Exception as error:
            raised = type(error).__name__
            reports = [error.report] if isinstance(error, ft.SilentDataCorruptionError) else []
    values = list(_values(found, reports))
    outcome = Outcome()
    for report in reports:
        _count(report, outcome)
    said = Counter(one.category.__name__ for one in warned)
    planted = outcome.planted = _planted(planter)
    outcome.noticed = bool(planted) and (bool(raised) or outcome.statuses.keys() != {"CLEAN"})
    words = [raised and f"raised {raised}", *(_status(report) for report in reports)]
    words += [f"planted {planted}"] if planter is not None else []
    words += [f"{name} x {count}" for name, count in sorted(said.items())]
    words += [f"result {digest(values)}", f"report {digest(told(one) for one in reports)}"]
    words += [f"operands {digest(_values(operands, []))}"]
    outcome.line = f"{case.name}: {', '.join(filter(None, words))}"
    return outcome


def _planted(planter: Any) -> int:
    """How many faults were planted, in graphs as well."""
    if hasattr(planter, "stop"):
        planter.stop()
    return len(getattr(planter, "planted", ()))


def _status(report: Any) -> str:
    return "+".join([report.status.name, *(one.name for one in report.also)])


def _count(report: Any, outcome: Outcome) -> None:
    for one in report.products or (report,):
        outcome.statuses[one.status.name] += 1
        outcome.repairs.update(fault.kind for fault in one.faults if fault.repair)


# ---- digests -------------------------------------------------------------------------------------------------------


def digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()[:16]


def without_prose(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: without_prose(value) for key, value in x.items() if key not in OMITTED}
    return [without_prose(one) for one in x] if isinstance(x, list) else x


def told(report: Any) -> bytes:
    """A report without prose and times, and the limits of its checks, which its JSON has not."""
    limits = [[repr(getattr(check, "limits", None)) for check in one.checks] for one in (report, *report.products)]
    return json.dumps([without_prose(report.to_dict()), limits], sort_keys=True).encode()


def _values(x: Any, reports: list[Any]) -> Iterator[bytes]:
    """The bits of everything in x but for reports, which are put into the list."""
    if isinstance(x, ft.Report):
        reports.append(x)
    elif isinstance(x, ft.Encoded):
        yield from _values((x.array, x.row_checksums, x.column_checksums), reports)
    elif hasattr(x, "dtype") and hasattr(x, "shape"):
        yield _bits(x)
    elif isinstance(x, Mapping):
        for key in sorted(x):
            yield str(key).encode()
            yield from _values(x[key], reports)
    elif isinstance(x, tuple | list):
        yield type(x).__name__.encode()
        for one in x:
            yield from _values(one, reports)
    else:
        yield repr(x).encode()


def _bits(x: Any) -> bytes:
    """Of an array: library, type, shape, order in memory, and elements."""
    shown = np.asarray(x.get() if hasattr(x, "get") else x)
    kind = type(x).__module__.partition(".")[0]
    steps = [step // shown.itemsize for step, size in zip(shown.strides, shown.shape, strict=True) if size > 1]
    return f"{kind} {shown.dtype} {shown.shape} {steps}".encode() + np.ascontiguousarray(shown).tobytes()
