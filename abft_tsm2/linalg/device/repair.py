"""Repair of a factorisation on a GPU whose steps are tracked: what a step has left is compared with A, element by
element; where it is wrong the matrix is taken back to what the step found, and the factorisation goes on from there.

A step J = j:j1 that is seen d steps late has been used by d updates. What it found, T, rows in the order of then, is

    T = (PA)(j:, j:) - L(j:, :j) U(:j, j:)                    from A, left-looking
    T = T' + L'(:, j:e) U'(j:e, :)                            or from T', what the updates of columns j:e have left

The second way is cheaper where many columns are finished. It does not do for rows that were exchanged meanwhile, nor
for columns in which the faulty U' is so large that T' has lost T: those are computed from A.

What is finished and has changed since its check was made has mostly been used by nothing: its line alone is computed
again, from A. Where it has been used by then, so is T.

Bounds rest on estimated norms at first. A step that exceeds them is in doubt: its checks compute the norms of its lines
as well. It is suspected if it exceeds these bounds, too.

A step is convicted when it has come to agree, once it was done again: factors that come out the same every time are not
a fault of the machine, and are left to the evidence of `abft_tsm2.linalg.evidence`, as is all else that finds no
agreement here. A suspected step in which evidence finds nothing beyond the bound of rounding is done again as well,
once: an error that rounding might have made, but did not, does not come again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import FLOATS, Array, from_host, to_host
from abft_tsm2.checksum.bounds import (
    COMPUTED,
    COMPUTED_LEAST,
    FLOOR_TERMS,
    LEAST,
    USUAL,
    changed_bound,
    factored_bound,
    factored_element,
)
from abft_tsm2.checksum.rigorous import largest_multiplier
from abft_tsm2.core.capture import current
from abft_tsm2.linalg.device import evidence_config
from abft_tsm2.linalg.device.buffers import KEPT, STATE, WORD
from abft_tsm2.linalg.device.evidence_config import COUNTS, FARTHEST, LARGE_MULTIPLIERS, UNBOUNDED, WRONG
from abft_tsm2.linalg.device.repair_operations import RepairOperations
from abft_tsm2.linalg.device.schedule import Step
from abft_tsm2.linalg.evidence import Evidence, compare_sum
from abft_tsm2.linalg.line_check import LineCheck, norm
from abft_tsm2.linalg.outcome import FACTORS, Findings, differing
from abft_tsm2.report import Fault, Status

ROW, COLUMN, JUDGED = 1, 2, 8
"""Status of a step, as kernels/factor/judge_step.cu leaves it: a row, or a column, is not right; it was judged. The
first two as compare_sums.cu has them, of finished lines."""
ACROSS = 8192  # columns of a temporary array
GROWN = 8.0  # times A's column: U' that is larger has cost T' digits of T
MEANWHILE = 4e9  # multiplications that a card makes while a host queues the other way, which takes more launches
LOST = 64  # columns of which that may be true
BEYOND = 16.0  # bounds: no norms of lines, if computed, would explain a residual of so many
ATTEMPTS = 2  # to come to agree with a step, the second one from A alone
INNOCENT = 3  # steps that were suspected in vain, after which it is left to the end
LINES = 32  # finished lines that have changed


class _Line(NamedTuple):
    """A finished row of U or column of L, whose sum has changed.

    Attributes
    ----------
    name : str
        Of the sum: "y" of a row, "g" of a column.
    first : (int, int)
        Its first element.
    here : array
        Its elements in W.
    weights : float64 array
        On the host, those by which its elements count in the sum.
    own : float
        What the diagonal of L has in it.
    kept, again : float
        The sum as it was kept, and as it was when it was last taken.
    """

    name: str
    first: tuple[int, int]
    here: Array
    weights: Any
    own: float
    kept: float
    again: float


@dataclass(eq=False)
class DeviceRepair(RepairOperations):
    """Verifies steps that are suspected, and takes the matrix back to before them; finished lines that have changed.

    Attributes
    ----------
    findings : Findings
    attempts : dict
        How often each step was begun again.
    innocent : int
        How many steps were suspected in vain; after the first one they are not done again.
    convicted : dict
        What was found in steps that are done again; nothing where evidence found them right.
    unchanged : dict
        How many columns of L ("g") and rows of U ("y") have sums that differ from those that were kept by more than
        guessed norms explain, but by no more than their own do: of the last look at finished lines.
    """

    findings: Findings
    attempts: dict[int, int] = field(default_factory=dict)
    innocent: int = 0
    convicted: dict[int, list[Fault]] = field(default_factory=dict)
    unchanged: dict[str, int] = field(default_factory=dict)

    def may_be_fine(self, number: int) -> bool:
        """Whether a step is in doubt for what norms of its lines, computed, may explain."""
        residuals, bounds, _ = self._looked(number)
        of_lines = int(self.sums.status[number]) & ~(ROW | COLUMN) == JUDGED
        return of_lines and bool((np.abs(residuals) <= BEYOND * bounds).all())

    def begins_again(self, number: int, queued: int) -> int | None:
        """The step to go on with where one that is suspected is wrong: W is what that step found, but for the first,
        which begins with A. None where the step is right, or is left to the end.

        `queued`: how many steps have been done.
        """
        if self._is_left(number) and not self.convicted.get(number):
            self.convicted.pop(number, None)
            return None
        if self._is_fine(number):
            self.sums.status[number] = JUDGED  # the end need not ask for that again
            return None
        import cupy

        with current(self.stream):
            self.run.before(self.stream.ptr)
            try:
                again = self._settled(number, queued)
            except cupy.cuda.memory.OutOfMemoryError:  # left to the end, which needs other memory
                self.stream.synchronize()  # what is copied to the host has been given back
                again, self.innocent = None, INNOCENT
            self.run.behind(self.stream.ptr)
        return again

    def _is_left(self, number: int) -> bool:
        """Whether a step is not done again any more."""
        return self.attempts.get(number, 0) == ATTEMPTS or self.innocent >= INNOCENT

    def agreed(self, number: int) -> None:
        """Note what was wrong in a step that agrees now; that it did not, where nothing was wrong beyond rounding."""
        faults = self.convicted.pop(number, None)
        if faults == []:
            self.findings.recomputed(None)
        for fault in faults or ():
            self.findings.statuses.append(Status.CORRECTED)
            self.findings.faults.append(fault)

    def _settled(self, number: int, queued: int) -> int | None:
        self.arrived = 0  # steps have been done since
        step, snapshot = self.steps[number], self.plan.schedule.snapshot
        first = snapshot(step.j)
        kept = self.buffers.order[first : snapshot(self._begin_of(queued)) + 1]
        orders, info = self._on_host(kept, self.sums.on_device("info", np.int32))
        before_it, behind_it = (_is_order(orders[snapshot(at) - first]) for at in step)
        placed = before_it and behind_it  # the rows have places before the step and behind it
        found, lost = self._evidence(number, queued) if placed else (_lost(step), None)
        before, right = self.attempts.get(number, 0), found is None or found.right
        # What is finished has been used since it changed, if it has: T is known from A alone then.
        changed = (right or before) and self._finished_before(number)
        in_vain = right and not changed
        if in_vain and found is None:  # A is not finite, or what was made of it
            self.innocent = INNOCENT
            return None
        if in_vain and found and (before or self.innocent):
            self.innocent += 1
            if self.convicted.get(number) == []:  # done again in vain
                del self.convicted[number]
            self.findings.proved(found)
            self.sums.status[number] = JUDGED  # the end need not ask for that again
            return None
        if self._is_left(number):  # what was found before may come out the same every time
            del self.convicted[number]
            return None
        self.attempts[number] = before + 1
        again = self._taken_back(number if before_it else 0, queued, orders, None if before or changed else lost)
        if again:
            self._carry(again, int(info[0]))
        if in_vain:
            self.convicted[number] = []
        elif found and not found.right:
            rows, columns = (tuple(sorted(lines)) for lines in (found.rows, found.columns))
            text = f"columns {self.steps[again].j} on computed again, {queued - number} steps late"
            kind = "element" if found.count == 1 else "block"
            fault = Fault(FACTORS, kind, rows, columns, found.count, found.magnitude, text)
            self.convicted.setdefault(number, []).append(fault)
        return again

    def _begin_of(self, number: int) -> int:
        """The first column of a step, or the end of the last one."""
        return self.steps[number].j if number < len(self.steps) else self.plan.K

    def _rest(self, queued: int) -> int:
        """The first column behind the panels that are factored."""
        return self.steps[queued].j1 if queued < len(self.steps) else self.plan.K

    # -- suspicion --

    def _is_fine(self, number: int) -> bool:
        """Whether a step that is in doubt is fine by the norms of its lines, which its checks have computed then."""
        status, of_sides = int(self.sums.status[number]), self._looked(number).swapaxes(0, 1)
        return self.may_be_fine(number) and not any(
            np.any(suspected(status, side, residual, bound, squares, self.dtype))
            for side, (residual, bound, squares) in enumerate(of_sides)
        )

    def _looked(self, number: int) -> Any:
        """Residuals and bounds of a step's rows and columns, and squares of the norms of what was added up in them."""
        width = self.steps[number].width
        return self.sums.looked[number % KEPT, : 6 * width].reshape(3, 2, width)

    # -- evidence --

    def _evidence(self, number: int, queued: int) -> tuple[Evidence | None, list[int] | None]:
        """Compare L(j:, J) U(J, J) and L(J, J) U(J, j1:) with what A and the factors so far make of them; None where
        nothing is known of that, for it is not finite. And columns of the rest in which U, since then, is larger than
        what A and U were before; None where that does not help, for rows are where no order says."""
        import cupy
        from cupy.cuda import runtime

        step, (m, n) = self.steps[number], self.W.shape
        (j, j1), b = step, step.width
        record = cupy.empty(COUNTS + -(-(m + 2 * n) // WORD), np.uint64)
        (order0, places0), (order1, places1) = self.plan.order(j), self.plan.order(j1)
        self._bring_left(j)
        runtime.memsetAsync(record.data.ptr, 0, record.nbytes, self.stream.ptr)
        panel, L, corner, U = (self._empty(*shape) for shape in ((m - j, b), (m - j, b), (b, b), (b, b)))
        self._from_A(order0 + 4 * j, slice(j, j1), panel)
        self._subtract(self.W[j:, :j], self.W[:j, j:j1], panel)
        came = cupy.empty(b, np.int32)
        values = "W", self.plan.ld, m, j, b, order0, places0, order1, places1
        more = *(x.data.ptr for x in (came, L, corner, U)), largest_multiplier(FLOATS[self.dtype]), record.data.ptr
        self._evidence_kernel("step_factors", evidence_config.step_factors(m - j, b), *values, *more)
        self._subtract(L, U, panel)
        self._judge(panel, step, j, record)
        if j1 < n:
            rows = self._empty(b, n - j1)
            self._from_A(order1 + 4 * j, slice(j1, n), rows)
            self._subtract(self._left(came, j), self.W[:j, j1:], rows)
            self._subtract(corner, self.W[j:j1, j1:], rows)
            self._judge(rows, step, j1, record)
        rest, e = self._rest(queued), self._begin_of(queued)
        if rest < n:
            to = record.data.ptr + WORD * COUNTS + m + n + rest
            launch = evidence_config.by_columns(n - rest)
            self._evidence_kernel("grown_columns", launch, "W", self.plan.ld, j, e, rest, "column_largest", GROWN, to)
        told = to_host(record)
        flags = told[COUNTS:].view(np.uint8)[: m + 2 * n]
        parts = flags[:m], flags[m : m + n], flags[m + n :]
        of_rows, of_columns, lost = (set(np.flatnonzero(x).tolist()) for x in parts)
        if told[UNBOUNDED]:
            return None, None
        found = Evidence()
        if wrong := int(told[WRONG]) or int(told[LARGE_MULTIPLIERS]):
            # A large multiplier has cost its row in every column.
            columns = of_columns if told[WRONG] else set(range(j, j1))
            farthest = float(told[FARTHEST : FARTHEST + 1].view(np.float64)[0])
            found = Evidence(rows=of_rows, columns=columns, count=wrong, magnitude=farthest)
        else:
            self._compare(found, step, came, L, corner, U)
        return found, None if told[LARGE_MULTIPLIERS] else sorted(lost)

    def _compare(self, found: Evidence, step: Step, came: Array, L: Array, corner: Array, U: Array) -> None:
        """Compare the same again with an error far below rounding, where the kernels have found nothing wrong: their
        bound is of whole columns, and takes their own rounding into account."""
        (j, j1), (m, n), W = step, self.W.shape, self.W
        order0, order1 = (self.plan.order(k)[0] for k in step)
        pivots = np.abs(to_host(U.diagonal()).astype(np.float64))
        X = self._empty(m - j, step.width)
        self._from_A(order0 + 4 * j, slice(j, j1), X)
        compare_sum(found, X, (W[j:, :j], L), (W[:j, j:j1], U), pivots, (j, j))
        if j1 < n:
            X = self._empty(step.width, n - j1)
            self._from_A(order1 + 4 * j, slice(j1, n), X)
            of_rows = self._left(came, j), corner
            compare_sum(found, X, of_rows, (W[:j, j1:], W[j:j1, j1:]), np.ones(n - j1), (j, j1))

    def _judge(self, residual: Array, step: Step, c0: int, found: Array) -> None:
        """Of the rows from j on."""
        (j, j1), (p, q) = step, residual.shape
        values = residual.data.ptr, p, p, "W", self.plan.ld, self.plan.m, j, j1 - j, c0, j, "column_largest"
        more = *evidence_config.judged_by(self.dtype, j1), found.data.ptr
        self._evidence_kernel("judge_elements", evidence_config.by_columns(q), *values, *more)

    # -- the way back --

    def _taken_back(self, number: int, queued: int, orders: Any, lost: list[int] | None) -> int:
        """Make W what the step found, from what updates have left but for columns that are `lost`, or from A alone; the
        number of the step, or 0 where that cannot be."""
        import cupy

        (j, _), (m, n) = self.steps[number], self.W.shape
        self.sums.status[number:] = 0
        for done in self.steps[number:queued]:
            self.findings.multiplications += float(m - done.j) * (n - done.j) * done.width
        if not number:
            return 0
        self._bring_left(j)
        e, e1 = self._begin_of(queued), self._rest(queued)
        moved = (orders != orders[:1]).any(axis=0)
        moved[:j], moved[j:e] = False, True
        from_A, again = float(m - j) * (n - j) * j, float(np.count_nonzero(moved)) * (n - e1) * j
        undone = float(m - e) * (n - e1) * (e - j) + again + float(m - j) * (e1 - j + len(lost or ())) * j
        if lost is not None and len(lost) <= LOST and undone + MEANWHILE < from_A:
            at = np.flatnonzero(moved)
            self._undo(j, e, e1, *cupy.asarray(np.array([at, orders[0][at]], np.int32)))
            for c in lost:
                self._rebuild(slice(c, c + 1), j)
            self.findings.multiplications += undone
        else:
            self._rebuild(slice(j, n), j)
            self.findings.multiplications += from_A
        return number

    def _undo(self, j: int, e: int, e1: int, moved: Array, rows: Array) -> None:
        """T from T', but for columns in which that has lost it: rows of A that have moved to these places are computed
        from A. Memory is got before W is changed."""
        left, X_of_all = self._left(moved, j), self._empty(len(moved), min(ACROSS, max(0, self.plan.n - e1)))
        for c0 in range(e1, self.plan.n, ACROSS):
            columns = slice(c0, min(c0 + ACROSS, self.plan.n))
            X = X_of_all[:, : columns.stop - c0]
            self._add(1.0, self.W[e:, j:e], self.W[j:e, columns], self.W[e:, columns])
            self._from_A(rows.data.ptr, columns, X)
            self._subtract(left, self.W[:j, columns], X)
            self._take(X, 0, self.W[:, columns], len(moved), moved.data.ptr)
        self._rebuild(slice(j, e1), j)

    def _rebuild(self, columns: slice, j: int) -> None:
        """W(j:, columns) from A: what step j:j1 found there."""
        order, _ = self.plan.order(j)
        here = self.W[j:, columns]
        self._from_A(order + 4 * j, columns, here)
        self._subtract(self.W[j:, :j], self.W[:j, columns], here)

    def _carry(self, number: int, info: int) -> None:
        """What was carried into the step. `info`: what steps have found so far."""
        from cupy.cuda import runtime

        size, stream = WORD * (self.plan.m + self.plan.n + STATE), self.stream.ptr
        kept = self.buffers["kept"] + size * (number % KEPT)
        runtime.memcpyAsync(self.run.where["carried_S"], kept, size, runtime.memcpyDeviceToDevice, stream)
        if info > self.steps[number].j:  # no zero pivot has been seen behind
            runtime.memsetAsync(self.run.where["info"], 0, WORD, stream)
        runtime.memsetAsync(self.buffers["started"], 0, self.buffers.started.nbytes, stream)

    # -- finished lines --

    def finished(self) -> bool:
        """Whether lines of finished factors were found that have changed since they were checked, or whose sums have;
        they are computed again. All is done, and is to be verified again then."""
        state = self.buffers.state
        with current(self.stream):
            found = self._repaired_lines(self.plan.K)
            state[:] = from_host(np.array(self.plan.initial_state()), state)
            self.run.behind(self.stream.ptr)
        return found

    def _finished_before(self, number: int) -> bool:
        """The same of what is finished before a step."""
        j = self.steps[number].j
        if not j:
            return False
        self._bring_left(j)
        for name in ("sum_again", "compare_sums"):
            self._task(name, j)
        return self._repaired_lines(j)

    def _repaired_lines(self, K: int) -> bool:
        """Compute lines of the first K columns' factors again whose sums have changed, their rows in order when so many
        are factored; whether something was wrong with any. What was verified is to be counted again."""
        from cupy.cuda import runtime

        verified, sums = self.sums.on_device("verified"), self.buffers.line_sums
        runtime.memsetAsync(verified.data.ptr, 0, verified.nbytes, self.stream.ptr)
        self.unchanged = {"g": 0, "y": 0}
        order, told = self._on_host(self.buffers.order[self.plan.schedule.snapshot(K)], sums)
        if not _is_order(order):
            return False
        w, differs, at = self.sums.on_host("w")[order], told[-1, :K], self.plan.order(K)[0]
        rows, columns = (np.flatnonzero((differs != 0) & (differs != other)) for other in (COLUMN, ROW))
        if not 0 < rows.size + columns.size <= LINES:
            return False
        with np.errstate(all="ignore"):
            changed = [self._row(r, at, told) for r in rows.tolist()]  # first: columns are divided by their pivots
            changed += [self._column(c, w[c:], at, told) for c in columns.tolist()]
        return any(changed)

    def _row(self, r: int, rows_of_A: int, told: Any) -> bool:
        """U(r, r:) = (PA)(r, r:) - L(r, :r) U(:r, r:), where it is not that; else its y is wrong, or nothing is.
        `rows_of_A`: address of the order. `told`: `line_sums`, on the host."""
        n, (_, y, _, again) = self.plan.n, told[:4, r]
        line = _Line("y", (r, r), self.W[r : r + 1, r:], self.sums.on_host("v")[r:], 0.0, y, again)
        new = self._empty(1, n - r)
        self._from_A(rows_of_A + 4 * r, slice(r, n), new)
        part = self._copied(new)
        self._subtract(self.W[r : r + 1, :r], self.W[:r, r:], new)
        here, new = self._on_host(line.here, new)  # and `part`
        return self._settle(line, here, new, part)

    def _column(self, c: int, w: Any, rows_of_A: int, told: Any) -> bool:
        """L(c+1:, c) = ((PA)(c+1:, c) - L(c+1:, :c) U(:c, c)) / u_cc, where it is not that; else its g is wrong, or
        nothing is. `w`: the weights of rows from c on."""
        if c + 1 == self.plan.m:  # no elements: nothing tells whose fault it is
            return False
        g, _, again, _ = told[:4, c]
        line = _Line("g", (c + 1, c), self.W[c + 1 :, c : c + 1], w[1:], float(w[0]), g, again)
        new = self._empty(self.plan.m - c - 1, 1)
        self._from_A(rows_of_A + 4 * (c + 1), slice(c, c + 1), new)
        part = self._copied(new)
        self._subtract(self.W[c + 1 :, :c], self.W[:c, c : c + 1], new)
        here, new, pivot = self._on_host(line.here, new, self.W[c : c + 1, c])  # and `part`
        divisor = pivot[0] or 1.0  # under a zero pivot there are zeros, which are not divided
        return self._settle(line, here, np.clip(new / divisor, -1.0, 1.0), part / divisor)

    def _settle(self, line: _Line, here: Any, new: Any, part: Any) -> bool:
        """Replace elements of a line that are not what was computed again, but for rounding of their size in A and now;
        where there are none its sum was wrong. Whether something was wrong: nothing is, and the line is counted as
        `unchanged`, where both sums, and that of the line as it is here, differ by no more than another order of
        addition explains.

        `here`: the line, in page-locked memory; `new`: computed again; `part`: A's elements."""
        (name, first, _, weights, own, kept, again), at = line, line.first[1]
        off, terms = abs(kept - again), here.ravel().astype(np.float64) * weights
        total, bound = own + float(np.sum(terms)), changed_bound(norm(terms) + abs(own), weights.size)
        if math.isfinite(bound) and max(off, abs(total - kept), abs(total - again)) <= bound:
            self.unchanged[name] += 1
            return False
        sums = getattr(self.buffers, name)
        sizes = np.maximum(np.abs(new), np.abs(part)).astype(np.float64)
        reach = math.sqrt(at + FLOOR_TERMS) * np.maximum(sizes, np.mean(sizes))
        differ, distance = differing(here, new, factored_element(FLOATS[self.dtype], reach, at + 1))
        if differ.any():
            np.copyto(here, new, where=differ, casting="same_kind")
            self._put(here, line.here)
            sums[at] = own + float(np.sum(here.ravel().astype(np.float64) * weights))
            self.findings.wrong_elements(differ, distance, first)
        else:
            sums[at] = again
            self.findings.wrong_sums(name, [at], float(off))
        return True


def suspected(status: int, side: int, residual: Any, bound: Any, squares: Any, dtype: str) -> Any:
    """Which rows (side 0) or columns of a step are not fine, as `LuChecksums` judges them: where norms that were
    estimated do not do, by computed ones; True where the step is not fine for another reason.

    `residual`, `bound`: of those lines, as the step's judge left them. `squares`: of the norms.
    """
    if status & ~(ROW | COLUMN) != JUDGED:
        return True
    if not status & (ROW, COLUMN)[side]:
        return False
    runs = LineCheck.relative_to_median(residual, bound, USUAL, LEAST).suspected
    norms = factored_bound(FLOATS[dtype], np.sqrt(squares), -FLOOR_TERMS, 0.0)
    return ~LineCheck.relative_in_runs(residual, COMPUTED * (bound + norms), runs, USUAL, COMPUTED_LEAST).ok


def _lost(step: Step) -> Evidence:
    """That a step is wrong whose rows have no places."""
    return Evidence(columns=set(range(*step)), count=step.width, magnitude=float("nan"))


def _is_order(order: Any) -> bool:
    """Whether each row has one place."""
    seen = np.zeros(order.size, bool)
    if (order.view(np.uint32) >= order.size).any():  # and so are negative ones
        return False
    seen[order] = True
    return bool(seen.all())
