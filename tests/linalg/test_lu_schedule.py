"""The schedule of a GPU's LU, run with NumPy in any order that its streams and events allow."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2.linalg.device.schedule import LANES, PANEL, Schedule, Step, Task, steps_of

SHAPES = [(700, 700), (640, 640), (100, 100), (900, 333), (300, 810), (513, 512), (1, 5), (257, 700)]


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
        self.g, self.y, self.parts = np.full(self.K, np.nan), np.full(self.K, np.nan), 0.0
        self.residuals, self.measured = [], []

    def run(self) -> None:
        queues = {lane: [t for t in self.schedule if t.lane == lane] for lane in LANES}
        favourites = list(self.rng.permutation(LANES))
        while any(queues.values()):
            ready = [lane for lane in favourites if queues[lane] and self.may_run(queues[lane][0])]
            assert ready, "every stream waits"
            lane = ready[0] if self.rng.random() < 0.9 else self.rng.choice(ready)
            task = queues[lane].pop(0)
            getattr(self, task.name)(*((task.lane,) if task.name in ("exchange_rows", *SOLVES) else ()), *task.numbers)

    def may_run(self, task: Task) -> bool:
        return task.name != "wait" or task.numbers[0] in self.recorded

    def record(self, event) -> None:
        self.recorded.add(event)

    def wait(self, event) -> None: ...
    def begin(self) -> None: ...
    def gate(self, k) -> None: ...
    def left_map(self) -> None: ...
    def bring(self) -> None: ...

    def measure(self, c0, c1) -> None:
        self.W[:, c0:c1] = self.A[:, c0:c1]
        self.measured.append((c0, c1))

    def encode(self) -> None:
        assert sum(c1 - c0 for c0, c1 in self.measured) == self.n
        self.S, self.Z = self.A @ self.v, self.w @ self.A

    def replay_pivots(self) -> None:
        assert (self.piv >= 0).all()

    def sum_factors(self, again) -> None:
        L, U = np.tril(self.W[:, : self.K], -1) + np.eye(self.m, self.K), np.triu(self.W[: self.K])
        if again:
            self.Ly, self.gU = L @ self.y_again, self.g_again @ U
        else:
            self.g_again, self.y_again = self.w[self.at(self.K)] @ L, U @ self.v

    def count_growth(self) -> None:
        assert np.isfinite(self.y_again).all()

    def see_all(self) -> None:
        assert np.isfinite(self.g_again).all()

    def compare_sums(self) -> None:
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

    def left_rows(self) -> None:
        for step in self.schedule.steps:
            source = np.argsort(self.at(step.j1))[self.at(self.K)]
            self.W[step.j1 :, step.j : step.j1] = self.W[source, step.j : step.j1][step.j1 :]

    def column_sums(self, j, b) -> None:
        L = np.tril(self.W[j:, j : j + b], -1) + np.eye(self.m - j, b)
        self.g[j : j + b] = self.w[self.at(j + b)[j:]] @ L

    def row_sums(self, j, b) -> None:
        j1 = j + b
        self.parts = self.W[j:j1, j1:] @ self.v[j1:]
        self.Z[j1:] -= self.g[j:j1] @ self.W[j:j1, j1:]

    def judge_step(self, j, b) -> None:
        j1 = j + b
        square = self.W[j:j1, j:j1]
        self.y[j:j1] = np.triu(square) @ self.v[j:j1] + (self.parts if j1 < self.n else 0.0)
        row = (np.tril(square, -1) + np.eye(b)) @ self.y[j:j1] - self.S[self.at(j1)[j:j1]]
        column = self.g[j:j1] @ np.triu(square) - self.Z[j:j1]
        self.residuals += [np.abs(row).max(), np.abs(column).max()]

    def advance(self, j, b) -> None:
        j1 = j + b
        self.S[self.at(j1)[j1:]] -= self.W[j1:, j:j1] @ self.y[j:j1]


SOLVES = "solve_rows", "substitute"


def wide_steps(m, n, width):
    K = min(m, n)
    return [Step(j, min(j + width, K)) for j in range(0, K, width)]


def error_of(A, schedule, seed) -> float:
    """How far P A is from L U, and the carried sums from what they should be."""
    rng = np.random.default_rng(seed)
    machine = Machine(A, schedule, rng)
    with np.errstate(all="ignore"):
        machine.run()
    W, K = machine.W, min(A.shape)
    P = A.copy()
    for i, p in enumerate(machine.piv):
        P[[i, p]] = P[[p, i]]
    assert len(machine.residuals) == 2 + schedule.checked * (2 + 2 * len(schedule.steps))
    L, U = np.tril(W[:, :K], -1) + np.eye(len(W), K), np.triu(W[:K])
    return float(np.max(np.abs(L @ U - P), initial=0.0)) + max(machine.residuals, default=0.0)


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("width", [128, 256, 512])
def test_any_order_that_the_streams_allow_gives_the_factors(m, n, width):
    A = np.random.default_rng(m).standard_normal((m, n))
    for seed in range(2):
        schedule = Schedule(m, n, checked=bool(seed), steps=wide_steps(m, n, width), chunk=(100, 256)[seed])
        assert error_of(A, schedule, seed) < 1e-9


@pytest.mark.parametrize("lane", LANES)
def test_a_stream_that_does_not_wait_is_seen(lane):
    A = np.random.default_rng(0).standard_normal((800, 800))
    schedule = Schedule(800, 800, checked=True, steps=wide_steps(800, 800, 256), chunk=200)
    schedule.tasks = [t for t in schedule.tasks if t.lane != lane or t.name != "wait"]

    def wrong(seed) -> bool:
        try:
            return not error_of(A, schedule, seed) < 1e-9
        except (AssertionError, KeyError, TypeError, ValueError):
            return True  # what it needs is not there

    assert any(wrong(seed) for seed in range(10))


@pytest.mark.parametrize(
    ("m", "n"), [(128, 128), (5000, 5000), (16384, 16384), (20000, 300), (40, 9000), (10007, 10007)]
)
def test_steps_cover_all_columns_in_whole_panels(m, n):
    steps = steps_of(m, n)
    assert [step.j for step in steps] == [0, *(step.j1 for step in steps[:-1])]
    assert steps[-1].j1 == min(m, n)
    assert all(step.j % PANEL == 0 for step in steps)
