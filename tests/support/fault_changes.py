"""What each fault model may do to a matrix, said a second time: the judge of tests/faults/test_fault_models.py.

Nothing here is shared with the models. Matrices are compared as they were before and after, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.faults import Plan
from tests.support.cases import finfo

UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}
EXPONENTS = {"float64": 11, "float32": 8, "float16": 5, "bfloat16": 8}


@dataclass(frozen=True)
class Change:
    """A matrix before and after a fault, the plan, and the bit that was named."""

    before: np.ndarray
    after: np.ndarray
    plan: Plan
    bit: int

    @property
    def words(self) -> tuple[np.ndarray, np.ndarray]:
        kind = UNSIGNED[self.before.dtype.itemsize]
        before, after = (np.ascontiguousarray(x).view(kind) for x in (self.before, self.after))
        return before, after

    @property
    def flipped(self) -> np.ndarray:
        """Which bits differ."""
        before, after = self.words
        return before ^ after

    @property
    def where(self) -> np.ndarray:
        """Boolean: which elements differ."""
        return self.flipped != 0

    @property
    def width(self) -> int:
        return 8 * self.before.dtype.itemsize

    @property
    def mantissa(self) -> int:
        """Bits of the mantissa that are in memory."""
        return self.width - 1 - EXPONENTS[self.before.dtype.name]

    @property
    def delta(self) -> np.ndarray:
        return self.after.astype(np.float64) - self.before.astype(np.float64)

    @property
    def added(self) -> float:
        """The factor in root mean squares of the matrix."""
        return abs(self.plan.factor) * float(np.sqrt(np.mean(self.before.astype(np.float64) ** 2)))

    @property
    def largest(self) -> float:
        """Of any number that models which add have to round."""
        return float(abs(self.before.astype(np.float64)).max()) + self.added

    @property
    def times_factor(self) -> np.ndarray:
        """All of the matrix times the factor, rounded to its type; bit patterns."""
        with np.errstate(all="ignore"):
            wide = self.before.astype(np.float64) * self.plan.factor
            return np.ascontiguousarray(wide.astype(self.before.dtype)).view(UNSIGNED[self.before.dtype.itemsize])

    @property
    def count(self) -> int:
        """How many elements may be hit."""
        return min(self.plan.count, self.before.size)

    def allowed_bits(self) -> set[int]:
        """Of the class that the plan names."""
        first, top, exponent = self.mantissa, self.width - 1, EXPONENTS[self.before.dtype.name]
        half = first + (exponent + 1) // 2
        classes = {
            "any": range(self.width),
            "sign": [top],
            "mantissa": range(first),
            "exponent": range(first, top),
            "mantissa_low": range(first // 2),
            "mantissa_high": range(first // 2, first),
            "exponent_low": range(first, half),
            "exponent_high": range(half, top),
        }
        return set(classes[self.plan.bits]) if self.plan.bits in classes else {int(self.plan.bits)}

    def bits_flipped(self) -> list[int]:
        """The numbers of all bits that differ, one entry for each element and bit."""
        return [bit for word in self.flipped[self.where].tolist() for bit in range(self.width) if word >> bit & 1]


def _near(x: Any, y: Any, dtype: np.dtype[Any], size: float) -> None:
    """x is y but for a few roundings of numbers of a size."""
    np.testing.assert_allclose(x, y, rtol=0, atol=4 * float(finfo(dtype).eps) * size)


def bit_flip(c: Change) -> None:
    assert c.where.sum() == c.count
    bits = c.bits_flipped()
    assert len(bits) == c.count  # one in each
    assert set(bits) <= c.allowed_bits()
    assert c.bit == (bits[0] if c.plan.count == 1 else -1)


def multi_bit(c: Change) -> None:
    assert c.where.sum() == 1
    bits = c.bits_flipped()
    assert len(bits) == min(c.plan.count, len(c.allowed_bits()))
    assert set(bits) <= c.allowed_bits()
    assert c.bit == (bits[0] if len(bits) == 1 else -1)


def stuck_at_0(c: Change) -> None:
    _, after = c.words
    assert c.bit in c.allowed_bits()
    assert set(c.bits_flipped()) <= {c.bit}
    assert c.where.sum() <= c.count
    assert (after[c.where] >> np.uint64(c.bit).astype(after.dtype) & after.dtype.type(1) == 0).all()


def stuck_at_1(c: Change) -> None:
    before, _ = c.words
    assert c.bit in c.allowed_bits()
    assert set(c.bits_flipped()) <= {c.bit}
    assert c.where.sum() <= c.count
    assert (before[c.where] >> np.uint64(c.bit).astype(before.dtype) & before.dtype.type(1) == 0).all()


def random_value(c: Change) -> None:
    assert c.where.sum() <= c.count
    assert np.isfinite(c.after[c.where].astype(np.float64)).all()


def scaled(c: Change) -> None:
    assert c.where.sum() <= c.count
    assert (c.words[1] == c.times_factor)[c.where].all()
    if c.plan.factor == 2:  # which changes every normal number
        assert c.where.sum() == c.count


def offset(c: Change) -> None:
    assert c.where.sum() <= c.count
    _near(abs(c.delta[c.where]), c.added, c.before.dtype, c.largest)


def nan(c: Change) -> None:
    assert c.where.sum() == c.count
    assert np.isnan(c.after[c.where].astype(np.float64)).all()


def inf(c: Change) -> None:
    assert c.where.sum() == c.count
    assert np.isinf(c.after[c.where].astype(np.float64)).all()


def _carried(c: Change, sign: int) -> np.ndarray:
    before, after = (x.astype(object) for x in c.words)
    top = 1 << (c.width - 1)
    assert ((before & top) == (after & top)).all()
    found: np.ndarray = ((after & (top - 1)) - (before & (top - 1))) % top  # what leaves the exponent is lost
    assert set(found.ravel().tolist()) <= {0, (sign << c.bit) % top}
    return before & (top - 1)


def wrong_carry(c: Change) -> None:
    _carried(c, 1)
    assert c.where.sum() == c.count
    assert c.bit in (set(range(c.mantissa)) if c.plan.bits == "any" else c.allowed_bits())


def missing_carry(c: Change) -> None:
    digits = _carried(c, -1)
    assert (digits[c.where] >= 1 << c.bit).all()
    assert c.where.sum() == c.count or (digits < 1 << c.bit).any()


def production(c: Change) -> None:
    assert 0 < c.where.sum() <= 2 * c.count


def _lines(c: Change, axis: int) -> np.ndarray:
    """The rows (1) or columns (0) that hold a change."""
    return np.flatnonzero(c.where.any(axis=axis))


def row(c: Change) -> None:
    lines = _lines(c, 1)
    assert lines.size <= 1
    assert (c.words[1][lines] == c.times_factor[lines]).all()


def column(c: Change) -> None:
    row(Change(c.before.T, c.after.T, c.plan, c.bit))


def tile(c: Change) -> None:
    assert (c.words[1] == c.times_factor)[c.where].all()
    for axis, size in enumerate(c.before.shape):
        lines = _lines(c, 1 - axis)
        assert lines.size <= min(64, size)
        if lines.size:
            assert lines[-1] - lines[0] < 64
    if c.plan.factor == 2:
        assert c.where.sum() == np.prod(np.minimum(c.before.shape, 64))


def warp(c: Change) -> None:
    rows, columns = np.nonzero(c.where)
    assert (c.words[1] == c.times_factor)[c.where].all()
    assert np.unique(rows).size <= 1
    assert np.unique(columns % 32).size <= 1
    if c.plan.factor == 2:
        assert c.where.sum() == np.arange(columns[0] % 32, c.before.shape[1], 32).size


def swap_elements(c: Change) -> None:
    before, after = c.words
    rows, columns = np.nonzero(c.where)
    assert c.where.sum() in (0, 2)
    if rows.size:
        assert rows[0] == rows[1] or columns[0] == columns[1]
        assert before[c.where].tolist() == after[c.where].tolist()[::-1]
    if max(c.before.shape) > 1:
        assert rows.size


def swap_rows(c: Change) -> None:
    before, after = c.words
    lines = _lines(c, 1)
    assert lines.size == min(2, 2 * (c.before.shape[0] // 2))
    assert (after[lines] == before[lines[::-1]]).all()


def swap_columns(c: Change) -> None:
    swap_rows(Change(c.before.T, c.after.T, c.plan, c.bit))


def cycle_elements(c: Change) -> None:
    before, after = c.words
    rows, columns = np.nonzero(c.where)
    assert rows.size <= 3
    assert np.unique(rows).size <= 1 or np.unique(columns).size <= 1
    if max(c.before.shape) < 3:  # then two change places
        swap_elements(c)
        return
    moved = before[c.where].tolist(), after[c.where].tolist()
    assert moved[1] in (moved[0][1:] + moved[0][:1], moved[0][-1:] + moved[0][:-1])
    assert min(c.before.shape) < 3 or rows.size == 3


def cycle_rows(c: Change) -> None:
    before, after = c.words
    lines = _lines(c, 1)
    assert lines.size == (0 if c.before.shape[0] < 2 else min(3, c.before.shape[0]))
    assert any((after[lines] == np.roll(before[lines], step, 0)).all() for step in (1, -1))


def cycle_columns(c: Change) -> None:
    cycle_rows(Change(c.before.T, c.after.T, c.plan, c.bit))


def opposite(c: Change) -> None:
    rows, columns = np.nonzero(c.where)
    assert rows.size <= 2
    assert np.unique(rows).size <= 1 or np.unique(columns).size <= 1
    _near(c.delta.sum(), 0, c.before.dtype, c.largest)
    if max(c.before.shape) > 1:
        _near(abs(c.delta).max(), c.added, c.before.dtype, c.largest)


def rectangle(c: Change) -> None:
    assert c.where.sum() <= 4
    for axis in (0, 1):
        assert _lines(c, axis).size <= 2
        _near(c.delta.sum(axis), 0, c.before.dtype, c.largest)
    if min(c.before.shape) > 1 and c.plan.factor == 2:
        assert c.where.sum() == 4


JUDGES: dict[str, Callable[[Change], None]] = {
    judge.__name__: judge
    for judge in (
        *(bit_flip, multi_bit, stuck_at_0, stuck_at_1, random_value, scaled, offset, nan, inf),
        *(wrong_carry, missing_carry, production, row, column, tile, warp),
        *(swap_elements, swap_rows, swap_columns, opposite, rectangle),
        *(cycle_elements, cycle_rows, cycle_columns),
    )
}
