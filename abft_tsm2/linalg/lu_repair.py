"""Repair an LU factorisation under way: recompute what is wrong from A, left-looking.

Rows of A are in the order of W's rows (PA). With L(:, :j) and U(:j, :) right, everything else follows from A alone:

    panel:          (PA)(j:, J) - L(j:, :j) U(:j, J)
    rows of U:      L11^-1 ((PA)(J, j:) - L(J, :j) U(:j, j:))
    finished L, l:  ((PA)(l+1:, l) - L(l+1:, :l) U(:l, l)) / u_ll
    finished U, l:  (PA)(l, l:) - L(l, :l) U(:l, l:)

Elements that differ by more than rounding are replaced; in a line with such elements those as well that only evidence
convicts, or that stand in a row of L, or in a column of U, in which others have been replaced: what went wrong there
may have gone wrong all along, here and there by less than two ways to compute an element differ. A line that agrees
shows that a checksum was wrong, or nothing was. So the finished factors come first (`LuRepair.finished`), and of those
the pivots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, from_host, namespace, to_host
from abft_tsm2.checksum.bounds import (
    FLOOR_TERMS,
    OUTLIER,
    changed_bound,
    factored_bound,
    factored_element,
    rigorous_factored,
    usual_of,
)
from abft_tsm2.core.blas import add_product, permutation, product, solve_triangle
from abft_tsm2.core.row_sums import take_rows
from abft_tsm2.linalg.certify import changed, read
from abft_tsm2.linalg.encode import counts, wide
from abft_tsm2.linalg.evidence import FactorEvidence, unit_lower
from abft_tsm2.linalg.line_check import LineCheck, column_norms
from abft_tsm2.linalg.lu_checks import ROWS, LuChecksums, are_exchanges, places
from abft_tsm2.linalg.operand import UNDECIDED, Operand, compare
from abft_tsm2.linalg.outcome import AGAIN, FACTORS, ROUNDS, Findings, Overflowed, Unrepairable, differing, largest
from abft_tsm2.report import Fault, Status


@dataclass(eq=False)
class LuRepair:
    """Repairs W = L \\\\ U, its pivots and its checksums.

    Attributes
    ----------
    A : (m, n) array
        As it was encoded; only read.
    W : (m, n) array
    pivots : int32 array on the host
    carried : LuChecksums
    findings : Findings
    doubted : bool
        Whether finished lines were left, or put, in a state that only evidence of the whole can vouch for.
    """

    A: Array
    W: Array
    pivots: Any
    carried: LuChecksums
    findings: Findings
    doubted: bool = False

    def __post_init__(self) -> None:
        self._of_L, self._of_U = (np.zeros(size, np.bool_) for size in self.W.shape)  # lines with replaced elements

    # -- the whole repair of a step --

    def panel(self, j: int, j1: int) -> None:
        """Restore the panel J = j:j1, which is wrong, to what it was before it was factored."""
        old = self._before_factoring(j, j1)
        self._above(j, j1)
        active, sizes = self._updated(slice(j, None), slice(j, j1), j)
        self._refuse_overflow(active)
        xp = namespace(active)
        # What getrf adds up is no larger than that, or than what it has grown to in U.
        most = xp.max(xp.abs(active), axis=0)[None, :]
        most = xp.maximum(most, xp.max(xp.abs(xp.triu(wide(self.W[j:j1, j:j1]))), axis=0)[None, :])
        reach = sizes + math.sqrt(j1 - j + FLOOR_TERMS) * most
        bound = factored_element(self.carried.type, reach, j1)
        if old is not None:
            differ, distance = differing(old, active, bound)
            self.findings.wrong_elements(differ, distance, (j, j))
        else:
            self.findings.statuses.append(Status.CORRECTED)
            size, columns = (self.W.shape[0] - j) * (j1 - j), tuple(range(j, j1))
            self.findings.faults.append(Fault(FACTORS, "block", (), columns, size, float("nan"), AGAIN))
        self.W[j:, j:j1] = xp.astype(active, self.W.dtype)

    def before_rows(self, j: int, j1: int) -> None:
        """Repair what the check of rows of U rests on: what is finished, their panel, and S."""
        self.finished(j1, j1, j)
        self.S(j)

    def rows(self, j: int, j1: int) -> None:
        """Solve again for the new rows of U, which are wrong."""
        new, sizes = self._rows(j, j1)
        self._refuse_overflow(new)
        old = wide(self.W[j:j1, j:])
        xp = namespace(old)
        bound = factored_element(self.carried.type, sizes, j1)
        differ, distance = differing(xp.triu(old), xp.triu(new), bound)
        # All of them: the solution has carried what was wrong in one row to those below, whose own sums are right.
        line, column = np.arange(j1 - j)[:, None], np.arange(old.shape[1])[None, :]
        self.W[j:j1, j:] = xp.astype(xp.where(from_host(column >= line, old), new, old), self.W.dtype)
        if differ.any():
            self.findings.wrong_elements(differ, distance, (j, j))

    def finished(self, places: int, left: int, top: int) -> None:
        """Repair the pivots, the first `left` columns of L and `top` rows of U, and their g and y.

        A line whose sum is not what it was is computed again from A, and so is the sum. Where the old elements were
        the same but for rounding, it was the sum that was wrong; unless U and w'A still bear it out. What is right is
        left as it is, bit for bit: a row of U with another pivot would no longer be that of its column of L.
        """
        self.order(places)
        self.verify_input()
        for _ in range(ROUNDS):
            wL, Uv = read(self.W, self.carried, left, top)
            columns, rows = changed(self.W, self.carried, wL, Uv)
            if not columns and not rows:
                return
            for line in sorted({*columns, *rows}):
                if line in rows:
                    self._row(line)
                if line in columns:
                    self._column(line)
        raise Unrepairable(f"sums of L and U still differ after {ROUNDS} repairs")

    # -- parts of it --

    def order(self, j: int) -> None:
        """Three tell the order of the rows after j exchanges: the pivots, the places, and the weights w. Two of them
        outvote the third. Raises Unrepairable where none do."""
        carried = self.carried
        expected, place = places(self.pivots[:j].copy(), self.W.shape[0]), carried.place
        present, original = to_host(carried.w), to_host(carried.encoding.w)
        if expected is not None and np.array_equal(expected, place) and np.array_equal(original[place], present):
            if not carried.table_is_whole():  # what is left are norms
                norms = carried.encoding.row_norms
                carried.rows[:, ROWS.floor] = namespace(norms).take(norms, from_host(place, norms))
            return
        by_place = np.array_equal(np.sort(place), np.arange(place.size)) and np.array_equal(original[place], present)
        by_pivots = expected is not None and np.array_equal(original[expected], present)
        if by_pivots and expected is not None:
            wrong = np.flatnonzero(expected != place)
            carried.rows[:, ROWS.place] = from_host(expected.astype(np.float64), self.W)
            self.findings.wrong_sums("places", wrong, float("nan"), "taken from the pivots")
        elif by_place:
            self._pivots_from(place, j)
        elif expected is not None and np.array_equal(expected, place):
            wrong = np.flatnonzero(original[place] != present)
            off = float(np.max(np.abs(original[place] - present)))
            carried.rows[:, ROWS.w] = from_host(original[place], self.W)
            self.findings.wrong_sums("w", wrong, off)
        else:
            raise Unrepairable(f"after {j} columns pivots, places and weights all differ in the order of the rows")

    def _pivots_from(self, place: Any, j: int) -> None:
        """The only j exchanges, row i with a row below it or itself, that lead to this order."""
        at = list(range(place.size))
        for i in range(j):
            p = at.index(int(place[i]))
            at[i], at[p] = at[p], at[i]
            if self.pivots[i] != p:
                magnitude = float(abs(int(self.pivots[i]) - p))
                self.findings.statuses.append(Status.CORRECTED)
                fault = Fault("piv", "element", (i,), (), 1, magnitude, "taken from the order of the rows")
                self.findings.faults.append(fault)
                self.pivots[i] = p
        if at != place.tolist():
            raise Unrepairable(f"no {j} exchanges lead to the order that the rows are in")

    def S(self, j: int) -> None:
        """Repair S(j:), from the sums of A and the finished factors, which have been repaired."""
        carried = self.carried
        now, first, then = carried.S[j:], carried.recompute_S(0)[j:], carried.recompute_S(j)[j:]
        reach = carried.reach(0, carried.rows[j:, ROWS.floor], 0.0, j, then)
        # A line's norm times the growth of others may be beyond the range, where its own sums are not. Such a bound
        # would be none: a line is fine only within a finite one.
        own = j**0.5 * carried.xp.maximum(carried.xp.abs(first), carried.xp.abs(then))
        reach = carried.xp.where(carried.xp.isfinite(reach), reach, own)
        bound = factored_bound(carried.type, reach, j, carried.moduli[1])
        # A v - L y in two orders of addition; what is added up may be much larger than what is left
        terms = column_norms((wide(self.W[j:, :j]) * carried.y[:j]).T)
        self._compared("S", now, then, bound + changed_bound(terms + carried.xp.abs(then), j + 1), j)

    def verify_input(self) -> None:
        """Verify A, from which everything is recomputed, against its sums S and Z as they were encoded. Where it is the
        same, sums that differ are wrong themselves, and are computed again."""
        e = self.carried.encoding
        operand, found = compare(self.A, e)
        if operand is Operand.CHANGED:
            self.findings.input_changed()
        for name, kept, (lines, again) in zip(("S of A", "Z of A"), (e.S, e.Z), found, strict=True):
            if lines.size:
                off = largest((to_host(kept) - to_host(again))[lines])
                kept[...] = again
                self.findings.wrong_sums(name, lines, off)
        if operand is Operand.UNKNOWN:
            self.findings.undecided(UNDECIDED)

    def _compared(self, name: str, now: Array, then: Array, bound: Array, first: int) -> None:
        verdict = LineCheck.of(now - then, bound)
        if not verdict.clean:
            lines = np.flatnonzero(~to_host(verdict.ok)) + first
            off = largest(to_host(verdict.residual))
            now[...] = then
            self.findings.wrong_sums(name, lines, off)

    def _above(self, j: int, j1: int) -> None:
        """U(:j, J) = L(:j, :j)^-1 (PA)(:j, J): an error below the limit of its rows may be above that of its column.

        y changes by what it does, and S(j:) by L times that.
        """
        if not j:
            return
        carried, W = self.carried, self.W
        xp = carried.xp
        new = _by_columns(self._permuted(slice(0, j), slice(j, j1)))
        left = wide(W[:j, :j])
        solve_triangle(left, new, lower=True, unit=True)
        self.findings.multiplications += float(j) * j * (j1 - j)
        old = xp.asarray(wide(W[:j, j:j1]), copy=True)
        # every row has rounded differently: the largest element of a column tells how much
        reach = math.sqrt(j + FLOOR_TERMS) * xp.max(xp.abs(new), axis=0)[None, :] + xp.zeros_like(new)
        differ, distance = differing(old, new, factored_element(carried.type, reach, j))
        W[:j, j:j1] = xp.astype(new, W.dtype)
        off = product(wide(W[:j, j:j1]) - old, carried.v[j:j1])
        if not bool(xp.all(xp.isfinite(off))):  # what was there has left no trace in y that could be taken off again
            y = read(W, carried, 0, j)[1]
            off = y - carried.y[:j]
        carried.y[:j] += off
        add_product(carried.S[j:], wide(W[j:, :j]), off)
        self.findings.wrong_elements(differ, distance, (0, j))

    def _before_factoring(self, j: int, j1: int) -> Array | None:
        """What the panel must have been: L U with the exchanges undone; None where the pivots are none."""
        b, m = j1 - j, self.W.shape[0]
        local = self.pivots[j:j1] - np.int32(j)
        if not are_exchanges(local, m - j):
            return None
        panel = wide(self.W[j:, j:j1])
        xp = namespace(panel)
        old = xp.asarray(panel, copy=True)
        corner = xp.triu(panel[:b, :])
        old[:b, :] = product(unit_lower(panel[:b, :]), corner)
        old[b:, :] = product(panel[b:, :], corner)
        return take_rows(old, np.argsort(permutation(local, m - j)))

    def _permuted(self, rows: slice, columns: slice) -> Array:
        """A part of PA in float64."""
        return wide(take_rows(self.A[:, columns], self.carried.place[rows]))

    def _updated(self, rows: slice, columns: slice, j: int) -> tuple[Array, Array]:
        """(PA)(rows, columns) - L(rows, :j) U(:j, columns), and the reach of rounding."""
        X = self._permuted(rows, columns)
        sizes = math.sqrt(FLOOR_TERMS) * namespace(X).abs(X)
        if j:
            left, top = wide(self.W[rows, :j]), wide(self.W[:j, columns])
            X, sizes = X - product(left, top), sizes + _reach(left, top)
            self.findings.multiplications += 2.0 * j * X.shape[0] * X.shape[1]
        return X, sizes

    def _rows(self, j: int, j1: int) -> tuple[Array, Array]:
        """L11^-1 ((PA)(j:j1, j:) - L(j:j1, :j) U(:j, j:)) and sizes as in `_updated`."""
        X, sizes = self._updated(slice(j, j1), slice(j, None), j)
        corner = namespace(X).asarray(wide(self.W[j:j1, j:j1]), copy=True)
        new = _by_columns(X)
        solve_triangle(_by_columns(corner), new, lower=True, unit=True)
        return new, sizes + _reach(unit_lower(corner), new, j)

    def _row(self, r: int) -> None:
        """Repair U(r, r:) or y(r). Where S agrees with y it is U that is wrong; where not, evidence decides."""
        new, sizes = (x[0, :] for x in self._updated(slice(r, r + 1), slice(r, None), r))
        xp = namespace(new)
        old = wide(self.W[r, r:])
        bound = factored_element(self.carried.type, sizes, r + 1)
        differ, distance = differing(old, new, bound)
        agrees = self._row_agrees(r)
        differ = self._wrong(differ, agrees, (slice(r, r + 1), slice(r, self.W.shape[1]), r + 1))
        if agrees and not differ.any():
            differ = self._borne_out(r, old, new, distance / to_host(bound))
        differ = _and_beside(differ, distance, self._of_U[r:])
        if differ.any():
            self.W[r, r:] = xp.astype(xp.where(from_host(differ, new), new, old), self.W.dtype)
            # L(:, r) was divided by the pivot that was there first, which rounded differently
            below = slice(r + 1, self.W.shape[0] if differ[0] else r + 1)
            self.doubted |= bool(self._far(below, slice(r, r + 1), r + 1).any())
        before = float(self.carried.y[r])
        self.carried.y[r] = xp.sum(wide(self.W[r, r:]) * self.carried.v[r:])
        if not differ.any():
            self.findings.wrong_sums("y", [r], abs(before - float(self.carried.y[r])))
        self.findings.wrong_elements(differ[None, :], distance[None, :], (r, r))

    def _borne_out(self, r: int, old: Array, new: Array, distance: Any) -> Any:
        """Elements of U(r, r:) that are off by less than two ways to compute them may be, which the sum that is kept
        and borne out convicts: the farthest, if with them the row has that sum, or half of what it was off by."""
        with np.errstate(all="ignore"):
            outlying = (distance > OUTLIER * usual_of(distance)) | (distance == distance.max(initial=0.0))
            chosen, weights = from_host(outlying, new), self.carried.v[r:]
            xp, kept = namespace(new), float(self.carried.y[r])
            rows = old, xp.where(chosen, wide(xp.astype(new, self.W.dtype)), old)
            before, after = (abs(float(xp.sum(row * weights)) - kept) for row in rows)
        return outlying & (after <= before / 2)

    def _column(self, c: int) -> None:
        """Repair L(c+1:, c) or g(c): as `_row`, with w'A in place of S."""
        new, sizes = (x[:, 0] for x in self._updated(slice(c + 1, None), slice(c, c + 1), c))
        xp = namespace(new)
        pivot = float(self.W[c, c])
        if pivot != 0.0:  # under a zero pivot there are zeros, which are not divided
            # no multiplier is larger than 1; where the pivot is all rounding, the quotient may be
            new, sizes = xp.clip(new / pivot, -1.0, 1.0), sizes / abs(pivot)
        old = wide(self.W[c + 1 :, c])
        differ, distance = differing(old, new, factored_element(self.carried.type, sizes, c + 1))
        agrees = self._column_agrees(c)
        differ = self._wrong(differ, agrees, (slice(c + 1, self.W.shape[0]), slice(c, c + 1), c + 1))
        differ = _and_beside(differ, distance, self._of_L[c + 1 :])
        if not differ.any() and agrees and not largest(distance) <= rigorous_factored(self.carried.type, c + 1):
            # the pivot is so small that any multipliers will do in this column: those of now are no better
            agrees, self.doubted = False, True
        if differ.any():
            self.W[c + 1 :, c] = xp.astype(xp.where(from_host(differ, new), new, old), self.W.dtype)
        elif agrees:
            self.W[c + 1 :, c] = xp.astype(new, self.W.dtype)
        before = float(self.carried.g[c])
        self.carried.g[c] = self.carried.w[c] + xp.sum(wide(self.W[c + 1 :, c]) * self.carried.w[c + 1 :])
        if not differ.any() and agrees:  # an element is off by less than two ways to compute it may be
            most = int(np.argmax(distance)) if distance.size else 0
            differ[most : most + 1] = True
        elif not differ.any():
            self.findings.wrong_sums("g", [c], abs(before - float(self.carried.g[c])))
        self.findings.wrong_elements(differ[:, None], distance[:, None], (c + 1, c))

    def _wrong(self, differ: Any, agrees: bool, line: tuple[slice, slice, int]) -> Any:
        """Elements of a line to be replaced, of which so many `differ` from what was computed again: those, and what
        evidence convicts. Where its sum is not borne out and evidence convicts none, it was the sum: the line is kept,
        but not what was computed from it borne out, so that evidence of the whole is due."""
        if agrees and not differ.any():
            return differ
        far = self._far(*line).reshape(-1)
        if agrees or far.any():
            return differ | far
        self.doubted |= bool(differ.any())
        return far

    def _far(self, rows: slice, columns: slice, depth: int) -> Any:
        """Which of these elements of P A - L U, or multipliers, are beyond what rounding may do; on the host."""
        far = np.zeros((rows.stop - rows.start, columns.stop - columns.start), bool)
        if far.size:
            evidence = FactorEvidence(self.A, self.W, self.pivots[:0])
            evidence.place = self.carried.place
            evidence.compare(rows, columns, depth)
            found = evidence.verdict()
            lines = [i - rows.start for i in found.rows], [c - columns.start for c in found.columns]
            far[np.ix_(*lines)] = True
        return far

    def _row_agrees(self, r: int) -> bool:
        """Whether the y(r) that is kept gives A v in row r: ``L(r, :r+1) y(:r+1) = S(r)``."""
        carried, place = self.carried, int(self.carried.place[r])
        parts = np.append(to_host(wide(self.W[r, :r]) * carried.y[:r]), float(carried.y[r]))
        residual = float(np.sum(parts)) - float(carried.encoding.S[place])
        last = from_host(parts[-1:], carried.floor)
        reach = carried.reach(0, carried.rows[r : r + 1, ROWS.floor], 0.0, r, last)
        bound = float(factored_bound(carried.type, reach, r, 0.0)[0])
        return bool(abs(residual) <= bound) and math.isfinite(bound)

    def _column_agrees(self, c: int) -> bool:
        """Whether the g(c) that is kept gives w'A in column c: ``g(:c+1) U(:c+1, c) = Z(c)``."""
        carried = self.carried
        parts = carried.g[: c + 1] * wide(self.W[: c + 1, c])
        residual = namespace(parts).sum(parts) - carried.encoding.Z[c]
        bound = factored_bound(carried.type, carried.reach(1, carried.floor[c : c + 1], 0.0, c, parts[c:]), c, 0.0)
        return bool(abs(float(residual)) <= float(bound[0]))

    def _refuse_overflow(self, X: Array) -> None:
        xp = namespace(X)
        if not bool(xp.all(xp.isfinite(xp.astype(X, self.W.dtype)))):
            raise Overflowed("elements grow beyond the range of the type")


def _and_beside(differ: Any, distance: Any, replaced: Any) -> Any:
    """In a line with elements that `differ`, those as well that are off at all where elements beside them have been
    `replaced`, which is brought up to date."""
    if not differ.any():
        return differ
    differ = differ | (replaced & (distance > 0))
    replaced |= differ
    return differ


def _reach(L: Array, U: Array, first: int = 0) -> Array:
    """What `factored_element` needs of ``L U``, the first column of L being number `first`.

    Rounding leaves residues where exact elements vanish, and they go on from there: so no element counts for less than
    the largest of its column. U's columns are scaled, so that no square leaves the range.
    """
    xp = namespace(U)
    largest = xp.max(xp.abs(U), axis=0)
    scale = xp.where((largest > 0) & xp.isfinite(largest), largest, xp.ones_like(largest))
    scaled = U / scale[None, :]
    done = counts(U.shape[0], xp, U.device, first)[:, None]
    return (xp.sqrt(product(L * L, done * scaled * scaled)) + xp.sqrt(done[-1:, :])) * scale[None, :]


def _by_columns(X: Array) -> Array:
    """A copy of X that BLAS can take."""
    return np.array(X, order="F") if isinstance(X, np.ndarray) else namespace(X).asarray(X, copy=True)
