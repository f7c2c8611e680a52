"""Trials of stored matrices, of which bits change between the encoding and the next use."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import bit_pattern, to_host
from abft_tsm2.checksum.encoded import Encoded, encode
from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.faults.injection import Injector
from abft_tsm2.faults.operands.products import operands, require_family
from abft_tsm2.faults.plan import Plan, require_known
from abft_tsm2.faults.sites import SITES
from abft_tsm2.faults.trials.trial import Finding, Trial, TrialGroup, Workload, quiet
from abft_tsm2.report import Report, Status

Array = Any
STAGE = "stored"


class Said(NamedTuple):
    """What a scheme says of a matrix: whether something was found, whether the matrix may be used, its report."""

    found: bool
    usable: bool
    status: str
    report: Report | None = None


class StoredCopy(NamedTuple):
    """A matrix in storage, as each scheme keeps it: encoded, with a copy, with a CRC of its bytes."""

    encoded: Encoded
    copy: Array
    crc: int


def _correct(kept: StoredCopy) -> Said:
    try:
        report = kept.encoded.correct()
    except SilentDataCorruptionError as error:
        return Said(True, False, error.report.status.name, error.report)
    return Said(report.status is not Status.CLEAN, True, report.status.name, report)


def _verify(kept: StoredCopy) -> Said:
    report = kept.encoded.verify()
    return Said(
        report.status is not Status.CLEAN, report.status is not Status.INPUT_CHANGED, report.status.name, report
    )


def _fingerprint(kept: StoredCopy) -> Said:
    changed = kept.encoded.changed()
    return Said(changed, not changed, "CHANGED" if changed else "SAME")


def _double(kept: StoredCopy) -> Said:
    same = bool((bit_pattern(kept.encoded.array) == bit_pattern(kept.copy)).all())
    return Said(not same, same, "SAME" if same else "DIFFERENT")


def _crc(kept: StoredCopy) -> Said:
    same = _crc_of(kept.encoded.array) == kept.crc
    return Said(not same, same, "SAME" if same else "DIFFERENT")


def _crc_of(x: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(bit_pattern(to_host(x))).tobytes())


SCHEMES: Mapping[str, tuple[str, Callable[[StoredCopy], Said]]] = {
    "none": ("no check", lambda kept: Said(False, True, "")),
    "encoded": ("encode(A), then correct()", _correct),
    "verify": ("encode(A), then verify(): no repair", _verify),
    "fingerprint": ("changed(): the fingerprint that each use of an encoded operand compares", _fingerprint),
    "double": ("a second copy, and every bit compared", _double),
    "crc": ("a CRC of 32 bits", _crc),
}
"""Schemes by name: what they are, and what they do."""


def require_scheme(operation: str, scheme: str, options: Mapping[str, Any]) -> None:
    """ValueError for a scheme that there is not."""
    require_known("scheme", scheme, SCHEMES)


def require_possible(operation: str, scheme: str, plan: Plan) -> None:
    """ValueError where a stored matrix has no such site."""
    require_scheme(operation, scheme, {})
    require_known("site", plan.site, [name for name, site in SITES.items() if site.stage == STAGE])


def require_workload(workload: Workload) -> None:
    """ValueError for a family that does not exist, or an option: stored matrices have none."""
    require_family(workload.family)
    for name, _ in workload.options:
        raise ValueError(f"stored matrices have no option {name!r}: leave it out")


class StorageTrials(TrialGroup):
    """A matrix (m x k) and its checksums; each trial finds them as they were."""

    def __init__(self, workload: Workload, xp: Any) -> None:
        A, _ = operands(workload, xp)
        self.right = A.copy()
        self.encoded = encode(A)
        self.sums = self.encoded.integers
        self.kept_sums = replace(self.sums, rows=self.sums.rows.copy(), columns=self.sums.columns.copy())
        self.crc = _crc_of(A)

    def one(self, trial: Trial) -> Finding:
        _, check = SCHEMES[trial.scheme]
        A = self.encoded.array
        injector = Injector(*trial.plans)
        injector(STAGE, {"A": A, "rows": self.sums.rows, "columns": self.sums.columns})
        changed = bit_pattern(A) != bit_pattern(self.right)
        places = np.stack(np.nonzero(to_host(changed)))
        begun = time.perf_counter()
        with quiet():
            said = check(StoredCopy(self.encoded, self.right, self.crc))
        seconds = time.perf_counter() - begun
        right = bool((bit_pattern(A) == bit_pattern(self.right)).all())
        self._restore()
        finding = Finding("", said.status, injector.bit, seconds=seconds, report=said.report)
        finding.outcome = _outcome(trial, said, right)
        if said.report is not None and places.size and said.found:
            finding.located = _located(said.report, places)
        return finding

    def _restore(self) -> None:
        bit_pattern(self.encoded.array)[...] = bit_pattern(self.right)
        self.sums.rows[...], self.sums.columns[...] = self.kept_sums.rows, self.kept_sums.columns


def _outcome(trial: Trial, said: Said, right: bool) -> str:
    if not trial.plans:
        return "false_alarm" if said.found or not said.usable else "clean" if right else "sdc"
    if not said.usable:
        return "detected"
    if not right:
        return "sdc"
    return "corrected" if said.found else "masked"


def _located(report: Report, places: Any) -> str:
    """Whether the elements that were named are those that were changed."""
    named = {(fault.rows[0], fault.columns[0]) for fault in report.faults if fault.kind == "element"}
    there = set(map(tuple, places.T.tolist()))
    if not named:  # refused: the lines that disagree are named, at most
        return ""
    return "exact" if named == there else "covered" if named > there else "wrong"


GROUP = StorageTrials  # what a campaign asks a module of trials for
