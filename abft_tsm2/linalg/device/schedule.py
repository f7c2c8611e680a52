"""Which operations factor a matrix on a GPU, on which streams, and which of them wait for which.

P A = L U by steps of one to four panels, with one step of look-ahead: the columns of the next step are brought up to
date first, so that its panels, which are bound by latency, run beside the product that is bound by arithmetic. Every
panel exchanges rows in its own columns alone; what lies right of a step follows as one permutation, what lies left of
it as one at the very end. The checks of a step follow behind on a stream of their own.

A schedule is a list of plain numbers: `plan` makes launches of it, and a test runs it in any order that its streams
and events allow. Where the verdicts of steps are read on the way, the list has a part for each step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

PANEL = 128  # columns that one kernel factors
MAIN, PANELS, LEFT, ROWS, PRODUCTS, CHECKS = LANES = "main", "panels", "left", "rows", "products", "checks"
"""Streams: the caller's; panels and what they wait for; exchanges left of a panel, within its step; exchanges and rows
of U of the other columns; their products; the checks."""

STAGES = "encoded", "panel", "swapped", "solved", "updated", "finished", "factored"
"""Where a caller's hook is called: as the stages of `abft_tsm2.linalg.blocked`, by their numbers in a task."""


class Task(NamedTuple):
    """An operation on a stream. Its numbers are those of its method in `Schedule`, or of an event."""

    lane: str
    name: str
    numbers: tuple[int, ...] = ()


class Segment(NamedTuple):
    """Tasks start:stop, which are queued together.

    Attributes
    ----------
    start, stop : int
    whole : bool
        Whether all streams are joined before and after it, so that it may be recorded.
    """

    start: int
    stop: int
    whole: bool


class Step(NamedTuple):
    """Columns j:j1 of one step."""

    j: int
    j1: int

    @property
    def width(self) -> int:
        return self.j1 - self.j

    @property
    def panels(self) -> list[tuple[int, int]]:
        """First column and width of each."""
        return [(k, min(PANEL, self.j1 - k)) for k in range(self.j, self.j1, PANEL)]


LATE = 8 * PANEL, 8  # columns, or a part of all, behind those whose rows and sums are settled early
SETTLED = 3  # steps until the verdict on one is known wherever it is read on the way

# Measured on an H200. Wide steps while products rule, for they are faster with longer inner dimensions; one panel where
# its latency rules.
WIDE, HALF, LARGE, CHUNK = 8192, 5120, 12288, 2048


def steps_of(m: int, n: int) -> list[Step]:
    """Steps of 512, 256 or 128 columns, by the height that is left."""
    K, found, j = min(m, n), [], 0
    while j < K:
        left = m - j
        width = 4 * PANEL if left > WIDE and K > LARGE else 2 * PANEL if left > HALF else PANEL
        found.append(Step(j, min(j + width, K)))
        j = found[-1].j1
    return found


class Schedule:
    """The operations of one factorisation.

    Parameters
    ----------
    m, n : int
    encoded, checked : bool
        Whether the factors are certified at the end, and whether each step is checked on the way.
    tracked : bool
        Whether the verdicts of steps are read while later ones are under way.
    staged : bool
        Whether a caller's hook sees what each operation has made: no look-ahead, and a task "stage" where it is called.
    in_place : bool
        Whether the factors take the place of A, which is encoded first then.
    steps : list of Step, optional
    chunk : int, optional
        Columns of a product. The exchanges of one chunk run beside the product of another.

    Attributes
    ----------
    tasks : list of Task
        Those that a stream does one after the other, in an order in which a host may queue all of them.
    prefix, prefix_events : int
        How many tasks, and events, come first that read A itself.
    parts : list of Segment
        Of the tasks behind the prefix: one, or those of each step and of what follows the last.
    panels : list of slice
        The tasks that factor the panels of each step.
    certificate : slice
        Those that verify the finished factors.
    early : int
        Columns whose rows are brought into order while the last panels are factored, which leave most of a card idle,
        and whose sums are taken then where no step does that; 0 where there are too few of them, or a hook is to see
        rows where each step has left them.
    still : int
        How many steps are done before rows of finished columns move, but for exchanges within a step.
    """

    def __init__(
        self,
        m: int,
        n: int,
        *,
        encoded: bool = True,
        checked: bool = False,
        tracked: bool = False,
        staged: bool = False,
        in_place: bool = False,
        steps: list[Step] | None = None,
        chunk: int | None = None,
    ) -> None:
        self.m, self.n, self.encoded, self.checked, self.steps = m, n, encoded, checked, steps or steps_of(m, n)
        self._numbers = {step.j: number for number, step in enumerate(self.steps)}
        self.tracked, self.staged, self.in_place = tracked, staged, in_place
        self.early, self.still = self._early_columns()
        self.chunk = chunk or (CHUNK if n > LARGE and not staged else n)
        self.tasks: list[Task] = []
        self.parts: list[Segment] = []
        self.panels: list[slice] = []
        self.events = 0
        self._updated: list[tuple[int, int, int]] = []  # columns that the last step has updated by then: an event
        self._factor()

    def snapshot(self, k: int) -> int:
        """The number of the order of rows when k columns were factored."""
        return -(-k // PANEL)

    def number_of(self, j: int) -> int:
        """Of the step that begins with a column."""
        return self._numbers[j]

    @property
    def ends(self) -> list[int]:
        """The first column behind the step of each panel."""
        return [step.j1 for step in self.steps for _ in step.panels]

    def _early_columns(self) -> tuple[int, int]:
        """`early` and `still`: no step before these columns can be done again any more when their rows move."""
        K, count = min(self.m, self.n), len(self.steps)
        late = max(LATE[0], K // LATE[1])
        for still, step in enumerate(self.steps[: -SETTLED - 1], SETTLED):
            if not self.staged and K - step.j1 <= late and 2 * step.j1 >= K:
                return step.j1, still
        return 0, count

    # -- streams --

    def _add(self, lane: str, name: str, *numbers: int) -> None:
        self.tasks.append(Task(lane, name, numbers))

    def _record(self, lane: str) -> int:
        self._add(lane, "record", self.events)
        self.events += 1
        return self.events - 1

    def _wait(self, lane: str, *events: int) -> None:
        for event in events:
            self._add(lane, "wait", event)

    def _wait_on(self, lanes: Iterable[str], event: int) -> None:
        for lane in lanes:
            self._wait(lane, event)

    def _wait_for_columns(self, lane: str, c0: int, c1: int) -> None:
        self._wait(lane, *(event for first, last, event in self._updated if first < c1 and c0 < last))

    def _join(self, *, last_checks: bool = True) -> None:
        for lane in LANES[1:]:
            self._wait(MAIN, self._record(lane) if lane != CHECKS or last_checks else self._before_last)

    def _fork(self) -> int:
        forked = self._record(MAIN)
        self._wait_on(LANES[1:], forked)
        return forked

    def _end_part(self, whole: bool) -> None:
        self.parts.append(Segment(self.parts[-1].stop if self.parts else self.prefix, len(self.tasks), whole))

    def _stage(self, name: str, step: Step | None = None) -> None:
        """Where a hook is called, which sees all that has been queued, and nothing of what follows."""
        if self.staged:
            self._join()
            self._add(MAIN, "stage", STAGES.index(name), *(step or ()))
            self._fork()

    # -- the factorisation --

    def _factor(self) -> None:
        first = self.steps[0]
        self._add(MAIN, "begin")
        self._add(MAIN, "measure", 0, first.j1)
        self._wait_on((ROWS, CHECKS), self._record(MAIN))
        if first.j1 < self.n:  # the rest is copied while the first panels are factored
            self._add(ROWS, "measure", first.j1, self.n)
        measured = self._record(ROWS)
        if self.encoded:
            self._wait(CHECKS, measured)
            self._add(CHECKS, "encode")
        encoded = self._record(CHECKS)
        if self.in_place:
            self._wait(MAIN, encoded)
        self._stage("encoded")
        self.prefix, self.prefix_events = len(self.tasks), self.events
        self._fork()
        self._wait(ROWS, measured)
        self._wait(CHECKS, encoded)
        self._updated = [(first.j1, self.n, measured)]
        done, whole = self._panels(first), True
        for step, following in zip(self.steps, [*self.steps[1:], None], strict=True):
            done = self._step(step, following, done)
            if self.tracked:
                done, whole = self._end_step(step, following, done, whole)
        if not self.tracked:  # the checks of the last step go on beside what follows
            self._join(last_checks=self.staged or not self.encoded)
        self._stage("finished" if self.checked else "factored")
        if self.m > first.j1 and len(self.steps) > 1:
            self._left(MAIN, min(self.m, self.n))
        start = len(self.tasks)
        if self.encoded:
            self._certify()
        self._add(MAIN, "bring")
        self.certificate = slice(start, len(self.tasks))
        self._end_part(True)

    def _end_step(self, step: Step, following: Step | None, factored: int, whole: bool) -> tuple[int, bool]:
        """The step's part. Its streams are joined, so that the part can be recorded, but where steps are so long that a
        host queues them in time, and where products come in chunks, which are to run on beside the next panels."""
        if following and self.chunk < self.n and following.width > PANEL:
            self._end_part(False)
            return factored, False
        self._join()
        self._end_part(whole)
        if not following:
            return factored, True
        self._updated = []
        return self._fork(), True

    def _certify(self) -> None:
        """Verify the finished factors, whose sums come from the steps or are taken first, by a read of all of them that
        takes these sums again: where they have not changed, those that are multiplied are of these factors."""
        self._wait(PANELS, self._record(MAIN))
        self._add(PANELS, "replay_pivots")
        replayed = self._record(PANELS)
        if not self.checked:
            self._add(MAIN, "sum_factors", self.early, min(self.m, self.n))
        if not self.tracked:
            self._wait(MAIN, self._record(CHECKS))
        self._wait(CHECKS, self._record(MAIN))
        self._add(CHECKS, "count_growth")
        counted = self._record(CHECKS)
        self._add(MAIN, "multiply_sums")
        self._wait(CHECKS, self._record(MAIN))
        self._add(CHECKS, "compare_sums", min(self.m, self.n))
        compared = self._record(CHECKS)
        self._wait(MAIN, counted, replayed)
        self._add(MAIN, "judge_factors")
        self._add(MAIN, "see_all")
        self._wait(MAIN, compared)

    def _step(self, step: Step, following: Step | None, factored: int) -> int:
        """What follows from the panels J = j:j1, which are factored at that event; returns that of the next ones."""
        m, n, (j, j1) = self.m, self.n, step
        solved, begun = [], []  # events: rows of U are done; the next panel has the multiprocessors that it needs
        ahead = None if self.staged else following
        next_factored, last = factored, ahead.j1 if ahead else j1
        if self.tracked:
            self._add(CHECKS, "keep_sums", j)
        if ahead:
            # N: the columns of the next step. U(J, N) = L(J, J)^-1 A(J, N), A(j1:, N) -= L(j1:, J) U(J, N); its panels
            self._wait_for_columns(PANELS, j1, last)
            if step.width <= PANEL:
                self._add(PANELS, "exchange_solve", j, step.width, j1, last)
            else:
                self._solve(PANELS, step, j1, last)
            solved.append(self._record(PANELS))
            self._product(PANELS, step, j1, last)
            updated = self._record(PANELS)
            next_factored = self._panels(ahead)
        if last < n:
            cuts = sorted({last, n, *range(-(-last // self.chunk) * self.chunk, n, self.chunk)})
            alone = len(cuts) == 2
            self._wait(ROWS, updated if ahead and alone else factored)
            chunks = []
            for c0, c1 in itertools.pairwise(cuts):
                self._wait_for_columns(ROWS, c0, c1)
                self._solve(ROWS, step, c0, c1)
                solved.append(self._record(ROWS))
                if j1 < m:
                    self._wait(PRODUCTS, solved[-1])
                    if ahead and alone:
                        self._add(PRODUCTS, "gate", ahead.j)
                        begun = [self._record(PRODUCTS)]
                    self._product(PRODUCTS, step, c0, c1)
                    chunks.append((c0, c1, self._record(PRODUCTS)))
            self._updated = chunks
        self._stage("updated", step)
        if not following:
            self._before_last = self._record(CHECKS)
        self._wait(CHECKS, *begun)
        if self.checked:
            self._wait(CHECKS, factored)
            self._add(CHECKS, "column_sums", j, step.width)
            if j1 < n:
                self._wait(CHECKS, *solved)
                self._add(CHECKS, "row_sums", j, step.width)
            self._add(CHECKS, "judge_step", j, step.width)
            if self.tracked:
                self._add(CHECKS, "line_squares", j, step.width)
            if j1 < m:
                self._add(CHECKS, "advance", j, step.width)
        if self.number_of(j) == self.still:
            self._wait(CHECKS, factored, self._record(ROWS))
            self._left(CHECKS, self.early)
            self._add(CHECKS, "left_done", self.early)
            if self.encoded and not self.checked:
                self._add(CHECKS, "sum_factors", 0, self.early)
        if following and not ahead:
            self._wait_for_columns(PANELS, j1, following.j1)
            next_factored = self._panels(following)
        return next_factored

    def _left(self, lane: str, k: int) -> None:
        """Bring the rows of columns :k into their order when so many are factored."""
        self._add(lane, "left_map", k)
        self._add(lane, "left_rows", k)

    def _panels(self, step: Step) -> int:
        """Factor the panels of a step, right-looking between them; the event when they are done."""
        start = len(self.tasks)
        for k, b in step.panels:
            self._add(PANELS, "panel", k, b)
            if k > step.j:  # rows of the panels left of this one, beside what follows
                self._wait(LEFT, self._record(PANELS))
                self._add(LEFT, "exchange_rows", k, b, step.j, k, 0)
            if k + b < step.j1:
                self._add(PANELS, "exchange_solve", k, b, k + b, step.j1)
                self._product(PANELS, Step(k, k + b), k + b, step.j1)
        if len(step.panels) > 1:
            self._wait(PANELS, self._record(LEFT))
        factored = self._record(PANELS)
        self._stage("panel", step)
        self.panels.append(slice(start, len(self.tasks)))
        return factored

    def _solve(self, lane: str, step: Step, c0: int, c1: int) -> None:
        """U(J, c0:c1) = L(J, J)^-1 G, G the rows that become pivot rows: by substitution, panel by panel."""
        self._add(lane, "exchange_rows", step.j, step.width, c0, c1, 1)
        self._stage("swapped", step)
        for k, b in step.panels:
            self._add(lane, "solve_rows", step.j, step.width, k, b, c0, c1)
            if k + b < step.j1:
                self._add(lane, "substitute", step.j, step.width, k, b, c0, c1)
        self._stage("solved", step)

    def _product(self, lane: str, step: Step, c0: int, c1: int) -> None:
        """A(j1:, c0:c1) -= L(j1:, J) U(J, c0:c1)."""
        if step.j1 < self.m:
            self._add(lane, "update", step.j, step.width, c0, c1)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)
