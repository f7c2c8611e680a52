"""Verify the lines of C: compare their residuals with what rounding explains.

`predict`, `recompute_checksum` and `judge` verify every product: each matrix is read once, and the 2-norms behind the
bound are first taken over a small part of their terms. Such a part never exceeds the whole, so a residual within the
bound it gives is within the true bound (so pass most products, and each of a stack); the few lines that are not are
compared with the whole. `abft_tsm2.checksum.rescaled` verifies what remains.

Verdicts are written ``ok = (residual <= bound) & isfinite(bound)``: NaN is a fault, and so is a bound that overflowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, to_host
from abft_tsm2.checksum.bounds import (
    BoundFactors,
    bound_factors,
    largest_norm,
    lost_in_checksum,
    statistical_bound,
)
from abft_tsm2.checksum.encode import middle, part_of, telling_from
from abft_tsm2.checksum.line_norms import UnexplainedLines, estimate_of, finite
from abft_tsm2.checksum.predicted import PredictedSums, operands_hold, predict, residual_of
from abft_tsm2.checksum.sides import Floats, Integers, Mask, Side
from abft_tsm2.core.row_sums import (
    in_single,
    rows_per_block,
    small,
    summed_squares,
    take_rows,
    weighted_squares,
    weighted_sums,
)
from abft_tsm2.report import Check

_FEW = 4  # lines whose true bound is computed to report how close a clean product came


@dataclass(frozen=True, eq=False)
class SideVerdict:
    """The verdict on all lines; host arrays.

    Attributes
    ----------
    ok : (m,) boolean array
        Which lines are within the bound.
    residual : (m,) array
        The largest residual of a line over its r checksums, in units of its bound (inf where not finite).
    """

    ok: Mask
    residual: Floats
    check: Check


def _predicted_of(lines: Side, expected: PredictedSums) -> Floats:
    """``alpha t + beta t0`` (m, r), on the host."""
    p = to_host(expected.t) if lines.alpha == 1.0 else lines.alpha * to_host(expected.t)
    return p if expected.t0 is None else p + lines.beta * to_host(expected.t0)


def _host(x: Array | None) -> Floats:
    return np.zeros(1) if x is None else to_host(x).astype(np.float64)


class _LineResiduals(NamedTuple):
    """Residuals of a product, or of each of a stack, (...), and what is known of their bounds before C has been read,
    but for its checksums; host arrays.

    Attributes
    ----------
    fine : (..., m, 1) boolean array
        Which are within the least that their bounds can be.
    ratio : (..., m) array
        In units of that.
    tau : (..., m, 1) array
        That.
    size, products, added : (..., m, 1) arrays
        ``|u - t|``, and as in `statistical_bound`.
    underflow : (..., 1, 1) array or float
    """

    fine: Mask
    ratio: Floats
    tau: Floats
    size: Floats
    products: Floats
    added: Floats | None
    underflow: Any


def _residuals(lines: Side, expected: PredictedSums, u: Array) -> _LineResiduals | None:
    """None where there is nothing to compare, or more than one checksum of a line."""
    V, products2, a = expected.carried.weights, expected.products, lines.arithmetic
    if 0 in lines.C.shape or lines.R.shape[-2] == 0 or V.shape[-1] != 1:
        return None
    if not isinstance(V, np.ndarray):
        V, products2 = to_host(V), to_host(products2)
    size = np.abs(residual_of(lines, expected, u))
    products, added = np.sqrt(products2 if products2.dtype == np.float64 else products2.astype(np.float64)), None
    if lines.alpha != 1.0:
        products *= abs(lines.alpha)
    if expected.added is not None:
        added = abs(lines.beta) * np.sqrt(to_host(expected.added), dtype=np.float64)
    weights = np.abs(V)
    lost = a.underflow(lines.terms, lines.alpha)
    underflow: Any
    if V.ndim == 2:
        underflow = max(lost * float(np.add.reduce(weights, axis=None)), lost_in_checksum())
    else:
        underflow = np.maximum(lost * np.add.reduce(weights, axis=-2, keepdims=True), lost_in_checksum())
    n: int = V.shape[-2]
    smallest = np.minimum.reduce(weights, axis=(-2, -1))
    least = telling_from(lines.R, expected.carried.sums, smallest, lines.terms + n)
    tau = statistical_bound(np, a, lines.terms, n, products=products, stored=None, added=added, underflow=underflow)
    fine = (size <= tau) & np.isfinite(tau)
    if least and not (tau >= least).all():
        return None
    return _LineResiduals(fine, (size / tau)[..., 0], tau, size, products, added, underflow)


def _passed(lines: Side, expected: PredictedSums, u: Array, told: bool) -> SideVerdict | None:
    """The verdict by the least that bounds can be, and by what is known of lines that exceed it when they have been
    read once more; None where one of those that came closest, or what was encoded, needs another."""
    a, C, (m, n) = lines.arithmetic, lines.C, lines.C.shape
    first = _residuals(lines, expected, u)
    if first is None:
        return None
    V, sizes = expected.carried.weights, (first.size, first.products, first.added)
    more, fine = estimate_of(lines.R.shape[0]), first.fine[:, 0]
    if np.count_nonzero(fine) < m:
        tau, added = first.tau[:, 0].copy(), None if first.added is None else first.added[:, 0]
        known, operands = (first.size[:, 0], first.products[:, 0], added), (C, lines.L, lines.R)
        factors = bound_factors(a, lines.terms, n, lines.alpha)
        how = (
            factors,
            tau,
            fine,
            known,
            _predicted_of(lines, expected)[:, 0],
            first.underflow,
            lines.alpha,
            4 * a.u_added,
        )
        unexplained = UnexplainedLines(operands, V * V, *how)
        unexplained.explain(whole=told)
        left = unexplained.at
        if unexplained.grown.size and not operands_hold(lines, expected):
            left = np.concatenate([left, unexplained.grown])
        return explained_verdict(lines.side, first.size[:, 0], tau, fine, left)
    factors = bound_factors(a, lines.terms, n, lines.alpha)
    check = clean_check(lines.side, C, V * V, first.ratio, sizes, first.underflow, factors, more)
    return None if check is None else SideVerdict(first.fine[:, 0], first.ratio, check)


def explained_verdict(side: str, residual: Floats, tau: Floats, fine: Mask, left: Integers) -> SideVerdict:
    """The verdict on residuals of which these lines are `left` beyond bounds tau. Lines that are not `fine`, within the
    least that their bounds can be, are counted among those that came closest."""
    ratio, ok, counted = residual / tau, np.ones(residual.size, np.bool_), ~fine
    if ratio.size > _FEW:
        counted[np.where(fine, -ratio, 0.0).argpartition(_FEW)[:_FEW]] = True
    else:
        counted[:] = True
    if left.size:
        ratio[left] = worst_ratio(residual[left, None], tau[left, None])
        ok[left] = counted[left] = False
    places = counted.nonzero()[0]
    if not places.size:
        bounds = tau[np.isfinite(tau)]
        bound = float(middle(bounds)) if bounds.size else 0.0
        return SideVerdict(ok, ratio, _check_of(side, ratio.size, bound, 0.0, -1))
    line = places.item(int(ratio[places].argmax()))
    return SideVerdict(ok, ratio, _check_of(side, ratio.size, float(middle(tau[places])), ratio.item(line), line))


def _median(x: list[float]) -> float:
    x.sort()
    half = len(x) // 2
    return x[half] if len(x) % 2 else (x[half - 1] + x[half]) / 2


def clean_check(
    side: str,
    C: Array,
    V2: Array,
    ratio: Floats,
    sizes: tuple[Floats, Floats, Floats | None],
    underflow: float,
    factors: BoundFactors,
    more: float,
) -> Check | None:
    """The check of a product all of whose lines are within the least that their bounds can be, from the few lines that
    came closest; None where one of these is not within what is known when they have been read once more.

    Parameters
    ----------
    V2 : (n, 1) array
        The squares of the weights.
    ratio : (m,) array
        Of residuals and the least bounds.
    sizes : three arrays of m, one of them or None
        Residuals, and products and added as in `statistical_bound`.
    underflow, factors, more
        Of `BoundFactors.of_line`.
    """
    (residuals, products, added), m = sizes, ratio.size
    if m > _FEW:
        near = (-ratio).argpartition(_FEW)[:_FEW]
        near.sort()
        C, places = take_rows(C, near), near.tolist()
    else:
        places = list(range(m))
    if isinstance(C, np.ndarray) and small(C):
        C = C.astype(np.float64, copy=False)
        stored2 = (C * C).dot(V2)
    else:
        stored2 = to_host(summed_squares(C, V2, wide=True))
    stored = np.sqrt(stored2).ravel().tolist()
    bounds, closest, line = [], -1.0, -1
    for i, norm in zip(places, stored, strict=True):
        residual = residuals.item(i)
        tau, largest = factors.of_line(products.item(i), norm, 0.0 if added is None else added.item(i), underflow, more)
        if not ((residual <= tau) & math.isfinite(tau) & (norm <= largest)):
            return None
        bounds.append(tau)
        if residual / tau > closest:
            closest, line = residual / tau, i
    bound = _median(bounds)
    return _check_of(side, m, bound, closest, line)


class FirstVerdict(NamedTuple):
    """What `first_verdict` has found of a product, or of each of a stack, (...); host arrays.

    Attributes
    ----------
    ok : (...) boolean array
        Whether all lines are within bounds that take no further read of the operands; of other products the rest says
        nothing.
    ratio : (..., m) array
        As in `SideVerdict`, or more.
    bound, closest, closest_line : (...) arrays
        As in `Check`.
    residual : (..., m, 1) array
    """

    ok: Any
    ratio: Floats
    bound: Any
    closest: Any
    closest_line: Any
    residual: Floats


def first_verdict(lines: Side, expected: PredictedSums, u: Array) -> FirstVerdict | None:
    """What `judge` finds of each of a stack of products without reading operands again; None where it has to be asked.

    Lines that are not within the least that their bounds can be are counted among those that came closest.
    """
    a, terms, (m, n), k = lines.arithmetic, lines.terms, lines.C.shape[-2:], lines.R.shape[-2]
    first = _residuals(lines, expected, u)
    if first is None:
        return None
    fine, ratio, _, residual, products, added, underflow = first
    V, every = expected.carried.weights, bool(fine.all())
    few = None  # all lines
    if m > _FEW:
        few = np.argpartition(-ratio if every else np.where(fine[..., 0], -ratio, 0.0), _FEW, axis=-1)[..., :_FEW]
        few.sort(axis=-1)
    C, counted = lines.C, None
    if few is not None and not every:
        counted = ~fine[..., 0]
        np.put_along_axis(counted, few, True, axis=-1)
    elif few is not None:
        C, residual, products = _lines_at(C, few), _lines_at(residual, few), _lines_at(products, few)
        added = None if added is None else _lines_at(added, few)
    stored = np.sqrt(to_host(summed_squares(C, V * V, wide=True)))
    known: Any = {"added": added, "underflow": underflow}

    def compared(products: Floats, more: float) -> tuple[Floats, Mask]:
        largest = largest_norm(terms, products=more * products, **known)
        tau = statistical_bound(np, a, terms, n, products=products, stored=stored, largest=largest, **known)
        return tau, (residual <= tau) & np.isfinite(tau) & (stored <= largest)

    tau, close = compared(products, estimate_of(k))
    if not every:
        close |= fine
        if part_of(k) < k and not close.all():
            whole = abs(lines.alpha) * np.sqrt(_all_products(lines, V * V))
            tau, again = compared(whole, 1.0)
            grown = again & ~close & ~(whole <= estimate_of(k) * finite(products))
            if grown.any():
                again &= ~grown | _hold(lines, expected)
            close |= again
    ok = close.all(axis=(-2, -1))
    bounds, ratios = tau[..., 0], (residual / tau)[..., 0]
    if counted is not None:
        bounds, ratios = np.where(counted, bounds, np.inf), np.where(counted, ratios, -1.0)
    closest, line = ratios.max(axis=-1), ratios.argmax(axis=-1)
    if counted is None and few is not None:
        line = np.take_along_axis(few, line[..., None], axis=-1)[..., 0]
    bound = _middle(bounds, counted)
    return FirstVerdict(ok, ratio, bound, closest, line, first.size)


def _hold(lines: Side, expected: PredictedSums) -> Mask:
    """Whether the operands of each of a stack give the checksums that they gave when they were encoded, bit for bit:
    (..., 1, 1)."""
    right = expected.carried
    again = weighted_sums(in_single(lines.R, lines.partial), right.weights, lines.partial), predict(lines, right).t
    sums, t = ((x == y).all(axis=(-2, -1), keepdims=True) for x, y in zip(again, (right.sums, expected.t), strict=True))
    return np.asarray(sums & t)


def _all_products(lines: Side, V2: Array) -> Floats:
    """``P2^2`` of each of a stack, of all terms."""
    return to_host(summed_squares(lines.L, summed_squares(lines.R, V2, True), True))


def _middle(x: Floats, counted: Mask | None) -> Any:
    """The median along the last axis of a few numbers, or of those that are `counted`; the others are infinite."""
    x = np.sort(x, axis=-1)
    if counted is None:
        half = x.shape[-1] // 2
        return x[..., half] if x.shape[-1] % 2 else (x[..., half - 1] + x[..., half]) / 2
    count = np.count_nonzero(counted, axis=-1)[..., None]
    pair = np.take_along_axis(x, np.concatenate([(count - 1) // 2, count // 2], axis=-1), axis=-1)
    return pair.sum(axis=-1) / 2


def _lines_at(X: Array, at: Integers) -> Array:
    """The lines with these numbers, (f,) of a matrix or (..., f) of each of a stack."""
    return take_rows(X, at) if at.ndim == 1 else np.take_along_axis(X, at[..., None], axis=-2)


def judge(lines: Side, expected: PredictedSums, u: Array, told: bool = True) -> SideVerdict:
    """Compare residuals with bounds: first with a lower bound of each bound, then with more of it where that fails.

    `told`: somebody sees the check, whose bounds are those of whole lines of C then."""
    if (verdict := _passed(lines, expected, u, told)) is not None:
        return verdict
    V = to_host(expected.carried.weights)
    n, a = V.shape[0], lines.arithmetic
    residual = np.abs(residual_of(lines, expected, u))
    products2 = to_host(expected.products).astype(np.float64)
    added = None if expected.added is None else abs(lines.beta) * np.sqrt(_host(expected.added))
    underflow = a.underflow(lines.terms, lines.alpha) * np.abs(V.T).sum(axis=1)
    tau = np.empty_like(residual)
    ok = np.empty(residual.shape[0], np.bool_)

    estimate, smallest = estimate_of(lines.R.shape[0]), np.abs(V).min(initial=np.inf)
    least = telling_from(lines.R, expected.carried.sums, smallest, lines.terms + n)

    def compare(at: Any, stored2: Array | None = None, larger: float = estimate) -> None:
        """Judge these lines by what is known of their norms."""
        products = abs(lines.alpha) * np.sqrt(products2[at])
        sizes: Any = {"products": products, "added": None if added is None else added[at], "underflow": underflow}
        stored = largest = None
        with np.errstate(all="ignore"):
            if stored2 is not None:
                stored = np.sqrt(_host(stored2))
                largest = largest_norm(lines.terms, **{**sizes, "products": larger * products})
            tau[at] = statistical_bound(np, a, lines.terms, n, stored=stored, largest=largest, **sizes)
            fine = (residual[at] <= tau[at]) & np.isfinite(tau[at]) & (tau[at] >= least)
            if stored is not None:
                fine &= stored <= largest
        ok[at] = np.all(fine, axis=1)

    compare(slice(None))  # by a part of P2 alone
    ratio = worst_ratio(residual, tau)
    seen = ~ok  # these get their true bound, and so do the few that came closest
    seen[np.argpartition(np.where(ok, -ratio, 0.0), _FEW)[:_FEW] if ok.size > _FEW else slice(None)] = True
    closer = np.flatnonzero(seen)
    V2 = expected.carried.weights * expected.carried.weights
    q2 = None
    for at in _portions(closer, max(lines.R.shape)):
        whole = weighted_squares(_gather(lines.C, at), V2, wide=True)
        compare(at, whole)
        bad = at[~ok[at]]
        if bad.size and np.isfinite(residual[bad]).any():
            if q2 is None:
                q2 = weighted_squares(lines.R, V2, wide=True)
            known = estimate**2 * finite(products2[bad])
            products2[bad] = _host(weighted_squares(_gather(lines.L, bad), q2, wide=True))
            compare(bad, _host(whole)[np.isin(at, bad)], 1.0)
            grown = bad[(ok[bad][:, None] & ~(products2[bad] <= known)).any(axis=1)]
            if grown.size and not operands_hold(lines, expected):
                ok[grown] = False
    ratio[closer] = worst_ratio(residual[closer], tau[closer])
    bounds = tau[closer].max(axis=1, initial=0.0)
    bounds = bounds[np.isfinite(bounds)]
    bound_seen = float(middle(bounds)) if bounds.size else 0.0
    return SideVerdict(ok, ratio, lines_check(lines, V, ok & seen, ratio, bound_seen, ok.size))


def _portions(rows: Integers, columns: int) -> list[Integers]:
    """Row numbers, as many at a time as may be gathered at once."""
    step = rows_per_block(columns)
    return [rows] if 0 < rows.size <= step else [rows[at : at + step] for at in range(0, rows.size, step)]


def _gather(X: Array, rows: Integers) -> Array:
    return X if rows.size == X.shape[0] else take_rows(X, rows)


def worst_ratio(residual: Floats, tau: Floats) -> Floats:
    """The worst of a line's residuals in units of its bound; 0/0 is 0, everything else that is not finite is inf."""
    with np.errstate(all="ignore"):
        ratio = np.where(residual == 0.0, 0.0, residual / tau)
    return np.asarray(np.where(np.isfinite(ratio) & np.isfinite(tau), ratio, np.inf).max(axis=1, initial=0.0))


def lines_check(lines: Side, V: Floats, clean_lines: Mask, ratio: Floats, bound: float, verified: int) -> Check:
    clean = np.where(clean_lines, ratio, -1.0)
    closest = float(clean.max(initial=0.0))
    line = int(np.argmax(clean)) if clean.size and clean.max() >= 0 else -1
    return _check_of(lines.side, clean.size, bound, closest, line, vectors=V.shape[1], verified=verified)


def _check_of(
    side: str,
    m: int,
    bound: float,
    closest: float,
    line: int,
    vectors: int = 1,
    verified: int | None = None,
) -> Check:
    return Check.made_of(
        side=side,
        vectors=vectors,
        lines=m,
        verified=m if verified is None else verified,
        bound=bound,
        closest=closest,
        closest_line=line,
        detection_limit=math.nan,
    )
