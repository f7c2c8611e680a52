"""Which procedures of the package cases reach, and what is repaired there: counts that show what is not held."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from benchmarks.regress.lines import Case, Outcome

PROCEDURES = {
    "small product": "abft_tsm2.gemm.small:SmallForm.product",
    "small product settled": "abft_tsm2.gemm.small:SmallForm._settled",
    "small product restored": "abft_tsm2.gemm.small:_restored",
    "host product": "abft_tsm2.gemm.host:Product.report",
    "stack": "abft_tsm2.gemm.stack:Stack.outcome",
    "stack settled": "abft_tsm2.gemm.stack:Stack.settled",
    "rounded last": "abft_tsm2.gemm:_rounded_last",
    "encoded operand": "abft_tsm2.gemm.host:Product.verify_encoded",
    "operand restored": "abft_tsm2.gemm.host:Product.restore",
    "elements recomputed": "abft_tsm2.checksum.correct:locate_and_correct",
    "whole columns repaired": "abft_tsm2.checksum.correct:_complete_columns",
    "multiplied again": "abft_tsm2.checksum.correct:_multiply_again",
    "second product": "abft_tsm2.checksum.second_product:compare",
    "device product": "abft_tsm2.gemm.device:DeviceProduct.queue",
    "device known call": "abft_tsm2.gemm.known:run",
    "device graph": "abft_tsm2.gemm.replays:GraphCall.launch",
    "device pending": "abft_tsm2.gemm.pending:run",
    "device verified late": "abft_tsm2.gemm.pending:Pending._verify_late",
    "device captured": "abft_tsm2.gemm.captured:run",
    "device with a hook or waiting": "abft_tsm2.gemm.fallback:run",
    "device fallback to the host": "abft_tsm2.gemm.fallback:verify_on_host",
    "LU online": "abft_tsm2.linalg.lu:LuFactorisation.online",
    "LU offline": "abft_tsm2.linalg.lu:LuFactorisation.offline",
    "LU panel recomputed": "abft_tsm2.linalg.lu:LuFactorisation.recompute_panel",
    "LU rows recomputed": "abft_tsm2.linalg.lu:LuFactorisation.recompute_rows",
    "LU finished lines repaired": "abft_tsm2.linalg.lu:LuFactorisation.repair_finished",
    "factored from the beginning": "abft_tsm2.linalg.outcome:Findings.restart",
    "Cholesky online": "abft_tsm2.linalg.cholesky:CholeskyFactorisation.online",
    "Cholesky columns recomputed": "abft_tsm2.linalg.cholesky:CholeskyFactorisation.recompute",
    "Cholesky finished lines repaired": "abft_tsm2.linalg.cholesky:CholeskyFactorisation.repair_finished",
    "solve": "abft_tsm2.linalg.solve:_solved",
    "solve refined": "abft_tsm2.linalg.solve:_refined",
    "device LU": "abft_tsm2.linalg.lu_on_device:LuOnDevice.queued",
    "device LU settled": "abft_tsm2.linalg.lu_on_device:LuOnDevice.settle",
    "device Cholesky": "abft_tsm2.linalg.device.cholesky_plan:factor_definite_on_device",
    "device solution": "abft_tsm2.linalg.device.solution:solve_on_device",
    "Dask task": "abft_tsm2.interop.dask.task:run",
    "Dask block recovered": "abft_tsm2.interop.dask.recovery:recovered",
    "Dask panel": "abft_tsm2.interop.dask.panel:whole",
    "Dask tournament": "abft_tsm2.interop.dask.panel:champion",
    "Dask update": "abft_tsm2.interop.dask.tiles:updated",
    "Dask triangular solve": "abft_tsm2.interop.dask.tiles:solved",
    "Dask Cholesky": "abft_tsm2.interop.dask.cholesky:factored",
}
"""Names, and a function that each of them enters. A redesign changes this table with the functions."""

REPAIRS = ("element", "row", "column", "block", "rows", "checksum", "operand")
STATUSES = ("CLEAN", "CORRECTED", "CHECKSUM_FAULT", "INPUT_CHANGED", "UNVERIFIABLE", "UNCORRECTABLE", "PENDING")

REQUIRED = {
    "products": (
        *((name, kind) for name in ("small product", "host product", "stack") for kind in ("element", "row", "column")),
        ("operand restored", "element"),
        ("small product restored", "element"),
        ("rounded last", "element"),
        ("second product", ""),
        ("multiplied again", ""),
    ),
    "factorisations": (
        *((name, "block") for name in ("LU offline", "LU online", "solve")),
        *((name, "checksum") for name in ("LU online", "Cholesky online")),
        *((name, "") for name in PROCEDURES if name.startswith(("LU ", "Cholesky ", "factored ", "solve"))),
    ),
    "cupy": (*((name, "") for name in PROCEDURES if name.startswith("device ")), ("device product", "element")),
    "dask": tuple((name, "") for name in PROCEDURES if name.startswith("Dask ")),
}
"""By part: procedures, and kinds of repairs in them ("": none), that some case has to reach."""


UNNOTICED = {
    "sites stack users u": "a stack whose checksums u are wrong is settled with others, computed again: it is clean",
}
"""Groups of faults that no report speaks of, and why."""


def part_of(procedure: str) -> str:
    """The part of the gate that a procedure belongs to."""
    word = procedure.partition(" ")[0]
    parts = {"device": "cupy", "Dask": "dask"} | dict.fromkeys(
        ("LU", "Cholesky", "factored", "solve"), "factorisations"
    )
    return parts.get(word, "products")


def is_absent(where: str) -> bool:
    """Whether the package, of which all that cases use has been imported, has no function of this module and name."""
    module, _, names = where.partition(":")
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    return found is None


class Reached:
    """Counts of cases, by the procedures that they reach."""

    def __init__(self) -> None:
        self._names = {tuple(where.split(":")): name for name, where in PROCEDURES.items()}
        self._entered: set[str] = set()
        self.cases: Counter[str] = Counter()
        self.statuses: dict[str, Counter[str]] = defaultdict(Counter)
        self.repairs: dict[str, Counter[str]] = defaultdict(Counter)
        self.planted: Counter[str] = Counter()
        self.noticed: Counter[str] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See which procedures are entered in the block."""
        self._entered.clear()
        if hasattr(sys, "monitoring"):
            with self._monitored():
                yield
            return
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            self._enter(frame.f_code, frame.f_globals.get("__name__"))

    def _enter(self, code: CodeType, module: Any) -> bool:
        """Note a procedure; whether it is one."""
        name = self._names.get((module, code.co_qualname))
        if name is not None:
            self._entered.add(name)
        return name is not None

    @contextmanager
    def _monitored(self) -> Iterator[None]:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        tool, start = monitoring.PROFILER_ID, monitoring.events.PY_START

        def started(code: CodeType, _: int) -> Any:
            return None if self._enter(code, sys._getframe(1).f_globals.get("__name__")) else monitoring.DISABLE

        monitoring.use_tool_id(tool, "regress")
        try:
            monitoring.register_callback(tool, start, started)
            monitoring.set_events(tool, start)
            yield
        finally:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, start, None)
            monitoring.free_tool_id(tool)

    def count(self, case: Case, outcome: Outcome) -> None:
        """Add a case to the procedures that it has entered, and to those of its fault."""
        for name in self._entered:
            self.cases[name] += 1
            self.statuses[name].update(outcome.statuses.keys())
            self.repairs[name].update(outcome.repairs.keys())
        if case.group:
            self.planted[case.group] += bool(outcome.planted)
            self.noticed[case.group] += outcome.noticed

    def missing(self, required: Iterable[tuple[str, str]]) -> list[str]:
        """Of procedures, with kinds of repairs, those that no case has reached; absent procedures are none of them."""
        found = []
        for name, kind in required:
            count = self.repairs[name][kind] if kind else self.cases[name]
            if not count and not is_absent(PROCEDURES[name]):
                found.append(f"{name}, {kind}" if kind else name)
        return found

    def unnoticed(self) -> list[str]:
        """Groups of faults that were planted, and changed no outcome."""
        return [
            one for one in sorted(self.planted) if not self.noticed[one] and one not in UNNOTICED and self.planted[one]
        ]

    def lines(self, parts: Iterable[str]) -> Iterator[str]:
        """The counts of all procedures of these parts: zeros as well."""
        for name in [name for name in PROCEDURES if self.cases[name] or part_of(name) in parts]:
            if not self.cases[name] and is_absent(PROCEDURES[name]):
                yield f"# procedure {name}: absent"
                continue
            statuses = " ".join(f"{status} {self.statuses[name][status]}" for status in STATUSES)
            repairs = " ".join(f"{kind} {self.repairs[name][kind]}" for kind in REPAIRS)
            yield f"# procedure {name}: {self.cases[name]} cases; {statuses}; repairs: {repairs}"
        for group in sorted(self.planted):
            yield f"# faults of {group}: {self.planted[group]} planted, {self.noticed[group]} noticed"
