"""Certify finished LU factors as they lie in memory: against the sums kept when they were made, and against A.

Online, every line of L and U was checked when it was made, and g = w'L and y = U v were kept. So one reading of both,
which has to give the same sums again, and ``w'A v = g y`` as a whole, certify the factorisation. Where nothing was
kept, a second reading compares ``g U`` with ``w'A`` and ``L y`` with ``A v``, line by line.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, from_host, namespace, to_host
from abft_tsm2.checksum.bounds import FLOOR_TERMS, changed_bound, factored_bound, factored_element, operations
from abft_tsm2.checksum.rigorous import factored_rounding
from abft_tsm2.core.blas import multiply_triangle, product
from abft_tsm2.linalg.encode import MatrixChecksums, add_sums, counts, wide
from abft_tsm2.linalg.evidence import Evidence, Lines, may_be_undivided, unit_lower
from abft_tsm2.linalg.host_certificate import checks_of_clean
from abft_tsm2.linalg.host_sums import reads_at_once
from abft_tsm2.linalg.line_check import LineCheck, column_norms, norm
from abft_tsm2.linalg.lu_checks import ROWS, LuChecksums, blind_lines, read_width
from abft_tsm2.linalg.operand import Operand, compare
from abft_tsm2.linalg.outcome import FactorOutcome, check_of
from abft_tsm2.report import SIDES, Check

BLOCK, WIDENED = 1024, 256  # columns that are read at a time; those that are widened for it, to stay in a CPU's cache
FEW = 64  # lines whose norms are computed one by one
EXPLAINED = 8  # lines whose elements are computed; evidence of the whole is as soon where there are more


def read(W: Array, carried: LuChecksums, left: int, top: int) -> tuple[Array, Array]:
    """``w'L`` of the first `left` columns and ``U v`` of the first `top` rows, as they are now."""
    xp, n = namespace(W), W.shape[1]
    w, v = carried.w, carried.v
    block = read_width(W, BLOCK if W.dtype == v.dtype else WIDENED)
    wL, Uv = (xp.zeros(size, dtype=xp.float64, device=W.device) for size in (left, top))
    for at in range(0, n if top else left, block):
        end = min(at + block, n)
        above = min(at, top)
        add_sums(Uv[:above], W[:above, at:end], v[at:end])
        if at < top:  # U(at:stop, at:end), the first columns of which are a triangle
            stop = min(end, top)
            Uv[at:stop] += multiply_triangle(wide(W[at:stop, at:stop]), v[at:stop], lower=False)
            add_sums(Uv[at:stop], W[at:stop, stop:end], v[stop:end])
        if at < left:  # L(at:m, at:stop), the first rows of which are a triangle
            stop = min(end, left)
            wL[at:stop] += multiply_triangle(wide(W[at:stop, at:stop]).T, w[at:stop], lower=False, unit=True)
            add_sums(wL[at:stop], W[stop:, at:stop].T, w[stop:])
    return wL, Uv


def product_sums(W: Array, carried: LuChecksums) -> tuple[Array, Array]:
    """``L y`` and ``g U``, with the y and g that are kept."""
    xp, (m, n), K = namespace(W), W.shape, min(W.shape)
    g, y = carried.g, xp.asarray(carried.y, copy=True)
    Ly, gU = (xp.zeros(size, dtype=xp.float64, device=W.device) for size in (m, n))
    block = read_width(W, WIDENED)
    for at in range(0, n, block):
        end, above = min(at + block, n), min(at, K)
        add_sums(gU[at:end], W[:above, at:end].T, g[:above])
        if at < K:
            stop = min(end, K)
            square = wide(W[at:stop, at:stop])
            gU[at:stop] += multiply_triangle(square.T, g[at:stop], lower=True)
            add_sums(gU[stop:end], W[at:stop, stop:end].T, g[at:stop])
            Ly[at:stop] += multiply_triangle(square, y[at:stop], lower=True, unit=True)
            add_sums(Ly[stop:], W[stop:, at:stop], y[at:stop])
    return Ly, gU


def changed(W: Array, carried: LuChecksums, wL: Array, Uv: Array) -> tuple[list[int], list[int]]:
    """Find columns of L and rows of U that are no longer what they were, or whose g or y is not.

    A norm that the bound needs is first guessed: |g| itself estimates it, as does that of A's column over the pivot,
    and |l| <= 1 limits it. Lines that are flagged get theirs computed.
    """
    xp, (m, n) = carried.xp, W.shape
    left, top = wL.shape[0], Uv.shape[0]
    with np.errstate(all="ignore"):
        pivots = xp.abs(wide(xp.linalg.diagonal(W)[:left]))
        size = xp.minimum(
            carried.floor[:left] / xp.where(pivots > 0, pivots, xp.ones_like(pivots)), tail_norms(carried.w)[:left]
        )
        size = xp.maximum(xp.abs(carried.g[:left]), size)
        columns = LineCheck.of(wL - carried.g[:left], changed_bound(size, m))
        size = xp.maximum(xp.abs(carried.y[:top]), carried.rows[:top, ROWS.floor])
        rows = LineCheck.of(Uv - carried.y[:top], changed_bound(size, n))
        flagged = np.flatnonzero(~to_host(columns.ok)), np.flatnonzero(~to_host(rows.ok))
        found: tuple[list[int], list[int]] = [], []
        for c in flagged[0].tolist():
            exact = norm(wide(W[c + 1 :, c]) * carried.w[c + 1 :]) + abs(float(carried.w[c]))
            found[0].extend([c] * (not _within(float(columns.residual[c]), changed_bound(exact, m))))
        for r in flagged[1].tolist():
            exact = norm(wide(W[r, r:]) * carried.v[r:])
            found[1].extend([r] * (not _within(float(rows.residual[r]), changed_bound(exact, n))))
    return found


def tail_norms(x: Array) -> Array:
    """The 2-norms of x(i:), for every i."""
    xp = namespace(x)
    largest = float(xp.max(xp.abs(x))) if x.shape[0] else 0.0
    return largest * xp.sqrt(xp.flip(xp.cumulative_sum(xp.flip((x / (largest or 1.0)) ** 2))))


def _within(residual: float, bound: float) -> bool:
    return abs(residual) <= bound and math.isfinite(bound)


def whole(carried: LuChecksums) -> LineCheck:
    """``w'A v = g y``: of all of A = L U at once, from sums that were taken independently of each other."""
    xp, e = carried.xp, carried.encoding
    scale = 1.0 / max(float(xp.max(xp.abs(e.w))), 1e-300)  # of w, and so of g and Z
    left, right = scale * carried.g * carried.y, scale * e.v * e.Z
    residual = xp.sum(left) - xp.sum(right)
    columns = carried.reach(1, carried.floor, 0.0, 0, e.Z) * e.v * scale
    terms = operations(carried.type, 0, carried.W.shape[1])
    reach = norm(columns) + math.sqrt(terms) * (norm(left) + norm(right))
    bound = factored_bound(carried.type, reach, left.shape[0], scale * carried.moduli[0] * carried.moduli[1])
    return LineCheck.of(residual, xp.asarray(bound))


def certificate(A: Array, W: Array, carried: LuChecksums) -> tuple[LineCheck, LineCheck]:
    """``L y = P A v`` by rows and ``g U = w'A`` by columns, of all of A; rows first.

    Where a line is beyond the bound with estimated norms, they are computed. What is still beyond it has its elements
    of PA - LU computed and compared, unless there are many, or A is not shown to be what was encoded.
    """
    xp, K = carried.xp, carried.g.shape[0]
    encoding, place = carried.encoding, from_host(carried.place, W)
    S, Z = xp.take(encoding.S, place), encoding.Z
    floors = carried.rows[:, ROWS.floor], carried.floor
    residuals = [now - then for now, then in zip(product_sums(W, carried), (S, Z), strict=True)]
    verdicts = []
    for side, then, weight in ((0, S, carried.v), (1, Z, carried.w)):
        reach = carried.reach(side, floors[side], 0.0, FLOOR_TERMS, then)
        bound = factored_bound(carried.type, reach, K, carried.moduli[1 - side])
        verdict = LineCheck.of(residuals[side], bound)
        if not verdict.clean:
            far = np.flatnonzero(~to_host(verdict.ok))
            if 0 < far.size <= FEW:
                for line, more in zip(far.tolist(), to_host(_norms_of(W, carried, far, side)).tolist(), strict=True):
                    reach[line] = reach[line] + more
                bound = factored_bound(carried.type, reach, K, carried.moduli[1 - side])
                verdict = LineCheck.of(residuals[side], bound)
        if not verdict.clean:
            reach = reach + _norms_through(W, weight, left=bool(side))
            bound = factored_bound(carried.type, reach, K, carried.moduli[1 - side])
            verdict = LineCheck.of(residuals[side], bound)
        verdicts.append(verdict)
    rows, columns = verdicts
    flagged = [np.flatnonzero(~to_host(verdict.ok)).tolist() for verdict in verdicts]
    few = [lines if len(lines) <= EXPLAINED else [] for lines in flagged]
    # L U may be the A that it was made of, and not the A that was asked for: where A is that one before it is read.
    if any(few) and compare(A, encoding).operand is Operand.SAME:
        for axis, (verdict, lines) in enumerate(zip(verdicts, few, strict=True)):
            for line in lines:
                verdict.ok[line] = _explained(A, W, carried, line, axis)
    return rows, columns


class Certificate(NamedTuple):
    """What is known of a factorisation when nothing but its result is.

    Attributes
    ----------
    outcome : FactorOutcome
    rows, columns : tuple of int
        In which L U is not P A; empty where the pivots are none.
    blind : pair of boolean arrays, or None
        Lines with elements that the sums of neither side show.
    checks : tuple of Check
        For the report.
    """

    outcome: FactorOutcome
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    blind: Lines | None = None
    checks: tuple[Check, ...] = ()

    def after(self, found: Evidence) -> Certificate:
        """The certificate once evidence has decided about its suspects; they stay where evidence names no lines."""
        if found.right:
            return self._replace(outcome=FactorOutcome.CERTIFIED, rows=(), columns=())
        if not found.rows:
            return self._replace(outcome=FactorOutcome.DISAGREES)
        rows, columns = (tuple(sorted(lines)) for lines in (found.rows, found.columns))
        return self._replace(outcome=FactorOutcome.DISAGREES, rows=rows, columns=columns)


def certified(A: Array, W: Array, pivots: Any, encoding: MatrixChecksums) -> Certificate:
    """Verify a factorisation of which nothing is known: by the `certificate`, and multipliers that are at most 1."""
    K, undivided = min(W.shape), may_be_undivided(W)
    if not undivided and reads_at_once(W) and (clean := checks_of_clean(W, pivots, encoding)):
        return Certificate(FactorOutcome.CERTIFIED, checks=clean)
    carried = LuChecksums(A, encoding, W)
    if not carried.order_by(np.array(pivots)):
        return Certificate(FactorOutcome.DISAGREES)
    large = {*carried.too_large()}  # first: later changes of L and U show in the sums
    carried.g[...], carried.y[...] = read(W, carried, K, K)
    carried.count_operations()
    verdicts = certificate(A, W, carried)
    rows, columns = ({*np.flatnonzero(~to_host(verdict.ok)).tolist()} for verdict in verdicts)
    columns |= large
    checks = tuple(
        check_of(side, verdict.residual, verdict.bound, weight)
        for side, verdict, weight in zip(SIDES, verdicts, (carried.v, carried.w), strict=True)
    )
    blind = blind_lines(A, carried, (verdicts[0].bound, verdicts[1].bound))
    blind = None if undivided else blind  # then all is compared
    suspected = rows or columns or undivided or blind is not None
    outcome = FactorOutcome.SUSPECTED if suspected else FactorOutcome.CERTIFIED
    return Certificate(outcome, tuple(sorted(rows)), tuple(sorted(columns)), blind, checks)


def _norms_of(W: Array, carried: LuChecksums, lines: Any, axis: int) -> Array:
    """``||L(i, :) o y||`` of some rows (axis 0), or ``||g o U(:, c)||`` of some columns, operations counted."""
    xp, K = carried.xp, min(W.shape)
    # line by line: NumPy's take copies a whole column-major matrix first
    part = wide(xp.stack([W[line, :K] if axis == 0 else W[:K, line] for line in lines.tolist()]))
    places, last = np.arange(K)[None, :], lines[:, None]
    zero, one = (xp.asarray(x, dtype=xp.float64) for x in (0.0, 1.0))
    if axis == 0:
        sums = carried.y
        part = xp.where(from_host(places < last, W), part, xp.where(from_host(places == last, W), one, zero))
    else:
        sums = carried.g
        part = xp.where(from_host(places <= last, W), part, zero)
    return column_norms((part * (sums * xp.sqrt(counts(K, xp, W.device)))[None, :]).T)


def _norms_through(W: Array, weight: Array, *, left: bool = False) -> Array:
    """The root of ``(L o L) D (U o U)(v o v)``, or of ``(w o w)'(L o L) D (U o U)``; D counts operations: see
    `bounds.factored_element`."""
    xp, (m, n), K = namespace(W), W.shape, min(W.shape)
    x = xp.abs(weight)
    for half in ("L", "U") if left else ("U", "L"):
        columns = K if half == "L" else n
        out = xp.zeros(columns if left else K if half == "U" else m, dtype=x.dtype, device=W.device)
        for at in range(0, columns, WIDENED):
            end = min(at + WIDENED, columns)
            if half == "L":
                first, last = at, m
                block = unit_lower(wide(W[at:, at:end]))
            else:
                first, last = 0, min(end, K)
                block = xp.triu(wide(W[:last, at:end]), k=-at)
            if left:  # elements times weights first: their squares are in the middle of the range
                parts = block * x[first:last, None]
                out[at:end] += xp.sum(parts * parts, axis=0)
            else:
                parts = block * x[None, at:end]
                out[first:last] += xp.sum(parts * parts, axis=1)
        x = xp.sqrt(out)
        if half == ("L" if left else "U"):
            x *= xp.sqrt(counts(K, xp, W.device))
    return x


def _explained(A: Array, W: Array, carried: LuChecksums, line: int, axis: int) -> bool:
    """Whether every element of one row (axis 0) or column (1) of PA - LU is what rounding usually is, and no more than
    it may be; evidence does not compare it again."""
    xp, K, place = carried.xp, min(W.shape), from_host(carried.place, W)
    if axis == 0:
        one = xp.zeros(K, dtype=xp.float64, device=W.device)
        one[: min(line, K)] = wide(W[line, : min(line, K)])
        if line < K:
            one[line] = 1.0
        exact = wide(A[int(place[line]), :])
        n = W.shape[1]
        blocks = [(at, min(at + WIDENED, n), min(at + WIDENED, K)) for at in range(0, n, WIDENED)]
        parts = [(xp.triu(wide(W[:top, at:end]), k=-at).T, one[:top]) for at, end, top in blocks]
    else:
        top = min(line + 1, K)
        one = wide(W[:top, line])
        exact = xp.take(wide(A[:, line]), place)
        parts = [(unit_lower(wide(W[:, :top])), one)]
    value = xp.concat([product(block, x) for block, x in parts])
    done = counts(K, xp, W.device)
    usual, most = (
        xp.concat([product(xp.abs(block), terms[: x.shape[0]] * xp.abs(x)) for block, x in parts])
        for terms in (xp.sqrt(done), xp.ones_like(done))
    )
    usual = factored_element(carried.type, usual + math.sqrt(FLOOR_TERMS) * xp.abs(exact), K)
    terms = np.minimum(np.arange(value.shape[0]), min(line, K - 1)) + 1
    most = from_host(factored_rounding(carried.type, np.minimum(terms, K)), W) * most
    return LineCheck.of(exact - value, xp.minimum(usual, most)).clean
