"""A machine that does the tasks of a schedule of LU with NumPy, in any order that its streams and events allow."""

from __future__ import annotations

import itertools
from collections import deque

import numpy as np
from scipy import linalg

from abft_tsm2.linalg.device.buffers import KEPT
from abft_tsm2.linalg.device.schedule import LANES, MAIN, STAGES, Schedule, Step, Task

ALONE = -1  # the event by which tasks are queued alone


class Machine:
    """Does the tasks of a schedule; the next one is of any stream that does not wait."""

    def __init__(self, A, schedule: Schedule, rng) -> None:
        self.A, self.W, self.schedule, self.rng = A, np.full_like(A, np.nan), schedule, rng
        (self.m, self.n), self.K = A.shape, min(A.shape)
        self.order = {0: np.arange(self.m)}
        self.piv = np.full(self.K, -1)
        self.inverse, self.gathered, self.recorded = {}, {}, set()
        self.w, self.v = rng.choice([-1.5, -1.0, 1.0, 1.5], self.m), rng.choice([-1.5, -1.0, 1.0, 1.5], self.n)
        self.S = self.Z = None
        (self.g, self.y, self.g_again, self.y_again), self.right = np.full((4, self.K), np.nan), 0.0
        self.residuals, self.measured, self.kept, self.looked, self.stages = [], [], {}, {}, []
        self.ends = {}  # by columns: when their rows were in the order that they are in now
        self.latest, self.fresh, self.done = {}, itertools.count(), []

    def run(self, tasks: list[Task]) -> None:
        queues, self.done = {}, []  # the places in the list of what has run
        for place, task in enumerate(tasks):
            queues.setdefault(task.lane, deque()).append((place, self.of_now(task)))
        favourites = [str(lane) for lane in self.rng.permutation(list(queues))]
        while favourites:
            ready = [lane for lane in favourites if self.may_run(queues[lane][0][1])]
            assert ready, "every stream waits"
            lane = ready[0] if self.rng.random() < 0.9 else self.rng.choice(ready)
            self.place, task = queues[lane].popleft()
            if not queues[lane]:
                favourites.remove(lane)
            of_lane = (lane.partition(" ")[0],) if task.name in ("exchange_rows", *SOLVES) else ()
            getattr(self, task.name)(*of_lane, *task.numbers)
            self.done.append(self.place)

    def of_now(self, task: Task) -> Task:
        """An event that is recorded again is another one; a wait is for the one that was queued last before it."""
        if task.name == "record":
            self.latest[task.numbers[0]] = next(self.fresh)
        return task._replace(numbers=(self.latest[task.numbers[0]],)) if task.name in ("record", "wait") else task

    def may_run(self, task: Task) -> bool:
        return task.name != "wait" or task.numbers[0] in self.recorded

    def record(self, event) -> None:
        self.recorded.add(event)

    def begin(self) -> None:
        self.W[:], self.measured, self.ends = np.nan, [], {(step.j, step.j1): step.j1 for step in self.schedule.steps}
        self.forget(0)

    def wait(self, event) -> None: ...
    def gate(self, k) -> None: ...
    def left_map(self, k) -> None: ...
    def left_done(self, k) -> None: ...
    def bring(self) -> None: ...

    def stage(self, name, *step) -> None:
        """A hook sees what all that was queued before it has made, and nothing of what follows."""
        assert sorted(self.done) == list(range(self.place))
        self.stages.append((STAGES[name], *step))

    def keep_sums(self, j) -> None:
        self.kept[self.schedule.number_of(j) % KEPT] = self.S.copy(), self.Z.copy()

    def forget(self, j) -> None:
        """What was made of columns from j on."""
        self.order = {k: x for k, x in self.order.items() if k <= self.schedule.snapshot(j)}
        self.inverse = {k: x for k, x in self.inverse.items() if k < j}
        self.piv[j:], self.g[j:], self.y[j:], self.right, self.gathered = -1, np.nan, np.nan, np.nan, {}

    def take_back(self, number) -> None:
        """Make W, S and Z what a step found, W from A."""
        W, j = self.W, self.schedule.steps[number].j
        self.order_left(j)
        W[j:, j:] = self.A[self.at(j)[j:], j:] - W[j:, :j] @ W[:j, j:]
        self.S, self.Z = (x.copy() for x in self.kept[number % KEPT])
        self.forget(j)

    def measure(self, c0, c1) -> None:
        self.W[:, c0:c1] = self.A[:, c0:c1]
        self.measured.append((c0, c1))

    def encode(self) -> None:
        assert sum(c1 - c0 for c0, c1 in self.measured) == self.n
        self.S, self.Z = self.A @ self.v, self.w @ self.A

    def replay_pivots(self) -> None:
        assert (self.piv >= 0).all()

    @property
    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        return np.tril(self.W[:, : self.K], -1) + np.eye(self.m, self.K), np.triu(self.W[: self.K])

    def sum_factors(self, first, last) -> None:
        L, U = self.factors
        for (c0, c1), end in self.ends.items():
            lines = slice(max(c0, first), min(c1, last))
            self.g[lines] = self.w[self.at(end)] @ L[:, lines]
        self.y[first:last] = U[first:last] @ self.v

    def multiply_sums(self) -> None:
        L, U = self.factors
        self.Ly, self.gU = L @ self.y, self.g @ U
        self.g_again, self.y_again = self.w[self.at(self.K)] @ L, U @ self.v

    def count_growth(self) -> None:
        assert np.isfinite(self.y).all()

    def see_all(self) -> None:
        assert np.isfinite(self.gU).all()

    def compare_sums(self, last: int) -> None:
        assert last == self.K
        self.residuals += [np.abs(self.g - self.g_again).max(), np.abs(self.y - self.y_again).max()]

    def judge_factors(self) -> None:
        self.residuals += [np.abs(self.Ly - (self.A @ self.v)[self.at(self.K)]).max()]
        self.residuals += [np.abs(self.gU - self.w @ self.A).max()]

    def at(self, k):
        return self.order[self.schedule.snapshot(k)]

    def panel(self, k, b) -> None:
        lu, piv = linalg.lu_factor(self.W[k:, k : k + b]) if k + b <= self.m else (None, None)
        order = self.at(k).copy()
        for i, p in enumerate(piv[:b]):
            order[[k + i, k + p]] = order[[k + p, k + i]]
        self.W[k:, k : k + b], self.piv[k : k + b] = lu, k + piv[:b]
        self.order[self.schedule.snapshot(k + b)] = order
        self.inverse[k] = np.linalg.inv(np.tril(lu[:b], -1) + np.eye(b))

    def moves(self, k, b):
        """Where each row from k on comes from: exactly the 2 b rows that a kernel would touch."""
        before, after = self.at(k), self.at(k + b)
        place = np.argsort(before)
        source = place[after]
        assert (source[:k] == np.arange(k)).all()
        return source

    def exchange_rows(self, lane, k, b, c0, c1, gather) -> None:
        source = self.moves(k, b)
        new = self.W[source, c0:c1]
        self.W[k + b :, c0:c1] = new[k + b :]
        if gather:
            self.gathered[lane] = new[k : k + b]
        else:
            self.W[k : k + b, c0:c1] = new[k : k + b]

    def exchange_solve(self, k, b, c0, c1) -> None:
        new = self.W[self.moves(k, b), c0:c1]
        self.W[k:, c0:c1] = new[k:]
        self.W[k : k + b, c0:c1] = self.inverse[k] @ new[k : k + b]

    def solve_rows(self, lane, j, width, k, b, c0, c1) -> None:
        self.W[k : k + b, c0:c1] = self.inverse[k] @ self.gathered[lane][k - j : k - j + b]

    def substitute(self, lane, j, width, k, b, c0, c1) -> None:
        rows = slice(k + b, j + width)
        self.gathered[lane][k + b - j :] -= self.W[rows, k : k + b] @ self.W[k : k + b, c0:c1]

    def update(self, j, width, c0, c1) -> None:
        j1 = j + width
        self.W[j1:, c0:c1] -= self.W[j1:, j:j1] @ self.W[j:j1, c0:c1]

    def left_rows(self, k) -> None:
        self.order_left(k)

    def order_left(self, j) -> None:
        """Rows of L(:, :j) as they are in order when j columns are factored."""
        for (c0, c1), end in self.ends.items():
            if end <= j:
                source = np.argsort(self.at(end))[self.at(j)]
                self.W[end:, c0:c1] = self.W[source, c0:c1][end:]
                self.ends[c0, c1] = j

    def column_sums(self, j, b) -> None:
        L = np.tril(self.W[j:, j : j + b], -1) + np.eye(self.m - j, b)
        self.g[j : j + b] = self.w[self.at(j + b)[j:]] @ L

    def row_sums(self, j, b) -> None:
        j1 = j + b
        self.right = self.W[j:j1, j1:] @ self.v[j1:]
        self.Z[j1:] -= self.g[j:j1] @ self.W[j:j1, j1:]

    def judge_step(self, j, b) -> None:
        j1 = j + b
        square = self.W[j:j1, j:j1]
        self.y[j:j1] = np.triu(square) @ self.v[j:j1] + (self.right if j1 < self.n else 0.0)
        row = (np.tril(square, -1) + np.eye(b)) @ self.y[j:j1] - self.S[self.at(j1)[j:j1]]
        column = self.g[j:j1] @ np.triu(square) - self.Z[j:j1]
        self.residuals += [np.abs(row).max(), np.abs(column).max()]

    def line_squares(self, j, b) -> None:
        """Lines of the step, left of it and above."""
        rows, found = self.at(j + b)[j : j + b], [self.W[:j, j : j + b].T]
        for (c0, c1), end in self.ends.items():
            if c1 <= j:
                found.append(self.W[np.argsort(self.at(end))[rows], c0:c1])
        self.looked[j] = np.sum(np.hstack(found) ** 2, 1)

    def advance(self, j, b) -> None:
        j1 = j + b
        self.S[self.at(j1)[j1:]] -= self.W[j1:, j:j1] @ self.y[j:j1]


class InPlace(Machine):
    """W is the memory of A, which is encoded as it lies there."""

    def begin(self) -> None:
        super().begin()
        self.W[:] = self.A

    def measure(self, c0, c1) -> None:
        self.measured.append((c0, c1))

    def encode(self) -> None:
        assert sum(c1 - c0 for c0, c1 in self.measured) == self.n
        self.S, self.Z = self.W @ self.v, self.w @ self.W


SOLVES = "solve_rows", "substitute"


def wide_steps(m, n, *widths):
    """Of these widths in turn."""
    found = []
    for width in itertools.cycle(widths):
        j = found[-1].j1 if found else 0
        found.append(Step(j, min(j + width, m, n)))
        if found[-1].j1 == min(m, n):
            return found


def queued(schedule, first=0, stop=None, *, graphs=False) -> list[Task]:
    """The tasks of some parts; graphs: those of whole ones on streams of their own, all but the caller's."""
    tasks = []
    for number, part in list(enumerate(schedule.parts))[first:stop]:
        of_part = schedule.tasks[part.start : part.stop]
        if graphs and part.whole:
            of_part = [t if t.lane == MAIN else t._replace(lane=f"{t.lane} {number}") for t in of_part]
        tasks += of_part
    return tasks


def alone(tasks: list[Task]) -> list[Task]:
    """Tasks for which all streams wait, and for which the caller's waits."""
    others = [lane for lane in LANES if lane != MAIN]
    forks = [Task(MAIN, "record", (ALONE,)), *(Task(lane, "wait", (ALONE,)) for lane in others)]
    joins = [Task(*task, (ALONE,)) for lane in others for task in ((lane, "record"), (MAIN, "wait"))]
    return [*forks, *tasks, *joins]


def error_of_factors(machine: Machine) -> float:
    """How far P A is from L U."""
    W, K = machine.W, machine.K
    P = machine.A.copy()
    for i, p in enumerate(machine.piv):
        P[[i, p]] = P[[p, i]]
    L, U = np.tril(W[:, :K], -1) + np.eye(len(W), K), np.triu(W[:K])
    return float(np.max(np.abs(L @ U - P), initial=0.0))


def error_of(A, schedule, seed, *, graphs=False, machine=Machine) -> float:
    """How far P A is from L U, and the carried sums from what they should be."""
    machine = machine(A, schedule, np.random.default_rng(seed))
    prefix = schedule.tasks[: schedule.prefix]
    with np.errstate(all="ignore"):
        machine.run([*prefix, *queued(schedule, graphs=True)] if graphs else schedule.tasks)
    assert len(machine.residuals) == 4 + schedule.checked * 2 * len(schedule.steps)
    return error_of_factors(machine) + float(np.max(machine.residuals))
