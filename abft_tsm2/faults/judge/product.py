"""The judge of products with planted faults, which knows the right product and believes no report.

Three sizes matter for a change of C, and all are worked out here from the operands alone:

rounding
    |C - A B| is at most gamma_k |A||B| for any order of summation (N. J. Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, section 3.5). No product comes near it: what counts as rounding is sqrt(k) u |A||B| (N. J. Higham,
    T. Mary, SIAM J. Sci. Comput. 41, 2019, A2815), or twice the largest error of the same product without a fault
    where that is more, and the rounding of what is stored.
the promise
    A change is found if it moves the checksum of a line, ``|sum_j v_j delta_ij|``, by more than the report of the
    product without a fault says (`LineLimits.allowed`, docs/report.rst), and in any case by more than so many
    yardsticks of the judge's own (`abft_tsm2.faults.judge.yardstick`). The weights v are those of `encode`, or of the
    kernels on a GPU; that they are what they should be is tested apart (`hiding.require_weights`).
what a line hides
    Changes of several elements that would be found one by one, and cancel in the sum.

All of it stays on the device of the arrays, for a whole batch of products at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS, bit_pattern, dtype_name, from_host, to_host
from abft_tsm2.checksum.encoded import encode
from abft_tsm2.faults.judge.hiding import chance, require_weights
from abft_tsm2.faults.judge.oracle import (
    Reference,
    ReferenceArithmetic,
    arithmetic,
    evened,
    narrowed,
    reference,
    require,
    widened,
)
from abft_tsm2.faults.judge.yardstick import LEAST_STORED, PARTS, REACH, noise_of_product
from abft_tsm2.report import Check

Array = Any
MARGIN = 2.0  # times the largest error without a fault
BOUNDS = 32  # lines whose bounds a GPU has in its records, evenly spread
APART = 16.0  # lines whose yardsticks differ by more are judged line by line


@dataclass(frozen=True)
class Assessment:
    """Of a batch of b products, on the host.

    Attributes
    ----------
    wrong : (b,) bool
        Whether what was returned holds more than rounding.
    unexplained : (b,) bool
        Whether more of it is wrong than elements that were hit, on lines that it moves by no more than the promise.
    hidden : (b,) bool
        Whether elements are wrong that would have been found alone.
    above : (b,) bool
        Whether the fault moved the checksum of a line by more than is promised to be found.
    effect : (b,) bool
        Whether the fault changed the product by more than rounding.
    size, relative : (b,) float
        By how much it moved a line, in units of the promise; its largest change over the root mean square of C.
    places : list of (2, c) int arrays
        Rows and columns of the elements that were changed by more than is promised to be found, each by itself; of
        several, by more than any rounding as well, on lines that show it from every side that is checked.
    touched : list of (2, c) int arrays
        Those of all elements that were changed at all.
    chance : (b,) float
        The probability that random weights hide changes that would have been found one by one; see `faults.hiding`.
    reasons : list of str
        Why what is hidden was hidden; empty where nothing is.
    """

    wrong: Any
    unexplained: Any
    hidden: Any
    above: Any
    effect: Any
    size: Any
    relative: Any
    places: list[Any]
    touched: list[Any]
    chance: Any
    reasons: list[str]


class Promise:
    """What one side of the check promises for a product: how far each line must move to be found.

    Parameters
    ----------
    A, B : arrays
    clean : (m, n) array
        The product without a fault, in the type that is checked.
    errors : (m, n) array
        Its rounding errors.
    check : Check
        What its report says of this side.
    xp : module
    how : ReferenceArithmetic
        Of the product as it is checked.

    Attributes
    ----------
    unit : float
        The power of two that weights, and the sums of lines with them, are divided by.
    reach : float
        The largest change that the report does not promise to find, of all lines, in the yardsticks of these.
    sharpness : float
        The median bound over the median yardstick; NaN where there is none.

    Raises
    ------
    ArithmeticError
        If the weights are not as documented, or bounds are less than rounding may do.
    """

    def __init__(
        self, A: Array, B: Array, clean: Array, errors: Array, check: Check, xp: Any, how: ReferenceArithmetic
    ) -> None:
        self.side, self._xp = check.side, xp
        self.axis = 1 if self.side == "rows" else 0
        left, right = evened(A, B, xp)
        if self.side == "columns":
            left, right = right.T, left.T
        self.v = weights_of(B if self.side == "rows" else A, self.side, xp)
        if check.limits is not None:  # the check may have had others, by scales of its own
            self.v = xp.sign(self.v) * xp.asarray(check.limits.moduli)
        self.unit = 2.0 ** math.frexp(float(abs(self.v).max()))[1] if self.v.size else 1.0
        self.v = self.v / self.unit  # so that squares stay in the range
        self._magnitudes = abs(to_host(self.v))
        self._powers = require_weights(self._magnitudes)
        with np.errstate(all="ignore"):
            products, stored = self._norm(left, self._norm(right, self.v)), self._norm(self._across(clean), self.v)
            noise, least = noise_of_product(how, A.shape[1], self._across(errors), self._powers, products, stored, xp)
            self._limit, self._stored = REACH[how.sums] * noise, stored
            self._largest = math.sqrt(A.shape[1]) * products  # what is stored without a fault
            self._rounded = REACH[how.sums] * LEAST_STORED * FLOATS[how.out].unit_roundoff if how.rounds else 0.0
            self.reach, stated = math.nan, None
            if check.limits is not None:
                stated = xp.asarray(check.limits.allowed) / self.unit
                self.reach = float((stated / noise).max()) if noise.size else math.nan
                self._limit = xp.minimum(self._limit, stated)
            self.sharpness = self._median(check.bound / self.unit, None, noise)
            too_small = self._median(check.bound / self.unit, stated, least)
        if too_small < PARTS / 2:
            raise ArithmeticError(
                f"the bounds of {self.side} are {too_small:.3g} times the least that rounding may be expected to do, "
                f"and have to be {PARTS:.3g} times that: clean products may exceed them"
            )

    def limit(self, C: Array) -> Array:
        """What the checksum of each line of a batch of products has to be moved by to be found, (b, lines).

        Where elements are rounded last, several large ones that cancel in a sum round by as much as a small change.
        """
        if not self._rounded:
            return self._xp.broadcast_to(self._limit, (len(C), self._limit.size))
        stored = self._xp.minimum(self._norm(self._across(C), self.v), self._largest)
        return self._limit + self._rounded * self._xp.maximum(stored - self._stored, 0.0)

    def moved(self, change: Array) -> Array:
        """By how much a change of the products moves each line, (b, lines)."""
        return abs(self._across(change) @ self.v)

    def over_lines(self, x: Array) -> Array:
        """(b, lines) as (b, m, n), to be compared with elements."""
        return x[:, :, None] if self.axis else x[:, None, :]

    def weighed(self, change: Array) -> Array:
        """|v_j delta_ij| of each element."""
        return abs(change) * (abs(self.v)[None, :] if self.axis else abs(self.v)[:, None])

    def chance(self, delta: Any, places: Any, limit: Any) -> float | None:
        """The probability that random weights hide changes of one product, on the host, of which `places` are the rows
        and columns, where `limit` is that of each line; None where none of them would have been found alone."""
        lines, along = places if self.axis else places[::-1]
        order = np.argsort(lines, kind="stable")
        lines, along, delta = lines[order], along[order], delta[order]
        weighed = abs(delta) * self._magnitudes[along]
        return chance(lines, along, delta * self._powers[along], weighed, limit[lines], self._powers.size)

    def _median(self, bound: float, stated: Array | None, yardstick: Array) -> float:
        """The median bound in those of a yardstick of each line. Where these are far apart: line by line, or, of a
        report that does not state bounds of lines, of those lines that a GPU takes the median of."""
        if not yardstick.size:
            return math.nan
        if float(yardstick.max()) > APART * float(yardstick.min()):
            if stated is not None:
                return float(self._xp.median(stated / yardstick))
            if self._xp is not np:
                some = yardstick[(2 * self._xp.arange(BOUNDS) + 1) * yardstick.size // (2 * BOUNDS)]
                return float(np.float64(bound) / float(self._xp.sort(some)[BOUNDS // 2 - 1]))
        return float(np.float64(bound) / float(self._xp.median(yardstick)))

    def _across(self, x: Array) -> Array:
        return x if self.axis else x.swapaxes(-1, -2)

    @staticmethod
    def _norm(x: Array, v: Array) -> Array:
        return ((x * x) @ (v * v)) ** 0.5


def weights_of(X: Array, side: str, xp: Any) -> Array:
    """What a check of that side weighs the elements of a line by, in float64."""
    return xp.asarray(getattr(encode(X, side=side).weights, side)[:, 0])


class Judge:
    """Judges products of two matrices.

    Parameters
    ----------
    A : (m, k) array
    B : (k, n) array
        As they were before any fault.
    clean, returned : (m, n) arrays
        The product without a fault, as it is checked and as it is returned; the same, where it is not rounded last.
    xp : module
        NumPy or CuPy.
    tf32 : bool
        Whether float32 operands are rounded to 11 bits.
    expected : Reference, optional
        Of A and B, where it is known already.

    Raises
    ------
    ArithmeticError
        If the product without a fault is wrong.
    """

    def __init__(
        self,
        A: Array,
        B: Array,
        clean: Array,
        returned: Array,
        xp: Any,
        *,
        tf32: bool = False,
        expected: Reference | None = None,
    ) -> None:
        self.A, self.B, self.clean, self._xp = A, B, clean, xp
        gpu, dtype, out = xp is not np, dtype_name(A.dtype), dtype_name(clean.dtype)
        how = arithmetic(dtype, tf32, truncating=gpu)
        if expected is None:
            expected = reference(*evened(A, B, xp), xp, sums=how.sums)
            require(expected, A, B, xp, sums=how.sums)
        self._expected = expected
        checked = how if out == how.out else ReferenceArithmetic(how.sums, how.sums, truncating=how.truncating)
        self._checked = checked
        self._level, self._allowed = self._rounding(clean, checked)
        self._level_returned = self._level if returned is clean else self._rounding(returned, how)[0]
        self._wide = widened(clean, xp)
        self._wide_returned = self._wide if returned is clean else widened(returned, xp)
        self.rms = float((self._wide * self._wide).mean() ** 0.5)

    @property
    def expected(self) -> Reference:
        """The product in more precision, which is the same for all judges of these operands."""
        return self._expected

    def promise(self, checks: Sequence[Check]) -> list[Promise]:
        """What is promised where the report of the product without a fault has these checks."""
        wide = widened(self.clean, self._xp)
        errors = (wide - self._expected.high) - self._expected.low
        return [Promise(self.A, self.B, wide, errors, check, self._xp, self._checked) for check in checks]

    def _rounding(self, C: Array, how: ReferenceArithmetic) -> tuple[Array, Array]:
        """How far each element may be off by rounding, see the top of the module; and by any rounding at all."""
        k = self.A.shape[1]
        # Two roundings more for what is computed again, and those of float64, in which that is done.
        allowed = how.bound(self._expected, k + 2)
        allowed = allowed + (k + 2) * FLOATS["float64"].unit_roundoff * self._expected.magnitude
        share = float((self._off(widened(C, self._xp), self._expected) / allowed).max())
        if not share <= 1:
            raise ArithmeticError(f"the product without a fault is off by {share:.3g} of what rounding explains")
        usual = math.sqrt(k) * FLOATS[how.sums].unit_roundoff * self._expected.magnitude
        if how.rounds:
            usual = usual + FLOATS[how.out].unit_roundoff * abs(self._expected.high)
        return self._xp.minimum(allowed, self._xp.maximum(usual, MARGIN * share * allowed)), allowed

    @staticmethod
    def _off(C: Array, expected: Reference) -> Array:
        return abs((C - expected.high) - expected.low)

    def __call__(self, seen: Array, returned: Array, promises: Sequence[Promise]) -> Assessment:
        """Assess a batch: `seen` (b, m, n) before the check, `returned` what came back."""
        xp, e = self._xp, self._expected
        with np.errstate(all="ignore"):
            s, r = widened(seen, xp), widened(returned, xp)
            wrong = ~(self._off(r, e) <= self._level_returned)
            touched = bit_pattern(seen) != bit_pattern(self.clean)
            effect = ~(self._off(s, e) <= self._level) & touched
            change = xp.where(touched, s - self._wide, 0.0)
            rest = xp.where(touched, r - self._wide_returned, 0.0)
            if self._wide_returned is not self._wide:  # of what was only rounded, the change that the check has seen
                rest = xp.where(touched & (bit_pattern(returned) == narrowed(s, returned.dtype)), change, rest)
            above, alone, seen_rest, seen_alone = (xp.zeros(touched.shape, bool) for _ in range(4))
            everywhere = xp.ones(touched.shape, bool)
            size = xp.zeros(touched.shape[0])
            seen_limits, hidden_lines = [], []
            for promise in promises:
                moved, limit = promise.moved(change), promise.limit(s)
                seen_limits.append(limit)
                shown = promise.over_lines(~((moved <= limit) & xp.isfinite(limit)))
                above, everywhere = above | shown, everywhere & shown
                limits = promise.over_lines(limit)
                alone |= ~((promise.weighed(change) <= limits) & xp.isfinite(limits))
                ratio = moved / limit
                known = xp.isfinite(ratio) & xp.isfinite(limit)  # a number over an infinity is no size
                size = xp.maximum(size, xp.where(known, ratio, xp.inf).max(axis=1))
                moved, limit = promise.moved(rest), promise.limit(r)
                hidden_lines.append((moved, limit))
                seen_rest |= promise.over_lines(~((moved <= limit) & xp.isfinite(limit)))
                seen_alone |= ~(promise.weighed(rest) <= promise.over_lines(limit))
            staying = wrong & touched & ~seen_rest
            masks = (wrong, wrong & ~staying, staying & seen_alone, above & touched, effect)
            flags = to_host(xp.stack([mask.any(axis=(1, 2)) for mask in masks]))
            largest = abs(change).max(axis=(1, 2)) / (self.rms or 1.0)
            sizes = to_host(xp.stack([size, xp.where(xp.isfinite(largest), largest, xp.inf)]))
            count = len(seen)
            # Of several elements evidence convicts those that are further off than any rounding, and lines are named
            # from one side: only what each side shows has to be named.
            sure = ~(abs(change) <= self._allowed) & everywhere | (touched.sum(axis=(1, 2), keepdims=True) == 1)
            places, all_places = _places(effect & above & alone & sure, count, xp), _places(touched, count, xp)
            chances = self._chances(change, all_places, promises, seen_limits)
            hides = staying & seen_alone
            reasons = [
                self._reason(hides[slot], rest[slot], promises, [(m[slot], at[slot]) for m, at in hidden_lines])
                if flags[2][slot]
                else ""
                for slot in range(count)
            ]
        return Assessment(
            flags[0], flags[1], flags[2], flags[3], flags[4], sizes[0], sizes[1], places, all_places, chances, reasons
        )

    def _chances(self, change: Array, touched: Sequence[Any], promises: Sequence[Promise], limits: Any) -> Any:
        """The probability that each of a batch of changes is hidden, on all sides that are checked."""
        found = np.zeros(len(touched))
        several = [slot for slot, places in enumerate(touched) if places.shape[1] > 1 and promises]
        if not several:
            return found
        on_host = [to_host(limit) for limit in limits]
        for slot in several:
            rows, columns = touched[slot]
            i, j = (from_host(x, change) for x in (rows, columns))
            delta = to_host(change[slot][i, j])
            sides = [p.chance(delta, touched[slot], at[slot]) for p, at in zip(promises, on_host, strict=True)]
            if any(side is not None for side in sides):
                found[slot] = math.prod(1.0 if side is None else side for side in sides)
        return found

    def _reason(self, hides: Array, rest: Array, promises: Sequence[Promise], lines: Any) -> str:
        """What is hidden and why, of one product: the line in which an element alone would have shown most."""
        texts = []
        for promise, (moved, limit) in zip(promises, lines, strict=True):
            alone = self._xp.where(hides, promise.weighed(rest), 0.0).max(axis=promise.axis)
            line = int((alone / limit).argmax())
            sums = [promise.unit * float(x[line]) for x in (moved, limit, alone)]
            texts.append(
                f"{promise.side.removesuffix('s')} {line}: |sum v d| = {sums[0]:.3g} is within the bound "
                f"{sums[1]:.3g}, one element alone moves {sums[2]:.3g}"
            )
        return "; ".join(texts)


def _places(mask: Array, count: int, xp: Any) -> list[Any]:
    """Rows and columns of the true elements of each matrix of a batch."""
    found = to_host(xp.stack([one.astype(np.int32) for one in xp.nonzero(mask)]))
    ends = np.searchsorted(found[0], np.arange(count + 1))
    return [found[1:, ends[i] : ends[i + 1]] for i in range(count)]
