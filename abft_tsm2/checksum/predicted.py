"""Predict the checksums of C from the operands, and tell later whether the operands are still what was encoded.

A checksum is a fingerprint of what it was computed from: taken again, on NumPy, it has the same bits, or the operand
has changed, or the checksum itself was hit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, is_numpy, namespace, same_bits, to_host
from abft_tsm2.checksum.bounds import checksum_noise_factor
from abft_tsm2.checksum.encode import OperandChecksum, carried, kept, part_of
from abft_tsm2.checksum.sides import Floats, Mask, Side
from abft_tsm2.core.row_sums import in_single, summed_squares, weighted_squares, weighted_sums
from abft_tsm2.report import Fault

_FAINT = 2.0**-900  # squares below that, or above its inverse, may have lost digits
_NOTHING_SHOWN: Mapping[str, bool] = {}


def _host(x: Array | None) -> Floats:
    return np.zeros(1) if x is None else to_host(x).astype(np.float64)


class PredictedSums(NamedTuple):
    """The predicted sums of C, computed before the product.

    Attributes
    ----------
    carried : OperandChecksum
        V and ``s = R V``.
    t : (m, r) array of float64
        ``L s``.
    products : (m, r) array
        A part of P2^2, ``(L o L)(:, :h) (R o R)(:h, :) (V o V)``.
    t0, added : (m, r) arrays or None
        ``C0 V`` and ``||C0 o v||^2``.
    guard : tuple of arrays
        Copies of t, products, t0 and added, taken when they were computed.
    """

    carried: OperandChecksum
    t: Array
    products: Array
    t0: Array | None
    added: Array | None
    guard: tuple[Array | None, ...]

    def intact(self) -> bool:
        """Whether what a verdict is made of, weights included, has the bits it was computed with: O(m + n)."""
        now = (self.t, self.products, self.t0, self.added, self.carried.weights)
        return all(map(same_bits, now, (*self.guard, self.carried.guard[0])))


def predict(lines: Side, right: OperandChecksum) -> PredictedSums:
    """Predict the sums of C from the operand checksum: one read of L (and of C0)."""
    L = in_single(lines.L, lines.partial)
    products = summed_squares(L, right.squares)
    t = weighted_sums(L, right.sums, lines.partial)
    t0 = added = None
    if lines.C0 is not None:
        C0, V = in_single(lines.C0, lines.partial), right.weights
        t0, added = weighted_sums(C0, V, lines.partial), summed_squares(C0, V * V)
    return PredictedSums(right, t, products, t0, added, kept(t, products, t0, added))


def recompute_checksum(lines: Side, right: OperandChecksum) -> Array:
    """Recompute the checksum of C, ``u = C V`` (m, r): one read of C."""
    return weighted_sums(lines.C, right.weights, lines.partial)


def residual_of(lines: Side, expected: PredictedSums, u: Array) -> Floats:
    """``u - alpha t - beta t0`` (m, r), on the host."""
    r = u - expected.t if lines.alpha == 1.0 else u - lines.alpha * expected.t
    if expected.t0 is not None:
        r = r - lines.beta * expected.t0
    return r if isinstance(r, np.ndarray) else to_host(r)


def recompute(lines: Side, expected: PredictedSums) -> PredictedSums:
    """Recompute the checksums of the operands, with the same weights and in the same order of summation."""
    old = expected.carried
    from_old = predict(lines, old)  # t from the s it was made of: a difference in s is told from one in L
    return from_old._replace(carried=carried(in_single(lines.R, old.partial), old.weights, partial=old.partial))


def operands_hold(lines: Side, expected: PredictedSums) -> bool:
    """Whether the operands give the checksums that they gave when they were encoded: two reads of R and L."""
    return have_same_bits(lines, expected) or not changed_operands(lines, expected, recompute(lines, expected))


def is_as_before(lines: Side, expected: PredictedSums, u: Array) -> bool:
    """Whether all checksums, those of C as well, have the bits that they have when recomputed: then no operand changed,
    and no checksum was hit that is the same as its copies."""
    return have_same_bits(lines, expected) and same_bits(u, recompute_checksum(lines, expected.carried))


def have_same_bits(lines: Side, sums: PredictedSums) -> bool:
    """Whether the checksums of operands have the bits that they have when recomputed."""
    c = sums.carried
    return (
        _is_same(c.sums, lines.R, c.weights, c.partial)
        and _is_same(sums.t, lines.L, c.sums, lines.partial)
        and _is_same(sums.t0, lines.C0, c.weights, lines.partial)
    )


def _is_same(sums: Array | None, X: Array | None, W: Array, partial: bool) -> bool:
    """Whether sums have the bits that ``X W`` has now."""
    return X is None or same_bits(sums, weighted_sums(in_single(X, partial), W, partial))


def differing(
    lines: Side, old: PredictedSums, new: PredictedSums, u: tuple[Array | None, Array | None] = (None, None)
) -> Fault | None:
    """Name the first of the checksums s, t, t0, u that differs between two evaluations, of which one is the older."""
    apart = _Apart(lines, new, old.carried.lasting)
    for name, then, now in (
        ("s", old.carried.sums, new.carried.sums),
        ("t", old.t, new.t),
        ("t0", old.t0, new.t0),
        ("u", *u),
    ):
        if then is None or now is None:
            continue
        places, off = apart(name, then, now)
        if places.any():
            at = tuple(int(i) for i in np.flatnonzero(places.any(axis=1))[:1000])
            largest = float(off[places].max())
            return Fault(name, "checksum", at, (), int(np.count_nonzero(places)), largest, "computed again")
    return None


def changed_operands(
    lines: Side, expected: PredictedSums, now: PredictedSums, shown: Mapping[str, bool] = _NOTHING_SHOWN
) -> list[str]:
    """Name the operands ("R", "L", "C0") that are not what was encoded; `now`: the checksums, recomputed.

    A checksum is a fingerprint of what it was computed from. Where it differs from what the operand gives now, and so
    does its copy, the operand changed; where one of the two agrees, the other was hit. Of s and V, from which others
    follow, the copies are tried as well where they have not the same bits. Of an operand that has integer sums these
    decide instead: `shown` says whether it has the bits that were encoded.
    """
    bases = [now]
    c = expected.carried
    if not c.intact():
        weights, sums, squares = c.guard
        copied = expected._replace(carried=c._replace(weights=weights, sums=sums, squares=squares))
        bases.append(recompute(lines, copied))
    measures = [(base, _Apart(lines, base, c.lasting)) for base in bases]
    t, _, t0, _ = expected.guard
    made = (("s", "R", c.sums, c.guard[1]), ("t", "L", expected.t, t), ("t0", "C0", expected.t0, t0))
    found = [operand for operand in ("R", "L") if not shown.get(operand, True)]
    for name, operand, one, other in made:
        if one is None or other is None or operand in shown:
            continue
        agree = False
        for base, apart in measures:
            sums = {"s": base.carried.sums, "t": base.t, "t0": base.t0}[name]
            agree |= not (apart(name, one, sums)[0] & apart(name, other, sums)[0]).any()
        if not agree:
            found.append(operand)
    return found


class _Apart:
    """Where checksums of two evaluations are not the same, and by how much.

    On NumPy the two are the same sums in the same order and agree to the last bit; elsewhere, and where s was
    carried from a matrix that may lie in another order now, to within their own rounding.
    """

    def __init__(self, lines: Side, new: PredictedSums, lasting: bool) -> None:
        self._lines, self._new, self._lasting = lines, new, lasting
        self._V2 = new.carried.weights * new.carried.weights
        self._factor = checksum_noise_factor(lines.terms, self._V2.shape[0], partial=lines.partial)

    @functools.cached_property
    def _norm_of_s(self) -> Floats:
        """At least ``||R_i o v||``; sums of moduli where squares leave the range."""
        squares = _host(weighted_squares(self._lines.R, self._V2, wide=True))
        if squares.size and _FAINT < squares.min() <= squares.max() < 1 / _FAINT:
            return np.asarray(np.sqrt(squares))
        R, V = self._lines.R, self._new.carried.weights
        xp = namespace(R)
        return to_host(weighted_sums(xp.abs(R), xp.abs(V)))

    @functools.cached_property
    def _norm(self) -> Floats:
        lines = self._lines
        products = _host(self._new.products) * lines.terms / max(1, part_of(lines.terms))
        return np.asarray(np.sqrt(np.maximum(products, _host(weighted_squares(lines.C, self._V2)))))

    def __call__(self, name: str, then: Array, now: Array) -> tuple[Mask, Floats]:
        before, after = to_host(then), to_host(now)
        with np.errstate(all="ignore"):
            off = np.abs(before - after)
            same = before == after
            if not is_numpy(self._lines.C) or (self._lasting and name == "s"):
                size = self._norm_of_s if name == "s" else self._norm
                noise = self._factor * (np.where(np.isfinite(size), size, 0.0) + np.abs(after))
                same |= (off <= noise) & np.isfinite(noise)
        same |= ~np.isfinite(before) & ~np.isfinite(after)
        return np.asarray(~same), off
