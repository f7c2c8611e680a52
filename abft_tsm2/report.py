"""Reports of protected operations: what was checked, found and repaired, as frozen data, JSON and readable text.

A report holds Python numbers, strings and tuples only (NumPy and CuPy scalars are converted on arrival): it
is cheap to keep, to pickle and to send to another process, and never keeps an array alive.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib import resources
from operator import index
from typing import Any, ClassVar, NamedTuple, Self

from abft_tsm2.place import host_name, usual_device
from abft_tsm2.record import CONVERTERS, Record, each

SIDES = ("rows", "columns")
KINDS = ("element", "row", "column", "block", "rows", "checksum", "operand")
FAULTS_SHOWN, ENTRIES_SHOWN, REASONS_SHOWN, POSITIONS_SHOWN = 10, 5, 3, 4  # in texts; JSON holds them all


class Status(Enum):
    """The outcome of a protected operation; the value of each member is its message."""

    CLEAN = "no fault was found"
    CORRECTED = "faults were found and repaired"
    CHECKSUM_FAULT = "a checksum was wrong, the data are fine"
    INPUT_CHANGED = "an operand changed after it was encoded, the result cannot be trusted"
    UNVERIFIABLE = "a part could not be checked"
    UNCORRECTABLE = "the result is wrong and was not repaired"
    PENDING = "the verdict is not known yet"


# Which status wins when several hold. PENDING is not here: it never mixes.
PRECEDENCE = tuple(
    Status[name] for name in ("UNCORRECTABLE", "INPUT_CHANGED", "CORRECTED", "UNVERIFIABLE", "CHECKSUM_FAULT", "CLEAN")
)
USABLE = frozenset({Status.CLEAN, Status.CORRECTED, Status.CHECKSUM_FAULT})
NO_FAULT = frozenset({Status.CLEAN, Status.UNVERIFIABLE, Status.PENDING})


def by_precedence(statuses: Iterable[Status]) -> tuple[Status, tuple[Status, ...]]:
    """Split statuses that hold together into the one that wins and the others, in the order of `PRECEDENCE`.

    CLEAN only holds alone, and no status at all is CLEAN; ValueError if PENDING stands beside another status.

    Examples
    --------
    >>> status, also = by_precedence([Status.CLEAN, Status.UNVERIFIABLE, Status.CORRECTED])
    >>> status.name, [other.name for other in also]
    ('CORRECTED', ['UNVERIFIABLE'])
    """
    held = set(statuses)
    if held == {Status.PENDING}:
        return Status.PENDING, ()
    if Status.PENDING in held:
        names = ", ".join(sorted(status.name for status in held))
        raise ValueError(f"PENDING cannot be combined with other statuses (got {names}): wait for the verdict")
    worst, *rest = [status for status in PRECEDENCE if status in held] or [Status.CLEAN]
    return worst, tuple(status for status in rest if status is not Status.CLEAN)


@dataclass(frozen=True, eq=False, repr=False)
class Fault(Record):
    """One fault: where it was, how large, and how it was repaired.

    Parameters
    ----------
    operand, kind : str
        What was wrong: "C", "A", "B", "c", or a checksum, "s", "t", "u"; and how much of it: "element",
        "row", "column", "block", "rows", "checksum", "operand".
    rows, columns : tuple of int
        The positions; empty means all of them.
    elements : int
        How many elements were wrong.
    magnitude : float
        The largest ``|found - repaired|``; may be infinite or NaN.
    repair : str
        How it was repaired; empty when it was not.
    worker, host, device : str
        Of a cluster: where it was found. Empty elsewhere.

    Examples
    --------
    >>> print(Fault("C", "element", (17,), (203,), elements=1, magnitude=3.2e7, repair="recomputed"))
    C[17, 203] was off by 3.2e+07: recomputed
    """

    operand: str
    kind: str = field(metadata={"choices": KINDS})
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    elements: int
    magnitude: float
    repair: str = ""
    worker: str = field(default="", metadata={"optional": True})
    host: str = field(default="", metadata={"optional": True})
    device: str = field(default="", metadata={"optional": True})

    def __str__(self) -> str:
        at = f" (worker {self.worker}, host {self.host}, device {self.device})" if self.worker else ""
        return f"{self._what()}{at}"

    def _what(self) -> str:
        if self.kind == "operand":
            return f"{self.operand} is not what was encoded: {self.repair or 'not repaired'}"
        where = f"{self.operand}[{_positions(self.rows)}, {_positions(self.columns)}]"
        off = "was off by" if self.elements <= 1 else f"({self.elements} elements) was off by up to"
        return f"{where} {off} {self.magnitude:.3g}: {self.repair or 'not repaired'}"


class LineLimits(NamedTuple):
    """What `Check.limit` is worked out from.

    Attributes
    ----------
    side : str
        "rows" or "columns": what a line is.
    allowed : list of float
        By how much the residual of each line may change unseen.
    moduli : list of float
        The moduli of the weights along a line.
    """

    side: str
    allowed: list[float]
    moduli: list[float]

    def of(self, row: int, column: int) -> float:
        """The smallest change of this element of C that is sure to be found."""
        line, position = (row, column) if self.side == "rows" else (column, row)
        weight = self.moduli[position]
        return self.allowed[line] / weight if weight else math.inf


@dataclass(frozen=True, eq=False, repr=False)
class Check(Record):
    """One side's check: how many lines were verified and how sharp the check was.

    Parameters
    ----------
    side : str
        "rows" (one checksum per row of C) or "columns".
    vectors, lines, verified : int
        Number of checksum columns; of rows (or columns) of C; of those that were really checked.
    bound : float
        How far rounding alone may move a line's residual (median over the lines).
    closest, closest_line : float, int
        Largest ``residual / bound`` over the lines found clean, 0 to 1, and its line; -1 when none was clean.
    detection_limit, median_limit : float
        The smallest change of any one element that is sure to be found: in whatever line (the largest over the lines),
        and in half of them (the median). NaN where they were not measured: for that a report has to be asked for by
        ``return_report=True``.
    limits : LineLimits or None
        Of each line, for `Report.limit`; not in the JSON.
    """

    side: str = field(metadata={"choices": SIDES})
    vectors: int
    lines: int
    verified: int
    bound: float
    closest: float
    closest_line: int = field(metadata={"least": -1})
    detection_limit: float
    median_limit: float = field(default=math.nan, metadata={"optional": True})
    limits: LineLimits | None = field(default=None, repr=False, metadata={"json": False, "optional": True})

    def with_limits(self, limits: LineLimits, bound: float, closest: float, line: int) -> Check:
        """The same with the limits, bounds and closest residual of all lines."""
        least = min(limits.moduli, default=0.0)
        every = sorted(limits.allowed)
        middle = (every[(len(every) - 1) // 2] + every[len(every) // 2]) / 2
        of = (x / least if least else math.inf for x in (middle, every[-1]))
        found = dict(zip(("median_limit", "detection_limit"), of, strict=True))
        return self.like(**found, limits=limits, bound=bound, closest=closest, closest_line=line)

    def __str__(self) -> str:
        vectors = "1 checksum vector" if self.vectors == 1 else f"{self.vectors} checksum vectors"
        text = f"{self.verified} of {self.lines} {self.side}, {vectors}, bound {self.bound:.2g}"
        if self.closest_line >= 0:
            line = f"{self.side.removesuffix('s')} {self.closest_line}"
            text += f", closest clean residual {self.closest:.2g} of its bound ({line})"
        if math.isnan(self.detection_limit):
            return text
        text += f", sure to find a change of {self.detection_limit:.2g}"
        if self.median_limit < self.detection_limit / 2:
            text += f", of {self.median_limit:.2g} in half of the {self.side}"
        return text


@dataclass(frozen=True, eq=False, repr=False)
class Report(Record):
    """The account of one protected operation, or of a batch of them.

    Parameters
    ----------
    status, also : Status, tuple of Status
        The status that wins by `PRECEDENCE`, and the others that hold.
    operation : str
        "gemm", "verify_gemm", "encoded", "lu_factor", "lu_solve", "solve", "cholesky", "cho_solve".
    m, k, n, dtype : int, str
        Sizes of (one) product, (m, k) times (k, n), and data type of the result; L and U are such a product.
    checks, faults : tuple of Check, tuple of Fault
        The sides that were checked, and everything found wrong.
    suspicions, recomputed : int, float
        How many suspected lines a recomputation cleared; fraction of the multiplications done again.
    reasons : tuple of str
        Why something could not be checked or repaired.
    seconds : mapping of str to float
        Time of each step that ran: "encode", "multiply", "verify", "correct".
    index, products : tuple of int, tuple of Report
        Position in a batch; the entries of a batch.
    mode : str
        Of a factorisation: "online" or "offline", and why.
    restarted : bool
        Whether a factorisation that stayed wrong was done again from its matrix; not in the JSON.
    worker : str
        Of a task on a cluster: the address of the worker that it ran on; empty elsewhere.
    host, device : str
        Where the operation ran: the name of the machine, and UUID and name of the GPU, what the environment variable
        ABFT_TSM2_DEVICE says of a CPU, or "cpu". Of a batch: all of them, with commas.
    replays : int
        Of a product in a CUDA graph: how many replays the report is on; 0 elsewhere.

    Examples
    --------
    >>> report = Report(Status.CLEAN, "gemm", 256, 4096, 256, "float32", seconds={"multiply": 0.25})
    >>> report.ok, report.total_seconds
    (True, 0.25)
    >>> Report.from_dict(report.to_dict()) == report
    True
    """

    status: Status
    operation: str
    m: int
    k: int
    n: int
    dtype: str
    checks: tuple[Check, ...] = ()
    faults: tuple[Fault, ...] = ()
    suspicions: int = 0
    recomputed: float = 0.0
    also: tuple[Status, ...] = ()
    reasons: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    index: tuple[int, ...] = ()
    products: tuple[Report, ...] = ()
    mode: str = field(default="", metadata={"optional": True})
    restarted: bool = field(default=False, compare=False, metadata={"optional": True, "json": False})
    worker: str = field(default="", metadata={"optional": True})
    host: str = field(default_factory=host_name, metadata={"optional": True})
    device: str = field(default_factory=usual_device, metadata={"optional": True})
    replays: int = field(default=0, metadata={"optional": True})

    SCHEMA: ClassVar[str] = "abft_tsm2/report/1"

    @property
    def ok(self) -> bool:
        """Whether the result can be used and all of it was checked: no status in `also` says otherwise."""
        return USABLE.issuperset((self.status, *self.also))

    @property
    def closest(self) -> float:
        """The largest clean residual over its bound, of all checks and products; 0.0 if none."""
        ratios = [check.closest for check in self.checks] + [product.closest for product in self.products]
        return max((ratio for ratio in ratios if not math.isnan(ratio)), default=0.0)

    def limit(self, row: int, column: int) -> float:
        """The smallest change of element (row, column) of C that is sure to be found, in C's units.

        Parameters
        ----------
        row, column : int
            As indices of C: negative ones count from the end.

        Returns
        -------
        limit : float
            Of the side that sees more, where both were checked.

        Raises
        ------
        IndexError
            If C has no such element.
        ValueError
            If the limits were not measured, or if this is the report of a batch: its `products` have them.

        Examples
        --------
        >>> import numpy as np
        >>> import abft_tsm2 as ft
        >>> A, B = np.random.default_rng(0).standard_normal((2, 64, 64))
        >>> C, report = ft.protected_gemm(A, B, return_report=True)
        >>> 0 < report.limit(5, 7) <= report.checks[0].detection_limit < 1e-10
        True
        """
        if self.products:
            raise ValueError(f"this is the report of {len(self.products)} products: ask report.products[i].limit")
        at = []
        for name, place, size in (("row", index(row), self.m), ("column", index(column), self.n)):
            if not -size <= place < size:
                raise IndexError(f"{name} {place} of a C that is {self.m} x {self.n}")
            at.append(place % size)
        found = [check.limits.of(*at) for check in self.checks if check.limits is not None]
        if not found:
            raise ValueError("limits were not measured: ask for the report of a product by return_report=True")
        return min(found)

    @property
    def total_seconds(self) -> float:
        """Time of all steps together."""
        return sum(self.seconds.values(), 0.0)

    @property
    def headline(self) -> str:
        """One line: operation, sizes, dtype, status and its message."""
        batch = f" batch of {len(self.products)}, each" if self.products else ""
        also = "".join(f"; also {status.name}, {status.value}" for status in self.also)
        what = f"{self.operation}{batch} m={self.m} k={self.k} n={self.n} {self.dtype}"
        return f"{what}: {self.status.name}, {self.status.value}{also}"

    def wait(self) -> Report:
        """Return the final report of a PENDING one, waiting for it; any other one as it is."""
        return self

    @property
    def faulty(self) -> bool:
        """Whether something was found wrong, repaired or not. What could only not be checked, because the data are not
        finite, is no fault of the machine."""
        return not {self.status, *self.also} <= NO_FAULT

    def by_worker(self) -> dict[str, dict[str, Any]]:
        """What each worker of a cluster did and found, of an operation whose tasks ran on one.

        Returns
        -------
        dict
            For each worker's address its "host" and "device", the number of "tasks" that ended there and reported, of
            those in which something was wrong there ("faulty"), also where another worker then did them, and the
            "faults". Empty for an operation that ran in this process alone.
        """
        found: dict[str, dict[str, Any]] = {}

        def entry(of: Report | Fault) -> dict[str, Any]:
            where = {"host": of.host, "device": of.device, "tasks": 0, "faulty": 0, "faults": ()}
            return found.setdefault(of.worker, where)

        for report in self.products or (self,):
            if not report.worker:
                continue
            entry(report)["tasks"] += 1
            there = [fault if fault.worker else report for fault in report.faults]
            if report.faulty and not there:
                there = [report]
            for of in {one.worker: one for one in there}.values():
                entry(of)["faulty"] += 1
            for of, fault in zip(there, report.faults, strict=False):
                entry(of)["faults"] += (fault,)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON types, as described by `schema`.

        Besides the fields it holds "schema" (the version), "message" (of the status) and "ok". Floats that are
        not finite are the strings "NaN", "Infinity" and "-Infinity", which `from_dict` reads back.
        """
        return {"schema": self.SCHEMA, "message": self.status.value, "ok": self.ok, **super().to_dict()}

    def to_json(self, indent: int | None = None) -> str:
        """Return `to_dict` as strict JSON (RFC 8259: no NaN or Infinity tokens)."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build the report that `to_dict` gave, also through JSON; ValueError for anything else, and another schema."""
        if isinstance(data, Mapping) and data.get("schema") != cls.SCHEMA:
            raise ValueError(f"cannot read schema {data.get('schema')!r}: this version reads {cls.SCHEMA!r}")
        if isinstance(data, Mapping):
            data = {"host": "", "device": "", **data}  # unless it says so, it was not made here
        return super().from_dict(data)

    @staticmethod
    def schema() -> dict[str, Any]:
        """Return the JSON Schema (draft 2020-12) that every `to_dict` satisfies."""
        text = resources.files("abft_tsm2").joinpath("report.schema.json").read_text(encoding="utf-8")
        return dict(json.loads(text))

    @classmethod
    def merge(
        cls, reports: Sequence[Report], *, operation: str, problem: tuple[int, int, int, str] | None = None
    ) -> Report:
        """Summarise the products of a batch in one report, which keeps them as `products`.

        The status is the worst and the others go to `also`; seconds and suspicions are summed, `recomputed`
        is averaged, each reason is kept once; checks and faults stay in the products. ValueError if there is
        no report, if sizes or dtypes differ and it is not said which `problem` (m, k, n, dtype) they are parts of, or
        if only some are PENDING.
        """
        sizes = {(report.m, report.k, report.n, report.dtype) for report in reports}
        problems = sizes if problem is None else {problem}
        if len(problems) != 1 or not reports:
            raise ValueError(f"a batch has products, all of one (m, k, n, dtype); got {sorted(problems)}")
        status, also = by_precedence(held for report in reports for held in (report.status, *report.also))
        seconds: Counter[str] = Counter()
        for report in reports:
            seconds.update(report.seconds)
        return cls(
            status,
            operation,
            *problems.pop(),
            suspicions=sum(report.suspicions for report in reports),
            recomputed=sum(report.recomputed for report in reports) / len(reports),
            also=also,
            reasons=tuple(dict.fromkeys(reason for report in reports for reason in report.reasons)),
            seconds=seconds,
            products=tuple(reports),
            restarted=any(report.restarted for report in reports),
            host=", ".join(dict.fromkeys(report.host for report in reports)),
            device=", ".join(dict.fromkeys(report.device for report in reports)),
        )

    def followed_by(self, later: Report) -> Report:
        """The report of two checks of the same result, the later one of what the first had repaired."""
        if self.products:
            pairs = zip(self.products, later.products, strict=True)
            return Report.merge([one.followed_by(other) for one, other in pairs], operation=self.operation)
        status, also = by_precedence([self.status, *self.also, later.status, *later.also])
        return replace(
            later,
            status=status,
            also=also,
            faults=self.faults + later.faults,
            suspicions=self.suspicions + later.suspicions,
            reasons=tuple(dict.fromkeys(self.reasons + later.reasons)),
            index=self.index,
        )

    def __str__(self) -> str:
        lines = [self.headline, *([f"mode: {self.mode}"] if self.mode else [])]
        if self.replays:
            lines.append(f"replays: {self.replays}")
        if self.products:
            lines += self._batch_lines()
        else:
            lines += [f"checked: {check}" for check in self.checks] or ["checked: nothing"]
            lines += _first(self.faults, FAULTS_SHOWN, "fault")
        if self.suspicions:
            lines.append(f"suspicions: {self.suspicions}, cleared by recomputing them")
        if self.recomputed:
            lines.append(f"recomputed: {100 * self.recomputed:.2g} % of the multiplications")
        lines += _first(self.reasons, REASONS_SHOWN, "reason")
        times = {**self.seconds, "total": self.total_seconds} if self.seconds else {}
        steps = ", ".join(f"{step} {time:.3g} s" for step, time in times.items())
        return "\n  ".join([*lines, f"time: {steps or 'not taken'}"])

    def _batch_lines(self) -> list[str]:
        counts = Counter(product.status for product in self.products)
        order = [status for status in (*PRECEDENCE, Status.PENDING) if counts[status]]
        closest = max(self.products, key=lambda product: product.closest)
        worst = [product for status in order for product in self.products if product.status is status]
        # Of a CLEAN product only suspicions are of interest, which the summary counts.
        entries = [product._entry() for product in worst if product.status is not Status.CLEAN]
        return [
            "statuses: " + ", ".join(f"{counts[status]} {status.name}" for status in order),
            f"closest clean residual: {closest.closest:.2g} of its bound (product {list(closest.index)})",
            *_first(entries, ENTRIES_SHOWN, "product"),
        ]

    def _entry(self) -> str:
        details = [*map(str, self.faults), *self.reasons] or [self.status.value]
        more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
        return f"{list(self.index)} {self.status.name}: {details[0]}{more}"


def _first(items: Sequence[object], shown: int, name: str) -> list[str]:
    """Return one line for each of the first items, and one for the number of the others."""
    lines = [f"{name}: {item}" for item in items[:shown]]
    return lines if len(items) <= shown else [*lines, f"and {len(items) - shown} more {name}s"]


def _positions(positions: tuple[int, ...]) -> str:
    """Print positions as an index reads: ``:`` for all, ``3``, ``3:7`` for a run, else a list."""
    if len(positions) <= 1:
        return str(positions[0]) if positions else ":"
    if positions == tuple(range(positions[0], positions[0] + len(positions))):
        return f"{positions[0]}:{positions[-1] + 1}"
    shown = ", ".join(map(str, positions[:POSITIONS_SHOWN]))
    return f"[{shown}]" if len(positions) <= POSITIONS_SHOWN else f"[{shown}, ... {len(positions)} in all]"


def _status(value: Any) -> Status:
    for status in Status:
        if value in (status, status.name):
            return status
    raise ValueError(f"unknown status {value!r}: choose one of {', '.join(Status.__members__)}")


def _record(kind: type[Record]) -> Callable[[Any], Record]:
    return lambda value: value if isinstance(value, kind) else kind.from_dict(value)


CONVERTERS |= {
    "LineLimits | None": lambda value: value,  # made here, never read
    "Status": _status,
    "tuple[Status, ...]": each(_status),
    "tuple[Check, ...]": each(_record(Check)),
    "tuple[Fault, ...]": each(_record(Fault)),
    "tuple[Report, ...]": each(_record(Report)),
}
