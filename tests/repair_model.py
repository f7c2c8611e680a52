"""Problems for the kernel that repairs flagged lines (kernels/repair.cu), and the judge of what it made of them.

A `Case` is a product as the checked GEMM leaves it behind, with a fault: `FAULTS` has them by name. Nothing here runs a
kernel; `Work.arguments` are those of a launch, NumPy arrays for pointers and `NULL` where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.checksum import bounds
from abft_tsm2.checksum.on_device import repair_bytes
from abft_tsm2.core.check_config import Repair, sums_of
from abft_tsm2.core.generated import splitmix64
from tests.both_cases import TYPES
from tests.cuda_on_cpu.library import _Address

NULL = _Address(0)
WORDS = 128
CAP, TOLD = 2048, 40  # lines, and faults that the record names
SHORT = 128  # columns of which every element is looked at
CLEAN, REPAIRED, UNRESOLVED, CLEARED = 0, 1, 2, 3
SEALED = np.uint64(0xABCDABCDABCDABCD)  # in words of the record that nobody has written


@dataclass
class Work:
    """One call: operands, what the check has left behind, and what the kernel is to write. C has faults already."""

    config: Repair
    L: np.ndarray
    R: np.ndarray
    C: np.ndarray
    cast: np.ndarray | None
    C0: np.ndarray | None
    alpha: float
    beta: float
    v: np.ndarray
    clean: np.ndarray  # C without faults
    exact: np.ndarray  # in the widest type there is
    checks: dict[str, Any]
    wrong: np.ndarray  # where C is wrong
    outcome: int = REPAIRED
    most: int = 1 << 40  # lines that are repaired
    written: bool | None = None  # whether what is wrong is replaced; by default where all is repaired
    changed: bool = False  # L or R, after their words were summed
    freely: np.ndarray | None = None  # what may be replaced by the product without being told, or not
    completed: bool = True  # whether all of `freely` is the product afterwards
    lines: list[int] | None = None  # flagged ones; by default those that the check flags
    words: bool = True
    off: int = 0
    scratch: int | None = None
    state: np.ndarray = field(default_factory=lambda: np.zeros(32, np.uint64))
    record: np.ndarray = field(default_factory=lambda: np.full(WORDS, SEALED, np.uint64))

    def bound(self, C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Residuals of all lines, and their bounds."""
        c = self.checks
        with np.errstate(all="ignore"):
            weighted = C.astype(np.float64) * self.v[:, None, :].astype(np.float64)
            residual = abs(weighted.sum(2) - self.alpha * c["t"] - (self.beta * c["t0"] if self.beta else 0))
            added = abs(self.beta) * np.sqrt(c["added2"]) if self.beta else None
            underflow = c["underflow"] * c["sizes"][: len(self.v), :1]
            products = abs(self.alpha) * np.sqrt(c["p2"])
            n = C.shape[2]
            tau = bounds.statistical_bound(
                *(np, c["arithmetic"], c["terms"], n),
                products=products,
                stored=np.sqrt((weighted**2).sum(2)),
                added=added,
                underflow=underflow,
            )
        return residual, tau

    @property
    def flagged(self) -> list[int]:
        if self.lines is not None:
            return self.lines
        residual, tau = self.bound(self.C)
        with np.errstate(invalid="ignore"):
            return [int(i) for i in np.flatnonzero(~((residual <= tau) & np.isfinite(tau)).ravel())]

    def arguments(self) -> tuple[Any, ...]:
        c, a, flagged = self.checks, self.checks["arithmetic"], self.flagged
        batch, m, n = self.C.shape
        k = self.L.shape[2]
        order = np.random.default_rng(7).permutation(len(flagged))
        lines = np.asarray(flagged, np.uint32)[order] if flagged else np.zeros(1, np.uint32)
        self.state[0] = len(flagged) | self.off << 32
        self.state[1] = 0x3F000000 << 32 | (m * batch - 1)
        tau = self.bound(self.C)[1].ravel()
        terms = c["terms"]
        factor, root = bounds.statistical_factor(a, terms, n), 1.01 * float(np.sqrt(terms))
        size = repair_bytes(self.config, k, n) if self.scratch is None else self.scratch
        scratch = np.full(size + 16, 255, np.uint8)
        scratch = scratch[-scratch.ctypes.data % 16 :][:size]
        beta = self.beta != 0

        def strided(x: np.ndarray | None) -> tuple[Any, ...]:
            if x is None:
                return (NULL, 0, 0, 0)
            step, rows, columns = (s // x.itemsize for s in x.strides)
            return (x, rows, columns, step if len(x) > 1 else 0)

        return (
            *(m, k, n, batch, *strided(self.L), *strided(self.R), *strided(self.C), *strided(self.cast)),
            *(*strided(self.C0), self.alpha, self.beta, self.v, n if len(self.v) > 1 else 0),
            *(c["t"], c["t0"] if beta else NULL, c["p2"], c["added2"] if beta else NULL, tau),
            *(factor, 0.0, 4 * a.u_out, root),
            *((c["left_words"], c["right_words"]) if self.words else (NULL, NULL)),
            *(k if len(c["right_words"]) > 1 else 0, a.u, bounds.rigorous_factor(a, terms), a.u_out, c["underflow"]),
            *(c["sizes"], self.most, lines, self.state, scratch, size, self.record),
        )


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
    seed: int = 0

    def work(self, config: Repair) -> Work:
        rng = np.random.default_rng([self.seed, self.m, self.k, self.n])
        dtype, out = TYPES[config.dtype], TYPES[config.out]
        rights = 1 if self.shared else self.batch
        L = _stacked(rng.standard_normal((self.batch, self.m, self.k)).astype(dtype), self.order == "F", 3)
        R = _stacked(rng.standard_normal((rights, self.k, self.n)).astype(dtype), bool(config.turned), 2)
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
        right = R.astype(np.float64) * v[:, None, :]
        terms = self.k + (2 if (self.alpha, self.beta) != (1, 0) else 0)
        checks = {
            "arithmetic": a,
            "terms": terms,
            "underflow": float(a.underflow(terms, self.alpha)),
            "t": (L.astype(np.float64) @ right.sum(2)[..., None])[..., 0],
            "p2": (L.astype(np.float64) ** 2 @ (right**2).sum(2)[..., None])[..., 0],
            "sizes": np.stack([abs(v).astype(np.float64).sum(1), abs(v).astype(np.float64).min(1)], 1),
            "left_words": words(L),
            "right_words": words(R),
        }
        if C0 is not None:
            weighted = C0.astype(np.float64) * v[:, None, :]
            checks |= {"t0": weighted.sum(2), "added2": (weighted**2).sum(2)}
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


def words(x: np.ndarray) -> np.ndarray:
    """Sums of the bits of each row of each matrix."""
    return np.ascontiguousarray(x).view(f"u{x.itemsize}").astype(np.uint64).sum(2, dtype=np.uint64)


def judged(work: Work, launch: Callable[[tuple[Any, ...]], None]) -> list[str]:
    """Launches the kernel; what is wrong with what it has left in C, in its cast and in the record."""
    before, flagged, tau = work.C.copy(), len(work.flagged), work.bound(work.C)[1].ravel()
    launch(work.arguments())
    found: list[str] = []

    def expect(what: str, value: Any, wanted: Any) -> None:
        if value != wanted:
            found.append(f"{what} is {value}, not {wanted}")

    record, C, wrong = work.record, work.C, work.wrong
    batch, m, n = C.shape
    written = wrong if (work.outcome == REPAIRED if work.written is None else work.written) else np.zeros_like(wrong)
    kept = bits(C) == bits(before)
    free = np.zeros_like(wrong) if work.freely is None or not written.any() else work.freely
    if not kept[~(written | free)].all():
        found.append(f"{np.count_nonzero(~kept & ~(written | free))} element(s) were written that should stay")
    best = work.exact.astype(np.float64)
    with np.errstate(all="ignore"):
        if work.config.out == "float64":  # the kernel's own sum has roundings, too
            near = abs(C - best) <= 2.0**-53 * (abs(best) + 8 * abs(work.L) @ abs(work.R))
        else:  # 16 bits by way of float32
            near = best.astype(np.float32).astype(C.dtype) == C
        if work.cast is not None:
            expect("the cast", bits(work.cast).tolist(), bits(C.astype(work.cast.dtype)).tolist())
    if not near[written | (free & work.completed)].all():
        found.append(f"{np.count_nonzero(~near & (written | free))} repaired element(s) are not the product")
    expect("the stamp", int(record[0]), 1)
    expect("the number of lines", int(record[1]), flagged)
    expect("the outcome", int(record[2]), work.outcome)
    expect("the closest", int(record[3]), int(work.state[1]))
    expect("tau", record[4:5].tobytes(), tau[-1:].tobytes())
    expect("the least weight", float(record[5:6].view(np.float64)[0]), float(work.checks["sizes"][:, 1].min()))
    expect("the flags", int(record[7]), work.off | 2 * work.changed)
    places = [tuple(place) for place in np.argwhere(written.reshape(batch * m, n)).tolist()]
    if (free & written).any():
        return found  # how many of them are faults is a matter of how far off they are
    expect("the number of wrong elements", int(record[6]), len(places))
    faults, told = record[8:].reshape(TOLD, 3), min(TOLD, len(places))
    named = [(int(x) & 0xFFFFFFFF, int(x) >> 32) for x in faults[:told, 0]]
    expect("places", named, places[:told])  # the first lines' also where not all are kept: their tickets come first
    for number, x in ((1, before), (2, C)):
        values = np.array([x.reshape(batch * m, n)[place] for place in places[:told]], np.float64)
        got = faults[:told, number].copy().view(np.float64)
        expect(f"value {number} of the faults", np.array_equal(got, values, equal_nan=True), True)
    if not (faults[told:] == SEALED).all():
        found.append("more faults were written than there are")
    return found


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


# ---- faults: each plants one and says what is expected, where that is not the repair ---------------------------------


def _typical(work: Work) -> float:
    return float(np.sqrt(np.mean(work.exact.astype(np.float64) ** 2))) if work.exact.size else 1.0


def _clean(work: Work, rng: np.random.Generator) -> None:
    work.outcome, work.off = CLEAN, 1


def _element(work: Work, rng: np.random.Generator) -> None:
    work.C[-1, work.C.shape[1] // 2, work.C.shape[2] // 3] += 8 * _typical(work)


def _small(work: Work, rng: np.random.Generator) -> None:  # three times what the check sees
    line = work.C.shape[1] // 3
    work.C[0, line, 5] += 3 * work.bound(work.C)[1][0, line] / abs(float(work.v[0, 5]))


def _in_a_row(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 4, [0, 17, -1]] += 8 * _typical(work)
    work.off = 1


def _rows(work: Work, rng: np.random.Generator) -> None:
    for line in (0, 3, 4, 20, work.C.shape[1] - 1):
        work.C[0, line, rng.permutation(work.C.shape[2])[:2]] -= _typical(work) * np.array([9.0, 15.0])
    # Among so many elements one may be so far off, by rounding alone, that its column is taken for wrong.
    right = work.clean == work.C
    work.freely, work.completed = right & ~right.all(axis=1, keepdims=True), False


def _many_rows(work: Work, rng: np.random.Generator) -> None:  # each in a column of its own
    for number, line in enumerate(range(2, work.C.shape[1], 2)):
        work.C[0, line, (7 * number) % work.C.shape[2]] += 8 * _typical(work)


def _all_rows(work: Work, rng: np.random.Generator) -> None:
    work.C[0, :, 3:10] += 8 * _typical(work)
    _may_be_whole(work, 7)


def _cancelling(work: Work, rng: np.random.Generator) -> None:  # in a column of lines that are looked at together
    work.C[0, :16, 10] += 20 * _typical(work)
    work.C[0, 6:8, 10] = work.clean[0, 6:8, 10] + 20 * _typical(work) * np.array([-1, 1]) * _weights_of(6, 7)[::-1]


def _weights_of(*lines: int) -> np.ndarray:
    """As kernels/repair_locate.cuh has them."""
    z = splitmix64(0, np.array(lines, np.uint64) + np.uint64(1))
    size = 1 + (z & np.uint64(0x7FFFFFFF)).astype(np.float64) / 2**32
    return np.where(z >> np.uint64(63), -size, size)


def _tile(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 3:12, 5:17] = 0
    _may_be_whole(work, 12)


def _may_be_whole(work: Work, columns: int) -> None:
    """Lines in which more than a tenth of the columns are wrong may be wrong all over."""
    if 10 * columns > work.C.shape[2]:
        work.freely, work.completed = work.clean == work.C, False


def _large_tile(work: Work, rng: np.random.Generator) -> None:
    part = work.C[0, :, 2:47]
    work.lines = list(range(work.C.shape[1]))  # in 16 bits such faults may hide in each other
    part += (rng.choice([-9, 9], part.shape) * (1 + rng.random(part.shape)) * _typical(work)).astype(part.dtype)
    _may_be_whole(work, 45)


def _nan(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 9, 11] = np.nan


def _infinities(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 9, [11, 12]] = -np.inf, np.inf
    work.C[0, 1, 0] = np.inf


def _row_of_nan(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 2] = np.nan


def _row(work: Work, rng: np.random.Generator) -> None:
    work.C[0, 2] += rng.choice([-9, 9], work.C.shape[2]) * _typical(work)


def _products(work: Work, rng: np.random.Generator) -> None:
    for b, line, column in ((0, 5, 1), (2, 0, 3), (2, 7, 50), (2, 7, 2)):
        work.C[b, line, column] += 8 * _typical(work)


def _too_many_products(work: Work, rng: np.random.Generator) -> None:
    work.C[:, :3, 4] += 8 * _typical(work)
    work.outcome = UNRESOLVED


def _wrong_t(work: Work, rng: np.random.Generator) -> None:
    work.checks["t"][0, 6] += 500 * _typical(work)
    work.outcome = CLEARED


def _wrong_t_beside(work: Work, rng: np.random.Generator) -> None:  # the element is repaired, its line is not right yet
    _element(work, rng)
    work.checks["t"][-1, work.C.shape[1] // 2] += 500 * _typical(work)
    work.outcome, work.written = UNRESOLVED, True


def _nothing(work: Work, rng: np.random.Generator) -> None:
    work.lines, work.outcome = [2, 5], UNRESOLVED


def _element_and_nothing(work: Work, rng: np.random.Generator) -> None:
    _element(work, rng)
    work.lines, work.outcome, work.written = [*work.flagged, 2], UNRESOLVED, True


def _noise(work: Work, rng: np.random.Generator) -> None:
    if not work.checks["arithmetic"].u_out:  # one unit of 16 bits is no noise
        work.C[0, 4, 8] = np.nextafter(work.C[0, 4, 8], work.C.dtype.type(np.inf))
    work.lines, work.outcome = [4], UNRESOLVED


def _without_words(work: Work, rng: np.random.Generator) -> None:
    _rows(work, rng)
    work.words = False


def _column(work: Work, rng: np.random.Generator) -> None:
    work.C[0, :, work.C.shape[2] // 2] += 8 * _typical(work)
    work.lines = list(range(work.C.shape[1]))


def _too_many_elements(work: Work, rng: np.random.Generator) -> None:
    work.C[...] = np.nan
    work.outcome = UNRESOLVED


def _most_lines_of_products(work: Work, rng: np.random.Generator) -> None:
    work.C[:2, :3, 4] += 8 * _typical(work)
    work.C[2, [0, 5], 9] -= 8 * _typical(work)


def _right_changed(work: Work, rng: np.random.Generator) -> None:  # of all R the row is the one that is read last
    _element(work, rng)
    work.R[-1, -1, work.C.shape[2] // 3] += 3
    work.outcome, work.changed = UNRESOLVED, True


def _left_changed(work: Work, rng: np.random.Generator) -> None:
    _element(work, rng)
    work.L[-1, work.C.shape[1] // 2, -1] += 3
    work.outcome, work.changed = UNRESOLVED, True


def _nan_in_left(work: Work, rng: np.random.Generator) -> None:
    work.L[0, 1, 2] = work.C[0, 1] = work.clean[0, 1] = work.checks["t"][0, 1] = work.checks["p2"][0, 1] = np.nan
    work.words, work.outcome = False, UNRESOLVED


def _little_scratch(work: Work, rng: np.random.Generator) -> None:
    _element(work, rng)
    work.scratch, work.outcome = repair_bytes(work.config, work.L.shape[2], work.C.shape[2]) - 1, UNRESOLVED


def _left_all_over(work: Work, rng: np.random.Generator) -> None:
    """What is left of an element of L that was wrong while C was computed: a line that is off by a multiple of a row
    of R, so little that no element is further off than rounding can make it but a few."""
    line, middle = 4, work.L.shape[2] // 2
    row = work.alpha * work.R[0, middle].astype(np.float64)
    weighted = abs(row @ work.v[0].astype(np.float64))
    _shift_by(work, (0, line), 3 * work.bound(work.C)[1][0, line] / weighted * row)
    work.freely = np.zeros(work.C.shape, bool)
    work.freely[0, line] = True


def _right_all_along(work: Work, rng: np.random.Generator) -> None:
    """The same of R: of a column that is off, most lines say nothing."""
    middle, j = work.L.shape[2] // 2, work.C.shape[2] // 3
    column = work.alpha * work.L[0, :, middle].astype(np.float64)
    tau = work.bound(work.C)[1][0] / abs(float(work.v[0, j]))
    size = 2 / np.sort(abs(column) / tau)[-3]  # three lines see it
    _shift_by(work, (0, slice(None), j), size * column)
    work.freely = np.zeros(work.C.shape, bool)
    work.freely[0, :, j] = True


def _much_of_a_column(work: Work, rng: np.random.Generator) -> None:
    """Nothing tells of the other elements but how many are wrong."""
    work.C[0, ::5, 9] += 8 * _typical(work)
    work.freely = np.zeros(work.C.shape, bool)
    work.freely[0, :, 9] = True
    work.completed = work.C.shape[1] > SHORT


def _unseen_in_a_tile(work: Work, rng: np.random.Generator) -> None:
    """Of the lines of a tile one in which it cancels."""
    work.C[0, 5:21, 10:14] += 8 * _typical(work)
    work.C[0, 12] = work.clean[0, 12]
    change = 8 * _typical(work) * work.v[0, [11, 10]].astype(np.float64) * (1, -1)
    _shift_by(work, (0, 12, [10, 11]), change)
    assert 12 not in work.flagged
    work.freely = np.zeros(work.C.shape, bool)
    work.freely[0, :, 10:12] = True


def _shift_by(work: Work, where: Any, change: np.ndarray) -> None:
    work.C[where] = (work.C[where].astype(np.float64) + change).astype(work.C.dtype)


def _scattered_nan(work: Work, rng: np.random.Generator) -> None:
    for line in work.C[0]:
        line[rng.permutation(line.size)[:4]] = np.nan
    work.most = 5


def _scattered_nan_and_elements(work: Work, rng: np.random.Generator) -> None:
    _scattered_nan(work, rng)
    work.C[0, [3, 7], [0, 9]] += 8 * _typical(work)


def _column_of_too_many(work: Work, rng: np.random.Generator) -> None:
    _column(work, rng)
    work.most = 5


def _column_and_nan(work: Work, rng: np.random.Generator) -> None:
    _column_of_too_many(work, rng)
    work.C[0, 2, 1] = work.C[0, 5, 1] = np.inf


def _nothing_in_all_lines(work: Work, rng: np.random.Generator) -> None:
    work.lines, work.most, work.outcome = list(range(work.C.shape[1])), 5, UNRESOLVED


def _half_of_all_columns(work: Work, rng: np.random.Generator) -> None:
    work.C[0, :, ::2] += 8 * _typical(work)
    work.lines = list(range(work.C.shape[1]))
    work.most, work.outcome = 5, UNRESOLVED


def _nan_of_changed_left(work: Work, rng: np.random.Generator) -> None:
    _scattered_nan(work, rng)
    work.L[0, 3, 0] += 3
    work.outcome, work.changed = UNRESOLVED, True


FAULTS: dict[str, Callable[[Work, np.random.Generator], None]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_clean, _element, _small, _in_a_row, _rows, _many_rows, _all_rows, _tile, _cancelling, _large_tile),
        *(_nan, _infinities),
        *(_row_of_nan, _row, _products, _most_lines_of_products, _too_many_products, _wrong_t, _wrong_t_beside),
        *(
            _nothing,
            _element_and_nothing,
            _noise,
            _without_words,
            _column,
            _too_many_elements,
            _right_changed,
            _left_changed,
            _nan_in_left,
        ),
        *(_little_scratch, _left_all_over, _right_all_along, _much_of_a_column, _unseen_in_a_tile),
        *(_scattered_nan, _scattered_nan_and_elements),
        *(_column_of_too_many, _column_and_nan, _half_of_all_columns, _nan_of_changed_left),
        _nothing_in_all_lines,
    )
}
