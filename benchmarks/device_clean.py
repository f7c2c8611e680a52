"""Clean products on a GPU: no report may speak of a fault.

A group is a family, a mode and a shape. Each group has a small call first. Where its report shows a suspicion, or
numbers outside the normal range, the host looks at every product, which is slow: such a group has no other call.
The others are called again, with many products at a time, until all rows are checked, each shape getting its share.
Calls are queued, and reports waited for when the queue is long.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from abft_tsm2 import Report, Status, protected_gemm
from abft_tsm2.arrays import bit_pattern
from abft_tsm2.faults.judge.oracle import Array
from benchmarks.clean_products import ALARMS, EXACT_SCALARS, normal_range
from benchmarks.device_operands import Base, Mode, Shape, numbers
from benchmarks.device_runs import Run, quiet
from tests.support import families

FEW = 2  # products of a group's first call
LONGEST_QUEUE = 64
MOST_BYTES = 16 * 10**9  # of the operands and results in a queue
PLAIN, SCALED, TURNED = "plain", "scaled", "orders"
VARIANTS = (PLAIN, PLAIN, "columns", "both", TURNED, SCALED)
COLUMNS = (
    *("family", "dtype", "mode", "m", "k", "n", "batch", "products"),
    *("rows", "alarms", "suspicions", "unverifiable", "closest"),
)


SHAPES = (
    *(Shape(16, 16, 16, 2048), Shape(67, 131, 73, 512), Shape(256, 256, 256, 128), Shape(512, 512, 512, 64)),
    *(Shape(64, 4096, 64, 128), Shape(32, 96, 1000, 512), Shape(8192, 128, 64), Shape(64, 128, 8192)),
    *(Shape(1, 2048, 2048, every=7), Shape(1024, 1024, 1024, every=7), Shape(2048, 2048, 2048, every=7)),
    Shape(4096, 4096, 4096, every=35),
)


@dataclass(frozen=True)
class Group:
    family: str
    mode: Mode
    shape: Shape

    def __str__(self) -> str:
        return f"{self.family} {self.mode} {self.shape}"


@dataclass
class Tally:
    """What happened to the products of a group."""

    products: int = 0
    rows: int = 0
    alarms: int = 0
    suspicions: int = 0
    unverifiable: int = 0
    closest: float = 0.0

    @property
    def steady(self) -> bool:
        """Whether no product had to be looked at by the host."""
        return self.alarms == self.suspicions == self.unverifiable == 0


@dataclass(frozen=True)
class Waiting:
    """A call whose report is not known yet, with its operands: a late look needs them."""

    group: Group
    number: int
    what: str
    arrays: tuple[Array | None, ...]
    report: Report


# ---- what needs no card -------------------------------------------------------------------------------------------


def groups(modes: Sequence[Mode], shapes: Sequence[Shape] = SHAPES) -> list[Group]:
    """All groups; those of a shape and a mode are neighbours."""
    names = [name for name in families.names() if name != "digits" or importlib.util.find_spec("sklearn")]
    return [
        Group(family, mode, shape)
        for shape in shapes
        for j, mode in enumerate(modes)
        for i, family in enumerate(names)
        if (i + j) % shape.every == 0
    ]


def plan(among: Sequence[Group], rows: float) -> dict[Group, int]:
    """How many calls each group gets, so that they check so many rows together and each shape has an equal part."""
    of_shape: dict[Shape, list[Group]] = {}
    for group in among:
        of_shape.setdefault(group.shape, []).append(group)
    return {
        group: max(1, math.ceil(rows / (len(of_shape) * len(members) * shape.rows)))
        for shape, members in of_shape.items()
        for group in members
    }


def statuses(report: Report) -> set[Status]:
    return {report.status, *report.also}


def alarm(report: Report, normal: bool) -> bool:
    """Whether the report of a clean product is a false alarm; `normal`: its numbers are in the normal range."""
    return bool(statuses(report) & ALARMS) or (Status.UNVERIFIABLE in statuses(report) and normal)


# ---- the campaign -------------------------------------------------------------------------------------------------


class Clean:
    """Clean products of groups.

    Attributes
    ----------
    tallies : dict of Group to Tally
    """

    def __init__(self, run: Run, asked: Sequence[Group]) -> None:
        self.run, self.tallies = run, {group: Tally() for group in asked}
        self._bases: dict[Group, Base] = {}
        self._queue: list[Waiting] = []
        self._bytes = 0

    @property
    def rows(self) -> int:
        return sum(tally.rows for tally in self.tallies.values())

    def check(self, rows: float) -> None:
        """Check so many rows, unless time is up before."""
        for group in self.tallies:
            if not self.run.over:
                self.call(group, 0)
        self.collect()
        self._progress("a first call of each group")
        calls = dict.fromkeys(self.tallies, 0)
        while self.rows < rows and not self.run.over:
            steady = [group for group, tally in self.tallies.items() if tally.steady and tally.rows]
            if not steady:
                return
            self._round(plan(steady, rows - self.rows), calls)

    def _round(self, planned: Mapping[Group, int], calls: dict[Group, int]) -> None:
        last = None
        for group, count in planned.items():
            block = f"{group.mode} {group.shape}"
            if last not in (None, block):
                self._progress(str(last))
            last = block
            for _ in range(count):
                if self.run.over or not self.tallies[group].steady:
                    break
                calls[group] += 1
                self.call(group, calls[group])
        self.collect()
        self._progress(str(last))

    def _progress(self, what: str) -> None:
        rate = self.rows / max(self.run.seconds, 1e-9)
        self.run.progress(f"{what}: {self.rows:.3g} rows, {rate:.3g}/s, {len(self.run.failures)} failures")

    def call(self, group: Group, number: int) -> None:
        """Queue a call; all of it follows from the seed, the group and the number."""
        with self.run.going_on(f"{group} call {number}"), quiet(sync=False):
            name = crc32(str(group).encode())
            if group not in self._bases:
                shape, rng = group.shape, np.random.default_rng([self.run.seed, name])
                size = (shape.m, shape.k, shape.n)
                self._bases[group] = Base.draw(group.family, group.mode.dtype, size, rng, self.run.xp)
            self._vary(group, number, np.random.default_rng([self.run.seed, name, number]))
        if len(self._queue) >= LONGEST_QUEUE or self._bytes > MOST_BYTES:
            self.collect()

    def _vary(self, group: Group, number: int, rng: np.random.Generator) -> None:
        """One of the variants; a small plain one comes first."""
        batch, variant = group.shape.batch, str(rng.choice(VARIANTS))
        if number == 0:
            batch, variant = min(FEW, batch), PLAIN
        orders = [str(x) for x in rng.choice(["C", "F"], 2)] if variant == TURNED else "CC"
        A, B = self._bases[group].many(batch, rng, orders)
        if group.shape.batch == 1:
            A, B = A[0], B[0]
        options = dict(group.mode.options)
        if variant in ("columns", "both"):
            options["check"] = variant
        C = self._ask(group, number, variant, (A, B, None), options)
        if variant == SCALED:
            alpha, beta = (float(x) for x in rng.choice(EXACT_SCALARS, 2))
            c = C  # with beta = -alpha, rounding is all that remains
            if rng.random() < 0.5:  # nothing to do with the product, but of its size
                c = numbers(self.run.xp.roll(bit_pattern(C), 1, axis=-1), group.mode.dtype, self.run.xp)
            self._ask(group, number, variant, (A, B, c), {**options, "alpha": alpha, "beta": beta})

    def _ask(
        self, group: Group, number: int, what: str, operands: tuple[Array, Array, Array | None], options: Any
    ) -> Array:
        C, report = protected_gemm(*operands, **options, return_report=True)
        self._queue.append(Waiting(group, number, what, (*operands, C), report))
        self._bytes += sum(x.nbytes for x in (*operands, C) if x is not None)
        return C

    def collect(self) -> None:
        """Wait for all that is queued, and count."""
        waiting, self._queue, self._bytes = self._queue, [], 0
        for one in waiting:
            with self.run.going_on(f"{one.group} call {one.number}"), quiet(sync=False):
                self.count(one, one.report.wait())

    def count(self, one: Waiting, report: Report) -> None:
        """Count what a report says."""
        if self.run.show:
            print(f"{one.group} call {one.number} ({one.what}): {report}")
        tally, products = self.tallies[one.group], report.products or (report,)
        tally.products += len(products)
        tally.rows += sum(check.verified for product in products for check in product.checks)
        tally.suspicions += report.suspicions
        tally.closest = max(tally.closest, report.closest)
        for i, product in enumerate(products):
            unverifiable = Status.UNVERIFIABLE in statuses(product)
            tally.unverifiable += unverifiable
            arrays = [x if x is None or x.ndim == 2 else x[i] for x in one.arrays]
            if alarm(product, unverifiable and normal_range(arrays, one.group.mode.dtype, self.run.xp)):
                tally.alarms += 1
                self.run.fail(
                    f"false alarm, product {i} ({one.what}): {product}\n  again: clean --seed {self.run.seed} "
                    f"--only '{one.group}' --call {one.number}"
                )

    def table(self) -> list[dict[str, Any]]:
        """Rows of the CSV, of groups that had a call."""
        return [
            {"family": group.family, "dtype": group.mode.dtype, "mode": group.mode.variant}
            | {name: getattr(group.shape, name) for name in ("m", "k", "n", "batch")}
            | vars(tally)
            for group, tally in self.tallies.items()
            if tally.products
        ]
