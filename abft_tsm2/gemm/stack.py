"""Many small products in a few array calls: the five steps of a batch, stack by stack.

Each matrix of a stack goes through the array calls that `abft_tsm2.gemm.host.Product` makes for one, and has the same
sums, bounds and check. A product that is not found clean is settled by a `Product`, with what was encoded for it before
the stack was multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array
from abft_tsm2.checksum.encode import OperandChecksum
from abft_tsm2.checksum.limits import SideLimits, limits_of
from abft_tsm2.checksum.predicted import PredictedSums, predict, recompute_checksum
from abft_tsm2.checksum.sides import Side
from abft_tsm2.checksum.verify import FirstVerdict, first_verdict
from abft_tsm2.core import faultpoint
from abft_tsm2.core.matmul import multiply
from abft_tsm2.gemm.host import EncodedSide, Product, encoded_now
from abft_tsm2.gemm.operands import GemmProblem, GemmTask
from abft_tsm2.report import Check, Report, Status

LARGEST = 1 << 14  # elements of a matrix: beyond that, a product takes longer than the calls for it
_STACK = 1 << 19  # bytes of one operand of a stack, which is read several times: half of a common level-2 cache

Index = tuple[Any, ...]  # of the axes of a batch: numbers, and a slice at last


def serves(problem: GemmProblem) -> bool:
    """Whether this is a batch of small products on NumPy, computed now and from operands as they are."""
    p = problem
    if not p.batch or p.exists or p.encoded_a is not None or p.encoded_b is not None or type(p.c) is not np.ndarray:
        return False
    (m, n), k = p.c.shape[-2:], p.a.shape[-1]
    if 0 in p.c.shape or k == 0 or k >= p.arithmetic.parts_from or max(m * k, k * n, m * n) > LARGEST:
        return False
    return bool(p.a.dtype == p.b.dtype and (p.c.dtype == p.a.dtype or p.a.dtype.itemsize == 2))


def run(problem: GemmProblem, operation: str, caller: Any, *, write: bool, limits: bool) -> Report:
    """Every product of the batch, and one report of them all.

    Parameters
    ----------
    caller : dict
        The error state of the products themselves.
    write, limits : bool
        Repair what is wrong; measure how small changes are sure to be found.
    """
    p, seconds = problem, dict[str, float]()
    (m, n), k = p.c.shape[-2:], p.a.shape[-1]
    outcomes = []
    largest = max(m * k, k * n, m * n) * max(4, p.c.dtype.itemsize)
    for at in _stacks(p.batch, max(1, _STACK // largest)):
        stack = Stack(p, at, caller)
        outcomes.append(stack.outcome(operation, write, limits))
        for step, time in stack.seconds.items():
            seconds[step] = seconds.get(step, 0.0) + time
    # A step of a stack takes as long for one product as for another.
    share = {step: time / math.prod(p.batch) for step, time in seconds.items()}
    known: Any = {"status": Status.CLEAN, "operation": operation, "m": m, "k": k, "n": n, "dtype": p.dtype}
    batch = p.batch

    def products() -> tuple[Report, ...]:
        found = (one for outcome in outcomes for one in outcome.products())
        made = []
        for index, (checks, report) in zip(np.ndindex(*batch), found, strict=True):
            if report is None:
                made.append(Report.made_of(**known, checks=checks, seconds=dict(share), index=index))
            else:
                own = report.seconds
                times = {step: share.get(step, 0.0) + own.get(step, 0.0) for step in {**share, **own}}
                made.append(replace(report, seconds=times))
        return tuple(made)

    if any(outcome.reports for outcome in outcomes):
        return Report.merge(products(), operation=operation)
    return BatchReport.of(products, **known, seconds=seconds)


class BatchReport(Report):
    """The report of a batch all of whose products are clean. Theirs are made when they are first asked for."""

    @classmethod
    def of(cls, products: Callable[[], tuple[Report, ...]], **values: Any) -> BatchReport:
        """The report with these values; `products` makes the others."""
        self = cls.made_of(**values)
        del self.__dict__["products"]
        self.__dict__["_make"] = products
        return self

    @cached_property
    def products(self) -> tuple[Report, ...]:
        make = self.__dict__.get("_make")
        if make is None:  # another thread has made them meanwhile
            made: tuple[Report, ...] = self.__dict__["products"]
            return made
        made = self.__dict__["products"] = make()
        self.__dict__.pop("_make", None)  # not before: an interrupt leaves the report as it was
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Report) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # as of `Record`

    def __reduce__(self) -> tuple[Any, ...]:
        return Report, tuple(getattr(self, part.name) for part in fields(Report))


class Stack:
    """Products with these places in a batch."""

    def __init__(self, problem: GemmProblem, at: Index, caller: Any) -> None:
        self.problem, self.at, self.caller = problem, at, caller
        self.A, self.B, self.C = _matrices(problem.a, at), _matrices(problem.b, at), problem.c[at]
        if self.A.ndim == self.B.ndim == 2:  # all products are the same: their checksums are made for each nevertheless
            self.B = problem.b[at]
        self.C0 = None if problem.c0 is None else problem.c0[at]
        self.sides = problem.sides()
        self.seconds: dict[str, float] = {}

    def outcome(self, operation: str, write: bool, limits: bool) -> StackOutcome:
        """Encode, multiply and verify the stack; settle what is not clean, product by product."""
        p, times = self.problem, [perf_counter()]
        encodings = [self.encode(side) for side in self.sides]
        if (planter := faultpoint.current()) is not None:
            self._plant(planter, encodings)
        times.append(perf_counter())
        with np.errstate(**self.caller):
            multiply(self.A, self.B, self.C, self.C0, alpha=p.alpha, beta=p.beta, stage="multiplied")
        times.append(perf_counter())
        ok, checks = np.ones(self.C.shape[:-2], np.bool_), list[FirstVerdict]()
        for e in encodings:
            u = recompute_checksum(e.lines, e.predicted.carried)
            if planter is not None:
                faultpoint.reach(planter, "verified", C=self.C, u=u)
            found = first_verdict(e.lines, e.predicted, u)
            if found is None:
                ok[...] = False
                continue
            ok &= found.ok
            checks.append(found)
            if not e.predicted.intact():
                ok &= np.reshape([_one(e.predicted, index).intact() for index in np.ndindex(*ok.shape)], ok.shape)
        times.append(perf_counter())
        steps = ("encode", "multiply", "verify")
        self.seconds = {step: times[i + 1] - times[i] for i, step in enumerate(steps)}
        reports = {}
        if not ok.all():
            for index in map(tuple, np.argwhere(~ok).tolist()):
                number = int(np.ravel_multi_index(index, ok.shape))
                reports[number] = self.settled(index, encodings, operation, write, limits)
        columns = []
        for e, one in zip(encodings, checks, strict=False):
            values = [np.ravel(x).tolist() for x in (one.bound, one.closest, one.closest_line)]
            columns.append(
                SideOutcome(e.lines.side, e.lines.C.shape[-2], values, _measured(e, one) if limits else None)
            )
        return StackOutcome(ok.size, columns, reports)

    def _plant(self, planter: faultpoint.Planter, encodings: list[EncodedSide]) -> None:
        """Let a planter see what is encoded: product by product, every side of each."""
        for index in np.ndindex(*self.C.shape[:-2]):
            A, B = (faultpoint.of_product(x, index) for x in (self.A, self.B))
            for e in encodings:
                own = _one(e.predicted, index)
                faultpoint.reach(planter, "encoded", A=A, B=B, s=own.carried.sums, t=own.t)

    def encode(self, side: str) -> EncodedSide:
        """As `Product.encode`, of the stack."""
        p, (A, B, C, C0) = self.problem, (self.A, self.B, self.C, self.C0)
        k = A.shape[-1]
        if side == "columns":
            A, B, C, C0 = _turned(B), _turned(A), _turned(C), None if C0 is None else _turned(C0)
        terms = k + (0 if p.alpha == 1.0 and C0 is None else 2)
        lines = Side(side, A, B, C, C0, p.alpha, p.beta, p.arithmetic, _alone, terms, False)
        return EncodedSide(lines, predict(lines, encoded_now(lines)))

    def settled(
        self, index: tuple[int, ...], encodings: list[EncodedSide], operation: str, write: bool, limits: bool
    ) -> Report:
        """The report of one product of the stack, by the procedure of any other one from its verdict on."""
        p = self.problem
        place = _place(self.at, index)
        C0 = None if p.c0 is None else p.c0[place]
        task = GemmTask(p.a[place], p.b[place], p.c[place], C0, None, None, self.sides, place)
        product = Product(task, p, operation, None, write, self.caller, limits=limits)
        own = [EncodedSide(product.lines(e.lines.side), _one(e.predicted, index)) for e in encodings]
        product.settle(own)
        return product.concluded(own, intact=True)


class SideOutcome(NamedTuple):
    """What was found of one side of a stack: its name, the number of lines, and lists of bounds, closest residuals and
    their lines, one for each product; and limits, where they were measured."""

    side: str
    lines: int
    values: list[list[Any]]
    limits: SideLimits | None

    def check(self, i: int) -> Check:
        """Of one product."""
        bound, closest, line = (x[i] for x in self.values)
        found: Any = {"bound": bound, "closest": closest, "closest_line": line, "detection_limit": math.nan}
        check = Check.made_of(side=self.side, vectors=1, lines=self.lines, verified=self.lines, **found)
        return check if self.limits is None else self.limits.of(check, i)


class StackOutcome(NamedTuple):
    """What was found of a stack, without its arrays.

    Attributes
    ----------
    number : int
        Of products.
    sides : list of SideOutcome
    reports : dict
        Of those that were settled one by one.
    """

    number: int
    sides: list[SideOutcome]
    reports: dict[int, Report]

    def products(self) -> Iterator[tuple[tuple[Check, ...], Report | None]]:
        """For each product its checks, or its report."""
        for i in range(self.number):
            if i in self.reports:
                yield (), self.reports[i]
            else:
                yield tuple(side.check(i) for side in self.sides), None


def _stacks(batch: tuple[int, ...], most: int) -> Iterator[Index]:
    """Cut a batch, in order, into indices of stacks of at most so many products."""
    inner = math.prod(batch[1:])
    if inner > most:
        for i in range(batch[0]):
            yield from ((i, *rest) for rest in _stacks(batch[1:], most))
    else:
        step = most // inner
        yield from ((slice(at, min(at + step, batch[0])),) for at in range(0, batch[0], step))


def _place(at: Index, index: tuple[int, ...]) -> tuple[int, ...]:
    """The place in the batch of a product of a stack."""
    *before, cut = at
    return (*before, cut.start + index[0], *index[1:])


def _matrices(X: Array, at: Index) -> Array:
    """The matrices there, or the one that they all are."""
    X = X[at]
    apart = [stride for stride, count in zip(X.strides, X.shape[:-2], strict=False) if count > 1]
    return X[(0,) * (X.ndim - 2)] if apart and not any(apart) else X


def _turned(X: Array) -> Array:
    return X.swapaxes(-1, -2)


def _alone() -> Array:
    raise AssertionError("a product of a stack is multiplied again by itself")


def _measured(e: EncodedSide, found: FirstVerdict) -> SideLimits:
    """The limits of a stack, product by product."""
    limits = limits_of(e.lines, e.predicted.carried.weights, found.residual)
    return SideLimits(*(x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x for x in limits))


def _one(predicted: PredictedSums, index: tuple[int, ...]) -> PredictedSums:
    """What was encoded for one product of a stack."""

    def of(x: Array | None) -> Array | None:
        return x if x is None or x.ndim == 2 else x[index]

    c = predicted.carried
    guard: Any = tuple(map(of, c.guard))
    carried = OperandChecksum(of(c.weights), of(c.sums), of(c.squares), guard, c.partial)
    t, products, t0, added = map(of, predicted[1:5])
    return PredictedSums(carried, t, products, t0, added, tuple(map(of, predicted.guard)))
