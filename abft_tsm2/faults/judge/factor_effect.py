"""The effect of an unrepaired fault on a factorisation: by how much it moves lines of L U, or of the residual of A x.

It is worked out from what was planted, and from A. An error D of the trailing matrix is an error of L U, P A + D, when
all that follows is computed from it; one of finished factors is L'U' - L U; of a panel only the columns of the panel
count, because what comes after follows from the panel as it is. The checksums of A's lines move by D v and w'D.

What has to be found is what the report states of the same call without a fault: its bound is the median of all lines,
and that of a line is taken to be larger or smaller as the line is, |A_i o v| and |w o A_c|. The bounds that the checks
have used are up to 7 times as large, in the families of the campaigns (10 times where elements span forty decades); and
what fails is computed again, and judged with a margin of 8 then: `MARGIN`. It is judged element by element, too, and
passes where nothing is wrong but what rounding may do: so some element has to be above that, gamma_K |L||U|
(N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 9.3). Finished columns of L are compared
with w'L only, and finished rows of U with U v: changes that cancel in that sum have no other side to be seen from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from abft_tsm2.faults.judge.factor_oracle import order, unit
from abft_tsm2.faults.judge.oracle import reference
from abft_tsm2.faults.judge.yardstick import FACTOR_REACH, SOLUTION_REACH, noise_of_factors
from abft_tsm2.report import Report

Matrix = np.ndarray[Any, np.dtype[Any]]
MARGIN = 8.0
MARGIN_FAR, FAR = 32.0, 2.0**64  # bounds are up to 26 times as large where rows span more than that
GROWN = 2.0**20  # times A: no yardstick is known of such factors (gfpp)
EVEN = 2.0**14  # times as large as others rows of factors may be, to be added up with them
HUGE = 1e150  # the square of which float64 can hold


@dataclass(frozen=True)
class Moment:
    """A stage at which something was planted.

    Attributes
    ----------
    stage : str
    step : (int, int) or None
        The columns of the panel.
    before, after : mappings of str to array
        Copies of the arrays of the stage, all of them before the fault and those that it changed after it.
    """

    stage: str
    step: tuple[int, int] | None
    before: Mapping[str, Matrix]
    after: Mapping[str, Matrix]


@dataclass(frozen=True)
class Places:
    """Rows, or columns, that a report has to name of a fault, and those that it may name; arrays of numbers."""

    needed: Matrix
    allowed: Matrix

    def compared(self, named: Sequence[tuple[int, ...]]) -> str:
        """Whether lines that are named (the empty tuple names all) are these: "exact", "covered", or "wrong"."""
        every = set().union(*named)
        if () not in named and not every.issuperset(self.needed.tolist()):
            return "wrong"
        return "exact" if () not in named and every.issubset(self.allowed.tolist()) else "covered"


@dataclass(frozen=True)
class Effect:
    """What one fault does.

    Attributes
    ----------
    size : float
        By how much it moves a line, in units of what is sure to be found; the largest of all lines. Or by how much it
        changes an element, in units of what rounding may do, where that is less.
    alone : float
        The same if no two of the changed elements cancelled.
    largest : float
        The largest element of D, or of the residual.
    rows, columns : Places or None
        Where a report of this fault has to find it.
    """

    size: float
    alone: float
    largest: float
    rows: Places | None = None
    columns: Places | None = None


class MovedLines:
    """What has to be found in the rows and columns of a matrix.

    Parameters
    ----------
    A : (m, n) array
    v, w : arrays
        The weights of columns and of rows: ones of rows only (w) where the matrix is symmetric.
    rounding : (m, n) array
        What rounding may do to each element of L U, in the order of A's rows.
    errors : (m, n) array
        Of L U without a fault, in the same order.
    report : Report
        Of the same call without a fault.

    Attributes
    ----------
    sharpness : float
        The bound in yardsticks, medians over the lines; of the less sharp side.
    """

    def __init__(
        self, A: Matrix, v: Matrix | None, w: Matrix, rounding: Matrix, errors: Matrix, report: Report
    ) -> None:
        wide, terms = A.astype(np.float64), min(A.shape)
        self.v, self.w, self.rounding = v, w, rounding
        bounds, sharp = {check.side: check.bound for check in report.checks}, []
        off, sizes = (_norms((x * w[:, None]).T) for x in (errors, wide))
        noise = noise_of_factors(off, sizes, A.dtype, terms)
        sharp.append(bounds["columns"] / float(np.median(noise)))
        margin = MARGIN_FAR if _are_far(wide) else MARGIN
        grown = float(rounding.max(initial=0.0)) > GROWN * terms * unit(A.dtype) * float(abs(wide).max(initial=0.0))
        reach = np.inf if grown else FACTOR_REACH
        self.columns = _capped(_scaled(bounds["columns"], sizes, margin), reach * noise)
        self.rows = None
        if v is not None:
            off, sizes = (_norms(x * v) for x in (errors, wide))
            noise = noise_of_factors(off, sizes, A.dtype, terms)
            sharp.append(bounds["rows"] / float(np.median(noise)))
            self.rows = _capped(_scaled(bounds["rows"], sizes, margin), reach * noise)
        self.sharpness = max(sharp)

    def effect(self, D: Matrix, rows: Matrix, side: str = "") -> Effect:
        """Of an error of L U, row i of which is row ``rows[i]`` of A; of one side where no other one sees it."""
        w, limits = self.w[rows], self.columns
        with np.errstate(all="ignore"):
            moved, alone = [abs(w @ D) / limits], [(abs(D) * abs(w)[:, None]).max(0) / limits]
            if self.v is not None and self.rows is not None:
                moved.append(abs(D @ self.v) / self.rows[rows])
                alone.append((abs(D) * abs(self.v)).max(1) / self.rows[rows])
        across, *down = (Places(_lines(~(x <= 1)), _lines((D != 0).any(axis))) for axis, x in enumerate(moved))
        seen = {"columns": slice(0, 1), "rows": slice(1, 2)}.get(side, slice(None))
        most = _beyond(D, self.rounding[rows])
        size, single = min(largest(*moved[seen]), most), min(largest(*alone), most)
        return Effect(size, single, largest(D), down[0] if down else None, across)


def _are_far(A: Matrix) -> bool:
    """Whether rows, or columns, of A are of sizes so far apart that bounds of lines are no more as lines are."""
    for sizes in (abs(A).max(axis, initial=0.0) for axis in (0, 1)):
        there = sizes[sizes > 0]
        if there.size and float(there.max()) > FAR * float(there.min()):
            return True
    return False


def _scaled(bound: float, norms: Matrix, margin: float = MARGIN) -> Matrix:
    """The bound of each line, from the median of all."""
    middle = float(np.median(norms)) or 1.0
    return np.asarray(margin * bound * (norms / middle) + np.finfo(np.float64).tiny)


def _capped(limits: Matrix, reach: Matrix) -> Matrix:
    """What a line promises to find: by its bound, and by the judge's own yardstick."""
    return np.minimum(limits, MARGIN * reach)


def _norms(x: Matrix) -> Matrix:
    """The norm of each row, whose squares may leave the range."""
    largest = abs(x).max(1, initial=0.0)
    unit = np.where(largest > 0, largest, 1.0)
    return np.asarray(unit * np.linalg.norm(x / unit[:, None], axis=1))


def _lines(chosen: Matrix) -> Matrix:
    """Numbers of the lines that are."""
    return np.flatnonzero(chosen)


def _wide(x: Matrix) -> Matrix:
    """x in float64; what is a signalling NaN is one that does not signal."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def rounding_of(L: Matrix, U: Matrix, dtype: Any) -> Matrix:
    """What rounding may do to each element of L U: gamma_K |L||U|, with K the number of columns of L."""
    terms = L.shape[1] * unit(dtype)
    return np.asarray(terms / (1 - terms) * (abs(_wide(L)) @ abs(_wide(U))))


def errors_of(A: Matrix, L: Matrix, U: Matrix) -> Matrix:
    """A - L U, of finite factors."""
    product = reference(_wide(L), _wide(U), np, sums=A.dtype.name)
    return np.asarray((_wide(A) - product.high) - product.low)


def _beyond(D: Matrix, rounding: Matrix) -> float:
    """The largest element of D in units of what rounding may do to it."""
    with np.errstate(all="ignore"):
        return largest(np.where(D == 0, 0.0, abs(D) / rounding))


def largest(*arrays: Matrix) -> float:
    """max |x| of all, infinite where one is not finite."""
    found = max((float(abs(x).max(initial=0.0)) for x in arrays), default=0.0)
    return found if all(np.isfinite(x).all() for x in arrays) else float("inf")


# ---- errors of products --------------------------------------------------------------------------------------------


def _parts(W: Matrix, columns: int, rows: int) -> tuple[Matrix, Matrix, Matrix]:
    """L of the finished columns, U of the rows that are finished, and what is left, as large as W."""
    m, wide = W.shape[0], _wide(W)
    lower = np.tril(wide[:, :columns], -1)
    lower[np.arange(min(m, columns)), np.arange(min(m, columns))] = 1
    upper = np.triu(wide[:columns])
    upper[rows:, columns:] = 0
    wide[:, :columns] = 0
    wide[:rows] = 0
    return lower, upper, wide


def product_error(before: Matrix, after: Matrix, columns: int, rows: int) -> Matrix:
    """The error of L U from a change of W, in which so many columns are L's and so many rows are U's: what is left of A
    is the rest."""
    (L, U, rest), (L2, U2, rest2) = _parts(before, columns, rows), _parts(_finite(after), columns, rows)
    with np.errstate(all="ignore"):
        D = rest2 - rest
        lines = _lines((L2 != L).any(1))
        D[lines] += (L2[lines] - L[lines]) @ U2
        across = _lines((U2 != U).any(0))
        D[:, across] += L @ (U2[:, across] - U[:, across])
    return D


def _finite(x: Matrix) -> Matrix:
    """What is not finite, as huge numbers: products of them with zeros are zeros."""
    wide = _wide(x)
    return np.where(np.isfinite(wide), wide, HUGE)


def square_error(before: Matrix, after: Matrix, columns: int, last: int) -> Matrix:
    """The same of L L', in its lower triangle; of L L' the columns up to `last` count."""
    parts = [np.tril(_finite(W)) for W in (before, after)]
    with np.errstate(all="ignore"):
        L, L2 = (x[:, :columns] for x in parts)
        D = np.zeros(before.shape)
        lines = _lines((L2 != L).any(1))
        D[lines] = L2[lines] @ L2.T - L[lines] @ L.T
        D[:, lines] = D[lines].T
        D[:, last:] = 0
        rest = parts[1] - parts[0]
        rest[:, :columns] = 0
        D += rest + np.tril(rest, -1).T
    return D


def of_lu(moment: Moment, lines: MovedLines) -> Effect | None:
    """Of a fault in an LU factorisation; None where it is not in A, L or U."""
    before, after = moment.before, moment.after
    if "W" in after:
        D, rows = lu_error(moment)
        effect = lines.effect(D, rows, _seen_from(moment))
        if moment.stage == "factored":  # where lines of the product are what is found
            return effect
        return replace(effect, rows=None, columns=_columns(moment, lines, rows, effect))
    if "A" in after:
        with np.errstate(all="ignore"):
            D = _wide(after["A"]) - _wide(before["A"])
        return replace(lines.effect(D, np.arange(D.shape[0])), rows=None, columns=None)
    return None


def _seen_from(moment: Moment) -> str:
    """The side from which a change of W is seen, where it is one: what is finished is not used any more."""
    if moment.stage not in ("updated", "finished"):
        return ""
    i, c = (moment.before["W"] != moment.after["W"]).nonzero()
    last = moment.step[1] if moment.step else min(moment.before["W"].shape)
    if ((i > c) & (c < last)).all():
        return "columns"
    return "rows" if ((i <= c) & (i < last)).all() else ""


def _columns(moment: Moment, lines: MovedLines, rows: Matrix, effect: Effect) -> Places | None:
    """Columns of L and U that a fault has changed; rows may be exchanged before it is found."""
    if effect.columns is None:
        return None
    before, after = moment.before["W"], moment.after["W"]
    changed = _lines((before != after).any(0))
    if moment.stage == "panel":  # which is judged by what its factors are the product of
        return Places(np.intersect1d(effect.columns.needed, changed), np.union1d(effect.columns.allowed, changed))
    last = moment.step[1] if moment.step else min(before.shape)
    lower = [np.tril(_wide(W)[:, :last], -1) for W in (before, after)]
    if not (lower[0] != lower[1]).any():
        return Places(np.intersect1d(effect.columns.needed, changed), changed)
    # an error of a column of L is one of the product times a row of U, each element of which has its limit
    with np.errstate(all="ignore"):
        off = (abs(lower[1] - lower[0]) * abs(lines.w[rows])[:, None]).max(0)
        times = (abs(np.triu(_wide(before)[:last])) / lines.columns).max(1)
        return Places(_lines(~(off * times <= 1)), changed)


def lu_error(moment: Moment) -> tuple[Matrix, Matrix]:
    """The error of L U, and the rows of A that its rows are."""
    before, W = moment.before, moment.before["W"]
    m, K = W.shape[0], min(W.shape)
    j, j1 = moment.step or (0, K)
    D = product_error(W, moment.after["W"], j1, j if moment.stage in ("panel", "swapped") else j1)
    if "perm" not in before:
        return D, order(before["piv"], m)
    rows = before["perm"].astype(np.int64)
    if moment.stage == "panel" and not D[:, j1:].any():  # whose rows have been exchanged; not yet those of the others
        rows[j:] = rows[j:][order(before["piv"][j:j1] - j, m - j)]
    return D, rows


def of_cholesky(moment: Moment, lines: MovedLines) -> Effect | None:
    """Of a fault in Cholesky's method; None where it is not in A or L."""
    before, after, rows = moment.before, moment.after, np.arange(lines.w.size)
    if "W" in after:
        _, j1 = moment.step or (0, rows.size)
        effect = lines.effect(
            square_error(before["W"], after["W"], j1, j1 if moment.stage == "panel" else rows.size), rows
        )
        halves = replace(moment, before={"W": np.tril(before["W"])}, after={"W": np.tril(after["W"])})
        return replace(effect, rows=None, columns=_columns(halves, lines, rows, effect))
    if "A" in after:
        with np.errstate(all="ignore"):
            D = np.tril(_wide(after["A"])) - np.tril(_wide(before["A"]))
        return replace(lines.effect(D + np.tril(D, -1).T, rows), rows=None, columns=None)
    return None


# ---- solutions -----------------------------------------------------------------------------------------------------


def residual_of(A: Matrix, x: Matrix, b: Matrix) -> Matrix:
    """b - A x in a long double, in float64."""
    A, x, b = (y.astype(np.longdouble) for y in (A, x, b))
    return np.asarray(b - A @ x, np.float64)


class Residuals:
    """What has to be found in the residuals of a system A x = b.

    Parameters
    ----------
    A, x, b : arrays
        x is the solution without a fault.
    factors : triple of arrays
        L and U, and the rows of A that are theirs.
    report : Report
        Of the same call without a fault.
    """

    def __init__(self, A: Matrix, x: Matrix, b: Matrix, factors: tuple[Matrix, Matrix, Matrix], report: Report) -> None:
        self.A, self.x, b = (y.astype(np.float64) for y in (A, x, b))
        self.L, upper, self.rows = factors
        self.rounding = np.empty(x.size)  # three times as much as of the factors
        self.rounding[self.rows] = 3 * rounding_of(self.L, upper, A.dtype) @ abs(self.x)
        limit, errors = report.checks[0].detection_limit, residual_of(A, x, b)
        sizes = _norms(np.column_stack([self.A * self.x, b]))
        noise = noise_of_factors(errors, sizes, A.dtype, x.size)
        self.sharpness = limit / float(np.median(noise))
        self.limits = _capped(_scaled(limit, abs(self.A) @ abs(self.x) + abs(b)), SOLUTION_REACH * noise)

    def effect(self, moment: Moment) -> Effect | None:
        """Of a fault in a solution; None where it is not in A, b, factors, z or x."""
        after = moment.after
        with np.errstate(all="ignore"):
            if "W" in after:
                D, rows = lu_error(moment)
                return self._of(D @ self.x, D * self.x, rows)
            if "lu" in after:
                D = product_error(moment.before["lu"], after["lu"], self.x.size, self.x.size)
                return self._of(D @ self.x, D * self.x, self.rows, of_factors=True)
            if "c" in after:
                D = square_error(moment.before["c"], after["c"], self.x.size, self.x.size)
                return self._of(D @ self.x, D * self.x, self.rows, of_factors=True)
            if "b" in after:
                change = (_wide(after["b"]) - moment.before["b"]).reshape(-1)
                return self._of(change, change[:, None], np.arange(self.x.size))
            if "A" in after:
                D = _wide(after["A"]) - moment.before["A"]
                return self._of(D @ self.x, D * self.x, np.arange(self.x.size))
            if "x" in after:
                x = (_wide(after["x"]) - moment.before["x"]).reshape(-1)
                return self._of(self.A @ x, self.A * x, np.arange(x.size), _lines(x != 0))
            if "z" in after:
                z, L, rows = (_wide(after["z"]) - moment.before["z"]).reshape(-1), self.L, self.rows
                if "W" in moment.before:
                    L, rows = (
                        np.tril(_wide(moment.before["W"]), -1) + np.eye(z.size),
                        order(moment.before["piv"], z.size),
                    )
                return self._of(L @ z, L * z, rows, _lines(z != 0))
        return None

    def _of(
        self, residual: Matrix, parts: Matrix, rows: Matrix, changed: Matrix | None = None, of_factors: bool = False
    ) -> Effect:
        """`of_factors`: of given ones, all rows of which are in one sum, unless they are further apart than `EVEN`."""
        limits, places = self.limits[rows], None if changed is None else Places(changed, changed)
        if of_factors:
            limits = np.maximum(limits, MARGIN * np.minimum(EVEN * self.rounding, self.rounding.max())[rows])
        most = _beyond(residual, self.rounding[rows])
        size, single = (min(largest(y), most) for y in (residual / limits, parts / limits[:, None]))
        return Effect(size, single, largest(residual), places)
