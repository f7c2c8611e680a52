"""The schedule of a GPU's LU, run with NumPy in any order that its streams and events allow."""

from __future__ import annotations

import copy
import itertools
from collections import deque

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2.linalg.device.buffers import KEPT
from abft_tsm2.linalg.device.schedule import CHECKS, LANES, MAIN, PANEL, SETTLED, STAGES, Schedule, Step, Task, steps_of

SHAPES = [(700, 700), (640, 640), (100, 100), (900, 333), (300, 810), (513, 512), (1, 5), (257, 700)]
SMALL = [(500, 500), (600, 333), (300, 610)]
WIDTHS = [128, 256, 512]
BIG = [(128, 128), (5000, 5000), (16384, 16384), (20000, 300), (40, 9000), (10007, 10007)]
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
        self.residuals, self.measured, self.kept, self.stages = [], [], {}, []
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


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_any_order_that_the_streams_allow_gives_the_factors(m, n, width):
    A = np.random.default_rng(m).standard_normal((m, n))
    for seed in range(2):
        schedule = Schedule(m, n, checked=bool(seed), steps=wide_steps(m, n, width), chunk=(100, 256)[seed])
        assert error_of(A, schedule, seed, graphs=bool(seed)) < 1e-9


@pytest.mark.parametrize(("m", "n"), SMALL)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("tracked", "staged"), [(True, False), (False, True), (True, True)])
def test_so_do_those_that_are_tracked_or_seen_by_a_hook(m, n, width, tracked, staged):
    A = np.random.default_rng(m).standard_normal((m, n))
    for seed, chunk in enumerate((100, n)):
        how = {"tracked": tracked, "staged": staged, "steps": wide_steps(m, n, width), "chunk": chunk}
        schedule = Schedule(m, n, checked=True, **how)
        assert error_of(A, schedule, seed) < 1e-9
        if not staged:
            assert error_of(A, schedule, seed, graphs=True) < 1e-9


@pytest.mark.parametrize(("m", "n"), SMALL)
@pytest.mark.parametrize("kind", [{}, {"tracked": True}, {"staged": True}])
def test_factors_in_the_place_of_a_matrix_begin_when_it_is_encoded(m, n, kind):
    A, wrong = np.random.default_rng(m).standard_normal((m, n)), 0
    for seed in range(8):
        for in_place in (True, False):
            schedule = Schedule(m, n, checked=True, in_place=in_place, steps=wide_steps(m, n, 256), **kind)
            right = error_of(A, schedule, seed, graphs=not kind.get("staged"), machine=InPlace) < 1e-9
            assert right or not in_place
            wrong += not right
    assert wrong or kind.get("staged")  # there all streams wait before the first panel


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("kind", [{"chunk": 200}, {"tracked": True}, {"tracked": True, "chunk": 200}, {"staged": True}])
def test_a_stream_that_does_not_wait_is_seen(lane, kind):
    A = np.random.default_rng(0).standard_normal((800, 800))
    schedule = Schedule(800, 800, checked=True, steps=wide_steps(800, 800, 256), **kind)
    schedule.tasks = [t for t in schedule.tasks if t.lane != lane or t.name != "wait"]

    def wrong(seed) -> bool:
        try:
            return not error_of(A, schedule, seed) < 1e-9
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            return True  # what it needs is not there

    assert any(wrong(seed) for seed in range(10))


@pytest.mark.parametrize(("m", "n"), BIG)
def test_steps_cover_all_columns_in_whole_panels(m, n):
    steps = steps_of(m, n)
    assert [step.j for step in steps] == [0, *(step.j1 for step in steps[:-1])]
    assert steps[-1].j1 == min(m, n)
    assert all(step.j % PANEL == 0 for step in steps)


@pytest.mark.parametrize(("m", "n"), [*BIG, (2048, 2048), (1024, 1024), (32768, 32768), (30000, 700)])
def test_most_columns_are_settled_early_but_of_steps_that_may_be_done_again(m, n):
    for kind in ({}, {"checked": True, "tracked": True}, {"encoded": False}):
        schedule, K = Schedule(m, n, **kind), min(m, n)
        at = [place for place, task in enumerate(schedule) if task.name == "left_done"]
        if K < 1000:
            assert (schedule.early, at) == (0, [])
            continue
        assert max(1024, K // 8) + 512 >= K - schedule.early > 0
        assert [schedule.tasks[place].numbers for place in at] == [(schedule.early,)]
        number = [step.j1 for step in schedule.steps].index(schedule.early)
        if "tracked" in kind:
            part = schedule.parts[number + SETTLED]
            assert part.start <= at[0] < part.stop
        assert not Schedule(m, n, staged=True, **kind).early


# -- parts --


def flaws_of(schedule: Schedule) -> set[str]:
    """Why parts cannot be queued, and recorded, as they say: a part that is recorded is entered from the caller's
    stream, joined to it at its end, and waits for nothing that another part has recorded."""
    tasks, flaws = schedule.tasks, set()
    edges = [schedule.prefix, *(part.stop for part in schedule.parts)]
    if [*(part.start for part in schedule.parts), len(tasks)] != edges:
        flaws.add("tasks between parts")
    if len(schedule.parts) != (len(schedule.steps) + 1 if schedule.tracked else 1):
        flaws.add("not a part for each step")
    of_prefix = {task.numbers[0] for task in tasks[: schedule.prefix] if task.name == "record"}
    in_order: set[int] = set()  # of parts that are not whole
    loose: set[str] = set()  # streams whose last task the caller's does not wait for
    for part in schedule.parts:
        if part.whole and loose:
            flaws.add("not joined before")
        inside = set(LANES) if loose else {MAIN}
        recorded: dict[int, str] = {}
        ends: dict[str, int] = {}
        for lane, name, numbers in tasks[part.start : part.stop]:
            if name == "wait":
                (event,) = numbers
                if event in recorded:
                    inside.add(lane)
                elif event not in (of_prefix if part.whole else of_prefix | in_order):
                    flaws.add("waits for another part")
                if lane == MAIN and ends.get(recorded.get(event)) == event:
                    loose.discard(recorded[event])
            if lane not in inside:
                flaws.add("not entered")
            if lane != MAIN:
                loose.add(lane)
            ends.pop(lane, None)
            if name == "record":
                recorded[numbers[0]], ends[lane] = lane, numbers[0]
        if part.whole and loose:
            flaws.add("not joined behind")
        if not part.whole:
            in_order |= set(recorded)
    return flaws


def schedules() -> list[Schedule]:
    """Of all kinds that are recorded."""
    cases = [(m, n, steps_of(m, n), None) for m, n in [*BIG, (30000, 30000), (14000, 30000)]]
    cases += [(m, n, wide_steps(m, n, w), c) for m, n in SHAPES for w in WIDTHS for c in (100, n)]
    cases.append((1400, 1600, wide_steps(1400, 1600, 512, 128, 256, 128, 128, 256), 200))
    kinds = [{"encoded": False}, {}, {"checked": True}, {"checked": True, "tracked": True}]
    kinds.append({**kinds[-1], "in_place": True})
    return [Schedule(m, n, steps=steps, chunk=chunk, **kind) for m, n, steps, chunk in cases for kind in kinds]


def test_parts_are_queued_and_recorded_as_they_say():
    for schedule in schedules():
        assert not flaws_of(schedule), (schedule.m, schedule.n, schedule.steps, schedule.chunk)


def test_parts_are_whole_but_where_products_in_chunks_run_on_beside_panels():
    for schedule in schedules():
        wide = [step for step in schedule.steps[1:] if step.width > PANEL]
        run_on = schedule.tracked and schedule.chunk < schedule.n and wide
        assert all(part.whole for part in schedule.parts) == (not run_on)


def test_each_step_has_a_part_which_judges_it_and_factors_the_next_panels():
    for schedule in schedules():
        tasks, steps, parts = schedule.tasks, schedule.steps, schedule.parts
        for step, part in zip(steps, parts, strict=False) if schedule.tracked else ():
            checks = [t for t in tasks[part.start : part.stop] if t.name in ("keep_sums", "judge_step")]
            assert checks == [Task(CHECKS, "keep_sums", (step.j,)), Task(CHECKS, "judge_step", (step.j, step.width))]
        for number, (step, panels) in enumerate(zip(steps, schedule.panels, strict=True)):
            part = parts[max(0, number - 1)] if schedule.tracked else parts[0]
            assert part.start <= panels.start < panels.stop <= part.stop
            assert [t.numbers for t in tasks[panels] if t.name == "panel"] == step.panels
        assert parts[-1].start <= schedule.certificate.start < schedule.certificate.stop == parts[-1].stop


def changed(schedule: Schedule, place: int, *tasks: Task) -> Schedule:
    """With other tasks, or none, in place of one."""
    found, more = copy.copy(schedule), len(tasks) - 1
    found.tasks = [*schedule.tasks[:place], *tasks, *schedule.tasks[place + 1 :]]
    edges = [(p, p.start + more * (p.start > place), p.stop + more * (p.stop > place)) for p in schedule.parts]
    found.parts = [part._replace(start=start, stop=stop) for part, start, stop in edges]
    return found


def spoiled(schedule: Schedule):
    """What is wrong, and the schedule with that."""
    tasks, waited = schedule.tasks, {t.numbers[0] for t in schedule if t.name == "wait"}
    of_graphs = [t.numbers[0] for p in schedule.parts if p.whole for t in tasks[p.start : p.stop] if t.name == "record"]
    lane_of = {t.numbers[0]: t.lane for t in schedule if t.name == "record"}
    for number, part in enumerate(schedule.parts):
        inside = {t.numbers[0] for t in tasks[part.start : part.stop] if t.name == "record"}
        elsewhere = next(event for event in of_graphs if event not in inside)
        for place in range(part.start, part.stop):
            task = tasks[place]
            if task.name == "record" and task.numbers[0] in waited:
                yield f"without {task}", changed(schedule, place)
            if task.name == "wait":
                yield f"for another part: {task}", changed(schedule, place, task._replace(numbers=(elsewhere,)))
                later = [t.numbers[0] for t in tasks[place + 1 : part.stop] if (t.lane, t.name) == (MAIN, "wait")]
                if task.lane == MAIN and lane_of[task.numbers[0]] not in [lane_of[event] for event in later]:
                    yield f"not joined: {task}", changed(schedule, place)
        last = part.stop - 1
        for lane in LANES[1:] if part.whole else ():
            yield f"not joined at the end: {lane}", changed(schedule, last, tasks[last], Task(lane, "update"))
        for lane in {t.lane for t in tasks[part.start : part.stop]} - {MAIN} if part.whole or not number else ():
            found = copy.copy(schedule)
            waits = [part.start <= at < part.stop and (t.lane, t.name) == (lane, "wait") for at, t in enumerate(tasks)]
            found.tasks = [Task(lane, "update") if wait else t for t, wait in zip(tasks, waits, strict=True)]
            yield f"not entered: {lane}", found
        for parts in ([], [part._replace(stop=part.stop - 1)]):
            found = copy.copy(schedule)
            found.parts = [*schedule.parts[:number], *parts, *schedule.parts[number + 1 :]]
            yield f"tasks are left out of part {number}", found
        if not part.whole:
            found = copy.copy(schedule)
            found.parts = [p._replace(whole=p.whole or p == part) for p in schedule.parts]
            yield f"part {number} is not whole", found


@pytest.mark.parametrize("chunk", [200, 1500])
def test_flaws_of_parts_are_found(chunk):
    steps = [Step(0, 128), Step(128, 512), Step(512, 1024), Step(1024, 1152), Step(1152, 1280)]
    schedule = Schedule(1280, 1500, checked=True, tracked=True, steps=steps, chunk=chunk)
    assert not flaws_of(schedule)
    for why, wrong in spoiled(schedule):
        assert flaws_of(wrong), why


# -- a factorisation that begins again --

SHAPES_AGAIN = [
    *[(700, 700, [128]), (900, 520, [128]), (420, 800, [128]), (400, 300, [128]), (900, 900, [256])],
    *[(1000, 700, [256]), (600, 800, [256]), (1150, 1200, [512]), (900, 1000, [256, 128, 256, 128, 128])],
]
CHUNKED, GRAPHS, STAGED = "chunked", "graphs", "staged"
KINDS_AGAIN = [(), (GRAPHS,), (CHUNKED,), (CHUNKED, GRAPHS), (STAGED,)]  # an odd number: each comes with both delays


@pytest.mark.parametrize(("m", "n", "widths"), SHAPES_AGAIN)
def test_a_factorisation_begins_again_at_a_step(m, n, widths):
    A, steps = np.random.default_rng(m).standard_normal((m, n)), wide_steps(m, n, *widths)
    cases = [(number, done) for number in range(len(steps)) for done in (1, 2) if number + done <= len(steps)]
    kinds = itertools.cycle(KINDS_AGAIN)
    for seed, ((number, done), kind) in enumerate(zip(cases, kinds, strict=False)):
        j, chunk, graphs = steps[number].j, 200 if CHUNKED in kind else n, GRAPHS in kind
        schedule = Schedule(m, n, checked=True, tracked=True, staged=STAGED in kind, steps=steps, chunk=chunk)
        prefix, machine = schedule.tasks[: schedule.prefix], Machine(A, schedule, np.random.default_rng(seed))
        with np.errstate(all="ignore"):
            machine.run([*prefix, *queued(schedule, 0, number, graphs=graphs)])
            machine.W[j, j] += 1.0
            machine.run(queued(schedule, number, number + done, graphs=graphs))
            before = np.array(machine.residuals)
            if number:
                machine.take_back(number)
                first = alone(schedule.tasks[schedule.panels[number]])
            else:
                first = prefix
            machine.run([*first, *queued(schedule, number, graphs=graphs)])
        assert len(before) == 2 * (number + done)
        assert (before[: 2 * number] < 1e-9).all()
        assert max(before[2 * number :][:2]) > 1e-3
        again = machine.residuals[len(before) :]
        assert len(again) == 2 * (len(steps) - number) + 4
        assert np.max(again) < 1e-9
        assert error_of_factors(machine) < 1e-9


def test_finished_factors_are_verified_again_alone():
    A = np.random.default_rng(0).standard_normal((600, 500))
    schedule = Schedule(600, 500, checked=True, tracked=True, steps=wide_steps(600, 500, 256))
    machine = Machine(A, schedule, np.random.default_rng(0))
    machine.run(schedule.tasks)
    for change, agree in ((0.0, True), (1.0, False), (-1.0, True)):
        machine.W[400, 300] += change
        machine.residuals = []
        machine.run(alone(schedule.tasks[schedule.certificate]))
        assert len(machine.residuals) == 4
        assert (np.max(machine.residuals) < 1e-9) == agree


# -- what a hook sees --


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_hook_sees_the_stages_in_order(m, n, width):
    A, steps = np.random.default_rng(n).standard_normal((m, n)), wide_steps(m, n, width)
    for seed, how in enumerate(({}, {"checked": True}, {"checked": True, "tracked": True})):
        expected = [("encoded",)]
        for step in steps:
            solved = ("swapped", "solved") if step.j1 < n else ()
            expected += [(name, *step) for name in ("panel", *solved, "updated")]
        expected.append(("finished" if how else "factored",))
        schedule = Schedule(m, n, staged=True, steps=steps, **how)
        machine = Machine(A, schedule, np.random.default_rng(seed))
        with np.errstate(all="ignore"):
            machine.run(schedule.tasks)
        assert machine.stages == expected
