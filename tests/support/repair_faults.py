"""Faults for the kernel that repairs flagged lines (kernels/repair/repair.cu), planted into products of any shape.

A `Case` is a product as the checked GEMM leaves it behind, with a fault: `FAULTS` has them by name. Each plants one and
says what is expected of `tests.support.repair_model.Work`, where that is not the repair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.checksum import bounds
from abft_tsm2.checksum.device.check import repair_bytes
from abft_tsm2.checksum.device.kernels import RepairKernel, sums_of
from abft_tsm2.core.generated import splitmix64
from tests.support.both_cases import TYPES
from tests.support.check_cases import words_of
from tests.support.repair_model import CLEAN, CLEARED, SHORT, UNRESOLVED, Work

Plant = Callable[[Work, np.random.Generator], None]
FAULTS: dict[str, Plant] = {}


def fault(plant: Plant) -> Plant:
    """Enters a fault into `FAULTS` by its name."""
    FAULTS[plant.__name__] = plant
    return plant


@dataclass(frozen=True)
class Case:
    """A product of a shape, with a fault of `FAULTS`."""

    fault: str
    m: int = 37
    k: int = 45
    n: int = 51
    alpha: float = 1.0
    beta: float = 0.0
    batch: int = 1
    shared: bool = False  # one R, and one v, for all products
    order: str = "C"  # of L and C
    equal: bool = False  # all elements of L, and all of R
    seed: int = 0

    def work(self, config: RepairKernel) -> Work:
        rng = np.random.default_rng([self.seed, self.m, self.k, self.n])
        dtype, out = TYPES[config.dtype], TYPES[config.out]
        rights = 1 if self.shared else self.batch
        left, right = (rng.standard_normal(shape) for shape in ((self.batch, self.m, self.k), (rights, self.k, self.n)))
        if self.equal:
            left[...], right[...] = 0.7, 1.3
        L = _stacked(left.astype(dtype), self.order == "F", 3)
        R = _stacked(right.astype(dtype), bool(config.turned), 2)
        a = bounds.arithmetic(config.dtype, config.out, library="cupy" if dtype.itemsize == 2 else "numpy")
        wide = np.float64 if config.dtype == "float64" else np.float32
        # So that beta C0 counts as much as the product, and more than it where that is short.
        C0 = rng.standard_normal((self.batch, self.m, self.n)) * np.sqrt(self.k) if self.beta else None
        C0 = None if C0 is None else C0.astype(out)
        product = wide(self.alpha) * (L.astype(wide) @ R.astype(wide))
        product = product if C0 is None else product + wide(self.beta) * C0.astype(wide)
        exact = self.alpha * (L.astype(np.longdouble) @ R.astype(np.longdouble))
        exact = exact if C0 is None else exact + self.beta * C0.astype(np.longdouble)
        v = rng.choice([-1.0, 1.0], (rights, self.n)) * (1 + rng.integers(0, 65, (rights, self.n)) / 128)
        v = v.astype(sums_of(config.dtype))
        weighted = R.astype(np.float64) * v[:, None, :]
        terms = self.k + (2 if (self.alpha, self.beta) != (1, 0) else 0)
        checks = {
            "arithmetic": a,
            "terms": terms,
            "underflow": float(a.underflow(terms, self.alpha)),
            "t": (L.astype(np.float64) @ weighted.sum(2)[..., None])[..., 0],
            "p2": (L.astype(np.float64) ** 2 @ (weighted**2).sum(2)[..., None])[..., 0],
            "sizes": np.stack([abs(v).astype(np.float64).sum(1), abs(v).astype(np.float64).min(1)], 1),
            "left_words": words_of(L),
            "right_words": words_of(R),
        }
        if C0 is not None:
            weighted = C0.astype(np.float64) * v[:, None, :]
            checks |= {"t0": weighted.sum(2), "added2": (weighted**2).sum(2), "added_words": words_of(C0)}
        clean = product.astype(out)
        C = _stacked(clean, self.order == "F", 1)
        cast = _stacked(C.astype(TYPES[config.cast]), False, 2) if config.cast else None
        work = Work(config, L, R, C, cast, C0, self.alpha, self.beta, v, clean, exact, checks, np.zeros(C.shape, bool))
        with np.errstate(all="ignore"):
            FAULTS[self.fault](work, rng)
            work.wrong = ~((clean == C) | (np.isnan(C) & np.isnan(clean)))
        if cast is not None:
            with np.errstate(all="ignore"):
                cast[...] = C.astype(cast.dtype)
        return work


def _stacked(x: np.ndarray, turned: bool, extra: int) -> np.ndarray:
    """A copy whose rows (turned: columns) lie `extra` elements further apart, between elements that are NaN."""
    steps = x.shape[0], *(x.shape[:0:-1] if turned else x.shape[1:])
    memory = np.full((steps[0], steps[1], steps[2] + extra), np.nan, x.dtype)
    out = memory[..., : steps[2]]
    out = out.transpose(0, 2, 1) if turned else out
    out[...] = x
    return out


def _typical(work: Work) -> float:
    return float(np.sqrt(np.mean(work.exact.astype(np.float64) ** 2))) if work.exact.size else 1.0


@fault
def clean(work: Work, rng: np.random.Generator) -> None:
    work.outcome, work.off = CLEAN, 1


@fault
def element(work: Work, rng: np.random.Generator) -> None:
    work.C[-1, work.C.shape[1] // 2, work.C.shape[2] // 3] += 8 * _typical(work)


@fault
def small(work: Work, rng: np.random.Generator) -> None:  # three times what the check sees
    line = work.C.shape[1] // 3
    work.C[0, line, 5] += 3 * work.bound(work.C)[1][0, line] / abs(float(work.v[0, 5]))


@fault
def in_a_row(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 4, [0, 17, -1]] += 8 * _typical(work)
    work.off = 1


@fault
def rows(work: Work, rng: np.random.Generator) -> None:
    for line in (0, 3, 4, 20, work.C.shape[1] - 1):
        work.C[0, line, rng.permutation(work.C.shape[2])[:2]] -= _typical(work) * np.array([9.0, 15.0])
    # Among so many elements one may be so far off, by rounding alone, that its column is taken for wrong.
    right = work.clean == work.C
    work.freely, work.completed = right & ~right.all(axis=1, keepdims=True), False


@fault
def many_rows(work: Work, rng: np.random.Generator) -> None:  # each in a column of its own
    for number, line in enumerate(range(2, work.C.shape[1], 2)):
        work.C[0, line, (7 * number) % work.C.shape[2]] += 8 * _typical(work)


@fault
def all_rows(work: Work, rng: np.random.Generator) -> None:
    work.C[0, :, 3:10] += 8 * _typical(work)
    _may_be_whole(work, 7)


@fault
def cancelling(work: Work, rng: np.random.Generator) -> None:  # in a column of lines that are looked at together
    work.C[0, :16, 10] += 20 * _typical(work)
    work.C[0, 6:8, 10] = work.clean[0, 6:8, 10] + 20 * _typical(work) * np.array([-1, 1]) * _weights_of(6, 7)[::-1]


def _weights_of(*lines: int) -> np.ndarray:
    """As kernels/repair/repair_locate.cuh has them."""
    z = splitmix64(0, np.array(lines, np.uint64) + np.uint64(1))
    size = 1 + (z & np.uint64(0x7FFFFFFF)).astype(np.float64) / 2**32
    return np.where(z >> np.uint64(63), -size, size)


@fault
def tile(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 3:12, 5:17] = 0
    _may_be_whole(work, 12)


def _may_be_whole(work: Work, columns: int) -> None:
    """Lines in which more than a tenth of the columns are wrong may be wrong all over."""
    if 10 * columns > work.C.shape[2]:
        work.freely, work.completed = work.clean == work.C, False


@fault
def large_tile(work: Work, rng: np.random.Generator) -> None:
    part = work.C[0, :, 2:47]
    work.lines = list(range(work.C.shape[1]))  # in 16 bits such faults may hide in each other
    part += (rng.choice([-9, 9], part.shape) * (1 + rng.random(part.shape)) * _typical(work)).astype(part.dtype)
    _may_be_whole(work, 45)


@fault
def nan(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 9, 11] = np.nan


@fault
def infinities(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 9, [11, 12]] = -np.inf, np.inf
    work.C[0, 1, 0] = np.inf


@fault
def row_of_nan(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 2] = np.nan


@fault
def row(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 2] += rng.choice([-9, 9], work.C.shape[2]) * _typical(work)


@fault
def products(work: Work, rng: np.random.Generator) -> None:
    for b, line, column in ((0, 5, 1), (2, 0, 3), (2, 7, 50), (2, 7, 2)):
        work.C[b, line, column] += 8 * _typical(work)


@fault
def too_many_products(work: Work, rng: np.random.Generator) -> None:
    work.C[:, :3, 4] += 8 * _typical(work)
    work.outcome = UNRESOLVED


@fault
def wrong_t(work: Work, rng: np.random.Generator) -> None:
    work.checks["t"][0, 6] += 500 * _typical(work)
    work.outcome = UNRESOLVED  # or it was the product of other operands


@fault
def wrong_t_beside(work: Work, rng: np.random.Generator) -> None:  # the element is repaired, its line is not right yet
    element(work, rng)
    work.checks["t"][-1, work.C.shape[1] // 2] += 500 * _typical(work)
    work.outcome, work.written = UNRESOLVED, True


@fault
def lost_t(work: Work, rng: np.random.Generator) -> None:  # with its line, which agrees with it
    line = 6
    work.guard()
    for part in ("t", "p2"):
        work.checks[part][0, line] = 0
    work.C[0, line] = 0
    work.lines, work.outcome, work.written = [line], UNRESOLVED, True
    _may_be_whole(work, work.C.shape[2])


@fault
def lost_t_beside_a_right_line(work: Work, rng: np.random.Generator) -> None:
    work.guard()
    work.checks["t"][0, 6] *= 1 - 2.0**-52
    work.lines, work.outcome = [6], UNRESOLVED


@fault
def nothing(work: Work, rng: np.random.Generator) -> None:
    work.lines, work.outcome = [2, 5], UNRESOLVED


@fault
def element_and_nothing(work: Work, rng: np.random.Generator) -> None:
    element(work, rng)
    work.lines, work.outcome, work.written = [*work.flagged, 2], UNRESOLVED, True


@fault
def noise(work: Work, rng: np.random.Generator) -> None:
    if not work.checks["arithmetic"].u_out:  # one unit of 16 bits is no noise
        work.C[0, 4, 8] = np.nextafter(work.C[0, 4, 8], work.C.dtype.type(np.inf))
    work.lines, work.outcome = [4], UNRESOLVED


@fault
def without_words(work: Work, rng: np.random.Generator) -> None:
    rows(work, rng)
    work.words = False


@fault
def column(work: Work, rng: np.random.Generator) -> None:
    work.C[0, :, work.C.shape[2] // 2] += 8 * _typical(work)
    work.lines = list(range(work.C.shape[1]))


@fault
def too_many_elements(work: Work, rng: np.random.Generator) -> None:
    work.C[...] = np.nan
    work.outcome = UNRESOLVED


@fault
def most_lines_of_products(work: Work, rng: np.random.Generator) -> None:
    work.C[:2, :3, 4] += 8 * _typical(work)
    work.C[2, [0, 5], 9] -= 8 * _typical(work)


@fault
def right_changed(work: Work, rng: np.random.Generator) -> None:  # of all R the row is the one that is read last
    element(work, rng)
    work.R[-1, -1, work.C.shape[2] // 3] += 3
    work.outcome, work.changed = UNRESOLVED, True


@fault
def left_changed(work: Work, rng: np.random.Generator) -> None:
    element(work, rng)
    work.L[-1, work.C.shape[1] // 2, -1] += 3
    work.outcome, work.changed = UNRESOLVED, True


@fault
def nan_in_left(work: Work, rng: np.random.Generator) -> None:
    work.L[0, 1, 2] = work.C[0, 1] = work.clean[0, 1] = work.checks["t"][0, 1] = work.checks["p2"][0, 1] = np.nan
    work.words, work.outcome = False, UNRESOLVED


@fault
def little_scratch(work: Work, rng: np.random.Generator) -> None:
    element(work, rng)
    work.scratch, work.outcome = repair_bytes(work.config, work.L.shape[2], work.C.shape[2]) - 1, UNRESOLVED


@fault
def left_all_over(work: Work, rng: np.random.Generator) -> None:
    """What is left of an element of L that was wrong while C was computed: a line that is off by a multiple of a row
    of R, so little that no element is further off than rounding can make it but a few."""
    line, middle = 4, work.L.shape[2] // 2
    row = work.alpha * work.R[0, middle].astype(np.float64)
    weighted = abs(row @ work.v[0].astype(np.float64))
    _shift_by(work, (0, line), 3 * work.bound(work.C)[1][0, line] / weighted * row)
    work.freely = np.zeros(work.C.shape, bool)
    work.freely[0, line] = True


@fault
def right_all_along(work: Work, rng: np.random.Generator) -> None:
    """The same of R: of a column that is off, most lines say nothing."""
    middle, j = work.L.shape[2] // 2, work.C.shape[2] // 3
    column = work.alpha * work.L[0, :, middle].astype(np.float64)
    tau = work.bound(work.C)[1][0] / abs(float(work.v[0, j]))
    size = 2 / np.sort(abs(column) / tau)[-3]  # three lines see it
    _shift_by(work, (0, slice(None), j), size * column)
    work.freely = np.zeros(work.C.shape, bool)
    work.freely[0, :, j] = True


@fault
def much_of_a_column(work: Work, rng: np.random.Generator) -> None:
    """Nothing tells of the other elements but how many are wrong."""
    work.C[0, ::5, 9] += 8 * _typical(work)
    work.freely = np.zeros(work.C.shape, bool)
    work.freely[0, :, 9] = True
    work.completed = work.C.shape[1] > SHORT


@fault
def unseen_in_a_tile(work: Work, rng: np.random.Generator) -> None:
    """Of the lines of a tile one in which it cancels."""
    work.C[0, 5:21, 10:14] += 8 * _typical(work)
    work.C[0, 12] = work.clean[0, 12]
    change = 8 * _typical(work) * work.v[0, [11, 10]].astype(np.float64) * (1, -1)
    _shift_by(work, (0, 12, [10, 11]), change)
    assert 12 not in work.flagged
    work.freely = np.zeros(work.C.shape, bool)
    work.freely[0, :, 10:12] = True


@fault
def unseen_in_a_wide_tile(work: Work, rng: np.random.Generator) -> None:
    """So wide that its lines are taken for wrong all over; it cancels in the first of them and in one in the middle."""
    m, n = work.C.shape[1:]
    rows, columns = range(m // 4, m // 2), slice(n // 4, n // 2)
    unseen = rows[0], rows[len(rows) // 2]
    v = work.v[0, columns].astype(np.float64)
    for line in rows:
        change = rng.choice([-8.0, 8.0], v.size) * _typical(work)
        if line in unseen:
            change[0] -= (change @ v) / v[0]
        _shift_by(work, (0, line, columns), change)
    work.lines = [line for line in work.flagged if line not in unseen]
    work.freely, work.completed = np.zeros(work.C.shape, bool), False
    work.freely[0, rows] = work.freely[0, :, columns] = True


def _shift_by(work: Work, where: Any, change: np.ndarray) -> None:
    work.C[where] = (work.C[where].astype(np.float64) + change).astype(work.C.dtype)


@fault
def scattered_nan(work: Work, rng: np.random.Generator) -> None:
    for line in work.C[0]:
        line[rng.permutation(line.size)[:4]] = np.nan
    work.most = 5


@fault
def scattered_nan_and_elements(work: Work, rng: np.random.Generator) -> None:
    scattered_nan(work, rng)
    work.C[0, [3, 7], [0, 9]] += 8 * _typical(work)


@fault
def column_of_too_many(work: Work, rng: np.random.Generator) -> None:
    column(work, rng)
    work.most = 5


@fault
def column_and_nan(work: Work, rng: np.random.Generator) -> None:
    column_of_too_many(work, rng)
    work.C[0, 2, 1] = work.C[0, 5, 1] = np.inf


@fault
def nothing_in_all_lines(work: Work, rng: np.random.Generator) -> None:
    work.lines, work.most, work.outcome = list(range(work.C.shape[1])), 5, UNRESOLVED


@fault
def half_of_all_columns(work: Work, rng: np.random.Generator) -> None:
    work.C[0, :, ::2] += 8 * _typical(work)
    work.lines = list(range(work.C.shape[1]))
    work.most, work.outcome = 5, UNRESOLVED


@fault
def nan_of_changed_left(work: Work, rng: np.random.Generator) -> None:
    scattered_nan(work, rng)
    work.L[0, 3, 0] += 3
    work.outcome, work.changed = UNRESOLVED, True


# ---- whose evidence is computed from operands that may not be what was encoded; C is of 32 or 64 bits ----------------

OF_OPERANDS = ("pattern", "pattern_and_element", "swapped_right", "swapped_left", "swapped_and_column")


@fault
def pattern(work: Work, rng: np.random.Generator) -> None:
    """A line whose roundings have one direction: right in every element, and beyond the bound."""
    a, v = work.checks["arithmetic"], work.v[0].astype(np.float64)
    size = (abs(work.L.astype(np.float64)) @ abs(work.R.astype(np.float64)))[0, 1]
    share = 1.3 * work.bound(work.C)[1][0, 1] / (a.u * size @ abs(v))
    assert share < 0.9  # of what is usual
    work.C[0, 1] = (work.exact[0, 1].astype(np.float64) + share * a.u * size * np.sign(v)).astype(work.C.dtype)
    work.clean[0, 1] = work.C[0, 1]
    assert work.flagged == [1]
    work.outcome = CLEARED


@fault
def pattern_and_element(work: Work, rng: np.random.Generator) -> None:
    pattern(work, rng)
    work.C[0, 1, 7] += 8 * _typical(work)
    work.outcome, work.written, work.completed = UNRESOLVED, True, False
    work.freely = np.zeros(work.C.shape, bool)
    work.freely[0, :, 7] = True


@fault
def added_otherwise(work: Work, rng: np.random.Generator) -> None:
    """A tenth of a line of equal terms is added up in order, and the rest so that it is right: nothing is wrong."""
    kind, a = TYPES[work.config.out], work.checks["arithmetic"]
    wide = np.dtype(np.float64 if kind == np.float64 else np.float32).type
    in_order = np.add.accumulate(np.full(work.L.shape[2], wide(work.L[0, 1, 0]) * wide(work.R[0, 0, 0])))[-1]
    work.C[0, 1] = work.exact[0, 1].astype(kind)
    work.C[0, 1, ::12] = in_order
    work.clean[0, 1] = work.C[0, 1]
    if work.config.dtype != "bfloat16":  # whose products have few digits
        assert a.u_out > a.u or abs(float(in_order / work.exact[0, 1, 0]) - 1) / a.u > 10
    work.lines, work.outcome = [1], UNRESOLVED


@fault
def fails_no_more(work: Work, rng: np.random.Generator) -> None:
    """Equal terms round alike, and far, in a whole product: lines that fail by a little hold when added up again."""
    a = work.checks["arithmetic"]
    off = 0.9 * np.min(work.bound(work.C)[1] / (abs(work.exact.astype(np.float64)) @ abs(work.v[0]).astype(np.float64)))
    assert a.u_out > a.u or 8 * a.u < off
    work.C[...] = (work.exact.astype(np.float64) * (1 + off)).astype(work.C.dtype)
    work.clean[...] = work.C
    work.lines, work.most, work.outcome = list(range(work.C.shape[1])), 16, UNRESOLVED


@fault
def swapped_right(work: Work, rng: np.random.Generator) -> None:
    """Elements of a row of R changed places before C was computed: it is right by what R is now."""
    work.R[0, 3, [4, 7]] = work.R[0, 3, [7, 4]]
    _computed_again(work)


@fault
def swapped_left(work: Work, rng: np.random.Generator) -> None:
    work.L[0, 2, [4, 7]] = work.L[0, 2, [7, 4]]
    _computed_again(work)
    assert work.flagged == [2]


def _computed_again(work: Work) -> None:
    wide = work.C.dtype if work.C.dtype == np.float64 else np.dtype(np.float32)
    work.C[...] = work.clean[...] = wide.type(work.alpha) * (work.L.astype(wide) @ work.R.astype(wide))
    work.exact = work.alpha * (work.L.astype(np.longdouble) @ work.R.astype(np.longdouble))
    assert 0 < len(work.flagged) <= 8
    work.outcome = UNRESOLVED


@fault
def swapped_and_column(work: Work, rng: np.random.Generator) -> None:
    """Much of a column is wrong, and R changes, so that its bits add up to the same, before it is repaired: of lines
    that were not flagged the column is made wrong, and these alone tell."""
    inner, at = 5, [9, 12]
    few = np.argsort(abs(work.L[0, :, inner].astype(np.float64)))[: work.C.shape[1] // 5]
    work.C[0, few, 9] += 8 * _typical(work)
    patterns = work.R.view(f"u{work.R.itemsize}")
    share = abs(work.L[0, :, inner].astype(np.float64)) / work.bound(work.C)[1][0]
    change = 0.5 / (share[few].max() * abs(float(work.v[0, 9])))  # which flagged lines do not see
    ulps = patterns.dtype.type(max(1, round(change / float(np.spacing(abs(work.R[0, inner, 9]))))))
    patterns[0, inner, at[0] : at[0] + 1] += ulps
    patterns[0, inner, at[1] : at[1] + 1] -= ulps
    work.exact = work.alpha * (work.L.astype(np.longdouble) @ work.R.astype(np.longdouble))
    work.outcome, work.written, work.completed = UNRESOLVED, True, False
    work.freely = np.zeros(work.C.shape, bool)
    work.freely[0, :, 9] = True
