"""Faults planted on a GPU between a product and its check, and a judge that believes no report.

A scene is a product: it is computed once without a fault, which gives the detection limit, and then again and again,
each time with one fault of many elements, or with several faults of one element each. What a call returns is compared
with the product in more precision (`benchmarks.gpu_products`), element by element, and with what was planted.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2 import Report, Status, protected_gemm
from abft_tsm2.arrays import FLOATS, bit_pattern, dtype_name, to_host
from abft_tsm2.faults.judge.oracle import (
    Array,
    ReferenceArithmetic,
    arithmetic,
    reference,
    rounded_to_bfloat16,
    widened,
)
from benchmarks.device_faults import MASS, OUTCOMES, SEVERAL, TILES, Faults, Seen, outcomes, several, singles
from benchmarks.device_operands import TYPES, Base, Mode, Shape, numbers
from benchmarks.device_runs import Run, quiet
from benchmarks.gemm_device import TF32, WIDE
from benchmarks.gemm_faults import planted

SHAPES = (
    *(Shape(n, n, n) for n in (256, 512, 1024, 2048)),
    *(Shape(331, 517, 443), Shape(4096, 256, 128), Shape(128, 512, 2048)),
    *(Shape(256, 256, 256, 16), Shape(512, 512, 512, 8)),
)
FAMILIES = ("normal", "uniform-11", "uniform01", "normal+1", "relu_w")  # whose lines have much the same bound
CHECKS = ("auto", "auto", "rows", "columns", "both")
CALLS = 24  # of a scene with faults of one element
LINES = {False: 16, True: 8}  # faults of such a call; the card repairs up to 8 lines of a batch
COLUMNS = ("kind", "dtype", "mode", *OUTCOMES)


class Planting:
    """Plants faults into a product of `size` elements as it is computed, matrix by matrix or all at once.

    Attributes
    ----------
    seen : list of arrays
        The product, in the type that is checked.
    """

    def __init__(self, size: int, faults: Faults | None, xp: Any) -> None:
        self.seen: list[Array] = []
        self._size, self._faults, self._xp, self._done = size, faults, xp, 0

    def __call__(self, C: Array) -> None:
        if self._done == self._size:  # a product that is computed again is right
            return
        first, self._done = self._done, self._done + C.size
        self.seen.append(C)
        if self._faults is None:
            return
        place = self._faults.place
        mine = (place >= first) & (place < self._done)
        if mine.any():
            at = tuple(self._xp.asarray(x) for x in np.unravel_index(place[mine] - first, C.shape))
            bit_pattern(C)[at] = self._xp.asarray(self._faults.bits[mine])

    @property
    def product(self) -> Array:
        """As it is now: a stack of matrices."""
        xp = self._xp
        whole = self.seen[0] if len(self.seen) == 1 else xp.stack(self.seen)
        return whole if whole.ndim == 3 else whole[None]


def protected(A: Array, B: Array, plant: Planting, xp: Any, **options: Any) -> tuple[Array, Report]:
    """A protected product into which faults are planted in front of its check."""
    if xp is np:

        def hook(stage: str, arrays: Any) -> None:
            if stage == "multiplied":
                plant(arrays["C"])

        found: tuple[Array, Report] = protected_gemm(A, B, on_stage=hook, return_report=True, **options)
        return found
    with planted(plant):
        found = protected_gemm(A, B, return_report=True, **options)
    return found


@dataclass(frozen=True)
class Waiting:
    """A call whose report is not known yet; `judged` has rows wrong, closer, stayed, and then wrong elements elsewhere
    of each product, on the card."""

    faults: Faults
    result: Array
    report: Report
    judged: tuple[Array, Array]


class Scene:
    """One product, and its judge.

    Attributes
    ----------
    clean : (batch, m, n) NumPy array
        In the type that is checked.
    limit : float
        Sure to be found is, as the report says, a change of one element that is larger.

    Raises
    ------
    ArithmeticError
        If the product is wrong, or its report not clean, without any fault.
    """

    def __init__(self, mode: Mode, shape: Shape, family: str, check: str, rng: np.random.Generator, xp: Any) -> None:
        self.mode, self.shape, self.family, self.check, self.xp = mode, shape, family, check, xp
        base = Base.draw(family, mode.dtype, (shape.m, shape.k, shape.n), rng, xp)
        self.A, self.B = base.many(shape.batch, rng, scaled=0)  # the limit is of one line: all have much the same
        self.options = {**mode.options, "check": check}
        how = arithmetic(mode.dtype, mode.variant == TF32)
        if mode.variant == WIDE:
            how = ReferenceArithmetic("float32", "float32", truncating=True)
        self._expected = reference(self.A, self.B, xp, sums=how.sums)
        # Two roundings more for what is computed again, and those of float64, in which it is.
        self._allowed = how.bound(self._expected, shape.k + 2)
        self._allowed += (shape.k + 2) * FLOATS["float64"].unit_roundoff * self._expected.magnitude
        if shape.batch == 1:
            self.A, self.B = self.A[0], self.B[0]
        plant = Planting(self.size, None, xp)
        with quiet(sync=True):
            result, report = protected(self.A, self.B, plant, xp, **self.options)
        wrong = int(self._wrong(plant.product)[0].sum() + self._not_rounded(plant.product, result).sum())
        if wrong or report.status is not Status.CLEAN:
            raise ArithmeticError(f"wrong without any fault: {wrong} elements of {self}: {report}")
        checks = [product.checks for product in report.products or (report,)]
        self.side = "rows" if len(checks[0]) == 2 else checks[0][0].side
        self.limit = max(min(check.detection_limit for check in each) for each in checks)
        bits = np.array(to_host(bit_pattern(plant.product)))
        self.clean = bits.view(TYPES[dtype_name(plant.product.dtype)])

    @property
    def size(self) -> int:
        return self.shape.batch * self.shape.m * self.shape.n

    def __str__(self) -> str:
        return f"{self.family} {self.mode} {self.shape} check={self.check}"

    def call(self, faults: Faults, sync: bool) -> Waiting:
        """The product with faults, judged as far as the card can; waits for nothing unless `sync`."""
        plant = Planting(self.size, faults, self.xp)
        with quiet(sync=sync):
            result, report = protected(self.A, self.B, plant, self.xp, **self.options)
        C = plant.product
        return Waiting(faults, (C, result), report, self._judged(C, result, faults))

    def _judged(self, C: Array, result: Array, faults: Faults) -> tuple[Array, Array]:
        xp, e = self.xp, self._expected
        at = tuple(xp.asarray(x) for x in np.unravel_index(faults.place, C.shape))
        wrong, error = self._wrong(C)
        bits = xp.asarray(faults.bits)
        was = widened(numbers(bits, dtype_name(C.dtype), xp), xp)
        off = abs((was - e.high[at]) - e.low[at])
        closer = (error[at] <= off / 2) | ~xp.isfinite(off)
        there = xp.stack([wrong[at], closer, bit_pattern(C)[at] == bits])
        wrong[at] = False
        return there, wrong.sum(axis=(1, 2)) + self._not_rounded(C, result)

    def _wrong(self, C: Array) -> tuple[Array, Array]:
        """Where rounding does not explain what C holds, and how far off it is."""
        found = widened(C, self.xp)
        error = abs((found - self._expected.high) - self._expected.low)
        return ~((error <= self._allowed) & self.xp.isfinite(found)), error

    def _not_rounded(self, C: Array, result: Array) -> Array:
        """How many elements of each product are returned otherwise than C, which was checked in float32, has them."""
        if self.mode.variant != WIDE:
            return self.xp.zeros(C.shape[0], int)
        if self.mode.dtype == "bfloat16":
            rounded = rounded_to_bfloat16(C)
        else:
            rounded = bit_pattern(C.astype(self.mode.dtype))
        different = (bit_pattern(result).reshape(C.shape) != rounded) & self.xp.isfinite(C)
        return different.sum(axis=(1, 2))

    def outcome(self, one: Waiting) -> tuple[list[dict[str, bool]], Report]:
        """What became of each fault of a call, and its final report."""
        with quiet(sync=True):
            report = one.report.wait()
        (wrong, closer, stayed), elsewhere = (to_host(x) for x in one.judged)
        product, row, column = np.unravel_index(one.faults.place, self.clean.shape)
        lines, line = (self.shape.m, row) if self.side == "rows" else (self.shape.n, column)
        statuses = [each.status for each in report.products or (report,)]
        seen = Seen(product * lines + line, wrong, closer, stayed, elsewhere, product, statuses, self.limit)
        return outcomes(one.faults, seen), report

    def faults(self, rng: np.random.Generator) -> Iterator[tuple[Faults, bool]]:
        """What is planted, call by call, and whether the call is to be waited for."""
        for _ in range(CALLS):
            yield singles(self.clean, LINES[self.shape.batch > 1], rng), bool(rng.random() < 0.5)
        # In a batch, and where both sides are checked, each line is judged by itself only if one element is changed.
        if self.shape.batch == 1 and self.check != "both":
            for kind in (*SEVERAL, *TILES):
                yield several(kind, self.clean, rng), bool(rng.random() < 0.5)
            for kind in MASS:
                yield several(kind, self.clean, rng), True


class Campaign:
    """Scene after scene, until enough faults are planted.

    Attributes
    ----------
    counts : dict of (kind, mode) to Counter
    """

    def __init__(self, run: Run, modes: Sequence[Mode], shapes: Sequence[Shape] = SHAPES) -> None:
        self.run, self.modes, self.shapes = run, modes, shapes
        self.counts: dict[tuple[str, Mode], Counter[str]] = {}

    @property
    def planted(self) -> int:
        return sum(counts["planted"] for counts in self.counts.values())

    def plant(self, count: float) -> None:
        """Plant so many faults, unless time is up before."""
        for number in itertools.count():
            if self.planted >= count or self.run.over:
                return
            self.scene(number)

    def scene(self, number: int) -> None:
        """All that is planted into one product; it follows from the seed and the number."""
        rng = np.random.default_rng([self.run.seed, number])
        mode = self.modes[number % len(self.modes)]
        shape = self.shapes[number // len(self.modes) % len(self.shapes)]
        family, check = str(rng.choice(FAMILIES)), str(rng.choice(CHECKS))
        name = f"scene {number}: {family} {mode} {shape} check={check}"
        with self.run.going_on(name):
            scene = Scene(mode, shape, family, check, rng, self.run.xp)
            planned = ((faults, sync) for faults, sync in scene.faults(rng) if faults.place.size)
            waiting = [scene.call(*each) for each in planned if not self.run.over]
            for one in waiting:
                found, report = scene.outcome(one)
                self._count(name, number, mode, one.faults.kinds, found, report)
                if self.run.show:
                    print(f"{name}: {one.faults.kinds}\n{report}")
        rate = self.planted / max(self.run.seconds, 1e-9)
        self.run.progress(f"{name}: {self.planted} faults, {rate:.0f}/s, {len(self.run.failures)} failures")

    def _count(
        self, name: str, number: int, mode: Mode, kinds: Sequence[str], found: Sequence[dict[str, bool]], report: Report
    ) -> None:
        broken = []
        for kind, outcome in zip(kinds, found, strict=True):
            self.counts.setdefault((kind, mode), Counter()).update(
                {key: int(outcome.get(key, False)) for key in OUTCOMES}
            )
            if outcome.get("broken"):
                broken.append(f"{kind}: {', '.join(key for key in OUTCOMES if outcome[key])}")
        if broken:
            again = f"again: planted --seed {self.run.seed} --scene {number}"
            self.run.fail(f"{name}: {'; '.join(broken)}\n  {report}\n  {again}")

    def table(self) -> list[dict[str, Any]]:
        """Rows of the CSV."""
        return [
            {"kind": kind, "dtype": mode.dtype, "mode": mode.variant} | {name: counts[name] for name in OUTCOMES}
            for (kind, mode), counts in sorted(self.counts.items(), key=lambda each: (str(each[0][1]), each[0][0]))
            if counts["planted"]
        ]
